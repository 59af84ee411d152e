"""Draw pictures of studies: points in panels, and audits."""

import io
import math
import textwrap
from typing import NamedTuple

import numpy as np
from PIL import Image

from jfl.report import plots
from jfl.runs import pictures

LINE_MARKS = ("o", "s", "D", "v", "^", "P", "X", "*")
NO_NOISE = ", no noise"  # ends the name of a study's line without noise
WIDTH = 7.4  # inches; one column of panels, so that text can be read on a narrow screen
# Yellow text cannot be read on white.
LINE_COLOURS = (*(plots.COLOURS[i] for i in (1, 3, 5, 6, 4, 2, 0)), "#767676")


class Message(NamedTuple):
    """The words of a study's picture.

    Attributes:
        title: what a reader learns from the figure, in a sentence.
        xlabel: the name of x, or a dict from a panel to its name; "" keeps that of the study.
        panels, lines: stored name -> name in the picture; other names stay.
        height: of a panel, in inches.
    """

    title: str
    xlabel: str | dict = ""
    panels: dict = {}
    lines: dict = {}
    height: float = 2.9


def study(points: list, xlabel: str, title: str = "", message: Message | None = None):
    """Draw the panels of a study: means against x with 95 % bands, dashed without noise.

    Each line has its name at its end. If the noise was not calibrated to an epsilon, the proved one
    is written at each point. In a study of claims, draw the proved epsilon against the claimed one,
    with the line of equality; a line without proof is at the top and says so.

    Args:
        points: results.Point of all panels.
        xlabel: the name of x under each panel.
        title: above the figure.
        message: other words for all of these.

    Returns:
        The figure; None if there is nothing to draw.
    """
    points, claims, top = points_to_draw(points)
    if not points:
        return None
    message = message or Message(title)
    panels = list(dict.fromkeys(p.panel for p in points))
    names = list(dict.fromkeys(p.line.removesuffix(NO_NOISE) for p in points))
    height = message.height * len(panels) + 0.4
    figure, axes = pictures.new_figure((WIDTH, height), len(panels), 1, squeeze=False)
    for ax, panel in zip(axes[:, 0], panels):
        inside = [p for p in points if p.panel == panel]
        shown = list(dict.fromkeys(p.line.removesuffix(NO_NOISE) for p in inside))
        plots.style(ax)
        xlabels = message.xlabel or xlabel
        ax.set_title(message.panels.get(panel, panel), loc="left", parse_math=False)
        ax.set_xlabel(xlabels[panel] if isinstance(xlabels, dict) else xlabels, parse_math=False)
        ax.set_ylabel("proved ε" if claims else "test accuracy", color=plots.INK)
        if len({p.x for p in inside} - {None}) == 1:
            ax.set_xlabel("test accuracy")
            _levels(ax, inside, message.lines)
            continue
        for name in dict.fromkeys(p.line for p in inside):
            line = [p for p in inside if p.line == name]
            base = name.removesuffix(NO_NOISE)
            index = (names if len(names) <= len(LINE_COLOURS) else shown).index(base)
            _study_line(ax, line, index, name.endswith(NO_NOISE), top, message.lines)
        positions = sorted({p.x for p in inside if p.x is not None})
        if positions:
            _logarithmic(ax, positions)
        if claims:
            ax.set_yscale("log")
            ax.margins(x=0.12)
            ax.plot(positions, positions, color=plots.INK, ls=":", lw=1.2, label="proved = claimed")
        pictures.label_lines(ax)
    headline(figure, message.title)
    return figure


def headline(figure, words):
    """Write the message of a figure above it."""
    words = textwrap.fill(words, int(9.2 * figure.get_figwidth()))
    look = dict(fontsize=11.5, color=plots.INK, weight="bold")
    figure.suptitle(words, x=0.01, ha="left", **look)


def _levels(ax, points, lines):
    """Draw one row for each line of a panel whose points have no x, or the same."""
    for y, point in enumerate(points):
        is_printed = not point.values
        colour = LINE_COLOURS[1 if is_printed else 0]
        look = dict(color=colour, marker="D" if is_printed else "o", capsize=3)
        ax.errorbar(point.mean, y, xerr=point.half or 0.0, **look)
        ax.annotate(
            f"{point.mean:.3f}",
            (point.mean, y),
            (0, 7),
            textcoords="offset points",
            ha="center",
            color=colour,
            fontsize=9,
        )
    ax.set_ylabel("")
    ax.set_ylim(len(points) - 0.5, -0.7)
    ax.set_yticks(range(len(points)), [lines.get(p.line, p.line) for p in points])


def points_to_draw(points: list) -> tuple[list, bool, float]:
    """Return the points with a place, whether they are claims, and the top for unproved ones."""
    claims = any(p.claimed is not None for p in points)
    points = [p for p in points if (claims or p.mean is not None) and (p.x is None or p.x > 0)]
    means = [p.mean for p in points if p.mean is not None]
    return (points, claims, 3 * max(means)) if means else ([], claims, 0.0)


def audits(points: list, xlabel: str, title: str = "", message: Message | None = None):
    """Draw what was audited, claimed and proved of each plan, one per row.

    A line reaches to what the attack refutes, and faintly to what it could have refuted at most. A
    refuted claim is filled, and its row says so.

    Args:
        points: results.Point that have `audited`.
        xlabel: the name of the axis.
        title: above the figure.
        message: words that replace the title.

    Returns:
        The figure; None without such a point.
    """
    rows = audit_rows(points)
    if not rows:
        return None
    figure, (ax,) = plots.new_figure(1, (8.6, 1.3 + 0.25 * len(rows)), legend=0.5)
    (left, right), handles = audit_range(points), {}
    ax.set_xscale("log")
    ax.set_xlim(left, right)
    outside = dict(transform=ax.get_yaxis_transform(), va="center", fontsize=9, parse_math=False)
    for y, row in enumerate(rows):
        if isinstance(row, str):
            ax.text(
                -0.01,
                y,
                plots.shorten(row, 70),
                color=plots.INK,
                weight="bold",
                ha="right",
                **outside,
            )
            continue
        ax.text(-0.01, y, plots.shorten(row.line, 60), color=plots.INK, ha="right", **outside)
        ax.text(1.01, y, claim_words(row), color=_audit_colour(row), **outside)
        _audit_row(ax, y, row, left, handles)
    ax.set(ylim=(len(rows) - 0.4, -0.6), yticks=[], xlabel=plots.shorten(xlabel, 60))
    headline(figure, message.title if message else title)
    plots.style(ax)
    ax.spines["left"].set_visible(False)
    order = (
        "audited: an attack refutes any smaller ε",
        "the largest ε that this number of runs could refute",
        "proved",
    )
    order += ("claimed", "claimed and refuted")
    plots.legend(figure, [(handles[name], name) for name in order if name in handles])
    return figure


def audit_rows(points: list) -> list:
    """Return the audited points, each panel after its name."""
    points = [p for p in points if p.audited is not None]
    panels = list(dict.fromkeys(p.panel for p in points))
    return [row for name in panels for row in (name, *(p for p in points if p.panel == name))]


def audit_range(points: list) -> tuple[float, float]:
    """Return the ends of the axis of audited points."""
    audited = [p for p in points if p.audited is not None]
    shown = [e for p in audited for e in (p.audited, p.ceiling, p.claimed, p.epsilon) if e]
    return 0.6 * min(shown), 2 * max(shown)


def _audit_row(ax, y, point, left, handles):
    """Draw one plan, and put a handle of each mark into `handles` by its name."""
    audited = max(point.audited, left)
    ax.plot((left, audited), (y, y), color=plots.COLOURS[1], lw=2.2)
    (dot,) = ax.plot(audited, y, color=plots.COLOURS[1], marker="o", ms=6, lw=2.2, clip_on=False)
    if point.audited < left:  # nothing was shown
        dot.set_markerfacecolor("white")
    else:
        handles["audited: an attack refutes any smaller ε"] = dot
    (handles["the largest ε that this number of runs could refute"],) = ax.plot(
        (audited, max(point.ceiling or 0.0, audited)), (y, y), color=plots.COLOURS[1], lw=1, ls=":"
    )
    if point.epsilon is not None:
        (handles["proved"],) = ax.plot(
            point.epsilon, y, color=plots.INK, ls="none", marker="|", ms=13, mew=2.2
        )
    if point.claimed is not None:
        refuted = point.audited > point.claimed
        (handles["claimed and refuted" if refuted else "claimed"],) = ax.plot(
            point.claimed,
            y,
            color=_audit_colour(point),
            ls="none",
            marker="X" if refuted else "x",
            ms=9 if refuted else 7,
            mew=0.5 if refuted else 1.6,
        )


def _audit_colour(point) -> str:
    refuted = point.claimed is not None and point.audited > point.claimed
    return plots.COLOURS[3] if refuted else plots.INK


def claim_words(point) -> str:
    """Return what is written next to a row: its claim, and what refutes it or its proof."""
    words = "" if point.claimed is None else f"claims {point.claimed:.3g}"
    if point.epsilon is not None and point.audited > point.epsilon:
        return f"{words}, proved {point.epsilon:.3g} CONTRADICTED".removeprefix(", ")
    refuted = point.claimed is not None and point.audited > point.claimed
    return words + refuted * f", audited {point.audited:.3g}"


def _study_line(ax, points, index, without_noise, top, lines):
    """Draw one line of a panel with its name as its label, horizontal if it has no x."""
    index %= len(LINE_COLOURS)
    name = lines.get(points[0].line, points[0].line)
    unproved = np.array([p.claimed is not None and p.epsilon is None for p in points])
    if unproved.all():
        name += ":\nnothing is proved"
    elif unproved.any():
        name += ":\nnothing is proved at " + ", ".join(
            f"{p.x:.3g}" for p in points if not p.epsilon
        )
    notes = [remark(p) for p in points]
    if len(points) > 1 and len(set(notes)) == 1 and notes[0]:
        name += f"\n({notes.pop()} at all points)"
        notes = [""] * len(points)
    look = dict(
        color=LINE_COLOURS[index],
        lw=1.7,
        ls="--" if without_noise else "-",
        marker=None if without_noise else LINE_MARKS[index],
        ms=5,
        label=name,
    )
    mean = np.array([top if p.mean is None else p.mean for p in points])
    half = np.array([p.half or 0.0 for p in points])
    if points[0].x is None:
        ax.axhspan(mean[0] - half[0], mean[0] + half[0], color=look["color"], alpha=0.12, lw=0)
        ax.axhline(mean[0], **look | dict(ls="--", marker=None))
        return
    if unproved.any():  # marks without a value, at the top
        mark = look | dict(ls="none", markerfacecolor="white")
        places = [p.x for p in points]
        ax.plot(places, np.where(unproved, mean, np.nan), **mark)
        if unproved.all():
            return
        mean = np.where(unproved, np.nan, mean)
        look["label"] = None
    ax.plot([p.x for p in points], mean, **look)
    if half.any() and len(points) == 1:  # a band would have no width
        ax.vlines(points[0].x, mean - half, mean + half, color=look["color"], lw=look["lw"])
    elif half.any():
        ax.fill_between(
            [p.x for p in points], mean - half, mean + half, color=look["color"], alpha=0.15, lw=0
        )
    for point, y, words in zip(points, mean, notes):
        if words:
            ax.annotate(
                words,
                (point.x, y),
                xytext=(0, -15),
                textcoords="offset points",
                fontsize=8,
                color=look["color"],
                ha="center",
            )


def remark(point) -> str:
    """Return the note at a point of a study whose epsilon is not its x."""
    if point.claimed is not None:
        return ""
    calibrated = point.target is not None or point.epsilon is None or point.epsilon == point.x
    return "" if calibrated else f"ε {point.epsilon:.3g}"


def _logarithmic(ax, positions):
    """Scale an axis logarithmically, with a tick at each position if they are few."""
    ax.set_xscale("log")
    ticks = {f"{x:.3g}": x for x in positions}
    if len(ticks) > 7:
        low, high = positions[0] / 1.1, positions[-1] * 1.1
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if len(decades) < 4 else (1,)
        inside = [m * 10.0**d for d in decades for m in steps if low <= m * 10.0**d <= high]
        ticks = {f"{x:.3g}": x for x in inside[:: max(1, len(inside) // 8)]}
    ax.set_xticks(list(ticks.values()), list(ticks))
    ax.minorticks_off()


def save(path, figure, dpi: int = 130):
    """Write a figure on white as PNG of 256 colours, a third of the size of one of all colours.

    An interrupted write leaves the earlier file.
    """
    full = io.BytesIO()
    figure.savefig(full, dpi=dpi, facecolor="white", format="png")
    reduced = Image.open(full).convert("RGB").quantize(256, kmeans=3, dither=Image.Dither.NONE)
    temporary = path.with_name("." + path.name)
    reduced.save(temporary, format="png", optimize=True)
    temporary.replace(path)
