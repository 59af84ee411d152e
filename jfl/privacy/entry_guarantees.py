"""What an entry of the ledger is worth: its epsilon, with what overflow and the reach of computed
noise cost, and the choice among entries."""

import math

import numpy as np

from ..core import checks
from ..core.errors import ArgumentError, NotAnalysable
from ..core.records import Guarantee, Plan, code_of
from ..verify.check import PUBLIC_CONSTANTS
from .accountants import events, truncation
from .accountants.rdp_events import EXACT, Overflow, bounds, check_delta
from .accountants.tightest import FINE, Release, tightest
from .ledger import entries as ledger
from .ledger.entry import Entry, effective, events_of, levels_of, lost_of, run, shifts_of
from .mechanisms.chain import ADJACENCIES, noisy

MOST = 10**12  # rounds
FEW = 16  # levels of noise, which are counted instead of listed


def guarantee_of(entry: Entry, rounds, delta) -> Guarantee:
    """Return the guarantee of `rounds` rounds of an entry."""
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
    """Return what `rounds` rounds of an entry release."""
    listed = run(entry, rounds)
    if not listed:  # nobody takes part
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
    """Return events whose noise differs by rounds, as series of all that any of them has; and how
    often each part happened within so many rounds, [m, parts]."""
    most = int(np.max(times, initial=1))
    levels, which = levels_of(listed, most)
    count = which.max(initial=0) + 1
    happened = np.arange(most) < times[:, None]
    if count <= FEW:
        listed, most = levels, count
        happened = happened.astype(float) @ (which[:, None] == np.arange(count))
    return tuple(events.series(e, np.ones(most)) for e in listed), happened


# --- choice


def entries_of(plan, rounds, delta) -> list[Entry]:
    """Return the ledger of a plan, for a guarantee of so many rounds at this delta."""
    checks.require_type("jfl.guarantee", Plan, "jfl.plan", plan=plan)
    checks.require_integer("jfl.guarantee", max_value=MOST, rounds=rounds)
    check_delta(delta)
    return ledger.entries(plan, rounds)


def choices(unit, view, adjacency) -> None:
    """Refuse what is no unit, view or adjacency."""
    checks.require_one_of("jfl.guarantee", (None, "example", "client"), unit=unit)
    checks.require_one_of("jfl.guarantee", (None, *ledger.VIEWS, "personal"), view=view)
    checks.require_one_of("jfl.guarantee", (None, *ADJACENCIES), adjacency=adjacency)


def choose(where, plan, entries, unit, view, adjacency) -> Entry:
    """Return the one entry that answers; without a view, of the first view that has one.

    Raises:
        NotAnalysable: with the refusal of the entry that was asked for; if no entry has an answer.
        ArgumentError: with the choices there are, where none or several entries fit.
    """
    fits = {one: _fit(entries, unit, one, adjacency) for one in ((view,) if view else ledger.VIEWS)}
    single = [fit[0] for fit in fits.values() if len(fit) == 1]
    answers = [entry for entry in single if not entry.refusal]
    if answers:
        return answers[0]
    if single:
        raise NotAnalysable(single[0].refusal)
    asked = dict(unit=unit, view=view, adjacency=adjacency)
    names = [f"{name}={value!r}" for name, value in asked.items() if value]
    count = [
        f"{len(fit)} of them" + f" for view={one!r}" * (view is None) for one, fit in fits.items()
    ]
    options = "; ".join(
        dict.fromkeys(
            f"unit={e.unit!r}, view={e.view!r}, adjacency={e.adjacency!r}"
            for e in entries
            if not (e.refusal or e.implied)
        )
    )
    because = ""
    only_release = noisy(plan.release) and not noisy(plan.upload)
    if view == "server" and not fits[view] and only_release:
        because = "The server sees every upload before the noise of the release is added. "
    if view == "aggregate" and not plan.secure_aggregation:
        because = "Say jfl.plan(..., secure_aggregation=True), if that is how uploads are summed. "
    checks.fail(
        where,
        "one guarantee that this plan's noise can prove",
        f"{', '.join(names) or 'neither unit nor view'}, which fits {' and '.join(count)}",
        f"{because}Choices: {options or 'none'}.",
        error=ArgumentError if options else NotAnalysable,
    )


def _fit(entries, unit, view, adjacency):
    """Return the entries that answer for a view; of noise on the uploads and on the release, which
    may both prove the same, the one that proves more."""
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
    if len(good) == 1:
        return good
    rounds = max((len(effective(p)) for e in good if e.changes for p in e.parts), default=1)

    def rough(entry):
        try:
            return overflowing(entry, np.array([rounds]), 1e-5)[0][0]
        except Overflow:
            return math.inf

    return [min(good, key=rough)]
