"""Iterate averaging (Polyak, Ruppert): the model that counts is the mean of the models of the
rounds so far."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ..core import checks, pytrees
from ..core.records import Algorithm, Fn, named, record
from .base import Number


@record
class State:
    """What the server remembers."""

    inner: Any  # what the algorithm itself remembers on the server
    mean: Any  # of the models after the rounds that count


@named("averaged.init")
def _init(params, *, inner):
    server, client_state = inner(params)
    return State(server, params), client_state


@named("averaged.client")
def _client(context, keys, server, client_state, rows, *, inner):
    return inner(context, keys, server.inner, client_state, rows)


@named("averaged.server")
def _server(context, server, release, *, inner, params, first):
    moved = inner(context, server.inner, release)
    # up to the first round that counts the mean is the model itself
    share = 1 / jnp.maximum(context.round - first + 1, 1)
    step_to = lambda mean, model: mean + share.astype(mean.dtype) * (model - mean)
    return State(moved, pytrees.map(step_to, server.mean, params(moved)))


@named("averaged.params")
def _mean(server):
    return server.mean


def averaged(algorithm: Algorithm, first: Number = 0) -> Algorithm:
    """The same algorithm, judged by the mean of its models from round `first` on.

    Clients go on from the last model, not from the mean.  Post-processing of releases: it costs no
    privacy, and takes away much of the noise that the last rounds left in the model.

    Args:
        algorithm: any algorithm.
        first: a round, >= 0; before it the last model counts.
    """
    if not isinstance(algorithm, Algorithm):
        checks.fail("averaged", "an algorithm of jfl.algorithms", f"{algorithm!r}")
    checks.require_nonnegative("averaged", single=True, first=first)
    server = dict(inner=algorithm.server, params=algorithm.params, first=checks.as_scalar(first))
    return dataclasses.replace(
        algorithm,
        init=Fn(_init, dict(inner=algorithm.init)),
        params=Fn(_mean),
        client=Fn(_client, dict(inner=algorithm.client)),
        server=Fn(_server, server),
    )
