"""Noise and utility, convergence, and reported gains of Ranaweera et al., arXiv 2503.21154, 2025.

Convergence is under the Polyak-Lojasiewicz (PL) condition and leaves out the bias of clipping.

Arrays broadcast. `sigma` is the multiplier that the accountant gets.
"""

from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jfl.core import checks

from ..approximate_dp import arrays
from ..claim import Checked, checked, claim
from . import claims as privacy

VARIANTS = ("iso", "wavelet")


# --- noise energy


@claim(
    "Lemma 2",
    "ours",
    "what of the gain is just less noise: DP-SGD with sqrt(this) sigma has as little",
)
def noise_power_ratio(m, calibration: str = "plain"):
    """Return noise energy as published over that of DP-SGD at the same sigma and C.

    >>> [round(float(noise_power_ratio(2**k, "lemma2")), 3) for k in (10, 15, 18, 20)]
    [0.056, 0.039, 0.033, 0.03]
    """
    factor = privacy.effective_noise_multiplier("R5", m, 1.0, calibration)
    return privacy.haar_coordinate_variance(m, 1.0) * factor**2


@claim(
    "section 4.3",
    "ours",
    "exact, also for entries without the padding, as all have the same variance",
)
def dp_noise_energy(variant: str, sigma, clip_norm, sizes, calibration: str = "plain", denom=1.0):
    """Return E||noise||^2 of a mean, v_dp of the bounds below.

    Args:
        variant: "iso" (DP-SGD); "wavelet", noise sigma C / W, whatever is clipped.
        sigma: the noise multiplier.
        clip_norm: C.
        sizes: the dimension d.
        calibration: "plain", or "lemma2" for noise that Lemma 2 lowers.
        denom: what the sum is divided by.

    Example:
        >>> (
        ...     float(dp_noise_energy("iso", 2.0, 0.5, 8)),
        ...     float(dp_noise_energy("wavelet", 2.0, 0.5, 8)),
        ... )
        (8.0, 2.75)
    """
    checks.require_one_of("ranaweera2025.dp_noise_energy", VARIANTS, variant=variant)
    ratio = (
        noise_power_ratio(2.0 ** np.ceil(np.log2(sizes)), calibration)
        if variant == "wavelet"
        else 1.0
    )
    sigma, norm, sizes, ratio, denom = arrays(sigma, clip_norm, sizes, ratio, denom)
    return sizes * (sigma * norm / denom) ** 2 * ratio


# --- convergence


class Constants(NamedTuple):
    """Assumptions of section 4; `_2` are squares.  sum q_j |grad F_j|^2 <= diversity |sum q_j grad
    F_j|^2."""

    pl: Any  # mu: |grad F|^2 >= 2 mu (F - F*)
    smoothness: Any  # L, of F and of every F_j
    diversity: Any = 1.0  # lambda >= 1
    growth: Any = (
        0.0  # C1: gradients vary by E|g_j - grad F_j|^2 <= C1 |grad F_j|^2 + variance_2 / batch
    )
    variance_2: Any = 0.0  # sigma_s^2
    cohort: Any = 1  # K clients of a round, drawn with probabilities q_j
    batch: Any = 1
    noise_2: Any = 0.0  # v_dp: E|noise|^2 of an aggregated step
    local_noise_2: Any = 0.0  # E|noise|^2 of one client's step; 0 where the server adds the noise


class Terms(NamedTuple):
    """The terms that one step adds to the bound on the distance from the optimum."""

    contraction: Any  # Delta_t
    constant: Any  # c_t
    gradient: Any  # factor of the squared gradient of this step
    drift: Any  # B_t, of those of the steps before it


def theorem3_terms(c: Constants, lrs) -> Terms:
    """Return the factors in `theorem3`, from the learning rates lrs [..., s] since the models last
    were equal."""
    (lrs,) = arrays(lrs)
    lr, first, steps = lrs[..., -1], lrs[..., 0], lrs.shape[-1]
    bend = lr * c.smoothness**2 * (c.cohort + 1) / c.cohort
    spread = bend * steps * first**2 * (c.variance_2 / c.batch + c.local_noise_2)
    return Terms(
        1 - c.pl * lr,
        _step_noise(c, lr) + spread,
        lr / 2 * (_bracket(c, lr) - 1),
        bend * c.diversity * (c.growth + steps),
    )


@claim(
    "Theorem 3",
    "unverified",
    "the literature's constants; its own are lost, and local noise adds to the drift",
)
def theorem3(c: Constants, gap, lrs, gradients_2) -> Checked:
    """Delta_t gap + c_t + gradient |sum q_j grad F_j(w_j)|^2 + B_t sum of lr_k^2 such squares:
    bounds E F(w) - F*.

    Args:
        c: what the theorem takes as known.
        gap: E F - F* at the averaged model before the step.
        lrs: [..., s], learning rates of the steps since the last synchronisation, this one last.
        gradients_2: [..., s], |sum q_j grad F_j(w_j)|^2 in these steps.

    Preconditions: mu lr <= 1, the third term is not positive, and lrs do not
            rise.

    References:
        Haddadpour and Mahdavi, 2019, for the drift.
    """
    terms = theorem3_terms(c, lrs)
    lrs, gradients_2 = arrays(lrs, gradients_2)
    past = (lrs[..., :-1] ** 2 * gradients_2[..., :-1]).sum(axis=-1)
    value = (
        terms.contraction * gap
        + terms.constant
        + terms.gradient * gradients_2[..., -1]
        + terms.drift * past
    )
    conditions = _conditions(c, lrs[..., -1]) | {
        "lrs that do not rise": (lrs[..., 1:] <= lrs[..., :-1]).all(axis=-1)
    }
    return checked(value, conditions)


@claim("Theorem 3, one local step", "ours", "proved: smoothness, the variance of a cohort of K, PL")
def dp_pl_step(c: Constants, gap, lr, gradient_2=0.0) -> Checked:
    """Return (1 - mu lr) gap + lr / 2 (lambda L lr (C1 + K) / K - 1) |grad F|^2 + L lr^2 / 2
    (sigma_s^2 / (K B) + v_dp)."""
    value = (1 - c.pl * lr) * gap + lr / 2 * (_bracket(c, lr) - 1) * gradient_2 + _step_noise(c, lr)
    return checked(value, _conditions(c, lr))


@claim(
    "Theorem 3, one local step",
    "ours",
    "the step above, again and again; attained by |w|^2 at lr = 1 / L",
)
def dp_pl_rate(c: Constants, gap, lr, rounds) -> Checked:
    """Return (1 - mu lr)^T (F_0 - F*) + L lr / (2 mu) (sigma_s^2 / (K B) + v_dp), which bounds E
    F(w_T) - F*.

    >>> dp_pl_rate(Constants(0.1, 1.0, noise_2=0.01), 2.0, 0.5, 100).value < 0.037
    True
    """
    value = (1 - c.pl * lr) ** rounds * gap + _step_noise(c, lr) / (c.pl * lr)
    return checked(value, _conditions(c, lr))


# --- parts


def _step_noise(c, lr):
    return c.smoothness * lr**2 / 2 * (c.variance_2 / (c.cohort * c.batch) + c.noise_2)


def _bracket(c, lr):
    return c.diversity * c.smoothness * lr * (c.growth + c.cohort) / c.cohort


def _conditions(c, lr):
    return {"mu lr <= 1": c.pl * lr <= 1, "lambda L lr (C1 + K) / K <= 1": _bracket(c, lr) <= 1}


# --- reported: gains in test accuracy, in percentage points


class Levels(NamedTuple):
    """One number for each of the three noise levels."""

    small: float
    medium: float
    large: float


class Reported(NamedTuple):
    """Gains in accuracy that the paper reports, at its three levels of noise."""

    figure: int
    vanilla: Levels  # over DP-SGD or DP-FedAvg
    dynamic: Levels  # over their dynamic form


SIGMAS = Levels(1.0, 1.5, 3.0)
SETTINGS = MappingProxyType(
    {"clients": 100, "rounds": 300, "local_epochs": 50}
)  # all clients hold as many rows
ROWS = MappingProxyType({"mnist": 600, "fmnist": 600, "cifar10": 500})  # of a client
REPORTED = MappingProxyType(
    {
        "sample_mnist": Reported(7, Levels(4.9, 7.03, 9.16), Levels(2.87, 4.2, 4.82)),
        "sample_fmnist": Reported(8, Levels(9.93, 12.7, 14.6), Levels(5.64, 5.53, 5.35)),
        "sample_cifar10": Reported(9, Levels(6.38, 7.2, 9.1), Levels(1.871, 1.88, 2.05)),
        "client_mnist": Reported(10, Levels(3.64, 6.14, 12.97), Levels(1.21, 1.82, 4.93)),
        "client_fmnist": Reported(11, Levels(13.2, 14.82, 27.3), Levels(2.4, 3.08, 4.39)),
        "client_cifar10": Reported(12, Levels(5.96, 6.67, 16.33), Levels(1.987, 4.02, 5.94)),
    }
)
TABLE3 = MappingProxyType(
    {  # over the same optimiser; the order of levels is inferred
        ("adam", "mnist"): Levels(3.56, 4.9, 6.12),
        ("adagrad", "mnist"): Levels(2.31, 3.29, 4.97),
        ("adam", "fmnist"): Levels(8.22, 10.23, 12.97),
        ("adagrad", "fmnist"): Levels(6.61, 8.19, 10.88),
        ("adam", "cifar10"): Levels(6.01, 6.83, 7.93),
        ("adagrad", "cifar10"): Levels(4.25, 5.53, 7.03),
    }
)
