"""Reading and checking the directory of a run, a sweep or the demo.

A directory that is incomplete, or was written by another version of jfl, is rejected, because a
report on a part of it would look complete.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from ..core import checks
from ..runs import record, sweep, tables
from ..runs.build import DATA
from .plots import Setting

AUDITS = "audit.json"
METRICS = ("accuracy", "loss", "clip_fraction", "update_norm")
OTHER_VERSION = "Use the jfl that wrote it."

Number = int | float
Positive = Annotated[int, msgspec.Meta(ge=0)] | Annotated[float, msgspec.Meta(ge=0)]


class Accuracy(msgspec.Struct):
    """The field `accuracy` of a run in summary.json."""

    final: Number | None


class Promise(msgspec.Struct):
    """A guarantee or a claim in summary.json; if epsilon is None, the status tells why."""

    unit: str
    adjacency: str
    view: str
    delta: Number
    epsilon: Positive | None
    method: str
    status: str
    caveats: list[str]
    codes: list[str] = []
    implied: bool = False
    rounds: int | None = None

    def __post_init__(self):
        if self.epsilon is None and self.status not in ("no guarantee", "claimed"):
            need = 'an epsilon, or null with status "no guarantee"'
            raise ValueError(f"Expected {need}, got null with status {self.status!r}")


class Run(msgspec.Struct):
    """The fields of a run in summary.json that a page uses."""

    name: str
    algorithm: str
    dataset: str
    rounds: int
    seed: int
    accuracy: Accuracy
    seconds: dict[str, Any]
    privacy: list[Promise]
    config: dict[str, Any]

    def __post_init__(self):
        if not self.privacy:
            raise ValueError("Expected at least one guarantee or refusal, got an empty list")


class Summary(msgspec.Struct, forbid_unknown_fields=True):
    """The content of summary.json."""

    runs: list[Run]
    format: int

    def __post_init__(self):
        if not self.runs:
            raise ValueError("Expected at least one run, got none")


class Audit(msgspec.Struct):
    """The fields of an audit in audit.json that a page uses.

    `proved` is None if nothing is proved.
    """

    epsilon: Positive
    delta: Number
    unit: str
    adjacency: str
    view: str
    method: str
    status: str
    confidence: Number
    canary: str
    trials: int
    rounds: int
    proved: Promise | None
    claimed: Positive | None
    refuted: bool
    contradicted: bool
    config: dict[str, Any]


class Audits(msgspec.Struct, forbid_unknown_fields=True):
    """The content of audit.json."""

    audits: list[Audit]
    format: int


class Manifest(msgspec.Struct):
    """The fields of manifest.json that a page uses."""

    versions: dict[str, Any]
    data: dict[str, Any] = {}
    seeds: list = []


class Source(NamedTuple):
    """The content of one directory.

    Attributes:
        label: the name of the directory on the page.
        kind: "train", "sweep" or "demo".
        runs: the runs in summary.json.
        rows: the rows of metrics.csv.
        config: the text of config.toml.
        audits: the audits in audit.json, the newest last.
    """

    label: str
    path: Path
    kind: str
    runs: list[dict] = []
    rows: list[dict] = []
    manifest: dict = {}
    config: str = ""
    audits: list[dict] = []


def read(path, label: str | None = None) -> Source:
    """Read the folder of a run.

    Args:
        path: the folder.
        label: its name on the page; None means the name of the folder.

    Raises:
        ValueError: If a file is missing, incomplete or not written by a run; the message names it.
    """
    path = Path(path)
    label = label or default_label(path)
    if (path / "summary.json").exists():
        return _read_run(path, label)
    is_sweep = (path / sweep.FILE).exists()
    if is_sweep or (path / "config.toml").exists() or (path / "journal.json").exists():
        hint = f"jfl {'sweep' if is_sweep else 'train'} --resume continues one that was stopped."
        checks.fail("jfl report", "a finished run", f"{path} without summary.json", hint)
    checks.fail(
        "jfl report",
        "a folder with a run (summary.json)",
        str(path) if path.exists() else f"{path}, which does not exist",
        "Pass each directory separately: jfl report runs/* --out report.html.",
    )


def default_label(path) -> str:
    """Return the name of a folder, or of a file without its ending."""
    name = Path(path).resolve().name
    return name.removesuffix(".json") if Path(path).is_file() else name


def _read_run(path: Path, label: str) -> Source:
    summary = load(path / "summary.json")
    checked(path / "summary.json", summary, Summary)
    manifest = load(path / "manifest.json", (None,))
    checked(path / "manifest.json", manifest, Manifest)
    runs = summary["runs"]
    rows = _rows(path / "metrics.csv", runs)
    config = _text(path / "config.toml")
    kind = "sweep" if "\n[sweep]" in config else "train"
    if (path / "demo.png").exists():
        kind = "demo"
    return Source(label, path, kind, runs, rows, manifest, config, audits=audits(path))


def audits(folder) -> list[dict]:
    """Return the audits that `jfl audit` stored in a folder, the newest last; [] if none.

    Each has the fields of `Audit`.

    Raises:
        ValueError: If there is an audit.json that `jfl audit` did not write; the message names the
            file.
    """
    path = Path(folder) / AUDITS
    if not path.exists():
        return []
    found = load(path)
    checked(path, found, Audits)
    return found["audits"]


def _rows(path, runs) -> list[dict]:
    """Return the rows of metrics.csv, and reject rows of other runs than those in summary.json."""
    rows = tables.read(path)
    present = {(row["name"], row["seed"]) for row in rows}
    missing = [
        f"{n} seed={s}" for n, s in ((r["name"], r["seed"]) for r in runs) if (n, s) not in present
    ]
    if missing:
        got = f"none of {', '.join(missing[:3])}"
        checks.fail(str(path), "rows of every run in summary.json", got, "It may be half-written.")
    return rows


def _text(path) -> str:
    """Return the text of a file; "" if there is none."""
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        checks.fail(str(path), "a TOML file", str(error))


def settings(sources: list[Source]) -> list[Setting]:
    """Return the settings of all sources in order.

    If there are several sources, the label of each setting begins with that of its source.
    """
    prefix = lambda source: f"{source.label}: " if len(sources) > 1 else ""
    return [
        _setting(source, name, prefix(source) + name)
        for source in sources
        for name in dict.fromkeys(run["name"] for run in source.runs)
    ]


def _setting(source: Source, name: str, label: str) -> Setting:
    runs = [run for run in source.runs if run["name"] == name]
    finished = [run for run in runs if not run.get("failed")]
    # Seeds with different data have different guarantees: show the weakest.
    weakest = max(finished or runs, key=_proved_epsilon)
    seeds = {run["seed"] for run in finished}
    rounds: dict = {}  # seed -> round -> row
    for row in source.rows:
        if row["name"] == name and row["seed"] in seeds:
            rounds.setdefault(row["seed"], {})[row["round"]] = row
    final = [run["accuracy"]["final"] for run in finished]
    return Setting(
        label,
        _curves(rounds.values()),
        [accuracy for accuracy in final if accuracy is not None],
        weakest["privacy"],
        data_of(runs),
        len(finished),
        len(runs) - len(finished),
        weakest["config"],
        source.audits,
    )


def data_of(runs: list[dict]) -> frozenset:
    """Return a value that is equal for runs with the same data.

    Args:
        runs: the runs of a setting, from summary.json.
    """
    return frozenset(
        json.dumps([run["dataset"], *(run["config"].get(k) for k in DATA)]) for run in runs
    )


def _proved_epsilon(run) -> float:
    epsilon = tables.proved(run["privacy"], run["config"].get("view"))["epsilon"]
    return float("inf") if epsilon is None else epsilon


def _curves(seeds: Iterable[dict]) -> dict:
    """Return for each metric the rounds [evaluations] that all seeds have, and the values
    [seeds, evaluations]; a missing value is NaN."""
    seeds = list(seeds)
    rounds = sorted(set.intersection(*map(set, seeds))) if seeds else []
    found = {}
    for metric in METRICS:
        values = np.array([[seed[r].get(metric) for r in rounds] for seed in seeds], float)
        if not np.isnan(values).all():
            found[metric] = rounds, values
    return found


# --- JSON


def load(path, formats: tuple = (record.FORMAT,), remedy: str = OTHER_VERSION) -> dict:
    """Read the JSON object in a file.

    Args:
        path: the file.
        formats: the valid values of the field `format`.  If None is among them, the field may be
            missing.
        remedy: what to do about a file of another format.

    Raises:
        ValueError: If the file is not a JSON object, or has another format.
    """
    try:
        value = json.loads(
            Path(path).read_text(encoding="utf-8"),
            parse_constant=_number,
            parse_float=_number,
            parse_int=_number,
        )
    except (OSError, ValueError, RecursionError) as error:
        checks.fail(
            str(path),
            "the JSON that a run wrote",
            f"{type(error).__name__}: {error}",
            "It may be half-written.",
        )
    if not isinstance(value, dict):
        checks.fail(str(path), "a JSON object", type(value).__name__)
    given = value.get("format")
    if isinstance(given, bool) or given not in formats:
        checks.fail(
            str(path),
            f"format {formats[-1]}, which is what this version of jfl reads",
            f"keys {', '.join(value) or 'none'}" if given is None else f"format {given!r}",
            remedy,
        )
    return value


def _number(text) -> float | int:
    """Parse a number, and reject one that is too large for tables and pictures."""
    value, whole = float(text), text.lstrip("-").isdigit()
    if not abs(value) <= (2**62 if whole else 1e100):  # nor nan
        raise ValueError(f"{text[:40]} is not a number that a run writes")
    return int(text) if whole else value


def checked(path, value, schema):
    """Check the content of a file, and return it as an object of a schema.

    Args:
        path: the file, for messages.
        value: its content.
        schema: a class of this module.

    Raises:
        ValueError: If the content does not match; the message names the file, the place in it, and
            the expected type.
    """
    try:
        return msgspec.convert(value, schema)
    except (msgspec.ValidationError, RecursionError) as error:
        words, _, place = str(error).partition(" - at `$")
        expected = re.fullmatch(r"Expected (.*?)(?:, got (.*))?", words)
        need, got = expected.groups("another value") if expected else ("what a run writes", words)
        place = place.strip(".`")
        checks.fail(
            f"{path}, {place}" if place else str(path),
            f"{need}, as this version of jfl writes it",
            got,
            OTHER_VERSION,
        )
