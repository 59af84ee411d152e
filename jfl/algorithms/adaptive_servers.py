"""FedAvg with the server optimizers of Hsu et al. (2019) and Reddi et al. (ICLR 2021), with their
settings."""

import dataclasses
import functools

import optax

from ..core.options import extends
from ..core.records import Algorithm
from ..gradients.per_example import Grad
from .base import Rate
from .fedavg import fedavg


def _preset(name, grad, optimizer, server_lr, fedavg_options) -> Algorithm:
    made = fedavg(grad, server_lr=server_lr, server_optimizer=optimizer, **fedavg_options)
    return dataclasses.replace(made, name=name)


@extends(fedavg, without=["server_optimizer"])
def fedavgm(
    grad: Grad,
    *,
    server_lr: Rate = 1.0,
    momentum: float = 0.9,
    nesterov: bool = False,
    **fedavg_options,
) -> Algorithm:
    """FedAvg with momentum on the server (Hsu et al., arXiv:1909.06335).

    With nesterov=True, clip_l2 and correlated noise in `release` it is what Google's keyboard
    deploys (Xu et al., ACL 2023): momentum 0.9 on the server, plain SGD on the clients.

    Args:
        grad: as in `fedavg`.
        server_lr: learning rate of the server.
        momentum: of the server, in [0, 1).
        nesterov: whether the momentum is Nesterov's.
    """
    optimizer = functools.partial(optax.sgd, momentum=momentum, nesterov=nesterov)
    return _preset("fedavgm", grad, optimizer, server_lr, fedavg_options)


@extends(fedavg, without=["server_optimizer"])
def fedadam(grad: Grad, *, server_lr: Rate = 0.01, **fedavg_options) -> Algorithm:
    """FedAvg with Adam on the server: b1 = 0.9, b2 = 0.99, eps = 0.001.

    Args:
        grad: as in `fedavg`.
        server_lr: learning rate of the server.

    References:
        Reddi et al., ICLR 2021; its Adam has no correction of the first steps, optax's has.
    """
    optimizer = functools.partial(optax.adam, b1=0.9, b2=0.99, eps=1e-3)
    return _preset("fedadam", grad, optimizer, server_lr, fedavg_options)


@extends(fedavg, without=["server_optimizer"])
def fedyogi(grad: Grad, *, server_lr: Rate = 0.01, **fedavg_options) -> Algorithm:
    """FedAvg with Yogi on the server: b1 = 0.9, b2 = 0.99, eps = 0.001.

    Args:
        grad: as in `fedavg`.
        server_lr: learning rate of the server.

    References:
        Reddi et al., ICLR 2021.
    """
    optimizer = functools.partial(optax.yogi, b1=0.9, b2=0.99, eps=1e-3)
    return _preset("fedyogi", grad, optimizer, server_lr, fedavg_options)


@extends(fedavg, without=["server_optimizer"])
def fedadagrad(grad: Grad, *, server_lr: Rate = 0.01, **fedavg_options) -> Algorithm:
    """FedAvg with Adagrad on the server, eps = 0.001.

    Args:
        grad: as in `fedavg`.
        server_lr: learning rate of the server.

    References:
        Reddi et al., ICLR 2021.
    """
    optimizer = functools.partial(optax.adagrad, initial_accumulator_value=0.0, eps=1e-3)
    return _preset("fedadagrad", grad, optimizer, server_lr, fedavg_options)
