"""The price of choosing the best run: golden values, exact small cases, and the distributions of
how many runs."""

import math

import jax
import numpy as np
import pytest
from helpers.ledger_plans import fixed, poisson
from scipy import special, stats

from jfl.core.errors import NotAnalysable
from jfl.core.records import Guarantee
from jfl.privacy.accountants import choosing, events, rdp_events, truncation
from jfl.privacy.accountants.tightest import Release
from jfl.privacy.accountants.truncation import Shift

RUN = poisson(0.01, 1.0, 1000)
# at delta 1e-5, of dp_accounting 0.6.0's curve of RUN, a little too large between whole orders
GOLDEN = {
    choosing.geometric(10): 4.1032706564,
    choosing.logarithmic(10): 3.5226334451,
    choosing.geometric(100): 5.2700216081,
}
LAWS = [choosing.geometric(1), choosing.geometric(1000), choosing.logarithmic(20)]
FINE = np.concatenate([[1.01, 1.1, 1.5], np.geomspace(2, 1e4, 40)])


@pytest.mark.parametrize("runs", GOLDEN)
def test_golden_values(runs):
    value = choosing.epsilon_of_choice(RUN, runs, 1e-5)
    assert GOLDEN[runs] * (1 - 3e-4) < value <= GOLDEN[runs]
    of_curve = choosing._trade_off_curve(Release((RUN,)), runs).epsilon_at(1e-5)
    assert value * (1 - 1e-9) <= of_curve <= value * (1 + 2e-6)


# --- exact divergences


def both_ways(p, q):
    """The larger Renyi divergence of two distributions at the orders FINE."""
    kept = (p > 0) | (q > 0)
    p, q = np.log(p[kept]), np.log(q[kept])
    one = lambda a, p, q: special.logsumexp(a * p + (1 - a) * q) / (a - 1)
    return np.array([max(one(a, p, q), one(a, q, p)) for a in FINE])


def best_of(p, runs):
    """The distribution of the best of outcomes in ascending order: a power series of theirs."""
    law = choosing.probabilities(runs)
    number = 1 + np.arange(len(law))
    below = [law @ np.minimum(c, 1.0) ** number for c in np.cumsum(p)]
    return np.diff(below, prepend=0.0)


def answers(epsilon):
    """A randomized response, of a bit and of its neighbour."""
    right = special.expit(epsilon)
    return np.array([1 - right, right]), np.array([right, 1 - right])


@pytest.mark.parametrize("law", [choosing.geometric(20), choosing.logarithmic(20)])
def test_a_choice_among_randomized_responses_is_never_below_its_exact_divergence(law):
    responses = answers(1.0)
    bound = choosing._curve_of_choice(FINE, both_ways(*responses), law)
    exact = both_ways(*(best_of(response, law) for response in responses))
    assert (exact <= bound * (1 + 1e-9)).all() and (exact / bound).max() > 0.2
    assert (np.diff(bound) >= 0).all()


def test_the_curve_of_a_choice_is_that_of_the_theorem_as_printed():
    for law, eta in ((choosing.logarithmic(7), 0), (choosing.geometric(3), 1)):
        one = 0.05 * FINE
        price = np.min((1 - 1 / FINE) * one + math.log(1 / law.gamma) / FINE)
        want = one + (1 + eta) * price + math.log(law.mean) / (FINE - 1)
        want = np.minimum.accumulate(want[::-1])[::-1]
        np.testing.assert_allclose(choosing._curve_of_choice(FINE, one, law), want, rtol=1e-12)


@pytest.mark.parametrize("law", [choosing.geometric(1), choosing.logarithmic(1)])
def test_a_choice_of_one_run_costs_nothing(law):
    value = choosing.epsilon_of_choice(RUN, law, 1e-5)
    assert law.gamma == 1 and math.isclose(value, rdp_events.epsilon(RUN, 1e-5)[0], rel_tol=1e-5)


@pytest.mark.parametrize("kind", ["overflow", "extra"])
def test_each_run_may_go_wrong(kind):
    law, event = choosing.geometric(4), poisson(0.01, 1.0, 10)
    clean, dirty = Release((event,)), Release((event,), **{kind: 1e-9})
    found = choosing.epsilon_of_choice(dirty, law, 1e-5)
    curve = choosing._trade_off_curve(clean, law)
    cost = curve.delta + 4e-9 * (1 + np.exp(curve.epsilon))
    assert math.isclose(found, curve.epsilon[cost <= 1e-5].min(), rel_tol=1e-3)
    assert found > choosing.epsilon_of_choice(clean, law, 1e-5)
    assert choosing.epsilon_of_choice(Release(()), law, 1e-5) == 0  # no client takes part


def test_noise_of_each_run_may_leave_its_range():
    """Of 1e6 releases of 1e9 normals in each of 1e4 runs, on average."""
    law, event = choosing.geometric(1e4), events.repeat(events.gaussian(3000.0), 10**6)
    one = Shift(1 / 3000, 1e9, 2.0**-63, 1e6)
    lost = 1e-5 * 5e8 * 2.0**-63 * 1e10 + 1e4 * truncation.total([one])
    assert 0.5e-5 < lost < 0.6e-5
    found = choosing.epsilon_of_choice(Release((event,), shifts=(one,)), law, 1e-5)
    assert found == pytest.approx(choosing.epsilon_of_choice(event, law, 1e-5 - lost), rel=1e-9)
    more = Release((event,), shifts=(one._replace(times=1e7),))
    assert choosing.epsilon_of_choice(more, law, 1e-5) == math.inf


@pytest.mark.slow
def test_noise_that_changes_and_clients_that_differ():
    price = lambda one: choosing.epsilon_of_choice(one, choosing.geometric(5), 1e-5)
    series = events.series(events.poisson(0.1, events.gaussian(np.array([1.0, 3.0]))), [4, 5])
    parts = events.compose(poisson(0.1, 1.0, 4), poisson(0.1, 3.0, 5))
    for event in (series, events.repeat(events.compose(series), 1)):
        np.testing.assert_allclose(price(event), price(parts), rtol=1e-3)
    worst = Release((fixed(0.1, 3.0, 10), fixed(0.1, 1.0, 10)))
    assert price(worst) == price(worst.alternatives[1])


# --- how many runs


@pytest.mark.parametrize("runs", LAWS)
def test_draws_follow_the_distribution(runs):
    """A chi-square test of 20,000 draws; false alarm 1e-6 for each distribution."""
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
    drawn = choosing.draw(jax.random.key(3), runs, 20000)
    counts = np.bincount(drawn - 1, minlength=len(law)).astype(float)
    cells = np.minimum(np.floor(np.cumsum(law) * 12), 11).astype(int)
    seen, due = np.bincount(cells, counts), np.bincount(cells, law) * 20000
    seen, due = seen[due > 5], due[due > 5]
    assert seen.sum() > 19900
    if len(due) > 1:
        assert stats.chisquare(seen, due * seen.sum() / due.sum()).pvalue > 1e-6


def test_draws_are_those_of_the_key():
    runs, key = choosing.geometric(10), jax.random.key(0)
    assert choosing.draw(key, runs, 5).tolist() == [29, 4, 9, 4, 14]  # on any machine
    assert choosing.draw(jax.random.key(1), runs, 5).tolist() != [29, 4, 9, 4, 14]
    assert isinstance(choosing.draw(key, runs), int) and choosing.draw(key, runs) >= 1


CLAIMED = Guarantee(1.0, 1e-5, "example", "replace_one", "server", "a paper")
TWO = choosing.geometric(2)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: choosing.geometric(0.5), r"a mean in \[1, 10000"),
        (lambda: choosing.epsilon_of_choice(RUN, 3, 1e-5), "runs of choosing.geometric"),
        (lambda: choosing.epsilon_of_choice(CLAIMED, TWO, 1e-5), "that contains its events"),
        (lambda: choosing.draw(jax.random.key(0), TWO, 0), "integer number"),
    ],
)
def test_refusals(call, message):
    with pytest.raises((ValueError, NotAnalysable), match=message):
        call()
