"""Choose learning rates and clip norms for baselines without privacy, or for all methods of a
figure.

    python -m experiments.harness.baselines chen2024 fig1ab --kept runs/chen2024/kept

The rules were fixed before the runs, except for two changes that were made after we had seen
results. At first the mark shared its 5 % among all pairs of a figure and so marked hardly any line.
The two grids of Ranaweera et al. were widened for all methods, since most choices were at their
ends.

    marked   A line without privacy is "not tuned" if it ends below a private line of its setting by
             more than their paired interval, or (convex models) more than verdicts.FAR below what
             L-BFGS reaches with its model on the rows of the same seeds.
    grid     A marked line runs at all RATES of its clients, and at 1, 10 and 100 times its server
             rate if the server has one, on SEEDS, which no figure uses.  The setting with the
             largest mean final test accuracy is chosen.  If its rate is at an end of the grid, the
             grid is continued there by six rates, once.  The choice also applies to all lines that
             share its run, or whose data have the same distribution by a proof
             (`Experiment.same_law`), if they have no choice themselves.
    report   The figure has the line at the chosen rates, under its name, and the earlier result as
             "NAME, first rates".  It is marked again if the rule says so.
    all      If `Experiment.methods` says so, every method of a figure is chosen, with privacy or
             without, at all of `Experiment.grid`, on the same seeds, for a line with the middle
             noise or setting.  The choice applies to all lines of the method.  If runs are long,
             the grid may be a part of RATES (`around`), of the same length for all.  A grid with
             clip norms is continued by two values along an axis whose end is best, once.  A decay
             (of noise or of a clip norm, over a run) is not continued beyond 1, which is no decay.

The choices are in experiments/results/baselines.json, from which the figures take their rates.
"""

import dataclasses
import importlib
import itertools
import json
import math
import operator
import re
import sys
import typing
from collections import ChainMap
from pathlib import Path

import numpy as np
import tyro

from jfl.core import checks
from jfl.core.files import write
from jfl.engine.metrics import evaluate
from jfl.runs.checkpoint import environment
from jfl.runs.config import Config

from . import command_line, kept_runs, objectives
from . import results as results_file
from .programs import CURVE, Plans, drawn
from .results import PAPERS
from .runner import FIRST, stored_line, without_failures
from .verdicts import far_below, untuned

FILE = Path(__file__).parents[1] / "results" / "baselines.json"
RATES = tuple(round(10 ** (k / 3), 6) for k in range(-9, 4))  # 0.001 to 10
NUM_EXTRA_RATES = 6
NUM_EXTRA_VALUES_WITH_CLIP = 2
# ratio of neighbouring values
STEP = dict(lr=10 ** (1 / 3), clip_norm=2.0, clip_decay=2.0, noise_decay=2.0**0.5)
NO_DECAY = {("clip_decay", 1.0), ("noise_decay", 1.0)}  # an end at which no grid is continued
SERVER_FACTORS = (1.0, 10.0, 100.0)
SEEDS = (1000, 1001)
LEAST_L2 = 1e-4  # without l2 there may be no minimiser
GRADIENT_TOLERANCE = 1e-3  # for L-BFGS; enough for an accuracy


class Choice(typing.NamedTuple):
    """The chosen rates of a line, and the grid from which they were chosen."""

    first: dict  # the fields before
    chosen: dict  # the fields that were chosen
    grid: list[dict]  # fields, and the "accuracy" of each seed
    at_edge: bool  # of the continued grid, on any axis


def as_text(every: dict) -> str:
    """Return the text of a file of choices, with one line for each point of a grid."""
    text = json.dumps(every, indent=1, ensure_ascii=False) + "\n"
    # Only the environment of a grid, which begins with the version of jfl, keeps its lines.
    one_line = lambda found: re.sub(r"\n *", "", found[0])
    return re.sub(r'\{\n *(?! |"jfl")[^{}]*\}', one_line, text)


def around(rate: float, each_side: int = 3) -> tuple:
    """Return the value of RATES nearest to a rate, with neighbours on each side."""
    middle = min(range(len(RATES)), key=lambda i: abs(math.log(RATES[i] / rate)))
    return RATES[max(0, middle - each_side) : middle + each_side + 1]


# --- what figures use


def stored() -> dict:
    """Return paper -> figure -> line -> what was measured."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def with_chosen(module: str, experiments: dict) -> dict:
    """Return the experiments of a paper with chosen rates, and lines at the first rates."""
    found, given = {}, stored().get(module, {})
    for (figure, line), (own, *others) in _measured(given, experiments).items():
        reached = ChainMap(own.get("reached", {}), *(m.get("reached", {}) for m in others))
        of_line = {**ChainMap(own, *others), "reached": dict(reached)}
        found.setdefault(figure, {})[line] = of_line
    return {name: _with(e, found.get(name, {})) for name, e in experiments.items()}


def _measured(given: dict, experiments: dict) -> dict:
    """Return (figure, line) -> what was measured for it, then for lines that serve it as well.

    These are lines that share its run, and lines whose data have the same distribution (without
    what L-BFGS reached, which is for their own draws).
    """
    known = {name: e for name, e in experiments.items() if e.baselines or e.methods}
    found, shared, of_law = {}, lines_with_one_run(known), {}
    of = lambda place: given.get(place[0], {}).get(place[1], {})
    law = lambda place: min(shared[known[place[0]].same_law.get(place[1], place)])
    for place in shared:
        of_law.setdefault(law(place), []).append(place)
    for place, places in shared.items():
        others = [of(other) for other in places if other != place]
        for other in of_law[law(place)]:
            if other not in places:
                others.append({k: v for k, v in of(other).items() if k != "reached"})
        found[place] = [of(place), *others]
    return found


def lines_with_one_run(experiments: dict) -> dict[tuple, list[tuple]]:
    """Return each (figure, line) -> all that share its run, including itself.

    They have equal configs, which are made into plans and shown in the same way: figures show one
    run by different measures, and a setting that a method ignores gives two lines one run.
    """
    of = {
        (figure, line): (Config(**{**e.base, **fields}), e.runs, e.columns, e.last)
        for figure, e in experiments.items()
        if not e.special
        for line, fields in e.lines.items()
    }
    found: dict = {}
    for place, run in of.items():
        found.setdefault(run, []).append(place)
    return {place: found[run] for place, run in of.items()}


def _with(experiment, found: dict):
    lines, chosen_for = {}, experiment.methods or {line: line for line in experiment.baselines}
    measured = {line: found.get(of, {}) for line, of in chosen_for.items()}
    for line, fields in experiment.lines.items():
        chosen = measured.get(line, {}).get("chosen")
        lines[line] = experiment.with_values(fields, chosen) if chosen else fields
        if chosen and not experiment.methods:
            lines[line + FIRST] = fields
    reached = {n: f["reached"] for n in experiment.lines if (f := found.get(n, {})).get("reached")}
    return dataclasses.replace(
        experiment,
        lines=lines,
        reached=reached,
        at_edge=frozenset(n for n, m in measured.items() if m.get("at_edge")),
        unchosen=frozenset(n for n in experiment.methods if "chosen" not in measured[n]),
    )


# --- the rule


def reach(config: Config, plans: Plans, seeds) -> dict:
    """Return {seed: test accuracy at the minimiser of a convex objective}; {} for other models.

    If the line has no l2, the objective has LEAST_L2.
    """
    if config.model != "logistic":
        return {}
    found = {}
    for seed in seeds:
        plan, _ = plans.build(dataclasses.replace(config, seed=int(seed)))
        weights = "size" if config.weights == "size" else "uniform"
        best = objectives.optimum(
            plan.task,
            plan.fed,
            config.l2 or LEAST_L2,
            weights=weights,
            tolerance=GRADIENT_TOLERANCE,
        )
        found[str(seed)] = float(evaluate(plan.task, best.params, plan.fed)["accuracy"])
    return found


def choose(
    name: str,
    config: Config,
    axes: dict,
    plans: Plans,
    out: Path,
    kept: Path,
    with_values=operator.or_,
) -> Choice:
    """Run the grid of a line.

    Args:
        name: of the line.
        config: of the line.
        axes: field -> its values, increasing.
        plans: as in the experiment.
        out: directory of the grids.
        kept: directory of the runs.
        with_values: as in the experiment.
    """
    axes, grid = dict(axes), {}
    plans = dataclasses.replace(plans, privacy=unaccounted, epsilons=None)

    def run(axes):
        points = [p for p in itertools.product(*axes.values()) if p not in grid]
        configs = {
            _label(name, p): Config(**with_values(vars(config), dict(zip(axes, p)))) for p in points
        }
        folders = {label: out / label.replace(" ", "_").replace("/", "_") for label in configs}
        of = {_label(name, p): p for p in points}
        for label, entries in kept_runs.lines(folders, kept, configs, SEEDS, plans):
            accuracy = [0.0 if e.get("failed") else e["accuracy"]["final"] or 0.0 for e in entries]
            grid[of[label]] = accuracy
            print(f"{label}: {np.mean(accuracy):.4f}", file=sys.stderr)

    best = lambda: max(sorted(grid), key=lambda p: np.mean(grid[p]))
    at_end = lambda n, v: v in (axes[n][0], axes[n][-1]) and (n, v) not in NO_DECAY
    open_at = lambda p: {n: v for n, v in zip(axes, p) if at_end(n, v)}
    run(axes)
    continued = {n: v for n, v in open_at(best()).items() if n != "server_lr"}
    more = NUM_EXTRA_VALUES_WITH_CLIP if "clip_norm" in axes else NUM_EXTRA_RATES
    for n, end in continued.items():
        down = [float(f"{end / STEP[n] ** k:.6g}") for k in range(more, 0, -1)]
        up = [float(f"{end * STEP[n] ** k:.6g}") for k in range(1, more + 1)]
        axes[n] = (*down, *axes[n]) if end == axes[n][0] else (*axes[n], *up)
    if continued:
        run(axes)
    return Choice(
        {n: getattr(config, n) for n in axes},
        dict(zip(axes, best())),
        [dict(zip(axes, p)) | dict(accuracy=a) for p, a in sorted(grid.items())],
        bool(open_at(best())),
    )


def unaccounted(plan, config) -> list:
    """Return no guarantee, which would take longer than the run.

    Only accuracy is used, and the choice is not part of any stated epsilon.
    """
    return []


def _rates(config: Config) -> dict:
    """Return the axes of a baseline without privacy."""
    server = dict(server_lr=tuple(config.server_lr * s for s in SERVER_FACTORS))
    return dict(lr=RATES) | (server if config.algorithm == "addpnfl" else {})


def _label(name, point) -> str:
    return f"{name} " + " ".join(f"{v:g}" for v in point)


def regrid(
    module: str, figure: str, experiment, results: dict, out: Path, kept: Path, lines=(), served=()
) -> dict:
    """Return line -> what baselines.json has of a figure's lines without privacy.

    Args:
        module: the paper.
        figure: its name.
        experiment: with the paper's rates.
        results: {line: Line}, at the first rates.
        out: directory of the grids.
        kept: directory of the runs.
        lines: only these; empty: all.
        served: lines that need no grid, since a line that serves them has a choice.
    """
    plans = _plans(experiment)
    whole, found = without_failures(results), {}
    asked = [line for line in experiment.baselines if line in whole]
    config = lambda line: Config(**{**experiment.base, **experiment.lines[line]})
    for line in asked:
        reached = reach(config(line), plans, whole[line].seeds)
        found[line] = dict(reached=reached) if reached else {}
    marked = dict.fromkeys(untuned(experiment.baselines, whole))
    reached = {line: f["reached"] for line, f in found.items() if f}
    marked |= dict.fromkeys(far_below(reached, whole))
    found = {line: f for line, f in found.items() if line in (lines or found)}
    for line in [n for n in marked if n in found]:
        if line in served:
            print(f"{figure} {line}: rates are chosen, for a line like it", file=sys.stderr)
            continue
        print(f"{module} {figure} {line}: not tuned", file=sys.stderr)
        choice = choose(f"{figure} {line}", config(line), _rates(config(line)), plans, out, kept)
        found[line] |= choice._asdict()
    return found


def choose_all(figure: str, experiment, out: Path, kept: Path, lines=(), served=()) -> dict:
    """Return line -> what baselines.json has of the lines that represent methods.

    Args:
        figure: its name.
        experiment: with methods and a grid.
        out: directory of the grids.
        kept: directory of the runs.
        lines: only these; empty: all.
        served: lines that need no grid, since a line of another figure serves them.
    """
    found = {}
    for line in dict.fromkeys(experiment.methods.values()):
        if line in served:
            print(f"{figure} {line}: rates are chosen, for a line like it", file=sys.stderr)
        elif not lines or line in lines:
            config = Config(**{**experiment.base, **experiment.lines[line]})
            noisy = config.noise_multiplier is not None or config.epsilon is not None
            grid = experiment.grid if isinstance(experiment.grid, dict) else experiment.grid(line)
            axes = {n: v for n, v in grid.items() if noisy or n != "clip_norm"}
            plans, values = _plans(experiment), experiment.with_values
            choice = choose(f"{figure} {line}", config, axes, plans, out, kept, values)
            found[line] = choice._asdict()
    return found


def _plans(experiment) -> Plans:
    return experiment.runs if isinstance(experiment.runs, Plans) else OWN_DRAWS


OWN_DRAWS = Plans(drawn, seeded=True, trace=CURVE)


def main(argv=None) -> int:
    def command(
        module: tyro.conf.Positional[typing.Literal[tuple(PAPERS)]],  # pyright: ignore[reportInvalidTypeForm]  # names of a table
        figures: tyro.conf.Positional[tuple[str, ...]],
        kept: str,
        results: tuple[str, ...] = (),
        lines: tuple[str, ...] = (),
    ) -> int:
        """Choose rates for marked baselines of figures, or rates and clip norms for all methods.

        Args:
            module: the paper.
            figures: of its experiments.
            kept: directory of the runs, as for the experiments.
            results: results.json of each figure at the first rates; default: experiments/results.
            lines: only these, for figures whose grids take long; default: all.
        """
        paper = importlib.import_module(f"experiments.papers.{module}.figures")
        experiments = getattr(paper, "PRINTED_RATES", paper.EXPERIMENTS)
        known = {name: e for name, e in experiments.items() if e.baselines or e.methods}
        if unknown := set(figures) - known.keys():
            have = ", ".join(known) or "none"
            checks.fail(
                "baselines", f"figures of {module} with baselines ({have})", ", ".join(unknown)
            )
        whole = results_file.read(FILE.parent / f"{module}.json")
        if results and len(results) != len(figures):
            checks.fail("baselines", f"results of {len(figures)} figures", f"{len(results)}")
        unstored = {f for f in figures if not known[f].methods} - whole.experiments.keys()
        if unstored and not results:
            checks.fail(
                "baselines",
                "results at the first rates",
                f"none of {', '.join(sorted(unstored))}",
                "Run the figure, and give its results.json as --results.",
            )
        for figure in figures:
            one = known[figure]
            if unknown := set(lines) - {*one.baselines, *one.methods.values()}:
                checks.fail("baselines", f"baselines of {figure}", ", ".join(sorted(unknown)))
        for i, figure in enumerate(figures):
            out = Path(kept).parent / "grids"
            asked = known[figure].methods.values() or known[figure].baselines
            measured = _measured(stored().get(module, {}), known)
            served = [
                line
                for line in asked
                if any("chosen" in other for other in measured[figure, line][1:])
            ]
            if known[figure].methods:
                found = choose_all(figure, known[figure], out, Path(kept), lines, served)
            else:
                one = results_file.read(results[i]) if results else whole.experiments[figure]
                first = {n: one.lines.get(n + FIRST, line) for n, line in one.lines.items()}
                there = {n: stored_line(line, tuple(one.seeds)) for n, line in first.items()}
                found = regrid(module, figure, known[figure], there, out, Path(kept), lines, served)
            every = stored()
            every.setdefault("about", {}).setdefault(module, {})[figure] = environment()
            before = every.setdefault(module, {}).setdefault(figure, {})
            # a line that is not marked today keeps what was chosen for it
            before.update({line: before.get(line, {}) | f for line, f in found.items()})
            write(FILE, as_text(every))
        return 0

    return command_line.called(command, "python -m experiments.harness.baselines", argv)


if __name__ == "__main__":
    sys.exit(main())
