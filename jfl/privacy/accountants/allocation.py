"""A dominating pair for random allocation: the distribution of its likelihood ratio on a grid.

A unit takes part in one of t Gaussian releases, which is drawn uniformly and kept secret.  The
likelihood ratio of presence to absence is the mean M of t independent log-normal variables X_i =
exp((y_i - 1/2) / z^2), where the y_i are N(0, z^2) if the unit is absent (see `rdp.allocation`).

Why the pair on the grid dominates.  If the unit is absent, M has mean 1, and for every x the
hockey-stick divergences of both directions are means of convex functions of M: of (M - x)_+ for
presence against absence, and of (1 - x M)_+ for absence against presence.  By Jensen's inequality
neither decreases if a value is replaced by a random value with the same mean, and this also holds
if the value enters an independent average.  Every rounding here is such a replacement: a value
between two grid points is split over them, and a value outside the grid is split between 0 and
infinity, so that its probability and its mean are preserved.  Hence one grid bounds both directions
of add_remove.  Pairs that dominate each epoch also dominate the composition (Zhu, Dong, Wang,
AISTATS 2022, Theorem 10).

How it is computed.  The grid is uniform in log(M).  The mean of t ratios is an average of two means
of about t / 2 ratios.  If two values are d grid points apart, then the logarithm of their average
is a fixed distance above the smaller one, so all pairs with the same d are added together.  All
terms are positive, so the relative rounding error is small for every probability.  The grid becomes
finer as the averages concentrate.  For up to 1,000 releases the roundings raise epsilon by less
than one part in a thousand, unless it is nearly 0.

References:
    Feldman and Shenfeld, arXiv:2502.08202, for the pair; arXiv:2602.17284, for convolutions on a
    geometric grid, which are rounded there in one direction at a time.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import scipy.special

from ...core import checks
from ...core.errors import NotAnalysable
from . import events

MIN_NOISE = 0.1  # for smaller noise multipliers, the ratios span too many orders of magnitude
NUM_POINTS = 4096  # of a grid
NUM_STDS = 10.3  # range of the grid of one ratio, in standard deviations
# The probability that may be moved to 0 or infinity after each average.
TAIL = 1e-22
# The relative rounding error per release: a probability is a sum of up to 4 * NUM_POINTS terms.
ROUNDING = 2e-12


class Ratio(NamedTuple):
    """The distribution of a likelihood ratio on a grid, if the unit is absent."""

    interval: float  # distance between the logarithms of grid points
    start: int  # point j has the logarithm interval * (start + j)
    mass: np.ndarray  # [n]
    at_zero: float
    at_infinity: float  # the part of the mean that is infinitely large values

    @property
    def logs(self) -> np.ndarray:
        """Return the logarithms of the grid points."""
        return self.interval * (self.start + np.arange(len(self.mass)))

    def on(self, interval: float, start: int, size: int) -> np.ndarray:
        """Return the mass on a grid that contains this one, as Float64[size]."""
        step = round(self.interval / interval)
        mass = np.zeros(size)
        mass[self.start * step - start :: step][: len(self.mass)] = self.mass
        return mass


def dominating_pair(event: events.Allocation, z: float) -> events.Discrete:
    """Return the event of a discrete pair that dominates one epoch of random allocation.

    Args:
        event: the event of the epoch.
        z: the noise multiplier of one release.

    Raises:
        NotAnalysable: if z is less than MIN_NOISE.
    """
    if z < MIN_NOISE:
        checks.fail(
            "jfl.privacy.accountants.pld",
            f"a noise multiplier of at least {MIN_NOISE:g} in random allocation",
            f"{z:g}",
            "Use Renyi bounds for other values.",
            error=NotAnalysable,
        )
    slots = int(event.slots)
    ratio = _mean(slots, float(z))
    absent = ratio.mass * (1 + ROUNDING * slots)
    # Lengths are padded to a multiple, so that few lengths are compiled.
    pad = lambda values, mode: np.pad(values, (0, -len(values) % NUM_POINTS), mode)
    join = lambda low, values, high: np.concatenate([[low], values, [high]])
    return events.Discrete(
        join(-np.inf, pad(ratio.logs, "edge"), np.inf),
        join(0.0, pad(absent * np.exp(ratio.logs), "constant"), ratio.at_infinity),
        join(ratio.at_zero, pad(absent, "constant"), 0.0),
        event.event,
    )


# Each result has up to 32 KiB.
@functools.lru_cache(1024)
def _mean(number: int, z: float) -> Ratio:
    """Return the distribution of the mean of a number of independent ratios."""
    if number == 1:
        return _one(z)
    half = number // 2
    return _trim(_average(_mean(half, z), _mean(number - half, z), half / number))


def _one(z):
    """Return the distribution of one ratio.

    Its logarithm is normal with standard deviation 1 / z, and with mean -1 / (2 z^2) if the unit is
    absent, or 1 / (2 z^2) if it is present.
    """
    std = 1 / z
    reach = NUM_STDS * std + std**2 / 2
    interval = 2 * reach / (NUM_POINTS - 1)
    start = -(NUM_POINTS // 2)
    logs = interval * (start + np.arange(NUM_POINTS))

    def masses(mean):
        """Return the probabilities of the cells between grid points, and outside the grid."""
        s = (logs - mean) / std
        tail: Any = scipy.special.ndtr(-np.abs(s))  # the smaller tail has a small relative error
        a, b, right = tail[:-1], tail[1:], s >= 0
        cells = np.where(right[:-1], a - b, np.where(right[1:], 1 - a - b, b - a))
        return cells, float(tail[0] + tail[-1])

    (absent, at_zero), (present, at_infinity) = masses(-(std**2) / 2), masses(std**2 / 2)
    # Split each cell over its ends, so that probability and mean are preserved.
    upper = np.clip((present * np.exp(-logs[:-1]) - absent) / math.expm1(interval), 0.0, absent)
    mass = np.append(absent - upper, 0.0) + np.append(0.0, upper)
    return Ratio(interval, start, mass, at_zero, at_infinity)


def _average(x, y, weight):
    """Return the distribution of weight * x + (1 - weight) * y, for independent ratios."""
    interval = min(x.interval, y.interval)
    ends = [round(r.logs[i] / interval) for r in (x, y) for i in (0, -1)]
    start, size = min(ends), max(ends) - min(ends) + 1
    first, second = (r.on(interval, start, size) for r in (x, y))
    step = 2 if 2 * size <= NUM_POINTS else 1  # a finer grid, if it is not too long
    mass = np.zeros((size - 1) * step + 2)
    if x is y:  # with weight 1/2, by construction
        _add_pairs(mass, 2 * first, second, weight, interval, step)
    else:
        _add_pairs(mass, first, second, weight, interval, step)
        _add_pairs(mass, second, first, 1 - weight, interval, step)
    # pairs of equal values; and the average of 0 and a value, split between these two
    mass[:-1:step] += (
        first * second + x.at_zero * (1 - weight) * second + y.at_zero * weight * first
    )
    at_zero = x.at_zero * (y.at_zero + weight * second.sum())
    at_zero += y.at_zero * (1 - weight) * first.sum()
    at_infinity = weight * x.at_infinity + (1 - weight) * y.at_infinity
    return Ratio(interval / step, start * step, mass, at_zero, at_infinity)


def _add_pairs(mass, low, high, weight, interval, step):
    """Add the averages of all pairs of values of which the second is larger.

    Args:
        mass: the masses to which the pairs are added, on a grid with `step` times as many points.
        low, high: [n], the masses of both values on one grid.
        weight: the weight of the lower value in the average.
        interval: the distance between grid points of low and high.
        step: see mass.
    """
    size, fine = len(low), interval / step
    distance = np.arange(size)
    # the logarithm of the average, relative to the higher value
    height = np.log1p(weight * np.expm1(-interval * distance))
    cell = np.floor(height / fine).astype(int)
    # The share of the upper end of the cell preserves the mean.
    upper = np.clip(np.expm1(height - cell * fine) / math.expm1(fine), 0.0, 1.0)
    first = distance * step + cell
    for d in range(1, size):
        pairs = low[: size - d] * high[d:]
        to_upper = pairs * upper[d]
        end = first[d] + (size - d - 1) * step + 1
        mass[first[d] : end : step] += pairs - to_upper
        mass[first[d] + 1 : end + 1 : step] += to_upper


def _trim(ratio):
    """Move the tails of a ratio to 0 and infinity, preserving their probability and mean."""
    present = ratio.mass * np.exp(ratio.logs)
    is_kept = (np.cumsum(ratio.mass) > TAIL) & (np.cumsum(present[::-1])[::-1] > TAIL)
    first, *_, last = np.flatnonzero(is_kept)
    kept = slice(first, last + 1)
    outside = lambda values: float(values[:first].sum() + values[last + 1 :].sum())
    return ratio._replace(
        start=ratio.start + int(first),
        mass=ratio.mass[kept],
        at_zero=ratio.at_zero + outside(ratio.mass),
        at_infinity=ratio.at_infinity + outside(present),
    )
