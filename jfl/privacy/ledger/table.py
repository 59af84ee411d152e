"""The ledger of a plan as a table for people."""

import numpy as np

from .entry import Entry, Part, effective

HEADS = (
    "unit",
    "view",
    "adjacency",
    "release",
    "sampling",
    "rate",
    "noise",  # multiplier
    "times",  # in a participation
    "participation",  # probability, of a round
)


class Ledger(tuple):
    """The entries of a plan; prints as a table, a line for each noisy release."""

    rounds: int

    def __new__(cls, entries, rounds: int):
        ledger = super().__new__(cls, entries)
        ledger.rounds = rounds
        return ledger

    def __getnewargs__(self):
        return tuple(self), self.rounds

    def __str__(self):
        if not self:
            return "no mechanism that the plan declares adds noise"
        lines = [HEADS, *(line for entry in self for line in _lines(entry))]
        widths = [max(len(line[k]) for line in lines) for k in range(len(HEADS))]
        rows = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        below = [f"in each of {self.rounds} rounds; noise is std / sensitivity"]
        below += [f"  refused: {e.refusal}" for e in self if e.refusal]
        below += [f"  {e.status}: {e.unit}, {e.view}" for e in self if e.status != "proved"]
        below += [f"  caveat: {c}" for e in self for c in e.caveats]
        return "\n".join([*rows, *dict.fromkeys(below)])

    __repr__ = __str__


def _lines(entry: Entry) -> list:
    """A line for each part."""
    unit = f"{entry.unit}, implied" if entry.implied else entry.unit
    who = (unit, entry.view, entry.adjacency)
    if entry.refusal:
        return [(*who, "refused", *[""] * 5)]
    return [(*(("", "", "") if k else who), *_line(entry, p)) for k, p in enumerate(entry.parts)]


def _line(entry, part: Part) -> tuple:
    sampling, rate = part.sampling, _numbers(entry, part.rate)
    if sampling == "with_replacement":
        sampling = f"{_numbers(entry, part.sample)} draws with_replacement"
    if part.seen:
        sampling, rate = f"{sampling}, seen", ""
    return (
        part.release,
        sampling,
        "" if part.sampling == "none" else rate,
        _numbers(entry, effective(part)) + (" laplace" if part.law == "laplace" else ""),
        _numbers(entry, part.count),
        _participation(entry),
    )


def _participation(entry) -> str:
    if entry.chance is None:  # the release is of a round
        return "1"
    chances = np.array([entry.chance[other] for _, other in entry.worst])
    return (f"{entry.turns} times " if entry.turns > 1 else "") + _range(chances)


def _numbers(entry, values) -> str:
    """Values of the clients that may be the worst."""
    alike = values.shape[-1] == 1
    return _range(values if alike else values[..., [first for first, _ in entry.worst]])


def _range(values) -> str:
    if not values.size:
        return ""
    low, high = f"{np.min(values):.4g}", f"{np.max(values):.4g}"
    return low if low == high else f"{low} to {high}"
