"""The commands `jfl train`, `jfl sweep` and `jfl predict`."""

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from ..core import checks
from ..core.options import field
from ..data import datasets, transforms
from ..engine import compiling
from ..engine import devices as mesh
from ..runs import build, checkpoint, load, on_ray
from ..runs import config as configs
from ..runs import sweep as sweeps
from ..runs import train as runs
from ..runs.config import Config
from . import console
from .options import config_of, parse, parse_devices, parse_with_config

ENGINES = ("local", "ray")


# --- train, sweep


@dataclasses.dataclass(frozen=True)
class Train(Config):
    """Train one model and keep it in a directory.

    example: jfl train --preset digits-client-eps8 --out runs/first

    example: jfl train --algorithm fedavg --dataset digits --partition iid --unit client --epsilon 8
      --rounds 20 --steps 10 --batch 8 --lr 0.3 --out runs/client

    --config FILE.toml and --preset NAME (see `jfl list`) set fields; flags take precedence.
    """

    out: Path = field(Path("runs/train"), "run directory: new or empty, unless --resume")
    resume: bool = field(False, "continue from the last checkpoint in --out")
    progress: bool = field(True, "hide the line with finished rounds and remaining time")
    devices: str = field("1", "how many devices of this machine share each cohort, or auto for all")
    coordinator: str | None = field(
        None,
        "for several processes: HOST:PORT of process 0, or auto on SLURM, Kubernetes or a TPU pod",
    )
    processes: int | None = field(None, "the number of processes, one per host")
    process: int | None = field(None, "the number of this process, from 0; process 0 writes --out")
    log: str = field(
        "",
        "log metrics in --out during the run: csv, tensorboard, or both with a comma",
    )


def train(arguments: list[str]) -> None:
    """Run `jfl train`."""
    command, _ = parse_with_config(Train, arguments, "jfl train")
    config, share = config_of(command), _mesh(command)
    if not mesh.is_lead_process():
        runs.train(config, command.out, command.resume, mesh=share)
        return
    if configs.the_unit(config) == "client" and config.view is None:
        print(
            (
                f"Guarantees are for view {configs.the_view(config)}: the server itself sees each "
                f"upload before it adds the noise."
            ),
            file=sys.stderr,
        )
    if config.dataset == "file":
        print(build.federation(config), file=sys.stderr)
    promise = f"{configs.the_unit(config)}, {configs.the_view(config)}"
    with console.progress(command.progress, "rounds") as bar:
        task = bar.add_task("jfl train", total=config.rounds, note="checking", accuracy="")

        def watch(round, accuracy=None, loss=None, epsilon=None):
            if loss is None:
                bar.console.print(f"jfl train: resumed at round {round}")
            seen = (("loss", loss), ("accuracy", accuracy), (f"ε ({promise})", epsilon))
            bar.update(
                task,
                completed=round,
                note="  ".join(f"{k} {v:.3g}" for k, v in seen if v is not None),
            )

        kept = lambda: f"rounds up to {checkpoint.Checkpoints(command.out).latest() or 0}"
        with _kept(command.out, "journal.json", kept), _stages("jfl train", bar, task) as seconds:
            entry = runs.train(
                config,
                command.out,
                command.resume,
                watch,
                share,
                functools.partial(console.warn, "train"),
                command.log,
            )
    console.results([entry], command.out, notes=[_preparation(seconds)])


@contextlib.contextmanager
def _stages(name, bar, task):
    """Show the stages before the first program runs in the note of a progress bar's task.

    The bar disappears if an error stops the command before it has done anything.
    """

    def show(stage):
        if not bar.tasks[task].completed:
            bar.update(task, note=stage or "running")

    try:
        with compiling.report_stages(name, show) as seconds:
            yield seconds
    except BaseException:
        bar.live.transient = not bar.tasks[task].completed
        raise


def _preparation(seconds):
    """Say how long the programs of a command were prepared."""
    prepared = {stage: spent for stage, spent in seconds.items() if stage != "running"}
    return f"Preparing programs took {compiling.stages_text(prepared)}."


def _mesh(command):
    """Return the argument `mesh` of the flags, after joining other processes if there are any."""
    if command.coordinator is None:
        if command.processes is not None or command.process is not None:
            checks.fail("jfl train", "--coordinator with --processes and --process", "none")
        return parse_devices("--devices", command.devices)
    if command.devices != "1":
        checks.fail(
            "jfl train",
            "either --devices or --coordinator",
            "both",
            "Several processes use all their devices.",
        )
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM
    mesh.connect(
        None if command.coordinator == "auto" else command.coordinator,
        command.processes,
        command.process,
    )
    return "auto"


@dataclasses.dataclass(frozen=True)
class Sweep(Config):
    """Run every combination of some fields' values; points that share their shapes are one program.

    example: jfl sweep --rounds 20 --unit client --sweep lr=0.1,0.3 --sweep epsilon=2,8 --sweep
      seed=0,1,2

    --config FILE.toml sets fields, and its table [sweep] has lists of values. Flags override them.
    """

    out: Path = field(Path("runs/sweep"), "run directory: new or empty, unless --resume")
    sweep: tuple[str, ...] = field(
        (),
        "NAME=VALUE,VALUE,...; once per field that varies; none, true and false are values",
        repeated=True,
    )
    strict: bool = field(False, "exit with 3 if any point fails, not only if all do")
    resume: bool = field(False, "compute the missing points of the sweep in --out")
    progress: bool = field(True, "hide the line with finished points and remaining time")
    block: int | None = field(
        None,
        "maximum number of points in a program; default what fits into memory, and 8 on a CPU",
    )
    devices: str = field(
        "1", "local: how many devices of this machine share the points, or auto for all"
    )
    engine: str = field(
        "local", 'local | ray: on the machines of a Ray cluster, pip install -e ".[ray]"'
    )
    address: str | None = field(
        None,
        "ray: address of a running cluster; default $RAY_ADDRESS, or else a temporary cluster on "
        "this machine",
    )
    cpus_per_task: float = field(1.0, "ray: CPUs for a block of points")
    gpus_per_task: float | None = field(
        None, "ray: GPUs for a block of points; default 1 if the cluster has GPUs"
    )


def sweep(arguments: list[str]) -> None:
    """Run `jfl sweep`."""
    command, axes = parse_with_config(Sweep, arguments, "jfl sweep", of_sweep=True)
    axes |= _axes(command.sweep)
    if not axes:
        checks.fail(
            "jfl sweep",
            "fields that vary",
            "none",
            "Give --sweep lr=0.1,0.3 or a table [sweep].",
        )
    engine = _engine(command)
    with console.progress(command.progress, "points") as bar:
        total = math.prod(map(len, axes.values()))
        task = bar.add_task("jfl sweep", total=total, note="checking", accuracy="")

        def watch(**progress):
            if progress.get("total") and progress["completed"]:
                done = "{completed} of {total} points".format(**progress)
                bar.console.print(f"jfl sweep: resumed with {done}")
            bar.update(task, **progress)

        kept = lambda: f"{len(sweeps.points_store(command.out).records)} of its points"
        with _kept(command.out, sweeps.FILE, kept), _stages("jfl sweep", bar, task) as seconds:
            entries = sweeps.sweep(
                config_of(command),
                axes,
                command.out,
                command.strict,
                resume=command.resume,
                engine=engine,
                block=command.block,
                watch=watch,
                warn=functools.partial(console.warn, "sweep"),
            )
    console.results(entries, command.out, notes=[_preparation(seconds)])


def _axes(flags) -> dict[str, list]:
    """Parse the flags `--sweep NAME=VALUE,VALUE`."""
    axes = {}
    for text in flags:
        name, _, values = text.partition("=")
        name = name.replace("-", "_")
        if name in axes:
            checks.fail(
                "--sweep",
                f"{name} once, with all its values",
                f"it again as {text!r}",
                f"Give --sweep {name}=VALUE,VALUE.",
            )
        axes[name] = [configs.coerce(name, _value(v), "--sweep") for v in values.split(",") if v]
        if not axes[name]:
            checks.fail("--sweep", "NAME=VALUE,VALUE,...", f"{text!r}")
    return axes


def _engine(command):
    """Return the engine of a sweep."""
    checks.require_one_of("jfl sweep", ENGINES, engine=command.engine)
    if command.engine == "ray":
        if command.devices != "1":
            checks.fail(
                "jfl sweep",
                "--engine local with --devices",
                "--engine ray",
                "For ray, use --gpus-per-task.",
            )
        return on_ray.Ray(command.address, command.cpus_per_task, command.gpus_per_task)
    given = [
        f"--{n.replace('_', '-')}"
        for n in ("address", "cpus_per_task", "gpus_per_task")
        if getattr(command, n) != getattr(type(command), n)
    ]
    if given:
        checks.fail(
            "jfl sweep", f"--engine ray with {' and '.join(given)}", f"--engine {command.engine}"
        )
    return sweeps.Local(parse_devices("--devices", command.devices))


@contextlib.contextmanager
def _kept(out: Path, begun: str, count: Callable[[], str]):
    """Explain an interruption: say what is kept, and how to continue.

    Args:
        out: the run directory.
        begun: the name of the first file of a run.
        count: describes what is kept.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        if not (out / begun).exists():
            text = f"Nothing was computed yet, and nothing is kept in {out}: run the same command "
            raise type(stop)(f"{text}again.") from None
        raise type(stop)(
            f"Kept in {out}: {count()}. Continue with the same command and --resume."
        ) from None


def _value(text):
    """Parse a value of `--sweep`: an integer, a number, or text."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


# --- predict

# Preprocessing that changes each row alone, so that it can be applied to other rows.
ROW_STEPS = ("none", "flatten", "unit_norm")


@dataclasses.dataclass(frozen=True)
class Predict:
    """Predict rows of a file with the model of a run.

    example: jfl predict runs/first --data rows.npz --out predictions.csv

    The rows are raw: unit_norm is applied as in the run.  A run with preprocessing that was fitted
    on its training rows, such as standardise, is refused.  If the run was trained on a table, the
    columns of a .csv with a header are found by their names, and labels that are words keep them.
    """

    data: Path | None = field(None, "rows: .npy, .npz (its array x) or .csv of numbers")
    out: Path | None = field(None, "a CSV file: the label and probabilities of each row; or stdout")


def predict(arguments: list[str]) -> None:
    """Run `jfl predict RUN --data FILE`."""
    runs = [word for word in arguments[:1] if not word.startswith("-")]
    command = parse(Predict, arguments[len(runs) :], "jfl predict RUN")
    if not runs:
        checks.fail("jfl predict", "the directory of a run first", "none")
    if command.data is None:
        checks.fail("jfl predict", "--data FILE", "none")
    loaded = load.load_run(Path(runs[0]))
    steps = loaded.config.preprocess.split(",")
    if fitted := [step for step in steps if step not in ROW_STEPS]:
        checks.fail(
            "jfl predict",
            f"a run with preprocessing of single rows ({', '.join(ROW_STEPS)})",
            f"{runs[0]} with {', '.join(fitted)}, which was fitted on its training rows",
            f"Preprocess your rows in the same way, and call jfl.load({runs[0]!r}).predict(x).",
        )
    x, config = loaded.plan.fed.x, loaded.config
    is_file = config.dataset == "file"
    named = (config.data, config.label, config.owner)
    names, words = datasets.file_names(*named) if is_file else ((), ())
    rows = load.read_rows(command.data, jax.ShapeDtypeStruct(x.shape[1:], x.dtype), names)
    if "unit_norm" in steps:
        labels = np.zeros(len(rows), int)
        rows = transforms.unit_norm(datasets.arrays(rows, labels, rows, labels)).x
    lines = load.predictions(loaded, rows, words)
    text = load.write_predictions(command.out, lines)
    print(text[:-1] if command.out is None else f"{len(lines)} predictions in {command.out}")
