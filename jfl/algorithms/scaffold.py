"""SCAFFOLD (Karimireddy et al., ICML 2020, Algorithm 1, option II; DP-SCAFFOLD(-warm): Noble et
al., AISTATS 2022)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from .. import local
from ..core import checks, pytrees
from ..core.options import readable
from ..core.records import Algorithm, Batches, Fn, named, record
from ..gradients.per_example import Grad
from ..sampling.batches import without_replacement
from .base import Number, Optimizer, Rate, algorithm, traits


@record
class State:
    params: Any
    optimizer: Any
    control: Any  # c, the mean of the clients' control variates


class Payload(NamedTuple):
    diff: Any
    # change of c_i times the sum of learning rates: the two halves then share units and a clip
    control: Any


@named("scaffold.init")
def _init(params, *, step, scale, warm):
    server = step.init(params)
    return State(server.params, server.optimizer, pytrees.zeros_like(params)), pytrees.zeros_like(
        params
    )


@named("scaffold.client")
def _client(context, keys, server, client_state, rows, *, work, warm):
    drift = pytrees.sub(server.control, client_state)
    # warm rounds look at the gradients of the first model, and neither the clients nor the server
    # move
    moving = 1.0 if warm is None else jnp.where(context.round < warm, 0.0, 1.0)
    trained, mean, rates, diagnostics = local.train(
        work, context, keys, server.params, rows, lambda g, w, s: pytrees.add(g, drift), moving
    )
    # option II's c_i - c + (x - y) / (K lr) is the mean gradient of plain SGD; this form holds for
    # any optimizer
    return (
        Payload(
            pytrees.sub(trained, server.params),
            pytrees.scale(rates, pytrees.sub(mean, client_state)),
        ),
        mean,
        diagnostics,
    )


@named("scaffold.server")
def _server(context, server, release, *, step, scale, warm):
    moved = step(context, local.Server(server.params, server.optimizer), release.diff)
    if warm is not None:
        still = local.Server(server.params, server.optimizer)
        moved = pytrees.map(
            lambda old, new: jnp.where(context.round < warm, old, new), still, moved
        )
    rates = scale(context.round)
    return State(
        moved.params,
        moved.optimizer,
        pytrees.axpy(context.cohort / context.clients / rates, release.control, server.control),
    )


@named("scaffold.rates")
def _rates(round_, *, lr, steps):
    return local.rates(lr, round_ * steps, steps)


@traits(payload_models=2)  # a difference and a change of control variate
@readable
def scaffold(
    grad: Grad,
    *,
    lr: Rate = 0.1,
    steps: int = 10,
    batch: Batches = without_replacement(8),
    optimizer: Optimizer = optax.sgd,
    server_lr: Rate = 1.0,
    server_optimizer: Optimizer = optax.sgd,
    warm_rounds: Number | None = None,
) -> Algorithm:
    """FedAvg with control variates: local steps follow gradient + c - c_i.

    The drift is added after clipping and noise.  A client's c_i becomes the mean of its (noisy)
    gradients; with uniform weights, a cohort without repeats and an unclipped, noiseless release, c
    stays the mean of all c_i.

    It releases the pair (difference, K lr * change of c_i), with K local steps: a client-level clip
    covers both together.

    The noise of a client-level release stays in c, and no later round corrects it.  Clients move
    along the sum of all noise, until it fills their clip norm; FedAvg suits that level better.  The
    noise of local steps leaves c with the next c_i.

    Args:
        warm_rounds: first rounds that only find control variates, at the initial model
            (DP-SCAFFOLD-warm: about 4 / (share of clients in a cohort)).  They release as much as
            any other round, and are accounted so.

    Other Parameters:
        grad, lr, steps, batch, optimizer, server_lr, server_optimizer: as in `fedavg`.
    """
    work = local.work(
        grad,
        batch,
        lr=lr,
        steps=steps,
        optimizer=optimizer,
        default_lr=None,  # the control variates are divided by it
    )
    if warm_rounds is not None:
        checks.require_nonnegative("scaffold", single=True, warm_rounds=warm_rounds)
    warm = None if warm_rounds is None else checks.as_scalar(warm_rounds)
    both = dict(
        step=local.server_step(server_lr, server_optimizer),
        warm=warm,
        scale=Fn(_rates, dict(lr=work.lr), dict(steps=steps)),
    )
    return algorithm(
        Fn(_init, both),
        Fn(_client, dict(work=work, warm=warm)),
        Fn(_server, both),
        releases=work.releases(),
        name="scaffold",
        stateful=True,
    )
