"""FedDyn: linear terms in the local losses make all clients converge to the same model.

References:
    Acar et al., "Federated learning based on dynamic regularization", ICLR 2021.
"""

from typing import Any

from ..core import checks, pytrees
from ..core.options import extends
from ..core.records import Algorithm, Fn, named, record
from ..gradients.per_example import Grad
from .base import Number, pull_to, scalars, train_difference, variant
from .fedavg import fedavg


@record
class State:
    """The server's state."""

    params: Any
    optimizer: Any
    # h: -mu times the mean over all clients of the sum of a client's model differences so far
    drift: Any


@named("feddyn.init")
def _init(params, *, step):
    server = step.init(params)
    zeros = pytrees.zeros_like(params)
    return State(server.params, server.optimizer, zeros), zeros


@named("feddyn.client")
def _client(context, keys, server, client_state, rows, *, work, mu):
    pull = pull_to(server.params, mu)
    correct = lambda gradient, *rest: pull(pytrees.sub(gradient, client_state), *rest)
    diff, diagnostics = train_difference(work, context, keys, server.params, rows, correct)
    return diff, pytrees.axpy(-mu, diff, client_state), diagnostics


@named("feddyn.server")
def _server(context, server, diff, *, step, mu):
    drift = pytrees.axpy(-mu * context.cohort / context.clients, diff, server.drift)
    direction = pytrees.axpy(-1 / mu, drift, diff)
    new = step(context, server, direction)
    return State(new.params, new.optimizer, drift)


@extends(fedavg)
def feddyn(grad: Grad, *, mu: Number = 0.1, **fedavg_options) -> Algorithm:
    """Return FedDyn: client i minimizes loss - <h_i, w_i> + (mu / 2) ||w_i - w_server||^2.

    The client state h_i approximates the gradient of the client's loss at the last model that it
    trained. If local steps have noise, h_i is computed from noisy gradients only, and costs no
    further privacy. If the release has noise and cohorts are sampled, epsilon is larger than for
    `fedavg`, because sampling amplifies privacy less if clients keep state.

    Args:
        grad: gradient of the loss, as in `fedavg`.
        mu: weight of the proximal term, > 0.

    References:
        Acar et al., ICLR 2021, Algorithm 1, with local steps instead of an exact minimum.

    Example:
        >>> import jfl
        >>> feddyn(jfl.grad(lambda w, x, y: (x @ w - y) ** 2), mu=0.05).stateful
        True
    """
    pull = scalars(checks.require_positive, "feddyn", mu=mu)
    return variant(
        fedavg(grad, **fedavg_options),
        "feddyn",
        init=Fn(_init),
        client=Fn(_client, pull),
        server=Fn(_server, pull),
        stateful=True,
    )
