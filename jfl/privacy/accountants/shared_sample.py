"""Losses of one noisy step on a sample that both neighbours share: a unit that is replaced, or that
adds nothing, while all that is drawn stays as it is.

Draw the sample first.  Let A be the release where the unit is not in it, B where it is in one
neighbour, B' where it is in the other; rate is the chance that it is.  Whatever the others do,
these are Gaussians of one standard deviation, and the release is (1 - rate) A + rate B in one
neighbour and (1 - rate) A + rate B' in the other.  Let B lie at most d from A and at most e from
B'.  No set T of outcomes tells the neighbours apart better, at any x >= 1, than an interval on a
line where A, B' and B lie at 0, d - e and d:

    H_x = sup over T of rate B(T) - x rate B'(T) - (x - 1) (1 - rate) A(T),

and among all T of one B(T), by Neyman and Pearson, that interval has the least A(T) that a distance
d allows and the least B'(T) that a distance e allows, both at once.  For x < 1 the neighbours
change their places (H_x(P, Q) = 1 - x + x H_{1/x}(Q, P)), which mirrors the losses; what is left of
the probability has loss 0.  What dominates step by step dominates composed (Zhu, Dong, Wang,
AISTATS 2022, Theorem 10).

Lengths are in sensitivities under the adjacency in use, z = std / sensitivity:

- "replaced": a Poisson sample, replace_one (a sensitivity is two clip norms).  A to B is one clip
  norm, B to B' two: d = 1/2, e = 1.
- "replaced_in_full": a sample of fixed size.  In A another element is in the unit's place: d = 1,
  e = 1.
- "zeroed": a sample of fixed size, zero_out.  In A another element is in the unit's place: d = 2,
  e = 1.
- "restored": the same, from the neighbour in which the unit adds nothing: d = 1, e = 1.

A Poisson sample of limited capacity is one of fixed size if the others fill it, and a Poisson
sample if they leave room: one of two steps, and anybody may know which.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .with_replacement import cells, tail

# where B and B' lie for losses above 0, and for those below, mirrored
PLACES = {
    "replaced": ((0.5, -0.5), (0.5, -0.5)),
    "replaced_in_full": ((1.0, 0.0), (1.0, 0.0)),
    "zeroed": ((2.0, 1.0), (1.0, 0.0)),
    "restored": ((1.0, 0.0), (2.0, 1.0)),
}
STEPS = 10  # of Newton's method; beyond the nodes fewer do than halvings would
NODES = 2048  # of a rough step
FAR = 600.0  # exponents beyond are not taken


class Half(NamedTuple):
    """Losses above 0 of a pair: P is a mixture of N(0, z^2) and N(far, z^2); Q has `near` instead
    of `far`."""

    far: float
    near: float

    def masses(self, losses: jax.Array, rate: jax.Array, z: ArrayLike) -> tuple:
        """Return the probabilities that P and Q give to the cells between losses [n] >= 0,
        ascending.

        Args:
            losses: [n].
            rate: [1], of what does not lie at 0.
            z: std / sensitivity.

        Returns:
            P [n-1], Q [n-1]; (P, Q) of losses between 0 and the first, and above the last; and P -
            e^first Q of each cell, without the difference of numbers near each other.
        """
        (rate,), (far, near) = rate, self
        ends = jnp.concatenate([jnp.zeros(1), losses])
        s = place(ends, rate, z, far, near)
        absent, present, other = (cells(s - shift / z, ends) for shift in (0.0, far, near))
        p, q = (1 - rate) * absent + rate * present, (1 - rate) * absent + rate * other
        grown = jnp.expm1(jnp.minimum(ends[:-1], FAR))
        excess = rate * ((present - other) - grown * other) - (1 - rate) * grown * absent
        mix = lambda shift: (1 - rate) * tail(s[-1]) + rate * tail(s[-1] - shift / z)
        above = jnp.stack([mix(far), mix(near)])
        return p[1:], q[1:], jnp.stack([p[0], q[0]]), above, excess[1:]


def place(losses: jax.Array, rate: ArrayLike, z: ArrayLike, far: float, near: float) -> jax.Array:
    """Return the point x / z of each loss >= 0: above the middle of B and B' the loss increases.

    Between two nodes of a table, or above all of them, by Newton's method that stays in a bracket.
    """
    middle = (far + near) / (2 * z)
    # log(1 - rate + rate e^u) is at least u + log(rate), and at most the larger of u and 0
    enough = (losses - jnp.log(rate)) * z
    most = enough / far + far / (2 * z)
    if near > 0:
        most = jnp.maximum(most, enough / (far - near) + middle)
    nodes = middle + (14 + far / z) * jnp.linspace(0.0, 1.0, NODES + 1)
    after = jnp.searchsorted(_loss(nodes, rate, z, far, near)[0], losses)
    low = nodes[jnp.maximum(after - 1, 0)]
    high = jnp.where(after <= NODES, nodes[jnp.minimum(after, NODES)], jnp.maximum(most, low))

    def closer(_, bracket):
        low, high, s = bracket
        value, slope = _loss(s, rate, z, far, near)
        is_below = value < losses
        low, high = jnp.where(is_below, s, low), jnp.where(is_below, high, s)
        step = s - (value - losses) / slope
        inside = (step >= low) & (step <= high)
        return low, high, jnp.where(inside, step, (low + high) / 2)

    s = jax.lax.fori_loop(0, STEPS, closer, (low, high, (low + high) / 2))[2]
    return jnp.where(losses > 0, s, middle)


def even(rate: jax.Array, z: ArrayLike, direction: str) -> jax.Array:
    """Return the probability of loss 0, which the two halves leave.  `rate` is [1]."""
    above, below = (tail((far + near) / (2 * z)) for far, near in PLACES[direction])
    return (1 - rate[0]) * jnp.maximum(1 - above - below, 0.0)


def rough(direction: str, rate: jax.Array, z: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Return losses [n], ascending, and log masses [n] of a step, each cell at its middle: to
    choose a grid, never to prove.  `direction` is of `PLACES`, `rate` is [1]."""
    (upper, p), (lower, q) = (
        _nodes(rate[0], z, *places, of_p) for places, of_p in zip(PLACES[direction], (True, False))
    )
    mass = jnp.concatenate([q[::-1], even(rate, z, direction)[None], p])
    losses = jnp.concatenate([-lower[::-1], jnp.zeros(1), upper])
    return losses, jnp.log(jnp.maximum(mass / mass.sum(), 1e-300))


def _nodes(rate, z, far, near, of_p):
    s = (far + near) / (2 * z) + (14 + far / z) * jnp.linspace(0.0, 1.0, 2 * NODES + 1)
    loss = _loss(s, rate, z, far, near)[0]
    edges, shift = s[::2], (far if of_p else near) / z
    mass = (1 - rate) * cells(edges, edges) + rate * cells(edges - shift, edges)
    return loss[1::2], mass


def _loss(s, rate, z, far, near):
    """Return the loss at points x / z, and its slope there."""
    odds = jnp.log(rate) - jnp.log1p(-rate)
    u, v = (odds + shift / z * s - (shift / z) ** 2 / 2 for shift in (far, near))
    slope = (far * jax.nn.sigmoid(u) - near * jax.nn.sigmoid(v)) / z
    return jnp.logaddexp(0.0, u) - jnp.logaddexp(0.0, v), slope


def binomial_tails(rate: float, population: int, capacity: int) -> tuple[float, float]:
    """Return the probability that the others fill a Poisson sample of at most `capacity` elements,
    and the probability that a unit is then in it, as one of a uniform subset.

    Example:
        >>> binomial_tails(1.0, 10, 4)
        (1.0, 0.4)
    """
    from scipy import stats  # half a second: not at import

    full = float(stats.binom.sf(capacity - 1, population - 1, rate))
    taken = float(stats.binom.sf(capacity, population, rate)) * capacity / population
    return full, min(taken / full, rate) if full > 0 else rate
