"""FedProx (Li et al., MLSys 2020, Algorithm 2): FedAvg with a pull to the server's model."""

import dataclasses

import optax

from .. import local
from ..core import checks, pytrees
from ..core.records import Algorithm, Batches, Fn, named
from ..gradients.per_example import Grad
from ..sampling.batches import without_replacement
from .base import Number, Optimizer, Rate
from .fedavg import fedavg


@named("fedprox.client")
def _client(context, keys, server, client_state, rows, *, work, mu):
    pull = lambda g, w, s: pytrees.axpy(mu, pytrees.sub(w, server.params), g)
    trained, _, _, diagnostics = local.train(work, context, keys, server.params, rows, pull)
    return pytrees.sub(trained, server.params), client_state, diagnostics


def fedprox(
    grad: Grad,
    *,
    mu: Number = 0.1,
    lr: Rate = 0.1,
    steps: int = 10,
    batch: Batches = without_replacement(8),
    optimizer: Optimizer = optax.sgd,
    server_lr: Rate = 1.0,
    server_optimizer: Optimizer = optax.sgd,
) -> Algorithm:
    """FedAvg whose local steps follow gradient + mu * (w - w_server).

    The pull reads no example: it comes after clipping and noise and costs no privacy.
    All else is as in `fedavg`.

    Args:
        mu: pull to the server's model.  At least 0.
    """
    checks.nonnegative("fedprox", single=True, mu=mu)
    base = fedavg(
        grad,
        lr=lr,
        steps=steps,
        batch=batch,
        optimizer=optimizer,
        server_lr=server_lr,
        server_optimizer=server_optimizer,
    )
    data = dict(base.client.data, mu=checks.scalar(mu))
    return dataclasses.replace(base, client=Fn(_client, data), name="fedprox")
