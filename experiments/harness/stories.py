"""The generated parts of docs/papers: verdicts, numbers, counts, epsilons and pictures, from the
results that are stored.

    python -m experiments.harness.stories        # writes docs/papers and docs/pictures

A page has marked regions, `<!-- stories: claims -->` to `<!-- end of claims -->`, and what lies
between them is made here.  The rest is written by hand and quotes no result.  Which claims a page
shows, and in which words, stands in docs/site/stories.toml.  Words there quote numbers:

    {accuracy: EXPERIMENT | LINE}       mean over seeds; likewise claimed, proved (epsilons)
    {points: EXPERIMENT | LINE | LESS}  how many points of accuracy the first line ends above
    {gain: EXPERIMENT | LINE | LESS}    the same over the seeds that both lines have, with half of a
                                        95 % interval
    {verdict: EXPERIMENT | CLAIM}       as stored; {measured: EXPERIMENT | CLAIM} what was seen
    {distance: EXPERIMENT | CLAIM}      how far from what is printed its values are, on average, and
                                        the verdict
    {constant: EXPERIMENT | CLAIM}      that a theorem up to a constant takes
    {audited: LINE}                     of the study of audits; likewise {refutable: LINE}
    {cell: EXPERIMENT | ROW | COLUMN}   of its tables, the row that begins with ROW
    {column: EXPERIMENT | LINE | COLUMN}  what else is stored of a line, with its 95 % interval

What is named and is not there any more is an error that says where.
"""

import functools
import re
import tomllib
from pathlib import Path
from typing import Any

from jfl.core import checks

from . import results, story_pictures, verdicts
from .results import PAPERS
from .runner import stored_line

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "papers"
WORDS = ROOT / "docs" / "site" / "stories.toml"
STORED = ROOT / "experiments" / "results"
HOLDS, CONTRADICTED, NOT_REPRODUCED, UNDECIDED, UNKNOWN = results.VERDICTS
REGION = re.compile(r"(<!-- stories: ([\w ]+) -->\n)(.*?)(<!-- end of \2 -->)", re.S)
PLACE = re.compile(r"\{(\w+): ([^{}]+)\}")
# means and half intervals, as experiments.harness.verdicts writes them, and how many seeds
JUDGED = re.compile(
    r"(?:^|.*; )(?P<all>[^;]+) \((?:[\d.]+ % intervals, )?(?P<seeds>\d+ seeds|one seed)"
)
MEAN = re.compile(r"([+-]\d+\.\d{3,})(?: ± ([\d.]+(?:e[+-]?\d+)?))?")
# of a theorem, as experiments.harness.theorems writes
BELOW_START = re.compile(r"is below the start at \d+ of [^;]*")
DECIMALS = 3  # of such a mean, where more do not matter
RISES = "which rises by"  # in what verdicts.grows writes
MANY = 3  # so many comparisons are shown one by one
RATIO = "of the bound"  # the unit of what was measured, over a bound
LONG = 170  # characters of what was seen that a cell shows
FIX = "Correct docs/site/stories.toml, or collect the result that it names."


# --- what is stored


@functools.cache
def words() -> dict:
    """What is written by hand: the words of the pages, by paper."""
    return tomllib.loads(WORDS.read_text())


@functools.cache
def stored(name: str) -> results.Experiment:
    """A file of results."""
    return results.read(STORED / f"{name}.json")


def _named(options: dict, name: str, what: str, where: str):
    """What has this name."""
    if name not in options:
        checks.fail(where, f"{what} that is there", repr(name), FIX)
    return options[name]


def experiment(paper: str, name: str) -> results.Experiment:
    """One of a paper's experiments; "": its file itself, for claims of several."""
    where = f"stories.toml: {paper}"
    whole = stored(paper)
    return _named(whole.experiments, name, "an experiment", where) if name else whole


def line(paper: str, name: str, of: str) -> results.Line:
    return _named(experiment(paper, name).lines, of, "a line", f"stories.toml: {paper}: {name}")


def verdict(paper: str, name: str, claim: str) -> results.Verdict:
    """What is stored of a claim."""
    found = {v.claim: v for v in experiment(paper, name).verdicts}
    return _named(found, claim, "a claim", f"stories.toml: {paper}: {name or 'of several'}")


def audit(of: str) -> results.Point:
    """A row of the study of audits."""
    points = {p.line: p for p in stored("study_audit").points}
    return _named(points, of, "a row", "stories.toml: study_audit")


# --- numbers in words


def epsilon(value: float | None) -> str:
    if value is None:
        return "nothing"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def measured(of: results.Verdict, unit: str) -> str:
    """What a verdict rests on: means and half intervals where it was judged by them.

    Args:
        of: the verdict.
        unit: "points" of accuracy, or what the comparisons are of.
    """
    means, count = _means(of)
    if not means:
        return _cell(_short(of.seen)) or "computed"
    shown = f"{_listed(means, unit, RISES in of.seen)} {unit}".rstrip()
    below = BELOW_START.search(of.seen)
    return _cell(shown + count + (f"; {below[0]}" if below else ""))


def together(of: list[results.Verdict], unit: str) -> str:
    """What several checks of one statement rest on: where their means lie."""
    (rises, *other) = {RISES in v.seen for v in of}
    if other:
        checks.fail("stories.toml", "checks of one kind", "some of how a gain rises", FIX)
    every = [_means(v) for v in of]
    means = [m for each, _ in every for m in each]
    if not means:
        return _cell("; ".join(dict.fromkeys(_short(v.seen) for v in of)))
    (count, *others) = dict.fromkeys(count for _, count in every)
    return _cell(f"{_listed(means, unit, rises)} {unit}" + ("" if others else count))


def _means(of: results.Verdict) -> tuple[list, str]:
    """Means and half intervals that a verdict rests on, and of how many seeds, in words."""
    found = JUDGED.match(of.seen)
    means = MEAN.findall(found["all"]) if found else []
    return means, f" ({found['seeds']})" if found else ""


def _listed(means: list, unit: str, rises: bool) -> str:
    """Means with half intervals: each, or where they lie if they are many; of a RATIO without a
    sign."""
    scale, digits = (100, 1) if unit == "points" else (1, 3)
    sign, several = ("", "values") if unit == RATIO else ("+", "rises" if rises else "differences")
    half = lambda width, more=0: f"{scale * float(width):.{2 + more}g}"

    def number(mean, more=0):
        value = round(scale * float(mean), digits + more)
        return f"{value:{sign}.{digits + more}f}".replace("-", "−") if value else f"{0:.{digits}f}"

    def pair(mean, width):
        more = len(mean.partition(".")[2]) - DECIMALS
        return number(mean, more) + (f" ± {half(width, more)}" if width else "")

    if len(means) <= MANY:
        each = ", ".join(pair(*m) for m in means)
        return f"rises by {each}" if rises else each
    ends = sorted(float(m) for m, _ in means)
    widest = max((float(h) for _, h in means if h), default=None)
    shown = f"{len(means)} {several}, {number(ends[0])} to {number(ends[-1])}"
    return shown + (f", ± up to {half(widest)}" if widest else "")


def _short(text: str, most: int = LONG) -> str:
    if len(text) <= most:
        return text
    return text[:most].rsplit(" ", 1)[0].rstrip(",;") + " …"


def _cell(text: str) -> str:
    """Text as a cell of a Markdown table."""
    return re.sub(r"([|*_])", r"\\\1", text)


def reason(of: results.Experiment, given: results.Verdict) -> str:
    """Why a claim cannot be checked."""
    if of.unread:
        return "data not at hand: " + ", ".join(of.unread)
    if re.search(r"not run|(pairs|lines) run", given.seen):
        return "not all of its lines were run"
    return _short(given.seen)


def quoted(text: str, paper: str) -> str:
    """Words with the numbers that they name."""

    def value(match):
        kind, parts = match[1], [part.strip() for part in match[2].split(" | ")]
        if kind not in QUOTES:
            checks.fail(f"stories.toml: {paper}", f"one of {', '.join(QUOTES)}", kind, FIX)
        return QUOTES[kind](paper, *parts)

    return PLACE.sub(value, text)


def _points(paper, name, one, less):
    more: Any = line(paper, name, one).mean
    gap = 100 * (more - line(paper, name, less).mean)
    return f"{gap:+.1f}".replace("-", "−")


def _gain(paper, name, one, less):
    """By how many points a line ends above another over the seeds that both have, with half of a
    95 % interval."""
    seeds = experiment(paper, name).seeds
    lines = {n: stored_line(line(paper, name, n), seeds) for n in (one, less)}
    gap = verdicts.difference(lines, one, less)
    if gap.values is None or gap.freedom < 1 or any(each.failed for each in lines.values()):
        checks.fail(
            f"stories.toml: {name}", "two seeds that both lines ended with", f"{one}, {less}", FIX
        )
    half = gap.interval(verdicts.WRONG)[1] - gap.mean
    return _listed(MEAN.findall(verdicts.mean_and_half(gap.mean, half)), "points", False)


def _constant(of: results.Verdict) -> str:
    """The constant that a theorem up to a constant takes; 1 where it holds."""
    found = re.search(r"would have to be ([\d.]+) or more", of.seen)
    if not found and of.verdict != HOLDS:
        checks.fail("stories.toml", "a theorem up to a constant", of.claim, FIX)
    return found[1] if found else "1"


def _distance(of: results.Verdict) -> str:
    """The mean distance of values from printed ones, as `verdicts.near_printed` compares them."""
    found = [abs(float(v)) for v in re.findall(r": ([+-]\d+\.\d+)", of.seen)]
    if not found:
        checks.fail("stories.toml", "values beside printed ones", of.claim, FIX)
    return f"{sum(found) / len(found):.2f} ({of.verdict})"


def _table_cell(paper, name, row, column):
    for table in experiment(paper, name).tables:
        for cells in table.rows:
            if column in table.columns and " ".join(map(str, cells)).startswith(row):
                found = str(cells[table.columns.index(column)])
                return epsilon(float(found)) if re.fullmatch(r"[\d.e+]+", found) else found
    return _named({}, f"{row}, {column}", "a row and column", f"stories.toml: {paper}: {name}")


def _column(paper, name, of, heading):
    """A column of a line: a number, or a mean and half of its interval."""
    found = _named(line(paper, name, of).columns, heading, "a column", f"stories.toml: {of}")
    if not isinstance(found, results.Spread):
        return f"{found:g}"
    half = "" if found.half is None else f" ± {found.half:.3f}"
    return f"{found.mean:+.3f}{half}".replace("-", "−")


QUOTES = dict(
    accuracy=lambda paper, name, of: f"{line(paper, name, of).mean:.3f}",
    claimed=lambda paper, name, of: epsilon(line(paper, name, of).epsilon_claimed),
    proved=lambda paper, name, of: epsilon(line(paper, name, of).epsilon_proved),
    points=_points,
    gain=_gain,
    verdict=lambda paper, name, *claim: verdict(paper, name, " | ".join(claim)).verdict,
    measured=lambda paper, name, claim: measured(verdict(paper, name, claim), "points"),
    constant=lambda paper, name, *claim: _constant(verdict(paper, name, " | ".join(claim))),
    distance=lambda paper, name, claim: _distance(verdict(paper, name, claim)),
    audited=lambda paper, of: epsilon(audit(of).audited),
    refutable=lambda paper, of: epsilon(audit(of).ceiling),
    cell=_table_cell,
    column=_column,
)


# --- regions of a page


def claims(paper: str) -> str:
    """The claims that a page shows, each with its verdict and what was measured."""
    out = ["| the paper says | verdict | measured here |", "|---|---|---|"]
    for row in words()[paper]["claims"]:
        note = f" *{quoted(row['note'], paper)}*" if "note" in row else ""
        found = _checked(paper, row)
        head = f"| **{row['says']}.**{note} |"
        if [labels for labels in found.values() if labels]:
            out.append(f"{head} | |")
            head = "| {} |"
        out += [
            f"{head.format(_of_one_kind(labels))} {word} | {seen} |"
            for (word, seen), labels in found.items()
        ]
    return "\n".join(out)


def _of_one_kind(labels: list[str]) -> str:
    """Labels; those that differ in their last words alone share the others."""
    alike: dict[str, list[str]] = {}
    for label in labels:
        first, comma, last = label.rpartition(", ")
        alike.setdefault(first + comma or label, []).append(last)
    return "; ".join(
        first + " / ".join(lasts) if first.endswith(", ") else first
        for first, lasts in alike.items()
    )


def _checked(paper: str, row: dict) -> dict:
    """(verdict, what was measured) -> the labels of the checks that have them; of a row that says
    `together`, one for each verdict."""
    found: dict = {}
    alike: dict = {}  # verdict -> its checks, of which one line is made
    for name, claim, *label in row["checks"]:
        given = verdict(paper, name, claim)
        if row.get("together") and given.verdict != UNKNOWN:
            alike.setdefault(given.verdict, []).append((given, *label))
            continue
        if given.verdict == UNKNOWN:
            seen = _cell(reason(experiment(paper, name), given))
        else:
            seen = measured(given, row.get("unit", ""))
        found.setdefault((given.verdict, seen), []).extend(label)
    for word, several in alike.items():
        given, labels = map(list, zip(*several))
        found[word, together(given, row.get("unit", ""))] = labels
    return found


def counts(paper: str) -> str:
    """How many statements of a paper got which verdict."""
    given = list(results.statements(stored(paper).parts()).values())
    told = ", ".join(f"{given.count(word)} {_plural(word, given)}" for word in results.VERDICTS)
    whole = f"[all {len(given)} statements](../../experiments/results/papers.md)"
    return f"Of {whole} that our experiments take from the paper: {told}."


def _plural(word: str, given: list) -> str:
    many = given.count(word) != 1
    if word == HOLDS:
        return "hold" if many else "holds"
    if word == UNKNOWN:
        return word
    return f"{'are' if many else 'is'} {word}"


def epsilons(paper: str) -> str:
    """What is claimed, audited and proved."""
    heads = ("of", "unit", "adjacency", "view", "δ", "ε claimed", "ε audited", "ε proved")
    out = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    out += [
        f"| {' | '.join(cells)} |" for cells in map(functools.partial(_row, paper), _rows(paper))
    ]
    return "\n".join(out)


def _rows(paper: str) -> list:
    return words()[paper]["epsilon"]


def _row(paper: str, row: dict) -> tuple:
    """One row of `epsilons`: an audited plan, or a line of an experiment."""
    if "audit" in row:
        p: Any = audit(row["audit"])
        facts = (p.unit, p.adjacency, p.view, f"{p.delta:g}")
        seen = epsilon(p.audited) + (", refutes the claim" if p.audited > p.claimed else "")
        return (row["of"], *_plain(facts), epsilon(p.claimed), seen, epsilon(p.epsilon))
    one = line(paper, *row["line"])
    facts = (row["unit"], row["adjacency"], row["view"], row["delta"])
    claimed = "–" if one.epsilon_claimed is None else epsilon(one.epsilon_claimed)
    return (row["of"], *_plain(facts), claimed, "–", epsilon(one.epsilon_proved))


def _plain(facts: tuple) -> tuple:
    return tuple(fact.replace("_", " ") for fact in facts)


def missing(paper: str) -> str:
    """What it would take to check the rest."""
    why: dict = {}  # reason -> the experiment of each check
    for part in stored(paper).parts():
        for v in part.verdicts:
            if v.whose == "paper" and v.verdict == UNKNOWN:
                where = part.name if part is not stored(paper) else "of several"
                why.setdefault(reason(part, v), []).append(where)
    out = ["| what is missing | checks | where |", "|---|---:|---|"]
    for told, names in why.items():
        where = _cell(", ".join(dict.fromkeys(names)))
        out.append(f"| {_cell(told)} | {len(names)} | {where} |")
    open_ = [
        (part.name or "statements of several figures", int(seeds[1]))
        for part in stored(paper).parts()
        for v in part.verdicts
        if v.whose == "paper"
        and v.verdict == UNDECIDED
        and (seeds := re.search(r"(\d+) seeds", v.seen))
    ]
    for number in sorted({n for _, n in open_}):
        of = [name for name, n in open_ if n == number]
        told = _cell(", ".join(dict.fromkeys(of)))
        out.append(f"| undecided by {number} seeds: more of them | {len(of)} | {told} |")
    return "\n".join(out)


def notes(paper: str) -> str:
    """What the files say of the experiments that the page shows."""
    found: dict = {}  # note -> experiments
    for name in _shown(paper):
        for note in experiment(paper, name).notes:
            if note.split(":", 1)[0] in NOTES and not note.endswith(": nothing"):
                found.setdefault(note.removeprefix("Note: "), []).append(name)
    together: dict = {}  # experiments -> notes
    for note, names in found.items():
        together.setdefault(", ".join(names), []).append(note)
    return "\n".join(
        f"- {_cell(names)}: {_cell('. '.join(told))}." for names, told in together.items()
    )


NOTES = tuple(
    results.NOTES[key]
    for key in ("reduced", "differs", "draws", "not_tuned", "note", "at_edge", "stale")
)


def _shown(paper: str) -> list:
    """Names of the experiments whose claims a page shows."""
    named = []
    for row in words()[paper]["claims"]:
        named += [check[0] for check in row["checks"]]
        named += re.findall(r"{verdict: (\w+)", row.get("note", ""))
    return [name for name in dict.fromkeys(named) if name]


def commands(paper: str) -> str:
    """What the claims of the page rest on, and how long it took."""
    told = []
    for name in _shown(paper):
        one = experiment(paper, name)
        facts = (
            f"{len(one.lines)} lines" if one.lines else "",
            f"{len(one.seeds)} seeds" if one.seeds else "",
            f"{one.seconds / 3600:.2g} h" if one.seconds else "",
            *(f"partly on {device}" for device in _accelerators(one)),
        )
        if one.lines or one.tables:  # not claims on several, or on data that are not at hand
            told.append(f"`{name}` ({', '.join(filter(None, facts)) or 'computed'})")
    return (
        "The claims above rest on these experiments. Hours are of all seeds, on 2 shared CPU cores "
        "where no other device is named;"
        " figures share the runs that they have in common. " + ", ".join(told) + "."
    )


def _accelerators(of: results.Experiment) -> list[str]:
    """The devices of its lines that are no CPU."""
    return sorted({line.device for line in of.lines.values()} - {"", "cpu"})


def pictures(paper: str) -> str:
    """The pictures of a page, with their captions."""
    out = []
    for told in words()[paper]["pictures"]:
        path = told.get("path") or f"../pictures/{_file(paper, told)}.png"
        out.append(f"![{told['alt']}]({path})<br>*{quoted(told['caption'], paper)}*")
    return "\n\n".join(out)


def _file(paper: str, told: dict) -> str:
    return f"{paper}_{told['file']}"


def drawn() -> list:
    """(name of the file, what stories.toml says of it, how lines are read) of each own picture."""
    return [
        (_file(paper, told), told, functools.partial(line, paper))
        for paper in PAPERS
        for told in words()[paper]["pictures"]
        if "file" in told
    ]


def summary() -> str:
    """The papers in a few sentences each."""
    told = words()
    return "\n\n".join(
        f"**[{told[p]['name']}]({p}.md).** {quoted(told[p]['front'], p)}" for p in PAPERS
    )


def overview() -> str:
    """One table of all papers."""
    told = words()
    heads = ("paper", "what it claims", "statements", *results.VERDICTS, "ε claimed → proved")
    out = [f"| {' | '.join(heads)} |", "|---|---" + "|---:" * 6 + "|---|"]
    for paper in PAPERS:
        given = list(results.statements(stored(paper).parts()).values())
        first = _row(paper, next(r for r in _rows(paper) if r.get("front")))
        example = f"{first[5]} → {first[7]}"
        name = told[paper]["name"].split(":")[0]
        cells = (f"[{name}]({paper}.md)", told[paper]["claim"], str(len(given)))
        numbers = (str(given.count(word)) for word in results.VERDICTS)
        out.append(f"| {' | '.join((*cells, *numbers, example))} |")
    return "\n".join(out)


OF_PAPERS = dict(
    claims=claims,
    counts=counts,
    epsilons=epsilons,
    missing=missing,
    notes=notes,
    commands=commands,
    pictures=pictures,
)
OF_FRONT = dict(summary=summary, overview=overview)


def region(page: str, name: str) -> str:
    """What stands in a region of a page; a name beyond these is that of a text of stories.toml."""
    if page == "index":
        return _named(OF_FRONT, name, "a region", f"docs/papers/{page}.md")()
    texts = words()[page].get("texts", {})
    if name in texts:
        return quoted(texts[name].strip(), page)
    return _named(OF_PAPERS, name, "a region or text", f"docs/papers/{page}.md")(page)


def filled(page: str, text: str) -> str:
    """A page with its regions made anew."""

    def made(match):
        inside = region(page, match[2])
        # a table or a list that follows a line at once is text to mkdocs
        space = "\n" if inside.startswith(("|", "- ")) else ""
        return f"{match[1]}{space}{inside}\n{space}{match[4]}"

    return REGION.sub(made, text)


def main():
    for page in (*PAPERS, "index"):
        file = FOLDER / f"{page}.md"
        file.write_text(filled(page, file.read_text()))
    for each in drawn():
        story_pictures.write(*each)


if __name__ == "__main__":
    main()
