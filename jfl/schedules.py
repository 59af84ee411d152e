"""Learning rates, and other numbers, that change as training goes on.

A schedule is a `Fn` of a clock, a whole number that may be traced.  As a client's `lr` it is called
with round * steps + step, as a server's with the round.  `every` says how many ticks of the clock
share a value: every = steps gives a client the clock of rounds, constant within a round.  Floats
are leaves, so that a sweep over them is a vmap; whole numbers shape the program, but for the
breakpoints of `piecewise`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .core import checks
from .core.records import Fn, named

__all__ = [
    "inverse_sqrt",
    "inverse",
    "theory",
    "theory_rounds",
    "exponential",
    "piecewise",
    "from_optax",
]
LAST = 2**31 - 1  # of the clock


@named("schedules.inverse_sqrt")
def _inverse_sqrt(clock, *, lr, offset, every):
    return lr / jnp.sqrt(clock // every + offset)


def inverse_sqrt(lr: ArrayLike, every: int = 1, offset: ArrayLike = 1.0) -> Fn:
    """lr / sqrt(clock // every + offset): starts at lr for offset = 1.

    Shapes:
        clock Int[] -> Float[].

    Raises:
        ValueError: unless lr and offset are > 0 and every is whole, at least 1.

    References:
        experiments of Li, Wang, Wu, 2025 (lr 0.04 and 0.01), and of Chen et al., 2024 (every =
        steps).

    Example:
        >>> [round(float(inverse_sqrt(0.04, every=5)(t)), 4) for t in (0, 4, 5, 15)]
        [0.04, 0.04, 0.0283, 0.02]
    """
    return Fn(_inverse_sqrt, *_bound("schedules.inverse_sqrt", every, lr=lr, offset=offset))


@named("schedules.inverse")
def _inverse(clock, *, lr, offset, every):
    return lr / (clock // every + offset)


def inverse(lr: ArrayLike, every: int = 1, offset: ArrayLike = 1.0) -> Fn:
    """lr / (clock // every + offset).

    Shapes and errors are those of `inverse_sqrt`.

    >>> [round(float(inverse(0.04)(t)), 4) for t in (0, 1, 3)]
    [0.04, 0.02, 0.01]
    """
    return Fn(_inverse, *_bound("schedules.inverse", every, lr=lr, offset=offset))


@named("schedules.theory")
def _theory(clock, *, strong_convexity, smoothness, steps):
    return 2 / (strong_convexity * (jnp.maximum(8 * smoothness / strong_convexity, steps) + clock))


def theory(strong_convexity: ArrayLike, smoothness: ArrayLike, steps: int) -> Fn:
    """2 / (mu (a + clock)) with a = max(8 L / mu, steps), for mu-strongly convex and L-smooth
    losses.

    It starts at 1 / (4 L) or below, and falls by half at most within a round.

    Shapes:
        clock Int[], in steps -> Float[].

    Raises:
        ValueError: unless 0 < strong_convexity <= smoothness and steps is whole, at least 1.

    References:
        Li, Huang, Yang, Wang, Zhang, ICLR 2020; Li, Wang, Wu, 2025, Theorem 3.

    Example:
        >>> [round(float(theory(0.5, 1.0, 10)(t)), 4) for t in (0, 16)]
        [0.25, 0.125]
    """
    return Fn(
        _theory, _convex("schedules.theory", strong_convexity, smoothness, steps), dict(steps=steps)
    )


@named("schedules.theory_rounds")
def _theory_rounds(clock, *, strong_convexity, smoothness, steps, every):
    return 4 / (steps * (strong_convexity * (clock // every) + 16 * smoothness))


def theory_rounds(
    strong_convexity: ArrayLike, smoothness: ArrayLike, steps: int, every: int | None = None
) -> Fn:
    """4 / (steps (mu round + 16 L)): as `theory`, for steps that share the rate of their round.

    The schedule takes a clock Int[] to a Float[], as `theory` does, with the same errors.

    Args:
        strong_convexity: mu > 0 of the losses.
        smoothness: L of the losses, at least mu.
        steps: local steps of a round.
        every: ticks of the clock in a round.  None: steps, for a client; 1 for a clock in rounds.

    References:
        Chen et al., 2024, Theorem 1.

    Example:
        >>> [round(float(theory_rounds(1.0, 1.0, 2)(t)), 4) for t in (0, 1, 32)]
        [0.125, 0.125, 0.0625]
    """
    where = "schedules.theory_rounds"
    data = _convex(where, strong_convexity, smoothness, steps)
    every = steps if every is None else every
    checks.require_integer(where, every=every)
    return Fn(_theory_rounds, data, dict(steps=steps, every=every))


@named("schedules.exponential")
def _exponential(clock, *, initial, decay, total):
    return initial * jnp.power(decay, clock / total)


def exponential(initial: ArrayLike, decay: ArrayLike, total: int) -> Fn:
    """initial * decay^(clock / total): from initial to initial * decay after `total` ticks.

    Shapes:
        clock Int[] -> Float[].

    Raises:
        ValueError: unless initial and decay are > 0 and total is whole, at least 1.

    References:
        clip norms and noise multipliers of Dynamic DP-SGD, Du et al., 2021.

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


@named("schedules.piecewise")
def _piecewise(clock, *, breakpoints, values):
    return jnp.asarray(values)[
        jnp.searchsorted(breakpoints, clock, side="right", method="compare_all")
    ]


def piecewise(breakpoints: Sequence[int] | np.ndarray, values: Sequence | jax.Array) -> Fn:
    """values[i] from breakpoints[i-1] on, until before breakpoints[i]; the last value stays.

    For plan(weights=...), values of shape [C] are impact factors that change with the round
    (`jfl.sampling.weights.impact`).

    Args:
        breakpoints: [k], whole numbers, rising: ticks of the clock.
        values: k + 1 numbers, or arrays of one shape [...].

    Returns:
        The schedule, of a clock Int[] -> [...].

    Speed:
        breakpoints and values are leaves: other numbers, or a sweep over them, need no other
        program.

    Raises:
        ValueError: unless 0 < breakpoints[0] < breakpoints[1] < ..., with k + 1 finite values of
            one shape.

    References:
        Talaei and Izadi, 2024: impact factors p^(t), of which two groups change places after round
        10.

    Example:
        >>> rate = piecewise([10, 20], [0.3, 0.2, 0.1])
        >>> [round(float(rate(t)), 4) for t in (0, 9, 10, 19, 20, 500)]
        [0.3, 0.3, 0.2, 0.2, 0.1, 0.1]
    """
    where, begin = "schedules.piecewise", 0
    if (
        not hasattr(values, "__len__")
        or not isinstance(values, list | tuple)
        and np.ndim(values) < 1
        or checks.as_array(where, "breakpoints", breakpoints).ndim != 1
    ):
        checks.fail(
            where,
            "breakpoints and values, a list of each",
            f"{checks.short_repr(breakpoints)} and {checks.short_repr(values)}",
        )
    for breakpoint_ in breakpoints:
        checks.require_integer(
            where,
            "Breakpoints rise, and the first is not 0.",
            min_value=begin + 1,
            breakpoint=breakpoint_,
        )
        begin = int(breakpoint_)
    if begin > LAST:
        checks.fail(where, f"breakpoints <= {LAST}", begin)
    values = list(values)
    shapes = sorted(
        {
            (checks.as_array(where, "values", value) if checks.is_concrete(value) else value).shape
            for value in values
        }
    )
    if len(values) != len(breakpoints) + 1 or len(shapes) > 1:
        checks.fail(
            where,
            f"{len(breakpoints) + 1} values of one shape, one more than breakpoints",
            f"{len(values)} of shape {', '.join(map(str, shapes))}",
        )
    if checks.is_concrete(values):
        given = np.asarray(values)
        with np.errstate(over="ignore"):
            held: Any = given.astype(np.float32) if given.dtype.kind in "iuf" else np.array(np.nan)
        if not np.isfinite(held).all():
            checks.fail(where, "finite values (as float32)", checks.short_repr(given))
    else:
        held = jnp.stack(values).astype(jnp.float32)
    return Fn(_piecewise, dict(breakpoints=np.asarray(breakpoints, np.int32), values=held))


@named("schedules.ready")
def _ready(clock, *, schedule, every):
    return schedule(clock // every)


def _is_factory(value) -> bool:
    """Whether a call with a number of steps gives a schedule, and not a rate."""
    try:
        return callable(value(0))
    except TypeError:  # it needs more arguments
        return True


@named("schedules.from_optax")
def _from_optax(clock, *, factory, every, fixed, **numbers):
    return factory(**dict(fixed), **numbers)(clock // every)


def from_optax(factory: Callable, every: int = 1, **arguments: Any) -> Fn:
    """Return any schedule of `optax.schedules`, by its factory and the factory's arguments.

    Floats among the arguments are leaves where the factory takes traced ones; all else shapes the
    program.  A schedule that is already made is taken as it is: its numbers are then fixed.

    Shapes:
        clock Int[] -> Float[].

    Raises:
        ValueError: unless every is whole, at least 1.

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


def _convex(where, strong_convexity, smoothness, steps):
    checks.require_positive(
        where, single=True, strong_convexity=strong_convexity, smoothness=smoothness
    )
    checks.require_integer(where, steps=steps)
    if checks.is_concrete((strong_convexity, smoothness)) and smoothness < strong_convexity:
        checks.fail(
            where,
            "smoothness >= strong_convexity",
            f"{smoothness!r} < {strong_convexity!r}",
            "A mu-strongly convex and L-smooth function has mu <= L.",
        )
    return dict(
        strong_convexity=checks.as_scalar(strong_convexity), smoothness=checks.as_scalar(smoothness)
    )
