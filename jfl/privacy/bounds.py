"""The smallest sound epsilon of an event, and which bound gave it.

Two bounds so far: Renyi differential privacy with the gain from sampling, and the exact composition of Gaussians
without it.  Either can be the smaller one.  `curve` is traceable; the rest runs on the host, on concrete numbers.
"""
import math

import jax
import jax.numpy as jnp
import numpy as np

from .. import check
from . import events, rdp

BLOCK = 64                                                # orders of one compiled call
ORDERS = 1 + np.geomspace(1e-5, 1e7, 2 * BLOCK)
SAMPLED, EXACT = "rdp", "gaussian_exact"


def epsilon(event, delta) -> tuple[float, str]:
    """The smallest proved epsilon of an event, and the method that proved it: "rdp" or "gaussian_exact".

    Units    delta in (0, 1).
    Privacy  of the unit and adjacency for which the event was built.
    Errors   ValueError for what these methods cannot analyse: a sample of a sample, and an event that mixes add_remove
             (Poisson) with replace_one (with or without replacement).

    >>> value, method = epsilon(events.gaussian(1.0), 1e-5)
    >>> round(value, 4), method
    (4.3772, 'gaussian_exact')
    """
    check_delta(delta)
    values, exact = bounds((event,), np.ones(1), np.full(1, float(delta)))
    return float(values[0]), EXACT if exact[0] else SAMPLED


def curve(event, orders):
    """Renyi curve of an event: traceable, also in the numbers of the event but for draws with replacement.

    Shapes   orders [n] > 1 -> Float64[n].
    Errors   ValueError as `epsilon`.
    """
    event, _ = _multiplicities(event, 0.0)
    with jax.enable_x64(True):
        return _curve(jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), event), jnp.asarray(orders, jnp.float64))


def _curve(event, orders):
    if isinstance(event, events.Gaussian):
        return rdp.gaussian(orders, event.noise_multiplier)
    if isinstance(event, events.Repeat):
        return event.times * _curve(event.event, orders)
    if isinstance(event, events.Compose):
        return sum(_curve(e, orders) for e in event.events)
    if isinstance(event, events.Participation):
        return rdp.participation(orders, event.probability, _curve(event.event, orders))
    if isinstance(event, events.Poisson):
        return rdp.poisson(orders, event.rate, _precision(event.event) ** -0.5)
    if isinstance(event, events.WithoutReplacement):
        return rdp.without_replacement(orders, event.sample / event.population, _precision(event.event) ** -0.5)
    if isinstance(event, events.Multiplicity):
        return rdp.with_replacement(orders, event.law, _precision(event.event) ** -0.5)
    return _precision(event)


def delta(event, epsilon) -> float:
    """The smallest delta at which the event is proved to be `epsilon`-private, to one part in a million, from above.

    Units    epsilon >= 0.  The result is 1 where nothing smaller was found, and at least 1e-300.
    Errors   ValueError as `epsilon`.

    >>> bool(1e-5 <= delta(events.gaussian(1.0), 4.37717809) <= 1.00001e-5)
    True
    """
    check.nonnegative("jfl.privacy.bounds.delta", epsilon=epsilon)
    fits = lambda deltas: bounds((event,), np.ones(len(deltas)), deltas)[0] <= float(epsilon)
    few, many = 0, 1                                      # decades that fit, and that do not
    while many < 300 and fits(np.array([10.0**-many]))[0]:
        few, many = many, min(2 * many, 300)
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if fits(np.array([10.0**-middle]))[0] else (few, middle)
    low, high = -many * math.log(10), -few * math.log(10)
    while high - low > 1e-6:                              # epsilon falls as delta grows
        tried = np.linspace(low, high, 34)[1:-1]
        good = fits(np.exp(tried))
        first = int(np.argmax(good)) if good.any() else 32
        high = tried[first] if first < 32 else high
        low = tried[first - 1] if first else low
    return math.exp(high)


def solve_noise(event_of_z, epsilon, delta) -> float:
    """The smallest noise multiplier z with epsilon(event_of_z(z)) <= epsilon.

    The result is a float32, the number that a simulation runs, and was itself tested: it is never on the wrong side.
    It is at most one part in a million above the smallest.

    Args     event_of_z: z -> an event, or a tuple of events of which the worst counts.
    Errors   ValueError if epsilon is not > 0 and finite, or out of reach of any z up to a million.

    >>> round(solve_noise(events.gaussian, 1.0, 1e-5), 4)
    3.7306
    """
    check_delta(delta)

    def reached(z):
        found = event_of_z(z)
        return bounds(found if isinstance(found, tuple) else (found,), np.ones(1), np.full(1, float(delta)))[0][0]

    return smallest("solve_noise", reached, epsilon)


def solve_rounds(event, epsilon, delta) -> int:
    """The largest number of repeats with epsilon(repeat(event, number)) <= epsilon; 0 where even one is too many.

    Errors   ValueError if epsilon is not > 0 and finite; beyond 10^12 repeats it stops there.

    >>> solve_rounds(events.gaussian(10.0), 1.0, 1e-5)
    7
    """
    check_delta(delta)
    after = lambda times: bounds((event,), times, np.full(times.shape, float(delta)))[0]
    return largest("solve_rounds", after, epsilon)


def solve_rate(event_of_rate, epsilon, delta) -> float:
    """The largest sampling rate in (0, 1] with epsilon(event_of_rate(rate)) <= epsilon: a float32, itself tested.

    Errors   ValueError if epsilon is not > 0 and finite, or out of reach of any rate down to 1e-9.

    >>> round(solve_rate(lambda q: events.repeat(events.poisson(q, events.gaussian(1.0)), 1000), 2.0, 1e-5), 4)
    0.0095
    """
    check_delta(delta)
    # the inverse of a rate is sought like a multiplier: the larger, the safer
    inverse = lambda x: bounds((event_of_rate(_rate(x)),), np.ones(1), np.full(1, float(delta)))[0][0]
    if inverse(1.0) <= epsilon:
        check.positive("solve_rate", epsilon=epsilon)
        return 1.0
    return _rate(smallest("solve_rate", inverse, epsilon, most=1e9))


def _rate(inverse):
    return float(np.minimum(np.float32(1), np.float32(1) / np.float32(inverse)))


def bounds(found, times, delta):
    """Epsilon [m] of the worst event repeated `times` [m], at `delta` [m]; and whether the exact Gaussian gave it."""
    each = [_bound(e, np.asarray(times, np.float64), delta) for e in found]
    values = np.stack([v for v, _ in each])
    worst = np.argmax(values, axis=0)
    return values.max(axis=0), np.stack([x for _, x in each])[worst, np.arange(len(times))]


def _bound(event, times, delta):
    kinds = _kinds(event)
    if events.Poisson in kinds and kinds & {events.WithoutReplacement, events.WithReplacement}:
        check.fail("jfl.privacy.bounds", "one adjacency in an event", "poisson (add_remove) and with or "
                   "without_replacement (replace_one)", "Use one kind of sampling throughout.")
    # draws that repeat more often than a hundredth of delta allows are given up, and paid for
    event, given_up = _multiplicities(event, np.min(delta) / max(float(np.max(times)), 1.0) / 100)
    delta = delta - given_up * times
    exact = np.asarray(rdp.gaussian_epsilon(np.sqrt(times * float(_precision(event, sampled=False))), delta))
    if not kinds & {events.Poisson, events.WithoutReplacement, events.WithReplacement, events.Participation}:
        return exact, np.ones(len(times), bool)
    orders, values = ORDERS, _values(event, ORDERS)
    for _ in range(2):                                    # a finer look around each best order
        best = np.unique(np.argmin(_convert(orders, values, times, delta), axis=1))
        # an end of the orders looks far beyond it
        gaps = np.concatenate([[1e-4 * (orders[0] - 1)], orders - 1, [1e4 * (orders[-1] - 1)]])
        finer = np.concatenate([1 + np.geomspace(gaps[b], gaps[b + 2], BLOCK) for b in best])
        orders, values = np.append(orders, finer), np.append(values, _values(event, finer))
        ascending = np.argsort(orders, kind="stable")
        orders, values = orders[ascending], values[ascending]
    sampled = _convert(orders, values, times, delta).min(axis=1)
    return np.minimum(sampled, exact), exact <= sampled


def _values(event, orders):
    with jax.enable_x64(True):
        return np.concatenate([np.asarray(_compiled_curve(event, block)) for block in orders.reshape(-1, BLOCK)])


def _convert(orders, values, times, delta):
    return np.asarray(rdp.convert(orders, times[:, None] * values, delta[:, None]))


_compiled_curve = jax.jit(curve)


def _kinds(event):
    inner = event.events if isinstance(event, events.Compose) else [getattr(event, "event", None)]
    return {type(event)}.union(*(_kinds(e) for e in inner if e is not None))


def _precision(event, sampled=True):
    """Sum of 1 / z^2 of what is one Gaussian, inside a sample; with sampled=False, of an event without sampling."""
    if isinstance(event, events.Gaussian):
        return event.noise_multiplier ** -2
    if isinstance(event, events.Repeat):
        return event.times * _precision(event.event, sampled)
    if isinstance(event, events.Compose):
        return sum(_precision(e, sampled) for e in event.events)
    if not sampled:
        copies = event.most if isinstance(event, events.Multiplicity) else 1
        return copies**2 * _precision(event.event, sampled)
    name = "WithReplacement" if isinstance(event, events.Multiplicity) else type(event).__name__
    check.fail("jfl.privacy.bounds", "a sample of Gaussians", f"events.{name}",
               "No bound is known here for a sample of a sample: sample once, and use participation for the clients.")


def _multiplicities(event, loss):
    """An event whose draws with replacement state how often an element comes; and what of delta that leaves out.

    A law cut off at some number of copies, which it exceeds with probability at most `loss` in the event, is the law
    given that it does not: whether it does is the same for both neighbours, so the probability is added to delta.
    """
    if isinstance(event, events.WithReplacement):
        law, beyond = _law(event, loss)
        return events.Multiplicity(law, np.flatnonzero(law)[-1].astype(np.float64), event.event), beyond
    if isinstance(event, events.Compose):
        parts = [_multiplicities(e, loss / len(event.events)) for e in event.events]
        return events.Compose(tuple(e for e, _ in parts)), sum(p for _, p in parts)
    if isinstance(event, events.Repeat):
        if events.WithReplacement not in _kinds(event.event):
            return event, 0.0
        inner, beyond = _multiplicities(event.event, loss / float(event.times))
        return events.Repeat(inner, event.times), event.times * beyond
    if isinstance(event, events.Participation):
        inner, beyond = _multiplicities(event.event, loss)
        return events.Participation(event.probability, inner), beyond
    return event, 0.0


def _law(event, loss):
    from scipy import stats  # half a second: not at import

    if not check.concrete((event.draws, event.population)):
        check.fail("jfl.privacy.bounds", "concrete draws and population", "traced ones", "The law has draws + 1 values.")
    draws, chance = int(event.draws), 1 / float(event.population)
    most = draws if loss <= 0 else min(draws, max(1, int(stats.binom.isf(loss, draws, chance))))
    beyond = float(stats.binom.sf(most, draws, chance)) if most < draws else 0.0
    law = stats.binom.pmf(np.arange(most + 1), draws, chance) / (1 - beyond)
    # lengths in steps, so that few of them are compiled
    return np.append(law, np.zeros(-len(law) % 8)), beyond


def check_delta(delta):
    if not (np.ndim(delta) == 0 and 0 < float(delta) < 1):
        check.fail("jfl.guarantee", "delta in (0, 1)", f"delta={delta!r}", "Below 1 / (number of examples) is usual.")


def largest(where, reached, target) -> int:
    """The largest whole number, of at most 10^12, with reached([number])[0] <= target; 0 if there is none."""
    check.positive(where, epsilon=target)
    low, high = 0, 1
    while high < 10**12 and reached(np.array([high]))[0] <= target:
        low, high = high, high * 32
    while high - low > 1:
        tried = np.unique(np.linspace(low, high, 18).astype(np.int64)[1:-1])
        tried = tried[(tried > low) & (tried < high)]
        over = reached(tried) > target
        first = int(np.argmax(over)) if over.any() else len(tried)
        low, high = (int(tried[first - 1]) if first else low), (int(tried[first]) if first < len(tried) else high)
    return low


def smallest(where, reached, target, most=1e6):
    """The smallest float32 z, to a part in a million, with reached(z) <= target."""
    check.positive(where, epsilon=target)
    target = float(target)
    high = np.float32(1)
    while not reached(float(high)) <= target:
        high *= np.float32(2)
        if high > most:
            check.fail(where, "an epsilon that noise can reach", f"epsilon={target:g}",
                       "Raise epsilon or delta, or lower rounds or the sampling rates.")
    low = high / np.float32(2)
    while reached(float(low)) <= target:
        low, high = low / np.float32(2), low
        if low < 1e-3:
            return float(high)
    while high / low > 1 + 1e-6:
        middle = np.float32(math.sqrt(float(low) * float(high)))
        if not low < middle < high:
            break
        if reached(float(middle)) <= target:
            high = middle
        else:
            low = middle
    return float(high)
