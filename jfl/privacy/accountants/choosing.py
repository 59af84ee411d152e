"""The privacy cost of choosing the best of a random number of runs and releasing only that run.

Choosing the best of a fixed number m of runs can cost as much as releasing all m.  A random, secret
number of runs costs 1.5 to 4 times as much as one run, whatever its mean, if its distribution has
the right tail (Papernot and Steinke, arXiv:2110.03620).  This requires:

- `draw` draws the number of runs before the first run, and nobody reveals it: no timings, no logs,
  no count of runs.
- Each run draws its setting (learning rate, clip norm, ...) independently, from one distribution
  that does not depend on the data.  It has independent cohorts, batches and noise: a separate seed.
- The score by which the best run is chosen is part of what the run releases.  It is computed from
  public rows, or privately at a cost that the guarantee of the run includes.

A choice may have several rungs (a tournament): the best of several runs continues as one run of the
next rung, and so on.  The same theorem, applied at each rung to everything before it, gives the
guarantee.
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

MAX_MEAN_RUNS = 1e4
ORDERS = 1 + np.geomspace(1e-2, 1e4, 64 * rdp_events.BLOCK)
# Used if the noise changes over rounds.
COARSE_ORDERS = 1 + np.geomspace(1e-2, 1e4, 8 * rdp_events.BLOCK)
NUM_CURVE_POINTS = 4096
MIN_CURVE_DELTA = 1e-18
# `draw` never returns numbers of runs whose total probability is below exp(-TAIL_EXPONENT).
TAIL_EXPONENT = 40.0
MAX_BISECTIONS = 200


class Runs(NamedTuple):
    """The distribution of the number of training runs from which the best is chosen.

    `geometric` and `logarithmic` make it.  Both are truncated negative binomial distributions: for
    k >= 1, the probability of k runs is proportional to (1 - gamma)^k Gamma(k + shape) / k!, where
    Gamma is the gamma function.  `shape` is 1 for the geometric distribution and 0 for the
    logarithmic one, and `gamma` decreases as the mean increases.

    References:
        Papernot and Steinke, arXiv:2110.03620.
    """

    name: str  # "geometric" or "logarithmic"
    mean: float
    shape: float  # 1 for geometric, 0 for logarithmic
    gamma: float  # in (0, 1]; with 1 there is always one run


def geometric(mean: float) -> Runs:
    """Return the distribution of the number of runs if each run is the last with probability 1 /
    mean.

    Args:
        mean: the mean number of runs, in [1, 10000].  With 1 there is always one run, at no extra
            cost.

    Raises:
        ValueError: if mean is outside that range.

    Example:
        >>> geometric(10.0).gamma
        0.1
    """
    mean = _as_mean("choosing.geometric", mean)
    return Runs("geometric", mean, 1.0, 1 / mean)


def logarithmic(mean: float) -> Runs:
    """Return the logarithmic distribution of the number of runs.

    It costs less privacy than `geometric` with the same mean, but more often there is only one run.

    Args:
        mean: the mean number of runs, in [1, 10000].  With 1 there is always one run, at no extra
            cost.

    Raises:
        ValueError: if mean is outside that range.
    """
    mean = _as_mean("choosing.logarithmic", mean)
    low, high = -700.0, 0.0  # bounds on log(gamma), which decreases with the mean
    for _ in range(MAX_BISECTIONS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if math.expm1(-middle) / -middle >= mean:
            low = middle
        else:
            high = middle
    # a smaller gamma costs more, so take the lower end
    return Runs("logarithmic", mean, 0.0, 1.0 if mean == 1 else math.exp(low))


def curve_of_tournament(
    orders: ArrayLike, curves: Sequence[ArrayLike], distributions: Sequence[Runs]
) -> np.ndarray:
    """Return bounds on the Renyi divergences of a choice in several rungs.

    A run of the first rung consists only of rounds.  A run of each other rung begins with the best
    of a random number of runs of the previous rung and continues with further rounds.  The best of
    a random number of runs of the last rung is released.

    Args:
        orders: Float[n] > 1, ascending.
        curves: Float[rungs, n], the Renyi divergences of the rounds of each rung, for the worst
            setting at each order.
        distributions: for each rung, the distribution of the number of runs from which it chooses.
            The numbers are independent.

    Returns:
        Float64[n], the bound at each order.

    Privacy:
        The result is for the unit and adjacency of the curves, and covers the released run with its
        scores.  The divergences of a rung must bound its rounds whatever was released before them.
        Then the divergence of a run is that of the choice before it plus that of its rounds
        (adaptive composition at each order), and Theorem 2 gives the cost of the choice among such
        runs.

    Raises:
        ValueError: unless the orders are ascending and > 1, and each rung has a curve and a
            distribution.

    References:
        arXiv:2110.03620, Theorem 2, applied once per rung.

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
    for curve, runs in _pair_rungs(where, curves, distributions):
        curve = checks.as_array(where, "curve", curve)
        if curve.shape != orders.shape or not np.all(curve >= 0):
            expected = f"a curve {list(orders.shape)} of numbers >= 0"
            checks.fail(where, expected, checks.short_repr(curve))
        chosen = chosen + curve
        if runs.gamma == 1:
            continue
        cost = np.min((1 - 1 / orders) * chosen - math.log(runs.gamma) / orders)
        chosen = chosen + math.log(runs.mean) / (orders - 1) + (1 + runs.shape) * cost
        # Renyi divergences do not decrease with the order, so a bound at a larger order also holds
        # at smaller ones.
        chosen = np.minimum.accumulate(chosen[::-1])[::-1]
    return chosen


def epsilon_of_choice(one: Any, runs: Runs, delta: float) -> float:
    """Return the epsilon of choosing the best of a random number of runs.

    Args:
        one: what one run releases: its Guarantee from jfl.guarantee, or an event.
        runs: the distribution of the number of runs.
        delta: the delta of the whole choice, in (0, 1).

    Privacy:
        Epsilon is for the unit, adjacency and view of one run.  It uses Renyi bounds, which can be
        larger than the privacy-loss distribution of one run.

    Raises:
        NotAnalysable: for a guarantee that does not contain its events.
        ValueError: unless delta is in (0, 1).

    Example:
        >>> from jfl.privacy.accountants import events
        >>> run = events.repeat(events.poisson(0.01, events.gaussian(1.0)), 1000)
        >>> [round(epsilon_of_choice(run, runs, 1e-5), 2) for runs in (geometric(1), geometric(10))]
        [2.1, 4.1]
    """
    return epsilon_of_tournament((one,), (runs,), delta)


def epsilon_of_tournament(rungs: Sequence, distributions: Sequence[Runs], delta: float) -> float:
    """Return the epsilon of a choice in several rungs; see `curve_of_tournament`.

    Args:
        rungs: for each rung, what its rounds release, without those of earlier rungs: a Guarantee
            from jfl.guarantee, or an event.
        distributions: for each rung, the distribution of the number of runs from which it chooses.
        delta: the delta of the whole choice, in (0, 1).

    Privacy:
        As for `epsilon_of_choice`, for independent rounds, whose guarantee holds whatever was
        released before them.  Does not cover noise that is correlated across rounds, or clients in
        rotation.

    Raises:
        NotAnalysable: for a guarantee that does not contain its events.
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
    rungs = _pair_rungs(where, rungs, distributions)
    releases = [_as_release(where, one) for one, _ in rungs]
    distributions = [runs for _, runs in rungs]
    overflow, truncated = _lost_deltas(releases, distributions)
    if overflow:
        return float(_trade_off_curve(releases, distributions).epsilon_at(delta))
    orders, chosen = _orders_and_curve(releases, distributions)
    left = delta - truncated
    return float(rdp.convert(orders, chosen, left).min()) if left > 0 else math.inf


def draw(key: jax.Array, runs: Runs, number: int | None = None) -> int | np.ndarray:
    """Draw a number of runs.  Equal keys give equal numbers, on any machine.

    Args:
        key: a key of jax.random.  Anyone who knows it knows the number, so keep it secret and use
            it only once.
        runs: the distribution.
        number: how many numbers to draw; None for one, as an int.

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
    """Return the probability of each number of runs 1, 2, ..., as Float64[n].

    It ends at the n for which the remaining probability is below e^-40.

    Example:
        >>> probabilities(geometric(2.0))[:3].tolist()
        [0.5, 0.25, 0.125]
    """
    if runs.gamma == 1:
        return np.ones(1)
    log_continue = math.log1p(-runs.gamma)
    longest = TAIL_EXPONENT + runs.shape * (
        math.log1p(runs.shape + TAIL_EXPONENT) - math.log(runs.gamma)
    )
    k = np.arange(1, 2 + math.ceil(longest / -log_continue))
    if runs.shape == 1:
        return runs.gamma * (1 - runs.gamma) ** (k - 1)
    return np.exp(k * log_continue) / (k * -math.log(runs.gamma))


def _as_mean(where, mean) -> float:
    """Return the mean as a float; reject one outside [1, MAX_MEAN_RUNS]."""
    checks.require_positive(where, single=True, mean=mean)
    if not 1 <= mean <= MAX_MEAN_RUNS:
        checks.fail(where, f"a mean in [1, {MAX_MEAN_RUNS:g}]", f"mean={checks.short_repr(mean)}")
    return float(mean)


def _pair_rungs(where, releases, distributions) -> list:
    """Return a list of pairs (what the rounds of a rung release, the distribution of its runs)."""
    distributions, releases = checks.as_tuple(where, distributions=distributions), list(releases)
    if not distributions or len(releases) != len(distributions):
        checks.fail(
            where,
            "a release and a distribution for each of one or more rungs",
            f"{len(releases)} releases and {len(distributions)} distributions",
        )
    for runs in distributions:
        checks.require_type(where, Runs, "choosing.geometric", runs=runs)
    return list(zip(releases, distributions))


def _as_release(where, one) -> Release:
    """Return the Release of an event or of a guarantee."""
    if isinstance(one, events.EVENT_TYPES):
        return Release((one,))
    release = one if isinstance(one, Release) else getattr(one, "release", None)
    if isinstance(release, Release):
        return release
    checks.fail(
        where,
        "an event, or a guarantee that contains its events",
        checks.short_repr(one),
        "Use the result of jfl.guarantee: the guarantee of a group, of a paper, or loaded from a "
        "file contains none.",
        error=NotAnalysable,
    )


def _lost_deltas(releases, distributions) -> tuple[float, float]:
    """Return what all started runs spend outside the Renyi curve.

    The first number is the probability of an overflow and further delta; the second is the delta
    that the finite range of the noise costs.  Whatever goes wrong in the rounds of one run may go
    wrong in every run.  The mean number of runs of a rung is the product of the means from this
    rung on.

    Args:
        releases, distributions: of each rung.
    """
    overflow, truncated, started = 0.0, 0.0, 1.0
    for release, runs in zip(reversed(releases), reversed(distributions)):
        started *= runs.mean
        overflow += started * (release.overflow + release.extra)
        truncated += started * truncation.total(release.shifts)
    return overflow, truncated


def _orders_and_curve(releases, distributions) -> tuple:
    """Return the orders and the Renyi curve of the choice.

    A run may have any setting, so the worst event of each rung counts, separately at each order.
    """
    types = [events.event_types(e) for release in releases for e in release.alternatives]
    if not types:  # no client participates
        return np.full(1, 2.0), np.zeros(1)
    orders = COARSE_ORDERS if any(events.Series in t for t in types) else ORDERS
    curves = []
    for release in releases:
        each = (rdp_events.curve(event, orders) for event in release.alternatives)
        curves.append(np.max([np.zeros(len(orders)), *each], axis=0))
    return orders, curve_of_tournament(orders, curves, distributions)


def _trade_off_curve(releases, distributions) -> Curve:
    """Return pairs (epsilon, delta) of the choice, including overflow and the finite range of
    noise."""
    orders, chosen = _orders_and_curve(releases, distributions)
    epsilon = np.linspace(
        0.0, float(rdp.convert(orders, chosen, MIN_CURVE_DELTA).min()), NUM_CURVE_POINTS
    )
    delta = rdp_events.deltas_of_curve(orders, chosen, epsilon)
    overflow, truncated = _lost_deltas(releases, distributions)
    with np.errstate(over="ignore"):
        overflow_cost = overflow * (1 + np.exp(epsilon)) if overflow else 0.0
    return curve_of(epsilon, delta + overflow_cost + truncated)
