"""The thresholds that an audit tries, and their effect on its confidence.

A test says "inside" if a score is >= a threshold.  Counts of its errors bound its error rates, and
the audit reports the largest epsilon over its thresholds.  That is a lower bound only if all bounds
hold simultaneously with probability 1 - alpha.  Each class here explains why its bounds do, or says
that they do not.

All assume independent scores with one distribution per side: one score from each of many runs.
Scores of many canaries of one run are neither.

Axes: T thresholds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ...core import checks
from .counts import clopper_pearson_upper

__all__ = ["Bonferroni", "Explicit", "Frontier", "MultiSplit", "Rates", "Shown", "Split"]

LOWER_BOUND, ESTIMATE = "lower bound", "estimate"
CANDIDATES = 64  # thresholds of which a split chooses one


class Rates(NamedTuple):
    """Errors of T tests, each [T]; the rates are upper bounds."""

    thresholds: np.ndarray
    false_negatives: np.ndarray  # inside scores < threshold
    false_positives: np.ndarray  # outside scores >= threshold
    false_negative_rate: np.ndarray
    false_positive_rate: np.ndarray


class Shown(NamedTuple):
    """The epsilon that an audit shows, and the test that shows it."""

    epsilon: float
    threshold: float
    false_negatives: int
    false_positives: int


Reading = Callable[[Rates], tuple[float, int]]  # the best epsilon, and the index of its test


@dataclass(frozen=True)
class Explicit:
    """Thresholds that were fixed before any of these scores was seen.

    Guarantee: false alarms at a rate of at most alpha.  Each of the two rates of T thresholds has a
    Clopper-Pearson bound at alpha / (2 T); all 2 T hold at once by the union bound.

    Attributes:
        threshold: one threshold, or several.

    Example:
        >>> inside, outside = np.arange(100) + 50.0, np.arange(100) - 50.0
        >>> best = lambda rates: (float(-np.log(rates.false_positive_rate[0])), 0)
        >>> round(Explicit(50.0).judge(inside, outside, 0.05, best).epsilon, 4)
        3.3182
    """

    threshold: float | Sequence[float]
    kind: ClassVar[str] = LOWER_BOUND

    def __post_init__(self):
        given = checks.as_array("Explicit", "threshold", self.threshold)
        if (
            given.ndim > 1
            or not given.size
            or given.dtype.kind not in "iuf"
            or np.isnan(given).any()
        ):
            need = "threshold, a number or a list of numbers"
            checks.fail("Explicit", need, f"threshold={checks.short_repr(self.threshold)}")

    def judge(self, inside: np.ndarray, outside: np.ndarray, alpha: float, read: Reading) -> Shown:
        """Apply `read` at these thresholds to scores [n] and [m], each sorted."""
        thresholds = np.atleast_1d(np.asarray(self.threshold, float))
        rates = _rates(inside, outside, thresholds, alpha / (2 * len(thresholds)))
        return _shown(rates, read)


@dataclass(frozen=True)
class Bonferroni:
    """Thresholds at ranks of the outside scores, which only depend on their number.

    Guarantee: false alarms at a rate of at most alpha, for any distributions of the scores.  Take
    the threshold just above the outside score of rank k + 1 from the top.  (1) The false positive
    rate there is the tail of that order statistic, which has the distribution Beta(k + 1, m - k) or
    is smaller (ties), so Clopper-Pearson at k errors holds although the threshold depends on the
    same scores.  (2) Given the outside scores, the threshold is a constant for the inside ones, so
    Clopper-Pearson holds for the false negatives.  All bounds are at alpha / (2 T), and hold at
    once by the union bound.

    What would not hold: to try every score, keep those on the concave frontier, and divide alpha by
    their number.  That number depends on the data, and the frontier keeps the thresholds at which
    chance was kindest.  `Frontier` does this, as an estimate.

    Few different scores make the bound loose (a rank counts a tie's scores as errors): of scores
    that are 0 or 1, use `Explicit(1)`.

    Attributes:
        tried: T, at most; fewer outside scores have fewer ranks.

    References:
        David and Nagaraja, Order Statistics, 2003, section 2.1 (the law of (1)).

    Example:
        >>> inside, outside = np.arange(100) + 50.0, np.arange(100) - 50.0
        >>> best = lambda rates: (float(-np.log(rates.false_positive_rate.min())), 0)
        >>> round(Bonferroni(8).judge(inside, outside, 0.05, best).epsilon, 4)
        2.8815
    """

    tried: int = 16
    kind: ClassVar[str] = LOWER_BOUND

    def __post_init__(self):
        checks.require_integer("Bonferroni", tried=self.tried)

    def judge(self, inside: np.ndarray, outside: np.ndarray, alpha: float, read: Reading) -> Shown:
        """Apply `read` at these ranks to scores [n] and [m], each sorted."""
        rank = _ranks(len(outside), self.tried)
        thresholds = np.nextafter(outside[len(outside) - 1 - rank], np.inf)
        return _shown(_rates(inside, outside, thresholds, alpha / (2 * len(rank)), rank), read)


@dataclass(frozen=True)
class Split:
    """A threshold chosen on one part of the scores, and judged on the other.

    Guarantee: false alarms at a rate of at most alpha.  Given the first part, the threshold is a
    constant for the second, as in `Explicit`; the parts are drawn independently of the scores.
    The first part is not judged, which costs some power.

    Attributes:
        fraction: the fraction of the scores of each side that choose.
        seed: the seed of the division.  Trying several seeds and keeping the best is not an audit.

    Example:
        >>> inside, outside = np.arange(100) + 50.0, np.arange(100) - 50.0
        >>> best = lambda rates: (float(-np.log(rates.false_positive_rate.min())), 0)
        >>> round(Split(0.2).judge(inside, outside, 0.05, best).epsilon, 4)
        3.0997
    """

    fraction: float = 0.5
    seed: int = 0
    kind: ClassVar[str] = LOWER_BOUND

    def __post_init__(self):
        _open_fraction("Split", fraction=self.fraction)
        checks.require_seed("Split", seed=self.seed)

    def judge(self, inside: np.ndarray, outside: np.ndarray, alpha: float, read: Reading) -> Shown:
        """Apply `read` to the second part of scores [n] and [m], each sorted."""
        generator = np.random.default_rng(self.seed)
        parts = [_divided(generator, side, self.fraction) for side in (inside, outside)]
        (choosing_in, inside), (choosing_out, outside) = parts
        candidates = _between(choosing_in, choosing_out, CANDIDATES)
        threshold = _shown(_rates(choosing_in, choosing_out, candidates, alpha / 2), read).threshold
        return _shown(_rates(inside, outside, np.array([threshold]), alpha / 2), read)


@dataclass(frozen=True)
class MultiSplit:
    """The median over many splits, each at alpha / 2: `Split` without the luck of a seed.

    Guarantee: false alarms at a rate of at most alpha.  Each split is wrong with probability at
    most alpha / 2, so the expected share of wrong splits is at most alpha / 2, and by Markov's
    inequality half of them or more are wrong with probability at most alpha.  How splits depend
    on each other does not matter.

    Attributes:
        splits: the number of splits.
        fraction: the fraction of the scores of each side that choose.
        seed: the seed of the divisions.

    References:
        Meinshausen, Meier, Buhlmann, JASA 2009.

    Example:
        >>> inside, outside = np.arange(100) + 50.0, np.arange(100) - 50.0
        >>> best = lambda rates: (float(-np.log(rates.false_positive_rate.min())), 0)
        >>> round(MultiSplit(9, 0.2).judge(inside, outside, 0.05, best).epsilon, 4)
        2.9318
    """

    splits: int = 50
    fraction: float = 0.5
    seed: int = 0
    kind: ClassVar[str] = LOWER_BOUND

    def __post_init__(self):
        checks.require_integer("MultiSplit", splits=self.splits)
        _open_fraction("MultiSplit", fraction=self.fraction)
        checks.require_seed("MultiSplit", seed=self.seed)

    def judge(self, inside: np.ndarray, outside: np.ndarray, alpha: float, read: Reading) -> Shown:
        """Return the median split of scores [n] and [m], each sorted."""
        seeds = np.random.SeedSequence(self.seed).generate_state(self.splits).tolist()
        shown = [Split(self.fraction, s).judge(inside, outside, alpha / 2, read) for s in seeds]
        # at least half of the splits show as much
        return sorted(shown, key=lambda s: -s.epsilon)[(self.splits + 1) // 2 - 1]


@dataclass(frozen=True)
class Frontier:
    """Every threshold on the concave frontier of the same scores: an estimate, not a lower bound.

    The thresholds are chosen by the scores on which they are judged, so nothing is guaranteed.
    Undivided, the best of them is partly the luckiest: at confidence 1/2 and 800 scores per side it
    exceeds the truth in clearly more than half of all audits.  Divided by their number, as in
    jax_privacy's class Bonferroni, it erred on the safe side in experiments (Gaussians, 12 to 200
    scores per side), without a proof.

    Attributes:
        divided: alpha is divided by the number of thresholds on the frontier; without, this is the
            best that any threshold shows, as if it had been known.

    Example:
        >>> inside, outside = np.arange(100) + 50.0, np.arange(100) - 50.0
        >>> best = lambda rates: (float(-np.log(rates.false_positive_rate.min())), 0)
        >>> round(Frontier(divided=False).judge(inside, outside, 0.05, best).epsilon, 4)
        3.3182
    """

    divided: bool = True
    kind: ClassVar[str] = ESTIMATE

    def judge(self, inside: np.ndarray, outside: np.ndarray, alpha: float, read: Reading) -> Shown:
        """Apply `read` on the frontier of scores [n] and [m], each sorted."""
        # Between two inside scores, a higher threshold has fewer false positives.
        thresholds = np.concatenate(([-np.inf], np.unique(inside), [np.inf]))
        missed = np.searchsorted(inside, thresholds)
        refused = np.searchsorted(outside, thresholds)
        thresholds = thresholds[_concave(missed.tolist(), refused.tolist())]
        tried = len(thresholds) if self.divided else 1
        return _shown(_rates(inside, outside, thresholds, alpha / (2 * tried)), read)


def _open_fraction(where, **values):
    checks.require_fraction(where, single=True, **values)
    for name, value in values.items():
        if value >= 1:
            checks.fail(where, f"{name} in (0, 1)", f"{name}={value}", "Leave some to be judged.")


def _divided(generator, side, fraction):
    """Divide sorted scores into two non-empty parts, each sorted."""
    if len(side) < 2:
        checks.fail("Split", "at least 2 scores per side", f"{len(side)}")
    first = min(max(int(len(side) * fraction), 1), len(side) - 1)
    chooses = np.zeros(len(side), bool)
    chooses[generator.permutation(len(side))[:first]] = True
    return side[chooses], side[~chooses]


def _concave(x, y):
    """Return the indices of the upper hull of points sorted by x, then y."""
    kept: list[int] = []
    for i in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2:]
            if (x[b] - x[a]) * (y[i] - y[a]) < (y[b] - y[a]) * (x[i] - x[a]):
                break
            kept.pop()
        kept.append(i)
    return kept


def _ranks(trials, tried):
    """Return at most `tried` numbers of errors whose fractions are evenly spaced in their logit."""
    reach = math.log(2 * trials - 1)
    share = 1 / (1 + np.exp(np.linspace(reach, -reach, tried) if tried > 1 else np.zeros(1)))
    return np.unique(np.minimum((trials * share).astype(int), trials - 1))


def _between(inside, outside, tried):
    """Return thresholds halfway between outside scores and the next score above."""
    below = outside[len(outside) - 1 - _ranks(len(outside), tried)]
    above = np.full(len(below), np.inf)
    for side in (inside, outside):
        next_one = np.searchsorted(side, below, side="right")
        above = np.minimum(above, np.append(side, np.inf)[next_one])
    return np.where(np.isinf(above), np.nextafter(below, np.inf), below / 2 + above / 2)


def _rates(inside, outside, thresholds, alpha, rank: Any = None):
    """Count errors at `thresholds`, with bounds at `alpha` each; `rank` bounds the false positives
    if the thresholds depend on the outside scores."""
    n, m = len(inside), len(outside)
    if alpha ** (1 / n) + alpha ** (1 / m) <= 1:  # even without an error a coin is not excluded
        least = math.floor(math.log2(1 / alpha)) + 1
        checks.fail(
            "audit",
            f"at least {least} scores to judge on each side for bounds at {alpha:.2g} each",
            f"{n} inside and {m} outside",
            "Score more runs, try fewer thresholds, or ask for less confidence.",
        )
    missed = np.searchsorted(inside, thresholds)
    accepted = m - np.searchsorted(outside, thresholds)
    rates = (
        clopper_pearson_upper(missed, n, alpha),
        clopper_pearson_upper(accepted if rank is None else rank, m, alpha),
    )
    return Rates(thresholds, missed, accepted, *rates)


def _shown(rates, read):
    epsilon, i = read(rates)
    test = (rates.thresholds[i], rates.false_negatives[i], rates.false_positives[i])
    return Shown(float(epsilon), float(test[0]), int(test[1]), int(test[2]))
