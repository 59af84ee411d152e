"""Runs that go on under other plans, runs of different seeds, and what points of a sweep share."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.ledger_plans import CLIENTS, NOISY, best, close, fixed, make, poisson_plan
from helpers.problems import make_federation, squared, start_params

import jfl
from jfl import sampling
from jfl.core import records
from jfl.core.errors import NotAnalysable
from jfl.privacy import guarantees
from jfl.privacy.accountants import events, tightest
from jfl.privacy.ledger import entries, segments
from jfl.sampling import batches

pytestmark = pytest.mark.usefixtures("endless_noise")

ROUNDS = 20


@pytest.fixture
def renyi_alone(monkeypatch):
    """Without loss distributions, where they cost too much: they compile for each event."""
    monkeypatch.setattr(tightest, "has_loss_distribution", lambda *args: False)


def found(*given, **options):
    return guarantees.guarantee(list(given), **options)


def composed(*parts, rounds=ROUNDS):
    """The epsilon of three steps a round on fixed batches, of each of these multipliers."""
    return best(events.compose(*(fixed(0.1, z, 3 * rounds, 100) for z in parts)))


# --- rounds one after another, and runs of different seeds


def test_a_run_that_goes_on_under_another_plan():
    one, other = make(NOISY(1.0)), make(NOISY(2.0))
    got = found((one, ROUNDS), (other, ROUNDS))
    close(got.epsilon, composed(1.0, 2.0), 1e-9)
    assert got.status == "proved" and segments.FOLLOWING in got.caveats
    for given in (
        [(one, ROUNDS, 0), (other, ROUNDS, ROUNDS)],
        [(one, ROUNDS, ROUNDS), (other, ROUNDS, 0)],
        [(one, 5), (one, ROUNDS - 5), (other, ROUNDS)],
    ):
        close(found(*given).epsilon, got.epsilon, 1e-6)
    assert segments.FOLLOWING not in found((one, 10, 0), (other, 20, 10)).caveats
    assert found((one, 10, 0), (make(), 5, 10)).epsilon == math.inf


def test_runs_of_one_seed_do_not_share_rounds():
    one, other = make(NOISY(1.0)), make(NOISY(2.0))
    for given in (
        [(one, ROUNDS, 0), (other, ROUNDS, 0)],
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
    for bad in ("same", [0, 1], [0, 1, 2, -1], 3, [0.5] * 4):
        with pytest.raises(ValueError, match="seeds"):
            found(*pairs, seeds=bad)
    with pytest.raises(ValueError, match="a list of segments if seeds is given"):
        guarantees.guarantee(one, 5, seeds="different")
    twice = found((one, 10, 0), (one, 10, 0), seeds="different")
    close(twice.epsilon, guarantees.guarantee(one, 20).epsilon, 1e-9)


def test_plans_with_paired_noise_need_rounds_of_their_own():
    one, other = make(NOISY(1.0), paired=True), make(NOISY(2.0), paired=True)
    with pytest.raises(NotAnalysable, match="without common rounds"):
        found((one, 5, 0), (other, 5, 0))
    assert entries.PAIRED in found((one, 5), (other, 5)).caveats


def test_overflow_is_paid_for_in_each_segment():
    plans = [
        poisson_plan(
            rows=NOISY(z, adjacency="add_remove"),
            batch=batches.poisson(8.0, capacity=30),
            sizes=np.full(CLIENTS, 200),
        )
        for z in (1.0, 1.5)
    ]
    of_server = lambda given: (
        next(e for e in segments.concatenate(given) if e.view == "server").overflow
    )
    alone = of_server([(plans[0], 20)])
    assert alone > 0
    assert of_server([(p, 20) for p in plans]) == pytest.approx(2 * alone, rel=1e-12)


def test_any_client_may_be_the_worst_in_each_segment(renyi_alone):
    levels = np.linspace(1.0, 3.0, CLIENTS).astype(np.float32)
    one, other = make(NOISY(levels)), make(NOISY(levels[::-1].copy()))
    close(found((one, ROUNDS), (other, ROUNDS)).epsilon, composed(1.0, 1.0), 1e-6)


def test_other_clients_and_first_rounds_are_refused():
    one = make(NOISY(1.0))
    smaller = dataclasses.replace(one, fed=dataclasses.replace(one.fed, size=jnp.ones(3, int)))
    with pytest.raises(ValueError, match="the same clients"):
        found((one, 5), (smaller, 5))
    with pytest.raises(ValueError, match="first >= 0"):
        found((one, 3, -1))
    with pytest.raises(ValueError, match="at least batch=10 rows"):
        found((make(NOISY()), 5), (make(NOISY(2.0), sizes=np.full(CLIENTS, 7)), 5))


# --- why rounds of one seed are refused


def linear(params, x, y):
    return params @ x


@functools.cache
def learning_rates(present=True, batch=None):
    """Eight plans of one client with 40 rows that differ in the learning rate; only row 0 has a
    gradient."""
    x = np.zeros((40, 1), np.float32)
    x[0] = present
    table = jnp.arange(40, dtype=jnp.int32)[None]
    fed = records.Federation(
        jnp.asarray(x),
        jnp.zeros(40),
        table,
        jnp.array([40]),
        jnp.asarray(x[:1]),
        jnp.zeros(1),
        jnp.zeros((1, 0), jnp.int32),
        jnp.zeros(1, jnp.int32),
    )
    grad = jfl.private_grad(
        linear, jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(4.0))
    )
    task = jfl.task(jnp.zeros(1), linear)
    algorithm = lambda lr: jfl.algorithms.fedavg(
        grad, lr=lr, steps=1, batch=batch or batches.poisson(rate=0.1, capacity=40)
    )
    return [
        jfl.plan(fed, task, algorithm(lr), sampling.full(1)) for lr in 0.1 * 1.3 ** np.arange(8)
    ]


@jax.jit
def _released(keys, plan):
    """What a step released, as the server reads it off the model."""
    move = jax.vmap(lambda key: jfl.run_round(jfl.init(key, plan), plan)[0].server.params[0])(keys)
    return -4.0 * move / plan.algorithm.client.data["work"].lr


def interval(hits, trials, alarm):
    from scipy import stats

    return (
        stats.beta.ppf(alarm, hits, trials - hits + 1) if hits else 0.0,
        stats.beta.ppf(1 - alarm, hits + 1, trials - hits),
    )


@pytest.mark.slow
def test_an_attack_on_runs_that_share_batches():
    """Eight learning rates, one seed, one round: an attacker who adds them up.

    False alarms: each of four bounds is wrong with probability below 1e-5.  The epsilon as if the
    batches were independent lies below what is measured, and so does the rate of their detection.
    """
    from scipy import stats

    trials, alarm, limit, delta = 20_000, 1e-5, 3.2, 1e-3
    score = {}
    for present in (False, True):
        keys = jax.random.split(jax.random.key(7 + present), trials)
        score[present] = sum(
            np.asarray(_released(keys, p), np.float64) for p in learning_rates(present)
        ) / np.sqrt(8)
    hits = {present: int((s > limit).sum()) for present, s in score.items()}
    least, most = interval(hits[True], trials, alarm)[0], interval(hits[False], trials, alarm)[1]
    audited = math.log((least - delta) / most)
    runs = [(p, 1, 0) for p in learning_rates()]
    independent = jfl.guarantee(runs, delta=delta, unit="example", view="server", seeds="different")
    assert independent.epsilon < 1.45 < audited
    with pytest.raises(NotAnalysable, match="share their samples"):
        jfl.guarantee(runs, delta=delta, unit="example", view="server")
    # the sum is what one sample makes of it, and not what eight make
    as_one = 0.9 * stats.norm.sf(limit) + 0.1 * stats.norm.sf(limit - np.sqrt(8))
    law = stats.binom.pmf(np.arange(9), 8, 0.1)
    as_eight = law @ stats.norm.sf(limit - np.arange(9) / np.sqrt(8))
    low, high = interval(hits[True], trials, alarm)
    assert low <= as_one <= high and not low <= as_eight <= high


# --- sweeps


@pytest.mark.slow
def test_a_sweep_says_what_its_points_share():
    one, other = learning_rates()[:2]
    found = jfl.sweep(lambda at: (one, other)[at], rounds=1, at=[0, 1])
    assert found.caveats == (segments.SHARED,) and "seed" in segments.SHARED
    apart = jfl.sweep(
        lambda at: (one, other)[at], rounds=1, points=[dict(at=0, seed=0), dict(at=1, seed=1)]
    )
    assert apart.caveats == ()
    assert segments.sharing([one, other], [3, 3]) == (segments.SHARED,)
    assert segments.sharing([one, one], [0, 1]) == segments.sharing([one, one], [0, 0]) == ()
    whole = learning_rates(batch=batches.full())[:2]
    assert segments.sharing(whole, [0, 0]) == ()


# --- the view


def test_the_view_with_an_answer(renyi_alone):
    """Nobody named a view: the only one that answers, or the server's where both do."""
    released, steps = make(release=NOISY(2.0)), make(NOISY())
    for plan, view in (
        (released, "third_party"),
        (steps, "server"),
        (make(upload=NOISY()), "server"),
        (make(), "server"),
    ):
        got = guarantees.guarantee(plan, 5)
        assert got == guarantees.guarantee(plan, 5, view=view) and got.view == view
        np.testing.assert_array_equal(
            guarantees.epsilons(plan, [1, 5]), guarantees.epsilons(plan, [1, 5], view=view)
        )
        if got.epsilon < math.inf:
            for over in (dict(rounds=5), dict(over="rounds")):
                assert jfl.calibrate(plan, epsilon=9.0, **over) == jfl.calibrate(
                    plan, epsilon=9.0, view=view, **over
                )
    both_of = make(NOISY(), release=NOISY(2.0))
    assert (
        guarantees.guarantee(both_of, 5).unit == "example"
        and guarantees.guarantee(both_of, 5).view == "server"
    )
    assert guarantees.guarantee(both_of, 5, unit="client").view == "third_party"
    assert (
        guarantees.epsilons_per_client(released, 5).max()
        == guarantees.guarantee(released, 5, unit="example").epsilon
    )
    assert guarantees.guarantee([(steps, 5), (released, 5)], unit="example").view == "third_party"
    with pytest.raises(
        ValueError,
        match=(
            "fits 0 of them for view='server' and 0 of them for view='third_party'.*Choices: "
            "unit='example'"
        ),
    ):
        guarantees.guarantee(steps, 5, unit="client")
    with pytest.raises(ValueError, match="fits 2 of them for view='server'.*Choices"):
        guarantees.guarantee(make(NOISY(), upload=NOISY()), 5)
    with pytest.raises(ValueError, match="sees every upload before"):
        guarantees.guarantee(released, 5, view="server")
    with pytest.raises(ValueError, match="view='server' with cap"):
        guarantees.guarantee(released, 5, cap=2)


# --- several releases of one algorithm


def twice(z, scheme):
    """An algorithm of a user's own that trains twice on batches of one key; both releases are
    declared."""
    fed = make_federation(sizes=(40,) * 3)
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(z))
    one = jfl.algorithms.fedsgd(jfl.private_grad(squared, chain), batch=scheme)
    both = dataclasses.replace(one, releases=one.releases * 2)
    return [
        jfl.plan(fed, jfl.task(start_params(), squared), a, jfl.sampling.full(3))
        for a in (one, both)
    ]


@pytest.mark.parametrize(
    "scheme",
    [jfl.batches.poisson(rate=0.1, capacity=40), jfl.batches.without_replacement(4)],
    ids=["poisson", "without replacement"],
)
def test_releases_of_one_algorithm_are_no_independent_samples(scheme):
    """Two releases on one sample of q = 0.1 tell a row apart with a chance of q: no epsilon of two
    samples covers that."""
    (one, both), delta = twice(2.0, scheme), 1e-5
    single, found = (jfl.guarantee(p, 1, delta, unit="example", view="server") for p in (one, both))
    independent = jfl.guarantee(one, 2, delta, unit="example", view="server").epsilon

    unamplified = tightest.epsilon(events.repeat(events.gaussian(2.0), 2), delta)[0]
    assert (
        found.epsilon == pytest.approx(unamplified, rel=1e-6)
        and found.epsilon > 1.5 * independent > single.epsilon
    )
    assert any(c.code == "one-sample" for c in found.caveats) and not any(
        c.code == "one-sample" for c in single.caveats
    )
