"""Where the metrics of a run go while it runs: files, TensorBoard, Weights & Biases, MLflow.

A logger is anything with the three methods of `Logger`; `jfl.callbacks.log` hands it what
`jfl.simulate` measures, and `jfl train --log` what it trains.

    with jfl.loggers.CSV("run.csv") as logger:
        jfl.simulate(key, plan, rounds, callbacks=[jfl.callbacks.log(logger)])

Privacy:
    metrics are read from test rows and, for `train_loss`, `clip_fraction` and `update_norm`, from
    what clients hold: they lie outside every guarantee, which covers the parameters alone.  Whoever
    reads a log of private data has seen more than epsilon says.
"""

import csv
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol, Self, runtime_checkable

from ..core import checks

__all__ = ["CSV", "Logger", "MLflow", "Parquet", "TensorBoard", "WandB"]

PARAMETERS = 100  # that MLflow takes at once
LETTERS = 500  # of a parameter's value there
UNNAMED = re.compile(r"[^\w\-. :/]")  # what its names do without


@runtime_checkable
class Logger(Protocol):
    """What takes the metrics of one run.

    Privacy:
        what is logged lies outside every guarantee: only the parameters are covered.
    """

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Take what describes the run, once, before the first numbers."""

    def log(self, numbers: Mapping[str, float | None], round: int) -> None:
        """Take numbers by name after so many rounds; None where nothing is defined."""

    def close(self) -> None:
        """Write what is still to be written."""


class _Closing:
    """`with logger:` closes it, also after an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is left to write."""


class CSV(_Closing):
    """A CSV file that grows while the run goes on, a row an evaluation.

    Args:
        path: the file; one that is there is replaced.

    Privacy:
        outside every guarantee, as all metrics.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.csv"
        >>> with CSV(path) as logger:
        ...     logger.log(dict(loss=0.5, accuracy=None), round=10)
        >>> path.read_text().splitlines()
        ['round,loss,accuracy', '10,0.5,']
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[str] | None = None
        self._columns: list[str] = []

    def settings(self, settings: Mapping[str, Any]) -> None:
        """A table has no place for settings."""

    def log(self, numbers: Mapping[str, float | None], round: int) -> None:
        """Append a row; its columns are those of the first one."""
        row = {"round": round, **numbers}
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8", newline="")
            self._columns = list(row)
            self._write(self._columns)
        elif unknown := [name for name in row if name not in self._columns]:
            checks.fail("loggers.CSV", f"columns {', '.join(self._columns)}", f"{unknown} too")
        self._write([row.get(name) for name in self._columns])

    def _write(self, cells: list[Any]) -> None:
        assert self._file is not None
        csv.writer(self._file, lineterminator="\n").writerow(cells)
        self._file.flush()  # whoever follows the run sees whole rows

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Parquet(_Closing):
    """A Parquet file, written when the logger is closed.

    Args:
        path: the file; one that is there is replaced.

    Raises:
        ArgumentError: without one of the packages pyarrow and polars.

    Privacy:
        outside every guarantee, as all metrics.
    """

    def __init__(self, path: str | Path) -> None:
        parquet_writer("loggers.Parquet")
        self.path = Path(path)
        self._rows: list[dict[str, Any]] = []

    def settings(self, settings: Mapping[str, Any]) -> None:
        """A table has no place for settings."""

    def log(self, numbers: Mapping[str, float | None], round: int) -> None:
        """Keep a row."""
        self._rows.append({"round": round, **numbers})

    def close(self) -> None:
        """Write the rows."""
        if self._rows:
            write_parquet(self.path, self._rows)
            self._rows = []


class TensorBoard(_Closing):
    """Event files for TensorBoard; the step is the round.

    Args:
        logdir: a folder for this run; what TensorBoard knew of an earlier one there is hidden.

    Raises:
        ArgumentError: without the package tensorboardX.

    Privacy:
        outside every guarantee, as all metrics.
    """

    def __init__(self, logdir: str | Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            _missing("TensorBoard", "tensorboardX", "tensorboard", error)
        self._writer = SummaryWriter(str(logdir), purge_step=0)

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Show the settings as text."""
        lines = [f"    {name} = {value}\n" for name, value in flat(settings).items()]
        self._writer.add_text("settings", "".join(lines), 0)  # shown as Markdown

    def log(self, numbers: Mapping[str, float | None], round: int) -> None:
        """Add a point to each curve."""
        for name, value in numbers.items():
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandB(_Closing):
    """A run of Weights & Biases.

    Args:
        project: its project there.
        name: of the run; None: one that wandb makes.
        **options: of `wandb.init`, such as mode="offline", group, tags, dir.

    Raises:
        ArgumentError: without the package wandb.

    Privacy:
        outside every guarantee, as all metrics; unless offline they go to a server of others.
    """

    def __init__(self, project: str = "jfl", name: str | None = None, **options: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            _missing("WandB", "wandb", "wandb", error)
        self._run = wandb.init(project=project, name=name, **options)

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Set the config of the run."""
        self._run.config.update(dict(settings), allow_val_change=True)

    def log(self, numbers: Mapping[str, float | None], round: int) -> None:
        """Log the numbers at this step."""
        self._run.log({n: v for n, v in numbers.items() if v is not None}, step=round)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow(_Closing):
    """A run of MLflow.

    Args:
        experiment: the experiment that gets the run; made where it is not there.
        name: of the run; None: one that MLflow makes.
        tracking_uri: of the store, such as "sqlite:///mlflow.db"; None: what MLflow is set to.

    Raises:
        ArgumentError: without the package mlflow.

    Privacy:
        outside every guarantee, as all metrics.
    """

    def __init__(
        self, experiment: str = "jfl", name: str | None = None, tracking_uri: str | None = None
    ) -> None:
        try:
            from mlflow import tracking
        except ImportError as error:
            _missing("MLflow", "mlflow", "mlflow", error)
        self._client = tracking.MlflowClient(tracking_uri)
        known = self._client.get_experiment_by_name(experiment)
        place = self._client.create_experiment(experiment) if known is None else known.experiment_id
        self._id = self._client.create_run(place, run_name=name).info.run_id

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Set the parameters of the run: one for each setting, nested ones as `outer.inner`."""
        from mlflow import entities

        found = [entities.Param(_name(n), str(v)[:LETTERS]) for n, v in flat(settings).items()]
        for i in range(0, len(found), PARAMETERS):
            self._client.log_batch(self._id, params=found[i : i + PARAMETERS])

    def log(self, numbers: Mapping[str, float | None], round: int) -> None:
        """Log the numbers at this step."""
        for name, value in numbers.items():
            if value is not None:
                self._client.log_metric(self._id, _name(name), value, step=round)

    def close(self) -> None:
        """Say that the run is done."""
        self._client.set_terminated(self._id)


# --- what they share


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings as one dict, without those that are None.

    >>> flat(dict(rounds=3, model=dict(name="mlp", hidden=[8, 4], seed=None)))
    {'rounds': 3, 'model.name': 'mlp', 'model.hidden.0': 8, 'model.hidden.1': 4}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, list | tuple):
            value = {str(i): inner for i, inner in enumerate(value)}
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": v for inner, v in flat(value).items()}
        elif value is not None:
            found[str(name)] = value
    return found


def _name(name: str) -> str:
    """A name as MLflow takes it."""
    return UNNAMED.sub("_", name)


def _missing(logger: str, package: str, extra: str, error: ImportError) -> NoReturn:
    checks.fail(
        f"loggers.{logger}",
        f"the package {package}",
        checks.describe_error(error),
        f'Install it: pip install -e ".[{extra}]" in the folder of jfl.',
    )


def parquet_writer(where: str) -> Callable[[Any, list[dict[str, Any]]], None]:
    """A function (path, rows) that writes a Parquet file.

    Raises:
        ArgumentError: without pyarrow and without polars.
    """
    try:
        import pyarrow
        import pyarrow.parquet

        return lambda path, rows: pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), str(path)
        )
    except ImportError:
        pass
    try:
        import polars

        return lambda path, rows: polars.DataFrame(rows, infer_schema_length=None).write_parquet(
            path
        )
    except ImportError as error:
        checks.fail(
            where,
            "one of the packages pyarrow and polars",
            checks.describe_error(error),
            'Install one: pip install -e ".[parquet]" in the folder of jfl.',
        )


def write_parquet(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """Rows as a Parquet file that is whole or as it was before.

    Raises:
        ArgumentError: without pyarrow and without polars.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = dict.fromkeys(name for row in rows for name in row)
    half = path.with_name(f".{path.name}.half")
    try:
        parquet_writer("parquet")(half, [{n: row.get(n) for n in columns} for row in rows])
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
