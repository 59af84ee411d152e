"""How an algorithm is put together."""

from ..core import checks
from ..core.records import Algorithm, Fn, Release, named


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
