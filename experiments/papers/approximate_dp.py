"""Guarantees stated as (epsilon, delta) pairs: Gaussian noise and sampling.

The functions are for reading and calibrating what papers use: composing Renyi curves (`rdp`) gives
a smaller epsilon whenever there are more than a few releases.  They take numbers or arrays, which
broadcast, and compute in float64.  Functions that return a pair return (epsilon, delta).
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from jfl.core import checks
from jfl.privacy.accountants import rdp

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
    # Above 600, e^epsilon overflows, and 1 - rate is negligible next to it.
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


def _largest_mu(epsilon, delta):
    """Return the largest mu with rdp.gaussian_delta(epsilon, mu) <= delta, by bisection from
    below."""
    low, high = (np.full(delta.shape, math.log(mu)) for mu in MU_RANGE)
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        fits = rdp.gaussian_delta(epsilon, np.exp(middle)) <= delta
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return np.exp(low)
