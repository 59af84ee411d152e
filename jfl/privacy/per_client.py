"""Epsilons of single clients, and guarantees for clients that take part less often than every
round."""

import math

import numpy as np

from ..core import checks
from ..core.records import Plan
from .accountants import events
from .entry_guarantees import choices, choose, entries_of, guarantee_of, overflowing
from .ledger import entries
from .ledger.client_level import summed, weights
from .ledger.example_level import kinds
from .ledger.participation import counts, share_of, some_rounds, turns
from .mechanisms.chain import noisy
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

    Without `view` it is of the view that jfl.guarantee(plan, rounds, delta, "example") names.

    Shapes:
        -> Float64[C]; 0 for a client without rows or rounds, inf without noise.

    Privacy:
        unit "example", for the adjacency of the plan; sizes and rates are public.  The largest is
        `guarantee`'s, or a little below it; of more than 64 different clients, Renyi bounds only,
        which may be above it.

    Args, Errors   as `guarantee`.
    """
    sizes = np.asarray(plan.fed.size).reshape(-1)
    found = entries_of(plan, rounds, delta)
    if not found:
        return np.where(sizes > 0, math.inf, 0.0)
    choices(None, view, None)
    options = dict(cap=cap, quantile=quantile, realised=realised)
    entry = choose("jfl.epsilons_per_client", plan, found, "example", view, None)
    taint.warn("jfl.epsilons_per_client", entry)
    if entry.one is None:  # the noise of the release protects all alike
        return np.where(sizes > 0, guarantee_of(entry, rounds, delta).epsilon, 0.0)
    extent, left, once = extents(plan, entry, rounds, delta, options)
    columns = [np.broadcast_to(z, (len(z), len(sizes))) for z in entry.z]
    columns += [weights(plan, rounds)] if noisy(plan.upload) and summed(plan) else []
    alike, first, which = np.unique(
        np.concatenate([sizes[None], extent[None], *columns]),
        axis=1,
        return_index=True,
        return_inverse=True,
    )
    worth = lambda e: (
        guarantee_of(e, 1, left).epsilon
        if len(first) <= KINDS
        else overflowing(e, np.ones(1), left)[0][0]
    )
    each = [0.0 if sizes[c] == 0 or extent[c] == 0 else worth(once(entry.z, c)) for c in first]
    return np.array(each)[which.reshape(-1)]


def extents(plan, entry, rounds, delta, options):
    """How much each client takes part [C], the delta that is left, and (z, client) -> its entry for
    the whole run."""
    sizes = np.asarray(plan.fed.size).reshape(-1)
    view = entry.view
    if view == "server":
        often, beta, _, _ = participations(plan, rounds, delta, view, options)
        return (
            often,
            delta - beta,
            lambda z, c: counted(entry._replace(z=z), plan, rounds, often, c),
        )
    if any(v is not None for v in options.values()):
        participations(plan, rounds, delta, view, options)
    share = np.broadcast_to(share_of(plan.sampler), sizes.shape)

    def once(z, c):
        alone = entry._replace(
            z=z, events=lambda z: (some_rounds(plan.sampler, share[c], entry.one(z, sizes[c], c)),)
        )
        slots = plan.sampler.capacity if plan.sampler.independent else 1
        return alone._replace(
            events=lambda z: entries.run(alone, z, rounds),
            series=False,
            overflow=slip(entry, sizes[c]) * slots * rounds,
        )

    return share, delta, once


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
    found = counts(plan, rounds, **options)
    if not found[1] < delta:
        checks.fail(
            "jfl.guarantee",
            "quantile < delta",
            f"quantile={found[1]:g}, delta={delta:g}",
            "It is a part of delta: a tenth is usual.",
        )
    return found


def counted(entry, plan, rounds, often, client=None):
    """An entry of a single "round": a whole run, in which clients take part `often`; or that of one
    client."""
    if entry.one is None:
        checks.fail(
            "jfl.guarantee",
            "noise of the client's own beside cap, quantile or realised",
            "noise of the release",
        )
    sizes = np.asarray(plan.fed.size).reshape(-1)
    # a client without rows has no examples, but counts as a client
    active = (often > 0) & ((sizes > 0) | (entry.unit == "client"))
    active &= np.isin(np.arange(len(sizes)), np.arange(len(sizes)) if client is None else client)
    at = np.flatnonzero(active)
    by_rows = entry.unit == "example" and entry.slip is not None
    own = (
        tuple(z if z.shape[1] == 1 else z[:, at] for z in entry.z)
        if isinstance(entry.z, tuple)
        else ()
    )
    found = (
        kinds(sizes[at] if by_rows else np.zeros(len(at), int), often[at], own) if len(at) else []
    )
    # more rows overflow more often: the one who loses most is not the one who gains least
    lost = max(
        (slip(entry, r) * c for r, c in set(zip(sizes[at].tolist(), often[at].tolist()))),
        default=0.0,
    )
    # the noise on an upload is not drawn by rows: what may overflow is the cohort, in every round
    lost = lost if entry.slip else entry.overflow * rounds

    def happens(z):
        return tuple(
            _times(
                entry, _loudest(z, int(count), turns(plan.sampler)), int(rows), int(count), at[c]
            )
            for rows, count, c in found
        )

    return entry._replace(events=happens, overflow=lost, series=False)


def _loudest(z, count, most):
    """Levels of `count` participations where the noise is least, `most` in a round: a client may
    have come in those."""
    if not isinstance(z, tuple):
        return z
    one = lambda v: v if len(v) == 1 else np.sort(np.repeat(v, most, axis=0), axis=0)[:count]
    return tuple(one(v) for v in z)


def _times(entry, z, rows, count, client):
    event = entry.one(z, rows, client)
    changing = isinstance(z, tuple) and any(len(v) > 1 for v in z)
    return events.series(event, np.ones(count)) if changing else events.repeat(event, count)


def slip(entry, rows):
    return entry.slip(np.array([rows])) if entry.slip else 0.0
