"""Pictures of experiments: how far lines lie apart, and the panels of a study; in the page's
colours, as in figures."""

import math

import numpy as np

from . import plots

MARKS = ("o", "s", "D", "v", "^", "P", "X", "*")
BARE = ", no noise"  # ends the name of a study's line without noise
WIDTH = 10.5
TALL = 60  # lines of one picture


def lines(found: list):
    """The accuracy of lines, one below the other -> Figure, None for fewer than two of them.

    Filled where some epsilon is proved; bars are 95 % intervals, or a standard deviation where the
    file holds no more. What a paper claims and what is proved stand beside it.
    """
    found = [line for line in found if _finite(line.mean)][:TALL]
    if len(found) < 2:
        return None
    figure, (ax,) = _figure(0.8 + 0.26 * len(found), 1, 1)
    for y, line in enumerate(found):
        ax.errorbar(
            line.mean,
            y,
            xerr=(line.std if line.half is None else line.half) or None,
            color=plots.COLOURS[1],
            marker="o",
            ms=6,
            mfc="none" if line.proved is None else None,
            capsize=3,
            lw=1.2,
        )
        for x, side, words in ((-0.01, "right", line.name), (1.01, "left", _epsilons(line))):
            ax.text(
                x,
                y,
                _short(words, 52),
                transform=ax.get_yaxis_transform(),
                ha=side,
                va="center",
                fontsize=9,
                color=plots.INK,
                parse_math=False,
            )
    ax.set(
        ylim=(len(found) - 0.4, -0.6),
        yticks=range(len(found)),
        yticklabels=[],
        xlabel="test accuracy",
    )
    low, high = ax.get_xlim()  # an interval of two seeds may leave what an accuracy can be
    ax.set_xlim(max(low, -0.02), min(high, 1.02))
    ax.tick_params(axis="y", length=0)
    plots._sober(ax)
    return figure


def _epsilons(line) -> str:
    said = [
        f"{v:.3g} {what}"
        for v, what in ((line.claimed, "claimed"), (line.proved, "proved"))
        if v is not None
    ]
    return "ε " + ", ".join(said) if said else ""


def _finite(value) -> bool:
    return value is not None and math.isfinite(value)


def _short(words, most) -> str:
    words = " ".join(str(words).split())
    return words if len(words) <= most else words[: most - 1] + "…"


def study(points: list, xlabel: str):
    """A panel each: means against x with 95 % bands, dashed without noise -> Figure, None without
    anything to draw.

    Of a study that claims, the proved epsilon against the claimed one, with the line where they are
    the same.
    """
    points = [p for p in points if _finite(p["mean"]) and (p["x"] is None or p["x"] > 0)]
    names = list(dict.fromkeys(p["panel"] for p in points))
    if not points:
        return None
    claims = any(p.get("claimed") is not None for p in points)
    columns, bases = (
        min(len(names), 2),
        list(dict.fromkeys(p["line"].removesuffix(BARE) for p in points)),
    )
    figure, axes = _figure(
        3.9 * -(-len(names) // columns) + 0.2 * (-(-len(bases) // 4)), len(names), columns
    )
    handles: dict = {}
    for ax, panel in zip(axes, names):
        mine = [p for p in points if p["panel"] == panel]
        for name in dict.fromkeys(p["line"] for p in mine):
            handles.setdefault(
                name,
                _drawn(
                    ax,
                    [p for p in mine if p["line"] == name],
                    bases.index(name.removesuffix(BARE)),
                    name.endswith(BARE),
                ),
            )
        at = sorted({p["x"] for p in mine if p["x"] is not None})
        if at:
            ax.set_xscale("log")
            plots._ticks(ax, at[0] / 1.1, at[-1] * 1.1)
            if len(at) < 8:
                ax.set_xticks(at, [f"{x:.3g}" for x in at])
        if claims:
            ax.set_yscale("log")
            (handles["proved = claimed"],) = ax.plot(at, at, color=plots.INK, ls=":", lw=1.2)
        ax.set_title(_short(panel, 60), parse_math=False)
        ax.set_xlabel(_short(xlabel, 60), parse_math=False)
        plots._sober(ax)
    for ax in axes[::columns]:
        ax.set_ylabel("proved ε" if claims else "test accuracy", color=plots.INK)
    plots._legend(figure, [(handle, name) for name, handle in handles.items()])
    return figure


def _drawn(ax, mine, i, bare):
    """One line of a panel, a level across it where it has no x -> its handle."""
    look = dict(
        color=plots.COLOURS[i % len(plots.COLOURS)],
        lw=1.7,
        ls="--" if bare else "-",
        marker=None if bare else MARKS[i % len(MARKS)],
        ms=5,
    )
    mean, half = np.array([p["mean"] for p in mine]), np.array([p["half"] or 0.0 for p in mine])
    if mine[0]["x"] is None:
        ax.axhspan(mean[0] - half[0], mean[0] + half[0], color=look["color"], alpha=0.12, lw=0)
        return ax.axhline(mean[0], **look)
    x = [p["x"] for p in mine]
    (handle,) = ax.plot(x, mean, **look)
    if half.any():
        ax.fill_between(x, mean - half, mean + half, color=look["color"], alpha=0.15, lw=0)
    return handle


def _figure(height, panels, columns):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(WIDTH if panels > 1 or columns > 1 else 0.9 * WIDTH, height),
        layout="constrained",
        facecolor="none",
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(-(-panels // columns), columns, squeeze=False).ravel()
    for spare in axes[panels:]:
        spare.remove()
    return figure, axes[:panels]
