"""Attacks on a plan that give a lower bound of its epsilon: `jfl.audit` and `jfl.audit_one_run`."""

import base64
import functools
import importlib.metadata
import math
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core import checks, files, identity
from ..core.errors import ArgumentError, NotAnalysable, ResumeRefused
from ..core.files import ResultStore
from ..core.records import Guarantee, Plan
from ..engine import devices
from ..engine.sweep import FULL, device_memory
from ..gradients.per_example import Grad
from ..privacy import guarantees
from ..privacy.accountants import rdp
from ..privacy.guarantees import choose, entries_of
from ..privacy.ledger import entries as ledger
from ..privacy.ledger.entry import Entry
from . import canaries as worst_case
from . import one_run_scores, scores, trainings
from .estimators import counts, one_run, thresholds, two_samples
from .trials import block_size, refuse_not_finite, run_blocks, watch

WORST = "worst case"
LEARN_FRACTION = 0.3  # of the trials, which choose the score and its threshold
MIN_LEARNING_TRIALS = 100  # of each side
CPU_MEMORY = 2**30  # bytes for the trials that run at once on a CPU


class AuditReport(NamedTuple):
    """What an attack measured, and the proved and claimed values to compare it with.

    Attributes:
        epsilon: the lower bound, which holds at `confidence`: the program that ran is not more
            private.
        delta: the delta of the bound.
        confidence: the probability with which the bound holds, including all choices made.
        estimator: how the bound was computed.
        canary: what was inserted.
        trials: the number of runs of each side; 1 for `jfl.audit_one_run`.
        proved: the guarantee of the plan; None if nothing is proved.
        claimed: the epsilon to refute; None if none was given.
        adversary: what the attack observes.
        refuted: whether the claim is refuted.
        contradicted: whether the unconditional guarantee is refuted, which is a bug.
        unit, view, adjacency: whose privacy, against which observer.
        mu: the distance between the mean scores with and without the canary, in standard
            deviations: an estimate, and for a Gaussian mechanism its privacy.
        why_not_proved: if nothing is proved, the reason.
        canaries: of one run, the number of canaries; None for `jfl.audit`, as all that follows.
        learning_runs: the number of runs that chose the score and the number of guesses.
        guesses: the number of canaries about which the attack guessed.
        correct: the number of correct guesses.
        gaussian: what the same guesses show of a Gaussian mechanism without sampling; an estimate
            for any other mechanism.
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
        lines = [
            _verdict(self),
            f"  unit: {self.unit}, view: {self.view}, adjacency: {self.adjacency}",
        ]
        if self.canaries is None:
            lines += [
                f"  canary: {self.canary}",
                f"  adversary: sees {self.adversary}",
                f"  estimator: {self.estimator}, {self.trials} runs with and {self.trials} "
                f"without, confidence {self.confidence:.4g}",
            ]
        else:
            lines += [
                f"  canaries: {self.canaries}, each included by a coin flip: {self.canary}",
                f"  adversary: sees {self.adversary}",
                f"  estimator: {self.correct} of {self.guesses} guesses right ({self.estimator}), "
                f"confidence {self.confidence:.4g}; AUROC {self.auroc:.3f}",
                f"  score and number of guesses: chosen on {self.learning_runs} other runs",
                f"  for a Gaussian mechanism without sampling: {self.gaussian:.4g}",
                f"  estimate from the distance of the scores, {self.mu:.3g} standard deviations: "
                f"{self.estimate:.4g}",
            ]
        if self.proved is None:
            lines.append(f"  not proved: {self.why_not_proved}")
        if self.mu == 0 and self.canaries is None:
            lines.append("  the canary had no effect on the observations")
        if self.epsilon == 0:
            lines.append("  nothing was shown: that is no sign of privacy")
        return "\n".join(lines)


def _verdict(report: AuditReport) -> str:
    """Return the first line of a report: the audited value next to the proved and claimed ones."""
    beside = "with nothing proved"
    if (proved := report.proved) is not None:
        relation = ">" if report.epsilon > proved.epsilon else "<="
        beside = f"{relation} {proved.status} {proved.epsilon:.4g} ({proved.method})"
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
    """Run a plan many times with and without a canary, and bound its epsilon from below.

    The canary goes through the plan's own chains, samplers, weights and server, and all runs are
    one compiled program.  An audit never shows that something is private: it refutes a number, or
    it does not.

    The worst-case canary comes close to the proved epsilon, because nothing else moves the
    release.  The other canaries are part of a training on the plan's rows, and show what an attack
    finds in such a training.

    Args:
        plan: one Plan with noise.  Several plans that are released together are not audited.
        rounds: the number of rounds of each run, and of the proved guarantee.
        trials: the number of runs of each side.  Three in ten choose the score and its threshold,
            and the others are judged.
        delta: in (0, 1).  The test that shows most is rare at a small delta: with 1e5 trials, 1e-2
            shows more than 1e-5.
        unit, view, adjacency: as in `jfl.guarantee`.
        canary: "worst case"; or, in a training, "mislabelled" (a row with a wrong label, or all
            rows of a client), "blank" (rows of zeros), "direction" (a gradient or an upload far
            along a random direction).
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
        ValueError: For a plan without noise, or for numbers that cannot show anything.
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
    _check_common(where, plan, rounds, seed, claimed)
    checks.require_integer(where, trials=trials)
    checks.require_fraction(where, single=True, confidence=confidence)
    _check_trials(trials, delta, confidence, claimed)
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
            'Models are observed in a training: use canary="direction" or "mislabelled".',
        )
    entry = attacked_entry(where, plan, rounds, delta, unit, view, adjacency)
    if canary == WORST:
        made = worst_case.experiment(plan, entry, rounds)
    else:
        made = trainings.experiment(plan, entry, rounds, canary, sees)
    store = None
    if keep is not None:
        question = dict(rounds=rounds, trials=trials, seed=seed, sees=sees, **_whose(entry))
        store = _open_store(keep, _question(plan, made[:2], question))
    seen = _observe(made, rounds, trials, seed, memory, mesh, progress, store)
    epsilon, estimator, mu = _bound(seen, made.law, delta, confidence)
    return _report(
        plan,
        entry,
        rounds,
        epsilon,
        delta,
        claimed,
        confidence=float(confidence),
        estimator=estimator,
        canary=made.canary,
        trials=int(trials),
        adversary=made.adversary,
        mu=mu,
    )


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

    Use it for plans that are too large to run a thousand times.  It shows far less than
    `jfl.audit`, since each guess reveals little: with thousands of canaries, about half.  Other
    runs with separate coins choose the score and the number of guesses; they are not judged.

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
        ValueError: For numbers that cannot show anything.

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
    _check_common(where, plan, rounds, seed, claimed)
    checks.require_integer(where, min_value=10, canaries=canaries)
    checks.require_integer(where, learning_runs=learning_runs)
    if learning_runs != 1 and (learning_runs < 4 or learning_runs % 2):
        checks.fail(
            where,
            "learning_runs=1, or an even number >= 4",
            f"learning_runs={learning_runs}",
            "Learning runs come in pairs with opposite coins, and each pair is measured by the "
            "others.",
        )
    counts.check_levels(where, delta, confidence)
    checks.require_one_of(where, trainings.CANARIES, canary=canary)
    checks.require_one_of(where, trainings.SEES, sees=sees)
    level = dict(delta=delta, confidence=confidence)
    most = one_run.one_run(canaries, canaries, canaries, **level).epsilon
    if claimed is not None and claimed >= most:
        checks.fail(
            where,
            f"canaries that can refute claimed={claimed:g}",
            f"canaries={canaries}, which show at most {most:.3g} if every guess is right",
            "Use more canaries, or a smaller delta.",
        )
    entry = attacked_entry(where, plan, rounds, delta, unit, view, adjacency)
    made, _ = trainings.training(plan, entry, rounds, canary, sees, canaries)
    draw = np.random.default_rng([seed, 1])
    coins = one_run_scores.learning_coins(draw, learning_runs, canaries)
    judged = draw.random(canaries) < 0.5
    keys = jax.random.split(jax.random.key(seed), learning_runs + 1)
    *learn, judge = (
        _observe_once(key, trainings.with_coins(made, rounds, inside), rounds)
        for key, inside in zip(keys, [*coins, judged], strict=True)
    )
    chosen = one_run_scores.learn(np.stack(learn), coins, **level)
    values = chosen.score(judge)
    found, of_gaussian = one_run_scores.bounds(
        values, judged, chosen.guesses, chosen.center, **level
    )
    inside, outside = values[judged], values[~judged]
    mu = one_run_scores.distance(inside, outside)
    return _report(
        plan,
        entry,
        rounds,
        found.epsilon,
        delta,
        claimed,
        confidence=float(confidence),
        estimator="Steinke, Nasr, Jagielski",
        canary=made.words,
        trials=1,
        adversary=made.adversary,
        mu=mu,
        canaries=canaries,
        learning_runs=learning_runs,
        guesses=found.guesses,
        correct=found.correct,
        gaussian=of_gaussian.epsilon,
        estimate=float(rdp.gaussian_epsilon(mu, delta)) if mu > 0 else 0.0,
        auroc=two_samples.auroc(inside, outside) if len(inside) and len(outside) else math.nan,
    )


def _check_common(where, plan, rounds, seed, claimed):
    checks.require_type(where, Plan, "jfl.plan", plan=plan)
    checks.require_integer(where, rounds=rounds)
    checks.require_integer(where, min_value=0, seed=seed)
    if claimed is not None:
        checks.require_nonnegative(where, single=True, claimed=claimed)


def _check_trials(trials, delta, confidence, claimed):
    """Reject numbers with which no runs could show anything."""
    where = "jfl.audit"
    checks.require_fraction(where, single=True, delta=delta)
    if not 0 < delta < 1:
        checks.fail(where, "delta in (0, 1)", f"delta={delta!r}")
    most = ceiling(trials, delta, confidence)
    if LEARN_FRACTION * trials < MIN_LEARNING_TRIALS or not most > 0:
        checks.fail(
            where,
            f"enough trials for confidence={confidence:g} at delta={delta:g}, at least "
            f"{math.ceil(MIN_LEARNING_TRIALS / LEARN_FRACTION)}",
            f"trials={trials}, which show nothing even without an error",
            "Raise trials, or lower confidence or delta.",
        )
    if claimed is not None and claimed >= most:
        checks.fail(
            where,
            f"enough trials to refute claimed={claimed:g}",
            f"trials={trials}, which show at most {most:.3g} even without an error",
            "Raise trials, or audit fewer rounds, whose epsilon is smaller.",
        )


def ceiling(trials: int, delta: float, confidence: float) -> float:
    """Return the largest epsilon that this number of runs of each side can show, with a test that
    makes no error.

    Example:
        >>> round(ceiling(100_000, 1e-2, 0.95), 2)
        9.84
    """
    judged = trials - int(LEARN_FRACTION * trials)
    # one threshold, two rates
    worst = counts.clopper_pearson_upper(0, judged, (1 - confidence) / 2)
    left = 1 - float(worst) - delta
    return math.log(left / float(worst)) if left > worst else 0.0


def attacked_entry(
    where: str, plan: Plan, rounds: int, delta: float, unit, view, adjacency
) -> Entry:
    """Return the ledger entry whose privacy is attacked.

    Raises:
        NotAnalysable: For a plan without noise.
    """
    entries = entries_of(plan, rounds, delta, unit, view, adjacency)
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
    return choose(where, plan, entries, unit, view, adjacency)


def _whose(entry: Entry) -> dict:
    return dict(unit=entry.unit, view=entry.view, adjacency=entry.adjacency)


def _report(plan, entry, rounds, epsilon, delta, claimed, **measured) -> AuditReport:
    """Return the report of a bound, next to the guarantee of the plan if there is one."""
    proved, why_not = None, ""
    try:
        proved = guarantees.guarantee(plan, rounds, delta, **_whose(entry))
    except NotAnalysable as error:
        why_not = str(error)
    return AuditReport(
        epsilon=epsilon,
        delta=float(delta),
        proved=proved,
        claimed=claimed,
        refuted=claimed is not None and epsilon > claimed,
        contradicted=proved is not None and proved.status == "proved" and epsilon > proved.epsilon,
        why_not_proved=why_not,
        **_whose(entry),
        **measured,
    )


# --- runs


def _observe(made, rounds, trials, seed, memory, mesh, progress, store=None):
    """Return what is seen in all runs, [trials, R, k] of each side."""
    seen = _stored_runs(store)
    done = [sum(map(len, side)) for side in seen]
    tell = progress or (lambda done, total: None)
    if sum(done):
        tell(sum(done), 2 * trials)
    if sum(done) < 2 * trials:
        keys = jax.random.split(jax.random.key(seed), (2, trials))
        mesh = devices.devices(mesh)
        num_devices = 1 if mesh is None else mesh.size
        if memory is None:
            memory = device_memory(FULL) or CPU_MEMORY
        block = block_size(made.inside, rounds, trials, memory, num_devices)
        for side, plan in enumerate((made.inside, made.outside)):
            for found in run_blocks(keys[side], plan, rounds, block, mesh, done[side]):
                if store is not None:
                    _store_runs(store, side, done[side], found)
                seen[side].append(found)
                done[side] += len(found)
                tell(sum(done), 2 * trials)
    return [np.concatenate(side) for side in seen]


@functools.partial(jax.jit, static_argnums=2)
def _watch_once(key, plan, rounds):
    return watch(key, plan, rounds)


def _observe_once(key, plan, rounds):
    """Return what is seen of each canary in one run, Float32[m, R, k]."""
    seen, bad = _watch_once(key, plan, rounds)
    if bad:
        refuse_not_finite(1, 1)
    return np.asarray(seen).swapaxes(0, 1)


def _question(plan: Plan, pair: tuple, asked: dict) -> dict:
    """Return what runs must have in common to be runs of one audit, as JSON.

    Args:
        plan: the audited plan.
        pair: the plans that run, with the canary and without.
        asked: rounds, trials, seed, sees, unit, view and adjacency.
    """
    words = lambda p: "".join(f"{int(w):08x}" for w in np.asarray(identity.plan_identity(p)))
    version = importlib.metadata.version
    # How gradients are computed is not part of a plan's identity, but an audit measures it.
    is_grad = lambda node: isinstance(node, Grad)
    grads = [g for g in jax.tree.leaves(plan.algorithm, is_leaf=is_grad) if is_grad(g)]
    return dict(
        plan=words(plan),
        canary=[words(p) for p in pair],
        mesh=None if plan.mesh is None else str(plan.mesh),
        chunk=plan.chunk,
        gradients=[f"{g.path}, microbatch {g.microbatch}" for g in grads],
        **asked,
        jfl=f"{version('jfl')} ({files.source()})",
        jax=f"{version('jax')} on {jax.default_backend()}",
    )


def _open_store(path, question: dict) -> ResultStore:
    """Open the file of an audit's runs, or begin it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)

    def refuse(expected, got):
        checks.fail(
            "jfl.audit keep=",
            expected,
            got,
            "Name another file, or remove this one: this audit cannot use its runs.",
            error=ResumeRefused,
        )

    try:
        store = ResultStore(
            path,
            key=lambda record: (record["side"], record["first"]),
            fields=("seen", "shape"),
            head=("question",),
            signed=True,
        )
    except ArgumentError as error:
        refuse("a file that an audit wrote", f"{path}: {error}")
    if store.head is None:
        if Path(path).exists():
            refuse("a file that an audit wrote", f"{path}, without its first line")
        store.begin(dict(question=question))
    elif store.head["question"] != question:
        differences = identity.differences(store.head["question"], question)
        refuse(f"the runs of this audit in {path}", "; ".join(differences[:5]))
    return store


def _store_runs(store: ResultStore, side: int, first: int, seen: np.ndarray):
    text = base64.b64encode(seen.astype("<f4").tobytes()).decode()
    store.put([dict(side=side, first=first, shape=seen.shape, seen=text)])
    store.records.clear()  # `_observe` holds them


def _stored_runs(store: ResultStore | None) -> tuple[list, list]:
    """Return what a file holds of the runs of either side, in blocks."""
    seen: tuple[list, list] = ([], [])
    if store is not None:
        records: Any = store.records  # by (side, first)
        for (side, _), record in sorted(records.items()):
            block = np.frombuffer(base64.b64decode(record["seen"]), "<f4")
            seen[side].append(block.reshape(record["shape"]))
        store.records.clear()
    return seen


# --- bound


def _bound(seen, law, delta, confidence):
    """Return the lower bound from runs that no choice has used, its estimator, and the distance
    between both sides."""
    first = int(LEARN_FRACTION * len(seen[0]))
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
    """Return the threshold that shows most of these scores, and what it shows.

    The candidates are at even ranks of both sides together, closer near the ends.
    """
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
