"""What clipping costs each ready-made model: seconds of a round.

    python -m experiments.bench.models [--repeats 7] [--out FILE]

Eight clients, four steps of 16 rows.  Variants take turns in one process: ordinary training,
clipped gradients by book-keeping, and by forming each example's gradient; `ratio` is to the first
of the same turn.
"""

import numpy as np

import jfl
from jfl.gradients.per_example import gradient_path

from . import timing

RESULTS = timing.RESULTS / "models.json"
CLIENTS, BATCH, STEPS = 8, 16, 4


def federation(kind):
    r = np.random.default_rng(0)
    n = 40 * CLIENTS
    if kind == "pictures":
        x, y, classes = r.normal(size=(n, 28, 28, 1)), r.integers(0, 10, n), 10
    else:
        x = r.integers(0, 86, (n, 40))
        y, classes = np.roll(x, -1, 1), 86
    data = jfl.datasets.arrays(x, y, x[:8], y[:8], classes=classes)
    return jfl.federate(data, jfl.partition.iid(CLIENTS))


MODELS = dict(
    mlp=("pictures", lambda fed: jfl.models.mlp(fed, (200,))),
    cnn=("pictures", jfl.models.cnn),
    resnet18=("pictures", lambda fed: jfl.models.resnet18(fed, width=16)),
    lstm=("text", lambda fed: jfl.models.lstm(fed, cells=(128,))),
    gpt=("text", lambda fed: jfl.models.gpt(fed, width=64, layers=2, heads=4)),
)


def plans(kind, make) -> dict:
    fed = federation(kind)
    task = make(fed)
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(BATCH))
    grads = {"ordinary": jfl.grad(task.loss), "book-keeping": jfl.private_grad(task.loss, chain)}
    grads["each gradient"] = jfl.private_grad(task.loss, chain, path="vmap")
    batch = jfl.batches.without_replacement(BATCH)
    of = lambda grad: jfl.algorithms.fedavg(grad, lr=0.1, steps=STEPS, batch=batch)
    every = jfl.sampling.full(CLIENTS)
    return {name: jfl.plan(fed, task, of(grad), every) for name, grad in grads.items()}


def main():
    args = timing.arguments(__doc__, RESULTS, repeats=7)
    rows = []
    for model, (kind, make) in MODELS.items():
        made = plans(kind, make)
        found = timing.alternate(
            {name: timing.two_rounds(plan) for name, plan in made.items()}, args.repeats
        )
        path = gradient_path(made["book-keeping"])
        for name, numbers in found.items():
            seconds = numbers["seconds"] / 2  # for two rounds
            rows.append(
                dict(model=model, variant=name, path=path, seconds=seconds, ratio=numbers["ratio"])
            )
            print(rows[-1], flush=True)
    timing.save(args.out, rows, repeats=args.repeats)


if __name__ == "__main__":
    main()
