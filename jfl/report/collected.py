"""Experiments in one form, whatever wrote them: the results.json of one, or a file that collects
those of a paper.

A collection holds experiments by name, and may have a study beside them (ranaweera2025), or the
cells of one study (talaei2024).  Each form has one reader here; nothing else knows of them.
"""

import json
from pathlib import Path
from typing import NamedTuple

from ..core import checks
from ..runs import record, tables

NUMBER = (int, float, type(None))
POINT = (
    dict(epsilon=NUMBER, claimed=NUMBER, stated=NUMBER, failed=NUMBER)
    | dict.fromkeys(("values", "chosen", "config"), (dict, type(None)))
    | dict(caveats=(list, type(None)))
)  # where there are such
LOST = dict(failed="Failed", unread="Not run")  # lines that are not there: line -> why, data -> why
WORDS = dict(
    reduced="At reduced size", note="Note", finding="Finding", caption="", verdict="Verdict"
)
HEADS = dict(
    epsilon_claimed="claimed ε",
    epsilon_proved="proved ε",
    seconds_per_round="s/round",
    noise_multiplier="noise multiplier",
)
VERDICTS = ("confirmed", "not confirmed", "cannot be checked")
NUMBERS = "Numbers of the experiment"
MADE = {
    "experiment",
    "title",
    "verdicts",
    "claims",
    "lines",
    "columns",
}  # an experiment's file has one of these


class Line(NamedTuple):
    """One line of a figure or table, over its seeds; None is what the file does not hold."""

    name: str
    mean: float | None = None  # accuracy
    half: float | None = None  # of its 95 % interval, where there is one
    std: float | None = None  # over seeds, where the file holds no more
    seeds: int | str | None = None  # in words where some failed
    paper: object = None  # as the paper prints it
    claimed: float | None = None
    proved: float | None = None
    more: dict = {}  # heading -> what else is known of it


class Experiment(NamedTuple):
    """One figure, table or study; of a collection the first has no name and is of all of it."""

    name: str
    title: str = ""
    module: str = ""  # python -m experiments.papers.MODULE NAME runs it again
    quick: bool = False
    only: list = []  # the lines that were asked for, if not all
    seeds: list = []
    seconds: float | None = None  # of all its runs
    notes: list = []
    lost: list = []  # those of the notes that tell of lines which are not there
    lines: list = []
    # of a study: dicts with panel, line, x, mean and half of an interval, a guarantee
    points: list = []
    xlabel: str = ""
    tables: list = []  # (caption, columns, rows)
    verdicts: list = []
    settings: dict = {}
    versions: dict = {}


def load(path) -> dict:
    """The JSON object in a file, of this format or from before formats had a number.

    Raises:
        ValueError: naming the file for what is no such JSON, or of another format.
    """
    try:
        found = json.loads(
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
    if not isinstance(found, dict):
        checks.fail(str(path), "a JSON object", type(found).__name__)
    given = found.get("format", record.FORMAT)
    if type(given) is not int or given != record.FORMAT:
        checks.fail(
            str(path),
            f"format {record.FORMAT}, which is what this version of jfl reads",
            f"format {given!r}",
            "Use the jfl that wrote it.",
        )
    return found


def _number(text) -> float | int:
    """A number of a size that tables and pictures can show."""
    value, whole = float(text), text.lstrip("-").isdigit()
    if not abs(value) <= (2**62 if whole else 1e100):  # nor nan
        raise ValueError(f"{text[:40]} is no number that a run writes")
    return int(text) if whole else value


def has(path, where, found, needed):
    """Refuse what lacks a field, or holds one of another type."""
    if not isinstance(found, dict):
        checks.fail(f"{path}, {where}", "an object", type(found).__name__)
    for key, kind in needed.items():
        if key not in found or isinstance(found[key], bool) or not isinstance(found[key], kind):
            checks.fail(
                f"{path}, {where}",
                f"{key} as this version of jfl writes it",
                repr(found[key])[:60] if key in found else f"keys {', '.join(map(str, found))}",
                "Use the jfl that wrote it.",
            )


def read(path) -> list[Experiment]:
    """The experiments in a file: one of a results.json, several of a collection.

    Raises:
        ValueError: naming the file for what is neither.
    """
    found = load(path)
    if isinstance(found.get("cells"), list) and "nbformat" not in found:  # a notebook has cells too
        experiments = _of_cells(path, found)
    elif any(isinstance(found.get(k), dict) for k in ("experiments", "study")):
        experiments = _by_name(path, found)
    elif MADE & set(found):
        experiments = [_one(path, found.get("experiment", found.get("study", "")), found)]
    else:
        experiments = []
    if not any(map(_holds_results, experiments)):
        checks.fail(
            str(path),
            "what an experiment wrote (lines with accuracies, points, claims that were checked, or "
            "a table "
            "with a title), or the collection of a paper's experiments",
            f"keys {', '.join(found) or 'none'}",
            "A run, a sweep or a demo is given by its folder.",
        )
    return experiments


def _holds_results(e: Experiment) -> bool:
    """False for what has no more than a key in common with an experiment, as a file of something
    else may."""
    lines = any(
        v is not None
        for line in e.lines
        for v in (line.mean, line.proved, line.claimed, line.more.get("loss"))
    )
    table = bool(e.name or e.title) and any(caption == NUMBERS for caption, *_ in e.tables)
    return bool(lines or table or e.points or e.verdicts or e.lost)


def _objects(value) -> bool:
    """A list or a dict of objects, at least one."""
    inner = (
        list(value.values())
        if isinstance(value, dict)
        else value
        if isinstance(value, list)
        else []
    )
    return bool(inner) and all(isinstance(v, dict) for v in inner)


# --- one experiment


def _one(path, name, found) -> Experiment:  # noqa: C901
    has(path, f"experiment {name}", found, {})
    lines, verdicts = found.get("lines", {}), found.get("verdicts", found.get("claims", []))
    failed, kinds = found.get("failed", {}), dict(seconds=NUMBER, failed=dict, unread=dict)
    if {"verdicts", "claims"} <= set(found):
        checks.fail(str(path), "verdicts or claims", "both")
    has(
        path,
        f"experiment {name}",
        dict(seconds=None, failed={}, unread={}) | {k: found[k] for k in kinds if k in found},
        kinds,
    )
    if not isinstance(found.get("quick", False), bool):
        checks.fail(str(path), "quick = true or false", repr(found["quick"])[:60])
    if not isinstance(lines, dict):
        checks.fail(str(path), "lines by name", type(lines).__name__)
    for key, value in dict(
        verdicts=verdicts, **{k: found.get(k, []) for k in ("columns", "rows", "seeds")}
    ).items():
        if not isinstance(value, list) and not (key == "seeds" and isinstance(value, int)):
            checks.fail(str(path), f"a list of {key}", type(value).__name__)
    for claim in verdicts:
        has(path, "a verdict", claim, dict(claim=str, verdict=str))
        if claim["verdict"] not in VERDICTS:
            checks.fail(
                str(path), f"a verdict out of {', '.join(VERDICTS)}", repr(claim["verdict"])[:60]
            )
    seeds = found.get("seeds", [])
    seeds, count = (seeds, len(seeds)) if isinstance(seeds, list) else ([], seeds)
    rows, points = found.get("rows", []), []
    if "study" in found and not isinstance(found["study"], dict):
        points, rows = rows, []
        for r in points:
            has(
                path,
                "a point of the study",
                r,
                dict(panel=str, line=str, x=NUMBER, mean=NUMBER, half=NUMBER),
            )
            has(path, "a point of the study", {k: r.get(k) for k in POINT}, POINT)
    known = {
        *MADE,
        *WORDS,
        *LOST,
        "format",
        "module",
        "study",
        "quick",
        "only",
        "seeds",
        "seconds",
        "rows",
        "versions",
        "commit",
        "paper",
        "xlabel",
    }
    found_tables, settings = _rest({k: v for k, v in found.items() if k not in known})
    if bool(rows) > bool(found.get("columns")):
        checks.fail(str(path), "columns that name the cells of rows", "rows alone")
    if rows:
        listed = [[*r] if isinstance(r, list) else [r] for r in rows]
        if any(len(r) != len(found["columns"]) for r in listed):
            checks.fail(str(path), f"rows of {len(found['columns'])} cells, one a column", "others")
        found_tables.insert(0, (NUMBERS, [str(c) for c in found["columns"]], listed))
    lines = [_line(path, n, v, count) for n, v in lines.items()] + [
        Line(n, seeds=_counted(0, count)) for n in failed if n not in lines
    ]
    lost = _notes(found, LOST)
    return Experiment(
        name=str(name),
        title=str(found.get("title", found.get("paper", ""))),
        module=str(found.get("module", "studies" if points else "")),
        quick=bool(found.get("quick")),
        only=[str(n) for n in found["only"]] if isinstance(found.get("only"), list) else [],
        seeds=seeds,
        seconds=found.get("seconds"),
        notes=_notes(found) + lost,
        lost=lost,
        lines=lines,
        points=points,
        xlabel=str(found.get("xlabel", "")),
        tables=found_tables,
        verdicts=verdicts,
        settings=settings,
        versions=_versions(found),
    )


def _notes(found, words=WORDS) -> list:
    """What is said in words, with what it is."""
    out = []
    for key, word in words.items():
        value = found.get(key)
        said = (
            [f"{k}: {v}" for k, v in value.items()]
            if isinstance(value, dict)
            else [value]
            if value
            else []
        )
        out += [f"{word}: {s}" if word else str(s) for s in said]
    return out


def _versions(found) -> dict:
    versions = found["versions"] if isinstance(found.get("versions"), dict) else {}
    return versions | ({"commit": found["commit"]} if found.get("commit") else {})


def _line(path, name, found, seeds) -> Line:
    """`seeds`: how many the experiment has, if the line does not say."""
    where = f"line {name}"
    has(path, where, found, {})
    seen = next((found[k] for k in ("accuracy", "mean", "accuracy_mean") if k in found), None)
    loss = found.get("loss")
    for values in (seen, loss):
        if not all(isinstance(a, NUMBER) and not isinstance(a, bool) for a in _listed(values)):
            checks.fail(f"{path}, {where}", "accuracies and losses of seeds", repr(values)[:60])
    good = [a for a in _listed(seen) if a is not None]
    mean, half = tables.interval(good) if good else (None, None)
    counts = dict(seeds=len(good) if isinstance(seen, list) else seeds or None, failed=None)
    counts = {k: found.get(k, v) for k, v in counts.items()}  # or a list of them
    numbers = dict(
        std=found.get("std", found.get("accuracy_std")),
        claimed=found.get("epsilon_claimed"),
        proved=found.get("epsilon_proved"),
        **{k: len(v) if isinstance(v, list) else v for k, v in counts.items()},
    )
    has(path, where, numbers, dict.fromkeys(numbers, NUMBER))
    if any(v is not None and v < 0 for v in numbers.values()):
        checks.fail(f"{path}, {where}", "a std, an epsilon and seeds >= 0", json.dumps(numbers))
    known = (
        "accuracy",
        "mean",
        "accuracy_mean",
        "std",
        "accuracy_std",
        "seeds",
        "failed",
        "paper",
        "loss",
        "epsilon_claimed",
        "epsilon_proved",
        "trace",
    )
    if numbers["seeds"] == 1:  # of one seed it is no spread
        numbers["std"] = None
    numbers["seeds"] = _counted(numbers["seeds"], numbers.pop("failed"))
    losses = [v for v in _listed(loss) if v is not None]
    more = {"loss": sum(losses) / len(losses)} if losses else {}
    more |= {HEADS.get(k, k): v for k, v in found.items() if k not in known}
    if isinstance(trace := found.get("trace"), dict):
        more |= {
            f"{k}, at the end": v[-1]
            for k, v in trace.items()
            if k != "round" and isinstance(v, list) and v
        }
    return Line(name, mean, half, paper=found.get("paper"), more=more, **numbers)


def _counted(seeds, failed):
    return f"{seeds or 0} (+{failed} failed)" if failed else seeds


def _listed(value) -> list:
    return value if isinstance(value, list) else [value]


def _rest(found) -> tuple[list, dict]:
    """What else a file holds: objects that are alike as tables, and single facts."""
    made, facts = [], {}
    for key, value in found.items():
        if not _objects(value):
            facts[key] = value
            continue
        if isinstance(value, dict):  # a field of the same name keeps its column
            value = [{key if key not in v else f"{key}: name": n} | v for n, v in value.items()]
        rows = value
        columns = list(dict.fromkeys(k for r in rows for k in r))
        made.append((key, [str(c) for c in columns], [[r.get(c) for c in columns] for r in rows]))
    return made, facts


# --- collections


def _whole(path, name, found, named, without) -> Experiment:
    """What a collection says of all its experiments, and which of their lines are not there: what
    they say is folded."""
    whole, lost = _one(path, name, {k: v for k, v in found.items() if k not in without}), {}
    for words, name in ((words, e.name) for e in named for words in e.lost):
        lost.setdefault(words, []).append(name)
    return whole._replace(
        notes=whole.notes + [f"{words} ({', '.join(names)})" for words, names in lost.items()]
    )


def _named(path, found) -> list:
    if not isinstance(found.get("experiments", {}), dict):
        checks.fail(str(path), "experiments by name", type(found["experiments"]).__name__)
    return [_one(path, n, v) for n, v in found.get("experiments", {}).items()]


def _by_name(path, found):
    """{experiments: {name: results}}, and a study as {rows: a dict for each variant of a model at a
    noise level}."""
    named = _named(path, found)
    out = [_whole(path, "", found, named, ("experiments", "study", "experiment", "module")), *named]
    study = found.get("study", {})
    if not study:
        return out
    has(path, "study", study, dict(rows=list))
    levels: dict = {}
    for r in study["rows"]:
        has(
            path,
            "a row of the study",
            r,
            dict(
                model=str,
                variant=str,
                multiplier=(int, float),
                seeds=dict,
                gain=NUMBER,
                gain_95=NUMBER,
                epsilon_proved=NUMBER,
            ),
        )
        has(
            path,
            "accuracies of a row of the study",
            r["seeds"],
            dict.fromkeys(r["seeds"], (int, float)),
        )
        of = {
            k: v
            for k, v in r.items()
            if k
            not in (
                "model",
                "variant",
                "level",
                "multiplier",
                "seeds",
                "accuracy",
                "accuracy_95",
                "gain",
                "gain_95",
            )
        }
        above = (
            "" if None in (r["gain"], r["gain_95"]) else f"{r['gain']:+.2f} ± {r['gain_95']:.2f}"
        )
        percent = dict(accuracy=[v / 100 for v in r["seeds"].values()])
        levels.setdefault((r["model"], r["multiplier"]), []).append(
            _line(path, r["variant"], percent | {"points above iso": above} | of, 0)
        )
    again = dict(module=str(found.get("module", "")), quick=bool(found.get("quick")))
    out.append(
        _one(
            path, "study", {k: v for k, v in study.items() if k not in ("rows", "finding")}
        )._replace(**again)
    )
    return out + [
        Experiment(
            f"study, {model}, noise multiplier {z:.3g}",
            "Shapes of noise at one proved ε",
            lines=lines,
        )
        for (model, z), lines in levels.items()
    ]


def _of_cells(path, found):
    """{cells: a dict for each scenario, setting and assignment, claims}: their lines; experiments
    by name beside them."""
    scenarios: dict = {}
    for cell in found["cells"]:
        has(
            path,
            "a cell",
            cell,
            dict(scenario=int, setting=str, assignment=str, seeds=list, accuracy=dict, loss=dict),
        )
        has(path, "a cell's accuracy", cell["accuracy"], dict(mean=NUMBER, half=NUMBER))
        known = ("scenario", "setting", "assignment", "seeds", "accuracy")
        more = {
            k.replace("_", " ").replace("epsilon", "ε"): _spread(v)
            for k, v in cell.items()
            if k not in known
        }
        view = (
            "server" if cell["setting"].startswith("server") else "third_party"
        )  # of who the noise is for
        epsilons = {k: cell.get(f"epsilon_{k}_{view}") for k in ("claimed", "proved")}
        has(path, "a cell", epsilons, dict.fromkeys(epsilons, NUMBER))
        mine = Line(
            f"{cell['setting']}: {cell['assignment']}",
            cell["accuracy"]["mean"],
            cell["accuracy"]["half"],
            seeds=len(cell["seeds"]),
            more={k: v for k, v in more.items() if v is not None},
            **epsilons,
        )
        scenarios.setdefault(cell["scenario"], []).append(mine)
    named = _named(path, found)
    whole = _whole(
        path, found.get("experiment", "study"), found, named, ("cells", "experiment", "experiments")
    )
    return [
        whole,
        *named,
        *(
            Experiment(f"study, scenario {n}", "Impact factors at one noise", lines=lines)
            for n, lines in scenarios.items()
        ),
    ]


def _spread(value):
    """A mean with its half width in words; anything else as it is."""
    if not isinstance(value, dict) or not isinstance(value.get("mean"), (int, float)):
        return value
    half = value.get("half")
    return f"{value['mean']:.4g}" + (f" ± {half:.2g}" if isinstance(half, (int, float)) else "")
