"""The smallest epsilon that can be proved, by any of the accountants.

These are the exact composition of Gaussians, Renyi bounds, and privacy-loss distributions.
`tightest` takes a `Release`, which is everything that a run releases; `epsilon` and `delta` take
one event.  `solve_noise`, `solve_rounds` and `solve_rate` are inverses: they return the noise
multiplier, the number of rounds or the sampling rate for a given epsilon.  Everything runs on the
host, on concrete numbers.
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
MAX_PARTS = 64  # number of different parts of an event in one privacy-loss distribution
# In the search for the worst event, only this number of events get a privacy-loss distribution.
MAX_REFINED_CLIENTS = 8
LEAST = np.float32(1e-3)  # the smallest noise multiplier that is tried
MIN_PLD_DELTA = 1e-25  # below this delta, rounding outweighs the gain of a loss distribution
MAX_PLD_REPEATS = 1e7  # above this number, the error of the grid outweighs the gain
# The inverses search on coarse grids.  They search again on the finest grid, to FINEST_TOLERANCE,
# only if at the answer it proves an epsilon that is smaller by FINEST_GAIN * target.
COARSE, FINE = pld.SIZES[:-1], pld.SIZES
FINEST_GAIN, FINEST_TOLERANCE = 0.01, 3e-3
# If epsilon changes by the first factor within a bracket of at most the second one, it has a jump:
# then bisection finds the jump, and a bracket of FINEST_TOLERANCE is narrow enough.
JUMP, JUMP_BRACKET = 100.0, 1.3
# A curve has this many points on an even grid, and as many on a geometric one, down to
# MIN_CURVE_DELTA.  From there to MIN_TAIL_DELTA it has NUM_TAIL_POINTS.
NUM_CURVE_POINTS, MIN_CURVE_DELTA = 2048, 1e-18
NUM_TAIL_POINTS, MIN_TAIL_DELTA = 256, 1e-100
FIRST_CURVE_POINT = 1e-5  # the smallest positive epsilon of a curve, as a fraction of the largest


class Release(NamedTuple):
    """Everything that a run releases: an event for each client that may be the worst off, and the
    delta that is spent elsewhere.
    """

    alternatives: tuple  # one event for each client that may be the worst; () if none
    overflow: float = 0.0  # probability of a sampling overflow, which costs 1 + e^epsilon times it
    extra: float = 0.0  # further delta that is spent elsewhere
    shifts: tuple = ()  # truncation.Shift: determines the cost of the finite range of the noise

    def group(self, size: int) -> "Release | None":
        """Return the same release for `size` units together.

        The result is None if only the curve of one unit is known.  The probability of an overflow
        is multiplied by `size`, since it may happen in the samples of each unit.
        """
        if self.extra:
            return None
        grouped = tuple(events.of_group(event, size) for event in self.alternatives)
        if None in grouped:
            return None
        shifts = tuple(s._replace(length=s.length * size) for s in self.shifts)
        return Release(grouped, self.overflow * size, shifts=shifts)

    def curve(self) -> Curve:
        """Return the curve of proved (epsilon, delta) pairs, down to a delta of 1e-100.

        Raises:
            ValueError: as in `epsilon`.

        Example:
            >>> one = Release((events.gaussian(1.0),)).curve()
            >>> round(float(one.delta_at(1.0)), 5), round(one.mu, 5)
            (0.12694, 1.0)
        """
        extra_delta = self.overflow or self.extra
        if not self.alternatives:  # no client participates
            mu = math.inf if extra_delta else 0.0
            return curve_of([0.0], [self.overflow * 2 + self.extra], mu)
        last, end = (
            float(
                rdp_events.quick_bounds(self.alternatives, np.ones(1), np.full(1, d)).max(
                    initial=1e-3
                )
            )
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
            overflow_cost = self.overflow * (1 + np.exp(epsilon)) if self.overflow else 0.0
        truncated = truncation.total(self.shifts)
        delta = _worst_deltas(self.alternatives, epsilon) + overflow_cost + self.extra + truncated
        mu = math.inf if extra_delta else max(map(rdp_events.gaussian_mu, self.alternatives))
        return curve_of(epsilon, delta, mu, truncated)


def tightest(
    release: Release, delta: float, sizes: Sequence[int] = pld.SIZES, quick: bool = False
) -> tuple[float, str]:
    """Return the smallest proved epsilon of a release, and the method that proved it.

    Args:
        release: everything that the run releases.  Without events (no client participates), epsilon
            is 0.
        delta: in (0, 1).  The probability of batch overflow, the mass that float32 noise cannot
            reach, and `release.extra` are subtracted from it first.
        sizes: the numbers of grid points to try for privacy-loss distributions.
        quick: True to use only Renyi bounds and exact Gaussians.

    Returns:
        Epsilon, and "pld", "rdp", "gaussian_exact" or "total_variation".

    Raises:
        Overflow: if overflow and the finite range of the noise use up delta.
        ValueError: as in `epsilon`.
    """
    if not release.alternatives:
        return 0.0, EXACT
    lost = delta - truncation.left_of(delta, release.shifts) + release.extra
    truncation.refuse_if_beyond("jfl.guarantee", lost, delta, Overflow)
    left, overflow = float(delta - lost), release.overflow
    bound = math.inf, SAMPLED
    # If there is an overflow, this bound limits its cost.  If there are many events, it also covers
    # those that `_worst_epsilon` does not refine.
    is_many = len(release.alternatives) > MAX_REFINED_CLIENTS
    if quick or overflow or is_many:
        try:
            (value,), (exact,) = rdp_events.bounds(
                release.alternatives, np.ones(1), np.full(1, left), np.full(1, overflow)
            )
            bound = float(value), EXACT if exact else SAMPLED
        except Overflow:
            # A tighter bound may show that overflows cost at most half of delta.
            if quick or is_many:
                raise
            bound = _worst_epsilon(release.alternatives, left / 2, sizes)
            value = bound[0]
            if overflow * (1 + math.exp(min(value, 700))) > left / 2:
                raise
        if overflow:  # the final epsilon is at most `value`, so an overflow costs at most this
            left = (left - overflow * (1 + math.exp(min(value, 700)))) * (1 - 1e-9)
    return bound if quick else min(bound, _worst_epsilon(release.alternatives, left, sizes))


def epsilon(event: Any, delta: float) -> tuple[float, str]:
    """Return the smallest proved epsilon of one event, and the method that proved it; see
    `tightest`.

    Args:
        event: an event.
        delta: in (0, 1).

    Privacy:
        Epsilon is for the unit and adjacency for which the event was built.

    Raises:
        ValueError: if no method can analyse the event: a sample of a sample, or an event that mixes
            add_remove (Poisson) with replace_one (with or without replacement).

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
    """Return the smallest proved delta at which an event is `epsilon`-private.

    The result is 1 if nothing smaller was found, and 1e-300 if delta underflows.

    Args:
        event: an event, built by the functions of `events` (gaussian, poisson, compose, ...).
        epsilon: >= 0.

    Raises:
        ValueError: as in the function `epsilon`.
    """
    checks.require_nonnegative("tightest.delta", epsilon=epsilon)
    return max(float(Release((event,)).curve().delta_at(epsilon)), 1e-300)


def _worst_epsilon(alternatives, delta, sizes):
    """Return the epsilon and method of the worst of several events."""
    if max(map(participation_bound, alternatives)) * (1 + 1e-9) <= delta:
        return 0.0, TOTAL_VARIATION
    once, deltas = np.ones(1), np.full(1, delta)
    quick = rdp_events.quick_bounds(alternatives, once, deltas)
    order = np.argsort(-quick)
    worst: Any = (-math.inf, "")
    # Refine events in the order of their quick bounds, and stop when no other can be worse.
    for i in order[:MAX_REFINED_CLIENTS]:
        if worst[0] >= quick[i]:
            return worst
        (value,), (exact,) = rdp_events.bounds((alternatives[i],), once, deltas)
        refined = float(value), EXACT if exact else SAMPLED
        # A loss distribution is needed only if this event may be the worst.
        if refined > worst:
            refined = min(refined, _distribution_epsilon(alternatives[i], delta, sizes))
        worst = max(worst, refined)
    rest = quick[order[MAX_REFINED_CLIENTS:]].max(initial=-math.inf)
    return worst if worst[0] >= rest else (float(rest), SAMPLED)


def _worst_deltas(alternatives, epsilon):
    """Return the largest delta of several events at each epsilon.

    Events that determine the maximum anywhere get a privacy-loss distribution, the most important
    ones first.
    """
    bounds = np.stack([rdp_events.deltas(event, epsilon) for event in alternatives])
    is_final = [not has_loss_distribution(event) for event in alternatives]
    for _ in range(MAX_REFINED_CLIENTS):
        num_decided = np.bincount(np.argmax(bounds, axis=0), minlength=len(alternatives))
        waiting = np.where(is_final, 0, num_decided)
        if not waiting.any():
            break
        i = int(np.argmax(waiting))
        is_final[i] = True
        try:
            bounds[i] = np.minimum(bounds[i], pld.deltas(expand_series(alternatives[i]), epsilon))
        except NotAnalysable:  # numbers outside the range of a grid
            pass
    return bounds.max(axis=0)


def _distribution_epsilon(event, delta, sizes):
    """Return the epsilon of the privacy-loss distribution of an event, and its method.

    Epsilon is inf if there is no such distribution, or none that could improve on the other bounds.
    """
    if delta < MIN_PLD_DELTA or not has_loss_distribution(event):
        return math.inf, LOSS_DISTRIBUTION
    try:
        value, _ = pld.epsilon(expand_series(event), delta, sizes=sizes, with_width=False)
        return value, LOSS_DISTRIBUTION
    except NotAnalysable:  # numbers outside the range of a grid
        return math.inf, LOSS_DISTRIBUTION


def participation_bound(event: Any) -> float:
    """Return an upper bound on the probability that a unit is ever in a sample of the event.

    It also bounds the total variation between the outputs on two neighbouring datasets: the outputs
    have the same distribution unless the unit is drawn, and total variations add up under
    composition.

    Example:
        >>> event = events.repeat(events.poisson(1e-9, events.gaussian(1.0)), 1000)
        >>> participation_bound(event) < 1.001e-6
        True
    """
    if isinstance(event, events.Repeat):
        return float(event.times) * participation_bound(event.event)
    if isinstance(event, events.Compose):
        return float(sum(map(participation_bound, event.events)))
    if isinstance(event, events.Series):
        return float(np.sum(event.times)) * participation_bound(event.event)
    if isinstance(event, events.Participation):
        return float(event.probability) * min(participation_bound(event.event), 1.0)
    if isinstance(event, events.Poisson):
        return float(event.rate)
    if isinstance(event, (events.Replaced, events.ZeroedOut)):
        return float(max(event.rate, event.rate_when_full))
    if isinstance(event, events.WithoutReplacement):
        return float(event.sample / event.population)
    if isinstance(event, events.WithReplacement):
        return float(event.draws / event.population)
    return 1.0


def has_loss_distribution(event: Any, times: float = 1) -> bool:
    """Return whether a privacy-loss distribution of an event is worth computing.

    The event must be sampled, and must not have too many different parts or repeats.

    Args:
        event: an event.
        times: how often it is repeated.
    """
    if isinstance(event, events.Repeat):
        return has_loss_distribution(event.event, times * float(event.times))
    kinds = events.event_types(event)
    is_known = kinds.isdisjoint(events.NOT_GAUSSIAN)
    is_sampled = bool(kinds & events.SAMPLED)
    return is_known and is_sampled and _count_parts(event) <= MAX_PARTS and times <= MAX_PLD_REPEATS


def expand_series(event: Any) -> Any:
    """Return an event in which each Series is replaced by the composition of its parts."""
    if isinstance(event, events.Series):
        times = np.asarray(event.times)
        each = zip(events.parts(event.event, len(times)), times)
        return events.compose(*(events.repeat(part, n) for part, n in each if n > 0))
    if isinstance(event, events.Compose):
        return events.Compose(tuple(map(expand_series, event.events)))
    if not hasattr(event, "event"):
        return event
    return dataclasses.replace(event, event=expand_series(event.event))


def _count_parts(event):
    """Return the number of different noisy steps in an event."""
    if isinstance(event, events.Compose):
        return sum(_count_parts(e) for e in event.events)
    if isinstance(event, events.Series):
        return np.size(event.times) * _count_parts(event.event)
    return _count_parts(event.event) if hasattr(event, "event") else 1


# --- inverses


def solve_noise(event_of_z: Callable, epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier z whose epsilon is at most `epsilon`.

    The result is a float32, as a simulation uses it.  Its epsilon was evaluated and does not exceed
    the target.  It is at most a few parts in a million above the smallest possible z, or about one
    percent if only the finest grids of a privacy-loss distribution are accurate.

    Args:
        event_of_z: z -> an event.
        epsilon: the target, > 0.
        delta: in (0, 1).

    Raises:
        ValueError: if epsilon is not > 0 and finite, or if no z up to a million reaches it.

    Example:
        >>> round(solve_noise(events.gaussian, 1.0, 1e-5), 4)
        3.7306
    """
    check_delta(delta)

    def epsilon_of(z, sizes, quick=False):
        return tightest(Release((event_of_z(z),)), float(delta), sizes, quick)[0]

    first = smallest("solve_noise", lambda z: epsilon_of(z, COARSE, quick=True), epsilon)
    return smallest_refined("solve_noise", epsilon_of, epsilon, first)


def solve_rounds(event: Any, epsilon: float, delta: float) -> int:
    """Return the largest number of repeats of an event whose epsilon is at most `epsilon`.

    The result is 0 if even one repeat exceeds it, and at most 10^12.

    Args:
        event: one round.
        epsilon: the target, > 0.
        delta: in (0, 1).

    Raises:
        ValueError: if epsilon is not > 0 and finite.

    Example:
        >>> solve_rounds(events.gaussian(10.0), 1.0, 1e-5)
        7
    """
    check_delta(delta)

    def epsilon_of(times, sizes=COARSE, quick=False):
        return tightest(Release((events.repeat(event, times),)), float(delta), sizes, quick)[0]

    quick_epsilon = lambda times: epsilon_of(times, quick=True)
    return largest("solve_rounds", quick_epsilon, epsilon_of, epsilon)


def solve_rate(event_of_rate: Callable, epsilon: float, delta: float) -> float:
    """Return the largest sampling rate in (0, 1] whose epsilon is at most `epsilon`.

    The result is a float32.  Its epsilon was evaluated and does not exceed the target.

    Args:
        event_of_rate: rate -> an event.
        epsilon: the target, > 0.
        delta: in (0, 1).

    Raises:
        ValueError: if epsilon is not > 0 and finite, or if no rate down to 1e-9 reaches it.

    Example:
        >>> event = lambda q: events.repeat(events.poisson(q, events.gaussian(1.0)), 1000)
        >>> round(solve_rate(event, 2.0, 1e-5), 4)
        0.0109
    """
    check_delta(delta)

    # Search for 1 / rate, which behaves like a noise multiplier: a larger one is more private.
    def epsilon_of(inverse, sizes=FINE, quick=False):
        event = event_of_rate(_rate_of_inverse(inverse))
        return tightest(Release((event,)), float(delta), sizes, quick)[0]

    if epsilon_of(1.0) <= epsilon:
        checks.require_positive("solve_rate", epsilon=epsilon)
        return 1.0
    first = smallest("solve_rate", lambda x: epsilon_of(x, quick=True), epsilon, most=1e9)
    return _rate_of_inverse(smallest_refined("solve_rate", epsilon_of, epsilon, first, most=1e9))


def _rate_of_inverse(inverse):
    """Return 1 / inverse in float32, at most 1."""
    return float(np.minimum(np.float32(1), np.float32(1) / np.float32(inverse)))


def smallest_refined(
    where: str, epsilon_of: Callable, target: float, first: float = 1.0, most: float = 1e6
) -> float:
    """Return the smallest z with epsilon_of(z) <= target, with finer grids where they pay off.

    The search first uses coarse grids of a privacy-loss distribution.  It is repeated with the
    finest grid only if that grid lowers the epsilon of the first result by more than one percent of
    the target.  The finest grid never proves a larger epsilon, but takes about ten times as long.

    Args:
        epsilon_of: (z, sizes of grids) -> epsilon, decreasing in z.  z is a noise multiplier, or
            another number with which privacy improves.
        where, target, first, most: as in `smallest`.
    """
    z = smallest(where, lambda z: epsilon_of(z, COARSE), target, first, most)
    if z <= LEAST or epsilon_of(z, FINE) >= (1 - FINEST_GAIN) * target:
        return z
    finely = lambda z: epsilon_of(z, FINE)
    return smallest(where, finely, target, z, most, FINEST_TOLERANCE, 1.01)


def smallest(
    where: str,
    epsilon_of: Callable,
    target: float,
    first: float = 1.0,
    most: float = 1e6,
    tolerance: float = 1e-6,
    step: float = 1.25,
) -> float:
    """Return the smallest float32 z with epsilon_of(z) <= target, up to a relative tolerance.

    log(epsilon) is almost linear in log(z), so each step goes where the line through both ends of
    the bracket meets the target; if the same end stays twice, its value is halved (Illinois).  The
    result itself was evaluated.

    Args:
        where: the name of the caller, for messages.
        epsilon_of: z -> epsilon, decreasing; nan counts as too large.  z is a noise multiplier, or
            another number with which privacy improves.
        target: the epsilon to reach, > 0.
        first: the first z to try.
        most: the largest z to try.
        tolerance: the relative width of the final bracket.
        step: the first factor by which the bracket grows.
    """
    checks.require_positive(where, epsilon=target)
    target = float(target)

    def height(z):
        value = epsilon_of(float(z))  # nan counts as too large
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
    return _narrow_bracket(height, low, f_low, high, f_high, tolerance)


def _narrow_bracket(height, low, f_low, high, f_high, tolerance):
    """Return the upper end of a bracket of a zero of `height`, narrowed to the relative tolerance.

    Args:
        height: z -> log(epsilon / target), decreasing.
        low, f_low: the lower end and its height, > 0.
        high, f_high: the upper end and its height, <= 0.
        tolerance: the relative width of the final bracket.
    """
    side, ends = 0, (f_low, f_high)  # `ends` are the heights without the halving of Illinois
    for i in range(80):
        jumping = ends[0] - ends[1] > math.log(JUMP) and high / low <= JUMP_BRACKET
        if high / low <= 1 + max(tolerance, FINEST_TOLERANCE if jumping else 0.0):
            break
        part = min(max(f_low / max(f_low - f_high, 1e-300), 0.02), 0.98)
        if i % 4 == 3 or jumping:
            part = 0.5
        middle = np.float32(math.exp((1 - part) * math.log(low) + part * math.log(high)))
        if not low < middle < high:
            middle = np.nextafter(high, low) if part > 0.5 else np.nextafter(low, high)
            if not low < middle < high:
                break
        f = height(middle)
        ends = (ends[0], f) if f <= 0 else (f, ends[1])
        if f <= 0:
            high, f_high, f_low, side = middle, f, f_low / 2 if side == 1 else f_low, 1
        else:
            low, f_low, f_high, side = middle, f, f_high / 2 if side == -1 else f_high, -1
    return float(high)


def largest(where: str, quick: Callable, tight: Callable, target: float) -> int:
    """Return the largest number of repeats whose epsilon is <= target.

    The result is 0 if there is none, and at most about 10^12.  It may be too small by a relative
    error of 3e-3.

    Args:
        where: the name of the caller, for messages.
        quick: number of repeats -> a quick bound on epsilon, never below that of `tight`.
        tight: (number of repeats, sizes of grids) -> a tight bound on epsilon.
        target: the epsilon not to exceed, > 0.
    """
    checks.require_positive(where, epsilon=target)
    low = _largest_from(0, lambda number: quick(number) <= target)
    # the quick bounds allow `low`; the tight bounds may allow more
    low = _largest_from(low, lambda number: tight(number, COARSE) <= target)
    if not 0 < low < 10**12 or tight(low, FINE) >= (1 - FINEST_GAIN) * target:
        return low
    return _largest_from(low, lambda number: tight(number, FINE) <= target, FINEST_TOLERANCE)


def _largest_from(low, fits, tolerance=0.0):
    """Return the largest integer >= low that fits, up to a relative tolerance; `low` fits."""
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
