"""What lies in the folder of a run, a sweep, the demo or an experiment, read again and checked.

A folder that is half-written, or of another version's making, is refused: a report of part of it
would look whole.
"""

from pathlib import Path
from typing import NamedTuple

from ..core import checks
from ..runs import record, tables
from . import collected
from .collected import has
from .plots import Setting, data_of, several

ENTRY = dict(
    name=str,
    algorithm=str,
    dataset=str,
    rounds=int,
    seed=int,
    accuracy=dict,
    seconds=dict,
    privacy=list,
    config=dict,
)
GUARANTEE = dict(
    unit=str,
    adjacency=str,
    view=str,
    delta=(int, float),
    epsilon=(int, float, type(None)),
    method=str,
    status=str,
    caveats=list,
    codes=list,
    implied=bool,
    rounds=(int, type(None)),
)
FINISH = "A run that was stopped goes on with jfl train --resume."
METRICS = ("accuracy", "loss", "clip_fraction", "update_norm")


class Source(NamedTuple):
    """One folder, or one file of experiments, whose lines may be sources of their own."""

    label: str
    path: Path
    kind: str  # train | sweep | demo | line | experiment | study | collection
    runs: list = []
    rows: list = []
    manifest: dict = {}
    config: str = ""  # config.toml
    experiments: list = []  # of collected.Experiment
    lines: list = []


class Group(NamedTuple):
    """The seeds of one setting of a source."""

    source: Source
    setting: Setting
    runs: list  # of summary.json, failed ones left out
    failed: int
    config: dict
    guarantees: list


def read(path, label: str | None = None) -> Source:
    """The folder of a run or an experiment, or a file of experiments' results -> Source.

    Raises:
        ValueError: naming the file for what no run wrote, wrote by half, or wrote in another form.
    """
    path = Path(path)
    label = label or called(path)
    if path.is_file():
        found = collected.read(path)
        return Source(label, path, _kind(found), experiments=found)
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


def called(path) -> str:
    """The name of a folder, or of a file without its ending."""
    name = Path(path).resolve().name
    return name.removesuffix(".json") if Path(path).is_file() else name


def _run(path, label, kind, needed=True) -> Source:
    """`needed`: metrics.csv and manifest.json too, as every command writes them."""
    runs = _summary(path / "summary.json")
    manifest, rows = {}, []
    if needed or (path / "manifest.json").exists():
        manifest = collected.load(path / "manifest.json")
        has(path / "manifest.json", "versions", manifest, dict(versions=dict))
        has(
            path / "manifest.json",
            "data and seeds",
            dict(data={}, seeds=[]) | manifest,
            dict(data=dict, seeds=list),
        )
    if needed or (path / "metrics.csv").exists():
        rows = tables.read(path / "metrics.csv")
        there = {(r["name"], r["seed"]) for r in rows}
        lost = [
            f"{e['name']} seed={e['seed']}" for e in runs if (e["name"], e["seed"]) not in there
        ]
        if lost:
            checks.fail(
                str(path / "metrics.csv"),
                "rows of every run in summary.json",
                f"none of {', '.join(lost[:3])}",
                "It may be half-written.",
            )
    config = path / "config.toml"
    try:
        config = config.read_text(encoding="utf-8") if config.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        checks.fail(str(config), "a TOML file", str(error))
    if kind == "train" and "\n[sweep]" in config:
        kind = "sweep"
    return Source(label, path, kind, runs, rows, manifest, config)


def _summary(path) -> list:
    found = collected.load(path)
    other = set(found) - {"format"} != {
        "runs"
    }  # a file from before formats had a number has runs alone
    if other or not isinstance(found["runs"], list) or not found["runs"]:
        checks.fail(
            str(path),
            "runs as this version of jfl writes them: an object with a list of runs alone",
            f"keys {', '.join(found) or 'none'}" if other else "no list of runs",
            "Use the jfl that wrote it.",
        )
    for i, entry in enumerate(found["runs"]):
        has(path, f"run {i}", entry, ENTRY)
        has(path, f"run {i}, accuracy", entry["accuracy"], dict(final=(int, float, type(None))))
        if not entry["privacy"]:
            checks.fail(
                f"{path}, run {i}", "what is proved, if only that nothing is", "an empty list"
            )
        entry["privacy"] = [
            record.as_today(g) if isinstance(g, dict) else g for g in entry["privacy"]
        ]
        for g in entry["privacy"]:
            has(path, f"run {i}, privacy", g, GUARANTEE)
            if (
                g["status"] not in ("no guarantee", "claimed")
                if g["epsilon"] is None
                else g["epsilon"] < 0
            ):
                checks.fail(
                    f"{path}, run {i}, privacy",
                    'epsilon >= 0, or null with status "no guarantee"',
                    f"epsilon={g['epsilon']!r}, status={g['status']!r}",
                )
            if not all(isinstance(c, str) for c in g["caveats"]):
                checks.fail(
                    f"{path}, run {i}, privacy", "caveats in words", repr(g["caveats"])[:60]
                )
    return found["runs"]


def _experiment(path, label) -> Source:
    found = collected.read(path / "results.json")
    folders = {
        line.name: path / line.name.replace(" ", "_").replace("/", "_")
        for e in found
        for line in e.lines
    }
    # a sweep of an experiment's own may leave a summary alone
    lines = [
        _run(folder, name, "line", needed=False)
        for name, folder in folders.items()
        if (folder / "summary.json").exists()
    ]
    return Source(label, path, _kind(found), experiments=found, lines=lines)


def _kind(experiments) -> str:
    return (
        "collection" if len(experiments) > 1 else "study" if experiments[0].points else "experiment"
    )


def parts(found: list[Source]) -> list[tuple]:
    """The sources that hold runs, each with a name of its own; the lines of an experiment are
    such."""
    parts = [(s, p) for s in found for p in (s.lines or [s])]
    return [
        (p.label if s is p or len(found) == 1 else f"{s.label}: {p.label}", p) for s, p in parts
    ]


def groups(sources: list[Source]) -> list[Group]:
    """The settings of all sources, in their order; where there are several sources a label says
    whose."""
    out = []
    for source in sources:
        inner = source.lines or ([source] if source.runs else [])
        prefix = f"{source.label}: " if len(sources) > 1 else ""
        for part in inner:
            names = list(dict.fromkeys(e["name"] for e in part.runs))
            for name in names:
                shown = (
                    name
                    if part is source
                    else part.label
                    if len(names) == 1
                    else f"{part.label}, {name}"
                )
                out.append(_group(part, name, prefix + shown))
    return out


def _group(source, name, label):
    entries = [e for e in source.runs if e["name"] == name]
    good = [e for e in entries if not e.get("failed")]
    # where seeds differ in what is proved, as those with data of their own do, the weakest stands
    # for all
    worst = max(good or entries, key=lambda e: _or_inf(tables.proved(e["privacy"])["epsilon"]))
    seeds = {e["seed"] for e in good}
    rows: dict = {}
    for r in source.rows:
        if r["name"] == name and r["seed"] in seeds:
            rows.setdefault(r["seed"], {})[r["round"]] = r
    final = [e["accuracy"]["final"] for e in good if e["accuracy"]["final"] is not None]
    setting = Setting(
        label, _curves(list(rows.values())), final, worst["privacy"], data_of(entries)
    )
    return Group(source, setting, good, len(entries) - len(good), worst["config"], worst["privacy"])


def _or_inf(value):
    return float("inf") if value is None else value


def _curves(seeds: list[dict]) -> dict:
    """metric -> rounds [E] that every seed has, and values [seeds, E]."""
    if not seeds:
        return {}
    rounds = sorted(set.intersection(*(set(s) for s in seeds)))
    out = {}
    for metric in METRICS:
        values = [[s[r].get(metric) for r in rounds] for s in seeds]
        if rounds and any(v is not None for line in values for v in line):
            out[metric] = rounds, several(values)
    return out
