"""Metrics as rows: tidy ones for a data frame, in a file, or for TensorBoard.

A row is one evaluation of one run, with the columns of metrics.csv.  Nothing here is called from
inside a program: a run gives back arrays, and these are read off afterwards.
"""

import csv
import hashlib
import importlib.util
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..core import checks
from ..core.files import write as write_text
from ..core.records import Plan
from . import guarantee_rows, record
from .statistics import interval as interval

FORMATS = (".csv", ".jsonl", ".parquet")
KEYS = ("name", "seed")
# the columns that say what an epsilon promises
PROMISE = ("unit", "adjacency", "view", "delta", "status")
MAX_VALUE_CHARACTERS = 100  # longer values are replaced by a digest
MAX_STEM_BYTES = 150  # of the name of a directory, which may have 255 bytes in all


def tidy(result, plan: Plan | None = None, *, delta: float | None = None) -> list[dict]:
    """Return the metrics of `jfl.simulate` or `jfl.sweep` as rows, one per point, seed and round.

    Args:
        result: an Output or a Sweep.
        plan: the plan of an Output, for its name and epsilon; a Sweep knows its plans.
        delta: if given, the column `epsilon` holds the epsilon after the rounds of a row, for the
            guarantee that `proved` returns.  The columns unit, adjacency, view, delta and status
            describe it; only epsilons with equal values there are comparable.  An epsilon that is
            not proved is None, with status "conditional" or "no guarantee".

    Returns:
        dicts with the columns of record.COLUMNS, None if undefined.  For a Sweep also `failed`
        (leave those rows out of a mean) and a column per parameter of the points, named point_NAME
        if there is another column NAME.  `seed` is the number of jax.random.key(seed), or the words
        of a key.

    Privacy:
        A guarantee covers none of the columns except `round`, `epsilon` and its description.

    Raises:
        ValueError: for what is neither, for several runs in one Output, and for a delta without a
            plan.

    Example:
        >>> from types import SimpleNamespace as Record
        >>> import jax, jfl
        >>> seen = jfl.Metrics(np.array([1, 2]), np.array([0.9, 0.7]), None, None, *np.ones((4, 2)))
        >>> rows = tidy(Record(metrics=seen, run=Record(key=jax.random.key(3))))
        >>> [(r["seed"], r["round"], r["loss"], r["accuracy"]) for r in rows]
        [(3, 1, 0.9, None), (3, 2, 0.7, None)]
    """
    if not hasattr(result, "metrics") or not (hasattr(result, "points") or hasattr(result, "run")):
        checks.fail(
            "tables.tidy", "what jfl.simulate or jfl.sweep gives back", type(result).__name__
        )
    if not hasattr(result, "points"):
        if np.ndim(result.metrics.round) != 1:
            checks.fail(
                "tables.tidy",
                "one run: metrics with leaves [evaluations]",
                f"leaves {list(np.shape(result.metrics.round))}",
                "Take one run of them, or use jfl.sweep.",
            )
        if delta is not None and plan is None:
            checks.fail("tables.tidy", "the plan of the run for its epsilon", "plan=None")
        history = record.lists(result.metrics)
        epsilon, promise = _epsilons(plan, history, delta)
        name = "run" if plan is None else plan.algorithm.name
        return [r | promise for r in record.rows(name, _seed(result.run.key), history, epsilon)]
    out, known, taken = [], {}, {*record.COLUMNS, "failed", *(PROMISE if delta is not None else ())}
    for i, (point, point_plan) in enumerate(zip(result.points, result.plans)):
        history = record.lists(result.metrics, i)
        values = {k: _value(v) for k, v in point.items() if k != "seed"}
        if id(point_plan) not in known:  # seeds share a plan
            known[id(point_plan)] = _epsilons(point_plan, history, delta)
        epsilon, promise = known[id(point_plan)]
        name = " ".join([point_plan.algorithm.name, *(f"{k}={v}" for k, v in values.items())])
        more = promise | dict(failed=bool(result.failed[i]))
        for k, v in values.items():
            while k in taken or k in more:
                k = f"point_{k}"
            more[k] = v
        out += [r | more for r in record.rows(name, _seed(point["seed"]), history, epsilon)]
    return out


def frame(
    result: Any, plan: Plan | None = None, *, delta: float | None = None, kind: str = "pandas"
) -> Any:
    """`tidy` as a data frame; also the method `frame` of what jfl.simulate and jfl.sweep give back.

    Args:
        result: an Output or a Sweep.
        plan: as in `tidy`.
        delta: as in `tidy`.
        kind: "pandas", "polars", or "xarray": a Dataset over the axes of a sweep, `seed` and
            `round`, where each combination was run.

    Raises:
        ArgumentError: without that package.

    Example:
        >>> import jax, jfl
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(10))
        >>> task = jfl.models.logistic(fed)
        >>> algorithm = jfl.algorithms.fedsgd(jfl.grad(task.loss))
        >>> plan = jfl.plan(fed, task, algorithm, jfl.sampling.full(10))
        >>> out = jfl.simulate(jax.random.key(0), plan, 2)
        >>> list(out.frame(plan)["round"])  # doctest: +SKIP
        [1, 2]
    """
    checks.require_one_of("frame", ("pandas", "polars", "xarray"), kind=kind)
    rows = tidy(result, plan, delta=delta)
    try:
        if kind == "polars":
            import polars

            return polars.DataFrame(rows, infer_schema_length=None)
        import pandas

        table: Any = pandas.DataFrame(rows)
        if kind == "pandas":
            return table
        import xarray  # noqa: F401, of which pandas makes the Dataset
    except ImportError as error:
        checks.fail(
            "frame", f"the package {kind}", checks.describe_error(error), f"pip install {kind}"
        )
    axes = [c for c in rows[0] if c not in (*record.COLUMNS, "failed", *PROMISE)]
    index = [c for c in axes if table[c].nunique(dropna=False) > 1] + ["seed", "round"]
    if table.duplicated(index).any():
        checks.fail("frame", "one row for each point, seed and round", f"several of {index}")
    return table.drop(columns="name").set_index(index).to_xarray()


def _epsilons(plan, history, delta):
    """Epsilons after so many rounds, None where none is proved, and the columns that say what they
    promise."""
    if delta is None:
        return None, {}
    best = proved(guarantee_rows.all_rows(plan, history["round"][-1], delta))
    promise = {k: best[k] for k in PROMISE}
    if best["epsilon"] is None:
        return None, promise | dict(unit=None, adjacency=None, view=None)
    rounds = np.asarray(history["round"])
    return guarantee_rows.epsilons(
        plan, rounds, delta, best["unit"], best["view"], best["adjacency"], last=best["epsilon"]
    ), promise


def proved(guarantees: list[dict]) -> dict:
    """The guarantee to show if there is room for one: the best that is proved, or one without
    epsilon that says why.

    >>> common = dict(unit="client", view="server", epsilon=2.0, implied=False, caveats=[])
    >>> one = common | dict(status="conditional")
    >>> shown = proved([one, one | dict(status="claimed")])
    >>> shown["epsilon"], shown["status"]
    (None, 'conditional')
    """
    ours = [g for g in guarantees if g["status"] != "claimed"]
    if good := [g for g in ours if g["status"] == "proved"]:
        return guarantee_rows.best(good)
    if ours:
        return dict(guarantee_rows.best(ours), epsilon=None)
    return dict(guarantees[0], epsilon=None, method="none", status="no guarantee", caveats=[])


def _seed(seed):
    """A seed as a number, where jax.random.key of a number made it; else the words of the key."""
    if not isinstance(seed, jax.Array):
        return int(seed)
    words = np.asarray(
        jax.random.key_data(seed) if jax.numpy.issubdtype(seed.dtype, jax.dtypes.prng_key) else seed
    )
    if words.shape == (2,) and words[0] == 0:
        return int(words[1])
    return "-".join(f"{w:08x}" for w in np.ravel(words))


def _value(value):
    """A hyperparameter of a point as a number or as words."""
    if isinstance(value, (str, bool, int, float, type(None))):
        return value
    if hasattr(value, "dtype") and np.ndim(value) == 0:
        return np.asarray(value).item()
    with np.printoptions(
        threshold=sys.maxsize, linewidth=sys.maxsize, floatmode="unique"
    ):  # every number of an array
        words = str(value)
    if len(words) <= MAX_VALUE_CHARACTERS:
        return words
    kind = f"{value.dtype}{[*value.shape]}" if hasattr(value, "dtype") else type(value).__name__
    return f"{kind} {_digest(words)}"


def _digest(words) -> str:
    return hashlib.sha256(words.encode(errors="backslashreplace")).hexdigest()[:8]


# --- files


def write_parquet(path: Path, rows: list[dict]) -> None:
    """Write rows as a Parquet file, which replaces an earlier one atomically.

    Raises:
        ArgumentError: If neither pyarrow nor polars is installed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = dict.fromkeys(name for row in rows for name in row)
    rows = [{name: row.get(name) for name in columns} for row in rows]
    partial = path.with_name(f".{path.name}.partial")
    try:
        if importlib.util.find_spec("pyarrow"):
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), str(partial))
        elif importlib.util.find_spec("polars"):
            import polars

            polars.DataFrame(rows, infer_schema_length=None).write_parquet(partial)
        else:
            checks.fail(
                "tables.write",
                "one of the packages pyarrow and polars",
                "a Python without them",
                'Install one: pip install -e ".[parquet]" in the folder of jfl.',
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write(path, rows: list[dict]):
    """Rows as .csv (an empty cell for None), .jsonl (one JSON object a line) or .parquet; the
    columns of all rows, in their order.

    Raises:
        ValueError: for another ending, or no rows; for .parquet without pyarrow and without polars.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        checks.fail("tables.write", f"a file that ends in {' or '.join(FORMATS)}", str(path))
    if not rows:
        checks.fail("tables.write", "at least one row", "none")
    if path.suffix == ".parquet":
        write_parquet(path, [record.plain(r) for r in rows])
        return
    columns = list(dict.fromkeys(k for r in rows for k in r))
    if path.suffix == ".jsonl":
        lines = [
            json.dumps(record.plain({k: r.get(k) for k in columns}), allow_nan=False) for r in rows
        ]
        write_text(path, "\n".join(lines) + "\n")
        return
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def read(path) -> list[dict]:
    """Return the rows of a metrics.csv, with numbers, and None for empty cells.

    Raises:
        ValueError: If the file is not the complete table of a run.
    """
    path, need = Path(path), "the table that a run wrote"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [c for c in (*KEYS, "round") if c not in (reader.fieldnames or ())]
            if missing:
                checks.fail(
                    str(path),
                    f"{need}, with columns {', '.join(missing)}",
                    f"columns {reader.fieldnames}",
                )
            return [_row(path, i, cells) for i, cells in enumerate(reader, 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        checks.fail(str(path), need, f"{type(error).__name__}: {error}")


def _row(path, line, cells):
    if None in cells or None in cells.values():
        checks.fail(
            f"{path}, line {line}",
            "as many cells as columns",
            "another number of them",
            "It may be half-written.",
        )
    out = dict(name=cells["name"])
    for key, text in cells.items():
        if key == "name":
            continue
        try:
            out[key] = (
                None if text == "" else int(text) if key in ("seed", "round") else float(text)
            )
            if text and not abs(out[key]) < (2**62 if key in ("seed", "round") else 1e100):
                raise ValueError  # nan too
        except ValueError:
            if key in record.COLUMNS:
                checks.fail(f"{path}, line {line}", f"a number {key}", repr(text))
            out[key] = {"True": True, "False": False}.get(text, text) if key == "failed" else text
    if out["seed"] is None or out["round"] is None:
        checks.fail(f"{path}, line {line}", "a seed and a round", "an empty cell")
    return out


# --- TensorBoard


def tensorboard(logdir, rows: list[dict], hparams: dict | None = None) -> list[Path]:
    """Write rows as TensorBoard event files, in a directory per name and seed; the step is the
    round.

    Args:
        logdir: the directory for those directories.
        rows: rows of `tidy` or `read`; the names of directories say which runs failed.
        hparams: (name, seed) -> dict of settings, shown as text next to the curves.

    Returns:
        The directories.

    Raises:
        ValueError: If the package tensorboardX is missing (pip install -e ".[tensorboard]"), if
            there are no rows, or if `logdir` has files in it: TensorBoard would show old and new
            points as one curve.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        checks.fail(
            "tables.tensorboard",
            "the package tensorboardX",
            "a Python without it",
            'Install it: pip install -e ".[tensorboard]" in the folder of jfl.',
        )
    logdir = Path(logdir)
    if not rows:
        checks.fail("tables.tensorboard", "at least one row", "none")
    if logdir.exists() and (not logdir.is_dir() or any(logdir.iterdir())):
        checks.fail(
            "tables.tensorboard",
            "an empty or new directory",
            f"{logdir}, which is not",
            "Give another.",
        )
    runs: dict = {}
    for r in rows:
        runs.setdefault((r["name"], r["seed"]), []).append(r)
    folders = []
    for (name, seed), group in runs.items():
        stem = (
            "".join(c if c.isalnum() or c in "=.,-+ " else "_" for c in str(name)).strip(" .")
            or "run"
        )
        if len(whole := stem.encode()) > MAX_STEM_BYTES:
            stem = f"{whole[:MAX_STEM_BYTES].decode(errors='ignore')} {_digest(str(name))}"
        end = f" seed={seed}" + " failed" * bool(group[0].get("failed"))
        folder = logdir / (stem + end)
        if folder in folders:  # two names that differ in a sign that folders do without
            folder = logdir / f"{stem} ({len(folders)}){end}"
        folders.append(folder)
        with SummaryWriter(str(folder)) as writer:
            settings = {
                k: v for k, v in (hparams or {}).get((name, seed), {}).items() if v is not None
            }
            if settings:  # TensorBoard shows Markdown
                writer.add_text(
                    "hparams", "".join(f"    {k} = {v}\n" for k, v in settings.items()), 0
                )
            for r in group:
                for key, value in r.items():
                    if (
                        key in record.SERIES + ["epsilon"]
                        and value is not None
                        and math.isfinite(value)
                    ):
                        writer.add_scalar(key, value, r["round"])
    return folders
