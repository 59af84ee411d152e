"""One rule for the claims of all papers.

A claim is one or more comparisons: a number that each seed has, such as the accuracy of one line
less that of another, and the range in which the claim has its mean.  Its interval is Student's t
over seeds, paired where both lines ran the same ones.  All intervals of a figure hold together at
95 %: each has the level 1 - 0.05 / m, with m the claims of the figure, the
paper's and ours apart (Bonferroni).

    holds              every interval lies inside its range
    against the claim  one interval lies outside, where 0.05 / m is divided by the comparisons of
                       the claim as well: "contradicted at the paper's settings" if the settings are
                       those, "not reproduced at our settings" if the paper left some open or they
                       were reduced
    undecided          some interval contains both, or one seed gives no interval
    cannot be checked  something it takes was not run, is lost in our copy of the paper, or is left
                       open by a theorem; with the reason

What has no seeds, such as a formula or a proof, is exact: it holds or does not.  A theorem has no
settings but its hypotheses: a run that meets them and lies outside of its bound contradicts it.
One that holds up to a constant holds where it does at a constant of 1; where it does not, it cannot
be checked.  A line whose
seeds are not stored enters by its mean and standard deviation, unpaired, with the fewest degrees of
freedom.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import stats

from . import results as results_file

HOLDS, CONTRADICTED, NOT_REPRODUCED, UNDECIDED, UNKNOWN = results_file.VERDICTS
# that one of the intervals of a figure misses what it is of; of baselines, that each of them does
WRONG = 0.05
NOT_RUN = "lines that were not run"
FAR = 0.05  # of accuracy, below what a model reaches: its rates were not tuned
POINTS = 0.02  # accuracies so close are "no difference", and "no lower" allows as much
OURS = "our settings: the paper leaves some open"
DRAW_PER_SEED = "one for each seed"  # of the data, in words


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement, and what speaks for or against it.

    Args:
        text: the statement.
        check: results, {line: Line}, -> Evidence.
        whose: "paper", or "ours": of audits, sound modes, and what the paper does not say.
        statement: what checks of one statement have in common; the text where there is one check.
        formerly: its text in results of an earlier version.
        another_measure: whether what an earlier rule said of it was of a measure that its figure
            does not plot.
    """

    text: str
    check: Callable
    whose: str = "paper"
    statement: str = ""
    formerly: str = ""
    another_measure: bool = False


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number that each seed has; or its mean, squared standard error and degrees of freedom."""

    values: dict | None
    mean: float
    error2: float
    freedom: int

    @classmethod
    def of(cls, values, seeds=()) -> "Quantity":
        """Of values by seed, or by what stands for one and its rows; 0, 1, ... by default."""
        values = np.asarray(values, float)
        return cls._paired(dict(zip(seeds or range(len(values)), values.tolist(), strict=True)))

    @classmethod
    def summary(cls, mean: float, std: float, count: int) -> "Quantity":
        """Of what is stored without its seeds.  The divisor of `std` is not known: it is taken to
        be the count, which makes the error larger."""
        if count < 2:
            return cls(None, mean, math.inf, 0)
        return cls(None, mean, std**2 / (count - 1), count - 1)

    @classmethod
    def _paired(cls, values: dict) -> "Quantity":
        found, count = list(values.values()), len(values)
        error2 = float(np.var(found, ddof=1)) / count if count > 1 else math.inf
        return cls(values, float(np.mean(found)), error2, count - 1)

    def __sub__(self, other) -> "Quantity":
        return self + (-1 * other)

    def __rmul__(self, factor: float) -> "Quantity":
        if self.values is not None:
            return self._paired({s: factor * v for s, v in self.values.items()})
        return Quantity(None, factor * self.mean, factor**2 * self.error2, self.freedom)

    def __add__(self, other) -> "Quantity":
        if not isinstance(other, Quantity):
            return dataclasses.replace(
                self,
                values=self.values and {s: v + other for s, v in self.values.items()},
                mean=self.mean + other,
            )
        if self.values and other.values:
            if both := [s for s in self.values if s in other.values]:
                return self._paired({s: self.values[s] + other.values[s] for s in both})
        return Quantity(
            None,
            self.mean + other.mean,
            self.error2 + other.error2,
            min(self.freedom, other.freedom),
        )

    def interval(self, wrong: float) -> tuple[float, float]:
        """What contains the mean but for a chance of `wrong`; everything, of one seed."""
        if self.freedom < 1:
            return -math.inf, math.inf
        half = float(stats.t.ppf(1 - wrong / 2, self.freedom)) * self.error2**0.5
        return self.mean - half, self.mean + half


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio of the variances of two lines over seeds, by the F distribution."""

    mean: float
    freedom: tuple

    @classmethod
    def of(cls, over, under) -> "Ratio":
        return cls(
            float(np.var(over, ddof=1) / np.var(under, ddof=1)), (len(over) - 1, len(under) - 1)
        )

    def interval(self, wrong: float) -> tuple[float, float]:
        law = stats.f(*self.freedom)
        return self.mean / float(law.ppf(1 - wrong / 2)), self.mean / float(law.ppf(wrong / 2))


class Comparison(NamedTuple):
    """A quantity, and the open range in which a claim has its mean."""

    of: Quantity | Ratio
    low: float = -math.inf
    high: float = math.inf
    name: str = ""

    def side(self, wrong: float) -> int:
        """1: its interval lies inside; -1: outside; 0: neither."""
        least, most = self.of.interval(wrong)
        if self.low < least and most < self.high:
            return 1
        return -1 if most <= self.low or least >= self.high else 0


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What speaks for or against a claim.

    Args:
        comparisons: all of them hold if the claim does.
        missing: why the claim cannot be checked whole; a comparison may still speak against it.
        exact: of what has no seeds, whether it holds.
        seen: in words; behind them stand the comparisons.
        against: the verdict where this speaks against the claim; "": by how settings differ.
    """

    comparisons: tuple = ()
    missing: str = ""
    exact: bool | None = None
    seen: str = ""
    against: str = ""


def judge(claim: Claim, results: dict, claims: int, differs: str) -> tuple[str, str]:
    """The verdict, and what was seen.

    Args:
        claim: what is judged.
        results: {line: Line}.
        claims: of the figure.
        differs: how the settings differ from those of the paper; "": they do not.
    """
    found, wrong = claim.check(results), WRONG / max(claims, 1)
    against = found.against or (NOT_REPRODUCED if differs else CONTRADICTED)
    if found.exact is not None:
        return (HOLDS if found.exact else against), found.seen
    many = len(found.comparisons)
    sides = [c.side(wrong) for c in found.comparisons]
    words = [found.seen, _shown(found.comparisons, wrong), found.missing]
    seen = "; ".join(filter(None, words))
    if any(c.side(wrong / many) < 0 for c in found.comparisons):
        return against, seen
    if found.missing or not many:
        return UNKNOWN, seen or NOT_RUN
    return (HOLDS if min(sides) > 0 else UNDECIDED), seen


def _shown(comparisons, wrong) -> str:
    """Means with half of their intervals, or their ends where these are not alike."""
    if not comparisons:
        return ""
    shown = []
    for quantity, name in ((c.of, f"{c.name}: " if c.name else "") for c in comparisons):
        least, most = quantity.interval(wrong)
        if isinstance(quantity, Ratio):
            shown.append(f"{name}{quantity.mean:.2g} [{least:.2g}, {most:.2g}]")
        elif math.isinf(most):
            shown.append(f"{name}{quantity.mean:+.3f}")
        else:
            shown.append(f"{name}{mean_and_half(quantity.mean, most - quantity.mean)}")
    freedom = min(np.min(c.of.freedom) for c in comparisons)
    seeds = f"{100 * (1 - wrong):.4g} % intervals, {freedom + 1} seeds" if freedom else "one seed"
    unpaired = any(getattr(c.of, "values", 0) is None for c in comparisons)
    return ", ".join(shown) + f" ({seeds}{', unpaired' if unpaired and freedom else ''})"


def mean_and_half(mean: float, half: float) -> str:
    """A mean and half of its interval, with the digits that show on which side of 0 it lies."""
    for more in range(6):
        shown = f"{mean:+.{3 + more}f}", f"{half:.{2 + more}g}"
        if (abs(float(shown[0])) > float(shown[1])) == (abs(mean) > half):
            return " ± ".join(shown)
    return f"{mean:+.3f} ± {half:.2g}"  # no digits would tell


def untuned(baselines: dict, results: dict) -> list[str]:
    """Lines without privacy that end below a private one by more than their paired interval: they
    were not tuned, and say nothing of what privacy costs.

    Each interval is at 95 % by itself: one mark too many costs a grid, and one too few flatters
    what is private.

    Args:
        baselines: line without privacy -> private lines, to none of which it should lose.
        results: {line: Line}, of which no seed failed.
    """
    pairs = [
        (baseline, private)
        for baseline, others in baselines.items()
        for private in others
        if baseline in results and private in results
    ]
    found = [
        baseline
        for baseline, private in pairs
        if difference(results, baseline, private).interval(WRONG)[1] < 0
    ]
    return list(dict.fromkeys(found))


def far_below(reached: dict, results: dict) -> list[str]:
    """Lines that end more than FAR below what their own model reaches, by more than an interval,
    each at 95 % by itself.

    Args:
        reached: line -> {seed: accuracy by another way to train it}.
        results: {line: Line}, of which no seed failed.
    """
    lines = [line for line in reached if line in results]

    def gap(line):
        seeds = tuple((int(seed), DRAW_PER_SEED) for seed in reached[line])
        best = Quantity.of(list(reached[line].values()), seeds)
        return accuracy(results[line]) - best + FAR

    return [line for line in lines if gap(line).interval(WRONG)[1] < 0]


# --- quantities of lines


def accuracy(line) -> Quantity:
    return end(line)


def end(line, key: str | None = None) -> Quantity:
    """What a line ends with, larger is better: accuracy, or a trace or "loss" with its sign
    turned."""
    if key is None and line.summary:
        return Quantity.summary(*line.summary)
    if key is None:
        return Quantity.of(line.accuracy, line.paired_by)
    return -1 * Quantity.of(line.loss if key == "loss" else line.trace[key][:, -1], line.paired_by)


def difference(results: dict, one: str, other: str, key: str | None = None) -> Quantity:
    """How much better the first line ends."""
    return end(results[one], key) - end(results[other], key)


def known(results: dict, *names: str, key: str | None = None) -> str:
    """Why these lines cannot be compared; "" if they can."""
    if not all(n in results for n in names):
        return NOT_RUN
    if key not in (None, "loss") and not all(key in results[n].trace for n in names):
        return f"values of seeds of {key} that were not stored"
    return ""


# --- checks that papers share


def within(one: str, other: str, low: float = -math.inf, high: float = math.inf, key=None):
    """A check that the first line ends better than the second by an amount in (low, high)."""
    return beats([(one, other)], key, low, high)


def beats(pairs, key: str | None = None, low: float = 0.0, high: float = math.inf):
    """A check that the first of each pair ends better, by an amount in (low, high).

    Pairs that were not run leave it open, unless one that was run speaks against it.
    """

    def check(results):
        why = {known(results, *pair, key=key): pair for pair in pairs}
        run = [p for p in pairs if not known(results, *p, key=key)]
        found = tuple(Comparison(difference(results, a, b, key), low, high) for a, b in run)
        if len(run) == len(pairs):
            return Evidence(found)
        (reason, *_) = filter(None, why)
        return Evidence(found, f"{len(run)} of {len(pairs)} pairs run: {reason}")

    return check


def ordered(*names: str):
    """A check that accuracy falls along these lines."""
    return beats(list(zip(names, names[1:])))


def close(one: str, other: str, by: float = POINTS):
    """A check that two lines end less than `by` apart."""
    return within(one, other, -by, by)


def no_lower(*pairs, by: float = POINTS):
    """A check that the first line of each pair ends no lower than the second, but for `by`."""
    return beats(pairs, low=-by)


def grows(pairs, key: str | None = None):
    """A check that the first of a pair ends better by more and more along the pairs."""

    def check(results):
        names = [n for pair in pairs for n in pair]
        if why := known(results, *names, key=key):
            return Evidence(missing=why)
        seen = [difference(results, a, b, key) for a, b in pairs]
        words = "better by " + ", ".join(f"{d.mean:.3f}" for d in seen) + ", which rises by"
        return Evidence(tuple(Comparison(b - a, 0.0) for a, b in zip(seen, seen[1:])), seen=words)

    return check


def about(pairs, low: float, high: float):
    """A check that the first of a pair is better by an amount in (low, high), on average."""

    def check(results):
        if why := known(results, *(n for pair in pairs for n in pair)):
            return Evidence(missing=why)
        gaps = [difference(results, a, b) for a, b in pairs]
        total = gaps[0]
        for gap in gaps[1:]:
            total = total + gap
        return Evidence((Comparison((1 / len(gaps)) * total, low, high),), seen="on average")

    return check


def inner(*names: str, monotone: bool):
    """A check that some line between the first and the last ends above both.

    Args:
        names: of the lines.
        monotone: and accuracy rises up to it, and falls from there.
    """

    def check(results):
        if why := known(results, *names):
            return Evidence(missing=why)
        means = [end(results[n]).mean for n in names]
        top = 1 + int(np.argmax(means[1:-1]))
        pairs = [(top, 0), (top, len(names) - 1)]
        if monotone:
            pairs += [(i + 1, i) for i in range(top) if (i + 1, i) not in pairs]
            pairs += [(i, i + 1) for i in range(top, len(names) - 1) if (i, i + 1) not in pairs]
        words = " ".join(f"{m:.3f}" for m in means) + f"; {names[top]}, and differences"
        return Evidence(
            tuple(Comparison(difference(results, names[i], names[j]), 0.0) for i, j in pairs),
            seen=words,
        )

    return check


def near_printed(values: dict, by: float, at=None):
    """A check that lines end within `by` of what is printed.

    Args:
        values: line -> the printed value, or what `at` reads.
        by: how far at most.
        at: (line, its Line) -> its name, Quantity and printed value, as many as there are; None:
            accuracy.
    """
    at = at or (lambda n, line: [(n, end(line), values[n])])

    def check(results):
        run = [n for n in values if n in results]
        found = [
            Comparison(q + (-v), -by, by, name) for n in run for name, q, v in at(n, results[n])
        ]
        missing = "" if len(run) == len(values) else f"{len(run)} of {len(values)} lines run"
        if run and not found:
            missing = "values of seeds that were not stored"
        return Evidence(tuple(found), missing)

    return check


def all_of(checks):
    """One check of many, which holds if all do."""

    def check(results):
        found = [each(results) for each in checks]
        return Evidence(
            tuple(c for e in found for c in e.comparisons),
            next((e.missing for e in found if e.missing), ""),
        )

    return check


def exactly(holds: bool, seen: str = ""):
    """A check of what has no seeds: a computation, or a proof."""
    return lambda results: Evidence(exact=bool(holds), seen=seen)
