"""Compile a plan for an accelerator that is not here, and report what its program does."""

import contextlib
import dataclasses
import functools
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy import stats

import jfl
from jfl.core.hashing import WORDS
from jfl.engine import sharding, simulate, slots, sweep
from jfl.engine.round import init_run
from jfl.privacy.mechanisms import correlated
from jfl.sampling.clients import BY_RATE

from . import counts, machines, program, workloads

MEMORY = dict(
    arguments="argument_size",
    results="output_size",
    shared="alias_size",
    temporary="temp_size",
    code="generated_code_size",
)
NAMES = dict(cuda="gpu", tpu="tpu")  # of jax.default_backend()


@dataclasses.dataclass
class Report:
    """What a compiler made of a program.

    Args:
        memory: bytes on one device; wide_written: instructions on 64 bits in the program that was
            handed to the compiler, which a TPU's compiler writes anew in 32 bits.
        steps: local steps of a client.
        turns: of loops that the compiler does not know.
    """

    target: str
    compile_seconds: float
    memory: dict
    wide_written: int
    loops: counts.Loop
    steps: int
    text: str
    turns: dict = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def rounds(self) -> counts.Loop:
        """The loop over rounds, by its name."""
        found = [loop for _, loop in self.loops.scoped(counts.ROUNDS)]
        if len(found) != 1:
            raise ValueError(
                f"need one loop in a scope {counts.ROUNDS!r}; got {len(found)}. jfl's engine names "
                "it: has the compiler lost the name?"
            )
        return found[0]

    def round(self, turns: str = "mean") -> counts.Cost:
        """One round, at the `mean` of the turns that were told or at their `capacity`."""
        return self.rounds.whole(turns)

    def once(self) -> counts.Cost:
        """What stands around the rounds: the evaluations among them."""
        return self.loops.whole(without=self.rounds)

    def step(self) -> counts.Cost | None:
        """One local step of the whole cohort; None where there is no loop over them."""
        found, cost = self.rounds.scoped(counts.LOCAL_STEPS), counts.Cost()
        for many, loop in found:
            cost = cost.plus(loop.whole(), many / self.steps)
        return cost if found else None

    def row(self) -> dict:
        """The numbers, as plain values."""
        step, mean, capacity = self.step(), self.round(), self.round("capacity")
        return dict(
            target=self.target,
            how="compiled",
            compile_seconds=round(self.compile_seconds, 1),
            memory=self.memory,
            wide_written=self.wide_written,
            round=mean.plain(),
            **({} if capacity == mean else dict(round_at_capacity=capacity.plain())),
            **({} if step is None else dict(step=step.plain())),
            once=self.once().plain(),
        )


@contextlib.contextmanager
def as_on(target: str):
    """Where jfl chooses by `jax.default_backend()`, it chooses as over there: in `jfl.plan`, and
    while a program is traced."""
    jax.clear_caches()  # of what was traced for this machine
    platform = NAMES[machines.TARGETS[target].platform]
    with mock.patch.object(jax, "default_backend", lambda: platform):
        yield
    jax.clear_caches()


def compiled(function, arguments, target: str, *, steps=1, turns=None, **static) -> Report:
    """The report of a jitted function of the engine.

    Args:
        arguments: shapes with their shardings.
        turns: as of `counts.read`.
        static: arguments that are no arrays.

    Raises:
        counts.UnknownLoops: for loops whose turns nobody knows; and whatever a compiler says.
    """
    machine = machines.TARGETS[target]
    with as_on(target):
        begun = time.perf_counter()
        lowered = function.lower(*arguments, **static)
        done = lowered.compile()
        seconds = time.perf_counter() - begun
    written = program.wide_lines(lowered.compiler_ir("hlo").as_hlo_text())
    found, text = done.memory_analysis(), done.as_text()
    memory = {k: int(getattr(found, f"{v}_in_bytes")) for k, v in MEMORY.items()} if found else {}
    loops = counts.read(text, machine, turns)
    return Report(target, seconds, memory, written, loops, steps, text, turns or {})


def shapes(tree):
    """The shapes of a tree of arrays, numbers and shapes."""
    one = lambda x: (
        x
        if isinstance(x, jax.ShapeDtypeStruct)
        else jax.ShapeDtypeStruct(np.shape(x), getattr(x, "dtype", None) or jnp.result_type(x))
    )
    return jax.tree.map(one, tree)


def _placed(tree, mesh, *axes):
    """Shapes that lie on the devices of a mesh, whole or split along an axis of it."""
    where = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.tree.map(lambda x: _shape_at(x, where), shapes(tree))


def _shape_at(x, where):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def _key():
    return jax.eval_shape(lambda: jax.random.key(0))


def _words(*count):
    return jax.ShapeDtypeStruct((*count, WORDS), jnp.uint32)


def chunk_turns(plan: jfl.Plan) -> dict:
    """How many chunks of a cohort of random size hold a client: the mean, and all.

    Devices wait for each other.  Where slots are dealt they need equally many chunks; where each
    runs those whose states it holds, the one that needs most counts.
    """
    sampler, devices = plan.sampler, sharding.num_devices(plan.mesh)
    if devices > 1 and plan.algorithm.stateful:
        if sampler.scheme == "full":
            return {}
        held = -(-sampler.clients // devices)
        turns, size = slots.chunk_layout_by_state(plan, held)
        # of a Poisson cohort each client comes by itself
        apart = sampler.scheme in BY_RATE
        drawn = (held, _chance(sampler)) if apart else (sampler.capacity, 1 / devices)
        law = stats.binom(*drawn)
        needed = 1 - law.cdf(np.arange(turns) * size) ** devices
    else:
        count, size = slots.chunk_layout(plan)
        if sampler.scheme not in BY_RATE:
            return {}
        turns, together = count // devices, size * devices
        needed = stats.binom(sampler.clients, _chance(sampler)).sf(np.arange(turns) * together)
    return {} if turns == 1 else dict(chunks=counts.Turns(float(needed.sum()), turns))


def _chance(sampler):
    """The probability that a client takes part in a round of which nobody knows the number."""
    return 1 / sampler.epoch if sampler.rate is None else float(sampler.rate) / sampler.separation


def earlier_turns(plan: jfl.Plan) -> dict:
    """How many earlier noises a round of correlated noise draws again, where that hangs on it."""
    strategy = correlated.strategy_of(plan.release)
    if strategy is None or strategy.memory or strategy.steady:
        return {}
    drawn = (strategy.noising() != 0).sum(1) - 1
    mean, most = float(drawn.mean()), int(drawn.max())
    return {} if most == 0 else dict(earlier_noise=counts.Turns(mean, most))


def run(plan: jfl.Plan, target: str, *, devices=1, evaluations=2, turns=None) -> Report:
    """What `jfl.simulate` compiles: rounds, evaluations, and what it computes once.

    Args:
        devices: that share each cohort.
    """
    mesh = machines.mesh(target, devices)
    plan = dataclasses.replace(plan, mesh=mesh if devices > 1 else None)
    with as_on(target):  # a chunk is larger where launches are dear
        turns = chunk_turns(plan) | earlier_turns(plan) | (turns or {})
        turns["evaluations"] = counts.Turns(evaluations, evaluations)
    state = jax.eval_shape(init_run, _key(), shapes(plan), _words(), _words())
    many = jax.ShapeDtypeStruct((evaluations,), jnp.int32)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    placed = _placed((state, plan, many, count, _words()), mesh)
    if devices > 1:
        parts = [
            jax.tree.map(_shape_at, part, sharding.shardings(part, mesh)) for part in placed[:2]
        ]
        placed = (*parts, *placed[2:])
    return compiled(
        simulate._scan,
        placed,
        target,
        steps=workloads.steps_of(plan),
        turns=turns,
    )


def grid(plans, target: str, *, points: int, devices=1, evaluations=2, turns=None) -> Report:
    """What `jfl.sweep` compiles for `points` points, each with a seed of its own.

    Args:
        plans: two or more, in one structure; the points differ in the numbers that they differ in.
        devices: that share the points.
    """
    every = machines.mesh(target, devices)
    mesh = Mesh(every.devices.reshape(devices, 1), every.axis_names, axis_types=every.axis_types)
    plans = [dataclasses.replace(plan, mesh=mesh if devices > 1 else None) for plan in plans]
    columns = list(zip(*map(jax.tree.leaves, plans)))
    differ = lambda column: any(_differ(column[0], x) for x in column[1:])
    mapped = tuple(sweep.BY_POINT if differ(column) else sweep.SHARED for column in columns)
    leaves = shapes([column[0] for column in columns])
    stacked = lambda x: jax.ShapeDtypeStruct((points, *x.shape), x.dtype)
    varied = tuple(stacked(x) for x, moves in zip(leaves, mapped) if moves)
    shared = tuple(x for x, moves in zip(leaves, mapped) if not moves)
    split = ("points",) if devices > 1 else ()
    many = jax.ShapeDtypeStruct((evaluations,), jnp.int32)
    return compiled(
        sweep._points,
        (
            *_placed((stacked(_key()), _words(points, 3), varied), mesh, *split),
            None,  # no states to go on from
            *_placed((shared, many), mesh),
        ),
        target,
        steps=workloads.steps_of(plans[0]),
        turns=turns,
        treedef=jax.tree.structure(plans[0]),
        mapped=mapped,
        keeps=False,
        in_rows=False,
    )


def _differ(one, other):
    """Shapes never differ between plans of one structure; numbers may."""
    if isinstance(one, jax.ShapeDtypeStruct) or isinstance(other, jax.ShapeDtypeStruct):
        return False
    return not np.array_equal(one, other)


# --- for a reader


def _scaled(x, unit=""):
    for prefix in ("", "k", "M", "G"):
        if abs(x) < 1000:
            return f"{x:.3g} {prefix}{unit}"
        x /= 1000
    return f"{x:.3g} T{unit}"


def words(cost: counts.Cost) -> str:
    """A cost in one line."""
    kinds = ", ".join(f"{n:g} {kind}" for kind, n in cost.launches.most_common())
    parts = [
        f"{cost.launches.total():g} launches ({kinds})",
        _scaled(cost.bytes, "B"),
        _scaled(cost.flops, "flop"),
        f"{_scaled(cost.other)} other operations",
    ]
    if cost.wide:
        parts.append(f"{_scaled(cost.wide)} of them on 64 bits")
    if cost.collectives:
        found = ", ".join(f"{n:g} {name}" for name, n in cost.collectives.items())
        parts.append(f"{found} of {_scaled(cost.collective_bytes, 'B')}")
    if cost.host_waits:
        parts.append(f"{cost.host_waits:g} waits of the host")
    parts.append(f"floor {cost.seconds * 1e6:.4g} us ({cost.busy * 1e6:.3g} without launches)")
    return "; ".join(parts)


def shown(report: Report, launches: int = 0) -> str:
    """A report for a reader, with so many launches of the innermost known loop, slowest first."""
    memory = ", ".join(f"{name} {_scaled(size, 'B')}" for name, size in report.memory.items())
    step, capacity = report.step(), report.round("capacity")
    lines = [
        f"compiled for {report.target} in {report.compile_seconds:.0f} s; "
        f"{report.wide_written} instructions on 64 bits were written",
        f"  memory {memory}",
        f"  once   {words(report.once())}",
        f"  round  {words(report.round())}",
    ]
    if capacity != report.round():
        lines.append(f"  round  at capacity: {words(capacity)}")
    if step is not None:
        lines.append(f"  step   {words(step)}")
    for many, loop in report.rounds.every():
        lines.append(f"    {many:g} x {loop.scope or loop.name}: {words(loop.turn)}")
    chosen = [loop for _, loop in report.rounds.scoped(counts.LOCAL_STEPS)] or [report.rounds]
    slowest = sorted(chosen[0].launches, key=lambda one: -one.seconds)[:launches]
    for one in slowest:
        arrays = " ".join(map(str, one.arrays[:3]))
        lines.append(
            f"    {one.seconds * 1e6:8.3g} us {one.kind:<11} {one.name:<34} "
            f"{_scaled(one.bytes, 'B'):>9} {arrays:<30} {one.source[-80:]}"
        )
    return "\n".join(lines)
