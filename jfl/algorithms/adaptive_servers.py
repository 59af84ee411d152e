"""FedAvg with momentum or an adaptive optimizer on the server, with the settings of the papers.

References:
    Hsu et al., "Measuring the effects of non-identical data distribution for federated visual
    classification", arXiv:1909.06335. Reddi et al., "Adaptive federated optimization", ICLR 2021.
"""

import functools

import optax

from ..core.options import extends
from ..core.records import Algorithm
from ..gradients.per_example import Grad
from .base import Rate, variant
from .fedavg import fedavg


def _fedavg_with_server(name, grad, optimizer, server_lr, fedavg_options) -> Algorithm:
    """Return FedAvg with a server optimizer, under another name."""
    base = fedavg(grad, server_lr=server_lr, server_optimizer=optimizer, **fedavg_options)
    return variant(base, name)


@extends(fedavg, without=["server_optimizer"])
def fedavgm(
    grad: Grad,
    *,
    server_lr: Rate = 1.0,
    momentum: float = 0.9,
    nesterov: bool = False,
    **fedavg_options,
) -> Algorithm:
    """Return FedAvgM: FedAvg with momentum on the server.

    Google's keyboard uses this algorithm with nesterov=True, momentum=0.9 and plain SGD on the
    clients, in a plan whose `release` clips and adds correlated noise (Xu et al., ACL 2023).

    Args:
        grad: as in `fedavg`.
        server_lr: learning rate of the server.
        momentum: momentum of the server, in [0, 1).
        nesterov: whether to use Nesterov momentum.

    References:
        Hsu et al., arXiv:1909.06335.
    """
    optimizer = functools.partial(optax.sgd, momentum=momentum, nesterov=nesterov)
    return _fedavg_with_server("fedavgm", grad, optimizer, server_lr, fedavg_options)


@extends(fedavg, without=["server_optimizer"])
def fedadam(grad: Grad, *, server_lr: Rate = 0.01, **fedavg_options) -> Algorithm:
    """Return FedAvg with Adam on the server: b1 = 0.9, b2 = 0.99, eps = 0.001.

    Args:
        grad: as in `fedavg`.
        server_lr: learning rate of the server.

    References:
        Reddi et al., ICLR 2021. Unlike optax's Adam, theirs has no bias correction.
    """
    optimizer = functools.partial(optax.adam, b1=0.9, b2=0.99, eps=1e-3)
    return _fedavg_with_server("fedadam", grad, optimizer, server_lr, fedavg_options)


@extends(fedavg, without=["server_optimizer"])
def fedyogi(grad: Grad, *, server_lr: Rate = 0.01, **fedavg_options) -> Algorithm:
    """Return FedAvg with Yogi on the server: b1 = 0.9, b2 = 0.99, eps = 0.001.

    Args:
        grad: as in `fedavg`.
        server_lr: learning rate of the server.

    References:
        Reddi et al., ICLR 2021.
    """
    optimizer = functools.partial(optax.yogi, b1=0.9, b2=0.99, eps=1e-3)
    return _fedavg_with_server("fedyogi", grad, optimizer, server_lr, fedavg_options)


@extends(fedavg, without=["server_optimizer"])
def fedadagrad(grad: Grad, *, server_lr: Rate = 0.01, **fedavg_options) -> Algorithm:
    """Return FedAvg with Adagrad on the server: eps = 0.001.

    Args:
        grad: as in `fedavg`.
        server_lr: learning rate of the server.

    References:
        Reddi et al., ICLR 2021.
    """
    optimizer = functools.partial(optax.adagrad, initial_accumulator_value=0.0, eps=1e-3)
    return _fedavg_with_server("fedadagrad", grad, optimizer, server_lr, fedavg_options)
