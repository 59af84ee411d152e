"""Run lines of an experiment as vmapped programs, in blocks of points that share a static part.

A point is a config and a seed.  Lines may differ in noise, rates, schedules and partitions; a
difference in what is not a leaf of their plans, or in the number of rounds, makes another program.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from jfl.core.records import Plan
from jfl.engine.sweep import pad_row_tables
from jfl.runs import build as assembly
from jfl.runs import guarantee_rows, record, train
from jfl.runs import sweep as sweeps
from jfl.runs.config import Config, refuse_unused
from jfl.runs.record import RunRecord
from jfl.runs.sweep import SELECTION, Block, Point
from jfl.runs.train import trace_once

# A figure shows accuracy against rounds under these names.
CURVE = (("curve", "accuracy"), ("round", "round"))
MAX_BLOCK_POINTS = 64  # at most this number is lost if a run is stopped


def assembled(config: Config):
    """Build a plan as `jfl sweep` does."""
    refuse_unused(config)
    return assembly.build(config)


def drawn(config: Config):
    """Build a plan like `assembled`, with a separate draw or split of the data for each seed."""
    return assembled(dataclasses.replace(config, partition_seed=config.seed))


def proved(plan: Plan, config: Config) -> list[dict]:
    """Return guarantees like `jfl sweep`; reject a sound config whose noise proves nothing."""
    train.epsilons(plan, config, [config.rounds], most=0)
    return guarantees(plan, config)


def guarantees(plan: Plan, config: Config) -> list[dict]:
    """Return guarantees like `proved`, with an entry that says so if nothing is proved."""
    return [
        guarantee_rows.add_caveats(g, (SELECTION,))
        for g in train.privacy(plan, config, config.rounds)
    ]


@dataclasses.dataclass(frozen=True)
class Plans:
    """How the config of a line becomes the plans of its seeds, and what is kept of them.

    Attributes:
        build: config -> the plan, and the config with what was found, such as a noise multiplier.
        seeded: whether every seed has a separate plan, such as another split.
        privacy: (plan, config) -> its guarantees, as rows of a report.
        epsilons: (plan, config, rounds) -> epsilon after each of them; None: not in the table.
        partition: config -> what the manifest says about the split.
        trace: pairs of a name and the metric that a figure shows under it.
    """

    build: Callable = assembled
    seeded: bool = False
    privacy: Callable = proved
    epsilons: Callable | None = train.epsilons
    partition: Callable | None = assembly.the_partition
    trace: tuple = ()


@dataclasses.dataclass(frozen=True)
class Asked:
    """One run: a seed of a line, which is kept in `home`."""

    home: Path
    config: Config
    seed: int


def run_points(asked: list[Asked], plans: Plans):
    """Check all points, then run them in blocks.

    Args:
        asked: the points.
        plans: makes their plans.

    Yields:
        For each block, {home: rows of a store}, with key (the seed), entry (of summary.json), rows
        (of metrics.csv) and manifest.

    Raises:
        ValueError: for any point, before the first one runs.
    """
    plan_of = lambda p: (p.home, p.seed if plans.seeded else 0)
    built = {}
    for point in asked:
        if plan_of(point) not in built:
            built[plan_of(point)] = plans.build(dataclasses.replace(point.config, seed=point.seed))
    pairs = _with_shared_rows([built[plan_of(point)] for point in asked])
    proved_of, curves, groups, traced = {}, {}, {}, set()
    # Splits of a line with equal client sizes have the same guarantee.
    accounts = [(p.home, np.asarray(plan.fed.size).tobytes()) for p, (plan, _) in zip(asked, pairs)]
    for i, (plan, config) in enumerate(pairs):
        if accounts[i] not in proved_of:
            proved_of[accounts[i]] = plans.privacy(plan, config)
        # A program holds a copy of the rows for each point unless its points share them. An
        # accelerator waits for small steps and has the memory; a CPU does better with one draw.
        rows = id(plan.fed.x) if jax.default_backend() == "cpu" else None
        groups.setdefault((config.rounds, config.evaluate_every, rows), []).append(i)
        trace_once(plan, traced)
    for indices, block in _blocks(groups.values(), asked, pairs):
        runs = {}
        for i, point, measured in zip(indices, block.points, sweeps.compute(block)):
            plan, account, config = pairs[i][0], accounts[i], point.config
            if plans.epsilons and account not in curves:
                curves[account] = plans.epsilons(plan, config, measured["history"]["round"])
            trace = {name: measured["history"][metric] for name, metric in plans.trace}
            run = RunRecord.of_config(config, measured, guarantees=proved_of[account], trace=trace)
            runs.setdefault(asked[i].home, []).append((plan, config, run, curves.get(account)))
        yield {home: _lines(plans, of_line) for home, of_line in runs.items()}


def _blocks(groups, asked: list[Asked], pairs):
    """Yield blocks of points that share a program, each with the indices of its points."""
    engine = sweeps.Local()
    for group in groups:
        plans = [pairs[i][0] for i in group]
        plans, seeds = pad_row_tables(plans), [asked[i].seed for i in group]
        most = min(MAX_BLOCK_POINTS, engine.most(len(group)))
        if len({id(plan.fed.x) for plan in plans}) > 1:  # each point holds its own rows
            most = max(1, min(most, sweeps.memory() // plans[0].fed.x.nbytes))
        for program in sweeps.programs(plans, seeds, sweeps.memory(), most):
            for members in program:
                indices = [group[m] for m in members]
                points = [
                    Point(dataclasses.replace(pairs[group[m]][1], seed=seeds[m]), plans[m])
                    for m in members
                ]
                yield indices, Block(points, len(program[0]))


def _with_shared_rows(pairs):
    """Return the (plan, config) pairs with one array for equal rows."""
    known, federations = {}, {}

    def shared(name, x):
        arrays = known.setdefault((name, x.shape, x.dtype), [])
        for array in arrays:
            if array is x or bool((array == x).all()):
                return array
        arrays.append(x)
        return x

    for fed in {id(plan.fed): plan.fed for plan, _ in pairs}.values():
        federations[id(fed)] = dataclasses.replace(
            fed, **{n: shared(n, getattr(fed, n)) for n in ("x", "y", "x_test", "y_test")}
        )
    return [
        (dataclasses.replace(plan, fed=federations[id(plan.fed)]), config) for plan, config in pairs
    ]


def _lines(plans: Plans, runs) -> list[dict]:
    """Return what is kept of the runs (plan, config, record, epsilons) of a line in one block."""
    plan, config = runs[0][:2]
    manifest = record.manifest(
        [plan],
        plans.partition(config) if plans.partition else None,
        config.rounds,
        seeds=[run.seed for _, _, run, _ in runs],
    )
    return [
        dict(key=run.seed, entry=run.entry(), rows=run.rows(epsilons), manifest=manifest)
        for _, _, run, epsilons in runs
    ]
