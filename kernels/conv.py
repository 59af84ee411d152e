"""Convolutions and pooling of one example, for use under vmap over clients with separate weights.

The way to compute a convolution is chosen for the backend for which a program is traced:

- A CPU and a GPU use shifted slices (patches) and one matrix product.  XLA's convolution with
  separate weights per client is a grouped convolution.  It takes 2 to 4 times as long on a CPU,
  where its backward pass is even slower inside a scan, and about twice as long on an H200.
- A TPU uses XLA's convolution.  Patches of 3 x 3 need nine times the memory of the activations, and
  a TPU would write, copy and reshape them.
"""

import jax
import jax.numpy as jnp
from jax import lax

NAMES = ("NHWC", "HWIO", "NHWC")


def multiplies_patches() -> bool:
    """Return whether the current backend computes a convolution as a matrix product of patches."""
    if jax.default_backend() == "gpu":
        # Compilers of earlier versions reject some of these products.
        return jax.__version_info__ >= (0, 11)
    return jax.default_backend() == "cpu"


def conv_same(x, kernel):
    """Convolve one example with zero padding and stride 1.

    Shapes:
        x [H, W, C], kernel [kh, kw, C, O] with odd kh and kw -> [H, W, O].
    """
    kh, kw = kernel.shape[:2]
    around = ((kh // 2, kh // 2), (kw // 2, kw // 2))
    if multiplies_patches():
        return _multiply_patches(x, kernel, around)
    return lax.conv_general_dilated(x[None], kernel, (1, 1), around, dimension_numbers=NAMES)[0]


def _multiply_patches(x, kernel, around):
    """Convolve one example by one product of patches and the kernel."""
    kh, kw, c, out = kernel.shape
    h, w = x.shape[:2]
    padded = jnp.pad(x, (*around, (0, 0)))
    patches = [
        lax.slice(padded, (i, j, 0), (i + h, j + w, c)) for i in range(kh) for j in range(kw)
    ]
    flat = jnp.concatenate(patches, -1).reshape(h * w, kh * kw * c)
    return (flat @ kernel.reshape(kh * kw * c, out)).reshape(h, w, out)


def is_kept_apart(groups: int, channels: int, out: int, examples: float) -> bool:
    """Return whether `apart` can compute a convolution; otherwise patches must be multiplied.

    Args:
        groups: the number of groups of the convolution, before vmap over clients.
        channels: the number of input channels per group.
        out: the number of output channels per group.
        examples: the number of examples over which the gradient of the kernel is summed.
    """
    return examples > 1 and (groups == 1 or min(channels, out) > 1)


def apart(x, kernel, params):
    """Compute a convolution by XLA such that, under vmap, no client affects the results of others.

    Under vmap over kernels, XLA computes a grouped convolution.  If a group sums over a single
    channel, a TPU's compiler builds one dense convolution with zeros between the groups.  Since
    0 * nan is nan, a client with non-finite values would then affect the others.  Therefore a
    channel of zeros is added to a single input channel.  One is also added to a single output
    channel, because the gradient with respect to x sums over output channels.

    Args:
        x: the input.
        kernel: the kernel.
        params: the parameters of lax.conv_general_dilated; `is_kept_apart` must be true for them.
    """
    (_, into, *_), (made, taken, *_), (_, axis, *_) = params["dimension_numbers"]
    out = kernel.shape[made]
    if kernel.shape[taken] == 1:
        x, kernel = _append_zeros(x, into), _append_zeros(kernel, taken)
    if out == 1:
        kernel = _append_zeros(kernel, made)
    return lax.slice_in_dim(lax.conv_general_dilated(x, kernel, **params), 0, out, axis=axis)


def _append_zeros(x, axis):
    """Append a channel of zeros along `axis`."""
    return jnp.pad(x, [(0, int(at == axis)) for at in range(x.ndim)])


def relu_pool(x, bias):
    """Return max_pool2(relu(x + bias)) of x [H, W, C] and bias [C].

    Adding a bias and applying ReLU do not change which number of a window is the largest.  Where
    that is faster, both are therefore applied after pooling, to a quarter of the numbers.
    """
    bias = bias[None, None]
    if multiplies_patches():
        return max_pool2(jax.nn.relu(x + bias))
    return jax.nn.relu(max_pool2(x) + bias)


def max_pool2(x):
    """Return the maximum over 2 x 2 windows, x [H, W, C] -> [H // 2, W // 2, C].

    An odd last row or column is dropped.  If several numbers of a window are equally large, a TPU
    passes the gradient to the first of them, and other backends split it equally.  A TPU uses
    `reduce_window`, which is cheaper there than copies to another shape.
    """
    if jax.default_backend() == "tpu":
        return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2, 1), (2, 2, 1), "VALID")
    h, w, c = x.shape[0] // 2, x.shape[1] // 2, x.shape[2]
    return x[: 2 * h, : 2 * w].reshape(h, 2, w, 2, c).max((1, 3))
