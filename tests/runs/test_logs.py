"""`jfl train --log`: a log beside the run, whole also after --resume."""

import csv

import pytest

from jfl.cli import main
from jfl.runs import tables, train

TRAIN = """train --dataset digits --clients 5 --model logistic --algorithm fedsgd
    --batch-sampler full --clip-norm 1 --noise-multiplier 2 --evaluate-every 1
    --log csv""".split()


@pytest.mark.slow
def test_a_log_is_the_table_of_the_run_also_of_a_resumed_one(tmp_path, capsys):
    out = tmp_path / "run"
    assert main.main([*TRAIN, "--rounds", "2", "--out", str(out)]) == 0, capsys.readouterr().err
    assert main.main([*TRAIN, "--rounds", "3", "--out", str(out), "--resume"]) == 0
    rows = list(csv.DictReader((out / "log.csv").open()))
    table = tables.read(out / "metrics.csv")
    assert [int(r["round"]) for r in rows] == [r["round"] for r in table] == [1, 2, 3]
    for name in ("loss", "accuracy", "epsilon"):
        assert [float(r[name]) for r in rows] == [r[name] for r in table]


def test_what_cannot_log_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda package: None)
    words = [*TRAIN[:-1], "tensorboard", "--out", str(tmp_path / "run")]
    assert main.main(words) == 2 and "the package tensorboardX" in capsys.readouterr().err
    assert main.main([*TRAIN[:-1], "csv, print"]) == 2
    assert "'csv', 'tensorboard'" in capsys.readouterr().err and not list(tmp_path.iterdir())
