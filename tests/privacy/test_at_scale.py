"""A small cohort with the noise of a large one: whose epsilon it is."""

import numpy as np
import pytest
from helpers.problems import make_federation, squared, start_params

import jfl
from jfl.core.errors import ArgumentError, NotAnalysable
from jfl.privacy.accountants import events, tightest

pytestmark = pytest.mark.usefixtures("endless_noise")

C, DELTA = 20, 1e-6
FED = make_federation(sizes=(3,) * C)


def plan(sampler, z=0.01, noise=None, **sites):
    algorithm = jfl.algorithms.fedavg(jfl.grad(squared), lr=0.1, steps=1, batch=jfl.batches.full())
    chain = jfl.chain(jfl.clip_l2(0.5), jfl.total(), noise or jfl.gaussian(z), jfl.divide(5))
    sites = sites or dict(release=chain)
    return jfl.plan(FED, jfl.task(start_params(), squared), algorithm, sampler, **sites)


@pytest.mark.parametrize(
    "sampler, event",
    [
        (jfl.sampling.poisson(C, 0.25), lambda z: events.poisson(0.01, events.gaussian(z))),
        (
            jfl.sampling.without_replacement(C, 5),
            lambda z: events.without_replacement(1000, 100_000, events.gaussian(z)),
        ),
    ],
)
def test_the_deployment_is_accounted_with_its_own_numbers(sampler, event):
    found = jfl.at_scale(plan(sampler), 200, DELTA, cohort=1000, clients=100_000)
    expected = tightest.epsilon(events.repeat(event(0.01 * 1000 / 5), 200), DELTA)[0]
    assert found.epsilon == pytest.approx(expected, rel=1e-3)
    assert found.status == "conditional" and found.unit == "client"
    assert "Applies to a deployment" in found.caveats[0]
    assert "1,000 of 100,000" in found.caveats[0]
    own = float(found.caveats[0].split("epsilon >= ")[1].rstrip("."))
    assert own > 1000 * found.epsilon


def test_everyone_of_more():
    found = jfl.at_scale(plan(jfl.sampling.full(C)), 10, DELTA, cohort=1000, clients=1000)
    event = events.repeat(events.gaussian(0.01 * 1000 / C), 10)
    assert found.epsilon == pytest.approx(tightest.epsilon(event, DELTA)[0])


@pytest.mark.slow
def test_of_itself_it_is_the_guarantee():
    one = plan(jfl.sampling.without_replacement(C, 5), z=2.0)
    found = jfl.at_scale(one, 10, DELTA, cohort=5, clients=C)
    assert found.epsilon == pytest.approx(jfl.guarantee(one, 10, DELTA).epsilon)
    assert found.delta_at(found.epsilon) <= DELTA * 1.01


@pytest.mark.parametrize(
    "sampler, sites, sizes, words",
    [
        (jfl.sampling.poisson(C, 0.25), {}, (4, 100), "<= cohort <="),
        (jfl.sampling.poisson(C, 0.25), {}, (40, 10), "<= cohort <="),
        (jfl.sampling.full(C), {}, (40, 100), "sampling.full"),
        (jfl.sampling.min_separation(C, 5, 2), {}, (40, 100), "sampling.min_separation"),
        (jfl.sampling.full(C), dict(release=jfl.chain(jfl.total())), (40, 40), "client"),
    ],
)
def test_what_does_not_carry_over(sampler, sites, sizes, words):
    with pytest.raises((ArgumentError, NotAnalysable), match=words):
        jfl.at_scale(plan(sampler, **sites), 10, DELTA, cohort=sizes[0], clients=sizes[1])


def test_clients_that_remember_or_vote_do_not_carry_over():
    sampler = jfl.sampling.without_replacement(C, 5)
    adaptive = jfl.chain(jfl.clip_adaptive(0.5, 5), jfl.total(), jfl.gaussian(1.0), jfl.divide(5))
    with pytest.raises(NotAnalysable, match="clip_adaptive"):
        jfl.at_scale(plan(sampler, release=adaptive), 10, DELTA, cohort=10, clients=C)
    scaffold = jfl.algorithms.scaffold(jfl.grad(squared), lr=0.1, steps=1, batch=jfl.batches.full())
    noise = jfl.chain(jfl.clip_l2(0.5), jfl.total(), jfl.gaussian(1.0), jfl.divide(5))
    task = jfl.task(start_params(), squared)
    one = jfl.plan(FED, task, scaffold, sampler, release=noise)
    with pytest.raises(NotAnalysable, match="stateless clients"):
        jfl.at_scale(one, 10, DELTA, cohort=10, clients=C)
    assert np.isfinite(jfl.guarantee(one, 10, DELTA).epsilon)
