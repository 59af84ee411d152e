"""Releases whose rounds do not stand alone: noise that is correlated over rounds, and clients that
take turns.

Rounds of correlated noise are one Gaussian release of C times what the rounds sum.  Its precision
after each round is known, and what a round adds to it is the precision of one Gaussian release:
that is how such a run stands among others, with an epsilon after each round.
"""

import numpy as np

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.records import Plan
from ..mechanisms.correlated import covers, strategy_of

MANY = 10**6  # rounds, of which no table is made


def spread(plan: Plan, noise: np.ndarray, rounds: int) -> tuple[np.ndarray | None, str]:
    """What the noise of each round is worth as an independent release about one client, and the
    name of the mechanism.

    Args:
        plan: a plan whose release is noisy.
        noise: [rounds or 1, 1], std of fresh noise over the sensitivity of a round.
        rounds: how many of its rounds are looked at.

    Returns:
        [rounds, 1]: times the noise, the multipliers of independent Gaussian releases that are
        worth what all rounds release about a client, inf for a round that adds nothing; None
        where each round is what it is.  And "matrix_gaussian" or "banded_cyclic_poisson" for
        correlated noise, "" for other.

    Raises:
        NotAnalysable: for more rounds than a strategy covers; for a sampler that does not keep the
            participations of a client as far apart as the strategy was made for.
    """
    strategy, separation = strategy_of(plan.release), plan.sampler.separation
    if strategy is None:
        if separation == 1 or len(noise) > 1 or rounds > MANY:
            return None, ""
        return _of_one_group(rounds, separation), ""
    covers("jfl.guarantee", plan.release, rounds)
    if strategy.separation > separation:
        checks.fail(
            "jfl.guarantee",
            f"a sampler whose clients stay away for {strategy.separation} rounds, for which the "
            f"strategy was made",
            f"sampling.{plan.sampler.scheme}, with separation {separation}",
            "Use sampling.min_separation or sampling.cyclic_poisson, or a strategy for "
            "separation=1.",
            error=NotAnalysable,
        )
    if amplifies(plan):
        alone = _of_one_group(rounds, separation) / strategy.largest_column()
        return alone, "banded_cyclic_poisson"
    added = np.diff(strategy.squared_sensitivities(rounds, separation), prepend=0.0)
    with np.errstate(divide="ignore"):
        each = np.where(added > 0, 1 / np.sqrt(np.maximum(added, 0)), np.inf)
    return each[:, None], "matrix_gaussian"


def _of_one_group(rounds, separation):
    """1 in the rounds of the first group, which comes most often."""
    return np.where(np.arange(rounds)[:, None] % separation == 0, 1.0, np.inf)


def amplifies(plan: Plan) -> bool:
    """True if the chance of a round counts beside correlated noise: what a client adds in two
    rounds of its group never meets in one release."""
    strategy, sampler = strategy_of(plan.release), plan.sampler
    return (
        sampler.scheme == "cyclic_poisson"
        and strategy is not None
        and strategy.width <= sampler.separation
    )
