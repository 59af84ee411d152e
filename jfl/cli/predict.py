"""`jfl predict`: predict rows of a file with the model of a run."""

import dataclasses
from pathlib import Path

import jax

from ..core import checks
from ..core.options import field
from ..runs import load
from .options import parse


@dataclasses.dataclass(frozen=True)
class Predict:
    """Predict rows of a file with the model of a run.

    example: jfl predict runs/first --data rows.npz --out predictions.csv
    """

    data: Path | None = field(None, "rows: .npy, .npz (its array x) or .csv of numbers")
    out: Path | None = field(None, "a CSV file: the label and probabilities of each row; or stdout")


def predict(arguments: list[str]) -> None:
    """Run `jfl predict RUN --data FILE`."""
    runs = [word for word in arguments[:1] if not word.startswith("-")]
    command = parse(Predict, arguments[len(runs) :], "jfl predict RUN")
    if not runs:
        checks.fail("jfl predict", "the directory of a run first", "none")
    if command.data is None:
        checks.fail("jfl predict", "--data FILE", "none")
    loaded = load.load(runs[0])
    x = loaded.plan.fed.x
    rows = load.read_rows(command.data, jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
    lines = load.predictions(loaded, rows)
    text = load.write_predictions(command.out, lines)
    print(text[:-1] if command.out is None else f"{len(lines)} predictions in {command.out}")
