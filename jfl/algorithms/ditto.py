"""Ditto: each client also trains a personal model that stays close to the shared one.

References:
    Li et al., "Ditto: Fair and robust federated learning through personalization", ICML 2021,
    Algorithm 1.
"""

import dataclasses
from typing import Annotated

from .. import local
from ..core import checks
from ..core.options import PYTHON_ONLY, extends
from ..core.records import Algorithm, Fn, named
from ..gradients.per_example import Grad
from ..gradients.per_example import grad as plain_grad
from .base import Number, own_model, pull_to, scalars, train_difference, variant
from .fedavg import fedavg


@named("ditto.init")
def _init(params, *, step):
    return step.init(params), params


@named("ditto.client")
def _client(context, keys, server, client_state, rows, *, work, personal, mu):
    diff, diagnostics = train_difference(work, context, keys, server.params, rows)
    pull = pull_to(server.params, mu)
    personal_model, _, _, _ = local.train(
        personal, context, keys, client_state, rows, pull, first=work.steps
    )
    return diff, personal_model, diagnostics


@extends(fedavg)
def ditto(
    grad: Grad,
    *,
    mu: Number = 0.1,
    personal_grad: Annotated[Grad | None, PYTHON_ONLY] = None,
    **fedavg_options,
) -> Algorithm:
    """Return Ditto: FedAvg in which each client also trains a personal model v.

    Local steps of v follow gradient + mu * (v - w_server), where w_server is the shared model.
    Personal models are evaluated on their clients' test rows (`metrics.client_accuracy` and
    `metrics.client_percentiles`). `run.client_states` holds them, stacked along a first axis of C
    clients.

    Args:
        grad: gradient of the loss for the shared model, as in `fedavg`.
        mu: weight of the distance between a personal model and the shared one.
        personal_grad: gradient for the personal models; None means the same loss without noise.

    Privacy:
        A personal model stays with its client, and guarantees for the server do not cover it.
        Without `personal_grad` it is trained on the client's rows without noise. With a private
        `personal_grad`, `jfl.guarantee(plan, ..., view="personal")` covers uploads and personal
        models together.

    References:
        Li et al., ICML 2021, Algorithm 1.

    Example:
        >>> import jfl
        >>> ditto(jfl.grad(lambda w, x, y: (x @ w - y) ** 2), mu=1.0).name
        'ditto'
    """
    pull = scalars(checks.require_nonnegative, "ditto", mu=mu)
    base = fedavg(grad, **fedavg_options)
    work = base.client.data["work"]
    if personal_grad is None:
        personal_grad = plain_grad(work.grad.loss)
    if not isinstance(personal_grad, Grad):
        checks.fail("ditto", "personal_grad = jfl.grad(loss)", checks.short_repr(personal_grad))
    personal_work = dataclasses.replace(work, grad=personal_grad)
    return variant(
        base,
        "ditto",
        init=Fn(_init),
        client=Fn(_client, dict(pull, personal=personal_work)),
        stateful=True,
        personal=Fn(own_model),
        personal_releases=personal_work.releases(),
    )
