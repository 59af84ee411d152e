"""Experiments of Ranaweera et al., 2025: what lines prove and claim, tables without training, and
the study of shapes of noise."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import pretended

from experiments.harness import programs, runner
from experiments.harness.verdicts import HOLDS, NOT_REPRODUCED, UNKNOWN
from experiments.papers.ranaweera2025 import figures as ranaweera2025
from experiments.papers.ranaweera2025 import plans as ranaweera2025_plans
from experiments.papers.ranaweera2025 import runs
from experiments.papers.ranaweera2025 import study as ranaweera2025_study
from jfl.privacy.accountants import rdp
from jfl.privacy.guarantees import Overflow
from jfl.runs import sweep
from jfl.runs.config import Config

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
OF_CLIENTS = dict(clients=5, rate=0.6, batch=5, steps=2, local_lr=0.5, rounds=2)
CLIENTS = dataclasses.replace(TINY, unit="client", fields=tuple(OF_CLIENTS.items()))


# --- lines


@pytest.mark.slow
def test_the_true_epsilon_of_a_line_is_that_of_its_noise_whether_or_not_it_is_proved():
    """Of a sound line what is proved; of R4 that of isotropic noise whose multiplier is smaller by
    the root of the number of levels, all of which one row may fill."""
    base = SMALL | dict(batch_sampler="poisson", batch=10, partition="similarity", share=1.0)
    noisy = lambda **fields: Config(
        **base, unit="example", delta=1e-3, **{"noise_multiplier": 2.0} | fields
    )
    true = lambda config: runs.true_epsilon(config)[runs.TRUE]
    sound = noisy(noise_multiplier=1.0, noise_shape="weighted", bands="per_layer")
    plan, made = runs.RUNS.build(sound)
    assert true(sound) == pytest.approx(runs.RUNS.privacy(plan, made)[0]["epsilon"], rel=1e-6)
    level = lambda r: true(noisy(**ranaweera2025.published(f"{r} plain", 2.0), bands="per_layer"))
    levels = 36  # that the chain clips, each of which may be as long as the clip norm
    assert level("R4") == pytest.approx(true(noisy(noise_multiplier=2.0 / levels**0.5)), rel=0.05)
    assert level("R6") < level("R4")
    free = {k: v for k, v in base.items() if k != "adjacency"}
    assert true(Config(**free, delta=1e-3)) is None


def test_sizes_are_those_of_the_paper():
    base = lambda name: ranaweera2025.EXPERIMENTS[name].base
    full, middle = base("sample_cifar10-full"), base("client_fmnist-middle")
    rows = lambda of: (of["clients"], of["rounds"], of["steps"] * of["batch"])
    assert rows(full) == (100, 300, 50 * 500 // 30 * 30) and rows(middle) == (100, 15, 600)
    assert middle["model"] == full["model"] == "cnn"
    assert "reduced" in ranaweera2025.EXPERIMENTS["client_mnist"].title


def test_matched_noise_has_the_power_of_the_published():
    base = ranaweera2025.EXPERIMENTS["client_mnist"].base
    assert ranaweera2025.entries(base) == 8192
    assert ranaweera2025.entries(base | dict(model="cnn")) == 2**18
    multiplier = {n: f["noise_multiplier"] for n, f in ranaweera2025.modes(base, 3.0).items()}
    assert multiplier["matched plain"] == pytest.approx(3**0.5, rel=1e-6)
    assert multiplier["matched lemma2"] == pytest.approx((3 * 2 / 15) ** 0.5, rel=1e-6)
    # the dynamic baseline has the mean of 1 / multiplier^2 of the vanilla one
    falling = multiplier["dynamic"] * 0.7 ** ((np.arange(10000) + 0.5) / 10000)
    assert np.mean(falling**-2.0) == pytest.approx(1 / 9, rel=1e-4)


@pytest.mark.parametrize("decay", [0.25, 0.5, 1.0])
def test_noise_of_a_chosen_decay_has_the_same_mean_of_1_over_its_square(decay):
    chosen = dict(lr=2.0, clip_decay=0.25, noise_decay=decay)
    fields = dict(noise_multiplier=3.0 * ranaweera2025.first_noise(0.7), noise_decay=0.7, lr=1.0)
    taken = ranaweera2025.with_values(fields, chosen)
    assert {n: taken[n] for n in chosen} == chosen
    falling = taken["noise_multiplier"] * decay ** ((np.arange(10000) + 0.5) / 10000)
    assert np.mean(falling**-2.0) == pytest.approx(1 / 9, rel=1e-4)
    free = dict(noise_multiplier=3.0)
    assert ranaweera2025.with_values(free, dict(lr=2.0)) == free | dict(lr=2.0)


# all rows or clients in every step, whose accounting is exact: a bound on sampling takes long
WHOLE = dict(
    sample_mnist=dict(batch_sampler="full", batch=16),
    client_mnist=dict(rate=None, allow_empty=False),
)


@pytest.mark.by_default("sample_mnist")
@pytest.mark.parametrize("name", WHOLE)
def test_a_run_shows_what_is_claimed_beside_what_is_proved(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "compute", pretended.compute)
    of = ranaweera2025.EXPERIMENTS[name]
    wanted = ("WAV R1 lemma2 σ=3", "R5 σ=3")
    base = of.base | SMALL | WHOLE[name]
    experiment = dataclasses.replace(of, base=base, quick={}, seeds=(0, 1))
    found = runner.run(name, experiment, tmp_path, only=wanted)
    wav, sound = (found["lines"][n] for n in wanted)
    assert wav["epsilon_proved"] is None or wav["epsilon_proved"] > 30 * wav["epsilon_claimed"]
    two_rounds = float(rdp.gaussian_epsilon(2**0.5 / 3, 1e-5))
    assert sound["epsilon_proved"] == pytest.approx(two_rounds, rel=1e-3)
    assert sound["epsilon_claimed"] is None
    assert wav["epsilon_claimed"] == pytest.approx(sound["epsilon_proved"], rel=0.5)
    assert {v["verdict"] for v in found["verdicts"]} <= {UNKNOWN, NOT_REPRODUCED}


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


@pytest.mark.parametrize("name", ["table2", "audit_wavelet_leak"])
def test_tables_without_training(name, tmp_path):
    found = runner.run(name, ranaweera2025.EXPERIMENTS[name], tmp_path, quick=True)
    assert {v["verdict"] for v in found["verdicts"]} == {HOLDS}
    assert json.loads((tmp_path / "results.json").read_text())["tables"][0]["rows"]


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
    first, other, third, _ = found["rows"]
    assert (tmp_path / "ranaweera2025_study.png").stat().st_size > 10000
    assert first["gain"] == first["gain_95"] == 0
    assert first["epsilon_proved"] == other["epsilon_proved"] > third["epsilon_proved"]
    assert other["gain"] == pytest.approx(other["accuracy"] - first["accuracy"])
    one = ranaweera2025_study.proved(model, 1, variants[1])
    assert third["epsilon_proved"] == pytest.approx(one)
    assert "isotropic" in found["finding"]
    stored = json.loads((tmp_path / "ranaweera2025.json").read_text())
    assert stored["experiments"]["study"]


def test_cells_of_other_settings_are_neither_used_nor_collected(tmp_path, monkeypatch):
    ran, path, groups = [], tmp_path / "cells.jsonl", {"linear,pixels": ("iso",)}
    measured = dict(validation=0.5, test=0.5, failed=False, clip_norm=1.0, clipped=0.5)
    measured |= dict(cpu=0.0, wall=0.0)

    def measure(model, cells, store, tag):
        ran.extend(cells)
        for variant, level, k, seed in cells:
            cell = dict(tag=tag, variant=variant, level=level, k=k, seed=seed)
            cell |= dict(multiplier=model.levels[level])
            store.put([cell | measured | dict(made=ranaweera2025_study.made_by(model, level))])

    monkeypatch.setattr(ranaweera2025_study, "measure", measure)
    longer = dataclasses.replace(TINY, fields=(("batch", 20), ("rounds", 4)))
    louder = dataclasses.replace(TINY, levels=(2.0, 9.0))
    # a level keeps its cells where the other one changes
    for model, new in ((TINY, 6), (TINY, 0), (longer, 6), (louder, 3)):
        before = len(ran)
        ranaweera2025_study.run("linear,pixels", path, dict(linear=model), groups, seeds=(0,))
        assert len(ran) - before == new
    found = ranaweera2025_study.of_these(ranaweera2025_study.read(path), dict(linear=longer))
    assert {r["level"] for r in found} == {0, 1}
    other = dict(linear=dataclasses.replace(TINY, unit="client"))
    with pytest.raises(ValueError, match="this version, but got 15 of other settings"):
        ranaweera2025_study.collect(path, tmp_path, other, groups)
    ranaweera2025_study.made_by.cache_clear()


def test_learning_rates_are_chosen_on_other_rows_and_seeds():
    of = dict(tag="g tune", variant="v", level=0, seed=1000, failed=False)
    lines = [
        of | dict(k=1, validation=0.8, test=0.1),
        of | dict(k=2, validation=0.7, test=0.9),
        of | dict(k=4, validation=0.99, test=0.9, failed=True),
        of | dict(k=8, validation=0.9, test=0.9, seed=0, tag="g report"),
    ]
    assert ranaweera2025_study.chosen(lines, "g") == {("v", 0): 1}


def test_a_bias_is_a_pixel_of_value_one():
    energy, found = ranaweera2025_plans.unit_energies(TINY), ranaweera2025_plans.pixel_bands(TINY)
    assert energy[0] == pytest.approx(energy[1:].sum()) and len(energy) == 5
    assert np.allclose(energy[2:], energy[2])  # as much in each level: the 1 / f^2 law
    shape = ranaweera2025_plans.shape_named(TINY, "unit:0.5")
    each = energy / ranaweera2025_plans.bands_of.sizes(found)
    assert np.allclose(np.diff(np.log(np.asarray(shape.scales) * each**0.25)), 0, atol=1e-6)


def test_findings_go_three_ways():
    of = dict(model="linear", level=0, gain_95=0.5, multiplier=4.0, epsilon_proved=0.2)
    of |= dict(accuracy=88.0, accuracy_95=0.1, seeds={"0": 88.0})
    gains = dict(iso=0.0, a=1.0, b=-1.0, c=0.4)
    text = ranaweera2025_study.finding([of | dict(variant=v, gain=g) for v, g in gains.items()])
    for words in ("above it a +1.00 ± 0.50;", "below it b -1.00 ± 0.50;", "with 1 seeds: c +0.40"):
        assert words in text
    mean, half = ranaweera2025_study.interval([1.0, 2.0, 3.0])  # of Student
    assert mean == 2 and half == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
