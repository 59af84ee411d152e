"""FedBuff (Nguyen et al., AISTATS 2022), in rounds: clients train on models that are some rounds
old, and count less the older those are."""

from typing import Any

import jax
import jax.numpy as jnp

from .. import local
from ..core import checks, pytrees
from ..core.losses import key_of
from ..core.options import extends
from ..core.records import Algorithm, Fn, named, record
from ..core.threefry import as_kernel_key
from ..gradients.per_example import Grad
from .base import algorithm
from .fedavg import fedavg

AGES = 2022  # the seed of who is how late


@record
class State:
    params: Any
    optimizer: Any
    past: Any  # [staleness + 1, ...], the last models; the newest first


@named("fedbuff.init")
def _init(params, *, step, staleness):
    server = step.init(params)
    repeated = lambda x: jnp.broadcast_to(x, (staleness + 1, *x.shape))
    return State(server.params, server.optimizer, pytrees.map(repeated, params)), ()


@named("fedbuff.client")
def _client(context, keys, server, client_state, rows, *, work, staleness):
    # who is how late is no draw of this run: it is the same for all seeds, rows and settings
    key = jax.random.fold_in(as_kernel_key(key_of(AGES)), context.round)
    age = jax.random.randint(jax.random.fold_in(key, context.client), (), 0, staleness + 1)
    start = pytrees.map(lambda x: x[age], server.past)
    trained, _, _, diagnostics = local.train(work, context, keys, start, rows)
    discount = 1 / jnp.sqrt(1.0 + age)
    return pytrees.scale(discount, pytrees.sub(trained, start)), client_state, diagnostics


@named("fedbuff.server")
def _server(context, server, diff, *, step):
    moved = step(context, local.Server(server.params, server.optimizer), diff)
    put = lambda new, past: jnp.concatenate([new[None], past[:-1]])
    return State(moved.params, moved.optimizer, pytrees.map(put, moved.params, server.past))


@extends(fedavg)
def fedbuff(grad: Grad, *, staleness: int = 4, **fedavg_options) -> Algorithm:
    """FedAvg with stale clients: each trains on the model of 0 to `staleness` rounds ago, another
    one in each round, and its difference counts 1 / sqrt(1 + age).

    A round takes the place of a full buffer: its cohort are the uploads that fill one.

    Args:
        grad: gradients of the loss, as in `fedavg`.
        staleness: the age in rounds that a model may have.  At least 0; 0 is `fedavg`.

    Privacy:
        ages follow from the numbers of the round and of the client alone: they change no guarantee.

    References:
        Nguyen et al., AISTATS 2022, Algorithm 1, with the discount of section 5.

    Example:
        >>> import jfl
        >>> fedbuff(jfl.grad(lambda w, x, y: (x @ w - y) ** 2), staleness=2).name
        'fedbuff'
    """
    checks.require_integer("fedbuff", min_value=0, staleness=staleness)
    base, facts = fedavg(grad, **fedavg_options), dict(staleness=staleness)
    return algorithm(
        Fn(_init, base.server.data, facts),
        Fn(_client, base.client.data, facts),
        Fn(_server, base.server.data),
        releases=base.releases,
        name="fedbuff",
    )
