"""Named random streams, and a random generator that compiles and runs fast on a CPU.

Every draw has a key that is derived from the seed, the stream, the round, the client and the step;
no key is carried from one draw to the next.  The order of slots, capacities, chunk sizes,
evaluations and resuming therefore cannot change a draw.  Noise keys also depend on the identity of
the plan: two points of a sweep with the same seed share cohorts and batches but never noise, which
subtracting their results would otherwise remove.

The generator computes the same bits as JAX's Threefry-2x32.  On a CPU, JAX compiles every
`fold_in`, `split` or draw to a loop of several small kernels, which took two thirds of the compile
time of a round of a small model.  With a key from `as_kernel_key`, each of them is one kernel.

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
# Numbers of words to which shorter draws are padded, so that few kernels are compiled.
PADDED_LENGTHS = (16, 128, 1024)

Block: TypeAlias = Callable[[Array, Array], Array]  # (data of keys, counters) -> words
CONFIG: Any = jax.config  # its type does not declare the options


class Stream(enum.IntEnum):
    """The streams of a run.  Add new ones at the end: recorded results depend on the numbers."""

    INIT = 0
    COHORT = 1
    BATCH = 2
    ROWS = 3  # noise of local steps
    UPLOAD = 4  # noise of a client's upload
    RELEASE = 5  # noise of the server's release
    ATTEMPT = 6  # cohorts and batches of rounds that are computed again


def stream_key(key: Key, name: Stream, round_: ArrayLike) -> Key:
    """Return the key of a stream in a round.

    Args:
        key: the key from which the stream is derived, such as that of the run.
        name: the stream.
        round_: Int[], the number of the round.
    """
    return jax.random.fold_in(jax.random.fold_in(key, name), round_)


def stream_keys(key: Key, names: Sequence[Stream], round_: ArrayLike) -> Key:
    """Return the keys of several streams in a round, [len(names)].

    They are derived in one call, because on a CPU the generator costs per call, not per key.

    Args:
        key, round_: as in `stream_key`.
        names: the streams.
    """
    return jax.vmap(lambda name: stream_key(key, name, round_))(jnp.array(names, jnp.int32))


def noise_seed_words(identity: Words, history: Words, attempt: Any) -> Words:
    """Return UInt32[4], which together with the key of a run determines all of its noise.

    Args:
        identity: UInt32[4], the identity of the plan that runs (see identity.py).
        history: UInt32[4], a hash of the plans that ran before.
        attempt: Int[], the number of times that rounds were computed again.
    """
    return hashing.combine(hashing.combine(history, identity), hashing.hash_int(attempt))


def derive_noise_key(key: Key, words: Words) -> Key:
    """Return the noise key of a run, given the key of the run and its `noise_seed_words`."""
    return jax.random.fold_in(jax.random.fold_in(as_kernel_key(key), words[0]), words[1])


def as_kernel_key(key: Key) -> Key:
    """Return a key that gives the same draws with faster kernels.

    Keys of generators other than JAX's partitionable Threefry are returned unchanged.
    """
    if str(jax.random.key_impl(key)) != JAX_NAME or not CONFIG.jax_threefry_partitionable:
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=COMPACT)


# --- Threefry


def block(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the two words that Threefry-2x32 with 20 rounds computes for a key and a counter.

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
        for shift in ROTATIONS[i % 2]:
            first = first + second
            second = (second << np.uint32(shift)) | (second >> np.uint32(32 - shift))
            second = first ^ second
        first = first + keys[(i + 1) % 3]
        second = second + keys[(i + 2) % 3] + np.uint32(i + 1)
    return first, second


def _stacked(data: Array, number: Array) -> Array:
    """Return UInt32[..., 2], both words of each block.

    Args:
        data: UInt32[..., 2], the data of keys.
        number: UInt32[...], the counters.
    """
    return jnp.stack(block(_words(data), (jnp.zeros_like(number), number)), -1)


def _packed(data: Array, number: Array) -> Array:
    """Return the same as `_stacked`, computed in words of 64 bits.

    A kernel of XLA for CPU has a single result, so `_stacked` would compute every block twice.
    """
    low, high = block(_words(data), (jnp.zeros_like(number), number))
    with jax.enable_x64(True):  # the result has 32 bits again
        low, high = (lax.convert_element_type(word, np.uint64) for word in (low, high))
        both = low | lax.shift_left(high, lax.full_like(high, 32))
        return lax.bitcast_convert_type(both, np.uint32)


def _mixed(data: Array, number: Array) -> Array:
    """Return UInt32[...], both words of each block combined by xor."""
    low, high = block(_words(data), (jnp.zeros_like(number), number))
    return low ^ high


def _words(data: Array) -> tuple[Array, Array]:
    return data[..., 0], data[..., 1]


def _kernel(on_cpu: Block, elsewhere: Block) -> Block:
    """Return a function of keys UInt32[..., 2] and counters UInt32[...] that computes their words.

    On a CPU the words are computed in a branch of a condition that is always true, which the
    compiler does not know.  Otherwise it would fuse the computation into each use of the words, and
    repeat it there.  Draws are padded to a few lengths, so that most draws of a program share one
    compiled kernel.

    Args:
        on_cpu: computes the words on a CPU.
        elsewhere: computes the same words on other devices.
    """

    @jax.jit
    def run_padded(data: Array, number: Array) -> Array:
        always = lax.optimization_barrier(jnp.bool_(True))
        # Under shard_map both branches must depend on both arguments.
        never = lambda data, number: (
            data[:, 0] + number if on_cpu is _mixed else data + number[:, None]
        )
        return lax.cond(always, on_cpu, never, data, number)

    @jax.jit
    def run(data: Array, number: Array) -> Array:
        shape = jnp.broadcast_shapes(data.shape[:-1], number.shape)
        data = jnp.broadcast_to(data, (*shape, 2))
        number = jnp.broadcast_to(number, shape)
        if jax.default_backend() != "cpu":
            return elsewhere(data, number)
        count: Any = math.prod(shape)
        # In an exported program, the number may be a symbolic dimension.
        is_known = isinstance(count, int)
        length = next((n for n in PADDED_LENGTHS if n >= count), count) if is_known else count
        words = run_padded(_pad(data.reshape(count, 2), length), _pad(number.ravel(), length))
        return words[:count].reshape(*shape, *words.shape[1:])

    @jax.custom_batching.custom_vmap
    def kernel(data: Array, number: Array) -> Array:
        return run(data, number)

    @kernel.def_vmap
    def _(size: int, batched: list[bool], data: Array, number: Array) -> tuple[Array, bool]:
        data, number = (
            x if is_batched else x[None]
            for x, is_batched in zip((data, number), batched, strict=True)
        )
        return kernel(data, number), True

    return kernel


def _pad(x: Array, length: int) -> Array:
    """Pad an array with zeros along its first axis."""
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
