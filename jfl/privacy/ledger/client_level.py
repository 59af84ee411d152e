"""Where noise protects whole clients: on their uploads, and on what the server releases of them."""

from typing import Any

import numpy as np

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.records import Caveat, Fn, Plan
from ...sampling import clients as sampling
from ..mechanisms.chain import bound, law_of, limit, multiplier_follows, noisy, shape
from ..mechanisms.correlated import strategy_of
from ..mechanisms.distributed import encoding_of
from ..mechanisms.integers import Encoding
from .entry import ABSENT, Clients, Entry, Part, WeightedSum, refused
from .noise_levels import levels, usable
from .over_rounds import ALLOCATED, allocates, amplifies, of_uploads, once_a_round, spread
from .participation import attendance_of, in_turns, share_of, tail, worst_columns

# who sees each upload, and who sees models; a sum of uploads alone is another view
BY_SIGHT = ("server", "third_party")
SECURE = Caveat(
    "taken, not seen: secure aggregation shows nothing but the sum of a cohort's uploads, no "
    "client drops out, and none tells its noise",
    "secure-aggregation",
)
BITS = "an upload has {} bits a coordinate; noise is drawn from a table of 63 bits"
# schemes whose cohorts are always as large, of clients that come once
FIXED_COHORTS = ("full", "without_replacement", "first_responders", "min_separation")
OTHERS = Caveat(
    "counts the noise of the other clients, who are taken not to help the third party", "others"
)


def uploads(plan: Plan, rounds: int, others: bool = True) -> list[Entry]:
    """Noise on each client's own upload; a third party meets it in a sum, with the noise of the
    others.

    Args:
        plan: with noise on uploads, or without.
        rounds: how many of its rounds are looked at.
        others: False for a third party that knows the noise of the others.
    """
    if not noisy(plan.upload):
        return []
    adjacency, number = plan.upload.adjacency or "replace_one", np.arange(plan.sampler.clients)
    try:
        noise, of_rounds = levels(plan.upload, rounds, len(number)), of_uploads(plan, rounds)
    except NotAnalysable as error:
        return [refused("client", view, adjacency, error) for view in BY_SIGHT]
    ones, entries = np.ones(number.shape, int), []
    for view in BY_SIGHT:
        attendance = attendance_of(plan, view)
        entries.append(
            Entry(
                "client",
                view,
                adjacency,
                (Part("upload", noise, law=law_of(plan.upload)),),
                Clients(ones, attendance.share, number),
                attendance.chance,
                attendance.turns,
                worst_columns(ones, attendance.share, [noise], number),
                cohort_overflow(plan.sampler),
                mixture=attendance.gains,
                caveats=attendance.caveats,
            )
        )
    if of_rounds is not None:
        return [_correlated(entry, of_rounds) for entry in entries]
    if encoding_of(plan.upload) is not None:
        return _of_integers(plan, entries, others)
    if plan.secure_aggregation:
        entries.append(_aggregate(plan, rounds, noise, adjacency))
    if summed(plan) and law_of(plan.upload) == "gaussian":  # of which a sum has more
        shares = weights(plan, rounds)
        total = WeightedSum(shares, others)
        entries[1] = entries[1]._replace(
            parts=(Part("sum of uploads", _every_round(noise, shares), summed=total),),
            chance=None,
            worst=_unlike(shares, noise),
            caveats=entries[1].caveats + ((OTHERS,) if others else ()),
        )
    return entries


def _correlated(entry, of_rounds):
    """The same where noise goes on over rounds: each counts, whoever sees it, with the client's own
    noise alone."""
    always = np.zeros_like(entry.clients.share)
    return entry._replace(
        parts=tuple(p._replace(of_rounds=of_rounds) for p in entry.parts),
        clients=entry.clients._replace(share=always),
        chance=None,
        turns=1,
        worst=((0, 0),),
        mixture=False,
        overflow=0.0,
        method="matrix_gaussian",
    )


def _aggregate(plan, rounds, noise, adjacency):
    """For whoever sees sums of cohorts, and who is in them: the client's noise, and that of the
    others whose noise weighs least."""
    sampler, clients = plan.sampler, plan.sampler.clients
    try:
        if sampler.scheme not in FIXED_COHORTS:
            checks.fail(
                "jfl.guarantee",
                "cohorts of a fixed size for view='aggregate', out of "
                + ", ".join(f"sampling.{name}" for name in FIXED_COHORTS),
                f"sampling.{sampler.scheme}",
                "In a small cohort there is little noise.",
                error=NotAnalysable,
            )
        gaussian = law_of(plan.upload) == "gaussian" and shape(plan.upload) is None
        if not (_straight(plan) and gaussian) or noise.shape[1] > 1:
            checks.fail(
                "jfl.guarantee",
                "isotropic Gaussian noise of uploads, of one level, that are summed as they are",
                "a clip after it, a divisor or a noise of each client, or other noise",
                "Clip in upload, and divide by a number.",
                error=NotAnalysable,
            )
    except NotAnalysable as error:
        return refused("client", "aggregate", adjacency, error)
    shares = weights(plan, rounds)
    own, others = np.square(shares), sampler.capacity - 1
    least = np.sort(own, axis=1)  # so many others with the least noise, without the client itself
    sums = np.cumsum(least, axis=1)
    if others:
        is_among = own <= least[:, [others - 1]]
        theirs = np.where(is_among, sums[:, [others]] - own, sums[:, [others - 1]])
    else:
        theirs = np.zeros(own.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.where(shares > 0, np.sqrt(own + theirs) / shares, ABSENT)
    gain = np.minimum(gain, ABSENT)
    attendance = attendance_of(plan, "aggregate")
    ones, number = np.ones(clients, int), np.arange(clients)
    return Entry(
        "client",
        "aggregate",
        adjacency,
        (Part("sum of uploads", _every_round(noise, gain), of_rounds=gain),),
        Clients(ones, attendance.share, number),
        attendance.chance,
        attendance.turns,
        tuple((c, c) for c in np.unique(gain, axis=1, return_index=True)[1].tolist()),
        status="conditional",
        caveats=attendance.caveats + (SECURE,),
    )


def _of_integers(plan, entries, others):
    """The same entries where uploads are integers: Renyi bounds, of one client's noise or of a
    cohort's."""
    encoding: Any = encoding_of(plan.upload)
    cohort, found = plan.sampler.capacity, []
    try:
        _enough_shares(plan.sampler, encoding)
    except NotAnalysable as error:
        views = [entry.view for entry in entries] + ["aggregate"] * plan.secure_aggregation
        return [refused("client", view, entries[0].adjacency, error) for view in views]
    bits = (Caveat(BITS.format(encoding.bits), "integers"),)
    together = cohort if others else 1
    views = [(entries[0], 1, bits), (entries[1], together, bits + ((OTHERS,) if others else ()))]
    if plan.secure_aggregation:
        seen = entries[0]._replace(view="aggregate", status="conditional")
        views.append((seen, cohort, (*bits, SECURE)))
    for entry, clients, caveats in views:
        part = of_integers(encoding, clients)
        found.append(entry._replace(parts=(part,), caveats=entry.caveats + caveats))
    return found


def _enough_shares(sampler, encoding):
    if sampler.scheme not in FIXED_COHORTS or sampler.capacity != encoding.cohort:
        checks.fail(
            "jfl.guarantee",
            f"cohorts of always {encoding.cohort} clients, as jfl.distributed was told",
            f"sampling.{sampler.scheme}, with room for {sampler.capacity}",
            "Each client adds its share of the noise of so many.",
            error=NotAnalysable,
        )


def of_integers(encoding: Encoding, clients: int, moves: float = 1.0) -> Part:
    """An integer release of so many clients' sum, about one that moves it by `moves` uploads."""
    std = encoding.share * clients**0.5 * encoding.scale
    level = np.array([[std / (encoding.sensitivity / encoding.clip_norm * encoding.longest)]])
    return Part(
        "upload" if clients == 1 else "sum of uploads",
        level,
        moves=moves,
        renyi=(*encoding.bounds(clients, moves), clients),
    )


def _straight(plan):
    """True if each upload reaches the sum as its noise left it."""
    straight = all(s.role != "row" or s.declared == "upload" for s in plan.release.stages)
    return straight and all(s.role != "post" or s.divisor == "number" for s in plan.upload.stages)


def release(plan: Plan, rounds: int, others: bool = True) -> list[Entry]:
    """Noise of the server: for those who see models only.  Noise of the uploads that it sums counts
    too."""
    if not noisy(plan.release):
        return []
    sampler, caveats = plan.sampler, in_turns(plan)
    adjacency = plan.release.adjacency or (sampling.adjacency(sampler))
    worst, method = ((0, 0),), ""
    try:
        noise = _release_levels(plan, rounds)
        of_rounds, method = spread(plan, noise, rounds, adjacency)
        law = law_of(plan.release)
        if law != "gaussian" and of_rounds is not None:
            checks.fail(
                "jfl.guarantee",
                "Gaussian noise where clients take turns or are allocated",
                f"{law} noise",
                "Use sampling.poisson or sampling.without_replacement.",
                error=NotAnalysable,
            )
        cohort: Any = _cohort(plan, adjacency, of_rounds)
        part = Part("model", noise, *cohort, of_rounds=of_rounds, law=law)
        if (
            noisy(plan.upload)
            and law == law_of(plan.upload) == "gaussian"
            and strategy_of(plan.upload) is None
            and of_rounds is None
            and summed(plan)
            and adjacency == "replace_one"
            and shape(plan.release) is None
        ):
            shares, theirs = weights(plan, rounds), levels(plan.upload, rounds, sampler.clients)
            # in units of what a client of weight 1 may change
            unit = float(bound(plan.release)) / limit(plan.upload) * shares.max(1, keepdims=True)
            rows = np.zeros((max(len(shares), len(theirs)), 1))
            part = Part(
                "model",
                _every_round(noise, rows),
                summed=WeightedSum(shares, others, theirs, unit),
            )
            worst, caveats = _unlike(shares, theirs), caveats + ((OTHERS,) if others else ())
    except NotAnalysable as error:
        return [refused("client", "third_party", adjacency, error)]
    number = np.arange(sampler.clients)
    return [
        Entry(
            "client",
            "third_party",
            adjacency,
            (part,),
            Clients(np.ones(number.shape, int), np.zeros(number.shape), number),
            worst=worst,
            overflow=cohort_overflow(sampler),
            mixture=part.sampling == "participation",
            noise_of="server",
            drawn="clients",
            caveats=caveats,
            method=method,
        )
    ]


def summed(plan: Plan) -> bool:
    """True if all that leaves the server is a sum of all clients' uploads, each with noise of one
    kind."""
    return _straight(plan) and plan.sampler.scheme == "full" and shape(plan.upload) is None


def _every_round(z, like):
    """Levels with a row for each round if `like` has one: noise that is alike meets weights that
    are not."""
    return np.broadcast_to(z, (max(len(z), len(like)), z.shape[1]))


def weights(plan, rounds):
    """Aggregation weights, Float64[rounds or 1, C]."""
    if isinstance(plan.weights, Fn):
        return np.stack([np.asarray(plan.weights(r), np.float64) for r in range(rounds)])
    return np.asarray(plan.weights, np.float64)[None]


def _unlike(weights, noise):
    """Columns of clients that differ in weights or noise."""
    both = np.concatenate([weights, np.broadcast_to(noise, (len(noise), weights.shape[1]))])
    return tuple((c, c) for c in np.unique(both, axis=1, return_index=True)[1].tolist())


def _release_levels(plan, rounds):
    weights = plan.weights
    if multiplier_follows(plan.release):  # noise in units of the sensitivity follows the weights
        return levels(plan.release, rounds, 1)
    if not isinstance(weights, Fn):
        return levels(plan.release, rounds, 1, lambda round_: float(np.max(np.asarray(weights))))
    each = [float(np.max(np.asarray(weights(r)))) for r in range(rounds)]
    return usable(levels(plan.release, rounds, 1) / np.array(each)[:, None])


def _cohort(plan, adjacency, of_rounds=None):
    """How the clients of a release are sampled: kind, elements drawn, and those they are drawn
    from."""
    sampler, scheme = plan.sampler, plan.sampler.scheme
    if scheme == "with_replacement" and plan.algorithm.stateful:
        checks.fail(
            "jfl.guarantee",
            "a sampler it can analyse for unit='client' and clients that remember",
            "sampling.with_replacement",
            "Use sampling.without_replacement or sampling.poisson.",
            error=NotAnalysable,
        )
    if scheme in ("full", "first_responders", "min_separation"):
        return ("none",)
    if scheme in ALLOCATED:
        gains = allocates(plan, of_rounds, adjacency)
        return ("allocation", np.ones(1), np.array([sampler.epoch])) if gains else ("none",)
    if strategy_of(plan.release) is not None:
        return _beside_correlated_noise(plan, adjacency)
    if scheme in sampling.ON_THEIR_OWN:
        return _by_chance(sampler)
    if scheme == "truncated_poisson":
        return _truncated(plan, adjacency)
    if scheme not in ("with_replacement", "without_replacement"):
        checks.fail(
            "jfl.guarantee", "a scheme of jfl.sampling", f"scheme={scheme!r}", error=NotAnalysable
        )
    if adjacency != "replace_one" and (adjacency, scheme) != ("zero_out", "without_replacement"):
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
        largest = np.max(share_of(sampler))
        return "with_replacement", np.array([sampler.capacity]), np.array([1 / largest])
    if sampler.capacity >= sampler.clients:
        return ("none",)
    if plan.algorithm.stateful:
        # what others remember tells who came with them, so cohorts are taken as seen: only absence
        # protects
        return "participation", np.array([share_of(sampler)])
    return "without_replacement", np.array([sampler.capacity]), np.array([sampler.clients])


def _truncated(plan, adjacency):
    """As `_cohort`, of a Poisson cohort that holds only so many."""
    sampler = plan.sampler
    if adjacency == "add_remove":
        checks.fail(
            "jfl.guarantee",
            "adjacency 'zero_out' or 'replace_one' for sampling.truncated_poisson",
            f"{adjacency!r}",
            "One client more changes the cohort of the others: use sampling.poisson.",
            error=NotAnalysable,
        )
    if plan.algorithm.stateful:  # as of a cohort of fixed size; nobody comes more often
        return "participation", np.array([share_of(sampler)])
    clients = np.array([sampler.clients])
    return (
        "truncated_poisson",
        share_of(sampler) * clients,
        clients,
        np.array([sampler.capacity]),
    )


def _beside_correlated_noise(plan, adjacency):
    """As `_cohort`: every round counts, but where a client's rounds never meet."""
    once_a_round(plan.sampler)
    return _by_chance(plan.sampler) if amplifies(plan) and adjacency != "replace_one" else ("none",)


def _by_chance(sampler):
    return "poisson", np.array([share_of(sampler)])


def cohort_overflow(sampler):
    if sampler.scheme not in sampling.ON_THEIR_OWN:
        return 0.0
    turns = 1 if sampler.scheme in ALLOCATED else sampler.separation
    trials = getattr(sampler, "at_once", sampler.clients)  # clients that a round may draw from
    return tail(sampler.capacity, trials, share_of(sampler) / turns)
