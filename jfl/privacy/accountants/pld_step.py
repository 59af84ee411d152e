"""Losses of one noisy step as masses on a uniform grid: pessimistic, optimistic, or rough for
planning.

Every step here is the pair "remove" of a sampled Gaussian, P = (1 - q) N(0, z^2) + q N(1, z^2)
against Q = N(0, z^2), or is made of it:

- "remove": P against Q, for add_remove.
- "add": Q against P, for add_remove: every loss with its sign changed.
- "replaced", "zeroed" and "restored": a sample that both neighbours share, see `shared_sample`.
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

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import erf
from jax.typing import ArrayLike

from . import poisson_group, roots, shared_sample, with_replacement
from .with_replacement import cells, tail

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
FAR = 600.0  # exponents beyond are not taken
NEVER = -1e12
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
        mass, _, below, lost = _split(losses, interval, rate, z, poisson_group)
        return mass.at[0].add(below[0]), lost[0]
    if direction == "add":
        _, mass, lost, below = _split(-losses[::-1], interval, rate, z, poisson_group)
        return mass[::-1].at[0].add(below[1]), lost[1]
    up, down = _halves(direction)
    upper, _, below, lost = _split(jnp.maximum(losses, 0.0), interval, rate, z, up, floor=0.0)
    _, lower, _, under = _split(jnp.maximum(-losses[::-1], 0.0), interval, rate, z, down, floor=0.0)
    mass = (upper + lower[::-1]).at[0].add(below[0] + under[1])
    return mass.at[_index_of_zero(start, size)].add(_even(direction, rate, z)), lost[0]


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
        return _masses(edges, rate, z, poisson_group)[:2]
    if direction == "add":
        q, p = (m[::-1] for m in _masses(-edges[::-1], rate, z, poisson_group)[:2])
        return p, q
    up, down = _halves(direction)
    p, q = _masses(jnp.maximum(edges, 0.0), rate, z, up)[:2]
    mirrored_p, mirrored_q = _masses(jnp.maximum(-edges[::-1], 0.0), rate, z, down)[:2]
    inside = (-start >= 0) & (-start < size)
    even = jnp.where(inside, _even(direction, rate, z), 0.0)
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
    return (room, rate[:1] if room in shared_sample.PLACES else rate[0]), (full, rate[2:])


def _halves(direction):
    """Return what computes the masses of losses above 0, and of those below, mirrored."""
    if direction == "replace":
        return with_replacement, with_replacement
    return tuple(shared_sample.Half(*places) for places in shared_sample.PLACES[direction])


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
    if direction in shared_sample.PLACES:
        return shared_sample.rough(direction, rate, z)
    if jnp.ndim(rate):
        if direction == "replace":
            return with_replacement.rough(rate, z)
        return poisson_group.rough(direction, rate, z)
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
        [(q + inside)[::-1], jnp.log(_even("replace", rate, z))[None], p + inside]
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


def crossing(
    function: Callable, low: ArrayLike, high: ArrayLike, target: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Return the ends of a bracket in which a decreasing function reaches `target`: function(high)
    <= target < function(low), if at all.

    By the logarithm of the function, which is almost straight here.
    """
    log_ratio = lambda x: jnp.log(jnp.maximum(function(x), 1e-300)) - jnp.log(target)
    bracket = roots.illinois(log_ratio, low, high, CROSSINGS)
    return bracket.low, jnp.where(bracket.high_value <= 0, bracket.high, jnp.inf)


def least(values: jax.Array, keys: jax.Array) -> jax.Array:
    """Return the key [] of the least of values [n].

    An argmin of 64 bits does not lower inside a caller's 32-bit program.
    """
    pick = lambda a, b: jax.tree.map(lambda x, y: jax.lax.select(a[0] <= b[0], x, y), a, b)
    ends = jnp.asarray(jnp.inf, values.dtype), jnp.zeros((), keys.dtype)
    return jax.lax.reduce((values, keys), ends, pick, (0,))[1]


def reached(function: Callable, composed: Any, level: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Return `crossing` of function(composed, epsilon), within the losses that are not negative."""
    ends = jnp.maximum(composed.losses[jnp.array([0, -1])], 0.0)
    return crossing(functools.partial(function, composed), ends[0], ends[1], level)


# --- cells


def _split(losses, interval, rate, z, of_law: Any = with_replacement, floor=None):
    """Return masses of P and of Q at `losses` that keep both in every cell; (P, Q) below, and
    above.

    `of_law` computes the masses if `rate` is a distribution, of a number of copies or of units.
    """
    first, last = losses[:-1], losses[1:]
    near = last < FAR
    if jnp.ndim(rate):
        p, q, below, above, excess = of_law.masses(losses, rate, z)
    else:
        p, q, below, above = _masses(losses, rate, z, of_law, floor)
        # p - e^first q, without the difference of numbers near each other: rate * N(1) - (e^first -
        # 1 + rate) * N(0)
        factor = jnp.expm1(jnp.minimum(first, FAR)) + rate
        excess = rate * _cells(losses, rate, z, 1 / z) - factor * _cells(losses, rate, z, 0.0)
    high = jnp.clip(
        jnp.where(near & (q > 0), excess / -jnp.expm1(-interval), p), 0.0, p
    )  # else all of it goes up
    high_q = jnp.clip(high * jnp.exp(-last), 0.0, q)
    join = lambda low, high: jnp.pad(low, (0, 1)) + jnp.pad(high, (1, 0))
    return join(p - high, high), join(q - high_q, high_q), below, above


def _masses(losses, rate, z, of_law: Any = with_replacement, floor=None):
    """Return P [n-1] and Q [n-1] of the cells between n losses; (P, Q) between floor and the first,
    and above the last."""
    if jnp.ndim(rate):
        return of_law.masses(losses, rate, z)[:4]
    q, moved = _cells(losses, rate, z, 0.0), _cells(losses, rate, z, 1 / z)
    ends = jnp.stack([losses[0], losses[-1]])
    s = _place(ends, rate, z)
    mix = lambda plain, moved: ((1 - rate) * plain + rate * moved, plain)
    above = mix(tail(s[1]), tail(s[1] - 1 / z))
    if floor is None:
        below = mix(tail(-s[0]), tail(1 / z - s[0]))
    else:
        bottom = jnp.stack([jnp.full_like(ends[0], floor), ends[0]])
        below = mix(_cells(bottom, rate, z, 0.0)[0], _cells(bottom, rate, z, 1 / z)[0])
    return mix(q, moved)[0], q, below, above


def _cells(losses, rate, z, shift):
    """Return the normal probability of the cells between losses."""
    return cells(_place(losses, rate, z) - shift, losses)


def _place(loss, rate, z):
    """Return x / z at which the pair "remove" has this loss; a point far below all for losses that
    it never has."""
    small = jnp.expm1(jnp.minimum(loss, 30.0)) / rate
    reached = small > -1
    near = jnp.where(reached, jnp.log1p(jnp.where(reached, small, 0.0)), NEVER)
    far = loss - jnp.log(rate) + jnp.log1p((rate - 1) * jnp.exp(-jnp.maximum(loss, 30.0)))
    return z * jnp.where(loss < 30, near, far) + 0.5 / z


def _even(direction, rate, z):
    """Return the probability of loss 0, which the two halves leave."""
    if direction in shared_sample.PLACES:
        return shared_sample.even(rate, z, direction)
    if jnp.ndim(rate):
        return with_replacement.even(rate, z)
    return (1 - rate) * erf(math.sqrt(0.125) / z)


def _index_of_zero(start, size):
    return jnp.clip(-start, 0, size - 1).astype(jnp.int32)
