"""A sweep in a directory: every point checked before the first one runs, then run, saved,
reported."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
import numpy as np

from ..core import checks, identity
from ..core.errors import HealthError
from ..core.files import write
from ..core.records import Caveat, Health, Plan
from ..core.result_store import ResultStore
from ..data.federation import checksum
from ..engine.round import init
from ..engine.simulate import scan
from ..engine.sweep import points_of, widened, widths
from ..privacy.ledger import segments
from . import blocks, build, checkpoint, guarantee_rows, pictures, record, unused_options
from . import config as configs
from .blocks import Block, Local
from .checkpoint import refuse_resume
from .config import Config
from .directory import LOCK, checked, locked
from .record import RunRecord
from .stopwatch import Stopwatch
from .train import epsilons, noise_warning, paper_claims, privacy, shown_epsilon, shown_label

SELECTION = Caveat("choosing among the points of the sweep is not counted", "selection")
FILE = "points.jsonl"
HEAD = ("config", "axes", "code", "plan", "programs")
LINE = ("key", "worker", "device", "seconds", "compile", "health", "history")
# evaluations of all settings together whose epsilon is proved as tightly as that of a whole run
TIGHT = 256
PICTURED = 16  # settings that a picture has room for


class Points(NamedTuple):
    """The points of a sweep, each checked: entry i of every list is of point i."""

    grid: list[dict]
    configs: list[Config]  # with the noise multiplier that was found, and the seed
    data: list[str]  # checksums
    plans: list[Plan]  # of equal widths
    keys: list[str]  # what their results are kept under


def points_store(out) -> ResultStore:
    """The finished points of the sweep in directory `out`."""
    return ResultStore(
        out / FILE,
        fields=LINE,
        head=HEAD,
        signed=True,
        line="a line as a sweep wrote it",
        remedy="Start in another directory with another seed.",
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
    """Run the cartesian product of `axes` over config fields in directory `out`.

    Points that share their static part are one program, in blocks.  A point that fails is marked;
    the others go on.  What is done is in OUT/points.jsonl: a sweep that was stopped goes on with
    `resume`.

    Args:
        config: what all points share.
        axes: field -> its values.
        out: a new or empty directory, or with `resume` that of this sweep.
        strict: raise HealthError if any point failed.
        resume: go on with what is there.
        engine: blocks.Local(), in this process, or on_ray.Ray(...), over machines.
        block: points of a block at most; default what memory holds, and a size that suits the
            engine.
        watch: called with some of completed=, total=, note=, accuracy= as points are done.
        warn: called with a text, once before the first point, where some points have so much noise
            that nothing can be learned.

    Returns:
        The entries of summary.json.

    Raises:
        ArgumentError: before anything is written.
        ResumeRefused: where `out` holds another sweep.
        HealthError: if all points failed, with `strict` if any did.
    """
    out = checked(out, resume)
    grid = _grid(config, axes, block)
    facts = record.as_json(
        dict(config=dataclasses.asdict(config), axes=axes, code=checkpoint.code())
    )
    begun = _stored(out, facts, resume).head is not None  # refuses before plans are built
    points = _checked_points(config, grid, trace=not begun, warn=warn)
    with (engine or Local()).open(watch) as machine, locked(out):
        checked(out, resume)  # again, now that nobody else can write
        store = _stored(out, facts, resume)
        first = record.as_json(identity.describe(points.plans[0]))
        if store.head is None:
            _begin(store, config, axes, facts, first, points, machine, block)
        else:
            _refuse_other_points(store, first, points)
        return _run_and_report(config, axes, points, store, machine, strict, watch)


def _grid(config: Config, axes: dict, block: int | None) -> list[dict]:
    """The points as the values of axes, and their seed; refuses axes that cannot be swept."""
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
        checks.require_integer("sweep", block=block)
    grid = [dict(seed=config.seed) | point for point in points_of(axes)]
    unused_options.refuse_unused(*(dataclasses.replace(config, **point) for point in grid))
    for point in grid:
        checks.require_seed("sweep", seed=point["seed"])
    return grid


def _setting(point: dict) -> tuple:
    """What a point is but for its seed."""
    return tuple((k, v) for k, v in point.items() if k != "seed")


def _checked_points(config: Config, grid: list[dict], trace: bool, warn: Callable) -> Points:
    """Build, calibrate and check every plan, once for all its seeds, before the first one runs."""
    built, warnings, traced = {}, {}, set()
    for point in grid:
        setting = _setting(point)
        if setting in built:
            continue
        plan, calibrated = built[setting] = build.build(dataclasses.replace(config, **point))
        # refuse now what would be refused at the end
        epsilons(plan, calibrated, [config.rounds], most=0)
        paper_claims(plan, calibrated, config.rounds)
        if text := noise_warning(plan, calibrated):
            warnings[setting] = text
        if trace:
            trace_once(plan, traced)
    if warnings:
        setting, text = next(iter(warnings.items()))
        values = " ".join(f"{k}={v}" for k, v in setting) or "each point"
        first = "the first " if len(warnings) > 1 else ""
        warn(f"{len(warnings)} of {len(built)} settings, {first}{values}: {text}")
    return _points(grid, built)


def trace_once(plan: Plan, traced: set):
    """Trace a round of a plan, unless one with as many and as large arrays was; shapes that do not
    fit are refused.

    Args:
        plan: what would run.
        traced: the shapes of plans before it, to which this one's is added.
    """
    shape = jax.tree.structure(plan), tuple(np.shape(x) for x in jax.tree.leaves(plan))
    if shape not in traced:
        jax.eval_shape(lambda key: scan(init(key, plan), plan, [1]), jax.random.key(0))
        traced.add(shape)


def _points(grid: list[dict], built: dict) -> Points:
    """The points, with plans of equal widths."""
    pairs = [built[_setting(point)] for point in grid]
    federations = {id(plan.fed): plan.fed for plan, _ in pairs}
    sums = {name: checksum(fed) for name, fed in federations.items()}
    distinct = {id(plan): plan for plan, _ in pairs}
    plans = list(distinct.values())
    distinct = dict(zip(distinct, widened(plans, widths(plans))))
    signatures = {
        name: identity.signature(identity.describe(plan)) for name, plan in distinct.items()
    }
    seeded = [
        dataclasses.replace(calibrated, seed=point["seed"])
        for point, (_, calibrated) in zip(grid, pairs)
    ]
    data = [sums[id(plan.fed)] for plan, _ in pairs]
    keys = [
        blocks.key(config, checksum_, signatures[id(plan)])
        for config, checksum_, (plan, _) in zip(seeded, data, pairs)
    ]
    return Points(grid, seeded, data, [distinct[id(plan)] for plan, _ in pairs], keys)


def _stored(out, facts: dict, resume: bool) -> ResultStore:
    """What is there of this very sweep."""
    store = points_store(out)
    if not resume:
        return store
    if not store.path.exists() and out.is_dir() and any(p.name != LOCK for p in out.iterdir()):
        refuse_resume(
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
            refuse_resume(
                f"sweep {out}",
                "the config, the axes and the program that made it",
                "; ".join(differ),
                f"jfl sweep --config {out}/config.toml --resume --out {out} has the same values; a "
                "sweep by another program starts in another directory.",
            )
    return store


def _begin(store, config, axes, facts, first, points: Points, machine, block):
    """Write what the sweep is: the head of its file, and its config."""
    most = block or machine.most(len(points.grid))
    seeds = [config.seed for config in points.configs]
    programs = [
        [[points.keys[i] for i in members] for members in group]
        for group in blocks.programs(points.plans, seeds, machine.memory, most)
    ]
    with _disk_errors_explained(store):
        store.begin(facts | dict(plan=first, programs=programs))
    write(
        store.path.with_name("config.toml"),
        configs.dump(
            dict(dataclasses.asdict(config), sweep=axes),
            "jfl sweep --config config.toml --out DIR",
        ),
    )


def _refuse_other_points(store: ResultStore, first: dict, points: Points):
    """Refuse to go on with points of other data or plans."""
    kept = {k for group in store.head["programs"] for members in group for k in members}
    if kept != set(points.keys):
        lines = identity.differences(store.head["plan"], first)
        refuse_resume(
            f"sweep {store.path.parent}",
            "the data and plans that it was made from",
            "; ".join(lines[:5]) or "others",
            "Resume with the same data, or start in another directory.",
        )


@contextlib.contextmanager
def _disk_errors_explained(store: ResultStore):
    try:
        yield
    except OSError as error:
        raise OSError(
            f"sweep {store.path.parent}: expected a disk that can be written, but got "
            f"{error.strerror}. "
            f"The points in {store.path.name} are kept: make room, then --resume goes on."
        ) from None


def _run_and_report(config, axes, points: Points, store, machine, strict, watch) -> list[dict]:
    """Run what is not there yet, and write the results of all."""
    stopwatch = Stopwatch()
    resumed = sum(key in store for key in points.keys)
    _run_missing(points, store, machine, watch)
    lines = [store[key] for key in points.keys]
    ran = dict(
        name=machine.name,
        nodes=machine.nodes,
        workers=len({line["worker"] for line in lines}),
        devices=sorted({line["device"] for line in lines}),
        resumed=resumed,
    )
    records, table, groups = _results(config, axes, points, lines)
    entries, out = [r.entry() for r in records], store.path.parent
    # the manifest shows the first point's data
    partition = build.the_partition(dataclasses.replace(config, **points.grid[0]))
    record.save(
        out,
        entries,
        table,
        record.manifest(
            points.plans,
            partition,
            config.rounds,
            groups=len(store.head["programs"]),
            seconds=stopwatch.read()[0],
            seeds=sorted({p["seed"] for p in points.grid}),
            engine=ran,
        ),
    )
    if groups:
        pictures.draw_accuracy(
            out / "sweep.png",
            groups[:PICTURED],
            f"sweep over {', '.join(axes)} on {config.dataset}",
        )
    failed = sum(bool(r.failed) for r in records)
    if failed == len(records) or (strict and failed):
        counts = (np.array([r.health.get(f, 0) for r in records]) for f in Health._fields)
        raise HealthError(
            f"sweep: expected a healthy point; {failed} of {len(records)} failed. "
            f"Results are in {out}.",
            None,
            Health(*counts),
        )
    return entries


def _run_missing(points: Points, store: ResultStore, machine, watch):
    """Run the blocks of which a point is missing; every point is in the store when it is done."""
    index = {key: i for i, key in enumerate(points.keys)}
    missing = []
    for group in store.head["programs"]:
        for members in group:
            if not all(key in store for key in members):
                indices = [index[key] for key in members]
                missing.append(
                    Block(
                        indices=indices,
                        configs=[points.configs[i] for i in indices],
                        data=[points.data[i] for i in indices],
                        plans=[points.plans[i] for i in indices],
                        size=len(group[0]),
                    )
                )
    completed = lambda: sum(key in store for key in points.keys)
    watch(completed=completed(), total=len(points.grid), note="compiling")
    for block, measured in machine.run(missing, widths(points.plans)):
        lines = [
            dict(key=points.keys[i], point=points.grid[i]) | line
            for i, line in zip(block.indices, measured)
            if points.keys[i] not in store  # of a block that was computed again
        ]
        with _disk_errors_explained(store):
            store.put(lines)
        several = f"{machine.name}, {machine.nodes} nodes" if machine.nodes > 1 else ""
        watch(completed=completed(), note=several, accuracy=_accuracy(lines))


def _accuracy(lines: list[dict]) -> str:
    """The last accuracies of points that are done, in a few words."""
    last = [line["history"]["accuracy"][-1] for line in lines if line["history"].get("accuracy")]
    last = [value for value in last if value is not None]
    if not last:
        return ""
    low, high = (f"{value:.3g}" for value in (min(last), max(last)))
    return f"accuracy {low}" if low == high else f"accuracy {low} to {high}"


def _results(config, axes, points: Points, lines: list[dict]):
    """The records of the points, rows of metrics.csv, and the groups that a picture shows."""
    caveats = [SELECTION, *segments.sharing(points.plans, [p["seed"] for p in points.grid])]
    settings = len({_setting(point) for point in points.grid})
    most = min(guarantee_rows.TIGHT, max(1, TIGHT // settings))

    @functools.cache
    def proved(name: Hashable, i: int):
        """Guarantees and epsilons of a setting, of its first point."""
        plan, calibrated = points.plans[i], points.configs[i]
        guarantees = privacy(plan, calibrated, config.rounds)
        last = shown_epsilon(guarantees, calibrated)
        evaluated = lines[i]["history"]["round"]
        values = epsilons(plan, calibrated, evaluated, last, most)
        return [guarantee_rows.add_caveats(g, caveats) for g in guarantees], values

    records, table, groups, first = [], [], {}, {}
    for i, (point, calibrated, line) in enumerate(zip(points.grid, points.configs, lines)):
        values = " ".join(f"{k}={point[k]}" for k in axes if k != "seed")
        name = f"{calibrated.algorithm} {values}".strip()
        guarantees, eps = proved(name, first.setdefault(name, i))
        run = RunRecord.of_config(calibrated, line, name, guarantees=guarantees)
        records.append(run)
        table += run.rows(eps)
        if not run.failed and run.history.get("accuracy"):
            group = groups.setdefault(
                name,
                dict(
                    label=f"{name}, " + shown_label(guarantees, calibrated),
                    round=run.history["round"],
                    accuracy=[],
                    epsilon=shown_epsilon(guarantees, calibrated),
                ),
            )
            group["accuracy"].append(run.history["accuracy"])
    return records, table, list(groups.values())
