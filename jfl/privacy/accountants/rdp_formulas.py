"""Formulas of Renyi curves and of the Gaussian profile, alike in NumPy and in jax.numpy.

`rdp` compiles them, for arguments that may be traced; `rdp_on_host` computes them as they stand,
for concrete numbers.  Shapes, units and references are those of the functions there.
"""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

NODES = 1024  # points of an integral
LARGEST_EXPONENT = 690.0  # of a ratio that is computed
TAIL = 10.0  # integrals reach this many standard deviations beyond the last mode
LEGENDRE = np.polynomial.legendre.leggauss(16)
THREE_POINTS = np.polynomial.legendre.leggauss(3)
HALF_LOG_2PI = math.log(2 * math.pi) / 2


class Library(NamedTuple):
    """Where a formula finds its functions."""

    numpy: ModuleType
    special: ModuleType
    constant: Callable  # a value that derivatives take for a constant


ON_HOST = Library(np, scipy.special, lambda value: value)
COMPILED = Library(jnp, jax.scipy.special, jax.lax.stop_gradient)


def poisson(library: Library, orders: Any, rate: Any, z: Any) -> Any:
    """See `rdp.poisson`."""
    xp = library.numpy
    orders, whole = xp.atleast_1d(orders), orders / (2 * z**2)
    q = xp.where(rate < 1, rate, 0.5)
    step = 0.5 * z * xp.minimum(1.0, z)
    x = -TAIL * z + step * xp.arange(NODES)
    u = q * xp.expm1((2 * x - 1) / (2 * z**2))
    log_weight = xp.log(step / z) - (x / z) ** 2 / 2 - HALF_LOG_2PI
    inner = _log_mean_excess(library, orders[:, None], u, log_weight)
    curve = xp.logaddexp(inner, 0.0).reshape(whole.shape) / (orders.reshape(whole.shape) - 1)
    reached = orders.reshape(whole.shape) + TAIL * z <= x[-1]
    return _within_reach(library, reached, rate, curve, whole)


def poisson_group(library: Library, orders: Any, law: Any, z: Any) -> Any:
    """See `rdp.poisson_group`."""
    xp = library.numpy
    most = len(law) - 1
    orders, whole = xp.atleast_1d(orders), orders * most**2 / (2 * z**2)
    step = 0.5 * z * xp.minimum(1.0, 2 * z / most)
    x = -TAIL * z + step * xp.arange(NODES)
    number = xp.arange(1.0, most + 1)[:, None]
    ratios = xp.expm1(xp.minimum((2 * number * x - number**2) / (2 * z**2), LARGEST_EXPONENT))
    u = xp.sum(law[1:, None] * ratios, axis=0)
    log_weight = xp.log(step / z) - (x / z) ** 2 / 2 - HALF_LOG_2PI
    both = [
        _log_mean_excess(library, powers[:, None], u, log_weight) for powers in (orders, 1 - orders)
    ]
    larger = xp.logaddexp(xp.maximum(*both), 0.0).reshape(whole.shape)
    curve = larger / (orders.reshape(whole.shape) - 1)
    end = xp.minimum(x[-1], LARGEST_EXPONENT * z**2 / most)
    reached = orders.reshape(whole.shape) * most + TAIL * z <= end
    return xp.where(reached & (law[0] > 0), xp.minimum(curve, whole), whole)


def without_replacement(library: Library, orders: Any, rate: Any, z: Any) -> Any:
    """See `rdp.without_replacement`."""
    xp = library.numpy
    orders, whole = xp.atleast_1d(orders), orders / (2 * z**2)
    q = xp.where(rate < 1, rate, 0.5)
    log_moment, reached = _profile_moment(library, orders, q, z, 1.0, NODES)
    curve = xp.logaddexp(2 * xp.log(q) + log_moment, 0.0).reshape(whole.shape) / (
        orders.reshape(whole.shape) - 1
    )
    return _within_reach(library, reached.reshape(whole.shape), rate, curve, whole)


def chance_of_a_copy(library: Library, law: Any) -> Any:
    """The probability that an element is drawn at all; any in (0, 1) where it always is."""
    xp = library.numpy
    return xp.where(law[0] > 0, xp.minimum(xp.sum(law[1:]), 1.0), 0.5)


def copies(library: Library, orders: Any, eta: Any, z: Any, k: Any, mass: Any) -> Any:
    """log of what `k` copies, of probability `mass`, add to moments of `rdp.with_replacement`."""
    xp = library.numpy
    a = xp.maximum(orders, 2.0)
    log_moment, reached = _profile_moment(library, orders, eta, z, k, 4 * NODES)
    # out of reach: ratios below e^epsilon, and all of the mirrored half
    power = a * (a - 1) * k**2 / (2 * z**2)
    beyond = (
        xp.log(xp.where(orders < 2, orders * (orders - 1), 2.0)) + power + xp.log(-xp.expm1(-power))
    )
    return (
        xp.log(xp.where(mass > 0, mass, 1.0)) + xp.log(eta) + xp.where(reached, log_moment, beyond)
    )


def of_all_copies(library: Library, orders: Any, law: Any, z: Any, total: Any) -> Any:
    """The curve of `rdp.with_replacement` from the moments of all `copies`."""
    xp = library.numpy
    most = xp.max(xp.where(law[1:] > 0, xp.arange(1.0, len(law)), 0.0))
    whole = orders * most**2 / (2 * z**2)
    return xp.where(law[0] > 0, xp.minimum(total / (orders - 1), whole), whole)


def laplace(library: Library, orders: Any, z: Any) -> Any:
    """See `rdp.laplace`."""
    xp = library.numpy
    shift = 1 / z
    total = xp.logaddexp(
        xp.log(orders / (2 * orders - 1)) + (orders - 1) * shift,
        xp.log((orders - 1) / (2 * orders - 1)) - orders * shift,
    )
    return xp.clip(total / (orders - 1), 0.0, shift)


def pure(library: Library, orders: Any, epsilon: Any) -> Any:
    """See `rdp.pure`."""
    xp = library.numpy
    total = xp.logaddexp((orders - 1) * epsilon, -orders * epsilon) - xp.log1p(xp.exp(-epsilon))
    return xp.clip(total / (orders - 1), 0.0, epsilon)


def participation(library: Library, orders: Any, probability: Any, curve: Any) -> Any:
    """See `rdp.participation`."""
    xp = library.numpy
    power = (orders - 1) * curve
    p = xp.where(probability < 1, probability, 0.5)
    small = xp.log1p(p * xp.expm1(xp.minimum(power, 1.0)))
    large = xp.logaddexp(xp.log1p(-p), xp.log(p) + power)
    mixed = xp.where(power < 1, small, large) / (orders - 1)
    return xp.where(probability < 1, xp.minimum(mixed, curve), curve)


def either(library: Library, orders: Any, probability: Any, first: Any, second: Any) -> Any:
    """See `rdp.either`."""
    xp = library.numpy
    logs = xp.log(probability), xp.log1p(-probability)
    powers = [log + (orders - 1) * c for log, c in zip(logs, (first, second))]
    both = xp.logaddexp(*powers) / (orders - 1)
    both = xp.where(probability < 1, xp.where(probability > 0, both, second), first)
    return xp.minimum(xp.maximum(both, xp.minimum(first, second)), xp.maximum(first, second))


def convert(library: Library, orders: Any, curve: Any, delta: Any) -> Any:
    """See `rdp.convert`."""
    xp = library.numpy
    epsilon = curve + xp.log1p(-1 / orders) - (xp.log(delta) + xp.log(orders)) / (orders - 1)
    return xp.where(delta**2 > -xp.expm1(-curve), 0.0, xp.maximum(epsilon, 0.0))


def crossing(library: Library, mu: Any, delta: Any, repeat: Callable) -> Any:
    """Epsilon at delta of the Gaussian pair, by halving: see `rdp.gaussian_epsilon`."""
    xp, special = library.numpy, library.special
    is_zero = special.erf(mu / math.sqrt(8)) <= delta  # delta at epsilon 0, exact for tiny mu too
    safe_mu = xp.where(is_zero, 1.0, mu)

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        profile = log_profile(library, middle / safe_mu - safe_mu / 2, safe_mu)
        is_too_small = profile > xp.log(delta)
        return xp.where(is_too_small, middle, low), xp.where(is_too_small, high, middle)

    # the Gaussian tail exp(-s^2 / 2) at s = epsilon / mu - mu / 2 bounds delta
    high = safe_mu * (safe_mu / 2 + xp.sqrt(-2 * xp.log(delta)))
    _, fitting = repeat(0, 80, halve, (xp.zeros_like(high), high))
    return xp.where(is_zero, 0.0, fitting)


def profile_grid(library: Library, rate: Any, z: Any, k: Any, nodes: int) -> tuple:
    """Points x, loss e of the Gaussian there, log of t = 1 + rate (e^e - 1), and log of weight *
    profile * e^e.

    The Gaussian has k / z for a multiplier's inverse; points are spaced for it.
    """
    xp = library.numpy
    z = z / k
    points, weights = LEGENDRE
    width = 4 * z * xp.minimum(1.0, z)
    panels = nodes // len(points)
    x = 0.5 + width * (xp.arange(panels)[:, None] + (points + 1) / 2).ravel()
    loss = (2 * x - 1) / (2 * z**2)
    large = loss > 30  # where rate * e^loss may overflow, the one is nothing
    ratio = xp.where(
        large, xp.log(rate) + loss, xp.log1p(rate * xp.expm1(xp.where(large, 0.0, loss)))
    )
    shared = (
        log_profile(library, (x - 1) / z, 1 / z)
        + loss
        - 2 * xp.log(z)
        + xp.log(width / 2 * xp.tile(weights, panels))
    )
    return x, loss, ratio, shared


def _profile_moment(library, orders, rate, z, k, nodes):
    """log of the integral of a (a - 1) (t^(a - 2) + t^(-a - 1)) profile e^e; and whether the points
    reach."""
    xp = library.numpy
    x, _, ratio, shared = profile_grid(library, rate, z, k, nodes)
    a = orders[:, None]
    # the first of both is larger where the ratio is above 1
    inner, mirrored = (a - 2) * ratio + shared, -(a + 1) * ratio + shared
    top = library.constant(xp.max(inner, axis=1, keepdims=True))
    total = xp.sum(xp.exp(inner - top) + xp.exp(mirrored - top), axis=1)
    return xp.log(orders * (orders - 1)) + xp.log(total) + top[:, 0], xp.maximum(
        orders, 2.0
    ) + TAIL * z / k <= x[-1]


def _within_reach(library, reached, rate, sampled, whole):
    xp = library.numpy
    return xp.where(reached & (rate < 1), xp.minimum(sampled, whole), whole)


def _log_mean_excess(library, a, u, log_weight):
    """log of the sum over u [m] of weight * ((1 + u)^a - 1 - a u), for a [n, 1] > 1, u > -1:
    without cancellation or overflow, and with one exponential for each pair."""
    xp = library.numpy
    # log(1 + u) - u, for all orders
    tiny = xp.abs(u) < 0.05
    v, series = xp.where(tiny, u, 0.0), 0.0
    for k in range(14, 1, -1):
        series = (-1) ** (k + 1) / k + v * series
    short = xp.where(tiny, v**2 * series, xp.log1p(u) - u)
    power = a * xp.log1p(u)
    top = library.constant(xp.max(xp.maximum(power, 0.0) + log_weight, axis=1, keepdims=True))
    # near 1 the power is e^p - 1 - p more than 1 + p, by a series whose terms fall by p / 4 or more
    near = xp.abs(power) < 0.25
    p, series = xp.where(near, power, 0.0), 1.0
    for k in range(13, 2, -1):
        series = 1 + p * series / k
    large = xp.where(near, 0.0, xp.exp(power + log_weight - top))
    rest = xp.exp(log_weight) * xp.where(near, p**2 / 2 * series + a * short, -1 - a * u)
    return xp.log(xp.sum(large, axis=1) + xp.exp(-top[:, 0]) * xp.sum(rest, axis=1)) + top[:, 0]


def log_profile(library: Library, s: Any, d: Any) -> Any:
    """log(delta) at epsilon = d s + d^2 / 2 of the pair N(d, 1), N(0, 1): log(P(X > s) - e^epsilon
    P(X > s + d)).

    With M = P(X > v) / density(v), this is log(density(s)) + log(M(s) - M(s + d)).  For small d the
    difference is the integral of 1 - v M(v), which three points give to rounding where a difference
    of logs would lose digits.
    """
    xp, special = library.numpy, library.special
    upper = special.log_ndtr(-s)
    direct = upper + xp.log(
        -xp.expm1(xp.minimum(d * s + d**2 / 2 + special.log_ndtr(-s - d) - upper, -1e-15))
    )
    nodes, weights = THREE_POINTS
    fine = d < 0.05
    s_, d_ = xp.where(fine, s, 0.0)[..., None], xp.where(fine, d, 0.05)[..., None]
    v = s_ + d_ * (nodes + 1) / 2
    slope = 1 - v * xp.exp(special.log_ndtr(-v) + v**2 / 2 + HALF_LOG_2PI)
    slope = xp.maximum(slope, 1 / (v**2 + 3))  # holds exactly; rounding breaks it far out
    small = -(s**2) / 2 - HALF_LOG_2PI + xp.log(xp.sum(weights / 2 * slope, axis=-1) * d_[..., 0])
    return xp.where(fine, small, direct)
