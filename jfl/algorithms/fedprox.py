"""FedProx: FedAvg with a proximal term in the local steps.

References:
    Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, Algorithm 2.
"""

import dataclasses

from .. import local
from ..core import checks, pytrees
from ..core.options import extends
from ..core.records import Algorithm, Fn, named
from ..gradients.per_example import Grad
from .base import Number
from .fedavg import fedavg


@named("fedprox.client")
def _client(context, keys, server, client_state, rows, *, work, mu):
    pull = lambda gradient, params, step: pytrees.axpy(
        mu, pytrees.sub(params, server.params), gradient
    )
    trained, _, _, diagnostics = local.train(work, context, keys, server.params, rows, pull)
    return pytrees.sub(trained, server.params), client_state, diagnostics


@extends(fedavg)
def fedprox(grad: Grad, *, mu: Number = 0.1, **fedavg_options) -> Algorithm:
    """Return FedProx: FedAvg whose local steps follow gradient + mu * (w - w_server).

    The proximal term does not read examples. It is added after clipping and noise, so it does not
    affect privacy. Everything else is as in `fedavg`.

    Args:
        grad: gradient of the loss, as in `fedavg`.
        mu: weight of the proximal term.
    """
    checks.require_nonnegative("fedprox", single=True, mu=mu)
    base = fedavg(grad, **fedavg_options)
    data = dict(base.client.data, mu=checks.as_scalar(mu))
    return dataclasses.replace(base, client=Fn(_client, data), name="fedprox")
