"""Hashes of 128 bits, UInt32[4], that distinguish plans and data.

Numbers have the same hash on the host (NumPy) and inside a program (jax.numpy).  The hashes are not
cryptographic: somebody who looks for collisions can find them.
"""

import hashlib
import weakref
from collections.abc import Iterable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .pytrees import Words

NUM_WORDS = 4
SALTS = (0x2545F491, 0x1B873593, 0xC2B2AE3D, 0x27D4EB2F)
# Numbers that NumPy hashes at a time, so that they stay in the processor's cache.
HASH_BLOCK_SIZE = 2**16
# Arrays with at most this many numbers are hashed together in one call.
MAX_JOINT_SIZE = 2**10


def scramble(x: Words) -> Words:
    """Mix the bits of each uint32 by a bijection, the finaliser of MurmurHash3."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def combine(first: Words, second: Words) -> Words:
    """Combine two hashes into one, which depends on their order.

    Args:
        first, second: UInt32[4] of NumPy or of JAX.

    Returns:
        UInt32[4]; every word depends on all words of both hashes.
    """
    word = scramble(first * np.uint32(0x01000193) + second + np.uint32(0x9E3779B9))
    return scramble(word ^ (word.sum(-1, dtype=np.uint32, keepdims=True) * np.uint32(0x85EBCA77)))


def hash_text(text: str) -> np.ndarray:
    """Return UInt32[4], the hash of a string."""
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[: 4 * NUM_WORDS], np.uint32)


def hash_int(value: Any) -> Words:
    """Return UInt32[4], the hash of an integer, such as the number of a round."""
    xp = jnp if isinstance(value, jax.Array) else np
    return xp.broadcast_to(xp.asarray(value).astype(np.uint32), (NUM_WORDS,)) ^ np.array(
        SALTS, np.uint32
    )


# --- numbers


def raw(x: Any) -> Any:
    """Return the bits of an array, or of typed keys, as UInt32[n]; -0 becomes 0."""
    xp = jnp if isinstance(x, jax.Array) else np
    x = x if xp is jnp else np.asarray(x)
    if xp is jnp and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x).reshape(-1).astype(jnp.uint32)
    if str(x.dtype) in ("int4", "uint4", "int2", "uint2"):
        x = x.astype(np.int8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = xp.stack([x.real, x.imag], -1)
    if x.dtype == bool:
        return x.astype(np.uint32).reshape(-1)
    kind = {1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, np.uint32)
    floats, parts = jnp.issubdtype(x.dtype, jnp.floating), max(1, x.dtype.itemsize // 4)
    bits = (
        jax.lax.bitcast_convert_type(x, kind).reshape(-1)
        if xp is jnp
        else np.ascontiguousarray(x).reshape(-1).view(kind)
    )
    if floats:  # compare bits, since a program may flush tiny numbers to 0
        words = bits.reshape(-1, parts)
        sign = words[:, -1:] << np.array(1, kind)
        zero = (sign == 0) & (words[:, :-1] == 0).all(-1, keepdims=True)
        bits = xp.where(zero, np.zeros((), kind), words).reshape(-1)
    return bits.astype(np.uint32)


def _sums(words: Words, places: Words) -> Words:
    """Return UInt32[4], the sum of hashes of numbers and their places, which has no order.

    Args:
        words: UInt32[n], the bits of numbers.
        places: UInt32[n], the position of each of them in a list of arrays.
    """
    xp, place = jnp if isinstance(words, jax.Array) else np, scramble(places)
    return xp.stack(
        [scramble(scramble(words + np.uint32(s)) ^ place).sum(dtype=np.uint32) for s in SALTS]
    )


def hash_arrays(arrays: Iterable[Any]) -> Words:
    """Return UInt32[4], the hash of the numbers in a list of arrays.

    Concrete arrays are hashed on the host, and traced ones in the program.  The hash does not
    depend on shapes and dtypes; a caller that needs them also hashes a description.
    """
    total, first, small = np.zeros(NUM_WORDS, np.uint32), 0, {True: [], False: []}
    for x in arrays:
        traced = isinstance(x, jax.core.Tracer)
        words = raw(x) if traced else raw(on_host(x))
        start, first = np.uint32(first % 2**32), first + words.size
        if words.size <= MAX_JOINT_SIZE and (not traced or jax.typeof(x).sharding.mesh.empty):
            small[traced].append((words, np.arange(words.size, dtype=np.uint32) + start))
        elif traced:
            total = total + _sums(words, jax.lax.iota(jnp.uint32, words.size) + start)
        else:
            for begin in range(0, words.size, HASH_BLOCK_SIZE):
                part = words[begin : begin + HASH_BLOCK_SIZE]
                total = total + _sums(
                    part, np.arange(begin, begin + part.size, dtype=np.uint32) + start
                )
    for traced, parts in small.items():  # in one call, since a plan has dozens of single numbers
        if parts:
            words, places = zip(*parts)
            total = total + _sums(
                (jnp if traced else np).concatenate(words), np.concatenate(places)
            )
    return total


def on_host(x: Any) -> np.ndarray:
    """Convert a JAX array to a NumPy array, and typed keys to their words."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():
            return np.asarray(jax.random.key_data(x))
    return np.asarray(x)


# --- data

# id of an array -> [a weak reference to it, the sha256 of its bytes or None]
_immutable: dict[int, list[Any]] = {}


def mark_immutable(x: jax.Array) -> jax.Array:
    """Declare that nothing can change the memory of a JAX array, so that its digest can be cached.

    Do not pass an array that may share memory with NumPy (from device_put or dlpack): NumPy could
    change it.

    Returns:
        x, unchanged.
    """
    reference = weakref.ref(x)
    _immutable[id(x)] = [reference, None]
    weakref.finalize(
        x,
        lambda name: (
            _immutable.pop(name) if _immutable.get(name, (None,))[0] is reference else None
        ),
        id(x),
    )
    return x


def is_immutable(x: object) -> bool:
    """Return whether `mark_immutable` was called with this array."""
    known = _immutable.get(id(x))
    return known is not None and known[0]() is x


def digest(x: jax.Array | np.ndarray) -> bytes:
    """Return the sha256 of the bytes of an array; it is cached if the array is immutable."""
    known: list[Any] = _immutable[id(x)] if is_immutable(x) else [None, None]
    if known[1] is None:
        known[1] = hashlib.sha256(_bytes(x)).digest()
    return known[1]


def _bytes(x: Any) -> memoryview:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


class RowHasher:
    """An incremental hash of rows and of the clients that own them.

    Data are added in blocks.  The result equals that of `hash_rows` for the same data.
    """

    def __init__(self) -> None:
        self.x, self.y, self.owners = (hashlib.sha256() for _ in range(3))
        self.kind = ""

    def add_rows(self, x: np.ndarray, y: np.ndarray) -> None:
        """Add the next rows and labels."""
        self.x.update(_bytes(x))
        self.y.update(_bytes(y))
        self.kind = _kind(x, y)

    def add_owned_rows(self, rows: ArrayLike) -> None:
        """Add the row numbers of the next clients, without padding."""
        self.owners.update(_bytes(np.asarray(rows, np.int32)))

    def words(self, sizes: ArrayLike) -> np.ndarray:
        """Return UInt32[4], the hash of all data that were added.

        Args:
            sizes: Int[C], the number of rows of each client.
        """
        return _combine_digests(
            (self.x.digest(), self.y.digest(), self.owners.digest()), sizes, self.kind
        )


def hash_rows(x: Any, y: Any, index: Any, size: Any) -> Words:
    """Return UInt32[4], the hash of the rows of a federation and of the clients that own them.

    The hash ignores the padding of `index`.  Traced arrays are hashed in the program, and get a
    different hash from the same values on the host.

    Args:
        x: [n, ...].
        y: [n].
        index: Int[C, N], the rows of each client.
        size: Int[C], the number of rows of each client.
    """
    if any(isinstance(v, jax.core.Tracer) for v in (x, y, index, size)):
        x, y, index, size = map(jnp.asarray, (x, y, index, size))
        slot = jax.lax.broadcasted_iota(np.int32, index.shape, index.ndim - 1)
        return hash_arrays([x, y, jnp.where(slot < size[..., None], index, 0), size])
    owned, sizes = np.asarray(index), np.asarray(size)
    if owned.shape[:-1] == sizes.shape:  # other shapes are rejected later
        owned = owned[np.arange(owned.shape[-1]) < sizes[..., None]]
    owners = hashlib.sha256(_bytes(owned.astype(np.int32))).digest()
    return _combine_digests((digest(x), digest(y), owners), sizes, _kind(x, y))


def _kind(x: jax.Array | np.ndarray, y: jax.Array | np.ndarray) -> str:
    """Return the dtypes of rows and labels, and the shapes of one row and one label."""
    return f"{x.dtype}{tuple(x.shape[1:])} {y.dtype}{tuple(y.shape[1:])}"


def _combine_digests(digests: Iterable[bytes], sizes: ArrayLike, kind: str) -> np.ndarray:
    """Return UInt32[4], the hash of the digests of rows, labels and owners, and of sizes."""
    parts = [*digests, _bytes(np.asarray(sizes, np.int32)), kind.encode()]
    return np.frombuffer(hashlib.sha256(b"".join(parts)).digest()[: 4 * NUM_WORDS], np.uint32)
