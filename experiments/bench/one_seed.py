"""Time a sweep over rates on one seed, against one whose points have separate seeds.

    python -m experiments.bench.one_seed

Points of one seed have the same cohorts and batches, which are drawn and gathered once.  Both
sweeps take the same steps on rows of the same shapes, alternately in one process, and only the
ratio is meaningful.  A row is a workload: medians of the turns, after one that compiles.
"""

import json

import jax
import numpy as np

import jfl

from . import timing

RESULTS = timing.RESULTS / "one_seed.json"
POINTS, TURNS = 8, 7
# clients, cohort, rows of each, features, classes, batch, local steps, rounds, noise
WORKLOADS = {
    "no noise": (100, 20, 4000, 40, 10, 800, 50, 3, None),
    "noise for examples": (100, 20, 4000, 40, 10, 800, 50, 3, 60.0),
    "noise for examples, small batches of images": (100, 10, 600, 784, 10, 10, 100, 3, 6.0),
}


def make_plan(shape, noise):
    """Return a function of a rate."""
    clients, cohort, rows, features, classes, batch, steps = shape
    random = np.random.default_rng(0)
    own = lambda: (
        random.normal(size=(rows, features)).astype(np.float32) / features**0.5,
        random.integers(0, classes, rows).astype(np.int32),
    )
    fed = jfl.federate([own() for _ in range(clients)], classes=classes, test=own())
    task, take = jfl.models.logistic(fed), jfl.batches.without_replacement(batch)
    grad = jfl.grad(task.loss)
    if noise is not None:
        chain = jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(noise), jfl.divide(batch)
        grad = jfl.private_grad(task.loss, jfl.chain(*chain, adjacency="replace_one"))
    sampler = jfl.sampling.without_replacement(clients, cohort)

    def plan(lr):
        algorithm = jfl.algorithms.fedavg(grad, lr=lr, steps=steps, batch=take)
        return jfl.plan(fed, task, algorithm, sampler)

    return plan


def measure(plan, rounds) -> dict:
    """Time both sweeps alternately; the ratio is of one seed to separate seeds."""
    rates = [0.01 * 2**k for k in range(POINTS)]
    plans = {lr: plan(lr) for lr in rates}

    def sweep(points):
        found = jfl.sweep(lambda lr: plans[lr], rounds=rounds, evaluate_every=rounds, points=points)
        jax.block_until_ready(found.params)

    found = timing.alternate(
        {
            "own seeds": lambda: sweep([dict(lr=lr, seed=i) for i, lr in enumerate(rates)]),
            "one seed": lambda: sweep([dict(lr=lr, seed=0) for lr in rates]),
        },
        TURNS,
    )
    seconds = {f"seconds, {name}": one["seconds"] for name, one in found.items()}
    return seconds | dict(ratio=found["one seed"]["ratio"])


def main():
    rows = []
    for name, (*shape, rounds, noise) in WORKLOADS.items():
        rows.append(dict(workload=name, points=POINTS, **measure(make_plan(shape, noise), rounds)))
        print(json.dumps(rows[-1]), flush=True)
    timing.save(RESULTS, rows, turns=TURNS)


if __name__ == "__main__":
    main()
