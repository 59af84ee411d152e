"""Collect the results of a paper's experiments in one file of experiments/results.

    python -m experiments.harness.collect chen2024 runs/chen2024/*
    python -m experiments.harness.collect chen2024

Experiments that are passed replace those of the same name; the file keeps all others.  Quick runs
are skipped.  Every verdict is computed from the stored values, so without folders the command
judges the file again, for example after a claim has changed.  Then run
`python -m experiments.harness.stories` for docs/papers.
"""

import collections
import importlib
import sys
import typing
from pathlib import Path

import tyro

from jfl.core import checks

from . import command_line, results
from .results import PAPERS
from .runner import judged, not_tuned, ran_at, stored_line
from .verdicts import WRONG

# keys of NOTES
DESCRIBED = ("differs", "draws", "seeds", "last", "devices", "not_tuned", "at_edge", "stale")
MAX_EVALUATIONS = 20  # of a stored curve
MIN_EVALUATIONS = 5  # of a stored curve of many seeds, so that it keeps its shape
MAX_VALUES = 400  # of a stored curve, over all seeds, unless MIN_EVALUATIONS need more


def collect(module: str, folders, into, merge: bool = False, replace: bool = False) -> Path:
    """Put the results.json of `folders` into INTO/MODULE.json and judge all claims again.

    Args:
        module: the paper.
        folders: directories of experiments that ran; none: judge the stored results again.
        into: directory of the file.
        merge: replace only lines of the same name. Figures that show the same runs get them from
            the directory of kept runs, if they are run again.
        replace: drop stored lines that the new results lack.

    Returns:
        The path of the file.

    Raises:
        ValueError: if results are of another paper, if an experiment is passed twice, or if lines
            would be lost. Nothing is written then.
    """
    file, found = Path(into) / f"{module}.json", {}
    whole = results.read(file) if file.exists() else results.Experiment(title=module)
    known = importlib.import_module(f"experiments.papers.{module}.figures").EXPERIMENTS
    for path in (Path(folder) / "results.json" for folder in folders):
        one = results.read(path)
        if one.quick:
            print(f"{path}: left out, of a quick run", file=sys.stderr)
            continue
        if one.module != module or not one.name or one.name in found:
            checks.fail(
                str(path),
                f"an experiment of {module}, each once",
                f"{one.name or 'none'} of {one.module}" + (" again" if one.name in found else ""),
            )
        for line in one.lines.values():
            line.trace = thin_curves(line.trace)
        before = whole.experiments.get(one.name, results.Experiment())
        if merged := merge and bool(before.lines or before.failed):
            _merge(before, one, known.get(one.name))
        there = {*one.lines, *(one.failed if merged else ())}
        if not replace and (lost := before.lines.keys() - there):
            checks.fail(
                str(path),
                f"all lines that {file} has",
                f"none of {', '.join(sorted(lost)[:3])}",
                "Pass --merge to keep them with those that ran, or --replace to drop them.",
            )
        found |= {one.name: one} | one.experiments
        one.name, one.experiments = "", {}
    every = whole.experiments | found
    order = [*known, *every]
    whole.experiments = {name: every[name] for name in dict.fromkeys(order) if name in every}
    for name, part in whole.experiments.items():
        if name in known and not known[name].special:
            judge_stored(part, known[name])
    results.write(file, whole)
    return file


def judge_stored(stored: results.Experiment, experiment):
    """Compute verdicts and notes of a stored figure from its stored values.

    Args:
        stored: the figure; its verdicts and notes are replaced.
        experiment: the figure as the module of the paper defines it.
    """
    lines = {n: stored_line(line, tuple(stored.seeds)) for n, line in stored.lines.items()}
    found = judged(experiment, lines, stored.unread)
    stored.verdicts = [results.Verdict(**verdict) for verdict in found]
    notes = _notes(stored, experiment, lines) if lines else {}
    headings = {key: results.NOTES[key] + ": " for key in DESCRIBED}
    others = [n for n in stored.notes if not n.startswith(tuple(headings.values()))]
    stored.notes = [headings[key] + notes[key] for key in DESCRIBED if notes.get(key)] + others


def thin_curves(trace: dict[str, list]) -> dict[str, list]:
    """Return curves short enough to keep in git.

    Args:
        trace: metric -> its values [seeds, evaluations].

    Returns:
        The same metrics at MAX_EVALUATIONS evaluations or fewer, evenly spaced up to the last one.
        Curves of many seeds are shorter, but keep MIN_EVALUATIONS if they had as many. Rounds that
        all seeds share are stored once.
    """
    thinned = {}
    seeds = max(map(len, trace.values()), default=1)
    most = max(1, min(MAX_EVALUATIONS, MAX_VALUES // seeds))
    step = lambda row: max(1, min(-(-len(row) // most), len(row) // MIN_EVALUATIONS))
    for metric, rows in trace.items():
        kept = [row[:: -step(row)][::-1] for row in rows]
        same = metric == "round" and all(row == kept[0] for row in kept)
        thinned[metric] = kept[:1] if same else kept
    return thinned


def _notes(stored: results.Experiment, experiment, lines: dict) -> dict[str, str]:
    """Return the text of each note in DESCRIBED; an empty text means there is nothing to say."""
    devices = collections.Counter(line.device or "unknown" for line in stored.lines.values())
    counts = ", ".join(f"{count} lines on {device}" for device, count in devices.most_common())
    stale = [
        name
        for name, line in stored.lines.items()
        if line.ran_at and name in experiment.lines and line.ran_at != ran_at(experiment, name)
    ]
    of_rounds = 100 * experiment.last
    planned = len(experiment.seeds)
    done = sum(len(line.seeds) >= planned for line in lines.values())
    interim = (
        f"{done} of the {len(lines)} lines that ran have the second number of seeds, {planned}; "
        "the others keep the first"
        if experiment.wrong < WRONG
        else f"{done} of {len(experiment.lines)} lines ran with the {planned} seeds that were "
        "fixed for this figure. Verdicts on other lines are not final"
    )
    return dict(
        differs=experiment.differs,
        draws=_by_line({n: line.draws or "not stored" for n, line in stored.lines.items()}),
        seeds=interim if 0 < done < len(lines) else "",
        last=f"mean of the last {of_rounds:g} % of the rounds" if of_rounds else "",
        devices=counts if len(devices) > 1 else "",
        not_tuned=not_tuned(experiment, lines),
        at_edge="; ".join(n for n in stored.lines if n in experiment.at_edge),
        stale="; ".join(stale),
    )


def _by_line(facts: dict[str, str]) -> str:
    """Return the fact that holds for most lines, then each other fact with its lines."""
    (usual, _), *others = collections.Counter(facts.values()).most_common()
    names = {fact: ", ".join(n for n in facts if facts[n] == fact) for fact, _ in others}
    return "; ".join([usual, *(f"{fact} of {names[fact]}" for fact, _ in others)])


def _merge(before: results.Experiment, one: results.Experiment, experiment):
    """Add the lines of `before` to `one`, each with the source that ran it.

    A line that failed in the new run replaces the earlier line. Data count as unread if they were
    unread before and a line on them is still missing.
    """
    for line in before.lines.values():
        line.source = line.source or before.versions.get("source", "")
        if before.seeds != one.seeds and isinstance(line.accuracy, list):
            line.seeds = line.seeds or list(before.seeds)[: len(line.accuracy)]
    earlier = {n: line for n, line in before.lines.items() if n not in one.failed}
    one.failed = {n: w for n, w in before.failed.items() if n not in one.lines} | one.failed
    one.lines = {**earlier, **one.lines}
    one.seconds = (one.seconds or 0) + (before.seconds or 0)
    one.only, one.notes = [], before.notes
    if experiment is not None:
        one.unread = _unread(before.unread | one.unread, one, experiment)


def _unread(known: dict[str, str], one: results.Experiment, experiment) -> dict[str, str]:
    """Return the data that could not be read and on which `one` still lacks a line."""
    missing = {
        fields.get("dataset", experiment.base.get("dataset"))
        for name, fields in experiment.lines.items()
        if name not in one.lines
    }
    return {name: why for name, why in known.items() if name in missing}


def main(argv=None) -> int:
    def command(
        module: tyro.conf.Positional[typing.Literal[tuple(PAPERS)]],  # pyright: ignore[reportInvalidTypeForm]  # names of a table
        folders: tyro.conf.Positional[tuple[str, ...]] = (),
        into: str = "experiments/results",
        merge: bool = False,
        replace: bool = False,
    ) -> int:
        """Collect results of experiments in one file, and judge its claims again.

        Args:
            module: the paper.
            folders: directories of experiments that ran; none: only judge the claims again.
            into: directory of the file.
            merge: replace only lines of the same name.
            replace: drop stored lines that the new results lack.
        """
        print(collect(module, folders, into, merge, replace))
        return 0

    return command_line.called(command, "python -m experiments.harness.collect", argv)


if __name__ == "__main__":
    sys.exit(main())
