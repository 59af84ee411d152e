"""Releases whose rounds do not stand alone: noise that is correlated over rounds, and clients that
take turns.

Rounds of correlated noise are one Gaussian release of C times what the rounds sum.  Its precision
after each round is known, and what a round adds to it is the precision of one Gaussian release:
that is how such a run stands among others, with an epsilon after each round.
"""

from typing import Any

import numpy as np

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.records import Plan, Sampler
from ..mechanisms.correlated import covers, strategy_of

# schemes in which a client takes part once in an epoch, in a round that is drawn and not seen
ALLOCATED = ("random_allocation", "balls_in_bins")
MANY = 10**6  # rounds, of which no table is made


def spread(
    plan: Plan, noise: np.ndarray, rounds: int, adjacency: str
) -> tuple[np.ndarray | None, str]:
    """What the noise of each round is worth as an independent release about one client, and the
    name of the mechanism.

    Args:
        plan: a plan whose release is noisy.
        noise: [rounds or 1, 1], std of fresh noise over the sensitivity of a round.
        rounds: how many of its rounds are looked at.
        adjacency: of the guarantee.

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
        in_turns = separation > 1 or plan.sampler.epoch > 1
        if not in_turns or len(noise) > 1 or rounds > MANY:
            return None, ""
        if plan.sampler.scheme in ALLOCATED:
            return _of_allocation(plan.sampler, rounds, adjacency), ""
        return _of_one_group(rounds, separation), ""
    _fits(plan.release, separation, rounds, plan.sampler.scheme)
    if amplifies(plan):
        alone = _of_one_group(rounds, separation) / strategy.largest_column()
        return alone, "banded_cyclic_poisson"
    return _of_strategy(strategy, rounds, separation), "matrix_gaussian"


def of_uploads(plan: Plan, rounds: int) -> np.ndarray | None:
    """As `spread`, of noise on uploads that is correlated over rounds; None where it is not.

    A client's noise goes on through rounds in which it does not come, in which it adds nothing.
    """
    strategy, sampler = strategy_of(plan.upload), plan.sampler
    if strategy is None:
        return None
    once_a_round(sampler)
    _fits(plan.upload, sampler.separation, rounds, sampler.scheme)
    return _of_strategy(strategy, rounds, sampler.separation)


def sensitivity_to(plan: Plan, rounds: int, participations: int) -> float:
    """Return the sensitivity of the first `rounds` rounds of correlated upload noise to a client
    that takes part at most `participations` times, in units of one round's."""
    strategy: Any = strategy_of(plan.upload)
    separation = plan.sampler.separation
    planned = float(np.sqrt(strategy.squared_sensitivities(rounds, separation)[-1]))
    if participations >= -(-rounds // separation):
        return planned
    if participations == 0:
        return 0.0
    # the strategy may cover more rounds than are run
    return min(planned, strategy.sensitivity(participations, separation, epochs=True))


def once_a_round(sampler: Sampler) -> None:
    """Refuse a sampler beside correlated noise whose clients may add several times as much."""
    if sampler.scheme == "with_replacement":
        checks.fail(
            "jfl.guarantee",
            "a sampler that draws a client once a round beside correlated noise",
            "sampling.with_replacement",
            "Use sampling.min_separation or sampling.without_replacement.",
            error=NotAnalysable,
        )


def _fits(mechanism, separation, rounds, scheme):
    covers("jfl.guarantee", mechanism, rounds)
    strategy: Any = strategy_of(mechanism)
    if strategy.separation > separation:
        checks.fail(
            "jfl.guarantee",
            f"a sampler whose clients stay away for {strategy.separation} rounds, for which the "
            f"strategy was made",
            f"sampling.{scheme}, with separation {separation}",
            "Use sampling.min_separation or sampling.cyclic_poisson, or a strategy for "
            "separation=1.",
            error=NotAnalysable,
        )


def _of_strategy(strategy, rounds, separation):
    added = np.diff(strategy.squared_sensitivities(rounds, separation), prepend=0.0)
    with np.errstate(divide="ignore"):
        each = np.where(added > 0, 1 / np.sqrt(np.maximum(added, 0)), np.inf)
    return each[:, None]


def _of_allocation(sampler, rounds, adjacency):
    """A release in the first round of every epoch; of bins that stay, where a client is in one of
    them unseen, all its rounds at once."""
    number = np.arange(rounds)[:, None]
    each = np.where(number % sampler.epoch == 0, 1.0, np.inf)
    if sampler.scheme == "random_allocation" or adjacency == "replace_one":
        return each
    epochs = -(-rounds // sampler.epoch)
    return np.where(number == 0, epochs**-0.5, np.inf)


def begun(where: str, plan: Plan, first: int) -> None:
    """Refuse a part of a run that begins where a client may have taken part already."""
    sampler = plan.sampler
    if sampler.scheme in ALLOCATED and (first % sampler.epoch or sampler.scheme == "balls_in_bins"):
        checks.fail(
            where,
            f"a run with sampling.{sampler.scheme} from its round 0 on"
            + f", or from a multiple of {sampler.epoch}" * (sampler.scheme != "balls_in_bins"),
            f"a part that begins with round {first}",
            "Give the rounds of one plan as one segment, (plan, rounds, 0).",
            error=NotAnalysable,
        )


def allocates(plan: Plan, of_rounds: np.ndarray | None, adjacency: str) -> bool:
    """True if it is a gain that nobody knows in which round of an epoch a client takes part."""
    independent = strategy_of(plan.release) is None and of_rounds is not None
    return independent and adjacency != "replace_one"


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
