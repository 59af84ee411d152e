"""Linear maps of contributions before the clip; the noisy sum is mapped back.

Clipping and noise then apply to fewer coordinates, or to rotated ones.  A map is a pair of stages:

    there, back = jfl.linear_maps.projection(task, 500)
    jfl.chain(there, jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), back, jfl.divide(50))

The clip comes after the map and bounds every contribution whatever the map does, so no epsilon
depends on the map.  The map's randomness is public and the same for all contributions of a round.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from scipy import linalg

from ...core import checks
from ...core.pytrees import Array, Key, Tree
from ...core.random_streams import as_kernel_key
from ...core.records import Fn, Mechanism, Task, named
from .stages import After, Stage, numbers_of, require_like, shapes_like

__all__ = ["LinearMap", "linear_map", "projection", "rotation", "sparsification"]


MAX_FACTOR_BITS = 6  # a factor of a Hadamard transform has at most 2^6 rows
PUBLIC_STREAM = 0x6D617073  # differs from every core.random_streams.Stream


class LinearMap(NamedTuple):
    """The two stages of a linear map."""

    there: Stage  # maps a contribution, before the clip
    back: Stage  # maps the noisy sum back


def linear_map(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    seed: int = 0,
    each_round: bool = True,
) -> LinearMap:
    """Return a user-defined linear map, as two stages of a chain.

    Args:
        forward: (key, contribution) -> a pytree of floats, which is clipped and summed.
        backward: (key, noisy sum) -> a release, with the shapes of a contribution.  The release is
            unbiased if `backward` is linear and backward(forward(v)) is v on average over keys.
        seed: the seed of the key, which is public.
        each_round: whether every round has a separate key; otherwise all rounds share one.

    Privacy:
        The privacy is that of the chain without the map.  `forward` sees one contribution, and
        `backward` the noisy sum.  Arrays that they hold must be public; a plan in which one of them
        holds the federation's `x` or `y` is rejected.

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
    drawn = _key_data(where, seed, each_round)
    return LinearMap(
        Stage(Fn(_forward, drawn, dict(function=forward)), name="linear_map"),
        Stage(Fn(_backward, drawn, dict(function=backward)), name="map_back", role="post"),
    )


def rotation(like: Task | Any, *, seed: int = 0, each_round: bool = True) -> LinearMap:
    """Rotate contributions, so that a few large coordinates become many small ones.

    A rotation applies random signs, then Hadamard transforms of blocks.  On its own it changes
    neither clipping nor isotropic noise; it helps stages that treat coordinates separately, such as
    `clip_values`, or rounding.

    Args:
        like: a Task, or the contribution of a client (arrays or their shapes).
        seed: the seed of the signs, which are public.
        each_round: as in `linear_map`.

    Privacy:
        The privacy is that of the chain without the map.

    References:
        Suresh et al., ICML 2017, section 4.
    """
    return _build_map("linear_maps.rotation", like, None, True, seed, each_round)


def projection(like: Task | Any, size: int, *, seed: int = 0, each_round: bool = True) -> LinearMap:
    """Project contributions to `size` random coordinates.

    This is a `rotation`, then a random subset of the rotated coordinates, scaled so that lengths
    are preserved on average.

    Noise is added to `size` numbers only.  The part of a contribution outside of the subspace is
    lost in this round.  With each_round=False all rounds learn in one subspace.

    Args:
        like: a Task, or the contribution of a client (arrays or their shapes).
        size: the number of coordinates after the projection.
        seed: the seed of signs and coordinates, which are public.
        each_round: as in `linear_map`.

    Privacy:
        The privacy is that of the chain without the map.

    Raises:
        ValueError: unless size is an integer >= 1 and at most the number of coordinates.

    References:
        Ailon and Chazelle, SIAM J. Comput. 2009 (fast Johnson-Lindenstrauss transforms).

    Example:
        >>> import jax.numpy as jnp
        >>> there, back = projection({"w": jnp.zeros((3, 4))}, 4, each_round=False)
        >>> sent = there.apply((), {"w": jnp.ones((3, 4))})[0]
        >>> sent.shape
        (4,)
    """
    return _build_map("linear_maps.projection", like, size, True, seed, each_round)


def sparsification(
    like: Task | Any, size: int, *, seed: int = 0, each_round: bool = True
) -> LinearMap:
    """Keep `size` random coordinates, the same ones for all contributions of a round.

    Kept coordinates are multiplied by sqrt(number of coordinates / size), before the clip and again
    on the way back.

    Args:
        like: a Task, or the contribution of a client (arrays or their shapes).
        size: the number of coordinates that are kept.
        seed: the seed of the coordinates, which are public.
        each_round: as in `linear_map`; with False only these coordinates are trained.

    Privacy:
        The privacy is that of the chain without the map.  (Choosing the coordinates with the
        largest values would depend on the data.)

    Raises:
        ValueError: unless size is an integer >= 1 and at most the number of coordinates.

    References:
        Konecny et al., 2016 ("random mask"); Hu et al., 2020, for DP federated learning.

    Example:
        >>> import jax.numpy as jnp
        >>> there, back = sparsification(jnp.zeros(6), 2, each_round=False)
        >>> kept = back.apply(there.apply((), jnp.ones(6))[0], None)[0]
        >>> sorted(set(kept.round(4).tolist()))
        [0.0, 3.0]
    """
    return _build_map("linear_maps.sparsification", like, size, False, seed, each_round)


def refuse_unpaired(where: str, *chains: Mechanism | None) -> None:
    """Reject a linear map of which one of the two stages is missing or belongs to another map.

    Args:
        where: the name of the caller, for the message.
        chains: the chains that a contribution passes, in this order.
    """
    stages = [s for chain in chains if chain is not None for s in chain.stages]
    there = [s.apply for s in stages if s.is_map]
    back = [s.apply for s in stages if s.name == "map_back"]
    is_pair = lambda one, other: not checks.is_concrete((one, other)) or _is_same_map(one, other)
    if len(there) != len(back) or not all(map(is_pair, there, reversed(back))):
        checks.fail(
            where,
            "both stages of each linear map",
            " -> ".join(s.name for s in stages),
            "Put both stages of a map into the chain: the first before the clip, the second after "
            "the noise.",
        )


def _is_same_map(one: Fn, other: Fn) -> bool:
    """Return whether the functions of two stages have the same key, shapes and size."""
    (a, structure), (b, other_structure) = (jax.tree.flatten(f.data) for f in (one, other))
    sizes = [(f.static.get("size"), f.static.get("turned")) for f in (one, other)]
    # `np.array_equal` compares shapes too: arrays without elements hold those of a contribution.
    is_equal = structure == other_structure and all(map(np.array_equal, a, b))
    return is_equal and sizes[0] == sizes[1]


def _build_map(
    where: str, like: Tree, size: int | None, turned: bool, seed: int, each_round: bool
) -> LinearMap:
    """Return the two stages of one of the maps above.

    Args:
        where: the name of the caller.
        like: a Task, or the contribution of a client.
        size: the number of coordinates that are kept; None for all.
        turned: whether contributions are rotated.
        seed, each_round: as in `linear_map`.
    """
    shapes = shapes_like(like)
    numbers = numbers_of(where, like)
    if size is not None:
        checks.require_integer(where, size=size)
        if size > numbers:
            checks.fail(where, f"size <= {numbers}, the number of coordinates", f"size={size}")
    fixed = dict(size=numbers if size is None else int(size), turned=turned)
    drawn = _key_data(where, seed, each_round)
    # empty arrays that carry the shapes of a contribution
    form = jax.tree.map(lambda x: np.zeros((0, *x.shape), np.float32), shapes)
    keeps_length = size is None or int(size) == numbers
    back = Fn(_expand, dict(drawn, form=form), fixed | dict(keeps_length=keeps_length))
    return LinearMap(
        Stage(Fn(_shrink, dict(drawn, form=form), fixed), name=where.rpartition(".")[2]),
        Stage(back, name="map_back", role="post"),
    )


@named("linear_maps.count")
def _count(round_: Array) -> Array:
    """Return the number of the round, counted from 1."""
    return (round_ + 1).astype(jnp.float32)


def _key_data(where: str, seed: int, each_round: bool) -> dict[str, Any]:
    """Return the data that determines the key of a map: the seed, and the number of the round (0:
    all)."""
    checks.require_seed(where, seed=seed)
    checks.require_one_of(where, (False, True), each_round=each_round)
    return dict(seed=np.uint32(seed), count=Fn(_count) if each_round else np.float32(0))


def _key(seed: Array, count: Array) -> Key:
    """Return a public key, which differs from all keys that draw cohorts or noise."""
    key = jax.random.fold_in(as_kernel_key(jax.random.key(0)), PUBLIC_STREAM)
    key = jax.random.fold_in(key, seed)
    return jax.random.fold_in(key, jnp.asarray(count).astype(jnp.uint32))


@named("linear_maps.forward")
def _forward(
    state: Any, row: Tree, *, seed: Array, count: Array, function: Callable[..., Any]
) -> tuple[Tree, Array]:
    """Apply the user's forward function to a contribution."""
    return function(_key(seed, count), row), jnp.zeros((), bool)


@named("linear_maps.backward")
def _backward(
    value: Tree, after: After, *, seed: Array, count: Array, function: Callable[..., Any]
) -> tuple[Tree, After]:
    """Apply the user's backward function to the noisy sum."""
    return function(_key(seed, count), value), _without_noise_level(after)


@named("linear_maps.shrink")
def _shrink(
    state: Any, row: Tree, *, seed: Array, count: Array, form: Tree, size: int, turned: bool
) -> tuple[Array, Array]:
    """Rotate a contribution and keep some of its coordinates."""
    require_like("linear_maps", row, jax.tree.map(lambda x: x.shape[1:], form))
    flat, _ = jax.flatten_util.ravel_pytree(row)
    signs, places = jax.random.split(_key(seed, count))
    flat = rotate(flat, signs) if turned else flat
    if size < flat.size:
        flat = flat[_choose_places(places, flat.size, size)] * (flat.size / size) ** 0.5
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
    """Undo `_shrink` on the noisy sum."""
    shaped = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], value.dtype), form)
    flat, unflatten = jax.flatten_util.ravel_pytree(shaped)
    signs, places = jax.random.split(_key(seed, count))
    if size < flat.size:
        kept = _choose_places(places, flat.size, size)
        value = flat.at[kept].set(value * (flat.size / size) ** 0.5)
    value = rotate(value, signs, back=True) if turned else value
    return unflatten(value), after if keeps_length else _without_noise_level(after)


def _without_noise_level(after: After | None) -> Any:
    """Return what is known after a map: the noise is no longer isotropic, so its level is
    unknown."""
    return after if after is None else after._replace(std=None)


def _choose_places(key: Key, numbers: int, size: int) -> jax.Array:
    """Return `size` of the places 0 .. numbers - 1: those with the largest random words."""
    return jax.lax.top_k(jax.random.bits(key, (numbers,), jnp.uint32), size)[1]


MAPS_BEFORE_CLIP = (_forward, _shrink)  # the functions that a map may apply before a clip


# --- the rotation: random signs, then Hadamard transforms


def rotate(flat: jax.Array, key: Key, back: bool = False) -> jax.Array:
    """Rotate a vector randomly, which spreads its large coordinates but keeps its length.

    Args:
        flat: Float[n].
        key: the key of the signs.
        back: True to undo the rotation.

    Example:
        >>> x = jnp.array([3.0, 0.0, 4.0, 1.0, 2.0])
        >>> rotated = rotate(x, jax.random.key(0))
        >>> bool(jnp.allclose(rotate(rotated, jax.random.key(0), back=True), x, atol=1e-6))
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
    """Return the orthonormal Hadamard transform of a block of 2^exponent numbers, its own inverse.

    The transform matrix is a Kronecker product, so its factors are applied one after another.
    """
    for start in range(0, exponent, MAX_FACTOR_BITS):
        size = 2 ** min(MAX_FACTOR_BITS, exponent - start)
        factor = linalg.hadamard(size).astype(np.float32) / np.float32(size) ** 0.5
        # Each transposition moves the bits of this factor from the end of an index to its front.
        rows = jnp.matmul(block.reshape(-1, size), factor, precision=jax.lax.Precision.HIGHEST)
        block = rows.T.reshape(-1)
    return block
