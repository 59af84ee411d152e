"""DP-FedSAM (Shi et al., CVPR 2023): local steps towards flat minima, by sharpness-aware
minimisation."""

import dataclasses

import jax
import jax.numpy as jnp

from .. import local
from ..core import checks, pytrees
from ..core.options import extends
from ..core.records import Algorithm, Fn, always_traced, named
from ..gradients.per_example import Grad
from .base import Number, algorithm
from .fedavg import fedavg


@always_traced
@named("fedsam.client")
def _client(context, keys, server, client_state, rows, *, work, rho):
    one = dataclasses.replace(work, steps=1)
    clock = context.round * work.steps

    def look(w, number):
        """The gradient at w, of the batch with this number."""
        _, g, _, seen = local.train(one, context, keys, w, rows, moving=0.0, first=number)
        return g, seen

    def step(w, s):
        uphill, first = look(w, work.steps + s)
        length = jnp.maximum(pytrees.norm(uphill), jnp.finfo(jnp.float32).tiny)
        g, second = look(pytrees.axpy(rho / length, uphill, w), s)
        lr = local.rates(work.lr, clock + s, 1)
        return pytrees.axpy(-lr, g, w), local.both(first, second)

    with jax.named_scope("local_steps"):  # as in `local.train`
        trained, seen = jax.lax.scan(step, server.params, jnp.arange(work.steps))
    each = seen._replace(loss=seen.loss.mean(), clipped=seen.clipped.mean())
    diagnostics = each._replace(overflow=seen.overflow.sum(), nonfinite=seen.nonfinite.sum())
    return pytrees.sub(trained, server.params), client_state, diagnostics


@extends(fedavg, without=["optimizer"])
def fedsam(grad: Grad, *, rho: Number = 0.05, **fedavg_options) -> Algorithm:
    """FedAvg whose local steps follow the gradient at w + rho * g / ||g||, where g is the gradient
    at w.

    Args:
        grad: gradients of the loss, as in `fedavg`.
        rho: how far uphill the gradient is taken.  At least 0.

    Privacy:
        a step has two gradients, of two batches: it releases 2 * `steps` of them a participation
        where they are noisy.  Under client-level privacy, which the paper has, it costs what
        `fedavg` costs.

    References:
        Shi et al., CVPR 2023, Algorithm 1; Foret et al., ICLR 2021.

    Example:
        >>> import jfl
        >>> fedsam(jfl.grad(lambda w, x, y: (x @ w - y) ** 2), rho=0.1).releases[0].count
        20
    """
    checks.require_nonnegative("fedsam", single=True, rho=rho)
    base = fedavg(grad, **fedavg_options)
    (release,) = base.releases
    return algorithm(
        base.init,
        Fn(_client, dict(base.client.data, rho=checks.as_scalar(rho))),
        base.server,
        releases=(dataclasses.replace(release, count=2 * release.count),),
        name="fedsam",
    )
