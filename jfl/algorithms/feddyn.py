"""FedDyn (Acar et al., ICLR 2021): local losses with a linear term, so that all clients agree where
the mean of the losses is smallest."""

from typing import Any

from .. import local
from ..core import checks, pytrees
from ..core.options import extends
from ..core.records import Algorithm, Fn, named, record
from ..gradients.per_example import Grad
from .base import Number, algorithm
from .fedavg import fedavg


@record
class State:
    params: Any
    optimizer: Any
    drift: Any  # h, minus mu times the mean over clients of all their differences so far


@named("feddyn.init")
def _init(params, *, step):
    server = step.init(params)
    zeros = pytrees.zeros_like(params)
    return State(server.params, server.optimizer, zeros), zeros


@named("feddyn.client")
def _client(context, keys, server, client_state, rows, *, work, mu):
    pull = lambda g, w, s: pytrees.axpy(
        mu, pytrees.sub(w, server.params), pytrees.sub(g, client_state)
    )
    trained, _, _, diagnostics = local.train(work, context, keys, server.params, rows, pull)
    diff = pytrees.sub(trained, server.params)
    return diff, pytrees.axpy(-mu, diff, client_state), diagnostics


@named("feddyn.server")
def _server(context, server, diff, *, step, mu):
    drift = pytrees.axpy(-mu * context.cohort / context.clients, diff, server.drift)
    direction = pytrees.axpy(-1 / mu, drift, diff)
    moved = step(context, local.Server(server.params, server.optimizer), direction)
    return State(moved.params, moved.optimizer, drift)


@extends(fedavg)
def feddyn(grad: Grad, *, mu: Number = 0.1, **fedavg_options) -> Algorithm:
    """FedAvg whose clients solve loss - <h_i, w> + (mu / 2) ||w - w_server||^2, where h_i is the
    gradient at which they last stopped.

    Clients remember h_i.  It follows from what they released, so it costs no privacy.

    Args:
        grad: gradients of the loss, as in `fedavg`.
        mu: pull to the server's model.  More than 0.

    References:
        Acar et al., ICLR 2021, Algorithm 1, with local steps in place of an exact minimum.

    Example:
        >>> import jfl
        >>> feddyn(jfl.grad(lambda w, x, y: (x @ w - y) ** 2), mu=0.05).stateful
        True
    """
    checks.require_positive("feddyn", single=True, mu=mu)
    base = fedavg(grad, **fedavg_options)
    pull, step = checks.as_scalar(mu), base.server.data
    return algorithm(
        Fn(_init, step),
        Fn(_client, dict(base.client.data, mu=pull)),
        Fn(_server, dict(step, mu=pull)),
        releases=base.releases,
        name="feddyn",
        stateful=True,
    )
