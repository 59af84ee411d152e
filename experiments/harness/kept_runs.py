"""Keep the runs of experiments under a hash of their settings, so that figures share them.

    KEPT/HASH/runs.jsonl     runs of one config, one row per seed
    KEPT/HASH/running        directory of a function that runs a line itself
    OUT/LINE                 a line of a figure, as a sweep over its seeds would write it, and
                             kept_runs.json, which says where its runs are kept

Nothing is computed twice: figures share lines, and more seeds run only the new ones.  The hash
covers the config, rows on disk, the source of jfl and of what makes the plans, versions, JAX's
settings and the kind of device.
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
from jfl.core.files import ResultStore, temporary, write
from jfl.data.rows import digest
from jfl.runs import record
from jfl.runs.checkpoint import code, environment
from jfl.runs.config import Config
from jfl.runs.directory import locked

from .programs import Asked, Plans, run_points

FILE, RUNNING, TABLES = "runs.jsonl", "running", ("metrics.csv", "manifest.json")
MARK = "kept_runs.json"  # in the directory of a line
# Draws and rounding depend on these parts of the environment, besides code().
MATTERS = ("settings", "backend", "device", "flags")


@functools.cache
def _source(module: str) -> str:
    return hashlib.sha256(Path(sys.modules[module].__file__ or "").read_bytes()).hexdigest()


@functools.cache
def data_digest(dataset: str) -> str:
    """Return the SHA-256 digest of rows read from disk; "" if the config defines the rows."""
    if dataset in ("digits", "synthetic"):
        return ""
    data = getattr(datasets, dataset)()
    return digest(data.x, data.y, data.x_test, data.y_test)


def _named(how) -> list:
    """Return the names and sources of a function, or of several."""
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
    """Return a hash of a config, its data, and what runs it, without its seed.

    Raises:
        ValueError: if the data cannot be read.
    """
    return hashed(dataclasses.asdict(config) | dict(seed=0), *about(config.dataset, how))


def about(dataset: str, *how) -> list:
    """Return the facts on which a run depends besides its settings."""
    where = environment()
    return [data_digest(dataset), code(), {k: where[k] for k in MATTERS}, *map(_named, how)]


def hashed(*asked) -> str:
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=repr).encode()).hexdigest()[:20]


def lines(folders: dict, kept: Path, configs: dict, seeds, how):
    """Yield lines as soon as all their runs exist; compute runs that are not kept.

    Args:
        folders: name -> directory that shows the line.
        kept: directory of the runs that figures share.
        configs: name -> Config.
        seeds: of each line.
        how: `programs.Plans`, or a function (config, axes, directory) -> entries that runs a line.

    Yields:
        (name, entries, one per seed); HealthError instead of entries, if a function raised it.

    Raises:
        ValueError: for a folder that holds something else, for configs that cannot run, or if
            another process runs the same; with Plans, before anything runs.
    """
    for folder in folders.values():
        _refuse_foreign(folder)
    homes = {name: kept / key(config, how) for name, config in configs.items()}
    asked = {homes[name]: config for name, config in configs.items()}
    run = _run_together if isinstance(how, Plans) else _run_alone
    shown = set()
    for failed in itertools.chain([{}], run(asked, seeds, how)):
        for name, home in homes.items():
            if name not in shown and (home in failed or not _missing(home, seeds)):
                shown.add(name)
                yield name, failed.get(home) or _show(folders[name], home, seeds)


def stored(home: Path) -> ResultStore:
    """Return the runs of one config by seed: summary entry, metrics rows, manifest."""
    return ResultStore(home / FILE, fields=("key", "entry", "rows", "manifest"), signed=True)


def _missing(home: Path, seeds) -> list:
    done = stored(home)
    return [seed for seed in seeds if seed not in done]


@contextlib.contextmanager
def _held(home: Path):
    """Lock a directory of runs for computing; readers do not wait."""
    with locked(home):
        if (home / RUNNING).exists():  # left by a run that was stopped
            shutil.rmtree(home / RUNNING)
        yield


def _run_together(asked: dict, seeds, plans: Plans):
    """Run the missing seeds in blocks of all lines."""
    with contextlib.ExitStack() as every:
        held = {
            home: every.enter_context(contextlib.ExitStack())
            for home in asked
            if _missing(home, seeds)
        }
        for home, lock in held.items():
            lock.enter_context(_held(home))
        left = [Asked(home, asked[home], s) for home in held for s in _missing(home, seeds)]
        for runs in run_points(left, plans) if left else ():
            for home, records in runs.items():
                stored(home).put(records)
                if not _missing(home, seeds):
                    held[home].close()  # other processes may read it now
            yield {}


def _run_alone(asked: dict, seeds, sweep):
    """Run the missing seeds line by line."""
    for home, config in asked.items():
        failed = {}
        with _held(home) if _missing(home, seeds) else contextlib.nullcontext():
            if left := _missing(home, seeds):  # another process may have computed them by now
                running = home / RUNNING
                try:
                    sweep(config, dict(seed=left), running)
                except HealthError as error:
                    if not (running / "summary.json").exists():
                        failed[home] = error
                    # else all of these seeds failed, which is a result
                if not failed:
                    stored(home).put(_records(running))
                    shutil.rmtree(running)
        yield failed


def _records(folder: Path) -> list[dict]:
    """Return what a sweep wrote to a directory as records of `stored`."""
    entries = json.loads((folder / "summary.json").read_text())["runs"]
    rows = manifest = None
    if all((folder / name).exists() for name in TABLES):
        rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
        manifest = json.loads((folder / "manifest.json").read_text())
    return [
        dict(
            key=entry["seed"],
            entry=entry,
            rows=rows and [row for row in rows if row["seed"] == str(entry["seed"])],
            manifest=manifest,
        )
        for entry in entries
    ]


def _refuse_foreign(folder: Path):
    """Reject a directory that is not that of a line."""
    if not folder.exists() or (folder / MARK).exists():
        return
    if others := [p for p in folder.iterdir() if not temporary(p)]:
        checks.fail(
            str(folder),
            "a new directory, or a line of an experiment that keeps its runs",
            f"one with {others[0].name}, from another program or an earlier version",
            "Move it, or pass another --out.",
        )


def _show(folder: Path, home: Path, seeds) -> list[dict]:
    """Write the directory of a line, as a sweep over its seeds would write it.

    Returns:
        Its entries of summary.json.
    """
    kept = stored(home)
    runs = [kept[seed] for seed in seeds]
    entries = [run["entry"] for run in runs]
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / MARK, json.dumps(dict(runs=os.path.relpath(home / FILE, folder)), indent=1))
    if all(run["manifest"] is not None for run in runs):
        rows = [row for run in runs for row in run["rows"]]
        record.save(folder, entries, rows, runs[0]["manifest"] | dict(seeds=list(seeds)))
    else:
        for name in TABLES:  # of an earlier run
            (folder / name).unlink(missing_ok=True)
        record.save_summary(folder, entries)
    return entries
