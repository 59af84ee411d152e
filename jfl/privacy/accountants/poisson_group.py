"""Losses of one noisy step on a Poisson sample if several units differ at once, for add_remove.

Each of k units joins the sample on its own, so the number that do has the distribution
w = Binomial(k, rate), and moves the sum by at most as many sensitivities.  The pair

    P = sum over j of w_j N(j, z^2),     Q = N(0, z^2)

dominates every such step, of vectors too and where the units' contributions follow from earlier
releases (Charles et al., arXiv:2407.07737; Choquette-Choo et al., arXiv:2310.15526, for mixtures of
vectors of bounded lengths).  Lengths are in sensitivities; z = std / sensitivity.

The loss of P against Q rises with the outcome x, so each loss has one place s = x / z.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .with_replacement import cells, tail

NODES = 1024  # of a rough step
STEPS = 60  # of Newton's method, at most
NEVER = -1e12
FAR = 600.0  # exponents beyond are not taken


def masses(losses: jax.Array, law: jax.Array, z: ArrayLike) -> tuple:
    """Return the probabilities that P and Q give to the cells between losses [n], ascending.

    Returns:
        P [n-1], Q [n-1]; (P, Q) of losses below the first, and above the last; and P - e^first Q of
        each cell, without the difference of numbers near each other.
    """
    s = place(losses, law, z)
    plain = cells(s, losses)

    def add(total, each):
        shift, mass = each
        moved, ends = total
        below_and_above = jnp.stack([tail(shift - s[0]), tail(s[-1] - shift)])
        return (moved + mass * cells(s - shift, losses), ends + mass * below_and_above), None

    shifts = jnp.arange(1.0, len(law)) / z
    first = jnp.zeros_like(plain), jnp.zeros(2)
    (moved, ends), _ = jax.lax.scan(add, first, (shifts, law[1:]))
    of_q = jnp.stack([tail(-s[0]), tail(s[-1])])
    of_p = law[0] * of_q + ends
    factor = jnp.expm1(jnp.minimum(losses[:-1], FAR)) + (1 - law[0])
    below, above = jnp.stack([of_p, of_q], axis=1)
    return law[0] * plain + moved, plain, below, above, moved - factor * plain


def place(losses: jax.Array, law: jax.Array, z: ArrayLike) -> jax.Array:
    """Return the point s of each loss; a point far below all for losses that P never has.

    log(sum over j >= 1 of w_j e^(j s / z - j^2 / (2 z^2))) = log(e^loss - w_0) is convex in s with
    slopes of 1 / z and more.  Its largest term gives a point on the right, and from there
    Newton's method only ever comes closer.
    """
    number = jnp.arange(1.0, len(law))
    present = law[1:] > 0
    log_law = jnp.where(present, jnp.log(jnp.where(present, law[1:], 1.0)), -jnp.inf)
    heights = log_law - number**2 / (2 * z**2)
    rest = jnp.expm1(jnp.minimum(losses, 30.0)) + (1 - law[0])
    is_reached = rest > 0
    near = jnp.log(jnp.where(is_reached, rest, 1.0))
    far = losses + jnp.log1p(-law[0] * jnp.exp(-jnp.maximum(losses, 30.0)))
    target = jnp.where(losses < 30, near, far)[:, None]
    guesses = jnp.where(present, (target - jnp.where(present, heights, 0.0)) * z / number, jnp.inf)

    def newton(state):
        i, s, _ = state
        terms = heights + number * s[:, None] / z
        total = jax.nn.logsumexp(terms, axis=1)
        slope = jnp.exp(terms - total[:, None]) @ number / z
        step = jnp.maximum(total - target[:, 0], 0.0) / slope
        return i + 1, s - step, jnp.max(jnp.where(is_reached, step, 0.0))

    start = (0, jnp.min(guesses, axis=1), jnp.inf)
    s = jax.lax.while_loop(lambda state: (state[0] < STEPS) & (state[2] > 1e-13), newton, start)[1]
    return jnp.where(is_reached, s, NEVER)


def rough(direction: str, law: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return losses [n], ascending, and log masses [n] of a step by the trapezoid rule: to choose a
    grid, never to prove."""
    number = jnp.arange(0.0, len(law))
    most = len(law) - 1
    step = (28 + 2 * most / z) / NODES
    s = -12.0 + step * jnp.arange(NODES)
    log_law = jnp.log(jnp.maximum(law, 1e-300))
    loss = jax.nn.logsumexp(log_law + number * s[:, None] / z - number**2 / (2 * z**2), axis=1)
    q = -(s**2) / 2 - math.log(2 * math.pi) / 2 + jnp.log(step)
    return (loss, q + loss) if direction == "remove" else (-loss[::-1], q[::-1])
