"""Models along a run, and the objective at them: what a convergence bound is compared with.

Models are pytrees whose leaves are [points, seeds, ...]; values are [points, seeds].
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfl.analysis import heterogeneity
from jfl.core import pytrees
from jfl.engine.round import advance, init, run_noise_key


def along(plan, seeds: int, rounds) -> Any:
    """Return the server's model at the start and after each number of rounds.

    Args:
        plan: what runs.
        seeds: number of runs, with the seeds 0, 1, ...
        rounds: numbers of rounds, increasing.
    """
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    start, after = _along(keys, plan, np.diff(rounds, prepend=0).astype(np.int32))
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), start, after)


@jax.jit
def _along(keys, plan, counts):
    model = plan.algorithm.params

    def one(key):
        run = init(key, plan)
        noise = run_noise_key(run)

        def segment(run, count):
            run = jax.lax.fori_loop(0, count, lambda _, r: advance(r, plan, noise)[0], run)
            return run, model(run.server)

        return model(run.server), jax.lax.scan(segment, run, counts)[1]

    return jax.vmap(one, out_axes=(0, 1))(keys)


def objective(plan, l2: float, params, weights: str = "size") -> np.ndarray:
    """Return F at these models in float64.

    Args:
        plan: with the rows of the clients.
        l2: weight of the penalty |w|^2 / 2.
        params: models.
        weights: of the clients, "size" or "uniform".
    """
    with jax.enable_x64(True):
        return _over_rows(plan, l2, params, weights, jnp.float64, lambda f: f)


def square_gradient(plan, l2: float, params) -> np.ndarray:
    """Return |grad F|^2 at these models in float32, for clients weighted by their size."""
    square = lambda f: lambda w: pytrees.norm(jax.grad(f)(w)) ** 2
    return _over_rows(plan, l2, params, "size", jnp.float32, square).astype(float)


def _over_rows(plan, l2, params, weights, dtype, of):
    fed, size = plan.fed, np.asarray(plan.fed.size)
    owned = np.concatenate([np.asarray(row[:n]) for row, n in zip(fed.index, size)])
    each = np.asarray(heterogeneity.client_weights(fed, weights), np.float64) / size
    data = jnp.asarray(fed.x[owned], dtype), fed.y[owned], jnp.asarray(np.repeat(each, size), dtype)
    at = jax.tree.map(lambda v: jnp.asarray(np.asarray(v), dtype), params)
    shape = jax.tree.leaves(at)[0].shape[:2]
    flat = jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), at)

    def one(w, x, y, weight):
        def value(w):
            losses = jax.vmap(plan.task.loss, (None, 0, 0))(w, x, y)
            return weight @ losses + l2 / 2 * sum(jnp.sum(v**2) for v in jax.tree.leaves(w))

        return of(value)(w)

    each_model = jax.jit(lambda flat, *data: jax.lax.map(lambda w: one(w, *data), flat))
    return np.asarray(each_model(flat, *data)).reshape(shape)
