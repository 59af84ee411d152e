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

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from . import pairs, roots

DIRECTIONS = {
    "add_remove": ("remove", "add"),
    "replace_one": ("replace",),
    "replace_one of a Poisson sample": ("replaced",),
    "zero_out": ("zeroed", "restored"),
}
# For a sample that both neighbours share: the direction of a step if the other elements leave room
# in the sample, and if they fill it.
SHARED = {
    "replaced": ("replaced", "replaced_in_full"),
    "zeroed": ("remove", "zeroed"),
    "restored": ("add", "restored"),
}
NUM_ROUGH_NODES = 512  # of a rough step
MAX_SEARCH_STEPS = 60


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
    if direction in SHARED and jnp.shape(rate) != (1,):
        return _mix_room_and_full(pessimistic, direction, rate, z, interval, start, size)
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
    if direction in SHARED and jnp.shape(rate) != (1,):
        return _mix_room_and_full(_outcomes, direction, rate, z, edges, start, size)
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


def _mix_room_and_full(step, direction, rate, z, *grid):
    """Return a step on a sample that both neighbours share.

    It is a mixture of two steps: the other elements leave room in the sample, or fill it.

    Args:
        step: `pessimistic` or `_outcomes`.
        direction: a key of `SHARED`.
        rate: 1 without a sample; otherwise [3], the fields rate, full and rate_when_full of an
            event.
        z: std / sensitivity.
        grid: the remaining arguments of `step`.
    """
    if not jnp.ndim(rate):
        return step("add" if direction == "restored" else "remove", rate, z, *grid)
    (room, of_room), (full, of_full) = _rates(direction, rate)
    pairs = zip(step(room, of_room, z, *grid), step(full, of_full, z, *grid))
    return tuple((1 - rate[1]) * a + rate[1] * b for a, b in pairs)


def _rates(direction, rate):
    """Return (direction, rate) of the step with room in the sample, and of the step without."""
    room, full = SHARED[direction]
    return (room, rate[:1] if room in pairs.PLACES else rate[0]), (full, rate[2:])


def rough(direction: str, rate: Any, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return approximate losses and log masses of a step, which only serve to choose a grid.

    Args:
        direction, rate, z: see the module.

    Returns:
        Float64[n], privacy losses, ascending; and Float64[n], the logs of their probabilities.
    """
    if direction in SHARED and jnp.shape(rate) != (1,):
        if not jnp.ndim(rate):
            return rough("add" if direction == "restored" else "remove", rate, z)
        each = [rough(way, of_way, z) for way, of_way in _rates(direction, rate)]
        log_weights = jnp.log1p(-rate[1]), jnp.log(rate[1])
        losses = jnp.concatenate([loss for loss, _ in each])
        masses = jnp.concatenate([mass + w for (_, mass), w in zip(each, log_weights)])
        losses, masses = jax.lax.sort((losses, masses), num_keys=1)
        return losses, masses
    if jnp.ndim(rate) == 2:  # without the infinite losses at both ends
        losses, *masses = rate[:, 1:-1]
        if direction == "remove":
            return losses, jnp.log(masses[0])
        return -losses[::-1], jnp.log(masses[1][::-1])
    if direction in pairs.PLACES:
        return pairs.rough_of_shared(direction, rate, z)
    if jnp.ndim(rate):
        if direction == "replace":
            return pairs.rough_of_repeated(rate, z)
        return pairs.rough_of_group(direction, rate, z)
    step = (28 + 2 / z) / NUM_ROUGH_NODES
    before = jnp.floor((12 + 0.5 / z) / step)
    # points x / z, one of them at x = 1/2, where both densities are equal
    s = 0.5 / z + step * (jnp.arange(NUM_ROUGH_NODES) - before)
    shift = s / z - 0.5 / z**2
    loss = jnp.logaddexp(jnp.log1p(-rate), jnp.log(rate) + shift)
    q = -(s**2) / 2 - math.log(2 * math.pi) / 2 + jnp.log(step)
    p = q + loss
    if direction == "remove":
        return loss, p
    if direction == "add":
        return -loss[::-1], q[::-1]
    node = jnp.arange(NUM_ROUGH_NODES) - before
    inside = jnp.where(node < 0, -jnp.inf, jnp.where(node > 0, 0.0, -math.log(2)))
    loss = jnp.where(node > 0, loss, 0.0)
    masses = jnp.concatenate(
        [(q + inside)[::-1], jnp.log(pairs.halves("replace", rate, z)[2])[None], p + inside]
    )
    return jnp.concatenate([-loss[::-1], jnp.zeros(1), loss]), masses - jnp.log(
        jnp.sum(jnp.exp(masses))
    )


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
    pick = lambda a, b: jax.tree.map(lambda x, y: jax.lax.select(a[0] <= b[0], x, y), a, b)
    ends = jnp.asarray(jnp.inf, values.dtype), jnp.zeros((), keys.dtype)
    return jax.lax.reduce((values, keys), ends, pick, (0,))[1]


def bracket_level(
    function: Callable, composed: Any, level: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Return (low, high) with function(composed, high) <= level < function(composed, low).

    The bracket lies within the non-negative losses; high is inf if there is none.

    Args:
        function: (composed, epsilon) -> a decreasing value.
        composed: a `pld_compose.Composed`.
        level: the value to find.
    """
    low, high = jnp.maximum(composed.losses[jnp.array([0, -1])], 0.0)
    # search the logarithm of the function, which is almost linear here
    log_ratio = lambda x: jnp.log(jnp.maximum(function(composed, x), 1e-300)) - jnp.log(level)
    bracket = roots.illinois(log_ratio, low, high, MAX_SEARCH_STEPS)
    return bracket.low, jnp.where(bracket.high_value <= 0, bracket.high, jnp.inf)


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
