"""`jfl train --log`: the loggers of a run directory, by name."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core import checks
from ..engine import loggers

LOG = "log"  # the name of the table of a logger, next to metrics.csv

MAKERS: dict[str, Callable[[Path], loggers.Logger]] = dict(
    csv=lambda out: loggers.CSV(out / f"{LOG}.csv"),
    tensorboard=lambda out: loggers.TensorBoard(out / "tensorboard"),
)


def parse_names(text: str) -> tuple[str, ...]:
    """Return the loggers that `--log NAME,NAME` names.

    Raises:
        ArgumentError: For an unknown name, or a missing package; before anything is computed.

    Example:
        >>> parse_names("csv")
        ('csv',)
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        checks.require_one_of("--log", tuple(MAKERS), name=name)
    if "tensorboard" in names and not importlib.util.find_spec("tensorboardX"):
        checks.fail(
            "--log tensorboard",
            "the package tensorboardX",
            "a Python without it",
            'Install it: pip install -e ".[tensorboard]" in the folder of jfl.',
        )
    return names


@contextlib.contextmanager
def opened(
    names: Sequence[str], out: Path, settings: Mapping[str, Any], history: Mapping[str, list]
) -> Iterator[Callable[[Mapping[str, list]], None]]:
    """Open the loggers of a run, and close them at the end.

    Args:
        names: names in `MAKERS`.
        out: the run directory.
        settings: the settings of the run.
        history: the metrics of an earlier process.  They are logged again, so that the log of a
            resumed run is complete.

    Yields:
        A function that takes metrics as lists over evaluations.

    Privacy:
        A guarantee covers the parameters and the logged `epsilon`, and no other logged number.
    """
    with contextlib.ExitStack() as stack:
        opened_loggers = []
        for name in names:
            logger = MAKERS[name](out)
            stack.callback(logger.close)
            logger.settings(settings)
            opened_loggers.append(logger)

        def write(seen: Mapping[str, list]) -> None:
            for i, round in enumerate(seen["round"]):
                numbers = {
                    name: values[i]
                    for name, values in seen.items()
                    if name != "round" and (values[i] is None or isinstance(values[i], int | float))
                }
                for logger in opened_loggers:
                    logger.log(numbers, round)

        if history:
            write(history)
        yield write
