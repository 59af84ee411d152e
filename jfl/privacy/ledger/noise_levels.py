"""How much noise a mechanism adds in each round, to each client."""

import numpy as np

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.records import Fn, Plan
from ..mechanisms.chain import multiplier_changes, multiplier_follows, multipliers, noisy


def levels(mechanism, rounds: int, clients: int, max_weight=lambda round_: 1.0):
    """Noise multipliers [rounds or 1, clients or 1]: one row unless they change, one column unless
    clients differ."""
    noise = np.asarray(multipliers(mechanism, rounds, max_weight))
    noise = noise if multiplier_changes(mechanism) else noise[None]
    noise = noise if noise.ndim == 2 else noise[:, None]
    if noise.shape[1] not in (1, clients):
        checks.fail(
            "jfl.guarantee",
            f"one noise level, or one for each of {clients} clients",
            f"{noise.shape[1]}",
            error=NotAnalysable,
        )
    return usable(noise)


def usable(multipliers):
    """Multipliers that are positive and finite in every round; others are refused."""
    if not (np.all(multipliers > 0) and np.all(np.isfinite(multipliers))):
        checks.fail(
            "jfl.guarantee",
            "clip norms and noise > 0 in every round",
            f"noise multipliers {np.min(multipliers)}",
            error=NotAnalysable,
        )
    return multipliers


def changing(plan: Plan) -> bool:
    """True if the noise is not the same in every round."""
    fixed_std = noisy(plan.release) and not multiplier_follows(plan.release)
    return ((fixed_std or noisy(plan.upload)) and isinstance(plan.weights, Fn)) or any(
        multiplier_changes(m)
        for m in (plan.upload, plan.release, *(r.mechanism for r in plan.algorithm.releases))
    )
