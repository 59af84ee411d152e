"""Lines of an experiment as vmapped programs: the points of all lines that share their static part,
in blocks.

A point is a config and a seed.  Lines differ in noise, rates, schedules, partitions; what is no
leaf of their plans, and the number of rounds, makes another program.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from jfl.core.records import Plan
from jfl.engine.round import init
from jfl.engine.simulate import scan
from jfl.engine.sweep import widened, widths
from jfl.runs import blocks as points
from jfl.runs import build as assemble
from jfl.runs import record as report
from jfl.runs import train, unused_options
from jfl.runs.config import Config
from jfl.runs.sweep import SELECTION

AT_ONCE = 64  # points of a block at most: what is lost if it is stopped


def assembled(config: Config):
    """As `jfl sweep` makes them."""
    unused_options.refuse_idle(config)
    return assemble.build(config)


def proved(plan: Plan, config: Config) -> list[dict]:
    """As `jfl sweep` has it; refuses a sound config whose noise proves nothing."""
    train.epsilons(plan, config, [config.rounds], most=0)
    return [
        report.with_caveats(g, (SELECTION,)) for g in train.privacy(plan, config, config.rounds)
    ]


@dataclasses.dataclass(frozen=True)
class Plans:
    """How the config of a line becomes the plans of its seeds, and what is told of them.

    build      config -> the plan, and the config with what was found, such as a noise multiplier
    seeded     every seed of a config has a plan of its own, such as another split
    privacy    (plan, config) -> its guarantees, as rows of a report
    epsilons   (plan, config, rounds) -> epsilon after each of them; None: not in the table
    partition  config -> what the manifest says of the split
    trace      name -> the metric that a figure shows under it
    """

    build: Callable = assembled
    seeded: bool = False
    privacy: Callable = proved
    epsilons: Callable | None = train.epsilons
    partition: Callable | None = assemble.the_partition
    trace: tuple = ()


@dataclasses.dataclass(frozen=True)
class Point:
    """One run: a seed of a line, which is kept in `home`."""

    home: Path
    config: Config
    seed: int


def blocks(asked: list[Point], plans: Plans):
    """Check all points, then run them; yields for each block, of each home in it, what to save of
    its seeds.

    That is (home, entries of summary.json, rows of metrics.csv, manifest).

    Raises:
        ValueError: of any point before the first one runs.
    """
    built = {}
    for p in asked:
        if (which := (p.home, p.seed * plans.seeded)) not in built:
            built[which] = plans.build(dataclasses.replace(p.config, seed=p.seed))
    made = _shared([built[p.home, p.seed * plans.seeded] for p in asked])
    proved, curves, groups, traced = {}, {}, {}, set()
    # of a line, another split with as many rows is worth the same
    worth = [(p.home, np.asarray(plan.fed.size).tobytes()) for p, (plan, _) in zip(asked, made)]
    for i, (plan, found) in enumerate(made):
        if worth[i] not in proved:
            proved[worth[i]] = plans.privacy(plan, found)
        # another data set would be stacked beside the first one in a program, row by row
        groups.setdefault((found.rounds, found.evaluate_every, id(plan.fed.x)), []).append(i)
        if (
            shape := (jax.tree.structure(plan), tuple(np.shape(x) for x in jax.tree.leaves(plan)))
        ) not in traced:
            jax.eval_shape(
                lambda key, plan=plan: scan(init(key, plan), plan, [1]), jax.random.key(0)
            )
            traced.add(shape)
    engine = points.Local()
    for group in groups.values():
        mine = [made[i][0] for i in group]
        mine = widened(mine, widths(mine))
        for program in points.programs(
            mine, points.memory(), min(AT_ONCE, engine.most(len(group)))
        ):
            for members in program:
                at = [group[m] for m in members]
                configs = [dataclasses.replace(made[i][1], seed=asked[i].seed) for i in at]
                records = points.compute(
                    points.Block(at, configs, [], [mine[m] for m in members], len(program[0]))
                )
                homes = {}
                for i, config, record in zip(at, configs, records):
                    if plans.epsilons and worth[i] not in curves:
                        curves[worth[i]] = plans.epsilons(
                            made[i][0], config, record["history"]["round"]
                        )
                    homes.setdefault(asked[i].home, []).append(
                        (made[i][0], config, record, proved[worth[i]], curves.get(worth[i]))
                    )
                yield [(home, *_told(plans, runs)) for home, runs in homes.items()]


def _shared(made):
    """The (plan, config) pairs with one array for rows that are the same, whoever owns them."""
    kept, feds = {}, {}

    def one(name, x):
        known = kept.setdefault((name, x.shape, x.dtype), [])
        for k in known:
            if k is x or bool((k == x).all()):
                return k
        known.append(x)
        return x

    for fed in {id(plan.fed): plan.fed for plan, _ in made}.values():
        feds[id(fed)] = dataclasses.replace(
            fed, **{n: one(n, getattr(fed, n)) for n in ("x", "y", "x_test", "y_test")}
        )
    return [(dataclasses.replace(plan, fed=feds[id(plan.fed)]), found) for plan, found in made]


def _told(plans, runs):
    """The entries, rows and manifest of the runs (plan, config, record, guarantees, epsilons) of a
    line."""
    entries, table, (first, config, *_) = [], [], runs[0]
    for _, config, record, proved, epsilons in runs:
        took, compiled, history = record["seconds"], record["compile"], record["history"]
        seconds = dict(
            compile=compiled, total=took, per_round=max(0.0, took - compiled) / config.rounds
        )
        entry = report.entry(
            config.algorithm, dataclasses.asdict(config), config.seed, history, proved, seconds
        )
        if plans.trace:
            entry["trace"] = {name: history[metric] for name, metric in plans.trace}
        if any(n for f, n in record["health"].items() if f not in config.tolerate()):
            entry["failed"] = record["health"]
        entries.append(entry)
        table += report.rows(config.algorithm, config.seed, history, epsilons)
    manifest = report.manifest(
        [first],
        plans.partition(config) if plans.partition else None,
        config.rounds,
        seeds=[e["seed"] for e in entries],
    )
    return entries, table, manifest
