"""Search for the crossing of a monotone function.

`illinois` is traced: it goes under jit and vmap, and takes no derivatives.  `smallest_fitting` runs
on the host.

An accountant has to err on the safe side, so each search says which of its ends was tested.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

LARGEST = 1e9  # values of a search on the host are cut off here: interpolation needs finite ones


class Bracket(NamedTuple):
    """An interval in which a decreasing function crosses zero, and its values at both ends.

    `low_value` > 0 >= `high_value`, up to the halving of the Illinois rule, which keeps signs.
    `last_side` is 1 where the last point replaced `low`, -1 where it replaced `high`, else 0.
    """

    low: Any
    high: Any
    low_value: Any
    high_value: Any
    last_side: Any = 0

    def secant(self, margin: float):
        """Return the zero of the line through both ends, `margin` of the interval away from
        both."""
        fall = jnp.maximum(self.low_value - self.high_value, 1e-300)
        share = jnp.clip(self.low_value / fall, margin, 1 - margin)
        return self.low + (self.high - self.low) * share

    def replace_end(self, x, value) -> "Bracket":
        """Return the narrower bracket that the function's `value` at `x` proves.

        The end that stays for the second time has its value halved (the Illinois rule): without
        this, the other end would stop short of the crossing.
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
    """Return a narrow bracket of the zero of a decreasing function that is almost straight.

    Every fourth step halves the interval, so `steps` steps narrow it at least 2^(steps / 4) times.
    Both ends were tested.  Without a crossing in [low, high], `low` and `high` come back equal
    where function(low) <= 0, and `high_value` is positive where function(high) > 0.

    Args:
        function: x [] -> value [], falling.
        low: [], the lower end of the interval.
        high: [], the upper end.
        steps: steps at most.
        rtol, atol: the search stops where high - low <= atol + rtol |high|.

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
    """Return the smallest x in [low, high], to `tolerance`, with excess(x) <= 0; on the host.

    What is returned was tested.  Unless it is `low`, a point at most `tolerance` below it was
    tested too and does not fit.

    Args:
        excess: x -> value, falling.  nan does not fit; infinite values are allowed.
        low: the lower end of the interval.
        high: the upper end, which has to fit.
        tolerance: the largest distance of the result from the smallest x that fits.

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

    def finite_sign(x):
        """Return the excess, finite and never zero: the search would stop at the first zero it
        meets."""
        nonlocal smallest
        value = float(excess(x))
        if value <= 0:
            smallest = min(smallest, x)
            return max(min(value, -1e-300), -LARGEST)
        return min(value, LARGEST) if value > 0 else LARGEST

    if finite_sign(low) > 0:
        solve: Any = optimize.toms748  # whose type knows only its own default of `rtol`
        solve(finite_sign, low, high, xtol=tolerance, rtol=1e-15, maxiter=200)
    return float(smallest)
