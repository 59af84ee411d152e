"""Uploads as integers with few bits, which a secure aggregation sums modulo 2^bits.

A client clips its upload, rotates, scales and rounds it, adds integer noise and keeps what is left
modulo 2^bits; whoever has the sum undoes scale and rotation.

The rotation is a Hadamard transform with random signs, of blocks whose sizes are powers of two that
add up to the upload's size: nothing is padded.  It spreads an upload evenly over coordinates, so
that few bits hold them; privacy needs none of it.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from ...core import checks
from ...core.aliases import Array
from ...core.records import Key, named
from ...core.threefry import as_kernel_key
from . import hadamard, stages

AGAIN = math.exp(-0.5)  # the probability with which a rounding is too long, at most
TRIES = 2  # of a rounding
ROUNDING = 1e-5  # of a norm in float32
OCTAVES, PARTS = 63, 16  # of words of 63 bits, and of an octave: buckets in which a search begins
TABLE = 2**15  # entries of a table of noise
REACH = 12  # standard deviations in it, or as many as float64 has probabilities for
WIDEST = TABLE // REACH - 2  # standard deviation of one client's noise, in whole numbers
EXACT = 2**24  # whole numbers up to here are exact in float32


class Encoding(NamedTuple):
    """How uploads become integers with noise: all that the epsilon follows from."""

    law: str
    noise_multiplier: float
    clip_norm: float
    cohort: int
    dimensions: int
    bits: int
    deviations: float
    adjacency: str

    @property
    def sensitivity(self) -> float:
        """By how much one client moves the sum, before it is scaled."""
        return self.clip_norm * (2 if self.adjacency == "replace_one" else 1)

    @property
    def share(self) -> float:
        """The standard deviation of one client's noise, before it is scaled."""
        return self.noise_multiplier * self.sensitivity / math.sqrt(self.cohort)

    @property
    def scale(self) -> float:
        """What uploads are multiplied by: as much as lets a sum's coordinate of so many deviations
        fit into the bits."""
        k, n, d = self.deviations, self.cohort, self.dimensions
        room = 2.0 ** (2 * self.bits) - n * k**2
        if room <= 0:
            checks.fail(
                "distributed",
                f"2^(2 bits) > cohort * deviations^2 = {n * k**2:g}",
                f"bits={self.bits}",
                "Use more bits.",
            )
        spread = (self.clip_norm * n) ** 2 / d + n * self.share**2
        return math.sqrt(room) / (2 * k * math.sqrt(spread))

    @property
    def longest(self) -> float:
        """The Euclidean norm of a rounded upload, at most."""
        length, root = self.scale * self.clip_norm, math.sqrt(self.dimensions)
        chance = math.sqrt(2 * math.log(1 / AGAIN)) * (length + root / 2)
        return min(length + root, math.sqrt(length**2 + self.dimensions / 4 + chance))

    def bounds(self, clients: int, moves: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Renyi divergence of the noisy sum of `clients` clients, which share the noise.

        Args:
            clients: whose noise is in the sum.
            moves: sensitivities by which the sum differs.

        Returns:
            Slopes and constants: the divergence of order a is at most the least of slope * a +
            constant.

        References:
            Kairouz, Liu, Steinke, ICML 2021 (discrete Gaussian, sums of them); Agarwal, Kairouz,
            Liu, NeurIPS 2021 (Skellam).
        """
        twice = 2 if self.adjacency == "replace_one" else 1
        d, one = self.dimensions, self.scale * self.share
        l2 = moves * twice * self.longest * (1 + ROUNDING)
        l1 = l2 * min(math.sqrt(d), l2)  # of whole numbers the squares are no smaller
        std = one * math.sqrt(clients)
        if self.law == "skellam":
            plain = l2**2 / (2 * std**2)
            first = plain + l2**2 / (2 * std**4), (6 * l1 - l2**2) / (4 * std**4)
            found = np.array([first, (plain, 3 * l1 / (2 * std**2))]).T
            return found[0], found[1]
        each = np.arange(1, clients)
        apart = 10 * np.exp(-2 * (math.pi * one) ** 2 * each / (each + 1)).sum()
        ratio = l2 / std
        found = np.array(
            [
                (ratio**2 / 2, apart * d),
                (ratio**2 / 2 + l1 / std * apart + apart**2 * d / 2, 0.0),
                ((ratio + math.sqrt(d) * apart) ** 2 / 2, 0.0),
            ]
        ).T
        return found[0], found[1]


def encode(encoding: Encoding, key: Key, value: Any) -> Any:
    """One client's integers with noise, modulo 2^bits around 0, as floats in the shape of
    `value`."""
    leaves, treedef = jax.tree.flatten(value)
    flat = jnp.concatenate([jnp.ravel(x).astype(jnp.float32) for x in leaves])
    if flat.size != encoding.dimensions:
        checks.fail(
            "distributed",
            f"uploads of {encoding.dimensions} numbers, as in like=...",
            f"{flat.size}",
            "Give what a client uploads as like=...",
        )
    clipped, _ = stages.scale_to_bound(encoding.clip_norm, flat)  # whatever the chain's clip was
    scaled = hadamard.rotated(clipped, _signs()) * encoding.scale
    rounding, noise = jax.random.split(key)
    whole = _rounded(scaled, encoding.longest, rounding)
    noisy = _wrapped(whole + _noise(encoding, noise), encoding.bits)
    ends = np.cumsum([x.size for x in leaves])[:-1]
    return treedef.unflatten(
        [part.reshape(x.shape) for part, x in zip(jnp.split(noisy, ends), leaves)]
    )


@named("distributed.decode")
def decode(value: Any, after: Any, *, encoding: Encoding) -> tuple[Any, ...]:
    """The sum of a cohort's integers, undone; a stage after the sum."""
    leaves, treedef = jax.tree.flatten(value)
    flat = jnp.concatenate([jnp.ravel(x) for x in leaves])
    flat = hadamard.rotated(_wrapped(flat, encoding.bits) / encoding.scale, _signs(), back=True)
    ends = np.cumsum([x.size for x in leaves])[:-1]
    parts = [part.reshape(x.shape) for part, x in zip(jnp.split(flat, ends), leaves)]
    return treedef.unflatten(parts), after


def _wrapped(whole: Array, bits: int) -> Array:
    """Whole numbers modulo 2^bits, in -2^(bits - 1) .. 2^(bits - 1) - 1; exact."""
    turn = 2.0**bits
    return whole - turn * jnp.floor((whole + turn / 2) / turn)


def _rounded(x: Array, longest: float, key: Key) -> Array:
    """Each coordinate up or down, right on average: the last of a few draws that is not too long,
    else towards 0."""
    low = jnp.floor(x)

    def again(number: Array, kept: Array) -> Array:
        up = jax.random.uniform(jax.random.fold_in(key, number), x.shape) < x - low
        whole = low + up
        fits = jnp.sum(jnp.square(whole)) <= longest**2
        return jnp.where(fits, whole, kept)

    return jax.lax.fori_loop(0, TRIES, again, jnp.trunc(x))


def _noise(encoding: Encoding, key: Key) -> Array:
    """Float32[d], whole numbers with the law of one client's noise, by inversion from words of 63
    bits."""
    known = table(encoding.law, encoding.scale * encoding.share)
    words = jax.random.bits(key, (2, encoding.dimensions), jnp.uint32)
    sign = 1.0 - 2.0 * (words[1] & 1).astype(jnp.float32)
    first, second = words[0], words[1] >> 1
    high, low = jnp.asarray(known.high), jnp.asarray(known.low)
    size = jnp.asarray(known.start)[_bucket(first, words[1] & ~jnp.uint32(1))]
    step = known.reach
    while step > 1:  # how many tails are above the word
        step //= 2
        there = size + step - 1
        above = (high[there] > first) | ((high[there] == first) & (low[there] > second))
        size = jnp.where(above, size + step, size)
    return sign * size.astype(jnp.float32)


def _bucket(high: Array, low: Array) -> Array:
    """By the first bit that is set of two words and the four after it: where a search begins."""
    zeros = jax.lax.clz(high).astype(jnp.uint32)
    # a shift by all bits of a word is not defined
    above = (high << (zeros & 31)) | jnp.where(zeros > 0, (low >> 1) >> (31 - (zeros & 31)), 0)
    more = jax.lax.clz(low).astype(jnp.uint32)
    is_small = high == 0
    place = jnp.where(is_small, jnp.minimum(32 + more, OCTAVES - 1), zeros)
    bits = jnp.where(is_small, low << (more & 31), above)
    return (place * PARTS + ((bits >> 27) & (PARTS - 1))).astype(jnp.int32)


class Table(NamedTuple):
    """P(|noise| >= k) for k = 1, 2, ... in 2^-63 as two words, and where a search in it begins."""

    high: np.ndarray  # UInt32[n], the first 32 bits
    low: np.ndarray  # UInt32[n], the other 31; all are 0 beyond the end
    start: np.ndarray  # Int32[OCTAVES * PARTS], how many tails are above every word of a bucket
    reach: int  # a power of two, above how many more there may be


def _reach(std: float) -> int:
    return math.ceil(REACH * max(std, 1.0)) + 12


def fits(std: float) -> bool:
    """True if one client's noise of this standard deviation has a table."""
    return _reach(std) < TABLE


@functools.lru_cache(64)
def table(law: str, std: float) -> Table:
    """The noise of one client.

    Raises:
        ValueError: for noise that needs too long a table.
    """
    reach = _reach(std)
    if not fits(std):
        checks.fail(
            "distributed",
            f"noise of at most {WIDEST} whole numbers a client",
            f"{std:.3g}",
            "Use fewer bits: they are more than this noise needs.",
        )
    k = np.arange(reach + 1, dtype=np.float64)
    if law == "skellam":
        mass = scipy.special.ive(k, std**2)
    else:
        mass = np.exp(-np.square(k) / (2 * std**2))
    both = np.append(mass[0], 2 * mass[1:])
    tails = (np.cumsum(both[::-1])[::-1] / both.sum())[1:]
    words = np.floor(tails * 2.0**63).astype(np.uint64)
    place, part = np.divmod(np.arange(OCTAVES * PARTS, dtype=np.int64), PARTS)
    number = lambda p, n: (PARTS + n) << 63 - p  # 32 times the least word of a bucket
    ends = [
        [number(p, n) >> 5 for p, n in zip(place.tolist(), part.tolist())],
        [-(-number(p, n + 1) >> 5) for p, n in zip(place.tolist(), part.tolist())],
    ]
    ends = np.array(ends, dtype=np.uint64)
    last = place == OCTAVES - 1  # and all words below
    ends[0, last] = 0
    # tails above a word: those above the largest word of a bucket, and above its smallest
    ascending = words[::-1]
    fewest = len(words) - np.searchsorted(ascending, ends[1] - np.uint64(1), "right")
    most = len(words) - np.searchsorted(ascending, ends[0], "right")
    room = 2 ** math.ceil(math.log2(np.max(most - fewest) + 1))
    words = np.append(words, np.zeros(room + 1, np.uint64))
    return Table(
        (words >> np.uint64(31)).astype(np.uint32),
        (words & np.uint64(2**31 - 1)).astype(np.uint32),
        fewest.astype(np.int32),
        room,
    )


def _signs() -> Key:
    """The key of the rotation's signs, which is public and always the same."""
    return as_kernel_key(jax.random.key(0))
