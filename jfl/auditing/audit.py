"""Attacks on a plan that bound its epsilon from below: `jfl.audit` and `jfl.audit_one_run`."""

import math
from collections.abc import Callable
from os import PathLike
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core import checks
from ..core.errors import NotAnalysable
from ..core.records import CAVEATS_PAGE, Guarantee, Plan, first_sentence
from ..engine import devices
from ..privacy import guarantees
from ..privacy.accountants import rdp
from ..privacy.guarantees import choose
from ..privacy.ledger import entries as ledger
from ..privacy.ledger.entry import Entry
from . import canaries as worst_case
from . import scores, trainings
from .estimators import one_run, thresholds, two_samples
from .trials import open_store, run_trials, watch_once

WORST = "worst case"
MIN_LEARNING_TRIALS = 100  # minimum number of those trials, for each side


class AuditReport(NamedTuple):
    """What an attack measured, and the proved and claimed values to compare it with.

    Attributes:
        epsilon: the lower bound, which holds at `confidence`: the program that ran has at least
            this epsilon.
        delta: the delta of the bound.
        confidence: the probability with which the bound holds; the choice of score and threshold
            is accounted for.
        estimator: how the bound was computed.
        canary: what was inserted.
        trials: the number of runs of each side; 1 for `jfl.audit_one_run`.
        proved: the guarantee of the plan; None if nothing is proved.
        claimed: the epsilon to refute; None if none was given.
        adversary: what the attack observes.
        refuted: whether the claim is refuted.
        contradicted: whether the unconditional guarantee is refuted, which is a bug.
        unit, view, adjacency: whose privacy, against which observer.
        mu: the mean score with the canary minus the mean score without it, in standard deviations.
            For a Gaussian mechanism it estimates the mu of mu-GDP.
        why_not_proved: if nothing is proved, the reason.
        canaries: the number of canaries of `jfl.audit_one_run`.  For `jfl.audit`, this field and
            all following ones are None.
        learning_runs: the number of runs that chose the score and the number of guesses.
        guesses: the number of canaries about which the attack guessed.
        correct: the number of correct guesses.
        gaussian: the lower bound on epsilon from the same guesses if the mechanism is Gaussian
            without sampling; for any other mechanism, an estimate.
        estimate: the epsilon of a Gaussian mechanism at the distance `mu`, without a guarantee.
        auroc: the probability that an included canary has a higher score than an excluded one.
    """

    epsilon: float
    delta: float
    confidence: float
    estimator: str
    canary: str
    trials: int
    proved: Guarantee | None
    claimed: float | None
    adversary: str
    refuted: bool
    contradicted: bool
    unit: str
    view: str
    adjacency: str
    mu: float
    why_not_proved: str = ""
    canaries: int | None = None
    learning_runs: int | None = None
    guesses: int | None = None
    correct: int | None = None
    gaussian: float | None = None
    estimate: float | None = None
    auroc: float | None = None

    def __str__(self):
        compared = "with nothing proved"
        if (proved := self.proved) is not None:
            relation = ">" if self.epsilon > proved.epsilon else "<="
            compared = f"{relation} {proved.status} {proved.epsilon:.4g} ({proved.method})"
        verdict = f"audited {self.epsilon:.4g} {compared} at delta = {self.delta:.3g}"
        if self.contradicted:
            verdict += ": CONTRADICTED"
        elif proved is not None and self.epsilon > proved.epsilon:
            verdict += ": CONDITION REFUTED"
        if self.claimed is not None:
            refuted = "REFUTED" if self.refuted else "not refuted"
            verdict += f"; claimed {self.claimed:.4g}: {refuted}"
        one_run = self.canaries is not None
        included = f"{self.canaries}, each included by a coin flip: " if one_run else ""
        shown = f"estimator: {self.estimator}, {self.trials} runs with and {self.trials} without, "
        if one_run:
            shown = (
                f"estimator: {self.correct} of {self.guesses} guesses right ({self.estimator}), "
            )
        lines = [
            verdict,
            f"unit: {self.unit}, view: {self.view}, adjacency: {self.adjacency}",
            f"{'canaries' if one_run else 'canary'}: {included}{self.canary}",
            f"adversary: sees {self.adversary}",
            f"{shown}confidence {self.confidence:.4g}",
        ]
        if one_run:
            lines[-1] += f"; AUROC {self.auroc:.3f}"
            lines += [
                f"score and number of guesses: chosen on {self.learning_runs} other runs",
                f"for a Gaussian mechanism without sampling: {self.gaussian:.4g}",
                f"estimate from the distance of the scores, {self.mu:.3g} standard deviations: "
                f"{self.estimate:.4g}",
            ]
        if proved is None:
            lines.append(f"not proved: {self.why_not_proved}")
        elif proved.caveats:
            name = f"caveat of the {proved.status} epsilon"
            lines += [f"{name}: {first_sentence(c)}" for c in dict.fromkeys(proved.caveats)]
            lines.append(f"in full: .proved.caveats; explained: {CAVEATS_PAGE}")
        if self.mu == 0 and not one_run:
            lines.append("the canary had no effect on the observations")
        if self.epsilon == 0:
            lines.append("nothing was shown: that is no sign of privacy")
        return "\n  ".join(lines)


def audit(
    plan: Plan,
    rounds: int,
    trials: int = 100_000,
    delta: float = 1e-2,
    *,
    unit: str | None = None,
    view: str | None = None,
    adjacency: str | None = None,
    canary: str = WORST,
    sees: str = "releases",
    confidence: float = 0.95,
    claimed: float | None = None,
    seed: int = 0,
    memory: float | None = None,
    mesh: Any = None,
    progress: Callable[[int, int], None] | None = None,
    keep: str | PathLike | None = None,
) -> AuditReport:
    """Run a plan many times with and without a canary, and bound its epsilon from below.

    The canary goes through the plan's own chains, samplers, weights and server, and all runs are
    one compiled program.  An audit never shows that something is private: it refutes a number, or
    it does not.

    The worst-case canary comes close to the proved epsilon, because nothing else changes the
    release.  The other canaries are part of a training on the plan's rows, and show what an attack
    finds in such a training.

    Args:
        plan: one Plan with noise.  Several plans that are released together are not audited.
        rounds: the number of rounds of each run, and of the proved guarantee.
        trials: the number of runs with the canary, and of runs without it.  Three in ten choose the
            score and its threshold, and the others give the bound.
        delta: in (0, 1).  At a small delta, the events that show a violation are rare: with 1e5
            trials, a delta of 1e-2 shows more than 1e-5.
        unit, view, adjacency: as in `jfl.guarantee`.
        canary: "worst case"; or, in a training, "mislabelled" (a row with a wrong label, or all
            rows of a client), "blank" (rows of zeros), "direction" (a gradient or an upload of
            large norm in a random direction).
        sees: what the attack observes: "releases" of each round; in a training also "models" of
            each round, or the "final model", of which it computes the loss of the canary.
        confidence: in (0, 1), of the bound.
        claimed: an epsilon at `delta` to refute, such as one that a paper states; None means no
            claim.
        seed: the seed of all runs.  Each run has its own key.
        memory: bytes for runs at once; None means the free memory of an accelerator, or 1 GiB on
            a CPU.
        mesh: devices that share the runs: None, a number or "auto".  They do not communicate, and
            the report equals that of one device.  If the plan has a mesh, each run uses it, and
            only None is accepted.
        progress: is called with the number of finished runs and the number of all runs; first with
            those that `keep` held.
        keep: a file, such as "audit.trials.jsonl", to which the observations of finished runs are
            added.  The same audit with the same file continues after a kill and returns the same
            report; a finished one is not run again.

    Privacy:
        The report refutes the epsilon of the program that ran, on these data, against an adversary
        who knows all other data and observes what the report says.

    Raises:
        ValueError: For a plan without noise, or for numbers with which no attack can show an
            epsilon above 0.
        ResumeRefused: If `keep` belongs to another audit, or to another version of jfl.

    References:
        Jagielski, Ullman, Oprea, NeurIPS 2020; Nasr et al., IEEE S&P 2021 (Dirac canaries);
        Andrew et al., ICLR 2024 (random directions).

    Example:
        >>> import jfl
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(5))
        >>> task = jfl.models.logistic(fed)
        >>> noise = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(5))
        >>> fedavg = jfl.algorithms.fedavg(jfl.grad(task.loss))
        >>> plan = jfl.plan(fed, task, fedavg, jfl.sampling.full(5), release=noise)
        >>> report = jfl.audit(plan, rounds=1, trials=2_000, delta=1e-2)
        >>> 1 < report.epsilon < report.proved.epsilon
        True
    """
    where = "jfl.audit"
    checks.require_one_of(where, (WORST, *trainings.CANARIES), canary=canary)
    _check(where, plan, rounds, seed, sees, delta, confidence)
    fewest = math.ceil(MIN_LEARNING_TRIALS / scores.LEARN_FRACTION)
    hint = f"{scores.LEARN_FRACTION:.0%} of the trials choose the score."
    checks.require_integer(where, hint, min_value=fewest, trials=trials)
    most = ceiling(trials, delta, confidence)
    _check_shown(where, most, f"trials={trials}", claimed, "Raise trials, or audit fewer rounds.")
    if devices.devices(mesh) is not None and devices.devices(plan.mesh) is not None:
        expected, got = "mesh=None for a plan that has a mesh", checks.short_repr(mesh)
        hint = "Each run uses plan.mesh; to share runs among devices, audit the plan without it."
        checks.fail(where, expected, got, hint)
    if canary == WORST and sees != "releases":
        expected, hint = f'sees="releases" for canary="{WORST}"', 'Use canary="direction".'
        checks.fail(where, expected, f"sees={sees!r}", hint)
    entry = _attacked_entry(where, plan, rounds, unit, view, adjacency)
    if canary == WORST:
        made = worst_case.experiment(plan, entry, rounds)
    else:
        made = trainings.experiment(plan, entry, rounds, canary, sees)
    store = None
    if keep is not None:
        asked = dict(rounds=rounds, trials=trials, seed=seed, sees=sees, **_whose(entry))
        store = open_store(keep, plan, made, asked)
    seen = run_trials(made, rounds, trials, seed, memory, mesh, progress, store)
    epsilon, estimator, mu = scores.bound(seen, made.copies, delta, confidence)
    measured = dict(estimator=estimator, trials=int(trials), mu=mu)
    return _report(plan, entry, rounds, epsilon, delta, confidence, claimed, made, **measured)


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
) -> AuditReport:
    """Train once with many canaries, each included by a coin flip, and guess the coins.

    Use it for plans that are too large to run a thousand times.  Each guess reveals little, so the
    bound is far below that of `jfl.audit`; even with thousands of canaries it is about half of it.
    A few learning runs with separate coins choose the score and the number of guesses; their
    guesses do not enter the bound.

    Args:
        plan: a Plan with noise, whose rows are on the device.  The canaries replace some of its
            rows or clients.
        rounds: the number of rounds of each run, and of the proved guarantee.
        canaries: the number of canaries.  For the view of the server they are rows of one client.
        delta: in (0, 1).
        unit, view, adjacency: as in `jfl.guarantee`.
        canary: "direction", "mislabelled" or "blank": see `jfl.audit`.
        sees: "releases", "models" or "final model": see `jfl.audit`.
        confidence: in (0, 1), of the bound.
        claimed: an epsilon at `delta` to refute; None means no claim.
        learning_runs: 1, or an even number >= 4.  Several runs also estimate what is observed of
            each canary regardless of its coin.  Subtracting that helps if the model learns much in
            each round.
        seed: the seed of the runs and of the coins.

    Privacy:
        The bound holds for the canaries in this plan: a training in which a tenth of the clients
        are canaries differs from one without canaries.

    Raises:
        NotAnalysable: For a plan without noise, or one in which no such canary can be placed.
        ValueError: For numbers with which no attack can show an epsilon above 0.

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
    checks.require_integer(where, min_value=10, canaries=canaries)
    checks.require_integer(where, learning_runs=learning_runs)
    checks.require_one_of(where, trainings.CANARIES, canary=canary)
    _check(where, plan, rounds, seed, sees, delta, confidence)
    if learning_runs != 1 and (learning_runs < 4 or learning_runs % 2):
        expected, got = "learning_runs=1, or an even number >= 4", f"learning_runs={learning_runs}"
        checks.fail(where, expected, got, "Learning runs come in pairs with opposite coins.")
    level = dict(delta=delta, confidence=confidence)
    most = one_run.one_run(canaries, canaries, canaries, **level).epsilon
    _check_shown(where, most, f"canaries={canaries}", claimed, "Use more canaries.")
    entry = _attacked_entry(where, plan, rounds, unit, view, adjacency)
    made = trainings.training(plan, entry, rounds, canary, sees, canaries)
    draw = np.random.default_rng([seed, 1])
    coins = scores.learning_coins(draw, learning_runs, canaries)
    judged = draw.random(canaries) < 0.5
    keys = jax.random.split(jax.random.key(seed), learning_runs + 1)
    *learning, judging = (
        watch_once(key, trainings.with_coins(made, rounds, included), rounds)
        for key, included in zip(keys, [*coins, judged], strict=True)
    )
    chosen = scores.choose_score(np.stack(learning), coins, **level)
    values = chosen.score(judging)
    found, gaussian = scores.one_run_bounds(values, judged, chosen.guesses, chosen.center, **level)
    inside, outside = values[judged], values[~judged]
    mu = scores.distance(inside, outside)
    measured = dict(
        estimator="Steinke, Nasr, Jagielski",
        trials=1,
        mu=mu,
        canaries=canaries,
        learning_runs=learning_runs,
        guesses=found.guesses,
        correct=found.correct,
        gaussian=gaussian.epsilon,
        estimate=float(rdp.gaussian_epsilon(mu, delta)) if mu > 0 else 0.0,
        auroc=two_samples.auroc(inside, outside) if len(inside) and len(outside) else math.nan,
    )
    return _report(plan, entry, rounds, found.epsilon, delta, confidence, claimed, made, **measured)


def ceiling(trials: int, delta: float, confidence: float) -> float:
    """Return the largest epsilon that `jfl.audit` can show: that of a test without errors.

    Args:
        trials: the number of runs with the canary, and of runs without it.
        delta, confidence: as in `jfl.audit`.

    Example:
        >>> round(ceiling(100_000, 1e-2, 0.95), 2)
        9.84
    """
    judged = trials - int(scores.LEARN_FRACTION * trials)
    # One threshold has two error rates, so each bound gets half of 1 - confidence.
    rate = float(thresholds.clopper_pearson_upper(0, judged, (1 - confidence) / 2))
    left = 1 - rate - delta
    return math.log(left / rate) if left > rate else 0.0


def _attacked_entry(where: str, plan: Plan, rounds: int, unit, view, adjacency) -> Entry:
    """Return the ledger entry whose privacy is attacked.

    Raises:
        NotAnalysable: For a plan without noise.
    """
    entries = ledger.entries(plan, rounds)
    if not entries:
        checks.fail(
            where,
            "a plan whose noise protects something",
            "one without noise",
            "Without noise a canary is always found: any epsilon is refuted.",
            error=NotAnalysable,
        )
    if view == "personal":
        return ledger.personal(plan, rounds)
    return choose(where, plan, entries, unit, view, adjacency, rounds)


def _check(where, plan, rounds, seed, sees, delta, confidence):
    """Reject arguments that both audits take."""
    checks.require_type(where, Plan, "jfl.plan", plan=plan)
    checks.require_integer(where, rounds=rounds)
    checks.require_integer(where, min_value=0, seed=seed)
    checks.require_one_of(where, trainings.SEES, sees=sees)
    thresholds.check_levels(where, delta, confidence, zero=False)


def _check_shown(where, most, numbers, claimed, hint):
    """Reject numbers with which no attack could show anything, or refute the claim."""
    if not most > 0:
        expected = "enough trials for this confidence and delta"
        checks.fail(where, expected, f"{numbers}, which show nothing without an error", hint)
    if claimed is not None:
        checks.require_nonnegative(where, single=True, claimed=claimed)
        if claimed >= most:
            got = f"{numbers}, which show at most {most:.3g} without an error"
            checks.fail(where, f"numbers that can refute claimed={claimed:g}", got, hint)


def _whose(entry: Entry) -> dict:
    """Return the unit, view and adjacency of an entry."""
    return dict(unit=entry.unit, view=entry.view, adjacency=entry.adjacency)


def _report(plan, entry, rounds, epsilon, delta, confidence, claimed, made, **measured):
    """Return the report of a bound, next to the guarantee of the plan if there is one."""
    proved, why_not = None, ""
    try:
        proved = guarantees.guarantee(plan, rounds, delta, **_whose(entry))
    except NotAnalysable as error:
        why_not = str(error)
    return AuditReport(
        epsilon=epsilon,
        delta=float(delta),
        confidence=float(confidence),
        canary=made.canary,
        adversary=made.adversary,
        proved=proved,
        claimed=claimed,
        refuted=claimed is not None and epsilon > claimed,
        contradicted=proved is not None and proved.status == "proved" and epsilon > proved.epsilon,
        why_not_proved=why_not,
        **_whose(entry),
        **measured,
    )
