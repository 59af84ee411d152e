"""FedNova: clients may take different numbers of local steps without biasing the model.

References:
    Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated
    optimization", NeurIPS 2020.
"""

from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..core import checks, pytrees
from ..core.options import PYTHON_ONLY, extends
from ..core.records import Algorithm, Fn, named
from ..gradients.per_example import Grad
from .base import train_difference, variant
from .fedavg import fedavg


@named("fednova.client")
def _client(context, keys, server, client_state, rows, *, work, local_steps):
    if len(local_steps) != context.clients:
        expected = f"local_steps for each of {context.clients} clients"
        checks.fail("fednova", expected, len(local_steps))
    num_steps = local_steps.at[context.client].get(mode="fill", fill_value=1)
    stop = lambda gradient, params, step: pytrees.scale(
        jnp.where(step < num_steps, 1.0, 0.0), gradient
    )
    diff, diagnostics = train_difference(work, context, keys, server.params, rows, stop)
    return pytrees.scale(1 / num_steps, diff), client_state, diagnostics


@named("fednova.server")
def _server(context, server, direction, *, step, local_steps):
    return step(context, server, pytrees.scale(local_steps.mean(), direction))


@extends(fedavg, without=["optimizer"])
def fednova(
    grad: Grad,
    *,
    local_steps: Annotated[ArrayLike | None, PYTHON_ONLY] = None,
    **fedavg_options,
) -> Algorithm:
    """Return FedNova: FedAvg of model differences that are divided by the number of local steps.

    Client i starts from the model w, takes t_i steps of plain SGD to w_i, and uploads
    (w_i - w) / t_i. The server multiplies the mean of the uploads by the mean of all t_i. Plain
    averaging would favour clients that take more steps.

    Args:
        grad: gradient of the loss, as in `fedavg`.
        local_steps: Int[C], the number of steps of each client, from 1 to `steps`. None means that
            all clients take all steps, which is `fedavg`.

    Privacy:
        The numbers of local steps are assumed public: they may depend on the speed of a device, but
        not on its rows. The guarantee counts `steps` noisy gradients per participation, also for a
        client that takes fewer steps.

    References:
        Wang et al., NeurIPS 2020, equation 6, without momentum and proximal terms.

    Example:
        >>> import jfl
        >>> grad = jfl.grad(lambda w, x, y: (x @ w - y) ** 2)
        >>> fednova(grad, steps=8, local_steps=[8, 2, 4]).name
        'fednova'
    """
    base = fedavg(grad, **fedavg_options)
    work = base.client.data["work"]
    num_steps = np.full(1, work.steps) if local_steps is None else np.asarray(local_steps)
    is_integer = num_steps.ndim == 1 and num_steps.size and num_steps.dtype.kind in "iu"
    if not is_integer or num_steps.min() < 1 or num_steps.max() > work.steps:
        checks.fail(
            "fednova",
            f"local_steps Int[C], each from 1 to steps={work.steps}",
            checks.short_repr(local_steps),
        )
    if local_steps is None:
        return variant(base, "fednova")
    bound_steps = dict(local_steps=jnp.asarray(num_steps, jnp.float32))
    client, server = Fn(_client, bound_steps), Fn(_server, bound_steps)
    return variant(base, "fednova", client=client, server=server)
