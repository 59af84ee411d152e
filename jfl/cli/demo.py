"""The command `jfl demo`: the cost of privacy on handwritten digits of fifty clients."""

import dataclasses
from pathlib import Path

from ..core import checks
from ..core.options import field
from ..engine.sweep import points_of
from ..runs import build, directory, record
from ..runs import sweep as sweeps
from ..runs.config import Config
from . import console
from .options import parse

BUDGETS = (2.0, 8.0)
TITLE = "1,797 handwritten digits, 50 clients, Dirichlet(0.3)"
NOTES = (
    "With only fifty clients, hiding all rows of one of them removes much of the signal, so "
    "client-level epsilons are large or accuracies low.",
    "The settings were chosen on these digits; no epsilon covers that choice.",
)
DIGITS = Config(dataset="digits", partition="dirichlet", alpha=0.3, min_rows=16, clients=50)
# The noise of a linear model is smaller than that of a network, since it has fewer parameters.
LINEAR = dataclasses.replace(DIGITS, model="logistic", lr=1.0, adjacency="add_remove")
PARTS = {
    "FedAvg": dataclasses.replace(DIGITS, model="mlp", lr=0.5, cohort=20, rounds=80),
    # noise in each local step, which protects one example, also from the server
    "record-level DP-FedAvg": dataclasses.replace(
        LINEAR, unit="example", batch_sampler="full", steps=2, rounds=30
    ),
    # noise on the aggregate, which protects a client from observers of the models
    "client-level DP-FedAvg": dataclasses.replace(LINEAR, unit="client", rounds=20),
}


@dataclasses.dataclass
class Demo:
    """Show the cost of privacy on handwritten digits of fifty clients: without privacy, at record
    level and at client level.

    example: jfl demo --out runs/demo
    """

    out: Path = field(
        Path("runs/demo"),
        "directory for summary.json, metrics.csv, manifest.json and the picture; it replaces an "
        "earlier demo",
    )
    rounds: int | None = field(None, "fewer rounds than usual, for a quick try")
    seeds: int = field(3, "runs of each setting")


def demo(arguments: list[str]) -> None:
    """Run `jfl demo`: run each part as a sweep, write the files and print the table."""
    command = parse(Demo, arguments, "jfl demo")
    out, seeds, rounds = command.out, command.seeds, command.rounds
    checks.require_integer("jfl demo", seeds=seeds, rounds=1 if rounds is None else rounds)
    directory.checked(out, resume=(out / "demo.png").exists())
    stopwatch, runs = record.Stopwatch(), []
    with console.progress() as bar:
        task = bar.add_task("jfl demo", total=len(PARTS), note="")
        for name, config in PARTS.items():
            bar.update(task, note=name)
            config = dataclasses.replace(config, rounds=rounds or config.rounds)
            epsilons = [None] if config.unit is None else list(BUDGETS)
            axes = dict(epsilon=epsilons, seed=list(range(seeds)))
            points = sweeps.checked_points(config, points_of(axes))
            lines = sweeps.compute(sweeps.Block(points, len(points)))
            for run in sweeps.shown_runs(points, lines):
                budget = f", ε = {run.guarantee['epsilon']:.3g}" if run.guarantee else ""
                named = dataclasses.replace(run.record, name=f"{name}{budget}", point={})
                runs.append(run._replace(record=named, name=name))
            bar.update(task, advance=1, note="done")
    seconds, compiled = stopwatch.read()
    out.mkdir(parents=True, exist_ok=True)
    record.void(out)  # an earlier demo may have another number of rounds
    manifest = record.manifest(
        [points[0].plan],
        build.the_partition(DIGITS),
        seconds=dict(total=seconds, compile=compiled),
        seeds=list(range(seeds)),
    )
    entries = record.save_results(out, runs, manifest, "demo.png", TITLE)
    title = f"jfl demo: {seeds} seeds each, {seconds:.0f} s with compilation"
    console.results(entries, out, title, NOTES)
