"""A run in a directory: it is computed in segments, saved, resumed and reported."""

import contextlib
import dataclasses
import importlib.util
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core import checks, identity
from ..core.errors import ArgumentError, HealthError
from ..core.files import temporary, write
from ..core.records import Plan, Run
from ..data.federation import checksum
from ..engine import devices as meshes
from ..engine import loggers, sharding
from ..engine.round import init
from ..engine.simulate import rounds_before_evaluations, scan, simulate
from ..privacy.guarantees import Overflow
from . import build, guarantee_rows
from . import config as configs
from . import record as report
from .checkpoint import (
    Checkpoints,
    Journal,
    code,
    differences,
    environment,
    refuse_resume,
)
from .config import Config
from .directory import checked, disk_errors_explained, has_files, locked
from .record import RunRecord, Stopwatch

# The loggers of `jfl train --log`: name -> (run directory -> logger).
LOGGERS: dict[str, Callable[[Path], Any]] = dict(
    csv=lambda out: loggers.CSV(out / "log.csv"),
    tensorboard=lambda out: loggers.TensorBoard(out / "tensorboard"),
)


class Session(NamedTuple):
    """The state of one call of `train`, in the process that writes files.

    Attributes:
        asked: the config that the caller passed.
        config: the config with the calibrated noise multiplier.
        plan: the plan that runs.
        facts: values that a resumed run must have in common with this one.
        evaluations: the rounds after which the model is evaluated.
        save_every: the number of rounds between checkpoints.
        out: the run directory.
        checkpoints: the checkpoints in the run directory.
        journal: the journal in the run directory.
        mesh: the devices that compute a cohort together; None for a single device.
        watch: a function that is called after each evaluation, and at the start of a resumed run.
        log: the names of loggers, as in LOGGERS.
        run: the state of the run at the beginning of the call.
        since: the last round before those that the current version of the program computes.
        history: metrics of the rounds that earlier processes ran, as lists over evaluations.
        seconds: the time that earlier processes took for the rounds in `history`.
        compile: the part of `seconds` that was compilation.
    """

    asked: Config
    config: Config
    plan: Plan
    facts: dict
    evaluations: list[int]
    save_every: int
    out: Path
    checkpoints: Checkpoints
    journal: Journal
    mesh: Any
    watch: Callable
    log: tuple[str, ...]
    run: Run
    since: int
    history: dict
    seconds: float
    compile: float


def train(
    config: Config,
    out,
    resume: bool = False,
    watch=lambda **progress: None,
    mesh=None,
    warn=lambda text: None,
    log: str = "",
) -> dict | None:
    """Train one plan in a directory.

    Rounds run in segments that end at evaluations, and a checkpoint is complete before the next
    segment begins.  With several processes (jfl.engine.devices.connect), the first one reads and
    writes files, and the others only compute.

    Args:
        config: the config of the run.
        out: a new or empty directory, or with `resume` that of this run.
        resume: continue the run in `out`.
        watch: called with round, accuracy, loss and epsilon after each evaluation; and first with
            only the round, if the run resumes after it.
        mesh: as in jfl.simulate.
        warn: called with a text before the first round, if the noise is so large that nothing can
            be learned.
        log: loggers that receive the metrics during the run: "csv", "tensorboard" or
            "csv,tensorboard".

    Returns:
        The entry of summary.json; None in all processes except the first.

    Raises:
        ArgumentError: For a wrong argument, before anything is written.
        ResumeRefused: If `out` holds another run.
        HealthError: If a round fails; the last good checkpoint is kept.
        OSError: If the disk or another process fails; the last good checkpoint is kept.

    Privacy:
        A guarantee covers the parameters only, not the metrics in files and logs.
    """
    with meshes.fail_together("jfl train") as ready:
        mesh = meshes.devices(mesh)
        layout = meshes.layout(mesh, str(environment()))
        if meshes.is_lead_process():
            return _train_on_coordinator(config, out, resume, watch, mesh, layout, ready, warn, log)
        return _train_on_worker(config, mesh, ready)


def _train_on_coordinator(asked, out, resume, watch, mesh, layout, ready, warn, log):
    """Train in the process that reads and writes files."""
    out, names = checked(out, resume), _logger_names(log)
    journaled = None
    if resume and has_files(out):
        journaled = Journal(out).read()
        if journaled is None:
            refuse_resume(
                "--resume",
                f"a run with its journal in {out}",
                "a directory without one",
                "It is unknown which rounds were seen: start in a new directory with a new --seed.",
            )
    configs.refuse_unused(asked)
    plan, config = build.build(asked)
    facts = _facts(plan, config)
    if journaled is not None:
        _refuse_other_run(journaled, facts, out)
    every, evaluations = _evaluations(config)
    save_every = every if config.checkpoint_every is None else config.checkpoint_every
    checks.require_integer("config", checkpoint_every=save_every)
    if text := check_plan(plan, config, set()):
        warn(text)
    with locked(out):
        checked(out, resume)
        if journaled != Journal(out).read():
            checks.fail("--out", "a directory that no other process uses", f"{out}, which changed")
        key = jax.random.key(config.seed)
        journal = Journal(out, layout=layout, key=str(jax.random.key_data(key).tolist()))
        checkpoints = Checkpoints(out)
        # Each of several processes initialises the run alone; they share it below.
        run = init(key, dataclasses.replace(plan, mesh=mesh if jax.process_count() == 1 else None))
        since = 0
        meta: dict[str, Any] = dict(history={}, seconds=0.0, compile=0.0)
        if journaled is not None:
            if checkpoints.latest() is not None:
                saved = checkpoints.load()
                meta |= saved.meta
                _refuse_other_run(meta.pop("facts") | dict(until=0), facts, out)
                run = checkpoints.restore(run, saved)
            since = journal.resume(int(run.round))
        ready(f"{facts} {code()}")
        with disk_errors_explained(f"run {out}", lambda: _last_checkpoint(checkpoints, out)):
            for folder in filter(Path.is_dir, (out, checkpoints.folder)):
                for path in filter(temporary, list(folder.iterdir())):  # left by a killed process
                    path.unlink()
            if journaled is None:
                # The journal is the first file: a directory with other files only is rejected.
                journal.announce(0, since, **facts)
            session = Session(
                asked=asked,
                config=config,
                plan=plan,
                facts=facts,
                evaluations=evaluations,
                save_every=save_every,
                out=out,
                checkpoints=checkpoints,
                journal=journal,
                mesh=mesh,
                watch=watch,
                log=names,
                run=meshes.broadcast_from_lead(run),
                since=since,
                **meta,
            )
            return _train(session)


def _train_on_worker(config, mesh, ready):
    """Compute the same rounds in a process that is not the first, without using files."""
    plan, config = build.build(config)
    ready(f"{_facts(plan, config)} {code()}")
    with meshes.explain_lost_process():
        run = meshes.broadcast_from_lead(init(jax.random.key(config.seed), plan))
    for _ in _segments(plan, config, run, _evaluations(config)[1], mesh):
        pass


def _segments(plan: Plan, config: Config, run: Run, evaluations: list[int], mesh):
    """Run the rounds that are left, and yield the output of `jfl.simulate` at each evaluation."""
    key, plan = jax.random.key(config.seed), sharding.place(plan, mesh)
    for until in evaluations:
        if (n := until - int(run.round)) > 0:
            output = simulate(
                key, plan, n, evaluate_every=n, start=run, tolerate=config.tolerate(), mesh=mesh
            )
            run = output.run
            yield output


def _facts(plan, config) -> dict:
    """Return the values that are stored with a run and compared before it is resumed.

    The checksum of the data replaces their path, so that the file may be moved.
    """
    fields = dataclasses.asdict(config)
    del fields["data"]
    return dict(
        config=report.as_json(fields),
        data=checksum(plan.fed),
        plan=json.loads(json.dumps(identity.describe(plan))),
    )


def _evaluations(config) -> tuple[int, list[int]]:
    """Return the number of rounds between evaluations, and the rounds after which they happen."""
    every = config.evaluate_every
    if every is None:
        every = int(rounds_before_evaluations(config.rounds, None)[0])
    rounds_before_evaluations(config.rounds, every)  # rejects an invalid interval
    return every, [*range(every, config.rounds, every), config.rounds]


def _logger_names(text: str) -> tuple[str, ...]:
    """Return the loggers that `--log NAME,NAME` names; reject an unknown name and a missing package
    before anything is computed."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        checks.require_one_of("--log", tuple(LOGGERS), name=name)
    if "tensorboard" in names and not importlib.util.find_spec("tensorboardX"):
        checks.fail(
            "--log tensorboard",
            "the package tensorboardX",
            "a Python without it",
            'Install it: pip install -e ".[tensorboard]" in the folder of jfl.',
        )
    return names


def _train(session: Session) -> dict:
    """Run the rounds that are left, and write the results."""
    config, plan, out = session.config, session.plan, session.out
    write(
        out / "config.toml",
        configs.dump(dataclasses.asdict(session.asked), "jfl train --config config.toml --out DIR"),
    )
    guarantees = privacy(plan, config, config.rounds)
    shown = shown_guarantee(guarantees, config)
    done = int(session.run.round)
    evaluated = [*session.history.get("round", ()), *(r for r in session.evaluations if r > done)]
    values = epsilons(plan, config, evaluated, last=shown and shown["epsilon"])
    curve = {} if values is None else dict(zip(evaluated, values.tolist()))
    if done:
        session.watch(round=done)
    if done < config.rounds:
        report.void(out)  # the epsilon of a shorter run no longer holds
        (out / "accuracy.png").unlink(missing_ok=True)
    stopwatch = Stopwatch()
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(LOGGERS[name](out)) for name in session.log]
        for writer in writers:
            writer.settings(dataclasses.asdict(config))
        _log(writers, session.history, curve)  # so that the log of a resumed run is complete
        history = _run_segments(session, curve, stopwatch, writers)
    measured = dict(history=history) | _seconds(session, stopwatch)
    record = RunRecord.of_config(config, measured, guarantees=guarantees)
    manifest = report.manifest(
        [plan],
        build.the_partition(config),
        config.rounds,
        seconds=record.timing(),
        seeds=[config.seed],
    )
    shown_run = report.ShownRun(record, [curve.get(r) for r in history["round"]], shown)
    title = f"{config.algorithm} on {config.dataset}"
    return report.save_results(out, [shown_run], manifest, "accuracy.png", title)[0]


def _run_segments(session: Session, curve: dict, stopwatch: Stopwatch, writers: list) -> dict:
    """Run the segments; announce each in the journal before it is saved and reported.

    Returns:
        The metrics of all rounds.
    """
    config, out, history = session.config, session.out, session.history
    done = saved = int(session.run.round)
    outputs = _segments(session.plan, config, session.run, session.evaluations, session.mesh)
    try:
        for output in outputs:
            done, seen = int(output.run.round), report.lists(output.metrics)
            # before anything that these rounds released leaves this process
            session.journal.announce(done, session.since, **session.facts)
            for name, values in seen.items():
                history.setdefault(name, []).extend(values)
            if done - saved >= session.save_every or done == config.rounds:
                meta = dict(facts=session.facts, history=history) | _seconds(session, stopwatch)
                session.checkpoints.save(output.run, meta)
                saved = done
            _log(writers, seen, curve)
            session.watch(
                round=done,
                accuracy=(seen.get("accuracy") or [None])[-1],
                loss=seen["loss"][-1],
                epsilon=curve.get(done),
            )
    except HealthError as error:
        until = next(r for r in session.evaluations if r > done)
        session.journal.announce(until, session.since, **session.facts)
        text = f"{error} {_last_checkpoint(session.checkpoints, out)}"
        raise HealthError(text, error.run, error.health) from None
    return history


def _seconds(session: Session, stopwatch: Stopwatch) -> dict[str, float]:
    """Return the seconds of a run in all of its processes, and those of them that were
    compilation."""
    seconds, compiled = stopwatch.read()
    return dict(seconds=session.seconds + seconds, compile=session.compile + compiled)


def _last_checkpoint(checkpoints: Checkpoints, out: Path) -> str:
    """Return a sentence about the latest checkpoint, for messages about a full disk."""
    last = checkpoints.latest()
    return f"Last good checkpoint: {f'round {last} in {out}' if last else 'none'}."


def _log(writers: list, seen: dict, curve: dict) -> None:
    """Log metrics, which are lists over evaluations, and the epsilon after each evaluation."""
    for i, round in enumerate(seen.get("round", ())):
        numbers = {k: values[i] for k, values in seen.items() if k != "round"}
        numbers = {k: v for k, v in numbers.items() if isinstance(v, int | float | None)}
        for writer in writers:
            writer.log(numbers | dict(epsilon=curve.get(round)), round)


# --- what a resumed run must have in common


def _refuse_other_run(journaled: dict, facts: dict, out):
    """Refuse to resume unless everything except the length of the run and the intervals of
    evaluations and checkpoints is the same.

    A field that is missing in the stored config had its default.
    """
    config = facts["config"]
    stored = report.as_json(dataclasses.asdict(Config())) | journaled["config"]
    there, here = (
        {k: values[k] for k in config if k not in configs.RUN_ONLY} for values in (stored, config)
    )
    if differ := differences(there, here):
        file, folder = shlex.quote(f"{out}/config.toml"), shlex.quote(str(out))
        do = f"jfl train --config {file} --resume --out {folder} has the same values."
        if len(differ) == 1 and there["noise_multiplier"] != here["noise_multiplier"]:
            do += (
                " A calibrated noise multiplier holds for the number of rounds of its calibration: "
                f"to run more, give --noise-multiplier {there['noise_multiplier']!r} instead of "
                "--epsilon."
            )
        refuse_resume(f"checkpoint {out}", "the config that made it", "; ".join(differ), do)
    rounds, until = stored["rounds"], journaled["until"]
    if until > config["rounds"]:
        checks.fail("--rounds", f">= {until}, the rounds already released", config["rounds"])
    # Noise that is calibrated or that changes by round depends on the number of rounds.
    depends = (
        config["clip_decay"] != 1 or config["noise_decay"] != 1 or config["epsilon"] is not None
    )
    if depends and rounds != config["rounds"]:
        refuse_resume(
            "--rounds",
            f"{rounds}, for which the noise was computed",
            config["rounds"],
            "The noise and clip norms of this run depend on its number of rounds.",
        )
    if journaled["data"] != facts["data"]:
        refuse_resume(
            f"checkpoint {out}",
            f"the data it was made from, {journaled['data']}",
            facts["data"],
            "Resume with the same data, or start in a new directory.",
        )
    if lines := identity.differences(journaled["plan"], facts["plan"]):
        refuse_resume(
            f"checkpoint {out}",
            "the plan that made it",
            "; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" * (len(lines) > 5)),
            "Another plan has other noise: start in a new directory.",
        )


# --- the guarantees of a config


def check_plan(plan: Plan, config: Config, traced: set) -> str:
    """Reject a plan whose run would fail, possibly only at its end.

    Its noise may prove nothing, shapes may not match, or, in the mode "as_printed", the paper of
    the config may have no formula for it.

    Args:
        plan: the plan that would run.
        config: its config.
        traced: as in `trace_once`.

    Returns:
        The `noise_warning` of the plan.

    Raises:
        ValueError: If the run would fail.
    """
    epsilons(plan, config, [config.rounds], most=0)
    paper_claims(plan, config, config.rounds)
    trace_once(plan, traced)
    return noise_warning(plan, config)


def trace_once(plan: Plan, traced: set):
    """Trace a round of a plan, so that mismatched shapes raise an error.

    A plan is not traced if another one with the same structure and shapes was traced before.

    Args:
        plan: the plan that would run.
        traced: the structures and shapes of earlier plans; this plan's is added.
    """
    shape = jax.tree.structure(plan), tuple(np.shape(x) for x in jax.tree.leaves(plan))
    if shape not in traced:
        jax.eval_shape(lambda key: scan(init(key, plan), plan, [1]), jax.random.key(0))
        traced.add(shape)


def epsilons(plan, config, rounds, last=None, most=guarantee_rows.TIGHT):
    """Return epsilon after each number of rounds for the chosen unit and view.

    Args:
        plan: the plan that runs.
        config: its config, with the unit, view and adjacency of the epsilon.
        rounds: Int[m], ascending.
        last: the epsilon of `shown_guarantee` after `rounds[-1]`, if it is known already.
        most: how many of the values are computed as tightly as by `jfl.guarantee`.  0, which is
            enough to check a plan, uses quicker and larger bounds for all of them.

    Returns:
        Float64[m]; None if nothing is proved.
    """
    if (unit := configs.the_unit(config)) is None:
        return None
    try:
        values = guarantee_rows.epsilons(
            plan,
            np.asarray(rounds),
            config.delta,
            unit,
            configs.the_view(config),
            config.adjacency,
            last=last,
            most=most,
        )
    except Overflow:  # too little noise: no delta is left for the sampling overflow
        values = np.full(np.shape(rounds), np.inf)
        if config.mode == "sound":
            raise
    if not np.isfinite(values).all() and config.mode == "sound":
        checks.fail(
            "config",
            "enough noise for a finite epsilon",
            f"epsilon={values.max()} at delta={config.delta:g}",
            "Raise noise_multiplier.",
        )
    return values


def noise_warning(plan, config) -> str:
    """Return a warning for a run with too much or too little noise; "" for others."""
    if (unit := configs.the_unit(config)) is None:
        return ""
    whose = unit, configs.the_view(config), config.adjacency
    sizes = np.asarray(plan.fed.size)
    num_units = sizes.sum() if unit == "example" else sizes.size

    def epsilon_at(delta):
        return guarantee_rows.epsilons(plan, [config.rounds], delta, *whose, most=0)[0]

    try:
        return guarantee_rows.noise_warning(epsilon_at, config.delta, unit, num_units)
    except ArgumentError:  # nothing is proved
        return ""


def privacy(plan: Plan, config: Config, rounds: int) -> list[dict]:
    """Return the rows of all guarantees and, in the mode "as_printed", of the paper's claims."""
    return guarantee_rows.all_rows(plan, rounds, config.delta, paper_claims(plan, config, rounds))


def paper_claims(plan: Plan, config: Config, rounds: int) -> tuple:
    """Return the claims of a config's paper; none in the mode "sound"."""
    if config.mode == "sound":
        return ()
    return build.formulas().claims(plan, rounds, config.delta, config.paper)


def shown_guarantee(guarantees: list[dict], config: Config) -> dict | None:
    """Return the guarantee that tables and pictures show; None without one.

    It is the one with the smallest epsilon for the unit and view of the config.
    """
    unit, view = configs.the_unit(config), configs.the_view(config)
    fit = [
        g
        for g in guarantees
        if g["status"] != "claimed"
        and g["unit"] == unit
        and g["view"] == view
        and g["epsilon"] is not None
        and config.adjacency in (None, g["adjacency"])
    ]
    return min(fit, key=lambda g: g["epsilon"], default=None)
