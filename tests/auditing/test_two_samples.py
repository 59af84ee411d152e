"""Bounds from scores with and without a canary: known values, brute force, and error rates."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import optimize, special, stats

from jfl.auditing.estimators import thresholds, two_samples
from jfl.auditing.estimators.thresholds import Bonferroni, Explicit, Split
from jfl.privacy.accountants import rdp

ALARM = 1e-6  # of each comparison with a random number below


def normal_scores(n):
    """Scores without chance: the normal law's quantiles."""
    return special.ndtri((np.arange(n) + 0.5) / n)


class EveryScore:
    """The best threshold of the judged scores, without a correction: an oracle."""

    def judge(self, inside, outside, alpha, read):
        every = np.union1d(inside, outside)
        return Explicit(every).judge(inside, outside, alpha * len(every), read)


def gaussian_delta(z, epsilon):
    mu = 1 / z
    tail = stats.norm.logcdf(-epsilon / mu - mu / 2)
    return float(stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + tail))


# --- counts


@pytest.mark.parametrize("trials, alpha", [(1, 0.5), (7, 0.0125), (1000, 1e-9)])
def test_upper_bounds_against_scipy(trials, alpha):
    k = np.arange(trials)
    upper = thresholds.clopper_pearson_upper(np.arange(trials + 1), trials, alpha)
    np.testing.assert_allclose(upper[:-1], stats.beta.isf(alpha, k + 1, trials - k), rtol=1e-9)
    assert upper[-1] == 1
    # what it is for: so few errors are as rare as alpha there
    np.testing.assert_allclose(stats.binom.cdf(k, trials, upper[:-1]), alpha, rtol=1e-4)


# --- known bounds


@pytest.mark.parametrize("n, ceiling", [(100, 3.281346), (100_000, 10.207584)])
def test_ceiling_without_an_error(n, ceiling):
    found = two_samples.lower_bound(np.ones(n), np.zeros(n), delta=0.0, thresholds=Explicit(0.5))
    assert abs(found.epsilon - ceiling) < 6e-7
    assert found[1:] == (0.95, 0.5, 0, 0, "lower bound")


@pytest.mark.parametrize("epsilon, mu", [(0.5, 0.1422105587), (8, 1.6660305978)])
def test_gaussians_of_known_epsilon(epsilon, mu):
    """The conversion of `gaussian_bound`, and of `tradeoff_bound` where noise is given."""
    assert abs(rdp.gaussian_epsilon(mu, 1e-5) - epsilon) < 1e-9
    assert abs(two_samples._epsilon_of(gaussian_delta, 1 / mu, 1e-5) - epsilon) < 3e-6


def test_expected_tightness():
    """Of Clopper-Pearson and of Gaussians, for 10,000 scores: a table made with fewer thresholds.
    Nothing here is below it, nor much above."""
    outside, every = normal_scores(5000), EveryScore()
    for mu, printed in ((0.2680511232, (0.31, 0.72)), (1.6660305978, (3.46, 7.55))):
        sides = outside + mu, outside
        found = [
            bound(*sides, delta=1e-5, thresholds=every).epsilon
            for bound in (two_samples.lower_bound, two_samples.gaussian_bound)
        ]
        above = np.array(found) - printed
        assert np.all(above >= -0.005) and np.all(above <= 0.016), (mu, found)


# --- against brute force


def brute(inside, outside, delta, alpha):
    """All scores as thresholds, one by one, by scipy.stats."""
    best, n, m = (0.0, 0.0), len(inside), len(outside)
    for t in np.union1d(inside, outside):
        missed, accepted = np.sum(inside < t), np.sum(outside >= t)
        b = stats.beta.isf(alpha / 2, missed + 1, n - missed) if missed < n else 1.0
        a = stats.beta.isf(alpha / 2, accepted + 1, m - accepted) if accepted < m else 1.0
        shown = [math.log((1 - x - delta) / y) for x, y in [(b, a), (a, b)] if 1 - x - delta > 0]
        mu = stats.norm.isf(a) - stats.norm.ppf(b)
        best = max([best[0], *shown]), max(best[1], mu)
    return best


@pytest.mark.parametrize("n, m", [(60, 60), (40, 90)])
def test_every_threshold_by_brute_force(n, m):
    generator = np.random.default_rng(5)
    inside, outside = generator.normal(2, 1, n), generator.normal(0, 1, m)
    common = dict(delta=1e-3, confidence=0.9)
    every = Explicit(np.union1d(inside, outside))
    epsilon, mu = brute(inside, outside, 1e-3, 0.1 / len(every.threshold))
    found = two_samples.lower_bound(inside, outside, thresholds=every, **common)
    assert abs(found.epsilon - epsilon) < 1e-9
    assert found.false_negatives == np.sum(inside < found.threshold)
    assert found.false_positives == np.sum(outside >= found.threshold)
    gaussian = two_samples.gaussian_bound(inside, outside, thresholds=every, **common)
    by_scipy = optimize.brentq(lambda x: math.log(gaussian_delta(1 / mu, x) / 1e-3), 0.01, 30)
    assert abs(gaussian.epsilon - by_scipy) < 1e-6


def keep(seen):
    def read(rates):
        seen.append(rates)
        return 0.0, 0

    return read


def test_raw_counts():
    generator = np.random.default_rng(0)
    inside, outside = generator.normal(1, 1, 300).round(1), generator.normal(0, 1, 200).round(1)
    for delta, fewest in ((0.0, 50), (0.1, 20), (0.0, 1)):
        ways = []
        for t in np.union1d(inside, outside):
            fnr, fpr = np.mean(inside < t), np.mean(outside >= t)
            if np.sum(outside >= t) >= fewest and 1 - fnr > delta:
                ways.append(math.log((1 - fnr - delta) / fpr))
            if np.sum(inside < t) >= fewest and 1 - fpr > delta:
                ways.append(math.log((1 - fpr - delta) / fnr))
        found = two_samples.raw_counts(inside, outside, delta=delta, min_count=fewest)
        assert abs(found.epsilon - max(ways)) < 1e-12
        assert found.kind == "estimate" and found.confidence is None


def test_statistics_of_the_attack():
    generator = np.random.default_rng(1)
    inside, outside = generator.normal(1, 1, 80).round(1), generator.normal(0, 1, 100).round(1)
    pairs = np.sign(inside[:, None] - outside)
    assert abs(two_samples.auroc(inside, outside) - (1 + pairs.mean()) / 2) < 1e-12
    at = np.append(np.union1d(inside, outside), np.inf)
    found = np.array([np.mean(inside >= t) for t in at])
    wrong = np.array([np.mean(outside >= t) for t in at])
    allowed = np.arange(101) / 100
    best = [found[wrong <= f + 1e-9].max() for f in allowed]
    np.testing.assert_allclose(two_samples.tpr_at_fpr(inside, outside, allowed), best, atol=1e-12)


# --- families of mechanisms


@pytest.mark.parametrize("n, mu", [(100, 1.0), (20_000, 2.0)])
def test_the_gaussian_family_is_the_gaussian_bound(n, mu):
    generator = np.random.default_rng(3)
    inside, outside = generator.normal(mu, 1, n), generator.normal(0, 1, n)
    for chosen in (Bonferroni(), Split()):
        common = dict(delta=1e-5, thresholds=chosen)
        family = two_samples.tradeoff_bound(inside, outside, profile=gaussian_delta, **common)
        direct = two_samples.gaussian_bound(inside, outside, unsampled_gaussian=True, **common)
        assert direct.epsilon - 1e-4 < family.epsilon <= direct.epsilon + 1e-9
        assert family[1:] == direct[1:] and family.kind == "lower bound"


def test_ends_of_the_noise_that_is_searched():
    inside, outside = normal_scores(500) + 1, normal_scores(500)
    bound = lambda *ends: (
        two_samples.tradeoff_bound(
            inside, outside, profile=gaussian_delta, delta=1e-5, noise_range=ends
        ).epsilon
    )
    assert bound(0.01, 0.5) == 0  # nothing there is rejected
    assert abs(bound(5.0, 100.0) - rdp.gaussian_epsilon(0.2, 1e-5)) < 1e-5  # all is
    assert (
        two_samples.tradeoff_bound(outside, inside, profile=gaussian_delta, delta=1e-5).epsilon == 0
    )


def test_the_gaussian_bound_says_where_it_holds():
    """Randomised response has epsilon 1 at any delta; a Gaussian with such errors has much more."""
    inside = np.repeat([1.0, 0.0], [7311, 2689])
    sides, common = (inside, 1 - inside), dict(delta=1e-5, thresholds=Explicit(1.0))
    wrong = two_samples.gaussian_bound(*sides, **common)
    assert wrong.epsilon > 4 and wrong.kind == "estimate"
    assert 0.9 < two_samples.lower_bound(*sides, **common).epsilon < 1
    # its own family: epsilon = 1 / z
    response = lambda z, x: max(special.expit(1 / z) - math.exp(x) * special.expit(-1 / z), 0.0)
    own = two_samples.tradeoff_bound(*sides, profile=response, **common)
    assert 0.9 < own.epsilon < 1 and own.kind == "lower bound"


# --- confidence


@dataclass(frozen=True)
class Undivided:
    """What `Bonferroni` would be without its correction."""

    tried: int = 16
    kind = "lower bound"

    def judge(self, inside, outside, alpha, read):
        return Bonferroni(self.tried).judge(inside, outside, alpha * self.tried, read)


def wrong_rates(chosen, trials, alpha, n, law, ties):
    """How often some bound on a rate is below it; scores of both sides have one law."""
    generator = np.random.default_rng(8)
    found = 0
    for _ in range(trials):
        sides = generator.random((2, n))
        if ties:
            sides = np.floor(sides * ties) / ties
        inside, outside = np.sort(sides, axis=1)
        seen = []
        chosen.judge(inside, outside, alpha, keep(seen))
        at, a, b = (seen[-1][i] for i in (0, 4, 3))
        below = law(np.clip(at, 0, 1))
        found += bool(np.any(below > b) or np.any(1 - below > a))
    return found


LAWS = {0: lambda t: t, 20: lambda t: np.searchsorted(np.arange(20) / 20, t) / 20}


@pytest.mark.parametrize("ties", [0, 20])
def test_bounds_of_rates_hold_at_once(ties):
    """False alarms: each count is a binomial one, compared at a probability of 1e-6.  The half that
    must fail: without the correction, the bounds are wrong too often."""
    trials, alpha, n = 300, 0.2, 300
    most = stats.binom.isf(ALARM, trials, alpha)
    for chosen in (
        Explicit(0.501),
        Explicit([0.1, 0.5, 0.9]),
        Bonferroni(1),
        Bonferroni(),
        Split(),
    ):
        assert wrong_rates(chosen, trials, alpha, n, LAWS[ties], ties) <= most, chosen
    # they are not wide either: one threshold is wrong almost as often as it may be
    least = stats.binom.isf(1 - ALARM, trials, 0.75 * alpha)
    assert wrong_rates(Explicit(0.501), trials, alpha, n, LAWS[ties], ties) >= least
    if not ties:
        assert wrong_rates(Bonferroni(1), trials, alpha, n, LAWS[ties], ties) >= least
        assert wrong_rates(Undivided(), trials, alpha / 4, n, LAWS[ties], ties) > most
        assert wrong_rates(EveryScore(), trials, alpha, n, LAWS[ties], ties) > most


def test_a_split_uses_each_score_once():
    """Scores that chose a threshold must not be counted at it again."""
    scores = np.arange(11.0)
    chooses, counted = thresholds._divide(np.random.default_rng(0), scores, 0.4)
    assert len(chooses) == 4 and sorted([*chooses, *counted]) == scores.tolist()


# --- arguments

GOOD = np.arange(40.0)


@pytest.mark.parametrize(
    "message, call",
    [
        ("inside finite", lambda: two_samples.lower_bound([*GOOD, math.nan], GOOD, delta=0.0)),
        ("outside finite", lambda: two_samples.auroc(GOOD, [math.inf, 1.0])),
        ("a list of scores", lambda: two_samples.auroc([], GOOD)),
        ("delta in", lambda: two_samples.lower_bound(GOOD, GOOD, delta=1.0)),
        ("delta in", lambda: two_samples.gaussian_bound(GOOD, GOOD, delta=0.0)),
        ("0.95", lambda: two_samples.lower_bound(GOOD, GOOD, delta=0.0, confidence=95)),
        ("Bonferroni", lambda: two_samples.lower_bound(GOOD, GOOD, delta=0.0, thresholds=0.5)),
        ("more runs", lambda: two_samples.lower_bound(GOOD[:4], GOOD[:4], delta=0.0)),
        ("2 scores per side", lambda: thresholds.Split().judge(GOOD[:1], GOOD, 0.05, keep([]))),
        ("min_count", lambda: two_samples.raw_counts(GOOD, GOOD)),
        ("fraction in", lambda: Split(1.0)),
        ("tried >= 1", lambda: Bonferroni(0)),
        ("0 <= count", lambda: thresholds.clopper_pearson_upper(3, 2, 0.05)),
        (
            "falls below delta",
            lambda: two_samples.tradeoff_bound(
                GOOD + 99, GOOD, profile=lambda z, x: 0.2, delta=0.1
            ),
        ),
    ],
)
def test_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()


def test_scores_in_any_order_and_kind():
    generator = np.random.default_rng(0)
    inside, outside = generator.normal(2, 1, 99), generator.normal(0, 1, 70)
    for chosen in (Bonferroni(), Split()):
        bound = lambda *s, c=chosen: two_samples.lower_bound(*s, delta=1e-3, thresholds=c)
        assert bound(inside, outside) == bound(inside[::-1].tolist(), np.sort(outside))
        # only the order counts
        assert bound(inside, outside).epsilon == bound(np.exp(inside), np.exp(outside)).epsilon
