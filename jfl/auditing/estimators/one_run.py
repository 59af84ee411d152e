"""Lower bounds on epsilon from one run with many canaries, each of them in or out by its own coin.

An auditor sees what the run released and guesses, for some canaries, whether they were in.  The
number of guesses that are right is all that these bounds use.  They hold for whatever scores the
guesses come from, where

    each canary was included by a fair coin of its own, which the run did not see otherwise;
    the number of guesses was fixed before the scores were seen, or the confidence was shared among
    the numbers tried (`best_number_of_guesses`);
    neighbours differ by the presence of one canary (add_remove, or zero_out for fixed sizes).

`one_run` assumes nothing else of the mechanism.  `one_run_tradeoff` assumes that its trade-off
curve is one of a family, and is tighter.
"""

import bisect
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from ...core import checks
from ...privacy.accountants import rdp, roots
from .levels import check_confidence, check_delta

__all__ = [
    "GAUSSIAN",
    "Family",
    "Guesses",
    "OneRun",
    "best_number_of_guesses",
    "curve_of_deltas",
    "guesses_from_scores",
    "one_run",
    "one_run_p_value",
    "one_run_tradeoff",
]

TOLERANCE = 1e-10  # of epsilon, and of the logarithm of a noise multiplier
NORMAL = NormalDist()


class OneRun(NamedTuple):
    """What one run says of epsilon, with what it was computed from."""

    epsilon: float  # the largest that is rejected; 0 where none is
    delta: float
    confidence: float  # of `epsilon`, with all corrections
    canaries: int  # that had a coin
    guesses: int  # made; the auditor abstained from the others
    correct: int  # guesses that were right
    tried: int = 1  # numbers of guesses that shared the confidence
    assumes: str = "nothing of the mechanism"
    kind: str = "lower bound"


class Guesses(NamedTuple):
    """Guesses whether canaries were in, and how many are right."""

    canaries: int
    guesses: int
    correct: int
    signs: np.ndarray  # [canaries] of int8: 1 guessed in, -1 guessed out, 0 abstained


class Family(NamedTuple):
    """Trade-off curves, one for each noise multiplier; more noise is more privacy.

    `curve(noise_multiplier)` is a function of a probability x in [0, 1]: the least probability that
    an event has for one data set where it has probability x for a neighbour.  For the trade-off
    function f of a mechanism this is f(1 - x) in both directions, and where the directions differ,
    the smaller.  A curve that is too small is safe.  `curve_of_deltas` makes one from what an
    accountant proves.
    """

    curve: Callable[[float], Callable[[float], float]]
    epsilon: Callable[[float, float], float]  # (noise multiplier, delta) -> epsilon
    least: float  # noise multipliers that are searched
    most: float
    name: str


def _gaussian_curve(noise_multiplier):
    mu = 1 / noise_multiplier

    def least_probability(x):
        if not 0 < x < 1:
            return float(x >= 1)
        return 0.5 * math.erfc((mu - NORMAL.inv_cdf(x)) / math.sqrt(2))

    return least_probability


# every Gaussian release without sampling, and all compositions of such
GAUSSIAN = Family(
    curve=_gaussian_curve,
    epsilon=lambda z, delta: float(rdp.gaussian_epsilon(1 / z, delta)),
    least=1 / 40,
    most=1e6,
    name="the trade-off curve of a Gaussian mechanism without sampling",
)


def curve_of_deltas(epsilons: ArrayLike, deltas: ArrayLike) -> Callable[[float], float]:
    """The curve that follows from (epsilon, delta)-DP for several pairs, for `Family`.

    Shapes:
        epsilons [n], deltas [n] -> a function of a probability.

    Privacy:
        safe where the mechanism is (epsilon, delta)-DP in both directions for every pair: then the
        mechanism's own curve is nowhere below this one.

    Raises:
        ArgumentError: for lists of unequal length, negative numbers, and deltas over 1.

    References:
        Dong, Roth, Su, JRSS B 2022, proposition 2.12.

    Example:
        >>> curve = curve_of_deltas([0.0, 1.0], [0.3, 0.1])
        >>> round(curve(0.5), 4)
        0.2
    """
    where = "curve_of_deltas"
    checks.require_nonnegative(where, epsilons=epsilons, deltas=deltas)
    epsilons, deltas = (np.asarray(a, np.float64) for a in (epsilons, deltas))
    if epsilons.ndim != 1 or epsilons.shape != deltas.shape or not epsilons.size:
        checks.fail(
            where,
            "epsilons and deltas, two lists of one length",
            f"shapes {list(epsilons.shape)} and {list(deltas.shape)}",
        )
    if np.any(deltas > 1):
        checks.fail(where, "deltas in [0, 1]", checks.short_repr(deltas))
    # y >= e^-epsilon (x - delta), and y >= 1 - delta - e^epsilon (1 - x), and y >= 0
    slopes = np.concatenate([[0.0], np.exp(-epsilons), np.exp(epsilons)])
    heights = np.concatenate([[0.0], -np.exp(-epsilons) * deltas, 1 - deltas - np.exp(epsilons)])
    lines = _upper_envelope(slopes, heights)
    starts = [start for start, _, _ in lines]

    def least_probability(x):
        _, slope, height = lines[bisect.bisect_right(starts, x) - 1]
        return min(max(slope * x + height, 0.0), 1.0)

    return least_probability


def _upper_envelope(slopes, heights):
    """Lines (from where, slope, height) that are on top, from left to right."""
    lines = []
    for i in np.lexsort((heights, slopes)):
        slope, height = float(slopes[i]), float(heights[i])
        start = -math.inf
        while lines:
            before, other, base = lines[-1]
            # of parallel lines the later one is higher
            start = (base - height) / (slope - other) if slope > other else -math.inf
            if start > before:
                break
            lines.pop()
            start = -math.inf
        lines.append((start, slope, height))
    return lines


# --- from scores to guesses


def guesses_from_scores(
    scores: ArrayLike, included: ArrayLike, guesses: int, *, sides: str = "both"
) -> Guesses:
    """Guess "in" for the canaries with the highest scores and "out" for those with the lowest.

    Where canaries at the edge have equal scores, those are taken of which the guess is wrong: an
    order that knew which canaries were in would give them away.

    Shapes:
        scores [canaries], included [canaries] -> signs [canaries].

    Args:
        scores: higher where a canary seems to have been in.
        included: what the coins said.
        guesses: how many to make; fix it before you see the scores.
        sides: "both": half of them "in" (and one more where the number is odd), half "out"; or
            "highest": all of them "in".

    Raises:
        ArgumentError: for more guesses than canaries, scores that are nan, and coins other than
            true and false.

    References:
        Steinke, Nasr, Jagielski, NeurIPS 2023, Algorithm 1.

    Example:
        >>> made = guesses_from_scores([0.1, 2.0, -1.0, 0.3], [False, True, False, True], 2)
        >>> made.correct, made.signs.tolist()
        (2, [0, 1, -1, 0])
    """
    where = "guesses_from_scores"
    order, included = _ranked(where, scores, included, sides)
    checks.require_integer(where, guesses=guesses)
    _at_most_canaries(where, guesses, len(order))
    highest, lowest = _shares(guesses, sides)
    signs = np.zeros(len(order), np.int8)
    signs[order[len(order) - highest :]] = 1
    signs[order[:lowest]] = -1
    correct = np.count_nonzero((signs == 1) & included) + np.count_nonzero(
        (signs == -1) & ~included
    )
    return Guesses(len(order), int(guesses), int(correct), signs)


def guesses_about(scores: ArrayLike, included: ArrayLike, guesses: int, center: float) -> Guesses:
    """Guess "in" over `center` and "out" under it, for the canaries whose scores are furthest away.

    As many may be "in" as seem to be, so that no guess is spent on a side that ran out of canaries;
    but the center has to come from elsewhere, such as another run.

    Shapes:
        scores [canaries], included [canaries] -> signs [canaries].

    Args:
        scores: higher where a canary seems to have been in.
        included: what the coins said.
        guesses: how many to make; fix it before you see the scores.
        center: fixed before you see them, too.

    Raises:
        ArgumentError: as `guesses_from_scores`.

    Example:
        >>> made = guesses_about([0.1, 2.0, 1.5, 0.4], [False, True, True, False], 3, center=0.5)
        >>> made.correct, made.signs.tolist()
        (3, [-1, 1, 1, 0])
    """
    where = "guesses_about"
    _, included = _ranked(where, scores, included, "both")
    checks.require_integer(where, guesses=guesses)
    _at_most_canaries(where, guesses, len(included))
    apart = np.asarray(scores, np.float64) - float(center)
    right = np.where(apart == 0, False, (apart > 0) == included)
    # of equal distances the wrong guesses first; at the center itself a guess is "in" or "out" as
    # the coin is not
    chosen = np.lexsort((right, -np.abs(apart)))[:guesses]
    signs = np.zeros(len(included), np.int8)
    signs[chosen] = np.where(right, 1, -1)[chosen] * np.where(included, 1, -1)[chosen]
    return Guesses(len(included), int(guesses), int(right[chosen].sum()), signs)


def _ranked(where, scores, included, sides):
    """Canaries from the lowest score to the highest, and the coins as booleans."""
    checks.require_one_of(where, ("both", "highest"), sides=sides)
    scores, included = (
        checks.as_array(where, n, a) for n, a in (("scores", scores), ("included", included))
    )
    if scores.ndim != 1 or scores.shape != included.shape or scores.dtype.kind not in "iufb":
        checks.fail(
            where,
            "scores and included, two lists of one length",
            f"shapes {list(scores.shape)} and {list(included.shape)}",
        )
    if np.any(np.isnan(scores)):
        checks.fail(where, "scores that are numbers", f"{np.isnan(scores).sum()} that are nan")
    if included.dtype.kind not in "biuf" or not np.all((included == 0) | (included == 1)):
        checks.fail(where, "included, true or false for each canary", checks.short_repr(included))
    included = included.astype(bool)
    # of equal scores the included ones first: from either end, the wrong guesses come first
    return np.lexsort((~included, scores)), included


def _shares(guesses, sides):
    lowest = guesses // 2 if sides == "both" else 0
    return guesses - lowest, lowest


def _at_most_canaries(where, guesses, canaries):
    if guesses > canaries:
        checks.fail(
            where,
            f"guesses <= canaries, that is {canaries}",
            f"guesses={guesses}",
            "One guess a canary at most: make fewer guesses, or insert more canaries.",
        )


# --- Steinke, Nasr, Jagielski


def one_run_p_value(
    epsilon: float, canaries: int, guesses: int, correct: int, *, delta: float
) -> float:
    """A bound on how probable so many right guesses are, if the run is (epsilon, delta)-DP.

    With q = 1 / (1 + e^-epsilon) and B binomial of `guesses` draws with chance q:

        P[B >= correct] + 2 canaries delta max_{i >= 1} P[correct - i <= B < correct] / i.

    Raises:
        ArgumentError: for numbers out of range.

    References:
        Steinke, Nasr, Jagielski, NeurIPS 2023, theorem 5.2.

    Example:
        >>> round(one_run_p_value(0.0, 10, 10, 10, delta=0.0) * 2**10, 9)
        1.0
    """
    where = "one_run_p_value"
    checks.require_nonnegative(where, single=True, epsilon=epsilon)
    _check_counts(where, canaries, guesses, correct)
    check_delta(where, delta)
    return _p_value(canaries, guesses, correct, delta)(float(epsilon))


def _p_value(canaries, guesses, correct, delta):
    """epsilon -> p-value."""
    if correct == 0:
        return lambda epsilon: 1.0
    below = np.arange(correct - 1, -1, -1)
    steps = np.arange(1, correct + 1)
    log_choose = (
        special.gammaln(guesses + 1)
        - special.gammaln(below + 1)
        - special.gammaln(guesses - below + 1)
    )

    def p(epsilon):
        # by the guesses that are wrong, whose chance keeps its digits where epsilon is large
        reached = float(special.bdtr(guesses - correct, guesses, special.expit(-epsilon)))
        if delta == 0:
            return reached
        log_wrong = -np.logaddexp(0.0, epsilon)
        log_right = -np.logaddexp(0.0, -epsilon)
        mass = np.exp(log_choose + below * log_right + (guesses - below) * log_wrong)
        just_missed = float(np.max(np.cumsum(mass) / steps))
        return min(1.0, reached + 2 * canaries * delta * just_missed)

    return p


def one_run(
    canaries: int, guesses: int, correct: int, *, delta: float, confidence: float = 0.95
) -> OneRun:
    """A lower bound on epsilon from how many guesses of one run are right.

    Nothing is assumed of the mechanism.  Even for perfect scores the bound is about half of the
    epsilon of a Gaussian mechanism; `one_run_tradeoff` shows more where a curve may be assumed.

    Units:
        canaries with a coin each; guesses <= canaries, fixed before the scores were seen; correct
        <= guesses; delta in [0, 1); confidence in (0, 1).

    Privacy:
        of the presence of one canary (add_remove).  A run of (epsilon, delta)-DP gets a larger
        bound than epsilon with probability at most 1 - confidence, over the coins and the run.

    Raises:
        ArgumentError: for numbers out of range, and where no outcome could show any epsilon; the
            message says which confidence can be had.

    References:
        Steinke, Nasr, Jagielski, NeurIPS 2023, theorem 5.2 and appendix D.

    Example:
        >>> round(one_run(1000, 100, 100, delta=1e-5).epsilon, 6)
        3.465376
    """
    where = "one_run"
    _check_counts(where, canaries, guesses, correct)
    check_delta(where, delta)
    check_confidence(where, confidence)
    alpha = 1 - confidence
    _can_reject(where, canaries, guesses, delta, alpha)
    epsilon = _largest_rejected(_p_value(canaries, guesses, correct, delta), alpha)
    return OneRun(epsilon, delta, confidence, canaries, guesses, correct)


def _largest_rejected(p_value, alpha):
    if p_value(0.0) >= alpha:
        return 0.0
    high = 1.0
    while p_value(high) < alpha:
        high *= 2
    kept = roots.smallest_fitting(lambda x: alpha - p_value(x), 0.0, high, TOLERANCE)
    return max(kept - TOLERANCE, 0.0)  # `kept` is not rejected; what lies so far below it is


def _check_counts(where, canaries, guesses, correct):
    checks.require_integer(where, canaries=canaries, guesses=guesses)
    checks.require_integer(where, min_value=0, correct=correct)
    _at_most_canaries(where, guesses, canaries)
    if correct > guesses:
        checks.fail(where, f"correct <= guesses, that is {guesses}", f"correct={correct}")


def _can_reject(where, canaries, guesses, delta, alpha):
    """Refuse what could show nothing if all guesses were right."""
    best = _p_value(canaries, guesses, guesses, delta)(0.0)
    if best < alpha:
        return
    alone = 0.5**guesses  # the p-value at delta = 0
    if alone < alpha:
        # the term of delta is proportional to it
        need = f"a smaller canaries * delta for confidence={1 - alpha:.6g}"
        little = 1e-9 / canaries  # so little that the p-value is not cut off at 1
        slope = (_p_value(canaries, guesses, guesses, little)(0.0) - alone) / little
        most = (alpha - alone) / slope
        do = f"With these numbers a delta below {most:.3g} works."
    else:
        need = (
            f"at least {math.floor(-math.log2(alpha)) + 1} guesses for confidence={1 - alpha:.6g}"
        )
        do = (
            f"If all are right, a confidence below {1 - best:.6g} can be had."
            if best < 1
            else "With this delta nothing can be had from so few."
        )
    checks.fail(where, need, f"canaries={canaries}, guesses={guesses}, delta={delta!r}", do)


# --- Mahloujifar, Melis, Chaudhuri


def one_run_tradeoff(
    canaries: int,
    guesses: int,
    correct: int,
    *,
    delta: float,
    confidence: float = 0.95,
    family: Family = GAUSSIAN,
    alphabet: int = 2,
) -> OneRun:
    """A lower bound on epsilon from one run of a mechanism whose trade-off curve is in a family.

    Finds the smallest noise multiplier of which the curve is rejected, and reports its epsilon.

    Units:
        as `one_run`, with delta in (0, 1); alphabet: the number of variants of a canary one of
        which was drawn at random for the run, 2 for in and out.

    Privacy:
        a lower bound only if the mechanism's curve is one of the family, as a Gaussian mechanism
        without sampling is of `GAUSSIAN`; for other mechanisms it is an estimate.

    Args:
        canaries: how many had a draw.
        guesses: how many were guessed.
        correct: how many guesses are right.
        delta: the delta at which epsilon is reported.
        confidence: of the bound.
        family: the curves.
        alphabet: variants of a canary.

    Raises:
        ArgumentError: for numbers out of range, and where no outcome could show any epsilon.

    References:
        Mahloujifar, Melis, Chaudhuri, ICML 2025, Algorithm 3.

    Example:
        >>> round(one_run_tradeoff(1000, 100, 100, delta=1e-5).epsilon, 6)
        5.549028
    """
    where = "one_run_tradeoff"
    _check_counts(where, canaries, guesses, correct)
    check_delta(where, delta, zero=False)
    check_confidence(where, confidence)
    checks.require_type(where, Family, "jfl.auditing", family=family)
    checks.require_integer(where, min_value=2, alphabet=alphabet)
    alpha = 1 - confidence
    weakest = family.curve(family.most)
    if not _excess(weakest, canaries, guesses, guesses, alpha, alphabet) > 0:
        _refuse_tradeoff(where, weakest, canaries, guesses, confidence, alphabet)
    z = _smallest_rejected(family, canaries, guesses, correct, alpha, alphabet)
    epsilon = 0.0 if z is None else float(family.epsilon(z, delta))
    return OneRun(epsilon, delta, confidence, canaries, guesses, correct, assumes=family.name)


def _refuse_tradeoff(where, curve, canaries, guesses, confidence, alphabet):
    low, high = 0.0, confidence
    for _ in range(20):
        middle = (low + high) / 2
        if _excess(curve, canaries, guesses, guesses, 1 - middle, alphabet) > 0:
            low = middle
        else:
            high = middle
    checks.fail(
        where,
        f"more guesses for confidence={confidence!r}",
        f"canaries={canaries}, guesses={guesses}",
        f"If all are right, confidence={math.floor(low * 1e4) / 1e4} can be had."
        if low > 1e-4
        else "",
    )


def _excess(curve, canaries, guesses, correct, alpha, alphabet):
    """Positive where a curve is rejected: Algorithm 3.

    `right` and `wrong` are shares of the guesses that are right and wrong in the event that
    `correct` or more are right, which has probability `alpha`; the curve ties the shares for one
    number of right guesses to those for one less.  Rejected where they do not fit into all guesses.
    """
    right = alpha * correct / canaries
    wrong = alpha * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        least = (alphabet - 1) * curve(right)
        if least <= wrong:
            break  # then neither of them changes any more
        right = min(1.0, right + i / (guesses - i) * (least - wrong))
        wrong = least
    return right + wrong - guesses / canaries


def _smallest_rejected(family, canaries, guesses, correct, alpha, alphabet=2, most=None):
    """The smallest noise multiplier, at most `most`, that is rejected; None where that one is
    not."""

    def excess(log_noise):
        value = _excess(
            family.curve(math.exp(log_noise)), canaries, guesses, correct, alpha, alphabet
        )
        return -value if value > 0 else max(-value, 1e-300)

    low, high = math.log(family.least), math.log(family.most if most is None else most)
    if excess(high) > 0:
        return None
    return math.exp(roots.smallest_fitting(excess, low, high, TOLERANCE))


# --- several numbers of guesses


def best_number_of_guesses(
    scores: ArrayLike,
    included: ArrayLike,
    numbers: Sequence[int],
    *,
    delta: float,
    confidence: float = 0.95,
    sides: str = "both",
    family: Family | None = None,
) -> OneRun:
    """The largest bound of several numbers of guesses, each at its share of 1 - confidence.

    The best number is not known before the scores are seen.  Choosing it afterwards at the full
    confidence would be wrong more often than promised, so that each of n numbers gets
    (1 - confidence) / n (Bonferroni).  A few numbers, such as powers of two, lose little.

    Shapes:
        scores [canaries], included [canaries], numbers [n].

    Args:
        scores: as `guesses_from_scores`.
        included: what the coins said.
        numbers: numbers of guesses, fixed before the scores were seen.
        delta: of the guarantee.
        confidence: of the bound that is returned, with the correction.
        sides: as `guesses_from_scores`.
        family: None for `one_run`, or the curves of `one_run_tradeoff`.

    Raises:
        ArgumentError: as the functions named; and where none of the numbers could show anything.

    Example:
        >>> scores, included = np.arange(1000.0), np.arange(1000) >= 500
        >>> best = best_number_of_guesses(scores, included, [100, 300, 1000], delta=1e-5)
        >>> best.guesses, best.tried, round(best.epsilon, 2)
        (1000, 3, 5.45)
    """
    where = "best_number_of_guesses"
    order, included = _ranked(where, scores, included, sides)
    check_delta(where, delta, zero=family is None)
    check_confidence(where, confidence)
    canaries = len(order)
    numbers = checks.as_tuple(where, numbers=numbers)
    if not numbers:
        checks.fail(where, "at least one number of guesses", "none")
    checks.require_integer(where, **{f"numbers[{i}]": n for i, n in enumerate(numbers)})
    _at_most_canaries(where, max(numbers), canaries)
    alpha = (1 - confidence) / len(numbers)

    from_below = np.concatenate([[0], np.cumsum(~included[order])])
    from_above = np.concatenate([[0], np.cumsum(included[order][::-1])])
    made = []
    for guesses in map(int, numbers):
        highest, lowest = _shares(guesses, sides)
        made.append((guesses, int(from_above[highest] + from_below[lowest])))
    if family is None:
        _can_reject(where, canaries, max(numbers), delta, alpha)
        (guesses, correct), epsilon = _best_of_any(made, canaries, delta, alpha)
        assumes = OneRun._field_defaults["assumes"]
    else:
        checks.require_type(where, Family, "jfl.auditing", family=family)
        weakest = family.curve(family.most)
        if not _excess(weakest, canaries, max(numbers), max(numbers), alpha, 2) > 0:
            _refuse_tradeoff(where, weakest, canaries, max(numbers), 1 - alpha, 2)
        (guesses, correct), z = _best_of_family(made, canaries, family, alpha)
        epsilon = 0.0 if z is None else float(family.epsilon(z, delta))
        assumes = family.name
    return OneRun(
        epsilon, delta, confidence, canaries, guesses, correct, len(numbers), assumes=assumes
    )


def _promising(made, alpha):
    """The most promising first, so that most of the others are dismissed by one test."""
    guesses, correct = np.array(made, np.float64).T
    error = np.sqrt(guesses * 0.25 * -np.log(alpha))
    return [made[i] for i in np.argsort(-(correct - error) / guesses, kind="stable")]


def _best_of_any(made, canaries, delta, alpha):
    best, epsilon = made[0], 0.0
    for guesses, correct in _promising(made, alpha):
        # at delta = 0 the p-value is smaller, and quick
        if _p_value(canaries, guesses, correct, 0.0)(epsilon) >= alpha:
            continue
        p_value = _p_value(canaries, guesses, correct, delta)
        if p_value(epsilon) < alpha:
            best, epsilon = (guesses, correct), _largest_rejected(p_value, alpha)
    return best, epsilon


def _best_of_family(made, canaries, family, alpha):
    best, z = made[0], None
    for guesses, correct in _promising(made, alpha):
        smaller = _smallest_rejected(family, canaries, guesses, correct, alpha, most=z)
        if smaller is not None:
            best, z = (guesses, correct), smaller
    return best, z
