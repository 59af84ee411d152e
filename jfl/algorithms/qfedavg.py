"""q-FedAvg (Li et al., ICLR 2020, Algorithm 2): clients with a larger loss count more."""

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from .. import local
from ..core import checks, pytrees
from ..core.options import PYTHON_ONLY, extends
from ..core.records import Algorithm, Fn, Mechanism, Release, always_traced, named
from ..gradients.per_example import Grad, private_grad
from ..gradients.per_example import grad as plain_grad
from .base import Number, algorithm, traits
from .fedavg import fedavg

LEAST = 1e-3  # of what h would be for a loss of 1: below it, noise has made h useless


class Payload(NamedTuple):
    direction: Any  # F^q times the difference
    weight: Any  # h / L: F^q + q F^(q - 1) L ||difference||^2


@named("qfedavg.times")
def _times(factor, x, y, *, loss, params):
    """A loss whose gradient by `factor` is the loss of `params`."""
    return factor * loss(params, x, y)


@always_traced
@named("qfedavg.client")
def _client(context, keys, server, client_state, rows, *, work, measure, q):
    trained, _, rates, diagnostics = local.train(work, context, keys, server.params, rows)
    of_model = dataclasses.replace(
        measure, loss=Fn(_times, dict(loss=measure.loss, params=server.params))
    )
    look = dataclasses.replace(work, grad=of_model, steps=1)
    _, loss, _, seen = local.train(
        look, context, keys, jnp.ones(()), rows, moving=0.0, first=work.steps
    )
    loss = jnp.maximum(loss, 1e-6)
    diff = pytrees.sub(trained, server.params)
    lipschitz = work.steps / rates
    squares = jnp.square(pytrees.norm(diff))
    weight = loss**q + q * loss ** (q - 1) * lipschitz * squares
    return (
        Payload(pytrees.scale(loss**q, diff), weight),
        client_state,
        local.both(diagnostics, seen),
    )


@named("qfedavg.server")
def _server(context, server, release, *, step):
    return step(
        context, server, pytrees.scale(1 / jnp.maximum(release.weight, LEAST), release.direction)
    )


@traits(example_noise=None)  # a config cannot say how the loss is released
@extends(fedavg, without=["optimizer"])
def qfedavg(
    grad: Grad,
    *,
    q: Number = 1.0,
    loss_mechanism: Annotated[Mechanism | None, PYTHON_ONLY] = None,
    **fedavg_options,
) -> Algorithm:
    """FedAvg for sum F_i^(q + 1) / (q + 1): the larger q, the more alike the clients' losses.

    A client's weight follows from its loss on one more batch, at the model that it was sent.

    Args:
        grad: gradients of the loss, as in `fedavg`.
        q: fairness.  At least 0; 0 is `fedavg`.
        loss_mechanism: a chain by which a client's mean loss is released, chain(clip_l2(most),
            total(), gaussian(z), divide(batch)), where a loss above `most` counts as `most`.
            Needed beside a private `grad`.

    Privacy:
        it releases `steps` noisy gradients and one noisy loss a participation.  Under client-level
        privacy both parts of an upload share the clip of `release`.

    References:
        Li et al., ICLR 2020, Algorithm 2, with 1 / L the mean learning rate.

    Example:
        >>> import jfl
        >>> loss = lambda w, x, y: (x @ w - y) ** 2
        >>> noisy = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(2.0), jfl.divide(8))
        >>> len(qfedavg(jfl.private_grad(loss, noisy), loss_mechanism=noisy).releases)
        2
    """
    checks.require_nonnegative("qfedavg", single=True, q=q)
    if loss_mechanism is not None and not isinstance(loss_mechanism, Mechanism):
        checks.fail("qfedavg", "loss_mechanism, a chain", checks.short_repr(loss_mechanism))
    base = fedavg(grad, **fedavg_options)
    work = base.client.data["work"]
    if work.grad.mechanism is not None and loss_mechanism is None:
        checks.fail(
            "qfedavg",
            "loss_mechanism beside a private grad",
            "none",
            "A client's weight follows from its loss, so that is released too.",
        )
    loss = work.grad.loss
    measure = plain_grad(loss) if loss_mechanism is None else private_grad(loss, loss_mechanism)
    return algorithm(
        base.init,
        Fn(_client, dict(work=work, measure=measure, q=checks.as_scalar(q))),
        Fn(_server, base.server.data),
        releases=(*base.releases, Release(loss_mechanism, work.batches, 1)),
        name="qfedavg",
    )
