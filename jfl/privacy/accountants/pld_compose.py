"""Many steps as one privacy loss distribution: a grid, one spectrum, and bounds on what lies
outside.

A run is reduced to (1) a grid: interval, window and tilt, chosen from rough moments; (2) one
spectrum, in which repetition is a power, composition a product and participation a mixture with
"nothing happened"; (3) masses.

Three things make `compose_upper` a proof whatever grid was chosen.  Steps are put on the grid
pessimistically (`pld_step`).  The FFT works modulo the window, so losses from outside come back
inside: that only adds mass there, and the mass above the window counts in full, by Chernoff's
bound.  Masses are tilted by exp(tilt * loss) before the FFT, so its rounding is small compared with
the mass near epsilon, and an allowance for that rounding is added to every mass. `compose_lower`
bounds the same distribution from below, so the difference of both is what the grid costs.

All is traceable.  `groups` is a tuple of (event whose numbers are [m], how often each, [m]), one
for every shape of event: `pld` makes them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike

from . import events, pairs, pld_step

TILTS = np.geomspace(1e-6, 1e12, 64)
SHIFTS = np.geomspace(0.03, 300.0, 32)  # changes of tilt that bound tails, relative to it
PART = 0.4  # of the tilt that moves the mean loss to epsilon
OUTSIDE = 14.0  # -log of delta's part that comes from outside the window
LOST = 1e-7  # of delta, given to steps above their grid
STRAY = 1e-12  # tilted mass below the grids of all steps together
ROUNDING = 2e-15  # of the largest mass, for each composed step


class Grid(NamedTuple):
    """A window of equal intervals for losses, and the tilts that bound the mass outside of it."""

    interval: jax.Array
    start: jax.Array  # of steps, in intervals
    window: jax.Array  # start of the composed losses, in intervals
    tilt: jax.Array
    above: jax.Array  # tilts that bound the mass beyond the window
    below: jax.Array


class Part(NamedTuple):
    """One event, ready to be composed: its tilted mass as a spectrum."""

    moments: jax.Array  # [e] log E[exp(tilt * loss)] at some tilts
    spectrum: jax.Array  # of the mass tilted by the first of them, divided by its sum
    lost: jax.Array  # probability of an infinite loss
    extent: jax.Array  # [2] lowest and highest loss of a step


class Composed(NamedTuple):
    """A composed privacy-loss distribution, and the mass that the window left out."""

    losses: jax.Array  # [size] ascending
    mass: jax.Array  # [size]
    extra: jax.Array  # probability that counts in full
    stray: jax.Array  # log of tilted mass that may have come back from outside


# --- one spectrum from many steps


def _power(part, n):
    """Return n independent copies of a part."""
    return Part(
        n * part.moments,
        _raised(part.spectrum, n),
        -jnp.expm1(n * jnp.log1p(-part.lost)),
        part.extent,
    )


def _raised(spectrum, n):
    """Return a power, polar, so that n may be anything and zeros of the spectrum stay zeros."""
    size = jnp.exp(n * jnp.log(jnp.maximum(jnp.abs(spectrum), 1e-300)))
    angle = n * jnp.angle(spectrum)
    return jax.lax.complex(size * jnp.cos(angle), size * jnp.sin(angle))


def _product(a, b):
    extent = jnp.stack(
        [jnp.minimum(a.extent[0], b.extent[0]), jnp.maximum(a.extent[1], b.extent[1])]
    )
    return Part(
        a.moments + b.moments, a.spectrum * b.spectrum, a.lost + b.lost - a.lost * b.lost, extent
    )


def _mixture(part, p):
    """Return the mixture of the part, with probability p and visibly, with "nothing happened",
    which has loss 0."""
    log_absent, log_present = jnp.log1p(-p), jnp.log(p)
    moments = jnp.logaddexp(log_absent, log_present + part.moments)
    spectrum = (
        jnp.exp(log_absent - moments[0])
        + jnp.exp(log_present + part.moments[0] - moments[0]) * part.spectrum
    )
    return Part(moments, spectrum, p * part.lost, part.extent)


def _fold(event, leaf):
    """Return the Part of an event, from leaf(numbers of a sample, z) for each of its steps."""
    if isinstance(event, events.Repeat):
        return _power(_fold(event.event, leaf), event.times)
    if isinstance(event, events.Participation):
        return _mixture(_fold(event.event, leaf), event.probability)
    if isinstance(event, events.Compose):
        return functools.reduce(_product, (_fold(e, leaf) for e in event.events))
    if isinstance(event, (events.PoissonGroup, events.Multiplicity)):
        numbers = event.law
    elif isinstance(event, (events.Replaced, events.ZeroedOut)):
        numbers = jnp.stack([event.rate, event.full, event.rate_when_full])
    elif isinstance(event, events.WithoutReplacement):
        numbers = event.sample / event.population
    else:
        numbers = event.rate
    return leaf(numbers, events.precision(event.event) ** -0.5)


def _total(groups, leaf):
    """Return the composition of all `groups`: (an event whose numbers are [m], how often each [m])
    for every shape of event."""

    def follow(group):
        one = lambda item: _power(_fold(item[0], leaf), item[1])
        first, rest = jax.tree.map(lambda v: v[0], group), jax.tree.map(lambda v: v[1:], group)
        if not len(group[1]) > 1:
            return one(first)
        return jax.lax.scan(lambda part, item: (_product(part, one(item)), None), one(first), rest)[
            0
        ]

    return functools.reduce(_product, map(follow, groups))


def _steps(groups):
    """Return the number of noisy steps if everybody always participates: it scales lost mass and
    rounding."""

    def count(event):
        if isinstance(event, events.Repeat):
            return event.times * count(event.event)
        if isinstance(event, events.Compose):
            return sum(count(e) for e in event.events)
        return count(event.event) if isinstance(event, events.Participation) else 1.0

    return sum(jnp.sum(count(event) * times) for event, times in groups)


# --- the grid


def plan(groups: Any, direction: str, size: int, delta: ArrayLike) -> Grid:
    """Return a grid of `size` points around the losses that decide about epsilon at `delta`.

    No grid is wrong: a bad one only gives a large upper bound.
    """

    def moments(tilts, tail=None):
        def leaf(rate, z):
            loss, mass = pld_step.rough(direction, rate, z)
            k = jax.nn.logsumexp(mass + tilts[:, None] * loss, axis=1)
            extent = jnp.zeros(2)
            if tail is not None:
                under = jnp.cumsum(jnp.exp(mass + tilts[0] * loss - k[0])) <= STRAY / steps
                over = jnp.cumsum(jnp.exp(mass)[::-1])[::-1] <= tail / steps
                extent = jnp.stack(
                    [
                        jnp.max(jnp.where(under, loss, loss[0])),
                        jnp.min(jnp.where(over, loss, loss[-1])),
                    ]
                )
            return Part(k, jnp.ones(0, complex), jnp.zeros(()), extent)

        return _total(groups, leaf)

    def proved(tilts):
        """Return the epsilon that a Renyi bound of each order would prove."""
        k = moments(tilts).moments
        return (k - log_delta - jnp.log1p(tilts)) / tilts - jnp.log1p(1 / tilts)

    steps, log_delta = _steps(groups), jnp.log(delta)
    tilts = jnp.asarray(TILTS)
    near = pld_step.least(proved(tilts), tilts) * jnp.asarray(np.geomspace(0.5, 2.0, 16))
    values = proved(near)
    best, epsilon = pld_step.least(values, near), jnp.min(values)
    # the full tilt would leave the least rounding at epsilon, but fetch more of the far losses into
    # the window
    tilt = PART * best
    shifts = best * jnp.asarray(SHIFTS)
    part = moments(
        jnp.concatenate([tilt[None], tilt + shifts, tilt - shifts]), LOST * jnp.exp(log_delta)
    )
    k, up, down = part.moments[0], *jnp.split(part.moments[1:], 2)
    outside = OUTSIDE + jnp.maximum(k - tilt * epsilon - log_delta, 0.0)
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
        tilt + pld_step.least(tops, shifts),
        tilt - pld_step.least(-bottoms, shifts),
    )


def _leaf(direction, grid, size, build, exponents):
    """Return the function that puts one step on the grid as a Part; spectra of all steps number
    losses modulo the window, so they multiply."""
    number = grid.start + jnp.arange(size)
    losses = grid.interval * number

    def part(rate, z):
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


def _compose(groups, grid, size, leaf, sign):
    part = _total(groups, leaf)
    losses = grid.interval * (grid.window + jnp.arange(size))
    tilted = jnp.roll(
        _inverse_real_fft(part.spectrum, size), -jnp.mod(grid.window, size).astype(jnp.int32)
    )
    allowance = ROUNDING * (10 + _steps(groups)) * jnp.max(tilted)
    tilted = jnp.maximum(jnp.maximum(tilted, 0.0) + sign * allowance, 0.0)
    exponent = part.moments[0] - grid.tilt * losses
    return (
        part,
        losses,
        jnp.where(tilted > 0, tilted * jnp.exp(jnp.minimum(exponent, pairs.FAR)), 0.0),
    )


def _inside(groups, grid):
    """Return whether this is one step on its own grid: then nothing can lie outside the window."""
    return (_steps(groups) == 1) & (grid.window == grid.start)


def compose_upper(groups: Any, direction: str, grid: Grid, size: int) -> Composed:
    """Return the composed losses, pessimistic."""

    def build(*args):
        return *pld_step.pessimistic(*args), 0.0

    exponents = jnp.stack([grid.tilt, grid.above])
    leaf = _leaf(direction, grid, size, build, jnp.stack([exponents, jnp.zeros(2)], axis=1))
    part, losses, mass = _compose(groups, grid, size, leaf, 1)
    beyond = jnp.exp(jnp.minimum(part.moments[1] - grid.above * losses[-1], 0.0))
    beyond = jnp.where(_inside(groups, grid), 0.0, beyond)
    return Composed(losses, mass, part.lost + beyond, jnp.asarray(-jnp.inf))


def compose_lower(
    groups: Any, direction: str, grid: Grid, size: int, few: ArrayLike
) -> tuple[Composed, jax.Array]:
    """Return the composed losses, optimistic, and by how much they may still be too large, except
    with probability `few`.

    Each step is off the grid by an offset; Chernoff's bound says how far their sum reaches.
    """
    scales = jnp.asarray(np.geomspace(1e-4, 1e4, 24))

    def build(*args):
        mass, offset = pld_step.optimistic(*args)
        return mass, 0.0, offset

    of_losses = jnp.stack([grid.tilt, grid.above, grid.below])
    exponents = jnp.stack(
        [jnp.pad(of_losses, (0, 24)), jnp.pad(-scales / grid.interval, (3, 0))], axis=1
    )
    leaf = _leaf(direction, grid, size, build, exponents)
    part, losses, mass = _compose(groups, grid, size, leaf, -1)
    stray = jnp.logaddexp(
        part.moments[1] - (grid.above - grid.tilt) * losses[-1],
        part.moments[2] - (grid.below - grid.tilt) * losses[0],
    )
    stray = jnp.where(_inside(groups, grid), -jnp.inf, stray)
    reach = jnp.min((part.moments[3:] - jnp.log(few)) * grid.interval / scales)
    return Composed(losses, mass, jnp.zeros(()), stray), reach


# --- transforms

# XLA distributes the rows of an FFT on a CPU over the threads of a pool, and with jax 0.11 it waits
# for them on a thread of that pool: two such FFTs at once on two cores wait for ever.  So under
# vmap the rows are computed sequentially.


@custom_vmap
def _real_fft(x: ArrayLike) -> jax.Array:
    """Same as jnp.fft.rfft, Float[n] -> Complex[n // 2 + 1]."""
    return jnp.fft.rfft(x)


@_real_fft.def_vmap
def _(axis_size, in_batched, x):
    return jax.lax.map(_real_fft, x), True


def _inverse_real_fft(x: ArrayLike, n: int) -> jax.Array:
    """Same as jnp.fft.irfft, Complex[n // 2 + 1] -> Float[n]."""

    @custom_vmap
    def of_row(x):
        return jnp.fft.irfft(x, n=n)

    @of_row.def_vmap
    def _(axis_size, in_batched, x):
        return jax.lax.map(of_row, x), True

    return of_row(x)
