"""A rotation at the price of a few matrix products: random signs, then Hadamard transforms.

The sizes of the transformed blocks are powers of two that add up to the size of the vector, so that
nothing is padded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ...core.records import Key

LARGEST = 6  # 2^6 rows of a matrix


def rotated(flat: jax.Array, key: Key, back: bool = False) -> jax.Array:
    """A vector, rotated: its length stays, and it is spread over the coordinates of each block.

    Args:
        flat: Float[n].
        key: of the signs.
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
    """Orthonormal, and its own inverse: a matrix on each side, of which the transform is a
    Kronecker product."""
    times = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    if exponent > 2 * LARGEST:  # a large matrix costs more than one factor more
        parts = block.reshape(-1, 2**LARGEST)
        right = times(parts, _matrix(2**LARGEST) / np.float32(2**LARGEST) ** 0.5)
        left = jax.vmap(lambda column: _transform(column, exponent - LARGEST), 1, 1)(right)
        return left.reshape(-1)
    left, right = 2 ** (exponent // 2), 2 ** (exponent - exponent // 2)
    a, b = (_matrix(n) / np.float32(n) ** 0.5 for n in (left, right))
    return times(times(a, block.reshape(left, right)), b).reshape(-1)


def _matrix(size: int) -> np.ndarray:
    """Sylvester's, Float32[size, size] of -1 and 1: the sign is the parity of common bits."""
    both = np.arange(size)[:, None] & np.arange(size)
    parity = np.zeros(both.shape, np.int64)
    for bit in range(size.bit_length()):
        parity ^= both >> bit & 1
    return (1 - 2 * parity).astype(np.float32)
