"""What a report says: the sections of its document, from what lies in the folders.

Nothing is computed again: an epsilon is the one that was proved when the run was made.
"""

import json
import shlex

from ..runs import tables
from ..runs.record import PLUS_MINUS
from . import comparison, plots, sources
from .comparison import accuracy, cell
from .document import Code, Document, Fold, Items, Picture, Section, Table, Text

OUTSIDE = (
    "Accuracies, losses, clip fractions and update norms lie outside every guarantee, and so does "
    "choosing among "
    "the settings of a table."
)
BETWEEN = f"{PLUS_MINUS} Bands in pictures go from the least to the largest seed."
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
WORDS = ("partition", "caveats", "checksum")  # facts that are no numbers
MADE = dict(
    experiment="an experiment", collection="a collection of {} experiments", study="a study"
)
MANIFEST = (
    "kernels",
    "noise",
    "seeds",
    "written",
    "groups",
    "recomputed",
    "attempt",
    "seconds",
    "commit",
)


def assemble(found: list) -> Document:
    """The document of some sources."""
    groups = sources.groups(found)
    made = [MADE.get(s.kind, f"jfl {s.kind}").format(len(s.experiments) - 1) for s in found]
    when = [f", {s.manifest['written']}" if "written" in s.manifest else "" for s in found]
    sections = [Section("Results", _headline(groups) + _pictures(groups))] if groups else []
    tried = [s for s in found if s.experiments]
    if sum(len(s.experiments) for s in tried) > 1:
        sections.append(Section("What holds", [Text(OUTSIDE), *comparison.overview(tried)]))
    sections += [
        Section(f"Claims: {s.label}" if len(found) > 1 else "Claims", comparison.blocks(s))
        for s in tried
    ]
    sections += [Section("Guarantees", _guarantees(groups))] if groups else []
    parts = sources.parts(found)
    held = [(n, p) for n, p in parts if p.manifest.get("data")]
    sections += [Section("Data", _data(held))] if held else []
    sections += [Section("Settings", _settings(groups, parts))] if groups else []
    sections += [
        Section("Versions and devices", _versions(found, parts)),
        Section("How to run it again", _again(found)),
    ]
    title = "jfl report: " + ", ".join(s.label for s in found)
    return Document(
        title,
        "From " + "; ".join(f"{s.label} ({m}{w})" for s, m, w in zip(found, made, when)) + ".",
        sections,
    )


def _headline(groups):
    rows = []
    for g in groups:
        best, claims = (
            tables.proved(g.guarantees),
            [c for c in g.guarantees if c["status"] == "claimed"],
        )
        none = best["epsilon"] is None
        rows.append(
            (
                g.setting.label,
                f"{len(g.runs)}" + (f" (+{g.failed} failed)" if g.failed else ""),
                accuracy(g.setting.final),
                "; ".join(map(_claimed, claims)),
                *_numbers(best),
                *(["", "", ""] if none else _who(best)),
                best["method"],
                best["status"],
            )
        )
    columns = [
        ("setting", False),
        ("seeds", True),
        ("final accuracy", True),
        ("claimed ε", True),
        ("proved ε", True),
        ("δ", True),
        ("unit", False),
        ("adjacency", False),
        ("view", False),
        ("method", False),
        ("status", False),
    ]
    if not any(r[3] for r in rows):
        columns, rows = [c for c in columns if c[0] != "claimed ε"], [r[:3] + r[4:] for r in rows]
    return [
        Text(OUTSIDE),
        Table("Final test accuracy and what is proved of it", columns, rows),
        Text(BETWEEN, quiet=True),
    ]


def _numbers(g):
    return ("none", "") if g["epsilon"] is None else (f"{g['epsilon']:.4g}", f"{g['delta']:.3g}")


def _who(g):
    return [g["unit"], g["adjacency"].replace("_", " "), g["view"].replace("_", " ")]


def _claimed(g):
    shown = "nothing" if g["epsilon"] is None else f"{g['epsilon']:.4g}"
    return f"{shown} ({g['view'].replace('_', ' ')}{', one round' if g['rounds'] == 1 else ''})"


def _pictures(groups):
    settings = [g.setting for g in groups]
    who = "; ".join(f"{s.label}: {accuracy(s.final) or 'none'}" for s in settings[:8]) + (
        "; and more" if len(settings) > 8 else ""
    )
    more = (
        f" The first {plots.SHOWN} of {len(settings)} settings are drawn."
        if len(settings) > plots.SHOWN
        else ""
    )
    panels = len(plots.promises(settings))
    less = (
        f" The {plots.PANELS} most frequent of {panels} promises are drawn."
        if panels > plots.PANELS
        else ""
    )
    drawn = [
        (
            plots.curves(settings, ("accuracy", "loss")),
            f"Test accuracy and loss against rounds. Final accuracy of {who}.",
            (
                "Test accuracy and loss against rounds: mean over seeds, bands from the least to "
                "the "
                "largest seed."
            )
            + more,
        ),
        (
            plots.frontier(settings),
            "Final accuracy against ε, the numbers of the table above.",
            "Privacy against utility, one panel for each promise: ε of different units, "
            "adjacencies, views or δ do not "
            "compare. Filled circles are proved, hollow diamonds are what a paper claims, dashed "
            "lines have no guarantee (on "
            "the same data); bars are 95 % intervals. Conditional ε, and claims of one round, are "
            "not drawn." + less + more,
        ),
        (
            plots.curves(settings, ("clip_fraction", "update_norm")),
            "Clip fraction and norm of the update against rounds.",
            "What clipping did, and the size of what the server applied: signal and noise "
            "together, since the files do not "
            "hold what it takes to tell them apart." + more,
        ),
    ]
    return [
        Picture(alt, caption, plots.png(f), plots.svg(f))
        for f, alt, caption in drawn
        if f is not None
    ] or [Text("These runs left no rows to draw.", quiet=True)]


def _guarantees(groups):
    caveats, rows = {}, []
    for g in groups:
        for one in g.guarantees:
            at = [caveats.setdefault(c, len(caveats) + 1) for c in one["caveats"]]
            rows.append(
                (
                    g.setting.label,
                    *_numbers(one),
                    *_who(one),
                    one["method"],
                    one["status"],
                    ", ".join(map(str, sorted(at))),
                )
            )
    said = [f"{c[:1].upper()}{c[1:]}" + "." * (not c.endswith(".")) for c in map(str, caveats)]
    columns = [
        ("setting", False),
        ("ε", True),
        ("δ", True),
        *((k, False) for k in ("unit", "adjacency", "view", "method", "status", "caveats")),
    ]
    return [
        Table("Every guarantee and claim of every setting", columns, rows),
        Text(
            "Caveats, by the numbers in the last column:" if said else "No caveats were recorded."
        ),
        *([Items(said, numbered=True)] if said else []),
        Text(
            "The server sees every upload; a third party sees models only. Claimed is what a "
            "paper's formula says of "
            "this run, whether or not it holds. Runs on the same data compose: together they leak "
            "more than each alone.",
            quiet=True,
        ),
    ]


def _data(parts):
    facts = [(n, p.manifest["data"]) for n, p in parts]
    shown = {k: v for k, v in DATA.items() if any(f.get(k) not in (None, [], "") for _, f in facts)}
    rows = _joined([(n, *(_fact(f.get(k)) for k in shown)) for n, f in facts])
    return [
        Table(
            "Rows and clients",
            [("data of", False), *((v, k not in WORDS) for k, v in shown.items())],
            rows,
        ),
        Text(
            "Rows are those that clients hold, with the smallest, the median and the largest "
            "client. Label spread is "
            "the mean over clients of the total variation distance between a client's class shares "
            "and those of "
            "all: 0 is iid. Of a sweep these are the data of its first point.",
            quiet=True,
        ),
    ]


def _joined(rows):
    """Rows that differ in their first cell alone as one."""
    names: dict = {}
    for first, *rest in rows:
        names.setdefault(tuple(rest), []).append(first)
    return [
        ("; ".join(n[:2]) + (f"; and {len(n) - 2} more" if len(n) > 2 else ""), *rest)
        for rest, n in names.items()
    ]


def _fact(value):
    if isinstance(value, dict):
        return ", ".join(f"{k} {cell(v)}" for k, v in value.items() if v not in ("", None))
    return "; ".join(map(cell, value)) if isinstance(value, list) else cell(value)


def _settings(groups, parts):
    keys = list(dict.fromkeys(k for g in groups for k in g.config))
    differ = [
        k for k in keys if len({json.dumps(g.config[k]) for g in groups if k in g.config}) > 1
    ]
    rows = [(g.setting.label, *(cell(g.config.get(k)) for k in differ)) for g in groups]
    blocks = (
        [Table("Fields that differ", [("setting", False), *((k, True) for k in differ)], rows)]
        if differ
        else []
    )
    blocks += [
        Fold(
            f"{g.setting.label}: all fields, as resolved",
            [
                Code(
                    "\n".join(
                        f"{k} = {json.dumps(v, ensure_ascii=False)}"
                        for k, v in g.config.items()
                        if v is not None
                    )
                )
            ],
        )
        for g in groups[:64]
    ]
    return blocks + [Fold(f"{n}: config.toml", [Code(p.config)]) for n, p in parts if p.config]


def _versions(found, parts):
    have = [(n, p.manifest) for n, p in parts if p.manifest]
    for s in found:
        have += [
            (
                f"{s.label}: {e.name}" if e.name and len(s.experiments) > 1 else s.label,
                dict(versions=e.versions) | ({"seeds": e.seeds} if e.seeds else {}),
            )
            for e in s.experiments
            if e.versions
        ]
    if not have:
        return [Text("These results do not say what made them.")]
    flat = [m["versions"] | {k: m[k] for k in MANIFEST if k in m} for _, m in have]
    keys = list(dict.fromkeys(k for f in flat for k in f))
    same = [k for k in keys if len({_fact(f.get(k)) for f in flat}) == 1]
    differ = [k for k in keys if k not in same]
    blocks = (
        [
            Table(
                "The same everywhere" if len(flat) > 1 else "What made it",
                [("what", False), ("value", False)],
                [(k, _fact(flat[0].get(k))) for k in same],
            )
        ]
        if same
        else []
    )
    rows = _joined([(n, *(_fact(f.get(k)) for k in differ)) for (n, _), f in zip(have, flat)])
    blocks += (
        [Table("What differs", [("made by", False), *((k, False) for k in differ)], rows)]
        if differ
        else []
    )
    noise = "noise: least and largest noise multiplier of each noisy chain of the first setting."
    return blocks + ([Text(noise, True)] if "noise" in keys else [])


def _again(found):
    lines = []
    for s in found:
        seeds, rounds = s.manifest.get("seeds") or [0], {e["rounds"] for e in s.runs}
        config = shlex.quote(str(s.path / "config.toml"))
        if s.kind == "demo":
            # its parts have rounds of their own, unless one number was asked for
            asked = f" --rounds {rounds.pop()}" if len(rounds) == 1 else ""
            lines.append(f"jfl demo{asked} --seeds {len(seeds)} --out NEW")
        elif s.experiments:
            lines += _experiments(s)
            files = [shlex.quote(str(p.path / "config.toml")) for p in s.lines if p.config]
            lines += [f"jfl sweep --config {f} --out NEW" for f in files]
        elif s.config:
            lines.append(f"jfl {s.kind} --config {config} --out NEW")
        else:
            lines.append(f"# {' '.join(s.label.split())}: its config.toml is not there")
        if recomputed := s.manifest.get("recomputed"):
            lines.append(
                f"# {' '.join(s.label.split())}: {recomputed} rounds ran twice with new noise; a "
                f"straight run does not"
            )
    words = (
        "On the versions and devices above the same commands give the same numbers. NEW is a "
        "new directory"
    )
    if any(line.startswith("python -m experiments.papers.MODULE") for line in lines):
        words += "; MODULE is the paper's module, such as noble2022, which the results do not name"
    return [Text(words + "."), Code("\n".join(lines))]


def _experiments(source):
    """The commands of a source's experiments, as far as it names their module."""
    if (
        source.kind == "collection"
        and source.path.suffix == ".json"
        and not any(e.module for e in source.experiments)
    ):
        names = ", ".join(" ".join(e.name.split()) for e in source.experiments if e.name)
        return [
            f"python -m experiments.{_module(source.path.stem)} --list",
            f"# {' '.join(source.label.split())} collects {names}: what was reduced is told above",
        ]
    named = [e for e in source.experiments if e.module] or source.experiments[:1]
    lines = []
    for e in named:
        module, name = _module(e.module or "MODULE"), shlex.quote(e.name or "NAME")
        only = " --lines " + " ".join(map(shlex.quote, e.only)) if e.only else ""
        lines.append(f"python -m experiments.{module} {name}{' --quick' * e.quick}{only} --out NEW")
    return lines


def _module(name: str) -> str:
    """The module below `experiments` that runs what results call `name`."""
    return name if name == "studies" else f"papers.{shlex.quote(name)}"
