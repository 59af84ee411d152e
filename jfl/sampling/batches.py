"""Samplers of batches, which draw the rows of a client for a local step.

A Batches has a function `draw(key, step, size, N)` that returns slots Int[B], which are positions
among the client's rows, mask Bool[B] and overflow Int[]. `key` belongs to one client and one round,
and `size` is the client's number of rows. A draw depends on key, step and size, but not on N, the
padded number of rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..core import checks
from ..core.records import Array, Batch, Batches, Fn, Key, Rows, named
from ..verify import marks
from . import uniform
from .clients import HORIZON, OVERFLOW, room_for

__all__ = [
    "full",
    "without_replacement",
    "with_replacement",
    "poisson",
    "truncated_poisson",
    "epochs",
]


def adjacency(batches: Batches) -> str:
    """Return the adjacency under which sampling of batches amplifies privacy."""
    return {"poisson": "add_remove", "truncated_poisson": "zero_out"}.get(
        batches.scheme, "replace_one"
    )


def gather(rows: Rows, slots: Array, mask: Array) -> Batch:
    """Return the batch with the rows of a client at some positions.

    Slots whose `mask` is False get zeros, because a NaN there would reach the gradient even with
    weight 0.

    Args:
        rows: the rows that the client can read.
        slots: Int[B], positions among the client's rows.
        mask: Bool[B], which slots hold a row.
    """
    index = rows.index[jnp.where(mask, slots, 0)]
    zero_masked = lambda x: jnp.where(
        mask.reshape(mask.shape + (1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype)
    )
    batch = Batch(zero_masked(rows.x[index]), zero_masked(rows.y[index]), mask)
    return marks.batch(batch, rows, slots, mask)


def draw_slots(batches: Batches, key: Key, step: ArrayLike, size: ArrayLike, n: int) -> tuple:
    """Draw the slots of a batch; return slots, mask and overflow as `batches.draw` does.

    `jfl.check_privacy` recognises the draws of this function, and the rows that `gather` reads.

    Args:
        batches: the sampler.
        key: the batch key of the client in this round.
        step: Int[], the number of the local step.
        size: Int[], the number of rows of the client.
        n: N, the padded number of rows.
    """
    slots, mask, overflow = batches.draw(key, step, size, n)
    return *marks.slots((slots, mask), batches, key, step, size), overflow


def _no_overflow():
    return jnp.zeros((), jnp.int32)


@named("batches.full")
def _draw_full(key, step, size, n):
    slots = jnp.arange(n)
    return slots, slots < size, _no_overflow()


def full() -> Batches:
    """Use all rows of the client in every step.

    Privacy:
        There is no amplification. Every adjacency can be analysed.
    """
    return Batches(Fn(_draw_full), "full", None)


@named("batches.without_replacement")
def _draw_without(key, step, size, n, *, batch):
    key, every = jax.random.fold_in(key, step), jnp.arange(batch)
    slots = uniform.subset(key, size, batch, n)
    return jnp.where(size > batch, slots, every), every < size, _no_overflow()


def without_replacement(batch: int, short: str = "error") -> Batches:
    """Draw a new uniform batch of exactly `batch` rows in each step.

    Other Parameters:
        batch: number of rows of a batch.
        short: treatment of clients with fewer rows: "error" rejects the plan, and "all" uses all
            their rows.

    Privacy:
        Amplification under replace_one of an example at rate batch / rows. There is none for a
        client whose rows are all used.

    Raises:
        ValueError: if batch < 1. With short="error", `jfl.plan` rejects clients with fewer rows.
    """
    checks.require_integer("batches.without_replacement", batch=batch)
    checks.require_one_of("batches.without_replacement", ("error", "all"), short=short)
    return Batches(Fn(_draw_without, static=dict(batch=batch)), "without_replacement", batch, short)


@named("batches.with_replacement")
def _draw_with(key, step, size, n, *, batch):
    key = jax.random.fold_in(key, step)
    slots = uniform.integers(key, jnp.maximum(size, 1), (batch,), n)
    return slots, jnp.broadcast_to(size > 0, (batch,)), _no_overflow()


def with_replacement(batch: int) -> Batches:
    """Draw `batch` independent uniform rows; a row may occur several times.

    Privacy:
        Amplification under replace_one of an example. A row that is drawn m times changes the sum m
        times, which the accountant counts.
    """
    checks.require_integer("batches.with_replacement", batch=batch)
    return Batches(Fn(_draw_with, static=dict(batch=batch)), "with_replacement", batch)


@named("batches.poisson")
def _draw_poisson(key, step, size, n, *, rate, expected, batch):
    rate = jnp.minimum(expected / jnp.maximum(size, 1), 1.0) if rate is None else rate
    chosen = uniform.below(
        jax.random.bits(jax.random.fold_in(key, step), (n,), jnp.uint32), rate
    ) & (jnp.arange(n) < size)
    slots = jnp.nonzero(chosen, size=batch, fill_value=n)[0].astype(jnp.int32)
    return slots, slots < n, jnp.maximum(chosen.sum() - batch, 0).astype(jnp.int32)


def _chernoff(expected: float) -> int:
    """Return a number of slots that a batch exceeds with probability below OVERFLOW / HORIZON^2.

    By Chernoff's bound, P(X >= c) <= exp(c - m - c log(c / m)) for a sum of independent indicators
    with mean m.
    """
    from scipy import optimize  # takes half a second, so not at the top

    log_target = np.log(OVERFLOW) - 2 * np.log(HORIZON)
    excess = lambda c: c - expected - c * np.log(c / expected) - log_target
    root: Any = optimize.brentq(excess, expected * (1 + 1e-9), 100 * (expected + 10))
    return int(np.ceil(root))


def poisson(
    batch: float | None = None, *, rate: ArrayLike | None = None, capacity: int | None = None
) -> Batches:
    """Include each row independently with probability batch / rows, or with a given `rate`.

    Other Parameters:
        batch: expected number of rows of a batch, > 0.
        rate: probability with which a row is in a batch, in (0, 1], instead of `batch`.
        capacity: number of slots; required with `rate`, and by default chosen by a Chernoff bound
            for `batch`.

    Privacy:
        Poisson subsampling amplifies privacy if the unit is an example and the adjacency
        add_remove. The client's number of rows, which determines the rate, is assumed public and
        the same for neighbouring datasets. The accountant adds the probability of an overflow, a
        draw of more rows than slots, to delta.

    Raises:
        ValueError: unless exactly one of batch and rate is given.
    """
    if (batch is None) == (rate is None):
        checks.fail(
            "batches.poisson",
            "either batch (expected rows) or rate",
            f"batch={batch!r}, rate={rate!r}",
        )
    if batch is not None:
        checks.require_positive("batches.poisson", single=True, batch=batch)
        if capacity is None:
            capacity = _chernoff(float(batch))
    else:
        checks.require_fraction("batches.poisson", single=True, rate=rate)
        if capacity is None:
            checks.fail(
                "batches.poisson",
                "capacity together with rate",
                "capacity=None",
                "Reserve about rate * rows + 8 * sqrt(rate * rows) + 30 slots, or pass batch.",
            )
    checks.require_integer("batches.poisson", capacity=capacity)
    rate, expected = (None if v is None else checks.as_scalar(v) for v in (rate, batch))
    data = dict(rate=rate, expected=expected)
    return Batches(
        Fn(_draw_poisson, data, dict(batch=capacity)),
        "poisson",
        capacity,
        rate=rate,
        expected=expected,
    )


@named("batches.truncated_poisson")
def _draw_truncated(key, step, size, n, *, expected, batch):
    words = jax.random.bits(jax.random.fold_in(key, step), (n,), jnp.uint32)
    rate = jnp.minimum(expected / jnp.maximum(size, 1), 1.0)
    chosen = uniform.below(words, rate) & (jnp.arange(n) < size)
    # The words of included rows are uniform, so those with the smallest words are a uniform subset.
    words = jnp.pad(jnp.where(chosen, ~words | jnp.uint32(1), 0), (0, max(batch - n, 0)))
    slots = jnp.sort(
        jnp.where(words > 0, jnp.arange(len(words)), n)[jax.lax.top_k(words, batch)[1]]
    )
    return slots.astype(jnp.int32), slots < n, _no_overflow()


def truncated_poisson(batch: float, capacity: int | None = None) -> Batches:
    """Include each row independently with probability batch / rows, but at most `capacity` rows.

    If more rows are drawn, a uniform subset of them is used, so a batch cannot overflow. With a
    small `capacity`, it also has fewer empty slots than a batch of `poisson`.

    Other Parameters:
        batch: expected number of rows before truncation, > 0.
        capacity: number of slots. None means the mean plus five standard deviations, which costs
            the same epsilon as `poisson`. The mean plus two standard deviations costs about twice
            as much.

    Privacy:
        The unit is an example, and the adjacency zero_out or replace_one. add_remove is not
        possible, because an added row changes which of the others are left out.

    Raises:
        ValueError: unless batch > 0 and capacity is an integer.

    References:
        Ganesh, arXiv:2508.15089 (2025).
    """
    where = "batches.truncated_poisson"
    checks.require_positive(where, single=True, batch=batch)
    if capacity is None:
        capacity = room_for(float(batch))
    checks.require_integer(where, capacity=capacity)
    expected = checks.as_scalar(batch)
    return Batches(
        Fn(_draw_truncated, dict(expected=expected), dict(batch=capacity)),
        "truncated_poisson",
        capacity,
        expected=expected,
    )


@named("batches.epochs")
def _draw_epochs(key, step, size, n, *, batch):
    per_epoch = jnp.maximum(-(-size // batch), 1)
    score = jax.random.uniform(jax.random.fold_in(key, step // per_epoch), (n,), jnp.float32)
    # The client's rows come first, in random order.
    order = jnp.argsort(jnp.where(jnp.arange(n) < size, score, 2.0))
    position = (step % per_epoch) * batch + jnp.arange(batch)
    return order[jnp.minimum(position, n - 1)].astype(jnp.int32), position < size, _no_overflow()


def epochs(batch: int) -> Batches:
    """Use each row once per epoch: consecutive batches of a new random order of the rows.

    The last batch of an epoch may be smaller.

    Privacy:
        Each row is in one batch per epoch, so an epoch is one release under replace_one, without
        amplification.
    """
    checks.require_integer("batches.epochs", batch=batch)
    return Batches(Fn(_draw_epochs, static=dict(batch=batch)), "epochs", batch)
