"""Membership inference by shadow federations: `jfl.audit_membership`.

A shadow model is the final model of one run of the plan in which an independent fair coin decides
for each target, a row or a client, whether it takes part.  An attack gives each pair of a shadow
model and a target a score, from the losses of the target under this model and under others, and
answers "took part" if the score is high.

Arrays that several functions share, for S shadow models and m targets:

    losses: Float[S, m], the loss of each target under each model.
    included: Bool[S, m], the coins.
    learns: Bool[S], the models from which the attack learns.  A model is never used to attack
        itself, so all learning models attack each other.

The scores of one model are not independent of each other.  The bounds therefore use one random
target for each model from which the attack does not learn: given what it learned, these scores are
independent, as Clopper-Pearson bounds assume.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from ..core import checks
from ..core.errors import NotAnalysable
from ..core.records import CAVEATS_PAGE, Guarantee, Plan
from ..engine.round import init
from ..engine.simulate import scan
from ..engine.sweep import COMPILED_MEMORY_FRACTION, device_memory
from ..models.losses import for_evaluation
from ..privacy import guarantees
from ..privacy.mechanisms import chain as mech
from . import canaries, trainings
from .estimators import thresholds, two_samples
from .scores import LEARN_FRACTION, RIDGE
from .trials import CPU_MEMORY, block_size, refuse_not_finite

WHERE = "jfl.audit_membership"
MIN_SHADOWS = 64
MIN_VARIANCE = 1e-100  # keeps the scores of losses that never change finite
MAX_REFERENCES = 1000  # number of test rows, or of groups of them, that RMIA compares with
MIN_LOSS, MAX_LOSS = 1e-7, 700.0  # rounding errors of float32; the logarithm of tiny floats
NUM_THRESHOLDS = 8  # number of thresholds of which the bounds use the best
NUM_BOUNDS = 4  # the AUROC and the true-positive rates, of each of two attacks


class MembershipAttack(NamedTuple):
    """The results of one attack.

    The arrays have one entry for each of k false-positive rates.

    Attributes:
        name: "LiRA" or "RMIA".
        auroc: the area under the ROC curve of all trials.
        auroc_bound: a lower bound on it.
        tpr: Float[k], the largest true-positive rate of all trials at a false-positive rate.
        interval: Float[k, 2], its Clopper-Pearson interval, as if all trials were independent.
            They are not, because the trials of one shadow model share this model.
        tpr_bound: Float[k], a lower bound on the true-positive rate of the best attack at exactly
            this false-positive rate.  It does not assume that trials of one model are independent.
    """

    name: str
    auroc: float
    auroc_bound: float
    tpr: np.ndarray
    interval: np.ndarray
    tpr_bound: np.ndarray


class MembershipReport(NamedTuple):
    """What membership inference found, and the limit that the proof sets to every attack.

    Attributes:
        unit: "example" or "client": what the targets are.
        targets: Int[m], the numbers of the rows or clients.
        rounds: the number of rounds of each run.
        confidence: the probability with which all lower bounds hold together.
        fpr: Float[k], false-positive rates.
        allowed: Float[k], the largest true-positive rate that the proof allows at each of them; 1
            if nothing is proved.
        attacks: the results of LiRA, and of RMIA if the federation has test rows.
        contradicted: whether a lower bound exceeds what an unconditional proof allows, which is a
            bug.
        proved: the guarantee against an observer of the models; None if the plan cannot be
            analysed.  Without noise its epsilon is infinite.
        why_not_proved: the reason if it is None.
        losses: Float64[S, m], the loss of each target under each shadow model.
        included: Bool[S, m], which targets took part in which run.
    """

    unit: str
    targets: np.ndarray
    rounds: int
    confidence: float
    fpr: np.ndarray
    allowed: np.ndarray
    attacks: tuple[MembershipAttack, ...]
    contradicted: bool
    proved: Guarantee | None
    why_not_proved: str
    losses: np.ndarray
    included: np.ndarray

    def __str__(self):
        limit = str(self.proved).splitlines()[0] if self.proved else self.why_not_proved
        lines = [
            f"membership of {len(self.targets)} {self.unit}s in the model after {self.rounds} "
            f"rounds, from {len(self.losses)} shadow models" + self.contradicted * ": CONTRADICTED",
            f"{'limit' if self.proved else 'not proved'}: {limit}",
        ]
        row = "  {:<10.3g}{:<10.3g}{:<24}{:<10.2g}{:.3g}".format
        for attack in self.attacks:
            lines += [
                f"{attack.name}: AUROC {attack.auroc:.3f}, at least {attack.auroc_bound:.3f}",
                "  FPR       TPR       interval                at least  allowed",
            ]
            interval = [f"[{low:.3g}, {high:.3g}]" for low, high in attack.interval]
            lines += map(row, self.fpr, attack.tpr, interval, attack.tpr_bound, self.allowed)
        lines += [
            f"at least: all these bounds hold together at confidence {self.confidence:g}",
            "interval: treats all trials as independent, although trials of one model share it",
            "another attack may find more",
        ]
        if self.proved:
            lines.append(f"the limit has assumptions: .proved.caveats; explained: {CAVEATS_PAGE}")
        return "\n  ".join(lines)


def audit_membership(
    plan: Plan,
    rounds: int,
    shadows: int = 1024,
    targets: int | ArrayLike = 64,
    *,
    unit: str | None = None,
    fpr: Sequence[float] = (1e-2, 1e-3, 1e-4),
    confidence: float = 0.95,
    seed: int = 0,
) -> MembershipReport:
    """Train shadow federations, and infer from the final models who took part in their training.

    All runs are one compiled program.  In each of them, an independent fair coin decides for each
    target whether it takes part; all other rows and clients do.  An excluded row has the gradient
    zero, and an excluded client uploads zeros.  Two attacks see the loss of each target under the
    final model: `lira` and `rmia`.

    An attack shows that at least so much leaks.  It never shows that something is private, because
    another attack may find more.

    Args:
        plan: one Plan, with or without noise, whose rows are on the device.
        rounds: the number of rounds of each run, and of the proved guarantee.
        shadows: the number of runs, S, at least 64.  The lower bound on the true-positive rate at
            a false-positive rate f is seldom far above S f / 20, so small rates need many runs.
        targets: the number of targets, which are then drawn among the training rows (or the
            clients with rows); all of them if there are fewer.  Or Int[m], rows of `fed.x` or ids
            of clients.
        unit: "example" or "client".  None means the unit of `jfl.guarantee`, and "example" without
            noise.
        fpr: [k], false-positive rates.
        confidence: in (0, 1), with which all lower bounds of the report hold together.
        seed: the seed of the runs, coins and targets.

    Privacy:
        The allowed rates follow from the whole trade-off curve of `jfl.guarantee` for the view
        "third_party", which sees every model.  They hold for each target, and, since the curve is
        concave, for the average over targets.  Under "replace_one", a contribution of zero is one
        of the replacements that the proof covers.

    Raises:
        NotAnalysable: If rows have several owners, if a client reads rows in other ways than by
            gradients of jfl, or if clients vote on a clip norm under add_remove.
        ValueError: For arguments out of range, or if several units are protected.

    References:
        Carlini et al., IEEE S&P 2022 (LiRA); Zarifzadeh, Liu, Shokri, ICML 2024 (RMIA).

    Example:
        >>> import jfl
        >>> rows, labels = jfl.datasets.digits().x[:40], jfl.datasets.digits().y[:40]
        >>> few = jfl.datasets.arrays(rows, labels, rows[:1], labels[:1])
        >>> fed = jfl.federate(few, jfl.partition.iid(4))
        >>> task = jfl.models.logistic(fed)
        >>> fedavg = jfl.algorithms.fedavg(jfl.grad(task.loss), lr=1.0)
        >>> plan = jfl.plan(fed, task, fedavg, jfl.sampling.full(4))
        >>> report = jfl.audit_membership(plan, rounds=5, shadows=64, targets=20)
        >>> report.attacks[0].auroc > 0.8, report.allowed.tolist()
        (True, [1.0, 1.0, 1.0])
    """
    checks.require_type(WHERE, Plan, "jfl.plan", plan=plan)
    checks.require_device_rows(WHERE, plan.fed)
    checks.require_integer(WHERE, rounds=rounds)
    checks.require_integer(WHERE, min_value=MIN_SHADOWS, shadows=shadows)
    checks.require_seed(WHERE, seed=seed)
    thresholds.check_levels(WHERE, 0.0, confidence)
    rates = _check_rates(fpr, confidence, shadows)
    hint = "Let each row belong to one client, as the guarantee assumes."
    trainings.check_owners(plan.fed, "rows with one owner each", hint)
    proved, why_not = None, ""
    try:
        proved = guarantees.guarantee(plan, rounds, unit=unit, view="third_party")
    except NotAnalysable as error:
        why_not = str(error)
    unit = unit or (proved.unit if proved else "example")
    votes = unit == "client" and mech.adaptive(plan.release)
    if votes and proved and proved.adjacency != "replace_one":
        expected = "a clip norm that no client votes on, for clients that are added or removed"
        canaries.refuse(expected, "an adaptive one", "Audit one client: jfl.audit.")

    draw = np.random.default_rng([seed, 3])
    chosen = _choose_targets(plan, unit, targets, draw)
    included = draw.random((shadows, len(chosen))) < 0.5
    losses = _train(plan, rounds, unit, chosen, included, seed)
    losses, references = losses[:, : len(chosen)], losses[:, len(chosen) :]
    attacks = [_judge("LiRA", lira, losses, included, rates, confidence, draw)]
    if references.size:
        attack = functools.partial(rmia, references=references)
        attacks.append(_judge("RMIA", attack, losses, included, rates, confidence, draw))
    allowed = proved.tpr(rates) if proved else np.ones(len(rates))
    exceeded = any(np.any(attack.tpr_bound > allowed) for attack in attacks)
    return MembershipReport(
        unit=unit,
        targets=chosen,
        rounds=rounds,
        confidence=confidence,
        fpr=rates,
        allowed=allowed,
        attacks=tuple(attacks),
        contradicted=proved is not None and proved.status == "proved" and exceeded,
        proved=proved,
        why_not_proved=why_not,
        losses=losses,
        included=included,
    )


def _check_rates(fpr, confidence, shadows) -> np.ndarray:
    """Return the false-positive rates, Float64[k], after checking them and the number of runs."""
    rates = np.atleast_1d(np.asarray(fpr, np.float64))
    if rates.ndim > 1 or not rates.size or not np.all((rates >= 0) & (rates <= 1)):
        checks.fail(WHERE, "fpr, numbers in [0, 1]", checks.short_repr(fpr))
    # At most `least` scores of a side show nothing, and a coin decides the side of a judged run.
    least = math.log2(2 * NUM_THRESHOLDS * NUM_BOUNDS / (1 - confidence))
    needed = math.ceil(3 * least / (1 - LEARN_FRACTION))
    if shadows < needed:
        got = f"shadows={shadows}, confidence={confidence}"
        checks.fail(WHERE, f"shadows >= {needed} for this confidence", got)
    return rates


# --- the shadow models


def _choose_targets(plan, unit, targets, draw) -> np.ndarray:
    """Return the numbers of the rows or clients that are attacked, Int[m]."""
    possible = trainings.owned_rows(plan.fed)
    if unit == "client":
        possible = np.flatnonzero(np.asarray(plan.fed.size))
    if np.ndim(targets) == 0:
        checks.require_integer(WHERE, targets=targets)
        return np.sort(draw.permutation(possible)[:targets])
    chosen = np.unique(targets)
    if chosen.dtype.kind not in "iu" or not len(chosen) or not np.isin(chosen, possible).all():
        what = "ids of clients with rows" if unit == "client" else "numbers of rows of clients"
        checks.fail(WHERE, f"targets, {what}", checks.short_repr(targets))
    return chosen


def _train(plan, rounds, unit, targets, included, seed) -> np.ndarray:
    """Return the losses of m targets and r references under each shadow model, Float64[S, m + r].

    The loss of a client is the mean over s of its rows, and a reference is the mean over s test
    rows.
    """
    fed, rows = plan.fed, targets[:, None]
    if unit == "client":
        width = min(trainings.MAX_ROWS, int(np.asarray(fed.size)[targets].min()))
        rows = np.asarray(fed.index)[targets, :width]
    width = rows.shape[1]
    tests = np.arange(min(MAX_REFERENCES, len(fed.y_test) // width) * width).reshape(-1, width)
    pairs = (fed.x, fed.x_test), (fed.y, fed.y_test)
    shown = tuple(jnp.concatenate([own[rows], test[tests]]) for own, test in pairs)
    loss = for_evaluation(plan.task)

    @functools.partial(jax.jit, static_argnums=0)
    def run_all(block, keys, included, plan, shown):
        def run_one(own):
            key, inside = own
            made = trainings.Training(
                plan,
                unit=unit,
                replaced=False,
                rows=rows,
                clients=targets,
                kind="member",
                sees="final model",
                sent=None,
                weights=None,
                chain=None,
                canary="",
                adversary="",
                copies=None,
            )
            masked = trainings.with_included(made, inside, plan.fed.x, plan.fed.y)
            run, _ = scan(init(key, masked), masked, jnp.array([rounds]))
            params = masked.algorithm.params(run.server)
            mean_loss = lambda rows: trainings.mean_loss(loss, params, *rows)
            losses = jax.lax.map(mean_loss, shown, batch_size=trainings.MAX_GRADIENTS)
            return losses, run.health.nonfinite + run.health.nonfinite_rows > 0

        return jax.lax.map(run_one, (keys, included), batch_size=block)

    shadows = len(included)
    arguments = jax.random.split(jax.random.key(seed), shadows), included, plan, shown
    memory = device_memory(COMPILED_MEMORY_FRACTION) or CPU_MEMORY
    block = block_size(lambda size: run_all.lower(size, *arguments), shadows, memory)
    losses, bad = run_all(block, *arguments)
    refuse_not_finite(int(bad.sum()), shadows, WHERE)
    return np.asarray(losses, np.float64)


# --- attacks


def lira(losses: np.ndarray, included: np.ndarray, learns: np.ndarray) -> np.ndarray:
    """Return the scores of the likelihood-ratio attack (LiRA, online).

    The confidence p = exp(-loss) of a target is scaled to log(p / (1 - p)).  For each target, a
    normal distribution is fitted to the values of the models with it, and one to those without it.
    The score is the logarithm of the ratio of the two densities.

    Args:
        losses, included, learns: see the module.

    Returns:
        Float64[S, m].

    References:
        Carlini et al., IEEE S&P 2022, Algorithm 1.
    """
    loss = np.maximum(losses, MIN_LOSS)
    scaled = -loss - np.log(-np.expm1(-loss))
    scaled = scaled - scaled[learns].mean(0)
    floor = RIDGE * scaled[learns].var(0) + MIN_VARIANCE

    def log_density(which):
        mean, variance = _moments_of_others(scaled, which & learns[:, None])
        variance = np.maximum(variance, floor)
        return -np.log(variance) / 2 - np.square(scaled - mean) / (2 * variance)

    return log_density(included) - log_density(~included)


def rmia(
    losses: np.ndarray, included: np.ndarray, learns: np.ndarray, references: np.ndarray
) -> np.ndarray:
    """Return the scores of the robust membership inference attack (RMIA, online, gamma = 1).

    The ratio of a target is its confidence exp(-loss) under the attacked model, divided by its mean
    confidence: the mean over other models with it, averaged with that over models without it.  The
    score is the fraction of reference rows, in no training, whose ratio is at most that of the
    target.  The ratio itself decides between equal fractions.

    Args:
        losses, included, learns: see the module.
        references: Float[S, r], the losses of r reference rows under each model.

    Returns:
        Float64[S, m].

    References:
        Zarifzadeh, Liu, Shokri, ICML 2024, equations (3) and (4).
    """
    confidence, typical = (np.exp(-np.minimum(v, MAX_LOSS)) for v in (losses, references))
    learns = learns[:, None]
    inside, outside = (
        _moments_of_others(confidence, side & learns)[0] for side in (included, ~included)
    )
    ratio = confidence / ((inside + outside) / 2)
    typical = typical / _moments_of_others(typical, learns)[0]
    below = np.stack([(own[:, None] >= of).sum(1) for own, of in zip(ratio, typical, strict=True)])
    return (below + ratio / (1 + ratio)) / (references.shape[1] + 1)


def _moments_of_others(values, which):
    """Return the mean and the variance of the values of all other models in `which`.

    Args:
        values: Float64[S, m].
        which: Bool[S, m] or Bool[S, 1]; the value of the model itself never counts.

    Returns:
        Two arrays Float64[S, m].
    """
    of_others = lambda v: (which * v).sum(0) - which * v
    count = np.maximum(of_others(np.ones_like(values)), 1)
    mean = of_others(values) / count
    return mean, np.maximum(of_others(np.square(values)) / count - np.square(mean), 0.0)


# --- rates and their bounds


def _judge(name, attack, losses, included, fpr, confidence, draw) -> MembershipAttack:
    """Return the rates of an attack and their bounds.

    Args:
        name: its name.
        attack: a function from losses, included and learns to scores Float[S, m].
        losses, included: see the module.
        fpr: Float[k], the false-positive rates.
        confidence: of the bounds.
        draw: a NumPy generator.
    """
    shadows, num_targets = included.shape
    scores = attack(losses, included, np.ones(shadows, bool))
    inside, outside = scores[included], scores[~included]
    tpr, count = two_samples.tpr_at_fpr(inside, outside, fpr), len(inside)
    hits = np.rint(tpr * count)
    upper = lambda hits: thresholds.clopper_pearson_upper(hits, count, (1 - confidence) / 2)
    interval = np.stack([1 - upper(count - hits), upper(hits)], axis=1)

    judged = np.arange(int(LEARN_FRACTION * shadows), shadows)
    scores = attack(losses, included, np.arange(shadows) < judged[0])
    one_each = judged, draw.integers(num_targets, size=len(judged))
    values, took_part = scores[one_each], included[one_each]
    sides = np.sort(values[took_part]), np.sort(values[~took_part])
    bounds = lower_bounds(*sides, fpr, (1 - confidence) / NUM_BOUNDS)
    auroc = two_samples.auroc(inside, outside)
    return MembershipAttack(name, auroc, bounds[0], tpr, interval, bounds[1])


def lower_bounds(
    inside: np.ndarray, outside: np.ndarray, fpr: np.ndarray, alpha: float
) -> tuple[float, np.ndarray]:
    """Return lower bounds on the AUROC, and on the true-positive rate of the best attack at exactly
    these false-positive rates.

    A test whose false-positive rate is at most u and whose true-positive rate is at least v becomes
    a test with the rates f and v f / u, for f < u, if it answers "took part" only with probability
    f / u.  A guess without the score has equal rates.

    Args:
        inside: Float[n], sorted independent scores of targets that took part.
        outside: Float[n'], the same of targets that did not.
        fpr: Float[k].
        alpha: the probability with which the first bound, and any of the second, may be wrong.

    Returns:
        A number, and Float64[k].

    References:
        Hoeffding, JASA 1963, section 5b, for the AUROC, a two-sample U-statistic.
    """
    slack = np.sqrt(np.log(1 / alpha) / (2 * min(len(inside), len(outside))))
    auroc = max(two_samples.auroc(inside, outside) - slack, 0.0)
    rule = thresholds.Bonferroni(NUM_THRESHOLDS)

    def shown_at(rate):
        def read(rates):
            kept = np.minimum(rate / rates.false_positive_rate, 1.0)
            shown = (1 - rates.false_negative_rate) * kept
            return float(shown.max()), int(shown.argmax())

        return max(rule.judge(inside, outside, alpha, read).epsilon, rate)

    return float(auroc), np.array([shown_at(rate) for rate in fpr.tolist()])
