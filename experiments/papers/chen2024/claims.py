"""Privacy claims of Chen, Ding, Bao, Zhou, Jin (TKDE 2024) for DPNFL and AdDPNFL, by truncated
concentrated DP (tCDP).

The unit is one record of one client against everybody, under replace_one: noise N(0, sigma^2 I)
joins the mean clipped gradient of `batch` of a client's `rows` records at each of `steps` local
steps in each of its `participations` rounds.  A pair (rho, omega) bounds the Renyi divergence of
all orders a in (1, omega) by rho a; by Lemma 3, the rho of releases that follow each other add up,
and the least omega counts.  The server's Adam step is post-processing and costs nothing.  What
holds here needs per-example clipping, which the paper's algorithms lack, and batches of fixed size
without replacement.  Reported numbers are in `theory`.

Arguments are numbers or arrays, which broadcast.
"""

import math

import numpy as np

from jfl.core import checks
from jfl.privacy.accountants import events, rdp, tightest

from .. import wang2019
from ..approximate_dp import arrays
from ..claim import Checked, checked, claim

ORDERS = np.arange(2.0, 257)
SERIES = {"rdp_refined": wang2019.refined, "rdp_crude": wang2019.crude}


# --- Lemmas 1 to 4, and 7


@claim(
    "Lemma 7",
    "conditional",
    "needs per-example clipping: a bound in expectation bounds no sensitivity",
)
def minibatch_sensitivity(clip_norm, batch):
    """Return how far one record moves the mean of `batch` gradients of norm at most `clip_norm`.

    Privacy:
        replace_one.

    Example:
        >>> minibatch_sensitivity(1.0, 10)
        0.2
    """
    return 2 * clip_norm / batch


def lemma1(sensitivity, sigma):
    """Return rho of one Gaussian release, sensitivity^2 / (2 sigma^2), with omega = inf.

    References:
        Bun and Steinke, 2016, Proposition 1.6.
    """
    return sensitivity**2 / (2 * arrays(sigma)[0] ** 2)


@claim(
    "Lemma 2",
    "rigorous",
    "with its fallback; the improved conversion of Renyi curves is smaller",
)
def lemma2(rho, omega, delta):
    """Return epsilon = rho a + log(1 / delta) / (a - 1) at the best order a <= omega.

    It is rho + 2 sqrt(rho log(1 / delta)) if log(1 / delta) <= (omega - 1)^2 rho, and else that of
    order omega.

    Raises:
        ValueError: for omega <= 1.

    References:
        Bun, Dwork, Rothblum, Steinke, STOC 2018, Lemma 5.

    Example:
        >>> round(float(lemma2(0.01, 100, 1e-5)), 6), round(float(lemma2(0.01, 5, 1e-5)), 6)
        (0.688614, 2.928231)
    """
    rho, omega, delta = arrays(rho, omega, delta)
    if not np.all(omega > 1):
        checks.fail("chen2024.lemma2", "omega > 1", f"omega={omega!r}")
    budget, safe_rho = -np.log(delta), np.where(rho > 0, rho, 1.0)
    order = np.minimum(1 + np.sqrt(budget / safe_rho), omega)
    return np.where(rho > 0, safe_rho * order + budget / (order - 1), 0.0)


def lemma4(rho, rate) -> Checked:
    """Return (rho, omega) of a release on a sample of fixed size, for replace_one.

    The pair is (13 rate^2 rho, log(1 / rate) / (4 rho)).  If a precondition fails, (rho, inf)
    holds, without the gain from sampling. Poisson samples are not covered.

    Args:
        rho: rho of the release, with omega = inf.
        rate: sample / population.

    References:
        Bun, Dwork, Rothblum, Steinke, STOC 2018, Theorem 11.

    Example:
        >>> lemma4(1.77, 1 / 60).failed[0]
        'rho <= 0.1'
    """
    r, q = arrays(rho, rate)
    gain = -np.log(q)
    conditions = {
        "rho <= 0.1": r <= 0.1,
        "rate <= 0.1": q <= 0.1,
        "log(1 / rate) >= 3 rho (2 + log2(1 / rho))": gain >= 3 * r * (2 - np.log2(r)),
        "log(1 / rate) / (2 rho) >= 3": gain >= 6 * r,
    }
    return checked((13 * q**2 * r, gain / (4 * r)), conditions)


# --- Theorem 5


@claim(
    "Theorem 5, its (rho, omega)",
    "conditional",
    (
        "needs clipped examples, batches without replacement, Lemma 4 at every step, a bound on "
        "the "
        "participations"
    ),
)
def dpnfl_tcdp(participations, steps, clip_norm, batch, rows, sigma) -> Checked:
    """Return tCDP of a client, (26 K steps clip_norm^2 / (rows sigma)^2, (batch sigma /
    clip_norm)^2 log(rows / batch) / 8).

    Args:
        participations: K, rounds in which the client takes part.
        steps: local steps of a round.
        clip_norm: bound on the gradient of a record.
        batch: records of a step.
        rows: records of the client.
        sigma: std per coordinate of the noise on the mean gradient.

    Returns:
        A Checked pair (rho, omega), Float64[...].

    Privacy:
        one record, replace_one.  Where a precondition of Lemma 4 fails, the pair is that without
        amplification, (rho, inf), which holds; a client with fewer rows than `batch` uses all of
        them.

    Example:
        >>> [round(float(v), 5) for v in dpnfl_tcdp(10, 300, 1.0, 10, 600, 6.766).value]
        [0.00473, 2342.92501]
    """
    (rho, omega), whole, holds, conditions = _client(
        participations, steps, clip_norm, batch, rows, sigma
    )
    return checked((np.where(holds, rho, whole), np.where(holds, omega, np.inf)), conditions)


@claim(
    "Theorem 5, at a delta of one's own",
    "ours",
    "Lemma 2 at the target delta, where Theorem 5 gives its own",
)
def dpnfl_epsilon(participations, steps, clip_norm, batch, rows, sigma, delta) -> Checked:
    """Return the epsilon of a client at `delta` by the paper's lemmas.

    It is the smaller one of the epsilons with and without Lemma 4, and sound even if a precondition
    fails. A client that never participates has 0. Arguments are those of `dpnfl_tcdp`.
    """
    tcdp = dpnfl_tcdp(participations, steps, clip_norm, batch, rows, sigma)
    whole = _client(participations, steps, clip_norm, batch, rows, sigma)[1]
    value = np.minimum(lemma2(tcdp.value[0], tcdp.value[1], delta), lemma2(whole, math.inf, delta))
    return tcdp._replace(value=value)


@claim(
    "Theorem 5",
    "conditional",
    "delta is an output; epsilon grows with sigma, so it cannot calibrate",
)
def theorem5(participations, steps, clip_norm, batch, rows, sigma) -> Checked:
    """Return the printed pair (rho (2 omega - 1), exp(-rho (omega - 1)^2)).

    It is Lemma 2 at the smallest delta that it allows.  As sigma grows, epsilon tends to
    `theorem5_limit` from below and delta to 0 (at least the least normal float).  If a precondition
    fails, the pair is as printed and proves nothing.  Arguments are those of `dpnfl_tcdp`.

    >>> [round(float(theorem5(10, 300, 1.0, 10, 600, s).value[0]), 3) for s in (0.5, 10.0)]
    [21.311, 22.176]
    """
    (rho, omega), *_, conditions = _client(participations, steps, clip_norm, batch, rows, sigma)
    delta = np.maximum(np.exp(-rho * (omega - 1) ** 2), np.finfo(np.float64).tiny)
    return checked((rho * (2 * omega - 1), delta), conditions)


@claim(
    "Theorem 5, without noise to speak of",
    "ours",
    "epsilon does not fall with sigma, it rises to this",
)
def theorem5_limit(participations, steps, batch, rows):
    """Return the limit of the epsilon of `theorem5` as sigma grows, 6.5 K steps q^2 log(1 / q).

    Here q = batch / rows.

    >>> round(theorem5_limit(10, 300, 10, 600), 7)
    22.1776997
    """
    return 6.5 * participations * steps * (batch / rows) ** 2 * math.log(rows / batch)


# --- calibration


@claim("Lemma 2, inverted", "ours", "the paper does not say how its noise was set")
def rho_star(epsilon, delta):
    """Return the rho that Lemma 2 turns into epsilon at delta.

    It is (sqrt(log(1 / delta) + epsilon) - sqrt(log(1 / delta)))^2.

    >>> round(float(rho_star(0.3, 1e-2)), 10)
    0.0047328695
    """
    epsilon, delta = arrays(epsilon, delta)
    budget = -np.log(delta)
    # (a - b)^2 with a^2 - b^2 = epsilon, without the difference of the roots
    return (epsilon / (np.sqrt(budget + epsilon) + np.sqrt(budget))) ** 2


@claim(
    "experiments, the noise of (0.3, 1e-2)", "ours", "the paper does not say how its noise was set"
)
def calibrate_sigma(epsilon, delta, participations, steps, clip_norm, batch, rows) -> Checked:
    """Return the std per coordinate with which a client reaches epsilon at delta by Lemmas 2 to 4.

    It is clip_norm sqrt(26 K steps / rho_star) / rows, or larger if that is necessary for log(1 /
    delta) <= (omega - 1)^2 rho_star. Each client has its std, at which the preconditions are
    tested. Arguments are those of `dpnfl_tcdp`.

    >>> round(float(calibrate_sigma(0.3, 1e-2, 10, 300, 1.0, 10, 600).value), 4)
    6.766
    """
    times, used, owned = arrays(participations, batch, rows)
    times, used = times * steps, np.minimum(used, owned)
    base, rate, rho = minibatch_sensitivity(clip_norm, used), used / owned, rho_star(epsilon, delta)
    first = base * rate * np.sqrt(13 * times / (2 * rho))
    # omega = log(1 / rate) sigma^2 / (2 base^2); slightly above what is needed
    omega = 1 + np.sqrt(-np.log(delta) / rho)
    second = base * np.sqrt(2 * omega / np.maximum(-np.log(rate), 1e-300))
    sigma = (1 + 1e-12) * np.where(rate < 1, np.maximum(first, second), first)
    return checked(sigma, _client(participations, steps, clip_norm, batch, rows, sigma)[3])


@claim(
    "Theorem 5, K",
    "conditional",
    "the mean T r / n of the paper bounds no client: about half come more often",
)
def expected_participations(rounds: int, clients: int, per_round: int) -> int:
    """Return T r / n, rounded up: the mean number of rounds in which a client participates.

    Args:
        rounds: T, how many rounds are run.
        clients: n, how many clients there are.
        per_round: r, how many distinct ones are drawn for a round.
    """
    return -(-rounds * per_round // clients)


# --- side by side


def compare(
    participations: int, steps: int, clip_norm, batch: int, rows: int, sigma, delta
) -> dict:
    """Return sound epsilons of a client at `delta`, by the bound that proves each.

    - tcdp: `dpnfl_epsilon`.
    - rdp_refined, rdp_crude: the series of Wang, Balle, Kasiviswanathan.
    - no_amplification: Lemma 2 for all steps, without sampling.
    - gaussian_exact: the same, exactly.
    - tight: `jfl.privacy.accountants.tightest`.

    >>> {
    ...     k: round(v, 3)
    ...     for k, v in compare(10, 300, 1.0, 10, 600, 6.766, 1e-2).items()
    ...     if k[-1] in "pd"
    ... }
    {'tcdp': 0.3, 'rdp_refined': 0.052}
    """
    used, times = min(batch, rows), participations * steps
    z = float(sigma) / minibatch_sensitivity(float(clip_norm), used)
    tcdp = dpnfl_epsilon(participations, steps, clip_norm, batch, rows, sigma, delta)
    return {
        "tcdp": float(tcdp.value),
        **{name: _series(series, used / rows, z, times, delta) for name, series in SERIES.items()},
        "no_amplification": float(lemma2(times / (2 * z**2), math.inf, delta)),
        "gaussian_exact": float(rdp.gaussian_epsilon(math.sqrt(times) / z, delta)),
        "tight": tightest.epsilon(_event(used, rows, z, times), delta)[0],
    }


def _client(participations, steps, clip_norm, batch, rows, sigma):
    """Return (rho, omega) as printed, rho without amplification, whether the first holds, and its
    conditions by name."""
    times, batch, rows = arrays(participations, batch, rows)
    times, rate = times * steps, batch / rows
    as_printed = lemma1(minibatch_sensitivity(clip_norm, batch), sigma)
    whole = lemma1(minibatch_sensitivity(clip_norm, np.minimum(batch, rows)), sigma)
    amplified = lemma4(whole, np.minimum(rate, 1.0))
    conditions = {"batch <= rows": rate <= 1}
    conditions |= {
        name: amplified.holds for name in amplified.failed or ("the preconditions of Lemma 4",)
    }
    printed = times * (13 * rate**2 * as_printed), -np.log(rate) / (4 * as_printed)
    return printed, times * whole, amplified.holds, conditions


def _event(batch, rows, z, times):
    return events.repeat(events.without_replacement(batch, rows, events.gaussian(z)), times)


def _series(series, rate, z, times, delta):
    return float(rdp.epsilon(ORDERS, times * series(ORDERS, rate, z), delta))
