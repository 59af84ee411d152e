"""Privacy claims of Noble, Bellet, Dieuleveut, AISTATS 2022 (DP-SCAFFOLD), as printed and proved.

The unit is one record, the adjacency replace_one, and sigma_g a client's noise std over the
sensitivity 2 C / batch.  The derivation for a third party is wrong (`gaps`). Its bound is also so
loose that every epsilon which the paper prints is above `proved_epsilon` of the same run.

Functions take the fields of `Setting` in their order, so a run is passed as `f(*run)`. user_ratio
is the fraction l of the users in a round, data_ratio the fraction s of a user's records in a batch;
both are drawn without replacement.
"""

import collections
import math

import numpy as np

from jfl.core import checks
from jfl.privacy.accountants import rdp
from jfl.privacy.accountants.tightest import smallest

from .. import wang2019
from ..claim import claim

ORDERS, GRID = (
    np.arange(2.0, 65.0),
    64,
)  # orders of the paper's search; number of orders that a proved bound tries at once
BOUNDS = ("P1", "server")
GAPS = (
    "K > 1 steps hide in their own noise, not the cohort's; and a changed record is not a "
    "changed user"
)


# delta = 1 / (users * training records of a user)
Setting = collections.namedtuple(
    "Setting", "sigma_g user_ratio data_ratio local_updates rounds users delta"
)
Setting.__doc__ = "A run of the paper: its noise, sampling and length."

# --- what the paper prints

SYNTHETIC = Setting(60.0, 0.2, 0.2, 50, 400, 100, 1 / 400_000)
FEMNIST = Setting(30.0, 0.2, 0.2, 50, 400, 40, 1 / 80_000)
MNIST = Setting(30.0, 0.2, 0.2, 50, 100, 60, 1 / 48_000)
STATED = {  # where: its run, its epsilon
    "fig1": (SYNTHETIC, 13.0),
    "fig1 K=100": (SYNTHETIC._replace(local_updates=100), 13.0),
    "section 5, higher privacy": (SYNTHETIC._replace(user_ratio=0.05), 4.2),
    "fig2a": (FEMNIST, 11.4),
    "fig7 K=100": (FEMNIST._replace(local_updates=100), 11.5),
    "fig2b": (MNIST, 7.2),
}

# epsilon, then rounds by user_ratio (fig9, data_ratio 0.2) or data_ratio (fig10, user_ratio 0.1); K
# = 10.  The paper shows the rounds as ends of lines only: these are the largest that its accountant
# allows.
FIG9 = {
    "synthetic": (5.0, {0.08: 556, 0.1: 282, 0.12: 162}),
    "femnist": (5.0, {0.08: 736, 0.1: 377, 0.12: 218}),
    "mnist": (3.0, {0.08: 159, 0.1: 80, 0.12: 46}),
}
FIG10 = {
    "synthetic": (5.0, {0.05: 340, 0.1: 333, 0.2: 282}),
    "femnist": (5.0, {0.05: 452, 0.1: 443, 0.2: 377}),
    "mnist": (3.0, {0.05: 99, 0.1: 97, 0.2: 80}),
}

# Tables 1 and 4: epsilon 3, user_ratio 0.05; rows by sigma_g, columns by K; test accuracy in %,
# mean and std of 3 runs
TABLE_EPSILON, TABLE_SIGMAS, TABLE_UPDATES = 3.0, (10, 20, 40, 80, 160), (1, 5, 10, 20, 40)
TABLE1 = (
    ((27.41, 0.71), (45.53, 0.99), (43.52, 1.52), (42.51, 0.80), (21.80, 3.28)),
    ((27.34, 1.31), (44.39, 0.46), (43.47, 1.74), (42.33, 0.77), (20.14, 2.67)),
    ((21.05, 2.27), (34.50, 0.65), (36.85, 0.85), (33.24, 0.41), (14.85, 0.95)),
    ((17.61, 2.62), (24.41, 0.81), (27.33, 0.37), (19.42, 0.51), (14.08, 0.14)),
    ((13.97, 1.70), (15.99, 0.30), (19.27, 1.65), (14.86, 0.75), (14.17, 0.06)),
)
TABLE1_ROUNDS = (
    (542, 488, 428, 324, 72),
    (545, 502, 451, 352, 83),
    (546, 505, 457, 360, 86),
    (546, 506, 458, 362, 87),
    (546, 506, 458, 362, 87),
)
TABLE4 = (
    ((31.29, 0.50), (44.37, 0.15), (44.17, 0.56), (41.71, 0.36), (25.92, 0.90)),
    ((28.31, 1.15), (41.97, 0.77), (43.27, 0.90), (41.13, 0.55), (28.20, 2.23)),
    ((21.07, 0.41), (33.01, 1.20), (35.96, 0.84), (32.82, 1.11), (23.49, 1.70)),
    ((17.09, 1.31), (21.84, 0.96), (25.92, 0.59), (24.02, 1.27), (17.95, 1.14)),
    ((15.24, 1.63), (15.37, 0.28), (20.09, 1.51), (18.09, 1.86), (15.38, 0.87)),
)


# --- what the paper claims


@claim("Appendix D.3.2", "unsound", GAPS)
def third_party_rdp(orders, sigma_g, user_ratio, data_ratio, local_updates, rounds, users):
    """Return the Renyi curve behind all epsilons of the paper's experiments.

    The sampling of users amplifies K batches with the noise of sqrt(l M) clients.

    Shapes:
        orders [n] > 1, concrete, interpolated by eq. (8) between whole ones -> Float64[n].

    References:
        Lemma B.7 twice, `wang2019.wor_rdp` on `wang2019.crude`; l M is not rounded down.
    """
    whole = np.arange(2.0, np.ceil(np.max(orders)) + 1)
    shared = math.sqrt(user_ratio * users) * sigma_g
    batches = local_updates * wang2019.crude(whole, data_ratio, shared)
    return rounds * wang2019.wor_rdp(orders, user_ratio, lambda _: batches)


@claim("Section 5 and Appendix D.3.2", "unsound", GAPS)
def third_party_epsilon(sigma_g, user_ratio, data_ratio, local_updates, rounds, users, delta):
    """Return the paper's epsilon for a third party.

    It is the minimum of rdp + log(1 / delta) / (order - 1) over the orders 2 to 64. Real orders add
    nothing: between integers the interpolated bound is a ratio of linear functions of the order, so
    its minimum is at an end. It does not tend to 0 as sigma_g grows: see `noise_for`.

    Shapes:
        broadcasts -> Float64[...], on the host.

    Example:
        >>> round(float(third_party_epsilon(*SYNTHETIC)), 2)
        12.91
    """
    return _published(sigma_g, user_ratio, data_ratio, local_updates, rounds, users, delta)[()]


@claim("Table 1, Figures 9 and 10", "unsound", GAPS)
def largest_rounds(epsilon, sigma_g, user_ratio, data_ratio, local_updates, users, delta):
    """Return the largest T with third_party_epsilon <= epsilon; 0 if one round is too many.

    It has a closed form.

    Shapes:
        broadcasts -> Int[...].

    Example:
        >>> largest_rounds(3.0, 10.0, 0.05, 0.2, [1, 40], 100, 1 / 400_000).tolist()
        [542, 72]
    """
    once = _grid(sigma_g, user_ratio, data_ratio, local_updates, users)
    left = _axis(epsilon) + np.log(_axis(delta)) / (ORDERS - 1)
    return np.floor(np.maximum(0.0, np.max(left / once, axis=-1))).astype(int)


@claim("Section 5 (calibration)", "unsound", GAPS)
def noise_for(epsilon, user_ratio, data_ratio, local_updates, rounds, users, delta) -> float:
    """Return the sigma_g that the paper's accountant requires.

    Raises:
        ValueError: if epsilon is not above the value of the bound for infinite noise; the message
            names this limit.

    Example:
        >>> round(noise_for(13.0, *SYNTHETIC[1:]), 2)
        15.94
    """
    where, run = (
        "noble2022.noise_for",
        (user_ratio, data_ratio, local_updates, rounds, users, delta),
    )
    limit = float(_published(np.inf, *run))
    if not epsilon > limit * (1 + 1e-9):
        checks.fail(
            where,
            f"epsilon > {limit:.6g}, its bound for infinite noise",
            f"epsilon={epsilon!r}",
            "That floor is an artefact of the bound: use proved_noise.",
        )
    return smallest(where, lambda sigma_g: float(_published(sigma_g, *run)), epsilon)


@claim(
    "Section 4.1, server",
    "rigorous",
    "loose: proved_epsilon with bound='server' is the same sum, tighter",
)
def server_epsilon(sigma_g, data_ratio, local_updates, rounds, delta) -> float:
    """Return the paper's epsilon for the server: T K batches with a client's own noise."""
    whole = wang2019.crude(ORDERS, data_ratio, sigma_g)
    return float(np.min(rounds * local_updates * whole - np.log(delta) / (ORDERS - 1)))


# --- what is proved


@claim(
    "Theorem 4.1 and Claim 4.1",
    "ours",
    "a record gains from users' absence in proportion to l, not l^2",
)
def proved_rdp(
    orders, sigma_g, user_ratio, data_ratio, local_updates, rounds, users, bound: str = "P1"
):
    """Return a proved Renyi curve, for floor(l M) users in a round.

    Args:
        orders: [n] > 1.
        sigma_g: a client's noise std over the sensitivity 2 C / batch.
        user_ratio: l, the share of the users in a round.
        data_ratio: s, the share of a user's records in a batch.
        local_updates: K, local steps of a round.
        rounds: T.
        users: M.
        bound: "P1", for a third party; "server", for the server, which sees who participates.
            Both hold for both algorithms and any loss: they reveal all noisy gradients of the
            users in a round, and only a user's own noise protects its steps.

    Returns:
        Float64[n], the curve at `orders`.
    """
    checks.require_one_of("noble2022.proved_rdp", BOUNDS, bound=bound)
    cohort = math.floor(users * user_ratio + 1e-9)  # 0.29 * 100 is 28.999...
    share = 1.0 if bound == "server" else cohort / users
    step = np.asarray(rdp.without_replacement(orders, data_ratio, sigma_g))
    return rounds * rdp.participation(orders, share, local_updates * step)


@claim("Theorem 4.1 and Claim 4.1", "ours", "proved_rdp and the best known conversion")
def proved_epsilon(
    sigma_g, user_ratio, data_ratio, local_updates, rounds, users, delta, bound: str = "P1"
) -> float:
    """Return epsilon of a run by `proved_rdp`, over real orders.

    >>> round(proved_epsilon(*SYNTHETIC), 2)
    0.94
    """
    run = sigma_g, user_ratio, data_ratio, local_updates, rounds, users
    return _least(lambda orders: rdp.convert(orders, proved_rdp(orders, *run, bound), delta))


@claim("Table 1, Figures 9 and 10", "ours", "what the same epsilon allows")
def proved_rounds(
    epsilon, sigma_g, user_ratio, data_ratio, local_updates, users, delta, bound: str = "P1"
) -> int:
    """Return the largest T with proved_epsilon <= epsilon.

    >>> proved_rounds(3.0, 10.0, 0.05, 0.2, 10, 100, 1 / 400_000)
    1756
    """
    once = sigma_g, user_ratio, data_ratio, local_updates, 1, users
    price = lambda orders: np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)
    return max(
        0, math.floor(-_least(lambda a: -(epsilon - price(a)) / proved_rdp(a, *once, bound)))
    )


@claim("Section 5 (calibration)", "ours", "what the same epsilon needs")
def proved_noise(
    epsilon, user_ratio, data_ratio, local_updates, rounds, users, delta, bound: str = "P1"
) -> float:
    """Return the smallest sigma_g with proved_epsilon <= epsilon.

    It is rounded up, by at most a part in 10^9.
    """
    run = user_ratio, data_ratio, local_updates, rounds, users, delta
    reached = lambda sigma_g: proved_epsilon(sigma_g, *run, bound)
    return smallest("noble2022.proved_noise", reached, epsilon)


# --- parts


def _axis(value):
    return np.asarray(value, np.float64)[..., None]


def _grid(sigma_g, user_ratio, data_ratio, local_updates, users):
    """Return the paper's curves of one round at ORDERS, for arrays that broadcast: [..., 63]."""
    runs = np.broadcast_arrays(sigma_g, user_ratio, data_ratio, local_updates, users)
    each = [
        third_party_rdp(ORDERS, z, u, d, k, 1.0, n)
        for z, u, d, k, n in zip(*(r.ravel().tolist() for r in runs))
    ]
    return np.array(each).reshape(runs[0].shape + ORDERS.shape)


def _published(*run):
    noise, user_ratio, data_ratio, local_updates, rounds, users, delta = run
    price = np.log(_axis(delta)) / (ORDERS - 1)
    return np.min(
        _axis(rounds) * _grid(noise, user_ratio, data_ratio, local_updates, users) - price, axis=-1
    )


def _least(value) -> float:
    """Return the minimum [n] over orders [n], by a coarse grid and two finer ones around its
    best."""
    low, high, least = 1e-2, 1e5, np.inf
    for _ in range(3):
        orders = 1 + np.geomspace(low, high, GRID)
        values = value(orders)
        best = int(np.argmin(values))
        low, high = (orders[np.clip([best - 1, best + 1], 0, GRID - 1)] - 1).tolist()
        least = min(least, float(values[best]))
    return least
