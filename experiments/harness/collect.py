"""The results of a paper's experiments in one file, as experiments/results/ has them; `jfl report`
makes a page of it.

    python -m experiments.harness.collect chen2024 runs/chen2024/* --into experiments/results

Experiments that the file holds already and that are not given are kept; those that are given take
their places.  Quick runs are left out.
"""

import argparse
import importlib
import json
import re
import sys
from pathlib import Path

from jfl.core import checks
from jfl.report import collected
from jfl.runs.checkpoint import write

PAPERS = ("noble2022", "chen2024", "li2025", "ranaweera2025", "talaei2024")
FLAT = re.compile(r"\[\n\s*([^\[\]{}]*?)\n\s*\]")  # of an indented file: a list of plain values


def collect(module: str, folders, into) -> Path:
    """Put the results.json of `folders` into INTO/MODULE.json -> that file.

    Raises:
        ValueError: naming the file, for results of another paper, two of one experiment, and fewer
            lines than are there already; nothing is written.
    """
    file, found = Path(into) / f"{module}.json", {}
    whole = collected.load(file) if file.exists() else dict(paper=module)
    before = whole.get("experiments", {})
    for path in (Path(f) / "results.json" for f in folders):
        collected.read(path)  # refuses what no page could show
        one = collected.load(path)
        if one.get("quick"):
            print(f"{path}: left out, of a quick run", file=sys.stderr)
            continue
        if one.get("module") != module or one.get("experiment") in {None, *found}:
            checks.fail(
                str(path),
                f"an experiment of {module}, each once",
                f"{one.get('experiment')} of {one.get('module')}"
                + " again" * (one.get("experiment") in found),
            )
        lost = (
            before.get(one["experiment"], {}).get("lines", {}).keys() - one.get("lines", {}).keys()
        )
        if lost:
            checks.fail(
                str(path),
                f"all lines that {file} has",
                f"none of {', '.join(sorted(lost)[:3])}",
                "Take the experiment out of that file first, if the new one is to stand for it.",
            )
        found[one["experiment"]] = {
            k: v for k, v in one.items() if k not in ("format", "experiment")
        }
    every = before | found
    order = [*importlib.import_module(f"experiments.papers.{module}").EXPERIMENTS, *every]
    whole["experiments"] = {name: every[name] for name in dict.fromkeys(order) if name in every}
    text = FLAT.sub(
        lambda m: "[" + re.sub(r"\n *", " ", m[1]) + "]",
        json.dumps(whole, indent=1, ensure_ascii=False),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, text + "\n")
    return file


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.harness.collect", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("module", choices=PAPERS)
    parser.add_argument("folders", nargs="+", help="directories of experiments that ran")
    parser.add_argument("--into", default="experiments/results")
    args = parser.parse_args(argv)
    print(collect(args.module, args.folders, args.into))
    return 0


if __name__ == "__main__":
    sys.exit(main())
