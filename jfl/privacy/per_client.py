"""Epsilons of single clients, and guarantees for clients that take part less often than every
round."""

import math
from typing import Any

import numpy as np

from ..core import checks
from ..core.records import Plan
from .entry_guarantees import choices, choose, entries_of, guarantee_of, overflowing
from .ledger.entry import Entry, effective, of_client
from .ledger.over_rounds import sensitivity_to
from .ledger.participation import counts, share_of, worst_columns
from .mechanisms.correlated import strategy_of
from .taint import checker as taint

KINDS = 64  # of clients, for each of which a privacy-loss distribution is computed


def epsilons_per_client(
    plan: Plan,
    rounds: int,
    delta: float = 1e-5,
    view: str | None = None,
    *,
    cap: int | None = None,
    quantile: float | None = None,
    realised=None,
) -> np.ndarray:
    """The epsilon of the examples of each client, which its rows, its participation and its noise
    decide.

    Args:
        plan: a Plan.
        rounds: how many rounds are run.
        delta: in (0, 1).
        view: "server" or "third_party"; None: the view that
            jfl.guarantee(plan, rounds, delta, "example") names.
        cap: as in `jfl.guarantee`.
        quantile: as in `jfl.guarantee`.
        realised: Int[C], as in `jfl.guarantee`.

    Returns:
        Float64[C]; 0 for a client without rows or rounds, inf without noise.

    Privacy:
        unit "example", for the adjacency of the plan; sizes and rates are public.  The largest is
        `guarantee`'s, or a little below it; of more than 64 different clients, Renyi bounds only,
        which may be above it.

    Raises:
        ValueError: as `jfl.guarantee`.
    """
    sizes = np.asarray(plan.fed.size).reshape(-1)
    listed = entries_of(plan, rounds, delta)
    if not listed:
        return np.where(sizes > 0, math.inf, 0.0)
    choices(None, view, None)
    options = dict(cap=cap, quantile=quantile, realised=realised)
    entry = choose("jfl.epsilons_per_client", plan, listed, "example", view, None)
    taint.warn("jfl.epsilons_per_client", entry)
    if entry.noise_of == "server":  # it protects all clients alike
        return np.where(sizes > 0, guarantee_of(entry, rounds, delta).epsilon, 0.0)
    extent, left, whole = extents(plan, entry, rounds, delta, options)
    columns = [np.broadcast_to(z, (len(z), len(sizes))) for z in map(effective, entry.parts)]
    alike, first, which = np.unique(
        np.concatenate([sizes[None], extent[None], *columns]),
        axis=1,
        return_index=True,
        return_inverse=True,
    )
    epsilon_for = lambda e: (
        guarantee_of(e, 1, left).epsilon
        if len(first) <= KINDS
        else overflowing(e, np.ones(1), left)[0][0]
    )
    each = [
        0.0 if sizes[c] == 0 or extent[c] == 0 else epsilon_for(alone(whole, c, rounds))
        for c in first
    ]
    return np.array(each)[which.reshape(-1)]


def extents(plan, entry: Entry, rounds, delta, options):
    """How much each client takes part [C], the delta that is left, and the entry of the whole run,
    of which `of_client` picks one."""
    view = entry.view
    if view == "server":
        often, beta, _, _ = participations(plan, rounds, delta, view, options)
        return often, delta - beta, counted(plan, entry, rounds, often)
    if any(v is not None for v in options.values()):
        participations(plan, rounds, delta, view, options)
    share = np.broadcast_to(share_of(plan.sampler), np.shape(entry.clients.rows))
    return share, delta, entry._replace(rounds=rounds)


def alone(entry: Entry, client: int, rounds) -> Entry:
    """One client's part of an entry that `extents` gives."""
    lost = 0.0 if entry.row_overflow is None else entry.row_overflow[client]
    if entry.participations is None:
        lost = lost * entry.turns * rounds
    elif entry.row_overflow is None:
        lost = entry.overflow
    else:
        lost = lost * entry.participations[client]
    return of_client(entry, client)._replace(overflow=lost)


def participations(plan, rounds, delta, view, options):
    if view != "server":
        checks.fail(
            "jfl.guarantee",
            "view='server' beside cap, quantile or realised",
            f"view={view!r}",
            (
                "A third party does not see who takes part: its guarantee counts the chance of "
                "that "
                "already."
            ),
        )
    how_often = counts(plan, rounds, **options)
    if not how_often[1] < delta:
        checks.fail(
            "jfl.guarantee",
            "quantile < delta",
            f"quantile={how_often[1]:g}, delta={delta:g}",
            "It is a part of delta: a tenth is usual.",
        )
    return how_often


def counted(plan: Plan, entry: Entry, rounds, often) -> Entry:
    """The entry of a whole run, in which each client takes part so `often`, Int[C]."""
    if entry.noise_of == "server":
        checks.fail(
            "jfl.guarantee",
            "noise of the client's own beside cap, quantile or realised",
            "noise of the release",
        )
    if strategy_of(plan.upload) is not None and entry.method:
        entry, often = _joint(plan, entry, rounds, often)
    rows, by_rows = entry.clients.rows, entry.row_overflow is not None
    active = np.intersect1d(np.flatnonzero(often > 0), entry.clients.counted)
    # more rows overflow more often: the one who loses most is not the one who gains least
    by_row: Any = entry.row_overflow
    lost = (by_row[active] * often[active]).max(initial=0.0) if by_rows else None
    return entry._replace(
        rounds=rounds,
        participations=often,
        worst=worst_columns(
            rows if by_rows else np.zeros(len(rows), int),
            often,
            [p.multiplier if p.of_rounds is None else effective(p) for p in entry.parts],
            active,
        ),
        # the noise on an upload is not drawn by rows: what may overflow is the cohort, every round
        overflow=entry.overflow * rounds if lost is None else float(lost),
    )


def _joint(plan, entry, rounds, often):
    """All participations of a client as one release, because its noise is correlated over them;
    and whether each client takes part at all, Int[C]."""
    moved = np.array([sensitivity_to(plan, rounds, int(n)) for n in np.unique(often)])
    each = moved[np.unique(often, return_inverse=True)[1].reshape(-1)]
    with np.errstate(divide="ignore"):
        of_rounds = (1 / each)[None]
    parts = tuple(p._replace(of_rounds=of_rounds) for p in entry.parts)
    return entry._replace(parts=parts), np.minimum(often, 1)
