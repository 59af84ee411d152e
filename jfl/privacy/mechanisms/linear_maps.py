"""Linear maps of contributions before the clip; the noisy sum is mapped back.

The release then has fewer coordinates, or others.  A map is two stages around a mechanism:

    there, back = jfl.linear_maps.projection(task, 500)
    jfl.chain(there, jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), back, jfl.divide(50))

The clip comes after the map, so it bounds what is summed whatever the map does: no epsilon rests on
the map.  Its randomness is public and the same for all contributions of a round.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

from ...core import checks
from ...core.pytrees import Array, Key, Tree
from ...core.random_streams import as_kernel_key
from ...core.records import Fn, Mechanism, Task, named
from .stages import After, Stage, numbers_of, require_like, shapes_like

__all__ = ["LinearMap", "linear_map", "projection", "rotation", "sparsification"]


LARGEST_FACTOR = 6  # a factor of a Hadamard transform has at most 2^6 rows
PUBLIC = 0x6D617073  # apart from all core.random_streams.Stream


class LinearMap(NamedTuple):
    """The two stages of a map."""

    there: Stage  # of a contribution, before the clip
    back: Stage  # of the noisy sum


def linear_map(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    seed: int = 0,
    each_round: bool = True,
) -> LinearMap:
    """Return a map of your own, as two stages of a chain.

    Args:
        forward: (key, contribution) -> what is clipped and summed, a pytree of floats.
        backward: (key, noisy sum) -> a release, in the shapes of a contribution.  For an unbiased
            release it is linear, and backward(forward(v)) is v on average over keys.
        seed: the seed of the key, which is public.
        each_round: whether every round has a separate key; otherwise all rounds share one.

    Privacy:
        That of the chain without it.  `forward` sees one contribution, and `backward` the noisy
        sum.  Arrays that they hold must be public; a plan in which one of them holds the
        federation's `x` or `y` is rejected.

    Example:
        >>> import jax.numpy as jnp
        >>> import jfl
        >>> there, back = linear_map(lambda key, v: v[:2], lambda key, v: jnp.append(v, 0.0))
        >>> chain = jfl.chain(there, jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), back)
        >>> [stage.name for stage in chain.stages]
        ['linear_map', 'clip_l2', 'total', 'gaussian', 'map_back']
    """
    where = "linear_maps.linear_map"
    for name, function in (("forward", forward), ("backward", backward)):
        if not callable(function) or isinstance(function, Fn):
            checks.fail(
                where, f"{name}, a plain function of (key, value)", checks.short_repr(function)
            )
    drawn = _drawn_by(where, seed, each_round)
    return LinearMap(
        Stage(Fn(_forward, drawn, dict(function=forward)), name="linear_map"),
        Stage(Fn(_backward, drawn, dict(function=backward)), name="map_back", role="post"),
    )


def rotation(like: Task | Any, *, seed: int = 0, each_round: bool = True) -> LinearMap:
    """Turn contributions: a few large coordinates become many small ones of the same length.

    Signs by chance, then Hadamard transforms of blocks.  Alone it changes neither clipping nor
    isotropic noise; it prepares what treats coordinates one by one, such as `clip_values` or
    rounding.

    Args:
        like: a Task, or what is contributed (arrays or their shapes).
        seed: the seed of the signs, which are public.
        each_round: as in `linear_map`.

    Privacy:
        that of the chain without it.

    References:
        Suresh et al., ICML 2017, section 4.
    """
    return _own("linear_maps.rotation", like, None, True, seed, each_round)


def projection(like: Task | Any, size: int, *, seed: int = 0, each_round: bool = True) -> LinearMap:
    """Project contributions to `size` coordinates by chance: `rotation`, then `size` of the turned
    coordinates, scaled so that lengths stay on average.

    Noise is added to `size` numbers instead of all.  Mapped back it is as long per coordinate of
    the projection as before; what of a contribution lies outside of the subspace is lost in this
    round.  With each_round=False all rounds learn in one subspace.

    Args:
        like: a Task, or what is contributed (arrays or their shapes).
        size: coordinates that are left.
        seed: the seed of signs and coordinates, which are public.
        each_round: as in `linear_map`.

    Privacy:
        that of the chain without it.

    Raises:
        ValueError: unless size is whole, >= 1, and at most the number of coordinates.

    References:
        Ailon and Chazelle, SIAM J. Comput. 2009 (fast Johnson-Lindenstrauss transforms).

    Example:
        >>> import jax.numpy as jnp
        >>> there, back = projection({"w": jnp.zeros((3, 4))}, 4, each_round=False)
        >>> sent = there.apply((), {"w": jnp.ones((3, 4))})[0]
        >>> sent.shape
        (4,)
    """
    return _own("linear_maps.projection", like, size, True, seed, each_round)


def sparsification(
    like: Task | Any, size: int, *, seed: int = 0, each_round: bool = True
) -> LinearMap:
    """Keep `size` coordinates by chance, the same for all contributions of a round, times the root
    of how many there are for each that is kept.

    Args:
        like: a Task, or what is contributed (arrays or their shapes).
        size: coordinates that are kept.
        seed: the seed of the coordinates, which are public.
        each_round: as in `linear_map`; False trains only these coordinates.

    Privacy:
        that of the chain without it.  Coordinates that are chosen by their size would be data.

    Raises:
        ValueError: unless size is whole, >= 1, and at most the number of coordinates.

    References:
        Konecny et al., 2016 ("random mask"); Hu et al., 2020, for DP federated learning.

    Example:
        >>> import jax.numpy as jnp
        >>> there, back = sparsification(jnp.zeros(6), 2, each_round=False)
        >>> kept = back.apply(there.apply((), jnp.ones(6))[0], None)[0]
        >>> sorted(set(kept.round(4).tolist()))
        [0.0, 3.0]
    """
    return _own("linear_maps.sparsification", like, size, False, seed, each_round)


def refuse_unpaired(where: str, *chains: Mechanism | None) -> None:
    """Reject a map that is not undone by the stage that was made with it.

    Args:
        where: who asks, for the message.
        chains: the chains that a contribution passes, in this order.
    """
    stages = [s for chain in chains if chain is not None for s in chain.stages]
    there = [s.apply for s in stages if s.is_map]
    back = [s.apply for s in stages if s.name == "map_back"]
    is_pair = lambda one, other: not checks.is_concrete((one, other)) or _drawn_alike(one, other)
    if len(there) != len(back) or not all(map(is_pair, there, reversed(back))):
        checks.fail(
            where,
            "both stages of each linear map",
            " -> ".join(s.name for s in stages),
            "Put both stages of a map into the chain: there before the clip, back after the noise.",
        )


def _drawn_alike(one: Fn, other: Fn) -> bool:
    """Return whether the functions of two stages have the same key, shapes and size."""
    (a, structure), (b, other_structure) = (jax.tree.flatten(f.data) for f in (one, other))
    sizes = [(f.static.get("size"), f.static.get("turned")) for f in (one, other)]
    # one with the shape of a contribution holds arrays without numbers
    numbers = [[(np.shape(x), np.asarray(x).tobytes()) for x in leaves] for leaves in (a, b)]
    return structure == other_structure and numbers[0] == numbers[1] and sizes[0] == sizes[1]


def _own(
    where: str, like: Tree, size: int | None, turned: bool, seed: int, each_round: bool
) -> LinearMap:
    shapes = shapes_like(like)
    numbers = numbers_of(where, like)
    if size is not None:
        checks.require_integer(where, size=size)
        if size > numbers:
            checks.fail(where, f"size <= {numbers}, the coordinates there are", f"size={size}")
    fixed = dict(size=numbers if size is None else int(size), turned=turned)
    drawn = _drawn_by(where, seed, each_round)
    # the shapes of a contribution, in arrays that hold no number
    form = jax.tree.map(lambda x: np.zeros((0, *x.shape), np.float32), shapes)
    keeps_length = size is None or int(size) == numbers
    back = Fn(_expand, dict(drawn, form=form), fixed | dict(keeps_length=keeps_length))
    return LinearMap(
        Stage(Fn(_shrink, dict(drawn, form=form), fixed), name=where.rpartition(".")[2]),
        Stage(back, name="map_back", role="post"),
    )


@named("linear_maps.count")
def _count(round_: Array) -> Array:
    return (round_ + 1).astype(jnp.float32)


def _drawn_by(where: str, seed: int, each_round: bool) -> dict[str, Any]:
    """Return what determines the key of a map: the seed, and the number of the round, from 1 on."""
    checks.require_seed(where, seed=seed)
    checks.require_one_of(where, (False, True), each_round=each_round)
    return dict(seed=np.uint32(seed), count=Fn(_count) if each_round else np.float32(0))


def _key(seed: Array, count: Array) -> Key:
    """Return a public key, from which no run draws cohorts or noise."""
    key = jax.random.fold_in(as_kernel_key(jax.random.key(0)), PUBLIC)
    key = jax.random.fold_in(key, seed)
    return jax.random.fold_in(key, jnp.asarray(count).astype(jnp.uint32))


@named("linear_maps.forward")
def _forward(
    state: Any, row: Tree, *, seed: Array, count: Array, function: Callable[..., Any]
) -> tuple[Tree, Array]:
    return function(_key(seed, count), row), jnp.zeros((), bool)


@named("linear_maps.backward")
def _backward(
    value: Tree, after: After, *, seed: Array, count: Array, function: Callable[..., Any]
) -> tuple[Tree, After]:
    return function(_key(seed, count), value), _changed(after)


@named("linear_maps.shrink")
def _shrink(
    state: Any, row: Tree, *, seed: Array, count: Array, form: Tree, size: int, turned: bool
) -> tuple[Array, Array]:
    require_like("linear_maps", row, jax.tree.map(lambda x: x.shape[1:], form))
    flat, _ = jax.flatten_util.ravel_pytree(row)
    signs, places = jax.random.split(_key(seed, count))
    flat = rotated(flat, signs) if turned else flat
    if size < flat.size:
        flat = flat[_places(places, flat.size, size)] * (flat.size / size) ** 0.5
    return flat, jnp.zeros((), bool)


@named("linear_maps.expand")
def _expand(
    value: Array,
    after: After,
    *,
    seed: Array,
    count: Array,
    form: Tree,
    size: int,
    turned: bool,
    keeps_length: bool,
) -> tuple[Tree, After]:
    shaped = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], value.dtype), form)
    flat, unflatten = jax.flatten_util.ravel_pytree(shaped)
    signs, places = jax.random.split(_key(seed, count))
    if size < flat.size:
        kept = _places(places, flat.size, size)
        value = flat.at[kept].set(value * (flat.size / size) ** 0.5)
    value = rotated(value, signs, back=True) if turned else value
    return unflatten(value), after if keeps_length else _changed(after)


def _changed(after: After | None) -> Any:
    """Return the state after a map: noise that was mapped is not isotropic any more."""
    return after if after is None else after._replace(std=None)


def _places(key: Key, numbers: int, size: int) -> jax.Array:
    """Return `size` of the places 0 .. numbers - 1: those with the largest random words."""
    return jax.lax.top_k(jax.random.bits(key, (numbers,), jnp.uint32), size)[1]


OWN = (_forward, _shrink)  # what may stand before a clip


# --- the rotation: random signs, then Hadamard transforms


def rotated(flat: jax.Array, key: Key, back: bool = False) -> jax.Array:
    """Return a rotated vector: its length stays, and it is spread over the coordinates of each
    block.

    Args:
        flat: Float[n].
        key: the key of the signs.
        back: whether the rotation is undone.

    Example:
        >>> x = jnp.array([3.0, 0.0, 4.0, 1.0, 2.0])
        >>> there = rotated(x, jax.random.key(0))
        >>> bool(jnp.allclose(rotated(there, jax.random.key(0), back=True), x, atol=1e-6))
        True
    """
    signs = 1.0 - 2.0 * (jax.random.bits(key, flat.shape, jnp.uint32) >> 31)
    flat = flat if back else flat * signs
    parts, start = [], 0
    for exponent in reversed(range(flat.size.bit_length())):
        if flat.size >> exponent & 1:
            parts.append(_transform(flat[start : start + 2**exponent], exponent))
            start += 2**exponent
    flat = jnp.concatenate(parts)
    return flat * signs if back else flat


def _transform(block: jax.Array, exponent: int) -> jax.Array:
    """Return the orthonormal transform of a block, which is its own inverse: a Kronecker product,
    by a matrix on each side."""
    times = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    if exponent > 2 * LARGEST_FACTOR:  # a large matrix costs more than one factor more
        parts = block.reshape(-1, 2**LARGEST_FACTOR)
        right = times(parts, _matrix(2**LARGEST_FACTOR) / np.float32(2**LARGEST_FACTOR) ** 0.5)
        left = jax.vmap(lambda column: _transform(column, exponent - LARGEST_FACTOR), 1, 1)(right)
        return left.reshape(-1)
    left, right = 2 ** (exponent // 2), 2 ** (exponent - exponent // 2)
    a, b = (_matrix(n) / np.float32(n) ** 0.5 for n in (left, right))
    return times(times(a, block.reshape(left, right)), b).reshape(-1)


def _matrix(size: int) -> np.ndarray:
    """Return Sylvester's matrix, Float32[size, size] of -1 and 1: the sign is the parity of common
    bits."""
    both = np.arange(size)[:, None] & np.arange(size)
    parity = np.zeros(both.shape, np.int64)
    for bit in range(size.bit_length()):
        parity ^= both >> bit & 1
    return (1 - 2 * parity).astype(np.float32)
