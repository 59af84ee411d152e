"""Checks of claims over {(panel, line, x): row}.

Differences are of equal seeds and splits, intervals of 95 %.
"""

from jfl.runs.statistics import interval

from ...harness.runner import CONFIRMED, NOT, UNKNOWN


def gap(rows, one, other):
    """Return mean and half width of the difference in accuracy of two cells over the seeds of both;
    None without two seeds."""
    if one not in rows or other not in rows:
        return None
    a, b = (rows[k]["values"] for k in (one, other))
    both = [s for s in a if s in b]
    return interval([a[s] - b[s] for s in both]) if len(both) > 1 else None


def _all(rows, pairs, holds):
    found = [gap(rows, *pair) for pair in pairs]
    seen = ", ".join("not run" if g is None else f"{g[0]:+.3f} ± {g[1]:.3f}" for g in found)
    if any(g is not None and not holds(*g) for g in found):
        return NOT, seen
    return (UNKNOWN if not found or None in found else CONFIRMED), seen


def above(*pairs):
    """Return a check that the first of each pair ends above the second.

    The whole interval of their difference is positive.
    """
    return lambda rows: _all(rows, pairs, lambda mean, half: mean - half > 0)


def within(margin, *pairs):
    """Return a check that the first of each pair ends at most `margin` from the second.

    The whole interval of their difference is that small.
    """
    return lambda rows: _all(rows, pairs, lambda mean, half: abs(mean) + half <= margin)


def no_worse(margin, *pairs):
    """Return a check that no first of a pair ends `margin` or more below the second."""
    return lambda rows: _all(rows, pairs, lambda mean, half: mean + half >= -margin)


def proved(holds, told):
    """Return a check of epsilons only.

    `holds` and `told` take all rows; a KeyError means that a row was not run.
    """

    def check(rows):
        try:
            return (CONFIRMED if holds(rows) else NOT), told(rows)
        except KeyError as missing:
            return UNKNOWN, f"not run: {missing}"

    return check
