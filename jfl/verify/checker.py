"""A type checker for privacy: does every path from a client's rows to what it sends end in a
mechanism that is charged?

A client is traced to a jaxpr on abstract values.  Rows are sources; what they reach is followed
through every step, loops and branches included, until a mark says that a mechanism of jfl made a
bounded sum of it noisy.  Keys and counters are followed too, so that each release is seen to have
noise of its own, and that there are as many as the algorithm declares.
docs/concepts/checked.md says what the check cannot see.
"""

import dataclasses
import warnings
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..core import checks
from ..core.records import Batches, Caveat, Context, Federation, Fn, Mechanism, Plan, code_of
from ..privacy.mechanisms import chain as mech
from . import public_constants, user_stages
from .client import Released, context_shapes, traced
from .declarations import Against, batch_words, chain_words, declarations, declared_of, trusted
from .ownership import foreign, gradients_in, loss_types
from .public_constants import INIT, LOSS, UNLISTED
from .tracing import abstract, avals, cached, key_shape, look_into, loss_trace, params_shapes

DECLARED = Caveat("declared by the algorithm's author", "declared")


class Report(NamedTuple):
    """What `check_privacy` found.  `example` and `client` hold what stands against a proof, in
    words; () is none."""

    algorithm: str
    releases: tuple  # of Released, that reach what the client sends
    declared: tuple  # of Released, as the algorithm declares them
    example: tuple  # findings against guarantees for examples
    client: tuple  # findings against guarantees for clients
    noisy: bool  # whether uploads or the release have noise for whole clients
    refused: str = ""  # why `jfl.plan` refuses it
    personal: tuple = ()  # findings against view "personal", for an algorithm with personal models

    @property
    def status(self) -> str:
        """ "proved" where nothing stands against what is declared, "conditional" where something
        does, or "no noise"."""
        if not (self.declared or self.noisy):
            return "no noise"
        against = self.refused or self.declared and self.example or self.noisy and self.client
        return "conditional" if against else "proved"

    def __str__(self):
        line = lambda r: (
            f"  {'?' if r.times is None else r.times} x {r.mechanism}; {r.reads}; noise of {r.key}"
        )
        parts = [
            f"{self.algorithm}: {self.status}",
            "releases of examples in a participation, as traced:",
            *(map(line, self.releases) if self.releases else ["  none"]),
            "as declared:",
            *([f"  {r.times} x {r.mechanism}; {r.reads}" for r in self.declared] or ["  none"]),
        ]
        for what, findings in (
            ("a guarantee for examples", self.example),
            ("a guarantee for clients", self.client),
            ('view "personal"', self.personal),
        ):
            parts += [f"against {what}:", *(f"  {f}" for f in findings)] if findings else []
        return "\n".join(parts + ([f"refused: {self.refused}"] if self.refused else []))


def check_privacy(plan: Plan) -> Report:
    """Follow the rows of a client through what it computes, to what it sends.

    `jfl.guarantee` does the same where a function is not jfl's own, and says "conditional" where
    this finds something.

    Args:
        plan: a Plan.

    Returns:
        A report that prints: the releases that reach the payload, how often, with which key, and
        what stands against a proof, as paths such as "rows.x -> dot_general -> add ->
        payload['w']".

    Raises:
        ValueError: if the plan holds traced values.

    Privacy:
        A check of the program as JAX traces it, not of Python: see
        docs/concepts/checked.md for what it cannot see.

    Example:
        >>> print(jfl.check_privacy(plan))  # doctest: +SKIP
        fedavg: proved
    """
    checks.require_type("jfl.check_privacy", Plan, "jfl.plan", plan=plan)
    if not checks.is_concrete(plan):
        checks.fail(
            "jfl.check_privacy",
            "a plan of concrete values",
            "traced ones",
            "Call it outside jit and vmap.",
        )
    verdict, declared = traced(plan), declared_of(plan)
    rest = _beside_the_client(plan)
    words = tuple(
        Released(chain_words(r.mechanism), r.count, "", batch_words(r.batches, r.steps))
        for r in declared
    )
    return Report(
        plan.algorithm.name,
        verdict.releases,
        words,
        rest.example + verdict.example,
        rest.client + verdict.client,
        mech.noisy(plan.upload) or mech.noisy(plan.release),
        refusal(plan),
        () if plan.algorithm.personal is None else against_personal(plan),
    )


def against_personal(plan: Plan) -> tuple:
    """Return what the trace of a client finds against view "personal".

    The client is traced even where it is jfl's own: what it keeps, and not only what it sends, must
    follow from the releases behind uploads and personal models.
    """
    algorithm = dataclasses.replace(plan.algorithm, releases=plan.algorithm.all_releases)
    both = dataclasses.replace(plan, algorithm=algorithm)
    verdict = traced(both, keeps=True)
    held = federation_array(plan.fed, verdict.consts)
    return (
        *verdict.example,
        *((f"the client or its personal model holds {held}",) if held else ()),
    )


def judged(plan: Plan, entries: list) -> list:
    """Entries of the ledger, "conditional" where something that they rest on cannot be seen to
    hold."""
    if not entries:
        return entries
    held = _arrays_held(plan)
    refuse("jfl.guarantee", plan, held)
    findings = against(plan)
    assumed = public_constants.caveats(held)

    def one(entry):
        reasons = (
            findings.example if entry.unit == "example" and not entry.implied else findings.client
        )
        if reasons:
            return entry._replace(
                status="conditional", caveats=entry.caveats + (DECLARED, *reasons, *assumed)
            )
        return entry._replace(caveats=entry.caveats + assumed)

    return [one(e) for e in entries]


def warn(where: str, entry) -> None:
    """A bare number cannot say that it is conditional."""
    if DECLARED in entry.caveats:
        reasons = entry.caveats[entry.caveats.index(DECLARED) :]
        why = "; ".join(c for c in reasons if code_of(c) != public_constants.CODE)
        warnings.warn(f"{where}: conditional, {why}", stacklevel=3)


def _beside_the_client(plan) -> Against:
    """What stands against a proof in stages, samplers and losses."""
    declared, stages = declarations(plan), user_stages.opaque(plan)
    return Against(declared.example + stages.example, declared.client + stages.client)


def against(plan: Plan) -> Against:
    """What stands against a proof; a client is traced only where it is not jfl's own, as jfl itself
    put it together."""
    rest = _beside_the_client(plan)
    if trusted(plan):
        return rest
    verdict = traced(plan)
    return Against(rest.example + verdict.example, rest.client + verdict.client)


def _arrays_held(plan) -> list[tuple[str, list]]:
    """All arrays that the functions of a plan hold, bound or in their closures, by places: what a
    trace shows, not what Python has."""
    algorithm, task = plan.algorithm, plan.task
    held = public_constants.bound(plan)
    evaluated = [] if task.evaluation is None else [task.evaluation]
    losses = [task.loss, *(g.loss for g in gradients_in(algorithm.client))]
    for place, loss in [(LOSS, f) for f in losses] + [(UNLISTED, f) for f in evaluated]:
        if foreign(loss):
            held.append((place, loss_trace(loss, plan).consts))
    look = lambda name, function, *operands: (
        cached(
            (name, avals(function), *map(avals, operands)),
            lambda: look_into(lambda f, *rest: f(*rest), abstract(function), *operands),
        ).consts
    )
    if foreign(task.init):
        held.append((INIT, look("task", task.init, key_shape())))
    if isinstance(plan.weights, Fn) and foreign(plan.weights):
        number = jax.ShapeDtypeStruct((), jnp.int32)
        held.append(("weights", look("weights", plan.weights, number)))
    held += user_stages.held(plan)
    alien = [
        bool(foreign(f, skip=(Mechanism, Batches) + loss_types(algorithm.client)))
        for f in (algorithm.init, algorithm.client, algorithm.server, algorithm.params)
    ]
    if not any(alien):
        return held
    verdict = traced(plan)
    held.append(("client", verdict.consts))
    if verdict.shapes is None:
        return held
    server, payload = verdict.shapes
    if alien[0]:
        held.append(("algorithm.init", look("init", algorithm.init, params_shapes(plan))))
    if alien[2]:
        consts = cached(
            ("server", plan.sampler.clients, avals((algorithm.server, server, payload))),
            lambda: look_into(
                lambda f, context, server, payload: f(
                    Context(
                        context[0],
                        context[1],
                        context[2],
                        context[3],
                        plan.sampler.clients,
                        context[4],
                    ),
                    server,
                    payload,
                ),
                abstract(algorithm.server),
                context_shapes(),
                server,
                payload,
            ),
        ).consts
        held.append(("server", consts))
    if alien[3]:
        held.append(("algorithm.params", look("model", algorithm.params, server)))
    return held


def refusal(plan: Plan, held: list | None = None) -> str:
    """Return which array of the federation a function of the plan holds; "" if it holds none.

    Args:
        plan: a Plan.
        held: `_arrays_held(plan)`, if it is known.
    """
    held = _arrays_held(plan) if held is None else held
    return federation_array(plan.fed, [x for _, arrays in held for x in arrays])


def federation_array(fed: Federation, arrays: list) -> str:
    """Return the name of the federation's array that is among `arrays`; "" if none is.

    The arrays x and y are found, and whole copies of them in another shape or dtype.  Some rows,
    and what was computed from rows, are not: a guarantee lists such arrays as constants that it
    assumes to be public.
    """
    if not checks.is_concrete((fed.x, fed.y)):
        return ""
    for name in ("x", "y"):
        own = getattr(fed, name)
        if np.size(own) < 2:
            continue
        for array in arrays:
            if array is own or _is_copy(array, own):
                return f"fed.{name}"
    return ""


def _is_copy(array, own) -> bool:
    """Return whether an array has all the numbers of another one, which are not all equal."""
    if isinstance(array, jax.core.Tracer) or np.size(array) != np.size(own):
        return False
    if not jnp.issubdtype(jnp.result_type(array), jnp.number):
        return False
    values = np.asarray(own).reshape(-1)
    if (values == values[0]).all():
        return False
    return np.array_equal(np.asarray(array).reshape(-1), values)


def refuse(where: str, plan: Plan, held: list | None = None) -> None:
    """Reject a plan whose functions hold the rows that it should protect."""
    rows_held = refusal(plan, held)
    if rows_held:
        checks.fail(
            where,
            "functions that read rows only as their arguments",
            f"a function that holds {rows_held}",
            (
                "A loss gets its example as (x, y), a client its rows; what is in a closure no "
                "mechanism protects."
            ),
        )
