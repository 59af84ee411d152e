"""Budgets: filters that admit rounds whose noise and number are chosen while they run."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from helpers.ledger_plans import CLIENTS, DELTA, NOISY, close, make, poisson_plan
from scipy import integrate, optimize, stats

import jfl
from jfl import sampling
from jfl.core.errors import ArgumentError, NotAnalysable
from jfl.core.records import Fn
from jfl.privacy import budget as budgets
from jfl.privacy import guarantees
from jfl.privacy.accountants import events, rdp_events, truncation
from jfl.privacy.ledger.caveats import ADAPTIVE, PLANNED
from jfl.privacy.ledger.entry import shifts_of
from jfl.privacy.mechanisms import chain as mech
from jfl.sampling import batches

LEFT = DELTA * (1 - budgets.RESERVED)
STEPS = 3  # noisy releases of a client in a round of these plans


def full_plan(z, **changes):
    return make(
        **dict(rows=NOISY(z), batch=batches.full(), sampler=sampling.full(CLIENTS)) | changes
    )


def cohort_plan(z, rate=0.1):
    """Return a plan whose server adds noise to cohorts that are drawn by Poisson sampling."""
    noise = NOISY(z, adjacency="add_remove")
    return make(sampler=sampling.poisson(CLIENTS, rate, CLIENTS), release=noise)


def sampled_divergence(order, rate, z):
    """Return the Renyi divergence of an integer order of a sampled Gaussian, by its sum."""
    k = np.arange(order + 1)
    terms = stats.binom.pmf(k, order, rate) * np.exp(k * (k - 1) / (2 * z**2))
    return math.log(terms.sum()) / (order - 1)


def most_mu(epsilon, delta):
    """Return the largest mu whose Gaussian mechanism is (epsilon, delta)-private."""
    profile = lambda mu: (
        stats.norm.cdf(mu / 2 - epsilon / mu)
        - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    )
    return optimize.brentq(lambda mu: profile(mu) - delta, 1e-2, 1e2, xtol=1e-12)


# --- the two filters, against formulas


@pytest.mark.parametrize("epsilon, z", [(1.0, 20.0), (4.0, 8.0)])
def test_gaussians_spend_mu_squared(epsilon, z):
    plan = full_plan(z)
    fresh = jfl.budget(plan, epsilon=epsilon, delta=DELTA)
    squared, each = most_mu(epsilon, LEFT) ** 2, STEPS / z**2
    assert fresh.order is None and fresh.spent == 0
    close(fresh.limit, squared, 1e-5)
    assert fresh.limit <= squared
    number = fresh.max_rounds(plan, 10**6)
    assert number == math.floor(squared / each)
    close(fresh.spend(plan, number).spent, number * each, 1e-12)
    # the filter costs nothing here, except for the share of delta that it reserves
    best = jfl.calibrate(plan, epsilon=epsilon, over="rounds")
    assert number <= best <= number * 1.01 + 1


def test_sampled_rounds_spend_the_divergence_of_one_order():
    order, rate, z = 8, 0.1, 2.0
    fresh = jfl.budget(cohort_plan(z, rate), epsilon=2.0, order=order)
    limit = 2.0 - math.log1p(-1 / order) + math.log(LEFT * order) / (order - 1)
    close(fresh.limit, limit, 1e-8)
    assert fresh.limit <= limit
    each = sampled_divergence(order, rate, z)
    for n in (1, 7):
        close(fresh.spend(cohort_plan(z, rate), n).spent, n * each, 1e-6)
    assert fresh.max_rounds(cohort_plan(z, rate), 10**6) == math.floor(limit / each)


@pytest.mark.parametrize("z, rate, epsilon", [(4.0, 0.1, 1.0), (2.0, 0.1, 2.0), (8.0, 0.2, 4.0)])
def test_the_chosen_order_admits_most_rounds(z, rate, epsilon):
    plan = cohort_plan(z, rate)
    chosen = jfl.budget(plan, epsilon=epsilon)
    number = chosen.max_rounds(plan, 10**5)
    for order in (3, 5, 8, 12, 20, 40, chosen.order * 1.1, chosen.order * 0.9):
        try:
            other = jfl.budget(plan, epsilon=epsilon, order=order)
        except ArgumentError:  # this order leaves nothing
            continue
        assert other.max_rounds(plan, 10**5) <= number + 1
    # about what the best order proves for a fixed number of rounds, and never more
    proved = jfl.epsilons(plan, np.array([number, math.ceil(number * 1.02) + 2]))
    assert proved[0] <= epsilon < proved[1]


def test_the_filter_with_more_rounds_is_chosen():
    """Samples that take almost everybody gain nothing from a Renyi divergence."""
    assert jfl.budget(cohort_plan(2.0, 0.999), epsilon=2.0).order is None
    assert jfl.budget(cohort_plan(2.0, 0.1), epsilon=2.0).order is not None
    both = [jfl.budget(cohort_plan(2.0, r), epsilon=2.0) for r in (0.999, 0.1)]
    # without sampling, both filters count all Gaussians
    close(both[0].spend(cohort_plan(4.0, 0.1), 1).spent, 1 / 4.0**2, 1e-12)
    close(both[1].spend(full_release(4.0), 1).spent, both[1].order / (2 * 4.0**2), 1e-9)


def full_release(z):
    return make(sampler=sampling.full(CLIENTS), release=NOISY(z, adjacency="add_remove"))


# --- sums of losses


def test_no_choice_of_noise_exceeds_the_limit():
    draw = np.random.default_rng(0)
    for first in (full_release(8.0), cohort_plan(2.0)):
        spent = jfl.budget(first, epsilon=2.0)
        losses = []
        while spent.rounds < 400:
            z = float(draw.uniform(2.0, 30.0))
            plan = cohort_plan(z) if draw.random() < 0.5 else full_release(z)
            most = spent.max_rounds(plan, 50)
            if most < 50:
                with pytest.raises(ArgumentError, match=f"at most {most} rounds"):
                    spent.spend(plan, most + 1)
            if not most:
                break
            after = spent.spend(plan, most)
            losses.append(after.spent - spent.spent)
            spent = after
        assert len(losses) > 1
        close(spent.spent, sum(losses), 1e-12)
        assert 0.5 * spent.limit < spent.spent <= spent.limit


def test_the_order_does_not_follow_later_plans():
    """An order that is chosen afterwards would admit more, and prove nothing."""
    early, late = cohort_plan(1.2), cohort_plan(20.0)
    fixed = jfl.budget(early, epsilon=4.0)
    assert fixed.spend(early, 3).spend(late, 3).order == fixed.order
    alone = jfl.budget(late, epsilon=4.0)
    assert alone.order > 1.2 * fixed.order
    assert fixed.max_rounds(late, 10**6) < alone.max_rounds(late, 10**6)


def test_rounds_of_a_schedule_continue_where_they_ended():
    levels = np.float32([9.0, 6.0, 12.0, 7.0, 9.0, 30.0])
    noise = lambda r: jax.numpy.asarray(levels)[r % 6] * 0.5
    plan = full_plan(1.0, rows=NOISY(std=Fn(noise)))
    fresh = jfl.budget(plan, epsilon=16.0, rounds=12)
    z = mech.multipliers(plan.algorithm.releases[0].mechanism, 12, CLIENTS)[:, 0]
    sums = np.cumsum(STEPS / np.float64(z) ** 2)
    for n in (1, 5, 9):
        close(fresh.spend(plan, n).spent, sums[n - 1], 1e-6)
        close(fresh.spend(plan, n).spend(plan, 2).spent, sums[n + 1], 1e-6)
    limit = dataclasses.replace(fresh, limit=(sums[6] + sums[7]) / 2)
    assert limit.max_rounds(plan, 12) == 7
    assert limit.spend(plan, 4).max_rounds(plan, 8) == 3


def test_rounds_that_do_not_fit_are_not_evaluated(monkeypatch):
    """A schedule is evaluated in Python, once per round."""
    asked, entry = [], budgets._entry
    noted = lambda plan, rounds, *args, **more: (
        asked.append(rounds) or entry(plan, rounds, *args, **more)
    )
    plan = full_plan(1.0, rows=NOISY(std=Fn(lambda r: 25.0 + 0.1 * jax.numpy.float32(r))))
    fresh = jfl.budget(plan, epsilon=2.0)
    monkeypatch.setattr(budgets, "_entry", noted)
    monkeypatch.setattr(budgets, "FIRST_ROUNDS", 50)
    number = fresh.max_rounds(plan, 10**6)
    assert asked == [50, 400] and number > 50
    z = mech.multipliers(plan.algorithm.releases[0].mechanism, number + 1, CLIENTS)[:, 0]
    sums = np.cumsum(STEPS / np.float64(z) ** 2)
    assert sums[number - 1] <= fresh.limit < sums[number]


@pytest.mark.parametrize("rate", [None, 0.1])
def test_one_order_gives_the_curve_of_that_order(rate):
    """Also of so many levels that one compiled program computes them."""
    release = events.gaussian(np.linspace(1.0, 3.0, 40))
    event = release if rate is None else events.poisson(rate, release)
    curves = rdp_events.level_curves(event, rdp_events.ORDERS, 40)
    one = rdp_events.level_curves(event, rdp_events.ORDERS[70:71], 40)
    np.testing.assert_allclose(one[:, 0], curves[:, 70], rtol=1e-13)


def test_the_worst_client_counts():
    levels = np.repeat(np.float32([4.0, 8.0]), CLIENTS // 2)
    fresh = jfl.budget(full_plan(levels), epsilon=4.0)
    once = fresh.spend(full_plan(levels), 2).spend(full_plan(levels[::-1].copy()), 1)
    close(once.spent, 3 * STEPS / 4.0**2, 1e-12)
    assert jfl.budget(poisson_plan(), epsilon=4.0).unit == "example"


# --- delta


def test_overflows_and_the_range_of_noise_are_paid_by_a_share_of_delta():
    plan = poisson_plan(batch=batches.poisson(8.0, capacity=36), sizes=np.full(CLIENTS, 100))
    fresh = dataclasses.replace(jfl.budget(plan, epsilon=2.0), limit=math.inf)
    rate = float(np.float32(8.0) / np.float32(100))
    each = STEPS * float(stats.binom.sf(36, 100, rate)) * (1 + math.exp(2.0))
    entry = budgets._entry(plan, 5, "example", "server", "add_remove")
    ideal = budgets.lost_of(entry, np.array([5]), DELTA)[0]
    close(fresh.spend(plan, 5).lost, 5 * each + ideal, 1e-4)
    most = budgets.RESERVED * DELTA / (each + ideal / 5)
    close(fresh.max_rounds(plan, 10**9), most, 1e-4)


def test_all_of_delta_is_accounted_for():
    """What is left, in ideal noise, and all that is lost are never more than delta."""
    plan = full_release(4.0)
    fresh = dataclasses.replace(jfl.budget(plan, epsilon=2.0), limit=math.inf)
    entry = budgets._entry(plan, 9, "client", "third_party", "add_remove")
    lost = fresh.spend(plan, 9).lost
    assert 0 < lost < budgets.RESERVED * DELTA
    close(lost, DELTA - truncation.left_of(DELTA, shifts_of(entry, 9)), 1e-6)


# --- adaptive choices, by exact integrals


def adaptive_divergence(order, first, rate, rule, rounds_of):
    """Return the divergence of one sampled round, and of those that its outcome chooses.

    Args:
        order: the order.
        first: the noise multiplier of the first round.
        rate: the sampling rate.
        rule: an outcome of the first round -> the noise multiplier of the others.
        rounds_of: this noise multiplier -> how many rounds follow.
    """
    density = lambda y, at: stats.norm.pdf(y, at, first)

    def integrand(y):
        ratio = (1 - rate) + rate * density(y, 1.0) / density(y, 0.0)
        z = rule(y)
        later = rounds_of(z) * sampled_divergence(order, rate, z)
        return density(y, 0.0) * ratio**order * math.exp((order - 1) * later)

    points = np.append(np.linspace(-12 * first, 14 * first, 53), 0.5)
    total = sum(
        integrate.quad(integrand, low, high)[0]
        for low, high in zip(np.sort(points), np.sort(points)[1:])
    )
    return math.log(total) / (order - 1)


def test_noise_may_depend_on_what_was_released():
    """One round more than the budget admits exceeds its limit, whatever is chosen."""
    order, rate, first = 8, 0.1, 2.0
    fresh = jfl.budget(cohort_plan(first, rate), epsilon=2.0, order=order)
    after = fresh.spend(cohort_plan(first, rate), 1)
    rule = lambda y: 1.5 if y > 0.5 else 3.0
    admitted = {z: after.max_rounds(cohort_plan(z, rate), 10**4) for z in (1.5, 3.0)}
    assert 0 < admitted[1.5] < admitted[3.0]
    found = adaptive_divergence(order, first, rate, rule, admitted.get)
    assert 0.9 * fresh.limit < found <= fresh.limit
    more = adaptive_divergence(order, first, rate, rule, lambda z: admitted[z] + 1)
    assert more > fresh.limit


def test_gaussian_noise_may_depend_on_what_was_released():
    """Hockey-stick divergence, by an integral over the first of two releases: the second one spends
    the rest of the budget if the first is in an interval, and nothing otherwise."""
    epsilon, first = 1.0, 6.0
    fresh = jfl.budget(full_release(first), epsilon=epsilon)
    after = fresh.spend(full_release(first), 1)
    rest = math.sqrt(after.limit - after.spent)
    mu = 1 / first

    def delta(scale, low, high):
        def integrand(y):
            loss = mu * y - mu**2 / 2  # of the first release
            left = epsilon - loss
            m = scale * rest if low < y < high else 1e-9
            profile = stats.norm.cdf(m / 2 - left / m) - math.exp(left) * stats.norm.cdf(
                -m / 2 - left / m
            )
            return stats.norm.pdf(y, mu) * profile

        points = np.sort(np.append(np.linspace(-9, 9, 37), [low, high]))
        return sum(integrate.quad(integrand, a, b)[0] for a, b in zip(points, points[1:]))

    for low, high in ((-20, 20), (0.0, 20), (-20, 0.5), (1.0, 3.0)):
        assert delta(1.0, low, high) <= LEFT * (1 + 1e-6)
    assert delta(1.02, -20, 20) > LEFT  # slightly more than the rest


def test_clients_that_are_not_always_available():
    """Every round counts as if the client were available, so that rounds have separate losses."""
    release = NOISY(4.0, adjacency="add_remove")
    of = lambda sampler: make(sampler=sampler, release=release)
    available = of(sampling.available_poisson(CLIENTS, 0.1, capacity=CLIENTS))
    always = of(sampling.poisson(CLIENTS, 0.1, capacity=CLIENTS))
    budget, expected = (jfl.budget(p, epsilon=2.0, view="third_party") for p in (available, always))
    assert (budget.order, budget.limit) == (expected.order, expected.limit)
    assert budget.max_rounds(available, 10**6) == expected.max_rounds(always, 10**6) > 1


# --- what is refused, and what is said


def test_rounds_without_a_loss_of_their_own_are_refused():
    noise = NOISY(4.0)
    in_bins = sampling.balls_in_bins(CLIENTS, 4)
    allocated = sampling.random_allocation(CLIENTS, 4)
    apart = sampling.min_separation(CLIENTS, 5, 4)
    for sampler in (in_bins, allocated, apart):
        with pytest.raises(NotAnalysable, match="privacy loss of their own.*jfl.guarantee"):
            jfl.budget(make(sampler=sampler, release=noise), epsilon=2.0)
    # as many rounds as have a bound each, of which fewer rounds have one together
    rising = NOISY(std=Fn(lambda r: 2.0 + jax.numpy.float32(r)))
    spent = jfl.budget(full_plan(4.0, rows=None, release=NOISY(4.0)), epsilon=2.0)
    for release, rounds in ((noise, 10**7), (rising, 9)):
        plan = make(sampler=apart, release=release)
        with pytest.raises(NotAnalysable, match="clients in rotation"):
            jfl.budget(plan, epsilon=2.0, rounds=rounds)
        with pytest.raises(NotAnalysable, match="clients in rotation"):
            spent.max_rounds(plan, rounds)
    correlated = jfl.chain(
        jfl.clip_l2(0.5),
        jfl.total(),
        jfl.correlated(4.0, jfl.strategies.square_root(8)),
        jfl.divide(8.0),
        adjacency="replace_one",
    )
    with pytest.raises(NotAnalysable, match="correlated over rounds"):
        jfl.budget(make(sampler=sampling.full(CLIENTS), release=correlated), epsilon=2.0)


def test_arguments_are_checked():
    plan = full_release(4.0)
    with pytest.raises(ArgumentError, match="a plan with noise"):
        jfl.budget(make(), epsilon=2.0)
    for order in (1.0, 0.5, 8, 1e7, math.nan):
        with pytest.raises(ArgumentError, match=r"order in \(116, 1e\+06\] for epsilon=0.1"):
            jfl.budget(plan, epsilon=0.1, order=order)
    assert jfl.budget(plan, epsilon=0.1, order=117).limit > 0
    for wrong in (dict(epsilon=-1.0), dict(epsilon=2.0, delta=0.0), dict(epsilon=2.0, unit="row")):
        with pytest.raises(ArgumentError):
            jfl.budget(plan, **wrong)


@pytest.mark.usefixtures("endless_noise")
def test_laplace_noise_needs_an_order():
    laplace = jfl.chain(
        jfl.clip_l1(0.5), jfl.total(), jfl.laplace(40.0), jfl.divide(8.0), adjacency="replace_one"
    )
    plan = make(sampler=sampling.full(CLIENTS), release=laplace)
    with pytest.raises(NotAnalysable, match="Give jfl.budget an order"):
        jfl.budget(full_release(4.0), epsilon=2.0, adjacency="add_remove").max_rounds(
            dataclasses.replace(plan, release=dataclasses.replace(laplace, adjacency="add_remove")),
            5,
        )
    assert jfl.budget(plan, epsilon=2.0).order is not None
    assert jfl.budget(plan, epsilon=2.0).max_rounds(plan, 100) > 1


def test_a_budget_proves_its_epsilon():
    plan = cohort_plan(4.0)
    spent = jfl.budget(plan, epsilon=2.0).spend(plan, 3)
    proof, fixed = spent.guarantee(), guarantees.guarantee(plan, 3)
    assert (proof.epsilon, proof.delta, proof.status) == (2.0, 1e-5, "proved")
    assert (proof.unit, proof.view, proof.adjacency) == (fixed.unit, fixed.view, fixed.adjacency)
    assert proof.method == f"rdp_filter, order {spent.order:.4g}"
    assert ADAPTIVE in proof.caveats and set(fixed.caveats) <= set(proof.caveats)
    assert repr(spent).startswith("Budget: 3 rounds spent ")
    assert "proved, client, add_remove, third_party, rdp_filter" in repr(spent)
    assert jax.tree.leaves(spent) == []


def test_a_list_of_segments_says_that_it_was_planned():
    plan = cohort_plan(4.0)
    assert PLANNED in guarantees.guarantee([(plan, 3), (plan, 2)]).caveats
    assert PLANNED not in guarantees.guarantee([(plan, 3)]).caveats
    assert PLANNED not in guarantees.guarantee(plan, 3).caveats
