"""Samplers of clients, which draw the cohort of a round.

A Sampler has a function `draw(key)` that returns a Cohort, and fields that tell the accountant how
clients are drawn. Samplers in which groups of clients participate in rotation are in rotation.py.

The capacity of a sampler is the number of slots that a program reserves for a cohort. If more
clients are drawn, Health.overflow counts them, and the guarantee does not hold for that run.
Default capacities are chosen such that an overflow in HORIZON draws has probability below OVERFLOW.
"""

import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..core import checks
from ..core.options import Setting
from ..core.random_streams import Stream, stream_key
from ..core.records import Array, Cohort, Fn, Key, Sampler, named, record
from . import uniform

OVERFLOW = 1e-12
HORIZON = 1_000_000
# From this number of clients on, the cost of a draw depends on the cohort, not on the population.
MIN_SPARSE_CLIENTS = 2**15
__all__ = [
    "full",
    "without_replacement",
    "with_replacement",
    "poisson",
    "truncated_poisson",
    "first_responders",
]
# Schemes in which clients join independently, so adding a client changes nothing for the others.
INDEPENDENT_SCHEMES = (
    "poisson",
    "available_poisson",
    "cyclic_poisson",
    "random_allocation",
    "balls_in_bins",
)
# Schemes whose cohorts vary in size.
VARIABLE_SIZE_SCHEMES = (*INDEPENDENT_SCHEMES, "truncated_poisson")


def adjacency(sampler: Sampler) -> str:
    """Return the adjacency for which a sampler is analysed, unless a chain states another."""
    return adjacencies(sampler)[0]


def adjacencies(sampler: Sampler) -> tuple[str, ...]:
    """Return all adjacencies that can be analysed for a sampler."""
    if sampler.scheme in INDEPENDENT_SCHEMES:
        return "add_remove", "zero_out", "replace_one"
    if sampler.scheme == "truncated_poisson":
        return "zero_out", "replace_one"
    return ("replace_one", "zero_out") + ("add_remove",) * (sampler.scheme == "full")


def draw_cohort(
    sampler: Sampler, key: Key, round_: ArrayLike, cohort_key: Key | None = None
) -> Cohort:
    """Draw the cohort of a round.

    Args:
        sampler: a sampler of jfl.sampling.
        key: the sampling key of the run.
        round_: Int[], the number of the round.
        cohort_key: stream_key(key, Stream.COHORT, round_), if it is already computed.
    """
    if sampler.over_rounds:
        return sampler.draw(jax.random.fold_in(key, Stream.COHORT), round_)
    if cohort_key is None:
        cohort_key = stream_key(key, Stream.COHORT, round_)
    return sampler.draw(cohort_key)


def fills_every_slot(sampler: Sampler) -> bool:
    """Return whether every slot of every cohort holds a client."""
    if sampler.scheme == "with_replacement":
        return sampler.independent
    return sampler.scheme not in VARIABLE_SIZE_SCHEMES


def is_full_participation(sampler: Sampler) -> bool:
    """Return whether slot i of every cohort holds client i."""
    return sampler.draw.function is _draw_full


def as_cohort(ids: Array, clients: int) -> Cohort:
    """Return the Cohort with distinct clients `ids`, where id `clients` marks an empty slot."""
    times_drawn = (ids < clients).astype(jnp.int32)
    return Cohort(ids, times_drawn, jnp.zeros_like(ids), jnp.zeros((), jnp.int32))


def chosen_cohort(is_chosen: Array, capacity: int) -> Cohort:
    """Return the cohort of the clients for which `is_chosen`, Bool[C], is True.

    Clients are in the order of their ids. If there are more than `capacity`, the last ones are left
    out and counted as overflow.
    """
    clients = len(is_chosen)
    ids = jnp.nonzero(is_chosen, size=capacity, fill_value=clients)[0].astype(jnp.int32)
    overflow = jnp.maximum(is_chosen.sum() - capacity, 0).astype(jnp.int32)
    return as_cohort(ids, clients)._replace(overflow=overflow)


@named("sampling.full")
def _draw_full(key, *, clients):
    return as_cohort(jnp.arange(clients), clients)


def full(clients: int) -> Sampler:
    """Select all clients in every round.

    Privacy:
        There is no amplification. Every adjacency can be analysed.
    """
    checks.require_integer("sampling.full", clients=clients)
    return Sampler(
        Fn(_draw_full, static=dict(clients=clients)),
        checks.as_scalar(clients),
        scheme="full",
        clients=clients,
        capacity=clients,
    )


def _check_cohort(where, clients, cohort):
    """Require 1 <= cohort <= clients."""
    checks.require_integer(where, clients=clients)
    hint = "Use sampling.full for everyone, or sampling.with_replacement."
    checks.require_integer(where, hint, max_value=clients, cohort=cohort)


@named("sampling.without_replacement_few")
def _draw_few(key, *, clients, cohort):
    return as_cohort(uniform.sparse_subset(key, clients, cohort, cohort), clients)


@named("sampling.without_replacement")
def _draw_without(key, *, clients, cohort):
    words = jax.random.bits(key, (clients,), jnp.uint32)
    return as_cohort(jax.lax.top_k(words, cohort)[1].astype(jnp.int32), clients)


def without_replacement(clients: int, cohort: int) -> Sampler:
    """Return a sampler that draws exactly `cohort` clients uniformly without replacement.

    Other Parameters:
        clients: number of clients.
        cohort: number of clients per round.

    Privacy:
        Sampling amplifies privacy at the rate cohort / clients, if neighbouring datasets differ in
        one replaced client.

    Raises:
        ValueError: if cohort is not in 1..clients.

    Example:
        >>> sorted(without_replacement(5, 5).draw(jax.random.key(0)).ids.tolist())
        [0, 1, 2, 3, 4]
    """
    _check_cohort("sampling.without_replacement", clients, cohort)
    draw = _draw_few if _is_sparse(clients, cohort) else _draw_without
    return Sampler(
        Fn(draw, static=dict(clients=clients, cohort=cohort)),
        checks.as_scalar(cohort),
        scheme="without_replacement",
        clients=clients,
        capacity=cohort,
    )


def _is_sparse(clients, cohort):
    """Return whether a cohort is drawn without a random word for every client."""
    return clients >= MIN_SPARSE_CLIENTS and 2 * cohort <= clients


@named("sampling.with_replacement")
def _draw_with(key, *, edges, clients, cohort, independent):
    if edges is not None:
        drawn = jnp.searchsorted(edges, jax.random.bits(key, (cohort,), jnp.uint32), side="right")
    elif clients < MIN_SPARSE_CLIENTS:
        drawn = jax.random.randint(key, (cohort,), 0, clients, jnp.int32)
    else:  # for many clients, the remainders that randint uses are not uniform enough
        words = jax.random.bits(key, (uniform.NUM_TRIES, cohort), jnp.uint32)
        drawn = uniform.remainder(words, clients)
    drawn = jnp.sort(drawn.astype(jnp.int32))
    first = jnp.searchsorted(drawn, drawn, side="left").astype(jnp.int32)
    repeat_index = jnp.arange(cohort, dtype=jnp.int32) - first
    if independent:
        return Cohort(drawn, jnp.ones(cohort, jnp.int32), repeat_index, jnp.zeros((), jnp.int32))
    # Keep the first slot of each client, and move empty slots to the end.
    count = jnp.searchsorted(drawn, drawn, side="right").astype(jnp.int32) - first
    ids, times_drawn = jax.lax.sort(
        (jnp.where(repeat_index == 0, drawn, clients), jnp.where(repeat_index == 0, count, 0)),
        num_keys=1,
    )
    return Cohort(ids, times_drawn, jnp.zeros_like(repeat_index), jnp.zeros((), jnp.int32))


def with_replacement(
    clients: int, cohort: int, weights: ArrayLike | None = None, independent: bool = False
) -> Sampler:
    """Draw `cohort` clients with replacement, uniformly or in proportion to `weights`.

    A client that is drawn m times runs once, and its upload has m times its weight. With
    `independent` it runs m times, with separate batches and noise, and releases m times as much
    about its examples.

    Other Parameters:
        clients: number of clients.
        cohort: number of draws per round, which is the number of slots.
        weights: Float[C] > 0, not traced, to which the probabilities of clients are proportional.
            None means uniform.
        independent: whether a client that is drawn m times runs m times.

    Privacy:
        The guarantee is for replace_one of a client without state; the accountant counts repeated
        draws. Probabilities are rounded to multiples of 2^-32, and are at least 2^-32. The
        accountant uses the rounded ones.

    Raises:
        ValueError: unless weights are C finite numbers > 0.
    """
    checks.require_integer("sampling.with_replacement", clients=clients, cohort=cohort)
    checks.require_one_of("sampling.with_replacement", (False, True), independent=independent)
    edges = None
    if weights is not None:
        checks.require_positive("sampling.with_replacement", weights=weights)
        if not checks.is_concrete(weights) or np.shape(weights) != (clients,):
            checks.fail(
                "sampling.with_replacement",
                f"one weight, not traced, for each of {clients} clients",
                checks.short_repr(weights),
            )
        edges = _edges(np.asarray(weights, np.float64))
    fixed: dict[str, Any] = dict(clients=clients, independent=independent)
    return Sampler(
        Fn(
            _draw_with,
            dict(edges=None if edges is None else jnp.asarray(edges)),
            dict(fixed, cohort=cohort),
        ),
        checks.as_scalar(cohort),
        None if edges is None else shares_of(edges),
        scheme="with_replacement",
        capacity=cohort,
        **fixed,
    )


def shares_of(edges: Array) -> Array:
    """Return the probability that one weighted draw with replacement selects each client.

    A draw is a uniform word of 32 bits, and selects the client whose interval contains the word.

    Args:
        edges: UInt32[C - 1], the first word of the intervals of clients 1, 2, ...

    Returns:
        Float32[C].
    """
    ends = np.append(np.asarray(edges).astype(np.int64), 2**32)
    return jnp.asarray(np.diff(ends, prepend=0) / 2.0**32, jnp.float32)


def _edges(weights):
    """Divide the 2^32 words among the clients in proportion to `weights`.

    A client is drawn if a uniform word is in its interval.  Every interval has at least one word.

    Returns:
        UInt32[C - 1], the first word of the intervals of clients 1, 2, ...
    """
    clients, sums = len(weights), np.cumsum(weights)
    ends = np.round(sums / sums[-1] * (2**32 - clients)).astype(np.int64)
    return (ends + np.arange(1, clients + 1))[:-1].astype(np.uint32)


def resolve_capacity(where: str, capacity: int | None, clients: int, trials: int, rate: Any) -> int:
    """Check a capacity; choose one if it is None.

    Args:
        where: the function that was called, for messages.
        capacity: the capacity, in 1..clients, or None.
        clients: the number of clients.
        trials: the number of clients that are drawn independently.
        rate: the probability with which each of them is drawn.
    """
    if capacity is None:
        capacity = tail_capacity(trials, rate, where)
    hint = "Leave capacity out: it is then chosen from the rate."
    checks.require_integer(where, hint, max_value=clients, capacity=capacity)
    return int(capacity)


def tail_capacity(trials: int, rate: Any, where: str) -> int:
    """Return a capacity that Binomial(trials, rate) exceeds with negligible probability.

    This is the smallest number whose probability of overflow is below OVERFLOW / HORIZON. If that
    number is more than half of `trials`, it is `trials`, which cannot overflow.

    Args:
        trials: the number of clients that are drawn independently.
        rate: the probability with which each of them is drawn; not traced.
        where: the function that was called, for messages.
    """
    if not checks.is_concrete(rate):
        checks.fail(
            where,
            "capacity=... when the rate is traced",
            "capacity=None",
            "A program's shapes cannot depend on a traced number.",
        )
    from scipy import stats  # takes half a second, so not at the top

    # The program uses the nearest float32, so widen the rate by one part in 1e6. Bisect, because
    # `isf` has no accuracy below 1e-16.
    distribution = stats.binom(trials, min(1.0, float(rate) * (1 + 1e-6)))
    low, high = 0, trials
    while low < high:
        middle = (low + high) // 2
        is_enough = distribution.sf(middle) < OVERFLOW / HORIZON
        low, high = (low, middle) if is_enough else (middle + 1, high)
    return low if 2 * low <= trials else trials


@named("sampling.poisson")
def _draw_poisson(key, *, rate, clients, capacity):
    words = jax.random.bits(key, (clients,), jnp.uint32)
    return chosen_cohort(uniform.below(words, rate), capacity)


@named("sampling.poisson_few")
def _draw_poisson_few(key, *, rate, steps, clients, capacity):
    """Draw the number of clients, and then a subset of that size.

    This needs random words in proportion to the cohort, not to the population.
    """
    count_key, subset_key = jax.random.split(key)
    high, low = jax.random.bits(count_key, (2,), jnp.uint32)
    count = ((steps[0] < high) | ((steps[0] == high) & (steps[1] <= low))).sum(dtype=jnp.int32)
    taken = jnp.minimum(count, capacity)
    chosen = uniform.sparse_subset(subset_key, clients, capacity, taken)
    ids = jnp.where(jnp.arange(capacity) < taken, chosen, clients)
    return as_cohort(ids, clients)._replace(overflow=count - taken)


def binomial_steps(clients: int, rate: ArrayLike, capacity: int) -> jax.Array:
    """Return the distribution function of Binomial(clients, rate) at 0..capacity.

    Args:
        clients: the number of clients.
        rate: the probability with which each of them is drawn; rounded to float32.
        capacity: the last number at which the function is returned.

    Returns:
        UInt32[2, capacity + 1], the high and the low words of probabilities in units of 2^-64.
    """
    from scipy import stats

    distribution = stats.binom(clients, np.float64(np.asarray(rate, np.float32)))
    probability = distribution.cdf(np.arange(capacity + 1))
    # A probability that float64 rounds to 1 becomes 1 - 2^-64, not 1 - 2^-53, so an overflow is
    # rarer than 1e-18.
    is_below_one = probability < 1
    scaled = np.full(capacity + 1, 2**64 - 1, np.uint64)
    scaled[is_below_one] = np.floor(probability[is_below_one] * 2.0**64).astype(np.uint64)
    words = scaled >> np.uint64(32), scaled & np.uint64(0xFFFFFFFF)
    return jnp.asarray(np.stack(words).astype(np.uint32))


def poisson(clients: int, rate: ArrayLike, capacity: int | None = None) -> Sampler:
    """Include each client independently with probability `rate`.

    Other Parameters:
        clients: number of clients.
        rate: probability with which a client participates in a round, in (0, 1].
        capacity: number of slots of a cohort. None chooses it such that an overflow is very
            unlikely.

    Privacy:
        Poisson subsampling under add_remove of a client, at `rate` rounded to float32. From 2^15
        clients on, the size of a cohort is drawn from its distribution, which is computed in
        float64 up to an error of 1e-12. The accountant adds the probability of an overflow to
        delta.

    Raises:
        ValueError: if rate is outside (0, 1] or capacity is not in 1..clients.

    References:
        Abadi et al., CCS 2016, section 3.1.

    Example:
        >>> c = poisson(10, 0.5, 10).draw(jax.random.key(0))
        >>> bool(((c.times_drawn > 0) == (c.ids < 10)).all())
        True
    """
    checks.require_integer("sampling.poisson", clients=clients)
    clients = int(clients)
    checks.require_fraction("sampling.poisson", single=True, rate=rate)
    capacity = resolve_capacity("sampling.poisson", capacity, clients, clients, rate)
    rate = checks.as_scalar(rate)
    draw, data = _draw_poisson, dict(rate=rate)
    if _is_sparse(clients, capacity) and checks.is_concrete(rate):
        draw, data = _draw_poisson_few, data | dict(steps=binomial_steps(clients, rate, capacity))
    return Sampler(
        Fn(draw, data, dict(clients=clients, capacity=capacity)),
        rate * clients,
        rate=rate,
        scheme="poisson",
        clients=clients,
        capacity=capacity,
    )


def room_for(mean: float) -> int:
    """Return the mean plus five standard deviations of a Poisson sample, rounded up.

    Example:
        >>> room_for(100.0)
        150
    """
    return math.ceil(mean + 5 * math.sqrt(mean))


@named("sampling.truncated_poisson")
def _draw_truncated(key, *, rate, clients, capacity):
    words = jax.random.bits(key, (clients,), jnp.uint32)
    chosen = uniform.below(words, rate)
    # The words of included clients are uniform, so those with the smallest words are a uniform
    # subset.
    first = jax.lax.top_k(jnp.where(chosen, ~words | jnp.uint32(1), 0), capacity)[1]
    ids = jnp.sort(jnp.where(chosen[first], first, clients).astype(jnp.int32))
    return as_cohort(ids, clients)


def truncated_poisson(clients: int, rate: ArrayLike, capacity: int | None = None) -> Sampler:
    """Include each client independently with probability `rate`, but at most `capacity` clients.

    If more clients are drawn, a uniform subset of them participates. Unlike with `poisson`, a
    cohort has few empty slots and cannot overflow. The default capacity costs the same epsilon as
    `poisson`; a capacity of the mean plus two standard deviations costs about twice as much.

    Other Parameters:
        clients: number of clients, which is public.
        rate: probability with which a client participates in a round, in (0, 1].
        capacity: number of slots of a cohort. None means the mean plus five standard deviations.

    Privacy:
        The guarantee is for zero_out or replace_one of a client. add_remove is not possible,
        because an added client changes which of the others are left out.

    Raises:
        ValueError: if rate is outside (0, 1] or capacity is not in 1..clients.

    References:
        Ganesh, arXiv:2508.15089 (2025).

    Example:
        >>> draws = [truncated_poisson(100, 0.1, 12).draw(jax.random.key(s)) for s in range(20)]
        >>> max(int(c.times_drawn.sum()) for c in draws)
        12
    """
    where = "sampling.truncated_poisson"
    checks.require_integer(where, clients=clients)
    checks.require_fraction(where, single=True, rate=rate)
    if capacity is None:
        if not checks.is_concrete(rate):
            checks.fail(where, "capacity=... when the rate is traced", "capacity=None")
        capacity = min(clients, room_for(clients * float(np.asarray(rate))))
    capacity = resolve_capacity(where, capacity, clients, clients, rate)
    clients, rate = int(clients), checks.as_scalar(rate)
    return Sampler(
        Fn(_draw_truncated, dict(rate=rate), dict(clients=clients, capacity=capacity)),
        rate * clients,
        rate=rate,
        scheme="truncated_poisson",
        clients=clients,
        capacity=capacity,
    )


@record
class Responders(Sampler):
    """A sampler with the latencies of clients as fields.

    Latencies are thus part of the identity of a plan, so plans with different latencies have
    different noise.
    """

    latency: Array | None = None  # [C], the mean time of an answer, in any unit
    jitter: Array | None = None  # the random fraction of that time


@named("sampling.first_responders")
def _draw_responders(key, *, latency, jitter, clients, cohort):
    # Fast answers come from small words, where float32 has more digits; otherwise the fastest of
    # many clients would tie.
    words = jnp.invert(jax.random.bits(key, (clients,), jnp.uint32))
    exponential = -jnp.log1p(-(words.astype(jnp.float32) + 0.5) * 2.0**-32)
    times = latency * (1 - jitter + jitter * exponential)
    ids = jnp.arange(clients, dtype=jnp.int32)
    return as_cohort(jax.lax.sort((times, words, ids), num_keys=2)[2][:cohort], clients)


def first_responders(
    clients: int,
    cohort: int,
    latency: ArrayLike | None = None,
    *,
    jitter: ArrayLike = 1.0,
    latency_spread: Annotated[float | None, Setting(default=3.0)] = None,
) -> Sampler:
    """Select the `cohort` clients that answer first in each round.

    A client answers after the time latency * (1 - jitter + jitter * E), whose mean is `latency`.
    Here E ~ Exp(1) is drawn independently for each client and round. Fast clients participate more
    often; if jitter is small, the same clients participate in every round. Weights do not correct
    for this, so the release is biased towards fast clients.

    Without `latency` all clients are equally fast and their order is random, so the sampler is
    `without_replacement`. Equal latencies also draw the same cohorts as `without_replacement`.

    Args:
        latency: Float[C] > 0, the mean time in which each client answers, in any unit. None means
            that all clients are equally fast, unless `latency_spread` is given.
        jitter: the random fraction of the time in which a client answers, in (0, 1].
        latency_spread: mean latency of the slowest client divided by that of the fastest, instead
            of `latency`.

    Other Parameters:
        clients: number of clients.
        cohort: number of clients per round, which is the number of slots.

    Privacy:
        If all clients are equally fast, as `without_replacement`. Otherwise the guarantee is for
        replace_one of a client, without amplification: the probability that a client participates
        may be 1, so every round counts for every client. Latencies are assumed public.

    Raises:
        ValueError: if cohort is not in 1..clients, or another argument is out of range.

    References:
        Chen et al., IEEE TKDE 2024, Algorithm 1 ("the first r clients that respond"). Lee et al.,
        IEEE Trans. Information Theory 2018, for shifted exponential latencies.

    Example:
        >>> sampler = first_responders(4, 2, latency=[9.0, 1.0, 9.0, 1.0], jitter=0.1)
        >>> sorted(sampler.draw(jax.random.key(0)).ids.tolist()), sampler.scheme
        ([1, 3], 'first_responders')
    """
    where = "sampling.first_responders"
    _check_cohort(where, clients, cohort)
    checks.require_fraction(where, single=True, jitter=jitter)
    if latency_spread is not None:
        checks.require_positive(where, single=True, latency_spread=latency_spread)
        if latency is not None:
            checks.fail(where, "either latency or latency_spread", "both")
        latency = np.geomspace(1, latency_spread, clients)
    if latency is None:
        return without_replacement(clients, cohort)
    checks.require_positive(where, latency=latency)
    latency, jitter = jnp.asarray(latency, jnp.float32), checks.as_scalar(jitter)
    if latency.shape != (clients,):
        checks.fail(where, f"one latency for each of {clients} clients", f"shape {latency.shape}")
    data: dict[str, Any] = dict(latency=latency, jitter=jitter)
    return Responders(
        Fn(_draw_responders, data, dict(clients=clients, cohort=cohort)),
        checks.as_scalar(cohort),
        scheme="first_responders",
        clients=clients,
        capacity=cohort,
        **data,
    )
