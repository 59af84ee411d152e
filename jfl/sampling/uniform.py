"""Exact draws: uniform subsets of a range, and events of a given probability.

The functions can be traced. A subset needs a number of draws proportional to its size, while
`jax.random.permutation` needs one per element of the range.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

# Up to this size of a subset Floyd's algorithm is faster than marking drawn numbers.
MAX_FLOYD_SIZE = 64
# Draws that are made in addition to the expected number, in standard deviations.
NUM_SPARE_DEVIATIONS = 10
# Random words per number of `remainder`.
NUM_TRIES = 8
# Up to this size of a range, the numbers of `jax.random.randint` are uniform to within 2^-48.
MAX_RANDINT_SIZE = 2**16
# The number of a key that randint does not derive itself.
LARGE_KEY = 2**32 - 1


def below(words: jax.Array, rate: ArrayLike) -> jax.Array:
    """Return whether each random word, as a fraction of 2^32, is below a rate.

    For uniform words, the result is True with probability `rate`, minus at most 2^-32.

    Args:
        words: UInt32[...].
        rate: in [0, 1].

    Returns:
        Bool[...].
    """
    high = jnp.floor(rate * 2.0**16)  # exact: a float32 is split, not rounded
    low = jnp.floor((rate * 2.0**16 - high) * 2.0**16)
    high, low, top = high.astype(jnp.uint32), low.astype(jnp.uint32), words >> 16
    return (top < high) | ((top == high) & (words & 0xFFFF < low))


def remainder(words: jax.Array, size: ArrayLike) -> jax.Array:
    """Return uniform numbers below `size`: UInt32[...].

    They are the remainders of the first word that is below the largest multiple of `size`. Larger
    words are not used, because they would make some numbers more likely.

    Args:
        words: UInt32[NUM_TRIES, ...].
        size: Int[...] or Int[], at least 1.
    """
    size = jnp.broadcast_to(jnp.asarray(size).astype(jnp.uint32), words.shape[1:])
    unusable = (~size + 1) % size  # 2^32 % size
    accepted = jnp.argmax(words <= ~unusable[None], 0, keepdims=True)
    return jnp.take_along_axis(words, accepted, 0)[0] % size


def integers(key: jax.Array, size: jax.Array, shape: tuple[int, ...], max_size: int) -> jax.Array:
    """Return uniform numbers below `size`: Int32[shape].

    Args:
        key: a JAX key.
        size: Int[...] of this shape or Int[], may be traced; at least 1 and at most `max_size`.
        shape: the shape of the result.
        max_size: maximum of `size`.
    """
    draws = jax.random.randint(key, shape, 0, size, jnp.int32)
    if max_size <= MAX_RANDINT_SIZE:
        return draws
    # For larger ranges, randint returns the remainders of single words, of which some are more
    # likely than others: by up to size / 2^32, which is 0.2 % for 1e7.
    words = jax.random.bits(jax.random.fold_in(key, LARGE_KEY), (NUM_TRIES, *shape), jnp.uint32)
    return jnp.where(size > MAX_RANDINT_SIZE, remainder(words, size).astype(jnp.int32), draws)


def subset(key: jax.Array, size: jax.Array | int, count: int, max_size: int) -> jax.Array:
    """Return a uniform subset of `count` numbers of range(size): Int32[count], in any order.

    A small subset is drawn by Floyd's algorithm, from `count` draws: draw i is uniform in
    0..size - count + i. If the subset already contains this number, size - count + i is added
    instead.

    Args:
        key: a JAX key.
        size: Int[], may be traced; at most `max_size`. If size <= count, the result is arbitrary.
        count: size of the subset.
        max_size: maximum of `size`.

    References:
        Bentley and Floyd, Communications of the ACM 30(9), 1987.
    """
    if count > MAX_FLOYD_SIZE:
        return first_distinct(key, size, count, max_size)
    # The i-th draw is from 0..top[i].
    top = (size - count + jnp.arange(count)).astype(jnp.int32)
    draws = integers(key, jnp.maximum(top, 0) + 1, (count,), max_size)
    resolve = _resolve_in_loop if jax.default_backend() == "cpu" else _resolve_at_once
    return resolve(draws, top)


def _resolve_in_loop(draws, top):
    """Replace each draw that is already in the subset by top[i], one draw at a time."""
    count = len(draws)

    def put(i, chosen):
        is_taken = jnp.any((chosen == draws[i]) & (jnp.arange(count) < i))
        return chosen.at[i].set(jnp.where(is_taken, top[i], draws[i]))

    return jax.lax.fori_loop(0, count, put, jnp.zeros(count, jnp.int32))


def _resolve_at_once(draws, top):
    """Compute the result of `_resolve_in_loop` without a loop, which is slow on an accelerator.

    Draw i is replaced in two cases: if an equal number was drawn before, or if it equals top[k] for
    an earlier draw k that was replaced. The second case depends on draw k, which may in turn depend
    on an earlier one. Each pass doubles the number of such steps that are followed.
    """
    place = jnp.arange(len(draws))
    is_earlier = place[None] < place[:, None]
    is_taken = (is_earlier & (draws[:, None] == draws[None])).any(1)
    # The k with top[k] equal to the draw, or i itself if there is no earlier one.
    earlier = draws - top[0]
    earlier = jnp.where((earlier >= 0) & (earlier < place), earlier, place)
    for _ in range((len(draws) - 1).bit_length()):
        is_taken, earlier = is_taken | is_taken[earlier], earlier[earlier]
    return jnp.where(is_taken, top, draws).astype(jnp.int32)


def num_draws(count: int) -> int:
    """Return a number of uniform draws that almost surely contain `count` distinct numbers.

    The range has at least 2 * count numbers. The number of draws until `count` of them are distinct
    has mean 1.39 * count and standard deviation 0.78 * sqrt(count). The result is the mean plus 12
    standard deviations plus 20. For any count above 64, the probability of fewer distinct numbers
    is below 1e-20, much less than the resolution 2^-32 of the draws.
    """
    return math.ceil(2 * math.log(2) * count + 9.4 * math.sqrt(count) + 20)


def first_distinct(key: jax.Array, size: jax.Array | int, count: int, max_size: int) -> jax.Array:
    """Return a uniform subset of `count` numbers of range(size), for size > count.

    The subset consists of the first distinct numbers of uniform draws. If `count` is more than half
    of the range, the numbers outside the subset are drawn instead, so O(count) draws are enough.

    Args:
        key: a key of jax.random.key.
        size: Int[], may be traced; at most `max_size`.
        count: size of the subset.
        max_size: maximum of `size`.

    Returns:
        Int32[count].
    """
    tries, numbers = num_draws(count), jnp.arange(2 * count)
    draw_excluded, position = size < 2 * count, jnp.arange(tries)
    draws = integers(key, jnp.maximum(size, 1), (tries,), max_size)
    # The first draw of each number.
    first = jnp.full(max(max_size, 2 * count), tries).at[draws].min(position)
    is_new = first[draws] == position
    # The draw that completes the set.
    last = jnp.searchsorted(jnp.cumsum(is_new), jnp.where(draw_excluded, size - count, count))
    not_drawn = (first[: 2 * count] > last) & (numbers < size)
    pad = lambda x: jnp.pad(x, (0, max(tries, 2 * count) - len(x)))
    is_member = jnp.where(draw_excluded, pad(not_drawn), pad(is_new))
    member = jnp.where(draw_excluded, pad(numbers), pad(draws))
    place = jnp.cumsum(is_member) - 1
    return (
        jnp.zeros(count, jnp.int32)
        .at[jnp.where(is_member, place, count)]
        .set(member.astype(jnp.int32), mode="drop")
    )


def sparse_subset(key: jax.Array, size: int, length: int, count: ArrayLike) -> jax.Array:
    """Return a uniform subset of range(size), with a number of draws proportional to `length`.

    The subset consists of the first distinct numbers of independent draws. If these are too few,
    which has probability below 1e-9, all are drawn again. This treats all numbers equally, so the
    subset is uniform.

    Args:
        key: a key of jax.random.key.
        size: the size of the range.
        length: the length of the result, at most size / 2.
        count: Int[], may be traced; the size of the subset, at most `length`.

    Returns:
        Int32[length], of which the first `count` numbers are the subset, and the others arbitrary.
    """
    # Larger words are not used, because they would make some numbers more likely.
    usable = 2**32 // size * size
    # Mean number of draws until `length` of them are distinct.
    mean_draws = -size * np.log1p(-length / size) * 2.0**32 / usable
    spare = NUM_SPARE_DEVIATIONS
    tries = int(np.ceil(mean_draws + spare * np.sqrt(mean_draws) + spare))
    place = jnp.arange(tries, dtype=jnp.int32)

    def draw(attempt):
        words = jax.random.bits(jax.random.fold_in(key, attempt), (tries,), jnp.uint32)
        numbers = jnp.where(words <= np.uint32(usable - 1), words % np.uint32(size), size).astype(
            jnp.int32
        )
        value, position = jax.lax.sort((numbers, place), num_keys=2)
        is_first = jnp.concatenate([jnp.ones(1, bool), value[1:] != value[:-1]]) & (value < size)
        return numbers, jnp.zeros(tries, bool).at[position].set(is_first)

    def draw_again(state):
        attempt = state[0] + 1
        return attempt, *draw(attempt)

    too_few = lambda state: state[2].sum() < count
    first = jnp.int32(0), *draw(0)
    with jax.named_scope("draw_again"):
        _, numbers, is_new = jax.lax.while_loop(too_few, draw_again, first)
    return numbers[jnp.nonzero(is_new, size=length, fill_value=0)[0]]
