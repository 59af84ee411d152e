"""Epsilon from plain numbers, and the noise multiplier from an epsilon, without a plan.

The commands `jfl epsilon` and `jfl calibrate` use this module as well.
"""

from typing import Any

import numpy as np

from ..core import checks
from .accountants import events, samples, tightest
from .mechanisms.chain import ADJACENCIES

SAMPLERS = ("full", "without_replacement", "poisson")
MAX_ROUNDS = 10**12
# what a noise multiplier is under each adjacency, of noise with standard deviation sigma on a sum
# of contributions with clip norm C
MEANINGS = {
    "add_remove": "Under add_remove the noise multiplier z is σ/C (sensitivity: the clip norm C).",
    "replace_one": "Under replace_one the noise multiplier z is σ/(2C) (sensitivity: twice the "
    "clip norm C).",
    "zero_out": "Under zero_out the noise multiplier z is σ/C (sensitivity: the clip norm C).",
}


def epsilon(
    *,
    noise_multiplier: float | None = None,
    noise_std: float | None = None,
    clip_norm: float | None = None,
    mean_of: int | None = None,
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
            norm under add_remove and zero_out, over twice the clip norm under replace_one.
        noise_std: the standard deviation of the noise, with `clip_norm`, instead of the noise
            multiplier.
        clip_norm: the bound on the L2 norm of what one unit contributes to a release.
        mean_of: None if the noise was added to the sum of the contributions.  Otherwise it was
            added to their mean, the sum divided by this constant.
        rounds: the number of noisy releases, each on a new sample.
        rate: the sampling rate, in (0, 1]; 1 with the sampler "full".
        delta: in (0, 1).
        adjacency: "add_remove", "replace_one" or "zero_out".  None means add_remove for the sampler
            "poisson", and replace_one for the others.
        sampler: "poisson"; "without_replacement", for samples of fixed size (not with add_remove);
            or "full", without sampling and therefore without amplification.

    Raises:
        ValueError: for numbers outside these ranges.

    Example:
        >>> import jfl
        >>> value = jfl.epsilon(noise_multiplier=1.0, rate=0.01, rounds=1000, delta=1e-6)
        >>> round(value, 3)
        2.125
        >>> numbers = dict(sampler="full", rounds=1, adjacency="replace_one")
        >>> value = jfl.epsilon(noise_std=0.2, clip_norm=1.0, mean_of=10, **numbers)
        >>> value == jfl.epsilon(noise_multiplier=0.2 * 10 / (2 * 1.0), **numbers)
        True
    """
    where = "jfl.epsilon"
    z = multiplier(
        where,
        noise_multiplier,
        noise_std,
        clip_norm,
        mean_of,
        adjacency_of(where, sampler, adjacency),
    )
    event = _repeated(where, z, rate, rounds, adjacency, sampler)
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


def multiplier(
    where: str,
    noise_multiplier: float | None,
    noise_std: float | None,
    clip_norm: float | None,
    mean_of: int | None,
    adjacency: str,
) -> float:
    """Return the noise multiplier, from a standard deviation if it is None.

    Args:
        where: the name of the caller, for messages.
        noise_multiplier: as in `epsilon`.
        noise_std: as in `epsilon`.
        clip_norm: as in `epsilon`.
        mean_of: as in `epsilon`.
        adjacency: as in `epsilon`; it determines the sensitivity.

    Raises:
        ArgumentError: unless either the noise multiplier is given, or both the standard deviation
            and the clip norm.
    """
    if noise_multiplier is not None and (noise_std, clip_norm, mean_of) == (None, None, None):
        return noise_multiplier
    if noise_multiplier is not None or noise_std is None or clip_norm is None:
        checks.fail(
            where,
            "either noise_multiplier, or noise_std and clip_norm",
            f"noise_multiplier={noise_multiplier}, noise_std={noise_std}, clip_norm={clip_norm}, "
            f"mean_of={mean_of}",
        )
    mean_of = 1 if mean_of is None else mean_of
    checks.require_positive(where, single=True, noise_std=noise_std, clip_norm=clip_norm)
    checks.require_integer(where, mean_of=mean_of)
    return noise_std * mean_of / (2 * clip_norm if adjacency == "replace_one" else clip_norm)


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
            "adjacency 'replace_one' or 'zero_out' for the sampler 'without_replacement'",
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
        if adjacency == "zero_out":
            rate = np.float64(sample)
            return events.ZeroedOut(rate, np.float64(1.0), rate, release)
        kind = "touched"
    numbers = samples.Sample(sample, population, 0.0, sample / population)
    return samples.EVENTS[kind][adjacency](numbers, release)
