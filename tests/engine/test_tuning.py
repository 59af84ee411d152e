"""Searches over settings: the best of a random number of runs and what it costs, and tuners."""

import dataclasses
import functools
import logging
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.problems import make_federation

import jfl
from jfl.core.records import Health
from jfl.engine import tuning
from jfl.engine.sweep import Trained
from jfl.privacy.accountants import choosing

C, DELTA = 6, 1e-5
FED, FULL = make_federation(sizes=(4,) * C, classes=2), jfl.sampling.full(C)


def make_plan(lr=0.1, z=3.0, noise=None, clip=1.0, sampler=None, kind="fedavg", fed=FED, **more):
    noise = jfl.gaussian(z) if noise is None else noise
    release = jfl.chain(jfl.clip_l2(clip), jfl.total(), noise, jfl.divide(3.0))
    batch = more.pop("batch", None) or jfl.batches.without_replacement(2)
    alg = getattr(jfl.algorithms, kind)(jfl.grad(task.loss), lr=lr, steps=1, batch=batch)
    sampler = jfl.sampling.poisson(C, 0.5, capacity=C) if sampler is None else sampler
    return jfl.plan(fed, task, alg, sampler, release=release, **more)


task = jfl.models.logistic(FED)
ASK = dict(unit=None, view=None, adjacency=None)


def judged(plans, rounds, law, **ask):
    """Return the guarantee of a choice, without running it."""
    return tuning._guarantee(plans, rounds, law, DELTA, ASK | ask)


def weight_of(params):
    return float(sum(np.abs(x).sum() for x in jax.tree.leaves(params)))


def same_arrays(a, b, **tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


@pytest.mark.parametrize("mean, theorem", [(2.0, 13.40), (100.0, 22.72)])
def test_settings_that_are_worst_at_different_orders_count_together(mean, theorem):
    """One full release and ten of small samples: the curves cross, and choosing reads several
    orders at once.  The theorem was evaluated by other code, with the larger curve at each."""
    fed = make_federation(sizes=(4,) * 40, classes=2)
    rows = jfl.batches.without_replacement(2)
    alg = jfl.algorithms.fedavg(jfl.grad(task.loss), lr=0.1, steps=1, batch=rows)

    def made(z, sampler):
        release = jfl.chain(
            jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(z), jfl.divide(2.0), adjacency="add_remove"
        )
        return jfl.plan(fed, task, alg, sampler, release=release)

    plans = [
        made(0.5, jfl.sampling.poisson(40, 0.05, capacity=40)),
        made(float(np.sqrt(10) / 2), jfl.sampling.full(40)),
    ]
    law = choosing.geometric(mean)
    ask = dict(unit="client", view="third_party", adjacency="add_remove")
    found = judged(plans, 10, law, **ask)
    assert found.epsilon == pytest.approx(theorem, abs=0.006)
    apart = [choosing.epsilon_of_choice(jfl.guarantee(p, 10, DELTA), law, DELTA) for p in plans]
    assert found.epsilon > 1.05 * max(apart)


def test_the_best_run_is_released_and_nothing_of_the_others(capsys, caplog):
    """With a score that tells the setting, the best setting of those that were drawn."""
    law, rates, seed = choosing.geometric(4.0), [0.1, 0.2, 0.3], 1
    make = functools.partial(make_plan, sampler=FULL, batch=jfl.batches.full())
    drawn, seeds = tuning._draw_runs(seed, law, len(rates))
    scored = []

    def score(params):
        scored.append(weight_of(params))
        return scored[-1]

    caplog.set_level(logging.INFO, "jfl")
    found = jfl.choose(make, rounds=2, runs=law, seed=seed, score=score, lr=rates)
    assert "several runs: " in caplog.text and f" {len(drawn)} " not in caplog.text
    assert len(scored) == len(drawn) == len(set(seeds)) > 1
    best = int(np.argmax(scored))
    assert found.setting == dict(lr=rates[drawn[best]]) and found.score == scored[best]
    # it is the run of that setting with its own seed
    key = jax.random.key(int(seeds[best]))
    same_arrays(found.params, jfl.simulate(key, make(**found.setting), 2).params, atol=1e-6)
    assert found.guarantee.status == "conditional"  # nobody saw what the score reads
    assert found._fields == ("params", "setting", "score", "guarantee")
    assert capsys.readouterr() == ("", "")
    alone = jfl.choose(make, rounds=2, runs=choosing.geometric(1.0), seed=seed)
    assert alone.setting == {} and f"score {alone.score:.6g}" in repr(alone)


def test_settings_are_uniform():
    counts = np.zeros(4)
    for seed in range(400):
        drawn, _ = tuning._draw_runs(seed, choosing.geometric(1.0), 4)
        counts[drawn[0]] += 1
    # chi-square of 3 degrees of freedom: beyond 31 once in 1e6
    assert ((counts - 100) ** 2 / 100).sum() < 31
    assert ((counts * [0.5, 1.5, 1, 1] - 100) ** 2 / 100).sum() > 31


def test_a_seed_draws_the_same_runs_on_every_machine():
    recorded = {
        (choosing.geometric(4.0), 0): (7, [2, 1, 1, 0, 2, 0, 1], 1728507713),
        (choosing.geometric(4.0), 3): (1, [1], 1195459093),
        (choosing.logarithmic(5.0), 7): (10, [0, 2, 2, 1, 1, 2, 2, 1, 2, 2], 884754664),
    }
    for (law, seed), (number, settings, first) in recorded.items():
        drawn, seeds = tuning._draw_runs(seed, law, 3)
        assert len(drawn) == number and drawn == settings
        assert seeds == [first + i for i in range(number)]
        with jax.enable_x64(True):
            assert tuning._draw_runs(seed, law, 3) == (drawn, seeds)
    law = choosing.logarithmic(5.0)
    found = judged([make_plan()], 4, law)
    assert found.epsilon == pytest.approx(2.5930454679809607, rel=1e-9)


NO_SLOT = dict(batch=jfl.batches.poisson(rate=0.9, capacity=6), sampler=FULL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(sampler=jfl.sampling.poisson(C, 1e-6, capacity=C)),
        dict(fed=dataclasses.replace(FED, x=FED.x.at[FED.index[0][0]].set(np.nan))),
        dict(NO_SLOT, fed=make_federation(sizes=(4,) * (C - 1) + (40,), classes=2)),
    ],
    ids=["empty cohort", "a row that is not finite", "rows without a slot"],
)
def test_health_decides_no_choice(options):
    """These counts depend on who is there, or on the rows: a choice that shows them would have to
    be paid for.  No run stops for them, so the guarantee has no caveat of runs that stop."""
    make = lambda: make_plan(**options)
    found = jfl.choose(make, rounds=2, runs=choosing.geometric(3.0), seed=1)
    assert found.params is not None and found.score > -np.inf
    assert not any("run that stops" in str(caveat) for caveat in found.guarantee.caveats)


def test_only_runs_with_finite_parameters_and_score_are_chosen(monkeypatch):
    """Seed 0 draws seven runs; of equal scores, the first is chosen."""
    ends = np.array([1, np.nan, np.inf, 5, 3, 5, 0], np.float32)
    health = Health(7, 7, 7, 7)
    trained = [Trained(health=health, metrics=None, params=end, state=None) for end in ends]
    monkeypatch.setattr(tuning, "train", lambda *_: trained)
    law, rates = choosing.geometric(4.0), [0.1, 0.2, 0.3]
    drawn, _ = tuning._draw_runs(0, law, 3)
    choose = lambda score: jfl.choose(make_plan, rounds=2, runs=law, seed=0, score=score, lr=rates)
    found = choose(lambda params: 9.0 if np.isnan(params) else params)
    assert (found.params, found.score, found.setting) == (5, 5, dict(lr=rates[drawn[3]]))
    assert choose(lambda params: np.nan)[:3] == (None, None, None)


def without_noise():
    made = make_plan()
    silent = [s for s in made.release.stages if s.role != "noise"]
    return dataclasses.replace(made, release=jfl.chain(*silent, adjacency="add_remove"))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(rounds=(1, 2)), "an integer rounds >= 1"),
        (dict(runs=10), "choosing.logarithmic"),
        (dict(seed=[1, 2]), "an integer seed"),
        (dict(score=3), "expected .*score"),
        (dict(make_plan=without_noise), "noise in every setting"),
    ],
)
def test_what_cannot_be_chosen_is_refused(options, message):
    with pytest.raises(ValueError, match=f"jfl.choose: .*{message}"):
        jfl.choose(**dict(make_plan=make_plan, rounds=2, runs=choosing.geometric(2.0)) | options)


def test_a_score_of_several_numbers_is_refused():
    run = Trained(health=Health(7, 7, 7, 7), metrics=None, params=np.float32(1), state=None)
    with pytest.raises(ValueError, match="jfl.choose: expected one number from score"):
        tuning._score(run, lambda params: np.zeros(2))


# --- tuners


class Study:
    """A study that tries a list, and remembers in which order it was asked and told."""

    def __init__(self, settings):
        self.settings, self.calls, self.told = list(settings), [], {}

    def ask(self, space):
        number = self.calls.count("ask")
        self.calls.append("ask")
        assert list(space) == ["lr"]
        return SimpleNamespace(number=number, params=dict(lr=self.settings[number]))

    def tell(self, trial, value):
        self.calls.append("tell")
        self.told[trial.number] = value


def tune(study, **options):
    options = dict(rounds=20, trials=1, metric="loss", seeds=(0, 1)) | options
    return jfl.ask_tell(plain, study, dict(lr=None), **options)


def plain(lr):
    rows = jfl.batches.without_replacement(2)  # so that seeds differ
    algorithm = jfl.algorithms.fedsgd(jfl.grad(task.loss), lr=lr, batch=rows)
    return jfl.plan(FED, task, algorithm, FULL)


def test_settings_are_asked_for_in_batches(monkeypatch):
    """The last one has the trials that are left; what is told is a mean over seeds."""

    def sweep(make_plan, *, points, **options):
        found = dict.fromkeys(jfl.Metrics.__dataclass_fields__)
        found["loss"] = np.array([[point["lr"] + point["seed"]] for point in points])
        return SimpleNamespace(metrics=jfl.Metrics(**found), failed=np.zeros(len(points), bool))

    monkeypatch.setattr(tuning, "sweep", sweep)
    study = Study([0.1, 0.5, 0.2])
    tune(study, trials=3, at_once=2)
    assert study.calls == ["ask", "ask", "tell", "tell", "ask", "tell"]
    assert study.told == pytest.approx({0: 0.6, 1: 1.0, 2: 0.7})


@pytest.mark.filterwarnings("ignore:sweep. the point")
@pytest.mark.parametrize("at_once", [2, 1])
def test_what_is_told_is_of_separate_runs(at_once):
    """Of a run that fails it is nan, also if no other one is in its sweep."""
    rates = [3.3e38, 0.5]
    study = Study(rates)
    found = tune(study, trials=2, at_once=at_once)
    assert [row["lr"] for row in found] == rates
    assert np.isnan(found[0]["value"]) and np.isnan(study.told[0])
    run = lambda seed: jfl.simulate(jax.random.key(seed), plain(0.5), 20).metrics.loss[-1]
    one, other = run(0), run(1)
    assert one != other and found[1]["value"] == study.told[1]
    assert study.told[1] == pytest.approx(float(one + other) / 2, rel=1e-5)


@pytest.mark.parametrize(
    "study, options, words",
    [
        (3, {}, "a study with ask and tell"),
        (Study([0.1]), dict(seeds=()), "seeds"),
        (Study([0.1, 0.5]), dict(trials=2, metric="f1"), "a metric of this run"),
    ],
)
def test_what_no_tuner_can_use_is_refused(study, options, words):
    with pytest.raises(ValueError, match=words):
        tune(study, **options)
