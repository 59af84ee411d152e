"""Where the arrays of a run are on the devices of a mesh, and how devices add up their results.

Every device holds all rows and the server state.  Test rows and client states are divided among
the devices if their number is a multiple of the number of devices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core import pytrees
from ..core.pytrees import Tree
from ..core.records import Plan, Run
from .devices import put, replicated

HALF_BITS = 12  # the sum of this many bits over 4,096 devices is exact in float32
TEST_FIELDS = ("x_test", "y_test", "test_index", "test_size")
TRANSFER_BYTES = 2**26  # of client states that are gathered on every device at a time

# How an argument of a shard_map is divided among the devices.
REPLICATED, SPLIT = PartitionSpec(), PartitionSpec("clients")


def num_devices(mesh: Mesh | None) -> int:
    """Return how many devices share each cohort."""
    return 1 if mesh is None else mesh.shape["clients"]


def _divides_evenly(x: Any, mesh: Mesh | None) -> bool:
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


Placed = TypeVar("Placed", Plan, Run)


def place(tree: Placed, mesh: Mesh | None) -> Placed:
    """Put a plan or a run on the devices of a mesh."""
    return tree if mesh is None else jax.tree.map(put, tree, shardings(tree, mesh))


def constrain_client_states(states: Tree, mesh: Mesh | None) -> Tree:
    """Divide client states among the devices as `place` does, inside a compiled program."""
    if mesh is None or num_devices(mesh) == 1:
        return states
    if not all(_divides_evenly(x, mesh) for x in jax.tree.leaves(states)):
        return states
    return jax.lax.with_sharding_constraint(states, NamedSharding(mesh, SPLIT))


def pad_client_states(states: Tree, mesh: Mesh | None) -> Tree:
    """Pad client states [C, ...] with zeros so that every device holds the same number."""
    if num_devices(mesh) == 1:
        return states
    padding = lambda x: [(0, -len(x) % num_devices(mesh))] + [(0, 0)] * (x.ndim - 1)
    pad = lambda x: x if _divides_evenly(x, mesh) else jnp.pad(x, padding(x))
    return pytrees.map(pad, states)


def unpad_client_states(states: Tree, like: Tree) -> Tree:
    """Remove the padding of `pad_client_states`; `like` are the states before it."""
    return pytrees.map(lambda x, old: x[: len(old)], states, like)


def gather_to_host(states: Tree) -> Tree:
    """Return client states that are spread over several processes as NumPy arrays in each of them.

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
    """Sum a tree over the devices of a shard_map, in one message, with exact counts.

    A message has one dtype.  An int32 is a non-negative count and is sent as two halves, whose sums
    are exact in float32.
    """
    leaves, treedef = jax.tree.flatten(tree)
    is_count = [x.dtype == jnp.int32 for x in leaves]
    counts = [x for x, is_one in zip(leaves, is_count) if is_one]
    halves = [(x >> HALF_BITS, x % 2**HALF_BITS) for x in counts]
    floats = [x for x, is_one in zip(leaves, is_count) if not is_one]
    message = floats, jax.tree.map(lambda x: x.astype(jnp.float32), halves)
    floats, halves = jax.lax.psum(message, "clients")
    as_int = lambda x: x.astype(jnp.int32)
    counts = iter([as_int(high) * 2**HALF_BITS + as_int(low) for high, low in halves])
    floats = iter(floats)
    return treedef.unflatten([next(counts if is_one else floats) for is_one in is_count])


def sum_of_parts(sum_items: Callable[..., Any], common: Any, items: Any, mesh: Mesh | None) -> Any:
    """Return `sum_items(common, items, mask)`, computed by all devices, each on a part of `items`.

    Args:
        sum_items: maps `common`, items [n, ...] and Bool[n] to sums over the items that are True in
            the mask.
        common: arrays that every device needs.
        items: arrays [N, ...].
        mesh: the devices.
    """
    num_items, devices = len(jax.tree.leaves(items)[0]), num_devices(mesh)
    if devices == 1:
        return sum_items(common, items, jnp.ones(num_items, bool))
    each, is_even = -(-num_items // devices), num_items % devices == 0

    def sum_on_device(common: Tree, items: Tree) -> Tree:
        mask = jnp.ones(each, bool)
        if not is_even:
            # The part of the last device overlaps that of the one before it, and the mask leaves
            # out the items that both have.
            begin = jax.lax.axis_index("clients") * each
            first = jnp.minimum(begin, num_items - each)
            items = pytrees.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, each), items)
            mask = first + jnp.arange(each) >= begin
        return psum_exact(sum_items(common, items, mask))

    return jax.shard_map(
        sum_on_device,
        mesh=mesh,
        in_specs=(REPLICATED, SPLIT if is_even else REPLICATED),
        out_specs=REPLICATED,
        check_vma=False,
    )(common, items)
