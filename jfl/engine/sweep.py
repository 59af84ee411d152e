"""Sweeps, which run many plans as few programs: one vmapped program for each static structure.

A sweep has S points, each with a plan and a seed.  Points whose plans have the same structure run
as one program, in blocks that fit into memory.  Points with the same seed share cohorts and
batches, which the program draws only once for them.
"""

import dataclasses
import inspect
import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..core import checks, hashing, identity, lazy, pytrees
from ..core.errors import HealthError
from ..core.pytrees import Array, Key, Tree
from ..core.random_streams import derive_noise_key, noise_seed_words
from ..core.records import Health, Metrics, Plan, brief, counted, safe_repr
from ..privacy.ledger import segments
from ..privacy.mechanisms.chain import check_schedules
from . import compiling
from . import devices as meshes
from .plan import client_bytes
from .round import init_run
from .simulate import rounds_before_evaluations, scan_from, signs_of_divergence, tolerated_health

# Bytes for the points that run at the same time, if a device does not report its memory.
DEFAULT_MEMORY_BYTES = 2**32
# Fraction of an accelerator's free memory that points may take by the estimate of `client_bytes`.
ESTIMATED_MEMORY_FRACTION = 0.25
# Fraction of an accelerator's free memory that a compiled program may take; its size is known.
COMPILED_MEMORY_FRACTION = 0.9
# Maximum number of times that a program is compiled to find how many points fit.
MAX_COMPILATIONS = 3
# How an array differs between the plans of a program: it is the same for all points, the same for
# the points of a row, or different for each point.
SHARED, BY_ROW, BY_POINT = 0, 1, 2


class Sweep(NamedTuple):
    """The results of a sweep of S points, in the order of the points.

    Attributes:
        points: for each point, a dict with the arguments of make_plan and the seed.
        plans: the Plan of each point.
        metrics: Metrics with leaves [S, evaluations].
        health: Health with counts Int[S].
        failed: Bool[S], whether a Health count that is not tolerated is positive.
        params: the parameters of each point.
        groups: the number of programs that were compiled.
        seconds: Float[S], each point's share of the time of its program, compilation included.
        caveats: sentences to state next to the guarantees of several points.
        point_bytes: Float[S], the device memory of a point in bytes, without arrays that the points
            of its program share; NaN if it is unknown.
    """

    points: list[Any]
    plans: list[Any]
    metrics: Metrics
    health: Health
    failed: np.ndarray
    params: Any
    groups: int
    seconds: np.ndarray
    caveats: tuple[Any, ...] = ()
    point_bytes: Any = None
    frame = lazy.later("jfl.runs.tables.frame")

    @safe_repr
    def __repr__(self) -> str:
        first = self.points[0]
        varied = [k for k in first if len({brief(p.get(k)) for p in self.points}) > 1]
        over = f" over {', '.join(varied)}" if varied else ""
        lines = [
            f"Sweep: {counted(len(self.points), 'point')}{over}; "
            f"{counted(self.groups, 'program')}, {float(np.sum(self.seconds)):.3g} s; "
            f"{int(np.sum(self.failed))} failed",
            *f"{self.metrics!r}".split("\n"),
            "jfl.guarantee(sweep.plans[i], rounds, delta) gives the epsilon of point i, "
            "which does not cover choosing the best point",
        ]
        return "\n  ".join(lines)


def points_of(axes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cartesian product of the axes as a list of dicts; the last axis varies fastest.

    A scalar is an axis with one value.
    """
    is_axis = lambda v: isinstance(v, (list, tuple, range)) or getattr(v, "ndim", 0) > 0
    lists = {k: list(v) if is_axis(v) else [v] for k, v in axes.items()}
    for k, v in lists.items():
        if not v:
            checks.fail("sweep", f"at least one value of {k}", "an empty list")
    return [dict(zip(lists, values)) for values in itertools.product(*lists.values())]


def _check_points(points: Any, axes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the points of a sweep from either of the two arguments that describe them."""
    if points is not None and axes:
        checks.fail("sweep", "either points or axes", f"both: {sorted(axes)}")
    points = points_of(axes) if points is None else list(checks.as_tuple("sweep", points=points))
    if not points or not all(
        isinstance(p, dict) and all(isinstance(k, str) for k in p) for p in points
    ):
        checks.fail(
            "sweep",
            "at least one point, each a dict of arguments of make_plan",
            checks.short_repr(points),
        )
    return points


def _make_plans(
    make_plan: Callable[..., Any], points: Sequence[dict[str, Any]], rounds: int
) -> list[Plan]:
    """Return the plan of each point; points that differ only in their seed share one plan."""
    try:
        signature = inspect.signature(make_plan)
    except (TypeError, ValueError):
        checks.fail(
            "sweep", "make_plan, a function that returns a plan", checks.short_repr(make_plan)
        )
    parameters = signature.parameters
    takes_seed = "seed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    plans, plan_of = [], {}
    for point in points:
        arguments = {k: v for k, v in point.items() if k != "seed" or takes_seed}
        # Points with equal arguments share a plan, and with it the arrays of the plan.
        argument_key = tuple(
            (k, type(v), v if isinstance(v, (int, float, str)) else id(v))
            for k, v in sorted(arguments.items())
        )
        try:
            signature.bind(**arguments)
        except TypeError as error:
            checks.fail(
                "sweep",
                f"make_plan{signature} to take {sorted(arguments)}",
                checks.describe_error(error),
            )
        if argument_key not in plan_of:
            plan_of[argument_key] = make_plan(**arguments)
        plans.append(plan_of[argument_key])
    for plan in plans:
        checks.require_type("sweep", Plan, "make_plan", plan=plan)
        checks.require_device_rows("sweep", plan.fed)
    for plan in plan_of.values():
        check_schedules("sweep", plan, rounds)
    return plans


def sweep(
    make_plan: Callable[..., Any],
    *,
    rounds: int,
    points: list[dict[str, Any]] | None = None,
    evaluate_every: int | None = None,
    memory: float | None = None,
    tolerate: Sequence[str] = (),
    mesh: Any = None,
    watch: Callable[[str], None] | None = None,
    **axes: Sequence[Any],
) -> Sweep:
    """Run the plan `make_plan(**point)` of every point, with one program per static structure.

    The points are the cartesian product of `axes`, or the list `points`.  Their names are arguments
    of make_plan, and `seed`.  A point runs with the key jax.random.key(seed); the seed is 0 by
    default, and is also passed to make_plan if that has an argument `seed`.

    Args:
        make_plan: maps hyperparameters to a Plan.  It is called once per point on the host, before
            anything is compiled.
        rounds: the number of rounds of each point.
        points: a list with a dict of arguments for each point, instead of `axes`.
        evaluate_every: rounds between evaluations; by default about twenty evaluations.
        memory: bytes on each device for the points that run at the same time.  The default is the
            free memory of an accelerator, and 4 GiB on a CPU.  The number of points is first
            estimated cautiously; if the compiled program takes more memory than allowed, it is
            compiled again for fewer points, at most twice.  A warning says if even that does not
            fit into an accelerator, or into the `memory` that you pass.
        tolerate: names of Health counts that may be positive, such as ("empty_cohort",).
        mesh: devices that share the points: "auto", a number, or the result of
            `jfl.mesh.devices`; None means one device.
        watch: a function of a string, such as `print`, that is called before each program runs:
            the string says how many points run at the same time, and how much memory each takes.
            If not all points of a program run at the same time, it is called again after each
            block of points, with the number of points that are done.
        **axes: for each argument of make_plan, a list of values or a single value.

    Returns:
        A Sweep, in the order of the points.  The result of a point equals that of a separate run.
        Points have independent noise, even if they share a seed.

    Privacy:
        A guarantee covers a single point.  Points that share a seed share cohorts and batches, so
        no epsilon covers several of them together, as `caveats` says.  Use different seeds if you
        release several points.

    Example:
        >>> [p["lr"] for p in points_of(dict(lr=[0.1, 0.2], seed=range(2)))]
        [0.1, 0.1, 0.2, 0.2]
    """
    points = _check_points(points, axes)
    if memory is not None:
        checks.require_positive("sweep", single=True, memory=memory)
    tolerate = tolerated_health("sweep", tolerate)
    if watch is not None and not callable(watch):
        checks.fail(
            "sweep", "watch, a function of a string, such as print", checks.short_repr(watch)
        )
    counts = rounds_before_evaluations(rounds, evaluate_every)
    devices = meshes.devices(mesh, len(points))
    points = [p if "seed" in p else dict(p, seed=0) for p in points]
    seeds = [_key_of_seed(p["seed"]) for p in points]
    plans = _make_plans(make_plan, points, rounds)
    plans = pad_row_tables(plans)
    groups, identities = static_groups(plans), identity.plan_identities(plans)
    _reject_equal_noise_in_two_programs(points, plans, seeds, identities, groups)
    if meshes.spans_all_processes(devices):
        with meshes.explain_lost_process():
            meshes.require_agreement(
                "sweep",
                f"{[(w.tolist(), key) for w, key in zip(identities, seeds)]} {counts.tolist()}",
            )
    results, seconds, point_bytes = _run_programs(
        plans, seeds, identities, groups, counts, mesh, memory, watch
    )
    health = jax.tree.map(lambda *counts: np.array(counts, int), *[r.health for r in results])
    failed = np.any([getattr(health, f) * (f not in tolerate) for f in Health._fields], axis=0)
    for point, result, has_failed in zip(points, results, failed):
        if not has_failed and (signs := signs_of_divergence(*result[:3])):
            warnings.warn(
                f"sweep: the point {point} diverged: {signs}", RuntimeWarning, stacklevel=2
            )
    out = Sweep(
        points,
        plans,
        _stack_metrics([r.metrics for r in results]),
        health,
        failed,
        [r.params for r in results],
        len(groups),
        seconds,
        segments.sharing(plans, [p["seed"] for p in points]),
        point_bytes,
    )
    if failed.all():
        raise HealthError(
            f"sweep: expected a healthy point; {int(failed.sum())} of {len(points)} failed: "
            f"{ {f: getattr(health, f).tolist() for f in Health._fields} }.",
            out,
            health,
        )
    return out


class Trained(NamedTuple):
    """The result of one plan in `train`.

    Attributes:
        health: the Health counts of the run.
        metrics: Metrics after the last round, with leaves [1].
        params: the parameters after the last round.
        state: a Run without its key, from which `train` can continue; None if it was not kept.
    """

    health: Health
    metrics: Metrics
    params: Any
    state: Any


def train(
    plans: list[Plan],
    seeds: Sequence[int],
    rounds: int,
    states: Sequence[Any] | None = None,
    keep_states: bool = False,
) -> list[Trained]:
    """Train many plans in few programs, from the beginning or from given states.

    Args:
        plans: the plans.
        seeds: a seed for each plan, all different.
        rounds: the number of rounds for which to train each plan.
        states: for each plan, the state from which it continues, from an earlier call with the same
            plan and seed.  None starts all plans from the beginning.
        keep_states: whether to return the states after the last round.

    Returns:
        A Trained per plan.  Training in several calls gives the same result as in a single call.
    """
    plans = pad_row_tables(plans)
    keys = [jax.random.key(int(seed)) for seed in seeds]
    identities, groups = identity.plan_identities(plans), static_groups(plans)
    counts = rounds_before_evaluations(rounds, rounds)
    results, _, _ = _run_programs(
        plans,
        keys,
        identities,
        groups,
        counts,
        states=states,
        keep_states=keep_states,
        name="several runs",  # `jfl.choose` must not reveal how many
    )
    return results


def _run_programs(
    plans: list[Plan],
    keys: Sequence[Key],
    identities: Sequence[Any],
    groups: list[list[int]],
    counts: np.ndarray,
    mesh: Any = None,
    memory: float | None = None,
    watch: Callable[[str], None] | None = None,
    states: Sequence[Any] | None = None,
    keep_states: bool = False,
    name: str = "",
) -> tuple[list[Trained], np.ndarray, np.ndarray]:
    """Run each group of plans as one program.

    Args:
        plans: the plan of each point.
        keys: the key of each point.
        identities: UInt32[4] of each plan.
        groups: the indices of the points of each program, from `static_groups`.
        counts: Int[E], the rounds before each evaluation.
        mesh: as in `sweep`.
        memory: as in `sweep`.
        watch: as in `sweep`.
        states: as in `train`.
        keep_states: as in `train`.
        name: what runs, for messages; "" for the number of points.

    Returns:
        The result of each point, its share of the seconds, and its bytes, Float[S].
    """
    results: list[Any] = [None] * len(plans)
    seconds, point_bytes = np.zeros(len(plans)), np.zeros(len(plans))
    for members in groups:
        started = time.perf_counter()
        pick = lambda values, members=members: [values[i] for i in members]
        program = _Program(
            pick(plans),
            jnp.stack(pick(keys)),
            pick(identities),
            counts,
            meshes.devices(mesh, len(members)),
            states and pick(states),
            keep_states,
        )
        with compiling.report_stages(name or f"sweep of {counted(len(members), 'point')}"):
            too_large = program.fit(memory)
            if too_large and not name:
                warnings.warn(too_large, RuntimeWarning, stacklevel=3)
            if watch is not None:
                watch(str(program))
            for i, result in zip(members, program.run(watch)):
                results[i] = result
        point_bytes[members] = program.point_bytes
        seconds[members] = (time.perf_counter() - started) / len(members)
    return results, seconds, point_bytes


def _key_of_seed(seed: Any) -> Key:
    """Return the key of a point, whose seed may also be a key."""
    if not pytrees.is_key(seed):
        checks.require_seed("sweep", seed=seed)
        seed = jax.random.key(int(seed))
    return checks.as_key("sweep", seed)


def _stack_metrics(all_metrics: Sequence[Metrics]) -> Metrics:
    """Stack the metrics of all points; a field that only some points define is NaN for the rest."""
    names = [f for f in Metrics.__dataclass_fields__ if f != "custom"]
    out: dict[str, Any] = {f: _stack_or_nan([getattr(m, f) for m in all_metrics]) for f in names}
    customs = [m.custom or {} for m in all_metrics]
    custom = {n: _stack_or_nan([c.get(n) for c in customs]) for n in sorted(set().union(*customs))}
    return Metrics(**out, custom=custom or None)


def _stack_or_nan(values: Sequence[Any]) -> Any:
    """Stack values, with NaN instead of None; return None if all of them are None."""
    if all(v is None for v in values):
        return None
    like = next(v for v in values if v is not None)
    return np.stack(
        [np.full(np.shape(like), np.nan) if v is None else np.asarray(v) for v in values]
    )


def max_row_widths(plans: list[Plan]) -> dict[str, Any]:
    """Return the largest widths of `fed.index` and `fed.test_index` among the plans, by name.

    These tables list the rows of each client.  Plans whose clients own different rows can share a
    program if the tables have equal widths.
    """
    return {
        name: max(getattr(p.fed, name).shape[-1] for p in plans) for name in ("index", "test_index")
    }


def pad_row_tables(plans: list[Plan], to: dict[str, Any] | None = None) -> list[Plan]:
    """Pad `fed.index` and `fed.test_index` of all plans to the same widths.  Draws do not change.

    Args:
        plans: the plans.
        to: the widths by name; None means the `max_row_widths` of these plans.
    """
    to = max_row_widths(plans) if to is None else to
    # Plans that share a table or a federation also share the padded one.
    padded_tables, padded_feds = {}, {}

    def pad(table: Array, width: int) -> Array:
        if table.shape[-1] == width:
            return table
        if id(table) not in padded_tables:
            padding = ((0, 0), (0, width - table.shape[-1]))
            padded_tables[id(table)] = jnp.pad(table, padding)
        return padded_tables[id(table)]

    for fed in (p.fed for p in plans):
        if id(fed) not in padded_feds:
            new = {name: pad(getattr(fed, name), width) for name, width in to.items()}
            padded_feds[id(fed)] = dataclasses.replace(fed, **new)
    return [dataclasses.replace(p, fed=padded_feds[id(p.fed)]) for p in plans]


def static_groups(plans: list[Plan]) -> list[list[int]]:
    """Group plans that can share a program, and return the indices of the plans of each group.

    Plans share a program if they have the same static structure, and arrays of the same shapes and
    dtypes.  Their chunks may differ, because the program uses `largest_chunk`.
    """
    groups: dict[Any, list[int]] = {}
    for i, plan in enumerate(plans):
        shapes = tuple((np.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(plan))
        structure = jax.tree.structure(dataclasses.replace(plan, chunk=0))
        groups.setdefault((structure, shapes), []).append(i)
    return list(groups.values())


def largest_chunk(plans: list[Plan]) -> int:
    """Return the largest number of clients that one of these plans runs at the same time.

    The numbers may differ if the plans sample clients with different rates.
    """
    return max(p.chunk or p.sampler.capacity for p in plans)


def _reject_equal_noise_in_two_programs(
    points: Sequence[dict[str, Any]],
    plans: Sequence[Plan],
    seeds: Sequence[Key],
    identities: Sequence[Any],
    groups: Sequence[Sequence[int]],
) -> None:
    """Reject points with equal noise that would run in different programs.

    Points with the same seed and identity have the same noise.  Two programs may add numbers in a
    different order, so the difference of their results could be free of noise.
    """
    seen = {}
    for number, members in enumerate(groups):
        for i in (i for i in members if not plans[i].paired_noise):
            first_program, first_point = seen.setdefault(
                (hashing.on_host(seeds[i]).tobytes(), identities[i].tobytes()), (number, i)
            )
            if first_program != number:
                checks.fail(
                    "sweep",
                    "points with different computations or different seeds",
                    f"{checks.short_repr(points[first_point])} and "
                    f"{checks.short_repr(points[i])}, which have the same noise but differ in how "
                    "they are computed (a capacity, a gradient path, a function that is created "
                    "again for each point, two lambdas in one line)",
                    "Use different seeds, run only one of them, or put lambdas in separate lines.",
                )


def device_memory(share: float) -> float | None:
    """Return the fraction `share` of the free memory of this process's accelerator, in bytes.

    Return None if the device does not report its memory; a CPU does not.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    return share * (limit - stats.get("bytes_in_use", 0)) if limit else None


class _Program:
    """A vmapped program for plans of one structure, which runs a block of points at a time.

    Points with the same key have the same cohorts and batches.  If every key has the same number of
    points and there is no mesh, the points form rows with one key each, and the program draws
    cohorts and gathers batches once per row (bench/one_seed.py measures the gain).  Otherwise each
    point is a row.

    The arguments of the constructor are those of `_run_programs` for the points of the program.
    """

    def __init__(
        self,
        plans: list[Plan],
        keys: Key,
        identities: Sequence[Any],
        counts: ArrayLike,
        mesh: Any,
        states: Sequence[Any] | None = None,
        keep_states: bool = False,
    ):
        chunk = largest_chunk(plans)
        self.plans = [dataclasses.replace(p, mesh=mesh, chunk=chunk) for p in plans]
        self.keys, self.states, self.mesh = keys, states, mesh
        self.rows = _group_by_key(keys) if mesh is None else [[i] for i in range(len(plans))]
        self.in_rows = len(self.rows[0]) > 1  # otherwise the points are one axis of the program
        # For each leaf of a plan, its value in each of the plans.
        self.columns = list(zip(*map(jax.tree.leaves, plans)))
        self.mapped = tuple(_sharing_of(column, self.rows) for column in self.columns)
        treedef = jax.tree.structure(self.plans[0])
        self.static = dict(
            treedef=treedef, mapped=self.mapped, keep_states=keep_states, in_rows=self.in_rows
        )
        shared = tuple(column[0] for column, m in zip(self.columns, self.mapped) if m == SHARED)
        self.shared = meshes.replicate((shared, jnp.asarray(counts)), mesh)
        zero = np.zeros(hashing.NUM_WORDS, np.uint32)
        histories = identity.plan_identities(plans, identity.Reader.start)
        words = [
            (zero, zero) if plan.paired_noise else (plan_identity, history)
            for plan, plan_identity, history in zip(plans, identities, histories)
        ]
        # UInt32[points, 3, 4]: the identity, the history and the noise seed words of each point.
        self.noise = np.stack([np.stack([w, h, noise_seed_words(w, h, 0)]) for w, h in words])
        # The number of devices that share the points equally.
        self.devices = 1 if mesh is None else mesh.shape.get("points", 1)
        self.point_bytes = math.nan
        # The arguments of the first block, from compiling the program until it runs.
        self.first_arguments = None
        self._choose_block(len(plans))

    def fit(self, memory: float | None) -> str | None:
        """Choose how many points run at the same time, from the memory that the compiler reports.

        The first number of points is an estimate.  If the compiled program needs too much memory,
        it is compiled again for fewer points, at most twice.  The memory of a block is assumed to
        be a constant plus a part that is proportional to its points.

        Args:
            memory: bytes on each device; None means what the device has.

        Returns:
            A warning if the program needs more memory than it may use.
        """
        limit = lambda share: (
            memory if memory is not None else device_memory(share) or DEFAULT_MEMORY_BYTES
        )
        estimated, available = (
            meshes.min_over_processes(limit(share), self.mesh)
            for share in (ESTIMATED_MEMORY_FRACTION, COMPILED_MEMORY_FRACTION)
        )
        self._choose_block(estimated / (client_bytes(self.plans[0]) * largest_chunk(self.plans)))
        points, needed = 0, 0.0  # at first, the constant is assumed to be 0
        for attempt in range(1, MAX_COMPILATIONS + 1):
            last_points, last_bytes = points, needed
            points, needed = self.block // self.devices, self._compiled_bytes()
            if needed <= available or points == 1 or attempt == MAX_COMPILATIONS:
                break
            bytes_per_point = (needed - last_bytes) / (points - last_points)
            excess = (needed - available) / bytes_per_point if bytes_per_point > 0 else 1
            self._choose_block(points - max(1, excess))
        if needed <= available or (memory is None and not device_memory(1.0)):
            return None
        return (
            f"sweep: running {counted(points, 'point')} at a time needs {needed / 1e6:.3g} MB of "
            f"device memory, more than the {available / 1e6:.3g} MB that it may use. If it fails, "
            "pass a smaller chunk to jfl.plan, or choose a smaller batch or model."
        )

    def _choose_block(self, points: float) -> None:
        """Choose blocks of at most `points` points per device, as equal as possible.

        A block consists of whole rows or of a part of one row.
        """
        points = max(1, int(min(points, len(self.plans))))
        count, width = len(self.rows), len(self.rows[0])
        width = -(-width // -(-width // points))
        blocks = -(-count // (self.devices * max(1, points // len(self.rows[0]))))
        self.shape = self.devices * -(-count // (self.devices * blocks)), width

    @property
    def block(self) -> int:
        """The number of points that run at the same time."""
        return math.prod(self.shape)

    def _blocks(self) -> list[np.ndarray]:
        """Return the points of each block, Int[rows, points per row], or Int[points] without rows.

        The last blocks repeat their last row or point to reach the size of the program.
        """
        height, width = self.shape
        rows = np.array(self.rows)
        missing: Any = [(0, -n % size) for n, size in zip(rows.shape, self.shape)]
        rows = np.pad(rows, missing, mode="edge")
        if not self.in_rows:
            return np.split(rows[:, 0], len(rows) // height)
        return [
            rows[r : r + height, p : p + width]
            for r in range(0, len(rows), height)
            for p in range(0, rows.shape[1], width)
        ]

    def _compiled_bytes(self) -> float:
        """Return the device memory of a block beyond the arrays that all points share, in bytes.

        0 means that the compiler does not report it.
        """
        self.first_arguments = arguments = self._arguments(self._blocks()[0])
        lowered = _run_block_jit.lower(*arguments, **self.static)
        analysis = lowered.compile().memory_analysis()  # the next call reuses this program
        if analysis is None:
            return 0.0
        of_points = sum(x.nbytes for x in jax.tree.leaves(arguments[:5])) / self.devices
        needed = analysis.temp_size_in_bytes + analysis.output_size_in_bytes + of_points
        needed = -meshes.min_over_processes(-needed, self.mesh)
        self.point_bytes = needed / (self.block // self.devices)
        return needed

    def __str__(self) -> str:
        known = not math.isnan(self.point_bytes)
        megabytes = f", {self.point_bytes / 1e6:.3g} MB of device memory per point"
        each = megabytes if known else ""
        there = f" on each of {self.devices} devices" if self.devices > 1 else ""
        points = f"{len(self.plans)} points" if len(self.plans) > 1 else "1 point"
        return f"{points} as one program, {self.block // self.devices} at a time{there}{each}"

    def _arguments(self, block: np.ndarray) -> tuple[Any, ...]:
        """Return the arguments of the program for a block of points."""
        rows = block[:, 0] if self.in_rows else block

        def stack(values: Sequence[Any], points: np.ndarray) -> Array:
            """Stack the values of these points, Int[...]."""
            stacked = jnp.stack([jnp.asarray(values[i]) for i in points.flat])
            return stacked.reshape(*points.shape, *stacked.shape[1:])

        of_row, of_point = (
            tuple(stack(column, points) for column, m in zip(self.columns, self.mapped) if m == by)
            for by, points in ((BY_ROW, rows), (BY_POINT, block))
        )
        states = self.states and jax.tree.map(lambda *x: stack(x, block), *self.states)
        of_points = self.keys[rows], jnp.asarray(self.noise[block]), of_row, of_point, states
        axis = "points" if self.devices > 1 else None
        return *meshes.replicate(of_points, self.mesh, axis), *self.shared

    def run(self, watch: Callable[[str], None] | None = None) -> list[Trained]:
        """Run all blocks and return the result of each point; call `watch` between blocks."""
        out: dict[int, Trained] = {}
        for block in self._blocks():
            if out and watch is not None:
                watch(f"{len(out)} of {counted(len(self.plans), 'point')} done")
            arguments = self.first_arguments or self._arguments(block)
            self.first_arguments = None
            results = jax.tree.map(np.asarray, _run_block_jit(*arguments, **self.static))
            for at, point in np.ndenumerate(block):
                out.setdefault(point, Trained(*jax.tree.map(lambda x, at=at: x[at], results)))
        return [out[i] for i in range(len(self.plans))]


def _sharing_of(column: Sequence[Any], rows: list[list[int]]) -> int:
    """Return whether a leaf of the plans is SHARED, or varies BY_ROW or BY_POINT.

    Args:
        column: the leaf of each plan.
        rows: the points of each row.
    """
    differ = lambda members: any(not _are_equal(column[members[0]], column[i]) for i in members[1:])
    if any(differ(row) for row in rows):
        return BY_POINT
    if not differ([row[0] for row in rows]):
        return SHARED
    return BY_ROW if len(rows[0]) > 1 else BY_POINT


def _group_by_key(keys: Key) -> list[list[int]]:
    """Return the points of each row: those with the same key.

    If keys have different numbers of points, every point is a row.
    """
    points_of_key: dict[bytes, list[int]] = {}
    for i, words in enumerate(hashing.on_host(keys)):
        points_of_key.setdefault(words.tobytes(), []).append(i)
    rows = list(points_of_key.values())
    if any(len(row) != len(rows[0]) for row in rows):
        return [[i] for i in range(len(keys))]
    return rows


def _are_equal(a: Any, b: Any) -> bool:
    """Return whether two leaves are equal; keys, which an algorithm may hold, by their words."""
    return a is b or np.array_equal(hashing.on_host(a), hashing.on_host(b))


def _run_block(
    keys: Key,
    noise: Array,
    of_row: tuple[Any, ...],
    of_point: tuple[Any, ...],
    states: Tree,
    shared: tuple[Any, ...],
    counts: Array,
    *,
    treedef: Any,
    mapped: tuple[int, ...],
    keep_states: bool,
    in_rows: bool,
) -> Any:
    """Run a block of points and return the fields of a `Trained`, with leaves [points, ...].

    If `in_rows`, the points form a grid, and the leaves are [rows, points per row, ...].

    Args:
        keys: the key of each row, or of each point without rows.
        noise: UInt32[points, 3, 4] of `_Program.noise`.
        of_row: the leaves of the plans that vary BY_ROW, stacked.
        of_point: the leaves that vary BY_POINT, stacked.
        states: the stacked states to continue from, or None.
        shared: the leaves that all plans share.
        counts: Int[E], the rounds before each evaluation.
        treedef: the structure of the plans.
        mapped: SHARED, BY_ROW or BY_POINT for each leaf of a plan.
        keep_states: whether to return the states.
        in_rows: whether the points form rows.
    """

    def run_point(
        key: Key, words: Array, of_row: tuple[Any, ...], of_point: tuple[Any, ...], state: Any
    ) -> tuple[Any, ...]:
        leaves_of = {SHARED: iter(shared), BY_ROW: iter(of_row), BY_POINT: iter(of_point)}
        plan = treedef.unflatten([next(leaves_of[m]) for m in mapped])
        run = (
            init_run(key, plan, words[0], words[1])
            if state is None
            else dataclasses.replace(state, key=key)
        )
        run, metrics = scan_from(run, plan, counts, derive_noise_key(key, words[2]))
        # The caller knows the key, which cannot become a NumPy array.
        kept = dataclasses.replace(run, key=()) if keep_states else None
        return run.health, metrics, plan.algorithm.params(run.server), kept

    arguments = keys, noise, of_row, of_point, states
    if in_rows:  # whatever depends only on the key is computed once per row
        return jax.vmap(jax.vmap(run_point, (None, 0, None, 0, 0)))(*arguments)
    mesh = treedef.unflatten(mapped).mesh
    axis = "points" if mesh is not None and "points" in mesh.shape else None
    results = jax.vmap(run_point, spmd_axis_name=axis)(*arguments)
    if mesh is None:
        return results
    return jax.lax.with_sharding_constraint(results, meshes.replicated(mesh))


_run_block_jit = jax.jit(
    _run_block, static_argnames=("treedef", "mapped", "keep_states", "in_rows")
)
