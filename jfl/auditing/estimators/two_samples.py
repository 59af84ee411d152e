"""Epsilon from the scores of runs with a canary and of runs without it.

A "lower bound" exceeds the true epsilon with probability at most 1 - confidence.  An "estimate"
guarantees nothing; `scipy.stats.bootstrap` shows how much it varies between runs.  Both describe
what one attack found: a small value does not prove privacy.  The privacy is that of the canary's
unit, under the adjacency between the two kinds of runs, against an adversary who observes what the
scores were computed from.

Arguments that several functions share:

    inside: [n], scores of runs with the canary, one per run; a higher score says "included".
    outside: [m], scores of runs without the canary.
    delta: the delta at which epsilon is reported.
    confidence: in (0, 1), of the bound.
    thresholds: an object of a class in `thresholds`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from ...core import checks
from ...privacy.accountants import rdp, roots
from .thresholds import Bonferroni, Rates, check_levels

__all__ = [
    "Estimate",
    "auroc",
    "gaussian_bound",
    "lower_bound",
    "raw_counts",
    "tpr_at_fpr",
    "tradeoff_bound",
]

LOWER_BOUND, ESTIMATE = "lower bound", "estimate"
NUM_EPSILONS = 17  # number of epsilons at which curves are compared with the error rates at once
MAX_STEPS = 8  # of the search for the smallest rejected noise
MAX_LOG_RATIO = 1e3  # the largest log ratio of two deltas in this search
TOLERANCE = 1e-6  # absolute tolerance of epsilon, and of the logarithm of a noise multiplier
MAX_EPSILON = 2.0**12  # the largest epsilon at which a profile is evaluated

Profile = Callable[[float, float], float]  # (noise_multiplier, epsilon) -> delta


class Estimate(NamedTuple):
    """A measured epsilon, and what has to be reported with it.

    The epsilon is that of one test, which answers "included" if a score is at least `threshold`.

    Attributes:
        epsilon: the value.
        confidence: the confidence of the bound; None for an estimate without a confidence.
        threshold: the threshold of the test.
        false_negatives, false_positives: the numbers of errors of the test.  Scores that only
            served to choose the threshold (`thresholds.Split`) are not counted.
        kind: "lower bound" or "estimate".
    """

    epsilon: float
    confidence: float | None
    threshold: float
    false_negatives: int
    false_positives: int
    kind: str


def lower_bound(
    inside: ArrayLike,
    outside: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    thresholds: Any = Bonferroni(),  # noqa: B008  frozen
) -> Estimate:
    """Return a lower bound on epsilon that is valid for every mechanism, but never tight.

    Under (epsilon, delta)-DP every test has 1 - FNR <= e^epsilon FPR + delta, and the same with FNR
    and FPR exchanged.  Clopper-Pearson intervals bound the error rates.  If n runs of each side
    show no error, each rate is at most some u, and the bound is ln((1 - u) / u): 3.28 for 100 runs
    and 5.60 for 1000 (one threshold, confidence 0.95, delta 0).

    Args:
        inside, outside, delta, confidence, thresholds: see the module.

    References:
        Jagielski, Ullman, Oprea, NeurIPS 2020; Nasr et al., IEEE S&P 2021.

    Example:
        >>> from jfl.auditing.estimators.thresholds import Explicit
        >>> inside, outside = np.arange(1000) + 5000, np.arange(1000)
        >>> found = lower_bound(inside, outside, delta=0.0, thresholds=Explicit(4000.0))
        >>> round(found.epsilon, 6), found.false_negatives, found.kind
        (5.600588, 0, 'lower bound')
    """
    read = lambda rates: shown_epsilon(rates, delta)
    check_levels("lower_bound", delta, confidence)
    return _audit("lower_bound", inside, outside, confidence, thresholds, read)


def shown_epsilon(rates: Rates, delta: float) -> tuple[float, int]:
    """Return the largest epsilon at `delta` that some tests show, and the index of the best test.

    It is valid for every mechanism.

    Args:
        rates: the upper bounds of the tests' error rates.
        delta: in [0, 1).
    """
    missed, accepted = rates.false_negative_rate, rates.false_positive_rate
    shown = np.maximum(
        _log_ratio(1 - missed - delta, accepted), _log_ratio(1 - accepted - delta, missed)
    )
    return max(0.0, float(np.max(shown))), int(np.argmax(shown))


def gaussian_bound(
    inside: ArrayLike,
    outside: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    thresholds: Any = Bonferroni(),  # noqa: B008  frozen
    unsampled_gaussian: bool = False,
) -> Estimate:
    """Return the epsilon of the most private Gaussian mechanism that allows the error rates.

    A mu-GDP mechanism has Phi^-1(1 - FPR) - Phi^-1(FNR) <= mu for every test.  With upper bounds of
    both rates, the left side is a lower bound on mu.  The largest one of all tests is converted to
    epsilon by the Gaussian's privacy profile.

    Args:
        inside, outside, delta, confidence, thresholds: see the module; delta > 0.
        unsampled_gaussian: True to state that the mechanism is a composition of Gaussian mechanisms
            without sampling.  Only then is the result a lower bound.  For any other mechanism it is
            an estimate (see its `kind`) that may be far above the true epsilon.  Use
            `tradeoff_bound` for mechanisms with sampling.

    References:
        Dong, Roth, Su, JRSS-B 2022; Nasr et al., USENIX Security 2023.

    Example:
        >>> from jfl.auditing.estimators.thresholds import Explicit
        >>> scores = special.ndtri((np.arange(500) + 0.5) / 500)
        >>> found = gaussian_bound(scores + 1, scores, delta=1e-5, thresholds=Explicit(0.5))
        >>> round(found.epsilon, 4), found.kind
        (3.2322, 'estimate')
    """

    def read(rates):
        mu, i = _largest_mu(rates)
        return (float(rdp.gaussian_epsilon(mu, delta)) if mu > 0 else 0.0), i

    check_levels("gaussian_bound", delta, confidence, zero=False)
    found = _audit("gaussian_bound", inside, outside, confidence, thresholds, read)
    return found if unsampled_gaussian else found._replace(kind=ESTIMATE)


def _largest_mu(rates: Rates) -> tuple[float, int]:
    """Return the largest mu of Gaussian differential privacy that the tests show, and the index of
    that test."""
    # 1 - FPR would lose the digits of a small rate.
    mu = -special.ndtri(rates.false_positive_rate) - special.ndtri(rates.false_negative_rate)
    return float(np.max(mu)), int(np.argmax(mu))


def tradeoff_bound(
    inside: ArrayLike,
    outside: ArrayLike,
    *,
    profile: Profile,
    delta: float,
    confidence: float = 0.95,
    thresholds: Any = Bonferroni(),  # noqa: B008  frozen
    noise_range: tuple[float, float] = (0.1, 100.0),
) -> Estimate:
    """Return a lower bound on epsilon for a mechanism that is known except for its noise.

    The result is the epsilon of the smallest noise multiplier that the error rates reject.  With
    noise multiplier z, every test has 1 - FNR <= e^x FPR + profile(z, x) for all x >= 0, and the
    same with FNR and FPR exchanged.  If one of these fails, z and all larger multipliers are
    rejected.

    The result is a lower bound if the profile is that of the mechanism.  If the profile is an
    accountant's upper bound, the result exceeds the epsilon that this accountant proves for the
    true noise with probability at most 1 - confidence.

    About 60 to 150 calls of `profile` are made for each set of error rates: `Bonferroni` and
    `Explicit` need one set, `Split` two.

    Args:
        inside, outside, delta, confidence, thresholds: see the module; delta > 0.
        profile: (noise_multiplier, epsilon) -> delta, decreasing in both, the larger value of both
            directions of the adjacency.
        noise_range: the noise multipliers that are searched.  If the largest is not rejected, the
            result is 0; if the smallest is rejected, the result is its epsilon.

    References:
        Nasr et al., USENIX Security 2023, section 5; Mahloujifar, Melis, Chaudhuri, 2024.

    Example:
        >>> from jfl.auditing.estimators.thresholds import Explicit
        >>> gaussian = lambda z, x: float(rdp.gaussian_delta(x, 1 / z))
        >>> scores = special.ndtri((np.arange(500) + 0.5) / 500)
        >>> options = dict(profile=gaussian, delta=1e-5, thresholds=Explicit(0.5))
        >>> round(tradeoff_bound(scores + 1, scores, **options).epsilon, 3)
        3.232
    """
    where = "tradeoff_bound"
    check_levels(where, delta, confidence, zero=False)
    least, most = checks.as_tuple(where, noise_range=noise_range)
    if not 0 < least < most < math.inf:
        checks.fail(where, "noise_range, (low, high) with 0 < low < high", f"{noise_range}")
    cached = functools.lru_cache(4096)(lambda noise, x: float(profile(noise, x)))

    def read(rates):
        noise, i = _smallest_rejected(rates, cached, float(least), float(most))
        return (0.0 if noise is None else _epsilon_of(cached, noise, delta)), i

    return _audit(where, inside, outside, confidence, thresholds, read)


def _smallest_rejected(rates: Rates, profile: Profile, least: float, most: float) -> tuple:
    """Return the smallest rejected noise multiplier that is found (None if there is none), and the
    index of the test that rejects it.

    At one epsilon, the rejected noise begins where the profile falls to the delta that the tests
    show.  Each step finds this point at the epsilon that rejects the smallest noise so far most
    clearly.  Every step is a rejection by itself, and epsilons that are not optimal only make the
    bound less tight.
    """
    from scipy import optimize  # slow: not at import

    missed, accepted = rates.false_negative_rate, rates.false_positive_rate
    shown = [_log_ratio(1 - missed, accepted), _log_ratio(1 - accepted, missed)]
    largest, (mu, i) = float(np.max(shown)), _largest_mu(rates)
    if largest <= 0:
        return None, i

    def excess(x, log_noise):
        """Return log(delta of the profile / delta that the tests show); rejected if <= 0."""
        seen, given = _shown_delta(rates, x)[0], profile(math.exp(log_noise), x)
        if not seen > 0 or not given >= 0:
            return MAX_LOG_RATIO
        return max(math.log(given / seen), -MAX_LOG_RATIO) if given > 0 else -MAX_LOG_RATIO

    grid = np.linspace(0.0, largest, NUM_EPSILONS + 1)[:-1].tolist()
    # the epsilon at which a Gaussian's curve touches the error rates of the best test
    x = min(abs(-mu * float(special.ndtri(accepted[i])) - mu**2 / 2), grid[-1])
    width, log_noise, best = largest / NUM_EPSILONS, math.log(most), None
    for step in range(MAX_STEPS):
        clearest = functools.partial(excess, log_noise=log_noise)
        if step == 1 or not clearest(x) < 0:
            x = min([x, *grid], key=clearest)
        if step:
            bounds, options = (max(x - width, 0.0), min(x + width, largest)), dict(maxiter=14)
            refined: Any = optimize.minimize_scalar(clearest, bounds=bounds, options=options)
            x = min(x, float(refined.x), key=clearest)
        if not clearest(x) < 0:
            break
        search, before = functools.partial(excess, x), log_noise
        log_noise = roots.smallest_fitting(search, math.log(least), before, TOLERANCE)
        best = x
        if step and before - log_noise < 10 * TOLERANCE:
            break
    if best is None:
        return None, i
    return math.exp(log_noise), _shown_delta(rates, best)[1]


def _shown_delta(rates: Rates, epsilon: float) -> tuple[float, int]:
    """Return a delta that the mechanism exceeds at `epsilon`, and the index of the test that shows
    it.  It holds for all epsilons at once, since the rates hold for all tests at once."""
    a, b = rates.false_positive_rate, rates.false_negative_rate
    gap = np.maximum(1 - b - math.exp(epsilon) * a, 1 - a - math.exp(epsilon) * b)
    return float(np.max(gap)), int(np.argmax(gap))


def _epsilon_of(profile: Profile, noise: float, delta: float) -> float:
    """Return the smallest epsilon with profile(noise, epsilon) <= delta, rounded down."""
    excess = lambda x: math.log(max(profile(noise, x), 1e-300) / delta)
    high = 1.0
    while not excess(high) <= 0:
        high *= 2
        if high > MAX_EPSILON:
            checks.fail(
                "tradeoff_bound",
                f"a profile that falls below delta={delta:g}",
                f"profile({noise:g}, {MAX_EPSILON:g})={profile(noise, MAX_EPSILON)!r}",
                "Raise the lower end of noise_range, or delta.",
            )
    return max(roots.smallest_fitting(excess, 0.0, high, TOLERANCE) - TOLERANCE, 0.0)


def raw_counts(
    inside: ArrayLike, outside: ArrayLike, *, delta: float = 0.0, min_count: int = 50
) -> Estimate:
    """Estimate epsilon by the largest ln((TPR - delta) / FPR) or ln((TNR - delta) / FNR).

    The maximum is over all thresholds.

    Args:
        inside, outside, delta: see the module.
        min_count: a ratio counts only if the rate in its denominator is of at least this number of
            errors.

    Example:
        >>> round(raw_counts(np.arange(200.0) + 100, np.arange(200.0)).epsilon, 4)  # ln 0.75 / 0.25
        1.0986
    """
    where = "raw_counts"
    check_levels(where, delta, 0.5)
    checks.require_integer(where, min_count=min_count)
    included, excluded = _scores(where, inside, outside)
    n, m = len(included), len(excluded)
    if min_count > min(n, m):
        hint = "Score more runs, or lower min_count, which makes the estimate less precise."
        checks.fail(where, f"{min_count} scores per side (min_count)", f"{n} and {m}", hint)
    thresholds = np.union1d(included, excluded)
    missed = np.searchsorted(included, thresholds)
    accepted = m - np.searchsorted(excluded, thresholds)
    shown = np.maximum(
        np.where(accepted >= min_count, _log_ratio(1 - missed / n - delta, accepted / m), -np.inf),
        np.where(missed >= min_count, _log_ratio(1 - accepted / m - delta, missed / n), -np.inf),
    )
    i = int(np.argmax(shown))
    test = (float(thresholds[i]), int(missed[i]), int(accepted[i]))
    return Estimate(max(0.0, float(shown[i])), None, *test, ESTIMATE)


def tpr_at_fpr(inside: ArrayLike, outside: ArrayLike, fpr: ArrayLike) -> np.ndarray:
    """Return the largest observed true positive rate at a false positive rate of at most `fpr`.

    Args:
        inside, outside: [n], [m], scores of runs with and without the canary.  A higher score says
            that the canary was included.
        fpr: [...], false positive rates in [0, 1].

    Returns:
        Float64 with the shape of `fpr`.

    References:
        Carlini et al., IEEE S&P 2022.

    Example:
        >>> tpr_at_fpr([1, 3], [0, 2], [0.0, 0.5]).tolist()
        [0.5, 1.0]
    """
    included, excluded = _scores("tpr_at_fpr", inside, outside)
    fpr = np.asarray(fpr, np.float64)
    if not np.all((fpr >= 0) & (fpr <= 1)):
        checks.fail("tpr_at_fpr", "fpr in [0, 1]", f"fpr={checks.short_repr(fpr)}")
    allowed = np.floor(fpr * len(excluded) + 1e-9).astype(int)  # 0.29 * 100 is 28.999999999999996
    rejected = np.append(excluded[::-1], -np.inf)[allowed]  # the highest score below the threshold
    return 1 - np.searchsorted(included, rejected, side="right") / len(included)


def auroc(inside: ArrayLike, outside: ArrayLike) -> float:
    """Return the area under the ROC curve.

    This is the probability that an inside score is higher than an outside score; ties count half.

    Args:
        inside, outside: see the module.

    Example:
        >>> auroc([1, 3], [0, 2])
        0.75
    """
    included, excluded = _scores("auroc", inside, outside)
    below = np.searchsorted(excluded, included) + np.searchsorted(excluded, included, side="right")
    return float(np.mean(below) / (2 * len(excluded)))


def _audit(where, inside, outside, confidence, thresholds, read):
    """Check the scores, and return the Estimate of the largest epsilon that `read` finds."""
    if isinstance(thresholds, type) or not hasattr(thresholds, "judge"):
        got = f"thresholds={checks.short_repr(thresholds)}"
        checks.fail(where, "thresholds, such as Bonferroni() or Explicit(0.5)", got)
    shown = thresholds.judge(*_scores(where, inside, outside), 1 - confidence, read)
    test = (shown.threshold, shown.false_negatives, shown.false_positives)
    return Estimate(shown.epsilon, confidence, *test, LOWER_BOUND)


def _log_ratio(numerator, denominator):
    """Return log(numerator / denominator), or -inf if the numerator is not positive."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(np.maximum(numerator, 0)) - np.log(denominator)
    return np.where(numerator > 0, ratio, -np.inf)


def _scores(where, inside, outside) -> Any:
    """Return the scores of both sides, each sorted and in float64."""
    sides = []
    for name, value in (("inside", inside), ("outside", outside)):
        scores = checks.as_array(where, name, value)
        if scores.ndim != 1 or not scores.size or scores.dtype.kind not in "biuf":
            got = f"{name} of shape {list(scores.shape)} and type {scores.dtype}"
            checks.fail(where, f"{name}, a list of scores, one per run", got)
        if bad := int((~np.isfinite(scores)).sum()):
            got = f"{bad} of {scores.size} scores nan or infinite"
            hint = "Only the order counts: use the largest finite number instead of infinity."
            checks.fail(where, f"{name} finite", got, hint)
        sides.append(np.sort(scores.astype(np.float64)))
    return sides
