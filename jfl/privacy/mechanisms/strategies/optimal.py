"""The coefficients of strategies with the least error: float64, on the host, by L-BFGS with exact
gradients.

What is made small is the squared sensitivity times the error, which no scaling of C changes, so the
first coefficient is 1.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from threadpoolctl import threadpool_limits

from ....core import checks
from ....core.precision import in_float64
from .sensitivities import most_participations
from .series import square_root_series

ERRORS = ("mean", "max")


class Asked(NamedTuple):
    """For what a strategy is to be the best."""

    rounds: int
    participations: int
    separation: int
    workload: np.ndarray | None  # None: prefix sums; [n] or [n, n]
    error: str


def asked(
    where: str,
    rounds: int,
    participations: int,
    separation: int,
    workload: str | ArrayLike,
    error: str,
) -> Asked:
    """Checked."""
    checks.require_integer(
        where, rounds=rounds, participations=participations, separation=separation
    )
    checks.require_one_of(where, ERRORS, error=error)
    matrix = None
    if isinstance(workload, str):
        checks.require_one_of(where, ("prefix",), workload=workload)
    else:
        matrix = checks.as_array(where, "workload", workload).astype(np.float64)
        if matrix.shape not in ((rounds,), (rounds, rounds)) or not np.isfinite(matrix).all():
            checks.fail(
                where,
                f'workload "prefix", or finite numbers [{rounds}] or [{rounds}, {rounds}]',
                f"shape {matrix.shape}",
                "Make one with strategies.momentum.",
            )
        if not matrix.any():
            checks.fail(where, "a workload with a number that is not 0", "zeros only")
        if matrix.ndim == 2 and np.any(np.triu(matrix, 1)):
            checks.fail(
                where, "a lower-triangular workload", "one that reads later rounds", "Transpose it?"
            )
    participations = most_participations(int(rounds), int(participations), int(separation))
    # a unit that comes once may come in any round
    return Asked(
        int(rounds), participations, int(separation) if participations > 1 else 1, matrix, error
    )


def banded(wanted: Asked, bands: int) -> np.ndarray:
    """Float64[bands]: the first column of the best banded C."""
    if bands == 1:
        return np.ones(1)

    def loss(later: jax.Array) -> jax.Array:
        column = jnp.concatenate([jnp.ones(1), later])
        return _loss(wanted, column, _inverse(column, wanted.rounds))

    later = minimised(loss, square_root_series(bands)[1:], np.zeros(bands - 1))
    return np.concatenate([np.ones(1), later])


def inverse_banded(wanted: Asked, first: np.ndarray) -> np.ndarray:
    """Float64[bands]: the first column of the best C^-1 with as many bands as `first`."""
    if len(first) == 1:
        return np.ones(1)

    def loss(later: jax.Array) -> jax.Array:
        noise = jnp.concatenate([jnp.ones(1), later])
        return _loss(wanted, _inverse(noise, wanted.rounds), _padded(noise, wanted.rounds))

    later = minimised(loss, first[1:], np.zeros(len(first) - 1))
    return np.concatenate([np.ones(1), later])


def blt(wanted: Asked, buffers: int) -> tuple[np.ndarray, np.ndarray]:
    """Decays and weights of the best C whose column is 1, then sum_j weight_j decay_j^(t - 1).

    C^-1 is of the same kind, with decays that lie between those of C: 1 > a_1 > b_1 > a_2 > ... >
    0.  What is looked for are the logarithms of the steps between their logarithms, so that no
    constraint is left.
    """
    n = wanted.rounds

    def parts(steps: jax.Array) -> tuple[jax.Array, jax.Array]:
        decays = jnp.exp(-jnp.cumsum(jnp.exp(steps)))
        return decays[0::2], decays[1::2]

    def weights(own: jax.Array, other: jax.Array) -> jax.Array:
        """Of the decays `own`, where those of the inverse are `other`."""
        apart = own[:, None] - own + jnp.eye(len(own))
        return jnp.prod(own[:, None] - other, 1) / jnp.prod(apart, 1)

    def series(decay: jax.Array, weight: jax.Array) -> jax.Array:
        # 0^0 = 1 for the first power: its logarithm is not asked for
        powers = jnp.exp(jnp.arange(n - 1)[:, None] * jnp.log(decay))
        return jnp.concatenate([jnp.ones(1), powers @ weight])[:n]

    def loss(steps: jax.Array) -> jax.Array:
        own, other = parts(steps)
        column = series(own, weights(own, other))
        return _loss(wanted, column, series(other, weights(other, own)))

    starts = []
    for low, high in itertools.product((0.5 / n, 5 / n, 50 / n), (0.5, 1.5)):
        ends = np.exp(np.linspace(np.log(min(low, high / 2)), np.log(high), 2 * buffers))
        starts.append(np.log(np.diff(ends, prepend=0.0)))
    steps = minimised(loss, *starts)
    with in_float64():
        own, other = parts(jnp.asarray(steps))
        return np.asarray(own), np.asarray(weights(own, other))


def minimised(loss: Callable[..., Any], *starts: np.ndarray, most: int = 2000) -> np.ndarray:
    """Where the logarithm of a loss > 0 is least, as found from the best of several starts."""
    from scipy import optimize  # not at import

    # the optimiser's own matrices are tiny: threads of BLAS would spin for each other, and take
    # several times as long where other work has the cores
    with in_float64(), threadpool_limits(1, "blas"):
        both = jax.jit(jax.value_and_grad(lambda x: jnp.log(loss(x))))
        found = [
            optimize.minimize(
                lambda x: tuple(np.asarray(v, np.float64) for v in both(x)),
                np.asarray(start, np.float64),
                jac=True,
                method="L-BFGS-B",
                options=dict(maxiter=most, maxfun=2 * most, maxcor=20, ftol=1e-15, gtol=1e-10),
            )
            for start in starts
        ]
    return min(found, key=lambda one: one.fun if np.isfinite(one.fun) else np.inf).x


def _loss(wanted: Asked, column: jax.Array, noise: jax.Array) -> jax.Array:
    """Squared sensitivity times error, of a Toeplitz C and C^-1 by their first columns."""
    n, apart = wanted.rounds, wanted.separation
    if len(column) > apart or wanted.participations == 1:
        if wanted.participations > 1:  # it must not increase: see sensitivities
            column = jax.lax.cummax(jnp.abs(column), reverse=True)
    column = _padded(column, n)
    moved = _at_most(column, apart, wanted.participations)
    return jnp.square(moved).sum() * _error(wanted, noise)


def _at_most(column: jax.Array, apart: int, participations: int) -> jax.Array:
    """What a unit adds in its first rounds, 0, `apart`, 2 `apart`, ...: Float64[n], by sums over
    the rounds that are so far apart."""
    n = len(column)
    later = jnp.pad(column, (0, -n % apart)).reshape(-1, apart)
    if participations >= len(later):
        moved = jnp.cumsum(later, axis=0)
    else:  # no difference of two sums: a column that the search tries may overflow
        window, before = (participations, 1), ((participations - 1, 0), (0, 0))
        moved = jax.lax.reduce_window(later, 0.0, jax.lax.add, window, (1, 1), before)
    return moved.reshape(-1)[:n]


def _error(wanted: Asked, noise: jax.Array) -> jax.Array:
    n = wanted.rounds
    if wanted.workload is not None and wanted.workload.ndim == 2:
        back = np.arange(n)[:, None] - np.arange(n)
        noising = jnp.where(back >= 0, noise[np.maximum(back, 0)], 0.0)
        each = jnp.square(wanted.workload @ noising).sum(1)
        return each.mean() if wanted.error == "mean" else each.max()
    if wanted.workload is None:
        summed = jnp.cumsum(noise)
    else:
        summed = jnp.convolve(wanted.workload, noise, precision="highest")[:n]
    share = (n - np.arange(n)) / n if wanted.error == "mean" else np.ones(n)
    return (share * jnp.square(summed)).sum()


def _padded(series: jax.Array, n: int) -> jax.Array:
    return jnp.pad(series, (0, max(0, n - len(series))))[:n]


def _inverse(series: jax.Array, n: int) -> jax.Array:
    """The first n terms of 1 / series, whose first is 1."""
    later = series[1:]

    def step(before: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        value = first - later @ before
        return jnp.concatenate([value[None], before[:-1]]), value

    one = jnp.zeros(n).at[0].set(1.0)
    return jax.lax.scan(step, jnp.zeros(len(later)), one)[1]
