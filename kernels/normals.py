"""Standard normals for a whole pytree, computed from counters in one loop.

One block of Philox (128 bits) makes two normals by the method of Box and Muller: 62 bits give the
radius, 34 the angle.  A normal depends only on the key and on its position in one flat vector, not
on the length of the vector or how it is cut into leaves.

The speed is limited by arithmetic (20 products of 32 bits per block), then by memory.  XLA for CPU
has no loop with two results, and computes an expression again for every reader.  So both normals of
a pair are stored in one complex number, behind a branch that is always taken, which the compiler
cannot know: the pairs are then written once and read where they are added.  On other backends each
leaf computes its own normals where it is read, both of a pair for each of them: twice the
arithmetic, and no memory.  The choice is made when a program is traced for a backend.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import philox

TILE = 256  # number of pairs whose first normals, followed by whose second normals, are adjacent
GENERATORS = ("philox", "key")
MAX_VALUES = 2**33  # values of one key
# The radius of a pair of normals has 62 bits: it is at most REACH standard deviations, and misses
# MISSING of the mass of two normals.  The ledger adds that to delta.
MISSING = 2.0**-63
REACH = math.sqrt(-2 * math.log(MISSING))


def normals(key, like, generator: str = "philox"):
    """Draw independent float32 N(0, 1) numbers for a whole pytree.

    Args:
        key: any key of two or four words (threefry2x32, rbg, `philox.PHILOX`).
        like: a pytree of arrays or shapes.
        generator: "philox" derives the noise from the words of the key by Philox4x32-10, whatever
            the type of the key; "key" takes the same number of random words from the key's own
            generator.

    Returns:
        A pytree with the shapes of `like`.

    Privacy:
        the radius of a pair has 62 bits, so normals reach 9.3 standard deviations and miss 2^-63 of
        the mass (`REACH`, `MISSING`).  The computed pair is within 3e-7 r + 6e-8 / r of the exact
        one at distance r from 0.  Normals are floats on a grid, which exact differential privacy
        does not allow for.

    Raises:
        ValueError: for another generator, a key of another size, or 2^33 values.

    References:
        Box & Muller, Ann.  Math.  Stat. 29 (1958); Salmon et al., SC 2011.
    """
    if generator not in GENERATORS:
        raise ValueError(
            f"normals: expected a generator out of {GENERATORS}, but got {generator!r}."
        )
    leaves, treedef = jax.tree.flatten(like)
    shapes = tuple(tuple(x.shape) for x in leaves)
    draw = _draw_by_philox if generator == "philox" else _draw_by_key
    return treedef.unflatten(draw(key, shapes))


def _num_tiles(shapes) -> int:
    """Return the number of tiles that hold all numbers of these shapes."""
    return -(-sum(map(math.prod, shapes)) // (2 * TILE))


def _split_leaves(flat, shapes) -> list:
    """Cut a flat vector into leaves."""
    out, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        out.append(lax.slice(flat, (start,), (end,)).reshape(shape))
        start = end
    return out


def _draw_by_key(key, shapes):
    """Draw the words of all pairs at once, by the key's own generator."""
    words = jax.random.bits(key, (4, _num_tiles(shapes) * TILE), jnp.uint32)
    return _split_leaves(jnp.stack(pair(*words)).reshape(-1), shapes)


def _draw_by_philox(key, shapes):
    """Draw all leaves by Philox, with the method for the current backend."""
    if _num_tiles(shapes) >= 2**24:
        raise ValueError(
            "normals: expected less than 2^33 values of one key, but got "
            f"{_num_tiles(shapes) * 2 * TILE}."
        )
    method = _stored_once if jax.default_backend() == "cpu" else leaf_by_leaf
    return _compile(method, shapes, key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compile(method, shapes, key):
    """Return method(shapes, key), compiled, so that leaves round as they do inside a program."""
    return method(shapes, key)


def leaf_by_leaf(shapes, key):
    """Return each leaf computed separately, element by element.

    A compiler computes each element where it is read, at twice the arithmetic and without memory.
    The words are those of the flat vector.  So are the normals if a compiler rounds identically; a
    single normal may differ in its last digit.
    """
    if (
        max(map(math.prod, shapes), default=0) > 2**32 - 2 * TILE
    ):  # positions do not fit into 32 bits
        return _leaves_of_pairs(shapes, _pairs(_num_tiles(shapes), key))
    starts = itertools.accumulate(map(math.prod, shapes), initial=0)
    words = philox.words(key)
    return [leaf(words, shape, start) for shape, start in zip(shapes, starts, strict=False)]


def leaf(words, shape, start: int):
    """Return the normals of a leaf that begins at position `start` of the flat vector."""
    first_tile, rest = divmod(start, 2 * TILE)
    place, stride = jnp.full(shape, rest, jnp.uint32), math.prod(shape)
    for axis, length in enumerate(shape):
        stride //= max(length, 1)
        place += lax.broadcasted_iota(np.uint32, shape, axis) * np.uint32(stride)
    tile, place = place // np.uint32(2 * TILE), place % np.uint32(2 * TILE)
    index = tile * np.uint32(TILE) + place % np.uint32(TILE) + np.uint32(first_tile * TILE)
    return one_of_pair(place >= np.uint32(TILE), *philox.draw(words, index, philox.NORMALS))


def _stored_once(shapes, key):
    """Return the leaves of one flat vector, whose pairs are written to memory once."""
    tiles = _num_tiles(shapes)
    return _leaves_of_pairs(
        shapes, _stored_pairs(tiles, key) if tiles else jnp.zeros((0,), jnp.complex64)
    )


def _leaves_of_pairs(shapes, pairs):
    """Return the leaves of pairs, Complex64[n]."""
    tiles = pairs.size // TILE
    pairs = jnp.broadcast_to(pairs.reshape(tiles, 1, TILE), (tiles, 2, TILE))
    second = lax.broadcasted_iota(np.int32, pairs.shape, 1) == 1
    return _split_leaves(jnp.where(second, lax.imag(pairs), lax.real(pairs)).reshape(-1), shapes)


def _pairs(tiles, key, upper=None):
    """Return all pairs of some tiles as complex numbers, Complex64[tiles * TILE]."""
    index = lax.iota(np.uint32, tiles * TILE)
    return lax.complex(*pair(*philox.blocks(key, index, upper)))


def _stored_pairs(tiles, key):
    """Return `_pairs`, behind a branch that makes the CPU compiler store them."""
    always = lax.optimization_barrier(jnp.bool_(True))
    # The zeros depend on the key, because under shard_map both branches must vary in the same way.
    never = lambda key: jnp.broadcast_to(
        (philox.words(key)[0] & np.uint32(0)).astype(jnp.complex64), (tiles * TILE,)
    )
    return lax.cond(always, functools.partial(_pairs, tiles, upper=philox.by_64_bits), never, key)


def pair(w0, w1, w2, w3):
    """Return two independent normals from four random words.

    It uses polynomials that a compiler turns into plain vector code.

    Shapes:
        UInt32[...] -> two Float32[...].
    """
    radius, cos, sin = _polar(w0, w1, w2)
    return _flip(radius * (cos - sin), w3), _flip(radius * (cos + sin), w3 << np.uint32(1))


@jax.jit  # traced once for all leaves of a shape
def one_of_pair(second, w0, w1, w2, w3):
    """Return the second normal of `pair` where `second` is True, otherwise the first, bit for bit.

    Shapes:
        Bool[...], UInt32[...] -> Float32[...].
    """
    radius, cos, sin = _polar(w0, w1, w2)
    sin = jnp.where(second, sin, -sin)
    return _flip(radius * (cos + sin), jnp.where(second, w3 << np.uint32(1), w3))


def _as_int32(word):
    """Return the bits of a word as a signed integer."""
    return lax.bitcast_convert_type(word, jnp.int32)


def _flip(x, sign):
    """Return `x` with its sign reversed where the highest bit of `sign` is 1."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) ^ (sign & np.uint32(1 << 31))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _polar(w0, w1, w2):
    """Return the radius / sqrt(2), and the cosine and sine of an angle in [-pi/4, pi/4]."""
    f = np.float32
    number = lambda w: lax.convert_element_type(_as_int32(w), jnp.float32)
    # u is uniform on (0, 2^31] with 62 bits; small values, which give the tail, keep all digits
    u = number(w0 >> np.uint32(1)) + (number(w2 >> np.uint32(1)) + f(0.5)) * f(2.0**-31)
    # -log u = -(exponent - 31) log 2 - log1p(m), m in [sqrt(1/2) - 1, sqrt(2) - 1]
    raw = _as_int32(u)
    shifted = raw - np.int32(0x3F3504F3)
    exponent = lax.convert_element_type(shifted >> np.int32(23), jnp.float32)
    m = lax.bitcast_convert_type(raw - (shifted & np.int32(-1 << 23)), jnp.float32) - f(1)
    m2 = m * m
    a, b, c, d = (f(p) + f(q) * m for p, q in LOG)
    minus_log = (f(31) - exponent) * f(np.log(2)) - m * ((a + b * m2) + (c + d * m2) * (m2 * m2))
    # without the factor sqrt(2), which cancels in cos(pi/4 + t) = (cos t - sin t) / sqrt(2)
    radius = jnp.sqrt(minus_log)
    # the angle covers a quarter turn, [-pi/4, pi/4]; two random signs select the quarter
    t = number(w1) * f(np.pi / 4 * 2.0**-31)
    t2 = t * t
    cos = f(1) + t2 * (f(COS[0]) + t2 * (f(COS[1]) + t2 * f(COS[2])))
    sin = t + t * t2 * (f(SIN[0]) + t2 * (f(SIN[1]) + t2 * f(SIN[2])))
    return radius, cos, sin


# Minimax polynomials on the ranges above.  Their maximum absolute errors are 3.4e-8, 3.2e-8 and
# 1.8e-9, less than half a unit in the last place of float32 at 1.
LOG = (
    (0.9999998211860657, -0.5000066757202148),
    (0.33336183428764343, -0.24959343671798706),
    (0.1987304538488388, -0.17333467304706573),
    (0.16419996321201324, -0.10102237015962601),
)
COS = (-0.49999895, 0.04165629, -0.00135978)
SIN = (-0.16666651, 0.00833198, -0.00019496)
