"""The results of a paper's experiments in one file, as experiments/results/ has them; `jfl report`
makes a page of it.

    python -m experiments.harness.collect chen2024 runs/chen2024/* --into experiments/results

Experiments that the file holds already and that are not given are kept; those that are given take
their places.  Quick runs are left out.
"""

import importlib
import sys
import typing
from pathlib import Path

import tyro

from jfl.core import checks
from jfl.report import results

from . import command_line

PAPERS = ("noble2022", "chen2024", "li2025", "ranaweera2025", "talaei2024")


def collect(module: str, folders, into) -> Path:
    """Put the results.json of `folders` into INTO/MODULE.json -> that file.

    Raises:
        ValueError: naming the file, for results of another paper, two of one experiment, and fewer
            lines than are there already; nothing is written.
    """
    file, found = Path(into) / f"{module}.json", {}
    whole = results.read(file) if file.exists() else results.Experiment(title=module)
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
        if lost := before.lines.keys() - one.lines.keys():
            checks.fail(
                str(path),
                f"all lines that {file} has",
                f"none of {', '.join(sorted(lost)[:3])}",
                "Take the experiment out of that file first, if the new one is to stand for it.",
            )
        found |= {one.name: one} | one.experiments
        one.name, one.experiments = "", {}
    every = whole.experiments | found
    order = [*importlib.import_module(f"experiments.papers.{module}").EXPERIMENTS, *every]
    whole.experiments = {name: every[name] for name in dict.fromkeys(order) if name in every}
    results.write(file, whole)
    return file


def main(argv=None) -> int:
    def command(
        module: tyro.conf.Positional[typing.Literal[tuple(PAPERS)]],
        folders: tyro.conf.Positional[tuple[str, ...]],
        into: str = "experiments/results",
    ) -> int:
        """Make one file of experiments that ran.

        Args:
            module: the paper.
            folders: directories of experiments that ran.
            into: the directory of the file.
        """
        if not folders:
            raise SystemExit("need at least one directory of an experiment that ran; got none")
        print(collect(module, folders, into))
        return 0

    return command_line.called(command, "python -m experiments.harness.collect", argv)


if __name__ == "__main__":
    sys.exit(main())
