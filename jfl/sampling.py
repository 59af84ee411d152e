"""Who takes part in a round: `draw(key) -> Cohort`, and what an accountant may assume about it.

A capacity is what a program reserves; a draw that does not fit is counted in Health.overflow and voids the claim.
Capacities are chosen so that this has probability below OVERFLOW in any run of HORIZON draws.
"""
import jax
import jax.numpy as jnp
import numpy as np

from . import check
from .core import Cohort, Fn, Sampler

OVERFLOW = 1e-12
HORIZON = 1_000_000
__all__ = ["full", "without_replacement", "with_replacement", "poisson"]


def adjacency(sampler: Sampler) -> str:
    """The neighbours the scheme's amplification speaks of."""
    return "add_remove" if sampler.scheme == "poisson" else "replace_one"


def _cohort(ids, clients, overflow=0):
    return Cohort(ids, (ids < clients).astype(jnp.int32), jnp.zeros_like(ids), jnp.asarray(overflow, jnp.int32))


def _draw_full(key, *, clients):
    return _cohort(jnp.arange(clients), clients)


def full(clients: int) -> Sampler:
    """Every client, every round.

    Privacy  no amplification; either adjacency.
    """
    check.whole("sampling.full", clients=clients)
    return Sampler(Fn(_draw_full, static=dict(clients=clients)), check.scalar(clients), scheme="full",
                   clients=clients, capacity=clients)


def _draw_without(key, *, clients, cohort):
    return _cohort(jax.lax.top_k(jax.random.bits(key, (clients,)), cohort)[1].astype(jnp.int32), clients)


def without_replacement(clients: int, cohort: int) -> Sampler:
    """A uniform cohort of exactly `cohort` clients.

    Shapes   K = cohort.
    Privacy  replace_one of one client at rate cohort / clients.
    Errors   ValueError if cohort is not in 1..clients.

    >>> sorted(without_replacement(5, 5).draw(jax.random.key(0)).ids.tolist())
    [0, 1, 2, 3, 4]
    """
    check.whole("sampling.without_replacement", clients=clients, cohort=cohort)
    if cohort > clients:
        check.fail("sampling.without_replacement", f"cohort <= clients={clients}", f"cohort={cohort}",
                   "Use sampling.full for everyone, or sampling.with_replacement.")
    return Sampler(Fn(_draw_without, static=dict(clients=clients, cohort=cohort)), check.scalar(cohort),
                   scheme="without_replacement", clients=clients, capacity=cohort)


def _draw_with(key, *, share, clients, cohort, independent):
    if share is None:
        drawn = jax.random.randint(key, (cohort,), 0, clients)
    else:
        edges = jnp.cumsum(share)
        at = jax.random.uniform(key, (cohort,), maxval=edges[-1])
        drawn = jnp.minimum(jnp.searchsorted(edges, at, side="right"), clients - 1)
    drawn = jnp.sort(drawn.astype(jnp.int32))
    first = jnp.searchsorted(drawn, drawn, side="left").astype(jnp.int32)
    turn = jnp.arange(cohort, dtype=jnp.int32) - first
    if independent:
        return Cohort(drawn, jnp.ones(cohort, jnp.int32), turn, jnp.zeros((), jnp.int32))
    count = jnp.searchsorted(drawn, drawn, side="right").astype(jnp.int32) - first
    head = turn == 0
    return Cohort(jnp.where(head, drawn, clients), jnp.where(head, count, 0), jnp.zeros_like(turn),
                  jnp.zeros((), jnp.int32))


def with_replacement(clients: int, cohort: int, weights=None, independent: bool = False) -> Sampler:
    """`cohort` independent draws, uniform or with probabilities proportional to `weights`.

    A client drawn m times runs once and counts m times; with `independent` it runs m times, on m draws of batches
    and noise (and releases m times as much about its examples).

    Shapes   K = cohort; weights Float[C].
    Privacy  replace_one of one client that remembers nothing; a client drawn m times is charged for it.
    Errors   ValueError unless weights are C finite numbers > 0.
    """
    check.whole("sampling.with_replacement", clients=clients, cohort=cohort)
    share = None
    if weights is not None:
        check.positive("sampling.with_replacement", weights=weights)
        share = jnp.asarray(weights, jnp.float32)
        if share.shape != (clients,):
            check.fail("sampling.with_replacement", f"one weight for each of {clients} clients", f"shape {share.shape}")
        share = share / share.sum()
    return Sampler(Fn(_draw_with, dict(share=share), dict(clients=clients, cohort=cohort, independent=independent)),
                   check.scalar(cohort), share, scheme="with_replacement", clients=clients, capacity=cohort,
                   independent=independent)


def tail_capacity(trials: int, rate: float, where: str) -> int:
    """The smallest capacity that Binomial(trials, rate) exceeds with probability below OVERFLOW / HORIZON."""
    if not check.concrete(rate):
        check.fail(where, "capacity=... when the rate is traced", "capacity=None",
                   "A program's shapes cannot depend on a traced number.")
    from scipy import stats  # half a second: not at import

    # widened by one part in 1e6: the rate that runs is the nearest float32
    return int(min(trials, stats.binom.isf(OVERFLOW / HORIZON, trials, min(1.0, float(rate) * (1 + 1e-6))) + 1))


def _draw_poisson(key, *, rate, clients, capacity):
    chosen = jax.random.uniform(key, (clients,)) < rate
    ids = jnp.nonzero(chosen, size=capacity, fill_value=clients)[0].astype(jnp.int32)
    return _cohort(ids, clients, jnp.maximum(chosen.sum() - capacity, 0))


def poisson(clients: int, rate, capacity: int | None = None) -> Sampler:
    """Each client joins independently with probability `rate`.

    Shapes   K = capacity.
    Units    rate in (0, 1]; capacity in clients.
    Privacy  add_remove of one client: Poisson subsampling at `rate`, exact while nothing overflows; the accountant
             adds the probability of an overflow to delta.
    Errors   ValueError if rate is outside (0, 1] or capacity is not in 1..clients.
    Source   Abadi et al., CCS 2016, section 3.1.

    >>> c = poisson(10, 0.5, 10).draw(jax.random.key(0))
    >>> bool(((c.count > 0) == (c.ids < 10)).all())
    True
    """
    check.whole("sampling.poisson", clients=clients)
    check.fraction("sampling.poisson", rate=rate)
    if capacity is None:
        capacity = tail_capacity(clients, rate, "sampling.poisson")
    check.whole("sampling.poisson", capacity=capacity)
    if capacity > clients:
        check.fail("sampling.poisson", f"capacity <= clients={clients}", f"capacity={capacity}",
                   "Leave capacity out: it is then chosen from the rate.")
    rate = check.scalar(rate)
    return Sampler(Fn(_draw_poisson, dict(rate=rate), dict(clients=clients, capacity=capacity)), rate * clients,
                   rate=rate, scheme="poisson", clients=clients, capacity=capacity)


def participation(sampler: Sampler) -> np.ndarray:
    """Float[C]: the probability that a client takes part in a round."""
    clients, cohort = sampler.clients, float(sampler.expected)
    if sampler.scheme == "with_replacement":
        share = np.full(clients, 1 / clients) if sampler.share is None else np.asarray(sampler.share, np.float64)
        return -np.expm1(sampler.capacity * np.log1p(-np.minimum(share, 1 - 1e-16)))
    return np.full(clients, 1.0 if sampler.scheme == "full" else cohort / clients)
