"""Define a run of Chen et al. (2024) that meets the hypotheses of its theorems, and measure it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import jfl
from jfl.analysis import heterogeneity
from jfl.core import pytrees

from ...harness import objectives
from .. import as_printed, rates
from . import theory


class Problem(NamedTuple):
    """A strongly convex problem, and runs of it.

    Attributes:
        plan: (noise multipliers, or None for no noise; algorithm, its options) -> a plan.
        noise: the multipliers that reach the epsilon by the paper's accountant.
        known: the constants that are known before a run, with this noise.
        best: the optimum.
        batch: rows of a local step.
    """

    plan: Callable
    noise: Any
    known: theory.Constants
    best: objectives.Optimum
    batch: int


def problem(
    dataset="adult",
    clients=50,
    per_round=10,
    steps=10,
    batch=10,
    min_rows=100,
    l2=0.05,
    epsilon=0.3,
    rounds=200,
):
    """Return a problem and its runs under the assumptions of the theorems.

    An algorithm without other learning rates has those of Theorem 1.

    Rows have norm 1, so gradients of softmax regression with a bias have norm at most 2: a clip of
    2 is never active, and the noise protects although the gradients are unbiased.
    """
    data = jfl.transforms.unit_norm(jfl.transforms.flatten(getattr(jfl.datasets, dataset)()))
    fed = jfl.federate(data, jfl.partition.dirichlet(clients, 0.3, min_rows=min_rows))
    task, clip = jfl.models.logistic(fed), 2.0
    big = float(objectives.smoothness(fed, l2=l2).max())

    def plan(noise, algorithm="dpnfl", lr=None, **options):
        grad = jfl.grad(task.loss, l2=l2)
        if noise is not None:
            stages = jfl.clip_l2(clip), jfl.total(), jfl.gaussian(noise), jfl.divide(batch)
            grad = jfl.private_grad(task.loss, jfl.chain(*stages), l2=l2)
        make = getattr(jfl.algorithms, algorithm)(
            grad,
            steps=steps,
            lr=rates.theory_rounds(l2, big, steps) if lr is None else lr,
            batch=jfl.batches.without_replacement(batch),
            **options,
        )
        sampler = jfl.sampling.without_replacement(clients, per_round)
        return jfl.plan(fed, task, make, sampler, weights="size")

    noise: Any = as_printed.calibrate(
        plan(1.0), epsilon=epsilon, delta=1e-2, rounds=rounds, paper="chen2024"
    )
    gap = objectives.objective_gap(task, fed, l2)
    p = heterogeneity.client_weights(fed)
    dim = pytrees.size(task.init(jax.random.key(0)))
    noise_2 = dim * float(p @ (noise * 2 * clip / batch) ** 2)
    known = theory.Constants(
        clients, per_round, steps, big, clip, noise_2, l2, objective_gap=gap.value, dim=dim
    )
    return Problem(plan, noise, known, gap.pooled, batch)


def start_of(params, best):
    """Return |w_0 - w*|^2 of models [points, seeds]."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(best.params))
    return float(sum(np.sum(np.square(np.asarray(v[0, 0], np.float64) - b)) for v, b in pairs))


def worst(plan, known, params, batch):
    """Return the constants at their largest along the runs, which is the least that a bound needs.

    Variance and dissimilarity are maxima over the models of the first seed, the gradient norm
    (with the penalty) is a maximum over all models.
    """
    l2, leaves = known.strong_convexity, jax.tree.leaves(params)
    at = [jax.tree.map(lambda v, i=i: v[i, 0], params) for i in range(len(leaves[0]))]
    seen = [heterogeneity.gradient_dissimilarity(plan.task, w, plan.fed, l2=l2) for w in at]
    p = heterogeneity.client_weights(plan.fed)
    phi = [
        p @ np.asarray(objectives.gradient_variance(plan.task, w, plan.fed, batch=batch))
        for w in at
    ]
    square = sum(np.square(np.asarray(v)).sum(axis=tuple(range(2, v.ndim))) for v in leaves)
    return known._replace(
        gradient_bound=known.gradient_bound + l2 * float(np.sqrt(square).max()),
        variance_2=float(max(phi)),
        dissimilarity_2=float(max(s.variance for s in seen)),
    )
