"""FedAvg (McMahan et al., AISTATS 2017, Algorithm 1), with any server optimizer (Reddi et al., ICLR
2021)."""

import optax

from .. import local
from ..core import pytrees
from ..core.options import readable
from ..core.records import Algorithm, Batches, Fn, named
from ..gradients.per_example import Grad
from ..sampling.batches import without_replacement
from .base import Optimizer, Rate, algorithm


@named("fedavg.init")
def _init(params, *, step):
    return step.init(params), ()


@named("fedavg.client")
def _client(context, keys, server, client_state, rows, *, work):
    trained, _, _, diagnostics = local.train(work, context, keys, server.params, rows)
    return pytrees.sub(trained, server.params), client_state, diagnostics


@named("fedavg.server")
def _server(context, server, diff, *, step):
    return step(context, server, diff)


@readable
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
    """Clients take `steps` local steps; the server applies the released mean of their differences.

    It releases the difference of models, once a round; under record-level privacy also `steps`
    noisy gradients before it.

    Args:
        grad: what a local step follows: jfl.grad(loss), or jfl.private_grad(loss, mechanism).
        lr: learning rate of the clients: a number, or a schedule of round * steps + step.
        batch: which of its rows a client uses in a step.
        optimizer: of the clients, any optax factory or transformation; optax.adam is DP-Adam.
        server_lr: learning rate of the server: a number, or a schedule of the round.
        server_optimizer: any optax factory or transformation.  FedAvgM is
            functools.partial(optax.sgd, momentum=0.9), FedAdam is optax.adam, FedAdagrad is
            optax.adagrad.

    Other Parameters:
        steps: local steps of a client in a round.

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
