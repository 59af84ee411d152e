"""FedSGD (McMahan et al., AISTATS 2017): one gradient a client, one step on the server."""

import optax

from .. import local
from ..core import pytrees
from ..core.records import Fn, named
from ..sampling.batches import full
from .base import algorithm


@named("fedsgd.init")
def _init(params, *, step):
    return step.init(params), ()


@named("fedsgd.client")
def _client(ctx, keys, server, own, rows, *, work):
    _, gradient, _, seen = local.train(work, ctx, keys, server.params, rows)
    return pytrees.scale(-1.0, gradient), own, seen


@named("fedsgd.server")
def _server(ctx, server, descent, *, step):
    return step(ctx, server, descent)


def fedsgd(grad, *, lr=0.1, batch=full(), server_optimizer=optax.sgd):
    """Each client sends the gradient of one batch (default: all its rows); the server takes a step
    of size `lr`.

    Releases the (noisy) gradient, once a round.
    """
    work = local.work(grad, batch, lr=1.0, steps=1)
    step = dict(step=local.server_step(lr, server_optimizer))
    return algorithm(
        Fn(_init, step),
        Fn(_client, dict(work=work)),
        Fn(_server, step),
        releases=work.releases(),
        name="fedsgd",
    )
