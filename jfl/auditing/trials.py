"""Many runs of one plan as one program, and what an adversary observes of each."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..core.errors import HealthError
from ..core.records import Plan
from ..engine import devices
from ..engine.round import init
from ..engine.simulate import scan
from .watching import WatchedClient

BLOCK = 4096  # trials at once on a device: more are no faster


def watch(key: jax.Array, plan: Plan, rounds: int) -> tuple[jax.Array, jax.Array]:
    """Run a watched plan once.

    Returns:
        Float[R, ...], the observations of each round, followed by those of personal models and by
        the logarithm of an adaptive clip norm; and whether a value was not finite.
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


def observe(key: jax.Array, plan: Plan, rounds: int) -> tuple[jax.Array, jax.Array]:
    """Same as `watch`, with the observations of a round in one row, Float[R, k]."""
    seen, bad = watch(key, plan, rounds)
    return seen.reshape(rounds, -1), bad


@functools.partial(jax.jit, static_argnums=(2, 3))
def _block(keys, plan, rounds, mesh=None):
    """Run a block; the devices of a mesh run equal parts and do not communicate."""
    runs = lambda keys, plan: jax.vmap(lambda key: observe(key, plan, rounds))(keys)
    if mesh is None:
        return runs(keys, plan)
    share, whole = PartitionSpec(mesh.axis_names), PartitionSpec()
    split = jax.shard_map(
        runs, mesh=mesh, in_specs=(share, whole), out_specs=share, check_vma=False
    )
    return split(keys, plan)


def block_size(plan: Plan, rounds: int, trials: int, memory: float, devices: int = 1) -> int:
    """Return how many trials run at once, a multiple of `devices`.

    A block has at most BLOCK trials per device, and fits into `memory` bytes of each device
    according to the compiled program.  Blocks are as equal as possible, since the last one is
    padded with runs that are dropped.
    """
    size = min(BLOCK, -(-trials // devices))
    while True:
        keys = jax.eval_shape(lambda size=size: jax.random.split(jax.random.key(0), size))
        found = _block.lower(keys, plan, rounds).compile().memory_analysis()
        needed = 0 if found is None else found.temp_size_in_bytes + found.output_size_in_bytes
        if needed <= memory or size == 1:
            return _even(trials, size * devices, devices)
        size = max(1, min(size // 2, int(size * memory / needed)))


def _even(trials, most, devices):
    """Return the smallest multiple of `devices` that needs no more blocks than `most` does."""
    each = -(-trials // -(-trials // most))
    return -(-each // devices) * devices


def run_blocks(
    keys: jax.Array, plan: Plan, rounds: int, block: int, mesh: Any = None, first: int = 0
) -> Iterator[np.ndarray]:
    """Yield the observations of each block of runs, Float32[n, R, k].

    Args:
        keys: [trials], one per run.
        plan: a watched plan from `canaries.experiment`.
        rounds: the number of rounds of each run.
        block: the number of runs at once.  The last block is padded with runs that are dropped.
        mesh: devices that share a block: None, a number, "auto".
        first: the number of runs to skip, which are known.

    Raises:
        HealthError: If a run has a non-finite value.
    """
    mesh = devices.devices(mesh)
    place = (lambda x: x) if mesh is None else _shared(mesh)
    for begin in range(first, len(keys), block):
        some = keys[begin : begin + block]
        missing = block - len(some)
        if missing:
            some = jnp.concatenate([some, jnp.broadcast_to(keys[:1], (missing,))])
        found, bad = _block(place(some), plan, rounds, mesh)
        if bad := int(np.sum(bad)):  # on the host: devices that share runs send no messages
            refuse_not_finite(bad, block)
        yield np.asarray(found)[: block - missing]


def refuse_not_finite(bad: int, runs: int) -> None:
    """Raise HealthError for runs with non-finite values."""
    raise HealthError(
        "jfl.audit: expected runs that stay finite, but got a number that is not finite in "
        f"{bad} of {runs} runs, so that its canary counts as zero. Lower the clip "
        "norm or the learning rate of the plan, or take parameters in float32.",
        None,
        dict(nonfinite=bad),
    )


def _shared(mesh):
    axes = PartitionSpec(mesh.axis_names)
    return lambda keys: jax.device_put(keys, NamedSharding(mesh, axes))
