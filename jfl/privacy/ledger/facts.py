"""The facts of a plan that its accounting uses: where noise is added, and how cohorts and batches
are drawn.

Only this module of the ledger interprets mechanisms and samplers.
"""

from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

from ...core.errors import NotAnalysable
from ...core.records import Caveat, Fn, Plan, Sampler
from ...sampling import batches, clients
from ..accountants.samples import ALL, FIXED
from ..mechanisms import chain
from ..mechanisms.stages import DECLARED
from .caveats import CONTRACTION, PROX_ERM


class Scheme(NamedTuple):
    """The properties of a scheme of jfl.batches or jfl.sampling that matter for privacy."""

    kind: str  # the kind of sample, a key of samples.EVENTS
    adjacencies: tuple[str, ...]
    # whether the probability that a client is absent from a round is known, and equal in all rounds
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
OTHER = Scheme("none", ())  # the scheme of a sampler that jfl does not know


class Site(NamedTuple):
    """One noisy mechanism of a plan, and the sample that it is applied to."""

    place: str  # local step | local training | upload | release
    noise: str  # gaussian | laplace | correlated | integers
    scheme: str  # of the batches or the cohorts to which the noise is added
    adjacency: str
    mechanism: Any
    strategy: Any  # of correlated noise
    encoding: Any  # of integers
    is_isotropic: bool
    declared: frozenset  # the stages whose bound is declared, not computed
    multiplier: np.ndarray = np.ones((1, 1))  # std / sensitivity, [rounds or 1, C or 1]
    refusal: str = ""  # why the multiplier is not known
    # Only for places inside the client:
    batches: Any = None
    count: int = 1  # releases in a participation
    steps: int = 0  # that one release of local training covers
    row_rate: np.ndarray = np.ones(1)  # [C], probability that a Poisson batch takes a row
    overflow: np.ndarray = np.zeros(1)  # [C], probability that batches of a participation overflow
    assumed: tuple[Caveat, ...] = ()  # about losses


class Attendance(NamedTuple):
    """How a sampler draws clients."""

    share: Any  # probability that one draw takes a client, a number or [C]
    chance: Any  # probability that a client participates when it may, a number or [C]
    turns: int  # how often a client may participate in one round, each time with its chance
    overflow: float  # probability that a cohort has more clients than slots


class Facts(NamedTuple):
    """The noisy places of a plan, and the facts that they share."""

    rounds: int
    local: tuple[Site, ...]  # inside the client; () if one of its mechanisms adds no noise
    upload: Site | None
    release: Site | None
    sampler: Sampler
    rows: np.ndarray  # Int[C]
    weights: np.ndarray  # [rounds or 1, C], of aggregation
    is_shown: bool  # client state, or uploads that are seen, show who participates together
    is_secure: bool  # the server is assumed to see only sums of uploads
    is_plain_sum: bool  # no stage changes uploads between their noise and their sum
    others: bool  # noise of other clients counts for a third party
    share_sample: bool  # local places may draw the same sample, since they use one batch key
    scheme: Scheme  # of the sampler
    attendance: Attendance
    period: int  # number of rounds, in one of which (known or hidden) a client participates


def read(
    plan: Plan, rounds: int, others: bool = True, shown: bool = False, apart: bool = False
) -> Facts:
    """Return what the accountant must know about the first `rounds` rounds of a plan.

    Args:
        plan: a Plan.
        rounds: the number of rounds.
        others: whether the noise of other clients protects a client from a third party.
        shown: whether a third party sees who participates.
        apart: whether different releases of a client are known to use independent batches.
    """
    sampler, rows = plan.sampler, np.asarray(plan.fed.size).reshape(-1)
    local = []
    for r in plan.algorithm.releases:
        place, default = "local step", batches.adjacency(r.batches)
        if r.steps:
            place, default = "local training", "replace_one"
        site = _site(place, r.batches.scheme, r.mechanism, default, rounds, sampler.clients)
        if site is None:  # without noise in one of them, the others protect no example
            local = []
            break
        rate, overflow = _row_sampling(r.batches, rows, r.count * max(r.steps, 1))
        site = site._replace(
            batches=r.batches, count=r.count, steps=r.steps, row_rate=rate, overflow=overflow
        )
        local.append(site._replace(assumed=_convexity(site)) if site.declared else site)

    cohort = sampler.scheme
    upload = _site("upload", cohort, plan.upload, "replace_one", rounds, sampler.clients)
    release = _site("release", cohort, plan.release, "", rounds, 1)
    if release is not None:
        release = release._replace(adjacency=release.adjacency or clients.adjacency(sampler))
    is_fixed = release is not None and not chain.multiplier_follows(release.mechanism)
    weights = np.ones((1, sampler.clients))
    if upload is not None or is_fixed:
        changing = isinstance(plan.weights, Fn)
        each = [plan.weights(r) for r in range(rounds)] if changing else [plan.weights]
        weights = np.stack([np.asarray(w, np.float64) for w in each])
    if (
        release is not None and is_fixed
    ):  # the std is absolute, but the sensitivity follows the largest weight
        multiplier = release.multiplier / weights.max(1, keepdims=True)
        release = release._replace(multiplier=multiplier)

    is_unchanged = all(
        s.role != "row" or DECLARED.get(s.name) == "upload" for s in plan.release.stages
    )
    is_divided = upload is None or all(
        s.role != "post" or s.divisor == "number" for s in upload.mechanism.stages
    )
    return Facts(
        rounds,
        tuple(local),
        upload,
        release,
        sampler,
        rows,
        weights,
        plan.algorithm.stateful or shown,
        plan.secure_aggregation,
        is_unchanged and is_divided,
        others,
        sum(site.scheme != "full" for site in local) > 1 and not apart,
        SCHEMES.get(sampler.scheme, OTHER),
        attendance(sampler),
        max(sampler.separation, sampler.epoch),
    )


def _site(place, scheme, mechanism, default, rounds, count) -> Site | None:
    """Return the facts of one mechanism with its `default` adjacency; None without noise."""
    if mechanism is None:
        return None
    stages = mechanism.stages
    stage = next((s for s in stages if s.role == "noise"), None)
    if stage is None:
        return None
    kinds = dict(
        correlated=stage.strategy is not None,
        integers=stage.encoding is not None,
        laplace=stage.law == "laplace",
    )
    site = Site(
        place,
        # two kinds at once have a name that is in no row of the table
        " and ".join(name for name, is_present in kinds.items() if is_present) or stage.law,
        scheme,
        mechanism.adjacency or default,
        mechanism,
        stage.strategy,
        stage.encoding,
        stage.shape is None,
        frozenset(DECLARED[s.name] for s in stages if s.name in DECLARED),
    )
    try:
        return site._replace(multiplier=chain.multipliers(mechanism, rounds, count))
    except NotAnalysable as error:
        return site._replace(refusal=str(error))


def _convexity(site: Site) -> tuple:
    """Return what the declared bound of a client's solution, or of its steps, assumes of losses."""
    texts, bound = [], float(chain.bound(site.mechanism))
    if "prox_erm" in site.declared:  # replace_one doubles the bound
        texts.append(PROX_ERM.format(2 * bound))
    if "contraction" in site.declared:
        texts.append(CONTRACTION.format(bound * site.steps * site.batches.batch))
    return tuple(Caveat(text, "convex") for text in texts)


def changing(plan: Plan) -> bool:
    """Return whether the noise differs between rounds."""
    is_fixed = chain.noisy(plan.release) and not chain.multiplier_follows(plan.release)
    return ((is_fixed or chain.noisy(plan.upload)) and isinstance(plan.weights, Fn)) or any(
        chain.multiplier_changes(m)
        for m in (plan.upload, plan.release, *(r.mechanism for r in plan.algorithm.releases))
    )


# --- how clients and rows are drawn


def attendance(sampler: Sampler) -> Attendance:
    """Return the probabilities with which a sampler draws clients and its cohorts overflow."""
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
    elif kind in ("poisson", "truncated_poisson"):  # with groups: in the rounds of its group
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


def _row_sampling(batches, rows: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two probabilities for each client, [C]: that a Poisson batch takes one of its rows,
    and that one of `steps` batches has more rows than slots."""
    if batches.scheme not in ("poisson", "truncated_poisson"):
        return np.ones(1), np.zeros(rows.shape)
    sizes, which = np.unique(np.maximum(rows, 1), return_inverse=True)
    if batches.rate is not None:
        rate = np.broadcast_to(drawn_rate(batches.rate), sizes.shape)
    else:
        expected = np.asarray(batches.expected, np.float32)
        rate = drawn_rate(np.minimum(np.float32(1), expected / sizes.astype(np.float32)))
    lost = np.zeros(sizes.shape)
    if batches.scheme == "poisson" and batches.batch is not None:
        lost = steps * binomial_tail(batches.batch, sizes, rate)
    which = which.reshape(-1)
    return rate[which], np.where(rows > 0, lost[which], 0.0)


def drawn_rate(rate: ArrayLike) -> np.ndarray:
    """Return the rate of a Poisson draw as the accountant counts it: an upper bound.

    This is `rate` in float32, rounded up to a multiple of 2^-23.  A draw succeeds if a uniform word
    of 32 bits is below the rate (`sampling.uniform.below`), so its probability is not larger.
    """
    return np.ceil(np.asarray(rate, np.float32).astype(np.float64) * 2**23) / 2**23


def binomial_tail(capacity: float, trials: ArrayLike, rate: ArrayLike):
    """Return the probability that more than `capacity` of `trials` draws at `rate` succeed."""
    from scipy import stats  # takes half a second to import

    return np.where(capacity >= np.asarray(trials), 0.0, stats.binom.sf(capacity, trials, rate))
