"""Scores: one number per run, computed from its observations and learned on other runs.

Any function of the observations gives a valid audit if it was chosen without the judged runs.
Three are tried: the sum over rounds with the same weights in each; the best weighted sum of all
observations (Fisher's discriminant), which is optimal if both sides are normal with the same
covariance, but has a weight per observation to learn; and, if the canary participates at random,
the sum over rounds of log-likelihood ratios.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logsumexp

RIDGE = 1e-9  # fraction of the mean variance that is added, for observations that never change


class Score(NamedTuple):
    """A function of the observations, Float[n, R, k] -> Float[n], and its name."""

    of: Callable[[np.ndarray], np.ndarray]
    name: str


def learn(inside: np.ndarray, outside: np.ndarray, law: np.ndarray | None) -> list[Score]:
    """Learn scores that are higher with the canary, from runs of both sides.

    Args:
        inside: Float[n, R, k], observations with the canary.
        outside: Float[n, R, k], observations without it.
        law: Float64[m], the probabilities that the canary counts 0, 1, ... times in a round.  Only
            sums are learned if it is None or deterministic.
    """
    found = [_sum_over_rounds(inside, outside), _sum(inside, outside)]
    if law is not None and np.max(law) < 1 - 1e-12:
        found.append(_ratios(inside, outside, law))
    return found


def direction(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """Return the direction, Float64[d], along which the means of two samples [n, d] differ by the
    most standard deviations.

    The covariance is that of `outside`, which does not vary with draws of the canary.
    """
    apart = inside.mean(0) - outside.mean(0)
    covariance = np.atleast_2d(np.cov(outside, rowvar=False))
    scale = np.trace(covariance) / len(apart)
    if not scale > 0:
        return apart
    alive = (
        np.diag(covariance) > RIDGE * scale
    )  # a coordinate without noise decides exactly, or is useless
    exact = ~alive & (np.abs(apart) > 1e-6 * (1 + np.abs(outside.mean(0))))
    if exact.any():
        return np.where(exact, apart, 0.0) / np.sqrt(RIDGE * scale)
    kept = covariance[np.ix_(alive, alive)] + RIDGE * scale * np.eye(alive.sum())
    weights = np.zeros_like(apart)
    weights[alive] = np.linalg.solve(kept, apart[alive])
    return weights


def _flat(seen):
    return np.asarray(seen, np.float64).reshape(len(seen), -1)


def _sum(inside, outside):
    weights = direction(_flat(inside), _flat(outside))
    return Score(lambda seen: _flat(seen) @ weights, "sum")


def _sum_over_rounds(inside, outside):
    """Learn one set of weights for all rounds, so that few numbers are learned."""
    each = lambda seen: np.asarray(seen, np.float64).reshape(-1, seen.shape[-1])
    weights = direction(each(inside), each(outside))
    return Score(lambda seen: (np.asarray(seen, np.float64) @ weights).sum(1), "sum over rounds")


def _ratios(inside, outside, law):
    """Learn the sum over rounds of log(sum over m of law[m] exp(m d s - (m d)^2 / 2)), where s is
    standard normal without the canary and d is the shift of one copy.

    The shift d is also learned, from the means: m copies add m d.
    """
    times = np.arange(len(law))
    expected = float(law @ times)
    rounds = []
    for r in range(inside.shape[1]):
        weights = direction(np.asarray(inside[:, r], float), np.asarray(outside[:, r], float))
        a, b = inside[:, r] @ weights, outside[:, r] @ weights
        center, deviation = b.mean(), max(b.std(), 1e-300)
        distance = (a.mean() - center) / deviation / max(expected, 1e-300)
        rounds.append((weights, center, deviation, distance))
    with np.errstate(divide="ignore"):
        log_law = np.log(law)

    def score(seen):
        total = np.zeros(len(seen))
        for r, (weights, center, deviation, distance) in enumerate(rounds):
            s = (np.asarray(seen[:, r], float) @ weights - center) / deviation
            moved = times * distance
            gain: Any = logsumexp(log_law + s[:, None] * moved - np.square(moved) / 2, axis=1)
            total += gain
        return total

    return Score(score, "likelihood ratio")
