"""The bound of Wang, Balle and Kasiviswanathan for samples of fixed size, as papers use it: two
series.

`rdp.without_replacement` is up to four times smaller for the Gaussian and as sound.  These exist to
evaluate what was published, and for mechanisms that are known by their curve only.  They may exceed
the curve without sampling, which holds too: take the smaller one.  Curves are for replace_one of an
element *of the sampled population*, and `rate` is sample / population.  Orders are concrete
numbers; rate and z may be traced.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln, logsumexp
from jax.typing import ArrayLike

from jfl.core import checks
from jfl.core.pytrees import in_float64
from jfl.privacy.accountants import rdp

NODES = 1024


def crude(orders: ArrayLike, rate: ArrayLike, z: ArrayLike) -> jax.Array:
    """The general bound at a Gaussian's curve.

    Args:
        orders: [n] > 1, concrete; those between whole ones are interpolated.
        rate: sample / population, in (0, 1].
        z: noise multiplier, std over the replace_one sensitivity.

    Returns:
        Float64[n], the curve at `orders`.

    Raises:
        ValueError: unless orders are concrete and > 1.

    References:
        Wang, Balle, Kasiviswanathan, AISTATS 2019, Theorem 9 with an unbounded curve at infinity.
    """
    return wor_rdp(orders, rate, lambda j: j / (2 * jnp.asarray(z, jnp.float64) ** 2))


def refined(orders: ArrayLike, rate: ArrayLike, z: ArrayLike) -> jax.Array:
    """The bound with alternating sums B(l) = E[(e^X - 1)^l], X ~ N(-1 / (2 z^2), 1 / z^2), in place
    of raw moments.

    Each term is the smaller of the two series.  B is needed at even l, where it is the mean of
    nonnegative numbers: the trapezoid rule on logarithms loses nothing, where the sum itself needs
    a hundred digits.

    Parameters, result and errors are those of `crude`.

    References:
        Wang, Balle, Kasiviswanathan, AISTATS 2019, Theorem 27.

    Example:
        >>> refined([2.0, 8.0], 0.2, 10.0).round(6).tolist()
        [0.001607, 0.00675]
    """
    with in_float64():
        z = jnp.asarray(z, jnp.float64)
        return _series(orders, rate, lambda j: j / (2 * z**2), lambda evens: _log_moments(evens, z))


def wor_rdp(orders: ArrayLike, rate: ArrayLike, rdp_of_order: Callable) -> jax.Array:
    """The general bound on a mechanism that runs on a sample of fixed size.

    It does not vanish with the curve: its terms from the third on tend to 2 rate^j binom(a, j).

    Args:
        orders: [n] > 1, as in `crude`.
        rate: sample / population, in (0, 1].
        rdp_of_order: the mechanism's curve under replace_one, whole orders [m] -> [m], traceable.

    Returns:
        Float64[n], the curve at `orders`.

    Raises:
        ValueError: as `crude`.

    References:
        as `crude`.
    """
    return _series(orders, rate, rdp_of_order, None)


def interpolate(orders: jax.Array, whole: jax.Array, curve: ArrayLike) -> jax.Array:
    """A curve between whole orders: (a - 1) times it is convex in a, and so below its chords.

    Shapes:
        orders [n] > 1; whole = 2, 3, ... [m]; curve [m] at them -> [n].
    """
    below = jnp.floor(orders)
    scaled = jnp.concatenate([jnp.zeros(1), (whole - 1) * curve])  # orders 1, 2, ...
    index = below.astype(int) - 1
    above = jnp.minimum(index + 1, len(whole))  # a whole order needs nothing above itself
    return ((1 - orders + below) * scaled[index] + (orders - below) * scaled[above]) / (orders - 1)


def _series(orders, rate, rdp_of_order, log_moments):
    if not checks.is_concrete(orders):
        checks.fail(
            "jfl.privacy.accountants.wang2019",
            "concrete orders",
            "traced ones",
            "The series has as many terms as the order.",
        )
    orders = np.atleast_1d(np.asarray(orders, np.float64))
    if not (np.all(orders > 1) and np.all(np.isfinite(orders))):
        checks.fail("jfl.privacy.accountants.wang2019", "orders > 1 and finite", f"{orders}")
    checks.require_fraction("jfl.privacy.accountants.wang2019", rate=rate)
    whole = np.arange(2, math.ceil(orders.max()) + 1, dtype=np.float64)
    with in_float64():
        curve = rdp_of_order(jnp.asarray(whole))
        moments = (
            log_moments(np.arange(2.0, whole[-1] + 2, 2))
            if log_moments
            else jnp.full(len(whole), jnp.inf)
        )
    return _bound(orders, whole, curve, moments, rate)


@rdp.float64
def _bound(orders, whole, curve, moments, rate):
    terms = jnp.log(2.0) + (whole - 1) * curve
    first = jnp.minimum(jnp.log(4.0) + curve[0] + jnp.log(-jnp.expm1(-curve[0])), terms[0])
    below = np.arange(2, 2 + len(whole)) // 2
    above = np.arange(3, 3 + len(whole)) // 2
    terms = (
        jnp.minimum(terms, jnp.log(4.0) + (moments[below - 1] + moments[above - 1]) / 2)
        .at[0]
        .set(first)
    )
    a = whole[:, None]
    choose = gammaln(a + 1) - gammaln(whole + 1) - gammaln(jnp.maximum(a - whole, 0) + 1)
    terms = jnp.where(whole <= a, choose + whole * jnp.log(rate) + terms, -jnp.inf)
    return interpolate(orders, whole, jnp.logaddexp(logsumexp(terms, axis=1), 0.0) / (whole - 1))


@rdp.float64
def _log_moments(evens, z):
    """log B(l) for even l; inf where l lies beyond the reach of the points."""
    step = 0.5 * z * jnp.minimum(1.0, z)
    x = -rdp.TAIL * z + step * jnp.arange(NODES)
    loss = jnp.abs(2 * x - 1) / (2 * z**2)
    signed = jnp.where(x > 0.5, loss, 0.0)  # |e^X - 1| = e^X (1 - e^-X) or 1 - e^X
    size = signed + jnp.log(jnp.maximum(-jnp.expm1(-loss), 1e-300))
    weight = jnp.log(step / z) - (x / z) ** 2 / 2 - rdp.HALF_LOG_2PI
    moments = logsumexp(evens[:, None] * size + weight, axis=1)
    return jnp.where(evens + rdp.TAIL * z <= x[-1], moments, jnp.inf)
