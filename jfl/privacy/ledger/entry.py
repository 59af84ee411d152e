"""The records of the ledger: data that print, and no functions.

An entry says what one plan releases about one unit to one view; a part is one of its noisy
releases.  Arrays have a column for each client [C], or one column where all clients are alike, and
a row for each round, or one row where all rounds are alike.
"""

from typing import Any, NamedTuple

import numpy as np

from ...core import checks
from ...core.errors import NotAnalysable

ABSENT = 1e12  # a noise multiplier where a unit does not come


class WeightedSum(NamedTuple):
    """What a third party sees of noisy uploads: their weighted sum, with the noise of all."""

    weights: np.ndarray  # [rounds or 1, C]
    others: bool  # whether the noise of the other clients counts
    # noise of the server is added to a sum of uploads with noise of their own:
    uploads: np.ndarray | None = None  # their multipliers [rounds or 1, C or 1]
    unit: np.ndarray | None = None  # sensitivity of the release, in those of an upload [rounds, 1]


class Part(NamedTuple):
    """One noisy release: of what, on which sample, with how much noise, how often."""

    release: str  # local step | local training | upload | sum of uploads | model
    multiplier: np.ndarray  # [rounds or 1, C or 1], std over sensitivity: what the chain states
    sampling: str = (
        # none | poisson | truncated_poisson | without_replacement | with_replacement | touched |
        # participation
        "none"
    )
    sample: np.ndarray = np.ones(1)  # [C or 1] elements drawn, or the probability of one
    population: np.ndarray = np.ones(1)  # [C or 1] elements that they are drawn from
    capacity: np.ndarray = np.zeros(1)  # [C or 1] of a truncated Poisson sample
    count: np.ndarray = np.ones(1)  # [C or 1] times in a participation (or in a round)
    seen: bool = False  # the sample counts as known: no gain
    moves: float = 1.0  # sensitivities by which the unit moves the release at most
    summed: WeightedSum | None = None
    # [rounds, 1], times the multiplier: independent releases that are worth rounds which do not
    # stand alone
    of_rounds: np.ndarray | None = None
    # slopes and constants of Renyi bounds, all that is known where the noise is of integers; and
    # of how many clients it is
    renyi: tuple | None = None
    law: str = (
        "gaussian"  # of the noise; "laplace" has its multiplier in the sum of absolute values
    )

    @property
    def rate(self) -> np.ndarray:
        """The probability that one draw takes the unit, [C or 1]."""
        sample = 1.0 if self.sampling == "with_replacement" else self.sample
        return sample / self.population


class Clients(NamedTuple):
    """For whom the columns of an entry stand."""

    rows: np.ndarray  # Int[C]
    share: np.ndarray  # [C] of a draw of the cohort; 0 where every round counts
    counted: np.ndarray  # Int[n] columns of those who hold a unit


class Entry(NamedTuple):
    """One thing to guarantee: what is released about a unit to a view, in each round.

    With `rounds`, what a whole run of so many rounds releases; with `stretches`, what several
    stretches of rounds do together.
    """

    unit: str  # example | client
    view: str  # server | aggregate | third_party
    adjacency: str  # add_remove | replace_one | zero_out
    parts: tuple = ()  # of Part: a participation of a client; a round where `chance` is None
    clients: Any = None  # Clients; None where an entry is refused
    chance: np.ndarray | None = None  # [C] probability that the client takes part; 1: every round
    turns: int = 1  # how often a client may run in a round, each with its chance
    worst: tuple = ()  # of columns (of parts, of chances): no client is worse off than one of these
    overflow: float = 0.0  # probability, a round, that a draw finds no slot
    row_overflow: np.ndarray | None = None  # [C] of a row drawn, in a participation
    mixture: bool = False  # gains from a client's absence only
    implied: bool = False  # by another unit's guarantee
    noise_of: str = "client"  # who adds it: client | server
    drawn: str = ""  # what the samples of the parts are drawn from: rows | clients
    rounds: int | None = None  # None: an entry of each round
    participations: np.ndarray | None = None  # Int[C] in all those rounds, instead of a chance
    stretches: tuple = ()  # of Stretch
    refusal: str = ""  # why there is no epsilon
    status: str = "proved"  # proved | conditional
    caveats: tuple = ()
    method: str = ""  # the name of a mechanism whose rounds do not stand alone
    normals: float = 1.0  # drawn for one release, at most; 0: noise without an end

    @property
    def changes(self) -> bool:
        """True if the noise of a round depends on its number."""
        return self.rounds is None and any(len(effective(p)) > 1 for p in self.parts)


class Stretch(NamedTuple):
    """Rounds of an entry, among those of others."""

    rounds: int
    entry: Entry


def refused(unit: str, view: str, adjacency: str, error: Exception) -> Entry:
    """An entry without an epsilon, so that the others can still be listed."""
    return Entry(unit, view, adjacency, refusal=str(error))


def effective(part: Part) -> np.ndarray:
    """Multipliers that a client meets, [rounds or 1, C or 1]: its own, or those of a sum."""
    total = part.summed
    if total is None:
        own = part.multiplier if part.moves == 1 else part.multiplier / part.moves
        return own if part.of_rounds is None else np.minimum(own * part.of_rounds, ABSENT)
    if total.uploads is None:
        return _in_the_sum(total, part.multiplier, 0.0)
    return _in_the_sum(total, total.uploads, total.unit * part.multiplier)


def _in_the_sum(total, uploads, server):
    """The noise is everybody's, the shift the client's own; ABSENT for a client of weight 0."""
    weights = total.weights
    noise = np.square(weights * uploads)
    noise = noise.sum(1, keepdims=True) if total.others else noise
    std = np.sqrt(noise + np.square(server))
    shares = np.where(weights > 0, weights, 1.0)
    return np.where(weights > 0, np.minimum(std / shares, ABSENT), ABSENT)


def with_noise(entry: Entry, multiplier: float, constant: bool = False) -> Entry:
    """The entry with another noise multiplier in its chains, the same for all releases and clients.

    Args:
        entry: what is changed.
        multiplier: of the first round; later rounds keep their ratio to it.
        constant: whether all rounds get the multiplier itself.
    """
    if any(p.renyi is not None for p in entry.parts):
        checks.fail(
            "jfl.calibrate",
            "Gaussian noise",
            "integers, whose bound hangs on scale and rounding too",
            "Call jfl.guarantee for a few noise multipliers of jfl.distributed.",
            error=NotAnalysable,
        )
    flat = constant or not entry.changes
    courses = [np.ones((1, 1)) if flat else p.multiplier / p.multiplier[:1] for p in entry.parts]
    parts = (p._replace(multiplier=multiplier * c) for p, c in zip(entry.parts, courses))
    return entry._replace(parts=tuple(parts))


def of_client(entry: Entry, client: int) -> Entry:
    """The entry of one client alone."""
    return entry._replace(worst=((client, client),))
