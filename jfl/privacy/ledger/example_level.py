"""Where clients add noise for their examples: entries of unit "example"."""

import math

import numpy as np

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.records import Caveat, Plan, Release
from ..mechanisms.chain import noisy
from .entry import Clients, Entry, Part, refused
from .noise_levels import levels
from .participation import VIEWS, absent, chances, drawn, share_of, tail, turns, who, worst_columns

CONVEX = Caveat(
    "only for losses that are convex and Lipschitz as its sensitivity assumes, solved as "
    "exactly as it assumes",
    "convex",
)
SITES = Caveat(
    "the releases of one algorithm may draw one sample: it counts as seen, without a gain",
    "one-sample",
)


def examples(plan: Plan, rounds: int) -> list[Entry]:
    """Noise inside the client's own steps: the server sees it too."""
    releases = plan.algorithm.releases
    if not releases or not all(noisy(r.mechanism) for r in releases):
        return []  # one bare look at the data, and nothing is proved
    adjacencies = sorted({_adjacency(r) for r in releases})
    try:
        if len(adjacencies) > 1:
            checks.fail(
                "jfl.guarantee",
                "one adjacency for all releases of an algorithm",
                adjacencies,
                "Use batch samplers of one kind.",
                error=NotAnalysable,
            )
        return [_entry(plan, view, adjacencies[0], rounds) for view in VIEWS]
    except NotAnalysable as error:
        return [refused("example", view, adjacencies[0], error) for view in VIEWS]


def _adjacency(release: Release) -> str:
    sampled = release.batches.scheme == "poisson" and not release.steps
    return release.mechanism.adjacency or ("add_remove" if sampled else "replace_one")


def _entry(plan, view, adjacency, rounds):
    sampler, releases = plan.sampler, plan.algorithm.releases
    rows = np.asarray(plan.fed.size).reshape(-1)
    present = np.flatnonzero(rows > 0)
    if present.size == 0:
        checks.fail("jfl.guarantee", "a client with rows", "none", error=NotAnalysable)
    noise = [levels(r.mechanism, rounds, len(rows)) for r in releases]
    share = np.broadcast_to(share_of(sampler) if view == "third_party" else 0.0, rows.shape)
    several = sum(r.batches.scheme != "full" for r in releases) > 1
    # batches of several releases follow from one key: they may be one sample
    parts = [_part(r, adjacency, rows, z)._replace(seen=several) for r, z in zip(releases, noise)]
    lost = [_by_rows(rows, lambda n, r=r: (_row_overflow(r, n),))[0] for r in releases]
    convex = any(s.declared == "prox_erm" for r in releases for s in r.mechanism.stages)
    return Entry(
        "example",
        view,
        adjacency,
        tuple(parts),
        Clients(rows, share, present),
        chances(sampler, view, share),
        turns(sampler),
        worst_columns(rows, share, noise, present),
        turns(sampler) * sum(each[present].max() for each in lost),
        sum(lost),
        absent(plan, view),
        drawn="rows",
        status="conditional" if convex else "proved",
        caveats=who(plan, view) + ((CONVEX,) if convex else ()) + ((SITES,) if several else ()),
    )


def _part(release, adjacency, rows, multiplier):
    batches, draw = release.batches, _touched if release.steps else _sample
    if release.steps:
        sampling = "touched"
    elif batches.scheme in ("full", "epochs") or (
        batches.scheme == "poisson" and adjacency == "replace_one"
    ):
        sampling = "none"
    else:
        sampling = batches.scheme
    return Part(
        "local training" if release.steps else "local step",
        multiplier,
        sampling,
        *_by_rows(rows, lambda n: draw(release, adjacency, n)),
        *_by_rows(rows, lambda n: (_count(release, n),)),
        *(_by_rows(rows, lambda n: (_takes_all(batches, n),)) > 0),
    )


def _by_rows(rows, values):
    """Numbers that follow from a client's number of rows, [numbers, C]; 1 for one without rows."""
    sizes, which = np.unique(rows, return_inverse=True)
    each = {int(n): values(int(n)) for n in sizes if n > 0}
    ones = (1.0,) * len(next(iter(each.values())))
    return np.array([each.get(int(n), ones) for n in sizes], np.float64).T[:, which.reshape(-1)]


def _sample(release, adjacency, rows):
    """Elements drawn for a batch, and those they are drawn from; (1, 1) where sampling is no
    gain."""
    batches = release.batches
    scheme, size = batches.scheme, batches.batch
    if scheme == "full":
        return 1.0, 1.0
    if scheme == "poisson":
        return (_rate(batches, rows) if adjacency == "add_remove" else 1.0), 1.0
    if adjacency != "replace_one":
        checks.fail(
            "jfl.guarantee",
            f"adjacency 'replace_one' for batches.{scheme}",
            f"{adjacency!r}",
            "One row more changes who else is in a batch: use batches.poisson for add_remove.",
            error=NotAnalysable,
        )
    if scheme == "epochs":
        return 1.0, 1.0
    if scheme == "with_replacement":
        return size, rows
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
    return min(size, rows), rows


def _touched(release, adjacency, rows):
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
    return 1 - missed, 1.0


def _count(release, rows):
    """How many releases of a participation touch a given row."""
    batches, count = release.batches, release.count
    if release.steps or batches.scheme != "epochs":
        return count
    return math.ceil(count / math.ceil(rows / batches.batch))


def _takes_all(batches, rows):
    return batches.scheme == "full" or (
        batches.scheme == "without_replacement" and rows <= batches.batch
    )


def _rate(batches, rows):
    given = np.asarray(batches.rate if batches.rate is not None else batches.expected, np.float32)
    return drawn(
        given if batches.rate is not None else min(np.float32(1), given / np.float32(rows))
    )


def _row_overflow(release, rows):
    """The probability, in a participation, that a row drawn finds no slot."""
    batches = release.batches
    if batches.scheme != "poisson" or batches.batch is None:
        return 0.0
    steps = release.count * max(release.steps, 1)
    return steps * tail(batches.batch, rows, _rate(batches, rows))
