"""Named random streams, and the generator that computes them quickly inside a program.

A draw is addressed by seed, round, stream, client and step; no key is passed from one draw to the
next.  Slot order, capacity, chunk size, evaluation and resuming therefore cannot change a draw.
Noise keys also depend on the identity of the plan: two points of a sweep with the same seed share
cohorts and batches but never noise, which subtracting their results would otherwise remove.

The generator is JAX's Threefry-2x32, bit for bit.  JAX's own lowering for CPUs is a loop of several
small kernels for each `fold_in`, `split` or draw, and took two thirds of the compile time of a
round of a small model.  A key of `as_kernel_key` needs one kernel for each, with the same results.

References:
    Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section
    3.2.
"""

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from . import hashing
from .pytrees import Array, Key, Words

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
JAX_NAME = "threefry2x32"
PADDED_LENGTHS = (16, 128, 1024)  # of a row of blocks; longer rows are not padded

Block: TypeAlias = Callable[[Array, Array], Array]  # (data of keys, numbers) -> words
CONFIG: Any = jax.config  # whose type does not name its options


class Stream(enum.IntEnum):
    """The streams of a run.  Add new ones at the end: recorded results depend on the numbers."""

    INIT = 0
    COHORT = 1
    BATCH = 2
    ROWS = 3  # noise of local steps
    UPLOAD = 4  # noise of a client's upload
    RELEASE = 5  # noise of the server's release
    ATTEMPT = 6  # cohorts and batches of a later attempt


def stream_key(key: Key, name: Stream, round_: ArrayLike) -> Key:
    """Return the key of a stream in a round."""
    return jax.random.fold_in(jax.random.fold_in(key, name), round_)


def stream_keys(key: Key, names: Sequence[Stream], round_: ArrayLike) -> Key:
    """Return one key of each stream, [len(names)].

    They are derived in one call: on a CPU the cost of a generator is per call, not per key.
    """
    return jax.vmap(lambda name: stream_key(key, name, round_))(jnp.array(names, jnp.int32))


def noise_seed_words(identity: Words, history: Words, attempt: Any) -> Words:
    """Return UInt32[4] that determine all noise of a run together with its key.

    Args:
        identity: UInt32[4] of the plan that runs (see identity.py).
        history: UInt32[4] of the plans before it.
        attempt: Int[]; each attempt has independent noise.
    """
    return hashing.combine(hashing.combine(history, identity), hashing.hash_int(attempt))


def derive_noise_key(key: Key, words: Words) -> Key:
    """Return the key of all noise of a run, from its own key and `noise_seed_words`."""
    return jax.random.fold_in(jax.random.fold_in(as_kernel_key(key), words[0]), words[1])


def as_kernel_key(key: Key) -> Key:
    """Return the same key with fast kernels; a key that is not threefry is returned unchanged."""
    if str(jax.random.key_impl(key)) != JAX_NAME or not CONFIG.jax_threefry_partitionable:
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=COMPACT)


# --- Threefry


def block(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the two words of `counter` under `key`: Threefry-2x32 with 20 rounds.

    Args:
        key: two UInt32[...].
        counter: two UInt32[...].

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
    """Return UInt32[..., 2], both words of each block."""
    return jnp.stack(block(_words(data), (jnp.zeros_like(number), number)), -1)


def _packed(data: Array, number: Array) -> Array:
    """Return the same as `_stacked`, computed through 64 bits.

    XLA for CPU has no kernel with two results, and would compute every block twice.
    """
    low, high = block(_words(data), (jnp.zeros_like(number), number))
    with jax.enable_x64(True):  # only here; the result has 32 bits again
        low, high = (lax.convert_element_type(word, np.uint64) for word in (low, high))
        both = low | lax.shift_left(high, lax.full_like(high, 32))
        return lax.bitcast_convert_type(both, np.uint32)


def _mixed(data: Array, number: Array) -> Array:
    """Return UInt32[...], one word of each block."""
    low, high = block(_words(data), (jnp.zeros_like(number), number))
    return low ^ high


def _words(data: Array) -> tuple[Array, Array]:
    return data[..., 0], data[..., 1]


def _kernel(on_cpu: Block, elsewhere: Block) -> Block:
    """Return a function of keys UInt32[..., 2] and counters UInt32[...], which broadcast.

    On a CPU it is computed in a branch that is always taken, which the compiler cannot know, so
    that it is not fused into each of its uses and computed again there.  Its blocks are padded to
    a few lengths, so that most draws of a program share one compiled kernel.
    """

    @jax.jit
    def row(data: Array, number: Array) -> Array:
        always = lax.optimization_barrier(jnp.bool_(True))
        # under shard_map both branches must depend on both arguments
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
        known = isinstance(count, int)  # else a symbolic dimension of an exported program
        length = next((n for n in PADDED_LENGTHS if n >= count), count) if known else count
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
