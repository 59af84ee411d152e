"""Samplers in which groups of clients participate in rotation.

The participations of a client are several rounds apart. Correlated noise needs such samplers: the
further apart participations are, the smaller their joint effect is. The function `draw(key, round)`
of a sampler returns a Cohort, where `key` is the same in all rounds of a run. Groups depend only on
the seed.
"""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..core import checks
from ..core.options import Setting
from ..core.records import Cohort, Fn, Sampler, named
from . import uniform
from .clients import as_cohort, chosen_cohort, resolve_capacity

__all__ = ["min_separation", "cyclic_poisson", "random_allocation", "balls_in_bins"]
Separation = Annotated[int, Setting(default=2)]
Epoch = Annotated[int, Setting(default=2)]
# Groups are drawn with the key of this number, which no round has.
GROUP_KEY = 2**32 - 1


def _block_shifts(key, clients, separation):
    """Return Int32[blocks], a random shift for each block of `separation` consecutive clients.

    Client i is in group (i + shift of its block) mod `separation`, so that every group gets one
    client of each block. Groups therefore differ in size by at most one, and similar clients with
    consecutive numbers are spread over the groups.
    """
    blocks = -(-clients // separation)
    return jax.random.randint(
        jax.random.fold_in(key, GROUP_KEY), (blocks,), 0, separation, jnp.int32
    )


@named("sampling.min_separation")
def _draw_separated(key: jax.Array, round_: ArrayLike, *, clients, cohort, separation) -> Cohort:
    blocks = -(-clients // separation)
    position = (round_ % separation - _block_shifts(key, clients, separation)) % separation
    member = jnp.arange(blocks, dtype=jnp.int32) * separation + position
    # The last block may be shorter; positions without a client are drawn last.
    words = jax.random.bits(jax.random.fold_in(key, round_), (blocks,), jnp.uint32)
    words = jnp.where(member < clients, words | jnp.uint32(1), 0)
    return as_cohort(member[jax.lax.top_k(words, cohort)[1]], clients)


def min_separation(clients: int, cohort: int, separation: Separation) -> Sampler:
    """Select cohorts of fixed size; participations of a client are `separation` rounds apart.

    Clients are assigned to `separation` groups at random, once per run. Round t draws its cohort
    from group t mod `separation`, uniformly and without replacement. With cohort = clients /
    separation every client participates exactly once in `separation` rounds.

    Args:
        separation: minimum number of rounds from one participation of a client to its next. If it
            does not divide the number of clients, the sizes of groups differ by one, so clients
            participate with slightly different probabilities.

    Other Parameters:
        clients: number of clients.
        cohort: number of clients per round, which is the number of slots; at most clients //
            separation.

    Privacy:
        The guarantee is for replace_one or zero_out of a client, without amplification by sampling.
        A client participates in at most one of any `separation` consecutive rounds.

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
    hint = "1 is sampling.without_replacement."
    checks.require_integer(where, hint, min_value=2, max_value=clients, separation=separation)
    hint = "A group has clients // separation clients: lower separation or cohort."
    checks.require_integer(where, hint, max_value=clients // separation, cohort=cohort)
    fixed: dict[str, Any] = dict(clients=int(clients), separation=int(separation))
    return Sampler(
        Fn(_draw_separated, static=dict(fixed, cohort=int(cohort))),
        checks.as_scalar(cohort),
        scheme="min_separation",
        capacity=int(cohort),
        **fixed,
    )


@named("sampling.cyclic_poisson")
def _draw_cyclic(key, round_, *, rate, clients, capacity, separation):
    groups = jax.random.bits(jax.random.fold_in(key, GROUP_KEY), (clients,), jnp.uint32)
    words = jax.random.bits(jax.random.fold_in(key, round_), (clients,), jnp.uint32)
    own = groups % jnp.uint32(separation) == round_ % separation
    return chosen_cohort(own & uniform.below(words, rate), capacity)


def cyclic_poisson(
    clients: int, rate: ArrayLike, separation: Separation, capacity: int | None = None
) -> Sampler:
    """Include each client of one group with probability `rate`, with groups in rotation.

    Each client is assigned to one of `separation` groups, independently and once per run. Round t
    uses group t mod `separation`. The expected cohort is rate * clients / separation.

    Args:
        separation: number of rounds from one possible participation of a client to its next.

    Other Parameters:
        clients: number of clients.
        rate: probability with which a client participates in a round of its group, in (0, 1].
        capacity: number of slots of a cohort. None chooses it such that an overflow is very
            unlikely.

    Privacy:
        Poisson subsampling at `rate` in one of `separation` rounds, under add_remove of a client.
        This also holds if the noise is correlated over at most `separation` rounds. The accountant
        adds the probability of an overflow to delta.

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
    hint = "1 is sampling.poisson."
    checks.require_integer(where, hint, min_value=2, max_value=clients, separation=separation)
    checks.require_fraction(where, single=True, rate=rate)
    number: Any = rate
    capacity = resolve_capacity(where, capacity, clients, clients, number / separation)
    clients, separation, rate = int(clients), int(separation), checks.as_scalar(rate)
    fixed: dict[str, Any] = dict(clients=clients, capacity=capacity, separation=separation)
    return Sampler(
        Fn(_draw_cyclic, dict(rate=rate), fixed),
        rate * clients / separation,
        rate=rate,
        scheme="cyclic_poisson",
        **fixed,
    )


@named("sampling.random_allocation")
def _draw_allocated(key, round_, *, clients, capacity, epoch):
    # The number of the epoch would occur again if a run continues with epochs of another length.
    first_round = round_ - round_ % epoch
    epoch_key = jax.random.fold_in(jax.random.fold_in(key, GROUP_KEY), first_round)
    words = jax.random.bits(epoch_key, (clients,), jnp.uint32)
    return chosen_cohort(words % jnp.uint32(epoch) == round_ % epoch, capacity)


def random_allocation(clients: int, epoch: Epoch, capacity: int | None = None) -> Sampler:
    """Let each client participate in one random round of every `epoch` rounds.

    Clients draw their rounds independently of each other and of earlier epochs. As with shuffling,
    every client participates exactly once per epoch, but privacy is amplified about as much as by
    Poisson sampling at rate 1 / epoch. The literature also lets a client draw k random rounds out
    of t. Use epochs of t // k rounds instead, for which the proved epsilon is the same.

    Args:
        epoch: number of rounds in which each client participates once.

    Other Parameters:
        clients: number of clients.
        capacity: number of slots of a cohort. None chooses it such that an overflow is very
            unlikely.

    Privacy:
        The guarantee is for add_remove or zero_out of a client. The rounds of an epoch are one
        release, in which a client changes one secret round. The bound for scalar contributions
        applies: since a client participates once per epoch, its contribution can be rotated to a
        fixed direction, even if it depends on all earlier releases. An incomplete epoch counts as a
        whole one. The accountant adds the probability of an overflow to delta.

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
    words = jax.random.bits(jax.random.fold_in(key, GROUP_KEY), (clients,), jnp.uint32)
    return chosen_cohort(words % jnp.uint32(epoch) == round_ % epoch, capacity)


def balls_in_bins(clients: int, epoch: Epoch, capacity: int | None = None) -> Sampler:
    """Let each client participate in every round t for which t mod `epoch` is its random bin.

    Each client draws one of `epoch` bins, once per run. The same clients therefore always
    participate together, `epoch` rounds apart.

    Args:
        epoch: number of bins, and of rounds from one participation of a client to its next.

    Other Parameters:
        clients: number of clients.
        capacity: number of slots of a cohort. None chooses it such that an overflow is very
            unlikely.

    Privacy:
        The guarantee is for add_remove or zero_out of a client. All rounds of a run are one
        release, in which a client changes the rounds of one secret bin. Over a few epochs this
        amplifies privacy; over many epochs, `random_allocation` amplifies it more. With correlated
        noise there is no amplification, but participations are `epoch` rounds apart.

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
    """Check the arguments of a sampler with epochs, and return it; `more` are further fields."""
    where = f"sampling.{scheme}"
    checks.require_integer(where, clients=clients)
    checks.require_integer(
        where, "1 is sampling.full.", min_value=2, max_value=clients, epoch=epoch
    )
    capacity = resolve_capacity(where, capacity, clients, clients, 1 / epoch)
    numbers: dict[str, Any] = dict(
        clients=int(clients), capacity=capacity, epoch=int(epoch), **more
    )
    return Sampler(
        Fn(draw, static=numbers), checks.as_scalar(clients / epoch), scheme=scheme, **numbers
    )
