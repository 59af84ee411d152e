"""Convolutions and pooling of one example, under vmap over clients with weights of their own.

Which way a convolution is computed is chosen here, when a program is traced for a backend:

- On a CPU and a GPU it is shifted slices and one matrix product.  XLA's convolution with weights
  for each client, a grouped one, takes 2 to 4 times as long on a CPU, where its backward pass is
  slower still inside a scan, and about twice as long on an H200.
- On a TPU it is XLA's own.  Patches of 3 x 3 are nine times the activations, and are written,
  copied and reshaped.
"""

import jax
import jax.numpy as jnp
from jax import lax

NAMES = ("NHWC", "HWIO", "NHWC")


def multiplies_patches() -> bool:
    """Whether a convolution is a matrix product of patches where this is traced for."""
    if jax.default_backend() == "gpu":
        # the compiler of earlier versions refuses some of these products
        return jax.__version_info__ >= (0, 11)
    return jax.default_backend() == "cpu"


def conv_same(x, kernel):
    """x [H, W, C], kernel [kh, kw, C, O] with odd kh, kw -> [H, W, O]; zero padding, stride 1."""
    kh, kw = kernel.shape[:2]
    around = ((kh // 2, kh // 2), (kw // 2, kw // 2))
    if multiplies_patches():
        return _of_patches(x, kernel, around)
    return lax.conv_general_dilated(x[None], kernel, (1, 1), around, dimension_numbers=NAMES)[0]


def _of_patches(x, kernel, around):
    kh, kw, c, out = kernel.shape
    h, w = x.shape[:2]
    padded = jnp.pad(x, (*around, (0, 0)))
    patches = [
        lax.slice(padded, (i, j, 0), (i + h, j + w, c)) for i in range(kh) for j in range(kw)
    ]
    flat = jnp.concatenate(patches, -1).reshape(h * w, kh * kw * c)
    return (flat @ kernel.reshape(kh * kw * c, out)).reshape(h, w, out)


def is_kept_apart(groups: int, channels: int, out: int, examples: float) -> bool:
    """Whether `apart` serves a convolution; any other has to multiply patches.

    Args:
        groups: of the convolution itself.
        channels: of a group.
        out: channels that come out of a group.
        examples: that its gradient by the kernel adds up.
    """
    return examples > 1 and (groups == 1 or min(channels, out) > 1)


def apart(x, kernel, params):
    """XLA's own convolution, in which no client's numbers meet another's once it is mapped.

    Mapped over kernels it becomes a grouped one.  Of groups with a single channel to add up a TPU's
    compiler makes one dense convolution with zeros between the groups, and 0 * nan is nan: a client
    that is not finite would take the others along.  So a channel that is alone gets zeros beside
    it: of x, and of what comes out, which the gradient by x adds up.

    Args:
        params: of the equation, which `is_kept_apart`.
    """
    (_, into, *_), (made, taken, *_), (_, axis, *_) = params["dimension_numbers"]
    out = kernel.shape[made]
    if kernel.shape[taken] == 1:
        x, kernel = _beside_zeros(x, into), _beside_zeros(kernel, taken)
    if out == 1:
        kernel = _beside_zeros(kernel, made)
    return lax.slice_in_dim(lax.conv_general_dilated(x, kernel, **params), 0, out, axis=axis)


def _beside_zeros(x, axis):
    return jnp.pad(x, [(0, int(at == axis)) for at in range(x.ndim)])


def relu_pool(x, bias):
    """x [H, W, C], bias [C] -> max_pool2(relu(x + bias)).

    The largest number of a window stays the largest when a bias is added and when ReLU is taken, so
    both may come last, on a quarter of the numbers.  Behind a product of patches that is slower.
    """
    bias = bias[None, None]
    if multiplies_patches():
        return max_pool2(jax.nn.relu(x + bias))
    return jax.nn.relu(max_pool2(x) + bias)


def max_pool2(x):
    """x [H, W, C] -> [H // 2, W // 2, C], a maximum over 2 x 2 windows; an odd last row or column
    is dropped.

    Of equal numbers in a window a TPU gives the gradient to the first, others to all in equal
    parts: there windows cost less than copies to another shape.
    """
    if jax.default_backend() == "tpu":
        return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2, 1), (2, 2, 1), "VALID")
    h, w, c = x.shape[0] // 2, x.shape[1] // 2, x.shape[2]
    return x[: 2 * h, : 2 * w].reshape(h, 2, w, 2, c).max((1, 3))
