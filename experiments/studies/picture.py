"""What a study shows: its tables and its picture."""

import math
import sys

import numpy as np

from jfl.cli import console
from jfl.runs import record

from .plans import NONE


def shown(mean, half, digits=3):
    return (
        "none"
        if mean is None
        else f"{mean:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")
    )


def show(plan, rows, verdicts, skipped, quick):
    """The tables of a study."""
    number = lambda v: "" if v is None else f"{v:.4g}"
    cells, before = [], None
    for r in rows:
        first = shown(r["mean"], r["half"]) if plan.y == "accuracy" else number(r["claimed"])
        chosen = " ".join(f"{k}={v:g}" for k, v in r.get("chosen", {}).items()) + (
            " (edge)" if r.get("at_edge") else ""
        )
        panel, before = "" if r["panel"] == before else r["panel"], r["panel"]
        cells.append(
            (
                panel,
                r["line"],
                number(r.get("stated", r["x"])),
                first + (f" ({r['failed']} failed)" if r["failed"] else ""),
                number(r["epsilon"]) or "none",
                *(str(r[k] or "") for k in ("delta", "unit", "adjacency", "view")),
                (r["method"] or "").partition(",")[0],
                chosen,
            )
        )
    console.table(
        plan.title + (" (quick)" if quick else ""),
        [
            ("panel", False),
            ("line", False),
            *(
                (h, True)
                for h in (
                    (plan.xlabel, "accuracy") if plan.y == "accuracy" else ("ε stated", "ε claimed")
                )
            ),
            ("ε proved", True),
            ("δ", True),
            ("unit", False),
            ("adjacency", False),
            ("view", False),
            ("method", False),
            ("chosen", False),
        ],
        cells,
        f"{record.PLUS_MINUS}  Accuracies lie outside every guarantee, and so does the "
        "choice of rates, made on other seeds."
        if plan.y == "accuracy"
        else "Nothing was trained.",
    )
    console.table(
        "claims",
        [("claim", False), ("verdict", False), ("seen", False)],
        [(v["claim"], v["verdict"], v["seen"]) for v in verdicts],
    )
    for data, why in skipped.items():
        for stream in (sys.stdout, sys.stderr):
            print(f"SKIPPED: {data} was not run.  {why}", file=stream)


def picture(path, plan, rows, quick):
    """A panel each: means and bands of 95 %; dashed without noise.  Of epsilons, the diagonal and
    what proves nothing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels, accuracies = list(dict.fromkeys(r["panel"] for r in rows)), plan.y == "accuracy"
    columns = min(len(panels), 2)
    figure = Figure(
        figsize=(
            5.6 * columns + (1.2 if columns > 1 else 4.0),
            4.3 * math.ceil(len(panels) / columns),
        ),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(math.ceil(len(panels) / columns), columns, squeeze=False).ravel()
    bases = list(dict.fromkeys(r["line"].removesuffix(NONE) for r in rows))
    top = 3 * max([r["mean"] for r in rows if r["mean"] is not None], default=1.0)
    for ax, panel in zip(axes, panels):
        for name in dict.fromkeys(r["line"] for r in rows if r["panel"] == panel):
            mine = [
                r
                for r in rows
                if (r["panel"], r["line"]) == (panel, name)
                and (r["mean"] is not None or not accuracies)
            ]
            i, plain = bases.index(name.removesuffix(NONE)), name.endswith(NONE)
            look = dict(
                color=record.PALETTE[i % len(record.PALETTE)],
                lw=1.7,
                label=name,
                ls="--" if plain else "-",
                marker=None if plain else "osDv^P*X"[i % 8],
                ms=5,
            )
            mean = np.array([top if r["mean"] is None else r["mean"] for r in mine])
            half = np.array([r["half"] or 0.0 for r in mine])
            if mine and mine[0]["x"] is None:
                ax.axhline(mean[0], **look)
                ax.axhspan(
                    mean[0] - half[0], mean[0] + half[0], color=look["color"], alpha=0.12, lw=0
                )
                continue
            x = [r["x"] for r in mine]
            ax.plot(x, mean, **look)
            ax.fill_between(x, mean - half, mean + half, color=look["color"], alpha=0.15, lw=0)
            for r, at, y in zip(mine, x, mean):
                if not accuracies and r["epsilon"] is None:
                    ax.annotate(
                        "nothing is proved",
                        (at, y),
                        xytext=(0, 6),
                        textcoords="offset points",
                        fontsize=8,
                        color=look["color"],
                        ha="center",
                    )
                elif (
                    accuracies and r["epsilon"] is not None and r["target"] is None
                ):  # fixed noise: its epsilon
                    ax.annotate(
                        f"ε {r['epsilon']:.3g}",
                        (at, y),
                        xytext=(0, 6 - 19 * (i % 2)),
                        textcoords="offset points",
                        fontsize=8,
                        color=look["color"],
                        ha="center",
                    )
        if plan.logx:
            ax.set_xscale("log")
            ticks = {
                f"{r['x']:.3g}": r["x"] for r in rows if r["panel"] == panel and r["x"] is not None
            }
            ax.set_xticks(list(ticks.values()), list(ticks))
            ax.minorticks_off()
        if not accuracies:
            ax.set_yscale("log")
            ends = [min(r["x"] for r in rows), max(r["x"] for r in rows)]
            ax.plot(ends, ends, color="0.5", ls=":", lw=1.2, label="proved = claimed")
        ax.set(
            title=panel, xlabel=plan.xlabel, ylabel="test accuracy" if accuracies else "proved ε"
        )
        ax.title.set_fontsize(10)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        beside = {} if accuracies else dict(bbox_to_anchor=(1.02, 1), borderaxespad=0)
        ax.legend(fontsize=8, frameon=False, loc="best" if accuracies else "upper left", **beside)
        if not accuracies:
            ax.margins(x=0.12)
    for ax in axes[len(panels) :]:
        ax.remove()
    figure.suptitle(plan.title + (" (quick settings)" if quick else ""), fontsize=11)
    temporary = path.with_name("." + path.name)
    figure.savefig(temporary, dpi=130, format="png")
    temporary.replace(path)
