"""Experiments of Talaei, Izadi, 2024: plans, clients that swap their quality, what runs claim and
prove, and the study."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfl
from experiments.harness import runner
from experiments.harness.runner import Experiment
from experiments.harness.verdicts import CONTRADICTED, HOLDS, NOT_REPRODUCED
from experiments.papers import as_printed
from experiments.papers.talaei2024 import claims as paper
from experiments.papers.talaei2024 import figures as talaei2024
from experiments.papers.talaei2024 import plans as talaei2024_plans
from experiments.papers.talaei2024 import study as talaei2024_study
from experiments.papers.talaei2024 import theory
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
NOISY = DIGITS | dict(unit="client", upload="difference", clip_norm=0.2, epsilon=20.0)
SWAP = dict(group_rows=(20, 20), group_noise=(0.5, 0.1, 0.1, 0.5), impact=(0.0, 2.0, 2.0, 0.0))


# --- plans


def test_the_lines_of_all_figures():
    for name, (number, runs) in theory.FIGURES.items():
        e = talaei2024.EXPERIMENTS[name]
        modes = 1 if runs[0].epsilon is None else len(talaei2024.MODES)
        assert len(e.lines) == 2 * modes * len(runs)
        assert len(e.claims) == 2 * modes * len(theory.STATEMENTS[name])
        for fields in e.lines.values():
            config = Config(**{**e.base, **fields})
            assert len(config.impact) == 3 * (2 if number == 4 else 1) and config.clients == 60
            assert (config.rounds, config.delta, config.steps) == (30, 0.01, 5)
            assert config.lr in (0.02, 0.2)
    assert talaei2024.clip_of(256) == 24.5
    factors = lambda name, line: talaei2024.EXPERIMENTS[name].lines[line]["impact"]
    assert factors("fig9", "iid printed adaptive ε=5") == (0, 1, 2, 2, 1, 0)
    assert factors("fig8", "iid 0-1-2") == (0, 1, 2, 0, 1, 2)
    assert talaei2024.EXPERIMENTS["fig8"].base["group_noise"] == (0.5, 0.25, 0.05, 0.05, 0.25, 0.5)


def test_a_smaller_federation_is_the_same_one():
    config = Config(**DIGITS)
    whole, owned = build.federation(config), talaei2024_plans.build(config).fed
    assert owned.x.shape[0] == 100 < whole.x.shape[0]
    for i, size in enumerate(whole.size.tolist()):
        mine, same = (fed.index[i][:size] for fed in (owned, whole))
        np.testing.assert_array_equal(owned.x[mine], whole.x[same])
        np.testing.assert_array_equal(owned.y[mine], whole.y[same])


# --- two stages


def test_stages_of_a_swap(monkeypatch):
    monkeypatch.setattr(talaei2024_plans, "SWAP", 1)
    (first, one), (second, rest) = talaei2024_plans.stages(Config(**NOISY | SWAP))
    assert (one, rest, second.rounds) == (1, 3, 4)
    assert (first.impact, second.impact) == ((0.0, 2.0), (2.0, 0.0))
    assert (first.group_noise, second.group_noise) == ((0.5, 0.1), (0.1, 0.5))
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
    swap = dict(group_rows=(20, 20), impact=(1.0, 2.0, 2.0, 1.0), group_noise=(0.2,) * 4)
    stages = talaei2024_plans.stages(Config(**DIGITS | swap))
    parts = [(talaei2024_plans.build(part), rounds) for part, rounds in stages]
    losses = lambda *parts: talaei2024_plans.one_by_one(jax.random.key(0), parts, 1)["loss"]
    first = parts[0][0]
    turned = [impact(ratios, (2, 2)) for ratios in ((1, 2), (2, 1))]
    whole = jfl.plan(
        first.fed,
        first.task,
        first.algorithm,
        first.sampler,
        weights=lambda t: jnp.where(t < 2, *turned),
    )
    found = losses(*parts)
    assert len(found) == 4
    np.testing.assert_allclose(found, losses((whole, 4)), rtol=1e-5)
    assert abs(found[-1] / losses((first, 4))[-1] - 1) > 1e-4


# --- runs


@pytest.mark.slow
def test_a_run_shows_what_is_claimed_beside_what_is_proved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(talaei2024_plans, "SWAP", 2)
    # of less noise than for 0.5, computed with a finite reach, nothing is proved
    fields = dict(mode="as_printed", upload="model", clip_norm=2.0, epsilon=0.5)
    lines = {"printed": fields, "third": dict(view="third_party"), "swapped": SWAP}
    claim = runner.Claim("x", talaei2024.lower("third", "printed"))
    experiment = Experiment(
        "digits",
        NOISY,
        lines,
        (claim,),
        seeds=(0, 1),
        runs=talaei2024_plans.swapped,
        columns=talaei2024_plans.budgets,
    )
    found = runner.run("tiny", experiment, tmp_path)["lines"]
    as_one_program = dataclasses.replace(
        experiment, runs=talaei2024_plans.RUNS, lines=dict(list(lines.items())[:2])
    )
    other = runner.run("tiny", as_one_program, tmp_path / "together")["lines"]
    for name, line in other.items():
        assert line["epsilon_proved"] == found[name]["epsilon_proved"]
        np.testing.assert_allclose(line["loss"], found[name]["loss"], rtol=1e-4)
    printed, third, swapped = found.values()
    assert printed["epsilon_claimed"] == pytest.approx(0.5, rel=1e-4)
    assert printed["epsilon_proved"] > 50 * 0.5 and third["epsilon_claimed"] is None
    assert third["epsilon_proved"] == pytest.approx(20, rel=1e-4)
    assert third["columns"]["ε server"] > 40
    of_server = swapped["columns"]["ε server"]
    assert swapped["epsilon_proved"] == of_server == pytest.approx(20, rel=1e-4)
    assert printed["columns"]["ε third party"] < printed["columns"]["ε server"]
    assert swapped["loss"][0] != swapped["loss"][1]
    out = capsys.readouterr().out
    assert "ε third party" in out and "loss" in out


def test_noise_as_printed_is_that_of_the_formula_and_claims_its_epsilon():
    """For the rows of the smallest client."""
    fields = dict(mode="as_printed", upload="model", clip_norm=2.0, epsilon=0.5)
    made = talaei2024_plans.build(Config(**NOISY | fields))
    factor = float(paper.gaussian_factor(0.01))
    want = paper.client_noise_std_printed(2.0, 1, factor, 20, 0.5).value
    assert float(made.upload.stages[-1].noise) == pytest.approx(float(want), rel=1e-6)
    claim = as_printed.claimed(made, 4, 0.01)
    assert claim.status == "claimed" and claim.epsilon == pytest.approx(0.5, rel=1e-4)


def test_nothing_is_proved_of_noise_that_rounding_ends():
    figure = talaei2024.EXPERIMENTS["fig7"]
    changes = dict(dataset="digits", clients=6, groups=(2, 2, 2), group_rows=(20, 20, 20))
    config = Config(**{**figure.base, **figure.lines["labels printed 1-3-5 ε=5"], **changes})
    plan, config = build.build(config)
    server, _, *claims = talaei2024_plans.privacy([(plan, config.rounds)], config)
    assert server["status"] == "no guarantee"
    assert [round(claim["epsilon"], 6) for claim in claims] == [5, 5]


def test_tables_without_training(tmp_path):
    """Their numbers are in test_papers_talaei2024.py."""
    found = runner.run("noise", talaei2024.EXPERIMENTS["noise"], tmp_path / "noise")["noise"]
    (row,) = (f for f in found if (f["scenario"], f["assignment"], f["epsilon"]) == (1, "0-1-2", 5))
    assert row["one_upload"] == pytest.approx(1.138759, rel=3e-4)
    assert row["one_upload_server"] == pytest.approx(0.084878, rel=3e-4)
    assert row["epsilon_models"] == pytest.approx(1.07e3, rel=3e-3)
    assert all(f["epsilon_uploads"] > f["epsilon_models"] > 5 * f["epsilon"] for f in found)
    found = runner.run("argmin", talaei2024.EXPERIMENTS["argmin"], tmp_path / "argmin")
    assert [v["verdict"] for v in found["verdicts"]] == [CONTRADICTED] * 2
    assert all(1 <= m["moved"] <= 2 for m in found["moved"])


# --- the study


def cell(setting, assignment, seed, loss, **more):
    rows = [dict(view="server", epsilon=7.0, status="proved")]
    rows += [dict(view="server", epsilon=5.0, status="claimed")]
    of_run = dict(loss=[9.0, loss], accuracy=[0.1, 1 - loss], seconds=0.0, privacy=rows)
    where = dict(scenario=1, setting=setting, assignment=assignment, seed=seed)
    return where | of_run | more


def test_summary_of_a_study():
    less = lambda a, s: (0.01 - 1e-3 * s) * (a != "equal")
    cells = [
        cell("printed ε=20", a, s, 0.5 + 0.1 * s - less(a, s))
        for a in ("equal", "0-1-2")
        for s in range(4)
    ]
    cells.append(cell("printed ε=20", "equal", 100, 77.0))  # on which clips and rates are chosen
    equal, other = talaei2024_study.summary(cells)
    assert equal["loss"]["mean"] == pytest.approx(0.65) and "loss_less_equal" not in equal
    d = np.array([-0.01, -0.009, -0.008, -0.007])
    interval = dict(mean=d.mean(), half=3.182446 * d.std(ddof=1) / 2)
    assert other["loss_less_equal"] == pytest.approx(interval, rel=1e-5)
    assert (other["epsilon_proved_server"], other["epsilon_claimed_server"]) == (7.0, 5.0)
    assert other["seeds"] == [0, 1, 2, 3]
    verdicts = lambda cells: [v["verdict"] for v in talaei2024_study.claims(cells)]
    named = [c | dict(setting="no noise, lr 0.02") for c in cells]
    assert verdicts(named) == [HOLDS]
    assert verdicts([c | dict(loss=[-v for v in c["loss"]]) for c in named]) == [NOT_REPRODUCED]
    later = [c | dict(setting="printed ε=5") for c in cells if c["assignment"] == "0-1-2"]
    assert verdicts(cells + later) == [NOT_REPRODUCED, HOLDS]


def test_clip_and_rate_are_chosen_on_other_splits():
    setting = "server ε=20"
    points = talaei2024_study.grid(1, setting)
    assert len(points) == 6 and talaei2024_study.grid(1, "printed ε=5") == [{}]
    assert len(talaei2024_study.grid(3, "third_party ε=5")) == 4
    cells = [cell(setting, "equal", 100, abs(i - 2), **p) for i, p in enumerate(points)]
    cells.append(cell(setting, "equal", 0, -5.0, **points[0]))  # a seed of the study
    assert talaei2024_study.chosen(cells, 1, "equal", setting) == points[2]


@pytest.mark.slow
def test_a_tiny_study(tmp_path, monkeypatch, capsys):
    pairs = [(a, "third_party ε=5") for a in ("equal", "0-1-2")]
    monkeypatch.setattr(talaei2024_study, "CELLS", {1: pairs})
    monkeypatch.setattr(talaei2024_study, "CLIPS", (0.2,))
    monkeypatch.setattr(talaei2024_study, "QUICK", dict(dataset="digits", rounds=2, steps=2))
    experiment = talaei2024.EXPERIMENTS["study"]
    run = lambda: runner.run("study", experiment, tmp_path, quick=True)["experiments"]
    found = run()
    equal, other = found["study, scenario 1"]["lines"].values()
    for line in (equal, other):
        assert line["epsilon_proved"] == pytest.approx(5, rel=1e-4) and line["seeds"] == [0, 1]
    # 0-1-2 needs more noise
    of_server = lambda line: line["columns"]["ε proved server"]
    assert of_server(equal) > of_server(other) > 5
    assert (tmp_path / "study.png").stat().st_size > 20_000
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["experiments"].keys() == found.keys() and kept["settings"]["chosen_on"] == [100]
    lines = (tmp_path / "cells.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 2 * 2 + 2 * 2
    (tmp_path / "cells.jsonl").write_text("".join(lines[:-2]))  # stopped before its last split
    assert run() == found and "third_party" in capsys.readouterr().out
