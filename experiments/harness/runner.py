"""Named experiments: lines of a figure or table as configs, run as few programs, with claims that
are checked.

    python -m experiments.papers.noble2022 --list
    python -m experiments.papers.noble2022 fig2b --quick --out runs/fig2b

Every line is a directory as `jfl sweep` leaves it, lines that share a program run as one
(`programs`), and nothing is run twice (`kept_runs`).  Claims are checked on the results, and come
out as confirmed, not confirmed, or cannot be checked, with the reason.  results.json says which
command made it.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jfl.cli import console
from jfl.core import checks as check
from jfl.core.errors import HealthError
from jfl.report import results as results_file
from jfl.runs import record
from jfl.runs.checkpoint import environment
from jfl.runs.config import Config

from . import kept_runs
from .programs import Plans

CONFIRMED, NOT, UNKNOWN = results_file.VERDICTS
CELLS = ".cells"  # out of sight of a shell's *: jfl report runs/noble2022/*


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement of the paper: `check(results) -> (verdict, what was seen)`, over {line: Line}."""

    text: str
    check: Callable


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One figure or table: `base` fields of jfl.runs.config.Config, and for each line what differs
    from them."""

    title: str
    base: dict
    lines: dict
    claims: tuple = ()
    quick: dict = dataclasses.field(default_factory=dict)  # fields for a run of seconds to a minute
    seeds: tuple = (0, 1, 2)
    paper: dict = dataclasses.field(
        default_factory=dict
    )  # line -> the figure that the paper prints
    runs: Plans | Callable = (
        Plans()
    )  # makes their plans; or runs one: (config, axes, directory) -> entries
    quick_lines: tuple | None = None  # a quick run does these; None: all
    columns: Callable | None = None  # config of a line -> {heading: more to show of it}
    special: Callable | None = (
        None  # (name, experiment, out, quick) -> dict: a run that is not of lines
    )


@dataclasses.dataclass(frozen=True)
class Line:
    """What came of one line, over its seeds."""

    accuracy: np.ndarray  # [seeds], at the end; of those that did not fail
    loss: np.ndarray  # [seeds]
    proved: float | None  # epsilon of the server, else of the third party
    claimed: float | None
    seconds: float  # a round, of one seed
    trace: dict = dataclasses.field(
        default_factory=dict
    )  # what its plans are shown by: [seeds, evaluations]
    seeds: tuple = ()  # of accuracy
    failed: tuple = ()  # the other ones


def standard_error(values) -> float:
    """Of the mean of values of seeds; 0 of one seed, whose verdicts are of what it shows alone."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0


def ordered(*names, margin=0.0):
    """A check that accuracy falls along these lines, by more than the standard error of the
    difference each time."""

    def check(results):
        if not all(n in results for n in names):
            return UNKNOWN, "lines that were not run"
        means = [results[n].accuracy.mean() for n in names]
        errors = [standard_error(results[n].accuracy) for n in names]
        holds = all(
            a - b > margin + np.hypot(s, t)
            for a, b, s, t in zip(means, means[1:], errors, errors[1:])
        )
        return (CONFIRMED if holds else NOT), ", ".join(f"{m:.3f}" for m in means)

    return check


def close(one, other, within=0.02):
    """A check that two lines end at most `within` apart."""

    def check(results):
        if one not in results or other not in results:
            return UNKNOWN, "lines that were not run"
        gap = abs(results[one].accuracy.mean() - results[other].accuracy.mean())
        return (CONFIRMED if gap <= within else NOT), f"{gap:.3f} apart"

    return check


def run(  # noqa: C901
    name: str,
    experiment: Experiment,
    out,
    quick: bool = False,
    only=None,
    module: str | None = None,
    kept=None,
) -> dict:
    """Run what is not in `kept` yet -> a plain dict of results and verdicts, also in
    out/results.json.

    `kept`: a directory of runs that experiments share (see `kept_runs`); default one in `out`.
    `module`: of experiments, which has it under this name; it is kept, so that a reader can run it
    again.
    """
    command = (
        dict(experiment=name, quick=quick)
        | (dict(module=module) if module else {})
        | (dict(only=list(only)) if only else {})
    )
    if experiment.special:
        return keep(out, experiment.special(name, experiment, Path(out), quick), command)
    out, results, more, unread, failed, seconds = Path(out), {}, {}, {}, {}, 0.0
    kept = out / CELLS if kept is None else Path(kept)
    only = only or (experiment.quick_lines if quick else None)
    unknown = sorted(set(only or ()) - set(experiment.lines))
    if unknown:
        raise ValueError(
            f"{name}: need lines of {', '.join(experiment.lines)}; got {', '.join(unknown)}."
        )
    seeds = experiment.seeds[: 1 if quick else None]
    configs, folders, found = {}, {}, {}
    for line, changes in experiment.lines.items():
        if only and line not in only:
            continue
        config = Config(**{**experiment.base, **changes, **(experiment.quick if quick else {})})
        try:
            kept_runs.key(config, experiment.runs)
        except ValueError as error:
            if not str(error).startswith("datasets.") or config.dataset in ("digits", "synthetic"):
                raise
            told = config.dataset in unread
            print(f"{name} {line}: not run{'' if told else f'.  {error}'}", file=sys.stderr)
            unread[config.dataset] = str(error).partition("; got")[
                0
            ]  # data that are not on this machine; no paths
            continue
        configs[line], folders[line] = config, out / line.replace(" ", "_").replace("/", "_")
    if not configs and any(out.glob(f"*/{kept_runs.MARK}")):
        check.fail(
            name,
            "data of at least one line",
            f"{', '.join(unread)} that cannot be read here",
            f"The lines of an earlier run in {out} stand as they were.",
        )
    for line, entries in kept_runs.lines(folders, kept, configs, seeds, experiment.runs):
        (out / "results.json").unlink(
            missing_ok=True
        )  # of an earlier run, whose lines are no longer all there
        record.void(out)  # nor what a page says of them
        if isinstance(entries, HealthError) or all(e.get("failed") for e in entries):
            failed[line] = (
                str(entries) if isinstance(entries, HealthError) else "all of its runs failed"
            )
            print(f"{name} {line}: {failed[line]}", file=sys.stderr)
            entries = [] if isinstance(entries, HealthError) else entries
        else:
            found[line] = _line(entries)
            print(
                f"{name} {line}: accuracy {found[line].accuracy.mean():.4f}{_missing(found[line])}",
                file=sys.stderr,
            )
        seconds += sum(e["seconds"]["total"] for e in entries)
    for line in [
        n for n in configs if n in found
    ]:  # in the order of the figure, not of the programs
        results[line] = found[line]
        more[line] = experiment.columns(configs[line]) if experiment.columns else {}
        # a "curve" is of accuracies, and ends at one that is there already
        more[line] |= {
            k: float(v[:, -1].mean()) for k, v in results[line].trace.items() if k != "curve"
        }
    # the seeds that did not fail are no sample of all
    whole, partly = (
        {n: r for n, r in results.items() if not r.failed},
        [n for n, r in results.items() if r.failed],
    )
    verdicts = [(c.text, *c.check(whole)) for c in experiment.claims]
    if partly:
        verdicts = [
            (t, v, s + f"; seeds failed of {', '.join(partly)}" * (v == UNKNOWN))
            for t, v, s in verdicts
        ]
    if unread and not only:
        verdicts = [
            (t, v, s + f"; not to be read here: {', '.join(unread)}" * (v == UNKNOWN))
            for t, v, s in verdicts
        ]
    rows = [
        (
            n,
            f"{record.plus_minus(*record.interval(r.accuracy))}{_missing(r)}",
            str(experiment.paper.get(n, "")),
            _shown(r.claimed),
            _shown(r.proved),
            f"{r.seconds:.3g}",
            *map(_shown, more[n].values()),
        )
        for n, r in results.items()
    ]
    headings = dict.fromkeys(h for line in more.values() for h in line)
    console.table(
        experiment.title + (" (quick)" if quick else ""),
        [
            ("line", False),
            ("accuracy", True),
            ("paper", True),
            ("ε claimed", True),
            ("ε proved", True),
            ("s/round", True),
            *((h, True) for h in headings),
        ],
        rows,
        f"{record.PLUS_MINUS}  In the paper's figures it is what the paper means by it.  "
        f"Accuracies lie outside every "
        "guarantee.",
    )
    if verdicts:
        console.table(
            "claims", [("claim", False), ("verdict", False), ("seen", False)], verdicts, ""
        )
    found = dict(
        title=experiment.title,
        seeds=list(seeds),
        seconds=seconds,
        lines={
            n: dict(
                seeds=r.seeds,
                failed=r.failed,
                accuracy=r.accuracy.tolist(),
                loss=r.loss.tolist(),
                epsilon_claimed=r.claimed,
                epsilon_proved=r.proved,
                seconds_per_round=r.seconds,
                paper=experiment.paper.get(n),
                columns=more[n],
            )
            for n, r in results.items()
        },
        verdicts=[dict(claim=t, verdict=v, seen=s) for t, v, s in verdicts],
        versions=environment(),
        **{k: v for k, v in dict(unread=unread, failed=failed).items() if v},
    )
    return keep(out, found, command)


def keep(out, found: dict, command: dict) -> dict:
    """Write out/results.json: what was found, and the command that found it -> both, as plain
    values."""
    found = record.plain(command | {k: v for k, v in found.items() if k not in command})
    results_file.write(Path(out) / "results.json", results_file.of(found))
    return found


def _line(entries):
    good = [e for e in entries if not e.get("failed")]
    # seeds with splits of their own have an epsilon each: that of the line is the largest, and none
    # if one has none
    proved, claimed = zip(*map(_worth, entries))
    proved = None if None in proved else max(proved)
    claimed = max((c for c in claimed if c is not None), default=None)
    values = lambda key: np.array([e[key] for e in good], float)
    accuracy = np.array([e["accuracy"]["final"] for e in good], float)
    return Line(
        accuracy,
        values("loss"),
        proved,
        claimed,
        float(np.mean([e["seconds"]["per_round"] for e in entries])),
        {k: np.array([e["trace"][k] for e in good], float) for k in good[0].get("trace", ())},
        tuple(e["seed"] for e in good),
        tuple(e["seed"] for e in entries if e.get("failed")),
    )


def _worth(entry):
    """The epsilon that is proved of a run, and the one that is claimed."""
    proved = [g for g in entry["privacy"] if g["status"] == "proved" and g["epsilon"] is not None]
    claims = [g for g in entry["privacy"] if g["status"] == "claimed"]
    view = entry["config"].get("view") or (proved[0]["view"] if proved else "server")
    proved = [g for g in proved if g["view"] == view] or proved
    claims = [g for g in claims if g["view"] == view] or claims
    return proved[0]["epsilon"] if proved else None, claims[0]["epsilon"] if claims else None


def _missing(line):
    return (
        f" ({len(line.failed)} of {len(line.failed) + len(line.seeds)} seeds failed)"
        if line.failed
        else ""
    )


def _shown(value):
    return "" if value is None else f"{value:.4g}"


def main(module: str, experiments: dict, argv=None) -> int:
    """The command line of a paper's experiments, or of the studies."""
    where = module if module == "studies" else f"papers.{module}"
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{where}")
    parser.add_argument("name", nargs="?", choices=sorted(experiments), help="experiment")
    parser.add_argument("--list", action="store_true", help="all experiments")
    parser.add_argument("--quick", action="store_true", help="small settings, one seed")
    parser.add_argument(
        "--out", default=None, help="directory of the results; default runs/MODULE/NAME"
    )
    parser.add_argument("--lines", nargs="*", help="only these lines")
    parser.add_argument(
        "--cells",
        default=None,
        help="directory of the runs, which figures share; default runs/MODULE/"
        f"{CELLS}, or OUT/{CELLS} if --out is given",
    )
    args = parser.parse_args(argv)
    if args.list or args.name is None:
        for name, e in experiments.items():
            print(f"{name:<12} {e.title}  [{', '.join(e.lines)}]")
        return 0
    out = args.out or f"runs/{module}/{args.name}{'-quick' if args.quick else ''}"
    Path(out).mkdir(parents=True, exist_ok=True)
    kept = args.cells or f"{args.out or f'runs/{module}'}/{CELLS}"
    run(args.name, experiments[args.name], out, args.quick, args.lines, module, kept)
    return 0
