"""The price of choosing the best run: golden values, exact small cases, and the distributions of
how many runs."""

import itertools
import math

import jax
import numpy as np
import pytest
from helpers.ledger_plans import fixed, poisson
from scipy import special, stats

from jfl.core.errors import NotAnalysable
from jfl.core.records import Guarantee
from jfl.privacy.accountants import choosing, events, rdp_events
from jfl.privacy.accountants.tightest import Release

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
    of_curve = choosing._trade_off_curve([Release((RUN,))], [runs]).epsilon_at(1e-5)
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


def released(rungs, laws, ranks):
    """The exact distribution of what a tournament releases: rung i adds an outcome of rungs[i], and
    ranks[i] says which of all outcomes so far is the better one."""
    alive, nothing = np.ones(1), 0.0
    for p, runs, rank in zip(rungs, laws, ranks):
        alive = np.outer(alive, p).reshape(-1)
        best = best_of(np.append(nothing, alive[rank]), runs)
        nothing, alive = best[0], np.empty_like(alive)
        alive[rank] = best[1:]
    return np.append(nothing, alive)


def of_responses(epsilons, laws):
    """Exact divergences of tournaments of randomized responses, for many ways to score them."""
    first, second = zip(*map(answers, epsilons))
    draw = np.random.default_rng(0)
    for middle in itertools.permutations(range(4) if len(laws) > 1 else [0]):
        ranks = [np.arange(2), np.array(middle), draw.permutation(8)][: len(laws)]
        p, q = (released(rungs, laws, ranks) for rungs in (first, second))
        assert math.isclose(p.sum(), 1, rel_tol=1e-9)
        yield both_ways(p, q)


@pytest.mark.parametrize(
    "epsilons, laws",
    [
        ((1.0,), (choosing.geometric(20),)),
        ((1.0, 0.3), (choosing.geometric(20), choosing.geometric(20))),
        ((2.0, 0.1), (choosing.logarithmic(2), choosing.geometric(3))),
        ((1.0, 0.3, 0.5), (choosing.logarithmic(5), *[choosing.geometric(2)] * 2)),
    ],
)
def test_a_choice_is_never_below_the_truth(epsilons, laws):
    curves = [both_ways(*answers(epsilon)) for epsilon in epsilons]
    bound = choosing.curve_of_tournament(FINE, curves, laws)
    closest = 0.0
    for exact in of_responses(epsilons, laws):
        assert (exact <= bound * (1 + 1e-9)).all()
        closest = max(closest, (exact / bound).max())
    assert closest > 0.2  # it is a bound of this, not of anything
    assert (np.diff(bound) >= 0).all()


def test_the_first_rung_is_not_free():
    laws = (choosing.geometric(5), choosing.geometric(5))
    free = choosing.curve_of_tournament(FINE, [both_ways(*answers(0.1))], laws[1:])
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


def test_rungs_of_one_run_are_none():
    """One run costs nothing, and a rung in which always one run goes on is no rung."""
    alone, law = choosing.geometric(1), choosing.logarithmic(5)
    known = rdp_events.epsilon(RUN, 1e-5)[0]
    for one in (alone, choosing.logarithmic(1)):
        value = choosing.epsilon_of_choice(RUN, one, 1e-5)
        assert one.gamma == 1 and math.isclose(value, known, rel_tol=1e-5)
    parts = [poisson(0.01, 1.0, 400), poisson(0.01, 1.0, 600)]
    both = choosing.epsilon_of_tournament(parts, [alone, law], 1e-5)
    assert math.isclose(both, choosing.epsilon_of_choice(RUN, law, 1e-5), rel_tol=1e-9)
    last = choosing.epsilon_of_tournament(parts, [law, alone], 1e-5)
    assert choosing.epsilon_of_choice(parts[0], law, 1e-5) < last < both


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
        (lambda: choosing.curve_of_tournament([2.0, 1.5], [[1, 1]], [TWO]), "> 1, ascending"),
        (lambda: choosing.curve_of_tournament([2.0], [[1.0]], []), "1 releases and 0 dist"),
        (lambda: choosing.epsilon_of_choice(RUN, 3, 1e-5), "runs of choosing.geometric"),
        (lambda: choosing.epsilon_of_choice(CLAIMED, TWO, 1e-5), "that contains its events"),
        (lambda: choosing.draw(jax.random.key(0), TWO, 0), "integer number"),
    ],
)
def test_refusals(call, message):
    with pytest.raises((ValueError, NotAnalysable), match=message):
        call()
