"""From entries to the events of an accountant: `events_of`, and nothing else, does it."""

from typing import Any

import jax
import numpy as np

from ...core.errors import NotAnalysable
from ..accountants import events
from .entry import ABSENT, Entry, Part, effective

WHOLE = ("without_replacement", "touched")  # samples of everything are no samples


def events_of(entry: Entry) -> tuple:
    """The events of a round, or of a whole run: one for each client that may be the worst."""
    if entry.refusal:
        raise NotAnalysable(entry.refusal)
    if entry.stretches:
        return tuple(_of_stretches(entry.stretches, columns) for columns in entry.worst)
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


def _of_stretches(stretches, columns):
    """The event of all stretches, for a client with these columns in each of them."""
    parts = []
    for (rounds, entry), pair in zip(stretches, columns):
        event = _of_columns(entry, [effective(p) for p in entry.parts], pair)
        times = np.ones(rounds) if entry.changes else rounds
        parts.append((events.series if entry.changes else events.repeat)(event, times))
    return _composed(parts)
