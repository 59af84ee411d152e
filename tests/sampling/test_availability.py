"""Clients that can be reached at some hours: who is drawn, what it proves, what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import make_federation, same_bits, squared, start_params

import jfl
from jfl.core.errors import NotAnalysable
from jfl.runs import build
from jfl.runs.config import Config

C, HOURS = 7, 4
PATTERN = np.array([[1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1], [1] * 7])


def drawn(sampler, rounds, key=0):
    """Bool[rounds, C]: who takes part."""
    ids = jax.jit(jax.vmap(lambda r: sampler.draw(jax.random.key(key), r).ids))(jnp.arange(rounds))
    return (np.asarray(ids)[:, :, None] == np.arange(C)).any(1)


def plan_of(sampler, z=1.0):
    task = jfl.task(start_params(), squared)
    release = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(z), jfl.divide(3.0))
    algorithm = jfl.algorithms.fedavg(jfl.grad(squared), steps=1, batch=jfl.batches.full())
    return jfl.plan(make_federation(), task, algorithm, sampler, release=release)


def test_only_clients_that_can_be_reached_come_each_as_often_as_its_rate():
    """Counts within 5 deviations: a false alarm in 1 of 100,000 seeds; other rates are seen."""
    rounds = 4000
    came = drawn(jfl.sampling.available_poisson(C, 0.4, PATTERN, capacity=C), rounds)
    can = PATTERN[np.arange(rounds) % HOURS].astype(bool)
    assert not came[~can].any()
    seen, trials = came.sum(0), can.sum(0)
    off = lambda rate: np.abs(seen - rate * trials) / np.sqrt(rate * (1 - rate) * trials)
    assert off(0.4).max() < 5 and off(0.5).min() > 5
    both = (came[:, 0] & came[:, 1])[can[:, 0] & can[:, 1]]  # on their own
    assert abs(both.mean() - 0.16) < 5 * np.sqrt(0.16 * 0.84 / len(both))


def test_days_of_clients_are_spread_over_the_clock():
    sampler = jfl.sampling.available_poisson(C, 1.0, period=24, awake=0.5)
    awake = np.asarray(sampler.available)
    assert awake.shape == (24, C) and (awake.sum(0) == 12).all()
    begins = (awake & ~np.roll(awake, 1, 0)).argmax(0)
    assert begins.tolist() == sorted(begins.tolist()) and begins[0] == 0 and begins[-1] > 18
    assert float(sampler.expected) == pytest.approx(C / 2) and sampler.at_once == 4
    assert (drawn(sampler, 48) == np.tile(awake, (2, 1))).all()
    rarely = jfl.sampling.available_poisson(3, 1.0, period=5, awake=0.01)
    assert rarely.available.sum(0).tolist() == [1, 1, 1]


def test_it_is_proved_as_poisson_and_an_overflow_is_of_those_who_can_be_reached():
    of = lambda sampler: jfl.guarantee(plan_of(sampler), 20, delta=1e-5)
    mine = of(jfl.sampling.available_poisson(C, 0.4, PATTERN, capacity=C))
    theirs = of(jfl.sampling.poisson(C, 0.4, capacity=C))
    assert mine.status == "proved" and mine.unit == "client" and mine.adjacency == "add_remove"
    assert mine.epsilon == theirs.epsilon
    few = PATTERN[:3]  # three at once: room for three is room for all of them
    enough = of(jfl.sampling.available_poisson(C, 0.4, few, capacity=3))
    assert enough.epsilon == mine.epsilon
    forged = jfl.sampling.available_poisson(C, 0.4, PATTERN, capacity=3)
    with pytest.raises(NotAnalysable):  # 7 at once find room for 3
        of(forged)
    forged = dataclasses.replace(forged, at_once=3)  # says that they cannot overflow
    told = of(forged)
    assert told.status == "conditional" and any("draw" in str(c) for c in told.caveats)


def test_a_run_in_parts_draws_by_the_hour_and_a_config_names_it():
    plan = plan_of(jfl.sampling.available_poisson(C, 0.9, PATTERN, capacity=C))
    whole, part = (jfl.simulate(jax.random.key(0), plan, rounds) for rounds in (6, 3))
    rest = jfl.simulate(jax.random.key(0), plan, 3, start=part.run)
    assert same_bits(whole.params, rest.params) and not same_bits(whole.params, part.params)
    told = dict(dataset="digits", partition="iid", clients=48, sampler="available_poisson")
    built, _ = build.build(Config(**told, cohort=8, period=12, awake=0.25, batch=8))
    assert float(built.sampler.rate) == pytest.approx(8 / 12)
    assert float(built.sampler.expected) == pytest.approx(8)
    with pytest.raises(ValueError, match="draw in a round, but got cohort=13"):
        build.build(Config(**told, cohort=13, period=12, awake=0.25, batch=8))


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(available=np.ones((2, 3))), "available: Bool\\[rounds, 7\\]"),
        (dict(available=np.full((2, C), 0.5)), "Bool"),
        (dict(available=np.eye(C)[:3]), "each client in at least one round"),
        (dict(period=0), "period"),
        (dict(awake=1.5), "awake"),
        (dict(rate=0.0), "rate"),
        (dict(capacity=C + 1), "capacity <= 7"),
    ],
)
def test_what_is_no_availability(options, words):
    with pytest.raises(ValueError, match=words):
        jfl.sampling.available_poisson(**(dict(clients=C, rate=0.5) | options))
