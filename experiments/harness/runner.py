"""Named experiments: lines of a figure or table as configs, run as few programs, with claims that
are checked.

    python -m experiments.papers.noble2022 --list
    python -m experiments.papers.noble2022 fig2b --quick --out runs/fig2b

Every line is a directory as `jfl sweep` leaves it, lines that share a program run as one
(`programs`), and nothing is run twice (`kept_runs`).  Claims are judged on the results by one rule
(`verdicts`).  results.json says which command made it.
"""

import dataclasses
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from scipy import stats

from jfl.cli import console
from jfl.core import checks as check
from jfl.core.errors import DataUnavailable, HealthError
from jfl.runs import record
from jfl.runs.checkpoint import environment
from jfl.runs.config import Config

from . import command_line, kept_runs
from . import results as results_file
from .programs import Plans
from .verdicts import DRAW_PER_SEED, FAR, OURS, Claim, far_below, judge, untuned

CONFIRMED, NOT, UNKNOWN = results_file.STUDIED
FIRST = ", first rates"  # behind the name of a line whose rates were chosen since
CHOSEN_FIELDS = ("lr", "server_lr", "clip_norm")  # that `baselines` may choose
KEPT = ".kept_runs"  # out of sight of a shell's *: jfl report runs/noble2022/*


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One figure or table: `base` fields of jfl.runs.config.Config, and for each line what differs
    from them."""

    title: str
    base: dict
    lines: dict
    claims: tuple[Claim, ...] = ()
    quick: dict = dataclasses.field(default_factory=dict)  # fields for a run of seconds to a minute
    seeds: tuple = (0, 1, 2, 3, 4)
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
    differs: str = OURS  # how the settings differ from the paper's; "": they do not
    draws: bool = False  # each seed has a draw of the data, or a split, of its own
    baselines: dict = dataclasses.field(
        default_factory=dict
    )  # line without privacy -> private lines, to none of which it should lose
    reached: dict = dataclasses.field(
        default_factory=dict
    )  # line without privacy -> {seed: accuracy of its model by L-BFGS}
    methods: dict = dataclasses.field(
        default_factory=dict
    )  # line -> the one whose chosen rates and clip norms it takes; empty: marked baselines alone
    same_law: dict = dataclasses.field(
        default_factory=dict
    )  # line -> (figure, line) whose data have the same law, by a proof: both take one choice
    at_edge: frozenset = frozenset()  # lines whose chosen rates are at an end of their grid
    unchosen: frozenset = frozenset()  # lines of `methods` whose grid has not run yet
    # field -> its values, for `methods`; or what gives them for a line
    grid: dict | Callable[[str], dict] = dataclasses.field(default_factory=dict)
    last: float = 0.0  # accuracy is the mean over this share of the rounds, the last; 0: at the end


@dataclasses.dataclass(frozen=True)
class Line:
    """What came of one line, over its seeds."""

    accuracy: np.ndarray  # [seeds], at the end; of those that did not fail
    loss: np.ndarray  # [seeds]
    proved: float | None  # epsilon of the server, else of the third party
    claimed: float | None
    seconds: float  # a round, of one seed; its share of them, where seeds are one program
    trace: dict = dataclasses.field(
        default_factory=dict
    )  # what its plans are shown by: [seeds, evaluations]
    seeds: tuple = ()  # of accuracy
    failed: tuple = ()  # the other ones
    summary: tuple = ()  # mean, std and number of accuracies whose seeds are not stored
    draws: str = DRAW_PER_SEED  # of the data, in words

    @property
    def paired_by(self) -> tuple:
        """Of its values, one for each seed: lines are paired where both the seed and the rows that
        it stands for are the same."""
        return tuple((seed, self.draws) for seed in self.seeds)


def run(
    name: str,
    experiment: Experiment,
    out,
    quick: bool = False,
    only=None,
    module: str | None = None,
    kept=None,
) -> dict:
    """Run what is not kept yet, show it, and check the claims.

    Args:
        name: of the experiment.
        experiment: what to run.
        out: directory of the results.
        quick: small settings, one seed.
        only: these lines; default all.
        module: of experiments, which has it under this name; it is written down, so that a reader
            can run it again.
        kept: directory of runs that experiments share (see `kept_runs`); default one in `out`.

    Returns:
        Plain values of results and verdicts, which are in out/results.json too.
    """
    command = dict(experiment=name, quick=quick)
    command |= (dict(module=module) if module else {}) | (dict(only=list(only)) if only else {})
    out = Path(out)
    if experiment.special:
        if only:
            check.fail(name, "no --lines, as it runs as a whole", ", ".join(only))
        return keep(out, experiment.special(name, experiment, out, quick), command)
    kept = out / KEPT if kept is None else Path(kept)
    only = only or (experiment.quick_lines if quick else None)
    seeds = experiment.seeds[: 1 if quick else None]
    configs, unread = _readable(name, experiment, quick, only)
    if not configs and any(out.glob(f"*/{kept_runs.MARK}")):
        check.fail(
            name,
            "data of at least one line",
            f"{', '.join(unread)} that cannot be read here",
            f"The lines of an earlier run in {out} stand as they were.",
        )
    results, failed, seconds = _run_lines(name, experiment, out, kept, configs, seeds)
    columns = {line: _columns(experiment, configs[line], r) for line, r in results.items()}
    verdicts = judged(experiment, results, () if only else unread)
    _print_tables(experiment, quick, results, columns, verdicts)
    values = dict(
        title=experiment.title,
        seeds=list(seeds),
        seconds=seconds,
        lines={
            line: dict(
                seeds=r.seeds,
                failed=r.failed,
                accuracy=r.accuracy.tolist(),
                loss=r.loss.tolist(),
                epsilon_claimed=r.claimed,
                epsilon_proved=r.proved,
                seconds_per_round=r.seconds,
                paper=experiment.paper.get(line),
                columns=columns[line],
                source="",
                draws=r.draws,
                device=environment()["device"],
                ran_at=ran_at(experiment, line),
                trace={k: v.tolist() for k, v in r.trace.items()},
            )
            for line, r in results.items()
        },
        verdicts=verdicts,
        draws=drawn(experiment),
        not_tuned=not_tuned(experiment, results),
        **({"differs": experiment.differs} if experiment.differs else {}),
        versions=environment(),
        **{k: v for k, v in dict(unread=unread, failed=failed).items() if v},
    )
    return keep(out, values, command)


def _readable(name, experiment: Experiment, quick, only) -> tuple[dict, dict]:
    """The configs of the lines to run, and of data that are not on this machine why not."""
    if unknown := sorted(set(only or ()) - set(experiment.lines)):
        raise ValueError(
            f"{name}: expected lines of {', '.join(experiment.lines)}, but got "
            f"{', '.join(unknown)}."
        )
    configs, unread = {}, {}
    for line, changes in experiment.lines.items():
        if only and line not in only:
            continue
        config = Config(**{**experiment.base, **changes, **(experiment.quick if quick else {})})
        try:
            kept_runs.key(config, experiment.runs)
        except DataUnavailable as error:
            why = "" if config.dataset in unread else f".  {error}"
            print(f"{name} {line}: not run{why}", file=sys.stderr)
            # what the error says names places on this machine
            unread[config.dataset] = f"datasets.{config.dataset}: data that are not on this machine"
            continue
        configs[line] = config
    return configs, unread


def _run_lines(name, experiment: Experiment, out: Path, kept: Path, configs: dict, seeds):
    """Run the lines.

    Returns:
        line -> Line of those that did not fail, in the order of the figure; line -> why of the
        others; the seconds of all.
    """
    folders = {line: out / line.replace(" ", "_").replace("/", "_") for line in configs}
    results, failed, seconds = {}, {}, 0.0
    for line, entries in kept_runs.lines(folders, kept, configs, seeds, experiment.runs):
        # of an earlier run, whose lines are no longer all there; nor what a page says of them
        (out / "results.json").unlink(missing_ok=True)
        record.void(out)
        if isinstance(entries, HealthError):
            failed[line], entries = str(entries), []
        elif all(e.get("failed") for e in entries):
            failed[line] = "all of its runs failed"
        if line in failed:
            print(f"{name} {line}: {failed[line]}", file=sys.stderr)
        else:
            of_line = _line(entries, experiment.last)
            result = results[line] = dataclasses.replace(of_line, draws=drawn(experiment))
            mean = result.accuracy.mean()
            print(f"{name} {line}: accuracy {mean:.4f}{_missing(result)}", file=sys.stderr)
        seconds += sum(e["seconds"]["total"] for e in entries)
    return {line: results[line] for line in configs if line in results}, failed, seconds


def _columns(experiment: Experiment, config: Config, result: Line) -> dict:
    """What the table shows of a line beyond accuracy and epsilon."""
    columns = experiment.columns(config) if experiment.columns else {}
    # a "curve" is of accuracies, and ends at one that is there already
    ends = {
        k: float(v[:, -1].mean()) for k, v in result.trace.items() if k not in ("curve", "round")
    }
    return columns | ends


def ran_at(experiment: Experiment, line: str) -> dict:
    """What may be chosen for a line: its learning rates and clip norm."""
    config = Config(**{**experiment.base, **experiment.lines[line]})
    return {name: getattr(config, name) for name in CHOSEN_FIELDS}


def drawn(experiment: Experiment) -> str:
    """How many draws of the data its seeds have, in words."""
    return DRAW_PER_SEED if experiment.draws else "one"


def without_failures(results: dict) -> dict:
    """Lines of which no seed failed: the other seeds are no sample of all."""
    return {line: r for line, r in results.items() if not r.failed}


def not_tuned(experiment: Experiment, results: dict) -> str:
    """In words, the lines without privacy that were not tuned, or still fall behind at the best of
    their grid, and the lines of methods whose grid has not run; "" if there are none."""
    whole = without_failures(results)
    below = untuned(experiment.baselines, whole)
    far = [n for n in far_below(experiment.reached, whole) if n not in below]
    chosen = lambda n: n + FIRST in results or n in experiment.methods.keys() - experiment.unchosen
    best = lambda n: f"{n} (at the best of its grid)" if chosen(n) else n
    named = lambda lines: ", ".join(map(best, lines))
    words = [f"{named(below)}: below a private line by more than the interval"] * bool(below)
    words += [
        f"{named(far)}: more than {FAR * 100:g} points below what the model reaches by L-BFGS"
    ] * bool(far)
    waiting = [n for n in results if n in experiment.unchosen]
    words += [f"{', '.join(waiting)}: at our first rate, as its grid has not run"] * bool(waiting)
    return "; ".join(words)


def judged(experiment: Experiment, results: dict, unread=()) -> list[dict]:
    """The verdicts of an experiment.

    Args:
        experiment: whose claims are judged.
        results: line -> Line. Those of which a seed failed count as not run.
        unread: data sets that could not be read.
    """
    whole, reasons = without_failures(results), ""
    if partly := [line for line, r in results.items() if r.failed]:
        reasons += f"; seeds failed of {', '.join(partly)}"
    if unread:
        reasons += f"; not to be read here: {', '.join(unread)}"
    found = []
    for claim in experiment.claims:
        alike = sum(c.whose == claim.whose for c in experiment.claims)
        verdict, seen = judge(claim, whole, alike, experiment.differs)
        found.append(
            dict(
                claim=claim.text,
                verdict=verdict,
                seen=seen + (reasons if verdict == UNKNOWN else ""),
                whose=claim.whose,
                statement=claim.statement,
            )
        )
    return found


def _print_tables(experiment: Experiment, quick: bool, results: dict, columns: dict, verdicts):
    """Print a row for each line, and one for each claim."""
    rows = [
        (
            line,
            f"{record.plus_minus(*record.interval(r.accuracy))}{_missing(r)}",
            str(experiment.paper.get(line, "")),
            _shown(r.claimed),
            _shown(r.proved),
            f"{r.seconds:.3g}",
            *map(_shown, columns[line].values()),
        )
        for line, r in results.items()
    ]
    headings = ("accuracy", "paper", "ε claimed", "ε proved", "s/round")
    headings = dict.fromkeys((*headings, *(h for line in columns.values() for h in line)))
    console.table(
        experiment.title + (" (quick)" if quick else ""),
        [("line", False), *((heading, True) for heading in headings)],
        rows,
        f"{record.PLUS_MINUS}  In the paper's figures it is what the paper means by it.  "
        "Accuracies lie outside every guarantee.",
    )
    if verdicts:
        show_verdicts(verdicts)


def stored_line(line: results_file.Line, seeds) -> Line:
    """What a file of results holds of a line; `seeds` of the experiment, where the line names
    none."""
    accuracy, loss, summary = line.accuracy, line.loss, ()
    if isinstance(accuracy, results_file.Spread):
        count = line.seeds if isinstance(line.seeds, int) else len(line.seeds or seeds)
        std = accuracy.std
        if std is None and accuracy.half is not None:
            std = accuracy.half * count**0.5 / float(stats.t.ppf(0.975, count - 1))
        if std is None or accuracy.mean is None:
            count, std = 1, 0.0
        summary = (accuracy.mean, std, count)
        accuracy = loss = []
    if isinstance(loss, results_file.Spread):
        loss = []
    own = line.seeds if isinstance(line.seeds, list) else ()
    own = own or (seeds if len(seeds) == len(accuracy) else range(len(accuracy)))
    return Line(
        np.array(accuracy, float),
        np.array(loss, float),
        line.epsilon_proved,
        line.epsilon_claimed,
        line.seconds_per_round or 0.0,
        {k: np.array(v, float) for k, v in line.trace.items()},
        tuple(own),
        tuple(line.failed) if isinstance(line.failed, list) else tuple(range(line.failed)),
        summary,
        line.draws,
    )


def show_verdicts(verdicts: list[dict]):
    """Print a row for each."""
    columns = ("claim", "verdict", "seen", "whose")
    rows = [tuple(v.get(c, "paper") for c in columns) for v in verdicts]
    console.table("claims", [(c, False) for c in columns], rows, "")


def exact_verdicts(claims, differs: str) -> list[dict]:
    """The verdicts of claims that have no seeds."""
    return judged(Experiment("", {}, {}, tuple(claims), differs=differs), {})


def write_findings(
    out, name: str, title: str, verdicts=(), *, quick=False, columns=(), rows=(), note="", **found
) -> dict:
    """Print and write what an experiment without lines found.

    Args:
        out: directory of results.json.
        name: of the experiment.
        title: of its table.
        verdicts: on its claims.
        quick: whether it ran in its short form.
        columns: headings of the table; the first column holds text, the others numbers.
        rows: cells of the table, as text; none: no table.
        note: a remark under the table.
        found: further fields of results.Experiment, tables and settings.

    Returns:
        The values that were written, as JSON has them.
    """
    if rows:
        console.table(title, [(c, i > 0) for i, c in enumerate(columns)], rows, note)
        found |= dict(columns=list(columns), rows=[list(row) for row in rows])
    if verdicts:
        show_verdicts(verdicts)
    values = dict(experiment=name, title=title, quick=quick, versions=environment())
    values |= found | dict(verdicts=list(verdicts)) | ({"note": note} if note else {})
    return keep(out, values, {})


def keep(out, values: dict, command: dict) -> dict:
    """Write `values` to out/results.json, after the command that made them.

    Returns:
        The command and the values, as JSON has them.
    """
    values = record.plain(command | {k: v for k, v in values.items() if k not in command})
    results_file.write(Path(out) / "results.json", results_file.of(values))
    return values


def _line(entries, last: float = 0.0):
    good = [e for e in entries if not e.get("failed")]
    # seeds with splits of their own have an epsilon each: that of the line is the largest, and none
    # if one has none
    proved, claimed = zip(*map(_epsilons, entries))
    proved = None if None in proved else max(proved)
    claimed = max((c for c in claimed if c is not None), default=None)
    values = lambda key: np.array([e[key] for e in good], float)
    accuracy = np.array([_accuracy(e, last) for e in good], float)
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


def _accuracy(entry, last: float) -> float:
    """At the end, or the mean over the evaluations in the last share of the rounds."""
    if not last:
        return entry["accuracy"]["final"]
    rounds, curve = (np.array(entry["trace"][k], float) for k in ("round", "curve"))
    return float(curve[rounds > (1 - last) * rounds[-1]].mean())


def _epsilons(entry):
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
    literal: Any = typing.Literal
    named = literal[tuple(sorted(experiments))] | None

    def command(
        name: tyro.conf.Positional[named] = None,  # pyright: ignore[reportInvalidTypeForm]  # names of a table
        *,
        list: bool = False,
        quick: bool = False,
        out: str | None = None,
        lines: tuple[str, ...] = (),
        kept: str | None = None,
    ) -> int:
        """Run an experiment, or name all.

        Args:
            name: the experiment; none: all are named.
            list: name all experiments; of one, its lines.
            quick: small settings, one seed.
            out: directory of the results; runs/MODULE/NAME where none is given.
            lines: only these lines; all where none is given.
            kept: directory of the runs, which figures share; runs/MODULE/kept where none is
                given, or OUT/kept.
        """
        if list and name:
            print(*experiments[name].lines, sep="\n")
            return 0
        if list or name is None:
            width = max(map(len, experiments))
            for each, e in experiments.items():
                count = f"  ({len(e.lines)} lines)" if e.lines else ""
                print(f"{each:<{width}}  {e.title}{count}")
            return 0
        folder = out or f"runs/{module}/{name}{'-quick' if quick else ''}"
        Path(folder).mkdir(parents=True, exist_ok=True)
        shared = kept or f"{out or f'runs/{module}'}/{KEPT}"
        run(name, experiments[name], folder, quick, [*lines] or None, module, shared)
        return 0

    where = module if module == "studies" else f"papers.{module}"
    return command_line.called(command, f"python -m experiments.{where}", argv)
