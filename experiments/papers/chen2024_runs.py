"""A run of Chen et al. (2024) under the hypotheses of its theorems, and what is measured along
it."""

import jax
import jax.numpy as jnp
import numpy as np

import jfl
from jfl import schedules
from jfl.analysis import heterogeneity
from jfl.core import pytrees
from jfl.papers.chen2024 import theory


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
    """A strongly convex DPNFL run under the hypotheses of Theorem 1 -> (plan, constants known
    before it, optimum).

    Rows have norm 1, so gradients of softmax regression with a bias have norm at most 2: a clip of
    2 is never active, and the noise protects although the gradients are unbiased.
    """
    data = jfl.transforms.unit_norm(jfl.transforms.flatten(getattr(jfl.datasets, dataset)()))
    fed = jfl.federate(data, jfl.partition.dirichlet(clients, 0.3, min_rows=min_rows))
    task, clip = jfl.models.logistic(fed), 2.0
    big = float(heterogeneity.smoothness(fed, l2=l2).max())

    def plan(noise):
        chain = jfl.chain(jfl.clip_l2(clip), jfl.total(), jfl.gaussian(noise), jfl.divide(batch))
        alg = jfl.algorithms.dpnfl(
            jfl.private_grad(task.loss, chain, l2=l2),
            steps=steps,
            lr=schedules.theory_rounds(l2, big, steps),
            batch=jfl.batches.without_replacement(batch),
        )
        return jfl.plan(
            fed, task, alg, jfl.sampling.without_replacement(clients, per_round), weights="size"
        )

    noise = jfl.papers.as_printed.calibrate(
        plan(1.0), epsilon=epsilon, delta=1e-2, rounds=rounds, paper="chen2024"
    )
    gap = heterogeneity.objective_gap(task, fed, l2)
    p = heterogeneity.client_weights(fed)
    dim = pytrees.size(task.init(jax.random.key(0)))
    noise_2 = dim * float(p @ (noise * 2 * clip / batch) ** 2)
    known = theory.Constants(
        clients, per_round, steps, big, clip, noise_2, l2, objective_gap=gap.value, dim=dim
    )
    return plan(noise), known, gap.pooled


def along(plan, seeds, counts):
    """Parameters after each number of rounds in `counts`: leaves [points, seeds, ...], the start
    first."""
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    run = jax.vmap(lambda key: jfl.init(key, plan))(keys)
    move = jax.jit(jax.vmap(lambda run, plan, n: jfl.scan(run, plan, n)[0], (0, None, None)))
    points = [plan.algorithm.params(run.server)]
    for n in np.diff(counts, prepend=0):
        run = move(run, plan, jnp.array([n]))
        points.append(plan.algorithm.params(run.server))
    return jax.tree.map(lambda *v: jnp.stack(v), *points)


def objective(plan, l2, params):
    """F [points, seeds] in float64, over the rows of all clients."""
    fed = plan.fed
    owned = np.concatenate([np.asarray(row[:n]) for row, n in zip(fed.index, fed.size)])

    def one(w, x, y):
        losses = jax.vmap(plan.task.loss, (None, 0, 0))(w, x, y)
        return losses.mean() + l2 / 2 * sum(jnp.sum(v**2) for v in jax.tree.leaves(w))

    with jax.enable_x64(True):
        x = jnp.asarray(fed.x[owned], jnp.float64)
        at = jax.tree.map(lambda v: jnp.asarray(np.asarray(v), jnp.float64), params)
        shape = jax.tree.leaves(at)[0].shape[:2]
        flat = jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), at)
        return np.asarray(
            jax.jit(lambda w, x, y: jax.lax.map(lambda v: one(v, x, y), w))(flat, x, fed.y[owned])
        ).reshape(shape)


def worst(plan, known, params):
    """Variance and dissimilarity at their largest among the models of the first seed: a bound has
    no less."""
    at = [
        jax.tree.map(lambda v, i=i: v[i, 0], params) for i in range(len(jax.tree.leaves(params)[0]))
    ]
    seen = [
        heterogeneity.gradient_dissimilarity(plan.task, w, plan.fed, l2=known.strong_convexity)
        for w in at
    ]
    p, batch = heterogeneity.client_weights(plan.fed), plan.algorithm.releases[0].batches.batch
    phi = [
        p @ np.asarray(heterogeneity.gradient_variance(plan.task, w, plan.fed, batch=batch))
        for w in at
    ]
    return known._replace(
        variance_2=float(max(phi)),
        dissimilarity_2=float(max(s.variance for s in seen)),
        client_dissimilarity_2=float(max(s.largest for s in seen)),
    )
