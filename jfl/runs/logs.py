"""`jfl train --log`: the loggers of a run in a directory, by name."""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core import checks
from ..engine import loggers

LOG = "log"  # how the tables are called that stand beside metrics.csv


def _csv(out: Path) -> loggers.Logger:
    return loggers.CSV(out / f"{LOG}.csv")


def _parquet(out: Path) -> loggers.Logger:
    return loggers.Parquet(out / f"{LOG}.parquet")


def _tensorboard(out: Path) -> loggers.Logger:
    return loggers.TensorBoard(out / "tensorboard")


def _wandb(out: Path) -> loggers.Logger:
    project = os.environ.get("WANDB_PROJECT", "jfl")
    return loggers.WandB(project, out.resolve().name, dir=str(out))


def _mlflow(out: Path) -> loggers.Logger:
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "jfl")
    elsewhere = "MLFLOW_TRACKING_URI" in os.environ
    store = None if elsewhere else f"sqlite:///{out.resolve() / 'mlflow.db'}"
    return loggers.MLflow(experiment, out.resolve().name, store)


# name -> what makes it in a run directory, and the packages of which it needs one
KINDS: dict[str, tuple[Callable[[Path], loggers.Logger], tuple[str, ...]]] = dict(
    csv=(_csv, ()),
    parquet=(_parquet, ("pyarrow", "polars")),
    tensorboard=(_tensorboard, ("tensorboardX",)),
    wandb=(_wandb, ("wandb",)),
    mlflow=(_mlflow, ("mlflow",)),
)


def names(text: str) -> tuple[str, ...]:
    """The loggers that `--log NAME,NAME` names.

    Raises:
        ArgumentError: for an unknown name, and where the package is not installed: before anything
            is computed.

    Example:
        >>> names("csv")
        ('csv',)
    """
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in found:
        checks.require_one_of("--log", tuple(KINDS), name=name)
        packages = KINDS[name][1]
        if packages and not any(map(importlib.util.find_spec, packages)):
            checks.fail(
                f"--log {name}",
                f"the package {' or '.join(packages)}",
                "a Python without it",
                f'Install it: pip install -e ".[{name}]" in the folder of jfl.',
            )
    return found


@contextlib.contextmanager
def opened(
    kinds: Sequence[str], out: Path, settings: Mapping[str, Any], history: Mapping[str, list]
) -> Iterator[Callable[[Mapping[str, list]], None]]:
    """Loggers of a run, closed at the end.

    Args:
        kinds: names in `KINDS`.
        out: the run directory.
        settings: of the run.
        history: what an earlier process measured: it is logged again, so that the log of a resumed
            run is whole.

    Yields:
        A function that takes metrics as lists over evaluations.

    Privacy:
        what is logged lies outside every guarantee, but for `epsilon`.
    """
    with contextlib.ExitStack() as stack:
        to = []
        for kind in kinds:
            to.append(KINDS[kind][0](out))
            stack.callback(to[-1].close)
            to[-1].settings(settings)

        def write(seen: Mapping[str, list]) -> None:
            for i, round in enumerate(seen["round"]):
                now = {n: v[i] for n, v in seen.items() if n != "round" and _number(v[i])}
                for logger in to:
                    logger.log(now, round)

        if history:
            write(history)
        yield write


def _number(value: object) -> bool:
    return value is None or isinstance(value, int | float)
