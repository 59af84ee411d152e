"""MimeLite (Karimireddy et al., NeurIPS 2021, Algorithm 2): local steps with the momentum of the
server."""

import dataclasses
from typing import Any, NamedTuple

from .. import local
from ..core import checks, pytrees
from ..core.options import extends
from ..core.records import Algorithm, Fn, always_traced, named, record
from ..gradients.per_example import Grad
from .base import Number, algorithm, traits
from .fedavg import fedavg
from .scaffold import _rates


@record
class State:
    params: Any
    optimizer: Any
    momentum: Any


class Payload(NamedTuple):
    diff: Any
    # the gradient at the server's model times the sum of learning rates: so it shares the
    # difference's units, and a clip
    gradient: Any


@named("mimelite.init")
def _init(params, *, step):
    server = step.init(params)
    return State(server.params, server.optimizer, pytrees.zeros_like(params)), ()


@always_traced
@named("mimelite.client")
def _client(context, keys, server, client_state, rows, *, work, momentum):
    mix = lambda g, w, s: pytrees.axpy(momentum, server.momentum, pytrees.scale(1 - momentum, g))
    trained, _, rates, diagnostics = local.train(work, context, keys, server.params, rows, mix)
    look = dataclasses.replace(work, steps=1)
    _, gradient, _, seen = local.train(
        look, context, keys, server.params, rows, moving=0.0, first=work.steps
    )
    payload = Payload(pytrees.sub(trained, server.params), pytrees.scale(rates, gradient))
    return payload, client_state, local.both(diagnostics, seen)


@named("mimelite.server")
def _server(context, server, release, *, step, momentum, scale):
    moved = step(context, local.Server(server.params, server.optimizer), release.diff)
    gradient = pytrees.scale(1 / scale(context.round), release.gradient)
    mixed = pytrees.axpy(momentum, server.momentum, pytrees.scale(1 - momentum, gradient))
    return State(moved.params, moved.optimizer, mixed)


@traits(payload_models=2)  # a difference and a gradient
@extends(fedavg, without=["optimizer"])
def mimelite(grad: Grad, *, momentum: Number = 0.9, **fedavg_options) -> Algorithm:
    """FedAvg whose local steps follow (1 - momentum) gradient + momentum * m, where m is the
    server's and stays as it is during a round.

    The server's m is moved by the mean of the clients' gradients at its own model, of one more
    batch each.

    Args:
        grad: gradients of the loss, as in `fedavg`.
        momentum: in [0, 1); 0 is `fedavg`.

    Privacy:
        it releases `steps` + 1 noisy gradients a participation.

    References:
        Karimireddy et al., NeurIPS 2021, Algorithm 2 (MimeLite with SGD and momentum).  A batch
        takes the place of all rows in the statistics.

    Example:
        >>> import jfl
        >>> mimelite(jfl.grad(lambda w, x, y: (x @ w - y) ** 2)).name
        'mimelite'
    """
    checks.require_nonnegative("mimelite", single=True, momentum=momentum)
    if checks.is_concrete(momentum) and momentum >= 1:
        checks.fail("mimelite", "momentum in [0, 1)", f"{momentum!r}")
    base = fedavg(grad, **fedavg_options)
    work, share = base.client.data["work"], checks.as_scalar(momentum)
    (release,) = base.releases
    rates = Fn(_rates, dict(lr=work.lr), dict(steps=work.steps))
    return algorithm(
        Fn(_init, base.server.data),
        Fn(_client, dict(work=work, momentum=share)),
        Fn(_server, dict(base.server.data, momentum=share, scale=rates)),
        releases=(dataclasses.replace(release, count=release.count + 1),),
        name="mimelite",
    )
