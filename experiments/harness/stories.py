"""Fill the generated regions of docs/papers, and write the long page of each paper.

    python -m experiments.harness.stories   # docs/papers, docs/pictures, experiments/results/*.md

A page has marked regions, from `<!-- stories: claims -->` to `<!-- end of claims -->`.  This module
writes their content: verdicts, numbers, counts, epsilons and pictures.  Everything else on a page
is written by hand and quotes no result.  The long page, experiments/results/PAPER.md, is generated
as a whole: every check of the claims, the printed numbers next to ours, and notes.

docs/site/stories.toml says which claims a page shows, and holds texts that quote stored numbers:

    {accuracy: EXPERIMENT | LINE}       mean over seeds; also claimed and proved (epsilons)
    {most: EXPERIMENT | START}          largest accuracy of the lines whose names begin so
    {points: EXPERIMENT | LINE | LESS}  accuracy of LINE minus that of LESS, in points
    {gain: EXPERIMENT | LINE | LESS}    the same over their common seeds, with half of a 95 %
                                        interval
    {verdict: EXPERIMENT | CLAIM}       as stored
    {judged: EXPERIMENT | CLAIM}        the verdict, with the number of seeds
    {same: EXPERIMENT | CLAIM | EXPERIMENT | CLAIM}  the verdict that two claims share
    {distance: EXPERIMENT | CLAIM}      mean distance of the values from the printed ones, and the
                                        verdict
    {constant: EXPERIMENT | CLAIM}      the constant that a theorem up to a constant needs
    {audited: LINE}                     from the study of audits
    {cell: EXPERIMENT | ROW | COLUMN}   from its tables, in the row that begins with ROW
    {column: EXPERIMENT | LINE | COLUMN}  another number of a line, with its 95 % interval

A name that is not stored is an error that says where it is quoted.
"""

import collections
import dataclasses
import functools
import importlib
import os
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from jfl.core import checks

from . import results, story_pictures, verdicts
from .results import PAPERS
from .runner import stored_line

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "papers"
WORDS = ROOT / "docs" / "site" / "stories.toml"
STORED = ROOT / "experiments" / "results"
HOLDS, CONTRADICTED, NOT_REPRODUCED, UNDECIDED, NO_DIFFERENCE, UNKNOWN = results.VERDICTS
SHORT = {CONTRADICTED: "contradicted", NOT_REPRODUCED: "not reproduced"}
REGION = re.compile(r"(<!-- stories: ([\w ]+) -->\n)(.*?)(<!-- end of \2 -->)", re.S)
PLACE = re.compile(r"\{(\w+): ([^{}]+)\}")
# Matches means, half intervals and the number of seeds as experiments.harness.verdicts writes them.
JUDGED = re.compile(
    r"(?:^|.*; )(?P<all>[^;]+) \((?:[\d.]+ % (?:one-sided bounds|intervals), )?"
    r"(?P<seeds>\d+(?: to \d+)? seeds|one seed)"
)
MEAN = re.compile(r"([+-]\d+\.\d{3,})(?: ± ([\d.]+(?:e[+-]?\d+)?))?")
# Matches a bound and a value that have no interval, as the theorems of Talaei and Izadi do.
BOUND = re.compile(r"bound (-?[\d.]+(?:e[+-]?\d+)?), measured (-?[\d.]+(?:e[+-]?\d+)?)")
# Matches how often a bound is informative, as experiments.harness.theorems writes it.
BELOW_START = re.compile(r"is below the start at (\d+) of (?:the )?(\d+)")
NUM_DECIMALS = 3  # of a stored mean, unless more are needed to tell its sign
MAX_LISTED = 3  # numbers that a cell lists one by one
MAX_SEPARATE = 2  # checks that a cell lists one by one
MAX_LABELLED = 4  # checks whose labels a cell lists
MAX_SEEN_CHARACTERS = 170  # of what was seen, in a cell
RATIO = "of the bound"  # unit of a measured value over a bound
FIX = "Correct docs/site/stories.toml, or collect the result that it names."


# --- regions of a page


def short(paper: str) -> str:
    """Return what a paper proposes, what we found, and how many claims have each verdict."""
    words = page_words()[paper]
    proposes, finds, privacy = (quoted(words[k], paper) for k in ("proposes", "finds", "privacy"))
    found = f"- **Accuracy and convergence.** {finds}\n- **Privacy.** {privacy}"
    return f"**In short.** {proposes}\n\n{found}\n- **All claims.** {counts(paper)}"


def counts(paper: str) -> str:
    """Return how many claims of a paper have each verdict, in one sentence."""
    given = list(results.statements(stored(paper).parts()).values())
    each = [f"{given.count(w)} {_plural(w, given)}" for w in results.VERDICTS if w in given]
    whole = f"[all {len(given)} claims](../../experiments/results/{paper}.md#all-claims)"
    return f"Of {whole} of the paper that we check, {', '.join(each[:-1])}, and {each[-1]}."


def _plural(word: str, given: list) -> str:
    many = given.count(word) != 1
    if word == HOLDS:
        return "hold" if many else "holds"
    if word == UNKNOWN:
        return word
    if word == NO_DIFFERENCE:
        return f"show{'' if many else 's'} {word}"
    return f"{'are' if many else 'is'} {word}"


def claims(paper: str) -> str:
    """Return the table of the claims that a page shows, with one row for each verdict on a claim.

    Only the paper's own checks are in it, and not those at other settings.
    """
    rows, seeds = [], []
    for row in page_words()[paper]["claims"]:
        head = _cell(row["says"]), _cell(row["printed"])
        own = [c for c in _checked(paper, row) if c.given.whose == "paper"]
        seeds += [int(n) for c in own for n in re.findall(r"(\d+) seeds\)", c.measured)]
        for word in results.VERDICTS:
            if checked := [c for c in own if c.given.verdict == word]:
                seen = _measured_in_row(checked, whole=len(checked) == len(own))
                rows.append((*head, seen, _marked(word)))
                head = "", ""
    table = _table(("claim", "printed", "measured", "verdict"), rows)
    return f"{table}\n\nValues are means over {min(seeds)} to {max(seeds)} seeds."


class Checked(NamedTuple):
    """A check of a claim: its label, unit and verdict, and what was measured."""

    label: str
    unit: str
    given: results.Verdict
    measured: str


def _checked(paper: str, row: dict) -> list[Checked]:
    """Return the checks of a claim."""
    found = []
    for name, claim, *rest in row["checks"]:
        label, unit = rest[0] if rest else "", rest[1] if len(rest) > 1 else row.get("unit", "")
        part = slice(*rest[2]) if len(rest) > 2 else slice(None)
        given = verdict(paper, name, claim)
        if given.verdict == UNKNOWN:
            seen = _cell(reason(experiment(paper, name), given))
        else:
            seen = measured(given, unit, part)
        found.append(Checked(label, unit, given, seen))
    return found


def _measured_in_row(checked: list[Checked], whole: bool) -> str:
    """Return what was measured in the checks of a claim with one verdict.

    They have their labels or their number, unless they are the whole claim. Checks with different
    units are listed one by one.
    """
    each = [re.sub(r" \([^()]*seeds\)$", "", c.measured) for c in checked]
    labels, units = [_cell(c.label) for c in checked], {c.unit for c in checked}
    if len(units) > 1 or (len(checked) <= MAX_SEPARATE and not whole):
        seen = {m: _labelled([b for b, n in zip(labels, each) if n == m]) for m in each}
        return "; ".join(f"{label}: {m}" for m, label in seen.items())
    head = _labelled(labels)
    joined = all(_means(c.given)[0] and c.given.verdict != UNKNOWN for c in checked)
    if joined and len(checked) > 1:
        each = [measured_together([c.given for c in checked], *units)]
    return ("" if whole else f"{head}: ") + "; ".join(dict.fromkeys(each))


def _labelled(labels: list[str]) -> str:
    """Return the label of one check, or the number of several checks and their labels if few."""
    if len(labels) == 1:
        return labels[0]
    listed = f" ({'; '.join(labels)})" if len(labels) <= MAX_LABELLED else ""
    return f"{len(labels)} checks{listed}"


def _marked(word: str) -> str:
    """Return a verdict in bold, with the class that gives it its colour."""
    short = SHORT.get(word, word)
    return f'<b class="{short.split()[0]}">{short}</b>'


# --- the long page


def long_page(paper: str) -> str:
    """Return experiments/results/PAPER.md."""
    words = page_words()[paper]
    parts = {
        "Checks of the claims": checks_of_claims(paper),
        "Printed numbers": printed(paper),
        **{head: quoted(text.strip(), paper) for head, text in words.get("details", {}).items()},
        "Pictures": _pictures(words["pictures"][1:], paper),
        "Notes on the runs": notes(paper),
        "What is open": missing(paper),
        "Experiments": commands(paper),
        "All claims": all_claims(paper),
    }
    text = "\n\n".join(f"## {head}\n\n{part}" for head, part in parts.items() if part)
    made = "This page is made by `python -m experiments.harness.stories`."
    lead = f"All checks behind [the page of the paper]({paper}.md). {made}"
    title = words["name"].replace(": ", ", ", 1)
    text = f"# {title}: all checks\n\n{lead}\n\n{text}\n"
    away = lambda match: f"]({os.path.relpath(FOLDER / match[1], STORED)})"
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", away, text)


def checks_of_claims(paper: str) -> str:
    """Return the table of all checks of the claims of a page, and a remark on some claims."""
    rows, remarks = [], []
    for row in page_words()[paper]["claims"]:
        rows.append((f"**{_cell(row['says'])}**", "", ""))
        for label, _, given, seen in _checked(paper, row):
            whose = " (our check)" if given.whose == "ours" else ""
            rows.append(((_cell(label) or "one check") + whose, seen, _marked(given.verdict)))
        if "note" in row:
            note = textwrap.indent(quoted(row["note"].strip(), paper), " " * 4).lstrip()
            remarks.append(f"- *{_cell(row['says'])}*: {note}")
    # The usual number of seeds is in the caption and not in every cell.
    seeds = collections.Counter(
        re.findall(r" \((\d+ seeds)\)$", "\n".join(r[1] for r in rows), re.M)
    )
    usual = seeds.most_common(1)[0][0]
    rows = [(head, seen.removesuffix(f" ({usual})"), word) for head, seen, word in rows]
    caption = f"Values are over {usual} if the table does not say otherwise."
    intro = quoted(page_words()[paper]["measured"].strip(), paper)
    table = _table(("check", "measured", "verdict"), rows)
    return "\n\n".join([intro, table, caption, *(["\n".join(remarks)] if remarks else [])])


def all_claims(paper: str) -> str:
    """Return the table of all claims of a paper, also those that its page does not show."""
    found = results.statements(stored(paper).parts())
    table = _table(("claim", "verdict"), [(_cell(c), _marked(v)) for c, v in found.items()])
    return f"Most claims begin with the name of the experiment that checks them.\n\n{table}"


# --- printed numbers

INSIDE, HIGHER, LOWER, NOT_RUN = "agrees", "printed is higher", "printed is lower", "not run"
PRINTED_RULE = """\
The interval contains the result of one further run of ours with a probability of 95 % (Student's \
t: the mean ± t s √(1 + 1/n) for n seeds with the standard deviation s). It is wider than the \
interval of a mean, because a printed number is itself the result of one or a few runs. The \
printed number *agrees* if it lies in the interval; otherwise it is higher or lower than the \
interval. This is not a verdict on a claim: many settings are ours."""


class Printed(NamedTuple):
    """A number that a paper prints next to ours."""

    where: str
    printed: str
    ours: str
    interval: str
    verdict: str


def printed(paper: str) -> str:
    """Return the rule and the tables of printed numbers; "" if there are none."""
    groups = page_words()[paper].get("printed", [])
    parts = [PRINTED_RULE] if any("table" not in group for group in groups) else []
    for group in groups:
        rows = printed_numbers(paper, group)
        heads = ("number", "printed", "ours", "interval", "result")
        keep = [i for i in range(len(heads)) if any(row[i] for row in rows)]
        table = _table([heads[i] for i in keep], [[row[i] for i in keep] for row in rows])
        parts += [f"**{group['says']}** {_counted(rows)}", table]
    return "\n\n".join(parts)


def printed_line(paper: str) -> str:
    """Return how many printed numbers agree with ours, in one paragraph."""
    rule = f"[rule and tables](../../experiments/results/{paper}.md#printed-numbers)"
    each = [
        f"{group['says']} {_counted(printed_numbers(paper, group))}"
        for group in page_words()[paper]["printed"]
    ]
    return f"**Printed numbers next to ours** ({rule}). {' '.join(each)}"


def _counted(rows: list[Printed]) -> str:
    given = [row.verdict for row in rows]
    words = {HIGHER: "printed higher", LOWER: "printed lower", NOT_RUN: NOT_RUN}
    others = [f"{given.count(word)} {words[word]}" for word in words if word in given]
    return ", ".join([f"{given.count(INSIDE)} of {len(rows)} agree", *others]) + "."


def printed_numbers(paper: str, group: dict) -> list[Printed]:
    """Return the printed numbers of a group of stories.toml.

    The group names a stored `table` of exact numbers, or `experiments`.  Lines of experiments have
    the printed number in their definition: an accuracy in per cent, or gains in points over other
    lines.  `line` is the part of a line's name that another method replaces: by the method that
    the gain is over, and by `run` if we compare another line of ours.
    """
    if "table" in group:
        (table,) = (
            t for t in stored(paper).experiments[group["table"]].tables if "printed" in t.columns
        )
        return [
            Printed(
                where, f"{value:g}", f"{ours:g}", "", INSIDE if agrees else _side(value, ours, ours)
            )
            for where, value, ours, agrees in table.rows
        ]
    figures = importlib.import_module(f"experiments.papers.{paper}.figures").EXPERIMENTS
    found = []
    for name in group["experiments"]:
        whole = experiment(paper, name)
        lines = {of: stored_line(one, whole.seeds) for of, one in whole.lines.items()}
        for of, text in figures[name].paper.items():
            own = (
                of.replace(group["line"], group.get("run", group["line"]))
                if "line" in group
                else of
            )
            for value, less in re.findall(r"([+-]?\d+(?:\.\d+)?)(?: on (\w+)|[^,]*)", str(text)):
                other = of.replace(group["line"], less) if less else ""
                where = f"{name}: {own}" + (f" minus {less}" if less else "")
                found.append(_compared(where, value, lines, own, other))
    return found


def _compared(where: str, value: str, lines: dict, own: str, other: str) -> Printed:
    """Return a printed number next to an accuracy of ours, or a difference of accuracies."""
    unit = " points" if other else " %"
    if any(name not in lines or lines[name].failed for name in filter(None, (own, other))):
        return Printed(where, value + unit, "–", "–", NOT_RUN)
    of = verdicts.difference(lines, own, other) if other else verdicts.end(lines[own])
    once = dataclasses.replace(of, error2=of.error2 * (of.freedom + 2))  # of one further run
    low, high = (100 * end for end in once.interval(verdicts.WRONG))
    sign = "+" if other else ""
    number = lambda x: f"{round(x, 1) + 0.0:{sign}.1f}".replace("-", "−")
    interval = f"{number(low)} to {number(high)}"
    shown = f"{number(100 * of.mean)}{unit} ({of.freedom + 1} seeds)"
    return Printed(
        where, value.replace("-", "−") + unit, shown, interval, _side(float(value), low, high)
    )


def _side(value: float, low: float, high: float) -> str:
    return HIGHER if value > high else LOWER if value < low else INSIDE


# --- more regions of a page


def epsilons(paper: str) -> str:
    """Return the table of claimed, audited and proved epsilons."""
    heads = ("for", "unit", "adjacency", "view", "δ", "ε claimed", "ε audited", "ε proved")
    rows = [_epsilon_row(paper, row) for row in page_words()[paper]["epsilon"]]
    return _table(heads, rows)


def _epsilon_row(paper: str, row: dict) -> tuple:
    """Return the cells of an audited plan, or of a line of an experiment."""
    if "audit" in row:
        p: Any = audit(row["audit"])
        facts = (p.unit, p.adjacency, p.view, f"{p.delta:g}")
        seen = epsilon(p.audited) + (", refutes the claim" if p.audited > p.claimed else "")
        found = epsilon(p.claimed), seen, epsilon(p.epsilon)
    else:
        one = line(paper, *row["line"])
        facts = (row["unit"], row["adjacency"], row["view"], row["delta"])
        claimed = "–" if one.epsilon_claimed is None else epsilon(one.epsilon_claimed)
        found = claimed, "–", epsilon(one.epsilon_proved)
    return (row["of"], *(fact.replace("_", " ") for fact in facts), *found)


def missing(paper: str) -> str:
    """Return the table of checks that are open, with what each needs."""
    why: dict = {}  # reason -> the experiment of each check
    for part in stored(paper).parts():
        for v in part.verdicts:
            if v.whose == "paper" and v.verdict == UNKNOWN:
                where = part.name if part is not stored(paper) else ""
                why.setdefault(reason(part, v), []).append(where)
    rows = [(_cell(told), len(names), names) for told, names in why.items()]
    open_ = [
        (part.name, seeds[1])
        for part in stored(paper).parts()
        for v in part.verdicts
        if v.whose == "paper"
        and v.verdict == UNDECIDED
        and (seeds := re.search(r"(\d+(?: to \d+)?) seeds", v.seen))
    ]
    for number in sorted({n for _, n in open_}, key=lambda n: [*map(int, n.split(" to "))]):
        names = [name for name, n in open_ if n == number]
        rows.append((f"undecided with {number} seeds", len(names), names))
    code = lambda name: f"`{name}`" if name else "comparisons of several experiments"
    cells = [
        (told, str(count), ", ".join(map(code, dict.fromkeys(of)))) for told, count, of in rows
    ]
    return _table(("reason", "checks (a claim can have several)", "experiments"), cells)


def notes(paper: str) -> str:
    """Return what the results say of the experiments that the page shows."""
    found: dict = {}  # note -> experiments
    for name in _shown(paper):
        for note in experiment(paper, name).notes:
            if told := _note(paper, name, note):
                found.setdefault(told, []).append(name)
    every = {name for name in _shown(paper) if experiment(paper, name).lines}
    out = []
    for (head, sentence), names in found.items():
        where = ", ".join(f"`{name}`" for name in names)
        if len(names) > 1 and every <= {*names}:
            where = "all experiments that the short page shows"
        out.append(f"- **{head}** ({where}): {_cell(shown(sentence)).removesuffix('.')}.")
    return "\n".join(out)


RULE = "[our rule](rules.md#how-rates-and-clip-norms-were-chosen)"
BEST = " (at the best of its grid)"


def _note(paper: str, name: str, note: str) -> tuple[str, str] | None:
    """Return a heading and a sentence for a note of an experiment; None if pages omit it."""
    kind, _, text = note.partition(": ")
    of = results.NOTES
    if kind == of["at_edge"]:
        many, lines = len(text.split("; ")), len(experiment(paper, name).lines)
        return (
            "Grids",
            f"for {many} of the {lines} methods and settings, the chosen rate or clip norm is at "
            "an end of its grid, so a wider grid may change the results",
        )
    if kind == of["not_tuned"]:
        names, _, why = text.rpartition(": ")
        although = ", although they have the best rate of their grid" if BEST in names else ""
        names = names.replace(BEST, "")
        return "Baselines", f"{names} end {why}{although}, so {RULE} marks them as not tuned"
    if kind == of["draws"]:
        return None if text == "one for each seed" else ("Data", "all seeds share one draw")
    if kind in (of["reduced"], of["differs"], of["stale"]):
        return kind, text
    return ("Remark", text) if kind == of["note"] else None


def shown(text: str) -> str:
    """Return a sentence of the stored results as pages write it."""
    for stored_as, words in page_words()["shown"].items():
        text = text.replace(stored_as, words)
    return text


def _shown(paper: str) -> list:
    """Return the names of the experiments whose claims a page shows."""
    named = []
    for row in page_words()[paper]["claims"]:
        named += [check[0] for check in row["checks"]]
        named += re.findall(r"{(?:verdict|judged): (\w+)", row.get("note", ""))
    return [name for name in dict.fromkeys(named) if name]


def commands(paper: str) -> str:
    """Return the experiments that the claims of a page rest on, with their hours."""
    each = []
    for name in _shown(paper):
        one = experiment(paper, name)
        accelerators = sorted({of.device for of in one.lines.values()} - {"", "cpu"})
        facts = (
            f"{one.seconds / 3600:.2g} h" if one.seconds else "",
            *(f"partly on {device}" for device in accelerators),
        )
        if one.lines or one.tables:  # not claims on several experiments, nor without data
            hours = ", ".join(filter(None, facts))
            each.append(f"`{name}`" + (f" ({hours})" if hours else ""))
    return (
        "The claims above rest on these experiments. In brackets is the time of their runs, for "
        "some also of runs that were replaced, on one or two shared CPU cores if no other device "
        "is named. Experiments that have runs in common run them once. " + ", ".join(each) + "."
    )


def pictures(paper: str) -> str:
    """Return the picture of a page with its caption; the others are on the long page."""
    return _pictures(page_words()[paper]["pictures"][:1], paper)


def _pictures(chosen: list, paper: str) -> str:
    out = []
    for told in chosen:
        path = told.get("path") or f"../pictures/{_file(paper, told)}.png"
        out.append(f"![{told['alt']}]({path})<br>*{quoted(told['caption'], paper)}*")
    return "\n\n".join(out)


def _file(paper: str, told: dict) -> str:
    return f"{paper}_{told['file']}"


def drawn_pictures() -> list:
    """Return (file name, entry of stories.toml, how to read a line) of each picture drawn here."""
    return [
        (_file(paper, told), told, functools.partial(line, paper))
        for paper in PAPERS
        for told in page_words()[paper]["pictures"]
        if "file" in told
    ]


def summary() -> str:
    """Return what each paper proposes, and what we found about its privacy, for the front page."""
    out = []
    for paper in PAPERS:
        words = page_words()[paper]
        proposes, privacy = (quoted(words[k], paper) for k in ("proposes", "privacy"))
        out.append(f"**[{words['name']}]({paper}.md).** {proposes} *Privacy:* {privacy}")
    return "\n\n".join(out)


def overview() -> str:
    """Return the table of all papers, for the front page."""
    heads = ["paper", "main claim", "claims checked", "hold", "contradicted", "not reproduced"]
    heads += ["undecided", "no difference", "cannot be checked", "ε claimed → proved"]
    rows = []
    for paper in PAPERS:
        words = page_words()[paper]
        given = list(results.statements(stored(paper).parts()).values())
        first = _epsilon_row(paper, next(row for row in words["epsilon"] if row.get("front")))
        name = f"[{words['name'].split(':')[0]}]({paper}.md)"
        numbers = [str(given.count(word)) for word in results.VERDICTS]
        rows.append((name, words["claim"], str(len(given)), *numbers, f"{first[5]} → {first[7]}"))
    return _table(heads, rows)


def _table(heads, rows) -> str:
    """Return a Markdown table; a column of integers is aligned to the right."""
    number = [all(re.fullmatch(r"\d+", row[i]) for row in rows) for i in range(len(heads))]
    rule = "".join("---:|" if is_number else "---|" for is_number in number)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heads, *rows]).replace(
        "\n", f"\n|{rule}\n", 1
    )


OF_PAPERS = dict(
    short=short,
    claims=claims,
    epsilons=epsilons,
    pictures=pictures,
    printed=printed_line,
)
OF_FRONT = dict(summary=summary, overview=overview)


def region(page: str, name: str) -> str:
    """Return the content of a region: one of OF_PAPERS or OF_FRONT, or a text of stories.toml."""
    if page == "index":
        return _named(OF_FRONT, name, "a region", f"docs/papers/{page}.md")()
    texts = page_words()[page].get("texts", {})
    if name in texts:
        return quoted(texts[name].strip(), page)
    return _named(OF_PAPERS, name, "a region or text", f"docs/papers/{page}.md")(page)


def filled(page: str, text: str) -> str:
    """Return a page with the content of its regions replaced."""

    def made(match):
        inside = region(page, match[2])
        # mkdocs reads a table or list that follows a line directly as text.
        space = "\n" if inside.startswith(("|", "- ")) else ""
        return f"{match[1]}{space}{inside}\n{space}{match[4]}"

    return REGION.sub(made, text)


# --- what is stored


@functools.cache
def page_words() -> dict:
    """Return the hand-written words of the pages, by paper."""
    return tomllib.loads(WORDS.read_text())


@functools.cache
def stored(name: str) -> results.Experiment:
    """Return a file of results."""
    return results.read(STORED / f"{name}.json")


def _named(options: dict, name: str, what: str, where: str):
    if name not in options:
        checks.fail(where, f"{what} that is there", repr(name), FIX)
    return options[name]


def experiment(paper: str, name: str) -> results.Experiment:
    """Return an experiment of a paper; "" is the file itself, for claims on several."""
    where = f"stories.toml: {paper}"
    whole = stored(paper)
    return _named(whole.experiments, name, "an experiment", where) if name else whole


def line(paper: str, name: str, of: str) -> results.Line:
    """Return a line of an experiment."""
    return _named(experiment(paper, name).lines, of, "a line", f"stories.toml: {paper}: {name}")


def verdict(paper: str, name: str, claim: str) -> results.Verdict:
    """Return the stored verdict on a claim."""
    found = {v.claim: v for v in experiment(paper, name).verdicts}
    return _named(found, claim, "a claim", f"stories.toml: {paper}: {name or 'of several'}")


def audit(of: str) -> results.Point:
    """Return a row of the study of audits."""
    points = {p.line: p for p in stored("study_audit").points}
    return _named(points, of, "a row", "stories.toml: study_audit")


# --- numbers as text


def epsilon(value: float | None) -> str:
    """Format an epsilon; None means that nothing is proved."""
    if value is None:
        return "nothing"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def measured(of: results.Verdict, unit: str, part: slice = slice(None)) -> str:
    """Return the means and half intervals that a verdict rests on, and the number of seeds.

    Args:
        of: the verdict.
        unit: "points" of accuracy, RATIO, or another unit of the comparisons.
        part: which of the comparisons.
    """
    means, count = _means(of)
    if not means:
        seen = re.sub(r"(?<!\w)-(?=\d)", "−", shown(_shortened(of.seen)))
        return _cell(seen) or "computed again"
    informative = ""
    if below := BELOW_START.search(of.seen):
        often = f"informative at {below[1]} of {below[2]}"
        informative = "; never informative" if below[1] == "0" else f"; {often}"
    return _cell(_listed(means[part], unit) + informative + count)


def measured_together(of: list[results.Verdict], unit: str) -> str:
    """Return the means that several checks of one claim rest on, or their range."""
    return _cell(_listed([m for v in of for m in _means(v)[0]], unit))


def _means(of: results.Verdict) -> tuple[list, str]:
    """Return (mean, half interval) pairs of a verdict, and " (n seeds)"."""
    found = JUDGED.match(of.seen)
    means = MEAN.findall(found["all"]) if found else []
    if exact := BOUND.fullmatch(of.seen):
        means = [(f"{float(exact[1]) - float(exact[2]):.3f}", "")]
    return means, f" ({found['seeds']})" if found else ""


def _listed(means: list, unit: str) -> str:
    """List means with half intervals: each of them, or the range of more than MAX_LISTED."""
    scale, digits = (100, 1) if unit == "points" else (1, 3)
    sign = "" if unit == RATIO else "+"

    def half(width, more=0):
        shown = f"{scale * float(width):.{2 + more}g}"
        return f"{float(shown):.0f}" if "e+" in shown else shown

    def number(mean, more=0):
        value = round(scale * float(mean), digits + more)
        return f"{value:{sign}.{digits + more}f}".replace("-", "−") if value else f"{0:.{digits}f}"

    def pair(mean, width):
        more = len(mean.partition(".")[2]) - NUM_DECIMALS
        return number(mean, more) + (f" ± {half(width, more)}" if width else "")

    if len(means) <= MAX_LISTED:
        shown = ", ".join(pair(*m) for m in means)
    else:
        ends = sorted(float(m) for m, _ in means)
        widest = max((float(h) for _, h in means if h), default=None)
        if unit == RATIO and ends[-1] < 0.5 / 10**digits:
            return f"below {0.5 / 10**digits} {unit} in all {len(means)} checks"
        low = float(number(ends[0]).replace("−", "-"))
        first = "at most " if unit == RATIO and not low else f"{number(ends[0])} to "
        shown = first + number(ends[-1])
        shown += f", ± {half(widest)}" if widest else ""
    return f"{shown} {unit}".rstrip()


def _shortened(text: str) -> str:
    """Shorten a long text to what stands before its first colon, or to whole words."""
    if len(text) <= MAX_SEEN_CHARACTERS:
        return text
    cut = text[: text.find(": ", 0, MAX_SEEN_CHARACTERS)] if ": " in text else ""
    return cut or text[:MAX_SEEN_CHARACTERS].rsplit(" ", 1)[0].rstrip(",;") + " …"


def _cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return re.sub(r"([|*_])", r"\\\1", text)


def reason(of: results.Experiment, given: results.Verdict) -> str:
    """Return why a claim cannot be checked."""
    missing = verdicts.NOT_RUN in given.seen
    if "at chance: " in given.seen and not (of.unread and missing):
        return "the accuracy of a method is at chance"
    if of.unread:
        return shown("no data: " + ", ".join(of.unread))
    if re.search(r"not run|(pairs|lines) run", given.seen):
        return "not all of its methods and settings were run"
    return shown(_shortened(given.seen))


# --- quotes


def quoted(text: str, paper: str) -> str:
    """Replace the {quotes} of a text with stored numbers."""

    def value(match):
        kind, parts = match[1], [part.strip() for part in match[2].split(" | ")]
        if kind not in QUOTES:
            checks.fail(f"stories.toml: {paper}", f"one of {', '.join(QUOTES)}", kind, FIX)
        return QUOTES[kind](paper, *parts)

    return PLACE.sub(value, text)


def _most(paper, name, start):
    means = [one.mean for of, one in experiment(paper, name).lines.items() if of.startswith(start)]
    return f"{max(mean for mean in means if mean is not None):.3f}"


def _judged(paper, name, claim):
    given = verdict(paper, name, claim)
    return f"*{given.verdict}*{_means(given)[1]}"


def _same(paper, name, claim, other, other_claim):
    one, two = (verdict(paper, *of).verdict for of in ((name, claim), (other, other_claim)))
    if one != two:
        checks.fail(f"stories.toml: {paper}", "two claims with one verdict", f"{one}, {two}", FIX)
    return one


def _points(paper, name, one, less):
    more: Any = line(paper, name, one).mean
    gap = 100 * (more - line(paper, name, less).mean)
    return f"{gap:+.1f}".replace("-", "−")


def _gain(paper, name, one, less):
    seeds = experiment(paper, name).seeds
    lines = {n: stored_line(line(paper, name, n), seeds) for n in (one, less)}
    gap = verdicts.difference(lines, one, less)
    if gap.values is None or gap.freedom < 1 or any(each.failed for each in lines.values()):
        checks.fail(
            f"stories.toml: {name}", "two seeds that both lines ended with", f"{one}, {less}", FIX
        )
    half = gap.interval(verdicts.WRONG)[1] - gap.mean
    shown = _listed(MEAN.findall(verdicts.mean_and_half(gap.mean, half)), "points")
    return shown.removesuffix(" points")


def _constant(of: results.Verdict) -> str:
    found = re.search(r"would have to be ([\d.]+) or more", of.seen)
    if not found and of.verdict != HOLDS:
        checks.fail("stories.toml", "a theorem up to a constant", of.claim, FIX)
    return found[1] if found else "1"


def _distance(of: results.Verdict) -> str:
    found = [abs(float(v)) for v in re.findall(r": ([+-]\d+\.\d+)", of.seen)]
    if not found:
        checks.fail("stories.toml", "values next to printed ones", of.claim, FIX)
    word = SHORT.get(of.verdict, of.verdict)
    return f"{sum(found) / len(found):.2f} ({word})"


def _table_cell(paper, name, row, column):
    for table in experiment(paper, name).tables:
        for cells in table.rows:
            if column in table.columns and " ".join(map(str, cells)).startswith(row):
                found = str(cells[table.columns.index(column)])
                return epsilon(float(found)) if re.fullmatch(r"[\d.e+]+", found) else found
    return _named({}, f"{row}, {column}", "a row and column", f"stories.toml: {paper}: {name}")


def _column(paper, name, of, heading):
    found = _named(line(paper, name, of).columns, heading, "a column", f"stories.toml: {of}")
    if not isinstance(found, results.Spread):
        return f"{found:.3g}"
    half = "" if found.half is None else f" ± {found.half:.3f}"
    return f"{found.mean:+.3f}{half}".replace("-", "−")


QUOTES = dict(
    accuracy=lambda paper, name, of: f"{line(paper, name, of).mean:.3f}",
    claimed=lambda paper, name, of: epsilon(line(paper, name, of).epsilon_claimed),
    proved=lambda paper, name, of: epsilon(line(paper, name, of).epsilon_proved),
    most=_most,
    points=_points,
    gain=_gain,
    verdict=lambda paper, name, *claim: verdict(paper, name, " | ".join(claim)).verdict,
    judged=_judged,
    same=_same,
    constant=lambda paper, name, *claim: _constant(verdict(paper, name, " | ".join(claim))),
    distance=lambda paper, name, claim: _distance(verdict(paper, name, claim)),
    audited=lambda paper, of: epsilon(audit(of).audited),
    cell=_table_cell,
    column=_column,
)


def main():
    for page in (*PAPERS, "index"):
        file = FOLDER / f"{page}.md"
        file.write_text(filled(page, file.read_text()))
    for paper in PAPERS:
        (STORED / f"{paper}.md").write_text(long_page(paper))
    for each in drawn_pictures():
        story_pictures.write(*each)


if __name__ == "__main__":
    main()
