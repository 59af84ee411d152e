"""Compile private updates for a GPU: of the largest leaf of workload W2, with a key for each client
of a cohort, or of one model.  It is a process of its own, because XLA writes PTX, the code of
its kernels, only if it is asked to before it is loaded.

    XLA_FLAGS=--xla_dump_to=FOLDER python tests/accelerator/noise_in_ptx.py TARGET cohort

The folder then holds the PTX, and the bytes of temporary memory are printed.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[2]))  # a script of its own

from jfl.kernels.normals import normals

from experiments.bench import aot

# The clients, and the shape of the weights.  A thread makes one normal of a smaller model.
SHAPES = dict(cohort=((20,), (784, 200)), model=((), (2048, 1024)))


def update(key, w, g):
    """A step of a client, as training takes it."""
    return w - 0.1 * (g + 0.5 * normals(key, w))


def main(target, of):
    jax.config.update("jax_platforms", "cpu")
    whole = NamedSharding(aot.device_mesh(target), PartitionSpec())
    clients, shape = SHAPES[of]
    key = jax.eval_shape(lambda: jax.random.key(0))
    keys = jax.ShapeDtypeStruct(clients, key.dtype, sharding=whole)
    leaf = jax.ShapeDtypeStruct((*clients, *shape), jnp.float32, sharding=whole)
    step = jax.vmap(update) if clients else update
    with aot.as_on(target):
        program = jax.jit(step, donate_argnums=1).lower(keys, leaf, leaf).compile()
    print(program.memory_analysis().temp_size_in_bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])
