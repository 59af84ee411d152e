"""Convergence claims of Chen, Ding, Bao, Zhou, Jin (TKDE 2024), and the numbers that they report.

The proofs are in a supplement that was not available, so verdicts are about the statements.
`Constants` holds what a theorem takes as known. Functions accept floats, arrays and tracers. If a
clip is active, the gradients are biased, and none of these bounds applies to the run.
"""

from typing import Any, NamedTuple

from jfl.core import checks

from ..claim import Checked, checked, claim

VARIANTS = ("printed", "unloosened")


class Constants(NamedTuple):
    """Constants of Assumptions 1 and 2 and of the definitions of non-iid data; `_2` marks
    squares."""

    clients: Any  # n
    per_round: Any  # r
    steps: Any  # tau, local steps
    smoothness: Any  # L
    gradient_bound: Any  # G, with E|g|^2 <= G^2
    noise_2: Any = 0.0  # d sigma^2: expected square of the noise of one step
    strong_convexity: Any = 0.0  # lambda
    variance_2: Any = 0.0  # sum p_i phi_i^2, of minibatch gradients
    objective_gap: Any = 0.0  # Gamma_s = f* - sum p_i f_i*
    dissimilarity_2: Any = 0.0  # Gamma_n^2 >= sum p_i |grad f_i - grad f|^2
    dim: Any = 1  # d

    @property
    def ratio(self):
        """Return n / r."""
        return self.clients / self.per_round

    @property
    def energy(self):
        """Return G^2 + d sigma^2, which bounds the mean square of one noisy gradient."""
        return self.gradient_bound**2 + self.noise_2


# --- DPNFL


@claim(
    "Theorem 1",
    "conditional",
    "true where ours is smaller (n / r <= 9 tau is enough); false at large n / r",
)
def theorem1(c: Constants, rounds, distance_2) -> Checked:
    """Return [2 L / lambda^2 H + 8 L^2 / lambda |w_0 - w*|^2] / (16 L / lambda + T), which bounds E
    f(w_T) - f*.

    Args:
        c: what the theorem takes as known.
        rounds: T.
        distance_2: |w_0 - w*|^2; the paper writes w_1, and its run starts at w_0.

    Example:
        >>> c = Constants(100, 10, 5, 1.0, 1.0, 2.0, 0.1, variance_2=0.5, objective_gap=0.3)
        >>> round(theorem1(c, 100, 1.0).value, 4), round(theorem1_ours(c, 100, 1.0).value, 4)
        (807.3077, 90.7692)
    """
    h = theorem1_constant(c)
    value = _strongly_convex(c, rounds, distance_2, h / 4)
    conditions = _convex(c) | {"4 C <= H, with C that of theorem1_ours": 4 * _ours(c) <= h}
    return checked(value, conditions)


def theorem1_constant(c: Constants):
    """Return H of Theorem 1."""
    return (
        40 * (c.energy + 4 * c.steps * c.gradient_bound**2)
        + (8 * c.smoothness * c.ratio + 16 * c.smoothness) * c.objective_gap
        + 4 * c.ratio * c.noise_2
        + c.strong_convexity / c.smoothness * c.energy
        + 4 * c.ratio * c.variance_2
    )


@claim(
    "Theorem 1, replaced",
    "ours",
    "perturbed strong convexity and cohort_energy_bound; noise per round, not step",
)
def theorem1_ours(c: Constants, rounds, distance_2) -> Checked:
    """Return [8 L C / lambda^2 + 8 L^2 / lambda |w_0 - w*|^2] / (16 L / lambda + T), C = (1 + 2 n /
    r)(G^2 + d sigma^2 / tau).

    For the learning rates of Theorem 1 and unbiased gradients with E|g|^2 <= G^2.
    """
    value = _strongly_convex(c, rounds, distance_2, _ours(c))
    return checked(value, _convex(c))


@claim("Theorem 2", "vacuous", "above 2 n / r G^2, where G^2 is trivial, at every learning rate")
def theorem2(c: Constants, rounds, gap, lr) -> Checked:
    """Return (f(w_0) - f*) / (T Upsilon) + Q / Upsilon, which bounds the mean of E|grad f(w_t)|^2.

    Args:
        c: what the theorem takes as known.
        rounds: T.
        gap: f(w_0) - f*.
        lr: local learning rate.

    It needs lr < 1 / (200 tau L), and Upsilon > 0, which does not follow.
    """
    upsilon, q = theorem2_constants(c, lr)
    conditions = {
        "lr < 1 / (200 tau L)": lr < 1 / (200 * c.steps * c.smoothness),
        "Upsilon > 0": upsilon > 0,
    }
    return checked(gap / (rounds * upsilon) + q / upsilon, conditions)


def theorem2_constants(c: Constants, lr):
    """Return (Upsilon, Q) of Theorem 2."""
    x = lr * c.steps
    upsilon = (
        x / 2
        - 15 * x**3 * c.smoothness**2
        - 90 * c.ratio * x**4 * c.smoothness**3
        - c.ratio * x**2 * c.smoothness
    )
    return upsilon, lr * (1 + c.ratio * c.steps + c.ratio) * c.energy + (
        2 * c.ratio + 1
    ) * x * c.dissimilarity_2


@claim(
    "Remark 1",
    "conditional",
    "at a given noise, and in Theorem 2 where Upsilon > 0; at one epsilon, more clients mean more "
    "noise",
)
def remark1(c: Constants, lr) -> Checked:
    """Return (H of Theorem 1, Q / Upsilon of Theorem 2), which fall with r and grow with the noise
    and the non-iid-ness."""
    upsilon, q = theorem2_constants(c, lr)
    return checked((theorem1_constant(c), q / upsilon), {"Upsilon > 0": upsilon > 0})


@claim(
    "Theorem 2, replaced",
    "ours",
    "any learning rate; vanishes with it; unbiased gradients with E|g|^2 <= G^2",
)
def theorem2_ours(c: Constants, rounds, gap, lr):
    """Return 2 (f(w_0) - f*) / (lr tau T) + (2 L^2 lr^2 tau + 2 L lr n / r)(tau G^2 + d
    sigma^2)."""
    spread = c.steps * c.gradient_bound**2 + c.noise_2
    return (
        2 * gap / (lr * c.steps * rounds)
        + (2 * c.smoothness**2 * lr**2 * c.steps + 2 * c.smoothness * lr * c.ratio) * spread
    )


# --- AdDPNFL


@claim(
    "Theorem 3, hypotheses", "unsound", "both hold only if 3 d^1.5 tau^2 <= beta2^1.5 < 1: never"
)
def theorem3_intervals(c: Constants, beta2, adaptivity):
    """Return (least, largest) of the local and of the server learning rate."""
    scale = (c.smoothness * c.gradient_bound) ** 0.5
    local = (c.dim / beta2) ** 0.5 / scale, 1 / (4 * c.smoothness * c.steps)
    return local, (
        3 * scale * (c.gradient_bound / c.smoothness + adaptivity) / (2 * c.strong_convexity),
        2 * beta2 * c.gradient_bound / (c.dim * c.steps * c.strong_convexity),
    )


@claim(
    "Theorem 3",
    "unsound",
    "its hypotheses cannot hold together, and its constant does not fall with T",
)
def theorem3(c: Constants, rounds, distance_2, lr, server_lr, beta2, adaptivity) -> Checked:
    """Return L / (2 T) |w_0 - w*|^2 + 3 L K / 2, with K of `theorem3_constant`."""
    value = c.smoothness * (
        distance_2 / (2 * rounds) + 1.5 * theorem3_constant(c, beta2, adaptivity)
    )
    local, server = theorem3_intervals(c, beta2, adaptivity)
    most = beta2 * adaptivity**2 / (2 * c.ratio * c.steps * (c.gradient_bound + c.smoothness))
    conditions = {
        "lr >= sqrt(d / (beta2 L G))": lr >= local[0],
        "lr <= 1 / (4 L tau)": lr <= local[1],
        "server_lr >= 3 sqrt(L G) (G / L + pi) / (2 lambda)": server_lr >= server[0],
        "server_lr <= 2 beta2 G / (d tau lambda)": server_lr <= server[1],
        "lr server_lr <= r beta2 pi^2 / (2 n tau (G + L))": lr * server_lr <= most,
    }
    return checked(value, conditions)


def theorem3_constant(c: Constants, beta2, adaptivity):
    """Return the constant K of Theorem 3."""
    big, g, tau, pi = c.smoothness, c.gradient_bound, c.steps, beta2 * adaptivity**2
    return (
        20 * (c.energy + 4 * tau * g**2) / big**2
        + ((4 * c.ratio * tau**2 / big + 4 * tau / big) / pi + 4 * c.dim / (beta2 * g))
        * c.objective_gap
        + 2 * tau * c.strong_convexity * c.dim * c.energy / (beta2 * big**2 * g)
        + c.ratio * tau**2 / big**2 * (2 * c.noise_2 + 2 * c.variance_2 + c.energy) / pi
    )


@claim(
    "Theorem 4",
    "order",
    "its bounds G / sqrt(d) per coordinate and on the noisy update are not assumed",
)
def theorem4_order(
    c: Constants,
    rounds,
    gap,
    lr,
    server_lr,
    beta2,
    adaptivity,
    variant: str = "printed",
    constant=1.0,
) -> Checked:
    """Return the order of the mean of E|grad f(w_t)|^2.

    It is constant (sqrt(beta2 / d) lr tau G + pi)(Theta + Theta').

    n / r in Theta' is reconstructed.

    Args:
        c: what the theorem takes as known.
        rounds: T.
        gap: f(w_0) - f*.
        lr: local learning rate.
        server_lr: learning rate of the server.
        beta2: decay of the second moment.
        adaptivity: pi, the constant that is added to the root of the second moment.
        variant: "printed", whose second term of Theta does not fall with lr; "unloosened", which
            has the term 5 lr^2 tau L^2 / (2 pi) of the usual analysis instead.
        constant: the constant factor that the theorem leaves open.
    """
    checks.require_one_of("chen2024.theorem4_order", VARIANTS, variant=variant)
    tau, pi, g = c.steps, adaptivity, c.gradient_bound
    spread = c.energy + 6 * tau * c.dissimilarity_2
    stays = 1 / (tau * pi) if variant == "printed" else 5 * lr**2 * tau * c.smoothness**2 / (2 * pi)
    theta = gap / (lr * server_lr * tau * rounds) + stays * spread
    reach = g + server_lr * c.smoothness
    other = (
        reach * c.ratio * lr / pi**2 * (6 * tau * c.energy + spread + 6 * tau * c.dissimilarity_2)
    )
    value = constant * ((beta2 / c.dim) ** 0.5 * lr * tau * g + pi) * (theta + other)
    conditions = {
        "lr <= 1 / (8 tau L)": lr <= 1 / (8 * tau * c.smoothness),
        "lr <= pi r / (80 n tau (G + server_lr L))": lr <= pi / (80 * tau * c.ratio * reach),
    }
    return checked(value, conditions)


# --- parts


def _ours(c):
    return (1 + 2 * c.ratio) * (c.gradient_bound**2 + c.noise_2 / c.steps)


def _strongly_convex(c, rounds, distance_2, spread):
    big, small = c.smoothness, c.strong_convexity
    return (8 * big * spread / small**2 + 8 * big**2 * distance_2 / small) / (
        16 * big / small + rounds
    )


def _convex(c):
    return {"lambda <= L": c.strong_convexity <= c.smoothness}


# --- reported: test accuracy in percent

ALGORITHMS = ("DPFedAvg", "DPSCAFFOLD", "DPNFL", "AdDPNFL", "NonPrivate")
FIGURE1_MNIST_BALANCED = dict(zip(ALGORITHMS, (78.79, 76.45, 80.59, 84.45, 93.48)))
NON_PRIVATE = {"mnist": 93.48, "fmnist": 83.44, "svhn": 87.74, "cifar10": 80.35}
FIGURE7_UNBALANCED = {
    "mnist": {"AdDPNFL": 90.0, "DPNFL": 85.0},
    "svhn": {"AdDPNFL": 81.5, "DPNFL": 76.0},
}  # read off
TABLE2 = {
    setting: dict(zip(ALGORITHMS, zip(means, stds)))
    for setting, means, stds in (  # mean, std of 5 runs
        ("Synthetic-IID", (69.84, 76.81, 78.35, 82.54, 90.12), (1.05, 1.05, 0.29, 0.17, 0.44)),
        ("Synthetic(1,1)", (67.14, 77.15, 81.90, 84.18, 89.72), (1.21, 1.44, 0.32, 0.19, 0.56)),
        ("Synthetic(5,5)", (66.41, 77.08, 81.99, 84.68, 90.39), (2.42, 1.57, 0.45, 0.34, 0.77)),
        ("Dir(100)", (59.38, 61.56, 69.04, 72.65, 81.09), (0.67, 0.64, 0.16, 0.21, 0.71)),
        ("Dir(5)", (54.95, 67.65, 69.90, 72.90, 79.67), (1.57, 0.85, 0.73, 0.63, 0.86)),
        ("Dir(0.1)", (48.46, 59.32, 70.20, 73.19, 80.60), (1.59, 1.67, 1.18, 1.04, 1.15)),
    )
}
