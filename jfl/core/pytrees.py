"""Pytree arithmetic."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from . import checks
from .aliases import Array, Tree

map = jax.tree.map
Form: TypeAlias = tuple[Any, tuple[Any, ...]]  # the structure of a tree, the types of its leaves


def on_device(x: Any) -> Array:
    """A copy of NumPy's numbers on the device, which shares no memory with them; unlike
    `jnp.array`, without a program to compile.

    NumPy makes the copy: on a CPU jax may share the memory of what it is given, whatever
    `may_alias` says.
    """
    return jax.device_put(np.array(x))


def zeros_like(t: Tree) -> Tree:
    return map(jnp.zeros_like, t)


def refuse_other_shapes(where: str, a: Tree, b: Tree) -> None:
    """Leaves of other shapes would broadcast without a word: one number of a release would be added
    to a whole matrix."""
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=False
    ):
        if jnp.shape(x) != jnp.shape(y):
            checks.fail(
                where,
                f"one shape of {path_of(path)}",
                f"{jnp.shape(x)} and {jnp.shape(y)}",
                "A release has the shapes of what is contributed: see `backward` of a linear map, "
                "and `post_process`.",
            )


def add(a: Tree, b: Tree) -> Tree:
    refuse_other_shapes("pytrees.add", a, b)
    return map(jnp.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    refuse_other_shapes("pytrees.sub", a, b)
    return map(jnp.subtract, a, b)


def scale(s: ArrayLike, t: Tree) -> Tree:
    return map(lambda x: jnp.asarray(s, x.dtype) * x, t)


def axpy(s: ArrayLike, a: Tree, b: Tree) -> Tree:
    """s * a + b."""
    refuse_other_shapes("pytrees.axpy", a, b)
    return map(lambda u, v: jnp.asarray(s, v.dtype) * u + v, a, b)


def norm(t: Tree) -> Array:
    """The Euclidean norm of all leaves together, in float32 or better."""
    return jnp.sqrt(
        sum(
            jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))))
            for x in jax.tree.leaves(t)
        )
    )


def norm_l1(t: Tree) -> Array | int:
    """The sum of absolute values of all leaves together, in float32 or better."""
    return sum(
        jnp.sum(jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32))))
        for x in jax.tree.leaves(t)
    )


def wide(t: Tree) -> Tree:
    """Float leaves in float32 at least: sums are not to be rounded more coarsely than that."""
    return map(
        lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)) if _floating(x) else x, t
    )


def dtypes_of(t: Tree) -> Form:
    """The structure and the types of a tree, hashable: what `cast` brings a tree back to."""
    leaves, treedef = jax.tree.flatten(t)
    return treedef, tuple(x.dtype for x in leaves)


def cast(t: Tree, form: Form) -> Tree:
    """Float leaves in the types of `form`; a tree of another structure stays as it is."""
    leaves, treedef = jax.tree.flatten(t)
    if treedef != form[0]:
        return t
    return treedef.unflatten(
        [
            x.astype(d) if _floating(x) and jnp.issubdtype(d, jnp.floating) else x
            for x, d in zip(leaves, form[1])
        ]
    )


def _floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def size(t: Tree) -> int:
    return sum(x.size for x in jax.tree.leaves(t))


def all_finite(t: Tree) -> Array:
    """Bool[]: every value of every float leaf is finite."""
    leaves = [x for x in jax.tree.leaves(t) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in leaves] or [True]))


def gather_rows(t: Tree, ids: Array) -> Tree:
    """Rows `ids` of every leaf; an id past the end reads zeros (masked later)."""
    return map(lambda x: x.at[ids].get(mode="fill", fill_value=0), t)


def scatter_rows(t: Tree, ids: Array, rows: Tree) -> Tree:
    """Write rows back; ids past the end are dropped, so an empty slot writes nothing."""
    return map(lambda x, r: x.at[ids].set(r, mode="drop"), t, rows)


def keep(mask: Array, t: Tree) -> Tree:
    """Rows where `mask` holds, zeros elsewhere; `where`, since 0 * nan is nan."""
    return map(
        lambda x: jnp.where(
            mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, jnp.zeros((), x.dtype)
        ),
        t,
    )


# --- by the paths of leaves, such as "Dense_0/kernel"


def path_of(keys: Iterable[Any]) -> str:
    """A path of jax.tree_util as words; "params" for a tree that is one leaf."""
    names = [jax.tree_util.keystr((key,), simple=True) for key in keys]
    # a variable of flax.nnx is a node with one child, its value
    return "/".join(name for name in names if name != "value") or "params"


def by_path(t: Tree) -> dict[str, Any]:
    """Leaves by their paths."""
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(t)}


def map_by_path(f: Callable[[str, Any], Any], t: Tree) -> Tree:
    """f(path, leaf) in the place of each leaf."""
    return jax.tree_util.tree_map_with_path(lambda keys, leaf: f(path_of(keys), leaf), t)
