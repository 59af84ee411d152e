"""The price of choosing the best run: golden values, exact small cases, and the laws of how many
runs."""

import math

import jax
import numpy as np
import pytest
from helpers.ledger_plans import fixed, poisson, poisson_plan
from scipy import special, stats

import jfl
from jfl.core.errors import NotAnalysable
from jfl.core.records import Guarantee
from jfl.privacy.accountants import choosing, events, rdp_events, rdp_on_host
from jfl.privacy.accountants.curves import Release

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
    choosing.poisson(10): 4.3294976803,
    choosing.geometric(10): 4.1032706564,
    choosing.logarithmic(10): 3.5226334451,
    choosing.truncated_negative_binomial(10, 0.5): 3.8305964056,
    choosing.poisson(100): 16.396757,
    choosing.geometric(100): 5.2700216081,
}
LAWS = [
    choosing.poisson(1),
    choosing.poisson(30),
    choosing.geometric(2),
    choosing.logarithmic(20),
    choosing.truncated_negative_binomial(5, 0.5),
    choosing.truncated_negative_binomial(5, 4.0),
    choosing.truncated_negative_binomial(1, 3.0),
    choosing.truncated_negative_binomial(1000, 0.01),
]


@pytest.mark.parametrize("runs", GOLDEN)
def test_golden_values(runs):
    chosen = choosing.curve_of_choice(ORDERS, CURVE, runs)
    assert math.isclose(rdp_on_host.convert(ORDERS, chosen, 1e-5).min(), GOLDEN[runs], rel_tol=1e-7)
    # on exact curves of all orders it is a little less
    value = choosing.epsilon_of_choice(RUN, runs, 1e-5)
    assert GOLDEN[runs] * (1 - 3e-4) < value <= GOLDEN[runs]
    of_curve = choosing.choice(RUN, runs).epsilon_at(1e-5)
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
    number, law = np.arange(len(choosing.probabilities(runs))), choosing.probabilities(runs)
    number = number + (0 if runs.law == "poisson" else 1)

    def of_best(p):  # P(best <= i) = sum over k of P(k runs) P(one <= i)^k; nothing, if k = 0
        below = np.array([law @ np.minimum(c, 1.0) ** number for c in np.cumsum(p)])
        none = law[0] if runs.law == "poisson" else 0.0
        return np.append(none, np.diff(np.append(none, below)))

    kept = slice(0 if runs.law == "poisson" else 1, None)
    best_p, best_q = of_best(p)[kept], of_best(q)[kept]
    assert math.isclose(best_p.sum(), 1, rel_tol=1e-9)
    chosen = choosing.curve_of_choice(orders, curve, runs)
    for order, bound in zip(orders, chosen):
        assert exact_divergence(order, best_p, best_q) <= bound * (1 + 1e-9)
        assert exact_divergence(order, best_q, best_p) <= bound * (1 + 1e-9)
    assert (np.diff(chosen) >= 0).all()


def test_one_run_costs_nothing():
    for shape in (0.0, 0.5, 1.0, 7.0):
        one = choosing.truncated_negative_binomial(1, shape)
        assert one.gamma == 1 and choosing.probabilities(one).tolist() == [1.0]
        np.testing.assert_array_equal(choosing.curve_of_choice(ORDERS, CURVE, one), CURVE)
        value = choosing.epsilon_of_choice(RUN, one, 1e-5)
        assert math.isclose(value, rdp_events.epsilon(RUN, 1e-5)[0], rel_tol=1e-5)
    few = [choosing.epsilon_of_choice(RUN, choosing.geometric(m), 1e-5) for m in (1, 1.5, 3, 30)]
    assert few == sorted(few) and few[0] < few[1]


@pytest.mark.parametrize("runs", LAWS)
def test_laws(runs):
    law = choosing.probabilities(runs)
    first = 0 if runs.law == "poisson" else 1
    number = np.arange(len(law)) + first
    assert math.isclose(law.sum(), 1, rel_tol=1e-12)
    assert math.isclose(law @ number, runs.mean, rel_tol=1e-9)
    if runs.shape == 1:
        want = stats.geom.pmf(number, runs.gamma)
    elif runs.shape == 0:
        want = stats.logser.pmf(number, 1 - runs.gamma)
    elif runs.law == "poisson":
        want = stats.poisson.pmf(number, runs.mean)
    else:
        eta, gamma = runs.shape, runs.gamma
        want = np.ones(1) if gamma == 1 else stats.nbinom.pmf(number, eta, gamma)
        want = want / (1 if gamma == 1 else -math.expm1(eta * math.log(gamma)))
    np.testing.assert_allclose(law, want, rtol=1e-8, atol=1e-20)


@pytest.mark.parametrize("runs", LAWS)
def test_draws_follow_the_law(runs):
    """A chi-square test of 20,000 draws; false alarm 1e-6 for each law."""
    drawn = choosing.draw(jax.random.key(3), runs, 20000)
    law = choosing.probabilities(runs)
    first = 0 if runs.law == "poisson" else 1
    counts = np.bincount(drawn - first, minlength=len(law)).astype(float)
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
    paid = choosing.choice(Release(clean.alternatives, 1e-7), runs)
    epsilon = choosing.choice(clean, runs).epsilon_at(1e-7)
    cost = 5 * 1e-7 * (1 + math.exp(epsilon))
    before = np.linspace(0, epsilon, 4000)  # a delta holds for larger epsilons
    want = choosing.choice(clean, runs).delta_at(before) + 5 * 1e-7 * (1 + np.exp(before))
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
            r"truncated_negative_binomial: need a mean in \[1, 10000",
        ),
        (
            lambda: choosing.poisson(np.nan),
            "choosing.poisson: need a single number mean > 0|finite",
        ),
        (lambda: choosing.truncated_negative_binomial(3, -0.1), "need shape >= 0"),
        (
            lambda: choosing.curve_of_choice([2.0, 1.5], [0.1, 0.1], choosing.poisson(2)),
            r"need orders \[n\] > 1, ascending",
        ),
        (
            lambda: choosing.curve_of_choice([1.5, 2.0], [0.1], choosing.poisson(2)),
            r"need a curve \[2\] of numbers >= 0",
        ),
        (lambda: choosing.curve_of_choice([2.0], [0.1], 3), "need runs of choosing.geometric"),
        (lambda: choosing.epsilon_of_choice(RUN, 3, 1e-5), "need runs of choosing.geometric"),
        (lambda: choosing.epsilon_of_choice(RUN, choosing.poisson(2), 2.0), "delta in"),
        (lambda: choosing.draw(jax.random.key(0), choosing.poisson(2), 0), "whole number number"),
        (lambda: choosing.draw(0.5, choosing.poisson(2)), "a key such as"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_guarantee_without_releases_is_refused():
    claimed = Guarantee(1.0, 1e-5, "example", "replace_one", "server", "a paper")
    for one in (claimed, 1.0):
        with pytest.raises(NotAnalysable, match="an event, or a guarantee that knows its releases"):
            choosing.epsilon_of_choice(one, choosing.geometric(2), 1e-5)
