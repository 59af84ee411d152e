"""The demo: what privacy costs on real handwritten digits held by fifty clients.  Written to be copied from."""
import time

import numpy as np

from . import algorithms, batches, models, sampling
from .data import datasets, partition
from .data.federation import federate
from .local import grad, private_grad
from .plan import plan
from .privacy.mechanism import chain
from .privacy.stages import clip_l2, divide, gaussian, total
from .report import compile_seconds
from .sweep import sweep

CLIENTS, DELTA = 50, 1e-3


def settings():
    """-> federation's partition, and (name, make_plan, axes, rounds) of each part of the demo."""
    split = partition.dirichlet(clients=CLIENTS, alpha=0.3, min_rows=16)
    fed = federate(datasets.digits(), split)
    everyone = sampling.full(CLIENTS)

    def without_privacy(lr):
        task = models.mlp(fed, hidden=(64,))
        alg = algorithms.fedavg(grad(task.loss), lr=lr, steps=10, batch=batches.without_replacement(16))
        return plan(fed, task, alg, sampling.without_replacement(CLIENTS, 20))

    linear = models.logistic(fed)

    def record_level(noise_multiplier):
        """Noise in every local step: protects one example, also against the server."""
        mechanism = chain(clip_l2(1.0), total(), gaussian(noise_multiplier), divide(8))
        alg = algorithms.fedavg(private_grad(linear.loss, mechanism), lr=2.0, steps=1,
                                batch=batches.without_replacement(8))
        return plan(fed, linear, alg, everyone)

    def client_level(noise_multiplier):
        """Noise on the aggregate: protects a whole client, against those who see models only."""
        release = chain(clip_l2(2.0), total(), gaussian(noise_multiplier), divide(CLIENTS))
        alg = algorithms.fedavg(grad(linear.loss), lr=1.0, steps=5, batch=batches.without_replacement(16))
        return plan(fed, linear, alg, everyone, release=release)

    return split, [("FedAvg", without_privacy, dict(lr=[0.5]), 80),
                   ("record-level DP-FedAvg", record_level, dict(noise_multiplier=[1.0, 2.0]), 40),
                   ("client-level DP-FedAvg", client_level, dict(noise_multiplier=[1.0, 2.0]), 20)]


def run(advance=lambda name: None, rounds: int | None = None, seeds: int = 3):
    """Run every part as one vmapped sweep -> partition, list of dicts with the sweep and its seconds."""
    split, parts = settings()
    out = []
    for name, make_plan, axes, length in parts:
        begun, compiled = time.perf_counter(), compile_seconds()
        result = sweep(make_plan, seed=range(seeds), rounds=rounds or length, **axes)
        (axis, values), = axes.items()
        for value in values:
            at = [i for i, p in enumerate(result.points) if p[axis] == value]
            out.append(dict(name=name, axis=axis, value=value, rounds=rounds or length, points=at, sweep=result,
                            plan=result.plans[at[0]], seconds=float(result.seconds[at].sum()),
                            compile=(compile_seconds() - compiled) / len(values),
                            accuracy=np.asarray(result.metrics.accuracy)[at]))
        advance(f"{name} ({time.perf_counter() - begun:.0f} s)")
    return split, out
