"""Compile private updates for a GPU: of the largest leaf of workload W2, with a key for each client
of a cohort, or of one model; or of the layer of W1, with the clipped sum of its rows.  It is a
process of its own, because XLA writes PTX, the code of its kernels, only if it is asked to before
it is loaded.

    XLA_FLAGS=--xla_dump_to=FOLDER python tests/accelerator/noise_in_ptx.py TARGET cohort

The folder then holds the PTX, and the bytes of temporary memory are printed.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[2]))  # a script of its own

from jfl.kernels.ghost_sums import Product
from jfl.kernels.normals import normals

from experiments.bench import aot

# The clients, and the shape of the weights.  A thread makes one normal of a smaller model.
SHAPES = dict(cohort=((20,), (784, 200)), model=((), (2048, 1024)), layer=((10,), (784, 10)))
ROWS = 10


def update(key, w, g):
    """A step of a client, as training takes it."""
    return w - 0.1 * (g + 0.5 * normals(key, w))


def update_from_rows(key, w, inputs, backprops):
    """The same for a dense layer, from what enters it and the derivatives of its output."""
    rows = Product(inputs[:, None, None], backprops[:, None, None])
    return update(key, w, rows.total(jnp.full(ROWS, 0.5))[0])


def main(target, of):
    jax.config.update("jax_platforms", "cpu")
    whole = NamedSharding(aot.device_mesh(target), PartitionSpec())
    clients, shape = SHAPES[of]
    key = jax.eval_shape(lambda: jax.random.key(0))
    keys = jax.ShapeDtypeStruct(clients, key.dtype, sharding=whole)
    leaf = jax.ShapeDtypeStruct((*clients, *shape), jnp.float32, sharding=whole)
    step, gradient = update, [leaf]
    if of == "layer":
        factor = lambda size: jax.ShapeDtypeStruct((*clients, ROWS, size), "f4", sharding=whole)
        step, gradient = update_from_rows, [factor(size) for size in shape]
    step = jax.vmap(step) if clients else step
    with aot.as_on(target):
        program = jax.jit(step, donate_argnums=1).lower(keys, leaf, *gradient).compile()
    print(program.memory_analysis().temp_size_in_bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])
