"""FedSGD: one gradient per client and round, and one step on the server.

References:
    McMahan et al., "Communication-efficient learning of deep networks from decentralized data",
    AISTATS 2017.
"""

import optax

from .. import local
from ..core import pytrees
from ..core.records import Algorithm, Batches, Fn, named
from ..gradients.per_example import Grad
from ..sampling.batches import full
from .base import Optimizer, Rate, algorithm


@named("fedsgd.init")
def _init(params, *, step):
    return step.init(params), ()


@named("fedsgd.client")
def _client(context, keys, server, client_state, rows, *, work):
    _, gradient, _, diagnostics = local.train(work, context, keys, server.params, rows)
    return pytrees.scale(-1.0, gradient), client_state, diagnostics


@named("fedsgd.server")
def _server(context, server, descent, *, step):
    return step(context, server, descent)


def fedsgd(
    grad: Grad,
    *,
    lr: Rate = 0.1,
    batch: Batches = full(),
    server_optimizer: Optimizer = optax.sgd,
) -> Algorithm:
    """Return FedSGD: clients upload the gradient of one batch, and the server takes one step.

    By default, a batch contains all rows of the client. Each participation of a client releases one
    gradient, which is noisy if `grad` is private.

    Other Parameters:
        grad, batch: as in `fedavg`.
        lr: learning rate of the server: a number, or a function of the round.
        server_optimizer: as in `fedavg`.
    """
    work = local.work(grad, batch, lr=1.0, steps=1)
    step = dict(step=local.server_step(lr, server_optimizer, default_lr=0.1, name="lr"))
    return algorithm(
        Fn(_init, step),
        Fn(_client, dict(work=work)),
        Fn(_server, step),
        releases=work.releases(),
        name="fedsgd",
    )
