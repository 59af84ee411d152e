"""Chen et al., 2024: golden values, and the claims that fail and where."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.papers.chen2024 import claims as privacy
from experiments.papers.chen2024 import theory
from jfl.privacy.accountants import rdp

MNIST, SVHN, CIFAR = (10, 300, 1.0, 10, 600), (10, 50, 1.0, 50, 732), (10, 50, 1.0, 50, 500)


def close(got, want, rel=1e-6):
    np.testing.assert_allclose(np.asarray(got), want, rtol=rel)


# --- tCDP


@given(st.floats(1e-6, 3), st.floats(1.01, 1e4), st.floats(1e-12, 0.5))
@settings(max_examples=40)
def test_lemma2_is_the_best_order_up_to_omega(rho, omega, delta):
    orders = 1 + np.geomspace(1e-6, omega - 1, 4001)
    best = np.min(rho * orders + math.log(1 / delta) / (orders - 1))
    assert best * (1 - 1e-4) <= float(privacy.lemma2(rho, omega, delta)) <= best * (1 + 1e-12)


@pytest.mark.parametrize("batch, rows, sigma", [(10, 600, 6.766), (10, 100, 1.0), (10, 600, 0.5)])
def test_lemma4_holds_and_is_loose(batch, rows, sigma):
    rho, q, z = float(privacy.lemma1(2 / batch, sigma)), batch / rows, sigma * batch / 2
    small, omega = (float(v) for v in privacy.lemma4(rho, q).value)
    orders = np.array([1.5, 2.0, 3.0, 5.0, 12.0, 40.0])
    orders = orders[orders < omega]
    ratio = small * orders / np.asarray(rdp.without_replacement(orders, q, z))
    assert (ratio > 1).all() and ratio.max() > 2.5


def test_theorem5_of_a_client_and_that_it_does_not_calibrate():
    """Its epsilon rises with the noise to a limit, and its delta falls to nothing."""
    for clip in (1.0, 3.0):
        rho, omega = privacy.dpnfl_tcdp(10, 300, clip, 10, 600, 6.766).value
        close(rho, 26 * 3000 * clip**2 / (600 * 6.766) ** 2, 1e-12)
        close(omega, (10 * 6.766 / clip) ** 2 * math.log(60) / 8, 1e-12)
    close(privacy.dpnfl_tcdp(*MNIST, 0.5).value, (0.866667, 12.79), 1e-3)
    pairs = [privacy.theorem5(*MNIST, s).value for s in (0.5, 1.0, 10.0, 1000.0, 1e5)]
    close(pairs[0], (21.311, 4.34e-53), 1e-3)
    values, limit = [float(p[0]) for p in pairs], privacy.theorem5_limit(10, 300, 10, 600)
    close((values[1], values[2], limit), (21.96, 22.1755, 22.1777), 1e-3)
    assert values == sorted(values) and values[0] < values[-1] < limit < values[-1] * (1 + 1e-9)
    assert float(pairs[4][1]) == np.finfo(float).tiny
    # it is Lemma 2 at the smallest delta that it allows
    rho, omega = privacy.dpnfl_tcdp(*MNIST, 0.5).value
    close(privacy.lemma2(rho, omega, float(pairs[0][1])), pairs[0][0], 1e-9)


@pytest.mark.parametrize(
    "args, failed",
    [
        ((10, 300, 1.0, 10, 50, 6.0), "rate <= 0.1"),
        ((10, 300, 1.0, 10, 600, math.sqrt(0.1)), "rho <= 0.1"),
        ((10, 300, 1.0, 10, 7, 6.0), "batch <= rows"),
    ],
)
def test_what_holds_where_a_precondition_fails(args, failed):
    """No gain from sampling, and the whole data of a client with fewer rows than the batch."""
    for function in (privacy.dpnfl_tcdp, privacy.theorem5):
        assert failed in function(*args).failed
    participations, steps, clip, batch, rows, sigma = args
    rho = participations * steps * 2 * (clip / (min(batch, rows) * sigma)) ** 2
    found = privacy.dpnfl_tcdp(*args)
    close(found.value, (rho, math.inf), 1e-12)
    assert not bool(found.holds)
    epsilon = float(privacy.dpnfl_epsilon(*args, 1e-5).value)
    close(epsilon, rho + 2 * math.sqrt(rho * math.log(1e5)), 1e-12)
    assert float(rdp.gaussian_epsilon(math.sqrt(2 * rho), 1e-5)) < epsilon


def test_the_smaller_of_amplified_and_not():
    """At a rate of 0.1 the order that Lemma 4 leaves may be too small to help."""
    args = (1, 1, 1.0, 50, 500, 0.09)
    assert not privacy.dpnfl_tcdp(*args).failed
    amplified = float(privacy.lemma2(*privacy.dpnfl_tcdp(*args).value, 1e-12))
    rho = 2 / (50 * 0.09) ** 2
    plain = rho + 2 * math.sqrt(rho * math.log(1e12))
    assert plain < amplified
    close(privacy.dpnfl_epsilon(*args, 1e-12).value, plain, 1e-12)


# --- calibration


@pytest.mark.parametrize(
    "args, sigma",
    [(MNIST, 6.7660), ((50, *MNIST[1:]), 15.1293), (SVHN, 2.2641), (CIFAR, 3.3147)],
)
def test_calibrated_noise(args, sigma):
    found = privacy.calibrate_sigma(0.3, 1e-2, *args)
    close(found.value, sigma, 2e-5)
    assert found.failed == () and bool(found.holds)
    reached = float(privacy.dpnfl_epsilon(*args, found.value, 1e-2).value)
    assert 0.3 * (1 - 1e-9) <= reached <= 0.3


def test_calibration_adds_noise_until_lemma2_applies():
    args, rho = (1, 1, 1.0, 50, 500), float(privacy.rho_star(0.3, 1e-2))
    sigma = float(privacy.calibrate_sigma(0.3, 1e-2, *args).value)
    plain = math.sqrt(26 / rho) / 500
    assert sigma > 1.3 * plain
    omega = float(privacy.dpnfl_tcdp(*args, sigma).value[1])
    close((omega - 1) ** 2 * rho, math.log(100), 1e-9)
    reached = [float(privacy.dpnfl_epsilon(*args, s, 1e-2).value) for s in (plain, sigma)]
    assert reached[0] > 0.3 > reached[1]


# --- side by side

TABLE = [  # epsilons at delta 1e-2, and at 1e-5, in the order of BOUNDS
    (MNIST, 6.766, (0.300, 0.052, 0.464, 6.22), (0.472, 0.195, 1.307, 9.08)),
    (CIFAR, 3.315, (0.300, 0.052, 1.85, 0.855), (0.472, 0.197, 4.46, 1.331)),
]
BOUNDS = ("tcdp", "rdp_refined", "rdp_crude", "no_amplification")


@pytest.mark.parametrize("args, sigma, low, high", TABLE)
def test_table_of_bounds(args, sigma, low, high):
    for delta, want in ((1e-2, low), (1e-5, high)):
        found = privacy.compare(*args, sigma, delta)
        close([found[name] for name in BOUNDS], want, 1e-2)
        assert found["tight"] < 0.5 * found["rdp_refined"]
        assert found["gaussian_exact"] < found["no_amplification"]
        assert min(found, key=lambda name: found[name]) == "tight"


def test_a_client_with_few_rows_is_compared_without_sampling():
    found = privacy.compare(2, 3, 1.0, 10, 7, 5.0, 1e-5)
    close(found["tight"], found["gaussian_exact"], 1e-9)
    close(found["gaussian_exact"], rdp.gaussian_epsilon(math.sqrt(6) * 2 / (7 * 5.0), 1e-5), 1e-12)


@given(st.integers(1, 12), st.floats(0.1, 5), st.integers(0, 10**6))
@settings(max_examples=40)
def test_no_record_moves_the_mean_farther_than_its_sensitivity(batch, clip, seed):
    r = np.random.default_rng(seed)
    bounded = lambda g: g / np.maximum(1, np.linalg.norm(g, axis=-1, keepdims=True) / clip)
    rows = r.normal(size=(batch, 3)) * r.exponential(4)
    other = rows.copy()
    other[r.integers(batch)] = -rows[0] * 10
    moved = np.linalg.norm(bounded(rows).mean(0) - bounded(other).mean(0))
    assert moved <= privacy.minibatch_sensitivity(clip, batch) * (1 + 1e-12)
    # and one of full length, turned round, reaches it
    full = np.array([clip, 0.0, 0.0])
    reached = np.linalg.norm(full / batch - -full / batch)
    close(reached, privacy.minibatch_sensitivity(clip, batch), 1e-12)


# --- how often a client takes part


def test_the_mean_number_of_participations_is_no_bound():
    assert [privacy.expected_participations(t, 100, 10) for t in (50, 100, 101)] == [5, 10, 11]
    r = np.random.default_rng(0)
    counts = sum(np.bincount(r.permutation(100)[:10], minlength=100) for _ in range(100))
    assert (counts > privacy.expected_participations(100, 100, 10)).mean() > 0.3


# --- golden values of the theorems

ONE = theory.Constants(100, 10, 5, 1.0, 1.0, 2.0, 0.1, variance_2=0.5, objective_gap=0.3, dim=10)
TWO = theory.Constants(100, 10, 50, 1.0, 1.0, 2.0, dissimilarity_2=0.3)


def test_golden_values_of_the_theorems():
    close(theory.theorem1_constant(ONE), 1049.1, 1e-12)
    close(theory.theorem1(ONE, 100, 1.0).value, 807.3077, 1e-7)
    close(theory.theorem1_ours(ONE, 100, 1.0).value, 90.76923, 1e-7)
    close(theory.theorem2_constants(TWO, 1e-4), (0.0022475625, 0.1848), 1e-9)
    found = theory.theorem2(TWO, 100, 2.3, 1e-4)
    close(found.value, 92.45572, 1e-7)
    assert found.failed == ("lr < 1 / (200 tau L)",)  # at the border
    edge = 1e-4 * (1 - 1e-9)
    assert theory.theorem2(TWO._replace(clients=99.69, per_round=1), 100, 2.3, edge).failed == ()
    close(theory.theorem2_ours(TWO, 100, 2.3, 1e-4), 9.304052, 1e-7)
    found = theory.theorem3(ONE, 100, 1.0, 0.01, 0.01, 0.99, 0.1)
    close(found.value, 350147.581, 1e-8)
    assert len(found.failed) == 3


def test_remark1():
    """Bounds of Theorems 1 and 2, by hand; both fall with r, and grow with all that hurts."""
    h, rest = theory.remark1(TWO, 1e-5).value
    upsilon, q = theory.theorem2_constants(TWO, 1e-5)
    close((h, rest), (theory.theorem1_constant(TWO), q / upsilon), 1e-12)
    worse = [dict(per_round=5), dict(noise_2=3.0), dict(objective_gap=1.0, dissimilarity_2=1.0)]
    for change in worse:
        more = theory.remark1(TWO._replace(**change), 1e-5)
        assert more.failed == () and more.value[0] > h and more.value[1] > rest
    assert theory.remark1(TWO._replace(per_round=1), 1e-4).failed == ("Upsilon > 0",)


def test_theorem3_has_no_hypotheses():
    r, size = np.random.default_rng(3), 200_000
    log = lambda low, high: 10 ** r.uniform(low, high, size)
    c = theory.Constants(100, 10, r.integers(1, 30, size), log(-4, 4), log(-4, 6))
    c = c._replace(strong_convexity=log(-4, 4), dim=r.integers(1, 30, size))
    beta2, adaptivity = r.uniform(0, 1, size), log(-6, 1)
    (a, b), (low, high) = theory.theorem3_intervals(c, beta2, adaptivity)
    assert (a <= b).mean() > 0.01 and (low <= high).mean() > 0.01  # each can be had
    assert not ((a <= b) & (low <= high)).any()
    # and would not help: 30 G^2 / L stays, where G^2 / (2 lambda) is trivial
    stays = theory.theorem3(c, 1e12, 0.0, 1.0, 1.0, beta2, adaptivity).value
    assert (stays >= 30 * c.gradient_bound**2 / c.smoothness).all()


def test_theorem4():
    c = theory.Constants(20, 5, 4, 2.0, 3.0, 1.5, dissimilarity_2=0.25, dim=9)
    lr, server_lr, beta2, pi, spread = 1e-3, 0.5, 0.81, 0.1, 9 + 1.5 + 6 * 4 * 0.25
    theta = 7.0 / (lr * server_lr * 4 * 50)
    other = (3 + 0.5 * 2) * 4 * lr / pi**2 * (6 * 4 * 10.5 + spread + 6 * 4 * 0.25)
    stays = dict(printed=spread / (4 * pi), unloosened=5 * lr**2 * 4 * 4 * spread / (2 * pi))
    for variant, more in stays.items():
        found = theory.theorem4_order(c, 50, 7.0, lr, server_lr, beta2, pi, variant, constant=3.0)
        factor = 0.9 * lr * 4 * 3 / 3 + pi
        close(found.value, 3 * factor * (theta + more + other), 1e-12)
        assert found.failed == ("lr <= pi r / (80 n tau (G + server_lr L))",)
    fine = theory.theorem4_order(c, 50, 7.0, pi / (80 * 64) * 0.999, server_lr, beta2, pi)
    assert fine.failed == ()
