"""Renyi differential privacy of the Gaussian, the Laplace and their subsampled forms.

A curve holds the Renyi divergence at each of `orders`.  The curves of consecutive steps add up.
Each formula is written once, over an array library: concrete numbers are computed by NumPy, which
needs no compilation, and traced ones by a compiled program of jax.numpy.  Both compute in float64
whatever JAX's default type, and the programs work under jit, vmap and scan.  (Arithmetic between
their results follows JAX's default again: add curves in NumPy or inside `jax.enable_x64(True)`, or
use events.)

Arguments that the functions of this module share:
    orders: Float[n] > 1.
    z: the noise multiplier, std / sensitivity under the adjacency in use.
    curve: Float[n], with the shape of `orders`.

Curves with sampling are integrals on one grid of points shared by all orders.  For an order that
the grid does not cover they return the curve without sampling, which is larger: never too small,
never nan.
"""

import functools
import inspect
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax.typing import ArrayLike

from ...core.pytrees import in_float64

NUM_NODES = 1024  # number of points of an integral
MAX_EXPONENT = 690.0  # log of the largest likelihood ratio that is computed
TAIL = 10.0  # integrals end this many standard deviations after the last mode
LEGENDRE = np.polynomial.legendre.leggauss(16)
THREE_POINTS = np.polynomial.legendre.leggauss(3)
HALF_LOG_2PI = math.log(2 * math.pi) / 2
MAX_TANGENTS = 60  # steps of Newton's method; five to eight are usually enough
ROUNDING = 4e-15  # relative rounding error of an epsilon
# Random allocation: the largest order and the smallest noise multiplier with amplification, the
# range of the integrals in standard deviations, the relative rounding error of the curve, and the
# number of points that are computed together.
MAX_ALLOCATION_ORDER, MIN_ALLOCATION_NOISE = 64, 0.25
ALLOCATION_TAIL = 14.0
ALLOCATION_ROUNDING = 1e-9
TRANSFORM_BLOCK = 64


class Library(NamedTuple):
    """The library functions that a formula uses, of NumPy or of JAX."""

    numpy: ModuleType
    special: ModuleType
    while_loop: Callable  # like jax.lax.while_loop
    scan: Callable  # (add, total, items) -> total


def _while_loop_on_host(condition, body, state):
    while condition(state):
        state = body(state)
    return state


def _scan_on_host(add, total, items):
    for item in zip(*items):
        total = add(total, item)
    return total


def _scan_compiled(add, total, items):
    return jax.lax.scan(lambda total, item: (add(total, item), None), total, items)[0]


ON_HOST = Library(np, scipy.special, _while_loop_on_host, _scan_on_host)
COMPILED = Library(jnp, jax.scipy.special, jax.lax.while_loop, _scan_compiled)


def float64(function: Callable, **options: Any) -> Callable:
    """Compile `function` to compute in float64, whatever JAX's default type.

    The compiled function converts all its arguments to float64.

    Args:
        function: takes arrays as positional arguments, and pytrees of arrays as keyword arguments.
        options: keyword arguments of jax.jit.
    """
    compiled = jax.jit(function, **options)

    def scoped(*args, **trees):
        with in_float64():
            trees = jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), trees)
            return compiled(*(jnp.asarray(a, jnp.float64) for a in args), **trees)

    return functools.update_wrapper(scoped, function)


def over_libraries(function: Callable) -> Callable:
    """Wrap a formula to use NumPy for concrete arguments, and jax.numpy for traced ones.

    Both compute in float64, and the version for traced arguments is compiled.

    Args:
        function: the formula.  Its first argument is the `Library` to use, which callers of the
            wrapped function leave out.
    """
    compiled = float64(functools.partial(function, COMPILED))

    @functools.wraps(function)
    def dispatch(*args, **named):
        values = signature.bind(*args, **named).args
        if any(isinstance(value, jax.core.Tracer) for value in values):
            return compiled(*values)
        with np.errstate(all="ignore"):  # an overflow gives inf, which proves nothing
            return function(ON_HOST, *(np.asarray(value, np.float64) for value in values))

    full = inspect.signature(function)
    signature = full.replace(parameters=list(full.parameters.values())[1:])
    vars(dispatch)["__signature__"] = signature
    return dispatch


# --- curves


@over_libraries
def gaussian(_: Library, orders: Any, z: Any) -> Any:
    """Return the Renyi divergences of one Gaussian release: order / (2 z^2) at each order.

    Args:
        orders, z: see the module.

    References:
        Mironov, CSF 2017, Corollary 3.

    Example:
        >>> float(gaussian(2.0, 0.5))
        4.0
    """
    return orders / (2 * z**2)


@over_libraries
def laplace(library: Library, orders: Any, z: Any) -> Any:
    """Return the Renyi divergences of one Laplace release at `orders`; each is at most 1 / z.

    Args:
        orders: see the module.
        z: the scale of the noise over the sensitivity, which is in the L1 norm.

    References:
        Mironov, CSF 2017, Proposition 6.

    Example:
        >>> round(float(laplace(2.0, 1.0)), 4)
        0.6191
    """
    xp, shift = library.numpy, 1 / z
    total = xp.logaddexp(
        xp.log(orders / (2 * orders - 1)) + (orders - 1) * shift,
        xp.log((orders - 1) / (2 * orders - 1)) - orders * shift,
    )
    return xp.clip(total / (orders - 1), 0.0, shift)


@over_libraries
def pure(library: Library, orders: Any, epsilon: Any) -> Any:
    """Return bounds on the Renyi divergences of any (epsilon, 0)-differentially private release.

    These are the divergences of randomized response at `orders`; each is at most epsilon.

    References:
        Bun and Steinke, TCC 2016, proof of Proposition 3.3: no such pair of distributions has a
        larger divergence than a pair on two points.

    Example:
        >>> round(float(pure(2.0, 1.0)), 4)
        0.7353
    """
    xp = library.numpy
    total = xp.logaddexp((orders - 1) * epsilon, -orders * epsilon) - xp.log1p(xp.exp(-epsilon))
    return xp.clip(total / (orders - 1), 0.0, epsilon)


@over_libraries
def poisson(library: Library, orders: Any, rate: Any, z: Any) -> Any:
    """Return the Renyi divergences of a Gaussian release on a Poisson sample, for add_remove.

    At order a, the divergence of (1 - rate) N(0, z^2) + rate N(1, z^2) from N(0, z^2) is
    log(E[(1 + u)^a]) / (a - 1).  Here u(x) = rate * (r(x) - 1) for the likelihood ratio r of
    N(1, z^2) to N(0, z^2), and E is the expectation over x ~ N(0, z^2).  Since E[u] = 0,
    E[(1 + u)^a] - 1 is the expectation of (1 + u)^a - 1 - a u, which is never negative, so no
    digits cancel.  The trapezoid rule computes this integral exactly up to rounding, because the
    integrand is analytic within pi z^2 of the real line.

    Args:
        orders, z: see the module.
        rate: the sampling rate, in (0, 1]; rate = 1 is `gaussian`.

    References:
        Mironov, Talwar, Zhang, 2019, "Renyi differential privacy of the sampled Gaussian
        mechanism".

    Example:
        >>> round(float(poisson(2.0, 0.01, 1.0)), 8)
        0.00017181
    """
    xp = library.numpy
    q = xp.where(rate < 1, rate, 0.5)
    x, log_weight = _normal_nodes(library, z, 1.0)
    u = q * xp.expm1((2 * x - 1) / (2 * z**2))
    curve = xp.logaddexp(_log_mean_excess(library, orders, u, log_weight), 0.0) / (orders - 1)
    is_covered = orders + TAIL * z <= x[-1]
    return _within_reach(library, is_covered, rate, curve, orders / (2 * z**2))


@over_libraries
def poisson_group(library: Library, orders: Any, distribution: Any, z: Any) -> Any:
    """Return the Renyi divergences of a Gaussian release on a Poisson sample, for a group of units.

    Neighbouring datasets differ by adding or removing the whole group.  At each order the result is
    the larger divergence of the two directions of the pair `pairs.removed`, computed by the same
    integral as in `poisson`.

    Args:
        orders: see the module.
        distribution: Float[m + 1]; k of the m units join the sample with probability
            distribution[k].
        z: std / sensitivity of one unit.

    References:
        Charles et al., arXiv:2407.07737.
    """
    xp = library.numpy
    most = len(distribution) - 1
    unsampled = orders * most**2 / (2 * z**2)
    x, log_weight = _normal_nodes(library, z, most / 2)
    number = xp.arange(1.0, most + 1)[:, None]
    ratios = xp.expm1(xp.minimum((2 * number * x - number**2) / (2 * z**2), MAX_EXPONENT))
    u = xp.sum(distribution[1:, None] * ratios, axis=0)
    both = (_log_mean_excess(library, powers, u, log_weight) for powers in (orders, 1 - orders))
    curve = xp.logaddexp(xp.maximum(*both), 0.0) / (orders - 1)
    is_covered = orders * most + TAIL * z <= xp.minimum(x[-1], MAX_EXPONENT * z**2 / most)
    return xp.where(is_covered & (distribution[0] > 0), xp.minimum(curve, unsampled), unsampled)


@over_libraries
def without_replacement(library: Library, orders: Any, rate: Any, z: Any) -> Any:
    """Return bounds on the Renyi divergences of a Gaussian on a fixed-size sample, for replace_one.

    Let H(e) be the hockey-stick divergence of the Gaussian without sampling, at epsilon e >= 0.
    With sampling, the divergence at epsilon log(1 + rate (exp(e) - 1)) is at most rate * H(e),
    whichever of the two neighbouring datasets comes first.  An integral over e turns these bounds
    into a bound on the Renyi divergence.  It is up to four times smaller than the commonly used
    series bound.

    Args:
        orders, z: see the module.
        rate: sample size / population size; rate = 1 is `gaussian`.

    References:
        Balle, Barthe, Gaboardi, NeurIPS 2018, Theorem 11.
    """
    xp = library.numpy
    q = xp.where(rate < 1, rate, 0.5)
    log_moment, is_covered = _profile_moment(library, orders, q, z, 1.0, NUM_NODES)
    curve = xp.logaddexp(2 * xp.log(q) + log_moment, 0.0) / (orders - 1)
    return _within_reach(library, is_covered, rate, curve, orders / (2 * z**2))


@over_libraries
def with_replacement(library: Library, orders: Any, distribution: Any, z: Any) -> Any:
    """Return bounds on the Renyi divergences of a Gaussian on draws with replacement, for
    replace_one.

    Let eta = 1 - distribution[0], and let A be the output without a copy of the element.  The
    outputs on two neighbours are mixtures (1 - eta) A + eta B and (1 - eta) A + eta B' with the
    same A.  By advanced joint convexity, their hockey-stick divergence at 1 + eta (e^epsilon - 1)
    is at most eta times the divergence, at epsilon, of B from A or from B'.  Draw all places from
    the other elements first, then the k places that the element takes.  Given both, A, B and B' are
    Gaussians whose means lie within k sensitivities of each other, so the divergence of B is at
    most the mean over k >= 1 of the Gaussian profile at k / z.  Both directions are identical.
    Moments of the mirrored profile give the curve, as in `without_replacement`; for one draw the
    two curves are equal.  (The module `pairs` has a smaller profile.)  The distribution of k may be
    any that does not depend on the data, including one that is conditioned on few copies.

    Args:
        orders: see the module.
        distribution: Float[m + 1]; an element is drawn k times with probability distribution[k].
        z: std / replace_one sensitivity of one copy.

    References:
        Balle, Barthe, Gaboardi, NeurIPS 2018, Theorems 2 and 10 (draws with replacement,
        substitution).
    """
    xp = library.numpy
    # If the element is always drawn, eta is not used; any number in (0, 1) will do.
    eta = xp.where(distribution[0] > 0, xp.minimum(xp.sum(distribution[1:]), 1.0), 0.5)
    a = xp.maximum(orders, 2.0)

    def add(total, item):
        k, mass = item
        if library is ON_HOST and not mass > 0:
            return total
        log_moment, is_covered = _profile_moment(library, orders, eta, z, k, 4 * NUM_NODES)
        # Where the grid does not cover the order, bound both halves of the integral.
        power = a * (a - 1) * k**2 / (2 * z**2)
        factor = xp.where(orders < 2, orders * (orders - 1), 2.0)
        beyond = xp.log(factor) + power + xp.log(-xp.expm1(-power))
        log_mass = xp.log(xp.where(mass > 0, mass, 1.0))
        term = log_mass + xp.log(eta) + xp.where(is_covered, log_moment, beyond)
        return xp.where(mass > 0, xp.logaddexp(total, term), total)

    copies = xp.arange(1.0, len(distribution))
    total = library.scan(add, xp.zeros_like(orders), (copies, distribution[1:]))
    most = xp.max(xp.where(distribution[1:] > 0, copies, 0.0))
    unsampled = orders * most**2 / (2 * z**2)
    return xp.where(distribution[0] > 0, xp.minimum(total / (orders - 1), unsampled), unsampled)


def allocation(orders: ArrayLike, slots: float, z: float) -> np.ndarray:
    """Return bounds on the Renyi divergences of `slots` Gaussian releases if a unit is in only one,
    for add_remove.

    Each release is a round, and the round of the unit is drawn uniformly and not revealed.  At each
    of `orders`, the result is the larger divergence of the two directions.

    If the unit is absent, all t = slots outcomes y_i are N(0, z^2); otherwise one of them, chosen
    at random, has mean 1.  The likelihood ratio is the mean M of t independent log-normal variables
    X_i = exp((y_i - 1/2) / z^2), each of mean 1.  Contributions may depend on earlier releases: the
    Gaussian is rotated to the direction in which they point, and noise is added to shorter ones
    (see `Privacy` of sampling.random_allocation).

    - Present against absent, order a: log E[M^a] / (a - 1).  For integers a this is a sum over how
      often each y_i is counted, the coefficient of x^a in (sum over m of x^m / m! exp(m (m - 1) /
      (2 z^2)))^t.
    - Absent against present: log E[M^-s] / s with s = a - 1, where E[M^-s] = t^s / Gamma(s) times
      the integral of u^(s - 1) E[exp(-u X)]^t.  The trapezoid rule in log u and in the normal
      variable is exact up to rounding: both integrands are analytic and decrease fast.

    Between integer orders, (a - 1) times the curve is convex, so a chord lies above it.  For orders
    above MAX_ALLOCATION_ORDER, and for z below MIN_ALLOCATION_NOISE, the result is order / (2 z^2),
    without amplification.

    Args:
        orders, z: see the module; concrete numbers.
        slots: the number of rounds.

    References:
        Feldman and Shenfeld, arXiv:2502.08202 (integer orders, present against absent).

    Example:
        >>> one, many = (allocation(np.array([2.0]), t, 2.0)[0] for t in (1.0, 100.0))
        >>> round(float(one), 4), bool(many < one / 50)
        (0.25, True)
    """
    orders = np.asarray(orders, np.float64)
    unsampled = orders / (2 * z**2)
    if slots < 2 or z < MIN_ALLOCATION_NOISE:
        return unsampled
    with np.errstate(all="ignore"):
        moments = _allocation_moments(int(slots), float(z))
        integers = np.arange(1.0, MAX_ALLOCATION_ORDER + 1)
        within = np.interp(orders, integers, moments) / (orders - 1)
        bound = np.minimum(within * (1 + ALLOCATION_ROUNDING), unsampled)
    return np.where(orders <= MAX_ALLOCATION_ORDER, bound, unsampled)


@over_libraries
def participation(library: Library, orders: Any, probability: Any, curve: Any) -> Any:
    """Return bounds on the Renyi divergences of a release that happens only with some probability.

    The bounds also hold, and are exact, if the observer sees whether the release happens.  They
    follow from the joint convexity of exp((a - 1) D), for the order a and the divergence D.

    Args:
        orders: see the module.
        probability: the probability of the release.
        curve: the divergences of the release if it happens, at `orders`.

    Returns:
        The divergences at `orders`.

    Example:
        >>> float(participation(2.0, 1.0, 0.3)) == 0.3
        True
    """
    xp = library.numpy
    power = (orders - 1) * curve
    p = xp.where(probability < 1, probability, 0.5)
    small = xp.log1p(p * xp.expm1(xp.minimum(power, 1.0)))
    large = xp.logaddexp(xp.log1p(-p), xp.log(p) + power)
    mixed = xp.where(power < 1, small, large) / (orders - 1)
    return xp.where(probability < 1, xp.minimum(mixed, curve), curve)


# --- conversions


@over_libraries
def convert(library: Library, orders: Any, curve: Any, delta: Any) -> Any:
    """Return the epsilon that the divergence at each order proves at `delta`.

    All arguments broadcast against each other.  Each epsilon is valid, so the smallest one may be
    used.  A divergence of 0 proves 0.

    Args:
        orders, curve: see the module.
        delta: in (0, 1).

    References:
        Canonne, Kamath, Steinke, 2020, Proposition 12; and total variation <= sqrt(1 -
        exp(-divergence)) (Bretagnolle and Huber): if that is at most delta, epsilon is 0.
    """
    return _convert(library, orders, curve, delta)


def _convert(library, orders, curve, delta):
    xp = library.numpy
    epsilon = curve + xp.log1p(-1 / orders) - (xp.log(delta) + xp.log(orders)) / (orders - 1)
    return xp.where(delta**2 > -xp.expm1(-curve), 0.0, xp.maximum(epsilon, 0.0))


@over_libraries
def epsilon(library: Library, orders: Any, curve: Any, delta: Any) -> Any:
    """Return the smallest epsilon that Renyi divergences prove at `delta`; never negative.

    Args:
        orders: Float[n], the orders of the divergences, > 1.
        curve: Float[..., n], the divergences at these orders.
        delta: in (0, 1); broadcasts against `curve`.

    Returns:
        Float64[...].
    """
    return library.numpy.min(_convert(library, orders, curve, delta), axis=-1)


# --- the exact Gaussian


@over_libraries
def gaussian_delta(library: Library, epsilon: Any, mu: Any) -> Any:
    """Return the exact delta of Gaussian releases without sampling.

    Args:
        epsilon: the epsilon at which delta is wanted, >= 0.
        mu: sqrt(sum of 1 / z^2), where z is the noise multiplier of each release.

    References:
        Balle and Wang, ICML 2018, Theorem 8.
    """
    return library.numpy.exp(_log_profile(library, epsilon / mu - mu / 2, mu))


@over_libraries
def gaussian_epsilon(library: Library, mu: Any, delta: Any) -> Any:
    """Return the epsilon of Gaussian releases without sampling, up to rounding and never too small.

    The arguments broadcast.  The function is not differentiable.

    Args:
        mu: sqrt(sum of 1 / z^2), where z is the noise multiplier of each release.
        delta: in (0, 1).

    Example:
        >>> round(float(gaussian_epsilon(1.0, 1e-5)), 4)
        4.3772
    """
    # Newton's method on log(delta(epsilon)), from above.  delta(epsilon) is an expectation of a
    # log-concave function of a normal variable, so its logarithm is concave: tangents lie above it,
    # and each point is above the true epsilon, except for rounding.  The condition was evaluated at
    # the returned point.
    xp, special = library.numpy, library.special
    mu, delta = xp.broadcast_arrays(mu, delta)
    is_zero = special.erf(mu / math.sqrt(8)) <= delta  # exact for tiny mu too
    mu = xp.where(is_zero, 1.0, mu)
    target = xp.log(delta)
    # the Gaussian tail exp(-s^2 / 2) at s = epsilon / mu - mu / 2 bounds delta
    start = mu * (mu / 2 + xp.sqrt(-2 * target))

    def follow_tangent(state):
        step, point, proved, _ = state
        s = point / mu - mu / 2
        profile = _log_profile(library, s, mu)
        fits = profile <= target
        proved = xp.where(fits, xp.minimum(proved, point), proved)
        slope = -xp.exp(point + special.log_ndtr(-s - mu) - profile)
        after = xp.maximum(point - (profile - target) / slope, 0.0)
        # Move a point that rounding made too small up again, and keep it there.
        after = xp.where(fits, after, xp.maximum(after, point * (1 + ROUNDING)))
        moves = (xp.abs(after - point) > ROUNDING / 2 * point) & (proved >= point)
        return step + 1, xp.where(moves, after, point), proved, moves.any()

    is_moving = lambda state: (state[0] < MAX_TANGENTS) & state[3]
    proved = library.while_loop(is_moving, follow_tangent, (0, start, start, True))[2]
    return xp.where(is_zero, 0.0, proved)


# --- parts of the formulas


def _log_profile(library, s, d):
    """Return log(delta) at epsilon = d s + d^2 / 2 for the pair N(d, 1), N(0, 1).

    This is log(P(X > s) - e^epsilon P(X > s + d)) for a standard normal X.  With M = P(X > v) /
    density(v), it is log(density(s)) + log(M(s) - M(s + d)).  For small d the difference is the
    integral of 1 - v M(v), for which three points suffice; a difference of logs would lose digits.
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


def _profile_moment(library, orders, rate, z, copies, num_nodes):
    """Return the log of a moment of the Gaussian profile, and whether the grid covers the order.

    The moment is the integral over e of a (a - 1) (t^(a - 2) + t^(-a - 1)) profile(e) e^e with t =
    1 + rate (e^e - 1), for each order a, for the Gaussian with multiplier z / copies.

    Returns:
        Float64[...] and Bool[...], with the shape of `orders`.
    """
    xp = library.numpy
    z = z / copies
    points, weights = LEGENDRE
    width = 4 * z * xp.minimum(1.0, z)
    panels = num_nodes // len(points)
    x = 0.5 + width * (xp.arange(panels)[:, None] + (points + 1) / 2).ravel()
    loss = (2 * x - 1) / (2 * z**2)
    large = loss > 30  # rate * e^loss may overflow here, and 1 - rate is negligible
    log_ratio = xp.where(
        large, xp.log(rate) + loss, xp.log1p(rate * xp.expm1(xp.where(large, 0.0, loss)))
    )
    log_weight = xp.log(width / 2 * xp.tile(weights, panels))
    shared = _log_profile(library, (x - 1) / z, 1 / z) + loss - 2 * xp.log(z) + log_weight
    a = orders[..., None]
    # The first term is the larger one where the ratio is above 1.
    inner, mirrored = (a - 2) * log_ratio + shared, -(a + 1) * log_ratio + shared
    top = xp.max(inner, axis=-1, keepdims=True)
    total = xp.sum(xp.exp(inner - top) + xp.exp(mirrored - top), axis=-1)
    log_moment = xp.log(orders * (orders - 1)) + xp.log(total) + top[..., 0]
    return log_moment, xp.maximum(orders, 2.0) + TAIL * z <= x[-1]


def _within_reach(library, is_covered, rate, sampled, unsampled):
    """Return the curve with sampling where the grid covers it, and otherwise the curve without."""
    xp = library.numpy
    return xp.where(is_covered & (rate < 1), xp.minimum(sampled, unsampled), unsampled)


def _normal_nodes(library, z, most):
    """Return points x [m] that cover N(0, z^2), and the logs of their weights in an integral.

    Args:
        library, z: see the module.
        most: the points are at most z^2 / (2 * most) apart.
    """
    xp = library.numpy
    step = 0.5 * z * xp.minimum(1.0, z / most)
    x = -TAIL * z + step * xp.arange(NUM_NODES)
    return x, xp.log(step / z) - (x / z) ** 2 / 2 - HALF_LOG_2PI


def _log_mean_excess(library, powers, u, log_weight):
    """Return the log of the sum over u of weight * ((1 + u)^a - 1 - a u), for each power a.

    It avoids cancellation and overflow, and computes one exponential for each pair (a, u).

    Args:
        powers: Float[...], each above 1 or below 0.
        u, log_weight: Float[m], where u > -1.

    Returns:
        Float64[...].
    """
    xp, a = library.numpy, powers[..., None]
    # log(1 + u) - u, for all orders
    tiny = xp.abs(u) < 0.05
    v, series = xp.where(tiny, u, 0.0), 0.0
    for k in range(14, 1, -1):
        series = (-1) ** (k + 1) / k + v * series
    short = xp.where(tiny, v**2 * series, xp.log1p(u) - u)
    power = a * xp.log1p(u)
    top = xp.max(xp.maximum(power, 0.0) + log_weight, axis=-1, keepdims=True)
    # If the power e^p is near 1, compute e^p - 1 - p by a series with ratios of at most p / 4.
    near = xp.abs(power) < 0.25
    p, series = xp.where(near, power, 0.0), 1.0
    for k in range(13, 2, -1):
        series = 1 + p * series / k
    large = xp.where(near, 0.0, xp.exp(power + log_weight - top))
    rest = xp.exp(log_weight) * xp.where(near, p**2 / 2 * series + a * short, -1 - a * u)
    total = xp.sum(large, axis=-1) + xp.exp(-top[..., 0]) * xp.sum(rest, axis=-1)
    return xp.log(total) + top[..., 0]


# --- random allocation


@functools.lru_cache(256)
def _allocation_moments(slots, z):
    """Return (a - 1) times the larger divergence of both directions, for each order a = 1, 2, ...

    The result is Float64[MAX_ALLOCATION_ORDER].
    """
    return np.maximum(_present_moments(slots, z), _absent_moments(slots, z))


def _present_moments(slots, z):
    """Return log E[M^a] for a = 1, 2, ...; see `allocation`."""
    m = np.arange(MAX_ALLOCATION_ORDER + 1.0)
    one = m * (m - 1) / (2 * z**2) - scipy.special.gammaln(m + 1)
    total = _power_of_series(one, slots)
    return np.maximum(total + scipy.special.gammaln(m + 1) - m * math.log(slots), 0.0)[1:]


def _power_of_series(series, n):
    """Return the logs of the first coefficients of the n-th power of a power series, given their
    logs."""
    if n == 1:
        return series
    half = _power_of_series(series, n // 2)
    even_power = _product_of_series(half, half)
    return _product_of_series(even_power, series) if n % 2 else even_power


def _product_of_series(a, b):
    """Return the logs of the first coefficients of a product of two power series, given their
    logs."""
    size = len(a)
    return np.array([np.logaddexp.reduce(a[: k + 1] + b[k::-1]) for k in range(size)])


def _absent_moments(slots, z):
    """Return log E[M^(1 - a)] for a = 1, 2, ...; see `allocation`."""
    sigma, most = 1 / z, MAX_ALLOCATION_ORDER - 1
    # The integral over the normal variable starts here; it needs small values of X.
    lowest = -ALLOCATION_TAIL - most * sigma / slots
    step = min(0.05, 0.2 / sigma)
    g = np.arange(lowest, ALLOCATION_TAIL, step)
    weight = -(g**2) / 2 - 0.5 * math.log(2 * math.pi) + math.log(step)
    log_x = sigma * g - sigma**2 / 2
    last = ALLOCATION_TAIL * sigma + most * sigma**2 / slots + sigma**2
    v = np.arange(-math.log(slots) - 45.0, last, 0.04)  # log u
    logsumexp: Any = scipy.special.logsumexp  # its type is also that of sums with signs
    transform = np.concatenate(
        [
            logsumexp(weight - np.exp(np.minimum(block[:, None] + log_x, 300.0)), axis=1)
            for block in np.array_split(v, max(1, len(v) // TRANSFORM_BLOCK))
        ]
    )
    s = np.arange(1.0, MAX_ALLOCATION_ORDER)
    integral = logsumexp(s[:, None] * v + slots * transform, axis=1) + math.log(0.04)
    moments = integral + s * math.log(slots) - scipy.special.gammaln(s)
    return np.append(0.0, np.maximum(moments, 0.0))
