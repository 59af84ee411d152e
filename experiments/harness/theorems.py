"""Check theorems against measured runs.

The only settings of a theorem are its hypotheses. A run that meets them and violates the bound
contradicts it; a run that does not meet them cannot check it. A theorem that holds up to a constant
is judged at a constant of 1; below that, a larger constant may be meant, and it cannot be checked.
"""

import math

import numpy as np

from .verdicts import CONTRADICTED, UNKNOWN, Claim, Comparison, Evidence, Quantity, exactly


def is_above(bound, values, unmet: str = "", drawn: bool = True):
    """Return a check that a bound is at least the mean of the measured values.

    Args:
        bound: a number, or one per seed.
        values: the measured values, one per seed.
        unmet: hypotheses that the run does not meet; the claim then cannot be checked.
        drawn: whether the run is random. If not, its one value is compared directly.
    """
    values = np.asarray(values, float)
    slack = values * 0 + bound - values
    if unmet or not np.isfinite(slack).all():
        why = f"the run does not meet: {unmet}" if unmet else "values that are not finite"
        return lambda results: Evidence(missing=why)
    seen = f"bound {np.mean(bound):.4g}, measured {values.mean():.4g}"
    if not drawn:
        found = Evidence(exact=bool(slack.min() >= 0), seen=seen, against=CONTRADICTED)
    else:
        found = Evidence(
            (Comparison(Quantity.of(slack), low=0.0),), seen=seen, against=CONTRADICTED
        )
    return lambda results: found


def shares_are_below_1(shares: dict, seen: str = "", up_to_a_constant: bool = False):
    """Return a check that measured values over a bound are below 1.

    Args:
        shares: name -> measured value over the bound, one per seed.
        seen: a remark, in words.
        up_to_a_constant: whether the theorem holds up to a constant, here 1.
    """
    if not all(np.isfinite(values).all() for values in shares.values()):
        return lambda results: Evidence(missing="values that are not finite")
    found = tuple(
        Comparison(Quantity.of(values), high=1.0, name=name) for name, values in shares.items()
    )
    words = [seen, "measured over the bound"]
    if up_to_a_constant and max(c.of.mean for c in found) > 1:
        each = "; ".join(f"{c.name}: {rounded_up(c.of.mean)}" for c in found)
        least = rounded_up(max(c.of.mean for c in found))
        words.insert(0, f"its constant is left open, and would have to be {least} or more ({each})")
    evidence = Evidence(
        found,
        seen="; ".join(filter(None, words)),
        against=UNKNOWN if up_to_a_constant else CONTRADICTED,
    )
    return lambda results: evidence


def rounded_up(value: float) -> str:
    """Round a number > 0 up to two digits.

    >>> [rounded_up(v) for v in (1.03, 1.44, 120.0, 0.151)]
    ['1.1', '1.5', '120', '0.16']
    """
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit - 1e-9) * unit:.10g}"


def below_the_start(count: int, of: str) -> str:
    """Return in words how often a bound is below the value before training."""
    return f"is below the start at {count} of {of}"


def is_below_the_start(name: str, lines: dict, which: str) -> Claim:
    """Return the claim (ours) that a bound is below the value before training in some line.

    Args:
        name: of the bound.
        lines: line -> (the bound, what it bounds at the start of the run).
        which: what these lines are, in words.
    """
    found = [line for line, (bound, start) in lines.items() if np.mean(bound) < start]
    negative = [line for line in found if np.mean(lines[line][0]) < 0]
    seen = f"in {len(found)} of {len(lines)} {which}"
    seen += f": {'; '.join(found)}" if found else ""
    seen += f"; below 0 in {'; '.join(negative)}" if negative else ""
    return Claim(
        f"{name} is informative in some line: it is below the value at the start",
        exactly(bool(found), seen),
        "ours",
    )
