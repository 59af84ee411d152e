"""What several runs, and parts of runs, release together about the same clients.

Cohorts and batches follow from the seed, the round, the client and the step, and from nothing else.
So runs of one seed use the same sample in the rounds that they share, and are not independent
there.  Their noise is, where their plans differ.  In a round, all of them together are one release:
the sample of that round, and inside it the noise of all, z = (sum of 1 / z_i^2)^(-1/2).  Rounds
that no two runs share compose as they always did.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from ...core import checks, identity
from ...core.errors import NotAnalysable
from ...core.records import Caveat, Fn, Plan
from ..accountants import events
from ..mechanisms.chain import later
from ..mechanisms.correlated import strategy_of
from .entries import entries
from .entry import Entry, Member, Stretch, effective
from .noise_levels import changing
from .over_rounds import begun
from .participation import turns, worst_columns
from .to_events import kinds, met, round_of

WHERE = "jfl.guarantee"
CHOSEN = Caveat(
    "runs of one seed share cohorts and batches, and are accounted together in the rounds that "
    "they share: for "
    "plans that were all chosen before the first of them ran",
    "chosen-before",
)
UNLIKE = Caveat(
    "runs of one seed draw from the same keys: in rounds that they share, what is not the same "
    "sample counts as "
    "seen, without a gain",
    "unlike-samples",
)
ONCE = Caveat(
    "equal plans of one seed in equal rounds are one release, counted once: computed by one "
    "program, on one machine",
    "equal-plans",
)
FOLLOWING = Caveat(
    "segments without a first round are taken to follow the segment before them, in rounds "
    "of their own",
    "following",
)
SEEDS = Caveat(
    "asserted, not checked: which segments have the same seed, and which have different seeds",
    "seeds",
)
SHARED = Caveat(
    "points that share a seed share cohorts and batches: what several of them release together is "
    "jfl.guarantee([(plan, rounds, 0), ...]), not the sum over independent runs",
    "shared-seed",
)
WAYS = 64  # to combine the noise of uploads and releases over segments
COMBINATIONS = 4096  # of different clients
SAMPLES = {
    events.Poisson,
    events.Replaced,
    events.ZeroedOut,
    events.WithoutReplacement,
    events.WithReplacement,
    events.Participation,
}


class Segment(NamedTuple):
    """Rounds first .. first + rounds - 1 of a plan."""

    plan: Plan
    first: int
    rounds: int
    seed: int  # segments of one number share a seed
    placed: bool  # its first round was given

    @property
    def end(self):
        return self.first + self.rounds


class Piece(NamedTuple):
    """Rounds in which the same segments ran."""

    members: tuple  # numbers of segments
    first: int
    rounds: int


def concatenate(segments, seeds=None) -> list[Entry]:
    """What several plans, each for its rounds, release together about the same clients.

    Args:
        segments: (plan, rounds), which begins where the segment before it of the same seed ended;
            or (plan, rounds, first) with the number of its first round, 0 for a new run.
        seeds: None, one seed for all; "different"; or a whole number for each segment, equal for
            equal seeds.

    Returns:
        Entries of one "round" that is all of it, one for each unit, view and adjacency that all
        plans have.

    Raises:
        ValueError: as `ledger.entries`; if the plans differ in their number of clients; where plans
            share noise; if the noise of a later segment follows the round and `first` is not given.

    Privacy:
        Rounds that several segments of a seed share are one joint release on one sample, where it
        can be shown that the draws are the same, and one without a gain from sampling elsewhere.
        This holds for plans that were chosen before the first of them ran.  The noise of different
        plans is independent; equal plans are one release.
    """
    distinct, once = _distinct(_segments(segments, seeds))
    pieces = _pieces(distinct)
    _whole_series(distinct, pieces)
    listed = [
        [entries(_begun(distinct[i].plan, p.first), p.rounds) for i in p.members] for p in pieces
    ]
    of = {i: one for p, several in zip(pieces, listed) for i, one in zip(p.members, several)}
    kind = lambda e: (e.unit, e.view, e.adjacency)
    caveats = (SEEDS,) * (seeds is not None) + (ONCE,) * once + (FOLLOWING,) * _assumes(distinct)
    out = []
    for wanted in dict.fromkeys(map(kind, of[0])):
        fit = [[k for k, e in enumerate(of[i]) if kind(e) == wanted] for i in range(len(distinct))]
        # noise on uploads and on the release may both prove it: all ways through the segments, of
        # which one is chosen
        for way in _ways(fit):
            chosen = [
                [one[way[i]] for i, one in zip(p.members, several)]
                for p, several in zip(pieces, listed)
            ]
            plans = [[distinct[i].plan for i in p.members] for p in pieces]
            one = _joint([p.rounds for p in pieces], plans, chosen)
            status = "conditional" if seeds is not None else one.status
            out.append(one._replace(caveats=one.caveats + caveats, status=status))
    return out


def sharing(plans, seeds) -> tuple:
    """The caveat of points of which several, of different plans, share a seed and what is drawn
    from it; or none."""
    of = {}
    for plan, seed in zip(plans, seeds):
        if _draws(plan):
            of.setdefault(str(seed), set()).add(id(plan))
    return (SHARED,) if any(len(several) > 1 for several in of.values()) else ()


# --- which rounds


def _segments(segments, seeds):
    """The segments with their first rounds, checked."""
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
        checks.whole(WHERE, most=10**12, rounds=rounds)
        if first:
            checks.whole(WHERE, least=0, most=10**12, first=first[0])
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
    need = 'seeds="different", or a whole number for each segment'
    if (
        isinstance(seeds, str)
        or not isinstance(seeds, (list, tuple, range, np.ndarray))
        or len(seeds) != count
    ):
        checks.fail(
            WHERE, need, f"seeds={checks.shown(seeds)}", "Without seeds, all segments share one."
        )
    for seed in seeds:
        checks.seed(WHERE, seeds=seed)
    return [int(s) for s in seeds]


def _overlap(one, other):
    return one.seed == other.seed and one.first < other.end and other.first < one.end


def _distinct(segments):
    """Segments that release something of their own, and whether others were the same; refused where
    noise is shared.

    A release is known by its plan and by what ran before it: the same plan after different ones has
    other noise.
    """
    if not any(_overlap(a, b) for a, b in itertools.combinations(segments, 2)):
        return segments, False
    name, past = _known(segments)
    kept, once = [], False
    for i, s in enumerate(segments):
        at = [
            j
            for j, (k, t) in enumerate(kept)
            if _overlap(s, t) and name(k) == name(i) and past(k) == past(i) and len(past(i)) == 1
        ]
        while at:  # the union of their rounds, until it meets no other
            once, (k, t) = True, kept.pop(at[0])
            first = min(s.first, t.first)
            s, i = t._replace(first=first, rounds=max(s.end, t.end) - first), k
            at = [
                j
                for j, (k, t) in enumerate(kept)
                if _overlap(s, t) and name(k) == name(i) and past(k) == past(i)
            ]
        kept.append((i, s))
    kept = [s for _, s in sorted(kept, key=lambda pair: pair[0])]
    for a, b in itertools.combinations(kept, 2):
        if _overlap(a, b) and (a.plan.paired_noise or b.plan.paired_noise):
            checks.fail(
                WHERE,
                "noise of its own for each plan in rounds that segments of one seed share",
                "plans with paired_noise=True",
                "Their difference is free of noise: nothing protects both.  Make "
                "them without paired_noise; or, if they ran with different seeds, say "
                'seeds="different".',
            )
    return kept, once


def _name(plan):
    """What the noise of a plan follows from."""
    return id(plan) if plan.paired_noise else identity.plan_identity(plan).tobytes()


def _known(segments):
    """What the noise of a segment follows from: its plan's, and what may have run before."""
    name = functools.cache(lambda i: _name(segments[i].plan))
    past = functools.cache(lambda i: _past(segments, i, name, past))
    return name, past


def _before(segments, i):
    """Numbers of the segments that ran until this one begins."""
    s = segments[i]
    return [j for j, t in enumerate(segments) if t.seed == s.seed and t.first < s.first <= t.end]


def _past(segments, i, name, past):
    """What may have run before a segment, as far as the segments tell: a set of tuples of (plan,
    where it ended).

    Rounds before it of which no segment speaks are taken as the plan's own.
    """
    s, before = segments[i], _before(segments, i)
    pasts = [
        past(j) if name(j) == name(i) else {p + ((name(j), s.first),) for p in past(j)}
        for j in before
    ]
    return frozenset().union(*pasts) if pasts else frozenset([()])


def _pieces(segments):
    """The rounds of all segments, cut where one begins or ends."""
    out = []
    for seed in dict.fromkeys(s.seed for s in segments):
        own = [(i, s) for i, s in enumerate(segments) if s.seed == seed]
        cuts = sorted({at for _, s in own for at in (s.first, s.end)})
        for first, end in itertools.pairwise(cuts):
            members = tuple(i for i, s in own if s.first <= first < s.end)
            if members:
                out.append(Piece(members, first, end - first))
    return sorted(out, key=lambda p: (p.members[0], p.first))


def _whole_series(segments, pieces):
    """Refuse a part of a run with correlated noise: what a client added in earlier rounds of it
    goes on in the noise of later ones."""
    name, past = _known(segments)
    for i, s in enumerate(segments):
        if not any(strategy_of(m) is not None for m in (s.plan.upload, s.plan.release)):
            continue
        if sum(i in p.members for p in pieces) > 1:
            checks.fail(
                WHERE,
                "rounds that a plan with correlated noise has to itself, or shares from its first "
                "to its last",
                f"other segments of its seed in some of its rounds {s.first} to {s.end - 1}",
                "Give segments that begin and end together, or, of runs with different seeds, "
                'seeds="different".',
                error=NotAnalysable,
            )
        own = any(name(j) == name(i) for j in _before(segments, i))
        if s.first and (own or () in past(i) or s.plan.paired_noise):
            checks.fail(
                WHERE,
                "a run with correlated noise from its round 0 on",
                f"a part that begins with round {s.first}"
                + " and shares its noise with other plans" * s.plan.paired_noise,
                "Give the rounds of one plan as one segment, (plan, rounds, 0); where it went on "
                "from other plans, without paired_noise, name those before it, as in "
                "[(other, 10), (plan, 10)].",
                error=NotAnalysable,
            )


def _begun(plan, first):
    """What the accountant reads of a plan, from round `first` on."""
    if not first:
        return plan
    begun("jfl.guarantee", plan, first)
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
    return (
        [[f[min(k, len(f) - 1)] for f in fit] for k in range(max(map(len, fit)))]
        if all(fit)
        else []
    )


def _assumes(segments):
    """True if something is drawn, and a segment's rounds are taken to follow those of another."""
    return (
        any(_draws(s.plan) for s in segments)
        and any(s.first and not s.placed for s in segments)
        and len({s.seed for s in segments}) < len(segments)
    )


# --- what is the same draw


def _same(one, other):
    """Two records of one structure with equal numbers."""
    leaves = [jax.tree.leaves(v) for v in (one, other)]
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        np.shape(a) == np.shape(b) and np.array_equal(a, b) for a, b in zip(*leaves)
    )


def _same_rows(one, other):
    """The same rows in the same places of the same clients."""
    if one is other:
        return True
    if (one.host is None) != (other.host is None):
        return False
    if one.host is not None:
        return one.host is other.host or np.array_equal(one.host.identity, other.host.identity)
    if not all(np.array_equal(getattr(one, n), getattr(other, n)) for n in ("size", "x", "y")):
        return False
    size, tables = np.asarray(one.size), [np.asarray(fed.index) for fed in (one, other)]
    width = min(t.shape[-1] for t in tables)
    owned = np.arange(width) < size[:, None]
    mine, theirs = (t[:, :width][owned] for t in tables)
    return np.array_equal(mine, theirs)


def _addressed(plan):
    """What says at which steps a client draws: the same for all algorithms of jfl, a function for
    others."""
    client = plan.algorithm.client
    while identity.registered(client.function) == "averaged.client" and isinstance(
        client.data.get("inner"), Fn
    ):
        client = client.data["inner"]
    if identity.is_ours(client.function):
        return "jfl"
    return client.function, tuple(sorted(client.static.items()))


def _same_batches(one, other):
    """Of the same rows: equal draws, in the steps that both take.  Of several sites it is not known
    which draws when."""
    if len(one.algorithm.releases) != 1 or len(other.algorithm.releases) != 1:
        return False
    (a,), (b,) = one.algorithm.releases, other.algorithm.releases
    return (
        a.steps == b.steps
        and _same(a.batches.draw, b.batches.draw)
        and _addressed(one) == _addressed(other)
        and turns(one.sampler) == turns(other.sampler)
    )


def _classes(same, plans):
    """A number for each plan, equal for those that are the same as the first of their number."""
    first, out = [], []
    for plan in plans:
        at = next(
            (k for k, other in enumerate(first) if other is plan or same(other, plan)), len(first)
        )
        first += [plan] if at == len(first) else []
        out.append(at)
    return out


def _everyone(sampler):
    return sampler.scheme == "full" or (
        sampler.scheme == "without_replacement" and sampler.capacity >= sampler.clients
    )


def _draws(plan):
    """True if cohorts or batches are drawn."""
    return not _everyone(plan.sampler) or not _takes_all(plan, 0)


def _takes_all(plan, rows):
    """True if no batch of a client with so many rows depends on the key; of 0 rows, of no client at
    all."""
    return all(
        r.batches.scheme == "full"
        or (r.batches.scheme == "without_replacement" and 0 < rows <= r.batches.batch)
        for r in plan.algorithm.releases
    )


# --- entries of several plans


def joined(parts: Sequence[Entry], rounds: Sequence[int]) -> Entry:
    """Entries one after another, each for its number of rounds, as one.

    Each client may be the worst in each of them: all combinations are at least as bad as any
    client.
    """
    stretches = tuple(Stretch(r, (Member(e),)) for e, r in zip(parts, rounds))
    combinations = math.prod(len(e.worst) for e in parts)
    if combinations > COMBINATIONS and not any(e.refusal for e in parts):
        refusal = (
            f"{WHERE}: need at most {COMBINATIONS} combinations of different clients over the "
            f"segments; got {combinations}. Let the noise of one plan change over rounds instead."
        )
        return _of(stretches, (), refusal)
    return _of(stretches, itertools.product(*(e.worst for e in parts)))


def _of(stretches, worst, refusal=""):
    """What the members of all stretches say together."""
    every = [m.entry for s in stretches for m in s.members]
    overflow = 0.0
    for stretch in stretches:
        # of equal draws, the larger one has all
        equal = len({(m.cohorts, m.batches) for m in stretch.members}) == 1
        overflow += stretch.rounds * (max if equal else sum)(
            m.entry.overflow for m in stretch.members
        )
    first, refusals = every[0], [e.refusal for e in every if e.refusal]
    return Entry(
        first.unit,
        first.view,
        first.adjacency,
        worst=tuple(worst),
        overflow=overflow,
        mixture=any(e.mixture for e in every),
        implied=any(e.implied for e in every),
        noise_of=first.noise_of,
        rounds=sum(s.rounds for s in stretches),
        stretches=stretches,
        refusal=refusals[0] if refusals else refusal,
        status="conditional" if any(e.status != "proved" for e in every) else "proved",
        caveats=sum((e.caveats for e in every), ()),
    )


def _joint(rounds, plans, entries_of) -> Entry:
    """One entry for stretches in some of which several plans run; plans and entries
    [stretches][members]."""
    if all(len(several) == 1 for several in entries_of):
        return joined([entry for (entry,) in entries_of], rounds)
    distinct = list({id(p): p for several in plans for p in several}.values())
    class_of = lambda same: dict(zip(map(id, distinct), _classes(same, distinct)))
    rows = class_of(lambda a, b: _same_rows(a.fed, b.fed))
    cohorts = class_of(lambda a, b: _same(a.sampler, b.sampler) and rows[id(a)] == rows[id(b)])
    batches = class_of(lambda a, b: rows[id(a)] == rows[id(b)] and _same_batches(a, b))
    member = lambda p, e: Member(e, cohorts[id(p)], batches[id(p)], _everyone(p.sampler))
    stretches = tuple(
        Stretch(r, tuple(map(member, *several))) for r, *several in zip(rounds, plans, entries_of)
    )
    if any(e.refusal for several in entries_of for e in several):
        return _of(stretches, ())
    flat = [m for s in stretches for m in s.members]
    try:
        worst = _clients(flat, [rows[id(p)] for several in plans for p in several])
    except NotAnalysable as error:
        return _of(stretches, (), str(error))
    one = _of(stretches, worst)
    caveats, absent = set(), False
    for columns in worst:
        columns = iter(columns)
        for stretch in stretches:
            members = met(stretch, [next(columns) for _ in stretch.members])
            caveats |= _sharing(members)
            absent |= events.Participation in kinds(round_of(members))
    return one._replace(
        mixture=one.mixture and absent, caveats=one.caveats + tuple(sorted(caveats))
    )


def _sharing(members) -> set:
    """What is assumed of a round in which several plans draw from the same keys."""
    drawing = [m for m in members if not m.draws_nothing]
    if len(drawing) < 2:
        return set()
    after = kinds(round_of(drawing)) & SAMPLES
    before = set().union(*(kinds(m.event()) for m in drawing)) & SAMPLES
    return ({CHOSEN} if after else set()) | ({UNLIKE} if before - after else set())


def _clients(members, of) -> list:
    """Columns for each member such that no client is worse off than with one of these.

    Clients of one federation are the same for all plans on it.  Of different ones, any may be the
    worst in any.
    """
    groups = [[i for i, g in enumerate(of) if g == group] for group in dict.fromkeys(of)]
    each = [_alike([members[i].entry for i in group]) for group in groups]
    many = np.prod([float(len(e)) for e in each])
    if len(each) > 1 and many > COMBINATIONS:
        checks.fail(
            WHERE,
            (
                f"at most {COMBINATIONS} combinations of different clients in rounds that segments "
                f"share"
            ),
            f"{many:g}",
            "Use one federation for all plans.",
            error=NotAnalysable,
        )
    out = []
    for chosen in itertools.product(*each):
        columns = {i: pair for group, pair in zip(groups, chosen) for i in group}
        out.append(tuple(columns[i] for i in range(len(members))))
    return out


def _alike(entries) -> list:
    """As `_clients`, of plans on one federation: one pair of columns for all of them."""
    counted = functools.reduce(np.intersect1d, [e.clients.counted for e in entries])
    rows = np.max([e.clients.rows for e in entries], axis=0)
    shares = [e.clients.share for e in entries]
    alike = all(np.array_equal(shares[0], s) for s in shares)
    differ = [effective(p) for e in entries for p in e.parts]
    if not alike:
        differ += [s[None] if np.ptp(s) else s[None, :1] for s in shares]
    amount = shares[0] if alike else np.zeros(len(rows))
    # where a batch takes all rows of a client, more rows are not better: then something is drawn,
    # and may be shared
    takes_all = np.array(
        [
            np.all([np.broadcast_to(p.takes_all, rows.shape) for p in e.parts], axis=0)
            | (e.drawn != "rows")
            for e in entries
        ]
    )[:, counted]
    out = []
    for pattern in np.unique(takes_all, axis=1).T:
        here = counted[(takes_all.T == pattern).all(1)]
        out += worst_columns(rows, amount, differ, here)
    return out
