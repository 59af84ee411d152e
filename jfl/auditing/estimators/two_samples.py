"""Epsilon from scores of runs with a canary and of runs without it.

`inside` [n] are scores of runs that the canary was in, `outside` [m] of runs that it was not in;
higher says "in".  Each score is of a run of its own.  Privacy is that of the canary's unit, under
add or remove (or under whatever else makes the one kind of run into the other), against whoever
sees what the score was computed from.

A "lower bound" exceeds the true epsilon with probability at most 1 - confidence; an "estimate" says
nothing of that kind.  Both show what one attack found: a small number is no proof of privacy.

Axes: T thresholds.
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
from .thresholds import ESTIMATE, Bonferroni, Rates

__all__ = [
    "Estimate",
    "Interval",
    "auroc",
    "bootstrap",
    "gaussian_bound",
    "lower_bound",
    "max_accuracy",
    "raw_counts",
    "tpr_at_fpr",
    "tradeoff_bound",
]

FEWEST = 50  # errors that a ratio of raw counts divides by
GRID = 17  # epsilons at which a family of mechanisms is first compared
ROUNDS = 8  # of the search for the smallest noise that is rejected, at most
CLOSE = 1e-6  # of epsilon, and of the logarithm of noise, to which searches go
LARGEST = 2.0**12  # epsilon up to which a profile is asked

Profile = Callable[[float, float], float]  # (noise_multiplier, epsilon) -> delta


class Estimate(NamedTuple):
    """An epsilon that was measured, and what has to be printed with it."""

    epsilon: float
    confidence: float | None  # None where nothing of the kind is claimed
    threshold: float  # "in" where a score is >= threshold
    false_negatives: int  # inside scores below it, of those that were judged
    false_positives: int  # outside scores at or above it, of those that were judged
    kind: str  # "lower bound" or "estimate"


class Interval(NamedTuple):
    """A value, and between what it is."""

    low: float
    value: float
    high: float
    confidence: float


def lower_bound(
    inside: ArrayLike,
    outside: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    thresholds: Any = Bonferroni(),  # noqa: B008  frozen
    two_sided: bool = True,
) -> Estimate:
    """Epsilon by Clopper-Pearson: of every mechanism, and never tight.

    With (epsilon, delta), 1 - FNR <= e^epsilon FPR + delta for every test, and with FNR and FPR
    exchanged.  Without an error in n runs a side it shows ln((1 - u) / u), with u the upper bound
    of no errors in n: 3.28 for 100 runs, 5.60 for 1000 (one threshold, confidence 0.95, delta 0).

    Args:
        inside: [n] scores of runs with the canary.
        outside: [m] scores of runs without it.
        delta: in [0, 1), for which epsilon is asked.
        confidence: in (0, 1), of the bound.
        thresholds: one of the classes of `thresholds`.
        two_sided: both inequalities, by the same bounds of the same rates; else the first alone.

    Raises:
        ArgumentError: for scores that are not finite or too few, delta and confidence out of range.

    References:
        Jagielski, Ullman, Oprea, NeurIPS 2020; Nasr et al., IEEE S&P 2021.

    Example:
        >>> from jfl.auditing.estimators.thresholds import Explicit
        >>> inside, outside = np.arange(1000) + 5000, np.arange(1000)
        >>> found = lower_bound(inside, outside, delta=0.0, thresholds=Explicit(4000.0))
        >>> round(found.epsilon, 6), found.false_negatives, found.kind
        (5.600588, 0, 'lower bound')
    """
    _delta("lower_bound", delta, zero=True)

    def read(rates):
        gain = _gain(1 - rates.false_negative_rate - delta, rates.false_positive_rate)
        if two_sided:
            other = _gain(1 - rates.false_positive_rate - delta, rates.false_negative_rate)
            gain = np.maximum(gain, other)
        i = int(np.argmax(gain))
        return max(0.0, gain[i]), i

    return _audit("lower_bound", inside, outside, confidence, thresholds, read)


def gaussian_bound(
    inside: ArrayLike,
    outside: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    thresholds: Any = Bonferroni(),  # noqa: B008  frozen
    unsampled_gaussian: bool = False,
) -> Estimate:
    """Epsilon of the least private Gaussian mechanism that the errors do not exclude.

    A mu-GDP mechanism has Phi^-1(1 - FPR) - Phi^-1(FNR) <= mu for every test.  The largest mu that
    is shown gives epsilon at `delta` by the Gaussian's privacy profile.

    Privacy:
        A lower bound for compositions of Gaussian mechanisms without sampling, of which one number,
        mu, is unknown.  For others (sampled, Laplace, or what only adds Gaussian noise somewhere)
        it is an estimate, and may be far above the true epsilon.  Say `unsampled_gaussian=True`
        where the first holds: then, and only then, the result is called a lower bound.  For sampled
        mechanisms use `tradeoff_bound`.

    Args:
        inside: [n] scores of runs with the canary.
        outside: [m] scores of runs without it.
        delta: in (0, 1), for which epsilon is asked.
        confidence: in (0, 1), of the bound.
        thresholds: one of the classes of `thresholds`.
        unsampled_gaussian: the caller's word that the mechanism is of that family.

    Raises:
        ArgumentError: as `lower_bound`, and for delta = 0, at which no Gaussian has an epsilon.

    References:
        Dong, Roth, Su, JRSS-B 2022; Nasr et al., USENIX Security 2023.

    Example:
        >>> from jfl.auditing.estimators.thresholds import Explicit
        >>> scores = special.ndtri((np.arange(500) + 0.5) / 500)
        >>> found = gaussian_bound(scores + 1, scores, delta=1e-5, thresholds=Explicit(0.5))
        >>> round(found.epsilon, 4), found.kind
        (3.2322, 'estimate')
    """
    _delta("gaussian_bound", delta, do="lower_bound takes delta=0.")

    def read(rates):
        mu, i = _mu(rates)
        return (float(rdp.gaussian_epsilon(mu, delta)) if mu > 0 else 0.0), i

    found = _audit("gaussian_bound", inside, outside, confidence, thresholds, read)
    return found if unsampled_gaussian else found._replace(kind=ESTIMATE)


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
    """Epsilon of the least private member of a mechanism's own family that is not excluded.

    The family is known but for its noise: what a claim of a noise multiplier is tested against.
    Whoever has noise z has 1 - FNR <= e^x FPR + profile(z, x) for every test and x >= 0 (a profile
    is a trade-off curve in other coordinates), and with FNR and FPR exchanged.  Noise for which one
    of these fails is rejected, and so is all noise above it.  The result is epsilon at `delta` of
    the smallest noise that was found to be rejected.

    Privacy:
        A lower bound for members of the family.  A profile that is an accountant's upper bound, as
        `pld.delta`, rejects less; epsilon is then that of the same accountant, so what it proves of
        the true noise is exceeded with probability at most 1 - confidence.

    Cost:
        About 60 to 150 calls of `profile` for each reading: `Bonferroni` and `Explicit` read once,
        `Split` twice, `MultiSplit` twice a split.

    Args:
        inside: [n] scores of runs with the canary.
        outside: [m] scores of runs without it.
        profile: (noise_multiplier, epsilon) -> delta, falling in both, for the worse of both
            directions.
        delta: in (0, 1), for which epsilon is asked.
        confidence: in (0, 1), of the bound.
        thresholds: one of the classes of `thresholds`.
        noise_range: noise multipliers among which is searched.  Where the upper end is not
            rejected epsilon is 0; where the lower end is, epsilon is that of the lower end.

    Raises:
        ArgumentError: as `gaussian_bound`; for a noise_range that is none, and a profile that stays
            above `delta`.

    References:
        Nasr et al., USENIX Security 2023, section 5; Mahloujifar, Melis, Chaudhuri, 2024.

    Example:
        >>> from jfl.privacy.accountants import rdp
        >>> gaussians = lambda z, x: float(rdp.gaussian_delta(x, 1 / z))
        >>> from jfl.auditing.estimators.thresholds import Explicit
        >>> scores = special.ndtri((np.arange(500) + 0.5) / 500)
        >>> at = Explicit(0.5)
        >>> round(
        ...     tradeoff_bound(
        ...         scores + 1, scores, profile=gaussians, delta=1e-5, thresholds=at
        ...     ).epsilon,
        ...     3,
        ... )
        3.232
    """
    where = "tradeoff_bound"
    _delta(where, delta)
    least, most = _range(where, noise_range)
    once = functools.lru_cache(4096)(lambda noise, x: float(profile(noise, x)))

    def read(rates):
        noise, i = _smallest_rejected(rates, once, least, most)
        return (0.0 if noise is None else _epsilon_of(where, once, noise, delta)), i

    return _audit(where, inside, outside, confidence, thresholds, read)


def raw_counts(
    inside: ArrayLike,
    outside: ArrayLike,
    *,
    delta: float = 0.0,
    min_count: int = FEWEST,
    two_sided: bool = True,
) -> Estimate:
    """ln((TPR - delta) / FPR) as counted, where at least `min_count` errors are divided by.

    An estimate without any guarantee: no interval, and the best of all thresholds.

    Args:
        inside: [n] scores of runs with the canary.
        outside: [m] scores of runs without it.
        delta: in [0, 1), for which epsilon is asked.
        min_count: errors that a ratio is to have in its denominator.
        two_sided: also ln((TNR - delta) / FNR).

    Raises:
        ArgumentError: for scores that are not finite, or fewer than `min_count` of them.

    Example:
        >>> round(raw_counts(np.arange(200.0) + 100, np.arange(200.0)).epsilon, 4)  # ln 0.75 / 0.25
        1.0986
    """
    _delta("raw_counts", delta, zero=True)
    checks.require_integer("raw_counts", min_count=min_count)
    inside, outside = _both("raw_counts", inside, outside)
    n, m = len(inside), len(outside)
    if min_count > (min(n, m) if two_sided else m):
        do = "Score more runs, or lower min_count: the estimate then varies more."
        checks.fail("raw_counts", f"{min_count} scores a side (min_count)", f"{n} and {m}", do)
    thresholds = np.union1d(inside, outside)
    missed = np.searchsorted(inside, thresholds)
    accepted = m - np.searchsorted(outside, thresholds)
    gain = np.where(accepted >= min_count, _gain(1 - missed / n - delta, accepted / m), -np.inf)
    if two_sided:
        other = _gain(1 - accepted / m - delta, missed / n)
        gain = np.maximum(gain, np.where(missed >= min_count, other, -np.inf))
    i = int(np.argmax(gain))
    test = (float(thresholds[i]), int(missed[i]), int(accepted[i]))
    return Estimate(max(0.0, float(gain[i])), None, *test, ESTIMATE)


def tpr_at_fpr(inside: ArrayLike, outside: ArrayLike, fpr: ArrayLike) -> np.ndarray:
    """The largest share of `inside` that a threshold finds with at most `fpr` of `outside`.

    As counted, without randomised tests: the true positive rate of an attack at a low false
    positive rate.

    Shapes:
        fpr [...] -> Float64[...].

    Raises:
        ArgumentError: for scores that are not finite, and fpr outside [0, 1].

    References:
        Carlini et al., IEEE S&P 2022.

    Example:
        >>> tpr_at_fpr([1, 3], [0, 2], [0.0, 0.5]).tolist()
        [0.5, 1.0]
    """
    inside, outside = _both("tpr_at_fpr", inside, outside)
    fpr = checks.as_array("tpr_at_fpr", "fpr", fpr)
    if fpr.dtype.kind not in "iuf" or not np.all((fpr >= 0) & (fpr <= 1)):
        checks.fail("tpr_at_fpr", "fpr in [0, 1]", f"fpr={checks.short_repr(fpr)}")
    allowed = np.floor(fpr * len(outside) + 1e-9).astype(int)  # 0.29 * 100 is 28.999999999999996
    refused = np.append(outside[::-1], -np.inf)[allowed]  # the highest that must not be found
    return 1 - np.searchsorted(inside, refused, side="right") / len(inside)


def auroc(inside: ArrayLike, outside: ArrayLike) -> float:
    """The area under the ROC curve: how often an inside score is higher, ties counted half.

    Example:
        >>> auroc([1, 3], [0, 2])
        0.75
    """
    inside, outside = _both("auroc", inside, outside)
    below = np.searchsorted(outside, inside) + np.searchsorted(outside, inside, side="right")
    return float(np.mean(below) / (2 * len(outside)))


def max_accuracy(inside: ArrayLike, outside: ArrayLike, prevalence: float = 0.5) -> float:
    """The largest share that a threshold gets right, where `prevalence` are inside.

    As counted, at the best threshold of the same scores: an estimate that errs upwards.

    Example:
        >>> max_accuracy([1, 3], [0, 2])
        0.75
    """
    inside, outside = _both("max_accuracy", inside, outside)
    if not _number(prevalence) or not 0 <= prevalence <= 1:
        checks.fail(
            "max_accuracy", "prevalence in [0, 1]", f"prevalence={checks.short_repr(prevalence)}"
        )
    thresholds = np.append(inside, np.inf)  # each with as few false positives as its recall allows
    found = 1 - np.searchsorted(inside, thresholds) / len(inside)
    refused = np.searchsorted(outside, thresholds) / len(outside)
    return float(np.max(prevalence * found + (1 - prevalence) * refused))


def bootstrap(
    statistic: Callable[[np.ndarray, np.ndarray], Any],
    inside: ArrayLike,
    outside: ArrayLike,
    *,
    confidence: float = 0.95,
    samples: int = 1000,
    bias_corrected: bool = True,
    seed: int = 0,
) -> Interval:
    """An interval of a statistic, by drawing the scores of each side again with replacement.

    It says how much the statistic varies with the runs, approximately; of a statistic that is
    itself a best of many thresholds it does not take away the bias.  It is no lower bound of
    epsilon.

    Args:
        statistic: (inside, outside) -> number or `Estimate`, whose epsilon is taken.
        inside: [n] scores of runs with the canary.
        outside: [m] scores of runs without it.
        confidence: in (0, 1), of the interval.
        samples: how often is drawn.
        bias_corrected: shifts the quantiles by how far the value is from the median of the draws.
        seed: the seed of the draws.

    Raises:
        ArgumentError: for scores that are not finite, and arguments out of range.

    References:
        Efron, JASA 1987 (BCa, with acceleration 0).

    Example:
        >>> interval = bootstrap(auroc, np.arange(50.0) + 20, np.arange(50.0), samples=200)
        >>> interval.low < interval.value == 0.82 < interval.high
        True
    """
    _confidence("bootstrap", confidence)
    checks.require_integer("bootstrap", samples=samples)
    checks.require_seed("bootstrap", seed=seed)
    inside, outside = _both("bootstrap", inside, outside)
    generator = np.random.default_rng(seed)
    number = lambda *sides: float(getattr(found := statistic(*sides), "epsilon", found))
    again = lambda side: generator.choice(side, len(side))
    value = number(inside, outside)
    drawn = np.array([number(again(inside), again(outside)) for _ in range(samples)])
    shift = 0.0
    if bias_corrected:
        below = np.mean(drawn < value) + np.mean(drawn == value) / 2
        shift = special.ndtri(np.clip(below, 0.5 / samples, 1 - 0.5 / samples))
    tail = special.ndtri((1 - confidence) / 2)
    low, high = np.quantile(drawn, special.ndtr(2 * shift + np.array([tail, -tail])))
    return Interval(float(low), value, float(high), confidence)


# --- readings


def _gain(numerator, denominator):
    """The logarithm of their ratio; -inf where nothing is above zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.log(np.maximum(numerator, 0)) - np.log(denominator)
    return np.where(numerator > 0, gain, -np.inf)


def _mu(rates):
    # 1 - FPR would lose the digits of a small rate
    mu = -special.ndtri(rates.false_positive_rate) - special.ndtri(rates.false_negative_rate)
    i = int(np.argmax(mu))
    return float(mu[i]), i


def _shown_delta(rates: Rates, epsilon):
    """A delta that the true mechanism exceeds at `epsilon`, and the index of the test that shows
    it.  It holds for all epsilons at once, as the rates do for all tests."""
    a, b = rates.false_positive_rate, rates.false_negative_rate
    gap = np.maximum(1 - b - math.exp(epsilon) * a, 1 - a - math.exp(epsilon) * b)
    i = int(np.argmax(gap))
    return float(gap[i]), i


def _smallest_rejected(rates, profile, least, most):
    """The smallest noise found that the rates reject (None: none), and the index of the test.

    At one epsilon, the noise that is rejected begins where the profile falls to what is shown.
    Epsilon is then moved to where that noise is rejected most clearly, and so on: each step is a
    rejection by itself, and an epsilon that is not the best costs tightness only.
    """
    mu, i = _mu(rates)
    a, b = rates.false_positive_rate, rates.false_negative_rate
    top = float(max(np.max(_gain(1 - b, a)), np.max(_gain(1 - a, b))))
    if top <= 0:
        return None, i

    def excess(x, log_noise):
        """How far the logarithm of delta is above what is shown; positive where noise stays."""
        shown, given = _shown_delta(rates, x)[0], profile(math.exp(log_noise), x)
        if not shown > 0 or not given >= 0:  # nan says nothing
            return math.inf
        return math.log(given / shown) if given > 0 else -math.inf

    grid = np.linspace(0.0, top, GRID + 1)[:-1].tolist()
    width = top / GRID
    low, log_noise = math.log(least), math.log(most)
    # where a Gaussian's curve leans as the best test does
    x = min(abs(-mu * float(special.ndtri(a[i])) - mu**2 / 2), grid[-1])
    if excess(x, log_noise) > 0:
        x = min(grid, key=lambda x: excess(x, log_noise))
        if excess(x, log_noise) > 0:
            return None, i
    for step in range(ROUNDS):
        before = log_noise
        log_noise = roots.smallest_fitting(functools.partial(excess, x), low, before, CLOSE)
        if log_noise == low or step and before - log_noise < 10 * CLOSE:
            break
        there = functools.partial(excess, log_noise=log_noise)
        if step == 0:
            x = min([x, *grid], key=there)
        better = _clearest(there, max(x - width, 0.0), min(x + width, top))
        if not there(better) < there(x):
            break
        x = better
    return math.exp(log_noise), _shown_delta(rates, x)[1]


def _clearest(excess, low, high):
    """An epsilon between the ends at which noise is rejected most clearly, by a golden section."""
    ratio = roots.GOLDEN_RATIO
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    for _ in range(14):
        if excess(left) < excess(right):
            high, right, left = right, left, right - ratio * (right - low)
        else:
            low, left, right = left, right, left + ratio * (high - left)
    return min(left, right, key=excess)


def _epsilon_of(where, profile, noise, delta):
    """The smallest epsilon with profile(noise, epsilon) <= delta, from below."""
    excess = lambda x: math.log(max(profile(noise, x), 1e-300) / delta)
    high = 1.0
    while not excess(high) <= 0:
        high *= 2
        if high > LARGEST:
            got = f"profile({noise:g}, {LARGEST:g})={profile(noise, LARGEST)!r}"
            do = "Raise the lower end of noise_range, or delta."
            checks.fail(where, f"a profile that falls below delta={delta:g}", got, do)
    return max(roots.smallest_fitting(excess, 0.0, high, CLOSE) - CLOSE, 0.0)


# --- arguments


def _audit(where, inside, outside, confidence, thresholds, read):
    _confidence(where, confidence)
    if isinstance(thresholds, type) or not hasattr(thresholds, "judge"):
        need = "thresholds, such as Bonferroni() or Explicit(0.5)"
        checks.fail(where, need, f"thresholds={checks.short_repr(thresholds)}")
    inside, outside = _both(where, inside, outside)
    shown = thresholds.judge(inside, outside, 1 - confidence, read)
    return Estimate(shown.epsilon, confidence, *shown[1:], thresholds.kind)


def _both(where, inside, outside):
    """Both sides as sorted float64."""
    return _scores(where, "inside", inside), _scores(where, "outside", outside)


def _scores(where, name, value):
    scores = checks.as_array(where, name, value)
    if scores.ndim != 1 or not scores.size or scores.dtype.kind not in "biuf":
        got = f"{name} of shape {list(scores.shape)} and type {scores.dtype}"
        checks.fail(where, f"{name}, a list of scores, one of each run", got)
    finite = np.isfinite(scores)
    if not finite.all():
        need, got = (
            f"{name} finite",
            f"{int((~finite).sum())} of {scores.size} scores nan or infinite",
        )
        do = "Only order counts: infinite scores may be the largest finite one, nan is no score."
        checks.fail(where, need, got, do)
    return np.sort(scores.astype(np.float64))


def _number(value):
    return (
        not isinstance(value, bool)
        and np.ndim(value) == 0
        and np.asarray(value).dtype.kind in "iuf"
    )


def _delta(where, delta, zero=False, do=""):
    if not _number(delta) or not (0 <= delta if zero else 0 < delta) or not delta < 1:
        checks.fail(
            where, f"delta in {'[' if zero else '('}0, 1)", f"delta={checks.short_repr(delta)}", do
        )


def _confidence(where, confidence):
    if not _number(confidence) or not 0 < confidence < 1:
        do = "0.95 is usual: wrong in at most 5 % of audits."
        checks.fail(
            where, "confidence in (0, 1)", f"confidence={checks.short_repr(confidence)}", do
        )


def _range(where, noise_range):
    ends = checks.as_tuple(where, noise_range=noise_range)
    if len(ends) != 2 or not all(map(_number, ends)) or not 0 < ends[0] < ends[1] < math.inf:
        checks.fail(
            where, "noise_range, (low, high) with 0 < low < high", checks.short_repr(noise_range)
        )
    return float(ends[0]), float(ends[1])
