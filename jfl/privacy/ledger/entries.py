"""The entries of a plan's ledger: what its rounds release about an example or a client, to each
view.

For each place at which the plan adds noise, `facts` describes the plan, and `rules` gives the
release and its caveats.
"""

import dataclasses

import numpy as np

from ...core import checks, pytrees
from ...core.errors import NotAnalysable
from ...core.records import Caveat, Plan, caveat_lines
from ...kernels.normals import MAX_POSITIONS, MISSING
from ...verify import check as verify
from ...verify.client import params_shapes
from ..mechanisms.chain import check_schedules, noisy
from . import rules
from .caveats import (
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
)
from .entry import Entry, worst_columns
from .facts import Facts, Site, read

VIEWS = ("server", "third_party", "aggregate")
MAX_ROUNDS = 10**12
# Normals that are drawn for each parameter of the model, at most: wavelet noise is padded, an
# upload may hold several trees, and a leaf of odd length does not use the last normal of its pairs.
# Only the square root of their number counts.
NORMALS_PER_PARAMETER = 64


def entries(
    plan: Plan, rounds: int | None = 1, others: bool = True, shown: bool = False
) -> list[Entry]:
    """Return the entries of the ledger of the first `rounds` rounds of a plan.

    There is an entry for each unit, view and adjacency that the noise may protect.  A plan without
    noise has no entries.

    Args:
        plan: a Plan.
        rounds: the number of rounds.
        others: whether the noise of other clients protects a client from a third party.
        shown: whether a third party sees who participates.

    Raises:
        ValueError: if the plan holds traced values, because the ledger runs on the host; or if a
            scheduled clip norm or noise falls below 1e-15 in one of the rounds.
    """
    checks.require_type("jfl.guarantee", Plan, "jfl.plan", plan=plan)
    checks.require_integer("jfl.guarantee", max_value=MAX_ROUNDS, rounds=rounds)
    if not checks.is_concrete(plan):
        checks.fail(
            "jfl.guarantee",
            "a plan of concrete values",
            "traced ones",
            "Call it outside jit and vmap.",
        )
    rounds = int(rounds or 0)  # an integer > 0, which is checked above
    check_schedules("jfl.guarantee", plan, rounds)
    facts = read(plan, rounds, others, shown)

    views = VIEWS if facts.is_secure else VIEWS[:2]
    of_examples = [_entry_of(facts, facts.local, "example", v) for v in VIEWS[:2] if facts.local]
    of_clients = [_entry_of(facts, (facts.upload,), "client", v) for v in views if facts.upload]
    if facts.release:
        of_clients.append(_entry_of(facts, (facts.release,), "client", "third_party"))
    listed = of_examples + of_clients
    if all(e.refusal for e in of_examples):
        listed += [_implied(facts, e) for e in of_clients]
    if not listed:
        return []

    try:  # how many normals one release of one client is computed from, at most
        normals = NORMALS_PER_PARAMETER * pytrees.size(params_shapes(plan))
    except Exception:  # a task that cannot be traced here: what one key can draw at most
        normals = MAX_POSITIONS
    return verify.judge_entries(plan, [_of_plan(plan, e, float(normals)) for e in listed])


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
        proofs = [(rules.find(facts, site, unit, view), site) for site in sites]
    except NotAnalysable as error:
        return Entry(unit, view, adjacencies[0], refusal=str(error))
    parts = tuple(rule.part(facts, site) for rule, site in proofs)
    rule, site = proofs[0]
    remarks = [
        (Caveat(remark.caveat.format(f=facts, s=site), remark.caveat.code), remark.is_assumption)
        for rule, site in proofs
        for remark in rule.remarks
        if remark.applies(facts, site)
    ]
    caveats = [caveat for caveat, _ in remarks] + [c for site in sites for c in site.assumed]
    is_assumed = any(is_assumption for _, is_assumption in remarks)

    # The server sees who participates, so every client counts as participating in every round.
    attendance, count = facts.attendance, len(facts.rows)
    is_hidden = view == "third_party" and not rule.of_round
    gains = is_hidden and facts.scheme.absence
    share = np.broadcast_to(attendance.share if is_hidden else 0.0, (count,))
    chance = np.broadcast_to(attendance.chance if gains else 1.0, (count,))
    turns = 1 if rule.of_round else attendance.turns

    rows, counted = np.ones(count, int), np.arange(count)
    overflow, row_overflow = attendance.overflow, None
    if unit == "example":
        rows, counted = facts.rows, np.flatnonzero(facts.rows > 0)
        overflow = turns * sum(float(site.overflow.max()) for site in sites)
        row_overflow = sum((site.overflow for site in sites), np.zeros(()))
    elif site.place == "upload" and parts[0].joint:
        overflow = 0.0
    return Entry(
        unit,
        view,
        adjacencies[0],
        parts,
        None if rule.of_round else chance,
        turns,
        worst_columns(rows, share, [p.noise for p in parts], counted),
        overflow,
        row_overflow,
        mixture=gains or parts[0].sampling == "participation",
        noise_of="server" if site.place == "release" else "client",
        status="conditional" if is_assumed or any(site.assumed for site in sites) else "proved",
        caveats=tuple(dict.fromkeys(caveats)),
        method=rule.method,
    )


def _implied(facts: Facts, entry: Entry) -> Entry:
    """Return what noise for clients proves for their examples.

    Under replace_one the numbers are the same.  Under the other adjacencies the client with the
    other example is two steps away, so its upload moves by twice the bound, and only its absence is
    a gain.
    """
    entry = entry._replace(unit="example", implied=True)
    if entry.refusal:
        return entry
    if entry.adjacency == "replace_one":
        return entry._replace(caveats=entry.caveats + (IMPLIED,))
    (part,) = entry.parts
    alone = dataclasses.replace(part, sampling="none", moves=2.0, summed=None)
    if part.renyi is not None and facts.upload is not None:
        alone = rules.integers(facts.upload, part.renyi[2], moves=2.0)
    # If rounds are not independent, a client absent from one round is in the noise of others.
    gains = not part.joint and entry.view == "third_party" and facts.scheme.absence
    count = len(facts.rows)
    chance = np.full(count, np.max(facts.attendance.chance) if gains else 1.0)
    return entry._replace(
        parts=(alone,),
        chance=None if part.joint else chance,
        turns=1 if part.joint else facts.attendance.turns,
        worst=worst_columns(np.ones(count), np.zeros(count), [alone.noise], np.arange(count)),
        overflow=0.0,
        mixture=gains,
        caveats=entry.caveats + (IMPLIED_TWICE,),
    )


def _of_plan(plan: Plan, entry: Entry, normals: float) -> Entry:
    """Return an entry with the caveats of everything that the plan releases, and with the number of
    normals from which its releases are computed.

    The distribution of computed noise differs from the exact one by at most the mass that its
    normals miss, which costs (1 + e^epsilon) of delta, as an overflow does.  It is charged here
    where `shifts_of` does not charge it: for Laplace noise, each number of which is made of two
    pairs of normals, and for samples that may hold a unit several times.
    """
    if entry.unit == "client" or entry.implied:  # a release holds the noise of all clients
        normals = normals * plan.sampler.clients
    charged = [p for p in entry.parts if p.is_laplace or p.sampling == "with_replacement"]
    missed = 2 * MISSING * normals * sum(float(np.max(p.count)) for p in charged)
    row_overflow = None if entry.row_overflow is None else entry.row_overflow + missed

    weights, algorithm = plan.weights, plan.algorithm
    uneven = entry.unit == "client" and (callable(weights) or np.ptp(np.asarray(weights)) > 0)
    caveats = [SIMULATION, STOPS]
    caveats += [PUBLIC] if entry.adjacency == "add_remove" or uneven else []
    caveats += [c for n, c in OF_CLIENTS.items() if getattr(plan.sampler, n, None) is not None]
    caveats += [PAIRED] if plan.paired_noise else []
    if algorithm.personal is not None:
        declared = bool(algorithm.releases) and algorithm.personal_releases is not None
        is_counted = declared and all(noisy(r.mechanism) for r in algorithm.all_releases)
        caveats.append(PERSONAL if is_counted else PERSONAL_BARE)
    caveats += [Caveat(text, "data") for text in getattr(plan.fed, "caveats", ())]
    return entry._replace(
        normals=normals,
        overflow=entry.overflow + missed * entry.turns,
        row_overflow=row_overflow,
        caveats=(*entry.caveats, *caveats),
    )


# --- uploads and personal models together


def personal(plan: Plan, rounds: int) -> Entry:
    """Return the entry of an observer who sees all uploads and all personal models.

    Uploads and personal models are computed from separate releases, and the entry composes both.  A
    trace of the client shows that its state is computed only from these releases, and that they
    draw independent batches.

    Args:
        plan: a Plan.
        rounds: the number of rounds.

    Raises:
        NotAnalysable: if the algorithm has no personal models, does not declare their releases, or
            computes them without noise; if the uploads have no guarantee for examples; or if the
            trace finds rows that reach the state of a client.
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
    found = verify.personal_findings("jfl.guarantee", plan)
    need(
        not found,
        "a client that keeps only what noise protects",
        found[0] if found else "",
        "jfl.check_privacy(plan) lists all findings.",
    )
    together = dataclasses.replace(
        algorithm, releases=algorithm.all_releases, personal_releases=None
    )
    # a row that one batch of an epoch does not use is in another one
    apart = all(release.batches.scheme != "epochs" for release in together.releases)
    facts = read(dataclasses.replace(plan, algorithm=together), rounds, apart=apart)
    both = _entry_of(facts, facts.local, "example", "personal")
    if both.refusal:
        return both
    caveats = (c for c in both.caveats + server.caveats if c != PERSONAL)
    conditional = "conditional" in (both.status, server.status)
    return _of_plan(plan, both, server.normals)._replace(
        status="conditional" if conditional else "proved",
        caveats=(*dict.fromkeys(caveats), PERSONAL_TOO),
    )


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
        below += caveat_lines(c for e in self for c in e.caveats)
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
        noise = show(part.noise) + " laplace" * part.is_laplace
        lines.append((*who, part.release, sampling, rate, noise, show(part.count), participation))
        who = ("", "", "")
    return lines


def _range(values) -> str:
    low, high = (f"{f(values):.4g}" if values.size else "" for f in (np.min, np.max))
    return low if low == high else f"{low} to {high}"


def ledger(plan: Plan, rounds: int = 1) -> Ledger:
    """Return what a plan releases, and to whom.

    The epsilons of the plan are computed from this.

    Args:
        plan: a Plan.
        rounds: the number of rounds; noise may change from round to round.

    Returns:
        A tuple of entries, one for each unit, view and adjacency that noise protects.  It prints as
        a table, with a line for each noisy release: the sample, the noise multiplier (std over the
        sensitivity under that adjacency), how often it happens in a participation, and the
        probability with which a client participates in a round.  If clients differ, the table shows
        those that may be the worst off.

    Raises:
        ValueError: If the plan holds traced values, or one of its functions closes over the
            federation's arrays x or y.

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
