"""Privacy claims of Talaei, Izadi, 2024 (PADPFL), as printed and corrected.

The paper is "Enhancing federated learning with adaptive differential privacy and priority-based
aggregation".

Every client clips its model to norm `clip_norm`, adds noise and uploads; the server averages with
impact factors p that add up to 1, adds noise and broadcasts.  The unit is one record of one client,
replace_one.  `rounds` (T) broadcasts are seen, and `exposures` (R) uploads of a client; an
honest-but-curious server sees an upload in every round.

As printed, the noise is computed for a sensitivity of 2 clip_norm / rows, which is false
(`argmin_counterexample`): the clip only gives 2 clip_norm. Impact factors that depend on data would
be an additional release, which is not counted here.

Plain arithmetic: numbers and NumPy arrays are float64, tracers go through.  Arguments broadcast;
impact factors are [..., clients].  `rows` is the smallest number of any client, and
`factor` is c of `gaussian_factor`.
"""

import numpy as np

from jfl.core import checks
from jfl.privacy.accountants.rdp import gaussian_delta as gaussian_delta
from jfl.privacy.accountants.rdp import gaussian_epsilon as gaussian_epsilon

from .. import approximate_dp
from ..claim import Checked, checked, claim

# --- one Gaussian


@claim(
    "Gaussian mechanism",
    "conditional",
    "needs epsilon < 1 for each release; one upload has 5 or 20 in all runs",
)
def gaussian_factor(delta):
    """Return c = sqrt(2 log(1.25 / delta)), for a noise std of c sensitivity / epsilon. At 20, its
    delta is not 0.01:

    >>> (
    ...     round(float(gaussian_factor(0.01)), 10),
    ...     round(float(gaussian_delta(20, 20 / gaussian_factor(0.01))), 4),
    ... )
    (3.1075114601, 0.4828)
    """
    return approximate_dp.gaussian_sigma(1.0, 1.0, delta)


@claim("Gaussian mechanism", "ours", "exact for every epsilon")
def gaussian_mu(epsilon, delta):
    """Return the largest sensitivity / std that is (epsilon, delta)-private; `gaussian_epsilon`,
    `gaussian_delta` invert it.

    >>> [round(float(gaussian_mu(e, 0.01)), 7) for e in (5.0, 20.0)]
    [1.7562982, 4.5304729]
    """
    return 1 / approximate_dp.analytic_sigma(1.0, epsilon, delta)


# --- impact factors and conventions


@claim("Experiments, impact factors", "rigorous", "gives every value that is quoted")
def assign_impact(ratios, group_sizes):
    """Return p of a client of each group, ratio / sum of ratio size; np.repeat(p, group_sizes) is
    one number per client.

    >>> [round(float(p), 6) for p in assign_impact((0, 2, 1), (20, 35, 5))]
    [0.0, 0.026667, 0.013333]
    """
    total = float(np.dot(ratios, group_sizes))
    return np.asarray(ratios, np.float64) / total


# --- sensitivity of a client


@claim("eq. (6)", "unsound", "says that the first of the pair is the second")
def argmins(curvatures, centres, prox_mu=0.0):
    """Return (minimiser of the mean, mean of the minimisers) of a (x - b)^2 / 2 + prox_mu x^2 / 2
    over records.

    Shapes:
        curvatures a [..., records], centres b [..., records] -> ([...], [...]).

    Example:
        >>> [round(float(v), 4) for v in argmins([1, 1, 1, 100], [0, 0, 0, 1])]
        [0.9709, 0.25]
    """
    a, b = np.asarray(curvatures, np.float64), np.asarray(centres, np.float64)
    pull = a * b
    return pull.mean(axis=-1) / (a.mean(axis=-1) + prox_mu), (pull / (a + prox_mu)).mean(axis=-1)


@claim(
    "eq. (7)", "ours", "one of any number of records can move the minimiser by almost 2 clip_norm"
)
def argmin_counterexample(rows: int, clip_norm=1.0, curvature=1e9, prox_mu=0.0):
    """Return (how far one record moves the minimiser, what eq. (7) allows).

    The record has `curvature` and moves from +clip_norm to -clip_norm; the others have 1 and stay
    at 0.  A curvature of `rows` moves it by clip_norm, and then the mean loss is 2-smooth whatever
    `rows`.

    >>> [round(float(v), 4) for v in argmin_counterexample(10_000)]
    [2.0, 0.0002]
    """
    others = np.zeros(rows - 1)
    one, other = (
        argmins(np.append(others + 1, curvature), np.append(others, centre), prox_mu)[0]
        for centre in (clip_norm, -clip_norm)
    )
    return abs(one - other), client_sensitivity_paper(clip_norm, rows)


@claim("eq. (7)", "unsound", "eq. (6) is false, and so is this: by a factor of up to `rows`")
def client_sensitivity_paper(clip_norm, rows):
    """Return 2 clip_norm / rows."""
    return 2 * clip_norm / rows


@claim(
    "eq. (7), replaced", "ours", "needs what the run must enforce; a clip alone gives 2 clip_norm"
)
def prox_erm_sensitivity(*, rows, lipschitz, mu_bar, inexactness=0.0):
    """Return how far one record moves the model of a client that solves its proximal problem.

    It is 2 lipschitz / mu_bar (1 / rows + inexactness).  Clipping gradients does not make a loss
    Lipschitz, so the run must enforce all of this.

    Args:
        rows: records of the client; its loss is their mean loss.
        lipschitz: Lipschitz constant of the loss of a record.
        mu_bar: strong convexity of the proximal objective.
        inexactness: the gradient of the proximal objective at the end is at most this times the
            gradient of the loss at the start; 0 for an exact solve.

    Example:
        >>> round(prox_erm_sensitivity(rows=150, lipschitz=1.0, mu_bar=1.0), 4)
        0.0133
    """
    return 2 * lipschitz / mu_bar * (1 / rows + inexactness)


# --- noise as printed


@claim(
    "eq. (8)",
    "unsound",
    "eq. (7) is false; else (epsilon, R delta), not (epsilon, delta), for epsilon / R < 1",
)
def client_noise_std_printed(clip_norm, exposures, factor, rows, epsilon) -> Checked:
    """Return 2 clip_norm R c / (rows epsilon), the same for all clients."""
    value = client_sensitivity_paper(clip_norm, rows) * exposures * factor / epsilon
    return checked(value, {"epsilon / R < 1": epsilon < exposures})


@claim(
    "eqs. (9), (10)",
    "unsound",
    "eq. (7) is false; if it were true, T-fold noise would be far more than is needed",
)
def required_std_printed(clip_norm, rounds, factor, impact, rows, epsilon) -> Checked:
    """Return the noise that a broadcast needs, including that of clients: 2 clip_norm max p T c /
    (rows epsilon).

    Args:
        clip_norm: bound on a client's model.
        rounds: T, broadcasts that are seen.
        factor: c of `gaussian_factor`.
        impact: p [..., clients].
        rows: the smallest number of rows of a client.
        epsilon: for the whole run.
    """
    moved = client_sensitivity_paper(clip_norm, rows) * _impact(impact).max(axis=-1)
    conditions = {
        "epsilon / T < 1": epsilon < rounds,
    }
    return checked(moved * rounds * factor / epsilon, conditions)


@claim("eqs. (10) to (13), clients", "rigorous", "clients draw their noise independently")
def aggregated_client_std(client_std, impact):
    """Return sqrt(sum p^2 client_std^2), the noise of clients in the average; client_std [] or
    [clients]."""
    return ((_impact(impact) * np.asarray(client_std, float)) ** 2).sum(axis=-1) ** 0.5


@claim(
    "eqs. (10) to (13), threshold",
    "rigorous",
    "as algebra; R = T never passes it, so the server then adds nothing",
)
def server_noise_threshold(exposures, impact):
    """Return R sqrt(sum p^2) / max p: with more rounds than this the server adds noise."""
    return exposures * aggregated_client_std(1.0, impact) / np.asarray(impact, float).max(axis=-1)


@claim("eq. (13), Theorem 1", "unsound", "eqs. (8) and (10) are; and it covers only one round")
def server_noise_std_printed(
    clip_norm, exposures, rounds, factor, impact, rows, epsilon
) -> Checked:
    """Return 2 clip_norm c / (rows epsilon) sqrt(T^2 max p^2 - R^2 sum p^2), what is missing in eq.
    (10); 0 if nothing is."""
    needed = required_std_printed(clip_norm, rounds, factor, impact, rows, epsilon)
    client = client_noise_std_printed(clip_norm, exposures, factor, rows, epsilon).value
    # at the threshold the difference is rounding
    more = rounds > server_noise_threshold(exposures, impact) * (1 + 1e-12)
    return needed._replace(
        value=more * _missing(needed.value, aggregated_client_std(client, impact))
    )


# --- noise that is enough


@claim("eq. (8), replaced", "ours", "Gaussians compose exactly")
def client_noise_std_sound(sensitivity, exposures, mu):
    """Return sensitivity sqrt(R) / mu, with mu of `gaussian_mu`; R = T against a curious server."""
    return sensitivity * exposures**0.5 / mu


@claim(
    "eq. (13), replaced",
    "ours",
    "if only broadcasts are seen",
)
def server_noise_std_sound(sensitivity, impact, client_std, rounds, mu):
    """Return the noise that is missing in the average for max(p sensitivity) sqrt(T) / mu per
    broadcast.

    Args:
        sensitivity: sensitivity of a client's upload, [] or [clients].
        impact: p [clients]; or [T, clients], public, a row for each round.
        client_std: noise of a client's upload, [] or [clients].
        rounds: T, broadcasts that are seen.
        mu: of `gaussian_mu`.

    Returns:
        The std [] that the server adds; [T] with one row per round, whose maximum is over all
        rounds.
    """
    average = aggregated_client_std(client_std, impact)
    return _missing(
        client_noise_std_sound(
            (np.asarray(impact, float) * np.asarray(sensitivity, float)).max(), rounds, mu
        ),
        average,
    )


@claim("Theorem 1, all rounds", "ours", "epsilon of any noise over R uploads, or T broadcasts")
def composed_epsilon(releases, sensitivity, std, delta):
    """Return the epsilon of Gaussian releases at `delta`.

    >>> round(float(composed_epsilon(30, 1.0, 10.0, 0.01)), 2)
    1.04
    """
    return gaussian_epsilon(releases**0.5 * sensitivity / std, delta)


@claim(
    "eqs. (10) to (13), noise that counts",
    "ours",
    "noise counts only if the adversary cannot subtract it",
)
def hidden_std(client_std, impact, server_std, known):
    """Return noise std of a broadcast without clients that are `known` (0 or 1): they collude, or
    their uploads are seen."""
    return (
        aggregated_client_std((1 - np.asarray(known, float)) * client_std, impact) ** 2
        + server_std**2
    ) ** 0.5


# --- parts


def _impact(impact):
    if np.any(np.abs(np.sum(impact, axis=-1, dtype=np.float64) - 1) > 1e-9):
        checks.fail(
            "talaei2024",
            "impact factors that add up to 1 within 1e-9",
            f"{np.sum(impact, axis=-1)}",
            "Use float64.",
        )
    return np.asarray(impact, float)


def _missing(needed, there):
    rest = needed**2 - there**2
    return (rest * (rest > 0)) ** 0.5
