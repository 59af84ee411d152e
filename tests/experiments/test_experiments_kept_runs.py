"""Runs of experiments are kept by what was asked for, shared among figures, and go on where they
stopped."""

import contextlib
import csv
import dataclasses
import functools
import json

import jax
import pytest
from helpers import pretended

from experiments.harness import kept_runs, results, runner
from experiments.harness import programs as harness_programs
from experiments.harness.programs import Plans
from experiments.harness.runner import Claim, Experiment
from experiments.harness.verdicts import HOLDS, close
from jfl.core import checks
from jfl.core.errors import DataUnavailable
from jfl.report import read
from jfl.runs import build, pictures, record, sweep, train
from jfl.runs.config import Config

TINY = dict(
    dataset="digits", partition="iid", clients=4, rounds=2, steps=1, batch=4, evaluate_every=1
)


@pytest.fixture(autouse=True)
def bookkeeping(request, monkeypatch):
    """What runs are kept, shared and told is the same whatever computes them; tests that take
    `programs` have real ones."""
    monkeypatch.setattr(pictures, "draw_accuracy", lambda path, *_: path.write_bytes(b""))
    if "programs" not in request.fixturenames and not request.node.get_closest_marker("slow"):
        monkeypatch.setattr(sweep, "compute", pretended.compute)
        for module in (train, harness_programs):
            monkeypatch.setattr(module, "trace_once", lambda *_: None)


@pytest.fixture
def programs():
    """Real ones."""


@pytest.fixture
def ran(bookkeeping, monkeypatch):
    """The [(learning rate, seed)] of the programs that run."""
    seen, real = [], sweep.compute

    def watched(block, *args, **more):
        seen.append([(p.config.lr, p.config.seed) for p in block.points])
        return real(block, *args, **more)

    monkeypatch.setattr(sweep, "compute", watched)
    return seen


def figure(seeds=(0, 1), **lines):
    return Experiment(
        "tiny", TINY, lines or dict(slow=dict(lr=0.1), fast=dict(lr=0.5)), seeds=seeds
    )


@pytest.mark.slow
def test_figures_share_lines_and_more_seeds_are_only_the_new_ones(tmp_path, programs, ran):
    kept = tmp_path / "kept"
    one = runner.run("one", figure(), tmp_path / "one", kept=kept)
    assert ran == [
        [(0.1, 0), (0.5, 0), (0.1, 1), (0.5, 1)]
    ]  # the lines of a figure are one program, seed by seed
    other = runner.run(
        "other",
        figure((2, 1), quick=dict(lr=0.5), new=dict(lr=0.2), slow=dict(lr=0.1)),
        tmp_path / "other",
        kept=kept,
    )
    assert ran[1:] == [[(0.5, 2), (0.2, 2), (0.2, 1), (0.1, 2)]]
    assert other["lines"]["quick"]["accuracy"][1] == one["lines"]["fast"]["accuracy"][1]
    assert other["lines"]["quick"]["accuracy"][0] != one["lines"]["fast"]["accuracy"][0]
    assert 0 < one["seconds"] and other["seconds"] < 60
    # a line leaves what a sweep leaves: a report reads it, with the curve of each seed from where
    # it ran
    line = read.read(tmp_path / "other" / "quick")
    assert [e["seed"] for e in line.runs] == [2, 1] and line.manifest["seeds"] == [2, 1]
    assert [(r["seed"], r["round"]) for r in line.rows] == [(2, 1), (2, 2), (1, 1), (1, 2)]
    first = list(csv.DictReader(open(tmp_path / "one" / "fast" / "metrics.csv")))
    assert [r["loss"] for r in line.rows[2:]] == [
        float(r["loss"]) for r in first if r["seed"] == "1"
    ]


def test_a_changed_field_runs_its_line_alone(tmp_path, ran):
    runner.run("tiny", figure(), tmp_path)
    before = json.loads((tmp_path / "fast" / "summary.json").read_text())
    runner.run("tiny", figure(slow=dict(lr=0.1), fast=dict(lr=0.7)), tmp_path)
    assert ran[1:] == [[(0.7, 0), (0.7, 1)]]
    assert (
        json.loads((tmp_path / "fast" / "summary.json").read_text())["runs"][0]["config"]["lr"]
        == 0.7
    )
    runner.run("tiny", figure(), tmp_path)  # and nothing was lost
    assert len(ran) == 2 and json.loads((tmp_path / "fast" / "summary.json").read_text()) == before


@pytest.fixture
def small(monkeypatch):
    """Blocks of two points."""
    monkeypatch.setattr(sweep, "CPU_BLOCK_SIZE", 2)


def stopped_after(monkeypatch, blocks):
    """Runs are stopped in the middle of the block after so many."""
    real, left = sweep.compute, [blocks]

    def compute(block):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(block)

    monkeypatch.setattr(sweep, "compute", compute)
    return lambda: monkeypatch.setattr(sweep, "compute", real)


def test_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch, small, ran):
    whole = runner.run("tiny", figure(), tmp_path / "whole")["lines"]
    assert ran == [[(0.1, 0), (0.5, 0)], [(0.1, 1), (0.5, 1)]]
    again = stopped_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        runner.run("tiny", figure(), tmp_path / "cut")
    again()
    # what was done is kept, also where a field of the other line has changed since
    other = runner.run("tiny", figure(slow=dict(lr=0.1), fast=dict(lr=0.7)), tmp_path / "cut")[
        "lines"
    ]
    assert (
        ran[3:] == [[(0.1, 1), (0.7, 1)], [(0.7, 0)]]
        and other["slow"]["accuracy"] == whole["slow"]["accuracy"]
    )
    found = runner.run("tiny", figure(), tmp_path / "cut")["lines"]
    assert ran[5:] == [[(0.5, 1)]]
    assert {n: f["accuracy"] for n, f in found.items()} == {
        n: f["accuracy"] for n, f in whole.items()
    }
    assert list(found) == ["slow", "fast"]
    assert not list((tmp_path / "cut" / runner.KEPT).glob(f"*/{kept_runs.RUNNING}"))


def test_results_of_an_earlier_run_do_not_stay_beside_lines_of_this_one(
    tmp_path, monkeypatch, small
):
    runner.run("tiny", dataclasses.replace(figure(), quick=dict(steps=1)), tmp_path, quick=True)
    before = (tmp_path / "results.json").read_bytes()
    (tmp_path / "slow").rename(tmp_path / "aside")
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="a new directory"):
        runner.run("tiny", figure(), tmp_path)
    assert (tmp_path / "results.json").read_bytes() == before  # nothing was written yet
    (tmp_path / "slow" / "notes").unlink()
    (tmp_path / "report.md").write_bytes(record.PAGES[".md"])  # a page of the earlier results
    stopped_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):  # in the last line
        runner.run(
            "tiny", figure(fast=dict(lr=0.5), last=dict(lr=0.7), slow=dict(lr=0.9)), tmp_path
        )
    assert not (tmp_path / "results.json").exists() and not (tmp_path / "report.md").exists()


def test_results_stay_where_no_data_can_be_read(tmp_path, ran, monkeypatch):
    runner.run("tiny", figure(), tmp_path)
    before = (tmp_path / "results.json").read_bytes()
    monkeypatch.setattr(kept_runs, "_rows", kept_runs._rows.__wrapped__)
    monkeypatch.setattr(
        kept_runs.datasets,
        "mnist",
        lambda: checks.fail("datasets.mnist", "prepared data", "none", error=DataUnavailable),
    )
    with pytest.raises(
        ValueError,
        match="tiny: expected data of at least one line, but got mnist that cannot be read",
    ):
        runner.run("tiny", figure(slow=dict(dataset="mnist")), tmp_path)
    assert (tmp_path / "results.json").read_bytes() == before
    assert runner.run("tiny", figure(slow=dict(dataset="mnist")), tmp_path / "new")["unread"]


@pytest.mark.slow
def test_a_line_among_others_is_as_alone(tmp_path, ran):
    """Metrics, guarantees, rows and manifest; what is of another length is a program of its own."""
    noisy = dict(clip_norm=0.5, noise_multiplier=2.0)
    lines = dict(
        noisy=noisy,
        louder=noisy | dict(noise_multiplier=4.0),
        longer=noisy | dict(rounds=3),
        split=noisy | dict(partition="dirichlet", partition_seed=3),
    )
    runner.run("tiny", figure((0, 3), **lines), tmp_path)
    assert sorted(map(len, ran)) == [2, 6]
    for line, fields in lines.items():
        sweep.sweep(Config(**TINY | fields), dict(seed=[0, 3]), tmp_path / "alone" / line)
        mine, alone = (
            json.loads((p / line / "summary.json").read_text())["runs"]
            for p in (tmp_path, tmp_path / "alone")
        )
        for a, b in zip(mine, alone, strict=True):
            assert a["accuracy"] == b["accuracy"] and a["loss"] == pytest.approx(
                b["loss"], rel=1e-5
            )
            assert a["privacy"] == b["privacy"] and a["config"] == b["config"]
        mine, alone = (
            list(csv.DictReader(open(p / line / "metrics.csv")))
            for p in (tmp_path, tmp_path / "alone")
        )
        assert [(r["seed"], r["round"], r["epsilon"], r["accuracy"]) for r in mine] == [
            (r["seed"], r["round"], r["epsilon"], r["accuracy"]) for r in alone
        ]
        mine, alone = (
            json.loads((p / line / "manifest.json").read_text())
            for p in (tmp_path, tmp_path / "alone")
        )
        assert mine["seeds"] == [0, 3] and all(
            mine[k] == alone[k] for k in ("noise", "data", "kernels", "versions")
        )


def split_by_seed(config):
    return build.build(dataclasses.replace(config, partition_seed=config.seed))


@pytest.mark.slow
def test_every_seed_has_the_epsilon_of_its_own_split(tmp_path):
    noisy = dict(clip_norm=0.5, noise_multiplier=2.0, partition="dirichlet", alpha=0.5)
    made = dataclasses.replace(
        figure((0, 1, 0), line=noisy, other=noisy | dict(lr=0.1)), runs=Plans(split_by_seed, True)
    )
    runner.run("tiny", made, tmp_path)
    for line in ("line", "other"):
        shown = [
            g["epsilon"]
            for e in json.loads((tmp_path / line / "summary.json").read_text())["runs"]
            for g in e["privacy"]
            if (g["unit"], g["view"]) == ("example", "server")
        ]
        own = [
            g["epsilon"]
            for s in (0, 1, 0)
            for g in train.privacy(*split_by_seed(Config(**TINY | noisy, seed=s)), 2)
            if (g["unit"], g["view"]) == ("example", "server")
        ]
        assert shown == own and shown[0] != shown[1]
    found = json.loads((tmp_path / "results.json").read_text())["lines"]["line"]
    assert (
        found["epsilon_proved"] == max(own)
        and found["seeds"] == [0, 1, 0]
        and found["failed"] == []
    )
    entries = json.loads((tmp_path / "line" / "summary.json").read_text())["runs"]
    for e in entries[1:]:
        e["privacy"] = []
    assert runner._line(entries).proved is None  # one of them has none
    claim = dict(status="claimed", view="server", unit="example")
    for e, claimed in zip(entries, (1.0, 9.0, 2.0)):
        e["privacy"] = [*e["privacy"], claim | dict(epsilon=claimed)]
    assert runner._line(entries).claimed == 9.0


def test_all_lines_are_checked_before_the_first_one_runs(tmp_path, ran):
    with pytest.raises(ValueError, match="cohort"):
        runner.run("tiny", figure(good={}, bad=dict(cohort=9)), tmp_path)
    assert ran == [] and not list(tmp_path.glob("*/summary.json"))


def test_a_run_that_was_killed_before_its_first_point_begins_again(tmp_path):
    home = tmp_path / runner.KEPT / kept_runs.key(Config(**TINY, lr=0.1), Plans())
    home.mkdir(parents=True)
    (home / kept_runs.FILE).write_text('{"key": 0, "ent')
    assert (
        len(runner.run("tiny", figure(slow=dict(lr=0.1)), tmp_path)["lines"]["slow"]["accuracy"])
        == 2
    )


def test_a_sweep_of_an_experiments_own_begins_again(tmp_path):
    begun = []

    def own(config, axes, out, clock="step"):
        begun.append((clock, axes["seed"]))
        assert not out.exists()
        if len(begun) == 1:
            out.mkdir(parents=True)
            (out / "half").write_text("")
            raise KeyboardInterrupt
        return sweep.sweep(config, axes, out)

    made = dataclasses.replace(figure(only=dict(lr=0.1)), runs=own)
    with pytest.raises(KeyboardInterrupt):
        runner.run("tiny", made, tmp_path)
    found = runner.run("tiny", made, tmp_path)
    assert len(begun) == 2 and len(found["lines"]["only"]["accuracy"]) == 2
    # another clock is another run, under the same config
    runner.run(
        "tiny", dataclasses.replace(made, runs=functools.partial(own, clock="round")), tmp_path
    )
    assert begun[2:] == [("round", [0, 1])]


def test_what_a_key_holds(monkeypatch, tmp_path):
    config, key = Config(**TINY), lambda c: kept_runs.key(c, Plans())
    base = key(config)
    assert (
        base
        == key(dataclasses.replace(config, seed=3))
        != key(dataclasses.replace(config, partition_seed=3))
    )
    with jax.enable_x64(True):
        assert base != key(config)  # other draws
    monkeypatch.setattr(kept_runs.datasets, "mnist", lambda: digits._replace(x=digits.x + 0.5))
    digits, other = kept_runs.datasets.digits(), dataclasses.replace(config, dataset="mnist")
    one = key(other)
    kept_runs._rows.cache_clear()
    monkeypatch.setattr(kept_runs.datasets, "mnist", lambda: digits)
    assert one != key(other)  # the rows that lie on disk
    kept_runs._rows.cache_clear()
    seeded = dataclasses.replace(Plans(), seeded=True)
    assert (
        base
        != kept_runs.key(config, seeded)
        != kept_runs.key(config, dataclasses.replace(seeded, trace=(("curve", "loss"),)))
    )
    with pytest.raises(ValueError, match="functions with a name.*got a lambda"):
        kept_runs.key(config, dataclasses.replace(seeded, privacy=lambda plan, config: []))
    monkeypatch.setattr(kept_runs, "code", lambda: dict(source="another"))
    assert base != key(config)


def test_folders_of_another_making_are_left_alone(tmp_path):
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "summary.json").write_text("mine")
    with pytest.raises(
        ValueError,
        match="slow: expected a new directory, or a line of an experiment.*got one with "
        "summary.json",
    ):
        runner.run("tiny", figure(), tmp_path)
    assert (tmp_path / "slow" / "summary.json").read_text() == "mine"


def test_rows_of_another_run_do_not_stay(tmp_path):
    made, where = figure(only=dict(lr=0.1)), tmp_path / "only"
    runner.run("tiny", made, tmp_path)
    assert (where / "metrics.csv").exists()

    def bare(config, axes, out):
        entries = sweep.sweep(config, axes, out)
        for name in kept_runs.TABLES:
            (out / name).unlink()
        return entries

    runner.run("tiny", dataclasses.replace(made, runs=bare), tmp_path)
    assert not (where / "metrics.csv").exists() and not (where / "manifest.json").exists()


def test_more_seeds_after_a_stop_begin_with_what_is_there(tmp_path, monkeypatch, small, ran):
    made, again = figure((0, 1, 2), only=dict(lr=0.1)), stopped_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        runner.run("tiny", made, tmp_path)
    again()
    found = runner.run("tiny", dataclasses.replace(made, seeds=(0, 1, 2, 3)), tmp_path)
    assert sum(map(len, ran)) == 4 and len(found["lines"]["only"]["accuracy"]) == 4
    (home,) = (tmp_path / runner.KEPT).iterdir()
    seeds = [json.loads(line)["key"] for line in (home / kept_runs.FILE).read_text().splitlines()]
    assert seeds == [0, 2, 1, 3]


def test_who_only_reads_waits_for_nobody(tmp_path):
    runner.run("tiny", figure(), tmp_path)
    with contextlib.ExitStack() as held:
        for home in (tmp_path / runner.KEPT).iterdir():
            held.enter_context(kept_runs.locked(home))
        runner.run("tiny", figure(), tmp_path)
        with pytest.raises(ValueError, match="a directory that no other process uses"):
            runner.run("tiny", figure((5,)), tmp_path)


@pytest.mark.parametrize("together", [True, False])
def test_what_is_done_or_not_begun_is_free_for_others(tmp_path, small, together):
    """Another figure has the lines that a running one has done, and those that it runs later."""
    configs = {n: Config(**TINY, lr=lr) for n, lr in (("a", 0.1), ("b", 0.2), ("c", 0.3))}
    how = Plans() if together else sweep.sweep
    get = lambda name, where, seeds=(0, 1): list(
        kept_runs.lines(
            {name: tmp_path / where}, tmp_path / "kept", {name: configs[name]}, seeds, how
        )
    )
    running = kept_runs.lines(
        {n: tmp_path / n for n in configs}, tmp_path / "kept", configs, (0, 1), how
    )
    for name, _ in running:
        assert len(get(name, f"other-{name}")[0][1]) == 2
        with kept_runs.locked(tmp_path / "kept" / kept_runs.key(configs[name], how)):
            pass  # more of its seeds can run
        if name == "a" and together:  # b is in a block to come, and its rows are of this process
            with pytest.raises(ValueError, match="no other process"):
                get("b", "early", (2,))
        elif name == "a":
            assert len(get("c", "early")[0][1]) == 2


def test_failed_runs_are_told_and_kept(tmp_path, capsys):
    claims = (Claim("far", close("good", "bad")),)
    made = dataclasses.replace(
        figure(good=dict(lr=0.1), bad=dict(lr=1e30), last=dict(lr=0.2)), claims=claims
    )
    for _ in range(2):  # as they were computed, and as they are kept
        found = runner.run("tiny", made, tmp_path)
        assert list(found["lines"]) == ["good", "last"] and list(found["failed"]) == ["bad"]
        assert (
            found["verdicts"][0]["verdict"] == runner.UNKNOWN
            and "tiny bad: all of its runs failed" in capsys.readouterr().err
        )
    # seeds that fail alone are those that fail beside others
    found = runner.run("tiny", dataclasses.replace(made, seeds=(0, 1, 2)), tmp_path)
    assert list(found["failed"]) == ["bad"]
    assert results.read(tmp_path / "results.json").failed == found["failed"]


def test_seeds_that_fail_are_told_and_decide_no_claim(tmp_path, capsys):
    """Of a Poisson cohort that may be empty."""
    line = dict(sampler="poisson", rate=0.4, partition="iid")
    claims = (
        Claim("far", close("good", "some")),
        Claim("near", close("good", "good")),
    )
    made = dataclasses.replace(figure(range(6), good={}, some=line), claims=claims)
    found = runner.run("tiny", made, tmp_path)
    good, some = found["lines"]["good"], found["lines"]["some"]
    assert (
        some["seeds"]
        and some["failed"]
        and sorted(some["seeds"] + some["failed"]) == list(range(6))
    )
    assert len(some["accuracy"]) == len(some["loss"]) == len(some["seeds"]) and (
        good["failed"],
        len(good["seeds"]),
    ) == ([], 6)
    far, near = found["verdicts"]
    assert far["verdict"] == runner.UNKNOWN and far["seen"].endswith("; seeds failed of some")
    assert near["verdict"] == HOLDS and "failed" not in near["seen"]
    told = capsys.readouterr()
    assert (
        told.err.count(text := f"({len(some['failed'])} of 6 seeds failed)") == 1
        and text in told.out
    )
