"""Exact draws: uniform subsets of a range, and events of a given probability.

They are traced, and cost O(subset) draws where `jax.random.permutation` costs the whole range.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

WORD = 32  # bits
FLOYD = 64  # up to this size Floyd's walk is faster than marking what was drawn
SPARE = 10  # standard deviations of how many draws bring so many new numbers


def below(words: jax.Array, rate: ArrayLike) -> jax.Array:
    """Where UInt32 words, as numbers in [0, 1), lie below a rate: with its probability, less at
    most 2^-32."""
    high = jnp.floor(rate * 2.0**16)  # exact: a float32 is split, not rounded
    low = jnp.floor((rate * 2.0**16 - high) * 2.0**16)
    high, low, top = high.astype(jnp.uint32), low.astype(jnp.uint32), words >> 16
    return (top < high) | ((top == high) & (words & 0xFFFF < low))


def subset(key: jax.Array, size: jax.Array | int, count: int, most: int) -> jax.Array:
    """A uniform subset of `count` of range(size): Int32[count], in any order.

    Args:
        key: of jax.random.key.
        size: Int[], traced; at most `most`.  Where size <= count the result means nothing.
        count: size of the subset.
        most: the largest that `size` can be.
    """
    if count <= FLOYD:
        return floyd_subset(key, size, count)
    return first_distinct(key, size, count, most)


def floyd_subset(key: jax.Array, size: ArrayLike, count: int) -> jax.Array:
    """A uniform subset of `count` of range(size), by Floyd's walk: count draws, whatever the size.

    References:
        Bentley and Floyd, Communications of the ACM 30(9), 1987.
    """
    top = size - count + jnp.arange(count)  # the i-th draw is from 0..top[i]
    draws = jax.random.randint(key, (count,), 0, jnp.maximum(top, 0) + 1)
    walk = _walk if jax.default_backend() == "cpu" else _walk_at_once
    return walk(draws, top)


def _walk(draws, top):
    """Floyd's walk, one draw after another: what is taken already gives way to top[i]."""
    count = len(draws)

    def put(i, chosen):
        is_taken = jnp.any((chosen == draws[i]) & (jnp.arange(count) < i))
        return chosen.at[i].set(jnp.where(is_taken, top[i], draws[i]))

    return jax.lax.fori_loop(0, count, put, jnp.zeros(count, jnp.int32))


def _walk_at_once(draws, top):
    """The same numbers without a loop, which an accelerator would start anew for every draw.

    Draw i is taken if it was drawn before, or if it is top[k] of an earlier k whose own draw was
    taken.  What was drawn before is seen in all pairs at once; one k at most has that top.  Who was
    taken is then a few bits that are worked out one after another in registers.
    """
    count, place, none = len(draws), jnp.arange(len(draws)), np.uint32(0)
    bit = jnp.uint32(1) << (place % WORD).astype(jnp.uint32)
    again = (place[:, None] > place[None]) & (draws[:, None] == draws[None])
    taken = []  # a bit for each draw, in words
    for start in range(0, count, WORD):
        part = slice(start, start + WORD)
        bits = jnp.where(again[part], bit[part, None], none)
        taken.append(jax.lax.reduce_or(bits, axes=(0, 1)))
    before = (draws - top[0]).astype(jnp.uint32)  # the k whose top it is; large where there is none
    for i in range(1, count):
        k, mine, held = before[i], i // WORD, taken[0]
        for other in range(1, mine + 1):
            held = jnp.where(k >= WORD * other, taken[other], held)
        is_taken = (k < i) & ((held >> (k % WORD)) & 1 == 1)
        taken[mine] = taken[mine] | jnp.where(is_taken, np.uint32(1 << i % WORD), none)
    each = jnp.concatenate([jnp.broadcast_to(word, (WORD,)) for word in taken])[:count]
    return jnp.where(each & bit != 0, top, draws).astype(jnp.int32)


def draws_for(count: int) -> int:
    """Uniform draws that hold `count` distinct numbers of 2 * count or more.

    It takes 1.39 * count on average, with a deviation of 0.78 * sqrt(count).  With a margin of 12
    deviations and 20 draws the probability of fewer is below 1e-20 for any count above 64, and much
    less than the draws' own grain of 2^-32.
    """
    return math.ceil(2 * math.log(2) * count + 9.4 * math.sqrt(count) + 20)


def first_distinct(key: jax.Array, size: jax.Array | int, count: int, most: int) -> jax.Array:
    """A uniform subset of `count` of range(size): the first distinct ones of uniform draws; size >
    count.

    Those left out are drawn instead where they are fewer, so that the draws are O(count) and not
    size log(size).
    """
    tries, numbers = draws_for(count), jnp.arange(2 * count)
    draw_excluded, position = size < 2 * count, jnp.arange(tries)
    draws = jax.random.randint(key, (tries,), 0, jnp.maximum(size, 1), jnp.int32)
    first = jnp.full(max(most, 2 * count), tries).at[draws].min(position)  # draw of each number
    is_new = first[draws] == position
    # the draw that completes the set
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


def sparse_subset(key: jax.Array, size: int, most: int, count: ArrayLike) -> jax.Array:
    """`count` <= most different numbers of range(size), uniform, then anything: Int32[most].

    The first that are new among independent draws.  Should they be too few, which has a chance
    below 1e-9, all are drawn again: a choice that treats all numbers alike.

    Args:
        key: of jax.random.key.
        size: of the range.
        most: length of the result, at most size / 2.
        count: Int[], may be traced; how many of the result are meant.
    """
    # words from here on would make some numbers likelier
    usable = 2**32 // size * size
    # draws until so many are new, on average
    mean_draws = -size * np.log1p(-most / size) * 2.0**32 / usable
    tries = int(np.ceil(mean_draws + SPARE * np.sqrt(mean_draws) + SPARE))
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
    return numbers[jnp.nonzero(is_new, size=most, fill_value=0)[0]]
