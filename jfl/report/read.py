"""What lies in the folder of a run, a sweep, the demo or an experiment, read again and checked.

A folder that is half-written, or that another version wrote, is refused: a report of part of it
would look whole.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..core import checks
from ..runs import tables
from . import results
from .plots import Setting, data_of, several

FINISH = "A run that was stopped goes on with jfl train --resume."
AUDITS = "audit.json"
METRICS = ("accuracy", "loss", "clip_fraction", "update_norm")


class Accuracy(msgspec.Struct):
    final: results.Number | None


class Promise(msgspec.Struct):
    """A guarantee or a claim of summary.json; without epsilon its status says so."""

    unit: str
    adjacency: str
    view: str
    delta: results.Number
    epsilon: results.Positive | None
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
    """One run of summary.json, of which a page needs these fields."""

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
            raise ValueError("Expected what is proved, if only that nothing is, got an empty list")


class Summary(msgspec.Struct, forbid_unknown_fields=True):
    runs: list[Run]
    format: int | None = None  # a file from before formats had a number has none

    def __post_init__(self):
        if not self.runs:
            raise ValueError("Expected at least one run, got none")


class Audit(msgspec.Struct):
    """One audit of audit.json, of which a page needs these fields; without `proved` nothing is."""

    epsilon: results.Positive
    delta: results.Number
    unit: str
    adjacency: str
    view: str
    method: str
    status: str
    confidence: results.Number
    canary: str
    trials: int
    rounds: int
    proved: Promise | None
    claimed: results.Positive | None
    refuted: bool
    contradicted: bool
    config: dict[str, Any]


class Audits(msgspec.Struct, forbid_unknown_fields=True):
    audits: list[Audit]
    format: int | None = None


class Manifest(msgspec.Struct):
    versions: dict[str, Any]
    data: dict[str, Any] = {}
    seeds: list = []


class Source(NamedTuple):
    """One folder, or one file of experiments.

    Attributes:
        kind: train, sweep, demo, line, experiment, study or collection.
        runs: of summary.json.
        rows: of metrics.csv.
        config: the text of config.toml.
        experiments: of a collection the first is the collection as a whole.
        lines: sources of the lines of an experiment.
        audits: of audit.json, the newest last.
    """

    label: str
    path: Path
    kind: str
    runs: list[dict] = []
    rows: list[dict] = []
    manifest: dict = {}
    config: str = ""
    experiments: list[results.Experiment] = []
    lines: list["Source"] = []
    audits: list[dict] = []


class Group(NamedTuple):
    """The seeds of one setting of a source; `runs` are those that did not fail."""

    source: Source
    setting: Setting
    runs: list[dict]
    failed: int
    config: dict
    guarantees: list[dict]


def read(path, label: str | None = None) -> Source:
    """Read the folder of a run or an experiment, or a file of results.

    Args:
        path: the folder or the file.
        label: its name on the page; the name of the folder or file by default.

    Raises:
        ValueError: naming the file for what no run wrote, wrote by half, or wrote in another form.
    """
    path = Path(path)
    label = label or default_label(path)
    if path.is_file():
        experiments = results.read(path).parts()
        return Source(label, path, _kind(experiments), experiments=experiments)
    if not path.is_dir():
        checks.fail(
            "jfl report",
            "folders of runs, or files of experiments' results",
            f"{path}, which is not there",
        )
    if (path / "results.json").exists():
        return _experiment(path, label)
    if (path / "summary.json").exists():
        kind = "demo" if (path / "demo.png").exists() else "train"
        return _run(path, label, kind)
    if (path / "config.toml").exists() or (path / "journal.json").exists():
        checks.fail("jfl report", "a finished run", f"{path} without summary.json", FINISH)
    # lines that are done have a cells.json; before the first of them there are the cells alone
    if any(path.glob("*/cells.json")) or [p.name for p in path.iterdir()] == [".cells"]:
        checks.fail(
            "jfl report",
            "a finished experiment",
            f"{path} without results.json: it was interrupted, or still runs",
            "Run it again: its cells are kept, so only what is missing is computed.",
        )
    checks.fail(
        "jfl report",
        "a folder with a run (summary.json) or an experiment (results.json)",
        str(path),
        "A folder of such folders is given as several: jfl report runs/* --out report.html.",
    )


def default_label(path) -> str:
    """The name of a folder, or of a file without its ending."""
    name = Path(path).resolve().name
    return name.removesuffix(".json") if Path(path).is_file() else name


def _run(path, label, kind, complete=True) -> Source:
    """The folder of a run or a sweep.

    Args:
        complete: metrics.csv and manifest.json are there too, as every command writes them.
    """
    summary = results.load(path / "summary.json")
    results.checked(path / "summary.json", summary, Summary)
    runs, manifest, rows = summary["runs"], {}, []
    if complete or (path / "manifest.json").exists():
        manifest = results.load(path / "manifest.json")
        results.checked(path / "manifest.json", manifest, Manifest)
    if complete or (path / "metrics.csv").exists():
        rows = _rows(path / "metrics.csv", runs)
    config = _text(path / "config.toml")
    if kind == "train" and "\n[sweep]" in config:
        kind = "sweep"
    return Source(label, path, kind, runs, rows, manifest, config, audits=audits(path))


def audits(folder) -> list[dict]:
    """The audits that `jfl audit` left in a folder, the newest last.

    Raises:
        ValueError: naming the file for what no audit wrote.
    """
    path = Path(folder) / AUDITS
    if not path.exists():
        return []
    found = results.load(path)
    results.checked(path, found, Audits)
    return found["audits"]


def _rows(path, runs) -> list[dict]:
    rows = tables.read(path)
    present = {(row["name"], row["seed"]) for row in rows}
    missing = [
        f"{run['name']} seed={run['seed']}"
        for run in runs
        if (run["name"], run["seed"]) not in present
    ]
    if missing:
        checks.fail(
            str(path),
            "rows of every run in summary.json",
            f"none of {', '.join(missing[:3])}",
            "It may be half-written.",
        )
    return rows


def _text(path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        checks.fail(str(path), "a TOML file", str(error))


def _experiment(path, label) -> Source:
    experiments = results.read(path / "results.json").parts()
    folders = {
        name: path / name.replace(" ", "_").replace("/", "_")
        for experiment in experiments
        for name in (*experiment.lines, *experiment.failed)
    }
    # an experiment that runs its own sweep may leave a summary alone
    lines = [
        _run(folder, name, "line", complete=False)
        for name, folder in folders.items()
        if (folder / "summary.json").exists()
    ]
    return Source(label, path, _kind(experiments), experiments=experiments, lines=lines)


def _kind(experiments) -> str:
    if len(experiments) > 1:
        return "collection"
    return "study" if experiments[0].points else "experiment"


def parts(sources: list[Source]) -> list[tuple[str, Source]]:
    """The sources that hold runs, the lines of experiments among them, each with its own name."""
    pairs = [(source, part) for source in sources for part in (source.lines or [source])]
    return [
        (
            part.label if source is part or len(sources) == 1 else f"{source.label}: {part.label}",
            part,
        )
        for source, part in pairs
    ]


def groups(sources: list[Source]) -> list[Group]:
    """The settings of all sources in their order; of several sources a label says whose."""
    out = []
    for source in sources:
        prefix = f"{source.label}: " if len(sources) > 1 else ""
        for part in source.lines or ([source] if source.runs else []):
            names = list(dict.fromkeys(run["name"] for run in part.runs))
            for name in names:
                label = name
                if part is not source:
                    label = part.label if len(names) == 1 else f"{part.label}, {name}"
                out.append(_group(part, name, prefix + label))
    return out


def _group(source: Source, name: str, label: str) -> Group:
    runs = [run for run in source.runs if run["name"] == name]
    finished = [run for run in runs if not run.get("failed")]
    # seeds with data of their own differ in what is proved: the weakest stands for all
    weakest = max(finished or runs, key=_proved_epsilon)
    seeds = {run["seed"] for run in finished}
    rounds: dict = {}  # seed -> round -> row
    for row in source.rows:
        if row["name"] == name and row["seed"] in seeds:
            rounds.setdefault(row["seed"], {})[row["round"]] = row
    final = [run["accuracy"]["final"] for run in finished if run["accuracy"]["final"] is not None]
    curves = _curves(rounds.values())
    setting = Setting(label, curves, final, weakest["privacy"], data_of(runs))
    failed = len(runs) - len(finished)
    return Group(source, setting, finished, failed, weakest["config"], weakest["privacy"])


def _proved_epsilon(run) -> float:
    epsilon = tables.proved(run["privacy"])["epsilon"]
    return float("inf") if epsilon is None else epsilon


def _curves(seeds: Iterable[dict]) -> dict:
    """metric -> rounds [evaluations] that every seed has, and values [seeds, evaluations]."""
    seeds = list(seeds)
    if not seeds:
        return {}
    rounds = sorted(set.intersection(*(set(seed) for seed in seeds)))
    out = {}
    for metric in METRICS:
        values = [[seed[r].get(metric) for r in rounds] for seed in seeds]
        if rounds and any(v is not None for row in values for v in row):
            out[metric] = rounds, several(values)
    return out
