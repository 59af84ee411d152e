"""What the commands print: a progress bar, tables, and the caveats that travel with an epsilon."""

import sys

from ..core import options
from ..privacy import plain_numbers
from ..runs import guarantee_rows, statistics
from ..runs.config import FACTORIES, OPTIMIZERS, OPTIONS
from ..runs.presets import PRESETS
from .accounting import milestones

PERIOD = 3600.0  # seconds of a run by which the time that is left is told: evaluations are rare


def progress(shown: bool = True, of: str = ""):
    """A progress bar on stderr, with a field `note`; nothing at all unless `shown`.

    That is decided here: a bar that is hidden once it was begun is never ended.  With `of`, what
    is counted, it has a field `accuracy` too; on a terminal it shows that, and the time that is
    left.
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
        speed_estimate_period=PERIOD,
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
        shown.add_row(*(Text(str(v)) for v in row))  # as it is: [n, 28] is no markup
    # a table in a file or a pipe is not cut to some terminal's width
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
    """The cells under PRIVACY."""
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
    """What the paper says, for each view."""
    once = lambda g: ", one round" if g["rounds"] == 1 else ""
    return ", ".join(
        f"{g['epsilon']:.4g} ({g['view'].replace('_', ' ')}{once(g)})"
        for g in guarantees
        if g["status"] == "claimed"
    )


def results(entries, out):
    """The runs of a summary: a row for each setting, over its seeds."""
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
    """The lines of the demo, a row for each of their guarantees."""
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
    """What ± stands for, where a table has one."""
    return (
        f"{statistics.PLUS_MINUS}\n"
        if any("±" in str(cell) for row in rows for cell in row)
        else ""
    )


def warn(command, text):
    """A warning on stderr, above a progress bar if there is one."""
    print(f"jfl {command}: warning: {text}", file=sys.stderr, flush=True)


def names():
    """Everything that a config can name, with the first sentence of its docstring and options."""
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
    """Its options with their defaults."""
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
    """One guarantee of bare numbers."""
    found = guarantee_rows.as_row(guarantee)
    table(
        None,
        [("noise multiplier", True), *PRIVACY],
        [(f"{z:.6g}", *privacy(found))],
        f"{plain_numbers.MEANINGS[guarantee.adjacency]}\n" + caveats([found]),
    )
