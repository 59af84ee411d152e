"""Loggers: what a run measured is what they hold."""

import contextlib
import csv
import sys
from unittest import mock

import jax
import pytest
from helpers import pages
from helpers.problems import CLIENTS, make_federation

import jfl

ROUNDS = [1, 2, 3]
GUIDE = pages.ROOT / "docs" / "guides" / "runs.md"


@pytest.fixture(scope="module")
def plan():
    fed = make_federation(classes=3, held_out=1)
    task = jfl.models.logistic(fed)
    algorithm = jfl.algorithms.fedsgd(jfl.grad(task.loss))
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))


def logged(plan, logger):
    """Return the losses of a run that this logger watched."""
    with logger as entered:
        tell = jfl.callbacks.log(entered)
        out = jfl.simulate(jax.random.key(0), plan, 3, evaluate_every=1, callbacks=[tell])
    return [float(x) for x in out.metrics.loss]


class Listed:
    """A logger of one's own."""

    def __init__(self):
        self.calls = []

    def settings(self, settings):
        self.calls.append(("settings", settings["algorithm"]["name"]))

    def log(self, numbers, round):
        self.calls.append((round, numbers["loss"]))

    def close(self):
        self.calls.append("close")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def test_whatever_has_the_methods_is_a_logger(plan):
    mine = Listed()
    losses = logged(plan, mine)
    assert mine.calls == [("settings", "fedsgd"), *zip(ROUNDS, losses, strict=True), "close"]
    assert isinstance(mine, jfl.loggers.Logger) and not isinstance(print, jfl.loggers.Logger)


def test_csv_grows_with_the_run(plan, tmp_path):
    path = tmp_path / "new" / "run.csv"
    losses = logged(plan, jfl.loggers.CSV(path))
    rows = list(csv.DictReader(path.open()))
    assert [(int(r["round"]), float(r["loss"])) for r in rows] == [*zip(ROUNDS, losses)]
    with jfl.loggers.CSV(path) as logger:  # the file is begun anew, and read before it is closed
        logger.log(dict(loss=1.0, epsilon=None), 7)
        assert path.read_text() == "round,loss,epsilon\n7,1.0,\n"
        with pytest.raises(ValueError, match="not in fieldnames: 'f1'"):
            logger.log(dict(loss=1.0, f1=0.5), 8)


def test_tensorboard(plan, tmp_path):
    pytest.importorskip("tensorboardX", reason='needs pip install -e ".[tensorboard]"')
    from tensorboardX.proto import event_pb2

    losses = logged(plan, jfl.loggers.TensorBoard(tmp_path))
    (path,) = tmp_path.iterdir()
    content, place, seen = path.read_bytes(), 0, []
    while place < len(content):
        size = int.from_bytes(content[place : place + 8], "little")
        event = event_pb2.Event.FromString(content[place + 12 : place + 12 + size])
        seen += [(event.step, v.simple_value) for v in event.summary.value if v.tag == "loss"]
        place += 16 + size
    assert seen == [*zip(ROUNDS, losses)]


@pytest.mark.parametrize(
    "logger, calls",
    [
        ("WandB", ["init", "update", *["log"] * 3, "finish"]),
        (
            "MLflow",
            ["set_experiment", "start_run", "log_dict", *["log_metrics"] * 3, "end_run"],
        ),
    ],
)
def test_recipes_of_the_guide_log_a_run(plan, monkeypatch, logger, calls):
    package, namespace = mock.MagicMock(), {}
    monkeypatch.setitem(sys.modules, logger.lower(), package)
    (recipe,) = (b.text for b in pages.blocks(GUIDE) if f"class {logger}:" in b.text)
    exec(recipe, namespace)
    losses = logged(plan, contextlib.closing(namespace[logger]("test")))
    names = [name.split(".")[-1] for name, _, _ in package.mock_calls]
    assert [name for name in names if name in calls] == calls
    rows = [c for c in package.mock_calls if c[0].split(".")[-1] in ("log", "log_metrics")]
    assert [(c.kwargs["step"], c.args[0]["loss"]) for c in rows] == [*zip(ROUNDS, losses)]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"loggers.TensorBoard: expected .*tensorboardX.*pip inst"):
        jfl.loggers.TensorBoard(tmp_path)
