"""Iterate averaging (Polyak, Ruppert): the model that counts is the mean of the models of the
rounds so far."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ..core import checks, pytrees
from ..core.records import Algorithm, Fn, named, record


@record
class State:
    inner: Any  # what the algorithm itself remembers on the server
    mean: Any  # of the models after the rounds that count


@named("averaged.init")
def _init(params, *, inner):
    server, own = inner(params)
    return State(server, params), own


@named("averaged.client")
def _client(ctx, keys, server, own, rows, *, inner):
    return inner(ctx, keys, server.inner, own, rows)


@named("averaged.server")
def _server(ctx, server, release, *, inner, params, first):
    moved = inner(ctx, server.inner, release)
    share = 1 / jnp.maximum(
        ctx.round - first + 1, 1
    )  # up to the first that counts, the model itself
    return State(
        moved,
        pytrees.map(lambda m, w: m + share.astype(m.dtype) * (w - m), server.mean, params(moved)),
    )


@named("averaged.params")
def _mean(server):
    return server.mean


def averaged(algorithm: Algorithm, first=0) -> Algorithm:
    """The same algorithm, judged by the mean of its models from round `first` on.

    Clients go on from the last model, not from the mean.  Post-processing of releases: it costs no
    privacy, and takes away much of the noise that the last rounds left in the model.

    Units:
        first: a round, >= 0; before it the last model counts.
    """
    if not isinstance(algorithm, Algorithm):
        checks.fail("averaged", "an algorithm of jfl.algorithms", f"{algorithm!r}")
    checks.nonnegative("averaged", single=True, first=first)
    server = dict(inner=algorithm.server, params=algorithm.params, first=checks.scalar(first))
    return dataclasses.replace(
        algorithm,
        init=Fn(_init, dict(inner=algorithm.init)),
        params=Fn(_mean),
        client=Fn(_client, dict(inner=algorithm.client)),
        server=Fn(_server, server),
    )
