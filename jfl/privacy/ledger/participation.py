"""How often clients participate: the planned worst case, or as an option of `guarantee` states."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from ...core import checks
from ...core.records import Caveat, Plan
from ..mechanisms.correlated import strategy_of
from .caveats import ASSERTED, EVERY_ROUND, LIKELY, SEEN
from .entry import Entry, worst_columns
from .facts import OTHER, SCHEMES, attendance


class Participations(NamedTuple):
    """The maximum number of participations of each client, and what it assumes."""

    most: np.ndarray  # Int[C]
    beta: float = 0.0  # probability that a client exceeds the maximum; part of delta
    status: str = "proved"
    caveats: tuple = ()


def participations(
    plan: Plan, entry: Entry, rounds: int, delta: float, options: dict
) -> Participations:
    """Return the maximum number of participations of each client in `rounds` rounds.

    This is the planned worst case, unless one of the options states otherwise.

    Args:
        plan: a Plan.
        entry: an entry of its ledger.
        rounds: the number of rounds.
        delta: the delta of the guarantee.
        options: `cap`, `quantile` and `realised`, as in `jfl.guarantee`.  At most one of them is
            not None.

    Raises:
        ValueError: if several options are given, if one is out of range, or if the view of the
            entry is not "server".
    """
    sampler, where = plan.sampler, "jfl.guarantee"
    given = [name for name, v in options.items() if v is not None]
    drawn, clients = attendance(sampler), np.size(plan.fed.size)
    trials = rounds * drawn.turns
    planned = Participations(
        np.full(clients, trials), caveats=(EVERY_ROUND,) * (sampler.scheme != "full")
    )
    if not given:
        return planned
    if entry.view != "server":
        checks.fail(
            where,
            "view='server' with cap, quantile or realised",
            f"view={entry.view!r}",
            "A third party does not see who participates: its guarantee counts the probability of "
            "participation already.",
        )
    if len(given) > 1:
        checks.fail(where, "one of cap, quantile and realised", " and ".join(given))
    cap, quantile, realised = (options[name] for name in ("cap", "quantile", "realised"))
    if cap is not None:
        checks.require_integer(where, cap=cap)
        caveat = Caveat(ASSERTED.format(cap), "cap")
        return Participations(np.minimum(planned.most, cap), 0.0, "conditional", (caveat,))
    if realised is not None:
        seen = checks.as_array(where, "realised", realised)
        most = -(-rounds // sampler.separation) * drawn.turns
        whole = seen.shape == (clients,) and seen.dtype.kind in "iu"
        if not (whole and ((seen >= 0) & (seen <= most)).all()):
            words = f"realised: whole numbers in 0..{most}, Int[{clients}]"
            checks.fail(where, words, f"{realised!r}")
        return Participations(seen, 0.0, "descriptive", (SEEN,))
    checks.require_fraction(where, single=True, quantile=quantile)
    if not quantile < delta:
        checks.fail(
            where,
            "quantile < delta",
            f"quantile={quantile:g}, delta={delta:g}",
            "It is a part of delta; a tenth of delta is usual.",
        )
    if not SCHEMES.get(sampler.scheme, OTHER).absence:
        return planned
    from scipy import stats  # half a second: not at import

    chance = np.broadcast_to(drawn.chance, clients)
    most = stats.binom.isf(float(quantile), trials, chance).astype(int)
    caveat = Caveat(LIKELY.format(quantile), "quantile")
    return Participations(np.minimum(most, trials), float(quantile), "proved", (caveat,))


def counted(plan: Plan, entry: Entry, rounds: int, often: np.ndarray) -> Entry:
    """Return the entry of a whole run in which each client participates a known number of times.

    Args:
        plan: a Plan.
        entry: the entry of its ledger for each round, for noise that clients add.
        rounds: the number of rounds of the run.
        often: Int[C], the maximum number of participations of each client in the run.

    Returns:
        The entry with `rounds` and `participations` set, for the clients that may be the worst off
        with these numbers.  Its overflow is the probability for the whole run.

    Raises:
        ValueError: if the server adds the noise.
    """
    if entry.noise_of == "server":
        checks.fail(
            "jfl.guarantee",
            "noise that clients add, with cap, quantile or realised",
            "noise of the release",
        )
    if any(part.joint for part in entry.parts):
        # all participations are one release, because a client's noise is correlated over them
        levels, which = np.unique(often, return_inverse=True)
        moved = np.array([_sensitivity(plan, rounds, int(n)) for n in levels])
        with np.errstate(divide="ignore"):
            factor = 1 / moved[which.reshape(-1)][None]
        parts = tuple(dataclasses.replace(p, factor=factor) for p in entry.parts)
        entry = entry._replace(parts=parts)
        often = np.minimum(often, 1)
    rows, by_rows = np.asarray(plan.fed.size).reshape(-1), entry.row_overflow is not None
    holds = rows > 0 if entry.unit == "example" else np.ones(rows.shape, bool)
    active = np.flatnonzero((often > 0) & holds)
    # more rows overflow more often: the one who loses most is not the one who gains least
    by_row: Any = entry.row_overflow
    lost = (by_row[active] * often[active]).max(initial=0.0) if by_rows else None
    return entry._replace(
        rounds=rounds,
        participations=often,
        worst=worst_columns(
            rows if by_rows else np.zeros(len(rows), int),
            often,
            [p.noise for p in entry.parts],
            active,
        ),
        # the noise on an upload is not drawn by rows: what may overflow is the cohort, every round
        overflow=entry.overflow * rounds if lost is None else float(lost),
    )


def _sensitivity(plan: Plan, rounds: int, participations: int) -> float:
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
