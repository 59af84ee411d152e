"""Compile private updates of the largest leaf of workload W2 for a GPU.  It is a process of its
own, because XLA writes PTX, the code of its kernels, only if it is asked to before it is loaded.

    XLA_FLAGS=--xla_dump_to=FOLDER python tests/accelerator/noise_in_ptx.py TARGET

The folder then holds the PTX.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[2]))  # a script of its own

from jfl.kernels.normals import normals

from experiments.bench import aot

SHAPE = (20, 784, 200)  # the clients of a cohort, and the weights of the first layer


def update(keys, weights, gradients):
    """A step of every client, as training takes it."""

    def one(key, w, g):
        return w - 0.1 * (g + 0.5 * normals(key, w))

    return jax.vmap(one)(keys, weights, gradients)


def main(target):
    jax.config.update("jax_platforms", "cpu")
    whole = NamedSharding(aot.device_mesh(target), PartitionSpec())
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), SHAPE[0]))
    keys = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=whole)
    weights = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=whole)
    with aot.as_on(target):
        jax.jit(update, donate_argnums=1).lower(keys, weights, weights).compile()


if __name__ == "__main__":
    main(sys.argv[1])
