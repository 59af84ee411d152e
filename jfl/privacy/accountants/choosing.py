"""The privacy cost of choosing the best of a random number of runs and releasing only that run.

A fixed number of runs composes, whichever run is shown: choosing the best of m can cost as much as
showing all m.  A random, secret number of runs costs 1.5 to 4 times as much as one run, whatever
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

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.trade_off import Curve, curve_of
from . import events, rdp, rdp_events, truncation
from .tightest import Release

MOST_RUNS = 1e4  # on average
ORDERS = 1 + np.geomspace(1e-2, 1e4, 64 * rdp_events.BLOCK)
# used if the noise changes over rounds
FEW_ORDERS = 1 + np.geomspace(1e-2, 1e4, 8 * rdp_events.BLOCK)
POINTS = 4096  # on a curve
LEAST_DELTA = 1e-18  # at the end of a curve
TAIL = 40.0  # -log of the probability of more runs than `draw` knows
HALVINGS = 200


class Runs(NamedTuple):
    """The distribution of the number of runs, at least 1; `geometric` and `logarithmic` make it.

    Both are truncated negative binomial distributions: P(k) is proportional to
    (1 - gamma)^k Gamma(k + shape) / k!.
    """

    law: str  # geometric | logarithmic
    mean: float
    shape: float  # 1 geometric, 0 logarithmic
    gamma: float  # 1: always one run


def geometric(mean: float) -> Runs:
    """Return the distribution of stopping after each run with probability 1 / mean.

    Args:
        mean: in [1, 10000]; 1: always one run, which costs nothing.

    Raises:
        ValueError: outside that range.

    Example:
        >>> geometric(10.0).gamma
        0.1
    """
    mean = _mean("choosing.geometric", mean)
    return Runs("geometric", mean, 1.0, 1 / mean)


def logarithmic(mean: float) -> Runs:
    """Return the logarithmic distribution.

    It costs less than `geometric`, and more often there is only one run.

    Args:
        mean: in [1, 10000]; 1: always one run, which costs nothing.

    Raises:
        ValueError: outside that range.
    """
    mean = _mean("choosing.logarithmic", mean)
    low, high = -700.0, 0.0  # of log(gamma), which decreases with the mean
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if math.expm1(-middle) / -middle >= mean:
            low = middle
        else:
            high = middle
    # the smaller end costs more
    return Runs("logarithmic", mean, 0.0, 1.0 if mean == 1 else math.exp(low))


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
        choice among such runs costs what Theorem 2 says.

    Raises:
        ValueError: unless the orders are such, and each rung has a curve and a distribution.

    References:
        arXiv:2110.03620, Theorem 2, once for each rung.

    Example:
        >>> orders, runs = np.array([1.5, 2.0, 8.0, 64.0]), geometric(1.0)
        >>> curve_of_tournament(orders, [0.01 * orders, 0.03 * orders], [runs, runs]).tolist()
        [0.06, 0.08, 0.32, 2.56]
    """
    where = "choosing.curve_of_tournament"
    orders = checks.as_array(where, "orders", orders).astype(np.float64)
    if orders.ndim != 1 or not np.all(orders > 1) or not np.all(np.diff(orders) > 0):
        checks.fail(where, "orders [n] > 1, ascending", checks.short_repr(orders))
    chosen = np.zeros(orders.shape)
    for curve, runs in _rungs(where, curves, laws):
        curve = checks.as_array(where, "curve", curve)
        if curve.shape != orders.shape or not np.all(curve >= 0):
            expected = f"a curve {list(orders.shape)} of numbers >= 0"
            checks.fail(where, expected, checks.short_repr(curve))
        chosen = chosen + curve
        if runs.gamma == 1:
            continue
        price = np.min((1 - 1 / orders) * chosen - math.log(runs.gamma) / orders)
        chosen = chosen + math.log(runs.mean) / (orders - 1) + (1 + runs.shape) * price
        # a curve does not fall with its order: larger ones bound smaller ones
        chosen = np.minimum.accumulate(chosen[::-1])[::-1]
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
    return epsilon_of_tournament((one,), (runs,), delta)


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
    rungs = _rungs(where, rungs, laws)
    laws, releases = [runs for _, runs in rungs], [_release(where, one) for one, _ in rungs]
    if any(release.overflow or release.extra for release in releases):
        return float(_curve(releases, laws).epsilon_at(delta))
    delta = delta - _lost(releases, laws, lambda release: truncation.total(release.shifts))
    orders, chosen = _chosen(releases, laws)
    return float(rdp.convert(orders, chosen, delta).min()) if delta > 0 else math.inf


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
    drawn = 1 + np.searchsorted(np.cumsum(probabilities(runs))[:-1], uniform)
    return int(drawn[0]) if number is None else drawn


def probabilities(runs: Runs) -> np.ndarray:
    """Return P(K = k) for k = 1, 2, ..., until the rest is below e^-40.

    Example:
        >>> probabilities(geometric(2.0))[:3].tolist()
        [0.5, 0.25, 0.125]
    """
    if runs.gamma == 1:
        return np.ones(1)
    stays = math.log1p(-runs.gamma)
    longest = TAIL + runs.shape * (math.log1p(runs.shape + TAIL) - math.log(runs.gamma))
    k = np.arange(1, 2 + math.ceil(longest / -stays))
    if runs.shape == 1:
        return runs.gamma * (1 - runs.gamma) ** (k - 1)
    return np.exp(k * stays) / (k * -math.log(runs.gamma))


def _mean(where, mean) -> float:
    checks.require_positive(where, single=True, mean=mean)
    if not 1 <= mean <= MOST_RUNS:
        checks.fail(where, f"a mean in [1, {MOST_RUNS:g}]", f"mean={checks.short_repr(mean)}")
    return float(mean)


def _rungs(where, releases, laws) -> list:
    """Return pairs of what the rounds of a rung release and the distribution of its runs."""
    laws, releases = checks.as_tuple(where, laws=laws), list(releases)
    if not laws or len(releases) != len(laws):
        checks.fail(
            where,
            "a release and a distribution for each rung, and a rung",
            f"{len(releases)} releases and {len(laws)} distributions",
        )
    for runs in laws:
        checks.require_type(where, Runs, "choosing.geometric", runs=runs)
    return list(zip(releases, laws))


def _release(where, one) -> Release:
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


def _lost(releases, laws, delta_of_one) -> float:
    """Return the delta that all runs that are started lose, given that of one run of each rung.

    What goes wrong in the rounds of one run may go wrong in every run.  The mean number of runs of
    a rung is the product of the means from this rung on.
    """
    lost, started = 0.0, 1.0
    for release, runs in zip(reversed(releases), reversed(laws)):
        started *= runs.mean
        lost += started * delta_of_one(release)
    return lost


def _chosen(releases, laws) -> tuple:
    """Return the orders and the curve of the choice, for the worst event of each rung at each
    order: a run may have any setting."""
    kinds = [events.event_types(e) for release in releases for e in release.alternatives]
    if not kinds:  # nobody takes part
        return np.full(1, 2.0), np.zeros(1)
    orders = FEW_ORDERS if any(events.Series in kind for kind in kinds) else ORDERS
    curves = []
    for release in releases:
        nobody = np.zeros(len(orders))
        each = (rdp_events.curve(event, orders) for event in release.alternatives)
        curves.append(np.max([nobody, *each], axis=0))
    return orders, curve_of_tournament(orders, curves, laws)


def _curve(releases, laws) -> Curve:
    """Return pairs of epsilon and delta of the choice, with all that goes wrong."""
    orders, chosen = _chosen(releases, laws)
    epsilon = np.linspace(0.0, float(rdp.convert(orders, chosen, LEAST_DELTA).min()), POINTS)
    delta = rdp_events.deltas_of_curve(orders, chosen, epsilon)
    wrong = _lost(releases, laws, lambda release: release.overflow + release.extra)
    beyond = _lost(releases, laws, lambda release: truncation.total(release.shifts))
    with np.errstate(over="ignore"):
        paid = wrong * (1 + np.exp(epsilon)) if wrong else 0.0
    return curve_of(epsilon, delta + paid + beyond)
