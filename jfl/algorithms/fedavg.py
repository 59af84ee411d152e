"""FedAvg: clients train locally, and the server averages their model differences.

References:
    McMahan et al., "Communication-efficient learning of deep networks from decentralized data",
    AISTATS 2017, Algorithm 1. Reddi et al., "Adaptive federated optimization", ICLR 2021, for other
    server optimizers.
"""

import optax

from .. import local
from ..core.records import Algorithm, Batches, Fn, named
from ..gradients.per_example import Grad
from ..sampling.batches import without_replacement
from .base import Optimizer, Rate, algorithm, train_difference


@named("fedavg.init")
def _init(params, *, step):
    return step.init(params), ()


@named("fedavg.client")
def _client(context, keys, server, client_state, rows, *, work):
    diff, diagnostics = train_difference(work, context, keys, server.params, rows)
    return diff, client_state, diagnostics


@named("fedavg.server")
def _server(context, server, diff, *, step):
    return step(context, server, diff)


def fedavg(
    grad: Grad,
    *,
    lr: Rate = 0.1,
    steps: int = 10,
    batch: Batches = without_replacement(8),
    optimizer: Optimizer = optax.sgd,
    server_lr: Rate = 1.0,
    server_optimizer: Optimizer = optax.sgd,
) -> Algorithm:
    """Return FedAvg: clients train locally, and the server applies their mean model difference.

    The server publishes the mean difference of each round. With a private gradient, each
    participation of a client also releases `steps` noisy gradients.

    Args:
        grad: the gradient of a local step: jfl.grad(loss), or jfl.private_grad(loss, mechanism).
        lr: learning rate of the clients: a number, or a function of round * steps + step.
        batch: the sampler of the rows of a local step.
        optimizer: optimizer of the clients, any optax factory or transformation. optax.adam with a
            private gradient is DP-Adam.
        server_lr: learning rate of the server: a number, or a function of the round.
        server_optimizer: optimizer of the server, any optax factory or transformation. For example,
            optax.adam gives FedAdam, and functools.partial(optax.sgd, momentum=0.9) FedAvgM.

    Other Parameters:
        steps: number of local steps of a client in a round.

    Example:
        >>> import jfl
        >>> fedavg(jfl.grad(lambda w, x, y: (x @ w - y) ** 2), lr=0.5).name
        'fedavg'
    """
    work = local.work(grad, batch, lr=lr, steps=steps, optimizer=optimizer)
    step = dict(step=local.server_step(server_lr, server_optimizer))
    return algorithm(
        Fn(_init, step),
        Fn(_client, dict(work=work)),
        Fn(_server, step),
        releases=work.releases(),
        name="fedavg",
    )
