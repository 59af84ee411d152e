"""Own data, in jfl."""

import jax
import numpy as np
from tasks import BATCH, CLIENTS, CLIP, DELTA, HOLDOUT, LR, NOISE, ROUNDS, STEPS, owned, report

import jfl

x, y, owner = owned()
rows = {name: (x[owner == name], y[owner == name]) for name in np.unique(owner)}
fed = jfl.federate(rows, holdout=HOLDOUT)
task = jfl.models.logistic(fed)
batch = jfl.batches.without_replacement(BATCH)
fedavg = jfl.algorithms.fedavg(jfl.grad(task.loss), lr=LR, steps=STEPS, batch=batch)
# privacy
noise = jfl.chain(jfl.clip_l2(CLIP), jfl.total(), jfl.gaussian(NOISE), jfl.divide(CLIENTS))
sampler = jfl.sampling.full(CLIENTS)
plan = jfl.plan(fed, task, fedavg, sampler, release=noise, adjacency="add_remove")
out = jfl.simulate(jax.random.key(0), plan, ROUNDS)
report(
    accuracy=out.metrics.client_accuracy[-1],
    tenth=out.metrics.client_percentiles[-1][0],
    epsilon=jfl.guarantee(plan, ROUNDS, delta=DELTA).epsilon,
)
