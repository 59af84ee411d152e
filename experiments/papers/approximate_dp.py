"""Guarantees stated as (epsilon, delta) pairs: Gaussian noise, composition, and sampling.

The functions are for reading and calibrating what papers use: composing Renyi curves (`rdp`) gives
a smaller epsilon whenever there are more than a few releases.  They take numbers or arrays, which
broadcast, and compute in float64.  Functions that return a pair return (epsilon, delta).
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from jfl.core import checks
from jfl.privacy.accountants import rdp

SCHEMES = ("wor_round", "independent", "with_replacement")
MU_RANGE, NUM_BISECTIONS = (1e-18, 1e9), 80


def arrays(*values: ArrayLike) -> tuple[np.ndarray, ...]:
    """Return values as arrays of float64."""
    return tuple(np.asarray(value, np.float64) for value in values)


def gaussian_sigma(sensitivity: ArrayLike, epsilon: ArrayLike, delta: ArrayLike) -> np.ndarray:
    """Return the classical noise std, sensitivity * sqrt(2 log(1.25 / delta)) / epsilon.

    It proves its epsilon only for epsilon <= 1; for larger ones use `analytic_sigma`.

    References:
        Dwork and Roth, 2014, Theorem A.1.

    Example:
        >>> round(float(gaussian_sigma(1.0, 1.0, 1e-5)), 4)
        4.8448
    """
    s, e, d = arrays(sensitivity, epsilon, delta)
    return s * np.sqrt(2 * np.log(1.25 / d)) / e


def analytic_sigma(sensitivity: ArrayLike, epsilon: ArrayLike, delta: ArrayLike) -> np.ndarray:
    """Return the smallest noise std that makes one Gaussian (epsilon, delta)-private.

    It is exact up to rounding, which errs on the conservative side.

    References:
        Balle and Wang, ICML 2018, Theorem 8, by bisection.

    Example:
        >>> round(float(analytic_sigma(1.0, 1.0, 1e-5)), 4)
        3.7306
    """
    return arrays(sensitivity)[0] / _largest_mu(*np.broadcast_arrays(*arrays(epsilon, delta)))


def compose_advanced(
    epsilon: ArrayLike, delta: ArrayLike, times: ArrayLike, slack: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """Return the (epsilon, delta) of `times` adaptive releases; `slack` is added to delta.

    The epsilon is that of basic composition, times * epsilon, if that is smaller.

    References:
        Dwork, Rothblum, Vadhan, 2010: epsilon sqrt(2 times log(1 / slack)) + times epsilon
        (e^epsilon - 1).
    """
    e, d, n, more = arrays(epsilon, delta, times, slack)
    advanced = e * np.sqrt(2 * n * np.log(1 / more)) + n * e * np.expm1(e)
    return np.minimum(n * e, advanced), n * d + more


def amplify(epsilon: ArrayLike, delta: ArrayLike, rate: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return the (epsilon, delta) of a release on a sample.

    It is (log(1 + rate (e^epsilon - 1)), rate delta).

    The sample holds an element with probability `rate`.  This holds for Poisson sampling under
    add_remove, and for samples of fixed size under replace_one, if the release on the whole sample
    is (epsilon, delta)-private under that adjacency *of the sampled element*.

    References:
        Balle, Barthe, Gaboardi, NeurIPS 2018, Theorems 8 and 9.

    Example:
        >>> [round(float(v), 6) for v in amplify(1.0, 1e-5, 0.01)]
        [0.017037, 0.0]
    """
    e, d, q = arrays(epsilon, delta, rate)
    # Above 600, e^epsilon overflows and 1 - rate is nothing beside it.
    amplified = np.log1p(q * np.expm1(np.minimum(e, 600.0)))
    return np.where(e < 600, amplified, e + np.log(q)), q * d


def local_budget(
    epsilon: ArrayLike, delta: ArrayLike, rate: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """Return the (epsilon, delta) that the release on the sample may have: the inverse of
    `amplify`.

    Raises:
        ValueError: if delta / rate is not below 1, since then no sampling helps.

    Example:
        >>> [round(float(v), 9) for v in amplify(*local_budget(0.5, 1e-5, 0.1), 0.1)]
        [0.5, 1e-05]
    """
    e, d, q = arrays(epsilon, delta, rate)
    if not np.all(d < q):
        checks.fail(
            "approximate_dp.local_budget",
            "delta < rate",
            f"delta={delta!r}, rate={rate!r}",
            "Lower delta.",
        )
    inner = np.log1p(np.expm1(np.minimum(e, 600.0)) / q)
    return np.where(e < 600, inner, e - np.log(q)), d / q


def round_rate(batch: int, steps: int, rows: ArrayLike, scheme: str) -> np.ndarray:
    """Return the probability that a row is used at least once in a round of batches.

    It amplifies noise that is added once per round (output perturbation). There, the sensitivity
    covers a change of all gradients of the round, so a row may be used many times. It does not
    apply to noise in every step.

    Args:
        batch: rows of a batch.
        steps: batches of a round.
        rows: a client's rows, a number or an array [...].
        scheme: "wor_round" (all rows of a round distinct), "independent" (each batch without
            replacement on its own), "with_replacement" (all draws independent).

    Returns:
        Float64[...], in the shape of `rows`.

    Raises:
        ValueError: for an unknown scheme, or if a round needs more rows than there are.

    References:
        Li, Wang, Wu, 2025, section IV, for the first and the last.

    Example:
        >>> [round(float(round_rate(10, 5, 600, s)), 6) for s in SCHEMES]
        [0.083333, 0.080601, 0.08002]
    """
    where = "approximate_dp.round_rate"
    checks.require_one_of(where, SCHEMES, scheme=scheme)
    (rows,) = arrays(rows)
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
    size, draws = (batch, steps) if scheme == "independent" else (1, batch * steps)
    with np.errstate(divide="ignore"):  # one batch may hold all rows
        return -np.expm1(draws * np.log1p(-size / rows))


def _largest_mu(epsilon, delta):
    """Return the largest mu with rdp.gaussian_delta(epsilon, mu) <= delta, by bisection from
    below."""
    low, high = (np.full(delta.shape, math.log(mu)) for mu in MU_RANGE)
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        fits = rdp.gaussian_delta(epsilon, np.exp(middle)) <= delta
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return np.exp(low)
