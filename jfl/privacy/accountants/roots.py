"""The search for the zero of a decreasing function, on the host.

An accountant has to err on the conservative side, so `smallest_fitting` documents at which ends of
the final interval the function was evaluated.
"""

from collections.abc import Callable
from typing import Any

MAX_VALUE = 1e9  # larger values are clipped, because interpolation needs finite ones


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
