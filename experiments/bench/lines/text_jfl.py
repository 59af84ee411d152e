"""Text, in jfl."""

import jax
from tasks import (
    BATCH,
    CLIENTS,
    CLIP,
    DELTA,
    NOISE,
    ROUNDS,
    STEPS,
    TEXT_LR,
    VOCABULARY,
    report,
    speeches,
)

import jfl

clients, test = speeches()
fed = jfl.federate(clients, test=test, classes=VOCABULARY)
task = jfl.models.lstm(fed, embedding=8, cells=(32,))
batch = jfl.batches.without_replacement(BATCH)
fedavg = jfl.algorithms.fedavg(jfl.grad(task.loss), lr=TEXT_LR, steps=STEPS, batch=batch)
# privacy
noise = jfl.chain(jfl.clip_l2(CLIP), jfl.total(), jfl.gaussian(NOISE), jfl.divide(CLIENTS))
sampler = jfl.sampling.full(CLIENTS)
plan = jfl.plan(fed, task, fedavg, sampler, release=noise, adjacency="add_remove")
out = jfl.simulate(jax.random.key(0), plan, ROUNDS)
report(accuracy=out.metrics.accuracy[-1], epsilon=jfl.guarantee(plan, ROUNDS, delta=DELTA).epsilon)
