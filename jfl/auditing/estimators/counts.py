"""What a count of errors says about their rate: one-sided upper bounds of a binomial probability.

NumPy in float64; all arguments broadcast.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from ...core import checks

__all__ = ["clopper_pearson_upper", "jeffreys_upper"]


def clopper_pearson_upper(count: ArrayLike, trials: ArrayLike, alpha: ArrayLike) -> np.ndarray:
    """The largest probability with which so few errors are not rarer than `alpha`.

    It is below the true probability in at most a fraction `alpha` of all experiments, whatever that
    probability is.  It is 1 where every trial is an error.

    Shapes:
        count, trials and alpha broadcast; the result has their common shape.

    Units:
        count: errors, 0 to trials; alpha: the false-alarm rate, in (0, 1).

    Raises:
        ArgumentError: for counts outside 0 to trials, and alpha outside (0, 1).

    References:
        Clopper and Pearson, Biometrika 1934.

    Example:
        >>> round(float(clopper_pearson_upper(5, 100, 0.025)), 6)
        0.112835
    """
    count, trials, alpha = _checked("clopper_pearson_upper", count, trials, alpha)
    return _quantile(count + 1, trials - count, alpha, count == trials)


def jeffreys_upper(count: ArrayLike, trials: ArrayLike, alpha: ArrayLike) -> np.ndarray:
    """The quantile 1 - alpha of Jeffreys' posterior of the probability: an approximation.

    Its false-alarm rate is `alpha` on average over probabilities, and more at some of them: no
    guarantee.  Arguments and errors are those of `clopper_pearson_upper`, which is larger.

    References:
        Brown, Cai, DasGupta, Statistical Science 2001.

    Example:
        >>> round(float(jeffreys_upper(5, 100, 0.025)), 6)
        0.1061
    """
    count, trials, alpha = _checked("jeffreys_upper", count, trials, alpha)
    return _quantile(count + 0.5, trials - count + 0.5, alpha, count == trials)


def _quantile(errors, others, alpha, all_are_errors):
    # the complement keeps the digits of a small alpha
    value = special.betainccinv(errors, np.where(all_are_errors, 1.0, others), alpha)
    return np.where(all_are_errors, 1.0, value)


def _checked(where, count, trials, alpha):
    count, trials, alpha = (
        checks.as_array(where, name, value)
        for name, value in (("count", count), ("trials", trials), ("alpha", alpha))
    )
    whole = all(v.dtype.kind in "iu" or np.all(v == np.floor(v)) for v in (count, trials))
    if not whole or not np.all((count >= 0) & (count <= trials) & (trials >= 1)):
        got = f"count={checks.short_repr(count)}, trials={checks.short_repr(trials)}"
        checks.fail(where, "whole numbers 0 <= count <= trials and trials >= 1", got)
    if not np.all((alpha > 0) & (alpha < 1)):
        checks.fail(where, "alpha in (0, 1)", f"alpha={checks.short_repr(alpha)}")
    return np.broadcast_arrays(count.astype(float), trials.astype(float), alpha.astype(float))
