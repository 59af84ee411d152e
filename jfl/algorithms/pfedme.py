"""pFedMe: personal models with Moreau envelopes.

References:
    Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS 2020,
    Algorithm 1.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from .. import local
from ..core import checks, pytrees
from ..core.options import PYTHON_ONLY, extends
from ..core.records import Algorithm, Fn, always_traced, named
from ..gradients.per_example import Grad
from .base import Number, own_model, pull_to, scalars, variant
from .fedavg import fedavg


@named("pfedme.init")
def _init(params, *, step):
    return step.init(params), params


@always_traced
@named("pfedme.client")
def _client(context, keys, server, client_state, rows, *, work, pull, outer_lr, outer_steps):
    def outer_step(carry, number):
        shared, _ = carry
        first = number * work.steps
        personal, _, _, diagnostics = local.train(
            work, context, keys, shared, rows, pull_to(shared, pull), first=first
        )
        shared = pytrees.axpy(-outer_lr * pull, pytrees.sub(shared, personal), shared)
        return (shared, personal), diagnostics

    start = (server.params, server.params)
    (trained, personal), diagnostics = jax.lax.scan(outer_step, start, jnp.arange(outer_steps))
    return pytrees.sub(trained, server.params), personal, local.over_steps(diagnostics)


@extends(fedavg)
def pfedme(
    grad: Grad,
    *,
    pull: Annotated[Number, PYTHON_ONLY] = 15.0,
    outer_lr: Annotated[Number, PYTHON_ONLY] = 0.005,
    inner_steps: Annotated[int, PYTHON_ONLY] = 5,
    steps: int = 10,
    **fedavg_options,
) -> Algorithm:
    """Return pFedMe: clients alternately train a personal model v and a copy w of the shared model.

    In each of `steps` local steps, v approximately minimizes loss + (pull / 2) ||v - w||^2, and
    then w takes a step towards v. Personal models are evaluated on their clients' test rows.
    `run.client_states` holds these models, stacked along a first axis of C clients.

    Args:
        grad: gradient of the loss, as in `fedavg`.
        pull: weight of the distance between v and w, lambda in the paper.
        outer_lr: learning rate of w, eta in the paper.
        inner_steps: number of steps of v, with learning rate `lr`, per step of w; K in the paper.
        steps: number of steps of w, R in the paper.

    Other Parameters:
        fedavg_options: as in `fedavg`; server_lr is the beta of the paper.

    Privacy:
        Each participation releases steps * inner_steps noisy gradients, since each inner step draws
        a separate batch.

    References:
        Dinh, Tran, Nguyen, NeurIPS 2020, Algorithm 1.

    Example:
        >>> import jfl
        >>> made = pfedme(jfl.grad(lambda w, x, y: (x @ w - y) ** 2), steps=3, inner_steps=2)
        >>> made.releases[0].count
        6
    """
    numbers = scalars(checks.require_positive, "pfedme", pull=pull, outer_lr=outer_lr)
    checks.require_integer("algorithm", steps=steps)
    checks.require_integer("pfedme", inner_steps=inner_steps)
    base = fedavg(grad, steps=inner_steps, **fedavg_options)
    (release,) = base.releases
    return variant(
        base,
        "pfedme",
        init=Fn(_init),
        client=Fn(_client, numbers, dict(outer_steps=steps)),
        releases=(dataclasses.replace(release, count=steps * inner_steps),),
        stateful=True,
        personal=Fn(own_model),
        personal_releases=(),  # personal models use the gradients of `releases`
    )
