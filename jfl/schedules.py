"""Schedules: learning rates, and other numbers, that change during training.

A schedule is a `Fn` of a clock, an integer that may be traced.  For the `lr` of a client, the clock
is round * steps + step; for that of the server, it is the round.  `every` is the number of ticks of
the clock that share a value: with every = steps, a client's rate is constant within a round.
Floats are leaves of the pytree, so a sweep over them is a vmap.  Integers are static, so changing
one recompiles.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .core import checks
from .core.records import Fn, named

__all__ = [
    "inverse_sqrt",
    "inverse",
    "exponential",
    "from_optax",
]


@named("schedules.inverse_sqrt")
def _inverse_sqrt(clock, *, lr, offset, every):
    return lr / jnp.sqrt(clock // every + offset)


def inverse_sqrt(lr: ArrayLike, every: int = 1, offset: ArrayLike = 1.0) -> Fn:
    """Return the schedule lr / sqrt(clock // every + offset), which starts at lr if offset = 1.

    Shapes:
        clock Int[] -> Float[].

    Raises:
        ValueError: Unless lr and offset are > 0, and every is an integer >= 1.

    References:
        Li, Wang, Wu, 2025 (lr 0.04 and 0.01 in experiments); Chen et al., 2024 (every = steps in
        experiments).

    Example:
        >>> [round(float(inverse_sqrt(0.04, every=5)(t)), 4) for t in (0, 4, 5, 15)]
        [0.04, 0.04, 0.0283, 0.02]
    """
    return Fn(_inverse_sqrt, *_bound("schedules.inverse_sqrt", every, lr=lr, offset=offset))


@named("schedules.inverse")
def _inverse(clock, *, lr, offset, every):
    return lr / (clock // every + offset)


def inverse(lr: ArrayLike, every: int = 1, offset: ArrayLike = 1.0) -> Fn:
    """Return the schedule lr / (clock // every + offset).

    Shapes and errors are as in `inverse_sqrt`.

    Example:
        >>> [round(float(inverse(0.04)(t)), 4) for t in (0, 1, 3)]
        [0.04, 0.02, 0.01]
    """
    return Fn(_inverse, *_bound("schedules.inverse", every, lr=lr, offset=offset))


@named("schedules.exponential")
def _exponential(clock, *, initial, decay, total):
    return initial * jnp.power(decay, clock / total)


def exponential(initial: ArrayLike, decay: ArrayLike, total: int) -> Fn:
    """Return the schedule initial * decay^(clock / total).

    Its value after `total` ticks is initial * decay.

    Shapes:
        clock Int[] -> Float[].

    Raises:
        ValueError: Unless initial and decay are > 0, and total is an integer >= 1.

    References:
        Du et al., 2021, Dynamic DP-SGD (clip norms and noise multipliers).

    Example:
        >>> [round(float(exponential(1.0, 0.25, 10)(t)), 4) for t in (0, 5, 10)]
        [1.0, 0.5, 0.25]
    """
    where = "schedules.exponential"
    checks.require_positive(where, single=True, initial=initial, decay=decay)
    checks.require_integer(where, total=total)
    return Fn(
        _exponential,
        dict(initial=checks.as_scalar(initial), decay=checks.as_scalar(decay)),
        dict(total=total),
    )


@named("schedules.ready")
def _ready(clock, *, schedule, every):
    return schedule(clock // every)


def _is_factory(value) -> bool:
    """Return whether a call with a number of steps returns a schedule instead of a rate."""
    try:
        return callable(value(0))
    except TypeError:  # it needs more arguments
        return True


@named("schedules.from_optax")
def _from_optax(clock, *, factory, every, fixed, **numbers):
    return factory(**dict(fixed), **numbers)(clock // every)


def from_optax(factory: Callable, every: int = 1, **arguments: Any) -> Fn:
    """Return a schedule of `optax.schedules`.

    Args:
        factory: a function that makes a schedule, such as `optax.cosine_decay_schedule`; or a
            finished schedule, whose numbers are fixed.
        every: the number of ticks of the clock that share a value.
        arguments: the arguments of the factory.  Floats are leaves if the factory accepts traced
            floats; changing another argument recompiles.

    Shapes:
        clock Int[] -> Float[].

    Raises:
        ValueError: Unless every is an integer >= 1.

    Example:
        >>> import optax
        >>> rate = from_optax(optax.cosine_decay_schedule, init_value=0.1, decay_steps=10)
        >>> [round(float(rate(t)), 4) for t in (0, 5, 10)]
        [0.1, 0.05, 0.0]
    """
    checks.require_integer("schedules.from_optax", every=every)
    if not arguments and not _is_factory(factory):
        return Fn(_ready, {}, dict(schedule=factory, every=every))
    numbers = {k: checks.as_scalar(v) for k, v in arguments.items() if isinstance(v, float)}
    fixed = tuple((k, v) for k, v in sorted(arguments.items()) if k not in numbers)
    schedule = Fn(_from_optax, numbers, dict(factory=factory, every=every, fixed=fixed))
    try:
        jax.eval_shape(lambda leaves: Fn(_from_optax, leaves, schedule.static)(0), numbers)
    except jax.errors.ConcretizationTypeError:  # it decides by their values
        fixed = tuple(sorted(arguments.items()))
        return Fn(_from_optax, {}, dict(factory=factory, every=every, fixed=fixed))
    return schedule


# --- parts


def _bound(where, every, **numbers):
    checks.require_positive(where, single=True, **numbers)
    checks.require_integer(where, every=every)
    return {name: checks.as_scalar(value) for name, value in numbers.items()}, dict(every=every)
