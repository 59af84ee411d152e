"""Lines that one run serves: of one config, made into plans and shown in one way.

Figures of a paper draw the same run by other measures, and a setting that a method ignores gives
two lines of a figure one run.
"""

import copy
from collections.abc import Iterable
from typing import Any

from jfl.report import results
from jfl.runs.config import Config

from .runner import FIRST

Place = tuple[str, str]  # the name of a figure, that of a line


def places(experiments: dict) -> dict[Place, Any]:
    """Each line of a paper's figures -> what it has in common with those that share its run."""
    return {
        (figure, line): (Config(**{**e.base, **fields}), e.runs, e.columns, e.last)
        for figure, e in experiments.items()
        if not e.special
        for line, fields in e.lines.items()
    }


def alike(experiments: dict) -> dict[Place, list[Place]]:
    """Each line -> all lines that share its run, itself among them."""
    of, found = places(experiments), {}
    for place, run in of.items():
        found.setdefault(run, []).append(place)
    return {place: found[run] for place, run in of.items()}


def spread(whole: results.Experiment, experiments: dict, fresh: Iterable[Place]) -> list[str]:
    """Put lines that ran just now wherever else they stand.

    What a figure had before, and what was run at other rates than those chosen since, stays as
    "NAME, first rates".

    Args:
        whole: the stored figures of a paper, which change.
        experiments: the figures as the module of the paper has them.
        fresh: the lines that ran.

    Returns:
        The names of the figures that changed.
    """
    shared, ran, changed = alike(experiments), set(fresh), []
    for figure, line in sorted(ran):
        source = whole.experiments[figure]
        for other, name in shared.get((figure, line), []):
            if (other, name) in ran or other not in whole.experiments:
                continue
            target = whole.experiments[other]
            keep_first(target.lines, target.lines, name, experiments[other])
            new = copy.deepcopy(source.lines[line])
            new.seeds = new.seeds or list(source.seeds)
            new.source = new.source or source.versions.get("source", "")
            new.paper = target.lines[name].paper if name in target.lines else None
            target.lines[name] = new
            if target.only:
                target.only = list(dict.fromkeys([*target.only, name]))
            changed.append(other)
    return list(dict.fromkeys(changed))


def keep_first(before: dict, after: dict, line: str, experiment):
    """A line of `before`, which ran before its rates were chosen, in `after` under its other
    name."""
    first = line + FIRST
    if first in experiment.lines and line in before and first not in before:
        after.setdefault(first, before[line])
