"""What of a run lies where on the devices of a mesh, and what they tell each other.

Every device holds the rows and the server's state whole; held-out rows, and what clients remember,
are divided where they come out even.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core import pytrees
from ..core.aliases import Tree
from ..core.records import Plan, Run
from .devices import put, replicated

HALF = 12  # bits: so many, of 4,096 devices, add up in float32 without error
HELD_OUT = ("x_test", "y_test", "test_index", "test_size")
BLOCK = 2**26  # bytes of states that leave their devices at once


def num_devices(mesh: Mesh | None) -> int:
    """How many devices share each cohort."""
    return 1 if mesh is None else mesh.shape["clients"]


def _even(x: Any, mesh: Mesh | None) -> bool:
    return x.shape[0] % num_devices(mesh) == 0


def shardings(tree: Plan | Run, mesh: Mesh) -> Tree:
    """For each array of a plan or a run, where it lies."""

    def one(path: Sequence[Any], x: Any) -> NamedSharding:
        names = tuple(getattr(key, "name", None) for key in path)
        divided = names[0] == "client_states" or (names[0] == "fed" and names[1] in HELD_OUT)
        return _divided(mesh) if divided and _even(x, mesh) else replicated(mesh)

    return jax.tree_util.tree_map_with_path(one, tree)


Placed = TypeVar("Placed", Plan, Run)


def place(tree: Placed, mesh: Mesh | None) -> Placed:
    """A plan or a run on the devices of a mesh."""
    return tree if mesh is None else jax.tree.map(put, tree, shardings(tree, mesh))


def _divided(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec("clients"))


def constrain_client_states(states: Tree, mesh: Mesh | None) -> Tree:
    """As `place`, of what clients remember, inside a program."""
    if (
        mesh is None
        or num_devices(mesh) == 1
        or not all(_even(x, mesh) for x in jax.tree.leaves(states))
    ):
        return states
    return jax.lax.with_sharding_constraint(states, _divided(mesh))


def pad_client_states(states: Tree, mesh: Mesh | None) -> Tree:
    """States [C, ...] with as many more as the devices need to hold equally many each."""
    if num_devices(mesh) == 1:
        return states
    more = lambda x: [(0, -len(x) % num_devices(mesh))] + [(0, 0)] * (x.ndim - 1)
    return pytrees.map(lambda x: x if _even(x, mesh) else jnp.pad(x, more(x)), states)


def unpad_client_states(states: Tree, like: Tree) -> Tree:
    """`padded` states without those of nobody: as many as there were before."""
    return pytrees.map(lambda x, old: x[: len(old)], states, like)


def gather_to_host(states: Tree) -> Tree:
    """States that lie on the devices of several processes, as NumPy's arrays in each of them.

    Blocks of clients travel one after another, so that no device has to hold them all.
    """

    def one(x: Any) -> np.ndarray:
        out = np.empty(x.shape, x.dtype)
        step = max(1, BLOCK * len(x) // max(x.nbytes, 1))
        for first in range(0, len(x), step):
            some = out[first : first + step]
            some[:] = _whole(x.sharding.mesh, len(some))(x, first)
        return out

    return jax.tree.map(one, states)


@functools.lru_cache
def _whole(mesh: Mesh, many: int) -> Callable[..., Any]:
    """A function of an array and a place: so many rows from there on, on every device."""
    rows = lambda x, first: jax.lax.dynamic_slice_in_dim(x, first, many)
    return jax.jit(rows, out_shardings=replicated(mesh))


def psum_exact(tree: Any) -> Any:
    """In a program of all devices: the sum over them of what each has, in one message.

    A message has one type, so whole numbers travel as two halves each that float32 adds up without
    error; they are counts, not negative.
    """
    leaves, treedef = jax.tree.flatten(tree)
    is_count = [x.dtype == jnp.int32 for x in leaves]
    counts = [x for x, is_one in zip(leaves, is_count) if is_one]
    halves = [(x >> HALF, x % 2**HALF) for x in counts]
    sent = [x for x, is_one in zip(leaves, is_count) if not is_one]
    sent, halves = jax.lax.psum(
        (sent, jax.tree.map(lambda x: x.astype(jnp.float32), halves)), "clients"
    )
    counts = [high.astype(jnp.int32) * 2**HALF + low.astype(jnp.int32) for high, low in halves]
    sums, counts = iter(sent), iter(counts)
    return treedef.unflatten([next(counts if is_one else sums) for is_one in is_count])


def sum_of_parts(sums: Callable[..., Any], given: Any, items: Any, mesh: Mesh | None) -> Any:
    """`sums(given, items, mask)` of all items, of which each device takes its part.

    Args:
        sums: a function of `given`, items [n, ...] and Bool[n], whose sums are of those that the
            mask has.
        given: arrays that every device needs.
        items: arrays [N, ...].
    """
    many, devices = len(jax.tree.leaves(items)[0]), num_devices(mesh)
    if devices == 1:
        return sums(given, items, jnp.ones(many, bool))
    each, even = -(-many // devices), many % devices == 0

    def part(given: Tree, items: Tree) -> Tree:
        mask = jnp.ones(each, bool)
        if not even:  # the last device's part begins earlier than it would, and counts the rest
            begin = jax.lax.axis_index("clients") * each
            first = jnp.minimum(begin, many - each)
            items = pytrees.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, each), items)
            mask = first + jnp.arange(each) >= begin
        return psum_exact(sums(given, items, mask))

    every, share = PartitionSpec(), PartitionSpec("clients")
    return jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(every, share if even else every),
        out_specs=every,
        check_vma=False,
    )(given, items)
