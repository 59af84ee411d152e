"""Entries of the ledger: what one plan releases about one unit to one view.

`release_of` and `events_of` turn an entry into the events of an accountant.

An entry has a part for each noisy release.  Arrays have a column for each client [C], or one column
if all clients are identical, and a row for each round, or one row if all rounds are identical.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from ...core import checks
from ...core.errors import NotAnalysable
from ...kernels.normals import MISSING
from ..accountants import events
from ..accountants.samples import Sample, gaussian_on, laplace_on
from ..accountants.tightest import Release
from ..accountants.truncation import Integers, Shift, left_of

MAX_PAIRS = 16  # of clients, among which the worst one is searched
ABSENT = 1e12  # the noise multiplier of a round in which a unit does not participate
ONE, ONES, ZEROS = np.ones((1, 1)), np.ones(1), np.zeros(1)


class WeightedSum(NamedTuple):
    """The weighted sum of all noisy uploads, which is all that a third party sees of them."""

    weights: np.ndarray  # [rounds or 1, C]
    others: bool  # whether the noise of the other clients counts
    # If the server adds noise to the sum:
    uploads: np.ndarray | None = None  # noise multipliers of uploads, [rounds or 1, C or 1]
    unit: np.ndarray | None = (
        None  # sensitivity of the sum over that of an upload, [rounds or 1, 1]
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One noisy release: what is released, on which sample, with how much noise, how often."""

    release: str  # local step | local training | upload | sum of uploads | model
    multiplier: np.ndarray  # std over sensitivity, as the chain states it, [rounds or 1, C or 1]
    is_laplace: bool = False
    sampling: str = "none"  # a kind of sample, as in samples.EVENTS
    # Elements drawn, or the probability of one, [C or 1]; elements that they are drawn from,
    # [C or 1]; capacity of a truncated Poisson sample, [C or 1]:
    sample: np.ndarray = dataclasses.field(default_factory=ONES.copy)
    population: np.ndarray = dataclasses.field(default_factory=ONES.copy)
    capacity: np.ndarray = dataclasses.field(default_factory=ZEROS.copy)
    # Releases in a participation, or in a round, [C or 1]:
    count: np.ndarray = dataclasses.field(default_factory=ONES.copy)
    seen: bool = False  # the sample counts as known, so it amplifies nothing
    moves: float = 1.0  # maximum change of the release by the unit, in sensitivities
    # noise that protects the unit over the multiplier, [rounds or 1, C or 1]; inf in a round in
    # which the unit does not participate
    factor: np.ndarray = dataclasses.field(default_factory=ONE.copy)
    joint: bool = False  # all rounds together are one release, whose cost is spread over them
    summed: WeightedSum | None = None
    # of integers: slopes and constants of Renyi bounds, and the number of clients
    renyi: tuple | None = None
    finite: Integers | None = None  # of integers: the cost of the finite range of their noise
    noise: np.ndarray = dataclasses.field(init=False)  # the multipliers that protect the unit

    def __post_init__(self):
        total = self.summed
        if total is None:
            noise = np.minimum(self.multiplier / self.moves * self.factor, ABSENT)
        else:  # the noise is everybody's, but only the client's own upload moves the sum
            uploads = self.multiplier if total.uploads is None else total.uploads
            server = 0.0 if total.uploads is None else total.unit * self.multiplier
            square = np.square(total.weights * uploads)
            square = square.sum(1, keepdims=True) if total.others else square
            shares = np.where(total.weights > 0, total.weights, 1.0)
            std = np.sqrt(square + np.square(server)) / shares
            noise = np.where(total.weights > 0, np.minimum(std, ABSENT), ABSENT)
        object.__setattr__(self, "noise", noise)

    @property
    def rate(self) -> np.ndarray:
        """The probability that one draw takes the unit, [C or 1]."""
        sample = 1.0 if self.sampling == "with_replacement" else self.sample
        return sample / self.population


class Entry(NamedTuple):
    """One row of the ledger: what each round reveals about a unit to an observer.

    If `rounds` is set, the entry covers a whole run of that many rounds.  If `stretches` is set, it
    covers several stretches of rounds together.
    """

    unit: str  # example | client
    view: str  # server | third_party | aggregate | personal
    adjacency: str  # add_remove | replace_one | zero_out
    # Parts: the releases of one participation of a client, or of one round if `chance` is None
    parts: tuple = ()
    chance: np.ndarray | None = None  # probability that the client participates, [C]
    turns: int = 1  # how often a client may participate in a round, each time with its chance
    # Pairs of columns, of parts and of chances: no client is worse off than one of these pairs.
    worst: tuple = ()
    overflow: float = 0.0  # probability that a client drawn in a round finds no slot
    row_overflow: np.ndarray | None = None  # the same for the rows of one participation, [C]
    mixture: bool = False  # whether only the client's absence amplifies privacy
    implied: bool = False  # whether the guarantee follows from that of another unit
    noise_of: str = "client"  # who adds the noise: client | server
    rounds: int | None = None  # None: the entry is of each round
    participations: np.ndarray | None = None  # Int[C], in all these rounds, instead of a chance
    stretches: tuple = ()  # of Stretch
    refusal: str = ""  # the reason if there is no epsilon
    status: str = "proved"  # proved | conditional
    caveats: tuple = ()
    method: str = ""  # the name of a mechanism whose rounds are not independent
    normals: float = 1.0  # maximum number drawn for one release; 0: ideal noise

    @property
    def changes(self) -> bool:
        """Whether the noise differs between rounds."""
        return self.rounds is None and any(len(p.noise) > 1 for p in self.parts)


class Stretch(NamedTuple):
    """A number of rounds, and the entry that holds in them."""

    rounds: int
    entry: Entry


def with_noise(entry: Entry, multiplier: float, constant: bool = False) -> Entry:
    """Return the entry with another noise multiplier, the same for all releases and clients.

    Args:
        entry: the entry to change.
        multiplier: the multiplier of the first round; later rounds keep their ratio to it.
        constant: whether all rounds get the multiplier itself.
    """
    if any(p.renyi is not None for p in entry.parts):
        checks.fail(
            "jfl.calibrate",
            "Gaussian noise",
            "integers, whose bound also depends on scale and rounding",
            "Call jfl.guarantee for a few noise multipliers of jfl.distributed.",
            error=NotAnalysable,
        )
    steady = constant or not entry.changes
    course = lambda p: ONE if steady else p.multiplier / p.multiplier[:1]
    parts = [dataclasses.replace(p, multiplier=multiplier * course(p)) for p in entry.parts]
    return entry._replace(parts=tuple(parts))


def of_client(entry: Entry, client: int) -> Entry:
    """Return the entry for the client with the number `client` only."""
    return entry._replace(worst=((client, client),))


def worst_columns(rows, amount, noise, counted) -> tuple:
    """Return pairs (i, j) of clients that together bound the privacy loss of every client.

    A pair stands for a fictitious client with the rows and noise of i and the participation of j.
    Every client loses at most as much privacy as one of these.

    Args:
        rows: Int[C], rows of each client.  Fewer rows never reduce the loss, because each row is
            then drawn more often.
        amount: [C], how much each client participates.  Less never increases the loss.
        noise: a list with the noise multipliers of each release, [rounds or 1, C or 1].  The last
            axis has length 1 if all clients have the same.
        counted: Int[n], the clients that the pairs have to bound.
    """
    counted = np.asarray(counted)
    if not counted.size:
        return ()
    rows, amount = np.asarray(rows)[counted], np.asarray(amount)[counted]
    if any(z.shape[1] > 1 for z in noise):
        columns = [z[:, counted] for z in noise if z.shape[1] > 1]
        distinct = np.unique(np.vstack([rows, amount, *columns]), axis=1, return_index=True)[1]
        return tuple((c, c) for c in counted[distinct].tolist())
    # by ascending rows, the clients that participate more than all clients with fewer rows
    order = np.lexsort((-amount, rows))
    before = np.maximum.accumulate(np.append(-1.0, amount[order]))[:-1]
    clients = order[amount[order] > before]
    # neighbours share a pair: the fewest rows of one, the largest amount of another
    groups = np.array_split(clients, min(MAX_PAIRS, len(clients)))
    return tuple((int(counted[group[0]]), int(counted[group[-1]])) for group in groups)


# --- the release of an entry


def release_of(entry: Entry, rounds: int) -> Release:
    """Return what `rounds` rounds of an entry release, as a `tightest.Release`."""
    listed = events_of(entry, rounds)
    if not listed:  # nobody participates
        return Release(listed)
    return Release(listed, entry.overflow * rounds, shifts=shifts_of(entry, rounds))


def events_of(entry: Entry, rounds: int | None = None) -> tuple:
    """Return an event for each client that may be the worst off.

    Args:
        entry: an entry of the ledger.
        rounds: the number of rounds that an event covers; None for one round, whose noise is then
            an array if it differs by rounds.

    Raises:
        NotAnalysable: if the entry has no epsilon.
    """
    if entry.refusal:
        raise NotAnalysable(entry.refusal)
    if not entry.stretches:
        return tuple(_event_of_client(entry, columns, rounds) for columns in entry.worst)
    out = []
    for columns in entry.worst:  # a column for each stretch
        each = zip(entry.stretches, columns)
        ran = [events_of(s.entry._replace(worst=(c,)), s.rounds)[0] for s, c in each]
        event = ran[0] if len(ran) == 1 else events.compose(*ran)
        out.append(event if rounds is None else events.repeat(event, rounds))
    return tuple(out)


def _event_of_client(entry: Entry, columns: tuple, rounds: int | None):
    """Return the event for a client with the parts of one column and the participation of
    another."""
    first, other = columns
    times, releases, changes = entry.rounds, [], False
    if entry.participations is not None:
        times = int(entry.participations[other])
    for part in entry.parts:
        numbers = part.sample, part.population, part.capacity, part.count, part.noise
        *numbers, noise = (v[..., first if v.shape[-1] > 1 else 0] for v in numbers)
        drawn, population, capacity, count = map(float, numbers)
        if entry.participations is not None and len(noise) > 1:
            # the client may have participated in the rounds with the least noise
            noise = np.sort(np.repeat(noise, entry.turns))[:times]
        noise, changes = (noise, True) if len(noise) > 1 else (float(noise[0]), changes)
        if part.renyi is not None:
            release = events.renyi_bound(*part.renyi[:2])
        else:
            sample = Sample(drawn, population, capacity, drawn / population)
            on_sample = laplace_on if part.is_laplace else gaussian_on
            release = on_sample(part.sampling, entry.adjacency, sample, noise, part.seen)
        releases.append(events.repeat(release, count))
    event = releases[0] if len(releases) == 1 else events.compose(*releases)
    if entry.participations is None and entry.chance is not None:
        chance = float(entry.chance[other])
        event = events.participation(chance, event) if chance < 1 else event
        event = events.repeat(event, entry.turns)
    if times is not None:  # a whole run
        event = events.series(event, np.ones(times)) if changes else events.repeat(event, times)
        changes = False
    if rounds is None:
        return event
    return of_rounds(event, rounds) if changes else events.repeat(event, rounds)


def of_rounds(event, rounds: int):
    """Return the event of several rounds whose noise differs.

    Rounds in which the unit does not participate are left out.

    Args:
        event: the event of one round, whose noise multipliers are arrays [rounds].
        rounds: the number of rounds.

    Returns:
        A Series with one item for each noise level.
    """
    levels, which = levels_of(event, rounds)
    often = np.bincount(which, minlength=1).astype(np.float64)
    kinds = (events.Gaussian, events.Laplace, events.Pure, events.RenyiBound)
    is_release = lambda e: isinstance(e, kinds)
    noise = [
        np.broadcast_to(np.asarray(getattr(e, "noise_multiplier", 0.0)), often.shape)
        for e in jax.tree.leaves(levels, is_leaf=is_release)
        if is_release(e)
    ]
    absent = np.all([z >= ABSENT for z in noise], axis=0)
    return events.series(levels, np.where(absent & ~absent.all(), 0.0, often))


def levels_of(event: Any, rounds: int) -> tuple:
    """Find the distinct noise levels of events whose noise differs by rounds.

    Returns:
        The event, or events, with each level once; and the index of the level of each round,
        Int[rounds].
    """
    noise = [z for z in jax.tree.leaves(event) if np.ndim(z)]
    together = np.stack([z[:rounds] for z in noise]) if noise else np.zeros((1, rounds))
    _, first, which = np.unique(together, axis=1, return_index=True, return_inverse=True)
    return jax.tree.map(lambda z: z[first] if np.ndim(z) else z, event), which.reshape(-1)


# --- the cost of the finite reach of computed noise


def lost_of(entry: Entry, times: np.ndarray, delta: float) -> np.ndarray:
    """Return the delta that the finite range of the noise costs, for each number of rounds.

    Args:
        entry: an entry of the ledger.
        times: Int[n], numbers of rounds.
        delta: the delta of the guarantee.

    Returns:
        Float64[n].
    """
    return np.array([delta - left_of(delta, shifts_of(entry, int(n))) for n in times])


def shifts_of(entry: Entry, rounds: int) -> tuple[Shift | Integers, ...]:
    """Return how far one unit (an example or a client) can shift the releases of a run.

    Shifts are in standard deviations of the noise.  Every client is assumed to participate in every
    round, with all rows in every batch, because sampling can only lower the cost.

    Args:
        entry: an entry of the ledger.
        rounds: the number of rounds; if the entry already describes a whole run, the number of such
            runs.

    Returns:
        A Shift, or Integers, for each group of releases that shift equally; () for ideal noise.
    """
    if not entry.normals:  # ideal noise, as papers assume it
        return ()
    if entry.stretches:
        return tuple(
            shift._replace(times=shift.times * stretch.rounds * rounds)
            for stretch in entry.stretches
            for shift in shifts_of(stretch.entry, 1)
        )
    found = []
    for part in entry.parts:
        if part.is_laplace or part.sampling == "with_replacement":
            continue
        lengths = 1 / part.noise.min(axis=1)  # [rounds or 1], of the client that shifts most
        often = float(np.max(part.count)) * entry.turns
        absent = entry.chance is not None and bool(np.min(entry.chance) < 1)
        if entry.adjacency == "replace_one" and (absent or part.sampling != "none"):
            often = 2 * often
        run, repeats = (rounds, 1) if entry.rounds is None else (entry.rounds, rounds)
        if entry.participations is not None:  # in the rounds with the least noise, at worst
            run, repeats = int(np.max(entry.participations)), rounds
            lengths = np.sort(lengths)[::-1]
        if not run:
            continue
        if part.finite is not None:
            found.append(part.finite._replace(times=often * run * repeats))
            continue
        values, counts = lengths, np.array([float(run)])
        if len(lengths) > 1:
            values, counts = np.unique(lengths[:run], return_counts=True)
        if part.joint:
            whole = float(np.sqrt(np.sum(counts * np.square(values))))
            found.append(Shift(whole, entry.normals * run, MISSING, often * repeats))
            continue
        found += [
            Shift(float(v), entry.normals, MISSING, n * often * repeats)
            for v, n in zip(values, counts)
        ]
    return tuple(found)
