"""The privacy losses of one noisy step as masses on a uniform grid.

`pessimistic` and `optimistic` bound the true step from both sides; `rough` approximates it, to
choose a grid.

Every step here is the pair of a sampled Gaussian, P = (1 - q) N(0, z^2) + q N(1, z^2) and Q = N(0,
z^2), or is made from it.  The direction says how:

- "remove": P against Q, for add_remove.
- "add": Q against P, for add_remove: every loss with its sign changed.
- "replaced", "zeroed" and "restored": a sample that both neighbours share, see `pairs`.
- "replace": for a sample of fixed size and replace_one: the part of P, Q with loss > 0, its mirror
  image, and the remaining probability at loss 0.

The hockey-stick profile of "replace" is q * delta_G(log(1 + (e^eps - 1) / q)) for eps >= 0 and its
mirror image below: no pair of neighbours has a larger one (Balle, Barthe, Gaboardi, NeurIPS 2018,
Theorem 11), and pairs that dominate each step also dominate the composition (Zhu, Dong, Wang,
AISTATS 2022, Theorem 10).  With q = 1, "remove", "add" and "replace" are the Gaussian itself.

An epoch of random allocation is one step, with the directions "remove" and "add" of a discrete
pair, see `allocation`.

Masses are computed as differences of the smaller tail of the normal distribution, so their relative
error is small everywhere.  (A grid of rounding errors far out would come back through the FFT as
real loss.)  Everything is computed in the caller's precision; `pld` calls it in float64.

Arguments that the functions of this module share:
    direction: see above.
    rate: q; or an array, the numbers that describe a sample in `pairs`.
    z: std / sensitivity under the adjacency in use.
    interval: the distance between grid points.
    start: the index of the first grid point; point j has the loss interval * (start + j).
    size: the number of grid points, static.  All other arguments may be traced.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from . import pairs

DIRECTIONS = {
    "add_remove": ("remove", "add"),
    "replace_one": ("replace",),
    "replace_one of a Poisson sample": ("replaced",),
    "zero_out": ("zeroed", "restored"),
}
# For a sample that both neighbours share: the direction of a step if the other elements leave room
# in the sample, if they fill it, and without a sample.
SHARED = {
    "replaced": ("replaced", "replaced_in_full", "remove"),
    "zeroed": ("remove", "zeroed", "remove"),
    "restored": ("add", "restored", "add"),
}
NUM_ROUGH_CELLS = 1024  # of a rough step
NUM_HALVINGS = 45  # of the losses of a grid, in the search for an epsilon


def pessimistic(
    direction: str, rate: Any, z: jax.Array, interval: jax.Array, start: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Return the probabilities of privacy losses of a step that is never more private than the true
    one.

    The probabilities that P and Q give to a cell between two grid points are split over its ends so
    that both are preserved ("connect the dots").  By convexity of (p - e^eps q)_+ this never lowers
    the profile.  Mass below the grid is moved up to the first point; mass above the grid is lost:
    it counts as an outcome that reveals everything.

    Args:
        direction, rate, z, interval, start, size: see the module.

    Returns:
        Float64[size], the probability of the loss at each grid point; and Float64[], the lost mass,
        which is the probability of a loss above the grid.  Both are probabilities under the first
        distribution of the pair.

    References:
        Doroshenko, Ghazi, Kamath, Kumar, Manurangsi, PETS 2022.
    """
    losses = interval * (start + jnp.arange(size))
    if direction == "remove":
        mass, _, below, lost = _split_cells(losses, interval, pairs.removed(rate, z).masses)
        return mass.at[0].add(below[0]), lost[0]
    if direction == "add":
        _, mass, lost, below = _split_cells(-losses[::-1], interval, pairs.removed(rate, z).masses)
        return mass[::-1].at[0].add(below[1]), lost[1]
    up, down, even = pairs.halves(direction, rate, z)
    above_zero = lambda losses, half: _split_cells(
        jnp.maximum(losses, 0.0), interval, half.masses_above_zero
    )
    upper, _, below, lost = above_zero(losses, up)
    _, lower, _, under = above_zero(-losses[::-1], down)
    mass = (upper + lower[::-1]).at[0].add(below[0] + under[1])
    return mass.at[_index_of_zero(start, size)].add(even), lost[0]


def optimistic(
    direction: str, rate: Any, z: jax.Array, interval: jax.Array, start: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Return the probabilities of privacy losses of a step that is never less private than the true
    one.

    All outcomes with losses within half an interval of a grid point become one, which is
    post-processing.  Outcomes outside the grid are dropped.

    Args:
        direction, rate, z, interval, start, size: see the module.

    Returns:
        Float64[size], the probability of each of the merged outcomes under the first distribution
        of the pair; and Float64[size], offsets.  The loss of outcome j is interval * (start + j) +
        offset[j].
    """
    edges = interval * (start - 0.5 + jnp.arange(size + 1))
    p, q = _outcomes(direction, rate, z, edges, start, size)
    known = (p > 0) & (q > 0)
    loss = jnp.log(jnp.where(known, p, 1.0)) - jnp.log(jnp.where(known, q, 1.0))
    offset = jnp.clip(loss - interval * (start + jnp.arange(size)), -interval / 2, interval / 2)
    return p, jnp.where(known, offset, -interval / 2)


def _outcomes(direction, rate, z, edges, start, size):
    """Return the masses P [size] and Q [size] of the losses between edges [size + 1]."""
    if direction == "remove":
        return pairs.removed(rate, z).masses(edges)[:2]
    if direction == "add":
        q, p = (m[::-1] for m in pairs.removed(rate, z).masses(-edges[::-1])[:2])
        return p, q
    up, down, even = pairs.halves(direction, rate, z)
    p, q = up.masses_above_zero(jnp.maximum(edges, 0.0))[:2]
    mirrored_p, mirrored_q = down.masses_above_zero(jnp.maximum(-edges[::-1], 0.0))[:2]
    even = jnp.where((-start >= 0) & (-start < size), even, 0.0)
    return tuple(
        side.at[_index_of_zero(start, size)].add(even)
        for side in (p + mirrored_q[::-1], q + mirrored_p[::-1])
    )


def rough(direction: str, rate: Any, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return approximate losses and log masses of a step, which only serve to choose a grid.

    Args:
        direction, rate, z: see the module.

    Returns:
        Float64[n], privacy losses, ascending; and Float64[n], the logs of their probabilities.
    """
    if direction in ("remove", "add"):
        losses, p, q = pairs.removed(rate, z).cells(NUM_ROUGH_CELLS)
        return (losses, jnp.log(p)) if direction == "remove" else (-losses[::-1], jnp.log(q[::-1]))
    up, down, even = pairs.halves(direction, rate, z)
    (upper, p, _), (lower, _, q) = up.cells(NUM_ROUGH_CELLS), down.cells(NUM_ROUGH_CELLS)
    masses = jnp.concatenate([q[::-1], even[None], p])
    losses = jnp.concatenate([-lower[::-1], jnp.zeros(1), upper])
    return losses, jnp.log(masses / jnp.sum(masses))


# --- reading a composed profile


def hockey_stick(composed: Any, epsilon: ArrayLike) -> jax.Array:
    """Return delta at `epsilon` of composed losses.

    Delta is the mass of larger losses, weighted by 1 - exp(epsilon - loss), plus the extra
    probability.

    Args:
        composed: a `pld_compose.Composed`.
        epsilon: [].

    Returns:
        Float64[].
    """
    return composed.extra + jnp.sum(
        composed.mass * -jnp.expm1(jnp.minimum(epsilon - composed.losses, 0.0))
    )


def key_of_smallest(values: jax.Array, keys: jax.Array) -> jax.Array:
    """Return the element [] of keys [n] at the position of the smallest of values [n].

    This replaces argmin, which cannot be lowered in 64 bits inside a caller's 32-bit program.
    """
    return jnp.max(jnp.where(values == jnp.min(values), keys, -jnp.inf))


def bracket_level(
    function: Callable, composed: Any, level: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Return (low, high) with function(composed, high) <= level < function(composed, low).

    The bracket lies within the non-negative losses; high is inf if there is none, and low = high if
    the function is at most `level` everywhere.

    Args:
        function: (composed, epsilon) -> a decreasing value.
        composed: a `pld_compose.Composed`.
        level: the value to find.
    """
    first, last = jnp.maximum(composed.losses[jnp.array([0, -1])], 0.0)
    fits = lambda x: function(composed, x) <= level  # nan does not fit

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        is_below = fits(middle)
        return jnp.where(is_below, low, middle), jnp.where(is_below, middle, high)

    start = first, jnp.where(fits(first), first, last)
    low, high = jax.lax.fori_loop(0, NUM_HALVINGS, halve, start)
    return low, jnp.where(fits(last), high, jnp.inf)


# --- cells


def _split_cells(losses, interval, masses):
    """Split the mass of each cell between two losses over its ends, preserving that of P and of Q.

    Args:
        losses: Float[n].
        interval: the distance between them.
        masses: a method of `pairs.Pair`.

    Returns:
        The masses of P [n] and of Q [n]; (P, Q) below the first loss; (P, Q) above the last one.
    """
    p, q, excess, below, above = masses(losses)
    last = losses[1:]
    # Where exponents overflow, all of P goes to the upper end.
    high = jnp.where((last < pairs.MAX_EXPONENT) & (q > 0), excess / -jnp.expm1(-interval), p)
    high = jnp.clip(high, 0.0, p)
    high_q = jnp.clip(high * jnp.exp(-last), 0.0, q)
    join = lambda low, high: jnp.pad(low, (0, 1)) + jnp.pad(high, (1, 0))
    return join(p - high, high), join(q - high_q, high_q), below, above


def _index_of_zero(start, size):
    """Return the index of the grid point with loss 0, clipped to the grid."""
    return jnp.clip(-start, 0, size - 1).astype(jnp.int32)
