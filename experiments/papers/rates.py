"""Learning rates of the papers' theorems, as schedules like those of `jfl.schedules`."""

import jax.numpy as jnp
from jax.typing import ArrayLike

from jfl.core import checks
from jfl.core.records import Fn, named


@named("schedules.theory")
def _theory(clock, *, strong_convexity, smoothness, steps):
    return 2 / (strong_convexity * (jnp.maximum(8 * smoothness / strong_convexity, steps) + clock))


def theory(strong_convexity: ArrayLike, smoothness: ArrayLike, steps: int) -> Fn:
    """Return 2 / (mu (a + clock)) with a = max(8 L / mu, steps), for mu-strongly convex and
    L-smooth losses.

    It starts at 1 / (4 L) or less, and falls at most by half within a round.

    Shapes:
        clock Int[], in steps -> Float[].

    Raises:
        ValueError: Unless 0 < strong_convexity <= smoothness, and steps is an integer >= 1.

    References:
        Li, Huang, Yang, Wang, Zhang, ICLR 2020; Li, Wang, Wu, 2025, Theorem 3.

    Example:
        >>> [round(float(theory(0.5, 1.0, 10)(t)), 4) for t in (0, 16)]
        [0.25, 0.125]
    """
    return Fn(
        _theory, _convex("rates.theory", strong_convexity, smoothness, steps), dict(steps=steps)
    )


@named("schedules.theory_rounds")
def _theory_rounds(clock, *, strong_convexity, smoothness, steps, every):
    return 4 / (steps * (strong_convexity * (clock // every) + 16 * smoothness))


def theory_rounds(
    strong_convexity: ArrayLike, smoothness: ArrayLike, steps: int, every: int | None = None
) -> Fn:
    """Return 4 / (steps (mu round + 16 L)), like `theory` for steps that share a rate per round.

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
    where = "rates.theory_rounds"
    data = _convex(where, strong_convexity, smoothness, steps)
    every = steps if every is None else every
    checks.require_integer(where, every=every)
    return Fn(_theory_rounds, data, dict(steps=steps, every=every))


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
