"""Time a round of each ready-made model, with and without clipping, and report its memory.

    python -m experiments.bench.models [--repeats 7] [--out FILE]
    python -m experiments.bench.models --large [--repeats 3] [--out FILE]

A setting is a federation of several clients, or central DP-SGD: one client with a larger batch.
Small models take rounds of four steps, with 8 clients of 16 rows or 1 client of 64 rows.  With
--large, models of published sizes take rounds of two steps, with 1 client of 16 rows.  Variants are
timed alternately in one process: ordinary training, clipped gradients by book-keeping, the same
with the whole batch at once instead of blocks (small models), and gradients that are formed for
each example.  `ratio` is to the first of the same turn.
"""

import jax
import numpy as np

import jfl
from jfl.gradients.per_example import gradient_path

from . import timing

GRAY, COLOUR = (28, 28, 1), (32, 32, 3)  # shapes of a row; a row of text is (number of tokens,)
SMALL = dict(
    mlp=(GRAY, lambda fed: jfl.models.mlp(fed, (200,))),
    cnn=(GRAY, jfl.models.cnn),
    resnet18=(GRAY, lambda fed: jfl.models.resnet18(fed, width=16)),
    lstm=((40,), lambda fed: jfl.models.lstm(fed, cells=(128,))),
    gpt=((40,), lambda fed: jfl.models.gpt(fed, width=64, layers=2, heads=4)),
)
LARGE = dict(
    resnet18=(COLOUR, jfl.models.resnet18),
    gpt=((128,), lambda fed: jfl.models.gpt(fed, width=512, layers=6, heads=8, tied=True)),
    vit=(COLOUR, lambda fed: jfl.models.vit(fed, layers=12)),
    wideresnet=(COLOUR, jfl.models.wideresnet),
)
SMALL_SETTINGS = dict(federated=dict(clients=8, batch=16), central=dict(clients=1, batch=64))
LARGE_SETTINGS = dict(central=dict(clients=1, batch=16))


def federation(shape, clients):
    r, n = np.random.default_rng(0), 80 * clients
    if len(shape) > 1:
        x, y, classes = r.normal(size=(n, *shape)), r.integers(0, 10, n), 10
    else:
        x = r.integers(0, 86, (n, *shape))
        y, classes = np.roll(x, -1, 1), 86
    data = jfl.datasets.arrays(x, y, x[:8], y[:8], classes=classes)
    return jfl.federate(data, jfl.partition.iid(clients))


def plans(shape, make, clients, batch, large) -> dict:
    fed = federation(shape, clients)
    task = make(fed)
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(batch))
    grads = {"ordinary": jfl.grad(task.loss), "book-keeping": jfl.private_grad(task.loss, chain)}
    if not large:
        grads["whole batch"] = jfl.private_grad(task.loss, chain, microbatch=batch)
    grads["each gradient"] = jfl.private_grad(task.loss, chain, path="vmap")
    rows, steps = jfl.batches.without_replacement(batch), 2 if large else 4
    of = lambda grad: jfl.algorithms.fedavg(grad, lr=0.1, steps=steps, batch=rows)
    every = jfl.sampling.full(clients)
    return {name: jfl.plan(fed, task, of(grad), every) for name, grad in grads.items()}


def main():
    args = timing.arguments(__doc__, None, 7, "--large")
    out = args.out or timing.RESULTS / ("models_large.json" if args.large else "models.json")
    models, settings, rounds = (
        (LARGE, LARGE_SETTINGS, 1) if args.large else (SMALL, SMALL_SETTINGS, 2)
    )
    rows = []
    for model, (shape, make) in models.items():
        for setting, numbers in settings.items():
            made = plans(shape, make, **numbers, large=args.large)
            path = gradient_path(made["book-keeping"])
            compiled = {name: timing.compile_rounds(plan, rounds) for name, plan in made.items()}
            runs = {name: run for name, (run, _) in compiled.items()}
            for name, found in timing.alternate(runs, args.repeats).items():
                row = dict(model=model, setting=setting, variant=name, path=path)
                row |= {k: v / rounds for k, v in found.items() if k != "ratio"}  # of one round
                row |= dict(ratio=found["ratio"], temporary_bytes=compiled[name][1])
                rows.append(row)
                print(rows[-1], flush=True)
            timing.save(out, rows, repeats=args.repeats)
            jax.clear_caches()  # frees the programs


if __name__ == "__main__":
    main()
