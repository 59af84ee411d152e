"""Scores of the canaries of one run, chosen on other runs, and the guesses that they give."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..core.errors import ArgumentError
from . import scores
from .estimators import one_run

NUM_GUESS_COUNTS = 8  # numbers of guesses that are tried on the learning runs


class ChosenScore(NamedTuple):
    """How the judged run is scored."""

    worth: tuple  # on the learning runs: the mean epsilon, and minus the mean p-value
    center: float  # between the scores of both sides
    guesses: int
    score: Callable  # Float[m, R, k] -> Float[m]


def learning_coins(draw, runs, canaries):
    """Return Bool[runs, m] with half of the canaries included in each run, and each canary in one
    run of every two."""
    halves = [draw.permutation(canaries) % 2 == 0 for _ in range(max(runs // 2, 1))]
    return np.stack([side for half in halves for side in (half, ~half)])[:runs]


def learn(seen, coins, delta, confidence) -> ChosenScore:
    """Choose the score that shows more: of the observations, or of their difference from what is
    observed of a canary regardless of its coin.

    Args:
        seen: Float[n, m, R, k], the observations of the learning runs.
        coins: Bool[n, m], which canaries each run includes.
        delta: in (0, 1).
        confidence: in (0, 1).
    """
    tried = []
    for subtract in [False, True] if len(seen) > 1 else [False]:
        left = seen - by_others(seen) if subtract else seen
        score, *_ = scores.learn(left[coins], left[~coins], None)
        values = np.stack([score.of(run) for run in left])
        known = seen.mean(0) if subtract else 0.0
        of = lambda run, score=score, known=known: score.of(run - known)
        tried.append(ChosenScore(*choose_guesses(values, coins, delta, confidence), of))
    return max(tried, key=lambda chosen: chosen.worth)


def by_others(seen):
    """Estimate what is observed of each canary regardless of its coin, from the other pairs of
    runs."""
    pairs = seen.reshape(-1, 2, *seen.shape[1:]).mean(1)
    others = (pairs.sum(0) - pairs) / (len(pairs) - 1)
    return np.repeat(others, 2, axis=0)


def choose_guesses(scores, included, delta, confidence):
    """Return the value of the best number of guesses, the center between both sides, and that
    number, from scores Float[n, m] of n runs; the smallest p-value decides if none shows anything.
    """
    center = float(scores[included].mean() + scores[~included].mean()) / 2
    canaries, best = scores.shape[1], None
    for guesses in np.unique(np.linspace(0, canaries, NUM_GUESS_COUNTS + 1).astype(int))[1:]:
        shown, p_values = [], []
        for values, inside in zip(scores, included, strict=True):
            try:
                found, _ = bounds(values, inside, int(guesses), center, delta, confidence)
            except ArgumentError:  # too few guesses to show anything
                break
            shown.append(found.epsilon)
            counts = (canaries, int(guesses), found.correct)
            p_values.append(one_run.one_run_p_value(0.0, *counts, delta=delta))
        else:
            worth = (float(np.mean(shown)), -float(np.mean(p_values)))
            best = max(best or (worth, 0), (worth, int(guesses)))
    worth, guesses = best or ((0.0, -1.0), canaries)
    return worth, center, guesses


def bounds(scores, included, guesses, center, delta, confidence):
    """Return the bounds for any mechanism, and for a Gaussian one."""
    made = one_run.guesses_from_scores(scores, included, guesses, center=center)
    counts = (made.canaries, made.guesses, made.correct)
    level = dict(delta=delta, confidence=confidence)
    return one_run.one_run(*counts, **level), one_run.one_run_tradeoff(*counts, **level)


def distance(inside, outside):
    """Return the distance between the means, in standard deviations; 0 for constant scores."""
    if min(len(inside), len(outside)) < 2:
        return 0.0
    freedom = len(inside) + len(outside) - 2
    squares = len(inside) * inside.var() + len(outside) * outside.var()
    return (
        float((inside.mean() - outside.mean()) / math.sqrt(squares / freedom)) if squares else 0.0
    )
