"""Judge the claims of all papers by one rule.

A claim is one or more comparisons. A comparison is a number that each seed has, such as the
accuracy of one line minus that of another, and the range in which the claim puts its mean. Its
bounds are Student's t over seeds, paired if both lines ran the same ones: one-sided if the range
has one end ("is better than"), and two-sided if it has two ("about", "no difference"). Each bound
has a level, which is the probability that it misses.

    holds              Every comparison lies inside its range.
    against the claim  A comparison lies outside. The verdict is "contradicted at the paper's
                       settings" if the settings are the paper's, and "not reproduced at our
                       settings" if the paper left some open or they were reduced.
    no difference      Neither of these, and the claim is one comparison whose two-sided interval
                       shows that it is smaller than `SAME`.
    undecided          None of these, or there is one seed and so no interval.
    cannot be checked  A line was not run or is at chance, a value is lost in our copy of the paper,
                       or a theorem leaves it open. The reason is given.

The probability that any verdict of a figure is wrong is at most WRONG, with the paper's claims and
ours counted separately. Let m be the number of claims. A claim with k comparisons counts as against
at the level WRONG / (2 m k) for each of them. "No difference" uses the level WRONG / m. "Holds"
uses a step-down procedure like Holm's: after r claims hold, the others are tested at
(WRONG - r WRONG / (2 m)) / (m - r), which `holding_level` returns, until no further one holds.

Proof, for any dependence of the claims. Let b of the m claims be true. A true claim counts as
against only if an upper bound misses, which has the probability WRONG / (2 m). Before the first
claim wrongly holds, only true claims hold, so r <= b. Hence a false claim holds only if a lower
bound misses whose level is at most that of r = b. All these probabilities add up to
b WRONG / (2 m) + (m - b) (WRONG - b WRONG / (2 m)) / (m - b) = WRONG. "No difference" adds nothing:
it is wrong only if one of the same bounds misses, the upper one if the difference is really SAME or
more, and the lower one if it is -SAME or less.

The number of seeds of a figure (`Experiment.seeds`) is fixed before it runs with more than five. A
figure that gets a second number after its verdicts with the first is judged again on all seeds with
half of WRONG (`Experiment.wrong`). If the second number does not depend on the first results, the
probability that any of its verdicts, first or second, is wrong is at most 1.5 WRONG.

A line is at chance if its mean accuracy is less than AT_CHANCE above 1 / classes. Lines at chance
are never ranked.

Formulas and proofs have no seeds: they hold or do not hold. The only settings of a theorem are its
hypotheses, so a run that meets them and violates the bound contradicts it. A theorem that holds up
to a constant is judged at a constant of 1; if that is too small, it cannot be checked.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import stats

from . import results as results_file

HOLDS, CONTRADICTED, NOT_REPRODUCED, UNDECIDED, NO_DIFFERENCE, UNKNOWN = results_file.VERDICTS
# Probability that a verdict of a figure is wrong, or that an interval of a baseline misses.
WRONG = 0.05
NOT_RUN = "lines that were not run"
# A line this far below what its model reaches was not tuned.
FAR = 0.05
# "No difference" and "no lower" allow this difference of accuracy.
POINTS = 0.02
# The largest difference that counts as none: of accuracy, of a test loss, and of a loss in ln.
SAME = {None: POINTS, "loss": 0.02, "ln(F - F*)": 0.15}
AT_CHANCE = 0.05  # how far above 1 / classes an accuracy is still at chance
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
        half = _quantile(1 - wrong / 2, self.freedom) * self.error2**0.5
        return self.mean - half, self.mean + half


@functools.cache
def _quantile(below: float, freedom: int) -> float:
    return float(stats.t.ppf(below, freedom))


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
    """A quantity, and the open range in which a claim puts its mean.

    Args:
        of: the quantity.
        low, high: ends of the range.
        name: of the comparison, to be shown.
        same: the largest size that counts as no difference; 0 if there is none.
    """

    of: Quantity | Ratio
    low: float = -math.inf
    high: float = math.inf
    name: str = ""
    same: float = 0.0

    @property
    def one_sided(self) -> bool:
        return math.isinf(self.low) or math.isinf(self.high)

    def bounds(self, wrong: float) -> tuple[float, float]:
        """Return the interval that decides.

        If the claimed range has one end, a bound on that side misses with probability `wrong`; if
        it has two, the two bounds together do.
        """
        return self.of.interval(2 * wrong if self.one_sided else wrong)

    def inside(self, wrong: float) -> bool:
        least, most = self.bounds(wrong)
        return self.low < least and most < self.high

    def outside(self, wrong: float) -> bool:
        least, most = self.bounds(wrong)
        return most <= self.low or least >= self.high

    def negligible(self, wrong: float) -> bool:
        least, most = self.of.interval(wrong)
        return -self.same < least and most < self.same


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What supports or contradicts a claim.

    Args:
        comparisons: the claim holds if all of them do.
        missing: why the claim cannot be checked entirely; a comparison may still contradict it.
        exact: whether a claim without seeds holds.
        seen: what was seen, in words; the comparisons are appended.
        against: the verdict if this contradicts the claim; "" if the settings decide.
        others: sets of comparisons; the claim also holds if all comparisons of one set do.
    """

    comparisons: tuple = ()
    missing: str = ""
    exact: bool | None = None
    seen: str = ""
    against: str = ""
    others: tuple = ()

    def holds(self, wrong: float) -> bool:
        ways = [way for way in (self.comparisons, *self.others) if way and not self.missing]
        return any(all(c.inside(wrong / len(ways)) for c in way) for way in ways)

    def contradicts(self, wrong: float) -> bool:
        ways = (self.comparisons, *self.others)
        return all(any(c.outside(wrong / len(way)) for c in way) for way in ways)


def judge(claims, results: dict, differs: str, wrong: float = WRONG) -> list[tuple[str, str]]:
    """Return the verdict on each claim of a figure, and what it rests on.

    Args:
        claims: the paper's claims on the figure, or ours.
        results: {line: Line}.
        differs: how the settings differ from those of the paper; "" if they do not.
        wrong: the largest probability that any of the verdicts is wrong.
    """
    found = [claim.check(results) for claim in claims]
    drawn = [e for e in found if e.exact is None]
    m, held = max(len(drawn), 1), 0
    while (more := sum(e.holds(holding_level(held, m, wrong)) for e in drawn)) > held:
        held = more
    against, hold = wrong / (2 * m), holding_level(held, m, wrong)
    return [_verdict(e, against, hold, differs) for e in found]


def holding_level(held: int, claims: int, wrong: float = WRONG) -> float:
    """Return the level at which the other claims are tested after `held` of them hold.

    If all hold, it is the level of the last one.
    """
    held = min(held, claims - 1)
    return (wrong - held * wrong / (2 * claims)) / (claims - held)


def _verdict(found: Evidence, against: float, hold: float, differs: str) -> tuple[str, str]:
    """Return the verdict at the levels at which a claim counts as against and as holding."""
    contrary = found.against or (NOT_REPRODUCED if differs else CONTRADICTED)
    if found.exact is not None:
        return (HOLDS if found.exact else contrary), found.seen
    wrong, same = against, found.comparisons[0].same if found.comparisons else 0.0
    verdict = UNDECIDED
    if found.contradicts(wrong):
        verdict = contrary
    elif found.missing or not found.comparisons:
        verdict = UNKNOWN
    elif found.holds(hold):
        verdict = HOLDS
    elif len(found.comparisons) == 1 and found.comparisons[0].negligible(2 * wrong):
        verdict = NO_DIFFERENCE
    if verdict == HOLDS or (
        verdict == UNDECIDED and all(c.low < c.of.mean < c.high for c in found.comparisons)
    ):
        wrong = hold  # the bounds that decide
    words = [found.seen, _shown(found.comparisons, wrong), found.missing]
    words.append(f"no difference larger than {same:g}" if verdict == NO_DIFFERENCE else "")
    return verdict, "; ".join(filter(None, words)) or (NOT_RUN if verdict == UNKNOWN else "")


def _shown(comparisons, wrong) -> str:
    """Return means with their distance to the bounds, or bounds that are asymmetric."""
    if not comparisons:
        return ""
    shown = []
    for c in comparisons:
        quantity, name = c.of, f"{c.name}: " if c.name else ""
        least, most = c.bounds(wrong)
        if isinstance(quantity, Ratio):
            shown.append(f"{name}{quantity.mean:.2g} [{least:.2g}, {most:.2g}]")
        elif math.isinf(most):
            shown.append(f"{name}{quantity.mean:+.3f}")
        else:
            shown.append(f"{name}{mean_and_half(quantity.mean, most - quantity.mean)}")
    freedom, most_freedom = (f(np.min(c.of.freedom) for c in comparisons) for f in (min, max))
    kind = "one-sided bounds" if comparisons[0].one_sided else "intervals"
    count = f"{freedom + 1}" + (f" to {most_freedom + 1}" if most_freedom > freedom else "")
    seeds = f"{100 * (1 - wrong):.4g} % {kind}, {count} seeds" if freedom else "one seed"
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

    Such a line was not tuned, and does not show the cost of privacy. Each pair has an interval
    of its own, of 95 %: a needless mark costs a grid, and a missing one flatters the private line.

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
        return end(results[line]) - best + FAR

    return [line for line in lines if gap(line).interval(WRONG)[1] < 0]


# --- quantities of lines


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
    ran = [n for n in names if n in results]
    why = [NOT_RUN] if len(ran) < len(names) else []
    if low := [n for n in ran if results[n].at_chance]:
        why.append(f"at chance: {', '.join(low)}")
    if why:
        return "; ".join(why)
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
        run = [p for p in pairs if not known(results, *p, key=key)]
        left_out = dict.fromkeys(name for p in pairs if p not in run for name in p)
        directed = (low, high) in ((0.0, math.inf), (-math.inf, 0.0))
        same = SAME.get(key, 0.0) if directed else 0.0
        found = tuple(
            Comparison(difference(results, a, b, key), low, high, same=same) for a, b in run
        )
        why = known(results, *left_out, key=key)
        return Evidence(found, why and f"{len(run)} of {len(pairs)} pairs compared: {why}")

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
        rises = tuple(
            Comparison(b - a, 0.0, same=SAME.get(key, 0.0)) for a, b in zip(seen, seen[1:])
        )
        return Evidence(rises, seen=words)

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


def inner(*names: str):
    """Return a check that some line between the first and the last ends above both."""

    def check(results):
        if why := known(results, *names):
            return Evidence(missing=why)
        means = {n: end(results[n]).mean for n in names}
        best, *others = sorted(names[1:-1], key=lambda n: -means[n])
        above = lambda n: tuple(
            Comparison(difference(results, n, e), 0.0) for e in (names[0], names[-1])
        )
        words = " ".join(f"{m:.3f}" for m in means.values())
        seen = f"{words}; {best}, and differences to the ends"
        return Evidence(above(best), seen=seen, others=tuple(map(above, others)))

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
