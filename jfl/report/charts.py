"""What a page draws again as plots that answer to the pointer: the numbers of `plots`, as data.

A chart is plain data that JSON holds and templates/plots.js draws: `legend`, entries that switch
their lines on and off in all panels, and `panels` of axes and lines. A point of a line is [x, y,
low, high, words]: its interval or its least and largest seed, and what else is said of it; what
is missing at the end is left out. Colours are places in the palette of the page. `zero` and `top`
of an axis are where a 0 that has no logarithm stands, and what has no value at all.
"""

import math
from typing import Any

import numpy as np

from ..runs.tables import interval
from . import plots
from .plots import COLOURS, NO_NOISE, STYLES, Setting, colour_of

DASHES: dict[str, list[int]] = dict(zip(STYLES, ([], [7, 4], [2, 3], [8, 3, 2, 3])))
# marks of a study's lines, under the names that the page's library has for them
SHAPES = ("circle", "rect", "rectRot", "triangle", "star", "cross", "crossRot", "dash")
ACCURACY = "test accuracy"
SEEDS, INTERVAL = "least to largest seed", "95 % interval"
SPREAD = "standard deviation over seeds"
REFUTED_COLOUR = 3


def curves(names: list[str], panels: list[plots.Panel]) -> dict | None:
    """The panels of `plots.curves`.

    Args:
        names: of the legend.
        panels: what is drawn.

    Returns:
        The chart; None without panels.
    """
    if not panels:
        return None
    drawn = []
    for panel in panels:
        lines = [
            dict(of=i, points=_curve(*curve), spread="band") for i, curve in panel.curves.items()
        ]
        values = [values for _, values in panel.curves.values()]
        y = dict(title=panel.label, log=plots.on_logarithmic_axis(panel.metric, values))
        drawn.append(dict(title=panel.title, x=dict(title="round", whole=True), y=y, lines=lines))
    chart = dict(legend=_legend(names), panels=drawn, spread=SEEDS)
    return _without_undrawn(chart, {i for panel in panels for i in panel.curves})


def _curve(rounds, values) -> list:
    mean, low, high = values.mean(0), values.min(0), values.max(0)
    if len(values) == 1:  # of one seed there is no band
        return [_point(x, y) for x, y in zip(rounds, mean)]
    return [_point(*p) for p in zip(rounds, mean, low, high)]


def _settings(settings: list[Setting]) -> list[dict]:
    return _legend([s.label for s in settings])


def _legend(names: list[str]) -> list[dict]:
    looks = [plots.look_of(i) for i in range(len(names))]
    return [
        dict(name=name, colour=COLOURS.index(colour), dash=DASHES[dash], line=True)
        for name, (colour, dash) in zip(names, looks)
    ]


def frontier(settings: list[Setting]) -> dict | None:
    """The panels of `plots.frontier`: final accuracy against epsilon, one for each promise.

    Args:
        settings: of the runs.

    Returns:
        The chart; None where no epsilon is finite.
    """
    settings = [s for s in settings[: plots.SHOWN] if s.final]
    promises = plots.promises(settings)[: plots.PANELS]
    if not promises:
        return None
    panels = [_frontier_panel(settings, promise) for promise in promises]
    lines = [line for panel in panels for line in panel["lines"]]
    drawn = {line["of"] for line in lines}
    for panel in panels:
        panel["y"] |= _accuracy_range(lines)
    legend = [
        entry | (_LEVEL if _level(s) else dict(dash=[], line=False, mark="circle"))
        for entry, s in zip(_settings(settings), settings)
    ]
    return _without_undrawn(dict(legend=legend, panels=panels, spread=INTERVAL), drawn)


_LEVEL = dict(dash=DASHES["--"], line=True, mark="")


def _accuracy_range(lines) -> dict:
    """The ends of an axis that holds all intervals, as far as an accuracy can be."""
    values = [v for line in lines for point in line["points"] for v in point[1:4]]
    values = [v for v in values if isinstance(v, (int, float))]
    around = 0.04 * (max(values) - min(values)) or 0.02
    low, high = max(min(values) - around, 0), min(max(values) + around, 1.02)
    return dict(low=_number(low), high=_number(high))


def _level(setting: Setting) -> bool:
    return not any(map(plots.drawable, setting.guarantees))


def _frontier_panel(settings, promise) -> dict:
    epsilons = [plots.of_promise(s, promise) for s in settings]
    same_data = [s.data for s, of_setting in zip(settings, epsilons) if of_setting]
    known = [e for of_setting in epsilons for e in of_setting.values()]
    x = _epsilon_axis(known) | dict(title=f"ε at δ = {promise[-1]:.3g}")
    positions = sorted({x["low"], x["high"], *(e or x["zero"] for e in known)})
    lines = []
    for i, (setting, of_setting) in enumerate(zip(settings, epsilons)):
        mean, half = interval(setting.final)
        if setting.data in same_data and _level(setting):
            lines.append(_level_line(i, positions, mean, half) | dict(spread=""))
        elif of_setting:
            points = [
                _point(e or x["zero"], mean, *_around(mean, half), words=status)
                for status, e in of_setting.items()
            ]
            look = [("circle", False) if s == "proved" else ("rectRot", True) for s in of_setting]
            marks, hollow = (list(part) for part in zip(*look))
            line = dict(of=i, points=points, spread="bars", marks=marks, hollow=hollow)
            lines.append(line | dict(dash=DASHES[":"]))
    y = dict(title="final test accuracy")
    return dict(title=plots.promise_words(promise), x=x, y=y, lines=lines)


def _epsilon_axis(epsilons) -> dict:
    """A logarithmic axis; 0, which has no logarithm, stands at `zero`, left of the others."""
    positive = [e for e in epsilons if e > 0] or [1e-3]
    low, high = max(min(positive) / 1.8, 1e-300), min(max(positive) * 1.8, 1e300)
    if 0 not in epsilons:
        return dict(log=True, low=_number(low), high=_number(high))
    return dict(log=True, low=_number(low / 3), high=_number(high), zero=_number(low / 1.8))


def _level_line(of, positions, mean, half) -> dict:
    """A line across the panel that the pointer meets wherever there are points."""
    points = [_point(x, mean, *_around(mean, half)) for x in positions]
    return dict(of=of, points=points, spread="band") | _LEVEL


def lines(lines: dict) -> dict | None:
    """The rows of `plots.lines`: the accuracy of the lines of an experiment.

    Args:
        lines: name -> results.Line.

    Returns:
        The chart; None for fewer than two lines with an accuracy.
    """
    known = plots.lines_with_accuracy(lines)
    if len(known) < 2:
        return None
    points = []
    for y, (_, _, spread) in enumerate(known):
        around = spread.std if spread.half is None else spread.half
        points.append(_point(spread.mean, y, *_around(spread.mean, around)))
    hollow = [line.epsilon_proved is None for _, line, _ in known]
    rows = dict(
        rows=[name for name, _, _ in known], right=[plots.epsilons(line) for _, line, _ in known]
    )
    line = dict(of=0, points=points, spread="bars", hollow=hollow, mark="circle")
    panel = dict(title="", x=dict(title=ACCURACY), y=rows, lines=[line])
    kinds = {SPREAD if s.half is None else INTERVAL for _, _, s in known if s.half or s.std}
    return dict(
        legend=[dict(name="", colour=1, mark="circle")],
        panels=[panel],
        spread=kinds.pop() if len(kinds) == 1 else "interval",
    )


def study(points: list, xlabel: str) -> dict | None:
    """The panels of `plots.study`.

    Args:
        points: results.Point of all panels.
        xlabel: the name of x under each panel.

    Returns:
        The chart; None without anything to draw.
    """
    points, claims, top = plots.points_to_draw(points)
    if not points:
        return None
    names = list(dict.fromkeys(p.line.removesuffix(NO_NOISE) for p in points))
    entries = {name: i for i, name in enumerate(dict.fromkeys(p.line for p in points))}
    legend = [_study_entry(name, names.index(name.removesuffix(NO_NOISE))) for name in entries]
    panels = []
    for title in dict.fromkeys(p.panel for p in points):
        inside = [p for p in points if p.panel == title]
        positions = sorted({p.x for p in inside if p.x is not None})
        drawn = []
        for name in dict.fromkeys(p.line for p in inside):
            of_line = [p for p in inside if p.line == name]
            drawn.append(_study_line(of_line, entries[name], positions, top))
        if claims:
            same = [_point(x, x) for x in positions]
            drawn.append(dict(of=len(entries), points=same, dash=DASHES[":"], line=True, mark=""))
        y = dict(title="proved ε", log=True, top=_number(top)) if claims else dict(title=ACCURACY)
        x = _log_axis(positions) | dict(title=xlabel)
        panels.append(dict(title=title, x=x, y=y, lines=drawn))
    if claims:
        legend.append(dict(name="proved = claimed", colour=0, dash=DASHES[":"], line=True))
    return dict(legend=legend, panels=panels, spread=INTERVAL)


def _study_entry(name: str, index: int) -> dict:
    without_noise = name.endswith(NO_NOISE)
    mark = "" if without_noise else SHAPES[index % len(SHAPES)]
    dash = DASHES["--" if without_noise else "-"]
    return dict(name=name, colour=colour_of(index), dash=dash, line=True, mark=mark)


def _study_line(points, of, positions, top) -> dict:
    mean = [top if p.mean is None else p.mean for p in points]
    if points[0].x is None:
        return _level_line(of, positions or [1.0], mean[0], points[0].half)
    drawn = [
        _point(p.x, y, *_around(y, p.half), words=plots.remark(p)) for p, y in zip(points, mean)
    ]
    return dict(of=of, points=drawn, spread="band")


def _log_axis(positions) -> dict:
    if not positions:
        return dict(log=False)
    return dict(log=True, low=_number(positions[0] / 1.12), high=_number(positions[-1] * 1.12))


def audits(points: list, xlabel: str) -> dict | None:
    """The rows of `plots.audits`: what was audited, claimed and proved of each plan.

    Args:
        points: results.Point that have `audited`.
        xlabel: the name of the axis.

    Returns:
        The chart; None without such a point.
    """
    rows = plots.audit_rows(points)
    if not rows:
        return None
    left, right = plots.audit_range(points)
    marks = {
        "audited: all below is refuted": dict(colour=1, mark="circle"),
        "at most, with so many runs": dict(colour=1, mark="line", dash=DASHES[":"]),
        "proved": dict(colour=0, mark="line", upright=True),
        "claimed": dict(colour=0, mark="crossRot"),
        "claimed and refuted": dict(colour=REFUTED_COLOUR, mark="crossRot"),
    }
    found: dict = {name: [] for name in marks}
    for y, row in enumerate(rows):
        if isinstance(row, str):
            continue
        audited = max(row.audited, left)
        ceiling = max(row.ceiling or 0.0, audited)
        refuted = row.claimed is not None and row.audited > row.claimed
        values: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
            ("at most, with so many runs", ceiling, (audited, ceiling)),
            ("audited: all below is refuted", audited, (left, audited)),
            ("proved", row.epsilon, ()),
            ("claimed and refuted" if refuted else "claimed", row.claimed, ()),
        )
        for name, value, around in values:
            if value is not None:
                found[name].append(_point(value, y, *around))
    names = [name for name in marks if found[name]]
    drawn = [dict(of=i, points=found[name], spread="bars") for i, name in enumerate(names)]
    y = dict(
        rows=[row if isinstance(row, str) else row.line for row in rows],
        right=["" if isinstance(row, str) else plots.audit_words(row) for row in rows],
        headings=[i for i, row in enumerate(rows) if isinstance(row, str)],
    )
    x = dict(title=xlabel, log=True, low=_number(left), high=_number(right))
    legend = [dict(name=name, **marks[name]) for name in names]
    return dict(legend=legend, panels=[dict(title="", x=x, y=y, lines=drawn)], spread="")


# --- numbers


def _point(x, y, low=None, high=None, words: Any = "") -> list:
    """A point, without what is missing at its end."""
    point = [_number(x), _number(y), _number(low), _number(high), words]
    while point[-1] in (None, "") and len(point) > 2:
        point.pop()
    return point


def _around(mean, half) -> tuple:
    return () if not half else (mean - half, mean + half)


def _number(value):
    """A number that JSON holds, with six digits; None for what is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if isinstance(value, (int, np.integer)) else float(f"{value:.6g}")


def _without_undrawn(chart: dict, drawn: set) -> dict:
    """The chart without the entries of its legend that no line has."""
    place = {old: new for new, old in enumerate(sorted(drawn))}
    for panel in chart["panels"]:
        for line in panel["lines"]:
            line["of"] = place[line["of"]]
    return chart | dict(legend=[chart["legend"][old] for old in place])
