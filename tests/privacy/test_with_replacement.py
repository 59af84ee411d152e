"""Draws with replacement: the pair that dominates them, against the mixtures of data sets and
independent numbers."""

import functools
import math

import numpy as np
import pytest
from helpers.ledger_plans import fixed
from scipy import optimize, special, stats

from jfl.privacy.accountants import events, pld, pld_step, rdp, rdp_events, tightest

tail = stats.norm.sf
CASES = [(4, 8, 1.0), (4, 2, 5.0), (3, 40, 0.3), (2, 1.05, 0.8)]


def drawn(draws, population, z, times=1):
    return events.repeat(events.with_replacement(draws, population, events.gaussian(z)), times)


def binomial(draws, population):
    return stats.binom.pmf(np.arange(draws + 1), draws, 1 / population)


def mixtures(epsilon, law, z, first, second):
    """Return the hockey-stick divergence of two mixtures of Gaussians on a line, around means that
    only grow apart."""
    ratio = lambda x: (
        special.logsumexp((first * x - first**2 / 2) / z**2, b=law)
        - special.logsumexp((second * x - second**2 / 2) / z**2, b=law)
        - epsilon
    )
    low, high = -100 * (1 + z * z), (100 + 4 * epsilon) * (1 + z * z)
    if ratio(high) < 0:
        return 0.0
    at = optimize.brentq(ratio, low, high, xtol=1e-13)
    return law @ tail((at - first) / z) - math.exp(epsilon) * (law @ tail((at - second) / z))


def one_end(epsilon, law, z):
    """Return what one data set attains: all other rows at one end, the changed one at either."""
    copies = np.arange(len(law))
    return mixtures(epsilon, law, z, copies, 0.0 * copies)


def worst(epsilon, law, z):
    """Return the worst that a search finds among the other rows of each draw."""
    most = len(law) - 1

    def lost(shifts):
        means = np.append(0.0, np.cumsum(shifts))
        return -math.log(max(mixtures(epsilon, law, z, means, means - np.arange(most + 1)), 1e-300))

    starts = np.ones(most), np.full(most, 0.5)  # one end for all, and the middle
    return max(math.exp(-optimize.minimize(lost, s, bounds=[(0, 1)] * most).fun) for s in starts)


@functools.cache
def program(build, size):
    run = lambda law, z, interval, start: build("replace", law, z, interval, start, size)
    return rdp.float64(run, compiler_options=pld._compiler_options())


def on_a_grid(law, z, interval, start, size):
    """Return losses; pessimistic masses and the lost mass; optimistic masses and their offsets."""
    law = np.append(law, np.zeros(-len(law) % 8))
    both = (
        tuple(map(np.asarray, program(build, size)(law, z, interval, start)))
        for build in (pld_step.pessimistic, pld_step.optimistic)
    )
    return interval * (start + np.arange(size)), *both


def proved(event, delta):
    """Return the epsilon of the first grid; only the lower end, and the slow tests, need more."""
    return pld.epsilon(event, delta, sizes=pld.SIZES[:1], with_width=False)[0]


def above(epsilon, losses, mass, lost=0.0):
    return lost + np.sum(mass * -np.expm1(np.minimum(epsilon - losses, 0)))


# --- one release


@pytest.mark.slow
@pytest.mark.parametrize("draws, population, z", CASES)
def test_the_profile_is_the_worst_of_all_mixtures(draws, population, z):
    """A search over data sets and the solution of the dual problem meet: above each, and no higher
    than the best."""
    law, interval = binomial(draws, population), 0.05
    at, (mass, lost), (low, offset) = on_a_grid(law, z, interval, -40, 1000)
    assert abs(mass.sum() + lost - 1) < 1e-12 and (mass >= 0).all()
    for e in (0.0, 0.3, 1.0, 3.0):
        want, high = worst(e, law, z), above(e, at, mass, lost)
        assert want * (1 - 1e-9) <= high <= want * (1 + 1e-5) + 1e-13
        assert above(e, at + offset, low) <= want * (1 + 1e-9)
        assert above(e + interval / 2, at, mass, lost) >= one_end(
            e + interval / 2, law, z
        )  # between grid points too
        if e <= 1:  # the other direction
            np.testing.assert_allclose(
                above(-e, at, mass, lost), -np.expm1(-e) + math.exp(-e) * high, rtol=1e-10
            )


def test_one_data_set_alone_does_not_dominate():
    """The half that must fail: all others at one end is not the worst near epsilon 0, nor in the
    other direction."""
    law, z = binomial(4, 2), 5.0
    assert worst(0.01, law, z) > one_end(0.01, law, z) * 1.002
    copies = np.arange(5.0)
    back = lambda e: mixtures(e, law, z, 0 * copies, -copies)
    assert back(1.0) < 0.5 * one_end(1.0, law, z)


@pytest.mark.slow
def test_rows_in_a_plane_lose_no_more():
    """The proof holds in any dimension: contributions anywhere in a disc, on a grid of points."""
    rng, (draws, population, z) = np.random.default_rng(3), (3, 4, 1.0)
    law, side = binomial(draws, population), np.linspace(-11, 11, 221)
    x, y = np.meshgrid(side, side)
    cell = (side[1] - side[0]) ** 2 / (2 * math.pi * z**2)
    normal = lambda m: np.exp(-((x - m[0]) ** 2 + (y - m[1]) ** 2) / (2 * z**2)) * cell
    end = lambda v: np.asarray(v) / (2 * np.linalg.norm(v, axis=-1, keepdims=True))
    most = {e: worst(e, law, z) for e in (0.0, 0.3, 1.0)}
    nearest = 0.0
    for trial in range(30):
        row, other, *rest = rng.normal(size=(draws + 2, 2))
        rest = rest if trial % 2 else -row + 0.2 * np.array(rest)  # anywhere, or near the other end
        other = -row if trial % 3 else other
        means = (np.vstack([[0, 0], np.cumsum(end(r) - end(rest), 0)]) for r in (row, other))
        p, q = (sum(w * normal(m) for w, m in zip(law, of)) for of in means)
        for e, limit in most.items():
            for a, b in ((p, q), (q, p)):
                nearest = max(nearest, np.maximum(a - math.exp(e) * b, 0).sum() / limit)
    assert 0.9 < nearest <= 1 + 1e-6


ONE_RELEASE = [  # draws, population, z, delta, and epsilon to 40 digits, by bisection
    (4, 8, 1.0, 1e-5, 8.9211054319),
    (3, 50, 0.7, 1e-5, 4.3711228292),
    (4, 2, 5.0, 0.1, 0.16196644295),
    (7, 300, 4.0, 1e-7, 0.038602992207),
]


@pytest.mark.parametrize("draws, population, z, delta, want", ONE_RELEASE)
def test_epsilon_of_one_release(draws, population, z, delta, want):
    event = drawn(draws, population, z)
    got = proved(event, delta)
    assert want <= got <= want * (1 + 1e-4) + 1e-5
    release = tightest.Release((event,))
    assert tightest.tightest(release, delta, sizes=pld.SIZES[:1]) == (got, "pld")
    assert got < 0.9 * rdp_events.epsilon(event, delta)[0]


@pytest.mark.slow
@pytest.mark.parametrize("draws, population, z, delta, want", ONE_RELEASE)
def test_the_width_of_one_release_holds_its_epsilon(draws, population, z, delta, want):
    got, width = pld.epsilon(drawn(draws, population, z), delta)
    assert got - width <= want <= got
    assert tightest.epsilon(drawn(draws, population, z), delta) == (got, "pld")


# --- what must hold


@pytest.mark.by_default("2-2-10.0-50-0.0001")
@pytest.mark.parametrize(
    "draws, population, z, times, delta",
    [(4, 8, 1.0, 3, 1e-5), (2, 2, 10.0, 50, 1e-4), (7, 700, 1.0, 1000, 1e-5)],
)
def test_between_what_is_attained_and_renyi_and_monotone(draws, population, z, times, delta):
    event, law = drawn(draws, population, z, times), binomial(draws, population)
    got = proved(event, delta)
    assert got <= rdp_events.epsilon(event, delta)[0] * (1 + 1e-3) + 1e-4
    if one_end(0.0, law, z) > delta:
        assert got >= optimize.brentq(lambda e: one_end(e, law, z) - delta, 0, 100)
    for worse in (
        drawn(draws + 1, population, z, times),
        drawn(draws, max(1, population / 1.2), z, times),
        drawn(draws, population, z / 1.2, times),
        drawn(draws, population, z, math.ceil(1.2 * times)),
    ):
        assert proved(worse, delta) >= got * (1 - 1e-3) - 1e-4


@pytest.mark.slow
def test_ends_are_known_ones():
    """One draw is a sample without replacement; a population of one is a Gaussian."""
    one = pld.epsilon(drawn(1, 20, 1.5, 40), 1e-6)
    assert one == pld.epsilon(fixed(1 / 20, 1.5, 40), 1e-6)
    exact = lambda times: tightest.epsilon(events.repeat(events.gaussian(2.0), times), 1e-5)[0]
    assert tightest.epsilon(drawn(3, 1, 6.0, 40), 1e-5)[0] == pytest.approx(exact(40), rel=1e-3)
    # hardly ever another element: all copies count, not one
    assert pld.epsilon(drawn(3, 1 + 1e-4, 6.0), 1e-5)[0] > 0.99 * exact(1)


@pytest.mark.parametrize(
    "draws, population, z",
    [(4, 1 + 1e-6, 1.0), (7, 7e8, 0.05), (7, 3, 1e3)],
)
def test_extreme_laws_keep_their_mass(draws, population, z):
    law = binomial(draws, population)
    e = min(0.5 / z**2, 300.0)
    for interval in (1e-4, 0.02, 3.0, e / 50):
        at, (mass, lost), (low, offset) = on_a_grid(law, z, interval, -300, 1000)
        assert np.isfinite(mass).all() and (mass >= 0).all() and abs(mass.sum() + lost - 1) < 1e-11
        assert (low >= 0).all() and low.sum() <= 1 + 1e-12 and np.isfinite(offset).all()
    high = above(e, at, mass, lost)
    assert high >= one_end(e, law, z) * (1 - 1e-8) - 1e-13
    assert above(e, at + offset, low) <= high * (1 + 1e-8)


def test_rare_repeats_are_paid_from_delta(monkeypatch):
    """A law without what hardly happens is no smaller than the whole law, and hardly larger."""
    event, delta = drawn(7, 70, 2.0, 20), 1e-5
    cut = proved(event, delta)
    counted, rare = rdp_events.with_multiplicities(event, pld.TAIL_DELTA_FRACTION * delta)
    assert 0 < rare <= pld.TAIL_DELTA_FRACTION * delta and counted.event.most < 7
    monkeypatch.setattr(pld, "TAIL_DELTA_FRACTION", 0.0)
    assert pld._group_parts(event, 0.0)[1:] == ("replace_one", 0)
    whole = proved(event, delta)
    assert whole * (1 - 1e-5) <= cut <= whole * (1 + 1e-3)


@pytest.mark.slow
def test_composes_with_the_rest():
    delta, one = 1e-5, events.with_replacement(4, 40, events.gaussian(1.5))
    alone = pld.epsilon(events.repeat(one, 12), delta)[0]
    noise = events.gaussian(np.array([1.5, 2.0]))
    shared = events.with_replacement(4, 40, events.repeat(events.gaussian(3.0), 4))
    for same in (
        events.compose(events.repeat(one, 6), events.repeat(one, 6)),
        events.series(events.with_replacement(4, 40, noise), np.array([12, 0])),
        events.repeat(shared, 12),  # four releases of one sample are a Gaussian of half the noise
    ):
        np.testing.assert_allclose(tightest.epsilon(same, delta)[0], alone, rtol=1e-9)
    mixed = events.compose(events.repeat(one, 12), fixed(0.1, 1.5, 5), events.gaussian(8.0))
    assert alone < tightest.epsilon(mixed, delta)[0] <= rdp_events.epsilon(mixed, delta)[0]
    absent = events.repeat(events.participation(0.3, events.repeat(one, 3)), 4)
    found, method = tightest.epsilon(absent, delta)
    assert method == "pld" and found < alone
    assert 0.98 * delta < tightest.delta(events.repeat(one, 12), alone) <= delta * 1.005


def test_too_many_copies_are_left_to_renyi():
    event = drawn(400, 2, 300.0)
    with pytest.raises(ValueError, match="128 times"):
        pld.epsilon(event, 1e-5)
    assert tightest._distribution_epsilon(event, 1e-5, pld.SIZES)[0] == math.inf
