"""Everything that the accounting of a plan needs, read once; no other module looks at a plan."""

from typing import Any, NamedTuple

import numpy as np

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.records import Fn, Plan, Sampler
from ...sampling import batches, clients
from ..mechanisms import chain
from ..mechanisms.correlated import strategy_of
from ..mechanisms.distributed import encoding_of
from . import samples


class Site(NamedTuple):
    """One noisy mechanism of a plan, and what it is applied to."""

    place: str  # local step | local training | upload | release
    noise: str  # gaussian | laplace | correlated | integers
    scheme: str  # of the sampler inside which the noise is added: of batches, or of cohorts
    adjacency: str
    mechanism: Any
    multiplier: np.ndarray = np.ones((1, 1))  # std / sensitivity, [rounds or 1, C or 1]
    refusal: str = ""  # why the multiplier is not known
    batches: Any = None  # of a place inside the client
    count: int = 1  # releases in a participation
    steps: int = 0  # that one release of local training covers

    @property
    def law(self) -> str:
        """The distribution of the noise of one round."""
        return "laplace" if self.noise == "laplace" else "gaussian"

    @property
    def strategy(self) -> Any:
        return strategy_of(self.mechanism)

    @property
    def encoding(self) -> Any:
        return encoding_of(self.mechanism)

    @property
    def is_isotropic(self) -> bool:
        return chain.shape(self.mechanism) is None

    @property
    def declared(self) -> set:
        """What the stages declare their bound to rest on."""
        return {s.declared for s in self.mechanism.stages}


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
    are_apart: bool  # the local places draw their batches independently

    @property
    def several(self) -> bool:
        """Whether local places may draw one sample: their batches follow from one key."""
        sampled = [site for site in self.local if site.scheme != "full"]
        return len(sampled) > 1 and not self.are_apart

    @property
    def scheme(self) -> samples.Scheme:
        return samples.SCHEMES.get(self.sampler.scheme, samples.OTHER)

    @property
    def period(self) -> int:
        """Rounds in which a client takes part once, in one that is known or not."""
        return max(self.sampler.separation, self.sampler.epoch)


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
        local = tuple(_local(r, rounds, count) for r in releases)
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
    straight = all(s.role != "row" or s.declared == "upload" for s in plan.release.stages)
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
        apart,
    )


def _local(release, rounds, count) -> Site:
    place = "local training" if release.steps else "local step"
    scheme, neighbours = release.batches.scheme, batches.adjacency(release.batches)
    if release.steps:
        neighbours = "replace_one"
    site = _site(place, scheme, release.mechanism, neighbours, rounds, count)
    return site._replace(batches=release.batches, count=release.count, steps=release.steps)


def _site(place, scheme, mechanism, neighbours, rounds, count) -> Site:
    noise = chain.law_of(mechanism)
    if strategy_of(mechanism) is not None:
        noise = "correlated"
    elif encoding_of(mechanism) is not None:
        noise = "integers"
    site = Site(place, noise, scheme, mechanism.adjacency or neighbours, mechanism)
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
