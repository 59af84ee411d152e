"""Own model, in jfl."""

import jax
from flax import linen as nn
from tasks import BATCH, CLIENTS, CLIP, DELTA, LR, NOISE, ROUNDS, STEPS, images, report

import jfl


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), (2, 2)).reshape(-1)
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=not train)(x))


clients, test = images()
fed = jfl.federate(clients, test=test)
task = jfl.models.flax(fed, Net())
batch = jfl.batches.without_replacement(BATCH)
fedavg = jfl.algorithms.fedavg(jfl.grad(task.loss), lr=LR, steps=STEPS, batch=batch)
# privacy
noise = jfl.chain(jfl.clip_l2(CLIP), jfl.total(), jfl.gaussian(NOISE), jfl.divide(CLIENTS))
sampler = jfl.sampling.full(CLIENTS)
plan = jfl.plan(fed, task, fedavg, sampler, release=noise, adjacency="add_remove")
out = jfl.simulate(jax.random.key(0), plan, ROUNDS)
report(accuracy=out.metrics.accuracy[-1], epsilon=jfl.guarantee(plan, ROUNDS, delta=DELTA).epsilon)
