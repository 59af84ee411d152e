"""Loggers: where the metrics of a run go while it runs.

A logger is any object with the three methods of `Logger`.  `jfl.callbacks.log` passes it the
metrics of `jfl.simulate`, and `jfl train --log` those of a run in a directory.

    with jfl.loggers.CSV("run.csv") as logger:
        jfl.simulate(key, plan, rounds, callbacks=[jfl.callbacks.log(logger)])

The guide on runs has loggers for Weights & Biases and for MLflow.

Privacy:
    Metrics are computed from test rows; `train_loss`, `clip_fraction` and `update_norm` are
    computed from the clients' data.  A guarantee covers the parameters only, so a log of private
    data reveals more than epsilon says.
"""

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol, Self, runtime_checkable

from ..core import checks

__all__ = ["CSV", "Logger", "TensorBoard"]


@runtime_checkable
class Logger(Protocol):
    """An object that receives the metrics of one run.

    Privacy:
        A guarantee covers the parameters only, not what is logged.
    """

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Receive the description of the run, once, before the first metrics."""

    def log(self, numbers: Mapping[str, float | None], round: int) -> None:
        """Receive the metrics after `round` rounds; undefined ones are None."""

    def close(self) -> None:
        """Write what is still in memory."""


class CSV:
    """A CSV file with one row per evaluation, written while the run goes on.

    Args:
        path: the file; an existing one is replaced.

    Privacy:
        A guarantee covers the parameters only, not what is logged.

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Ignore the settings: a table has no place for them."""

    def log(self, numbers: Mapping[str, float | None], round: int) -> None:
        """Append a row; the first row determines the columns."""
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
        self._file.flush()  # so that readers see complete rows during the run

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoard:
    """Event files for TensorBoard, with the round as the step.

    Args:
        logdir: a directory for this run; TensorBoard hides what an earlier run wrote there.

    Raises:
        ArgumentError: If the package tensorboardX is missing.

    Privacy:
        A guarantee covers the parameters only, not what is logged.
    """

    def __init__(self, logdir: str | Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            checks.fail(
                "loggers.TensorBoard",
                "the package tensorboardX",
                checks.describe_error(error),
                'Install it: pip install -e ".[tensorboard]" in the folder of jfl.',
            )
        self._writer = SummaryWriter(str(logdir), purge_step=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

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


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings as one dict, without those that are None.

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
