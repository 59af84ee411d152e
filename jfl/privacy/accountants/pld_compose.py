"""The privacy-loss distribution of many steps: a grid, one FFT, and bounds on the mass outside.

A run is reduced to (1) a grid: an interval, a window and a tilt, chosen from rough moments; (2) one
spectrum (the FFT of the distribution), in which repetition is a power, composition a product, and
participation a mixture with "nothing happened"; (3) masses.

`compose_upper` is a proof for every grid, for three reasons.  Steps are put on the grid
pessimistically (see `pld_step`).  The FFT works modulo the window, so losses outside the window
reappear inside: that only adds mass there, and the mass above the window is counted in full, by
Chernoff's bound.  Masses are multiplied by exp(tilt * loss) before the FFT, so that its rounding is
small compared with the mass near epsilon, and an allowance for rounding is added to every mass.
`compose_lower` bounds the same distribution from below, so the difference between the two is the
error of the grid.

Everything here is traceable.

Arguments that the functions of this module share:
    groups: a tuple with one pair (event, counts) for every shape of event, from the module `pld`.
        The numbers of the event are arrays [m]; counts are Float[m], how often each happens.
    direction: the order of the two neighbouring datasets in the pair; see `pld_step`.
    grid: a Grid.
    size: the number of grid points, static.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike

from . import events, pairs, pld_step

TRIAL_TILTS = np.geomspace(1e-6, 1e12, 64)
# Changes of the tilt that bound the tails, relative to the best tilt.
RELATIVE_TILT_CHANGES = np.geomspace(0.03, 300.0, 32)
# The tilt in use, as a fraction of the one that moves the mean loss to epsilon.
TILT_FRACTION = 0.4
# The mass outside the window is at most exp(-WINDOW_EXPONENT) * delta.
WINDOW_EXPONENT = 14.0
# The fraction of delta that the losses above the grids of all steps may take.
LOST_DELTA_FRACTION = 1e-7
# The tilted mass below the grids of all steps together.
MAX_MASS_BELOW_GRID = 1e-12
# The rounding error of the FFT per composed step, as a fraction of the largest mass.
ROUNDING = 2e-15


class Grid(NamedTuple):
    """A window of equal intervals of privacy loss, and the exponents of bounds on the mass outside.

    The mass outside is bounded by Chernoff's inequality, with a *tilt* as its exponent.
    """

    interval: jax.Array
    start: jax.Array  # lowest loss of one step, in intervals
    window: jax.Array  # lowest composed loss, in intervals
    tilt: jax.Array
    above: jax.Array  # tilt that bounds the mass above the window
    below: jax.Array  # tilt that bounds the mass below the window


class Part(NamedTuple):
    """The numbers of one event that its composition needs."""

    moments: jax.Array  # [e], log E[exp(tilt * loss)] at some tilts
    spectrum: jax.Array  # FFT of the mass, tilted by the first tilt and normalised
    lost: jax.Array  # probability of an infinite loss
    extent: jax.Array  # [2], lowest and highest loss of a step


class Composed(NamedTuple):
    """A composed privacy-loss distribution, and the mass outside its window."""

    losses: jax.Array  # [size] ascending
    mass: jax.Array  # [size]
    extra: jax.Array  # probability of larger or infinite losses, added to every delta
    stray: jax.Array  # log of the tilted mass that may have wrapped around from outside


# --- one spectrum from many steps


def _power(part, n):
    """Return n independent copies of a part."""
    return Part(
        n * part.moments,
        _power_of_spectrum(part.spectrum, n),
        -jnp.expm1(n * jnp.log1p(-part.lost)),
        part.extent,
    )


def _power_of_spectrum(spectrum, n):
    """Return the spectrum to the power of n, which may be fractional; zeros stay zeros."""
    size = jnp.exp(n * jnp.log(jnp.maximum(jnp.abs(spectrum), 1e-300)))
    angle = n * jnp.angle(spectrum)
    return jax.lax.complex(size * jnp.cos(angle), size * jnp.sin(angle))


def _compose_parts(a, b):
    """Return the composition of two independent parts."""
    lost = a.lost + b.lost - a.lost * b.lost
    return Part(a.moments + b.moments, a.spectrum * b.spectrum, lost, _join_extents(a, b))


def _mix(part, other, p):
    """Return a part that is `part` with probability p, visibly, and otherwise `other`."""
    log_other, log_part = jnp.log1p(-p), jnp.log(p)
    moments = jnp.logaddexp(log_other + other.moments, log_part + part.moments)
    spectrum = (
        jnp.exp(log_other + other.moments[0] - moments[0]) * other.spectrum
        + jnp.exp(log_part + part.moments[0] - moments[0]) * part.spectrum
    )
    lost = (1 - p) * other.lost + p * part.lost
    extent = jnp.where(p > 0, _join_extents(part, other), other.extent)
    return Part(moments, spectrum, lost, jnp.where(p < 1, extent, part.extent))


def _mix_with_nothing(part, p):
    """Return a part that happens, visibly, with probability p; otherwise the loss is 0."""
    nothing = Part(0 * part.moments, jnp.ones_like(part.spectrum), 0 * part.lost, part.extent)
    return _mix(part, nothing, p)


def _join_extents(a, b):
    """Return the extent of two parts together."""
    return jnp.stack([jnp.minimum(a.extent[0], b.extent[0]), jnp.maximum(a.extent[1], b.extent[1])])


def _part_of_event(event, leaf, direction):
    """Return the Part of an event.

    Args:
        event: an event with plain numbers.
        leaf: (direction, the numbers of a sample, z) -> the Part of one step.
        direction: see the module.
    """
    inner = lambda event: _part_of_event(event, leaf, direction)
    if isinstance(event, events.Repeat):
        return _power(inner(event.event), event.times)
    if isinstance(event, events.Participation):
        return _mix_with_nothing(inner(event.event), event.probability)
    if isinstance(event, events.Compose):
        return functools.reduce(_compose_parts, map(inner, event.events))
    z = events.precision(event.event) ** -0.5
    room, full, unsampled = pld_step.SHARED.get(direction, (direction,) * 3)
    if isinstance(event, (events.Replaced, events.ZeroedOut)):
        # The observer may know whether the other elements fill the sample.
        rate = event.rate[None] if room in pairs.PLACES else event.rate
        in_full = leaf(full, event.rate_when_full[None], z)
        return _mix(in_full, leaf(room, rate, z), event.full)
    if isinstance(event, events.Discrete):
        numbers = jnp.stack([event.losses, event.present, event.absent])
    elif isinstance(event, (events.PoissonGroup, events.Multiplicity)):
        numbers = event.distribution
    elif isinstance(event, events.WithoutReplacement):
        numbers = event.sample / event.population
    else:
        numbers = event.rate
    return leaf(unsampled, numbers, z)


def _compose_groups(groups, leaf, direction):
    """Return the composition of all `groups` as a Part; arguments as in `_part_of_event`."""

    def compose_group(group):
        one = lambda item: _power(_part_of_event(item[0], leaf, direction), item[1])
        first, rest = jax.tree.map(lambda v: v[0], group), jax.tree.map(lambda v: v[1:], group)
        if not len(group[1]) > 1:
            return one(first)
        add = lambda part, item: (_compose_parts(part, one(item)), None)
        return jax.lax.scan(add, one(first), rest)[0]

    return functools.reduce(_compose_parts, map(compose_group, groups))


def _count_steps(groups):
    """Return the number of noisy steps if participation is certain.  Lost mass and rounding scale
    with it."""

    def count(event):
        if isinstance(event, events.Repeat):
            return event.times * count(event.event)
        if isinstance(event, events.Compose):
            return sum(count(e) for e in event.events)
        return count(event.event) if isinstance(event, events.Participation) else 1.0

    return sum(jnp.sum(count(event) * times) for event, times in groups)


# --- the grid


def plan(groups: Any, direction: str, size: int, delta: ArrayLike) -> Grid:
    """Return a grid of `size` points around the losses that determine epsilon at `delta`.

    Any grid gives valid bounds.  A bad grid only makes the upper bound larger than necessary.

    Args:
        groups, direction, size: see the module.
        delta: [], in (0, 1).
    """

    def moments(tilts, tail=None):
        def leaf(direction, rate, z):
            loss, mass = pld_step.rough(direction, rate, z)
            k = jax.nn.logsumexp(mass + tilts[:, None] * loss, axis=1)
            extent = jnp.zeros(2)
            if tail is not None:
                under = (
                    jnp.cumsum(jnp.exp(mass + tilts[0] * loss - k[0]))
                    <= MAX_MASS_BELOW_GRID / steps
                )
                over = jnp.cumsum(jnp.exp(mass)[::-1])[::-1] <= tail / steps
                extent = jnp.stack(
                    [
                        jnp.max(jnp.where(under, loss, loss[0])),
                        jnp.min(jnp.where(over, loss, loss[-1])),
                    ]
                )
            return Part(k, jnp.ones(0, complex), jnp.zeros(()), extent)

        return _compose_groups(groups, leaf, direction)

    def renyi_epsilon(tilts):
        """Return the epsilon that a Renyi bound of each order would prove."""
        k = moments(tilts).moments
        return (k - log_delta - jnp.log1p(tilts)) / tilts - jnp.log1p(1 / tilts)

    steps, log_delta = _count_steps(groups), jnp.log(delta)
    tilts = jnp.asarray(TRIAL_TILTS)
    near = pld_step.key_of_smallest(renyi_epsilon(tilts), tilts) * jnp.asarray(
        np.geomspace(0.5, 2.0, 16)
    )
    values = renyi_epsilon(near)
    best, epsilon = pld_step.key_of_smallest(values, near), jnp.min(values)
    # The full tilt would minimise the rounding error at epsilon, but bring more of the far losses
    # into the window.
    tilt = TILT_FRACTION * best
    shifts = best * jnp.asarray(RELATIVE_TILT_CHANGES)
    part = moments(
        jnp.concatenate([tilt[None], tilt + shifts, tilt - shifts]),
        LOST_DELTA_FRACTION * jnp.exp(log_delta),
    )
    k, up, down = part.moments[0], *jnp.split(part.moments[1:], 2)
    outside = WINDOW_EXPONENT + jnp.maximum(k - tilt * epsilon - log_delta, 0.0)
    tops, bottoms = (up - k + outside) / shifts, (k - down - outside) / shifts
    low, high = part.extent
    top = jnp.where(steps == 1, high, jnp.min(tops))
    bottom = jnp.where(steps == 1, low, jnp.max(bottoms))
    length = jnp.maximum(top - bottom, high - low)
    interval = jnp.maximum(length, 1e-12) / (size - 4)
    start = jnp.floor(low / interval)
    window = jnp.where(steps == 1, start, jnp.floor(bottom / interval) - 1)
    return Grid(
        interval,
        start,
        window,
        tilt,
        tilt + pld_step.key_of_smallest(tops, shifts),
        tilt - pld_step.key_of_smallest(-bottoms, shifts),
    )


def _step_builder(grid, size, build, exponents):
    """Return the function that puts one step on the grid as a Part.

    The spectra of all steps number losses modulo the window, so they can be multiplied.

    Args:
        build: a function of `pld_step` that returns (mass [size], lost mass, offset) of a step.
        exponents: [e, 2], the factors of loss and offset in each moment.
    """
    number = grid.start + jnp.arange(size)
    losses = grid.interval * number

    def part(direction, rate, z):
        mass, lost, offset = build(direction, rate, z, grid.interval, grid.start, size)
        safe = jnp.log(jnp.maximum(mass, 1e-307))
        weighted = lambda t: jax.nn.logsumexp(
            jnp.where(mass > 0, safe + t[0] * losses + t[1] * offset, -jnp.inf)
        )
        moments = jax.lax.map(weighted, exponents)
        tilted = jnp.where(mass > 0, jnp.exp(safe + grid.tilt * losses - moments[0]), 0.0)
        aligned = jnp.roll(tilted, jnp.mod(grid.start, size).astype(jnp.int32))
        lost = jnp.asarray(lost, losses.dtype)
        return Part(moments, _real_fft(aligned), lost, jnp.zeros(2))

    return part


def _compose(groups, direction, grid, size, leaf, sign):
    """Return the composed Part, its losses [size] and its masses [size].

    Args:
        leaf: as in `_part_of_event`.
        sign: 1 to add the allowance for rounding to every mass, -1 to subtract it.
    """
    part = _compose_groups(groups, leaf, direction)
    losses = grid.interval * (grid.window + jnp.arange(size))
    tilted = jnp.roll(
        _inverse_real_fft(part.spectrum, size), -jnp.mod(grid.window, size).astype(jnp.int32)
    )
    allowance = ROUNDING * (10 + _count_steps(groups)) * jnp.max(tilted)
    tilted = jnp.maximum(jnp.maximum(tilted, 0.0) + sign * allowance, 0.0)
    exponent = part.moments[0] - grid.tilt * losses
    return (
        part,
        losses,
        jnp.where(tilted > 0, tilted * jnp.exp(jnp.minimum(exponent, pairs.MAX_EXPONENT)), 0.0),
    )


def _is_one_step(groups, grid):
    """Return whether this is one step on its own grid; then nothing can be outside the window."""
    return (_count_steps(groups) == 1) & (grid.window == grid.start)


def compose_upper(groups: Any, direction: str, grid: Grid, size: int) -> Composed:
    """Return a pessimistic composition: its deltas are never below the true ones.

    Args:
        groups, direction, grid, size: see the module.
    """

    def build(*args):
        return *pld_step.pessimistic(*args), 0.0

    exponents = jnp.stack([grid.tilt, grid.above])
    leaf = _step_builder(grid, size, build, jnp.stack([exponents, jnp.zeros(2)], axis=1))
    part, losses, mass = _compose(groups, direction, grid, size, leaf, 1)
    beyond = jnp.exp(jnp.minimum(part.moments[1] - grid.above * losses[-1], 0.0))
    beyond = jnp.where(_is_one_step(groups, grid), 0.0, beyond)
    return Composed(losses, mass, part.lost + beyond, jnp.asarray(-jnp.inf))


def compose_lower(
    groups: Any, direction: str, grid: Grid, size: int, failure_probability: ArrayLike
) -> tuple[Composed, jax.Array]:
    """Return an optimistic composition on the grid, and an upper bound on the sum of its offsets.

    In each step the true loss is a grid point plus an offset (see `pld_step.optimistic`).  By
    Chernoff's bound, the sum of the offsets exceeds the returned bound with probability at most
    `failure_probability`.

    Args:
        groups, direction, grid, size: see the module.
        failure_probability: [], > 0.
    """
    scales = jnp.asarray(np.geomspace(1e-4, 1e4, 24))

    def build(*args):
        mass, offset = pld_step.optimistic(*args)
        return mass, 0.0, offset

    tilts = jnp.stack([grid.tilt, grid.above, grid.below])
    exponents = jnp.stack(
        [jnp.pad(tilts, (0, 24)), jnp.pad(-scales / grid.interval, (3, 0))], axis=1
    )
    leaf = _step_builder(grid, size, build, exponents)
    part, losses, mass = _compose(groups, direction, grid, size, leaf, -1)
    stray = jnp.logaddexp(
        part.moments[1] - (grid.above - grid.tilt) * losses[-1],
        part.moments[2] - (grid.below - grid.tilt) * losses[0],
    )
    stray = jnp.where(_is_one_step(groups, grid), -jnp.inf, stray)
    log_failure = jnp.log(failure_probability)
    max_offset = jnp.min((part.moments[3:] - log_failure) * grid.interval / scales)
    return Composed(losses, mass, jnp.zeros(()), stray), max_offset


# --- transforms

# On a CPU, XLA distributes the rows of an FFT over a thread pool and, with jax 0.11, waits for them
# on a thread of the same pool: two such FFTs at once deadlock on two cores.  So the rows are
# computed sequentially under vmap.


@custom_vmap
def _real_fft(x: ArrayLike) -> jax.Array:
    """Same as jnp.fft.rfft, Float[n] -> Complex[n // 2 + 1]; sequential under vmap."""
    return jnp.fft.rfft(x)


@_real_fft.def_vmap
def _(axis_size, in_batched, x):
    return jax.lax.map(_real_fft, x), True


def _inverse_real_fft(x: ArrayLike, n: int) -> jax.Array:
    """Same as jnp.fft.irfft, Complex[n // 2 + 1] -> Float[n]; sequential under vmap."""

    @custom_vmap
    def transform_row(x):
        return jnp.fft.irfft(x, n=n)

    @transform_row.def_vmap
    def _(axis_size, in_batched, x):
        return jax.lax.map(transform_row, x), True

    return transform_row(x)
