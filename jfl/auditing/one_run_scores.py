"""Scores of the canaries in one run, chosen on other runs, and the guesses based on them.

The *judged* run is the one that gives the bound.  The score and the number of guesses are chosen on
other runs, the *learning* runs, because a choice on the judged run would invalidate the bound.

Observations of n runs are arrays [n, m, R, k]: k numbers of each of m canaries in each of R rounds.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..core.errors import ArgumentError
from . import scores
from .estimators import one_run

NUM_GUESS_COUNTS = 8  # numbers of guesses that are tried on the learning runs


class ChosenScore(NamedTuple):
    """The score for the judged run, and how many guesses to make with it.

    Attributes:
        value: the quality of the score on the learning runs: the mean epsilon, and minus the mean
            p-value, which breaks ties if no epsilon is shown.
        center: a value between the scores of included and of excluded canaries.
        guesses: the number of guesses.
        score: Float[m, R, k] -> Float[m].
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


def learn(seen, coins, delta, confidence) -> ChosenScore:
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
        score, *_ = scores.learn(left[coins], left[~coins], None)
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
            found = [bounds(*side, guesses, center, delta, confidence)[0] for side in sides]
        except ArgumentError:  # too few guesses to show anything
            continue
        p_values = [one_run.one_run_p_value(0.0, *f[3:6], delta=delta) for f in found]
        value = (float(np.mean([f.epsilon for f in found])), -float(np.mean(p_values)))
        best = max(best, (value, guesses))
    return best[0], center, best[1]


def bounds(values, included, guesses, center, delta, confidence):
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
