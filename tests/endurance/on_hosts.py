"""What test_hosts.py runs in each of several processes.

    python tests/endurance/on_hosts.py PROCESSES PROCESS PORT NAME...

Process 0 prints a JSON line of results for each case.
"""

import importlib
import json
import sys
from pathlib import Path

import jax
import numpy as np

import jfl

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script of its own: tests/ is not on the path

from helpers.problems import flat, make_federation, noisy_grad, on_host, squared, start_params


def results(names, mesh=None):
    """Of a run with rows on the device (fedavg), and of two whose clients remember: with rows on
    the host (scaffold), and with rows and states on the devices (states)."""
    fed, even = make_federation(), make_federation(sizes=[3, 5, 8, 4, 6, 9, 5, 4])
    for name in names:
        kind, rows = dict(
            fedavg=("fedavg", fed), scaffold=("scaffold", on_host(fed)), states=("scaffold", even)
        )[name]
        algorithm = getattr(jfl.algorithms, kind)(
            noisy_grad(), lr=0.3, steps=2, batch=jfl.batches.without_replacement(3)
        )
        plan = jfl.plan(
            rows,
            jfl.task(start_params(), squared),
            algorithm,
            jfl.sampling.without_replacement(len(rows.size), 5),
        )
        first = jfl.simulate(jax.random.key(0), plan, 2, evaluate_every=2, mesh=mesh)
        out = jfl.simulate(jax.random.key(0), plan, 2, evaluate_every=1, mesh=mesh, start=first.run)
        yield name, flat((out.params, out.metrics.loss, out.run.client_states))


def grid(mesh=None, memory=None):
    """Of a sweep whose points do not fit at once; `memory` is what this process's device has."""
    if memory is not None:
        sweeps = importlib.import_module("jfl.engine.sweep")  # a function has its name
        sweeps.device_memory = lambda share: share * memory
    fed, task = make_federation(), jfl.task(start_params(), squared)
    algorithm = lambda lr: jfl.algorithms.fedavg(
        grad, lr=lr, steps=1, batch=jfl.batches.without_replacement(3)
    )
    grad, lines = noisy_grad(), []
    out = jfl.sweep(
        lambda lr: jfl.plan(fed, task, algorithm(lr), jfl.sampling.full(7)),
        rounds=1,
        lr=[0.1 * i for i in range(1, 13)],
        mesh=mesh,
        watch=lines.append,
    )
    return lines, flat(out.params)


def main(processes, process, port, *names):
    jfl.mesh.connect(f"127.0.0.1:{port}", int(processes), int(process))
    assert jax.process_count() == int(processes) == len(jax.devices())
    plan = jfl.plan(
        make_federation(),
        jfl.task(start_params(), squared),
        jfl.algorithms.fedavg(noisy_grad(), lr=0.3, batch=jfl.batches.without_replacement(3)),
        jfl.sampling.full(7),
    )
    if names == ("apart",):
        jfl.simulate(jax.random.key(int(process)), plan, 2, mesh="auto")
    if names == ("sweep apart",):
        jfl.sweep(lambda: plan, seed=[0, int(process)], rounds=2, mesh="auto")
    if names == ("sweep",):
        lines, values = grid("auto", 6e3 if process == "0" else 1e5)
        print(json.dumps(dict(name=lines, values=values.tolist())), flush=True)
        return
    for name, values in results(names, "auto"):
        if jfl.mesh.is_lead_process():
            print(json.dumps(dict(name=name, values=np.asarray(values).tolist())), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
