"""Bounds from one run with many canaries: published values, brute force, and error rates."""

import math

import numpy as np
import pytest
from scipy import special, stats

from jfl.auditing.estimators import one_run as audit
from jfl.auditing.estimators.one_run import guesses_from_scores, one_run, one_run_tradeoff
from jfl.core.errors import ArgumentError
from jfl.privacy.accountants import rdp

# canaries, guesses, correct, epsilon of `one_run`, of `one_run_tradeoff`; delta 1e-5, confidence
# .95; by two other programs
GOLDEN = [
    (1000, 100, 100, 3.4653763478, 5.5490278976),
    (1000, 100, 90, 1.6261434807, 2.4564048931),
    (5000, 1500, 1400, 2.4636697, 3.8408162),
    (10000, 10000, 7000, 0.8109442347, 1.3760923261),
    (1000, 1000, 500, 0.0, 0.0),
]


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: "-".join(map(str, row[:3])))
def test_published_values(row):
    *counts, anything, gaussian = row
    assert one_run(*counts, delta=1e-5).epsilon == pytest.approx(anything, abs=1e-7)
    assert one_run_tradeoff(*counts, delta=1e-5).epsilon == pytest.approx(gaussian, abs=1e-7)


def test_published_value_without_delta():
    assert one_run(100, 100, 100, delta=0.0).epsilon == pytest.approx(3.492965431, abs=1e-8)


# --- against sums and other programs


@pytest.mark.parametrize("counts", [(30, 20, 13), (50, 50, 50), (9, 5, 0)])
@pytest.mark.parametrize("epsilon", [0.0, 3.0])
def test_p_value_by_summation(counts, epsilon):
    canaries, guesses, correct = counts
    q, delta = 1 / (1 + math.exp(-epsilon)), 1e-3
    mass = [math.comb(guesses, k) * q**k * (1 - q) ** (guesses - k) for k in range(guesses + 1)]
    missed = max([sum(mass[correct - i : correct]) / i for i in range(1, correct + 1)], default=0)
    p = min(1, sum(mass[correct:]) + 2 * canaries * delta * missed)
    assert audit.one_run_p_value(epsilon, *counts, delta=delta) == pytest.approx(p, rel=1e-12)


def test_p_values_rise_with_epsilon():
    """Then the first epsilon that is not rejected is the bound, and a search finds it."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        canaries = int(10 ** rng.uniform(1, 3.5))
        guesses = int(rng.integers(1, canaries + 1))
        correct = int(rng.integers(guesses // 2, guesses + 1))
        delta = 10 ** rng.uniform(-6, -2)
        counts = (canaries, guesses, correct)
        p_values = [audit.one_run_p_value(x, *counts, delta=delta) for x in np.linspace(0, 12, 40)]
        assert np.all(np.diff(p_values) > -1e-9)


def rejected(mu, canaries, guesses, correct, alpha):
    """Algorithm 3 as printed, without stopping early."""
    right = [alpha * correct / canaries]
    wrong = [alpha * (guesses - correct) / canaries]
    for i in range(correct - 1, -1, -1):
        wrong.append(max(wrong[-1], special.ndtr(special.ndtri(right[-1]) - mu)))
        right.append(min(1, right[-1] + i / (guesses - i) * (wrong[-1] - wrong[-2])))
    return right[-1] + wrong[-1] > guesses / canaries


def test_tradeoff_as_printed():
    counts, delta = (60, 40, 36), 1e-3
    epsilon = one_run_tradeoff(*counts, delta=delta).epsilon
    low, high = 0.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle, *counts, 0.05) else (low, middle)
    assert low > 0.5 and epsilon == pytest.approx(rdp.gaussian_epsilon(low, delta), 1e-6)


def test_tradeoff_of_one_canary_is_the_best_guess():
    """One guess is correct with probability r at most, where r + curve(r) = 1."""
    right = 0.95  # above the probability of a guess without any information
    mu = 1 / audit._smallest_rejected(1, 1, 1, right)
    wrong = stats.norm.cdf(stats.norm.ppf(right) - mu)
    assert right + wrong == pytest.approx(1, abs=1e-6)


# --- guesses


def test_guesses_by_hand():
    made = guesses_from_scores([5, 1, 4, 2, 3, 0], [1, 0, 0, 0, 1, 1], 5)
    assert made.signs.tolist() == [1, -1, 1, 0, 1, -1] and made.correct == 3
    made = guesses_from_scores([0.1, 2.0, 1.5, 0.4], [False, True, True, False], 3, center=0.5)
    assert made.signs.tolist() == [-1, 1, 1, 0] and made.correct == 3


@pytest.mark.parametrize("center", [None, 0.0])
def test_equal_scores_reveal_no_canary(center):
    """If all scores are equal, an order that ends with the included canaries would be correct."""
    included = np.arange(100) >= 50
    for coins in (included, ~included):
        assert guesses_from_scores(np.zeros(100), coins, 40, center=center).correct == 0


# --- how often a bound is over the truth


def smallest_over(epsilon, canaries, guesses, **options):
    """The smallest number of right guesses whose bound is over `epsilon`."""
    low, high = 0, guesses + 1
    while high - low > 1:
        middle = (low + high) // 2
        found = one_run(canaries, guesses, middle, **options).epsilon
        low, high = (low, middle) if found > epsilon else (middle, high)
    return high


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_randomized_response_is_overstated_as_rarely_as_promised(epsilon):
    """Exact, no simulation: the right guesses are binomial, and the bound is tight for them."""
    guesses = 300
    least = smallest_over(epsilon + 1e-9, guesses, guesses, delta=0.0)
    wrong = stats.binom.sf(least - 1, guesses, special.expit(epsilon))
    assert 0.03 < wrong <= 0.05
    # must fail: the same counts, read at a chance of 2 % less
    weaker = stats.binom.sf(least - 1, guesses, special.expit(epsilon) * 1.02)
    assert weaker > 0.05


def test_the_term_of_delta_is_needed():
    """Each bit is told with probability delta: (0, delta)-DP.  Exact, no simulation."""
    canaries, delta = 2000, 0.01
    chance = delta + (1 - delta) / 2
    with_term = [
        audit.one_run_p_value(0.0, canaries, canaries, k, delta=delta)
        for k in range(1000, 1101, 10)
    ]
    over = [stats.binom.sf(k - 1, canaries, chance) for k in range(1000, 1101, 10)]
    assert np.all(np.array(with_term) >= over)
    # must fail: delta dropped
    least = smallest_over(0.0, canaries, canaries, delta=0.0)
    assert stats.binom.sf(least - 1, canaries, chance) > 0.1
    # it is neither free nor useless
    assert 0 < one_run(200, 200, 190, delta=1e-4).epsilon < one_run(200, 200, 190, delta=0).epsilon


def test_gaussian_scores_are_not_overstated():
    """Independent Gaussian releases, 200 runs.  False alarm of this test: 1e-3 (binomial)."""
    rng = np.random.default_rng(11)
    runs, canaries, guesses, mu = 200, 200, 60, 1.0
    counts = []
    for _ in range(runs):
        included = rng.random(canaries) < 0.5
        scores = rng.normal(size=canaries) + mu * included
        counts.append(guesses_from_scores(scores, included, guesses).correct)
    bound = {v: one_run_tradeoff(canaries, guesses, v, delta=1e-3).epsilon for v in set(counts)}
    found = np.array([bound[v] for v in counts])
    limit = stats.binom.isf(1e-3, runs, 0.05)
    assert np.sum(found > rdp.gaussian_epsilon(mu, 1e-3)) <= limit
    # must fail: a claim of a fifth of the mu that was there
    assert np.sum(found > rdp.gaussian_epsilon(mu / 5, 1e-3)) > limit


# --- what is refused

REFUSED = {
    "more guesses": (lambda: one_run(100, 101, 50, delta=0.0), "correct <= guesses <= canaries"),
    "more right": (lambda: one_run(100, 10, 11, delta=0.0), "correct <= guesses <= canaries"),
    "nan": (lambda: one_run(100, 10, 9, delta=math.nan), "delta >= 0"),
    "per cent": (lambda: one_run(100, 10, 9, delta=0.0, confidence=95), "confidence in"),
    "few": (lambda: one_run(100, 4, 4, delta=0.0), "at least 5 guesses for confidence=0.95"),
    "much delta": (lambda: one_run(100, 50, 50, delta=0.1), r"a smaller canaries \* delta"),
    "few, curve": (lambda: one_run_tradeoff(9, 2, 2, delta=1e-5), "more guesses"),
    "ragged": (lambda: guesses_from_scores([1.0, 2.0], [True], 1), "one length"),
    "coins": (lambda: guesses_from_scores([1.0, 2.0], [0, 2], 1), "true or false"),
    "nan score": (lambda: guesses_from_scores([1.0, math.nan], [0, 1], 1), "1 that are nan"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        call()
