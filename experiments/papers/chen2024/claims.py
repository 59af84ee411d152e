"""Privacy claims of Chen, Ding, Bao, Zhou, Jin (TKDE 2024) for DPNFL and AdDPNFL, by truncated
concentrated DP (tCDP).

The unit is one record of one client against everybody, under replace_one: noise N(0, sigma^2 I)
joins the mean clipped gradient of `batch` of a client's `rows` records at each of `steps` local
steps in each of its `participations` rounds.  Lemmas 1, 3 and 4 are `gaussian`, `tcdp_compose` and
`tcdp_amplify` of `jfl.privacy.accountants.zcdp`; the server's Adam step is post-processing and
costs nothing.  What holds here needs per-example clipping, which the paper's algorithms lack, and
batches of fixed size without replacement.  Reported numbers are in `theory`.
"""

import bisect
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jfl.core import checks
from jfl.core.checks import Checked
from jfl.core.pytrees import in_float64
from jfl.privacy.accountants import events, rdp, tightest
from jfl.privacy.ledger import facts as samples

from .. import approximate_dp, wang2019, zcdp
from ..claim import claim

ORDERS = np.arange(2.0, 257)
SERIES = {"rdp_refined": wang2019.refined, "rdp_crude": wang2019.crude}
ADJACENCIES = ("replace_one", "add_remove")


@claim(
    "Lemma 7",
    "conditional",
    "needs per-example clipping: a bound in expectation bounds no sensitivity",
)
def minibatch_sensitivity(clip_norm, batch, adjacency: str = "replace_one"):
    """How far one record moves the mean of `batch` gradients of norm at most `clip_norm`.

    Privacy:
        replace_one: 2 clip_norm / batch.  add_remove, with the divisor fixed: half of that, which
        Remark 6 calls about twice as strong.

    Example:
        >>> minibatch_sensitivity(1.0, 10), minibatch_sensitivity(1.0, 10, "add_remove")
        (0.2, 0.1)
    """
    checks.require_one_of("chen2024.minibatch_sensitivity", ADJACENCIES, adjacency=adjacency)
    checks.require_positive("chen2024.minibatch_sensitivity", clip_norm=clip_norm, batch=batch)
    return (2 if adjacency == "replace_one" else 1) * clip_norm / batch


@claim(
    "Lemma 2",
    "rigorous",
    "with its fallback; the improved conversion of zcdp.tcdp_to_dp_any is smaller",
)
def lemma2(rho, omega, delta):
    """epsilon = rho + 2 sqrt(rho log(1 / delta)) if log(1 / delta) <= (omega - 1)^2 rho, else that
    of order omega.

    Both are rho a + log(1 / delta) / (a - 1) at the best order a <= omega.

    Raises:
        ValueError: for concrete omega <= 1 or delta outside (0, 1).

    Example:
        >>> round(float(lemma2(0.01, 100, 1e-5)), 6), round(float(lemma2(0.01, 5, 1e-5)), 6)
        (0.688614, 2.928231)
    """
    checks.require_nonnegative("chen2024.lemma2", rho=rho)
    _delta("chen2024.lemma2", delta)
    if checks.is_concrete(omega) and not np.all(np.asarray(omega) > 1):
        checks.fail("chen2024.lemma2", "omega > 1", f"omega={omega!r}")
    return _lemma2(rho, omega, delta)


@claim(
    "Remark 6",
    "unsound",
    "says that batches are Poisson samples; Lemma 4 and Theorem 5 are for fixed size",
)
def covered(sampler: str, adjacency: str) -> bool:
    """Whether Lemma 4, and so Theorem 5, speaks of batches drawn so."""
    checks.require_one_of(
        "chen2024.covered", ("without_replacement", "with_replacement", "poisson"), sampler=sampler
    )
    checks.require_one_of("chen2024.covered", ADJACENCIES, adjacency=adjacency)
    return sampler == "without_replacement" and adjacency == "replace_one"


@claim(
    "Theorem 5, its (rho, omega)",
    "conditional",
    (
        "needs clipped examples, batches without replacement, Lemma 4 at every step, a bound on "
        "the "
        "participations"
    ),
)
def dpnfl_tcdp(
    participations, steps, clip_norm, batch, rows, sigma, strict: bool = True
) -> Checked:
    """tCDP of a client: (26 K steps clip_norm^2 / (rows sigma)^2, (batch sigma / clip_norm)^2
    log(rows / batch) / 8).

    Args:
        participations: K, rounds in which the client takes part.
        steps: local steps of a round.
        clip_norm: bound on the gradient of a record.
        batch: records of a step.
        rows: records of the client.
        sigma: std per coordinate of the noise on the mean gradient.
        strict: raise where a precondition of Lemma 4 fails.

    Returns:
        A Checked pair (rho, omega), Float64[...]; the arguments broadcast.

    Privacy:
        one record, replace_one.  Where a precondition of Lemma 4 fails, and strict=False, the pair
        is that without amplification, (rho, inf), which holds; a client with fewer rows than
        `batch` uses all of them.

    Raises:
        ValueError: with strict, naming what fails.

    Example:
        >>> [round(float(v), 5) for v in dpnfl_tcdp(10, 300, 1.0, 10, 600, 6.766).value]
        [0.00473, 2342.92501]
    """
    _setting("chen2024.dpnfl_tcdp", participations, steps, clip_norm, batch, rows, sigma)
    with in_float64():
        printed, whole, holds, conditions = _client(
            participations, steps, clip_norm, batch, rows, sigma
        )
        value = jnp.where(holds, printed[0], whole), jnp.where(holds, printed[1], jnp.inf)
        return checks.checked(
            "chen2024.dpnfl_tcdp",
            value,
            conditions,
            strict,
            "Use best_epsilon, or smaller batches.",
        )


@claim(
    "Theorem 5, at a delta of one's own",
    "ours",
    "Lemma 2 at the target delta, where Theorem 5 gives its own",
)
def dpnfl_epsilon(
    participations, steps, clip_norm, batch, rows, sigma, delta, strict: bool = True
) -> Checked:
    """The epsilon of a client at `delta` by the paper's lemmas: with Lemma 4 or without it,
    whichever is smaller.

    Shapes:
        broadcasts; a client that never takes part has 0.

    Privacy and errors are those of `dpnfl_tcdp`: with strict=False the number is sound whatever
    fails.
    """
    _delta("chen2024.dpnfl_epsilon", delta)
    tcdp = dpnfl_tcdp(participations, steps, clip_norm, batch, rows, sigma, strict)
    with in_float64():
        whole = _client(participations, steps, clip_norm, batch, rows, sigma)[1]
        return tcdp._replace(
            value=jnp.minimum(_lemma2(*tcdp.value, delta), _lemma2(whole, jnp.inf, delta))
        )


@claim(
    "Theorem 5",
    "conditional",
    "delta is an output; epsilon grows with sigma, so it cannot calibrate",
)
def theorem5(participations, steps, clip_norm, batch, rows, sigma, strict: bool = True) -> Checked:
    """The printed pair (rho (2 omega - 1), exp(-rho (omega - 1)^2)): Lemma 2 at the smallest delta
    that it allows.

    As sigma grows, epsilon tends to `theorem5_limit` from below and delta to 0 (at least the least
    normal float).

    Shapes and errors are those of `dpnfl_tcdp`; with strict=False and a failure the pair is as
    printed and proves nothing.

    >>> [round(float(theorem5(10, 300, 1.0, 10, 600, s).value[0]), 3) for s in (0.5, 10.0)]
    [21.311, 22.176]
    """
    _setting("chen2024.theorem5", participations, steps, clip_norm, batch, rows, sigma)
    with in_float64():
        (rho, omega), *_, conditions = _client(participations, steps, clip_norm, batch, rows, sigma)
        pair = (
            rho * (2 * omega - 1),
            jnp.maximum(jnp.exp(-rho * (omega - 1) ** 2), np.finfo(np.float64).tiny),
        )
        return checks.checked(
            "chen2024.theorem5", pair, conditions, strict, "Use best_epsilon, or smaller batches."
        )


@claim(
    "Theorem 5, without noise to speak of",
    "ours",
    "epsilon does not fall with sigma, it rises to this",
)
def theorem5_limit(participations, steps, batch, rows):
    """What the epsilon of `theorem5` tends to as sigma grows: 6.5 K steps q^2 log(1 / q), with q =
    batch / rows.

    >>> round(theorem5_limit(10, 300, 10, 600), 7)
    22.1776997
    """
    return 6.5 * participations * steps * (batch / rows) ** 2 * math.log(rows / batch)


@claim("Lemma 2, inverted", "ours", "the paper does not say how its noise was set")
def rho_star(epsilon, delta):
    """The rho that Lemma 2 turns into epsilon at delta: (sqrt(log(1 / delta) + epsilon) -
    sqrt(log(1 / delta)))^2.

    >>> round(float(rho_star(0.3, 1e-2)), 10)
    0.0047328695
    """
    checks.require_positive("chen2024.rho_star", epsilon=epsilon)
    _delta("chen2024.rho_star", delta)
    with in_float64():
        budget = -jnp.log(jnp.asarray(delta, jnp.float64))
        # without the difference of the roots
        return (epsilon / (jnp.sqrt(budget + epsilon) + jnp.sqrt(budget))) ** 2


@claim(
    "experiments, the noise of (0.3, 1e-2)", "ours", "the paper does not say how its noise was set"
)
def calibrate_sigma(
    epsilon, delta, participations, steps, clip_norm, batch, rows, strict: bool = True
) -> Checked:
    """The std per coordinate with which a client reaches epsilon at delta by Lemmas 2 to 4.

    clip_norm sqrt(26 K steps / rho_star) / rows, or more: so much that log(1 / delta) <= (omega -
    1)^2 rho_star.

    Shapes and errors are those of `dpnfl_tcdp`: one std for each client, and the preconditions are
    tested at it.

    >>> round(float(calibrate_sigma(0.3, 1e-2, 10, 300, 1.0, 10, 600).value), 4)
    6.766
    """
    where = "chen2024.calibrate_sigma"
    _setting(where, participations, steps, clip_norm, batch, rows, 1.0)
    checks.require_positive(where, participations=participations)
    with in_float64():
        times, used, owned = (jnp.asarray(v, jnp.float64) for v in (participations, batch, rows))
        times, used = times * steps, jnp.minimum(used, owned)
        base, rate = minibatch_sensitivity(clip_norm, used), used / owned
        first = base * zcdp.tcdp_calibrate(rate, times, epsilon, delta, strict=False).value
        # omega = log(1 / rate) sigma^2 / (2 base^2); a hair above what is needed
        omega = 1 + jnp.sqrt(-jnp.log(jnp.asarray(delta, jnp.float64)) / rho_star(epsilon, delta))
        second = base * jnp.sqrt(2 * omega / jnp.maximum(-jnp.log(rate), 1e-300))
        sigma = (1 + 1e-12) * jnp.where(rate < 1, jnp.maximum(first, second), first)
        conditions = _client(participations, steps, clip_norm, batch, rows, sigma)[3]
        return checks.checked(
            where, sigma, conditions, strict, "Calibrate by jfl.calibrate, or use smaller batches."
        )


@claim(
    "Theorem 5, K",
    "conditional",
    "the mean T r / n of the paper bounds no client: about half come more often",
)
def participation_bound(
    kind: str,
    rounds: int,
    clients: int = 1,
    per_round: int = 1,
    draw: str = "uniform",
    share=None,
    given=None,
    beta: float = 1e-6,
):
    """In how many of `rounds` rounds a client takes part.

    Args:
        kind: "realised", `given` as it happened; "cap", `given` as enforced; "quantile", the number
            that a client exceeds with probability at most beta / clients (so any client with at
            most beta), to be added to delta; "expected_as_paper", which bounds nothing.
        rounds: T, how many rounds are run.
        clients: n, how many clients there are.
        per_round: r, how many are drawn for a round.
        draw: "uniform", `per_round` distinct clients; "md", `per_round` draws with replacement by
            `share`, where a client drawn twice uploads once; "first_r_responders", whose fast
            clients may come every round.
        share: for "md" the probability that one draw takes the client, [...]; None: 1 / clients.
        given: for "realised" and "cap" the number of rounds, Int[...].
        beta: for "quantile" the probability that any client exceeds the number.

    Returns:
        An int; Int[...] where `share` or `given` are arrays.

    Raises:
        ValueError: for unknown names, and for `given` that is missing or not a count of the rounds.

    Example:
        >>> [participation_bound("quantile", t, 100, 10) for t in (100, 200, 500)]
        [30, 47, 91]
    """
    where = "chen2024.participation_bound"
    checks.require_one_of(where, ("realised", "cap", "quantile", "expected_as_paper"), kind=kind)
    checks.require_one_of(where, ("uniform", "md", "first_r_responders"), draw=draw)
    checks.require_integer(where, rounds=rounds, clients=clients, per_round=per_round)
    checks.require_fraction(where, beta=beta)
    if kind == "expected_as_paper":
        return -(-rounds * per_round // clients)
    if kind in ("realised", "cap"):
        counts = np.asarray(given)
        if (
            counts.dtype.kind not in "iu"
            or (counts < 0).any()
            or (kind == "realised" and (counts > rounds).any())
        ):
            checks.fail(
                where, f"whole numbers `given` of at most {rounds} rounds", f"given={given!r}"
            )
        return _plain(np.minimum(counts, rounds))
    if draw == "first_r_responders":
        return rounds
    chance = np.asarray(1 / clients if share is None else share, np.float64)
    ratio: dict[str, Any] = {"ratio": per_round / clients} if draw == "uniform" else {}
    checks.require_fraction(where, share=chance, **ratio)
    chance = np.asarray(per_round / clients) if draw == "uniform" else 1 - (1 - chance) ** per_round
    one = lambda p: bisect.bisect_left(
        range(rounds), True, key=lambda k: samples.binomial_tail(k, rounds, p) <= beta / clients
    )
    return _plain(np.vectorize(one, otypes=[int])(chance))


def compare(
    participations: int, steps: int, clip_norm, batch: int, rows: int, sigma, delta
) -> dict:
    """Epsilons of a client at `delta`, all of them sound, by what proves them.

    - tcdp: `dpnfl_epsilon`.
    - rdp_refined, rdp_crude: the series of Wang, Balle, Kasiviswanathan.
    - no_amplification: Lemma 2 of all steps as they are.
    - gaussian_exact: the same, exactly.
    - tight: `jfl.privacy.accountants.tightest`.

    >>> {
    ...     k: round(v, 3)
    ...     for k, v in compare(10, 300, 1.0, 10, 600, 6.766, 1e-2).items()
    ...     if k[-1] in "pd"
    ... }
    {'tcdp': 0.3, 'rdp_refined': 0.052}
    """
    z, used, times = _scalars(
        "chen2024.compare", participations, steps, clip_norm, batch, rows, sigma
    )
    return {
        "tcdp": float(
            dpnfl_epsilon(participations, steps, clip_norm, batch, rows, sigma, delta, False).value
        ),
        **{name: _series(series, used / rows, z, times, delta) for name, series in SERIES.items()},
        "no_amplification": float(lemma2(times / (2 * z**2), math.inf, delta)),
        "gaussian_exact": float(rdp.gaussian_epsilon(math.sqrt(times) / z, delta)),
        "tight": tightest.epsilon(_event(used, rows, z, times), delta)[0],
    }


def best_epsilon(
    participations: int, steps: int, clip_norm, batch: int, rows: int, sigma, delta
) -> tuple[float, str]:
    """The smallest of `compare`, and its name."""
    epsilons = compare(participations, steps, clip_norm, batch, rows, sigma, delta)
    return min((value, name) for name, value in epsilons.items())


@claim(
    "Remark 6", "unsound", "that tCDP needs less noise than RDP holds against a crude bound only"
)
def noise_needed(
    epsilon, delta, participations: int, steps: int, clip_norm, batch: int, rows: int
) -> dict:
    """The std that each bound of `compare` needs for epsilon at delta; inf where no noise is enough
    for it.

    Raises:
        ValueError: where Lemma 4 does not hold at the std of tCDP.
    """
    z, used, times = _scalars(
        "chen2024.noise_needed", participations, steps, clip_norm, batch, rows, 1.0
    )
    base = 1 / z  # the sensitivity

    def by_series(series):
        reached = lambda trial: _series(series, used / rows, trial, times, delta)
        return (
            math.inf
            if reached(1e6) > epsilon
            else base * tightest.smallest("chen2024", reached, epsilon)
        )

    return {
        "tcdp": float(
            calibrate_sigma(epsilon, delta, participations, steps, clip_norm, batch, rows).value
        ),
        **{name: by_series(series) for name, series in SERIES.items()},
        "no_amplification": base * math.sqrt(times / (2 * float(rho_star(epsilon, delta)))),
        "gaussian_exact": float(
            approximate_dp.analytic_sigma(base * math.sqrt(times), epsilon, delta)
        ),
        "tight": base
        * tightest.solve_noise(lambda trial: _event(used, rows, trial, times), epsilon, delta),
    }


def _client(participations, steps, clip_norm, batch, rows, sigma):
    """(rho, omega) as printed, rho without amplification, whether the first holds, and its
    conditions by name."""
    times, batch, rows = (jnp.asarray(v, jnp.float64) for v in (participations, batch, rows))
    times, rate = times * steps, batch / rows
    as_printed = zcdp.gaussian(minibatch_sensitivity(clip_norm, batch), sigma)
    whole = zcdp.gaussian(minibatch_sensitivity(clip_norm, jnp.minimum(batch, rows)), sigma)
    amplified = zcdp.tcdp_amplify(whole, jnp.minimum(rate, 1.0), strict=False)
    conditions = {"batch <= rows": rate <= 1}
    conditions |= {
        name: amplified.holds for name in amplified.failed or ("the preconditions of Lemma 4",)
    }
    printed = times * (13 * rate**2 * as_printed), -jnp.log(rate) / (4 * as_printed)
    return printed, times * whole, amplified.holds, conditions


def _event(batch, rows, z, times):
    return events.repeat(events.without_replacement(batch, rows, events.gaussian(z)), times)


def _series(series, rate, z, times, delta):
    return float(rdp.epsilon(ORDERS, times * np.asarray(series(ORDERS, rate, z)), delta))


def _scalars(where, participations, steps, clip_norm, batch, rows, sigma):
    checks.require_integer(
        where, participations=participations, steps=steps, batch=batch, rows=rows
    )
    checks.require_positive(where, clip_norm=clip_norm, sigma=sigma)
    used = min(batch, rows)
    return (
        float(sigma) / minibatch_sensitivity(float(clip_norm), used),
        used,
        participations * steps,
    )


def _setting(where, participations, steps, clip_norm, batch, rows, sigma):
    checks.require_nonnegative(where, participations=participations)
    checks.require_positive(
        where, steps=steps, clip_norm=clip_norm, batch=batch, rows=rows, sigma=sigma
    )


def _delta(where, delta):
    if checks.is_concrete(delta) and not np.all((np.asarray(delta) > 0) & (np.asarray(delta) < 1)):
        checks.fail(where, "delta in (0, 1)", f"delta={delta!r}")


def _plain(counts):
    return int(counts) if np.ndim(counts) == 0 else np.asarray(counts)


@rdp.float64
def _lemma2(rho, omega, delta):
    budget = -jnp.log(delta)
    safe_rho = jnp.where(rho > 0, rho, 1.0)
    order = jnp.minimum(1 + jnp.sqrt(budget / safe_rho), omega)
    return jnp.where(rho > 0, safe_rho * order + budget / (order - 1), 0.0)
