"""By how much a unit shifts the releases of an entry, for what the finite reach of noise costs."""

import numpy as np

from ...kernels.normals import MISSING
from ..accountants.truncation import Shift, left_of
from .entry import Entry, Part, effective

# Normals that are drawn for each parameter of the model, at most: wavelet noise is padded, and an
# upload may hold several trees.  Only the square root of their number counts.
NORMALS_OF_A_PARAMETER = 64


def shifts_of(entry: Entry, rounds: int) -> tuple[Shift, ...]:
    """Return the shifts of all releases of a run.

    Every client counts as taking part in every round and every batch: sampling only lowers the
    cost.

    Args:
        entry: of the ledger.
        rounds: of the run; or how often an entry of a whole run is repeated.
    """
    if not entry.normals:  # of noise without an end, as papers take it
        return ()
    if entry.stretches:
        return tuple(
            shift._replace(times=shift.times * stretch.rounds * rounds)
            for stretch in entry.stretches
            for shift in shifts_of(stretch.entry, 1)
        )
    return tuple(
        shift
        for part in entry.parts
        # integers have a table of their own, which says what it leaves out
        if part.renyi is None and _has_one_shift(part)
        for shift in _of_part(entry, part, rounds)
    )


def with_reach(entry: Entry, normals: float) -> Entry:
    """Return an entry that knows from how many normals its releases are computed.

    The distribution of computed noise differs from the exact one by at most the mass that its
    normals miss, which costs (1 + e^epsilon) of delta, as an overflow does.  That is charged where
    the shifts are not: for Laplace noise, of which a number is made of two pairs of normals, and
    for samples that may hold a unit several times.
    """
    often = sum(float(np.max(p.count)) for p in entry.parts if not _has_one_shift(p))
    missed = 2 * MISSING * normals * often
    rows = None if entry.row_overflow is None else entry.row_overflow + missed
    return entry._replace(
        normals=normals, overflow=entry.overflow + missed * entry.turns, row_overflow=rows
    )


def lost_of(entry: Entry, times: np.ndarray, delta: float) -> np.ndarray:
    """Return what the reach of the noise takes of delta after each of several numbers of rounds."""
    lost = lambda n: delta - left_of(delta, shifts_of(entry, n))
    if not entry.changes and all(part.of_rounds is None for part in entry.parts):
        return times * lost(1)
    distinct, where = np.unique(times, return_inverse=True)
    return np.array([lost(int(n)) for n in distinct])[where]


def _has_one_shift(part: Part) -> bool:
    """Whether noise is Gaussian, and a release is shifted by one contribution of a unit at most."""
    return part.law == "gaussian" and part.sampling != "with_replacement"


def _of_part(entry, part: Part, rounds) -> list[Shift]:
    lengths = 1 / effective(part).min(axis=1)  # [rounds or 1], of the client that shifts it most
    often = float(np.max(part.count)) * entry.turns
    absent = entry.chance is not None and bool(np.min(entry.chance) < 1)
    if entry.adjacency == "replace_one" and (absent or part.sampling != "none"):
        often = 2 * often
    run, repeats = (rounds, 1) if entry.rounds is None else (entry.rounds, rounds)
    if entry.participations is not None:  # a client may come in the rounds with the least noise
        run, repeats = int(np.max(entry.participations)), rounds
        lengths = np.sort(lengths)[::-1]
    if not run:
        return []
    if len(lengths) == 1:
        values, counts = lengths, np.array([float(run)])
    else:
        values, counts = np.unique(lengths[:run], return_counts=True)
    if part.of_rounds is not None:  # the rounds are one release, of one shift
        whole = float(np.sqrt(np.sum(counts * np.square(values))))
        return [Shift(whole, entry.normals * run, MISSING, often * repeats)]
    return [
        Shift(float(v), entry.normals, MISSING, n * often * repeats) for v, n in zip(values, counts)
    ]
