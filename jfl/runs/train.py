"""A run in a directory: computed in segments, saved, resumed and reported."""

import dataclasses
import json
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
from ..engine import sharding
from ..engine.round import init
from ..engine.simulate import rounds_before_evaluations, scan, simulate
from ..privacy.guarantees import Overflow
from . import build, guarantee_rows, logs, pictures, unused_options
from . import config as configs
from . import record as report
from .checkpoint import Checkpoints, code, environment, refuse_resume
from .config import Config
from .directory import checked, disk_errors_explained, has_files, locked
from .journal import Journal
from .printed import formulas
from .record import RunRecord
from .stopwatch import Stopwatch


def epsilons(plan, config, rounds, last=None, most=guarantee_rows.TIGHT):
    """Return epsilon after each number of rounds for the chosen unit and view.

    Args:
        plan: the plan that runs.
        config: its config, with the unit, view and adjacency of the epsilon.
        rounds: Int[m], ascending.
        last: `shown_epsilon` after the last of them, if it is known.
        most: as in `guarantee_rows.epsilons`; 0 only checks the plan, by quick bounds.

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
    try:
        epsilon = guarantee_rows.epsilons(
            plan,
            [config.rounds],
            config.delta,
            unit,
            configs.the_view(config),
            config.adjacency,
            most=0,
        )[0]
    except ArgumentError:  # nothing is proved, but the noise may still be too large
        epsilon = None
    return guarantee_rows.noise_warning(plan, config.rounds, unit, epsilon, config.delta)


def privacy(plan: Plan, config: Config, rounds: int) -> list[dict]:
    """Return the rows of all guarantees and, in the mode "as_printed", of the paper's claims."""
    return guarantee_rows.all_rows(plan, rounds, config.delta, paper_claims(plan, config, rounds))


def paper_claims(plan: Plan, config: Config, rounds: int) -> tuple:
    """Return the claims of a config's paper; none in the mode "sound"."""
    if config.mode == "sound":
        return ()
    return formulas().claims(plan, rounds, config.delta, config.paper)


class Position(NamedTuple):
    """The point at which a run begins or resumes.

    Attributes:
        run: the state.
        since: the rounds after this one are computed by this program.
        history: metrics of the finished rounds, as lists over evaluations.
        seconds: duration of the finished rounds.
    """

    run: Run
    since: int
    history: dict
    seconds: float


class Session(NamedTuple):
    """One call of `train` in the process that writes.

    Attributes:
        asked: the config as it was given.
        config: the config with the calibrated noise multiplier.
        plan: the plan that runs.
        facts: the values that a resumed run must have in common with this one.
        evaluations: Int[E], the rounds after which the model is evaluated.
        save_every: rounds between checkpoints.
        out: the run directory.
        checkpoints: the checkpoints in the run directory.
        journal: the journal in the run directory.
        mesh: the devices that share a cohort, None for one.
        watch: called after each evaluation.
        log: names of the loggers, from `logs.parse_names`.
    """

    asked: Config
    config: Config
    plan: Plan
    facts: dict
    evaluations: np.ndarray
    save_every: int
    out: Path
    checkpoints: Checkpoints
    journal: Journal
    mesh: Any
    watch: Callable
    log: tuple[str, ...] = ()


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
        watch: called with round, accuracy, loss and epsilon after each evaluation.
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
            return _lead(config, out, resume, watch, mesh, layout, ready, warn, log)
        return _follow(config, mesh, ready)


def _lead(asked, out, resume, watch, mesh, layout, ready, warn, log):
    """Train in the process that reads and writes files."""
    out, loggers = checked(out, resume), logs.parse_names(log)
    journaled = None
    if resume and has_files(out):  # a directory of something else is not locked
        journaled = _journaled(Journal(out), out)
        # Compare before data are read and anything is computed.
        _same_config(journaled["config"], asked, out)
        _require_rounds(asked, journaled["until"])
    unused_options.refuse_unused(asked)
    plan, config = build.build(asked)
    facts = _facts(plan, config)
    if journaled is not None:
        _same(journaled, facts, out)
    save_every, evaluations = _cadence(config)
    # Report now what would otherwise be reported at the end, and mismatched shapes.
    epsilons(plan, config, [config.rounds], most=0)
    paper_claims(plan, config, config.rounds)
    jax.eval_shape(lambda key: scan(init(key, plan), plan, [1]), jax.random.key(0))
    if text := noise_warning(plan, config):
        warn(text)
    with locked(out):  # also for reading, so that the files belong together
        checked(out, resume)  # again, now that no other process can write
        key = jax.random.key_data(jax.random.key(config.seed)).tolist()
        session = Session(
            asked=asked,
            config=config,
            plan=plan,
            facts=facts,
            evaluations=evaluations,
            save_every=save_every,
            out=out,
            checkpoints=Checkpoints(out),
            journal=Journal(out, layout=layout, key=str(key)),
            mesh=mesh,
            watch=watch,
            log=loggers,
        )
        position = _position(session, resume)
        ready(f"{facts} {code()}")
        with disk_errors_explained(out, session.checkpoints):
            _remove_temporaries(session)
            if session.journal.read() is None:
                # The journal is the first file: a directory with other files only is rejected.
                session.journal.announce(0, position.since, **facts)
            return _train(session, position._replace(run=meshes.broadcast_from_lead(position.run)))


def _remove_temporaries(session: Session):
    """Remove files that a killed process left incomplete."""
    for folder in (session.out, session.checkpoints.folder):
        if folder.is_dir():
            for path in [p for p in folder.iterdir() if temporary(p)]:
                path.unlink()


def _follow(config, mesh, ready):
    """Compute the same rounds in a process that is not the first, without using files."""
    plan, config = build.build(config)
    key, evaluations = jax.random.key(config.seed), _evaluations(config)[1]
    ready(f"{_facts(plan, config)} {code()}")
    with meshes.explain_lost_process():
        run = meshes.broadcast_from_lead(init(key, plan))
    plan = sharding.place(plan, mesh)
    while (done := int(run.round)) < config.rounds:
        n = _segment(evaluations, done)
        run = simulate(
            key, plan, n, evaluate_every=n, start=run, tolerate=config.tolerate(), mesh=mesh
        ).run


def _facts(plan, config) -> dict:
    """Return the values that are stored with a run and compared before it is resumed."""
    return dict(
        config=report.as_json(dataclasses.asdict(config)),
        data=checksum(plan.fed),
        plan=json.loads(json.dumps(identity.describe(plan))),
    )


def _evaluations(config) -> tuple[int, np.ndarray]:
    """Return the number of rounds between evaluations, and the rounds after which they happen."""
    every = (
        int(rounds_before_evaluations(config.rounds, None)[0])
        if config.evaluate_every is None
        else config.evaluate_every
    )
    rounds_before_evaluations(config.rounds, every)  # rejects an invalid interval
    return every, np.unique(np.append(np.arange(every, config.rounds, every), config.rounds))


def _cadence(config) -> tuple[int, np.ndarray]:
    """Return the number of rounds between checkpoints, and the rounds with an evaluation."""
    every, evaluations = _evaluations(config)
    save_every = every if config.checkpoint_every is None else config.checkpoint_every
    checks.require_integer("config", checkpoint_every=save_every)
    if save_every % every:
        checks.fail(
            "config",
            f"checkpoint_every to be a multiple of evaluate_every={every}",
            f"checkpoint_every={save_every}",
            "A checkpoint is written after an evaluation.",
        )
    return save_every, evaluations


def _segment(evaluations, done: int) -> int:
    """Return the number of rounds from `done` to the next evaluation."""
    return int(evaluations[np.searchsorted(evaluations, done, side="right")]) - done


def _journaled(journal, out) -> dict:
    record = journal.read()
    if record is None:
        refuse_resume(
            "--resume",
            f"a run with its journal in {out}",
            "a directory without one",
            "It is unknown which rounds were seen: start in a new directory with a new --seed.",
        )
    return record


def _position(session: Session, resume: bool) -> Position:
    """Return where the run begins or resumes."""
    plan, config, out, journal = session.plan, session.config, session.out, session.journal
    # Each of several processes initialises the run alone; they share it later.
    mesh = session.mesh if jax.process_count() == 1 else None
    run = init(jax.random.key(config.seed), dataclasses.replace(plan, mesh=mesh))
    if not resume or not has_files(out):
        return Position(run, since=0, history={}, seconds=0.0)
    journaled = _journaled(journal, out)
    _same(journaled, session.facts, out)
    _require_rounds(config, journaled["until"])
    if session.checkpoints.latest() is None:
        return Position(run, journal.resume(0), history={}, seconds=0.0)
    saved = session.checkpoints.load()
    _same(saved.meta, session.facts, out)
    run = session.checkpoints.restore(run, saved)
    since = journal.resume(int(run.round))
    return Position(run, since, saved.meta["history"], saved.meta["seconds"])


def _train(session: Session, position: Position) -> dict:
    """Run the rounds that are left, and write the results."""
    config, plan, out = session.config, session.plan, session.out
    done = int(position.run.round)
    write(
        out / "config.toml",
        configs.dump(dataclasses.asdict(session.asked), "jfl train --config config.toml --out DIR"),
    )
    guarantees = privacy(plan, config, config.rounds)
    evaluated = [
        *position.history.get("round", ()),
        *(r for r in session.evaluations.tolist() if r > done),
    ]
    shown = shown_epsilon(guarantees, config)
    eps = epsilons(plan, config, evaluated, last=shown)
    eps = {} if eps is None else dict(zip(evaluated, eps.tolist()))
    stopwatch = Stopwatch()
    told = _with_epsilon(position.history, eps)
    with logs.opened(session.log, out, dataclasses.asdict(config), told) as write_log:
        run, history = _segments(session, position, eps, stopwatch, write_log)
    seconds, compiled = stopwatch.read()
    record = RunRecord(
        name=config.algorithm,
        config=dataclasses.asdict(config),
        seed=config.seed,
        history=history,
        seconds=position.seconds + seconds,
        compile_seconds=compiled,
        guarantees=guarantees,
    )
    entry = record.entry()
    report.save(
        out,
        [entry],
        record.rows([eps.get(r) for r in history["round"]]),
        report.manifest(
            [plan],
            build.the_partition(config),
            config.rounds,
            seconds=record.timing(),
            seeds=[config.seed],
        ),
    )
    if history.get("accuracy"):
        pictures.draw_accuracy(
            out / "accuracy.png",
            [
                dict(
                    label=f"{config.algorithm}, " + shown_label(guarantees, config),
                    round=history["round"],
                    accuracy=[history["accuracy"]],
                    epsilon=shown,
                )
            ],
            f"{config.algorithm} on {config.dataset}",
        )
    return entry


def _with_epsilon(seen: dict, eps: dict) -> dict:
    """Add the epsilon after each evaluation to metrics, which are lists over evaluations."""
    return seen | dict(epsilon=[eps.get(r) for r in seen["round"]]) if seen else seen


def _segments(
    session: Session, position: Position, eps: dict, stopwatch: Stopwatch, write_log: Callable
):
    """Run the segments; announce each in the journal before it is saved and reported.

    Returns:
        The run at its end, and the metrics of all rounds.
    """
    config, out, mesh = session.config, session.out, session.mesh
    run, history = position.run, position.history
    key, saved = jax.random.key(config.seed), int(run.round)
    placed = sharding.place(session.plan, mesh)
    while (done := int(run.round)) < config.rounds:
        n = _segment(session.evaluations, done)
        report.void(out)  # the epsilon of a shorter run no longer holds
        (out / "accuracy.png").unlink(missing_ok=True)
        try:
            result = simulate(
                key, placed, n, evaluate_every=n, start=run, tolerate=config.tolerate(), mesh=mesh
            )
        except HealthError as error:
            session.journal.announce(done + n, position.since, **session.facts)
            kept = f"round {saved} in {out}" if saved else "none"
            text = f"{error} Last good checkpoint: {kept}."
            raise HealthError(text, error.run, error.health) from None
        run, seen = result.run, report.lists(result.metrics)
        done = int(run.round)
        # before anything that these rounds released leaves this process
        session.journal.announce(done, position.since, **session.facts)
        for name, values in seen.items():
            history.setdefault(name, []).extend(values)
        if done - saved >= session.save_every or done == config.rounds:
            seconds = position.seconds + stopwatch.read()[0]
            facts = dict(session.facts, history=history, seconds=seconds)
            session.checkpoints.save(run, facts)
            saved = done
        write_log(_with_epsilon(seen, eps))
        session.watch(
            round=done,
            accuracy=(seen.get("accuracy") or [None])[-1],
            loss=seen["loss"][-1],
            epsilon=eps.get(done),
        )
    return run, history


def _same_config(old: dict, asked: Config, out):
    """Compare the config of a stored run with the given one.  Noise that is calibrated from an
    epsilon is compared later."""
    new = report.as_json(dataclasses.asdict(asked))
    later = ("noise_multiplier", "epsilon") if asked.epsilon is not None else ()
    _refuse_changes(old, new, later, out)


def _require_rounds(config, released: int):
    """Reject a number of rounds below those that may have been seen."""
    if released > config.rounds:
        checks.fail("--rounds", f">= {released}, the rounds already released", config.rounds)


def _refuse_changes(old: dict, new: dict, later: tuple, out):
    """Refuse to resume if fields differ, except those that are compared `later`.

    A field that is missing in the stored run had its default.
    """
    old = report.as_json(dataclasses.asdict(Config())) | old
    compared = [k for k in new if k not in (*configs.RUN_ONLY, *later)]
    if differ := [k for k in compared if old[k] != new[k]]:
        do = f"jfl train --config {out}/config.toml --resume --out {out} has the same values."
        if differ == ["noise_multiplier"]:
            do += (
                " A calibrated noise multiplier holds for the number of rounds of its calibration: "
                f"to run more, give --noise-multiplier {old['noise_multiplier']!r} instead of "
                "--epsilon."
            )
        refuse_resume(
            f"checkpoint {out}",
            "the config that made it",
            "; ".join(f"{k}: {old[k]!r} there, {new[k]!r} here" for k in differ),
            do,
        )


def _same(stored: dict, facts: dict, out):
    """Refuse to resume unless everything except the length of the run and the intervals of
    evaluations and checkpoints is the same."""
    old, new = stored["config"], facts["config"]
    _refuse_changes(old, new, (), out)
    # Noise that is calibrated or that changes by round depends on the number of rounds.
    follows = new["clip_decay"] != 1 or new["noise_decay"] != 1 or new["epsilon"] is not None
    if follows and old["rounds"] != new["rounds"]:
        refuse_resume(
            "--rounds",
            f"{old['rounds']}, for which the noise was computed",
            new["rounds"],
            "The noise and clip norms of this run depend on its number of rounds.",
        )
    if stored["data"] != facts["data"]:
        refuse_resume(
            f"checkpoint {out}",
            f"the data it was made from, {stored['data']}",
            facts["data"],
            "Resume with the same data, or start in a new directory.",
        )
    if lines := identity.differences(stored["plan"], facts["plan"]):
        refuse_resume(
            f"checkpoint {out}",
            "the plan that made it",
            "; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" * (len(lines) > 5)),
            "Another plan has other noise: start in a new directory.",
        )


def _shown(guarantees: list[dict], config: Config) -> dict | None:
    """Return the guarantee for tables and pictures: the smallest epsilon for the unit and view of
    the config."""
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


def shown_epsilon(guarantees: list[dict], config: Config) -> float | None:
    """Return the epsilon for tables and pictures; None without a guarantee."""
    guarantee = _shown(guarantees, config)
    return None if guarantee is None else guarantee["epsilon"]


def shown_label(guarantees: list[dict], config: Config) -> str:
    """Describe the guarantee in a legend."""
    guarantee = _shown(guarantees, config)
    return guarantee_rows.label([guarantee] if guarantee else [])
