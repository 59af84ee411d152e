"""One number for each run, from what is seen of it: learned on runs that judge nothing.

Any function of what is seen gives a valid audit, if it was chosen without a look at the runs that
are judged.  Three are tried: the sum over rounds, each read alike; the best sum of all that is
seen (Fisher's discriminant), which nothing beats where both sides are normal with one covariance,
but which has to learn a number for each; and the sum over rounds of log-likelihood
ratios, where it depends on a draw whether the canary is in a round.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logsumexp

RIDGE = 1e-9  # of the mean variance, so that what never changes does no harm


class Score(NamedTuple):
    """A function of what is seen, Float[n, R, k] -> Float[n], and its name."""

    of: Callable[[np.ndarray], np.ndarray]
    name: str


def learn(inside: np.ndarray, outside: np.ndarray, law: np.ndarray | None) -> list[Score]:
    """Scores, higher where the canary is in, from runs of both sides.

    Args:
        inside: Float[n, R, k], seen with the canary.
        outside: Float[n, R, k], without it.
        law: Float64[m], how probable it is that it counts 0, 1, ... times in a round; None or
            certain: only the sum.
    """
    found = [_sum_over_rounds(inside, outside), _sum(inside, outside)]
    if law is not None and np.max(law) < 1 - 1e-12:
        found.append(_ratios(inside, outside, law))
    return found


def direction(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """Float64[d] along which the means of two samples [n, d] are furthest apart, in deviations.

    The covariance is that of `outside`, where no draw of the canary adds to it.
    """
    apart = inside.mean(0) - outside.mean(0)
    covariance = np.atleast_2d(np.cov(outside, rowvar=False))
    scale = np.trace(covariance) / len(apart)
    if not scale > 0:
        return apart
    alive = np.diag(covariance) > RIDGE * scale  # a coordinate without noise tells all, or nothing
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
    """All rounds alike: few numbers are learned, however many rounds there are."""
    each = lambda seen: np.asarray(seen, np.float64).reshape(-1, seen.shape[-1])
    weights = direction(each(inside), each(outside))
    return Score(lambda seen: (np.asarray(seen, np.float64) @ weights).sum(1), "sum over rounds")


def _ratios(inside, outside, law):
    """Of each round: log of sum over m of law[m] exp(m d s - (m d)^2 / 2), where s is standard
    normal without the canary and d is what one copy adds.

    The distance d is learned too, from the means: m copies add m d.
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
