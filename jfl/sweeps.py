"""A sweep in a directory: every point checked before the first one runs, then run, saved, reported."""
import dataclasses
import time

import jax
import numpy as np

from . import assemble, check, idle, report
from . import config as configs
from .checkpoint import write
from .config import Config
from .round import start
from .simulate import HealthError, scan
from .sweep import points_of
from .sweep import sweep as run_sweep
from .train import alone, claim, claims, epsilons, privacy, shown_epsilon, shown_label

SELECTION = "choosing among the points of the sweep is not counted"


def sweep(config: Config, axes: dict, out, strict: bool = False) -> list[dict]:
    """Run the cartesian product of `axes` over config fields in directory `out` -> entries of summary.json.

    Points that share their static part are one program.  A point that fails is marked; the others go on.
    """
    out = claim(out, resume=False)
    for name, values in axes.items():
        for value in values:
            configs.coerce(name, value, "sweep")
        if len(set(values)) < len(values):
            check.fail("sweep", f"each value of {name} once", values)
    if "rounds" in axes or "evaluate_every" in axes:
        check.fail("sweep", "one number of rounds and evaluations for all points", "an axis of them",
                   "Run one sweep for each.")
    grid = [dict(seed=config.seed) | p for p in points_of(axes)]
    idle.refuse_idle(*(dataclasses.replace(config, **point) for point in grid))
    # every plan is built, calibrated and checked before the first runs, and once for all its seeds
    built, traced = {}, set()
    for point in grid:
        check.seed("sweep", seed=point["seed"])
        if _setting(point) in built:
            continue
        plan, found = built[_setting(point)] = assemble.build(dataclasses.replace(config, **point))
        epsilons(plan, found, [config.rounds]), claims(plan, found, config.rounds)
        shape = jax.tree.structure(plan), tuple(np.shape(x) for x in jax.tree.leaves(plan))
        if shape not in traced:
            jax.eval_shape(lambda key, plan=plan: scan(start(key, plan), plan, [1]), jax.random.key(0))
            traced.add(shape)
    with alone(out):
        claim(out, resume=False)
        write(out / "config.toml", configs.dump(dict(dataclasses.asdict(config), sweep=axes),
                                                "jfl sweep --config config.toml --out DIR"))
        return _sweep(config, axes, grid, built, out, strict)


def _setting(point: dict) -> tuple:
    """What a point is but for its seed."""
    return tuple((k, v) for k, v in point.items() if k != "seed")


def _sweep(config, axes, grid, built, out, strict):
    names, begun, compiled = list(axes), time.perf_counter(), report.compile_seconds()
    try:
        result = run_sweep(lambda **point: built[_setting(point)][0], points=grid, rounds=config.rounds, evaluate_every=config.evaluate_every,
                           tolerate=config.tolerate())
    except HealthError as error:                          # all failed: the report says so, then the exit code
        result = error.run
    total, compiled = time.perf_counter() - begun, (report.compile_seconds() - compiled) / len(result.points)
    entries, table, groups, proved = [], [], {}, {}
    for i, (point, plan) in enumerate(zip(result.points, result.plans)):
        found = dataclasses.replace(built[_setting(point)][1], seed=point["seed"])
        history = report.lists(result.metrics, i)
        name = f"{found.algorithm} " + " ".join(f"{k}={point[k]}" for k in names if k != "seed")
        same = name.strip()
        if same not in proved:
            proved[same] = privacy(plan, found, config.rounds), epsilons(plan, found, history["round"])
            for g in proved[same][0]:
                g["caveats"].append(SELECTION)
        guarantees, eps = proved[same]
        took = float(result.seconds[i])                   # a point's share, as is `compiled`
        seconds = dict(compile=compiled, total=took, per_round=max(0.0, took - compiled) / config.rounds)
        entry = report.entry(same, dataclasses.asdict(found), found.seed, history, guarantees, seconds)
        if result.failed[i]:
            entry["failed"] = {k: int(v[i]) for k, v in result.health._asdict().items()}
        entries.append(entry)
        table += report.rows(same, found.seed, history, eps)
        if not result.failed[i] and history.get("accuracy"):
            g = groups.setdefault(same, dict(label=f"{same}, " + shown_label(guarantees, found), round=history["round"],
                                             accuracy=[], epsilon=shown_epsilon(guarantees, found)))
            g["accuracy"].append(history["accuracy"])
    first = assemble.the_partition(dataclasses.replace(config, **grid[0]))         # the manifest shows the first point's data
    report.save(out, entries, table, report.manifest(result.plans, first, config.rounds, groups=result.groups, seconds=total,
                                                     seeds=sorted({p["seed"] for p in result.points})))
    if groups:
        report.picture(out / "sweep.png", list(groups.values())[:16], f"sweep over {', '.join(names)} on {config.dataset}")
    if result.failed.all() or (strict and result.failed.any()):
        raise HealthError(f"sweep: need a healthy point; {int(result.failed.sum())} of {len(entries)} failed. Results are "
                          f"in {out}.", None, result.health)
    return entries
