"""What delta pays because computed noise does not reach as far as the noise that is accounted for.

A computed normal is at most `REACH` standard deviations from 0.  Where a contribution shifts a
release, a few outputs lie within the reach of the noise on one side and beyond it on the other, so
they reveal for certain on which side they were made.  Everywhere else the ratio of the two
densities is that of untruncated Gaussians.  So a release costs the probability of such an output,
added to delta once; it is not multiplied by e^epsilon.

For two normals that are drawn as a pair, the radius has the density r exp(-r^2 / 2) on [0, REACH].
A shift of the pair by t standard deviations leaves the reach with probability at most

    g(t) = MISSING (exp(REACH t - t^2 / 2) - 1),    MISSING = exp(-REACH^2 / 2).

A shift of length s spreads over pairs with sum(t_i^2) = s^2.  Up to s = REACH - sqrt(3),
(g(t) / MISSING - REACH t) / t^2 grows with t, and sum(t_i) <= sqrt(pairs) s, so

    sum(g(t_i)) <= MISSING (exp(REACH s - s^2 / 2) - 1 - REACH s + sqrt(pairs) REACH s).

A sum of noise, or noise that a matrix correlates, is computed from independent normals, and the
shift can be spread over them with the same length s.  So the bound holds for it too, with all the
normals that are behind the release.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ...kernels.normals import MISSING, REACH


class Shift(NamedTuple):
    """By how much a unit shifts releases that are alike."""

    length: float  # in standard deviations of the noise, 1 / noise multiplier
    normals: float  # independent normals behind one release, at most
    times: float = 1.0


def lost_mass(length, normals) -> np.ndarray:
    """Return the delta that one release costs because its noise has a finite reach.

    Args:
        length: the sensitivity in standard deviations of the noise.
        normals: independent normals behind the release, at most.

    Returns:
        Float64 with the shape of `length`; 1 where the shift is so long that nothing is proved.

    Example:
        >>> bool(lost_mass(1.0, 1e6) < 1e-14), float(lost_mass(9.0, 1.0))
        (True, 1.0)
    """
    s = np.asarray(length, np.float64)
    near = np.minimum(s, REACH - np.sqrt(3))
    grown = np.maximum(np.expm1(REACH * near - near**2 / 2) - REACH * near, 0.0)
    spread = np.sqrt(np.maximum(normals / 2, 1.0)) * REACH * near
    return np.where(s > near, 1.0, np.minimum(MISSING * (grown + spread), 1.0))


def total(shifts: Iterable[Shift], group: int = 1) -> float:
    """Return the delta that releases cost together, for a group of units."""
    return float(sum(s.times * lost_mass(group * s.length, s.normals) for s in shifts))


def refuse_if_beyond(where: str, lost, delta: float, error: type[Exception]) -> None:
    """Raise `error` if the reach of the noise costs delta or more."""
    if np.any(np.asarray(lost) >= delta):
        raise error(
            f"{where}: delta must exceed the mass that the computed noise cannot reach, got "
            f"delta={delta:g} and a mass of {np.max(lost):.3g}. Normals end {REACH:.2f} standard "
            f"deviations from 0. Use a larger noise multiplier, fewer rounds or a larger delta."
        )
