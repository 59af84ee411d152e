"""From the observations of many runs to a lower bound: a score, its threshold, and its errors.

A score is one number per run.  Any function of the observations gives a valid audit if it was
chosen without looking at the runs that give the bound.  Three are tried: the sum over rounds, with
the same weights in each round; the best weighted sum of all observations (Fisher's discriminant),
which is optimal if the observations of both sides are normal with the same covariance, but has to
learn a weight per observation; and, if the canary participates at random, the sum over rounds of
log-likelihood ratios.

Observations of n runs are arrays [n, R, k]: k numbers in each of R rounds.

One run can also have m canaries, each included by a coin flip.  The *judged* run gives the bound,
and other runs, the *learning* runs, choose the score and the number of guesses, because a choice on
the judged run would invalidate the bound.  Its observations are an array [m, R, k].
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logsumexp

from ..core.errors import ArgumentError
from .estimators import one_run, thresholds, two_samples

LEARN_FRACTION = 0.3  # fraction of the runs that choose the score and its threshold
NUM_GUESS_COUNTS = 8  # numbers of guesses that are tried on the learning runs
RIDGE = 1e-9  # fraction of the mean variance that is added, for observations that never change


class Score(NamedTuple):
    """A score: one number per run, computed from what was observed in the run.

    Attributes:
        of: a function from the observations of n runs, Float[n, R, k], k numbers in each of R
            rounds, to the scores of these runs, Float[n].
        name: the name of the score, for descriptions of the estimator.
    """

    of: Callable[[np.ndarray], np.ndarray]
    name: str


def bound(
    seen: list[np.ndarray],
    copies: np.ndarray | None,
    delta: float,
    confidence: float,
) -> tuple[float, str, float]:
    """Bound epsilon from below by the observations of many runs.

    Some of the runs choose the score and its threshold, and the others give the bound.

    Args:
        seen: the observations with the canary and without it, each Float[n, R, k].
        copies: see `learn`.
        delta: the delta at which epsilon is bounded.
        confidence: in (0, 1), of the bound.

    Returns:
        The lower bound; a description of the estimator; and the mean score with the canary minus
        the mean score without it, in standard deviations of the latter scores.
    """
    first = int(LEARN_FRACTION * len(seen[0]))
    learning, judging = ([side[:first] for side in seen], [side[first:] for side in seen])
    tried = []
    for score in learn(learning[0], learning[1], copies):
        inside, outside = map(score.of, learning)
        epsilon, threshold = _best_threshold(inside, outside, delta, confidence)
        tried.append((epsilon, score, threshold))
    _, score, threshold = max(tried, key=lambda one: one[0])
    inside, outside = map(score.of, judging)
    rule = thresholds.Explicit(threshold)
    found = two_samples.lower_bound(
        inside, outside, delta=delta, confidence=confidence, thresholds=rule
    )
    apart, deviation = float(inside.mean() - outside.mean()), float(outside.std())
    mu = apart / deviation if deviation > 0 else math.copysign(math.inf, apart)
    words = f"Clopper-Pearson of a {score.name}, chosen on {first} other runs of each side"
    return float(found.epsilon), words, mu if apart else 0.0


def _best_threshold(inside, outside, delta, confidence) -> tuple[float, float]:
    """Return the largest epsilon that these scores show, and the threshold that shows it.

    The candidates are at even ranks of both sides together, closer near the ends.
    """
    inside, outside = np.sort(inside), np.sort(outside)
    together = np.sort(np.concatenate([inside, outside]))
    tail = np.geomspace(1e-4, 0.5, 60)
    candidates = np.unique(np.quantile(together, np.concatenate([tail, 1 - tail])))
    rates = thresholds.error_rates(inside, outside, candidates, (1 - confidence) / 2)
    epsilon, best = two_samples.shown_epsilon(rates, delta)
    return epsilon, float(candidates[best])


def learn(inside: np.ndarray, outside: np.ndarray, copies: np.ndarray | None) -> list[Score]:
    """Return scores that are higher with the canary, learned from runs with and without it.

    A Score is a function from what was observed in runs to one number per run.

    Args:
        inside: Float[n, R, k], the observations of n runs with the canary: k numbers in each of R
            rounds.
        outside: Float[n, R, k], observations without it.
        copies: Float64[m], the probabilities that the canary counts 0, 1, ... times in a round.
            Likelihood ratios are only learned if it is given and not deterministic.
    """
    each_round = lambda seen: np.asarray(seen, np.float64).reshape(-1, seen.shape[-1])
    same = _direction(each_round(inside), each_round(outside))
    whole = lambda seen: np.asarray(seen, np.float64).reshape(len(seen), -1)
    best = _direction(whole(inside), whole(outside))
    found = [
        Score(lambda seen: (np.asarray(seen, np.float64) @ same).sum(1), "sum over rounds"),
        Score(lambda seen: whole(seen) @ best, "sum"),
    ]
    if copies is not None and np.max(copies) < 1 - 1e-12:
        found.append(_likelihood_ratio(inside, outside, copies))
    return found


def _direction(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """Return the direction, Float64[d], along which the means of two samples [n, d] differ by the
    most standard deviations.

    The covariance is that of `outside`, which does not vary with draws of the canary.
    """
    apart = inside.mean(0) - outside.mean(0)
    covariance = np.atleast_2d(np.cov(outside, rowvar=False))
    scale = np.trace(covariance) / len(apart)
    if not scale > 0:
        return apart
    # A coordinate without noise decides exactly, or is useless.
    alive = np.diag(covariance) > RIDGE * scale
    exact = ~alive & (np.abs(apart) > 1e-6 * (1 + np.abs(outside.mean(0))))
    if exact.any():
        return np.where(exact, apart, 0.0) / np.sqrt(RIDGE * scale)
    kept = covariance[np.ix_(alive, alive)] + RIDGE * scale * np.eye(alive.sum())
    weights = np.zeros_like(apart)
    weights[alive] = np.linalg.solve(kept, apart[alive])
    return weights


def _likelihood_ratio(inside, outside, copies):
    """Learn the sum over rounds of log(sum over m of copies[m] exp(m d s - (m d)^2 / 2)), where s
    is standard normal without the canary and d is the shift of one copy.

    The shift d is learned from the means, since m copies add m d.
    """
    times = np.arange(len(copies))
    expected = float(copies @ times)
    rounds = []
    for r in range(inside.shape[1]):
        weights = _direction(np.asarray(inside[:, r], float), np.asarray(outside[:, r], float))
        a, b = inside[:, r] @ weights, outside[:, r] @ weights
        center, deviation = b.mean(), max(b.std(), 1e-300)
        distance = (a.mean() - center) / deviation / max(expected, 1e-300)
        rounds.append((weights, center, deviation, distance))
    with np.errstate(divide="ignore"):
        log_copies = np.log(copies)

    def score(seen):
        total = np.zeros(len(seen))
        for r, (weights, center, deviation, distance) in enumerate(rounds):
            s = (np.asarray(seen[:, r], float) @ weights - center) / deviation
            moved = times * distance
            gain: Any = logsumexp(log_copies + s[:, None] * moved - np.square(moved) / 2, axis=1)
            total += gain
        return total

    return Score(score, "likelihood ratio")


# --- many canaries in one run


class ChosenScore(NamedTuple):
    """The score for the judged run, and how many guesses to make with it.

    Attributes:
        value: the quality of the score on the learning runs: the mean epsilon that they show, and
            minus the mean p-value, which breaks ties if they show none above 0.
        center: a value between the scores of included and of excluded canaries.
        guesses: the number of guesses.
        score: a function from the observations of one run, Float[m, R, k], k numbers for each of m
            canaries in each of R rounds, to the scores of the canaries, Float[m].
    """

    value: tuple[float, float]
    center: float
    guesses: int
    score: Callable


def learning_coins(draw, runs, canaries):
    """Draw the coins of the learning runs, Bool[runs, m] for m canaries.

    Each run includes half of the canaries, and each canary is in one run of every pair of runs.

    Args:
        draw: a NumPy generator.
        runs: the number of learning runs.
        canaries: the number of canaries, m.
    """
    halves = [draw.permutation(canaries) % 2 == 0 for _ in range(max(runs // 2, 1))]
    return np.stack([side for half in halves for side in (half, ~half)])[:runs]


def choose_score(seen, coins, delta, confidence) -> ChosenScore:
    """Return the better of two scores: the one that shows a larger epsilon on the learning runs.

    One score uses the observations unchanged.  The other one first subtracts the mean observation
    of each canary over runs with and without it, to remove what does not depend on its coin.

    Args:
        seen: Float[n, m, R, k], the observations of the learning runs.
        coins: Bool[n, m], which canaries each run includes.
        delta: the delta at which epsilon is bounded, in (0, 1).
        confidence: in (0, 1), of the bound.
    """
    tried = []
    for subtract in [False, True] if len(seen) > 1 else [False]:
        left = seen - _by_others(seen) if subtract else seen
        score, *_ = learn(left[coins], left[~coins], None)
        values = np.stack([score.of(run) for run in left])
        known = seen.mean(0) if subtract else 0.0
        of = lambda run, score=score, known=known: score.of(run - known)
        tried.append(ChosenScore(*_choose_guesses(values, coins, delta, confidence), of))
    return max(tried, key=lambda chosen: chosen.value)


def _by_others(seen):
    """Estimate what is observed of each canary regardless of its coin, from the other pairs of
    runs."""
    pairs = seen.reshape(-1, 2, *seen.shape[1:]).mean(1)
    return np.repeat((pairs.sum(0) - pairs) / (len(pairs) - 1), 2, axis=0)


def _choose_guesses(values, included, delta, confidence):
    """Return the fields of `ChosenScore` for the best number of guesses, from scores Float[n, m] of
    n runs."""
    center = float(values[included].mean() + values[~included].mean()) / 2
    canaries = values.shape[1]
    best = ((0.0, -1.0), canaries)
    for guesses in np.linspace(0, canaries, NUM_GUESS_COUNTS + 1).astype(int)[1:].tolist():
        try:
            sides = zip(values, included, strict=True)
            found = [one_run_bounds(*side, guesses, center, delta, confidence)[0] for side in sides]
        except ArgumentError:  # too few guesses to show anything
            continue
        p_values = [one_run.one_run_p_value(0.0, *f[3:6], delta=delta) for f in found]
        value = (float(np.mean([f.epsilon for f in found])), -float(np.mean(p_values)))
        best = max(best, (value, guesses))
    return best[0], center, best[1]


def one_run_bounds(values, included, guesses, center, delta, confidence):
    """Return two `OneRun` bounds: for any mechanism, and for a Gaussian mechanism.

    Args:
        values: Float[m], the scores of the canaries.
        included: Bool[m], the coins.
        guesses, center, delta, confidence: as in `one_run.guesses_from_scores` and
            `one_run.one_run`.
    """
    made = one_run.guesses_from_scores(values, included, guesses, center=center)
    level = dict(delta=delta, confidence=confidence)
    return one_run.one_run(*made[:3], **level), one_run.one_run_tradeoff(*made[:3], **level)


def distance(inside, outside):
    """Return the difference between two mean scores, inside minus outside, in standard deviations.

    The unit is the standard deviation within the two samples, from their pooled variance.  The
    result is 0 if a sample has fewer than two scores, or if no sample varies.

    Args:
        inside: Float[n], the scores of included canaries.
        outside: Float[m], the scores of excluded canaries.
    """
    if min(len(inside), len(outside)) < 2:
        return 0.0
    freedom = len(inside) + len(outside) - 2
    variance = (len(inside) * inside.var() + len(outside) * outside.var()) / freedom
    return float((inside.mean() - outside.mean()) / math.sqrt(variance)) if variance else 0.0
