"""FedProx (Li et al., MLSys 2020, Algorithm 2): FedAvg with a pull to the server's model."""

import dataclasses

from .. import local
from ..core import checks, pytrees
from ..core.options import extends
from ..core.records import Fn, named
from .fedavg import fedavg


@named("fedprox.client")
def _client(ctx, keys, server, own, rows, *, work, mu):
    pull = lambda g, w, s: pytrees.axpy(mu, pytrees.sub(w, server.params), g)
    trained, _, _, seen = local.train(work, ctx, keys, server.params, rows, pull)
    return pytrees.sub(trained, server.params), own, seen


@extends(fedavg)
def fedprox(grad, *, mu: float = 0.1, **fedavg_options):
    """FedAvg whose local steps follow gradient + mu * (w - w_server).

    The pull reads no example: it comes after clipping and noise and costs no privacy.

    Args:
        mu: pull to the server's model.  At least 0.
        fedavg_options: as of `fedavg`.
    """
    checks.nonnegative("fedprox", single=True, mu=mu)
    base = fedavg(grad, **fedavg_options)
    data = dict(base.client.data, mu=checks.scalar(mu))
    return dataclasses.replace(base, client=Fn(_client, data), name="fedprox")
