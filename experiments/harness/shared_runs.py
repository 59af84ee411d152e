"""Find lines that share one run: equal configs, made into plans and shown in the same way.

Figures of a paper show the same run by different measures, and a setting that a method ignores
gives two lines of a figure one run.
"""

import copy
from collections.abc import Iterable
from typing import Any

from jfl.runs import record
from jfl.runs.config import Config

from . import results
from .runner import FIRST, stored_line

Place = tuple[str, str]  # the name of a figure, that of a line
MEASURED = ("accuracy", "loss", "trace", "epsilon_proved", "epsilon_claimed")


def alike(experiments: dict) -> dict[Place, list[Place]]:
    """Return each line of a paper's figures -> all lines that share its run, including itself."""
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


def spread(whole: results.Experiment, experiments: dict, fresh: Iterable[Place]) -> set[str]:
    """Copy lines that ran just now to all other figures that show their runs.

    A figure also gets lines that it lacks, if they have not failed in it, from the figure with most
    seeds.  What failed just now has failed everywhere.  A line whose rates are still to be chosen
    waits for the choice.  Earlier results, and results at other rates than those chosen since, stay
    as "NAME, first rates".

    Args:
        whole: the stored figures of a paper, which change.
        experiments: the figures as the module of the paper defines them.
        fresh: the lines that ran, including those that failed.

    Returns:
        The names of the figures in which a value changed.
    """
    shared, ran, changed = alike(experiments), set(fresh), set()
    lacking = [
        place
        for place in shared
        if place[0] in whole.experiments
        and not _stands(whole, place)
        and place not in ran
        and place[1] not in experiments[place[0]].unchosen
    ]
    for source in sorted(place for place in ran if place[0] in whole.experiments):
        for place in shared.get(source, []):
            figure, line = place
            if place in ran or figure not in whole.experiments:
                continue
            if line in experiments[figure].unchosen:
                continue
            if _stands(whole, source):
                differs = _replace(whole, source, place, experiments[figure], shared)
            else:
                differs = _fail(whole, source, place, experiments[figure])
            if differs:
                changed.add(figure)
    return changed.union(_fill(whole, experiments, shared, lacking))


def _replace(whole: results.Experiment, source: Place, place: Place, experiment, shared) -> bool:
    """Copy the line at `source` to `place`, keep the earlier one, and return if a value changed."""
    (figure, line), target = place, whole.experiments[place[0]]
    for first in shared.get((figure, line + FIRST), []):
        if _stands(whole, first):
            target.lines.setdefault(line + FIRST, _copied(whole, first))
    keep_first(target.lines, target.lines, line, experiment)
    old, new = target.lines.get(line), _copied(whole, source)
    _put(target, line, new, experiment)
    target.failed.pop(line, None)
    return old is None or any(getattr(old, n) != getattr(new, n) for n in MEASURED)


def _fail(whole: results.Experiment, source: Place, place: Place, experiment) -> bool:
    """Mark the line at `place` as failed, like that at `source`, and return if it was there."""
    line, target = place[1], whole.experiments[place[0]]
    why = whole.experiments[source[0]].failed.get(source[1])
    if why is None or line not in target.lines:
        return False
    keep_first(target.lines, target.lines, line, experiment)
    del target.lines[line]
    target.failed[line] = why
    return True


def _fill(
    whole: results.Experiment, experiments: dict, shared: dict, lacking: list[Place]
) -> list[str]:
    """Fill in lines that figures lack, and return the names of these figures."""
    # A line with chosen rates but without first ones ran before the choice.
    early = {
        (figure, line.removesuffix(FIRST))
        for figure, line in shared
        if line.endswith(FIRST) and not _stands(whole, (figure, line))
    }
    sources, filled = {place for place in shared if _stands(whole, place)} - early, []
    for other, name in lacking:
        target, experiment = whole.experiments[other], experiments[other]
        have = [place for place in shared[other, name] if place in sources]
        alone = name.endswith(FIRST) and (other, name.removesuffix(FIRST)) not in lacking
        if have and name not in target.lines and name not in target.failed and not alone:
            new = max((_copied(whole, place) for place in have), key=_seed_count)
            _put(target, name, new, experiment)
            filled.append(other)
    return filled


def _stands(whole: results.Experiment, place: Place) -> bool:
    figure, line = place
    return figure in whole.experiments and line in whole.experiments[figure].lines


def _seed_count(line: results.Line) -> int:
    return len(line.accuracy) if isinstance(line.accuracy, list) else 0


def _put(target: results.Experiment, name: str, line: results.Line, experiment):
    line.paper = record.plain(experiment.paper.get(name))
    target.lines[name] = line
    if target.only:
        whole = all(n in target.lines for n in experiment.lines)
        target.only = [] if whole else list(dict.fromkeys([*target.only, name]))


def _copied(whole: results.Experiment, place: Place) -> results.Line:
    """Return a stored line with what its figure says about all its lines."""
    part = whole.experiments[place[0]]
    line = copy.deepcopy(part.lines[place[1]])
    known = stored_line(line, tuple(part.seeds)).seeds if _seed_count(line) else part.seeds
    line.seeds = line.seeds or list(known)
    line.source = line.source or part.versions.get("source", "")
    line.paper = None
    return line


def keep_first(before: dict, after: dict, line: str, experiment):
    """Keep a line of `before`, which ran before its rates were chosen, under its other name.

    If `before` has that name already, the line ran at the chosen rates and is not kept.
    """
    first = line + FIRST
    if first in experiment.lines and line in before and first not in before:
        after.setdefault(first, copy.deepcopy(before[line])).paper = None
