"""Renyi differential privacy of the Gaussian and its subsampled forms, in jax.numpy.

A curve holds the Renyi divergence at each of `orders`; curves of steps that follow each other add.
All functions compute in float64 whatever the caller's default, and go under jit, vmap and grad.
(Arithmetic between their results follows the caller's default again: add curves in NumPy or inside
`jax.enable_x64(True)`, or use events.)  `z` is the noise multiplier, std over sensitivity under the
adjacency in use.

Both sampled curves are integrals on one grid of points shared by all orders.  Where an order lies
beyond the reach of the grid they return the curve without sampling, which is larger: never too
small, never nan.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax.scipy.special import log_ndtr
from jax.typing import ArrayLike

from ...core.precision import in_float64
from . import roots

NODES = 1024  # points of an integral
TAIL = 10.0  # integrals reach this many standard deviations beyond the last mode
LEGENDRE = np.polynomial.legendre.leggauss(16)
HALF_LOG_2PI = math.log(2 * math.pi) / 2


def float64(function: Callable, **options: Any) -> Callable:
    """Compile `function` for float64, whatever jax's default is: arrays, or trees of them by name;
    options of jax.jit."""
    compiled = jax.jit(function, **options)

    def scoped(*args, **trees):
        with in_float64():
            trees = jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), trees)
            return compiled(*(jnp.asarray(a, jnp.float64) for a in args), **trees)

    return functools.update_wrapper(scoped, function)


@float64
def gaussian(orders: ArrayLike, z: ArrayLike) -> jax.Array:
    """Curve of one Gaussian release: order / (2 z^2).

    Shapes:
        orders [n] > 1 -> [n].

    References:
        Mironov, CSF 2017, Corollary 3.

    Example:
        >>> float(gaussian(2.0, 0.5))
        4.0
    """
    return orders / (2 * z**2)


@float64
def poisson(orders: ArrayLike, rate: ArrayLike, z: ArrayLike) -> jax.Array:
    """Curve of a Gaussian on a Poisson sample, for add_remove.

    The divergence of the mixture from N(0, z^2) is log(E[(1 + u)^a]) / (a - 1), u = rate *
    (likelihood ratio - 1). E[u] = 0, so the expectation of (1 + u)^a - 1 - a u is the same less
    one, and nothing cancels.  The trapezoid rule is exact to rounding for it: the integrand is
    analytic within pi z^2 of the real line.

    Shapes:
        orders [n] > 1, whole or not -> [n].

    Units:
        rate in (0, 1]; rate = 1 is `gaussian`.

    References:
        Mironov, Talwar, Zhang, 2019, "Renyi differential privacy of the sampled Gaussian
        mechanism".
    """
    orders, whole = jnp.atleast_1d(orders), orders / (2 * z**2)
    q = jnp.where(rate < 1, rate, 0.5)
    step = 0.5 * z * jnp.minimum(1.0, z)
    x = -TAIL * z + step * jnp.arange(NODES)
    u = q * jnp.expm1((2 * x - 1) / (2 * z**2))
    log_weight = jnp.log(step / z) - (x / z) ** 2 / 2 - HALF_LOG_2PI
    inner = _log_mean_excess(orders[:, None], u, log_weight)
    curve = jnp.logaddexp(inner, 0.0).reshape(whole.shape) / (orders.reshape(whole.shape) - 1)
    return _within_reach(orders.reshape(whole.shape) + TAIL * z <= x[-1], rate, curve, whole)


@float64
def without_replacement(orders: ArrayLike, rate: ArrayLike, z: ArrayLike) -> jax.Array:
    """Curve of a Gaussian on a sample of fixed size, for replace_one; rate = sample / population.

    The divergence is at most that of any pair whose hockey-stick profile is rate * (Gaussian
    profile), mirrored for ratios below one; an integral over the profile gives its moments.  It is
    up to four times below the series bound that is commonly used.

    Shapes:
        orders [n] > 1, whole or not -> [n].

    Units:
        z: std over the replace_one sensitivity; rate = 1 is `gaussian`.

    References:
        Balle, Barthe, Gaboardi, NeurIPS 2018, Theorem 11, and the moments of f-divergences by
        profile.
    """
    orders, whole = jnp.atleast_1d(orders), orders / (2 * z**2)
    q = jnp.where(rate < 1, rate, 0.5)
    log_moment, reached = _profile_moment(orders, q, z, 1.0, NODES)
    curve = jnp.logaddexp(2 * jnp.log(q) + log_moment, 0.0).reshape(whole.shape) / (
        orders.reshape(whole.shape) - 1
    )
    return _within_reach(reached.reshape(whole.shape), rate, curve, whole)


@float64
def with_replacement(orders: ArrayLike, law: ArrayLike, z: ArrayLike) -> jax.Array:
    """Curve of a Gaussian on draws that may repeat, for replace_one; an element is drawn k times
    with law[k].

    Let eta = 1 - law[0].  With or without a repeated element, the outputs are mixtures (1 - eta) A
    + eta B and (1 - eta) A + eta B' with the same A: no copy.  By advanced joint convexity the
    hockey-stick divergence at 1 + eta (e^epsilon - 1) is at most eta times one of B to A or B', at
    epsilon.  Draw all places from the other elements first, then the k places that the element
    takes: given both, A, B and B' are Gaussians whose means lie within k sensitivities of each
    other, so that divergence is at most the mean over k >= 1 of the Gaussian profile at k / z.
    Both directions hold alike, and moments of the mirrored profile give the curve, as in
    `without_replacement`, to which it is equal for one draw.  (The module `with_replacement` has a
    smaller profile.)  The law may be any that does not depend on data, also one conditional on few
    copies.

    Shapes:
        orders [n] > 1, law [m + 1] -> [n].

    Units:
        z: std over the replace_one sensitivity of one copy.

    References:
        Balle, Barthe, Gaboardi, NeurIPS 2018, Theorems 2 and 10 (draws with replacement,
        substitution).
    """
    orders = jnp.atleast_1d(orders)
    copies = jnp.arange(1.0, len(law))
    most = jnp.max(jnp.where(law[1:] > 0, copies, 0.0))
    eta = jnp.where(law[0] > 0, jnp.minimum(jnp.sum(law[1:]), 1.0), 0.5)
    a = jnp.maximum(orders, 2.0)

    def add(total, each):
        k, mass = each
        log_moment, reached = _profile_moment(orders, eta, z, k, 4 * NODES)
        # out of reach: ratios below e^epsilon, and all of the mirrored half
        power = a * (a - 1) * k**2 / (2 * z**2)
        beyond = (
            jnp.log(jnp.where(orders < 2, orders * (orders - 1), 2.0))
            + power
            + jnp.log(-jnp.expm1(-power))
        )
        term = (
            jnp.log(jnp.where(mass > 0, mass, 1.0))
            + jnp.log(eta)
            + jnp.where(reached, log_moment, beyond)
        )
        return jnp.where(mass > 0, jnp.logaddexp(total, term), total), None

    total, _ = jax.lax.scan(add, jnp.zeros_like(orders), (copies, law[1:]))
    whole = orders * most**2 / (2 * z**2)
    return jnp.where(law[0] > 0, jnp.minimum(total / (orders - 1), whole), whole)


@float64
def participation(orders: ArrayLike, probability: ArrayLike, curve: ArrayLike) -> jax.Array:
    """Curve of a release that happens with `probability`, which may be visible.

    Shapes:
        orders [n], curve [n] -> [n].

    References:
        Joint convexity of exp((a - 1) D); exact when participation is seen.

    Example:
        >>> float(participation(2.0, 1.0, 0.3)) == 0.3
        True
    """
    power = (orders - 1) * curve
    p = jnp.where(probability < 1, probability, 0.5)
    small = jnp.log1p(p * jnp.expm1(jnp.minimum(power, 1.0)))
    large = jnp.logaddexp(jnp.log1p(-p), jnp.log(p) + power)
    mixed = jnp.where(power < 1, small, large) / (orders - 1)
    return jnp.where(probability < 1, jnp.minimum(mixed, curve), curve)


@float64
def convert(orders: ArrayLike, curve: ArrayLike, delta: ArrayLike) -> jax.Array:
    """The epsilon that each order proves at `delta`; the smallest counts.

    Shapes:
        broadcasts; a curve of zeros proves 0.

    References:
        Canonne, Kamath, Steinke, 2020, Proposition 12; and total variation <= sqrt(1 -
        exp(-divergence)) (Bretagnolle and Huber), by which 0 is enough when that is at most delta.
    """
    epsilon = curve + jnp.log1p(-1 / orders) - (jnp.log(delta) + jnp.log(orders)) / (orders - 1)
    return jnp.where(delta**2 > -jnp.expm1(-curve), 0.0, jnp.maximum(epsilon, 0.0))


@float64
def epsilon(orders: ArrayLike, curve: ArrayLike, delta: ArrayLike) -> jax.Array:
    """The smallest epsilon at `delta` that a curve proves; never negative.

    Shapes:
        orders [n], curve [..., n] -> [...].
    """
    return jnp.min(convert(orders, curve, delta), axis=-1)


@float64
def delta(orders: ArrayLike, curve: ArrayLike, epsilon: ArrayLike) -> jax.Array:
    """The smallest delta at `epsilon` that a curve proves; never above 1.

    Shapes:
        orders [n], curve [..., n] -> [...].

    References:
        as `convert`.
    """
    log_delta = (orders - 1) * (curve - epsilon + jnp.log1p(-1 / orders)) - jnp.log(orders)
    variation = 0.5 * jnp.log(-jnp.expm1(-curve))
    return jnp.exp(jnp.minimum(jnp.min(jnp.minimum(log_delta, variation), axis=-1), 0.0))


@float64
def gaussian_delta(epsilon: ArrayLike, mu: ArrayLike) -> jax.Array:
    """Exact delta at `epsilon` >= 0 of Gaussian releases with mu^2 = the sum of 1 / z^2.

    References:
        Balle and Wang, ICML 2018, Theorem 8.
    """
    return jnp.exp(_log_profile(epsilon / mu - mu / 2, mu))


@float64
def gaussian_epsilon(mu: ArrayLike, delta: ArrayLike) -> jax.Array:
    """Exact epsilon at `delta` of Gaussian releases, by bisection: the upper end, so never too
    small.

    Shapes:
        broadcasts.  Gradients are exact too: of the crossing, by the implicit function theorem.

    Example:
        >>> round(float(jax.grad(gaussian_epsilon)(1.0, 1e-5)), 4)
        5.0678
    """
    return _gaussian_epsilon(*jnp.broadcast_arrays(mu, delta))


def gaussian_epsilon_on_host(mu: ArrayLike, delta: ArrayLike) -> np.ndarray:
    """`gaussian_epsilon` of NumPy's numbers in NumPy: as exact, without a program to compile.

    Example:
        >>> bool(
        ...     np.isclose(gaussian_epsilon_on_host(1.0, 1e-5), gaussian_epsilon(1.0, 1e-5), 1e-10)
        ... )
        True
    """
    mu, delta = np.broadcast_arrays(np.asarray(mu, np.float64), np.asarray(delta, np.float64))

    def repeat(start, stop, body, ends):
        for i in range(start, stop):
            ends = body(i, ends)
        return ends

    with np.errstate(all="ignore"):
        return _crossing(mu, delta, np, scipy.special, repeat)


@jax.custom_jvp
def _gaussian_epsilon(mu, delta):
    return _crossing(mu, delta, jnp, jax.scipy.special, jax.lax.fori_loop)


def _crossing(mu, delta, xp, special, repeat):
    """Epsilon at delta, by halving; alike in NumPy and in jax.numpy."""
    is_zero = special.erf(mu / math.sqrt(8)) <= delta  # delta at epsilon 0, exact for tiny mu too
    safe_mu = xp.where(is_zero, 1.0, mu)

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        profile = _log_profile(middle / safe_mu - safe_mu / 2, safe_mu, xp, special)
        is_too_small = profile > xp.log(delta)
        return xp.where(is_too_small, middle, low), xp.where(is_too_small, high, middle)

    # the Gaussian tail exp(-s^2 / 2) at s = epsilon / mu - mu / 2 bounds delta
    high = safe_mu * (safe_mu / 2 + xp.sqrt(-2 * xp.log(delta)))
    _, fitting = repeat(0, 80, halve, (xp.zeros_like(high), high))
    return xp.where(is_zero, 0.0, fitting)


@_gaussian_epsilon.defjvp
def _(values, tangents):
    """delta has the derivatives density(v - mu) in mu and -e^epsilon P(X > v) in epsilon, v =
    epsilon / mu + mu / 2."""
    mu, delta = values
    epsilon = _gaussian_epsilon(mu, delta)
    is_positive = epsilon > 0
    v = jnp.where(is_positive, epsilon / jnp.where(is_positive, mu, 1.0) + mu / 2, 0.0)
    tail = log_ndtr(-v)
    in_mu, in_delta = jnp.exp(-(v**2) / 2 - HALF_LOG_2PI - tail), -jnp.exp(-epsilon - tail)
    return epsilon, jnp.where(is_positive, in_mu * tangents[0] + in_delta * tangents[1], 0.0)


@float64
def gaussian_mu(epsilon: ArrayLike, delta: ArrayLike) -> jax.Array:
    """The largest mu with gaussian_delta(epsilon, mu) <= delta, by bisection from below.

    Shapes:
        broadcasts.  It takes no derivatives.

    Example:
        >>> round(1 / float(gaussian_mu(1.0, 1e-5)), 4)
        3.7306
    """
    epsilon, delta = jnp.broadcast_arrays(epsilon, delta)
    ends = (jnp.full(delta.shape, math.log(mu)) for mu in (1e-18, 1e9))
    fits = lambda log_mu: gaussian_delta(epsilon, jnp.exp(log_mu)) <= delta
    return jnp.exp(roots.bisect(fits, *ends, 80)[0])


def profile_grid(rate: ArrayLike, z: ArrayLike, k: ArrayLike, nodes: int) -> tuple:
    """Points x, loss e of the Gaussian there, log of t = 1 + rate (e^e - 1), and log of weight *
    profile * e^e.

    The Gaussian has k / z for a multiplier's inverse; points are spaced for it.
    """
    z = z / k
    points, weights = LEGENDRE
    width = 4 * z * jnp.minimum(1.0, z)
    panels = nodes // len(points)
    x = 0.5 + width * (jnp.arange(panels)[:, None] + (points + 1) / 2).ravel()
    loss = (2 * x - 1) / (2 * z**2)
    large = loss > 30  # where rate * e^loss may overflow, the one is nothing
    ratio = jnp.where(
        large, jnp.log(rate) + loss, jnp.log1p(rate * jnp.expm1(jnp.where(large, 0.0, loss)))
    )
    shared = (
        _log_profile((x - 1) / z, 1 / z)
        + loss
        - 2 * jnp.log(z)
        + jnp.log(width / 2 * jnp.tile(weights, panels))
    )
    return x, loss, ratio, shared


def _profile_moment(orders, rate, z, k, nodes):
    """log of the integral of a (a - 1) (t^(a - 2) + t^(-a - 1)) profile e^e; and whether the points
    reach."""
    x, _, ratio, shared = profile_grid(rate, z, k, nodes)
    a = orders[:, None]
    # the first of both is larger where the ratio is above 1
    inner, mirrored = (a - 2) * ratio + shared, -(a + 1) * ratio + shared
    top = jax.lax.stop_gradient(jnp.max(inner, axis=1, keepdims=True))
    total = jnp.sum(jnp.exp(inner - top) + jnp.exp(mirrored - top), axis=1)
    return jnp.log(orders * (orders - 1)) + jnp.log(total) + top[:, 0], jnp.maximum(
        orders, 2.0
    ) + TAIL * z / k <= x[-1]


def _within_reach(reached, rate, sampled, whole):
    return jnp.where(reached & (rate < 1), jnp.minimum(sampled, whole), whole)


def _log_mean_excess(a, u, log_weight):
    """log of the sum over u [m] of weight * ((1 + u)^a - 1 - a u), for a [n, 1] > 1, u > -1:
    without cancellation or overflow, and with one exponential for each pair."""
    # log(1 + u) - u, for all orders
    tiny = jnp.abs(u) < 0.05
    v, series = jnp.where(tiny, u, 0.0), 0.0
    for k in range(14, 1, -1):
        series = (-1) ** (k + 1) / k + v * series
    short = jnp.where(tiny, v**2 * series, jnp.log1p(u) - u)
    power = a * jnp.log1p(u)
    top = jax.lax.stop_gradient(
        jnp.max(jnp.maximum(power, 0.0) + log_weight, axis=1, keepdims=True)
    )
    # near 1 the power is e^p - 1 - p more than 1 + p, by a series whose terms fall by p / 4 or more
    near = jnp.abs(power) < 0.25
    p, series = jnp.where(near, power, 0.0), 1.0
    for k in range(13, 2, -1):
        series = 1 + p * series / k
    large = jnp.where(near, 0.0, jnp.exp(power + log_weight - top))
    rest = jnp.exp(log_weight) * jnp.where(near, p**2 / 2 * series + a * short, -1 - a * u)
    return jnp.log(jnp.sum(large, axis=1) + jnp.exp(-top[:, 0]) * jnp.sum(rest, axis=1)) + top[:, 0]


def _log_profile(s, d, xp=jnp, special=jax.scipy.special):
    """log(delta) at epsilon = d s + d^2 / 2 of the pair N(d, 1), N(0, 1): log(P(X > s) - e^epsilon
    P(X > s + d)).

    With M = P(X > v) / density(v), this is log(density(s)) + log(M(s) - M(s + d)).  For small d the
    difference is the integral of 1 - v M(v), which three points give to rounding where a difference
    of logs would lose digits.
    """
    upper = special.log_ndtr(-s)
    direct = upper + xp.log(
        -xp.expm1(xp.minimum(d * s + d**2 / 2 + special.log_ndtr(-s - d) - upper, -1e-15))
    )
    nodes, weights = np.polynomial.legendre.leggauss(3)
    fine = d < 0.05
    s_, d_ = xp.where(fine, s, 0.0)[..., None], xp.where(fine, d, 0.05)[..., None]
    v = s_ + d_ * (nodes + 1) / 2
    slope = 1 - v * xp.exp(special.log_ndtr(-v) + v**2 / 2 + HALF_LOG_2PI)
    slope = xp.maximum(slope, 1 / (v**2 + 3))  # holds exactly; rounding breaks it far out
    small = -(s**2) / 2 - HALF_LOG_2PI + xp.log(xp.sum(weights / 2 * slope, axis=-1) * d_[..., 0])
    return xp.where(fine, small, direct)
