"""The curves of `rdp` for concrete numbers: the same formulas in NumPy, and nothing to compile.

A guarantee asks for a few hundred orders of a few events, each of another kind.  That is
milliseconds of arithmetic, where a program for each kind takes a second to compile.  Arguments,
units and references are those of `rdp`; results are NumPy's, and differ in rounding alone.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special
from numpy.typing import ArrayLike

from . import allocation as _allocation
from . import rdp_formulas as formulas
from .rdp_formulas import ON_HOST

TANGENTS = 60  # at most; five to eight do
ROUNDING = 4e-15  # of epsilon


def _float64(function: Callable) -> Callable:
    """Arguments as float64 arrays; what overflows is infinite and says nothing."""

    @functools.wraps(function)
    def quiet(*args):
        with np.errstate(all="ignore"):
            return function(*(np.asarray(a, np.float64) for a in args))

    return quiet


@_float64
def gaussian(orders: np.ndarray, z: float | np.ndarray) -> np.ndarray:
    """`rdp.gaussian`.

    Example:
        >>> float(gaussian(2.0, 0.5))
        4.0
    """
    return orders / (2 * z**2)


@_float64
def laplace(orders: ArrayLike, z: ArrayLike) -> np.ndarray:
    """`rdp.laplace`."""
    return formulas.laplace(ON_HOST, orders, z)


@_float64
def pure(orders: ArrayLike, epsilon: ArrayLike) -> np.ndarray:
    """`rdp.pure`."""
    return formulas.pure(ON_HOST, orders, epsilon)


@_float64
def poisson(orders: ArrayLike, rate: ArrayLike, z: ArrayLike) -> np.ndarray:
    """`rdp.poisson`.

    Example:
        >>> round(float(poisson(2.0, 0.01, 1.0)), 8)
        0.00017181
    """
    return formulas.poisson(ON_HOST, orders, rate, z)


@_float64
def poisson_group(orders: ArrayLike, law: ArrayLike, z: ArrayLike) -> np.ndarray:
    """`rdp.poisson_group`."""
    return formulas.poisson_group(ON_HOST, orders, law, z)


@_float64
def without_replacement(orders: ArrayLike, rate: ArrayLike, z: ArrayLike) -> np.ndarray:
    """`rdp.without_replacement`."""
    return formulas.without_replacement(ON_HOST, orders, rate, z)


@_float64
def with_replacement(orders: ArrayLike, law: np.ndarray, z: ArrayLike) -> np.ndarray:
    """`rdp.with_replacement`."""
    orders, eta = np.atleast_1d(orders), formulas.chance_of_a_copy(ON_HOST, law)
    total = np.zeros_like(orders)
    for k in np.flatnonzero(law[1:] > 0) + 1:
        term = formulas.copies(ON_HOST, orders, eta, z, float(k), law[k])
        total = np.logaddexp(total, term)
    return formulas.of_all_copies(ON_HOST, orders, law, z, total)


@_float64
def participation(orders: ArrayLike, probability: ArrayLike, curve: ArrayLike) -> np.ndarray:
    """`rdp.participation`."""
    return formulas.participation(ON_HOST, orders, probability, curve)


@_float64
def allocation(orders: np.ndarray, slots: float, z: float) -> np.ndarray:
    """Of releases in one of which a unit takes part; here alone, see `accountants.allocation`."""
    return _allocation.curve(np.atleast_1d(orders), float(slots), float(z)).reshape(orders.shape)


@_float64
def either(
    orders: ArrayLike, probability: ArrayLike, first: ArrayLike, second: ArrayLike
) -> np.ndarray:
    """`rdp.either`."""
    return formulas.either(ON_HOST, orders, probability, first, second)


@_float64
def convert(orders: ArrayLike, curve: ArrayLike, delta: ArrayLike) -> np.ndarray:
    """`rdp.convert`."""
    return formulas.convert(ON_HOST, orders, curve, delta)


@_float64
def gaussian_epsilon(mu: Any, delta: Any) -> Any:
    """`rdp.gaussian_epsilon`, as exact.

    Example:
        >>> round(float(gaussian_epsilon(1.0, 1e-5)), 4)
        4.3772
    """
    if mu.ndim or delta.ndim:
        return _by_tangents(*np.broadcast_arrays(mu, delta))
    return np.float64(_of_one(float(mu), float(delta)))


@functools.lru_cache(4096)  # a guarantee asks for the same one in each of its bounds
def _of_one(mu, delta):
    return float(_by_tangents(np.float64(mu), np.float64(delta)))


def _by_tangents(mu, delta):
    """Newton's method on log(delta(epsilon)), from above.

    delta(epsilon) is an expectation of a log-concave function of a normal variable, so its
    logarithm is concave: tangents lie above it, and each point is on the safe side of the
    crossing, but for rounding.  What is returned was tested.
    """
    is_zero = scipy.special.erf(mu / math.sqrt(8)) <= delta  # exact for tiny mu too
    mu = np.where(is_zero, 1.0, mu)
    target = np.log(delta)
    # the Gaussian tail exp(-s^2 / 2) at s = epsilon / mu - mu / 2 bounds delta
    point = proved = mu * (mu / 2 + np.sqrt(-2 * target))
    for _ in range(TANGENTS):
        s = point / mu - mu / 2
        profile = formulas.log_profile(ON_HOST, s, mu)
        fits = profile <= target
        proved = np.where(fits, np.minimum(proved, point), proved)
        slope = -np.exp(point + scipy.special.log_ndtr(-s - mu) - profile)
        after = np.maximum(point - (profile - target) / slope, 0.0)
        # one that rounding put below goes up, and from there it stays
        after = np.where(fits, after, np.maximum(after, point * (1 + ROUNDING)))
        moves = (np.abs(after - point) > ROUNDING / 2 * point) & (proved >= point)
        if not moves.any():
            break
        point = np.where(moves, after, point)
    return np.where(is_zero, 0.0, proved)
