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
    Errors   ValueError for what these methods cannot analyse: draws with replacement, a sample of a sample, and an
             event that mixes add_remove (Poisson) with replace_one (without replacement).

    >>> value, method = epsilon(events.gaussian(1.0), 1e-5)
    >>> round(value, 4), method
    (4.3772, 'gaussian_exact')
    """
    check_delta(delta)
    values, exact = bounds((event,), np.ones(1), np.full(1, float(delta)))
    return float(values[0]), EXACT if exact[0] else SAMPLED


def curve(event, orders):
    """Renyi curve of an event: traceable, also in the numbers of the event.

    Shapes   orders [n] > 1 -> Float64[n].
    Errors   ValueError as `epsilon`.
    """
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
    return _precision(event)


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


def bounds(found, times, delta):
    """Epsilon [m] of the worst event repeated `times` [m], at `delta` [m]; and whether the exact Gaussian gave it."""
    each = [_bound(e, np.asarray(times, np.float64), delta) for e in found]
    values = np.stack([v for v, _ in each])
    worst = np.argmax(values, axis=0)
    return values.max(axis=0), np.stack([x for _, x in each])[worst, np.arange(len(times))]


def _bound(event, times, delta):
    if {events.Poisson, events.WithoutReplacement} <= (kinds := _kinds(event)):
        check.fail("jfl.privacy.bounds", "one adjacency in an event", "poisson (add_remove) and "
                   "without_replacement (replace_one)", "Use one kind of sampling throughout.")
    exact = np.asarray(rdp.gaussian_epsilon(np.sqrt(times * float(_precision(event, sampled=False))), delta))
    if not kinds & {events.Poisson, events.WithoutReplacement, events.Participation}:
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
    """Sum of 1 / z^2 of what is one Gaussian, inside a sample; with sampled=False, of an event without its sampling."""
    if isinstance(event, events.Gaussian):
        return event.noise_multiplier ** -2
    if isinstance(event, events.Repeat):
        return event.times * _precision(event.event, sampled)
    if isinstance(event, events.Compose):
        return sum(_precision(e, sampled) for e in event.events)
    if not sampled and not isinstance(event, events.WithReplacement):
        return _precision(event.event, sampled)
    check.fail("jfl.privacy.bounds", "a sample of Gaussians", f"events.{type(event).__name__}",
               "No bound is known here for a sample of a sample or for draws with replacement: use poisson or "
               "without_replacement once, and participation for the clients.")


def check_delta(delta):
    if not (np.ndim(delta) == 0 and 0 < float(delta) < 1):
        check.fail("jfl.guarantee", "delta in (0, 1)", f"delta={delta!r}", "Below 1 / (number of examples) is usual.")


def smallest(where, reached, target):
    """The smallest float32 z, to a part in a million, with reached(z) <= target."""
    check.positive(where, epsilon=target)
    target = float(target)
    high = np.float32(1)
    while not reached(float(high)) <= target:
        high *= np.float32(2)
        if high > 1e6:
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
