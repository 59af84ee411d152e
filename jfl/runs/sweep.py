"""A sweep in a directory: every point checked before the first one runs, then run, saved,
reported."""

import dataclasses
import time

import jax
import numpy as np

from ..core import checks, identity
from ..core.errors import HealthError
from ..core.records import Caveat, Health
from ..data.federation import checksum
from ..engine.round import init
from ..engine.simulate import scan
from ..engine.sweep import points_of, widened, widths
from ..privacy.ledger import segments
from . import blocks as points
from . import build, checkpoint, unused_options
from . import config as configs
from . import record as report
from .blocks import Block, Local, Results
from .checkpoint import write
from .config import Config
from .train import (
    LOCK,
    alone,
    claim,
    claims,
    epsilons,
    noise_warning,
    privacy,
    shown_epsilon,
    shown_label,
)

SELECTION = Caveat("choosing among the points of the sweep is not counted", "selection")
FILE = "points.jsonl"
# evaluations of all settings together whose epsilon is proved as tightly as that of a whole run
TIGHT = 256


def sweep(  # noqa: C901
    config: Config,
    axes: dict,
    out,
    strict: bool = False,
    *,
    resume: bool = False,
    engine=None,
    block: int | None = None,
    watch=lambda **seen: None,
    warn=lambda text: None,
) -> list[dict]:
    """Run the cartesian product of `axes` over config fields in directory `out` -> entries of
    summary.json.

    Points that share their static part are one program, in blocks.  A point that fails is marked;
    the others go on. What is done is in OUT/points.jsonl: a sweep that was stopped goes on with
    `resume`.

    Args:
        engine: points.Local(), in this process, or cluster.Ray(...), over machines.
        block: points of a block at most; default what memory holds, and a size that suits the
            engine. watch(completed=..., total=..., note=...), some of them, as points are done.
            warn(text), once before the first point where some have so much noise that nothing can
            be learned.

    Raises:
        ValueError: before anything is written; HealthError if all points failed, with `strict` if
            any did.
    """
    out = claim(out, resume)
    for name, values in axes.items():
        for value in values:
            configs.coerce(name, value, "sweep")
        if len(set(values)) < len(values):
            checks.fail("sweep", f"each value of {name} once", values)
    if "rounds" in axes or "evaluate_every" in axes:
        checks.fail(
            "sweep",
            "one number of rounds and evaluations for all points",
            "an axis of them",
            "Run one sweep for each.",
        )
    if block is not None:
        checks.whole("sweep", block=block)
    grid = [dict(seed=config.seed) | p for p in points_of(axes)]
    unused_options.refuse_idle(*(dataclasses.replace(config, **point) for point in grid))
    facts = points.plain(dict(config=dataclasses.asdict(config), axes=axes, code=checkpoint.code()))
    known = _stored(out, facts, resume).head  # refuses before plans are built
    # every plan is built, calibrated and checked before the first runs, and once for all its seeds
    built, traced, warnings = {}, set(), {}
    for point in grid:
        checks.seed("sweep", seed=point["seed"])
        if _setting(point) in built:
            continue
        plan, found = built[_setting(point)] = build.build(dataclasses.replace(config, **point))
        epsilons(plan, found, [config.rounds], most=0), claims(plan, found, config.rounds)
        if text := noise_warning(plan, found):
            warnings[_setting(point)] = text
        shape = jax.tree.structure(plan), tuple(np.shape(x) for x in jax.tree.leaves(plan))
        if known is None and shape not in traced:
            jax.eval_shape(
                lambda key, plan=plan: scan(init(key, plan), plan, [1]), jax.random.key(0)
            )
            traced.add(shape)
    if warnings:
        worst = next(iter(warnings))
        words = " ".join(f"{k}={v}" for k, v in worst) or "each point"
        warn(
            f"{len(warnings)} of {len(built)} settings, "
            f"{'the first ' * (len(warnings) > 1)}{words}: {warnings[worst]}"
        )
    every = _every(grid, built)
    said = {id(plan): identity.describe(plan) for plan in every.plans}
    keys = [
        points.key(c, data, identity.signature(said[id(plan)]))
        for c, data, plan in zip(every.configs, every.data, every.plans)
    ]
    first = points.plain(said[id(every.plans[0])])
    with (engine or Local()).open(watch) as at, alone(out):
        claim(out, resume)  # again, now that nobody else can write
        store = _stored(out, facts, resume)
        if store.head is None:
            store.begin(
                facts
                | dict(
                    plan=first,
                    programs=[
                        [[keys[i] for i in members] for members in group]
                        for group in points.programs(
                            every.plans, at.memory, block or at.most(len(grid))
                        )
                    ],
                )
            )
            write(
                out / "config.toml",
                configs.dump(
                    dict(dataclasses.asdict(config), sweep=axes),
                    "jfl sweep --config config.toml --out DIR",
                ),
            )
        elif {k for group in store.head["programs"] for members in group for k in members} != set(
            keys
        ):
            lines = identity.differences(store.head["plan"], first)
            checks.fail(
                f"sweep {out}",
                "the data and plans that it was made from",
                "; ".join(lines[:5]) or "others",
                "Resume with the same data, or start in another directory.",
            )
        return _sweep(config, axes, grid, keys, every, store, at, out, strict, watch)


def _setting(point: dict) -> tuple:
    """What a point is but for its seed."""
    return tuple((k, v) for k, v in point.items() if k != "seed")


def _every(grid, built) -> Block:
    """All points, as if they were one block."""
    found = [built[_setting(p)] for p in grid]
    sums = {
        id(plan.fed): checksum(plan.fed)
        for plan in {id(plan.fed): plan for plan, _ in found}.values()
    }
    plans = {id(plan): plan for plan, _ in found}
    plans = dict(zip(plans, widened(list(plans.values()), widths(list(plans.values())))))
    return Block(
        list(range(len(grid))),
        [dataclasses.replace(c, seed=p["seed"]) for p, (_, c) in zip(grid, found)],
        [sums[id(plan.fed)] for plan, _ in found],
        [plans[id(plan)] for plan, _ in found],
        len(grid),
    )


def _stored(out, facts, resume) -> Results:
    """What is there of this very sweep."""
    store = Results(out / FILE)
    if not resume:
        return store
    if not store.path.exists() and out.is_dir() and any(p.name != LOCK for p in out.iterdir()):
        checks.fail(
            "--resume",
            f"a sweep with its {FILE} in {out}",
            "a directory without one",
            "Start in another directory.",
        )
    if store.head is not None:
        old, new = (
            {f"{part} {k}".removeprefix("config "): v for part in facts for k, v in x[part].items()}
            for x in (store.head, facts)
        )
        differ = [
            f"{k}: {old.get(k)!r} there, {new.get(k)!r} here"
            for k in old | new
            if old.get(k) != new.get(k)
        ]
        if differ:
            checks.fail(
                f"sweep {out}",
                "the config, the axes and the program that made it",
                "; ".join(differ),
                f"jfl sweep --config {out}/config.toml --resume --out {out} has the same values; a "
                f"sweep by "
                "another program starts in another directory.",
            )
    return store


def _sweep(config, axes, grid, keys, every, store, at, out, strict, watch):
    names, begun, place = list(axes), time.perf_counter(), {k: i for i, k in enumerate(keys)}
    blocks = [
        Block(*([x[place[k]] for k in members] for x in every[:4]), len(group[0]))
        for group in store.head["programs"]
        for members in group
        if not store.found.keys() >= set(members)
    ]
    resumed = sum(k in store.found for k in keys)
    watch(completed=resumed, total=len(grid), note="compiling")
    for done, records in at.run(blocks, widths(every.plans)):
        store.put([dict(key=keys[i], point=grid[i]) | r for i, r in zip(done.at, records)])
        watch(
            completed=sum(k in store.found for k in keys),
            note=f"{at.name}, {at.nodes} nodes" * (at.nodes > 1),
        )
    records, total = [store.found[k] for k in keys], time.perf_counter() - begun
    entries, table, groups, proved = [], [], {}, {}
    caveats = [SELECTION, *segments.sharing(every.plans, [p["seed"] for p in grid])]
    most = max(1, TIGHT // len({_setting(p) for p in grid}))
    for point, found, plan, record in zip(grid, every.configs, every.plans, records):
        history = record["history"]
        name = f"{found.algorithm} " + " ".join(f"{k}={point[k]}" for k in names if k != "seed")
        same = name.strip()
        if same not in proved:
            guarantees = [
                report.with_caveats(g, caveats) for g in privacy(plan, found, config.rounds)
            ]
            last = shown_epsilon(guarantees, found)
            proved[same] = (
                guarantees,
                epsilons(plan, found, history["round"], last, min(most, report.TIGHT)),
            )
        guarantees, eps = proved[same]
        took, compiled = record["seconds"], record["compile"]  # a point's share of its block's
        seconds = dict(
            compile=compiled, total=took, per_round=max(0.0, took - compiled) / config.rounds
        )
        entry = report.entry(
            same, dataclasses.asdict(found), found.seed, history, guarantees, seconds
        )
        if any(n for f, n in record["health"].items() if f not in found.tolerate()):
            entry["failed"] = record["health"]
        entries.append(entry)
        table += report.rows(same, found.seed, history, eps)
        if "failed" not in entry and history.get("accuracy"):
            g = groups.setdefault(
                same,
                dict(
                    label=f"{same}, " + shown_label(guarantees, found),
                    round=history["round"],
                    accuracy=[],
                    epsilon=shown_epsilon(guarantees, found),
                ),
            )
            g["accuracy"].append(history["accuracy"])
    first = build.the_partition(
        dataclasses.replace(config, **grid[0])
    )  # the manifest shows the first point's data
    ran = dict(
        name=at.name,
        nodes=at.nodes,
        workers=len({r["worker"] for r in records}),
        devices=sorted({r["device"] for r in records}),
        resumed=resumed,
    )
    report.save(
        out,
        entries,
        table,
        report.manifest(
            every.plans,
            first,
            config.rounds,
            groups=len(store.head["programs"]),
            seconds=total,
            seeds=sorted({p["seed"] for p in grid}),
            engine=ran,
        ),
    )
    if groups:
        report.picture(
            out / "sweep.png",
            list(groups.values())[:16],
            f"sweep over {', '.join(names)} on {config.dataset}",
        )
    failed = sum("failed" in e for e in entries)
    if failed == len(entries) or (strict and failed):
        health = Health(
            *(np.array([r["health"].get(f, 0) for r in records]) for f in Health._fields)
        )
        raise HealthError(
            (
                f"sweep: need a healthy point; {failed} of {len(entries)} failed. Results are in "
                f"{out}."
            ),
            None,
            health,
        )
    return entries
