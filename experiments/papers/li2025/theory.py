"""Noise in the average and convergence, by Li, Wang, Wu, Mathematics 13(3):497, 2025.

    E F(w_t) - F* <= 2 kappa / (t + a) ((A + B + H) / mu + 2 L ||w_0 - w*||^2),   a = max(8 kappa,
    steps)

for mu-strongly convex, L-smooth losses with gradients of norm at most `clip_norm`, learning rates
`rates.theory`, t counted in local steps.  A is `gradient_term`, B a `noise_term`, H a
`sampling_term`; the paper's B is for noise in the gradient, ours for noise on the model.  The
bounds are far above measured values; they only show how the gap scales.

Float64 and traceable.  `shares` [C] are the weights p_k of the clients, with sum 1; `sizes` [C]
their rows.
"""

import numpy as np

from jfl.core import checks

from ..approximate_dp import arrays
from ..claim import Checked, checked, claim

SAMPLINGS = ("full", "with_replacement", "with_replacement_independent", "without_replacement")


# --- averages


@claim("Theorem 4", "ours", "the paper leaves out that uploads are sampled with their noise")
def square_weights(shares, sampling: str, cohort: int | None = None):
    """Return E[weight^2] of each client under the unbiased weights: how much of its noise variance
    reaches the model.

    Args:
        shares: p_k [C], which add up to 1.
        sampling: "full"; "without_replacement"; "with_replacement": a client that is drawn twice
            runs once and counts twice; "with_replacement_independent": it runs twice.
        cohort: clients of a round; not needed for "full".

    Returns:
        Float64[C].
    """
    where = "li2025.theory.square_weights"
    checks.require_one_of(where, SAMPLINGS, sampling=sampling)
    p, many = arrays(shares, cohort or 1)
    return {
        "full": p**2,
        "with_replacement": p**2 + p * (1 - p) / many,
        "with_replacement_independent": p / many,
        "without_replacement": len(p) / many * p**2,
    }[sampling]


# --- lemmas of the bound


@claim(
    "Lemma A1",
    "rigorous",
    "the noise adds dim lr^2 sum p_k^2 sigma_k^2 only, at most half of its term",
)
def step_bound(
    distance,
    gradient_noise,
    drift,
    lr,
    strong_convexity,
    smoothness,
    gap,
    dim=0,
    noise_variance=0.0,
) -> Checked:
    """Return a bound on E ||w - w*||^2 after a local step of all clients.

    Args:
        distance: E ||w - w*||^2 before, of the mean model.
        gradient_noise: E ||g - mean of g||^2, see `gradient_noise_bound`.
        drift: E sum p_k ||mean model - w_k||^2, see `drift_bound`.
        lr: the learning rate of the step.
        strong_convexity: mu of the losses.
        smoothness: L of the losses.
        gap: F* - sum p_k F_k*.
        dim: numbers in the model.
        noise_variance: sum p_k sigma_k^2 of the noise in the gradients; 0 before the last step.
    """
    far, g, d, eta, mu, curve, apart, v = arrays(
        distance, gradient_noise, drift, lr, strong_convexity, smoothness, gap, noise_variance
    )
    value = (1 - mu * eta) * far + 2 * d + eta**2 * (g + 6 * curve * apart + 2 * dim * v)
    return checked(value, {"lr <= 1 / (4 L)": eta <= 1 / (4 * curve)})


@claim("Lemma A2", "rigorous", "batches without replacement vary less")
def gradient_noise_bound(shares, variances, batch: int):
    """Return sum p_k^2 variance_k / batch, a bound on E ||g - mean of g||^2, with variances as in
    `gradient_term`."""
    p, v = arrays(shares, variances)
    return np.sum(p**2 * v) / batch


@claim(
    "Lemma A3",
    "conditional",
    "needs gradients of norm at most clip_norm; at the last step there is no noise in w_k yet",
)
def drift_bound(steps: int, lr, clip_norm, dim=0, noise_variance=0.0):
    """Return 4 (steps - 1)^2 lr^2 (clip_norm^2 + dim noise_variance), a bound on E sum p_k ||mean
    model - w_k||^2 within a round, for learning rates that fall at most by half."""
    eta, bound, v = arrays(lr, clip_norm, noise_variance)
    return 4 * (steps - 1) ** 2 * eta**2 * (bound**2 + dim * v)


@claim(
    "Lemma A5",
    "conditional",
    "draws with replacement by p_k, as in Assumption 5; Appendix D has equal chances, a bias",
)
def mean_weights(shares, sampling: str):
    """Return the mean weight of each client's model in an average over a cohort; p_k without bias.

    Args:
        shares: p_k [C], which add up to 1.
        sampling: "with_replacement", drawn with probabilities p_k, or "equal_chances", drawn with
            replacement and probability 1 / C, both with weights 1 / K; "without_replacement", with
            weights C p_k / K.
    """
    where = "li2025.theory.mean_weights"
    options = ("with_replacement", "equal_chances", "without_replacement")
    checks.require_one_of(where, options, sampling=sampling)
    p = arrays(shares)[0]
    return np.full(len(p), 1 / len(p)) if sampling == "equal_chances" else p


@claim(
    "Lemma A6",
    "conditional",
    "at most this, not equal; for uploads without noise, equal p_k, and gradients within clip_norm",
)
def sampling_variance_bound(sampling: str, steps: int, lr, clip_norm, clients: int, cohort: int):
    """Return lr^2 times `sampling_term_printed`, a bound on the variance of the average over a
    cohort."""
    return arrays(lr)[0] ** 2 * sampling_term_printed(sampling, steps, clip_norm, clients, cohort)


# --- terms of the bound


@claim(
    "Theorem 3, A",
    "conditional",
    "for gradients of norm at most clip_norm, so that clipping changes none",
)
def gradient_term(shares, variances, batch: int, steps: int, clip_norm, smoothness, gap):
    """Return a = sum p_k^2 variance_k / batch + 8 (steps - 1)^2 clip_norm^2 + 6 L gap.

    Args:
        shares: p_k [C], which add up to 1.
        variances: [C], of the gradient of one example, for each client; or one for all.
        batch: rows of a step.
        steps: local steps of a round.
        clip_norm: bound on a step's gradient.
        smoothness: L of the losses.
        gap: F* - sum p_k F_k*, see `jfl.analysis.heterogeneity`.
    """
    bound, curve, apart = arrays(clip_norm, smoothness, gap)
    noise = gradient_noise_bound(shares, variances, batch)
    return noise + 8 * (steps - 1) ** 2 * bound**2 + 6 * curve * apart


@claim(
    "Theorem 3, B",
    "conditional",
    "less drift than its lemmas give, and yet more noise than there is; Lemma A4",
)
def noise_term_printed(
    dim: int,
    steps: int,
    clip_norm,
    batch: int,
    rows,
    smoothness,
    epsilon,
    delta,
):
    """Return B for noise in the gradient: dim times the bound on eq. (20) at lr = 1 / (4 L), times
    4 (steps - 1)^2 + 2.

    Args:
        dim: numbers in the model.
        steps: local steps of a round.
        clip_norm: bound on a step's gradient.
        batch: rows of a step.
        rows: number of rows of all clients together.
        smoothness: L of the losses.
        epsilon: epsilon of one round.
        delta: in (0, 1).
    """
    bound, n, curve, e = arrays(clip_norm, rows, smoothness, epsilon)
    drift = 4 * (steps - 1) ** 2 + 2  # the lemmas of the paper together give 8 instead of 4
    variance = (
        8
        * steps**4
        * (batch * bound / (curve * e)) ** 2
        / n
        * _log_integral(n, steps, batch, delta)
    )
    return dim * drift * variance


@claim("Theorem 3, B", "ours", "noise on the model after the last step adds no drift")
def noise_term(
    dim: int,
    steps: int,
    clip_norm,
    shares,
    multipliers,
    sampling: str = "full",
    cohort: int | None = None,
):
    """Return B = 16 dim steps^2 clip_norm^2 sum square_weights multiplier_k^2.

    It assumes that learning rates fall at most by half within a round.

    Args:
        dim: numbers in the model.
        steps: local steps of a round.
        clip_norm: bound on a step's gradient.
        shares: p_k [C], which add up to 1.
        multipliers: `li2025.noise_multiplier` of each client [C], or one for all.
        sampling: as in `square_weights`.
        cohort: clients of a round; not needed for "full".
    """
    bound, z = arrays(clip_norm, multipliers)
    return 16 * dim * (steps * bound) ** 2 * np.sum(square_weights(shares, sampling, cohort) * z**2)


@claim(
    "Theorem 4, H",
    "conditional",
    "without replacement for equal p_k only, which its source assumes",
)
def sampling_term_printed(sampling: str, steps: int, clip_norm, clients: int, cohort: int):
    """Return H = (2 steps clip_norm)^2 / cohort, times (clients - cohort) / (clients - 1) without
    replacement; 0 if "full"."""
    return sampling_term(sampling, steps, clip_norm, np.full(clients, 1 / clients), cohort)


@claim("Theorem 4, H", "ours", "for the weights of `aggregation_weights`, whatever p_k")
def sampling_term(sampling: str, steps: int, clip_norm, shares, cohort: int):
    """As printed, times C sum p_k^2 without replacement."""
    where = "li2025.theory.sampling_term"
    checks.require_one_of(where, SAMPLINGS, sampling=sampling)
    clients = np.shape(shares)[0]
    bound, p = arrays(clip_norm, shares)
    left = (clients - cohort) / max(clients - 1, 1) * clients * np.sum(p**2)
    factor = {"full": 0.0, "without_replacement": left}.get(sampling, 1.0)
    return factor * 4 * (steps * bound) ** 2 / cohort


# --- the bound


@claim("Theorems 3 and 4", "conditional", "false for steps > 8 kappa: its proof takes a = 8 kappa")
def bound_gap_printed(step, terms, distance, strong_convexity, smoothness, steps: int) -> Checked:
    """Return 2 kappa / (step + a) (terms / mu + 2 L distance).

    Args:
        step: t, local steps taken in all.
        terms: A + B + H.
        distance: ||w_0 - w*||^2.
        strong_convexity: mu of the losses.
        smoothness: L of the losses; kappa = L / mu.
        steps: local steps of a round.
    """
    t, total, far, mu, curve = arrays(step, terms, distance, strong_convexity, smoothness)
    value = (
        2 * curve / mu * (total / mu + 2 * curve * far) / (t + np.maximum(8 * curve / mu, steps))
    )
    conditions = {"steps <= 8 smoothness / strong_convexity": steps <= 8 * curve / mu}
    return checked(value, conditions)


@claim(
    "Theorems 3 and 4",
    "ours",
    "the same proof for any a: equal to what is printed where steps <= 8 kappa",
)
def bound_gap(step, terms, distance, strong_convexity, smoothness, steps: int, sharp: bool = False):
    """Return (2 kappa terms / mu + L a distance / 2) / (step + a).

    With `sharp`, the larger of the two terms replaces their sum.

    Args:
        step, terms, distance, strong_convexity, smoothness, steps: as in `bound_gap_printed`.
        sharp: whether the larger of the two terms takes the place of their sum.
    """
    noise, start, offset = _parts(terms, distance, strong_convexity, smoothness, steps)
    return (np.maximum(noise, start) if sharp else noise + start) / (arrays(step)[0] + offset)


@claim("Remark 3", "ours", "the printed order drops a factor steps^2 of B")
def steps_to_accuracy(accuracy, terms, distance, strong_convexity, smoothness, steps: int):
    """Return the least whole number of local steps after which `bound_gap` is at most `accuracy`;
    rounds are that / steps."""
    return np.ceil(_needed(accuracy, terms, distance, strong_convexity, smoothness, steps))


@claim(
    "Remark 3",
    "conditional",
    "rounds fall at first only where what steps do not raise is large, as the start is",
)
def optimal_local_steps(
    terms_of_steps, accuracy, distance, strong_convexity, smoothness, most: int = 1000
) -> int:
    """Return the local steps, at most `most`, with which `bound_gap` is at most `accuracy` after
    the fewest rounds.

    Args:
        terms_of_steps: steps -> A + B + H, called with each of 1, 2, ..., most.
        accuracy: the error that is allowed.
        distance: ||w_0 - w*||^2.
        strong_convexity: mu of the losses.
        smoothness: L of the losses.
        most: the largest number of local steps that is tried.
    """
    tried = np.arange(1, most + 1)
    terms = np.array([float(terms_of_steps(int(steps))) for steps in tried])
    return 1 + int(
        np.argmin(_needed(accuracy, terms, distance, strong_convexity, smoothness, tried) / tried)
    )


# --- parts, in float64


def _log_integral(rows, steps, batch, delta):
    return np.log(rows) * (2 * np.log(1.25 * steps * batch / arrays(delta)[0]) - np.log(rows)) / 2


def _parts(terms, distance, strong_convexity, smoothness, steps):
    total, far, mu, curve = arrays(terms, distance, strong_convexity, smoothness)
    offset = np.maximum(8 * curve / mu, steps)
    return 2 * curve / mu * total / mu, curve * offset * far / 2, offset


def _needed(accuracy, terms, distance, strong_convexity, smoothness, steps):
    noise, start, offset = _parts(terms, distance, strong_convexity, smoothness, steps)
    return np.maximum((noise + start) / arrays(accuracy)[0] - offset, 0.0)
