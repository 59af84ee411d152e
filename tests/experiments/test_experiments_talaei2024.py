"""Experiments of Talaei, Izadi, 2024: plans, clients that swap their quality, claims that can fail,
and the study."""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest

import jfl
from experiments.harness import kept_runs, runner
from experiments.harness import results as results_file
from experiments.harness.runner import Experiment, Line
from experiments.harness.verdicts import (
    CONTRADICTED,
    HOLDS,
    NOT_REPRODUCED,
    UNDECIDED,
    UNKNOWN,
    judge,
)
from experiments.papers import as_printed
from experiments.papers.talaei2024 import claims as paper
from experiments.papers.talaei2024 import figures as talaei2024
from experiments.papers.talaei2024 import plans as talaei2024_plans
from experiments.papers.talaei2024 import study as talaei2024_study
from experiments.papers.talaei2024 import theory
from jfl import schedules
from jfl.runs import build
from jfl.runs.config import Config
from jfl.sampling.weights import impact

DIGITS = dict(
    algorithm="padpfl",
    dataset="digits",
    model="logistic",
    batch_sampler="full",
    steps=2,
    rounds=4,
    lr=0.1,
    delta=0.01,
    partition="iid",
    groups=(2, 2),
    clients=4,
    group_rows=(20, 30),
    impact=(1.0, 2.0),
)
NOISY = {**DIGITS, "unit": "client", "upload": "difference", "clip_norm": 0.2, "epsilon": 20.0}
SWAPPED = {
    **NOISY,
    "group_rows": (20, 20),
    "group_noise": (0.5, 0.1, 0.1, 0.5),
    "impact": (0.0, 2.0, 2.0, 0.0),
}


def line(*loss):
    return Line(np.ones(len(loss)), np.array(loss), None, None, 0.0)


# --- plans


@pytest.mark.by_default("fig9")
@pytest.mark.skipif("JFL_DATA_DIR" not in os.environ, reason="needs MNIST: set JFL_DATA_DIR")
@pytest.mark.parametrize("name", ["fig2", "fig7", "fig9"])
def test_lines_are_plans_of_the_paper(name):
    experiment, number = talaei2024.EXPERIMENTS[name], theory.FIGURES[name][0]
    assert set(experiment.quick_lines) <= set(experiment.lines)
    groups = theory.SCENARIOS[number].groups
    title = [n for n in experiment.lines if n.startswith("labels")][0]
    (config, rounds), *later = talaei2024_plans.stages(
        Config(**{**experiment.base, **experiment.lines[title]})
    )
    plan = talaei2024_plans.build(dataclasses.replace(config, hidden=(4,)))
    assert plan.fed.size.tolist() == [g.rows for g in groups for _ in range(g.clients)]
    assert plan.fed.x.shape[0] == sum(g.rows * g.clients for g in groups)
    y = np.asarray(plan.fed.y)
    kinds = {len(set(y[np.asarray(i)[:n]].tolist())) for i, n in zip(plan.fed.index, plan.fed.size)}
    assert kinds == {2} and [rounds, *(r for _, r in later)] == (
        [10, 20] if name == "fig9" else [30]
    )
    ratios = theory.ratios_at(theory.SCENARIOS[number], theory.FIGURES[name][1][0].assignment, 0)
    p = np.repeat(
        paper.assign_impact(ratios, [g.clients for g in groups]), [g.clients for g in groups]
    )
    np.testing.assert_allclose(np.asarray(plan.weights), 60 * p, rtol=1e-6)
    if number != 3:  # the pixels that became black or white
        x, owners = np.asarray(plan.fed.x), np.asarray(plan.fed.index)
        white = [float((x[owners[c][:150]] == 1.0).mean()) for c in (0, 20, 40)]
        spoiled = [theory.DENSITY[g.quality] / 2 for g in groups]
        np.testing.assert_allclose(white, spoiled, atol=0.02)


def test_the_lines_of_all_figures():
    for name, (number, runs) in theory.FIGURES.items():
        e = talaei2024.EXPERIMENTS[name]
        modes = 1 if runs[0].epsilon is None else len(talaei2024.MODES)
        assert len(e.lines) == 2 * modes * len(runs) and len(e.claims) == 2 * modes * len(
            theory.STATEMENTS[name]
        )
        for fields in e.lines.values():
            config = Config(**{**e.base, **fields})
            assert len(config.impact) == 3 * (2 if number == 4 else 1) and config.clients == 60
            assert (config.rounds, config.delta, config.steps) == (30, 0.01, 5) and config.lr in (
                0.02,
                0.2,
            )
    assert talaei2024.clip_of(256) == 24.5
    assert talaei2024.EXPERIMENTS["fig9"].lines["iid printed adaptive ε=5"]["impact"] == (
        0,
        1,
        2,
        2,
        1,
        0,
    )
    assert talaei2024.EXPERIMENTS["fig8"].lines["iid 0-1-2"]["impact"] == (0, 1, 2, 0, 1, 2)
    assert talaei2024.EXPERIMENTS["fig8"].base["group_noise"] == (0.5, 0.25, 0.05, 0.05, 0.25, 0.5)


def test_a_smaller_federation_is_the_same_one():
    config = Config(**DIGITS)
    whole, owned = build.federation(config), talaei2024_plans.build(config).fed
    assert owned.x.shape[0] == 100 < whole.x.shape[0]
    for i, size in enumerate(whole.size.tolist()):
        for of in ("x", "y"):
            mine = [
                np.asarray(getattr(f, of))[np.asarray(f.index[i][:size])] for f in (whole, owned)
            ]
            np.testing.assert_array_equal(*mine)


# --- two stages


def test_stages_of_a_swap(monkeypatch):
    monkeypatch.setattr(talaei2024_plans, "SWAP", 1)
    (first, one), (second, rest) = talaei2024_plans.stages(Config(**SWAPPED))
    assert (one, rest) == (1, 3) and (first.impact, second.impact) == ((0.0, 2.0), (2.0, 0.0))
    assert (first.group_noise, second.group_noise) == (
        (0.5, 0.1),
        (0.1, 0.5),
    ) and second.rounds == 4
    assert talaei2024_plans.stages(Config(**DIGITS)) == [(Config(**DIGITS), 4)]
    plans = [(talaei2024_plans.build(c), r) for c, r in ((first, one), (second, rest))]
    # all clients may be the worst in each stage: no less than one plan whose factors change
    together = talaei2024_plans.proved(plans, "third_party", 0.01).epsilon
    z = float(plans[0][0].upload.stages[-1].noise) * 2**0.5  # of two clients, with p = 1/2
    assert together == pytest.approx(float(paper.gaussian_epsilon(np.sqrt(4) / z, 0.01)), rel=1e-4)
    assert talaei2024_plans.proved(plans, "server", 0.01).epsilon == pytest.approx(20, rel=1e-4)


@pytest.mark.slow
def test_a_run_goes_on_where_the_quality_is_swapped(monkeypatch):
    """Without noise and swap, two stages are the run of one plan; with factors that change, of a
    plan with a schedule."""
    monkeypatch.setattr(talaei2024_plans, "SWAP", 2)
    config = Config(
        **{
            **DIGITS,
            "group_rows": (20, 20),
            "impact": (1.0, 2.0, 2.0, 1.0),
            "group_noise": (0.2,) * 4,
        }
    )
    parts = [
        (talaei2024_plans.build(part), rounds) for part, rounds in talaei2024_plans.stages(config)
    ]
    key = jax.random.key(0)
    found = talaei2024_plans.one_by_one(key, parts, 1)
    first = parts[0][0]
    whole = jfl.plan(
        first.fed,
        first.task,
        first.algorithm,
        first.sampler,
        weights=schedules.piecewise([2], [impact(ratios, (2, 2)) for ratios in ((1, 2), (2, 1))]),
    )
    alone = talaei2024_plans.one_by_one(key, [(whole, 4)], 1)
    assert found["round"] == [1, 2, 3, 4] and len(found["loss"]) == 4
    np.testing.assert_allclose(found["loss"], alone["loss"], rtol=1e-5)
    assert (
        abs(found["loss"][-1] / talaei2024_plans.one_by_one(key, [(first, 4)], 1)["loss"][-1] - 1)
        > 1e-4
    )


# --- a run


@pytest.mark.slow
def test_a_run_shows_what_is_claimed_beside_what_is_proved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(talaei2024_plans, "SWAP", 2)
    # of less noise than for 0.5, computed with a finite reach, nothing is proved
    printed_ = dict(mode="as_printed", upload="model", clip_norm=2.0, epsilon=0.5)
    lines = {
        "printed": printed_,
        "third": dict(view="third_party"),
        "swapped": dict(
            group_rows=(20, 20), group_noise=SWAPPED["group_noise"], impact=SWAPPED["impact"]
        ),
    }
    experiment = Experiment(
        "digits",
        NOISY,
        lines,
        (runner.Claim("x", talaei2024.lower("third", "printed")),),
        seeds=(0, 1),
        runs=talaei2024_plans.swapped,
        columns=talaei2024_plans.budgets,
    )
    found = runner.run("tiny", experiment, tmp_path)
    printed_, third, swapped = found["lines"].values()
    together = dataclasses.replace(
        experiment, runs=talaei2024_plans.RUNS, lines=dict(list(lines.items())[:2])
    )
    for line, other in runner.run("tiny", together, tmp_path / "together")[
        "lines"
    ].items():  # as one program
        assert other["epsilon_proved"] == found["lines"][line]["epsilon_proved"]
        np.testing.assert_allclose(other["loss"], found["lines"][line]["loss"], rtol=1e-4)
    assert (
        printed_["epsilon_claimed"] == pytest.approx(0.5, rel=1e-4)
        and printed_["epsilon_proved"] > 50 * 0.5
    )
    assert (
        third["epsilon_proved"] == pytest.approx(20, rel=1e-4) and third["columns"]["ε server"] > 40
    )
    assert (
        swapped["epsilon_proved"] == swapped["columns"]["ε server"] == pytest.approx(20, rel=1e-4)
    )
    assert (
        printed_["columns"]["ε third party"] < printed_["columns"]["ε server"]
        and third["epsilon_claimed"] is None
    )
    assert len(swapped["loss"]) == 2 and swapped["loss"][0] != swapped["loss"][1]
    assert (
        found["verdicts"][0]["verdict"] in (HOLDS, NOT_REPRODUCED, UNDECIDED)
        and "±" in found["verdicts"][0]["seen"]
    )
    written = results_file.read(tmp_path / "results.json").lines
    results_file.write(tmp_path / "rounded.json", results_file.of(found))
    assert written == results_file.read(tmp_path / "rounded.json").lines
    out = capsys.readouterr().out
    assert "ε third party" in out and "loss" in out
    # noise as printed is that of the formula, for the rows of the smallest client
    made = talaei2024_plans.build(Config(**{**NOISY, **lines["printed"]}))
    want = paper.client_noise_std_printed(2.0, 1, float(paper.gaussian_factor(0.01)), 20, 0.5).value
    assert float(made.upload.stages[-1].noise) == pytest.approx(float(want), rel=1e-6)
    assert as_printed.claimed(made, 4, 0.01).status == "claimed"


def test_the_list_names_all_experiments(capsys):
    assert runner.main("talaei2024", talaei2024.EXPERIMENTS, ["--list"]) == 0
    out = capsys.readouterr().out
    assert all(n in out for n in (*theory.FIGURES, "noise", "argmin", "study"))
    assert runner.main("talaei2024", talaei2024.EXPERIMENTS, ["fig3", "--list"]) == 0
    assert "labels difference 0-1-2 ε=5" in capsys.readouterr().out.splitlines()


# --- claims


def verdict(results):
    claim = runner.Claim("it is so", talaei2024.lower("a", "b"))
    return judge(claim, results, 1, "ours")[0]


@pytest.mark.parametrize(
    "one, other, found",
    [
        ((0.50, 0.51, 0.52), (0.60, 0.62, 0.61), HOLDS),
        ((0.60, 0.62, 0.61), (0.50, 0.51, 0.52), NOT_REPRODUCED),
        ((0.50, 0.70, 0.60), (0.55, 0.65, 0.64), UNDECIDED),
        ((0.5,), (0.9,), UNDECIDED),
    ],
)
def test_lower_is_paired_and_goes_both_ways(one, other, found):
    assert verdict(dict(a=line(*one), b=line(*other))) == found
    assert verdict(dict(a=line(*one))) == UNKNOWN


def test_pairs_see_what_their_spread_hides():
    a = np.array([0.1, 0.5, 0.9, 1.3])
    assert verdict(dict(a=line(*a), b=line(*a + [0.05, 0.06, 0.05, 0.06]))) == HOLDS


# --- noise and minimisers


def test_noise_table_and_counterexample(tmp_path, capsys):
    found = runner.run("noise", talaei2024.EXPERIMENTS["noise"], tmp_path / "noise")["noise"]
    at = {(f["scenario"], f["assignment"], f["epsilon"]): f for f in found}
    row = at[1, "0-1-2", 5.0]
    for key, want in dict(
        threshold=5.0,
        client=0.008287,
        average=0.001381,
        needed=0.008287,
        server=0.008171,
        enough=6.23724,
        one_upload=1.138759,
        one_upload_server=0.084878,
        epsilon_models=1.07e3,
    ).items():
        assert row[key] == pytest.approx(want, rel=3e-3 if key == "epsilon_models" else 3e-4), key
    assert at[3, "1-3-5", 20.0]["server"] == pytest.approx(0.005098, rel=3e-4)
    assert all(f["epsilon_uploads"] > f["epsilon_models"] > 5 * f["epsilon"] for f in found)
    found = runner.run("argmin", talaei2024.EXPERIMENTS["argmin"], tmp_path / "argmin")
    assert [v["verdict"] for v in found["verdicts"]] == [CONTRADICTED] * 2
    assert found["argmins"] == pytest.approx({"of the mean": 0.9709, "mean of": 0.25}, abs=1e-4)
    assert (
        all(1 <= m["moved"] <= 2 for m in found["moved"])
        and (tmp_path / "argmin" / "results.json").exists()
    )


# --- the study


def cell(number, setting, assignment, seed, loss, **more):
    return (
        dict(
            scenario=number,
            setting=setting,
            assignment=assignment,
            seed=seed,
            loss=[9.0, loss],
            accuracy=[0.1, 1 - loss],
            seconds=0.0,
            privacy=[
                dict(view="server", epsilon=7.0, status="proved"),
                dict(view="server", epsilon=5.0, status="claimed"),
            ],
        )
        | more
    )


def test_summary_of_a_study():
    cells = [
        cell(
            1,
            "printed ε=20",
            a,
            s,
            0.5 + 0.1 * s - 0.01 * (a != "equal") + 1e-3 * s * (a != "equal"),
        )
        for a in ("equal", "0-1-2")
        for s in range(4)
    ]
    cells += [cell(1, "printed ε=20", "equal", 100, 77.0)]
    equal, other = talaei2024_study.summary(cells)
    assert equal["loss"]["mean"] == pytest.approx(0.65) and "loss_less_equal" not in equal
    d = np.array([-0.01, -0.009, -0.008, -0.007])
    assert other["loss_less_equal"] == pytest.approx(
        dict(mean=d.mean(), half=3.182446 * d.std(ddof=1) / 2), rel=1e-5
    )
    assert (other["epsilon_proved_server"], other["epsilon_claimed_server"], other["seeds"]) == (
        7.0,
        5.0,
        [0, 1, 2, 3],
    )
    named = [c | dict(setting="no noise, lr 0.02") for c in cells]
    (verdict,) = talaei2024_study.claims(named)
    assert (
        verdict["verdict"] == HOLDS
        and verdict["claim"].startswith("fig2: 0-1-2")
        and "+0.009 ±" in verdict["seen"]
    )
    (verdict,) = talaei2024_study.claims([c | dict(loss=[-v for v in c["loss"]]) for c in named])
    assert verdict["verdict"] == NOT_REPRODUCED
    later = [c | dict(setting="printed ε=5") for c in cells if c["assignment"] == "0-1-2"]
    assert [v["verdict"] for v in talaei2024_study.claims(cells + later)] == [
        NOT_REPRODUCED,
        HOLDS,
    ]


def test_clip_and_rate_are_chosen_on_other_splits():
    points = talaei2024_study.grid(1, "server ε=20")
    assert len(points) == 6 and talaei2024_study.grid(1, "printed ε=5") == [{}]
    assert len(talaei2024_study.grid(3, "third_party ε=5")) == 4
    cells = [cell(1, "server ε=20", "equal", 100, abs(i - 2), **p) for i, p in enumerate(points)]
    cells += [
        cell(1, "server ε=20", "equal", 0, -5.0, **points[0])
    ]  # what a study runs on decides nothing
    assert talaei2024_study.chosen(cells, 1, "equal", "server ε=20") == points[2]


@pytest.mark.slow
def test_a_full_study_takes_no_runs_of_a_quick_one(tmp_path, monkeypatch):
    ran, fed = [], kept_runs._rows

    def block(number, seed, choices, every, quick=False):
        ran.append((seed, quick))
        worth = [dict(view=v, epsilon=7.0, status="proved") for v in ("server", "third_party")]
        return [
            cell(number, s, a, seed, 0.25 if quick else 0.75, privacy=worth, **m)
            for a, s, m in choices
        ]

    monkeypatch.setattr(
        kept_runs, "_rows", lambda dataset: "" if dataset == "mnist" else fed(dataset)
    )
    monkeypatch.setattr(talaei2024_study, "block", block)
    monkeypatch.setattr(talaei2024_study, "CELLS", {1: [("equal", "printed ε=20")]})

    def study(quick):
        found = talaei2024_study.study("study", None, tmp_path, quick)
        return found["experiments"]["study, scenario 1"]["lines"]["printed ε=20: equal"]

    quick, full = study(True), study(False)
    assert (quick["loss"]["mean"], quick["seeds"], full["loss"]["mean"], full["seeds"]) == (
        0.25,
        [0, 1],
        0.75,
        list(range(5)),
    )
    assert ran == [(s, True) for s in range(2)] + [(s, False) for s in range(5)]
    assert (
        study(True)["loss"]["mean"] == 0.25
        and study(False)["loss"]["mean"] == 0.75
        and len(ran) == 7
    )


@pytest.mark.slow
def test_a_tiny_study(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        talaei2024_study, "CELLS", {1: [(a, "third_party ε=5") for a in ("equal", "0-1-2")]}
    )
    monkeypatch.setattr(talaei2024_study, "CLIPS", (0.2,))
    monkeypatch.setattr(talaei2024_study, "QUICK", dict(dataset="digits", rounds=2, steps=2))
    found = talaei2024_study.study("study", None, tmp_path, True)
    equal, other = found["experiments"]["study, scenario 1"]["lines"].values()
    for c in (equal, other):
        assert c["epsilon_proved"] == pytest.approx(5, rel=1e-4) and c["seeds"] == [
            0,
            1,
        ]
    assert (
        equal["columns"]["ε proved server"] > other["columns"]["ε proved server"] > 5
    )  # 0-1-2 needs more noise
    assert (tmp_path / "study.png").stat().st_size > 20_000
    kept = json.loads((tmp_path / "results.json").read_text())
    assert (
        kept["experiments"].keys() == found["experiments"].keys()
        and kept["versions"]["jax"] == jax.__version__
        and kept["settings"]["chosen_on"] == [100]
    )
    lines = (tmp_path / "cells.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 2 + 2 * 2
    (tmp_path / "cells.jsonl").write_text(
        "\n".join(lines[:-2]) + "\n"
    )  # stopped before its last split
    again = talaei2024_study.study("study", None, tmp_path, True)
    assert again["experiments"] == found["experiments"]
    assert "third_party" in capsys.readouterr().out


def test_nothing_is_proved_of_noise_that_rounding_ends():
    figure = talaei2024.EXPERIMENTS["fig7"]
    line = "labels printed 1-3-5 ε=5"
    changes = dict(dataset="digits", clients=6, groups=(2, 2, 2), group_rows=(20, 20, 20))
    config = Config(**{**figure.base, **figure.lines[line], **changes})
    plan, config = build.build(config)
    server, _, *claims = talaei2024_plans.privacy([(plan, config.rounds)], config)
    assert server["status"] == "no guarantee"
    assert [round(claim["epsilon"], 6) for claim in claims] == [5, 5]
