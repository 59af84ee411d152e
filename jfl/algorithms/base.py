"""How an algorithm is put together, and what the builder of a run must know of it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..core import checks
from ..core.records import Algorithm, Fn, Release, named


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


def algorithm(
    init, client, server, *, releases=(), params=_params, name="algorithm", stateful=False
) -> Algorithm:
    """An algorithm of three pure functions.

    Args:
        init: params -> (server, own); own is what one client remembers, () for nothing.
        client: (ctx, keys, server, own, rows) -> (payload, own, Diagnostics).
        server: (ctx, server, release) -> server, where release has the shape of payload.
        releases: what the client's payload was made from, for the accountant: `work.releases()`, or
            a tuple of jfl.Release.  () claims nothing about examples.
        params: server -> params; the default reads `server.params`, or takes server itself.
        stateful: clients remember, which limits what the accountant may claim.

    Write functions at module level and bind their hyperparameters with jfl.Fn: then plans that
    differ in a number share one compiled program.
    """
    if not isinstance(releases, (list, tuple)) or not all(isinstance(r, Release) for r in releases):
        checks.fail(
            "algorithm",
            "releases, a tuple of jfl.Release",
            checks.shown(releases),
            "() claims nothing about examples.",
        )
    init, client, server, params = (
        f if isinstance(f, Fn) else Fn(f) for f in (init, client, server, params)
    )
    return Algorithm(init, client, server, params, tuple(releases), name, stateful)
