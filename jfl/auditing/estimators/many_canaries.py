"""A lower bound on epsilon from several runs with several canaries each (lifted DP, LiDP).

n models are trained with k canaries, drawn from one distribution independently for each model, and
n models with k - 1 of them and m fresh ones left out.  The k tests of a model of the first kind,
and the m tests of one of the second, are exchangeable, not independent: the intervals here use how
they are correlated, which is estimated too.  Where the tests are close to independent, n models
with k canaries say as much as n k models with one.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from ...core import checks
from .levels import check_confidence, check_delta

__all__ = ["ManyCanaries", "Rates", "detection_rate", "lower_bound"]

LEAST = {"wilson1": 1, "wilson2": 2, "wilson4": 4}  # canaries a model that an interval needs


class Rates(NamedTuple):
    """A detection rate, and bounds of it; each of them alone holds at the confidence asked."""

    mean: float
    low: float
    high: float


class ManyCanaries(NamedTuple):
    """What models with many canaries each say of epsilon."""

    epsilon: float  # 0 where nothing is shown
    delta: float
    confidence: float
    inside: Rates  # detection of canaries that were in; `low` is used
    outside: Rates  # of fresh canaries; `high` is used
    models: tuple[int, int]  # with k, and with k - 1 canaries
    canaries: tuple[int, int]  # tested in each of them
    interval: str
    kind: str = "lower bound"
    holds: str = "asymptotically, for many models"


def detection_rate(
    detected: ArrayLike, *, confidence: float = 0.95, interval: str = "wilson4"
) -> Rates:
    """One-sided bounds of the probability that a canary is detected.

    Shapes:
        detected [models, canaries], each 0 or 1.

    Privacy:
        asymptotic: the confidence is reached as the number of models grows, not for few of them.

    Args:
        detected: whether the test says "in".
        confidence: of the lower bound, and of the upper, but not of both at once.
        interval: "wilson1" uses the mean of a model's tests, as if they were one; "wilson2" also
            the second moment, and needs 2 canaries; "wilson4" bounds the second moment by the third
            and fourth, and needs 4.

    Raises:
        ArgumentError: for other shapes or values, and too few canaries for the interval.

    References:
        Pillutla, Andrew, Kairouz, McMahan, Oprea, Oh, NeurIPS 2023, section 4.  The variance of the
        second moment here has (mean of pairs)^2, as the derivation gives, where the authors' code
        has (mean of triples)^2.

    Example:
        >>> detected = np.arange(4000).reshape(1000, 4) % 3 == 0
        >>> rates = detection_rate(detected, interval="wilson2")
        >>> rates.low < rates.mean < rates.high
        True
    """
    where = "detection_rate"
    check_confidence(where, confidence)
    return _rates(where, "detected", detected, 1 - confidence, interval)


def lower_bound(
    detected_inside: ArrayLike,
    detected_outside: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    interval: str = "wilson4",
) -> ManyCanaries:
    """log((lower bound of the rate inside - delta) / upper bound of the rate outside).

    A model with k canaries and one with k - 1 of them are neighbours.  By exchangeability each of
    the k canaries stands for the one that differs: that it is detected is the event inside.
    Outside, it is a canary that the model has not seen.  Each of the two rates is bounded at
    half of 1 - confidence.

    Shapes:
        detected_inside [models, canaries]: tests of the k canaries of models that have them;
        detected_outside [models, canaries]: tests of fresh canaries, by models with k - 1.
        The two may differ in both sizes.

    Privacy:
        of the presence of one canary (add_remove), for mechanisms whose guarantee holds for every
        data set.  Asymptotic in the number of models.  The threshold of the test has to be fixed
        without these models; canaries are drawn anew for each model.

    Args:
        detected_inside: 0 or 1.
        detected_outside: 0 or 1.
        delta: of the guarantee, in [0, 1).
        confidence: of the bound.
        interval: as `detection_rate`.

    Raises:
        ArgumentError: as `detection_rate`, and for too few models for any bound above 0; the
            message says which confidence can be had.

    References:
        Pillutla, Andrew, Kairouz, McMahan, Oprea, Oh, NeurIPS 2023, Algorithm 1 and section 4.

    Example:
        >>> inside, outside = np.ones((200, 8)), np.zeros((200, 8))
        >>> round(lower_bound(inside, outside, delta=1e-5, interval="wilson1").epsilon, 2)
        3.95
    """
    where = "lower_bound"
    check_delta(where, delta)
    check_confidence(where, confidence)
    alpha = (1 - confidence) / 2
    inside = _rates(where, "detected_inside", detected_inside, alpha, interval)
    outside = _rates(where, "detected_outside", detected_outside, alpha, interval)
    shapes = np.shape(detected_inside), np.shape(detected_outside)
    _can_show(where, [models for models, _ in shapes], delta, alpha)
    gain = inside.low - delta
    epsilon = max(0.0, math.log(gain / outside.high)) if gain > 0 else 0.0
    models, canaries = zip(*shapes)
    return ManyCanaries(epsilon, delta, confidence, inside, outside, models, canaries, interval)


def _can_show(where, models, delta, alpha):
    """Refuse so few models that perfect tests would show nothing."""

    def shows(alpha):
        low, high = _wilson1(1.0, models[0], alpha)[0], _wilson1(0.0, models[1], alpha)[1]
        return low - delta > high

    if shows(alpha):
        return
    highest = next((c for c in np.arange(99, 0, -1) / 100 if shows((1 - c) / 2)), None)
    checks.fail(
        where,
        f"more models for confidence={1 - 2 * alpha:.6g}",
        f"{models[0]} with and {models[1]} without, at delta={delta!r}",
        "No number of canaries makes up for it."
        if highest is None
        else f"Perfect tests of so many show something at confidence={highest}.",
    )


def _rates(where, name, detected, alpha, interval):
    checks.choice(where, tuple(LEAST), interval=interval)
    x = checks.array(where, name, detected)
    if x.ndim != 2 or not x.size:
        checks.fail(where, f"{name} of shape [models, canaries]", f"shape {list(x.shape)}")
    if x.dtype.kind not in "biuf" or not np.all((x == 0) | (x == 1)):
        checks.fail(where, f"{name}, 0 or 1 for each test", checks.shown(detected))
    models, canaries = x.shape
    if canaries < LEAST[interval]:
        can = [name for name, least in LEAST.items() if least <= canaries]
        checks.fail(
            where,
            f"{LEAST[interval]} canaries a model for {interval!r}",
            f"{canaries} in {name}",
            f"Use interval={can[-1]!r}.",
        )
    moments = _moments(x.sum(axis=1, dtype=np.float64), canaries, LEAST[interval])
    if interval == "wilson1":
        low, high = _wilson1(moments[0], models, alpha)
    elif interval == "wilson2":
        pairs = _wilson1(moments[1], models, alpha / 2)[1]
        low, high = _wilson2(moments[0], pairs, models, canaries, alpha / 2)
    else:
        triples = _wilson1(moments[2], models, alpha / 4)[1]
        quadruples = _wilson1(moments[3], models, alpha / 4)[1]
        pairs = _wilson_of_pairs(moments[1], triples, quadruples, models, canaries, alpha / 4)
        low, high = _wilson2(moments[0], pairs, models, canaries, alpha / 4)
    return Rates(float(moments[0]), low, high)


def _moments(counts, canaries, order):
    """Shares of single tests, pairs, triples ... of a model in which all detect, averaged over the
    models."""
    share, means = np.ones_like(counts), []
    for i in range(order):
        share = share * (counts - i) / (canaries - i)
        means.append(float(np.mean(share)))
    return means


def _quantile(alpha):
    return -float(special.ndtri(alpha))


def _roots(a, b, c, mean, models, z):
    """The interval between the roots of a p^2 - b p + c, and what a variance of 1/4 gives."""
    root = math.sqrt(max(b * b - 4 * a * c, 0.0))
    most = z * math.sqrt(0.25 / models)
    low = max((b - root) / (2 * a), mean - most, 0.0)
    high = min((b + root) / (2 * a), mean + most, 1.0)
    return low, high


def _wilson1(mean, models, alpha):
    """models (mean - p)^2 = z^2 p (1 - p)."""
    z = _quantile(alpha)
    return _roots(models + z * z, 2 * models * mean + z * z, models * mean**2, mean, models, z)


def _wilson2(mean, pairs, models, canaries, alpha):
    """models (mean - p)^2 = z^2 (p / k + pairs (k - 1) / k - p^2), the variance of a model's mean
    where `pairs` bounds the probability that two canaries are both detected."""
    z, k = _quantile(alpha), canaries
    c = models * mean**2 - z * z * (k - 1) / k * pairs
    return _roots(models + z * z, 2 * models * mean + z * z / k, c, mean, models, z)


def _wilson_of_pairs(mean, triples, quadruples, models, canaries, alpha):
    """The upper end of models (mean - p)^2 = z^2 V(p), V the variance of a model's share of pairs.

    Of two pairs of canaries, both detected, 2 of k (k - 1) choices are one pair, 4 (k - 2) share a
    canary, and the others are four canaries.
    """
    z, k = _quantile(alpha), canaries
    choices = k * (k - 1)
    known = ((k - 2) * (k - 3) * quadruples + 4 * (k - 2) * triples) / choices
    b = 2 * models * mean + 2 * z * z / choices
    c = models * mean**2 - z * z * known
    return _roots(models + z * z, b, c, mean, models, z)[1]
