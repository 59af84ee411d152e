"""Philox4x32-10, a random generator in counter mode, for the words of JAX keys.

A key is four words: the cipher's key (k0, k1) and the upper half (h0, h1) of its 128-bit counter.
A draw from a key encrypts the counters (index, NORMALS, h0, h1).  Blocks of different indices
differ, because a cipher never repeats a block.

JAX's own key type "philox4x32" is different: its keys have two words, it uses one of a block's four
words, and its fold_in(key, i) equals split(key)[i].

Philox4x32 passes the BigCrush tests from 7 rounds on.  This module uses 10 rounds, the paper's safe
choice.  Philox is a generator for simulation, not a cipher for secrets.

References:
    Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, sections
    3.3 and 4.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
NORMALS = 1  # the second word of each counter; another number changes every draw


def by_64_bits(a, b):
    """Return the upper 32 bits of the product of two UInt32, computed in 64 bits.

    A CPU multiplies 32 x 32 -> 64 bits in one instruction, and on a GPU LLVM turns this function
    into one mul.hi.u32.  lax.mulhi is not faster there, and it fails in programs for several GPUs.
    """
    with jax.enable_x64(True):  # no 64-bit value leaves this block
        product = lax.convert_element_type(a, np.uint64) * lax.convert_element_type(b, np.uint64)
        return lax.convert_element_type(
            lax.shift_right_logical(product, lax.full_like(product, 32)), np.uint32
        )


def by_16_bits(a, b):
    """Return the same as `by_64_bits`, from four products of 16-bit halves."""
    half, lower = np.uint32(16), np.uint32(0xFFFF)
    high_a, low_a, high_b, low_b = a >> half, a & lower, b >> half, b & lower
    middle = high_a * low_b + (low_a * low_b >> half)
    return high_a * high_b + (middle >> half) + (low_a * high_b + (middle & lower) >> half)


# A TPU has no 64-bit integers, so a product would take 11 to 40 operations.  jax has mulhi from
# version 0.10.2.
ON_TPU = getattr(lax, "mulhi", by_16_bits)


def traced_for():
    """Return the function that computes the high 32 bits of products of words on this backend."""
    return ON_TPU if jax.default_backend() == "tpu" else by_64_bits


def _round(upper, c0, c1, c2, c3, k0, k1):
    """Apply one round of the cipher to a counter and a key."""
    m0, m1 = (jnp.full_like(c0, m) for m in MULTIPLIERS)
    return upper(m1, c2) ^ c1 ^ k0, m1 * c2, upper(m0, c0) ^ c3 ^ k1, m0 * c0


_round_once = jax.jit(_round, static_argnums=0)  # a shape is traced once


def block(key, counter, upper=None):
    """Encrypt a counter by Philox4x32.

    Args:
        key: the words k0 and k1.
        counter: four words.
        upper: the function that computes upper halves of products, such as `by_64_bits`.  None
            means the best one for the backend.  All of them return the same bits.

    Shapes:
        key: two, counter: four UInt32[...] that broadcast -> four UInt32[...].

    Example:
        >>> [f"{int(w):08x}" for w in block((0, 0), (0, 0, 0, 0))]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    one_round = functools.partial(_round_once, upper or traced_for())
    key = [jnp.asarray(k, jnp.uint32) for k in key]
    counter = [jnp.asarray(c, jnp.uint32) for c in counter]
    k0, k1, *words = jnp.broadcast_arrays(*key, *counter)
    for _ in range(ROUNDS):
        words = one_round(*words, k0, k1)
        k0, k1 = k0 + np.uint32(WEYL[0]), k1 + np.uint32(WEYL[1])
    return tuple(words)


def draw(data, index, upper=None):
    """Return the block at each index for a key with the words `data`, as four UInt32[...].

    The first word of the counter is the exclusive or of the index and k0, which differs for
    different indices.  With the index alone, the first products would not depend on the key, and
    XLA would move them out of a loop over keys into memory.
    """
    return block(
        (data[0], data[1]), (index ^ data[0], jnp.uint32(NORMALS), data[2], data[3]), upper=upper
    )


def words(key):
    """Return the four words of a key of any type with two or four words.

    A key of two words k0, k1 (threefry) becomes (k0, k1, "jfl-", "key2"), with four bytes of text
    as a word, so different keys stay different.
    """
    data = jax.random.key_data(key)
    if data.shape == (4,):
        return data
    if data.shape != (2,):
        raise ValueError(
            f"philox: expected a key of two or four words, but got {key.dtype} of shape "
            f"{key.shape}."
        )
    return jnp.concatenate([data, jnp.array([0x2D6C666A, 0x3279656B], jnp.uint32)])


def blocks(key, index, upper=None):
    """Return the blocks `index` of a key of any type.

    The blocks differ from everything that jax.random draws from the key.

    Shapes:
        index UInt32[...] -> four UInt32[...].
    """
    return draw(words(key), index, upper)
