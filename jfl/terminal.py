"""What commands share: how arguments become fields, and how results look on a terminal."""
import sys

import numpy as np

from . import config as configs
from .config import FIELDS, Config

PRIVACY = [("ε", True), ("δ", True), ("unit", False), ("adjacency", False), ("view", False), ("method", False)]


def parse(kind, args, name, default=None):
    """Arguments as a dataclass; SystemExit(2) with a message for bad ones."""
    import tyro
    return tyro.cli(kind, args=args, prog=f"jfl {name}", **({} if default is None else {"default": default}))


def from_file(args) -> tuple[dict, list]:
    """The values of --config FILE, and the other arguments: flags win over the file."""
    rest, values, i = [], {}, 0
    while i < len(args):
        if args[i] == "--config" or args[i].startswith("--config="):
            inline = args[i].partition("=")[2]
            if not inline and i + 1 == len(args):
                raise ValueError("--config: need a TOML file; got nothing.")
            values |= configs.load(inline or args[i + 1])
            i += 1 if inline else 2
        else:
            rest.append(args[i])
            i += 1
    return values, rest


def command(kind, args, name):
    """Parse a command whose flags are the fields of Config and a few of its own."""
    values, rest = from_file(args)
    axes = values.pop("sweep", {})
    # noise given as a flag replaces noise given in the file, in either form
    for one, other in (("noise-multiplier", "epsilon"), ("epsilon", "noise-multiplier")):
        flags = {a.split("=")[0].replace("_", "-") for a in rest}
        if f"--{one}" in flags and f"--{other}" not in flags:
            values.pop(other.replace("-", "_"), None)
    return parse(kind, rest, name, kind(**values)), axes


def config(command) -> Config:
    """The fields of Config among a command's."""
    return Config(**{k: getattr(command, k) for k in FIELDS})


def progress():
    """A progress bar on stderr, with a note behind it."""
    from rich import progress as bars
    from rich.console import Console
    return bars.Progress(bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn(),
                         bars.TimeElapsedColumn(), bars.TextColumn("{task.fields[note]}"), console=Console(stderr=True))


def table(title, columns, rows, caption=None):
    """Print a table; columns are (name, right-aligned)."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    out = Table(title=title, box=box.SIMPLE_HEAD, caption=caption, title_justify="left", caption_justify="left")
    for name, right in columns:
        out.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        out.add_row(*(str(v) for v in row))
    # a table in a file or a pipe is not cut to some terminal's width
    console = Console() if sys.stdout.isatty() else Console(width=150)
    console.print(out)


def privacy(g: dict) -> tuple:
    """The cells of a guarantee, under the columns PRIVACY."""
    if g["epsilon"] is None:
        return ("none", "", "", "", "", g["method"])
    return f"{g['epsilon']:.4g}", f"{g['delta']:.0e}", g["unit"], g["adjacency"], g["view"], g["method"]


def caveats(guarantees) -> str:
    """What travels with the numbers, each once."""
    seen = dict.fromkeys(c for g in guarantees if g["epsilon"] is not None for c in g["caveats"])
    return "\n".join(["Accuracy and losses lie outside every guarantee."] + [f"{c[0].upper()}{c[1:]}." for c in seen])


def shown(guarantees):
    """The row to plot: the server's view of an example, else the third party's of a client."""
    def rank(g):
        return (g["epsilon"] is None, "implied" in " ".join(g["caveats"]), g["view"] != "server")
    return min(guarantees, key=rank)


def results(entries, out):
    """A row for each setting, over its seeds."""
    groups, rows = {}, []
    for e in entries:
        groups.setdefault(e["name"], []).append(e)

    def over(values):
        values = [v for v in values if v is not None]
        return "" if not values else f"{np.mean(values):.4f}" + (f" ± {np.std(values):.4f}" if len(values) > 1 else "")

    for name, group in groups.items():
        good = [e for e in group if not e.get("failed")]
        accuracy = over(e["accuracy"]["final"] for e in good)
        failed = len(group) - len(good)
        rows.append((name, len(group), f"{accuracy} ({failed} failed)" if failed else accuracy,
                     over(e["loss"] for e in good), *privacy(shown(group[0]["privacy"])),
                     f"{sum(e['seconds']['total'] for e in group):.1f}"))
    table(None, [("run", False), ("seeds", True), ("accuracy", True), ("loss", True), *PRIVACY, ("seconds", True)], rows,
           caveats([shown(e["privacy"]) for e in entries]))
    print(f"Results are in {out}")
