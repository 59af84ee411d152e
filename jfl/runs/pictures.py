"""Pictures of runs: accuracy against rounds and against epsilon, and epsilon against rounds."""

import io
import math
import tempfile
import textwrap
from pathlib import Path

import numpy as np

from ..core import checks
from ..core.files import write
from .guarantee_rows import VIEWS
from .statistics import interval

# Colours that colour-blind readers can distinguish (Okabe and Ito, 2008).
PALETTE = ("#000000", "#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#F0E442")
SUFFIXES = (".png", ".svg", ".pdf")


def draw_accuracy(path: Path, groups: list[dict], title: str) -> None:
    """Draw accuracy against rounds, and final accuracy against epsilon.

    The first plot shows the range over seeds, the second one 95 % intervals.

    Args:
        path: the file to write.
        groups: dicts with label, round [E], accuracy [seeds, E], and epsilon (None: no guarantee).
        title: the title of the picture.
    """
    figure, (left, right) = _figure((10.5, 4.2), 1, 2, width_ratios=(1.35, 1))
    for colour, g in zip(PALETTE * len(groups), groups):
        accuracy = np.asarray(g["accuracy"], float)
        mean, (_, half) = accuracy.mean(0), interval(accuracy[:, -1])
        left.plot(g["round"], mean, color=colour, label=g["label"], lw=1.8)
        low, high = accuracy.min(0), accuracy.max(0)
        left.fill_between(g["round"], low, high, color=colour, alpha=0.15, lw=0)
        if g["epsilon"] is None:
            right.axhline(mean[-1], color=colour, ls="--", lw=1.2)
            place = dict(transform=right.get_yaxis_transform(), va="bottom", fontsize=8)
            right.text(0.02, mean[-1], "no privacy", color=colour, **place)
        else:
            right.errorbar(g["epsilon"], mean[-1], half, fmt="o", color=colour, capsize=4, ms=6)
    left.legend(fontsize=8, loc="lower right", frameon=False)
    if known := [g["epsilon"] for g in groups if g["epsilon"] is not None]:
        epsilon_axis(right, known)
    else:
        right.set_xticks([])
    words = "accuracy against round (mean and range of seeds)"
    _style(left, "round", "test accuracy", words)
    words = "privacy against utility (bars: 95 % intervals)"
    _style(right, "ε (see the legend for its unit and view)", "final test accuracy", words)
    low, high = zip(left.get_ylim(), right.get_ylim())
    for ax in (left, right):
        ax.set_ylim(max(0, min(low)), min(1, max(high)))
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


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
    figure, ax = _figure((7.2, 4.6))
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
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        checks.fail(
            "--plot",
            f"a writable directory for {path.name}",
            f"{str(path.parent)!r} ({error.strerror})",
            "Create it first, or choose another.",
        )


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


def _figure(size, *shape, **options):
    """Return a figure and its axes, without matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(*shape, **options)


def _save(figure, path):
    """Write a figure to a file, atomically."""
    out = io.BytesIO()
    figure.savefig(out, dpi=140, format=path.suffix[1:].lower())
    write(path, [out.getvalue()])
