"""How a sample is drawn, and what drawing it does to the noise of a release: the same for the rows
of a batch and the clients of a cohort."""

from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

from ...core.records import Sampler
from ..accountants import events

FIXED = ("zero_out", "replace_one")
ALL = ("add_remove", *FIXED)


class Scheme(NamedTuple):
    """What an accountant may use of a scheme of jfl.batches or jfl.sampling."""

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


class Sample(NamedTuple):
    """The numbers of a sample, for one client."""

    drawn: float  # elements drawn; or the probability of one, of a population of 1
    population: float
    capacity: float

    @property
    def rate(self) -> float:
        return self.drawn / self.population


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


def on_sample(kind: str, adjacency: str, sample: Sample, release):
    """Return the event of a release on a sample."""
    whole = kind in ("without_replacement", "touched") and sample.rate >= 1
    return release if whole else EVENTS[kind][adjacency](sample, release)


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


def share_of(sampler: Sampler):
    """Return the probability that one draw takes a client: a number, or one for each client."""
    scheme = sampler.scheme
    if scheme == "with_replacement" and sampler.share is not None:  # not below what is drawn
        share = np.nextafter(np.asarray(sampler.share), np.float32(1))
        return np.minimum(share, 1).astype(np.float64)
    if scheme == "with_replacement":
        return 1 / sampler.clients
    kind = SCHEMES.get(scheme, OTHER).kind
    if kind == "allocation":
        return 1 / sampler.epoch
    if kind in ("poisson", "truncated_poisson"):  # in rounds of its own, if clients take turns
        rate: Any = sampler.rate
        return float(drawn(rate))
    return sampler.capacity / sampler.clients if scheme == "without_replacement" else 1.0


def chance_of(sampler: Sampler):
    """Return the probability that a client takes part, each time that it may: in a round, or in one
    of the independent draws of a round."""
    share = share_of(sampler)
    if sampler.scheme != "with_replacement" or sampler.independent:
        return share
    with np.errstate(divide="ignore"):
        return -np.expm1(sampler.capacity * np.log1p(-np.asarray(share)))


def turns(sampler: Sampler) -> int:
    """Return how often a client may run in one round."""
    return sampler.capacity if sampler.independent else 1


def drawn(rate: ArrayLike) -> np.ndarray:
    """Return the probability that a uniform float32, a multiple of 2^-23, lies below the float32
    that `rate` is."""
    return np.ceil(np.asarray(rate, np.float32).astype(np.float64) * 2**23) / 2**23


def tail(capacity: float, trials: ArrayLike, rate: ArrayLike):
    """Return the probability that a binomial number exceeds `capacity`."""
    from scipy import stats  # half a second: not at import

    return np.where(capacity >= np.asarray(trials), 0.0, stats.binom.sf(capacity, trials, rate))


def cohort_overflow(sampler: Sampler) -> float:
    """Return the probability that a cohort has more clients than slots."""
    if SCHEMES.get(sampler.scheme, OTHER).kind not in ("poisson", "allocation"):
        return 0.0
    in_turns = 1 if sampler.epoch > 1 else sampler.separation
    trials = getattr(sampler, "at_once", sampler.clients)  # clients that a round may draw from
    return float(tail(sampler.capacity, trials, share_of(sampler) / in_turns))


# --- which clients may be the worst off

GROUPS = 16  # of clients, in the search for the worst one


def frontier(sizes: np.ndarray, share: np.ndarray) -> list[tuple]:
    """Return pairs (rows, share) such that every client has at least the rows and at most the share
    of one of them."""
    pairs, most = [], -1.0
    for rows, s in sorted(set(zip(sizes.tolist(), share.tolist())), key=lambda p: (p[0], -p[1])):
        if s > most:
            pairs.append((rows, s))
            most = s
    cuts = np.array_split(np.arange(len(pairs)), min(GROUPS, len(pairs)))
    return [(pairs[c[0]][0], pairs[c[-1]][1]) for c in cuts]


def worst_columns(rows, amount, noise, counted) -> tuple:
    """Return pairs of columns such that every client is at most as badly off as one of these: with
    the rows and noise of the one, and the amount of the other.

    Args:
        rows: Int[C]; fewer never help: a larger rate, or more looks at each row.
        amount: [C], of participation; less never hurts.
        noise: arrays [rounds or 1, C or 1] in which clients differ.
        counted: Int[n], the clients that count.
    """
    counted = np.asarray(counted)
    if not counted.size:
        return ()
    rows, amount = np.asarray(rows)[counted], np.asarray(amount)[counted]
    if all(z.shape[1] == 1 for z in noise):
        first = lambda values: dict(zip(values[::-1].tolist(), counted[::-1].tolist()))
        of_rows, of_amount = first(rows), first(amount)
        return tuple((of_rows[r], of_amount[a]) for r, a in frontier(rows, amount))
    columns = [z[:, counted] for z in noise if z.shape[1] > 1]
    apart = np.unique(np.vstack([rows, amount, *columns]), axis=1, return_index=True)[1]
    return tuple((c, c) for c in counted[apart].tolist())
