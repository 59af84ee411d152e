"""What the experiments on Noble et al. 2022 need beyond `harness.runner`: watched runs, checks,
tables without lines."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfl.analysis import heterogeneity
from jfl.cli import console
from jfl.engine.simulate import schedule, simulate
from jfl.papers.noble2022 import gaps as noble2022_gaps
from jfl.papers.noble2022 import privacy as noble2022
from jfl.papers.noble2022 import theory
from jfl.runs import build, directory, record
from jfl.runs.checkpoint import environment
from jfl.runs.config import Config
from jfl.runs.record import RunRecord, Stopwatch
from jfl.runs.train import privacy

from ..harness.programs import Plans, drawn
from ..harness.runner import exact_verdicts, keep
from ..harness.verdicts import (
    NOT_RUN,
    Claim,
    Comparison,
    Evidence,
    Quantity,
    Ratio,
    exactly,
    near_printed,
)

GAP = "ln(F - F*)"  # a natural logarithm, as the authors plot
# of the gradients of the clients, uniform weights: what Figures 4 and 8 plot, and the other measure
DIFFERENCE = "mean |∇F_i|² - |∇F|²"
RATIO = "ln(mean |∇F_i|² / |∇F|²)"
MARKS = (100, 200, 300, 400)  # that are evaluated, of those that were read off


# --- runs


@functools.lru_cache(maxsize=8)
def _optimum(config):
    plan, _ = build.build(config)
    return heterogeneity.optimum(plan.task, plan.fed, config.l2, weights="uniform", tolerance=1e-5)


def optimum(config):
    """The minimiser of the objective of a config of a convex model."""
    return _optimum(Config(**{n: getattr(config, n) for n in (*build.DATA, "model", "l2")}))


@jax.jit
def objective(task, params, fed, l2):
    """F of the server's model: the mean over clients of their mean loss, and the penalty."""

    def client(rows):
        index, size = rows
        losses = jax.vmap(task.loss, (None, 0, 0))(params, fed.x[index], fed.y[index])
        return jnp.where(jnp.arange(len(index)) < size, losses, 0).sum() / size

    penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(params))
    return jax.lax.map(client, (fed.index, fed.size)).mean() + l2 / 2 * penalty


DRAWN = Plans(drawn, seeded=True, trace=(("curve", "accuracy"), ("round", "round")))


def watched(config, axes, out):
    """Run as `jfl.runs.sweep.sweep` over seeds, each with a draw of the data of its own, and keep
    GAP, DIFFERENCE and RATIO of the server's model at each evaluation, as a "trace"."""
    out = directory.checked(out, resume=False)
    guarantees, records = None, []
    for seed in axes["seed"]:
        plan, calibrated = drawn(dataclasses.replace(config, seed=seed))
        best = optimum(calibrated).value
        guarantees = guarantees or privacy(plan, calibrated, config.rounds)  # sizes are equal
        run, history, trace = None, {}, {"round": [], GAP: [], DIFFERENCE: [], RATIO: []}
        stopwatch = Stopwatch()
        for count in schedule(config.rounds, config.evaluate_every).tolist():
            result = jax.block_until_ready(
                simulate(jax.random.key(seed), plan, count, evaluate_every=count, start=run)
            )
            run = result.run
            with stopwatch.paused():
                for key, values in record.lists(result.metrics).items():
                    history.setdefault(key, []).extend(values)
                dissimilarity = heterogeneity.gradient_dissimilarity(
                    plan.task, result.params, plan.fed, "uniform", l2=config.l2
                )
                above = float(objective(plan.task, result.params, plan.fed, config.l2)) - best
                trace["round"].append(int(run.round))
                trace[GAP].append(math.log(max(above, 1e-7)))  # float32 sees no less
                trace[DIFFERENCE].append(float(dissimilarity.variance))
                trace[RATIO].append(float(dissimilarity.log_ratio))
        values = dataclasses.asdict(calibrated)
        seconds, compiled = stopwatch.read()
        records.append(
            RunRecord(
                config.algorithm,
                values,
                seed,
                history,
                seconds,
                compiled,
                guarantees,
                trace=trace,
            )
        )
    out.mkdir(parents=True, exist_ok=True)
    entries = [r.entry() for r in records]
    record.save(
        out,
        entries,
        [row for r in records for row in r.rows()],
        record.manifest([plan], build.the_partition(config), seeds=list(axes["seed"])),
    )
    return entries


# --- checks


def unsteady(rising, level):
    """The variance over seeds is larger on the last of the lines `rising` than on the first, and
    not more than four times as large on the last of `level`."""

    def check(results):
        names = [rising[0], rising[-1], level[0], level[-1]]
        if any(n not in results for n in names):
            return Evidence(missing=NOT_RUN)
        if any(len(results[n].accuracy) < 3 for n in names):
            return Evidence(missing="fewer than 3 seeds")
        up, flat = (
            Ratio.of(results[lines[-1]].accuracy, results[lines[0]].accuracy)
            for lines in (rising, level)
        )
        return Evidence(
            (Comparison(up, low=1.0), Comparison(flat, high=4.0)),
            seen="variance over seeds on the last line over that on the first, of both methods",
        )

    return check


def as_drawn(curves, within=0.15):
    """At all marks GAP lies within this of the published curves (line -> values at MARKS)."""

    def at(name, line):
        if GAP not in line.trace:
            return []
        rounds = line.trace["round"][0].tolist()
        return [
            (
                f"{name}, {mark}",
                Quantity.of(line.trace[GAP][:, rounds.index(mark)], line.seeds),
                value,
            )
            for mark, value in zip(MARKS, curves[name], strict=True)
            if mark in rounds
        ]

    def check(results):
        found = near_printed(curves, within, at)(results)
        if not found.missing and len(found.comparisons) < len(MARKS) * len(curves):
            return dataclasses.replace(found, missing="rounds that were not evaluated")
        return found

    return check


# --- tables without lines


def _told(out, title, columns, rows, caption, **found):
    console.table(title, [(c, i > 0) for i, c in enumerate(columns)], rows, caption)
    found = record.plain(
        found
        | dict(
            title=title, columns=list(columns), rows=rows, caption=caption, versions=environment()
        )
    )
    return keep(out, found, {})


def proved_of(run: noble2022.Setting) -> dict:
    """view -> the epsilon that is proved of a run, as of every line of a figure: rows do not
    matter, so synthetic ones stand for those that are not at hand."""
    rows = round(1 / run.users / run.delta)  # that a user trains on: delta is 1 / (M R)
    config = Config(
        algorithm="fedavg",
        dataset="synthetic",
        partition="natural",
        model="logistic",
        clients=run.users,
        cohort=round(run.user_ratio * run.users),
        rows_per_client=round(rows / 0.8),  # a fifth are test rows
        batch=round(run.data_ratio * rows),
        steps=run.local_updates,
        rounds=run.rounds,
        lr=0.1,
        clip_norm=1.0,
        noise_multiplier=run.sigma_g,
        delta=run.delta,
        mode="as_printed",
        view="third_party",
    )
    plan, config = build.build(config)
    return {
        g["view"]: g["epsilon"]
        for g in privacy(plan, config, config.rounds)
        if g["status"] == "proved"
    }


def worth(name, experiment, out, quick):
    """What the paper states, what is proved of the same run, and the noise that its epsilon
    takes."""
    rows = []
    for place, (run, stated) in list(noble2022.STATED.items())[: 1 if quick else None]:
        proved = proved_of(run)
        needed = [noble2022.proved_noise(stated, *run[1:], bound=b) for b in ("P1", "server")]
        rows.append(
            [
                place,
                f"{stated:g}",
                *(
                    f"{v:.3g}"
                    for v in (
                        noble2022.third_party_epsilon(*run),
                        proved["third_party"],
                        proved["server"],
                        run.sigma_g,
                        noble2022.noise_for(stated, *run[1:]),
                        *needed,
                    )
                ),
            ]
        )
    attained, allowed = noble2022_gaps.round_counterexample(1.0, 20, 800)
    published, _, exact = noble2022_gaps.participation_counterexample(1000, 0.01, 1000, 1.0, 1e-6)
    caption = (
        f"Its proof is not sound: one round of two steps shows a record with total variation "
        f"{attained:.3f}, where "
        f"it allows {allowed:.3f}; 1000 rounds of one step have epsilon {exact:.3g}, where it says "
        f"{published:.3g}."
    )
    return _told(
        out,
        experiment.title,
        (
            "where",
            "ε stated",
            "ε again",
            "ε proved",
            "... server",
            "σ_g",
            "σ_g by its bound",
            "σ_g that is enough",
            "... server",
        ),
        rows,
        caption,
        experiment=name,
        quick=quick,
    )


def _largest(plan, points, batch):
    """Over points and clients: the variance of a row's gradient, that of a batch's mean, and that
    between clients."""

    def at(w):
        rows = heterogeneity.gradient_variance
        return (
            rows(plan.task, w, plan.fed).max(),
            rows(plan.task, w, plan.fed, batch=batch).max(),
            heterogeneity.gradient_dissimilarity(plan.task, w, plan.fed, "uniform").variance,
        )

    return np.max([at(w) for w in points], axis=0).astype(float)


def bounds(name, experiment, out, quick):
    """Theorems C.1 and C.2 beside F(w_t) - F*, with constants measured on the runs.

    w_t is the last model.  The theorems speak of a weighted mean of models, whose floor is lower,
    but is one too.
    """
    base = Config(**{**experiment.base, **(experiment.quick if quick else {})})
    rows, below, kept = [], [], {}
    for algorithm, changes in experiment.lines.items():
        config = dataclasses.replace(base, **changes)
        fed, best = build.federation(config), optimum(config)
        cohort: Any = config.cohort
        part, users = cohort / config.clients, config.clients
        plan, _ = build.build(config)
        x0, warm = plan.task.init(jax.random.key(0)), int(config.warm_rounds or 0)
        problem = theory.Problem(
            float(heterogeneity.smoothness(fed, l2=config.l2).max()),
            part,
            users,
            config.steps,
            1,
            0.0,
            0.0,
            math.sqrt(
                sum(
                    float(np.sum((a - b) ** 2))
                    for a, b in zip(*map(jax.tree.leaves, (x0, best.params)))
                )
            ),
            float(objective(plan.task, x0, fed, config.l2)) - best.value,
            config.l2,
        )
        lr = (
            theory.scaffold_local_lr(problem, "strongly_convex")
            if warm
            else theory.fedavg_local_lr(problem)
        )
        config = dataclasses.replace(config, lr=float(lr), server_lr=math.sqrt(part * users))
        plan, _ = build.build(config)
        stops = [warm + int(t) for t in np.geomspace(10, config.rounds, 6)]
        gaps, points = [], [x0]
        for seed in experiment.seeds:
            run, path = None, []
            for stop in stops:
                count = stop - (0 if run is None else int(run.round))
                result = simulate(
                    jax.random.key(seed), plan, count, evaluate_every=count, start=run
                )
                run = result.run
                path.append(float(objective(plan.task, result.params, fed, config.l2)) - best.value)
                points.append(result.params)
            gaps.append(path)
        dim = sum(w.size for w in jax.tree.leaves(x0))
        near = points[: 1 + len(stops)]  # constants are maxima over the points of one run
        variance, drawn, differ = _largest(plan, near, config.batch)
        noise = [
            float(
                theory.noise_scale(
                    config.clip_norm, dim, config.noise_multiplier, config.batch, exact=e
                )
            )
            for e in (False, True)
        ]
        printed = problem._replace(
            variance=variance / config.batch, noise=noise[0], dissimilarity_g=differ**0.5
        )
        exact = printed._replace(variance=drawn, noise=noise[1])
        rate = theory.scaffold_rate if warm else theory.fedavg_rate
        for t, gap in zip((s - warm for s in stops), np.array(gaps).T):
            one, other = (
                rate(p._replace(rounds=t), "strongly_convex", strict=False)
                for p in (printed, exact)
            )
            rows.append(
                [
                    algorithm,
                    t,
                    f"{gap.mean():.3e} (std {gap.std():.1e})",
                    f"{float(one.value):.3e}",
                    f"{float(other.value):.3e}",
                    f"{math.log10(float(other.value) / gap.mean()):+.2f}",
                    "; ".join(other.failed) or "all hold",
                ]
            )
            below += (
                [f"{algorithm}, {t}"]
                if float(other.value) < gap.mean() and not other.failed
                else []
            )
        kept[algorithm] = dict(
            printed._asdict(), lr=config.lr, server_lr=config.server_lr, gaps=gaps
        )
    words = (
        "Above the gap wherever the preconditions hold."
        if not below
        else "Below the gap, with all preconditions: " + "; ".join(below) + "."
    )
    caption = (
        "Bounds are up to a constant.  At a fixed step size the gap has a floor, and "
        "V / (mu T K l M) has none."
    )
    claim = Claim(
        "Theorems C.1 and C.2, strongly convex, are above the gap at their own step sizes",
        exactly(not below, words),
    )
    return _told(
        out,
        experiment.title,
        (
            "run",
            "rounds",
            "F(w) - F*",
            "printed bound",
            "exact noise",
            "orders above",
            "preconditions",
        ),
        rows,
        caption,
        experiment=name,
        quick=quick,
        constants=kept,
        verdicts=exact_verdicts([claim], experiment.differs),
        seeds=list(experiment.seeds),
    )
