"""A convolution that stays a batched matmul under vmap over clients and examples.

Under vmap over weights XLA turns a convolution into a grouped one, 2 to 4 times slower on a CPU,
and inside a scan its backward pass is slower still; shifted slices and one matmul are not.
"""

import jax
import jax.numpy as jnp


def conv_same(x, kernel):
    """x [H, W, C], kernel [kh, kw, C, O] with odd kh, kw -> [H, W, O]; zero padding, stride 1."""
    kh, kw, c, out = kernel.shape
    h, w = x.shape[:2]
    padded = jnp.pad(x, ((kh // 2, kh // 2), (kw // 2, kw // 2), (0, 0)))
    patches = [
        jax.lax.slice(padded, (i, j, 0), (i + h, j + w, c)) for i in range(kh) for j in range(kw)
    ]
    flat = jnp.concatenate(patches, -1).reshape(h * w, kh * kw * c)
    return (flat @ kernel.reshape(kh * kw * c, out)).reshape(h, w, out)


def max_pool2(x):
    """x [H, W, C] -> [H // 2, W // 2, C], a maximum over 2 x 2 windows; an odd last row or column
    is dropped."""
    h, w, c = x.shape[0] // 2, x.shape[1] // 2, x.shape[2]
    return x[: 2 * h, : 2 * w].reshape(h, 2, w, 2, c).max((1, 3))
