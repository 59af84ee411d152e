"""Compare the bounds of Li, Wang, Wu, 2025, with runs of a strongly convex problem.

The constants of the problem are measured.
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from jfl import models
from jfl.analysis import heterogeneity as het
from jfl.runs import build as assemble
from jfl.runs.config import Config

from ...harness import objectives
from ...harness.verdicts import Claim, exactly
from .. import rates, softmax_rows, trajectories
from . import theory
from .plans import build, multiplier

COLUMNS = (
    "setting",
    "run",
    "steps",
    "gap",
    "printed bound",
    "above by",
    "our bound",
    "ours above by",
    "clip acts",
)
NOTE = (
    "Gaps are means over seeds of F(w) - F*. A bound holds if it is at least the gap at every "
    "evaluation. Assumption 4 requires that no gradient is clipped"
)


@functools.lru_cache(maxsize=4)
def constants(config):
    """Return the constants of the theorems, from private rows; no guarantee covers them."""
    fed = assemble.federation(config)
    task = models.logistic(fed)
    gap = objectives.objective_gap(task, fed, config.l2, weights="uniform")
    zero, best = (
        jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), p)
        for p in (jax.tree.map(np.zeros_like, gap.pooled.params), gap.pooled.params)
    )
    variance = np.max(
        [np.asarray(objectives.gradient_variance(task, p, fed)) for p in (zero, best)], axis=0
    )
    rows = np.asarray(fed.x, np.float64).reshape(len(fed.x), -1)
    flat = np.concatenate([np.ravel(v) for v in jax.tree.leaves(gap.pooled.params)])
    return dict(
        mu=config.l2,
        smoothness=float(objectives.smoothness(fed, l2=config.l2).max()),
        gap=max(gap.value, 0.0),
        optimum=gap.pooled.value,
        distance=float(flat @ flat),
        dim=flat.size,
        variance=variance,
        # how long a row's gradient can be, with a bias
        reach=float(np.sqrt(2 * (1 + np.square(rows).sum(1).max()))),
        dissimilarity=float(
            het.gradient_dissimilarity(task, best, fed, "uniform", l2=config.l2).variance
        ),
    )


def theorem(config, found, run):
    """Return A + B + H as printed, and our version of it; None if nothing is known.

    The run has no noise, the printed noise or the sound noise.
    """
    fed, clients = assemble.federation(config), config.clients
    shares, cohort = np.full(clients, 1 / clients), config.cohort or clients
    sampling_ = "full" if cohort == clients else config.sampler or "without_replacement"
    q, g = config.steps, config.clip_norm
    base = float(
        theory.gradient_term(
            shares, found["variance"], config.batch, q, g, found["smoothness"], found["gap"]
        )
    )
    paper = float(theory.sampling_term_printed(sampling_, q, g, clients, cohort))
    ours = float(theory.sampling_term(sampling_, q, g, shares, cohort))
    if run == "no noise":
        return base + paper, base + ours
    rows = int(np.asarray(fed.size).sum())
    theirs = float(
        theory.noise_term_printed(
            found["dim"],
            q,
            g,
            config.batch,
            rows,
            found["smoothness"],
            config.epsilon,
            config.delta,
        )
    )
    sound = float(
        theory.noise_term(found["dim"], q, g, shares, multiplier(config, fed), sampling_, cohort)
    )
    return base + paper + theirs, (base + ours + sound if run == "sound" else None)


def against(config, run, seeds):
    """Compare one run with its bounds.

    Each evaluation has the number of steps, the mean gap with its error, and both bounds.
    """
    found = constants(_problem(config))
    plain = (
        dict(epsilon=None)
        if run == "no noise"
        else dict(mode="as_printed")
        if run == "printed"
        else {}
    )
    falling = rates.theory(found["mu"], found["smoothness"], config.steps)
    made = build(dataclasses.replace(config, **plain), lr=falling)
    rounds = np.unique(np.geomspace(1, config.rounds, 16).astype(int))
    every = jax.device_get(trajectories.along(made, len(seeds), rounds))
    params = jax.tree.map(lambda v: v[1:], every)
    gaps = trajectories.objective(made, config.l2, params, "uniform") - found["optimum"]
    norms = sum(
        np.square(v, dtype=float).sum(tuple(range(2, v.ndim))) for v in jax.tree.leaves(params)
    )
    steps = rounds * config.steps
    terms, rest = (
        theorem(config, found, run),
        (found["distance"], found["mu"], found["smoothness"], config.steps),
    )
    paper = theory.bound_gap_printed(steps, terms[0], *rest)
    ours = None if terms[1] is None else theory.bound_gap(steps, terms[1], *rest)
    return dict(
        steps=steps,
        gap=gaps.mean(1),
        error=gaps.std(1) / np.sqrt(len(seeds)),
        printed=np.asarray(paper.value),
        ours=None if ours is None else np.asarray(ours),
        failed=paper.failed,
        norm=float(np.sqrt(norms).max()),
    )


def _problem(config):
    """Return the part of a config on which its constants depend."""
    return Config(l2=config.l2, **{f: getattr(config, f) for f in assemble.DATA})


def rounds_needed(config, found, target, run):
    """Return the rounds after which our bound is at most `target`, by number of local steps.

    Only numbers of local steps are used for which a client has enough rows.
    """
    rest = target, found["distance"], found["mu"], found["smoothness"]
    terms = lambda q: theorem(dataclasses.replace(config, steps=q), found, run)[1]
    most = int(np.asarray(assemble.federation(config).size).min()) // config.batch
    best = theory.optimal_local_steps(terms, *rest, most=most)
    tried = sorted({1, 2, 5, 10, 20, most, best} & set(range(1, most + 1)))
    return best, {
        q: float(theory.steps_to_accuracy(target, terms(q), *rest[1:], q)) / q for q in tried
    }


def bounds(experiment, out, quick):
    """Compare the measured F(w_t) - F* with the theorems.

    Also show how the rounds that a bound needs depend on the number of local steps.
    """
    settings, rows, cells, claims = (
        {**experiment.base, **(experiment.quick if quick else {})},
        [],
        {},
        [],
    )
    seeds = experiment.seeds
    for line, changes in experiment.lines.items():
        if quick and experiment.quick_lines and line not in experiment.quick_lines:
            continue
        config = Config(**{**settings, **changes})
        for run in ("no noise", "printed", "sound"):
            begun = time.perf_counter()
            seen = cells[f"{line}, {run}"] = against(config, run, seeds)
            seen["seconds"] = time.perf_counter() - begun
            rows.append(
                (
                    line,
                    run,
                    int(seen["steps"][-1]),
                    f"{seen['gap'][-1]:.3g} (standard error {seen['error'][-1]:.1g})",
                    *_above(seen["printed"], seen["gap"]),
                    *_above(seen["ours"], seen["gap"]),
                    _clips(config, seen),
                )
            )
    config = Config(**settings)
    found = constants(_problem(config))
    for which, text in (("printed", "the printed bound"), ("ours", "our bound")):
        held = {
            n: bool((c[which] >= c["gap"]).all()) for n, c in cells.items() if c[which] is not None
        }
        claims.append(
            Claim(
                f"{text} is at least the measured gap",
                exactly(all(held.values()), f"{sum(held.values())} of {len(held)} runs"),
                "paper" if which == "printed" else "ours",
            )
        )
    curves = {}
    for run in ("no noise", "sound"):
        best, curves[run] = rounds_needed(config, found, 0.1, run)
        words = f"least at Q={best}: " + ", ".join(f"{q}: {r:.3g}" for q, r in curves[run].items())
        claims.append(
            Claim(
                f"rounds to a gap of 0.1 by our bound first fall, then rise in Q, {run}",
                exactly(min(curves[run]) < best < max(curves[run]), words),
                "ours",
            )
        )
    known = {k: v for k, v in found.items() if k != "variance"} | dict(
        variance=float(np.max(found["variance"]))
    )
    return dict(
        claims=claims,
        columns=COLUMNS,
        rows=rows,
        note=NOTE,
        settings=dataclasses.asdict(config),
        constants=known,
        runs=softmax_rows.as_lists(cells),
        rounds_to_a_tenth=curves,
        seeds=list(seeds),
    )


def _above(bound, gap):
    """Return the last value of a bound, and how far it is above the gap if it always is."""
    if bound is None:
        return "", ""
    return f"{bound[-1]:.3g}", f"{np.log10(bound[-1] / gap[-1]):.1f} orders" if (
        bound >= gap
    ).all() else "BELOW"


def _clips(config, seen):
    """Return whether a gradient at a released model can be longer than the clip norm."""
    longest = constants(_problem(config))["reach"] + config.l2 * seen["norm"]
    return "no" if longest <= config.clip_norm else f"can, up to {longest:.2g}"
