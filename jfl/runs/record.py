"""The records of runs, and their files: summary.json, metrics.csv, manifest.json and a picture."""

import contextlib
import csv
import dataclasses
import io
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core import identity
from ..core.files import as_json as as_json
from ..core.files import plain, write
from ..core.records import Health, Metrics, Plan
from ..data.federation import describe
from ..engine.compiling import stage_seconds
from ..gradients.per_example import gradient_path
from ..kernels.conv import multiplies_patches
from . import guarantee_rows, pictures
from .config import Config
from .environment import environment

FORMAT = 1  # of summary.json and results.json; readers reject other formats
COLUMNS = (
    "name",
    "seed",
    "round",
    "accuracy",
    "client_accuracy",
    "loss",
    "train_loss",
    "clip_fraction",
    "adaptive_clip_norm",  # Metrics.clip_norm; `clip_norm` is free for the axis of a sweep
    "update_norm",
    "cohort",
    "epsilon",
)
# the columns that describe the guarantee to which an epsilon belongs
PROMISE = ("unit", "adjacency", "view", "delta", "status")
# the columns of metrics, between round and epsilon, and the field of Metrics that each one shows
SERIES = {column: column.removeprefix("adaptive_") for column in COLUMNS[3:-1]}
# The first lines of the pages of `jfl report`, by which `void` recognises them.
PAGES = {
    ".md": b"<!-- jfl report -->\n",
    ".html": b'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    b'<meta name="generator" content="jfl report">\n',
}


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The config, metrics, duration and guarantees of one run.

    Attributes:
        name: its name in tables and pictures.
        config: the values of its config, with the calibrated noise multiplier.
        seed: the seed of its randomness.
        history: its metrics, as lists over evaluations (`lists`).
        seconds: its duration with compilation; for a point of a sweep, its share.
        compile_seconds: the part of `seconds` that was compilation.
        guarantees: rows of `guarantee_rows`, proved and claimed.
        health: the counts of `Health` by name.
        tolerated: the names of the counts that do not make the run a failed one.
        trace: further lists over evaluations, for a figure.
        point: for a point of a sweep, its values of the fields that vary, without its seed.
    """

    name: str
    config: dict
    seed: int
    history: dict
    seconds: float
    compile_seconds: float
    guarantees: Sequence[dict] = ()
    health: dict = dataclasses.field(default_factory=dict)
    tolerated: tuple = ()
    trace: dict = dataclasses.field(default_factory=dict)
    point: dict = dataclasses.field(default_factory=dict)

    @classmethod
    def of_config(cls, config: Config, measured: dict, name: str | None = None, **facts):
        """Make the record of a run of `config` from its `measurement`."""
        return cls(
            name=config.algorithm if name is None else name,
            config=dataclasses.asdict(config),
            seed=config.seed,
            history=measured["history"],
            seconds=measured["seconds"],
            compile_seconds=measured["compile"],
            health=measured.get("health", {}),
            tolerated=config.tolerate(),
            **facts,
        )

    @property
    def failed(self) -> dict:
        """Return all health counts if the run failed; otherwise an empty dict.

        Health counts are numbers of events such as overflows.  A run failed if one of them is
        positive that the argument `tolerate` does not name.
        """
        bad = any(count for name, count in self.health.items() if name not in self.tolerated)
        return self.health if bad else {}

    def timing(self) -> dict:
        """Return the seconds of compilation, of the run, and per round without compilation."""
        rounds = self.history["round"][-1]
        return dict(
            compile=self.compile_seconds,
            total=self.seconds,
            per_round=max(0.0, self.seconds - self.compile_seconds) / rounds,
        )

    def entry(self) -> dict:
        """Return the entry of the run in summary.json."""
        accuracy = [a for a in self.history.get("accuracy") or [] if a is not None]
        return plain(
            dict(
                name=self.name,
                algorithm=self.config["algorithm"],
                dataset=self.config["dataset"],
                rounds=self.history["round"][-1],
                seed=self.seed,
                accuracy=dict(
                    final=accuracy[-1] if accuracy else None,
                    best=max(accuracy) if accuracy else None,
                ),
                loss=self.history["loss"][-1],
                seconds=self.timing(),
                privacy=list(self.guarantees),
                config=self.config,
                **(dict(trace=self.trace) if self.trace else {}),
                **(dict(point=self.point) if self.point else {}),
                **(dict(failed=self.failed) if self.failed else {}),
            )
        )

    def rows(self, epsilon=None, guarantee: dict | None = None) -> list[dict]:
        """Return the rows of the run in metrics.csv, one per evaluation.

        Args:
            epsilon: the epsilon after each evaluation; None leaves the column empty.
            guarantee: the guarantee to which these epsilons belong; None if nothing is proved.
        """
        nothing = dict(delta=self.config.get("delta"), status="no guarantee")
        more = {k: (guarantee or nothing).get(k) for k in PROMISE}
        if self.point:
            more |= point_columns(self.point, bool(self.failed), more)
        return [row | more for row in rows(self.name, self.seed, self.history, epsilon)]


def point_columns(point: dict, failed: bool, others: Iterable[str] = ()) -> dict:
    """Return the columns `failed` and the values of a point of a sweep, for the rows of its run.

    A value is named point_NAME if NAME is among COLUMNS and `others`.
    """
    taken = {*COLUMNS, *others, "failed"}
    return dict(failed=failed) | {f"point_{k}" if k in taken else k: v for k, v in point.items()}


def measurement(
    metrics: Metrics, health: Health, seconds: float, compile_seconds: float, point=None
) -> dict:
    """Return the results of a finished run as a JSON object.

    Args:
        metrics: the metrics of `jfl.simulate`, or with `point` those of `jfl.sweep`.
        health: the health counts from the same call.
        seconds: the duration of the run with compilation.
        compile_seconds: the part of `seconds` that was compilation.
        point: the index of the point of a sweep; None for a single run.
    """
    count = lambda value: int(value if point is None else value[point])
    return dict(
        seconds=seconds,
        compile=compile_seconds,
        health={name: count(value) for name, value in health._asdict().items()},
        history=lists(metrics, point),
    )


def rows(name: str, seed: int | str, metrics: dict, epsilon=None) -> list[dict]:
    """Return rows of metrics.csv, one per evaluation."""
    series = {k: metrics.get(name) for k, name in SERIES.items()} | dict(epsilon=epsilon)
    return [
        dict(name=name, seed=seed, round=r)
        | {k: None if v is None else plain(v[i]) for k, v in series.items()}
        for i, r in enumerate(metrics["round"])
    ]


def lists(metrics: Metrics, point: int | None = None) -> dict:
    """Return metrics, including custom ones, as lists over evaluations.

    For the metrics of a sweep, `point` is the index of the point.
    """
    values = {k: getattr(metrics, k) for k in Metrics.__dataclass_fields__ if k != "custom"}
    values |= metrics.custom or {}
    return {
        k: plain(np.asarray(v if point is None else v[point]).tolist())
        for k, v in values.items()
        if v is not None
    }


class ShownRun(NamedTuple):
    """A run, with the epsilons and the guarantee that tables and pictures show for it.

    Attributes:
        record: the record of the run.
        epsilons: epsilon at each evaluation; None without a guarantee.
        guarantee: the guarantee in the legend; None without one.
        name: the name in the legend, before the guarantee; "" for that of the record.
    """

    record: RunRecord
    epsilons: Any
    guarantee: dict | None
    name: str = ""


def save_results(
    out: Path, runs: list[ShownRun], manifest: dict, picture: str, title: str
) -> list[dict]:
    """Write summary.json, metrics.csv, manifest.json and the picture of runs.

    Returns:
        The entries of summary.json.
    """
    groups, table = {}, []
    for record, epsilons, guarantee, name in runs:
        table += record.rows(epsilons, guarantee)
        if not record.failed and record.history.get("accuracy"):
            group = dict(
                name=name or record.name,
                point=record.point,
                privacy=guarantee_rows.label(guarantee),
                promise=guarantee_rows.promise(guarantee),
                round=record.history["round"],
                accuracy=[],
                epsilon=guarantee and guarantee["epsilon"],
            )
            accuracy = groups.setdefault(record.name, group)["accuracy"]
            accuracy.append(record.history["accuracy"])
    entries = [run.record.entry() for run in runs]
    save(out, entries, table, manifest)
    if groups:
        pictures.draw_accuracy(out / picture, list(groups.values()), title)
    return entries


def save(directory, runs: list[dict], table: list[dict], manifest: dict):
    """Write summary.json, metrics.csv and manifest.json."""
    text = io.StringIO(newline="")
    columns = dict.fromkeys((*COLUMNS, *(name for row in table for name in row)))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    write(directory / "metrics.csv", text.getvalue())
    write(directory / "manifest.json", json.dumps(plain(manifest), indent=1))
    save_summary(directory, runs)


def save_summary(directory, entries: list[dict]):
    """Write only summary.json, for runs without a table."""
    write(
        directory / "summary.json",
        json.dumps(dict(format=FORMAT, runs=plain(entries)), indent=1, allow_nan=False),
    )


def void(directory):
    """Remove outdated results from a directory: those of a run that now continues.

    These are summary.json, and the pages and pictures that `jfl report` wrote next to it.
    """
    (directory / "summary.json").unlink(missing_ok=True)
    for path in list(directory.iterdir()):
        head = PAGES.get(path.suffix)
        if head is not None and path.is_file() and path.read_bytes().startswith(head):
            path.unlink()
            folder = path.with_name(f"{path.stem}_files")
            if folder.is_dir() and not folder.is_symlink():
                for picture in folder.glob("picture-*.png"):
                    picture.unlink()
                with contextlib.suppress(OSError):  # the folder has other files
                    folder.rmdir()


def manifest(plans: list[Plan], partition=None, rounds: int = 1, **more) -> dict:
    """Return the content of manifest.json: what is needed to reproduce the results.

    It includes the noise levels of the first plan.
    """
    import flax
    import optax

    return dict(
        versions=environment() | dict(optax=optax.__version__, flax=flax.__version__),
        kernels=dict(
            gradients=gradient_path(plans[0]),
            convolutions="patches" if multiplies_patches() else "XLA's own; patches of a lone row",
        ),
        noise=guarantee_rows.noise_levels(plans[0], rounds),
        data=describe(plans[0].fed, partition),
        plan=identity.describe(plans[0]),
        written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **more,
    )


# --- time


class Stopwatch:
    """A clock that starts when it is made, and that counts the seconds of compilation apart.

    These include tracing and lowering.
    """

    def __init__(self) -> None:
        self._begun, self._compiled = time.perf_counter(), sum(stage_seconds().values())

    def read(self) -> tuple[float, float]:
        """Return the seconds since the start, and how many of them were compilation."""
        compiled = sum(stage_seconds().values()) - self._compiled
        return time.perf_counter() - self._begun, compiled

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock while the context is active."""
        pause = Stopwatch()
        try:
            yield
        finally:
            seconds, compiled = pause.read()
            self._begun += seconds
            self._compiled += compiled
