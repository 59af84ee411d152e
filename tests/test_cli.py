"""The command line as a user meets it: files, tables, exit codes, and nothing written when a run is refused."""
import csv
import json
import math
import subprocess
import sys

import numpy as np
import pytest

import jfl
from jfl import assemble
from jfl import config as configs
from jfl.cli import main
from jfl.config import Config

TINY = ["--clients", "8", "--model", "logistic", "--rounds", "4", "--steps", "2", "--batch", "8", "--cohort", "4"]


def jfl_(*args, code=0, capsys=None):
    assert main([str(a) for a in args]) == code
    return capsys.readouterr() if capsys else None


def summary(out):
    return json.loads((out / "summary.json").read_text())["runs"]


def table(out):
    with open(out / "metrics.csv") as file:
        return list(csv.DictReader(file))


def test_train_writes_a_run_directory(tmp_path, capsys):
    out = tmp_path / "run"
    said = jfl_("train", "--noise-multiplier", 1.5, *TINY, "--evaluate-every", 2, "--out", out, capsys=capsys)
    assert "example" in said.out and "replace_one" in said.out and "server" in said.out
    entry, = summary(out)
    assert set(entry) == {"name", "algorithm", "dataset", "rounds", "seed", "accuracy", "loss", "seconds", "privacy", "config"}
    assert set(entry["seconds"]) == {"compile", "total", "per_round"} and entry["seconds"]["compile"] > 0
    assert set(entry["privacy"][0]) == {"unit", "adjacency", "view", "delta", "epsilon", "method", "status", "caveats"}
    rows = table(out)
    assert [r["round"] for r in rows] == ["2", "4"]
    assert float(rows[-1]["accuracy"]) == entry["accuracy"]["final"]
    server = next(g for g in entry["privacy"] if g["view"] == "server")
    assert float(rows[-1]["epsilon"]) == server["epsilon"] > float(rows[0]["epsilon"]) > 0
    assert {"config.toml", "manifest.json", "accuracy.png", "checkpoints", "journal.json"} <= {p.name for p in out.iterdir()}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["seeds"] == [0] and manifest["data"]["clients"] == 8 and manifest["versions"]["jax"]
    assert (out / "accuracy.png").read_bytes()[:4] == b"\x89PNG"


def test_the_config_of_a_run_runs_it_again(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    jfl_("train", "--epsilon", 20, "--algorithm", "fedprox", *TINY, "--out", first)
    jfl_("train", "--config", first / "config.toml", "--out", second)
    assert table(first) == table(second)
    assert summary(first)[0]["config"] == summary(second)[0]["config"]


def test_without_noise_there_is_no_guarantee_and_no_nan(tmp_path, capsys):
    said = jfl_("train", *TINY, "--out", tmp_path / "run", capsys=capsys)
    assert "none" in said.out
    text = (tmp_path / "run" / "summary.json").read_text()
    assert "NaN" not in text and "Infinity" not in text
    entry, = summary(tmp_path / "run")
    assert [(g["epsilon"], g["status"], g["method"]) for g in entry["privacy"]] == [(None, "no guarantee", "none")]
    assert {r["epsilon"] for r in table(tmp_path / "run")} == {""}


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('lr = 0.7\nepsilon = 5.0\nclients = 8\nmodel = "logistic"\nrounds = 2\nsteps = 1\nbatch = 8\n')
    jfl_("train", "--config", file, "--lr", 0.2, "--noise-multiplier", 3, "--out", tmp_path / "run")
    config = summary(tmp_path / "run")[0]["config"]
    assert (config["lr"], config["noise_multiplier"], config["epsilon"], config["batch"]) == (0.2, 3.0, None, 8)


def test_calibrated_noise_reaches_its_target(tmp_path, capsys):
    out = tmp_path / "run"
    said = jfl_("train", "--epsilon", 30, "--delta", 1e-3, "--unit", "client", *TINY, "--out", out, capsys=capsys)
    assert "third_party" in said.err                      # it says which view the number is for
    entry, = summary(out)
    got = next(g for g in entry["privacy"] if g["unit"] == "client")
    assert got["view"] == "third_party" and 29.99 < got["epsilon"] <= 30


def test_sweep_is_marked_written_and_paired(tmp_path, capsys):
    out = tmp_path / "grid"
    jfl_("sweep", *TINY, "--noise-multiplier", 1, "--sweep", "lr=0.1,1e38", "seed=0,1", "--out", out, capsys=capsys)
    runs = summary(out)
    assert [(r["config"]["lr"], r["seed"]) for r in runs] == [(0.1, 0), (0.1, 1), (1e38, 0), (1e38, 1)]
    assert ["failed" in r for r in runs] == [False, False, True, True]
    assert "NaN" not in (out / "summary.json").read_text() and "nan" not in (out / "metrics.csv").read_text()
    assert runs[0]["privacy"][0]["epsilon"] > 0 and (out / "sweep.png").exists()
    again = tmp_path / "again"
    jfl_("sweep", "--config", out / "config.toml", "--out", again)
    assert table(again) == table(out)
    alone = tmp_path / "alone"
    jfl_("train", *TINY, "--noise-multiplier", 1, "--lr", 0.1, "--seed", 1, "--out", alone)
    assert abs(summary(alone)[0]["loss"] - runs[1]["loss"]) < 1e-4


@pytest.mark.parametrize("strict, values, code", [([], "1e38", 3), (["--strict"], "0.1,1e38", 3), ([], "0.1,1e38", 0)])
def test_exit_code_of_a_sweep_that_fails(strict, values, code, tmp_path):
    jfl_("sweep", *TINY, "--sweep", f"lr={values}", *strict, "--out", tmp_path / "s", code=code)
    assert summary(tmp_path / "s")[-1]["failed"]["nonfinite"] > 0


def test_health_stops_a_run_and_keeps_the_last_good_checkpoint(tmp_path, capsys):
    out = tmp_path / "run"
    jfl_("train", *TINY, "--evaluate-every", 1, "--out", out)
    said = jfl_("train", *TINY, "--lr", 1e38, "--out", tmp_path / "bad", code=3, capsys=capsys)
    assert "nonfinite" in said.err and "Last good checkpoint: none" in said.err
    said = jfl_("train", "--sampler", "poisson", "--rate", 0.02, "--clients", 8, "--model", "logistic", "--rounds", 40,
                "--steps", 1, "--batch", 8, "--evaluate-every", 1, "--out", tmp_path / "empty", code=3, capsys=capsys)
    assert "empty_cohort" in said.err and not (tmp_path / "empty" / "summary.json").exists()


BAD = [
    (["--clip-norm", "0", "--noise-multiplier", "1"], "clip_l2: need bound > 0"),
    (["--clip-norm", "nan", "--noise-multiplier", "1"], "clip_l2: need bound > 0"),
    (["--noise-multiplier", "-1"], "gaussian: need noise_multiplier > 0"),
    (["--noise-multiplier", "nan"], "gaussian: need noise_multiplier > 0"),
    (["--cohort", "9"], "cohort <= clients=8"),
    (["--batch", "100000", "--noise-multiplier", "1"], "at least batch=100000 rows in every client"),
    (["--lr", "0"], "lr > 0"),
    (["--rounds", "0"], "rounds >= 1"),
    (["--algorithm", "fedavgg"], "algorithm to be one of"),
    (["--dataset", "cifar11"], "dataset to be one of"),
    (["--partition", "random"], "partition to be one of"),
    (["--min-rows", "500"], "min_rows"),
    (["--delta", "2"], "delta in (0, 1)"),
    (["--unit", "client"], "noise_multiplier or epsilon beside unit"),
    (["--noise-multiplier", "1", "--epsilon", "1"], "either noise_multiplier or epsilon"),
    (["--epsilon", "-1"], "epsilon"),
    (["--view", "server", "--unit", "client", "--noise-multiplier", "1"], "server sees every upload"),
    (["--batch-sampler", "with_replacement", "--noise-multiplier", "1"], "with_replacement"),
    (["--rate", "0.5"], "cohort"),
    (["--seed", "-1"], "seed"),
    (["--holdout", "1.5"], "holdout in [0, 1)"),
    (["--dataset", "svhn"], "prepared by tensorflow_datasets"),
    (["--no-such-flag", "1"], "no-such-flag"),
    (["--lr", "fast"], "fast"),
]


@pytest.mark.parametrize("flags, text", BAD, ids=[" ".join(b[0]) for b in BAD])
def test_bad_input_is_refused_and_nothing_is_written(flags, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JFL_DATA_DIR", str(tmp_path / "no-data"))
    said = jfl_("train", *TINY, *flags, "--out", tmp_path / "run", code=2, capsys=capsys)
    assert text in said.err and "Traceback" not in said.err, said.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text, said", [
    ("rouns = 3", "Did you mean rounds"), ("rounds = 'three'", "rounds of type"), ("rounds = 3.5", "rounds of type"),
    ("rounds = [", "readable TOML"), ("[sweep]\nlr = 0.1", "a list with at least one value for sweep.lr"),
    ("[sweep]\nlrr = [0.1]", "lrr"), ("sweep = 3", "a table [sweep]"), ("lr = true", "lr of type")])
def test_bad_files_are_refused(text, said, tmp_path, capsys):
    file = tmp_path / "c.toml"
    file.write_text(text)
    command = "sweep" if "sweep" in text else "train"
    assert said in jfl_(command, "--config", file, "--out", tmp_path / "run", code=2, capsys=capsys).err
    assert not (tmp_path / "run").exists()


def test_a_run_directory_is_never_overwritten(tmp_path, capsys):
    (tmp_path / "note.txt").write_text("mine")
    assert "--resume" in jfl_("train", *TINY, "--out", tmp_path, code=2, capsys=capsys).err
    assert "file" in jfl_("train", *TINY, "--out", tmp_path / "note.txt", code=2, capsys=capsys).err
    assert [p.name for p in tmp_path.iterdir()] == ["note.txt"]


def test_config_survives_a_file(tmp_path):
    config = Config(algorithm="scaffold", hidden=(3, 4), epsilon=2.5, lr=1e-7, unit="example", cohort=7)
    file = tmp_path / "c.toml"
    import dataclasses
    file.write_text(configs.dump(dataclasses.asdict(config)))
    assert Config(**configs.load(file)) == config


def numbers(text):
    return [float(t) for t in text.replace("│", " ").split() if t.replace(".", "").replace("e-", "").replace("e+", "").isdigit()]


def test_epsilon_and_calibrate_are_inverse(capsys):
    said = jfl_("epsilon", "--noise-multiplier", 2, "--rounds", 100, "--batch", 16, "--rows", 600, capsys=capsys).out
    assert "add_remove" in said and "server" in said
    eps = numbers(said)[1]
    from jfl.privacy import accounting, events
    want = accounting.epsilon(events.repeat(events.poisson(16 / 600, events.gaussian(2)), 100), 1e-5)[0]
    assert math.isclose(eps, want, rel_tol=1e-3)
    said = jfl_("calibrate", "--epsilon", eps, "--rounds", 100, "--batch", 16, "--rows", 600, capsys=capsys).out
    assert math.isclose(numbers(said)[0], 2, rel_tol=1e-3)


@pytest.mark.parametrize("flags, view, adjacency", [
    (["--sampler", "without_replacement", "--batch", "16", "--rows", "600"], "server", "replace_one"),
    (["--sampler", "full"], "server", "replace_one"),
    (["--batch", "16", "--rows", "600", "--cohort", "10", "--clients", "100"], "third_party", "add_remove"),
    (["--unit", "client", "--cohort", "10", "--clients", "100"], "third_party", "add_remove")])
def test_epsilon_names_view_and_adjacency(flags, view, adjacency, capsys):
    said = jfl_("epsilon", *flags, capsys=capsys).out
    assert view in said and adjacency in said


@pytest.mark.parametrize("flags", [["--noise-multiplier", "0"], ["--rate", "2"], [], ["--batch", "10"],
                                   ["--batch", "700", "--rows", "600", "--sampler", "without_replacement"],
                                   ["--rate", "0.1", "--delta", "0"], ["--rate", "0.1", "--rounds", "0"],
                                   ["--rate", "0.1", "--cohort", "5"]])
def test_bad_numbers_are_refused_by_epsilon(flags, capsys):
    said = jfl_("epsilon", *flags, code=2, capsys=capsys)
    assert "need" in said.err and "Traceback" not in said.err


def test_epsilon_of_a_config_reads_the_plan(tmp_path, capsys):
    jfl_("train", "--noise-multiplier", 1.5, *TINY, "--out", tmp_path / "run")
    want = {g["view"]: g["epsilon"] for g in summary(tmp_path / "run")[0]["privacy"]}
    said = jfl_("epsilon", "--config", tmp_path / "run" / "config.toml", capsys=capsys).out
    assert all(f"{v:.4g}" in said for v in want.values())
    said = jfl_("calibrate", "--config", tmp_path / "run" / "config.toml", "--epsilon", want["server"], code=0,
                capsys=capsys).out
    assert math.isclose(float(said.split("=")[1]), 1.5, rel_tol=1e-3)


def test_list_names_everything(capsys):
    said = jfl_("list", capsys=capsys).out
    for name in (*jfl.algorithms.__all__, *jfl.models.__all__, *jfl.sampling.__all__, *assemble.OPTIMIZERS, "mnist", "dirichlet"):
        assert name in said


def test_no_command_wrong_command_help(capsys):
    assert "usage" in jfl_("--help", capsys=capsys).out
    assert main([]) == 2 and main(["trian"]) == 2


def test_demo_at_a_small_size(tmp_path, capsys):
    said = jfl_("demo", "--rounds", 4, "--seeds", 2, "--out", tmp_path / "demo", capsys=capsys).out
    runs = summary(tmp_path / "demo")
    assert len(runs) == 10 and {r["seed"] for r in runs} == {0, 1}
    named = {(g["unit"], g["view"]) for r in runs for g in r["privacy"] if g["epsilon"]}
    assert {("example", "server"), ("client", "third_party")} <= named
    assert "±" in said and (tmp_path / "demo" / "demo.png").stat().st_size > 20_000
    assert len(table(tmp_path / "demo")) == sum(1 for r in runs) * 4


@pytest.mark.slow
def test_demo_as_promised(tmp_path, capsys):
    jfl_("demo", "--out", tmp_path / "demo", capsys=capsys)
    runs = summary(tmp_path / "demo")
    final = lambda name: np.mean([r["accuracy"]["final"] for r in runs if r["name"].startswith(name)])
    assert final("FedAvg") >= 0.93
    assert final("client-level DP-FedAvg, z = 1") > 0.8 and final("record-level DP-FedAvg, z = 1") > 0.7


def test_the_installed_command_runs():
    out = subprocess.run([sys.executable, "-m", "jfl.cli", "--version"], capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == jfl.__version__ and out.returncode == 0
