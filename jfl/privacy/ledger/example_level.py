"""Where clients add noise for their examples: entries of unit "example"."""

import math
from typing import Any

import numpy as np

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.records import Caveat, Plan, Release
from ...sampling.batches import adjacency as implied
from ..mechanisms.chain import bound, law_of, noisy
from .entry import Clients, Entry, Part, refused
from .noise_levels import levels
from .participation import VIEWS, attendance_of, drawn, tail, worst_columns

SOLVED = (
    "only if another row in the place of one moves what a client's solve ends at by at most {:g}: "
    "for losses that are convex and Lipschitz as that assumes, solved as exactly as it assumes"
)
CONTRACTS = (
    "only for losses that are convex, at most 2 / lr smooth and at most {:g} steep, for every row "
    "and all parameters, and whose gradients are finite as computed"
)
SITES = Caveat(
    "the releases of one algorithm may draw one sample: it counts as seen, without a gain",
    "one-sample",
)
NO_ROWS = (1.0, 1.0, 1.0, 1.0, 0.0)  # of a client without rows, in `_by_rows`


def examples(plan: Plan, rounds: int, apart: bool = False) -> list[Entry]:
    """Noise inside the client's own steps: the server sees it too.

    Args:
        plan: of `jfl.plan`.
        rounds: how many of its rounds are looked at.
        apart: whether the releases are known to draw their batches independently.
    """
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
        return _entries(plan, adjacencies[0], rounds, apart)
    except NotAnalysable as error:
        return [refused("example", view, adjacencies[0], error) for view in VIEWS[:2]]


def _adjacency(release: Release) -> str:
    sampled = "replace_one" if release.steps else implied(release.batches)
    mechanism: Any = release.mechanism
    return mechanism.adjacency or sampled


def _entries(plan, adjacency, rounds, apart):
    """An entry for each view: the same releases, of which the views know more or less."""
    rows = np.asarray(plan.fed.size).reshape(-1)
    present = np.flatnonzero(rows > 0)
    if present.size == 0:
        checks.fail("jfl.guarantee", "a client with rows", "none", error=NotAnalysable)
    releases = plan.algorithm.releases
    noise = [levels(r.mechanism, rounds, len(rows)) for r in releases]
    # batches of several releases follow from one key: they may be one sample
    several = not apart and sum(r.batches.scheme != "full" for r in releases) > 1
    parts: list[Part] = []
    lost: list[Any] = []
    for release, multiplier in zip(releases, noise):
        sample, population, capacity, count, overflow = _by_rows(release, adjacency, rows)
        what, sampling = _kind(release, adjacency)
        sizes = sample, population, capacity, count
        law = law_of(release.mechanism)
        parts.append(Part(what, multiplier, sampling, *sizes, several, law=law))
        lost.append(overflow)
    declared = {s.declared for r in releases for s in r.mechanism.stages}
    conditional = bool(declared & {"prox_erm", "contraction"})
    assumed = _moved(releases) + _steepness(releases)
    assumed += (SITES,) if several else ()
    entries = []
    row_overflow: Any = sum(lost)
    for view in VIEWS[:2]:
        attendance = attendance_of(plan, view)
        entries.append(
            Entry(
                "example",
                view,
                adjacency,
                tuple(parts),
                Clients(rows, attendance.share, present),
                attendance.chance,
                attendance.turns,
                worst_columns(rows, attendance.share, noise, present),
                attendance.turns * sum(each[present].max() for each in lost),
                row_overflow,
                attendance.gains,
                drawn="rows",
                status="conditional" if conditional else "proved",
                caveats=attendance.caveats + assumed,
            )
        )
    return entries


def _moved(releases):
    """What noise for solves takes one row to move: replace_one doubles the bound."""
    return tuple(
        Caveat(SOLVED.format(2 * float(bound(r.mechanism))), "convex")
        for r in releases
        if any(s.declared == "prox_erm" for s in r.mechanism.stages)
    )


def _steepness(releases):
    """What noise for steps that contract takes the losses to be."""
    return tuple(
        Caveat(CONTRACTS.format(float(bound(r.mechanism)) * r.steps * r.batches.batch), "convex")
        for r in releases
        if any(s.declared == "contraction" for s in r.mechanism.stages)
    )


def _kind(release, adjacency):
    """What is released, and how it is sampled."""
    if release.steps:
        return "local training", "touched"
    scheme = release.batches.scheme
    return "local step", "none" if scheme in ("full", "epochs") else scheme


def _by_rows(release, adjacency, rows):
    """What follows from a client's number of rows, [5, C]: elements drawn and those they are drawn
    from, a capacity, how often, and the probability of an overflow."""
    sizes, which = np.unique(rows, return_inverse=True)
    each = [_of_rows(release, adjacency, int(n)) if n > 0 else NO_ROWS for n in sizes]
    return np.array(each, np.float64).T[:, which.reshape(-1)]


def _of_rows(release, adjacency, rows):
    batches, count = release.batches, release.count
    sample, population = (_touched if release.steps else _sample)(release, adjacency, rows)
    overflow = 0.0
    if batches.scheme == "poisson" and batches.batch is not None:
        steps = count * max(release.steps, 1)
        overflow = steps * tail(batches.batch, rows, _rate(batches, rows))
    if batches.scheme == "epochs" and not release.steps:
        count = math.ceil(count / math.ceil(rows / batches.batch))  # that touch a given row
    return sample, population, batches.batch or 1.0, count, overflow


def _sample(release, adjacency, rows):
    """Elements drawn for a batch, and those they are drawn from; (1, 1) where sampling is no
    gain."""
    batches = release.batches
    scheme, size = batches.scheme, batches.batch
    if scheme == "full":
        return 1.0, 1.0
    if scheme == "poisson":
        return _rate(batches, rows), 1.0
    if scheme == "truncated_poisson" and adjacency != "add_remove":
        return _rate(batches, rows) * rows, rows
    zeroed = adjacency == "zero_out" and scheme in ("epochs", "without_replacement")
    if adjacency != "replace_one" and not zeroed:
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
    once = any(s.declared == "contraction" for s in release.mechanism.stages)
    if once and steps * batches.batch > rows:
        checks.fail(
            "jfl.guarantee",
            f"at least {steps * batches.batch} rows in every client, for steps={steps} of "
            f"batch={batches.batch} that use a row at most once",
            f"{rows} rows",
            "A row that two steps use moves the model twice: take fewer steps or smaller batches.",
            error=NotAnalysable,
        )
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
        "truncated_poisson": lambda: (1 - _rate(batches, rows)) ** steps,
        "without_replacement": lambda: (1 - min(batches.batch / rows, 1)) ** steps,
        "with_replacement": lambda: (1 - 1 / rows) ** (steps * batches.batch),
        "epochs": lambda: max(0.0, 1 - steps * batches.batch / rows),
    }[batches.scheme]()
    return 1 - missed, 1.0


def _rate(batches, rows):
    given = np.asarray(batches.rate if batches.rate is not None else batches.expected, np.float32)
    return drawn(
        given if batches.rate is not None else min(np.float32(1), given / np.float32(rows))
    )
