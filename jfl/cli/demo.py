"""The demo: the cost of privacy on handwritten digits of fifty clients.  Copy `settings` to start
your own experiment."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import algorithms
from ..core.options import field
from ..data import datasets, partition
from ..data.federation import federate
from ..engine.plan import plan
from ..engine.sweep import sweep
from ..gradients.per_example import grad, private_grad
from ..models import tasks
from ..privacy.calibration import calibrate
from ..privacy.mechanisms.chain import chain
from ..privacy.mechanisms.stages import clip_l2, divide, gaussian, total
from ..runs import guarantee_rows, pictures, record
from ..runs.record import RunRecord, Stopwatch
from ..sampling import batches, clients

CLIENTS, DELTA, BUDGETS = 50, 1e-5, (2.0, 8.0)
TITLE = "1,797 handwritten digits, 50 clients, Dirichlet(0.3)"
NOTES = (
    "With only fifty clients, hiding all rows of one of them removes much of the signal, so "
    "client-level epsilons are large or accuracies low.",
    "The settings were chosen on these digits; no epsilon covers that choice.",
)


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


class Part(NamedTuple):
    """One setting of the demo: plans that differ in their noise."""

    name: str
    make_plan: Callable  # noise multiplier -> plan
    private: bool
    rounds: int


def settings():
    """Return the partition of the digits, and the parts of the demo."""
    split = partition.dirichlet(clients=CLIENTS, alpha=0.3, min_rows=16)
    fed = federate(datasets.digits(), split)
    network, linear = (
        tasks.mlp(fed, hidden=(64,)),
        tasks.logistic(fed),
    )  # noise grows with every parameter
    everyone = clients.full(CLIENTS)

    def without_privacy(noise_multiplier):
        alg = algorithms.fedavg(
            grad(network.loss), lr=0.5, steps=10, batch=batches.without_replacement(16)
        )
        return plan(fed, network, alg, clients.without_replacement(CLIENTS, 20))

    def record_level(noise_multiplier):
        """Add noise in each local step, which protects one example, also from the server."""
        rows = fed.size.sum() / CLIENTS  # a public constant, not the number of a client's rows
        mechanism = chain(
            clip_l2(1.0), total(), gaussian(noise_multiplier), divide(rows), adjacency="add_remove"
        )
        alg = algorithms.fedavg(
            private_grad(linear.loss, mechanism), lr=1.0, steps=2, batch=batches.full()
        )
        return plan(fed, linear, alg, everyone)

    def client_level(noise_multiplier):
        """Add noise to the aggregate, which protects a client from observers of the models."""
        release = chain(clip_l2(1.0), total(), gaussian(noise_multiplier), divide(CLIENTS))
        alg = algorithms.fedavg(
            grad(linear.loss), lr=1.0, steps=10, batch=batches.without_replacement(16)
        )
        return plan(fed, linear, alg, everyone, release=release, adjacency="add_remove")

    return split, [
        Part("FedAvg", without_privacy, False, 80),
        Part("record-level DP-FedAvg", record_level, True, 30),
        Part("client-level DP-FedAvg", client_level, True, 20),
    ]


def run(part: Part, rounds: int | None = None, seeds: int = 3):
    """Run all budgets and seeds of a part as one sweep; return (noise multiplier, plan, points) per
    budget, and the sweep."""
    rounds, noise = rounds or part.rounds, [0.0]
    if part.private:
        view = guarantee_rows.best(guarantee_rows.all_rows(part.make_plan(1.0), rounds, DELTA))
        noise = [
            calibrate(
                part.make_plan(1.0),
                epsilon=e,
                delta=DELTA,
                rounds=rounds,
                unit=view["unit"],
                view=view["view"],
            )
            for e in BUDGETS
        ]
    result = sweep(part.make_plan, noise_multiplier=noise, seed=range(seeds), rounds=rounds)
    found = []
    for z in noise:
        at = [i for i, p in enumerate(result.points) if p["noise_multiplier"] == z]
        found.append((z, result.plans[at[0]], at))
    return found, result


def main(
    out: Path, rounds: int | None = None, seeds: int = 3, advance=lambda note: None
) -> list[dict]:
    """Run the demo, write summary.json, metrics.csv, manifest.json and demo.png, and return the
    lines of its table."""
    stopwatch = Stopwatch()
    split, parts = settings()
    entries, table, groups, lines = [], [], [], []
    for part in parts:
        advance(part.name)
        clock = Stopwatch()
        found, result = run(part, rounds, seeds)
        took, compiled = (seconds / len(result.points) for seconds in clock.read())
        length = int(result.metrics.round[0, -1])
        for z, made, points in found:
            guarantees = guarantee_rows.all_rows(made, length, DELTA)
            best = guarantee_rows.best(guarantees)
            name = part.name + (f", ε = {best['epsilon']:.3g}" if part.private else "")
            evaluated = record.lists(result.metrics, points[0])["round"]
            eps = (
                guarantee_rows.epsilons(
                    made,
                    evaluated,
                    DELTA,
                    best["unit"],
                    best["view"],
                    best["adjacency"],
                    last=best["epsilon"],
                )
                if part.private
                else None
            )
            for i in points:
                history, seed = record.lists(result.metrics, i), result.points[i]["seed"]
                values = dict(
                    algorithm="fedavg",
                    dataset="digits",
                    clients=CLIENTS,
                    delta=DELTA,
                    rounds=length,
                    noise_multiplier=z if part.private else None,
                )
                one = RunRecord(name, values, seed, history, took, compiled, guarantees)
                entries.append(one.entry())
                table += one.rows(eps)
            accuracy = np.asarray(result.metrics.accuracy)[points]
            groups.append(
                dict(
                    label=f"{part.name}, {guarantee_rows.label([best])}",
                    round=history["round"],
                    accuracy=accuracy,
                    epsilon=best["epsilon"],
                )
            )
            lines.append(
                dict(
                    name=part.name,
                    accuracy=accuracy[:, -1],
                    guarantees=guarantees,
                    seconds=took * len(points),
                )
            )
    advance("writing")
    out.mkdir(parents=True, exist_ok=True)
    record.void(out)  # an earlier demo may have another number of rounds
    record.save(
        out,
        entries,
        table,
        record.manifest(
            [found[0][1]],
            split,
            seconds=dict(zip(("total", "compile"), stopwatch.read())),
            seeds=list(range(seeds)),
        ),
    )
    pictures.draw_accuracy(out / "demo.png", groups, TITLE)
    return lines
