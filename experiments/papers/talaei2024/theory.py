"""Convergence claims of Talaei, Izadi, 2024 (PADPFL), and the settings of their experiments.

Clients solve min l_i(x) + prox_mu |x - x~|^2 / 2 from the broadcast x~, up to an inexactness; L =
sum p_i l_i.  Losses are `smoothness`-smooth, `weak_convexity` bounds how concave they are (0 if
convex), and mu_bar = prox_mu - weak_convexity.  No bound includes the bias of clipped weights.
Functions accept floats, arrays and tracers; parameters are flat arrays.
"""

import math
from types import MappingProxyType
from typing import Any, NamedTuple

from ..claim import Checked, checked, claim


class Lambdas(NamedTuple):
    """E[L(next x~) - L(x~)] <= square |grad L|^2 + cross E|n| |grad L| + noise E|n|^2, n the noise
    of the broadcast."""

    square: Any  # lambda_2
    cross: Any  # lambda_1
    noise: Any  # lambda_0


class Constants(NamedTuple):
    """Constants that Theorems 2 and 3 take as known."""

    gap: Any  # Theta = L(x_0) - L*
    grad_bound: Any  # beta >= |grad L|
    clip_norm: Any  # B
    factor: Any  # c
    largest_impact: Any  # max p
    rows: Any  # max m in the theorems; the noise has min m
    clients: Any  # N; the noise has the dimension of the model


# --- local solves and what is measured


@claim("Algorithm 1", "rigorous", "the gradient of the proximal objective")
def prox_gradient(params, anchor, grad, prox_mu):
    """Return grad + prox_mu (params - anchor), with `grad` of the loss at `params`."""
    return grad + prox_mu * (params - anchor)


@claim(
    "Assumption on gamma-inexact solutions",
    "rigorous",
    "measure it each round: it is chosen nowhere",
)
def inexactness(prox_grad, anchor_grad):
    """Return |gradient of the proximal objective at the end| / |gradient of the loss at the start|;
    [..., d] -> [...]."""
    return _norm(prox_grad) / _norm(anchor_grad)


@claim(
    "Assumption 1, divergence",
    "conditional",
    "bounded on a run; over all x it is infinite for most losses",
)
def gradient_divergence(client_grads, impact):
    """Return max |grad l_i - grad L|; client_grads [..., clients, d], impact [clients] -> [...]."""
    return _norm(client_grads - _mean(client_grads, impact)[..., None, :]).max(-1)


@claim(
    "Lemma 1",
    "conditional",
    "infinite where grad L is 0 and clients differ: needs |grad L| bounded from below",
)
def dissimilarity_bound(divergence, grad_norm):
    """Return sqrt(1 + divergence^2 / |grad L|^2), never below `dissimilarity`."""
    return (1 + (divergence / grad_norm) ** 2) ** 0.5


@claim("Lemma 1, measured", "ours", "the mean, which Lemma 2 needs")
def dissimilarity(client_grads, impact):
    """Return a at one x, sum p |grad l_i| / |grad L|.

    Shapes:
        client_grads [..., clients, d], impact [clients] -> [...].
    """
    return (impact * _norm(client_grads)).sum(-1) / _norm(_mean(client_grads, impact))


@claim("Lemma 3, A'", "rigorous", "for alpha of the very round and grad L by the factors before it")
def dissimilarity_adaptive(a, alpha, client_grads, grad):
    """A' = A + sum alpha |grad l_i| / |grad L|; client_grads [clients, d], grad [d], alpha
    [clients] -> []."""
    return a + (alpha * _norm(client_grads)).sum(-1) / _norm(grad)


@claim(
    "Theorem 2, E|n|",
    "ours",
    "of a Gaussian in `dim` dimensions; the paper has the number of clients there",
)
def noise_norm_mean(dim: int, std):
    """Return E|n| = std sqrt(2) Gamma((dim + 1) / 2) / Gamma(dim / 2), a little below sqrt(dim)
    std.

    >>> [round(noise_norm_mean(d, 1.0), 7) for d in (1, 10, 1000)]
    [0.7978846, 3.0843278, 31.6148719]
    """
    return std * (math.sqrt(2) * math.exp(math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2)))


# --- one round


@claim(
    "Lemma 2", "conditional", "needs A finite; n is independent with mean 0, so `cross` may be 0"
)
def fedprox_lambdas(prox_mu, a, inexactness, smoothness, weak_convexity=0.0) -> Lambdas:
    """Return the constants of a round, by A of `dissimilarity`; with A' of `dissimilarity_adaptive`
    those of Lemma 3.

    Example:
        >>> [round(v, 7) for v in fedprox_lambdas(10, 1.5, 0.1, 1.0)]
        [-0.0548875, 1.165, 0.5]
    """
    drift = (1 + inexactness) / (prox_mu - weak_convexity)  # |x_i - x~| <= drift |grad l_i(x~)|
    return Lambdas(
        (a * (inexactness + smoothness * drift) - 1) / prox_mu + smoothness * (a * drift) ** 2 / 2,
        1 + smoothness * a * drift,
        smoothness / 2,
    )


@claim(
    "Lemma 3, extra term",
    "unsound",
    "sum alpha l reaches max l: p from (1, 0) to (0, 1), l = (0, 1)",
)
def adaptive_extra_printed(losses):
    """Return max l / 2, also where the impact factors do not change."""
    return losses.max(-1) / 2


@claim(
    "Lemma 3, extra term", "ours", "alpha adds up to 0, so any constant may be taken off the losses"
)
def adaptive_extra_term(alpha, losses):
    """Return sum |alpha| / 2 (max l - min l) >= sum alpha l, what new impact factors add to L;
    [..., clients] -> [...]."""
    return abs(alpha).sum(-1) / 2 * (losses.max(-1) - losses.min(-1))


# --- all rounds


def theorem2_constants(lambdas: Lambdas, c: Constants):
    """Return (k_2, k_1, k_0) of Theorem 2."""
    noise = c.clip_norm * c.factor * c.largest_impact / c.rows
    return (
        lambdas.square * c.grad_bound**2,
        2 * lambdas.cross * c.grad_bound * noise * (2 * c.clients / math.pi) ** 0.5,
        4 * lambdas.noise * noise**2,
    )


@claim(
    "Theorem 2",
    "unsound",
    "beta^2 for |grad L|^2 needs lambda_2 >= 0; N for d and none for N, max m for min m",
)
def theorem2_printed(lambdas: Lambdas, c: Constants, rounds, epsilon) -> Checked:
    """Return Theta + k_2 T + k_1 T^2 / epsilon + k_0 T^3 / epsilon^2, said to bound E[L(x~_T) -
    L*]: it can be negative.

    >>> c = Constants(2.3, 1.0, 10.0, 3.1075114601, 1 / 30, 150, 60)
    >>> lambdas = fedprox_lambdas(10, 1.5, 0.1, 1.0)
    >>> [round(theorem2_printed(lambdas, c, *v).value, 4) for v in ((30, 5), (100, 1e6))]
    [18.656, -3.1878]
    """
    return _printed(lambdas, c, rounds, epsilon, 0.0)


@claim(
    "Theorem 3",
    "unsound",
    "as Theorem 2, with an extra term that is too small, and is there without a change",
)
def theorem3_printed(lambdas: Lambdas, c: Constants, largest_loss, rounds, epsilon) -> Checked:
    """Return Theorem 2 with the lambdas of A', plus largest_loss / 2 per round."""
    return _printed(lambdas, c, rounds, epsilon, largest_loss / 2)


@claim("Theorem 2, replaced", "ours", "sums Lemma 2; no convexity of L is needed")
def stationarity_bound(lambdas: Lambdas, gap, rounds, std, dim: int, extra=0.0) -> Checked:
    """Return a bound on the least E|grad L(x~)|^2 of all rounds.

    It is [gap + extra + T noise E|n|^2] / (T |square|): the noise has mean 0, so `cross` adds
    nothing.

    Args:
        lambdas: constants of a round, from `fedprox_lambdas`.
        gap: L(x_0) - L*.
        rounds: T.
        std: std of the noise in a broadcast, including that of clients.
        dim: numbers in the model.
        extra: sum of `adaptive_extra_term` over the rounds, for impact factors that change; then
            `gap` is the first L at x_0 minus the minimum of the last L.

    It needs lambda_2 < 0.
    """
    value = ((gap + extra) / rounds + lambdas.noise * dim * std**2) / abs(lambdas.square)
    return checked(value, {"lambda_2 < 0": lambdas.square < 0})


@claim("Theorem 2, replaced", "ours", "for |grad L|^2 >= 2 pl (L - L*), as strong convexity has it")
def pl_gap_bound(lambdas: Lambdas, gap, rounds, std, dim: int, pl) -> Checked:
    """Return a bound on E[L(x~_T) - L*], with a = 1 + 2 pl lambda_2.

    It is a^T gap + (1 - a^T) / (1 - a) noise E|n|^2.
    Impact factors are constant.

    Args:
        lambdas, gap, rounds, std, dim: as in `stationarity_bound`.
        pl: the constant of the Polyak-Lojasiewicz condition.

    It needs 0 <= a < 1.
    """
    a = 1 + 2 * pl * lambdas.square
    inside, power = (a >= 0) & (a < 1), a**rounds
    value = power * gap + (1 - power) / (1 - a) * lambdas.noise * dim * std**2
    return checked(value, {"0 <= 1 + 2 pl lambda_2 < 1": inside})


# --- parts


def _norm(values):
    return (values**2).sum(-1) ** 0.5


def _mean(client_grads, impact):
    return (impact[:, None] * client_grads).sum(-2)


def _printed(lambdas, c, rounds, epsilon, extra):
    square, cross, noise = theorem2_constants(lambdas, c)
    value = (
        c.gap
        + (square + extra) * rounds
        + cross * rounds**2 / epsilon
        + noise * rounds**3 / epsilon**2
    )
    return checked(value, {"lambda_2 >= 0": lambdas.square >= 0})


# --- experiments


class Group(NamedTuple):
    """Clients whose rows are of one quality."""

    quality: str  # a key of DENSITY
    clients: int
    rows: int  # of each


class Scenario(NamedTuple):
    """Groups of clients and assignments of impact factors.

    Rounds are counted from 0. From round `swap_round` on, the first and the last group swap
    their qualities.
    """

    groups: tuple[Group, ...]
    # name -> ratios by group, for each stage; the second one begins at swap_round
    assignments: MappingProxyType
    swap_round: int | None = None


class Run(NamedTuple):
    """One curve of a figure: a key of `assignments`, and epsilon, None without noise."""

    assignment: str
    epsilon: float | None = None


def ratios_at(scenario: Scenario, assignment: str, round_: int) -> tuple[int, ...]:
    """Return the ratios by group in a round; `talaei2024.assign_impact` makes impact factors of
    them.

    >>> [ratios_at(SCENARIOS[4], "adaptive", t) for t in (9, 10)]
    [(0, 1, 2), (2, 1, 0)]
    """
    stages = scenario.assignments[assignment]
    return stages[-1 if scenario.swap_round is not None and round_ >= scenario.swap_round else 0]


def qualities_at(scenario: Scenario, round_: int) -> tuple[str, ...]:
    """Return the qualities by group in a round."""
    qualities = tuple(group.quality for group in scenario.groups)
    return (
        qualities
        if scenario.swap_round is None or round_ < scenario.swap_round
        else (qualities[-1], *qualities[1:-1], qualities[0])
    )


def _scenario(groups, *ratios, swap_round=None, **stages):
    names = {"equal" if len(set(r)) == 1 else "-".join(map(str, r)): (r,) for r in ratios}
    return Scenario(tuple(Group(*g) for g in groups), MappingProxyType(names | stages), swap_round)


ROUNDS, LR, DELTA, EPSILONS = 30, 0.02, 0.01, (5.0, 20.0)
# not given: the density of salt and pepper noise, the rows of scenarios 2 and 4, and some of the
# assignments
DENSITY = MappingProxyType({"severe": 0.5, "moderate": 0.25, "slight": 0.05, "clean": 0.0})
SCENARIOS = MappingProxyType(
    {
        1: _scenario(
            (("severe", 20, 150), ("moderate", 20, 150), ("clean", 20, 150)),
            (1, 1, 1),
            (0, 1, 2),
            (1, 2, 3),
            (0, 0, 1),
            (0, 1, 1),
        ),
        2: _scenario(
            (("severe", 20, 150), ("slight", 35, 150), ("clean", 5, 150)),
            (1, 1, 1),
            (0, 2, 1),
            (0, 1, 1),
            (0, 1, 2),
            (0, 0, 1),
        ),
        3: _scenario(
            (("clean", 20, 50), ("clean", 20, 120), ("clean", 20, 271)),
            (1, 1, 1),
            (1, 3, 5),
            (50, 120, 271),
        ),
        4: _scenario(
            (("severe", 20, 150), ("moderate", 20, 150), ("slight", 20, 150)),
            (1, 1, 1),
            (0, 1, 2),
            swap_round=10,
            adaptive=((0, 1, 2), (2, 1, 0)),
        ),
    }
)


def _plain(scenario):
    return tuple(map(Run, SCENARIOS[scenario].assignments))


def _noisy(best):
    return Run(best, 5.0), Run(best, 20.0), Run("equal", 20.0)


def _below(lower, *higher):
    return tuple((lower, run) for run in higher if run != lower)


# figure -> scenario and runs; and, by figure, pairs of runs: the first is to end with the smaller
# loss
FIGURES = MappingProxyType(
    {
        "fig2": (1, _plain(1)),
        "fig3": (1, _noisy("0-1-2")),
        "fig4": (2, _plain(2)),
        "fig5": (2, _noisy("0-2-1")),
        "fig6": (3, _plain(3)),
        "fig7": (3, _noisy("1-3-5")),
        "fig8": (4, _plain(4)),
        "fig9": (4, _noisy("adaptive")[:2]),
    }
)
STATEMENTS = MappingProxyType(
    {
        "fig2": (*_below(Run("0-1-2"), *_plain(1)), *((r, Run("equal")) for r in _plain(1)[2:])),
        "fig3": (
            *_below(Run("0-1-2", 20.0), Run("0-1-2", 5.0)),
            *_below(Run("0-1-2", 5.0), Run("equal", 20.0)),
        ),
        "fig4": _below(Run("0-2-1"), *_plain(2)),
        "fig5": _below(Run("0-2-1", 20.0), Run("equal", 20.0)),
        "fig6": tuple((r, Run("equal")) for r in _plain(3)[1:]),
        "fig7": _below(Run("1-3-5", 20.0), Run("equal", 20.0)),
        "fig8": _below(Run("adaptive"), *_plain(4)),
        "fig9": _below(Run("adaptive", 20.0), Run("adaptive", 5.0)),
    }
)
