"""DP-FedSAM: local steps of sharpness-aware minimization, which seeks flat minima.

References:
    Shi et al., "Make landscape flatter in differentially private federated learning", CVPR 2023.
    Foret et al., "Sharpness-aware minimization", ICLR 2021.
"""

import dataclasses

import jax
import jax.numpy as jnp

from .. import local
from ..core import checks, pytrees
from ..core.options import extends
from ..core.records import Algorithm, Fn, always_traced, named
from ..gradients.per_example import Grad
from .base import Number, gradient_at, scalars, variant
from .fedavg import fedavg


@always_traced
@named("fedsam.client")
def _client(context, keys, server, client_state, rows, *, work, rho):
    def step(params, number):
        ascent, first = gradient_at(work, context, keys, params, rows, work.steps + number)
        length = jnp.maximum(pytrees.norm(ascent), jnp.finfo(jnp.float32).tiny)
        ascended = pytrees.axpy(rho / length, ascent, params)
        gradient, second = gradient_at(work, context, keys, ascended, rows, number)
        lr = local.sum_of_rates(work.lr, context.round * work.steps + number, 1)
        return pytrees.axpy(-lr, gradient, params), local.add_counts(first, second)

    with jax.named_scope("local_steps"):  # as in `local.train`
        trained, diagnostics = jax.lax.scan(step, server.params, jnp.arange(work.steps))
    return pytrees.sub(trained, server.params), client_state, local.over_steps(diagnostics)


@extends(fedavg, without=["optimizer"])
def fedsam(grad: Grad, *, rho: Number = 0.05, **fedavg_options) -> Algorithm:
    """Return FedSAM: local steps follow the gradient at w_i + rho * g / ||g||.

    Here w_i is the client's current model, and g is the gradient at w_i on a separate batch.

    Args:
        grad: gradient of the loss, as in `fedavg`.
        rho: distance between w_i and the point at which the gradient is computed, >= 0.

    Privacy:
        A step uses the gradients of two batches, so each participation releases 2 * `steps` noisy
        gradients. With client-level privacy, as in the paper, guarantees are the same as for
        `fedavg`.

    References:
        Shi et al., CVPR 2023, Algorithm 1; Foret et al., ICLR 2021.

    Example:
        >>> import jfl
        >>> fedsam(jfl.grad(lambda w, x, y: (x @ w - y) ** 2), rho=0.1).releases[0].count
        20
    """
    client = Fn(_client, scalars(checks.require_nonnegative, "fedsam", rho=rho))
    base = fedavg(grad, **fedavg_options)
    (release,) = base.releases
    releases = (dataclasses.replace(release, count=2 * release.count),)
    return variant(base, "fedsam", client=client, releases=releases)
