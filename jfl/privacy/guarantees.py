"""Guarantees of a plan: the smallest epsilon that is proved for what its ledger lists.

Everything here runs on the host, on concrete numbers.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from ..core import checks
from ..core.errors import ArgumentError, NotAnalysable
from ..core.records import Caveat, Guarantee, Plan, code_of
from ..verify import check as verify
from ..verify.check import PUBLIC_CONSTANTS
from .accountants import events, truncation
from .accountants.rdp_events import EXACT, Overflow, bounds, check_delta
from .accountants.tightest import tightest
from .ledger import entries as ledger
from .ledger import segments
from .ledger.caveats import BARE, EVERY_ROUND
from .ledger.entry import Entry, events_of, levels_of, lost_of, of_client, release_of
from .ledger.facts import attendance
from .ledger.participation import counted, participations
from .mechanisms.chain import ADJACENCIES, noisy, remembers

NAMES = dict(
    unit=(None, "example", "client"),
    view=(None, *ledger.VIEWS, "personal"),
    adjacency=(None, *ADJACENCIES),
)
MAX_KINDS = 64  # of clients, for each of which a privacy-loss distribution is computed
AT_SCALE = (
    "Applies to a deployment with {:,} of {:,} clients per round and the same noise in the mean; "
    "this run has epsilon >= {:.4g}."
)
SAMPLED = {"poisson": "poisson", "without_replacement": "without_replacement", "full": "none"}


def guarantees(plan: Plan, rounds: int, delta: float = 1e-5) -> tuple[Guarantee, ...]:
    """Return every guarantee that the noise of a plan proves for `rounds` rounds; () if none.

    Raises:
        ValueError: unless rounds is an integer and delta is in (0, 1).
    """
    check_delta(delta)
    proved = []
    for entry in ledger.entries(plan, rounds):
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

    It holds for the client or row that is worst off, and therefore for all.  The server sees who
    participates, so by default every client counts as participating in every round; one of `cap`,
    `quantile` and `realised` replaces this assumption.

    Args:
        plan: a Plan; or, if `rounds` is None, a list of segments on the same clients.  A segment
            (plan, rounds) continues where the one before it ended, as simulate(start=...) does, and
            (plan, rounds, first) begins with round `first`, which is 0 for a new run.
        rounds: the number of rounds of the plan; None for a list of segments.
        delta: the delta of the guarantee, in (0, 1).
        unit: "example" or "client".  None means the only unit with an answer for the view.
        view: what the observer sees: "server", every upload; "third_party", the models;
            "aggregate", the sums of uploads; "personal", every upload and the clients' personal
            models.  None means the only view with an answer, or "server" if several have one.
        adjacency: "add_remove", "replace_one" or "zero_out".  It is only needed if several are
            proved.
        cap: the maximum number of rounds in which any client participates.  It is assumed; nothing
            enforces it.
        quantile: a probability < delta.  The guarantee counts a number of rounds that a client
            exceeds with at most this probability, which is a part of delta.
        realised: Int[C], the numbers of rounds in which clients did participate.  The result
            describes that run and is not a guarantee.
        uplinks: the number of uploads of a client that a third party sees in addition to all
            models.
        seeds: which segments share a seed: "different", or an integer per segment.  None means one
            seed for all of them.  Segments with the same seed share cohorts and batches, so their
            rounds must not overlap.  It is assumed, not checked.

    Returns:
        A Guarantee.  It states the unit, adjacency, view and method.  Its caveats state everything
        that it assumes or does not cover.

    Privacy:
        The guarantee covers the planned rounds, whatever the data are.  The noise and the number of
        rounds of all segments are assumed to be fixed before the run; `jfl.budget` covers noise and
        rounds that are chosen from results.  A plan without noise has epsilon = inf and status
        "none".

    Raises:
        ValueError: If not exactly one guarantee fits the arguments (the message lists the choices),
            or if no accountant can analyse the plan (the message gives the reason and a remedy).

    Example:
        Ten rounds of one plan followed by 90 rounds of another:

        >>> jfl.guarantee([(plan_a, 10), (plan_b, 90)])  # doctest: +SKIP
    """
    where, options = "jfl.guarantee", dict(cap=cap, quantile=quantile, realised=realised)
    as_planned = all(v is None for v in options.values())
    checks.require_integer(where, min_value=0, max_value=ledger.MAX_ROUNDS, uplinks=uplinks)
    check_delta(delta)
    if not isinstance(plan, Plan):
        if uplinks or rounds is not None or not as_planned:
            checks.fail(
                where,
                "a Plan and rounds, or only a list of (plan, rounds)",
                f"rounds={rounds!r} or other options together with segments",
                "Participation options and uplinks are for one plan.",
            )
        return _of_segments(plan, delta, unit, view, adjacency, seeds)
    if seeds is not None:
        checks.fail(
            where, "a list of segments if seeds is given", "one plan", "One run has one seed."
        )
    entries = ledger.entries(plan, rounds)
    assert rounds is not None  # which `entries` checks
    if not entries:
        return _bare(delta, unit, adjacency, view)
    if uplinks:
        return _leaking(plan, rounds, uplinks, delta, unit, view, adjacency, as_planned)
    if isinstance(view, str) and view == "personal":
        entries = [ledger.personal(plan, rounds)]
    entry = choose(where, plan, entries, unit, view, adjacency, rounds)
    if as_planned:
        return guarantee_of(entry, rounds, delta)
    often = participations(plan, entry, rounds, delta, options)
    entry = counted(plan, entry, rounds, often.most)
    kept = tuple(c for c in entry.caveats if code_of(c) != EVERY_ROUND.code)
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
    """Return epsilon after each of several numbers of rounds.

    Computing all of them takes about as long as computing one.  They are Renyi bounds and exact
    Gaussians.  `guarantee` also tries privacy-loss distributions, and may return a slightly smaller
    value.

    Args:
        plan: a Plan.
        rounds: Int[m], numbers of rounds >= 0.
        delta: in (0, 1).
        unit: as in `guarantee`.
        view: as in `guarantee`; None chooses the same view.
        adjacency: as in `guarantee`.

    Returns:
        Float64[m], which does not decrease as the number of rounds grows.

    Raises:
        ValueError: See `guarantee`.
    """
    times = checks.as_array("jfl.epsilons", "rounds", rounds)
    if times.ndim != 1 or times.dtype.kind not in "iu" or (times < 0).any():
        checks.fail("jfl.epsilons", "rounds: integers >= 0, Int[m]", f"{rounds!r}")
    last = max(int(times.max(initial=1)), 1)
    check_delta(delta)
    entries = ledger.entries(plan, last)
    if not entries or not times.size:
        return np.where(times > 0, _bare(delta, unit, adjacency, view).epsilon, 0.0)
    entry = choose("jfl.epsilons", plan, entries, unit, view, adjacency, last)
    verify.warn_if_conditional("jfl.epsilons", entry)
    return quick_epsilons(entry, times, delta)[0]


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
    """Return the epsilon of each client's examples.

    It depends on the client's number of rows, participation and noise.

    Args:
        plan: a Plan.
        rounds: the number of rounds.
        delta: in (0, 1).
        view: "server" or "third_party"; None chooses the view of
            jfl.guarantee(plan, rounds, delta, "example").
        cap: as in `jfl.guarantee`.
        quantile: as in `jfl.guarantee`.
        realised: Int[C], as in `jfl.guarantee`.

    Returns:
        Float64[C]; 0 for a client without rows or rounds, inf without noise.

    Privacy:
        The values are for unit "example" and the adjacency of the plan; sizes and rates are
        public.  The largest value is the epsilon of `guarantee`, or slightly smaller.  For more
        than 64 different clients these are Renyi bounds, which may be larger.

    Raises:
        ValueError: as in `jfl.guarantee`.
    """
    sizes = np.asarray(plan.fed.size).reshape(-1)
    check_delta(delta)
    listed = ledger.entries(plan, rounds)
    if not listed:
        return np.where(sizes > 0, _bare(delta, None, None, view).epsilon, 0.0)
    entry = choose("jfl.epsilons_per_client", plan, listed, "example", view, None, rounds)
    verify.warn_if_conditional("jfl.epsilons_per_client", entry)
    if entry.noise_of == "server":  # it protects all clients equally
        return np.where(sizes > 0, guarantee_of(entry, rounds, delta).epsilon, 0.0)

    def value(entry, left, tightly):
        if tightly:
            return guarantee_of(entry, 1, left).epsilon
        return quick_epsilons(entry, np.ones(1), left)[0][0]

    levels = [
        np.broadcast_to(z, (len(z), len(sizes))) for z in (part.noise for part in entry.parts)
    ]
    options = dict(cap=cap, quantile=quantile, realised=realised)
    return for_each_client(plan, entry, rounds, delta, options, levels, value)


def for_each_client(
    plan: Plan, entry: Entry, rounds, delta, options: dict, differ: list, value: Callable
) -> np.ndarray:
    """Return a value for each client, Float64[C].

    It is computed once for identical clients, and is 0 for a client without rows or rounds.

    Args:
        plan: a Plan.
        entry: its ledger entry, for noise that the client adds.
        rounds: the number of rounds.
        delta: the delta of the guarantee.
        options: cap, quantile and realised.
        differ: arrays [n, C] of further numbers, such as noise multipliers.  Clients are identical
            if these, their numbers of rows and their participation are equal.
        value: returns the value of a client from three arguments: the ledger entry of all its
            rounds, the part of delta that is left after overflows and quantiles, and whether there
            are so few groups of identical clients that an expensive bound can be computed.
    """
    sizes = np.asarray(plan.fed.size).reshape(-1)
    often = participations(plan, entry, rounds, delta, options)
    extent, left = often.most, delta - often.beta
    if entry.view == "server":
        whole = counted(plan, entry, rounds, extent)
    else:
        extent = np.broadcast_to(attendance(plan.sampler).share, sizes.shape)
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
            each[i] = value(alone, left, len(first) <= MAX_KINDS)
    return each[which.reshape(-1)]


def at_scale(
    plan: Plan, rounds: int, delta: float = 1e-5, *, cohort: int, clients: int
) -> Guarantee:
    """Return the guarantee of a larger deployment whose mean upload has the same noise.

    With cohorts of 100, the noise that hides one client is so large that a model hardly learns.
    Studies therefore add as much noise to the mean of 100 as a deployment adds to the mean of, for
    example, 10,000: a noise multiplier z of the deployment is z * 100 / 10,000 here.  The model
    then trains about as well as in the deployment.  The epsilon is that of the deployment, never of
    this run.

    Args:
        plan: a Plan with noise on the release.
        rounds: the number of rounds.
        delta: the delta of the guarantee, in (0, 1).
        cohort: the number of clients per round in the deployment (expected, for Poisson cohorts).
        clients: the total number of clients in the deployment.

    Returns:
        A guarantee with status "conditional"; its first caveat names the epsilon of this run.

    Privacy:
        The guarantee is for one client against a third party, with the clip norms and weights of
        this plan.

    Raises:
        ValueError: if the release has no noise, if clients add noise themselves, if the clip norm
            is adaptive, if clients keep state and cohorts are drawn, if the sampler is not poisson,
            without_replacement, or full with cohort = clients, if cohort > clients, or if either is
            smaller than in the plan.

    References:
        pfl-research (Granqvist et al., 2024) calls it noise_cohort_size.

    Example:
        >>> import jfl
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(100))
        >>> task = jfl.models.logistic(fed)
        >>> small = jfl.gaussian(1.0 * 10 / 10_000)  # z = 1 with 10,000 clients
        >>> noise = jfl.chain(jfl.clip_l2(0.5), jfl.total(), small, jfl.divide(10))
        >>> fedavg = jfl.algorithms.fedavg(jfl.grad(task.loss), steps=1, batch=jfl.batches.full())
        >>> sampler = jfl.sampling.poisson(100, 0.1)
        >>> plan = jfl.plan(fed, task, fedavg, sampler, release=noise)
        >>> found = jfl.at_scale(plan, 1000, 1e-6, cohort=10_000, clients=1_000_000)
        >>> 1.9 < found.epsilon < 2.2, found.status
        (True, 'conditional')
    """
    where = "jfl.at_scale"
    checks.require_integer(where, cohort=cohort, clients=clients)
    sampler, expected = plan.sampler, float(plan.sampler.expected)
    if not (expected <= cohort <= clients and sampler.clients <= clients):
        checks.fail(
            where,
            f"{expected:g} <= cohort <= clients, and clients >= {sampler.clients}",
            f"cohort={cohort}, clients={clients}",
            "A deployment is at least as large as its simulation.",
        )

    def need(holds, words, got, remedy=""):
        if not holds:
            checks.fail(where, words, got, remedy, error=NotAnalysable)

    need(
        sampler.scheme in SAMPLED and (sampler.scheme != "full" or cohort == clients),
        "sampling.poisson, sampling.without_replacement, or sampling.full with all clients",
        f"sampling.{sampler.scheme}, {cohort} of {clients}",
    )
    need(
        not remembers(plan.release),
        "a fixed clip norm",
        f"{plan.release!r}, whose clip depends on the noise of this cohort",
    )
    check_delta(delta)
    entry = choose(where, plan, ledger.entries(plan, rounds), "client", "third_party", None, rounds)
    part = entry.parts[0]
    need(
        entry.noise_of == "server" and part.summed is None,
        "noise on the release only",
        "noise of the clients",
        "It would not scale with the cohort in this way.",
    )
    try:  # or more, of small cohorts
        here = guarantee_of(entry._replace(overflow=0.0), rounds, delta).epsilon
    except NotAnalysable:  # noise for a large cohort proves hardly anything in a small one
        here = math.inf
    need(
        part.sampling in (SAMPLED[sampler.scheme], "none"),
        "stateless clients: client state shows who participated together",
        plan.algorithm.name,
    )
    sizes = dict(none=(1, 1), poisson=(cohort / clients, 1), without_replacement=(cohort, clients))
    sample, population = (np.array([float(size)]) for size in sizes[part.sampling])
    multiplier = part.multiplier * (cohort / expected)
    part = dataclasses.replace(part, multiplier=multiplier, sample=sample, population=population)
    caveat = Caveat(AT_SCALE.format(cohort, clients, here), "at-scale")
    larger = entry._replace(parts=(part,), overflow=0.0, caveats=(caveat, *entry.caveats))
    found = guarantee_of(larger, rounds, delta)
    return found._replace(status="conditional").about(found.release)


# --- entries and their epsilons


def choose(where, plan, entries, unit, view, adjacency, rounds: int = 1) -> Entry:
    """Return the only entry with this unit, view and adjacency that can prove something.

    None matches everything.  If view is None and several views have such an entry, the first of
    these views is used.  Of noise on uploads and on the release, which may both prove the same, it
    is the one that proves more.

    Args:
        where: the name of the caller, for error messages.
        plan: the plan, for error messages.
        entries: the entries of its ledger.
        unit, view, adjacency: as in `guarantee`.
        rounds: the number of rounds after which the noises are compared.

    Raises:
        NotAnalysable: if no entry can prove anything, with the reason.
        ArgumentError: if no entry fits or several do, with the possible choices.
    """
    asked = dict(unit=unit, view=view, adjacency=adjacency)
    for name, value in asked.items():
        checks.require_one_of("jfl.guarantee", NAMES[name], **{name: value})
    fits = {}
    for one in (view,) if view else ledger.VIEWS:
        fit = [
            e
            for e in entries
            if e.view == one and unit in (None, e.unit) and adjacency in (None, e.adjacency)
        ]
        if len(fit) > 1:
            fit = [e for e in fit if not e.implied] or fit
            good = [e for e in fit if not e.refusal]
            if good and len({(e.unit, e.adjacency) for e in fit}) == 1:
                fit = good if len(good) == 1 else [_better(good, rounds)]
        fits[one] = fit
    single = [fit[0] for fit in fits.values() if len(fit) == 1]
    answers = [entry for entry in single if not entry.refusal]
    if answers:
        return answers[0]
    if single:
        raise NotAnalysable(single[0].refusal)
    names = [f"{name}={value!r}" for name, value in asked.items() if value]
    count = [
        f"{len(fit)} of them" + f" for view={one!r}" * (view is None) for one, fit in fits.items()
    ]
    options = "; ".join(
        dict.fromkeys(
            f"unit={e.unit!r}, view={e.view!r}, adjacency={e.adjacency!r}"
            for e in entries
            if not (e.refusal or e.implied)
        )
    )
    because = ""
    only_release = noisy(plan.release) and not noisy(plan.upload)
    if view == "server" and not fits[view] and only_release:
        because = "The server sees every upload before the noise of the release is added. "
    if view == "aggregate" and not plan.secure_aggregation:
        because = "Say jfl.plan(..., secure_aggregation=True), if that is how uploads are summed. "
    found = f", which fits {' and '.join(count)}"
    if unit == "client" and all(e.unit != unit for e in entries):
        found, because = "", "No noise of this plan protects clients; add release= or upload=. "
    checks.fail(
        where,
        "one guarantee that this plan's noise can prove",
        f"{', '.join(names) or 'neither unit nor view'}{found}",
        f"{because}Choices: {options or 'none'}.",
        error=ArgumentError if options else NotAnalysable,
    )


def guarantee_of(entry: Entry, rounds, delta) -> Guarantee:
    """Return the guarantee of `rounds` rounds of an entry."""
    release = release_of(entry, rounds)
    value, method = tightest(release, delta)
    if entry.method:
        method = f"{entry.method}, {method}"
    if entry.mixture and method != EXACT:
        method += ", participation mixture"
    caveats = tuple(dict.fromkeys(entry.caveats))
    about_constants = tuple(c for c in caveats if code_of(c) == PUBLIC_CONSTANTS)
    caveats = tuple(c for c in caveats if c not in about_constants) + about_constants
    return Guarantee(
        value,
        float(delta),
        entry.unit,
        entry.adjacency,
        entry.view,
        method,
        entry.status if math.isfinite(value) else "none",
        caveats,
        entry.implied,
    ).about(release)


def quick_epsilons(entry: Entry, times, delta):
    """Return quick bounds on epsilon after each of several numbers of rounds.

    Args:
        entry: an entry of the ledger.
        times: Int[m], numbers of rounds.
        delta: the delta of the guarantee, in (0, 1).

    Returns:
        Float64[m]; and Bool[m], True if the bound is the exact composition of Gaussians.
    """
    listed, happened = events_of(entry), times
    if not listed:
        return np.zeros(times.shape), np.ones(times.shape, bool)
    if entry.changes:  # how often each level of noise was added
        listed, which = levels_of(listed, int(np.max(times, initial=1)))
        count = which.max(initial=0) + 1
        happened = np.array([np.bincount(which[:n], minlength=count) for n in times])
        listed = tuple(events.series(e, np.ones(count)) for e in listed)
    lost = lost_of(entry, times, float(delta))
    truncation.refuse_if_beyond("jfl.guarantee", lost, delta, Overflow)
    return bounds(listed, happened, float(delta) - lost, entry.overflow * times)


def _better(entries: list[Entry], rounds: int) -> Entry:
    """Return the entry that proves more about `rounds` rounds."""
    found = []
    for entry in entries:
        try:
            found.append(quick_epsilons(entry, np.array([rounds]), 1e-5)[0][0])
        except Overflow:
            found.append(math.inf)
    return entries[int(np.argmin(found))]


# --- other questions


def _leaking(plan, rounds, uplinks, delta, unit, view, adjacency, as_planned):
    """Return the guarantee of a run if a third party also sees some uploads of each client.

    A round in which a client's upload is seen costs as much as that upload, because the model of
    the round shows nothing more about the client.  In rounds in which the uploads of other clients
    are seen, their noise does not hide the client.  The worst case is that all of these are the
    same rounds, and none of them is one of the client's, because 1 / variance is convex.  The
    uploads may also show who participated, so a cohort of a fixed size is not hidden.
    """
    if view != "third_party" or not as_planned or uplinks > rounds:
        checks.fail(
            "jfl.guarantee",
            "view='third_party', at most `rounds` uplinks, and no cap, quantile or realised if "
            "uplinks is given",
            f"view={view!r}, uplinks={uplinks}, rounds={rounds}",
            "The server sees all uploads.",
        )

    def pick(view, others):
        entries = ledger.entries(plan, rounds, others, shown=True)
        return choose("jfl.guarantee", plan, entries, unit, view, adjacency, rounds)

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


def _of_segments(given, delta, unit, view, adjacency, seeds):
    given = list(given) if isinstance(given, (list, tuple)) else []
    is_segment = lambda s: isinstance(s, tuple) and len(s) in (2, 3) and isinstance(s[0], Plan)
    if not given or not all(map(is_segment, given)):
        checks.fail(
            "jfl.guarantee", "a Plan and rounds, or only a list of (plan, rounds)", f"{given!r}"
        )
    check_delta(delta)
    if not all(ledger.entries(plan) for plan, *_ in given):
        return _bare(delta, unit, adjacency, view)  # one segment without noise
    entries = segments.concatenate(given, seeds)
    entry = choose("jfl.guarantee", given[0][0], entries, unit, view, adjacency)
    return guarantee_of(entry, 1, delta)


def _bare(delta, unit, adjacency, view) -> Guarantee:
    """Return the guarantee of a plan without noise."""
    for name, value in dict(unit=unit, view=view, adjacency=adjacency).items():
        checks.require_one_of("jfl.guarantee", NAMES[name], **{name: value})
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
