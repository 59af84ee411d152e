"""Orthonormal Haar transforms along one axis, or along two (a square pyramid), in O(m).

Coefficients are in the order base, finest details (level 1), ..., root detail (level L); a detail
is left minus right.  Lengths are padded with zeros to a power of two, m = 2 ** L.  The
un-normalised transform of Ranaweera et al., 2025, has means and half differences: it is
`analysis(x) / sqrt(leaves(m))`.

A "piece" is an array of the coefficients of one level and one kind of detail, without coefficients
that depend on padding only, which are zero in an analysis and have no effect in a synthesis.
Working on pieces needs no gather and moves no padding.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

HIGHEST = lax.Precision.HIGHEST
# `energies` and `merge` compute this number of levels by one product.  A CPU takes as long for 3 as
# for 5, and twice as long for 7.
LEVELS_PER_PRODUCT = 5
# A TPU merges arrays of at most so many entries (times columns) by one product with the matrix of
# the transform.  In a loop over levels, arrays have an axis of length 2, which a TPU pads to 8.
MAX_ENTRIES_PER_PRODUCT = 1024


def height(*lengths) -> int:
    """Return L, the number of levels of the tree over the longest of `lengths`."""
    return (max(lengths) - 1).bit_length()


def layout(*lengths) -> tuple:
    """Return (level, shape of the piece, shape with padding) of every piece for given lengths.

    Pieces are in the order of the module docstring.  The base has level 0.

    Example:
        >>> layout(3)
        ((0, (1,), (1,)), (1, (2,), (2,)), (2, (1,), (1,)))
    """
    top, base = height(*lengths), (1,) * len(lengths)
    out = [(0, base, base)]
    for level in range(1, top + 1):
        grid = tuple(-(-d // 2**level) for d in lengths)
        out += [(level, grid, (2 ** (top - level),) * len(lengths))] * (2 ** len(lengths) - 1)
    return tuple(out)


# --- pieces


def split(x, axes=(-1,)) -> tuple:
    """Return the pieces of x along `axes`, in the order of `layout`.

    Two axes have three pieces per level: (low, high), (high, low), (high, high).
    """
    axes = tuple(a % x.ndim for a in axes)
    details = []
    for _ in range(height(*(x.shape[a] for a in axes))):
        pad = [(0, x.shape[a] % 2 if a in axes else 0) for a in range(x.ndim)]
        parts = [jnp.pad(x, pad)]
        for axis in axes:
            halves = [[lax.slice_in_dim(p, i, None, 2, axis) for i in (0, 1)] for p in parts]
            parts = [part for left, right in halves for part in (left + right, left - right)]
        x, *finer = [part * 0.5 ** (len(axes) / 2) for part in parts]
        details += finer
    return (x, *details)


def merge(pieces, lengths, axes=(-1,)):
    """Return the array whose pieces are `pieces`: the inverse and transpose of `split`."""
    x, *details = pieces
    axes = tuple(a % x.ndim for a in axes)
    if axes == (x.ndim - 1,):
        return _merge_by_products(x, details, *lengths)
    is_small = details and math.prod(lengths) <= MAX_ENTRIES_PER_PRODUCT
    if is_small and axes == tuple(range(len(axes))) and jax.default_backend() == "tpu":
        columns = x.shape[len(axes) :]
        rows = jnp.concatenate([piece.reshape(-1, *columns) for piece in pieces])
        product = jnp.tensordot(_merge_matrix(lengths), rows, 1, precision=HIGHEST)
        return product.reshape(*lengths, *columns)
    return _merge_by_levels(x, details, lengths, axes)


@functools.cache
def _merge_matrix(lengths):
    """Return the matrix of `merge` along the first axes, Float32[entries, coefficients].

    Its columns are in the order of the pieces, without their padding.
    """
    grids = [grid for _, grid, _ in layout(*lengths)]
    *ends, size = np.cumsum([math.prod(grid) for grid in grids])
    with jax.ensure_compile_time_eval():
        x, *details = (
            rows.reshape(*grid, size)
            for rows, grid in zip(np.split(np.eye(size, dtype=np.float32), ends), grids)
        )
        merged = _merge_by_levels(x, details, lengths, tuple(range(len(lengths))))
        return np.asarray(merged).reshape(-1, size)


def _merge_by_levels(x, details, lengths, axes):
    """Return `merge`, with a sum for every level and axis.

    Args:
        x: the base.
        details: the pieces of levels 1 to L.
        lengths: the lengths of the transformed axes.
        axes: these axes, not negative.
    """
    kinds = 2 ** len(axes) - 1
    for level in reversed(range(height(*lengths))):
        parts = [x, *details[level * kinds : (level + 1) * kinds]]
        for axis in reversed(axes):
            parts = [_interleave(low, high, axis) for low, high in zip(parts[::2], parts[1::2])]
        x = parts[0] * 0.5 ** (len(axes) / 2)
        for axis, d in zip(axes, lengths):
            x = lax.slice_in_dim(x, 0, -(-d // 2**level), axis=axis)
    return x


def _interleave(low, high, axis):
    """Return the array with low + high at even positions of an axis and low - high at odd ones.

    Both are repeated along the axis, so a compiler can compute all levels in one loop.
    """
    shape = list(low.shape)
    shape[axis] *= 2
    low, high = (jnp.expand_dims(x, axis + 1) for x in (low, high))
    sign = np.array([1, -1], low.dtype).reshape(
        [2 if a == axis + 1 else 1 for a in range(low.ndim)]
    )
    return (low + sign * high).reshape(shape)


def _merge_by_products(x, details, length):
    """Return `merge` along the last axis, with a product for every few levels.

    Args:
        x: the base, [..., 1].
        details: the pieces of levels 1 to L.
        length: the length of the result.
    """
    while details:
        num_levels = len(details) % LEVELS_PER_PRODUCT or LEVELS_PER_PRODUCT
        m, blocks, parts = 2**num_levels, x.shape[-1], [x[..., None]]
        for level, piece in enumerate(details[-num_levels:], 1):
            in_block = m >> level  # coefficients of this level in a block of m entries
            pad = [(0, 0)] * (x.ndim - 1) + [(0, blocks * in_block - piece.shape[-1])]
            parts.append(jnp.pad(piece, pad).reshape(*x.shape, in_block))
        details = details[:-num_levels]
        product = jnp.dot(jnp.concatenate(parts, -1), _matrix(m, x.dtype).T, precision=HIGHEST)
        x = product.reshape(*x.shape[:-1], -1)[..., : -(-length // 2 ** len(details))]
    return x


def join(pieces, lengths, axes=(-1,)):
    """Return all coefficients of these pieces, including padding, along a single axis.

    This axis replaces `axes`; its length is m for one axis, and m * m for two.
    """
    first, out = axes[0] % pieces[0].ndim, []
    for piece, (_, grid, full) in zip(pieces, layout(*lengths)):
        pad = [(0, 0)] * piece.ndim
        pad[first : first + len(grid)] = [(0, f - g) for f, g in zip(full, grid)]
        shape = piece.shape[:first] + (math.prod(full),) + piece.shape[first + len(grid) :]
        out.append(jnp.pad(piece, pad).reshape(shape))
    return jnp.concatenate(out, first)


def cut(coefficients, lengths, axis=-1) -> tuple:
    """Split coefficients along `axis` into pieces without their padding; inverts `join`.

    Args:
        coefficients: an array that `join` returned.
        lengths: the lengths of the transformed axes, before padding.
        axis: the axis of the coefficients.
    """
    axis, start, out = axis % coefficients.ndim, 0, []
    for _, grid, full in layout(*lengths):
        piece = lax.slice_in_dim(coefficients, start, start + math.prod(full), axis=axis)
        piece = piece.reshape(piece.shape[:axis] + full + piece.shape[axis + 1 :])
        for i, g in enumerate(grid):
            piece = lax.slice_in_dim(piece, 0, g, axis=axis + i)
        out.append(piece)
        start += math.prod(full)
    return tuple(out)


# --- one axis


def analysis(x):
    """Return the Haar coefficients [..., m] of x [..., d], where m is the next power of two.

    Example:
        >>> c = analysis(jnp.array([4.0, 8, 1, 9, 8, 4, 5, 3])) / jnp.sqrt(leaves(8))
        >>> [round(float(v), 4) for v in c]
        [5.25, -2.0, -4.0, 2.0, 1.0, 0.5, 1.0, 0.25]
    """
    return join(split(x), x.shape[-1:])


def synthesis(coefficients, length: int):
    """Return x [..., length], without padding, from coefficients [..., m]: undo `analysis`."""
    if coefficients.shape[-1] != 2 ** height(length):
        raise ValueError(
            f"haar.synthesis: expected {2 ** height(length)} coefficients for {length}, but got "
            f"{coefficients.shape[-1]}. Pass the length that was analysed."
        )
    return merge(cut(coefficients, (length,)), (length,))


def energies(x):
    """Return the squared norms of the base and of levels 1 to L of x [d], Float32[L + 1].

    A few levels at a time are computed by a product with a small matrix; only sums of squares, and
    the means that the next levels split, are kept.  The absolute error is about 1e-7 of the squared
    norm of x, so a level that is exactly zero may not give 0.

    Example:
        >>> [round(float(v), 4) for v in energies(jnp.array([4.0, 8, 1, 9, 8, 4, 5, 3]))]
        [220.5, 50.0, 5.0, 0.5]
    """
    x, details = jnp.asarray(x, jnp.float32), []
    while x.shape[0] > 1:
        m = 2 ** min(height(x.shape[0]), LEVELS_PER_PRODUCT)
        x = jnp.pad(x, (0, -x.shape[0] % m)).reshape(-1, m)
        coefficients = jnp.dot(x, _matrix(m, x.dtype), precision=HIGHEST)
        first = np.searchsorted(levels(m), range(1, height(m) + 1))  # coefficient of each level
        details += [level.sum() for level in jnp.split(jnp.square(coefficients).sum(0), first)[1:]]
        x = coefficients[:, 0]
    return jnp.stack([jnp.square(x).sum(), *details])


def _matrix(m: int, dtype):
    """Return the transform of m entries, [m, m], with one coefficient per column."""
    found = np.ones((1, 1))
    while len(found) < m:  # the means of pairs, then their differences
        half = len(found)
        base, *finer = np.repeat(found, 2, axis=0).T
        details = np.kron(np.eye(half), [[1.0], [-1.0]]).T
        found = np.stack([base, *details, *finer]).T
    return jnp.asarray(found / np.linalg.norm(found, axis=0), dtype)


def levels(m: int):
    """Return the level of each of m coefficients, Int[m], for m a power of two.

    Levels are 1 (finest) to L (root); the base has 0.

    Example:
        >>> levels(8).tolist()
        [0, 1, 1, 1, 1, 2, 2, 3]
    """
    return _per_level("levels", m, lambda level, top: level)


def leaves(m: int):
    """Return the number of entries from which each coefficient is computed, Int[m].

    This is 2 ** level, and m for the base.

    Example:
        >>> leaves(8).tolist()
        [8, 2, 2, 2, 2, 4, 4, 8]
    """
    return _per_level("leaves", m, lambda level, top: 2 ** (level or top))


def _per_level(where, m, value):
    """Return value(level, ...) of each coefficient as one array; reject an m that is no power of
    two."""
    if m < 1 or m & (m - 1):
        raise ValueError(
            f"haar.{where}: expected m to be a power of two, but got {m!r}. It is the "
            "padded length."
        )
    out = []
    for level, _, full in layout(m):
        out += [value(level, height(m))] * math.prod(full)
    with jax.ensure_compile_time_eval():  # numbers, also where the caller is being traced
        return jax.device_get(jnp.array(out))
