"""Noise that is correlated over rounds: later rounds partly cancel the noise of earlier ones.

A strategy, a lower-triangular matrix C, determines the correlation.  With z_t the fresh normals of
round t, round t releases its sum plus std * (C^-1 z)_t.  Sums over rounds, which are what training
accumulates, then contain less noise than with independent noise.  All rounds together are one
Gaussian release of C times the sums of the rounds.

The fresh normals of a round depend only on the number of the round, so they can be drawn again.  A
strategy whose C^-1 has few bands draws those of earlier rounds again and needs no memory.  Other
strategies keep buffers of the size of a release.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...core import checks, pytrees
from ...core.errors import NotAnalysable
from ...core.pytrees import Array, Tree
from ...core.records import Fn, Mechanism, record
from .stages import Stage, as_number, gaussian
from .strategies import Strategy


@record
class Buffers:
    """The buffers of a strategy: leaves [memory, ...] shaped like a release.

    They are in units of the standard deviation of fresh noise.
    """

    held: Any


def correlated(
    noise_multiplier: ArrayLike, strategy: Strategy, *, generator: str = "philox"
) -> Stage:
    """Add noise that is correlated over rounds to the sums of all rounds, instead of `gaussian`.

    Args:
        noise_multiplier: standard deviation of the fresh noise of a round / sensitivity of one
            round's sum, > 0; with strategies.identity this is gaussian(noise_multiplier).  If a
            paper divides by the sensitivity of the whole run, multiply its value by
            strategy.sensitivity(participations, separation).
        strategy: a strategy of jfl.strategies, for at least as many rounds as will run.
        generator: as in `gaussian`.

    Privacy:
        All rounds together are one Gaussian release, even if the data of a round depends on earlier
        releases, with noise multiplier noise_multiplier / strategy.sensitivity(...).  The sampler
        determines how often a client participates, and how far apart.  In `release`, this protects
        against third parties only: an observer of the uploads of a round sees them without noise.
        In `upload`, each client has an independent series of noise, which protects against every
        observer of its uploads.  A run that continues under another plan starts a new series of
        noise.

    Raises:
        ValueError: unless noise_multiplier is one number > 0; in any chain except `release` and,
            for strategies without buffers, `upload`; or if clip norms or weights change over
            rounds.

    References:
        Kairouz et al., ICML 2021; Denisov et al., NeurIPS 2022; Choquette-Choo et al., ICML 2023.

    Example:
        >>> import jfl
        >>> noise = jfl.correlated(1.0, jfl.strategies.inverse_banded(100, 4))
        >>> release = jfl.chain(jfl.clip_l2(1.0), jfl.total(), noise, jfl.divide(10))
    """
    where = "correlated"
    if not isinstance(strategy, Strategy):  # pyright: ignore[reportUnnecessaryIsInstance]  # of a user
        checks.fail(where, "a strategy of jfl.strategies", checks.short_repr(strategy))
    hint = "Pass one noise multiplier for all rounds."
    value = as_number(where, hint, noise_multiplier=noise_multiplier)
    stage = gaussian(value, generator=generator)
    return dataclasses.replace(stage, name=where, strategy=strategy)


def strategy_of(mechanism: Mechanism | None) -> Strategy | None:
    """Return the strategy of a mechanism's noise; None if its noise is independent."""
    stages = mechanism.stages if mechanism is not None else ()
    return next((s.strategy for s in stages if s.strategy is not None), None)


def check_plan(
    where: str,
    upload: Mechanism | None,
    release: Mechanism,
    private: Sequence[Mechanism | None],
    weights: Any,
) -> None:
    """Reject a plan in which correlated noise is used where it has no guarantee.

    The guarantee treats all rounds together as one Gaussian release, so clip norms, maps
    and, in `release`, weights must be the same in every round.  In `upload`, the strategy must not
    need memory: clients draw the noise of earlier rounds again and do not store it.

    Args:
        where: the name of the caller, for the message.
        upload: the chain of uploads; None if there is none.
        release: the chain of releases.
        private: the chains of private gradients, whose noise must not be correlated.
        weights: the weights of clients, which a release with correlated noise requires to be
            constant.
    """
    if any(map(strategy_of, private)):
        expected = "correlated noise in release or upload only"
        checks.fail(where, expected, "it in private_grad", "Use gaussian.")
    strategy = strategy_of(upload)
    if strategy is not None and strategy.memory:
        checks.fail(
            where,
            "a strategy that regenerates earlier noise for uploads",
            f"{strategy!r}, for which each client would store {strategy.memory} buffers",
            "Use inverse_banded, tree, restarted, square_root or dense.",
        )
    for mechanism in (upload, release):
        stages = mechanism.stages if mechanism and strategy_of(mechanism) else ()
        changes = any(s.schedules() or s.state is not None for s in stages)
        if changes or (stages and mechanism is release and isinstance(weights, Fn)):
            checks.fail(  # the noise of a round is also part of other rounds
                where,
                "a clip norm, weights and maps that are the same in every round, with correlated "
                "noise",
                "one that changes over rounds",
                "Use gaussian, or make them constant; a map with each_round=False.",
            )


def initial_buffers(strategy: Strategy, like: Tree) -> Buffers:
    """Return the initial buffers of a strategy with memory: zeros.

    Args:
        strategy: the strategy.
        like: the sum of a round; each of its leaves gets a buffer Float32[memory, ...].
    """
    zeros = lambda x: jnp.zeros((strategy.memory, *x.shape), jnp.float32)
    return Buffers(pytrees.map(zeros, like))


def reset_buffers_if(state: Any, other: Any) -> Any:
    """Return the state of a mechanism, with buffers of zeros if `other` is True.

    Args:
        state: the state of the mechanism.
        other: Bool[], whether another plan begins.
    """
    if not isinstance(state, Buffers) or (checks.is_concrete(other) and not np.any(other)):
        return state
    return pytrees.map(lambda x: jnp.where(other, jnp.zeros((), x.dtype), x), state)


def fit_buffers(state: Any, fresh: Any) -> Any:
    """Return the state with which a run continues under another plan.

    Args:
        state: the state of the mechanism under the old plan.
        fresh: the initial state of the new plan, or its shapes.  If its buffers have other shapes
            than those of `state`, the result is zero buffers of the new shapes: another plan begins
            with new noise.
    """
    is_buffers = all(isinstance(v, Buffers) or jax.tree.leaves(v) == [] for v in (state, fresh))
    shapes, new_shapes = (jax.tree.map(lambda x: (x.shape, x.dtype), v) for v in (state, fresh))
    if not is_buffers or shapes == new_shapes:
        return state
    return pytrees.map(lambda x: jnp.zeros(x.shape, x.dtype), fresh)


def mix(
    strategy: Strategy, fresh: Callable[[Array], Tree], round_: Array, state: Any
) -> tuple[Tree, Any]:
    """Return the noise of a round, in units of the standard deviation of fresh noise.

    Args:
        strategy: the strategy.
        fresh: a function from the number of a round to its fresh normals, float32.
        round_: the number of this round.
        state: from `initial_buffers`, or from the previous round.

    Returns:
        A pytree like the fresh normals, nan in rounds that the strategy does not cover; and the
        state for the next round.
    """
    covered = jnp.where(round_ < strategy.rounds, jnp.float32(1), jnp.nan)
    if strategy.memory:
        leaves, treedef = jax.tree.flatten(fresh(round_))
        buffers = jax.tree.leaves(state.held)
        mixed = [strategy.mix(z, held) for z, held in zip(leaves, buffers, strict=True)]
        state = Buffers(treedef.unflatten([held for _, held in mixed]))
        return treedef.unflatten([covered * x for x, _ in mixed]), state
    index, weight, count = strategy.draws(round_)
    first = pytrees.map(lambda z: covered * weight[0] * z, fresh(index[0]))
    if len(index) == 1:
        return first, state

    def add_earlier(k: Array, total: Tree) -> Tree:
        return pytrees.map(lambda x, z: x + weight[k] * z, total, fresh(index[k]))

    if strategy.is_steady:  # a static trip count avoids waiting for the host
        weight, count = jnp.where(jnp.arange(len(index)) < count, weight, 0), len(index)
    with jax.named_scope("earlier_noise"):  # tools find the loop in compiled programs by this name
        return jax.lax.fori_loop(1, count, add_earlier, first), state


def require_enough_rounds(where: str, mechanism: Mechanism | None, rounds: int) -> None:
    """Reject more rounds than the strategy of a mechanism covers.

    Args:
        where: the name of the caller, for the message.
        mechanism: a chain; one without a strategy is accepted.
        rounds: the number of rounds.
    """
    strategy = strategy_of(mechanism)
    if strategy is not None and rounds > strategy.rounds:
        checks.fail(
            where,
            f"at most the {strategy.rounds} rounds of the strategy of correlated noise, "
            f"{strategy.describe()}",
            f"{rounds}",
            "Make the strategy for as many rounds as will run.",
            error=NotAnalysable,
        )
