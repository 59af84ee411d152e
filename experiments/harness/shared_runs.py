"""Lines that one run serves: of one config, made into plans and shown in one way.

Figures of a paper draw the same run by other measures, and a setting that a method ignores gives
two lines of a figure one run.
"""

import copy
from collections.abc import Iterable
from typing import Any

from jfl.report import results
from jfl.runs import record
from jfl.runs.config import Config

from .runner import FIRST, stored_line

Place = tuple[str, str]  # the name of a figure, that of a line
MEASURED = ("accuracy", "loss", "trace", "epsilon_proved", "epsilon_claimed")


def alike(experiments: dict) -> dict[Place, list[Place]]:
    """Each line of a paper's figures -> all lines that share its run, itself among them."""
    of = {
        (figure, line): (Config(**{**e.base, **fields}), e.runs, e.columns, e.last)
        for figure, e in experiments.items()
        if not e.special
        for line, fields in e.lines.items()
    }
    found: dict[Any, list[Place]] = {}
    for place, run in of.items():
        found.setdefault(run, []).append(place)
    return {place: found[run] for place, run in of.items()}


def spread(whole: results.Experiment, experiments: dict, fresh: Iterable[Place]) -> list[str]:
    """Put lines that ran just now wherever else they stand, and those of other figures where a
    figure lacks them.

    What a figure had before, and what was run at other rates than those chosen since, stays as
    "NAME, first rates".

    Args:
        whole: the stored figures of a paper, which change.
        experiments: the figures as the module of the paper has them.
        fresh: the lines that ran.

    Returns:
        The names of the figures in which a value changed.
    """
    shared, ran, changed = alike(experiments), set(fresh), []
    stands = lambda place: (
        place[0] in whole.experiments and place[1] in whole.experiments[place[0]].lines
    )
    lacking = [p for p in shared if p[0] in whole.experiments and not stands(p)]
    for figure, line in sorted(ran):
        for other, name in shared.get((figure, line), []):
            if (other, name) in ran or other not in whole.experiments:
                continue
            target, experiment = whole.experiments[other], experiments[other]
            for place in shared.get((other, name + FIRST), []):
                if stands(place):
                    target.lines.setdefault(name + FIRST, _copied(whole, place))
            keep_first(target.lines, target.lines, name, experiment)
            old, new = target.lines.get(name), _copied(whole, (figure, line))
            new.paper = record.plain(experiment.paper.get(name))
            _put(target, name, new)
            if old is None or any(getattr(old, n) != getattr(new, n) for n in MEASURED):
                changed.append(other)
    for other, name in (p for p in lacking if not stands(p)):
        if have := [place for place in shared[other, name] if stands(place)]:
            new = max((_copied(whole, place) for place in have), key=_values)
            new.paper = record.plain(experiments[other].paper.get(name))
            _put(whole.experiments[other], name, new)
            changed.append(other)
    return list(dict.fromkeys(changed))


def _values(line: results.Line) -> int:
    return len(line.accuracy) if isinstance(line.accuracy, list) else 0


def _put(target: results.Experiment, name: str, line: results.Line):
    target.lines[name] = line
    target.failed.pop(name, None)
    if target.only:
        target.only = list(dict.fromkeys([*target.only, name]))


def _copied(whole: results.Experiment, place: Place) -> results.Line:
    """A stored line with what its figure says of all its lines."""
    part = whole.experiments[place[0]]
    line = copy.deepcopy(part.lines[place[1]])
    line.seeds = line.seeds or list(stored_line(line, tuple(part.seeds)).seeds)
    line.source = line.source or part.versions.get("source", "")
    line.paper = None
    return line


def keep_first(before: dict, after: dict, line: str, experiment):
    """A line of `before`, which ran before its rates were chosen, in `after` under its other
    name; where `before` has that name already, the line ran at the rates that were chosen."""
    first = line + FIRST
    if first in experiment.lines and line in before and first not in before:
        after.setdefault(first, copy.deepcopy(before[line])).paper = None
