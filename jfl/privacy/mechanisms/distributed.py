"""Noise that the clients of a cohort add together: each adds a share, so that their sum has enough.

It is for secure aggregation, where nobody sees more than the sum of a cohort's uploads.  With
integers, a client clips, rotates, scales and rounds its upload, adds integer noise and keeps the
result modulo 2^bits, as a deployed aggregation sums them; the release undoes scale and rotation of
the sum.  The rotation spreads an upload evenly over coordinates, so that few bits hold them.
Privacy does not need it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import scipy.special

from ...core import checks
from ...core.pytrees import Array, Tree
from ...core.random_streams import as_kernel_key
from ...core.records import Fn, Key, Mechanism, Task, named
from . import stages
from .chain import chain
from .linear_maps import rotated

LAWS = ("gaussian", "discrete_gaussian", "skellam")
# The most bits of a coordinate if the user does not give them.
MAX_BITS = 16
# How many standard deviations of a coordinate of the sum fit into the bits.
NUM_DEVIATIONS = 4.0
# Float32 is exact for integers up to here.
MAX_EXACT_INTEGER = 2**24

# A rounding is too long with at most this probability, and is then drawn again.
RETRY_PROBABILITY = math.exp(-0.5)
NUM_ROUNDING_TRIES = 2
# The relative rounding error of a norm in float32.
NORM_ERROR = 1e-5

# The table of a client's noise covers 12 standard deviations, or as many as float64 has
# probabilities for.
MAX_TABLE_LENGTH = 2**15
TABLE_DEVIATIONS = 12
MAX_NOISE_STD = MAX_TABLE_LENGTH // TABLE_DEVIATIONS - 2
# A search in it begins in a bucket of words of 63 bits: one of the parts of an octave.
OCTAVES, PARTS = 63, 16


class Distributed(NamedTuple):
    """The two chains of `distributed`, for `jfl.plan(upload=..., release=...)`."""

    upload: Mechanism
    release: Mechanism


class Encoding(NamedTuple):
    """How uploads become integers with noise: all that determines the epsilon."""

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
        """How far one client moves the sum, before it is scaled."""
        return self.clip_norm * (2 if self.adjacency == "replace_one" else 1)

    @property
    def share(self) -> float:
        """The standard deviation of one client's noise, before it is scaled."""
        return self.noise_multiplier * self.sensitivity / math.sqrt(self.cohort)

    @property
    def scale(self) -> float:
        """The factor of uploads, for which a sum's coordinate of `deviations` standard deviations
        fits into the bits."""
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
        chance = math.sqrt(2 * math.log(1 / RETRY_PROBABILITY)) * (length + root / 2)
        return min(length + root, math.sqrt(length**2 + self.dimensions / 4 + chance))

    def bounds(self, clients: int, moves: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Return bounds on the Renyi divergence of the noisy sum of `clients` clients, which share
        the noise.

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
        l2 = moves * twice * self.longest * (1 + NORM_ERROR)
        l1 = l2 * min(math.sqrt(d), l2)  # of whole numbers the squares are at least as large
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

    def encode(self, key: Key, value: Any) -> Any:
        """Return one client's integers with noise, modulo 2^bits around 0, as floats.

        They have the shape of `value`.
        """
        flat, unflatten = _flattened(value)
        if flat.size != self.dimensions:
            checks.fail(
                "distributed",
                f"uploads of {self.dimensions} numbers, as in like=...",
                f"{flat.size}",
                "Give what a client uploads as like=...",
            )
        clipped, _ = stages.scale_to_bound(self.clip_norm, flat)  # whatever the chain's clip was
        scaled = rotated(clipped, _signs_key()) * self.scale
        rounding, noise = jax.random.split(key)
        whole = _rounded(scaled, self.longest, rounding)
        return unflatten(_wrapped(whole + _noise(self, noise), self.bits))


def distributed(
    noise_multiplier: float,
    clip_norm: float,
    cohort: int,
    *,
    law: str = "gaussian",
    like: Task | Any = None,
    bits: int | None = None,
    adjacency: str = "zero_out",
) -> Distributed:
    """Return the mechanisms of noise of which each client of a cohort adds a share.

    Under secure aggregation nobody sees an upload, which has only a share of the noise.

    Args:
        noise_multiplier: the noise of the sum of a cohort over the sensitivity, > 0.
        clip_norm: the clip norm of an upload, > 0, in its units.
        cohort: the number of clients of every round; each adds 1 / cohort of the variance.
        law: "gaussian", on real numbers; "discrete_gaussian" or "skellam", on integers modulo
            2^bits, as a deployed aggregation sums them.
        like: for integers, a Task, or what is uploaded (arrays or their shapes).
        bits: for integers, the bits of a coordinate; cohort * 2^bits <= 2^25.  None: as many as
            this noise and cohort allow, at most 16.
        adjacency: "zero_out" or "replace_one".

    Returns:
        Chains `upload` and `release`, the latter the mean over the cohort.

    Privacy:
        view "aggregate" of a client, in a plan with secure_aggregation=True: conditional on that
        aggregation, on no client dropping out, and on clients that keep their noise secret.
        Rounding lengthens uploads, which the bound counts: the noise multiplier of the integers is
        a little below the one asked for.

    Raises:
        ValueError: outside those ranges; for noise that is too wide or too many clients for the
            bits.

    References:
        Kairouz, Liu, Steinke, "The distributed discrete Gaussian mechanism", ICML 2021; Agarwal,
        Kairouz, Liu, "The Skellam mechanism", NeurIPS 2021.

    Example:
        >>> import jfl
        >>> pair = jfl.distributed(1.0, 0.5, 20, law="skellam", like=np.zeros(100), bits=12)
        >>> [stage.name for stage in pair.upload.stages]
        ['clip_l2', 'total', 'skellam']
    """
    where = "distributed"
    checks.require_positive(where, noise_multiplier=noise_multiplier, clip_norm=clip_norm)
    checks.require_integer(where, cohort=cohort)
    if bits is not None:
        checks.require_integer(where, bits=bits)
    checks.require_one_of(where, LAWS, law=law)
    checks.require_one_of(where, ("zero_out", "replace_one"), adjacency=adjacency)
    start = stages.clip_l2(clip_norm), stages.total()
    if law == "gaussian":
        share = stages.gaussian(noise_multiplier / math.sqrt(cohort))
        upload = chain(*start, share, adjacency=adjacency)
        return Distributed(upload, chain(stages.total(), stages.divide(cohort)))
    if like is None:
        checks.fail(
            where,
            f"like=task, or what a client uploads, with law={law!r}",
            "like=None",
            "The effect of rounding depends on the size of an upload.",
        )
    size = stages.numbers_of(where, like)
    numbers = float(noise_multiplier), float(clip_norm), int(cohort), size
    encoding = Encoding(law, *numbers, MAX_BITS, NUM_DEVIATIONS, adjacency)
    encoding = encoding._replace(bits=_bits_that_fit(encoding, bits))
    noise = stages.Stage(
        None,
        noise=checks.as_scalar(noise_multiplier),
        encoding=encoding,
        name=law,
        role="noise",
        law=law,
    )
    undo = stages.Stage(Fn(decode, static=dict(encoding=encoding)), name="modular_sum", role="post")
    return Distributed(
        chain(*start, noise, adjacency=adjacency),
        chain(stages.total(), undo, stages.divide(cohort)),
    )


def _bits_that_fit(encoding: Encoding, bits: int | None) -> int:
    """Return `bits`, or the most bits that fit if None.

    Raises:
        ValueError: if a sum of the cohort or the noise of a client does not fit, with the bits
            that would.
    """
    cohort = encoding.cohort

    def fits(bits: int) -> bool:
        if cohort * 2**bits > 2 * MAX_EXACT_INTEGER:
            return False
        tried = encoding._replace(bits=bits)
        return has_table(tried.scale * tried.share)

    if bits is not None and fits(int(bits)):
        return int(bits)
    # below this many bits a sum has no room for its deviations
    fewest = math.floor(math.log2(cohort * encoding.deviations**2) / 2) + 1
    most = next((b for b in range(MAX_BITS, max(fewest, 1) - 1, -1) if fits(b)), 0)
    if bits is None and most:
        return most
    noise = f"noise_multiplier={encoding.noise_multiplier:g}"
    return checks.fail(
        "distributed",
        "cohort * 2^bits <= 2^25, whose sums float32 holds exactly, and noise of at most "
        f"{MAX_NOISE_STD} whole numbers a client",
        f"cohort={cohort} and {noise if bits is None else f'bits={bits}'}",
        f"Use fewer bits: at most bits={most}, or bits=None, which chooses them."
        if most
        else "Use a smaller cohort.",
    )


def encoding_of(mechanism: Mechanism | None) -> Encoding | None:
    """Return how the uploads of a mechanism become integers; None if they do not."""
    found = (s.encoding for s in (mechanism.stages if mechanism else ()) if s.encoding is not None)
    return next(found, None)


def check_plan(
    where: str,
    upload: Mechanism | None,
    release: Mechanism,
    private: Sequence[Mechanism | None],
    weights: Any,
) -> None:
    """Reject integers elsewhere than in uploads, without the release that decodes them, or with
    unequal weights.

    Args:
        where: who asks, for the message.
        upload: the chain of uploads.
        release: the chain of releases.
        private: the chains of private gradients.
        weights: the weights of clients.
    """
    for site, mechanisms in (("release", [release]), ("private_grad", private)):
        for found in filter(None, map(encoding_of, mechanisms)):
            checks.fail(where, f"{found.law} noise in upload only", f"it in {site}")
    encoding = encoding_of(upload)
    decoding = [s.apply.static["encoding"] for s in release.stages if s.name == "modular_sum"]
    if encoding is None and not decoding:
        return
    names = [s.name for s in release.stages[:2]]
    if decoding != [encoding] or names != ["total", "modular_sum"]:
        checks.fail(
            where,
            "upload and release of one jfl.distributed(...)",
            f"upload={upload!r}, release={release!r}",
        )
    known = not isinstance(weights, Fn) and checks.is_concrete(weights)
    if not known or np.any(np.asarray(weights) != 1):
        expected = 'weights="uniform" with integers, whose sum is taken modulo 2^bits'
        checks.fail(where, expected, "other weights")


# --- integers


@named("distributed.decode")
def decode(value: Any, after: Any, *, encoding: Encoding) -> tuple[Any, ...]:
    """Undo scale and rotation of the sum of a cohort's integers; a stage after the sum."""
    flat, unflatten = _flattened(value)
    flat = rotated(_wrapped(flat, encoding.bits) / encoding.scale, _signs_key(), back=True)
    return unflatten(flat), after


def _flattened(value: Tree) -> tuple[Array, Callable[[Array], Tree]]:
    """Return the numbers of a tree as one float32 vector, and the function that undoes it."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), value)
    return jax.flatten_util.ravel_pytree(wide)


def _wrapped(whole: Array, bits: int) -> Array:
    """Return integers modulo 2^bits, in -2^(bits - 1) .. 2^(bits - 1) - 1; exact."""
    turn = 2.0**bits
    return whole - turn * jnp.floor((whole + turn / 2) / turn)


def _rounded(x: Array, longest: float, key: Key) -> Array:
    """Round each coordinate up or down, without bias: the last of a few draws that is not too long,
    otherwise towards 0."""
    low = jnp.floor(x)

    def again(number: Array, kept: Array) -> Array:
        up = jax.random.uniform(jax.random.fold_in(key, number), x.shape) < x - low
        whole = low + up
        fits = jnp.sum(jnp.square(whole)) <= longest**2
        return jnp.where(fits, whole, kept)

    return jax.lax.fori_loop(0, NUM_ROUNDING_TRIES, again, jnp.trunc(x))


def _noise(encoding: Encoding, key: Key) -> Array:
    """Return integers with the distribution of one client's noise, Float32[d], by inversion from
    words of 63 bits."""
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
    """Return the bucket in which a search begins, by the first bit that is set in two words and the
    four after it."""
    zeros = jax.lax.clz(high).astype(jnp.uint32)
    # a shift by all bits of a word is not defined
    above = (high << (zeros & 31)) | jnp.where(zeros > 0, (low >> 1) >> (31 - (zeros & 31)), 0)
    more = jax.lax.clz(low).astype(jnp.uint32)
    is_small = high == 0
    place = jnp.where(is_small, jnp.minimum(32 + more, OCTAVES - 1), zeros)
    bits = jnp.where(is_small, low << (more & 31), above)
    return (place * PARTS + ((bits >> 27) & (PARTS - 1))).astype(jnp.int32)


class NoiseTable(NamedTuple):
    """P(|noise| >= k) for k = 1, 2, ... in 2^-63 as two words, and where a search in it begins."""

    high: np.ndarray  # UInt32[n], the first 32 bits
    low: np.ndarray  # UInt32[n], the other 31; all are 0 beyond the end
    start: np.ndarray  # Int32[OCTAVES * PARTS], how many tails are above every word of a bucket
    reach: int  # a power of two, above how many more there may be


def _reach(std: float) -> int:
    return math.ceil(TABLE_DEVIATIONS * max(std, 1.0)) + 12


def has_table(std: float) -> bool:
    """Return whether one client's noise of this standard deviation has a table."""
    return _reach(std) < MAX_TABLE_LENGTH


@functools.lru_cache(64)
def table(law: str, std: float) -> NoiseTable:
    """Return the table of the noise of one client.

    Raises:
        ValueError: for noise that needs too long a table.
    """
    reach = _reach(std)
    if not has_table(std):
        checks.fail(
            "distributed",
            f"noise of at most {MAX_NOISE_STD} whole numbers a client",
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

    place, part = np.divmod(np.arange(OCTAVES * PARTS), PARTS)
    least = np.ceil(np.ldexp(PARTS + part + 0.0, 58 - place)).astype(np.uint64)
    least[place == OCTAVES - 1] = 0  # and all words below
    end = np.ceil(np.ldexp(PARTS + part + 1.0, 58 - place)).astype(np.uint64)
    # the number of tails above the largest word of a bucket, and above its smallest
    ascending = words[::-1]
    fewest = len(words) - np.searchsorted(ascending, end - np.uint64(1), "right")
    most = len(words) - np.searchsorted(ascending, least, "right")
    room = 2 ** math.ceil(math.log2(np.max(most - fewest) + 1))

    words = np.append(words, np.zeros(room + 1, np.uint64))
    high, low = words >> np.uint64(31), words & np.uint64(2**31 - 1)
    return NoiseTable(high.astype(np.uint32), low.astype(np.uint32), fewest.astype(np.int32), room)


def _signs_key() -> Key:
    """Return the key of the rotation's signs, which is public and always the same."""
    return as_kernel_key(jax.random.key(0))
