"""FedNova (Wang et al., NeurIPS 2020): clients that take different numbers of local steps count as
if they took the same."""

import dataclasses
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .. import local
from ..core import checks, pytrees
from ..core.options import PYTHON_ONLY, extends
from ..core.records import Algorithm, Fn, named
from ..gradients.per_example import Grad
from .fedavg import fedavg


@named("fednova.client")
def _client(context, keys, server, client_state, rows, *, work, local_steps):
    if len(local_steps) != context.clients:
        need = f"local_steps for each of {context.clients} clients"
        checks.fail("fednova", need, len(local_steps))
    own = local_steps.at[context.client].get(mode="fill", fill_value=1)
    while_own = lambda g, w, s: pytrees.scale(jnp.where(s < own, 1.0, 0.0), g)
    trained, _, _, diagnostics = local.train(work, context, keys, server.params, rows, while_own)
    return (
        pytrees.scale(1 / own, pytrees.sub(trained, server.params)),
        client_state,
        diagnostics,
    )


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
    """FedAvg of normalised differences, (w_i - w) / t_i, times the mean number of steps.

    Plain averaging pulls the model towards clients that take more steps; this does not.  Local
    steps are of plain SGD.

    Args:
        grad: gradients of the loss, as in `fedavg`.
        local_steps: Int[C], how many of the `steps` each client takes, 1 to `steps`; None: all take
            all, which is `fedavg`.

    Privacy:
        the numbers of steps are public: the speed of a device, not the number of its rows.  All
        `steps` noisy gradients are charged, those that are not used too.

    References:
        Wang et al., NeurIPS 2020, equation 6, with momentum and proximal terms left out.

    Example:
        >>> import jfl
        >>> grad = jfl.grad(lambda w, x, y: (x @ w - y) ** 2)
        >>> fednova(grad, steps=8, local_steps=[8, 2, 4]).name
        'fednova'
    """
    base = fedavg(grad, **fedavg_options)
    work = base.client.data["work"]
    numbers = np.full(1, work.steps) if local_steps is None else np.asarray(local_steps)
    whole = numbers.ndim == 1 and numbers.size and numbers.dtype.kind in "iu"
    if not whole or numbers.min() < 1 or numbers.max() > work.steps:
        checks.fail(
            "fednova",
            f"local_steps Int[C], each from 1 to steps={work.steps}",
            checks.short_repr(local_steps),
        )
    if local_steps is None:
        return dataclasses.replace(base, name="fednova")
    own = jnp.asarray(numbers, jnp.float32)
    return dataclasses.replace(
        base,
        client=Fn(_client, dict(work=work, local_steps=own)),
        server=Fn(_server, dict(base.server.data, local_steps=own)),
        name="fednova",
    )
