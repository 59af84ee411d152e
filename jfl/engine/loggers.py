"""Loggers, which record the metrics of a run while it runs.

A logger is any object with the three methods of `Logger`.  `jfl.callbacks.log` passes it the
metrics of `jfl.simulate`, and `jfl train --log` those of a run in a directory.

    with jfl.loggers.CSV("run.csv") as logger:
        jfl.simulate(key, plan, rounds, callbacks=[jfl.callbacks.log(logger)])

The guide on runs has loggers for Weights & Biases and for MLflow.

Privacy:
    Metrics are computed from test rows, and `train_loss`, `clip_fraction` and `update_norm` from
    the clients' training rows.  A guarantee covers the parameters only, so publishing a log reveals
    more than epsilon says.
"""

import csv
import json
import math
import textwrap
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
        """Receive the description of the plan, once, before the first metrics."""

    def log(self, numbers: Mapping[str, float | None], round: int) -> None:
        """Receive the metrics after `round` rounds, by name; a metric without a value is None."""

    def close(self) -> None:
        """Write metrics that are still in memory, and close files."""


class _Closing:
    """A base class of loggers that `with` closes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class CSV(_Closing):
    """A CSV file with one row per evaluation, written during the run.

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

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Ignore the settings, since a table has no place for them."""

    def log(self, numbers: Mapping[str, float | None], round: int) -> None:
        """Append a row.  The first call determines the columns."""
        row = {"round": round, **numbers}
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8", newline="")
            self._rows = csv.DictWriter(self._file, list(row), lineterminator="\n")
            self._rows.writeheader()
        self._rows.writerow(row)  # rejects a column that the first row did not have
        self._file.flush()  # so that readers see complete rows during the run

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoard(_Closing):
    """Event files for TensorBoard, with the round as the step.

    Args:
        logdir: a directory for this run.  If an earlier run used it, TensorBoard hides that run.

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

    def settings(self, settings: Mapping[str, Any]) -> None:
        """Show the settings as text."""
        text = json.dumps(settings, indent=2, default=str)
        self._writer.add_text(
            "settings", textwrap.indent(text, "    "), 0
        )  # Markdown: a block of code

    def log(self, numbers: Mapping[str, float | None], round: int) -> None:
        """Add a point to each curve."""
        for name, value in numbers.items():
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
