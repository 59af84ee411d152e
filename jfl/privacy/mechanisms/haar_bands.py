"""Bands of a contribution: Haar transforms of its leaves, without any data.

A contribution is cut into blocks, each block is transformed, and the coefficients of one level are
a band. The transform is orthonormal: energies of bands add up to the squared norm, and equal noise
in all of them is isotropic.  Structure only, static in a program; functions are pure and work under
jit, vmap and grad.

    bands = pixels(params, (28, 28))           # the levels of the images that a first layer sees
    energies(bands, gradient)                  # Float32[count(bands)]

Bands stand block by block, in a block the base (its scaled mean) first, then level 1 (finest) to
the root.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ...core import checks
from ...core.pytrees import Array, Tree
from ...core.records import record, static
from ...kernels import haar
from ...kernels.normals import normals


class Block(NamedTuple):
    """Leaves transformed together, as an array of shape grid + columns; a grid of one point is a
    plain band."""

    leaves: tuple[Any, ...]  # positions in tree order
    grid: tuple[Any, ...]  # lengths of the transformed axes, (d,) or (h, w)
    columns: tuple[Any, ...] = ()  # or (n,), all transformed alike


@record
class Bands:
    """How a contribution is cut into blocks that are transformed, and the shapes of its leaves."""

    blocks: tuple[Any, ...] = static()
    shapes: tuple[Any, ...] = static()


# --- makers


def flat(like: Any) -> Bands:
    """Return the bands of all leaves as one vector in tree order: its base and each of its levels.

    `like` is, here and below, a contribution or its shapes.

    >>> count(flat(jnp.zeros(1000))), count(per_layer([jnp.zeros(4), jnp.zeros(())]))
    (11, 4)
    """
    shapes = _shapes("bands.flat", like)
    return Bands((Block(tuple(range(len(shapes))), (sum(map(math.prod, shapes)),)),), shapes)


def per_layer(like: Any) -> Bands:
    """Return bands of each leaf as a separate vector; leaves of one entry are plain bands."""
    shapes = _shapes("bands.per_layer", like)
    return Bands(tuple(Block((i,), (math.prod(s),)) for i, s in enumerate(shapes)), shapes)


def plain(like: Any) -> Bands:
    """Return one band that holds all entries, so that its noise is isotropic."""
    shapes = _shapes("bands.plain", like)
    return Bands((Block(tuple(range(len(shapes))), (1,), (sum(map(math.prod, shapes)),)),), shapes)


def pixels(like: Any, shape: Sequence[int]) -> Bands:
    """Return the levels of an image, on the leading axis of the leaves that have an entry there for
    each pixel.

    That is the weight of a dense layer on images, [h * w, n] or [h * w * c, n]; its columns share
    the levels. Every other leaf is one plain band.

    Args:
        like: a contribution or its shapes, such as the parameters.
        shape: (h, w) or (h, w, c) for the two-dimensional pyramid, (d,) for a signal.

    Raises:
        ValueError: if no leaf fits.
    """
    where = "bands.pixels"
    shape = checks.as_tuple(where, shape=shape)
    if not 1 <= len(shape) <= 3:
        checks.fail(where, "shape (d,), (h, w) or (h, w, c)", f"{shape}")
    for n in shape:
        checks.require_integer(where, length=n)
    shapes = _shapes(where, like)
    num_pixels, grid = math.prod(shape), shape[:2]
    fits = [i for i, s in enumerate(shapes) if s[:1] == (num_pixels,) and math.prod(grid) > 1]
    if not fits:
        checks.fail(
            where,
            f"a leaf with {num_pixels} entries on its first axis",
            f"shapes {list(shapes)}",
            "Bands follow the pixels of a dense layer's weight; use bands.per_layer for other "
            "models.",
        )
    blocks = []
    for i, s in enumerate(shapes):
        of_leaf = grid if i in fits else (1,)
        blocks.append(Block((i,), of_leaf, (math.prod(s) // math.prod(of_leaf),)))
    return Bands(tuple(blocks), shapes)


def _shapes(where: str, like: Tree) -> tuple[tuple[int, ...], ...]:
    shapes = tuple(tuple(np.shape(x)) for x in jax.tree.leaves(like))
    if not shapes or 0 in map(math.prod, shapes):
        checks.fail(where, "a contribution whose leaves have entries", f"shapes {list(shapes)}")
    return shapes


# --- what the bands are


def _table(bands: Bands) -> np.ndarray:
    """Return block, level, leaves and size of each band, Float64[4, n]."""
    checks.require_type("bands", Bands, "jfl.bands", bands=bands)
    rows = []
    for i, block in enumerate(bands.blocks):
        top, split = haar.height(*block.grid), 2 ** len(block.grid)
        columns = math.prod(block.columns)
        rows.append((i, 0 if top else -1, split**top, columns))
        for level in range(1, top + 1):
            rows.append((i, level, split**level, (split - 1) * split ** (top - level) * columns))
    return np.array(rows, np.float64).T


def count(bands: Bands) -> int:
    """Return the number of bands."""
    return _table(bands).shape[1]


def blocks(bands: Bands) -> np.ndarray:
    """Return the block of each band, Int[n]."""
    return _table(bands)[0].astype(int)


def levels(bands: Bands) -> np.ndarray:
    """Return the level of each band, Int[n].

    It is 1 (finest) to L (root), 0 for the base (the scaled mean of a block), and -1 for a plain
    band (entries that are not transformed).
    """
    return _table(bands)[1].astype(int)


def leaves(bands: Bands) -> np.ndarray:
    """Return the number of entries of which a coefficient is made, Float64[n]: 2^l or 4^l, that of
    the root for the base, 1 for plain bands."""
    return _table(bands)[2]


def sizes(bands: Bands) -> np.ndarray:
    """Return the number of coefficients of each band, with those of padding, Float64[n].

    >>> sizes(pixels({"b": jnp.zeros(10), "w": jnp.zeros((784, 10))}, (28, 28))).tolist()
    [10.0, 10.0, 7680.0, 1920.0, 480.0, 120.0, 30.0]
    """
    return _table(bands)[3]


def ids(bands: Bands) -> tuple[Any, ...]:
    """Return the band of each coefficient, NumPy Int arrays that broadcast against those of
    `analyse`."""
    out = []
    for block, home in zip(bands.blocks, _homes(bands)):
        lengths = [math.prod(whole) for _, _, whole in haar.layout(*block.grid)]
        out.append(np.repeat(home, lengths).reshape((-1,) + (1,) * len(block.columns)))
    return tuple(out)


# --- transforms


def _checked(where: str, bands: Bands, tree: Tree) -> tuple[list[Any], Any]:
    values, treedef = jax.tree.flatten(tree)
    got = tuple(tuple(np.shape(x)) for x in values)
    if got != bands.shapes:
        checks.fail(
            where,
            f"leaves of shapes {list(bands.shapes)}",
            f"{list(got)}",
            "Make the bands of this contribution.",
        )
    return values, treedef


def _one_each(where: str, bands: Bands, values: ArrayLike) -> Array:
    values, n = jnp.asarray(values, jnp.float32), count(bands)
    if values.shape != (n,):
        checks.fail(where, f"one value for each of {n} bands", f"shape {values.shape}")
    return values


def _axes(block: Block) -> tuple[int, ...]:
    return tuple(range(len(block.grid)))


def _split(bands: Bands, values: Sequence[Any]) -> list[Any]:
    """Return the pieces of each block, float32, each inside one band."""
    out = []
    for block in bands.blocks:
        x = _joined(block, values)
        x = x if block.columns else _held(x)  # a pyramid that is held is slower
        out.append(haar.split(x, _axes(block)))
    return out


def _joined(block: Block, values: Sequence[Any]) -> Array:
    """Return the leaves of a block as one array, float32."""
    mine = [jnp.asarray(values[i]).astype(jnp.float32).reshape(-1) for i in block.leaves]
    x = mine[0] if len(mine) == 1 else jnp.concatenate(mine)
    return x.reshape(block.grid + block.columns)


@jax.custom_jvp
def _held(parts: Any) -> Any:
    """Return these arrays, which the compiler of a CPU now stores in memory.

    It would compute each entry again wherever it is read, and no barrier stops it.  It does not
    look through a loop whose length depends on the entries: none, or two iterations that undo each
    other if the first entry is NaN.
    """
    if jax.default_backend() != "cpu":
        return parts
    first = jax.tree.leaves(parts)[0].reshape(-1)[0]
    turns = 2 * jnp.isnan(first).astype(int)
    return lax.fori_loop(0, turns, lambda _, held: jax.tree.map(jnp.negative, held), parts)


_held.defjvp(lambda primals, tangents: (_held(*primals), *tangents))


def _merge(bands: Bands, pieces: Sequence[Any], like: Sequence[Any], treedef: Any) -> Tree:
    """Return the tree of these pieces, with the dtypes of `like`."""
    out = [None] * len(like)
    for block, mine in zip(bands.blocks, pieces):
        x, start = haar.merge(mine, block.grid, _axes(block)).reshape(-1), 0
        for i in block.leaves:
            shape, end = bands.shapes[i], start + math.prod(bands.shapes[i])
            out[i], start = x[start:end].reshape(shape).astype(like[i].dtype), end
    return treedef.unflatten(out)


def _homes(bands: Bands) -> list[list[int]]:
    """Return the bands of the pieces of each block."""
    out, start = [], 0
    for block in bands.blocks:
        out.append([start + level for level, _, _ in haar.layout(*block.grid)])
        start = out[-1][-1] + 1
    return out


def _times(bands: Bands, values: Array, pieces: Sequence[Any]) -> list[list[Array]]:
    return [
        [x * values[b] for x, b in zip(pieces_of_block, home)]
        for pieces_of_block, home in zip(pieces, _homes(bands))
    ]


def analyse(bands: Bands, tree: Any) -> tuple[Any, ...]:
    """Return orthonormal coefficients of each block, float32: [m, ...], or [m * m, ...] of a
    pyramid, by columns."""
    pieces = _split(bands, _checked("bands.analyse", bands, tree)[0])
    return tuple(
        haar.join(mine, block.grid, _axes(block)) for block, mine in zip(bands.blocks, pieces)
    )


def synthesise(bands: Bands, coefficients: Any, like: Any) -> Any:
    """Return the inverse of `analyse`: a tree with the shapes and dtypes of `like`."""
    values, treedef = _checked("bands.synthesise", bands, like)
    pieces = [haar.cut(c, block.grid, 0) for block, c in zip(bands.blocks, coefficients)]
    return _merge(bands, pieces, values, treedef)


def energies(bands: Bands, tree: Any) -> jax.Array:
    """Return the squared norm of each band's coefficients, Float32[n]; their sum is that of the
    tree.

    They are right to about 1e-7 of that sum, not each of itself.
    """
    values, _ = _checked("bands.energies", bands, tree)
    out = []
    for block in bands.blocks:
        x, axes = _joined(block, values), _axes(block)
        vector = axes == (0,) and not block.columns
        out.append(haar.energies(x) if vector else _by_band(haar.split(x, axes), axes))
    return jnp.concatenate(out)


def _by_band(pieces: Sequence[Any], axes: Sequence[int]) -> Array:
    """Return the squared norms of a block's bands, given its pieces."""
    base, *details = [jnp.square(piece).sum() for piece in pieces]
    kinds = 2 ** len(axes) - 1  # of details, in each level
    by_level = [sum(details[i : i + kinds]) for i in range(0, len(details), kinds)]
    return jnp.stack([base, *by_level])


def shrink(bands: Bands, bounds: Any, tree: Any) -> tuple[Any, jax.Array]:
    """Shrink each band of the tree to a norm of at most its bound.

    The coefficients that are measured are the very ones that are shrunk.  `energies` rounds in
    other places: of a row that is far longer than a band's bound, the difference would exceed
    that bound many times.

    Shapes:
        bounds Float[n] -> the tree, with the shapes and dtypes of `tree`, and Float32[n], the norms
        that the bands had.
    """
    like, treedef = _checked("bands.shrink", bands, tree)
    # a compiler that computed them again where they are shrunk could round them differently
    pieces = lax.optimization_barrier(_held(_split(bands, like)))
    found = [_by_band(mine, _axes(block)) for block, mine in zip(bands.blocks, pieces)]
    norms = jnp.sqrt(jnp.concatenate(found))
    longest = _one_each("bands.shrink", bands, bounds)
    factors = jnp.minimum(1.0, longest / jnp.maximum(norms, jnp.finfo(jnp.float32).tiny))
    # as `stages.factor_to_bound`: what cannot be measured counts as not finite
    factors = jnp.where(jnp.isfinite(norms), factors, jnp.nan)
    return _merge(bands, _times(bands, factors, pieces), like, treedef), norms


def scale(bands: Bands, values: Any, tree: Any) -> Any:
    """Return each band of the tree times its value: Q^T diag(values) Q tree.

    Shapes:
        values Float[n]; the result has the shapes and dtypes of `tree`.
    """
    like, treedef = _checked("bands.scale", bands, tree)
    pieces = _times(bands, _one_each("bands.scale", bands, values), _split(bands, like))
    return _merge(bands, pieces, like, treedef)


def noise(bands: Bands, key: jax.Array, stds: Any, like: Any) -> Any:
    """Draw Gaussian noise with standard deviation stds[b] in every coefficient of band b: a float32
    tree.

    Coefficients that only reach padding are not drawn: they would be dropped.

    Shapes:
        stds Float[n].
    """
    _, treedef = _checked("bands.noise", bands, like)
    floats = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    drawn = [
        [floats(grid + block.columns) for _, grid, _ in haar.layout(*block.grid)]
        for block in bands.blocks
    ]
    pieces = _times(bands, _one_each("bands.noise", bands, stds), normals(key, drawn))
    return _merge(bands, pieces, list(map(floats, bands.shapes)), treedef)


# --- how much noise where


def prior(bands: Bands) -> np.ndarray:
    """Return the expected energy of one coefficient of natural images, relative to that of a finest
    one, Float32[n]; it reads no data.

    It is 2^l on a line and 4^l on a pyramid, which is the 1 / f^2 spectrum of natural images; the
    base has that of the root.  A plain band has the mean over all transformed coefficients: nothing
    is known of it, so as much is expected of each of its entries as of an entry of the transformed
    leaves.

    References:
        spec of Ranaweera et al., 2025, section 3.10: not in the paper.
    """
    n, shaped, energy = sizes(bands), levels(bands) >= 0, leaves(bands)
    if shaped.any():
        energy[~shaped] = (n * energy)[shaped].sum() / n[shaped].sum()
    return energy.astype(np.float32)
