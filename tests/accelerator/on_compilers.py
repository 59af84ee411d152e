"""What test_compiled_programs.py compiles, in a process of its own: the flags and the cache of the
other tests would change the programs.

    python tests/accelerator/on_compilers.py

Reads requests from its input, one JSON object a line, and answers each with a line: a row as of
`experiments.bench.aot`, or {"error": ...}.

    {"case": "algorithm scaffold", "target": "v5e", "devices": 8}
    {"workload": "W1", "modes": ["private"], "target": "h200", "points": 64}
"""

import json
import sys
from pathlib import Path

import jax
from jax.errors import JaxRuntimeError

import jfl

sys.path.insert(0, str(Path(__file__).parents[2]))  # a script of its own
sys.path.insert(1, str(Path(__file__).parents[1]))

from helpers.problems import make_algorithm, make_federation

from experiments.bench.ahead_of_time import machines, report, workloads

FED = make_federation(classes=3)
CLIENTS = len(FED.size)
TASK = jfl.models.logistic(FED)
PARAMS = jax.eval_shape(TASK.init, jax.eval_shape(lambda: jax.random.key(0)))
STEPS = 4


def chain(clip=None, noise=None, divisor=None):
    """A private sum of gradients or uploads."""
    clip, noise = clip or jfl.clip_l2(0.8), noise or jfl.gaussian(1.1)
    after = () if divisor is None else (jfl.divide(divisor),)
    return jfl.chain(clip, jfl.total(), noise, *after)


def plan(name="fedavg", rows=None, batch=None, sampler=None, **sites):
    """A softmax regression; noise in every local step, if it is not on an upload or the release."""
    private = not {"upload", "release"} & set(sites)
    grad = jfl.grad(TASK.loss)
    if private:
        grad = jfl.private_grad(TASK.loss, rows or chain(divisor=3))
    algorithm = make_algorithm(name, grad, steps=STEPS, batch=batch)
    sampler = sampler or jfl.sampling.without_replacement(CLIENTS, 4)
    return jfl.plan(FED, TASK, algorithm, sampler, **sites)


def wavelet(bands, clip=None):
    """Noise shaped by bands."""
    shape = jfl.wavelet.ellipsoid(bands)
    return chain(clip or jfl.wavelet.clip_ellipsoid(0.8, shape), jfl.gaussian(1.1, shape=shape), 3)


NOISES = {
    "gaussian": lambda: plan(),
    "of the key's generator": lambda: plan(
        rows=chain(noise=jfl.gaussian(1.1, generator="key"), divisor=3)
    ),
    "none, clipped": lambda: plan(rows=jfl.chain(jfl.clip_l2(0.8), jfl.total(), jfl.divide(3))),
    "of a round": lambda: plan(
        rows=chain(noise=jfl.gaussian(jfl.schedules.inverse_sqrt(1.1)), divisor=3)
    ),
    "per layer": lambda: plan(rows=chain(jfl.clip_per_layer(0.8, layers=2), divisor=3)),
    "wavelet": lambda: plan(rows=wavelet(jfl.bands.flat(PARAMS))),
    "wavelet per layer": lambda: plan(rows=wavelet(jfl.bands.per_layer(PARAMS))),
    "on uploads": lambda: plan(upload=chain()),
    "on the release": lambda: plan(release=chain(divisor=4)),
    "adaptive clip": lambda: plan(release=chain(jfl.clip_adaptive(0.8, 4), divisor=4)),
}
SAMPLERS = dict(
    full=lambda: jfl.sampling.full(CLIENTS),
    without_replacement=lambda: jfl.sampling.without_replacement(CLIENTS, 4),
    with_replacement=lambda: jfl.sampling.with_replacement(CLIENTS, 4),
    poisson=lambda: jfl.sampling.poisson(CLIENTS, 0.5),
    first_responders=lambda: jfl.sampling.first_responders(CLIENTS, 4, latency_spread=3.0),
)
BATCHES = dict(
    full=jfl.batches.full,
    without_replacement=lambda: jfl.batches.without_replacement(3),
    with_replacement=lambda: jfl.batches.with_replacement(3),
    poisson=lambda: jfl.batches.poisson(2.0, capacity=9),
    epochs=lambda: jfl.batches.epochs(3),
)
CASES = (
    {f"algorithm {name}": lambda name=name: plan(name) for name in jfl.algorithms.__all__}
    | {f"noise {name}": make for name, make in NOISES.items()}
    | {f"cohort {name}": lambda make=make: plan(sampler=make()) for name, make in SAMPLERS.items()}
    | {f"batch {name}": lambda make=make: plan(batch=make()) for name, make in BATCHES.items()}
)


def answer(target, devices=1, case=None, workload=None, modes=(), points=0, **numbers) -> dict:
    """The row of a request."""
    if case is not None:
        return report.run(CASES[case](), target, devices=devices).row()
    made = workloads.workload(workload, modes, **numbers)
    if not points:
        return report.run(made.plan, target, devices=devices).row()
    other = workloads.workload(workload, modes, **numbers | dict(noise=2.0, lr=0.2))
    return report.grid([made.plan, other.plan], target, points=points, devices=devices).row()


def main():
    jax.config.update("jax_platforms", "cpu")
    for line in sys.stdin:
        try:
            said = answer(**json.loads(line))
        except (ValueError, machines.MissingCompiler, JaxRuntimeError) as error:
            said = dict(error=f"{type(error).__name__}: {str(error)[:2000]}")
        print("row " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
