"""One-shot estimates and bounds: published values, integration, simulation."""

import math

import numpy as np
import pytest
from scipy import integrate, special, stats

from jfl.auditing.estimators import one_shot
from jfl.core.errors import ArgumentError
from jfl.privacy.accountants import rdp_on_host

SEED = 0xBAD5EED  # of the authors' tests


def test_published_value_for_two_samples():
    rng = np.random.default_rng(SEED)
    seen, unseen = rng.normal(1, 1, 100), rng.normal(0, 1, 100)
    found = one_shot.estimate_over_thresholds(seen, unseen, delta=0.01, confidence=0.99)
    assert found.epsilon == pytest.approx(0.6839449, abs=1e-7) and found.kind == "estimate"


@pytest.mark.parametrize(
    "dimension, null, epsilon", [(200, "exact", 1.394838), (2000, "gaussian", 1.3880321)]
)
def test_published_values_with_the_null_known(dimension, null, epsilon):
    scale = dimension**-0.5
    seen = np.random.default_rng(SEED).normal(scale, scale, 100)
    options = dict(delta=0.01, confidence=0.99)
    found = one_shot.lower_bound(seen, dimension, null=null, correction="none", **options)
    assert found.epsilon == pytest.approx(epsilon, abs=1e-6) and found.kind == "estimate"
    other = one_shot.lower_bound(seen, dimension, correction="none", **options)  # exact
    assert other.epsilon == pytest.approx(epsilon, abs=1e-3)
    corrected = one_shot.lower_bound(seen, dimension, **options)
    assert 0 < corrected.epsilon < found.epsilon and corrected.kind == "lower bound"


@pytest.mark.parametrize("dimension, epsilon", [(200, 2.375326), (2000, 2.317789)])
def test_published_values_of_the_estimate(dimension, epsilon):
    scale = dimension**-0.5
    found = one_shot.epsilon_against_null(scale, scale, dimension, 0.01)
    assert found == pytest.approx(epsilon, abs=1e-6)
    # two cosines with this mean and deviation
    fitted = one_shot.epsilon_of_final([0.0, 2 * scale], dimension, 0.01)
    assert fitted.epsilon == pytest.approx(epsilon, abs=1e-6) and fitted.kind == "estimate"
    # the null is symmetric: canaries that the model moved away from tell as much
    away = one_shot.epsilon_of_final([0.0, -2 * scale], dimension, 0.01)
    assert away.epsilon == pytest.approx(epsilon, abs=1e-6)


@pytest.mark.parametrize("dimension", [1000, 2000, 10**6])
def test_the_estimate_of_a_gaussian_of_mu_1(dimension):
    """In any dimension the epsilon of the Gaussian mechanism, by another program."""
    scale = dimension**-0.5
    found = one_shot.epsilon_against_null(scale, scale, dimension, 0.01)
    assert found == pytest.approx(2.3177890403, abs=1e-9)
    assert found == pytest.approx(rdp_on_host.gaussian_epsilon(1.0, 0.01), abs=1e-9)


GAUSSIANS = [
    (0.0, 1.0, 1.0, 1.0),
    (1.0, 0.5, 0.0, 1.0),
    (0.0, 2.0, -1.0, 1.0),
    (3.0, 1.0, 3.0, 1.5),
    (3.0, 1.5, 3.0, 1.0),
    (-2.0, 0.3, 0.1, 0.31),
]


@pytest.mark.parametrize("gaussians", GAUSSIANS, ids=str)
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0])
def test_hockey_stick_by_integration(gaussians, epsilon):
    mean, deviation, other_mean, other_deviation = gaussians
    one, other = stats.norm(mean, deviation), stats.norm(other_mean, other_deviation)
    y = np.linspace(-25, 25, 400_001)
    density = np.maximum(one.pdf(y) - math.exp(epsilon) * other.pdf(y), 0)
    exact = one_shot.hockey_stick_of_gaussians(*gaussians, epsilon)
    assert exact == pytest.approx(integrate.simpson(density, x=y), abs=1e-8)


def test_hockey_stick_in_the_far_tail_and_with_almost_equal_deviations():
    tail = one_shot.hockey_stick_of_gaussians(1.0, 1.0, 0.0, 1.0, 30.0)
    z, log_z = -30 + 0.5, -30 - 0.5
    log_p, log_q = stats.norm.logcdf(z), stats.norm.logcdf(log_z)
    assert tail == pytest.approx(math.exp(log_p) * -math.expm1(30 + log_q - log_p), rel=1e-9)
    for nudge in (-1e-12, 1e-12, -1e-6, 1e-6):
        for mean in (1.0, -0.7):
            near = one_shot.hockey_stick_of_gaussians(mean, 1.0 + nudge, 0.0, 1.0, 2.0)
            equal = one_shot.hockey_stick_of_gaussians(mean, 1.0, 0.0, 1.0, 2.0)
            assert near == pytest.approx(equal, rel=50 * abs(nudge) + 1e-10)
    assert one_shot.hockey_stick_of_gaussians(0.0, 1.0, 0.0, 1.0, 0.0) == 0


def test_epsilon_of_gaussians_is_where_the_larger_divergence_is_delta():
    for mean, deviation, other_mean, other_deviation in GAUSSIANS:
        pair = (mean, deviation, other_mean, other_deviation)
        epsilon = one_shot.epsilon_of_gaussians(*pair, 1e-3)
        one = one_shot.hockey_stick_of_gaussians(*pair, epsilon)
        other = one_shot.hockey_stick_of_gaussians(*pair[2:], *pair[:2], epsilon)
        assert max(one, other) == pytest.approx(1e-3, rel=1e-6)
        found = one_shot.epsilon_of_all(
            [mean - deviation, mean + deviation],
            [other_mean - other_deviation, other_mean + other_deviation],
            1e-3,
        )
        assert found.epsilon == pytest.approx(epsilon, rel=1e-6)
    assert one_shot.epsilon_of_gaussians(0.0, 1.0, 0.0, 1.0, 1e-3) == 0


@pytest.mark.parametrize("dimension", [2, 3, 50])
def test_null_by_integration_and_by_simulation(dimension):
    """Kolmogorov-Smirnov on 20,000 random directions; false alarm 1e-4."""
    log_scale = math.lgamma(dimension / 2) - math.lgamma((dimension - 1) / 2)
    scale = math.exp(log_scale) / math.sqrt(math.pi)
    for t in (-0.9, -0.2, 0.0, 0.4, 0.8):
        mass, _ = integrate.quad(lambda y: scale * (1 - y * y) ** ((dimension - 3) / 2), t, 1)
        assert one_shot.null_cosine_sf(t, dimension) == pytest.approx(mass, rel=1e-6)
    x = np.random.default_rng(5).normal(size=(20_000, dimension))
    cosines = x[:, 0] / np.linalg.norm(x, axis=1)
    cdf = lambda t, d: 1 - one_shot.null_cosine_sf(t, d)
    assert stats.kstest(cosines, lambda t: cdf(t, dimension)).pvalue > 1e-4
    # must fail: another dimension
    assert stats.kstest(cosines, lambda t: cdf(t, dimension + dimension // 5 + 1)).pvalue < 1e-4


def test_null_where_probabilities_underflow():
    t = np.array([0.75, 0.8, 0.95])
    log_tail = one_shot._log_null_sf(t, 2001)
    series = special_series(t, 2001)
    assert np.all(one_shot.null_cosine_sf(t[1:], 2001) == 0) and np.all(np.isfinite(log_tail))
    assert np.all(log_tail >= series - 1e-6) and np.all(log_tail < series + 1)
    # cosines of 1 do not make the bound infinite
    assert 0 < one_shot.lower_bound(np.ones(100), 5000, delta=1e-5).epsilon < 1e5


def special_series(t, dimension):
    """log of the tail by its density at t: t (1 - t^2)^a / (2 a B t^2) (1 - small)."""
    a, x = (dimension - 1) / 2, 1 - t * t
    series = np.log(special.hyp2f1(a + 0.5, 1, a + 1, x))
    return a * np.log(x) + np.log(t) - np.log(2 * a) - special.betaln(a, 0.5) + series


def test_the_estimate_of_a_release():
    """Sum of canaries and noise: the estimate is within four standard errors, 4 / sqrt(k) of mu.

    False alarm: 1e-4.
    """
    rng = np.random.default_rng(2)
    k, dimension, noise = 200, 4000, 1.0
    canaries = rng.normal(size=(k, dimension))
    canaries /= np.linalg.norm(canaries, axis=1, keepdims=True)
    release = canaries.sum(axis=0) + noise * rng.normal(size=dimension)
    cosines = canaries @ release / np.linalg.norm(release)
    found = one_shot.epsilon_of_final(cosines, dimension, 1e-2).epsilon
    bias = (1 + k / (dimension * noise**2)) ** -0.5
    ends = [rdp_on_host.gaussian_epsilon(bias / noise + e * k**-0.5, 1e-2) for e in (-4, 4)]
    assert ends[0] < found < ends[1]
    wrong = one_shot.epsilon_of_final(cosines, dimension // 4, 1e-2).epsilon
    assert not ends[0] < wrong < ends[1]  # must fail: cosines of another dimension


def test_how_often_bounds_are_over_the_truth():
    """Independent Gaussian cosines, 300 runs.  False alarm of this test: 1e-3 (binomial)."""
    rng = np.random.default_rng(8)
    runs, dimension, delta, mu = 300, 2000, 1e-2, 1.0
    epsilon = rdp_on_host.gaussian_epsilon(mu, delta)
    over = dict(bonferroni=0, none=0)
    for _ in range(runs):
        seen = (mu + rng.normal(size=100)) / dimension**0.5
        for correction in over:
            found = one_shot.lower_bound(
                seen, dimension, delta=delta, null="gaussian", correction=correction
            )
            over[correction] += found.epsilon > epsilon
    limit = stats.binom.isf(1e-3, runs, 0.05)
    assert over["bonferroni"] <= limit
    assert over["none"] > limit  # must fail: the threshold was chosen after the cosines were seen


REFUSED = {
    "few": (lambda: one_shot.lower_bound([0.1], 500, delta=0.1, confidence=0.99), "more canaries"),
    "few of both": (
        lambda: one_shot.estimate_over_thresholds([1.0, 2.0], [0.0, 1.0], delta=0.1),
        "more canaries.*show something at 0.9",
    ),
    "cosine": (lambda: one_shot.lower_bound([1.1] * 99, 500, delta=0.1), "cosines in"),
    "dimension": (lambda: one_shot.null_cosine_sf(0.1, 1), "dimension >= 2"),
    "delta": (lambda: one_shot.epsilon_of_final([0.1, 0.2], 500, 0.0), r"delta in \(0, 1\)"),
    "one": (lambda: one_shot.epsilon_of_final([0.1], 500, 0.01), "2 numbers or more"),
    "equal": (lambda: one_shot.epsilon_of_all([1.0, 1.0], [0.0, 1.0], 0.01), "seen that differ"),
    "nan": (lambda: one_shot.epsilon_of_all([1.0, math.nan], [0.0, 1.0], 0.01), "finite"),
    "deviation": (
        lambda: one_shot.hockey_stick_of_gaussians(0.0, 0.0, 0.0, 1.0, 1.0),
        "deviation > 0",
    ),
    "null": (lambda: one_shot.lower_bound([0.1] * 99, 500, delta=0, null="t"), "null to be one of"),
    "confidence": (
        lambda: one_shot.lower_bound([0.1] * 99, 500, delta=0, confidence=1.0),
        "confidence in",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        call()
