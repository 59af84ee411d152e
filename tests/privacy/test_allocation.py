"""Random allocation: once in an epoch, in a round that nobody sees."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.problems import make_federation, squared, start_params
from scipy import stats

import jfl
from jfl.core.errors import NotAnalysable
from jfl.core.pytrees import in_float64
from jfl.privacy.accountants import allocation, events, pld, pld_step, rdp, rdp_events, tightest
from jfl.privacy.ledger.facts import attendance

C, DELTA = 12, 1e-5
FED = make_federation(sizes=(3,) * C)
ALLOCATED = jfl.sampling.random_allocation(C, 4, capacity=C)
BINS = jfl.sampling.balls_in_bins(C, 4, capacity=C)


def plan(sampler, adjacency=None, noise=None):
    algorithm = jfl.algorithms.fedavg(jfl.grad(squared), lr=0.1, steps=1, batch=jfl.batches.full())
    noise = noise or jfl.gaussian(2.0)
    release = jfl.chain(jfl.clip_l2(1.0), jfl.total(), noise, jfl.divide(4))
    task = jfl.task(start_params(), squared)
    return jfl.plan(FED, task, algorithm, sampler, release=release, adjacency=adjacency)


def epsilon(event, times=1):
    return tightest.epsilon(events.repeat(event, times), DELTA)[0]


# --- the curve


@pytest.mark.parametrize("slots, z, points", [(2, 1.0, 401), (3, 0.7, 101)])
def test_the_curve_is_the_integral(slots, z, points):
    """Over a grid of all outcomes, in both directions; between whole orders it lies above."""
    x = np.linspace(-12 * z, 12 * z + 1 / min(z, 1), points)
    weight = stats.norm.pdf(x / z) / z * (x[1] - x[0])
    ratio = np.exp((x - 0.5) / z**2)
    grid = np.ix_(*[np.arange(points)] * slots)
    mean = sum(ratio[g] for g in grid) / slots
    mass = np.prod(np.broadcast_arrays(*[weight[g] for g in grid]), axis=0)
    present = lambda order: np.log((mass * mean**order).sum())
    absent = lambda order: np.log((mass * mean ** (1 - order)).sum())
    for order in (2, 3, 5):
        assert rdp._present_moments(slots, z)[order - 1] == pytest.approx(present(order), rel=1e-8)
        assert rdp._absent_moments(slots, z)[order - 1] == pytest.approx(absent(order), rel=1e-8)
    orders = np.array([1.5, 2, 2.5, 3, 5])
    larger = np.array([max(present(a), absent(a)) for a in orders]) / (orders - 1)
    found = rdp.allocation(orders, slots, z)
    assert (found >= larger * (1 - 1e-9)).all()
    np.testing.assert_allclose(found[[1, 3, 4]], larger[[1, 3, 4]], rtol=1e-7)


def test_it_gains_what_poisson_sampling_gains_and_nothing_at_its_ends():
    orders = np.array([2.0, 1e4])
    np.testing.assert_allclose(rdp.allocation(orders, 1, 2.0), orders / 8)
    np.testing.assert_allclose(rdp.allocation(orders, 100, 0.1), orders / 0.02)
    assert rdp.allocation(orders, 100, 2.0)[1] == 1e4 / 8
    sampled = events.repeat(events.poisson(0.01, events.gaussian(1.0)), 1000)
    epochs = events.repeat(events.allocation(100, events.gaussian(1.0)), 10)
    poisson, allocated = (rdp_events.epsilon(e, DELTA)[0] for e in (sampled, epochs))
    assert 0.8 * poisson < allocated < poisson < epsilon(events.gaussian(1.0), 10) / 5


def test_no_data_are_worse_than_the_bound():
    """Two rounds, three clients of +-1, one that comes or not: Renyi divergences of the releases,
    on a grid of both, are at most the curve, which is attained without the others."""
    order, x = 3.0, np.linspace(-9, 9, 401)
    normal = lambda m: stats.norm.pdf(x - m) * (x[1] - x[0])
    both = lambda a, b: np.outer(normal(a), normal(b))
    one = lambda a, b: (both(a + 1, b) + both(a, b + 1)) / 2
    divergence = lambda p, q: np.log((p**order * q ** (1 - order)).sum()) / (order - 1)
    # the sums of clients of -1 and of 1, each in one of both rounds
    others = [(0, 0), (-1, 1), (1, -1), (0, 0)]
    present, absent = (sum(law(a, b) for a, b in others) / 4 for law in (one, both))
    bound = rdp.allocation(np.array([order]), 2, 1.0)[0]
    assert max(divergence(present, absent), divergence(absent, present)) <= bound
    assert divergence(one(0, 0), both(0, 0)) == pytest.approx(bound, rel=1e-6)
    # the same for hockey-stick divergences
    sticks = lambda p, q: [np.maximum(p - np.exp(e) * q, 0).sum() for e in EPSILONS]
    two = lambda p, q: np.array([sticks(p, q), sticks(q, p)])
    assert (two(present, absent) <= profile(2, 1.0)).all()
    np.testing.assert_allclose(two(one(0, 0), both(0, 0)), profile(2, 1.0), rtol=2e-3, atol=1e-9)


# --- the pair on a grid


EPSILONS = np.array([0.0, 0.1, 0.5, 1.0, 2.0, 4.0])


def profile(slots, z, epsilon=EPSILONS):
    """Deltas of the pair on the grid: of presence against absence, and the other way round."""
    pair = allocation.dominating_pair(events.allocation(slots, events.gaussian(z)), z)
    sides = (pair.losses, pair.present), (-pair.losses[::-1], pair.absent[::-1])
    return np.array(
        [[mass @ -np.expm1(np.minimum(e - losses, 0)) for e in epsilon] for losses, mass in sides]
    )


def exact_of_two(z, epsilon=EPSILONS):
    """Deltas for two rounds: given one of both ratios, that of the mean of both is the price of a
    call or a put on the other, which is log-normal."""
    s = np.linspace(-12, 12 + 1 / z, 20_001)  # both prices are smooth and decrease fast
    weight = stats.norm.pdf(s) * (s[1] - s[0])
    ratio = np.exp(s / z - 0.5 / z**2)

    def half_mean(strike, call):
        """Half the mean of (Y - strike)_+ over the other ratio Y, or of (strike - Y)_+."""
        d = 0.5 / z - np.log(np.maximum(strike, 1e-300)) * z
        tails = stats.norm.cdf if call else stats.norm.sf
        price = abs(tails(d) - strike * tails(d - 1 / z))
        return weight @ np.where(strike > 0, price, np.maximum(1 - strike, 0) * call) / 2

    present = [half_mean(2 * np.exp(e) - ratio, True) for e in epsilon]
    absent = [half_mean(2 * np.exp(-e) - ratio, False) * np.exp(e) for e in epsilon]
    return np.array([present, absent])


@pytest.mark.parametrize("z", [0.5, 1.0, 3.0])
def test_two_rounds_are_the_integral_and_one_is_the_gaussian(z):
    for slots, exact in ((1, rdp.gaussian_delta(EPSILONS, 1 / z)), (2, exact_of_two(z))):
        found = profile(slots, z)
        assert (found >= exact - 1e-12).all()
        np.testing.assert_allclose(found, np.broadcast_to(exact, found.shape), rtol=1e-3, atol=1e-9)


def test_any_grid_is_an_upper_bound(monkeypatch):
    """With so few points and so large tails, each rounding counts."""
    fine = {(t, z): profile(t, z) for t, z in [(3, 0.7), (8, 2.0), (21, 1.0)]}
    fine |= {(2, z): exact_of_two(z) for z in (0.5, 1.0, 3.0)}
    monkeypatch.setattr(allocation, "NUM_POINTS", 64)
    for tail in (1e-22, 1e-3):
        monkeypatch.setattr(allocation, "TAIL", tail)
        allocation._mean.cache_clear()
        for (slots, z), deltas in fine.items():
            coarse = profile(slots, z)
            assert (coarse + 1e-20 >= deltas * (1 - 1e-9)).all(), (slots, z, tail)
            assert coarse[0, 1] > deltas[0, 1] * 1.001
    allocation._mean.cache_clear()


@pytest.mark.parametrize("side, direction", [(0, "remove"), (1, "add")])
def test_a_grid_of_losses_keeps_the_profile(side, direction):
    """On few points, some losses below and some above them."""
    pair = allocation.dominating_pair(events.allocation(3, events.gaussian(0.8)), 0.8)
    with in_float64():
        numbers = np.stack([pair.losses, pair.present, pair.absent])
        step = pld_step.pessimistic(direction, numbers, 0.8, 0.05, -30, 100)
        outcomes = pld_step._outcomes(direction, numbers, 0.8, 0.05 * np.arange(-30, 71), -30, 100)
    (mass, lost), (p, q) = map(np.asarray, step[:2]), map(np.asarray, outcomes)
    losses = 0.05 * np.arange(-30, 70)
    found = [lost + mass @ -np.expm1(np.minimum(e - losses, 0)) for e in EPSILONS[:4]]
    proved = profile(3, 0.8)[side, :4]
    assert (found >= proved * (1 - 1e-12)).all() and lost > 1e-5
    np.testing.assert_allclose(found, proved, rtol=0.01)
    assert mass.sum() + lost == pytest.approx(1 + 3 * allocation.ROUNDING, rel=1e-13)
    loss = np.log(p[p > 0] / q[p > 0])
    assert (abs(loss - losses[p > 0] - 0.025) <= 0.025 + 1e-9).all()


def test_an_attack_finds_what_is_proved():
    """Five rounds, 400,000 outcomes of each neighbour; a false alarm in 1e8, by the empirical
    Bernstein bound (Audibert, Munos, Szepesvari, 2009) for eight means of values in [0, 1]."""
    slots, z, n = 5, 0.8, 400_000
    log_failure = np.log(3 * 8 * 1e8)
    epsilon = np.array([0.2, 0.5, 1.0, 2.0])
    y = z * np.random.default_rng(0).standard_normal((n, slots))
    for sign, proved in zip((1, -1), profile(slots, z, epsilon)):
        moved = y + (sign == 1) * np.eye(slots)[0]
        loss = sign * np.log(np.exp((moved - 0.5) / z**2).mean(1))
        gains = -np.expm1(np.minimum(epsilon[:, None] - loss, 0))
        error = np.sqrt(2 * gains.var(1) * log_failure / n) + 3 * log_failure / n
        assert (abs(gains.mean(1) - proved) <= error).all()
        assert error[0] < 0.05 * proved[0]


# Epsilons at DELTA, below and above the true one, of PLD_accounting 2.0 (on PyPI; the code of the
# authors of arXiv:2602.17284), with loss_discretization 2e-3 (first), 5e-2 (last) or 1e-2.  The
# newest dp_accounting, 0.6.0, has no random allocation.
BRACKETS = {  # rounds of an epoch, noise multiplier, epochs
    (2, 1.0, 1): (3.69639, 3.69789),
    (4, 2.0, 3): (1.82534, 1.83183),
    (4, 2.0 / 2**0.5, 1): (1.72430, 1.72924),
    (10, 1.0, 1): (2.18662, 2.19026),
    (100, 1.0, 1): (0.61755, 0.62395),
    (50, 0.4, 1): (9.28731, 9.29566),
}


@pytest.mark.parametrize("slots, z, epochs", BRACKETS)
def test_golden_brackets(slots, z, epochs):
    event = events.repeat(events.allocation(slots, events.gaussian(z)), epochs)
    (found, width), (below, above) = pld.epsilon(event, DELTA), BRACKETS[slots, z, epochs]
    assert below < found < above and width < 1e-3 * found + 1e-4
    assert tightest.epsilon(event, DELTA) == (pytest.approx(found), "pld")
    assert found < 0.95 * rdp_events.epsilon(event, DELTA)[0]


def test_privacy_improves_with_rounds_and_noise():
    deltas = np.array([[profile(t, z)[0, 3] for t in (1, 2, 5)] for z in (0.5, 1.0, 2.0)])
    assert (np.diff(deltas, axis=0) < 0).all() and (np.diff(deltas, axis=1) < 0).all()
    for t, z in [(5, 1.0), (12, 0.2)]:
        pair = allocation.dominating_pair(events.allocation(t, events.gaussian(z)), z)
        allowance = 1 + allocation.ROUNDING * t
        assert [pair.present.sum(), pair.absent.sum()] == pytest.approx([allowance] * 2, rel=1e-13)


# --- samplers


def test_each_client_comes_once_in_an_epoch():
    def participations(sampler):
        """Whether a client comes: three epochs, five rounds of each, thirty clients."""
        draw = jax.jit(jax.vmap(lambda r: sampler.draw(jax.random.key(0), r).ids))
        drawn = np.asarray(draw(np.arange(15)))
        return np.array([np.isin(np.arange(30), ids) for ids in drawn]).reshape(3, 5, 30)

    seen = participations(jfl.sampling.random_allocation(30, 5, capacity=30))
    assert (seen.sum(1) == 1).all() and not (seen[0] == seen[1]).all()
    bins = participations(jfl.sampling.balls_in_bins(30, 5, capacity=30))
    assert (bins.sum(1) == 1).all() and (bins == bins[0]).all()


def test_longer_epochs_of_a_continued_run_draw_anew():
    """Rounds 0 to 3 have epochs of 2 rounds, and the rounds from 4 on one epoch of 4 rounds."""
    key, clients = jax.random.key(3), 64
    short, long = (jfl.sampling.random_allocation(clients, n, capacity=clients) for n in (2, 4))

    def position(sampler, first, size):
        rounds = [set(sampler.draw(key, r).ids.tolist()) for r in range(first, first + size)]
        return np.array([[c in r for r in rounds].index(True) for c in range(clients)])

    later = position(long, 4, 4) % 2
    for first in (0, 2):
        # About half of 64 independent draws agree; a false alarm has a probability of 4e-8.
        assert 10 < (position(short, first, 2) == later).sum() < 54


@pytest.mark.parametrize("make", [jfl.sampling.random_allocation, jfl.sampling.balls_in_bins])
def test_rounds_are_uniform_and_clients_independent(make):
    """Chi-square of the rounds of two clients together, 9 cells, 6,000 seeds; a false alarm in
    1e6.  Clients that always came together would be seen."""
    sampler = make(3, 3, capacity=3)

    def round_of(key):
        ids = jax.vmap(lambda r: sampler.draw(key, r).ids)(np.arange(3))
        return jax.vmap(lambda c: (ids == c).any(1).argmax())(np.arange(3))

    where = np.asarray(jax.jit(jax.vmap(round_of))(jax.random.split(jax.random.key(1), 6000)))

    def chance(first, second):
        return stats.chisquare(np.bincount(3 * first + second, minlength=9)).pvalue

    assert chance(where[:, 0], where[:, 1]) > 1e-6
    assert chance(where[:, 0], where[:, 0]) < 1e-6


def test_an_overflow_is_charged():
    few = jfl.sampling.random_allocation(C, 3, capacity=4)
    assert attendance(few).overflow == pytest.approx(0.368, abs=0.001)  # P(Bin(12, 1/3) > 4)
    bins = jfl.sampling.balls_in_bins(C, 3, capacity=4)
    assert attendance(bins).overflow == attendance(few).overflow
    assert jfl.sampling.random_allocation(10_000, 100).capacity < 250


# --- plans


@pytest.mark.parametrize(
    "sampler, adjacency, rounds, event, times",
    [
        (ALLOCATED, "add_remove", 4, events.allocation(4, events.gaussian(2.0)), 1),
        (ALLOCATED, "zero_out", 9, events.allocation(4, events.gaussian(2.0)), 3),
        # bins that stay are one release
        (BINS, "add_remove", 8, events.allocation(4, events.gaussian(2.0 / 2**0.5)), 1),
        # without a secret there is no gain
        (ALLOCATED, "replace_one", 12, events.gaussian(2.0), 3),
        (BINS, "replace_one", 12, events.gaussian(2.0), 3),
    ],
)
def test_a_run_is_its_epochs(sampler, adjacency, rounds, event, times):
    one = plan(sampler, adjacency)
    found = jfl.guarantee(one, rounds, DELTA)
    assert found.epsilon == pytest.approx(epsilon(event, times), rel=1e-6)
    assert (found.status, found.adjacency, found.view) == ("proved", adjacency, "third_party")
    quick = rdp_events.epsilon(events.repeat(event, times), DELTA)[0]
    assert jfl.epsilons(one, [rounds], DELTA)[0] == pytest.approx(quick, rel=1e-6)


def test_correlated_or_falling_noise_has_no_gain():
    made = jfl.strategies.banded_toeplitz(12, 4, participations=3, separation=4)
    noise = jfl.correlated(4.0, made)
    found = jfl.guarantee(plan(BINS, noise=noise), 12)
    expected = epsilon(events.gaussian(4.0 / made.sensitivity(3, 4, epochs=True)))
    assert found.epsilon == pytest.approx(expected, rel=1e-6)
    with pytest.raises(NotAnalysable, match="stay away for 4 rounds"):
        jfl.guarantee(plan(ALLOCATED, noise=noise), 12)
    falling = plan(ALLOCATED, noise=jfl.gaussian(jfl.schedules.inverse_sqrt(2.0)))
    assert jfl.guarantee(falling, 4).epsilon > jfl.guarantee(plan(ALLOCATED), 4).epsilon


def test_whole_epochs_add_up():
    one = plan(ALLOCATED)
    parts = jfl.guarantee([(one, 8), (one, 4)], delta=DELTA).epsilon
    assert parts == pytest.approx(jfl.guarantee(one, 12, DELTA).epsilon, rel=1e-6)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: jfl.guarantee([(plan(ALLOCATED), 6), (plan(ALLOCATED), 6)]), "a multiple of 4"),
        (lambda: jfl.guarantee([(plan(BINS), 8), (plan(BINS), 4)]), "from its round 0"),
        (lambda: jfl.sampling.random_allocation(10, 11), "epoch <= 10"),
    ],
)
def test_refusals(call, words):
    with pytest.raises((ValueError, NotAnalysable), match=words):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [ALLOCATED, BINS], ids=lambda s: s.scheme)
def test_runs_that_go_on_and_runs_in_chunks_are_the_same(sampler):
    key, one = jax.random.key(3), plan(sampler)
    whole = jax.tree.leaves(jfl.simulate(key, one, 6).params)
    begun = jfl.simulate(key, one, 3)
    rest = jax.tree.leaves(jfl.simulate(key, one, 3, start=begun.run).params)
    chunks = jax.tree.leaves(jfl.simulate(key, dataclasses.replace(one, chunk=2), 6).params)
    for a, b, c in zip(whole, rest, chunks):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, atol=1e-6)
