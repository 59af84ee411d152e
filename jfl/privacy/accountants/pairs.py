"""Dominating pairs of one noisy step: where their losses lie, and what they give to cells.

Lengths are in sensitivities under the adjacency in use, and z = std / sensitivity.  Points are
s = x / z.

**One sample: `removed`**

P = (1 - q) N(0, z^2) + q N(1, z^2) against Q = N(0, z^2), for add_remove of a Poisson sample at
rate q.  Its losses above 0, and the same mirrored, are the pair of a sample of fixed size, for
replace_one (see `pld_step`).

**Several units on a Poisson sample: `removed` with a distribution**

Each of k units joins the sample on its own, so the number that do has the distribution
w = Binomial(k, rate), and moves the sum by at most as many sensitivities.  The pair

    P = sum over j of w_j N(j, z^2),     Q = N(0, z^2)

dominates every such step, of vectors too and where the units' contributions follow from earlier
releases (Charles et al., arXiv:2407.07737; Choquette-Choo et al., arXiv:2310.15526, for mixtures of
vectors of bounded lengths).

**A sample that both neighbours share: `halves` of a direction in PLACES**

A unit is replaced, or adds nothing, while all that is drawn stays as it is.

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

- "replaced": a Poisson sample, replace_one (a sensitivity is two clip norms).  A to B is one clip
  norm, B to B' two: d = 1/2, e = 1.
- "replaced_in_full": a sample of fixed size.  In A another element is in the unit's place: d = 1,
  e = 1.
- "zeroed": a sample of fixed size, zero_out.  In A another element is in the unit's place: d = 2,
  e = 1.
- "restored": the same, from the neighbour in which the unit adds nothing: d = 1, e = 1.

A Poisson sample of limited capacity is one of fixed size if the others fill it, and a Poisson
sample if they leave room: one of two steps, and anybody may know which.

**Draws with replacement: `halves` of the direction "replace" with a distribution**

An element counts as often as it is drawn, for replace_one.  The distribution w of the number of
copies m, Binomial(draws, 1 / population), is the same whatever the data.  The sensitivity is the
largest distance between two contributions.

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
others are worse.  With one draw it is the profile of a sample without replacement of size one.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import erf, erfc
from jax.typing import ArrayLike

# where B and B' lie for losses above 0, and for those below, mirrored
PLACES = {
    "replaced": ((0.5, -0.5), (0.5, -0.5)),
    "replaced_in_full": ((1.0, 0.0), (1.0, 0.0)),
    "zeroed": ((2.0, 1.0), (1.0, 0.0)),
    "restored": ((1.0, 0.0), (2.0, 1.0)),
}
FAR = 600.0  # exponents beyond are not taken
NEVER = -1e12  # the point of losses that a pair does not have
MAX_NEWTON_STEPS = 60
BRACKETED_STEPS = 10  # of Newton's method; beyond the nodes fewer do than halvings would
GROUP_NODES = 1024  # of a rough step
NODES = 2048


class Pair(NamedTuple):
    """Two mixtures of Gaussians with the same weights, whose loss increases with the outcome."""

    place: Callable  # losses [n] -> points [n]
    weights: jax.Array  # [k]
    of_p: jax.Array  # [k] centers of P's Gaussians, as points
    of_q: jax.Array  # [k]
    # (points, losses, center) -> the points of one Gaussian, if they are not those of all
    place_of_one: Callable = lambda s, losses, center: s

    def masses(self, losses: jax.Array) -> tuple:
        """Return the probabilities that P and Q give to the cells between losses [n], ascending.

        Returns:
            P [n-1], Q [n-1]; P - e^first Q of each cell, without the difference of numbers near
            each other; (P, Q) of losses below the first, and above the last.
        """
        s = self.place(losses)
        grown = jnp.expm1(jnp.minimum(losses[:-1], FAR))

        def add(total, component):
            weight, *centers = component
            at = self.place_of_one(s, losses, centers[0])
            p, q = (_cells(at - center, losses) for center in centers)
            ends = jnp.stack(centers)
            found = p, q, (p - q) - grown * q, _tail(ends - at[0]), _tail(at[-1] - ends)
            return jax.tree.map(lambda t, v: t + weight * v, total, found), None

        cell = jnp.zeros(len(losses) - 1)
        nothing = cell, cell, cell, jnp.zeros(2), jnp.zeros(2)
        components = self.weights, self.of_p, self.of_q
        return jax.lax.scan(add, nothing, components, unroll=len(self.weights) == 2)[0]

    def masses_above_zero(self, losses: jax.Array) -> tuple:
        """Same as `masses` of losses >= 0, but "below the first" begins at 0."""
        p, q, excess, _, above = self.masses(jnp.concatenate([jnp.zeros(1), losses]))
        return p[1:], q[1:], excess[1:], jnp.stack([p[0], q[0]]), above


def removed(rate: Any, z: ArrayLike) -> Pair:
    """Return the pair of a unit, or of a group, that a Poisson sample may hold.

    Args:
        rate: [], of one unit; or [k + 1], the distribution of the number of units.
        z: std / sensitivity of one unit.
    """
    if jnp.ndim(rate):
        place, weights = functools.partial(_place_of_group, law=rate, z=z), rate
    else:
        place = functools.partial(_place_of_sample, rate=rate, z=z)
        weights = jnp.stack([1 - rate, rate])
    return Pair(place, weights, jnp.arange(len(weights)) / z, jnp.zeros(len(weights)))


def halves(direction: str, rate: Any, z: ArrayLike) -> tuple[Pair, Pair, jax.Array]:
    """Return a pair for the losses above 0, one whose losses above 0 mirror those below 0, and the
    probability of loss 0."""
    if direction in PLACES:
        up, down = (_shared(*places, rate[0], z) for places in PLACES[direction])
        return up, down, _even_of_shared(direction, rate[0], z)
    if not jnp.ndim(rate):
        pair, even = removed(rate, z), (1 - rate) * erf(math.sqrt(0.125) / z)
    else:
        place = functools.partial(_place_of_repeated, law=rate, z=z)
        centers = jnp.arange(len(rate)) / z
        pair = Pair(place, rate, centers, jnp.zeros(len(rate)), _place_of_copies)
        even = rate[0] * erf(place(jnp.zeros(1))[0] / math.sqrt(2))
    return pair, pair, even


def _cells(s: jax.Array, losses: jax.Array) -> jax.Array:
    """Return the normal probabilities between points, each from the tail in which it is not a
    difference from 1; 0 without a loss between them."""
    beyond, right = _tail(jnp.abs(s)), s >= 0
    a, b, u, v = beyond[:-1], beyond[1:], right[:-1], right[1:]
    between = jnp.where(u, a - b, jnp.where(v, 1 - a - b, b - a))
    return jnp.where(losses[1:] > losses[:-1], jnp.maximum(between, 0.0), 0.0)


def _tail(s: ArrayLike) -> jax.Array:
    """Return the probability of a normal variable above s."""
    return erfc(s / math.sqrt(2)) / 2


# --- points of losses


def _place_of_sample(loss, rate, z):
    """Return x / z at which the pair "remove" has this loss; a point far below all for losses that
    it never has."""
    small = jnp.expm1(jnp.minimum(loss, 30.0)) / rate
    reached = small > -1
    near = jnp.where(reached, jnp.log1p(jnp.where(reached, small, 0.0)), NEVER)
    far = loss - jnp.log(rate) + jnp.log1p((rate - 1) * jnp.exp(-jnp.maximum(loss, 30.0)))
    return z * jnp.where(loss < 30, near, far) + 0.5 / z


def _place_of_group(losses, law, z):
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
    s = jax.lax.while_loop(
        lambda state: (state[0] < MAX_NEWTON_STEPS) & (state[2] > 1e-13), newton, start
    )[1]
    return jnp.where(is_reached, s, NEVER)


def _shared(far, near, rate, z):
    """Return a half of a shared sample: P is a mixture of N(0, z^2) and N(far, z^2); Q has `near`
    instead of `far`."""
    place = functools.partial(_place_of_shared, rate=rate, z=z, far=far, near=near)
    centers = (jnp.array([0.0, center]) / z for center in (far, near))
    return Pair(place, jnp.stack([1 - rate, rate]), *centers)


def _place_of_shared(losses, rate, z, far, near):
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
    after = jnp.searchsorted(_loss_of_shared(nodes, rate, z, far, near)[0], losses)
    low = nodes[jnp.maximum(after - 1, 0)]
    high = jnp.where(after <= NODES, nodes[jnp.minimum(after, NODES)], jnp.maximum(most, low))

    def closer(_, bracket):
        low, high, s = bracket
        value, slope = _loss_of_shared(s, rate, z, far, near)
        is_below = value < losses
        low, high = jnp.where(is_below, s, low), jnp.where(is_below, high, s)
        step = s - (value - losses) / slope
        inside = (step >= low) & (step <= high)
        return low, high, jnp.where(inside, step, (low + high) / 2)

    s = jax.lax.fori_loop(0, BRACKETED_STEPS, closer, (low, high, (low + high) / 2))[2]
    return jnp.where(losses > 0, s, middle)


def _loss_of_shared(s, rate, z, far, near):
    """Return the loss at points x / z, and its slope there."""
    odds = jnp.log(rate) - jnp.log1p(-rate)
    u, v = (odds + shift / z * s - (shift / z) ** 2 / 2 for shift in (far, near))
    slope = (far * jax.nn.sigmoid(u) - near * jax.nn.sigmoid(v)) / z
    return jnp.logaddexp(0.0, u) - jnp.logaddexp(0.0, v), slope


def _place_of_repeated(losses, law, z):
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
    nodes, reached, slopes = _nodes_of_repeated(law, z, NODES)
    after = jnp.searchsorted(reached, losses)
    for node in jnp.clip(after - 1, 0), jnp.clip(after, max=NODES):
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
        lambda state: (state[0] < MAX_NEWTON_STEPS) & (state[2] > far), newton, (0, start, jnp.inf)
    )[1]


def _nodes_of_repeated(law, z, number):
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


def _place_of_copies(t, losses, mu):
    """Return t_m of the copies whose center is mu."""
    copies = jnp.where(mu > 0, mu, 1.0)
    return jnp.where(mu < t, t, jnp.maximum(t, losses / copies + mu / 2))


def _copies(law):
    return jnp.arange(1.0, len(law)), law[1:]


# --- rough steps, to choose a grid, never to prove


def rough_of_group(direction: str, law: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return losses [n], ascending, and log masses [n] of a step by the trapezoid rule."""
    number = jnp.arange(0.0, len(law))
    most = len(law) - 1
    step = (28 + 2 * most / z) / GROUP_NODES
    s = -12.0 + step * jnp.arange(GROUP_NODES)
    log_law = jnp.log(jnp.maximum(law, 1e-300))
    loss = jax.nn.logsumexp(log_law + number * s[:, None] / z - number**2 / (2 * z**2), axis=1)
    q = -(s**2) / 2 - math.log(2 * math.pi) / 2 + jnp.log(step)
    return (loss, q + loss) if direction == "remove" else (-loss[::-1], q[::-1])


def rough_of_shared(direction: str, rate: jax.Array, z: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Return losses [n], ascending, and log masses [n] of a step, each cell at its middle.

    `direction` is of `PLACES`, `rate` is [1].
    """
    (upper, p), (lower, q) = (
        _nodes_of_shared(rate[0], z, *places, of_p)
        for places, of_p in zip(PLACES[direction], (True, False))
    )
    mass = jnp.concatenate([q[::-1], _even_of_shared(direction, rate[0], z)[None], p])
    losses = jnp.concatenate([-lower[::-1], jnp.zeros(1), upper])
    return losses, jnp.log(jnp.maximum(mass / mass.sum(), 1e-300))


def _nodes_of_shared(rate, z, far, near, of_p):
    s = (far + near) / (2 * z) + (14 + far / z) * jnp.linspace(0.0, 1.0, 2 * NODES + 1)
    loss = _loss_of_shared(s, rate, z, far, near)[0]
    edges, shift = s[::2], (far if of_p else near) / z
    mass = (1 - rate) * _cells(edges, edges) + rate * _cells(edges - shift, edges)
    return loss[1::2], mass


def _even_of_shared(direction, rate, z):
    """Return the probability of loss 0, which the two halves leave."""
    above, below = (_tail((far + near) / (2 * z)) for far, near in PLACES[direction])
    return (1 - rate) * jnp.maximum(1 - above - below, 0.0)


def rough_of_repeated(law: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return losses [n], ascending, and log masses [n] of a step, each cell at its middle."""
    loss = _nodes_of_repeated(law, z, 2 * NODES)[1]
    pair, _, even = halves("replace", law, z)
    p, q = pair.masses_above_zero(loss[::2])[:2]
    log_masses = jnp.log(jnp.concatenate([q[::-1], even[None], p]))
    losses = jnp.concatenate([-loss[1::2][::-1], jnp.zeros(1), loss[1::2]])
    return losses, log_masses - jax.nn.logsumexp(log_masses)
