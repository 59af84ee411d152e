"""A sweep in a directory: all points are checked before the first one runs, then run, saved and
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

SELECTION = Caveat("Does not cover choosing among the points of the sweep.", "selection")
FILE = "points.jsonl"
HEAD = ("config", "axes", "code", "plan", "programs")
LINE = ("key", "worker", "device", "seconds", "compile", "health", "history")
# the number of evaluations, over all settings, with an epsilon as tight as that of a whole run
MAX_TIGHT_EPSILONS = 256
MAX_DRAWN_SETTINGS = 16


class Points(NamedTuple):
    """The checked points of a sweep; entry i of every list belongs to point i."""

    grid: list[dict]
    configs: list[Config]  # with the calibrated noise multiplier and the seed
    data: list[str]  # checksums
    plans: list[Plan]  # of equal widths
    keys: list[str]  # the keys of their results in the store


def points_store(out) -> ResultStore:
    """Open the file of the finished points of the sweep in directory `out`."""
    return ResultStore(
        out / FILE,
        fields=LINE,
        head=HEAD,
        signed=True,
        line="a line that a sweep wrote",
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

    Points that share their static part run as one program, in blocks.  A point that fails is
    marked, and the others continue.  Finished points are in OUT/points.jsonl, and an interrupted
    sweep continues with `resume`.

    Args:
        config: the values that all points share.
        axes: a list of values for each field that varies.
        out: a new or empty directory, or with `resume` that of this sweep.
        strict: raise HealthError if any point failed.
        resume: continue the sweep in `out`.
        engine: blocks.Local() for this process, or on_ray.Ray(...) for several machines.
        block: the maximum number of points of a block; by default it depends on the memory and the
            engine.
        watch: called with some of completed=, total=, note=, accuracy= whenever points are done.
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
    facts = record.as_json(
        dict(config=dataclasses.asdict(config), axes=axes, code=checkpoint.code())
    )
    # a mismatch is reported here, before plans are built
    begun = _stored(out, facts, resume).head is not None
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
    """Return each point as its values of the axes and its seed; reject axes that cannot vary."""
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
            "Run a sweep for each value.",
        )
    if block is not None:
        checks.require_integer("sweep", block=block)
    grid = [dict(seed=config.seed) | point for point in points_of(axes)]
    unused_options.refuse_unused(*(dataclasses.replace(config, **point) for point in grid))
    for point in grid:
        checks.require_seed("sweep", seed=point["seed"])
    return grid


def _setting(point: dict) -> tuple:
    """Return the values of a point without its seed."""
    return tuple((k, v) for k, v in point.items() if k != "seed")


def _checked_points(config: Config, grid: list[dict], trace: bool, warn: Callable) -> Points:
    """Build, calibrate and check each plan once for all its seeds, before the first one runs."""
    built, warnings, traced = {}, {}, set()
    for point in grid:
        setting = _setting(point)
        if setting in built:
            continue
        plan, calibrated = built[setting] = build.build(dataclasses.replace(config, **point))
        # Report now what would otherwise be reported at the end.
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
    """Trace a round of a plan to find mismatched shapes, unless a plan of the same structure and
    shapes was traced before.

    Args:
        plan: the plan that would run.
        traced: the structures and shapes of earlier plans; this plan's is added.
    """
    shape = jax.tree.structure(plan), tuple(np.shape(x) for x in jax.tree.leaves(plan))
    if shape not in traced:
        jax.eval_shape(lambda key: scan(init(key, plan), plan, [1]), jax.random.key(0))
        traced.add(shape)


def _points(grid: list[dict], built: dict) -> Points:
    """Combine the points with their plans, padded to equal widths."""
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
                f"jfl sweep --config {out}/config.toml --resume --out {out} has the same values; "
                "for another program, start in a new directory.",
            )
    return store


def _begin(store, config, axes, facts, first, points: Points, machine, block):
    """Write the head of the sweep's file, and its config."""
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
    """Refuse to resume with points of other data or plans."""
    kept = {k for group in store.head["programs"] for members in group for k in members}
    if kept != set(points.keys):
        lines = identity.differences(store.head["plan"], first)
        refuse_resume(
            f"sweep {store.path.parent}",
            "the data and plans that it was made from",
            "; ".join(lines[:5]) or "others",
            "Resume with the same data, or start in a new directory.",
        )


@contextlib.contextmanager
def _disk_errors_explained(store: ResultStore):
    try:
        yield
    except OSError as error:
        raise OSError(
            f"sweep {store.path.parent}: expected a writable disk, but got {error.strerror}. "
            f"The points in {store.path.name} are kept: free some space and use --resume."
        ) from None


def _run_and_report(config, axes, points: Points, store, machine, strict, watch) -> list[dict]:
    """Run the missing points, and write the results of all points."""
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
    # The manifest describes the data of the first point.
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
            groups[:MAX_DRAWN_SETTINGS],
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
    """Run the blocks with missing points, and store each block when it is finished."""
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
            if points.keys[i] not in store  # a repeated block contains known points
        ]
        with _disk_errors_explained(store):
            store.put(lines)
        several = f"{machine.name}, {machine.nodes} nodes" if machine.nodes > 1 else ""
        watch(completed=completed(), note=several, accuracy=_accuracy(lines))


def _accuracy(lines: list[dict]) -> str:
    """Summarise the final accuracies of finished points."""
    last = [line["history"]["accuracy"][-1] for line in lines if line["history"].get("accuracy")]
    last = [value for value in last if value is not None]
    if not last:
        return ""
    low, high = (f"{value:.3g}" for value in (min(last), max(last)))
    return f"accuracy {low}" if low == high else f"accuracy {low} to {high}"


def _results(config, axes, points: Points, lines: list[dict]):
    """Return the records of the points, the rows of metrics.csv, and the groups of the picture."""
    caveats = [SELECTION, *segments.sharing(points.plans, [p["seed"] for p in points.grid])]
    settings = len({_setting(point) for point in points.grid})
    most = min(guarantee_rows.TIGHT, max(1, MAX_TIGHT_EPSILONS // settings))

    @functools.cache
    def proved(name: Hashable, i: int):
        """Return the guarantees and epsilons of a setting, from its first point `i`."""
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
