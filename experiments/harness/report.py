"""Write one page of experiments: the verdicts on claims, and how far lines lie apart.

    python -m experiments.harness.report experiments/results/li2025.json --out li2025.html

The page takes files of results, and folders of experiments that hold one.  Nothing is computed
again.  FILE.md is written next to the page.
"""

import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import tyro

from jfl.core import checks
from jfl.report import document, page, read, sections
from jfl.report.document import Card, Document, Fold, Items, Section, Table, Text
from jfl.report.sections import OUTSIDE, number_columns, text_columns
from jfl.runs.statistics import PLUS_MINUS, plus_minus

from . import results
from .results import Experiment

QUICK = "A quick run at small settings: it shows that the experiment works, and has no findings."
CLAIMED_HOLDS = (
    "The accuracies include those of lines without noise. Claimed ε holds: the number of lines "
    "with a claimed ε whose proved ε is not larger; for the others a larger ε is proved, or none. "
    "Minutes: the time of all runs, on the machine that ran them."
)
SPREADS = (
    f"Below, {PLUS_MINUS} If a file has too little for an interval, a separate column has the "
    "standard deviation over seeds. In a paper's values ± means what the paper says."
)
PROMISE = ("delta", "unit", "adjacency", "view", "method", "status")
ALL_VERDICTS = (*results.VERDICTS[:-1], *results.STUDIED)
COUNTED = dict(
    paper="Claims that were checked",
    ours="Our own statements, for example about audits and the mode sound",
)
MARKS = {
    "confirmed": "good",
    "not confirmed": "bad",
    "cannot be checked": "open",
} | document.MARKS


class Source(NamedTuple):
    """The experiments of one file; the first of a collection is the collection itself."""

    label: str
    experiments: list[Experiment]


def read_source(path, label: str | None = None) -> Source:
    """Read a file of results, or the results.json of a folder.

    Raises:
        ValueError: naming the file, if no experiment wrote it or it is incomplete.
    """
    path = Path(path)
    file = path / "results.json" if path.is_dir() else path
    if not file.exists():
        checks.fail(
            "report",
            "files of results, or folders of finished experiments",
            f"no {file}",
            "Run the experiment again: finished runs are kept. For a run of jfl, use jfl report.",
        )
    return Source(label or read.default_label(path), results.read(file).parts())


def assemble(sources: list[Source]) -> Document:
    """Return the document of some experiments.

    Args:
        sources: from `read_source`, in the order of the page.
    """
    several = len(sources) > 1
    found = []
    if sum(len(s.experiments) for s in sources) > 1:
        found.append(Section("What holds", [Text(OUTSIDE), *_overview(sources)]))
    found += [Section(f"Claims: {s.label}" if several else "Claims", _source(s)) for s in sources]
    every = [e for s in sources for e in s.experiments]
    versions = sections.versions([facts for s in sources for facts in _versions(s)])
    found.append(Section("Versions and devices", versions))
    if commands := [_command(e) for e in every if e.module]:
        found.append(Section("How to run it again", sections.commands(commands)))
    kinds = [
        f"a collection of {len(s.experiments) - 1} experiments"
        if len(s.experiments) > 1
        else "a study"
        if s.experiments[0].points
        else "an experiment"
        for s in sources
    ]
    origins = [f"{s.label} ({kind})" for s, kind in zip(sources, kinds)]
    title = "jfl report: " + ", ".join(s.label for s in sources)
    return Document(title, "From " + "; ".join(origins) + ".", found, _cards(every))


def _versions(source: Source) -> list[tuple[str, dict]]:
    found = []
    for e in source.experiments:
        if e.versions:
            name = f"{source.label}: {e.name}" if e.name and len(source.experiments) > 1 else ""
            # These are long, and almost always the same.  The JSON file has them.
            hidden = ("settings", "features", "platform", "processes")
            shown = {k: v for k, v in e.versions.items() if k not in hidden}
            facts = dict(versions=shown) | ({"seeds": e.seeds} if e.seeds else {})
            found.append((name or source.label, facts))
    return found


def _command(e: Experiment) -> str:
    """Return the command that runs an experiment again."""
    module = "studies" if e.module == "studies" else f"papers {shlex.quote(e.module)}"
    quick = " --quick" if e.quick else ""
    only = " --lines " + " ".join(map(shlex.quote, e.only)) if e.only else ""
    return f"python -m experiments.{module} {shlex.quote(e.name)}{quick}{only} --out NEW"


def _cards(experiments: list[Experiment]) -> list[Card]:
    """Return cards that count the claims that were checked and the claimed epsilons that hold."""
    counts = _counted([v.verdict for e in experiments for v in e.verdicts])
    pairs = [
        (line.epsilon_claimed, line.epsilon_proved)
        for e in experiments
        for line in e.lines.values()
    ]
    pairs += [(p.claimed, p.epsilon) for e in experiments for p in e.points]
    pairs = [(claimed, proved) for claimed, proved in pairs if claimed is not None]
    cards = []
    if counts:
        facts = [(verdict, str(count)) for verdict, count in counts.items()]
        parts = list(counts.items())
        cards.append(Card("Claims checked", str(sum(counts.values())), facts, parts=parts))
    if pairs:
        held = sum(proved is not None and proved <= claimed for claimed, proved in pairs)
        cards.append(
            Card(
                "Claimed ε that hold",
                f"{held} of {len(pairs)}",
                notes=["For the others, a larger ε is proved, or none."],
                parts=[("confirmed", held), ("not confirmed", len(pairs) - held)],
            )
        )
    return cards


def _counted(verdicts: list[str]) -> dict[str, int]:
    """Return how often each verdict was given, in the same order on all pages."""
    order = [*MARKS, *verdicts]
    return {v: verdicts.count(v) for v in sorted(set(verdicts), key=order.index)}


def cell(value) -> str:
    """Return what a table shows of a value."""
    if isinstance(value, results.Spread):
        half = "" if value.half is None else f" ± {value.half:.2g}"
        return "" if value.mean is None else f"{value.mean:.4g}{half}"
    return sections.cell(value)


# --- all experiments


def _overview(sources: list[Source]) -> list:
    """Return tables of the verdicts of each source, and of the range of each experiment."""
    counts, ranges = {"paper": [], "ours": []}, []
    for source in sources:
        label = source.label + (" (quick)" if any(e.quick for e in source.experiments) else "")
        title = source.experiments[0].title
        for whose, rows in counts.items():
            checks = sum(v.whose == whose for e in source.experiments for v in e.verdicts)
            found = list(results.statements(source.experiments, whose).values())
            if whose == "paper" or found:
                rows.append((label, title, checks, len(found), *map(found.count, ALL_VERDICTS)))
        for experiment in source.experiments:
            if row := _range(experiment):
                single = len(source.experiments) == 1
                name = label if single else f"{source.label}: {experiment.name}"
                ranges.append((name, *row, _minutes(experiment)))
    blocks = []
    columns = [
        *text_columns("results", "of"),
        *number_columns("checks", "statements", *ALL_VERDICTS),
    ]
    for whose, caption in COUNTED.items():
        if any(count for _, _, count, *_ in counts[whose]):
            unused = [i for i, (name, _) in enumerate(columns) if _unused(name, i, counts[whose])]
            rows = [
                tuple(cell for i, cell in enumerate(row) if i not in unused)
                for row in counts[whose]
            ]
            blocks.append(
                Table(caption, [c for i, c in enumerate(columns) if i not in unused], rows)
            )
    if blocks and any(_by_rule(s.experiments) for s in sources):
        blocks.append(Text(results.RULE, quiet=True))
    if ranges:
        columns = [
            *text_columns("experiment"),
            *number_columns("lines"),
            *text_columns("least accurate", "most accurate"),
            *number_columns("points apart", "claimed ε holds", "minutes"),
        ]
        table = Table("Range of final test accuracy", columns, ranges)
        heading = f"Range of accuracy in each of {len(ranges)} experiments"
        blocks += [
            Fold(heading, [table, Text(CLAIMED_HOLDS, quiet=True)]),
            Text(SPREADS, quiet=True),
        ]
    return blocks


def _unused(name, column, rows) -> bool:
    """Return whether a column is of a verdict that none of these rows has."""
    return name in ALL_VERDICTS and not any(row[column] for row in rows)


def _by_rule(experiments) -> bool:
    """Return whether the verdicts follow results.RULE, and not the rule of a study."""
    return any(v.verdict not in results.STUDIED for e in experiments for v in e.verdicts)


def _range(experiment: Experiment) -> tuple | None:
    """Return the least and the most accurate line as cells; None for fewer than two lines."""
    lines, points = experiment.lines, experiment.points
    claiming = [p for p in points if p.claimed is not None]
    means = [(name, line.mean) for name, line in lines.items()]
    means += [(_point_name(p), p.mean) for p in points if p.claimed is None]
    means = [(name, mean) for name, mean in means if mean is not None]
    epsilons: list = [(line.epsilon_claimed, line.epsilon_proved) for line in lines.values()]
    epsilons = [pair for pair in epsilons if pair[0] is not None]
    epsilons += [(p.claimed, p.epsilon) for p in claiming]
    held = sum(proved is not None and proved <= claimed for claimed, proved in epsilons)
    holds = f"{held} of {len(epsilons)}" if epsilons else ""
    if len(means) < 2:
        return (len(points), "", "", "", holds) if points and holds else None
    least, most = (choose(means, key=lambda pair: pair[1]) for choose in (min, max))
    return (
        len(means),
        *(f"{mean:.3f}: {name}" for name, mean in (least, most)),
        f"{100 * (most[1] - least[1]):.1f}",
        holds,
    )


def _point_name(point: results.Point) -> str:
    return f"{point.panel}: {point.line}" + ("" if point.x is None else f" at {point.x:.4g}")


def _minutes(experiment: Experiment) -> str:
    return "" if experiment.seconds is None else f"{experiment.seconds / 60:.3g}"


def _source(source: Source) -> list:
    """Return the experiments of a source; a collection is folded except verdicts and pictures."""
    first, *others = source.experiments
    blocks: list = [Text(first.title)] if first.title else []
    if any(e.quick for e in source.experiments):
        blocks.append(Text(QUICK))
    if not others:
        notes = _notes(first.notes + first.missing())
        return [
            *blocks,
            *experiment_tables(first),
            *notes,
            *_verdicts([first]),
        ]
    blocks += _notes(first.notes + first.missing() + _missing(others))
    blocks += _counts(source.experiments)
    if verdicts := _verdicts(source.experiments):
        blocks.append(
            Fold(f"Each of its {len(verdicts[0].rows)} claims, and what was seen", verdicts)
        )
    for experiment in source.experiments:
        inner, heading = experiment_tables(experiment), "Facts of the collection"
        if experiment is not first:
            inner = _notes(experiment.notes + experiment.missing()) + inner
            heading = f"Numbers of {_full_name(experiment)}"
        if inner:
            blocks.append(Fold(heading + _effort(experiment), inner))
    return blocks


def _counts(experiments) -> list[Table]:
    """Return tables with the number of each verdict in each experiment."""
    captions = dict(paper="Its claims by experiment", ours="Our own statements by experiment")
    return [
        t for whose, caption in captions.items() for t in _counts_of(experiments, whose, caption)
    ]


def _counts_of(experiments, whose: str, caption: str) -> list[Table]:
    given = [
        (e.name, e.title, [v.verdict for v in e.verdicts if v.whose == whose]) for e in experiments
    ]
    given = [(name or "of several", title if name else "", v) for name, title, v in given if v]
    if not given:
        return []
    verdicts = list(_counted([v for _, _, found in given for v in found]))
    rows = [
        (name, title, len(v), *(v.count(k) or "" for k in verdicts)) for name, title, v in given
    ]
    columns = [*text_columns("experiment", "of"), *number_columns("checks", *verdicts)]
    return [sections.without_empty_columns(caption, columns, rows)]


def _missing(experiments) -> list[str]:
    """Return what experiments of a collection lack, each reason once."""
    names: dict = {}
    for experiment in experiments:
        for why in experiment.missing():
            names.setdefault(why, []).append(experiment.name)
    return [f"{why} ({', '.join(each)})" for why, each in names.items()]


def _full_name(experiment: Experiment) -> str:
    return ": ".join(filter(None, (experiment.name, experiment.title)))


def _effort(experiment: Experiment) -> str:
    """Return the seeds and the time of an experiment."""
    seeds, minutes = experiment.seeds, _minutes(experiment)
    words = [f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"] if seeds else []
    words += [f"{minutes} minutes"] if minutes else []
    return f" ({'; '.join(words)})" if words else ""


def _notes(notes: list[str]) -> list:
    return [Items(notes)] if len(notes) > 1 else [Text(note) for note in notes]


def _verdicts(experiments) -> list:
    blocks = []
    study = any(e.points for e in experiments)
    captions = dict(paper=f"The {'study' if study else 'paper'}'s claims, checked on these results")
    captions["ours"] = "Our own statements, checked on these results"
    for whose, caption in captions.items():
        rows = [
            (e.name if len(experiments) > 1 else "", v.claim, v.verdict, v.seen)
            for e in experiments
            for v in e.verdicts
            if v.whose == whose
        ]
        columns = text_columns("experiment", "claim", "verdict", "why: what was seen")
        if not any(name for name, *_ in rows):
            columns, rows = columns[1:], [row[1:] for row in rows]
        blocks += [Table(caption, columns, rows)] if rows else []
    return blocks


def experiment_tables(experiment: Experiment) -> list:
    """Return the tables of lines, points and other results, then the settings."""
    blocks: list = [_lines(experiment)] if experiment.lines or experiment.failed else []
    blocks += _points(experiment) if experiment.points else []
    for table in experiment.tables:
        right = [
            all(isinstance(row[i], (int, float, type(None))) for row in table.rows)
            for i in range(len(table.columns))
        ]
        if table.caption == results.NUMBERS:  # texts; all but the first are numbers
            right = [i > 0 for i in range(len(table.columns))]
        columns = list(zip(table.columns, right))
        blocks.append(Table(table.caption, columns, [[cell(v) for v in row] for row in table.rows]))
    if experiment.settings:
        rows = [(k, cell(v)) for k, v in experiment.settings.items()]
        table = Table("As the file gives them", text_columns("what", "value"), rows)
        blocks.append(Fold("Settings and facts", [table]))
    return blocks


def _lines(experiment: Experiment) -> Table:
    seeds = len(experiment.seeds) or None
    columns = {name: _line_columns(line) for name, line in experiment.lines.items()}
    if len({line.device for line in experiment.lines.values()}) > 1:
        for name, line in experiment.lines.items():
            columns[name]["device"] = line.device or "not stored"
    others = list(dict.fromkeys(heading for each in columns.values() for heading in each))
    rows = []
    for name, line in experiment.lines.items():
        spread = results.summary(line.accuracy)
        rows.append(
            (
                name,
                cell(line.paper),
                plus_minus(spread.mean, spread.half),
                cell(spread.std),
                cell(line.seed_count(seeds)),
                cell(line.epsilon_claimed),
                cell(line.epsilon_proved),
                *(cell(columns[name].get(heading)) for heading in others),
            )
        )
    for name in experiment.failed:
        if name not in experiment.lines:
            count = cell(results.Line(seeds=0, failed=seeds or 0).seed_count())
            rows.append((name, "", "", "", count, "", "", *("" for _ in others)))
    fixed = ("paper's figure", "ours", "std over seeds", "seeds", "claimed ε", "proved ε")
    # A claim without a proof is a finding, so that column stays even if it is empty.
    claims = any(line.epsilon_claimed is not None for line in experiment.lines.values())
    return sections.without_empty_columns(
        "Lines of the experiment, with ε in its view",
        [*text_columns("line"), *number_columns(*fixed, *others)],
        rows,
        keep=("proved ε",) if claims else (),
    )


def _line_columns(line: results.Line) -> dict:
    """Return heading -> another value of a line."""
    loss = results.summary(line.loss)
    out: dict = {} if loss.mean is None else {"loss": results.Spread(loss.mean)}
    if isinstance(line.loss, results.Spread):
        out = {"loss": loss}
    if line.seconds_per_round is not None:
        out["s/round"] = line.seconds_per_round
    for heading, value in line.columns.items():
        if isinstance(value, list):
            heading, value = f"{heading}, at the end", value[-1] if value else None
        out[heading] = value
    return out


def _points(experiment: Experiment) -> list:
    points, caveats = experiment.points, {}
    claims = any((p.claimed, p.audited) != (None, None) for p in points)
    columns = [
        *text_columns("panel", "line"),
        *number_columns(experiment.xlabel or "x", "accuracy", "seeds", "failed"),
        *text_columns("chosen"),
        *number_columns("stated ε", "claimed ε", "audited ε", "at most", "proved ε"),
        *((k.replace("delta", "δ"), k == "delta") for k in PROMISE),
        *text_columns("caveats"),
    ]
    rows = []
    for point in points:
        trained = (cell(point.x), plus_minus(point.mean, point.half), str(len(point.values)))
        rows.append(
            (
                point.panel,
                point.line,
                *(("", "", "") if claims else trained),
                cell(point.failed or None),
                ", ".join(f"{k} = {cell(v)}" for k, v in point.chosen.items()),
                cell(point.stated),
                cell(point.claimed),
                cell(point.audited),
                cell(point.ceiling),
                cell(point.epsilon) or "none",
                *(cell(getattr(point, k)).replace("_", " ") for k in PROMISE),
                sections.number_caveats(point.caveats or (), caveats),
            )
        )
    caption = "Points of the study, each with the guarantee of its runs"
    blocks: list = [sections.without_empty_columns(caption, columns, rows)]
    if caveats:
        items = Items(list(caveats), numbered=True)
        blocks.append(Fold("Caveats, by the numbers in the last column", [items]))
    return blocks


def write(paths, out: Path | None = None) -> str:
    """Write the page of some folders or files.

    Args:
        paths: folders of experiments, and files of results.
        out: FILE.html; None: report.html in the folder of one path, or the name of the file.

    Returns:
        The paths that were written, in words.
    """
    labels = page.labels(paths)
    sources = [read_source(path, label) for path, label in zip(paths, labels, strict=True)]
    out = page.default_out(paths[0]) if out is None else Path(out)
    return page.render(assemble(sources), out, MARKS).save()


def main(argv=None) -> int:
    def command(paths: tyro.conf.Positional[tuple[Path, ...]], out: Path | None = None) -> None:
        """Write one page of experiments.

        Args:
            paths: folders of experiments, and files of results.
            out: the page, FILE.html.
        """
        if not paths:
            raise SystemExit("expected at least one folder or file of results, but got none")
        try:
            print(write(paths, out))
        except ValueError as error:
            raise SystemExit(str(error)) from None

    tyro.cli(command, args=argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
