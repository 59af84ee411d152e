"""Lower bounds of epsilon from one run with many canaries, each included by a coin flip.

After the run, an auditor guesses for some canaries whether they were included.  The bounds use only
the number of correct guesses, and hold for any scores from which the guesses were made, if

- each canary was included by an independent fair coin, which the run did not use otherwise;
- the number of guesses was fixed before the scores were seen.  To try n numbers, pass the
  confidence 1 - (1 - confidence) / n to each, and keep the largest bound;
- neighbouring datasets differ by the presence of one canary (add_remove, or zero_out for fixed
  sizes).

`one_run` assumes nothing else about the mechanism.  `one_run_tradeoff` assumes a Gaussian mechanism
without sampling, and is tighter.

Arguments that several functions share:

    canaries: the number of canaries with a coin.
    guesses: the number of guesses; the auditor abstains from the other canaries.
    correct: the number of correct guesses.
    delta: the delta at which epsilon is reported.
    confidence: in (0, 1), of the bound.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from ...core import checks
from ...privacy.accountants import rdp, roots
from .thresholds import check_levels

__all__ = [
    "Guesses",
    "OneRun",
    "guesses_from_scores",
    "one_run",
    "one_run_p_value",
    "one_run_tradeoff",
]

TOLERANCE = 1e-10  # of epsilon, and of the logarithm of a noise multiplier
MIN_NOISE, MAX_NOISE = 1 / 40, 1e6  # the noise multipliers that are searched
NORMAL = NormalDist()


class OneRun(NamedTuple):
    """The lower bound of epsilon from one run, and what it was computed from.

    Attributes:
        epsilon: the largest rejected epsilon; 0 if none is rejected.
        delta, confidence, canaries, guesses, correct: see the module.
        assumes: what is assumed about the mechanism.
        kind: "lower bound", as in the results of other estimators.
    """

    epsilon: float
    delta: float
    confidence: float
    canaries: int
    guesses: int
    correct: int
    assumes: str = "nothing of the mechanism"
    kind: str = "lower bound"


class Guesses(NamedTuple):
    """Guesses about which canaries were included, and how many of them are correct.

    Attributes:
        canaries, guesses, correct: see the module.
        signs: Int8[canaries]; 1 for the guess "included", -1 for "excluded", 0 for none.
    """

    canaries: int
    guesses: int
    correct: int
    signs: np.ndarray


def guesses_from_scores(
    scores: ArrayLike, included: ArrayLike, guesses: int, *, center: float | None = None
) -> Guesses:
    """Guess which canaries were included, from a score for each.

    Among equal scores the wrong guesses are made first, so that ties never count as evidence.

    Args:
        scores: [canaries], higher if a canary seems to have been included.
        included: [canaries], whether each canary was included.
        guesses: the number of guesses, which has to be fixed before the scores are seen.
        center: None to guess "included" for the highest scores and "excluded" for the lowest, half
            of the guesses each.  With a number, the guesses are for the scores farthest from it:
            "included" above it and "excluded" below it.  The number, too, has to be fixed before
            the scores are seen.

    References:
        Steinke, Nasr, Jagielski, NeurIPS 2023, Algorithm 1.

    Example:
        >>> made = guesses_from_scores([0.1, 2.0, -1.0, 0.3], [False, True, False, True], 2)
        >>> made.correct, made.signs.tolist()
        (2, [0, 1, -1, 0])
    """
    where = "guesses_from_scores"
    scores, coins = checks.as_array(where, "scores", scores), np.asarray(included)
    if scores.ndim != 1 or scores.shape != coins.shape or scores.dtype.kind not in "iufb":
        got = f"shapes {list(scores.shape)} and {list(coins.shape)}"
        checks.fail(where, "scores and included, two lists of one length", got)
    if np.any(np.isnan(scores)):
        checks.fail(where, "scores that are numbers", f"{np.isnan(scores).sum()} that are nan")
    if not np.all((coins == 0) | (coins == 1)):
        checks.fail(where, "included, true or false for each canary", checks.short_repr(coins))
    _check_counts(where, len(scores), guesses, 0)
    coins = coins.astype(bool)
    signs = np.zeros(len(scores), np.int8)
    if center is None:
        # included canaries first, so that the wrong guesses come first from either end
        order = np.lexsort((~coins, scores))
        signs[order[len(order) - (guesses - guesses // 2) :]] = 1
        signs[order[: guesses // 2]] = -1
    else:
        above = np.sign(scores.astype(np.float64) - center)
        guess = np.where(above == 0, np.where(coins, -1, 1), above)
        right = (guess > 0) == coins
        chosen = np.lexsort((right, -np.abs(scores - center)))[:guesses]
        signs[chosen] = guess[chosen]
    correct = np.count_nonzero((signs != 0) & ((signs > 0) == coins))
    return Guesses(len(scores), int(guesses), int(correct), signs)


def _check_counts(where, canaries, guesses, correct):
    """Reject numbers of canaries and guesses that are not consistent."""
    checks.require_integer(where, canaries=canaries, guesses=guesses)
    checks.require_integer(where, min_value=0, correct=correct)
    if not correct <= guesses <= canaries:
        got = f"correct={correct}, guesses={guesses}, canaries={canaries}"
        checks.fail(where, "correct <= guesses <= canaries", got)


# --- Steinke, Nasr, Jagielski


def one_run(
    canaries: int, guesses: int, correct: int, *, delta: float, confidence: float = 0.95
) -> OneRun:
    """Return a lower bound of epsilon that is valid for every mechanism.

    If the run is (epsilon, delta)-DP, the bound exceeds epsilon with probability at most
    1 - confidence, over the coins and the run.  For a Gaussian mechanism, even the best scores show
    only about half of its epsilon.

    Args:
        canaries, guesses, correct, delta, confidence: see the module.

    Raises:
        ArgumentError: If the numbers could not show any epsilon even if all guesses were correct.

    References:
        Steinke, Nasr, Jagielski, NeurIPS 2023, theorem 5.2 and appendix D.

    Example:
        >>> round(one_run(1000, 100, 100, delta=1e-5).epsilon, 6)
        3.465376
    """
    where = "one_run"
    _check_counts(where, canaries, guesses, correct)
    check_levels(where, delta, confidence)
    alpha = 1 - confidence
    if one_run_p_value(0.0, canaries, guesses, guesses, delta=delta) >= alpha:
        expected = f"a smaller canaries * delta for confidence={confidence:.6g}"
        if 0.5**guesses >= alpha:
            fewest = math.floor(-math.log2(alpha)) + 1
            expected = f"at least {fewest} guesses for confidence={confidence:.6g}"
        got = f"canaries={canaries}, guesses={guesses}, delta={delta!r}"
        checks.fail(where, expected, got, "These numbers show nothing if every guess is correct.")
    p_value = lambda x: one_run_p_value(x, canaries, guesses, correct, delta=delta)
    epsilon = 0.0
    if p_value(0.0) < alpha:
        high = 1.0
        while p_value(high) < alpha:
            high *= 2
        kept = roots.smallest_fitting(lambda x: alpha - p_value(x), 0.0, high, TOLERANCE)
        epsilon = max(kept - TOLERANCE, 0.0)  # `kept` is not rejected, but this value is
    return OneRun(epsilon, delta, confidence, canaries, guesses, correct)


def one_run_p_value(
    epsilon: float, canaries: int, guesses: int, correct: int, *, delta: float
) -> float:
    """Return an upper bound on the probability of at least `correct` correct guesses under
    (epsilon, delta)-DP.

    With q = 1 / (1 + e^-epsilon) and B ~ Binomial(guesses, q), the bound is

        P[B >= correct] + 2 canaries delta max_{i >= 1} P[correct - i <= B < correct] / i.

    Args:
        epsilon: the epsilon to reject.
        canaries: the number of canaries, each included with probability 1/2.
        guesses: the number of canaries for which a guess was made.
        correct: the number of correct guesses.
        delta: the delta of the guarantee.

    References:
        Steinke, Nasr, Jagielski, NeurIPS 2023, theorem 5.2.

    Example:
        >>> round(one_run_p_value(0.0, 10, 10, 10, delta=0.0) * 2**10, 9)
        1.0
    """
    where = "one_run_p_value"
    checks.require_nonnegative(where, single=True, epsilon=epsilon)
    _check_counts(where, canaries, guesses, correct)
    check_levels(where, delta, 0.5)
    if correct == 0:
        return 1.0
    # Counting the wrong guesses keeps the digits of their probability for a large epsilon.
    reached = float(special.bdtr(guesses - correct, guesses, special.expit(-epsilon)))
    if delta == 0:
        return reached
    fewer, steps = np.arange(correct - 1, -1, -1), np.arange(1, correct + 1)
    log_choose = special.gammaln(guesses + 1) - (
        special.gammaln(fewer + 1) + special.gammaln(guesses - fewer + 1)
    )
    log_wrong = -np.logaddexp(0.0, epsilon)
    log_right = -np.logaddexp(0.0, -epsilon)
    mass = np.exp(log_choose + fewer * log_right + (guesses - fewer) * log_wrong)
    just_missed = float(np.max(np.cumsum(mass) / steps))
    return min(1.0, reached + 2 * canaries * delta * just_missed)


# --- Mahloujifar, Melis, Chaudhuri


def one_run_tradeoff(
    canaries: int, guesses: int, correct: int, *, delta: float, confidence: float = 0.95
) -> OneRun:
    """Return epsilon at the smallest noise multiplier whose trade-off curve is rejected.

    The result is a lower bound for a composition of Gaussian mechanisms without sampling.  For
    other mechanisms it is an estimate.

    Args:
        canaries, guesses, correct, delta, confidence: see the module; delta > 0.

    Raises:
        ArgumentError: If the numbers could not show any epsilon even if all guesses were correct.

    References:
        Mahloujifar, Melis, Chaudhuri, ICML 2025, Algorithm 3.

    Example:
        >>> round(one_run_tradeoff(1000, 100, 100, delta=1e-5).epsilon, 6)
        5.549028
    """
    where = "one_run_tradeoff"
    _check_counts(where, canaries, guesses, correct)
    check_levels(where, delta, confidence, zero=False)
    alpha = 1 - confidence
    if not _excess(MAX_NOISE, canaries, guesses, guesses, alpha) > 0:
        got = f"canaries={canaries}, guesses={guesses}"
        hint = "These numbers show nothing if every guess is correct."
        checks.fail(where, f"more guesses for confidence={confidence!r}", got, hint)
    z = _smallest_rejected(canaries, guesses, correct, alpha)
    epsilon = 0.0 if z is None else float(rdp.gaussian_epsilon(1 / z, delta))
    name = "a Gaussian mechanism without sampling"
    return OneRun(epsilon, delta, confidence, canaries, guesses, correct, assumes=name)


def _smallest_rejected(canaries: int, guesses: int, correct: int, alpha: float) -> float | None:
    """Return the smallest noise multiplier that is rejected at level `alpha`; None if even the
    largest is not."""

    def excess(log_noise):
        value = _excess(math.exp(log_noise), canaries, guesses, correct, alpha)
        return -value if value > 0 else max(-value, 1e-300)

    low, high = math.log(MIN_NOISE), math.log(MAX_NOISE)
    if excess(high) > 0:
        return None
    return math.exp(roots.smallest_fitting(excess, low, high, TOLERANCE))


def _excess(noise_multiplier, canaries, guesses, correct, alpha):
    """Return a positive number if the noise multiplier is rejected (Algorithm 3).

    `right` and `wrong` are the fractions of guesses that are correct and wrong in the event of at
    least `correct` correct guesses, which has probability `alpha`.  The trade-off curve relates
    these fractions for one number of correct guesses to those for one less.  The noise multiplier
    is rejected if they add up to more than all guesses.
    """
    right = alpha * correct / canaries
    wrong = alpha * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        smallest = _smallest_probability(right, noise_multiplier)
        if smallest <= wrong:
            break  # neither of them changes any more
        right = min(1.0, right + i / (guesses - i) * (smallest - wrong))
        wrong = smallest
    return right + wrong - guesses / canaries


def _smallest_probability(x, noise_multiplier):
    """Return the smallest probability that an event of probability x on one dataset can have on a
    neighbouring dataset, for a Gaussian mechanism."""
    if not 0 < x < 1:
        return float(x >= 1)
    return 0.5 * math.erfc((1 / noise_multiplier - NORMAL.inv_cdf(x)) / math.sqrt(2))
