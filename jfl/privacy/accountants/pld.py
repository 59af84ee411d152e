"""Epsilon by privacy-loss distributions (FFT): the tightest bound here, with the width that its
grid leaves open.

`poisson` and `without_replacement` are traceable and serve many runs in one call.  `epsilon` and
`deltas` run on the host and take any event; `epsilon` refines the grid until the width is small.
All compute in float64 whatever the caller's default, and none takes derivatives.  The module
`pld_compose` says how, and why it is a proof.
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
from . import events, pld_compose, pld_step, rdp, rdp_events

SIZES = (2**14, 2**17, 2**20)  # grids that are tried until the width is small
RELATIVE_WIDTH, ABSOLUTE_WIDTH = 1e-3, 1e-4  # a width that is small
NOISE_RANGE, MIN_RATE = (0.02, 1e6), 1e-9  # noise multipliers and sampling rates with a grid
LOWER_BOUND_DELTA_FRACTION = 1e-6  # of delta, that a lower end gives up
TAIL_DELTA_FRACTION = 1e-6  # of delta, that pays for more copies than are counted
MIN_TAIL_DELTA = 1e-20  # the same, if delta is sought
TARGET_DELTAS = (0.3, 1e-2, 1e-4, 1e-7, 1e-10, 1e-14)  # at which the grids of a curve are sharp
MAX_PARTS_ON_LARGE_GRIDS = 4  # events with more parts get a curve on coarser grids
ROUNDING = 1e-9  # relative, of an accumulated sum
MAX_COPIES = 128  # of an element in a sample
# A third of the compilation time of programs that run for milliseconds.
QUICK_COMPILATION = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
ADJACENCIES = {
    events.Poisson: "add_remove",
    events.PoissonGroup: "add_remove",
    events.Replaced: "replace_one of a Poisson sample",
    events.ZeroedOut: "zero_out",
    events.WithoutReplacement: "replace_one",
    events.Multiplicity: "replace_one",
}
NUM_SIDE_BY_SIDE = 8  # runs that are computed together
WHERE = "jfl.privacy.accountants.pld"


# --- many runs at once


def poisson(
    rate: ArrayLike, z: ArrayLike, times: ArrayLike, delta: ArrayLike, size: int = 2**14
) -> jax.Array:
    """Return epsilons of Gaussians on Poisson samples, for add_remove, proved on a grid of `size`
    points.

    It is traceable, so no values are checked; all arguments but `size` broadcast.  Beyond 1e5 times
    Renyi bounds may be smaller: take the smaller one, as `tightest.epsilon` does.

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
    """Same as `poisson`, on samples of fixed size, for replace_one.

    rate is sample / population, and z is the std over the replace_one sensitivity.

    >>> round(float(without_replacement(1 / 60, 3.0, 300, 1e-5)), 3)
    0.383
    """
    return _many("replace_one", size)(rate, z, times, delta)


@functools.cache
def _many(adjacency, size):
    def one_run(run):
        rate, z, times, delta = run
        groups = ((events.Poisson(rate[None], events.Gaussian(z[None])), times[None]),)
        ends = []
        for way in pld_step.DIRECTIONS[adjacency]:
            grid = pld_compose.plan(groups, way, size, delta)
            ends.append(_highest(pld_compose.compose_upper(groups, way, grid, size), delta))
        # no gain from sampling: this is left where a grid proves nothing
        whole = rdp.gaussian_epsilon(jnp.sqrt(_precision(groups)), delta)
        return jnp.minimum(jnp.max(jnp.stack(ends)), whole)

    def all_runs(*runs):
        shape = jnp.broadcast_shapes(*(r.shape for r in runs))
        flat = tuple(jnp.broadcast_to(r, shape).ravel() for r in runs)
        # whole batches: a rest would be compiled by itself
        width = max(1, min(NUM_SIDE_BY_SIDE, flat[0].size))
        flat = tuple(jnp.pad(r, (0, -r.size % width), mode="edge") for r in flat)
        epsilons = jax.lax.map(one_run, flat, batch_size=width)
        return epsilons[: math.prod(shape)].reshape(shape)

    return rdp.float64(all_runs)


def _highest(composed, delta):
    """Return the epsilon at `delta` that composed losses of `compose_upper` prove; inf if none."""
    epsilon = pld_step.reached(pld_step.hockey_stick, composed, delta)[1]
    return jnp.where(jnp.isnan(epsilon), jnp.inf, epsilon)


def _lowest(composed, reach, tilt, delta):
    """Return an epsilon below which the losses of `compose_lower` have more than `delta`."""
    few = LOWER_BOUND_DELTA_FRACTION * delta

    def known(composed, epsilon):
        came_back = jnp.exp(jnp.minimum(composed.stray - tilt * epsilon, 0.0))
        return pld_step.hockey_stick(composed, epsilon) - came_back - few

    first = jnp.maximum(composed.losses[0], 0.0)
    crossing = pld_step.reached(known, composed, delta)[0]
    crossing = jnp.where(
        known(composed, first) > delta, crossing - jnp.maximum(reach, -composed.losses[-1]), 0.0
    )
    return jnp.where(crossing > 0, crossing, 0.0)


# --- events


def epsilon(
    event: Any,
    delta: float,
    times: float = 1,
    sizes: Sequence[int] = SIZES,
    with_width: bool = True,
) -> tuple[float, float]:
    """Return an epsilon that is proved for `event`, `times` times, at `delta`, and its width: it is
    too large by at most this.

    The width is against the same pairs of distributions on an infinitely fine grid.  For samples of
    fixed size, with or without replacement, those pairs may be worse than any data set.  Refinement
    stops at a width of 1e-3 of epsilon + 1e-4, or at the last of `sizes`, the points of the grids.
    There the width takes half of the time: with_width=False leaves it out, and returns a larger
    one.

    Units:
        times: whole, >= 1; delta in (0, 1).

    Privacy:
        of the unit and adjacency for which the event was built; both directions of add_remove.

    Raises:
        ValueError: for a sample of a sample, two adjacencies in one event, and numbers out of
            range.

    Example:
        >>> value, width = epsilon(events.poisson(0.01, events.gaussian(1.0)), 1e-5, 1000)
        >>> 1.8277 < value < 1.8287 and 0 <= width < 0.002
        True
    """
    checks.require_positive(WHERE, times=times)
    if not 0 < delta < 1:
        checks.fail(WHERE, "delta in (0, 1)", f"{delta!r}")
    groups, adjacency, tail = _groups(event, TAIL_DELTA_FRACTION * delta / times)
    groups = tuple((part, n * float(times)) for part, n in groups)
    delta = float(delta - tail * times)
    best, floor = float(rdp.gaussian_epsilon(math.sqrt(_precision(groups)), delta)), 0.0
    small = lambda: best - floor <= RELATIVE_WIDTH * best + ABSOLUTE_WIDTH
    for size in sizes:
        grids, ends = {}, {}
        for way in pld_step.DIRECTIONS[adjacency]:
            grids[way], composed = _above(groups, way, size, delta)
            ends[way] = float(_program(_highest)(composed=composed, delta=delta))
        best = min(best, max(ends.values()))
        if size == sizes[-1] and not with_width:  # it would decide about no further grid
            break
        # the direction with more epsilon first: once the width is small, the other's lower end
        # decides nothing
        for way in sorted(ends, key=ends.__getitem__, reverse=True):
            if not small():
                lower = _program(pld_compose.compose_lower, direction=way, size=size)
                composed, reach = lower(
                    groups=groups, grid=grids[way], few=LOWER_BOUND_DELTA_FRACTION * delta
                )
                read = dict(composed=composed, reach=reach, tilt=grids[way].tilt, delta=delta)
                floor = max(floor, float(_program(_lowest)(**read)))
        if small():
            break
    return best, max(best - floor, 0.0)


def deltas(event: Any, epsilon: np.ndarray) -> np.ndarray:
    """Return deltas that are proved for an event at many epsilons at once.

    A grid is sharp around one delta, so there are several, and the smallest delta of them counts.

    Shapes:
        epsilon [n] >= 0 -> Float64[n] in [0, 1].

    Raises:
        ValueError: as `epsilon`.

    Example:
        >>> deltas(events.gaussian(1.0), np.array([0.0, 1.0])).round(4).tolist()
        [0.3829, 0.1269]
    """
    groups, adjacency, tail = _groups(event, MIN_TAIL_DELTA)
    parts = sum(len(n) for _, n in groups)
    size = max(
        SIZES[0], SIZES[1] // 2 ** math.ceil(math.log2(max(parts / MAX_PARTS_ON_LARGE_GRIDS, 1.0)))
    )
    worst = np.zeros(epsilon.shape)
    for way in pld_step.DIRECTIONS[adjacency]:
        best = np.ones(epsilon.shape)
        for target in TARGET_DELTAS:
            composed = _above(groups, way, size, target)[1]
            losses, mass, above = map(np.asarray, composed[:3])
            best = np.minimum(best, _read(losses, mass, above, epsilon))
        worst = np.maximum(worst, best)
    return np.minimum(worst + tail, 1.0)


def _read(losses, mass, extra, epsilon):
    """Return `pld_step.hockey_stick` at many epsilons: sums of positive numbers only, from the far
    end.

    Between two losses it is a straight line in e^epsilon.
    """
    interval = losses[1] - losses[0]
    # sum of mass * e^(loss_j - loss) beyond each loss j: what delta falls by, except for a factor
    with np.errstate(divide="ignore"):
        weighted = np.log(mass) - interval * np.arange(len(mass))
    beyond = np.logaddexp.accumulate(weighted[::-1])[::-1]
    beyond = np.exp(np.append(beyond[1:], -np.inf) + interval * np.arange(len(mass)))
    falls = np.expm1(interval) * beyond
    delta = (np.cumsum(falls[::-1])[::-1]) * (1 + ROUNDING) + extra
    after = np.clip(np.searchsorted(losses, epsilon, "right"), 1, len(losses) - 1)
    part = np.expm1(np.clip(epsilon - losses[after - 1], 0.0, interval)) / np.expm1(interval)
    found = delta[after - 1] + part * (delta[after] - delta[after - 1])
    # below the window nothing is known but that delta is at most 1
    return np.where((epsilon >= losses[0]) & (found < 1), found, 1.0)


def _precision(groups):
    """Return the sum of `events.precision` over groups of (event, times)."""
    return sum((events.precision(event) * times).sum() for event, times in groups)


def _above(groups, way, size, delta):
    """Return a grid that is sharp around `delta`, and the composed losses on it."""
    grid = _program(pld_compose.plan, direction=way)(groups=groups, size=size, delta=delta)
    return grid, _program(pld_compose.compose_upper, direction=way, size=size)(
        groups=groups, grid=grid
    )


@functools.cache
def _program(function, **fixed):
    """Compile `function` in float64.  Plans, compositions and readings are separate programs: a
    plan serves grids of all sizes, and a reading all events."""
    return rdp.float64(functools.partial(function, **fixed), compiler_options=_quick())


@functools.cache
def _quick():
    """Return the options of QUICK_COMPILATION that the compiler of this version knows, on a CPU."""
    if jax.default_backend() != "cpu":
        return None
    known = {}
    for name, value in QUICK_COMPILATION.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(jnp.negative, compiler_options={name: value})(0.0)
            known[name] = value
    return known


# --- from events to groups


def _groups(event, loss):
    """Return the parts of an event, equal ones counted and those of one shape stacked; the
    adjacency; and the delta, at most `loss`, by which an element is drawn more often than is
    counted."""
    event, tail = rdp_events.with_multiplicities(event, loss)
    counted, shapes, kinds = {}, {}, set()
    for part, times in _flat(event, 1.0, kinds):
        if not isinstance(part, events.Participation):  # one form for all, so that few are compiled
            part = events.Participation(1.0, events.Compose((events.Repeat(part, 1.0),)))
        leaves, shape = jax.tree.flatten(part)
        key = (shape, tuple(tuple(v.tolist()) if np.ndim(v) else float(v) for v in leaves))
        counted[key] = counted.get(key, 0.0) + times
    if len(kinds) > 1:
        checks.fail(
            WHERE,
            "one adjacency in an event",
            "poisson (add_remove) and with or without_replacement (replace_one)",
            "Use one kind of sampling throughout.",
            error=NotAnalysable,
        )
    for (shape, leaves), times in counted.items():
        shapes.setdefault((shape, tuple(map(np.size, leaves))), []).append((leaves, times))
    groups = []
    for (shape, _), rows in shapes.items():
        # Lengths are powers of two, so that a few more rounds compile nothing again; the rest
        # happens zero times.
        rows += [(rows[0][0], 0.0)] * (2 ** math.ceil(math.log2(len(rows))) - len(rows))
        leaves, times = zip(*rows)
        groups.append(
            (jax.tree.unflatten(shape, list(map(np.array, zip(*leaves)))), np.array(times))
        )
    return tuple(groups), next(iter(kinds), "add_remove"), tail


def _flat(event, times, kinds):
    """Return pairs (part, times) that compose to the event; a part is one step, or a
    Participation."""
    if isinstance(event, events.Repeat):
        return _flat(event.event, times * float(event.times), kinds)
    if isinstance(event, events.Compose):
        return [part for e in event.events for part in _flat(e, times, kinds)]
    if isinstance(event, events.Participation):
        checks.require_fraction(WHERE, probability=event.probability)
        inner = tuple(events.Repeat(part, n) for part, n in _flat(event.event, 1.0, kinds))
        return [(events.Participation(event.probability, events.Compose(inner)), times)]
    if isinstance(event, events.Gaussian):
        return [(events.Poisson(1.0, _gaussian(event.noise_multiplier)), times)]
    if type(event) in ADJACENCIES:
        kinds.add(ADJACENCIES[type(event)])
        return [(_step(event), times)]
    checks.fail(
        WHERE,
        "an event of gaussian, poisson, with or without_replacement, repeat, compose and "
        "participation",
        f"events.{type(event).__name__}",
        "No privacy-loss distribution is known here for it.",
        error=NotAnalysable,
    )


def _step(event):
    """Return a sample of Gaussians with plain numbers; the directions tell the kinds of samples
    apart, so one that has the same losses as a Poisson sample becomes one."""
    z = float(events.precision_inside(WHERE, event)) ** -0.5
    one, certain, law = _gaussian(z), 1, None
    if isinstance(event, events.WithoutReplacement):
        event = events.Poisson(event.sample / event.population, one)
    elif isinstance(event, events.Multiplicity) and event.most == 1:
        event = events.Poisson(event.law[1], one)
    if isinstance(event, events.Poisson):
        return events.Poisson(_rate(event.rate), one)
    if isinstance(event, (events.Replaced, events.ZeroedOut)):
        rates = event.rate, event.rate_when_full
    else:
        rates, law = (np.sum(event.law[1:]),), event.law
        certain = int(getattr(event, "most", len(law) - 1))
    if min(rates) >= 1 if law is None else law[certain] == 1:
        return events.Poisson(1.0, _gaussian(z / certain))  # as many copies in every sample
    if isinstance(event, events.Multiplicity) and certain > MAX_COPIES:
        checks.fail(
            WHERE,
            f"an element that is hardly ever drawn more than {MAX_COPIES} times",
            f"{certain} times",
            "Renyi bounds serve other values.",
            error=NotAnalysable,
        )
    for rate in rates:
        _rate(rate)
    return dataclasses.replace(event, event=one)


def _rate(rate):
    rate = float(rate)
    if not MIN_RATE <= rate <= 1:
        checks.fail(
            WHERE, f"a sampling rate in [{MIN_RATE:g}, 1]", f"{rate:g}", error=NotAnalysable
        )
    return rate


def _gaussian(z):
    z, (low, high) = float(z), NOISE_RANGE
    if not low <= z <= high:
        checks.fail(
            WHERE,
            f"a noise multiplier in [{low:g}, {high:g}]",
            f"{z:g}",
            "Renyi bounds serve other values.",
            error=NotAnalysable,
        )
    return events.Gaussian(z)
