"""Epsilons of single clients, and guarantees for clients that take part less often than every
round."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..core import checks
from ..core.records import Caveat, Plan
from ..verify import check as verify
from .entry_guarantees import choices, choose, entries_of, guarantee_of, overflowing
from .ledger.entries import EVERY_ROUND
from .ledger.entry import Entry, effective, of_client, worst_columns
from .ledger.facts import OTHER, SCHEMES, chance_of, share_of, turns
from .mechanisms.correlated import strategy_of

KINDS = 64  # of clients, for each of which a privacy-loss distribution is computed
ASSERTED = "Assumes, without enforcing it, that no client participates more than {} times."
LIKELY = (
    "Assumes honest sampling that is independent of the data. Delta includes the probability {:g} "
    "that a client participates more often than assumed."
)
SEEN = Caveat(
    "Describes this run, with the participations that occurred; it is not a guarantee.", "realised"
)


def epsilons_per_client(
    plan: Plan,
    rounds: int,
    delta: float = 1e-5,
    view: str | None = None,
    *,
    cap: int | None = None,
    quantile: float | None = None,
    realised=None,
) -> np.ndarray:
    """Return the epsilon of the examples of each client, which its rows, its participation and its
    noise decide.

    Args:
        plan: a Plan.
        rounds: how many rounds are run.
        delta: in (0, 1).
        view: "server" or "third_party"; None: the view that
            jfl.guarantee(plan, rounds, delta, "example") names.
        cap: as in `jfl.guarantee`.
        quantile: as in `jfl.guarantee`.
        realised: Int[C], as in `jfl.guarantee`.

    Returns:
        Float64[C]; 0 for a client without rows or rounds, inf without noise.

    Privacy:
        unit "example", for the adjacency of the plan; sizes and rates are public.  The largest is
        `guarantee`'s, or a little below it; of more than 64 different clients, Renyi bounds only,
        which may be above it.

    Raises:
        ValueError: as `jfl.guarantee`.
    """
    sizes = np.asarray(plan.fed.size).reshape(-1)
    listed = entries_of(plan, rounds, delta)
    if not listed:
        return np.where(sizes > 0, math.inf, 0.0)
    choices(None, view, None)
    entry = choose("jfl.epsilons_per_client", plan, listed, "example", view, None)
    verify.warn_if_conditional("jfl.epsilons_per_client", entry)
    if entry.noise_of == "server":  # it protects all clients alike
        return np.where(sizes > 0, guarantee_of(entry, rounds, delta).epsilon, 0.0)

    def value(entry, left, tightly):
        if tightly:
            return guarantee_of(entry, 1, left).epsilon
        return overflowing(entry, np.ones(1), left)[0][0]

    levels = [np.broadcast_to(z, (len(z), len(sizes))) for z in map(effective, entry.parts)]
    options = dict(cap=cap, quantile=quantile, realised=realised)
    return for_each_client(plan, entry, rounds, delta, options, levels, value)


def for_each_client(
    plan: Plan, entry: Entry, rounds, delta, options: dict, differ: list, value: Callable
) -> np.ndarray:
    """Return a value of each client, Float64[C]: computed once for clients that are alike, 0 for a
    client without rows or rounds.

    Args:
        plan: of the entry.
        entry: with noise of the client's own.
        rounds: of the run.
        delta: of the guarantee.
        options: cap, quantile and realised.
        differ: arrays [n, C], in which clients differ beside their rows and participation.
        value: of the entry of a client's whole run, the delta that is left, and whether there are
            few kinds of clients.
    """
    sizes = np.asarray(plan.fed.size).reshape(-1)
    often = participations(plan, entry, rounds, delta, options)
    extent, left = often.most, delta - often.beta
    if entry.view == "server":
        whole = counted(plan, entry, rounds, extent)
    else:
        extent = np.broadcast_to(share_of(plan.sampler), sizes.shape)
        whole = entry._replace(rounds=rounds)
    lost: Any = entry.overflow * rounds
    if entry.row_overflow is not None:
        lost = entry.row_overflow * (extent if entry.view == "server" else entry.turns * rounds)
    lost = np.broadcast_to(lost, sizes.shape)
    _, first, which = np.unique(
        np.vstack([sizes, extent, *differ]), axis=1, return_index=True, return_inverse=True
    )
    each = np.zeros(len(first))
    for i, client in enumerate(first):
        if sizes[client] and extent[client]:
            alone = of_client(whole, client)._replace(overflow=float(lost[client]))
            each[i] = value(alone, left, len(first) <= KINDS)
    return each[which.reshape(-1)]


class Often(NamedTuple):
    """How often each client takes part, at most, and what that rests on."""

    most: np.ndarray  # Int[C]
    beta: float = 0.0  # probability that a client exceeds it, a part of delta
    status: str = "proved"
    caveats: tuple = ()


def participations(plan: Plan, entry: Entry, rounds: int, delta: float, options: dict) -> Often:
    """Return how often each client takes part in `rounds` rounds: the planned worst case, or as an
    option says.

    Args:
        plan: says who takes part.
        entry: of its ledger.
        rounds: how many rounds are run.
        delta: of the guarantee.
        options: cap, participations that no client exceeds, which the engine does not enforce;
            quantile, the probability with which a client may exceed the number that counts for it;
            realised, Int[C], the participations as they happened; at most one of them is not None.

    Raises:
        ValueError: unless at most one is given, and in range, for what the server sees.
    """
    sampler, where = plan.sampler, "jfl.guarantee"
    given = [name for name, v in options.items() if v is not None]
    clients, trials = np.size(plan.fed.size), rounds * turns(sampler)
    planned = Often(np.full(clients, trials), caveats=(EVERY_ROUND,) * (sampler.scheme != "full"))
    if not given:
        return planned
    if entry.view != "server":
        checks.fail(
            where,
            "view='server' beside cap, quantile or realised",
            f"view={entry.view!r}",
            "A third party does not see who takes part: its guarantee counts the chance of that "
            "already.",
        )
    if len(given) > 1:
        checks.fail(where, "one of cap, quantile and realised", " and ".join(given))
    cap, quantile, realised = (options[name] for name in ("cap", "quantile", "realised"))
    if cap is not None:
        checks.require_integer(where, cap=cap)
        caveat = Caveat(ASSERTED.format(cap), "cap")
        return Often(np.minimum(planned.most, cap), 0.0, "conditional", (caveat,))
    if realised is not None:
        seen = checks.as_array(where, "realised", realised)
        most = -(-rounds // sampler.separation) * turns(sampler)
        whole = seen.shape == (clients,) and seen.dtype.kind in "iu"
        if not (whole and ((seen >= 0) & (seen <= most)).all()):
            words = f"realised: whole numbers in 0..{most}, Int[{clients}]"
            checks.fail(where, words, f"{realised!r}")
        return Often(seen, 0.0, "descriptive", (SEEN,))
    checks.require_fraction(where, single=True, quantile=quantile)
    if not quantile < delta:
        checks.fail(
            where,
            "quantile < delta",
            f"quantile={quantile:g}, delta={delta:g}",
            "It is a part of delta: a tenth is usual.",
        )
    if not SCHEMES.get(sampler.scheme, OTHER).absence:
        return planned
    from scipy import stats  # half a second: not at import

    chance = np.broadcast_to(chance_of(sampler), clients)
    most = stats.binom.isf(float(quantile), trials, chance).astype(int)
    caveat = Caveat(LIKELY.format(quantile), "quantile")
    return Often(np.minimum(most, trials), float(quantile), "proved", (caveat,))


def counted(plan: Plan, entry: Entry, rounds: int, often: np.ndarray) -> Entry:
    """Return the entry of a whole run, in which each client takes part so `often`, Int[C]."""
    if entry.noise_of == "server":
        checks.fail(
            "jfl.guarantee",
            "noise of the client's own beside cap, quantile or realised",
            "noise of the release",
        )
    if any(part.joint for part in entry.parts):
        # all participations are one release, because a client's noise is correlated over them
        levels, which = np.unique(often, return_inverse=True)
        moved = np.array([_sensitivity(plan, rounds, int(n)) for n in levels])
        with np.errstate(divide="ignore"):
            factor = 1 / moved[which.reshape(-1)][None]
        entry = entry._replace(parts=tuple(p._replace(factor=factor) for p in entry.parts))
        often = np.minimum(often, 1)
    rows, by_rows = entry.clients.rows, entry.row_overflow is not None
    active = np.intersect1d(np.flatnonzero(often > 0), entry.clients.counted)
    # more rows overflow more often: the one who loses most is not the one who gains least
    by_row: Any = entry.row_overflow
    lost = (by_row[active] * often[active]).max(initial=0.0) if by_rows else None
    return entry._replace(
        rounds=rounds,
        participations=often,
        worst=worst_columns(
            rows if by_rows else np.zeros(len(rows), int),
            often,
            [effective(p) for p in entry.parts],
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
