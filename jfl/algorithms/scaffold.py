"""SCAFFOLD and DP-SCAFFOLD: federated averaging with control variates.

References:
    Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning",
        ICML 2020, Algorithm 1, option II.
    Noble et al., "Differentially private federated learning on heterogeneous data", AISTATS 2022
        (DP-SCAFFOLD and DP-SCAFFOLD-warm).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from .. import local
from ..core import checks, pytrees
from ..core.records import Algorithm, Batches, Fn, named, record
from ..gradients.per_example import Grad
from ..sampling.batches import without_replacement
from .base import Number, Optimizer, Rate, algorithm, traits


@record
class State:
    """The server's state."""

    params: Any
    optimizer: Any
    control: Any  # c, the mean of the clients' control variates


class Payload(NamedTuple):
    """What a client uploads."""

    diff: Any
    # (new c_i - old c_i) times the sum of the learning rates. Scaled like this, both fields have
    # the units of a model difference, and one clip norm suits both.
    control: Any


@named("scaffold.init")
def _init(params, *, step, scale, warm):
    """Return the server's state and the state c_i = 0 of one client."""
    server = step.init(params)
    zeros = pytrees.zeros_like(params)
    return State(server.params, server.optimizer, zeros), zeros


@named("scaffold.client")
def _client(context, keys, server, client_state, rows, *, work, warm):
    """Take local steps along gradient + c - c_i. Return the payload, the new c_i and diagnostics.

    client_state is c_i, a pytree like the parameters.
    """
    drift = pytrees.sub(server.control, client_state)
    correct = lambda gradient, params, step: pytrees.add(gradient, drift)
    # In a warm round, clients compute gradients at the initial model and do not move.
    moving = 1.0 if warm is None else jnp.where(context.round < warm, 0.0, 1.0)
    trained, mean_gradient, rate_sum, diagnostics = local.train(
        work, context, keys, server.params, rows, correct, moving
    )
    # Option II sets c_i to c_i - c + (x - y) / (K lr). For plain SGD that is the mean gradient,
    # which is also defined for other optimizers.
    new_control = mean_gradient
    payload = Payload(
        diff=pytrees.sub(trained, server.params),
        control=pytrees.scale(rate_sum, pytrees.sub(new_control, client_state)),
    )
    return payload, new_control, diagnostics


@named("scaffold.server")
def _server(context, server, release, *, step, scale, warm):
    """Apply the mean difference to the model, and the mean change of control variates to c."""
    old = local.Server(server.params, server.optimizer)
    new = step(context, old, release.diff)
    if warm is not None:  # the model does not move in a warm round
        new = pytrees.map(lambda o, n: jnp.where(context.round < warm, o, n), old, new)
    # The release is a mean over the cohort, but c is a mean over all clients.
    rate_sum = scale(context.round)
    factor = context.cohort / context.clients / rate_sum
    control = pytrees.axpy(factor, release.control, server.control)
    return State(new.params, new.optimizer, control)


@named("scaffold.rates")
def _rate_sum(round_, *, lr, steps):
    """Return the sum of the learning rates of a round's local steps."""
    return local.sum_of_rates(lr, round_ * steps, steps)


@traits(payload_models=2)  # an upload is as large as two models
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
    """Return SCAFFOLD: local steps of client i follow gradient + c - c_i.

    The control variates c_i of the clients and c, their mean on the server, correct local steps for
    the differences between clients. They are added after clipping and noise, so a private gradient
    keeps its guarantee. After a round, a client's c_i is the mean of its (noisy) gradients. c
    remains exactly the mean of all c_i if weights are uniform, no client occurs twice in a cohort,
    and the release neither clips nor adds noise.

    A client uploads its model difference, and the change of its c_i multiplied by the sum of the
    learning rates of its local steps. Scaled like this, both have the units of a model difference,
    so one client-level clip can bound them together.

    SCAFFOLD suits noise in local steps: when c_i is next replaced, its old noise vanishes from c_i
    and from c. With client-level noise, FedAvg works better. The server adds this noise to c and
    never removes it, so it accumulates. All local steps follow c, so they increasingly follow this
    noise, and only the clip norm limits how far.

    Args:
        warm_rounds: number of initial rounds that only compute control variates, at the initial
            model (DP-SCAFFOLD-warm). Noble et al. use about 4 / l, where l is the fraction of
            clients in a cohort. A warm round costs as much privacy as any other.

    Other Parameters:
        grad, lr, steps, batch, optimizer, server_lr, server_optimizer: as in `fedavg`.

    Example:
        >>> import jfl
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.dirichlet(20, alpha=0.3))
        >>> task = jfl.models.logistic(fed)
        >>> algorithm = scaffold(jfl.grad(task.loss), lr=0.5, steps=5)
        >>> plan = jfl.plan(fed, task, algorithm, jfl.sampling.full(clients=20))
    """
    if warm_rounds is not None:
        checks.require_nonnegative("scaffold", single=True, warm_rounds=warm_rounds)
    warm = None if warm_rounds is None else checks.as_scalar(warm_rounds)
    work = local.work(
        grad,
        batch,
        lr=lr,
        steps=steps,
        optimizer=optimizer,
        default_lr=None,  # _rate_sum needs `lr`, also if the optimizer is a transformation
    )
    server_side = dict(
        step=local.server_step(server_lr, server_optimizer),
        warm=warm,
        scale=Fn(_rate_sum, dict(lr=work.lr), dict(steps=steps)),
    )
    return algorithm(
        Fn(_init, server_side),
        Fn(_client, dict(work=work, warm=warm)),
        Fn(_server, server_side),
        releases=work.releases(),
        name="scaffold",
        stateful=True,
    )
