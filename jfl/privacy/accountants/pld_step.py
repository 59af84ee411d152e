"""Losses of one noisy step as masses on a uniform grid: pessimistic, optimistic, or rough for
planning.

Every step here is the pair "remove" of a sampled Gaussian, P = (1 - q) N(0, z^2) + q N(1, z^2)
against Q = N(0, z^2), or is made of it:

- "remove": P against Q, for add_remove.
- "add": Q against P, for add_remove: every loss with its sign changed.
- "replaced", "zeroed" and "restored": a sample that both neighbours share, see `pairs`.
- "replace": for a sample of fixed size and replace_one: the part of P, Q with loss > 0, the same
  mirrored, and what is left of the probability at loss 0.

The hockey-stick profile of "replace" is q * delta_G(log(1 + (e^eps - 1) / q)) for eps >= 0 and its
mirror image below: no pair of neighbours has a larger one (Balle, Barthe, Gaboardi, NeurIPS 2018,
Theorem 11), and what dominates step by step dominates composed (Zhu, Dong, Wang, AISTATS 2022,
Theorem 10).  q = 1 is the Gaussian itself in all three.

Masses are differences of the smaller tail of the normal distribution, exact relative to themselves
and not only to 1: a grid of rounding noise far out would come back through the FFT as real loss.  z
is std over the sensitivity under the adjacency in use.  Everything computes in the caller's
precision; `pld` calls it in float64.
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
# of a sample that both share: what a step is where the others leave room, and where they fill it
SHARED = {
    "replaced": ("replaced", "replaced_in_full"),
    "zeroed": ("remove", "zeroed"),
    "restored": ("add", "restored"),
}
ROUGH = 512  # nodes of a rough step
CROSSINGS = 60


def pessimistic(
    direction: str, rate: Any, z: jax.Array, interval: jax.Array, start: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Return a step that is never better than the true one: mass [size] at losses interval * (start
    + j), and lost mass.

    The probabilities that P and Q give to a cell between two grid points are split over its ends so
    that both are kept ("connect the dots").  By convexity of (p - e^eps q)_+ such a spread never
    lowers the profile.  What lies below the grid is moved up to its first point; what lies above is
    lost: an outcome that reveals everything.

    Shapes:
        size is static; all else may be traced -> Float64[size], Float64[].

    References:
        Doroshenko, Ghazi, Kamath, Kumar, Manurangsi, PETS 2022.
    """
    if direction in SHARED and jnp.shape(rate) != (1,):
        return _with_room(pessimistic, direction, rate, z, interval, start, size)
    losses = interval * (start + jnp.arange(size))
    if direction == "remove":
        mass, _, below, lost = _split(losses, interval, pairs.removed(rate, z).masses)
        return mass.at[0].add(below[0]), lost[0]
    if direction == "add":
        _, mass, lost, below = _split(-losses[::-1], interval, pairs.removed(rate, z).masses)
        return mass[::-1].at[0].add(below[1]), lost[1]
    up, down, even = pairs.halves(direction, rate, z)
    above_zero = lambda losses, half: _split(
        jnp.maximum(losses, 0.0), interval, half.masses_above_zero
    )
    upper, _, below, lost = above_zero(losses, up)
    _, lower, _, under = above_zero(-losses[::-1], down)
    mass = (upper + lower[::-1]).at[0].add(below[0] + under[1])
    return mass.at[_index_of_zero(start, size)].add(even), lost[0]


def optimistic(
    direction: str, rate: Any, z: jax.Array, interval: jax.Array, start: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Return a step that is never worse than the true one: mass [size], at losses interval * (start
    + j) + offset [size].

    All outcomes with losses within half an interval of a grid point become one, which is
    post-processing; `offset` is where their common loss lies next to the grid point.  What lies
    outside the grid is dropped.
    """
    edges = interval * (start - 0.5 + jnp.arange(size + 1))
    p, q = _outcomes(direction, rate, z, edges, start, size)
    known = (p > 0) & (q > 0)
    loss = jnp.log(jnp.where(known, p, 1.0)) - jnp.log(jnp.where(known, q, 1.0))
    offset = jnp.clip(loss - interval * (start + jnp.arange(size)), -interval / 2, interval / 2)
    return p, jnp.where(known, offset, -interval / 2)


def _outcomes(direction, rate, z, edges, start, size):
    """Return P [size] and Q [size] of the losses between edges [size + 1]."""
    if direction in SHARED and jnp.shape(rate) != (1,):
        return _with_room(_outcomes, direction, rate, z, edges, start, size)
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


def _with_room(step, direction, rate, z, *grid):
    """Return a step on a sample that both neighbours share, as a mixture of two: the others leave
    room, or fill it.

    Args:
        step: `pessimistic` or `_outcomes`.
        direction: of `SHARED`.
        rate: the number 1 without a sample; [3] the numbers of an event.
        z: std / sensitivity.
        grid: the arguments of the step that describe the grid.
    """
    if not jnp.ndim(rate):
        return step("add" if direction == "restored" else "remove", rate, z, *grid)
    (room, of_room), (full, of_full) = _rates(direction, rate)
    pairs = zip(step(room, of_room, z, *grid), step(full, of_full, z, *grid))
    return tuple((1 - rate[1]) * a + rate[1] * b for a, b in pairs)


def _rates(direction, rate):
    """Return (direction, rate) if the others leave room, and if they fill the sample."""
    room, full = SHARED[direction]
    return (room, rate[:1] if room in pairs.PLACES else rate[0]), (full, rate[2:])


def rough(direction: str, rate: Any, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return losses [n], ascending, and log masses [n] of a step by the trapezoid rule: to choose a
    grid, never to prove."""
    if direction in SHARED and jnp.shape(rate) != (1,):
        if not jnp.ndim(rate):
            return rough("add" if direction == "restored" else "remove", rate, z)
        each = [rough(way, of_way, z) for way, of_way in _rates(direction, rate)]
        shares = jnp.log1p(-rate[1]), jnp.log(rate[1])
        losses = jnp.concatenate([loss for loss, _ in each])
        masses = jnp.concatenate([mass + share for (_, mass), share in zip(each, shares)])
        losses, masses = jax.lax.sort((losses, masses), num_keys=1)
        return losses, masses
    if direction in pairs.PLACES:
        return pairs.rough_of_shared(direction, rate, z)
    if jnp.ndim(rate):
        if direction == "replace":
            return pairs.rough_of_repeated(rate, z)
        return pairs.rough_of_group(direction, rate, z)
    step = (28 + 2 / z) / ROUGH
    before = jnp.floor((12 + 0.5 / z) / step)
    s = 0.5 / z + step * (
        jnp.arange(ROUGH) - before
    )  # x / z, with a node at x = 1/2, where both densities meet
    shift = s / z - 0.5 / z**2
    loss = jnp.logaddexp(jnp.log1p(-rate), jnp.log(rate) + shift)
    q = -(s**2) / 2 - math.log(2 * math.pi) / 2 + jnp.log(step)
    p = q + loss
    if direction == "remove":
        return loss, p
    if direction == "add":
        return -loss[::-1], q[::-1]
    node = jnp.arange(ROUGH) - before
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
    """Return delta at `epsilon` of composed losses: the mass beyond, weighted by 1 - exp(epsilon -
    loss)."""
    return composed.extra + jnp.sum(
        composed.mass * -jnp.expm1(jnp.minimum(epsilon - composed.losses, 0.0))
    )


def least(values: jax.Array, keys: jax.Array) -> jax.Array:
    """Return the key [] of the least of values [n].

    An argmin of 64 bits does not lower inside a caller's 32-bit program.
    """
    pick = lambda a, b: jax.tree.map(lambda x, y: jax.lax.select(a[0] <= b[0], x, y), a, b)
    ends = jnp.asarray(jnp.inf, values.dtype), jnp.zeros((), keys.dtype)
    return jax.lax.reduce((values, keys), ends, pick, (0,))[1]


def reached(function: Callable, composed: Any, level: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Return the ends of a bracket, within the losses that are not negative, in which
    function(composed, epsilon) falls to `level`: function(high) <= level < function(low), if at
    all."""
    low, high = jnp.maximum(composed.losses[jnp.array([0, -1])], 0.0)
    # by the logarithm of the function, which is almost straight here
    log_ratio = lambda x: jnp.log(jnp.maximum(function(composed, x), 1e-300)) - jnp.log(level)
    bracket = roots.illinois(log_ratio, low, high, CROSSINGS)
    return bracket.low, jnp.where(bracket.high_value <= 0, bracket.high, jnp.inf)


# --- cells


def _split(losses, interval, masses):
    """Return masses of P and of Q at `losses` that keep both in every cell; (P, Q) below, and
    above."""
    p, q, excess, below, above = masses(losses)
    last = losses[1:]
    # else all of it goes up
    high = jnp.where((last < pairs.FAR) & (q > 0), excess / -jnp.expm1(-interval), p)
    high = jnp.clip(high, 0.0, p)
    high_q = jnp.clip(high * jnp.exp(-last), 0.0, q)
    join = lambda low, high: jnp.pad(low, (0, 1)) + jnp.pad(high, (1, 0))
    return join(p - high, high), join(q - high_q, high_q), below, above


def _index_of_zero(start, size):
    return jnp.clip(-start, 0, size - 1).astype(jnp.int32)
