"""Write one page of experiments: the verdicts on claims, and how far lines lie apart.

    python -m experiments.harness.report experiments/results/li2025.json --out li2025.html

The page takes folders of experiments, and files of their results.  Nothing is computed again.
FILE.md and FILE_files are written next to the page.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import tyro

from jfl.core import checks
from jfl.report import document, headline, page, plots, read, sections
from jfl.report.document import Card, Document, Fold, Items, Picture, Section, Table, Text
from jfl.report.headline import PROMISE as COMPARED
from jfl.report.headline import Candidate
from jfl.report.sections import OUTSIDE, number_columns, text_columns
from jfl.runs.statistics import PLUS_MINUS, plus_minus

from . import pictures, results
from .results import Experiment

QUICK = "A quick run at small settings: it shows that the experiment works, and has no findings."
CLAIMED_HOLDS = (
    "Claimed ε holds: how many lines with a claimed ε have a proved ε that is not larger; for the "
    "others a larger ε is proved, or none. Lines without noise are compared as well. "
    "Minutes: of all runs, on the machine that ran them."
)
SPREADS = (
    f"Below, {PLUS_MINUS} If a file has too little for an interval, a separate column has the "
    "standard deviation over seeds. In a paper's values ± means what the paper says."
)
STUDY_WORDS = (
    "Means over seeds with 95 % intervals as bands; dashed lines have no noise, horizontal ones do "
    "not depend on the axis."
)
AUDIT_WORDS = (
    "What an attack refutes of each plan, next to the claimed and the proved ε. A claim left of "
    "the dot is too small."
)
CLAIMS_WORDS = (
    "Proved against claimed ε: on the dotted line they are equal, above it the claim is too small."
)
PROMISE = ("delta", "unit", "adjacency", "view", "method", "status")
ALL_VERDICTS = (*results.VERDICTS[:-1], *results.STUDIED)
COUNTED = dict(
    paper="Claims that were checked", ours="Our own statements: audits, sound modes, and the like"
)
MARKS = {
    "confirmed": "good",
    "not confirmed": "bad",
    "cannot be checked": "open",
} | document.MARKS
KINDS = dict(
    experiment="an experiment", collection="a collection of {} experiments", study="a study"
)


class Source(NamedTuple):
    """The experiments of one folder or file; the first of a collection is the collection itself.

    Attributes:
        lines: the runs of an experiment's lines, if their folders exist.
    """

    label: str
    path: Path
    experiments: list[Experiment]
    lines: list[read.Source] = []

    @property
    def kind(self) -> str:
        if len(self.experiments) > 1:
            return "collection"
        return "study" if self.experiments[0].points else "experiment"


def read_source(path, label: str | None = None) -> Source:
    """Read the folder of an experiment, or a file of results.

    Raises:
        ValueError: naming the file, if no experiment wrote it or it is incomplete.
    """
    path = Path(path)
    label = label or read.default_label(path)
    if path.is_file():
        return Source(label, path, results.read(path).parts())
    if not path.is_dir():
        checks.fail(
            "report",
            "folders of experiments, or files of their results",
            f"{path}, which is not there",
        )
    if not (path / "results.json").exists():
        checks.fail(
            "report",
            "a finished experiment",
            f"{path} without results.json",
            "Run it again: finished cells are kept. For a run of jfl, use jfl report.",
        )
    experiments = results.read(path / "results.json").parts()
    folders = {
        name: path / name.replace(" ", "_").replace("/", "_")
        for experiment in experiments
        for name in (*experiment.lines, *experiment.failed)
    }
    # An experiment that runs its own sweep may write only a summary.
    lines = [
        read.read_run(folder, name, "line", complete=False)
        for name, folder in folders.items()
        if (folder / "summary.json").exists()
    ]
    return Source(label, path, experiments, lines)


def assemble(sources: list[Source]) -> Document:
    """Return the document of some experiments.

    Args:
        sources: from `read_source`, in the order of the page.
    """
    several = len(sources) > 1
    labelled = [
        (f"{source.label}: {line.label}" if several else line.label, line)
        for source in sources
        for line in source.lines
    ]
    groups = [group for label, line in labelled for group in _groups(label, line)]
    found = []
    if groups:
        found.append(Section("Results", sections.results(groups) + sections.run_pictures(groups)))
    if sum(len(s.experiments) for s in sources) > 1:
        found.append(Section("What holds", [Text(OUTSIDE), *_overview(sources)]))
    found += [Section(f"Claims: {s.label}" if several else "Claims", _source(s)) for s in sources]
    found += sections.run_sections(groups, labelled)
    known = sections.manifests(labelled) + [facts for s in sources for facts in _versions(s)]
    lines = [line for source in sources for line in _commands(source)]
    more = ""
    if any(line.startswith("python -m experiments.papers MODULE") for line in lines):
        more = "; MODULE is the paper's module, such as noble2022, which the results do not name"
    found += [
        Section("Versions and devices", sections.versions(known)),
        Section("How to run it again", sections.commands(lines, more)),
    ]
    cards, below = headline.of(groups, _points_of_studies(sources))
    origins = [f"{s.label} ({KINDS[s.kind].format(len(s.experiments) - 1)})" for s in sources]
    title = "jfl report: " + ", ".join(s.label for s in sources)
    return Document(
        title, "From " + "; ".join(origins) + ".", found, cards + _claims(sources), below
    )


def _groups(label: str, line: read.Source) -> list[read.Group]:
    """Return the settings of a line's runs; a single one has the name of the line."""
    groups = read.groups_of(line, f"{label}, ")
    if len(groups) > 1:
        return groups
    return [g._replace(setting=g.setting._replace(label=label)) for g in groups]


def _versions(source: Source) -> list[tuple[str, dict]]:
    found = []
    for e in source.experiments:
        if e.versions:
            name = f"{source.label}: {e.name}" if e.name and len(source.experiments) > 1 else ""
            facts = dict(versions=e.versions) | ({"seeds": e.seeds} if e.seeds else {})
            found.append((name or source.label, facts))
    return found


def cell(value) -> str:
    """Return what a table shows of a value."""
    if isinstance(value, results.Spread):
        half = "" if value.half is None else f" ± {value.half:.2g}"
        return "" if value.mean is None else f"{value.mean:.4g}{half}"
    return sections.cell(value)


# --- cards at the top


def _points_of_studies(sources: list[Source]) -> list[Candidate]:
    """Return the points of studies that trained with a finite epsilon."""
    found = []
    for source in sources:
        for experiment in source.experiments:
            for p in experiment.points:
                if p.mean is None:
                    continue
                trained = p.claimed is None and p.audited is None
                promised = all(getattr(p, k) is not None for k in (*COMPARED, "epsilon", "method"))
                if trained and promised and p.status in ("proved", "conditional"):
                    at = "" if p.x is None else f", {experiment.xlabel or 'x'} {p.x:.4g}"
                    guarantee = {
                        k: getattr(p, k)
                        for k in (*COMPARED, "epsilon", "status", "method", "caveats")
                    }
                    label = f"{p.panel}: {p.line}{at}"
                    seeds = len(p.values)
                    found.append(
                        Candidate(
                            label,
                            "points",
                            p.mean,
                            p.half,
                            seeds,
                            p.failed,
                            guarantee,
                            p.panel,
                        )
                    )
    return found


def _claims(sources: list[Source]) -> list[Card]:
    """Return cards that count the claims that were checked and the claimed epsilons that hold."""
    experiments = [e for source in sources for e in source.experiments]
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
        table = Table("How far lines are apart: final test accuracy", columns, ranges)
        heading = f"How far lines are apart, of each of {len(ranges)} experiments"
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
            *experiment_picture(first),
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
        inner = experiment_picture(experiment) + inner
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


def experiment_picture(experiment: Experiment) -> list[Picture]:
    """Return pictures of the points of a study, or of the lines of an experiment."""
    if any(p.audited is not None for p in experiment.points):
        figure, words = pictures.audits(experiment.points, experiment.xlabel), AUDIT_WORDS
    elif experiment.points:
        figure = pictures.study(experiment.points, experiment.xlabel)
        words = STUDY_WORDS
        if any(p.claimed is not None for p in experiment.points):
            unproved = ", ".join(dict.fromkeys(p.line for p in experiment.points if p.mean is None))
            words = CLAIMS_WORDS
            words += (
                f" Nothing is proved for {unproved}, whose points are at the top."
                if unproved
                else ""
            )
    else:
        lines = experiment.lines
        figure = pictures.lines(lines)
        words = (
            f"Final test accuracy of its lines, {_bars(lines.values())}; filled if the file has a "
            "proved ε."
        )
        if len(lines) > pictures.LINES:
            words += f" The first {pictures.LINES} of {len(lines)} lines."
    words = f"{_full_name(experiment)}. {words}"
    drawn = sections.as_pictures(figure, f"{words} The numbers are in the tables.", words)
    return drawn + _curves_of_lines(experiment)


def _curves_of_lines(experiment: Experiment) -> list[Picture]:
    """Return the picture of lines against rounds, if the values of rounds are stored."""
    names, panels = pictures.panels_of_lines(experiment.lines)
    words = (
        f"{_full_name(experiment)}. Against rounds: means over seeds, and bands from the smallest "
        "to the largest value."
    )
    if len(names) == plots.SHOWN or len(panels) == pictures.MAX_TRACE_PANELS:
        most = f"{plots.SHOWN} lines per panel and {pictures.MAX_TRACE_PANELS} panels"
        words += f" At most {most} are drawn."
    return sections.as_pictures(plots.curves(names, panels), words, words)


def _bars(lines) -> str:
    spreads = [results.summary(line.accuracy) for line in lines]
    if any(spread.half is not None for spread in spreads):
        return "bars are 95 % intervals"
    if any(spread.std for spread in spreads):
        return "bars are standard deviations over seeds"
    return "of one seed"


def experiment_tables(experiment: Experiment) -> list:
    """Return the tables of lines, points and other results, then the settings."""
    blocks: list = [_lines(experiment)] if experiment.lines or experiment.failed else []
    blocks += _points(experiment) if experiment.points else []
    for table in experiment.tables:
        right = [
            all(isinstance(row[i], (int, float, type(None))) for row in table.rows)
            for i in range(len(table.columns))
        ]
        if table.caption == results.NUMBERS:  # cells in words that are numbers, but for the first
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
    configs = [(_point_name(p), experiment.config | p.config) for p in points]
    configs = [(name, config) for name, config in configs if config]
    return blocks + ([_configs(configs)] if configs else [])


def _configs(configs: list[tuple[str, dict]]) -> Fold:
    """Return the settings of points: those that are equal, and those that differ."""
    keys = list(dict.fromkeys(k for _, config in configs for k in config))
    different = [k for k in keys if len({json.dumps(c.get(k)) for _, c in configs}) > 1]
    first = configs[0][1]
    same = [(k, cell(first[k])) for k in keys if k not in different and first.get(k) is not None]
    blocks = []
    if same:
        blocks.append(Table("The same for all points", text_columns("field", "value"), same))
    if different:
        rows = [(name, *(cell(c.get(k)) for k in different)) for name, c in configs]
        columns = [*text_columns("point"), *number_columns(*different)]
        blocks.append(Table("Fields that differ between points", columns, rows))
    return Fold("Settings of the points", blocks)


# --- commands


def _experiment_commands(source: Source) -> list[str]:
    """Return the commands of a source's experiments, if it names their module."""
    with_module = [e for e in source.experiments if e.module]
    if source.kind == "collection" and source.path.suffix == ".json" and not with_module:
        names = ", ".join(sections.one_line(e.name) for e in source.experiments if e.name)
        return [
            f"python -m experiments.{_module(source.path.stem)} --list",
            f"# {sections.one_line(source.label)} collects {names}; see above for what was reduced",
        ]
    lines = []
    for e in with_module or source.experiments[:1]:
        module, name = _module(e.module or "MODULE"), shlex.quote(e.name or "NAME")
        quick = " --quick" if e.quick else ""
        only = " --lines " + " ".join(map(shlex.quote, e.only)) if e.only else ""
        lines.append(f"python -m experiments.{module} {name}{quick}{only} --out NEW")
    return lines


def _module(name: str) -> str:
    """Return the module of `experiments` that runs what results call `name`."""
    return name if name == "studies" else f"papers {shlex.quote(name)}"


def _commands(source: Source) -> list[str]:
    """Return the commands that make a source again."""
    configs = [shlex.quote(str(p.path / "config.toml")) for p in source.lines if p.config]
    return _experiment_commands(source) + [
        f"jfl sweep --config {config} --out NEW" for config in configs
    ]


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
