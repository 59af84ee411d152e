"""Many runs of a plan as one program, which return an adversary's observations.

A file can keep the observations of finished runs.
"""

import base64
import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..core import checks, files, identity
from ..core.errors import ArgumentError, HealthError, ResumeRefused
from ..core.files import ResultStore
from ..core.records import Plan
from ..engine import devices
from ..engine.round import init
from ..engine.simulate import scan
from ..engine.sweep import COMPILED_MEMORY_FRACTION, device_memory
from ..gradients.per_example import Grad
from .canaries import Experiment
from .watching import WatchedClient

MAX_BLOCK = 4096  # number of trials that run at once on a device; more are not faster
CPU_MEMORY = 2**30  # bytes for the trials that run at once on a CPU


def run_trials(
    made: Experiment,
    rounds: int,
    trials: int,
    seed: int,
    memory: float | None = None,
    mesh: Any = None,
    progress: Callable[[int, int], None] | None = None,
    store: ResultStore | None = None,
) -> list[np.ndarray]:
    """Return the observations of all runs, Float32[trials, R, k] of each side.

    Args:
        made: the plans of both sides.
        rounds, trials, seed, memory, mesh, progress: see `jfl.audit`.
        store: the result of `open_store`.  Runs in it are not run again, and new ones are added.
    """
    report = progress or (lambda done, total: None)
    seen: tuple[list, list] = ([], [])
    if store is not None:
        stored: Any = store.records  # by (side, first)
        for (side, _), record in sorted(stored.items()):
            block = np.frombuffer(base64.b64decode(record["seen"]), "<f4")
            seen[side].append(block.reshape(record["shape"]))
        store.records.clear()
    done = [sum(map(len, side)) for side in seen]
    if sum(done):
        report(sum(done), 2 * trials)
    if sum(done) < 2 * trials:
        keys = jax.random.split(jax.random.key(seed), (2, trials))
        mesh = devices.devices(mesh)
        memory = memory or device_memory(COMPILED_MEMORY_FRACTION) or CPU_MEMORY
        num_devices = 1 if mesh is None else mesh.size

        def lower(size):
            some = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), size))
            return _block.lower(some, made.inside, rounds)

        block = block_size(lower, trials, memory, num_devices)
        for side, plan in enumerate((made.inside, made.outside)):
            for found in _run_blocks(keys[side], plan, rounds, block, mesh, done[side]):
                if store is not None:
                    text = base64.b64encode(found.astype("<f4").tobytes()).decode()
                    store.put([dict(side=side, first=done[side], shape=found.shape, seen=text)])
                    store.records.clear()
                seen[side].append(found)
                done[side] += len(found)
                report(sum(done), 2 * trials)
    return [np.concatenate(side) for side in seen]


def block_size(lower: Callable[[int], Any], trials: int, memory: float, devices: int = 1) -> int:
    """Return how many trials run at once, a multiple of `devices`.

    A block has at most MAX_BLOCK trials per device, and fits into `memory` bytes of each device
    according to the compiled program.  Blocks are as equal as possible, since the last one is
    padded with runs that are dropped.

    Args:
        lower: a function from the number of trials of a block to the lowered program.
        trials: the number of all trials.
        memory: bytes of each device.
        devices: the number of devices that share a block.
    """
    size = min(MAX_BLOCK, -(-trials // devices))
    while size > 1:
        found = lower(size).compile().memory_analysis()
        needed = 0 if found is None else found.temp_size_in_bytes + found.output_size_in_bytes
        if needed <= memory:
            break
        size = max(1, min(size // 2, int(size * memory / needed)))
    num_blocks = -(-trials // (size * devices))
    return -(-trials // (num_blocks * devices)) * devices


def _run_blocks(
    keys: jax.Array, plan: Plan, rounds: int, block: int, mesh: Any = None, first: int = 0
) -> Iterator[np.ndarray]:
    """Yield the observations of each block of runs, Float32[n, R, k].

    Args:
        keys: [trials], one per run.
        plan: a watched plan from `canaries.experiment`.
        rounds: the number of rounds of each run.
        block: the number of runs at once.  The last block is padded with runs that are dropped.
        mesh: the devices that share a block; None means one.
        first: the number of runs to skip, which are known.

    Raises:
        HealthError: If a run has a non-finite value.
    """
    for begin in range(first, len(keys), block):
        batch = keys[begin : begin + block]
        missing = block - len(batch)
        batch = jnp.concatenate([batch, jnp.broadcast_to(keys[:1], (missing,))])
        if mesh is not None:
            batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
        found, bad = _block(batch, plan, rounds, mesh)
        # counted on the host, since devices that share runs do not communicate
        refuse_not_finite(int(np.sum(bad)), block)
        yield np.asarray(found)[: block - missing]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _block(keys, plan, rounds, mesh=None):
    """Run a block; the devices of a mesh run equal parts and do not communicate."""

    def observe(key, plan):
        seen, bad = watch(key, plan, rounds)
        return seen.reshape(rounds, -1), bad

    runs = jax.vmap(observe, in_axes=(0, None))
    if mesh is not None:
        share, whole = PartitionSpec(mesh.axis_names), PartitionSpec()
        runs = jax.shard_map(
            runs, mesh=mesh, in_specs=(share, whole), out_specs=share, check_vma=False
        )
    return runs(keys, plan)


def watch_once(key: jax.Array, plan: Plan, rounds: int) -> np.ndarray:
    """Return what is observed of each canary in one run.

    Args:
        key: the key of the run.
        plan: the result of `trainings.with_coins`.
        rounds: the number of rounds.

    Returns:
        Float32[m, R, k], k numbers of each of m canaries in each of R rounds.
    """
    seen, bad = watch(key, plan, rounds)
    refuse_not_finite(int(bad), 1)
    return np.asarray(seen).swapaxes(0, 1)


@functools.partial(jax.jit, static_argnums=2)
def watch(key: jax.Array, plan: Plan, rounds: int) -> tuple[jax.Array, jax.Array]:
    """Run a watched plan once.

    Args:
        key: the key of the run.
        plan: a plan whose algorithm is the result of `watching.watched`.
        rounds: the number of rounds.

    Returns:
        Float[rounds, ...], the observations of each round, and whether any value was not finite.
        Observations of personal models and the logarithm of an adaptive clip norm, if the plan has
        them, come last in each round.
    """
    run, metrics = scan(init(key, plan), plan, jnp.ones(rounds, jnp.int32))
    seen: Any = run.server.seen
    if isinstance(run.client_states, WatchedClient):  # the only client of the plan
        seen = jnp.concatenate([seen, run.client_states.seen[0]], axis=-1)
    if metrics.clip_norm is not None:
        shape = (rounds, *[1] * (seen.ndim - 1))
        clip = jnp.log(metrics.clip_norm).reshape(shape)
        seen = jnp.concatenate([seen, jnp.broadcast_to(clip, (*seen.shape[:-1], 1))], axis=-1)
    bad: Any = run.health.nonfinite + run.health.nonfinite_rows > 0
    return seen, bad


def refuse_not_finite(bad: int, runs: int, where: str = "jfl.audit") -> None:
    """Raise a HealthError if any run had a value that is not finite.

    Args:
        bad: the number of such runs.
        runs: the number of all runs.
        where: the public function, for the message.
    """
    if bad:
        raise HealthError(
            f"{where}: expected runs that stay finite, but got a number that is not finite in "
            f"{bad} of {runs} runs, so that its canary counts as zero. Lower the clip "
            "norm or the learning rate of the plan, or use float32 parameters.",
            None,
            dict(nonfinite=bad),
        )


def open_store(path: str | PathLike, plan: Plan, made: Experiment, asked: dict) -> ResultStore:
    """Open the file with the finished runs of an audit, or create it.

    Args:
        path: the file.
        plan: the audited plan.
        made: the plans of both sides.
        asked: rounds, trials, seed, sees, unit, view and adjacency.

    Raises:
        ResumeRefused: If the file belongs to another audit.
    """

    def refuse(expected, got):
        hint = "Name another file, or remove this one: this audit cannot use its runs."
        checks.fail("jfl.audit keep=", expected, got, hint, ResumeRefused)

    words = lambda p: "".join(f"{int(w):08x}" for w in np.asarray(identity.plan_identity(p)))
    # The way in which gradients are computed is not part of a plan's identity, but is audited too.
    is_grad = lambda node: isinstance(node, Grad)
    grads = [g for g in jax.tree.leaves(plan.algorithm, is_leaf=is_grad) if is_grad(g)]
    version = importlib.metadata.version
    question = dict(
        plan=words(plan),
        canary=[words(made.inside), words(made.outside)],
        mesh=None if plan.mesh is None else str(plan.mesh),
        chunk=plan.chunk,
        gradients=[f"{g.path}, microbatch {g.microbatch}" for g in grads],
        **asked,
        jfl=f"{version('jfl')} ({files.source()})",
        jax=f"{version('jax')} on {jax.default_backend()}",
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        store = ResultStore(
            path,
            key=lambda record: (record["side"], record["first"]),
            fields=("seen", "shape"),
            head=("question",),
            signed=True,
        )
    except ArgumentError as error:
        refuse("a file that an audit wrote", f"{path}: {error}")
    if store.head is None:
        if Path(path).exists():
            refuse("a file that an audit wrote", f"{path}, without its first line")
        store.begin(dict(question=question))
    elif store.head["question"] != question:
        differences = identity.differences(store.head["question"], question)
        refuse(f"the runs of this audit in {path}", "; ".join(differences[:5]))
    return store
