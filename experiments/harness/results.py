"""What experiments leave behind: one schema, one reader, one writer.

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
    "A run, a sweep or a demo is given by its folder. Results of an earlier version: run the "
    "experiment again in its folder; the runs in it are kept, so none is computed twice."
)
# of a paper's claims, by the rule of experiments.harness.verdicts
VERDICTS = (
    "holds",
    "contradicted at the paper's settings",
    "not reproduced at our settings",
    "undecided",
    "cannot be checked",
)
STUDIED = ("confirmed", "not confirmed", VERDICTS[-1])  # of what our studies expect
RULE = (
    "A claim is judged by Student's t intervals over seeds, paired where lines ran the same ones,"
    " and over draws of the data where each seed has one. The intervals of a figure hold together"
    " at 95 %: each has the level 1 - 0.05 / m with m the claims of the figure, the paper's and "
    "ours apart (Bonferroni). Holds: every interval lies where the claim has it. One that lies "
    "wholly elsewhere, where 0.05 / m is divided by the comparisons of the claim too: "
    "contradicted at the paper's settings if the settings are the paper's, not reproduced at our "
    "settings if the paper left some open or they were reduced. Undecided: an interval contains "
    "both. Cannot be checked: something that it takes was not run, is lost in our copy of the "
    "paper, or is left open by a theorem; with the reason. What has no seeds, a formula or a "
    "proof, holds or does not. A theorem has no settings but its hypotheses: a run that meets them "
    "and lies outside of its bound contradicts it. One that holds up to a constant holds where it "
    "does at a constant of 1; where it does not, a larger one may be meant, and it cannot be "
    "checked. "
    '"No difference" and "no lower" mean within 2 points of accuracy. Several checks of one '
    "statement, such as on several splits, count as "
    "one: with the first of contradicted, not reproduced, undecided, holds and cannot be checked "
    "that one of them has."
)
NUMBERS = "Numbers of the experiment"
# what experiments say in words -> how the page introduces it
NOTES = dict(
    reduced="At reduced size",
    differs="Differs from the paper",
    draws="Draws of the data",
    not_tuned="Baseline not tuned",
    at_edge="Best at an end of its grid",
    stale="At other rates than those chosen since",
    devices="Devices",
    note="Note",
    finding="Finding",
    caption="",
    verdict="Verdict",
)
WIDTH = 100  # of a line of JSON
ITEM = 3000  # characters of an item of a list that stays on one line


class Spread(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A mean over seeds, where the values of the seeds themselves are not at hand.

    Args:
        mean: over seeds.
        half: of its 95 % interval.
        std: over seeds, where no interval is at hand.
    """

    mean: Number | None
    half: Positive | None = None
    std: Positive | None = None


class Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One line of a figure, or row of a table, over its seeds.

    Args:
        accuracy: test accuracy at the end, of each seed that did not fail.
        loss: test loss at the end, likewise.
        seeds: that did not fail, or how many.
        failed: seeds that failed, or how many.
        epsilon_claimed: what the paper's formula says.
        epsilon_proved: None where nothing is proved.
        seconds_per_round: of one seed.
        paper: the figure that the paper prints.
        columns: heading -> what else is known of the line. Of a list the page shows the end.
        source: the `source` of `versions` that ran it, where it is not that of the experiment.
        draws: how many draws of the data its seeds have, in words; "" where that is not stored.
        device: that ran it; "" where that is not stored.
        ran_at: field -> its learning rates and clip norm; empty where they are not stored.
        trace: metric -> its values [seeds, evaluations], of the seeds of `accuracy`; "round" says
            after which rounds, in one row per seed or one for all.
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

    @property
    def mean(self) -> float | None:
        return summary(self.accuracy).mean

    def seed_count(self, default: int | None = None) -> int | str | None:
        """How many seeds, in words where some failed; None if unknown."""
        if self.seeds is not None:
            count = _count(self.seeds)
        elif isinstance(self.accuracy, list):
            count = sum(v is not None for v in self.accuracy)
        else:
            count = default
        failed = _count(self.failed)
        return f"{count or 0} (+{failed} failed)" if failed else count


class Point(msgspec.Struct, forbid_unknown_fields=True):
    """One point of a study's panel, with the guarantee of its runs.

    Args:
        panel: the panel it stands in.
        line: the line it belongs to.
        x: None for a level across the panel.
        mean: accuracy over seeds, or the proved epsilon in a study of claims.
        half: of the 95 % interval of `mean`.
        values: accuracy by seed.
        failed: how many seeds failed.
        seeds: of its runs.
        tuned_on: the seeds on which its hyperparameters were chosen.
        chosen: the point of `grid` with the best accuracy on `tuned_on`.
        grid: the hyperparameters that were tried.
        at_edge: whether `chosen` is at an end of the grid.
        target: the epsilon that the noise was calibrated for.
        noise_multiplier: of its runs.
        stated: the epsilon that was asked of a paper's formula.
        claimed: the epsilon that the formula says of the noise.
        claimed_method: which formula.
        audited: the epsilon that an attack refutes, at `confidence`.
        ceiling: what so many trials could have refuted at most.
        confidence: of `audited`.
        trials: runs with the canary, and as many without.
        mu: the distance of both in standard deviations, an estimate.
        canary, adversary, estimator: what was put in, what was seen, how `audited` was had.
        epsilon, delta, unit, adjacency, view, method, status, caveats: of the proved guarantee.
        config: the values of its config.
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
    config: dict[str, Any] | None = None


class Table(msgspec.Struct, forbid_unknown_fields=True):
    """Rows of as many cells as there are columns."""

    caption: str
    columns: list[str]
    rows: list[list]

    def __post_init__(self):
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"Expected rows of {len(self.columns)} cells, got another number")


class Verdict(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A claim that was checked, and what was seen.

    Args:
        claim: in words.
        verdict: one of VERDICTS, or of STUDIED.
        seen: why.
        whose: of the paper, or of ours: audits, sound modes, and what the paper does not say.
        statement: what several checks of one statement have in common; "": the claim itself.
    """

    claim: str
    verdict: Literal[
        "holds",
        "contradicted at the paper's settings",
        "not reproduced at our settings",
        "undecided",
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
        quick: whether it was run in its short form.
        only: the lines that were asked for, if not all.
        title: its heading.
        seeds: of its runs.
        seconds: of all its runs.
        notes: what is said of it in words.
        failed: line -> why it is not there.
        unread: data set -> why it was not read.
        lines: the lines of a figure, or rows of a table, by name.
        points: of a study.
        xlabel: the name of x in the panels of a study.
        tables: whatever else it found.
        verdicts: claims that were checked.
        settings: single facts.
        versions: of the packages that ran it, and facts about the machine.
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
    xlabel: str = ""
    tables: list[Table] = []
    verdicts: list[Verdict] = []
    settings: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    experiments: dict[str, "Experiment"] = {}

    def missing(self) -> list[str]:
        """What is not there, and why."""
        return [f"Failed: {line}: {why}" for line, why in self.failed.items()] + [
            f"Not run: {data}: {why}" for data, why in self.unread.items()
        ]

    def parts(self) -> "list[Experiment]":
        """Itself, then the experiments that it collects, each with its name."""
        named = (
            msgspec.structs.replace(part, name=name) for name, part in self.experiments.items()
        )
        return [self, *(each for part in named for each in part.parts())]


def statements(experiments: list[Experiment], whose: str = "paper") -> dict[str, str]:
    """Distinct statements of some experiments -> the verdict of each, as RULE has it."""
    found: dict = {}
    for experiment in experiments:
        for v in experiment.verdicts:
            if v.whose == whose:
                key = v.statement or f"{experiment.name}: {v.claim}"
                found.setdefault(key, []).append(v.verdict)
    return {key: min(given, key=_precedence) for key, given in found.items()}


def _precedence(verdict: str) -> int:
    order = (*VERDICTS[1:4], "not confirmed", VERDICTS[0], "confirmed", VERDICTS[4])
    return order.index(verdict)


# the fields that say something came out
FINDINGS = ("lines", "points", "tables", "verdicts", "failed", "unread")


def summary(values: list | Spread) -> Spread:
    """Mean of the values of seeds with half of its 95 % interval; None where there is none."""
    if isinstance(values, Spread):
        return values
    known = [v for v in values if v is not None]
    return Spread(*tables.interval(known)) if known else Spread(None)


def _count(seeds: list | int) -> int:
    return len(seeds) if isinstance(seeds, list) else seeds


# --- reading


def read(path) -> Experiment:
    """The experiment, or the collection of experiments, in a file.

    Raises:
        ValueError: naming the file for what is neither.
    """
    value = load(path, (FORMAT,), EARLIER)
    experiment = checked(path, value, Experiment)
    if not any(getattr(part, field) for part in experiment.parts() for field in FINDINGS):
        checks.fail(
            str(path),
            "what came of an experiment: lines, points, tables, or claims that were checked",
            f"keys {', '.join(value)}",
            EARLIER,
        )
    return experiment


# --- writing


def of(found: dict) -> Experiment:
    """What an experiment found, by name -> the experiment.

    Fields of `Experiment` are taken as they are, and so are `columns` with `rows`, the words of
    NOTES, and `commit`. Anything else becomes a table where it holds objects that are alike, and
    a setting where it does not.
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
    return checked(f"results of {found.get('experiment') or 'an experiment'}", values, Experiment)


def _notes(found, key, heading) -> list[str]:
    value = found.get(key)
    words = [f"{k}: {v}" for k, v in value.items()] if isinstance(value, dict) else [value]
    return [f"{heading}: {w}" if heading else str(w) for w in words if w]


def _alike(value) -> bool:
    """A list or a dict of objects, at least one."""
    inner = list(value.values()) if isinstance(value, dict) else value
    return isinstance(inner, list) and bool(inner) and all(isinstance(v, dict) for v in inner)


def _table(key, value) -> Table:
    """Objects as rows; a field of the same name as the table keeps its column."""
    if isinstance(value, dict):
        value = [{key if key not in v else f"{key}: name": n} | v for n, v in value.items()]
    columns = list(dict.fromkeys(k for row in value for k in row))
    return Table(key, [str(c) for c in columns], [[row.get(c) for c in columns] for row in value])


def write(path, experiment: Experiment):
    """Write an experiment as JSON that people can read and compare."""
    values = dict(format=FORMAT) | msgspec.to_builtins(experiment)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(path), _json(values) + "\n")


def _json(value, indent: str = "\n", width: int = WIDTH) -> str:
    """Indented JSON; an item of a list, such as a point of a study, stays on one line."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ": "))
    inner = indent + " "
    if isinstance(value, dict) and len(flat) > width:
        fields = (
            f"{json.dumps(k, ensure_ascii=False)}: {_json(v, inner)}" for k, v in value.items()
        )
        return "{" + inner + f",{inner}".join(fields) + indent + "}"
    if isinstance(value, list) and len(flat) > width and any(map(_holds, value)):
        return "[" + inner + f",{inner}".join(_json(v, inner, ITEM) for v in value) + indent + "]"
    return flat


def _holds(value) -> bool:
    return isinstance(value, (dict, list))
