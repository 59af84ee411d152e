"""Judge the claims of all papers by one rule.

A claim is one or more comparisons. A comparison is a number that each seed has, such as the
accuracy of one line minus that of another, and the range in which the claim puts its mean. Its
interval is Student's t over seeds, paired if both lines ran the same ones. All intervals of a
figure hold together at 95 %: each has the level 1 - 0.05 / m, where m is the number of claims of
the figure, the paper's and ours counted separately (Bonferroni).

    holds              Every interval lies inside its range.
    against the claim  An interval lies outside, with 0.05 / m also divided by the number of
                       comparisons of the claim. The verdict is "contradicted at the paper's
                       settings" if the settings are the paper's, and "not reproduced at our
                       settings" if the paper left some open or they were reduced.
    undecided          An interval contains both, or there is one seed and so no interval.
    cannot be checked  A line was not run, a value is lost in our copy of the paper, or a theorem
                       leaves it open. The reason is given.

Formulas and proofs have no seeds: they hold or do not hold. The only settings of a theorem are its
hypotheses, so a run that meets them and violates the bound contradicts it. A theorem that holds up
to a constant is judged at a constant of 1; if that is too small, it cannot be checked.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import stats

from . import results as results_file

HOLDS, CONTRADICTED, NOT_REPRODUCED, UNDECIDED, UNKNOWN = results_file.VERDICTS
# Probability that one of the intervals of a figure, or a single interval of a baseline, misses.
WRONG = 0.05
NOT_RUN = "lines that were not run"
# A line this far below what its model reaches was not tuned.
FAR = 0.05
# "No difference" and "no lower" allow this difference of accuracy.
POINTS = 0.02
OURS = "our settings: the paper leaves some open"
DRAW_PER_SEED = "one for each seed"  # of the data, in words


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement, and how it is checked.

    Args:
        text: the statement.
        check: results, {line: Line}, -> Evidence.
        whose: "paper", or "ours" for audits, sound modes, and statements that the paper does not
            make.
        statement: what several checks of one statement have in common; "" for the text.
    """

    text: str
    check: Callable
    whose: str = "paper"
    statement: str = ""


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number for each seed; or only its mean, squared standard error and degrees of freedom."""

    values: dict | None
    mean: float
    error2: float
    freedom: int

    @classmethod
    def of(cls, values, seeds=()) -> "Quantity":
        """Return the quantity with these values by seed; the seeds are 0, 1, ... by default."""
        values = np.asarray(values, float)
        return cls._paired(dict(zip(seeds or range(len(values)), values.tolist(), strict=True)))

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
        """Return the interval that misses the mean with probability `wrong`."""
        if self.freedom < 1:
            return -math.inf, math.inf
        half = float(stats.t.ppf(1 - wrong / 2, self.freedom)) * self.error2**0.5
        return self.mean - half, self.mean + half


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio of the variances of two lines over seeds, with intervals by the F distribution."""

    mean: float
    freedom: tuple

    @classmethod
    def of(cls, over, under) -> "Ratio":
        return cls(
            float(np.var(over, ddof=1) / np.var(under, ddof=1)), (len(over) - 1, len(under) - 1)
        )

    def interval(self, wrong: float) -> tuple[float, float]:
        ratio = stats.f(*self.freedom)
        return self.mean / float(ratio.ppf(1 - wrong / 2)), self.mean / float(ratio.ppf(wrong / 2))


class Comparison(NamedTuple):
    """A quantity, and the open range in which a claim puts its mean."""

    of: Quantity | Ratio
    low: float = -math.inf
    high: float = math.inf
    name: str = ""

    def side(self, wrong: float) -> int:
        """Return 1 if the interval lies inside the range, -1 if outside, 0 if neither."""
        least, most = self.of.interval(wrong)
        if self.low < least and most < self.high:
            return 1
        return -1 if most <= self.low or least >= self.high else 0


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What supports or contradicts a claim.

    Args:
        comparisons: the claim holds if all of them do.
        missing: why the claim cannot be checked entirely; a comparison may still contradict it.
        exact: whether a claim without seeds holds.
        seen: what was seen, in words; the comparisons are appended.
        against: the verdict if this contradicts the claim; "" if the settings decide.
    """

    comparisons: tuple = ()
    missing: str = ""
    exact: bool | None = None
    seen: str = ""
    against: str = ""


def judge(claim: Claim, results: dict, claims: int, differs: str) -> tuple[str, str]:
    """Return the verdict and what it rests on.

    Args:
        claim: what is judged.
        results: {line: Line}.
        claims: number of claims of the figure.
        differs: how the settings differ from those of the paper; "" if they do not.
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
    """Return means with half of their intervals, or the ends of intervals that are asymmetric."""
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
    """Return a mean and half of its interval, with enough digits to show if 0 is inside."""
    for more in range(6):
        shown = f"{mean:+.{3 + more}f}", f"{half:.{2 + more}g}"
        if (abs(float(shown[0])) > float(shown[1])) == (abs(mean) > half):
            return " ± ".join(shown)
    return f"{mean:+.3f} ± {half:.2g}"  # no digits would tell


def untuned(baselines: dict, results: dict) -> list[str]:
    """Return the lines without privacy that end below a private one by more than their interval.

    Such a line was not tuned, and does not show the cost of privacy. Each interval is a separate 95
    %
    one: a needless mark costs a grid, and a missing one flatters the private line.

    Args:
        baselines: line without privacy -> private lines that it should not lose to.
        results: {line: Line}, with no failed seed.
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
    """Return the lines that end more than FAR below what their model reaches.

    Each is judged by a separate 95 % interval.

    Args:
        reached: line -> {seed: accuracy by another way to train it}.
        results: {line: Line}, with no failed seed.
    """
    lines = [line for line in reached if line in results]

    def gap(line):
        seeds = tuple((int(seed), DRAW_PER_SEED) for seed in reached[line])
        best = Quantity.of(list(reached[line].values()), seeds)
        return accuracy(results[line]) - best + FAR

    return [line for line in lines if gap(line).interval(WRONG)[1] < 0]


# --- quantities of lines


def accuracy(line) -> Quantity:
    """Return the final accuracy of a line."""
    return end(line)


def end(line, key: str | None = None) -> Quantity:
    """Return the final value of a line, with the sign such that larger is better.

    Args:
        line: the line.
        key: None for accuracy; "loss" or a trace for its negative.
    """
    if key is None:
        return Quantity.of(line.accuracy, line.paired_by)
    return -1 * Quantity.of(line.loss if key == "loss" else line.trace[key][:, -1], line.paired_by)


def difference(results: dict, one: str, other: str, key: str | None = None) -> Quantity:
    """Return the first line minus the second, where larger is better."""
    return end(results[one], key) - end(results[other], key)


def known(results: dict, *names: str, key: str | None = None) -> str:
    """Return why these lines cannot be compared; "" if they can."""
    if not all(n in results for n in names):
        return NOT_RUN
    if key not in (None, "loss") and not all(key in results[n].trace for n in names):
        return f"values of seeds of {key} that were not stored"
    return ""


# --- checks that papers share


def within(one: str, other: str, low: float = -math.inf, high: float = math.inf, key=None):
    """Return a check that the first line ends better than the second by (low, high)."""
    return beats([(one, other)], key, low, high)


def beats(pairs, key: str | None = None, low: float = 0.0, high: float = math.inf):
    """Return a check that the first line of each pair ends better, by (low, high).

    Pairs that were not run leave the claim open, unless another pair contradicts it.
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
    """Return a check that accuracy falls along these lines."""
    return beats(list(zip(names, names[1:])))


def close(first: str, second: str, by: float = POINTS):
    """Return a check that two lines end less than `by` apart.

    The order does not change the verdict, only the sign of what is shown.  So the comparison says
    which line it subtracts.
    """

    def check(results):
        found = within(first, second, -by, by)(results)
        named = (c._replace(name=f"{first} minus {second}") for c in found.comparisons)
        return dataclasses.replace(found, comparisons=tuple(named))

    return check


def no_lower(*pairs, by: float = POINTS):
    """Return a check that the first line of each pair ends at most `by` below the second."""
    return beats(pairs, low=-by)


def grows(pairs, key: str | None = None):
    """Return a check that the lead of the first line of a pair grows along the pairs."""

    def check(results):
        names = [n for pair in pairs for n in pair]
        if why := known(results, *names, key=key):
            return Evidence(missing=why)
        seen = [difference(results, a, b, key) for a, b in pairs]
        words = "better by " + ", ".join(f"{d.mean:.3f}" for d in seen) + ", which rises by"
        return Evidence(tuple(Comparison(b - a, 0.0) for a, b in zip(seen, seen[1:])), seen=words)

    return check


def about(pairs, low: float, high: float):
    """Return a check that the average lead of the first line of a pair is in (low, high)."""

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
    """Return a check that some line between the first and the last ends above both.

    Args:
        names: of the lines.
        monotone: whether accuracy must also rise up to that line and fall after it.
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
    """Return a check that lines end within `by` of the printed values.

    Args:
        values: line -> the printed value, or what `at` reads.
        by: the largest distance.
        at: (line, its Line) -> (name, Quantity, printed value) of each comparison; None: accuracy.
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
    """Return one check of many, which holds if all do."""

    def check(results):
        found = [each(results) for each in checks]
        return Evidence(
            tuple(c for e in found for c in e.comparisons),
            next((e.missing for e in found if e.missing), ""),
        )

    return check


def exactly(holds: bool, seen: str = ""):
    """Return a check of something without seeds: a computation or a proof."""
    return lambda results: Evidence(exact=bool(holds), seen=seen)
