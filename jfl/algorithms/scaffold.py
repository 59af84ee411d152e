"""SCAFFOLD (Karimireddy et al., ICML 2020, Algorithm 1, option II; DP-SCAFFOLD: Noble et al., AISTATS 2022)."""
from typing import Any, NamedTuple

import optax

from .. import local, tree
from ..batches import without_replacement
from ..core import Fn, record
from .base import algorithm


@record
class State:
    params: Any
    optimizer: Any
    control: Any         # c, the mean of the clients' control variates


class Payload(NamedTuple):
    diff: Any
    control: Any         # change of c_i times the sum of learning rates: the two halves then share units and a clip


def _init(params, *, step, scale):
    server = step.init(params)
    return State(server.params, server.optimizer, tree.zeros_like(params)), tree.zeros_like(params)


def _client(ctx, keys, server, own, rows, *, work):
    drift = tree.sub(server.control, own)
    trained, mean, rates, seen = local.train(work, ctx, keys, server.params, rows, lambda g, w: tree.add(g, drift))
    # option II's c_i - c + (x - y) / (K lr) is the mean gradient of plain SGD; this form holds for any optimizer
    return Payload(tree.sub(trained, server.params), tree.scale(rates, tree.sub(mean, own))), mean, seen


def _server(ctx, server, release, *, step, scale):
    moved = step(ctx, local.Server(server.params, server.optimizer), release.diff)
    rates = scale(ctx.round)
    return State(moved.params, moved.optimizer,
                 tree.axpy(ctx.cohort / ctx.clients / rates, release.control, server.control))


def _rates(round_, *, lr, steps):
    return local.rates(lr, round_ * steps, steps)


def scaffold(grad, *, lr=0.1, steps=10, batch=without_replacement(8), optimizer=optax.sgd,
             server_lr=1.0, server_optimizer=optax.sgd):
    """FedAvg with control variates: local steps follow gradient + c - c_i.

    The drift is added after clipping and noise.  A client's c_i becomes the mean of its (noisy) gradients; with
    uniform weights, a cohort without repeats and an unclipped, noiseless release, c stays the mean of all c_i.

    Releases the pair (difference, K lr * change of c_i): a client-level clip covers both together.
    """
    work = local.work(grad, batch, lr=lr, steps=steps, optimizer=optimizer)
    both = dict(step=local.server_step(server_lr, server_optimizer),
                scale=Fn(_rates, dict(lr=work.lr), dict(steps=steps)))
    return algorithm(Fn(_init, both), Fn(_client, dict(work=work)), Fn(_server, both), releases=work.releases(),
                     name="scaffold", stateful=True)
