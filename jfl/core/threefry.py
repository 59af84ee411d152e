"""The keys of a run inside its program: Threefry-2x32 as jax has it, bit for bit, in few kernels.

jax's own lowering for CPUs is a loop of five turns with several small kernels for each
`fold_in`, `split` or draw, and a round has a dozen of them: they were two thirds of what XLA
compiled for a small model.  Here each is one kernel.  `compact` gives a key of this type, whose
draws and children are those of the key that it was given.

References:
    Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section
    3.2.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax

from .aliases import Array, Key

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
JAX_NAME = "threefry2x32"
LENGTHS = (16, 128, 1024)  # blocks of a row; a longer one is as long as it is

Block: TypeAlias = Callable[[Array, Array], Array]  # data of keys, numbers -> words


def block(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Two words of `counter` under `key`: Threefry-2x32 with 20 rounds.

    Shapes:
        key: two, counter: two UInt32[...] that broadcast -> two UInt32[...].

    Example:
        >>> zero = np.zeros(1, np.uint32)
        >>> [f"{int(word[0]):08x}" for word in block((zero, zero), (zero, zero))]
        ['6b200159', '99ba4efe']
    """
    keys = (*key, key[0] ^ key[1] ^ np.uint32(PARITY))
    first, second = counter[0] + keys[0], counter[1] + keys[1]
    for i in range(5):
        for turn in ROTATIONS[i % 2]:
            first = first + second
            second = (second << np.uint32(turn)) | (second >> np.uint32(32 - turn))
            second = first ^ second
        first = first + keys[(i + 1) % 3]
        second = second + keys[(i + 2) % 3] + np.uint32(i + 1)
    return first, second


def _stacked(data: Array, number: Array) -> Array:
    """UInt32[..., 2]: both words of each block."""
    return jnp.stack(block(_words(data), (jnp.zeros_like(number), number)), -1)


def _packed(data: Array, number: Array) -> Array:
    """As `_stacked`, by way of 64 bits: XLA for CPU has no kernel with two results, and would
    compute every block twice."""
    low, high = block(_words(data), (jnp.zeros_like(number), number))
    with jax.enable_x64(True):  # here alone: 64 bits go no further
        low, high = (lax.convert_element_type(word, np.uint64) for word in (low, high))
        both = low | lax.shift_left(high, lax.full_like(high, 32))
        return lax.bitcast_convert_type(both, np.uint32)


def _mixed(data: Array, number: Array) -> Array:
    """UInt32[...]: one word of each block."""
    low, high = block(_words(data), (jnp.zeros_like(number), number))
    return low ^ high


def _words(data: Array) -> tuple[Array, Array]:
    return data[..., 0], data[..., 1]


def _kernel(on_cpu: Block, elsewhere: Block) -> Block:
    """A function of keys UInt32[..., 2] and counters UInt32[...] of as many axes, any of length 1.

    On a CPU it lies in a branch that is always taken, which the compiler cannot know: so no reader
    computes it anew.  Blocks lie in a row of one of few lengths there, so that nearly all places of
    a program share what is traced, lowered and compiled.
    """

    @jax.jit
    def row(data: Array, number: Array) -> Array:
        always = lax.optimization_barrier(jnp.bool_(True))
        # what follows from both arguments: under shard_map both branches must vary alike
        never = lambda data, number: (
            data[:, 0] + number if on_cpu is _mixed else data + number[:, None]
        )
        return lax.cond(always, on_cpu, never, data, number)

    @jax.jit
    def whole(data: Array, number: Array) -> Array:
        shape = jnp.broadcast_shapes(data.shape[:-1], number.shape)
        data = jnp.broadcast_to(data, (*shape, 2))
        number = jnp.broadcast_to(number, shape)
        if jax.default_backend() != "cpu":
            return elsewhere(data, number)
        count: Any = math.prod(shape)
        known = isinstance(count, int)  # else a dimension that an exported program leaves open
        length = next((n for n in LENGTHS if n >= count), count) if known else count
        data, number = _padded(data.reshape(count, 2), length), _padded(number.ravel(), length)
        words = row(data, number)
        return words[:count].reshape(*shape, *words.shape[1:])

    @jax.custom_batching.custom_vmap
    def kernel(data: Array, number: Array) -> Array:
        return whole(data, number)

    @kernel.def_vmap
    def _(size: int, batched: list[bool], data: Array, number: Array) -> tuple[Array, bool]:
        data, number = (
            x if there else x[None] for x, there in zip((data, number), batched, strict=True)
        )
        return kernel(data, number), True

    return kernel


def _padded(x: Array, length: int) -> Array:
    if length == x.shape[0]:
        return x
    return jnp.pad(x, [(0, length - len(x))] + [(0, 0)] * (x.ndim - 1))


_pairs, _singles = _kernel(_packed, _stacked), _kernel(_mixed, _mixed)


def _fold_in(data: Array, number: Any) -> Array:
    return _pairs(data, lax.convert_element_type(number, np.uint32))


def _split(data: Array, shape: tuple[int, ...]) -> Array:
    count = math.prod(shape)
    return _pairs(data[None], lax.iota(np.uint32, count)).reshape(*shape, 2)


def _random_bits(data: Array, width: int, shape: tuple[int, ...]) -> Array:
    count = math.prod(shape)
    if width == 64 or count >= 2**32:
        key = jax.random.wrap_key_data(data, impl=JAX_NAME)
        return jax.random.bits(key, shape, np.dtype(f"uint{width}"))
    words = _singles(data[None], lax.iota(np.uint32, count))
    return lax.convert_element_type(words, np.dtype(f"uint{width}")).reshape(shape)


def _seed(seed: Array) -> Array:
    return jax.random.key_data(jax.random.key(seed, impl=JAX_NAME))


COMPACT = jax.extend.random.define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="jfl-threefry2x32",
    tag="fry",
)


CONFIG: Any = jax.config  # whose type does not name its options


def as_kernel_key(key: Key) -> Key:
    """The same key for use inside a program; a key of another type than threefry as it is."""
    if str(jax.random.key_impl(key)) != JAX_NAME or not CONFIG.jax_threefry_partitionable:
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=COMPACT)
