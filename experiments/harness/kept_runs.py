"""Runs of experiments under the hash of what was asked for: who asks again has them, whichever
figure it is for.

    CELLS/HASH/0-1-2         seeds 0, 1, 2 of one config, as a sweep over them would have left them
    CELLS/HASH/3-4.part      what was stopped, or runs
    OUT/LINE                 a line of a figure: what those hold of its seeds, and cells.json, which
    names them

Nothing is computed twice: figures share lines, and more seeds are only the new ones.  The hash is
of the config, of the rows where they lie on disk, of jfl's source, that of what makes the plans,
versions, JAX's settings and the kind of device.
"""

import contextlib
import csv
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import shutil
import sys
from pathlib import Path

from jfl import datasets
from jfl.core import checks
from jfl.core.errors import HealthError
from jfl.data.tfds import digest
from jfl.runs import record
from jfl.runs.checkpoint import code, environment, temporary, write
from jfl.runs.config import Config
from jfl.runs.train import alone

from .programs import Plans, Point, blocks

MARK, PART, ROWS = "cells.json", ".part", ("metrics.csv", "manifest.json")
MATTERS = (
    "settings",
    "backend",
    "device",
    "flags",
)  # besides code(): what draws and rounding follow from


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


def _named(how) -> list:
    """What a function is, or functions are: by name and source."""
    if isinstance(how, tuple):
        return [*map(_named, how)]
    if isinstance(how, functools.partial):
        return [_named(how.func), how.args, how.keywords]
    if callable(how):
        if how.__name__ == "<lambda>":
            checks.fail(how.__module__, "functions with a name: runs are kept under it", "a lambda")
        return [how.__module__, how.__qualname__, _source(how.__module__)]
    fields = {f.name: getattr(how, f.name) for f in dataclasses.fields(how)}
    return [
        _source(type(how).__module__),
        {n: _named(v) if callable(v) else v for n, v in fields.items()},
    ]


def key(config: Config, how) -> str:
    """What is asked for, but for its seeds: a config, its data, and what runs it.

    Raises:
        ValueError: where the data cannot be read.
    """
    return hashed(dataclasses.asdict(config) | dict(seed=0), *about(config.dataset, how))


def about(dataset: str, *how) -> list:
    """What a run follows from besides its settings: rows, jfl, versions, JAX's settings, the kind
    of device, what runs it."""
    where = environment()
    return [_rows(dataset), code(), {k: where[k] for k in MATTERS}, *map(_named, how)]


def hashed(*asked) -> str:
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=repr).encode()).hexdigest()[:20]


def lines(folders: dict, cells: Path, configs: dict, seeds, how):
    """Yields (name, entries, one for each seed) of lines, as they are there; computed where they
    are not in `cells`.

    Args:
        folders: name -> directory that shows the line;  configs: name -> Config.
        how: `programs.Plans`, or a function (config, axes, directory) -> entries, which runs a line
            alone.

    Raises:
        ValueError: for a folder that holds something else, for configs that cannot run, or if
            another process runs the same; with Plans before anything runs.  HealthError in place of
            entries, where a function raised it.
    """
    for folder in folders.values():
        _free(folder)
    homes, told = {name: cells / key(config, how) for name, config in configs.items()}, set()
    missing = lambda home: [s for s in seeds if s not in _finished(home)]
    asked = {homes[name]: config for name, config in configs.items()}
    done = _together(asked, missing, how) if isinstance(how, Plans) else _alone(asked, missing, how)
    for failed in itertools.chain([{}], done):
        for name, home in homes.items():
            if name not in told and (home in failed or not missing(home)):
                told.add(name)
                yield name, failed.get(home) or _show(folders[name], _finished(home), seeds)


@contextlib.contextmanager
def _held(home):
    """Who only reads waits for nobody; who runs, runs alone."""
    with alone(home):
        for part in home.glob("*" + PART):  # of a run that was stopped
            shutil.rmtree(part)
        yield


def _together(asked, missing, plans):
    """Run the seeds that are not there in blocks of all lines."""
    with contextlib.ExitStack() as every:
        held = {
            home: every.enter_context(contextlib.ExitStack()) for home in asked if missing(home)
        }
        for home, lock in held.items():
            lock.enter_context(_held(home))
        left = [Point(home, asked[home], s) for home in held for s in missing(home)]
        for block in blocks(left, plans) if left else ():
            for home, entries, rows, manifest in block:
                part = home / ("-".join(str(e["seed"]) for e in entries) + PART)
                part.mkdir()
                record.save(part, entries, rows, manifest)
                part.rename(part.with_suffix(""))
                if not missing(home):
                    held[home].close()  # others may have it now
            yield {}


def _alone(asked, missing, sweep):
    """Run the seeds that are not there line by line."""
    for home, config in asked.items():
        failed = {}
        with _held(home) if missing(home) else contextlib.nullcontext():
            if left := missing(home):  # another process may have done them meanwhile
                part = home / ("-".join(map(str, left)) + PART)
                try:
                    sweep(config, dict(seed=left), part)
                except HealthError as error:
                    if not (
                        part / "summary.json"
                    ).exists():  # else all of these seeds failed, which is a result
                        failed[home] = error
                if not failed:
                    part.rename(part.with_suffix(""))
        yield failed


def _free(folder):
    """Refuse a directory that is not of a line, or not of this kind."""
    others = (
        [p for p in folder.iterdir() if not temporary(p)]
        if folder.exists() and not (folder / MARK).exists()
        else []
    )
    if others:
        checks.fail(
            str(folder),
            "a new directory, or a line of an experiment that keeps its runs in cells",
            f"one with {others[0].name}, of another making or of an earlier version",
            "Move it, or give another --out.",
        )


def _finished(home: Path) -> dict:
    """seed -> (directory, entry) of what is done."""
    done = sorted(p.parent for p in home.glob("*/summary.json") if p.parent.suffix != PART)
    return {
        e["seed"]: (d, e)
        for d in done
        for e in json.loads((d / "summary.json").read_text())["runs"]
    }


def _show(folder: Path, found: dict, seeds) -> list[dict]:
    """Write the directory of a line, as a sweep over its seeds would have left it -> its
    entries."""
    entries, places = [found[s][1] for s in seeds], list(dict.fromkeys(found[s][0] for s in seeds))
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / MARK, json.dumps([os.path.relpath(p, folder) for p in places], indent=1))
    if all((p / name).exists() for p in places for name in ROWS):
        tables = {p: list(csv.reader((p / "metrics.csv").read_text().splitlines())) for p in places}
        head = next(iter(tables.values()))[0]
        rows = [
            dict(zip(head, r))
            for s in seeds
            for r in tables[found[s][0]][1:]
            if r[head.index("seed")] == str(s)
        ]
        manifest = json.loads((places[0] / "manifest.json").read_text()) | dict(seeds=list(seeds))
        record.save(folder, entries, rows, manifest)
    else:
        for name in ROWS:  # of a run that this one is not
            (folder / name).unlink(missing_ok=True)
        write(
            folder / "summary.json", json.dumps(dict(format=record.FORMAT, runs=entries), indent=1)
        )
    return entries
