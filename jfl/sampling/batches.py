"""Which of its rows a client uses in a step: `draw(key, step, size, N) -> slots Int[B], mask
Bool[B], overflow Int[]`.

`key` belongs to one client and one round.  A draw depends on (key, step, size) and never on N, the
padding.
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
    """The neighbours the scheme's amplification speaks of."""
    return {"poisson": "add_remove", "truncated_poisson": "zero_out"}.get(
        batches.scheme, "replace_one"
    )


def gather(rows: Rows, slots: Array, mask: Array) -> Batch:
    """The rows in `slots`, one by one; zeros where a slot is masked out: 0 * nan would reach a
    gradient."""
    index = rows.index[jnp.where(mask, slots, 0)]
    zero_masked = lambda x: jnp.where(
        mask.reshape(mask.shape + (1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype)
    )
    batch = Batch(zero_masked(rows.x[index]), zero_masked(rows.y[index]), mask)
    return marks.batch(batch, rows, slots, mask)


def drawn(batches: Batches, key: Key, step: ArrayLike, size: ArrayLike, n: int) -> tuple:
    """`batches.draw`, marked as such: an algorithm that draws by this and reads by `gather` can be
    checked."""
    slots, mask, overflow = batches.draw(key, step, size, n)
    return *marks.slots((slots, mask), batches, key, step, size), overflow


def _none():
    return jnp.zeros((), jnp.int32)


@named("batches.full")
def _draw_full(key, step, size, n):
    slots = jnp.arange(n)
    return slots, slots < size, _none()


def full() -> Batches:
    """All rows of the client in every step.

    Privacy:
        no amplification; either adjacency.
    """
    return Batches(Fn(_draw_full), "full", None)


@named("batches.without_replacement")
def _draw_without(key, step, size, n, *, batch):
    key, every = jax.random.fold_in(key, step), jnp.arange(batch)
    slots = uniform.subset(key, size, batch, n)
    return jnp.where(size > batch, slots, every), every < size, _none()


def without_replacement(batch: int, short: str = "error") -> Batches:
    """A uniform batch of exactly `batch` rows, fresh each step.

    Other Parameters:
        batch: rows of a batch.
        short: what happens to a client with fewer rows: "error" refuses the plan, "all" takes the
            whole client.

    Privacy:
        replace_one of one example at rate batch / rows; none for a client that is taken whole.

    Raises:
        ValueError: if batch < 1; the plan is refused where a client is short and short="error".
    """
    checks.require_integer("batches.without_replacement", batch=batch)
    checks.require_one_of("batches.without_replacement", ("error", "all"), short=short)
    return Batches(Fn(_draw_without, static=dict(batch=batch)), "without_replacement", batch, short)


@named("batches.with_replacement")
def _draw_with(key, step, size, n, *, batch):
    slots = jax.random.randint(jax.random.fold_in(key, step), (batch,), 0, jnp.maximum(size, 1))
    return slots, jnp.broadcast_to(size > 0, (batch,)), _none()


def with_replacement(batch: int) -> Batches:
    """`batch` independent uniform draws; a row may come several times.

    Privacy:
        replace_one of one example; a row drawn m times moves the sum m times, and is charged so.
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
    """Slots that a sum of independent indicators with this mean exceeds with probability below
    OVERFLOW / HORIZON^2.

    Chernoff: P(X >= c) <= exp(c - m - c log(c / m)), for any number of rows.
    """
    from scipy import optimize  # half a second: not at import

    log_target = np.log(OVERFLOW) - 2 * np.log(HORIZON)
    excess = lambda c: c - expected - c * np.log(c / expected) - log_target
    found: Any = optimize.brentq(excess, expected * (1 + 1e-9), 100 * (expected + 10))
    return int(np.ceil(found))


def poisson(
    batch: float | None = None, *, rate: ArrayLike | None = None, capacity: int | None = None
) -> Batches:
    """Each row joins independently: with probability batch / rows (an expected `batch`), or with a
    given `rate`.

    Other Parameters:
        batch: expected rows of a batch, > 0.
        rate: in (0, 1], the probability of a row, in place of `batch`.
        capacity: slots that are reserved; required for `rate`, and chosen by a Chernoff bound for
            `batch`.

    Privacy:
        add_remove of one example, Poisson subsampling; the rows of a client are a public, nominal
        number.  The accountant adds the probability of an overflow to delta.

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
                "capacity beside rate",
                "capacity=None",
                (
                    "Reserve about rate * rows + 8 * sqrt(rate * rows) + 30 slots, or give batch "
                    "instead."
                ),
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
    # words of those who join are uniform below the rate: who has the smallest is a uniform subset
    words = jnp.pad(jnp.where(chosen, ~words | jnp.uint32(1), 0), (0, max(batch - n, 0)))
    slots = jnp.sort(
        jnp.where(words > 0, jnp.arange(len(words)), n)[jax.lax.top_k(words, batch)[1]]
    )
    return slots.astype(jnp.int32), slots < n, _none()


def truncated_poisson(batch: float, capacity: int | None = None) -> Batches:
    """Each row joins independently with probability batch / rows; of more than `capacity`, a
    uniform subset.

    Where `poisson` reserves slots for as many as hardly ever come, here a batch has few empty slots
    and nothing can overflow.

    Other Parameters:
        batch: expected rows before the cut, > 0.
        capacity: slots of a batch; None: the mean and five deviations, with which it costs as much
            epsilon as `poisson`.  With two, it costs about twice.

    Privacy:
        zero_out (or replace_one) of one example: whether the others fill the batch hangs on how
        many rows a client has, so not add_remove.

    Raises:
        ValueError: unless batch > 0 and capacity is whole.

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
    score = jax.random.uniform(jax.random.fold_in(key, step // per_epoch), (n,))
    # the client's rows first, shuffled
    order = jnp.argsort(jnp.where(jnp.arange(n) < size, score, 2.0))
    place = (step % per_epoch) * batch + jnp.arange(batch)
    return order[jnp.minimum(place, n - 1)].astype(jnp.int32), place < size, _none()


def epochs(batch: int) -> Batches:
    """Slices of one shuffle of the client's rows; a new shuffle when all have been used.  The last
    slice may be short.

    Privacy:
        each row is in one batch an epoch: no amplification, one release an epoch; replace_one.
    """
    checks.require_integer("batches.epochs", batch=batch)
    return Batches(Fn(_draw_epochs, static=dict(batch=batch)), "epochs", batch)
