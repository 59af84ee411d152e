"""Algorithms that also record what an adversary observes of their run."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core import checks, pytrees
from ..core.errors import NotAnalysable
from ..core.records import Algorithm, Fn, Tree, named

COPIES = 4  # copies of the parameters in a release that are observed; further ones are ignored


class Watched(NamedTuple):
    """A server state together with the adversary's observations."""

    state: Any
    first: Tree  # the parameters before the first round, which are public
    seen: Any


class WatchedClient(NamedTuple):
    """A client state together with the adversary's observations of the personal model."""

    state: Any
    seen: jax.Array  # Float[R, COPIES]


class Moment(NamedTuple):
    """The values of one round that an adversary may know."""

    round: jax.Array
    first: Tree  # parameters before the first round
    before: Tree  # parameters that were broadcast
    release: Tree  # what came from the cohort
    after: Tree  # parameters after the round


def watched(algorithm: Algorithm, seen: Any, see: Fn, client: Fn | None = None) -> Algorithm:
    """Return the algorithm, changed to record the observations of each round in `run.server.seen`.

    Args:
        algorithm: the algorithm that runs.
        seen: zeros in the shape of the observations, a pytree.
        see: a function (moment, seen) -> seen, called in each round with the Moment of the round
            and the observations so far.
        client: a client function that replaces the algorithm's; None keeps it.
    """
    of = algorithm
    return dataclasses.replace(
        algorithm,
        init=Fn(_init, dict(of=of.init, seen=seen)),
        client=Fn(_client, dict(of=of.client if client is None else client)),
        server=Fn(_server, dict(of=of.server, params=of.params, see=see)),
        params=Fn(_params, dict(of=of.params)),
    )


def watched_personal(algorithm: Algorithm, weight: Tree, rounds: int) -> Algorithm:
    """Return the algorithm, changed to record a projection of each personal model.

    A run of it holds them in `run.client_states.seen`.

    Args:
        algorithm: an algorithm with personal models.
        weight: the direction onto which models are projected, a pytree like the parameters.
        rounds: the number of rounds of each run.
    """
    of = algorithm
    leaves = tuple(jax.tree.leaves(weight))
    return dataclasses.replace(
        algorithm,
        init=Fn(_init_personal, dict(of=of.init), dict(rounds=rounds)),
        client=Fn(_client_personal, dict(of=of.client, personal=of.personal, weight=leaves)),
        personal=None,
    )


@named("audit.init_personal")
def _init_personal(params, *, of, rounds):
    server, state = of(params)
    return server, WatchedClient(state, jnp.zeros((rounds, COPIES)))


@named("audit.client_personal")
def _client_personal(context, keys, server, own, rows, *, of, personal, weight):
    upload, state, diagnostics = of(context, keys, server, own.state, rows)
    found = projections(personal(server, state), weight)
    return upload, WatchedClient(state, own.seen.at[context.round].set(found)), diagnostics


@named("audit.init")
def _init(params, *, of, seen):
    server, own = of(params)
    return Watched(server, params, jax.tree.map(jnp.zeros_like, seen)), own


@named("audit.client")
def _client(context, keys, server, own, rows, *, of):
    return of(context, keys, server.state, own, rows)


@named("audit.server")
def _server(context, server, release, *, of, params, see):
    after = of(context, server.state, release)
    moment = Moment(context.round, server.first, params(server.state), release, params(after))
    return Watched(after, server.first, see(moment, server.seen))


@named("audit.params")
def _params(server, *, of):
    return of(server.state)


def change(moment: Moment, is_model: bool) -> Tree:
    """Return what a release reveals, as a change of the parameters.

    This is the release itself or, if it is a model, its difference from the broadcast model.

    Args:
        moment: the values of the round, among them the release and the broadcast model.
        is_model: whether the release is a model.
    """
    return pytrees.sub(moment.release, moment.before) if is_model else moment.release


def _copies(release: Tree, like: list) -> list[list]:
    """Return the leaves of each copy of the parameters in a release.

    Raises:
        NotAnalysable: If the release does not consist of such copies.
    """
    leaves, size = jax.tree.leaves(release), len(like)
    if len(leaves) % size or any(x.shape != like[i % size].shape for i, x in enumerate(leaves)):
        checks.fail(
            "jfl.audit",
            "a release made of copies of the parameters",
            [x.shape for x in leaves],
            "The attack cannot read other parts of an upload. Use jfl.audit_membership, which "
            "attacks models.",
            error=NotAnalysable,
        )
    return [leaves[i : i + size] for i in range(0, len(leaves), size)]


def projections(release: Tree, weight: list) -> jax.Array:
    """Return the inner product of `weight` with each copy of the parameters in a release.

    Args:
        release: a tree that may hold several copies of the parameters.
        weight: one array for each parameter.

    Returns:
        Float[COPIES]; 0 for missing copies.
    """
    dot = lambda part: sum(jnp.vdot(w, x.astype(jnp.float32)) for w, x in zip(weight, part))
    found = [dot(part) for part in _copies(release, weight)[:COPIES]]
    return jnp.stack([*found, *[jnp.zeros(())] * (COPIES - len(found))])
