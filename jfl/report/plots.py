"""The pictures of runs in a common style, as SVG in the colours of the page.

The norm of the noise is not drawn next to that of the update, because it depends on the
sensitivity, the divisor and the number of parameters, which no file contains.
"""

import io
import math
from typing import Any, NamedTuple

import numpy as np

from ..runs import guarantee_rows, pictures
from ..runs.tables import interval

INK, COLOURS, SHOWN = pictures.INK, pictures.PALETTE, pictures.MAX_DRAWN_SETTINGS
TITLES = dict(
    accuracy="test accuracy",
    loss="test loss",
    clip_fraction="fraction clipped",
    update_norm="norm of the applied update, with noise",
)
SCALED = ("loss", "update_norm")
# Epsilons are comparable only if they agree in these fields.
PROMISE = ("unit", "adjacency", "view", "delta")
PANELS = 8
MARKS: dict[str, dict[str, Any]] = dict(proved={}, claimed=dict(mfc="none"))
WIDTH = 10.5  # inches


class Setting(NamedTuple):
    """The results of one setting, for all of its seeds except those whose runs failed.

    Attributes:
        label: the name of the setting in legends.
        curves: metric -> (rounds [evaluations], values [seeds, evaluations]).
        final: the final accuracy of each seed.
        guarantees: as in summary.json.
        data: a value that is equal for settings with the same data.
        seeds, failed: the number of seeds that did not fail, and of those that did.
        config: the values of its config.
        audits: the audits of its directory, as in audit.json.
    """

    label: str
    curves: dict
    final: list[float]
    guarantees: list[dict]
    data: object = ""
    seeds: int = 1
    failed: int = 0
    config: dict = {}
    audits: list[dict] = []


def curves(settings: list[Setting], *metrics: str):
    """Draw curves against rounds, with a panel for each metric.

    A curve is the mean over seeds, with a band from the smallest to the largest.

    Returns:
        The figure; None if no setting has any of the metrics.
    """
    settings = settings[:SHOWN]
    panels = [metric for metric in metrics if any(metric in s.curves for s in settings)]
    if not panels:
        return None
    figure, axes = _figure_of_runs(len(panels), len(settings))
    handles: dict = {}
    for ax, metric in zip(axes, panels):
        drawn = {i: s.curves[metric] for i, s in enumerate(settings) if metric in s.curves}
        for i, curve in drawn.items():
            handles.setdefault(i, pictures.draw_curve(ax, i, *curve))
        if _on_logarithmic_axis(metric, [values for _, values in drawn.values()]):
            ax.set_yscale("log")
        ax.set(xlabel="round", title=TITLES[metric])
        ax.locator_params("x", integer=True)
        style(ax)
    legend(figure, [(handles[i], settings[i].label) for i in sorted(handles)])
    return figure


def _on_logarithmic_axis(metric: str, values: list[np.ndarray]) -> bool:
    """Return whether some curve, such as a diverging one, would flatten all others."""
    flat = np.concatenate([np.ravel(v) for v in values])
    low, high = np.nanmin(flat), np.nanmax(flat)
    return bool(metric in SCALED and low > 0 and high > 30 * low)


def promises(settings: list[Setting]) -> list[tuple]:
    """Return the promises (unit, adjacency, view, delta) with a finite epsilon.

    Epsilons are comparable only within one promise.  The most frequent promise comes first.
    """
    counts: dict = {}
    for setting in settings:
        for promise in {_promise(g) for g in setting.guarantees if drawable(g)}:
            counts[promise] = counts.get(promise, 0) + 1
    return sorted(counts, key=lambda p: (-counts[p], list(map(str, p))))


def _promise(guarantee) -> tuple:
    """Return the fields of a guarantee that make its epsilon comparable."""
    return tuple(guarantee[k] for k in PROMISE)


def drawable(guarantee) -> bool:
    """Return whether plots show a guarantee.

    It must have a finite epsilon, be proved or claimed, cover a whole run, and not be implied by
    the guarantee of another unit.
    """
    return (
        guarantee["epsilon"] is not None
        and guarantee["status"] in MARKS
        and guarantee["rounds"] is None
        and not guarantee["implied"]
    )


def _of_promise(setting, promise) -> dict:
    """Return the smallest epsilon of a setting for a promise, by status."""
    epsilons: dict = {}
    for g in setting.guarantees:
        if drawable(g) and _promise(g) == promise:
            epsilons[g["status"]] = min(epsilons.get(g["status"], math.inf), g["epsilon"])
    return epsilons


def frontier(settings: list[Setting]):
    """Draw final accuracy against epsilon, with a panel per unit, adjacency, view and delta.

    The accuracy of a setting without any epsilon, on the same data, is a horizontal dashed or
    dotted line.  The claimed and the proved epsilon of a setting are connected.

    Args:
        settings: the results to show, each of all seeds of one setting.

    Returns:
        The figure; None if no epsilon is finite.
    """
    from matplotlib.lines import Line2D

    settings = [s for s in settings[:SHOWN] if s.final]
    panels = promises(settings)[:PANELS]
    if not panels:
        return None
    figure, axes = _figure_of_runs(len(panels), len(settings), sharey=True)
    handles: dict = {}
    for ax, promise in zip(axes, panels):
        _frontier_panel(ax, settings, promise, handles)
    for ax in axes[::2]:
        ax.set_ylabel("final test accuracy")
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(max(low, 0), min(high, 1.02))
    drawn = {g["status"] for s in settings for g in s.guarantees if drawable(g)}
    marks = [
        (Line2D([], [], color=INK, marker="o", ls="none", ms=7, **MARKS[status]), status)
        for status in MARKS
        if status in drawn
    ]
    legend(figure, [(handles[i], settings[i].label) for i in sorted(handles)] + marks)
    return figure


def _frontier_panel(ax, settings, promise, handles):
    """Draw the settings with a promise, and add a handle of each to `handles` by its index."""
    from matplotlib.lines import Line2D

    epsilons = [_of_promise(s, promise) for s in settings]
    same_data = [s.data for s, of_setting in zip(settings, epsilons) if of_setting]
    for i, (setting, of_setting) in enumerate(zip(settings, epsilons)):
        colour, turn = pictures.look_of(i)
        mean, half = interval(setting.final)
        if setting.data in same_data and not any(map(drawable, setting.guarantees)):
            handles[i] = ax.axhline(mean, color=colour, ls=pictures.UNPROTECTED[turn], lw=1.2)
        if len(of_setting) > 1:
            ax.plot(list(of_setting.values()), [mean] * len(of_setting), color=colour, lw=1, ls=":")
        for status, epsilon in of_setting.items():
            look: dict[str, Any] = dict(color=colour, marker=pictures.SHAPES[turn], ls="none", ms=7)
            look |= MARKS[status]
            ax.errorbar(epsilon, mean, half, capsize=4, **look)
            if status == "proved" or i not in handles:
                handles[i] = Line2D([], [], **look)
    pictures.epsilon_axis(ax, [e for of_setting in epsilons for e in of_setting.values()])
    ax.set(xlabel=f"ε at δ = {promise[-1]:.3g}", title=_promise_words(promise))
    style(ax)


def _promise_words(promise: tuple) -> str:
    """Return the title of a panel."""
    unit, adjacency, view, _ = promise
    viewer = (
        f"the {guarantee_rows.VIEWS[view]}"
        if view == "server"
        else f"a {guarantee_rows.VIEWS.get(view, view)}"
    )
    return f"{unit}, {adjacency}, seen by {viewer}"


def _figure_of_runs(panels: int, named: int, **options):
    """Return a figure for several panels, with space for a legend of `named` names."""
    return new_figure(panels, (WIDTH if panels > 1 else 7, 3.8), legend=0.11 * named, **options)


# --- one style


def new_figure(panels: int, size: tuple[float, float], legend: float = 0.0, **options):
    """Return a figure with two panels per row, and its axes.

    Args:
        panels: the number of panels.
        size: the width of the figure, and the height of a row of panels, in inches.
        legend: the height of the legend, in inches.
        **options: options of matplotlib's `subplots`.
    """
    rows = -(-panels // 2)
    shape = rows, min(panels, 2)
    whole = size[0], size[1] * rows + legend
    figure, axes = pictures.new_figure(whole, *shape, squeeze=False, **options)
    figure.set_facecolor("none")
    layout: Any = figure.get_layout_engine()
    layout.set(h_pad=0.1, hspace=0.04)
    axes = axes.ravel()
    for spare in axes[panels:]:
        spare.remove()
    return figure, axes[:panels]


def style(ax):
    """Give axes the colour of the page, a faint grid and no frame."""
    ax.set_facecolor("none")
    ax.grid(alpha=0.15, color=INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(INK)
    ax.tick_params(colors=INK)
    for words in (ax.title, ax.xaxis.label, ax.yaxis.label):
        words.set_color(INK)
    ax.title.set_fontsize(11)


def legend(figure, entries: list[tuple]):
    """Add a legend below the panels; `entries` are pairs (handle, name).

    Names are shown as they are, even if they look like formulas.
    """
    if not entries:
        return
    long = max(len(label) for _, label in entries) > 34
    legend = figure.legend(
        [handle for handle, _ in entries],
        [f"entry {i}" for i in range(len(entries))],
        labelcolor=INK,
        loc="outside lower left",
        ncols=2 if long else min(4, len(entries)),
        fontsize=9,
        frameon=False,
    )
    for text, (_, label) in zip(legend.get_texts(), entries):
        text.set_parse_math(False)
        text.set_text(shorten(label, 76))


def shorten(words, most: int) -> str:
    """Return a text on one line, cut to `most` characters."""
    words = " ".join(str(words).split())
    return words if len(words) <= most else words[: most - 1] + "…"


def svg(figure) -> str:
    """Return a figure as SVG for a page: text stays text, and colours are those of the page.

    Lines use the variables `--c1`, `--c2`, ... of the page's style, which has a dark mode.  The
    same figure always gives the same SVG.
    """
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jfl"}):
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    text = out.getvalue().replace(INK, "currentColor")
    for i, colour in enumerate(COLOURS[1:], 1):
        text = text.replace(colour.lower(), f"var(--c{i})")
    return text


def png(figure) -> bytes:
    """Return a figure as PNG on white."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=90, facecolor="white", metadata={"Software": None})
    return out.getvalue()
