"""Searches over settings: the best of a random number of runs and what it costs, and tuners."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from helpers.problems import CLIENTS, make_federation

import jfl
from jfl.core.errors import NotAnalysable
from jfl.core.records import Health
from jfl.engine import tuning as choosing_runs
from jfl.engine.sweep import Trained
from jfl.privacy.accountants import choosing

C, DELTA = 6, 1e-5
FED = make_federation(sizes=(4,) * C, classes=2)


def make_plan(lr=0.1, z=3.0, noise=None, clip=1.0, sampler=None, kind="fedavg", **more):
    noise = jfl.gaussian(z) if noise is None else noise
    release = jfl.chain(jfl.clip_l2(clip), jfl.total(), noise, jfl.divide(3.0))
    alg = getattr(jfl.algorithms, kind)(
        jfl.grad(task.loss), lr=lr, steps=1, batch=jfl.batches.without_replacement(2)
    )
    sampler = jfl.sampling.poisson(C, 0.5, capacity=C) if sampler is None else sampler
    return jfl.plan(FED, task, alg, sampler, release=release, **more)


task = jfl.models.logistic(FED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "law",
    [
        choosing.logarithmic(5.0),
        choosing.geometric(3.0),
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
    rungs = choosing_runs._rungs(10, law)
    found = choosing_runs._guarantee([made(True), made(False)], rungs, DELTA, ask)
    assert found.epsilon == pytest.approx(theorem, abs=0.006)
    apart = [
        choosing.epsilon_of_choice(jfl.guarantee(made(s), 10, DELTA), law, DELTA)
        for s in (True, False)
    ]
    assert found.epsilon > 1.05 * max(apart)


def test_the_best_run_is_released_and_nothing_of_the_others(capsys):
    """With a score that tells the setting, the best setting of those that were drawn."""
    law, rates = choosing.geometric(4.0), [0.1, 0.2, 0.3]
    for seed in (1, 2):
        ((number,),), drawn, seeds = choosing_runs._draw_runs(seed, [law], len(rates))
        scored = []

        def score(params, scored=scored):
            scored.append(float(sum(np.abs(x).sum() for x in jax.tree.leaves(params))))
            return scored[-1]

        found = jfl.choose(make_plan, rounds=2, runs=law, seed=seed, score=score, lr=rates)
        assert len(scored) == number == len(seeds) == len(set(seeds))
        best = int(np.argmax(scored))
        assert found.setting == dict(lr=rates[drawn[best]]) and found.score == scored[best]
        # it is the run of that setting with its own seed
        alone = jfl.simulate(
            jax.random.key(int(seeds[best])), make_plan(lr=rates[drawn[best]]), 2
        ).params
        for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(alone)):
            np.testing.assert_allclose(a, b, atol=1e-6)
        assert found.guarantee.status == "conditional"  # nobody saw what the score reads
        assert found._fields == ("params", "setting", "score", "guarantee")
    assert capsys.readouterr() == ("", "")
    numbers = [choosing_runs._draw_runs(seed, [law], 3)[0][0] for seed in range(4)]
    assert len({number for (number,) in numbers}) > 2  # random


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
        _, drawn, _ = choosing_runs._draw_runs(seed, [choosing.geometric(1.0)], 4)
        counts[drawn[0]] += 1
    # chi-square of 3 degrees of freedom: beyond 31 once in 1e6
    assert ((counts - 100) ** 2 / 100).sum() < 31
    assert ((counts * [0.5, 1.5, 1, 1] - 100) ** 2 / 100).sum() > 31


def test_the_draws_of_one_choice_are_those_they_were():
    """Recorded before there were tournaments."""
    recorded = {
        (choosing.geometric(4.0), 0): (7, [2, 1, 1, 0, 2, 0, 1], 1728507713),
        (choosing.geometric(4.0), 3): (1, [1], 1195459093),
        (choosing.logarithmic(5.0), 7): (10, [0, 2, 2, 1, 1, 2, 2, 1, 2, 2], 884754664),
    }
    for (law, seed), (number, settings, first) in recorded.items():
        groups, drawn, seeds = choosing_runs._draw_runs(seed, [law], 3)
        assert [g.tolist() for g in groups] == [[number]] and drawn == settings
        assert seeds == [first + i for i in range(number)]
    law = choosing.logarithmic(5.0)
    found = jfl.choose(make_plan, rounds=4, runs=law, seed=3, lr=[0.1, 0.3])
    assert found.guarantee.epsilon == pytest.approx(2.5930454679809607, rel=1e-9)
    assert found.setting == dict(lr=0.3) and found.score == 0.5
    assert found.guarantee.method == "repeat_and_select, logarithmic, rdp"
    listed = jfl.choose(make_plan, rounds=[4], runs=(law,), seed=3, lr=[0.1, 0.3])
    assert listed.guarantee == found.guarantee and listed.setting == found.setting
    for a, b in zip(jax.tree.leaves(listed.params), jax.tree.leaves(found.params)):
        np.testing.assert_array_equal(a, b)


# --- tournaments


LAWS = (choosing.logarithmic(3.0), choosing.geometric(2.0), choosing.logarithmic(2.0))
UNTIL = (1, 3, 6)


def weight_of(params):
    return float(sum(np.abs(x).sum() for x in jax.tree.leaves(params)))


def test_a_tournament_is_paid_for_each_rung_that_follows():
    """By rungs of their own rounds, for the worst setting of each."""
    ask = dict(unit=None, view=None, adjacency=None)
    plans = [make_plan(z=z) for z in (3.0, 2.0)]
    find = lambda rounds, laws, plans=plans: choosing_runs._guarantee(
        plans, choosing_runs._rungs(rounds, laws), DELTA, ask
    )
    found = find(UNTIL, LAWS)
    own = [jfl.guarantee(plans[1], n, DELTA) for n in (1, 2, 3)]
    want = choosing.epsilon_of_tournament(own, LAWS, DELTA)
    assert found.epsilon == pytest.approx(want, rel=1e-9)
    assert (found.unit, found.adjacency, found.view) == (own[0].unit, "add_remove", own[0].view)
    assert found.method == "tournament of 3, logarithmic, geometric, rdp"
    assert {"score", "secret-runs"} <= {c.code for c in found.caveats}
    assert found.epsilon > find(6, LAWS[-1]).epsilon
    # a capacity that may be too small is paid once for each run that is started
    tight = jfl.sampling.poisson(C, 0.03, capacity=5)
    paid = find(UNTIL, LAWS, [make_plan(z=1.0, sampler=tight)])
    free = find(UNTIL, LAWS, [make_plan(z=1.0, sampler=jfl.sampling.poisson(C, 0.03, capacity=C))])
    assert paid.epsilon > free.epsilon


def runner(scores, log, failing=()):
    """In place of `train`: a run is its seed, its state is how far it came."""

    def train(plans, seeds, rounds, states=None, keep_states=False):
        log.append((list(seeds), rounds, states, keep_states))
        before = [0] * len(seeds) if states is None else [state[1] for state in states]
        return [
            Trained(
                health=Health(7, 7, 7, 7),
                metrics=None,
                params=np.float32(
                    np.nan if (seed, b + rounds) in failing else scores[seed, b + rounds]
                ),
                state=(seed, b + rounds) if keep_states else None,
            )
            for seed, b in zip(seeds, before)
        ]

    return train


def winner(monkeypatch, groups, scores, failing=()):
    log, rungs = [], choosing_runs._rungs(UNTIL, LAWS)
    number = int(np.sum(groups[0], dtype=int))
    monkeypatch.setattr(choosing_runs, "train", runner(scores, log, failing))
    groups = [np.array(g, int) for g in groups]
    best = choosing_runs._run_tournament(
        [None] * number, list(range(number)), rungs, groups, lambda params: params
    )
    return best and (best.number, best.score), log


def test_the_best_of_each_group_goes_on(monkeypatch):
    groups = [[2, 0, 3, 1], [3, 1], [2]]
    scores = {(seed, 1): s for seed, s in enumerate([1, 2, 5, 9, 9, 7])}  # 1, 3 and 5 win
    scores |= {(1, 3): 4.0, (3, 3): 3.0, (5, 3): 0.0}  # of groups {1, nobody, 3} and {5}
    scores |= {(1, 6): 6.0, (5, 6): 8.0}
    best, log = winner(monkeypatch, groups, scores)
    assert best == (5, 8.0)
    # each rung is one call, and goes on from where its runs are for what is left of its rounds
    assert log == [
        ([0, 1, 2, 3, 4, 5], 1, None, True),
        ([1, 3, 5], 2, [(1, 1), (3, 1), (5, 1)], True),
        ([1, 5], 3, [(1, 3), (5, 3)], False),
    ]


def test_who_fails_does_not_go_on(monkeypatch):
    groups = [[2, 1], [1, 1], [2]]
    scores = {(s, r): 10.0 - s for s in range(3) for r in UNTIL}
    assert winner(monkeypatch, groups, scores)[0] == (0, 10.0)
    best, log = winner(monkeypatch, groups, scores, failing={(0, 1)})
    assert best == (1, 9.0) and log[1][0] == [1, 2]
    assert winner(monkeypatch, groups, scores, failing={(0, 3)})[0] == (2, 8.0)
    assert winner(monkeypatch, groups, scores | {(0, 6): np.nan})[0] == (2, 8.0)
    best, log = winner(monkeypatch, groups, scores, failing={(0, 1), (1, 1), (2, 1)})
    assert best is None and len(log) == 1


def test_a_tournament_in_which_nobody_runs(monkeypatch):
    for groups in ([[], [], [0]], [[], [0, 0], [2]], [[0, 0], [1, 1], [2]]):
        assert winner(monkeypatch, groups, {}) == (None, [])


@pytest.mark.slow
def test_groups_follow_their_laws():
    """Means, and independence of what groups have; each within five standard errors."""
    laws = [choosing.geometric(3.0), choosing.geometric(2.0)]
    sizes, runs = [], []
    for seed in range(150):
        groups, settings, seeds = choosing_runs._draw_runs(seed, laws, 4)
        assert [len(g) for g in groups] == [groups[1].sum(), 1]
        assert groups[0].sum() == len(settings) == len(set(seeds))
        sizes += groups[0].tolist()
        runs.append(groups[1][0])
    assert abs(np.mean(runs) - 2.0) < 5 * np.sqrt(2.0 / 150)
    assert abs(np.mean(sizes) - 3.0) < 5 * np.sqrt(6.0 / len(sizes))
    few = [np.array(sizes[: len(sizes) // 2 * 2]).reshape(-1, 2)]
    assert abs(np.corrcoef(few[0].T)[0, 1]) < 5 / np.sqrt(len(few[0]))


@pytest.mark.slow
def test_the_winner_of_a_tournament_is_a_straight_run():
    """Each step again with runs from their start, by hand."""
    rates = [0.1, 0.2, 0.3]
    seed = next(
        s
        for s in range(50)
        if 6 <= len(choosing_runs._draw_runs(s, LAWS, 3)[1]) <= 10
        and choosing_runs._draw_runs(s, LAWS, 3)[0][2][0] > 1
    )
    groups, settings, seeds = choosing_runs._draw_runs(seed, LAWS, 3)
    found = jfl.choose(
        make_plan, rounds=UNTIL, runs=LAWS, seed=seed, score=weight_of, kind="scaffold", lr=rates
    )
    plans = [make_plan(lr=lr, kind="scaffold") for lr in rates]

    @functools.cache
    def straight(i, n):
        key = jax.random.key(int(seeds[i]))
        return jfl.simulate(key, plans[settings[i]], n, evaluate_every=n).params

    there = list(range(len(settings)))
    for rounds, sizes in zip(UNTIL, groups):
        score = lambda i, n=rounds: -1.0 if i is None else weight_of(straight(i, n))
        ends = np.cumsum(sizes)
        there = [max(there[e - s : e], key=score, default=None) for s, e in zip(sizes, ends)]
    assert found.setting == dict(kind="scaffold", lr=rates[settings[there[0]]])
    assert found.score == pytest.approx(weight_of(straight(there[0], 6)), rel=1e-5)
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(straight(there[0], 6))):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_an_empty_cohort_is_no_failure():
    """Whether a cohort is empty hangs on who is there: a choice that shows it would have to be paid
    for."""
    rare = jfl.sampling.poisson(C, 1e-6, capacity=C)
    found = jfl.choose(make_plan, rounds=2, runs=choosing.geometric(3.0), seed=1, sampler=rare)
    assert found.params is not None and found.score > -np.inf


def ditto(x):
    """Noise is in the shared gradient; what a client keeps for itself is trained without."""
    noise = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(5.0), jfl.divide(2.0))
    alg = jfl.algorithms.ditto(
        jfl.private_grad(task.loss, noise),
        lr=0.1,
        steps=2,
        batch=jfl.batches.without_replacement(2),
    )
    return jfl.plan(dataclasses.replace(FED, x=x), task, alg, jfl.sampling.full(C))


def fedavg(x):
    plan = make_plan()
    return dataclasses.replace(plan, fed=dataclasses.replace(FED, x=x))


@pytest.mark.by_default("fedavg")
@pytest.mark.parametrize("make", [fedavg, ditto])
def test_a_row_that_is_not_finite_decides_no_choice(make):
    """It counts as zero, and no run stops for it, so the guarantee has no caveat of one that
    does."""
    bad = FED.x.at[FED.index[0][0]].set(np.nan)
    law = choosing.geometric(3.0)
    found = [jfl.choose(lambda x=x: make(x), rounds=2, runs=law, seed=1) for x in (FED.x, bad)]
    assert all(f.params is not None for f in found)
    assert not any("run that stops" in str(caveat) for caveat in found[1].guarantee.caveats)


@pytest.mark.slow
def test_rows_of_a_client_that_find_no_slot_decide_no_choice():
    """Of whole clients no delta covers them: how many rows a client has may not show."""

    def make(sizes):
        fed = make_federation(sizes=sizes, classes=2)
        release = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(3.0), jfl.divide(3.0))
        batch = jfl.batches.poisson(rate=0.9, capacity=6)
        alg = jfl.algorithms.fedavg(jfl.grad(task.loss), lr=0.1, steps=2, batch=batch)
        return jfl.plan(fed, task, alg, jfl.sampling.full(C), release=release)

    law = choosing.geometric(3.0)
    few, many = ((4,) * C, (4,) * (C - 1) + (40,))
    for sizes in (few, many):
        assert jfl.choose(lambda s=sizes: make(s), rounds=2, runs=law, seed=1).params is not None


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: make_plan(
                noise=jfl.gaussian(jfl.schedules.inverse_sqrt(2.0)), sampler=jfl.sampling.full(C)
            ),
            "noise that changes relative to the sensitivity",
        ),
        (
            lambda: make_plan(
                clip=jfl.schedules.inverse_sqrt(2.0),
                noise=jfl.gaussian(std=1.0),
                sampler=jfl.sampling.full(C),
            ),
            "noise that changes relative to the sensitivity",
        ),
        (
            lambda: make_plan(noise=jfl.correlated(1.0, jfl.strategies.banded_toeplitz(6, 2))),
            "noise that is correlated across rounds",
        ),
        (
            lambda: make_plan(sampler=jfl.sampling.cyclic_poisson(C, 0.5, 2, capacity=C)),
            "sampling.cyclic_poisson, which draws the cohorts of several rounds",
        ),
        (
            lambda: make_plan(sampler=jfl.sampling.random_allocation(C, 3)),
            "sampling.random_allocation, which draws the cohorts of several rounds",
        ),
        (
            lambda: make_plan(
                sampler=jfl.sampling.available_poisson(C, 0.9, period=2, awake=0.5, capacity=C)
            ),
            "sampling.available_poisson, which draws the cohorts of several rounds",
        ),
    ],
)
def test_a_tournament_asks_for_rounds_that_are_alike(make, message):
    plan, law = make(), choosing.geometric(2.0)
    ask = dict(unit=None, view=None, adjacency=None)
    one = choosing_runs._guarantee([plan], choosing_runs._rungs(6, law), DELTA, ask)
    assert 0 < one.epsilon < np.inf  # of one rung it is as it was
    with pytest.raises(
        NotAnalysable,
        match=f"jfl.choose: expected .* identical, for a tournament, but got .*{message}",
    ):
        jfl.choose(lambda: plan, rounds=(2, 6), runs=(law, law))


@pytest.mark.parametrize(
    "rounds, runs, message",
    [
        ((2, 2), 2, "rounds in ascending order"),
        ((3, 2), 2, "rounds in ascending order"),
        ((0, 2), 2, r"an integer rounds\[0\] >= 1"),
        ((1, 2.5), 2, r"an integer rounds\[1\] >= 1"),
        (
            (1, 2, 3),
            2,
            "at least one rung, .*, but got 3 numbers of rounds and 2 distributions",
        ),
        ((), 0, "at least one rung, .*, but got 0"),
        (4, 1, "rounds, a list"),
        ((1, 2), None, "an integer rounds .*pass one distribution of runs per rung"),
    ],
)
def test_what_is_no_tournament_is_refused(rounds, runs, message):
    law = choosing.geometric(2.0)
    laws = law if runs is None else [law] * runs
    with pytest.raises(ValueError, match=f"jfl.choose: expected {message}"):
        jfl.choose(make_plan, rounds=rounds, runs=laws)


def test_laws_of_a_tournament_are_laws():
    with pytest.raises(ValueError, match=r"runs\[1\] of choosing.logarithmic"):
        jfl.choose(make_plan, rounds=(1, 2), runs=(choosing.geometric(2.0), 3))
    with pytest.raises(ValueError, match="at most 10000 runs on average.*got 22500"):
        jfl.choose(make_plan, rounds=(1, 2), runs=[choosing.geometric(150)] * 2)


def test_what_cannot_be_chosen_is_refused():
    law = choosing.geometric(2.0)
    with pytest.raises(ValueError, match="an integer seed"):
        jfl.choose(lambda seed: make_plan(), rounds=2, runs=law, seed=[1, 2])
    with pytest.raises(ValueError, match="choosing.logarithmic"):
        jfl.choose(make_plan, rounds=2, runs=10, lr=[0.1])

    for score in (3, lambda params: "good", lambda params: np.zeros(2), lambda params: None):
        with pytest.raises(ValueError, match="jfl.choose: expected .*score"):
            jfl.choose(make_plan, rounds=2, runs=law, lr=[0.1], score=score)

    def bare(lr):
        made = make_plan(lr)
        silent = [s for s in made.release.stages if s.role != "noise"]
        return dataclasses.replace(made, release=jfl.chain(*silent, adjacency="add_remove"))

    with pytest.raises(ValueError, match="noise in every setting"):
        jfl.choose(bare, rounds=2, runs=law, lr=[0.1])


# --- tuners


class Trial:
    def __init__(self, number, params):
        self.number, self.params = number, params


class Study:
    """A study that tries a list, and remembers in which order it was asked and told."""

    def __init__(self, settings):
        self.settings, self.calls, self.told = list(settings), [], {}

    def ask(self, space):
        number = len([c for c in self.calls if c == "ask"])
        self.calls.append("ask")
        assert list(space) == ["lr"]
        return Trial(number, dict(lr=self.settings[number]))

    def tell(self, trial, value):
        self.calls.append("tell")
        self.told[trial.number] = value


def plain(lr):
    fed = make_federation(classes=3)
    task = jfl.models.logistic(fed)
    algorithm = jfl.algorithms.fedsgd(jfl.grad(task.loss), lr=lr)
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))


def test_what_is_told_is_the_mean_over_seeds_of_separate_runs():
    rates = [0.1, 0.5, 0.2, 0.4, 0.3]
    study = Study(rates)
    found = jfl.ask_tell(
        plain, study, dict(lr=None), rounds=3, trials=5, at_once=2, metric="loss", seeds=(0, 1)
    )
    assert study.calls == ["ask", "ask", "tell", "tell"] * 2 + ["ask", "tell"]
    for number, (lr, row) in enumerate(zip(rates, found, strict=True)):
        each = [jfl.simulate(jax.random.key(s), plain(lr), 3).metrics.loss[-1] for s in (0, 1)]
        assert row["lr"] == lr and row["value"] == study.told[number]
        assert row["value"] == pytest.approx(float(np.mean(each)), rel=1e-5)


@pytest.mark.filterwarnings("ignore:sweep. the point")
def test_a_run_that_fails_is_told_as_nan():
    study = Study([0.1, 3.3e38])
    found = jfl.ask_tell(plain, study, dict(lr=None), rounds=20, trials=2, metric="loss")
    assert np.isfinite(found[0]["value"]) and np.isnan(found[1]["value"])


def test_optuna():
    optuna = pytest.importorskip("optuna", reason="optuna is not installed")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="minimize", sampler=optuna.samplers.RandomSampler(0))
    space = dict(lr=optuna.distributions.FloatDistribution(1e-3, 1.0, log=True))
    found = jfl.ask_tell(plain, study, space, rounds=3, trials=6, at_once=3, metric="loss")
    assert study.best_value == min(row["value"] for row in found) and len(study.trials) == 6


@pytest.mark.parametrize(
    "study, options, words",
    [
        (3, {}, "a study with ask and tell"),
        (Study([0.1]), dict(trials=0), "trials"),
        (Study([0.1]), dict(seeds=()), "seeds"),
        (Study([0.1]), dict(metric="f1"), "a metric of this run"),
    ],
)
def test_bad_arguments(study, options, words):
    with pytest.raises(ValueError, match=words):
        jfl.ask_tell(plain, study, dict(lr=None), **(dict(rounds=1, trials=1) | options))
