"""Pictures of a report: curves over seeds, and privacy against utility, as SVG that follows the
page's colours.

What is not drawn: the noise beside the signal.  metrics.csv has the norm of what the server
applied, noise included, and the manifest a noise multiplier of the first setting; the noise's own
norm also takes the sensitivity, the divisor and the number of parameters, which no file holds.  So
the norm is drawn as what it is.
"""

import io
import json
import math
from typing import NamedTuple

import numpy as np

from ..runs import record
from ..runs.build import DATA
from ..runs.tables import interval

INK = "#1f2328"  # words, axes and the first line: on a page, the colour of its words
STYLES = ("-", "--", ":", "-.")
COLOURS = (INK, *record.PALETTE[1:])
SHOWN = len(STYLES) * len(COLOURS)
TITLES = dict(
    accuracy="test accuracy",
    loss="test loss",
    clip_fraction="fraction clipped",
    update_norm="norm of the update applied, noise included",
    client_accuracy="clients' own test accuracy",
)
SCALED = ("loss", "update_norm")
# of what is said with an epsilon, only the same can stand on one axis
PROMISE = ("unit", "adjacency", "view", "delta")
PANELS = 8
MARKS = dict(proved=dict(marker="o"), claimed=dict(marker="D", mfc="none"))


class Setting(NamedTuple):
    """One setting over its seeds, failed ones left out."""

    label: str
    curves: dict  # metric -> (rounds [E], values [seeds, E])
    final: list  # accuracy of each seed at the end
    guarantees: list  # of dict, as in summary.json
    data: object = ""  # equal where the data are


def data_of(entries: list[dict]) -> frozenset:
    """Which data the runs of a setting have, of their entries in summary.json: equal where the data
    are the same."""
    return frozenset(
        json.dumps([e["dataset"], *(e["config"].get(k) for k in DATA)]) for e in entries
    )


def curves(settings: list[Setting], metrics: tuple):
    """One panel a metric: mean over seeds, and a band from the least to the largest -> Figure, None
    without values."""
    metrics = [m for m in metrics if any(m in s.curves for s in settings)]
    if not metrics:
        return None
    figure, axes = _figure(len(metrics), settings)
    handles = [None] * len(settings[:SHOWN])
    for ax, metric in zip(axes, metrics):
        for i, s in enumerate(settings[:SHOWN]):
            if metric not in s.curves:
                continue
            rounds, values = s.curves[metric]
            colour, style = _look(i)
            (line,) = ax.plot(
                rounds,
                values.mean(0),
                color=colour,
                ls=style,
                lw=1.8,
                marker="o" if len(rounds) == 1 else None,
            )
            handles[i] = handles[i] or line
            if len(values) > 1:  # of one seed there is no band
                ax.fill_between(
                    rounds, values.min(0), values.max(0), color=colour, alpha=0.15, lw=0
                )
        seen = np.concatenate(
            [np.ravel(s.curves[metric][1]) for s in settings[:SHOWN] if metric in s.curves]
        )
        if metric in SCALED and np.nanmin(seen) > 0 and np.nanmax(seen) > 30 * np.nanmin(seen):
            ax.set_yscale("log")  # one that diverges would flatten all others
        ax.set(xlabel="round", title=TITLES[metric])
        _sober(ax)
    _legend(figure, [(h, s.label) for h, s in zip(handles, settings) if h is not None])
    return figure


def _look(i):
    return COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]


def promises(settings: list[Setting]) -> list[tuple]:
    """The promises that some finite epsilon is given for, the most frequent first."""
    seen: dict = {}
    for s in settings:
        for p in {_promise(g) for g in s.guarantees if _drawn(g)}:
            seen[p] = seen.get(p, 0) + 1
    return sorted(seen, key=lambda p: (-seen[p], list(map(str, p))))


def _promise(g):
    return tuple(g[k] for k in PROMISE)


def _drawn(g):
    """A whole run's epsilon that stands on its own, not one that follows from another unit's."""
    return (
        g["epsilon"] is not None
        and g["status"] in MARKS
        and g["rounds"] is None
        and not g["implied"]
    )


def frontier(settings: list[Setting]):
    """Final accuracy against epsilon, a panel a promise -> Figure, None where no epsilon is finite.

    Settings of the same data without any epsilon are dashed lines; what a paper claims and what is
    proved of one setting are joined.
    """
    from matplotlib.lines import Line2D

    settings = [s for s in settings[:SHOWN] if s.final]
    panels = promises(settings)[:PANELS]
    if not panels:
        return None
    figure, axes = _figure(len(panels), settings, sharey=True)
    handles: dict = {}
    for ax, promise in zip(axes, panels):
        seen = []
        inside = lambda s, promise=promise: any(
            _drawn(g) and _promise(g) == promise for g in s.guarantees
        )
        same = [s.data for s in settings if inside(s)]
        for i, s in enumerate(settings):
            colour, _ = _look(i)
            mean, half = interval(s.final)
            found = {}
            for g in s.guarantees:
                if _drawn(g) and _promise(g) == promise:
                    found[g["status"]] = min(found.get(g["status"], math.inf), g["epsilon"])
            if s.data in same and not any(_drawn(g) for g in s.guarantees):
                ax.axhline(mean, color=colour, ls="--", lw=1.2)
                handles[i] = Line2D([], [], color=colour, ls="--", lw=1.2)
            if len(found) > 1:
                ax.plot(list(found.values()), [mean] * len(found), color=colour, lw=1, ls=":")
            for status, epsilon in found.items():
                ax.errorbar(
                    epsilon, mean, half, color=colour, capsize=4, ms=7, ls="none", **MARKS[status]
                )
                if status == "proved" or i not in handles:
                    handles[i] = Line2D([], [], color=colour, ls="none", ms=7, **MARKS[status])
                seen.append(epsilon)
        record.epsilon_axis(ax, seen)
        unit, adjacency, view, delta = promise
        ax.set(
            xlabel=f"ε at δ = {delta:.3g}",
            title=f"{unit}, {adjacency.replace('_', ' ')}, seen by {_view(view)}",
        )
        _sober(ax)
    for ax in axes[::2]:
        ax.set_ylabel("final test accuracy")
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(max(low, 0), min(high, 1.02))
    marks = [
        (Line2D([], [], color=INK, ls="none", ms=7, **look), status)
        for status, look in MARKS.items()
        if any(g["status"] == status and _drawn(g) for s in settings for g in s.guarantees)
    ]
    _legend(figure, [(handles[i], settings[i].label) for i in sorted(handles)] + marks)
    return figure


def _view(view):
    return f"the {record.VIEWS[view]}" if view == "server" else f"a {record.VIEWS.get(view, view)}"


def _ticks(ax, low, high):
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    parts = (1, 2, 5) if len(decades) < 4 else (1,)
    ticks = [m * 10.0**d for d in decades for m in parts if low <= m * 10.0**d <= high]
    ticks = ticks or [(low * high) ** 0.5]
    ax.set_xticks(
        ticks[:: max(1, len(ticks) // 8)], [f"{t:.3g}" for t in ticks[:: max(1, len(ticks) // 8)]]
    )
    ax.minorticks_off()


def _figure(panels, settings, sharey=False):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(
            10.5 if panels > 1 else 7,
            3.8 * -(-panels // 2) + 0.11 * min(len(settings), SHOWN),
        ),
        layout="constrained",
        facecolor="none",
    )
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(h_pad=0.1, hspace=0.04)
    axes = figure.subplots(-(-panels // 2), min(panels, 2), squeeze=False, sharey=sharey).ravel()
    for spare in axes[panels:]:
        spare.remove()
    return figure, axes[:panels]


def _sober(ax):
    ax.set_facecolor("none")
    ax.grid(alpha=0.25, color=INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(INK)
    ax.tick_params(colors=INK)
    for words in (ax.title, ax.xaxis.label, ax.yaxis.label):
        words.set_color(INK)
    ax.title.set_fontsize(11)


def _legend(figure, entries):
    """Below the panels; names are words, never formulas."""
    if not entries:
        return
    long = max(len(label) for _, label in entries) > 34
    short = lambda label: label if len(label) <= 76 else label[:75] + "…"
    legend = figure.legend(
        [h for h, _ in entries],
        [f"entry {i}" for i in range(len(entries))],
        labelcolor=INK,
        loc="outside lower left",
        ncols=2 if long else min(4, len(entries)),
        fontsize=9,
        frameon=False,
    )
    for text, (_, label) in zip(legend.get_texts(), entries):
        text.set_parse_math(False)
        text.set_text(short(" ".join(label.split())))


def svg(figure) -> str:
    """The figure with words as words, and INK as the colour of the words around it; the same each
    time."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jfl"}):
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    return out.getvalue().replace(INK, "currentColor")


def png(figure) -> bytes:
    """The figure on white, for where an SVG cannot follow the page."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=90, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def several(values) -> np.ndarray:
    """Lists of one length as an array [seeds, E]; None is NaN."""
    return np.array([[np.nan if v is None else v for v in row] for row in values], float)
