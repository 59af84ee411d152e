"""Show where the privacy derivation of Noble, Bellet, Dieuleveut, AISTATS 2022, fails.

There are two counterexamples to the composition of Theorem 4.1. `claims.proved_rdp` holds in both
cases.
"""

import math
from typing import NamedTuple

import numpy as np

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


def _variation(mu) -> float:
    """Return the total variation of N(0, 1) and N(mu, 1): 2 Phi(mu / 2) - 1."""
    return math.erf(mu / math.sqrt(8))
