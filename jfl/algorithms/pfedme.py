"""pFedMe (Dinh et al., NeurIPS 2020, Algorithm 1): personal models by Moreau envelopes."""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from .. import local
from ..core import checks, pytrees
from ..core.options import PYTHON_ONLY, extends
from ..core.records import Algorithm, Fn, always_traced, named
from ..gradients.per_example import Grad
from .base import Number, algorithm
from .fedavg import fedavg


@named("pfedme.init")
def _init(params, *, step):
    return step.init(params), params


@always_traced
@named("pfedme.client")
def _client(context, keys, server, client_state, rows, *, work, pull, outer_lr, outer_steps):
    def outer(carry, number):
        w, _ = carry
        to_shared = lambda g, v, s: pytrees.axpy(pull, pytrees.sub(v, w), g)
        personal, _, _, seen = local.train(
            work, context, keys, w, rows, to_shared, first=number * work.steps
        )
        moved = pytrees.axpy(-outer_lr * pull, pytrees.sub(w, personal), w)
        return (moved, personal), seen

    start = (server.params, server.params)
    (trained, personal), seen = jax.lax.scan(outer, start, jnp.arange(outer_steps))
    each = seen._replace(loss=seen.loss.mean(), clipped=seen.clipped.mean())
    diagnostics = each._replace(overflow=seen.overflow.sum(), nonfinite=seen.nonfinite.sum())
    return pytrees.sub(trained, server.params), personal, diagnostics


@named("pfedme.personal")
def _personal(server, own):
    return own


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
    """Clients alternate between a personal model, the minimum of loss + (pull / 2) ||v - w||^2, and
    a step of their copy w of the shared one towards it.

    Clients are judged by their personal models; `run.client_states` has them, [C, ...].

    Args:
        grad: gradients of the loss, as in `fedavg`.
        pull: lambda, the pull of a personal model to the shared one.
        outer_lr: eta, the learning rate of the copy of the shared model.
        inner_steps: K, steps of `lr` towards the personal model in each of the `steps`.
        steps: R, steps of the copy of the shared model.

    Other Parameters:
        fedavg_options: as in `fedavg`; server_lr is the beta of the paper.

    Privacy:
        it releases steps * inner_steps noisy gradients a participation: each inner step draws a
        batch of its own.

    References:
        Dinh, Tran, Nguyen, NeurIPS 2020, Algorithm 1.

    Example:
        >>> import jfl
        >>> made = pfedme(jfl.grad(lambda w, x, y: (x @ w - y) ** 2), steps=3, inner_steps=2)
        >>> made.releases[0].count
        6
    """
    checks.require_positive("pfedme", single=True, pull=pull)
    checks.require_positive("pfedme", single=True, outer_lr=outer_lr)
    checks.require_integer("algorithm", steps=steps)
    checks.require_integer("pfedme", inner_steps=inner_steps)
    base = fedavg(grad, steps=inner_steps, **fedavg_options)
    (release,) = base.releases
    numbers = dict(pull=checks.as_scalar(pull), outer_lr=checks.as_scalar(outer_lr))
    return algorithm(
        Fn(_init, base.server.data),
        Fn(_client, dict(base.client.data, **numbers), dict(outer_steps=steps)),
        base.server,
        releases=(dataclasses.replace(release, count=steps * inner_steps),),
        name="pfedme",
        stateful=True,
        personal=_personal,
        personal_releases=(),  # personal models use the gradients of `releases`
    )
