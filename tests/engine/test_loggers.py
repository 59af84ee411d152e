"""Loggers: what a run measured is what they hold."""

import csv
import math
import sys
import time

import jax
import pytest
from helpers.problems import CLIENTS, make_federation

import jfl

ROUNDS = [1, 2, 3]


@pytest.fixture(scope="module")
def plan():
    fed = make_federation(classes=3, held_out=1)
    task = jfl.models.logistic(fed)
    algorithm = jfl.algorithms.fedsgd(jfl.grad(task.loss))
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))


def logged(plan, logger):
    """The losses of a run that this logger watched."""
    with logger:
        tell = jfl.callbacks.log(logger)
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
        with pytest.raises(ValueError, match=r"columns round, loss, epsilon, but got \['f1'\]"):
            logger.log(dict(loss=1.0, f1=0.5), 8)


@pytest.mark.parametrize("package", ["pyarrow", "polars"])
def test_parquet(plan, tmp_path, monkeypatch, package):
    pytest.importorskip(package, reason=f"{package} is not installed")
    if package == "polars":
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "run.parquet"
    losses = logged(plan, jfl.loggers.Parquet(path))
    if package == "polars":
        import polars

        rows = polars.read_parquet(path, use_pyarrow=False).to_dicts()
    else:
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(path).to_pylist()
    assert [(r["round"], r["loss"]) for r in rows] == [*zip(ROUNDS, losses)]
    assert [p.name for p in tmp_path.iterdir()] == ["run.parquet"]


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of wandb's own
def test_wandb_offline(plan, tmp_path):
    wandb = pytest.importorskip("wandb", reason='needs pip install -e ".[wandb]"')
    settings = wandb.Settings(silent=True)
    logger = jfl.loggers.WandB("test", "run", mode="offline", dir=tmp_path, settings=settings)
    losses = logged(plan, logger)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    for _ in range(100):  # written by a process of wandb's own
        if repr(losses[-1]).encode() in (content := path.read_bytes()):
            break
        time.sleep(0.1)
    assert b"fedsgd" in content and all(repr(loss).encode() in content for loss in losses)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of MLflow's own, and SQLAlchemy's
def test_mlflow_in_a_file(plan, tmp_path):
    pytest.importorskip("mlflow", reason='needs pip install -e ".[mlflow]"')
    pytest.importorskip("sqlalchemy", reason="needs sqlalchemy: mlflow-skinny comes without")
    from mlflow.tracking import MlflowClient

    store = f"sqlite:///{tmp_path / 'runs.db'}"
    losses = logged(plan, jfl.loggers.MLflow("test", "run", store))
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("test").experiment_id
    (run,) = client.search_runs([experiment])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [*zip(ROUNDS, losses)]
    assert run.data.params["algorithm.name"] == "fedsgd" and run.info.status == "FINISHED"
    with jfl.loggers.MLflow("test", "again", store) as logger:  # the experiment is there
        logger.log(dict(loss=math.inf, accuracy=None), 1)
    assert len(client.search_runs([experiment])) == 2


@pytest.mark.parametrize(
    "logger, package, make",
    [
        ("TensorBoard", "tensorboardX", lambda path: jfl.loggers.TensorBoard(path)),
        ("WandB", "wandb", lambda path: jfl.loggers.WandB()),
        ("MLflow", "mlflow", lambda path: jfl.loggers.MLflow()),
        ("Parquet", "pyarrow", lambda path: jfl.loggers.Parquet(path)),
    ],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, logger, package, make):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(
        ValueError, match=rf"loggers.{logger}: expected .*{package}.*pip install -e"
    ):
        make(tmp_path)
