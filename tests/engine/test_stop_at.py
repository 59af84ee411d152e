"""Runs that stop at a privacy budget."""

import dataclasses

import jax
import pytest
from helpers.problems import CLIENTS, make_federation, same_bits

import jfl
from jfl.core.errors import ArgumentError

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def plan_of():
    fed = make_federation(classes=3)
    task = jfl.models.logistic(fed)

    def make(noise):
        chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(noise), jfl.divide(2))
        grad = jfl.private_grad(task.loss, chain)
        algorithm = jfl.algorithms.fedavg(grad, batch=jfl.batches.full())
        return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))

    return make


def test_a_run_ends_before_the_round_that_exceeds_its_budget(plan_of):
    plan = plan_of(20.0)
    out = jfl.simulate(KEY, plan, 100, stop_at=(2.0, 1e-5))
    number = jfl.budget(plan, epsilon=2.0).max_rounds(plan, 100)
    assert int(out.run.round) == out.budget.rounds == number < 100
    same_bits(out.params, jfl.simulate(KEY, plan, number).params)
    assert jfl.guarantee(plan, number).epsilon <= 2.0
    assert jfl.guarantee(plan, number + 1).epsilon > 2.0
    assert out.budget.stopped == f"it admits {number} of 100 rounds"
    assert out.budget.stopped in repr(out) and out.budget.guarantee().epsilon == 2.0
    assert jax.tree.map(lambda x: x, out).budget == out.budget


def test_a_budget_continues_with_its_run(plan_of):
    first, second = plan_of(20.0), plan_of(10.0)
    one = jfl.simulate(KEY, first, 4, stop_at=(2.0, 1e-5))
    assert (one.budget.rounds, one.budget.stopped) == (4, "")
    two = jfl.simulate(KEY, second, 50, start=one.run, stop_at=one.budget)
    by_hand = jfl.budget(first, epsilon=2.0).spend(first, 4)
    number = by_hand.max_rounds(second, 50)
    assert int(two.run.round) == 4 + number == two.budget.rounds
    assert two.budget.spent == by_hand.spend(second, number).spent
    same_bits(two.params, jfl.simulate(KEY, second, number, start=one.run).params)
    with pytest.raises(ArgumentError, match="admits a round of this plan"):
        jfl.simulate(KEY, second, 1, start=two.run, stop_at=two.budget)
    # rounds that were not counted
    for start, stop_at in ((one.run, (2.0, 1e-5)), (two.run, one.budget), (None, one.budget)):
        with pytest.raises(ArgumentError, match="a budget that has counted the"):
            jfl.simulate(KEY, second, 1, start=start, stop_at=stop_at)
    # as many rounds, but of a plan with more noise
    other = jfl.simulate(KEY, plan_of(30.0), number, start=one.run, stop_at=one.budget)
    assert other.budget.rounds == two.budget.rounds
    with pytest.raises(ArgumentError, match="of another run"):
        jfl.simulate(KEY, first, 1, start=two.run, stop_at=other.budget)
    jfl.simulate(KEY, first, 1, start=other.run, stop_at=by_hand.spend(plan_of(30.0), number))


def test_a_budget_does_not_take_one_run_with_paired_noise_for_another(plan_of):
    noisy, quiet = (dataclasses.replace(plan_of(z), paired_noise=True) for z in (20.0, 10.0))
    one, other = (jfl.simulate(KEY, p, 4, stop_at=(9.0, 1e-5)) for p in (noisy, quiet))
    for plan in (noisy, plan_of(20.0)):
        with pytest.raises(ArgumentError, match="runs with paired_noise, which it cannot tell"):
            jfl.simulate(KEY, plan, 1, start=other.run, stop_at=one.budget)
    by_hand = jfl.budget(quiet, epsilon=9.0).spend(quiet, 4)
    jfl.simulate(KEY, noisy, 1, start=other.run, stop_at=by_hand)


def test_only_rounds_that_ran_are_spent(plan_of):
    plan = plan_of(20.0)
    out = jfl.simulate(
        KEY, plan, 6, evaluate_every=2, callbacks=[lambda moment: True], stop_at=(2.0, 1e-5)
    )
    assert out.budget.rounds == int(out.run.round) == 2
    assert out.budget.stopped == ""


@pytest.mark.parametrize("wrong", [2.0, (2.0,), "2,1e-5", (-1.0, 1e-5), (2.0, 2.0)])
def test_stop_at_is_checked(plan_of, wrong):
    with pytest.raises(ArgumentError):
        jfl.simulate(KEY, plan_of(20.0), 2, stop_at=wrong)
