"""Privacy curves, and the bounds on attacks that they imply.

A curve is a list of proved pairs (epsilon, delta).  Each pair bounds every attack by two lines: at
a false-positive rate a, the true-positive rate is at most e^epsilon a + delta, and at most
1 - e^-epsilon (1 - delta - a).  The lines of all pairs together form a concave polygon.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_ndtr, ndtr, ndtri

from . import checks

# The smallest false-positive rate for which `mu` holds.
MIN_RATE = 1e-12
# Epsilons of a curve that are closer than this count as equal.
MIN_EPSILON_GAP = 1e-12
# The largest number of lines of the polygon of a group.
MAX_LINES = 4096
LARGEST_GROUP = 1000


class Curve(NamedTuple):
    """Proved pairs of epsilon and delta, as two arrays that can be plotted.

    Linear interpolation of delta in e^epsilon between two pairs is proved as well, since the true
    delta is convex in e^epsilon.  `curve_of` removes pairs above such a line.

    Attributes:
        epsilon: Float64[n], ascending; the first is 0.
        delta: Float64[n], descending, in [0, 1].
        gaussian_mu: the mu of Gaussian differential privacy (mu-GDP), which the mechanism satisfies
            up to `missing`; inf if no such mu is known.
        missing: the probability that an exact Gaussian exceeds the largest value of the noise; it
            is added to the delta that mu-GDP gives.  0 if the noise has no largest value.
    """

    epsilon: np.ndarray
    delta: np.ndarray
    gaussian_mu: float = math.inf
    missing: float = 0.0

    def delta_at(self, epsilon: ArrayLike) -> np.ndarray:
        """Return the smallest proved delta at an epsilon, as `Guarantee.delta_at` does."""
        where = "Guarantee.delta_at"
        epsilon = _numbers(where, "epsilon", epsilon, lambda v: v >= 0, ">= 0")
        after = np.clip(np.searchsorted(self.epsilon, epsilon, "right"), 1, len(self.epsilon) - 1)
        if len(self.epsilon) == 1:
            chord = np.broadcast_to(self.delta[0], epsilon.shape)
        else:
            first, last = self.epsilon[after - 1], self.epsilon[after]
            inside = np.clip(epsilon, first, last)
            part = np.exp(inside - last) * np.expm1(first - inside) / np.expm1(first - last)
            chord = (1 - part) * self.delta[after - 1] + part * self.delta[after]
        return np.minimum(chord, _gaussian_delta(self.gaussian_mu, epsilon) + self.missing)[()]

    def epsilon_at(self, delta: ArrayLike) -> np.ndarray:
        """Return the smallest proved epsilon at a delta, as `Guarantee.epsilon_at` does."""
        where = "Guarantee.epsilon_at"
        delta = _numbers(where, "delta", delta, lambda v: (v >= 0) & (v <= 1), "in [0, 1]")
        fits = len(self.delta) - np.searchsorted(self.delta[::-1], delta, "right")
        after = np.clip(fits, 1, max(len(self.delta) - 1, 1))
        if len(self.delta) > 1:
            first, last = self.epsilon[after - 1], self.epsilon[after]
            high, low = self.delta[after - 1], self.delta[after]
            share = np.clip((high - delta) / np.where(high > low, high - low, 1.0), 0.0, 1.0)
            chord = last + np.log(np.exp(first - last) - np.expm1(first - last) * share)
            chord = np.clip(chord, first, last)
        else:
            chord = np.zeros(delta.shape)
        found = np.where(fits == 0, 0.0, np.where(fits == len(self.delta), np.inf, chord))
        left = np.maximum(delta - self.missing, 0.0)
        return np.minimum(found, _gaussian_epsilon(self.gaussian_mu, left))[()]

    def tpr(self, fpr: ArrayLike) -> np.ndarray:
        """Return an upper bound on the true-positive rate, as `Guarantee.tpr` does."""
        fpr = _numbers("Guarantee.tpr", "fpr", fpr, lambda v: (v >= 0) & (v <= 1), "in [0, 1]")
        lines = _lines(self)
        highest = lines.height(fpr)
        if self.gaussian_mu < math.inf:
            highest = np.minimum(highest, ndtr(ndtri(fpr) + self.gaussian_mu) + self.missing)
        return np.clip(highest, fpr, 1.0)[()]

    @property
    def mu(self) -> float:
        """The mu of Gaussian differential privacy, as `Guarantee.mu`."""
        lines = _lines(self)
        # The curve of a Gaussian is concave, so it is above the polygon if it is above all corners.
        kept = (lines.corners >= MIN_RATE) & (lines.corners <= 0.5)
        rates = np.append(lines.corners[kept], MIN_RATE)
        highest = np.clip(lines.height(rates), rates, 1.0)
        # `missing` matters most at the smallest rate
        least = ndtri(MIN_RATE)
        whole = ndtri(min(ndtr(least + self.gaussian_mu) + self.missing, 1.0)) - least
        gaussian = max(whole, self.gaussian_mu) if self.missing else self.gaussian_mu
        return float(min(np.max(ndtri(highest) - ndtri(rates)), gaussian))

    def group(self, size: int) -> "Curve":
        """Return the curve for `size` units that differ jointly, valid for every mechanism.

        The bound on the true-positive rate for one unit is applied `size` times.  For each pair
        (epsilon, delta) of this curve, the result is at least as good as the pair (size * epsilon,
        delta * (e^(size * epsilon) - 1) / (e^epsilon - 1)).

        References:
            Dong, Roth, Su, JRSS B 2022, Theorem 2.14.
        """
        one = lines = _lines(self)
        for _ in range(size - 1):
            lines = _after(one, lines)
        kept = lines.epsilon >= 0
        mu = math.inf if self.missing else self.gaussian_mu * size
        return curve_of(lines.epsilon[kept], lines.delta[kept], mu)


def curve_of(
    epsilon: ArrayLike, delta: ArrayLike, gaussian_mu: float = math.inf, missing: float = 0.0
) -> Curve:
    """Return the curve of proved pairs, given in any order.

    The curve is the lower convex hull of the pairs (e^epsilon, delta).

    Args:
        epsilon: [n] >= 0.
        delta: [n], the delta of each epsilon.
        gaussian_mu, missing: as in `Curve`.

    Example:
        >>> curve_of([1.0, 0.0, 2.0], [0.4, 0.5, 0.0]).delta.tolist()
        [0.5, 0.0]
    """
    order = np.lexsort((np.asarray(delta), np.asarray(epsilon)))
    epsilon = np.asarray(epsilon, np.float64)[order]
    delta = np.clip(np.asarray(delta, np.float64)[order], 0.0, 1.0)
    # A pair also implies a delta at epsilon 0, which may be smaller than the given one.
    sum_of_rates = (1 - delta) * (2 * np.exp(-epsilon) / (1 + np.exp(-epsilon)))
    at_zero = 1 - np.max(sum_of_rates)
    if epsilon[0] > 0:
        epsilon, delta = np.append(0.0, epsilon), np.append(at_zero, delta)
    delta[0] = min(delta[0], at_zero)
    hull = []
    lowest = np.inf
    for e, d in zip(epsilon.tolist(), delta.tolist()):
        if d >= lowest:
            continue
        if hull and e - hull[-1][0] < MIN_EPSILON_GAP:
            if hull[-1][0] == 0:  # its delta already includes this pair
                continue
            hull.pop()
        lowest = d
        while len(hull) > 1 and _log_slope(hull[-2], hull[-1]) <= _log_slope(hull[-1], (e, d)):
            hull.pop()
        hull.append((e, d))
    corners = np.array(hull).T
    return Curve(corners[0], corners[1], float(gaussian_mu), float(missing))


def curve_of_pair(epsilon: float, delta: float) -> Curve:
    """Return the curve that a single pair (epsilon, delta) implies.

    Example:
        >>> round(float(curve_of_pair(1.0, 0.0).tpr(0.1)), 4)
        0.2718
    """
    if not epsilon < math.inf:
        return curve_of([0.0], [1.0])
    return curve_of([epsilon], [delta])


def _log_slope(first: tuple[float, float], last: tuple[float, float]) -> float:
    """Return the log of minus the slope of delta in e^epsilon between two pairs.

    Minus the slope is the false-positive rate at which the lines of the two pairs meet.
    """
    (e, d), (f, g) = first, last
    if not d > g:
        return -math.inf
    return math.log(d - g) - f - math.log(-math.expm1(e - f))


class _Lines(NamedTuple):
    """A concave polygon that bounds the true-positive rate, given the false-positive rate.

    Attributes:
        epsilon: [n], descending, of either sign; e^epsilon is the slope of a line.
        delta: [n], the height of a line at rate 0.
        corners: [n - 1], ascending; the false-positive rates at which lines meet.
    """

    epsilon: np.ndarray
    delta: np.ndarray
    corners: np.ndarray

    def height(self, rates: np.ndarray) -> np.ndarray:
        """Return the height of the polygon at false-positive rates."""
        line = np.searchsorted(self.corners, rates)
        with np.errstate(divide="ignore", over="ignore"):
            steep = np.exp(self.epsilon[line] + np.log(rates))
        return np.where(rates > 0, steep, 0.0) + self.delta[line]


def _lines(curve: Curve) -> _Lines:
    """Return the polygon of a curve, with the two lines of each pair."""
    epsilon, delta = curve.epsilon[::-1], curve.delta[::-1]
    mirrored = -np.expm1(-curve.epsilon) + np.exp(-curve.epsilon) * curve.delta
    epsilon = np.concatenate([epsilon, -curve.epsilon[1:]])
    return _polygon(epsilon, np.concatenate([delta, mirrored[1:]]))


def _polygon(epsilon: np.ndarray, delta: np.ndarray) -> _Lines:
    """Return the polygon of sorted lines, with the corners between neighbouring lines."""
    gap = epsilon[:-1] - epsilon[1:]
    rise = np.maximum(delta[1:] - delta[:-1], 0.0)
    with np.errstate(divide="ignore", over="ignore"):
        corners = np.exp(np.log(rise) - epsilon[:-1] - np.log(-np.expm1(-gap)))
    return _Lines(epsilon, delta, np.maximum.accumulate(np.minimum(corners, 1.0)))


def _after(second: _Lines, first: _Lines) -> _Lines:
    """Return the polygon of the function `second(first(rate))`.

    Any line of one polygon applied to a line of the other is a valid bound, so leaving some out is
    safe.
    """
    heights = np.clip(first.height(first.corners), 0.0, 1.0)
    # The rates at which the height of `first` is a corner of `second`.
    line = np.searchsorted(heights, second.corners)
    above = np.maximum(second.corners - first.delta[line], 0.0)
    with np.errstate(divide="ignore"):
        rates = np.exp(np.log(above) - first.epsilon[line])
    ends = np.unique(np.concatenate([[0.0], first.corners, np.clip(rates, 0.0, 1.0), [1.0]]))
    if len(ends) > MAX_LINES:
        ends = ends[np.linspace(0, len(ends) - 1, MAX_LINES).astype(int)]
    middles = (ends[1:] + ends[:-1]) / 2
    inner = np.searchsorted(first.corners, middles)
    outer = np.searchsorted(second.corners, np.clip(first.height(middles), 0.0, 1.0))
    epsilon = second.epsilon[outer] + first.epsilon[inner]
    delta = second.delta[outer] + np.exp(second.epsilon[outer]) * first.delta[inner]
    kept = np.append(True, np.diff(epsilon) < 0)
    return _polygon(epsilon[kept], delta[kept])


def _gaussian_delta(mu: float, epsilon: np.ndarray) -> np.ndarray | float:
    """Return delta of the Gaussian mechanism; the trivial bound 1 if rounding would matter."""
    if not 1e-3 <= mu < math.inf:
        return 1.0
    s = epsilon / mu
    return np.maximum(ndtr(mu / 2 - s) - np.exp(epsilon + log_ndtr(-mu / 2 - s)), 0.0)


def _gaussian_epsilon(mu: float, delta: np.ndarray) -> np.ndarray | float:
    """Return an upper bound on epsilon of the Gaussian mechanism, by bisection.

    Bisection starts from the epsilon at which exp(-s^2 / 2), with s = epsilon / mu - mu / 2, is
    delta; this tail bounds the true delta.
    """
    if not 0 < mu < math.inf:
        return math.inf if mu else 0.0
    with np.errstate(divide="ignore"):
        high = mu * (mu / 2 + np.sqrt(-2 * np.log(delta)))
    low = np.zeros(delta.shape)
    for _ in range(60):
        middle = (low + high) / 2
        fits = _gaussian_delta(mu, middle) <= delta
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    return np.where(_gaussian_delta(mu, np.zeros(delta.shape)) <= delta, 0.0, high)


def _numbers(
    where: str, name: str, value: ArrayLike, holds: Callable[[np.ndarray], Any], expected: str
) -> np.ndarray:
    """Return numbers as Float64[...]; reject those for which `holds` is False."""
    array = checks.as_array(where, name, value)
    if array.dtype.kind not in "iuf" or not np.all(holds(array)):
        checks.fail(where, f"{name}, numbers {expected}", f"{name}={checks.short_repr(value)}")
    return array.astype(np.float64)
