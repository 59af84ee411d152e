"""Time a round of each ready-made model, with and without clipping.

    python -m experiments.bench.models [--repeats 7] [--out FILE]

Eight clients train in four steps of 16 rows each; and one client, which is central DP-SGD, in four
steps of 64 rows.  Variants are timed alternately in one process: ordinary training, clipped
gradients by book-keeping, the same with the whole batch at once instead of blocks, and gradients
that are formed for each example.  `ratio` is to the first of the same turn.
"""

import numpy as np

import jfl
from jfl.gradients.per_example import gradient_path

from . import timing

RESULTS = timing.RESULTS / "models.json"
STEPS = 4
SETTINGS = dict(federated=dict(clients=8, batch=16), central=dict(clients=1, batch=64))


def federation(kind, clients):
    r = np.random.default_rng(0)
    n = 80 * clients
    if kind == "pictures":
        x, y, classes = r.normal(size=(n, 28, 28, 1)), r.integers(0, 10, n), 10
    else:
        x = r.integers(0, 86, (n, 40))
        y, classes = np.roll(x, -1, 1), 86
    data = jfl.datasets.arrays(x, y, x[:8], y[:8], classes=classes)
    return jfl.federate(data, jfl.partition.iid(clients))


MODELS = dict(
    mlp=("pictures", lambda fed: jfl.models.mlp(fed, (200,))),
    cnn=("pictures", jfl.models.cnn),
    resnet18=("pictures", lambda fed: jfl.models.resnet18(fed, width=16)),
    lstm=("text", lambda fed: jfl.models.lstm(fed, cells=(128,))),
    gpt=("text", lambda fed: jfl.models.gpt(fed, width=64, layers=2, heads=4)),
)


def plans(kind, make, clients, batch) -> dict:
    fed = federation(kind, clients)
    task = make(fed)
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(batch))
    grads = {"ordinary": jfl.grad(task.loss), "book-keeping": jfl.private_grad(task.loss, chain)}
    grads["whole batch"] = jfl.private_grad(task.loss, chain, microbatch=batch)
    grads["each gradient"] = jfl.private_grad(task.loss, chain, path="vmap")
    rows = jfl.batches.without_replacement(batch)
    of = lambda grad: jfl.algorithms.fedavg(grad, lr=0.1, steps=STEPS, batch=rows)
    every = jfl.sampling.full(clients)
    return {name: jfl.plan(fed, task, of(grad), every) for name, grad in grads.items()}


def main():
    args = timing.arguments(__doc__, RESULTS, repeats=7)
    rows = []
    for model, (kind, make) in MODELS.items():
        for setting, numbers in SETTINGS.items():
            made = plans(kind, make, **numbers)
            path = gradient_path(made["book-keeping"])
            runs = {name: timing.two_rounds(plan) for name, plan in made.items()}
            for name, found in timing.alternate(runs, args.repeats).items():
                seconds = found["seconds"] / 2  # for two rounds
                row = dict(model=model, setting=setting, variant=name, path=path)
                rows.append(row | dict(seconds=seconds, ratio=found["ratio"]))
                print(rows[-1], flush=True)
    timing.save(args.out, rows, repeats=args.repeats)


if __name__ == "__main__":
    main()
