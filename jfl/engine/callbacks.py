"""Callbacks, which are called after each evaluation: early stopping, checkpoints, logs.

A callback is a function of a `Moment`.  It stops the run by returning True.
"""

import contextlib
import io
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core import checks, files, identity, pytrees
from ..core.errors import HealthError
from ..core.records import Metrics, Plan, Run
from . import compiling
from .host_feed import copy_states
from .loggers import Logger
from .round import init

__all__ = ["Moment", "checkpoint", "early_stopping", "log", "restore"]


# Fields of Metrics that are more than one number per evaluation.
NON_SCALAR_FIELDS = ("client_percentiles", "custom")


class Moment(NamedTuple):
    """The state of a run after an evaluation.

    Attributes:
        round: the number of rounds that have run, including those of earlier calls of `simulate`.
        last: the round at which the run will end.
        metrics: Metrics of this evaluation, each a scalar.  No guarantee covers them.
        history: Metrics of all evaluations of this call so far, with leaves [evaluations].
        run: a copy of the state, which the callback may keep.
        plan: the plan.
    """

    round: int
    last: int
    metrics: Metrics
    history: Metrics
    run: Run
    plan: Plan

    @property
    def params(self) -> Any:
        """The parameters of the model."""
        return self.plan.algorithm.params(self.run.server)


# --- callbacks


def early_stopping(
    metric: str = "loss", patience: int = 5, larger: bool | None = None
) -> Callable[..., Any]:
    """Return a callback that stops a run when a metric has stopped improving.

    Args:
        metric: a field of Metrics, or the name of a custom metric.
        patience: the number of evaluations without an improvement after which the run stops.
        larger: whether larger values are better.  None decides by the name: smaller is better for
            losses, perplexity and rmse.

    Returns:
        A callback for one run.

    Privacy:
        The decision to stop depends on test rows, and with metric="train_loss" on training rows.
        `jfl.simulate` says what this means for the guarantee.

    Example:
        >>> import jfl
        >>> stop = jfl.callbacks.early_stopping("accuracy", patience=3)
    """
    where = "callbacks.early_stopping"
    checks.require_integer(where, patience=patience)
    if larger is None:
        larger = not (metric.endswith("loss") or metric in ("perplexity", "rmse"))
    best, since = -np.inf, 0

    def stop(moment: Moment) -> bool:
        nonlocal best, since
        value = float(metric_of(where, moment.metrics, metric)) * (1 if larger else -1)
        best, since = (value, 0) if value > best else (best, since + 1)
        return since >= patience

    return stop


def metric_of(where: str, metrics: Metrics, name: str) -> Any:
    """Return the metric with a given name, a field of Metrics or a custom metric.

    Raises:
        ArgumentError: If the run has no metric of this name.
    """
    values = _scalar_metrics(metrics)
    if name not in values:
        checks.fail(where, f"a metric of this run: {', '.join(values)}", repr(name))
    return values[name]


def _scalar_metrics(metrics: Metrics) -> dict[str, Any]:
    """Return the metrics that are one number per evaluation, by name."""
    names = [n for n in Metrics.__dataclass_fields__ if n not in NON_SCALAR_FIELDS]
    values = {n: getattr(metrics, n) for n in names} | (metrics.custom or {})
    return {n: value for n, value in values.items() if value is not None}


def _as_floats(metrics: Metrics) -> dict[str, float]:
    """Return the metrics of one evaluation as Python numbers, by name."""
    return {n: float(value) for n, value in _scalar_metrics(metrics).items()}


def log(write: Callable[[dict[str, Any]], Any] | Logger) -> Callable[..., Any]:
    """Return a callback that passes the metrics of each evaluation to a logger or a function.

    Args:
        write: a logger of `jfl.loggers`, or an object with the same methods, which first gets the
            description of the plan; or a function of a dict from names to numbers, such as `print`
            or the method `append` of a list.

    Returns:
        A callback for one run.  It does not close the logger; use `with` for that.

    Privacy:
        A guarantee covers the parameters only, not the metrics.

    Example:
        >>> import jfl
        >>> tell = jfl.callbacks.log(print)
    """
    if not isinstance(write, Logger) and not callable(write):
        what = "a logger of jfl.loggers, or a function of a dict"
        checks.fail("callbacks.log", what, checks.short_repr(write))
    begun = False

    def tell(moment: Moment) -> None:
        nonlocal begun
        numbers = _as_floats(moment.metrics)
        if not isinstance(write, Logger):
            write(numbers)
            return
        if not begun:
            write.settings(identity.describe(moment.plan))
            begun = True
        write.log({n: v for n, v in numbers.items() if n != "round"}, moment.round)

    return tell


def checkpoint(path: str | Path) -> Callable[..., Any]:
    """Return a callback that saves the state at each evaluation; `restore` reads it.

    Args:
        path: the file.  Each state atomically replaces the previous one.

    Returns:
        A callback.

    Privacy:
        After a crash, rounds since the last checkpoint are computed again.  On another machine or
        with other versions of libraries, they may have different noise.  If results of these rounds
        were published before the crash, they have then been released twice, which no guarantee
        covers.
    """
    path = Path(path)

    def save(moment: Moment) -> None:
        content = io.BytesIO()
        np.savez(content, *map(np.asarray, jax.tree.leaves(pytrees.keys_to_words(moment.run))))
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, [content.getvalue()])

    return save


def restore(path: str | Path, plan: Plan) -> Run:
    """Read the state that `checkpoint` saved, for `jfl.simulate(..., start=run)`.

    Args:
        path: the file.
        plan: the plan that ran.

    Raises:
        ArgumentError: If the shapes in the file, or the bytes per number, are not those of this
            plan's state.  Other differences are not detected.
    """
    like = init(jax.random.key(0), plan)
    wanted, structure = jax.tree.flatten(pytrees.keys_to_words(like))
    with np.load(path) as stored:
        found = [stored[name] for name in stored.files]
    form = lambda arrays: [(x.shape, x.dtype.itemsize) for x in arrays]
    if form(found) != form(wanted):
        checks.fail(
            "callbacks.restore",
            "a state of this plan",
            f"{path}, of another one",
            "Use the plan that made it.",
        )
    # NumPy stores a type that it does not know, such as bfloat16, as bytes of kind "V".
    typed = [x.view(w.dtype) if x.dtype.kind == "V" else x for x, w in zip(found, wanted)]
    return pytrees.words_to_keys(structure.unflatten(map(jnp.asarray, typed)), like)


# --- what `simulate` does with them


@contextlib.contextmanager
def watching(
    plan: Plan,
    rounds: int,
    before: int,
    progress: bool,
    callbacks: Sequence[Any],
    tolerate: Sequence[Any],
) -> Generator[Callable[[Run, list[Metrics]], bool] | None]:
    """Report the stages and the progress of a run in a `with` block.

    Args:
        plan: the plan.
        rounds: the number of rounds that will run.
        before: the number of rounds that have run in earlier calls.
        progress: as in `simulate`.
        callbacks: as in `simulate`.
        tolerate: names of Health counts that may be positive.

    Yields:
        A function of the run and the list of its metrics so far, which `simulate` calls after each
        evaluation, and which returns whether to stop.  None if nothing needs to be called.
    """
    callbacks = checks.as_tuple("simulate", callbacks=callbacks)
    for callback in callbacks:
        if not callable(callback):
            checks.fail("simulate", "callbacks, functions of a Moment", checks.short_repr(callback))
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(_bar(plan, rounds)) if progress else None
        if bar is None:  # otherwise the bar reports the stages
            stack.enter_context(compiling.report_stages(plan.algorithm.name))
        if not progress and not callbacks:
            yield None
            return

        def watch(run: Run, history: list[Any]) -> bool:
            stop_if_unhealthy(run, tolerate)
            last = history[-1]
            if bar is not None:
                bar(int(run.round) - before, _as_floats(last))
            if not callbacks:
                return False
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *history)
            # The client states of a population are NumPy arrays.
            copied = lambda x: copy_states(x) if isinstance(x, np.ndarray) else x.copy()
            copy = jax.tree.map(copied, run)
            moment = Moment(int(run.round), before + rounds, last, stacked, copy, plan)
            return any([callback(moment) is True for callback in callbacks])

        yield watch


@contextlib.contextmanager
def _bar(plan: Plan, rounds: int) -> Generator[Callable[[int, Mapping[str, float]], None]]:
    """Show a progress bar on standard error, and below it the seconds of each stage.

    Yields:
        A function that updates the bar, given the number of completed rounds and the metrics.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds, left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    name = plan.algorithm.name
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=rounds, numbers="")

        def show(done: int, numbers: Mapping[str, float]) -> None:
            shown = [n for n in ("accuracy", "loss") if n in numbers]
            words = "  ".join(f"{n} {numbers[n]:.4g}" for n in shown)
            progress.update(task, completed=done, numbers=words, description=name)

        def show_stage(stage: str) -> None:
            if not progress.tasks[task].completed:  # later stages are short
                progress.update(task, description=f"{name} ({stage or 'running'})")

        with compiling.report_stages(name, show_stage) as seconds:
            yield show
        progress.console.print(f"{name}: {compiling.stages_text(seconds)}")


# --- health


# What to do about each Health count that is not 0.
ADVICE = dict(
    nonfinite="Lower the learning rate, clip, or look for bad rows.",
    nonfinite_rows="Lower the learning rate or look for bad rows; or pass "
    'tolerate=("nonfinite_rows",): such rows count as zero, and a run that does not stop does not '
    "reveal them.",
    overflow="Give the sampler a larger capacity: delta includes the probability of an overflow, "
    "and nothing else protects such a run.  For padpfl(inexactness=...), use more local steps: "
    "delta does not include solves that stop too early.",
    empty_cohort=(
        'Raise the sampling rate, or pass tolerate=("empty_cohort",): an empty Poisson cohort is '
        "valid."
    ),
)


def stop_if_unhealthy(run: Run, tolerate: Sequence[str] = ()) -> None:
    """Raise HealthError if a run has counted a problem that is not tolerated.

    Args:
        run: the run.  It is not checked if its counts are traced.
        tolerate: the names of the Health counts that may be positive.
    """
    if not checks.is_concrete(run.health):
        return
    health = {k: int(v) for k, v in run.health._asdict().items()}
    bad = {k: v for k, v in health.items() if v > 0 and k not in tolerate}
    if bad:
        text = " ".join(f"{k}={v}. {ADVICE[k]}" for k, v in bad.items())
        raise HealthError(
            f"simulate: expected a healthy run; by round {int(run.round)} counted {text}",
            run,
            health,
        )
