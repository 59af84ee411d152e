"""Losses of one noisy step on draws with replacement, for replace_one: an element counts as often
as it is drawn.

The distribution w of the number of copies m, Binomial(draws, 1 / population), is the same whatever
the data.  Lengths are in units of the sensitivity S, the largest distance between two
contributions, and z = std / S.

The dominating pair.  Draw first, from the other elements, the contributions g_1, g_2, ... of all
places; then m, and let the element take the first m places (a sum does not care which).  Given the
g, which both neighbours share, the sums are mixtures over m with weights w_m of Gaussians around

    v_m = sum over j <= m of (a - g_j)          and          v'_m = sum over j <= m of (a' - g_j)

for the element's contribution a in one neighbour and a' in the other (each copy may have its own:
clients that run again for each draw).  The means obey |v_m - v'_k| <= max(m, k), and v_0 = v'_0 =
0.  By joint convexity the hockey-stick divergence H_x of the release is at most that of the worst
such mixtures (Balle, Barthe, Gaboardi, NeurIPS 2018, condition on the shared draws in the same
way).  Let P_m and Q_k be these Gaussians, D_m(x) = H_x(N(m, z^2), N(0, z^2)) and x >= 1.

Share each Q_k out: P_m gets the amounts f_mk >= 0 for k <= m, with sum over m of f_mk at most x
w_k.  Since the positive part of a sum is at most the sum of positive parts, and H_x is convex in
its second argument and grows with the distance,

    H_x(sum w_m P_m, sum w_k Q_k)
        <= sum over m of integral (w_m P_m - sum over k <= m of f_mk Q_k)_+
        <= sum over m >= 1 of w_m D_m(x_m),
    w_m x_m = sum over k <= m of f_mk,

where P_0 = Q_0 got f_00 = w_0 and vanished.  Such shares exist if and only if, for each j, the sum
over 1 <= m <= j of w_m x_m is at most x W_j - w_0, with W_j = w_0 + ... + w_j.  The smallest of
these bounds is a convex program whose solution is explicit: with mu_m = m / z and the likelihood
ratio r_m(t) = exp(mu_m t - mu_m^2 / 2) of one Gaussian at the point t,

    x_m = r_m(t_m),
    t_m = t where mu_m < t,
          else max(t, log(x) / mu_m + mu_m / 2) (r_m(t_m) = x for the latter),
    t the point where the largest over j of
        w_0 + (sum over 1 <= m <= j of w_m r_m(t)) - x W_j
    is 0.

Its value is delta(x) = P(loss > log x) - x Q(loss > log x) with the tails

    P(loss > log x) = w_0 T(t) + sum over m >= 1 of w_m T(t_m - mu_m),
    Q(loss > log x) = w_0 T(t) + sum of w_m T(t_m),

T the normal tail: these are what the grid needs, and each is a sum of normal tails.  For x < 1 the
roles of P and Q change (the family of pairs is symmetric), which mirrors the losses; what is left
of the probability, w_0 (1 - 2 T(t at x = 1)), has loss 0.  The profile is convex, so there is such
a pair; it dominates every step, and what dominates step by step dominates composed (Zhu, Dong,
Wang, AISTATS 2022, Theorem 10), also where later steps are chosen in view of earlier releases. A
grid needs no more: `pld_step` splits each cell so that both probabilities stay, which never lowers
the profile.

How good it is.  With all x_m = 1 + (x - 1) / (1 - w_0) the bound is Theorem 10 of Balle, Barthe,
Gaboardi for draws with replacement, which `rdp.with_replacement` uses: this one is never above it.
If the last j is the number of draws (x not near 1) all t_m are t, and the bound is attained by a
data set: the pair of sum w_m N(m, z^2) and N(0, z^2), all other elements at one end of the range
and the changed one at either.  That single pair does not dominate: for x near 1, and for x < 1,
others are worse.  With one draw it is the profile of a sample without replacement of size one, in
`pld_step`.
"""

import math

import jax
import jax.numpy as jnp
from jax.scipy.special import erf, erfc
from jax.typing import ArrayLike

ROUGH = 2048  # nodes of a rough step
STEPS = 60  # of Newton's method, at most


def masses(losses: jax.Array, law: jax.Array, z: jax.Array) -> tuple:
    """Return the probabilities that P and Q give to the cells between losses [n] >= 0, ascending.

    Returns:
        P [n-1], Q [n-1]; (P, Q) of losses between 0 and the first, and above the last; and P -
        e^first Q of each cell, without the difference of numbers near each other.
    """
    ends = jnp.concatenate([jnp.zeros(1), losses])
    t = place(ends, law, z)
    factor = jnp.expm1(jnp.minimum(ends[:-1], 600.0))
    none = law[0] * cells(t, ends)

    def add(total, each):
        p, q, excess, above = total
        k, mass = each
        mu = k / z
        places = _place_of_one(t, ends, mu)
        plain, moved = mass * cells(places, ends), mass * cells(places - mu, ends)
        tails = mass * tail(jnp.stack([places[-1] - mu, places[-1]]))
        return (
            p + moved,
            q + plain,
            excess + (moved - plain) - factor * plain,
            above + tails,
        ), None

    first = none, none, -factor * none, jnp.full(2, law[0] * tail(t[-1]))
    (p, q, excess, above), _ = jax.lax.scan(add, first, _copies(law))
    return p[1:], q[1:], jnp.stack([p[0], q[0]]), above, excess[1:]


def even(law: jax.Array, z: jax.Array) -> jax.Array:
    """Return the probability of loss 0, which the two halves leave."""
    return law[0] * erf(place(jnp.zeros(1), law, z)[0] / math.sqrt(2))


def rough(law: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return losses [n], ascending, and log masses [n] of a step, each cell at its middle: to
    choose a grid, never to prove."""
    loss = _nodes(law, z, 2 * ROUGH)[1]
    p, q = masses(loss[::2], law, z)[:2]
    log_masses = jnp.log(jnp.concatenate([q[::-1], even(law, z)[None], p]))
    return jnp.concatenate(
        [-loss[1::2][::-1], jnp.zeros(1), loss[1::2]]
    ), log_masses - jax.nn.logsumexp(log_masses)


def place(losses: jax.Array, law: jax.Array, z: jax.Array) -> jax.Array:
    """Return the point t of each loss >= 0.

    The condition is convex in t, and so is the loss as a function of t: tangents of the latter lie
    on the right of the point, and from there Newton's method for the former only ever comes closer.
    """
    copies, mass = _copies(law)
    rest = law[0] * -jnp.expm1(-losses)

    def nearest(start, each):  # these copies suffice for the condition
        k, probability, enough = each
        guess = (
            losses + jnp.log((enough + rest) / jnp.where(probability > 0, probability, 1.0))
        ) * z / k + k / (2 * z)
        return jnp.where(probability > 0, jnp.minimum(start, guess), start), None

    start = jax.lax.scan(nearest, jnp.full_like(losses, jnp.inf), (copies, mass, jnp.cumsum(mass)))[
        0
    ]
    nodes, reached, slopes = _nodes(law, z, ROUGH)
    after = jnp.searchsorted(reached, losses)
    for node in jnp.clip(after - 1, 0), jnp.clip(after, max=ROUGH):
        start = jnp.minimum(start, nodes[node] + (losses - reached[node]) / slopes[node])
    start = jnp.maximum(start, nodes[0])

    def newton(state):
        i, t, _ = state

        def add(total, each):
            (value, slope), best = total
            k, probability = each
            grown = jnp.expm1(k / z * t - k**2 / (2 * z**2) - losses)
            value, slope = value + probability * grown, slope + probability * k / z * (grown + 1)
            better = (value > best[0]) & (probability > 0)
            return (
                (value, slope),
                tuple(jnp.where(better, new, old) for new, old in zip((value, slope), best)),
            ), None

        none = jnp.zeros_like(losses), jnp.zeros_like(losses)
        value, slope = jax.lax.scan(
            add, (none, (jnp.full_like(losses, -jnp.inf), none[1])), (copies, mass)
        )[0][1]
        step = jnp.where(
            slope > 0, jnp.maximum(value - rest, 0.0) / jnp.where(slope > 0, slope, 1.0), 0.0
        )
        return i + 1, t - step, jnp.max(step)

    # what is left after a step is about its square, times the largest mu
    far = 1e-8 * z / len(mass)
    return jax.lax.while_loop(
        lambda state: (state[0] < STEPS) & (state[2] > far), newton, (0, start, jnp.inf)
    )[1]


def _nodes(law, z, number):
    """Return points t [number + 1] from where the loss is 0 to where P ends; their losses, and the
    slopes of these.

    The loss at t is the largest over j of log((w_0 + w_1 r_1(t) + ... + w_j r_j(t)) / W_j).
    """
    copies, mass = _copies(law)
    # the least of m / 2 with a mass has loss 0, as far as its own copies show
    low = jnp.min(jnp.where(mass > 0, copies, jnp.inf)) / (2 * z)
    high = jnp.max(jnp.where(mass > 0, copies, 1.0)) / z + 14
    t = low + (high - low) * jnp.arange(number + 1) / number

    def add(total, each):
        log_sum, mean, weight, best = total
        k, probability = each
        log = jnp.where(
            probability > 0,
            jnp.log(jnp.where(probability > 0, probability, 1.0)) + k / z * t - k**2 / (2 * z**2),
            -jnp.inf,
        )
        log_sum, before = jnp.logaddexp(log_sum, log), log_sum
        mean = mean * jnp.exp(before - log_sum) + k / z * jnp.exp(log - log_sum)
        weight = weight + probability
        better = (log_sum - jnp.log(weight) > best[0]) & (probability > 0)
        best = tuple(
            jnp.where(better, new, old) for new, old in zip((log_sum - jnp.log(weight), mean), best)
        )
        return (log_sum, mean, weight, best), None

    first = (
        jnp.full_like(t, jnp.log(law[0])),
        jnp.zeros_like(t),
        law[0],
        (jnp.full_like(t, -jnp.inf), jnp.ones_like(t)),
    )
    loss, slope = jax.lax.scan(add, first, _copies(law))[0][3]
    return t, jnp.maximum(loss, 0.0), slope


def _place_of_one(t, losses, mu):
    """Return t_m of the copies with this mu."""
    return jnp.where(mu < t, t, jnp.maximum(t, losses / mu + mu / 2))


def cells(s: jax.Array, losses: jax.Array) -> jax.Array:
    """Return the normal probabilities between points, each from the tail in which it is not a
    difference from 1; 0 without a loss between them."""
    beyond, right = tail(jnp.abs(s)), s >= 0
    a, b, u, v = beyond[:-1], beyond[1:], right[:-1], right[1:]
    between = jnp.where(u, a - b, jnp.where(v, 1 - a - b, b - a))
    return jnp.where(losses[1:] > losses[:-1], jnp.maximum(between, 0.0), 0.0)


def tail(s: ArrayLike) -> jax.Array:
    """Return the probability of a normal variable above s."""
    return erfc(s / math.sqrt(2)) / 2


def _copies(law):
    return jnp.arange(1.0, len(law)), law[1:]
