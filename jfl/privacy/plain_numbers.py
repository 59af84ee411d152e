"""Epsilon from plain numbers, and the noise multiplier from an epsilon, without a plan.

The commands `jfl epsilon` and `jfl calibrate` use this module as well.
"""

from typing import Any

from ..core import checks
from .accountants import events, samples, tightest

SAMPLERS = ("full", "without_replacement", "poisson")
ADJACENCIES = ("add_remove", "replace_one")
MAX_ROUNDS = 10**12
# what a noise multiplier is under each adjacency, of noise with standard deviation sigma on a sum
# of contributions with clip norm C
MEANINGS = {
    "add_remove": "Under add_remove the noise multiplier z is σ/C (sensitivity: the clip norm C).",
    "replace_one": "Under replace_one the noise multiplier z is σ/(2C) (sensitivity: twice the "
    "clip norm C).",
}


def epsilon(
    *,
    noise_multiplier: float,
    rounds: int,
    rate: float = 1.0,
    delta: float = 1e-5,
    adjacency: str | None = None,
    sampler: str = "poisson",
) -> float:
    """Return the smallest proved epsilon of the subsampled Gaussian mechanism.

    The result depends on these numbers only.  `jfl.guarantee` reads a plan, so it also accounts for
    details of a run, such as the limited capacity of a Poisson cohort.

    Args:
        noise_multiplier: the standard deviation of the noise over the sensitivity: over the clip
            norm under add_remove, over twice the clip norm under replace_one.
        rounds: the number of noisy releases, each on a new sample.
        rate: the sampling rate, in (0, 1]; 1 with the sampler "full".
        delta: in (0, 1).
        adjacency: "add_remove" or "replace_one".  None means add_remove for the sampler "poisson",
            and replace_one for the others.
        sampler: "poisson"; "without_replacement", for samples of fixed size (not with add_remove);
            or "full", without sampling and therefore without amplification.

    Raises:
        ValueError: for numbers outside these ranges.

    Example:
        >>> import jfl
        >>> value = jfl.epsilon(noise_multiplier=1.0, rate=0.01, rounds=1000, delta=1e-6)
        >>> round(value, 3)
        2.125
    """
    event = _repeated("jfl.epsilon", noise_multiplier, rate, rounds, adjacency, sampler)
    return tightest.epsilon(event, delta)[0]


def noise_multiplier(
    *,
    epsilon: float,
    rounds: int,
    rate: float = 1.0,
    delta: float = 1e-5,
    adjacency: str | None = None,
    sampler: str = "poisson",
) -> float:
    """Return the smallest noise multiplier whose `epsilon` is at most the target.

    Args:
        epsilon: the target, > 0.
        rounds: as in `epsilon`.
        rate: as in `epsilon`.
        delta: as in `epsilon`.
        adjacency: as in `epsilon`; it determines the sensitivity of which the result is a multiple.
        sampler: as in `epsilon`.

    Raises:
        ValueError: as in `epsilon`; if no multiplier up to a million reaches the target.

    Example:
        >>> import jfl
        >>> z = jfl.noise_multiplier(epsilon=2.0, rate=0.01, rounds=1000, delta=1e-6)
        >>> round(z, 3)
        1.029
    """
    where = "jfl.noise_multiplier"
    make_event = lambda z: _repeated(where, z, rate, rounds, adjacency, sampler)
    return tightest.solve_noise(make_event, epsilon, delta)


def _repeated(where, multiplier, rate, rounds, adjacency, sampler):
    checks.require_one_of(where, SAMPLERS, sampler=sampler)
    checks.require_fraction(where, single=True, rate=rate)
    checks.require_integer(where, max_value=MAX_ROUNDS, rounds=rounds)
    adjacency = adjacency_of(where, sampler, adjacency)
    if sampler == "full" and rate != 1:
        checks.fail(where, "rate=1 for sampler='full'", f"rate={rate:g}")
    release = events.gaussian(multiplier)
    return events.repeat(sampled(sampler, adjacency, float(rate), 1.0, release), rounds)


def adjacency_of(where: str, sampler: str, adjacency: str | None) -> str:
    """Return `adjacency`; if it is None, the default adjacency of the sampler.

    Raises:
        ArgumentError: for add_remove with samples of a fixed size.
    """
    checks.require_one_of(where, (None, *ADJACENCIES), adjacency=adjacency)
    if adjacency is None:
        return "add_remove" if sampler == "poisson" else "replace_one"
    if sampler == "without_replacement" and adjacency == "add_remove":
        checks.fail(
            where,
            "adjacency 'replace_one' for the sampler 'without_replacement'",
            "'add_remove'",
            "One element more changes who else is in a sample of a fixed size: use 'poisson'.",
        )
    return adjacency


def sampled(sampler: str, adjacency: str, sample: Any, population: Any, release: Any) -> Any:
    """Return the event of a release on `sample` of `population` elements.

    A population of 1 means that `sample` is the sampling rate.
    """
    kind = "none" if sampler == "full" else sampler
    if sampler == "without_replacement" and population == 1:  # a rate instead of counts
        kind = "touched"
    numbers = samples.Sample(sample, population, 0.0, sample / population)
    return samples.EVENTS[kind][adjacency](numbers, release)
