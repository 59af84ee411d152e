"""Bands of a contribution: Haar transforms of its leaves.

A contribution is cut into blocks, each block is transformed, and the coefficients of one level are
a band.  The transform is orthonormal: energies of bands add up to the squared norm, and equal noise
in all bands is isotropic.  Bands depend on shapes only, not on data, and are static in a program.
All functions are pure and work under jit, vmap and grad.

    bands = pixels(params, (28, 28))           # the levels of the images of a first layer
    energies(bands, gradient)                  # Float32[count(bands)]

Bands are numbered block by block.  Within a block, the base (its scaled mean) comes first, then
level 1 (the finest) to the root.

Arguments that the functions of this module share:
    bands: a Bands with n bands.
    like: a contribution, or its shapes.
"""

import functools
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
from ...kernels.normals import as_one_leaf, normals


class Block(NamedTuple):
    """Leaves that are transformed together, as an array of shape grid + columns.

    A block whose grid has one point is a plain band, without a transform.
    """

    leaves: tuple[Any, ...]  # positions of the leaves in tree order
    grid: tuple[Any, ...]  # lengths of the transformed axes, (d,) or (h, w)
    columns: tuple[Any, ...] = ()  # () or (n,): n columns with the same transform


@record
class Bands:
    """How a contribution is cut into blocks that are transformed, and the shapes of its leaves."""

    blocks: tuple[Any, ...] = static()
    shapes: tuple[Any, ...] = static()


# --- constructors


def flat(like: Any) -> Bands:
    """Return bands for all leaves together, as one vector in tree order: a base and its levels.

    Example:
        >>> count(flat(jnp.zeros(1000))), count(per_layer([jnp.zeros(4), jnp.zeros(())]))
        (11, 4)
    """
    shapes = _shapes("bands.flat", like)
    return Bands((Block(tuple(range(len(shapes))), (sum(map(math.prod, shapes)),)),), shapes)


def per_layer(like: Any) -> Bands:
    """Return bands for each leaf separately, as a vector; leaves with one entry are plain bands."""
    shapes = _shapes("bands.per_layer", like)
    return Bands(tuple(Block((i,), (math.prod(s),)) for i, s in enumerate(shapes)), shapes)


def plain(like: Any) -> Bands:
    """Return a single band that holds all entries, so that noise is isotropic."""
    shapes = _shapes("bands.plain", like)
    return Bands((Block(tuple(range(len(shapes))), (1,), (sum(map(math.prod, shapes)),)),), shapes)


def pixels(like: Any, shape: Sequence[int]) -> Bands:
    """Return the levels of an image as bands, for leaves whose first axis runs over pixels.

    Such a leaf is the weight of a dense layer on images, [h * w, n] or [h * w * c, n]; its columns
    share the levels.  Every other leaf is one plain band.

    Args:
        like: a contribution or its shapes, such as the parameters.
        shape: (h, w) or (h, w, c) for a two-dimensional pyramid, (d,) for a signal.

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
    """Return the shapes of the leaves; reject a contribution with empty leaves."""
    shapes = tuple(tuple(np.shape(x)) for x in jax.tree.leaves(like))
    if not shapes or 0 in map(math.prod, shapes):
        checks.fail(where, "a contribution whose leaves have entries", f"shapes {list(shapes)}")
    return shapes


# --- properties of the bands


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
    """Return the number of the block to which each band belongs, Int[n]."""
    return _table(bands)[0].astype(int)


def levels(bands: Bands) -> np.ndarray:
    """Return the level of each band, Int[n].

    It is 1 (finest) to L (root), 0 for the base (the scaled mean of a block), and -1 for a plain
    band (entries that are not transformed).
    """
    return _table(bands)[1].astype(int)


def leaves(bands: Bands) -> np.ndarray:
    """Return the number of entries from which one coefficient of each band is computed, Float64[n].

    At level l it is 2^l (one transformed axis) or 4^l (two).  The base has the number of the root,
    and plain bands have 1.
    """
    return _table(bands)[2]


def sizes(bands: Bands) -> np.ndarray:
    """Return the number of coefficients of each band, including those of padding, Float64[n].

    Example:
        >>> sizes(pixels({"b": jnp.zeros(10), "w": jnp.zeros((784, 10))}, (28, 28))).tolist()
        [10.0, 10.0, 7680.0, 1920.0, 480.0, 120.0, 30.0]
    """
    return _table(bands)[3]


def ids(bands: Bands) -> tuple[Any, ...]:
    """Return the number of the band to which each coefficient belongs.

    Returns:
        For each block an Int array that broadcasts against its coefficients from `analyse`.
    """
    out = []
    for block, numbers in zip(bands.blocks, _band_numbers(bands)):
        lengths = [math.prod(whole) for _, _, whole in haar.layout(*block.grid)]
        out.append(np.repeat(numbers, lengths).reshape((-1,) + (1,) * len(block.columns)))
    return tuple(out)


# --- transforms


def _require_shapes(where: str, bands: Bands, tree: Tree) -> tuple[list[Any], Any]:
    """Return the leaves and the structure of a tree; reject one whose shapes are not those of
    `bands`."""
    values, treedef = jax.tree.flatten(tree)
    got = tuple(tuple(np.shape(x)) for x in values)
    if got != bands.shapes:
        checks.fail(
            where,
            f"leaves of shapes {list(bands.shapes)}",
            f"{list(got)}",
            "Make the bands from this contribution.",
        )
    return values, treedef


def one_per_band(where: str, bands: Bands, values: ArrayLike) -> Array:
    """Return values as Float32[n]; reject another number of values than of bands."""
    values, n = jnp.asarray(values, jnp.float32), count(bands)
    if values.shape != (n,):
        checks.fail(where, f"one value for each of {n} bands", f"shape {values.shape}")
    return values


def _axes(block: Block) -> tuple[int, ...]:
    """Return the numbers of the transformed axes of a block."""
    return tuple(range(len(block.grid)))


def _split(bands: Bands, values: Sequence[Any]) -> list[Any]:
    """Return the coefficients of each block in pieces, float32, each inside one band."""
    out = []
    for block in bands.blocks:
        x = _join_leaves(block, values)
        x = x if block.columns else _materialise(x)  # for blocks with columns this would be slower
        out.append(haar.split(x, _axes(block)))
    return out


def _join_leaves(block: Block, values: Sequence[Any]) -> Array:
    """Return the leaves of a block as one array, float32."""
    vectors = [jnp.asarray(values[i]).astype(jnp.float32).reshape(-1) for i in block.leaves]
    x = vectors[0] if len(vectors) == 1 else jnp.concatenate(vectors)
    return x.reshape(block.grid + block.columns)


@jax.custom_jvp
def _materialise(parts: Any) -> Any:
    """Return these arrays unchanged, and make the CPU compiler store them in memory.

    Otherwise it computes each entry again wherever it is read, and no barrier prevents that.  It
    does not look through a loop whose length depends on the entries: here zero iterations, or two
    that undo each other if the first entry is NaN.
    """
    if jax.default_backend() != "cpu":
        return parts
    first = jax.tree.leaves(parts)[0].reshape(-1)[0]
    iterations = 2 * jnp.isnan(first).astype(int)
    return lax.fori_loop(0, iterations, lambda _, x: jax.tree.map(jnp.negative, x), parts)


_materialise.defjvp(lambda primals, tangents: (_materialise(*primals), *tangents))


def _merge(bands: Bands, pieces: Sequence[Any], like: Sequence[Any], treedef: Any) -> Tree:
    """Return the tree of these pieces, with the dtypes of `like`."""
    out = [None] * len(like)
    for block, pieces_of_block in zip(bands.blocks, pieces):
        x, start = haar.merge(pieces_of_block, block.grid, _axes(block)).reshape(-1), 0
        for i in block.leaves:
            shape, end = bands.shapes[i], start + math.prod(bands.shapes[i])
            out[i], start = x[start:end].reshape(shape).astype(like[i].dtype), end
    return treedef.unflatten(out)


def _band_numbers(bands: Bands) -> list[list[int]]:
    """Return the number of the band of each piece, for each block."""
    out, start = [], 0
    for block in bands.blocks:
        out.append([start + level for level, _, _ in haar.layout(*block.grid)])
        start = out[-1][-1] + 1
    return out


def _scale_pieces(bands: Bands, values: Array, pieces: Sequence[Any]) -> list[list[Array]]:
    """Return the pieces of each block, multiplied by the value of their band."""
    return [
        [x * values[b] for x, b in zip(pieces_of_block, numbers)]
        for pieces_of_block, numbers in zip(pieces, _band_numbers(bands))
    ]


def analyse(bands: Bands, tree: Any) -> tuple[Any, ...]:
    """Return the orthonormal Haar coefficients of a contribution.

    Args:
        bands: see the module.
        tree: a contribution.

    Returns:
        For each block Float32[m, ...], or Float32[m * m, ...] for a pyramid.  The last axes are the
        columns of the block, and m is the longest length of its grid, rounded up to a power of two.
    """
    pieces = _split(bands, _require_shapes("bands.analyse", bands, tree)[0])
    return tuple(haar.join(p, block.grid, _axes(block)) for block, p in zip(bands.blocks, pieces))


def synthesise(bands: Bands, coefficients: Any, like: Any) -> Any:
    """Return the contribution that has these Haar coefficients; the inverse of `analyse`.

    Args:
        bands: see the module.
        coefficients: the coefficients of each block, as `analyse` returns them.
        like: a contribution, whose shapes and dtypes the result has.
    """
    values, treedef = _require_shapes("bands.synthesise", bands, like)
    pieces = [haar.cut(c, block.grid, 0) for block, c in zip(bands.blocks, coefficients)]
    return _merge(bands, pieces, values, treedef)


def energies(bands: Bands, tree: Any) -> jax.Array:
    """Return the squared norm of each band's coefficients, Float32[n]; they add up to that of the
    tree.

    Their absolute error is about 1e-7 of this sum, so small energies are less accurate.
    """
    values, _ = _require_shapes("bands.energies", bands, tree)
    out = []
    for block in bands.blocks:
        x, axes = _join_leaves(block, values), _axes(block)
        vector = axes == (0,) and not block.columns
        out.append(haar.energies(x) if vector else _energies_of_block(haar.split(x, axes), axes))
    return jnp.concatenate(out)


def _energies_of_block(pieces: Sequence[Any], axes: Sequence[int]) -> Array:
    """Return the squared norms of a block's bands, given its pieces."""
    base, *details = [jnp.square(piece).sum() for piece in pieces]
    per_level = 2 ** len(axes) - 1  # number of detail pieces in each level
    by_level = [sum(details[i : i + per_level]) for i in range(0, len(details), per_level)]
    return jnp.stack([base, *by_level])


def leaves_by_rows(bands: Bands) -> frozenset[int] | None:
    """Return the leaves whose Haar transform acts on their first axis only.

    Bands group coefficients of such transforms; see the module.

    Returns:
        The positions of these leaves in tree order, for bands from `pixels`.  None if a transform
        mixes all entries of a leaf, as those of `flat` and `per_layer` do.
    """
    transformed = [block for block in bands.blocks if math.prod(block.grid) > 1]
    if not all(block.columns for block in transformed):
        return None
    return frozenset(i for block in transformed for i in block.leaves)


def stretches(bands: Bands, scales: Array) -> list[Any]:
    """Return for each leaf the map whose Euclidean norm is that of scales * coefficients.

    The map of a leaf in a plain band is a factor.  That of a leaf in `leaves_by_rows` is a function
    of an array [N, ...], whose rows have the entries of the leaf, or of one of its columns.  It
    returns the scaled coefficients of each row, Float32[N, coefficients, columns].

    Args:
        scales: Float[n].
    """
    out: list[Any] = [None] * len(bands.shapes)
    for block, numbers in zip(bands.blocks, _band_numbers(bands)):
        is_plain, own = math.prod(block.grid) == 1, scales[np.array(numbers)]
        for i in block.leaves:
            out[i] = own[0] if is_plain else functools.partial(_stretch, block, own)
    return out


def _stretch(block: Block, scales: Array, x: Array) -> Array:
    """Return the coefficients of a block for rows [N, ...], each piece times its scale."""
    x = x.astype(jnp.float32).reshape(len(x), *block.grid, -1)
    pieces = haar.split(x, [1 + a for a in _axes(block)])
    scaled = [s * piece.reshape(len(x), -1, x.shape[-1]) for s, piece in zip(scales, pieces)]
    return jnp.concatenate(scaled, 1)


def shrink(bands: Bands, bounds: Any, tree: Any) -> tuple[Any, jax.Array]:
    """Scale each band of the tree down to a norm of at most its bound.

    The norms are computed from the same rounded coefficients that are then scaled.  (`energies`
    rounds differently.  If a norm is far above its bound, this difference could be many times the
    bound.)

    Args:
        bounds: Float[n].
        tree: a contribution.

    Returns:
        The tree, with the shapes and dtypes of `tree`; and the norms that the bands had,
        Float32[n].
    """
    like, treedef = _require_shapes("bands.shrink", bands, tree)
    # If the compiler computed the coefficients twice, it could round them differently.
    pieces = lax.optimization_barrier(_materialise(_split(bands, like)))
    squares = [_energies_of_block(p, _axes(block)) for block, p in zip(bands.blocks, pieces)]
    norms = jnp.sqrt(jnp.concatenate(squares))
    bounds = one_per_band("bands.shrink", bands, bounds)
    factors = jnp.minimum(1.0, bounds / jnp.maximum(norms, jnp.finfo(jnp.float32).tiny))
    # As in `stages.factor_to_bound`, a norm that overflows counts as not finite.
    factors = jnp.where(jnp.isfinite(norms), factors, jnp.nan)
    return _merge(bands, _scale_pieces(bands, factors, pieces), like, treedef), norms


def scale(bands: Bands, values: Any, tree: Any) -> Any:
    """Return the tree with each band multiplied by its value: Q^T diag(values) Q tree.

    Args:
        values: Float[n].
        tree: a contribution, whose shapes and dtypes the result has.
    """
    like, treedef = _require_shapes("bands.scale", bands, tree)
    pieces = _scale_pieces(bands, one_per_band("bands.scale", bands, values), _split(bands, like))
    return _merge(bands, pieces, like, treedef)


def noise(bands: Bands, key: jax.Array, stds: Any, like: Any) -> Any:
    """Draw Gaussian noise with standard deviation stds[b] in every coefficient of band b.

    Coefficients that affect only padding are not drawn, since they would be dropped.

    Args:
        key: the key of the noise.
        stds: Float[n].

    Returns:
        A float32 tree with the shapes of `like`.
    """
    _, treedef = _require_shapes("bands.noise", bands, like)
    floats = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    drawn = [
        [floats(grid + block.columns) for _, grid, _ in haar.layout(*block.grid)]
        for block in bands.blocks
    ]
    draw = normals if jax.default_backend() == "cpu" else as_one_leaf
    pieces = _scale_pieces(bands, one_per_band("bands.noise", bands, stds), draw(key, drawn))
    return _merge(bands, pieces, list(map(floats, bands.shapes)), treedef)


# --- expected energies


def prior(bands: Bands) -> np.ndarray:
    """Return the expected energy of one coefficient of natural images in each band, Float32[n].

    It needs no data, and is relative to the energy of a finest coefficient: 2^l for level l of a
    block with one transformed axis, and 4^l with two, which is the 1 / f^2 spectrum of natural
    images.  The base has the energy of the root.  A plain band has the mean over all transformed
    coefficients, because nothing is known about it.
    """
    size, is_transformed, energy = sizes(bands), levels(bands) >= 0, leaves(bands)
    if is_transformed.any():
        total_energy, total_size = (v[is_transformed].sum() for v in (size * energy, size))
        energy[~is_transformed] = total_energy / total_size
    return energy.astype(np.float32)
