"""Searches for the zero of a decreasing function.

`illinois` is traceable (jit and vmap) and needs no derivatives.  `smallest_fitting` runs on the
host.  An accountant has to err on the conservative side, so both document at which ends of the
final interval the function was evaluated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

# `smallest_fitting` clips larger values, because interpolation needs finite ones.
MAX_VALUE = 1e9


class Bracket(NamedTuple):
    """An interval in which a decreasing function crosses zero, and its values at both ends.

    `low_value` > 0 >= `high_value`.  The Illinois variant of regula falsi halves the stored value
    of an end that stays twice, so values have the right sign, but may be too small.  `last_side` is
    1 if the last point replaced `low`, -1 if it replaced `high`, and 0 at the start.
    """

    low: Any
    high: Any
    low_value: Any
    high_value: Any
    last_side: Any = 0

    def secant(self, margin: float):
        """Return the zero of the line through both ends, kept away from both ends.

        Args:
            margin: the minimum distance to either end, as a fraction of the interval.
        """
        fall = jnp.maximum(self.low_value - self.high_value, 1e-300)
        fraction = jnp.clip(self.low_value / fall, margin, 1 - margin)
        return self.low + (self.high - self.low) * fraction

    def replace_end(self, x, value) -> "Bracket":
        """Return the bracket with one end moved to `x`, where the function has this `value`.

        If the same end stays for the second time, its stored value is halved (the Illinois rule).
        Without this, the other end would stop short of the zero.
        """
        positive = value > 0
        low_value = jnp.where(self.last_side == -1, self.low_value / 2, self.low_value)
        high_value = jnp.where(self.last_side == 1, self.high_value / 2, self.high_value)
        return Bracket(
            jnp.where(positive, x, self.low),
            jnp.where(positive, self.high, x),
            jnp.where(positive, value, low_value),
            jnp.where(positive, high_value, value),
            jnp.where(positive, 1, -1),
        )


def illinois(
    function: Callable,
    low: ArrayLike,
    high: ArrayLike,
    steps: int = 60,
    rtol: float = 1e-7,
    atol: float = 1e-9,
) -> Bracket:
    """Return a narrow bracket of the zero of a decreasing function that is almost linear.

    Every fourth step halves the interval, so `steps` steps narrow it at least 2^(steps / 4) times.
    The function was evaluated at both ends of the result.  Without a zero in [low, high], the
    result has low = high if function(low) <= 0, and a positive `high_value` if function(high) > 0.

    Args:
        function: x [] -> value [], decreasing.
        low: [], the lower end of the interval.
        high: [], the upper end.
        steps: maximum number of steps.
        rtol, atol: the search stops when high - low <= atol + rtol |high|.

    References:
        Dowell and Jarratt, BIT 1971.

    Example:
        >>> round(float(illinois(lambda x: 2 - x**2, jnp.array(1.0), jnp.array(2.0)).high), 3)
        1.414
    """

    def is_wide(state):
        step, bracket = state
        return (step < steps) & (bracket.high - bracket.low > atol + rtol * jnp.abs(bracket.high))

    def narrow(state):
        step, bracket = state
        middle = bracket.low + (bracket.high - bracket.low) * 0.5
        x = jnp.where(step % 4 == 3, middle, bracket.secant(0.001))
        return step + 1, bracket.replace_end(x, function(x))

    low_value, high_value = function(low), function(high)
    # no crossing above low: nothing to search
    start = Bracket(low, jnp.where(low_value <= 0, low, high), low_value, high_value, 0)
    return jax.lax.while_loop(is_wide, narrow, (0, start))[1]


def smallest_fitting(
    excess: Callable[[float], float], low: float, high: float, tolerance: float
) -> float:
    """Return the smallest x in [low, high] with excess(x) <= 0, up to `tolerance`; on the host.

    The result itself was evaluated and satisfies the condition.  Unless it is `low`, a point at
    most `tolerance` below it was evaluated too and does not satisfy it.

    Args:
        excess: x -> value, decreasing.  nan counts as positive; infinite values are allowed.
        low: the lower end of the interval.
        high: the upper end, at which excess must be <= 0.
        tolerance: the largest distance of the result from the true smallest x.

    Raises:
        ValueError: if excess(high) > 0.

    References:
        Alefeld, Potra, Shi, ACM TOMS 1995 (Algorithm 748).

    Example:
        >>> x = smallest_fitting(lambda x: 2 - x**2, 1.0, 2.0, 1e-6)
        >>> 2**0.5 <= x <= 2**0.5 + 1e-6
        True
    """
    from scipy import optimize  # slow: not at import

    smallest = high

    def nonzero_excess(x):
        """Return the excess, clipped and never zero, since the search would stop at the first
        zero."""
        nonlocal smallest
        value = float(excess(x))
        if value <= 0:
            smallest = min(smallest, x)
            return max(min(value, -1e-300), -MAX_VALUE)
        return min(value, MAX_VALUE) if value > 0 else MAX_VALUE

    if nonzero_excess(low) > 0:
        solve: Any = optimize.toms748  # Any, because its type stub rejects other values of rtol
        solve(nonzero_excess, low, high, xtol=tolerance, rtol=1e-15, maxiter=200)
    return float(smallest)
