"""Rates and clip norms that were chosen for lines: of baselines without privacy, and of all methods
of a figure where our copy of the paper lacks them.

    python -m experiments.harness.baselines chen2024 fig1ab --kept runs/chen2024/kept

The rules stood before what ran by them, but for two changes that were made after a look: the mark
first shared its 5 % among all pairs of a figure, and so hardly marked anything; and the two grids
of Ranaweera et al. were widened, for all methods alike, as most had ended at their ends.

    marked   A line without privacy is "not tuned" if it ends below a private line of its setting by
             more than their paired interval, or more than verdicts.FAR below what its own model
             reaches by L-BFGS on the rows of the same seeds, by an interval (convex models alone).
    grid     A marked line runs at all RATES of its clients, and where its server has a rate of its
             own at that one times 1, 10 and 100.  The seeds are SEEDS, no figure's, and so are
             their splits and draws of the data.  The greatest mean of test accuracies at the end
             is chosen.  If its rate is at an end of the grid, the grid is continued that way by
             half a dozen rates, once.
             What was chosen for a line serves all that share its run, or whose rows and labels have
             the same law by a proof (`Experiment.same_law`), and have no choice of their own.
    report   The figure has the line at the chosen rates, under its name, and what it was before as
             "NAME, first rates".  It stays as it comes out, marked again if it is to be.
    all      Where `Experiment.methods` says so, every method of a figure is chosen, with privacy or
             without: at all of `Experiment.grid`, on the same seeds, for the line that stands for
             it, with the middle noise or setting.  What is chosen holds for all lines of the
             method.  Where runs are long the grid may be a part of RATES (`around`), of the same
             length for all.  A grid with clip norms is continued by two values along an axis whose
             end is best, once.  The figure has these lines alone, and what L-BFGS reaches is not
             asked.

What was chosen is in experiments/results/baselines.json, from which the figures take their rates.
"""

import dataclasses
import importlib
import itertools
import json
import math
import sys
import typing
from collections import ChainMap
from pathlib import Path

import numpy as np
import tyro

from jfl.analysis import heterogeneity
from jfl.core import checks
from jfl.core.files import write
from jfl.engine.metrics import evaluate
from jfl.runs.checkpoint import environment
from jfl.runs.config import Config

from . import command_line, kept_runs
from . import results as results_file
from .programs import Plans, drawn
from .results import PAPERS
from .runner import FIRST, stored_line, without_failures
from .shared_runs import alike
from .verdicts import far_below, untuned

FILE = Path(__file__).parents[1] / "results" / "baselines.json"
RATES = tuple(round(10 ** (k / 3), 6) for k in range(-9, 4))  # 0.001 to 10
MORE = 6  # rates that a grid is continued by
FEWER = 2  # values that a grid with clip norms is continued by
STEP = dict(lr=10 ** (1 / 3), clip_norm=2.0)  # from a value to the next
SERVER = (1.0, 10.0, 100.0)  # times the server's rate
SEEDS = (1000, 1001)
LEAST_L2 = 1e-4  # without one there may be no minimiser
TOLERANCE = 1e-3  # of the gradient's norm, by L-BFGS: accuracy needs no more


class Choice(typing.NamedTuple):
    """The rates of a line, and the grid they were chosen from."""

    first: dict  # fields: of the line before
    chosen: dict  # fields
    grid: list[dict]  # fields and "accuracy" of each seed
    at_edge: bool  # on any axis of the grid, continued where it was


def around(rate: float, each_side: int = 3) -> tuple:
    """The value of RATES that is nearest to a rate, and so many on each side of it."""
    middle = min(range(len(RATES)), key=lambda i: abs(math.log(RATES[i] / rate)))
    return RATES[max(0, middle - each_side) : middle + each_side + 1]


# --- what figures take


def stored() -> dict:
    """paper -> figure -> line -> what was measured."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def with_chosen(module: str, experiments: dict) -> dict:
    """The experiments of a paper with the chosen rates of their baselines, and the first ones
    beside them."""
    found, given = {}, stored().get(module, {})
    for (figure, line), (own, *others) in _measured(given, experiments).items():
        reached = ChainMap(own.get("reached", {}), *(m.get("reached", {}) for m in others))
        of_line = {**ChainMap(own, *others), "reached": dict(reached)}
        found.setdefault(figure, {})[line] = of_line
    return {name: _with(e, found.get(name, {})) for name, e in experiments.items()}


def _measured(given: dict, experiments: dict) -> dict:
    """(figure, line) -> what was measured for it itself, then for all that serve it as well: lines
    that share its run, and those whose data have the same law, but for what L-BFGS reached on their
    own draws."""
    known = {name: e for name, e in experiments.items() if e.baselines or e.methods}
    found, shared, of_law = {}, alike(known), {}
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


def _with(experiment, found: dict):
    lines, chosen_for = {}, experiment.methods or {line: line for line in experiment.baselines}
    measured = {line: found.get(of, {}) for line, of in chosen_for.items()}
    for line, fields in experiment.lines.items():
        chosen = measured.get(line, {}).get("chosen")
        lines[line] = fields | chosen if chosen else fields
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
    """{seed: test accuracy at the minimiser of a convex line's objective}; {} of another model.

    Where the line has no l2, the objective has LEAST_L2.
    """
    if config.model != "logistic":
        return {}
    found = {}
    for seed in seeds:
        plan, _ = plans.build(dataclasses.replace(config, seed=int(seed)))
        weights = "size" if config.weights == "size" else "uniform"
        best = heterogeneity.optimum(
            plan.task, plan.fed, config.l2 or LEAST_L2, weights=weights, tolerance=TOLERANCE
        )
        found[str(seed)] = float(evaluate(plan.task, best.params, plan.fed).accuracy)
    return found


def choose(name: str, config: Config, axes: dict, plans: Plans, out: Path, kept: Path) -> Choice:
    """Run the grid of a line.

    Args:
        name: of the line.
        config: of it.
        axes: field -> its values, upwards.
        plans: as of the experiment.
        out: directory of the grids.
        kept: directory of the runs.
    """
    axes, grid = dict(axes), {}
    plans = dataclasses.replace(plans, privacy=unaccounted, epsilons=None)

    def run(axes):
        points = [p for p in itertools.product(*axes.values()) if p not in grid]
        configs = {
            _label(name, p): dataclasses.replace(config, **dict(zip(axes, p))) for p in points
        }
        folders = {label: out / label.replace(" ", "_").replace("/", "_") for label in configs}
        of = {_label(name, p): p for p in points}
        for label, entries in kept_runs.lines(folders, kept, configs, SEEDS, plans):
            accuracy = [0.0 if e.get("failed") else e["accuracy"]["final"] or 0.0 for e in entries]
            grid[of[label]] = accuracy
            print(f"{label}: {np.mean(accuracy):.4f}", file=sys.stderr)

    best = lambda: max(sorted(grid), key=lambda p: np.mean(grid[p]))
    open_at = lambda p: {n: v for n, v in zip(axes, p) if v in (axes[n][0], axes[n][-1])}
    run(axes)
    continued = {n: v for n, v in open_at(best()).items() if n != "server_lr"}
    more = FEWER if "clip_norm" in axes else MORE
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
    """No guarantee, which would take longer than the run.

    Of a grid the accuracy alone is looked at, and its choice is part of no stated epsilon.
    """
    return []


def _rates(config: Config) -> dict:
    """The axes of a baseline without privacy."""
    server = dict(server_lr=tuple(config.server_lr * s for s in SERVER))
    return dict(lr=RATES) | (server if config.algorithm == "addpnfl" else {})


def _label(name, point) -> str:
    return f"{name} " + " ".join(f"{v:g}" for v in point)


def regrid(
    module: str, figure: str, experiment, results: dict, out: Path, kept: Path, lines=(), served=()
) -> dict:
    """line -> what baselines.json has of it, of the figure's lines without privacy.

    Args:
        module: the paper.
        figure: its name.
        experiment: of the module, as the paper has it.
        results: {line: Line}, at the first rates.
        out: directory of the grids.
        kept: directory of the runs.
        lines: only these; all where none is given.
        served: lines for whose run, or law, another line has chosen rates: no grid of their own.
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
    """line -> what baselines.json has of it, of the lines that stand for the methods of a figure.

    Args:
        figure: its name.
        experiment: as the paper has it, with methods and a grid.
        out: directory of the grids.
        kept: directory of the runs.
        lines: only these; all where none is given.
        served: lines for whose run, or law, another figure has chosen: no grid of their own.
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
            choice = choose(f"{figure} {line}", config, axes, _plans(experiment), out, kept)
            found[line] = choice._asdict()
    return found


def _plans(experiment) -> Plans:
    return experiment.runs if isinstance(experiment.runs, Plans) else OWN_DRAWS


OWN_DRAWS = Plans(drawn, seeded=True, trace=(("curve", "accuracy"), ("round", "round")))


def main(argv=None) -> int:
    def command(
        module: tyro.conf.Positional[typing.Literal[tuple(PAPERS)]],  # pyright: ignore[reportInvalidTypeForm]  # names of a table
        figures: tyro.conf.Positional[tuple[str, ...]],
        kept: str,
        results: tuple[str, ...] = (),
        lines: tuple[str, ...] = (),
    ) -> int:
        """Choose rates for the baselines of figures, where the rule marks them, and rates and clip
        norms for all methods of those of which our copy of the paper lacks them.

        Args:
            module: the paper.
            figures: of its experiments.
            kept: directory of the runs, as of the experiments.
            results: results.json of each figure at the first rates; default what
                experiments/results holds.
            lines: only these, of figures whose grids take long; all where none is given.
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
            write(FILE, json.dumps(every, indent=1, ensure_ascii=False) + "\n")
        return 0

    return command_line.called(command, "python -m experiments.harness.baselines", argv)


if __name__ == "__main__":
    sys.exit(main())
