"""From the observations of many runs to a lower bound: a score, its threshold, and its errors.

A score is one number per run.  Any function of the observations gives a valid audit if it was
chosen without looking at the runs that give the bound.  Three are tried: the sum over rounds, with
the same weights in each round; the best weighted sum of all observations (Fisher's discriminant),
which is optimal if the observations of both sides are normal with the same covariance, but has to
learn a weight per observation; and, if the canary participates at random, the sum over rounds of
log-likelihood ratios.

Observations of n runs are arrays [n, R, k]: k numbers in each of R rounds.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logsumexp

from .estimators import thresholds, two_samples

RIDGE = 1e-9  # fraction of the mean variance that is added, for observations that never change


class Score(NamedTuple):
    """A function of the observations, Float[n, R, k] -> Float[n], and its name."""

    of: Callable[[np.ndarray], np.ndarray]
    name: str


def bound(
    seen: list[np.ndarray],
    copies: np.ndarray | None,
    delta: float,
    confidence: float,
    learn_fraction: float = 0.3,
) -> tuple[float, str, float]:
    """Bound epsilon from below by the observations of many runs.

    Some of the runs choose the score and its threshold, and the others give the bound.

    Args:
        seen: the observations with the canary and without it, each Float[n, R, k].
        copies: see `learn`.
        delta: the delta at which epsilon is bounded.
        confidence: in (0, 1), of the bound.
        learn_fraction: the fraction of the runs that choose the score and its threshold.

    Returns:
        The lower bound; a description of the estimator; and the mean score with the canary minus
        the mean score without it, in standard deviations of the latter scores.
    """
    first = int(learn_fraction * len(seen[0]))
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
    """Return scores that are higher with the canary, learned from runs of both sides.

    Args:
        inside: Float[n, R, k], observations with the canary.
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
