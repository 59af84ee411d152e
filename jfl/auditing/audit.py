"""`jfl.audit`: what an attack measures of a plan, beside what is proved and claimed of it."""

import functools
import math
from collections.abc import Callable
from os import PathLike
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core import checks
from ..core.errors import NotAnalysable
from ..core.records import Guarantee, Plan
from ..engine import devices
from ..engine.sweep import FULL, device_memory
from ..privacy import guarantees
from ..privacy.entry_guarantees import choices, choose, entries_of
from ..privacy.ledger import entries as ledger
from ..privacy.ledger.entry import Entry
from . import canaries, scores, trainings
from .estimators import counts, thresholds, two_samples
from .kept import Kept, question
from .trials import block_size, run_trials

WORST = "worst case"
LEARN = 0.3  # of the trials, that choose the score and its threshold
FEWEST = 100  # runs of each side that choose, at least
MEMORY = 2**30  # bytes for trials at once, on a CPU


class AuditReport(NamedTuple):
    """What was measured, and what it is measured against.

    Attributes:
        epsilon: the lower bound, at `confidence`: the mechanism that ran is not more private.
        delta: the delta at which it is.
        confidence: with which it holds, all choices that were tried included.
        estimator: how it was had.
        canary: what was put in.
        trials: runs of each side.
        proved: the guarantee of the plan; None where nothing is proved.
        claimed: the epsilon that the audit tried to refute; None if none was given.
        adversary: what was seen.
        refuted: whether the claim is refuted.
        contradicted: whether what is proved without a condition is refuted: a bug.
        why_not_proved: where nothing is proved, the reason.
        unit, view, adjacency: whose privacy, against whom.
        mu: the distance of both sides in standard deviations of the outside score, of the runs
            that were judged: an estimate, and the privacy of a Gaussian mechanism.
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

    def __str__(self):
        lines = [verdict(self)]
        lines += [
            f"  unit: {self.unit}, view: {self.view}, adjacency: {self.adjacency}",
            f"  canary: {self.canary}",
            f"  adversary: sees {self.adversary}",
            f"  estimator: {self.estimator}, {self.trials} runs with and {self.trials} without, "
            f"confidence {self.confidence:.4g}",
        ]
        if self.proved is None:
            lines.append(f"  not proved: {self.why_not_proved}")
        if self.mu == 0:
            lines.append("  the canary did not move what is seen")
        if self.epsilon == 0:
            lines.append("  nothing was shown: that is no sign of privacy")
        return "\n".join(lines)


def verdict(report: Any) -> str:
    """The first line of a report: what was audited beside what is proved and claimed."""
    beside = "beside nothing that is proved"
    if report.proved is not None:
        relation = ">" if report.epsilon > report.proved.epsilon else "<="
        of = report.proved
        beside = f"{relation} {of.status} {of.epsilon:.4g} ({of.method})"
    line = f"audited {report.epsilon:.4g} {beside} at delta = {report.delta:.3g}"
    if report.contradicted:
        line += ": CONTRADICTED"
    if report.claimed is not None:
        refuted = "REFUTED" if report.refuted else "not refuted"
        line += f"; claimed {report.claimed:.4g}: {refuted}"
    return line


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
    """Run a plan many times with and without a canary, and say what that refutes.

    The canary goes through the plan's own chains, samplers, weights and server, and all runs are
    one compiled program.  An audit never says that something is private: it refutes a number, or
    does not.

    The canary of the worst case comes near to what is proved: nothing but it moves the release.
    Others are in a training on the plan's rows, and show what an attack finds in such a one.

    Args:
        plan: a Plan with noise; one, what several runs release together is not audited.
        rounds: of each run; what is proved is of so many, too.
        trials: runs of each side.  Three in ten choose the score and its threshold, the others
            judge.
        delta: in (0, 1).  At a small one the test that shows most is rare: 1e-2 shows more with
            1e5 trials than 1e-5 does.
        unit, view, adjacency: as in `jfl.guarantee`.
        canary: "worst case", or in a training "mislabelled" (a row with a wrong label; all rows of
            a client), "blank" (rows of zeros), "direction" (a gradient or an upload far along a
            random direction).
        sees: "releases", of each round; in a training also "models", of each round, and "final
            model": of these the loss of the canary is read.
        confidence: in (0, 1), of the bound that is printed.
        claimed: an epsilon at `delta` that the audit tries to refute, such as one that a paper
            states; None means no claim.
        seed: of all runs.  Each has a key of its own, on either side.
        memory: bytes for runs at once; None: what an accelerator has free, 1 GiB on a CPU.
        mesh: devices that share the runs: None, a number, "auto".  They send no messages, and the
            report is that of one device.  Of a plan that has a mesh of its own each run is the
            plan's own program on all its devices, and only None is taken.
        progress: is called with how many runs are done, and how many there are; first with those
            that `keep` held.
        keep: a file, such as "audit.trials.npz", for what was seen of the runs so far, written
            every few seconds.  The same audit with the same file goes on where it stopped, also
            after a kill, and ends in the same report; one that is done is not run again.

    Privacy:
        What is refuted is the epsilon of the program that ran, on these data, against an adversary
        who knows all other data and sees what the report says.

    Raises:
        ValueError: for a plan without noise, or numbers with which nothing can be shown.
        ResumeRefused: where `keep` is a file of another audit, or of another version of jfl.

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
    checks.require_type(where, Plan, "jfl.plan", plan=plan)
    checks.require_integer(where, rounds=rounds, trials=trials)
    checks.require_integer(where, min_value=0, seed=seed)
    checks.require_fraction(where, single=True, confidence=confidence)
    _can_show(trials, delta, confidence, claimed)
    if devices.devices(mesh) is not None and devices.devices(plan.mesh) is not None:
        checks.fail(
            where,
            "mesh=None for a plan that has a mesh",
            checks.short_repr(mesh),
            "Each run is on the devices of plan.mesh; to share runs, audit the plan without one.",
        )
    checks.require_one_of(where, (WORST, *trainings.CANARIES), canary=canary)
    checks.require_one_of(where, trainings.SEES, sees=sees)
    if canary == WORST and sees != "releases":
        checks.fail(
            where,
            f'sees="releases" for canary="{WORST}"',
            f"sees={sees!r}",
            'In a training models are seen: take canary="direction" or "mislabelled".',
        )
    entry = whose(where, plan, rounds, delta, unit, view, adjacency)
    asked = dict(unit=entry.unit, view=entry.view, adjacency=entry.adjacency)
    proved, why_not = proved_of(plan, rounds, delta, asked)
    if canary == WORST:
        made = canaries.experiment(plan, entry, rounds)
    else:
        made = trainings.experiment(plan, entry, rounds, canary, sees)
    kept = None
    if keep is not None:
        settings = dict(rounds=rounds, trials=trials, seed=seed, sees=sees) | asked
        kept = Kept(keep, question(plan, made[:2], settings), trials)
    seen = _seen(made, rounds, trials, seed, memory, mesh, progress, kept)
    epsilon, estimator, mu = _bound(seen, made.law, delta, confidence)
    return AuditReport(
        epsilon,
        float(delta),
        float(confidence),
        estimator,
        made.canary,
        int(trials),
        proved,
        claimed,
        made.adversary,
        claimed is not None and epsilon > claimed,
        proved is not None and proved.status == "proved" and epsilon > proved.epsilon,
        mu=mu,
        why_not_proved=why_not,
        **asked,
    )


def _can_show(trials, delta, confidence, claimed):
    """Refuse numbers with which no runs could show anything."""
    where = "jfl.audit"
    checks.require_fraction(where, single=True, delta=delta)
    if not 0 < delta < 1:
        checks.fail(where, "delta in (0, 1)", f"delta={delta!r}")
    most = ceiling(trials, delta, confidence)
    if LEARN * trials < FEWEST or not most > 0:
        checks.fail(
            where,
            f"trials enough for confidence={confidence:g} at delta={delta:g}, at least "
            f"{math.ceil(FEWEST / LEARN)}",
            f"trials={trials}, which show nothing even without an error",
            "Raise trials, or lower confidence or delta.",
        )
    if claimed is not None:
        checks.require_nonnegative(where, single=True, claimed=claimed)
        if claimed >= most:
            checks.fail(
                where,
                f"trials that can refute claimed={claimed:g}",
                f"trials={trials}, which show at most {most:.3g} even without an error",
                "Raise trials, or audit fewer rounds, whose epsilon is smaller.",
            )


def ceiling(trials: int, delta: float, confidence: float) -> float:
    """The largest epsilon that so many runs of each side can show: of a test without an error.

    Example:
        >>> round(ceiling(100_000, 1e-2, 0.95), 2)
        9.84
    """
    judged = trials - int(LEARN * trials)
    # one threshold, two rates
    worst = counts.clopper_pearson_upper(0, judged, (1 - confidence) / 2)
    left = 1 - float(worst) - delta
    return math.log(left / float(worst)) if left > worst else 0.0


def whose(where: str, plan: Plan, rounds: int, delta: float, unit, view, adjacency) -> Entry:
    """The entry of the ledger whose privacy is attacked.

    Raises:
        NotAnalysable: for a plan without noise.
    """
    choices(unit, view, adjacency)
    entries = entries_of(plan, rounds, delta)
    if not entries:
        checks.fail(
            where,
            "a plan whose noise protects something",
            "one without noise",
            "Without noise a canary is found for certain: any epsilon is refuted.",
            error=NotAnalysable,
        )
    if view == "personal":
        return ledger.personal(plan, rounds)
    return choose(where, plan, entries, unit, view, adjacency)


def proved_of(plan: Plan, rounds: int, delta: float, asked: dict) -> tuple[Guarantee | None, str]:
    """The guarantee of a plan; where there is none, None and the reason."""
    try:
        return guarantees.guarantee(plan, rounds, delta, **asked), ""
    except NotAnalysable as error:
        return None, str(error)


def _seen(made, rounds, trials, seed, memory, mesh, progress, kept=None):
    """What is seen in all runs, [trials, R, k] of each side."""
    kept = Kept(None, {}, trials) if kept is None else kept
    done = kept.counts()
    if sum(done) and progress is not None:
        progress(sum(done), 2 * trials)
    if sum(done) == 2 * trials:
        return [kept.of(side) for side in range(2)]
    keys = jax.random.split(jax.random.key(seed), (2, trials))
    mesh = devices.devices(mesh)
    count = 1 if mesh is None else mesh.size
    if memory is None:
        memory = device_memory(FULL) or MEMORY
    block = block_size(made.inside, rounds, trials, memory, count)

    def told(side):
        def tell(finished):
            done[side] = finished
            if progress is not None:
                progress(sum(done), 2 * trials)

        return tell

    return [
        run_trials(
            keys[side],
            plan,
            rounds,
            block,
            mesh,
            told(side),
            kept.of(side),
            functools.partial(kept.add, side),
        )
        for side, plan in enumerate((made.inside, made.outside))
    ]


def _bound(seen, law, delta, confidence):
    """The lower bound of runs that no choice has seen, how it was had, and their distance."""
    first = int(LEARN * len(seen[0]))
    learn, judge = ([side[:first] for side in seen], [side[first:] for side in seen])
    tried = []
    first_in, first_out = learn
    for score in scores.learn(first_in, first_out, law):
        threshold, shown = _threshold(score.of(first_in), score.of(first_out), delta, confidence)
        tried.append((shown, score, threshold))
    _, score, threshold = max(tried, key=lambda one: one[0])
    inside, outside = (score.of(side) for side in judge)
    found = two_samples.lower_bound(
        inside,
        outside,
        delta=delta,
        confidence=confidence,
        thresholds=thresholds.Explicit(threshold),
    )
    deviation = outside.std()
    apart = inside.mean() - outside.mean()
    mu = float(apart / deviation) if deviation > 0 else math.copysign(math.inf, apart)
    mu = mu if apart else 0.0
    words = f"Clopper-Pearson of a {score.name}, chosen on {first} other runs of each side"
    return float(found.epsilon), words, mu


def _threshold(inside, outside, delta, confidence):
    """The threshold that shows most of these scores, and what it shows: candidates at even ranks of
    both sides together, finer towards the ends."""
    inside, outside = np.sort(inside), np.sort(outside)
    together = np.sort(np.concatenate([inside, outside]))
    tail = np.geomspace(1e-4, 0.5, 60)
    candidates = np.unique(np.quantile(together, np.concatenate([tail, 1 - tail])))
    below, above = np.searchsorted(inside, candidates), np.searchsorted(outside, candidates)
    upper = lambda count, of: counts.clopper_pearson_upper(count, len(of), (1 - confidence) / 2)
    missed, alarms = upper(below, inside), upper(len(outside) - above, outside)
    gain = lambda kept, wrong: np.log(np.maximum(kept - delta, 1e-300)) - np.log(wrong)
    shown = np.maximum(gain(1 - missed, alarms), gain(1 - alarms, missed))
    best = int(np.argmax(shown))
    return float(candidates[best]), float(shown[best])
