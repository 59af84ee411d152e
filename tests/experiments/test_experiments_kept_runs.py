"""Runs of experiments are kept by what was asked for, shared among figures, and go on where they
stopped."""

import contextlib
import csv
import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from helpers import pretended

import jfl
from experiments.harness import kept_runs, results, runner
from experiments.harness import programs as harness_programs
from experiments.harness.programs import Plans
from experiments.harness.runner import Claim, Experiment
from experiments.harness.verdicts import HOLDS, UNKNOWN, close
from jfl.core import checks
from jfl.core.errors import DataUnavailable
from jfl.data.rows import digest
from jfl.report import read
from jfl.runs import build, pictures, record, sweep, train
from jfl.runs.config import Config

TINY = dict(
    dataset="digits", partition="iid", clients=4, rounds=2, steps=1, batch=4, evaluate_every=1
)
NOISY = dict(clip_norm=0.5, noise_multiplier=2.0)


@pytest.fixture(autouse=True)
def bookkeeping(request, monkeypatch):
    """What runs are kept, shared and told is the same whatever computes them; slow tests have real
    programs."""
    monkeypatch.setattr(pictures, "draw_accuracy", lambda path, *_: path.write_bytes(b""))
    if not request.node.get_closest_marker("slow"):
        monkeypatch.setattr(sweep, "compute", pretended.compute)
        for module in (train, harness_programs):
            monkeypatch.setattr(module, "trace_once", lambda *_: None)


@pytest.fixture
def ran(bookkeeping, monkeypatch):
    """The [(learning rate, seed)] of the programs that run."""
    seen, real = [], sweep.compute

    def watched(block, *args, **more):
        seen.append([(p.config.lr, p.config.seed) for p in block.points])
        return real(block, *args, **more)

    monkeypatch.setattr(sweep, "compute", watched)
    return seen


@pytest.fixture
def small(monkeypatch):
    """Blocks of two points."""
    monkeypatch.setattr(sweep, "CPU_BLOCK_SIZE", 2)


def figure(seeds=(0, 1), **lines):
    lines = lines or dict(slow=dict(lr=0.1), fast=dict(lr=0.5))
    return Experiment("tiny", TINY, lines, seeds=seeds)


def entries(line):
    return json.loads((line / "summary.json").read_text())["runs"]


def stopped_after(monkeypatch, blocks):
    """Runs are stopped in the middle of the block after this number."""
    real, left = sweep.compute, [blocks]

    def compute(block):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(block)

    monkeypatch.setattr(sweep, "compute", compute)
    return lambda: monkeypatch.setattr(sweep, "compute", real)


# --- what runs


def test_figures_share_lines_and_more_seeds_are_only_the_new_ones(tmp_path, ran):
    kept = tmp_path / "kept"
    one = runner.run("one", figure(), tmp_path / "one", kept=kept)["lines"]
    # the lines of a figure are one program, seed by seed
    assert ran == [[(0.1, 0), (0.5, 0), (0.1, 1), (0.5, 1)]]
    lines = dict(quick=dict(lr=0.5), new=dict(lr=0.2), slow=dict(lr=0.1))
    other = runner.run("other", figure((2, 1), **lines), tmp_path / "other", kept=kept)["lines"]
    assert ran[1:] == [[(0.5, 2), (0.2, 2), (0.2, 1), (0.1, 2)]]
    assert other["quick"]["accuracy"][1] == one["fast"]["accuracy"][1]
    assert other["quick"]["accuracy"][0] != one["fast"]["accuracy"][0]
    # a line leaves what a sweep leaves: a report reads it, with the curve of each seed from where
    # it ran
    line = read.read(tmp_path / "other" / "quick")
    assert [e["seed"] for e in line.runs] == [2, 1] and line.manifest["seeds"] == [2, 1]
    assert [(r["seed"], r["round"]) for r in line.rows] == [(2, 1), (2, 2), (1, 1), (1, 2)]
    first = csv.DictReader(open(tmp_path / "one" / "fast" / "metrics.csv"))
    losses = [float(r["loss"]) for r in first if r["seed"] == "1"]
    assert [r["loss"] for r in line.rows[2:]] == losses


def test_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch, small, ran):
    accuracies = lambda made, out: {
        name: line["accuracy"]
        for name, line in runner.run("tiny", made, tmp_path / out)["lines"].items()
    }
    whole = accuracies(figure(), "whole")
    assert ran == [[(0.1, 0), (0.5, 0)], [(0.1, 1), (0.5, 1)]]
    again = stopped_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        accuracies(figure(), "cut")
    again()
    # what was done is kept, also where a field of the other line has changed since
    other = accuracies(figure(slow=dict(lr=0.1), fast=dict(lr=0.7)), "cut")
    assert ran[3:] == [[(0.1, 1), (0.7, 1)], [(0.7, 0)]] and other["slow"] == whole["slow"]
    found = accuracies(figure(), "cut")
    assert ran[5:] == [[(0.5, 1)]] and list(found) == ["slow", "fast"] and found == whole
    kept = tmp_path / "cut" / runner.KEPT
    assert not list(kept.glob(f"*/{kept_runs.RUNNING}"))
    # a run that was killed before its first point begins again
    (killed := kept / kept_runs.key(Config(**TINY, lr=0.9), Plans())).mkdir()
    (killed / kept_runs.FILE).write_text('{"key": 0, "ent')
    assert len(accuracies(figure(slow=dict(lr=0.9)), "cut")["slow"]) == 2


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
    other = dataclasses.replace(made, runs=functools.partial(own, clock="round"))
    runner.run("tiny", other, tmp_path)
    assert begun[2:] == [("round", [0, 1])]


def test_all_lines_are_checked_before_the_first_one_runs(tmp_path, ran):
    with pytest.raises(ValueError, match="cohort"):
        runner.run("tiny", figure(good={}, bad=dict(cohort=9)), tmp_path)
    assert ran == [] and not list(tmp_path.glob("*/summary.json"))


def test_what_a_key_holds(monkeypatch):
    config, key = Config(**TINY), lambda c, **how: kept_runs.key(c, Plans(**how))
    base = key(config)
    assert base == key(dataclasses.replace(config, seed=3))
    assert base != key(dataclasses.replace(config, partition_seed=3))
    with jax.enable_x64(True):
        assert base != key(config)  # other draws
    digits, other = kept_runs.datasets.digits(), dataclasses.replace(config, dataset="mnist")
    found = set()
    for shift in (0.0, 0.5, 0.0):  # the rows that lie on disk
        monkeypatch.setattr(
            kept_runs.datasets, "mnist", lambda shift=shift: digits._replace(x=digits.x + shift)
        )
        kept_runs.data_digest.cache_clear()
        found.add(key(other))
    kept_runs.data_digest.cache_clear()
    assert len(found) == 2
    traced = key(config, seeded=True, trace=(("curve", "loss"),))
    assert len({base, key(config, seeded=True), traced}) == 3
    with pytest.raises(ValueError, match="functions with a name.*got a lambda"):
        key(config, privacy=lambda plan, config: [])
    monkeypatch.setattr(kept_runs, "code", lambda: dict(source="another"))
    assert base != key(config)


# --- what stays in the folder of an experiment


def test_results_of_an_earlier_run_do_not_stay_beside_lines_of_this_one(
    tmp_path, monkeypatch, small
):
    runner.run("tiny", dataclasses.replace(figure(), quick=dict(steps=1)), tmp_path, quick=True)
    before = (tmp_path / "results.json").read_bytes()
    (tmp_path / "slow").rename(tmp_path / "aside")
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="slow: expected a new directory.*one with notes"):
        runner.run("tiny", figure(), tmp_path)
    assert (tmp_path / "slow" / "notes").read_text() == "mine"
    assert (tmp_path / "results.json").read_bytes() == before  # nothing was written yet
    (tmp_path / "slow" / "notes").unlink()
    (tmp_path / "report.md").write_bytes(record.PAGES[".md"])  # a page of the earlier results
    stopped_after(monkeypatch, 2)
    lines = dict(fast=dict(lr=0.5), last=dict(lr=0.7), slow=dict(lr=0.9))
    with pytest.raises(KeyboardInterrupt):  # in the last line
        runner.run("tiny", figure(**lines), tmp_path)
    assert not (tmp_path / "results.json").exists() and not (tmp_path / "report.md").exists()


def test_rows_of_another_run_do_not_stay(tmp_path):
    made, where = figure(only=dict(lr=0.1)), tmp_path / "only"
    runner.run("tiny", made, tmp_path)
    assert (where / "metrics.csv").exists()

    def bare(config, axes, out):
        found = sweep.sweep(config, axes, out)
        for name in kept_runs.TABLES:
            (out / name).unlink()
        return found

    runner.run("tiny", dataclasses.replace(made, runs=bare), tmp_path)
    assert not (where / "metrics.csv").exists() and not (where / "manifest.json").exists()


def test_results_stay_where_no_data_can_be_read(tmp_path, monkeypatch):
    runner.run("tiny", figure(), tmp_path)
    before = (tmp_path / "results.json").read_bytes()
    nothing = lambda: checks.fail("datasets.mnist", "data", "none", error=DataUnavailable)
    monkeypatch.setattr(kept_runs, "data_digest", kept_runs.data_digest.__wrapped__)
    monkeypatch.setattr(kept_runs.datasets, "mnist", nothing)
    with pytest.raises(ValueError, match="data of at least one line, but got mnist that cannot"):
        runner.run("tiny", figure(slow=dict(dataset="mnist")), tmp_path)
    assert (tmp_path / "results.json").read_bytes() == before
    assert runner.run("tiny", figure(slow=dict(dataset="mnist")), tmp_path / "new")["unread"]


# --- other processes


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
    how, kept = Plans() if together else sweep.sweep, tmp_path / "kept"
    get = lambda name, where, seeds=(0, 1): list(
        kept_runs.lines({name: tmp_path / where}, kept, {name: configs[name]}, seeds, how)
    )
    folders = {n: tmp_path / n for n in configs}
    for name, _ in kept_runs.lines(folders, kept, configs, (0, 1), how):
        assert len(get(name, f"other-{name}")[0][1]) == 2
        with kept_runs.locked(kept / kept_runs.key(configs[name], how)):
            pass  # more of its seeds can run
        if name == "a" and together:  # b is in a block to come, and its rows are of this process
            with pytest.raises(ValueError, match="no other process"):
                get("b", "early", (2,))
        elif name == "a":
            assert len(get("c", "early")[0][1]) == 2


# --- failures


def test_failed_runs_are_told_and_kept(tmp_path, capsys):
    lines = dict(good=dict(lr=0.1), bad=dict(lr=1e30), last=dict(lr=0.2))
    made = dataclasses.replace(figure(**lines), claims=(Claim("far", close("good", "bad")),))
    for _ in range(2):  # as they were computed, and as they are kept
        found = runner.run("tiny", made, tmp_path)
        assert list(found["lines"]) == ["good", "last"] and list(found["failed"]) == ["bad"]
        assert found["verdicts"][0]["verdict"] == UNKNOWN
        assert "tiny bad: all of its runs failed" in capsys.readouterr().err
    assert results.read(tmp_path / "results.json").failed == found["failed"]


def test_seeds_that_fail_are_told_and_decide_no_claim(tmp_path, capsys):
    """Of a Poisson cohort that may be empty."""
    claims = (Claim("far", close("good", "some")), Claim("near", close("good", "good")))
    lines = dict(good={}, some=dict(sampler="poisson", rate=0.4, partition="iid"))
    made = dataclasses.replace(figure(range(6), **lines), claims=claims)
    found = runner.run("tiny", made, tmp_path)
    good, some = found["lines"]["good"], found["lines"]["some"]
    assert (
        some["seeds"] and some["failed"] and sorted(some["seeds"] + some["failed"]) == [*range(6)]
    )
    assert len(some["accuracy"]) == len(some["loss"]) == len(some["seeds"])
    assert (good["failed"], len(good["seeds"])) == ([], 6)
    assert [v["verdict"] for v in found["verdicts"]] == [UNKNOWN, HOLDS]
    told, words = capsys.readouterr(), f"({len(some['failed'])} of 6 seeds failed)"
    assert told.err.count(words) == 1 and words in told.out


# --- with real programs


@pytest.mark.slow
def test_a_line_among_others_is_as_alone(tmp_path, ran):
    """Metrics, guarantees, rows and manifest; what is of another length is a program of its own."""
    lines = dict(
        noisy=NOISY,
        louder=NOISY | dict(noise_multiplier=4.0),
        longer=NOISY | dict(rounds=3),
        split=NOISY | dict(partition="dirichlet", partition_seed=3),
    )
    runner.run("tiny", figure((0, 3), **lines), tmp_path)
    assert sorted(map(len, ran)) == [2, 6]
    for line, fields in lines.items():
        here, there = tmp_path / line, tmp_path / "alone" / line
        sweep.sweep(Config(**TINY | fields), dict(seed=[0, 3]), there)
        for a, b in zip(entries(here), entries(there), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert all(a[k] == b[k] for k in ("accuracy", "privacy", "config"))
        mine, alone = (
            [
                (r["seed"], r["round"], r["epsilon"], r["accuracy"])
                for r in csv.DictReader(open(p / "metrics.csv"))
            ]
            for p in (here, there)
        )
        assert mine == alone
        mine, alone = (json.loads((p / "manifest.json").read_text()) for p in (here, there))
        assert mine["seeds"] == [0, 3]
        assert all(mine[k] == alone[k] for k in ("noise", "data", "kernels", "versions"))


def split_by_seed(config):
    return build.build(dataclasses.replace(config, partition_seed=config.seed))


@pytest.mark.slow
def test_every_seed_has_the_epsilon_of_its_own_split(tmp_path):
    fields, seeds = NOISY | dict(partition="dirichlet", alpha=0.5), (0, 1, 0)
    made = figure(seeds, line=fields, other=fields | dict(lr=0.1))
    runner.run("tiny", dataclasses.replace(made, runs=Plans(split_by_seed, True)), tmp_path)
    of = lambda rows: [
        g["epsilon"] for g in rows if (g["unit"], g["view"]) == ("example", "server")
    ]
    own = [train.privacy(*split_by_seed(Config(**TINY | fields, seed=s)), 2) for s in seeds]
    own = [epsilon for rows in own for epsilon in of(rows)]
    for line in ("line", "other"):
        shown = [epsilon for e in entries(tmp_path / line) for epsilon in of(e["privacy"])]
        assert shown == own and shown[0] != shown[1]
    found = results.read(tmp_path / "results.json").lines["line"]
    assert (found.epsilon_proved, found.seeds, found.failed) == (max(own), [0, 1, 0], [])


def test_a_line_has_the_largest_epsilon_of_its_seeds_in_its_view():
    rows = lambda *told: [dict(view=v, status=s, epsilon=e) for v, s, e in told]
    entry = dict(
        privacy=rows(
            ("server", "proved", 3.0),
            ("third_party", "proved", 1.0),
            ("server", "claimed", 5.0),
            ("third_party", "claimed", 2.0),
        ),
        config=dict(view="third_party"),
        loss=0.0,
        accuracy=dict(final=0.4),
        seconds=dict(per_round=1.0),
        seed=0,
    )
    seen = runner._line([entry])
    assert (seen.proved, seen.claimed, seen.trace) == (1.0, 2.0, {})
    seen = runner._line([entry | dict(config=dict(view=None), trace=dict(a=[1, 2]))])
    assert (seen.proved, seen.claimed) == (3.0, 5.0) and seen.trace["a"].tolist() == [[1, 2]]
    other = rows(("third_party", "proved", 1.5), ("third_party", "claimed", 9.0))
    seen = runner._line([entry, entry | dict(privacy=other)])
    assert (seen.proved, seen.claimed) == (1.5, 9.0)
    assert runner._line([entry, entry | dict(privacy=[])]).proved is None  # one of them has none
    # Nothing is proved for the server, of which the claim is: what a third party has is not shown.
    free = dict(privacy=rows(("third_party", "proved", 1.5), ("server", "claimed", 5.0)))
    for view in (None, "server"):
        seen = runner._line([entry | free | dict(config=dict(view=view))])
        assert (seen.proved, seen.claimed) == (None, 5.0)


def test_an_accuracy_may_be_the_mean_of_the_last_part_of_the_rounds():
    rounds = list(range(5, 101, 5))
    entry = dict(accuracy=dict(final=0.9), trace=dict(round=rounds, curve=[0.0] * 18 + [0.4, 0.9]))
    assert runner._accuracy(entry, 0.1) == pytest.approx(0.65)
    assert runner._accuracy(entry, 0.0) == 0.9


def test_a_line_names_the_digest_of_its_rows_on_disk(tmp_path, monkeypatch):
    rows = np.random.default_rng(0).integers(0, 256, (40, 28, 28), np.uint8)
    labels = np.arange(40) % 10
    np.savez(tmp_path / "mnist.npz", x=rows, y=labels, x_test=rows[:10], y_test=labels[:10])
    monkeypatch.setenv("JFL_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_dataset", build._dataset.__wrapped__)
    monkeypatch.setattr(build, "_federation", build._federation.__wrapped__)
    monkeypatch.setattr(kept_runs, "data_digest", kept_runs.data_digest.__wrapped__)
    data = jfl.datasets.mnist()
    made = figure(digits={}, mnist=dict(dataset="mnist"))
    found = runner.run("tiny", made, tmp_path / "out")["lines"]
    assert found["digits"]["data"] == ""
    assert found["mnist"]["data"] == digest(data.x, data.y, data.x_test, data.y_test)
    stored = results.read(tmp_path / "out" / "results.json").lines
    assert {name: line.data for name, line in stored.items()} == {
        name: line["data"] for name, line in found.items()
    }
