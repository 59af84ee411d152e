"""Runs of experiments under the hash of what was asked for: who asks again has them, whichever figure it is for.

    CELLS/HASH/0-1-2         a sweep over seeds 0, 1, 2 of one config, as `sweep(config, axes, directory)` left it
    CELLS/HASH/3-4.part      one that was stopped, or runs
    OUT/LINE                 a line of a figure: what those hold of its seeds, and cells.json, which names them

Nothing is computed twice: figures share lines, more seeds are only the new ones, and a changed field, another version or
a changed source is another hash.
"""
import csv
import dataclasses
import functools
import hashlib
import json
import shutil
import sys
from pathlib import Path

from jfl import check, report, sweeps
from jfl.checkpoint import code, write
from jfl.config import Config
from jfl.train import alone

MARK, PART = "cells.json", ".part"


def key(config: Config, sweep) -> str:
    """What is asked for, but for its seeds: a config, and the code that runs it."""
    inner, more = (sweep.func, sweep.keywords) if isinstance(sweep, functools.partial) else (sweep, {})
    source = hashlib.sha256(Path(sys.modules[inner.__module__].__file__).read_bytes()).hexdigest()
    asked = [dataclasses.asdict(config) | dict(seed=0), code(), inner.__module__, inner.__qualname__, source, more]
    return hashlib.sha256(json.dumps(report.plain(asked), sort_keys=True).encode()).hexdigest()[:20]


def line(folder: Path, cells: Path, config: Config, seeds, sweep) -> list[dict]:
    """The entries of a line, one for each seed, computed where they are not in `cells`; `folder` shows them.

    Errors   ValueError for a folder that holds something else, or if another process runs the same.
    """
    if folder.exists() and not (folder / MARK).exists() and any(folder.iterdir()):
        check.fail(str(folder), "a new directory, or a line of an experiment", "one with files of another making",
                   "Move it, or give another --out.")
    home = cells / key(config, sweep)
    with alone(home):
        left = [s for s in seeds if s not in _finished(home)]
        if left:
            part = home / ("-".join(map(str, left)) + PART)
            resume = sweep is sweeps.sweep and (part / sweeps.FILE).exists()         # it goes on, point by point
            if part.exists() and not resume:
                shutil.rmtree(part)
            sweep(config, dict(seed=left), part, **(dict(resume=True) if resume else {}))
            part.rename(part.with_suffix(""))
        found = _finished(home)
    return _show(folder, found, seeds)


def _finished(home: Path) -> dict:
    """seed -> (directory, entry) of what is done."""
    done = sorted(p.parent for p in home.glob("*/summary.json") if not p.parent.name.endswith(PART))
    return {e["seed"]: (d, e) for d in done for e in json.loads((d / "summary.json").read_text())["runs"]}


def _show(folder: Path, found: dict, seeds) -> list[dict]:
    """Write the directory of a line, as a sweep over its seeds would have left it -> its entries."""
    entries, places = [found[s][1] for s in seeds], list(dict.fromkeys(found[s][0] for s in seeds))
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / MARK, json.dumps([str(p) for p in places], indent=1))
    if all((p / "metrics.csv").exists() and (p / "manifest.json").exists() for p in places):
        tables = {p: list(csv.reader((p / "metrics.csv").read_text().splitlines())) for p in places}
        head = next(iter(tables.values()))[0]
        rows = [dict(zip(head, r)) for s in seeds for r in tables[found[s][0]][1:] if r[head.index("seed")] == str(s)]
        manifest = json.loads((places[0] / "manifest.json").read_text()) | dict(seeds=list(seeds))
        report.save(folder, entries, rows, manifest)
    else:
        write(folder / "summary.json", json.dumps(dict(format=report.FORMAT, runs=entries), indent=1))
    return entries
