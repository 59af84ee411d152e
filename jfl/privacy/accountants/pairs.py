"""Dominating pairs of distributions for one noisy step, and their privacy-loss distributions.

A pair (P, Q) of distributions dominates a step if its hockey-stick divergence is at least that of
the outputs on any two neighbouring datasets, at every epsilon.  A cell is an interval between two
losses of a grid.  Lengths are in sensitivities under the adjacency in use, and
z = std / sensitivity.  Points are s = x / z.

**One sample: `removed`**

P = (1 - q) N(0, z^2) + q N(1, z^2) against Q = N(0, z^2), for add_remove of a Poisson sample at
rate q.  Its losses above 0, together with their mirror image, are the pair of a sample of fixed
size, for replace_one (see `pld_step`).

**A group of units on a Poisson sample: `removed` with a distribution**

Each of k units joins the sample independently, so the number that do has the distribution w =
Binomial(k, rate), and moves the sum by at most that number of sensitivities.  The pair

    P = sum over j of w_j N(j, z^2),     Q = N(0, z^2)

dominates every such step, also for vectors and where the contributions of the units depend on
earlier releases (Charles et al., arXiv:2407.07737; Choquette-Choo et al., arXiv:2310.15526, for
mixtures of vectors of bounded lengths).

**A sample that both neighbours share: `halves` of a direction in PLACES**

A unit is replaced, or contributes nothing, while the sample remains the same.

Draw the sample first.  Let A be the release if the unit is not in the sample, B if it is, on one
neighbour, and B' if it is, on the other; `rate` is the probability that it is.  Whatever the other
units do, these are Gaussians with the same standard deviation, and the release is (1 - rate) A +
rate B on one neighbour and (1 - rate) A + rate B' on the other.  Let B lie at most d from A and at
most e from B'.  For every x >= 1, no set T of outcomes distinguishes the neighbours better than an
interval on a line where A, B' and B lie at 0, d - e and d:

    H_x = sup over T of rate B(T) - x rate B'(T) - (x - 1) (1 - rate) A(T),

and among all T with the same B(T), by Neyman and Pearson, that interval has the smallest A(T) that
a distance d allows and the smallest B'(T) that a distance e allows, both at once.  For x < 1 the
neighbours change places (H_x(P, Q) = 1 - x + x H_{1/x}(Q, P)), which mirrors the losses; the
remaining probability has loss 0.  Pairs that dominate each step also dominate the composition (Zhu,
Dong, Wang, AISTATS 2022, Theorem 10).

- "replaced": a Poisson sample, replace_one (a sensitivity is two clip norms).  A to B is one clip
  norm, B to B' two: d = 1/2, e = 1.
- "replaced_in_full": a sample of fixed size.  In A another element is in the unit's place: d = 1, e
  = 1.
- "zeroed": a sample of fixed size, zero_out.  In A another element is in the unit's place: d = 2, e
  = 1.
- "restored": the same, from the neighbour in which the unit contributes nothing: d = 1, e = 1.

A Poisson sample of limited capacity is one of fixed size if the other units fill it, and a Poisson
sample if they leave room: it is one of two steps, and the observer may know which.

**Draws with replacement: `halves` of the direction "replace" with a distribution**

An element counts as often as it is drawn, for replace_one.  The distribution w of the number of
copies m, Binomial(draws, 1 / population), does not depend on the data.  The sensitivity is the
largest distance between two contributions.

The dominating pair.  Draw first, from the other elements, the contributions g_1, g_2, ... of all
places; then m, and let the element take the first m places (the order does not matter for a sum).
Given the g, which both neighbours share, the sums are mixtures over m with weights w_m of Gaussians
around

    v_m = sum over j <= m of (a - g_j)          and          v'_m = sum over j <= m of (a' - g_j)

for the element's contribution a on one neighbour and a' on the other (each copy may have a
different one: clients that run again for each draw).  The means obey |v_m - v'_k| <= max(m, k), and
v_0 = v'_0 = 0.  By joint convexity the hockey-stick divergence H_x of the release is at most that
of the worst such mixtures (Balle, Barthe, Gaboardi, NeurIPS 2018, condition on the shared draws in
the same way).  Let P_m and Q_k be these Gaussians, D_m(x) = H_x(N(m, z^2), N(0, z^2)) and x >= 1.

Split each Q_k: assign to P_m the amounts f_mk >= 0 for k <= m, with sum over m of f_mk at most x
w_k.  Since the positive part of a sum is at most the sum of positive parts, and H_x is convex in
its second argument and grows with the distance,

    H_x(sum w_m P_m, sum w_k Q_k)
        <= sum over m of integral (w_m P_m - sum over k <= m of f_mk Q_k)_+
        <= sum over m >= 1 of w_m D_m(x_m),
    w_m x_m = sum over k <= m of f_mk,

where P_0 = Q_0 was assigned f_00 = w_0 and vanished.  Such amounts exist if and only if, for each
j, the sum over 1 <= m <= j of w_m x_m is at most x W_j - w_0, with W_j = w_0 + ... + w_j.  The
smallest of these bounds is a convex program whose solution is explicit: with mu_m = m / z and the
likelihood ratio r_m(t) = exp(mu_m t - mu_m^2 / 2) of one Gaussian at the point t,

    x_m = r_m(t_m),
    t_m = t if mu_m < t,
          otherwise max(t, log(x) / mu_m + mu_m / 2) (r_m(t_m) = x for the latter),
    t the point where the largest over j of
        w_0 + (sum over 1 <= m <= j of w_m r_m(t)) - x W_j
    is 0.

Its value is delta(x) = P(loss > log x) - x Q(loss > log x) with the tails

    P(loss > log x) = w_0 T(t) + sum over m >= 1 of w_m T(t_m - mu_m),
    Q(loss > log x) = w_0 T(t) + sum of w_m T(t_m),

T the upper tail of the normal distribution.  The grid needs only these tails.  For x < 1 the roles
of P and Q change (the family of pairs is symmetric), which mirrors the losses; the remaining
probability, w_0 (1 - 2 T(t at x = 1)), has loss 0.  The profile is convex, so there is such a pair;
it dominates every step, and the composition too (Zhu, Dong, Wang, AISTATS 2022, Theorem 10), also
if later steps depend on earlier releases.  A grid needs no more: `pld_step` splits each cell so
that both probabilities are preserved, which never lowers the profile.

How tight it is.  With all x_m = 1 + (x - 1) / (1 - w_0) the bound is Theorem 10 of Balle, Barthe,
Gaboardi for draws with replacement, which `rdp.with_replacement` uses; the bound here is never
larger.  If the last j is the number of draws (x not near 1) all t_m are t, and a data set attains
the bound: the pair of sum w_m N(m, z^2) and N(0, z^2), all other elements at one end of the range
and the changed one at either end.  That single pair does not dominate: for x near 1, and for x < 1,
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

# The positions of B and B' for losses above 0, and, mirrored, for losses below 0.
PLACES = {
    "replaced": ((0.5, -0.5), (0.5, -0.5)),
    "replaced_in_full": ((1.0, 0.0), (1.0, 0.0)),
    "zeroed": ((2.0, 1.0), (1.0, 0.0)),
    "restored": ((1.0, 0.0), (2.0, 1.0)),
}
MAX_EXPONENT = 600.0  # larger exponents are clipped
NO_POINT = -1e12  # the point that is returned for losses that a pair does not have
MAX_NEWTON_STEPS = 60
NUM_BRACKETED_STEPS = 10  # of Newton's method, inside a bracket of two nodes
NUM_GROUP_NODES = 1024  # of a rough step
NUM_NODES = 2048


class Pair(NamedTuple):
    """Two mixtures of Gaussians with the same weights, whose loss increases with the outcome."""

    points_of: Callable  # losses [n] -> points [n]
    weights: jax.Array  # [k]
    centers_p: jax.Array  # [k], centers of the Gaussians of P, as points
    centers_q: jax.Array  # [k]
    # (points, losses, center) -> the points of one Gaussian, if they differ between Gaussians
    points_of_one: Callable = lambda s, losses, center: s

    def masses(self, losses: jax.Array) -> tuple:
        """Return the probabilities that P and Q give to the cells between losses [n], ascending.

        Returns:
            P [n-1] and Q [n-1]; P - e^(first loss) Q of each cell, computed without cancellation;
            (P, Q) of losses below the first, and (P, Q) of losses above the last.
        """
        s = self.points_of(losses)
        ratio_minus_one = jnp.expm1(jnp.minimum(losses[:-1], MAX_EXPONENT))

        def add(total, component):
            weight, *centers = component
            points = self.points_of_one(s, losses, centers[0])
            p, q = (_cell_probabilities(points - center, losses) for center in centers)
            both = jnp.stack(centers)
            below, above = _upper_tail(both - points[0]), _upper_tail(points[-1] - both)
            masses = p, q, (p - q) - ratio_minus_one * q, below, above
            return jax.tree.map(lambda t, v: t + weight * v, total, masses), None

        cells = jnp.zeros(len(losses) - 1)
        zeros = cells, cells, cells, jnp.zeros(2), jnp.zeros(2)
        components = self.weights, self.centers_p, self.centers_q
        return jax.lax.scan(add, zeros, components, unroll=len(self.weights) == 2)[0]

    def masses_above_zero(self, losses: jax.Array) -> tuple:
        """Same as `masses` for losses >= 0, except that "below the first" starts at loss 0."""
        p, q, excess, _, above = self.masses(jnp.concatenate([jnp.zeros(1), losses]))
        return p[1:], q[1:], excess[1:], jnp.stack([p[0], q[0]]), above


class Discrete(NamedTuple):
    """Two discrete distributions: the fields of events.Discrete."""

    losses: jax.Array  # [k] ascending, from -inf to inf
    present: jax.Array  # [k], probabilities of P
    absent: jax.Array  # [k], probabilities of Q

    def masses(self, losses: jax.Array) -> tuple:
        """Same as `Pair.masses`."""
        cell = jnp.searchsorted(losses, self.losses, side="right")
        first = losses[jnp.maximum(cell - 1, 0)]
        # without cancellation, since P = e^loss Q of each outcome
        excess = jnp.where(self.present > 0, self.present * -jnp.expm1(first - self.losses), 0.0)
        sums = jnp.zeros((3, len(losses) + 1))
        p, q, excess = sums.at[:, cell].add(jnp.stack([self.present, self.absent, excess]))
        both = jnp.stack([p, q])
        return p[1:-1], q[1:-1], excess[1:-1], both[:, 0], both[:, -1]


def removed(rate: Any, z: ArrayLike) -> Pair | Discrete:
    """Return the pair of a unit, or of a group of units, that may be in a Poisson sample.

    Args:
        rate: [], the sampling rate of one unit; or [k + 1], the distribution of the number of units
            of a group in the sample; or [3, k], the fields of a Discrete pair.
        z: std / sensitivity of one unit.
    """
    if jnp.ndim(rate) == 2:
        return Discrete(*rate)
    if jnp.ndim(rate):
        points_of, weights = functools.partial(_points_of_group, distribution=rate, z=z), rate
    else:
        points_of = functools.partial(_points_of_sample, rate=rate, z=z)
        weights = jnp.stack([1 - rate, rate])
    return Pair(points_of, weights, jnp.arange(len(weights)) / z, jnp.zeros(len(weights)))


def halves(direction: str, rate: Any, z: ArrayLike) -> tuple[Pair, Pair, jax.Array]:
    """Return a dominating pair as its positive and its negative losses.

    Args:
        direction: a key of PLACES, or "replace".
        rate: the rate [] of "replace" on a sample of fixed size; [1], the rate of a direction in
            PLACES; or [k + 1], the distribution of the number of copies.
        z: std / sensitivity.

    Returns:
        A Pair for the losses above 0, a Pair whose losses above 0 mirror those below 0, and the
        probability of loss 0.
    """
    if direction in PLACES:
        up, down = (_shared_pair(*places, rate[0], z) for places in PLACES[direction])
        return up, down, _zero_loss_probability(direction, rate[0], z)
    if not jnp.ndim(rate):
        pair: Any = removed(rate, z)
        zero_loss = (1 - rate) * erf(math.sqrt(0.125) / z)
    else:
        points_of = functools.partial(_points_of_repeated, distribution=rate, z=z)
        centers = jnp.arange(len(rate)) / z
        pair = Pair(points_of, rate, centers, jnp.zeros(len(rate)), _points_of_copies)
        zero_loss = rate[0] * erf(points_of(jnp.zeros(1))[0] / math.sqrt(2))
    return pair, pair, zero_loss


def _cell_probabilities(s: jax.Array, losses: jax.Array) -> jax.Array:
    """Return the normal probabilities between points, and 0 for a cell of no width.

    Each is computed from the tail in which it is not a difference from 1.
    """
    beyond, right = _upper_tail(jnp.abs(s)), s >= 0
    a, b, u, v = beyond[:-1], beyond[1:], right[:-1], right[1:]
    between = jnp.where(u, a - b, jnp.where(v, 1 - a - b, b - a))
    return jnp.where(losses[1:] > losses[:-1], jnp.maximum(between, 0.0), 0.0)


def _upper_tail(s: ArrayLike) -> jax.Array:
    """Return the probability that a standard normal variable exceeds s."""
    return erfc(s / math.sqrt(2)) / 2


# --- points of losses


def _points_of_sample(loss, rate, z):
    """Return the point x / z at which the pair "remove" has this loss; NO_POINT if it never has."""
    small = jnp.expm1(jnp.minimum(loss, 30.0)) / rate
    is_possible = small > -1
    near = jnp.where(is_possible, jnp.log1p(jnp.where(is_possible, small, 0.0)), NO_POINT)
    far = loss - jnp.log(rate) + jnp.log1p((rate - 1) * jnp.exp(-jnp.maximum(loss, 30.0)))
    return z * jnp.where(loss < 30, near, far) + 0.5 / z


def _points_of_group(losses, distribution, z):
    """Return the point s of each loss; NO_POINT for losses that the pair never has.

    log(sum over j >= 1 of w_j e^(j s / z - j^2 / (2 z^2))) = log(e^loss - w_0) is convex in s with
    slopes of at least 1 / z.  Its largest term gives a starting point above the solution, from
    which Newton's method decreases monotonically.
    """
    number = jnp.arange(1.0, len(distribution))
    present = distribution[1:] > 0
    log_law = jnp.where(present, jnp.log(jnp.where(present, distribution[1:], 1.0)), -jnp.inf)
    heights = log_law - number**2 / (2 * z**2)
    rest = jnp.expm1(jnp.minimum(losses, 30.0)) + (1 - distribution[0])
    is_reached = rest > 0
    near = jnp.log(jnp.where(is_reached, rest, 1.0))
    far = losses + jnp.log1p(-distribution[0] * jnp.exp(-jnp.maximum(losses, 30.0)))
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
    return jnp.where(is_reached, s, NO_POINT)


def _shared_pair(far, near, rate, z):
    """Return one half of a sample that both neighbours share.

    P is a mixture of N(0, z^2) and N(far, z^2); Q has `near` instead of `far`.
    """
    points_of = functools.partial(_points_of_shared, rate=rate, z=z, far=far, near=near)
    centers = (jnp.array([0.0, center]) / z for center in (far, near))
    return Pair(points_of, jnp.stack([1 - rate, rate]), *centers)


def _points_of_shared(losses, rate, z, far, near):
    """Return the point x / z of each loss >= 0.

    Above the middle of B and B' the loss increases.  A table of nodes gives a bracket, and Newton's
    method, kept inside the bracket, the point.
    """
    middle = (far + near) / (2 * z)
    # For losses above all nodes: log(1 - rate + rate e^u) is at least u + log(rate), and at most
    # the larger of u and 0.
    scaled = (losses - jnp.log(rate)) * z
    upper = scaled / far + far / (2 * z)
    if near > 0:
        upper = jnp.maximum(upper, scaled / (far - near) + middle)
    nodes = middle + (14 + far / z) * jnp.linspace(0.0, 1.0, NUM_NODES + 1)
    after = jnp.searchsorted(_loss_of_shared(nodes, rate, z, far, near)[0], losses)
    low = nodes[jnp.maximum(after - 1, 0)]
    high = jnp.where(
        after <= NUM_NODES, nodes[jnp.minimum(after, NUM_NODES)], jnp.maximum(upper, low)
    )

    def newton(_, bracket):
        low, high, s = bracket
        value, slope = _loss_of_shared(s, rate, z, far, near)
        is_below = value < losses
        low, high = jnp.where(is_below, s, low), jnp.where(is_below, high, s)
        step = s - (value - losses) / slope
        inside = (step >= low) & (step <= high)
        return low, high, jnp.where(inside, step, (low + high) / 2)

    s = jax.lax.fori_loop(0, NUM_BRACKETED_STEPS, newton, (low, high, (low + high) / 2))[2]
    return jnp.where(losses > 0, s, middle)


def _loss_of_shared(s, rate, z, far, near):
    """Return the loss at points x / z, and its slope there."""
    odds = jnp.log(rate) - jnp.log1p(-rate)
    u, v = (odds + shift / z * s - (shift / z) ** 2 / 2 for shift in (far, near))
    slope = (far * jax.nn.sigmoid(u) - near * jax.nn.sigmoid(v)) / z
    return jnp.logaddexp(0.0, u) - jnp.logaddexp(0.0, v), slope


def _points_of_repeated(losses, distribution, z):
    """Return the point t of each loss >= 0; see the module docstring.

    The condition is convex in t, and so is the loss as a function of t.  Tangents of the loss give
    a starting point above the solution, from which Newton's method decreases monotonically.
    """
    copies, mass = _copies(distribution)
    rest = distribution[0] * -jnp.expm1(-losses)

    def first_guess(start, each):  # the point at which k copies alone meet the condition
        k, probability, cumulative = each
        guess = (
            losses + jnp.log((cumulative + rest) / jnp.where(probability > 0, probability, 1.0))
        ) * z / k + k / (2 * z)
        return jnp.where(probability > 0, jnp.minimum(start, guess), start), None

    infinite = jnp.full_like(losses, jnp.inf)
    start = jax.lax.scan(first_guess, infinite, (copies, mass, jnp.cumsum(mass)))[0]
    nodes, node_losses, slopes = _nodes_of_repeated(distribution, z, NUM_NODES)
    after = jnp.searchsorted(node_losses, losses)
    for node in jnp.clip(after - 1, 0), jnp.clip(after, max=NUM_NODES):
        start = jnp.minimum(start, nodes[node] + (losses - node_losses[node]) / slopes[node])
    start = jnp.maximum(start, nodes[0])

    def newton(state):
        i, t, _ = state

        def add(total, each):
            (value, slope), best = total
            k, probability = each
            excess = jnp.expm1(k / z * t - k**2 / (2 * z**2) - losses)
            value, slope = value + probability * excess, slope + probability * k / z * (excess + 1)
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

    # The error after a step is about the square of the step, times the largest mu.
    tolerance = 1e-8 * z / len(mass)
    is_moving = lambda state: (state[0] < MAX_NEWTON_STEPS) & (state[2] > tolerance)
    return jax.lax.while_loop(is_moving, newton, (0, start, jnp.inf))[1]


def _nodes_of_repeated(distribution, z, number):
    """Return points t [number + 1], from where the loss is 0 to the end of P, their losses and
    slopes.

    The loss at t is the largest over j of log((w_0 + w_1 r_1(t) + ... + w_j r_j(t)) / W_j).
    """
    copies, mass = _copies(distribution)
    # At half of the smallest m with a positive probability, the term of m alone has loss 0.
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
        jnp.full_like(t, jnp.log(distribution[0])),
        jnp.zeros_like(t),
        distribution[0],
        (jnp.full_like(t, -jnp.inf), jnp.ones_like(t)),
    )
    loss, slope = jax.lax.scan(add, first, _copies(distribution))[0][3]
    return t, jnp.maximum(loss, 0.0), slope


def _points_of_copies(t, losses, mu):
    """Return t_m of the copies whose center is mu; see the module docstring."""
    copies = jnp.where(mu > 0, mu, 1.0)
    return jnp.where(mu < t, t, jnp.maximum(t, losses / copies + mu / 2))


def _copies(distribution):
    """Return the numbers of copies 1, 2, ... and their probabilities."""
    return jnp.arange(1.0, len(distribution)), distribution[1:]


# --- approximate steps, which serve to choose a grid and prove nothing


def rough_of_group(
    direction: str, distribution: jax.Array, z: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return approximate privacy losses [n], ascending, and their log masses [n], for a group.

    They are those of one step on a sample that a group of rows may join.  The trapezoid rule gives
    the masses.

    Args:
        direction: "remove" or "add" the group.
        distribution: Float[m + 1], the probability that k of the m rows of the group are sampled.
        z: the noise multiplier.
    """
    number = jnp.arange(0.0, len(distribution))
    most = len(distribution) - 1
    step = (28 + 2 * most / z) / NUM_GROUP_NODES
    s = -12.0 + step * jnp.arange(NUM_GROUP_NODES)
    log_law = jnp.log(jnp.maximum(distribution, 1e-300))
    loss = jax.nn.logsumexp(log_law + number * s[:, None] / z - number**2 / (2 * z**2), axis=1)
    q = -(s**2) / 2 - math.log(2 * math.pi) / 2 + jnp.log(step)
    return (loss, q + loss) if direction == "remove" else (-loss[::-1], q[::-1])


def rough_of_shared(direction: str, rate: jax.Array, z: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Return losses [n], ascending, and log masses [n] of a step on a sample of both neighbours.

    The mass of each cell is put at its middle.

    Args:
        direction: a key of PLACES.
        rate: [1], the probability that the unit is in the sample.
        z: std / sensitivity.
    """
    (upper, p), (lower, q) = (
        _nodes_of_shared(rate[0], z, *places, of_p)
        for places, of_p in zip(PLACES[direction], (True, False))
    )
    mass = jnp.concatenate([q[::-1], _zero_loss_probability(direction, rate[0], z)[None], p])
    losses = jnp.concatenate([-lower[::-1], jnp.zeros(1), upper])
    return losses, jnp.log(jnp.maximum(mass / mass.sum(), 1e-300))


def _nodes_of_shared(rate, z, far, near, of_p):
    """Return the losses at the middles of cells [n], and the masses of the cells [n] under P or
    Q."""
    s = (far + near) / (2 * z) + (14 + far / z) * jnp.linspace(0.0, 1.0, 2 * NUM_NODES + 1)
    loss = _loss_of_shared(s, rate, z, far, near)[0]
    edges, shift = s[::2], (far if of_p else near) / z
    mass = (1 - rate) * _cell_probabilities(edges, edges) + rate * _cell_probabilities(
        edges - shift, edges
    )
    return loss[1::2], mass


def _zero_loss_probability(direction, rate, z):
    """Return the probability of loss 0, which belongs to neither half."""
    above, below = (_upper_tail((far + near) / (2 * z)) for far, near in PLACES[direction])
    return (1 - rate) * jnp.maximum(1 - above - below, 0.0)


def rough_of_repeated(distribution: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return losses [n], ascending, and log masses [n] of a step on draws with replacement.

    The mass of each cell is put at its middle.

    Args:
        distribution: Float[m + 1]; an element is drawn k times with probability distribution[k].
        z: std / sensitivity of one copy.
    """
    loss = _nodes_of_repeated(distribution, z, 2 * NUM_NODES)[1]
    pair, _, even = halves("replace", distribution, z)
    p, q = pair.masses_above_zero(loss[::2])[:2]
    log_masses = jnp.log(jnp.concatenate([q[::-1], even[None], p]))
    losses = jnp.concatenate([-loss[1::2][::-1], jnp.zeros(1), loss[1::2]])
    return losses, log_masses - jax.nn.logsumexp(log_masses)
