"""Distributed noise: each client adds a share of it, so that the sum of a cohort has enough.

This requires secure aggregation, where nobody sees more than the sum of a cohort's uploads.  With
integer noise, a client clips, rotates, scales and rounds its upload, adds integer noise and reduces
the result modulo 2^bits, as deployed secure aggregation requires; the release undoes the scale and
the rotation of the sum.  The rotation spreads an upload evenly over its coordinates, so that each
needs few bits.  Privacy does not depend on the rotation.
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
from .linear_maps import rotate

LAWS = ("gaussian", "discrete_gaussian", "skellam")
# The maximum number of bits of a coordinate if the user does not set it.
MAX_BITS = 16
# The number of standard deviations of a coordinate of the sum that the bits can hold.
NUM_DEVIATIONS = 4.0
# The largest integer up to which float32 is exact.
MAX_EXACT_INTEGER = 2**24

# The probability that a rounded upload is too long and is rounded again is at most this.
RETRY_PROBABILITY = math.exp(-0.5)
NUM_ROUNDING_TRIES = 2
# The relative rounding error of a norm in float32.
NORM_ERROR = 1e-5
# The bounds of a sum of discrete Gaussians are proved from this standard deviation of each.
MIN_SUMMED_STD = 0.5
# The probability that ideal noise, one number of one client, is beyond its table; and the number of
# changes of a coordinate for which the cost of this is computed.
MISSING = 2.0**-63
NUM_CHANGES = 512

# The table of a client's noise covers this number of standard deviations.
MAX_TABLE_LENGTH = 2**15
TABLE_DEVIATIONS = 12
MAX_NOISE_STD = MAX_TABLE_LENGTH // TABLE_DEVIATIONS - 2
# A search in the table begins in a bucket of 63-bit words: a part of an octave (a power of two).
OCTAVES, PARTS = 63, 16


class Distributed(NamedTuple):
    """The two chains of `distributed`, for `jfl.plan(upload=..., release=...)`."""

    upload: Mechanism
    release: Mechanism


class Encoding(NamedTuple):
    """The encoding of uploads as noisy integers.  Its fields determine the epsilon."""

    law: str  # "discrete_gaussian" or "skellam"
    noise_multiplier: float  # of the sum of a cohort
    clip_norm: float  # of an upload
    cohort: int  # number of clients
    dimensions: int  # number of coordinates of an upload
    bits: int  # per coordinate
    deviations: float  # number of standard deviations of the sum that the bits can hold
    adjacency: str  # "zero_out" or "replace_one"

    @property
    def sensitivity(self) -> float:
        """The maximum change of the sum by one client, before scaling."""
        return self.clip_norm * (2 if self.adjacency == "replace_one" else 1)

    @property
    def share(self) -> float:
        """The standard deviation of one client's noise, before scaling."""
        return self.noise_multiplier * self.sensitivity / math.sqrt(self.cohort)

    @property
    def scale(self) -> float:
        """The factor by which uploads are scaled before rounding.

        It is chosen so that `deviations` standard deviations of the sum fit into the bits.
        """
        k, n, d = self.deviations, self.cohort, self.dimensions
        remaining = 2.0 ** (2 * self.bits) - n * k**2
        if remaining <= 0:
            checks.fail(
                "distributed",
                f"2^(2 bits) > cohort * deviations^2 = {n * k**2:g}",
                f"bits={self.bits}",
                "Use more bits.",
            )
        variance = (self.clip_norm * n) ** 2 / d + n * self.share**2
        return math.sqrt(remaining) / (2 * k * math.sqrt(variance))

    @property
    def longest(self) -> float:
        """The maximum Euclidean norm of a rounded upload."""
        length, root = self.scale * self.clip_norm, math.sqrt(self.dimensions)
        deviation = math.sqrt(2 * math.log(1 / RETRY_PROBABILITY)) * (length + root / 2)
        return min(length + root, math.sqrt(length**2 + self.dimensions / 4 + deviation))

    def bounds(self, clients: int, moves: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Return bounds on the Renyi divergence of the noisy sum of several clients.

        Args:
            clients: the number of clients whose noise is in the sum.
            moves: the number of sensitivities by which the sum differs.

        Returns:
            Slopes Float[n] and constants Float[n]: the divergence of order a is at most
            slopes[i] * a + constants[i], for every i.

        References:
            Kairouz, Liu, Steinke, ICML 2021 (discrete Gaussian, sums of them); Agarwal, Kairouz,
            Liu, NeurIPS 2021 (Skellam).
        """
        l2 = self._largest_change(moves)
        # the square of an integer is at least its absolute value
        l1 = l2 * min(math.sqrt(self.dimensions), l2)
        return self._divergences(clients, l1, l2, self.dimensions)

    def lost_mass(self, clients: int, moves: float = 1.0) -> float:
        """Return the delta that a sum costs because the noise of a client has a largest value.

        Let q and p be the distributions of one coordinate of the sum on two neighbouring data sets,
        for ideal noise, and m a bound on the probability that some of this noise is beyond the
        largest value.  As in the module `truncation`, the cost is at most the mean, over outcomes
        of p, of the probability that the noise is beyond the largest value if the data set is that
        of q.  By Hoelder's inequality, this mean is at most (m e^D)^((a - 1) / a), for any order a
        and the Renyi divergence D of p from q.  If D <= s^2 a / 2 + c, the best order gives
        exp(-(R - s)^2 / 2), where R^2 = -2 (log m + c).

        Args:
            clients: the number of clients whose noise is in the sum.
            moves: the number of sensitivities by which the sum differs.
        """
        # The squares of the changes v of all coordinates, which are integers, add up to at most
        # l2^2.  Changes up to `first` cost at most l2^2 * cost(first) / first^2 together, and
        # larger ones at most l2^2 times the largest cost(v) / v^2.  A cost grows with v, so the
        # cost of a v of the grid holds since the one before it.
        l2 = max(self._largest_change(moves), 1.0)
        first = max(l2 / math.sqrt(self.dimensions), 1.0)
        v = np.geomspace(first, l2, NUM_CHANGES)
        slopes, constants = self._divergences(clients, v, v, 1)
        beyond = math.log(clients * MISSING)
        reach = np.sqrt(np.maximum(-2 * (beyond + constants), 0.0))
        left = np.maximum(reach - np.sqrt(2 * slopes), 0.0)
        cost = np.exp(-(left**2) / 2).min(axis=0)
        largest = np.max(cost / np.append(first, v[:-1]) ** 2)
        return float(min(2 * l2**2 * largest, 1.0))

    def missing(self, clients: int) -> float:
        """Return a bound on the probability that some ideal noise of a sum is beyond the largest
        value."""
        return clients * self.dimensions * MISSING

    def _largest_change(self, moves: float) -> float:
        """Return the largest Euclidean norm of a change of the sum by so many sensitivities."""
        twice = 2 if self.adjacency == "replace_one" else 1
        return moves * twice * self.longest * (1 + NORM_ERROR)

    def _divergences(self, clients: int, l1: Any, l2: Any, d: int) -> tuple[np.ndarray, np.ndarray]:
        """Return slopes and constants as `bounds`, for a change of d coordinates of these norms.

        If the norms are arrays [m], the results are Float[n, m].
        """
        one = self.scale * self.share
        std = one * math.sqrt(clients)
        plain = l2**2 / (2 * std**2)
        zero = np.zeros_like(plain)
        if self.law == "skellam":
            first = plain + l2**2 / (2 * std**4), (6 * l1 - l2**2) / (4 * std**4)
            rows = [first, (plain, 3 * l1 / (2 * std**2))]
        elif one < MIN_SUMMED_STD:
            # The bounds of sums do not hold.  One client's noise alone is concentrated at any size.
            rows = [(l2**2 / (2 * one**2), zero)]
        else:
            # tau of the paper: how far a sum of discrete Gaussians is from a discrete Gaussian
            k = np.arange(1, clients)
            tau = 10 * np.exp(-2 * (math.pi * one) ** 2 * k / (k + 1)).sum()
            ratio = l2 / std
            rows = [
                (plain, tau * d + zero),
                (plain + l1 / std * tau + tau**2 * d / 2, zero),
                ((ratio + math.sqrt(d) * tau) ** 2 / 2, zero),
            ]
        slopes, constants = zip(*rows)
        return np.array(slopes), np.array(constants)

    def encode(self, key: Key, value: Any) -> Any:
        """Return one client's upload as noisy integers, reduced modulo 2^bits to a range around 0.

        They are stored as floats, with the shapes of `value`.

        Args:
            key: the key of the client's rounding and noise.
            value: the upload, a pytree of `dimensions` numbers.
        """
        flat, unflatten = _flatten(value)
        if flat.size != self.dimensions:
            checks.fail(
                "distributed",
                f"uploads of {self.dimensions} numbers, as in like=...",
                f"{flat.size}",
                "Pass the upload of a client as like=...",
            )
        clipped, _ = stages.scale_to_bound(self.clip_norm, flat)  # do not rely on the chain's clip
        scaled = rotate(clipped, _signs_key()) * self.scale
        rounding, noise = jax.random.split(key)
        integers = _round_randomly(scaled, self.longest, rounding)
        return unflatten(_wrap(integers + _draw_noise(self, noise), self.bits))


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
    """Return the upload and release chains for noise that the clients of a cohort share.

    Each upload has only a share of the noise, so the guarantee needs secure aggregation.

    Args:
        noise_multiplier: std of the noise in the sum of a cohort / sensitivity, > 0.
        clip_norm: the clip norm of an upload, > 0, in its units.
        cohort: the number of clients in every round; each adds 1 / cohort of the variance.
        law: the distribution of the noise: "gaussian", for real numbers; "discrete_gaussian" or
            "skellam", for integers modulo 2^bits, as in deployed secure aggregation.
        like: for integers, a Task, or the upload of a client (arrays or their shapes).
        bits: for integers, the bits of a coordinate; cohort * 2^bits <= 2^25.  If None, as many as
            this noise and cohort allow, at most 16.
        adjacency: "zero_out" or "replace_one".

    Returns:
        Chains `upload` and `release`; the release is the mean over the cohort.

    Privacy:
        The guarantee is for a client and the view "aggregate", in a plan with
        secure_aggregation=True.  It is conditional: it assumes this aggregation, that no client
        drops out, and that clients keep their noise secret.  Rounding can make uploads longer.  The
        guarantee accounts for this, so the noise multiplier of the integers is slightly smaller
        than the requested one.

    Raises:
        ValueError: for arguments outside those ranges; or if the noise or the number of clients is
            too large for the bits.

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
            f"like=task, or the upload of a client, for law={law!r}",
            "like=None",
            "The effect of rounding depends on the size of an upload.",
        )
    size = stages.numbers_of(where, like)
    numbers = float(noise_multiplier), float(clip_norm), int(cohort), size
    encoding = Encoding(law, *numbers, MAX_BITS, NUM_DEVIATIONS, adjacency)
    encoding = encoding._replace(bits=_choose_bits(encoding, bits))
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


def _choose_bits(encoding: Encoding, bits: int | None) -> int:
    """Return `bits`, or the largest number of bits that fits if `bits` is None.

    Raises:
        ValueError: if a sum of the cohort or the noise of a client does not fit; the message gives
            the number of bits that would.
    """
    cohort = encoding.cohort

    def fits(bits: int) -> bool:
        if cohort * 2**bits > 2 * MAX_EXACT_INTEGER:
            return False
        candidate = encoding._replace(bits=bits)
        return _table_length(candidate.scale * candidate.share) < MAX_TABLE_LENGTH

    if bits is not None and fits(int(bits)):
        return int(bits)
    # With fewer bits, the deviations of a sum do not fit.
    fewest = math.floor(math.log2(cohort * encoding.deviations**2) / 2) + 1
    most = next((b for b in range(MAX_BITS, max(fewest, 1) - 1, -1) if fits(b)), 0)
    if bits is None and most:
        return most
    noise = f"noise_multiplier={encoding.noise_multiplier:g}"
    return checks.fail(
        "distributed",
        "cohort * 2^bits <= 2^25, whose sums float32 holds exactly, and noise of at most "
        f"{MAX_NOISE_STD} per client (standard deviation)",
        f"cohort={cohort} and {noise if bits is None else f'bits={bits}'}",
        f"Use fewer bits: at most bits={most}, or bits=None, which chooses them."
        if most
        else "Use a smaller cohort.",
    )


def encoding_of(mechanism: Mechanism | None) -> Encoding | None:
    """Return the Encoding of a mechanism whose uploads become integers; None for any other."""
    found = (s.encoding for s in (mechanism.stages if mechanism else ()) if s.encoding is not None)
    return next(found, None)


def check_plan(
    where: str,
    upload: Mechanism | None,
    release: Mechanism,
    private: Sequence[Mechanism | None],
    weights: Any,
) -> None:
    """Reject integer noise in a chain other than the upload, without the matching release, or with
    unequal weights.

    Args:
        where: the name of the caller, for the message.
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
    """Undo the scale and the rotation of the sum of a cohort's integers.

    This is the function of a post-processing stage.

    Args:
        value: the sum of the cohort's uploads, a pytree of integers stored as floats.
        after: the `stages.After` of the sum, which is returned unchanged.
        encoding: the encoding of the uploads.

    Returns:
        The sum in the units of an upload, with the shapes of `value`; and `after`.
    """
    flat, unflatten = _flatten(value)
    flat = rotate(_wrap(flat, encoding.bits) / encoding.scale, _signs_key(), back=True)
    return unflatten(flat), after


def _flatten(value: Tree) -> tuple[Array, Callable[[Array], Tree]]:
    """Return the numbers of a tree as one float32 vector, and the function that undoes it."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), value)
    return jax.flatten_util.ravel_pytree(wide)


def _wrap(integers: Array, bits: int) -> Array:
    """Return integers modulo 2^bits, in -2^(bits - 1) .. 2^(bits - 1) - 1; exact."""
    modulus = 2.0**bits
    return integers - modulus * jnp.floor((integers + modulus / 2) / modulus)


def _round_randomly(x: Array, longest: float, key: Key) -> Array:
    """Round each coordinate up or down at random, without bias.

    The result is the last of a few draws with a norm of at most `longest`; if there is none, every
    coordinate is rounded towards 0.
    """
    low = jnp.floor(x)

    def draw(attempt: Array, previous: Array) -> Array:
        up = jax.random.uniform(jax.random.fold_in(key, attempt), x.shape, jnp.float32) < x - low
        rounded = low + up
        fits = jnp.sum(jnp.square(rounded)) <= longest**2
        return jnp.where(fits, rounded, previous)

    return jax.lax.fori_loop(0, NUM_ROUNDING_TRIES, draw, jnp.trunc(x))


def _draw_noise(encoding: Encoding, key: Key) -> Array:
    """Draw one client's integer noise, Float32[d], by inversion from 63-bit words."""
    known = table(encoding.law, encoding.scale * encoding.share)
    words = jax.random.bits(key, (2, encoding.dimensions), jnp.uint32)
    sign = 1.0 - 2.0 * (words[1] & 1).astype(jnp.float32)
    first, second = words[0], words[1] >> 1
    high, low = jnp.asarray(known.high), jnp.asarray(known.low)
    size = jnp.asarray(known.start)[_bucket(first, words[1] & ~jnp.uint32(1))]
    step = known.reach
    while step > 1:  # binary search for the number of tails above the word
        step //= 2
        index = size + step - 1
        above = (high[index] > first) | ((high[index] == first) & (low[index] > second))
        size = jnp.where(above, size + step, size)
    return sign * size.astype(jnp.float32)


def _bucket(high: Array, low: Array) -> Array:
    """Return the bucket of 63-bit words: their first set bit, and the four bits after it."""
    zeros = jax.lax.clz(high).astype(jnp.uint32)
    # a shift by all bits of a word is not defined
    above = (high << (zeros & 31)) | jnp.where(zeros > 0, (low >> 1) >> (31 - (zeros & 31)), 0)
    more = jax.lax.clz(low).astype(jnp.uint32)
    is_small = high == 0
    place = jnp.where(is_small, jnp.minimum(32 + more, OCTAVES - 1), zeros)
    bits = jnp.where(is_small, low << (more & 31), above)
    return (place * PARTS + ((bits >> 27) & (PARTS - 1))).astype(jnp.int32)


class NoiseTable(NamedTuple):
    """A table from which integer noise is drawn by inversion.

    It holds the tail probabilities P(|noise| >= k) for k = 1, 2, ..., each times 2^63 and rounded
    down to an integer.  To draw noise, a random number of 63 bits is looked up among these
    integers.  Each is stored as two words, and an index says where the search begins.
    """

    high: np.ndarray  # UInt32[n], the first 32 bits
    low: np.ndarray  # UInt32[n], the other 31 bits; the table ends with zeros
    start: np.ndarray  # Int32[OCTAVES * PARTS], number of tails above every word of a bucket
    reach: int  # a power of two; fewer than this number of tails lie within one bucket


def _table_length(std: float) -> int:
    """Return the number of values of |noise| that a table for this standard deviation needs."""
    return math.ceil(TABLE_DEVIATIONS * max(std, 1.0)) + 12


@functools.lru_cache(64)
def table(law: str, std: float) -> NoiseTable:
    """Return the table from which the integer noise of one client is drawn.

    Args:
        law: the distribution, "discrete_gaussian" or "skellam".
        std: the standard deviation of this noise, in integers (after scaling).
    """
    k = np.arange(_table_length(std) + 1, dtype=np.float64)
    if law == "skellam":
        mass = scipy.special.ive(k, std**2)
    else:
        mass = np.exp(-np.square(k) / (2 * std**2))
    both = np.append(mass[0], 2 * mass[1:])
    tails = (np.cumsum(both[::-1])[::-1] / both.sum())[1:]
    words = np.floor(tails * 2.0**63).astype(np.uint64)

    place, part = np.divmod(np.arange(OCTAVES * PARTS), PARTS)
    least = np.ceil(np.ldexp(PARTS + part + 0.0, 58 - place)).astype(np.uint64)
    least[place == OCTAVES - 1] = 0  # the last octave includes all smaller words
    end = np.ceil(np.ldexp(PARTS + part + 1.0, 58 - place)).astype(np.uint64)
    # the number of tails above the largest word of a bucket, and above its smallest
    ascending = words[::-1]
    fewest = len(words) - np.searchsorted(ascending, end - np.uint64(1), "right")
    most = len(words) - np.searchsorted(ascending, least, "right")
    reach = 2 ** math.ceil(math.log2(np.max(most - fewest) + 1))

    words = np.append(words, np.zeros(reach + 1, np.uint64))
    high, low = words >> np.uint64(31), words & np.uint64(2**31 - 1)
    return NoiseTable(high.astype(np.uint32), low.astype(np.uint32), fewest.astype(np.int32), reach)


def _signs_key() -> Key:
    """Return the key of the rotation's signs, which is public and always the same."""
    return as_kernel_key(jax.random.key(0))
