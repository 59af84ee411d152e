"""Epsilon by privacy loss distributions (FFT): the tightest here, with the width of what its grid
leaves open.

`upper` and `lower` are traceable, for events whose numbers are arrays; `poisson` and
`without_replacement` are one call for many runs; the others run on the host, take any event, and
refine the grid until the width is small.  All compute in float64 whatever the caller's default.
How, and why it is a proof: `pld_compose`.
"""

import contextlib
import dataclasses
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
from . import events, pld_compose, pld_step, rdp, rdp_events

SIZES = (2**14, 2**17, 2**20)  # grids tried until the width is small
RELATIVE, ABSOLUTE = 1e-3, 1e-4  # width that is small
NOISE, RATE = (0.02, 1e6), 1e-9  # z and rates that are taken
FEW = 1e-6  # of delta, which a lower end gives up
RARE = 1e-6  # of delta, for more copies than are counted
LEAST = 1e-20  # of the same, where delta is sought
TARGETS = (0.3, 1e-2, 1e-4, 1e-7, 1e-10, 1e-14)  # deltas around which a curve is sharp
FEW_PARTS = 4  # of an event, beyond which the grids of a curve are coarser
ACCUMULATED = 1e-9  # of a sum, at most, that rounding takes
COPIES = 128  # of an element in a sample, at most
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}  # a third of the compilation of what runs for milliseconds
ADJACENCIES = {
    events.Poisson: "add_remove",
    events.PoissonGroup: "add_remove",
    events.Replaced: "replace_one of a Poisson sample",
    events.ZeroedOut: "zero_out",
    events.WithoutReplacement: "replace_one",
    events.Multiplicity: "replace_one",
}
WIDE = 8  # runs that are computed side by side


def _wide(function):
    @functools.wraps(function)
    def wide(groups, direction, delta, size, grid=None):
        with in_float64():
            groups, delta, grid = jax.tree.map(
                lambda v: jnp.asarray(v, jnp.float64), (groups, delta, grid)
            )
            # a grid does not move when slopes are taken: what it proves does
            still = jax.lax.stop_gradient((groups, delta, grid))
            grid = (
                pld_compose.plan(still[0], direction, size, still[1]) if grid is None else still[2]
            )
            return function(groups, direction, delta, size, grid)

    return wide


@_wide
def upper(groups: Any, direction: str, delta: ArrayLike, size: int, grid: Any = None) -> jax.Array:
    """Traceable: the epsilon at `delta` that a grid of `size` points proves for one direction; inf
    if none.

    Slopes need `jax.enable_x64(True)` around them: on the way back a spectrum follows the caller's
    default.
    """
    return _highest(pld_compose.compose_upper(groups, direction, grid, size), delta)


@_wide
def lower(groups: Any, direction: str, delta: ArrayLike, size: int, grid: Any = None) -> jax.Array:
    """Traceable, as `upper`: an epsilon below which the same distribution has more than `delta`."""
    composed, reach = pld_compose.compose_lower(groups, direction, grid, size, FEW * delta)
    return _lowest(composed, reach, grid.tilt, delta)


def _highest(composed, delta):
    epsilon = pld_step.reached(pld_step.hockey_stick, composed, delta)[1]
    return jnp.where(jnp.isnan(epsilon), jnp.inf, epsilon)


def _lowest(composed, reach, tilt, delta):
    few = FEW * delta

    def known(composed, epsilon):
        came_back = jnp.exp(jnp.minimum(composed.stray - tilt * epsilon, 0.0))
        return pld_step.hockey_stick(composed, epsilon) - came_back - jax.lax.stop_gradient(few)

    first = jnp.maximum(composed.losses[0], 0.0)
    crossing = pld_step.reached(known, composed, delta)[0]
    crossing = jnp.where(
        known(composed, first) > delta, crossing - jnp.maximum(reach, -composed.losses[-1]), 0.0
    )
    return jnp.where(crossing > 0, crossing, 0.0)


# --- many runs at once


def poisson(
    rate: ArrayLike, z: ArrayLike, times: ArrayLike, delta: ArrayLike, size: int = 2**14
) -> jax.Array:
    """Epsilon of Gaussians on Poisson samples, for add_remove, proved on a grid of `size` points.

    It is traceable, so no values are checked; all arguments but `size` broadcast.  Slopes in all
    but `size` are as right as the value; those in `times` are as if there were parts of a step.
    Beyond 1e5 times Renyi bounds may be smaller: take the smaller one, as `tightest.epsilon` does.

    Args:
        rate: [...], the probability of an element, in (0, 1].
        z: [...], noise multiplier, std over sensitivity.
        times: [...], how many releases.
        delta: [...], in (0, 1).
        size: points of the grid; 2^14 is within 1e-3 of the limit for times up to about 1e4.

    Returns:
        Float64[...], the epsilon.

    Example:
        >>> round(float(poisson(0.01, 1.0, 1000, 1e-5)), 3)
        1.828
    """
    return _many("add_remove", size)(rate, z, times, delta)


def without_replacement(
    rate: ArrayLike, z: ArrayLike, times: ArrayLike, delta: ArrayLike, size: int = 2**14
) -> jax.Array:
    """As `poisson`, on samples of fixed size, for replace_one.

    rate is sample / population, and z is the std over the replace_one sensitivity.

    >>> round(float(without_replacement(1 / 60, 3.0, 300, 1e-5)), 3)
    0.383
    """
    return _many("replace_one", size)(rate, z, times, delta)


@functools.cache
def _many(adjacency, size):
    def proved(rate, z, times, delta):
        groups = ((events.Poisson(rate[None], events.Gaussian(z[None])), times[None]),)
        epsilons_of_directions = [
            upper(groups, d, delta, size) for d in pld_step.DIRECTIONS[adjacency]
        ]
        # no gain from sampling: what is left where a grid proves nothing
        whole = rdp.gaussian_epsilon(jnp.sqrt(pld_compose.total_precision(groups)), delta)
        return jnp.minimum(jnp.max(jnp.stack(epsilons_of_directions)), whole)

    one = jax.custom_jvp(proved)

    @one.defjvp
    def _(run, tangents) -> Any:
        # forward, whatever the caller does: what proves nothing would turn to nan on the way back
        slopes, value = jax.jacfwd(lambda *run: 2 * (proved(*run),), range(4), has_aux=True)(*run)
        return value, sum(map(jnp.multiply, slopes, tangents))

    def all_runs(*runs):
        shape = jnp.broadcast_shapes(*(r.shape for r in runs))
        flat = tuple(jnp.broadcast_to(r, shape).ravel() for r in runs)
        width = max(1, min(WIDE, flat[0].size))  # whole batches, or the rest is compiled by itself
        flat = tuple(jnp.pad(r, (0, -r.size % width), mode="edge") for r in flat)
        epsilons_of_runs = jax.lax.map(lambda run: one(*run), flat, batch_size=width)
        return epsilons_of_runs[: math.prod(shape)].reshape(shape)

    return rdp.float64(all_runs)


# --- events


def epsilon(event: Any, delta: ArrayLike) -> tuple[float, float]:
    """`pld_epsilon` of an event that happens once."""
    return pld_epsilon(event, 1, delta)


def pld_epsilon(
    event: Any, times: ArrayLike, delta: ArrayLike, sizes: Sequence[int] = SIZES
) -> tuple[Any, Any]:
    """An epsilon that is proved for `event`, `times` times, at `delta`; and its width: at most so
    much is too much.

    The width is against the same pairs of distributions on an infinitely fine grid.  For samples of
    fixed size, with or without replacement, those pairs may be worse than any data set.  Refinement
    stops at 1e-3 of epsilon + 1e-4, or at the last of `sizes`, the points of the grids.

    Shapes:
        times and delta may be arrays, which broadcast: then so is the result.

    Units:
        times: whole, >= 1; delta in (0, 1).

    Privacy:
        of the unit and adjacency for which the event was built; both directions of add_remove.

    Raises:
        ValueError: for a sample of a sample, two adjacencies in one event, and numbers out of
            range.

    Example:
        >>> value, width = pld_epsilon(events.poisson(0.01, events.gaussian(1.0)), 1000, 1e-5)
        >>> 1.8277 < value < 1.8287 and 0 <= width < 0.002
        True
    """
    times, delta = np.broadcast_arrays(np.asarray(times, np.float64), np.asarray(delta, np.float64))
    checks.positive("pld_epsilon", times=times)
    if not np.all((delta > 0) & (delta < 1)):
        checks.fail("pld_epsilon", "delta in (0, 1)", f"{delta!r}")
    groups, adjacency, rare = _groups(event, RARE * np.min(delta) / np.max(times))
    bounds = np.array(
        [
            _refine(groups, adjacency, t, d - rare * t, sizes)
            for t, d in zip(times.ravel(), delta.ravel())
        ]
    )
    bounds = bounds.reshape(*times.shape, 2)
    return (bounds[..., 0], bounds[..., 1]) if times.ndim else tuple(map(float, bounds))


def epsilons(event: Any, times: ArrayLike, delta: float) -> np.ndarray:
    """An epsilon that is proved for `event` after each of many numbers of times: `pld_epsilon`
    without its last grid.

    Shapes:
        times [n] -> Float64[n].

    Raises:
        ValueError: as `pld_epsilon`.

    Example:
        >>> epsilons(events.poisson(0.01, events.gaussian(1.0)), [10, 1000], 1e-5).round(2).tolist()
        [0.38, 1.83]
    """
    checks.positive("pld.epsilons", times=times)
    if not 0 < delta < 1:
        checks.fail("pld.epsilons", "delta in (0, 1)", f"{delta!r}")
    groups, adjacency, rare = _groups(event, RARE * delta / np.max(times))
    return np.array(
        [
            _refine(groups, adjacency, float(t), delta - rare * float(t), SIZES[:-1])[0]
            for t in np.asarray(times)
        ]
    )


def delta(event: Any, epsilon: ArrayLike, times: float = 1, size: int = 2**17) -> float:
    """A delta that is proved at `epsilon` >= 0 for `event`, `times` times.

    Raises:
        ValueError: as `pld_epsilon`.

    Example:
        >>> value = delta(events.gaussian(1.0), 1.0)
        >>> 0.126936 < value < 0.126938
        True
    """
    checks.nonnegative("pld.delta", epsilon=epsilon)
    checks.positive("pld.delta", times=times)
    groups, adjacency, rare = _groups(event, LEAST / float(times))
    groups = tuple((part, n * float(times)) for part, n in groups)
    largest = max(
        float(
            _program(_most)(composed=_above(groups, way, size, epsilon=epsilon)[1], epsilon=epsilon)
        )
        for way in pld_step.DIRECTIONS[adjacency]
    )
    return min(largest + rare * float(times), 1.0)


def deltas(event: Any, epsilon: np.ndarray, times: float = 1.0) -> np.ndarray:
    """Deltas that are proved at many epsilons at once, for `event`, `times` times.

    A grid is sharp around one delta, so there are several, and the smallest delta of them counts.

    Shapes:
        epsilon [n] >= 0 -> Float64[n] in [0, 1].

    Raises:
        ValueError: as `pld_epsilon`.

    Example:
        >>> deltas(events.gaussian(1.0), np.array([0.0, 1.0])).round(4).tolist()
        [0.3829, 0.1269]
    """
    checks.positive("pld.deltas", times=times)
    groups, adjacency, rare = _groups(event, LEAST / float(times))
    groups = tuple((part, n * float(times)) for part, n in groups)
    parts = sum(len(n) for _, n in groups)
    size = max(SIZES[0], SIZES[1] // 2 ** math.ceil(math.log2(max(parts / FEW_PARTS, 1.0))))
    worst = np.zeros(epsilon.shape)
    for way in pld_step.DIRECTIONS[adjacency]:
        best = np.ones(epsilon.shape)
        for target in TARGETS:
            composed = _above(groups, way, size, delta=target)[1]
            losses, mass, above = map(np.asarray, composed[:3])
            best = np.minimum(best, _read(losses, mass, above, epsilon))
        worst = np.maximum(worst, best)
    return np.minimum(worst + rare * float(times), 1.0)


def _read(losses, mass, extra, epsilon):
    """`pld_step.hockey_stick` at many epsilons: sums of positive numbers alone, from the far end.

    Between two losses it is a straight line in e^epsilon.
    """
    interval = losses[1] - losses[0]
    # sum of mass * e^(loss_j - loss) beyond each loss j: what delta falls by, but for a factor
    with np.errstate(divide="ignore"):
        weighted = np.log(mass) - interval * np.arange(len(mass))
    beyond = np.logaddexp.accumulate(weighted[::-1])[::-1]
    beyond = np.exp(np.append(beyond[1:], -np.inf) + interval * np.arange(len(mass)))
    falls = np.expm1(interval) * beyond
    delta = (np.cumsum(falls[::-1])[::-1]) * (1 + ACCUMULATED) + extra
    after = np.clip(np.searchsorted(losses, epsilon, "right"), 1, len(losses) - 1)
    part = np.expm1(np.clip(epsilon - losses[after - 1], 0.0, interval)) / np.expm1(interval)
    found = delta[after - 1] + part * (delta[after] - delta[after - 1])
    # below the window nothing is known but that delta is at most 1
    return np.where((epsilon >= losses[0]) & (found < 1), found, 1.0)


def _refine(groups, adjacency, times, delta, sizes=SIZES):
    groups = tuple((part, n * times) for part, n in groups)
    precision = sum(np.sum(events.precision(event) * n) for event, n in groups)
    best, floor = float(rdp.gaussian_epsilon(math.sqrt(precision), delta)), 0.0
    small = lambda: best - floor <= RELATIVE * best + ABSOLUTE
    for size in sizes:
        grids, ends = {}, {}
        for way in pld_step.DIRECTIONS[adjacency]:
            grids[way], composed = _above(groups, way, size, delta=delta)
            ends[way] = float(_program(_highest)(composed=composed, delta=delta))
        best = min(best, max(ends.values()))
        # the direction with more epsilon first: once the width is small, the other's lower end
        # decides nothing
        for way in sorted(ends, key=ends.__getitem__, reverse=True):
            if not small():
                lower = _program(pld_compose.compose_lower, direction=way, size=size)
                composed, reach = lower(groups=groups, grid=grids[way], few=FEW * delta)
                read = dict(composed=composed, reach=reach, tilt=grids[way].tilt, delta=delta)
                floor = max(floor, float(_program(_lowest)(**read)))
        if small():
            break
    return best, max(best - floor, 0.0)


def _above(groups, way, size, **budget):
    grid = _program(pld_compose.plan, direction=way)(groups=groups, size=size, **budget)
    return grid, _program(pld_compose.compose_upper, direction=way, size=size)(
        groups=groups, grid=grid
    )


def _most(composed, epsilon):
    value = pld_step.hockey_stick(composed, epsilon)
    # below the window nothing is known but that delta is at most 1
    return jnp.where((epsilon >= composed.losses[0]) & (value < 1), value, 1.0)


@functools.cache
def _program(function, **fixed):
    """`function` in float64.  Plans, compositions and readings are compiled apart: a plan serves
    grids of all sizes, and a reading all events."""
    return rdp.float64(functools.partial(function, **fixed), compiler_options=_quick())


@functools.cache
def _quick():
    """What of `QUICK` the compiler of this version knows, on a CPU."""
    if jax.default_backend() != "cpu":
        return None
    known = {}
    for name, value in QUICK.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(jnp.negative, compiler_options={name: value})(0.0)
            known[name] = value
    return known


def _groups(event, loss):
    """The parts of an event, equal ones counted, those of one shape stacked; the adjacency; and
    what of delta it takes, at most `loss`, that an element is drawn more often than is counted."""
    event, rare = rdp_events.with_multiplicities(event, loss)
    counted, shapes, kinds = {}, {}, set()
    for part, times in _flat(event, 1.0, kinds):
        if not isinstance(part, events.Participation):  # one form for all, so that few are compiled
            part = events.Participation(1.0, events.Compose((events.Repeat(part, 1.0),)))
        leaves, shape = jax.tree.flatten(part)
        key = (shape, tuple(tuple(v.tolist()) if np.ndim(v) else float(v) for v in leaves))
        counted[key] = counted.get(key, 0.0) + times
    if len(kinds) > 1:
        checks.fail(
            "pld_epsilon",
            "one adjacency in an event",
            "poisson (add_remove) and with or without_replacement (replace_one)",
            "Use one kind of sampling throughout.",
            error=NotAnalysable,
        )
    for (shape, leaves), times in counted.items():
        shapes.setdefault((shape, tuple(map(np.size, leaves))), []).append((leaves, times))
    groups = []
    for (shape, _), rows in shapes.items():
        # lengths that are powers of two, so that a few more rounds compile nothing anew: nothing,
        # zero times
        rows += [(rows[0][0], 0.0)] * (2 ** math.ceil(math.log2(len(rows))) - len(rows))
        leaves, times = zip(*rows)
        groups.append(
            (jax.tree.unflatten(shape, list(map(np.array, zip(*leaves)))), np.array(times))
        )
    return tuple(groups), next(iter(kinds), "add_remove"), rare


def _flat(event, times, kinds):
    """(part, times) that compose to the event; a part is a Gaussian on a sample of any kind, or a
    Participation."""
    if isinstance(event, events.Repeat):
        return _flat(event.event, times * float(event.times), kinds)
    if isinstance(event, events.Compose):
        return [part for e in event.events for part in _flat(e, times, kinds)]
    if isinstance(event, events.Participation):
        checks.fraction("pld_epsilon", probability=event.probability)
        inner = tuple(events.Repeat(part, n) for part, n in _flat(event.event, 1.0, kinds))
        return [(events.Participation(event.probability, events.Compose(inner)), times)]
    if isinstance(event, events.Gaussian):
        return [(events.Poisson(1.0, _gaussian(event)), times)]
    if type(event) in ADJACENCIES:
        kinds.add(ADJACENCIES[type(event)])
        for inner in _leaves(event.event):
            if not isinstance(inner, events.Gaussian):
                name = (
                    "WithReplacement"
                    if isinstance(event, events.Multiplicity)
                    else type(event).__name__
                )
                checks.fail(
                    "pld_epsilon",
                    f"Gaussians inside events.{name}",
                    f"events.{type(inner).__name__}",
                    "Sample once; use participation for the clients.",
                    error=NotAnalysable,
                )
        one = _gaussian(events.Gaussian(float(events.precision(event.event)) ** -0.5))
        if isinstance(event, events.Multiplicity):
            return [(_copies(event, one), times)]
        if isinstance(event, events.PoissonGroup):
            return [(_group(event, one), times)]
        if isinstance(event, (events.Replaced, events.ZeroedOut)):
            return [(_on_shared(event, one), times)]
        return [
            (
                _sampled(
                    event.rate
                    if isinstance(event, events.Poisson)
                    else event.sample / event.population,
                    one,
                ),
                times,
            )
        ]
    checks.fail(
        "pld_epsilon",
        "an event of gaussian, poisson, with or without_replacement, repeat, compose and "
        "participation",
        f"events.{type(event).__name__}",
        "No privacy loss distribution is known here for it.",
        error=NotAnalysable,
    )


def _sampled(rate, one):
    rate = float(rate)
    if not RATE <= rate <= 1:
        checks.fail(
            "pld_epsilon", f"a sampling rate in [{RATE:g}, 1]", f"{rate:g}", error=NotAnalysable
        )
    return events.Poisson(rate, one)  # directions tell the kinds apart


def _on_shared(event, one):
    """As it is, or a Gaussian where the unit is always in the sample."""
    if min(float(rate) for name, rate in vars(event).items() if name.startswith("rate")) < 1:
        for name, rate in vars(event).items():
            if name.startswith("rate"):
                _sampled(rate, one)
        return dataclasses.replace(event, event=one)
    return events.Poisson(1.0, one)


def _group(event, one):
    """As a Gaussian of more sensitivity, where all units always join."""
    most = len(event.law) - 1
    if event.law[0] == 0:
        return events.Poisson(1.0, _gaussian(events.Gaussian(one.noise_multiplier / most)))
    _sampled(np.sum(event.law[1:]), one)
    return events.PoissonGroup(np.asarray(event.law), one)


def _copies(event, one):
    """As a sample of one, or a Gaussian of more sensitivity, where the law leaves no other number
    of copies."""
    if event.most == 1:
        return _sampled(event.law[1], one)
    if event.law[int(event.most)] == 1:
        return events.Poisson(
            1.0, _gaussian(events.Gaussian(one.noise_multiplier / float(event.most)))
        )
    if event.most > COPIES:
        checks.fail(
            "pld_epsilon",
            f"an element that is hardly ever drawn more than {COPIES} times",
            f"{event.most:g} times",
            "Renyi bounds serve other values.",
            error=NotAnalysable,
        )
    _sampled(np.sum(event.law[1:]), one)
    return events.Multiplicity(np.asarray(event.law), float(event.most), one)


def _leaves(event):
    if isinstance(event, events.Repeat):
        return _leaves(event.event)
    return (
        [x for e in event.events for x in _leaves(e)]
        if isinstance(event, events.Compose)
        else [event]
    )


def _gaussian(event):
    z = float(event.noise_multiplier)
    if not NOISE[0] <= z <= NOISE[1]:
        checks.fail(
            "pld_epsilon",
            f"a noise multiplier in [{NOISE[0]:g}, {NOISE[1]:g}]",
            f"{z:g}",
            "Renyi bounds serve other values.",
            error=NotAnalysable,
        )
    return events.Gaussian(z)
