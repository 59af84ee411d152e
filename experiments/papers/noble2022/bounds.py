"""Compare Theorems C.1 and C.2 of Noble et al. 2022 with measured runs.

The theorems hold up to a constant (`harness.theorems`).

    preconditions    server_lr >= 1; B >= 1; clipping that does not act, by the length of the rows;
                     strongly convex: mu > 0, and enough rounds
    above            the measured value over the bound has a mean below 1 over the seeds, with its
                     interval, at each number of rounds that meets the preconditions
    below the start  the bound is below the measured value at x^0

What is measured: in the convex case, F - F* at the mean of x^0, ..., x^(T-1). In the strongly
convex case, F - F* at their weighted mean, with the weights (1 - mu e / 2)^-t by which the descents
of Lemma C.7 add up, and e = K eta_l eta_g. In the non-convex case, the mean of |grad F|^2 over
these models.

Each theorem names a step size. Its proof takes a smaller one if T is large, so the named step size
is an upper limit. The paper's claim is judged at the step sizes of the proofs, and our own claims
at the named ones. This was decided after the runs, for all cases in the same way; before, the paper
was judged at the named ones.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jfl
from jfl.analysis import heterogeneity
from jfl.core import pytrees
from jfl.engine.round import advance, init, run_noise_key
from jfl.runs import build
from jfl.runs.config import Config

from ...harness import objectives, theorems
from ...harness.verdicts import Claim, Evidence, exactly
from . import theory
from .runs import objective

THEOREMS = dict(scaffold="Theorem C.1", fedavg="Theorem C.2")
STRONG, CONVEX, RIDGE, NONCONVEX = (
    "strongly convex",
    "convex",
    "convex, with its l2",
    "non-convex",
)
KIND = {STRONG: "strongly_convex", CONVEX: "convex", RIDGE: "convex", NONCONVEX: "nonconvex"}
AVERAGE = "F(mean w) - F*"
MEASURED = {
    STRONG: "F(weighted mean w) - F*",
    CONVEX: AVERAGE,
    RIDGE: AVERAGE,
    NONCONVEX: "mean |∇F(w)|²",
}
NAMED, PROOFS = "named", "of the proof"  # step sizes
COLUMNS = (
    "run",
    "case",
    "step size",
    "rounds",
    "measured",
    "printed bound",
    "mended powers",
    "exact noise",
    "orders above",
    "preconditions",
)
# without l2 the minimiser is that at this one: F* is then at most l2 / 2 |w*|^2 too large, and
# |w_0 - w*| too small
ALMOST = 1e-8
# of (sigmoid(z) - y)^2 / 2 in z, y 0 or 1: its largest slope, at sigmoid = 2/3 or 1/3, and its
# largest curvature, at a root of 12 s^2 - 15 s + 4
SLOPE = 4 / 27
_ROOT = (15 - 33**0.5) / 24
CURVATURE = _ROOT**2 * (1 - _ROOT) * (2 - 3 * _ROOT)


# --- problems


class Setting(NamedTuple):
    """A problem, and its constants that are known before a run."""

    task: Any
    l2: float
    clip: float  # C
    longest: float  # the norm of a row's gradient is at most this
    smoothness: float  # of each client's objective
    least: float  # F*, or what is not above it
    distance: float = 1.0  # |x^0 - x*|


def squared_sigmoids(fed):
    """Return the task of a bounded non-convex loss of a linear model that starts at 0.

    The loss is half the squared distance of its sigmoids to a one-hot label.
    """
    features, classes = math.prod(fed.x.shape[1:]), fed.classes

    def loss(w, x, y):
        seen = jax.nn.sigmoid(x.reshape(-1) @ w["kernel"] + w["bias"])
        return jnp.sum((seen - jax.nn.one_hot(y, classes)) ** 2) / 2

    start = dict(kernel=jnp.zeros((features, classes)), bias=jnp.zeros(classes))
    return jfl.task(start, loss)


def setting(case, config, fed, almost=ALMOST):
    """Return the problem of a case, on the rows of a config."""
    rows = np.asarray(fed.x, np.float64).reshape(len(fed.x), -1)
    longest = math.sqrt(1 + np.square(rows).sum(1).max())  # with the column of the bias
    if case == NONCONVEX:
        steepest = SLOPE * fed.classes**0.5 * longest
        curved = CURVATURE / objectives.CURVATURE
        smooth = curved * float(objectives.smoothness(fed).max())
        # a hundredth more than any row has, so that rounding clips none
        return Setting(squared_sigmoids(fed), 0.0, 1.01 * steepest, steepest, smooth, 0.0)
    l2 = 0.0 if case == CONVEX else config.l2
    task = jfl.models.logistic(fed)
    best = objectives.optimum(task, fed, l2 or almost, weights="uniform")
    square = sum(float(np.sum(np.square(w))) for w in jax.tree.leaves(best.params))
    return Setting(
        task,
        l2,
        config.clip_norm,
        2**0.5 * longest,  # |softmax - one-hot| <= sqrt(2)
        float(objectives.smoothness(fed, l2=l2).max()),
        best.value - (0.0 if l2 else almost / 2 * square),
        square**0.5,  # the model starts at 0
    )


def server_rate(config, server_lr=None) -> float:
    """Return eta_g; None means sqrt(l M), which the theorems take."""
    return math.sqrt(config.cohort) if server_lr is None else server_lr


def plan_of(setting, config, fed, lr, server_lr=None):
    """Return the plan of a line on a problem, with this local step size."""
    chain = jfl.chain(
        jfl.clip_l2(setting.clip),
        jfl.total(),
        jfl.gaussian(config.noise_multiplier),
        jfl.divide(config.batch),
    )
    warm = {} if config.warm_rounds is None else dict(warm_rounds=config.warm_rounds)
    algorithm = getattr(jfl.algorithms, config.algorithm)(
        jfl.private_grad(setting.task.loss, chain, l2=setting.l2),
        lr=float(lr),
        steps=config.steps,
        batch=jfl.batches.without_replacement(config.batch),
        server_lr=server_rate(config, server_lr),
        **warm,
    )
    sampler = jfl.sampling.without_replacement(config.clients, config.cohort)
    return jfl.plan(fed, setting.task, algorithm, sampler, weights="uniform")


# --- runs


@jax.jit
def along(keys, plan, segments, l2, warm, keep):
    """Return the quantities of the theorems after numbers of rounds.

    Args:
        keys: one per seed.
        plan: what runs.
        segments: Int[segments], additional rounds after the warm ones.
        l2: of the objective.
        warm: the warm rounds.
        keep: the weight of a model over that of the next one.

    Returns:
        The weighted mean of x^0, ..., x^(T-1), the plain mean of |grad F|^2 over them, and x^T:
        [seeds, segments].
    """
    rounds = segments.at[0].add(warm)

    def one(key):
        run = init(key, plan)
        noise = run_noise_key(run)

        def step(_, state):
            run, total, weight, square = state
            x = plan.algorithm.params(run.server)
            slope = jax.grad(objective, argnums=1)(plan.task, x, plan.fed, l2)
            counted = jnp.where(run.round < warm, 0.0, 1.0)
            total = jax.tree.map(lambda t, v: keep * t + counted * v, total, x)
            square = square + counted * pytrees.norm(slope) ** 2
            return advance(run, plan, noise)[0], total, keep * weight + counted, square

        def segment(state, rounds):
            state = jax.lax.fori_loop(0, rounds, step, state)
            _, total, weight, square = state
            mean = jax.tree.map(lambda t: t / weight, total)
            return state, (mean, square, plan.algorithm.params(state[0].server))

        zero = pytrees.zeros_like(plan.algorithm.params(run.server))
        start = run, zero, jnp.zeros(()), jnp.zeros(())
        return jax.lax.scan(segment, start, rounds)[1]

    mean, square, last = jax.vmap(one)(keys)
    return mean, square / jnp.cumsum(segments)[None], last


def measured(case, setting, plan, config, lr, seeds, stops, server_lr=None):
    """Return [seeds, stops] of the measured value of a case, and models of the first seed."""
    keys = jnp.stack([jax.random.key(s) for s in seeds])
    segments = jnp.asarray(np.diff(stops, prepend=0), jnp.int32)
    warm = int(config.warm_rounds or 0)
    # of Lemma C.7
    far = config.steps * lr * server_rate(config, server_lr)
    fall = setting.l2 * far / 2 if case == STRONG else 0.0
    mean, square, last = along(keys, plan, segments, setting.l2, warm, 1 - fall)
    points = [jax.tree.map(lambda v, i=i: v[0, i], last) for i in range(len(stops))]
    if case == NONCONVEX:
        return np.asarray(square, float), points
    values = jax.vmap(jax.vmap(lambda w: objective(plan.task, w, plan.fed, setting.l2)))(mean)
    return np.asarray(values, float) - setting.least, points


# --- bounds


def _largest(plan, points, batch):
    """Return maxima over models and clients of three variances.

    They are the variance of a row's gradient, of the mean of a batch, and between clients.
    """

    def at(w):
        rows = objectives.gradient_variance
        return (
            rows(plan.task, w, plan.fed).max(),
            rows(plan.task, w, plan.fed, batch=batch).max(),
            heterogeneity.gradient_dissimilarity(plan.task, w, plan.fed, "uniform").variance,
        )

    return np.max([at(w) for w in points], axis=0).astype(float)


def constants(setting, plan, config, points, gap):
    """Return (as printed, exact) constants of the problem.

    The first have the noise and variance of the paper, the second those of the run. Maxima over the
    models of the run replace maxima over all models.
    """
    variance, drawn, differ = _largest(plan, points, config.batch)
    dim = pytrees.size(points[0])
    noise = functools.partial(
        theory.noise_scale, setting.clip, dim, config.noise_multiplier, config.batch
    )
    known = _known(setting, config, gap)._replace(dissimilarity_g=differ**0.5)
    return (
        known._replace(variance=variance / config.batch, noise=float(noise())),
        known._replace(variance=drawn, noise=float(noise(exact=True))),
    )


def _known(setting, config, gap):
    """Return the constants of a problem that are known before a run."""
    return theory.Problem(
        setting.smoothness,
        config.cohort / config.clients,
        config.clients,
        config.steps,
        rounds=1,
        variance=0.0,
        noise=0.0,
        distance=setting.distance,
        gap=gap,
        strong_convexity=setting.l2,
    )


def rate(problem, algorithm, case, rounds, printed=False, server_lr=None):
    """Return the bound of a theorem after a number of rounds."""
    function = theory.scaffold_rate if algorithm == "scaffold" else theory.fedavg_rate
    return function(problem._replace(rounds=rounds), KIND[case], server_lr, printed)


def named_lr(problem, algorithm, case, server_lr=None):
    """Return the local step size that a theorem names."""
    if algorithm == "scaffold":
        return float(theory.scaffold_local_lr(problem, KIND[case], server_lr))
    return float(theory.fedavg_local_lr(problem, server_lr))


def proofs_lr(problem, algorithm, case, rounds, server_lr=None):
    """Return the local step size with which the proof of a theorem ends, up to constants.

    With e = K eta_l eta_g, the proof arrives at r / (e T) + a e + b e^2 and takes the minimum of
    the named e, sqrt(r / (a T)) and (r / (b T))^(1/3). Here r is F_0 in the non-convex case and
    |x^0 - x*|^2 otherwise. In the strongly convex case the first term is mu r exp(-mu e T / 2), and
    the proof takes the minimum of the named e and 2 log(max(2, mu^2 r T / a)) / (mu T).
    """
    p, cohort = problem, problem.user_ratio * problem.users
    eta_g = math.sqrt(cohort) if server_lr is None else server_lr
    grown = 1.0 if server_lr is None else 1 + cohort / eta_g**2
    first, second = grown * float(theory.gradient_variance(p)) / (p.local_updates * cohort), 0.0
    if algorithm == "fedavg":
        first += (1 - p.user_ratio) * p.dissimilarity_g**2 / cohort
        second = p.smoothness * p.dissimilarity_g**2
    start, unit = (p.gap, p.smoothness) if case == NONCONVEX else (p.distance**2, 1.0)
    if case == STRONG:
        mu = p.strong_convexity
        steps = [2 * math.log(max(2.0, mu**2 * start * rounds / first)) / (mu * rounds)]
    else:
        steps = [math.sqrt(start / (unit * first * rounds))]
        steps += [(start / (unit * second * rounds)) ** (1 / 3)] if second else []
    return min(named_lr(p, algorithm, case, server_lr), min(steps) / (p.local_updates * eta_g))


# --- lines


class Row(NamedTuple):
    """The results of one line after one number of rounds."""

    step: str  # NAMED or PROOFS
    rounds: int
    values: np.ndarray  # [seeds], measured
    printed: float  # the bounds: as printed; with the powers of nu that its units need; with these
    repaired: float  # and the noise of the run
    exact: float
    failed: tuple  # preconditions


def against(case, s, config, fed, seeds, stops, server_lr=None):
    """Return the Rows of one line of one case, the measured value at x^0, and its constants."""
    x0 = s.task.init(jax.random.key(0))
    start = float(objective(s.task, x0, fed, s.l2)) - s.least
    lr = named_lr(_known(s, config, start), config.algorithm, case, server_lr)
    plan = plan_of(s, config, fed, lr, server_lr)
    values, points = measured(case, s, plan, config, lr, seeds, stops, server_lr)
    printed, exact = constants(s, plan, config, [x0, *points], start)
    # rows of length 1 are not so to the last digit
    clips = () if s.longest <= s.clip * (1 + 1e-6) else ("clipping does not act",)
    rows = []
    for step in (NAMED, PROOFS):
        for i, t in enumerate(stops):
            found = values[:, i]
            if step == PROOFS:
                smaller = proofs_lr(exact, config.algorithm, case, t, server_lr)
                if smaller == lr:
                    continue  # the run is that of the named step
                plan = plan_of(s, config, fed, smaller, server_lr)
                # as many stops as above, so that it is the same program
                same = [t] * len(stops)
                again = measured(case, s, plan, config, smaller, seeds, same, server_lr)
                found = again[0][:, 0]
            of = config.algorithm, case, t
            theirs = rate(printed, *of, printed=True, server_lr=server_lr)
            repaired = rate(printed, *of, server_lr=server_lr)
            own = rate(exact, *of, server_lr=server_lr)
            bounds = (float(bound.value) for bound in (theirs, repaired, own))
            failed = (*own.failed, *clips)
            rows.append(Row(step, t, found, *bounds, failed=failed))
    trivial = start
    if case == NONCONVEX:
        slope = jax.grad(objective, argnums=1)(s.task, x0, fed, s.l2)
        trivial = float(pytrees.norm(slope)) ** 2
    numbers = dict(printed._asdict(), clip_norm=s.clip, longest_gradient=s.longest, lr=lr)
    numbers |= dict(exact_noise=exact.noise, exact_variance=exact.variance, start=trivial)
    numbers |= dict(server_lr=server_rate(config, server_lr), gaps=values.tolist())
    return rows, trivial, numbers


def is_above(rows, bound, start):
    """Return a check that the measured value is below a bound at all these Rows.

    Args:
        rows: with one step size.
        bound: "printed", "repaired" or "exact".
        start: the measured value at x^0.
    """
    held = [r for r in rows if not r.failed]
    if not held:
        failed = "; ".join(dict.fromkeys(f for r in rows for f in r.failed))
        why = f"its preconditions fail: {failed}" if rows else "no such runs"
        return lambda results: Evidence(missing=why)
    count = sum(getattr(r, bound) < start for r in held)
    which = f"the {len(held)} T that meet its preconditions"
    return theorems.shares_are_below_1(
        {f"T = {r.rounds}": r.values / getattr(r, bound) for r in held},
        theorems.below_the_start(count, which),
        up_to_a_constant=True,
    )


def of_proofs(rows):
    """Return the Rows at the step size of the proof, which may be the named one."""
    later = {r.rounds for r in rows if r.step == PROOFS}
    return [r for r in rows if r.step == PROOFS or r.rounds not in later]


def judged(algorithm, case, rows, start):
    """Return the claims of one line of one case."""
    theorem, above = THEOREMS[algorithm], f"is above {MEASURED[case]}"
    name = f"{theorem}, {case}, at a constant of 1"
    at = {step: [r for r in rows if r.step == step] for step in (NAMED, PROOFS)}
    proofs = of_proofs(rows)
    words = f"the start has {start:.3g}"
    less = sum(r.printed < start for r in at[NAMED] if not r.failed)

    def claim(text, rows, bound, whose="ours", statement=""):
        return Claim(text, is_above(rows, bound, start), whose, statement)

    found = [
        claim(
            f"{name}, {above} at the step size of its proof",
            proofs,
            "printed",
            "paper",
            f"{theorem}, {KIND[case]}",
        ),
        claim(f"{name}, {above} at its own step size", at[NAMED], "printed"),
        claim(f"{name} and with the exact noise, {above} at its own step size", at[NAMED], "exact"),
        Claim(f"{name}, says more than the start", exactly(less > 0, words), "ours"),
    ]
    if case == NONCONVEX:
        powers = "with the powers of nu that its units need"
        found.append(
            claim(f"{name} and {powers}, {above} at its own step size", at[NAMED], "repaired")
        )
    return found


def shown(algorithm, case, row):
    """Return a row of the table."""
    mean = row.values.mean()
    return [
        algorithm,
        case,
        row.step,
        row.rounds,
        f"{mean:.3e} (std {row.values.std():.1e})",
        f"{row.printed:.3e}",
        f"{row.repaired:.3e}",
        f"{row.exact:.3e}",
        f"{math.log10(row.exact / mean):+.2f}",
        "; ".join(row.failed) or "all hold",
    ]


def bounds(experiment, out, quick):
    """Compare Theorems C.1 and C.2 with the measured values, with constants measured on the
    runs."""
    base = Config(**{**experiment.base, **(experiment.quick if quick else {})})
    fed, seeds = build.federation(base), experiment.seeds[: 2 if quick else None]
    stops = [int(t) for t in np.geomspace(10, base.rounds, 3 if quick else 6)]
    rows, claims, kept = [], [], {}
    for case in MEASURED:
        problem, lines = setting(case, base, fed, 1e-4 if quick else ALMOST), {}
        for algorithm, changes in experiment.lines.items():
            config = dataclasses.replace(base, **changes)
            lines[algorithm], start, kept[f"{algorithm}, {case}"] = against(
                case, problem, config, fed, seeds, stops
            )
            rows += [shown(algorithm, case, row) for row in lines[algorithm]]
            claims += judged(algorithm, case, lines[algorithm], start)
    note = (
        "The bounds hold up to a constant. At a fixed step size the gap does not fall below a "
        "floor, which the bounds do not have as T grows. A bound is compared with F - F* at a "
        "mean of the models before each round (strongly convex: a weighted mean), and in the "
        "non-convex case with the mean of |∇F|² over these models. Constants are maxima over the "
        f"models of a run. Without l2, F* is the minimum for l2 = {ALMOST:g}. In the non-convex "
        "case the printed bound has the printed powers of nu, the others have those that its "
        "units require, and F* is assumed to be 0"
    )
    return dict(
        claims=claims,
        columns=COLUMNS,
        rows=rows,
        note=note,
        constants=kept,
        seeds=list(seeds),
    )
