"""How an algorithm is put together, and what the builder of a run must know of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from ..core import checks
from ..core.options import readable
from ..core.records import Algorithm, Fn, Release, named

Number = float | jax.Array  # a hyperparameter: traced data, so that a sweep over it is a vmap
Rate = Number | Callable  # or a schedule: of round * steps + step for a client, else of the round
Optimizer = Callable | optax.GradientTransformation  # an optax factory, or what it gives


class Traits(NamedTuple):
    """What the builder of a run must know of an algorithm beside its signature.

    Attributes:
        example_noise: where noise for examples goes: "gradient", in each local step; "mechanism",
            the argument of that name; None: nowhere.
        client_noise: where noise for clients goes: "release", on the aggregate; "upload", on what
            each client sends; None: nowhere.
        payload_models: how many models a client's upload is as large as.
        as_printed: arguments with which it is the algorithm as its paper prints it.
    """

    example_noise: str | None = "gradient"
    client_noise: str | None = "release"
    payload_models: int = 1
    as_printed: Mapping[str, Any] = {}

    @property
    def printed_unit(self) -> str:
        """The unit that the formula of its paper protects."""
        return "client" if self.client_noise == "upload" else "example"


def traits(**values) -> Callable:
    """Decorate the factory of an algorithm with its `Traits`, where they are not the usual ones."""

    def decorate(factory):
        factory.traits = Traits(**values)
        return factory

    return decorate


def traits_of(factory: Callable) -> Traits:
    """What `traits` said of a factory, or the usual ones."""
    return getattr(factory, "traits", Traits())


@named("algorithm.params")
def _params(server):
    return getattr(server, "params", server)


@readable
def algorithm(
    init: Callable,
    client: Callable,
    server: Callable,
    *,
    releases: Sequence[Release] = (),
    params: Callable = _params,
    name: str = "algorithm",
    stateful: bool = False,
    uploads: str = "difference",
    checks_its_solve: bool = False,
    personal: Callable | None = None,
) -> Algorithm:
    """An algorithm of three pure functions.

    Write functions at module level and bind their hyperparameters with jfl.Fn: then plans that
    differ in a number share one compiled program.

    Args:
        init: params -> (server, client_state); the second is what one client remembers, () for
            nothing.
        client: (context, keys, server, client_state, rows) -> (payload, client_state,
            Diagnostics).
        server: (context, server, release) -> server, where release has the shape of payload.
        releases: what the client's payload was made from, for the accountant: `work.releases()`, or
            a tuple of jfl.Release.  () claims nothing about examples.
        params: server -> params; the default reads `server.params`, or takes server itself.
        name: what plans and results call the algorithm.
        stateful: clients remember, which limits what the accountant may claim.
        uploads: "difference" of models, or "model": then all clients have to take part, since a
            mean of models needs weights that add up to 1.
        checks_its_solve: a client that stops its solve too early counts as an overflow, which voids
            the run.  Only then may its mechanism declare bounded(..., "prox_erm").
        personal: (server, client_state) -> params, a client's own model, by which its held-out
            rows are judged; None: all are judged by `params`.  What a client keeps for itself is
            not released: no guarantee covers a personal model that it hands on.
    """
    if not isinstance(releases, (list, tuple)) or not all(isinstance(r, Release) for r in releases):
        checks.fail(
            "algorithm",
            "releases, a tuple of jfl.Release",
            checks.shown(releases),
            "() claims nothing about examples.",
        )
    checks.choice("algorithm", ("difference", "model"), uploads=uploads)
    checks.choice("algorithm", (False, True), checks_its_solve=checks_its_solve)
    init, client, server, params = (
        f if isinstance(f, Fn) else Fn(f) for f in (init, client, server, params)
    )
    return Algorithm(
        init,
        client,
        server,
        params,
        releases=tuple(releases),
        name=name,
        stateful=stateful,
        uploads=uploads,
        checks_its_solve=checks_its_solve,
        personal=personal if personal is None or isinstance(personal, Fn) else Fn(personal),
    )
