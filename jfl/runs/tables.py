"""Metrics as rows: made from results, as data frames, and read from files.

A row is one evaluation of one run, with the columns of metrics.csv.
"""

import csv
import hashlib
import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..core import checks, identity
from ..core.records import Plan
from . import guarantee_rows, record
from .statistics import interval as interval

MAX_VALUE_CHARACTERS = 100  # longer values are replaced by a digest


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
        (leave rows with failed=True out of a mean) and a column for each parameter of the points,
        named point_NAME if there is another column NAME.  `seed` is the seed if the key was
        jax.random.key(seed), and otherwise the words of the key.

    Privacy:
        A guarantee covers none of the columns except `round`, `epsilon` and its description.

    Raises:
        ValueError: For several runs in one Output, or a delta without the plan of all rounds.

    Example:
        >>> from types import SimpleNamespace as Record
        >>> import jax, jfl
        >>> seen = jfl.Metrics(np.array([1, 2]), np.array([0.9, 0.7]), None, None, *np.ones((4, 2)))
        >>> rows = tidy(Record(metrics=seen, run=Record(key=jax.random.key(3))))
        >>> [(r["seed"], r["round"], r["loss"], r["accuracy"]) for r in rows]
        [(3, 1, 0.9, None), (3, 2, 0.7, None)]
    """
    where = "tables.tidy"
    points: list[Any]
    if hasattr(result, "points"):
        points = [
            (i, point, result.plans[i], bool(result.failed[i]))
            for i, point in enumerate(result.points)
        ]
    elif np.ndim(result.metrics.round) != 1:
        shape = f"leaves {list(np.shape(result.metrics.round))}"
        checks.fail(where, "one run: metrics with leaves [evaluations]", shape, "Take one of them.")
    elif delta is not None and plan is None:
        checks.fail(where, "the plan of the run for its epsilon", "plan=None")
    else:
        if delta is not None:
            _require_plan_of(result.run, plan)
        points = [(None, dict(seed=result.run.key), plan, None)]
    rows, known, accounted = [], {}, {}
    for i, point, of_point, failed in points:
        history = record.lists(result.metrics, i)
        if id(of_point) not in known:  # seeds share a plan, and learning rates a ledger
            ledger = None if delta is None else guarantee_rows.ledger(of_point, history["round"])
            if ledger not in accounted:
                accounted[ledger] = _epsilons(of_point, history, delta)
            known[id(of_point)] = accounted[ledger]
        epsilon, promise = known[id(of_point)]
        values = {k: _value(v) for k, v in point.items() if k != "seed"}
        more = promise
        if failed is not None:
            more = promise | record.point_columns(values, failed, promise)
        words = ["run" if of_point is None else of_point.algorithm.name]
        name = " ".join(words + [f"{k}={v}" for k, v in values.items()])
        rows += [r | more for r in record.rows(name, _seed(point["seed"]), history, epsilon)]
    return rows


def frame(
    result: Any, plan: Plan | None = None, *, delta: float | None = None, kind: str = "pandas"
) -> Any:
    """Return the rows of `tidy` as a data frame; the method `frame` of Output and Sweep.

    Args:
        result: an Output or a Sweep.
        plan: as in `tidy`.
        delta: as in `tidy`.
        kind: "pandas", "polars", or "xarray": a Dataset over the axes of a sweep, `seed` and
            `round`, with nan where a combination was not run.

    Raises:
        ArgumentError: If the package is missing.

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
    try:  # before the epsilons, which take long
        library = importlib.import_module("polars" if kind == "polars" else "pandas")
        if kind == "xarray":
            importlib.import_module(kind)  # pandas makes the Dataset of it
    except ImportError as error:
        checks.fail(
            "frame", f"the package {kind}", checks.describe_error(error), f"pip install {kind}"
        )
    rows = tidy(result, plan, delta=delta)
    if kind == "polars":
        return library.DataFrame(rows, infer_schema_length=None)
    table: Any = library.DataFrame(rows)
    if kind == "pandas":
        return table
    axes = [c for c in rows[0] if c not in (*record.COLUMNS, "failed", *record.PROMISE)]
    index = [c for c in axes if table[c].nunique(dropna=False) > 1] + ["seed", "round"]
    if table.duplicated(index).any():
        checks.fail("frame", "one row for each point, seed and round", f"several of {index}")
    return table.drop(columns="name").set_index(index).to_xarray()


def _require_plan_of(run, plan):
    """Reject a plan that did not run all rounds of a run, whose epsilon would be another one.

    Plans with paired noise have equal identities, so they are not told apart.
    """
    pairs = (
        (run.plan_identity, identity.noise_identity(plan)),
        (run.plan_history, identity.initial_history(plan)),
    )
    if not all(np.array_equal(np.asarray(ran), np.asarray(own)) for ran, own in pairs):
        checks.fail(
            "tables.tidy",
            "the plan that ran all rounds, for its epsilon",
            "another plan, or a run that continued under another one",
            "For a run of several plans, use jfl.guarantee([(first, rounds), (second, rounds)]).",
        )


def _epsilons(plan, history, delta):
    """Return the epsilons of a run, None if nothing is proved, and the columns that describe
    them."""
    if delta is None:
        return None, {}
    best = proved(guarantee_rows.all_rows(plan, history["round"][-1], delta))
    promise = {k: best[k] for k in record.PROMISE}
    if best["epsilon"] is None:
        return None, promise | dict(unit=None, adjacency=None, view=None)
    rounds = np.asarray(history["round"])
    return guarantee_rows.epsilons(
        plan, rounds, delta, best["unit"], best["view"], best["adjacency"], last=best["epsilon"]
    ), promise


def proved(guarantees: list[dict], view: str | None = None) -> dict:
    """Return the guarantee to show if there is room for only one.

    This is the best proved guarantee, for `view` if there is one, by default for the server.  If
    nothing is proved, the result has epsilon None, and its status tells why.

    Example:
        >>> common = dict(unit="client", view="server", epsilon=2.0, implied=False, caveats=[])
        >>> one = common | dict(status="conditional")
        >>> shown = proved([one, one | dict(status="claimed")])
        >>> shown["epsilon"], shown["status"]
        (None, 'conditional')
    """
    ours = [g for g in guarantees if g["status"] != "claimed"]
    if good := [g for g in ours if g["status"] == "proved"]:
        return guarantee_rows.best(good, view)
    if ours:
        return dict(guarantee_rows.best(ours, view), epsilon=None)
    return dict(guarantees[0], epsilon=None, method="none", status="no guarantee", caveats=[])


def _seed(seed):
    """Return the number of a seed or of jax.random.key(number); else the words of the key."""
    if not isinstance(seed, jax.Array):
        return int(seed)
    words = np.asarray(
        jax.random.key_data(seed) if jax.numpy.issubdtype(seed.dtype, jax.dtypes.prng_key) else seed
    )
    if words.shape == (2,) and words[0] == 0:
        return int(words[1])
    return "-".join(f"{w:08x}" for w in np.ravel(words))


def _value(value):
    """Return a hyperparameter of a point as a number or as text."""
    if isinstance(value, (str, bool, int, float, type(None))):
        return value
    if hasattr(value, "dtype") and np.ndim(value) == 0:
        return np.asarray(value).item()
    # The text has every number, so that values that differ have other names.
    with np.printoptions(threshold=sys.maxsize, linewidth=sys.maxsize, floatmode="unique"):
        text = str(value)
    if len(text) <= MAX_VALUE_CHARACTERS:
        return text
    kind = f"{value.dtype}{[*value.shape]}" if hasattr(value, "dtype") else type(value).__name__
    return f"{kind} {hashlib.sha256(text.encode()).hexdigest()[:8]}"


# --- files


def read(path) -> list[dict]:
    """Return the rows of a metrics.csv, with numbers, and None for empty cells.

    Raises:
        ValueError: If the file is not the complete table of a run.
    """
    path, need = Path(path), "the table that a run wrote"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            if missing := {"name", "seed", "round"} - set(reader.fieldnames or ()):
                expected = f"{need}, with columns {', '.join(sorted(missing))}"
                checks.fail(str(path), expected, f"columns {reader.fieldnames}")
            return [_row(f"{path}, line {i}", cells) for i, cells in enumerate(reader, 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        checks.fail(str(path), need, f"{type(error).__name__}: {error}")


def _row(where: str, cells: dict) -> dict:
    if None in cells or None in cells.values():
        checks.fail(
            where, "as many cells as columns", "another number of them", "It may be half-written."
        )
    row = dict(cells)
    for key, text in cells.items():
        if key not in record.COLUMNS or key == "name":  # text, or what a sweep varies
            continue
        number, largest = (int, 2**62) if key in ("seed", "round") else (float, 1e100)
        try:
            row[key] = None if text == "" and number is float else number(text)
            in_range = row[key] is None or abs(row[key]) < largest  # nan is not
        except ValueError:
            in_range = False
        if not in_range:
            checks.fail(where, f"a number {key}", repr(text))
    return row
