"""Epsilon of an event by Renyi differential privacy, and by the exact composition of Gaussians
without sampling.

Either can be the smaller one.  They are quick and serve many numbers of rounds at once; `tightest`
adds privacy-loss distributions.  `curve` is traceable; the rest runs on the host, on concrete
numbers.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.precision import in_float64
from . import events, rdp, rdp_on_host, roots
from .rdp_formulas import ON_HOST, log_profile

BLOCK = 64  # orders of one compiled call
ORDERS = 1 + np.geomspace(1e-5, 1e7, 2 * BLOCK)
MANY_ORDERS = 1 + np.geomspace(1e-4, 1e5, 8 * BLOCK)  # for epsilons of all sizes at once
LEAST_LOSS = 1e-18  # of delta, which a law of copies may leave out where delta is sought
SAMPLED, EXACT = "rdp", "gaussian_exact"
LOG_LEAST_DELTA = -300 * math.log(10)
NOT_GAUSSIAN = (events.Laplace, events.Pure, events.RenyiBound)  # releases with a curve alone
FEW = 4  # events, beyond which they are computed together


class Overflow(NotAnalysable):
    """No epsilon: draws without a slot, or noise of a finite reach, take all of delta."""


def epsilon(event: Any, delta: float) -> tuple[float, str]:
    """The smaller epsilon of the two, and the method that proved it: "rdp" or "gaussian_exact".

    Units:
        delta in (0, 1).

    Privacy:
        of the unit and adjacency for which the event was built.

    Raises:
        ValueError: for what these methods cannot analyse: a sample of a sample, and an event that
            mixes add_remove (Poisson) with replace_one (with or without replacement).

    Example:
        >>> value, method = epsilon(events.gaussian(1.0), 1e-5)
        >>> round(value, 4), method
        (4.3772, 'gaussian_exact')
    """
    check_delta(delta)
    values, exact = bounds((event,), np.ones(1), np.full(1, float(delta)))
    return float(values[0]), EXACT if exact[0] else SAMPLED


def curve(event: Any, orders: ArrayLike) -> jax.Array:
    """Renyi curve of an event: traceable, also in the numbers of the event but for draws with
    replacement.

    Shapes:
        orders [n] > 1 -> Float64[n].

    Raises:
        ValueError: as `epsilon`.
    """
    event, _ = with_multiplicities(event, 0.0)
    if events.Allocation in event_types(event):
        found = values(event, np.asarray(orders, np.float64))
        with in_float64():
            return jnp.asarray(found, jnp.float64)
    with in_float64():
        return _curve(
            jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), event),
            jnp.asarray(orders, jnp.float64),
        )


def _curve(event, orders, curves: Any = rdp) -> Any:
    """`curve`, by the functions of `rdp`, or of `rdp_on_host`, which takes no Series."""
    inner = lambda part: _curve(part, orders, curves)
    if isinstance(event, events.Gaussian):
        return curves.gaussian(orders, event.noise_multiplier)
    if isinstance(event, events.Laplace):
        return curves.laplace(orders, event.noise_multiplier)
    if isinstance(event, events.Pure):
        return curves.pure(orders, event.epsilon)
    if isinstance(event, events.Repeat):
        return event.times * inner(event.event)
    if isinstance(event, events.Compose):
        return sum(map(inner, event.events))
    if isinstance(event, events.Series):
        return event.times @ _each(event.event, orders)
    if isinstance(event, events.RenyiBound):
        each = orders[..., None] * event.slopes + event.constants
        return each.min(axis=-1)
    if isinstance(event, events.Participation):
        return curves.participation(orders, event.probability, inner(event.event))
    return _sampled_curve(event, orders, curves)


def _sampled_curve(event, orders, curves):
    """Of Gaussians on a sample."""
    z: Any = _precision(event.event) ** -0.5 if hasattr(event, "event") else None
    if isinstance(event, events.Poisson):
        return curves.poisson(orders, event.rate, z)
    if isinstance(event, events.PoissonGroup):
        return curves.poisson_group(orders, event.law, z)
    if isinstance(event, events.Allocation):
        return curves.allocation(orders, event.slots, z)
    if isinstance(event, (events.Replaced, events.ZeroedOut)):
        # no two releases lie further apart than those of elements that replace each other
        is_zeroed = isinstance(event, events.ZeroedOut)
        apart = lambda rate: curves.without_replacement(orders, rate, z / (1 + is_zeroed))
        room = curves.poisson(orders, event.rate, z) if is_zeroed else apart(event.rate)
        return curves.either(orders, event.full, apart(event.rate_when_full), room)
    if isinstance(event, events.WithoutReplacement):
        return curves.without_replacement(orders, event.sample / event.population, z)
    if isinstance(event, events.Multiplicity):
        return curves.with_replacement(orders, event.law, z)
    return _precision(event)


def _each(event, orders):
    """Curves [n, orders] of an event whose Gaussians hold multipliers [n]."""
    leaves, shape = jax.tree.flatten(event, is_leaf=lambda e: isinstance(e, events.Gaussian))
    varying = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, events.Gaussian) and jnp.ndim(leaf.noise_multiplier)
    ]

    def one(multipliers):
        replaced = list(leaves)
        for i, z in zip(varying, multipliers):
            replaced[i] = events.Gaussian(z)
        return _curve(jax.tree.unflatten(shape, replaced), orders)

    return jax.lax.map(one, tuple(leaves[i].noise_multiplier for i in varying), batch_size=8)


def delta(event: Any, epsilon: float) -> float:
    """The smallest delta at which the event is proved to be `epsilon`-private, to one part in a
    million, from above.

    Units:
        epsilon >= 0.  The result is 1 where nothing smaller was found, and at least 1e-300.

    Raises:
        ValueError: as `epsilon`.

    Example:
        >>> bool(1e-5 <= delta(events.gaussian(1.0), 4.37717809) <= 1.00001e-5)
        True
    """
    checks.nonnegative("jfl.privacy.accountants.rdp_events.delta", epsilon=epsilon)

    def excess(log_delta):  # 1 is always enough
        if log_delta == 0:
            return -math.inf
        return bounds((event,), np.ones(1), np.exp([log_delta]))[0][0] - float(epsilon)

    return math.exp(roots.smallest_fitting(excess, LOG_LEAST_DELTA, 0.0, 1e-6))


def deltas(event: Any, epsilon: np.ndarray, times: float = 1.0) -> np.ndarray:
    """Deltas that are proved at many epsilons at once, for `event`, `times` times.

    Shapes:
        epsilon [n] >= 0 -> Float64[n] in [0, 1].

    Raises:
        ValueError: as `epsilon`.

    Example:
        >>> deltas(events.gaussian(1.0), np.array([0.0, 1.0])).round(4).tolist()
        [0.3829, 0.1269]
    """
    counts = np.asarray([times], np.float64)
    if isinstance(event, events.Series):
        counts, event = counts * event.times, event.event
    event, given_up = with_multiplicities(event, LEAST_LOSS / max(float(counts.sum()), 1.0))
    precision = np.broadcast_to(
        np.asarray(_precision(event, sampled=False), np.float64), counts.shape
    )
    mu = math.sqrt(_so_often(counts, precision))
    with np.errstate(all="ignore"):  # what overflows proves nothing
        exact = np.exp(log_profile(ON_HOST, epsilon / mu - mu / 2, np.full(epsilon.shape, mu)))
    best = np.where(np.isnan(exact), 1.0, exact)
    if _is_sampled(event_types(event)):
        values = counts @ _values(event, MANY_ORDERS, len(counts))
        best = np.minimum(best, deltas_of_curve(MANY_ORDERS, values, epsilon))
    return np.minimum(best + given_up * counts.sum(), 1.0)


def gaussian_mu(event: Any) -> float:
    """The event is mu-GDP for this mu, as if all of it always took part with all its copies.

    Example:
        >>> gaussian_mu(events.repeat(events.poisson(0.1, events.gaussian(2.0)), 16))
        2.0
    """
    event, _ = with_multiplicities(event, 0.0)
    return math.sqrt(_precision(event, sampled=False))


def values(event: Any, orders: np.ndarray) -> np.ndarray:
    """`curve` on the host, of an event whose numbers are concrete; a Series part by part."""
    if isinstance(event, events.Series):
        return event.times @ _values(event.event, orders, np.size(event.times))
    if isinstance(event, events.Repeat):  # of other numbers of times it is the same curve
        return event.times * values(event.event, orders)
    if events.Series in event_types(event):
        if isinstance(event, events.Compose):
            found: Any = sum(values(e, orders) for e in event.events)
            return found
    return _values(event, orders, 1)[0]


def deltas_of_curve(orders: np.ndarray, values: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    """The smallest deltas that a curve proves at many epsilons: `convert`, solved for delta.

    Shapes:
        orders [n] > 1, values [n], epsilon [m] >= 0 -> Float64[m].
    """
    with np.errstate(all="ignore"):
        slack = (orders - 1) * (values + np.log1p(-1 / orders)) - np.log(orders)
        log_delta = np.min(
            np.where(np.isnan(slack), np.inf, slack) - (orders - 1) * epsilon[:, None], axis=1
        )
        at_zero = np.sqrt(-np.expm1(-values)).min()
    return np.minimum(np.exp(np.minimum(log_delta, 0.0)), at_zero)


def _is_sampled(kinds):
    return kinds & {
        events.Poisson,
        events.PoissonGroup,
        events.Allocation,
        events.Replaced,
        events.ZeroedOut,
        events.WithoutReplacement,
        events.WithReplacement,
        events.Multiplicity,
        events.Participation,
        *NOT_GAUSSIAN,
    }


def bounds(
    alternatives: Sequence,
    times: np.ndarray,
    delta: np.ndarray,
    overflow: ArrayLike = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return epsilons [m] of the worst of several events, and whether the exact Gaussian gave each.

    Args:
        alternatives: events, at least one.
        times: [m] how often the event happens; or [m, n] how often each part of a Series [n] does.
        delta: [m].
        overflow: [m], the probability that a draw of the run finds no slot.  It costs
            1 + e^epsilon times as much delta.

    Raises:
        Overflow: if an overflow takes all of delta.
    """
    overflow = np.broadcast_to(np.asarray(overflow, np.float64), np.shape(delta))
    values, exact = _bounds_without_overflow(alternatives, times, delta)
    if not overflow.any():
        return values, exact
    # Epsilon grows as delta shrinks, and the cost grows with epsilon, so this climbs to the
    # smallest solution.
    for _ in range(100):
        left = delta - overflow * (1 + np.exp(np.minimum(values, 700)))
        if not np.all(left > 0):
            raise Overflow(
                f"jfl.guarantee: need room in delta for an overflow; got delta={delta.min():g} and "
                f"an overflow probability of {overflow.max():.3g} in the run, which costs that "
                "times 1 + e^epsilon. "
                "Raise the capacity of the sampler or of the batches, or delta, or the noise."
            )
        # slightly smaller, so that rounding errs on the conservative side
        again, exact = _bounds_without_overflow(alternatives, times, left * (1 - 1e-9))
        if np.all(again <= values * (1 + 1e-12)):
            return np.maximum(again, values), exact
        values = again
    raise Overflow(
        "jfl.guarantee: need an epsilon that settles; got an overflow that takes most of delta. "
        "Raise the capacity of the sampler or of the batches."
    )


def _bounds_without_overflow(alternatives, times, delta):
    times = np.asarray(times, np.float64)
    if len(alternatives) > FEW and times.shape == (1,):
        high = above(alternatives, times, delta)
        order, kept = np.argsort(-high), []
        for i in order:  # the largest first, until the rest is below
            if kept and max(kept)[0] >= high[i]:
                break
            value, exact = _bound(alternatives[i], times, delta)
            kept.append((value[0], bool(exact[0])))
        return np.array([max(kept)[0]]), np.array([max(kept)[1]])
    each = [_bound(e, times, delta) for e in alternatives]
    values = np.stack([v for v, _ in each])
    worst = np.argmax(values, axis=0)
    return values.max(axis=0), np.stack([x for _, x in each])[worst, np.arange(len(times))]


def above(alternatives: Sequence, times: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Quick upper bounds [events] for one number of rounds; many events of one shape at the price
    of a few."""
    leaves, shapes = zip(*(jax.tree.flatten(e) for e in alternatives))
    alike = (
        len(set(shapes)) == 1 and len(alternatives) > FEW and not any(np.ndim(v) for v in leaves[0])
    )
    if not alike or event_types(alternatives[0]) & {events.WithReplacement, events.Allocation}:
        return np.array([bounds((e,), times, delta)[0][0] for e in alternatives])
    with in_float64():
        # lengths in steps, so that few of them are compiled
        rows = np.array([*leaves, *leaves[:1] * (-len(leaves) % BLOCK)], np.float64)
        curves = np.asarray(_compiled_many(shapes[0], jnp.asarray(rows)))[: len(alternatives)]
    best = _convert(ORDERS, times[0] * curves, np.full(len(alternatives), delta[0])).min(axis=1)
    whole = [float(_precision(e, sampled=False)) for e in alternatives]
    return np.minimum(
        best, rdp_on_host.gaussian_epsilon(np.sqrt(times[0] * np.array(whole)), delta[0])
    )


@functools.partial(jax.jit, static_argnums=0)
def _compiled_many(shape, rows):
    one = lambda values: _curve(
        jax.tree.unflatten(shape, list(values)), jnp.asarray(ORDERS, jnp.float64)
    )
    return jax.lax.map(one, rows, batch_size=8)


def _bound(event, times, delta):
    kinds = event_types(event)
    if events.Poisson in kinds and kinds & {events.WithoutReplacement, events.WithReplacement}:
        checks.fail(
            "jfl.privacy.accountants.rdp_events",
            "one adjacency in an event",
            "poisson (add_remove) and with or without_replacement (replace_one)",
            "Use one kind of sampling throughout.",
            error=NotAnalysable,
        )
    counts = times if times.ndim == 2 else times[:, None]
    if isinstance(event, events.Series):  # its parts apart, so that many counts cost one
        counts, event = counts if times.ndim == 2 else counts * event.times, event.event
    # draws that repeat more often than a hundredth of delta allows are given up, and paid for
    event, given_up = with_multiplicities(
        event, np.min(delta) / max(float(np.max(counts.sum(1))), 1.0) / 100
    )
    delta = delta - given_up * counts.sum(1)
    precision = np.broadcast_to(
        np.asarray(_precision(event, sampled=False), np.float64), counts.shape[1:]
    )
    exact = rdp_on_host.gaussian_epsilon(np.sqrt(_so_often(counts, precision)), delta)
    if not _is_sampled(kinds):
        return exact, np.ones(len(times), bool)
    orders, values = ORDERS, counts @ _values(event, ORDERS, counts.shape[1])
    for _ in range(2):  # a finer look around each best order
        best = np.unique(np.argmin(_convert(orders, values, delta), axis=1))
        # an end of the orders looks far beyond it
        gaps = np.concatenate([[1e-4 * (orders[0] - 1)], orders - 1, [1e4 * (orders[-1] - 1)]])
        finer = np.concatenate([1 + np.geomspace(gaps[b], gaps[b + 2], BLOCK) for b in best])
        orders = np.append(orders, finer)
        values = np.append(values, counts @ _values(event, finer, counts.shape[1]), axis=1)
        ascending = np.argsort(orders, kind="stable")
        orders, values = orders[ascending], values[:, ascending]
    sampled = _convert(orders, values, delta).min(axis=1)
    return np.minimum(sampled, exact), exact <= sampled


def _values(event, orders, parts):
    """Curves [parts, n]."""
    if parts == 1 and events.Series not in event_types(event):
        leaves, shape = jax.tree.flatten(event)
        numbers = tuple((np.shape(v), np.asarray(v, np.float64).tobytes()) for v in leaves)
        return _curve_on_host(shape, numbers, orders.tobytes())[None]
    if events.Allocation in event_types(event):  # on the host alone
        each = [event] if parts == 1 else _apart(event, parts)
        return np.stack([_with_series(one, orders) for one in each])
    curve_of = curve if parts == 1 else _compiled_each
    with in_float64():
        curves = [np.asarray(curve_of(event, block)) for block in orders.reshape(-1, BLOCK)]
    return np.concatenate([f.reshape(parts, -1) for f in curves], axis=1)


def _with_series(event, orders):
    """`_curve` on the host, of an event that may hold Series."""
    if isinstance(event, events.Series):
        each = [_with_series(one, orders) for one in _apart(event.event, len(event.times))]
        return event.times @ np.stack(each)
    if isinstance(event, events.Compose):
        return sum(_with_series(e, orders) for e in event.events)
    if isinstance(event, events.Repeat):
        return event.times * _with_series(event.event, orders)
    return _curve(event, orders, rdp_on_host)


def _apart(event, parts):
    """Events whose Gaussians hold one number each, of one whose Gaussians hold [parts]."""
    pick = lambda g, i: events.Gaussian(np.broadcast_to(g.noise_multiplier, (parts,))[i])
    is_leaf = lambda e: isinstance(e, events.Gaussian)
    return [
        jax.tree.map(lambda e, i=i: pick(e, i) if is_leaf(e) else e, event, is_leaf=is_leaf)
        for i in range(parts)
    ]


@functools.lru_cache(1024)  # a guarantee asks for the same curve three times
def _curve_on_host(shape, numbers, orders):
    leaves = [np.frombuffer(content).reshape(size) for size, content in numbers]
    with np.errstate(all="ignore"):  # what overflows proves nothing, and says nothing
        values = _curve(jax.tree.unflatten(shape, leaves), np.frombuffer(orders), rdp_on_host)
    values.flags.writeable = False
    return values


def _convert(orders, values, delta):
    return rdp_on_host.convert(orders, values, delta[:, None])


_compiled_each = jax.jit(
    lambda event, orders: _each(
        jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), event), jnp.asarray(orders, jnp.float64)
    )
)


def event_types(event: Any) -> set[type]:
    """The types of an event and of all events inside it."""
    inner = event.events if isinstance(event, events.Compose) else [getattr(event, "event", None)]
    return {type(event)}.union(*(event_types(e) for e in inner if e is not None))


def _precision(event: Any, sampled=True) -> Any:
    """Sum of 1 / z^2 of what is one Gaussian, inside a sample; with sampled=False, of an event
    without sampling."""
    if isinstance(event, events.Gaussian):
        return event.noise_multiplier**-2
    if isinstance(event, events.Repeat):
        return event.times * _precision(event.event, sampled)
    if isinstance(event, events.Compose):
        return sum(_precision(e, sampled) for e in event.events)
    if isinstance(event, events.Series):
        each = np.broadcast_to(_precision(event.event, sampled), np.shape(event.times))
        return _so_often(np.asarray(event.times), each)
    if isinstance(event, NOT_GAUSSIAN) and not sampled:
        return np.inf  # no Gaussian is known that it is no worse than
    if not sampled:
        copies = event.most if isinstance(event, events.Multiplicity) else 1
        if isinstance(event, events.PoissonGroup):
            copies = len(event.law) - 1
        inner: Any = event  # a sample
        return copies**2 * _precision(inner.event, sampled)
    name = "WithReplacement" if isinstance(event, events.Multiplicity) else type(event).__name__
    checks.fail(
        "jfl.privacy.accountants.rdp_events",
        "a sample of Gaussians",
        f"events.{name}",
        (
            "No bound is known here for a sample of a sample: sample once, and use participation "
            "for "
            "the clients."
        ),
        error=NotAnalysable,
    )


def _so_often(counts, precision):
    """counts @ precision, where what never happens adds nothing, however precise."""
    known = np.isfinite(precision)
    total = counts @ np.where(known, precision, 0.0)
    return np.where((counts > 0) @ ~known, np.inf, total)


def with_multiplicities(event: Any, loss: float) -> tuple[Any, float]:
    """An event whose draws with replacement state how often an element comes; and what of delta
    that leaves out.

    A law cut off at some number of copies, which it exceeds with probability at most `loss` in the
    event, is the law given that it does not: whether it does is the same for both neighbours, so
    the probability is added to delta.
    """
    if isinstance(event, events.WithReplacement):
        law, beyond = _law(event, loss)
        return events.Multiplicity(
            law, np.flatnonzero(law)[-1].astype(np.float64), event.event
        ), beyond
    if isinstance(event, events.Compose):
        parts = [with_multiplicities(e, loss / len(event.events)) for e in event.events]
        return events.Compose(tuple(e for e, _ in parts)), sum(p for _, p in parts)
    if isinstance(event, events.Repeat):
        if events.WithReplacement not in event_types(event.event):
            return event, 0.0
        inner, beyond = with_multiplicities(event.event, loss / float(event.times))
        return events.Repeat(inner, event.times), event.times * beyond
    if isinstance(event, events.Series):
        if events.WithReplacement not in event_types(event.event):
            return event, 0.0
        inner, beyond = with_multiplicities(
            event.event, loss / max(float(np.sum(event.times)), 1.0)
        )
        return events.Series(inner, event.times), np.sum(event.times) * beyond
    if isinstance(event, events.Participation):
        inner, beyond = with_multiplicities(event.event, loss)
        return events.Participation(event.probability, inner), beyond
    return event, 0.0


def _law(event, loss):
    from scipy import stats  # half a second: not at import

    if not checks.concrete((event.draws, event.population)):
        checks.fail(
            "jfl.privacy.accountants.rdp_events",
            "concrete draws and population",
            "traced ones",
            "The law has draws + 1 values.",
        )
    draws, chance = int(event.draws), 1 / float(event.population)
    most = draws if loss <= 0 else min(draws, max(1, int(stats.binom.isf(loss, draws, chance))))
    beyond = float(stats.binom.sf(most, draws, chance)) if most < draws else 0.0
    law = stats.binom.pmf(np.arange(most + 1), draws, chance) / (1 - beyond)
    # lengths in steps, so that few of them are compiled
    return np.append(law, np.zeros(-len(law) % 8)), beyond


def check_delta(delta: float) -> None:
    """Refuse a delta that is no number in (0, 1)."""
    value = checks.array("jfl.guarantee", "delta", delta)
    if value.ndim or value.dtype.kind not in "iuf" or not 0 < value < 1:
        checks.fail(
            "jfl.guarantee",
            "delta in (0, 1)",
            f"delta={checks.shown(delta)}",
            "Below 1 / (number of examples) is usual.",
        )
