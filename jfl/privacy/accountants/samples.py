"""The event of a noisy release on a sample, for each kind of sample and each proved adjacency."""

from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

from . import events

FIXED = ("zero_out", "replace_one")
ALL = ("add_remove", *FIXED)


class Sample(NamedTuple):
    """The numbers of a sample, for one client."""

    drawn: float  # number of elements drawn; their probability if population is 1
    population: float
    capacity: float
    rate: float  # drawn / population


# kind of sample -> adjacency -> the event of a release on the sample.  A combination that is not
# listed has no proof.
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
    # One release covers several steps: a row is in at least one of their batches, or in none.
    "touched": dict(replace_one=lambda s, release: events.touched(s.rate, release)),
    # The other elements of a sample are known, so only absence from the sample is a gain.
    "participation": dict.fromkeys(ALL, lambda s, release: events.participation(s.rate, release)),
}
# The samples that amplify pure privacy.  On others, a release with Laplace noise is counted as if
# its sample were known, which is sound because a sample does not depend on the data.
PURE = {("poisson", a) for a in ALL} | {("without_replacement", "replace_one")}


def gaussian_on(
    kind: str, adjacency: str, sample: Sample, multiplier: ArrayLike, known: bool
) -> Any:
    """Return the event of a release with Gaussian noise on a sample.

    Args:
        kind: the kind of sample, a key of EVENTS.
        adjacency: an adjacency that EVENTS lists for this kind.
        sample: the numbers of the sample.
        multiplier: the noise multiplier, a number or one for each round.
        known: whether the sample counts as known to the observer, so that it amplifies nothing.
    """
    release = events.gaussian(multiplier)
    # a sample of everything
    if kind not in ("without_replacement", "touched") or sample.rate < 1:
        release = EVENTS[kind][adjacency](sample, release)
    return events.seen(release) if known else release


def laplace_on(
    kind: str, adjacency: str, sample: Sample, multiplier: ArrayLike, known: bool
) -> Any:
    """Return the event of a release with Laplace noise on a sample; arguments as `gaussian_on`."""
    if kind == "with_replacement":  # an element may be all of a sample
        return events.laplace(multiplier / sample.drawn)
    if kind == "participation":
        return events.participation(sample.rate, events.laplace(multiplier))
    if known or sample.rate >= 1 or (kind, adjacency) not in PURE:
        return events.laplace(multiplier)
    whole = 1 / np.asarray(multiplier)
    return events.pure(whole + np.log(sample.rate + (1 - sample.rate) * np.exp(-whole)))
