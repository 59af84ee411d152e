"""From a plan to what one round of it releases about an example or a client, for each view.

An entry is what an accountant needs and no more.  What it assumes beyond the plan travels with it as caveats; what it
cannot analyse becomes its `refusal`, so that the other entries can still be listed.
"""
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .. import check
from ..core import Plan
from . import events
from .mechanism import multiplier
from .participation import EVERY_ROUND as EVERY_ROUND
from .participation import HONEST as HONEST
from .participation import VIEWS as VIEWS
from .participation import absent, drawn, every_round, frontier, share_of, some_rounds, tail, who

SIMULATION = "float32 noise from a simulation PRNG, not for deployment"
PUBLIC = "sizes, rates and weights are public constants"
PAIRED = "sweep points that share a seed share noise"
IMPLIED = "implied by the client-level guarantee"
IMPLIED_TWICE = "implied by the client-level noise: an example moves an upload by up to twice its bound"

class Entry(NamedTuple):
    """One thing to guarantee."""
    unit: str                    # example | client
    view: str                    # server | third_party
    adjacency: str               # add_remove | replace_one
    events: Callable             # z -> events of one round, one for each client that may be the worst
    z: tuple | float = 1.0       # the plan's own multiplier, or one for each release of the algorithm
    overflow: float = 0.0        # probability, a round, that a draw finds no slot
    mixture: bool = False        # gains from a client's absence only
    implied: bool = False        # by another unit's guarantee
    one: Callable | None = None  # (z, rows of a client) -> the event of one of its participations
    slip: Callable | None = None # rows -> probability, a participation, that a row drawn finds no slot
    refusal: str = ""            # why there is no epsilon
    caveats: tuple = ()


def entries(plan: Plan) -> list[Entry]:
    """All that the noise of a plan may protect; empty without noise.

    Errors   ValueError if the plan holds traced values: a ledger is kept on the host.
    """
    if not check.concrete(plan):
        check.fail("jfl.guarantee", "a plan of concrete values", "traced ones", "Call it outside jit and vmap.")
    own = _examples(plan)
    clients = _uploads(plan) + _release(plan)
    proved = any(not e.refusal for e in own)
    listed = own + clients + ([] if proved else [_implied(plan, e) for e in clients])
    return [e._replace(caveats=e.caveats + _travelling(plan, e)) for e in listed]


def concatenate(segments) -> list[Entry]:
    """What several plans, one after another for the rounds of each, release together about the same clients.

    Args     segments: (plan, rounds) pairs.
    Shapes   the entries are of one "round" that is the whole run, one for each unit, view and adjacency that all
             plans have.
    Errors   ValueError as `entries`, or if the plans differ in their number of clients.
    """
    counts = {int(np.size(plan.fed.size)) for plan, _ in segments}
    if len(counts) > 1:
        check.fail("jfl.guarantee", "segments with the same clients", f"{sorted(counts)} clients")
    for _, rounds in segments:
        check.whole("jfl.guarantee", rounds=rounds)
    listed = [{(e.unit, e.view, e.adjacency): e for e in entries(plan)} for plan, _ in segments]
    shared = [k for k in listed[0] if all(k in other for other in listed[1:])]
    return [_joined([other[k] for other in listed], [rounds for _, rounds in segments]) for k in shared]


def _joined(parts, rounds):
    def happens(z):
        found = [tuple(events.repeat(e, r) for e in p.events(each)) for p, each, r in zip(parts, z, rounds)]
        # each client may be the worst in each segment: all combinations are at least as bad as any client
        combined = functools.reduce(lambda done, new: [d + (e,) for d in done for e in new], found, [()])
        return tuple(events.compose(*c) for c in combined)

    refusals = [p.refusal for p in parts if p.refusal]
    return parts[0]._replace(
        events=happens, z=tuple(p.z for p in parts), overflow=sum(p.overflow * r for p, r in zip(parts, rounds)),
        mixture=any(p.mixture for p in parts), implied=any(p.implied for p in parts), one=None,
        refusal=refusals[0] if refusals else "", caveats=sum((p.caveats for p in parts), ()))


def only_the_release(plan: Plan) -> bool:
    """True if noise is added only after the server has seen the uploads."""
    return multiplier(plan.release) is not None and multiplier(plan.upload) is None and not _examples(plan)


def _travelling(plan, entry):
    uneven = entry.unit == "client" and (callable(plan.weights) or np.ptp(np.asarray(plan.weights)) > 0)
    public = entry.adjacency == "add_remove" or uneven
    return (SIMULATION,) + ((PUBLIC,) if public else ()) + ((PAIRED,) if plan.paired_noise else ())


def _refused(unit, view, adjacency, error):
    return Entry(unit, view, adjacency, lambda z: (), refusal=str(error))


# --- examples -----------------------------------------------------------------------------------------------------

def _examples(plan):
    """Noise inside the client's own steps: the server sees it too."""
    releases = plan.algorithm.releases
    if not releases or any(multiplier(r.mechanism) is None for r in releases):
        return []                                         # one bare look at the data, and nothing is proved
    kinds = sorted({_rows_adjacency(r) for r in releases})
    try:
        if len(kinds) > 1:
            check.fail("jfl.guarantee", "one adjacency for all releases of an algorithm", kinds,
                       "Use batch samplers of one kind.")
        return [_example_entry(plan, view, kinds[0]) for view in VIEWS]
    except ValueError as error:
        return [_refused("example", view, kinds[0], error) for view in VIEWS]


def _rows_adjacency(release):
    return release.mechanism.adjacency or ("add_remove" if release.batches.scheme == "poisson" else "replace_one")


def _example_entry(plan, view, adjacency):
    sampler, releases = plan.sampler, plan.algorithm.releases
    sizes = np.asarray(plan.fed.size).reshape(-1)
    present = sizes > 0
    sizes, share = sizes[present], np.broadcast_to(share_of(sampler), present.shape)[present]
    if sizes.size == 0:
        check.fail("jfl.guarantee", "a client with rows", "none")
    # fewer rows never help: a larger rate, or more looks at each row
    worst = [(sizes.min(), share.max())] if view == "server" else frontier(sizes, share)

    own = tuple(multiplier(r.mechanism) for r in releases)

    def participation(z, rows):
        parts = []
        for r, each in zip(releases, np.broadcast_to(z, len(releases))):
            step, count = _step(r.batches, r.count, adjacency, int(rows), events.gaussian(each))
            parts.append(events.repeat(step, count))
        return parts[0] if len(parts) == 1 else events.compose(*parts)

    def happens(z):
        if view == "server":
            return tuple(every_round(sampler, participation(z, rows)) for rows, _ in worst)
        return tuple(some_rounds(sampler, s, participation(z, rows)) for rows, s in worst)

    happens(own)                                          # refuses now what it would refuse later
    slip = lambda rows: sum(_rows_overflow(r, rows) for r in releases)
    overflow = (sampler.capacity if sampler.independent else 1) * slip(sizes)
    return Entry("example", view, adjacency, happens, own, overflow, absent(plan, view), one=participation, slip=slip,
                 caveats=who(plan, view))


def _step(batches, count, adjacency, rows, noise):
    """The event of one step, and how many of them touch a given row."""
    scheme, size = batches.scheme, batches.batch
    if scheme == "full":
        return noise, count
    if scheme == "poisson":
        return (events.poisson(_rate(batches, rows), noise) if adjacency == "add_remove" else noise), count
    if adjacency != "replace_one":
        check.fail("jfl.guarantee", f"adjacency 'replace_one' for batches.{scheme}", f"{adjacency!r}",
                   "One row more changes who else is in a batch: use batches.poisson for add_remove.")
    if scheme == "epochs":
        return noise, math.ceil(count / math.ceil(rows / size))
    if scheme == "with_replacement":
        return events.with_replacement(size, rows, noise), count
    if scheme != "without_replacement":
        check.fail("jfl.guarantee", "a scheme of jfl.batches", f"scheme={scheme!r}")
    if rows < size and batches.short != "all":
        check.fail("jfl.guarantee", f"at least batch={size} rows in every client", f"{rows} rows",
                   'Lower batch, or use batches.without_replacement(batch, short="all").')
    return (events.without_replacement(size, rows, noise) if rows > size else noise), count


def _rate(batches, rows):
    given = np.asarray(batches.rate if batches.rate is not None else batches.expected, np.float32)
    return drawn(given if batches.rate is not None else min(np.float32(1), given / np.float32(rows)))


def _rows_overflow(release, sizes):
    batches = release.batches
    if batches.scheme != "poisson" or batches.batch is None:
        return 0.0
    return release.count * max(tail(batches.batch, n, _rate(batches, n)) for n in np.unique(sizes))


# --- clients ------------------------------------------------------------------------------------------------------

def _uploads(plan):
    """Noise on each client's own upload; what other clients add is not counted."""
    own = multiplier(plan.upload)
    if own is None:
        return []
    sampler, adjacency = plan.sampler, plan.upload.adjacency or "replace_one"
    share = float(np.max(share_of(sampler)))

    def happens(view):
        if view == "server":
            return lambda z: (every_round(sampler, events.gaussian(z)),)
        return lambda z: (some_rounds(sampler, share, events.gaussian(z)),)

    return [Entry("client", view, adjacency, happens(view), own, _cohort_overflow(sampler), absent(plan, view),
                  one=lambda z, rows: events.gaussian(z), caveats=who(plan, view)) for view in VIEWS]


def _release(plan):
    """Noise of the server: for those who see models only."""
    if multiplier(plan.release) is None:
        return []
    sampler = plan.sampler
    adjacency = plan.release.adjacency or ("add_remove" if sampler.scheme == "poisson" else "replace_one")
    try:
        own = _release_multiplier(plan)
        happens = lambda z: (_cohort(plan, adjacency, events.gaussian(z)),)
        happens(own)
    except ValueError as error:
        return [_refused("client", "third_party", adjacency, error)]
    return [Entry("client", "third_party", adjacency, happens, own, _cohort_overflow(sampler),
                  caveats=who(plan, "third_party"))]


def _release_multiplier(plan):
    if not callable(plan.weights):
        return multiplier(plan.release, float(np.max(np.asarray(plan.weights))))
    if multiplier(plan.release, 2.0) != multiplier(plan.release, 1.0):
        check.fail("jfl.guarantee", "gaussian(noise_multiplier) beside weights that change from round to round",
                   "gaussian(std=...)", "The sensitivity follows the weights of the round, and std does not.")
    return multiplier(plan.release)


def _cohort(plan, adjacency, noise):
    sampler, scheme = plan.sampler, plan.sampler.scheme
    if scheme == "with_replacement" and plan.algorithm.stateful:
        check.fail("jfl.guarantee", "a sampler it can analyse for unit='client' and clients that remember",
                   "sampling.with_replacement", "Use sampling.without_replacement or sampling.poisson.")
    if scheme == "full" or (scheme == "poisson" and adjacency == "replace_one"):
        return noise
    if scheme == "poisson":
        return events.poisson(share_of(sampler), noise)
    if scheme not in ("with_replacement", "without_replacement"):
        check.fail("jfl.guarantee", "a scheme of jfl.sampling", f"scheme={scheme!r}")
    if adjacency != "replace_one":
        check.fail("jfl.guarantee", f"adjacency 'replace_one' for sampling.{scheme}", f"{adjacency!r}",
                   "One client more changes the cohort of the others: use sampling.poisson for add_remove.")
    if scheme == "with_replacement":                      # a client drawn m times moves the sum m times
        return events.with_replacement(sampler.capacity, 1 / np.max(share_of(sampler)), noise)
    # what a client remembers depends on rounds that the replaced client did not see: hidden sampling gains nothing
    if plan.algorithm.stateful or sampler.capacity >= sampler.clients:
        return noise
    return events.without_replacement(sampler.capacity, sampler.clients, noise)


def _cohort_overflow(sampler):
    if sampler.scheme != "poisson":
        return 0.0
    return tail(sampler.capacity, sampler.clients, share_of(sampler))


def _implied(plan, entry):
    """What protects a client protects its examples.

    Under replace_one the numbers are the same.  Under add_remove they are not: the client with the other example is
    two steps away, so its upload moves by twice the bound, and only its absence is credited.
    """
    if entry.adjacency == "replace_one":
        return entry._replace(unit="example", implied=True, caveats=entry.caveats + (IMPLIED,))
    sampler = plan.sampler
    share = float(np.max(share_of(sampler)))

    def happens(z):
        noise = events.gaussian(z / 2)
        return (every_round(sampler, noise) if entry.view == "server" else some_rounds(sampler, share, noise),)

    return entry._replace(unit="example", events=happens, overflow=0.0, implied=True,
                          one=entry.one and (lambda z, rows: events.gaussian(z / 2)),
                          mixture=absent(plan, entry.view), caveats=entry.caveats + (IMPLIED_TWICE,))
