"""Reading a run of `jfl train` from its directory, and predicting with it."""

import csv
import dataclasses
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core import checks
from ..core.errors import DataUnavailable
from ..core.files import as_json
from ..core.records import Health, Metrics, Plan, Run
from ..data.federation import checksum
from ..data.rows import reject_bytes
from ..engine.metrics import predict
from ..engine.round import init
from ..engine.sweep import Sweep, points_of
from ..privacy.ledger import segments
from . import config as configs
from . import sweep as sweeps
from .build import build
from .checkpoint import Checkpoints, refuse_resume
from .config import Config


class LoadedRun(NamedTuple):
    """The state of a run in its last checkpoint.

    Attributes:
        config: its config, with the calibrated noise multiplier.
        plan: the plan that ran.
        run: the state to continue from, with `jfl.simulate(..., start=run)`.
        history: its metrics, as lists over evaluations.
    """

    config: Config
    plan: Plan
    run: Run
    history: dict

    def __repr__(self) -> str:
        return f"LoadedRun, of round {self.run.round}\n{self.plan!r}"

    @property
    def params(self) -> Any:
        """The parameters of the model."""
        return self.plan.algorithm.params(self.run.server)

    def predict(self, x: Any) -> np.ndarray:
        """Return the model's outputs for rows x [n, ...], Float[n, ...].

        The rows must be preprocessed like those of the run, see `preprocess` of its config.
        """
        return predict(self.plan.task, self.params, x)


def load(directory: str | Path) -> Any:
    """Read a run of `jfl train`, or a finished sweep of `jfl sweep`.

    The data are loaded as well, because they are part of the plan.

    Args:
        directory: the directory of the run (its --out).

    Returns:
        A run has `.params`, `.predict(x)`, `.plan` and `.history`.  A sweep is what `jfl.sweep`
        returns, with `.points`, `.metrics` and `.frame(delta=...)`; its `params` are None, because
        no file has them.

    Raises:
        DataUnavailable: If the directory contains no run, or the data are missing.
        ResumeRefused: For a damaged checkpoint or one of another plan, or if the data have changed.

    Example:
        >>> jfl.load("runs/first").predict(images).argmax(-1)  # doctest: +SKIP
    """
    directory = Path(directory)
    return (load_sweep if (directory / sweeps.FILE).is_file() else load_run)(directory)


def load_run(directory: Path) -> LoadedRun:
    """Read a run of `jfl train`, see `load`."""
    where = "jfl.load"
    checkpoints = Checkpoints(directory)
    if not (directory / "config.toml").is_file() or checkpoints.latest() is None:
        checks.fail(
            where,
            "the directory of a run of jfl train, with config.toml and a checkpoint",
            f"{directory}, {'without them' if directory.is_dir() else 'which is not there'}",
            error=DataUnavailable,
        )
    values = configs.load(directory / "config.toml")
    values.pop("sweep", None)
    plan, config = build(Config(**values))
    saved = checkpoints.load()
    _refuse_other_data(directory, saved.meta["facts"]["data"], checksum(plan.fed))
    run = checkpoints.restore(init(jax.random.key(config.seed), plan), saved)
    return LoadedRun(config, plan, run, saved.meta["history"])


def load_sweep(directory: Path) -> Sweep:
    """Read a finished sweep of `jfl sweep`, see `load`."""
    values = configs.load(directory / "config.toml")
    axes, config = values.pop("sweep"), Config(**values)
    points = [dict(seed=config.seed) | point for point in points_of(axes)]
    store = sweeps.points_store(directory)
    name = lambda point: json.dumps(as_json(point), sort_keys=True)
    known = {name(line["point"]): line for line in store.records.values()}
    if missing := sum(name(point) not in known for point in points):
        checks.fail(
            "jfl.load",
            "a finished sweep",
            f"{directory}, which lacks {missing} of {len(points)} points",
            "Finish it: jfl sweep --resume.",
            error=DataUnavailable,
        )
    lines, plans = [known[name(point)] for point in points], {}
    for point, line in zip(points, lines):  # seeds share a plan
        setting = name(point | dict(seed=None))
        if setting not in plans:
            plans[setting] = build(dataclasses.replace(config, **point))[0]
            _refuse_other_data(directory, line["data"], checksum(plans[setting].fed))
    histories = [line["history"] for line in lines]
    values = {k: _stack([h.get(k) for h in histories]) for k in set().union(*histories)}
    own: Any = {k: values.pop(k, None) for k in Metrics.__dataclass_fields__ if k != "custom"}
    own["round"] = own["round"].astype(int)
    health = Health(*(np.array([line["health"][k] for line in lines]) for k in Health._fields))
    tolerated = [dataclasses.replace(config, **point).tolerate() for point in points]
    failed = [
        any(count for name, count in line["health"].items() if name not in names)
        for line, names in zip(lines, tolerated)
    ]
    of_points = [plans[name(point | dict(seed=None))] for point in points]
    shared = segments.sharing(of_points, [point["seed"] for point in points])
    return Sweep(
        points=points,
        plans=of_points,
        metrics=Metrics(**own, custom=values or None),
        health=health,
        failed=np.array(failed),
        params=None,
        groups=len(store.head["programs"]),
        seconds=np.array([line["seconds"] for line in lines]),
        caveats=(sweeps.SELECTION, *shared),
    )


def _refuse_other_data(directory: Path, there: str, here: str) -> None:
    """Refuse data other than those of a run, which would have another epsilon, and other names of
    columns and classes."""
    if there != here:
        refuse_resume(
            "jfl.load",
            f"the data of {directory}, with checksum {there}",
            here,
            f"Put back the data that {directory / 'config.toml'} names.",
        )


def _stack(lists: list) -> np.ndarray:
    """Stack the values of points, [points, evaluations, ...]; NaN where a point has none."""
    shape = np.shape(next(values for values in lists if values is not None))
    return np.array([np.full(shape, np.nan) if v is None else v for v in lists], float)


# --- `jfl predict`


def read_rows(
    path: str | Path, like: jax.ShapeDtypeStruct, names: Sequence[str] = ()
) -> np.ndarray:
    """Read rows from a file: .npy, .npz (its array x, or its only array) or .csv of numbers.

    Args:
        path: the file.  A first line of a .csv that is not numeric, or has all of `names`, is a
            header.
        like: the shape and type of one row.
        names: the names of the features.  If a .csv has a header, its columns are found by these
            names, and others are left out.

    Raises:
        ArgumentError: If the file cannot be read, lacks a column, has values that are not finite,
            or has rows of another shape; for bytes, fractions or large integers that the
            model could not get in training.
    """
    path, where = Path(path), "--data"
    try:
        if path.suffix in (".npy", ".npz"):
            x = np.load(path)
            if path.suffix == ".npz":
                if "x" not in x and len(x) > 1:
                    raise ValueError(f"no array named x among {', '.join(x)}")
                x = x["x" if "x" in x else x.files[0]]
        elif path.suffix == ".csv":
            x = _read_csv(path, names)
        else:
            raise ValueError("not a file .npy, .npz or .csv")
        x = np.asarray(x) if np.asarray(x).dtype.kind in "biuf" else np.asarray(x, float)
        if x.size == 0:
            raise ValueError("no rows")
    except (OSError, ValueError) as error:
        checks.fail(where, "rows of numbers", f"{path}: {error}".rstrip("."))
    wrong = np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(1))
    if len(wrong):
        actual = f"nan or inf in {len(wrong)} row(s) of {path}, the first is {wrong[0]}"
        checks.fail(where, "finite numbers", actual, "Drop or fill these rows.")
    if like.dtype.kind == "f":
        reject_bytes(where, f"x in {path}", x)
    elif len(wrong := x[(x != np.trunc(x)) | (x < -checks.INT32_MAX) | (x > checks.INT32_MAX)]):
        need = f"int32 integers in {path}, as in the run"
        checks.fail(where, need, f"{x.dtype}, such as {wrong[0]}")
    x = np.asarray(x, like.dtype)
    if x.ndim == 2 and x.shape[1] == int(np.prod(like.shape)):  # each line is a flattened row
        x = x.reshape(-1, *like.shape)
    if x.shape[1:] != like.shape:
        checks.fail(where, f"rows of shape {list(like.shape)}", f"{list(x.shape[1:])} in {path}")
    return x


def _read_csv(path: Path, names: Sequence[str]) -> np.ndarray:
    """Return the numbers of a .csv, Float[n, columns], as `read_rows` does.

    Args:
        path: the file.
        names: the names of the features.

    Raises:
        ValueError: If the file has no rows, or a header without each of `names` once.
    """
    with open(path, encoding="utf-8-sig") as file:
        first, second = file.readline(), file.readline()
    number = r'\s*"?([-+.\d]|(nan|inf|infinity)\b)'
    cells = next(csv.reader([first]), [])
    # The names of features may be numbers, as those of an array of pandas.
    is_named = bool(names) and set(names) <= set(cells)
    header = is_named or re.match(number, first, re.IGNORECASE) is None
    if not (second if header else first):
        raise ValueError("no rows")
    columns = cells if header else []
    if header and (lacking := [name for name in names if name not in columns]):
        raise ValueError(
            f"its header has no {', '.join(lacking)}, but {', '.join(columns)}. Rename them, or "
            "remove the header if the columns are in the order of the run"
        )
    if repeated := [name for name in names if columns.count(name) > 1]:
        raise ValueError(f"several columns named {repeated[0]!r}")
    return np.loadtxt(
        path,
        delimiter=",",
        ndmin=2,
        skiprows=int(header),
        quotechar='"',
        usecols=[columns.index(name) for name in names] if header and names else None,
    )


def predictions(loaded: LoadedRun, x: np.ndarray, words: Sequence[str] = ()) -> list[dict]:
    """Return a dict for each row of x.

    It holds the predicted class and the probabilities of all classes; for a task without classes,
    the outputs of the model.  `words` are the names of the classes, if they are not numbers.
    """
    outputs = loaded.predict(x).reshape(len(x), -1)
    if loaded.plan.task.target != "class":
        return [{f"output_{j}": v for j, v in enumerate(row)} for row in outputs.tolist()]
    shares = np.asarray(jax.nn.softmax(outputs, -1))
    classes = [*words, *range(len(words), shares.shape[1])]
    return [
        dict(label=classes[row.argmax()], **{f"p_{c}": float(p) for c, p in zip(classes, row)})
        for row in shares
    ]


def write_predictions(path: Path | None, lines: list[dict]) -> str:
    """Return predictions as the text of a CSV file, and write it to `path` unless it is None."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(lines[0]) if lines else ["label"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    if path is not None:
        Path(path).write_text(out.getvalue())
    return out.getvalue()
