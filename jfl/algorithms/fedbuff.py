"""FedBuff as a synchronous algorithm: clients train on models that are some rounds old.

References:
    Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..core import checks, pytrees
from ..core.options import extends
from ..core.random_streams import as_kernel_key
from ..core.records import Algorithm, Fn, named, record
from ..gradients.per_example import Grad
from ..models.losses import key_of
from .base import train_difference, variant
from .fedavg import fedavg

AGE_SEED = 2022


@record
class State:
    """The server's state."""

    params: Any
    optimizer: Any
    past: Any  # [staleness + 1, ...], the last models, newest first


@named("fedbuff.init")
def _init(params, *, step, staleness):
    server = step.init(params)
    repeated = lambda x: jnp.broadcast_to(x, (staleness + 1, *x.shape))
    return State(server.params, server.optimizer, pytrees.map(repeated, params)), ()


@named("fedbuff.client")
def _client(context, keys, server, client_state, rows, *, work, staleness):
    # Ages do not depend on the seed of the run: they are the same for all seeds, rows and settings.
    key = jax.random.fold_in(as_kernel_key(key_of(AGE_SEED)), context.round)
    age = jax.random.randint(
        jax.random.fold_in(key, context.client), (), 0, staleness + 1, jnp.int32
    )
    start = pytrees.map(lambda x: x[age], server.past)
    diff, diagnostics = train_difference(work, context, keys, start, rows)
    discount = 1 / jnp.sqrt(1.0 + age)
    return pytrees.scale(discount, diff), client_state, diagnostics


@named("fedbuff.server")
def _server(context, server, diff, *, step):
    new = step(context, server, diff)
    push = lambda model, past: jnp.concatenate([model[None], past[:-1]])
    return State(new.params, new.optimizer, pytrees.map(push, new.params, server.past))


@extends(fedavg)
def fedbuff(grad: Grad, *, staleness: int = 4, **fedavg_options) -> Algorithm:
    """Return FedBuff: clients train on models that are 0 to `staleness` rounds old.

    Each client draws the age of its model uniformly in each round, and multiplies its model
    difference by 1 / sqrt(1 + age). The paper's server updates its model whenever its buffer of
    uploads is full; here each round is one such update, and the cohort's uploads fill the buffer.

    Args:
        grad: gradient of the loss, as in `fedavg`.
        staleness: maximum age of a model in rounds. With 0 the algorithm is `fedavg`.
        fedavg_options: other arguments of `fedavg`.

    Privacy:
        Ages depend on the round and the client's id, not on its rows, so guarantees are the same as
        for `fedavg`.

    References:
        Nguyen et al., AISTATS 2022, Algorithm 1, with the staleness discount of section 5.

    Example:
        >>> import jfl
        >>> fedbuff(jfl.grad(lambda w, x, y: (x @ w - y) ** 2), staleness=2).name
        'fedbuff'
    """
    checks.require_integer("fedbuff", min_value=0, staleness=staleness)
    facts = dict(staleness=staleness)
    return variant(
        fedavg(grad, **fedavg_options),
        "fedbuff",
        init=Fn(_init, static=facts),
        client=Fn(_client, static=facts),
        server=Fn(_server),
    )
