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
from typing import NamedTuple

import jax
import numpy as np

from ...core import checks, identity
from ...core.errors import NotAnalysable
from ...core.records import Caveat, Fn, Plan
from ..accountants import events
from ..mechanisms.chain import later
from .entries import COMBINATIONS, Entry, entries, joined
from .example_level import changing, kinds
from .participation import every_round, turns

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
    found, once = _distinct(_segments(segments, seeds))
    pieces = _pieces(found)
    listed = [
        [entries(_begun(found[i].plan, p.first), p.rounds) for i in p.members] for p in pieces
    ]
    of = {i: one for p, several in zip(pieces, listed) for i, one in zip(p.members, several)}
    kind = lambda e: (e.unit, e.view, e.adjacency)
    caveats = (SEEDS,) * (seeds is not None) + (ONCE,) * once + (FOLLOWING,) * _assumes(found)
    out = []
    for wanted in dict.fromkeys(map(kind, of[0])):
        fit = [[at for at, e in enumerate(of[i]) if kind(e) == wanted] for i in range(len(found))]
        # noise on uploads and on the release may both prove it: all ways through the segments, of
        # which one is chosen
        for way in _ways(fit):
            chosen = [
                [one[way[i]] for i, one in zip(p.members, several)]
                for p, several in zip(pieces, listed)
            ]
            if all(len(c) == 1 for c in chosen):
                one = joined([c for (c,) in chosen], [p.rounds for p in pieces])
            else:
                one = _together(
                    pieces, [[found[i].plan for i in p.members] for p in pieces], chosen
                )
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
    return (SHARED,) if any(len(found) > 1 for found in of.values()) else ()


# --- which rounds


def _segments(segments, seeds):
    """The segments with their first rounds, checked."""
    seeds = _seeds(seeds, len(segments))
    found, ends = [], {}
    for (plan, rounds, *first), seed in zip(segments, seeds):
        if found and changing(plan) and not first:
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
        found.append(Segment(plan, begin, int(rounds), seed, bool(first)))
        ends[seed] = found[-1].end
    counts = {int(np.size(s.plan.fed.size)) for s in found}
    if len(counts) > 1:
        checks.fail(WHERE, "segments with the same clients", f"{sorted(counts)} clients")
    return found


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
    name = functools.cache(lambda i: _name(segments[i].plan))
    past = functools.cache(lambda i: _past(segments, i, name, past))
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
    return id(plan) if plan.paired_noise else identity.words(plan).tobytes()


def _past(segments, i, name, past):
    """What may have run before a segment, as far as the segments tell: a set of tuples of (plan,
    where it ended).

    Rounds before it of which no segment speaks are taken as the plan's own.
    """
    s = segments[i]
    before = [j for j, t in enumerate(segments) if t.seed == s.seed and t.first < s.first <= t.end]
    found = [
        past(j) if name(j) == name(i) else {p + ((name(j), s.first),) for p in past(j)}
        for j in before
    ]
    return frozenset().union(*found) if found else frozenset([()])


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


def _begun(plan, first):
    """What the accountant reads of a plan, from round `first` on."""
    if not first:
        return plan
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
        return one.host is other.host or np.array_equal(one.host.digest, other.host.digest)
    if not all(np.array_equal(getattr(one, n), getattr(other, n)) for n in ("size", "x", "y")):
        return False
    size, tables = np.asarray(one.size), [np.asarray(fed.index) for fed in (one, other)]
    width = min(t.shape[-1] for t in tables)
    owned = np.arange(width) < size[:, None]
    return np.array_equal(*(t[:, :width][owned] for t in tables))


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


# --- one round of several plans

SAMPLES = {events.Poisson, events.WithoutReplacement, events.WithReplacement, events.Participation}


class Member(NamedTuple):
    """A plan in a round, for one client."""

    plan: Plan
    entry: Entry
    cohort: int  # equal for those with the same cohorts
    batches: int  # equal for those with the same batches
    rows: int = 0
    share: float = 1.0
    client: int = 0
    z: tuple = ()

    @property
    def steps(self):
        return self.entry.steps(self.z, self.rows, self.client)

    @property
    def quiet(self):
        """True if none of its batches is drawn."""
        return self.entry.drawn != "rows" or _takes_all(self.plan, self.rows)

    @property
    def alone(self):
        """True if nothing of it is drawn: it has no sample to share."""
        return self.quiet and (self.entry.view == "server" or _everyone(self.plan.sampler))

    def event(self):
        """A round of it on its own."""
        found = _composed([events.repeat(step, count) for step, count in self.steps])
        return self.entry.attends(self.share, found) if self.entry.attends else found

    def precision(self):
        """Sum of 1 / z^2 of a participation, where all that is drawn is seen and the client is in
        all of it."""
        return sum(count * _precision(step) for step, count in self.steps)

    def turns(self):
        """How often the client may run in a round."""
        return turns(self.plan.sampler) if self.entry.attends else 1


def _together(pieces, plans, found):
    """One entry for pieces in some of which several segments run; plans and entries
    [pieces][members]."""
    flat = [
        (k, plan, entry)
        for k, several in enumerate(zip(plans, found))
        for plan, entry in zip(*several)
    ]
    first = found[0][0]
    refusals = [e.refusal for _, _, e in flat if e.refusal]
    if refusals:
        return first._replace(refusal=refusals[0])
    distinct = list({id(p): p for _, p, _ in flat}.values())
    class_of = lambda same: dict(zip(map(id, distinct), _classes(same, distinct)))
    rows = class_of(lambda a, b: _same_rows(a.fed, b.fed))
    cohort = class_of(lambda a, b: _same(a.sampler, b.sampler) and rows[id(a)] == rows[id(b)])
    batches = class_of(lambda a, b: rows[id(a)] == rows[id(b)] and _same_batches(a, b))
    members = [(k, Member(p, e, cohort[id(p)], batches[id(p)])) for k, p, e in flat]
    clients = _clients([m for _, m in members], [rows[id(p)] for _, p, _ in flat])
    caveats = set()

    def happens(z):
        out = []
        for each in clients:
            here = [
                (k, m._replace(rows=r, share=s, client=c, z=own))
                for (k, m), (r, s, c), own in zip(members, each, z)
            ]
            parts = []
            for k, piece in enumerate(pieces):
                event = _round([m for at, m in here if at == k], caveats)
                series = any(e.series for e in found[k])
                parts.append(
                    events.series(event, np.ones(piece.rounds))
                    if series
                    else events.repeat(event, piece.rounds)
                )
            out.append(_composed(parts))
        return tuple(out)

    z = tuple(e.z for _, _, e in flat)
    listed = happens(z)  # finds the caveats, and refuses now what it would refuse later
    lost = 0.0
    for piece, several, which in zip(pieces, found, plans):
        equal = (
            len({(cohort[id(p)], batches[id(p)]) for p in which}) == 1
        )  # then the larger one has all
        lost += piece.rounds * (max if equal else sum)(e.overflow for e in several)
    every = [e for _, _, e in flat]
    return first._replace(
        events=happens,
        z=z,
        overflow=lost,
        implied=any(e.implied for e in every),
        one=None,
        slip=None,
        steps=None,
        attends=None,
        series=False,
        mixture=any(e.mixture for e in every)
        and any(events.Participation in _kinds(e) for e in listed),
        status="conditional" if any(e.status != "proved" for e in every) else "proved",
        caveats=sum((e.caveats for e in every), ()) + tuple(sorted(caveats)),
    )


def _clients(members, of):
    """Clients such that each is at most as badly off as one of them: of each, (rows, share, number)
    for each member.

    Clients of one federation are the same for all plans on it.  Of different ones, any may be the
    worst in any.
    """
    groups = [[i for i, g in enumerate(of) if g == group] for group in dict.fromkeys(of)]
    each = [_alike([members[i] for i in group]) for group in groups]
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
        at = {i: value for group, values in zip(groups, chosen) for i, value in zip(group, values)}
        out.append([at[i] for i in range(len(members))])
    return out


def _alike(members):
    """As `_clients`, of plans on one federation."""
    found = [m.entry for m in members]
    number = functools.reduce(np.intersect1d, [e.clients[2] for e in found])  # examples need rows
    at = [np.searchsorted(e.clients[2], number) for e in found]
    rows, shares = ([np.asarray(e.clients[k])[a] for e, a in zip(found, at)] for k in (0, 1))
    rows = np.max(rows, axis=0)
    differ = [v if v.shape[1] == 1 else v[:, a] for e, a in zip(found, at) for v in e.differ]
    one = all(np.array_equal(shares[0], s) for s in shares)
    differ += [] if one else [s[None] if np.ptp(s) else s[None, :1] for s in shares]
    # where a batch takes all rows of a client, more rows are not better: then something is drawn,
    # and may be shared
    known, which = np.unique(rows, return_inverse=True)
    quiet = np.array([[m._replace(rows=int(r)).quiet for r in known] for m in members])[
        :, which.reshape(-1)
    ]
    out = []
    for pattern in np.unique(quiet, axis=1).T:
        here = np.flatnonzero((quiet.T == pattern).all(1))
        cut = [v if v.shape[1] == 1 else v[:, here] for v in differ]
        worst = kinds(rows[here], shares[0][here] if one else np.zeros(len(here)), cut)
        out += [
            [(r, s if one else share[here[c]], number[here[c]]) for share in shares]
            for r, s, c in worst
        ]
    return out


def _round(members, caveats):
    """The event of a round of several plans, for one client."""
    if len(members) == 1:
        return members[0].event()
    alone, drawing = [m for m in members if m.alone], [m for m in members if not m.alone]
    parts = [_gaussian(sum(m.turns() * m.precision() for m in alone))] if alone else []
    if drawing:
        event = drawing[0].event() if len(drawing) == 1 else _on_one_sample(drawing)
        parts.append(event)
    if len(drawing) > 1:
        before, after = (
            {k for m in drawing for k in _kinds(m.event())} & SAMPLES,
            _kinds(event) & SAMPLES,
        )
        caveats |= {CHOSEN} if after else set()
        caveats |= {UNLIKE} if before - after else set()
    return _composed(parts)


def _on_one_sample(members):
    """A round of plans that draw from the same keys: what is the same draw is drawn once, what is
    not counts as seen."""
    seen = _gaussian(sum(m.turns() * m.precision() for m in members))
    cohorts = len({m.cohort for m in members}) == 1
    if all(
        m.entry.attends is None for m in members
    ):  # noise of the release: the sample is the cohort
        return _shared(members) or seen if cohorts else seen
    if any(m.entry.attends is None for m in members) or len({m.turns() for m in members}) > 1:
        return seen
    drawing = [m for m in members if not m.quiet]
    inner = (
        [_gaussian(sum(m.precision() for m in members if m.quiet))]
        if len(drawing) < len(members)
        else []
    )
    if len(drawing) == 1:
        inner += [events.repeat(step, count) for step, count in drawing[0].steps]
    elif drawing:
        one = _shared(drawing) if len({m.batches for m in drawing}) == 1 else None
        inner.append(one or _gaussian(sum(m.precision() for m in drawing)))
    # a cohort that is not the same counts as seen, with the client in it
    attends = (
        members[0].entry.attends
        if cohorts
        else lambda share, event: every_round(members[0].plan.sampler, event)
    )
    return attends(members[0].share, _composed(inner))


def _shared(members):
    """Releases on the same samples, of the steps that each takes; None where the samples are not
    the same after all."""
    if any(len(m.steps) != 1 for m in members):
        return None
    steps = sorted((m.steps[0] for m in members), key=lambda s: s[1])
    if len({_sample(step) for step, _ in steps}) > 1:
        return None
    parts, done = [], 0
    for count in sorted({count for _, count in steps}):
        z = sum(_inner(step).noise_multiplier ** -2.0 for step, n in steps if n >= count) ** -0.5
        parts.append(events.repeat(_with_noise(steps[0][0], z), count - done))
        done = count
    return _composed(parts)


def _inner(step):
    return step if isinstance(step, events.Gaussian) else step.event


def _sample(step):
    """A sample's kind and numbers, without the noise inside."""
    if isinstance(step, events.Gaussian):
        return (events.Gaussian,)
    return (type(step), *(float(v) for k, v in sorted(vars(step).items()) if k != "event"))


def _with_noise(step, z):
    return (
        events.gaussian(z)
        if isinstance(step, events.Gaussian)
        else dataclasses.replace(step, event=events.gaussian(z))
    )


def _precision(step):
    """1 / z^2 of a release whose sample is seen; drawn with replacement, an element may be all of a
    batch."""
    copies = step.draws if isinstance(step, events.WithReplacement) else 1.0
    return copies**2 * _inner(step).noise_multiplier ** -2.0


def _gaussian(precision):
    return events.gaussian(np.asarray(precision, np.float64) ** -0.5)


def _composed(parts):
    return parts[0] if len(parts) == 1 else events.compose(*parts)


def _kinds(event):
    inner = event.events if isinstance(event, events.Compose) else [getattr(event, "event", None)]
    return {type(event)}.union(*(_kinds(e) for e in inner if e is not None))
