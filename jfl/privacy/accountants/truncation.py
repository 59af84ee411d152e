"""The delta that is lost because computed noise has a finite range.

The accounting assumes ideal normal noise, but a computed normal is never more than R standard
deviations from 0.  If a contribution shifts a release, a few outputs are within the range of the
noise on one side and outside it on the other, so they reveal which side they came from.  Everywhere
else the ratio of the two densities is that of ideal Gaussians.  So a release costs the probability
of such an output, added to delta once; it is not multiplied by e^epsilon.

For two normals that are drawn as a pair, the radius has the density r exp(-r^2 / 2) on [0, R].  A
shift of the pair by t standard deviations leaves the range with probability at most

    g(t) = m (exp(R t - t^2 / 2) - 1),    m = exp(-R^2 / 2), the mass of a pair outside the range.

A shift of length s spreads over pairs with sum(t_i^2) = s^2.  Up to s = R - sqrt(3), (g(t) / m - R
t) / t^2 grows with t, and sum(t_i) <= sqrt(pairs) s, so

    sum(g(t_i)) <= m (exp(R s - s^2 / 2) - 1 - R s + sqrt(pairs) R s).

Computed noise is ideal noise conditioned on all draws being within range, so every density is
divided by 1 - mass, where `mass` is the probability that some draw is not.  Therefore the delta of
computed noise is at most (delta of ideal noise + the cost above) / (1 - mass).

With sampling, one neighbour is a mixture of two centres, and only outputs of one of them are
outside the range of the other: sampling can only lower the cost.  If one unit replaces another,
both neighbours are mixtures, with one centre in common and one each.  Outputs within range of all
three centres cost nothing, and the others cost at most twice as much as one shift.

A sum of noise, or noise correlated by a matrix, is computed from independent normals, and the shift
can be spread over them with the same length s.  So the bound holds for such noise too, with the
number of all normals from which the release is computed.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike


class Shift(NamedTuple):
    """The shift that a unit causes in several identical releases."""

    length: float  # in standard deviations of the noise: 1 / noise multiplier
    normals: float  # maximum number of independent normals in one release
    missing: float  # probability that an ideal pair of normals is outside the range
    times: float = 1.0  # number of releases

    @property
    def mass(self) -> float:
        """The probability that some ideal noise of a release is outside the range."""
        return self.normals / 2 * self.missing

    @property
    def lost(self) -> float:
        """The delta that a release costs."""
        return float(lost_mass(self.length, self.normals, self.missing))


class Integers(NamedTuple):
    """The same for several identical releases with integer noise; see `Encoding.lost_mass`."""

    lost: float
    mass: float
    times: float = 1.0


def lost_mass(length: ArrayLike, normals: float, missing: float) -> np.ndarray:
    """Return the delta that one release costs because its noise has a finite range.

    Args:
        length: the sensitivity in standard deviations of the noise.
        normals: maximum number of independent normals in the release.
        missing: probability that an ideal pair of normals is outside the range of computed ones.

    Returns:
        Float64 with the shape of `length`; 1 if the shift is so long that nothing is proved.

    Example:
        >>> bool(lost_mass(1.0, 1e6, 2**-63) < 1e-14), float(lost_mass(9.0, 1.0, 2**-63))
        (True, 1.0)
    """
    # the formula of the module docstring; R is `radius`
    length, radius = np.asarray(length, np.float64), math.sqrt(-2 * math.log(missing))
    s = np.minimum(length, radius - np.sqrt(3))
    exponential = np.maximum(np.expm1(radius * s - s**2 / 2) - radius * s, 0.0)
    linear = np.sqrt(np.maximum(normals / 2, 1.0)) * radius * s
    return np.where(length > s, 1.0, np.minimum(missing * (exponential + linear), 1.0))


def total(shifts: Iterable[Shift | Integers]) -> float:
    """Return the delta that the finite range of the noise costs in the releases of all `shifts`."""
    return float(sum(s.times * s.lost for s in shifts))


def left_of(delta: float, shifts: Iterable[Shift | Integers]) -> float:
    """Return the delta that remains for ideal noise, after the cost of the noise's finite range.

    Args:
        delta: the delta of the guarantee.
        shifts: the shifts that a unit causes, of all releases of the run.
    """
    shifts = tuple(shifts)
    mass = sum(s.times * s.mass for s in shifts)
    return delta * (1 - min(float(mass), 1.0)) - total(shifts)


def refuse_if_beyond(where: str, lost: ArrayLike, delta: float, error: type[Exception]) -> None:
    """Raise `error` if the finite range of the noise costs delta or more.

    Args:
        where: the name of the caller, for the message.
        lost: Float[...], the delta that the finite range costs.
        delta: the delta of the guarantee.
        error: the class of the exception.
    """
    if np.any(np.asarray(lost) >= delta):
        raise error(
            f"{where}: expected a delta above the mass that the computed noise cannot reach, "
            f"{min(np.max(lost), 1.0):.3g}, but got {delta:g}. "
            "Use a larger noise multiplier (jfl.ledger prints it), more bits for integers, fewer "
            "rounds or a larger delta. If each client adds only a share of the noise, ask for "
            "view='third_party' or 'aggregate'."
        )
