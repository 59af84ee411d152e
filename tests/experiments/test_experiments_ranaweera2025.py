"""Experiments of Ranaweera et al., 2025: lines, claims that can fail, and the study's plans against
the library's."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import pretended

from experiments.harness import programs, runner
from experiments.harness.runner import Line
from experiments.harness.verdicts import HOLDS, NOT_REPRODUCED, UNKNOWN, Claim, judge
from experiments.papers import __main__ as command_line
from experiments.papers.ranaweera2025 import figures as ranaweera2025
from experiments.papers.ranaweera2025 import plans as ranaweera2025_plans
from experiments.papers.ranaweera2025 import runs, theory
from experiments.papers.ranaweera2025 import study as ranaweera2025_study
from jfl.data import image_files
from jfl.privacy.accountants import rdp
from jfl.privacy.guarantees import Overflow
from jfl.runs import sweep
from jfl.runs.config import Config, refuse_unused

SMALL = dict(
    dataset="digits", rows_per_client=60, clients=4, rounds=2, steps=1, adjacency="add_remove"
)
TINY = ranaweera2025_plans.Model(
    "linear",
    "example",
    (2.0, 8.0),
    ((1.0, 2.0), (1.0, 2.0)),
    (("batch", 20), ("rounds", 3)),
    "digits",
    public=60,
    validation=900,
)
CLIENTS = dataclasses.replace(
    TINY,
    unit="client",
    fields=(
        ("clients", 5),
        ("rate", 0.6),
        ("batch", 5),
        ("steps", 2),
        ("local_lr", 0.5),
        ("rounds", 2),
    ),
)


def line(*accuracy, claimed=None, proved=None):
    return Line(np.array(accuracy), np.ones(len(accuracy)), proved, claimed, 0.0)


# --- lines


@pytest.mark.slow
def test_the_true_epsilon_of_a_line_is_that_of_its_noise_whether_or_not_it_is_proved():
    """Of a sound line what is proved; of R4 that of isotropic noise whose multiplier is smaller by
    the root of the number of levels, all of which one row may fill."""
    base = SMALL | dict(unit="example", batch_sampler="poisson", batch=10, delta=1e-3)
    base |= dict(partition="similarity", share=1.0)
    config = lambda **fields: Config(**base, **fields)
    sound = config(noise_multiplier=1.0, noise_shape="weighted", bands="per_layer")
    plan, made = runs.RUNS.build(sound)
    proved = runs.RUNS.privacy(plan, made)[0]["epsilon"]
    assert runs.true_epsilon(sound)[runs.TRUE] == pytest.approx(proved, rel=1e-6)
    level = lambda r: config(**ranaweera2025.published(f"{r} plain", 2.0), bands="per_layer")
    levels = 36  # that the chain clips, each of which may be as long as the clip norm
    plain = config(noise_multiplier=2.0 / levels**0.5)
    found = runs.true_epsilon(level("R4"))[runs.TRUE]
    assert found == pytest.approx(runs.true_epsilon(plain)[runs.TRUE], rel=0.05)
    assert runs.true_epsilon(level("R6"))[runs.TRUE] < found
    free = Config(**{k: v for k, v in base.items() if k not in ("unit", "adjacency")})
    assert runs.true_epsilon(free)[runs.TRUE] is None


def test_every_line_is_a_config_that_uses_all_its_fields():
    for experiment in ranaweera2025.EXPERIMENTS.values():
        assert set(experiment.quick_lines or ()) <= set(experiment.lines)
        assert set(experiment.paper) <= set(experiment.lines)
        for changes in experiment.lines.values():
            refuse_unused(Config(**{**experiment.base, **changes}))


def test_the_list_names_all_of_the_paper(capsys):
    assert command_line.main(["ranaweera2025", "--list"]) == 0
    out = capsys.readouterr().out
    for name in (
        *theory.REPORTED,
        "table2",
        "table3",
        "fig4",
        "audit_wavelet_leak",
        "accounting",
        "study",
    ):
        assert f"\n{name} " in "\n" + out
    full = ranaweera2025.EXPERIMENTS["sample_cifar10-full"].base
    assert (full["clients"], full["rounds"], full["steps"] * full["batch"]) == (
        100,
        300,
        50 * 500 // 30 * 30,
    )
    middle = ranaweera2025.EXPERIMENTS["client_fmnist-middle"].base
    assert (middle["clients"], middle["rounds"], middle["steps"] * middle["batch"]) == (
        100,
        60,
        5 * 600,
    )
    assert middle["model"] == full["model"] == "cnn"
    assert "reduced" in ranaweera2025.EXPERIMENTS["client_mnist"].title


def test_hours_follow_from_the_seconds_of_a_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ranaweera2025, "step_seconds", lambda base, level: 0.36)
    experiment = ranaweera2025.EXPERIMENTS["hours"]
    found = experiment.special("hours", experiment, tmp_path, quick=False)
    rows = {row[0]: [float(v) for v in row[1:]] for row in found["rows"]}
    # 60 rounds of 10 clients of 100 steps; of a fifth of 100 clients of 150
    lines = len(ranaweera2025.EXPERIMENTS["sample_mnist"].lines)
    assert rows["sample_mnist-middle"] == pytest.approx([0.36, 6, 6 * 18, 6 * lines * 5], rel=0.05)
    assert rows["client_mnist-middle"][1] == pytest.approx(18)
    assert rows["sample_mnist-full"][1] == pytest.approx(300 * 100 * 1000 * 1e-4, rel=0.05)


@pytest.mark.slow
def test_a_step_of_the_cnn_takes_time():
    for name in ("sample_mnist-middle", "client_cifar10-middle"):
        base = ranaweera2025.EXPERIMENTS[name].base
        assert 1e-5 < runs.step_seconds(base, name.split("_")[0], steps=1) < 60


def test_matched_noise_has_the_power_of_the_published():
    base = ranaweera2025.EXPERIMENTS["client_mnist"].base
    lines = ranaweera2025.modes(base, 3.0)
    assert (
        ranaweera2025.entries(base) == 8192
        and ranaweera2025.entries(base | dict(model="cnn")) == 2**18
    )
    assert lines["matched plain"]["noise_multiplier"] == pytest.approx(3**0.5, rel=1e-6)
    assert lines["matched lemma2"]["noise_multiplier"] == pytest.approx(
        (3 * 2 / 15) ** 0.5, rel=1e-6
    )
    # the dynamic baseline has the mean of 1 / multiplier^2 of the vanilla one
    falling = lines["dynamic"]["noise_multiplier"] * 0.7 ** ((np.arange(10000) + 0.5) / 10000)
    assert np.mean(falling**-2.0) == pytest.approx(1 / 9, rel=1e-4)


# trained, they wait for the slow run: that noise reaches the model is in tests/privacy, and that a
# line is trained is in test_experiments_noble2022.py
@pytest.mark.by_default("accounted-sample_mnist")
@pytest.mark.parametrize("name", ["sample_mnist", "client_mnist"])
@pytest.mark.parametrize("trained", [False, True], ids=["accounted", "trained"])
def test_a_run_shows_what_is_claimed_beside_what_is_proved(
    name, trained, tmp_path, capsys, monkeypatch
):
    if not trained:
        monkeypatch.setattr(sweep, "compute", pretended.compute)
    experiment = ranaweera2025.EXPERIMENTS[name]
    # all rows or clients in every step, whose accounting is exact: a bound on sampling compiles for
    # long
    whole = (
        dict(batch_sampler="full", batch=16)
        if name == "sample_mnist"
        else dict(rate=None, allow_empty=False)
    )
    small = SMALL | whole
    wanted = ("WAV R1 lemma2 σ=3", "R5 σ=3")
    experiment = dataclasses.replace(
        experiment, base=experiment.base | small, quick={}, seeds=(0, 1)
    )
    found = runner.run(name, experiment, tmp_path, only=wanted)
    wav, sound = (found["lines"][n] for n in wanted)
    assert wav["epsilon_proved"] is None or wav["epsilon_proved"] > 30 * wav["epsilon_claimed"]
    assert sound["epsilon_proved"] == pytest.approx(
        float(rdp.gaussian_epsilon(2**0.5 / 3, 1e-5)), rel=1e-3
    )  # two rounds
    assert sound["epsilon_claimed"] is None and wav["epsilon_claimed"] == pytest.approx(
        sound["epsilon_proved"], rel=0.5
    )
    assert {v["verdict"] for v in found["verdicts"]} <= {UNKNOWN, NOT_REPRODUCED} and len(
        wav["accuracy"]
    ) == 2
    assert not trained or np.mean(wav["loss"]) < np.mean(sound["loss"])  # so much less noise
    assert "ε claimed" in capsys.readouterr().out


def test_data_that_are_not_there_leave_all_claims_open(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("JFL_DATA_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(image_files, "DEBIAN", tmp_path)
    for name in ("sample_fmnist", "client_cifar10", "table3"):
        experiment = ranaweera2025.EXPERIMENTS[name]
        found = runner.run(name, experiment, tmp_path, quick=True)
        assert not found["lines"] and {v["verdict"] for v in found["verdicts"]} == {UNKNOWN}
        assert "not run" in capsys.readouterr().err


# --- claims


def verdict(check, results):
    return judge(Claim("it is so", check), results, 1, "ours")[0]


def test_a_share_of_the_gain():
    check = ranaweera2025.reproduces([("wav", "matched", "vanilla")])
    at = lambda *means: verdict(
        check,
        {n: line(m, m + 1e-4, m - 1e-4) for n, m in zip(("wav", "matched", "vanilla"), means)},
    )
    assert at(0.9, 0.88, 0.8) == HOLDS
    assert at(0.9, 0.84, 0.8) == NOT_REPRODUCED
    assert at(0.8, 0.84, 0.8) == UNKNOWN  # no gain to have a share of
    assert verdict(check, dict(wav=line(0.9, 0.91))) == UNKNOWN


def test_an_epsilon_that_is_understated_or_not():
    check = ranaweera2025.understated(["a", "b"])
    one = line(0.5, claimed=1.0, proved=50.0)
    assert verdict(check, dict(a=one, b=line(0.5, claimed=1.0))) == HOLDS
    even = line(0.5, claimed=1.0, proved=1.0)
    assert verdict(check, dict(a=even, b=line(0.5, claimed=1.0))) == NOT_REPRODUCED
    assert verdict(check, dict(a=one)) == UNKNOWN


def test_gains_of_a_figure_go_both_ways():
    claims = {c.text: c.check for c in ranaweera2025.EXPERIMENTS["client_mnist"].claims}
    means = {
        "vanilla": (0.8, 0.75, 0.6),
        "WAV R1 plain": (0.85, 0.83, 0.75),
        "R5": (0.5, 0.4, 0.3),
        "dynamic": (0.81, 0.76, 0.8),
    }
    results = {
        f"{n} σ={s:g}": line(m - 1e-4, m + 1e-4)
        for n, row in means.items()
        for s, m in zip(theory.SIGMAS, row)
    }
    seen = {text: verdict(check, results) for text, check in claims.items()}
    assert seen["1. R1 plain is above DP at the same nominal σ"] == HOLDS
    assert seen["2. the gain of R1 plain grows with σ"] == HOLDS
    assert (
        seen["the sound R5 loses to DP"] == HOLDS
        and seen["the sound ellipsoid is above DP"] == UNKNOWN
    )
    assert seen["1. R1 plain is above dynamic DP"] == NOT_REPRODUCED


@pytest.mark.parametrize("name", ["table2", "audit_wavelet_leak"])
def test_tables_without_training(name, tmp_path, capsys):
    found = runner.run(name, ranaweera2025.EXPERIMENTS[name], tmp_path, quick=True)
    assert {v["verdict"] for v in found["verdicts"]} == {HOLDS}
    assert (
        json.loads((tmp_path / "results.json").read_text())["tables"][0]["rows"]
        and "claims" in capsys.readouterr().out
    )


# --- the study


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, variants", [(TINY, ("iso", "weighted")), (CLIENTS, ("iso", "prior:0.5"))]
)
def test_a_group_is_tuned_run_and_collected(model, variants, tmp_path, monkeypatch):
    of = dict(linear=model), {"linear,pixels": variants}
    monkeypatch.setattr(ranaweera2025_study, "BLOCK", 4)
    cells = tmp_path / "cells.jsonl"
    ranaweera2025_study.run("linear,pixels", cells, *of, seeds=(0, 1))
    lines = ranaweera2025_study.read(cells)
    assert len(lines) == 2 * 2 * 2 + 2 * 2 * 2 and {r["seed"] for r in lines} == {0, 1, 1000}
    before = cells.read_text()
    ranaweera2025_study.run("linear,pixels", cells, *of, seeds=(0, 1))
    assert cells.read_text() == before  # nothing is run twice
    found = ranaweera2025_study.collect(cells, tmp_path, *of)
    assert len(found["rows"]) == 4 and (tmp_path / "ranaweera2025_study.png").stat().st_size > 10000
    first, other = found["rows"][0], found["rows"][1]
    assert (
        first["gain"] == first["gain_95"] == 0
        and first["epsilon_proved"] == other["epsilon_proved"] > 0
    )
    assert other["gain"] == pytest.approx(other["accuracy"] - first["accuracy"])
    (one,) = (ranaweera2025_study.proved(model, 1, v) for v in variants[1:])
    assert (
        found["rows"][2]["epsilon_proved"] == pytest.approx(one) and one < first["epsilon_proved"]
    )
    assert (
        "isotropic" in found["finding"]
        and json.loads((tmp_path / "ranaweera2025.json").read_text())["experiments"]["study"]
    )


def test_cells_of_other_settings_are_neither_used_nor_collected(tmp_path, monkeypatch, capsys):
    ran, path, groups = [], tmp_path / "cells.jsonl", {"linear,pixels": ("iso",)}
    longer = dataclasses.replace(TINY, fields=(("batch", 20), ("rounds", 4)))

    def measure(model, cells, store, tag):
        ran.extend((tag, c[-1]) for c in cells)
        store.put(
            [
                dict(
                    tag=tag,
                    variant=v,
                    level=level,
                    multiplier=model.levels[level],
                    k=k,
                    seed=seed,
                    validation=0.5,
                    test=0.5,
                    failed=False,
                    clip_norm=1.0,
                    clipped=0.5,
                    cpu=0.0,
                    wall=0.0,
                    made=ranaweera2025_study.made_by(model, level),
                )
                for v, level, k, seed in cells
            ]
        )

    monkeypatch.setattr(ranaweera2025_study, "measure", measure)
    for model, new in (
        (TINY, 6),
        (TINY, 0),
        (longer, 6),
        (dataclasses.replace(TINY, levels=(2.0, 9.0)), 3),
    ):
        before = len(ran)
        ranaweera2025_study.run("linear,pixels", path, dict(linear=model), groups, seeds=(0,))
        assert len(ran) - before == new  # a level keeps its cells where the other one changes
    assert {
        r["level"]
        for r in ranaweera2025_study.of_these(ranaweera2025_study.read(path), dict(linear=longer))
    } == {0, 1}
    other = dict(linear=dataclasses.replace(TINY, unit="client"))
    with pytest.raises(
        ValueError,
        match="expected cells of these settings and this version, but got 15 of other settings",
    ):
        ranaweera2025_study.collect(path, tmp_path, other, groups)
    ranaweera2025_study.made_by.cache_clear()


def test_learning_rates_are_chosen_on_other_rows_and_seeds():
    cell = lambda k, validation, test, seed=1000, failed=False, tag="tune": dict(
        tag=f"g {tag}",
        variant="v",
        level=0,
        k=k,
        seed=seed,
        validation=validation,
        test=test,
        failed=failed,
    )
    lines = [
        cell(1, 0.8, 0.1),
        cell(2, 0.7, 0.9),
        cell(4, 0.99, 0.9, failed=True),
        cell(8, 0.9, 0.9, seed=0, tag="report"),
    ]
    assert ranaweera2025_study.chosen(lines, "g") == {("v", 0): 1}


def test_a_bias_is_a_pixel_of_value_one():
    energy, found = ranaweera2025_plans.unit_energies(TINY), ranaweera2025_plans.pixel_bands(TINY)
    assert energy[0] == pytest.approx(energy[1:].sum()) and len(energy) == 5
    assert np.allclose(energy[2:], energy[2])  # as much in each level: the 1 / f^2 law
    shape = ranaweera2025_plans.shape_named(TINY, "unit:0.5")
    each = energy / ranaweera2025_plans.bands_of.sizes(found)
    assert np.allclose(np.diff(np.log(np.asarray(shape.scales) * each**0.25)), 0, atol=1e-6)


def test_intervals_are_of_student():
    mean, half = ranaweera2025_study.interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.302653 / 3**0.5, rel=1e-6)


def test_findings_go_three_ways():
    row = lambda variant, gain: dict(
        model="linear",
        level=0,
        variant=variant,
        gain=gain,
        gain_95=0.5,
        multiplier=4.0,
        epsilon_proved=0.2,
        accuracy=88.0,
        accuracy_95=0.1,
        seeds={"0": 88.0},
    )
    text = ranaweera2025_study.finding(
        [row("iso", 0.0), row("a", 1.0), row("b", -1.0), row("c", 0.4)]
    )
    assert (
        "above it a +1.00 ± 0.50;" in text
        and "below it b -1.00 ± 0.50;" in text
        and "with 1 seeds: c +0.40" in text
    )


def test_a_line_of_which_nothing_is_proved_runs_and_says_so():
    """So little noise that a batch without a slot takes all of delta: a sweep refuses it."""
    experiment = ranaweera2025.EXPERIMENTS["sample_mnist"]
    fields = experiment.base | experiment.lines["matched lemma2 σ=1"]
    small = dict(dataset="digits", clients=2, rows_per_client=700, noise_multiplier=0.05)
    plan, config = programs.assembled(Config(**fields | small))
    with pytest.raises(Overflow):
        programs.proved(plan, config)
    (told,) = ranaweera2025.RUNS.privacy(plan, config)
    assert told["epsilon"] is None
