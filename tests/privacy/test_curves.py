"""Curves of a guarantee: golden values, exact small cases, brute force, and what must hold."""

import math
import pickle

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


def curve(*alternatives):
    return Release(alternatives).curve()


def of_one_step(law, z, epsilon):
    """The exact delta of one Gaussian release in which k units take part with probability law[k],
    the worse of both directions."""
    number = np.arange(len(law))
    log_ratio = lambda x: np.log(law @ np.exp((2 * number * x - number**2) / (2 * z**2)))

    def removed(e):
        if e <= math.log(law[0]):
            return 1 - math.exp(e)
        x = optimize.brentq(lambda x: log_ratio(x) - e, -90 * z, 90 * z)
        return law @ stats.norm.sf((x - number) / z) - math.exp(e) * stats.norm.sf(x / z)

    # the hockey stick of Q against P at e is that of P against Q at -e, but for what it leaves
    return max(removed(epsilon), 1 - math.exp(epsilon) * (1 - removed(-epsilon)))


def roc_of_one_step(q, z, rates):
    """The true-positive rate of the likelihood-ratio test, the worse of both directions."""
    removed = (1 - q) * rates + q * ndtr(ndtri(rates) + 1 / z)

    def false_positives(t):  # of the test that says Q where x < t
        return (1 - q) * ndtr(t / z) + q * ndtr((t - 1) / z)

    threshold = lambda a: optimize.brentq(lambda t: false_positives(t) - a, -60 * z, 60 * z)
    return np.maximum(removed, [ndtr(threshold(a) / z) for a in rates])


@pytest.fixture(scope="module")
def known():
    return curve(poisson(0.1, 3.0, 512))


def test_golden_values(known):
    """Of dp_accounting's loss distributions at an interval of 1e-4."""
    np.testing.assert_allclose(known.epsilon_at(1e-6), 3.7696865815, rtol=3e-6)
    want = [0.00168398, 0.01053842, 0.06095276, 0.30586690]
    np.testing.assert_allclose(known.tpr([1e-4, 1e-3, 1e-2, 1e-1]), want, rtol=6e-6)
    np.testing.assert_allclose(known.mu, 0.8052441259, rtol=6e-6)


@pytest.mark.parametrize("q, z", [(0.1, 1.0), pytest.param(0.5, 2.0, marks=pytest.mark.slow)])
def test_one_step_is_exact_and_never_below(q, z):
    known, law = curve(poisson(q, z)), np.array([1 - q, q])
    exact = np.array([of_one_step(law, z, e) for e in EPSILONS])
    got = known.delta_at(EPSILONS)
    assert (got >= exact * (1 - 1e-9)).all() and (got <= exact * (1 + 1e-3) + 1e-15).all()
    roc, rates = roc_of_one_step(q, z, RATES), known.tpr(RATES)
    assert (rates >= roc * (1 - 1e-9)).all()
    # no attack does better than the mu says
    assert (ndtr(ndtri(RATES) + known.mu) >= roc * (1 - 1e-9)).all()
    # and no pair says less: between both directions lines join them
    epsilon = np.append(0.0, np.geomspace(1e-4, 40 / z, 1000))
    exact = np.array([of_one_step(law, z, e) for e in epsilon])
    e, d = epsilon[:, None], np.maximum(exact, 0.0)[:, None]
    lines = np.minimum(np.exp(e) * RATES + d, 1 - np.exp(-e) * (1 - d - RATES)).min(0)
    np.testing.assert_array_less(rates, lines * (1 + 1e-4))
    assert known.mu <= np.max(ndtri(lines) - ndtri(RATES)) + 2e-3


@pytest.mark.parametrize("z, times", [(2.0, 9), (0.3, 1), (40.0, 5)])
def test_without_sampling_all_is_exact(z, times):
    mu = math.sqrt(times) / z
    for known in (
        curve(events.repeat(events.gaussian(z), times)),
        curve(events.series(events.gaussian(np.full(times, z)), np.ones(times))),
    ):
        assert math.isclose(known.mu, mu, rel_tol=1e-12)
        np.testing.assert_allclose(known.tpr(RATES), ndtr(ndtri(RATES) + mu), rtol=1e-12)
        exact = [tightest.epsilon(events.gaussian(1 / mu), d)[0] for d in (1e-3, 1e-9)]
        np.testing.assert_allclose(known.epsilon_at([1e-3, 1e-9]), exact, rtol=1e-9)
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
@settings(max_examples=50)
def test_rates_are_the_least_of_all_lines(epsilon, delta, rates):
    known = curve_of(epsilon, delta[: len(epsilon)])
    rates = np.array(rates)

    def lines(epsilon, delta):
        e, d = (np.array(v)[:, None] for v in (epsilon, delta))
        return np.minimum(np.exp(e) * rates + d, 1 - np.exp(-e) * (1 - d - rates)).min(0)

    least = lines(known.epsilon, known.delta)
    np.testing.assert_allclose(known.tpr(rates), np.clip(least, rates, 1), atol=1e-12)
    given_lines = lines(epsilon, delta[: len(epsilon)])
    assert (known.tpr(rates) <= np.maximum(given_lines, rates) + 1e-12).all()
    assert (np.diff(known.epsilon) > 0).all() and (np.diff(known.delta) < 0).all()


def test_a_curve_is_convex_and_inverts_itself(known):
    slopes = -np.diff(known.delta) / np.diff(np.exp(known.epsilon))
    assert (slopes[1:] <= slopes[:-1] * (1 + 1e-9)).all()
    deltas = np.geomspace(1e-15, 0.3, 400)
    epsilons = known.epsilon_at(deltas)
    assert (np.diff(epsilons) <= 0).all()
    back = known.delta_at(epsilons)
    assert (back <= deltas * (1 + 1e-9)).all()
    assert (back >= deltas * (1 - 1e-6))[(epsilons > 0)].all()
    assert known.epsilon_at(1.0) == 0 and known.delta_at(1e6) <= known.delta_at(50.0)
    assert known.tpr(np.array([[0.1, 0.2]])).shape == (1, 2) and np.shape(known.tpr(0.1)) == ()


@pytest.mark.slow
def test_the_worst_of_several_clients_counts(monkeypatch):
    """Whichever is the worst at an epsilon: one is for large, another for small ones."""
    several = (poisson(0.02, 0.7, 1), poisson(0.9, 9.0, 3), poisson(0.4, 9.0, 3))
    each = np.stack([curve(event).delta_at(EPSILONS) for event in several])
    assert len(set(np.argmax(each, axis=0))) == 2
    np.testing.assert_allclose(curve(*several).delta_at(EPSILONS), each.max(0), rtol=1e-3)
    tiny = curve(poisson(1e-4, 0.01, 2))  # noise that loss distributions do not take
    assert 0 < tiny.epsilon_at(1e-5) < math.inf
    monkeypatch.setattr(tightest, "MAX_REFINED_CLIENTS", 1)  # the others by Renyi bounds
    assert (curve(*several).delta_at(EPSILONS) >= each.max(0) * (1 - 1e-6)).all()


# --- groups


@pytest.mark.parametrize("size", [2, 7])
def test_groups_of_any_curve(size):
    mu = 0.4
    known = curve(events.gaussian(1 / mu))._replace(gaussian_mu=math.inf)
    group, truth = known.group(size), curve(events.gaussian(1 / (size * mu)))
    assert size * mu <= group.mu <= size * mu * (1 + 1e-4)
    assert (group.delta_at(EPSILONS) >= truth.delta_at(EPSILONS) * (1 - 1e-9)).all()
    highest, want = group.tpr(RATES), RATES
    for _ in range(size):  # an attack on the outcome of an attack
        want = known.tpr(want)
    np.testing.assert_allclose(highest, want, rtol=2e-3)
    assert (highest >= truth.tpr(RATES) * (1 - 1e-9)).all()
    assert math.isclose(known._replace(gaussian_mu=mu).group(size).mu, size * mu, rel_tol=1e-12)
    # of one pair: the pair each time
    pair, bound = curve_of_pair(0.5, 1e-3), 1e-3 * math.expm1(size * 0.5) / math.expm1(0.5)
    assert pair.group(size).delta_at(size * 0.5) == pytest.approx(bound, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("q, size, z", [(0.3, 5, 4.0), (0.01, 3, 0.8)])
def test_one_step_of_a_group_is_exact(q, size, z):
    event = events.poisson_group(q, size, events.gaussian(z))
    exact = np.array([of_one_step(event.distribution, z, e) for e in EPSILONS])
    got = pld.deltas(event, EPSILONS)
    assert (got >= exact * (1 - 1e-9)).all()
    np.testing.assert_allclose(got, exact, rtol=1e-3, atol=1e-13)
    assert (rdp_events.deltas(event, EPSILONS) >= exact).all()


def test_renyi_curve_of_a_group():
    """By adaptive quadrature of both directions."""
    size, z = 5, 4.0
    event = events.poisson_group(0.3, size, events.gaussian(z))
    number, ends = np.arange(size + 1), (-12 * z, 4 * size + 12 * z)

    def moment(power):
        def integrand(x):
            ratio = event.distribution @ np.exp((2 * number * x - number**2) / (2 * z**2))
            return stats.norm.pdf(x / z) / z * ratio**power

        return integrate.quad(integrand, *ends, epsabs=0, epsrel=1e-12, limit=500)[0]

    orders = np.array([1.2, 2.0, 3.7])
    want = [math.log(max(moment(order), moment(1 - order))) / (order - 1) for order in orders]
    np.testing.assert_allclose(rdp_events.curve(event, orders), want, rtol=1e-9)
    whole = rdp.poisson_group(1e6, event.distribution, z)
    assert math.isclose(whole.item(), 1e6 * size**2 / (2 * z**2))


@pytest.mark.slow
def test_which_groups_have_events_of_their_own():
    noise, sampled, other = events.gaussian(1.0), poisson(0.1, 2.0, 3), fixed(0.1, 1.0, 3)
    assert events.of_group(events.compose(sampled, noise), 3).events[1] == events.gaussian(1 / 3)
    series = events.series(events.poisson(0.1, events.gaussian(np.array([1.0, 3.0]))), [4, 5])
    one = lambda z, times: events.repeat(events.poisson_group(0.1, 2, events.gaussian(z)), times)
    want = curve(events.compose(one(1.0, 4), one(3.0, 5))).delta_at(EPSILONS)
    got = curve(events.of_group(series, 2)).delta_at(EPSILONS)
    np.testing.assert_allclose(got, want, rtol=1e-3)
    for event in (events.participation(0.5, noise), events.compose(noise, other)):
        assert events.of_group(event, 2) is None
    assert events.of_group(sampled, 17) is None and Release((sampled,)).group(17) is None
    # dp_accounting's loss distribution of two units at rate 0.1; all of a group is a Gaussian
    two = Release((poisson(0.1, 1.0, 10),)).group(2).curve()
    assert math.isclose(two.epsilon_at(1e-5), 6.1933980296, rel_tol=2e-5)
    everyone = events.poisson_group(1.0, 4, events.gaussian(8.0))
    assert math.isclose(curve(everyone).mu, 0.5, rel_tol=1e-9)


# --- guarantees of plans


@pytest.mark.slow
def test_a_guarantee_keeps_its_fields():
    """What is behind it is no field: it prints, compares and is stored as before."""
    known = jfl.guarantee(poisson_plan(), 4, unit="example", view="server")
    fields = Guarantee(*known)
    assert known.delta_at(known.epsilon) <= known.delta * (1 + 1e-12)
    assert known == fields and (repr(known), hash(known)) == (repr(fields), hash(fields))
    again = pickle.loads(pickle.dumps(known))
    assert again == known and again.mu == known.mu
    # other numbers lose it; read from a file it knows its pair, which says less
    other = known._replace(epsilon=known.epsilon + 1)
    assert other.tpr(0.1) == fields._replace(epsilon=known.epsilon + 1).tpr(0.1)
    assert fields.epsilon_at(1e-9) == math.inf > known.epsilon_at(1e-9)
    two = known.group(2)
    assert known.epsilon < two.epsilon < known.curve().group(2).epsilon_at(known.delta)


def test_no_noise_and_nobody():
    bare = Guarantee(math.inf, 1e-5, "example", "replace_one", "server", "none")
    assert bare.delta_at([0.0, 9.0]).tolist() == [1.0, 1.0] and bare.epsilon_at(0.1) == math.inf
    assert bare.tpr(0.01) == 1 and bare.mu == math.inf and bare.group(2).epsilon == math.inf
    nobody = curve()
    assert nobody.mu == 0 and nobody.epsilon_at(0.0) == 0
    np.testing.assert_allclose(nobody.tpr(RATES), RATES, rtol=1e-12)


@pytest.mark.slow
def test_an_overflow_and_a_quantile_are_paid():
    chance, event, finer = 1e-9, poisson(0.05, 1.0, 10), np.linspace(0, 6, 2000)
    clean, paid = curve(event), Release((event,), chance).curve()
    want = clean.delta_at(finer) + chance * (1 + np.exp(finer))
    want = np.minimum.accumulate(want)  # a delta holds for larger epsilons
    np.testing.assert_allclose(paid.delta_at(finer), want, rtol=1e-3)
    assert paid.gaussian_mu == math.inf and Release((event,), 0.0, chance).group(2) is None
    assert Release((event,), chance).group(3).overflow == 3 * chance
    assert Release((event,), 0.0, 1e-7).curve().tpr(0.0) >= 1e-7
    plan = make(rows=NOISY(), batch=BATCH)
    known = jfl.guarantee(plan, 20, view="server", quantile=1e-7)
    assert known.release.extra == pytest.approx(1e-7, rel=0.9)
    assert known.delta_at(1e3) >= known.release.extra > 0


def test_groups_of_a_plan(endless_noise):
    plan = make(rows=NOISY(2.0), batch=batches.full())
    known = jfl.guarantee(plan, 3, view="server")
    for size in (1, 5):
        group = known.group(size)
        want, _ = tightest.epsilon(events.gaussian(1 / (size * known.mu)), known.delta)
        assert math.isclose(group.mu, size * known.mu, rel_tol=1e-9)
        assert math.isclose(group.epsilon, want, rel_tol=1e-9) and group.delta == known.delta
    assert "Protects any 5 examples jointly." in group.caveats and group.unit == "example"
    assert known.group(2).group(3).epsilon == known.group(6).epsilon


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda g: g.tpr(1.1), r"fpr, numbers in \[0, 1\]"),
        (lambda g: g.delta_at(-1), "epsilon, numbers >= 0"),
        (lambda g: g.epsilon_at([0.1, 2]), "delta, numbers in"),
        (lambda g: g.group(1001), "size <= 1000"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call(Guarantee(1.0, 1e-5, "example", "replace_one", "server", "a paper"))


def test_a_tight_bound_limits_the_cost_of_overflows_where_renyi_is_too_loose():
    event, delta = events.repeat(events.poisson(0.05, events.gaussian(0.4)), 200), 1e-6
    of = lambda overflow=0.0, share=1.0, quick=False: tightest.tightest(
        Release((event,), overflow), share * delta, quick=quick
    )[0]
    half = of(share=0.5)
    rare = 0.25 * delta / (1 + math.exp(half))
    with pytest.raises(rdp_events.Overflow, match="cost of overflows"):
        of(rare, quick=True)
    assert of() < of(rare) < half
    with pytest.raises(rdp_events.Overflow, match="cost of overflows"):
        of(2.5 * rare)
