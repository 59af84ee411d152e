"""Draws with replacement: the pair that dominates them, against the mixtures of data sets and
independent numbers."""

import functools
import math

import numpy as np
import pytest
from helpers.problems import make_federation, squared, start_params
from scipy import optimize, special, stats

import jfl
from jfl import sampling
from jfl.privacy.accountants import (
    events,
    pairs,
    pld,
    pld_step,
    rdp,
    rdp_events,
    tightest,
)

pytestmark = pytest.mark.usefixtures("endless_noise")

tail = stats.norm.sf
CASES = [(4, 8, 1.0), (4, 2, 5.0), (3, 40, 0.3), (2, 1.05, 0.8)]


def drawn(draws, population, z, times=1):
    return events.repeat(events.with_replacement(draws, population, events.gaussian(z)), times)


def fixed(rate, z, times=1):
    return events.repeat(
        events.without_replacement(round(rate * 10**6), 10**6, events.gaussian(z)), times
    )


def binomial(draws, population):
    return stats.binom.pmf(np.arange(draws + 1), draws, 1 / population)


def mixtures(epsilon, law, z, first, second):
    """The hockey-stick divergence of two mixtures of Gaussians on a line, around means that only
    grow apart."""
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
    """All other rows at one end, the changed one at either: what one data set attains."""
    copies = np.arange(len(law))
    return mixtures(epsilon, law, z, copies, 0.0 * copies)


def worst(epsilon, law, z):
    """The worst that a search finds among the rows that the changed one may stand in for, draw by
    draw."""
    most = len(law) - 1

    def lost(shifts):
        means = np.append(0.0, np.cumsum(shifts))
        return -math.log(max(mixtures(epsilon, law, z, means, means - np.arange(most + 1)), 1e-300))

    starts = np.ones(most), np.full(most, 0.5)  # one end for all, and the middle
    return max(math.exp(-optimize.minimize(lost, s, bounds=[(0, 1)] * most).fun) for s in starts)


@functools.cache
def program(function, *fixed):
    return rdp.float64(
        functools.partial(function, *fixed), compiler_options=pld._compiler_options()
    )


def on_a_grid(law, z, interval, start, size):
    """Losses; their masses, pessimistic and what is lost; and optimistic with offsets."""
    law = np.append(law, np.zeros(-len(law) % 8)) if np.ndim(law) else law
    both = [
        tuple(map(np.asarray, program(build, "replace", size)(law, z, interval, start)))
        for build in (pessimistic, optimistic)
    ]
    return interval * (start + np.arange(size)), *both


def pessimistic(direction, size, law, z, interval, start):
    return pld_step.pessimistic(direction, law, z, interval, start, size)


def optimistic(direction, size, law, z, interval, start):
    return pld_step.optimistic(direction, law, z, interval, start, size)


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
    """The proof holds in any dimension: contributions anywhere in a disc, by a sum over a grid of
    points."""
    rng, (draws, population, z) = np.random.default_rng(3), (3, 4, 1.0)
    law, side = binomial(draws, population), np.linspace(-11, 11, 221)
    x, y = np.meshgrid(side, side)
    normal = lambda mean: (
        np.exp(-((x - mean[0]) ** 2 + (y - mean[1]) ** 2) / (2 * z**2))
        * (side[1] - side[0]) ** 2
        / (2 * math.pi * z**2)
    )
    most = {e: worst(e, law, z) for e in (0.0, 0.3, 1.0)}
    nearest = 0.0
    for trial in range(30):
        row, other, *rest = rng.normal(size=(draws + 2, 2))
        rest = rest if trial % 2 else -row + 0.2 * np.array(rest)  # anywhere, or near the other end
        end = lambda v: np.asarray(v) / (2 * np.linalg.norm(v, axis=-1, keepdims=True))
        other = -row if trial % 3 else other
        p, q = (
            sum(
                w * normal(m)
                for w, m in zip(law, np.vstack([[0, 0], np.cumsum(end(r) - end(rest), axis=0)]))
            )
            for r in (row, other)
        )
        for e, limit in most.items():
            for a, b in ((p, q), (q, p)):
                nearest = max(nearest, np.maximum(a - math.exp(e) * b, 0).sum() / limit)
    assert 0.9 < nearest <= 1 + 1e-6


@pytest.mark.by_default("3-50-0.7-1e-05-4.3711228292")
@pytest.mark.parametrize(
    "draws, population, z, delta, want",
    [  # 40 digits, by bisection
        (4, 8, 1.0, 1e-2, 2.3038770292),
        (4, 8, 1.0, 1e-5, 8.9211054319),
        (5, 10, 2.0, 1e-5, 2.2846477676),
        (3, 50, 0.7, 1e-5, 4.3711228292),
        (4, 4, 1.5, 0.2, 0.16808051854),
        (4, 2, 5.0, 0.1, 0.16196644295),
        (7, 300, 4.0, 1e-7, 0.038602992207),
    ],
)
def test_epsilon_of_one_release(draws, population, z, delta, want):
    got, width = pld.epsilon(drawn(draws, population, z), delta)
    assert want <= got <= want * (1 + 1e-4) + 1e-5 and got - width <= want
    assert tightest.epsilon(drawn(draws, population, z), delta) == (got, "pld")
    assert got < 0.9 * rdp_events.epsilon(drawn(draws, population, z), delta)[0]


# --- several releases


def tails(law, z, points):
    """Losses >= 0 at points t, and the probabilities that P and Q give to more: one number of last
    copies at a time."""
    copies = np.arange(1, len(law))
    t = (0.5 + np.linspace(0, 1, points) ** 2 * (len(law) + 12 * z))[:, None] / z
    ratios = np.append(np.zeros_like(t), copies / z * t - copies**2 / (2 * z**2), axis=1)
    each = np.log(np.cumsum(law * np.exp(ratios), axis=1)[:, 1:] / np.cumsum(law)[1:])
    last, loss = 1 + np.argmax(each, axis=1)[:, None], np.max(each, axis=1)
    own = np.where(copies <= last, t, loss[:, None] * z / copies + copies / (2 * z))
    return loss, *(
        law[0] * tail(t[:, 0]) + tail(own - moved) @ law[1:] for moved in (copies / z, 0)
    )


@pytest.mark.slow
@pytest.mark.parametrize("draws, population, z, epsilon", [(4, 8, 1.0, 3.0), (3, 12, 2.0, 0.4)])
def test_two_releases_by_direct_convolution(draws, population, z, epsilon):
    """delta of two releases = E[profile(epsilon - loss of the first)]: no grid of the module, no
    FFT."""
    law = binomial(draws, population)
    at, p, q = tails(law, z, 10_001)
    assert abs(at[0]) < 1e-12 and (np.diff(at) > 0).all() and p[-1] < 1e-12
    one = lambda e: np.interp(e, at, p - np.exp(at) * q, right=0.0)
    profile = lambda e: np.where(
        e >= 0, one(np.abs(e)), -np.expm1(-np.abs(e)) + np.exp(-np.abs(e)) * one(np.abs(e))
    )
    ends = np.concatenate([-at[:0:-1], at])
    cells = np.concatenate(
        [-np.diff(q)[::-1], -np.diff(p)]
    )  # losses above 0, and their mirror image below
    even = (1 - p[0] - q[0]) * profile(np.array(epsilon))
    low, high = (np.sum(cells * profile(epsilon - e)) + even for e in (ends[:-1], ends[1:]))
    got = pld.deltas(drawn(draws, population, z, 2), np.array([epsilon]))[0]
    assert high < 1.01 * low and low * (1 - 1e-6) <= got <= high * (1 + 1e-3)


# --- what must hold


@pytest.mark.by_default("2-2-10.0-50-0.0001")
@pytest.mark.parametrize(
    "draws, population, z, times, delta",
    [
        (4, 8, 1.0, 3, 1e-5),
        (3, 50, 0.7, 20, 1e-6),
        (5, 10, 4.0, 200, 1e-5),
        (2, 2, 10.0, 50, 1e-4),
        (7, 700, 1.0, 1000, 1e-5),
        (1, 9, 1.5, 10, 1e-5),
    ],
)
def test_between_what_is_attained_and_renyi_and_monotone(draws, population, z, times, delta):
    got, width = pld.epsilon(drawn(draws, population, z, times), delta)
    assert (
        got <= rdp_events.epsilon(drawn(draws, population, z, times), delta)[0] * (1 + 1e-3) + 1e-4
    )
    single = (
        optimize.brentq(lambda e: one_end(e, binomial(draws, population), z) - delta, 0, 100)
        if one_end(0.0, binomial(draws, population), z) > delta
        else 0.0
    )
    assert got >= single
    for worse in (
        drawn(draws + 1, population, z, times),
        drawn(draws, max(1, population / 1.2), z, times),
        drawn(draws, population, z / 1.2, times),
        drawn(draws, population, z, math.ceil(1.2 * times)),
    ):
        assert pld.epsilon(worse, delta)[0] >= got - width


@pytest.mark.slow
def test_ends_are_known_ones():
    for times, delta in ((1, 1e-5), (40, 1e-6)):
        assert pld.epsilon(drawn(1, 20, 1.5, times), delta) == pld.epsilon(
            fixed(1 / 20, 1.5, times), delta
        )
        whole = tightest.epsilon(drawn(3, 1, 6.0, times), delta)[0]
        np.testing.assert_allclose(
            whole, tightest.epsilon(events.repeat(events.gaussian(2.0), times), delta)[0], rtol=1e-3
        )
    # hardly ever another element: all copies count, not one
    assert (
        pld.epsilon(drawn(3, 1 + 1e-4, 6.0), 1e-5)[0]
        > 0.99 * tightest.epsilon(events.gaussian(2.0), 1e-5)[0]
    )
    # as a law of copies too
    for one, two in zip(
        on_a_grid(np.array([0.95, 0.05]), 1.5, 0.01, -200, 1000)[1],
        on_a_grid(0.05, 1.5, 0.01, -200, 1000)[1],
    ):
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize(
    "draws, population, z",
    [(4, 1 + 1e-6, 1.0), (7, 7e8, 0.05), (7, 5, 0.02), (7, 3, 1e3), (7, 1e3, 40.0)],
)
def test_extreme_laws_keep_their_mass(draws, population, z):
    law = binomial(draws, population)
    loss, log_mass = map(
        np.asarray, program(pairs.rough_of_repeated)(np.append(law, np.zeros(-len(law) % 8)), z)
    )
    assert (np.diff(loss) >= 0).all() and not np.isnan(log_mass).any()
    e = min(0.5 / z**2, 300.0)
    for interval in (1e-4, 0.02, 3.0, e / 50):
        at, (mass, lost), (low, offset) = on_a_grid(law, z, interval, -300, 1000)
        assert np.isfinite(mass).all() and (mass >= 0).all() and abs(mass.sum() + lost - 1) < 1e-11
        assert (low >= 0).all() and low.sum() <= 1 + 1e-12 and np.isfinite(offset).all()
    assert above(e, at, mass, lost) >= one_end(e, law, z) * (1 - 1e-8) - 1e-13


def test_rare_repeats_are_paid_from_delta(monkeypatch):
    """A law without what hardly happens is no smaller than the whole law, and hardly larger."""
    event, delta = drawn(7, 70, 2.0, 20), 1e-5
    cut = pld.epsilon(event, delta)[0]
    counted, rare = rdp_events.with_multiplicities(event, pld.TAIL_DELTA_FRACTION * delta)
    assert 0 < rare <= pld.TAIL_DELTA_FRACTION * delta and counted.event.most < 7
    monkeypatch.setattr(pld, "TAIL_DELTA_FRACTION", 0.0)
    assert pld._group_parts(event, 0.0)[1:] == ("replace_one", 0)
    whole = pld.epsilon(event, delta)[0]
    assert whole * (1 - 1e-5) <= cut <= whole * (1 + 1e-3)


@pytest.mark.slow
def test_composes_with_the_rest():
    delta, one = 1e-5, events.with_replacement(4, 40, events.gaussian(1.5))
    alone = pld.epsilon(events.repeat(one, 12), delta)[0]
    parts = events.compose(events.repeat(one, 6), events.repeat(one, 6))
    np.testing.assert_allclose(pld.epsilon(parts, delta)[0], alone, rtol=1e-9)
    mixed = events.compose(events.repeat(one, 12), fixed(0.1, 1.5, 5), events.gaussian(8.0))
    assert alone < tightest.epsilon(mixed, delta)[0] <= rdp_events.epsilon(mixed, delta)[0]
    absent = events.repeat(events.participation(0.3, events.repeat(one, 3)), 4)
    found, method = tightest.epsilon(absent, delta)
    assert method == "pld" and found < alone
    levels = events.series(
        events.with_replacement(4, 40, events.gaussian(np.array([1.5, 2.0]))), np.array([12, 0])
    )
    np.testing.assert_allclose(tightest.epsilon(levels, delta)[0], alone, rtol=1e-9)
    shared = events.with_replacement(
        4, 40, events.repeat(events.gaussian(3.0), 4)
    )  # a Gaussian of 1.5
    np.testing.assert_allclose(pld.epsilon(events.repeat(shared, 12), delta)[0], alone, rtol=1e-9)
    assert 0.98 * delta < tightest.delta(events.repeat(one, 12), alone) <= delta * 1.005
    with pytest.raises(ValueError, match="one adjacency"):
        pld.epsilon(events.compose(one, events.poisson(0.1, events.gaussian(1.0))), delta)


def test_too_many_copies_are_left_to_renyi():
    event = drawn(400, 2, 300.0)
    with pytest.raises(ValueError, match="128 times"):
        pld.epsilon(event, 1e-5)
    assert tightest._distribution_epsilon(event, 1e-5, pld.SIZES)[0] == math.inf


def test_plans_take_it():
    """Rows and clients drawn with replacement."""
    task, noise = (
        jfl.task(start_params(), squared),
        lambda z: jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(z)),
    )
    full = make_federation(sizes=(40,) * 6)
    rows = jfl.algorithms.fedavg(
        jfl.private_grad(squared, noise(1.0)), steps=2, batch=jfl.batches.with_replacement(4)
    )
    plan = jfl.plan(full, task, rows, sampling.full(6))
    found = jfl.guarantee(plan, 5)
    assert (
        found.method == "pld" and found.epsilon == tightest.epsilon(drawn(4, 40, 1.0, 10), 1e-5)[0]
    )
    release = lambda z: jfl.plan(
        full,
        task,
        jfl.algorithms.fedavg(jfl.grad(squared)),
        sampling.with_replacement(6, 3),
        release=noise(z),
    )
    found = jfl.guarantee(release(2.0), 2, view="third_party")
    assert found.method == "pld" and found.epsilon == tightest.epsilon(drawn(3, 6, 2.0, 2), 1e-5)[0]
