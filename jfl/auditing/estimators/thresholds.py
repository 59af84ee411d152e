"""Rules that choose the thresholds of an audit and keep its confidence.

A test answers "included" if a score is >= a threshold.  The counts of its errors bound its error
rates, and the audit reports the largest epsilon over its thresholds.  This is a lower bound only if
the bounds of all rates hold simultaneously with probability 1 - alpha.  Each class here explains
why its bounds do.

All rules assume independent scores with one distribution per side, such as one score from each of
many runs.  The scores of many canaries in one run are not independent.

Each class has a method `judge(inside, outside, alpha, read)`.  The scores `inside` (with the
canary) and `outside` (without it) are sorted.  `read` maps `Rates` to the largest epsilon that they
show, and the index of the test that shows it.

T is the number of thresholds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from ...core import checks

__all__ = ["Bonferroni", "Explicit", "Rates", "Shown", "Split", "clopper_pearson_upper"]

NUM_CANDIDATES = 64  # thresholds from which `Split` chooses one


class Rates(NamedTuple):
    """The numbers of errors of T tests, and upper bounds of their error rates.

    Each field is an array [T].
    """

    thresholds: np.ndarray
    false_negatives: np.ndarray  # inside scores < threshold
    false_positives: np.ndarray  # outside scores >= threshold
    false_negative_rate: np.ndarray
    false_positive_rate: np.ndarray


class Shown(NamedTuple):
    """The largest epsilon that an audit shows, and the test that shows it."""

    epsilon: float
    threshold: float
    false_negatives: int
    false_positives: int


Read = Callable[[Rates], tuple[float, int]]


@dataclass(frozen=True)
class Explicit:
    """Thresholds that were fixed before any of the scores was seen.

    Each of the T thresholds has two error rates, of false negatives and of false positives.  Each
    rate gets a Clopper-Pearson bound at alpha / (2 T), so that all of them hold together.

    Attributes:
        threshold: one threshold, or several.
    """

    threshold: float | Sequence[float]

    def __post_init__(self):
        given = checks.as_array("Explicit", "threshold", self.threshold)
        numbers = given.dtype.kind in "iuf" and not np.isnan(given).any()
        if given.ndim > 1 or not given.size or not numbers:
            got = f"threshold={checks.short_repr(self.threshold)}"
            checks.fail("Explicit", "threshold, a number or a list of numbers", got)

    def judge(self, inside: np.ndarray, outside: np.ndarray, alpha: float, read: Read) -> Shown:
        """Return the largest epsilon that `read` finds at these thresholds."""
        thresholds = np.atleast_1d(np.asarray(self.threshold, float))
        return _shown(error_rates(inside, outside, thresholds, alpha / (2 * len(thresholds))), read)


@dataclass(frozen=True)
class Bonferroni:
    """Thresholds at ranks of the outside scores; the ranks depend only on the number of scores.

    The threshold is just above the outside score of rank k + 1 from the top.  (1) The false
    positive rate there is the tail of that order statistic, which has the distribution
    Beta(k + 1, m - k) or is smaller in case of ties.  Clopper-Pearson at k errors therefore holds
    although the threshold depends on the same scores.  (2) Given the outside scores, the threshold
    is a constant for the inside scores, so Clopper-Pearson holds for the false negatives.  All
    bounds are at alpha / (2 T), and hold together by the union bound.

    Trying every score and dividing alpha by the number of those on the concave frontier would not
    be a lower bound: that number depends on the data, and the frontier selects the thresholds with
    the luckiest counts.

    The bound is loose if few scores are different, since a rank counts all tied scores as errors.
    For scores that are 0 or 1 use `Explicit(1)`.

    Attributes:
        tried: the maximum number of thresholds; fewer outside scores have fewer ranks.

    References:
        David and Nagaraja, Order Statistics, 2003, section 2.1, for the distribution in (1).
    """

    tried: int = 16

    def __post_init__(self):
        checks.require_integer("Bonferroni", tried=self.tried)

    def judge(self, inside: np.ndarray, outside: np.ndarray, alpha: float, read: Read) -> Shown:
        """Return the largest epsilon that `read` finds at thresholds of these ranks."""
        rank = _ranks(len(outside), self.tried)
        thresholds = np.nextafter(outside[len(outside) - 1 - rank], np.inf)
        return _shown(error_rates(inside, outside, thresholds, alpha / (2 * len(rank)), rank), read)


@dataclass(frozen=True)
class Split:
    """A threshold that one part of the scores chooses, with bounds from the other part.

    Given the first part, the threshold is a constant for the second part, as in `Explicit`.  The
    parts are drawn independently of the scores.

    Attributes:
        fraction: the fraction of the scores of each side that choose the threshold.
        seed: the seed of the division.  Keeping the best of several seeds is not an audit.
    """

    fraction: float = 0.5
    seed: int = 0

    def __post_init__(self):
        checks.require_seed("Split", seed=self.seed)
        checks.require_fraction("Split", single=True, fraction=self.fraction)
        if self.fraction == 1:
            got, hint = "fraction=1", "Leave some scores to be judged."
            checks.fail("Split", "fraction in (0, 1)", got, hint)

    def judge(self, inside: np.ndarray, outside: np.ndarray, alpha: float, read: Read) -> Shown:
        """Choose a threshold on the first part, and return the epsilon of the second part."""
        draw = np.random.default_rng(self.seed)
        first_in, inside = _divide(draw, inside, self.fraction)
        first_out, outside = _divide(draw, outside, self.fraction)
        candidates = _thresholds_between(first_in, first_out)
        chosen = _shown(error_rates(first_in, first_out, candidates, alpha / 2), read)
        threshold = np.array([chosen.threshold])
        return _shown(error_rates(inside, outside, threshold, alpha / 2), read)


def _divide(draw: np.random.Generator, scores: np.ndarray, fraction: float) -> tuple:
    """Divide sorted scores at random into two non-empty parts, each sorted."""
    if len(scores) < 2:
        checks.fail("Split", "at least 2 scores per side", f"{len(scores)}")
    first = min(max(int(len(scores) * fraction), 1), len(scores) - 1)
    chooses = np.zeros(len(scores), bool)
    chooses[draw.permutation(len(scores))[:first]] = True
    return scores[chooses], scores[~chooses]


def _ranks(trials, tried):
    """Return at most `tried` numbers of errors whose fractions are evenly spaced in their logit."""
    reach = math.log(2 * trials - 1)
    share = 1 / (1 + np.exp(np.linspace(reach, -reach, tried) if tried > 1 else np.zeros(1)))
    return np.unique(np.minimum((trials * share).astype(int), trials - 1))


def _thresholds_between(inside, outside):
    """Return thresholds halfway between outside scores and the next score above."""
    below = outside[len(outside) - 1 - _ranks(len(outside), NUM_CANDIDATES)]
    scores = np.append(np.sort(np.concatenate([inside, outside])), np.inf)
    above = scores[np.searchsorted(scores, below, side="right")]
    return np.where(np.isinf(above), np.nextafter(below, np.inf), below / 2 + above / 2)


def error_rates(inside, outside, thresholds, alpha, rank: Any = None):
    """Return the `Rates` at some thresholds, with each rate bounded at level `alpha`.

    Args:
        inside: [n], the sorted scores with the canary.
        outside: [m], the sorted scores without it.
        thresholds: [T].
        alpha: the probability with which a bound may be below its rate.
        rank: Int[T], numbers of false positives from which their rates are bounded, for thresholds
            that depend on the outside scores.  None means the counts at the thresholds.
    """
    n, m = len(inside), len(outside)
    if alpha ** (1 / n) + alpha ** (1 / m) <= 1:  # a coin flip is consistent with zero errors
        checks.fail(
            "audit",
            f"at least {math.floor(math.log2(1 / alpha)) + 1} scores to judge on each side for "
            f"bounds at {alpha:.2g} each",
            f"{n} inside and {m} outside",
            "Score more runs, try fewer thresholds, or lower the confidence.",
        )
    missed = np.searchsorted(inside, thresholds)
    accepted = m - np.searchsorted(outside, thresholds)
    false_negative_rate = clopper_pearson_upper(missed, n, alpha)
    false_positive_rate = clopper_pearson_upper(accepted if rank is None else rank, m, alpha)
    return Rates(thresholds, missed, accepted, false_negative_rate, false_positive_rate)


def _shown(rates, read):
    """Return what the tests show, as a `Shown`."""
    epsilon, i = read(rates)
    test = (rates.thresholds[i], rates.false_negatives[i], rates.false_positives[i])
    return Shown(float(epsilon), float(test[0]), int(test[1]), int(test[2]))


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
    count, trials, alpha = np.broadcast_arrays(count, trials, alpha)
    if not np.all((count >= 0) & (count <= trials) & (trials >= 1) & (alpha > 0) & (alpha < 1)):
        got = ", ".join(map(checks.short_repr, (count, trials, alpha)))
        expected = "0 <= count <= trials, trials >= 1 and alpha in (0, 1)"
        checks.fail("clopper_pearson_upper", expected, got)
    all_are_errors = count == trials
    # The inverse of the complement keeps the digits of a small alpha.
    bound = special.betainccinv(count + 1, np.where(all_are_errors, 1, trials - count), alpha)
    return np.where(all_are_errors, 1.0, bound)


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
