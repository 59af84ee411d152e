"""From events to a curve of epsilon and delta: Renyi bounds, exact Gaussians, and privacy-loss
distributions where they apply.

All on the host, on concrete numbers.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...core.errors import NotAnalysable
from ...core.trade_off import Curve, curve_of
from . import events, pld, rdp_events, tightest, truncation

POINTS = 2048  # of a curve, evenly; and as many by ratios
LEAST_DELTA = 1e-18  # at the end of what is looked at closely
FARTHEST, FEW = 1e-100, 256  # delta at the far end of a curve, and points on the way there
NEAREST = 1e-5  # the first epsilon above 0, of the last one
REFINED = 8  # events, of which the worst is taken, that get a privacy-loss distribution


class Release(NamedTuple):
    """What a guarantee is about: events of which the worst counts, and what of delta they leave
    out."""

    alternatives: tuple  # of events, one for each client that may be the worst
    overflow: float = 0.0  # probability that a draw finds no slot, which costs it 1 + e^epsilon
    extra: float = 0.0  # of delta, beside all of that
    shifts: tuple = ()  # of truncation.Shift: what the reach of computed noise costs is in delta

    def curve(self) -> Curve:
        """The curve of the worst of them."""
        return curve(self.alternatives, self.overflow, self.extra, truncation.total(self.shifts))

    def group(self, size: int) -> "Release | None":
        """The same for `size` units at once; None where a curve of one unit has to do.

        A draw without a slot costs as before, and may happen in the samples of each unit.
        """
        if self.extra:
            return None
        grouped = tuple(events.of_group(event, size) for event in self.alternatives)
        return (
            None
            if None in grouped
            else Release(
                grouped,
                self.overflow * size,
                shifts=tuple(s._replace(length=s.length * size) for s in self.shifts),
            )
        )


def curve(
    alternatives: Sequence, overflow: float = 0.0, extra: float = 0.0, truncated: float = 0.0
) -> Curve:
    """Pairs (epsilon, delta) of the worst of several events.

    Args:
        alternatives: events.
        overflow: probability that a draw finds no slot; it costs 1 + e^epsilon times as much delta.
        extra: what is added to delta beside that.
        truncated: what is added to delta because computed noise has a finite reach.

    Returns:
        The curve, down to a delta of 1e-100.

    Raises:
        ValueError: as `tightest.epsilon`.

    Example:
        >>> one = curve((events.gaussian(1.0),))
        >>> round(float(one.delta_at(1.0)), 5), round(one.mu, 5)
        (0.12694, 1.0)
    """
    if not alternatives:  # nobody takes part
        return curve_of([0.0], [overflow * 2 + extra], 0.0 if not overflow + extra else math.inf)
    last, far = (
        float(rdp_events.above(alternatives, np.ones(1), np.full(1, least)).max(initial=1e-3))
        for least in (LEAST_DELTA, FARTHEST)
    )
    if not far < math.inf:
        return curve_of([0.0], [1.0])
    epsilon = np.unique(
        np.concatenate(
            [
                [0.0],
                np.geomspace(NEAREST * last, last, POINTS),
                np.linspace(0.0, last, POINTS),
                np.linspace(last, far, FEW),
            ]
        )
    )
    delta = _worst(alternatives, epsilon)
    with np.errstate(over="ignore"):
        cost = overflow * (1 + np.exp(epsilon)) if overflow else 0.0
    alone = not (overflow or extra)
    mu = _mu(alternatives) if alone else math.inf
    return curve_of(epsilon, delta + cost + extra + truncated, mu, truncated)


def _worst(alternatives, epsilon):
    """The largest delta of all events; those that decide somewhere are refined, the worst first."""
    bounds = np.stack([rdp_events.deltas(event, epsilon) for event in alternatives])
    refined = [not tightest.takes(event) for event in alternatives]
    for _ in range(REFINED):
        decides = np.bincount(np.argmax(bounds, axis=0), minlength=len(alternatives))
        waiting = np.where(refined, 0, decides)
        if not waiting.any():
            break
        i = int(np.argmax(waiting))
        refined[i] = True
        try:
            bounds[i] = np.minimum(bounds[i], pld.deltas(tightest.spread(alternatives[i]), epsilon))
        except NotAnalysable:  # numbers outside its range
            pass
    return bounds.max(axis=0)


def _mu(alternatives) -> float:
    """As if all of it always took part, with all copies that may be drawn."""
    return max(rdp_events.gaussian_mu(event) for event in alternatives)
