"""Rates of baselines: who is marked, what is chosen, what the figures take."""

import dataclasses
import sys
import types

import numpy as np
import pytest
from helpers.lines import line

from experiments.harness import baselines
from experiments.harness import results as results_file
from experiments.harness.programs import Plans, drawn
from experiments.harness.runner import Experiment, not_tuned
from experiments.harness.verdicts import far_below
from jfl.runs.config import Config

SMALL = dict(
    dataset="digits",
    clients=5,
    cohort=5,
    model="logistic",
    algorithm="fedavg",
    batch=8,
    steps=2,
    rounds=3,
    evaluate_every=3,
    weights="uniform",
    l2=1e-2,
)
ONE = Experiment("title", SMALL, {"a": dict(lr=0.1)}, runs=Plans(), baselines={"a": ()})


@pytest.fixture
def asked(monkeypatch):
    """The lines whose grids are asked for; each is given a rate of 1."""
    names = []
    monkeypatch.setattr(
        baselines,
        "choose",
        lambda name, *_: names.append(name) or baselines.Choice({}, dict(lr=1.0), [], False),
    )
    monkeypatch.setattr(baselines, "reach", lambda *_: {})
    return names


@pytest.fixture
def with_stored(monkeypatch):
    """Experiments with the rates of figure -> line -> what was chosen for it."""

    def taken(found, **experiments):
        monkeypatch.setattr(baselines, "stored", lambda: dict(paper=found))
        return baselines.with_chosen("paper", experiments)

    return taken


# --- the rule


@pytest.mark.parametrize(
    "accuracy, marked",
    [((0.80, 0.81, 0.79), True), ((0.86, 0.87, 0.85), False), ((0.6, 0.99, 0.8), False)],
)
def test_a_line_is_marked_where_it_ends_far_below_what_its_model_reaches(accuracy, marked):
    """By an interval: a line that scatters is not marked for its mean alone."""
    reached = {"free": {"0": 0.90, "1": 0.91, "2": 0.89}}
    results = {"free": line(*accuracy, seeds=(0, 1, 2))}
    assert far_below(reached, results) == (["free"] if marked else [])
    experiment = Experiment("title", {}, {"free": {}}, reached=reached)
    assert ("L-BFGS" in not_tuned(experiment, results)) == marked


@pytest.mark.slow
def test_what_a_convex_model_reaches_is_above_three_rounds_of_training():
    config = Config(**SMALL, lr=1e-3)
    found = baselines.reach(config, Plans(drawn, seeded=True), (0, 1))
    assert set(found) == {"0", "1"} and min(found.values()) > 0.85
    assert baselines.reach(dataclasses.replace(config, model="mlp"), None, (0,)) == {}


# --- a grid


@pytest.mark.slow
def test_a_grid_that_runs_has_seeds_of_its_own_and_goes_on_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "NUM_EXTRA_RATES", 3)
    config, plans = Config(**SMALL, lr=1e-3), Plans(drawn, seeded=True)
    out, kept = tmp_path / "grids", tmp_path / "kept"
    choice = baselines.choose("free", config, dict(lr=(1e-4, 1e-3)), plans, out, kept)
    rates = [point["lr"] for point in choice.grid]
    assert rates == pytest.approx([1e-4, 1e-3, 0.00215443, 0.00464159, 0.01], rel=1e-3)
    means = [np.mean(point["accuracy"]) for point in choice.grid]
    assert choice.chosen == dict(lr=rates[int(np.argmax(means))])
    assert all(len(point["accuracy"]) == len(baselines.SEEDS) for point in choice.grid)
    assert not set(baselines.SEEDS) & set(Experiment("", {}, {}).seeds)


def test_a_grid_of_rates_and_clip_norms_goes_on_once_along_each_end(tmp_path, monkeypatch):
    """The best lies at a rate inside of the grid and at a clip norm of 16, beyond where it goes on
    to; so it is told to be at an end."""
    asked = []

    def lines(folders, kept, configs, seeds, how):
        asked.append(len(configs))
        for name, config in configs.items():
            off = abs(np.log(config.lr / 1.0)) + abs(np.log(config.clip_norm / 16.0))
            yield name, [dict(accuracy=dict(final=1.0 - off / 100)) for _ in seeds]

    monkeypatch.setattr(baselines.kept_runs, "lines", lines)
    axes = dict(lr=(0.464159, 1.0, 2.154435), clip_norm=(0.5, 1.0, 2.0))
    config = Config(**SMALL, lr=4.0, clip_norm=0.5)
    choice = baselines.choose("line", config, axes, Plans(), tmp_path, tmp_path)
    assert asked == [9, 6] and len(choice.grid) == 15
    assert choice.chosen == dict(lr=1.0, clip_norm=8.0) and choice.at_edge
    assert choice.first == dict(lr=4.0, clip_norm=0.5) and axes["clip_norm"] == (0.5, 1.0, 2.0)


def test_a_grid_of_decays_is_not_continued_beyond_1_and_other_fields_follow(tmp_path, monkeypatch):
    """The best noise does not decay; the best clip norm decays beyond the end of the grid."""
    asked = []

    def lines(folders, kept, configs, seeds, how):
        asked.extend(configs.values())
        for name, config in configs.items():
            off = config.clip_decay + abs(config.noise_multiplier - 2.0)
            yield name, [dict(accuracy=dict(final=1.0 - off / 100)) for _ in seeds]

    monkeypatch.setattr(baselines.kept_runs, "lines", lines)
    axes = dict(clip_norm=(0.5, 1.0, 2.0), clip_decay=(0.5, 1.0), noise_decay=(0.5, 1.0))
    config = Config(**SMALL, clip_norm=1.0, noise_multiplier=4.0, noise_decay=0.5)
    follows = lambda fields, chosen: (
        fields | chosen | dict(noise_multiplier=2.0 / chosen["noise_decay"])
    )
    choice = baselines.choose("line", config, axes, Plans(), tmp_path, tmp_path, follows)
    assert {c.noise_multiplier * c.noise_decay for c in asked} == {2.0}
    assert {c.noise_decay for c in asked} == {0.5, 1.0}
    assert {c.clip_decay for c in asked} == {0.125, 0.25, 0.5, 1.0}
    assert (choice.chosen["clip_decay"], choice.chosen["noise_decay"]) == (0.125, 1.0)
    assert choice.at_edge  # of the decay of the clip norm


# --- what figures take


def test_methods_take_what_their_middle_line_was_given(tmp_path, asked, with_stored):
    """All lines of a method, and no others; and their first rates do not stand beside."""
    lines = {
        f"{m} σ={s}": dict(noise_multiplier=s, steps=steps)
        for m, steps in dict(a=1, b=2).items()
        for s in (1.0, 2.0, 3.0)
    }
    methods = {n: f"{n[0]} σ=2.0" for n in lines}
    experiment = Experiment("title", SMALL, lines, methods=methods, runs=Plans())
    found = baselines.choose_all("fig", experiment, tmp_path, tmp_path, lines=("a σ=2.0",))
    assert asked == ["fig a σ=2.0"]
    printed = dataclasses.replace(experiment, methods={}, baselines={"b σ=1.0": ("a σ=2.0",)})
    both = with_stored(dict(fig=found), fig=experiment, printed=printed)
    taken = both["fig"].lines
    assert list(taken) == list(lines)
    assert [taken[n].get("lr") for n in lines] == [1.0] * 3 + [None] * 3
    assert both["printed"].lines == lines  # the same run, at the rates of the paper


def test_only_marked_lines_run_and_figures_keep_the_first_rates_beside(
    tmp_path, asked, with_stored
):
    lines = {"free A": dict(lr=0.1), "DP A": {}, "free B": dict(lr=0.2), "DP B": {}}
    own = {"free A": ("DP A",), "free B": ("DP B",)}
    experiment = Experiment("title", SMALL, lines, baselines=own, runs=Plans())
    results = {
        "free A": line(0.2, 0.21, 0.22),
        "DP A": line(0.8, 0.82, 0.81),
        "free B": line(0.9, 0.91, 0.92),
        "DP B": line(0.8, 0.82, 0.81),
    }
    at = ("paper", "fig", experiment, results, tmp_path, tmp_path)
    found = baselines.regrid(*at)
    assert asked == ["fig free A"] and found["free B"] == {}
    assert baselines.regrid(*at, lines=("free B",)) == {"free B": {}}
    assert baselines.regrid(*at, served=("free A",)).keys() == {"free A", "free B"}
    assert len(asked) == 1
    same = dataclasses.replace(experiment, lines={"of A": dict(lr=0.1)}, baselines={"of A": ()})
    both = with_stored(dict(fig=found), fig=experiment, other=same)
    assert both["other"].lines == {"of A": dict(lr=1.0), "of A, first rates": dict(lr=0.1)}
    first = {"free A": dict(lr=1.0), "free A, first rates": dict(lr=0.1)}
    assert both["fig"].lines == lines | first


def test_a_line_takes_the_choice_of_one_whose_data_have_the_same_law(with_stored):
    """But not what L-BFGS reached on the draws of that one."""
    fields = dict(lr=0.1, steps=7)
    other = dataclasses.replace(
        ONE, same_law={"b": ("one", "a")}, lines={"b": fields}, baselines={"b": ()}
    )
    of_one = dict(a=dict(chosen=dict(lr=1.0), reached={"0": 0.5}))
    taken = with_stored(dict(one=of_one), one=ONE, other=other)["other"]
    assert taken.lines == {"b": fields | dict(lr=1.0), "b, first rates": fields}
    assert taken.reached == {}


# --- the command


def test_a_choice_is_made_once_and_stays(tmp_path, monkeypatch, asked):
    """Under one figure of those that share the run, also where the line is marked no more."""
    of = dataclasses.replace(ONE, lines={"a": dict(lr=0.1), "DP": {}}, baselines={"a": ("DP",)})
    paper = types.SimpleNamespace(EXPERIMENTS=dict(one=of, other=of))
    monkeypatch.setitem(sys.modules, "experiments.papers.noble2022.figures", paper)
    monkeypatch.setattr(baselines, "FILE", tmp_path / "baselines.json")

    def call(figure, *accuracy):
        ended = dict(a=[*accuracy], DP=[0.8, 0.81, 0.82])
        stored = {n: results_file.Line(accuracy=v, loss=[0.0] * 3) for n, v in ended.items()}
        part = results_file.Experiment(seeds=[0, 1, 2], lines=stored)
        whole = results_file.Experiment(experiments={figure: part})
        results_file.write(tmp_path / "noble2022.json", whole)
        baselines.main(["noble2022", figure, "--kept", str(tmp_path / "kept")])
        return baselines.stored()["noble2022"]

    made = call("one", 0.2, 0.22, 0.21)["one"]
    assert made["a"]["chosen"] == dict(lr=1.0) and asked == ["one a"]
    assert call("other", 0.2, 0.22, 0.21) == dict(one=made, other={"a": {}})
    assert call("one", 0.9, 0.92, 0.91)["one"] == made and asked == ["one a"]
