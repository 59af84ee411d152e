"""Guarantees of a plan: what the ledger lists, at its smallest proved epsilon.

Everything here runs on the host, on concrete numbers.
"""

import math
from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike

from ..core import checks
from ..core.errors import NotAnalysable
from ..core.records import Caveat, Guarantee, Plan, code_of
from ..verify import check as verify
from .accountants.rdp_events import check_delta
from .accountants.rdp_events import curve as curve
from .accountants.tightest import delta as delta
from .accountants.tightest import epsilon as epsilon
from .accountants.tightest import solve_noise as solve_noise
from .accountants.tightest import solve_rate as solve_rate
from .accountants.tightest import solve_rounds as solve_rounds
from .entry_guarantees import MOST, choices, choose, entries_of, guarantee_of, overflowing
from .ledger import entries as ledger
from .ledger import segments
from .per_client import counted, participations
from .per_client import epsilons_per_client as epsilons_per_client

BARE = Caveat("No privacy: no mechanism of this plan adds noise.", "no-noise")


def guarantees(plan: Plan, rounds: int, delta: float = 1e-5) -> tuple[Guarantee, ...]:
    """Return every guarantee that the noise of a plan proves for `rounds` rounds; () if none.

    Raises:
        ValueError: unless rounds is whole and delta in (0, 1).
    """
    proved = []
    for entry in entries_of(plan, rounds, delta):
        try:
            proved.append(guarantee_of(entry, rounds, delta))
        except NotAnalysable:  # guarantee(unit, view) says why
            pass
    return tuple(proved)


def guarantee(
    plan: Plan | Sequence,
    rounds: int | None = None,
    delta: float = 1e-5,
    unit: str | None = None,
    view: str | None = None,
    adjacency: str | None = None,
    *,
    cap: int | None = None,
    quantile: float | None = None,
    realised: ArrayLike | None = None,
    uplinks: int = 0,
    seeds: Sequence[int] | str | None = None,
) -> Guarantee:
    """Return the proved guarantee of a run of a plan, for one unit and view.

    It holds for every client and row, so it is that of the worst case.  The server sees who
    participates, so by default every client counts as participating in every round; one of `cap`,
    `quantile` and `realised` replaces this assumption.

    Args:
        plan: a Plan.  Without `rounds`, a list of segments on the same clients: (plan, rounds)
            continues where the segment before it ended, as simulate(start=...) does, and
            (plan, rounds, first) begins with round `first`, which is 0 for a new run.
        rounds: the number of rounds of the plan.
        delta: the delta of the guarantee, in (0, 1).
        unit: "example" or "client".  None means the only unit for which something is proved.
        view: what the observer sees: "server", every upload; "third_party", the models;
            "aggregate", the sums of uploads; "personal", every upload and the clients' personal
            models.  None means the only view with an answer, or "server" if several have one.
        adjacency: "add_remove", "replace_one" or "zero_out".  It is only needed if several are
            proved.
        cap: the maximum number of rounds in which any client participates.  It is assumed; nothing
            enforces it.
        quantile: the probability with which a client may participate in more rounds than are
            counted.  It is taken from delta.
        realised: Int[C], the numbers of rounds in which clients did participate.  The result
            describes that run and is not a guarantee.
        uplinks: the number of uploads of a client that a third party sees in addition to all
            models.
        seeds: which segments share a seed: "different", or an integer per segment.  None means one
            seed for all of them.  Segments with the same seed share cohorts and batches, so their
            rounds must not overlap.  It is assumed, not checked.

    Returns:
        A Guarantee.  It names the unit, adjacency and view, the method, and as caveats all that it
        assumes or does not cover.

    Privacy:
        The guarantee covers the planned rounds, whatever the data are.  A plan without noise has
        epsilon = inf and status "none".

    Raises:
        ValueError: If not exactly one guarantee fits the arguments, with the choices; or if this
            accountant cannot analyse the plan, with the reason and a remedy.

    Example:
        Ten rounds of one plan followed by 90 rounds of another:

        >>> jfl.guarantee([(plan_a, 10), (plan_b, 90)])  # doctest: +SKIP
    """
    where, options = "jfl.guarantee", dict(cap=cap, quantile=quantile, realised=realised)
    as_planned = all(v is None for v in options.values())
    checks.require_integer(where, min_value=0, max_value=MOST, uplinks=uplinks)
    if not isinstance(plan, Plan):
        if uplinks or rounds is not None or not as_planned:
            checks.fail(
                where,
                "a Plan and rounds, or a list of (plan, rounds) alone",
                f"rounds={rounds!r} or other options beside segments",
                "Participation options and uplinks are for one plan.",
            )
        return _of_segments(plan, delta, unit, view, adjacency, seeds)
    if seeds is not None:
        checks.fail(where, "a list of segments beside seeds", "one plan", "One run has one seed.")
    entries = entries_of(plan, rounds, delta)
    assert rounds is not None  # `entries_of` checks it
    choices(unit, view, adjacency)
    if not entries:
        return _bare(delta, unit, adjacency, view)
    if uplinks:
        return _leaking(plan, rounds, uplinks, delta, unit, view, adjacency, as_planned)
    entries = [ledger.personal(plan, rounds)] if view == "personal" else entries
    entry = choose(where, plan, entries, unit, view, adjacency)
    if as_planned:
        return guarantee_of(entry, rounds, delta)
    often = participations(plan, entry, rounds, delta, options)
    entry = counted(plan, entry, rounds, often.most)
    kept = tuple(c for c in entry.caveats if code_of(c) != ledger.EVERY_ROUND.code)
    proved = guarantee_of(entry._replace(caveats=kept + often.caveats), 1, delta - often.beta)
    status = proved.status if often.status == "proved" else often.status
    behind = proved.release._replace(extra=often.beta)
    return proved._replace(delta=float(delta), status=status).about(behind)


def epsilons(
    plan: Plan,
    rounds: ArrayLike,
    delta: float = 1e-5,
    unit: str | None = None,
    view: str | None = None,
    adjacency: str | None = None,
) -> np.ndarray:
    """Return epsilon after each of several numbers of rounds, at the cost of about one.

    These are Renyi bounds and exact Gaussians.  `guarantee` also tries privacy-loss distributions,
    and may return a slightly smaller value.

    Args:
        plan: a Plan.
        rounds: Int[m], numbers of rounds >= 0.
        delta: in (0, 1).
        unit: as in `guarantee`.
        view: as in `guarantee`, which says which view None means.
        adjacency: as in `guarantee`.

    Returns:
        Float64[m], which does not decrease as the number of rounds grows.

    Raises:
        ValueError: See `guarantee`.
    """
    times = checks.as_array("jfl.epsilons", "rounds", rounds)
    if times.ndim != 1 or times.dtype.kind not in "iu" or (times < 0).any():
        checks.fail("jfl.epsilons", "rounds: whole numbers >= 0, Int[m]", f"{rounds!r}")
    entries = entries_of(plan, max(int(times.max(initial=1)), 1), delta)
    choices(unit, view, adjacency)
    if not entries or not times.size:
        return np.where(times > 0, math.inf, 0.0)
    entry = choose("jfl.epsilons", plan, entries, unit, view, adjacency)
    verify.warn_if_conditional("jfl.epsilons", entry)
    return overflowing(entry, times, delta)[0]


def _leaking(plan, rounds, uplinks, delta, unit, view, adjacency, as_planned):
    """Return the guarantee of a run if a third party also sees some uploads of each client.

    A round in which a client's upload is seen costs as much as that upload, because the model of
    the round shows nothing more about the client.  In rounds in which the uploads of other clients
    are seen, their noise does not hide the client.  The worst case is that all of these are the
    same rounds, and none of them is one of the client's, because 1 / variance is convex.
    """
    if view != "third_party" or not as_planned or uplinks > rounds:
        checks.fail(
            "jfl.guarantee",
            "view='third_party' and at most `rounds` beside uplinks, and no cap, quantile or "
            "realised",
            f"view={view!r}, uplinks={uplinks}, rounds={rounds}",
            "The server sees all uploads.",
        )
    pick = lambda view, others: choose(
        "jfl.guarantee", plan, ledger.entries(plan, rounds, others), unit, view, adjacency
    )
    seen, alone, rest = pick("server", True), pick(view, False), pick(view, True)
    if (seen.unit, seen.adjacency) != (rest.unit, rest.adjacency):
        checks.fail(
            "jfl.guarantee",
            "one unit and adjacency for uploads and models",
            f"{seen.unit}, {seen.adjacency}; {rest.unit}, {rest.adjacency}",
            "Give unit= and adjacency=.",
        )
    if seen.changes or rest.changes:  # whichever rounds leak: count both in all of them
        times = ((seen, rounds), (alone, rounds))
    else:
        exposed = min(uplinks, rounds - uplinks)
        times = ((seen, uplinks), (alone, exposed), (rest, rounds - uplinks - exposed))
    parts, times = zip(*((e, n) for e, n in times if n))
    joined = segments.joined(parts, times)
    assumed = f"Assumes that the third party sees at most {uplinks} uploads of each client."
    caveats = joined.caveats + (Caveat(assumed, "uplinks"),)
    return guarantee_of(joined._replace(view=view, caveats=caveats), 1, delta)


def _bare(delta, unit, adjacency, view):
    return Guarantee(
        math.inf,
        float(delta),
        unit or "example",
        adjacency or "replace_one",
        view or "server",
        "none",
        "none",
        caveats=(BARE,),
    )


def _of_segments(given, delta, unit, view, adjacency, seeds):
    given = list(given) if isinstance(given, (list, tuple)) else []
    is_segment = lambda s: isinstance(s, tuple) and len(s) in (2, 3) and isinstance(s[0], Plan)
    if not given or not all(map(is_segment, given)):
        checks.fail(
            "jfl.guarantee", "a Plan and rounds, or a list of (plan, rounds) alone", f"{given!r}"
        )
    check_delta(delta)
    choices(unit, view, adjacency)
    if not all(ledger.entries(plan) for plan, *_ in given):
        return _bare(delta, unit, adjacency, view)  # one segment without noise
    entries = segments.concatenate(given, seeds)
    entry = choose("jfl.guarantee", given[0][0], entries, unit, view, adjacency)
    return guarantee_of(entry, 1, delta)
