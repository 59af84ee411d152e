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
from jax.scipy.special import log_ndtr
from jax.typing import ArrayLike

from ...core.aliases import Number
from ...core.precision import in_float64
from . import rdp_formulas as formulas
from . import roots
from .rdp_formulas import COMPILED, HALF_LOG_2PI, log_profile


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
def gaussian(orders: jax.Array, z: Number) -> jax.Array:
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
def laplace(orders: ArrayLike, z: ArrayLike) -> jax.Array:
    """Curve of one Laplace release of scale z, in units of the sensitivity.

    Shapes:
        orders [n] > 1 -> [n], at most 1 / z.

    References:
        Mironov, CSF 2017, Proposition 6.

    Example:
        >>> round(float(laplace(2.0, 1.0)), 4)
        0.6191
    """
    return formulas.laplace(COMPILED, orders, z)


@float64
def pure(orders: ArrayLike, epsilon: ArrayLike) -> jax.Array:
    """Curve of whatever is epsilon-private at delta = 0: that of randomized response.

    Shapes:
        orders [n] > 1 -> [n], at most epsilon.

    References:
        Bun and Steinke, TCC 2016, proof of Proposition 3.3: no such pair has a larger divergence
        than that on two points.

    Example:
        >>> round(float(pure(2.0, 1.0)), 4)
        0.7353
    """
    return formulas.pure(COMPILED, orders, epsilon)


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
    return formulas.poisson(COMPILED, orders, rate, z)


@float64
def poisson_group(orders: ArrayLike, law: ArrayLike, z: ArrayLike) -> jax.Array:
    """Curve of a Gaussian on a Poisson sample that k of several units join with law[k], for
    add_remove of all of them.

    The larger divergence of both directions of the pair in the module `poisson_group`, by the
    integral of `poisson`.

    Shapes:
        orders [n] > 1, law [m + 1] -> [n].

    Units:
        z: std over the sensitivity of one unit.

    References:
        Charles et al., arXiv:2407.07737.
    """
    return formulas.poisson_group(COMPILED, orders, law, z)


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
    return formulas.without_replacement(COMPILED, orders, rate, z)


@float64
def with_replacement(orders: ArrayLike, law: jax.Array, z: ArrayLike) -> jax.Array:
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
    orders, eta = jnp.atleast_1d(orders), formulas.chance_of_a_copy(COMPILED, law)

    def add(total, each):
        k, mass = each
        term = formulas.copies(COMPILED, orders, eta, z, k, mass)
        return jnp.where(mass > 0, jnp.logaddexp(total, term), total), None

    copies = jnp.arange(1.0, len(law)), law[1:]
    total, _ = jax.lax.scan(add, jnp.zeros_like(orders), copies)
    return formulas.of_all_copies(COMPILED, orders, law, z, total)


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
    return formulas.participation(COMPILED, orders, probability, curve)


@float64
def either(
    orders: ArrayLike, probability: ArrayLike, first: ArrayLike, second: ArrayLike
) -> jax.Array:
    """Curve of a release that is `first` with `probability`, visibly, and else `second`.

    Shapes:
        orders [n], first [n], second [n] -> [n].

    References:
        Joint convexity of exp((a - 1) D).

    Example:
        >>> float(either(2.0, 0.5, 0.3, 0.3)).__round__(12)
        0.3
    """
    return formulas.either(COMPILED, orders, probability, first, second)


@float64
def convert(orders: ArrayLike, curve: ArrayLike, delta: ArrayLike) -> jax.Array:
    """The epsilon that each order proves at `delta`; the smallest counts.

    Shapes:
        broadcasts; a curve of zeros proves 0.

    References:
        Canonne, Kamath, Steinke, 2020, Proposition 12; and total variation <= sqrt(1 -
        exp(-divergence)) (Bretagnolle and Huber), by which 0 is enough when that is at most delta.
    """
    return formulas.convert(COMPILED, orders, curve, delta)


@float64
def epsilon(orders: ArrayLike, curve: ArrayLike, delta: ArrayLike) -> jax.Array:
    """The smallest epsilon at `delta` that a curve proves; never negative.

    Shapes:
        orders [n], curve [..., n] -> [...].
    """
    return jnp.min(convert(orders, curve, delta), axis=-1)


@float64
def delta(orders: jax.Array, curve: jax.Array, epsilon: ArrayLike) -> jax.Array:
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
    return jnp.exp(log_profile(COMPILED, epsilon / mu - mu / 2, mu))


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


@jax.custom_jvp
def _gaussian_epsilon(mu, delta):
    return formulas.crossing(COMPILED, mu, delta, jax.lax.fori_loop)


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
    low, high = (jnp.full(delta.shape, math.log(mu)) for mu in (1e-18, 1e9))
    fits = lambda log_mu: gaussian_delta(epsilon, jnp.exp(log_mu)) <= delta
    return jnp.exp(roots.bisect(fits, low, high, 80)[0])
