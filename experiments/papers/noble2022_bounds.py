"""Noble et al. 2022: its convergence theorems beside measured runs."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from jfl.analysis import heterogeneity
from jfl.engine.simulate import simulate
from jfl.papers.noble2022 import theory
from jfl.runs import build
from jfl.runs.config import Config

from ..harness.runner import exact_verdicts
from ..harness.verdicts import Claim, exactly
from .noble2022_runs import kept_table, objective, optimum


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
    return kept_table(
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
