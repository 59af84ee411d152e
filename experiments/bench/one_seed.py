"""A sweep over rates on one seed, against as many points of which each has a seed of its own.

    python -m experiments.bench.one_seed

Points of one seed have the same cohorts and batches, which are drawn and gathered once.  Both
sweeps take the same steps on rows of the same shapes, in turns in one process, and only the ratio
means anything.  A row is a workload: medians of the turns, after one that compiles.
"""

import json
import pathlib
import statistics
import subprocess
import time

import jax
import numpy as np

import jfl
from jfl.runs.checkpoint import environment

RESULTS = pathlib.Path(__file__).parents[1] / "results" / "one_seed.json"
POINTS, TURNS = 8, 7
# clients, cohort, rows of each, features, classes, batch, local steps, rounds, noise
WORKLOADS = {
    "no noise": (100, 20, 4000, 40, 10, 800, 50, 3, None),
    "noise for examples": (100, 20, 4000, 40, 10, 800, 50, 3, 60.0),
    "noise for examples, small batches of images": (100, 10, 600, 784, 10, 10, 100, 3, 6.0),
}


def make_plan(shape, noise):
    """A function of a rate."""
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
    """Seconds of both sweeps, in turns."""
    rates = [0.01 * 2**k for k in range(POINTS)]
    plans = {lr: plan(lr) for lr in rates}
    points = {
        "one seed": [dict(lr=lr, seed=0) for lr in rates],
        "own seeds": [dict(lr=lr, seed=i) for i, lr in enumerate(rates)],
    }
    seconds = {name: [] for name in points}
    for turn in range(TURNS + 1):
        for name, given in points.items():
            begun = time.perf_counter()
            found = jfl.sweep(
                lambda lr: plans[lr], rounds=rounds, evaluate_every=rounds, points=given
            )
            jax.block_until_ready(found.params)
            if turn:
                seconds[name].append(time.perf_counter() - begun)
    ratios = [a / b for a, b in zip(*seconds.values())]
    return dict(
        {f"seconds, {n}": round(statistics.median(s), 3) for n, s in seconds.items()},
        ratio=round(statistics.median(ratios), 3),
        quartiles=[round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
    )


def main():
    rows = []
    for name, (*shape, rounds, noise) in WORKLOADS.items():
        rows.append(dict(workload=name, points=POINTS, **measure(make_plan(shape, noise), rounds)))
        print(json.dumps(rows[-1]), flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=RESULTS.parent,
        capture_output=True,
        text=True,
    ).stdout.strip()
    about = dict(versions=environment(), turns=TURNS, commit=commit)
    RESULTS.write_text(json.dumps(dict(about=about, rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
