"""Runs of experiments are kept by what was asked for, shared among figures, and go on where they stopped."""
import csv
import dataclasses
import functools
import json

import pytest

from experiments import cells, common
from experiments.common import Experiment
from jfl import sources, sweeps
from jfl.config import Config

TINY = dict(dataset="digits", partition="iid", clients=4, rounds=2, steps=1, batch=4, evaluate_every=1)


@pytest.fixture
def ran(monkeypatch):
    """The (learning rate, seeds) of the sweeps that run."""
    seen, real = [], sweeps._sweep

    def watched(config, axes, *args):
        seen.append((config.lr, axes["seed"]))
        return real(config, axes, *args)

    monkeypatch.setattr(sweeps, "_sweep", watched)
    return seen


def figure(seeds=(0, 1), **lines):
    return Experiment("tiny", TINY, lines or dict(slow=dict(lr=0.1), fast=dict(lr=0.5)), seeds=seeds)


def test_figures_share_lines_and_more_seeds_are_only_the_new_ones(tmp_path, ran):
    kept = tmp_path / "cells"
    one = common.run("one", figure(), tmp_path / "one", kept=kept)
    assert ran == [(0.1, [0, 1]), (0.5, [0, 1])]
    other = common.run("other", figure((2, 1), quick=dict(lr=0.5), new=dict(lr=0.2)), tmp_path / "other", kept=kept)
    assert ran[2:] == [(0.5, [2]), (0.2, [2, 1])]
    assert other["lines"]["quick"]["accuracy"][1] == one["lines"]["fast"]["accuracy"][1]
    assert other["lines"]["quick"]["accuracy"][0] != one["lines"]["fast"]["accuracy"][0]
    assert 0 < one["seconds"] and other["seconds"] < 60
    # what it leaves is what a sweep leaves: a report reads it, with the curve of each seed from where it ran
    source = sources.read(tmp_path / "other")
    line = next(s for s in source.lines if s.label == "quick")
    assert [e["seed"] for e in line.runs] == [2, 1] and line.manifest["seeds"] == [2, 1]
    assert [(r["seed"], r["round"]) for r in line.rows] == [(2, 1), (2, 2), (1, 1), (1, 2)]
    first = list(csv.DictReader(open(tmp_path / "one" / "fast" / "metrics.csv")))
    assert [r["loss"] for r in line.rows[2:]] == [float(r["loss"]) for r in first if r["seed"] == "1"]


def test_a_changed_field_runs_its_line_alone(tmp_path, ran):
    common.run("tiny", figure(), tmp_path)
    before = json.loads((tmp_path / "fast" / "summary.json").read_text())
    common.run("tiny", figure(slow=dict(lr=0.1), fast=dict(lr=0.7)), tmp_path)
    assert ran[2:] == [(0.7, [0, 1])]
    assert json.loads((tmp_path / "fast" / "summary.json").read_text())["runs"][0]["config"]["lr"] == 0.7
    common.run("tiny", figure(), tmp_path)                # and nothing was lost
    assert len(ran) == 3 and json.loads((tmp_path / "fast" / "summary.json").read_text()) == before


def test_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch):
    whole = common.run("tiny", figure(), tmp_path / "whole")["lines"]
    put, save, stored = sweeps.Results.put, sweeps.report.save, []
    monkeypatch.setattr(sweeps.Results, "put", lambda store, records: stored.append(len(records)) or put(store, records))

    def stopped(*args):
        raise KeyboardInterrupt                           # all points of the first line are stored, no summary is written

    monkeypatch.setattr(sweeps.report, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        common.run("tiny", figure(), tmp_path / "cut")
    part, = (tmp_path / "cut" / common.CELLS).glob("*/0-1.part")
    assert sum(stored) == 2 and (part / sweeps.FILE).exists() and not list((tmp_path / "cut").glob("*/summary.json"))
    monkeypatch.setattr(sweeps.report, "save", save)
    again = common.run("tiny", figure(), tmp_path / "cut")["lines"]
    assert sum(stored) == 4                               # two more, of the second line
    assert {n: f["accuracy"] for n, f in again.items()} == {n: f["accuracy"] for n, f in whole.items()}
    assert not list((tmp_path / "cut" / common.CELLS).glob("*/*.part"))


def test_a_run_that_was_killed_before_its_first_point_begins_again(tmp_path):
    home = tmp_path / common.CELLS / cells.key(Config(**TINY, lr=0.1), sweeps.sweep) / "0-1.part"
    home.mkdir(parents=True)
    (home / "half").write_text("")
    assert len(common.run("tiny", figure(slow=dict(lr=0.1)), tmp_path)["lines"]["slow"]["accuracy"]) == 2


def test_a_sweep_of_an_experiments_own_begins_again(tmp_path):
    begun = []

    def own(config, axes, out, clock="step"):
        begun.append((clock, axes["seed"]))
        assert not out.exists()
        if len(begun) == 1:
            out.mkdir(parents=True)
            (out / "half").write_text("")
            raise KeyboardInterrupt
        return sweeps.sweep(config, axes, out)

    made = dataclasses.replace(figure(only=dict(lr=0.1)), sweep=own)
    with pytest.raises(KeyboardInterrupt):
        common.run("tiny", made, tmp_path)
    found = common.run("tiny", made, tmp_path)
    assert len(begun) == 2 and len(found["lines"]["only"]["accuracy"]) == 2
    # another clock is another run, under the same config
    common.run("tiny", dataclasses.replace(made, sweep=functools.partial(own, clock="round")), tmp_path)
    assert begun[2:] == [("round", [0, 1])]


def test_what_a_key_holds(monkeypatch):
    config = Config(**TINY)
    base = cells.key(config, sweeps.sweep)
    assert base == cells.key(dataclasses.replace(config, seed=3), sweeps.sweep)
    assert base != cells.key(dataclasses.replace(config, partition_seed=3), sweeps.sweep)
    monkeypatch.setattr(cells, "code", lambda: dict(source="another"))
    assert base != cells.key(config, sweeps.sweep)


def test_folders_of_another_making_are_left_alone(tmp_path):
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "summary.json").write_text("mine")
    with pytest.raises(ValueError, match="slow: need a new directory, or a line of an experiment"):
        common.run("tiny", figure(), tmp_path)
    assert (tmp_path / "slow" / "summary.json").read_text() == "mine"
