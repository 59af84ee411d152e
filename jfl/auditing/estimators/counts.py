"""Upper confidence bounds of an error rate from a count of errors, in float64 NumPy."""

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from ...core import checks

__all__ = ["clopper_pearson_upper", "jeffreys_upper"]


def clopper_pearson_upper(count: ArrayLike, trials: ArrayLike, alpha: ArrayLike) -> np.ndarray:
    """Return the largest error rate that this count of errors does not reject at level `alpha`.

    The bound is below the true rate in at most a fraction `alpha` of all experiments, for every
    true rate.  It is 1 if every trial is an error.

    Args:
        count: the number of errors, 0 to `trials`.
        trials: the number of trials.
        alpha: the level, in (0, 1).  All arguments broadcast.

    References:
        Clopper and Pearson, Biometrika 1934.

    Example:
        >>> round(float(clopper_pearson_upper(5, 100, 0.025)), 6)
        0.112835
    """
    count, trials, alpha = _checked("clopper_pearson_upper", count, trials, alpha)
    return _quantile(count + 1, trials - count, alpha, count == trials)


def jeffreys_upper(count: ArrayLike, trials: ArrayLike, alpha: ArrayLike) -> np.ndarray:
    """Return an approximate bound: a quantile of Jeffreys' posterior of the error rate.

    It is the (1 - alpha)-quantile.  Its level is `alpha` on average over all rates, but larger for
    some rates, so it guarantees nothing.  The arguments are those of `clopper_pearson_upper`, whose
    result is larger.

    References:
        Brown, Cai, DasGupta, Statistical Science 2001.

    Example:
        >>> round(float(jeffreys_upper(5, 100, 0.025)), 6)
        0.1061
    """
    count, trials, alpha = _checked("jeffreys_upper", count, trials, alpha)
    return _quantile(count + 0.5, trials - count + 0.5, alpha, count == trials)


def _quantile(errors, others, alpha, all_are_errors):
    # The inverse of the complement keeps the digits of a small alpha.
    """Return the upper bound from the quantile of a beta distribution; 1 where all trials are
    errors."""
    value = special.betainccinv(errors, np.where(all_are_errors, 1.0, others), alpha)
    return np.where(all_are_errors, 1.0, value)


def _checked(where, count, trials, alpha):
    """Return the arguments as float arrays; reject counts and levels outside their ranges."""
    count, trials, alpha = (np.asarray(v, float) for v in (count, trials, alpha))
    whole = np.all((count == np.floor(count)) & (trials == np.floor(trials)))
    if not whole or not np.all((count >= 0) & (count <= trials) & (trials >= 1)):
        got = f"count={checks.short_repr(count)}, trials={checks.short_repr(trials)}"
        checks.fail(where, "integers 0 <= count <= trials and trials >= 1", got)
    if not np.all((alpha > 0) & (alpha < 1)):
        checks.fail(where, "alpha in (0, 1)", f"alpha={checks.short_repr(alpha)}")
    return np.broadcast_arrays(count, trials, alpha)


def check_levels(where: str, delta: float, confidence: float, *, zero: bool = True) -> None:
    """Reject a delta or a confidence that is out of range.

    Args:
        where: the name of the caller, for messages.
        delta: must be in [0, 1), or in (0, 1) if `zero` is False.
        confidence: must be in (0, 1).
        zero: whether a delta of 0 is allowed.
    """
    checks.require_nonnegative(where, single=True, delta=delta, confidence=confidence)
    if not delta < 1 or (delta == 0 and not zero):
        checks.fail(where, f"delta in {'[' if zero else '('}0, 1)", f"delta={delta!r}")
    if not 0 < confidence < 1:
        checks.fail(where, "confidence in (0, 1)", f"confidence={confidence!r}", "95 % is 0.95.")
