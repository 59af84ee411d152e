"""A run in a directory: computed in segments, saved, resumed, reported."""

import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path

import jax
import numpy as np

from ..core import checks, identity
from ..core.errors import HealthError
from ..data.federation import checksum
from ..engine import devices as meshes
from ..engine.round import init
from ..engine.simulate import scan, schedule, simulate
from ..papers import as_printed
from ..privacy.entry_guarantees import Overflow
from ..privacy.mechanisms import chain as mech
from . import build, unused_options
from . import config as configs
from . import record as report
from .checkpoint import Store, code, environment, temporary, write
from .config import Config
from .journal import Branch, Journal, rejoin

try:
    import fcntl
except ImportError:  # not on Windows: there two processes in one directory go unnoticed
    fcntl = None

LOCK = ".lock"


def claim(out, resume: bool) -> Path:
    """The run directory, checked but not made: a run that is refused leaves nothing behind."""
    if not str(out):
        checks.fail(
            "--out",
            "the name of a directory",
            "an empty one",
            "For the current directory give a dot.",
        )
    out = Path(out)
    if out.exists() and not out.is_dir():
        checks.fail("--out", "a directory", f"{out} is a file")
    if _files(out) and not resume:
        checks.fail(
            "--out",
            "an empty or new directory",
            f"{out} with files in it",
            "Use --resume to go on with that run, or another --out: nothing is overwritten.",
        )
    there = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        checks.fail("--out", "a place that can be written", f"{there}, which cannot")
    return out


def _files(out: Path) -> bool:
    return out.is_dir() and any(p.name != LOCK and not temporary(p) for p in out.iterdir())


@contextlib.contextmanager
def alone(out: Path):
    """Hold a run directory: two processes in one would release twice what is accounted once."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / LOCK, "a")
    except OSError as error:
        checks.fail("--out", "a place that can be written", f"{error.filename}: {error.strerror}")
    with file:
        try:
            if fcntl is not None:  # the kernel lets go of the lock, also after a kill
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            checks.fail(
                "--out",
                "a directory that no other process runs in",
                f"{out}",
                "Wait for it, or use another.",
            )
        except OSError as error:
            checks.fail(
                "--out",
                "a file system with locks",
                f"{out}: {error.strerror}",
                "Two processes in one directory would go unnoticed: use a local directory.",
            )
        yield


@contextlib.contextmanager
def told(out: Path, store: Store):
    """A disk that is full or cannot be written, in words: what is lost, what is kept, how to go
    on."""
    try:
        yield
    except ConnectionError:  # of the terminal, or of another process
        raise
    except OSError as error:
        last = store.latest()
        kept = f"round {last} in {out}" if last else "none"
        raise OSError(
            f"run {out}: need a disk that can be written; got {error.strerror or error}, for "
            f"{error.filename or 'a file'}. Last good checkpoint: {kept}. Make room, then --resume "
            f"goes on."
        ) from None


def epsilons(plan, config, rounds, last=None, most=report.TIGHT):
    """Epsilon after each number of rounds for the chosen unit and view, as `report.epsilons`; None
    where nothing is proved.

    Args:
        last: what `shown_epsilon` gives for the last of them, where it is known.
        most: 0 only refuses what would be refused at the end, by quick bounds.
    """
    if (unit := configs.the_unit(config)) is None:
        return None
    try:
        found = report.epsilons(
            plan,
            np.asarray(rounds),
            config.delta,
            unit,
            configs.the_view(config),
            config.adjacency,
            last=last,
            most=most,
        )
    except Overflow:  # so little noise that no delta is left for a full batch
        found = np.full(np.shape(rounds), np.inf)
        if config.mode == "sound":
            raise
    if not np.isfinite(found).all() and config.mode == "sound":
        checks.fail(
            "config",
            "noise that proves something",
            f"epsilon={found.max()} at delta={config.delta:g}",
            "Raise the noise.",
        )
    return found


def noise_warning(plan, config) -> str:
    """A sentence for a run that trains on noise; "" for others."""
    if (unit := configs.the_unit(config)) is None:
        return ""
    try:
        epsilon = report.epsilons(
            plan,
            [config.rounds],
            config.delta,
            unit,
            configs.the_view(config),
            config.adjacency,
            most=0,
        )[0]
    except ValueError:  # nothing is proved: the noise is large or small all the same
        epsilon = None
    return report.noise_warning(plan, config.rounds, unit, epsilon, config.delta)


def privacy(plan, config, rounds) -> list[dict]:
    """What is proved and, in the mode "as_printed", what the paper claims."""
    return report.privacy(plan, rounds, config.delta, claims(plan, config, rounds))


def claims(plan, config, rounds) -> tuple:
    return (
        ()
        if config.mode == "sound"
        else as_printed.claims(plan, rounds, config.delta, config.paper)
    )


def train(
    config: Config,
    out,
    resume: bool = False,
    watch=lambda **seen: None,
    mesh=None,
    warn=lambda text: None,
) -> dict | None:
    """Train one plan in directory `out` -> its entry of summary.json; None in other processes than
    the first.

    Rounds run in segments that end at evaluations; a checkpoint is complete before the next segment
    begins. `watch(round, accuracy, loss, epsilon)` is called after each evaluation, and
    `warn(text)` before the first round where the noise is so large that nothing can be learned.
    `mesh` as of simulate; of several processes (jfl.engine.devices.connect) the first one reads and
    writes, the others compute.

    Raises:
        ValueError: before anything is written; HealthError, or OSError of a disk or of a process
            that is gone, with the last good checkpoint kept.
    """
    with meshes.in_step("jfl train") as ready:
        mesh = meshes.devices(mesh)
        layout = meshes.layout(mesh, str(environment()))
        return (
            _lead(config, out, resume, watch, mesh, layout, ready, warn)
            if meshes.lead()
            else _follow(config, mesh, ready)
        )


def _lead(config, out, resume, watch, mesh, layout, ready, warn):
    out = claim(out, resume)
    asked = config
    record = (
        _recorded(Journal(out), out) if resume and _files(out) else None
    )  # a directory of something else gets no lock
    if record is not None:  # before data are read and anything is computed
        _same_config(record["config"], asked, out)
        _long_enough(Store(out).latest() or 0, config)
    unused_options.refuse_idle(config)
    plan, config = build.build(config)
    facts = _facts(plan, config)
    if record is not None:
        _same(record, facts, out)
    every, planned = _planned(config)
    save_every = every if config.checkpoint_every is None else config.checkpoint_every
    checks.whole("config", checkpoint_every=save_every)
    if save_every % every:
        checks.fail(
            "config",
            f"checkpoint_every to be a multiple of evaluate_every={every}",
            f"checkpoint_every={save_every}",
            "A checkpoint is written behind an evaluation.",
        )
    (
        epsilons(plan, config, [config.rounds], most=0),
        claims(plan, config, config.rounds),
    )  # refuse now what they would at the end
    jax.eval_shape(
        lambda key: scan(init(key, plan), plan, [1]), jax.random.key(0)
    )  # and shapes that do not fit
    if text := noise_warning(plan, config):
        warn(text)
    with alone(out):  # also for reading: what another process writes would not fit together
        claim(out, resume)  # again, now that nobody else can write
        key = jax.random.key_data(jax.random.key(config.seed)).tolist()
        store, journal = Store(out), Journal(out, layout=layout, key=str(key))
        run, branch, history, spent, beyond = _state(
            plan, config, out, resume, facts, store, journal
        )
        ready(f"{facts} {code()}")
        with told(out, store):
            for left in (
                p
                for folder in (out, store.folder)
                if folder.is_dir()
                for p in folder.iterdir()
                if temporary(p)
            ):
                left.unlink()
            if (
                journal.read() is None
            ):  # before any other file: one with files and no journal is refused
                journal.announce(0, branch, **facts)
            return _train(
                asked,
                plan,
                config,
                out,
                meshes.agree(run),
                branch,
                history,
                spent,
                beyond,
                facts,
                store,
                journal,
                planned,
                save_every,
                watch,
                mesh,
            )


def _follow(config, mesh, ready):
    """The part of a process that is not the first: it computes the same rounds, and touches no
    file."""
    plan, config = build.build(config)
    key, (_, planned) = jax.random.key(config.seed), _planned(config)
    ready(f"{_facts(plan, config)} {code()}")
    with meshes.together():
        run = meshes.agree(init(key, plan))
    plan = meshes.spread(plan, mesh)
    while (done := int(run.round)) < config.rounds:
        n = int(planned[np.searchsorted(planned, done, side="right")]) - done
        run = simulate(
            key, plan, n, evaluate_every=n, start=run, tolerate=config.tolerate(), mesh=mesh
        ).run


def _facts(plan, config) -> dict:
    """What is run: stored beside it, and compared before it goes on."""
    return dict(
        config=json.loads(json.dumps(report.plain(dataclasses.asdict(config)))),
        data=checksum(plan.fed),
        plan=json.loads(json.dumps(identity.describe(plan))),
    )


def _planned(config):
    """Rounds between evaluations, and after which rounds they are."""
    every = (
        int(schedule(config.rounds, None)[0])
        if config.evaluate_every is None
        else config.evaluate_every
    )
    schedule(config.rounds, every)  # refuses what is no cadence
    return every, np.unique(np.append(np.arange(every, config.rounds, every), config.rounds))


def _recorded(journal, out) -> dict:
    found = journal.read()
    if found is None:
        checks.fail(
            "--resume",
            f"a run with its journal in {out}",
            "a directory without one",
            "Which rounds were seen is not known: start in another directory with another --seed.",
        )
    return found


def _state(plan, config, out, resume, facts, store, journal):
    """-> the run to go on with, its branch, history, seconds, and rounds released beyond the
    end."""
    run = init(jax.random.key(config.seed), plan)
    if not resume or not _files(out):
        return run, Branch(), {}, 0.0, 0
    record = _recorded(journal, out)
    _same(record, facts, out)
    if store.latest() is None:
        history, spent, (run, branch) = {}, 0.0, rejoin(run, record, **journal.made)
    else:
        saved = store.load()
        _same(saved.meta, facts, out)
        run, history, spent = (
            store.restore(run, saved),
            saved.meta["history"],
            saved.meta["seconds"],
        )
        _long_enough(int(run.round), config)
        run, branch = rejoin(
            run, record, Branch(*saved.meta["branch"]), saved.digest, **journal.made
        )
    sites = (plan.upload, plan.release, *(r.mechanism for r in plan.algorithm.releases))
    if branch.recomputed and any(mech.calms(m, config.rounds) for m in sites):
        checks.fail(
            "--resume",
            "the program and machine that began, where the noise grows from round to round",
            f"another one, which releases {branch.recomputed} rounds again",
            "Rounds that are released twice are charged "
            "as later ones, which have more noise: start in another directory with another --seed.",
        )
    # rounds of this very program beyond where it is to stop now: charged, but not kept as released
    # twice, since a longer run would release the same again
    same = branch.attempt == record["attempt"]
    return run, branch, history, spent, max(0, record["until"] - config.rounds) if same else 0


def _train(
    asked,
    plan,
    config,
    out,
    run,
    branch,
    history,
    spent,
    beyond,
    facts,
    store,
    journal,
    planned,
    save_every,
    watch,
    mesh,
):
    recomputed = branch.recomputed
    charged = recomputed + beyond
    write(
        out / "config.toml",
        configs.dump(dataclasses.asdict(asked), "jfl train --config config.toml --out DIR"),
    )
    key, done = jax.random.key(config.seed), int(run.round)
    guarantees = privacy(plan, config, config.rounds + charged)
    evaluated = [*history.get("round", ()), *(r for r in planned.tolist() if r > done)]
    eps = epsilons(
        plan, config, np.asarray(evaluated) + charged, last=shown_epsilon(guarantees, config)
    )
    eps = {} if eps is None else dict(zip(evaluated, eps.tolist()))
    saved = done
    begun, compiling = time.perf_counter(), report.compile_seconds()
    placed = meshes.spread(plan, mesh)  # once for all segments
    while done < config.rounds:
        n = int(planned[np.searchsorted(planned, done, side="right")]) - done
        journal.announce(done + n, branch, **facts)
        report.void(out)  # of a shorter run: its epsilon does not hold from here on
        (out / "accuracy.png").unlink(missing_ok=True)
        try:
            result = simulate(
                key, placed, n, evaluate_every=n, start=run, tolerate=config.tolerate(), mesh=mesh
            )
        except HealthError as error:
            raise HealthError(
                f"{error} Last good checkpoint: "
                + (f"round {saved} in {out}" if saved else "none")
                + ".",
                error.run,
                error.health,
            ) from None
        run, seen = result.run, report.lists(result.metrics)
        done = int(run.round)
        for k, values in seen.items():
            history.setdefault(k, []).extend(values)
        if done - saved >= save_every or done == config.rounds:
            store.save(
                run,
                dict(
                    facts,
                    branch=branch,
                    history=history,
                    seconds=spent + time.perf_counter() - begun,
                ),
            )
            saved = done
        watch(
            round=done,
            accuracy=(seen.get("accuracy") or [None])[-1],
            loss=seen["loss"][-1],
            epsilon=eps.get(done),
        )

    total, compiling = spent + time.perf_counter() - begun, report.compile_seconds() - compiling
    values = dataclasses.asdict(config) | dict(recomputed=recomputed, beyond=beyond)
    seconds = dict(
        compile=compiling, total=total, per_round=max(0.0, total - compiling) / config.rounds
    )
    entry = report.entry(config.algorithm, values, config.seed, history, guarantees, seconds)
    report.save(
        out,
        [entry],
        report.rows(config.algorithm, config.seed, history, [eps.get(r) for r in history["round"]]),
        report.manifest(
            [plan],
            build.the_partition(config),
            config.rounds,
            seeds=[config.seed],
            recomputed=recomputed,
            attempt=int(run.attempt),
        ),
    )
    if history.get("accuracy"):
        report.picture(
            out / "accuracy.png",
            [
                dict(
                    label=f"{config.algorithm}, " + shown_label(guarantees, config),
                    round=history["round"],
                    accuracy=[history["accuracy"]],
                    epsilon=shown_epsilon(guarantees, config),
                )
            ],
            f"{config.algorithm} on {config.dataset}",
        )
    return entry


def _same_config(old: dict, asked: Config, out):
    """As `_same`, of what was asked for: what follows from an epsilon is found, and compared,
    later."""
    new = json.loads(json.dumps(report.plain(dataclasses.asdict(asked))))
    later = ("noise_multiplier", "epsilon") if asked.epsilon is not None else ()
    _refuse_changes(
        old,
        new,
        [k for k in new if k not in (*configs.RUN_ONLY, *later) and old.get(k) != new[k]],
        out,
    )


def _long_enough(done: int, config):
    if done > config.rounds:
        checks.fail("--rounds", f">= {done}, the rounds done", config.rounds)


def _refuse_changes(old: dict, new: dict, differ: list, out):
    """Refuse the fields that differ, with both values."""
    if differ:
        do = f"jfl train --config {out}/config.toml --resume --out {out} has the same values."
        if differ == ["noise_multiplier"]:
            do += (
                " A noise multiplier that was calibrated holds for the rounds it was calibrated "
                "for: to run more, give "
                f"--noise-multiplier {old.get('noise_multiplier')!r} instead of --epsilon."
            )
        checks.fail(
            f"checkpoint {out}",
            "the config that made it",
            "; ".join(f"{k}: {old.get(k)!r} there, {new[k]!r} here" for k in differ),
            do,
        )


def _same(stored: dict, facts: dict, out):
    """A run goes on if all but its length and cadence is the same."""
    old, new = stored["config"], facts["config"]
    _refuse_changes(
        old, new, [k for k in new if k not in configs.RUN_ONLY and old.get(k) != new[k]], out
    )
    # noise of each client or round is found anew from epsilon and rounds, and what ran was the old
    # one
    follows = new["clip_decay"] != 1 or new["noise_decay"] != 1 or new["epsilon"] is not None
    if follows and old["rounds"] != new["rounds"]:
        checks.fail(
            "--rounds",
            f"{old['rounds']}, for which the noise was made",
            new["rounds"],
            "Noise and clip norms that follow the number of rounds cannot go on beyond it.",
        )
    if stored["data"] != facts["data"]:
        checks.fail(
            f"checkpoint {out}",
            f"the data it was made from, {stored['data']}",
            facts["data"],
            "Resume with the same data, or start in another directory.",
        )
    if lines := identity.differences(stored["plan"], facts["plan"]):
        checks.fail(
            f"checkpoint {out}",
            "the plan that made it",
            "; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" * (len(lines) > 5)),
            "Another plan has other noise: start in another directory.",
        )


def _mine(guarantees, config):
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


def shown_epsilon(guarantees, config):
    found = _mine(guarantees, config)
    return found and found["epsilon"]


def shown_label(guarantees, config):
    found = _mine(guarantees, config)
    return report.label([found] if found else [])
