"""What a report says: the sections of its document, from what lies in folders and files.

Nothing is computed again: an epsilon is the one that was proved when the run was made.
"""

import json
import shlex

from ..runs import tables
from ..runs.record import PLUS_MINUS, plus_minus
from . import document, headline, plots, read, results
from .document import Code, Document, Fold, Items, Picture, Section, Table, Text
from .read import Group, Source
from .results import Experiment

OUTSIDE = (
    "Accuracies, losses, clip fractions and update norms lie outside every guarantee, and so does "
    "choosing among the settings of a table."
)
QUICK = "A quick run, at small settings: it shows that the experiment works, not what it finds."
CLAIMED_HOLDS = (
    "Claimed ε holds: of the lines with a claimed ε, those whose proved ε is no larger; of the "
    "others only a larger ε is proved, or none. Lines without noise are among those compared. "
    "Minutes: of all its runs, on the machine that they ran on."
)
SPREADS = (
    f"Below, {PLUS_MINUS} Where a file holds too little for one, the standard deviation over "
    "seeds stands in a column of its own. In a paper's own figures ± is what the paper means by it."
)
VIEWS = (
    "The server sees every upload; a third party sees models only. Claimed is what a paper's "
    "formula says of this run, whether or not it holds. Runs on the same data compose: together "
    "they leak more than each alone."
)
AUDITED = (
    "An audited ε is a lower bound at its confidence, at its own δ and of its own rounds. It "
    "refutes a smaller ε; it proves none. A small one says nothing: another attack may show more."
)
DATA_WORDS = (
    "Rows are those that clients hold, with the smallest, the median and the largest client. Label "
    "spread is the mean over clients of the total variation distance between a client's class "
    "shares and those of all: 0 is iid. Of a sweep these are the data of its first point."
)
ACCURACY_WORDS = (
    "Test accuracy and loss against rounds: mean over seeds, bands from the least to the largest "
    "seed."
)
FRONTIER_WORDS = (
    "Privacy against utility, one panel for each promise: ε of different units, adjacencies, views "
    "or δ do not compare. Filled circles are proved, hollow diamonds are what a paper claims, "
    "dashed lines have no guarantee (on the same data); bars are 95 % intervals. Conditional ε, "
    "and claims of one round, are not drawn."
)
CLIPPING_WORDS = (
    "What clipping did, and the size of what the server applied: signal and noise together, since "
    "the files do not hold what it takes to tell them apart."
)
STUDY_WORDS = (
    "Means over seeds with 95 % intervals as bands; dashed lines have no noise, level ones do not "
    "depend on the axis."
)
AUDIT_WORDS = (
    "What an attack refutes of each plan, beside what is claimed and proved of it. A claim left of "
    "the dot is too small."
)
CLAIMS_WORDS = (
    "Proved against claimed ε: on the dotted line they are the same, above it the claim is too "
    "small."
)
DATA = dict(
    clients="clients",
    rows="rows",
    min_size="smallest",
    median_size="median",
    max_size="largest",
    held_out="held out",
    test_rows="test rows",
    classes="classes",
    label_spread="label spread",
    partition="partition",
    caveats="caveats",
    checksum="checksum",
)
NOT_NUMBERS = ("partition", "caveats", "checksum")
KINDS = dict(
    experiment="an experiment", collection="a collection of {} experiments", study="a study"
)
MANIFEST = (
    "kernels",
    "noise",
    "seeds",
    "written",
    "groups",
    "seconds",
    "commit",
)
PROMISE = ("delta", "unit", "adjacency", "view", "method", "status")
ALL_VERDICTS = (*results.VERDICTS[:-1], *results.STUDIED)
COUNTED = dict(
    paper="Claims that were checked", ours="Our own statements: audits, sound modes, and the like"
)
FOLDED_SETTINGS = 64  # settings whose fields are listed in full


def assemble(sources: list[Source]) -> Document:
    """The document of some sources.

    Args:
        sources: what `read.read` gave, in the order of the page.

    Returns:
        Its title, a line that says what it is made from, and its sections.
    """
    several = len(sources) > 1
    groups, parts = read.groups(sources), read.parts(sources)
    with_experiments = [s for s in sources if s.experiments]
    with_data = [(name, part) for name, part in parts if part.manifest.get("data")]
    sections = [Section("Results", _headline(groups) + run_pictures(groups))] if groups else []
    if sum(len(s.experiments) for s in with_experiments) > 1:
        sections.append(Section("What holds", [Text(OUTSIDE), *_overview(with_experiments)]))
    sections += [
        Section(f"Claims: {s.label}" if several else "Claims", _source(s)) for s in with_experiments
    ]
    if groups:
        sections.append(Section("Guarantees", _guarantees(groups)))
    if with_data:
        sections.append(Section("Data", _data(with_data)))
    if groups:
        sections.append(Section("Settings", _settings(groups, parts)))
    sections += [
        Section("Versions and devices", _versions(sources, parts)),
        Section("How to run it again", _commands(sources)),
    ]
    title = "jfl report: " + ", ".join(s.label for s in sources)
    lead = "From " + "; ".join(map(_origin, sources)) + "."
    return Document(title, lead, sections, *headline.of(sources, groups))


def _origin(source: Source) -> str:
    kind = KINDS.get(source.kind, f"jfl {source.kind}").format(len(source.experiments) - 1)
    written = f", {source.manifest['written']}" if "written" in source.manifest else ""
    return f"{source.label} ({kind}{written})"


# --- cells of tables


def _words(*names: str) -> list[tuple]:
    """Columns of words."""
    return [(name, False) for name in names]


def _numbers(*names: str) -> list[tuple]:
    """Columns of numbers, aligned to the right."""
    return [(name, True) for name in names]


def cell(value) -> str:
    """What a table shows of a value."""
    if isinstance(value, results.Spread):
        half = "" if value.half is None else f" ± {value.half:.2g}"
        return "" if value.mean is None else f"{value.mean:.4g}{half}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else str(value)


def _fact(value) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {cell(v)}" for k, v in value.items() if v not in ("", None))
    return "; ".join(map(cell, value)) if isinstance(value, list) else cell(value)


def _accuracy(values) -> str:
    """Mean and half of its 95 % interval."""
    return plus_minus(*tables.interval(values)) if values else ""


def _without_empty(caption, columns, rows, keep=()) -> Table:
    """A table without the columns that are empty in all rows, but for those to keep."""
    shown = [
        i
        for i, (name, _) in enumerate(columns)
        if i == 0 or name in keep or any(row[i] != "" for row in rows)
    ]
    return Table(caption, [columns[i] for i in shown], [[row[i] for i in shown] for row in rows])


def _merged(rows) -> list[tuple]:
    """Rows that differ in their first cell alone as one."""
    names: dict = {}
    for first, *rest in rows:
        names.setdefault(tuple(rest), []).append(first)
    return [
        ("; ".join(n[:2]) + (f"; and {len(n) - 2} more" if len(n) > 2 else ""), *rest)
        for rest, n in names.items()
    ]


def _numbered(caveats, numbers: dict) -> str:
    """Caveats by their numbers; new ones get the next."""
    return ", ".join(
        map(str, sorted(numbers.setdefault(str(c), len(numbers) + 1) for c in caveats))
    )


# --- runs


def _headline(groups: list[Group]) -> list:
    columns = [
        *_words("setting"),
        *_numbers("seeds", "final accuracy", "claimed ε", "proved ε", "δ"),
        *_words("unit", "adjacency", "view", "method", "status"),
    ]
    rows = []
    for group in groups:
        best = tables.proved(group.guarantees)
        claims = [g for g in group.guarantees if g["status"] == "claimed"]
        rows.append(
            (
                group.setting.label,
                f"{len(group.runs)}" + (f" (+{group.failed} failed)" if group.failed else ""),
                _accuracy(group.setting.final),
                "; ".join(map(_claimed, claims)),
                *_epsilon_and_delta(best),
                *(("", "", "") if best["epsilon"] is None else _unit_and_view(best)),
                best["method"],
                best["status"],
            )
        )
    if not any(row[3] for row in rows):
        columns, rows = columns[:3] + columns[4:], [row[:3] + row[4:] for row in rows]
    return [
        Text(OUTSIDE),
        Table("Final test accuracy and what is proved of it", columns, rows),
        Text(f"{PLUS_MINUS} Bands in pictures go from the least to the largest seed.", quiet=True),
    ]


def _epsilon_and_delta(guarantee) -> tuple[str, str]:
    if guarantee["epsilon"] is None:
        return "none", ""
    return f"{guarantee['epsilon']:.4g}", f"{guarantee['delta']:.3g}"


def _unit_and_view(guarantee) -> tuple:
    return tuple(guarantee[k].replace("_", " ") for k in ("unit", "adjacency", "view"))


def _claimed(guarantee) -> str:
    epsilon = "nothing" if guarantee["epsilon"] is None else f"{guarantee['epsilon']:.4g}"
    one_round = ", one round" if guarantee["rounds"] == 1 else ""
    return f"{epsilon} ({guarantee['view'].replace('_', ' ')}{one_round})"


def run_pictures(groups: list[Group]) -> list:
    """Curves, and privacy against utility."""
    settings = [g.setting for g in groups]
    finals = "; ".join(f"{s.label}: {_accuracy(s.final) or 'none'}" for s in settings[:8])
    finals += "; and more" if len(settings) > 8 else ""
    promises, omitted, omitted_panels = len(plots.promises(settings)), "", ""
    if len(settings) > plots.SHOWN:
        omitted = f" The first {plots.SHOWN} of {len(settings)} settings are drawn."
    if promises > plots.PANELS:
        omitted_panels = f" The {plots.PANELS} most frequent of {promises} promises are drawn."
    learning, clipping = ("accuracy", "loss"), ("clip_fraction", "update_norm")
    pictures = [
        _curves_of_runs(
            settings,
            learning,
            f"Test accuracy and loss against rounds. Final accuracy of {finals}.",
            ACCURACY_WORDS + omitted,
        ),
        _picture(
            plots.frontier(settings),
            "Final accuracy against ε, the numbers of the table above.",
            FRONTIER_WORDS + omitted_panels + omitted,
        ),
        _curves_of_runs(
            settings,
            clipping,
            "Clip fraction and norm of the update against rounds.",
            CLIPPING_WORDS + omitted,
        ),
    ]
    pictures = [picture for some in pictures for picture in some]
    return pictures or [Text("These runs left no rows to draw.", quiet=True)]


def _curves_of_runs(settings, metrics, alt, caption) -> list[Picture]:
    names, panels = [s.label for s in settings], plots.panels_of_runs(settings, metrics)
    return _picture(plots.curves(names, panels), alt, caption)


def _picture(figure, alt, caption) -> list[Picture]:
    if figure is None:
        return []
    return [Picture(alt, caption, plots.png(figure), plots.svg(figure))]


def _guarantees(groups: list[Group]) -> list:
    caveats: dict = {}
    columns = [
        *_words("setting"),
        *_numbers("ε", "δ"),
        *_words("unit", "adjacency", "view", "method", "status", "caveats"),
    ]
    rows = [
        (
            group.setting.label,
            *_epsilon_and_delta(guarantee),
            *_unit_and_view(guarantee),
            guarantee["method"],
            guarantee["status"],
            _numbered(guarantee["caveats"], caveats),
        )
        for group in groups
        for guarantee in group.guarantees
    ]
    blocks: list = [Table("Every guarantee and claim of every setting", columns, rows)]
    if caveats:
        sentences = [f"{c[:1].upper()}{c[1:]}" + ("" if c.endswith(".") else ".") for c in caveats]
        blocks += [
            Text("Caveats, by the numbers in the last column:"),
            Items(sentences, numbered=True),
        ]
    else:
        blocks.append(Text("No caveats were recorded."))
    return [*blocks, *_audits(groups), Text(VIEWS, quiet=True)]


def _audits(groups: list[Group]) -> list:
    """A row for each audit, beside what is proved and claimed at its delta and of its rounds."""
    columns = [
        *_words("setting"),
        *_numbers("audited ε", "proved ε", "claimed ε", "δ", "confidence", "trials", "rounds"),
        *_words("unit", "adjacency", "view", "canary", "method", "status", "verdict"),
    ]
    rows = [
        (
            group.setting.label,
            cell(float(audit["epsilon"])),
            "none" if audit["proved"] is None else _epsilon_and_delta(audit["proved"])[0],
            cell(audit["claimed"]),
            f"{audit['delta']:.3g}",
            cell(audit["confidence"]),
            cell(audit["trials"]),
            cell(audit["rounds"]),
            *_unit_and_view(audit),
            *(audit[k] for k in ("canary", "method", "status")),
            _audit_verdict(audit),
        )
        for group in groups
        for audit in group.source.audits
    ]
    if not rows:
        return []
    table = _without_empty("Audits: what attacks measured", columns, rows, keep=("proved ε",))
    return [table, Text(AUDITED, quiet=True)]


def _audit_verdict(audit) -> str:
    if audit["contradicted"]:
        return document.CONTRADICTED
    return document.REFUTED if audit["refuted"] else "nothing is refuted"


def _data(parts) -> list:
    facts = [(name, part.manifest["data"]) for name, part in parts]
    shown = [k for k in DATA if any(f.get(k) not in (None, [], "") for _, f in facts)]
    columns = [("data of", False), *((DATA[k], k not in NOT_NUMBERS) for k in shown)]
    rows = _merged([(name, *(_fact(f.get(k)) for k in shown)) for name, f in facts])
    return [Table("Rows and clients", columns, rows), Text(DATA_WORDS, quiet=True)]


def _settings(groups: list[Group], parts) -> list:
    keys = list(dict.fromkeys(k for group in groups for k in group.config))
    different = [
        k for k in keys if len({json.dumps(g.config[k]) for g in groups if k in g.config}) > 1
    ]
    blocks = []
    if different:
        rows = [(g.setting.label, *(cell(g.config.get(k)) for k in different)) for g in groups]
        columns = [*_words("setting"), *_numbers(*different)]
        blocks.append(Table("Fields that differ", columns, rows))
    for group in groups[:FOLDED_SETTINGS]:
        fields = [
            f"{k} = {json.dumps(v, ensure_ascii=False)}"
            for k, v in group.config.items()
            if v is not None
        ]
        heading = f"{group.setting.label}: all fields, as resolved"
        blocks.append(Fold(heading, [Code("\n".join(fields))]))
    files = [(name, part.config) for name, part in parts if part.config]
    return blocks + [Fold(f"{name}: config.toml", [Code(text)]) for name, text in files]


# --- experiments, all of them together


def _overview(sources: list[Source]) -> list:
    """Of each source how many claims hold, and of each experiment how far its lines are apart."""
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
    columns = [*_words("results", "of"), *_numbers("checks", "statements", *ALL_VERDICTS)]
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
            *_words("experiment"),
            *_numbers("lines"),
            *_words("least accurate", "most accurate"),
            *_numbers("points apart", "claimed ε holds", "minutes"),
        ]
        table = Table("How far lines are apart: final test accuracy", columns, ranges)
        heading = f"How far lines are apart, of each of {len(ranges)} experiments"
        blocks += [
            Fold(heading, [table, Text(CLAIMED_HOLDS, quiet=True)]),
            Text(SPREADS, quiet=True),
        ]
    return blocks


def _unused(name, column, rows) -> bool:
    """A word of other verdicts than those of these rows."""
    return name in ALL_VERDICTS and not any(row[column] for row in rows)


def _by_rule(experiments) -> bool:
    """Whether their verdicts are by results.RULE, and not those of a study."""
    return any(v.verdict not in results.STUDIED for e in experiments for v in e.verdicts)


def _range(experiment: Experiment) -> tuple | None:
    """Least and most accurate line, as cells; None for fewer than two lines."""
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


# --- the experiments of one source


def _source(source: Source) -> list:
    """The experiments of a source; of a collection all but verdicts and pictures is folded."""
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
    """A row for each experiment whose claims were checked, with how many of them hold; our own
    statements in a table of their own."""
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
    verdicts = list(headline.counted([v for _, _, found in given for v in found]))
    rows = [
        (name, title, len(v), *(v.count(k) or "" for k in verdicts)) for name, title, v in given
    ]
    columns = [*_words("experiment", "of"), *_numbers("checks", *verdicts)]
    return [_without_empty(caption, columns, rows)]


def _missing(experiments) -> list[str]:
    """What experiments of a collection lack, each reason once."""
    names: dict = {}
    for experiment in experiments:
        for why in experiment.missing():
            names.setdefault(why, []).append(experiment.name)
    return [f"{why} ({', '.join(each)})" for why, each in names.items()]


def _full_name(experiment: Experiment) -> str:
    return ": ".join(filter(None, (experiment.name, experiment.title)))


def _effort(experiment: Experiment) -> str:
    """The seeds and the time of an experiment."""
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
        columns = _words("experiment", "claim", "verdict", "why: what was seen")
        if not any(name for name, *_ in rows):
            columns, rows = columns[1:], [row[1:] for row in rows]
        blocks += [Table(caption, columns, rows)] if rows else []
    return blocks


def experiment_picture(experiment: Experiment) -> list[Picture]:
    """The points of a study, or how far the lines of an experiment lie apart, and their curves."""
    if any(p.audited is not None for p in experiment.points):
        figure, words = plots.audits(experiment.points, experiment.xlabel), AUDIT_WORDS
    elif experiment.points:
        figure = plots.study(experiment.points, experiment.xlabel)
        words = STUDY_WORDS
        if any(p.claimed is not None for p in experiment.points):
            unproved = ", ".join(dict.fromkeys(p.line for p in experiment.points if p.mean is None))
            words = CLAIMS_WORDS
            words += (
                f" Nothing is proved of {unproved}, whose points stand at the top."
                if unproved
                else ""
            )
    else:
        lines = experiment.lines
        figure = plots.lines(lines)
        words = (
            f"Final test accuracy of its lines, {_bars(lines.values())}; filled where the file "
            "gives a proved ε."
        )
        if len(lines) > plots.LINES:
            words += f" The first {plots.LINES} of {len(lines)} lines."
    words = f"{_full_name(experiment)}. {words}"
    pictures = _picture(figure, f"{words} The numbers are in the tables.", words)
    return pictures + _curves_of_lines(experiment)


def _curves_of_lines(experiment: Experiment) -> list[Picture]:
    """Lines of an experiment against rounds, where their values of rounds are stored."""
    names, panels = plots.panels_of_lines(experiment.lines)
    words = (
        f"{_full_name(experiment)}. Against rounds: means over seeds, and bands from the least to "
        "the largest."
    )
    if len(names) == plots.SHOWN or len(panels) == plots.TRACED:
        words += f" No more than {plots.SHOWN} lines a panel and {plots.TRACED} panels are drawn."
    return _picture(plots.curves(names, panels), words, words)


def _bars(lines) -> str:
    spreads = [results.summary(line.accuracy) for line in lines]
    if any(spread.half is not None for spread in spreads):
        return "bars are 95 % intervals"
    if any(spread.std for spread in spreads):
        return "bars are standard deviations over seeds"
    return "of one seed"


def experiment_tables(experiment: Experiment) -> list:
    """Tables of lines, points and whatever else an experiment left, then its settings."""
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
        table = Table("As the file gives them", _words("what", "value"), rows)
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
    # a claim without a proof beside it is news: that column stays
    claims = any(line.epsilon_claimed is not None for line in experiment.lines.values())
    return _without_empty(
        "Lines of the experiment, ε of the view that it speaks of",
        [*_words("line"), *_numbers(*fixed, *others)],
        rows,
        keep=("proved ε",) if claims else (),
    )


def _line_columns(line: results.Line) -> dict:
    """heading -> what is known of a line besides its accuracy and epsilons."""
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
        *_words("panel", "line"),
        *_numbers(experiment.xlabel or "x", "accuracy", "seeds", "failed"),
        *_words("chosen"),
        *_numbers("stated ε", "claimed ε", "audited ε", "at most", "proved ε"),
        *((k.replace("delta", "δ"), k == "delta") for k in PROMISE),
        *_words("caveats"),
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
                _numbered(point.caveats or (), caveats),
            )
        )
    caption = "Points of the study, each with the guarantee of its runs"
    blocks: list = [_without_empty(caption, columns, rows)]
    if caveats:
        items = Items(list(caveats), numbered=True)
        blocks.append(Fold("Caveats, by the numbers in the last column", [items]))
    configs = [(_point_name(p), p.config) for p in points if p.config is not None]
    return blocks + ([_configs(configs)] if configs else [])


def _configs(configs: list[tuple[str, dict]]) -> Fold:
    """Settings of points: what is the same, and what differs."""
    keys = list(dict.fromkeys(k for _, config in configs for k in config))
    different = [k for k in keys if len({json.dumps(c.get(k)) for _, c in configs}) > 1]
    first = configs[0][1]
    same = [(k, cell(first[k])) for k in keys if k not in different and first.get(k) is not None]
    blocks = []
    if same:
        blocks.append(Table("The same for all points", _words("field", "value"), same))
    if different:
        rows = [(name, *(cell(c.get(k)) for k in different)) for name, c in configs]
        columns = [*_words("point"), *_numbers(*different)]
        blocks.append(Table("Fields that differ between points", columns, rows))
    return Fold("Settings of the points", blocks)


# --- versions and commands


def _versions(sources: list[Source], parts) -> list:
    known = [(name, part.manifest) for name, part in parts if part.manifest]
    for source in sources:
        for e in source.experiments:
            if e.versions:
                name = f"{source.label}: {e.name}" if e.name and len(source.experiments) > 1 else ""
                facts = dict(versions=e.versions) | ({"seeds": e.seeds} if e.seeds else {})
                known.append((name or source.label, facts))
    if not known:
        return [Text("These results do not say what made them.")]
    flat = [m["versions"] | {k: m[k] for k in MANIFEST if k in m} for _, m in known]
    keys = list(dict.fromkeys(k for facts in flat for k in facts))
    same = [k for k in keys if len({_fact(facts.get(k)) for facts in flat}) == 1]
    different = [k for k in keys if k not in same]
    blocks: list = []
    if same:
        caption = "The same everywhere" if len(flat) > 1 else "What made it"
        rows = [(k, _fact(flat[0].get(k))) for k in same]
        blocks.append(Table(caption, _words("what", "value"), rows))
    if different:
        rows = [
            (name, *(_fact(facts.get(k)) for k in different))
            for (name, _), facts in zip(known, flat)
        ]
        blocks.append(Table("What differs", _words("made by", *different), _merged(rows)))
    if "noise" in keys:
        words = (
            "noise: least and largest noise multiplier of each noisy chain of the first setting."
        )
        blocks.append(Text(words, quiet=True))
    return blocks


def _commands(sources: list[Source]) -> list:
    lines = []
    for source in sources:
        lines += _source_commands(source)
    words = (
        "On the versions and devices above the same commands give the same numbers. NEW is a new "
        "directory"
    )
    if any(line.startswith("python -m experiments.papers.MODULE") for line in lines):
        words += "; MODULE is the paper's module, such as noble2022, which the results do not name"
    return [Text(words + "."), Code("\n".join(lines), commands=True)]


def _one_line(words: str) -> str:
    return " ".join(words.split())


def _source_commands(source: Source) -> list[str]:
    if source.kind == "demo":
        # its parts have rounds of their own, unless one number was asked for
        rounds = {run["rounds"] for run in source.runs}
        asked = f" --rounds {rounds.pop()}" if len(rounds) == 1 else ""
        return [f"jfl demo{asked} --seeds {len(source.manifest.get('seeds') or [0])} --out NEW"]
    if source.experiments:
        configs = [shlex.quote(str(p.path / "config.toml")) for p in source.lines if p.config]
        sweeps = [f"jfl sweep --config {config} --out NEW" for config in configs]
        return _experiment_commands(source) + sweeps
    if source.config:
        config = shlex.quote(str(source.path / "config.toml"))
        return [f"jfl {source.kind} --config {config} --out NEW"]
    return [f"# {_one_line(source.label)}: its config.toml is not there"]


def _experiment_commands(source: Source) -> list[str]:
    """The commands of a source's experiments, as far as it names their module."""
    with_module = [e for e in source.experiments if e.module]
    if source.kind == "collection" and source.path.suffix == ".json" and not with_module:
        names = ", ".join(_one_line(e.name) for e in source.experiments if e.name)
        return [
            f"python -m experiments.{_module(source.path.stem)} --list",
            f"# {_one_line(source.label)} collects {names}: what was reduced is told above",
        ]
    lines = []
    for e in with_module or source.experiments[:1]:
        module, name = _module(e.module or "MODULE"), shlex.quote(e.name or "NAME")
        quick = " --quick" if e.quick else ""
        only = " --lines " + " ".join(map(shlex.quote, e.only)) if e.only else ""
        lines.append(f"python -m experiments.{module} {name}{quick}{only} --out NEW")
    return lines


def _module(name: str) -> str:
    """The module below `experiments` that runs what results call `name`."""
    return name if name == "studies" else f"papers.{shlex.quote(name)}"
