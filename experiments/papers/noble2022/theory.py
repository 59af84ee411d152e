"""Convergence claims of Noble, Bellet, Dieuleveut, AISTATS 2022 (DP-SCAFFOLD).

Rates hold up to absolute constants. They assume noisy gradients of variance `variance` + `noise`^2
(Lemma C.1), clips that are never active, and for DP-SCAFFOLD a warm start, from noisy gradients at
x^0.  The inequalities of one round have all constants.  Those with preconditions return
`Checked`.
"""

from typing import NamedTuple

import numpy as np

from jfl.core import checks

from ..approximate_dp import arrays
from ..claim import Checked, checked, claim

CASES = ("strongly_convex", "convex", "nonconvex")


class Problem(NamedTuple):
    """The constants on which the rates depend.

    Attributes:
        smoothness: nu.
        user_ratio: l, the share of the users in a round.
        users: M.
        local_updates: K, local steps of a round.
        rounds: T.
        variance: variance of a batch gradient, varsigma^2 / batch.
        noise: `noise_scale`.
        distance: ||x^0 - x*||.
        gap: F(x^0) - F*.
        strong_convexity: mu.
        dissimilarity_g: G in mean_i ||grad F_i||^2 <= G^2 + B^2 ||grad F||^2.
        dissimilarity_b: B there.
    """

    smoothness: float
    user_ratio: float
    users: int
    local_updates: int
    rounds: int
    variance: float
    noise: float
    distance: float = 1.0
    gap: float = 1.0
    strong_convexity: float = 0.0
    dissimilarity_g: float = 0.0
    dissimilarity_b: float = 1.0


class Steps(NamedTuple):
    """The constants of one round: nu, mu, l, M, K, eta_l, eta_g, and V, the variance of a noisy
    gradient."""

    smoothness: float
    strong_convexity: float
    user_ratio: float
    users: int
    local_updates: int
    local_lr: float
    server_lr: float
    variance: float


# --- noise


@claim(
    "Section 4.2", "rigorous", "the expected square of d standard normals is d, not 2 d: exact=True"
)
def noise_scale(bound, dim, sigma_g, batch, exact: bool = False):
    """Return Sigma_g(C) = 2 C sqrt(2 d) sigma_g / batch, a bound on the root mean square of a
    client's noise.

    >>> round(float(noise_scale(1.0, 8, 1.0, 2) / noise_scale(1.0, 8, 1.0, 2, exact=True)) ** 2, 6)
    2.0
    """
    return 2 * bound * sigma_g / batch * ((1 if exact else 2) * dim) ** 0.5


@claim(
    "Lemma C.1, Corollary C.1 (1)",
    "rigorous",
    "for clipping that does not act; sampling without replacement only lowers it",
)
def gradient_variance(problem: Problem):
    """Return V = varsigma^2 / (s R) + Sigma_g^2; the mean over K l M noisy gradients has V / (K l
    M)."""
    return problem.variance + problem.noise**2


# --- rates


@claim(
    "Theorem C.1, Lemmas C.8 and C.9",
    "order",
    "non-convex: printed without a factor sqrt(nu), which its units need",
)
@np.errstate(divide="ignore", invalid="ignore")  # mu may be 0, which is a condition that fails
def scaffold_rate(problem: Problem, case: str, server_lr=None, paper_literal: bool = False):
    """Return the bound on the error of DP-SCAFFOLD, warm, with local_lr of `scaffold_local_lr`: a
    Checked number.

    Args:
        problem: what the rate depends on.
        case: "strongly_convex" or "convex", with the error E F(mean of iterates) - F*; or
            "nonconvex", with the error E ||grad F||^2 at a random iterate.
        server_lr: eta_g; None means sqrt(l M), as in the theorem. For another value, V grows by a
            factor of 1 + l M / server_lr^2, as in the lemmas.
        paper_literal: the first non-convex term as printed.

    Preconditions: server_lr >= 1; strongly convex: mu > 0 and
    T >= max(108 / l, 48 nu / (mu l^(2/3))).
    """
    checks.require_one_of("noble2022.theory.scaffold_rate", CASES, case=case)
    p, part, total, grown, lr = _prepared(problem, server_lr)
    slow = p.user_ratio ** (2 / 3)
    if case == "strongly_convex":
        mu = p.strong_convexity
        speed = np.minimum(p.user_ratio / 108, mu * slow / (48 * p.smoothness))
        value = grown * gradient_variance(p) / (mu * total) + mu * p.distance**2 * np.exp(
            -speed * p.rounds
        )
    else:
        start, last = _start(p, case, paper_literal)
        value = start * _root(p) * np.sqrt(grown / total) + p.smoothness * last / (slow * p.rounds)
    conditions = _conditions(
        p,
        case,
        lr,
        {
            "T >= max(108 / l, 48 nu / (mu l^(2/3)))": np.maximum(
                108 / p.user_ratio, 48 * p.smoothness / (p.strong_convexity * slow)
            )
        },
    )
    return checked(value, conditions)


@claim("Theorem C.2", "order", "non-convex: two powers of nu are printed that do not fit its units")
@np.errstate(divide="ignore", invalid="ignore")
def fedavg_rate(problem: Problem, case: str, server_lr=None, paper_literal: bool = False):
    """Return the bound on the error of DP-FedAvg, a Checked number, with `fedavg_local_lr`.

    Args:
        problem: what the rate depends on.
        case: as in `scaffold_rate`.
        server_lr: eta_g, as in `scaffold_rate`.
        paper_literal: the non-convex case with nu G sqrt(F) and nu^(1/3), although units require
            sqrt(nu F) G and nu^(2/3).

    Preconditions: server_lr >= 1, B >= 1; strongly convex: mu > 0
    and T >= 8 (1 + B^2) nu / mu.
    """
    checks.require_one_of("noble2022.theory.fedavg_rate", CASES, case=case)
    p, part, total, grown, lr = _prepared(problem, server_lr)
    nu, mu, g, b2, t = (
        p.smoothness,
        p.strong_convexity,
        p.dissimilarity_g,
        p.dissimilarity_b**2,
        p.rounds,
    )
    absent = (1 - p.user_ratio) / (t * part)
    if case == "strongly_convex":
        value = (
            grown * gradient_variance(p) / (mu * total)
            + g**2 * absent / mu
            + nu * g**2 / (mu * t) ** 2
            + mu * p.distance**2 * np.exp(-mu * t / (16 * (1 + b2) * nu))
        )
    else:
        start, last = _start(p, case, False)
        literal = case == "nonconvex" and paper_literal
        differ = g * np.sqrt(absent) * (nu * np.sqrt(p.gap) if literal else start)
        power = 1 / 3 if literal or case == "convex" else 2 / 3
        value = (
            start * _root(p) * np.sqrt(grown / total)
            + differ
            + nu**power * (last * g / t) ** (2 / 3)
            + b2 * nu * last / t
        )
    conditions = _conditions(p, case, lr, {"T >= 8 (1 + B^2) nu / mu": 8 * (1 + b2) * nu / mu})
    return checked(value, conditions | {"B >= 1": b2 >= 1})


@claim("Theorem C.1", "order", "the step size of the rates")
def scaffold_local_lr(problem: Problem, case: str, server_lr=None):
    """Return l^(2/3) / (24 nu K eta_g); strongly convex: at most l / (54 mu K eta_g) too."""
    checks.require_one_of("noble2022.theory.scaffold_local_lr", CASES, case=case)
    p, _, _, _, lr = _prepared(problem, server_lr)
    step = p.user_ratio ** (2 / 3) / (24 * p.smoothness)
    if case == "strongly_convex":
        step = np.minimum(step, p.user_ratio / (54 * p.strong_convexity))
    return step / (p.local_updates * lr)


@claim("Theorem C.2", "order", "the step size of the rates")
def fedavg_local_lr(problem: Problem, server_lr=None):
    """Return 1 / (8 (1 + B^2) nu K eta_g)."""
    p, _, _, _, lr = _prepared(problem, server_lr)
    return 1 / (8 * (1 + p.dissimilarity_b**2) * p.smoothness * p.local_updates * lr)


# --- one round of DP-SCAFFOLD


@claim("Lemma C.2", "rigorous", "smoothness of F is enough: no client needs to be convex")
def square_gradient_bound(smoothness, gap):
    """Return 2 nu (F(x) - F*), a bound on ||grad F(x)||^2."""
    return 2 * smoothness * gap


@claim(
    "Lemma C.3",
    "rigorous",
    "martingale: for the mean of ||sum a_i||^2, because its a_i are random",
)
def square_sum_bound(square_mean, count: int, variance, martingale: bool = False):
    """Return a bound on E ||A_1 + ... + A_n||^2 for A_i of mean a_i and variance at most
    `variance`.

    Args:
        square_mean: ||a_1 + ... + a_n||^2, or its mean.
        count: n.
        variance: the largest E ||A_i - a_i||^2.
        martingale: whether a_i is the mean of A_i given A_1, ..., A_(i-1).
    """
    if martingale:
        return 2 * (square_mean + count * variance)
    return square_mean + count**2 * variance


@claim(
    "Corollary C.1 (2, 3)",
    "conditional",
    "convex, eta_l <= 2 / nu: the proof takes the gradients along the steps for the mean of c_i",
)
def control_variance(steps: Steps, convex: bool = True) -> Checked:
    """Return V / (K l M), which bounds the variance of the mean of new controls c_i over a
    cohort."""
    s = Steps._make(arrays(*steps))
    value = s.variance / (s.local_updates * s.user_ratio * s.users)
    conditions = {"convex F_i": convex, "eta_l <= 2 / nu": s.local_lr <= 2 / s.smoothness}
    return checked(value, conditions)


@claim("Corollary C.1 (2, 3)", "ours", "reached where all F_i have the curvature -nu")
def control_variance_nonconvex(steps: Steps):
    """Return V / (K l M) times the mean of (1 + eta_l nu)^(2 k) over k = 0, ..., K - 1.

    A control is (y^0 - y^K) / (K eta_l), and a step on a nu-smooth F_i moves two points apart by a
    factor of at most 1 + eta_l nu.
    """
    s = Steps._make(arrays(*steps))
    grown = (1 + s.local_lr * s.smoothness) ** (2 * np.arange(s.local_updates))
    return control_variance(steps).value * grown.mean()


# --- parts


def _prepared(problem, server_lr):
    """Return float64 leaves, l M, T K l M, the factor of V, and eta_g."""
    p = problem._make(arrays(*problem))
    part = p.user_ratio * p.users
    if server_lr is None:
        return p, part, p.rounds * p.local_updates * part, 1.0, np.sqrt(part)
    grown = 1 + part / server_lr**2
    return p, part, p.rounds * p.local_updates * part, grown, server_lr


def _root(p):
    return np.sqrt(p.variance) + p.noise


def _start(p, case, literal):
    """Return D0 and D0^2, or sqrt(nu F) and F."""
    if case == "convex":
        return p.distance, p.distance**2
    return np.sqrt(p.gap * (1 if literal else p.smoothness)), p.gap


def _conditions(p, case, lr, least):
    conditions = {"server_lr >= 1": lr >= 1}
    if case == "strongly_convex":
        ((name, rounds),) = least.items()
        conditions |= {"mu > 0": p.strong_convexity > 0, name: p.rounds >= rounds}
    return conditions
