"""Curves of a guarantee: golden values, exact small cases, brute force, and what must hold."""

import math
import pickle
import time

import numpy as np
import pytest
from helpers.ledger_plans import BATCH, NOISY, fixed, make, poisson, poisson_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, stats
from scipy.special import ndtr, ndtri

import jfl
from jfl.core.records import Guarantee
from jfl.core.trade_off import curve_of, curve_of_pair
from jfl.privacy.accountants import events, pld, rdp, rdp_events, tightest
from jfl.privacy.accountants.tightest import Release
from jfl.sampling import batches

RATES = np.geomspace(1e-12, 0.5, 200)
EPSILONS = np.array([0.0, 0.01, 0.3, 1.0, 2.5, 6.0])


def curve(alternatives):
    return Release(tuple(alternatives)).curve()


def of_one_step(q, z, epsilon):
    """The exact delta of one Poisson step, the worse of both directions."""

    def removed(e):
        x = z**2 * math.log1p(math.expm1(e) / q) + 0.5 if math.expm1(e) > -q else -math.inf
        p = (1 - q) * stats.norm.sf(x / z) + q * stats.norm.sf((x - 1) / z)
        return p - math.exp(e) * stats.norm.sf(x / z)

    # the hockey stick of Q against P at e is that of P against Q at -e, but for what it leaves
    return max(removed(epsilon), 1 - math.exp(epsilon) * (1 - removed(-epsilon)))


def roc_of_one_step(q, z, rates):
    """The true-positive rate of the likelihood-ratio test, the worse of both directions."""
    removed = (1 - q) * rates + q * ndtr(ndtri(rates) + 1 / z)

    def false_positives(t):  # of the test that says Q where x < t
        return (1 - q) * ndtr(t / z) + q * ndtr((t - 1) / z)

    added = [
        ndtr(optimize.brentq(lambda t, a=a: false_positives(t) - a, -60 * z, 60 * z) / z)
        for a in rates
    ]
    return np.maximum(removed, added)


def test_golden_values():
    """Of dp_accounting's loss distributions at an interval of 1e-4."""
    known = curve((poisson(0.1, 3.0, 512),))
    np.testing.assert_allclose(known.epsilon_at(1e-6), 3.7696865815, rtol=3e-6)
    want = [0.00168398, 0.01053842, 0.06095276, 0.30586690]
    np.testing.assert_allclose(known.tpr([1e-4, 1e-3, 1e-2, 1e-1]), want, rtol=6e-6)
    np.testing.assert_allclose(known.mu, 0.8052441259, rtol=6e-6)


@pytest.mark.by_default("0.1-1.0")
@pytest.mark.parametrize("q, z", [(0.1, 1.0), (0.01, 0.5), (0.5, 2.0)])
def test_one_step_is_exact_and_never_below(q, z):
    known = curve((poisson(q, z),))
    exact = np.array([of_one_step(q, z, e) for e in EPSILONS])
    got = known.delta_at(EPSILONS)
    assert (got >= exact * (1 - 1e-9)).all()
    assert (got <= exact * (1 + 1e-3) + 1e-15).all()
    roc, rates = roc_of_one_step(q, z, RATES), known.tpr(RATES)
    assert (rates >= roc * (1 - 1e-9)).all()
    # no attack does better than the mu says
    assert (ndtr(ndtri(RATES) + known.mu) >= roc * (1 - 1e-9)).all()
    # and no pair says less: between both directions lines join them
    epsilon = np.append(0.0, np.geomspace(1e-4, 40 / z, 1000))
    exact = np.array([of_one_step(q, z, e) for e in epsilon])
    e, d = epsilon[:, None], np.maximum(exact, 0.0)[:, None]
    lines = np.minimum(np.exp(e) * RATES + d, 1 - np.exp(-e) * (1 - d - RATES)).min(0)
    np.testing.assert_array_less(rates, lines * (1 + 1e-4))
    assert known.mu <= np.max(ndtri(lines) - ndtri(RATES)) + 2e-3


@pytest.mark.parametrize("z, times", [(1.0, 1), (2.0, 9), (0.3, 1), (40.0, 5)])
def test_without_sampling_all_is_exact(z, times):
    mu = math.sqrt(times) / z
    for known in (
        curve((events.repeat(events.gaussian(z), times),)),
        curve((events.series(events.gaussian(np.full(times, z)), np.ones(times)),)),
    ):
        assert math.isclose(known.mu, mu, rel_tol=1e-12)
        np.testing.assert_allclose(known.tpr(RATES), ndtr(ndtri(RATES) + mu), rtol=1e-12)
        exact = [tightest.epsilon(events.gaussian(1 / mu), d)[0] for d in (1e-3, 1e-5, 1e-9)]
        np.testing.assert_allclose(known.epsilon_at([1e-3, 1e-5, 1e-9]), exact, rtol=1e-9)
        polygon = known._replace(gaussian_mu=math.inf)  # from the pairs alone: a little above
        assert mu <= polygon.mu <= mu * (1 + 1e-5)
        highest = polygon.tpr(RATES)
        assert (highest >= known.tpr(RATES) * (1 - 1e-12)).all()
        np.testing.assert_allclose(highest, known.tpr(RATES), rtol=5e-5)
        assert (polygon.delta_at(EPSILONS) >= known.delta_at(EPSILONS) * (1 - 1e-9)).all()


@given(
    epsilon=st.lists(st.floats(0, 8), min_size=1, max_size=6),
    delta=st.lists(st.floats(0, 1), min_size=6, max_size=6),
    rates=st.lists(st.floats(0, 1), min_size=1, max_size=20),
)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_rates_are_the_least_of_all_lines(epsilon, delta, rates):
    known = curve_of(epsilon, delta[: len(epsilon)])
    rates = np.array(rates)
    e, d = (v[:, None] for v in (known.epsilon, known.delta))
    lines = np.minimum(np.exp(e) * rates + d, 1 - np.exp(-e) * (1 - d - rates))
    np.testing.assert_allclose(known.tpr(rates), np.clip(lines.min(0), rates, 1), atol=1e-12)
    given_lines = [
        min(math.exp(e) * a + d, 1 - math.exp(-e) * (1 - d - a))
        for a in rates
        for e, d in zip(epsilon, delta)
    ]
    given_lines = np.reshape(given_lines, (len(rates), -1)).min(1)
    assert (known.tpr(rates) <= np.maximum(given_lines, rates) + 1e-12).all()
    assert (np.diff(known.epsilon) > 0).all() and (np.diff(known.delta) < 0).all()


def test_a_curve_is_convex_and_inverts_itself():
    known = curve((poisson(0.02, 0.8, 300),))
    x, falls = np.exp(known.epsilon), -np.diff(known.delta)
    slopes = falls / np.diff(x)
    assert (slopes[1:] <= slopes[:-1] * (1 + 1e-9)).all()
    deltas = np.geomspace(1e-15, 0.3, 400)
    epsilons = known.epsilon_at(deltas)
    assert (np.diff(epsilons) <= 0).all()
    assert (known.delta_at(epsilons) <= deltas * (1 + 1e-9)).all()
    back = known.delta_at(epsilons)
    assert (back >= deltas * (1 - 1e-6))[(epsilons > 0)].all()
    assert known.epsilon_at(1.0) == 0 and known.delta_at(1e6) <= known.delta_at(50.0)
    assert known.tpr(np.array([[0.1, 0.2]])).shape == (1, 2) and np.shape(known.tpr(0.1)) == ()


@pytest.mark.slow
def test_pairs_agree_with_the_accountants():
    for event in (poisson(0.01, 1.0, 1000), fixed(1 / 60, 3.0, 300)):
        known = curve((event,))
        for delta in (1e-3, 1e-5, 1e-8):
            want, _ = tightest.epsilon(event, delta)
            np.testing.assert_allclose(known.epsilon_at(delta), want, rtol=2e-3)
    event = poisson(0.01, 1.0, 1000)
    for deltas, epsilon in ((rdp_events.deltas, rdp_events.epsilon), (pld.deltas, pld.epsilon)):
        for e, delta in zip(EPSILONS, deltas(event, EPSILONS)):
            if 1e-15 < delta < 0.5:
                np.testing.assert_allclose(epsilon(event, delta)[0], e, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "event",
    [
        events.repeat(events.participation(0.3, events.gaussian(1.5)), 10),
        events.repeat(events.with_replacement(5, 100, events.gaussian(2.0)), 20),
        events.series(
            events.poisson(0.1, events.gaussian(np.array([1.0, 2.0, 4.0]))), np.array([1, 0, 5])
        ),
        events.compose(fixed(0.1, 2.0, 5), events.gaussian(8.0)),
    ],
)
def test_other_events(event):
    known = curve((event,))
    for delta in (1e-2, 1e-6):
        want, _ = tightest.epsilon(event, delta)
        np.testing.assert_allclose(known.epsilon_at(delta), want, rtol=2e-3, atol=1e-4)
    assert known.mu <= rdp_events.gaussian_mu(event) * (1 + 1e-12)


@pytest.mark.slow
def test_renyi_bounds_alone_give_a_looser_curve(monkeypatch):
    event = poisson(0.05, 1.0, 100)
    tight = curve((event,))
    monkeypatch.setattr(tightest, "has_loss_distribution", lambda event: False)
    loose = curve((event,))
    assert (loose.delta_at(EPSILONS) >= tight.delta_at(EPSILONS)).all()
    assert (loose.tpr(RATES) >= tight.tpr(RATES)).all() and loose.mu > tight.mu
    np.testing.assert_allclose(
        loose.epsilon_at([1e-3, 1e-5]),
        [rdp_events.epsilon(event, d)[0] for d in (1e-3, 1e-5)],
        rtol=5e-4,
    )
    monkeypatch.undo()
    # noise that loss distributions do not take
    tiny = curve((poisson(1e-4, 0.01, 2),))
    assert 0 < tiny.epsilon_at(1e-5) < math.inf


@pytest.mark.slow
def test_the_worst_of_several_clients_counts(monkeypatch):
    """Whichever is the worst at an epsilon: one is for large, another for small ones."""
    several = (poisson(0.02, 0.7, 1), poisson(0.9, 9.0, 3), poisson(0.4, 9.0, 3))
    each = np.stack([curve((e,)).delta_at(EPSILONS) for e in several])
    assert len(set(np.argmax(each, axis=0))) == 2
    np.testing.assert_allclose(curve(several).delta_at(EPSILONS), each.max(0), rtol=1e-3)
    calls = []
    deltas = pld.deltas
    monkeypatch.setattr(pld, "deltas", lambda *a: calls.append(a) or deltas(*a))
    monkeypatch.setattr(tightest, "MAX_REFINED_CLIENTS", 1)
    few = curve(several).delta_at(EPSILONS)  # the others by Renyi bounds
    assert len(calls) == 1 and (few >= each.max(0) * (1 - 1e-6)).all()


# --- groups


@pytest.mark.parametrize("size", [2, 3, 7])
def test_groups_of_any_curve(size):
    mu = 0.4
    known = curve((events.gaussian(1 / mu),))._replace(gaussian_mu=math.inf)
    group = known.group(size)
    assert size * mu <= group.mu <= size * mu * (1 + 1e-4)
    truth = curve((events.gaussian(1 / (size * mu)),))
    assert (group.delta_at(EPSILONS) >= truth.delta_at(EPSILONS) * (1 - 1e-9)).all()
    highest = group.tpr(RATES)
    want = RATES
    for _ in range(size):  # an attack on the outcome of an attack
        want = known.tpr(want)
    np.testing.assert_allclose(highest, want, rtol=2e-3)
    assert (highest >= truth.tpr(RATES) * (1 - 1e-9)).all()
    with_mu = curve((events.gaussian(1 / mu),)).group(size)
    assert math.isclose(with_mu.mu, size * mu, rel_tol=1e-12)


@pytest.mark.parametrize("epsilon, delta", [(1.0, 0.0), (0.5, 1e-3), (3.0, 1e-6)])
@pytest.mark.parametrize("size", [2, 5])
def test_groups_of_one_pair(epsilon, delta, size):
    group = curve_of_pair(epsilon, delta).group(size)
    bound = delta * math.expm1(size * epsilon) / math.expm1(epsilon)
    assert group.delta_at(size * epsilon) <= bound * (1 + 1e-9)
    np.testing.assert_allclose(group.delta_at(size * epsilon), bound, rtol=1e-6)


@pytest.mark.slow
def test_a_large_group():
    known = curve((fixed(0.01, 5.0, 30),))
    begun = time.perf_counter()
    mus = [known.group(k).mu for k in (10, 100, 1000)]
    assert time.perf_counter() - begun < 20
    assert mus == sorted(mus) and mus[-1] <= 1000 * rdp_events.gaussian_mu(fixed(0.01, 5.0, 30))


def of_one_group(law, z, epsilon):
    """The exact delta of one step of a group, the worse of both directions."""
    number = np.arange(len(law))
    log_ratio = lambda x: np.log(law @ np.exp((2 * number * x - number**2) / (2 * z**2)))

    def removed(e):
        if e <= math.log(law[0]):
            return 1 - math.exp(e)
        x = optimize.brentq(lambda x: log_ratio(x) - e, -90 * z, 90 * z)
        return law @ stats.norm.sf((x - number) / z) - math.exp(e) * stats.norm.sf(x / z)

    return max(removed(epsilon), 1 - math.exp(epsilon) * (1 - removed(-epsilon)))


@pytest.mark.slow
def test_golden_group():
    """Two units on a Poisson sample at rate 0.1; of dp_accounting's loss distribution."""
    group = events.repeat(events.poisson_group(0.1, 2, events.gaussian(1.0)), 10)
    value, width = pld.epsilon(group, 1e-5)
    assert math.isclose(value, 6.1933980296, rel_tol=2e-6) and 0 <= width < 1e-3
    known = Release((poisson(0.1, 1.0, 10),)).group(2).curve()
    assert math.isclose(known.epsilon_at(1e-5), 6.1933980296, rel_tol=2e-5)
    assert known.epsilon_at(1e-5) < curve((poisson(0.1, 1.0, 10),)).group(2).epsilon_at(1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("q, size, z", [(0.1, 2, 1.0), (0.3, 5, 4.0), (0.01, 3, 0.8)])
def test_one_step_of_a_group_is_exact(q, size, z):
    event = events.poisson_group(q, size, events.gaussian(z))
    exact = np.array([of_one_group(event.distribution, z, e) for e in EPSILONS])
    got = pld.deltas(event, EPSILONS)
    assert (got >= exact * (1 - 1e-9)).all()
    np.testing.assert_allclose(got, exact, rtol=1e-3, atol=1e-13)
    renyi = rdp_events.deltas(event, EPSILONS)
    assert (renyi >= exact).all()


@pytest.mark.by_default("0.3-5-4.0")
@pytest.mark.parametrize("q, size, z", [(0.1, 2, 1.0), (0.3, 5, 4.0), (0.5, 3, 0.8)])
def test_renyi_curve_of_a_group(q, size, z):
    """By adaptive quadrature of both directions."""
    event = events.poisson_group(q, size, events.gaussian(z))
    number = np.arange(size + 1)
    for order in (1.2, 2.0, 3.7):
        log_moments = []
        for power in (order, 1 - order):

            def integrand(x, power=power):
                ratio = event.distribution @ np.exp((2 * number * x - number**2) / (2 * z**2))
                return stats.norm.pdf(x / z) / z * ratio**power

            ends = -12 * z, order * size + 12 * z
            value = integrate.quad(integrand, *ends, epsabs=0, epsrel=1e-12, limit=500)[0]
            log_moments.append(math.log(value))
        want = max(log_moments) / (order - 1)
        for curve_of_event in (
            rdp.poisson_group(order, event.distribution, z),
            rdp_events.curve(event, np.array([order]))[0],
        ):
            np.testing.assert_allclose(np.ravel(curve_of_event)[0], want, rtol=1e-9)
    whole = rdp.poisson_group(1e6, event.distribution, z)
    assert math.isclose(whole.item(), 1e6 * size**2 / (2 * z**2))


@pytest.mark.slow
def test_a_group_of_one_is_none_and_all_of_it_is_a_gaussian():
    one, sample = events.poisson_group(0.2, 1, events.gaussian(1.5)), poisson(0.2, 1.5)
    orders = np.array([1.1, 2.0, 30.0])
    np.testing.assert_allclose(
        rdp_events.curve(one, orders), rdp_events.curve(sample, orders), rtol=1e-10
    )
    for times in (1, 50):
        want = pld.epsilon(sample, 1e-6, times)
        np.testing.assert_allclose(pld.epsilon(one, 1e-6, times), want, rtol=1e-6, atol=1e-8)
    everyone = events.poisson_group(1.0, 4, events.gaussian(8.0))
    assert everyone.distribution.tolist() == [0, 0, 0, 0, 1]
    assert rdp_events.gaussian_mu(everyone) == 0.5
    for known in (curve((everyone,)), Release((events.gaussian(8.0),)).group(4).curve()):
        assert math.isclose(known.mu, 0.5, rel_tol=1e-9)
    with pytest.raises(ValueError, match="events.poisson_group: expected an integer size"):
        events.poisson_group(0.1, 1.5, events.gaussian(1.0))


@pytest.mark.slow
def test_which_groups_have_events_of_their_own():
    sampled, noise = poisson(0.1, 2.0, 3), events.gaussian(1.0)
    group = events.of_group(events.compose(sampled, noise), 3)
    assert group.events[1] == events.gaussian(1 / 3)
    assert (
        group.events[0].event.distribution.tolist()
        == events.poisson_group(0.1, 3, noise).distribution.tolist()
    )
    series = events.series(events.poisson(0.1, events.gaussian(np.array([1.0, 3.0]))), [4, 5])
    known = Release((events.of_group(series, 2),)).curve()
    parts = [
        events.repeat(events.poisson_group(0.1, 2, events.gaussian(z)), n)
        for z, n in ((1.0, 4), (3.0, 5))
    ]
    want = curve((events.compose(*parts),)).delta_at(EPSILONS)
    np.testing.assert_allclose(known.delta_at(EPSILONS), want, rtol=1e-3)
    for other in (fixed(0.1, 1.0, 3), events.participation(0.5, noise)):
        assert events.of_group(other, 2) is None
        assert events.of_group(events.compose(noise, other), 2) is None
    assert events.of_group(sampled, 17) is None and Release((sampled,)).group(17) is None


@pytest.mark.slow
def test_groups_on_poisson_samples():
    known = jfl.guarantee(poisson_plan(), 4, unit="example", view="server")
    two, many = known.group(2), known.group(20)
    assert known.epsilon < two.epsilon < known.curve().group(2).epsilon_at(known.delta)
    assert two.mu < known.curve().group(2).mu and many.epsilon > two.epsilon


@pytest.mark.parametrize(
    "pairs", [[(5.0, 1e-7)], [(0.3, 0.01), (6.0, 1e-9)], [(0.0, 0.2)], [(9.0, 0.0), (2.0, 1e-3)]]
)
def test_mu_is_the_largest_of_all_rates(pairs):
    known = curve_of(*zip(*pairs))
    rates = np.geomspace(1e-12, 0.5, 20000)
    brute = np.max(ndtri(known.tpr(rates)) - ndtri(rates))
    assert brute - 1e-12 <= known.mu <= brute + 1e-3


def test_reading_many_epsilons_of_one_distribution():
    rng = np.random.default_rng(0)
    losses = 0.5 + 0.01 * np.arange(500)
    mass = rng.dirichlet(np.ones(500)) * 0.9
    epsilon = np.concatenate([[0.0, 0.499], rng.uniform(0.5, 5.49, 50), [5.6]])
    brute = [1e-3 + (mass * -np.expm1(np.minimum(e - losses, 0))).sum() for e in epsilon]
    got = pld._deltas_of_composed(losses, mass, 1e-3, epsilon)
    assert got[0] == got[1] == 1.0  # below the window nothing is known
    np.testing.assert_allclose(got[2:], brute[2:], rtol=1e-8)
    assert (got[2:] >= np.array(brute[2:]) * (1 - 1e-12)).all()


# --- guarantees of plans


@pytest.mark.slow
def test_a_guarantee_keeps_its_fields():
    """What is behind it is no field: it prints, compares and is stored as before."""
    known = jfl.guarantee(poisson_plan(), 4, unit="example", view="server")
    fields = Guarantee(*known)
    before = repr(known), str(known), hash(known), known._asdict()
    assert known.delta_at(known.epsilon) <= known.delta * (1 + 1e-12)
    assert known.epsilon_at(known.delta) <= known.epsilon
    assert (repr(known), str(known), hash(known), known._asdict()) == before
    assert known == fields and before == (repr(fields), str(fields), hash(fields), fields._asdict())
    assert list(known._asdict()) == list(Guarantee._fields) and len(Guarantee._fields) == 10
    again = pickle.loads(pickle.dumps(known))
    assert again == known and again.mu == known.mu
    # other words keep what is behind it, other numbers do not
    assert known._replace(status="conditional").mu == known.mu
    other = known._replace(epsilon=known.epsilon + 1)
    assert len(other.curve().epsilon) == 2
    assert other.tpr(0.1) == fields._replace(epsilon=known.epsilon + 1).tpr(0.1)
    # read from a file it knows its pair, which says less
    assert fields.epsilon_at(1e-9) == math.inf > known.epsilon_at(1e-9)
    assert (fields.tpr(RATES) >= known.tpr(RATES)).all()


def test_no_noise_and_nobody():
    bare = Guarantee(math.inf, 1e-5, "example", "replace_one", "server", "none")
    assert bare.delta_at([0.0, 9.0]).tolist() == [1.0, 1.0] and bare.epsilon_at(0.1) == math.inf
    assert bare.tpr(0.01) == 1 and bare.mu == math.inf and bare.group(2).epsilon == math.inf
    nobody = curve(())
    assert nobody.mu == 0 and nobody.epsilon_at(0.0) == 0
    np.testing.assert_allclose(nobody.tpr(RATES), RATES, rtol=1e-12)


@pytest.mark.slow
def test_an_overflow_and_a_quantile_are_paid():
    chance = 1e-9
    event = poisson(0.05, 1.0, 10)
    clean, paid = curve((event,)), Release((event,), chance).curve()
    finer = np.linspace(0, 6, 2000)
    want = clean.delta_at(finer) + chance * (1 + np.exp(finer))
    want = np.minimum.accumulate(want)  # a delta holds for larger epsilons
    np.testing.assert_allclose(paid.delta_at(finer), want, rtol=1e-3)
    assert paid.gaussian_mu == math.inf and Release((event,), 0.0, chance).group(2) is None
    assert Release((event,), chance).group(3).overflow == 3 * chance
    assert Release((event,), 0.0, 1e-7).curve().tpr(0.0) >= 1e-7
    plan = make(rows=NOISY(), batch=BATCH)
    known = jfl.guarantee(plan, 20, view="server", quantile=1e-7)
    assert known.release.extra == pytest.approx(1e-7, rel=0.9) and known.release.extra > 0
    assert known.delta_at(1e3) >= known.release.extra
    assert known.delta_at(known.epsilon) <= known.delta * (1 + 1e-12)


def test_groups_of_a_plan(endless_noise):
    plan = make(rows=NOISY(2.0), batch=batches.full())
    known = jfl.guarantee(plan, 3, view="server")
    assert known.group(1) is known
    for size in (2, 5):
        group = known.group(size)
        assert math.isclose(group.mu, size * known.mu, rel_tol=1e-9)
        want, _ = tightest.epsilon(events.gaussian(1 / (size * known.mu)), known.delta)
        assert math.isclose(group.epsilon, want, rel_tol=1e-9)
        assert (
            f"Protects any {size} examples jointly." in group.caveats and group.delta == known.delta
        )
        assert group.method == f"{known.method}, group of {size}" and group.unit == "example"
    assert known.group(2).group(3).epsilon == known.group(6).epsilon


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda g: g.tpr(1.1),
            r"Guarantee.tpr: expected fpr, numbers in \[0, 1\], but got fpr=1.1",
        ),
        (lambda g: g.tpr(np.nan), "Guarantee.tpr: expected fpr"),
        (lambda g: g.tpr("a"), "Guarantee.tpr: expected fpr"),
        (
            lambda g: g.delta_at(-1),
            "Guarantee.delta_at: expected epsilon, numbers >= 0, but got epsilon=-1",
        ),
        (lambda g: g.epsilon_at([0.1, 2]), "Guarantee.epsilon_at: expected delta, numbers in"),
        (lambda g: g.group(0), "Guarantee.group: expected an integer size >= 1, but got size=0"),
        (lambda g: g.group(1.5), "Guarantee.group: expected an integer size"),
        (lambda g: g.group(1001), "size <= 1000"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(Guarantee(1.0, 1e-5, "example", "replace_one", "server", "a paper"))
