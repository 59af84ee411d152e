"""The sections of a report's document, from the files of runs.

Nothing is computed again: an epsilon is the one that was proved when the run was made.
"""

import json
import shlex

from ..runs import guarantee_rows, tables
from ..runs.statistics import PLUS_MINUS, plus_minus
from . import document, headline, plots, read
from .document import Code, Document, Fold, Items, Picture, Section, Table, Text
from .plots import Setting
from .read import Source

OUTSIDE = (
    "No guarantee covers accuracies, losses, clip fractions and update norms, or the choice among "
    "the settings of a table."
)
VIEWS = (
    "The server sees every upload; a third party sees only the models. Claimed is what a paper's "
    "formula gives for this run, whether or not it is correct. Runs on the same data compose: "
    "together they leak more than each of them."
)
AUDITED = (
    "An audited ε is a lower bound at its confidence, for its δ and number of rounds. It refutes a "
    "smaller ε and proves none. If it is small, another attack may still show more."
)
DATA_WORDS = (
    "Rows are those of clients, with the smallest, the median and the largest client. Label "
    "spread is the mean over clients of the total variation distance between a client's class "
    "shares and those of all rows: 0 is iid. For a sweep these are the data of its first point."
)
ACCURACY_WORDS = (
    "Test accuracy and loss against rounds: means over seeds, with bands from the smallest to the "
    "largest seed."
)
FRONTIER_WORDS = (
    "Accuracy against ε, with one panel for each unit, adjacency, view and δ, since ε is "
    "comparable only within a panel. Filled points are proved, hollow ones are what a paper "
    "claims, and broken lines have no guarantee (on the same data). Bars are 95 % intervals. "
    "Conditional ε and claims for one round are not drawn."
)
CLIPPING_WORDS = (
    "The fraction of clipped contributions, and the norm of the applied update. The norm includes "
    "the noise, since the files do not contain what is needed to separate it."
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
MANIFEST = ("kernels", "noise", "seeds", "written", "groups", "seconds", "commit")
MAX_LISTED_SETTINGS = 64  # whose fields are listed in full
MAX_DESCRIBED_SETTINGS = 8  # whose accuracy is in the description of a picture


def assemble(sources: list[Source]) -> Document:
    """Return the document of some runs.

    Args:
        sources: the results of `read.read`, in the order of the page.

    Returns:
        The document, with a title, a line about its sources, and sections.
    """
    found = read.settings(sources)
    manifests = [(source.label, source.manifest) for source in sources]
    facts = [(label, manifest["data"]) for label, manifest in manifests if manifest.get("data")]
    origins = []
    for source in sources:
        written = f", {source.manifest['written']}" if "written" in source.manifest else ""
        origins.append(f"{source.label} (jfl {source.kind}{written})")
    return Document(
        "jfl report: " + ", ".join(s.label for s in sources),
        "From " + "; ".join(origins) + ".",
        [
            Section("Results", results(found) + run_pictures(found)),
            Section("Guarantees", guarantees(found)),
            *([Section("Data", data(facts))] if facts else []),
            Section("Settings", fields(found, sources)),
            Section("Versions and devices", versions(manifests)),
            Section("How to run it again", commands(list(map(_run_command, sources)))),
        ],
        *headline.of(found),
    )


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
    """Return the text of a value in a table; a dict becomes "key value" pairs."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {cell(v)}" for k, v in value.items() if v not in ("", None))
    return "; ".join(map(cell, value)) if isinstance(value, list) else cell(value)


def _accuracy(values) -> str:
    """Return the mean and half of its 95 % interval."""
    return plus_minus(*tables.interval(values)) if values else ""


def without_empty_columns(caption, columns, rows, keep=()) -> Table:
    """Return the table without columns that are empty in all rows, except those to keep."""
    shown = [
        i
        for i, (name, _) in enumerate(columns)
        if i == 0 or name in keep or any(row[i] != "" for row in rows)
    ]
    return Table(caption, [columns[i] for i in shown], [[row[i] for i in shown] for row in rows])


def _merge_rows(rows) -> list[tuple]:
    """Merge rows that differ only in their first cell."""
    names: dict = {}
    for first, *rest in rows:
        names.setdefault(tuple(rest), []).append(first)
    more = lambda n: f"; and {len(n) - 2} more" if len(n) > 2 else ""
    return [("; ".join(n[:2]) + more(n), *rest) for rest, n in names.items()]


def number_caveats(caveats, numbers: dict) -> str:
    """Return the numbers of some caveats as a text, such as "1, 3".

    Args:
        caveats: the caveats.
        numbers: the number of each known caveat; new caveats are added with the next numbers.
    """
    found = {numbers.setdefault(str(c), len(numbers) + 1) for c in caveats}
    return ", ".join(map(str, sorted(found)))


# --- runs


def results(settings: list[Setting]) -> list:
    """Return the table of the settings, with their accuracies and proved guarantees."""
    numbers = number_columns("seeds", "final accuracy", "claimed ε", "proved ε", "δ")
    promise = text_columns("unit", "adjacency", "view", "method", "status")
    rows = []
    for setting in settings:
        best = tables.proved(setting.guarantees, setting.config.get("view"))
        claims = [g for g in setting.guarantees if g["status"] == "claimed"]
        failed = f" (+{setting.failed} failed)" if setting.failed else ""
        rows.append(
            (
                setting.label,
                f"{setting.seeds}{failed}",
                _accuracy(setting.final),
                "; ".join(map(guarantee_rows.claim, claims)),
                *_epsilon_and_delta(best),
                *(("", "", "") if best["epsilon"] is None else _whose(best)),
                best["method"],
                best["status"],
            )
        )
    columns = [*text_columns("setting"), *numbers, *promise]
    keep = [name for name, _ in columns if name != "claimed ε"]
    caption = "Final test accuracy and what is proved of it"
    table = without_empty_columns(caption, columns, rows, keep)
    words = f"{PLUS_MINUS} Bands in pictures extend from the smallest to the largest seed."
    return [Text(OUTSIDE), table, Text(words, quiet=True)]


def _epsilon_and_delta(guarantee) -> tuple[str, str]:
    """Return the cells of a guarantee's epsilon and delta."""
    if guarantee["epsilon"] is None:
        return "none", ""
    return f"{guarantee['epsilon']:.4g}", f"{guarantee['delta']:.3g}"


def _whose(guarantee) -> tuple:
    """Return the cells of a guarantee's unit, adjacency and view."""
    return guarantee["unit"], guarantee["adjacency"], guarantee["view"].replace("_", " ")


def run_pictures(settings: list[Setting]) -> list:
    """Return the blocks with curves, and with accuracy against epsilon."""
    described = settings[:MAX_DESCRIBED_SETTINGS]
    finals = "; ".join(f"{s.label}: {_accuracy(s.final) or 'none'}" for s in described)
    finals += "; and more" if len(settings) > len(described) else ""
    promises, omitted, omitted_panels = len(plots.promises(settings)), "", ""
    if len(settings) > plots.SHOWN:
        omitted = f" The first {plots.SHOWN} of {len(settings)} settings are drawn."
    if promises > plots.PANELS:
        omitted_panels = f" The {plots.PANELS} most frequent of {promises} panels are drawn."
    pictures = [
        (
            plots.curves(settings, "accuracy", "loss"),
            f"Test accuracy and loss against rounds. Final accuracy of {finals}.",
            ACCURACY_WORDS + omitted,
        ),
        (
            plots.frontier(settings),
            "Final accuracy against ε, the numbers of the table above.",
            FRONTIER_WORDS + omitted_panels + omitted,
        ),
        (
            plots.curves(settings, "clip_fraction", "update_norm"),
            "Clip fraction and norm of the update against rounds.",
            CLIPPING_WORDS + omitted,
        ),
    ]
    found = [
        Picture(alt, caption, plots.png(figure), plots.svg(figure))
        for figure, alt, caption in pictures
        if figure is not None
    ]
    return found or [Text("These runs have no rows to draw.", quiet=True)]


def guarantees(settings: list[Setting]) -> list:
    """Return the tables of guarantees and audits, with the caveats."""
    caveats: dict = {}
    columns = [
        *text_columns("setting"),
        *number_columns("ε", "δ"),
        *text_columns("unit", "adjacency", "view", "method", "status", "caveats"),
    ]
    rows = [
        (
            setting.label,
            *_epsilon_and_delta(guarantee),
            *_whose(guarantee),
            guarantee["method"],
            guarantee["status"],
            number_caveats(guarantee["caveats"], caveats),
        )
        for setting in settings
        for guarantee in setting.guarantees
    ]
    blocks: list = [Table("Every guarantee and claim of every setting", columns, rows)]
    if caveats:
        sentences = [f"{c[:1].upper()}{c[1:]}" + ("" if c.endswith(".") else ".") for c in caveats]
        blocks.append(Text("Caveats, by the numbers in the last column:"))
        blocks.append(Items(sentences, numbered=True))
    else:
        blocks.append(Text("No caveats were recorded."))
    return [*blocks, *_audits(settings), Text(VIEWS, quiet=True)]


def _audits(settings: list[Setting]) -> list:
    """Return a table with a row per audit: its epsilon next to the proved and claimed ones at the
    same delta and number of rounds."""
    numbers = ("audited ε", "proved ε", "claimed ε", "δ", "confidence", "trials", "rounds")
    words = ("unit", "adjacency", "view", "canary", "method", "status", "verdict")
    columns = [*text_columns("setting"), *number_columns(*numbers), *text_columns(*words)]
    rows = []
    for setting in settings:
        for audit in setting.audits:
            verdict = document.REFUTED if audit["refuted"] else "nothing is refuted"
            bound = (audit["proved"] or {}).get("epsilon")
            if audit["contradicted"]:
                verdict = document.CONTRADICTED
            elif bound is not None and audit["epsilon"] > bound:
                verdict = document.CONDITION_REFUTED
            rows.append(
                (
                    setting.label,
                    cell(float(audit["epsilon"])),
                    "none" if audit["proved"] is None else _epsilon_and_delta(audit["proved"])[0],
                    cell(audit["claimed"]),
                    f"{audit['delta']:.3g}",
                    *(cell(audit[k]) for k in ("confidence", "trials", "rounds")),
                    *_whose(audit),
                    *(audit[k] for k in ("canary", "method", "status")),
                    verdict,
                )
            )
    if not rows:
        return []
    caption = "Audits: what attacks measured"
    table = without_empty_columns(caption, columns, rows, keep=("proved ε",))
    return [table, Text(AUDITED, quiet=True)]


def data(facts: list[tuple[str, dict]]) -> list:
    """Return the blocks that describe the data; `facts` are pairs (name, facts of its data)."""
    shown = [k for k in DATA if any(f.get(k) not in (None, [], "") for _, f in facts)]
    columns = [("data of", False), *((DATA[k], k not in NOT_NUMBERS) for k in shown)]
    rows = _merge_rows([(name, *(_fact(f.get(k)) for k in shown)) for name, f in facts])
    return [Table("Rows and clients", columns, rows), Text(DATA_WORDS, quiet=True)]


def fields(settings: list[Setting], sources: list[Source]) -> list:
    """Return the blocks with the fields in which settings differ, and all fields of each."""
    # a field that a setting of another source lacks does not count as a difference
    known = dict.fromkeys(k for setting in settings for k in setting.config)
    values = lambda k: {json.dumps(s.config[k]) for s in settings if k in s.config}
    different = [k for k in known if len(values(k)) > 1]
    blocks = []
    if different:
        rows = [(s.label, *(cell(s.config.get(k)) for k in different)) for s in settings]
        columns = [*text_columns("setting"), *number_columns(*different)]
        blocks.append(Table("Fields that differ", columns, rows))
    for setting in settings[:MAX_LISTED_SETTINGS]:
        lines = [
            f"{k} = {json.dumps(v, ensure_ascii=False)}"
            for k, v in setting.config.items()
            if v is not None
        ]
        heading = f"{setting.label}: all fields, as resolved"
        blocks.append(Fold(heading, [Code("\n".join(lines))]))
    files = [source for source in sources if source.config]
    return blocks + [Fold(f"{s.label}: config.toml", [Code(s.config)]) for s in files]


# --- versions and commands


def versions(known: list[tuple[str, dict]]) -> list:
    """Return tables of the software versions of several results: equal ones and different ones.

    Args:
        known: pairs (name of a result, manifest of its run).
    """
    if not known:
        return [Text("These results do not record their versions.")]
    facts = [m["versions"] | {k: m[k] for k in MANIFEST if k in m} for _, m in known]
    values = {k: [_fact(f.get(k)) for f in facts] for f in facts for k in f}
    same = [(k, v[0]) for k, v in values.items() if len(set(v)) == 1]
    different = {k: v for k, v in values.items() if len(set(v)) > 1}
    blocks: list = []
    if same:
        caption = "The same everywhere" if len(facts) > 1 else "Versions and environment"
        blocks.append(Table(caption, text_columns("what", "value"), same))
    if different:
        rows = zip((name for name, _ in known), *different.values())
        blocks.append(Table("Differences", text_columns("made by", *different), _merge_rows(rows)))
    if "noise" in values:
        words = "noise: the smallest and largest multiplier of each noisy chain of the first "
        blocks.append(Text(words + "setting.", quiet=True))
    return blocks


def commands(lines: list[str], more: str = "") -> list:
    """Return a sentence about reproducing the results, and the commands."""
    words = (
        "With the versions and devices above, the same commands give the same numbers. NEW is a "
        f"new directory{more}."
    )
    return [Text(words), Code("\n".join(lines), commands=True)]


def _run_command(source: Source) -> str:
    """Return the command that reproduces a source."""
    if source.kind == "demo":
        # its parts have different numbers of rounds unless --rounds was given
        rounds = {run["rounds"] for run in source.runs}
        asked = f" --rounds {rounds.pop()}" if len(rounds) == 1 else ""
        return f"jfl demo{asked} --seeds {len(source.manifest.get('seeds') or [0])} --out NEW"
    if source.config:
        config = shlex.quote(str(source.path / "config.toml"))
        return f"jfl {source.kind} --config {config} --out NEW"
    return f"# {' '.join(source.label.split())}: its config.toml is not there"
