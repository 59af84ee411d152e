"""LoRA, in jfl."""

import jax
from flax import nnx
from tasks import (
    BATCH,
    CLIENTS,
    CLIP,
    DELTA,
    LORA_LR,
    NOISE,
    RANK,
    ROUNDS,
    STEPS,
    backbone,
    flat_images,
    report,
)

import jfl


def net(rngs):
    hidden = nnx.LoRALinear(64, 128, lora_rank=RANK, rngs=rngs)
    return nnx.Sequential(hidden, nnx.relu, nnx.LoRALinear(128, 10, lora_rank=RANK, rngs=rngs))


clients, test = flat_images()
fed = jfl.federate(clients, test=test)
task = jfl.models.nnx(fed, net, trainable="*lora*", params=backbone())
batch = jfl.batches.without_replacement(BATCH)
fedavg = jfl.algorithms.fedavg(jfl.grad(task.loss), lr=LORA_LR, steps=STEPS, batch=batch)
# privacy
noise = jfl.chain(jfl.clip_l2(CLIP), jfl.total(), jfl.gaussian(NOISE), jfl.divide(CLIENTS))
sampler = jfl.sampling.full(CLIENTS)
plan = jfl.plan(fed, task, fedavg, sampler, release=noise, adjacency="add_remove")
out = jfl.simulate(jax.random.key(0), plan, ROUNDS)
report(accuracy=out.metrics.accuracy[-1], epsilon=jfl.guarantee(plan, ROUNDS, delta=DELTA).epsilon)
