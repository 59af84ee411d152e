"""FedProx: FedAvg with a proximal term in the local steps.

References:
    Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, Algorithm 2.
"""

from ..core import checks
from ..core.options import extends
from ..core.records import Algorithm, Fn, named
from ..gradients.per_example import Grad
from .base import Number, pull_to, scalars, train_difference, variant
from .fedavg import fedavg


@named("fedprox.client")
def _client(context, keys, server, client_state, rows, *, work, mu):
    pull = pull_to(server.params, mu)
    diff, diagnostics = train_difference(work, context, keys, server.params, rows, pull)
    return diff, client_state, diagnostics


@extends(fedavg)
def fedprox(grad: Grad, *, mu: Number = 0.1, **fedavg_options) -> Algorithm:
    """Return FedProx: FedAvg whose local steps follow gradient + mu * (w - w_server).

    The proximal term does not read examples. It is added after clipping and noise, so it does not
    affect privacy. Everything else is as in `fedavg`.

    Args:
        grad: gradient of the loss, as in `fedavg`.
        mu: weight of the proximal term.
    """
    client = Fn(_client, scalars(checks.require_nonnegative, "fedprox", mu=mu))
    return variant(fedavg(grad, **fedavg_options), "fedprox", client=client)
