"""From a plan to what its rounds release about an example or a client, for each view."""

import dataclasses
from typing import Any

import numpy as np

from ...core import checks, pytrees
from ...core.errors import NotAnalysable
from ...core.records import Caveat, Plan
from ...kernels.normals import MOST as MOST_NORMALS
from ..mechanisms import float_floors
from ..mechanisms.chain import noisy
from ..mechanisms.distributed import encoding_of
from ..taint import checker as taint
from ..taint import tracing
from . import client_level, example_level
from .entry import Clients, Entry, Part
from .participation import EVERY_ROUND as EVERY_ROUND
from .participation import HONEST as HONEST
from .participation import VIEWS as VIEWS
from .participation import attendance_of, share_of
from .reach import NORMALS_OF_A_PARAMETER, with_reach
from .table import Ledger

SIMULATION = Caveat(
    "For simulation only: the noise is float32 from a non-cryptographic generator. Anyone who "
    "knows the seed can remove it. The low bits of a float32 release distinguish neighbouring data "
    "sets with delta >= 0.13 at any epsilon.",
    "simulation",
)
STOPS = Caveat(
    "a run that stops shows why: numbers that are not finite, an empty cohort "
    "(tolerate=('nonfinite_rows', 'empty_cohort') goes on instead), a solve that is not exact "
    "enough, or a draw beyond its capacity (delta pays for this one alone)",
    "stops",
)
PUBLIC = Caveat("sizes, rates and weights are public constants", "public-sizes")
# arrays of a sampler that describe clients
OF_CLIENTS = {
    "latency": Caveat("Assumes that the latencies of clients are public.", "public-latencies"),
    "available": Caveat(
        "Assumes that the times at which clients are available are public.", "public-availability"
    ),
    "share": Caveat(
        "Assumes that the probabilities with which clients are drawn are public.", "public-shares"
    ),
}
PERSONAL = Caveat(
    "Does not cover the personal models of clients, which stay with them; view='personal' does.",
    "personal",
)
PERSONAL_BARE = Caveat(
    "Does not cover the personal models of clients: no noise for examples protects them, so they "
    "must stay with their clients.",
    "personal",
)
PERSONAL_TOO = Caveat(
    "Covers uploads and personal models: the observer sees all models of all clients after every "
    "round.",
    "personal-too",
)
PAIRED = Caveat("sweep points that share a seed share noise", "paired-noise")
IMPLIED = Caveat("implied by the client-level guarantee", "implied")
IMPLIED_TWICE = Caveat(
    "implied by the client-level noise: an example moves an upload by up to twice its bound",
    "implied-twice",
)


def entries(plan: Plan, rounds: int = 1, others: bool = True) -> list[Entry]:
    """All that the noise of the first `rounds` rounds of a plan may protect; empty without noise.

    Args:
        plan: of `jfl.plan`.
        rounds: how many of its rounds are looked at.
        others: whether noise of other clients counts for a third party.

    Raises:
        ValueError: if the plan holds traced values: a ledger is kept on the host; if a clip norm or
            noise that is a function of the round falls below 1e-15 in one of the rounds.
    """
    if not checks.concrete(plan):
        checks.fail(
            "jfl.guarantee",
            "a plan of concrete values",
            "traced ones",
            "Call it outside jit and vmap.",
        )
    float_floors.lasting("jfl.guarantee", plan, rounds)
    own = example_level.examples(plan, rounds)
    clients = client_level.uploads(plan, rounds, others) + client_level.release(
        plan, rounds, others
    )
    proved = any(not e.refusal for e in own)
    listed = own + clients + ([] if proved else [_implied(plan, e) for e in clients])
    return taint.judged(
        plan,
        [
            with_reach(e._replace(caveats=e.caveats + _travelling(plan, e)), _normals(plan, e))
            for e in listed
        ],
    )


def personal(plan: Plan, rounds: int) -> Entry:
    """Return the entry of an observer who sees all uploads and all personal models.

    The releases behind uploads and those behind personal models are composed.  A trace of the
    client shows that what it keeps follows from them, and that they draw independent batches.

    Raises:
        NotAnalysable: if the algorithm has no personal models, does not say what they are made
            from, or makes them without noise; if the uploads have no guarantee for examples; or if
            the trace finds rows that reach what a client keeps.
    """
    made_of = plan.algorithm.personal_releases
    if plan.algorithm.personal is None or made_of is None:
        checks.fail(
            "jfl.guarantee",
            "personal models whose releases are known, for view='personal'",
            f"{plan.algorithm.name}, which "
            + ("has none" if plan.algorithm.personal is None else "does not say what they are of"),
            "Ask for view='server'.",
            error=NotAnalysable,
        )
    if any(not noisy(release.mechanism) for release in made_of):
        checks.fail(
            "jfl.guarantee",
            "noise in the training of personal models, for view='personal'",
            "gradients without noise",
            f"Give {plan.algorithm.name} a private personal_grad.",
            error=NotAnalysable,
        )
    seen = [e for e in entries(plan, rounds) if e.view == "server" and e.unit == "example"]
    if not seen or seen[0].implied:
        checks.fail(
            "jfl.guarantee",
            "noise in the local steps, for view='personal'",
            "uploads that no noise of the client's own steps protects",
            "Train with jfl.private_grad.",
            error=NotAnalysable,
        )
    server = seen[0]
    if server.refusal:
        return server._replace(view="personal")
    if made_of and any(r.batches.scheme == "epochs" for r in plan.algorithm.all_releases):
        checks.fail(
            "jfl.guarantee",
            "batches that are drawn independently, for view='personal'",
            "batches.epochs, in which personal training begins inside an epoch",
            "Use batches.poisson or batches.without_replacement.",
            error=NotAnalysable,
        )
    found = taint.against_personal(plan)
    if found:
        checks.fail(
            "jfl.guarantee",
            "a client that keeps only what noise protects, for view='personal'",
            found[0],
            "jfl.check_privacy(plan) lists all findings.",
            error=NotAnalysable,
        )
    algorithm = dataclasses.replace(
        plan.algorithm, releases=plan.algorithm.all_releases, personal_releases=None
    )
    plan = dataclasses.replace(plan, algorithm=algorithm)
    both = example_level.examples(plan, rounds, apart=True)[0]
    if both.refusal:
        return both._replace(view="personal")
    caveats = tuple(c for c in both.caveats + server.caveats if c != PERSONAL)
    conditional = "conditional" in (both.status, server.status)
    return with_reach(
        both._replace(
            view="personal",
            status="conditional" if conditional else server.status,
            caveats=(*dict.fromkeys(caveats), PERSONAL_TOO),
        ),
        server.normals,
    )


def _normals(plan, entry) -> float:
    """Return how many normals one release is computed from, at most."""
    draws = plan.sampler.clients if entry.unit == "client" or entry.implied else 1
    try:
        drawn = NORMALS_OF_A_PARAMETER * pytrees.size(tracing.params_shapes(plan))
    except Exception:  # a task that cannot be traced here: what one key can draw at most
        drawn = MOST_NORMALS
    return float(min(drawn, MOST_NORMALS) * draws)


def ledger(plan: Plan, rounds: int = 1) -> Ledger:
    """What `rounds` rounds of a plan release, and to whom: all that its epsilons follow from.

    Args:
        plan: of `jfl.plan`.
        rounds: how many of its rounds are looked at; noise may change from round to round.

    Returns:
        A tuple of entries, one for each unit, view and adjacency that noise protects, whose fields
        are plain data.  It prints as a table, with a line for each noisy release: on which sample,
        with which noise multiplier (std over the sensitivity under that adjacency), how often.
        Where clients differ, it shows those that may be the worst.

    Raises:
        ValueError: if the plan holds traced values, or its functions hold rows.

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
          caveat: planned worst case: the client participates in every round
          caveat: ...
    """
    checks.whole("jfl.ledger", rounds=rounds)
    return Ledger(entries(plan, rounds), rounds)


def only_the_release(plan: Plan) -> bool:
    """True if noise is added only after the server has seen the uploads."""
    return noisy(plan.release) and not noisy(plan.upload) and not example_level.examples(plan, 1)


def _travelling(plan, entry):
    uneven = entry.unit == "client" and (
        callable(plan.weights) or np.ptp(np.asarray(plan.weights)) > 0
    )
    public = entry.adjacency == "add_remove" or uneven
    return (
        (SIMULATION, STOPS)
        + ((PUBLIC,) if public else ())
        + tuple(c for name, c in OF_CLIENTS.items() if _has(plan.sampler, name))
        + ((PAIRED,) if plan.paired_noise else ())
        + _of_personal_models(plan)
        + tuple(Caveat(text, "data") for text in getattr(plan.fed, "caveats", ()))
    )


def _has(sampler, name):
    return getattr(sampler, name, None) is not None


def _of_personal_models(plan) -> tuple:
    """The caveat of all views but "personal"."""
    algorithm = plan.algorithm
    if algorithm.personal is None:
        return ()
    declared = bool(algorithm.releases) and algorithm.personal_releases is not None
    counted = declared and all(noisy(r.mechanism) for r in algorithm.all_releases)
    return (PERSONAL if counted else PERSONAL_BARE,)


def _implied(plan, entry):
    """What protects a client protects its examples.

    Under replace_one the numbers are the same.  Under add_remove they are not: the client with the
    other example is two steps away, so its upload moves by twice the bound, and only its absence is
    credited.
    """
    if entry.refusal:
        return entry._replace(unit="example", implied=True)
    present = np.flatnonzero(np.asarray(plan.fed.size).reshape(-1) > 0)
    if entry.adjacency == "replace_one":
        return entry._replace(
            unit="example",
            implied=True,
            clients=entry.clients._replace(counted=present),
            caveats=entry.caveats + (IMPLIED,),
        )
    attendance = attendance_of(plan, entry.view, np.max(share_of(plan.sampler)))
    share = np.full(plan.sampler.clients, np.max(share_of(plan.sampler)))
    encoding: Any = encoding_of(plan.upload)
    parts = tuple(
        Part(p.release, p.multiplier, moves=2.0, of_rounds=p.of_rounds, law=p.law)
        if p.renyi is None
        else client_level.of_integers(encoding, p.renyi[2], moves=2.0)
        for p in entry.parts
    )
    # rounds that do not stand alone: who is absent from one is in the noise of others
    alone = all(p.of_rounds is None for p in parts)
    return entry._replace(
        unit="example",
        parts=parts,
        clients=Clients(np.ones(share.shape, int), share, present),
        chance=attendance.chance if alone else None,
        turns=attendance.turns if alone else 1,
        worst=tuple((c, c) for c in range(parts[0].multiplier.shape[1])),
        overflow=0.0,
        implied=True,
        drawn="",
        mixture=attendance.gains and alone,
        caveats=entry.caveats + (IMPLIED_TWICE,),
    )
