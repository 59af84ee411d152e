"""Search for the strategies with the smallest error: on the host, in float64, by L-BFGS.

The searches minimise the squared sensitivity times the error.  Scaling C does not change this
product, so the first coefficient of a Toeplitz C is 1.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from scipy import linalg
from threadpoolctl import threadpool_limits

from ...core import checks
from ...core.pytrees import in_float64

MAX_STEPS = 5000  # of a search
# The logarithm of the loss that a search sees where there is no strategy.  It is finite, so that
# the line search of SciPy tries a shorter step.
OUTSIDE = 100.0


class Aim(NamedTuple):
    """The purpose for which a strategy is optimised; see `strategies.banded_toeplitz`."""

    rounds: int
    participations: int
    separation: int
    workload: np.ndarray | None  # [rounds]; None: prefix sums
    error: str


def aim(
    where: str,
    rounds: int,
    participations: int,
    separation: int,
    workload: str | ArrayLike,
    error: str,
    bands: int = 1,
) -> Aim:
    """Check the arguments of a function that makes a strategy, and return them as an Aim.

    An Aim is the error that the search minimises, and the participation for which it holds.

    Args:
        where: the name of the caller, for messages.
        rounds, participations, separation, workload, error, bands: as in
            `strategies.banded_toeplitz`.
    """
    checks.require_integer(
        where, rounds=rounds, participations=participations, separation=separation, bands=bands
    )
    if bands > rounds:
        checks.fail(where, f"bands <= rounds={rounds}", f"bands={bands}")
    checks.require_one_of(where, ("mean", "max"), error=error)
    if isinstance(workload, str):
        checks.require_one_of(where, ("prefix",), workload=workload)
        series = None
    else:
        series = checks.as_array(where, "workload", workload).astype(np.float64)
        if series.shape != (rounds,) or not np.isfinite(series).all() or not series.any():
            checks.fail(
                where,
                f'workload "prefix", or {rounds} finite numbers that are not all 0',
                f"shape {series.shape}" if series.any() else "only zeros",
                "Make one with strategies.momentum.",
            )
    participations = min(int(participations), -(-int(rounds) // int(separation)))
    # a unit that participates once may do so in any round
    separation = int(separation) if participations > 1 else 1
    return Aim(int(rounds), participations, separation, series, error)


# --- series and matrices


def square_root_series(n: int) -> np.ndarray:
    """Return the first n coefficients of 1 / sqrt(1 - x): 1, 1/2, 3/8, ..."""
    k = np.arange(1, n, dtype=np.float64)
    return np.concatenate([np.ones(1), np.cumprod((2 * k - 1) / (2 * k))])[:n]


def inverse(series: np.ndarray, n: int) -> np.ndarray:
    """Return the first n coefficients of the power series 1 / series.

    Example:
        >>> inverse(np.array([1.0, -0.5]), 4).tolist()
        [1.0, 0.5, 0.25, 0.125]
    """
    series = np.asarray(series, np.float64)
    out = np.zeros(n)
    out[0] = 1 / series[0]
    for t in range(1, n):
        m = min(t, len(series) - 1)
        out[t] = -(series[1 : m + 1] @ out[t - m : t][::-1]) / series[0]
    return out


def lower_toeplitz(column: np.ndarray) -> np.ndarray:
    """Return the lower-triangular Toeplitz matrix with this first column, Float64[n, n]."""
    return linalg.toeplitz(column, np.zeros(len(column)))


# --- Toeplitz matrices


def best_series(aim: Aim, first: np.ndarray, is_inverse: bool = False) -> np.ndarray:
    """Return the first column of the banded C, or banded C^-1, with the smallest loss.

    The loss is the squared sensitivity times the error.

    Args:
        aim: the purpose of the strategy.
        first: Float64[bands], the column from which the search begins.
        is_inverse: whether the columns are those of C^-1.

    Returns:
        Float64[bands], the first of which is 1.
    """
    if len(first) == 1:
        return np.ones(1)

    def loss(later: jax.Array) -> jax.Array:
        series = jnp.concatenate([jnp.ones(1), later])
        other = _inverse(series, aim.rounds)
        if is_inverse:
            return _loss(aim, other, _padded(series, aim.rounds))
        return _loss(aim, series, other)

    later = _minimise_from(loss, first[1:], np.zeros(len(first) - 1))
    return np.concatenate([np.ones(1), later])


def best_blt(aim: Aim, buffers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the decays and weights of the BLT with the smallest squared sensitivity times error.

    The column of C is 1, then sum_j weight_j decay_j^(t - 1).  C^-1 has the same form, with decays
    b that lie between the decays a of C: 1 > a_1 > b_1 > a_2 > ... > 0.  The search is over the
    logarithms of the differences of their logarithms, which are unconstrained.

    Args:
        aim: the purpose of the strategy.
        buffers: the number of exponentials.

    Returns:
        The decays a and the weights, Float64[buffers] each.
    """
    n = aim.rounds

    def decays(steps: jax.Array) -> tuple[jax.Array, jax.Array]:
        both = jnp.exp(-jnp.cumsum(jnp.exp(steps)))
        return both[0::2], both[1::2]

    def weights(own: jax.Array, other: jax.Array) -> jax.Array:
        """Return the weights of the decays `own` if those of the inverse are `other`."""
        differences = own[:, None] - own + jnp.eye(len(own))
        return jnp.prod(own[:, None] - other, 1) / jnp.prod(differences, 1)

    def series(decay: jax.Array, weight: jax.Array) -> jax.Array:
        # 0^0 = 1 for the first power, whose logarithm is not used
        powers = jnp.exp(jnp.arange(n - 1)[:, None] * jnp.log(decay))
        return jnp.concatenate([jnp.ones(1), powers @ weight])[:n]

    def loss(steps: jax.Array) -> jax.Array:
        own, other = decays(steps)
        return _loss(aim, series(own, weights(own, other)), series(other, weights(other, own)))

    starts = []
    for low, high in itertools.product((0.5 / n, 5 / n, 50 / n), (0.5, 1.5)):
        ends = np.exp(np.linspace(np.log(min(low, high / 2)), np.log(high), 2 * buffers))
        starts.append(np.log(np.diff(ends, prepend=0.0)))
    steps = _minimise_from(loss, *starts)
    with in_float64():
        own, other = decays(jnp.asarray(steps))
        return np.asarray(own), np.asarray(weights(own, other))


def _minimise(
    value_and_grad: Callable[[np.ndarray], tuple[Any, ...]],
    starts: Sequence[np.ndarray],
    tolerance: float,
) -> np.ndarray:
    """Return the argument at which the logarithm of a loss is smallest, by L-BFGS.

    Args:
        value_and_grad: argument -> the logarithm of the loss, and its gradient.
        starts: where searches begin; the best result counts.
        tolerance: the largest derivative at which a search ends.
    """
    from scipy import optimize  # not at import

    options = dict(maxiter=MAX_STEPS, maxfun=2 * MAX_STEPS, maxcor=20, ftol=1e-15, gtol=tolerance)
    # The matrices of the optimiser are tiny: BLAS threads would wait for each other, and take
    # several times as long on a busy machine.
    with threadpool_limits(1, "blas"):
        results = [
            optimize.minimize(value_and_grad, start, jac=True, method="L-BFGS-B", options=options)
            for start in starts
        ]
    return min(results, key=lambda r: r.fun if np.isfinite(r.fun) else np.inf).x


def _minimise_from(loss: Callable[..., Any], *starts: np.ndarray) -> np.ndarray:
    """Return the argument at which a traced loss > 0 is smallest."""
    with in_float64():
        value_and_grad = jax.jit(jax.value_and_grad(lambda x: jnp.log(loss(x))))
        in_numpy = lambda x: tuple(np.asarray(v, np.float64) for v in value_and_grad(x))
        return _minimise(in_numpy, starts, 1e-10)


def _loss(aim: Aim, column: jax.Array, noise: jax.Array) -> jax.Array:
    """Return the squared sensitivity times the error of a Toeplitz C.

    Args:
        aim: the use.
        column, noise: the first columns of C and of C^-1.
    """
    n, separation, participations = aim.rounds, aim.separation, aim.participations
    if len(column) > separation and participations > 1:
        # the bound of strategies._toeplitz_squares, that of a decreasing column
        column = jax.lax.cummax(jnp.abs(column), reverse=True)
    column = _padded(column, n)
    # The shift of C x by a unit that participates in rounds 0, separation, 2 separation, ...: sums
    # over rounds that are `separation` apart.
    later = jnp.pad(column, (0, -n % separation)).reshape(-1, separation)
    if participations >= len(later):
        shift = jnp.cumsum(later, axis=0)
    else:  # a difference of two cumulative sums would not do: columns in the search may overflow
        window, before = (participations, 1), ((participations - 1, 0), (0, 0))
        shift = jax.lax.reduce_window(later, 0.0, jax.lax.add, window, (1, 1), before)
    return jnp.square(shift.reshape(-1)[:n]).sum() * _error(aim, noise)


def _error(aim: Aim, noise: jax.Array) -> jax.Array:
    """Return the error of a Toeplitz C, given the first column of C^-1."""
    n = aim.rounds
    if aim.workload is None:
        summed = jnp.cumsum(noise)
    else:
        summed = jnp.convolve(aim.workload, noise, precision="highest")[:n]
    weight = (n - np.arange(n)) / n if aim.error == "mean" else np.ones(n)
    return (weight * jnp.square(summed)).sum()


def _padded(series: jax.Array, n: int) -> jax.Array:
    """Return a series padded with zeros, or cut, to n terms."""
    return jnp.pad(series, (0, max(0, n - len(series))))[:n]


def _inverse(series: jax.Array, n: int) -> jax.Array:
    """Return the first n coefficients of 1 / series, for a series that begins with 1."""
    later = series[1:]

    def step(before: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        value = first - later @ before
        return jnp.concatenate([value[None], before[:-1]]), value

    one = jnp.zeros(n).at[0].set(1.0)
    return jax.lax.scan(step, jnp.zeros(len(later)), one)[1]


# --- any matrix


def best_dense(aim: Aim, separation: int) -> np.ndarray:
    """Return the lower-triangular C with the smallest error, Float64[n, n].

    It is for units that participate in rounds whose numbers differ by multiples of `separation`.
    The search minimises trace(W X^-1) over X = C^T C, with W = A^T A / n for the workload matrix A,
    which is a convex problem.  It scales C so that the contribution of a unit to all its rounds has
    squared length 1, and keeps the columns of these rounds orthogonal.

    Args:
        aim: the purpose of the strategy.
        separation: the multiple.
    """
    n = aim.rounds
    workload = lower_toeplitz(np.ones(n) if aim.workload is None else aim.workload)
    weight, unit = workload.T @ workload / n, np.arange(n) % separation
    is_same_unit = unit[:, None] == unit
    count = np.bincount(unit)[unit]

    def log_loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the logarithm of the loss and its gradient in the directions in which X may
        change."""
        try:
            lower = np.linalg.inv(np.linalg.cholesky(flat.reshape(n, n)))
        except np.linalg.LinAlgError:  # not positive definite
            return OUTSIDE, np.zeros_like(flat)
        square_inverse = lower.T @ lower
        back = square_inverse @ weight
        gradient = -back @ square_inverse
        diagonal = np.diagonal(gradient)
        mean = np.bincount(unit, diagonal)[unit] / count
        gradient = np.where(is_same_unit, 0.0, gradient) + np.diag(diagonal - mean)
        return np.log(np.trace(back)), gradient.reshape(-1) / np.trace(back)

    square = _minimise(log_loss, [np.diag(1.0 / count).reshape(-1)], 1e-7).reshape(n, n)
    # X = C^T C with C lower triangular: a Cholesky factorisation from the end
    return np.linalg.cholesky(square[::-1, ::-1]).T[::-1, ::-1]
