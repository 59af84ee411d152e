"""Random allocation: once in an epoch, in a round that nobody sees."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from helpers.problems import make_federation, squared, start_params

import jfl
from jfl.core.errors import NotAnalysable
from jfl.privacy.accountants import events, rdp, rdp_events, tightest
from jfl.privacy.ledger.facts import attendance

C, DELTA = 12, 1e-5
FED = make_federation(sizes=(3,) * C)


def plan(sampler, z=2.0, adjacency=None, noise=None):
    algorithm = jfl.algorithms.fedavg(jfl.grad(squared), lr=0.1, steps=1, batch=jfl.batches.full())
    noise = jfl.chain(jfl.clip_l2(1.0), jfl.total(), noise or jfl.gaussian(z), jfl.divide(4))
    task = jfl.task(start_params(), squared)
    return jfl.plan(FED, task, algorithm, sampler, release=noise, adjacency=adjacency)


# --- the curve


@pytest.mark.by_default("2-1.0-801")
@pytest.mark.parametrize("slots, z, points", [(2, 1.0, 801), (3, 0.7, 241), (2, 0.4, 1201)])
def test_the_curve_is_the_integral(slots, z, points):
    """Over a grid of all outcomes, in both directions."""
    x = np.linspace(-12 * z, 12 * z + 1 / min(z, 1), points)
    weight = np.exp(-np.square(x / z) / 2) / (z * np.sqrt(2 * np.pi)) * (x[1] - x[0])
    ratio = np.exp((x - 0.5) / z**2)
    grid = np.ix_(*[np.arange(points)] * slots)
    mean = sum(ratio[g] for g in grid) / slots
    mass = np.prod(np.broadcast_arrays(*[weight[g] for g in grid]), axis=0)
    for order in (2, 3, 5):
        present = np.log((mass * mean**order).sum())
        absent = np.log((mass * mean ** -(order - 1.0)).sum())
        assert rdp._present_moments(slots, z)[order - 1] == pytest.approx(present, rel=1e-8)
        assert rdp._absent_moments(slots, z)[order - 1] == pytest.approx(absent, rel=1e-8)
        found = rdp.allocation(np.array([order]), slots, z)[0]
        assert found == pytest.approx(max(present, absent) / (order - 1), rel=1e-7)


def test_between_whole_orders_it_is_above():
    """By drawing: E[M^a] at an order that is not whole, and from both sides."""
    orders = np.array([1.5, 2.5])
    y = 2.0 * np.random.default_rng(0).normal(size=(400_000, 5))
    mean = np.exp((y - 0.5) / 4).mean(1)
    for order, bound in zip(orders, rdp.allocation(orders, 5, 2.0)):
        assert np.log((mean**order).mean()) / (order - 1) <= bound * 1.02
        assert np.log((mean ** (1 - order)).mean()) / (order - 1) <= bound * 1.02


def test_it_gains_what_poisson_sampling_gains():
    one = events.allocation(100, events.gaussian(1.0))
    found = tightest.epsilon(events.repeat(one, 10), DELTA)
    poisson = rdp_events.epsilon(
        events.repeat(events.poisson(0.01, events.gaussian(1.0)), 1000), DELTA
    )[0]
    seen = tightest.epsilon(events.repeat(events.gaussian(1.0), 10), DELTA)[0]
    assert 0.8 * poisson < found[0] < poisson < seen / 5 and found[1] == "rdp"


def test_ends_of_its_range_are_seen():
    orders = np.array([2.0, 1e4])
    np.testing.assert_allclose(rdp.allocation(orders, 1, 2.0), orders / 8)
    np.testing.assert_allclose(rdp.allocation(orders, 100, 0.1), orders / 0.02)
    assert rdp.allocation(orders, 100, 2.0)[1] == 1e4 / 8


def test_a_curve_of_many_noises_is_that_of_each():
    orders = np.array([1.5, 4.0, 30.0])
    many = events.series(events.allocation(7, events.gaussian(np.array([1.3, 2.0]))), [2.0, 1.0])
    each = 2 * rdp.allocation(orders, 7, 1.3) + rdp.allocation(orders, 7, 2.0)
    np.testing.assert_allclose(rdp_events.curve(many, orders), each, rtol=1e-12)


# --- samplers


def cohorts(sampler, key, rounds):
    out = np.zeros((rounds, sampler.clients), bool)
    for r in range(rounds):
        ids = np.asarray(sampler.draw(key, r).ids)
        out[r, ids[ids < sampler.clients]] = True
    return out


def test_each_client_comes_once_in_an_epoch():
    sampler = jfl.sampling.random_allocation(30, 5, capacity=30)
    seen = cohorts(sampler, jax.random.key(0), 15).reshape(3, 5, 30)
    assert (seen.sum(1) == 1).all()
    assert not (seen[0] == seen[1]).all()  # anew in each epoch
    bins = cohorts(jfl.sampling.balls_in_bins(30, 5, capacity=30), jax.random.key(0), 15)
    bins = bins.reshape(3, 5, 30)
    assert (bins.sum(1) == 1).all() and (bins[0] == bins[1]).all() and (bins[0] == bins[2]).all()


@pytest.mark.parametrize("make", [jfl.sampling.random_allocation, jfl.sampling.balls_in_bins])
def test_rounds_are_uniform_and_clients_independent(make):
    """Chi-square of the rounds of two clients together, 9 cells, 6,000 seeds; a false alarm in
    1e6.  Clients that always came together would be seen."""
    from scipy import stats

    sampler = make(3, 3, capacity=3)

    def round_of(key):
        ids = jax.vmap(lambda r: sampler.draw(key, r).ids)(np.arange(3))
        return jax.vmap(lambda c: (ids == c).any(1).argmax())(np.arange(3))

    where = np.asarray(jax.jit(jax.vmap(round_of))(jax.random.split(jax.random.key(1), 6000)))

    def chance(first, second):
        counts = np.bincount(3 * first + second, minlength=9)
        return stats.chi2.sf(((counts - 6000 / 9) ** 2 / (6000 / 9)).sum(), 8)

    assert chance(where[:, 0], where[:, 1]) > 1e-6
    assert chance(where[:, 0], where[:, 0]) < 1e-6


def test_an_overflow_is_charged():
    few = jfl.sampling.random_allocation(C, 3, capacity=4)
    assert attendance(few).overflow == pytest.approx(0.368, abs=0.001)  # P(Bin(12, 1/3) > 4)
    bins = jfl.sampling.balls_in_bins(C, 3, capacity=4)
    assert attendance(bins).overflow == attendance(few).overflow
    assert jfl.sampling.random_allocation(10_000, 100).capacity < 250


# --- plans


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
@pytest.mark.parametrize("rounds, epochs", [(3, 1), (4, 1), (9, 3)])
def test_a_run_is_its_epochs(adjacency, rounds, epochs):
    one = plan(jfl.sampling.random_allocation(C, 4, capacity=C), adjacency=adjacency)
    found = jfl.guarantee(one, rounds, DELTA)
    event = events.repeat(events.allocation(4, events.gaussian(2.0)), epochs)
    assert found.epsilon == pytest.approx(tightest.epsilon(event, DELTA)[0], rel=1e-6)
    assert found.status == "proved" and found.adjacency == adjacency
    assert found.view == "third_party"
    assert jfl.epsilons(one, [rounds], DELTA)[0] == pytest.approx(found.epsilon, rel=1e-6)


def test_bins_that_stay_are_one_release():
    one = plan(jfl.sampling.balls_in_bins(C, 4, capacity=C))
    found = jfl.guarantee(one, 8, DELTA)
    event = events.allocation(4, events.gaussian(2.0 / 2**0.5))
    assert found.epsilon == pytest.approx(tightest.epsilon(event, DELTA)[0], rel=1e-6)


@pytest.mark.parametrize("kind", ["random_allocation", "balls_in_bins"])
def test_without_a_secret_there_is_no_gain(kind):
    sampler = getattr(jfl.sampling, kind)(C, 4, capacity=C)
    seen = tightest.epsilon(events.repeat(events.gaussian(2.0), 3), DELTA)[0]
    replaced = jfl.guarantee(plan(sampler, adjacency="replace_one"), 12, DELTA)
    assert replaced.epsilon == pytest.approx(seen, rel=1e-6)


def test_noise_that_changes_counts_every_round():
    sampler = jfl.sampling.random_allocation(C, 4, capacity=C)
    falling = plan(sampler, noise=jfl.gaussian(jfl.schedules.inverse_sqrt(2.0)))
    steady = plan(sampler)
    assert jfl.guarantee(falling, 4, DELTA).epsilon > jfl.guarantee(steady, 4, DELTA).epsilon


def test_correlated_noise_has_no_gain_and_keeps_apart():
    made = jfl.strategies.banded_toeplitz(12, 4, participations=3, separation=4)
    noise = jfl.correlated(4.0, made)
    found = jfl.guarantee(plan(jfl.sampling.balls_in_bins(C, 4, capacity=C), noise=noise), 12)
    expected = tightest.epsilon(events.gaussian(4.0 / made.sensitivity(3, 4, epochs=True)), 1e-5)
    assert found.epsilon == pytest.approx(expected[0], rel=1e-6)
    allocated = plan(jfl.sampling.random_allocation(C, 4, capacity=C), noise=noise)
    with pytest.raises(NotAnalysable, match="stay away for 4 rounds"):
        jfl.guarantee(allocated, 12)
    any_round = jfl.correlated(4.0, jfl.strategies.tree(12))
    loose = jfl.guarantee(
        plan(jfl.sampling.random_allocation(C, 4, capacity=C), noise=any_round), 12
    )
    assert loose.epsilon > found.epsilon


def test_a_part_of_an_epoch_is_refused():
    one = plan(jfl.sampling.random_allocation(C, 4, capacity=C))
    whole = jfl.guarantee(one, 12, DELTA).epsilon
    assert jfl.guarantee([(one, 8), (one, 4)], delta=DELTA).epsilon == pytest.approx(
        whole, rel=1e-6
    )
    with pytest.raises(NotAnalysable, match="a multiple of 4"):
        jfl.guarantee([(one, 6), (one, 6)], delta=DELTA)
    bins = plan(jfl.sampling.balls_in_bins(C, 4, capacity=C))
    with pytest.raises(NotAnalysable, match="from its round 0"):
        jfl.guarantee([(bins, 8), (bins, 4)], delta=DELTA)


def test_no_data_are_worse_than_the_bound():
    """Two rounds, three clients of +-1, one that comes or not: Renyi divergences of the releases,
    on a grid of both, are at most the curve."""
    z, order, x = 1.0, 3.0, np.linspace(-9, 9, 401)
    step = x[1] - x[0]
    normal = lambda m: np.exp(-np.square(x - m) / 2) / np.sqrt(2 * np.pi) * step
    others = {}  # the law of what the others add to both rounds
    for places in itertools.product((0, 1), repeat=2):
        sums = np.bincount(places, weights=(-1.0, 1.0), minlength=2)
        others[tuple(sums)] = others.get(tuple(sums), 0) + 0.25
    absent = sum(w * np.outer(normal(a), normal(b)) for (a, b), w in others.items())
    present = sum(
        w / 2 * (np.outer(normal(a + 1), normal(b)) + np.outer(normal(a), normal(b + 1)))
        for (a, b), w in others.items()
    )
    bound = rdp.allocation(np.array([order]), 2, z)[0]
    for p, q in ((present, absent), (absent, present)):
        assert np.log((p**order * q ** (1 - order)).sum()) / (order - 1) <= bound
    alone = np.outer(normal(0), normal(0))  # without the others it is attained
    there = (np.outer(normal(1), normal(0)) + np.outer(normal(0), normal(1))) / 2
    exact = np.log((there**order * alone ** (1 - order)).sum()) / (order - 1)
    assert exact == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: jfl.sampling.random_allocation(10, 1), "1 is sampling.full"),
        (lambda: jfl.sampling.random_allocation(10, 11), "epoch <= 10, but got epoch=11"),
        (lambda: jfl.sampling.balls_in_bins(10, 2, capacity=11), "capacity <= 10"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler",
    [
        jfl.sampling.random_allocation(C, 4, capacity=C),
        jfl.sampling.balls_in_bins(C, 4, capacity=C),
        jfl.sampling.truncated_poisson(C, 0.5, 5),
    ],
    ids=lambda s: s.scheme,
)
def test_runs_that_go_on_and_runs_in_chunks_are_the_same(sampler):
    key, one = jax.random.key(3), plan(sampler)
    whole = jax.tree.leaves(jfl.simulate(key, one, 6).params)
    begun = jfl.simulate(key, one, 3)
    rest = jax.tree.leaves(jfl.simulate(key, one, 3, start=begun.run).params)
    chunks = jax.tree.leaves(jfl.simulate(key, dataclasses.replace(one, chunk=2), 6).params)
    for a, b, c in zip(whole, rest, chunks):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, atol=1e-6)
