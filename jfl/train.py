"""A run, or a sweep, in a directory: computed in segments, saved, resumed, reported."""
import dataclasses
import json
import time
from pathlib import Path

import jax
import numpy as np

from . import assemble, check, report
from . import config as configs
from .checkpoint import Store, resume_attempt, write
from .config import Config
from .data.federation import checksum
from .privacy import accounting
from .privacy.bounds import check_delta
from .round import start
from .simulate import HealthError, scan, schedule, simulate
from .sweep import points_of
from .sweep import sweep as run_sweep


def claim(out, resume: bool) -> Path:
    """The run directory, checked but not made: a run that is refused leaves nothing behind."""
    out = Path(out)
    if out.exists() and not out.is_dir():
        check.fail("--out", "a directory", f"{out} is a file")
    if out.is_dir() and any(out.iterdir()) and not resume:
        check.fail("--out", "an empty or new directory", f"{out} with files in it", "Use --resume to go on with that "
                   "run, or another --out: nothing is overwritten.")
    return out


def epsilons(plan, config, rounds):
    """Epsilon after each number of rounds for the chosen unit and view; None where nothing is proved."""
    if configs.the_unit(config) is None:
        return None
    return accounting.epsilons(plan, np.asarray(rounds), config.delta, configs.the_unit(config), configs.the_view(config))


def train(config: Config, out, resume: bool = False, watch=lambda **seen: None) -> dict:
    """Train one plan in directory `out` -> its entry of summary.json.

    Rounds run in segments that end at evaluations; a checkpoint is complete before the next segment begins.
    `watch(round, accuracy, loss, epsilon)` is called after each evaluation.

    Errors   ValueError before anything is written; HealthError with the last good checkpoint kept.
    """
    out = claim(out, resume)
    asked = config
    plan, config = assemble.build(config)
    every = int(schedule(config.rounds, None)[0]) if config.evaluate_every is None else config.evaluate_every
    schedule(config.rounds, every)                        # refuses what is no cadence
    save_every = every if config.checkpoint_every is None else config.checkpoint_every
    check.whole("config", checkpoint_every=save_every)
    planned = np.unique(np.append(np.arange(every, config.rounds, every), config.rounds))
    check_delta(config.delta)
    epsilons(plan, config, planned)                       # refuses now what it would refuse at the end
    jax.eval_shape(lambda key: scan(start(key, plan), plan, [1]), jax.random.key(0))       # and shapes that do not fit
    key, store = jax.random.key(config.seed), Store(out)
    run, history, recomputed, spent = start(key, plan), {}, 0, 0.0
    facts = dict(config=json.loads(json.dumps(report.plain(dataclasses.asdict(config)))), data=checksum(plan.fed))
    if resume and out.is_dir() and any(out.iterdir()):
        journal = store.journal()
        if journal is None:
            check.fail("--resume", f"a run with its journal in {out}", "a directory without one", "Which rounds were seen "
                       "is not known: start in another directory.")
        _same(journal, facts, out)
        if store.latest() is not None:
            meta = store.meta()
            _same(meta, facts, out)
            run, history, spent = store.restore(run), meta["history"], meta["seconds"]
            if int(run.round) > config.rounds:
                check.fail("--rounds", f">= {int(run.round)}, the rounds done", config.rounds)
        run, recomputed = resume_attempt(run, journal)
    eps = epsilons(plan, config, planned + recomputed)
    eps = {} if eps is None else dict(zip(planned.tolist(), eps.tolist()))

    out.mkdir(parents=True, exist_ok=True)
    write(out / "config.toml", configs.dump(dataclasses.asdict(asked), "jfl train --config config.toml --out DIR"))
    done = saved = int(run.round)
    begun, compiling = time.perf_counter(), report.compile_seconds()
    while done < config.rounds:
        n = int(planned[np.searchsorted(planned, done, side="right")]) - done
        store.announce(done + n, int(run.attempt), recomputed, **facts)
        try:
            result = simulate(key, plan, n, evaluate_every=n, start=run, tolerate=config.tolerate())
        except HealthError as error:
            raise HealthError(f"{error} Last good checkpoint: " + (f"round {saved} in {out}" if saved else "none") + ".",
                              error.run, error.health) from None
        run, seen = result.run, report.lists(result.metrics)
        done = int(run.round)
        for k, values in seen.items():
            history.setdefault(k, []).extend(values)
        if done - saved >= save_every or done == config.rounds:
            store.save(run, dict(facts, history=history, seconds=spent + time.perf_counter() - begun))
            saved = done
        watch(round=done, accuracy=(seen.get("accuracy") or [None])[-1], loss=seen["loss"][-1], epsilon=eps.get(done))
    store.close()

    total, compiling = spent + time.perf_counter() - begun, report.compile_seconds() - compiling
    guarantees = report.privacy(plan, config.rounds + recomputed, config.delta)
    eps = epsilons(plan, config, np.asarray(history["round"]) + recomputed)
    values = dataclasses.asdict(config) | dict(recomputed=recomputed)
    seconds = dict(compile=compiling, total=total, per_round=max(0.0, total - compiling) / config.rounds)
    entry = report.entry(config.algorithm, values, config.seed, history, guarantees, seconds)
    report.save(out, [entry], report.rows(config.algorithm, config.seed, history, eps),
                report.manifest([plan], assemble.the_partition(config), seeds=[config.seed], recomputed=recomputed,
                                attempt=int(run.attempt)))
    if history.get("accuracy"):
        report.picture(out / "accuracy.png", [dict(
            label=f"{config.algorithm}, " + _label(guarantees, config), round=history["round"],
            accuracy=[history["accuracy"]], epsilon=_epsilon(guarantees, config))], f"{config.algorithm} on {config.dataset}")
    return entry


def _same(stored: dict, facts: dict, out):
    """A run goes on if all but its length and cadence is the same."""
    old, new = stored["config"], facts["config"]
    differ = [k for k in new if k not in configs.RUN_ONLY and old.get(k) != new[k]]
    if differ:
        check.fail(f"checkpoint {out}", "the config that made it",
                   "; ".join(f"{k}: {old.get(k)!r} there, {new[k]!r} here" for k in differ),
                   "Resume with the same values, or start in another directory.")
    if stored["data"] != facts["data"]:
        check.fail(f"checkpoint {out}", f"the data it was made from, {stored['data']}", facts["data"],
                   "Resume with the same data, or start in another directory.")


def _mine(guarantees, config):
    unit, view = configs.the_unit(config), configs.the_view(config)
    fit = [g for g in guarantees if g["unit"] == unit and g["view"] == view and g["epsilon"] is not None]
    return fit[0] if fit else None


def _epsilon(guarantees, config):
    found = _mine(guarantees, config)
    return found and found["epsilon"]


def _label(guarantees, config):
    found = _mine(guarantees, config)
    return report.label([found] if found else [])


def sweep(config: Config, axes: dict, out, strict: bool = False) -> list[dict]:
    """Run the cartesian product of `axes` over config fields in directory `out` -> entries of summary.json.

    Points that share their static part are one program.  A point that fails is marked; the others go on.
    """
    out = claim(out, resume=False)
    names = list(axes)
    for name in axes:
        configs.coerce(name, axes[name][0], "sweep")
    if "rounds" in axes or "evaluate_every" in axes:
        check.fail("sweep", "one number of rounds and evaluations for all points", "an axis of them",
                   "Run one sweep for each.")
    grid = [dict(seed=config.seed) | p for p in points_of(axes)]
    check_delta(config.delta)

    def make_plan(**fields):
        point = dataclasses.replace(config, **fields)
        plan, found = assemble.build(point)
        epsilons(plan, found, [found.rounds])
        return plan

    begun, compiled = time.perf_counter(), report.compile_seconds()
    try:
        result = run_sweep(make_plan, points=grid, rounds=config.rounds, evaluate_every=config.evaluate_every,
                           tolerate=config.tolerate())
    except HealthError as error:                          # all failed: the report says so, then the exit code
        result = error.run
    total, compiled = time.perf_counter() - begun, (report.compile_seconds() - compiled) / len(result.points)
    out.mkdir(parents=True, exist_ok=True)
    listed = dict(dataclasses.asdict(config), sweep=axes)
    write(out / "config.toml", configs.dump(listed, "jfl sweep --config config.toml --out DIR"))
    entries, table, groups, proved = [], [], {}, {}
    for i, (point, plan) in enumerate(zip(result.points, result.plans)):
        found = assemble.build(dataclasses.replace(config, **point))[1]
        history = report.lists(result.metrics, i)
        name = f"{found.algorithm} " + " ".join(f"{k}={point[k]}" for k in names if k != "seed")
        same = name.strip()
        if same not in proved:
            proved[same] = report.privacy(plan, config.rounds, config.delta), epsilons(plan, found, history["round"])
        guarantees, eps = proved[same]
        took = float(result.seconds[i])                   # a point's share, as is `compiled`
        seconds = dict(compile=compiled, total=took, per_round=max(0.0, took - compiled) / config.rounds)
        entry = report.entry(same, dataclasses.asdict(found), found.seed, history, guarantees, seconds)
        if result.failed[i]:
            entry["failed"] = {k: int(v[i]) for k, v in result.health._asdict().items()}
        entries.append(entry)
        table += report.rows(same, found.seed, history, eps)
        if not result.failed[i] and history.get("accuracy"):
            g = groups.setdefault(same, dict(label=f"{same}, " + _label(guarantees, found), round=history["round"],
                                             accuracy=[], epsilon=_epsilon(guarantees, found)))
            g["accuracy"].append(history["accuracy"])
    report.save(out, entries, table, report.manifest(result.plans, assemble.the_partition(config), groups=result.groups,
                                                     seconds=total, seeds=sorted({p["seed"] for p in result.points})))
    if groups:
        report.picture(out / "sweep.png", list(groups.values())[:16], f"sweep over {', '.join(names)} on {config.dataset}")
    if result.failed.all() or (strict and result.failed.any()):
        raise HealthError(f"sweep: need a healthy point; {int(result.failed.sum())} of {len(entries)} failed. Results are "
                          f"in {out}.", None, result.health)
    return entries
