"""Empirical privacy estimation in one run of federated learning, from random unit canaries.

A canary client sends a random unit vector, scaled to the clip.  Its score is the cosine between
that vector and what was released.  The cosine with a vector that the run has not seen has a known
distribution in d dimensions, close to N(0, 1 / d), so that no canary has to be left out.

The estimates compare it with a Gaussian that is fitted to the cosines that were seen.  They are no
bounds: the scores stand for one attack on one run, and the fit has an error of its own.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from ...core import checks
from ...privacy.accountants import roots
from .levels import check_confidence, check_delta

__all__ = [
    "OneShot",
    "epsilon_against_null",
    "epsilon_of_all",
    "epsilon_of_final",
    "epsilon_of_gaussians",
    "estimate_over_thresholds",
    "hockey_stick_of_gaussians",
    "lower_bound",
    "null_cosine_sf",
]

GAUSSIAN_FROM = 1000  # dimensions from which the estimates take N(0, 1 / d) for the null
THRESHOLDS = 10_000  # of the estimate in fewer dimensions
TOLERANCE = 1e-10  # of epsilon
ROUNDING = 1e-6  # of cosines computed in float32
UNCORRECTED = "estimate", "approximately: the threshold was chosen afterwards, without a correction"


class OneShot(NamedTuple):
    """What the cosines of one run say of epsilon."""

    epsilon: float
    delta: float
    confidence: float | None  # None: an estimate has none
    seen: int  # canaries in the run
    unseen: int  # canaries left out; 0 where the exact null stands for them
    dimension: int | None  # of the null; None where unseen canaries stand for it
    threshold: float | None  # of the cosine, where the bound is largest
    kind: str  # "estimate" or "lower bound"
    holds: str


# --- two Gaussians


def hockey_stick_of_gaussians(
    mean: float, deviation: float, other_mean: float, other_deviation: float, epsilon: float
) -> float:
    """The delta at which the first Gaussian is e^epsilon-close to the other: exact, one direction.

    P(R) - e^epsilon P'(R), where R is where the log-ratio of the densities, a quadratic, is over
    epsilon.

    Units:
        deviations > 0; epsilon >= 0.

    Raises:
        ArgumentError: for numbers out of range.

    References:
        Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar, ICLR 2024, appendix; Steinke 2022,
        arXiv:2210.00597.

    Example:
        >>> round(hockey_stick_of_gaussians(1.0, 1.0, 0.0, 1.0, 1.0), 6)
        0.126937
    """
    where = "hockey_stick_of_gaussians"
    checks.nonnegative(where, single=True, epsilon=epsilon)
    gaussians = _two_gaussians(where, mean, deviation, other_mean, other_deviation)
    return math.exp(_log_hockey_stick(*gaussians, float(epsilon)))


def epsilon_of_gaussians(
    mean: float, deviation: float, other_mean: float, other_deviation: float, delta: float
) -> float:
    """The smallest epsilon with both hockey-stick divergences of two Gaussians at most `delta`.

    Units:
        deviations > 0; delta in (0, 1).

    Raises:
        ArgumentError: for numbers out of range.

    Example:
        >>> round(epsilon_of_gaussians(1.0, 1.0, 0.0, 1.0, 1e-2), 6)
        2.317789
    """
    where = "epsilon_of_gaussians"
    check_delta(where, delta, zero=False)
    one = _two_gaussians(where, mean, deviation, other_mean, other_deviation)
    other = one[2:] + one[:2]

    def excess(epsilon):
        larger = max(_log_hockey_stick(*one, epsilon), _log_hockey_stick(*other, epsilon))
        return larger - math.log(delta)

    high = 1.0
    while excess(high) > 0:
        high *= 2
    return roots.smallest_fitting(excess, 0.0, high, TOLERANCE)


def _two_gaussians(where, mean, deviation, other_mean, other_deviation):
    checks.positive(where, single=True, deviation=deviation, other_deviation=other_deviation)
    # any finite number; the check is of its size
    checks.nonnegative(where, single=True, **{"|mean|": abs(mean), "|other_mean|": abs(other_mean)})
    return float(mean), float(deviation), float(other_mean), float(other_deviation)


def _log_hockey_stick(mean, deviation, other_mean, other_deviation, epsilon):
    """In units of the other Gaussian, which is then N(0, 1)."""
    m, s = (mean - other_mean) / other_deviation, deviation / other_deviation
    a, b = (1 - s**-2) / 2, m / s**2  # log-ratio a y^2 + b y + c
    c = -((m / s) ** 2) / 2 - math.log(s) - epsilon
    if a == 0:
        if b == 0:
            return -math.inf
        left, right = (-math.inf, -c / b) if b > 0 else (-c / b, math.inf)
        inside = False
    else:
        discriminant = b * b - 4 * a * c
        if discriminant <= 0:
            return -math.inf  # nowhere or everywhere over epsilon >= 0: no difference
        # the root that adds numbers of one sign, and the other by the product of both
        far = -(b + math.copysign(math.sqrt(discriminant), b)) / 2
        left, right = sorted((far / a, c / far))
        inside = a < 0
    masses = _log_mass_between if inside else _log_mass_outside
    own, others = masses((left - m) / s, (right - m) / s), masses(left, right)
    ratio = epsilon + others - own if own > -math.inf else 0.0
    return own + math.log1p(-math.exp(ratio)) if ratio < 0 else -math.inf


def _log_mass_outside(left, right):
    return float(np.logaddexp(special.log_ndtr(left), special.log_ndtr(-right)))


def _log_mass_between(left, right):
    if left > 0:  # in the lower tail, where small numbers have their digits
        left, right = -right, -left
    low, high = special.log_ndtr(left), special.log_ndtr(right)
    return float(high + np.log1p(-np.exp(low - high))) if low < high else -math.inf


# --- the null


def null_cosine_sf(t: ArrayLike, dimension: int) -> np.ndarray:
    """The probability that a random direction has a cosine over `t` with a fixed one: exact.

    Shapes:
        t [...] -> Float64[...].

    Units:
        t in [-1, 1]; dimension >= 2.

    Raises:
        ArgumentError: for numbers out of range.

    References:
        Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar, ICLR 2024, section 4: the density is
        proportional to (1 - t^2)^((dimension - 3) / 2).

    Example:
        >>> float(null_cosine_sf(0.5, 3))
        0.25
    """
    where = "null_cosine_sf"
    checks.whole(where, least=2, dimension=dimension)
    t = _cosines(where, t=t)
    return np.exp(_log_null_sf(t, dimension))


def _log_null_sf(t, dimension):
    """log of `null_cosine_sf`; where that underflows, an upper bound."""
    a = (dimension - 1) / 2
    x = (1 - t) * (1 + t)
    half = special.betainc(a, 0.5, x) / 2
    with np.errstate(divide="ignore"):
        # of the tail: x^a / (2 a B |t|) bounds it, as a hypergeometric series by a geometric one
        tail = a * np.log(x) - np.log(2 * a * np.abs(t)) - special.betaln(a, 0.5)
        log_half = np.where(half > 1e-290, np.log(half), tail)
    return np.where(t >= 0, log_half, np.log1p(-half))


def _cosines(where, **values):
    ((name, value),) = values.items()
    value = checks.array(where, name, value)
    if value.dtype.kind not in "iuf" or not np.all(np.abs(value) <= 1 + ROUNDING):
        checks.fail(where, f"{name}, cosines in [-1, 1]", checks.shown(value))
    return np.clip(value.astype(np.float64), -1, 1)


def _sample(where, least, **values):
    """A list of finite numbers, as many as `least` or more."""
    ((name, value),) = values.items()
    value = checks.array(where, name, value)
    if value.dtype.kind not in "iuf" or value.ndim != 1 or len(value) < least:
        checks.fail(
            where, f"{name}, a list of {least} numbers or more", f"shape {list(value.shape)}"
        )
    if not np.all(np.isfinite(value)):
        checks.fail(where, f"{name}, finite numbers", checks.shown(value))
    return value.astype(np.float64)


# --- estimates


def epsilon_against_null(mean: float, deviation: float, dimension: int, delta: float) -> float:
    """The epsilon that tells N(mean, deviation^2) from the cosine of an unseen canary.

    From 1000 dimensions on, the null is N(0, 1 / dimension), and this is `epsilon_of_gaussians`.
    In fewer dimensions it is exact, and epsilon is the largest over tests that compare the cosine
    with a threshold.

    Units:
        deviation > 0; delta in (0, 1); dimension >= 2.

    Raises:
        ArgumentError: for numbers out of range.

    References:
        Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar, ICLR 2024, section 4.

    Example:
        >>> round(epsilon_against_null(2000**-0.5, 2000**-0.5, 2000, 1e-2), 6)
        2.317789
    """
    where = "epsilon_against_null"
    checks.whole(where, least=2, dimension=dimension)
    check_delta(where, delta, zero=False)
    null = dimension**-0.5
    mean, deviation, _, _ = _two_gaussians(where, mean, deviation, 0.0, null)
    if dimension >= GAUSSIAN_FROM:
        return epsilon_of_gaussians(0.0, null, mean, deviation, delta)
    mean = abs(mean)  # the null is symmetric
    # outside these, one of the errors is over 1 - delta
    low = math.sqrt(1 - special.betaincinv((dimension - 1) / 2, 0.5, 2 * min(delta, 1 - delta)))
    low = -low if delta < 0.5 else low
    high = min(mean - deviation * float(special.ndtri(delta)), 1 - ROUNDING)
    t = np.linspace(low, high, THRESHOLDS)
    missed = special.ndtr((t - mean) / deviation)
    return float(np.max(_epsilons(_log_null_sf(t, dimension), missed, delta)))


def epsilon_of_final(cosines: ArrayLike, dimension: int, delta: float) -> OneShot:
    """An estimate of epsilon for an adversary who sees the final model only.

    Shapes:
        cosines [canaries], between each canary and the final model minus the first.

    Privacy:
        an estimate, of the presence of one canary (add_remove); it may be over or under epsilon.
        With k canaries the mean of the cosines has a standard error of 1 / sqrt(k dimension): for a
        Gaussian mechanism, 1 / sqrt(k) of mu.

    Args:
        cosines: of the canaries in the run; positive where the model moved along them.
        dimension: number of parameters of the model.
        delta: in (0, 1).

    Raises:
        ArgumentError: for numbers out of range, fewer than two canaries, and cosines that are all
            equal.

    References:
        Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar, ICLR 2024, section 4.

    Example:
        >>> estimate = epsilon_of_final([0.0, 0.02, 0.04], 2500, 1e-2)
        >>> round(estimate.epsilon, 2), estimate.kind
        (4.69, 'estimate')
    """
    where = "epsilon_of_final"
    checks.whole(where, least=2, dimension=dimension)
    check_delta(where, delta, zero=False)
    cosines = _cosines(where, cosines=_sample(where, 2, cosines=cosines))
    epsilon = epsilon_against_null(*_fit(where, cosines=cosines), dimension, delta)
    return _estimate(epsilon, delta, len(cosines), 0, dimension)


def epsilon_of_all(seen: ArrayLike, unseen: ArrayLike, delta: float) -> OneShot:
    """An estimate of epsilon for an adversary who sees every release.

    The score of a canary is the largest of its cosines with all updates.  Its distribution for
    unseen canaries is not known, so that both are fitted by Gaussians.

    Shapes:
        seen [canaries], unseen [canaries].

    Privacy:
        an estimate, of the presence of one canary (add_remove); it may be over or under epsilon.

    Args:
        seen: scores of canaries in the run.
        unseen: scores of canaries left out.
        delta: in (0, 1).

    Raises:
        ArgumentError: for a delta out of range, fewer than two canaries of a kind, and scores that
            are all equal.

    References:
        Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar, ICLR 2024, section 4.

    Example:
        >>> round(epsilon_of_all([2.0, 3.0, 4.0], [0.0, 1.0, 2.0], 1e-2).epsilon, 2)
        8.0
    """
    where = "epsilon_of_all"
    check_delta(where, delta, zero=False)
    seen, unseen = _sample(where, 2, seen=seen), _sample(where, 2, unseen=unseen)
    gaussians = *_fit(where, seen=seen), *_fit(where, unseen=unseen)
    epsilon = epsilon_of_gaussians(*gaussians, delta)
    return _estimate(epsilon, delta, len(seen), len(unseen), None)


def _fit(where, **values):
    ((name, value),) = values.items()
    mean, deviation = float(np.mean(value)), float(np.std(value))
    if not deviation > 0:
        checks.fail(
            where,
            f"{name} that differ",
            f"{len(value)} that are {mean!r}",
            "A Gaussian cannot be fitted to them.",
        )
    return mean, deviation


def _estimate(epsilon, delta, seen, unseen, dimension):
    return OneShot(
        epsilon, delta, None, seen, unseen, dimension, None, "estimate", "without a guarantee"
    )


# --- thresholds


def lower_bound(
    seen: ArrayLike,
    dimension: int,
    *,
    delta: float,
    confidence: float = 0.95,
    null: str = "exact",
    correction: str = "bonferroni",
) -> OneShot:
    """The largest bound over thresholds of the cosine, with the exact null for false positives.

    The best threshold is not known before the cosines are seen.  With "bonferroni" each of the n
    cosines gets (1 - confidence) / n, and the share of seen canaries under it a Clopper-Pearson
    bound.  "none" is the rule of the paper: a Jeffreys interval at the full confidence for each
    threshold.  In simulations with independent cosines it was over epsilon in 7 to 40 % of runs at
    confidence 0.95, so that it is reported as an estimate.

    Shapes:
        seen [canaries], cosines with what was released.

    Privacy:
        of the presence of one canary (add_remove).  A lower bound for independent cosines; those
        of one run are close to that where canaries are few against dimension * noise_multiplier^2.

    Args:
        seen: of canaries in the run.
        dimension: number of parameters.
        delta: in [0, 1).
        confidence: of the bound; without a correction, of each interval.
        null: "exact"; or "gaussian", N(0, 1 / dimension), as the authors' code has from 1000
            dimensions on.
        correction: "bonferroni" or "none".

    Raises:
        ArgumentError: for numbers out of range, and too few canaries to show anything at this
            confidence; the message says which can be had.

    References:
        Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar, ICLR 2024, section 4; Jagielski, Ullman,
        Oprea, NeurIPS 2020.

    Example:
        >>> bound = lower_bound(np.linspace(0.02, 0.08, 100), 2000, delta=1e-5)
        >>> round(bound.epsilon, 2), bound.kind
        (4.43, 'lower bound')
    """
    where = "lower_bound"
    checks.whole(where, least=2, dimension=dimension)
    checks.choice(where, ("exact", "gaussian"), null=null)
    checks.choice(where, ("bonferroni", "none"), correction=correction)
    check_delta(where, delta)
    check_confidence(where, confidence)
    seen = np.sort(_cosines(where, seen=_sample(where, 1, seen=seen)))
    n = len(seen)
    corrected = correction == "bonferroni"

    def upper(count, n, alpha):
        return _clopper_pearson(count, n, alpha / n) if corrected else _jeffreys(count, n, alpha)

    _enough(where, [n], delta, confidence, upper)
    if null == "exact":
        # a cosine of 1, rounded, is not impossible without the canary
        log_false = _log_null_sf(np.minimum(seen, 1 - ROUNDING), dimension)
    else:
        log_false = special.log_ndtr(-seen * dimension**0.5)
    # between two cosines the bound grows with the threshold: each threshold is just under a cosine,
    # which is not missed, nor are those that equal it
    missed = upper(np.searchsorted(seen, seen), n, 1 - confidence)
    epsilons = _epsilons(log_false, missed, delta)
    labels = ("lower bound", "for independent cosines") if corrected else UNCORRECTED
    return _bound(epsilons, seen, delta, confidence, n, 0, dimension, labels)


def estimate_over_thresholds(
    seen: ArrayLike, unseen: ArrayLike, *, delta: float, confidence: float = 0.95
) -> OneShot:
    """The rule of the paper where the null is not known: both errors by Jeffreys intervals, at the
    best threshold.

    Shapes:
        seen [canaries], unseen [canaries].

    Privacy:
        an estimate: the threshold is chosen after the scores were seen, without a correction.  In
        simulations with independent scores it was over epsilon in up to 18 % of runs at confidence
        0.95.  For a lower bound choose the threshold on other scores, or correct for the choice.

    Args:
        seen: scores of canaries in the run.
        unseen: scores of canaries left out.
        delta: in [0, 1).
        confidence: of each Jeffreys interval.

    Raises:
        ArgumentError: as `lower_bound`.

    References:
        as `lower_bound`.

    Example:
        >>> found = estimate_over_thresholds(np.arange(50, 150), np.arange(100), delta=1e-5)
        >>> round(found.epsilon, 2), found.kind
        (3.09, 'estimate')
    """
    where = "estimate_over_thresholds"
    check_delta(where, delta)
    check_confidence(where, confidence)
    seen = np.sort(_sample(where, 1, seen=seen))
    unseen = np.sort(_sample(where, 1, unseen=unseen))
    _enough(where, [len(seen), len(unseen)], delta, confidence, _jeffreys)
    thresholds = np.unique(np.concatenate([seen, unseen]))
    alpha = 1 - confidence
    false = len(unseen) - np.searchsorted(unseen, thresholds)
    log_false = np.log(_jeffreys(false, len(unseen), alpha))
    missed = _jeffreys(np.searchsorted(seen, thresholds), len(seen), alpha)
    epsilons = _epsilons(log_false, missed, delta)
    sizes = len(seen), len(unseen), None
    return _bound(epsilons, thresholds, delta, confidence, *sizes, UNCORRECTED)


def _clopper_pearson(count, n, alpha):
    # count < n: of n cosines, the one at the threshold is not missed
    return special.betaincinv(count + 1, n - count, 1 - alpha)


def _jeffreys(count, n, alpha):
    return special.betaincinv(count + 0.5, n - count + 0.5, 1 - alpha)


def _epsilons(log_false, missed, delta):
    """Of tests with these false positives and false negatives, the larger of both directions; 0
    where they show nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        one = np.log(1 - delta - missed) - log_false
        other = np.log(1 - delta - np.exp(log_false)) - np.log(missed)
    return np.fmax(np.fmax(one, other), 0.0)


def _enough(where, sizes, delta, confidence, upper):
    """Refuse so few canaries that scores without any error would show nothing."""

    def shows(confidence):
        errors = [upper(0, n, 1 - confidence) for n in sizes]
        return sum(errors) < 1 - delta

    if shows(confidence):
        return
    highest = next((c for c in np.arange(99, 0, -1) / 100 if shows(c)), None)
    checks.fail(
        where,
        f"more canaries for confidence={confidence!r} at delta={delta!r}",
        " and ".join(map(str, sizes)),
        "" if highest is None else f"Perfect scores of so many show something at {highest}.",
    )


def _bound(epsilons, thresholds, delta, confidence, seen, unseen, dimension, labels):
    best = int(np.argmax(epsilons))
    return OneShot(
        float(epsilons[best]),
        delta,
        confidence,
        seen,
        unseen,
        dimension,
        float(thresholds[best]),
        *labels,
    )
