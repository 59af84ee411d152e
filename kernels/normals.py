"""Standard normals for a whole pytree, computed from counters in one loop.

One block of Philox (128 bits) gives two normals by the method of Box and Muller: 62 bits give the
radius, 34 the angle.  A normal depends only on the key and on its position.  Positions count the
numbers of all leaves in their order, and each leaf starts at an even position: after a leaf of odd
length, one position is left out.  Block i gives the normals at the positions 2 i and 2 i + 1.

The speed is limited by arithmetic (20 products of 32 bits per block), then by memory.  XLA for CPU
has no loop with two results, and computes an expression again wherever it is used.  Therefore both
normals of a pair are stored in one complex number, inside a branch that is always taken, which the
compiler does not know.  The pairs are then written once, and read where they are added.

On other backends, the normals of each leaf are computed where they are used, without storing them.
The code computes a block for each normal.  However, XLA for GPU assigns neighbours to one thread if
an array is large and the lengths of its leaf and last axis are even, and LLVM then computes a block
once for both.  The method is chosen for the backend for which a program is traced.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import philox

GENERATORS = ("philox", "key")
REPEATED = 4  # the number of leaves of one shape from which on one kernel computes all of them
MAX_POSITIONS = 2**32  # of one key, because a position has 32 bits
# The radius of a pair of normals has 62 bits: it is at most REACH standard deviations, and misses
# MISSING of the mass of two normals.  The ledger adds that to delta.
MISSING = 2.0**-63
REACH = math.sqrt(-2 * math.log(MISSING))


def normals(key, like, generator: str = "philox"):
    """Draw independent float32 N(0, 1) numbers for a whole pytree.

    Args:
        key: a JAX key of two or four words (threefry2x32, rbg).
        like: a pytree of arrays or shapes.
        generator: "philox" derives the noise from the words of the key by Philox4x32-10, whatever
            the type of the key; "key" takes the same number of random words from the key's own
            generator, so a normal then also depends on the total number of pairs.

    Returns:
        A pytree with the shapes of `like`.

    Privacy:
        The radius of a pair has 62 bits, so normals are at most 9.3 standard deviations (`REACH`),
        and a probability mass of 2^-63 is cut off (`MISSING`).  At distance r from 0, a computed
        pair is within 3e-7 r + 6e-8 / r of the exact pair.  Normals are floats on a grid, which
        proofs of privacy for real numbers do not cover.

    Raises:
        ValueError: for another generator, a key of another size, or at least 2^32 positions.

    References:
        Box & Muller, Ann.  Math.  Stat. 29 (1958); Salmon et al., SC 2011.
    """
    if generator not in GENERATORS:
        raise ValueError(
            f"normals: expected a generator out of {GENERATORS}, but got {generator!r}."
        )
    leaves, treedef = jax.tree.flatten(like)
    shapes = tuple(tuple(x.shape) for x in leaves)
    positions = 2 * _first_pairs(shapes)[-1]
    if positions >= MAX_POSITIONS:
        raise ValueError(
            f"normals: expected fewer than 2^32 positions for one key, but got {positions}."
        )
    draw = _draw_by_philox if generator == "philox" else _draw_by_key
    return treedef.unflatten(draw(key, shapes))


def as_one_leaf(key, like):
    """Return `normals(key, like)`, computed as the normals of one leaf that holds all leaves.

    On a GPU, one kernel then computes all normals, and each is computed once.  Use this function
    there if each normal is read several times; a CPU stores all normals anyway.  A compiler may
    round a normal differently in its last digit.
    """
    leaves, treedef = jax.tree.flatten(like)
    shapes = [x.shape for x in leaves]
    *starts, end = [2 * first for first in _first_pairs(shapes)]
    flat = normals(key, jax.ShapeDtypeStruct((end,), jnp.float32))
    return treedef.unflatten(
        lax.slice(flat, (start,), (start + math.prod(shape),)).reshape(shape)
        for start, shape in zip(starts, shapes, strict=True)
    )


def _num_pairs(shape) -> int:
    """Return the number of pairs that hold the numbers of a leaf."""
    return -(-math.prod(shape) // 2)


def _first_pairs(shapes) -> list[int]:
    """Return the number of the first pair of each leaf, and last the number of all pairs."""
    return list(itertools.accumulate(map(_num_pairs, shapes), initial=0))


def _reshape_leaf(pairs, shape):
    """Return a leaf from its numbers, [pairs, 2]; the last number of an odd leaf is left out."""
    flat, size = pairs.reshape(-1), math.prod(shape)
    return (flat if flat.size == size else lax.slice(flat, (0,), (size,))).reshape(shape)


def _draw_by_key(key, shapes):
    """Draw the words of all pairs at once, by the key's own generator."""
    firsts = _first_pairs(shapes)
    words = jax.random.bits(key, (4, firsts[-1]), jnp.uint32)
    return _split_leaves(jnp.stack(pair(*words), -1), shapes)


def _split_leaves(numbers, shapes) -> list:
    """Cut the numbers of all pairs, [pairs, 2], into leaves."""
    cuts = itertools.pairwise(_first_pairs(shapes))
    return [
        _reshape_leaf(lax.slice_in_dim(numbers, first, end), shape)
        for (first, end), shape in zip(cuts, shapes, strict=True)
    ]


def _draw_by_philox(key, shapes):
    """Draw all leaves by Philox, with the method for the current backend."""
    method = _stored_once if jax.default_backend() == "cpu" else leaf_by_leaf
    return _compile(method, shapes, key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compile(method, shapes, key):
    """Return method(shapes, key), compiled, so that leaves round as they do inside a program."""
    return method(shapes, key)


def leaf_by_leaf(shapes, key):
    """Return the normals of all leaves, computing each leaf separately, element by element.

    A compiler then computes each element where it is used, without storing it.  However, it also
    compiles Philox separately for each leaf; for a transformer this took longer than compiling the
    rest of the program.  If a shape occurs `REPEATED` times or more, one kernel therefore computes
    all leaves of this shape and writes them to memory.  The normals are those of `_stored_once`,
    except that a compiler may round a normal differently in its last digit.
    """
    words, firsts = philox.words(key), _first_pairs(shapes)
    leaves = {}
    for shape in dict.fromkeys(shapes):
        places = [i for i, other in enumerate(shapes) if other == shape]
        draw = functools.partial(leaf, words, shape)
        if len(places) < REPEATED:
            drawn = [draw(np.uint32(firsts[i])) for i in places]
        else:
            drawn = jax.vmap(draw)(np.array([firsts[i] for i in places], np.uint32))
            # Without the barrier, the compiler could move the kernel to each reader again.
            drawn = jnp.unstack(lax.optimization_barrier(drawn))
        leaves |= zip(places, drawn, strict=True)
    return [leaves[i] for i in range(len(shapes))]


def leaf(words, shape, first):
    """Return the normals of a leaf whose first pair has the number `first`, a UInt32.

    The lowest bit of a position selects one of the two normals of a pair.  The two normals are
    therefore neighbours, and XLA for GPU can compute their block once.  The array of positions must
    be flat: in an array [pairs, 2], a block would not depend on the column, so with a single key
    XLA would compute all blocks first and write them to memory.
    """
    position = lax.iota(np.uint32, math.prod(shape))
    block = philox.draw(words, (position >> np.uint32(1)) + first)
    return one_of_pair((position & np.uint32(1)) == np.uint32(1), *block).reshape(shape)


def _stored_once(shapes, key):
    """Return the leaves of pairs that are written to memory once."""
    count = _first_pairs(shapes)[-1]
    pairs = _stored_pairs(count, key) if count else jnp.zeros((0,), jnp.complex64)
    pairs = jnp.broadcast_to(pairs[:, None], (count, 2))
    second = lax.broadcasted_iota(np.int32, pairs.shape, 1) == 1
    return _split_leaves(jnp.where(second, lax.imag(pairs), lax.real(pairs)), shapes)


def _pairs(count, key, upper=None):
    """Return the first pairs of a key as complex numbers, Complex64[count]."""
    return lax.complex(*pair(*philox.blocks(key, lax.iota(np.uint32, count), upper)))


def _stored_pairs(count, key):
    """Return `_pairs`, behind a branch that makes the CPU compiler store them."""
    always = lax.optimization_barrier(jnp.bool_(True))
    # The zeros depend on the key, because under shard_map both branches must vary in the same way.
    never = lambda key: jnp.broadcast_to(
        (philox.words(key)[0] & np.uint32(0)).astype(jnp.complex64), (count,)
    )
    return lax.cond(always, functools.partial(_pairs, count, upper=philox.by_64_bits), never, key)


def pair(w0, w1, w2, w3):
    """Return two independent normals from four random words.

    The logarithm, sine and cosine are polynomials, which a compiler turns into vector code.

    Shapes:
        UInt32[...] -> two Float32[...].
    """
    radius, cos, sin = _polar(w0, w1, w2)
    return _flip(radius * (cos - sin), w3), _flip(radius * (cos + sin), w3 << np.uint32(1))


@jax.jit  # traced once for all leaves of a shape
def one_of_pair(second, w0, w1, w2, w3):
    """Return the second normal of `pair` where `second` is True, otherwise the first.

    The results have the same bits as those of `pair`.

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
