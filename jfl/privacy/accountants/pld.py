"""Epsilon by privacy-loss distributions (PLD, by FFT): the tightest bound here, with its error.

`poisson` and `without_replacement` are traceable and compute many runs in one call.  `epsilon` and
`deltas` run on the host and take any event; `epsilon` refines the grid until the width is small.
The width is the part of an epsilon that may be due to the grid.  Everything is computed in float64,
whatever JAX's default type, and has no derivatives.  The module `pld_compose` explains the method,
and why it is a proof.
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
from . import allocation, events, pld_compose, pld_step, rdp, rdp_events

# The sizes of grids that are tried until the width is small.
SIZES = (2**14, 2**17, 2**20)
# A width is small if it is at most RELATIVE_WIDTH * epsilon + ABSOLUTE_WIDTH.
RELATIVE_WIDTH, ABSOLUTE_WIDTH = 1e-3, 1e-4
# The noise multipliers and the smallest sampling rate that a grid can represent.
NOISE_RANGE, MIN_RATE = (0.02, 1e6), 1e-9
# The fraction of delta by which a lower bound may fail.
LOWER_BOUND_DELTA_FRACTION = 1e-6
# The fraction of delta that pays for more copies of an element than are counted, and the delta that
# does so if delta itself is sought.
TAIL_DELTA_FRACTION, MIN_TAIL_DELTA = 1e-6, 1e-20
# The deltas around which the grids of a curve are sharp.
TARGET_DELTAS = (0.3, 1e-2, 1e-4, 1e-7, 1e-10, 1e-14)
# The curve of an event with more parts is computed on coarser grids.
MAX_PARTS_ON_LARGE_GRIDS = 4
# The relative rounding error of an accumulated sum.
ROUNDING = 1e-9
# The maximum number of copies of an element in a sample.
MAX_COPIES = 128
# Programs that run for milliseconds compile in a third of the time with these options.
QUICK_COMPILATION = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
ADJACENCIES = {
    events.Poisson: "add_remove",
    events.PoissonGroup: "add_remove",
    events.Allocation: "add_remove",
    events.Replaced: "replace_one of a Poisson sample",
    events.ZeroedOut: "zero_out",
    events.WithoutReplacement: "replace_one",
    events.Multiplicity: "replace_one",
}
NUM_SIDE_BY_SIDE = 8  # number of runs that are computed in parallel
WHERE = "jfl.privacy.accountants.pld"


# --- many runs at once


def poisson(
    rate: ArrayLike, z: ArrayLike, times: ArrayLike, delta: ArrayLike, size: int = 2**14
) -> jax.Array:
    """Return epsilons of the Poisson-subsampled Gaussian mechanism, for add_remove.

    They are upper bounds, computed with privacy-loss distributions on a grid of `size` points.  The
    function is traceable, so it does not check values; all arguments except `size` broadcast.  For
    more than 1e5 releases Renyi bounds may be smaller: take the minimum of both, as
    `tightest.epsilon` does.

    Args:
        rate: [...], the probability that an element joins a sample, in (0, 1].
        z: [...], the noise multiplier, std / sensitivity.
        times: [...], the number of releases.
        delta: [...], in (0, 1).
        size: the number of grid points.  With 2^14, the result is within 1e-3 of the limit of an
            infinitely fine grid for up to about 1e4 releases.

    Returns:
        Float64[...], the epsilon.

    Example:
        >>> round(float(poisson(0.01, 1.0, 1000, 1e-5)), 3)
        1.828
    """
    return _compiled_many("add_remove", size)(rate, z, times, delta)


def without_replacement(
    rate: ArrayLike, z: ArrayLike, times: ArrayLike, delta: ArrayLike, size: int = 2**14
) -> jax.Array:
    """Return epsilons of the Gaussian mechanism on samples of fixed size, for replace_one.

    They are computed as in `poisson`.

    Args:
        rate: [...], sample size / population size.
        z: [...], the noise multiplier, std / (the replace_one sensitivity).
        times, delta, size: as in `poisson`.

    Returns:
        Float64[...], the epsilon.

    Example:
        >>> round(float(without_replacement(1 / 60, 3.0, 300, 1e-5)), 3)
        0.383
    """
    return _compiled_many("replace_one", size)(rate, z, times, delta)


@functools.cache
def _compiled_many(adjacency, size):
    """Return the compiled function (rate, z, times, delta) -> epsilons of an adjacency and a grid
    size."""

    def one_run(run):
        rate, z, times, delta = run
        groups = ((events.Poisson(rate[None], events.Gaussian(z[None])), times[None]),)
        ends = []
        for direction in pld_step.DIRECTIONS[adjacency]:
            grid = pld_compose.plan(groups, direction, size, delta)
            ends.append(
                _upper_epsilon(pld_compose.compose_upper(groups, direction, grid, size), delta)
            )
        # Without amplification by sampling; this bound remains if the grid proves nothing.
        unsampled = rdp.gaussian_epsilon(jnp.sqrt(_precision(groups)), delta)
        return jnp.minimum(jnp.max(jnp.stack(ends)), unsampled)

    def all_runs(*runs):
        shape = jnp.broadcast_shapes(*(r.shape for r in runs))
        flat = tuple(jnp.broadcast_to(r, shape).ravel() for r in runs)
        # Pad to full batches, because a partial batch would be compiled separately.
        width = max(1, min(NUM_SIDE_BY_SIDE, flat[0].size))
        flat = tuple(jnp.pad(r, (0, -r.size % width), mode="edge") for r in flat)
        epsilons = jax.lax.map(one_run, flat, batch_size=width)
        return epsilons[: math.prod(shape)].reshape(shape)

    return rdp.float64(all_runs)


def _upper_epsilon(composed, delta):
    """Return the epsilon that the losses of `compose_upper` prove at `delta`; inf if they prove
    none."""
    epsilon = pld_step.bracket_level(pld_step.hockey_stick, composed, delta)[1]
    return jnp.where(jnp.isnan(epsilon), jnp.inf, epsilon)


def _lower_epsilon(composed, max_offset, tilt, delta):
    """Return a lower bound on epsilon at `delta`, from the losses of `compose_lower`.

    Args:
        composed, max_offset: the results of `compose_lower`.
        tilt: the tilt of its grid.
        delta: [], in (0, 1).
    """
    failure_probability = LOWER_BOUND_DELTA_FRACTION * delta

    def lower_delta(composed, epsilon):
        wrapped_around = jnp.exp(jnp.minimum(composed.stray - tilt * epsilon, 0.0))
        return pld_step.hockey_stick(composed, epsilon) - wrapped_around - failure_probability

    first = jnp.maximum(composed.losses[0], 0.0)
    crossing = pld_step.bracket_level(lower_delta, composed, delta)[0]
    crossing = jnp.where(
        lower_delta(composed, first) > delta,
        crossing - jnp.maximum(max_offset, -composed.losses[-1]),
        0.0,
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
    """Return an epsilon that is proved for `event` at `delta`, and its width.

    An infinitely fine grid would lower the epsilon by at most the width.  (For samples of fixed
    size, with or without replacement, the true epsilon may be smaller still, because the dominating
    pairs may be worse than any dataset; and for random allocation, because the module `allocation`
    rounds the losses of an epoch before.)  Refinement stops at a width of 1e-3 * epsilon + 1e-4, or
    at the last size.

    Args:
        event: a composition of Gaussians, possibly sampled.
        delta: in (0, 1).
        times: how often the event is repeated, an integer >= 1.
        sizes: the numbers of grid points to try, ascending.
        with_width: False to skip the width on the last grid, which saves half of the time there;
            the returned width is then an upper bound.

    Privacy:
        Epsilon is for the unit and adjacency for which the event was built; it covers both
        directions of add_remove.

    Raises:
        ValueError: for a sample of a sample, for two adjacencies in one event, or for numbers out
            of range.

    Example:
        >>> value, width = epsilon(events.poisson(0.01, events.gaussian(1.0)), 1e-5, 1000)
        >>> 1.8277 < value < 1.8287 and 0 <= width < 0.002
        True
    """
    checks.require_positive(WHERE, times=times)
    if not 0 < delta < 1:
        checks.fail(WHERE, "delta in (0, 1)", f"{delta!r}")
    groups, adjacency, tail = _group_parts(event, TAIL_DELTA_FRACTION * delta / times)
    groups = tuple((part, n * float(times)) for part, n in groups)
    delta = float(delta - tail * times)
    best, floor = float(rdp.gaussian_epsilon(math.sqrt(_precision(groups)), delta)), 0.0
    is_narrow = lambda: best - floor <= RELATIVE_WIDTH * best + ABSOLUTE_WIDTH
    for size in sizes:
        grids, ends = {}, {}
        for direction in pld_step.DIRECTIONS[adjacency]:
            grids[direction], composed = _compose_upper(groups, direction, size, delta)
            ends[direction] = float(_compile(_upper_epsilon)(composed=composed, delta=delta))
        best = min(best, max(ends.values()))
        if size == sizes[-1] and not with_width:  # the width would not select another grid
            break
        # Take the direction with the larger epsilon first: once its width is small, the lower bound
        # of the other direction is not needed.
        for direction in sorted(ends, key=ends.__getitem__, reverse=True):
            if not is_narrow():
                lower = _compile(pld_compose.compose_lower, direction=direction, size=size)
                composed, max_offset = lower(
                    groups=groups,
                    grid=grids[direction],
                    failure_probability=LOWER_BOUND_DELTA_FRACTION * delta,
                )
                end = _compile(_lower_epsilon)(
                    composed=composed,
                    max_offset=max_offset,
                    tilt=grids[direction].tilt,
                    delta=delta,
                )
                floor = max(floor, float(end))
        if is_narrow():
            break
    return best, max(best - floor, 0.0)


def deltas(event: Any, epsilon: np.ndarray) -> np.ndarray:
    """Return the deltas that are proved for an event at many epsilons at once.

    A grid is accurate around one delta only, so several grids are computed, and the smallest delta
    is returned.

    Args:
        event: a composition of Gaussians, possibly sampled.
        epsilon: Float[n] >= 0.

    Returns:
        Float64[n] in [0, 1].

    Raises:
        ValueError: as in `epsilon`.

    Example:
        >>> deltas(events.gaussian(1.0), np.array([0.0, 1.0])).round(4).tolist()
        [0.3829, 0.1269]
    """
    groups, adjacency, tail = _group_parts(event, MIN_TAIL_DELTA)
    parts = sum(len(n) for _, n in groups)
    size = max(
        SIZES[0], SIZES[1] // 2 ** math.ceil(math.log2(max(parts / MAX_PARTS_ON_LARGE_GRIDS, 1.0)))
    )
    worst = np.zeros(epsilon.shape)
    for direction in pld_step.DIRECTIONS[adjacency]:
        best = np.ones(epsilon.shape)
        for target in TARGET_DELTAS:
            composed = _compose_upper(groups, direction, size, target)[1]
            losses, mass, above = map(np.asarray, composed[:3])
            best = np.minimum(best, _deltas_of_composed(losses, mass, above, epsilon))
        worst = np.maximum(worst, best)
    return np.minimum(worst + tail, 1.0)


def _deltas_of_composed(losses, mass, extra, epsilon):
    """Return `pld_step.hockey_stick` at many epsilons.

    The sums run from the largest loss downwards, so they add only positive numbers.  Between two
    losses delta is linear in e^epsilon.

    Args:
        losses, mass, extra: fields of `pld_compose.Composed`.
        epsilon: Float[n].
    """
    interval = losses[1] - losses[0]
    # For each loss j, the sum of mass * e^(loss_j - loss) over larger losses.  Times
    # (e^interval - 1), it is the decrease of delta from loss j to the next one.
    with np.errstate(divide="ignore"):
        weighted = np.log(mass) - interval * np.arange(len(mass))
    beyond = np.logaddexp.accumulate(weighted[::-1])[::-1]
    beyond = np.exp(np.append(beyond[1:], -np.inf) + interval * np.arange(len(mass)))
    decreases = np.expm1(interval) * beyond
    delta = (np.cumsum(decreases[::-1])[::-1]) * (1 + ROUNDING) + extra
    after = np.clip(np.searchsorted(losses, epsilon, "right"), 1, len(losses) - 1)
    part = np.expm1(np.clip(epsilon - losses[after - 1], 0.0, interval)) / np.expm1(interval)
    interpolated = delta[after - 1] + part * (delta[after] - delta[after - 1])
    # Below the window, nothing is known except that delta is at most 1.
    return np.where((epsilon >= losses[0]) & (interpolated < 1), interpolated, 1.0)


def _precision(groups):
    """Return the sum of `events.precision` over all groups."""
    return sum((events.precision(event) * times).sum() for event, times in groups)


def _compose_upper(groups, direction, size, delta):
    """Return a grid that is sharp around `delta`, and the pessimistic composed losses on it."""
    grid = _compile(pld_compose.plan, direction=direction)(groups=groups, size=size, delta=delta)
    return grid, _compile(pld_compose.compose_upper, direction=direction, size=size)(
        groups=groups, grid=grid
    )


@functools.cache
def _compile(function, **fixed):
    """Return `function` compiled for float64, with the arguments `fixed` bound.

    Planning, composing and reading are separate programs: one plan serves grids of all sizes, and
    one reading serves all events.
    """
    return rdp.float64(functools.partial(function, **fixed), compiler_options=_compiler_options())


@functools.cache
def _compiler_options():
    """Return the options of QUICK_COMPILATION that this version of the compiler knows, on a CPU."""
    if jax.default_backend() != "cpu":
        return None
    known = {}
    for name, value in QUICK_COMPILATION.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(jnp.negative, compiler_options={name: value})(0.0)
            known[name] = value
    return known


# --- from events to groups


def _group_parts(event, loss):
    """Split an event into parts, count equal ones, and stack those of the same shape.

    Args:
        event: the event.
        loss: the largest delta that may be spent on elements drawn more often than is counted.

    Returns:
        The groups (see `pld_compose`), the adjacency, and the delta that was spent.
    """
    event, tail = rdp_events.with_multiplicities(event, loss)
    counted, shapes, kinds = {}, {}, set()
    for part, times in _flatten(event, 1.0, kinds):
        if not isinstance(part, events.Participation):  # one common form, to compile fewer programs
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
        # Lengths are padded to powers of two, so that a few more rounds do not recompile.  The
        # padding happens zero times.
        rows += [(rows[0][0], 0.0)] * (2 ** math.ceil(math.log2(len(rows))) - len(rows))
        leaves, times = zip(*rows)
        groups.append(
            (jax.tree.unflatten(shape, list(map(np.array, zip(*leaves)))), np.array(times))
        )
    return tuple(groups), next(iter(kinds), "add_remove"), tail


def _flatten(event, times, kinds):
    """Return pairs (part, times) that compose to the event; a part is one step, or a Participation.

    Args:
        event: the event.
        times: how often it happens.
        kinds: a set to which the adjacencies of all samples are added.
    """
    if isinstance(event, events.Repeat):
        return _flatten(event.event, times * float(event.times), kinds)
    if isinstance(event, events.Compose):
        return [part for e in event.events for part in _flatten(e, times, kinds)]
    if isinstance(event, events.Participation):
        checks.require_fraction(WHERE, probability=event.probability)
        inner = tuple(events.Repeat(part, n) for part, n in _flatten(event.event, 1.0, kinds))
        return [(events.Participation(event.probability, events.Compose(inner)), times)]
    if isinstance(event, events.Gaussian):
        return [(events.Poisson(1.0, _checked_gaussian(event.noise_multiplier)), times)]
    if type(event) in ADJACENCIES:
        kinds.add(ADJACENCIES[type(event)])
        return [(_plain_step(event), times)]
    checks.fail(
        WHERE,
        "an event of gaussian, poisson, with or without_replacement, repeat, compose and "
        "participation",
        f"events.{type(event).__name__}",
        "No privacy-loss distribution is known here for it.",
        error=NotAnalysable,
    )


def _plain_step(event):
    """Return a sample of Gaussians with plain numbers, in its simplest form.

    A sample that has the same losses as a Poisson sample becomes one; the direction distinguishes
    the adjacencies.
    """
    z = float(events.precision_inside(WHERE, event)) ** -0.5
    one, certain, distribution = _checked_gaussian(z), 1, None
    if isinstance(event, events.Allocation):
        if event.slots > 1:
            return allocation.dominating_pair(dataclasses.replace(event, event=one), z)
        event = events.Poisson(1.0, one)
    if isinstance(event, events.WithoutReplacement):
        event = events.Poisson(event.sample / event.population, one)
    elif isinstance(event, events.Multiplicity) and event.most == 1:
        event = events.Poisson(event.distribution[1], one)
    if isinstance(event, events.Poisson):
        return events.Poisson(_checked_rate(event.rate), one)
    if isinstance(event, (events.Replaced, events.ZeroedOut)):
        rates = event.rate, event.rate_when_full
    else:
        rates, distribution = (np.sum(event.distribution[1:]),), event.distribution
        certain = int(getattr(event, "most", len(distribution) - 1))
    if min(rates) >= 1 if distribution is None else distribution[certain] == 1:
        return events.Poisson(1.0, _checked_gaussian(z / certain))  # the same count in every sample
    if isinstance(event, events.Multiplicity) and certain > MAX_COPIES:
        checks.fail(
            WHERE,
            f"draws that hardly ever take an element more than {MAX_COPIES} times",
            f"{certain} times",
            "Use Renyi bounds for other values.",
            error=NotAnalysable,
        )
    for rate in rates:
        _checked_rate(rate)
    return dataclasses.replace(event, event=one)


def _checked_rate(rate):
    """Return a sampling rate as a float; reject one that a grid cannot represent."""
    rate = float(rate)
    if not MIN_RATE <= rate <= 1:
        checks.fail(
            WHERE, f"a sampling rate in [{MIN_RATE:g}, 1]", f"{rate:g}", error=NotAnalysable
        )
    return rate


def _checked_gaussian(z):
    """Return a Gaussian with a plain number; reject one that a grid cannot represent."""
    z, (low, high) = float(z), NOISE_RANGE
    if not low <= z <= high:
        checks.fail(
            WHERE,
            f"a noise multiplier in [{low:g}, {high:g}]",
            f"{z:g}",
            "Use Renyi bounds for other values.",
            error=NotAnalysable,
        )
    return events.Gaussian(z)
