"""The output of commands: progress bars, tables, and the caveats of guarantees."""

import shlex
import sys

from ..core import options
from ..core.records import CAVEATS_PAGE, first_sentence
from ..runs import guarantee_rows, statistics
from ..runs.config import FACTORIES, OPTIMIZERS, OPTIONS, PRESETS

# Evaluations are rare, so the remaining time is estimated from this many seconds of a run.
SPEED_PERIOD_SECONDS = 3600.0


def progress(shown: bool = True, of: str = ""):
    """Return a progress bar on stderr, which shows the text of each task's field `note`.

    Args:
        shown: False for a bar that prints nothing.
        of: the name of what is counted.  If it is given, a terminal also shows the remaining time
            and the task's field `accuracy`, the latest test accuracy.
    """
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    note = bars.TextColumn("{task.fields[note]}")
    live = (
        bars.TextColumn(f"{of}, left"),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[accuracy]}"),
    )
    return bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        *(live if of and console.is_terminal else ()),
        note,
        console=console,
        speed_estimate_period=SPEED_PERIOD_SECONDS,
        disable=not shown,
    )


def table(title, columns, rows, caption=None):
    """Print a table; `columns` are pairs (name, whether it is right-aligned).

    The title and the caption are as wide as the terminal, even if the table is narrow.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD)
    for name, right in columns:
        shown.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(str(v)) for v in row))  # brackets as in [n, 28] are not markup
    # Without a terminal, the table is wide enough for all columns.
    console = Console() if sys.stdout.isatty() else Console(width=150)
    for part in (title and Text(title), shown, caption and Text(caption)):
        if part:
            console.print(part)


PRIVACY = [
    ("ε", True),
    ("δ", True),
    ("unit", False),
    ("adjacency", False),
    ("view", False),
    ("method", False),
]


def privacy(g: dict) -> tuple:
    """Return the cells of a guarantee's row in a table with the columns PRIVACY."""
    if g["epsilon"] is None:
        return ("none", "", "", "", "", g["method"])
    method = f"claimed: {g['method']}" if g["status"] == "claimed" else g["method"]
    return f"{g['epsilon']:.4g}", f"{g['delta']:.0e}", g["unit"], g["adjacency"], g["view"], method


def caveats(guarantees) -> str:
    """Return the first sentences of the distinct caveats of some guarantees as one text."""
    seen = dict.fromkeys(
        first_sentence(c)
        for g in guarantees
        if g["epsilon"] is not None
        for c in (f"claim: {c}" if g["status"] == "claimed" else c for c in g["caveats"])
    )
    return "\n".join(
        ["Accuracy and losses lie outside every guarantee."]
        + [f"{c[0].upper()}{c[1:].rstrip('.')}." for c in seen]
        + [f"More about caveats: {CAVEATS_PAGE}."] * bool(seen)
    )


def results(entries, out, title=None, notes=()):
    """Print a table of runs, with one row per setting over its seeds.

    A line above the table has the columns that are the same for all settings.

    Args:
        entries: the entries of a summary.json.
        out: the directory of the runs, which is printed below the table.
        title: the title of the table.
        notes: sentences below the table.
    """
    groups, rows, shown = {}, [], []
    for e in entries:
        groups.setdefault(e["name"], []).append(e)

    def over(values):
        values = [v for v in values if v is not None]
        return statistics.plus_minus(*statistics.interval(values)) if values else ""

    has_claims = any(g["status"] == "claimed" for e in entries for g in e["privacy"])
    for name, group in groups.items():
        good = [e for e in group if not e.get("failed")]
        accuracy, failed = over(e["accuracy"]["final"] for e in good), len(group) - len(good)
        loss, diverged = over(e["loss"] for e in good), sum(e["loss"] is None for e in good)
        guarantees = group[0]["privacy"]
        claims = [g for g in guarantees if g["status"] == "claimed"]
        best = guarantee_rows.best(guarantees, group[0]["config"]["view"])
        shown += [best, *claims]
        rows.append(
            (
                *map(str, (group[0].get("point") or dict(run=name)).values()),
                len(group),
                f"{accuracy} ({failed} failed)".strip() if failed else accuracy,
                f"{loss} ({diverged} not finite)".strip() if diverged else loss,
                *([", ".join(map(guarantee_rows.claim, claims))] if has_claims else []),
                *privacy(best),
                f"{sum(e['seconds']['total'] for e in group):.1f}",
            )
        )
    columns = [(name, False) for name in entries[0].get("point") or ["run"]]
    own = len(columns)
    columns += [("seeds", True), ("accuracy", True), ("loss", True)]
    columns += [("ε claimed", True)] * has_claims + [*PRIVACY, ("seconds", True)]
    same = [
        i
        for i, (name, _) in enumerate(columns)
        if len({row[i] for row in rows}) == 1
        and (i < own or name == "seeds" or (name, _) in PRIVACY[1:])
    ]
    common = ", ".join(f"{columns[i][0]} {rows[0][i]}" for i in same if rows[0][i] != "")
    keep = lambda row: [cell for i, cell in enumerate(row) if i not in same]
    columns, rows = keep(columns), [keep(row) for row in rows]
    meaning = [statistics.PLUS_MINUS] * any("±" in str(cell) for row in rows for cell in row)
    title = f"{title}\n{common}" if title else common
    table(title, columns, rows, "\n".join([*meaning, caveats(shown), *notes]))
    print(f"Results are in {out}. For a page about them: jfl report {shlex.quote(str(out))}")


def warn(command, text):
    """Print a warning to stderr, above a progress bar if there is one."""
    print(f"jfl {command}: warning: {text}", file=sys.stderr, flush=True)


def names():
    """Print everything that a config can name, each with a short description and its options."""
    rows = []
    for kind, factories in FACTORIES.items():
        for name, factory in factories.items():
            text = " ".join((factory.__doc__ or "").strip().split("\n\n")[0].split())
            text = text.split(". ")[0].rstrip(".:").removeprefix("Return ")
            rows.append((kind, name, text[:1].upper() + text[1:], _options(factory)))
    rows += [("optimizer", name, "on clients or server (optax)", "") for name in OPTIMIZERS]
    rows += [
        (
            "preset",
            name,
            f"accuracy {preset.accuracy}",
            " ".join(f"{k}={v}" for k, v in preset.fields.items()),
        )
        for name, preset in PRESETS.items()
    ]
    columns = ("kind", "name", "what it is", "options")
    table(None, [(column, False) for column in columns], rows)


def _options(factory) -> str:
    """Return the options of a function with their defaults."""
    return " ".join(
        option.name
        if option.default is None
        else f"{option.name}={_format_default(option.default)}"
        for option in options.of(factory)
        if option.name in OPTIONS
    )


def _format_default(value) -> str:
    """Return a default as text; the elements of a tuple are separated by commas."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
