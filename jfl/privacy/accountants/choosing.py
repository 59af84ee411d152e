"""The privacy cost of choosing the best of a random number of runs and releasing only that run.

A fixed number of runs composes, whichever run is shown: choosing the best of m can cost as much as
showing all m.  A random, secret number of runs costs two to four times as much as one run, whatever
its mean, if its distribution has the right tail (Papernot and Steinke, arXiv:2110.03620).  This
requires:

- `draw` draws the number of runs before the first run, and nobody reveals it: no times, no logs, no
  count of runs.
- Each run draws its setting (learning rate, clip norm, ...) independently, from one distribution
  that does not depend on the data.  It has independent cohorts, batches and noise: a separate seed.
- The score by which the best run is chosen is part of what the run releases.  It is computed from
  public rows, or privately at a cost that the guarantee of the run includes.

The best of several runs may continue as one run of a larger choice, and so on: a tournament.  The
same theorem, applied at each rung to everything before it, gives the guarantee.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike
from scipy.special import gammaln

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.trade_off import Curve, curve_of
from . import events, rdp, rdp_events, truncation
from .tightest import Release

LAWS = ("poisson", "truncated_negative_binomial")
MOST_RUNS = 1e4  # on average
ORDERS = 1 + np.geomspace(1e-2, 1e4, 64 * rdp_events.BLOCK)
# used if the noise changes over rounds
FEW_ORDERS = 1 + np.geomspace(1e-2, 1e4, 8 * rdp_events.BLOCK)
POINTS = 4096  # on a curve
LEAST_DELTA = 1e-18  # at the end of a curve
TAIL = 40.0  # -log of the probability of more runs than `draw` knows
HALVINGS = 200


class Runs(NamedTuple):
    """The distribution of the number of runs; `poisson`, `geometric`, `logarithmic` and
    `truncated_negative_binomial` make it."""

    law: str  # of LAWS
    mean: float
    shape: float = math.inf  # eta: 1 geometric, 0 logarithmic
    gamma: float = math.nan  # probability of stopping; 1: always one run


def poisson(mean: float) -> Runs:
    """Return a Poisson number of runs: well concentrated, and the most expensive for many runs.

    It may be 0: then nothing is released.

    Args:
        mean: in [1, 10000].

    Raises:
        ValueError: outside that range.

    References:
        arXiv:2110.03620, Theorem 6.
    """
    return Runs(LAWS[0], _mean("choosing.poisson", mean))


def truncated_negative_binomial(mean: float, shape: float) -> Runs:
    """Return a number of runs of at least 1, P(k) ~ Gamma(k + shape) / k! (1 - gamma)^k.

    The smaller the shape, the less it costs, and the more often there is only one run.

    Args:
        mean: in [1, 10000]; 1: always one run, which costs nothing.
        shape: eta >= 0: 1 is geometric, 0 logarithmic.

    Raises:
        ValueError: outside that range.

    References:
        arXiv:2110.03620, Definition 1 and Theorem 2.

    Example:
        >>> truncated_negative_binomial(10.0, 1.0).gamma
        0.1
    """
    where = "choosing.truncated_negative_binomial"
    mean = _mean(where, mean)
    checks.require_nonnegative(where, single=True, shape=shape)
    return Runs(LAWS[1], mean, float(shape), _gamma(mean, float(shape)))


def geometric(mean: float) -> Runs:
    """Return the distribution of shape 1: after each run, stop with probability 1 / mean."""
    return truncated_negative_binomial(mean, 1.0)


def logarithmic(mean: float) -> Runs:
    """Return `truncated_negative_binomial` of shape 0: the cheapest of these."""
    return truncated_negative_binomial(mean, 0.0)


def curve_of_choice(orders: ArrayLike, curve: ArrayLike, runs: Runs) -> np.ndarray:
    """Return the Renyi curve of the whole choice, given that of one run.

    Shapes:
        orders [n] > 1, ascending, curve [n] -> Float64[n].

    Privacy:
        of the unit and adjacency of the curve, for the released run with its score.

    Raises:
        ValueError: unless the orders are such, and the curve fits them.

    References:
        arXiv:2110.03620, Theorems 2 and 6.

    Example:
        >>> orders = np.array([1.5, 2.0, 8.0, 64.0])
        >>> curve_of_choice(orders, 0.01 * orders, geometric(1.0)).tolist()
        [0.015, 0.02, 0.08, 0.64]
    """
    where = "choosing.curve_of_choice"
    checks.require_type(where, Runs, "choosing.geometric", runs=runs)
    orders, curve = _checked(where, orders, curve)
    if runs.gamma == 1:
        return curve
    log_mean = math.log(runs.mean) / (orders - 1)
    if runs.law == LAWS[0]:
        # a sum over all runs, each of which may be the best
        tails = rdp_events.deltas_of_curve(orders, curve, np.log1p(1 / (orders - 1)))
        chosen = curve + runs.mean * tails + log_mean
    else:
        price = np.min((1 - 1 / orders) * curve - math.log(runs.gamma) / orders)
        chosen = curve + log_mean + (1 + runs.shape) * price
    # a curve does not fall with its order: larger ones bound smaller ones
    return np.minimum.accumulate(chosen[::-1])[::-1]


def curve_of_tournament(
    orders: ArrayLike, curves: Sequence[ArrayLike], laws: Sequence[Runs]
) -> np.ndarray:
    """Return the Renyi curve of a choice in several rungs.

    A run of the first rung consists only of rounds.  A run of each other rung begins with the best
    of a random number of runs of the previous rung and continues with further rounds.  The best of
    a random number of runs of the last rung is released.

    Args:
        orders: > 1, ascending.
        curves: the curve of the rounds of each rung, for the worst setting at each order.
        laws: the distribution of the number of runs from which each rung chooses; all numbers are
            independent.

    Shapes:
        orders [n], curves [L, n] -> Float64[n].

    Privacy:
        of the unit and adjacency of the curves, for the released run with its scores, if the curve
        of a rung bounds its rounds whatever came before them.  Then the curve of a run is that of
        the choice before it plus that of its rounds (adaptive composition at each order), and the
        choice among such runs is its `curve_of_choice`.

    Raises:
        ValueError: as `curve_of_choice`; unless each rung has a curve and a distribution.

    References:
        arXiv:2110.03620, Theorems 2 and 6, once for each rung.

    Example:
        >>> orders, runs = np.array([1.5, 2.0, 8.0, 64.0]), geometric(1.0)
        >>> curve_of_tournament(orders, [0.01 * orders, 0.03 * orders], [runs, runs]).tolist()
        [0.06, 0.08, 0.32, 2.56]
    """
    where = "choosing.curve_of_tournament"
    laws, curves = checks.as_tuple(where, laws=laws), list(curves)
    if not laws or len(curves) != len(laws):
        checks.fail(
            where,
            "a curve and a distribution for each rung, and a rung",
            f"{len(curves)} curves and {len(laws)} distributions",
        )
    chosen: Any = 0.0
    for curve, runs in zip(curves, laws):
        orders, own = _checked(where, orders, curve)
        chosen = curve_of_choice(orders, chosen + own, runs)
    return chosen


def epsilon_of_choice(one: Any, runs: Runs, delta: float) -> float:
    """Return the epsilon of choosing the best of a random number of runs.

    Args:
        one: what one run releases: its `Guarantee` of jfl.guarantee, or an event.
        runs: the distribution of their number.
        delta: the delta of the whole choice, in (0, 1).

    Privacy:
        of the unit, adjacency and view of one run, by Renyi bounds, which may be larger than the
        loss distribution of one run.

    Raises:
        NotAnalysable: for a guarantee that does not know its releases.
        ValueError: unless delta is in (0, 1).

    Example:
        >>> from jfl.privacy.accountants import events
        >>> run = events.repeat(events.poisson(0.01, events.gaussian(1.0)), 1000)
        >>> [round(epsilon_of_choice(run, law, 1e-5), 2) for law in (geometric(1), geometric(10))]
        [2.1, 4.1]
    """
    where = "choosing.epsilon_of_choice"
    rdp_events.check_delta(delta)
    return _epsilon((_release(where, one, runs),), (runs,), delta)


def epsilon_of_tournament(rungs: Sequence, laws: Sequence[Runs], delta: float) -> float:
    """Return the epsilon of a choice in several rungs; see `curve_of_tournament`.

    Args:
        rungs: what the rounds of each rung release, without those of the rungs before: its
            `Guarantee` of jfl.guarantee, or an event.
        laws: the distribution of the number of runs from which each rung chooses.
        delta: the delta of the whole choice, in (0, 1).

    Privacy:
        as `epsilon_of_choice`, for independent rounds, whose guarantee holds whatever came before
        them.  It does not cover noise that is correlated over rounds, or clients in rotation.

    Raises:
        NotAnalysable: for a guarantee that does not know its releases.
        ValueError: unless each rung has a distribution, and delta is in (0, 1).

    Example:
        >>> from jfl.privacy.accountants import events
        >>> ten, eighty = (
        ...     events.repeat(events.poisson(0.01, events.gaussian(1.0)), n) for n in (10, 80)
        ... )
        >>> round(epsilon_of_tournament([ten, eighty], [logarithmic(8), logarithmic(3)], 1e-5), 2)
        2.86
    """
    where = "choosing.epsilon_of_tournament"
    rdp_events.check_delta(delta)
    rungs, laws = checks.as_tuple(where, rungs=rungs), checks.as_tuple(where, laws=laws)
    if not laws or len(rungs) != len(laws):
        checks.fail(
            where,
            "a release and a distribution for each rung, and a rung",
            f"{len(rungs)} releases and {len(laws)} distributions",
        )
    releases = tuple(_release(where, one, runs) for one, runs in zip(rungs, laws))
    return _epsilon(releases, laws, delta)


def choice(one: Any, runs: Runs) -> Curve:
    """Return pairs of epsilon and delta of choosing the best of a random number of runs; see
    `epsilon_of_choice`.

    Example:
        >>> from jfl.privacy.accountants import events
        >>> bool(choice(events.gaussian(5.0), poisson(10)).epsilon_at(1e-5) < 3)
        True
    """
    return _curve((_release("choosing.choice", one, runs),), (runs,))


def draw(key: jax.Array, runs: Runs, number: int | None = None) -> int | np.ndarray:
    """Draw a number of runs; equal keys give equal numbers, on any machine.

    Args:
        key: a key of jax.random.  Anyone who knows it knows the number, so keep it secret and use
            it only once.
        runs: the distribution.
        number: how many numbers; None: one, as an int.

    Returns:
        An int, or Int[number].

    Example:
        >>> draw(jax.random.key(0), geometric(1.0))
        1
    """
    where = "choosing.draw"
    checks.require_type(where, Runs, "choosing.geometric", runs=runs)
    if number is not None:
        checks.require_integer(where, number=number)
    bits = np.asarray(jax.random.bits(checks.as_key(where, key), (number or 1, 2), "uint32"))
    high, low = bits.astype(np.float64).T
    uniform = (high * 2.0**21 + np.floor(low / 2.0**11) + 0.5) * 2.0**-53
    first = 0 if runs.law == LAWS[0] else 1
    drawn = first + np.searchsorted(np.cumsum(probabilities(runs))[:-1], uniform)
    return int(drawn[0]) if number is None else drawn


def probabilities(runs: Runs) -> np.ndarray:
    """Return P(K = k) for k = 0, 1, ... (Poisson) or k = 1, 2, ... (the others), until the rest is
    below e^-40.

    Example:
        >>> probabilities(geometric(2.0))[:3].tolist()
        [0.5, 0.25, 0.125]
    """
    if runs.gamma == 1:
        return np.ones(1)
    if runs.law == LAWS[0]:
        k = np.arange(math.ceil(runs.mean + TAIL + math.sqrt(2 * TAIL * runs.mean)))
        return np.exp(k * math.log(runs.mean) - runs.mean - gammaln(k + 1))
    eta, gamma = runs.shape, runs.gamma
    stays = math.log1p(-gamma)
    # the power of k grows at most to here; from there the tail is that of a geometric distribution
    longest = TAIL + eta * math.log1p(eta + TAIL) + eta * math.log(1 / gamma)
    k = np.arange(1, 2 + math.ceil(longest / -stays))
    if eta == 1:
        return gamma * (1 - gamma) ** (k - 1)
    if eta == 0:
        return np.exp(k * stays) / (k * -math.log(gamma))
    scale = gammaln(eta) + math.log(math.expm1(-eta * math.log(gamma)))
    return np.exp(gammaln(k + eta) - gammaln(k + 1) + k * stays - scale)


def _checked(where, orders, curve) -> tuple[np.ndarray, np.ndarray]:
    """Return orders and a curve as Float64[n]."""
    orders = checks.as_array(where, "orders", orders).astype(np.float64)
    curve = checks.as_array(where, "curve", curve).astype(np.float64)
    if orders.ndim != 1 or not np.all(orders > 1) or not np.all(np.diff(orders) > 0):
        checks.fail(where, "orders [n] > 1, ascending", checks.short_repr(orders))
    if curve.shape != orders.shape or not np.all(curve >= 0):
        checks.fail(
            where, f"a curve {list(orders.shape)} of numbers >= 0", checks.short_repr(curve)
        )
    return orders, curve


def _mean(where, mean) -> float:
    checks.require_positive(where, single=True, mean=mean)
    if not 1 <= mean <= MOST_RUNS:
        checks.fail(where, f"a mean in [1, {MOST_RUNS:g}]", f"mean={checks.short_repr(mean)}")
    return float(mean)


def _gamma(mean, shape) -> float:
    """Return the gamma of a mean, which decreases with it: the smaller end, which costs more."""
    if mean == 1:
        return 1.0
    if shape == 1:
        return 1 / mean
    low, high = -700.0, 0.0  # of log(gamma)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        # 1 / gamma - 1 over (1 - gamma^shape) / shape
        left = -math.expm1(shape * middle) / shape if shape * -middle > 1e-300 else -middle
        if math.expm1(-middle) / left >= mean:
            low = middle
        else:
            high = middle
    return math.exp(low)


def _release(where, one, runs) -> Release:
    checks.require_type(where, Runs, "choosing.geometric", runs=runs)
    if isinstance(one, events.KINDS):
        return Release((one,))
    release = one if isinstance(one, Release) else getattr(one, "release", None)
    if isinstance(release, Release):
        return release
    checks.fail(
        where,
        "an event, or a guarantee that knows its releases",
        checks.short_repr(one),
        "Use the result of jfl.guarantee: a guarantee of a group, from a file or of a paper has no "
        "curve of Renyi divergences.",
        error=NotAnalysable,
    )


def _epsilon(releases, laws, delta) -> float:
    if any(release.overflow or release.extra for release in releases):
        return float(_curve(releases, laws).epsilon_at(delta))
    chosen = _chosen(releases, laws)
    delta = delta - _beyond(releases, laws)
    if not delta > 0:
        return math.inf
    return max((float(rdp.convert(*each, delta).min()) for each in chosen), default=0.0)


def _beyond(releases, laws) -> float:
    """Return the cost of the finite reach of the noise in all runs that are started."""
    lost, started = 0.0, 1.0
    for release, runs in zip(reversed(releases), reversed(laws)):
        started *= runs.mean
        lost += started * truncation.total(release.shifts)
    return lost


def _chosen(releases, laws) -> list:
    """Return the orders and the curve of the choice, for the worst event of each rung at each
    order: a run may have any setting."""
    kinds = [events.event_types(e) for release in releases for e in release.alternatives]
    if not kinds:
        return []
    orders = FEW_ORDERS if any(events.Series in kind for kind in kinds) else ORDERS
    curves = []
    for release in releases:
        nobody = np.zeros(len(orders))
        each = (rdp_events.curve(event, orders) for event in release.alternatives)
        curves.append(np.max([nobody, *each], axis=0))
    return [(orders, curve_of_tournament(orders, curves, laws))]


def _curve(releases, laws) -> Curve:
    chosen = _chosen(releases, laws)
    last = max((float(rdp.convert(*c, LEAST_DELTA).min()) for c in chosen), default=0.0)
    epsilon = np.linspace(0.0, last, POINTS)
    delta = np.zeros(POINTS)
    for orders, curve in chosen:
        delta = np.maximum(delta, rdp_events.deltas_of_curve(orders, curve, epsilon))
    # What goes wrong in the rounds of one run may go wrong in every run that is started.  The mean
    # number of those of a rung is the product of the means from this rung on.
    wrong, started = 0.0, 1.0
    for release, runs in zip(reversed(releases), reversed(laws)):
        started *= runs.mean
        wrong += started * (release.overflow + release.extra)
    with np.errstate(over="ignore"):
        cost = wrong * (1 + np.exp(epsilon)) if wrong else 0.0
    return curve_of(epsilon, delta + cost + _beyond(releases, laws))
