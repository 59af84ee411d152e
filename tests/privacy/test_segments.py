"""Runs that continue under other plans, runs of different seeds, and what sweeps share."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.ledger_plans import BATCH, CLIENTS, NOISY, best, close, fixed, make, poisson_plan
from helpers.problems import make_federation, squared, start_params

import jfl
from jfl import sampling
from jfl.core import records
from jfl.core.errors import NotAnalysable
from jfl.privacy import guarantees
from jfl.privacy.accountants import events, tightest
from jfl.privacy.ledger import entries, segments
from jfl.sampling import batches

pytestmark = pytest.mark.usefixtures("endless_noise", "renyi")

ROUNDS = 20


def found(*given, **options):
    return guarantees.guarantee(list(given), **options)


def composed(*parts, rounds=ROUNDS):
    """Return the epsilon of three steps a round on fixed batches, of each of these multipliers."""
    return best(events.compose(*(fixed(0.1, z, 3 * rounds, 100) for z in parts)))


# --- rounds one after another, and runs of different seeds


def test_a_run_that_continues_under_another_plan():
    one, other = make(NOISY(1.0)), make(NOISY(2.0))
    got = found((one, ROUNDS), (other, ROUNDS))
    close(got.epsilon, composed(1.0, 2.0), 1e-9)
    assert got.status == "proved" and segments.FOLLOWING in got.caveats
    for given in (
        [(one, ROUNDS, ROUNDS), (other, ROUNDS, 0)],
        [(one, 5), (one, ROUNDS - 5), (other, ROUNDS)],
    ):
        close(found(*given).epsilon, got.epsilon, 1e-6)
    assert segments.FOLLOWING not in found((one, 10, 0), (other, 20, 10)).caveats
    assert found((one, 10, 0), (make(), 5, 10)).epsilon == math.inf


def test_runs_of_one_seed_do_not_share_rounds():
    one, other = make(NOISY(1.0)), make(NOISY(2.0))
    for given in (
        [(one, 10, 0), (other, 10, 0)],
        [(one, 10, 0), (other, 10, 9)],
        [(one, 10, 5), (other, 3, 7)],
        [(one, 10, 0), (one, 10, 0)],
    ):
        with pytest.raises(NotAnalysable, match='share their samples.*seeds="different"'):
            found(*given)
        with pytest.raises(NotAnalysable, match="without common rounds"):
            found(*given, seeds=[3, 3])
        assert found(*given, seeds=[3, 4]).epsilon == found(*given, seeds="different").epsilon


def test_runs_of_different_seeds():
    one, other = make(NOISY(1.0)), make(NOISY(2.0))
    got = found((one, ROUNDS, 0), (other, ROUNDS, 0), seeds="different")
    close(got.epsilon, composed(1.0, 2.0), 1e-9)
    assert got.status == "conditional" and segments.SEEDS in got.caveats
    pairs = [(one, 10, 0), (other, 10, 10), (one, 10, 0), (other, 10, 10)]
    close(found(*pairs, seeds=[0, 0, 1, 1]).epsilon, got.epsilon, 1e-6)
    twice = found((one, 10, 0), (one, 10, 0), seeds="different")
    close(twice.epsilon, guarantees.guarantee(one, 20).epsilon, 1e-9)


def test_an_overflow_is_paid_in_each_segment():
    batch = batches.poisson(8.0, capacity=30)
    plans = [
        poisson_plan(
            rows=NOISY(z, adjacency="add_remove"), batch=batch, sizes=np.full(CLIENTS, 200)
        )
        for z in (1.0, 1.5)
    ]
    listed = lambda given: segments.concatenate(given)
    of_server = lambda given: next(e for e in listed(given) if e.view == "server").overflow
    alone = of_server([(plans[0], 20)])
    assert alone > 0
    assert of_server([(p, 20) for p in plans]) == pytest.approx(2 * alone, rel=1e-12)


def test_any_client_may_be_the_worst_in_each_segment():
    """Also a client that is listed elsewhere in each of them."""
    levels = np.repeat(np.float32([4.0, 1.0]), CLIENTS // 2)
    one = make(NOISY(levels), sizes=np.repeat([40, 100], CLIENTS // 2))
    other = make(NOISY(levels[::-1].copy()))
    close(found((one, ROUNDS), (other, ROUNDS)).epsilon, composed(1.0, 1.0), 1e-6)


def pair(other=None, first=(), **options):
    """Return the guarantee of five rounds of each of two plans."""
    one = make(NOISY(1.0), paired=bool(first))
    return found((one, 5, *first), (other or one, 5, *first), **options)


def of_three_clients():
    plan = make(NOISY(1.0))
    return dataclasses.replace(plan, fed=dataclasses.replace(plan.fed, size=jnp.ones(3, int)))


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: pair(of_three_clients()), "the same clients"),
        (lambda: pair(make(NOISY(), sizes=np.full(CLIENTS, 7))), "at least batch=10 rows"),
        (lambda: found((make(NOISY()), 3, -1)), "first >= 0"),
        # plans with paired noise share their noise in common rounds
        (lambda: pair(make(NOISY(2.0), paired=True), (0,)), "without common rounds"),
        (lambda: pair(seeds="same"), "seeds"),
        (lambda: pair(seeds=[0]), "seeds"),
        (lambda: pair(seeds=[0, -1]), "seeds"),
        (lambda: pair(seeds=[0.5, 1]), "seeds"),
        (
            lambda: guarantees.guarantee(make(NOISY()), 5, seeds="different"),
            "a list of segments if seeds is given",
        ),
    ],
)
def test_what_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_paired_noise_is_a_caveat():
    one, other = make(NOISY(1.0), paired=True), make(NOISY(2.0), paired=True)
    assert entries.PAIRED in found((one, 5), (other, 5)).caveats


# --- sweeps


def linear(params, x, y):
    return params @ x


def two_learning_rates(batch):
    x, y = np.ones((40, 1), np.float32), np.zeros(40, np.float32)
    fed = jfl.federate((x, y, x[:1], y[:1]), lambda _: np.arange(40)[None], classes=0)
    stages = jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(4.0)
    grad, task = jfl.private_grad(linear, jfl.chain(*stages)), jfl.task(jnp.zeros(1), linear)
    of = lambda lr: jfl.algorithms.fedavg(grad, lr=lr, steps=1, batch=batch)
    return [jfl.plan(fed, task, of(lr), sampling.full(1)) for lr in (0.1, 0.2)]


@pytest.mark.slow
def test_a_sweep_says_what_its_points_share():
    one, other = plans = two_learning_rates(batches.poisson(rate=0.1, capacity=40))
    points = jfl.sweep(lambda at: plans[at], rounds=1, at=[0, 1])
    assert points.caveats == (segments.SHARED,) and "seed" in segments.SHARED
    apart = [dict(at=0, seed=0), dict(at=1, seed=1)]
    assert jfl.sweep(lambda at: plans[at], rounds=1, points=apart).caveats == ()
    assert segments.sharing([one, other], [3, 3]) == (segments.SHARED,)
    assert segments.sharing([one, one], [0, 1]) == segments.sharing([one, one], [0, 0]) == ()
    whole = two_learning_rates(batches.full())
    assert segments.sharing(whole, [0, 0]) == ()


# --- the view


def test_the_view_is_the_only_one_that_answers_or_the_servers():
    released, steps = make(release=NOISY(2.0)), make(NOISY())
    for plan, view in (
        (released, "third_party"),
        (steps, "server"),
        (make(upload=NOISY()), "server"),
        (make(), "server"),
    ):
        got = guarantees.guarantee(plan, 5)
        assert got == guarantees.guarantee(plan, 5, view=view) and got.view == view
        one, other = (guarantees.epsilons(plan, [1, 5], **v) for v in ({}, dict(view=view)))
        np.testing.assert_array_equal(one, other)
    for over in (dict(rounds=5), dict(over="rounds")):
        z = jfl.calibrate(released, epsilon=9.0, **over)
        assert z == jfl.calibrate(released, epsilon=9.0, view="third_party", **over)
    both = make(NOISY(), release=NOISY(2.0))
    got = guarantees.guarantee(both, 5)
    assert (got.unit, got.view) == ("example", "server")
    assert guarantees.guarantee(both, 5, unit="client").view == "third_party"
    each = guarantees.epsilons_per_client(released, 5)
    assert each.max() == guarantees.guarantee(released, 5, unit="example").epsilon
    assert found((steps, 5), (released, 5), unit="example").view == "third_party"
    for plan, options, match in (
        (
            steps,
            dict(unit="client"),
            "No noise of this plan protects clients.*Choices: unit='example'",
        ),
        (make(NOISY(), upload=NOISY()), {}, "fits 2 of them for view='server'.*Choices"),
        (released, dict(view="server"), "sees every upload before"),
        (released, dict(cap=2), "view='server' with cap"),
    ):
        with pytest.raises(ValueError, match=match):
            guarantees.guarantee(plan, 5, **options)


# --- several releases of one algorithm


@pytest.mark.parametrize(
    "scheme",
    [jfl.batches.poisson(rate=0.1, capacity=40), jfl.batches.without_replacement(4)],
    ids=["poisson", "without replacement"],
)
def test_releases_of_one_algorithm_are_no_independent_samples(scheme):
    """Two releases on one sample of q = 0.1 distinguish a row with probability q: no epsilon of two
    samples covers that."""
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(2.0))
    once = jfl.algorithms.fedsgd(jfl.private_grad(squared, chain), batch=scheme)
    twice = dataclasses.replace(once, releases=once.releases * 2)
    fed, task = make_federation(sizes=(40,) * 3), jfl.task(start_params(), squared)
    one, both = (jfl.plan(fed, task, a, sampling.full(3)) for a in (once, twice))
    of = lambda plan, rounds: jfl.guarantee(plan, rounds, unit="example", view="server")
    single, joint, independent = of(one, 1), of(both, 1), of(one, 2)
    seen = tightest.epsilon(events.repeat(events.gaussian(2.0), 2), 1e-5)[0]
    assert joint.epsilon == pytest.approx(seen, rel=1e-6)
    assert joint.epsilon > 1.5 * independent.epsilon > single.epsilon
    said = lambda g: any(records.code_of(c) == "one-sample" for c in g.caveats)
    assert said(joint) and not said(single)


def test_releases_on_one_sample_count_as_seen_in_segments_too():
    two = lambda z: make(NOISY(z), BATCH, more=(records.Release(NOISY(z), BATCH, 3),))
    both = found((two(1.0), 10), (two(2.0), 1)).epsilon
    seen = events.gaussian((60 / 1.0**2 + 6 / 2.0**2) ** -0.5)
    assert both == pytest.approx(best(seen), rel=1e-6)
