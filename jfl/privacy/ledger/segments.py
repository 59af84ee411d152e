"""Segments: consecutive rounds under one plan, several of which are accounted for together.

They are parts of a run that continues under another plan, or runs with different seeds.  Runs with
the same seed draw the same cohorts and batches in the rounds that they share.  They are not
independent there, so such rounds are rejected.  All other segments compose.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...core import checks, identity
from ...core.errors import NotAnalysable
from ...core.records import Fn, Plan
from ..mechanisms.chain import later
from ..mechanisms.correlated import strategy_of
from .caveats import FOLLOWING, PLANNED, SEEDS, SHARED
from .entries import entries
from .entry import Entry, Stretch
from .facts import changing

WHERE = "jfl.guarantee"
WAYS = 64  # to combine the noise of uploads and releases over segments
COMBINATIONS = 4096  # of different clients


class Segment(NamedTuple):
    """The rounds from `first` to `first + rounds - 1` of a plan."""

    plan: Plan
    first: int
    rounds: int
    seed: int  # a label: segments with equal labels share a seed
    placed: bool  # its first round was given

    @property
    def end(self):
        return self.first + self.rounds


def concatenate(segments, seeds=None) -> list[Entry]:
    """Return entries for everything that several segments release about the same clients.

    Args:
        segments: pairs (plan, rounds), each of which begins where the previous segment of the same
            seed ended; or triples (plan, rounds, first) with the number of the first round, which
            is 0 for a new run.
        seeds: None if all segments share one seed; "different" if no two do; or an integer for each
            segment, equal for equal seeds.

    Returns:
        Entries whose only "round" consists of all segments.  Each unit, view and adjacency that all
        plans have gets an entry; it gets several if noise on uploads and noise on the release both
        protect it.

    Raises:
        ValueError: as in `ledger.entries`; if the plans differ in their number of clients; if
            segments of one seed share rounds; if the noise of a later segment depends on the round
            and `first` is not given.
    """
    placed = _placed(segments, seeds)
    for one, other in itertools.combinations(placed, 2):
        if one.seed == other.seed and one.first < other.end and other.first < one.end:
            checks.fail(
                WHERE,
                "segments of one seed without common rounds",
                f"rounds {one.first} to {one.end - 1} and {other.first} to {other.end - 1}",
                "Runs with the same seed share their samples.  Use different seeds, and say "
                'seeds="different".',
                error=NotAnalysable,
            )
    for segment in placed:
        _refuse_part_of_a_series(segment, placed)
    listed = [entries(from_round(s.plan, s.first), s.rounds) for s in placed]
    kind = lambda e: (e.unit, e.view, e.adjacency)
    draws = any(_draws(s.plan) for s in placed)
    follows = len({s.seed for s in placed}) < len(placed) and any(
        s.first and not s.placed for s in placed
    )
    caveats = (PLANNED,) * (len(placed) > 1)
    caveats += (SEEDS,) * (seeds is not None) + (FOLLOWING,) * (draws and follows)
    out = []
    for wanted in dict.fromkeys(map(kind, listed[0])):
        # noise on uploads and on the release may both prove it: all ways through the segments, of
        # which one is chosen
        for way in _ways([[e for e in several if kind(e) == wanted] for several in listed]):
            one = joined(way, [s.rounds for s in placed])
            status = "conditional" if seeds is not None else one.status
            out.append(one._replace(caveats=one.caveats + caveats, status=status))
    return out


def sharing(plans, seeds) -> tuple:
    """Return the caveat for points of a sweep with different plans that share samples.

    Args:
        plans: the plan of each point.
        seeds: the seed of each point.

    Returns:
        The caveat as a tuple; () unless several plans draw from the same seed.
    """
    of = {}
    for plan, seed in zip(plans, seeds):
        if _draws(plan):
            of.setdefault(str(seed), set()).add(id(plan))
    return (SHARED,) if any(len(several) > 1 for several in of.values()) else ()


def joined(parts: Sequence[Entry], rounds: Sequence[int]) -> Entry:
    """Return one entry that composes consecutive entries, each for its number of rounds.

    The client that is worst off in one entry need not be worst off in the next.  The result
    combines the worst clients of all entries, so its privacy loss is at least that of every single
    client.

    Args:
        parts: entries of one unit, view and adjacency.
        rounds: the number of rounds of each entry.
    """
    refusal = next((e.refusal for e in parts if e.refusal), "")
    combinations = math.prod(len(e.worst) for e in parts)
    if combinations > COMBINATIONS and not refusal:
        refusal = (
            f"{WHERE}: expected at most {COMBINATIONS} combinations of different clients over the "
            f"segments, but got {combinations}. Let the noise of one plan change over "
            "rounds instead."
        )
    return Entry(
        parts[0].unit,
        parts[0].view,
        parts[0].adjacency,
        worst=() if refusal else tuple(itertools.product(*(e.worst for e in parts))),
        overflow=sum(n * e.overflow for n, e in zip(rounds, parts)),
        mixture=any(e.mixture for e in parts),
        implied=any(e.implied for e in parts),
        noise_of=parts[0].noise_of,
        rounds=sum(rounds),
        stretches=tuple(map(Stretch, rounds, parts)),
        refusal=refusal,
        status="conditional" if any(e.status != "proved" for e in parts) else "proved",
        caveats=sum((e.caveats for e in parts), ()),
    )


def _placed(segments, seeds):
    """Return the segments with their first rounds, after checking them."""
    seeds = _seeds(seeds, len(segments))
    placed, ends = [], {}
    for (plan, rounds, *first), seed in zip(segments, seeds):
        if placed and changing(plan) and not first:
            checks.fail(
                WHERE,
                "(plan, rounds, first) for a later segment whose noise follows the round",
                "(plan, rounds)",
                "first is the round it begins with: 0 for a new run.",
            )
        checks.require_integer(WHERE, max_value=10**12, rounds=rounds)
        if first:
            checks.require_integer(WHERE, min_value=0, max_value=10**12, first=first[0])
        begin = int(first[0]) if first else ends.get(seed, 0)
        placed.append(Segment(plan, begin, int(rounds), seed, bool(first)))
        ends[seed] = placed[-1].end
    counts = {int(np.size(s.plan.fed.size)) for s in placed}
    if len(counts) > 1:
        checks.fail(WHERE, "segments with the same clients", f"{sorted(counts)} clients")
    return placed


def _seeds(seeds, count):
    if seeds is None:
        return [0] * count
    if isinstance(seeds, str) and seeds == "different":
        return list(range(count))
    if not isinstance(seeds, (list, tuple, range, np.ndarray)) or len(seeds) != count:
        checks.fail(
            WHERE,
            'seeds="different", or an integer for each segment',
            f"seeds={checks.short_repr(seeds)}",
            "Without seeds, all segments share one.",
        )
    for seed in seeds:
        checks.require_seed(WHERE, seeds=seed)
    return [int(s) for s in seeds]


def _refuse_part_of_a_series(segment, placed):
    """Refuse a part of a run with correlated noise: what a client added in its earlier
    rounds is in the noise of later ones.  After another plan, a plan begins with new noise."""
    plan = segment.plan
    if not segment.first or all(strategy_of(m) is None for m in (plan.upload, plan.release)):
        return
    before = [s for s in placed if s.seed == segment.seed and s.end == segment.first]
    name = lambda plan: identity.plan_identity(plan).tobytes()
    if plan.paired_noise or not before or name(before[0].plan) == name(plan):
        checks.fail(
            WHERE,
            "a run with correlated noise from its round 0 on",
            f"a part that begins with round {segment.first}"
            + " and shares its noise with other plans" * plan.paired_noise,
            "Give the rounds of one plan as one segment, (plan, rounds, 0); if it continued "
            "other plans, without paired_noise, name those before it, as in "
            "[(other, 10), (plan, 10)].",
            error=NotAnalysable,
        )


def from_round(plan: Plan, first: int) -> Plan:
    """Return the plan that the accountant reads, from round `first` on."""
    if not first:
        return plan
    sampler, epoch = plan.sampler, plan.sampler.epoch
    if epoch > 1 and (first % epoch or sampler.scheme == "balls_in_bins"):
        or_later = f", or from a multiple of {epoch}" * (sampler.scheme != "balls_in_bins")
        checks.fail(
            WHERE,
            f"a run with sampling.{sampler.scheme} from its round 0 on{or_later}",
            f"a part that begins with round {first}",
            "A client may have taken part in the epoch already.  Give the rounds of one plan as "
            "one segment, (plan, rounds, 0).",
            error=NotAnalysable,
        )
    releases = tuple(
        dataclasses.replace(r, mechanism=later(r.mechanism, first)) for r in plan.algorithm.releases
    )
    return dataclasses.replace(
        plan,
        algorithm=dataclasses.replace(plan.algorithm, releases=releases),
        upload=later(plan.upload, first),
        release=later(plan.release, first),
        weights=later(plan.weights, first) if isinstance(plan.weights, Fn) else plan.weights,
    )


def _ways(fit):
    if np.prod([float(len(f)) for f in fit]) <= WAYS:
        return itertools.product(*fit)
    ways = range(max(map(len, fit))) if all(fit) else ()
    return ([f[min(k, len(f) - 1)] for f in fit] for k in ways)


def _draws(plan):
    """Return whether cohorts or batches are drawn."""
    sampler = plan.sampler
    everyone = sampler.scheme == "full" or (
        sampler.scheme == "without_replacement" and sampler.capacity >= sampler.clients
    )
    return not everyone or any(r.batches.scheme != "full" for r in plan.algorithm.releases)
