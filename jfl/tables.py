"""Metrics as rows: tidy ones for a data frame, in a file, or for TensorBoard.

A row is one evaluation of one run, with the columns of metrics.csv.  Nothing here is called from inside a program:
a run gives back arrays, and these are read off afterwards.
"""
import csv
import io
import json
import math
from pathlib import Path

import jax
import numpy as np
from scipy.special import stdtrit

from . import check, report
from .checkpoint import write as write_text
from .core import Plan
from .privacy import accounting

FORMATS = (".csv", ".jsonl")
KEYS = ("name", "seed")


def tidy(result, plan: Plan | None = None, *, delta: float | None = None) -> list[dict]:
    """Metrics of `jfl.simulate` or `jfl.sweep` as rows, one a point, seed and round; pandas.DataFrame(rows) is a frame.

    Takes    result: an Output or a Sweep.  plan: what made an Output, for its name and epsilon; a Sweep knows its own.
             delta: with it `epsilon` is filled in, after so many rounds, for the unit and view that `report.best`
             shows; what is not proved is None.
    Returns  dicts with the columns of report.COLUMNS, None where nothing is defined; of a Sweep, a point's numbers and
             names follow as columns of their own.  `seed` is the number of jax.random.key(seed), or a key's words.
    Privacy  all but `round` and `epsilon` lie outside every guarantee.
    Errors   ValueError for what is neither, for several runs in one Output, and for a delta without a plan.

    Points of a sweep that failed (`sweep.failed`) are among the rows: leave them out of a mean.

    >>> from types import SimpleNamespace as Record
    >>> import jax, jfl
    >>> seen = jfl.core.Metrics(np.array([1, 2]), np.array([.9, .7]), None, None, *np.ones((4, 2)))
    >>> rows = tidy(Record(metrics=seen, run=Record(key=jax.random.key(3))))
    >>> [(r["seed"], r["round"], r["loss"], r["accuracy"]) for r in rows]
    [(3, 1, 0.9, None), (3, 2, 0.7, None)]
    """
    if not hasattr(result, "metrics") or not (hasattr(result, "points") or hasattr(result, "run")):
        check.fail("tables.tidy", "what jfl.simulate or jfl.sweep gives back", type(result).__name__)
    if not hasattr(result, "points"):
        if np.ndim(result.metrics.round) != 1:
            check.fail("tables.tidy", "one run: metrics with leaves [evaluations]",
                       f"leaves {list(np.shape(result.metrics.round))}", "Take one run of them, or use jfl.sweep.")
        if delta is not None and plan is None:
            check.fail("tables.tidy", "the plan of the run for its epsilon", "plan=None")
        history = report.lists(result.metrics)
        return report.rows("run" if plan is None else plan.algorithm.name, _seed(result.run.key), history,
                           _epsilons(plan, history, delta))
    out, proved = [], {}
    for i, (point, made) in enumerate(zip(result.points, result.plans)):
        history = report.lists(result.metrics, i)
        values = {k: _value(v) for k, v in point.items() if k != "seed"}
        if id(made) not in proved:                        # seeds share a plan
            proved[id(made)] = _epsilons(made, history, delta)
        name = " ".join([made.algorithm.name, *(f"{k}={v}" for k, v in values.items())])
        more = {k if k not in report.COLUMNS else f"point_{k}": v for k, v in values.items()}
        out += [r | more for r in report.rows(name, _seed(point["seed"]), history, proved[id(made)])]
    return out


def _epsilons(plan, history, delta):
    if delta is None:
        return None
    best = report.best(report.privacy(plan, history["round"][-1], delta))
    if best["epsilon"] is None:
        return None
    return accounting.epsilons(plan, np.asarray(history["round"]), delta, best["unit"], best["view"])


def _seed(seed):
    """A seed as a number, where jax.random.key of a number made it; else the words of the key."""
    if not isinstance(seed, jax.Array):
        return int(seed)
    words = np.asarray(jax.random.key_data(seed) if jax.numpy.issubdtype(seed.dtype, jax.dtypes.prng_key) else seed)
    if words.shape == (2,) and words[0] == 0:
        return int(words[1])
    return "-".join(f"{w:08x}" for w in np.ravel(words))


def _value(value):
    """A hyperparameter of a point as a number or as words."""
    if isinstance(value, (str, bool, int, float, type(None))):
        return value
    return np.asarray(value).item() if np.ndim(value) == 0 and hasattr(value, "dtype") else str(value)


# --- files ----------------------------------------------------------------------------------------------------------

def write(path, rows: list[dict]):
    """Rows as .csv (an empty cell for None) or .jsonl (one JSON object a line); the columns of all rows, in their order.

    Errors   ValueError for another ending, or no rows.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        check.fail("tables.write", f"a file that ends in {' or '.join(FORMATS)}", str(path))
    if not rows:
        check.fail("tables.write", "at least one row", "none")
    columns = list(dict.fromkeys(k for r in rows for k in r))
    if path.suffix == ".jsonl":
        lines = [json.dumps(report.plain({k: r.get(k) for k in columns}), allow_nan=False) for r in rows]
        write_text(path, "\n".join(lines) + "\n")
        return
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def read(path) -> list[dict]:
    """The rows of a metrics.csv: numbers, None for empty cells.

    Errors   ValueError for a file that no run wrote, or wrote by half.
    """
    path, need = Path(path), "the table that a run wrote"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [c for c in (*KEYS, "round") if c not in (reader.fieldnames or ())]
            if missing:
                check.fail(str(path), f"{need}, with columns {', '.join(missing)}", f"columns {reader.fieldnames}")
            return [_row(path, i, cells) for i, cells in enumerate(reader, 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        check.fail(str(path), need, f"{type(error).__name__}: {error}")


def _row(path, line, cells):
    if None in cells or None in cells.values():
        check.fail(f"{path}, line {line}", "as many cells as columns", "another number of them", "It may be half-written.")
    out = dict(name=cells["name"])
    for key, text in cells.items():
        if key == "name":
            continue
        try:
            out[key] = None if text == "" else int(text) if key in ("seed", "round") else float(text)
            if text and not abs(out[key]) < (2 ** 62 if key in ("seed", "round") else 1e100):
                raise ValueError                          # nan too
        except ValueError:
            if key in report.COLUMNS:
                check.fail(f"{path}, line {line}", f"a number {key}", repr(text))
            out[key] = text
    if out["seed"] is None or out["round"] is None:
        check.fail(f"{path}, line {line}", "a seed and a round", "an empty cell")
    return out


def interval(values) -> tuple[float, float | None]:
    """Mean and half the width of its 95 % interval (Student's t); None with fewer than two values.

    >>> [round(v, 4) for v in interval([0.8, 0.9, 1.0])]
    [0.9, 0.2484]
    """
    values = np.asarray(values, float)
    if values.size < 2:
        return float(values.mean()), None
    return float(values.mean()), float(stdtrit(values.size - 1, 0.975) * values.std(ddof=1) / math.sqrt(values.size))


# --- TensorBoard ----------------------------------------------------------------------------------------------------

def tensorboard(logdir, rows: list[dict], hparams: dict | None = None) -> list[Path]:
    """Rows as TensorBoard event files, a folder for each name and seed, the step is the round -> those folders.

    Takes    rows of `tidy` or `read`; hparams: name -> dict of settings, shown as text beside the curves.
    Errors   ValueError without the package tensorboardX (pip install "jfl[tensorboard]"), without rows, for a folder
             with files in it: TensorBoard would show old and new points as one curve.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        check.fail("tables.tensorboard", "the package tensorboardX", "a Python without it",
                   'Install it: pip install "jfl[tensorboard]".')
    logdir = Path(logdir)
    if not rows:
        check.fail("tables.tensorboard", "at least one row", "none")
    if logdir.exists() and (not logdir.is_dir() or any(logdir.iterdir())):
        check.fail("tables.tensorboard", "an empty or new directory", f"{logdir}, which is not", "Give another.")
    runs: dict = {}
    for r in rows:
        runs.setdefault((r["name"], r["seed"]), []).append(r)
    folders = []
    for (name, seed), group in runs.items():
        stem = "".join(c if c.isalnum() or c in "=.,-+ " else "_" for c in str(name)).strip(" .") or "run"
        folder = logdir / f"{stem} seed={seed}"
        if folder in folders:                             # two names that differ in a sign that folders do without
            folder = logdir / f"{stem} ({len(folders)}) seed={seed}"
        folders.append(folder)
        with SummaryWriter(str(folder)) as writer:
            settings = {k: v for k, v in (hparams or {}).get(name, {}).items() if v is not None}
            if settings:                                  # TensorBoard shows Markdown
                writer.add_text("hparams", "".join(f"    {k} = {v}\n" for k, v in settings.items()), 0)
            for r in group:
                for key, value in r.items():
                    if key in report.SERIES + ["epsilon"] and value is not None and math.isfinite(value):
                        writer.add_scalar(key, value, r["round"])
    return folders
