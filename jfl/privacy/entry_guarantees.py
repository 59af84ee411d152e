"""What an entry of the ledger is worth: its epsilon, the price of an overflow, and the choice among
entries."""

import math

import numpy as np

from ..core import checks
from ..core.errors import ArgumentError, NotAnalysable
from ..core.records import Guarantee, Plan, code_of
from .accountants import events, truncation
from .accountants.rdp_events import EXACT, Overflow, bounds, check_delta
from .accountants.tightest import FINE, Release, tightest
from .ledger import entries as ledger
from .ledger.entry import Entry, effective
from .ledger.reach import lost_of, shifts_of
from .ledger.to_events import events_of, of_levels, run
from .mechanisms.chain import ADJACENCIES
from .taint.public_constants import CODE as PUBLIC_CONSTANTS

MOST = 10**12  # rounds
FEW = 16  # levels of noise, which are counted instead of listed


def guarantee_of(entry: Entry, rounds, delta) -> Guarantee:
    if entry.refusal:
        raise NotAnalysable(entry.refusal)
    release = release_of(entry, rounds)
    value, method = tightest(release, delta)
    if entry.method:
        method = f"{entry.method}, {method}"
    if entry.mixture and method != EXACT:
        method += ", participation mixture"
    return Guarantee(
        value,
        float(delta),
        entry.unit,
        entry.adjacency,
        entry.view,
        method,
        entry.status if math.isfinite(value) else "none",
        # what the guarantee assumes of constants is its last word
        tuple(sorted(dict.fromkeys(entry.caveats), key=lambda c: code_of(c) == PUBLIC_CONSTANTS)),
        entry.implied,
    ).about(release)


def release_of(entry: Entry, rounds) -> Release:
    """What `rounds` rounds of an entry release."""
    listed = run(entry, rounds)
    if not listed:
        return Release(listed)
    return Release(listed, entry.overflow * rounds, shifts=shifts_of(entry, rounds))


def tight_of(entry: Entry, rounds, delta, sizes=FINE) -> tuple[float, str]:
    """Return the smallest epsilon and its method, for a run of `rounds`, on grids of these
    sizes."""
    return tightest(release_of(entry, rounds), delta, sizes)


def overflowing(entry: Entry, times, delta):
    """Return quick bounds after each of several numbers of rounds, and whether the exact Gaussian
    gave each."""
    listed, happened = events_of(entry), times
    if not listed:
        return np.zeros(times.shape), np.ones(times.shape, bool)
    if entry.changes:  # how often each round's noise was added
        listed, happened = _by_levels(listed, times)
    lost = lost_of(entry, times, float(delta))
    truncation.refuse_if_beyond("jfl.guarantee", lost, delta, Overflow)
    return bounds(listed, happened, float(delta) - lost, entry.overflow * times)


def _by_levels(listed, times):
    """Events whose noise differs by rounds, as series of all that any of them has; and how often
    each part happened within so many rounds, [m, parts]."""
    most = int(np.max(times, initial=1))
    if len(listed) == 1:
        levels, which = of_levels(listed[0], most)
        count = which.max(initial=0) + 1
        if count <= FEW:
            happened = np.cumsum(which[:, None] == np.arange(count), axis=0)
            happened = np.concatenate([np.zeros((1, count), int), happened])[np.asarray(times)]
            return (events.series(levels, np.ones(count)),), happened
    return (
        tuple(events.series(e, np.ones(most)) for e in listed),
        np.arange(most) < times[:, None],
    )


# --- choice


def entries_of(plan, rounds, delta) -> list[Entry]:
    """The ledger of a plan, for a guarantee of so many rounds at this delta."""
    checks.kind("jfl.guarantee", Plan, "jfl.plan", plan=plan)
    checks.whole("jfl.guarantee", most=MOST, rounds=rounds)
    check_delta(delta)
    return ledger.entries(plan, rounds)


def choices(unit, view, adjacency) -> None:
    """Refuse what is no unit, view or adjacency."""
    checks.choice("jfl.guarantee", (None, "example", "client"), unit=unit)
    checks.choice("jfl.guarantee", (None, *ledger.VIEWS, "personal"), view=view)
    checks.choice("jfl.guarantee", (None, *ADJACENCIES), adjacency=adjacency)


def choose(where, plan, entries, unit, view, adjacency) -> Entry:
    """The one entry that answers; without a view, of the server's where it has one, else of a third
    party's.

    Raises:
        NotAnalysable: with the refusal of the entry that was asked for; if no entry has an answer.
        ArgumentError: with the choices there are, where none or several entries fit.
    """
    views = (view,) if view else ledger.VIEWS
    fits = {one: _fit(entries, unit, one, adjacency) for one in views}
    single = [fit[0] for fit in fits.values() if len(fit) == 1]
    answers = [entry for entry in single if not entry.refusal]
    if answers:
        return answers[0]
    if single:
        raise NotAnalysable(single[0].refusal)
    asked = dict(unit=unit, view=view, adjacency=adjacency)
    names = [f"{name}={value!r}" for name, value in asked.items() if value]
    count = {one: f"{len(fit)} of them" for one, fit in fits.items()}
    options = "; ".join(
        dict.fromkeys(
            f"unit={e.unit!r}, view={e.view!r}, adjacency={e.adjacency!r}"
            for e in entries
            if not (e.refusal or e.implied)
        )
    )
    because = ""
    if view == "server" and not fits[view] and ledger.only_the_release(plan):
        because = "The server sees every upload before the noise of the release is added. "
    if view == "aggregate" and not plan.secure_aggregation:
        because = "Say jfl.plan(..., secure_aggregation=True), if that is how uploads are summed. "
    checks.fail(
        where,
        "one guarantee that this plan's noise can prove",
        f"{', '.join(names) or 'neither unit nor view'}, which fits "
        + (count[view] if view else " and ".join(f"{n} for view={v!r}" for v, n in count.items())),
        f"{because}Choices: {options or 'none'}.",
        error=ArgumentError if options else NotAnalysable,
    )


def _fit(entries, unit, view, adjacency):
    """The entries that answer for a view, the better one where two prove the same."""
    fit = [
        e
        for e in entries
        if e.view == view and unit in (None, e.unit) and adjacency in (None, e.adjacency)
    ]
    if len(fit) > 1:
        fit = [e for e in fit if not e.implied] or fit
    good = [e for e in fit if not e.refusal]
    if not good or len({(e.unit, e.adjacency) for e in fit}) > 1:
        return fit
    if len(good) > 1:
        # noise on the uploads and on the release: each proves it alone, so take the one that does
        # better
        rounds = max((len(effective(p)) for e in good if e.changes for p in e.parts), default=1)
        good = [min(good, key=lambda e: _rough(e, rounds))]
    return good


def _rough(entry, rounds):
    """A quick epsilon of so many rounds, to rank entries by."""
    try:
        return overflowing(entry, np.array([rounds]), 1e-5)[0][0]
    except Overflow:
        return math.inf
