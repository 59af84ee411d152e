"""Experiments of Li, Wang, Wu, 2025: their plans, claims that can fail, and bounds on a tiny
problem."""

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
from experiments.harness import results as results_file
from experiments.harness.runner import Experiment, Line
from experiments.harness.verdicts import (
    HOLDS,
    NOT_REPRODUCED,
    UNDECIDED,
    UNKNOWN,
    Claim,
    close,
    judge,
)
from experiments.papers import trajectories
from experiments.papers.li2025 import bounds as li2025_bounds
from experiments.papers.li2025 import claims as paper
from experiments.papers.li2025 import figures as li2025
from experiments.papers.li2025 import plans as li2025_plans
from experiments.papers.li2025 import theory
from jfl.local import training
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
CONVEX = {
    **DIGITS,
    "preprocess": "unit_norm",
    "l2": 0.1,
    "clip_norm": 3.0,
    "epsilon": 1.0,
    "rounds": 4,
}


def line(*accuracy):
    return Line(np.array(accuracy), np.ones(len(accuracy)), None, None, 0.0)


# --- plans


@pytest.mark.by_default("fig2-adult")
@pytest.mark.skipif(
    "JFL_DATA_DIR" not in os.environ, reason="needs MNIST and Adult: set JFL_DATA_DIR"
)
@pytest.mark.parametrize("name", [n for n, e in li2025.EXPERIMENTS.items() if e.lines])
def test_every_line_is_a_plan_of_the_paper(name):
    experiment, dealt = li2025.EXPERIMENTS[name], set()
    assert set(experiment.quick_lines) <= set(experiment.lines)
    for title, changes in experiment.lines.items():
        config = Config(**{**experiment.base, **changes})
        rows = dict(mnist=600, adult=325)[config.dataset]
        assert config.steps * config.batch <= rows, title
        if config.partition not in dealt:
            dealt.add(config.partition)
            fed = build.federation(config)
            assert fed.size.tolist() == [rows] * 100
            kinds = [len(set(np.asarray(fed.y)[i])) for i in np.asarray(fed.index)[:, :rows]]
            iid, other = dict(mnist=(10, 4), adult=(2, 1))[config.dataset]
            assert set(kinds) == ({iid} if config.partition == "similarity" else {other})
        made = li2025_plans.build(config, lr=0.1 if config.mode == "sound" else None)
        assert made.sampler.capacity == (config.cohort or 100)
        release = made.algorithm.releases[0]
        assert (release.mechanism is None) == (
            config.mode == "as_printed" or config.algorithm == "fedavg"
        ), title


def test_rates_fall_with_local_steps_or_rounds_and_the_server_averages():
    config = Config(**DIGITS)
    rates = {
        c: li2025_plans.build(config, c).algorithm.client.data["work"].lr for c in ("step", "round")
    }
    assert [float(rates["step"](t)) for t in range(3)] == pytest.approx(
        [0.05, 0.05 / 2**0.5, 0.05 / 3**0.5]
    )
    assert [float(rates["round"](t)) for t in range(3)] == pytest.approx(
        [0.05, 0.05, 0.05 / 2**0.5]
    )
    made = li2025_plans.build(config)
    assert made.algorithm.server.data["step"].lr == 1.0
    start = made.task.init(jax.random.key(0))
    assert all((v == 0).all() for v in jax.tree.leaves(start))
    private = li2025_plans.build(dataclasses.replace(config, epsilon=0.5))
    rate = 20 / int(private.fed.size.min())
    level = private.algorithm.releases[0].mechanism.stages[-1].noise
    assert float(level) == pytest.approx(float(paper.noise_multiplier(0.5, 1e-5, rate)), rel=1e-6)


@pytest.mark.parametrize("round_", [0, 3])
def test_noise_in_the_model_is_that_of_the_gradient_over_the_rate(round_):
    """w - lr g + noise against w - lr (g + noise): of one formula, larger by 1 / lr; and the paper
    claims the same of both."""
    config = Config(**{**DIGITS, "epsilon": 0.5, "mode": "as_printed", "steps": 3})
    plans = {r: li2025_plans.build(config, reading=r) for r in li2025_plans.READINGS}
    work = plans["model"].algorithm.client.data["work"]
    std = {r: p.algorithm.client.data["mechanism"].stages[-1].noise for r, p in plans.items()}
    at = lambda r: np.asarray(std[r](round_))
    last, whole = (
        training.sum_of_rates(work.lr, 3 * round_ + 2, 1),
        training.sum_of_rates(work.lr, 3 * round_, 3),
    )
    assert at("model") == pytest.approx(at("gradient") / float(last), rel=1e-5)
    sizes = np.asarray(plans["model"].fed.size)
    formula = paper.noise_std_printed(float(last), 3, 1.0, 10, sizes, 0.5, 1e-5)
    assert at("model") * float(whole) == pytest.approx(np.asarray(formula.value), rel=1e-5)
    claimed = li2025_plans.privacy_in_model(plans["model"], config)
    assert claimed[-1]["epsilon"] == li2025_plans.privacy(plans["gradient"], config)[-1]["epsilon"]


@pytest.mark.slow
def test_the_median_norm_is_of_gradients_of_minibatches_without_privacy():
    """Softmax regression of zeros on rows x has gradients (p - e_y) x: of full batches of one row
    that are all alike the norm is known."""
    config = Config(**{**DIGITS, "rounds": 10, "epsilon": 0.5})
    norms = [li2025_plans.median_norm(dataclasses.replace(config, lr=lr)) for lr in (1e-9, 0.05)]
    fed = build.federation(config)
    x = np.concatenate([np.asarray(fed.x).reshape(len(fed.x), -1), np.ones((len(fed.x), 1))], 1)
    error = 0.1 - np.eye(10)[np.asarray(fed.y)]
    draws = np.random.default_rng(0).integers(0, len(x), (4000, 10))
    means = np.einsum("bni,bnj->bij", error[draws], x[draws]) / 10
    alike = np.median(np.linalg.norm(means.reshape(len(draws), -1), axis=1))
    assert norms[0] == pytest.approx(alike, rel=0.05)  # a start that no step moves
    assert norms[1] < norms[0]


def test_budgets_of_the_three_kinds_of_lines():
    config = Config(**{**DIGITS, "steps": 1})
    assert set(li2025_plans.budgets(config).values()) == {None}
    rate = 10 / int(build.federation(config).size.min())
    printed = li2025_plans.budgets(dataclasses.replace(config, epsilon=0.5, mode="as_printed"))
    # with one step a round the printed sensitivity is twice the sound one, and the noise is shrunk
    # by lr
    level = 2 * 0.05 * float(paper.noise_multiplier_printed(0.5, 1e-5, rate).value)
    assert printed["ε if clipped"] == pytest.approx(float(paper.round_epsilon(level, 1e-5, rate)))
    assert printed["ε one round"] is None and printed["ε counted"] is None
    assert printed["ε Theorem 2"] == pytest.approx(0.5 * rate * np.sqrt(0.5 * 3 / (1 - rate)))
    # a clock of rounds holds the rates within one
    slow, fast = (
        li2025_plans.budgets(Config(**DIGITS, epsilon=0.5, mode="as_printed"), c)
        for c in ("round", "step")
    )
    assert slow["ε if clipped"] < fast["ε if clipped"]


# --- a run


@pytest.mark.by_default("accounted")  # a line is trained in test_experiments_noble2022.py
@pytest.mark.parametrize("trained", [False, True], ids=["accounted", "trained"])
def test_a_run_shows_what_is_claimed_beside_what_is_proved(trained, tmp_path, capsys, monkeypatch):
    if not trained:
        monkeypatch.setattr(sweep, "compute", pretended.compute)
    lines = {m: dict(epsilon=0.5, **changes) for m, changes in li2025.MODES.items()}
    experiment = Experiment(
        "digits",
        DIGITS,
        lines,
        (runner.Claim("equal", close("printed", "sound", 1e-9)),),
        seeds=(0, 1),
        runs=li2025_plans.runs(),
        columns=li2025_plans.budgets,
    )
    found = runner.run("tiny", experiment, tmp_path)
    printed, sound = found["lines"].values()
    assert all(len(v["accuracy"]) == 2 and 0 < v["accuracy"][0] <= 1 for v in (printed, sound))
    assert sound["epsilon_claimed"] is printed["epsilon_proved"] is None and found["verdicts"][0][
        "verdict"
    ] in (UNDECIDED, NOT_REPRODUCED)
    assert printed["epsilon_claimed"] == pytest.approx(0.5, rel=1e-4)
    assert sound["columns"]["ε one round"] == pytest.approx(0.5) and sound["epsilon_proved"] > 0.5
    assert sound["columns"]["ε counted"] == pytest.approx(
        sound["epsilon_proved"], rel=0.01
    )  # of 3 rounds, likely none without
    assert printed["columns"]["ε if clipped"] > 20 and sound["columns"]["ε Theorem 2"] < 0.5
    assert not trained or np.mean(printed["loss"]) < np.mean(sound["loss"])  # less noise
    written = results_file.read(tmp_path / "results.json").lines
    results_file.write(tmp_path / "rounded.json", results_file.of(found))
    assert written == results_file.read(tmp_path / "rounded.json").lines
    ran = lambda: {p: p.stat().st_mtime_ns for p in (tmp_path / runner.KEPT).glob("*/runs.jsonl")}
    before = ran()
    assert runner.run("tiny", experiment, tmp_path)["verdicts"] == found["verdicts"]
    assert len(before) == 2 and ran() == before
    assert "ε if clipped" in capsys.readouterr().out


def test_the_list_names_all_experiments(capsys):
    assert runner.main("li2025", li2025.EXPERIMENTS, ["--list"]) == 0
    out = capsys.readouterr().out
    assert all(
        n in out
        for n in (
            "fig2-mnist",
            "fig2-adult",
            "fig3-mnist",
            "fig3-adult",
            "across",
            "clock",
            "bounds",
        )
    )
    assert runner.main("li2025", li2025.EXPERIMENTS, ["fig3-adult", "--list"]) == 0
    assert "iid printed Q=32" in capsys.readouterr().out.splitlines()


# --- claims


def verdict(check, results):
    return judge(runner.Claim("it is so", check), results, 1, "ours")[0]


@pytest.mark.parametrize(
    "check, good, bad",
    [
        (li2025.small_harm("a", "b", "c"), (0.7, 0.8, 0.79), (0.7, 0.8, 0.77)),
        (li2025.above_floor(0.75, "abc"), (0.8, 0.76, 0.9), (0.8, 0.74, 0.9)),
    ],
)
def test_checks_go_both_ways(check, good, bad):
    results = lambda means: {n: line(m - 1e-4, m + 1e-4, m) for n, m in zip("abc", means)}
    assert verdict(check, results(good)) == HOLDS
    assert verdict(check, results(bad)) == NOT_REPRODUCED
    # not run, or seeds failed
    assert verdict(check, {n: r for n, r in results(good).items() if n != "c"}) == UNKNOWN


@pytest.mark.parametrize(
    "adult, sound, found",
    [(0.85, 0.60, HOLDS), (0.85, 0.80, NOT_REPRODUCED), (0.764, 0.60, UNKNOWN)],
)
def test_a_drop_from_the_majority_class_says_nothing(adult, sound, found):
    means = {
        "mnist iid no privacy": 0.9,
        "mnist iid sound ε=0.5": 0.8,
        "adult iid no privacy": adult,
        "adult iid sound ε=0.5": sound,
    }
    results = {n: line(m, m + 1e-4) for n, m in means.items()}
    assert verdict(li2025.drop_is_larger("iid", "sound"), results) == found


def test_sound_lines_are_our_own_statements():
    claims = [c for e in li2025.EXPERIMENTS.values() for c in e.claims]
    assert {c.whose for c in claims if c.text.endswith("sound")} == {"ours"}
    assert {c.whose for c in claims if c.text.endswith("printed")} == {"paper"}


def test_claims_across_data_read_what_was_left(tmp_path, capsys):
    def leave(best):
        for figure in ("fig2", "fig3"):
            for data in li2025.DATA:
                lines = {
                    n: dict(
                        accuracy=[
                            (0.9 if n.endswith(f"Q={best[data]}") else 0.8) + e for e in (0, 1e-4)
                        ],
                        loss=[1.0, 1.0],
                        epsilon_proved=None,
                        epsilon_claimed=None,
                        seconds_per_round=0.0,
                    )
                    for n in li2025.EXPERIMENTS[f"{figure}-{data}"].lines
                }
                (tmp_path / f"{figure}-{data}").mkdir(exist_ok=True)
                (tmp_path / f"{figure}-{data}" / "results.json").write_text(
                    json.dumps(dict(format=2, lines=lines))
                )

    def verdicts():
        return [
            v["verdict"]
            for v in runner.run("across", li2025.EXPERIMENTS["across"], tmp_path / "x")["verdicts"]
        ]

    assert verdicts() == [UNKNOWN] * 8 and "fig3-adult" in capsys.readouterr().err
    leave(dict(mnist=20, adult=5))
    assert verdicts() == [NOT_REPRODUCED] * 4 + [HOLDS] * 4
    for best in (
        dict(mnist=5, adult=5),
        dict(mnist=50, adult=32),
    ):  # the second pair is of both grids' ends
        leave(best)
        assert verdicts() == [NOT_REPRODUCED] * 8


# --- bounds


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_objectives_in_float64_against_numpy(weights):
    fed = build.federation(Config(**CONVEX))
    task, r = li2025_plans.models.logistic(fed), np.random.default_rng(0)
    plan: Any = SimpleNamespace(fed=fed, task=task)
    params = jax.tree.map(lambda v: r.normal(size=(2, 3, *v.shape)), task.init(jax.random.key(0)))
    seen = trajectories.objective(plan, 0.1, params, weights)
    sizes = np.asarray(fed.size, float)
    p = sizes / sizes.sum() if weights == "size" else 1 / len(sizes)
    (dense,) = params.values()
    for at in np.ndindex(2, 3):
        w, b = dense["kernel"][at], dense["bias"][at]
        found = []
        for index, size in zip(np.asarray(fed.index), np.asarray(fed.size)):
            rows = index[:size]
            logits = np.asarray(fed.x, np.float64)[rows].reshape(size, -1) @ w + b
            label = logits[np.arange(size), np.asarray(fed.y)[rows]]
            found.append(np.mean(np.log(np.exp(logits).sum(1)) - label))
        penalty = 0.05 * (np.sum(w**2) + np.sum(b**2))
        assert seen[at] == pytest.approx(np.sum(p * np.array(found)) + penalty, rel=1e-12)


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
    config, told = Config(**{**CONVEX, "rounds": 3}), found["constants"]
    assert set(found["runs"]) == {f"base, {r}" for r in ("no noise", "printed", "sound")}
    fed = build.federation(config)
    task = li2025_plans.models.logistic(fed)
    start = objectives.optimum(task, fed, 0.1, weights="uniform")
    assert (
        told["optimum"] == pytest.approx(start.value, abs=1e-10)
        and told["gap"] > 0
        and told["mu"] == 0.1
    )
    assert told["distance"] == pytest.approx(
        sum((v**2).sum() for v in jax.tree.leaves(start.params))
    )
    free, printed, sound = found["runs"].values()
    assert (
        free["steps"] == [2, 4, 6]
        and 0 < free["gap"][-1] < free["gap"][0] < np.log(10) - told["optimum"]
    )
    assert sound["gap"][-1] > 10 * free["gap"][-1] and printed["ours"] is None
    shares, z = np.full(4, 0.25), li2025_plans.multiplier(config, fed)
    variance = li2025_bounds.constants(li2025_bounds._problem(config))["variance"]
    base = float(
        theory.gradient_term(shares, variance, 10, 2, 3.0, told["smoothness"], told["gap"])
    )
    terms = (
        base
        + float(theory.sampling_term("without_replacement", 2, 3.0, shares, 2))
        + float(theory.noise_term(650, 2, 3.0, shares, z, "without_replacement", 2))
    )
    assert sound["ours"] == pytest.approx(
        np.asarray(
            theory.bound_gap(
                np.array([2, 4, 6]), terms, told["distance"], 0.1, told["smoothness"], 2
            )
        ).tolist()
    )
    assert found["verdicts"][0]["verdict"] == found["verdicts"][1]["verdict"] == HOLDS
    assert (
        found["verdicts"][1]["seen"] == "2 of 2 runs"
        and len(found["rounds_to_a_tenth"]["sound"]) > 3
    )
    assert "orders" in capsys.readouterr().out


def test_a_bound_below_the_gap_is_told():
    gap = np.array([1.0, 0.5])
    assert li2025_bounds._above(np.array([2.0, 50.0]), gap)[1] == "2.0 orders"
    assert li2025_bounds._above(np.array([0.9, 50.0]), gap)[1] == "BELOW"
    assert li2025_bounds._above(None, gap) == ("", "")


@pytest.mark.slow
def test_theory_runs_take_the_rates_of_the_theorem(monkeypatch):
    taken = {}
    monkeypatch.setattr(li2025_bounds, "build", lambda config, **options: taken.update(options))
    monkeypatch.setattr(
        trajectories, "along", lambda *_: (_ for _ in ()).throw(RuntimeError("far enough"))
    )
    config = Config(**CONVEX)
    with pytest.raises(RuntimeError, match="far enough"):
        li2025_bounds.against(config, "sound", (0,))
    smooth = li2025_bounds.constants(li2025_bounds._problem(config))["smoothness"]
    assert float(training.sum_of_rates(taken["lr"], 0, 1)) == pytest.approx(
        2 / (0.1 * max(8 * smooth / 0.1, 2))
    )


def test_what_noise_costs_is_measured_at_one_rate():
    """Beside a line without privacy at a rate of its own, the private one is compared with that at
    the paper's; where all have rates of their own, with that."""
    first, own, private = (line(end, end + 0.01, end) for end in (0.81, 0.91, 0.805))
    results = {
        "iid no privacy": own,
        "iid no privacy" + runner.FIRST: first,
        **{f"iid printed ε={e:g}": private for e in li2025.EPSILONS},
    }
    (claim,) = (
        c
        for c in li2025.PRINTED_RATES["fig2-mnist"].claims
        if c.text.startswith("(b)") and c.text.endswith(", iid, printed")
    )
    assert judge(claim, results, 1, "")[0] == HOLDS
    del results["iid no privacy" + runner.FIRST]  # no rate was chosen: this is the paper's
    assert judge(claim, results, 1, "open")[0] == NOT_REPRODUCED
    tuned = li2025.EXPERIMENTS["fig2_tuned"]
    assert set(tuned.methods) == set(tuned.lines) and {c.whose for c in tuned.claims} == {"ours"}
    assert set(tuned.grid) == {"lr"}  # a small G takes the printed noise away
    both = {f"mnist {name}": end for name, end in results.items()}
    (claim,) = (c for c in tuned.claims if c.text.startswith("(b)") and ", iid, printed" in c.text)
    assert judge(claim, both, 1, "open")[0] == NOT_REPRODUCED


def test_a_drop_is_measured_at_one_rate_too():
    """At the paper's rate Adult loses 0.02 and MNIST 0.005; at its own MNIST would lose 0.1."""
    results = {
        "mnist iid no privacy": line(0.91, 0.91, 0.912),
        "mnist iid no privacy" + runner.FIRST: line(0.815, 0.815, 0.816),
        "mnist iid printed ε=0.5": line(0.81, 0.81, 0.811),
        "adult iid no privacy": line(0.85, 0.85, 0.851),
        "adult iid no privacy" + runner.FIRST: line(0.82, 0.82, 0.821),
        "adult iid printed ε=0.5": line(0.8, 0.8, 0.801),
    }
    claim = Claim("", li2025.drop_is_larger("iid", "printed"))
    assert judge(claim, results, 1, "open")[0] == HOLDS
    for name in ("mnist iid no privacy", "adult iid no privacy"):
        del results[name + runner.FIRST]
    assert judge(claim, results, 1, "open")[0] == NOT_REPRODUCED
