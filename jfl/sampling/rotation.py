"""Groups of clients that take turns, so that a client that took part is absent for a while:
`draw(key, round) -> Cohort`, with the key of the run's cohorts.

Correlated noise needs it: what a client adds in one round meets the noise of other rounds, and the
further apart its participations are, the less they add up to.  Groups follow from the seed alone.
"""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..core import checks
from ..core.options import Setting
from ..core.records import Array, Cohort, Fn, Sampler, named
from . import uniform
from .clients import as_cohort, tail_capacity

__all__ = ["min_separation", "cyclic_poisson", "random_allocation", "balls_in_bins"]
Separation = Annotated[int, Setting(default=2)]
Epoch = Annotated[int, Setting(default=2)]
GROUPS = 2**32 - 1  # in place of a round: the key from which groups follow


def group_of(key: jax.Array, clients: int, separation: int) -> Array:
    """Int32[C]: in which of `separation` groups each client is, all of one size but for one client.

    Of `separation` clients in a row each is in another group, so that clients that were sorted by
    something are spread over the groups.
    """
    client = jnp.arange(clients, dtype=jnp.int32)
    return (client % separation + _turned(key, clients, separation)[client // separation]) % (
        separation
    )


def _turned(key, clients, separation):
    """Int32[blocks]: by how much the groups of each block of clients in a row are turned."""
    blocks = -(-clients // separation)
    return jax.random.randint(jax.random.fold_in(key, GROUPS), (blocks,), 0, separation)


@named("sampling.min_separation")
def _draw_separated(key: jax.Array, round_: ArrayLike, *, clients, cohort, separation) -> Cohort:
    blocks = -(-clients // separation)
    turned = _turned(key, clients, separation)
    place = (round_ % separation - turned) % separation
    member = jnp.arange(blocks, dtype=jnp.int32) * separation + place
    # a block may be cut off by the last client: who is not there is drawn last
    words = jax.random.bits(jax.random.fold_in(key, round_), (blocks,), jnp.uint32)
    words = jnp.where(member < clients, words | jnp.uint32(1), 0)
    return as_cohort(member[jax.lax.top_k(words, cohort)[1]], clients)


def min_separation(clients: int, cohort: int, separation: Separation) -> Sampler:
    """A cohort of fixed size whose clients then stay away for `separation` - 1 rounds.

    Clients are dealt to `separation` groups, at random and once for a run; round t draws from group
    t mod `separation`, uniformly and without replacement.  With cohort = clients / separation it is
    a cyclic order in which every client comes once in `separation` rounds.

    Args:
        separation: rounds from one participation of a client to its next, at least.  Where it does
            not divide the number of clients, groups differ by one client, and so a little do the
            chances of clients.

    Other Parameters:
        clients: number of clients.
        cohort: clients of a round, the slots K of a cohort; at most clients // separation.

    Privacy:
        replace_one or zero_out of one client, without amplification: nothing is gained by chance,
        but a client takes part in at most one of `separation` rounds, whatever is drawn.

    Raises:
        ValueError: unless separation >= 2 and cohort is in 1..clients // separation.

    References:
        Kairouz et al., ICML 2021; Choquette-Choo et al., NeurIPS 2023 (b-min-sep participation).

    Example:
        >>> sampler, key = min_separation(6, 2, 3), jax.random.key(0)
        >>> first, again = (set(sampler.draw(key, r).ids.tolist()) for r in (0, 3))
        >>> first == again, first & set(sampler.draw(key, 1).ids.tolist())
        (True, set())
    """
    where = "sampling.min_separation"
    checks.require_integer(where, clients=clients, cohort=cohort)
    _groups(where, clients, separation=separation)
    if cohort > clients // separation:
        checks.fail(
            where,
            f"cohort <= clients // separation = {clients // separation}",
            f"cohort={cohort}",
            "A group has no more clients: lower the separation or the cohort.",
        )
    fixed = dict(clients=int(clients), cohort=int(cohort), separation=int(separation))
    return Sampler(
        Fn(_draw_separated, static=fixed),
        checks.as_scalar(cohort),
        scheme="min_separation",
        clients=int(clients),
        capacity=int(cohort),
        separation=int(separation),
    )


@named("sampling.cyclic_poisson")
def _draw_cyclic(key, round_, *, rate, clients, capacity, separation):
    groups = jax.random.bits(jax.random.fold_in(key, GROUPS), (clients,), jnp.uint32)
    words = jax.random.bits(jax.random.fold_in(key, round_), (clients,), jnp.uint32)
    own = groups % jnp.uint32(separation) == round_ % separation
    chosen = own & uniform.below(words, rate)
    ids = jnp.nonzero(chosen, size=capacity, fill_value=clients)[0].astype(jnp.int32)
    return as_cohort(ids, clients, jnp.maximum(chosen.sum() - capacity, 0))


def cyclic_poisson(
    clients: int, rate: ArrayLike, separation: Separation, capacity: int | None = None
) -> Sampler:
    """Each client belongs to one of `separation` groups, on its own and once for a run; in round t
    each client of group t mod `separation` joins independently with probability `rate`.

    The expected cohort is rate * clients / separation, as of `poisson(clients, rate / separation)`.

    Args:
        separation: rounds from one chance of a client to its next.

    Other Parameters:
        clients: number of clients.
        rate: in (0, 1], the probability of a client in a round of its group.
        capacity: clients that a round has room for, the slots K of a cohort; None: so many that a
            draw hardly ever exceeds them.

    Privacy:
        add_remove of one client: Poisson subsampling at `rate` in one of `separation` rounds, also
        where the noise is correlated over at most `separation` rounds; the accountant adds the
        probability of an overflow to delta.

    Raises:
        ValueError: unless rate is in (0, 1], separation >= 2 and capacity in 1..clients.

    References:
        Choquette-Choo et al., NeurIPS 2023, "(Amplified) banded matrix factorization", Theorem 4.

    Example:
        >>> sampler, key = cyclic_poisson(6, 1.0, 2, capacity=6), jax.random.key(0)
        >>> even, odd = (set(sampler.draw(key, r).ids.tolist()) - {6} for r in (0, 1))
        >>> sorted(even | odd), even & odd
        ([0, 1, 2, 3, 4, 5], set())
    """
    where = "sampling.cyclic_poisson"
    checks.require_integer(where, clients=clients)
    _groups(where, clients, separation=separation)
    clients, separation = int(clients), int(separation)
    checks.require_fraction(where, single=True, rate=rate)
    if capacity is None:
        if not checks.is_concrete(rate):
            checks.fail(where, "capacity=... when the rate is traced", "capacity=None")
        number: Any = rate
        capacity = tail_capacity(clients, number / separation, where)
    checks.require_integer(where, capacity=capacity)
    if capacity > clients:
        checks.fail(where, f"capacity <= clients={clients}", f"capacity={capacity}")
    rate = checks.as_scalar(rate)
    fixed = dict(clients=clients, capacity=int(capacity), separation=separation)
    return Sampler(
        Fn(_draw_cyclic, dict(rate=rate), fixed),
        rate * clients / separation,
        rate=rate,
        scheme="cyclic_poisson",
        clients=clients,
        capacity=int(capacity),
        separation=separation,
    )


@named("sampling.random_allocation")
def _draw_allocated(key, round_, *, clients, capacity, epoch):
    number = jax.random.fold_in(jax.random.fold_in(key, GROUPS), round_ // epoch)
    return _in_bin(jax.random.bits(number, (clients,), jnp.uint32), round_, capacity, epoch)


def _in_bin(words, round_, capacity, epoch):
    clients = len(words)
    chosen = words % jnp.uint32(epoch) == round_ % epoch
    ids = jnp.nonzero(chosen, size=capacity, fill_value=clients)[0].astype(jnp.int32)
    return as_cohort(ids, clients, jnp.maximum(chosen.sum() - capacity, 0))


def random_allocation(clients: int, epoch: Epoch, capacity: int | None = None) -> Sampler:
    """Each client takes part once in every `epoch` rounds, in a round that it draws uniformly, on
    its own and anew for each epoch.

    Nobody is left out and nobody comes twice, as in a shuffle, with a gain like that of Poisson
    sampling at rate 1 / epoch.  For k participations in t rounds take epochs of t // k rounds,
    whose proved cost is the same.

    Args:
        epoch: rounds in which each client takes part once.

    Other Parameters:
        clients: number of clients.
        capacity: clients that a round has room for, the slots K of a cohort; None: so many that a
            draw hardly ever exceeds them.

    Privacy:
        add_remove or zero_out of one client.  The releases of an epoch are one: a client moves one
        of them, unseen.  Since a client comes once in it, what it adds may hang on all that was
        released, and is turned to one direction; so the bound is that of numbers.  An epoch that is
        cut off counts whole.  The accountant adds the probability of an overflow to delta.

    Raises:
        ValueError: unless epoch is in 2..clients and capacity in 1..clients.

    References:
        Feldman, Shenfeld, arXiv:2502.08202; Chua et al., 2024 (balls and bins).

    Example:
        >>> sampler, key = random_allocation(6, 3, capacity=6), jax.random.key(0)
        >>> sorted(c for r in range(3) for c in sampler.draw(key, r).ids.tolist() if c < 6)
        [0, 1, 2, 3, 4, 5]
    """
    return _allocated("random_allocation", _draw_allocated, clients, epoch, capacity)


@named("sampling.balls_in_bins")
def _draw_bins(key, round_, *, clients, capacity, epoch, separation):
    words = jax.random.bits(jax.random.fold_in(key, GROUPS), (clients,), jnp.uint32)
    return _in_bin(words, round_, capacity, epoch)


def balls_in_bins(clients: int, epoch: Epoch, capacity: int | None = None) -> Sampler:
    """Each client draws a bin, once for a run, and takes part in round t if t mod `epoch` is its
    bin: always the same clients together, `epoch` rounds apart.

    Args:
        epoch: bins, and rounds from one participation of a client to its next.

    Other Parameters:
        clients: number of clients.
        capacity: clients that a round has room for, the slots K of a cohort; None: so many that a
            draw hardly ever exceeds them.

    Privacy:
        add_remove or zero_out of one client: all its rounds are one release in a bin that nobody
        knows, which is a gain in a few epochs.  Over many, `random_allocation` gains more.  With
        correlated noise it keeps participations apart, without a gain.

    Raises:
        ValueError: unless epoch is in 2..clients and capacity in 1..clients.

    References:
        Choquette-Choo et al., 2025 (balls in bins for correlated noise); Chua et al., 2024.

    Example:
        >>> sampler, key = balls_in_bins(6, 3, capacity=6), jax.random.key(0)
        >>> first, again = (sampler.draw(key, r).ids.tolist() for r in (0, 3))
        >>> first == again
        True
    """
    return _allocated("balls_in_bins", _draw_bins, clients, epoch, capacity, separation=epoch)


def _allocated(scheme, draw, clients, epoch, capacity, **more):
    where = f"sampling.{scheme}"
    checks.require_integer(where, clients=clients)
    _groups(where, clients, epoch=epoch)
    if capacity is None:
        capacity = tail_capacity(clients, 1 / epoch, where)
    checks.require_integer(where, capacity=capacity)
    if capacity > clients:
        checks.fail(where, f"capacity <= clients={clients}", f"capacity={capacity}")
    numbers: dict[str, Any] = dict(
        clients=int(clients), capacity=int(capacity), epoch=int(epoch), **more
    )
    return Sampler(
        Fn(draw, static=numbers), checks.as_scalar(clients / epoch), scheme=scheme, **numbers
    )


def _groups(where, clients, **given):
    ((name, value),) = given.items()
    checks.require_integer(where, **given)
    if not 2 <= value <= clients:
        other = "sampling.poisson" if where.endswith("poisson") else "sampling.without_replacement"
        other = "sampling.full" if name == "epoch" else other
        checks.fail(where, f"2 <= {name} <= clients={clients}", f"{name}={value}", f"1 is {other}.")
