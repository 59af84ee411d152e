"""Arithmetic on pytrees, type aliases, and contexts that set the precision of a computation."""

import contextlib
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from . import checks

Array: TypeAlias = jax.Array
Key: TypeAlias = jax.Array
Number: TypeAlias = jax.Array | np.ndarray | float  # a scalar
Tree: TypeAlias = Any  # any pytree
Words: TypeAlias = Any  # UInt32[...], a NumPy array or a JAX array
Form: TypeAlias = tuple[Any, tuple[Any, ...]]  # the structure of a tree, and the dtypes of leaves

map = jax.tree.map


def on_device(x: Any) -> Array:
    """Copy a NumPy array to the device; the copy shares no memory with it.

    Unlike `jnp.array`, this compiles no program.  NumPy makes the copy, because on a CPU JAX may
    share the memory of its argument, whatever `may_alias` says.
    """
    return jax.device_put(np.array(x))


def is_key(x: Any) -> bool:
    """Return whether a value is a typed key of JAX's generators."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def keys_to_words(t: Tree) -> Tree:
    """Replace the keys in a tree by their words, which can be converted to NumPy arrays."""
    return map(lambda x: jax.random.key_data(x) if is_key(x) else x, t)


def words_to_keys(t: Tree, like: Tree) -> Tree:
    """Undo `keys_to_words`.

    Args:
        t: the tree with words.
        like: a tree of the same structure, with keys or their shapes where `t` has words of keys.
    """
    as_key = lambda x, k: jax.random.wrap_key_data(x, impl=jax.random.key_impl(k))
    has_keys = lambda k: jnp.issubdtype(k.dtype, jax.dtypes.prng_key)
    return map(lambda k, x: as_key(x, k) if has_keys(k) else x, like, t)


def zeros_like(t: Tree) -> Tree:
    return map(jnp.zeros_like, t)


def require_equal_shapes(where: str, a: Tree, b: Tree) -> None:
    """Reject trees a and b whose leaves differ in shape, since such leaves could be broadcast."""
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=False
    ):
        if jnp.shape(x) != jnp.shape(y):
            checks.fail(
                where,
                f"one shape of {path_of(path)}",
                f"{jnp.shape(x)} and {jnp.shape(y)}",
                "A release needs the shapes of the contributions: see `backward` of a linear map, "
                "and `post_process`.",
            )


def add(a: Tree, b: Tree) -> Tree:
    require_equal_shapes("pytrees.add", a, b)
    return map(jnp.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    require_equal_shapes("pytrees.sub", a, b)
    return map(jnp.subtract, a, b)


def scale(s: ArrayLike, t: Tree) -> Tree:
    """Return s * t, with the dtypes of t."""
    return map(lambda x: jnp.asarray(s, x.dtype) * x, t)


def axpy(s: ArrayLike, a: Tree, b: Tree) -> Tree:
    """Return s * a + b, where s is a number."""
    require_equal_shapes("pytrees.axpy", a, b)
    return map(lambda u, v: jnp.asarray(s, v.dtype) * u + v, a, b)


def norm(t: Tree) -> Array:
    """Return the Euclidean norm of all leaves together, in float32 or a wider dtype."""
    return jnp.sqrt(
        sum(
            jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))))
            for x in jax.tree.leaves(t)
        )
    )


def norm_l1(t: Tree) -> Array | int:
    """Return the sum of the absolute values of all leaves, in float32 or a wider dtype."""
    return sum(
        jnp.sum(jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32))))
        for x in jax.tree.leaves(t)
    )


def at_least_float32(t: Tree) -> Tree:
    """Convert float leaves in half precision to float32."""
    return map(
        lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)) if _floating(x) else x, t
    )


def dtypes_of(t: Tree) -> Form:
    """Return the structure of a tree and the dtypes of its leaves, for `cast_to`."""
    leaves, treedef = jax.tree.flatten(t)
    return treedef, tuple(x.dtype for x in leaves)


def cast_to(t: Tree, form: Form) -> Tree:
    """Convert float leaves to the dtypes of `form`, the result of `dtypes_of`.

    A tree of another structure is returned unchanged.
    """
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
    """Return the number of entries in all leaves together."""
    return sum(x.size for x in jax.tree.leaves(t))


def all_finite(t: Tree) -> Array:
    """Return Bool[]: whether every value of every float leaf is finite."""
    leaves = [x for x in jax.tree.leaves(t) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in leaves] or [True]))


def gather_rows(t: Tree, ids: Array) -> Tree:
    """Return rows `ids` of every leaf; an id past the end returns zeros."""
    return map(lambda x: x.at[ids].get(mode="fill", fill_value=0), t)


def scatter_rows(t: Tree, ids: Array, rows: Tree) -> Tree:
    """Return the tree with rows `ids` of every leaf replaced; ids past the end are ignored."""
    return map(lambda x, r: x.at[ids].set(r, mode="drop"), t, rows)


def mask_rows(mask: Array, t: Tree) -> Tree:
    """Replace rows for which `mask` is False by zeros, also if they contain NaN."""
    return map(
        lambda x: jnp.where(
            mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, jnp.zeros((), x.dtype)
        ),
        t,
    )


# --- functions of the paths of leaves, such as "Dense_0/kernel"


def path_of(keys: Iterable[Any]) -> str:
    """Return a path of jax.tree_util as a string; "params" for a tree that is a single leaf."""
    # A variable of flax.nnx is a node with one child, the attribute "value".
    of_variable = jax.tree_util.GetAttrKey("value")
    names = [jax.tree_util.keystr((key,), simple=True) for key in keys if key != of_variable]
    return "/".join(names) or "params"


def by_path(t: Tree) -> dict[str, Any]:
    """Return the leaves of a tree as a dict by path."""
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(t)}


def map_by_path(f: Callable[[str, Any], Any], t: Tree) -> Tree:
    """Return the tree with each leaf replaced by f(path, leaf)."""
    return jax.tree_util.tree_map_with_path(lambda keys, leaf: f(path_of(keys), leaf), t)


# --- precision


@contextlib.contextmanager
def in_float64() -> Generator[None]:
    """Compute in float64 inside the context, and broadcast as NumPy does.

    Results then do not depend on the user's configuration of JAX.
    """
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def in_full() -> Generator[None]:
    """Compute matrix products of float32 in full precision inside the context.

    An accelerator would otherwise round their factors to about 10 bits.
    """
    with jax.default_matmul_precision("highest"):
        yield
