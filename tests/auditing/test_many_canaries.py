"""Several models with several canaries each: intervals by their equations, and how often they are
wrong."""

import itertools
import math

import numpy as np
import pytest
from scipy import optimize, stats

from jfl.auditing.estimators import many_canaries
from jfl.auditing.estimators.many_canaries import detection_rate, lower_bound
from jfl.core.errors import ArgumentError

INTERVALS = ("wilson1", "wilson2", "wilson4")


def exchangeable(rng, models, canaries, rate, spread):
    """Tests whose rate is drawn anew for each model: beta with mean `rate`."""
    rates = rng.beta(rate * spread, (1 - rate) * spread, (models, 1))
    return rng.random((models, canaries)) < rates


def test_moments_by_enumeration():
    x = exchangeable(np.random.default_rng(0), 30, 6, 0.6, 3).astype(float)
    moments = many_canaries._moments(x.sum(1), 6, 4)
    for order, moment in enumerate(moments, 1):
        chosen = [x[:, list(c)].prod(axis=1) for c in itertools.combinations(range(6), order)]
        assert moment == pytest.approx(np.mean(chosen))


def test_variance_of_pairs_by_enumeration():
    """The end of the interval solves models (mean - p)^2 = z^2 V(p), V the variance of the share of
    pairs, for a law of the number of detections that is enumerated."""
    k, models, alpha = 5, 10_000, 0.01
    law = np.array([0.1, 0.3, 0.2, 0.1, 0.1, 0.2])
    count = np.arange(k + 1)
    shares = [np.ones(k + 1)]
    for i in range(4):
        shares.append(shares[-1] * (count - i) / (k - i))
    _, _, pairs, triples, quadruples = (float(law @ s) for s in shares)
    variance = float(law @ shares[2] ** 2) - pairs**2
    z = stats.norm.isf(alpha)
    # for a mean so far under p that p is the end
    mean = pairs - z * math.sqrt(variance / models)
    end = many_canaries._wilson_of_pairs(mean, triples, quadruples, models, k, alpha)
    assert end == pytest.approx(pairs, abs=1e-9)


def test_intervals_solve_their_equations():
    models, k, mean, pairs, alpha = 400, 7, 0.3, 0.12, 0.02
    z = stats.norm.isf(alpha)

    def crossing(variance, low, high):
        return optimize.brentq(
            lambda p: models * (mean - p) ** 2 - z * z * variance(p), low, high, xtol=1e-14
        )

    for ends, variance in (
        (many_canaries._wilson1(mean, models, alpha), lambda p: p * (1 - p)),
        (
            many_canaries._wilson2(mean, pairs, models, k, alpha),
            lambda p: p / k + pairs * (k - 1) / k - p * p,
        ),
    ):
        assert ends[0] == pytest.approx(crossing(variance, 0.2, mean), abs=1e-9)
        assert ends[1] == pytest.approx(crossing(variance, mean, 0.4), abs=1e-9)
    # one canary a model: the same interval
    one = many_canaries._wilson2(mean, mean, models, 1, alpha)
    assert one == pytest.approx(many_canaries._wilson1(mean, models, alpha), abs=1e-12)


@pytest.mark.parametrize("models, canaries, rate, spread", [(300, 20, 0.3, 5), (500, 8, 0.1, 5)])
def test_how_often_intervals_miss(models, canaries, rate, spread):
    """400 times, false alarm of this test 1e-3 (binomial) for each end of each interval.

    Must fail: one interval that takes all tests of a model for independent.
    """
    rng, runs = np.random.default_rng(4), 400
    misses = dict.fromkeys(INTERVALS, np.zeros(2))
    independent = np.zeros(2)
    for _ in range(runs):
        x = exchangeable(rng, models, canaries, rate, spread)
        for name in INTERVALS:
            found = detection_rate(x, interval=name)
            misses[name] = misses[name] + [found.low > rate, found.high < rate]
        low, high = many_canaries._wilson1(float(x.mean()), x.size, 0.05)
        independent += [low > rate, high < rate]
    limit = stats.binom.isf(1e-3, runs, 0.05)
    assert all(np.all(m <= limit) for m in misses.values())
    assert independent.sum() > stats.binom.isf(1e-3, runs, 0.1)


def test_canaries_stand_for_models():
    """Independent tests: 20 canaries a model narrow the interval, and raise the bound."""
    rng = np.random.default_rng(6)
    inside, outside = rng.random((500, 20)) < 0.3, rng.random((500, 20)) < 0.02
    width = {n: detection_rate(inside, interval=n) for n in INTERVALS}
    width = {n: rates.high - rates.low for n, rates in width.items()}
    assert width["wilson4"] < 0.5 * width["wilson1"] and width["wilson2"] < 0.75 * width["wilson1"]
    found = {n: lower_bound(inside, outside, delta=1e-5, interval=n).epsilon for n in INTERVALS}
    assert found["wilson1"] < found["wilson4"] < math.log(0.3 / 0.02)
    assert found["wilson4"] > 0.75 * math.log(0.3 / 0.02)


def test_the_bound_by_hand():
    rng = np.random.default_rng(9)
    inside, outside = rng.random((400, 10)) < 0.5, rng.random((300, 12)) < 0.1
    found = lower_bound(inside, outside, delta=0.01, confidence=0.9)
    low = detection_rate(inside, confidence=0.95).low
    high = detection_rate(outside, confidence=0.95).high
    assert found.epsilon == pytest.approx(math.log((low - 0.01) / high), abs=1e-12)
    assert (found.models, found.canaries) == ((400, 300), (10, 12))
    assert found.kind == "lower bound" and "asymptotically" in found.holds
    assert lower_bound(outside, inside, delta=0.01).epsilon == 0


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_the_bound_is_rarely_over_epsilon(epsilon):
    """A mechanism of epsilon, 300 runs; false alarm of this test 1e-3 (binomial)."""
    rng, runs = np.random.default_rng(10), 300
    rate, limit = 0.1, stats.binom.isf(1e-3, runs, 0.05)
    over = under = 0
    for _ in range(runs):
        inside = exchangeable(rng, 300, 16, rate * math.exp(epsilon), 10)
        outside = exchangeable(rng, 300, 16, rate, 10)
        found = lower_bound(inside, outside, delta=0.0).epsilon
        over += found > epsilon
        under += found > epsilon - 0.5
    assert over <= limit
    assert under > limit or not epsilon  # must fail: a claim of 0.5 less


REFUSED = {
    "shape": (lambda: detection_rate([0, 1, 1]), r"shape \[models, canaries\]"),
    "values": (lambda: detection_rate(np.full((9, 9), 0.5)), "0 or 1"),
    "canaries": (lambda: detection_rate(np.ones((9, 3))), "4 canaries.*interval='wilson2'"),
    "interval": (lambda: detection_rate(np.ones((9, 9)), interval="wilson3"), "interval to be one"),
    "confidence": (lambda: detection_rate(np.ones((9, 9)), confidence=0), "confidence > 0"),
    "delta": (lambda: lower_bound(np.ones((9, 9)), np.zeros((9, 9)), delta=1), "delta in"),
    "models": (
        lambda: lower_bound(np.ones((2, 99)), np.zeros((2, 99)), delta=1e-5),
        "more models.*show something at confidence=0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        call()
