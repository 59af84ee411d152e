"""Confidence intervals over seeds, and how tables show them."""

import math

import numpy as np
from scipy.special import stdtrit

PLUS_MINUS = "± is half of a 95 % interval of the mean over seeds (Student's t)."


def interval(values) -> tuple[float, float | None]:
    """Return the mean and half the width of its 95 % confidence interval (Student's t).

    The half width is None for fewer than two values.

    Example:
        >>> [round(v, 4) for v in interval([0.8, 0.9, 1.0])]
        [0.9, 0.2484]
    """
    values = np.asarray(values, float)
    if values.size < 2:
        return float(values.mean()), None
    quantile = stdtrit(values.size - 1, 0.975)
    half_width = quantile * values.std(ddof=1) / math.sqrt(values.size)
    return float(values.mean()), float(half_width)


def plus_minus(mean: float | None, half: float | None, digits: int = 4) -> str:
    """Format a mean and half the width of its interval, as in all tables.

    Without an interval, the result is the mean only.

    Example:
        >>> plus_minus(*interval([0.8, 0.9, 1.0])), plus_minus(0.9, None, 2)
        ('0.9000 ± 0.2484', '0.90')
    """
    # a diverging run has huge losses, which are shown without decimal places
    fixed = lambda value: f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.{digits}g}"
    if mean is None:
        return ""
    return fixed(mean) + ("" if half is None else f" ± {fixed(half)}")
