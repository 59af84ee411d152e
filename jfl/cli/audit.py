"""The command `jfl audit`: attack the run of a config, and store the report in audit.json."""

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from ..auditing import trainings
from ..auditing.audit import WORST, AuditReport
from ..auditing.audit import audit as run_audit
from ..core import checks
from ..core.files import write
from ..core.options import field
from ..core.records import Guarantee
from ..data.federation import checksum
from ..report import read
from ..runs import build, checkpoint, directory, guarantee_rows, record
from ..runs import config as configs
from ..runs.config import Config
from . import console
from .exits import Failed
from .options import (
    config_of,
    has_config,
    parse_devices,
    parse_with_config,
    split_config_files,
)

OUT = Path("runs/audit")
TRIALS = "audit.trials.jsonl"  # the finished runs of an unfinished audit
# fields that describe the audit, and those that also describe the run if there is no config
OWN = ("delta", "rounds", "unit", "view", "adjacency", "seed")
SHARED = ("rounds", "unit", "view", "adjacency")
CADENCE = ("evaluate_every", "checkpoint_every")  # fields that do not distinguish runs
# an audit replaces an earlier one with the same values of all of these
SETTINGS = ("config", "rounds", "trials", "delta", "unit", "view", "adjacency", "confidence")
SETTINGS += ("claimed", "seed", "canary", "adversary")
ONE_RUN = AuditReport._fields[AuditReport._fields.index("canaries") :]  # of jfl.audit_one_run
LOWER_BOUND = "Describes an attack: a lower bound at its confidence, which proves no epsilon."


@dataclasses.dataclass(frozen=True)
class Audit(Config):
    """Attack a run with a canary, for a lower bound of its epsilon next to the proved and claimed
    ones.

    example: jfl audit --config run.toml --rounds 1

    example: jfl audit runs/first --trials 20000

    The first argument may be the directory of a run, which then also gets audit.json.  Otherwise
    --config FILE.toml or flags describe the run; flags take precedence.  The same command continues
    an interrupted audit, whose runs are in audit.trials.jsonl until it is done.

    Exit code 1: the audited epsilon is above the claimed one, or the proved one, which is a bug.
    """

    trials: int = field(
        100_000, "runs with the canary, and the same number without; more show a larger epsilon"
    )
    delta: float = field(
        1e-2,
        "delta of the audited epsilon, not that of the config; with 1e5 trials, 1e-2 shows more "
        "than 1e-5",
    )
    rounds: int | None = field(
        None,
        "rounds of each audited run; default the config's.  A few rounds are enough to detect a "
        "wrong noise level.  Without a config, also the rounds of the run",
    )
    unit: str | None = field(
        None, "example | client: whose data is attacked; default the config's unit"
    )
    view: str | None = field(
        None, "server | third_party: who attacks; default the config's view, or that of its noise"
    )
    adjacency: str | None = field(
        None, "replace_one | add_remove; default the config's, or the one that is proved"
    )
    canary: str = field(
        WORST,
        "worst case | mislabelled | blank | direction; the last three are part of a training on "
        "the run's rows, and show less",
        choices=lambda: (WORST, *trainings.CANARIES),
    )
    sees: str = field(
        "releases",
        "releases | models | final model: what the attack observes of such a training",
        choices=lambda: trainings.SEES,
    )
    confidence: float = field(0.95, "confidence of the audited epsilon, in (0, 1)")
    claimed: float | None = field(
        None, "an epsilon at --delta to refute; default the claim of the run's paper"
    )
    seed: int = field(0, "seed of the audited runs; data and partition follow the config's seed")
    out: Path | None = field(
        None, f"directory for audit.json; default the run's own, or {OUT.as_posix()}"
    )
    mesh: str = field("1", "the number of devices of this machine that share the runs, or auto")


def audit(arguments: list[str]) -> None:
    """Run `jfl audit`: audit the run, print the report, and add it to audit.json.

    Raises:
        ArgumentError: For wrong arguments; nothing is written.
        Failed: If the audited epsilon is above the proved or the claimed one; the report is written
            nevertheless.
    """
    command, asked, out = _parsed(arguments)
    mesh = parse_devices("--mesh", command.mesh)
    checks.require_seed("jfl audit", seed=command.seed)
    _check_place(out, asked)
    configs.refuse_unused(asked)
    plan, config = build.build(asked)
    ran = checkpoint.Journal(out).read()
    if ran is not None and ran["data"] != (here := checksum(plan.fed)):
        need = f"the data of the run in {out}, with checksum {ran['data']}"
        checks.fail("jfl audit", need, here, "Put them back, or give another --out.")
    rounds = asked.rounds if command.rounds is None else command.rounds
    begun, kept = time.perf_counter(), out / TRIALS
    if not sys.stderr.isatty():  # no progress bar
        print(
            f"jfl audit: {command.trials:,} runs with the canary, as many without", file=sys.stderr
        )
    with console.progress(shown=sys.stderr.isatty()) as bar:
        task = bar.add_task("jfl audit", total=None, note="compiling")
        report = run_audit(
            plan,
            rounds,
            command.trials,
            command.delta,
            **_whose(command, asked),
            canary=command.canary,
            sees=command.sees,
            confidence=command.confidence,
            claimed=_claimed(command, plan, asked, rounds),
            seed=command.seed,
            mesh=mesh,
            progress=lambda done, total: bar.update(task, completed=done, total=total, note="runs"),
            keep=kept,
        )
    print(report)
    manifest = record.manifest(
        [plan],
        build.the_partition(config),
        rounds,
        seconds=time.perf_counter() - begun,
        seeds=[command.seed],
    )
    keep(out, entry(report, rounds, command.seed, dataclasses.asdict(config), manifest))
    kept.unlink(missing_ok=True)
    print(f"Audit: {out / read.AUDITS}")
    if report.contradicted:
        said: Any = report.proved
        proved = said.epsilon
        raise Failed(
            f"expected an audited epsilon of at most {proved:.4g}, which is proved, but got "
            f"{report.epsilon:.4g}. This is a bug in the proof or in the code: please report it "
            f"with {out / read.AUDITS}."
        )
    if report.refuted:
        raise Failed(
            f"expected an audited epsilon of at most {report.claimed:.9g}, which is claimed, but "
            f"got {report.epsilon:.9g}."
        )


# --- what is asked for


def _parsed(arguments) -> tuple[Audit, Config, Path]:
    """Return the command, the config of the audited run, and the directory of audit.json."""
    program, folder = "jfl audit", None
    if arguments and not arguments[0].startswith("-"):
        folder, *arguments = arguments
        if not (Path(folder) / "config.toml").is_file():
            checks.fail(
                program,
                "the directory of a run, with its config.toml",
                checks.short_repr(folder),
                "Or give --config FILE.toml.",
            )
        arguments = ["--config", str(Path(folder) / "config.toml"), *arguments]
    command, _ = parse_with_config(Audit, arguments, program, own=OWN)
    files = split_config_files(arguments)[0]
    values = {name: files.get(name, configs.FIELDS[name].default) for name in OWN}
    if not has_config(arguments):
        given = {name: getattr(command, name) for name in SHARED}
        values |= {name: value for name, value in given.items() if value is not None}
    out = command.out or (OUT if folder is None else Path(folder))
    return command, dataclasses.replace(config_of(command), **values), out


def _whose(command: Audit, config: Config) -> dict:
    """Return the unit, view and adjacency of the command, or else of the config's guarantee."""
    unit = configs.the_unit(config)
    view = config.view if unit is None else configs.the_view(config)
    if command.unit not in (None, unit):  # the config's view and adjacency belong to its unit
        return dict(unit=command.unit, view=command.view, adjacency=command.adjacency)
    return dict(
        unit=unit, view=command.view or view, adjacency=command.adjacency or config.adjacency
    )


def _claimed(command: Audit, plan, config: Config, rounds: int) -> float | None:
    """Return the epsilon to refute: the given one, or in the mode "as_printed" the paper's."""
    if command.claimed is not None or config.mode != "as_printed":
        return command.claimed
    whose = _whose(command, config)
    fit = [
        claim.epsilon
        for claim in build.formulas().claims(plan, rounds, command.delta, config.paper)
        if claim.rounds in (None, rounds)
        and math.isfinite(claim.epsilon)
        and all(whose[k] in (None, getattr(claim, k)) for k in whose)
    ]
    return min(fit, default=None)


# --- audit.json


def _check_place(out: Path, config: Config) -> None:
    """Reject a directory that cannot take an audit of this run, before anything is computed."""
    directory.checked(out, resume=True)
    if (out / directory.LOCK).exists():
        with directory.locked(out):  # fails if another process uses it
            pass
    read.audits(out)  # a damaged file is reported, not replaced
    file, need = out / "config.toml", "a new directory, or that of the run that is audited"
    stored = configs.load(file) if file.exists() else None
    if stored is None:
        if (out / "summary.json").exists():
            checks.fail("--out", need, f"{out} without its config")
    elif "sweep" in stored:
        checks.fail("--out", need, f"{out}, a sweep")
    else:
        there, here = dataclasses.asdict(Config(**stored)), dataclasses.asdict(config)
        if differ := [k for k in here if k not in CADENCE and there[k] != here[k]]:
            checks.fail("--out", need, f"{out} of a run with other {', '.join(differ)}")


def entry(report: AuditReport, rounds: int, seed: int, config: dict, manifest: dict) -> dict:
    """Return the entry of an audit in audit.json: the result, and what is needed to reproduce it.

    Args:
        report: the report of the audit.
        rounds: the number of rounds of each audited run.
        seed: the seed of the audited runs.
        config: the resolved config of the run.
        manifest: the versions, data and plan from `record.manifest`.
    """
    bound = Guarantee(
        report.epsilon,
        report.delta,
        report.unit,
        report.adjacency,
        report.view,
        report.estimator,
        "audited",
        (LOWER_BOUND,),
        rounds=rounds,
    )
    proved = None if report.proved is None else guarantee_rows.as_row(report.proved)
    return record.as_json(
        {name: value for name, value in report._asdict().items() if name not in ONE_RUN}
        | guarantee_rows.as_row(bound)
        | dict(proved=proved, seed=seed, config=config, manifest=manifest)
    )


def keep(out: Path, found: dict) -> None:
    """Append an audit to audit.json; it replaces an earlier one with the same settings."""
    with directory.locked(out):
        others = [
            other for other in read.audits(out) if any(other.get(k) != found[k] for k in SETTINGS)
        ]
        text = dict(format=record.FORMAT, audits=[*others, found])
        write(out / read.AUDITS, json.dumps(text, indent=1, allow_nan=False))
