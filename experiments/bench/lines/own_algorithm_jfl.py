"""Own algorithm, in jfl."""

from typing import Any, NamedTuple

import jax
import optax
from tasks import (
    ALPHA,
    BATCH,
    CLIENTS,
    CLIP,
    DELTA,
    LR,
    NOISE,
    ROUNDS,
    SERVER_LR,
    STEPS,
    flat_images,
    report,
)

import jfl


class State(NamedTuple):
    params: Any
    momentum: Any


def init(params):
    return State(params, optax.tree.zeros_like(params)), ()


def client(context, keys, server, client_state, rows, *, work):
    momentum = optax.tree.scale(1 - ALPHA, server.momentum)
    correct = lambda gradient, params, step: optax.tree.add_scale(momentum, ALPHA, gradient)
    trained, _, _, seen = jfl.local.train(work, context, keys, server.params, rows, correct)
    return optax.tree.sub(trained, server.params), client_state, seen


def server(context, server, diff):
    params = optax.tree.add_scale(server.params, SERVER_LR, diff)
    return State(params, optax.tree.scale(-1 / (LR * STEPS), diff))


clients, test = flat_images()
fed = jfl.federate(clients, test=test)
task = jfl.models.logistic(fed)
batch = jfl.batches.without_replacement(BATCH)
work = jfl.local.work(jfl.grad(task.loss), batch, lr=LR, steps=STEPS)
fedcm = jfl.algorithm(init, jfl.Fn(client, dict(work=work)), server, releases=work.releases())
# privacy
noise = jfl.chain(jfl.clip_l2(CLIP), jfl.total(), jfl.gaussian(NOISE), jfl.divide(CLIENTS))
sampler = jfl.sampling.full(CLIENTS)
plan = jfl.plan(fed, task, fedcm, sampler, release=noise, adjacency="add_remove")
out = jfl.simulate(jax.random.key(0), plan, ROUNDS)
report(accuracy=out.metrics.accuracy[-1], epsilon=jfl.guarantee(plan, ROUNDS, delta=DELTA).epsilon)
