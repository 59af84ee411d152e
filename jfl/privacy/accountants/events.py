"""Events: what a run releases about one unit, as a small tree.  Nothing here computes an epsilon.

A noise multiplier is std / sensitivity *under the adjacency in use*: the sensitivity of replace_one
is twice the clip norm, so an event means the same whatever the adjacency.  Numbers become float64
when an event is built, whatever they were (an accountant that treats np.float32(2) unlike 2.0 is
wrong without a word).  Every event is a pytree whose leaves are its numbers, so a new multiplier or
number of rounds compiles nothing again.
"""

import dataclasses
import math
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...core import checks
from ...core.errors import NotAnalysable

Class = TypeVar("Class")
LARGEST_GROUP = 16  # of units on one Poisson sample, that are counted as such


@dataclass_transform(frozen_default=True)
def _event(cls: type[Class]) -> type[Class]:
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@_event
class Gaussian:
    """One Gaussian release, of std / sensitivity `noise_multiplier`."""

    noise_multiplier: Any


@_event
class Laplace:
    """One Laplace release, of scale / sensitivity `noise_multiplier`, the latter in the L1 norm."""

    noise_multiplier: Any


@_event
class Pure:
    """A release of which only its epsilon at delta = 0 is known."""

    epsilon: Any


@_event
class Poisson:
    """`event` on a sample that each unit joins independently with probability `rate`."""

    rate: Any
    event: Any


@_event
class PoissonGroup:
    """`event` on a Poisson sample, for several units at once: k of them join with probability
    law[k]."""

    law: Any
    event: Any


@_event
class WithoutReplacement:
    """`event` on `sample` distinct units of `population`, drawn uniformly."""

    sample: Any
    population: Any
    event: Any


@_event
class Allocation:
    """`event` in one of `slots` rounds, which is drawn uniformly and not seen; for add_remove."""

    slots: Any
    event: Any


@_event
class Replaced:
    """`event` on a Poisson sample of limited capacity, for replace_one.

    The other elements fill it with probability `full`.  Then the sample is a uniform subset, which
    holds the unit with probability `rate_when_full`.
    """

    rate: Any
    full: Any
    rate_when_full: Any
    event: Any


@_event
class ZeroedOut:
    """Same as Replaced, for zero_out; a sample of fixed size is always full."""

    rate: Any
    full: Any
    rate_when_full: Any
    event: Any


@_event
class WithReplacement:
    """`event` on `draws` uniform draws from `population` units, of which one may be drawn again."""

    draws: Any
    population: Any
    event: Any


@_event
class Multiplicity:
    """The form of WithReplacement that bounds use: an element counts k times with probability
    law[k]."""

    law: Any
    most: Any
    event: Any


@_event
class RenyiBound:
    """A release of which only Renyi bounds are known: for every order a > 1 its divergence is at
    most the minimum of slopes * a + constants."""

    slopes: Any
    constants: Any


@_event
class Repeat:
    """`event`, repeated `times` times with fresh randomness."""

    event: Any
    times: Any


@_event
class Compose:
    """All `events`, sequentially."""

    events: tuple


@_event
class Series:
    """Releases with different noise: multipliers [n] in the Gaussians of `event`, each times[n]
    times."""

    event: Any
    times: Any


@_event
class Participation:
    """`event` with this `probability`, otherwise nothing; the observer does not see which."""

    probability: Any
    event: Any


def gaussian(noise_multiplier: ArrayLike) -> Gaussian:
    """Return one release of a sum plus N(0, (noise_multiplier * sensitivity)^2).

    Units:
        noise_multiplier: dimensionless, > 0.

    Raises:
        ValueError: unless it is finite and > 0.

    Example:
        >>> gaussian(np.float32(2)) == gaussian(2)
        True
    """
    return Gaussian(
        _number("events.gaussian", checks.require_positive, noise_multiplier=noise_multiplier)
    )


def laplace(noise_multiplier: ArrayLike) -> Laplace:
    """Return one release of a sum plus Laplace noise of scale noise_multiplier * sensitivity, in
    the norm of the sum of absolute values.

    Several coordinates are at most as bad as one: the Renyi divergence is convex in the shift of a
    coordinate and 0 without one, so shifts that add up to the sensitivity cost most in one place.

    Units:
        noise_multiplier: dimensionless, > 0.

    Raises:
        ValueError: unless it is finite and > 0.
    """
    return Laplace(
        _number("events.laplace", checks.require_positive, noise_multiplier=noise_multiplier)
    )


def pure(epsilon: ArrayLike) -> Pure:
    """Return one release that is epsilon-private at delta = 0.

    Raises:
        ValueError: unless epsilon is finite and >= 0.
    """
    return Pure(_number("events.pure", checks.require_nonnegative, epsilon=epsilon))


def poisson(rate: ArrayLike, event: Any) -> Poisson:
    """Return `event` on a sample that each element joins independently with probability `rate`; for
    add_remove.

    Units:
        rate in (0, 1].

    Raises:
        ValueError: outside that range.
    """
    return Poisson(
        _number("events.poisson", checks.require_fraction, rate=rate),
        _known("events.poisson", event),
    )


def poisson_group(rate: ArrayLike, size: int, event: Any) -> PoissonGroup:
    """Return `event` on a sample that each of `size` units joins independently with probability
    `rate`; for add_remove of all of them.

    The noise multiplier is that of one unit.

    Units:
        rate in (0, 1], concrete.

    Raises:
        ValueError: outside that range, or unless size is whole.

    Example:
        >>> poisson_group(0.1, 2, gaussian(1.0)).law.round(2).tolist()
        [0.81, 0.18, 0.01]
    """
    where = "events.poisson_group"
    checks.require_integer(where, size=size)
    rate = float(_number(where, checks.require_fraction, rate=rate))
    absent = [(1 - rate) ** (size - k) for k in range(size + 1)]
    law = [math.comb(size, k) * rate**k * absent[k] for k in range(size + 1)]
    return PoissonGroup(np.array(law, np.float64), _known(where, event))


def without_replacement(sample: ArrayLike, population: ArrayLike, event: Any) -> WithoutReplacement:
    """Return `event` on a uniform subset of `sample` of the `population` elements; for replace_one.

    Raises:
        ValueError: unless both are whole and 1 <= sample <= population.
    """
    where = "events.without_replacement"
    sample, population = _whole(where, sample=sample), _whole(where, population=population)
    if checks.is_concrete((sample, population)) and np.any(np.greater(sample, population)):
        checks.fail(where, "sample <= population", f"sample={sample:g}, population={population:g}")
    return WithoutReplacement(sample, population, _known(where, event))


def allocation(slots: int, event: Any) -> Allocation:
    """Return `slots` releases of `event`, in one of which a unit participates, drawn uniformly; for
    add_remove.

    Raises:
        ValueError: unless slots is whole.
    """
    return Allocation(_whole("events.allocation", slots=slots), _known("events.allocation", event))


def renyi_bound(slopes: ArrayLike, constants: ArrayLike) -> RenyiBound:
    """Return a release whose Renyi divergence of order a is at most each slopes[i] * a +
    constants[i].

    Raises:
        ValueError: unless all are >= 0 where it matters, for a >= 1.

    Example:
        >>> renyi_bound([0.5, 0.4], [0.0, 0.1]).slopes.tolist()  # zCDP of rho 0.5, and another
        [0.5, 0.4]
    """
    where = "events.renyi_bound"
    slopes = np.atleast_1d(_number(where, checks.require_nonnegative, slopes=slopes))
    constants = np.atleast_1d(np.asarray(constants, np.float64))
    if slopes.shape != constants.shape or not np.all(slopes + constants >= 0):
        checks.fail(
            where,
            "as many slopes as constants, and no bound below 0",
            f"slopes={slopes!r}, constants={constants!r}",
        )
    return RenyiBound(slopes, constants)


def replaced(rate: ArrayLike, event: Any) -> Replaced:
    """Return `event` on a sample that each element joins independently with probability `rate`; for
    replace_one.

    Units:
        rate in (0, 1].

    Raises:
        ValueError: outside that range.
    """
    where = "events.replaced"
    rate = _number(where, checks.require_fraction, rate=rate)
    return Replaced(rate, np.zeros_like(rate)[()], rate, _known(where, event))


def zeroed_out(sample: ArrayLike, population: ArrayLike, event: Any) -> ZeroedOut:
    """Return `event` on a uniform subset of `sample` of the `population` elements; for zero_out.

    Raises:
        ValueError: unless both are whole and 1 <= sample <= population.

    Example:
        >>> float(zeroed_out(1, 4, gaussian(1.0)).rate_when_full)
        0.25
    """
    whole = without_replacement(sample, population, event)
    rate = whole.sample / whole.population
    return ZeroedOut(rate, np.ones_like(rate)[()], rate, whole.event)


def truncated_poisson(
    rate: float, population: int, capacity: int, event: Any, adjacency: str = "zero_out"
) -> Replaced | ZeroedOut:
    """Return `event` on a Poisson sample of `population` elements at `rate`, of which a uniform
    subset is kept if there are more than `capacity`.

    Args:
        rate: in (0, 1].
        population: elements that may join, a public number.
        capacity: the maximum size of the sample.
        event: a Gaussian, or several.
        adjacency: "zero_out" or "replace_one".

    Raises:
        ValueError: outside (0, 1], or unless both numbers are whole and 1 <= capacity <=
            population.

    References:
        Ganesh, arXiv:2508.15089 (2025), for the two cases, full and not.
    """
    where = "events.truncated_poisson"
    checks.require_one_of(where, ("zero_out", "replace_one"), adjacency=adjacency)
    sizes = without_replacement(capacity, population, event)
    rate = _number(where, checks.require_fraction, rate=rate)
    full, then = _binomial_tails(float(rate), int(sizes.population), int(sizes.sample))
    kind = ZeroedOut if adjacency == "zero_out" else Replaced
    return kind(rate, np.float64(full), np.float64(then), sizes.event)


def _binomial_tails(rate: float, population: int, capacity: int) -> tuple[float, float]:
    """Return the probability that the others fill a Poisson sample of at most `capacity` elements,
    and the probability that a unit is then in it, as one of a uniform subset.

    Example:
        >>> _binomial_tails(1.0, 10, 4)
        (1.0, 0.4)
    """
    from scipy import stats  # half a second: not at import

    full = float(stats.binom.sf(capacity - 1, population - 1, rate))
    taken = float(stats.binom.sf(capacity, population, rate)) * capacity / population
    return full, min(taken / full, rate) if full > 0 else rate


def with_replacement(draws: ArrayLike, population: ArrayLike, event: Any) -> WithReplacement:
    """Return `event` on `draws` independent draws from `population`, which count an element each
    time that it is drawn; for replace_one.

    The noise multiplier is that of an element drawn once.

    Units:
        population: the inverse of the probability that a draw takes the element, >= 1, whole or
        not.

    Raises:
        ValueError: unless draws is whole.
    """
    where = "events.with_replacement"
    draws, population = (
        _whole(where, draws=draws),
        _number(where, checks.require_positive, population=population),
    )
    if checks.is_concrete(population) and np.any(np.less(population, 1)):
        checks.fail(where, "population >= 1", f"population={population:g}")
    return WithReplacement(draws, population, _known(where, event))


def repeat(event: Any, times: ArrayLike) -> Repeat:
    """Return `event`, repeated `times` times with fresh randomness; later ones may depend on
    earlier releases."""
    return Repeat(_known("events.repeat", event), _whole("events.repeat", times=times))


def compose(*events: Any) -> Compose:
    """Return all of `events`, sequentially; later ones may depend on earlier releases."""
    return Compose(tuple(_known("events.compose", e) for e in events))


def touched(rate: ArrayLike, event: Any) -> WithoutReplacement:
    """Return `event`, which an element reaches with probability `rate`, and then any number of
    times; for replace_one.

    The noise multiplier covers all that the element can do; noise added once per round (output
    perturbation) is of this kind.

    Units:
        rate in (0, 1].

    References:
        Li, Wang, Wu, 2025, section III: the two neighbours agree unless the element is drawn.
    """
    where = "events.touched"
    return WithoutReplacement(
        _number(where, checks.require_fraction, rate=rate), np.float64(1.0), _known(where, event)
    )


def series(event: Any, times: ArrayLike) -> Series:
    """Return `event` for each of its noise multipliers Float[n], times Float[n] >= 0 each,
    sequentially.

    >>> import jfl.privacy.accountants.rdp_events as bounds
    >>> one = bounds.epsilon(series(gaussian(np.array([1.0, 2.0])), np.array([1, 4])), 1e-5)
    >>> one == bounds.epsilon(compose(gaussian(1.0), repeat(gaussian(2.0), 4)), 1e-5)
    True
    """
    return Series(
        _known("events.series", event),
        _number("events.series", checks.require_nonnegative, times=times),
    )


def participation(probability: ArrayLike, event: Any) -> Participation:
    """Return `event` of one record if the client that holds it participates, which may be visible.

    The gain is `probability`, not its square: a client differs from the others by more than any
    noise hides, so only its absence protects the record.

    Units:
        probability in (0, 1], the same whatever the data.

    Raises:
        ValueError: outside that range.
    """
    where = "events.participation"
    return Participation(
        _number(where, checks.require_fraction, probability=probability), _known(where, event)
    )


def seen(event: Any) -> Any:
    """Return one release whose sample is known: a Gaussian, without amplification.

    Args:
        event: a Gaussian, or a sample of one; drawn with replacement, an element may be all of it.

    Example:
        >>> (
        ...     seen(poisson(0.1, gaussian(2.0))) == gaussian(2.0),
        ...     seen(with_replacement(4, 100, gaussian(2.0))) == gaussian(0.5),
        ... )
        (True, True)
    """
    if isinstance(event, Gaussian):
        return event
    copies = event.draws if isinstance(event, WithReplacement) else 1.0
    return gaussian(seen(event.event).noise_multiplier / copies)


def of_group(event: Any, size: int) -> Any:
    """Return `event` for `size` units that differ at once; None if no such event is known.

    Units move a sum by at most `size` sensitivities, wherever they are.
    """
    if isinstance(event, Gaussian):
        return gaussian(event.noise_multiplier / size)
    if isinstance(event, Laplace):
        return laplace(event.noise_multiplier / size)
    if isinstance(event, Pure):
        return pure(event.epsilon * size)
    if isinstance(event, Poisson) and size <= LARGEST_GROUP:
        return poisson_group(event.rate, size, event.event)
    if isinstance(event, Compose):
        inner = tuple(of_group(e, size) for e in event.events)
        return None if None in inner else Compose(inner)
    if isinstance(event, (Repeat, Series)):
        inner = of_group(event.event, size)
        return None if inner is None else type(event)(inner, event.times)
    return None


KINDS = (
    Gaussian,
    Laplace,
    Pure,
    Poisson,
    PoissonGroup,
    Allocation,
    Replaced,
    ZeroedOut,
    RenyiBound,
    WithoutReplacement,
    WithReplacement,
    Repeat,
    Compose,
    Series,
    Participation,
)


NOT_GAUSSIAN = (Laplace, Pure, RenyiBound)  # releases of which only a curve is known
SAMPLED = {  # events in which a unit may be absent
    Poisson,
    PoissonGroup,
    Allocation,
    Replaced,
    ZeroedOut,
    WithoutReplacement,
    WithReplacement,
    Multiplicity,
    Participation,
}


# --- what accountants ask of an event


def event_types(event: Any) -> set[type]:
    """Return the types of an event and of all events inside it."""
    inner = event.events if isinstance(event, Compose) else [getattr(event, "event", None)]
    return {type(event)}.union(*(event_types(e) for e in inner if e is not None))


def precision(event: Any) -> Any:
    """Return the sum of 1 / z^2 of an event, as if all of it always took part, with all copies that
    may be drawn; inf if it is not known to be at most as bad as a Gaussian."""
    if isinstance(event, Gaussian):
        return event.noise_multiplier**-2.0
    if isinstance(event, NOT_GAUSSIAN):
        return np.inf
    if isinstance(event, Repeat):
        return event.times * precision(event.event)
    if isinstance(event, Compose):
        return sum(map(precision, event.events))
    if isinstance(event, Series):
        each = np.broadcast_to(precision(event.event), np.shape(event.times))
        return weighted_precision(np.asarray(event.times), each)
    copies: Any = event.most if isinstance(event, Multiplicity) else 1
    if isinstance(event, PoissonGroup):
        copies = event.law.shape[-1] - 1
    return copies**2 * precision(event.event)


def weighted_precision(counts: np.ndarray, each: np.ndarray) -> np.ndarray:
    """Return counts @ each with 0 * inf = 0: an event that never happens adds nothing."""
    is_known = np.isfinite(each)
    total = counts @ np.where(is_known, each, 0.0)
    return np.where((counts > 0) @ ~is_known, np.inf, total)


def precision_inside(where: str, event: Any) -> Any:
    """Return the precision of the Gaussians inside a sample; `where` names the caller in errors.

    Raises:
        NotAnalysable: for a sample of anything else.
    """
    allowed = {Gaussian, Repeat, Compose, Series}
    for kind in sorted(event_types(event.event) - allowed, key=lambda kind: kind.__name__):
        outer = "WithReplacement" if isinstance(event, Multiplicity) else type(event).__name__
        inner = "WithReplacement" if kind is Multiplicity else kind.__name__
        checks.fail(
            where,
            f"Gaussians inside events.{outer}",
            f"events.{inner}",
            "No bound is known here for a sample of a sample: sample once, and use participation "
            "for the clients.",
            error=NotAnalysable,
        )
    return precision(event.event)


def parts(event: Any, number: int) -> list:
    """Return the events with one multiplier each, of one whose Gaussians hold [number]."""
    is_gaussian = lambda e: isinstance(e, Gaussian)

    def pick(e, i):
        if not is_gaussian(e) or not np.ndim(e.noise_multiplier):
            return e
        return Gaussian(e.noise_multiplier[i])

    return [
        jax.tree.map(lambda e, i=i: pick(e, i), event, is_leaf=is_gaussian) for i in range(number)
    ]


def _known(where, event):
    if not isinstance(event, KINDS):
        checks.fail(where, "an event such as events.gaussian(1.1)", f"{event!r}")
    return event


def _number(where, test, **named) -> Any:
    ((name, value),) = named.items()
    if isinstance(value, jax.core.Tracer):
        return value
    array = np.asarray(value)
    if not (array.dtype.kind in "iuf" or jnp.issubdtype(array.dtype, jnp.floating)):
        checks.fail(where, f"a number {name}", f"{name}={value!r}")
    array = array.astype(np.float64)
    test(where, **{name: array})
    return array[()] if array.ndim == 0 else array


def _whole(where, **named) -> Any:
    value = _number(where, checks.require_positive, **named)
    if checks.is_concrete(value) and np.any(value != np.floor(value)):
        checks.fail(where, f"an integer {next(iter(named))}", f"{value!r}")
    return value
