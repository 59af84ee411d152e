"""Run named experiments: lines of a figure or table as configs, in few programs, with claims.

    python -m experiments.papers noble2022 --list
    python -m experiments.papers noble2022 fig2b --quick --out runs/fig2b

Every line is a directory as `jfl sweep` writes it, lines with one program run together
(`programs`), and nothing runs twice (`kept_runs`).  Claims are judged on the results by one rule
(`verdicts`).  results.json names the command that made it.
"""

import dataclasses
import operator
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from jfl.cli import console
from jfl.core import checks as check
from jfl.core.errors import DataUnavailable, HealthError
from jfl.runs import record, statistics
from jfl.runs.checkpoint import environment
from jfl.runs.config import Config

from . import command_line, kept_runs
from . import results as results_file
from .programs import Plans
from .verdicts import (
    AT_CHANCE,
    DRAW_PER_SEED,
    FAR,
    OURS,
    WRONG,
    Claim,
    far_below,
    judge,
    untuned,
)

CONFIRMED, NOT, UNKNOWN = results_file.STUDIED
FIRST = ", first rates"  # ends the name of a line before its rates were chosen
MAX_PRINTED_ROWS = 60  # of a table of an experiment without lines
CLASSES = dict(adult=2, emnist=47)  # of a dataset; all others have ten
CHOSEN_FIELDS = ("lr", "server_lr", "clip_norm")  # `baselines` may choose these
DECAYS = ("clip_decay", "noise_decay")  # and these, if the line decays
KEPT = ".kept_runs"  # hidden, so that the shell's * does not match it


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One figure or table.

    Attributes:
        title: its heading.
        base: fields of jfl.runs.config.Config.
        lines: name -> fields that differ from `base`.
        claims: what is checked on the results.
        quick: fields for a run of seconds to a minute.
        seeds: of every line.
        paper: line -> the value that the paper prints.
        runs: how plans are made; or a function (config, axes, directory) -> entries that runs a
            line.
        quick_lines: the lines of a quick run; None: all.
        columns: config of a line -> {heading: another value to show}.
        special: (experiment, out, quick) -> findings, if the experiment has no lines; see
            `run_special`.
        differs: how the settings differ from the paper's; "": they do not.
        baselines: line without privacy -> private lines that it should not lose to.
        reached: line without privacy -> {seed: accuracy that L-BFGS reaches with its model}.
        methods: line -> the line whose chosen rates and clip norms it takes; empty: only marked
            baselines are chosen.
        same_law: line -> (figure, line) whose data have the same distribution by a proof, so that
            both take one choice.
        at_edge: lines whose chosen rates are at an end of their grid.
        unchosen: lines of `methods` whose grid has not run yet.
        grid: field -> its values, for `methods`; or a function of the line that returns that.
        with_values: (fields of a line, chosen values) -> its fields at these values.
        last: accuracy is the mean over this last fraction of the rounds; 0: at the end.
        wrong: the largest probability that any verdict on the paper's claims is wrong, and that any
            on ours is; half of WRONG if `seeds` is a second number.
    """

    title: str
    base: dict
    lines: dict
    claims: tuple[Claim, ...] = ()
    quick: dict = dataclasses.field(default_factory=dict)
    seeds: tuple = (0, 1, 2, 3, 4)
    paper: dict = dataclasses.field(default_factory=dict)
    runs: Plans | Callable = Plans()
    quick_lines: tuple | None = None
    columns: Callable | None = None
    special: Callable | None = None
    differs: str = OURS
    baselines: dict = dataclasses.field(default_factory=dict)
    reached: dict = dataclasses.field(default_factory=dict)
    methods: dict = dataclasses.field(default_factory=dict)
    same_law: dict = dataclasses.field(default_factory=dict)
    at_edge: frozenset = frozenset()
    unchosen: frozenset = frozenset()
    grid: dict | Callable[[str], dict] = dataclasses.field(default_factory=dict)
    with_values: Callable[[dict, dict], dict] = operator.or_
    last: float = 0.0
    wrong: float = WRONG


@dataclasses.dataclass(frozen=True)
class Line:
    """The results of one line.

    Attributes:
        accuracy: [seeds], at the end, of the seeds that did not fail.
        loss: [seeds].
        proved: epsilon, for the view of the config, else of the claim.
        claimed: by the paper, for the same view.
        seconds: per round of one seed; its part, if seeds share a program.
        trace: metric -> [seeds, evaluations].
        seeds: of `accuracy`.
        failed: the other seeds.
        draws: how many draws of the data the seeds have, in words.
        at_chance: whether its accuracy is that of guessing, so that it is not ranked.
    """

    accuracy: np.ndarray
    loss: np.ndarray
    proved: float | None
    claimed: float | None
    seconds: float
    trace: dict = dataclasses.field(default_factory=dict)
    seeds: tuple = ()
    failed: tuple = ()
    draws: str = DRAW_PER_SEED
    at_chance: bool = False

    @property
    def paired_by(self) -> tuple:
        """Return a key for each value; lines are paired if both the seed and its rows agree."""
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
    """Run what is missing, print the results, and judge the claims.

    Args:
        name: of the experiment.
        experiment: what to run.
        out: directory of the results.
        quick: small settings, one seed.
        only: these lines; default all.
        module: of experiments, which is stored so that a reader can run it again.
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
        return keep(out, run_special(experiment, out, quick), command)
    kept = out / KEPT if kept is None else Path(kept)
    only = only or (experiment.quick_lines if quick else None)
    seeds = experiment.seeds[: 1 if quick else None]
    configs, unread = _readable(name, experiment, quick, only)
    if not configs and any(out.glob(f"*/{kept_runs.MARK}")):
        check.fail(
            name,
            "data of at least one line",
            f"{', '.join(unread)} that cannot be read here",
            f"The lines of an earlier run in {out} are unchanged.",
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
                draws=drawn(experiment),
                device=environment()["device"],
                ran_at=ran_at(experiment, line),
                data=kept_runs.data_digest(configs[line].dataset),
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
    """Return the configs of the lines to run, and dataset -> why it cannot be read."""
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
            # The text of the error names places on this machine.
            unread[config.dataset] = f"datasets.{config.dataset}: data that are not on this machine"
            continue
        configs[line] = config
    return configs, unread


def _run_lines(name, experiment: Experiment, out: Path, kept: Path, configs: dict, seeds):
    """Run the lines.

    Returns:
        line -> Line, in the order of the figure; line -> why it failed; the seconds of all.
    """
    folders = {line: out / line.replace(" ", "_").replace("/", "_") for line in configs}
    results, failed, seconds = {}, {}, 0.0
    for line, entries in kept_runs.lines(folders, kept, configs, seeds, experiment.runs):
        # An earlier run's results and page no longer describe all lines.
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
    """Return the values that the table shows besides accuracy and epsilon."""
    columns = experiment.columns(config) if experiment.columns else {}
    # The "curve" of accuracies ends at the accuracy, which has a column already.
    ends = {
        k: float(v[:, -1].mean()) for k, v in result.trace.items() if k not in ("curve", "round")
    }
    return columns | ends


def ran_at(experiment: Experiment, line: str) -> dict:
    """Return the learning rates, clip norm and decays of a line, which a grid may choose."""
    config = Config(**{**experiment.base, **experiment.lines[line]})
    decays = {name: value for name in DECAYS if (value := getattr(config, name)) != 1}
    return {name: getattr(config, name) for name in CHOSEN_FIELDS} | decays


def drawn(experiment: Experiment) -> str:
    """Return how many draws of the data the seeds have, in words."""
    shared = isinstance(experiment.runs, Plans) and not experiment.runs.seeded
    return "one" if shared else DRAW_PER_SEED


def without_failures(results: dict) -> dict:
    """Return the lines without failed seeds: the other seeds are not a fair sample."""
    return {line: r for line, r in results.items() if not r.failed}


def not_tuned(experiment: Experiment, results: dict) -> str:
    """Return which lines were not tuned, in words; "" if there are none.

    These are lines without privacy that the rule marks, also at the best of their grid, and lines
    of methods whose grid has not run.
    """
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
    """Return the verdicts on the claims of an experiment.

    Args:
        experiment: with the claims.
        results: line -> Line. Lines with a failed seed count as not run.
        unread: datasets that could not be read.
    """
    whole, reasons = marked_at_chance(experiment, without_failures(results)), ""
    if partly := [line for line, r in results.items() if r.failed]:
        reasons += f"; seeds failed of {', '.join(partly)}"
    if unread:
        reasons += f"; not to be read here: {', '.join(unread)}"
    found = {}
    for whose in ("paper", "ours"):
        claims = [c for c in experiment.claims if c.whose == whose]
        given = judge(claims, whole, experiment.differs, experiment.wrong)
        found |= {id(c): pair for c, pair in zip(claims, given, strict=True)}
    return [
        dict(
            claim=claim.text,
            verdict=verdict,
            seen=seen + (reasons if verdict == UNKNOWN else ""),
            whose=claim.whose,
            statement=claim.statement,
        )
        for claim in experiment.claims
        for verdict, seen in [found[id(claim)]]
    ]


def with_seeds(experiments: dict, first: dict, second: dict) -> dict:
    """Return experiments, some with another number of seeds.

    Args:
        experiments: name -> Experiment.
        first: name -> a number that was fixed before the runs.
        second: name -> a number that was fixed after the verdicts with the first. Such experiments
            are judged at half the probability of an error.
    """
    once = {name: dict(seeds=tuple(range(count))) for name, count in first.items()}
    twice = {
        name: dict(seeds=tuple(range(count)), wrong=WRONG / 2) for name, count in second.items()
    }
    return experiments | {
        name: dataclasses.replace(experiments[name], **changed)
        for name, changed in (once | twice).items()
    }


def marked_at_chance(experiment: Experiment, results: dict) -> dict:
    """Return the lines, with those marked whose accuracy is at chance."""

    def low(name, line):
        fields = experiment.base | experiment.lines.get(name, {})
        classes = CLASSES.get(fields.get("dataset", ""), 10)
        return bool(line.accuracy.size) and line.accuracy.mean() < 1 / classes + AT_CHANCE

    return {n: dataclasses.replace(r, at_chance=low(n, r)) for n, r in results.items()}


def _print_tables(experiment: Experiment, quick: bool, results: dict, columns: dict, verdicts):
    """Print a row for each line, and one for each claim."""
    rows = [
        (
            line,
            f"{statistics.plus_minus(*statistics.interval(r.accuracy))}{_missing(r)}",
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
        f"{statistics.PLUS_MINUS}  In the paper's values it means what the paper says.  "
        "Accuracies lie outside every guarantee.",
    )
    if verdicts:
        show_verdicts(verdicts)


def stored_line(line: results_file.Line, seeds) -> Line:
    """Return a line of a file of results as a Line; without accuracy if no seeds are stored.

    Args:
        line: as stored.
        seeds: of the experiment, which apply if the line names none.
    """
    stored = lambda values: [] if isinstance(values, results_file.Spread) else values
    accuracy, loss = stored(line.accuracy), stored(line.loss)
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
        line.draws,
    )


def show_verdicts(verdicts: list[dict]):
    """Print a row for each verdict."""
    columns = ("claim", "verdict", "seen", "whose")
    rows = [tuple(v.get(c, "paper") for c in columns) for v in verdicts]
    console.table("claims", [(c, False) for c in columns], rows, "")


def run_special(experiment: Experiment, out: Path, quick: bool) -> dict:
    """Run an experiment without lines, and print what it found.

    Args:
        experiment: whose `special` returns a dict of findings. They are fields of
            results.Experiment, tables and settings, as `results.of` takes them. The first of the
            `columns` holds text, and the others numbers, as text. `claims` are judged here.
        out: directory of the results.
        quick: whether to run its short form.

    Returns:
        The findings with their verdicts, as JSON has them.
    """
    assert experiment.special is not None
    out.mkdir(parents=True, exist_ok=True)
    found = dict(title=experiment.title, versions=environment())
    found |= experiment.special(experiment, out, quick)
    claims = tuple(found.pop("claims", ()))
    verdicts = judged(dataclasses.replace(experiment, claims=claims), {})
    found["verdicts"] = [*found.get("verdicts", ()), *verdicts]
    values = record.plain(found)  # measured numbers are NumPy's
    for table in results_file.of(values).tables:
        _print_short_table(values["title"], table)
    if note := values.get("note"):
        print(note)
    if values["verdicts"]:
        show_verdicts(values["verdicts"])
    return values


def _print_short_table(title: str, table: results_file.Table):
    """Print a table of results, unless it is long or a cell holds more than one value."""
    cells = [value for row in table.rows for value in row]
    if len(table.rows) > MAX_PRINTED_ROWS or any(isinstance(v, (list, dict)) for v in cells):
        return
    caption = title if table.caption == results_file.NUMBERS else f"{title}: {table.caption}"
    shown = lambda v: f"{v:.4g}" if isinstance(v, float) else "" if v is None else str(v)
    console.table(
        caption,
        [(column, i > 0) for i, column in enumerate(table.columns)],
        [tuple(map(shown, row)) for row in table.rows],
        "",
    )


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
    # Seeds with separate splits have separate epsilons; the line has the largest, or none if one
    # seed has none.
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
    """Return the final accuracy, or its mean over the last fraction of the rounds."""
    if not last:
        return entry["accuracy"]["final"]
    rounds, curve = (np.array(entry["trace"][k], float) for k in ("round", "curve"))
    return float(curve[rounds > (1 - last) * rounds[-1]].mean())


def _epsilons(entry):
    """Return the proved and the claimed epsilon of a run, both for one view.

    It is the view of the config; without one, that of the first claim, else of the first proof.
    """
    proved = [g for g in entry["privacy"] if g["status"] == "proved" and g["epsilon"] is not None]
    claims = [g for g in entry["privacy"] if g["status"] == "claimed"]
    view = entry["config"].get("view") or next((g["view"] for g in (*claims, *proved)), "server")
    of = lambda rows: next((g["epsilon"] for g in rows if g["view"] == view), None)
    return of(proved), of(claims)


def _missing(line):
    return (
        f" ({len(line.failed)} of {len(line.failed) + len(line.seeds)} seeds failed)"
        if line.failed
        else ""
    )


def _shown(value):
    return "" if value is None else f"{value:.4g}"


def main(module: str, experiments: dict, argv=None) -> int:
    """Run the command line of a paper's experiments, or of the studies."""
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
        """Run an experiment, or list all.

        Args:
            name: the experiment; none: list all.
            list: list all experiments, or the lines of the named one.
            quick: small settings, one seed.
            out: directory of the results; default: runs/MODULE/NAME.
            lines: only these lines; default: all.
            kept: directory of the runs, which figures share; default: runs/MODULE/kept, or
                OUT/kept.
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

    where = module if module == "studies" else f"papers {module}"
    return command_line.called(command, f"python -m experiments.{where}", argv)
