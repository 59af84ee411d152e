"""MimeLite: local steps with the momentum of the server.

References:
    Karimireddy et al., "Breaking the centralized barrier for cross-device federated learning",
    NeurIPS 2021, Algorithm 2.
"""

import dataclasses
from typing import Any, NamedTuple

from .. import local
from ..core import checks, pytrees
from ..core.options import extends
from ..core.records import Algorithm, Fn, always_traced, named, record
from ..gradients.per_example import Grad
from .base import Number, gradient_at, scalars, traits, variant
from .fedavg import fedavg
from .scaffold import _rate_sum


@record
class State:
    """The server's state."""

    params: Any
    optimizer: Any
    momentum: Any


class Payload(NamedTuple):
    """What a client uploads."""

    diff: Any
    # The gradient at the server's model times the sum of learning rates. Scaled like this, both
    # fields have the units of a model difference, and one clip norm suits both.
    gradient: Any


@named("mimelite.init")
def _init(params, *, step):
    server = step.init(params)
    return State(server.params, server.optimizer, pytrees.zeros_like(params)), ()


@always_traced
@named("mimelite.client")
def _client(context, keys, server, client_state, rows, *, work, momentum):
    mix = lambda gradient, params, step: pytrees.axpy(
        momentum, server.momentum, pytrees.scale(1 - momentum, gradient)
    )
    trained, _, rate_sum, of_steps = local.train(work, context, keys, server.params, rows, mix)
    gradient, of_gradient = gradient_at(work, context, keys, server.params, rows, work.steps)
    payload = Payload(pytrees.sub(trained, server.params), pytrees.scale(rate_sum, gradient))
    return payload, client_state, local.add_counts(of_steps, of_gradient)


@named("mimelite.server")
def _server(context, server, release, *, step, momentum, scale):
    new = step(context, server, release.diff)
    gradient = pytrees.scale(1 / scale(context.round), release.gradient)
    mixed = pytrees.axpy(momentum, server.momentum, pytrees.scale(1 - momentum, gradient))
    return State(new.params, new.optimizer, mixed)


@traits(payload_models=2)  # a difference and a gradient
@extends(fedavg, without=["optimizer"])
def mimelite(grad: Grad, *, momentum: Number = 0.9, **fedavg_options) -> Algorithm:
    """Return MimeLite: local steps use the momentum of the server.

    Local steps follow (1 - momentum) * gradient + momentum * m, where m does not change during a
    round. After the round, the server updates m with the mean of the clients' gradients at the
    server's model. Each client computes this gradient on a separate batch.

    Args:
        grad: gradient of the loss, as in `fedavg`.
        momentum: the weight of m, in [0, 1); 0 is `fedavg`.

    Privacy:
        Each participation releases `steps` + 1 noisy gradients.

    References:
        Karimireddy et al., NeurIPS 2021, Algorithm 2 (MimeLite with SGD and momentum), with a batch
        instead of all rows for the gradient at the server's model.

    Example:
        >>> import jfl
        >>> mimelite(jfl.grad(lambda w, x, y: (x @ w - y) ** 2)).name
        'mimelite'
    """
    decay = scalars(checks.require_nonnegative, "mimelite", momentum=momentum)
    if checks.is_concrete(momentum) and momentum >= 1:
        checks.fail("mimelite", "momentum in [0, 1)", f"{momentum!r}")
    base = fedavg(grad, **fedavg_options)
    work: Any = base.client.data["work"]
    (release,) = base.releases
    scale = Fn(_rate_sum, dict(lr=work.lr), dict(steps=work.steps))
    return variant(
        base,
        "mimelite",
        init=Fn(_init),
        client=Fn(_client, decay),
        server=Fn(_server, dict(decay, scale=scale)),
        releases=(dataclasses.replace(release, count=release.count + 1),),
    )
