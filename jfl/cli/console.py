"""The output of commands: progress bars, tables, and the caveats of guarantees."""

import sys

from ..core import options
from ..privacy import plain_numbers
from ..runs import guarantee_rows, statistics
from ..runs.config import FACTORIES, OPTIMIZERS, OPTIONS
from ..runs.presets import PRESETS
from .accounting import milestones

# Evaluations are rare, so the remaining time is estimated from this many seconds of a run.
SPEED_PERIOD_SECONDS = 3600.0


def progress(shown: bool = True, of: str = ""):
    """Return a progress bar on stderr with a field `note`; it is disabled unless `shown`.

    With `of`, the name of what is counted, it also has a field `accuracy`, which a terminal shows
    together with the remaining time.
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
    """Print rows under columns of (name, right-aligned)."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        caption=caption,
        title_justify="left",
        caption_justify="left",
    )
    for name, right in columns:
        shown.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(str(v)) for v in row))  # brackets as in [n, 28] are not markup
    # Without a terminal, the table is wide enough for all columns.
    console = Console() if sys.stdout.isatty() else Console(width=150)
    console.print(shown)


PRIVACY = [
    ("ε", True),
    ("δ", True),
    ("unit", False),
    ("adjacency", False),
    ("view", False),
    ("method", False),
]


def privacy(g: dict) -> tuple:
    """Return the cells of a guarantee for the columns PRIVACY."""
    if g["epsilon"] is None:
        return ("none", "", "", "", "", g["method"])
    method = f"claimed: {g['method']}" if g["status"] == "claimed" else g["method"]
    return f"{g['epsilon']:.4g}", f"{g['delta']:.0e}", g["unit"], g["adjacency"], g["view"], method


def caveats(guarantees) -> str:
    seen = dict.fromkeys(
        c
        for g in guarantees
        if g["epsilon"] is not None
        for c in (f"claim: {c}" if g["status"] == "claimed" else c for c in g["caveats"])
    )
    return "\n".join(
        ["Accuracy and losses lie outside every guarantee."]
        + [f"{c[0].upper()}{c[1:].rstrip('.')}." for c in seen]
    )


def claimed(guarantees) -> str:
    """Format the epsilons that a paper claims, with their views."""
    once = lambda g: ", one round" if g["rounds"] == 1 else ""
    return ", ".join(
        f"{g['epsilon']:.4g} ({g['view'].replace('_', ' ')}{once(g)})"
        for g in guarantees
        if g["status"] == "claimed"
    )


def results(entries, out):
    """Print the runs of a summary, with a row per setting over its seeds."""
    groups, rows = {}, []
    for e in entries:
        groups.setdefault(e["name"], []).append(e)

    def over(values):
        values = [v for v in values if v is not None]
        return statistics.plus_minus(*statistics.interval(values)) if values else ""

    printed = any(g["status"] == "claimed" for e in entries for g in e["privacy"])
    for name, group in groups.items():
        good = [e for e in group if not e.get("failed")]
        accuracy, failed = over(e["accuracy"]["final"] for e in good), len(group) - len(good)
        rows.append(
            (
                name,
                len(group),
                f"{accuracy} ({failed} failed)".strip() if failed else accuracy,
                over(e["loss"] for e in good),
                *([claimed(group[0]["privacy"])] if printed else []),
                *privacy(guarantee_rows.best(group[0]["privacy"])),
                f"{sum(e['seconds']['total'] for e in group):.1f}",
            )
        )
    beside = [("ε claimed", True)] if printed else []
    table(
        None,
        [
            ("run", False),
            ("seeds", True),
            ("accuracy", True),
            ("loss", True),
            *beside,
            *PRIVACY,
            ("seconds", True),
        ],
        rows,
        _meaning(rows)
        + caveats(
            [guarantee_rows.best(e["privacy"]) for e in entries]
            + [g for e in entries for g in e["privacy"] if g["status"] == "claimed"]
        ),
    )
    print(f"Results are in {out}")


def demo(title, lines, notes):
    """Print the lines of the demo, with a row per guarantee."""
    rows, private = [], []
    for line in lines:
        shown = [g for g in line["guarantees"] if not g["implied"]] or line["guarantees"]
        first = (
            line["name"],
            statistics.plus_minus(*statistics.interval(line["accuracy"]), digits=3),
        )
        for i, g in enumerate(shown):
            rows.append(
                (*(("", "") if i else first), *privacy(g), "" if i else f"{line['seconds']:.1f}")
            )
        private += shown
    table(
        title,
        [("run", False), ("accuracy", True), *PRIVACY, ("seconds", True)],
        rows,
        _meaning(rows) + "\n".join([caveats(private), *notes]),
    )


def _meaning(rows) -> str:
    """Return the meaning of ± if the table has one."""
    return (
        f"{statistics.PLUS_MINUS}\n"
        if any("±" in str(cell) for row in rows for cell in row)
        else ""
    )


def warn(command, text):
    """Print a warning to stderr, above a progress bar if there is one."""
    print(f"jfl {command}: warning: {text}", file=sys.stderr, flush=True)


def names():
    """Print everything that a config can name, with the first sentence of its docstring and its
    options."""
    rows = []
    for kind, factories in FACTORIES.items():
        for name, factory in factories.items():
            text = " ".join((factory.__doc__ or "").strip().split("\n\n")[0].split())
            rows.append((kind, name, text.split(". ")[0].rstrip(".:"), _options(factory)))
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
        option.name if option.default is None else f"{option.name}={_shown(option.default)}"
        for option in options.of(factory)
        if option.name in OPTIONS
    )


def _shown(value) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def curve(c):
    """Print epsilon after a few numbers of rounds."""
    shown = milestones(int(c.rounds[-1]))
    rows = [(n, f"{value:.4g}") for n, value in zip(c.rounds, c.epsilons) if n in shown]
    g = c.guarantee
    print(f"ε against rounds ({g.unit}, {g.adjacency}, {g.view}, δ = {g.delta:g})")
    table(None, [("rounds", True), ("ε", True)], rows)


def show(guarantee, z):
    """Print the guarantee of plain numbers."""
    found = guarantee_rows.as_row(guarantee)
    table(
        None,
        [("noise multiplier", True), *PRIVACY],
        [(f"{z:.6g}", *privacy(found))],
        f"{plain_numbers.MEANINGS[guarantee.adjacency]}\n" + caveats([found]),
    )
