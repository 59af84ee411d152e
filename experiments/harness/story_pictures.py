"""Draw the pictures of docs/papers from stored results.

A line is drawn against rounds if its values are stored, and else by its end, or against a setting.
The file carries a digest of what is drawn, so that a test can detect a picture that is out of date.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

from jfl.report import plots
from jfl.runs import pictures, tables
from jfl.runs.pictures import PALETTE

from . import results
from .pictures import headline

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
DRAWN = 2  # count it up where the drawing itself changes
COLOURS = (*(PALETTE[i] for i in (1, 3, 5, 6, 4, 2)), "#555555")
MARKS = "osD^vP*"
WIDTH, HEIGHT = 7.4, 2.8  # inches, of a panel: one column, which can be read on a narrow screen


def gathered(told: dict, line) -> dict:
    """Return what is drawn, as plain numbers.

    Args:
        told: the picture in stories.toml.
        line: (experiment, line) -> what is stored of it.
    """
    panels = []
    for panel in told["panels"]:
        series = {}
        for label, name in panel["lines"].items():
            if "x" in panel:
                each = [(x, line(panel["experiment"], name.format(x=x))) for x in panel["x"]]
                series[label] = [(_x(panel, x, one), *_end(one, told)) for x, one in each]
            else:
                series[label] = _rounds(line(panel["experiment"], name), told, panel)
        panels.append({k: panel[k] for k in ("title", "xlabel", "log") if k in panel})
        panels[-1]["series"] = series
    words = {k: told[k] for k in ("message", "ylabel")}
    return dict(drawn=DRAWN, panels=panels, limits=told.get("limits", ()), **words)


def _x(panel, x, one):
    at = panel.get("at", "x")
    return dict(x=float(x), claimed=one.epsilon_claimed, proved=one.epsilon_proved)[at]


def _end(one, told):
    """Return the mean and half of its 95 % interval, or the stored standard deviation."""
    value = told.get("value", "accuracy")
    found = getattr(one, value) if value in ("accuracy", "loss") else one.columns.get(value)
    if isinstance(found, (int, float)):
        return _plain(found), None
    found = results.summary(found or [])
    return _plain(found.mean), _plain(found.std if found.half is None else found.half)


def _rounds(one, told, panel):
    """Return (round, mean, half) along the run, or its end."""
    trace = one.trace.get(told.get("trace", "curve"))
    if not trace:
        return [(panel["rounds"], *_end(one, told))]
    many = len(trace[0])
    at = (
        np.mean(one.trace["round"], 0)
        if "round" in one.trace
        else np.arange(1, many + 1) * panel["rounds"] / many
    )
    values = (tables.interval([v for v in column if v is not None]) for column in zip(*trace))
    return [(_plain(x), *map(_plain, v)) for x, v in zip(at, values)]


def _plain(value):
    return None if value is None or not np.isfinite(value) else round(float(value), 5)


def digest(data: dict) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def up_to_date(name: str, told: dict, line) -> bool:
    """Return whether the file shows what is stored."""
    file = FOLDER / f"{name}.png"
    return file.exists() and digest(gathered(told, line)).encode() in file.read_bytes()


def write(name: str, told: dict, line):
    """Draw a picture, unless the file is up to date."""
    if up_to_date(name, told, line):
        return
    data = gathered(told, line)
    figure = draw(data)
    about = {"Software": None, "Description": digest(data)}
    figure.savefig(FOLDER / f"{name}.png", dpi=100, facecolor="white", metadata=about)


def draw(data: dict):
    """Return the figure: a column of panels under a message; each line has its name at its end."""
    panels = data["panels"]
    labels = list(dict.fromkeys(label for p in panels for label in p["series"]))
    size = WIDTH, HEIGHT * len(panels) + 0.4
    figure, axes = pictures.new_figure(size, len(panels), 1, squeeze=False)
    for ax, panel in zip(axes[:, 0], panels):
        plots.style(ax)
        series = panel["series"]
        ends = all(len(points) == 1 for points in series.values())
        for place, (label, points) in enumerate(series.items()):
            which = labels.index(label)
            look = COLOURS[which], MARKS[which], place if ends else None
            _series(ax, points, *look).set_label(label)
        ax.set_title(panel["title"], loc="left")
        ax.set_ylabel(data["ylabel"])
        _x_axis(ax, panel, ends)
        pictures.label_lines(ax)
    headline(figure, data["message"])
    return figure


def _x_axis(ax, panel, ends):
    if ends:  # one place for each line
        ax.set_xlim(-0.5, len(panel["series"]) - 0.5)
        ax.set_xticks([])
        return
    ax.set_xlabel(panel.get("xlabel", "round"))
    if panel.get("log"):
        ax.set_xscale("log")
    if "xlabel" in panel:  # a setting: ticks at its values
        at = sorted({x for points in panel["series"].values() for x, *_ in points if x is not None})
        ax.set_xticks(at, [f"{x:.2g}" for x in at])
        ax.minorticks_off()


def _series(ax, points, colour, mark, place):
    """Draw a line with its band, or a point with its interval."""
    known = [(x, y, h) for x, y, h in points if x is not None and y is not None]
    x, y, half = np.array([(a, b, h or 0.0) for a, b, h in known], float).reshape(-1, 3).T
    if len(points) == 1:
        x = x if place is None else np.full(len(x), float(place))
        return ax.errorbar(x, y, half, fmt=mark, color=colour, capsize=3, markersize=6)
    many = len(points) > 8
    (drawn,) = ax.plot(x, y, color=colour, marker=None if many else mark, markersize=4)
    ax.fill_between(x, y - half, y + half, color=colour, alpha=0.12, linewidth=0)
    return drawn
