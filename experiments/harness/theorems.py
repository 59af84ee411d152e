"""Verdicts on theorems beside measured runs.

A theorem has no settings but its hypotheses: what speaks against it contradicts it.  Where a run
does not meet them, it cannot be checked.  One that holds up to a constant holds where it does at a
constant of 1; where it does not, a larger constant may be meant, and it cannot be checked.
"""

from typing import Any

import numpy as np

from .runner import exact_verdicts
from .verdicts import Claim, Comparison, Evidence, Quantity, exactly


def is_above(bound, values, unmet: str = "", drawn: bool = True):
    """A check that a bound is at least the mean of what is measured.

    Args:
        bound: a number, or one for each seed.
        values: what is measured, one for each seed.
        unmet: the hypotheses that the run does not meet; the claim then cannot be checked.
        drawn: whether the run has draws.  Without them its one value is compared as it is.
    """
    if unmet:
        return lambda results: Evidence(missing=f"the run does not meet: {unmet}")
    values = np.asarray(values, float)
    slack: Any = np.broadcast_to(bound - values, values.shape)
    seen = f"bound {np.mean(bound):.4g}, measured {values.mean():.4g}"
    if not drawn:
        return lambda results: Evidence(exact=bool(slack.min() >= 0), seen=seen)
    return lambda results: Evidence((Comparison(Quantity.of(slack), low=0.0),), seen=seen)


def up_to_a_constant(shares: dict, seen: str = ""):
    """A check of a theorem that holds up to a constant.

    Args:
        shares: name -> what is measured over the bound at a constant of 1, one for each seed.
        seen: more of what is seen, in words.
    """
    found = tuple(
        Comparison(Quantity.of(values), high=1.0, name=name) for name, values in shares.items()
    )
    short = {c.name: c.of.mean for c in found if c.of.mean >= 1}
    if short:
        why = (
            f"it leaves its constant open, and takes one of {max(short.values()):.2g} "
            f"({', '.join(short)})"
        )
        return lambda results: Evidence(seen=seen, missing=why)
    words = "; ".join(filter(None, (seen, "measured over the bound")))
    return lambda results: Evidence(found, seen=words)


def says_something(count: int, of: int) -> str:
    """In words, how often a bound is below what it bounds at the start of a run."""
    return f"says something at {count} of {of}"


def is_below_the_start(name: str, lines: dict) -> Claim:
    """The claim, which is ours, that a bound says something in some line.

    Args:
        name: of the bound.
        lines: line -> (the bound, what it bounds at the start of the run), of the lines that meet
            its hypotheses.
    """
    told = [line for line, (bound, start) in lines.items() if np.mean(bound) < start]
    negative = [line for line in told if np.mean(lines[line][0]) < 0]
    seen = f"in {len(told)} of {len(lines)} lines that meet its hypotheses"
    seen += f": {'; '.join(told)}" if told else ""
    seen += f"; below 0 in {'; '.join(negative)}" if negative else ""
    return Claim(
        f"{name} says something somewhere: it is below its value at the start",
        exactly(bool(told), seen),
        "ours",
    )


def judged(claims, differs: str) -> list[dict]:
    """Verdicts of claims: those of the paper are of theorems, ours may depend on settings."""
    of = {whose: [c for c in claims if c.whose == whose] for whose in ("paper", "ours")}
    return exact_verdicts(of["paper"], "") + exact_verdicts(of["ours"], differs)
