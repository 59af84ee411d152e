"""The networks of the workloads in plain JAX, for drivers without models."""

import jax
import jax.numpy as jnp
import numpy as np


def init(key, spec):
    """Return [(weight, bias)] layer by layer: kernels [3, 3, in, out], dense weights [in, out]."""
    if spec.level == "record":
        sizes = (784, *spec.hidden, 10)
        shapes = list(zip(sizes, sizes[1:]))
    elif spec.image[0] == 28:
        shapes = [(3, 3, 1, 16), (3, 3, 16, 32), (1568, 128), (128, 10)]
    else:
        shapes = [(3, 3, 3, 32), (3, 3, 32, 64), (12544, 128), (128, 10)]
    return [
        (jax.random.normal(k, s) / np.prod(s[:-1]) ** 0.5, jnp.zeros(s[-1]))
        for k, s in zip(jax.random.split(key, len(shapes)), shapes)
    ]


def forward(spec, params, x):
    """Return scores [batch, 10] of rows x [batch, ...]."""
    if spec.level == "client":
        same = spec.image[0] == 28
        for i, (w, b) in enumerate(params[:2]):
            x = jax.lax.conv_general_dilated(
                x,
                w,
                (1, 1),
                "SAME" if same else "VALID",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = jax.nn.relu(x + b)
            if same or i:
                x = jax.lax.reduce_window(
                    x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
                )
        x, params = x.reshape(len(x), -1), params[2:]
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    return x @ params[-1][0] + params[-1][1]


def losses(scores, y):
    """Return the cross-entropy of each row."""
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], 1)[:, 0]
