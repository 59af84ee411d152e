"""Where clients add noise for their examples, and what it is worth: an entry for every site, unit
and view.

An entry is what an accountant needs and no more.  What it assumes beyond the plan travels with it
as caveats; what it cannot analyse becomes its `refusal`, so that the other entries can still be
listed.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.records import Caveat, Fn, Plan
from ..accountants import events
from ..mechanisms.chain import multiplier_follows, multipliers, noisy, scheduled
from .participation import (
    VIEWS,
    absent,
    drawn,
    every_round,
    frontier,
    share_of,
    some_rounds,
    tail,
    who,
)

CONVEX = Caveat(
    "only for losses that are convex and Lipschitz as its sensitivity assumes, solved as "
    "exactly as it assumes",
    "convex",
)
SITES = Caveat(
    "the releases of one algorithm may draw one sample: it counts as seen, without a gain",
    "one-sample",
)


class Entry(NamedTuple):
    """One thing to guarantee."""

    unit: str  # example | client
    view: str  # server | third_party
    adjacency: str  # add_remove | replace_one
    events: Callable  # z -> events of one round, one for each client that may be the worst
    z: tuple | float = (
        1.0  # the plan's own multipliers (see `levels`), or one for each release of the algorithm
    )
    overflow: float = 0.0  # probability, a round, that a draw finds no slot
    mixture: bool = False  # gains from a client's absence only
    implied: bool = False  # by another unit's guarantee
    one: Callable | None = None  # (z, rows, client) -> the event of one of its participations
    slip: Callable | None = (
        None  # rows -> probability, a participation, that a row drawn finds no slot
    )
    steps: Callable | None = (
        None  # (z, rows, client) -> (event of a release, how often in a participation), ...
    )
    attends: Callable | None = (
        None  # (share, event of a participation) -> that of a round; None: steps are of a round
    )
    drawn: str = ""  # what the samples inside `steps` are drawn from: rows | clients
    clients: tuple = ()  # rows [n], share [n] and number [n] of the clients that count
    differ: tuple = ()  # arrays [m, 1 or n] in which clients differ beside those
    series: bool = False  # the noise changes: events hold multipliers [rounds]
    refusal: str = ""  # why there is no epsilon
    status: str = "proved"  # proved | conditional
    caveats: tuple = ()


def refused(unit, view, adjacency, error) -> Entry:
    return Entry(unit, view, adjacency, lambda z: (), refusal=str(error))


def levels(mechanism, rounds: int, clients: int, max_weight=lambda round_: 1.0):
    """Noise multipliers [rounds or 1, clients or 1]: one row unless they change, one column unless
    clients differ."""
    found = np.asarray(multipliers(mechanism, rounds, max_weight))
    found = found if scheduled(mechanism) else found[None]
    found = found if found.ndim == 2 else found[:, None]
    if found.shape[1] not in (1, clients):
        checks.fail(
            "jfl.guarantee",
            f"one noise level, or one for each of {clients} clients",
            f"{found.shape[1]}",
            error=NotAnalysable,
        )
    if not np.all(found > 0):
        checks.fail(
            "jfl.guarantee",
            "clip norms and noise > 0 in every round",
            f"noise multipliers {found.min()}",
            error=NotAnalysable,
        )
    return found


def changing(plan: Plan) -> bool:
    """True if the noise is not the same in every round."""
    fixed_std = noisy(plan.release) and not multiplier_follows(plan.release)
    return ((fixed_std or noisy(plan.upload)) and isinstance(plan.weights, Fn)) or any(
        scheduled(m)
        for m in (plan.upload, plan.release, *(r.mechanism for r in plan.algorithm.releases))
    )


def level(z, client=0, release=0):
    """A client's own multiplier, a number or [rounds], out of an entry's z; other numbers hold for
    all."""
    z = z[release] if isinstance(z, tuple) else z
    if np.ndim(z) < 2:
        return z
    column = z[:, client if z.shape[1] > 1 else 0]
    return column if len(column) > 1 else float(column[0])


def kinds(rows, amount, own) -> list:
    """(rows, amount, client) such that every client is at most as badly off as one of these."""
    if all(z.shape[1] == 1 for z in own):
        # fewer rows never help: a larger rate, or more looks at each row
        return [(r, a, 0) for r, a in frontier(rows, amount)]
    columns = np.concatenate([np.broadcast_to(z, (len(z), len(rows))) for z in own])
    apart = np.unique(
        np.concatenate([rows[None], amount[None], columns]), axis=1, return_index=True
    )[1]
    return [(rows[c], amount[c], int(c)) for c in apart]


# --- examples


def examples(plan: Plan, rounds: int) -> list[Entry]:
    """Noise inside the client's own steps: the server sees it too."""
    releases = plan.algorithm.releases
    if not releases or not all(noisy(r.mechanism) for r in releases):
        return []  # one bare look at the data, and nothing is proved
    found = sorted({_rows_adjacency(r) for r in releases})
    try:
        if len(found) > 1:
            checks.fail(
                "jfl.guarantee",
                "one adjacency for all releases of an algorithm",
                found,
                "Use batch samplers of one kind.",
                error=NotAnalysable,
            )
        return [_example_entry(plan, view, found[0], rounds) for view in VIEWS]
    except NotAnalysable as error:
        return [refused("example", view, found[0], error) for view in VIEWS]


def _rows_adjacency(release):
    sampled = release.batches.scheme == "poisson" and not release.steps
    return release.mechanism.adjacency or ("add_remove" if sampled else "replace_one")


def _example_entry(plan, view, adjacency, rounds):
    sampler, releases = plan.sampler, plan.algorithm.releases
    sizes = np.asarray(plan.fed.size).reshape(-1)
    present = np.flatnonzero(sizes > 0)
    share = np.broadcast_to(share_of(sampler), sizes.shape)
    if present.size == 0:
        checks.fail("jfl.guarantee", "a client with rows", "none", error=NotAnalysable)
    own = tuple(levels(r.mechanism, rounds, len(sizes)) for r in releases)
    theirs = tuple(z if z.shape[1] == 1 else z[:, present] for z in own)
    sampled = [r for r in releases if r.batches.scheme != "full"]
    counted = (
        sizes[present],
        np.zeros(present.shape) if view == "server" else share[present],
        present,
    )
    worst = kinds(*counted[:2], theirs)

    def steps(z, rows, client):
        return [
            _step(r, adjacency, int(rows), events.gaussian(level(z, client, i)))
            for i, r in enumerate(releases)
        ]

    def participation(z, rows, client):
        found = steps(z, rows, client)
        if len(sampled) > 1:  # their batches follow from one key: they may be one sample
            found = [(events.seen(step), count) for step, count in found]
        parts = [events.repeat(step, count) for step, count in found]
        return parts[0] if len(parts) == 1 else events.compose(*parts)

    def attends(share, participation):
        return (
            every_round(sampler, participation)
            if view == "server"
            else some_rounds(sampler, share, participation)
        )

    def happens(z):
        return tuple(attends(s, participation(z, rows, present[c])) for rows, s, c in worst)

    happens(own)  # refuses now what it would refuse later
    convex = any(s.name == "prox_erm" for r in releases for s in r.mechanism.stages)
    slip = lambda rows: sum(_rows_overflow(r, rows) for r in releases)
    overflow = (sampler.capacity if sampler.independent else 1) * slip(sizes[present])
    return Entry(
        "example",
        view,
        adjacency,
        happens,
        own,
        overflow,
        absent(plan, view),
        one=participation,
        slip=slip,
        steps=steps,
        attends=attends,
        drawn="rows",
        clients=counted,
        differ=theirs,
        series=any(len(z) > 1 for z in own),
        status="conditional" if convex else "proved",
        caveats=who(plan, view)
        + ((CONVEX,) if convex else ())
        + ((SITES,) if len(sampled) > 1 else ()),
    )


def _step(release, adjacency, rows, noise):
    """The event of one release, and how many of them touch a given row."""
    batches, count = release.batches, release.count
    scheme, size = batches.scheme, batches.batch
    if release.steps:
        return _round(release, adjacency, rows, noise), count
    if scheme == "full":
        return noise, count
    if scheme == "poisson":
        return (
            events.poisson(_rate(batches, rows), noise) if adjacency == "add_remove" else noise
        ), count
    if adjacency != "replace_one":
        checks.fail(
            "jfl.guarantee",
            f"adjacency 'replace_one' for batches.{scheme}",
            f"{adjacency!r}",
            "One row more changes who else is in a batch: use batches.poisson for add_remove.",
            error=NotAnalysable,
        )
    if scheme == "epochs":
        return noise, math.ceil(count / math.ceil(rows / size))
    if scheme == "with_replacement":
        return events.with_replacement(size, rows, noise), count
    if scheme != "without_replacement":
        checks.fail(
            "jfl.guarantee", "a scheme of jfl.batches", f"scheme={scheme!r}", error=NotAnalysable
        )
    if rows < size and batches.short != "all":
        checks.fail(
            "jfl.guarantee",
            f"at least batch={size} rows in every client",
            f"{rows} rows",
            'Lower batch, or use batches.without_replacement(batch, short="all").',
            error=NotAnalysable,
        )
    return (events.without_replacement(size, rows, noise) if rows > size else noise), count


def _round(release, adjacency, rows, noise):
    """One release of several steps, whose noise covers all that a row can do in them: only its
    absence is a gain."""
    batches, steps = release.batches, release.steps
    if adjacency != "replace_one":
        checks.fail(
            "jfl.guarantee",
            "adjacency 'replace_one' for noise that is added once a round",
            f"{adjacency!r}",
            "A row more moves every gradient of the round, by up to twice the clip norm.",
            error=NotAnalysable,
        )
    missed = {
        "full": lambda: 0.0,
        "poisson": lambda: (1 - _rate(batches, rows)) ** steps,
        "without_replacement": lambda: (1 - min(batches.batch / rows, 1)) ** steps,
        "with_replacement": lambda: (1 - 1 / rows) ** (steps * batches.batch),
        "epochs": lambda: max(0.0, 1 - steps * batches.batch / rows),
    }[batches.scheme]()
    return events.touched(1 - missed, noise) if missed > 0 else noise


def _rate(batches, rows):
    given = np.asarray(batches.rate if batches.rate is not None else batches.expected, np.float32)
    return drawn(
        given if batches.rate is not None else min(np.float32(1), given / np.float32(rows))
    )


def _rows_overflow(release, sizes):
    batches = release.batches
    if batches.scheme != "poisson" or batches.batch is None:
        return 0.0
    return (
        release.count
        * max(release.steps, 1)
        * max(tail(batches.batch, n, _rate(batches, n)) for n in np.unique(sizes))
    )
