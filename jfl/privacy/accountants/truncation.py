"""The cost in delta of computed noise, which does not reach as far as the noise in the accounting.

A computed normal is at most R standard deviations from 0.  Where a contribution shifts a
release, a few outputs lie within the reach of the noise on one side and beyond it on the other, so
they reveal for certain on which side they were made.  Everywhere else the ratio of the two
densities is that of untruncated Gaussians.  So a release costs the probability of such an output,
added to delta once; it is not multiplied by e^epsilon.

For two normals that are drawn as a pair, the radius has the density r exp(-r^2 / 2) on [0, R].
A shift of the pair by t standard deviations leaves the reach with probability at most

    g(t) = m (exp(R t - t^2 / 2) - 1),    m = exp(-R^2 / 2), the mass that a pair misses.

A shift of length s spreads over pairs with sum(t_i^2) = s^2.  Up to s = R - sqrt(3),
(g(t) / m - R t) / t^2 grows with t, and sum(t_i) <= sqrt(pairs) s, so

    sum(g(t_i)) <= m (exp(R s - s^2 / 2) - 1 - R s + sqrt(pairs) R s).

Computed noise is ideal noise given that all draws are within reach, so every density is divided by
1 - mass, where `mass` is the probability that a draw is not: delta of computed noise is at most
(delta of ideal noise + what is lost) / (1 - mass).

On a sample, one neighbour is a mixture of two centres, and its outputs beyond the reach of the
other are those of one centre: sampling only lowers the cost.  Where one unit replaces another, both
are mixtures, with a centre in common and one each; outputs within reach of all three cost nothing,
and the rest costs at most twice that of one shift.

A sum of noise, or noise that a matrix correlates, is computed from independent normals, and the
shift can be spread over them with the same length s.  So the bound holds for it too, with all the
normals from which the release is computed.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike


class Shift(NamedTuple):
    """By how much a unit shifts several identical releases."""

    length: float  # in standard deviations of the noise, 1 / noise multiplier
    normals: float  # maximum number of independent normals that enter one release
    missing: float  # mass of the two normals of a pair that is beyond their reach
    times: float = 1.0


def lost_mass(length: ArrayLike, normals: float, missing: float) -> np.ndarray:
    """Return the delta that one release costs because its noise has a finite reach.

    Args:
        length: the sensitivity in standard deviations of the noise.
        normals: maximum number of independent normals that enter the release.
        missing: probability that an ideal pair of normals lies beyond the reach of computed ones.

    Returns:
        Float64 with the shape of `length`; 1 where the shift is so long that nothing is proved.

    Example:
        >>> bool(lost_mass(1.0, 1e6, 2**-63) < 1e-14), float(lost_mass(9.0, 1.0, 2**-63))
        (True, 1.0)
    """
    # pairs end at this number of standard deviations
    s, reach = np.asarray(length, np.float64), math.sqrt(-2 * math.log(missing))
    near = np.minimum(s, reach - np.sqrt(3))
    grown = np.maximum(np.expm1(reach * near - near**2 / 2) - reach * near, 0.0)
    spread = np.sqrt(np.maximum(normals / 2, 1.0)) * reach * near
    return np.where(s > near, 1.0, np.minimum(missing * (grown + spread), 1.0))


def total(shifts: Iterable[Shift]) -> float:
    """Return the delta that releases cost together."""
    return float(sum(s.times * lost_mass(s.length, s.normals, s.missing) for s in shifts))


def left_of(delta: float, shifts: Iterable[Shift]) -> float:
    """Return what is left of delta for ideal noise."""
    shifts = tuple(shifts)
    mass = sum(s.times * s.normals / 2 * s.missing for s in shifts)
    return delta * (1 - min(float(mass), 1.0)) - total(shifts)


def refuse_if_beyond(where: str, lost: ArrayLike, delta: float, error: type[Exception]) -> None:
    """Raise `error` if the reach of the noise costs delta or more."""
    if np.any(np.asarray(lost) >= delta):
        raise error(
            f"{where}: delta must exceed the mass that the computed noise cannot reach, got "
            f"delta={delta:g} and a mass of {np.max(lost):.3g}. "
            f"Use a larger noise multiplier, fewer rounds or a larger delta."
        )
