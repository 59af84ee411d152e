"""Mark functions as claims of a paper, with a place and a verdict.

    @claim("Theorem 5", "unsound", "delta is an output, not an input")
    def theorem5(...): ...

A function with preconditions returns `Checked`: its value proves nothing if a precondition fails.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jfl.core import checks

VERDICTS = {
    "rigorous": "holds as stated",
    "conditional": "holds under conditions that the paper does not state or its own settings miss",
    "unsound": "false, or not what it is used for",
    "vacuous": "true, and never better than what is trivial",
    "order": "up to constants that are not given",
    "unverified": "not contradicted; its proof was not available",
    "ours": "not in the paper: a correct replacement, or a result of ours",
}


class Claim(NamedTuple):
    """The verdict on a statement of a paper.

    Attributes:
        place: in the paper, such as "Theorem 5" or "eq. (20)".
        verdict: a key of VERDICTS.
        why: what is missing or wrong, in one sentence.
    """

    place: str
    verdict: str
    why: str


def claim(place: str, verdict: str, why: str = ""):
    """Return a decorator that gives a function the attribute `claim` and changes nothing else."""
    checks.require_one_of("claim", tuple(VERDICTS), verdict=verdict)

    def mark(function):
        function.claim = Claim(place, verdict, why)
        return function

    return mark


class Checked(NamedTuple):
    """A value, and the preconditions that fail for it.

    Attributes:
        value: what the preconditions are about.
        failed: the preconditions that fail somewhere.
        holds: whether all hold, for each element if arguments are arrays.
    """

    value: Any
    failed: tuple[str, ...]
    holds: Any


def checked(value, conditions: Mapping[str, ArrayLike]) -> Checked:
    """Return a value with the names of those conditions that fail.

    Args:
        value: what the conditions are about.
        conditions: name -> bool, or an array of them.
    """
    failed = tuple(name for name, ok in conditions.items() if not np.all(ok))
    return Checked(value, failed, np.all(np.broadcast_arrays(*conditions.values()), axis=0))
