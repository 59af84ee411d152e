"""Guarantees stated as (epsilon, delta) pairs: the Gaussian mechanism, composition and
amplification by sampling.

Plain functions of numbers or arrays, float64 and traceable; concrete arguments are tested.  They
are for reading and calibrating what papers use: composing curves (`rdp`) is smaller whenever there
are more than a few releases. Functions that return a pair return (epsilon, delta).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jfl.core import checks
from jfl.privacy.accountants import rdp


def gaussian_sigma(sensitivity: ArrayLike, epsilon: ArrayLike, delta: ArrayLike) -> jax.Array:
    """The classical noise std: sensitivity * sqrt(2 log(1.25 / delta)) / epsilon.

    Units:
        epsilon in (0, 1]: beyond, the noise may be too small.

    Raises:
        ValueError: for epsilon > 1 or delta outside (0, 1).

    References:
        Dwork and Roth, 2014, Theorem A.1.

    Example:
        >>> round(float(gaussian_sigma(1.0, 1.0, 1e-5)), 4)
        4.8448
    """
    _deltas("approximate_dp.gaussian_sigma", delta=delta)
    checks.require_positive("approximate_dp.gaussian_sigma", sensitivity=sensitivity)
    checks.require_fraction(
        "approximate_dp.gaussian_sigma",
        "The classical formula needs epsilon <= 1: use analytic_sigma.",
        epsilon=epsilon,
    )
    return _classical(sensitivity, epsilon, delta)


def analytic_sigma(sensitivity: ArrayLike, epsilon: ArrayLike, delta: ArrayLike) -> jax.Array:
    """The smallest noise std, to rounding and on the safe side, that makes one Gaussian (epsilon,
    delta)-private.

    Units:
        epsilon >= 0, delta in (0, 1).

    Raises:
        ValueError: outside.

    References:
        Balle and Wang, ICML 2018, Theorem 8, by bisection.

    Example:
        >>> round(float(analytic_sigma(1.0, 1.0, 1e-5)), 4)
        3.7306
    """
    _deltas("approximate_dp.analytic_sigma", delta=delta)
    checks.require_positive("approximate_dp.analytic_sigma", sensitivity=sensitivity)
    checks.require_nonnegative("approximate_dp.analytic_sigma", epsilon=epsilon)
    return _analytic(sensitivity, epsilon, delta)


def compose_basic(
    epsilon: ArrayLike, delta: ArrayLike, times: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """`times` releases, each (epsilon, delta): everything adds up.

    >>> [float(v) for v in compose_basic(0.5, 1e-6, 4)]
    [2.0, 4e-06]
    """
    _pair("approximate_dp.compose_basic", epsilon, delta)
    checks.require_nonnegative("approximate_dp.compose_basic", times=times)
    return _product(epsilon, times), _product(delta, times)


def compose_advanced(
    epsilon: ArrayLike, delta: ArrayLike, times: ArrayLike, slack: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """`times` adaptive releases at the price of `slack` in delta; the basic epsilon where that is
    smaller.

    References:
        Dwork, Rothblum, Vadhan, 2010: epsilon sqrt(2 times log(1 / slack)) + times epsilon
        (e^epsilon - 1).
    """
    _pair("approximate_dp.compose_advanced", epsilon, delta)
    checks.require_nonnegative("approximate_dp.compose_advanced", times=times)
    _deltas("approximate_dp.compose_advanced", slack=slack)
    return _advanced(epsilon, times, slack), _sum(_product(delta, times), slack)


def amplify(epsilon: ArrayLike, delta: ArrayLike, rate: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """A release on a sample that holds an element with probability `rate`: (log(1 + rate (e^epsilon
    - 1)), rate delta).

    Holds for Poisson sampling under add_remove, and for samples of fixed size under replace_one,
    where the release on the whole sample is (epsilon, delta)-private under that adjacency *of the
    sampled element*.

    Units:
        rate in (0, 1].

    References:
        Balle, Barthe, Gaboardi, NeurIPS 2018, Theorems 8 and 9.

    Example:
        >>> [round(float(v), 6) for v in amplify(1.0, 1e-5, 0.01)]
        [0.017037, 0.0]
    """
    _pair("approximate_dp.amplify", epsilon, delta)
    checks.require_fraction("approximate_dp.amplify", rate=rate)
    return _amplified(epsilon, rate), _product(delta, rate)


def local_budget(
    epsilon: ArrayLike, delta: ArrayLike, rate: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """The inverse of `amplify`: what the release on the sample may spend.

    Raises:
        ValueError: if delta / rate is not below 1: then no sampling helps.

    Example:
        >>> [round(float(v), 9) for v in amplify(*local_budget(0.5, 1e-5, 0.1), 0.1)]
        [0.5, 1e-05]
    """
    _pair("approximate_dp.local_budget", epsilon, delta)
    checks.require_fraction("approximate_dp.local_budget", rate=rate)
    if checks.is_concrete((delta, rate)) and not np.all(np.asarray(delta) < np.asarray(rate)):
        checks.fail(
            "approximate_dp.local_budget",
            "delta < rate",
            f"delta={delta!r}, rate={rate!r}",
            "Lower delta.",
        )
    return _unamplified(epsilon, rate), _quotient(delta, rate)


def round_rate(batch: int, steps: int, rows: ArrayLike, scheme: str) -> np.ndarray:
    """The probability that a row is used at least once in a round of `steps` batches of size
    `batch`.

    It amplifies noise that is added once a round (output perturbation), where the sensitivity
    covers a change of all the round's gradients, so that a row may be used many times.  It says
    nothing about noise at every step.

    Args:
        batch: rows of a batch.
        steps: batches of a round.
        rows: a client's rows, a number or an array [...].
        scheme: "wor_round" (all rows of a round distinct), "independent" (each batch without
            replacement on its own), "with_replacement" (all draws independent).

    Returns:
        Float64[...], in the shape of `rows`.

    Raises:
        ValueError: for an unknown scheme, or where a round needs more rows than there are.

    References:
        Li, Wang, Wu, 2025, section IV, for the first and the last.

    Example:
        >>> [
        ...     round(float(round_rate(10, 5, 600, s)), 6)
        ...     for s in ("wor_round", "independent", "with_replacement")
        ... ]
        [0.083333, 0.080601, 0.08002]
    """
    where = "approximate_dp.round_rate"
    checks.require_integer(where, batch=batch, steps=steps)
    checks.require_one_of(where, ("wor_round", "independent", "with_replacement"), scheme=scheme)
    checks.require_positive(where, rows=rows)
    rows = np.asarray(rows, np.float64)
    needed = {"wor_round": batch * steps, "independent": batch, "with_replacement": 1}[scheme]
    if np.any(rows < needed):
        checks.fail(
            where,
            f"at least {needed} rows for scheme={scheme!r}",
            f"rows={rows}",
            "Use scheme='with_replacement', or fewer or smaller batches.",
        )
    if scheme == "wor_round":
        return needed / rows
    with np.errstate(divide="ignore"):  # one batch may hold all rows
        power = (
            steps * np.log1p(-batch / rows)
            if scheme == "independent"
            else batch * steps * np.log1p(-1 / rows)
        )
    return -np.expm1(power)


# --- formulas in float64


def _pair(where, epsilon, delta):
    checks.require_nonnegative(where, epsilon=epsilon, delta=delta)


def _deltas(where, **deltas):
    for name, value in deltas.items():
        if checks.is_concrete(value) and not np.all(
            (np.asarray(value) > 0) & (np.asarray(value) < 1)
        ):
            checks.fail(where, f"{name} in (0, 1)", f"{name}={value!r}")


@rdp.float64
def _classical(sensitivity, epsilon, delta):
    return sensitivity * jnp.sqrt(2 * jnp.log(1.25 / delta)) / epsilon


@rdp.float64
def _analytic(sensitivity, epsilon, delta):
    mu = jax.lax.stop_gradient(rdp.gaussian_mu(*jax.lax.stop_gradient((epsilon, delta))))
    # the slope of the root by one Newton step, whose value is taken off again: d delta / d mu is a
    # normal density
    slope = jnp.exp(-jnp.square(epsilon / mu - mu / 2) / 2) / math.sqrt(2 * math.pi)
    step = (delta - rdp.gaussian_delta(epsilon, mu)) / jnp.maximum(
        jax.lax.stop_gradient(slope), 1e-300
    )
    return sensitivity / (mu + step - jax.lax.stop_gradient(step))


@rdp.float64
def _advanced(epsilon, times, slack):
    drift = times * epsilon * jnp.expm1(epsilon)
    return jnp.minimum(times * epsilon, epsilon * jnp.sqrt(2 * times * jnp.log(1 / slack)) + drift)


@rdp.float64
def _amplified(epsilon, rate):
    # beyond, e^epsilon overflows and the one below is nothing
    return jnp.where(
        epsilon < 600,
        jnp.log1p(rate * jnp.expm1(jnp.minimum(epsilon, 600.0))),
        epsilon + jnp.log(rate),
    )


@rdp.float64
def _unamplified(epsilon, rate):
    return jnp.where(
        epsilon < 600,
        jnp.log1p(jnp.expm1(jnp.minimum(epsilon, 600.0)) / rate),
        epsilon - jnp.log(rate),
    )


@rdp.float64
def _product(one, other):
    return one * other


@rdp.float64
def _quotient(one, other):
    return one / other


@rdp.float64
def _sum(one, other):
    return one + other
