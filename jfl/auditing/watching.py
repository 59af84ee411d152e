"""An algorithm that also keeps what an adversary sees of its run."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core import checks
from ..core.errors import NotAnalysable
from ..core.records import Algorithm, Fn, Tree, named

COPIES = 4  # of the parameters in what is released; more are not looked at


class Watched(NamedTuple):
    """A server that also remembers what the adversary saw."""

    state: Any
    first: Tree  # the parameters before the first round, which are public
    seen: Any


class WatchedClient(NamedTuple):
    """A client state together with what the adversary saw of the client's personal model."""

    state: Any
    seen: jax.Array  # Float[R, COPIES]


class Moment(NamedTuple):
    """What an adversary may know of one round."""

    round: jax.Array
    first: Tree  # parameters before the first round
    before: Tree  # parameters that were broadcast
    release: Tree  # what came from the cohort
    after: Tree  # parameters after the round


def watched(algorithm: Algorithm, seen: Any, see: Fn, client: Fn | None = None) -> Algorithm:
    """The algorithm, with what is seen of each round kept in `run.server.seen`.

    Args:
        algorithm: what runs.
        seen: zeros of what is kept, a pytree.
        see: (moment, seen) -> seen, once a round.
        client: in the place of the algorithm's; None: its own.
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
    """Return the algorithm with its clients' personal models kept in `run.client_states.seen`.

    Args:
        algorithm: has personal models.
        weight: a projection; what is kept of each round is the personal model along it.
        rounds: of each run.
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


def copies(release: Tree, like: list) -> list[list]:
    """The leaves of each copy of the parameters in what was released.

    Raises:
        NotAnalysable: for a release that is not made of copies.
    """
    leaves, size = jax.tree.leaves(release), len(like)
    alike = len(leaves) % size == 0 and all(
        x.shape == like[i % size].shape for i, x in enumerate(leaves)
    )
    if not alike:
        checks.fail(
            "jfl.audit",
            "a release made of copies of the parameters",
            [x.shape for x in leaves],
            error=NotAnalysable,
        )
    return [leaves[i : i + size] for i in range(0, len(leaves), size)]


def projections(release: Tree, weight: list) -> jax.Array:
    """Float[COPIES]: of each copy of the parameters, along `weight`; zeros beyond."""
    dot = lambda part: sum(jnp.vdot(w, x.astype(jnp.float32)) for w, x in zip(weight, part))
    found = [dot(part) for part in copies(release, weight)[:COPIES]]
    return jnp.stack([*found, *[jnp.zeros(())] * (COPIES - len(found))])
