"""FedProx (Li et al., MLSys 2020, Algorithm 2): FedAvg with a pull to the server's model."""

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
    pull = lambda g, w, s: pytrees.axpy(mu, pytrees.sub(w, server.params), g)
    trained, _, _, diagnostics = local.train(work, context, keys, server.params, rows, pull)
    return pytrees.sub(trained, server.params), client_state, diagnostics


@extends(fedavg)
def fedprox(grad: Grad, *, mu: Number = 0.1, **fedavg_options) -> Algorithm:
    """FedAvg whose local steps follow gradient + mu * (w - w_server).

    The pull reads no example: it comes after clipping and noise and costs no privacy.
    All else is as in `fedavg`.

    Args:
        grad: gradients of the loss, as in `fedavg`.
        mu: pull to the server's model.  At least 0.
    """
    checks.require_nonnegative("fedprox", single=True, mu=mu)
    base = fedavg(grad, **fedavg_options)
    data = dict(base.client.data, mu=checks.as_scalar(mu))
    return dataclasses.replace(base, client=Fn(_client, data), name="fedprox")
