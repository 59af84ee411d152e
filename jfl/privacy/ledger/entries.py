"""From a plan to what its rounds release about an example or a client, for each view: the facts of
the plan, the rules of the table, and the caveats of both."""

import dataclasses
from typing import Any

import numpy as np

from ...core import checks, pytrees
from ...core.errors import NotAnalysable
from ...core.records import Caveat, Plan
from ...kernels.normals import MAX_VALUES as MAX_NORMALS
from ...verify import check as verify
from ...verify.client import params_shapes
from ..mechanisms.chain import check_schedules, noisy
from . import rules
from .caveats import (
    EVERY_ROUND,
    HONEST,
    IMPLIED,
    IMPLIED_TWICE,
    OF_CLIENTS,
    PAIRED,
    PERSONAL,
    PERSONAL_BARE,
    PERSONAL_TOO,
    PUBLIC,
    SIMULATION,
    STOPS,
    TURNS,
)
from .entry import Entry, effective, with_reach, worst_columns
from .facts import Facts, Site, read

VIEWS = ("server", "third_party", "aggregate")
# Normals that are drawn for each parameter of the model, at most: wavelet noise is padded, and an
# upload may hold several trees.  Only the square root of their number counts.
NORMALS_OF_A_PARAMETER = 64


def entries(plan: Plan, rounds: int = 1, others: bool = True) -> list[Entry]:
    """Return all that the noise of the first `rounds` rounds of a plan may protect; empty without
    noise.

    Args:
        plan: a Plan.
        rounds: how many of its rounds are looked at.
        others: whether noise of other clients counts for a third party.

    Raises:
        ValueError: if the plan holds traced values: a ledger is kept on the host; if a clip norm or
            noise that is a function of the round falls below 1e-15 in one of the rounds.
    """
    if not checks.is_concrete(plan):
        checks.fail(
            "jfl.guarantee",
            "a plan of concrete values",
            "traced ones",
            "Call it outside jit and vmap.",
        )
    check_schedules("jfl.guarantee", plan, rounds)
    facts = read(plan, rounds, others)
    own = [_entry_of(facts, facts.local, "example", v) for v in VIEWS[:2] if facts.local]
    views = VIEWS if facts.is_secure else VIEWS[:2]
    clients = [_entry_of(facts, (facts.upload,), "client", v) for v in views if facts.upload]
    if facts.release:
        clients.append(_entry_of(facts, (facts.release,), "client", "third_party"))
    listed = own + clients
    if all(e.refusal for e in own):
        listed += [_implied(facts, e) for e in clients]
    if not listed:
        return []
    try:  # how many normals one release of one client is computed from, at most
        normals = min(NORMALS_OF_A_PARAMETER * pytrees.size(params_shapes(plan)), MAX_NORMALS)
    except Exception:  # a task that cannot be traced here: what one key can draw at most
        normals = MAX_NORMALS
    for k, entry in enumerate(listed):
        releases = plan.sampler.clients if entry.unit == "client" or entry.implied else 1
        entry = entry._replace(caveats=entry.caveats + _caveats_of_plan(plan, entry))
        listed[k] = with_reach(entry, float(normals) * releases)
    return verify.judge_entries(plan, listed)


def _entry_of(facts: Facts, sites: tuple[Site, ...], unit: str, view: str) -> Entry:
    """Return what noise at these places proves for a unit and view, or an entry that is refused."""
    adjacencies = sorted({site.adjacency for site in sites})
    try:
        if len(adjacencies) > 1:
            checks.fail(
                "jfl.guarantee",
                "one adjacency for all releases of an algorithm",
                adjacencies,
                "Use batch samplers of one kind.",
                error=NotAnalysable,
            )
        found = [rules.find(facts, site, unit, view) for site in sites]
    except NotAnalysable as error:
        return Entry(unit, view, adjacencies[0], refusal=str(error))
    attendance, count = facts.attendance, len(facts.rows)
    parts = tuple(rule.part(facts, site) for rule, site in zip(found, sites))
    is_local, of_round = unit == "example", found[0].of_round
    gains = view == "third_party" and facts.scheme.absence and not of_round
    share = np.zeros(count)
    if view == "third_party" and not of_round:
        share = np.broadcast_to(attendance.share, (count,))
    chance = np.broadcast_to(attendance.chance if gains else 1.0, (count,))
    turns = 1 if of_round else attendance.turns
    row_overflow: Any = None
    overflow = attendance.overflow
    if is_local:
        lost = [rules.row_overflow(facts, site) for site in sites]
        overflow, row_overflow = turns * sum(float(each.max()) for each in lost), sum(lost)
    elif sites[0].place == "upload" and parts[0].joint:
        overflow = 0.0
    assumed, remarks = [], []
    for rule, site in zip(found, sites):
        for texts, out in ((rule.assumes, assumed), (rule.remarks, remarks)):
            for text in texts:
                out.extend([text] if isinstance(text, Caveat) else text(facts, site))
    rows = facts.rows if is_local else np.ones(count, int)
    counted = np.flatnonzero(facts.rows > 0) if is_local else np.arange(count)
    return Entry(
        unit,
        view,
        adjacencies[0],
        parts,
        None if of_round else chance,
        turns,
        worst_columns(rows, share, [effective(p) for p in parts], counted),
        overflow,
        row_overflow,
        mixture=gains or parts[0].sampling == "participation",
        noise_of="server" if sites[0].place == "release" else "client",
        status="conditional" if assumed else "proved",
        caveats=(*_caveats_of_attendance(facts, sites[0], view), *dict.fromkeys(assumed + remarks)),
        method=found[0].method,
    )


def _caveats_of_attendance(facts: Facts, site: Site, view: str) -> tuple:
    """Return the caveats about who takes part."""
    sampler, scheme = facts.sampler, facts.scheme
    if site.place == "release" and sampler.epoch > 1:
        return (HONEST,)
    if site.place == "release" and sampler.separation > 1:
        turns = Caveat(f"{TURNS}{sampler.separation}.", "turns")
        return (turns, HONEST) if scheme.kind == "poisson" else (turns,)
    if sampler.scheme == "full":
        return ()
    return (HONEST,) if view == "third_party" and scheme.absence else (EVERY_ROUND,)


def _implied(facts: Facts, entry: Entry) -> Entry:
    """Return what noise for clients proves for their examples.

    Under replace_one the numbers are the same.  Under the others they are not: the client with the
    other example is two steps away, so its upload moves by twice the bound, and only its absence is
    credited.
    """
    entry = entry._replace(unit="example", implied=True)
    if entry.refusal:
        return entry
    if entry.adjacency == "replace_one":
        return entry._replace(caveats=entry.caveats + (IMPLIED,))
    (part,) = entry.parts
    plain = part._replace(sampling="none", moves=2.0, summed=None)
    if part.renyi is not None:
        plain = rules.integers(facts.upload, part.renyi[2], moves=2.0)
    # rounds that are not independent: a client absent from one is in the noise of others
    alone = not plain.joint
    gains = alone and entry.view == "third_party" and facts.scheme.absence
    chance = np.max(facts.attendance.chance) if gains else 1.0
    rows = np.ones(facts.rows.shape, int)
    return entry._replace(
        parts=(plain,),
        chance=np.full(rows.shape, chance) if alone else None,
        turns=facts.attendance.turns if alone else 1,
        worst=worst_columns(rows, 0.0 * rows, [effective(plain)], np.arange(len(rows))),
        overflow=0.0,
        mixture=gains,
        caveats=entry.caveats + (IMPLIED_TWICE,),
    )


def _caveats_of_plan(plan: Plan, entry: Entry) -> tuple:
    """Return the caveats of everything that the plan releases."""
    uneven = entry.unit == "client" and (
        callable(plan.weights) or np.ptp(np.asarray(plan.weights)) > 0
    )
    algorithm, personal = plan.algorithm, ()
    if algorithm.personal is not None:
        declared = bool(algorithm.releases) and algorithm.personal_releases is not None
        counted = declared and all(noisy(r.mechanism) for r in algorithm.all_releases)
        personal = (PERSONAL if counted else PERSONAL_BARE,)
    of_clients = (c for n, c in OF_CLIENTS.items() if getattr(plan.sampler, n, None) is not None)
    return (
        SIMULATION,
        STOPS,
        *((PUBLIC,) if entry.adjacency == "add_remove" or uneven else ()),
        *of_clients,
        *((PAIRED,) if plan.paired_noise else ()),
        *personal,
        *(Caveat(text, "data") for text in getattr(plan.fed, "caveats", ())),
    )


# --- uploads and personal models together


def personal(plan: Plan, rounds: int) -> Entry:
    """Return the entry of an observer who sees all uploads and all personal models.

    The releases behind uploads and those behind personal models are composed.  A trace of the
    client shows that what it keeps follows from them, and that they draw independent batches.

    Raises:
        NotAnalysable: if the algorithm has no personal models, does not say what they are made
            from, or makes them without noise; if the uploads have no guarantee for examples; or if
            the trace finds rows that reach what a client keeps.
    """
    algorithm = plan.algorithm
    made_of = algorithm.personal_releases or ()

    def need(holds, words, got, remedy):
        if not holds:
            words += ", for view='personal'"
            checks.fail("jfl.guarantee", words, got, remedy, error=NotAnalysable)

    need(
        algorithm.personal is not None and algorithm.personal_releases is not None,
        "personal models whose releases are known",
        f"{algorithm.name}, which "
        + ("has none" if algorithm.personal is None else "does not name their releases"),
        "Ask for view='server'.",
    )
    need(
        all(noisy(release.mechanism) for release in made_of),
        "noise in the training of personal models",
        "gradients without noise",
        f"Give {algorithm.name} a private personal_grad.",
    )
    seen = [e for e in entries(plan, rounds) if (e.view, e.unit) == ("server", "example")]
    need(
        bool(seen) and not seen[0].implied,
        "noise in the local steps",
        "uploads that no noise of the client's own steps protects",
        "Train with jfl.private_grad.",
    )
    server = seen[0]
    if server.refusal:
        return server._replace(view="personal")
    need(
        not made_of or all(r.batches.scheme != "epochs" for r in algorithm.all_releases),
        "batches that are drawn independently",
        "batches.epochs, in which personal training begins inside an epoch",
        "Use batches.poisson or batches.without_replacement.",
    )
    found = verify.personal_findings(plan)
    need(
        not found,
        "a client that keeps only what noise protects",
        found[0] if found else "",
        "jfl.check_privacy(plan) lists all findings.",
    )
    together = dataclasses.replace(
        algorithm, releases=algorithm.all_releases, personal_releases=None
    )
    facts = read(dataclasses.replace(plan, algorithm=together), rounds, apart=True)
    both = _entry_of(facts, facts.local, "example", "personal")
    if both.refusal:
        return both
    caveats = (c for c in both.caveats + server.caveats if c != PERSONAL)
    conditional = "conditional" in (both.status, server.status)
    both = both._replace(
        status="conditional" if conditional else "proved",
        caveats=(*dict.fromkeys(caveats), PERSONAL_TOO),
    )
    return with_reach(both, server.normals)


# --- the ledger as a table for people

HEADS = (
    "unit",
    "view",
    "adjacency",
    "release",
    "sampling",
    "rate",
    "noise",  # multiplier
    "times",  # in a participation
    "participation",  # probability, of a round
)


class Ledger(tuple):
    """The entries of a plan; prints as a table, a line for each noisy release."""

    rounds: int

    def __new__(cls, entries, rounds: int):
        ledger = super().__new__(cls, entries)
        ledger.rounds = rounds
        return ledger

    def __getnewargs__(self):
        return tuple(self), self.rounds

    def __str__(self):
        if not self:
            return "No mechanism of this plan adds noise."
        lines = [HEADS, *(line for entry in self for line in _lines(entry))]
        widths = [max(map(len, column)) for column in zip(*lines)]
        rows = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        below = [f"in each of {self.rounds} rounds; noise is std / sensitivity"]
        below += [f"  refused: {e.refusal}" for e in self if e.refusal]
        below += [f"  {e.status}: {e.unit}, {e.view}" for e in self if e.status != "proved"]
        below += [f"  caveat: {c}" for e in self for c in e.caveats]
        return "\n".join([*rows, *dict.fromkeys(below)])

    __repr__ = __str__


def _lines(entry: Entry) -> list:
    """Return a line for each part."""
    unit = f"{entry.unit}, implied" if entry.implied else entry.unit
    who = (unit, entry.view, entry.adjacency)
    if entry.refusal:
        return [(*who, "refused", *[""] * 5)]

    def show(values):  # of the clients that may be the worst
        alike = values.shape[-1] == 1
        values = values if alike else values[..., [first for first, _ in entry.worst]]
        return _range(values)

    participation = "1"
    if entry.chance is not None:
        turns = f"{entry.turns} times " if entry.turns > 1 else ""
        participation = turns + _range(entry.chance[[other for _, other in entry.worst]])
    lines = []
    for part in entry.parts:
        sampling, rate = part.sampling, "" if part.sampling == "none" else show(part.rate)
        if sampling == "with_replacement":
            sampling = f"{show(part.sample)} draws with_replacement"
        if part.seen:
            sampling, rate = f"{sampling}, seen", ""
        noise = show(effective(part)) + " laplace" * (part.law == "laplace")
        lines.append((*who, part.release, sampling, rate, noise, show(part.count), participation))
        who = ("", "", "")
    return lines


def _range(values) -> str:
    low, high = (f"{f(values):.4g}" if values.size else "" for f in (np.min, np.max))
    return low if low == high else f"{low} to {high}"


def ledger(plan: Plan, rounds: int = 1) -> Ledger:
    """Return what `rounds` rounds of a plan release, and to whom: all that its epsilons follow
    from.

    Args:
        plan: a Plan.
        rounds: how many of its rounds are looked at; noise may change from round to round.

    Returns:
        A tuple of entries, one for each unit, view and adjacency that noise protects, whose fields
        are plain data.  It prints as a table, with a line for each noisy release: on which sample,
        with which noise multiplier (std over the sensitivity under that adjacency), how often.
        Where clients differ, it shows those that may be the worst.

    Raises:
        ValueError: If the plan holds traced values, or one of its functions holds the
            federation's x or y.

    Example:
        >>> import jfl
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(10))
        >>> task = jfl.models.logistic(fed)
        >>> noise = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.1), jfl.divide(16))
        >>> grad = jfl.private_grad(task.loss, noise)
        >>> fedavg = jfl.algorithms.fedavg(grad, steps=3, batch=jfl.batches.poisson(16))
        >>> plan = jfl.plan(fed, task, fedavg, jfl.sampling.without_replacement(10, 4))
        >>> print(ledger(plan, 50))  # doctest: +ELLIPSIS
        unit     view         adjacency   release     sampling  rate    noise  times  participation
        example  server       add_remove  local step  poisson   0.1119  1.1    3      1
        example  third_party  add_remove  local step  poisson   0.1119  1.1    3      0.4
        in each of 50 rounds; noise is std / sensitivity
          caveat: Assumes the worst case: the client participates in every round.
          caveat: ...
    """
    checks.require_integer("jfl.ledger", rounds=rounds)
    return Ledger(entries(plan, rounds), rounds)
