"""Infer membership in trainings on digits, with and without noise.

    python -m experiments.bench.membership [--shadows 1024] [--out FILE]

Ten clients with 20 rows each train a logistic model in 10 rounds of 10 full-batch steps.  With
noise, it is in each step.  A row of the result has one attack at one false-positive rate, and the
seconds of the audit, by the clock and of all processors, with compilation.
"""

import time
from pathlib import Path

import numpy as np

import jfl

from . import timing

RESULTS = timing.RESULTS / "audits_of_membership.json"
CLIENTS, ROWS, ROUNDS = 10, 20, 10


def training(noise):
    """Return the plan with this noise multiplier; None adds no noise."""
    digits, size = jfl.datasets.digits(), CLIENTS * ROWS
    rows = digits.x[:size], digits.y[:size], digits.x_test, digits.y_test
    fed = jfl.federate(jfl.datasets.arrays(*rows), jfl.partition.iid(CLIENTS))
    task = jfl.models.logistic(fed)
    grad = jfl.grad(task.loss)
    if noise is not None:
        stages = jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(noise), jfl.divide(float(ROWS))
        grad = jfl.private_grad(task.loss, jfl.chain(*stages, adjacency="add_remove"))
    fedavg = jfl.algorithms.fedavg(grad, steps=10, lr=1.0, batch=jfl.batches.full())
    return jfl.plan(fed, task, fedavg, jfl.sampling.full(CLIENTS))


def main():
    parser = timing.parser(__doc__)
    parser.add_argument("--shadows", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows, begun = [], time.perf_counter()
    for noise in (None, 1.0, 10.0):
        before = np.array([time.perf_counter(), time.process_time()])
        found = jfl.audit_membership(training(noise), ROUNDS, args.shadows)
        spent = np.array([time.perf_counter(), time.process_time()]) - before
        epsilon = found.proved.epsilon if noise and found.proved else None
        shared = dict(noise=noise, shadows=args.shadows, epsilon=epsilon)
        shared |= dict(contradicted=found.contradicted)
        shared |= dict(zip(("seconds", "processor_seconds"), spent.tolist(), strict=True))
        print(f"noise {noise}, seconds {spent}", found, sep="\n", flush=True)
        for attack in found.attacks:
            columns = found.fpr, attack.tpr, attack.interval, attack.tpr_bound, found.allowed
            names = "fpr", "tpr", "interval", "bound", "allowed"
            areas = dict(auroc=attack.auroc, auroc_bound=attack.auroc_bound)
            for values in zip(*(column.tolist() for column in columns), strict=True):
                rates = dict(zip(names, values, strict=True))
                rows.append(dict(shared, attack=attack.name, **areas, **rates))
    timing.save(args.out, rows, confidence=0.95, seconds=time.perf_counter() - begun)


if __name__ == "__main__":
    main()
