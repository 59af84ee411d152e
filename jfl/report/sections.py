"""The sections of a report's document, from the files of runs.

Nothing is computed again: an epsilon is the one that was proved when the run was made.
"""

import json
import shlex

from ..runs import tables
from ..runs.statistics import PLUS_MINUS, plus_minus
from . import document, headline, plots, read
from .document import Code, Document, Fold, Items, Picture, Section, Table, Text
from .read import Group, Source

OUTSIDE = (
    "Accuracies, losses, clip fractions and update norms lie outside every guarantee, and so does "
    "choosing among the settings of a table."
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
MANIFEST = (
    "kernels",
    "noise",
    "seeds",
    "written",
    "groups",
    "seconds",
    "commit",
)
FOLDED_SETTINGS = 64  # settings whose fields are listed in full


def assemble(sources: list[Source]) -> Document:
    """Return the document of some runs.

    Args:
        sources: the results of `read.read`, in the order of the page.

    Returns:
        Its title, a line that says what it is made from, and its sections.
    """
    groups = read.groups(sources)
    labelled = [(source.label, source) for source in sources]
    return Document(
        "jfl report: " + ", ".join(s.label for s in sources),
        "From " + "; ".join(map(origin, sources)) + ".",
        [
            Section("Results", results(groups) + run_pictures(groups)),
            *run_sections(groups, labelled),
            Section("Versions and devices", versions(manifests(labelled))),
            Section("How to run it again", commands([x for s in sources for x in run_commands(s)])),
        ],
        *headline.of(groups),
    )


def run_sections(groups: list[Group], labelled: list[tuple[str, Source]]) -> list[Section]:
    """Return the sections on guarantees, data and settings of runs.

    Args:
        groups: the settings of the runs.
        labelled: (name on the page, source) of what was run.
    """
    with_data = [(name, part) for name, part in labelled if part.manifest.get("data")]
    found = [Section("Guarantees", guarantees(groups))] if groups else []
    found += [Section("Data", data(with_data))] if with_data else []
    return found + ([Section("Settings", settings(groups, labelled))] if groups else [])


def origin(source: Source) -> str:
    """Return which command made a source, and when."""
    written = f", {source.manifest['written']}" if "written" in source.manifest else ""
    return f"{source.label} (jfl {source.kind}{written})"


# --- cells of tables


def text_columns(*names: str) -> list[tuple]:
    """Return columns of text, aligned to the left."""
    return [(name, False) for name in names]


def number_columns(*names: str) -> list[tuple]:
    """Return columns of numbers, aligned to the right."""
    return [(name, True) for name in names]


def cell(value) -> str:
    """Return the text of a value in a table."""
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
    """Format the mean and half of its 95 % interval."""
    return plus_minus(*tables.interval(values)) if values else ""


def without_empty_columns(caption, columns, rows, keep=()) -> Table:
    """Return the table without columns that are empty in all rows, except those to keep."""
    shown = [
        i
        for i, (name, _) in enumerate(columns)
        if i == 0 or name in keep or any(row[i] != "" for row in rows)
    ]
    return Table(caption, [columns[i] for i in shown], [[row[i] for i in shown] for row in rows])


def merge_rows(rows) -> list[tuple]:
    """Merge rows that differ only in their first cell."""
    names: dict = {}
    for first, *rest in rows:
        names.setdefault(tuple(rest), []).append(first)
    return [
        ("; ".join(n[:2]) + (f"; and {len(n) - 2} more" if len(n) > 2 else ""), *rest)
        for rest, n in names.items()
    ]


def number_caveats(caveats, numbers: dict) -> str:
    """Return the numbers of caveats; new ones get the next numbers."""
    return ", ".join(
        map(str, sorted(numbers.setdefault(str(c), len(numbers) + 1) for c in caveats))
    )


# --- runs


def results(groups: list[Group]) -> list:
    columns = [
        *text_columns("setting"),
        *number_columns("seeds", "final accuracy", "claimed ε", "proved ε", "δ"),
        *text_columns("unit", "adjacency", "view", "method", "status"),
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
    """Return the blocks with curves, and with privacy against utility."""
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
        as_pictures(
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
    return as_pictures(plots.curves(names, panels), alt, caption)


def as_pictures(figure, alt, caption) -> list[Picture]:
    if figure is None:
        return []
    return [Picture(alt, caption, plots.png(figure), plots.svg(figure))]


def guarantees(groups: list[Group]) -> list:
    caveats: dict = {}
    columns = [
        *text_columns("setting"),
        *number_columns("ε", "δ"),
        *text_columns("unit", "adjacency", "view", "method", "status", "caveats"),
    ]
    rows = [
        (
            group.setting.label,
            *_epsilon_and_delta(guarantee),
            *_unit_and_view(guarantee),
            guarantee["method"],
            guarantee["status"],
            number_caveats(guarantee["caveats"], caveats),
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
    """Return a table with a row per audit: its epsilon next to the proved and claimed ones at the
    same delta and rounds."""
    columns = [
        *text_columns("setting"),
        *number_columns(
            "audited ε", "proved ε", "claimed ε", "δ", "confidence", "trials", "rounds"
        ),
        *text_columns("unit", "adjacency", "view", "canary", "method", "status", "verdict"),
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
    table = without_empty_columns(
        "Audits: what attacks measured", columns, rows, keep=("proved ε",)
    )
    return [table, Text(AUDITED, quiet=True)]


def _audit_verdict(audit) -> str:
    if audit["contradicted"]:
        return document.CONTRADICTED
    return document.REFUTED if audit["refuted"] else "nothing is refuted"


def data(parts) -> list:
    facts = [(name, part.manifest["data"]) for name, part in parts]
    shown = [k for k in DATA if any(f.get(k) not in (None, [], "") for _, f in facts)]
    columns = [("data of", False), *((DATA[k], k not in NOT_NUMBERS) for k in shown)]
    rows = merge_rows([(name, *(_fact(f.get(k)) for k in shown)) for name, f in facts])
    return [Table("Rows and clients", columns, rows), Text(DATA_WORDS, quiet=True)]


def settings(groups: list[Group], parts) -> list:
    keys = list(dict.fromkeys(k for group in groups for k in group.config))
    different = [
        k for k in keys if len({json.dumps(g.config[k]) for g in groups if k in g.config}) > 1
    ]
    blocks = []
    if different:
        rows = [(g.setting.label, *(cell(g.config.get(k)) for k in different)) for g in groups]
        columns = [*text_columns("setting"), *number_columns(*different)]
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


# --- versions and commands


def manifests(labelled: list[tuple[str, Source]]) -> list[tuple[str, dict]]:
    """Return (name, manifest) of the sources that have one."""
    return [(name, part.manifest) for name, part in labelled if part.manifest]


def versions(known: list[tuple[str, dict]]) -> list:
    """Return the versions behind the results: the common ones, and those that differ.

    Args:
        known: (name, facts with `versions`).
    """
    if not known:
        return [Text("These results do not record their versions.")]
    flat = [m["versions"] | {k: m[k] for k in MANIFEST if k in m} for _, m in known]
    keys = list(dict.fromkeys(k for facts in flat for k in facts))
    same = [k for k in keys if len({_fact(facts.get(k)) for facts in flat}) == 1]
    different = [k for k in keys if k not in same]
    blocks: list = []
    if same:
        caption = "The same everywhere" if len(flat) > 1 else "What made it"
        rows = [(k, _fact(flat[0].get(k))) for k in same]
        blocks.append(Table(caption, text_columns("what", "value"), rows))
    if different:
        rows = [
            (name, *(_fact(facts.get(k)) for k in different))
            for (name, _), facts in zip(known, flat)
        ]
        blocks.append(Table("What differs", text_columns("made by", *different), merge_rows(rows)))
    if "noise" in keys:
        words = (
            "noise: least and largest noise multiplier of each noisy chain of the first setting."
        )
        blocks.append(Text(words, quiet=True))
    return blocks


def commands(lines: list[str], more: str = "") -> list:
    """Return a sentence about reproducing the results, and the commands."""
    words = (
        "With the versions and devices above, the same commands give the same numbers. NEW is a "
        f"new directory{more}."
    )
    return [Text(words), Code("\n".join(lines), commands=True)]


def one_line(words: str) -> str:
    """Return the text without line breaks."""
    return " ".join(words.split())


def run_commands(source: Source) -> list[str]:
    """Return the commands that reproduce a source."""
    if source.kind == "demo":
        # its parts have different numbers of rounds unless --rounds was given
        rounds = {run["rounds"] for run in source.runs}
        asked = f" --rounds {rounds.pop()}" if len(rounds) == 1 else ""
        seeds = len(source.manifest.get("seeds") or [0])
        lines = [f"jfl demo{asked} --seeds {seeds} --out NEW"]
    elif source.config:
        config = shlex.quote(str(source.path / "config.toml"))
        lines = [f"jfl {source.kind} --config {config} --out NEW"]
    else:
        lines = [f"# {one_line(source.label)}: its config.toml is not there"]
    return lines
