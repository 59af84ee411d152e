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
MAX_NEWTON_STEPS = 20
NUM_NODES = 2048  # of a table of losses, in which a search for points begins
# The number of standard deviations beyond which a normal probability is 0 in float64; and beyond
# which it does not matter for the choice of a grid.
END_OF_FLOATS, END_OF_CELLS = 39.0, 14.0


class Pair(NamedTuple):
    """Two mixtures of Gaussians with the same weights, whose loss increases with the outcome."""

    weights: jax.Array  # [k]
    centers_p: jax.Array  # [k], centers of the Gaussians of P, as points
    centers_q: jax.Array  # [k]
    loss_of: Callable  # points [n] -> losses [n] and their slopes [n]
    # the point of loss 0 if only losses above 0 count; NO_POINT if all do
    first: Any = NO_POINT
    known_points: Callable | None = None  # losses [n] -> points [n], if there is a formula
    # (points, losses, center) -> the points of one Gaussian, if they differ between Gaussians
    points_of_one: Callable = lambda s, losses, center: s

    def masses(self, losses: jax.Array) -> tuple:
        """Return the probabilities that P and Q give to the cells between losses [n], ascending.

        Returns:
            P [n-1] and Q [n-1]; P - e^(first loss) Q of each cell, computed without cancellation;
            (P, Q) of losses below the first, and (P, Q) of losses above the last one.
        """
        return self._masses_between(self.points_of(losses), losses, losses)

    def masses_above_zero(self, losses: jax.Array) -> tuple:
        """Same as `masses` for losses >= 0, except that "below the first" starts at loss 0."""
        p, q, excess, _, above = self.masses(jnp.concatenate([jnp.zeros(1), losses]))
        return p[1:], q[1:], excess[1:], jnp.stack([p[0], q[0]]), above

    def cells(self, number: int) -> tuple:
        """Return the losses in the middle of cells [number], and the masses of P and Q there.

        They serve to choose a grid and prove nothing.
        """
        points = self.nodes(2 * number + 1, END_OF_CELLS)
        losses = self.loss_of(points)[0]
        p, q, *_ = self._masses_between(points[::2], losses[::2], points[::2])
        return losses[1::2], p, q

    def nodes(self, number: int, reach: float) -> jax.Array:
        """Return evenly spaced points [number] that cover the first `reach` standard deviations."""
        most = jnp.max(jnp.where(self.weights > 0, self.centers_p, 0.0))
        return jnp.linspace(jnp.maximum(self.first, -reach), 2 * most + reach, number)

    def points_of(self, losses: jax.Array) -> jax.Array:
        """Return the point of each loss [n]; `first` for losses below all others.

        Two nodes of a table bracket the point.  The cubic with their losses and slopes is close to
        it, and Newton's method, kept inside the bracket, finds it.  Losses above the table get its
        last node, beyond which P and Q have no mass.
        """
        if self.known_points is not None:
            return self.known_points(losses)
        nodes = self.nodes(NUM_NODES + 1, END_OF_FLOATS)
        table, slopes = self.loss_of(nodes)
        after = jnp.searchsorted(table, losses)
        ends = jnp.stack([jnp.clip(after - 1, 0), jnp.clip(after, max=NUM_NODES)])
        low, high = nodes[ends]

        def newton(state):
            i, low, high, s, _ = state
            value, slope = self.loss_of(s)
            is_below = value < losses
            low, high = jnp.where(is_below, s, low), jnp.where(is_below, high, s)
            step = s - (value - losses) / slope
            is_inside = (step >= low) & (step <= high)
            step = jnp.where(is_inside, step, (low + high) / 2)
            return i + 1, low, high, step, jnp.max(jnp.abs(step - s))

        # The error after a step is about the square of the step.
        tolerance = 1e-7 * (nodes[1] - nodes[0])
        is_moving = lambda state: (state[0] < MAX_NEWTON_STEPS) & (state[-1] > tolerance)
        guess = _cubic(losses, table[ends], nodes[ends], 1 / slopes[ends])
        guess = jnp.where((guess >= low) & (guess <= high), guess, (low + high) / 2)
        start = (0, low, high, guess, jnp.asarray(jnp.inf, nodes.dtype))
        s = jax.lax.while_loop(is_moving, newton, start)[3]
        least = jnp.where(self.first > NO_POINT, 0.0, table[0])
        return jnp.where(losses > least, s, self.first)

    def _masses_between(self, points, losses, edges):
        """Return `masses` for known points; a cell whose `edges` are equal has no mass."""
        ratio_minus_one = jnp.expm1(jnp.minimum(losses[:-1], MAX_EXPONENT))

        def add(total, component):
            weight, *centers = component
            s = self.points_of_one(points, losses, centers[0])
            p, q = (_cell_probabilities(s - center, edges) for center in centers)
            both = jnp.stack(centers)
            below, above = _upper_tail(both - s[0]), _upper_tail(s[-1] - both)
            masses = p, q, (p - q) - ratio_minus_one * q, below, above
            return jax.tree.map(lambda t, v: t + weight * v, total, masses), None

        cells = jnp.zeros(len(losses) - 1)
        zeros = cells, cells, cells, jnp.zeros(2), jnp.zeros(2)
        components = self.weights, self.centers_p, self.centers_q
        return jax.lax.scan(add, zeros, components, unroll=len(self.weights) == 2)[0]


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

    def cells(self, number: int) -> tuple:
        """Return the finite losses, and the masses of P and Q there; see `Pair.cells`."""
        return self.losses[1:-1], self.present[1:-1], self.absent[1:-1]


def removed(rate: Any, z: ArrayLike) -> Pair | Discrete:
    """Return the dominating pair of a Gaussian on a Poisson sample, for add_remove.

    P is the distribution of the release with a unit or a group of units in the dataset, and Q is
    its distribution after they are removed.

    Args:
        rate: Float[], the sampling rate of the unit; or Float[k + 1], the probabilities that 0, 1,
            ..., k units of the group are in the sample; or Float[3, k], the fields of a Discrete
            pair, which is returned unchanged.
        z: std / sensitivity of one unit.
    """
    if jnp.ndim(rate) == 2:
        return Discrete(*rate)
    if jnp.ndim(rate):
        return _mixtures(rate, jnp.arange(len(rate)) / z)
    pair = _mixtures(jnp.stack([1 - rate, rate]), jnp.arange(2) / z)
    return pair._replace(known_points=functools.partial(_points_of_sample, rate=rate, z=z))


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
    if direction in PLACES:  # mixtures of A and B, and of A and B'
        weights = jnp.stack([1 - rate[0], rate[0]])
        pairs = [[jnp.array([0.0, place]) / z for place in each] for each in PLACES[direction]]
        # B and B' have equal densities in the middle between them.
        up, down = (_mixtures(weights, p, q, (p[1] + q[1]) / 2) for p, q in pairs)
    elif not jnp.ndim(rate):
        pair: Any = removed(rate, z)
        up = down = pair._replace(first=0.5 / z)
    else:
        copies = jnp.arange(len(rate)) / z
        # At half of the smallest m with a positive probability, the term of m alone has loss 0.
        first = jnp.min(jnp.where(rate[1:] > 0, copies[1:], jnp.inf)) / 2
        loss_of = functools.partial(_loss_of_repeated, distribution=rate, z=z)
        up = down = Pair(
            rate,
            copies,
            jnp.zeros(len(rate)),
            loss_of,
            first,
            points_of_one=_points_of_copies,
        )
    inside = (erf(up.first / math.sqrt(2)) + erf(down.first / math.sqrt(2))) / 2
    return up, down, up.weights[0] * inside


def _cubic(x, ends, values, slopes):
    """Evaluate at x [n] the cubics that have these values and slopes [2, n] at the ends [2, n]."""
    length = ends[1] - ends[0]
    t = (x - ends[0]) / length
    from_left, from_right = t * (1 - t) ** 2 * length, t**2 * (t - 1) * length
    blend = t**2 * (3 - 2 * t)
    return (
        values[0] + blend * (values[1] - values[0]) + from_left * slopes[0] + from_right * slopes[1]
    )


def _mixtures(weights, centers_p, centers_q: Any = None, first: Any = NO_POINT):
    """Return the Pair of two mixtures whose loss at an outcome is the logarithm of their ratio.

    Without centers_q, Q is one Gaussian around 0.
    """

    def loss_of(s):
        p, slope_p = _log_density(s, weights, centers_p)
        if centers_q is None:
            return p, slope_p
        q, slope_q = _log_density(s, weights, centers_q)
        return p - q, slope_p - slope_q

    zeros = jnp.zeros(len(weights))
    return Pair(weights, centers_p, zeros if centers_q is None else centers_q, loss_of, first)


def _log_density(s, weights, centers):
    """Return the log of the density of a mixture over that of N(0, 1) at points s, and its
    slope."""
    exponents = centers[:, None] * s - centers[:, None] ** 2 / 2
    terms = jnp.log(weights)[:, None] + exponents
    largest = jnp.max(terms, axis=0)
    relative = jnp.exp(terms - largest)
    total = jnp.sum(relative, axis=0)
    slope = centers @ relative / total
    # near 0, without cancellation
    change = weights @ jnp.expm1(jnp.minimum(exponents, 1.0))
    is_small = (jnp.max(exponents, axis=0) < 1) & (jnp.abs(change) < 0.5)
    near = jnp.log1p(jnp.where(is_small, change, 0.0))
    return jnp.where(is_small, near, largest + jnp.log(total)), slope


def _points_of_sample(losses, rate, z):
    """Return the point at which the pair "remove" has each loss; NO_POINT if it never has."""
    small = jnp.expm1(jnp.minimum(losses, 30.0)) / rate
    is_possible = small > -1
    near = jnp.where(is_possible, jnp.log1p(jnp.where(is_possible, small, 0.0)), NO_POINT)
    far = losses - jnp.log(rate) + jnp.log1p((rate - 1) * jnp.exp(-jnp.maximum(losses, 30.0)))
    return z * jnp.where(losses < 30, near, far) + 0.5 / z


def _loss_of_repeated(t, distribution, z):
    """Return the loss at points t [n] of draws with replacement, and its slope.

    It is the largest over j of log((w_0 + w_1 r_1(t) + ... + w_j r_j(t)) / W_j).
    """

    numbers = jnp.arange(len(distribution)) / z, distribution
    log = lambda mu, probability: jnp.log(probability) + mu * t - mu**2 / 2
    largest = jax.lax.scan(
        lambda most, each: (jnp.maximum(most, log(*each)), None),
        jnp.full_like(t, -jnp.inf),
        numbers,
    )[0]

    def add(total, each):
        densities, moments, weight, best = total
        density = jnp.exp(log(*each) - largest)
        densities, moments = densities + density, moments + each[0] * density
        weight = weight + each[1]
        is_better = (densities > best[0] * weight) & (each[1] > 0)
        new = densities / weight, moments / densities
        best = tuple(jnp.where(is_better, *pair) for pair in zip(new, best))
        return (densities, moments, weight, best), None

    none = jnp.zeros_like(t)
    ratio, slope = jax.lax.scan(add, (none, none, 0.0, (none, none)), numbers)[0][3]
    return largest + jnp.log(ratio), slope


def _points_of_copies(t, losses, mu):
    """Return t_m of the copies whose center is mu; see the module docstring."""
    copies = jnp.where(mu > 0, mu, 1.0)
    return jnp.where(mu < t, t, jnp.maximum(t, losses / copies + mu / 2))


def _cell_probabilities(s, edges):
    """Return the normal probabilities between points, and 0 for a cell whose edges are equal.

    Each is computed from the tail in which it is not a difference from 1.
    """
    beyond, right = _upper_tail(jnp.abs(s)), s >= 0
    a, b, u, v = beyond[:-1], beyond[1:], right[:-1], right[1:]
    between = jnp.where(u, a - b, jnp.where(v, 1 - a - b, b - a))
    return jnp.where(edges[1:] > edges[:-1], jnp.maximum(between, 0.0), 0.0)


def _upper_tail(s):
    """Return the probability that a standard normal variable exceeds s."""
    return erfc(s / math.sqrt(2)) / 2
