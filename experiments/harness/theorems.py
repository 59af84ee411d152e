"""Checks of theorems beside measured runs.

A theorem, whoever states it, has no settings but its hypotheses: what speaks against it contradicts
it.  Where a run does not meet them, it cannot be checked.  One that holds up to a constant holds
where it does at a constant of 1; where it lies below, a larger constant may be meant, and it cannot
be checked.
"""

import math

import numpy as np

from .verdicts import CONTRADICTED, UNKNOWN, Claim, Comparison, Evidence, Quantity, exactly


def is_above(bound, values, unmet: str = "", drawn: bool = True):
    """A check that a bound is at least the mean of what is measured.

    Args:
        bound: a number, or one for each seed.
        values: what is measured, one for each seed.
        unmet: the hypotheses that the run does not meet; the claim then cannot be checked.
        drawn: whether the run has draws.  Without them its one value is compared as it is.
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
    """A check that what is measured is a share of a bound, several times.

    Args:
        shares: name -> what is measured over the bound, one for each seed.
        seen: more of what is seen, in words.
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
    """A number > 0 with two digits, none below it.

    >>> [rounded_up(v) for v in (1.03, 1.44, 120.0, 0.151)]
    ['1.1', '1.5', '120', '0.16']
    """
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit - 1e-9) * unit:.10g}"


def below_the_start(count: int, of: str) -> str:
    """In words, how often a bound says more than what is measured before any training."""
    return f"is below the start at {count} of {of}"


def is_below_the_start(name: str, lines: dict, which: str) -> Claim:
    """The claim, which is ours, that a bound says more than the start in some line.

    Args:
        name: of the bound.
        lines: line -> (the bound, what it bounds at the start of the run).
        which: lines these are, in words.
    """
    found = [line for line, (bound, start) in lines.items() if np.mean(bound) < start]
    negative = [line for line in found if np.mean(lines[line][0]) < 0]
    seen = f"in {len(found)} of {len(lines)} {which}"
    seen += f": {'; '.join(found)}" if found else ""
    seen += f"; below 0 in {'; '.join(negative)}" if negative else ""
    return Claim(
        f"{name} says something somewhere: it is below its value at the start",
        exactly(bool(found), seen),
        "ours",
    )
