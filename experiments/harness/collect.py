"""The results of a paper's experiments in one file, as experiments/results/ has them;
`python -m experiments.harness.report` makes a page of it.

    python -m experiments.harness.collect chen2024 runs/chen2024/* --into experiments/results

Experiments that the file holds already and that are not given are kept; those that are given take
their places, judged by the claims of today.  Quick runs are left out.  The pages of docs/papers
follow by `python -m experiments.harness.stories`.
"""

import importlib
import sys
import typing
from pathlib import Path

import tyro

from jfl.core import checks

from . import command_line, results
from .rejudge import AGAIN, PAPERS, describe, rejudge
from .shared_runs import keep_first, spread


def collect(module: str, folders, into, merge: bool = False, replace: bool = False) -> Path:
    """Put the results.json of `folders` into INTO/MODULE.json, judged by the claims of today.

    Args:
        module: the paper.
        folders: directories of experiments that ran.
        into: directory of the file.
        merge: lines take the places of those of the same name, and of those that share their runs
            in any figure; the others stay.
        replace: lines that the new ones lack are dropped.

    Returns:
        That file.

    Raises:
        ValueError: naming the file, for results of another paper, two of one experiment, and fewer
            lines than are there already; nothing is written.
    """
    file, found, fresh = Path(into) / f"{module}.json", {}, []
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
        before = whole.experiments.get(one.name, results.Experiment())
        fresh += [(one.name, line) for line in (*one.lines, *one.failed)]
        if merged := merge and bool(before.lines or before.failed):
            _merge(before, one, known.get(one.name))
        there = {*one.lines, *(one.failed if merged else ())}
        if not replace and (lost := before.lines.keys() - there):
            checks.fail(
                str(path),
                f"all lines that {file} has",
                f"none of {', '.join(sorted(lost)[:3])}",
                "Give --merge, to keep them beside those that ran, or --replace, to drop them.",
            )
        if one.name in known:
            _judge(before, one, known[one.name])
        found |= {one.name: one} | one.experiments
        one.name, one.experiments = "", {}
    every = whole.experiments | found
    order = [*known, *every]
    whole.experiments = {name: every[name] for name in dict.fromkeys(order) if name in every}
    for name, anew in (spread(whole, known, fresh) if merge else {}).items():
        part = whole.experiments[name]
        part.unread = _unread(part.unread, part, known[name])
        _judge(part, part, known[name], anew)
    results.write(file, whole)
    return file


def _merge(before: results.Experiment, one: results.Experiment, experiment):
    """Beside the lines of `one` those of `before`, each with the source that ran it; a line that
    failed now is no longer what it was.  Data that could not be read then, and of which a line is
    missing still, could not be read."""
    for line in before.lines.values():
        line.source = line.source or before.versions.get("source", "")
        if before.seeds != one.seeds and isinstance(line.accuracy, list):
            line.seeds = line.seeds or list(before.seeds)[: len(line.accuracy)]
    if experiment is not None:
        for line in [*one.lines, *one.failed]:
            keep_first(before.lines, one.lines, line, experiment)
    earlier = {n: line for n, line in before.lines.items() if n not in one.failed}
    one.failed = {n: w for n, w in before.failed.items() if n not in one.lines} | one.failed
    one.lines = {**earlier, **one.lines}
    one.seconds = (one.seconds or 0) + (before.seconds or 0)
    one.only, one.notes = [], before.notes
    if experiment is not None:
        one.unread = _unread(before.unread | one.unread, one, experiment)


def _unread(known: dict[str, str], one: results.Experiment, experiment) -> dict[str, str]:
    """Data that could not be read and of which `one` still lacks a line."""
    missing = {
        fields.get("dataset", experiment.base.get("dataset"))
        for name, fields in experiment.lines.items()
        if name not in one.lines
    }
    return {name: why for name, why in known.items() if name in missing}


def _judge(before: results.Experiment, one: results.Experiment, experiment, again: bool = True):
    """The verdicts of today's claims, and what an earlier rule said of them."""
    given = {v.claim: v for v in before.verdicts}
    if not experiment.special:
        describe(one, experiment)
    if experiment.special or not experiment.claims:
        for v in one.verdicts:
            if v.claim in given:
                v.earlier = given[v.claim].earlier
                why = given[v.claim].why
                v.why = why if why.startswith(AGAIN) else AGAIN.rstrip("; ") * bool(v.earlier)
    else:
        one.verdicts = rejudge(one, experiment, given, again)


def main(argv=None) -> int:
    def command(
        module: tyro.conf.Positional[typing.Literal[tuple(PAPERS)]],  # pyright: ignore[reportInvalidTypeForm]  # names of a table
        folders: tyro.conf.Positional[tuple[str, ...]],
        into: str = "experiments/results",
        merge: bool = False,
        replace: bool = False,
    ) -> int:
        """Make one file of experiments that ran.

        Args:
            module: the paper.
            folders: directories of experiments that ran.
            into: the directory of the file.
            merge: lines take the places of those of the same name, and of those that share their
                runs in any figure; the others stay.
            replace: lines that the new ones lack are dropped.
        """
        if not folders:
            raise SystemExit(
                "expected at least one directory of an experiment that ran, but got none"
            )
        print(collect(module, folders, into, merge, replace))
        return 0

    return command_line.called(command, "python -m experiments.harness.collect", argv)


if __name__ == "__main__":
    sys.exit(main())
