"""Experiments in one form, whatever wrote them: the results.json of one, or a file that collects those of a paper.

A collection holds experiments by name, and may have a study beside them (ranaweera2025), or the cells of one study
(talaei2024).  Each form has one reader here; nothing else knows of them.
"""
import json
from pathlib import Path
from typing import NamedTuple

from . import check, report, tables

NUMBER = (int, float, type(None))
POINT = dict(epsilon=NUMBER, claimed=NUMBER, stated=NUMBER, failed=NUMBER) | dict.fromkeys(
    ("values", "chosen", "config"), (dict, type(None))) | dict(caveats=(list, type(None)))       # where there are such
WORDS = dict(reduced="At reduced size", note="Note", finding="Finding", caption="", verdict="Verdict")
HEADS = dict(epsilon_claimed="claimed ε", epsilon_proved="proved ε", seconds_per_round="s/round",
             noise_multiplier="noise multiplier")
VERDICTS = ("confirmed", "not confirmed", "cannot be checked")
MADE = {"experiment", "title", "verdicts", "claims", "lines", "columns"}       # an experiment's file has one of these


class Line(NamedTuple):
    """One line of a figure or table, over its seeds; None is what the file does not hold."""
    name: str
    mean: float | None = None        # accuracy
    half: float | None = None        # of its 95 % interval, where there is one
    std: float | None = None         # over seeds, where the file holds no more
    seeds: int | None = None
    paper: object = None             # as the paper prints it
    claimed: float | None = None
    proved: float | None = None
    more: dict = {}                  # heading -> what else is known of it


class Experiment(NamedTuple):
    """One figure, table or study; of a collection the first has no name and is of all of it."""
    name: str
    title: str = ""
    module: str = ""                 # python -m experiments.MODULE NAME runs it again
    quick: bool = False
    only: list = []                  # the lines that were asked for, if not all
    seeds: list = []
    seconds: float | None = None     # of all its runs
    notes: list = []
    lines: list = []
    points: list = []                # of a study: dicts with panel, line, x, mean and half of an interval, a guarantee
    xlabel: str = ""
    tables: list = []                # (caption, columns, rows)
    verdicts: list = []
    settings: dict = {}
    versions: dict = {}


def load(path) -> dict:
    """The JSON object in a file, of this format or from before formats had a number.

    Errors   ValueError naming the file for what is no such JSON, or of another format.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_number, parse_float=_number, parse_int=_number)
    except (OSError, ValueError, RecursionError) as error:
        check.fail(str(path), "the JSON that a run wrote", f"{type(error).__name__}: {error}", "It may be half-written.")
    if not isinstance(found, dict):
        check.fail(str(path), "a JSON object", type(found).__name__)
    given = found.get("format", report.FORMAT)
    if type(given) is not int or given != report.FORMAT:
        check.fail(str(path), f"format {report.FORMAT}, which is what this version of jfl reads", f"format {given!r}",
                   "Use the jfl that wrote it.")
    return found


def _number(text) -> float | int:
    """A number of a size that tables and pictures can show."""
    value, whole = float(text), text.lstrip("-").isdigit()
    if not abs(value) <= (2 ** 62 if whole else 1e100):       # nor nan
        raise ValueError(f"{text[:40]} is no number that a run writes")
    return int(text) if whole else value


def has(path, where, found, needed):
    """Refuse what lacks a field, or holds one of another type."""
    if not isinstance(found, dict):
        check.fail(f"{path}, {where}", "an object", type(found).__name__)
    for key, kind in needed.items():
        if key not in found or isinstance(found[key], bool) or not isinstance(found[key], kind):
            check.fail(f"{path}, {where}", f"{key} as this version of jfl writes it",
                       repr(found[key])[:60] if key in found else f"keys {', '.join(map(str, found))}",
                       "Use the jfl that wrote it.")


def read(path) -> list[Experiment]:
    """The experiments in a file: one of a results.json, several of a collection.

    Errors   ValueError naming the file for what is neither.
    """
    found = load(path)
    if isinstance(found.get("cells"), list):
        return _of_cells(path, found)
    if any(isinstance(found.get(k), dict) for k in ("experiments", "study")):
        return _by_name(path, found)
    if not MADE & set(found):
        check.fail(str(path), "what an experiment wrote, or the collection of a paper's experiments",
                   f"keys {', '.join(found) or 'none'}")
    return [_one(path, found.get("experiment", found.get("study", "")), found)]


def _objects(value) -> bool:
    """A list or a dict of objects, at least one."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return bool(inner) and all(isinstance(v, dict) for v in inner)


# --- one experiment --------------------------------------------------------------------------------------------------

def _one(path, name, found, **given) -> Experiment:
    """`given`: fields that the rest of the file says."""
    has(path, f"experiment {name}", found, {})
    lines, verdicts = found.get("lines", {}), found.get("verdicts", found.get("claims", []))
    if {"verdicts", "claims"} <= set(found):
        check.fail(str(path), "verdicts or claims", "both")
    has(path, f"experiment {name}", {"seconds": found.get("seconds")}, dict(seconds=NUMBER))
    if not isinstance(found.get("quick", False), bool):
        check.fail(str(path), "quick = true or false", repr(found["quick"])[:60])
    if not isinstance(lines, dict):
        check.fail(str(path), "lines by name", type(lines).__name__)
    for key, value in dict(verdicts=verdicts, **{k: found.get(k, []) for k in ("columns", "rows", "seeds")}).items():
        if not isinstance(value, list) and not (key == "seeds" and isinstance(value, int)):
            check.fail(str(path), f"a list of {key}", type(value).__name__)
    for claim in verdicts:
        has(path, "a verdict", claim, dict(claim=str, verdict=str))
        if claim["verdict"] not in VERDICTS:
            check.fail(str(path), f"a verdict out of {', '.join(VERDICTS)}", repr(claim["verdict"])[:60])
    seeds = found.get("seeds", [])
    seeds, count = (seeds, len(seeds)) if isinstance(seeds, list) else ([], seeds)
    rows, points = found.get("rows", []), []
    if "study" in found and not isinstance(found["study"], dict):
        points, rows = rows, []
        for r in points:
            has(path, "a point of the study", r, dict(panel=str, line=str, x=NUMBER, mean=NUMBER, half=NUMBER))
            has(path, "a point of the study", {k: r.get(k) for k in POINT}, POINT)
    known = {*MADE, *WORDS, "format", "module", "study", "quick", "only", "seeds", "seconds", "rows", "versions", "commit",
             "paper", "xlabel"}
    found_tables, settings = _rest({k: v for k, v in found.items() if k not in known})
    if bool(rows) > bool(found.get("columns")):
        check.fail(str(path), "columns that name the cells of rows", "rows alone")
    if rows:
        listed = [[*r] if isinstance(r, list) else [r] for r in rows]
        if any(len(r) != len(found["columns"]) for r in listed):
            check.fail(str(path), f"rows of {len(found['columns'])} cells, one a column", "others")
        found_tables.insert(0, ("Numbers of the experiment", [str(c) for c in found["columns"]], listed))
    return Experiment(**dict(
        name=str(name), title=str(found.get("title", found.get("paper", ""))),
        module=str(found.get("module", "studies" if points else "")), quick=bool(found.get("quick")),
        only=[str(n) for n in found["only"]] if isinstance(found.get("only"), list) else [], seeds=seeds,
        seconds=found.get("seconds"), notes=_notes(found), lines=[_line(path, n, v, count) for n, v in lines.items()], points=points,
        xlabel=str(found.get("xlabel", "")), tables=found_tables, verdicts=verdicts, settings=settings,
        versions=_versions(found)) | given)


def _notes(found) -> list:
    """What is said in words, with what it is."""
    out = []
    for key, word in WORDS.items():
        value = found.get(key)
        said = [f"{k}: {v}" for k, v in value.items()] if isinstance(value, dict) else [value] if value else []
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
            check.fail(f"{path}, {where}", "accuracies and losses of seeds", repr(values)[:60])
    good = [a for a in _listed(seen) if a is not None]
    mean, half = tables.interval(good) if good else (None, None)
    count = found.get("seeds", len(good) if isinstance(seen, list) else seeds or None)
    numbers = dict(std=found.get("std", found.get("accuracy_std")), claimed=found.get("epsilon_claimed"),
                   proved=found.get("epsilon_proved"), seeds=len(count) if isinstance(count, list) else count)
    has(path, where, numbers, dict.fromkeys(numbers, NUMBER))
    if any(v is not None and v < 0 for v in numbers.values()):
        check.fail(f"{path}, {where}", "a std, an epsilon and seeds >= 0", json.dumps(numbers))
    known = ("accuracy", "mean", "accuracy_mean", "std", "accuracy_std", "seeds", "paper", "loss", "epsilon_claimed",
             "epsilon_proved", "trace")
    if numbers["seeds"] == 1:                             # of one seed it is no spread
        numbers["std"] = None
    losses = [v for v in _listed(loss) if v is not None]
    more = {"loss": sum(losses) / len(losses)} if losses else {}
    more |= {HEADS.get(k, k): v for k, v in found.items() if k not in known}
    if isinstance(trace := found.get("trace"), dict):
        more |= {f"{k}, at the end": v[-1] for k, v in trace.items() if k != "round" and isinstance(v, list) and v}
    return Line(name, mean, half, paper=found.get("paper"), more=more, **numbers)


def _listed(value) -> list:
    return value if isinstance(value, list) else [value]


def _rest(found) -> tuple[list, dict]:
    """What else a file holds: objects that are alike as tables, and single facts."""
    made, facts = [], {}
    for key, value in found.items():
        if not _objects(value):
            facts[key] = value
            continue
        if isinstance(value, dict):                       # a field of the same name keeps its column
            value = [{key if key not in v else f"{key}: name": n} | v for n, v in value.items()]
        rows = value
        columns = list(dict.fromkeys(k for r in rows for k in r))
        made.append((key, [str(c) for c in columns], [[r.get(c) for c in columns] for r in rows]))
    return made, facts


# --- collections -----------------------------------------------------------------------------------------------------

def _whole(path, found, *without) -> Experiment:
    """What a collection says of all its experiments."""
    return _one(path, "", {k: v for k, v in found.items() if k not in {"experiment", "module", *without}})


def _named(path, found) -> list:
    if not isinstance(found.get("experiments", {}), dict):
        check.fail(str(path), "experiments by name", type(found["experiments"]).__name__)
    return [_one(path, n, v) for n, v in found.get("experiments", {}).items()]


def _by_name(path, found):
    """{experiments: {name: results}}, and a study as {rows: a dict for each variant of a model at a noise level}."""
    out = [_whole(path, found, "experiments", "study"), *_named(path, found)]
    study = found.get("study", {})
    if not study:
        return out
    has(path, "study", study, dict(rows=list))
    levels: dict = {}
    for r in study["rows"]:
        has(path, "a row of the study", r, dict(model=str, variant=str, multiplier=(int, float), seeds=dict, gain=NUMBER,
                                                gain_95=NUMBER, epsilon_proved=NUMBER))
        has(path, "accuracies of a row of the study", r["seeds"], dict.fromkeys(r["seeds"], (int, float)))
        of = {k: v for k, v in r.items() if k not in (
            "model", "variant", "level", "multiplier", "seeds", "accuracy", "accuracy_95", "gain", "gain_95")}
        above = "" if None in (r["gain"], r["gain_95"]) else f"{r['gain']:+.2f} ± {r['gain_95']:.2f}"
        percent = dict(accuracy=[v / 100 for v in r["seeds"].values()])
        levels.setdefault((r["model"], r["multiplier"]), []).append(
            _line(path, r["variant"], percent | {"points above iso": above} | of, 0))
    again = dict(module=str(found.get("module", "")), quick=bool(found.get("quick")))
    out.append(_one(path, "study", {k: v for k, v in study.items() if k not in ("rows", "finding")}, **again))
    return out + [Experiment(f"study, {model}, noise multiplier {z:.3g}", "Shapes of noise at one proved ε", lines=lines)
                  for (model, z), lines in levels.items()]


def _of_cells(path, found):
    """{cells: a dict for each scenario, setting and assignment, claims}: their lines; experiments by name beside them."""
    scenarios: dict = {}
    for cell in found["cells"]:
        has(path, "a cell", cell, dict(scenario=int, setting=str, assignment=str, seeds=list, accuracy=dict, loss=dict))
        has(path, "a cell's accuracy", cell["accuracy"], dict(mean=NUMBER, half=NUMBER))
        known = ("scenario", "setting", "assignment", "seeds", "accuracy")
        more = {k.replace("_", " ").replace("epsilon", "ε"): _spread(v) for k, v in cell.items() if k not in known}
        view = "server" if cell["setting"].startswith("server") else "third_party"      # of who the noise is for
        epsilons = {k: cell.get(f"epsilon_{k}_{view}") for k in ("claimed", "proved")}
        has(path, "a cell", epsilons, dict.fromkeys(epsilons, NUMBER))
        mine = Line(f"{cell['setting']}: {cell['assignment']}", cell["accuracy"]["mean"], cell["accuracy"]["half"],
                    seeds=len(cell["seeds"]), more={k: v for k, v in more.items() if v is not None}, **epsilons)
        scenarios.setdefault(cell["scenario"], []).append(mine)
    known = ("cells", "experiment", "experiments")
    whole = _one(path, found.get("experiment", "study"), {k: v for k, v in found.items() if k not in known})
    return [whole, *_named(path, found), *(Experiment(f"study, scenario {n}", "Impact factors at one noise", lines=lines)
                                           for n, lines in scenarios.items())]


def _spread(value):
    """A mean with its half width in words; anything else as it is."""
    if not isinstance(value, dict) or not isinstance(value.get("mean"), (int, float)):
        return value
    half = value.get("half")
    return f"{value['mean']:.4g}" + (f" ± {half:.2g}" if isinstance(half, (int, float)) else "")
