"""Studies beyond the papers: each is one command, and leaves one picture and its numbers.

    python -m experiments.studies --list
    python -m experiments.studies frontier --quick --out runs/frontier

All points are vmapped sweeps, one program for each static group.  Noise is calibrated to the proved
epsilon.  A learning rate is chosen from a small grid by test accuracy, on separate seeds and
splits; no epsilon covers that choice.  Every run and every guarantee is a line of cells.jsonl under
the hash of its config, rows and program, so a study that was stopped resumes.  Data that are not on
this machine are listed as skipped.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfl.auditing import audit as auditing
from jfl.core.errors import DataUnavailable, HealthError, NotAnalysable
from jfl.core.files import ResultStore
from jfl.engine.sweep import sweep as run_points
from jfl.privacy import guarantees
from jfl.runs import build, guarantee_rows, record
from jfl.runs.checkpoint import environment
from jfl.runs.config import FIELDS, Config, the_unit, the_view
from jfl.runs.record import Stopwatch
from jfl.runs.statistics import interval

from ..bench.timing import commit
from ..harness.kept_runs import about, hashed
from ..harness.runner import Experiment
from ..papers import as_printed
from . import recipes, scattering
from .picture import picture, show
from .plans import PLANS
from .recipes import Made

FAST = "jax_disable_most_optimizations"
SOURCE = hashlib.sha256(
    b"".join(
        Path(module).read_bytes() for module in (__file__, recipes.__file__, scattering.__file__)
    )
).hexdigest()
SLACK = 1e-5  # of a calibrated epsilon, which a float32 multiplier may miss
# Fields that no accounting reads.
BLIND = (
    "lr",
    "server_lr",
    "mu",
    "upload",
    "preprocess",
    "clip_norm",
)
MEASURED = ("claimed", "audited", "ceiling", "trials", "confidence", "mu")
MEASURED += ("canary", "adversary", "estimator")
# These algorithms release equally often.
STEPPED = ("fedavg", "fedprox", "scaffold", "dpnfl", "addpnfl")


def key(kind: str, config: Config, more=()) -> str:
    """Return a hash of a config, its rows, jfl, this file and the machine."""
    return hashed(
        kind, record.plain(dataclasses.asdict(config)), list(more), SOURCE, *about(config.dataset)
    )


ABOUT = (
    dict(
        interval="95 % t-interval over seeds, each with its own split; comparisons are paired, and "
        "not corrected for their number",
        chosen_by="mean test accuracy on the seeds tuned_on, which is in no epsilon",
    ),
    dict(
        interval="each audited epsilon is a lower bound at its confidence, not corrected for their "
        "number",
    ),
)


# --- configs and their plans


def config_of(fields: dict) -> Config:
    """Return a config; a recipe in it names its plan."""
    return Made(**fields) if "recipe" in fields else Config(**fields)


def plan_of(config: Config):
    return recipes.plan_of(config) if isinstance(config, Made) else build.build(config)[0]


def proved(config: Config, plan):
    """Return the guarantee of a config's whole run, and of its plan."""
    if isinstance(config, Made):
        return recipes.worth(config)
    return guarantees.guarantee(
        plan,
        config.rounds,
        config.delta,
        the_unit(config),
        the_view(config),
        config.adjacency,
    )


# --- noise and what it proves


def with_noise(store: ResultStore, config: Config, splits) -> tuple[Config, dict | None]:
    """Return the config with its noise multiplier, and its guarantee for the worst of the splits.

    Noise is calibrated once for all algorithms that release alike; the guarantee is of each one's
    own plan.

    Raises:
        ValueError: if another split or algorithm would need more noise than was found.
    """
    if the_unit(config) is None:
        return config, None
    target = config.epsilon
    if target is not None:
        read = ["upload"] * (config.algorithm == "padpfl")
        read += ["preprocess"] * isinstance(config, Made)  # a recipe may ask for it
        blind = {f: FIELDS[f].default for f in BLIND if f not in read}
        alike = dataclasses.replace(
            config,
            **blind,
            partition_seed=splits[0],
            algorithm="fedavg" if config.algorithm in STEPPED else config.algorithm,
        )
        z = store.get(key("noise", alike), lambda: dict(z=multiplier(alike)))["z"]
        if isinstance(config, Made):
            one = z[0] if len(z) == 1 else None
            config = dataclasses.replace(config, noise=tuple(z), noise_multiplier=one)
        else:
            config = dataclasses.replace(config, noise_multiplier=z, epsilon=None)
    shown = dataclasses.replace(config, **{f: FIELDS[f].default for f in ("lr", "server_lr")})
    worst = store.get(key("privacy", shown, splits), lambda: _worst(shown, splits))
    if target is not None and worst["epsilon"] > target * (1 + SLACK):
        raise ValueError(
            f"experiments.studies: expected noise of an epsilon of {target:g} for all splits of "
            f"{config.algorithm}, but got {worst['epsilon']:.6g}.  Give all clients "
            "equally many rows."
        )
    return config, worst


def multiplier(config: Config):
    """Return the noise with which the config proves its epsilon."""
    if isinstance(config, Made):
        return recipes.noise_of(config)
    return build.build(config)[1].noise_multiplier


def _worst(config, splits):
    """Return the guarantee of the split that has the weakest one; splits of equal sizes are one."""
    found = {}
    for seed in splits:
        split = dataclasses.replace(config, partition_seed=seed)
        plan = plan_of(split)
        sizes = tuple(np.sort(np.asarray(plan.fed.size))) if the_unit(config) == "example" else ()
        if sizes not in found:
            found[sizes] = guarantee_rows.as_row(proved(split, plan))
    return max(found.values(), key=lambda g: math.inf if g["epsilon"] is None else g["epsilon"])


def claims_of(config: Config) -> dict:
    """Return what a paper claims for a plan as printed, and what is proved in the same view."""
    plan, found = build.build(config)
    view: Any = config.view
    told = as_printed.claimed(plan, config.rounds, config.delta, config.paper, view)
    try:
        worth = guarantee_rows.as_row(
            guarantees.guarantee(plan, config.rounds, config.delta, config.unit, config.view)
        )
    except NotAnalysable as error:  # it proves nothing
        worth = nothing_proved(config, config.unit, str(error))
    return guarantee_rows.add_caveats(worth, told.caveats) | dict(
        claimed=told.epsilon, claimed_method=told.method
    )


def nothing_proved(config: Config, unit: str | None, why: str) -> dict:
    """Return a guarantee as `guarantee_rows.as_row` has it, of a plan that has none."""
    return dict(
        unit=unit,
        adjacency="replace_one",
        view=config.view,
        delta=config.delta,
        epsilon=None,
        method="none",
        status="no guarantee",
        caveats=[why],
        codes=["not-analysable"],
        implied=False,
        rounds=None,
    )


def audit_of(config: Config, trials: int, unit: str | None = None, claim: bool = False) -> dict:
    """Return what an attack measures, what is proved and, with `claim`, what is claimed."""
    plan, _ = build.build(config)
    unit = unit or config.unit
    report = auditing.audit(plan, config.rounds, trials, config.delta, unit=unit, view=config.view)
    if report.proved is None:
        worth = nothing_proved(config, unit, report.why_not_proved)
    else:
        worth = guarantee_rows.as_row(report.proved)
    found = dict(
        claimed=as_printed.claimed_beside(plan, config.rounds, report) if claim else None,
        audited=report.epsilon,
        ceiling=auditing.ceiling(trials, config.delta, report.confidence),
        trials=trials,
        **{k: getattr(report, k) for k in ("confidence", "mu", "canary", "adversary", "estimator")},
    )
    return worth | record.plain(found)


# --- runs


def measure(store: ResultStore, wanted: list[Config], note=lambda text: None):
    """Run the configs that are not stored yet, those of one structure and number of rounds as one
    vmapped sweep."""
    missing = [c for c in dict.fromkeys(wanted) if key("run", c) not in store]
    plans, groups = {c: plan_of(c) for c in missing}, {}
    for c in missing:
        groups.setdefault((c.rounds, jax.tree.structure(plans[c])), []).append(c)
    for (rounds, _), group in groups.items():
        stopwatch = Stopwatch()
        try:
            result = run_points(
                lambda run, group=group: plans[group[run]],
                rounds=rounds,
                evaluate_every=rounds,
                points=[dict(run=i, seed=c.seed) for i, c in enumerate(group)],
            )
        except HealthError as error:  # all of them failed
            result = error.run
        seconds = stopwatch.read()[0] / len(group)
        store.put(
            dict(
                key=key("run", c),
                accuracy=float(np.asarray(result.metrics.accuracy)[i, -1]),
                loss=float(np.asarray(result.metrics.loss)[i, -1]),
                failed=bool(result.failed[i]),
                seconds=seconds,
            )
            for i, c in enumerate(group)
        )
        note(f"{group[0].algorithm} on {group[0].dataset}, {len(group)} runs of {seconds:.2f} s")


def accuracy(store, config):
    """Return the accuracy of a stored run; None if it failed."""
    run = store[key("run", config)]
    return None if run["failed"] else run["accuracy"]


def trained(store: ResultStore, cells, study, note) -> list[dict]:
    """Return a row per cell: noise, the choice from its grid, and the reported runs."""
    splits = (*study.seeds, *study.tune)
    seeded = lambda config, seed, more: dataclasses.replace(
        config, seed=seed, partition_seed=seed, **more
    )
    made = [with_noise(store, config_of(cell.fields), splits) for cell in cells]
    tune = [
        seeded(c, s, more)
        for (c, _), cell in zip(made, cells)
        if len(cell.grid) > 1
        for more in cell.grid
        for s in study.tune
    ]
    if study.together:
        measure(
            store,
            tune
            + [
                seeded(c, s, more)
                for (c, _), cell in zip(made, cells)
                for more in cell.grid
                for s in study.seeds
            ],
            note,
        )
    measure(store, tune, note)
    best = [
        choose(store, [[seeded(c, s, more) for s in study.tune] for more in cell.grid])
        for (c, _), cell in zip(made, cells)
    ]
    measure(
        store,
        [
            seeded(c, s, cell.grid[i])
            for (c, _), cell, (i, _) in zip(made, cells, best)
            for s in study.seeds
        ],
        note,
    )
    rows = []
    for (config, worth), cell, (i, scores) in zip(made, cells, best):
        values = {s: accuracy(store, seeded(config, s, cell.grid[i])) for s in study.seeds}
        good = {s: v for s, v in values.items() if v is not None}
        mean, half = interval(list(good.values())) if good else (None, None)
        rows.append(
            dict(
                panel=cell.panel,
                line=cell.line,
                x=cell.x,
                mean=mean,
                half=half,
                values=good,
                failed=len(values) - len(good),
                seeds=list(study.seeds),
                tuned_on=list(study.tune),
                chosen=cell.grid[i],
                grid=[dict(point, accuracy=v) for point, v in zip(cell.grid, scores)],
                at_edge=bool(ends(cell.grid, cell.grid[i])),
                target=cell.fields.get("epsilon"),
                noise_multiplier=config.noise_multiplier,
                **_promise(worth),
                config=record.plain(dataclasses.asdict(config)),
            )
        )
    return rows


def choose(store: ResultStore, grid: list) -> tuple[int, list]:
    """Return which point of a grid of configs has the best mean accuracy, and all of them; a run
    that failed counts as 0."""
    if len(grid) == 1:
        return 0, [None]
    scores = [float(np.mean([accuracy(store, c) or 0.0 for c in point])) for point in grid]
    return int(np.argmax(scores)), scores


def ends(grid: list[dict], chosen: dict) -> list[str]:
    """Return the fields of a grid, of more than two values each, whose chosen value is the smallest
    or the largest: what lies beyond may be better."""
    values = {n: {point[n] for point in grid if n in point} for n in chosen}
    numbers = {n: v for n, v in values.items() if all(isinstance(x, (int, float)) for x in v)}
    return [n for n, v in numbers.items() if len(v) > 2 and chosen[n] in (min(v), max(v))]


def _promise(worth):
    keys = ("epsilon", "delta", "unit", "adjacency", "view", "method", "status", "caveats")
    return dict.fromkeys(keys) if worth is None else {k: worth[k] for k in keys}


def accounted(store: ResultStore, cells, study, note) -> list[dict]:
    """Return a row per cell of a study without training: claimed and proved epsilon."""
    rows = []
    for cell in cells:
        config = Config(**cell.fields)
        found = store.get(key("claimed", config), lambda config=config: claims_of(config))
        rows.append(
            dict(
                panel=cell.panel,
                line=cell.line,
                x=found["claimed"],
                mean=found["epsilon"],
                half=None,
                values={},
                failed=0,
                stated=cell.x,
                claimed=found["claimed"],
                claimed_method=found["claimed_method"],
                **_promise(found),
                config=record.plain(dataclasses.asdict(config)),
            )
        )
        note(f"{cell.line}, stated {cell.x:g}")
    return rows


def audited(store: ResultStore, cells, study, note) -> list[dict]:
    """Return a row per cell of a study of audits: claimed, measured and proved epsilon."""
    rows = []
    for cell in cells:
        config, asked = Config(**cell.fields), dict(trials=study.trials) | cell.asked
        found = store.get(
            key("audit", config, sorted(asked.items())),
            lambda config=config, asked=asked: audit_of(config, **asked),
        )
        measured = {k: found[k] for k in MEASURED}
        rows.append(
            dict(
                panel=cell.panel,
                line=cell.line,
                x=cell.x,
                mean=None,
                half=None,
                values={},
                failed=0,
                stated=config.epsilon,
                **measured,
                **_promise(found),
                config=record.plain(dataclasses.asdict(config)),
            )
        )
        note(f"{cell.line}, audited {found['audited']:.3g}")
    return rows


ROWS = dict(accuracy=trained, epsilon=accounted, audit=audited)  # by what a study shows


# --- a study


@contextlib.contextmanager
def cheap_code(quick):
    """Compile a quick run with few optimisations, since it mostly compiles."""
    before = jax.config.read(FAST)
    jax.config.update(FAST, quick or before)
    try:
        yield
    finally:
        jax.config.update(FAST, before)


def study(name, experiment, out, quick) -> dict:
    """Run what is not in out/cells.jsonl yet, draw NAME.png in `out`, and return the findings."""
    with cheap_code(quick):
        return _study(name, out, quick)


def _study(name, out, quick):
    begun, plan, store = time.perf_counter(), PLANS[name](quick), ResultStore(out / "cells.jsonl")
    note = lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True)
    rows, skipped = [], {}
    for cell in plan.cells:
        if cell.fields["dataset"] not in skipped:
            try:
                build.federation(config_of(cell.fields))
            except DataUnavailable as error:
                skipped[cell.fields["dataset"]] = str(error)  # data that are not on this machine
    for panel in dict.fromkeys(c.panel for c in plan.cells):
        cells = [c for c in plan.cells if c.panel == panel and c.fields["dataset"] not in skipped]
        if cells:
            rows += ROWS[plan.y](store, cells, plan, note)
    rows += plan.printed
    by = {(r["panel"], r["line"], r["x"]): r for r in rows}
    verdicts = [
        dict(zip(("claim", "verdict", "seen"), (c.text, *c.check(by)))) for c in plan.claims
    ]
    show(plan, rows, skipped, quick)
    if rows:
        picture(out / f"{name}.png", plan, rows, quick)
    return dict(
        title=plan.title,
        xlabel=plan.xlabel,
        points=rows,
        verdicts=verdicts,
        unread=skipped,
        **ABOUT[plan.y == "audit"],
        commit=commit(),
        seconds=time.perf_counter() - begun,
        versions=environment() | dict(optimised=not jax.config.read(FAST)),
    )


def _experiment(name):
    plan, run = PLANS[name](False), functools.partial(study, name)
    return Experiment(
        plan.title, {}, dict.fromkeys(c.panel for c in plan.cells), plan.claims, special=run
    )


EXPERIMENTS = {name: _experiment(name) for name in PLANS}
