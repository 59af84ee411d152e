"""Renyi curves of random allocation: a unit takes part in one of t releases, drawn uniformly and
unseen.

Against its absence all t outcomes y_i are N(0, z^2); where it takes part, one of them, chosen at
random, has mean 1.  The likelihood ratio is the mean M of t independent log-normal variables X_i =
exp((y_i - 1/2) / z^2), each of mean 1.  Contributions may follow from what was released before: the
Gaussian is turned to where they point, and what is shorter is garbled (see `Privacy` of
sampling.random_allocation).

- Present against absent, order a: log E[M^a] / (a - 1), for whole a a sum over how often each y_i
  is counted, the coefficient of x^a in (sum over m of x^m / m! exp(m (m - 1) / (2 z^2)))^t.
- Absent against present: log E[M^-s] / s with s = a - 1, where E[M^-s] = t^s / Gamma(s) times the
  integral of u^(s - 1) E[exp(-u X)]^t, by the trapezoid rule in log u and in the normal variable:
  both integrands are analytic and fall fast, so the rule is exact to rounding.

Between whole orders (a - 1) times the curve is convex, so a chord is above it.  Beyond the largest
order, and for very little noise, the curve is that of a unit that is seen.

References: Feldman and Shenfeld, arXiv:2502.08202 (whole orders, present against absent).
"""

import functools
import math
from typing import Any

import numpy as np
import scipy.special

MOST = 64  # order
LEAST_NOISE = 0.25
REACH = 14.0  # standard deviations of an integral
BLOCK = 64  # points of an integral at once
SLACK = 1e-9  # for rounding, of a curve


def curve(orders: np.ndarray, slots: float, z: float) -> np.ndarray:
    """Renyi divergence, the larger of both directions.

    Shapes:
        orders [n] > 1 -> Float64[n].

    Example:
        >>> one, many = curve(np.array([2.0]), 1.0, 2.0)[0], curve(np.array([2.0]), 100.0, 2.0)[0]
        >>> round(float(one), 4), bool(many < one / 50)
        (0.25, True)
    """
    orders = np.asarray(orders, np.float64)
    seen = orders / (2 * z**2)
    if slots < 2 or z < LEAST_NOISE:
        return seen
    moments = _moments(int(slots), float(z))  # of orders 1, 2, ...: (a - 1) times the curve
    within = np.interp(orders, np.arange(1.0, MOST + 1), moments) / (orders - 1)
    return np.where(orders <= MOST, np.minimum(within * (1 + SLACK), seen), seen)


@functools.lru_cache(256)
def _moments(slots, z):
    """Float64[MOST]: (a - 1) times the larger divergence of order a = 1, 2, ..."""
    return np.maximum(_present(slots, z), _absent(slots, z))


def _present(slots, z):
    m = np.arange(MOST + 1.0)
    one = m * (m - 1) / (2 * z**2) - scipy.special.gammaln(m + 1)
    total = _power(one, slots)
    return np.maximum(total + scipy.special.gammaln(m + 1) - m * math.log(slots), 0.0)[1:]


def _power(series, n):
    """The logarithms of the coefficients of a power series to the n-th power, cut off."""
    if n == 1:
        return series
    half = _power(series, n // 2)
    whole = _product(half, half)
    return _product(whole, series) if n % 2 else whole


def _product(a, b):
    size = len(a)
    return np.array([np.logaddexp.reduce(a[: k + 1] + b[k::-1]) for k in range(size)])


def _absent(slots, z):
    sigma, most = 1 / z, MOST - 1
    lowest = -REACH - most * sigma / slots  # of the normal variable: small X count
    step = min(0.05, 0.2 / sigma)
    g = np.arange(lowest, REACH, step)
    weight = -(g**2) / 2 - 0.5 * math.log(2 * math.pi) + math.log(step)
    log_x = sigma * g - sigma**2 / 2
    last = REACH * sigma + most * sigma**2 / slots + sigma**2
    v = np.arange(-math.log(slots) - 45.0, last, 0.04)  # log u
    logsumexp: Any = scipy.special.logsumexp  # its type is also that of sums with signs
    transform = np.concatenate(
        [
            logsumexp(weight - np.exp(np.minimum(block[:, None] + log_x, 300.0)), axis=1)
            for block in np.array_split(v, max(1, len(v) // BLOCK))
        ]
    )
    s = np.arange(1.0, MOST)
    whole = logsumexp(s[:, None] * v + slots * transform, axis=1) + math.log(0.04)
    moments = whole + s * math.log(slots) - scipy.special.gammaln(s)
    return np.append(0.0, np.maximum(moments, 0.0))
