"""Experiments of Li, Wang, Wu, 2025: their plans, claims that only this paper has, and bounds on a
tiny problem."""

import dataclasses
import json
import os
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from helpers import pretended

from experiments.harness import objectives, runner
from experiments.harness.runner import Experiment
from experiments.harness.verdicts import CONTRADICTED, HOLDS, NOT_REPRODUCED, UNKNOWN
from experiments.papers import trajectories
from experiments.papers.li2025 import bounds as li2025_bounds
from experiments.papers.li2025 import claims as paper
from experiments.papers.li2025 import figures as li2025
from experiments.papers.li2025 import plans as li2025_plans
from experiments.papers.li2025 import theory
from jfl.local import training
from jfl.privacy.accountants import tightest
from jfl.runs import build, sweep
from jfl.runs.config import Config

DIGITS = dict(
    algorithm="output_perturbation",
    dataset="digits",
    model="logistic",
    preprocess="flatten",
    clients=4,
    cohort=2,
    partition="iid",
    batch_sampler="epochs",
    batch=10,
    steps=2,
    rounds=3,
    lr=0.05,
    delta=1e-5,
)
CONVEX = DIGITS | dict(preprocess="unit_norm", l2=0.1, clip_norm=3.0, epsilon=1.0, rounds=4)
PRINTED = dict(epsilon=0.5, mode="as_printed")


def of(fields=DIGITS, **changes):
    return Config(**fields | changes)


# --- plans


@pytest.mark.by_default("fig2-adult")
@pytest.mark.skipif(
    "JFL_DATA_DIR" not in os.environ, reason="needs MNIST and Adult: set JFL_DATA_DIR"
)
@pytest.mark.parametrize("name", [n for n, e in li2025.EXPERIMENTS.items() if e.lines])
def test_every_line_is_a_plan_of_the_paper(name):
    experiment, dealt = li2025.EXPERIMENTS[name], set()
    for title, changes in experiment.lines.items():
        config = Config(**experiment.base | changes)
        rows = dict(mnist=600, adult=325)[config.dataset]
        assert config.steps * config.batch <= rows, title
        if config.partition not in dealt:
            dealt.add(config.partition)
            fed = build.federation(config)
            assert fed.size.tolist() == [rows] * 100
            kinds = {len(set(np.asarray(fed.y)[i])) for i in np.asarray(fed.index)[:, :rows]}
            iid, other = dict(mnist=(10, 4), adult=(2, 1))[config.dataset]
            assert kinds == {iid if config.partition == "similarity" else other}
        made = li2025_plans.build(config, lr=0.1 if config.mode == "sound" else None)
        assert made.sampler.capacity == (config.cohort or 100)
        bare = config.mode == "as_printed" or config.algorithm == "fedavg"
        assert (made.algorithm.releases[0].mechanism is None) == bare, title


def test_rates_fall_with_local_steps_or_rounds_and_the_server_averages():
    rates = lambda clock: li2025_plans.build(of(), clock).algorithm.client.data["work"].lr
    falling = [0.05, 0.05 / 2**0.5, 0.05 / 3**0.5]
    assert [float(rates("step")(t)) for t in range(3)] == pytest.approx(falling)
    assert [float(rates("round")(t)) for t in range(3)] == pytest.approx([0.05, *falling[:2]])
    made = li2025_plans.build(of(epsilon=0.5))
    assert made.algorithm.server.data["step"].lr == 1.0
    start = made.task.init(jax.random.key(0))
    assert all((v == 0).all() for v in jax.tree.leaves(start))
    level = made.algorithm.releases[0].mechanism.stages[-1].noise
    want = paper.noise_multiplier(0.5, 1e-5, 20 / int(made.fed.size.min()))
    assert float(level) == pytest.approx(float(want), rel=1e-6)


def test_noise_in_the_model_is_that_of_the_gradient_over_the_rate():
    """w - lr g + noise against w - lr (g + noise): of one formula, larger by 1 / lr; and the paper
    claims the same of both."""
    config, round_ = of(**PRINTED, steps=3), 3
    plans = {r: li2025_plans.build(config, reading=r) for r in li2025_plans.READINGS}
    std = {
        r: np.asarray(p.algorithm.client.data["mechanism"].stages[-1].noise(round_))
        for r, p in plans.items()
    }
    lr = plans["model"].algorithm.client.data["work"].lr
    last = float(training.sum_of_rates(lr, 3 * round_ + 2, 1))
    whole = float(training.sum_of_rates(lr, 3 * round_, 3))
    assert std["model"] == pytest.approx(std["gradient"] / last, rel=1e-5)
    sizes = np.asarray(plans["model"].fed.size)
    formula = paper.noise_std_printed(last, 3, 1.0, 10, sizes, 0.5, 1e-5)
    assert std["model"] * whole == pytest.approx(np.asarray(formula.value), rel=1e-5)
    claimed = li2025_plans.privacy_of_reading(plans["model"], config)
    assert claimed[-1]["epsilon"] == li2025_plans.privacy(plans["gradient"], config)[-1]["epsilon"]


def test_the_other_reading_of_line_8_clips_each_step_and_has_the_same_noise():
    config = of(**PRINTED, steps=3)
    each, last = (li2025_plans.build(config, reading=r) for r in ("step", "gradient"))
    clips = [p.algorithm.client.static["clip_steps"] for p in (each, last)]
    assert clips == ["all", "last"]
    noise = [p.algorithm.client.data["mechanism"].stages[-1].noise(3) for p in (each, last)]
    assert np.asarray(noise[0]) == pytest.approx(np.asarray(noise[1]))
    (claimed,) = li2025_plans.privacy_of_reading(each, config)
    assert claimed["status"] == "claimed"  # and nothing is proved for so little noise


@pytest.mark.slow
def test_the_median_norm_is_of_gradients_of_minibatches_without_privacy():
    """Softmax regression of zeros on rows x has gradients (p - e_y) x."""
    norm = lambda lr: li2025_plans.median_norm(of(rounds=10, epsilon=0.5, lr=lr))
    fed = build.federation(of())
    x = np.concatenate([np.asarray(fed.x).reshape(len(fed.x), -1), np.ones((len(fed.x), 1))], 1)
    error = 0.1 - np.eye(10)[np.asarray(fed.y)]
    draws = np.random.default_rng(0).integers(0, len(x), (4000, 10))
    means = np.einsum("bni,bnj->bij", error[draws], x[draws]) / 10
    alike = np.median(np.linalg.norm(means.reshape(len(draws), -1), axis=1))
    start = norm(1e-9)  # that no step moves
    assert start == pytest.approx(alike, rel=0.05) and norm(0.05) < start


def test_budgets_of_the_three_kinds_of_lines():
    config = of(steps=1)
    assert set(li2025_plans.budgets(config).values()) == {None}
    rate = 10 / int(build.federation(config).size.min())
    printed = li2025_plans.budgets(of(steps=1, **PRINTED))
    # with one step a round the printed sensitivity is twice the sound one, and the noise is shrunk
    # by lr
    level = 2 * 0.05 * float(paper.noise_multiplier_printed(0.5, 1e-5, rate).value)
    assert printed["ε if clipped"] == pytest.approx(float(paper.round_epsilon(level, 1e-5, rate)))
    assert printed["ε one round"] is None and printed["ε counted"] is None
    assert printed["ε Theorem 2"] == pytest.approx(0.5 * rate * np.sqrt(0.5 * 3 / (1 - rate)))
    # a clock of rounds holds the rates within one
    slow, fast = (li2025_plans.budgets(of(**PRINTED), clock) for clock in ("round", "step"))
    assert slow["ε if clipped"] < fast["ε if clipped"]


def test_a_run_shows_what_is_claimed_beside_what_is_proved(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "compute", pretended.compute)
    # seconds of loss distributions
    monkeypatch.setattr(tightest, "has_loss_distribution", lambda *args: False)
    lines = {m: dict(epsilon=0.5, **changes) for m, changes in li2025.MODES.items()}
    how = dict(runs=li2025_plans.runs(), columns=li2025_plans.budgets)
    experiment = Experiment("digits", DIGITS, lines, seeds=(0, 1), **how)
    printed, sound = runner.run("tiny", experiment, tmp_path)["lines"].values()
    assert sound["epsilon_claimed"] is printed["epsilon_proved"] is None
    assert printed["epsilon_claimed"] == pytest.approx(0.5, rel=1e-4)
    assert sound["columns"]["ε one round"] == pytest.approx(0.5) and sound["epsilon_proved"] > 0.5
    # of 3 rounds, likely none without the client
    assert sound["columns"]["ε counted"] == pytest.approx(sound["epsilon_proved"], rel=0.01)
    assert printed["columns"]["ε if clipped"] > 20 and sound["columns"]["ε Theorem 2"] < 0.5


# --- claims


def test_claims_across_data_read_what_was_left(tmp_path, capsys):
    def leave(best):
        for name, experiment in li2025.EXPERIMENTS.items():
            figure, _, data = name.partition("-")
            if figure not in ("fig2", "fig3") or data not in best:
                continue
            ends = lambda n, data=data: 0.9 if n.endswith(f"Q={best[data]}") else 0.8
            lines = {
                n: dict(accuracy=[ends(n), ends(n) + 1e-4], loss=[1.0, 1.0])
                for n in experiment.lines
            }
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "results.json").write_text(json.dumps(dict(format=2, lines=lines)))

    def verdicts():
        found = runner.run("across", li2025.EXPERIMENTS["across"], tmp_path / "x")
        return [v["verdict"] for v in found["verdicts"]]

    assert verdicts() == [UNKNOWN] * 8 and "fig3-adult" in capsys.readouterr().err
    leave(dict(mnist=20, adult=5))
    assert verdicts() == [NOT_REPRODUCED] * 4 + [HOLDS] * 4
    leave(dict(mnist=50, adult=32))  # of both grids' ends
    assert verdicts() == [NOT_REPRODUCED] * 8


# --- bounds


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_objectives_in_float64_against_numpy(weights):
    fed = build.federation(of(CONVEX))
    task, r = li2025_plans.models.logistic(fed), np.random.default_rng(0)
    plan: Any = SimpleNamespace(fed=fed, task=task)
    params = jax.tree.map(lambda v: r.normal(size=(2, *v.shape)), task.init(jax.random.key(0)))
    seen = trajectories.objective(plan, 0.1, jax.tree.map(lambda v: v[None], params), weights)
    sizes = np.asarray(fed.size, float)
    p = sizes / sizes.sum() if weights == "size" else np.full(len(sizes), 1 / len(sizes))
    (dense,) = params.values()
    for at, (w, b) in enumerate(zip(dense["kernel"], dense["bias"])):
        found = []
        for index, size in zip(np.asarray(fed.index), np.asarray(fed.size)):
            rows = index[:size]
            logits = np.asarray(fed.x, np.float64)[rows].reshape(size, -1) @ w + b
            label = logits[np.arange(size), np.asarray(fed.y)[rows]]
            found.append(np.mean(np.log(np.exp(logits).sum(1)) - label))
        penalty = 0.05 * (np.sum(w**2) + np.sum(b**2))
        assert seen[0, at] == pytest.approx(p @ found + penalty, rel=1e-12)


@pytest.mark.slow
def test_bounds_beside_a_tiny_run(tmp_path, capsys):
    experiment = Experiment(
        "digits",
        CONVEX,
        {"base": {}, "other": dict(steps=1)},
        quick=dict(rounds=3),
        quick_lines=("base",),
        seeds=(0, 1),
        special=li2025_bounds.bounds,
    )
    found = runner.run("bounds", experiment, tmp_path, quick=True)
    config, told = of(CONVEX, rounds=3), found["constants"]
    fed = build.federation(config)
    best = objectives.optimum(li2025_plans.models.logistic(fed), fed, 0.1, weights="uniform")
    assert told["optimum"] == pytest.approx(best.value, abs=1e-10)
    assert told["gap"] > 0 and told["mu"] == 0.1
    distance = sum((v**2).sum() for v in jax.tree.leaves(best.params))
    assert told["distance"] == pytest.approx(distance)
    free, printed, sound = (found["runs"][f"base, {r}"] for r in ("no noise", "printed", "sound"))
    assert free["steps"] == [2, 4, 6]
    assert 0 < free["gap"][-1] < free["gap"][0] < np.log(10) - told["optimum"]
    assert sound["gap"][-1] > 10 * free["gap"][-1] and printed["ours"] is None
    shares, z, smooth = np.full(4, 0.25), li2025_plans.multiplier(config, fed), told["smoothness"]
    variance = li2025_bounds.constants(li2025_bounds._problem(config))["variance"]
    terms = (
        float(theory.gradient_term(shares, variance, 10, 2, 3.0, smooth, told["gap"]))
        + float(theory.sampling_term("without_replacement", 2, 3.0, shares, 2))
        + float(theory.noise_term(650, 2, 3.0, shares, z, "without_replacement", 2))
    )
    ours = theory.bound_gap(np.array([2, 4, 6]), terms, told["distance"], 0.1, smooth, 2)
    assert sound["ours"] == pytest.approx(np.asarray(ours).tolist())
    assert [v["verdict"] for v in found["verdicts"][:2]] == [HOLDS] * 2
    assert len(found["rounds_to_a_tenth"]["sound"]) > 3 and "orders" in capsys.readouterr().out


def test_a_bound_below_the_gap_is_told():
    gap = np.array([1.0, 0.5])
    assert li2025_bounds._above(np.array([2.0, 50.0]), gap)[1] == "2.0 orders"
    assert li2025_bounds._above(np.array([0.9, 50.0]), gap)[1] == "BELOW"


# --- lemmas


def test_lemmas_along_a_tiny_run(tmp_path):
    """The printed noise breaks Lemma A6 only; a clip norm that gradients exceed leaves A3 open."""
    equal = dict(partition="similarity", share=1.0, rows_per_client=100)
    base = CONVEX | equal | dict(preprocess="flatten,unit_norm", rounds=1)
    experiment = dataclasses.replace(li2025.EXPERIMENTS["lemmas"], base=base, quick={})
    found = runner.run("lemmas", experiment, tmp_path)
    told = {v["claim"]: v["verdict"] for v in found["verdicts"] if v["whose"] == "paper"}
    false = {claim for claim, verdict in told.items() if verdict == CONTRADICTED}
    assert false == {claim for claim in told if "equal chances" in claim} | {
        claim for claim in told if "A6" in claim and "printed" in claim
    }
    assert set(told.values()) == {HOLDS, CONTRADICTED} and len(told) == 13
    ours = [v["verdict"] for v in found["verdicts"] if v["whose"] == "ours"]
    assert ours == [HOLDS, NOT_REPRODUCED, HOLDS, NOT_REPRODUCED, HOLDS]
    short = dataclasses.replace(experiment, base=experiment.base | dict(clip_norm=0.1))
    again = runner.run("lemmas", short, tmp_path / "short")
    open_ = {v["claim"] for v in again["verdicts"] if v["verdict"] == UNKNOWN}
    assert {claim.split(" holds")[0].partition(" (")[0] for claim in open_} == {
        "Lemma A3",
        "Lemma A6",
    }
