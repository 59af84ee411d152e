"""Standard normals for a whole pytree, at the places of one flat vector: from counters to N(0, 1)
in one loop.

One block of Philox (128 bits) makes two normals by Box & Muller: 62 bits give the radius, 34 the
angle.  A normal depends on the key and its position only, never on how long the vector is or how it
is cut into leaves.

What bounds the speed is arithmetic (20 products of 32 bits a block) and, after it, memory.  XLA for
CPU has no loop with two results, and computes an expression anew for every reader; a complex number
is one result that holds both normals, and a branch that is always taken, which the compiler cannot
know, is where no reader reaches in: the pairs are written once and read where they are added.

Elsewhere each leaf computes its own normals inside of what reads it, both of a pair for each: twice
the arithmetic, and no memory.  Which it is, is decided when a program is traced for a backend.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import philox

TILE = 256  # pairs whose first normals, then whose second normals, lie side by side
GENERATORS = ("philox", "key")
MOST = 2**33  # values of one key
# The radius of a pair of normals has 62 bits: it ends at REACH standard deviations from 0, and
# misses MISSING of the mass of two normals.  The ledger charges that to delta.
MISSING = 2.0**-63
REACH = math.sqrt(-2 * math.log(MISSING))


def normals(key, like, generator: str = "philox"):
    """A pytree of independent float32 N(0, 1) with the shapes of `like`.

    Args:
        key: any key of two or four words (threefry2x32, rbg, `philox.PHILOX`).
        generator: "philox" derives the noise from the key's words by Philox4x32-10, whatever its
            type; "key" takes the same number of random words from the key's own generator.

    Privacy:
        The radius of a pair has 62 bits, so normals reach 9.3 standard deviations and miss 2^-63 of
        the mass (`REACH`, `MISSING`).  The computed pair is within 3e-7 r + 6e-8 / r of the exact
        one at distance r from 0.  Normals are floats on a grid, which exact differential privacy
        does not allow for.

    Raises:
        ValueError: for another generator, a key of another size, or 2^33 values.

    References:
        Box & Muller, Ann. Math. Stat. 29 (1958); Salmon et al., SC 2011.
    """
    if generator not in GENERATORS:
        raise ValueError(
            f"normals: expected a generator out of {GENERATORS}, but got {generator!r}."
        )
    leaves, treedef = jax.tree.flatten(like)
    shapes = tuple(tuple(x.shape) for x in leaves)
    draw = _by_philox if generator == "philox" else _by_key
    return treedef.unflatten(draw(key, shapes))


def _tiles(shapes) -> int:
    return -(-sum(map(math.prod, shapes)) // (2 * TILE))


def _cut(flat, shapes) -> list:
    """A flat vector as leaves."""
    out, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        out.append(lax.slice(flat, (start,), (end,)).reshape(shape))
        start = end
    return out


def _by_key(key, shapes):
    """Draw the words of all pairs at once, by the key's own generator."""
    words = jax.random.bits(key, (4, _tiles(shapes) * TILE), jnp.uint32)
    return _cut(jnp.stack(pair(*words)).reshape(-1), shapes)


def _by_philox(key, shapes):
    if _tiles(shapes) >= 2**24:
        raise ValueError(
            "normals: expected less than 2^33 values of one key, but got "
            f"{_tiles(shapes) * 2 * TILE}."
        )
    way = _from_memory if jax.default_backend() == "cpu" else where_they_are_read
    return _drawn(way, shapes, key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _drawn(way, shapes, key):
    """Compiled, so that leaves that are drawn alone round as they do inside a program."""
    return way(shapes, key)


def where_they_are_read(shapes, key):
    """Each leaf by itself, element by element: inside whatever reads it, at twice the arithmetic
    and without memory.

    The words are those of the flat vector, and so are the normals where a compiler rounds alike:
    one normal alone may differ in its last digit.
    """
    if max(map(math.prod, shapes), default=0) > 2**32 - 2 * TILE:  # places of more than 32 bits
        return _flat(shapes, _pairs(_tiles(shapes), key))
    starts = itertools.accumulate(map(math.prod, shapes), initial=0)
    words = philox.words(key)
    return [leaf(words, shape, start) for shape, start in zip(shapes, starts, strict=False)]


def leaf(words, shape, start: int):
    """The normals at `start` and after it."""
    first_tile, rest = divmod(start, 2 * TILE)
    place, stride = jnp.full(shape, rest, jnp.uint32), math.prod(shape)
    for axis, length in enumerate(shape):
        stride //= max(length, 1)
        place += lax.broadcasted_iota(np.uint32, shape, axis) * np.uint32(stride)
    tile, place = place // np.uint32(2 * TILE), place % np.uint32(2 * TILE)
    index = tile * np.uint32(TILE) + place % np.uint32(TILE) + np.uint32(first_tile * TILE)
    return one_of_pair(place >= np.uint32(TILE), *philox.draw(words, index, philox.NORMALS))


def _from_memory(shapes, key):
    """One flat vector, whose pairs are written once."""
    tiles = _tiles(shapes)
    return _flat(shapes, _written(tiles, key) if tiles else jnp.zeros((0,), jnp.complex64))


def _flat(shapes, pairs):
    """Pairs as leaves."""
    tiles = pairs.size // TILE
    pairs = jnp.broadcast_to(pairs.reshape(tiles, 1, TILE), (tiles, 2, TILE))
    second = lax.broadcasted_iota(np.int32, pairs.shape, 1) == 1
    return _cut(jnp.where(second, lax.imag(pairs), lax.real(pairs)).reshape(-1), shapes)


def _pairs(tiles, key, upper=None):
    index = lax.iota(np.uint32, tiles * TILE)
    return lax.complex(*pair(*philox.blocks(key, index, upper)))


def _written(tiles, key):
    always = lax.optimization_barrier(jnp.bool_(True))
    # zeros that follow from the key: under shard_map both branches must vary alike
    never = lambda key: jnp.broadcast_to(
        (philox.words(key)[0] & np.uint32(0)).astype(jnp.complex64), (tiles * TILE,)
    )
    return lax.cond(always, functools.partial(_pairs, tiles, upper=philox.by_64_bits), never, key)


def pair(w0, w1, w2, w3):
    """Four random words -> two independent normals, by polynomials that a compiler turns into plain
    vector code.

    Shapes:
        UInt32[...] -> two Float32[...].
    """
    radius, cos, sin = _polar(w0, w1, w2)
    return _flip(radius * (cos - sin), w3), _flip(radius * (cos + sin), w3 << np.uint32(1))


@jax.jit  # traced once for all leaves of a shape
def one_of_pair(second, w0, w1, w2, w3):
    """The second normal of `pair` where `second`, else the first, bit for bit.

    Shapes:
        bool[...], UInt32[...] -> Float32[...].
    """
    radius, cos, sin = _polar(w0, w1, w2)
    sin = jnp.where(second, sin, -sin)
    return _flip(radius * (cos + sin), jnp.where(second, w3 << np.uint32(1), w3))


def _signed(word):
    return lax.bitcast_convert_type(word, jnp.int32)


def _flip(x, sign):
    """`x` with its sign turned where the highest bit of `sign` is 1."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) ^ (sign & np.uint32(1 << 31))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _polar(w0, w1, w2):
    """The radius over sqrt(2), and the cosine and sine of an angle in [-pi/4, pi/4]."""
    f = np.float32
    number = lambda w: lax.convert_element_type(_signed(w), jnp.float32)
    # u 2^31 with 62 bits, never 0, at most 2^31: small u, the tail, keep all their digits
    u = number(w0 >> np.uint32(1)) + (number(w2 >> np.uint32(1)) + f(0.5)) * f(2.0**-31)
    # -log u = -(exponent - 31) log 2 - log1p(m), m in [sqrt(1/2) - 1, sqrt(2) - 1]
    raw = _signed(u)
    shifted = raw - np.int32(0x3F3504F3)
    exponent = lax.convert_element_type(shifted >> np.int32(23), jnp.float32)
    m = lax.bitcast_convert_type(raw - (shifted & np.int32(-1 << 23)), jnp.float32) - f(1)
    m2 = m * m
    a, b, c, d = (f(p) + f(q) * m for p, q in LOG)
    minus_log = (f(31) - exponent) * f(np.log(2)) - m * ((a + b * m2) + (c + d * m2) * (m2 * m2))
    # over sqrt(2), which cos(pi/4 + t) = (cos t - sin t) / sqrt(2) returns
    radius = jnp.sqrt(minus_log)
    # [-pi/4, pi/4]: a quarter turn; two signs choose which
    t = number(w1) * f(np.pi / 4 * 2.0**-31)
    t2 = t * t
    cos = f(1) + t2 * (f(COS[0]) + t2 * (f(COS[1]) + t2 * f(COS[2])))
    sin = t + t * t2 * (f(SIN[0]) + t2 * (f(SIN[1]) + t2 * f(SIN[2])))
    return radius, cos, sin


# Least greatest absolute error on the ranges above: 3.4e-8, 3.2e-8 and 1.8e-9, below half a
# float32's last digit at 1.
LOG = (
    (0.9999998211860657, -0.5000066757202148),
    (0.33336183428764343, -0.24959343671798706),
    (0.1987304538488388, -0.17333467304706573),
    (0.16419996321201324, -0.10102237015962601),
)
COS = (-0.49999895, 0.04165629, -0.00135978)
SIN = (-0.16666651, 0.00833198, -0.00019496)
