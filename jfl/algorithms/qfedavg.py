"""q-FedAvg: clients with a larger loss have more weight.

References:
    Li et al., "Fair resource allocation in federated learning", ICLR 2020, Algorithm 2.
"""

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from .. import local
from ..core import checks, pytrees
from ..core.options import PYTHON_ONLY, extends
from ..core.records import Algorithm, Fn, Mechanism, Release, always_traced, named
from ..gradients.per_example import Grad, private_grad
from ..gradients.per_example import grad as plain_grad
from .base import Number, gradient_at, scalars, traits, variant
from .fedavg import fedavg

# The server divides by the released weight. If noise made the weight smaller than this number, it
# divides by this number.
MIN_WEIGHT = 1e-3


class Payload(NamedTuple):
    """What a client uploads."""

    direction: Any  # F^q times the model difference, for the client's loss F
    # F^q + q F^(q - 1) L ||difference||^2, h / L in the paper; 1 / L is the mean learning rate
    weight: Any


@named("qfedavg.times")
def _times(factor, x, y, *, loss, params):
    """Return a loss whose derivative with respect to `factor` is the loss of `params`."""
    return factor * loss(params, x, y)


@always_traced
@named("qfedavg.client")
def _client(context, keys, server, client_state, rows, *, work, measure, q):
    trained, _, rate_sum, of_steps = local.train(work, context, keys, server.params, rows)
    # A mechanism for gradients releases the loss, as the derivative of a scaled loss.
    scaled_loss = Fn(_times, dict(loss=measure.loss, params=server.params))
    measuring = dataclasses.replace(work, grad=dataclasses.replace(measure, loss=scaled_loss))
    loss, of_loss = gradient_at(measuring, context, keys, jnp.ones(()), rows, work.steps)
    loss = jnp.maximum(loss, 1e-6)
    diff = pytrees.sub(trained, server.params)
    lipschitz = work.steps / rate_sum
    weight = loss**q + q * loss ** (q - 1) * lipschitz * jnp.square(pytrees.norm(diff))
    payload = Payload(pytrees.scale(loss**q, diff), weight)
    return payload, client_state, local.add_counts(of_steps, of_loss)


@named("qfedavg.server")
def _server(context, server, release, *, step):
    weight = jnp.maximum(release.weight, MIN_WEIGHT)
    return step(context, server, pytrees.scale(1 / weight, release.direction))


@traits(example_noise=None)  # a config has no loss_mechanism
@extends(fedavg, without=["optimizer"])
def qfedavg(
    grad: Grad,
    *,
    q: Number = 1.0,
    loss_mechanism: Annotated[Mechanism | None, PYTHON_ONLY] = None,
    **fedavg_options,
) -> Algorithm:
    """Return q-FedAvg, which gives clients with larger losses more weight.

    The algorithm minimizes the sum of F_i^(q + 1) / (q + 1), where F_i is the loss of client i. The
    weight of a client depends on its loss at the server's model, computed on a separate batch.

    Args:
        grad: gradient of the loss, as in `fedavg`.
        q: exponent >= 0. A larger q makes the losses of clients more equal; 0 is `fedavg`.
        loss_mechanism: a chain that releases a client's mean loss, such as chain(clip_l2(max_loss),
            total(), gaussian(z), divide(batch)), which clips the loss of each row to max_loss. It
            is required if `grad` is private.

    Privacy:
        Each participation releases `steps` noisy gradients and one noisy loss. An upload has two
        parts: the model difference times F_i^q, and the weight of the client. With client-level
        privacy, `release` clips the two parts together.

    References:
        Li et al., ICLR 2020, Algorithm 2. The Lipschitz constant L of the gradient, on which the
        weight depends, is replaced by 1 / (mean learning rate of the local steps).

    Example:
        >>> import jfl
        >>> loss = lambda w, x, y: (x @ w - y) ** 2
        >>> noisy = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(2.0), jfl.divide(8))
        >>> len(qfedavg(jfl.private_grad(loss, noisy), loss_mechanism=noisy).releases)
        2
    """
    numbers = scalars(checks.require_nonnegative, "qfedavg", q=q)
    base = fedavg(grad, **fedavg_options)
    work = base.client.data["work"]
    if work.grad.mechanism is not None and loss_mechanism is None:
        checks.fail(
            "qfedavg",
            "loss_mechanism for a private gradient",
            "none",
            "The weight of a client reveals its loss, so the loss needs noise as well.",
        )
    loss = work.grad.loss
    measure = plain_grad(loss) if loss_mechanism is None else private_grad(loss, loss_mechanism)
    return variant(
        base,
        "qfedavg",
        client=Fn(_client, dict(numbers, measure=measure)),
        server=Fn(_server),
        releases=(*base.releases, Release(loss_mechanism, work.batches, 1)),
    )
