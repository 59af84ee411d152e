"""Pictures of runs: accuracy against rounds and against epsilon, and epsilon against rounds."""

import io
import math
import textwrap
from pathlib import Path

import numpy as np

from ..core import checks
from ..core.files import write
from .guarantee_rows import VIEWS
from .statistics import interval

INK = "#1f2328"  # text, axes and the first line; on a page of `jfl report`, the colour of its text
# Colours that colour-blind readers can distinguish (Okabe and Ito, 2008).
PALETTE = (INK, "#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#F0E442")
# Where there are more lines than colours, each turn of the palette has another dash, and the points
# of its lines another shape or filling.
STYLES = ("-", "--", ":", "-.")
FILLS = ("full", "none", "left", "bottom")
SHAPES = ("o", "s", "^", "D")
# Settings of matplotlib for pictures in this style: `plt.rcParams.update(jfl.runs.pictures.STYLE)`.
# The yellow of the palette is left out, because text in it cannot be read on white.
STYLE = {
    "axes.prop_cycle": f"cycler('color', {[PALETTE[i] for i in (1, 3, 5, 6, 4, 2, 0)]})",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "figure.dpi": 110,
    "figure.figsize": (7, 3.8),
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
# The dashes of lines that show that there is no guarantee, which are never solid.
UNPROTECTED = ("--", ":", "-.", (0, (8, 2, 1, 2, 1, 2)))
# A marker for each plot of a divided picture, and its sign in the title of the plot.
MARKERS = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("P", "✚"), ("*", "★"))
MAX_DRAWN_SETTINGS = len(STYLES) * len(PALETTE)
MAX_BANDS = 8  # lines of a plot that have bands
SUFFIXES = (".png", ".svg", ".pdf")


def draw_accuracy(path: Path, groups: list[dict], title: str) -> None:
    """Draw accuracy against rounds, and final accuracy against epsilon.

    Plots against rounds show the range over seeds, and the last plot shows 95 % intervals.  Many
    settings of a sweep are divided into a plot for each value of one of its fields.

    Args:
        path: the file to write.
        groups: dicts with name, point (the values of the fields that a sweep varies), privacy (the
            label of the guarantee), promise (its unit and view; "" without one), round [E],
            accuracy [seeds, E], and epsilon (None: no guarantee).
        title: the title of the picture.
    """
    if len(groups) > MAX_DRAWN_SETTINGS:
        title += f" (the first {MAX_DRAWN_SETTINGS} of {len(groups)} settings)"
        groups = groups[:MAX_DRAWN_SETTINGS]
    field, panels, lines = _divide(groups), {}, {}
    promises = {g["promise"] for g in groups} - {""}
    for g in groups:
        panels.setdefault(g["point"].get(field), []).append(g)
        words = " ".join(f"{k}={v}" for k, v in g["point"].items() if k != field) or g["name"]
        g["line"] = words if field else f"{words}, {g['privacy']}"
        if field and len(promises) > 1 and g["promise"]:
            g["line"] += f" ({g['promise']})"
        lines.setdefault(g["line"], len(lines))
    # Two plots in a column can be read on a narrow screen.
    columns = 2 if field else 1
    rows = -(-(len(panels) + 1) // columns)
    size = (13, max(4.2 * rows, 0.17 * len(lines) + 0.6)) if field else (8.4, 7.6)
    figure, grid = new_figure(size, rows, columns, sharey=True, squeeze=False)
    *axes, last = grid.ravel()[: len(panels) + 1]
    for spare in grid.ravel()[len(panels) + 1 :]:
        spare.remove()
    drawn = {}
    for ax, (value, members), (marker, sign) in zip(axes, panels.items(), MARKERS * rows):
        words = "accuracy vs. round (mean and range of seeds)"
        if field:
            same = {g["privacy"] for g in members}
            words = ", ".join([f"{sign} {field}={value}", *(same if len(same) == 1 else ())])
        for g in members:
            place, accuracy = lines[g["line"]], np.asarray(g["accuracy"], float)
            has_band = len(members) <= MAX_BANDS
            drawn[g["line"]] = draw_curve(ax, place, g["round"], accuracy, has_band)
            colour, turn = look_of(place)
            look = dict(color=colour, marker=marker, fillstyle=FILLS[turn], ls=UNPROTECTED[turn])
            _draw_final(last, groups, g, interval(accuracy[:, -1]), look)
        _style(ax, "round", "test accuracy", words)
        ax.locator_params("x", integer=True)
    if known := [g["epsilon"] for g in groups if g["epsilon"] is not None]:
        epsilon_axis(last, known)
    else:
        last.set_xticks([])
    words = "accuracy vs. ε (bars: 95 % intervals; equal ε side by side)"
    where = promises.pop() if len(promises) == 1 else "for its unit and view, see the labels"
    _style(last, f"ε ({where})", "final test accuracy", words)
    low, high = last.get_ylim()
    last.set_ylim(max(0, low), min(1, high))
    bands = "\nagainst rounds: mean and range of seeds" if field else ""
    figure.suptitle(title + bands, fontsize=11)
    if len(lines) < len(PALETTE) and not field:  # text in the last colour, yellow, is hard to read
        for line, handle in drawn.items():
            handle.set_label(textwrap.fill(line, 30))
        label_lines(axes[0])
    else:
        handles = [drawn[line] for line in lines]
        figure.legend(handles, list(lines), loc="outside right center", fontsize=8, frameon=False)
    _save(figure, path)


def look_of(index: int) -> tuple[str, int]:
    """Return the colour of the setting with this index, and the number of its dashes and shape.

    No two of the first MAX_DRAWN_SETTINGS have both in common.
    """
    turn, place = divmod(index, len(PALETTE))
    return PALETTE[place], turn % len(STYLES)


def draw_curve(ax, index: int, rounds, values: np.ndarray, has_band: bool = True):
    """Draw the mean over seeds against rounds, and a band over seeds; return the line.

    Args:
        ax: the axes.
        index: the index of the setting, see `look_of`.
        rounds: Int[evaluations].
        values: Float[seeds, evaluations].
        has_band: whether to draw the band from the smallest to the largest value.
    """
    colour, turn = look_of(index)
    marker = SHAPES[turn] if len(rounds) == 1 else None
    mean = values.mean(0)
    (line,) = ax.plot(rounds, mean, color=colour, ls=STYLES[turn], lw=1.8, marker=marker)
    if has_band and len(values) > 1:  # one seed has no band
        ax.fill_between(rounds, values.min(0), values.max(0), color=colour, alpha=0.15, lw=0)
    return line


def label_lines(ax, size: float = 9) -> None:
    """Write the label of each line at the right of the axes, in its colour, instead of a legend.

    A label is level with the last point of its line; labels that would overlap are moved apart.
    Call this last, when the limits and scales of the axes are set.

    Args:
        ax: the axes; lines without a label get none.
        size: the size of the text in points.
    """
    from matplotlib.container import Container
    from scipy.optimize import isotonic_regression

    figure = ax.figure
    figure.draw_without_rendering()  # this settles the layout
    height = ax.get_window_extent().height
    ends = []
    for handle, label in zip(*ax.get_legend_handles_labels()):
        line = handle[0] if isinstance(handle, Container) else handle
        points = line.get_transform().transform(line.get_xydata())
        y = points[np.isfinite(points).all(1)][-1][1]
        ends.append(((y - ax.get_window_extent().y0) / height, label, line.get_color()))
    ends.sort(key=lambda end: end[0])
    rows = np.array([1 + label.count("\n") for _, label, _ in ends])
    heights = rows * 1.2 * size * figure.dpi / 72 / height
    offsets = np.cumsum(heights) - heights / 2
    # the places nearest to the ends (least squares) at which no two labels overlap
    places = isotonic_regression([y for y, *_ in ends] - offsets).x + offsets
    places -= max(0.0, places[-1] + heights[-1] / 2 - 1.05)
    for place, (_, label, colour) in zip(places, ends):
        ax.text(
            1.015,
            place,
            label,
            transform=ax.transAxes,
            color=colour,
            fontsize=size,
            va="center",
            parse_math=False,
        )


def _divide(groups: list[dict]) -> str | None:
    """Return the field of a sweep whose values get a plot each; None if one plot has them all."""
    values = {k: {str(g["point"][k]) for g in groups} for k in groups[0]["point"]}
    fits = [k for k, v in values.items() if 1 < len(v) <= len(MARKERS) and len(v) < len(groups)]
    too_many = lambda k: max(0, len(groups) / len(values[k]) - len(PALETTE))
    best = min(fits, key=lambda k: (too_many(k), len(values[k])), default=None)
    return best if len(groups) > MAX_BANDS else None


def _draw_final(ax, groups: list[dict], g: dict, final: tuple, look: dict) -> None:
    """Draw the final accuracy of a setting against its epsilon, next to those of equal epsilon."""
    mean, half = final
    if g["epsilon"] is None:
        ax.axhline(mean, color=look["color"], ls=look["ls"], lw=1.2)
        place = dict(transform=ax.get_yaxis_transform(), va="bottom", fontsize=8)
        ax.text(0.02, mean, "no privacy", color=look["color"], **place)
        return
    epsilons = [np.nan if other["epsilon"] is None else other["epsilon"] for other in groups]
    equal = np.flatnonzero(np.isclose(epsilons, g["epsilon"], rtol=0.01)).tolist()
    place = next(i for i in equal if groups[i] is g)
    step = 1.03 ** min(1, 8 / len(equal))
    shift = step ** (equal.index(place) - (len(equal) - 1) / 2)
    ax.errorbar(g["epsilon"] * shift, mean, half, capsize=3, ms=6, **look | dict(ls="none"))


def draw_epsilon_curve(
    path: Path, rounds, epsilons, guarantee: dict, title: str, target: float | None = None
) -> None:
    """Draw epsilon against rounds.

    Args:
        path: the file to write.
        rounds: Int[n], ascending numbers of rounds.
        epsilons: Float[n].
        guarantee: the row of the guarantee after the last of the rounds.
        title: a description of the setting.
        target: an epsilon to mark; None marks none.
    """
    figure, ax = new_figure((7.2, 4.6))
    drawn = np.where(np.isfinite(epsilons) & (epsilons > 0), epsilons, np.nan)
    last = f"ε = {epsilons[-1]:.4g} after {rounds[-1]} rounds"
    ax.plot(rounds, drawn, color=PALETTE[1], lw=2, marker="o", ms=3, label=last)
    if target is not None:
        ax.axhline(target, color="0.35", ls=":", lw=1.4, label=f"target ε = {target:g}")
    ax.set_xscale("log")
    ax.set_yscale("log")
    known = [*drawn[np.isfinite(drawn)], *([target] if target else [])] or [0.1, 1.0]
    low, high = min(known) / 1.3, max(known) * 1.3
    ax.set_ylim(low, high)
    _plain_ticks(ax.yaxis, low, high)
    _plain_ticks(ax.xaxis, *ax.get_xlim())
    ax.legend(fontsize=8, loc="lower right", frameon=False)
    g = guarantee
    promise = f"{g['unit']}, {g['adjacency']}, {VIEWS[g['view']]}, δ = {g['delta']:g}"
    words = textwrap.fill(f"{title}\n{g['method']}", 84, replace_whitespace=False)
    _style(ax, "rounds", f"ε  ({promise})", words)
    _save(figure, path)


def epsilon_axis(ax, epsilons) -> None:
    """Make the x-axis logarithmic, with a tick for each epsilon; 0 is at the left end."""
    known = [e for e in epsilons if e > 0] or [1e-3]
    low, high = max(min(known) / 1.8, 1e-300), min(max(known) * 1.8, 1e300)
    zero = [0.0] * (0 in epsilons)
    ax.set_xscale("symlog", linthresh=low, linscale=0.4)  # logarithmic above low
    ax.set_xlim(-low / 3 if zero else low, high)
    _plain_ticks(ax.xaxis, low, high, zero)


def require_picture_path(path: Path) -> None:
    """Reject a path to which no picture can be written; call this before long computations."""
    if path.suffix.lower() not in SUFFIXES or path.is_dir():
        checks.fail("--plot", f"a file that ends in {', '.join(SUFFIXES)}", str(path))
    if not path.parent.is_dir():
        checks.fail("--plot", "a file in an existing directory", str(path))


def _plain_ticks(axis, low, high, first=()):
    """Label 1, 2 and 5 of each decade, or only the decades, as plain numbers, after `first`."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    parts = (1, 2, 5) if len(decades) < 6 else (1,)
    ticks = [m * 10.0**d for d in decades for m in parts if low <= m * 10.0**d <= high]
    ticks = [*first, *ticks[:: max(1, len(ticks) // 8)]]
    axis.set_ticks(ticks, [f"{t:g}" for t in ticks])
    axis.set_ticks([], minor=True)


def _style(ax, x: str, y: str, title: str) -> None:
    """Set the labels and the title of axes, and a faint grid."""
    ax.set(xlabel=x, ylabel=y)
    ax.set_title(title, fontsize=10)
    ax.grid(alpha=0.25, which="major")
    ax.spines[["top", "right"]].set_visible(False)


def new_figure(size, *shape, **options):
    """Return a figure and its axes, without matplotlib's global state.

    `shape` and `options` are those of matplotlib's `subplots`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(*shape, **options)


def _save(figure, path):
    """Write a figure to a file, atomically."""
    out = io.BytesIO()
    figure.savefig(out, dpi=110, format=path.suffix[1:].lower())
    write(path, [out.getvalue()])
