"""Concentrated differential privacy: zCDP, and truncated CDP (tCDP) with every precondition tested.

A pair (rho, omega) bounds the Renyi divergence of all orders a in (1, omega) by rho a; zCDP is
omega = inf.  Functions are pure, float64 and traceable.  Those of tCDP return a `Checked` value:
with `strict`, a failed precondition raises; without, or under a trace, the value comes with its
list of failures and proves nothing unless that is empty.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jfl.core import checks
from jfl.core.checks import Checked as Checked
from jfl.core.pytrees import in_float64
from jfl.privacy.accountants import rdp, roots

LOG_ORDERS = (math.log(1e-6), math.log(1e9))  # of order - 1, in the search for the best one


# --- zCDP


@rdp.float64
def gaussian(sensitivity: ArrayLike, sigma: ArrayLike) -> jax.Array:
    """rho of one Gaussian release.

    References:
        Bun and Steinke, 2016, Proposition 1.6; Chen et al., 2024, Lemma 1, with omega = inf.

    Example:
        >>> float(gaussian(1.0, 2.0))
        0.125
    """
    return sensitivity**2 / (2 * sigma**2)  # pyright: ignore[reportReturnType]  # of arrays


@rdp.float64
def compose(rhos: ArrayLike) -> jax.Array:
    """rho of releases that follow each other: the sum.

    Shapes:
        rhos [..., n] -> [...].
    """
    return jnp.sum(rhos, axis=-1)


@rdp.float64
def to_dp_classical(rho: jax.Array, delta: ArrayLike) -> jax.Array:
    """epsilon = rho + 2 sqrt(rho log(1 / delta)).

    References:
        Bun and Steinke, 2016, Proposition 1.3.
    """
    return rho + 2 * jnp.sqrt(-rho * jnp.log(delta))


@rdp.float64
def to_dp(rho: ArrayLike, delta: ArrayLike) -> jax.Array:
    """The smallest epsilon by the improved conversion of the curve rho a, over all real orders;
    never above the other.

    References:
        `rdp.convert`; the search ends within rounding of the best order, and any order proves its
        epsilon.

    Example:
        >>> round(float(to_dp(0.1, 1e-5)), 9)
        1.914238832
    """
    return _best(rho, delta, jnp.inf)


# --- tCDP


def tcdp_compose(rhos: ArrayLike, omegas: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """(sum of rho, least omega) of releases that follow each other.

    Shapes:
        [..., n] -> two of [...].

    References:
        Chen et al., 2024, Lemma 3; Bun, Dwork, Rothblum, Steinke, STOC 2018, Lemma 6.
    """
    return compose(rhos), _least(omegas)


def tcdp_to_dp(rho: ArrayLike, omega: ArrayLike, delta: ArrayLike, strict: bool = True) -> Checked:
    """epsilon = rho + 2 sqrt(rho log(1 / delta)), which needs log(1 / delta) <= (omega - 1)^2 rho.

    Raises:
        ValueError: with strict, naming what fails; `tcdp_to_dp_any` needs no such condition.

    References:
        Chen et al., 2024, Lemma 2; Bun, Dwork, Rothblum, Steinke, STOC 2018, Lemma 5.
    """
    _ranges("zcdp.tcdp_to_dp", rho, delta)
    with in_float64():
        r, w, d = (jnp.asarray(v, jnp.float64) for v in (rho, omega, delta))
        conditions = {
            "omega > 1": w > 1,
            "log(1 / delta) <= (omega - 1)^2 rho": -jnp.log(d) <= (w - 1) ** 2 * r,
        }
        return checks.checked(
            "zcdp.tcdp_to_dp",
            to_dp_classical(rho, delta),
            conditions,
            strict,
            "Use tcdp_to_dp_any, or more noise.",
        )


def tcdp_to_dp_any(rho: ArrayLike, omega: ArrayLike, delta: ArrayLike) -> jax.Array:
    """The smallest epsilon by the improved conversion, over the orders below omega; sound for every
    omega > 1.

    Raises:
        ValueError: for a concrete omega <= 1: there is no order to use.

    Example:
        >>> round(float(tcdp_to_dp_any(0.01, 20.0, 1e-5)), 6)
        0.59698
    """
    _ranges("zcdp.tcdp_to_dp_any", rho, delta)
    if checks.is_concrete(omega) and not np.all(np.asarray(omega) > 1):
        checks.fail("zcdp.tcdp_to_dp_any", "omega > 1", f"omega={omega!r}")
    return _best(rho, delta, omega)


def tcdp_amplify(
    rho: ArrayLike, rate: ArrayLike, omega: ArrayLike = math.inf, strict: bool = True
) -> Checked:
    """A release on a sample of fixed size, for replace_one: value (13 rate^2 rho, log(1 / rate) /
    (4 rho)).

    Needs rho <= 0.1, rate <= 0.1, log(1 / rate) >= 3 rho (2 + log2(1 / rho)), and omega >= log(1 /
    rate) / (2 rho) >= 3.  Where they fail, (rho, omega) holds without the sampling.  Poisson
    samples are not covered.

    Units:
        rate = sample / population.

    Raises:
        ValueError: with strict, naming what fails.

    References:
        Chen et al., 2024, Lemma 4; Bun, Dwork, Rothblum, Steinke, STOC 2018, Theorem 11.

    Example:
        >>> tcdp_amplify(1.77, 1 / 60, strict=False).failed[0]
        'rho <= 0.1'
    """
    _ranges("zcdp.tcdp_amplify", rho)
    checks.require_fraction("zcdp.tcdp_amplify", rate=rate)
    with in_float64():
        r, q, w = (jnp.asarray(v, jnp.float64) for v in (rho, rate, omega))
        gain = -jnp.log(q)
        conditions = {
            "rho <= 0.1": r <= 0.1,
            "rate <= 0.1": q <= 0.1,
            "log(1 / rate) >= 3 rho (2 + log2(1 / rho))": gain >= 3 * r * (2 - jnp.log2(r)),
            "log(1 / rate) / (2 rho) >= 3": gain >= 6 * r,
            "omega >= log(1 / rate) / (2 rho)": w >= gain / (2 * r),
        }
        return checks.checked(
            "zcdp.tcdp_amplify",
            (13 * q**2 * r, gain / (4 * r)),
            conditions,
            strict,
            (
                "Use the release without amplification, or "
                "jfl.privacy.accountants.rdp.without_replacement."
            ),
        )


def tcdp_calibrate(
    rate: ArrayLike, steps: ArrayLike, epsilon: ArrayLike, delta: ArrayLike, strict: bool = True
) -> Checked:
    """The noise multiplier with which `steps` sampled Gaussians reach epsilon by Lemmas 2 to 4 at
    the target delta.

    rho = (sqrt(log(1 / delta) + epsilon) - sqrt(log(1 / delta)))^2 in all, so z = rate sqrt(13
    steps / (2 rho)).

    Units:
        z: std over the replace_one sensitivity; rate = sample / population.

    Raises:
        ValueError: with strict, naming what fails at this z: a precondition of `tcdp_amplify` or
            `tcdp_to_dp`.

    Example:
        >>> round(float(tcdp_calibrate(1 / 60, 300, 0.3, 1e-2).value), 2)
        10.7
    """
    checks.require_fraction("zcdp.tcdp_calibrate", rate=rate)
    checks.require_positive("zcdp.tcdp_calibrate", steps=steps, epsilon=epsilon)
    _ranges("zcdp.tcdp_calibrate", delta=delta)
    z = _multiplier(rate, steps, epsilon, delta)
    step = gaussian(1.0, z)
    sampled = tcdp_amplify(step, rate, strict=strict)
    rho, omega = sampled.value
    with in_float64():
        # a hair of delta: at the solution the two sides of a condition may be equal but for
        # rounding
        whole = tcdp_to_dp(rho * jnp.asarray(steps, jnp.float64), omega, delta, strict)
        return Checked(z, sampled.failed + whole.failed, sampled.holds & whole.holds)


# --- parts


def _ranges(where, rho=None, delta=None):
    if rho is not None:
        checks.require_positive(where, rho=rho)
    if (
        delta is not None
        and checks.is_concrete(delta)
        and not np.all((np.asarray(delta) > 0) & (np.asarray(delta) < 1))
    ):
        checks.fail(where, "delta in (0, 1)", f"delta={delta!r}")


@rdp.float64
def _least(omegas):
    return jnp.min(omegas, axis=-1)


@rdp.float64
def _multiplier(rate, steps, epsilon, delta):
    budget = -jnp.log(delta)
    # (a - b)^2 with a^2 - b^2 = epsilon, without the difference
    rho = (epsilon / (jnp.sqrt(budget + epsilon) + jnp.sqrt(budget))) ** 2
    return rate * jnp.sqrt(13 * steps / (2 * rho))


@rdp.float64
def _best(rho, delta, omega):
    """Golden section over log(order - 1): the epsilon of a curve rho a has one minimum."""
    rho, delta, omega = jnp.broadcast_arrays(rho, delta, omega)

    def proved(log_order):
        orders = 1 + jnp.exp(log_order)
        return (
            rho * orders
            + jnp.log1p(-1 / orders)
            - (jnp.log(delta) + jnp.log(orders)) / (orders - 1)
        )

    high = jnp.minimum(jnp.log(jnp.maximum(omega - 1, 1e-300)), LOG_ORDERS[1])
    _, least = roots.golden_section(proved, jnp.minimum(LOG_ORDERS[0], high - 1), high, 100)
    best = jnp.maximum(least, 0.0)
    # the divergence at order 1 bounds the total variation (Bretagnolle and Huber)
    return jnp.where(delta**2 > -jnp.expm1(-rho), 0.0, best)
