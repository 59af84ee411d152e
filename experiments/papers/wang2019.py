"""Compute two Renyi bounds of Wang, Balle and Kasiviswanathan for samples of fixed size.

`rdp.without_replacement` is up to four times smaller for the Gaussian and also sound. The bounds
here serve to evaluate published numbers, and mechanisms of which only the curve is known. They can
exceed the curve without sampling, which also holds: take the smaller one.  Curves are for
replace_one of an element *of the sampled population*, and `rate` is sample / population.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaln, logsumexp

from jfl.privacy.accountants import rdp

from .approximate_dp import arrays

NODES = 1024


def crude(orders: ArrayLike, rate: float, z: float) -> np.ndarray:
    """Return the general bound at a Gaussian's curve.

    Args:
        orders: [n] > 1; orders between integers are interpolated.
        rate: sample / population, in (0, 1].
        z: noise multiplier, std over the replace_one sensitivity.

    Returns:
        Float64[n], the curve at `orders`.

    References:
        Wang, Balle, Kasiviswanathan, AISTATS 2019, Theorem 9 with an unbounded curve at infinity.
    """
    return wor_rdp(orders, rate, lambda j: j / (2 * z**2))


def refined(orders: ArrayLike, rate: float, z: float) -> np.ndarray:
    """Return the bound with alternating sums instead of raw moments.

    The sums are B(l) = E[(e^X - 1)^l], X ~ N(-1 / (2 z^2), 1 / z^2).  Each term is the smaller of
    the two series.  B is needed only at even l, and it is then the mean of nonnegative numbers. The
    trapezoid rule on logarithms computes it without loss; the sum itself would need a hundred
    digits.

    Arguments and result are those of `crude`.

    References:
        Wang, Balle, Kasiviswanathan, AISTATS 2019, Theorem 27.

    Example:
        >>> refined([2.0, 8.0], 0.2, 10.0).round(6).tolist()
        [0.001607, 0.00675]
    """
    return _series(orders, rate, lambda j: j / (2 * z**2), lambda evens: _log_moments(evens, z))


def wor_rdp(orders: ArrayLike, rate: float, rdp_of_order: Callable) -> np.ndarray:
    """Return the general bound on a mechanism that runs on a sample of fixed size.

    It does not vanish if the curve does: its terms from the third on tend to 2 rate^j binom(a, j).

    Args:
        orders: [n] > 1, as in `crude`.
        rate: sample / population, in (0, 1].
        rdp_of_order: the mechanism's curve under replace_one, integer orders [m] -> [m].

    Returns:
        Float64[n], the curve at `orders`.

    References:
        as `crude`.
    """
    return _series(orders, rate, rdp_of_order, lambda evens: np.full(len(evens), np.inf))


def interpolate(orders: np.ndarray, whole: np.ndarray, curve: np.ndarray) -> np.ndarray:
    """Return a bound on a curve between integer orders a.

    (a - 1) times the curve is convex in a, so it lies below its chords.

    Shapes:
        orders [n] > 1; whole = 2, 3, ... [m]; curve [m] at them -> [n].
    """
    below = np.floor(orders)
    scaled = np.concatenate([np.zeros(1), (whole - 1) * curve])  # orders 1, 2, ...
    index = below.astype(int) - 1
    above = np.minimum(index + 1, len(whole))  # a whole order needs nothing above itself
    return ((1 - orders + below) * scaled[index] + (orders - below) * scaled[above]) / (orders - 1)


def _series(orders, rate, rdp_of_order, log_moments):
    (orders,) = arrays(np.atleast_1d(orders))
    whole = np.arange(2, math.ceil(orders.max()) + 1, dtype=np.float64)
    curve, moments = rdp_of_order(whole), log_moments(np.arange(2.0, whole[-1] + 2, 2))
    terms = np.log(2.0) + (whole - 1) * curve
    with np.errstate(all="ignore"):  # without noise a curve is infinite; one of 0 has no logarithm
        first = np.log(4.0) + curve[0] + np.log(-np.expm1(-curve[0]))
    below, above = np.arange(2, 2 + len(whole)) // 2, np.arange(3, 3 + len(whole)) // 2
    largest = terms[0]
    terms = np.minimum(terms, np.log(4.0) + (moments[below - 1] + moments[above - 1]) / 2)
    terms[0] = min(first, largest)
    a = whole[:, None]
    choose = gammaln(a + 1) - gammaln(whole + 1) - gammaln(np.maximum(a - whole, 0) + 1)
    terms = np.where(whole <= a, choose + whole * np.log(rate) + terms, -np.inf)
    return interpolate(orders, whole, np.logaddexp(logsumexp(terms, axis=1), 0.0) / (whole - 1))


def _log_moments(evens, z):
    """Return log B(l) for even l; inf if l is outside the range of the points."""
    step = 0.5 * z * min(1.0, z)
    x = -rdp.TAIL * z + step * np.arange(NODES)
    loss = np.abs(2 * x - 1) / (2 * z**2)
    signed = np.where(x > 0.5, loss, 0.0)  # |e^X - 1| = e^X (1 - e^-X) or 1 - e^X
    size = signed + np.log(np.maximum(-np.expm1(-loss), 1e-300))
    weight = np.log(step / z) - (x / z) ** 2 / 2 - rdp.HALF_LOG_2PI
    moments = np.asarray(logsumexp(evens[:, None] * size + weight, axis=1))
    return np.where(evens + rdp.TAIL * z <= x[-1], moments, np.inf)
