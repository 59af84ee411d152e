"""Runs of experiments under the hash of what was asked for: who asks again has them, whichever figure it is for.

    CELLS/HASH/0-1-2         a sweep over seeds 0, 1, 2 of one config, as `sweep(config, axes, directory)` left it
    CELLS/HASH/3-4.part      one that was stopped, or runs
    OUT/LINE                 a line of a figure: what those hold of its seeds, and cells.json, which names them

Nothing is computed twice: figures share lines, and more seeds are only the new ones.  The hash is of the config, of the
rows where they lie on disk, of jfl's source, that of the sweep, versions, JAX's settings and the kind of device.
"""
import csv
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

from jfl import check, datasets, report, sweeps
from jfl.checkpoint import code, identity, temporary, write
from jfl.config import Config
from jfl.data.prepared import digest
from jfl.simulate import HealthError
from jfl.train import alone

MARK, PART, ROWS = "cells.json", ".part", ("metrics.csv", "manifest.json")
MATTERS = ("settings", "backend", "device", "flags")         # besides code(): what draws and rounding follow from


@functools.cache
def _source(module: str) -> str:
    return hashlib.sha256(Path(sys.modules[module].__file__).read_bytes()).hexdigest()


@functools.cache
def _rows(dataset: str) -> str:
    """A digest of rows that are read from disk; of the others the config says what they are."""
    if dataset in ("digits", "synthetic"):
        return ""
    data = getattr(datasets, dataset)()
    return digest(data.x, data.y, data.x_test, data.y_test)


def key(config: Config, sweep) -> str:
    """What is asked for, but for its seeds: a config, its data, and what runs it.

    Errors   ValueError where the data cannot be read.
    """
    inner, args, more = sweep, (), {}
    if isinstance(sweep, functools.partial):
        inner, args, more = sweep.func, sweep.args, sweep.keywords
    where = identity()
    asked = [dataclasses.asdict(config) | dict(seed=0), _rows(config.dataset), code(), {k: where[k] for k in MATTERS},
             inner.__module__, inner.__qualname__, _source(inner.__module__), args, more]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=repr).encode()).hexdigest()[:20]


def line(folder: Path, cells: Path, config: Config, seeds, sweep) -> list[dict]:
    """The entries of a line, one for each seed, computed where they are not in `cells`; `folder` shows them.

    Errors   ValueError for a folder that holds something else, or if another process runs the same; what `sweep` raises.
    """
    others = [p for p in folder.iterdir() if not temporary(p)] if folder.exists() and not (folder / MARK).exists() else []
    if others:
        check.fail(str(folder), "a new directory, or a line of an experiment that keeps its runs in cells",
                   f"one with {others[0].name}, of another making or of an earlier version", "Move it, or give another --out.")
    home = cells / key(config, sweep)
    if not set(seeds) <= set(_finished(home)):            # who only reads waits for nobody
        with alone(home):
            _run(home, config, seeds, sweep)
    return _show(folder, _finished(home), seeds)


def _run(home, config, seeds, sweep):
    """Compute the seeds that are not there, in what was stopped first."""
    goes_on = sweep is sweeps.sweep                       # point by point; the others begin again
    for part in home.glob("*" + PART):
        if not (goes_on and (part / sweeps.FILE).exists()):
            shutil.rmtree(part)
    stopped = [[int(s) for s in p.stem.split("-")] for p in home.glob("*" + PART)]
    for some in [s for s in stopped if set(s) <= set(seeds)] + [list(seeds)]:
        left = [s for s in some if s not in _finished(home)]
        if not left:
            continue
        part = home / ("-".join(map(str, left)) + PART)
        try:
            sweep(config, dict(seed=left), part, **(dict(resume=True) if part.exists() else {}))
        except HealthError:                               # all of these seeds failed, which is a result
            if not (part / "summary.json").exists():
                raise
        part.rename(part.with_suffix(""))


def _finished(home: Path) -> dict:
    """seed -> (directory, entry) of what is done."""
    done = sorted(p.parent for p in home.glob("*/summary.json") if p.parent.suffix != PART)
    return {e["seed"]: (d, e) for d in done for e in json.loads((d / "summary.json").read_text())["runs"]}


def _show(folder: Path, found: dict, seeds) -> list[dict]:
    """Write the directory of a line, as a sweep over its seeds would have left it -> its entries."""
    entries, places = [found[s][1] for s in seeds], list(dict.fromkeys(found[s][0] for s in seeds))
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / MARK, json.dumps([os.path.relpath(p, folder) for p in places], indent=1))
    if all((p / name).exists() for p in places for name in ROWS):
        tables = {p: list(csv.reader((p / "metrics.csv").read_text().splitlines())) for p in places}
        head = next(iter(tables.values()))[0]
        rows = [dict(zip(head, r)) for s in seeds for r in tables[found[s][0]][1:] if r[head.index("seed")] == str(s)]
        manifest = json.loads((places[0] / "manifest.json").read_text()) | dict(seeds=list(seeds))
        report.save(folder, entries, rows, manifest)
    else:
        for name in ROWS:                                 # of a run that this one is not
            (folder / name).unlink(missing_ok=True)
        write(folder / "summary.json", json.dumps(dict(format=report.FORMAT, runs=entries), indent=1))
    return entries
