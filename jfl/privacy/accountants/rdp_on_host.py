"""The curves of `rdp` for concrete numbers: the same formulas in NumPy, and nothing to compile.

A guarantee asks for a few hundred orders of a few events, each of another kind.  That is
milliseconds of arithmetic, where a program for each kind takes a second to compile.  Arguments,
units and references are those of `rdp`; results are NumPy's, and differ in rounding alone.
"""

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from . import rdp_formulas as formulas
from .rdp_formulas import ON_HOST


def _float64(function: Callable) -> Callable:
    """Arguments as float64 arrays; what overflows is infinite and says nothing."""

    @functools.wraps(function)
    def quiet(*args):
        with np.errstate(all="ignore"):
            return function(*(np.asarray(a, np.float64) for a in args))

    return quiet


@_float64
def gaussian(orders: ArrayLike, z: ArrayLike) -> np.ndarray:
    """`rdp.gaussian`.

    Example:
        >>> float(gaussian(2.0, 0.5))
        4.0
    """
    return orders / (2 * z**2)


@_float64
def poisson(orders: ArrayLike, rate: ArrayLike, z: ArrayLike) -> np.ndarray:
    """`rdp.poisson`.

    Example:
        >>> round(float(poisson(2.0, 0.01, 1.0)), 8)
        0.00017181
    """
    return formulas.poisson(ON_HOST, orders, rate, z)


@_float64
def without_replacement(orders: ArrayLike, rate: ArrayLike, z: ArrayLike) -> np.ndarray:
    """`rdp.without_replacement`."""
    return formulas.without_replacement(ON_HOST, orders, rate, z)


@_float64
def with_replacement(orders: ArrayLike, law: ArrayLike, z: ArrayLike) -> np.ndarray:
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
def convert(orders: ArrayLike, curve: ArrayLike, delta: ArrayLike) -> np.ndarray:
    """`rdp.convert`."""
    return formulas.convert(ON_HOST, orders, curve, delta)


@_float64
def gaussian_epsilon(mu: ArrayLike, delta: ArrayLike) -> np.ndarray:
    """`rdp.gaussian_epsilon`, as exact.

    Example:
        >>> round(float(gaussian_epsilon(1.0, 1e-5)), 4)
        4.3772
    """
    if mu.ndim or delta.ndim:
        return _halved(*np.broadcast_arrays(mu, delta))
    return np.float64(_of_one(float(mu), float(delta)))


@functools.lru_cache(4096)  # a guarantee asks for the same one in each of its bounds
def _of_one(mu, delta):
    return float(_halved(np.float64(mu), np.float64(delta)))


def _halved(mu, delta):
    def repeat(start, stop, body, ends):
        for i in range(start, stop):
            before, ends = ends, body(i, ends)
            if all(map(np.array_equal, before, ends)):  # no float lies between them
                break
        return ends

    return formulas.crossing(ON_HOST, mu, delta, repeat)
