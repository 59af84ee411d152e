"""Where noise protects whole clients: on their uploads, and on what the server releases of them."""

import numpy as np

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.records import Caveat, Fn, Plan
from ..accountants import events
from ..mechanisms.chain import bound, limit, multiplier_follows, noisy, shape
from .example_level import Entry, kinds, level, levels, refused
from .participation import VIEWS, absent, every_round, share_of, some_rounds, tail, who

OTHERS = Caveat(
    "counts the noise of the other clients, who are taken not to help the third party", "others"
)


def uploads(plan: Plan, rounds: int, others: bool = True) -> list[Entry]:
    """Noise on each client's own upload; a third party meets it in a sum, with the noise of the
    others.

    Args:
        others: False for a third party that knows their noise.
    """
    if not noisy(plan.upload):
        return []
    sampler, adjacency = plan.sampler, plan.upload.adjacency or "replace_one"
    share = np.broadcast_to(share_of(sampler), (sampler.clients,))
    try:
        own = (levels(plan.upload, rounds, sampler.clients),)
    except NotAnalysable as error:
        return [refused("client", view, adjacency, error) for view in VIEWS]
    worst = kinds(np.ones(share.shape, int), share, own)

    def one(z, rows, client):
        return events.gaussian(level(z, client))

    def entry(view, happens, one, series, attends, differ, caveats=()):
        return Entry(
            "client",
            view,
            adjacency,
            happens,
            own,
            cohort_overflow(sampler),
            absent(plan, view),
            one=one,
            steps=lambda z, rows, client: [(one(z, rows, client), 1)],
            attends=attends,
            clients=_all(sampler, share if view == "third_party" else 0.0),
            differ=differ,
            series=series,
            caveats=who(plan, view) + caveats,
        )

    always = lambda share, upload: every_round(sampler, upload)
    server = entry(
        "server",
        lambda z: tuple(every_round(sampler, one(z, 0, c)) for _, _, c in worst),
        one,
        len(own[0]) > 1,
        always,
        own,
    )
    if not summed(plan):
        alone = lambda z: tuple(some_rounds(sampler, s, one(z, 0, c)) for _, s, c in worst)
        absence = lambda share, upload: some_rounds(sampler, share, upload)
        return [server, entry("third_party", alone, one, len(own[0]) > 1, absence, own)]
    shares = weights(plan, rounds)

    def summed_up(z, rows, client):
        return _column(
            _in_the_sum(shares, z[0] if isinstance(z, tuple) else np.full((1, 1), z), 0.0, others),
            client,
        )

    all_ = lambda z: tuple(summed_up(z, 0, c) for c in _unlike(shares, own[0]))
    own = (_every_round(own[0], shares),)
    return [
        server,
        entry(
            "third_party",
            all_,
            summed_up,
            len(own[0]) > 1,
            None,
            (*own, shares),
            (OTHERS,) if others else (),
        ),
    ]


def release(plan: Plan, rounds: int, others: bool = True) -> list[Entry]:
    """Noise of the server: for those who see models only.  Noise of the uploads that it sums counts
    too."""
    if not noisy(plan.release):
        return []
    sampler, caveats = plan.sampler, who(plan, "third_party")
    adjacency = plan.release.adjacency or (
        "add_remove" if sampler.scheme == "poisson" else "replace_one"
    )
    try:
        own = (_release_levels(plan, rounds),)
        steps = lambda z, rows, client: [(_cohort(plan, adjacency, events.gaussian(level(z))), 1)]
        happens = lambda z: (steps(z, 0, 0)[0][0],)
        series, differ = len(own[0]) > 1, ()
        if (
            noisy(plan.upload)
            and summed(plan)
            and adjacency == "replace_one"
            and shape(plan.release) is None
        ):
            shares, theirs = weights(plan, rounds), levels(plan.upload, rounds, sampler.clients)
            # in units of what a client of weight 1 may change
            unit = float(bound(plan.release)) / limit(plan.upload) * shares.max(1, keepdims=True)

            def both(z):
                return _in_the_sum(
                    shares, theirs, unit * (z[0] if isinstance(z, tuple) else z), others
                )

            happens = lambda z: tuple(_column(both(z), c) for c in _unlike(shares, theirs))
            steps = lambda z, rows, client: [(_column(both(z), client), 1)]
            differ = (shares, theirs)
            own = (_every_round(own[0], np.zeros((max(len(shares), len(theirs)), 1))),)
            series, caveats = len(own[0]) > 1, caveats + ((OTHERS,) if others else ())
        happens(own)
    except NotAnalysable as error:
        return [refused("client", "third_party", adjacency, error)]
    mixture = plan.algorithm.stateful and sampler.scheme == "without_replacement"
    return [
        Entry(
            "client",
            "third_party",
            adjacency,
            happens,
            own,
            cohort_overflow(sampler),
            mixture,
            steps=steps,
            drawn="clients",
            clients=_all(sampler, 0.0),
            differ=differ,
            series=series,
            caveats=caveats,
        )
    ]


def _all(sampler, share):
    """Every client, as those of an entry that asks for no rows."""
    number = np.arange(sampler.clients)
    return np.ones(number.shape, int), np.broadcast_to(share, number.shape), number


def summed(plan: Plan) -> bool:
    """True if all that leaves the server is a sum of all clients' uploads, each with noise of one
    kind."""
    straight = all(s.role != "row" or s.name == "bounded" for s in plan.release.stages)
    plain = all(s.role != "post" or s.name == "divide" for s in plan.upload.stages)
    return straight and plain and plan.sampler.scheme == "full" and shape(plan.upload) is None


def _every_round(z, like):
    """Levels with a row for each round if `like` has one: noise that is alike meets weights that
    are not."""
    return np.broadcast_to(z, (max(len(z), len(like)), z.shape[1]))


def weights(plan, rounds):
    """Aggregation weights, Float64[rounds or 1, C]."""
    if isinstance(plan.weights, Fn):
        return np.stack([np.asarray(plan.weights(r), np.float64) for r in range(rounds)])
    return np.asarray(plan.weights, np.float64)[None]


def _in_the_sum(weights, z, more, others):
    """Multipliers [rounds or 1, C] of a client in the weighted sum of all: the noise is
    everybody's, the shift its own."""
    noise = np.square(weights * z)
    std = np.sqrt((noise.sum(1, keepdims=True) if others else noise) + np.square(more))
    return np.where(
        weights > 0, np.minimum(std / np.where(weights > 0, weights, 1.0), 1e12), 1e12
    )  # 0: not in it


def _column(found, client):
    column = found[:, client]
    return events.gaussian(column if len(column) > 1 else float(column[0]))


def _unlike(weights, z):
    """Clients that differ in weights or noise."""
    both = np.concatenate([weights, np.broadcast_to(z, (len(z), weights.shape[1]))])
    return np.unique(both, axis=1, return_index=True)[1]


def _release_levels(plan, rounds):
    weights = plan.weights
    if multiplier_follows(plan.release):  # noise in units of the sensitivity follows the weights
        return levels(plan.release, rounds, 1)
    if not isinstance(weights, Fn):
        return levels(plan.release, rounds, 1, lambda round_: float(np.max(np.asarray(weights))))
    each = [float(np.max(np.asarray(weights(r)))) for r in range(rounds)]
    found = levels(plan.release, rounds, 1)
    return found / np.array(each)[:, None]


def _cohort(plan, adjacency, noise):
    sampler, scheme = plan.sampler, plan.sampler.scheme
    if scheme == "with_replacement" and plan.algorithm.stateful:
        checks.fail(
            "jfl.guarantee",
            "a sampler it can analyse for unit='client' and clients that remember",
            "sampling.with_replacement",
            "Use sampling.without_replacement or sampling.poisson.",
            error=NotAnalysable,
        )
    if scheme in ("full", "first_responders") or (
        scheme == "poisson" and adjacency == "replace_one"
    ):
        return noise
    if scheme == "poisson":
        return events.poisson(share_of(sampler), noise)
    if scheme not in ("with_replacement", "without_replacement"):
        checks.fail(
            "jfl.guarantee", "a scheme of jfl.sampling", f"scheme={scheme!r}", error=NotAnalysable
        )
    if adjacency != "replace_one":
        checks.fail(
            "jfl.guarantee",
            f"adjacency 'replace_one' for sampling.{scheme}",
            f"{adjacency!r}",
            (
                "One client more changes the cohort of the others: use sampling.poisson for "
                "add_remove."
            ),
            error=NotAnalysable,
        )
    if scheme == "with_replacement":  # a client drawn m times moves the sum m times
        return events.with_replacement(sampler.capacity, 1 / np.max(share_of(sampler)), noise)
    if sampler.capacity >= sampler.clients:
        return noise
    if plan.algorithm.stateful:
        # what others remember tells who came with them, so cohorts are taken as seen: only absence
        # protects
        return events.participation(share_of(sampler), noise)
    return events.without_replacement(sampler.capacity, sampler.clients, noise)


def cohort_overflow(sampler):
    if sampler.scheme != "poisson":
        return 0.0
    return tail(sampler.capacity, sampler.clients, share_of(sampler))
