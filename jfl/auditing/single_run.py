"""`jfl.audit_one_run`: what one training with many canaries shows of its epsilon."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from ..core import checks
from ..core.errors import ArgumentError
from ..core.records import Guarantee, Plan
from ..privacy.accountants import rdp
from . import audit, scores, trainings
from .estimators import levels, one_run, two_samples
from .trials import refuse_not_finite, watch

NUMBERS = 8  # of guesses that are tried on the runs that choose


class OneRunReport(NamedTuple):
    """What one run with many canaries shows, and what it is measured against.

    Attributes:
        epsilon: the lower bound, at `confidence`, whatever the mechanism is.
        delta: the delta at which it is.
        confidence: with which it holds.
        canary: what was put in.
        canaries: how many, each in or out by a coin of its own.
        learning_runs: how many runs chose the score and the number of guesses.
        guesses, correct: about how many of them it was guessed, and how many guesses are right.
        gaussian: what the same guesses show of a Gaussian mechanism without sampling; an estimate
            for any other.
        mu: the distance of both sides in standard deviations of the score.
        estimate: the epsilon of a Gaussian mechanism at that distance, without a guarantee.
        auroc: how often a canary that is in has a higher score than one that is out.
        proved: the guarantee of the plan; None where nothing is proved.
        claimed: the epsilon that the audit tried to refute; None if none was given.
        adversary: what was seen.
        refuted: whether the claim is refuted.
        contradicted: whether what is proved without a condition is refuted: a bug.
        unit, view, adjacency: whose privacy, against whom.
        why_not_proved: where nothing is proved, the reason.
    """

    epsilon: float
    delta: float
    confidence: float
    canary: str
    canaries: int
    learning_runs: int
    guesses: int
    correct: int
    gaussian: float
    mu: float
    estimate: float
    auroc: float
    proved: Guarantee | None
    claimed: float | None
    adversary: str
    refuted: bool
    contradicted: bool
    unit: str
    view: str
    adjacency: str
    why_not_proved: str = ""

    def __str__(self):
        lines = [audit.verdict(self)]
        lines += [
            f"  unit: {self.unit}, view: {self.view}, adjacency: {self.adjacency}",
            f"  canaries: {self.canaries}, each in or out by a coin: {self.canary}",
            f"  adversary: sees {self.adversary}",
            f"  estimator: {self.correct} of {self.guesses} guesses right (Steinke, Nasr, "
            f"Jagielski), confidence {self.confidence:.4g}; AUROC {self.auroc:.3f}",
            f"  score and number of guesses: chosen on other runs, {self.learning_runs}",
            f"  if it were a Gaussian mechanism without sampling: {self.gaussian:.4g}",
            f"  estimate by the distance of the scores, {self.mu:.3g} deviations: "
            f"{self.estimate:.4g}",
        ]
        if self.proved is None:
            lines.append(f"  not proved: {self.why_not_proved}")
        if self.epsilon == 0:
            lines.append("  nothing was shown: that is no sign of privacy")
        return "\n".join(lines)


def audit_one_run(
    plan: Plan,
    rounds: int,
    canaries: int = 100,
    delta: float = 1e-5,
    *,
    unit: str | None = None,
    view: str | None = None,
    adjacency: str | None = None,
    canary: str = "direction",
    sees: str = "releases",
    confidence: float = 0.95,
    claimed: float | None = None,
    learning_runs: int = 4,
    seed: int = 0,
) -> OneRunReport:
    """Train once with many canaries, each in or out by a coin, and guess the coins.

    For plans that are too large to run a thousand times.  It shows far less than `jfl.audit` could,
    since each guess says little: with thousands of canaries about half.  Other runs, with coins of
    their own, choose the score and the number of guesses; they judge nothing.

    Args:
        plan: a Plan with noise, whose rows are on the device.  Canaries take the place of its own
            rows, or clients.
        rounds: of each run; what is proved is of so many, too.
        canaries: how many.  Of the view of the server they are rows of one client.
        delta: in (0, 1).
        unit, view, adjacency: as in `jfl.guarantee`.
        canary: "direction", "mislabelled" or "blank": see `jfl.audit`.
        sees: "releases", "models" or "final model": see `jfl.audit`.
        confidence: in (0, 1), of the bound.
        learning_runs: 1, or an even number from 4 on.  Several also say what is seen of each canary
            anyway, by what the others do: taken away, a canary of a model that learns much in each
            round stands out more.
        claimed: an epsilon at `delta` that the audit tries to refute; None means no claim.
        seed: of the runs and of the coins.

    Privacy:
        the bound holds for the canaries' own privacy in this plan: a tenth of the clients as
        canaries is another training than one without.

    Raises:
        NotAnalysable: for a plan without noise, or one in which no such canary can be put.
        ValueError: for numbers with which nothing can be shown.

    References:
        Steinke, Nasr, Jagielski, NeurIPS 2023; Mahloujifar, Melis, Chaudhuri, ICML 2025; Andrew et
        al., ICLR 2024 (random directions).

    Example:
        >>> import jfl
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(40))
        >>> task = jfl.models.logistic(fed)
        >>> noise = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(0.5), jfl.divide(40))
        >>> fedavg = jfl.algorithms.fedavg(jfl.grad(task.loss))
        >>> plan = jfl.plan(fed, task, fedavg, jfl.sampling.full(40), release=noise)
        >>> report = jfl.audit_one_run(plan, rounds=4, canaries=40)
        >>> report.canaries, report.epsilon < report.proved.epsilon
        (40, True)
    """
    where = "jfl.audit_one_run"
    checks.require_type(where, Plan, "jfl.plan", plan=plan)
    checks.require_integer(where, rounds=rounds)
    checks.require_integer(where, min_value=10, canaries=canaries)
    checks.require_integer(where, min_value=0, seed=seed)
    checks.require_integer(where, learning_runs=learning_runs)
    if learning_runs != 1 and (learning_runs < 4 or learning_runs % 2):
        checks.fail(
            where,
            "learning_runs=1, or an even number from 4 on",
            f"learning_runs={learning_runs}",
            "They come in pairs of opposite coins, and each pair is measured by the others.",
        )
    levels.check_delta(where, delta)
    levels.check_confidence(where, confidence)
    checks.require_one_of(where, trainings.CANARIES, canary=canary)
    checks.require_one_of(where, trainings.SEES, sees=sees)
    if claimed is not None:
        checks.require_nonnegative(where, single=True, claimed=claimed)
    most = one_run.one_run(canaries, canaries, canaries, delta=delta, confidence=confidence).epsilon
    if claimed is not None and claimed >= most:
        checks.fail(
            where,
            f"canaries that can refute claimed={claimed:g}",
            f"canaries={canaries}, which show at most {most:.3g} if every guess is right",
            "Take more canaries, or a smaller delta.",
        )
    entry = audit.whose(where, plan, rounds, delta, unit, view, adjacency)
    asked = dict(unit=entry.unit, view=entry.view, adjacency=entry.adjacency)
    proved, why_not = audit.proved_of(plan, rounds, delta, asked)
    made, _ = trainings.training(plan, entry, rounds, canary, sees, canaries)
    draw = np.random.default_rng([seed, 1])
    coins = _learning_coins(draw, learning_runs, canaries)
    judged = draw.random(canaries) < 0.5
    keys = jax.random.split(jax.random.key(seed), learning_runs + 1)
    *learn, judge = (
        _seen(key, trainings.with_coins(made, rounds, inside), rounds)
        for key, inside in zip(keys, [*coins, judged], strict=True)
    )
    level = dict(delta=delta, confidence=confidence)
    chosen = _learn(np.stack(learn), coins, **level)
    values = chosen.score(judge)
    found, of_gaussian = _bounds(values, judged, chosen.guesses, chosen.center, **level)
    inside, outside = values[judged], values[~judged]
    mu = _distance(inside, outside)
    return OneRunReport(
        found.epsilon,
        float(delta),
        float(confidence),
        made.words,
        canaries,
        learning_runs,
        found.guesses,
        found.correct,
        of_gaussian.epsilon,
        mu,
        float(rdp.gaussian_epsilon(mu, delta)) if mu > 0 else 0.0,
        two_samples.auroc(inside, outside) if len(inside) and len(outside) else math.nan,
        proved,
        claimed,
        made.adversary,
        claimed is not None and found.epsilon > claimed,
        proved is not None and proved.status == "proved" and found.epsilon > proved.epsilon,
        why_not_proved=why_not,
        **asked,
    )


@functools.partial(jax.jit, static_argnums=2)
def _run(key, plan, rounds):
    return watch(key, plan, rounds)


def _seen(key, plan, rounds):
    """What is seen of each canary in one run, Float32[m, R, k]."""
    seen, bad = _run(key, plan, rounds)
    if bad:
        refuse_not_finite(1, 1)
    return np.asarray(seen).swapaxes(0, 1)


class _Chosen(NamedTuple):
    """How the run that is judged is read."""

    worth: tuple  # of the runs that chose it: mean epsilon, and minus the mean p-value
    center: float  # between the scores of both sides
    guesses: int
    score: Callable  # Float[m, R, k] -> Float[m]


def _learning_coins(draw, runs, canaries):
    """Bool[runs, m]: half of the canaries are in, of each two runs each canary in one."""
    halves = [draw.permutation(canaries) % 2 == 0 for _ in range(max(runs // 2, 1))]
    return np.stack([side for half in halves for side in (half, ~half)])[:runs]


def _learn(seen, coins, delta, confidence):
    """The score, with or without what is seen of a canary anyway, that shows more; what is seen of
    the learning runs is Float[n, m, R, k]."""
    tried = []
    for anyway in [False, True] if len(seen) > 1 else [False]:
        left = seen - _by_others(seen) if anyway else seen
        score, *_ = scores.learn(left[coins], left[~coins], None)
        values = np.stack([score.of(run) for run in left])
        known = seen.mean(0) if anyway else 0.0
        of = lambda run, score=score, known=known: score.of(run - known)
        tried.append(_Chosen(*_choice(values, coins, delta, confidence), of))
    return max(tried, key=lambda chosen: chosen.worth)


def _by_others(seen):
    """What is seen of each canary in or out alike, by the pairs of runs that a run is not of."""
    pairs = seen.reshape(-1, 2, *seen.shape[1:]).mean(1)
    others = (pairs.sum(0) - pairs) / (len(pairs) - 1)
    return np.repeat(others, 2, axis=0)


def _choice(scores, included, delta, confidence):
    """What the best number of guesses is worth, the center between both sides, and that number:
    scores Float[n, m] of n runs, where none shows anything by the smallest p-value."""
    center = float(scores[included].mean() + scores[~included].mean()) / 2
    canaries, best = scores.shape[1], None
    for guesses in np.unique(np.linspace(0, canaries, NUMBERS + 1).astype(int))[1:]:
        shown, p_values = [], []
        for values, inside in zip(scores, included, strict=True):
            try:
                found, _ = _bounds(values, inside, int(guesses), center, delta, confidence)
            except ArgumentError:  # so few guesses show nothing
                break
            shown.append(found.epsilon)
            counts = (canaries, int(guesses), found.correct)
            p_values.append(one_run.one_run_p_value(0.0, *counts, delta=delta))
        else:
            worth = (float(np.mean(shown)), -float(np.mean(p_values)))
            best = max(best or (worth, 0), (worth, int(guesses)))
    worth, guesses = best or ((0.0, -1.0), canaries)
    return worth, center, guesses


def _bounds(scores, included, guesses, center, delta, confidence):
    """Of any mechanism, and of a Gaussian one."""
    made = one_run.guesses_about(scores, included, guesses, center)
    counts = (made.canaries, made.guesses, made.correct)
    level = dict(delta=delta, confidence=confidence)
    return one_run.one_run(*counts, **level), one_run.one_run_tradeoff(*counts, **level)


def _distance(inside, outside):
    """Between the means, in deviations; 0 where the scores do not vary."""
    if min(len(inside), len(outside)) < 2:
        return 0.0
    freedom = len(inside) + len(outside) - 2
    squares = len(inside) * inside.var() + len(outside) * outside.var()
    return (
        float((inside.mean() - outside.mean()) / math.sqrt(squares / freedom)) if squares else 0.0
    )
