"""Epsilon of an event by Renyi differential privacy, and by the exact composition of Gaussians.

The exact composition ignores sampling; either bound can be the smaller one.  Both are quick and
compute many numbers of rounds at once.  The module `tightest` adds privacy-loss distributions.
`curve` is traceable; everything else runs on the host, on concrete numbers.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.pytrees import in_float64
from . import events, rdp
from .events import NOT_GAUSSIAN, event_types

WHERE = "jfl.privacy.accountants.rdp_events"
BLOCK = 64  # number of orders in one compiled call
ORDERS = 1 + np.geomspace(1e-5, 1e7, 2 * BLOCK)
MANY_ORDERS = 1 + np.geomspace(1e-4, 1e5, 8 * BLOCK)  # for epsilons of all sizes at once
# The delta that draws with replacement may lose if delta is sought.
MIN_REPEAT_LOSS = 1e-18
SAMPLED, EXACT = "rdp", "gaussian_exact"
# Up to this number of curves of one shape are computed by NumPy, and more by a compiled program.
MAX_ON_HOST = 16


class Overflow(NotAnalysable):
    """Raised if overflows, or the finite range of the noise, use up delta, so no epsilon exists."""


def epsilon(event: Any, delta: float) -> tuple[float, str]:
    """Return the epsilon that Renyi divergences or the exact composition of Gaussians prove.

    Args:
        event: an event.
        delta: in (0, 1).

    Returns:
        The smaller epsilon of the two bounds, and its method: "rdp" or "gaussian_exact".

    Privacy:
        Epsilon is for the unit and adjacency for which the event was built.

    Raises:
        ValueError: for a sample of a sample, or an event that mixes add_remove (Poisson) with
            replace_one (with or without replacement).

    Example:
        >>> value, method = epsilon(events.gaussian(1.0), 1e-5)
        >>> round(value, 4), method
        (4.3772, 'gaussian_exact')
    """
    check_delta(delta)
    values, exact = bounds((event,), np.ones(1), np.full(1, float(delta)))
    return float(values[0]), EXACT if exact[0] else SAMPLED


def curve(event: Any, orders: ArrayLike) -> Any:
    """Return upper bounds on the Renyi divergences of an event.

    The function is traceable, also in the numbers of the event, except for draws with replacement
    and random allocation.

    Args:
        event: an event.
        orders: Float[n] > 1.

    Returns:
        Float64[n], the bound at each order.

    Raises:
        ValueError: as in `epsilon`.
    """
    event = with_multiplicities(event, 0.0)[0]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((event, orders))):
        with in_float64():
            return _curve(*_as_float64((event, orders)))
    return level_curves(event, np.asarray(orders, np.float64))[0]


def deltas(event: Any, epsilon: np.ndarray) -> np.ndarray:
    """Return the deltas that are proved for an event at many epsilons at once.

    Args:
        event: an event.
        epsilon: Float[n] >= 0.

    Returns:
        Float64[n] in [0, 1].

    Raises:
        ValueError: as in `epsilon`.

    Example:
        >>> deltas(events.gaussian(1.0), np.array([0.0, 1.0])).round(4).tolist()
        [0.3829, 0.1269]
    """
    counts, parts = np.ones(1), None
    if isinstance(event, events.Series):
        counts, event, parts = counts * event.times, event.event, len(event.times)
    event, lost = with_multiplicities(event, MIN_REPEAT_LOSS / max(float(counts.sum()), 1.0))
    mu = math.sqrt(_total_precision(event, counts))
    exact = rdp.gaussian_delta(epsilon, np.full(epsilon.shape, mu))
    best = np.where(np.isnan(exact), 1.0, exact)  # an overflow proves nothing
    if _needs_curve(event):
        values = counts @ level_curves(event, MANY_ORDERS, parts)
        best = np.minimum(best, deltas_of_curve(MANY_ORDERS, values, epsilon))
    return np.minimum(best + lost * counts.sum(), 1.0)


def gaussian_mu(event: Any) -> float:
    """Return the mu for which an event is mu-GDP (Gaussian differential privacy) without sampling.

    Every unit is assumed to be in every sample, as often as it can be drawn.

    Example:
        >>> gaussian_mu(events.repeat(events.poisson(0.1, events.gaussian(2.0)), 16))
        2.0
    """
    return math.sqrt(events.precision(with_multiplicities(event, 0.0)[0]))


def deltas_of_curve(orders: np.ndarray, values: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    """Return the smallest deltas that Renyi divergences prove at many epsilons.

    This is `rdp.convert`, solved for delta.

    Args:
        orders: Float[n] > 1.
        values: Float[n], the divergences at these orders.
        epsilon: Float[m] >= 0.

    Returns:
        Float64[m].
    """
    with np.errstate(all="ignore"):
        slack = (orders - 1) * (values + np.log1p(-1 / orders)) - np.log(orders)
        log_delta = np.min(
            np.where(np.isnan(slack), np.inf, slack) - (orders - 1) * epsilon[:, None], axis=1
        )
        at_zero = np.sqrt(-np.expm1(-values)).min()
    return np.minimum(np.exp(np.minimum(log_delta, 0.0)), at_zero)


def _needs_curve(event):
    """Return whether an event is anything but a composition of Gaussians."""
    return bool(event_types(event) & events.SAMPLED.union(NOT_GAUSSIAN))


def bounds(
    alternatives: Sequence,
    times: np.ndarray,
    delta: np.ndarray,
    overflow: ArrayLike = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return epsilons of the worst of several events, and whether the exact composition gave them.

    There is one result for each of m pairs (times, delta).

    Args:
        alternatives: events, at least one.
        times: [m], how often the event happens; or [m, n], how often each part of a Series [n]
            does.
        delta: [m].
        overflow: [m], the probability that a sample of the run exceeds its capacity.  It costs
            1 + e^epsilon times as much delta.

    Returns:
        Float64[m], Bool[m].

    Raises:
        Overflow: if the overflow uses up delta.
    """
    overflow = np.broadcast_to(np.asarray(overflow, np.float64), np.shape(delta))
    values, exact = _bounds_without_overflow(alternatives, times, delta)
    if not overflow.any():
        return values, exact
    # Epsilon grows as delta shrinks, and the cost of an overflow grows with epsilon, so this
    # iteration increases to the smallest solution.
    for _ in range(100):
        left = delta - overflow * (1 + np.exp(np.minimum(values, 700)))
        if not np.all(left > 0):
            raise Overflow(
                "jfl.guarantee: expected a delta larger than the cost of overflows and of noise "
                f"beyond its largest value, but got delta={delta.min():g} and "
                f"a probability of {min(overflow.max(), 1.0):.3g} of these in the run, which costs "
                "1 + e^epsilon times as much. Raise the capacity of the sampler or of the batches, "
                "if they have one, or the noise, or delta."
            )
        # slightly smaller, so that rounding errs on the conservative side
        again, exact = _bounds_without_overflow(alternatives, times, left * (1 - 1e-9))
        if np.all(again <= values * (1 + 1e-12)):
            return np.maximum(again, values), exact
        values = again
    raise Overflow(
        "jfl.guarantee: expected overflows that take a small part of delta, but got overflows that "
        "take most of it. "
        "Raise the capacity of the sampler or of the batches."
    )


def _bounds_without_overflow(alternatives, times, delta):
    """Return `bounds` for an overflow of 0."""
    times = np.asarray(times, np.float64)
    if len(alternatives) > MAX_ON_HOST and times.shape == (1,):
        # Refine the events in the order of their quick bounds, until no other can be worse.
        quick = quick_bounds(alternatives, times, delta)
        worst = (-math.inf, False)
        for i in np.argsort(-quick):
            if worst[0] >= quick[i]:
                break
            value, exact = _bounds_of_event(alternatives[i], times, delta)
            worst = max(worst, (value[0], bool(exact[0])))
        return np.array([worst[0]]), np.array([worst[1]])
    each = [_bounds_of_event(e, times, delta) for e in alternatives]
    values = np.stack([v for v, _ in each])
    worst = np.argmax(values, axis=0)
    return values.max(axis=0), np.stack([x for _, x in each])[worst, np.arange(len(times))]


def quick_bounds(alternatives: Sequence, times: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return quick upper bounds on epsilon for each of several events.

    Many events with the same pytree structure are usually computed together, which takes little
    longer than a few.

    Args:
        alternatives: the events, at least one.
        times: Float[1], the number of times that an event happens, the same for all events.
        delta: Float[1], in (0, 1).

    Returns:
        Float64[len(alternatives)], the bound of each event.
    """
    first = alternatives[0]
    is_many = (
        len(alternatives) > MAX_ON_HOST
        and len({jax.tree.structure(event) for event in alternatives}) == 1
        and not any(np.ndim(number) for number in jax.tree.leaves(first))
        and not event_types(first) & {events.WithReplacement, events.Allocation}
    )
    if not is_many:
        return np.array([bounds((event,), times, delta)[0][0] for event in alternatives])
    curves = times[0] * _many_curves(alternatives, ORDERS)
    best = rdp.epsilon(ORDERS, curves, delta[0])
    precision = times[0] * np.array([float(events.precision(event)) for event in alternatives])
    return np.minimum(best, rdp.gaussian_epsilon(np.sqrt(precision), delta[0]))


def _bounds_of_event(event, times, delta):
    """Return `bounds` for one event and an overflow of 0."""
    kinds = event_types(event)
    if events.Poisson in kinds and kinds & {events.WithoutReplacement, events.WithReplacement}:
        checks.fail(
            WHERE,
            "one adjacency in an event",
            "poisson (add_remove) and with or without_replacement (replace_one)",
            "Use one kind of sampling throughout.",
            error=NotAnalysable,
        )
    counts, parts = times if times.ndim == 2 else times[:, None], None
    if isinstance(event, events.Series):  # one curve per part, for all counts
        counts = counts if times.ndim == 2 else counts * event.times
        event, parts = event.event, len(event.times)
    # More copies of an element than this distribution counts cost at most a hundredth of delta.
    event, lost = with_multiplicities(
        event, np.min(delta) / max(float(np.max(counts.sum(1))), 1.0) / 100
    )
    delta = delta - lost * counts.sum(1)
    exact = rdp.gaussian_epsilon(np.sqrt(_total_precision(event, counts)), delta)
    if not _needs_curve(event):
        return exact, np.ones(len(times), bool)
    epsilons = lambda orders, values: rdp.convert(orders, values, delta[:, None])
    orders, values = ORDERS, counts @ level_curves(event, ORDERS, parts)
    for _ in range(2):  # add orders around each best one
        best = np.unique(np.argmin(epsilons(orders, values), axis=1))
        # if the best order is the first or the last, search far outside the range
        gaps = np.concatenate([[1e-4 * (orders[0] - 1)], orders - 1, [1e4 * (orders[-1] - 1)]])
        finer = np.concatenate([1 + np.geomspace(gaps[b], gaps[b + 2], BLOCK) for b in best])
        orders = np.append(orders, finer)
        values = np.append(values, counts @ level_curves(event, finer, parts), axis=1)
        ascending = np.argsort(orders, kind="stable")
        orders, values = orders[ascending], values[:, ascending]
    sampled = epsilons(orders, values).min(axis=1)
    return np.minimum(sampled, exact), exact <= sampled


def _total_precision(event, counts):
    """Return `events.precision` of an event that happens counts[..., 0] times.

    For the event inside a Series, part i happens counts[..., i] times.
    """
    each = np.broadcast_to(np.asarray(events.precision(event), np.float64), counts.shape[-1:])
    return events.weighted_precision(counts, each)


# --- curves


def _curve(event, orders):
    """Return the Renyi curve of an event whose draws with replacement are `Multiplicity`."""
    inner = lambda part: _curve(part, orders)
    if isinstance(event, events.Gaussian):
        return rdp.gaussian(orders, event.noise_multiplier)
    if isinstance(event, events.Laplace):
        return rdp.laplace(orders, event.noise_multiplier)
    if isinstance(event, events.Pure):
        return rdp.pure(orders, event.epsilon)
    if isinstance(event, events.RenyiBound):
        each = orders[..., None] * event.slopes + event.constants
        return each.min(axis=-1)
    if isinstance(event, events.Repeat):
        return event.times * inner(event.event)
    if isinstance(event, events.Compose):
        return sum(map(inner, event.events))
    if isinstance(event, events.Series):
        parts = len(event.times)
        if isinstance(orders, np.ndarray):
            return event.times @ level_curves(event.event, orders, parts)
        return event.times @ _map_curve(_stack_events(events.parts(event.event, parts)), orders)
    if isinstance(event, events.Participation):
        return rdp.participation(orders, event.probability, inner(event.event))
    return _curve_of_sample(event, orders)


def _curve_of_sample(event, orders):
    """Return the Renyi curve of Gaussians on a sample."""
    z: Any = events.precision_inside(WHERE, event) ** -0.5
    if isinstance(event, events.Poisson):
        return rdp.poisson(orders, event.rate, z)
    if isinstance(event, events.PoissonGroup):
        return rdp.poisson_group(orders, event.distribution, z)
    if isinstance(event, events.Allocation):
        return rdp.allocation(orders, event.slots, z)
    if isinstance(event, events.WithoutReplacement):
        return rdp.without_replacement(orders, event.sample / event.population, z)
    if isinstance(event, events.Multiplicity):
        return rdp.with_replacement(orders, event.distribution, z)
    # Both neighbours share the sample.  Two releases differ at most as much as if one element had
    # replaced another; under zero_out, that is twice the sensitivity.
    is_zeroed = isinstance(event, events.ZeroedOut)
    replacing = lambda rate: rdp.without_replacement(orders, rate, z / (1 + is_zeroed))
    full = replacing(event.rate_when_full)
    room = rdp.poisson(orders, event.rate, z) if is_zeroed else replacing(event.rate)
    # The observer may see which of the two it is.  The smaller divergence is always there, and the
    # rest only with the probability of the other release.
    xp = np if isinstance(room, np.ndarray) else jnp
    chance = xp.where(full >= room, event.full, 1 - event.full)
    return xp.minimum(full, room) + rdp.participation(orders, chance, xp.abs(full - room))


def level_curves(event: Any, orders: np.ndarray, parts: int | None = None) -> np.ndarray:
    """Return the curve of an event, Float64[1, n]; or of each part of a Series, Float64[parts, n].

    Args:
        event: an event without draws with replacement (see `with_multiplicities`); for a Series,
            the event inside it.
        orders: Float64[n] > 1, where n is less than BLOCK or a multiple of it.
        parts: the number of parts of the Series; None if the event is not one.
    """
    leaves, shape = jax.tree.flatten(event)
    numbers = tuple((np.shape(v), np.asarray(v, np.float64).tobytes()) for v in leaves)
    return _cached_curves(shape, numbers, orders.tobytes(), parts)


@functools.lru_cache(1024)  # a guarantee needs the same curve three times
def _cached_curves(shape, numbers, orders, parts):
    """Return `_curves`, given hashable arguments."""
    leaves = [np.frombuffer(content).reshape(size)[()] for size, content in numbers]
    event, orders = jax.tree.unflatten(shape, leaves), np.frombuffer(orders)
    if parts is None:
        curves = np.asarray(_curve(event, orders))[None]
    else:
        each = events.parts(event, parts)
        # random allocation has no compiled curve
        if parts <= MAX_ON_HOST or events.Allocation in event_types(event):
            curves = np.stack([_curve(part, orders) for part in each])
        else:
            curves = _many_curves(each, orders)
    curves.flags.writeable = False
    return curves


def _many_curves(each, orders):
    """Return the curves [events, n] of many events of one shape, by one compiled program."""
    # Lengths are padded to powers of two, so that few programs are compiled.
    number = 2 ** math.ceil(math.log2(len(each)))
    padded = [*each, *each[:1] * (number - len(each))]
    with in_float64():
        stacked, orders = _as_float64((_stack_events(padded), orders))
        orders = orders.reshape(-1, min(BLOCK, len(orders)))
        blocks = [np.asarray(_map_curve_jit(stacked, block)) for block in orders]
    return np.concatenate(blocks, axis=1)[: len(each)]


def _map_curve(stacked, orders):
    """Return the curves [events, n] of stacked events."""
    return jax.lax.map(lambda event: _curve(event, orders), stacked, batch_size=8)


_map_curve_jit = jax.jit(_map_curve)


def _stack_events(each):
    """Return one event whose numbers are those of all events, stacked."""
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(list(each)))
    return jax.tree.map(lambda *v: (jnp if is_traced else np).stack(v), *each)


def _as_float64(tree):
    return jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), tree)


# --- draws with replacement


def with_multiplicities(event: Any, loss: float) -> tuple[Any, float]:
    """Replace each `WithReplacement` in an event by `Multiplicity`.

    The distribution of the number of copies is cut off at a number that is exceeded with
    probability at most `loss` in the whole event.  The result uses the distribution conditioned on
    not exceeding it.  Whether it is exceeded does not depend on which neighbour is used, so the
    probability is added to delta.

    Args:
        event: an event.
        loss: the largest probability to cut off; 0 cuts off nothing.

    Returns:
        The event, and the delta that the cut costs.
    """
    if events.WithReplacement not in event_types(event):
        return event, 0.0
    if isinstance(event, events.WithReplacement):
        distribution, beyond = _distribution_of_copies(event, loss)
        most = np.flatnonzero(distribution)[-1].astype(np.float64)
        return events.Multiplicity(distribution, most, event.event), beyond
    if isinstance(event, events.Compose):
        each = [with_multiplicities(e, loss / len(event.events)) for e in event.events]
        return events.Compose(tuple(e for e, _ in each)), sum(lost for _, lost in each)
    times = np.sum(event.times) if isinstance(event, (events.Repeat, events.Series)) else 1.0
    inner, beyond = with_multiplicities(event.event, loss / max(float(times), 1.0))
    return dataclasses.replace(event, event=inner), times * beyond


def _distribution_of_copies(event, loss):
    """Return the truncated distribution of the number of copies, and the probability that is cut
    off."""
    from scipy import stats  # half a second: not at import

    if not checks.is_concrete((event.draws, event.population)):
        checks.fail(
            WHERE,
            "concrete draws and population",
            "traced ones",
            "They determine the length of the distribution of copies.",
        )
    draws, rate = int(event.draws), 1 / float(event.population)
    most = draws if loss <= 0 else min(draws, max(1, int(stats.binom.isf(loss, draws, rate))))
    beyond = float(stats.binom.sf(most, draws, rate)) if most < draws else 0.0
    distribution = stats.binom.pmf(np.arange(most + 1), draws, rate) / (1 - beyond)
    # pad to a multiple of 8, so that few lengths are compiled
    return np.append(distribution, np.zeros(-len(distribution) % 8)), beyond


def check_delta(delta: float) -> None:
    """Reject a delta outside (0, 1)."""
    value = checks.as_array("jfl.guarantee", "delta", delta)
    if value.ndim or value.dtype.kind not in "iuf" or not 0 < value < 1:
        checks.fail(
            "jfl.guarantee",
            "delta in (0, 1)",
            f"delta={checks.short_repr(delta)}",
            "Usual values are below 1 / (number of examples).",
        )
