"""The smallest epsilon that is proved, by the one choice among exact Gaussians, Renyi bounds and
privacy-loss distributions.

`tightest` answers for all that a run releases, a `Release`; `epsilon` and `delta` answer for one
event.  All run on the host, on concrete numbers.  The inverses follow below: the noise, the rounds
or the sampling rate that reach an epsilon.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.trade_off import Curve, curve_of
from . import events, pld, rdp_events, truncation
from .rdp_events import EXACT, SAMPLED, Overflow, check_delta

LOSS_DISTRIBUTION = "pld"
TOTAL_VARIATION = "total_variation"
MAX_PARTS = 64  # different parts of an event in one privacy-loss distribution
MAX_REFINED_CLIENTS = 8  # events that get a loss distribution in the search for the worst one
LEAST = np.float32(1e-3)  # noise multiplier that is tried
MIN_PLD_DELTA = 1e-25  # below this delta, rounding takes what a loss distribution gains
MAX_PLD_REPEATS = 1e7  # above this number, the grid loses more than a loss distribution gains
# An inverse is searched on coarse grids.  Only if the finest grid proves an epsilon at the answer
# that is smaller by this fraction of the target is it searched again, to this relative tolerance.
COARSE, FINE = pld.SIZES[:-1], pld.SIZES
FINEST_GAIN, FINEST_TOLERANCE = 0.01, 3e-3
# Where epsilon falls by the first factor in a bracket of at most the second one, it jumps: then
# bisection finds the jump, and a bracket of FINEST_TOLERANCE is narrow enough.
JUMP, JUMP_BRACKET = 100.0, 1.3
# A curve has this many points on an even grid, and as many on a geometric one, down to
# MIN_CURVE_DELTA.  From there to MIN_TAIL_DELTA it has NUM_TAIL_POINTS.
NUM_CURVE_POINTS, MIN_CURVE_DELTA = 2048, 1e-18
NUM_TAIL_POINTS, MIN_TAIL_DELTA = 256, 1e-100
FIRST_CURVE_POINT = 1e-5  # the smallest epsilon above 0, as a fraction of the last


class Release(NamedTuple):
    """All that a run releases: the events of which the worst counts, and the delta that they leave
    out."""

    alternatives: tuple  # one event for each client that may be the worst off; () if none
    overflow: float = 0.0  # probability that a draw finds no slot, which costs 1 + e^epsilon
    extra: float = 0.0  # further delta that is spent elsewhere
    shifts: tuple = ()  # truncation.Shift: the delta that the finite reach of the noise costs

    def group(self, size: int) -> "Release | None":
        """Return the same release for `size` units at once; None if only the curve of one unit is
        known.

        An overflow costs as before, and may happen in the samples of each unit.
        """
        if self.extra:
            return None
        grouped = tuple(events.of_group(event, size) for event in self.alternatives)
        if None in grouped:
            return None
        shifts = tuple(s._replace(length=s.length * size) for s in self.shifts)
        return Release(grouped, self.overflow * size, shifts=shifts)

    def curve(self) -> Curve:
        """Return proved pairs of epsilon and delta, down to a delta of 1e-100.

        Raises:
            ValueError: as `epsilon`.

        Example:
            >>> one = Release((events.gaussian(1.0),)).curve()
            >>> round(float(one.delta_at(1.0)), 5), round(one.mu, 5)
            (0.12694, 1.0)
        """
        other = self.overflow or self.extra
        if not self.alternatives:  # nobody takes part
            return curve_of([0.0], [self.overflow * 2 + self.extra], math.inf if other else 0.0)
        last, end = (
            float(rdp_events.above(self.alternatives, np.ones(1), np.full(1, d)).max(initial=1e-3))
            for d in (MIN_CURVE_DELTA, MIN_TAIL_DELTA)
        )
        if not end < math.inf:
            return curve_of([0.0], [1.0])
        grids = (
            [0.0],
            np.geomspace(FIRST_CURVE_POINT * last, last, NUM_CURVE_POINTS),
            np.linspace(0.0, last, NUM_CURVE_POINTS),
            np.linspace(last, end, NUM_TAIL_POINTS),
        )
        epsilon = np.unique(np.concatenate(grids))
        with np.errstate(over="ignore"):
            paid = self.overflow * (1 + np.exp(epsilon)) if self.overflow else 0.0
        truncated = truncation.total(self.shifts)
        delta = _worst_deltas(self.alternatives, epsilon) + paid + self.extra + truncated
        # the events are as bad as all copies that may be drawn, always present
        mu = math.inf if other else max(map(rdp_events.gaussian_mu, self.alternatives))
        return curve_of(epsilon, delta, mu, truncated)


def tightest(
    release: Release, delta: float, sizes: Sequence[int] = pld.SIZES, quick: bool = False
) -> tuple[float, str]:
    """Return the smallest proved epsilon of a release, and the method that proved it: "pld", "rdp",
    "gaussian_exact" or "total_variation".

    Args:
        release: what is released; without events nobody takes part, and epsilon is 0.
        delta: in (0, 1), for all of it: overflow, finite reach and `extra` are paid from it.
        sizes: the grids of privacy-loss distributions that are tried.
        quick: True to use only Renyi bounds and exact Gaussians.

    Raises:
        Overflow: if nothing of delta is left.
        ValueError: as `epsilon`.
    """
    if not release.alternatives:
        return 0.0, EXACT
    lost = delta - truncation.left_of(delta, release.shifts) + release.extra
    truncation.refuse_if_beyond("jfl.guarantee", lost, delta, Overflow)
    left, chance = float(delta - lost), release.overflow
    bound = math.inf, SAMPLED
    # With an overflow, this bound says what it costs at most.  Of many events, it also holds for
    # those that the search below does not reach.
    if quick or chance or len(release.alternatives) > MAX_REFINED_CLIENTS:
        (value,), (exact,) = rdp_events.bounds(
            release.alternatives, np.ones(1), np.full(1, left), np.full(1, chance)
        )
        bound = float(value), EXACT if exact else SAMPLED
        if chance:  # with a smaller epsilon it costs less
            left = (left - chance * (1 + math.exp(min(value, 700)))) * (1 - 1e-9)
    return bound if quick else min(bound, _worst_epsilon(release.alternatives, left, sizes))


def epsilon(event: Any, delta: float) -> tuple[float, str]:
    """Return the smallest proved epsilon of one event, and the method that proved it: `tightest`.

    Units:
        delta in (0, 1).

    Privacy:
        of the unit and adjacency for which the event was built.

    Raises:
        ValueError: for what none of the methods can analyse: a sample of a sample, and an event
            that mixes add_remove (Poisson) with replace_one (with or without replacement).

    Example:
        >>> value, method = epsilon(
        ...     events.repeat(events.poisson(0.01, events.gaussian(1.0)), 1000), 1e-5
        ... )
        >>> 1.827 < value < 1.829, method
        (True, 'pld')
    """
    check_delta(delta)
    return tightest(Release((event,)), float(delta))


def delta(event: Any, epsilon: float) -> float:
    """Return the smallest delta at which the event is proved to be `epsilon`-private; 1 if nothing
    smaller was found.  A delta that underflows is 1e-300.

    Units:
        epsilon >= 0.

    Raises:
        ValueError: as `epsilon`.
    """
    checks.require_nonnegative("tightest.delta", epsilon=epsilon)
    return max(float(Release((event,)).curve().delta_at(epsilon)), 1e-300)


def _worst_epsilon(alternatives, delta, sizes):
    """Return the epsilon and method of the worst of several events."""
    if max(map(presence, alternatives)) * (1 + 1e-9) <= delta:
        return 0.0, TOTAL_VARIATION
    once, deltas = np.ones(1), np.full(1, delta)
    above = rdp_events.above(alternatives, once, deltas)
    order = np.argsort(-above)
    worst: Any = (-math.inf, "")
    # From the largest upper bound on: an epsilon that is above all that are left needs no more.
    for i in order[:MAX_REFINED_CLIENTS]:
        if worst[0] >= above[i]:
            return worst
        (value,), (exact,) = rdp_events.bounds((alternatives[i],), once, deltas)
        found = float(value), EXACT if exact else SAMPLED
        # a loss distribution helps only if this event may be the worst
        if found > worst:
            found = min(found, _distribution_epsilon(alternatives[i], delta, sizes))
        worst = max(worst, found)
    rest = above[order[MAX_REFINED_CLIENTS:]].max(initial=-math.inf)
    return worst if worst[0] >= rest else (float(rest), SAMPLED)


def _worst_deltas(alternatives, epsilon):
    """Return the largest delta of several events at each epsilon; events that decide somewhere get
    a loss distribution, the most important first."""
    bounds = np.stack([rdp_events.deltas(event, epsilon) for event in alternatives])
    is_final = [not takes(event) for event in alternatives]
    for _ in range(MAX_REFINED_CLIENTS):
        num_decided = np.bincount(np.argmax(bounds, axis=0), minlength=len(alternatives))
        waiting = np.where(is_final, 0, num_decided)
        if not waiting.any():
            break
        i = int(np.argmax(waiting))
        is_final[i] = True
        try:
            bounds[i] = np.minimum(bounds[i], pld.deltas(spread(alternatives[i]), epsilon))
        except NotAnalysable:  # numbers outside its range
            pass
    return bounds.max(axis=0)


def _distribution_epsilon(event, delta, sizes):
    """Return the epsilon of the privacy-loss distribution; inf if there is none, or none that could
    be better."""
    if delta < MIN_PLD_DELTA or not takes(event):
        return math.inf, LOSS_DISTRIBUTION
    try:
        return pld.epsilon(spread(event), delta, sizes=sizes, with_width=False)[
            0
        ], LOSS_DISTRIBUTION
    except NotAnalysable:  # numbers outside its range
        return math.inf, LOSS_DISTRIBUTION


def presence(event: Any) -> float:
    """Bound the probability that a unit is ever in a sample of the event.

    The total variation between two neighbours is at most this number, because their outcomes have
    the same distribution unless the unit is drawn, and total variations add up under composition.

    >>> presence(events.repeat(events.poisson(1e-9, events.gaussian(1.0)), 1000)) < 1.001e-6
    True
    """
    if isinstance(event, events.Repeat):
        return float(event.times) * presence(event.event)
    if isinstance(event, events.Compose):
        return float(sum(map(presence, event.events)))
    if isinstance(event, events.Series):
        return float(np.sum(event.times)) * presence(event.event)
    if isinstance(event, events.Participation):
        return float(event.probability) * min(presence(event.event), 1.0)
    if isinstance(event, events.Poisson):
        return float(event.rate)
    if isinstance(event, (events.Replaced, events.ZeroedOut)):
        return float(max(event.rate, event.rate_when_full))
    if isinstance(event, events.WithoutReplacement):
        return float(event.sample / event.population)
    if isinstance(event, events.WithReplacement):
        return float(event.draws / event.population)
    return 1.0


def takes(event: Any, times: float = 1) -> bool:
    """Return whether a privacy-loss distribution of the event is tried: it is sampled and does not
    have too many different parts."""
    if isinstance(event, events.Repeat):
        return takes(event.event, times * float(event.times))
    kinds = events.event_types(event)
    is_known = not kinds & {events.Allocation, *events.NOT_GAUSSIAN}
    is_sampled = bool(kinds & events.SAMPLED)
    return is_known and is_sampled and _parts(event) <= MAX_PARTS and times <= MAX_PLD_REPEATS


def spread(event: Any) -> Any:
    """Return an event without Series: each of their parts by itself."""
    if isinstance(event, events.Series):
        times = np.asarray(event.times)
        each = zip(events.parts(event.event, len(times)), times)
        return events.compose(*(events.repeat(part, n) for part, n in each if n > 0))
    if isinstance(event, events.Compose):
        return events.Compose(tuple(map(spread, event.events)))
    if not hasattr(event, "event"):
        return event
    return dataclasses.replace(event, event=spread(event.event))


def _parts(event):
    if isinstance(event, events.Compose):
        return sum(_parts(e) for e in event.events)
    if isinstance(event, events.Series):
        return np.size(event.times) * _parts(event.event)
    return _parts(event.event) if hasattr(event, "event") else 1


# --- inverses


def solve_noise(event_of_z: Callable, epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier z whose epsilon is at most `epsilon`.

    The result is a float32, the number that a simulation runs, and was itself tested: it is never
    on the wrong side.  It is at most a few parts in a million above the smallest that passes the
    test; where only the finest grids of a privacy-loss distribution are sharp, it is within about
    one percent.

    Args:
        event_of_z: z -> an event.
        epsilon: the target, > 0.
        delta: in (0, 1).

    Raises:
        ValueError: if epsilon is not > 0 and finite, or out of reach of any z up to a million.

    Example:
        >>> round(solve_noise(events.gaussian, 1.0, 1e-5), 4)
        3.7306
    """
    check_delta(delta)

    def reached(z, sizes, quick=False):
        return tightest(Release((event_of_z(z),)), float(delta), sizes, quick)[0]

    first = smallest("solve_noise", lambda z: reached(z, COARSE, quick=True), epsilon)
    return smallest_refined("solve_noise", reached, epsilon, first)


def solve_rounds(event: Any, epsilon: float, delta: float) -> int:
    """Return the largest number of repeats with epsilon(repeat(event, number)) <= epsilon; 0 if
    even one is too many.

    Raises:
        ValueError: if epsilon is not > 0 and finite; beyond 10^12 repeats it stops there.

    Example:
        >>> solve_rounds(events.gaussian(10.0), 1.0, 1e-5)
        7
    """
    check_delta(delta)
    many = lambda times: rdp_events.bounds((event,), times, np.full(times.shape, float(delta)))[0]
    return largest(
        "solve_rounds",
        many,
        lambda times, sizes: tightest(Release((events.repeat(event, times),)), float(delta), sizes)[
            0
        ],
        epsilon,
    )


def solve_rate(event_of_rate: Callable, epsilon: float, delta: float) -> float:
    """Return the largest sampling rate in (0, 1] with epsilon(event_of_rate(rate)) <= epsilon: a
    float32 that was tested.

    Raises:
        ValueError: if epsilon is not > 0 and finite, or out of reach of any rate down to 1e-9.

    Example:
        >>> round(
        ...     solve_rate(
        ...         lambda q: events.repeat(events.poisson(q, events.gaussian(1.0)), 1000),
        ...         2.0,
        ...         1e-5,
        ...     ),
        ...     4,
        ... )
        0.0109
    """
    check_delta(delta)

    # the inverse of a rate is searched like a multiplier: a larger one is safer
    def inverse(x, sizes=FINE, quick=False):
        return tightest(Release((event_of_rate(_rate(x)),)), float(delta), sizes, quick)[0]

    if inverse(1.0) <= epsilon:
        checks.require_positive("solve_rate", epsilon=epsilon)
        return 1.0
    first = smallest("solve_rate", lambda x: inverse(x, quick=True), epsilon, most=1e9)
    return _rate(smallest_refined("solve_rate", inverse, epsilon, first, most=1e9))


def _rate(inverse):
    return float(np.minimum(np.float32(1), np.float32(1) / np.float32(inverse)))


def smallest_refined(
    where: str, reached: Callable, target: float, first: float = 1.0, most: float = 1e6
) -> float:
    """Return `smallest` of reached(z, sizes) on coarse grids, or on the finest where those gain.

    An evaluation on the finest grid takes about ten times as long, and the epsilon it proves is
    never larger.
    """
    found = smallest(where, lambda z: reached(z, COARSE), target, first, most)
    if found <= LEAST or reached(found, FINE) >= (1 - FINEST_GAIN) * target:
        return found
    finely = lambda z: reached(z, FINE)
    return smallest(where, finely, target, found, most, FINEST_TOLERANCE, 1.01)


def smallest(
    where: str,
    reached: Callable,
    target: float,
    first: float = 1.0,
    most: float = 1e6,
    tolerance: float = 1e-6,
    step: float = 1.25,
) -> float:
    """Return the smallest float32 z with reached(z) <= target, within a bracket of this relative
    width.

    log(epsilon) is almost straight in log(z), so each step goes where the line through both ends
    meets the target; an end that stays twice counts half (Illinois), and what is returned has been
    tested.
    """
    checks.require_positive(where, epsilon=target)
    target = float(target)

    def height(z):
        value = reached(float(z))  # a value that is none (nan) is not reached
        return math.log(min(max(value, 1e-300), 1e300) / target) if value >= 0 else math.inf

    high = np.float32(first)
    f_high, grow = height(high), np.float32(step if first != 1.0 else 2.0)
    low: Any = None
    f_low: Any = None
    while f_high > 0:
        low, f_low = high, f_high
        high *= grow
        grow = min(grow * grow, np.float32(4))
        if high > most:
            checks.fail(
                where,
                "an epsilon that noise can reach",
                f"epsilon={target:g}",
                "Raise epsilon or delta, or lower rounds or the sampling rates.",
            )
        f_high = height(high)
    while low is None:
        tried = max(high / grow, LEAST)
        f = height(tried)
        if f > 0:
            low, f_low = tried, f
        elif tried == LEAST:
            return float(LEAST)
        else:
            high, f_high, grow = tried, f, min(grow * grow, np.float32(4))
    return _narrowed(height, low, f_low, high, f_high, tolerance)


def _narrowed(height, low, f_low, high, f_high, tolerance):
    """Return the upper end of a bracket of a zero of `height`, made as narrow as the tolerance."""
    side, ends = 0, (f_low, f_high)  # heights without Illinois's halving
    for i in range(80):
        jumping = ends[0] - ends[1] > math.log(JUMP) and high / low <= JUMP_BRACKET
        if high / low <= 1 + max(tolerance, FINEST_TOLERANCE if jumping else 0.0):
            break
        share = min(max(f_low / max(f_low - f_high, 1e-300), 0.02), 0.98)
        if i % 4 == 3 or jumping:
            share = 0.5
        middle = np.float32(math.exp((1 - share) * math.log(low) + share * math.log(high)))
        if not low < middle < high:
            middle = np.nextafter(high, low) if share > 0.5 else np.nextafter(low, high)
            if not low < middle < high:
                break
        f = height(middle)
        ends = (ends[0], f) if f <= 0 else (f, ends[1])
        if f <= 0:
            high, f_high, f_low, side = middle, f, f_low / 2 if side == 1 else f_low, 1
        else:
            low, f_low, f_high, side = middle, f, f_high / 2 if side == -1 else f_high, -1
    return float(high)


def largest(where: str, many: Callable, one: Callable, target: float) -> int:
    """Return the largest integer whose epsilon is <= target, to a relative 3e-3 and up to about
    10^12; 0 if there is none.

    Args:
        where: who asks, for errors.
        many: Int[m] -> Float[m], quick epsilons of these numbers, never below those of `one`.
        one: number, sizes of grids -> its epsilon.
        target: the epsilon to stay at or below, > 0.
    """
    checks.require_positive(where, epsilon=target)
    low, high = 0, 1
    while high < 10**12 and many(np.array([high]))[0] <= target:
        low, high = high, high * 32
    while high - low > 1:
        tried = np.unique(np.linspace(low, high, 18).astype(np.int64)[1:-1])
        tried = tried[(tried > low) & (tried < high)]
        over = many(tried) > target
        first = int(np.argmax(over)) if over.any() else len(tried)
        low, high = (
            (int(tried[first - 1]) if first else low),
            (int(tried[first]) if first < len(tried) else high),
        )
    # the quick bounds allow `low`; the tight ones may allow more
    low = _more(low, lambda number: one(number, COARSE) <= target)
    if not 0 < low < 10**12 or one(low, FINE) >= (1 - FINEST_GAIN) * target:
        return low
    return _more(low, lambda number: one(number, FINE) <= target, FINEST_TOLERANCE)


def _more(low, fits, tolerance=0.0):
    """Return the largest integer from `low` on that fits, to a relative tolerance."""
    if low >= 10**12 or not fits(low + 1):
        return low
    low, step = low + 1, max(low // 4, 1)
    while low + step < 10**12 and fits(low + step):
        low, step = low + step, 2 * step
    high = low + step
    while high - low > max(1, tolerance * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
