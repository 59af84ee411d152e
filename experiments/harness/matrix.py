"""What can be proved: samplers, adjacencies, noise and views, as a table made from the code.

    python -m experiments.harness.matrix        # writes docs/matrix.md

Each cell is the method of a guarantee of a small plan, or a dash where there is none.
"""

import functools
import sys
from pathlib import Path

import numpy as np

import jfl
from jfl.core.errors import ArgumentError, NotAnalysable
from jfl.privacy.mechanisms.chain import ADJACENCIES

PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"
CLIENTS, ROUNDS = 12, 6
SAMPLERS = {
    "full": lambda s: s.full(CLIENTS),
    "without_replacement": lambda s: s.without_replacement(CLIENTS, 4),
    "with_replacement": lambda s: s.with_replacement(CLIENTS, 4),
    "poisson": lambda s: s.poisson(CLIENTS, 0.3),
    "available_poisson": lambda s: s.available_poisson(CLIENTS, 0.3, period=4, capacity=CLIENTS),
    "truncated_poisson": lambda s: s.truncated_poisson(CLIENTS, 0.3, 6),
    "first_responders": lambda s: s.first_responders(CLIENTS, 4, latency_spread=2.0),
    "min_separation": lambda s: s.min_separation(CLIENTS, 4, 3),
    "random_allocation": lambda s: s.random_allocation(CLIENTS, 3, capacity=CLIENTS),
    "balls_in_bins": lambda s: s.balls_in_bins(CLIENTS, 3, capacity=CLIENTS),
    "cyclic_poisson": lambda s: s.cyclic_poisson(CLIENTS, 0.9, 3, capacity=CLIENTS),
}
BATCHES = {
    "full": lambda b: b.full(),
    "without_replacement": lambda b: b.without_replacement(2),
    "with_replacement": lambda b: b.with_replacement(2),
    "poisson": lambda b: b.poisson(1.0, capacity=5),
    "truncated_poisson": lambda b: b.truncated_poisson(1.0, 3),
    "epochs": lambda b: b.epochs(2),
}
HEAD = """# What can be proved

Made from the code by `python -m experiments.harness.matrix`: the method of a guarantee, by sampler,
adjacency, noise and view; a dash where there is none. [What ε means](concepts/epsilon.md) has the
words.

- `gaussian_exact`: composition without any gain from sampling. `pld`, `rdp`: with it. Which is the
  smallest hangs on the numbers: these are of one small plan each.
- `participation mixture`: only a client's absence from a round is a gain.
- `matrix_gaussian`: all rounds are one Gaussian release, as large as the strategy's sensitivity for
  how often and how far apart a client takes part. `banded_cyclic_poisson`: the same where what a
  client adds in two rounds never meets, with the gain from its chance of a round.
- A server sees every upload before the noise of a release, so that noise proves nothing to it.
"""


def federation():
    rows = np.zeros((5 * CLIENTS, 2), np.float32)
    labels = np.arange(len(rows)) % 2
    owned = lambda _: np.arange(len(rows)).reshape(CLIENTS, 5)
    return jfl.federate((rows, labels, rows[:2], labels[:2]), owned)


def method(make, **asked) -> str:
    """Of the guarantee of a plan; a dash where it is refused."""
    try:
        found = jfl.guarantee(make(), ROUNDS, **asked)
    except (ArgumentError, NotAnalysable):
        return "–"
    return f"`{found.method}`".replace(", participation mixture`", "`, participation mixture")


def chain(noise, adjacency=None):
    return jfl.chain(jfl.clip_l2(1.0), jfl.total(), noise, jfl.divide(4.0), adjacency=adjacency)


def of_clients(fed, task):
    """Rows of the table of clients."""
    average = jfl.algorithms.fedavg(
        jfl.grad(task.loss), lr=0.1, steps=1, batch=jfl.batches.without_replacement(2)
    )
    for name, make in SAMPLERS.items():
        sampler = make(jfl.sampling)
        apart = sampler.separation
        strategy = jfl.strategies.banded_toeplitz(
            ROUNDS, 3, participations=-(-ROUNDS // apart), separation=apart
        )
        for adjacency in ADJACENCIES:

            def plan(noise, adjacency=adjacency, sampler=sampler):
                return jfl.plan(
                    fed, task, average, sampler, release=chain(noise), adjacency=adjacency
                )

            def upload(adjacency=adjacency, sampler=sampler):
                noise = chain(jfl.gaussian(3.0), adjacency)
                return jfl.plan(fed, task, average, sampler, upload=noise, secure_aggregation=True)

            models = dict(unit="client", view="third_party")
            cells = [
                method(functools.partial(plan, jfl.gaussian(3.0)), **models),
                method(functools.partial(plan, jfl.correlated(6.0, strategy)), **models),
                method(upload, **models),
                method(upload, unit="client", view="server"),
                method(upload, unit="client", view="aggregate"),
            ]
            if set(cells) != {"–"}:
                yield [f"`{name}`", adjacency, *cells]


def of_examples(fed, task):
    """Rows of the table of examples."""
    for name, make in BATCHES.items():
        for adjacency in ADJACENCIES:

            def plan(adjacency=adjacency, make=make):
                grad = jfl.private_grad(task.loss, chain(jfl.gaussian(3.0), adjacency))
                average = jfl.algorithms.fedavg(grad, lr=0.1, steps=2, batch=make(jfl.batches))
                drawn = jfl.sampling.without_replacement(CLIENTS, 4)
                return jfl.plan(fed, task, average, drawn)

            cells = [method(plan, unit="example", view=v) for v in ("server", "third_party")]
            if set(cells) != {"–"}:
                yield [f"`{name}`", adjacency, *cells]


def table(head, rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page() -> str:
    fed = federation()
    task = jfl.models.logistic(fed)
    clients = table(
        [
            "clients drawn by",
            "adjacency",
            "noise on the release, third party",
            "the same, correlated over rounds",
            "noise on uploads, third party",
            "noise on uploads, server",
            "noise on uploads, secure aggregation",
        ],
        of_clients(fed, task),
    )
    examples = table(
        ["rows of a batch drawn by", "adjacency", "server", "third party"], of_examples(fed, task)
    )
    return (
        f"{HEAD}\n## Unit: client\n\n{clients}\n\n"
        "## Unit: example, noise in every local step, `without_replacement` cohorts\n\n"
        f"{examples}\n"
    )


def main():
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    sys.exit(main())
