"""Everything that the accounting of a plan needs, read once: its noisy places, and how batches and
cohorts are drawn."""

from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.records import Fn, Plan, Sampler
from ...sampling import batches, clients
from ..accountants import events
from ..mechanisms import chain
from ..mechanisms.stages import DECLARED

FIXED = ("zero_out", "replace_one")
ALL = ("add_remove", *FIXED)


class Scheme(NamedTuple):
    """The properties of a scheme of jfl.batches or jfl.sampling that an accountant uses."""

    kind: str  # of sample, as in EVENTS
    adjacencies: tuple[str, ...]
    # whether the probability that a client is absent from a round is known, and the same in all
    absence: bool = False


SCHEMES = {
    "full": Scheme("none", ALL),
    "epochs": Scheme("none", FIXED),
    "without_replacement": Scheme("without_replacement", FIXED, True),
    "with_replacement": Scheme("with_replacement", ("replace_one",), True),
    "poisson": Scheme("poisson", ALL, True),
    "available_poisson": Scheme("poisson", ALL, True),
    "truncated_poisson": Scheme("truncated_poisson", FIXED, True),
    "first_responders": Scheme("none", FIXED),
    "min_separation": Scheme("none", FIXED),
    "cyclic_poisson": Scheme("poisson", ALL),
    "random_allocation": Scheme("allocation", ALL),
    "balls_in_bins": Scheme("allocation", ALL),
}
OTHER = Scheme("none", ())  # of a sampler that jfl does not know


class Site(NamedTuple):
    """One noisy mechanism of a plan, and what it is applied to."""

    place: str  # local step | local training | upload | release
    noise: str  # gaussian | laplace | correlated | integers
    scheme: str  # of the sampler inside which the noise is added: of batches, or of cohorts
    adjacency: str
    mechanism: Any
    law: str = "gaussian"  # distribution of the noise of one round, or "laplace"
    strategy: Any = None  # of correlated noise
    encoding: Any = None  # of integers
    is_isotropic: bool = True
    declared: frozenset = frozenset()  # what the stages declare their bound to rest on
    multiplier: np.ndarray = np.ones((1, 1))  # std / sensitivity, [rounds or 1, C or 1]
    refusal: str = ""  # why the multiplier is not known
    batches: Any = None  # of a place inside the client
    count: int = 1  # releases in a participation
    steps: int = 0  # that one release of local training covers


class Attendance(NamedTuple):
    """How a sampler draws clients."""

    share: Any  # probability that one draw takes a client: a number, or [C]
    chance: Any  # probability that a client participates, each time that it may: a number, or [C]
    turns: int  # how often a client may participate in one round, each time with its chance
    overflow: float  # probability that a cohort has more clients than slots


class Facts(NamedTuple):
    """The noisy places of a plan, and what is the same for all of them."""

    rounds: int
    local: tuple[Site, ...]  # inside the client; none if one of them adds no noise
    upload: Any  # Site, or None
    release: Any  # Site, or None
    sampler: Sampler
    rows: np.ndarray  # Int[C]
    weights: np.ndarray  # [rounds or 1, C], of aggregation
    is_stateful: bool  # clients keep state
    is_secure: bool  # the server is assumed to see only sums of uploads
    is_plain_sum: bool  # uploads are summed as their noise left them
    others: bool  # noise of other clients counts for a third party
    share_sample: bool  # local places may draw one sample, since their batches use one key
    scheme: Scheme  # of the sampler
    attendance: Attendance
    period: int  # rounds in which a client participates once, in a round that is known or not


def read(plan: Plan, rounds: int, others: bool = True, apart: bool = False) -> Facts:
    """Return the facts of the first `rounds` rounds of a plan.

    Args:
        plan: a Plan.
        rounds: how many of its rounds are looked at.
        others: whether noise of other clients counts for a third party.
        apart: whether the releases of a client are known to draw their batches independently.
    """
    count, sampler, releases = plan.sampler.clients, plan.sampler, plan.algorithm.releases
    local, upload, release = (), None, None
    if releases and all(chain.noisy(r.mechanism) for r in releases):
        for r in releases:
            neighbours = "replace_one" if r.steps else batches.adjacency(r.batches)
            place = "local training" if r.steps else "local step"
            site = _site(place, r.batches.scheme, r.mechanism, neighbours, rounds, count)
            local += (site._replace(batches=r.batches, count=r.count, steps=r.steps),)
    if chain.noisy(plan.upload):
        upload = _site("upload", sampler.scheme, plan.upload, "replace_one", rounds, count)
    is_fixed = chain.noisy(plan.release) and not chain.multiplier_follows(plan.release)
    weights = np.ones((1, count))
    if upload or is_fixed:
        changing = isinstance(plan.weights, Fn)
        each = [plan.weights(r) for r in range(rounds)] if changing else [plan.weights]
        weights = np.stack([np.asarray(w, np.float64) for w in each])
    if chain.noisy(plan.release):
        neighbours = clients.adjacency(sampler)
        release = _site("release", sampler.scheme, plan.release, neighbours, rounds, 1)
        if is_fixed:  # its std does not follow the weights
            largest = weights.max(1, keepdims=True)
            release = release._replace(multiplier=release.multiplier / largest)
    straight = all(s.role != "row" or DECLARED.get(s.name) == "upload" for s in plan.release.stages)
    divided = upload is None or all(
        s.role != "post" or s.divisor == "number" for s in upload.mechanism.stages
    )
    return Facts(
        rounds,
        local,
        upload,
        release,
        sampler,
        np.asarray(plan.fed.size).reshape(-1),
        weights,
        plan.algorithm.stateful,
        plan.secure_aggregation,
        straight and divided,
        others,
        sum(site.scheme != "full" for site in local) > 1 and not apart,
        SCHEMES.get(sampler.scheme, OTHER),
        attendance(sampler),
        max(sampler.separation, sampler.epoch),
    )


def _site(place, scheme, mechanism, neighbours, rounds, count) -> Site:
    (stage,) = (s for s in mechanism.stages if s.role == "noise")
    noise = stage.law
    if stage.strategy is not None:
        noise = "correlated"
    elif stage.encoding is not None:
        noise = "integers"
    site = Site(
        place,
        noise,
        scheme,
        mechanism.adjacency or neighbours,
        mechanism,
        "laplace" if stage.law == "laplace" else "gaussian",
        stage.strategy,
        stage.encoding,
        stage.shape is None,
        frozenset(DECLARED.get(s.name, "") for s in mechanism.stages),
    )
    try:
        return site._replace(multiplier=levels(mechanism, rounds, count))
    except NotAnalysable as error:
        return site._replace(refusal=str(error))


def levels(mechanism, rounds: int, clients: int, max_weight=lambda round_: 1.0) -> np.ndarray:
    """Return noise multipliers [rounds or 1, clients or 1]: one row unless they change, one column
    unless clients differ.

    Raises:
        NotAnalysable: unless they are positive and finite, one or one for each client.
    """
    noise = np.asarray(chain.multipliers(mechanism, rounds, max_weight))
    noise = noise if chain.multiplier_changes(mechanism) else noise[None]
    noise = noise if noise.ndim == 2 else noise[:, None]
    if noise.shape[1] not in (1, clients):
        checks.fail(
            "jfl.guarantee",
            f"one noise level, or one for each of {clients} clients",
            f"{noise.shape[1]}",
            error=NotAnalysable,
        )
    if not (np.all(noise > 0) and np.all(np.isfinite(noise))):
        checks.fail(
            "jfl.guarantee",
            "clip norms and noise > 0 in every round",
            f"noise multipliers {np.min(noise)}",
            error=NotAnalysable,
        )
    return noise


def changing(plan: Plan) -> bool:
    """Return whether the noise is not the same in every round."""
    fixed_std = chain.noisy(plan.release) and not chain.multiplier_follows(plan.release)
    return ((fixed_std or chain.noisy(plan.upload)) and isinstance(plan.weights, Fn)) or any(
        chain.multiplier_changes(m)
        for m in (plan.upload, plan.release, *(r.mechanism for r in plan.algorithm.releases))
    )


# --- what drawing a sample does to a release


class Sample(NamedTuple):
    """The numbers of a sample, for one client."""

    drawn: float  # elements drawn; or the probability of one, of a population of 1
    population: float
    capacity: float
    rate: float  # drawn / population


# kind of sample -> adjacency -> the event of a release on the sample.  What has no entry has no
# proof.
EVENTS = {
    "none": dict.fromkeys(ALL, lambda s, release: release),
    "poisson": dict(
        add_remove=lambda s, release: events.poisson(s.rate, release),
        zero_out=lambda s, release: events.poisson(s.rate, release),
        replace_one=lambda s, release: events.replaced(s.rate, release),
    ),
    "without_replacement": dict(
        zero_out=lambda s, release: events.zeroed_out(s.drawn, s.population, release),
        replace_one=lambda s, release: events.without_replacement(s.drawn, s.population, release),
    ),
    "with_replacement": dict(
        replace_one=lambda s, release: events.with_replacement(s.drawn, s.population, release)
    ),
    "truncated_poisson": {
        adjacency: lambda s, release, adjacency=adjacency: events.truncated_poisson(
            min(s.rate, 1.0), s.population, min(s.capacity, s.population), release, adjacency
        )
        for adjacency in FIXED
    },
    "allocation": dict.fromkeys(
        ALL[:2], lambda s, release: events.allocation(s.population, release)
    ),
    # one release of several steps: a row is in at least one of their batches, or in none
    "touched": dict(replace_one=lambda s, release: events.touched(s.rate, release)),
    # the others of a sample are known: only absence from it is a gain
    "participation": dict.fromkeys(ALL, lambda s, release: events.participation(s.rate, release)),
}
# samples that gain for pure privacy; elsewhere a release with Laplace noise counts as if its sample
# were seen, which is sound because a sample does not depend on the data
PURE = {("poisson", a) for a in ALL} | {("without_replacement", "replace_one")}


def laplace(kind: str, adjacency: str, sample: Sample, multiplier: ArrayLike, seen: bool):
    """Return the event of a release with Laplace noise on a sample."""
    if kind == "with_replacement":  # an element may be all of a sample
        return events.laplace(multiplier / sample.drawn)
    if kind == "participation":
        return events.participation(sample.rate, events.laplace(multiplier))
    if seen or sample.rate >= 1 or (kind, adjacency) not in PURE:
        return events.laplace(multiplier)
    whole = 1 / np.asarray(multiplier)
    return events.pure(whole + np.log(sample.rate + (1 - sample.rate) * np.exp(-whole)))


# --- how clients are drawn


def attendance(sampler: Sampler) -> Attendance:
    """Return how a sampler draws clients."""
    scheme, share = sampler.scheme, 1.0
    kind = SCHEMES.get(scheme, OTHER).kind
    if scheme == "with_replacement" and sampler.share is not None:
        # not smaller than the share that is drawn
        rounded = np.nextafter(np.asarray(sampler.share), np.float32(1))
        share = np.minimum(rounded, 1).astype(np.float64)
    elif scheme == "with_replacement":
        share = 1 / sampler.clients
    elif kind == "allocation":
        share = 1 / sampler.epoch
    elif kind in ("poisson", "truncated_poisson"):  # in the rounds of its group, if there are some
        rate: Any = sampler.rate
        share = float(drawn_rate(rate))
    elif scheme == "without_replacement":
        share = sampler.capacity / sampler.clients
    chance: Any = share
    if scheme == "with_replacement" and not sampler.independent:
        with np.errstate(divide="ignore"):
            chance = -np.expm1(sampler.capacity * np.log1p(-np.asarray(share)))
    overflow = 0.0
    if kind in ("poisson", "allocation"):
        groups = 1 if sampler.epoch > 1 else sampler.separation
        candidates = getattr(sampler, "at_once", sampler.clients)  # from whom a round may draw
        overflow = float(binomial_tail(sampler.capacity, candidates, share / groups))
    return Attendance(share, chance, sampler.capacity if sampler.independent else 1, overflow)


def drawn_rate(rate: ArrayLike) -> np.ndarray:
    """Return the probability that a uniform float32, a multiple of 2^-23, lies below the float32
    that `rate` is."""
    return np.ceil(np.asarray(rate, np.float32).astype(np.float64) * 2**23) / 2**23


def binomial_tail(capacity: float, trials: ArrayLike, rate: ArrayLike):
    """Return the probability that a binomial number exceeds `capacity`."""
    from scipy import stats  # half a second: not at import

    return np.where(capacity >= np.asarray(trials), 0.0, stats.binom.sf(capacity, trials, rate))
