"""Show where the privacy derivation of Noble, Bellet, Dieuleveut, AISTATS 2022, fails.

There are two counterexamples to the composition of Theorem 4.1, the exact value for DP-SCAFFOLD
with one local step, and the case of clipping at a median. `noble2022.proved_rdp` holds in all these
cases except the last.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from jfl.core import checks
from jfl.privacy.accountants import rdp

from .. import wang2019
from ..claim import claim
from .claims import ORDERS, third_party_epsilon


class Variation(NamedTuple):
    """Total variation between the releases of two neighbours."""

    attained: float  # at least
    allowed: float  # by the claim, at most


class Loss(NamedTuple):
    """Epsilon of one run, at one delta."""

    published: float  # `noble2022.third_party_epsilon`
    amplified: (
        float  # the same argument without its loose parts: exact curve inside, best conversion
    )
    exact: float


@claim(
    "Theorem 4.1, K > 1",
    "unsound",
    "later gradients see the user's own noise only, and may amplify what it hides",
)
def round_counterexample(sigma_g, cohort, batch) -> Variation:
    """Return the total variation of one round of two steps, which exceeds what the claim allows.

    Each step uses all records. The changed record moves a user's first iterate by one sensitivity,
    under that user's own noise. All other records of the user have the gradient +C u or -C u,
    depending on the sign of this coordinate. The mean of all uploads reveals this bit, with a
    signal of C against a noise of (2 C / batch) sigma_g sqrt(2 cohort). The claim composes two
    Gaussians of multiplier sqrt(cohort) sigma_g.

    >>> [round(v, 3) for v in round_counterexample(1.0, 20, 800)]
    [0.383, 0.126]
    """
    seen = _variation(batch / (sigma_g * math.sqrt(2 * cohort)))
    return Variation(_variation(1 / sigma_g) * seen, _variation(math.sqrt(2 / cohort) / sigma_g))


@claim(
    "Theorem 4.1, K = 1",
    "unsound",
    "users are sampled, but one record changes: the gain is l, not l^2",
)
def participation_counterexample(users, user_ratio, rounds, sigma_g, delta) -> Loss:
    """Return the exact epsilon of runs whose releases reveal who participates, and the claimed
    ones.

    A round has one step on all records, and a user's mean gradient reveals whether the user
    participates. The release is then n ~ Binomial(rounds, user_ratio) and a Gaussian with mu =
    sqrt(n) / (sqrt(l M) sigma_g), so the mean over n of the Gaussian profile is exact.

    >>> [round(v, 2) for v in participation_counterexample(1000, 0.01, 1000, 1.0, 1e-6)]
    [2.47, 1.1, 5.95]
    """
    published = third_party_epsilon(sigma_g, user_ratio, 1.0, 1, rounds, users, delta)
    from scipy import stats  # half a second: not at import

    z = math.sqrt(user_ratio * users) * sigma_g
    inner = rounds * np.asarray(wang2019.wor_rdp(ORDERS, user_ratio, lambda j: j / (2 * z**2)))
    n = np.arange(1.0, rounds + 1)
    law, mu = stats.binom.pmf(n, rounds, user_ratio), np.sqrt(n) / z
    delta_at = lambda epsilon: float(law @ np.asarray(rdp.gaussian_delta(epsilon, mu)))
    low, high = 0.0, float(rdp.gaussian_epsilon(mu[-1], delta))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return Loss(float(published), float(rdp.epsilon(ORDERS, inner, delta)), high)


@claim(
    "Claim 4.1, third party",
    "ours",
    "what is left of the gain of l M for K = s = 1; nothing is known for K > 1",
)
def leverage_k1(users: int, cohort: int, rounds: int, seed: int = 0) -> np.ndarray:
    """Return the factor by which DP-SCAFFOLD reveals a record more than DP-FedAvg, Float64[users].

    Each round has one step on all records.

    In each round, the server's models reveal the sum over its users of their gradient minus the
    gradient of their previous round. So a gradient of rounds t and t' enters by the column f = e_t
    - e_t', with its noise. Let F hold all columns and F_i those of a user. If the cohorts are
    known, the gradients of this user have the noise multiplier sigma_g / sqrt(lambda_max(F_i^T (F
    F^T)^-1 F_i)); in DP-FedAvg it is sigma_g sqrt(cohort). The result is cohort * lambda_max, by
    which the curve grows; 0 for a user who never participates.

    >>> bool(1 < leverage_k1(20, 4, 50).max() < 4)
    True
    """
    chance = np.random.default_rng(seed)
    came = np.zeros((rounds, users), bool)
    for row in came:
        row[chance.choice(users, cohort, replace=False)] = True
    columns = [_columns(np.flatnonzero(user), rounds) for user in came.T]
    inverse = np.linalg.inv(functools.reduce(np.add, [f @ f.T for f in columns]))
    return np.array(
        [cohort * np.linalg.eigvalsh(f.T @ inverse @ f)[-1] if f.size else 0.0 for f in columns]
    )


@claim(
    "Section 3, user-level",
    "rigorous",
    "1 / s larger than 2 C, which is enough without the gain from batches",
)
def user_sensitivity(bound, data_ratio):
    """Return 2 C / s: with this sensitivity, the accountant of one record covers all records of
    a user."""
    return 2 * bound / data_ratio


@claim(
    "Section 5, clipping",
    "unsound",
    "a median of private norms is a release, which nothing accounts for",
)
def median_multiplier(sigma_g, tensors: int = 1):
    """Return sigma_g / sqrt(P), the multiplier if each of P tensors has a separate clip and noise.

    It applies to fixed clip norms; with medians of the batch, no multiplier describes the release.
    """
    return sigma_g / math.sqrt(tensors)


@claim(
    "Section 5, clipping",
    "ours",
    "sound in place of a median: the norm follows released noisy fractions only",
)
def quantile_multiplier(multiplier, sigma_bit, adjacency: str = "replace_one"):
    """Return the joint multiplier of a noisy mean gradient and a noisy fraction of norms below the
    bound.

    Args:
        multiplier: noise std of the gradient over its sensitivity 2 C / batch.
        sigma_bit: for replace_one the noise std of the fraction over its sensitivity 1 / batch; for
            add_remove the noise std of the number of norms below the bound, minus half of all.
        adjacency: "replace_one" or "add_remove".

    References:
        Andrew, Thakkar, McMahan, Ramaswamy, NeurIPS 2021, Theorem 1.

    Example:
        >>> round(quantile_multiplier(1.0, 1.0, "add_remove"), 6)
        0.894427
    """
    where = "noble2022.gaps.quantile_multiplier"
    checks.require_one_of(where, ("replace_one", "add_remove"), adjacency=adjacency)
    bit = sigma_bit * (2 if adjacency == "add_remove" else 1)
    return (multiplier**-2.0 + bit**-2.0) ** -0.5


def _variation(mu) -> float:
    """Return the total variation of N(0, 1) and N(mu, 1): 2 Phi(mu / 2) - 1."""
    return math.erf(mu / math.sqrt(8))


def _columns(times, rounds):
    columns = np.zeros((rounds, len(times)))
    columns[times, np.arange(len(times))] = 1
    columns[times[1:], np.arange(len(times) - 1)] = -1
    return columns
