"""Iterate averaging (Polyak, Ruppert): return the mean of the models of several rounds."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ..core import checks, pytrees
from ..core.records import Algorithm, Fn, named, record
from .base import Number


@record
class State:
    """The server's state."""

    inner: Any  # the server's state of the averaged algorithm
    mean: Any  # the mean model


@named("averaged.init")
def _init(params, *, inner):
    server, client_state = inner(params)
    return State(server, params), client_state


@named("averaged.client")
def _client(context, keys, server, client_state, rows, *, inner):
    return inner(context, keys, server.inner, client_state, rows)


@named("averaged.server")
def _server(context, server, release, *, inner, params, first):
    new = inner(context, server.inner, release)
    # Up to round `first`, the weight is 1 and the mean is the last model.
    weight = 1 / jnp.maximum(context.round - first + 1, 1)
    update = lambda mean, model: mean + weight.astype(mean.dtype) * (model - mean)
    return State(new, pytrees.map(update, server.mean, params(new)))


@named("averaged.params")
def _mean(server):
    return server.mean


def averaged(algorithm: Algorithm, first: Number = 0) -> Algorithm:
    """Return an algorithm whose model is the mean of the models since round `first`.

    The mean is evaluated and returned, while clients continue from the model of the latest round.
    Averaging removes much of the noise of the last rounds. It is post-processing, so it does not
    affect privacy.

    Args:
        algorithm: any algorithm.
        first: the first round whose model enters the mean, >= 0. Before that round, the model is
            not averaged.
    """
    if not isinstance(algorithm, Algorithm):
        checks.fail("averaged", "an algorithm of jfl.algorithms", checks.short_repr(algorithm))
    checks.require_nonnegative("averaged", single=True, first=first)
    server = dict(inner=algorithm.server, params=algorithm.params, first=checks.as_scalar(first))
    return dataclasses.replace(
        algorithm,
        init=Fn(_init, dict(inner=algorithm.init)),
        params=Fn(_mean),
        client=Fn(_client, dict(inner=algorithm.client)),
        server=Fn(_server, server),
    )
