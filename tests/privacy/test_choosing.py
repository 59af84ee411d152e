"""The price of choosing the best run: golden values, exact small cases, and the laws of how many
runs."""

import itertools
import math

import jax
import numpy as np
import pytest
from helpers.ledger_plans import fixed, poisson, poisson_plan
from scipy import special, stats

import jfl
from jfl.core.errors import NotAnalysable
from jfl.core.records import Guarantee
from jfl.privacy.accountants import choosing, events, rdp, rdp_events
from jfl.privacy.accountants.tightest import Release

RUN = poisson(0.01, 1.0, 1000)
# dp_accounting 0.6.0's curve of RUN at the orders that decide below, a little too large between
# whole orders, and its epsilons at delta 1e-5 of the choice
ORDERS = np.array([1.1, 2.6, 3.3, 4.3, 4.7, 5.1, 5.7, 6.2, 7.6, 8.0, 8.1])
CURVE = np.array(
    [
        0.09924711021176497,
        0.22707596140833886,
        0.2935675727948988,
        0.3940020572317136,
        0.4361812195807968,
        0.479678079531892,
        0.5478522409649669,
        0.6079637209961949,
        0.8087722693190105,
        0.893643907606041,
        0.9209164273748885,
    ]
)
GOLDEN = {
    choosing.geometric(10): 4.1032706564,
    choosing.logarithmic(10): 3.5226334451,
    choosing.geometric(100): 5.2700216081,
}
LAWS = [
    choosing.geometric(1),
    choosing.geometric(2),
    choosing.geometric(1000),
    choosing.logarithmic(1),
    choosing.logarithmic(20),
]


def curve_of_choice(orders, curve, runs):
    return choosing.curve_of_tournament(orders, [curve], [runs])


@pytest.mark.parametrize("runs", GOLDEN)
def test_golden_values(runs):
    chosen = curve_of_choice(ORDERS, CURVE, runs)
    assert math.isclose(rdp.convert(ORDERS, chosen, 1e-5).min(), GOLDEN[runs], rel_tol=1e-7)
    # on exact curves of all orders it is a little less
    value = choosing.epsilon_of_choice(RUN, runs, 1e-5)
    assert GOLDEN[runs] * (1 - 3e-4) < value <= GOLDEN[runs]
    of_curve = choosing._trade_off_curve([Release((RUN,))], [runs]).epsilon_at(1e-5)
    assert value * (1 - 1e-9) <= of_curve <= value * (1 + 2e-6)


def exact_divergence(order, p, q):
    return special.logsumexp(order * np.log(p) + (1 - order) * np.log(q)) / (order - 1)


@pytest.mark.parametrize("runs", LAWS)
def test_never_below_the_truth(runs):
    """Runs with outcomes 0 < 1 < 2 < 3, of which the best is shown: the law of the best is a power
    series of their distribution."""
    p, q = np.array([0.1, 0.3, 0.35, 0.25]), np.array([0.2, 0.3, 0.3, 0.2])
    orders = np.concatenate([[1.01, 1.1, 1.5], np.arange(2.0, 60)])
    curve = np.array([max(exact_divergence(a, p, q), exact_divergence(a, q, p)) for a in orders])
    best_p, best_q = best_of(p, runs), best_of(q, runs)
    assert math.isclose(best_p.sum(), 1, rel_tol=1e-9)
    chosen = curve_of_choice(orders, curve, runs)
    for order, bound in zip(orders, chosen):
        assert exact_divergence(order, best_p, best_q) <= bound * (1 + 1e-9)
        assert exact_divergence(order, best_q, best_p) <= bound * (1 + 1e-9)
    assert (np.diff(chosen) >= 0).all()


# --- tournaments

TOURNAMENTS = [
    (choosing.geometric(20), choosing.geometric(20)),
    (choosing.logarithmic(30), choosing.logarithmic(5)),
    (choosing.logarithmic(2), choosing.geometric(3)),
    (choosing.geometric(1), choosing.logarithmic(10)),
    (choosing.logarithmic(5), choosing.geometric(2), choosing.logarithmic(3)),
]
FINE = np.concatenate([[1.01, 1.1, 1.5], np.geomspace(2, 1e4, 40)])


def answers(epsilon):
    """A randomized response, of a bit and of its neighbour."""
    right = special.expit(epsilon)
    return np.array([1 - right, right]), np.array([right, 1 - right])


def best_of(p, runs):
    """The law of the best of outcomes in ascending order; the first is that there is none."""
    law = choosing.probabilities(runs)
    number = 1 + np.arange(len(law))
    below = [law @ np.minimum(c, 1.0) ** number for c in np.cumsum(p)]
    return np.diff(below, prepend=0.0)


def both_ways(p, q):
    kept = (p > 0) | (q > 0)
    p, q = p[kept], q[kept]
    return np.array([max(exact_divergence(a, p, q), exact_divergence(a, q, p)) for a in FINE])


def released(rungs, laws, ranks):
    """The exact law of what a tournament releases: rung i adds an outcome of rungs[i], and ranks[i]
    says which of all outcomes so far is the better one."""
    alive, nothing = np.ones(1), 0.0
    for p, runs, rank in zip(rungs, laws, ranks):
        alive = np.outer(alive, p).reshape(-1)
        best = best_of(np.append(nothing, alive[rank]), runs)
        nothing, alive = best[0], np.empty_like(alive)
        alive[rank] = best[1:]
    return np.append(nothing, alive)


def of_responses(epsilons, laws):
    """Exact divergences of tournaments of randomized responses, for many ways to score them; and
    the curve of each rung's response."""
    first, second = zip(*map(answers, epsilons))
    draw = np.random.default_rng(0)
    for middle in itertools.permutations(range(4)):
        ranks = [np.arange(2), np.array(middle), draw.permutation(8)][: len(laws)]
        p, q = (released(rungs, laws, ranks) for rungs in (first, second))
        assert math.isclose(p.sum(), 1, rel_tol=1e-9)
        yield both_ways(p, q)


def curves_of(epsilons):
    return [both_ways(*answers(epsilon)) for epsilon in epsilons]


@pytest.mark.by_default(
    "epsilons0-laws0",
    "epsilons0-laws1",
    "epsilons0-laws2",
    "epsilons0-laws3",
    "epsilons0-laws4",
)
@pytest.mark.parametrize("laws", TOURNAMENTS)
@pytest.mark.parametrize("epsilons", [(1.0, 0.3, 0.5), (0.2, 1.0, 0.1), (2.0, 0.1, 1.0)])
def test_a_tournament_is_never_below_the_truth(epsilons, laws):
    epsilons = epsilons[: len(laws)]
    bound = choosing.curve_of_tournament(FINE, curves_of(epsilons), laws)
    closest = 0.0
    for exact in of_responses(epsilons, laws):
        assert (exact <= bound * (1 + 1e-9)).all()
        closest = max(closest, (exact / bound).max())
    assert closest > 0.2  # it is a bound of this, not of anything
    assert (np.diff(bound) >= 0).all()


def test_the_first_rung_is_not_free():
    laws = (choosing.geometric(5), choosing.geometric(5))
    free = curve_of_choice(FINE, curves_of((2.0, 0.1))[1], laws[1])
    assert max((exact / free).max() for exact in of_responses((2.0, 0.1), laws)) > 1.02


def test_a_tournament_by_hand():
    """The theorem as printed, on a grid of orders, once for each rung."""
    orders, laws = FINE, (choosing.logarithmic(7), choosing.geometric(3))
    curves, want = (0.02 * orders, 0.05 * orders), 0.0
    for curve, law, eta in zip(curves, laws, (0, 1)):
        one = want + curve
        price = np.min((1 - 1 / orders) * one + math.log(1 / law.gamma) / orders)
        want = one + (1 + eta) * price + math.log(law.mean) / (orders - 1)
        want = np.minimum.accumulate(want[::-1])[::-1]
    found = choosing.curve_of_tournament(orders, curves, laws)
    np.testing.assert_allclose(found, want, rtol=1e-12)


def test_a_tournament_of_one_rung_is_a_choice():
    for runs in LAWS:
        value = choosing.epsilon_of_choice(RUN, runs, 1e-5)
        assert choosing.epsilon_of_tournament([RUN], [runs], 1e-5) == value
    # a rung in which always one run goes on is no rung
    alone, law = choosing.geometric(1), choosing.logarithmic(5)
    parts = [poisson(0.01, 1.0, 400), poisson(0.01, 1.0, 600)]
    both = choosing.epsilon_of_tournament(parts, [alone, law], 1e-5)
    assert math.isclose(both, choosing.epsilon_of_choice(RUN, law, 1e-5), rel_tol=1e-9)
    last = choosing.epsilon_of_tournament(parts, [law, alone], 1e-5)
    assert choosing.epsilon_of_choice(parts[0], law, 1e-5) < last < both


@pytest.mark.parametrize("law", [choosing.logarithmic, choosing.geometric])
def test_the_price_of_a_tournament(law):
    """Between that of its last choice of straight runs, and that of showing the best of each."""
    orders = choosing.COARSE_ORDERS
    one, louder = (rdp_events.curve(poisson(0.01, z, 1), orders) for z in (1.0, 0.9))

    def price(curves, means, delta=1e-5):
        laws = [law(mean) for mean in means]
        chosen = choosing.curve_of_tournament(orders, curves, laws)
        return rdp.convert(orders, chosen, delta).min()

    own, means = [100 * one, 200 * one, 600 * one], [4, 3, 2]
    value = price(own, means)
    straight = list(np.cumsum(own, axis=0))
    shown = sum(price([curve], [mean], 1e-5 / 3) for curve, mean in zip(straight, means))
    assert price(straight[-1:], means[-1:]) < value < 0.9 * shown
    for i in range(3):  # more runs, more rounds and less noise of any rung cost more
        replaced = lambda values, new, i=i: [*values[:i], new, *values[i + 1 :]]
        assert price(own, replaced(means, 2 * means[i])) > value
        assert price(replaced(own, 1.5 * own[i]), means) > value
        assert price(replaced(own, own[i] * louder / one), means) > value
    # an early round is chosen by more often than a late one
    assert price(own[::-1], means) > 1.05 * value


def test_each_run_that_is_started_may_go_wrong():
    """As many runs begin a rung as the means of all laws from it on multiply to."""
    laws = [choosing.geometric(4), choosing.logarithmic(3), choosing.geometric(2)]
    wrong, event = [1e-9, 2e-9, 4e-9], poisson(0.01, 1.0, 10)
    total = 24 * 1e-9 + 6 * 2e-9 + 2 * 4e-9
    clean = [Release((event,)) for _ in laws]
    for kind in ("overflow", "extra"):
        dirty = [Release((event,), **{kind: b}) for b in wrong]
        found = choosing.epsilon_of_tournament(dirty, laws, 1e-5)
        # the same of one choice among as many that go wrong as often
        curve = choosing._trade_off_curve(clean, laws)
        cost = curve.delta + total * (1 + np.exp(curve.epsilon))
        assert math.isclose(found, curve.epsilon[cost <= 1e-5].min(), rel_tol=1e-3)
        assert found > choosing.epsilon_of_tournament(clean, laws, 1e-5)
    # a rung in which nobody takes part costs its overflow alone
    empty = choosing.epsilon_of_tournament([Release(()), Release((event,))], laws[:2], 1e-5)
    assert choosing.epsilon_of_tournament([Release(())] * 2, laws[:2], 1e-5) == 0
    assert empty >= choosing.epsilon_of_choice(event, laws[1], 1e-5)


def test_one_run_costs_nothing():
    for one in (choosing.geometric(1), choosing.logarithmic(1)):
        assert one.gamma == 1 and choosing.probabilities(one).tolist() == [1.0]
        np.testing.assert_array_equal(curve_of_choice(ORDERS, CURVE, one), CURVE)
        value = choosing.epsilon_of_choice(RUN, one, 1e-5)
        assert math.isclose(value, rdp_events.epsilon(RUN, 1e-5)[0], rel_tol=1e-5)
    few = [choosing.epsilon_of_choice(RUN, choosing.geometric(m), 1e-5) for m in (1, 1.5, 3, 30)]
    assert few == sorted(few) and few[0] < few[1]


@pytest.mark.parametrize("runs", LAWS)
def test_laws(runs):
    law = choosing.probabilities(runs)
    number = 1 + np.arange(len(law))
    assert math.isclose(law.sum(), 1, rel_tol=1e-12)
    assert math.isclose(law @ number, runs.mean, rel_tol=1e-9)
    if runs.gamma == 1:
        want = np.ones(1)
    elif runs.name == "geometric":
        want = stats.geom.pmf(number, runs.gamma)
    else:
        want = stats.logser.pmf(number, 1 - runs.gamma)
    np.testing.assert_allclose(law, want, rtol=1e-8, atol=1e-20)


@pytest.mark.parametrize("runs", LAWS)
def test_draws_follow_the_law(runs):
    """A chi-square test of 20,000 draws; false alarm 1e-6 for each law."""
    drawn = choosing.draw(jax.random.key(3), runs, 20000)
    law = choosing.probabilities(runs)
    counts = np.bincount(drawn - 1, minlength=len(law)).astype(float)
    assert len(counts) == len(law) and counts.sum() == 20000
    cells = np.minimum(np.floor(np.cumsum(law) * 12), 11).astype(int)
    seen, due = np.bincount(cells, counts), np.bincount(cells, law) * 20000
    seen, due = seen[due > 5], due[due > 5]
    if len(due) > 1:
        assert stats.chisquare(seen, due * seen.sum() / due.sum()).pvalue > 1e-6
    else:
        assert (drawn == 1).all()


def test_draws_are_those_of_the_key():
    runs, key = choosing.geometric(10), jax.random.key(0)
    many = choosing.draw(key, runs, 5)
    assert np.array_equal(many, choosing.draw(key, runs, 5))
    assert isinstance(choosing.draw(key, runs), int) and choosing.draw(key, runs) >= 1
    assert not np.array_equal(many, choosing.draw(jax.random.key(1), runs, 5))
    assert many.tolist() == [29, 4, 9, 4, 14]  # on any machine


@pytest.mark.slow
def test_guarantees_and_series():
    plan = poisson_plan()
    known = jfl.guarantee(plan, 4, unit="example", view="server")
    runs = choosing.geometric(5)
    value = choosing.epsilon_of_choice(known, runs, 1e-5)
    assert known.release.overflow > 0 and value > known.epsilon
    clean = Release(known.release.alternatives)
    bare = choosing.epsilon_of_choice(clean, runs, 1e-5)
    assert bare < value
    # an overflow of any of the runs is paid
    curve = lambda release: choosing._trade_off_curve([release], [runs])
    paid = curve(Release(clean.alternatives, 1e-7))
    epsilon = curve(clean).epsilon_at(1e-7)
    cost = 5 * 1e-7 * (1 + math.exp(epsilon))
    before = np.linspace(0, epsilon, 4000)  # a delta holds for larger epsilons
    want = curve(clean).delta_at(before) + 5 * 1e-7 * (1 + np.exp(before))
    assert cost > 1e-6 and math.isclose(paid.delta_at(epsilon), want.min(), rel_tol=1e-3)
    series = events.series(events.poisson(0.1, events.gaussian(np.array([1.0, 3.0]))), [4, 5])
    parts = events.compose(poisson(0.1, 1.0, 4), poisson(0.1, 3.0, 5))
    for event in (series, events.compose(series), events.repeat(events.compose(series), 1)):
        np.testing.assert_allclose(
            choosing.epsilon_of_choice(event, runs, 1e-5),
            choosing.epsilon_of_choice(parts, runs, 1e-5),
            rtol=1e-3,
        )
    worst = Release((fixed(0.1, 3.0, 10), fixed(0.1, 1.0, 10)))
    want = choosing.epsilon_of_choice(worst.alternatives[1], runs, 1e-5)
    assert choosing.epsilon_of_choice(worst, runs, 1e-5) == want
    drawn = events.repeat(events.with_replacement(4, 100, events.gaussian(2.0)), 10)
    assert 0 < choosing.epsilon_of_choice(drawn, runs, 1e-5) < math.inf


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: choosing.geometric(0.5),
            r"choosing.geometric: expected a mean in \[1, 10000",
        ),
        (
            lambda: choosing.logarithmic(np.nan),
            "choosing.logarithmic: expected a single number mean > 0|finite",
        ),
        (
            lambda: curve_of_choice([2.0, 1.5], [0.1, 0.1], choosing.geometric(2)),
            r"expected orders \[n\] > 1, ascending",
        ),
        (lambda: curve_of_choice([2.0], [0.1], 3), "expected runs of choosing.geometric"),
        (lambda: choosing.epsilon_of_choice(RUN, 3, 1e-5), "expected runs of choosing.geometric"),
        (
            lambda: choosing.epsilon_of_tournament([RUN, RUN], [choosing.geometric(2)], 1e-5),
            "a release and a distribution for each of one or more rungs, but got 2 releases and 1 "
            "distributions",
        ),
        (lambda: choosing.epsilon_of_tournament([], [], 1e-5), "for each of one or more rungs"),
        (lambda: choosing.epsilon_of_tournament([RUN], [3], 1e-5), "runs of choosing.geometric"),
        (
            lambda: choosing.curve_of_tournament([2.0], [[1.0]], []),
            "a release and a distribution for each of one or more rungs, but got 1 releases and 0 "
            "distributions",
        ),
        (lambda: choosing.epsilon_of_choice(RUN, choosing.geometric(2), 2.0), "delta in"),
        (lambda: choosing.draw(jax.random.key(0), choosing.geometric(2), 0), "integer number"),
        (lambda: choosing.draw(0.5, choosing.geometric(2)), "a key such as"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_guarantee_without_releases_is_refused():
    claimed = Guarantee(1.0, 1e-5, "example", "replace_one", "server", "a paper")
    for one in (claimed, 1.0):
        with pytest.raises(
            NotAnalysable, match="an event, or a guarantee that contains its events"
        ):
            choosing.epsilon_of_choice(one, choosing.geometric(2), 1e-5)
