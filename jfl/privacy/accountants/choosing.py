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
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

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


def epsilon_of_choice(one: Any, runs: Runs, delta: float) -> float:
    """Return the epsilon of choosing the best of a random number of runs.

    Args:
        one: what one run releases: its Guarantee from jfl.guarantee, an event, or a
            `tightest.Release`.
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
    where = "choosing.epsilon_of_choice"
    checks.require_type(where, Runs, "choosing.geometric", runs=runs)
    rdp_events.check_delta(delta)
    release = _as_release(where, one)
    # Noise may leave its range in every run, and so may a sample exceed its capacity.
    left = truncation.left_of(
        delta, [s._replace(times=s.times * runs.mean) for s in release.shifts]
    )
    if not left > 0:
        return math.inf
    if release.overflow + release.extra:
        return float(_trade_off_curve(release, runs).epsilon_at(left))
    orders, chosen = _orders_and_curve(release, runs)
    return float(rdp.convert(orders, chosen, left).min())


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


def _orders_and_curve(release, runs) -> tuple[np.ndarray, np.ndarray]:
    """Return orders, and the Renyi divergences of the choice at these orders.

    A run may have any setting, so the worst event counts, separately at each order.
    """
    types = [events.event_types(event) for event in release.alternatives]
    if not types:  # no client participates
        return np.full(1, 2.0), np.zeros(1)
    orders = COARSE_ORDERS if any(events.Series in t for t in types) else ORDERS
    each = (rdp_events.curve(event, orders) for event in release.alternatives)
    return orders, _curve_of_choice(orders, np.max([np.zeros(len(orders)), *each], axis=0), runs)


def _curve_of_choice(orders: np.ndarray, curve: np.ndarray, runs: Runs) -> np.ndarray:
    """Return bounds on the Renyi divergences of the best of a random number of runs.

    Args:
        orders: Float[n] > 1, ascending.
        curve: Float[n], the Renyi divergences of one run, for the worst setting at each order.
        runs: the distribution of the number of runs.

    References:
        arXiv:2110.03620, Theorem 2.
    """
    if runs.gamma == 1:
        return curve
    cost = np.min((1 - 1 / orders) * curve - math.log(runs.gamma) / orders)
    chosen = curve + math.log(runs.mean) / (orders - 1) + (1 + runs.shape) * cost
    # Renyi divergences do not decrease with the order, so a bound at a larger order also holds at
    # smaller ones.
    return np.minimum.accumulate(chosen[::-1])[::-1]


def _trade_off_curve(release, runs) -> Curve:
    """Return pairs (epsilon, delta) of the choice, for ideal noise.

    Whatever else goes wrong in one run, such as an overflow, may go wrong in every run, so it costs
    the mean number of runs as much.
    """
    orders, chosen = _orders_and_curve(release, runs)
    epsilon = np.linspace(
        0.0, float(rdp.convert(orders, chosen, MIN_CURVE_DELTA).min()), NUM_CURVE_POINTS
    )
    delta = rdp_events.deltas_of_curve(orders, chosen, epsilon)
    overflow = runs.mean * (release.overflow + release.extra)
    with np.errstate(over="ignore"):
        overflow_cost = overflow * (1 + np.exp(epsilon)) if overflow else 0.0
    return curve_of(epsilon, delta + overflow_cost)
