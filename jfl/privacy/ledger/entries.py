"""From a plan to what its rounds release about an example or a client, for each view."""

import functools
import math

import numpy as np

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.records import Caveat, Plan
from ..accountants import events
from ..mechanisms import float_floors
from ..mechanisms.chain import noisy
from ..taint import checker as taint
from . import client_level, example_level
from .example_level import Entry as Entry
from .participation import EVERY_ROUND as EVERY_ROUND
from .participation import HONEST as HONEST
from .participation import VIEWS as VIEWS
from .participation import absent, every_round, share_of, some_rounds

SIMULATION = Caveat("float32 noise from a simulation PRNG, not for deployment", "simulation")
STOPS = Caveat(
    "a run that stops on rows that are not finite reveals that they are there: with "
    "tolerate=('nonfinite_rows',) "
    "they count as zero instead",
    "stops",
)
PUBLIC = Caveat("sizes, rates and weights are public constants", "public-sizes")
PAIRED = Caveat("sweep points that share a seed share noise", "paired-noise")
COMBINATIONS = 4096
IMPLIED = Caveat("implied by the client-level guarantee", "implied")
IMPLIED_TWICE = Caveat(
    "implied by the client-level noise: an example moves an upload by up to twice its bound",
    "implied-twice",
)


def entries(plan: Plan, rounds: int = 1, others: bool = True) -> list[Entry]:
    """All that the noise of the first `rounds` rounds of a plan may protect; empty without noise.

    Args:
        others: whether noise of other clients counts for a third party.

    Raises:
        ValueError: if the plan holds traced values: a ledger is kept on the host; if a clip norm or
            noise that is a function of the round falls below 1e-15 in one of the rounds.
    """
    if not checks.concrete(plan):
        checks.fail(
            "jfl.guarantee",
            "a plan of concrete values",
            "traced ones",
            "Call it outside jit and vmap.",
        )
    float_floors.lasting("jfl.guarantee", plan, rounds)
    own = example_level.examples(plan, rounds)
    clients = client_level.uploads(plan, rounds, others) + client_level.release(
        plan, rounds, others
    )
    proved = any(not e.refusal for e in own)
    listed = own + clients + ([] if proved else [_implied(plan, e) for e in clients])
    return taint.judged(
        plan, [e._replace(caveats=e.caveats + _travelling(plan, e)) for e in listed]
    )


def run(entry: Entry, z, rounds) -> tuple:
    """The events of a whole run, one for each client that may be the worst."""
    if entry.series:
        return tuple(events.series(e, np.ones(rounds)) for e in entry.events(z))
    return tuple(events.repeat(e, rounds) for e in entry.events(z))


def joined(parts, rounds):
    """Entries one after another, each for its number of rounds, as one."""

    def happens(z):
        found = [run(p, each, r) for p, each, r in zip(parts, z, rounds)]
        if math.prod(map(len, found)) > COMBINATIONS:
            checks.fail(
                "jfl.guarantee",
                f"at most {COMBINATIONS} combinations of different clients over the segments",
                f"{math.prod(map(len, found))}",
                "Let the noise of one plan change over rounds instead.",
                error=NotAnalysable,
            )
        # each client may be the worst in each segment: all combinations are at least as bad as any
        # client
        combined = functools.reduce(
            lambda done, new: [d + (e,) for d in done for e in new], found, [()]
        )
        return tuple(events.compose(*c) for c in combined)

    refusals = [p.refusal for p in parts if p.refusal]
    return parts[0]._replace(
        events=happens,
        z=tuple(p.z for p in parts),
        overflow=sum(p.overflow * r for p, r in zip(parts, rounds)),
        mixture=any(p.mixture for p in parts),
        implied=any(p.implied for p in parts),
        one=None,
        series=False,
        refusal=refusals[0] if refusals else "",
        status="conditional" if any(p.status != "proved" for p in parts) else "proved",
        caveats=sum((p.caveats for p in parts), ()),
    )


def only_the_release(plan: Plan) -> bool:
    """True if noise is added only after the server has seen the uploads."""
    return noisy(plan.release) and not noisy(plan.upload) and not example_level.examples(plan, 1)


def _travelling(plan, entry):
    uneven = entry.unit == "client" and (
        callable(plan.weights) or np.ptp(np.asarray(plan.weights)) > 0
    )
    public = entry.adjacency == "add_remove" or uneven
    return (
        (SIMULATION, STOPS)
        + ((PUBLIC,) if public else ())
        + ((PAIRED,) if plan.paired_noise else ())
        + tuple(Caveat(text, "data") for text in getattr(plan.fed, "caveats", ()))
    )


def _implied(plan, entry):
    """What protects a client protects its examples.

    Under replace_one the numbers are the same.  Under add_remove they are not: the client with the
    other example is two steps away, so its upload moves by twice the bound, and only its absence is
    credited.
    """
    if entry.adjacency == "replace_one":
        return entry._replace(unit="example", implied=True, caveats=entry.caveats + (IMPLIED,))
    sampler = plan.sampler
    share = float(np.max(share_of(sampler)))

    def one(z, rows, client):
        return events.gaussian(example_level.level(z, client) / 2)

    def attends(share, upload):
        return (
            every_round(sampler, upload)
            if entry.view == "server"
            else some_rounds(sampler, share, upload)
        )

    def happens(z):
        clients = range(z[0].shape[1]) if isinstance(z, tuple) else [0]
        return tuple(attends(share, one(z, 0, c)) for c in clients)

    counted = [np.full(sampler.clients, v) for v in (1, share)]
    return entry._replace(
        unit="example",
        events=happens,
        overflow=0.0,
        implied=True,
        one=entry.one and one,
        steps=lambda z, rows, client: [(one(z, rows, client), 1)],
        attends=attends,
        drawn="",
        clients=(*counted, np.arange(sampler.clients)),
        differ=entry.z,
        mixture=absent(plan, entry.view),
        caveats=entry.caveats + (IMPLIED_TWICE,),
    )
