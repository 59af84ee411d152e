"""Division of a run among devices: its arrays, its clients, and sums of results.

Every device holds all training rows and the server state.  Test rows and client states are divided
among the devices if their number is a multiple of the number of devices.

A slot is a place for one client of the cohort.  Empty slots have weight 0.  A chunk is a group of
slots that one device runs in parallel; a device runs its chunks sequentially.  Functions return
chunks as (ids, times_drawn, repeat_index), each Int[chunks, slots].
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core import pytrees
from ..core.pytrees import Array, Tree
from ..core.records import Cohort, Plan, Run
from ..sampling import clients as sampling
from .devices import put, replicated

# On a CPU, a cohort of random size is divided into about so many chunks.
CPU_CHUNKS_PER_COHORT = 16
# Numbers with so many bits have an exact sum in float32 over up to 4,096 devices.
HALF_BITS = 12
# Fields of a federation that are divided among the devices.
TEST_FIELDS = ("x_test", "y_test", "test_index", "test_size")
# Bytes of client states that are gathered on every device at a time.
TRANSFER_BYTES = 2**26

# How an argument of a shard_map is divided among the devices.
REPLICATED, SPLIT = PartitionSpec(), PartitionSpec("clients")


def num_devices(mesh: Mesh | None) -> int:
    """Return the number of devices that share a cohort."""
    return 1 if mesh is None else mesh.shape["clients"]


def _divides_evenly(x: Any, mesh: Mesh | None) -> bool:
    """Return whether all devices can hold equally many entries of an array's first axis."""
    return x.shape[0] % num_devices(mesh) == 0


def shardings(tree: Plan | Run, mesh: Mesh) -> Tree:
    """Return the sharding of each array of a plan or a run."""

    def sharding_of(path: Sequence[Any], x: Any) -> NamedSharding:
        names = tuple(getattr(key, "name", None) for key in path)
        is_split = names[0] == "client_states" or (names[0] == "fed" and names[1] in TEST_FIELDS)
        if is_split and _divides_evenly(x, mesh):
            return NamedSharding(mesh, SPLIT)
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding_of, tree)


def place(tree: Any, mesh: Mesh | None) -> Any:
    """Put a plan or a run on the devices of a mesh."""
    return tree if mesh is None else jax.tree.map(put, tree, shardings(tree, mesh))


def constrain_client_states(states: Tree, mesh: Mesh | None) -> Tree:
    """Divide client states among the devices as `place` does, inside a compiled program."""
    is_even = all(_divides_evenly(x, mesh) for x in jax.tree.leaves(states))
    if mesh is None or num_devices(mesh) == 1 or not is_even:
        return states
    return jax.lax.with_sharding_constraint(states, NamedSharding(mesh, SPLIT))


def pad_rows(tree: Tree, mesh: Mesh | None) -> Tree:
    """Pad arrays [N, ...] with zeros so that every device holds the same number of rows."""
    if num_devices(mesh) == 1:
        return tree
    padding = lambda x: [(0, -len(x) % num_devices(mesh))] + [(0, 0)] * (x.ndim - 1)
    pad = lambda x: x if _divides_evenly(x, mesh) else jnp.pad(x, padding(x))
    return pytrees.map(pad, tree)


def unpad_rows(tree: Tree, like: Tree) -> Tree:
    """Remove the padding of `pad_rows`; `like` are the arrays before padding."""
    return pytrees.map(lambda x, old: x[: len(old)], tree, like)


def gather_to_host(states: Tree) -> Tree:
    """Gather client states that are spread over several processes to NumPy arrays in each process.

    The states are gathered block by block, so that no device has to hold all of them.
    """

    def gather(x: Any) -> np.ndarray:
        out = np.empty(x.shape, x.dtype)
        step = max(1, TRANSFER_BYTES * len(x) // max(x.nbytes, 1))
        for first in range(0, len(x), step):
            block = out[first : first + step]
            block[:] = _slice_on_every_device(x.sharding.mesh, len(block))(x, first)
        return out

    return jax.tree.map(gather, states)


@functools.lru_cache
def _slice_on_every_device(mesh: Mesh, num_rows: int) -> Callable[..., Any]:
    """Return a function of an array and an index that puts `num_rows` rows on every device."""
    rows = lambda x, first: jax.lax.dynamic_slice_in_dim(x, first, num_rows)
    return jax.jit(rows, out_shardings=replicated(mesh))


def psum_exact(tree: Any) -> Any:
    """Sum a tree over the devices of a shard_map, with exact sums of integers.

    All leaves are sent as floats, so that the devices exchange one message instead of one per
    dtype.  Int32 leaves must be non-negative counts.  Each is sent as two halves of its bits, whose
    sums are exact in float32.
    """
    is_count = lambda x: x.dtype == jnp.int32
    as_float = lambda x: x.astype(jnp.float32)
    as_int = lambda x: x.astype(jnp.int32)

    def split(x: Array) -> Any:
        return (as_float(x >> HALF_BITS), as_float(x % 2**HALF_BITS)) if is_count(x) else x

    def join(x: Array, total: Any) -> Array:
        if not is_count(x):
            return total
        high, low = total
        return as_int(high) * 2**HALF_BITS + as_int(low)

    return jax.tree.map(join, tree, jax.lax.psum(jax.tree.map(split, tree), "clients"))


def sum_of_parts(sum_items: Callable[..., Any], common: Any, items: Any, mesh: Mesh | None) -> Any:
    """Return the sums that `sum_items` computes over all items, computed by all devices together.

    Each device sums a part of the items.

    Args:
        sum_items: maps `common`, items [n, ...] and a mask Bool[n] to sums over the items for which
            the mask is True.
        common: arrays that every device needs.
        items: arrays [N, ...].
        mesh: the devices; None for one device, which sums all items.
    """
    num_items = len(jax.tree.leaves(items)[0])
    if num_devices(mesh) == 1:
        return sum_items(common, items, jnp.ones(num_items, bool))
    items = pad_rows(items, mesh)
    mask = jnp.arange(len(jax.tree.leaves(items)[0])) < num_items
    return jax.shard_map(
        lambda common, items, mask: psum_exact(sum_items(common, items, mask)),
        mesh=mesh,
        in_specs=(REPLICATED, SPLIT, SPLIT),
        out_specs=REPLICATED,
        check_vma=False,
    )(common, items, mask)


# --- Which slots run at the same time, and on which device


def chunk_layout(plan: Plan) -> tuple[int, int]:
    """Return the number of chunks into which `chunk_cohort` splits a cohort, and their slots.

    Slots are the places for clients in a chunk.  If the size of a cohort is fixed, the chunks are
    made as small as this number of chunks allows, so that few slots of the last one are empty.
    """
    capacity, devices = plan.sampler.capacity, num_devices(plan.mesh)
    size = min(plan.chunk or capacity, -(-capacity // devices))
    num_chunks = -(-capacity // (size * devices)) * devices
    if sampling.fills_every_slot(plan.sampler):
        size = -(-capacity // num_chunks)
    return num_chunks, size


def chunk_cohort(cohort: Cohort, plan: Plan) -> tuple[Any, ...]:
    """Divide a cohort into chunks, adding empty slots at its end.

    Each device gets the same number of chunks.  Consecutive slots of the cohort go to different
    devices.  Since its last slots are the empty ones, all devices get about the same work.

    Returns:
        ids, times_drawn and repeat_index of the slots, each Int[chunks, slots].  The chunks of a
        device follow each other, those of the first device first.
    """
    num_chunks, size = chunk_layout(plan)
    columns = _add_empty_slots(cohort[:3], num_chunks * size, plan)
    devices = num_devices(plan.mesh)
    return tuple(x.reshape(-1, devices).T.reshape(num_chunks, size) for x in columns)


def chunks_of_device(device: Array, cohort: Cohort, plan: Plan) -> tuple[Any, ...]:
    """Return the chunks of `chunk_cohort` that belong to one device."""
    each = chunk_layout(plan)[0] // num_devices(plan.mesh)
    chunks = chunk_cohort(cohort, plan)
    return tuple(jax.lax.dynamic_slice_in_dim(x, device * each, each) for x in chunks)


def chunk_layout_by_state(plan: Plan, num_states: int) -> tuple[int, int]:
    """Return the number of chunks into which `chunks_by_state` splits a cohort, and their slots.

    Each device runs the clients whose states it holds.  It needs enough slots, the places for
    clients in a chunk, for all of its clients that can be in one cohort.  For uniformly drawn
    cohorts a smaller number is used, which is exceeded only with negligible probability (see
    `sampling.tail_capacity`).

    Args:
        plan: the plan.
        num_states: the number of client states that a device holds.
    """
    sampler, devices = plan.sampler, num_devices(plan.mesh)
    if sampling.is_full_participation(sampler):
        num_chunks = -(-num_states // min(plan.chunk or num_states, num_states))
        return num_chunks, -(-num_states // num_chunks)
    slots = min(sampler.capacity, num_states)
    if sampler.scheme in ("without_replacement", "poisson", "truncated_poisson"):
        slots = min(slots, sampling.tail_capacity(sampler.capacity, 1 / devices, "mesh"))
    mean = sampler.capacity / devices
    # A CPU is as fast in small chunks, and they leave fewer slots empty.  On other devices every
    # chunk costs as many kernel launches as a whole cohort, so that nearly all clients should fit
    # into one.
    is_cpu = jax.default_backend() == "cpu"
    enough = int(np.ceil(mean / CPU_CHUNKS_PER_COHORT if is_cpu else mean + 2 * mean**0.5))
    size = min(plan.chunk or enough, enough, slots)
    return -(-slots // size), size


def chunks_by_state(
    device: Array, num_states: int, cohort: Cohort, plan: Plan
) -> tuple[tuple[Any, ...], Array]:
    """Return chunks with the clients of a cohort whose states a device holds.

    A device holds the states of `num_states` consecutive clients.  Unless all clients participate,
    the number of these clients in a cohort is random; chunks without a client do not run.

    Returns:
        The chunks, and Int[], the number of clients that found no slot.
    """
    num_chunks, size = chunk_layout_by_state(plan, num_states)
    num_slots = num_chunks * size
    if sampling.is_full_participation(plan.sampler):
        everyone = _add_empty_slots(cohort[:3], num_states * num_devices(plan.mesh), plan)
        first = device * num_states
        columns = [jax.lax.dynamic_slice_in_dim(x, first, num_states) for x in everyone]
        overflow = jnp.zeros((), jnp.int32)
    else:  # move the clients of this device to the front, in their order
        here = (cohort.times_drawn > 0) & (cohort.ids // num_states == device)
        columns = [jnp.where(here, x, e) for x, e in zip(cohort[:3], _empty_slot(plan))]
        _, *columns = jax.lax.sort((~here, *columns), num_keys=1, is_stable=True)
        overflow = (columns[1][num_slots:] > 0).sum(dtype=jnp.int32)
        columns = [x[:num_slots] for x in columns]
    columns = _add_empty_slots(columns, num_slots, plan)
    return tuple(x.reshape(num_chunks, size) for x in columns), overflow


def _add_empty_slots(columns: Sequence[Array], num_slots: int, plan: Plan) -> list[Array]:
    """Append empty slots to ids, times_drawn and repeat_index, up to a number of slots."""
    return [
        jnp.pad(x, (0, num_slots - len(x)), constant_values=e)
        for x, e in zip(columns, _empty_slot(plan))
    ]


def _empty_slot(plan: Plan) -> tuple[int, int, int]:
    """Return the id, times_drawn and repeat_index of an empty slot."""
    return plan.sampler.clients, 0, 0
