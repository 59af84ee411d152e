"""The best of a random number of runs, and what choosing costs."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.problems import make_federation

import jfl
from jfl.engine import choose as choosing_runs
from jfl.privacy.accountants import choosing

C, DELTA = 6, 1e-5
FED = make_federation(sizes=(4,) * C, classes=2)


def make_plan(lr=0.1, z=3.0):
    release = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(z), jfl.divide(3.0))
    alg = jfl.algorithms.fedavg(
        jfl.grad(task.loss), lr=lr, steps=1, batch=jfl.batches.without_replacement(2)
    )
    sampler = jfl.sampling.poisson(C, 0.5, capacity=C)
    return jfl.plan(FED, task, alg, sampler, release=release)


task = jfl.models.logistic(FED)


@pytest.mark.parametrize(
    "law",
    [
        choosing.logarithmic(5.0),
        pytest.param(choosing.geometric(3.0), marks=pytest.mark.slow),
        pytest.param(choosing.poisson(4.0), marks=pytest.mark.slow),
    ],
)
def test_the_choice_costs_what_the_law_says_whatever_was_drawn(law):
    one = jfl.guarantee(make_plan(), 4, DELTA)
    wanted = choosing.epsilon_of_choice(one, law, DELTA)
    for seed in (0, 1):
        found = jfl.choose(make_plan, rounds=4, runs=law, seed=seed, lr=[0.1, 0.3])
        assert found.guarantee.epsilon == pytest.approx(wanted, rel=1e-9)
        assert found.guarantee.epsilon > one.epsilon
        assert found.guarantee.adjacency == "add_remove"
        assert found.guarantee.status == "proved"
        assert {"score", "secret-runs"} <= {c.code for c in found.guarantee.caveats}


@pytest.mark.slow
def test_the_worst_setting_counts():
    law = choosing.geometric(3.0)
    both = jfl.choose(make_plan, rounds=4, runs=law, z=[3.0, 1.0]).guarantee.epsilon
    worst = choosing.epsilon_of_choice(jfl.guarantee(make_plan(z=1.0), 4, DELTA), law, DELTA)
    assert both == pytest.approx(worst, rel=1e-6)
    assert both > jfl.choose(make_plan, rounds=4, runs=law, z=[3.0]).guarantee.epsilon


@pytest.mark.parametrize("mean, theorem", [(2.0, 13.40), (10.0, 17.64), (100.0, 22.72)])
def test_settings_that_are_worst_at_different_orders_count_together(mean, theorem):
    """One full release and ten of small samples: the curves cross, and choosing reads several
    orders at once.  The theorem was evaluated by other code, with the larger curve at each."""
    fed = make_federation(sizes=(4,) * 40, classes=2)

    def made(sampled):
        z, sampler = 0.5, jfl.sampling.poisson(40, 0.05, capacity=40)
        if not sampled:
            z, sampler = float(np.sqrt(10) / 2), jfl.sampling.full(40)
        release = jfl.chain(
            jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(z), jfl.divide(2.0), adjacency="add_remove"
        )
        rows = jfl.batches.without_replacement(2)
        alg = jfl.algorithms.fedavg(jfl.grad(task.loss), lr=0.1, steps=1, batch=rows)
        return jfl.plan(fed, task, alg, sampler, release=release)

    law = choosing.geometric(mean)
    ask = dict(unit="client", view="third_party", adjacency="add_remove")
    found = choosing_runs._guarantee([made(True), made(False)], 10, law, DELTA, ask)
    assert found.epsilon == pytest.approx(theorem, abs=0.006)
    apart = [
        choosing.epsilon_of_choice(jfl.guarantee(made(s), 10, DELTA), law, DELTA)
        for s in (True, False)
    ]
    assert found.epsilon > 1.05 * max(apart)


def test_the_best_run_is_released_and_nothing_of_the_others(capsys):
    """With a score that tells the setting, the best setting of those that were drawn."""
    law, rates = choosing.geometric(4.0), [0.1, 0.2, 0.3]
    seen = {}
    for seed in range(4):
        number, drawn, seeds = choosing_runs._drawn(seed, law, len(rates))
        scored = []

        def score(params, scored=scored):
            scored.append(float(sum(np.abs(x).sum() for x in jax.tree.leaves(params))))
            return scored[-1]

        found = jfl.choose(make_plan, rounds=2, runs=law, seed=seed, score=score, lr=rates)
        assert len(scored) == number == len(seeds) == len(set(seeds.tolist()))
        best = int(np.argmax(scored))
        assert found.setting == dict(lr=rates[drawn[best]]) and found.score == scored[best]
        # it is the run of that setting with its own seed
        alone = jfl.simulate(
            jax.random.key(int(seeds[best])), make_plan(lr=rates[drawn[best]]), 2
        ).params
        for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(alone)):
            np.testing.assert_allclose(a, b, atol=1e-6)
        seen[seed] = number
        assert found.guarantee.status == "conditional"  # nobody saw what the score reads
        assert found._fields == ("params", "setting", "score", "guarantee")
    assert capsys.readouterr() == ("", "")
    assert len(set(seen.values())) > 2  # random
    assert choosing_runs._drawn(3, law, 3)[0] == seen[3]


def test_no_run_at_all_is_an_answer():
    law = choosing.poisson(1.0)
    seed = next(s for s in range(50) if choosing_runs._drawn(s, law, 1)[0] == 0)
    found = jfl.choose(make_plan, rounds=2, runs=law, seed=seed, lr=[0.1])
    assert found[:3] == (None, None, None) and np.isfinite(found.guarantee.epsilon)


def test_runs_that_fail_are_not_released():
    found = jfl.choose(
        make_plan,
        rounds=2,
        runs=choosing.geometric(1.0),
        score=lambda params: float("nan"),
        lr=[0.1],
    )
    assert found.params is None and found.setting is None


def test_settings_are_uniform():
    counts = np.zeros(4)
    for seed in range(400):
        _, drawn, _ = choosing_runs._drawn(seed, choosing.geometric(1.0), 4)
        counts[drawn[0]] += 1
    # chi-square of 3 degrees of freedom: beyond 31 once in 1e6
    assert ((counts - 100) ** 2 / 100).sum() < 31
    assert ((counts * [0.5, 1.5, 1, 1] - 100) ** 2 / 100).sum() > 31


def test_what_cannot_be_chosen_is_refused():
    law = choosing.geometric(2.0)
    with pytest.raises(ValueError, match="a whole number seed"):
        jfl.choose(lambda seed: make_plan(), rounds=2, runs=law, seed=[1, 2])
    with pytest.raises(ValueError, match="choosing.logarithmic"):
        jfl.choose(make_plan, rounds=2, runs=10, lr=[0.1])

    for score in (3, lambda params: "good", lambda params: np.zeros(2), lambda params: None):
        with pytest.raises(ValueError, match="jfl.choose: need .*score"):
            jfl.choose(make_plan, rounds=2, runs=law, lr=[0.1], score=score)

    def bare(lr):
        made = make_plan(lr)
        silent = [s for s in made.release.stages if s.role != "noise"]
        return dataclasses.replace(made, release=jfl.chain(*silent, adjacency="add_remove"))

    with pytest.raises(ValueError, match="noise in every setting"):
        jfl.choose(bare, rounds=2, runs=law, lr=[0.1])
