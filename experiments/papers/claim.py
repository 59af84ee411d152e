"""A claim: a function, where the paper states it, and what it is worth.

    @claim("Theorem 5", "unsound", "delta is an output, not an input")
    def theorem5(...): ...

A function with preconditions returns `checks.Checked` and takes `strict`.  `of(module)` lists a
module's claims for reports.
"""

from collections.abc import Callable
from typing import NamedTuple

from jfl.core import checks

VERDICTS = {
    "rigorous": "holds as stated",
    "conditional": "holds under conditions that the paper does not state or its own settings miss",
    "unsound": "false, or not what it is used for",
    "vacuous": "true, and never better than what is trivial",
    "order": "up to constants that are not given",
    "unverified": "not contradicted; its proof was not available",
    "ours": "not in the paper: what should stand there",
}


class Claim(NamedTuple):
    """One statement of a paper, as a function, with what became of it."""

    place: str  # in the paper: "Theorem 5", "eq. (20)"
    verdict: str  # a key of VERDICTS
    why: str  # what is missing or wrong, in one sentence
    function: Callable


def claim(place: str, verdict: str, why: str = ""):
    """Decorator: the function keeps its behaviour and gets a `claim`."""
    checks.require_one_of("claim", tuple(VERDICTS), verdict=verdict)

    def mark(function):
        function.claim = Claim(place, verdict, why, function)
        return function

    return mark


def of(module) -> tuple[Claim, ...]:
    """The claims of a module, in the order of its source."""
    matching = [
        v.claim
        for v in vars(module).values()
        if isinstance(getattr(v, "claim", None), Claim) and v.__module__ == module.__name__
    ]
    return tuple(sorted(matching, key=lambda c: c.function.__code__.co_firstlineno))
