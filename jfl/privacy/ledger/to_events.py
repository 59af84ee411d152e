"""From entries to the events of an accountant: `events_of`, and nothing else, does it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from ...core import checks
from ...core.errors import NotAnalysable
from ..accountants import events
from .entry import ABSENT, Entry, Member, Part, Stretch, effective

WHOLE = ("without_replacement", "touched")  # samples of everything are no samples


def events_of(entry: Entry) -> tuple:
    """The events of a round, or of a whole run: one for each client that may be the worst."""
    if entry.refusal:
        raise NotAnalysable(entry.refusal)
    if entry.stretches:
        return tuple(_run(entry.stretches, columns) for columns in entry.worst)
    noise = [effective(p) for p in entry.parts]
    return tuple(_of_columns(entry, noise, columns) for columns in entry.worst)


def run(entry: Entry, rounds) -> tuple:
    """The events of `rounds` times what the entry stands for."""
    if entry.changes:
        return tuple(_series(e, rounds) for e in events_of(entry))
    return tuple(events.repeat(e, rounds) for e in events_of(entry))


def _series(event, rounds):
    """The event of rounds whose noise differs; equal rounds together, and without those in which
    nothing is released."""
    levels, which = of_levels(event, rounds)
    often = np.bincount(which, minlength=1 + which.max(initial=0)).astype(np.float64)
    absent = _nothing_released(levels, len(often))
    return events.series(levels, np.where(absent & ~absent.all(), 0.0, often))


def _nothing_released(levels, count):
    """Bool[count]: rounds in which every release has the noise of one that did not happen."""
    kinds = (events.Gaussian, events.Laplace, events.Pure, events.RenyiBound)
    is_release = lambda e: isinstance(e, kinds)
    releases = [e for e in jax.tree.leaves(levels, is_leaf=is_release) if is_release(e)]
    noise = [np.asarray(getattr(e, "noise_multiplier", 0.0)) for e in releases]
    absent = [np.broadcast_to(z[:count] if z.ndim else z, (count,)) >= ABSENT for z in noise]
    return np.all(absent, axis=0) if absent else np.zeros(count, bool)


def of_levels(event, rounds: int) -> tuple:
    """An event whose noise differs by rounds, with each level of it once; and which of them each
    round has, Int[rounds]."""
    noise = [z for z in jax.tree.leaves(event) if np.ndim(z)]
    together = np.stack([z[:rounds] for z in noise]) if noise else np.zeros((1, rounds))
    _, first, which = np.unique(together, axis=1, return_index=True, return_inverse=True)
    return jax.tree.map(lambda z: z[first] if np.ndim(z) else z, event), which.reshape(-1)


def _of_columns(entry, noise, columns):
    """The event for a client with the parts of one column and the participation of another."""
    first, other = columns
    levels = [_column(z, first) for z in noise]
    if entry.participations is not None:
        times = int(entry.participations[other])
        levels = [_least(z, times, entry.turns) for z in levels]
    steps = [_step(entry, p, first, z) for p, z in zip(entry.parts, levels)]
    event = _participation(steps)
    if entry.participations is None:
        event = attended(entry, other, event)
        times = entry.rounds
    if times is None:
        return event
    changes = any(np.ndim(z) for z in levels)
    return events.series(event, np.ones(times)) if changes else events.repeat(event, times)


def attended(entry: Entry, column: int, participation):
    """The event of a round, out of that of a participation."""
    if entry.chance is None:
        return participation
    chance = float(entry.chance[column])
    event = events.participation(chance, participation) if chance < 1 else participation
    return events.repeat(event, entry.turns)


def _column(values, column):
    """A client's own multiplier: a number, or Float64[rounds]."""
    own = values[:, column if values.shape[1] > 1 else 0]
    return own if len(own) > 1 else float(own[0])


def _least(multipliers, times, turns):
    """Multipliers of so many participations where the noise is least, at most `turns` in a round:
    a client may have come in those."""
    if np.ndim(multipliers) == 0:
        return multipliers
    least = np.sort(np.repeat(multipliers, turns))[:times]
    return least if times > 1 else float(least[0])


def _step(entry: Entry, part: Part, column: int, multiplier):
    """The event of one release, and how often it happens."""
    if part.renyi is not None:
        return events.renyi_bound(*part.renyi[:2]), float(part.count[0])
    if part.law == "laplace":
        return _laplace(entry, part, column, multiplier), float(
            part.count[_own(part.count, column)]
        )
    noise = events.gaussian(multiplier)
    population: Any  # a whole number
    sample, population, count = (
        float(v[column if len(v) > 1 else 0]) for v in (part.sample, part.population, part.count)
    )
    if part.sampling == "none" or (part.sampling in WHOLE and sample >= population):
        return noise, count
    if part.sampling == "without_replacement":
        is_zeroed = entry.adjacency == "zero_out"
        drawn = events.zeroed_out if is_zeroed else events.without_replacement
        event = drawn(sample, population, noise)
    elif part.sampling == "allocation":
        event = events.allocation(population, noise)
    elif part.sampling == "truncated_poisson":
        capacity = float(part.capacity[column if len(part.capacity) > 1 else 0])
        slots: Any = min(capacity, population)
        rate = min(sample / population, 1.0)
        event = events.truncated_poisson(rate, population, slots, noise, entry.adjacency)
    elif part.sampling == "with_replacement":
        event = events.with_replacement(sample, population, noise)
    else:  # each takes part on its own, with a probability
        drawn = dict(
            poisson=events.replaced if entry.adjacency == "replace_one" else events.poisson,
            touched=events.touched,
            participation=events.participation,
        )
        event = drawn[part.sampling](sample / population, noise)
    return (events.seen(event) if part.seen else event), count


def _own(values, column):
    return column if len(values) > 1 else 0


# how a unit comes into a sample, and adjacencies under which pure privacy is amplified by it
AMPLIFIED = {
    "poisson": ("add_remove", "zero_out", "replace_one"),
    "without_replacement": ("replace_one",),
}


def _laplace(entry: Entry, part: Part, column: int, multiplier):
    """The event of one release with Laplace noise: what a sample gains is known for pure privacy.

    Elsewhere the sample counts as seen, which is sound: it does not hang on the data.
    """
    sample, population = (float(v[_own(v, column)]) for v in (part.sample, part.population))
    if part.sampling == "with_replacement":  # an element may be all of a sample
        return events.laplace(multiplier / sample)
    if part.sampling == "participation":
        return events.participation(sample / population, events.laplace(multiplier))
    if part.seen or sample >= population or entry.adjacency not in AMPLIFIED.get(part.sampling, ()):
        return events.laplace(multiplier)
    rate, whole = sample / population, 1 / multiplier
    return events.pure(whole + np.log(rate + (1 - rate) * np.exp(-whole)))


def _participation(steps):
    return _composed([events.repeat(step, count) for step, count in steps])


def _composed(parts):
    return parts[0] if len(parts) == 1 else events.compose(*parts)


# --- several plans


class Met(NamedTuple):
    """What one client meets of a plan in a round."""

    member: Member
    steps: tuple  # (event of a release, how often in a participation), ...
    first: int  # column of the parts
    other: int  # column of the chances

    @property
    def entry(self) -> Entry:
        return self.member.entry

    @property
    def draws_no_batch(self) -> bool:
        parts = self.entry.parts
        all_rows = all(p.takes_all[self.first if len(p.takes_all) > 1 else 0] for p in parts)
        return self.entry.drawn != "rows" or all_rows

    @property
    def draws_nothing(self) -> bool:
        """True if it has no sample to share."""
        return self.draws_no_batch and (self.entry.view == "server" or self.member.everyone)

    def event(self):
        """A round of it on its own."""
        return attended(self.entry, self.other, _participation(self.steps))

    def precision(self):
        """Sum of 1 / z^2 of a participation, where all that is drawn is seen and the client is in
        all of it."""
        if any(part.renyi is not None or part.law != "gaussian" for part in self.entry.parts):
            checks.fail(
                "jfl.guarantee",
                "Gaussian noise in plans that share a sample",
                "Laplace noise, or integers of jfl.distributed",
                "Give them seeds of their own: seeds='different'.",
                error=NotAnalysable,
            )
        return sum(count * _precision(step) for step, count in self.steps)


def met(stretch: Stretch, columns) -> list[Met]:
    """What a client meets in a round, given its columns in each member."""
    out = []
    for member, (first, other) in zip(stretch.members, columns):
        levels = [_column(effective(p), first) for p in member.entry.parts]
        entry = member.entry
        steps = tuple(_step(entry, p, first, z) for p, z in zip(entry.parts, levels))
        out.append(Met(member, steps, first, other))
    return out


def _run(stretches, columns):
    """The event of all stretches, for a client with these columns in each member of each."""
    columns, parts = iter(columns), []
    for stretch in stretches:
        event = round_of(met(stretch, [next(columns) for _ in stretch.members]))
        changes = any(m.entry.changes for m in stretch.members)
        times = np.ones(stretch.rounds) if changes else stretch.rounds
        parts.append((events.series if changes else events.repeat)(event, times))
    return _composed(parts)


def round_of(members: list[Met]):
    """The event of a round of several plans, for one client."""
    if len(members) == 1:
        return members[0].event()
    alone = [m for m in members if m.draws_nothing]
    drawing = [m for m in members if not m.draws_nothing]
    parts: list[Any] = (
        [_gaussian(sum(m.entry.turns * m.precision() for m in alone))] if alone else []
    )
    if drawing:
        parts.append(drawing[0].event() if len(drawing) == 1 else _on_one_sample(drawing))
    return _composed(parts)


def _on_one_sample(members):
    """A round of plans that draw from the same keys: what is the same draw is drawn once, what is
    not counts as seen."""
    seen = _gaussian(sum(m.entry.turns * m.precision() for m in members))
    same_cohorts = len({m.member.cohorts for m in members}) == 1
    of_rounds = [m.entry.chance is None for m in members]
    if all(of_rounds):  # noise of the release: the sample is the cohort
        return _shared(members) or seen if same_cohorts else seen
    if any(of_rounds) or len({m.entry.turns for m in members}) > 1:
        return seen
    drawing = [m for m in members if not m.draws_no_batch]
    inner: list[Any] = (
        [_gaussian(sum(m.precision() for m in members if m.draws_no_batch))]
        if len(drawing) < len(members)
        else []
    )
    if len(drawing) == 1:
        inner += [events.repeat(step, count) for step, count in drawing[0].steps]
    elif drawing:
        shared = _shared(drawing) if len({m.member.batches for m in drawing}) == 1 else None
        inner.append(shared or _gaussian(sum(m.precision() for m in drawing)))
    event = _composed(inner)
    # a cohort that is not the same counts as seen, with the client in it
    if not same_cohorts:
        return events.repeat(event, members[0].entry.turns)
    return attended(members[0].entry, members[0].other, event)


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
        z = sum(_noise(step) ** -2.0 for step, times in steps if times >= count) ** -0.5
        parts.append(events.repeat(_with_noise(steps[0][0], z), count - done))
        done = count
    return _composed(parts)


def _noise(step):
    return (step if isinstance(step, events.Gaussian) else step.event).noise_multiplier


def _sample(step):
    """A sample's kind and numbers, without the noise inside."""
    if isinstance(step, events.Gaussian):
        return (events.Gaussian,)
    return (type(step), *(float(v) for k, v in sorted(vars(step).items()) if k != "event"))


def _with_noise(step, z):
    noise = events.gaussian(z)
    is_sample = not isinstance(step, events.Gaussian)
    return dataclasses.replace(step, event=noise) if is_sample else noise


def _precision(step):
    """1 / z^2 of a release whose sample is seen; drawn with replacement, an element may be all of a
    batch."""
    copies = step.draws if isinstance(step, events.WithReplacement) else 1.0
    return copies**2 * _noise(step) ** -2.0


def _gaussian(precision):
    return events.gaussian(np.asarray(precision, np.float64) ** -0.5)


def kinds(event) -> set:
    """The types of an event and of all inside it."""
    inner = event.events if isinstance(event, events.Compose) else [getattr(event, "event", None)]
    return {type(event)}.union(*(kinds(e) for e in inner if e is not None))
