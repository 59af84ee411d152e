"""What the first result costs: importing, tracing, lowering, compiling, running, and how many XLA
programs.

    JFL_DATA_DIR=... python experiments/bench/first_result.py [--repeats 3] [--python after=PATH
    before=PATH] [--out FILE]

ten  the README's ten lines, to the printed guarantee
W1   record-level DP-FedAvg on MNIST (see round.py): federation, plan, init, first round

Every run is a process of its own without a compilation cache, and --python runs several
environments in turn, so that a busy machine slows all alike; figures are medians.  CPU seconds
depend less on who else uses the machine than those by the clock.  Without MNIST, W1 takes random
pixels: what is compiled depends on shapes alone.
"""

import argparse
import ast
import collections
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
WORKLOADS = ("ten", "W1")


class Clock:
    """Wall and CPU seconds since it was made."""

    def __init__(self):
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict:
        return dict(wall=time.perf_counter() - self.wall, cpu=time.process_time() - self.cpu)


def ten_lines() -> str:
    """The README's first Python block."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert found is not None
    return found[1]


def statements(source: str):
    """(a name for people, a function that runs it) of each statement; they share a namespace."""
    space: dict = {}
    for node in ast.parse(source).body:
        code = compile(ast.Module([node], []), "README.md", "exec")
        yield ast.unparse(node).split("(")[0][:40], lambda code=code: exec(code, space)


def first_round(rows):
    """W1 by jfl's public names, which all versions have."""
    import jax
    import numpy as np

    import jfl

    state = {}
    owned = lambda labels: np.arange(60_000).reshape(100, 600)
    data = rows.x.reshape(60_000, 784), rows.y.reshape(60_000)

    def plan():
        fed = state["fed"]
        task = jfl.models.logistic(fed)
        noise = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(0.5), jfl.divide(10))
        fedavg = jfl.algorithms.fedavg(
            jfl.private_grad(task.loss, noise),
            lr=0.1,
            steps=5,
            batch=jfl.batches.without_replacement(10),
        )
        return jfl.plan(fed, task, fedavg, jfl.sampling.without_replacement(100, 10))

    test = tuple(part[::600] for part in data)
    yield "federation", lambda: state.update(fed=jfl.federate((*data, *test), owned))
    yield "plan", lambda: state.update(plan=plan())
    yield "init", lambda: state.update(run=jfl.init(jax.random.key(0), state["plan"]))
    yield (
        "first round",
        lambda: jax.block_until_ready(jax.jit(jfl.run_round)(state["run"], state["plan"])),
    )


def pixels():
    """MNIST's training rows as 100 clients of 600; random ones where it is not there."""
    from types import SimpleNamespace

    import numpy as np

    import jfl

    try:
        data = jfl.datasets.mnist()
        x, y = np.asarray(data.x).reshape(-1, 784), np.asarray(data.y)
    except ValueError:
        rng = np.random.default_rng(0)
        x = rng.random((60_000, 784), np.float32)
        y = rng.integers(0, 10, 60_000).astype(np.int32)
    return SimpleNamespace(x=x.reshape(100, 600, 784), y=y.reshape(100, 600))


def measure(workload: str) -> dict:
    """One workload in this process."""
    clock = Clock()
    import jax

    import jfl

    for room in ("datasets", "partition", "models", "algorithms", "batches", "sampling"):
        getattr(jfl, room)
    for function in ("plan", "simulate", "guarantee", "private_grad", "federate"):
        getattr(jfl, function)
    imported = clock.read()
    seconds: Any = collections.Counter()
    programs = collections.Counter()

    def listen(event, duration, **about):
        if event in PHASES:
            seconds[PHASES[event]] += duration
            if PHASES[event] == "compile":
                programs[about.get("fun_name", "?")] += 1

    steps = list(statements(ten_lines()) if workload == "ten" else first_round(pixels()))
    monitoring: Any = jax.monitoring  # whose type asks for one more form of a listener
    monitoring.register_event_duration_secs_listener(listen)
    whole, each = Clock(), {}
    for name, step in steps:
        clock = Clock()
        step()
        each[name] = clock.read()["cpu"]
    total = whole.read()
    return dict(
        workload=workload,
        import_wall=imported["wall"],
        import_cpu=imported["cpu"],
        **total,
        **{phase: seconds[phase] for phase in PHASES.values()},
        run_and_python=total["wall"] - sum(seconds.values()),
        programs=sum(programs.values()),
        names=dict(programs),
        cpu_of={k: v for k, v in each.items() if v > 0.01},
    )


def child(python: str, workload: str) -> dict:
    """One workload in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [python, __file__, "--child", workload],
        capture_output=True,
        text=True,
        env=environment | dict(JAX_ENABLE_COMPILATION_CACHE="false"),
        timeout=900,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def median(rows: list[dict]) -> dict:
    """The median of every number; what is no number as in the last row."""
    return {
        key: statistics.median(row[key] for row in rows) if isinstance(value, float) else value
        for key, value in rows[-1].items()
    }


def commit_of(python: str) -> str:
    """The commit of the checkout that an environment imports jfl from."""
    # -P: the folder this is run from is not that environment's
    where = subprocess.run(
        [python, "-P", "-c", "import jfl; print(jfl.__path__[0])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=where, capture_output=True, text=True
    ).stdout.strip()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--python", nargs="+", default=[f"jfl={sys.executable}"])
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the rows")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child)))
        return
    environments = dict(pair.split("=", 1) for pair in args.python)
    rows = []
    for workload in args.only:
        taken = {name: [] for name in environments}
        for _ in range(args.repeats):
            for name, python in environments.items():
                taken[name].append(child(python, workload))
        for name, python in environments.items():
            row = dict(environment=name) | median(taken[name])
            print(json.dumps(row, indent=1), flush=True)
            about = dict(
                repeats=args.repeats,
                device="cpu",
                cores=os.cpu_count(),
                load=os.getloadavg()[0],
                commit=commit_of(python),
                python=platform.python_version(),
                versions={n: importlib.metadata.version(n) for n in ("jax", "jaxlib", "numpy")},
            )
            rows.append(row | about)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
