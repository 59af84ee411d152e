"""The smallest epsilon that is proved: Renyi bounds, exact Gaussians, and privacy-loss
distributions where they apply.

And the inverse: the noise, the rounds or the sampling rate that reach an epsilon.  All on the host,
on concrete numbers, by solvers that return a number they have tested.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core import checks
from ...core.errors import NotAnalysable
from . import events, pld, rdp_events
from .rdp_events import EXACT, SAMPLED, check_delta

LOSS_DISTRIBUTION = "pld"
TOTAL_VARIATION = "total_variation"
PARTS = 64  # of an event, in one privacy-loss distribution
CLIENTS = 8  # that are refined while looking for the worst one
LEAST = np.float32(1e-3)  # noise multiplier that is tried
FINEST = 1e-25  # delta below which rounding eats a distribution's gain
REPEATS = 1e7  # beyond, the grid's slack is larger than its gain
# An inverse is searched on coarse grids.  Only if the finest grid proves an epsilon at the answer
# that is smaller by this fraction of the target is it searched again, to this relative tolerance.
COARSE, FINE = pld.SIZES[:-1], pld.SIZES
FINEST_GAIN, FINEST_TOLERANCE = 0.01, 3e-3
# Where epsilon falls by the first factor in a bracket of at most the second one, it jumps: then
# bisection finds the jump, and a bracket of FINEST_TOLERANCE is narrow enough.
JUMP, JUMP_BRACKET = 100.0, 1.3


def epsilon(event: Any, delta: float) -> tuple[float, str]:
    """The smallest proved epsilon of an event, and the method that proved it: "pld", "rdp",
    "gaussian_exact" or "total_variation".

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
    return epsilon_of((event,), 1, float(delta))


def delta(event: Any, epsilon: float) -> float:
    """The smallest delta at which the event is proved to be `epsilon`-private; 1 where nothing
    smaller was found.

    Units:
        epsilon >= 0.

    Raises:
        ValueError: as `epsilon`.
    """
    found = rdp_events.delta(event, epsilon)
    if not takes(event):
        return found
    try:
        return min(found, pld.delta(spread(event), epsilon))
    except NotAnalysable:  # numbers outside its range
        return found


def epsilon_of(
    alternatives: Sequence, times: int, delta: float, sizes: Sequence[int] = FINE
) -> tuple[float, str]:
    """`epsilon` of the worst of several events, each `times` times, on grids of these sizes."""
    if times * max(map(presence, alternatives)) * (1 + 1e-9) <= delta:
        return 0.0, TOTAL_VARIATION
    often, deltas = np.array([times]), np.array([delta])
    above = rdp_events.above(alternatives, often, deltas)
    best = []
    # the largest first: as soon as one stays above all that are left, those need no better bound
    for i in np.argsort(-above)[:CLIENTS]:
        if best and max(best)[0] >= above[i]:
            return max(best)
        value, exact = rdp_events.bounds((alternatives[i],), often, deltas)
        renyi = float(value[0]), EXACT if exact[0] else SAMPLED
        # a distribution helps only where this one may be the worst
        best.append(
            min(renyi, _distribution(alternatives[i], often[0], delta, sizes))
            if not best or renyi > max(best)
            else renyi
        )
    left = np.sort(-above)[CLIENTS:]
    return max(best) if not len(left) or max(best)[0] >= -left[0] else (float(-left[0]), SAMPLED)


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


def _distribution(event, times, delta, sizes=FINE):
    """The epsilon of the privacy-loss distribution; inf where there is none, or none that could be
    better."""
    if delta < FINEST or not takes(event, times):
        return math.inf, LOSS_DISTRIBUTION
    try:
        return pld.pld_epsilon(spread(event), times, delta, sizes)[0], LOSS_DISTRIBUTION
    except NotAnalysable:  # numbers outside its range
        return math.inf, LOSS_DISTRIBUTION


def takes(event: Any, times: float = 1) -> bool:
    """True if a privacy-loss distribution of the event is worth a try: sampled, and not too many
    different parts."""
    if isinstance(event, events.Repeat):
        return takes(event.event, times * float(event.times))
    kinds = rdp_events.event_types(event)
    if kinds & set(rdp_events.NOT_GAUSSIAN):
        return False
    sampled = kinds & {
        events.Poisson,
        events.PoissonGroup,
        events.Replaced,
        events.ZeroedOut,
        events.WithoutReplacement,
        events.WithReplacement,
        events.Participation,
    }
    return bool(sampled) and _parts(event) <= PARTS and times <= REPEATS


def spread(event: Any) -> Any:
    """An event without Series: each of its parts by itself."""
    if isinstance(event, events.Series):
        times = np.asarray(event.times)
        return events.compose(
            *(events.repeat(_part(event.event, i), n) for i, n in enumerate(times) if n > 0)
        )
    if isinstance(event, events.Compose):
        return events.Compose(tuple(spread(e) for e in event.events))
    return type(event)(**{k: spread(v) if k == "event" else v for k, v in vars(event).items()})


def _part(event, i):
    if isinstance(event, events.Gaussian):
        z = np.asarray(event.noise_multiplier)
        return events.Gaussian(z[i] if z.ndim else z[()])
    if isinstance(event, events.Compose):
        return events.Compose(tuple(_part(e, i) for e in event.events))
    return type(event)(**{k: _part(v, i) if k == "event" else v for k, v in vars(event).items()})


def _parts(event):
    if isinstance(event, events.Compose):
        return sum(_parts(e) for e in event.events)
    if isinstance(event, events.Series):
        return np.size(event.times) * _parts(event.event)
    return _parts(event.event) if hasattr(event, "event") else 1


# --- inverses


def solve_noise(event_of_z: Callable, epsilon: float, delta: float) -> float:
    """The smallest noise multiplier z whose epsilon is at most `epsilon`.

    The result is a float32, the number that a simulation runs, and was itself tested: it is never
    on the wrong side.  It is at most a few parts in a million above the smallest that passes the
    test; where only the finest grids of a privacy-loss distribution are sharp, it is within about
    one percent.

    Args:
        event_of_z: z -> an event, or a tuple of events of which the worst counts.
        epsilon: the target, > 0.
        delta: in (0, 1).

    Raises:
        ValueError: if epsilon is not > 0 and finite, or out of reach of any z up to a million.

    Example:
        >>> round(solve_noise(events.gaussian, 1.0, 1e-5), 4)
        3.7306
    """
    check_delta(delta)

    def alternatives(z):
        event = event_of_z(z)
        return event if isinstance(event, tuple) else (event,)

    first = smallest("solve_noise", lambda z: _quick(alternatives(z), delta), epsilon)
    return smallest_refined(
        "solve_noise",
        lambda z, sizes: epsilon_of(alternatives(z), 1, float(delta), sizes)[0],
        epsilon,
        first,
    )


def solve_rounds(event: Any, epsilon: float, delta: float) -> int:
    """The largest number of repeats with epsilon(repeat(event, number)) <= epsilon; 0 where even
    one is too many.

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
        lambda times, sizes: epsilon_of((event,), times, float(delta), sizes)[0],
        epsilon,
    )


def solve_rate(event_of_rate: Callable, epsilon: float, delta: float) -> float:
    """The largest sampling rate in (0, 1] with epsilon(event_of_rate(rate)) <= epsilon: a float32,
    itself tested.

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

    # the inverse of a rate is sought like a multiplier: the larger, the safer
    def inverse(x, sizes=FINE):
        return epsilon_of((event_of_rate(_rate(x)),), 1, float(delta), sizes)[0]

    if inverse(1.0) <= epsilon:
        checks.positive("solve_rate", epsilon=epsilon)
        return 1.0
    first = smallest(
        "solve_rate", lambda x: _quick((event_of_rate(_rate(x)),), delta), epsilon, most=1e9
    )
    return _rate(smallest_refined("solve_rate", inverse, epsilon, first, most=1e9))


def _rate(inverse):
    return float(np.minimum(np.float32(1), np.float32(1) / np.float32(inverse)))


def _quick(alternatives, delta):
    return rdp_events.bounds(alternatives, np.ones(1), np.full(1, float(delta)))[0][0]


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
    """The smallest float32 z with reached(z) <= target, as far as a bracket of this relative width
    tells.

    log(epsilon) is almost straight in log(z), so each step goes where the line through both ends
    meets the target; an end that stays twice counts half (Illinois), and what is returned has been
    tested.
    """
    checks.positive(where, epsilon=target)
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
    """The upper end of a bracket of a zero of `height`, made as narrow as the tolerance."""
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
    """The largest whole number, of at most 10^12, whose epsilon is <= target; 0 if there is none.

    Args:
        where: who asks, for errors.
        many: Int[m] -> Float[m], quick epsilons of these numbers, never below those of `one`.
        one: number, sizes of grids -> its epsilon.
        target: the epsilon to stay at or below, > 0.
    """
    checks.positive(where, epsilon=target)
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
    """The largest whole number from `low` on that fits, to a relative tolerance."""
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
