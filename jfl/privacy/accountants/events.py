"""Events: what a run releases about one unit (an example or a client), as a small tree.

An event states which noise was added, to which sample, and how often.  This module only describes
events; the accountants compute their epsilon.

A noise multiplier is the standard deviation of the noise divided by the sensitivity *under the
adjacency in use*.  For replace_one the sensitivity is twice the clip norm, so an event means the
same under every adjacency.

Numbers become float64 when an event is built.  (An accountant that treated np.float32(2) and 2.0
differently would be silently wrong.)  Every event is a pytree whose leaves are its numbers, so
changing a multiplier or a number of rounds does not recompile anything.
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
# Larger groups have no event `PoissonGroup`: no guarantee is derived for them.
MAX_GROUP_SIZE = 16


@dataclass_transform(frozen_default=True)
def _event(cls: type[Class]) -> type[Class]:
    """Make a class a frozen dataclass and a pytree node."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@_event
class Gaussian:
    """One release with Gaussian noise of standard deviation noise_multiplier * sensitivity."""

    noise_multiplier: Any


@_event
class Laplace:
    """One release with Laplace noise of scale noise_multiplier * sensitivity, in the L1 norm."""

    noise_multiplier: Any


@_event
class Pure:
    """A release that is `epsilon`-private at delta = 0, about which nothing else is known."""

    epsilon: Any


@_event
class Poisson:
    """`event` on a sample that each unit joins independently with probability `rate`."""

    rate: Any
    event: Any


@_event
class PoissonGroup:
    """`event` on a Poisson sample, for a group of units.

    With probability distribution[k], k units of the group join the sample.
    """

    distribution: Any
    event: Any


@_event
class WithoutReplacement:
    """`event` on a uniform sample of `sample` distinct units out of `population`."""

    sample: Any
    population: Any
    event: Any


@_event
class Allocation:
    """`slots` rounds of `event`, in only one of which a unit participates; for add_remove.

    The round of the unit is drawn uniformly and kept secret.
    """

    slots: Any
    event: Any


@_event
class Discrete:
    """The form of `Allocation` that privacy-loss distributions use: a discrete pair.

    Outcome i has the probability present[i] if the unit participates, absent[i] if it does not, and
    the loss losses[i], ascending.  `event` is what one round releases.
    """

    losses: Any
    present: Any
    absent: Any
    event: Any


@_event
class Replaced:
    """Run `event` on a Poisson sample of limited capacity, for the adjacency replace_one.

    If more elements are drawn than the sample can hold, it is a uniform subset of those drawn.

    Attributes:
        rate: the probability that the protected unit is in the sample if the others do not fill it.
        full: the probability that the other elements fill the sample.
        rate_when_full: the probability that the protected unit is in the sample if they do.
        event: what runs on the sample.
    """

    rate: Any
    full: Any
    rate_when_full: Any
    event: Any


@_event
class ZeroedOut:
    """The same as `Replaced`, for zero_out.  A sample of fixed size has full = 1."""

    rate: Any
    full: Any
    rate_when_full: Any
    event: Any


@_event
class WithReplacement:
    """`event` on `draws` independent uniform draws from `population` units; a unit may be drawn
    again."""

    draws: Any
    population: Any
    event: Any


@_event
class Multiplicity:
    """The form of `WithReplacement` that the accountants use.

    A unit occurs k times in the sample with probability `distribution[k]`.  `most` is the largest k
    with a positive probability.
    """

    distribution: Any
    most: Any
    event: Any


@_event
class RenyiBound:
    """A release for which only Renyi bounds are known.

    For every order a > 1, its divergence is at most the minimum of slopes * a + constants.
    """

    slopes: Any
    constants: Any


@_event
class Repeat:
    """`event`, repeated `times` times with fresh randomness."""

    event: Any
    times: Any


@_event
class Compose:
    """All `events` together; later ones may depend on the releases of earlier ones."""

    events: tuple


@_event
class Series:
    """Releases that differ only in their noise multiplier.

    The Gaussians inside `event` hold multipliers [n]; release i uses the i-th of them and happens
    times[i] times.
    """

    event: Any
    times: Any


@_event
class Participation:
    """`event` with this `probability`, and otherwise nothing.

    The observer may see which of the two happened.
    """

    probability: Any
    event: Any


def gaussian(noise_multiplier: ArrayLike) -> Gaussian:
    """Return the event of one release of a sum with Gaussian noise.

    The noise has the standard deviation noise_multiplier * sensitivity in every coordinate.

    Units:
        noise_multiplier: dimensionless, > 0.

    Raises:
        ValueError: unless noise_multiplier is finite and > 0.

    Example:
        >>> bool(gaussian(np.float32(2)) == gaussian(2))
        True
    """
    return Gaussian(
        _as_float64("events.gaussian", checks.require_positive, noise_multiplier=noise_multiplier)
    )


def laplace(noise_multiplier: ArrayLike) -> Laplace:
    """Return the event of one release of a sum with Laplace noise.

    The noise has the scale noise_multiplier * sensitivity in every coordinate, where the
    sensitivity is in the L1 norm.  A release of many coordinates costs no more than one of a
    single coordinate: the Renyi divergence is convex in the shift of a coordinate and 0 without a
    shift, so shifts that add up to the sensitivity cost most in a single coordinate.

    Units:
        noise_multiplier: dimensionless, > 0.

    Raises:
        ValueError: unless noise_multiplier is finite and > 0.
    """
    return Laplace(
        _as_float64("events.laplace", checks.require_positive, noise_multiplier=noise_multiplier)
    )


def pure(epsilon: ArrayLike) -> Pure:
    """Return the event of one release that is (epsilon, 0)-differentially private.

    Raises:
        ValueError: unless epsilon is finite and >= 0.
    """
    return Pure(_as_float64("events.pure", checks.require_nonnegative, epsilon=epsilon))


def poisson(rate: ArrayLike, event: Any) -> Poisson:
    """Return the event of running `event` on a Poisson sample, for the adjacency add_remove.

    Each element joins the sample independently with probability `rate`.

    Raises:
        ValueError: unless rate is in (0, 1].
    """
    return Poisson(
        _as_float64("events.poisson", checks.require_fraction, rate=rate),
        _require_event("events.poisson", event),
    )


def poisson_group(rate: ArrayLike, size: int, event: Any) -> PoissonGroup:
    """Return `event` on a Poisson sample at `rate`, for a group of `size` units.

    Each unit joins the sample independently.  The adjacency is add_remove of the whole group; the
    noise multiplier is that of one unit.

    Units:
        rate in (0, 1], concrete.

    Raises:
        ValueError: if rate is outside that range, or unless size is an integer.

    Example:
        >>> poisson_group(0.1, 2, gaussian(1.0)).distribution.round(2).tolist()
        [0.81, 0.18, 0.01]
    """
    where = "events.poisson_group"
    checks.require_integer(where, size=size)
    rate = float(_as_float64(where, checks.require_fraction, rate=rate))
    absent = [(1 - rate) ** (size - k) for k in range(size + 1)]
    distribution = [math.comb(size, k) * rate**k * absent[k] for k in range(size + 1)]
    return PoissonGroup(np.array(distribution, np.float64), _require_event(where, event))


def without_replacement(sample: ArrayLike, population: ArrayLike, event: Any) -> WithoutReplacement:
    """Return the event of running `event` on a random sample of fixed size.

    The sample is a uniform random subset of `sample` out of `population` elements.  The guarantee
    is for the adjacency replace_one only.

    Raises:
        ValueError: unless both are integers and 1 <= sample <= population.
    """
    where = "events.without_replacement"
    sample, population = (
        _as_integer(where, sample=sample),
        _as_integer(where, population=population),
    )
    if checks.is_concrete((sample, population)) and np.any(np.greater(sample, population)):
        checks.fail(where, "sample <= population", f"sample={sample:g}, population={population:g}")
    return WithoutReplacement(sample, population, _require_event(where, event))


def allocation(slots: int, event: Any) -> Allocation:
    """Return the event of `slots` rounds, in only one of which a unit participates.

    Every round releases `event`.  The round of the unit is drawn uniformly and kept secret.  The
    adjacency is add_remove.

    Raises:
        ValueError: unless slots is an integer.
    """
    return Allocation(
        _as_integer("events.allocation", slots=slots), _require_event("events.allocation", event)
    )


def renyi_bound(slopes: ArrayLike, constants: ArrayLike) -> RenyiBound:
    """Return the event of a release for which only bounds on Renyi divergences are known.

    The divergence of order a is at most slopes[i] * a + constants[i], for every i.

    Raises:
        ValueError: unless slopes >= 0 and slopes + constants >= 0, so that no bound is negative.

    Example:
        >>> renyi_bound([0.5, 0.4], [0.0, 0.1]).slopes.tolist()  # zCDP with rho = 0.5, and another
        [0.5, 0.4]
    """
    where = "events.renyi_bound"
    slopes = np.atleast_1d(_as_float64(where, checks.require_nonnegative, slopes=slopes))
    constants = np.atleast_1d(np.asarray(constants, np.float64))
    if slopes.shape != constants.shape or not np.all(slopes + constants >= 0):
        checks.fail(
            where,
            "as many slopes as constants, and no bound below 0",
            f"slopes={slopes!r}, constants={constants!r}",
        )
    return RenyiBound(slopes, constants)


def replaced(rate: ArrayLike, event: Any) -> Replaced:
    """Return `event` on a Poisson sample, for the adjacency replace_one.

    Each element joins the sample independently with probability `rate`.

    Units:
        rate in (0, 1].

    Raises:
        ValueError: if rate is outside that range.
    """
    where = "events.replaced"
    rate = _as_float64(where, checks.require_fraction, rate=rate)
    return Replaced(rate, np.zeros_like(rate)[()], rate, _require_event(where, event))


def zeroed_out(sample: ArrayLike, population: ArrayLike, event: Any) -> ZeroedOut:
    """Return `event` on a sample of fixed size, for the adjacency zero_out only.

    The sample is a uniform random subset of `sample` out of `population` elements.

    Raises:
        ValueError: unless both are integers and 1 <= sample <= population.

    Example:
        >>> float(zeroed_out(1, 4, gaussian(1.0)).rate_when_full)
        0.25
    """
    sizes = without_replacement(sample, population, event)
    rate = sizes.sample / sizes.population
    return ZeroedOut(rate, np.ones_like(rate)[()], rate, sizes.event)


def truncated_poisson(
    rate: float, population: int, capacity: int, event: Any, adjacency: str = "zero_out"
) -> Replaced | ZeroedOut:
    """Return `event` on a Poisson sample of limited capacity.

    Each of `population` elements joins independently with probability `rate`.  If more than
    `capacity` join, a uniform subset of `capacity` elements is kept.

    Args:
        rate: in (0, 1].
        population: the number of elements that may join; assumed public.
        capacity: the maximum size of the sample.
        event: a Gaussian, or several.
        adjacency: "zero_out" or "replace_one".

    Raises:
        ValueError: if rate is outside (0, 1], or unless both numbers are integers and 1 <= capacity
            <= population.

    References:
        Ganesh, arXiv:2508.15089 (2025), for the distinction between full and other samples.
    """
    where = "events.truncated_poisson"
    checks.require_one_of(where, ("zero_out", "replace_one"), adjacency=adjacency)
    sizes = without_replacement(capacity, population, event)
    rate = _as_float64(where, checks.require_fraction, rate=rate)
    full, rate_when_full = _binomial_tails(float(rate), int(sizes.population), int(sizes.sample))
    kind = ZeroedOut if adjacency == "zero_out" else Replaced
    return kind(rate, np.float64(full), np.float64(rate_when_full), sizes.event)


def _binomial_tails(rate: float, population: int, capacity: int) -> tuple[float, float]:
    """Return the two probabilities of a Poisson sample of at most `capacity` elements.

    The first is that the other elements fill the sample; the second is that the sample then
    contains the unit.

    Example:
        >>> _binomial_tails(1.0, 10, 4)
        (1.0, 0.4)
    """
    from scipy import stats  # half a second: not at import

    full = float(stats.binom.sf(capacity - 1, population - 1, rate))
    full_with_unit = float(stats.binom.sf(capacity, population, rate)) * capacity / population
    return full, min(full_with_unit / full, rate) if full > 0 else rate


def with_replacement(draws: ArrayLike, population: ArrayLike, event: Any) -> WithReplacement:
    """Return `event` on independent uniform draws with replacement, for the adjacency replace_one.

    There are `draws` draws from `population` elements, and an element counts each time that it is
    drawn.  The noise multiplier is that of an element drawn once.

    Units:
        population: 1 / (the probability that one draw takes the element), >= 1, not necessarily an
            integer.

    Raises:
        ValueError: unless draws is an integer and population >= 1.
    """
    where = "events.with_replacement"
    draws, population = (
        _as_integer(where, draws=draws),
        _as_float64(where, checks.require_positive, population=population),
    )
    if checks.is_concrete(population) and np.any(np.less(population, 1)):
        checks.fail(where, "population >= 1", f"population={population:g}")
    return WithReplacement(draws, population, _require_event(where, event))


def repeat(event: Any, times: ArrayLike) -> Repeat:
    """Return `event`, repeated `times` times with fresh randomness.

    Later repetitions may depend on earlier releases.
    """
    return Repeat(_require_event("events.repeat", event), _as_integer("events.repeat", times=times))


def compose(*events: Any) -> Compose:
    """Return the event in which all `events` happen, in this order.

    Later ones may depend on the releases of earlier ones.
    """
    return Compose(tuple(_require_event("events.compose", e) for e in events))


def touched(rate: ArrayLike, event: Any) -> WithoutReplacement:
    """Return `event` for an element on which it depends only with probability `rate`.

    The noise multiplier covers everything that the element can change, however often it is used.
    Noise added once per round (output perturbation) is of this kind.  The adjacency is replace_one.

    Units:
        rate in (0, 1].

    References:
        Li, Wang, Wu, 2025, section III: the outputs on two neighbouring datasets are identical
        unless the element is drawn.
    """
    where = "events.touched"
    return WithoutReplacement(
        _as_float64(where, checks.require_fraction, rate=rate),
        np.float64(1.0),
        _require_event(where, event),
    )


def series(event: Any, times: ArrayLike) -> Series:
    """Return releases that differ only in their noise multiplier, as one event.

    The Gaussians inside `event` hold multipliers Float[n]; the release with the i-th multiplier
    happens times[i] times.

    Example:
        >>> import jfl.privacy.accountants.rdp_events as bounds
        >>> one = bounds.epsilon(series(gaussian(np.array([1.0, 2.0])), np.array([1, 4])), 1e-5)
        >>> one == bounds.epsilon(compose(gaussian(1.0), repeat(gaussian(2.0), 4)), 1e-5)
        True
    """
    return Series(
        _require_event("events.series", event),
        _as_float64("events.series", checks.require_nonnegative, times=times),
    )


def participation(probability: ArrayLike, event: Any) -> Participation:
    """Return the event of a record whose client participates only with some probability.

    The noise may be too small to hide a whole client, so the observer is assumed to see whether the
    client participates.  If it does, `event` happens; if not, nothing about the record is released.
    A small Renyi divergence is therefore multiplied by about `probability`.  (A Poisson sample of
    records, which the noise does hide, would multiply it by about the square.)

    Args:
        probability: in (0, 1], the probability of participation, which must not depend on the data.
        event: what is released about the record if its client participates.

    Raises:
        ValueError: if probability is outside that range.
    """
    where = "events.participation"
    return Participation(
        _as_float64(where, checks.require_fraction, probability=probability),
        _require_event(where, event),
    )


def seen(event: Any) -> Any:
    """Return the Gaussian that an event becomes if the observer knows the sample.

    A known sample amplifies nothing.

    Args:
        event: a Gaussian mechanism, or one that runs on a random sample.  An element drawn with
            replacement may be in every draw.

    Example:
        >>> (
        ...     bool(seen(poisson(0.1, gaussian(2.0))) == gaussian(2.0)),
        ...     bool(seen(with_replacement(4, 100, gaussian(2.0))) == gaussian(0.5)),
        ... )
        (True, True)
    """
    if isinstance(event, Gaussian):
        return event
    copies = event.draws if isinstance(event, WithReplacement) else 1.0
    return gaussian(seen(event.event).noise_multiplier / copies)


def of_group(event: Any, size: int) -> Any:
    """Return `event` for a group of `size` units; None if no such event is known.

    A group changes a sum by at most `size` sensitivities.
    """
    if isinstance(event, Gaussian):
        return gaussian(event.noise_multiplier / size)
    if isinstance(event, Laplace):
        return laplace(event.noise_multiplier / size)
    if isinstance(event, Pure):
        return pure(event.epsilon * size)
    if isinstance(event, Poisson) and size <= MAX_GROUP_SIZE:
        return poisson_group(event.rate, size, event.event)
    if isinstance(event, Compose):
        grouped = tuple(of_group(e, size) for e in event.events)
        return None if None in grouped else Compose(grouped)
    if isinstance(event, (Repeat, Series)):
        inner = of_group(event.event, size)
        return None if inner is None else type(event)(inner, event.times)
    return None


EVENT_TYPES = (
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


# Releases for which only a Renyi curve is known.
NOT_GAUSSIAN = (Laplace, Pure, RenyiBound)
# Events in which a unit may be absent.
SAMPLED = {
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


# --- properties of an event, for the accountants


def event_types(event: Any) -> set[type]:
    """Return the types of an event and of all events inside it."""
    inner = event.events if isinstance(event, Compose) else [getattr(event, "event", None)]
    return {type(event)}.union(*(event_types(e) for e in inner if e is not None))


def precision(event: Any) -> Any:
    """Return the sum of 1 / z^2 over the Gaussians of an event, as if nothing were sampled.

    Every unit is assumed to be in every sample, with all copies that could be drawn.  The result is
    inf if the event is not known to be at most as bad as a Gaussian.
    """
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
        copies = event.distribution.shape[-1] - 1
    return copies**2 * precision(event.event)


def weighted_precision(counts: np.ndarray, each: np.ndarray) -> np.ndarray:
    """Return counts @ each, where 0 * inf = 0: an event that never happens adds nothing.

    Args:
        counts: Float[..., n], how often each of n events happens.
        each: Float[n], the precision of each event.

    Returns:
        Float64[...].
    """
    is_known = np.isfinite(each)
    total = counts @ np.where(is_known, each, 0.0)
    return np.where((counts > 0) @ ~is_known, np.inf, total)


def precision_inside(where: str, event: Any) -> Any:
    """Return the sum of 1 / z^2 over the Gaussian mechanisms that run on a random sample.

    Here z is the noise multiplier of a mechanism.  The result counts no amplification by sampling;
    see `precision`.

    Args:
        where: the name of the caller, for error messages.
        event: an event such as `Poisson` that runs Gaussian mechanisms on a random sample.

    Raises:
        NotAnalysable: if anything else runs on the sample.
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
    """Split an event whose Gaussians hold arrays of `number` noise multipliers.

    Returns:
        A list of `number` events, each with one multiplier per Gaussian.
    """
    is_gaussian = lambda e: isinstance(e, Gaussian)

    def pick(e, i):
        if not is_gaussian(e) or not np.ndim(e.noise_multiplier):
            return e
        return Gaussian(e.noise_multiplier[i])

    return [
        jax.tree.map(lambda e, i=i: pick(e, i), event, is_leaf=is_gaussian) for i in range(number)
    ]


def _require_event(where, event):
    """Return `event`, or fail if it is not an event."""
    if not isinstance(event, EVENT_TYPES):
        checks.fail(where, "an event such as events.gaussian(1.1)", checks.short_repr(event))
    return event


def _as_float64(where, test, **named) -> Any:
    """Return the one keyword argument as float64, after `test` accepted it; traced values are
    unchanged."""
    ((name, value),) = named.items()
    if isinstance(value, jax.core.Tracer):
        return value
    array = np.asarray(value)
    if not (array.dtype.kind in "iuf" or jnp.issubdtype(array.dtype, jnp.floating)):
        checks.fail(where, f"a number {name}", f"{name}={value!r}")
    array = array.astype(np.float64)
    test(where, **{name: array})
    return array[()] if array.ndim == 0 else array


def _as_integer(where, **named) -> Any:
    """Return the one keyword argument as float64, and fail unless it is a positive integer."""
    value = _as_float64(where, checks.require_positive, **named)
    if checks.is_concrete(value) and np.any(value != np.floor(value)):
        checks.fail(where, f"an integer {next(iter(named))}", f"{value!r}")
    return value
