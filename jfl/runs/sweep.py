"""A sweep in a directory: its points are checked, run, saved and reported.

All points are checked before the first one runs.  Points whose plans have the same structure and
array shapes run as one program, in blocks.  The results of a block leave the program when the block
ends, and are stored in the sweep's file before anybody sees them.  A lost block has therefore
released nothing, and the same program computes it again.
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import shlex
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from ..core import checks, identity
from ..core.errors import HealthError
from ..core.files import ResultStore, write
from ..core.records import Caveat, Health, Plan
from ..data.federation import checksum
from ..engine import devices as meshes
from ..engine.plan import client_bytes
from ..engine.sweep import (
    COMPILED_MEMORY_FRACTION,
    DEFAULT_MEMORY_BYTES,
    ESTIMATED_MEMORY_FRACTION,
    device_memory,
    largest_chunk,
    max_row_widths,
    pad_row_tables,
    points_of,
    static_groups,
)
from ..engine.sweep import sweep as run_sweep
from ..privacy.ledger import segments
from . import build, checkpoint, guarantee_rows, record
from . import config as configs
from .checkpoint import refuse_resume
from .config import Config
from .directory import LOCK, checked, disk_errors_explained, locked
from .record import RunRecord, ShownRun, Stopwatch
from .train import check_plan, epsilons, privacy, shown_guarantee

SELECTION = Caveat("Does not cover choosing among the points of the sweep.", "selection")
FILE = "points.jsonl"
HEAD = ("config", "axes", "code", "programs")
LINE = ("key", "point", "data", "worker", "device", "seconds", "compile", "health", "history")
# the number of evaluations, over all settings, with an epsilon as tight as that of a whole run
MAX_TIGHT_EPSILONS = 256
# Points of a block on a CPU, where 32 points at once take longer than four times 8 points.
CPU_BLOCK_SIZE = 8
UNLIMITED_BYTES = 2.0**100  # `engine.sweep.sweep` accepts finite limits only


class Point(NamedTuple):
    """One point of a sweep.

    Attributes:
        config: its config, with the calibrated noise multiplier and the seed.
        plan: its plan; the row tables of all points have equal widths.
        values: its values of the fields that vary, and its seed.
        data: the checksum of its rows.
        signature: the signature of its plan's description.
        key: a digest of its config, its data, its plan and jfl's source.
    """

    config: Config
    plan: Plan
    values: dict = {}
    data: str = ""
    signature: str = ""
    key: str = ""


class Block(NamedTuple):
    """Points that run as one program.

    All blocks of a group share the size of the program; smaller blocks are padded.
    """

    points: list[Point]
    size: int


def points_store(out) -> ResultStore:
    """Open the file of the finished points of the sweep in directory `out`."""
    return ResultStore(
        out / FILE,
        fields=LINE,
        head=HEAD,
        signed=True,
        line="a line that a sweep of this version of jfl wrote",
        remedy="Start in a new directory with a new seed.",
    )


def sweep(
    config: Config,
    axes: dict,
    out,
    strict: bool = False,
    *,
    resume: bool = False,
    engine=None,
    block: int | None = None,
    watch=lambda **progress: None,
    warn=lambda text: None,
) -> list[dict]:
    """Run the Cartesian product of `axes` over config fields in directory `out`.

    Points whose plans have the same structure and array shapes run as one program, in blocks.  A
    point that fails is marked, and the others continue.  Finished points are stored in
    `out`/points.jsonl, so an interrupted sweep can be resumed.

    Args:
        config: the values that all points share.
        axes: a list of values for each field that varies.
        out: a new or empty directory, or with `resume` that of this sweep.
        strict: raise HealthError if any point failed.
        resume: continue the sweep in `out`.
        engine: Local() for this process, or on_ray.Ray(...) for several machines.
        block: the maximum number of points of a block; by default it depends on the memory and the
            engine.
        watch: called when points are done, with some of the keywords completed, total, note and
            accuracy; total comes once, before the first block, with the points that were done.
        warn: called with a text before the first point, if some points have so much noise that
            nothing can be learned.

    Returns:
        The entries of summary.json.

    Raises:
        ArgumentError: For a wrong argument, before anything is written.
        ResumeRefused: If `out` holds another sweep.
        HealthError: If all points failed, or with `strict` if any point failed.
    """
    out = checked(out, resume)
    grid = _grid(config, axes, block)
    # Keys contain a checksum of the data instead of their path, so that the file may be moved.
    fields = dataclasses.asdict(config)
    del fields["data"]
    facts = record.as_json(dict(config=fields, axes=axes, code=checkpoint.code()))
    _stored(out, facts, resume)  # a mismatch is reported here, before plans are built
    points = checked_points(config, grid, warn)
    with (engine or Local()).open(watch) as machine, locked(out):
        checked(out, resume)  # again, now that nobody else can write
        store = _stored(out, facts, resume)
        if store.head is None:
            _begin(store, facts, points, machine, block)
        elif {p.key for p in points} != {k for g in store.head["programs"] for b in g for k in b}:
            refuse_resume(
                f"sweep {out}",
                "the data and plans that it was made from",
                "others",
                "Resume with the same data, or start in a new directory.",
            )
        # A resumed sweep writes it too: it may have been killed before, or its data moved.
        with _disk_errors_explained(store):
            values = dict(dataclasses.asdict(config), sweep=axes)
            comment = "jfl sweep --config config.toml --out DIR"
            write(store.path.with_name("config.toml"), configs.dump(values, comment))
        return _run_and_report(config, axes, points, store, machine, strict, watch)


def _grid(config: Config, axes: dict, block: int | None) -> list[dict]:
    """Return each point as its values of the axes and its seed; reject axes that cannot vary."""
    for name, values in axes.items():
        if len(set(values)) < len(values):
            checks.fail("sweep", f"each value of {name} once", values)
    if "rounds" in axes or "evaluate_every" in axes:
        checks.fail(
            "sweep",
            "one number of rounds and evaluations for all points",
            "an axis of them",
            "Run a sweep for each value.",
        )
    if block is not None:
        checks.require_integer("sweep", block=block)
    grid = [dict(seed=config.seed) | point for point in points_of(axes)]
    configs.refuse_unused(*(dataclasses.replace(config, **point) for point in grid))
    for point in grid:
        checks.require_seed("sweep", seed=point["seed"])
    return grid


def _setting(point: dict) -> tuple:
    """Return the values of a point without its seed."""
    return tuple((k, v) for k, v in point.items() if k != "seed")


def checked_points(config: Config, grid: list[dict], warn=lambda text: None) -> list[Point]:
    """Build, calibrate and check the plans of all points, once for all seeds of a setting.

    Args:
        config: the values that all points share.
        grid: the other values of each point, with its seed.
        warn: called with a text if some points have too much noise.
    """
    settings: dict[tuple, Point] = {}
    warnings, sums, traced = {}, {}, set()
    for values in grid:
        setting = _setting(values)
        if setting in settings:
            continue
        plan, calibrated = build.build(dataclasses.replace(config, **values))
        if text := check_plan(plan, calibrated, traced):
            warnings[setting] = text
        if id(plan.fed) not in sums:  # plans share their data, which are kept alive
            sums[id(plan.fed)] = checksum(plan.fed)
        signature = identity.signature(identity.describe(plan))
        settings[setting] = Point(calibrated, plan, {}, sums[id(plan.fed)], signature)
    if warnings:
        setting, text = next(iter(warnings.items()))
        words = " ".join(f"{k}={v}" for k, v in setting) or "each point"
        first = "the first " if len(warnings) > 1 else ""
        warn(f"{len(warnings)} of {len(settings)} settings, {first}{words}: {text}")
    plans = [point.plan for point in settings.values()]
    padded = dict(zip(settings, pad_row_tables(plans)))
    source, points = checkpoint.code()["source"], []
    for values in grid:
        point = settings[_setting(values)]
        seeded = dataclasses.replace(point.config, seed=values["seed"])
        fields = dataclasses.asdict(seeded) | dict(data=values.get("data"))  # the path of an axis
        facts = record.as_json(fields), point.data, point.signature, source
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
        plan = padded[_setting(values)]
        points.append(point._replace(config=seeded, plan=plan, values=values, key=key))
    return points


def _stored(out, facts: dict, resume: bool) -> ResultStore:
    """Open the store of this sweep; with `resume`, reject that of another one."""
    store = points_store(out)
    if not resume:
        return store
    if not store.path.exists() and out.is_dir() and any(p.name != LOCK for p in out.iterdir()):
        refuse_resume(
            "--resume",
            f"a sweep with its {FILE} in {out}",
            "a directory without one",
            "Start in a new directory.",
        )
    if store.head is not None:
        there, here = (
            {f"{part} {k}".removeprefix("config "): v for part in facts for k, v in x[part].items()}
            for x in (store.head, facts)
        )
        if differ := checkpoint.differences(there, here):
            file, folder = shlex.quote(f"{out}/config.toml"), shlex.quote(str(out))
            refuse_resume(
                f"sweep {out}",
                "the config, the axes and the program that made it",
                "; ".join(differ),
                f"jfl sweep --config {file} --resume --out {folder} has the same values; "
                "for another program, start in a new directory.",
            )
    return store


def _begin(store: ResultStore, facts, points: list[Point], machine, block):
    """Divide the points into blocks, and write the head of the sweep's file."""
    most = block or machine.most(len(points))
    plans, seeds = [p.plan for p in points], [p.config.seed for p in points]
    groups = programs(plans, seeds, machine.memory, most)
    with _disk_errors_explained(store):
        store.begin(
            facts | dict(programs=[[[points[i].key for i in b] for b in group] for group in groups])
        )


def _disk_errors_explained(store: ResultStore):
    kept = f"The points in {store.path.name} are kept."
    return disk_errors_explained(f"sweep {store.path.parent}", lambda: kept)


def _run_and_report(
    config: Config, axes: dict, points: list[Point], store: ResultStore, machine, strict, watch
) -> list[dict]:
    """Run the missing points, and write the results of all points."""
    stopwatch, out = Stopwatch(), store.path.parent
    resumed = sum(point.key in store for point in points)
    _run_missing(points, store, machine, watch)
    lines = [store[point.key] for point in points]
    ran = dict(
        name=machine.name,
        nodes=machine.nodes,
        workers=len({line["worker"] for line in lines}),
        devices=sorted({line["device"] for line in lines}),
        resumed=resumed,
    )
    caveats = [SELECTION]
    caveats += segments.sharing([p.plan for p in points], [p.config.seed for p in points])
    runs = shown_runs(points, lines, caveats)
    # The manifest describes the data of the first point.
    manifest = record.manifest(
        [point.plan for point in points],
        build.the_partition(points[0].config),
        config.rounds,
        groups=len(store.head["programs"]),
        seconds=stopwatch.read()[0],
        seeds=sorted({point.config.seed for point in points}),
        engine=ran,
    )
    title = f"sweep over {', '.join(axes)} on {config.dataset}"
    with _disk_errors_explained(store):
        entries = record.save_results(out, runs, manifest, "sweep.png", title)
    failed = sum(bool(run.record.failed) for run in runs)
    if failed == len(runs) or (strict and failed):
        counts = (np.array([run.record.health.get(f, 0) for run in runs]) for f in Health._fields)
        raise HealthError(
            f"sweep: expected a healthy point; {failed} of {len(runs)} failed. "
            f"Results are in {out}.",
            None,
            Health(*counts),
        )
    return entries


def _run_missing(points: list[Point], store: ResultStore, machine, watch):
    """Run the blocks with missing points, and store each block when it is finished."""
    by_key = {point.key: point for point in points}
    missing = [
        Block([by_key[key] for key in keys], len(group[0]))
        for group in store.head["programs"]
        for keys in group
        if not all(key in store for key in keys)
    ]
    count = lambda: sum(point.key in store for point in points)
    watch(completed=count(), total=len(points), note="compiling" if missing else "")
    for block, measured in machine.run(missing, max_row_widths([point.plan for point in points])):
        lines = [
            dict(key=point.key, point=point.values, data=point.data) | line
            for point, line in zip(block.points, measured)
            if point.key not in store  # a repeated block contains known points
        ]
        with _disk_errors_explained(store):
            store.put(lines)
        several = f"{machine.name}, {machine.nodes} nodes" if machine.nodes > 1 else ""
        last = [(line["history"].get("accuracy") or [None])[-1] for line in lines]
        ends = sorted({f"{value:.3g}" for value in last if value is not None}, key=float)
        accuracy = " to ".join(dict.fromkeys((ends[0], ends[-1]))) if ends else ""
        watch(completed=count(), note=several, accuracy=f"accuracy {accuracy}" if ends else "")


def shown_runs(points: list[Point], lines: list[dict], caveats=()) -> list[ShownRun]:
    """Return the runs of points with their guarantees, which are computed once per setting.

    Args:
        points: the points.
        lines: the `record.measurement` of each point.
        caveats: further caveats of every guarantee.
    """
    settings = len({_setting(point.values) for point in points})
    most = min(guarantee_rows.TIGHT, max(1, MAX_TIGHT_EPSILONS // settings))
    runs, known = [], {}
    for point, line in zip(points, lines):
        setting, config = _setting(point.values), point.config
        if setting not in known:
            rows = privacy(point.plan, config, config.rounds)
            shown = shown_guarantee(rows, config)
            last, evaluated = shown and shown["epsilon"], line["history"]["round"]
            values = epsilons(point.plan, config, evaluated, last, most)
            known[setting] = [guarantee_rows.add_caveats(g, caveats) for g in rows], values, shown
        guarantees, values, shown = known[setting]
        words = (f"{k}={v}" for k, v in setting if k != "algorithm")
        name, point = " ".join([config.algorithm, *words]), dict(setting)
        run = RunRecord.of_config(config, line, name, guarantees=guarantees, point=point)
        runs.append(ShownRun(run, values, shown))
    return runs


# --- blocks


def memory() -> float:
    """Return the bytes available for the points that this process computes at once."""
    return device_memory(ESTIMATED_MEMORY_FRACTION) or DEFAULT_MEMORY_BYTES


def programs(plans: list[Plan], seeds: list, memory: float, most: float) -> list[list[list[int]]]:
    """Divide points into blocks; points with the same seed stay together, since they share draws.

    Args:
        plans: the plans of the points, with tables of rows of equal widths
            (`engine.sweep.pad_row_tables`).
        seeds: the seeds of the points.
        memory: bytes for the points of a block.
        most: the maximum number of points of a block.

    Returns:
        A list for each group of plans that share a compiled program. It holds the blocks of the
        group, the largest first; a block is a list of indices of `plans`.
    """
    out = []
    for members in static_groups(plans):
        together = [plans[i] for i in members]
        fit = memory // (client_bytes(together[0]) * largest_chunk(together))
        out.append(_divided(members, [seeds[i] for i in members], max(1, min(fit, most))))
    return out


def _divided(members: list[int], seeds: list, most: float) -> list[list[int]]:
    """Return the blocks of a group, the largest first.  If all seeds have the same number of
    points, a block holds several seeds, or a part of one."""
    of_seed = {}
    for i, seed in zip(members, seeds):
        of_seed.setdefault(seed, []).append(i)
    rows = list(of_seed.values())
    each, count = len(rows[0]), len(rows)
    if each == 1 or any(len(row) != each for row in rows):
        return _spread(members, math.ceil(len(members) / most))
    if each > most:
        parts = [part for row in rows for part in _spread(row, math.ceil(each / most))]
        return sorted(parts, key=len, reverse=True)
    return [sum(block, []) for block in _spread(rows, math.ceil(count / (most // each)))]


def _spread(several: list, blocks: int) -> list[list]:
    """Deal the entries to the blocks in rotation.  Then the fields that vary in the group also vary
    in each block, so that the blocks share a program."""
    return [several[i::blocks] for i in range(blocks)]


def compute(
    block: Block,
    memory: float = UNLIMITED_BYTES,
    mesh=None,
    watch: Callable[[str], None] | None = None,
) -> list[dict]:
    """Run the points of a block, as many at once as fit into `memory`.

    Args:
        block: the points to run.
        memory: bytes for the points that run at once.
        mesh: as in jfl.sweep.
        watch: as in jfl.sweep.

    Returns:
        The `record.measurement` of each point.  The seconds of the block are divided equally among
        its points.
    """
    stopwatch, count = Stopwatch(), len(block.points)
    first = block.points[0].config
    seeds = filled([point.config.seed for point in block.points], block.size)
    result = run_sweep(
        lambda i: block.points[i].plan,
        points=[dict(i=i, seed=seed) for i, seed in seeds],
        rounds=first.rounds,
        evaluate_every=first.evaluate_every,
        memory=memory,
        mesh=mesh,
        watch=watch,
        tolerate=Health._fields,
    )
    seconds, compiled = stopwatch.read()
    return [
        record.measurement(result.metrics, result.health, seconds / count, compiled / count, i)
        for i in range(count)
    ]


def filled(seeds: list[int], size: int) -> list[tuple[int, int]]:
    """Return the (point, seed) pairs of a block, padded to the size of its program.

    The padding repeats the last points with seeds that no point has, and its results are dropped.
    (One more point with an existing seed would need another program; see `jfl.engine.sweep`.)  A
    block with only some of a seed's points is padded with copies of its last point.
    """
    count, numbers = len(seeds), collections.Counter(seeds)
    each = len(seeds) // len(numbers) if len(set(numbers.values())) == 1 else 1
    own = list(enumerate(seeds))
    if size % each:
        return own + [own[-1]] * (size - count)
    unused = (seed for seed in itertools.count() if seed not in seeds)
    fresh = itertools.islice(unused, (size - count) // each)
    return own + [(count - each + k, seed) for seed in fresh for k in range(each)]


class Local:
    """An engine that computes blocks sequentially in this process, on a `mesh` as in jfl.sweep."""

    name, nodes = "local", 1

    def __init__(self, mesh=None):
        devices = meshes.devices(mesh, 2**30)  # rejects an invalid mesh
        self.mesh, self.devices = mesh, 1 if devices is None else devices.size

    @contextlib.contextmanager
    def open(self, watch):
        self.memory, self.watch = self.devices * memory(), watch
        yield self

    def most(self, count: int) -> float:
        """Return the maximum number of points of a block, for `count` points in total."""
        return CPU_BLOCK_SIZE * self.devices if jax.default_backend() == "cpu" else count

    def run(self, blocks: list[Block], widths: dict):
        """Yield each block with its records as soon as it is finished."""
        who = dict(
            worker="local", device=f"{jax.default_backend()} {checkpoint.environment()['device']}"
        )
        for block in blocks:
            found = compute(
                block,
                device_memory(COMPILED_MEMORY_FRACTION) or UNLIMITED_BYTES,
                self.mesh,
                lambda line: self.watch(note=line),
            )
            yield block, [who | measured for measured in found]
