"""Results of experiments: one schema, one reader, one writer.

A file holds one `Experiment`: a figure, a table or a study. A collection, such as that of a paper,
is an experiment that holds others by name.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from jfl.core import checks
from jfl.core.files import write as write_text
from jfl.report.read import Number, Positive, checked, load
from jfl.runs import record, tables

PAPERS = ("noble2022", "chen2024", "li2025", "ranaweera2025", "talaei2024")
FORMAT = 2
EARLIER = (
    "Pass a run, a sweep or a demo by its folder. If an earlier version wrote the results, run the "
    "experiment again in its folder; finished runs are kept."
)
# Verdicts on the claims of papers, by the rule of experiments.harness.verdicts.
VERDICTS = (
    "holds",
    "contradicted at the paper's settings",
    "not reproduced at our settings",
    "undecided",
    "no difference",
    "cannot be checked",
)
STUDIED = ("confirmed", "not confirmed", VERDICTS[-1])  # on what our studies expect
NUMBERS = "Numbers of the experiment"
# Keys under which experiments pass remarks -> how a page introduces the remark.
NOTES = dict(
    reduced="At reduced size",
    differs="Differs from the paper",
    draws="Draws of the data",
    seeds="Seeds",
    last="Accuracy",
    not_tuned="Baseline not tuned",
    at_edge="Best at an end of its grid",
    stale="At other rates than those chosen since",
    devices="Devices",
    note="Note",
    finding="Finding",
    caption="",
    verdict="Verdict",
)
# A float32 is exact at nine significant digits. Pages show at most three of a curve.
DIGITS, CURVE_DIGITS = 9, 4
MEASURED = ("accuracy", "loss", "columns", "values", "grid")  # fields whose numbers are rounded
MAX_JSON_LINE = 100
MAX_JSON_ITEM = 3000  # characters of an item of a list, which stays on one line


class Spread(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A mean over seeds whose single values are not stored.

    Args:
        mean: over seeds.
        half: half of its 95 % interval.
        std: over seeds, if there is no interval.
    """

    mean: Number | None
    half: Positive | None = None
    std: Positive | None = None


class Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One line of a figure, or one row of a table, over its seeds.

    Args:
        accuracy: final test accuracy of each seed that did not fail.
        loss: final test loss of the same seeds.
        seeds: the seeds that did not fail, or their number.
        failed: the seeds that failed, or their number.
        epsilon_claimed: by the paper's formula.
        epsilon_proved: None if nothing is proved.
        seconds_per_round: for one seed.
        paper: the value that the paper prints.
        columns: heading -> another value; a page shows the last entry of a list.
        source: the `source` of `versions` that ran the line, if it differs from the experiment's.
        draws: how many draws of the data the seeds have, in words; "" if unknown.
        device: that ran the line; "" if unknown.
        ran_at: field -> its learning rates and clip norm; empty if unknown.
        data: the SHA-256 digest of rows read from disk; "" if the config defines the rows, or if
            it is unknown.
        trace: metric -> values [seeds, evaluations] of the seeds of `accuracy`. The metric "round"
            has the rounds of the evaluations, in one row per seed or one for all.
    """

    accuracy: list[Number | None] | Spread = []
    loss: list[Number | None] | Spread = []
    seeds: list[int] | int | None = None
    failed: list[int] | Annotated[int, msgspec.Meta(ge=0)] = 0
    epsilon_claimed: Positive | None = None
    epsilon_proved: Positive | None = None
    seconds_per_round: Positive | None = None
    paper: Number | str | None = None
    columns: dict[str, Spread | list | Number | str | bool | None] = {}
    trace: dict[str, list[list[Number | None]]] = {}
    source: str = ""
    draws: str = ""
    device: str = ""
    ran_at: dict[str, Number | None] = {}
    data: str = ""

    @property
    def mean(self) -> float | None:
        return summary(self.accuracy).mean


class Point(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One point in a panel of a study, with the guarantee of its runs.

    Args:
        panel: its panel.
        line: its line.
        x: None for a level across the panel.
        mean: accuracy over seeds; in a study of claims, the proved epsilon.
        half: half of the 95 % interval of `mean`.
        values: accuracy by seed.
        failed: number of seeds that failed.
        seeds: of its runs.
        tuned_on: the seeds on which its hyperparameters were chosen.
        chosen: the point of `grid` with the best accuracy on `tuned_on`.
        grid: the hyperparameters that were tried.
        at_edge: whether `chosen` is at an end of the grid.
        target: the epsilon for which the noise was calibrated.
        noise_multiplier: of its runs.
        stated: the epsilon that the paper's formula was given.
        claimed: the epsilon that the formula returns for the noise.
        claimed_method: which formula.
        audited: a lower bound on epsilon from an attack, at `confidence`.
        ceiling: the largest lower bound that this number of trials can give.
        confidence: of `audited`.
        trials: runs with the canary, and the same number without.
        mu: estimated distance of both in standard deviations.
        canary, adversary, estimator: what was inserted, what was observed, how it was evaluated.
        epsilon, delta, unit, adjacency, view, method, status, caveats: the proved guarantee.
        config: the values of its config, except those in `Experiment.config`.
    """

    panel: str
    line: str
    x: Number | None
    mean: Number | None
    half: Positive | None = None
    values: dict[str, Number | None] = {}
    failed: Positive = 0
    seeds: list[int] = []
    tuned_on: list[int] = []
    chosen: dict[str, Any] = {}
    grid: list[dict[str, Any]] = []
    at_edge: bool = False
    target: Number | None = None
    noise_multiplier: Number | None = None
    stated: Number | None = None
    claimed: Number | None = None
    claimed_method: str | None = None
    audited: Positive | None = None
    ceiling: Positive | None = None
    confidence: Number | None = None
    trials: int | None = None
    mu: Number | None = None
    canary: str | None = None
    adversary: str | None = None
    estimator: str | None = None
    epsilon: Number | None = None
    delta: Number | None = None
    unit: str | None = None
    adjacency: str | None = None
    view: str | None = None
    method: str | None = None
    status: str | None = None
    caveats: list[str] | None = None
    config: dict[str, Any] = {}


class Table(msgspec.Struct, forbid_unknown_fields=True):
    """A table with the same number of cells in each row."""

    caption: str
    columns: list[str]
    rows: list[list]

    def __post_init__(self):
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"Expected rows of {len(self.columns)} cells, got another number")


class Verdict(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The verdict on a claim, and what it rests on.

    Args:
        claim: in words.
        verdict: one of VERDICTS, or of STUDIED.
        seen: the reason.
        whose: "paper"; "ours" for audits, sound modes, and statements that the paper does not make.
        statement: what several checks of one statement have in common; "" for the claim itself.
    """

    claim: str
    verdict: Literal[
        "holds",
        "contradicted at the paper's settings",
        "not reproduced at our settings",
        "undecided",
        "no difference",
        "cannot be checked",
        "confirmed",
        "not confirmed",
    ]
    seen: str = ""
    whose: Literal["paper", "ours"] = "paper"
    statement: str = ""


class Experiment(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One figure, table or study; or a collection of them.

    Args:
        format: of the file.
        name: of the experiment in its module.
        module: `python -m experiments.MODULE NAME` runs it again.
        quick: whether it ran in its short form.
        only: the lines that were asked for, if not all.
        title: its heading.
        seeds: of its runs.
        seconds: of all its runs.
        notes: remarks.
        failed: line -> why it is missing.
        unread: dataset -> why it was not read.
        lines: lines of a figure, or rows of a table, by name.
        points: of a study.
        config: the values that the configs of all points share.
        xlabel: name of x in the panels of a study.
        tables: other results.
        verdicts: on its claims.
        settings: single facts.
        versions: packages that ran it, and facts about the machine.
        experiments: of a collection, by name.
    """

    format: int = FORMAT
    name: str = msgspec.field(default="", name="experiment")
    module: str = ""
    quick: bool = False
    only: list[str] = []
    title: str = ""
    seeds: list[int] = []
    seconds: Positive | None = None
    notes: list[str] = []
    failed: dict[str, str] = {}
    unread: dict[str, str] = {}
    lines: dict[str, Line] = {}
    points: list[Point] = []
    config: dict[str, Any] = {}
    xlabel: str = ""
    tables: list[Table] = []
    verdicts: list[Verdict] = []
    settings: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    experiments: dict[str, "Experiment"] = {}

    def parts(self) -> "list[Experiment]":
        """Return the experiment, then those that it collects, each with its name."""
        named = (
            msgspec.structs.replace(part, name=name) for name, part in self.experiments.items()
        )
        return [self, *(each for part in named for each in part.parts())]


def statements(experiments: list[Experiment], whose: str = "paper") -> dict[str, str]:
    """Return distinct statements of some experiments -> the verdict on each.

    A statement with several checks has the first verdict of `_precedence` that one of them has.
    """
    found: dict = {}
    for experiment in experiments:
        for v in experiment.verdicts:
            if v.whose == whose:
                key = v.statement or f"{experiment.name}: {v.claim}"
                found.setdefault(key, []).append(v.verdict)
    return {key: min(given, key=_precedence) for key, given in found.items()}


def _precedence(verdict: str) -> int:
    order = (*VERDICTS[1:5], "not confirmed", VERDICTS[0], "confirmed", VERDICTS[5])
    return order.index(verdict)


# At least one of these fields is not empty in a file of results.
FINDINGS = ("lines", "points", "tables", "verdicts", "failed", "unread")


def summary(values: list | Spread) -> Spread:
    """Return the mean over seeds with half of its 95 % interval; None if there is no value."""
    if isinstance(values, Spread):
        return values
    known = [v for v in values if v is not None]
    return Spread(*tables.interval(known)) if known else Spread(None)


# --- reading


def read(path) -> Experiment:
    """Read the experiment, or the collection of experiments, in a file.

    Raises:
        ValueError: naming the file, if it holds neither.
    """
    value = load(path, (FORMAT,), EARLIER)
    experiment = checked(path, value, Experiment)
    if not any(getattr(part, field) for part in experiment.parts() for field in FINDINGS):
        checks.fail(
            str(path),
            "results of an experiment: lines, points, tables, or verdicts",
            f"keys {', '.join(value)}",
            EARLIER,
        )
    return experiment


# --- writing


def of(found: dict) -> Experiment:
    """Make an experiment of named results.

    Fields of `Experiment` are kept, and so are `columns` with `rows`, the keys of NOTES, and
    `commit`. Anything else becomes a table if it holds objects of one kind, and a setting if not.
    """
    fields = set(Experiment.__struct_encode_fields__)
    known = {k: v for k, v in found.items() if k in fields}
    notes = [*known.pop("notes", []), *(n for k, w in NOTES.items() for n in _notes(found, k, w))]
    tables_, settings = list(known.pop("tables", [])), dict(known.pop("settings", {}))
    if _alike(settings):
        tables_, settings = [*tables_, _table("settings", settings)], {}
    if found.get("columns"):
        tables_.insert(0, Table(NUMBERS, list(map(str, found["columns"])), found["rows"]))
    for key, value in found.items():
        if key in fields or key in NOTES or key in ("columns", "rows", "commit"):
            continue
        if _alike(value):
            tables_.append(_table(key, value))
        elif value not in (None, {}, []):
            settings[key] = value
    versions = known.pop("versions", {}) | (
        {"commit": found["commit"]} if found.get("commit") else {}
    )
    made = dict(known, notes=notes, tables=tables_, settings=settings, versions=versions)
    values = record.as_json(msgspec.to_builtins(made)) | dict(format=FORMAT)
    what = f"results of {found.get('experiment') or 'an experiment'}"
    return _with_shared_config(checked(what, values, Experiment))


def _with_shared_config(experiment: Experiment) -> Experiment:
    """Return an experiment with the config values that all points share in one place."""
    configs = [experiment.config | p.config for p in experiment.points]
    first = configs[0] if configs else {}
    shared = {k: v for k, v in first.items() if all(repr(c.get(k)) == repr(v) for c in configs)}
    own = [{k: v for k, v in config.items() if k not in shared} for config in configs]
    points = [msgspec.structs.replace(p, config=c) for p, c in zip(experiment.points, own)]
    return msgspec.structs.replace(experiment, points=points, config=shared)


def _notes(found, key, heading) -> list[str]:
    value = found.get(key)
    words = [f"{k}: {v}" for k, v in value.items()] if isinstance(value, dict) else [value]
    return [f"{heading}: {w}" if heading else str(w) for w in words if w]


def _alike(value) -> bool:
    """Return whether a value is a non-empty list or dict of objects."""
    inner = list(value.values()) if isinstance(value, dict) else value
    return isinstance(inner, list) and bool(inner) and all(isinstance(v, dict) for v in inner)


def _table(key, value) -> Table:
    """Return objects as rows of a table; a field named like the table keeps its column."""
    if isinstance(value, dict):
        value = [{key if key not in v else f"{key}: name": n} | v for n, v in value.items()]
    columns = list(dict.fromkeys(k for row in value for k in row))
    return Table(key, [str(c) for c in columns], [[row.get(c) for c in columns] for row in value])


def write(path, experiment: Experiment):
    """Write an experiment as JSON that people can read and compare.

    Measured numbers have nine significant digits, and values of a curve before its last have four.
    An epsilon has all of its digits, so that a claimed and a proved one compare as they did.
    """
    values = dict(format=FORMAT) | _rounded(msgspec.to_builtins(experiment))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(path), _json(values) + "\n")


def _rounded(value, digits: int | None = None) -> Any:
    """Round the numbers below the fields in MEASURED, and those of curves."""
    if isinstance(value, float):
        return value if digits is None else float(f"{value:.{digits}g}")
    if isinstance(value, list):
        return [_rounded(v, digits) for v in value]
    if not isinstance(value, dict):
        return value
    rounded: dict[str, Any] = {}
    for key, inner in value.items():
        if key == "tables":  # their cells are not only of runs
            rounded[key] = inner
        elif key == "trace":
            rounded[key] = {
                metric: [_rounded(r[:-1], CURVE_DIGITS) + _rounded(r[-1:], DIGITS) for r in rows]
                for metric, rows in inner.items()
            }
        else:
            of_key = DIGITS if key in MEASURED else None if "ε" in key else digits
            rounded[key] = _rounded(inner, of_key)
    return rounded


def _json(value, indent: str = "\n", width: int = MAX_JSON_LINE) -> str:
    """Return indented JSON; an item of a list, such as a point of a study, is one line."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ": "))
    inner = indent + " "
    if isinstance(value, dict) and len(flat) > width:
        fields = (
            f"{json.dumps(k, ensure_ascii=False)}: {_json(v, inner)}" for k, v in value.items()
        )
        return "{" + inner + f",{inner}".join(fields) + indent + "}"
    if isinstance(value, list) and len(flat) > width and any(map(_holds, value)):
        return (
            "["
            + inner
            + f",{inner}".join(_json(v, inner, MAX_JSON_ITEM) for v in value)
            + indent
            + "]"
        )
    return flat


def _holds(value) -> bool:
    return isinstance(value, (dict, list))
