"""Runs of experiments are kept by what was asked for, shared among figures, and go on where they stopped."""
import contextlib
import csv
import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import jfl
from experiments import cells, common
from experiments.common import Claim, Experiment
from jfl import assemble, sources, sweeps
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


def test_what_a_key_holds(monkeypatch, tmp_path):
    config, key = Config(**TINY), lambda c: cells.key(c, sweeps.sweep)
    base = key(config)
    assert base == key(dataclasses.replace(config, seed=3)) != key(dataclasses.replace(config, partition_seed=3))
    with jax.enable_x64(True):
        assert base != key(config)                        # other draws
    monkeypatch.setattr(cells.datasets, "mnist", lambda: digits._replace(x=digits.x + 0.5))
    digits, other = cells.datasets.digits(), dataclasses.replace(config, dataset="mnist")
    one = key(other)
    cells._rows.cache_clear()
    monkeypatch.setattr(cells.datasets, "mnist", lambda: digits)
    assert one != key(other)                              # the rows that lie on disk
    cells._rows.cache_clear()
    monkeypatch.setattr(cells, "code", lambda: dict(source="another"))
    assert base != key(config)


def test_folders_of_another_making_are_left_alone(tmp_path):
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "summary.json").write_text("mine")
    with pytest.raises(ValueError, match="slow: need a new directory, or a line of an experiment.*got one with summary.json"):
        common.run("tiny", figure(), tmp_path)
    assert (tmp_path / "slow" / "summary.json").read_text() == "mine"


def test_rows_of_another_run_do_not_stay(tmp_path):
    made, where = figure(only=dict(lr=0.1)), tmp_path / "only"
    common.run("tiny", made, tmp_path)
    assert (where / "metrics.csv").exists()

    def bare(config, axes, out):
        entries = sweeps.sweep(config, axes, out)
        for name in cells.ROWS:
            (out / name).unlink()
        return entries

    common.run("tiny", dataclasses.replace(made, sweep=bare), tmp_path)
    assert not (where / "metrics.csv").exists() and not (where / "manifest.json").exists()
    assert sources.read(tmp_path).lines[0].rows == []


def test_more_seeds_after_a_stop_begin_with_what_is_there(tmp_path, monkeypatch):
    made, put, save, stored = figure(only=dict(lr=0.1)), sweeps.Results.put, sweeps.report.save, []
    monkeypatch.setattr(sweeps.Results, "put", lambda store, records: stored.append(len(records)) or put(store, records))

    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeps.report, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        common.run("tiny", made, tmp_path)
    monkeypatch.setattr(sweeps.report, "save", save)
    found = common.run("tiny", dataclasses.replace(made, seeds=(0, 1, 2)), tmp_path)
    assert sum(stored) == 3 and len(found["lines"]["only"]["accuracy"]) == 3
    home, = (tmp_path / common.CELLS).iterdir()
    assert sorted(p.name for p in home.iterdir() if p.is_dir()) == ["0-1", "2"]


def test_who_only_reads_waits_for_nobody(tmp_path):
    common.run("tiny", figure(), tmp_path)
    with contextlib.ExitStack() as held:
        for home in (tmp_path / common.CELLS).iterdir():
            held.enter_context(cells.alone(home))
        common.run("tiny", figure(), tmp_path)
        with pytest.raises(ValueError, match="a directory that no other process runs in"):
            common.run("tiny", figure((5,)), tmp_path)


def test_failed_runs_are_told_and_kept(tmp_path, capsys):
    claims = (Claim("far", common.close("good", "bad")),)
    bad = dict(lr=1e30, clip_norm=1e30, noise_multiplier=1.0)
    made = dataclasses.replace(figure(good=dict(lr=0.1), bad=bad, last=dict(lr=0.2)), claims=claims)
    for _ in range(2):                                    # as they were computed, and as they are kept
        found = common.run("tiny", made, tmp_path)
        assert list(found["lines"]) == ["good", "last"] and list(found["failed"]) == ["bad"]
        assert found["verdicts"][0]["verdict"] == common.UNKNOWN and "tiny bad: all of its runs failed" in capsys.readouterr().err
    # seeds that fail alone are those that fail beside others
    found = common.run("tiny", dataclasses.replace(made, seeds=(0, 1, 2)), tmp_path)
    assert list(found["failed"]) == ["bad"]
    assert sources.read(tmp_path).lines


def test_a_point_that_failed_is_marked():
    plans = [assemble.build(Config(**TINY, lr=lr, clip_norm=clip, noise_multiplier=1.0))[0]
             for lr, clip in ((0.1, 1.0), (1e30, 1e30))]
    result = jfl.sweep(lambda which: plans[which], points=[dict(which=0, seed=0), dict(which=1, seed=0)], rounds=2)
    assert common.failure(result, 0) == {} and common.failure(result, 1)["failed"]["nonfinite"] > 0
