"""Settings that a tuner asks for, run as sweeps."""

import jax
import numpy as np
import pytest
from helpers.problems import CLIENTS, make_federation

import jfl


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


def make(lr):
    fed = make_federation(classes=3)
    task = jfl.models.logistic(fed)
    algorithm = jfl.algorithms.fedsgd(jfl.grad(task.loss), lr=lr)
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))


def test_what_is_told_is_the_mean_over_seeds_of_separate_runs():
    rates = [0.1, 0.5, 0.2, 0.4, 0.3]
    study = Study(rates)
    found = jfl.ask_tell(
        make, study, dict(lr=None), rounds=3, trials=5, at_once=2, metric="loss", seeds=(0, 1)
    )
    assert study.calls == ["ask", "ask", "tell", "tell"] * 2 + ["ask", "tell"]
    for number, (lr, row) in enumerate(zip(rates, found, strict=True)):
        each = [jfl.simulate(jax.random.key(s), make(lr), 3).metrics.loss[-1] for s in (0, 1)]
        assert row["lr"] == lr and row["value"] == study.told[number]
        assert row["value"] == pytest.approx(float(np.mean(each)), rel=1e-5)


@pytest.mark.filterwarnings("ignore:sweep. the point")
def test_a_run_that_fails_is_told_as_nan():
    study = Study([0.1, 3.3e38])
    found = jfl.ask_tell(make, study, dict(lr=None), rounds=20, trials=2, metric="loss")
    assert np.isfinite(found[0]["value"]) and np.isnan(found[1]["value"])


def test_optuna():
    optuna = pytest.importorskip("optuna", reason="optuna is not installed")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="minimize", sampler=optuna.samplers.RandomSampler(0))
    space = dict(lr=optuna.distributions.FloatDistribution(1e-3, 1.0, log=True))
    found = jfl.ask_tell(make, study, space, rounds=3, trials=6, at_once=3, metric="loss")
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
        jfl.ask_tell(make, study, dict(lr=None), **(dict(rounds=1, trials=1) | options))
