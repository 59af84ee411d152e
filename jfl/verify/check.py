"""The check of users' code: does every path from a client's rows to its upload pass a release?

A release is a noisy sum.  The releases must be those that the algorithm declares, because only
these are accounted for.  `check_privacy` reports what the check finds.  `judge_entries` applies the
check to the ledger, so that a guarantee is "conditional" if something that it depends on is not
proved.

* `client` follows rows and keys through the traced client (by `flow`, an interpreter of jaxprs).
* `trust` decides which functions and records are jfl's own and need no trace.
* This module traces all other functions of a user to see which arrays they hold.  A function that
  holds the rows of the federation is rejected.  All other arrays are listed as constants that are
  assumed public.

docs/concepts/checked.md says what the check cannot see.
"""

import collections
import dataclasses
import warnings
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..core import checks
from ..core.records import Caveat, Fn, Mechanism, Plan, code_of
from ..models import losses
from ..privacy.mechanisms import chain as mech
from ..privacy.mechanisms.stages import After
from .client import (
    Released,
    abstract,
    cached,
    context_shapes,
    describe_batches,
    describe_chain,
    judge_client,
    key_shape,
    make_context,
    params_shapes,
    row_shapes,
    shapes_key,
)
from .flow import OPAQUE, contents
from .trust import (
    Findings,
    declared_releases,
    gradients_in,
    is_trusted,
    judge_records,
    judged_apart,
    nodes,
    user_objects_in,
)

# The first of the caveats that say why a guarantee is not proved.  All have its code.
DECLARED = Caveat(
    "Not proved: it relies on what the author of the plan's functions declares.", "declared"
)
PUBLIC_CONSTANTS = "public-constants"  # the code of the caveat that names assumed constants
INIT, LOSS, WEIGHTS = "starting parameters", "loss", "weights"
# The place of arrays that no caveat lists: jfl computed them, or no release depends on them.
UNLISTED = ""
MAX_SHAPES = 8  # maximum number of shapes that a caveat lists for one place


class Report(NamedTuple):
    """The result of `check_privacy`.  Findings are sentences; () if there are none."""

    algorithm: str
    releases: tuple  # of Released: those that reach the upload, as traced
    declared: tuple  # of Released: those that the algorithm declares
    example: tuple  # findings against guarantees for examples
    client: tuple  # findings against guarantees for clients
    noisy: bool  # whether uploads or the release have noise for whole clients
    refused: str = ""  # the rows that a function holds, for which `jfl.plan` rejects it; "" if none
    personal: tuple = ()  # findings against view "personal", for an algorithm with personal models

    @property
    def status(self) -> str:
        """The result in a word: "proved", "conditional" or "no noise".

        It is "conditional" if a function of the plan has rows of the federation in its closure, or
        if the check found a way around the noise that is meant to protect examples or clients.
        """
        if not (self.declared or self.noisy):
            return "no noise"
        against = self.refused or self.declared and self.example or self.noisy and self.client
        return "conditional" if against else "proved"

    def __str__(self):
        describe = lambda r: f"  {r.times} x {r.mechanism}; {r.reads}"
        parts = [
            f"{self.algorithm}: {self.status}",
            "releases of examples in a participation, as traced:",
            *([f"{describe(r)}; noise of {r.key}" for r in self.releases] or ["  none"]),
            "as declared:",
            *([describe(r) for r in self.declared] or ["  none"]),
        ]
        for what, findings in (
            ("a guarantee for examples", self.example),
            ("a guarantee for clients", self.client),
            ('view "personal"', self.personal),
        ):
            parts += [f"against {what}:", *(f"  {f}" for f in findings)] if findings else []
        return "\n".join(parts + ([f"refused: {self.refused}"] if self.refused else []))


def check_privacy(plan: Plan) -> Report:
    """Trace how a client's rows reach its upload, and report what is not proved.

    `jfl.guarantee` runs the same check if a function is not jfl's own, and says "conditional" if
    there are findings.

    Args:
        plan: a Plan.

    Returns:
        A Report.  It prints the releases that reach the upload, how often each happens, and with
        which key.  It prints findings as paths, such as "rows.x -> add -> payload['w']".

    Raises:
        ValueError: if the plan holds traced values.

    Privacy:
        This checks the program as JAX traces it, not Python: see docs/concepts/checked.md for what
        it cannot see.

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
    verdict = judge_client(plan)
    findings = _judge_other_parts(plan) + Findings(verdict.example, verdict.client)
    return Report(
        plan.algorithm.name,
        verdict.releases,
        tuple(
            Released(describe_chain(r.mechanism), r.count, "", describe_batches(r.batches, r.steps))
            for r in declared_releases(plan)
        ),
        *findings,
        mech.noisy(plan.upload) or mech.noisy(plan.release),
        held_rows(plan, _arrays_by_place(plan)),
        () if plan.algorithm.personal is None else personal_findings(plan),
    )


def judge_entries(plan: Plan, entries: list) -> list:
    """Return the entries of the ledger after the check.

    An entry becomes "conditional" if something that it depends on is not proved.
    """
    if not entries:
        return entries
    held = _arrays_by_place(plan)
    require_no_held_rows("jfl.guarantee", plan, held)
    findings = _judge_other_parts(plan)
    if not is_trusted(plan):
        verdict = judge_client(plan)
        findings += Findings(verdict.example, verdict.client)
    assumed = constants_caveat(held)

    def judge(entry):
        is_client = entry.unit == "client" or entry.implied
        reasons = findings.client if is_client else findings.example
        if not reasons:
            return entry._replace(caveats=entry.caveats + assumed)
        unproved = (Caveat(reason, DECLARED.code) for reason in reasons)
        caveats = (DECLARED, *unproved, *entry.caveats, *assumed)
        return entry._replace(status="conditional", caveats=caveats)

    return [judge(entry) for entry in entries]


def warn_if_conditional(where: str, entry) -> None:
    """Warn if an entry is conditional, for callers that show only an epsilon without caveats."""
    if why := [c for c in entry.caveats if code_of(c) == DECLARED.code]:
        warnings.warn(f"{where}: conditional, {'; '.join(why)}", stacklevel=3)


def personal_findings(plan: Plan) -> tuple:
    """Return findings against view "personal", for an algorithm with personal models.

    The client is traced even if it is jfl's own.  Its upload and its personal model may depend on
    rows only through the releases that the algorithm declares for uploads and personal models.
    """
    algorithm = dataclasses.replace(plan.algorithm, releases=plan.algorithm.all_releases)
    verdict = judge_client(dataclasses.replace(plan, algorithm=algorithm), keeps=True)
    held = held_rows(plan, [("client", verdict.consts)])
    return (*verdict.example, *([f"the client or its personal model holds {held}"] if held else []))


def _judge_other_parts(plan) -> Findings:
    """Return findings about stages, samplers, losses and the functions of the server."""
    hidden = Findings((), ())  # findings about primitives that may hide anything
    own_losses = [g.loss for g in gradients_in(plan.algorithm.client)]
    traces = [("the loss", "example", trace) for trace in _trace_losses(plan, own_losses)]
    traces += [
        (f"the stage {name!r}", unit, trace) for name, unit, trace in _trace_stages_of_plan(plan)
    ]
    for words, unit, trace in traces:
        found = tuple(f"what {name} in {words} does" for name in trace.opaque)
        # A function for examples may hide the rows of other clients as well.
        hidden += Findings(found if unit == "example" else (), found)
    # Data that a client passed to Python, as in a debug callback, may return in the server.
    for place, trace in _trace_functions(plan):
        found = tuple(f"what {name} in {place} does" for name in trace.opaque)
        hidden += Findings(found, found)
    found = judge_records(plan) + hidden
    return Findings(*(tuple(dict.fromkeys(part)) for part in found))


# --- rows that functions hold


def require_no_held_rows(where: str, plan: Plan, held: list | None = None) -> None:
    """Reject a plan whose functions hold the rows that it should protect."""
    name = held_rows(plan, _arrays_by_place(plan) if held is None else held)
    if name:
        checks.fail(
            where,
            "functions that receive rows as arguments",
            f"a function that holds {name}",
            "Read examples from the arguments of the loss or client: nothing protects the "
            "arrays of a closure.",
        )


def held_rows(plan: Plan, held: list) -> str:
    """Return the name of the array of the federation that a function holds; "" if none does.

    Only the arrays x and y, and complete copies of them in another shape or dtype, are recognised.
    Subsets of rows, and values computed from rows, are not recognised.  A guarantee lists such
    arrays as constants that it assumes to be public.

    Args:
        plan: a Plan.
        held: arrays by place, from `_arrays_by_place`.
    """
    fed = plan.fed
    if not checks.is_concrete((fed.x, fed.y)):
        return ""
    for name in ("x", "y"):
        rows = getattr(fed, name)
        arrays = [a for _, arrays in held for a in arrays] if np.size(rows) > 1 else []
        if any(array is rows or _is_copy(array, rows) for array in arrays):
            return f"fed.{name}"
    return ""


def _is_copy(array, rows) -> bool:
    """Return whether an array has the same numbers as the rows, which are not all equal."""
    if isinstance(array, jax.core.Tracer) or np.size(array) != np.size(rows):
        return False
    if not jnp.issubdtype(jnp.result_type(array), jnp.number):
        return False
    values = np.asarray(rows).reshape(-1)
    is_constant = (values == values[0]).all()
    return not is_constant and np.array_equal(np.asarray(array).reshape(-1), values)


# --- arrays that a plan holds


def _arrays_by_place(plan) -> list[tuple[str, list]]:
    """Return pairs (place, arrays) of the arrays in a plan's records and in the closures of its
    functions."""
    task, algorithm = plan.task, plan.algorithm
    held = _arrays_in_records(plan)
    own_losses = [task.loss, *(g.loss for g in gradients_in(algorithm.client))]
    held += [(LOSS, trace.consts) for trace in _trace_losses(plan, own_losses)]
    held += [(UNLISTED, trace.consts) for trace in _trace_losses(plan, [task.evaluation])]
    held += [(place, trace.consts) for place, _, trace in _trace_stages_of_plan(plan)]
    return held + [(place, trace.consts) for place, trace in _trace_functions(plan)]


def _trace_functions(plan) -> list[tuple[str, "Trace"]]:
    """Return pairs (place, Trace) for a user's client and each user's function of the server."""
    task, algorithm, num_clients = plan.task, plan.algorithm, plan.sampler.clients
    skip, traces = judged_apart(algorithm.client), []
    functions: list[tuple] = [
        (INIT, task.init, key_shape()),
        (WEIGHTS, plan.weights, jax.ShapeDtypeStruct((), jnp.int32)),
    ]
    parts = (algorithm.init, algorithm.client, algorithm.server, algorithm.params)
    if user_objects_in(parts, skip):
        verdict = judge_client(plan)
        # `judge_client` reports what the client hides, so only its arrays are needed here.
        traces.append(("client", Trace(verdict.consts, ())))
        if verdict.shapes is not None:
            server, payload = verdict.shapes
            functions += [
                ("algorithm.init", algorithm.init, params_shapes(plan)),
                ("server", algorithm.server, context_shapes(), server, payload),
                ("algorithm.params", algorithm.params, server),
            ]
    call_server = lambda f, numbers, *rest: f(make_context(numbers, num_clients), *rest)
    for place, function, *operands in functions:
        if user_objects_in(function, skip):
            call = call_server if place == "server" else _call
            traces.append((place, _trace_cached((place, num_clients), call, function, *operands)))
    return traces


def _call(function, *operands):
    return function(*operands)


def _arrays_in_records(plan) -> list[tuple[str, list]]:
    """Return pairs (place, arrays) of the arrays in the records of a plan."""
    task, algorithm = plan.task, plan.algorithm
    is_chain = lambda node: isinstance(node, Mechanism)
    plain = [x for x in jax.tree.leaves(algorithm, is_leaf=is_chain) if not is_chain(x)]
    parts = [(INIT, task.init), (LOSS, task.loss)]
    for chain in nodes((algorithm, plan.upload, plan.release), Mechanism):
        for s in chain.stages:
            parts.append((UNLISTED, s.strategy))
            parts.append((s.name, dataclasses.replace(s, strategy=None)))
    parts.append(("algorithm", plain))
    parts.append((UNLISTED if _weights_follow_sizes(plan) else WEIGHTS, plan.weights))
    parts.append((UNLISTED, (task.predict, task.evaluation, task.metrics)))
    return [(place, [x for x in jax.tree.leaves(part) if np.size(x) > 1]) for place, part in parts]


def _weights_follow_sizes(plan) -> bool:
    """Return whether the weights are those of "uniform" or "size"."""
    share = getattr(plan.sampler, "share", None)  # weights are divided by it
    numbers = (plan.weights, plan.fed.size, share)
    if isinstance(plan.weights, Fn) or not checks.is_concrete(numbers):
        return False
    weights = np.asarray(plan.weights, np.float64) * (1.0 if share is None else np.asarray(share))
    sizes = np.asarray(plan.fed.size, np.float64).reshape(-1)
    is_multiple_of = lambda v: np.allclose(weights * v.sum(), v * weights.sum(), rtol=1e-4)
    return is_multiple_of(np.ones(weights.shape)) or is_multiple_of(sizes)


def constants_caveat(held: list[tuple[str, list]]) -> tuple[Caveat, ...]:
    """Return the caveat that lists the arrays that a guarantee assumes public; () if there are
    none.

    No check can see what an array was computed from: a mean of rows and a model that was trained on
    them look like any other numbers.  Scalars, such as a learning rate, and arrays of one repeated
    number are not listed: a plan has dozens of them, and none can hold a row.

    Args:
        held: arrays by place.  An array in several places is listed once.
    """
    named, seen = collections.defaultdict(collections.Counter), set()
    for place, arrays in held:
        for array in arrays:
            if id(array) not in seen and place != UNLISTED and _may_hold_rows(array):
                named[place][f"{array.dtype}{list(np.shape(array))}"] += 1
            seen.add(id(array))
    if not named:
        return ()

    def words(shapes):
        listed = [f"{s} ({n} times)" if n > 1 else s for s, n in shapes.items()][:MAX_SHAPES]
        rest = sum(list(shapes.values())[MAX_SHAPES:])
        return ", ".join(listed + [f"{rest} more arrays"] * (rest > 0))

    listed = ", ".join(f"{place} {words(shapes)}" for place, shapes in named.items())
    return (Caveat(f"Assumes that constants are public: {listed}.", PUBLIC_CONSTANTS),)


def _may_hold_rows(array) -> bool:
    """Return whether an array holds numbers that are not all equal.

    uint32 is excluded: it is the dtype of the constants of random number generators, and data sets
    do not use it.
    """
    if isinstance(array, jax.core.Tracer) or np.ndim(array) == 0:
        return False
    dtype = jnp.result_type(array)
    is_number = jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_
    if dtype == jnp.uint32 or not is_number:
        return False
    values = np.asarray(array).reshape(-1)
    return bool((values != values[0]).any())


# --- functions of a user, each traced on shapes


class Trace(NamedTuple):
    """The result of tracing one function."""

    consts: list  # arrays that the function holds
    opaque: tuple  # names of primitives that may hide anything


def _trace_once(function, *operands) -> Trace:
    """Trace a function without running it."""
    try:
        closed = jax.make_jaxpr(function)(*operands)
    except Exception:  # an error of the user's function, which running it will show
        return Trace([], ())
    consts, names = contents([(closed.jaxpr.eqns, closed.consts)])
    arrays = [c for c in consts if np.size(c) > 1 and not isinstance(c, jax.core.Tracer)]
    return Trace(arrays, tuple(sorted(names & set(OPAQUE))))


def _trace_cached(kind, call, *operands) -> Trace:
    """Trace `call`, once for all operands with the same structure and shapes."""
    name = (kind, shapes_key(operands))
    return cached(name, lambda: _trace_once(call, *abstract(operands)))


def _trace_losses(plan, losses_) -> list:
    """Return the Trace of each loss that was written by a user."""
    return [_loss_trace(loss, plan) for loss in losses_ if user_objects_in(loss)]


def _loss_trace(loss, plan) -> Trace:
    """Trace a loss with its gradient, since a custom derivative rule may hold other arrays than the
    loss."""
    x, y = (jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for v in row_shapes(plan))
    draw = lambda: (jax.random.key(0),) if losses.takes_key(loss) else ()
    if not losses.takes_key(loss) and losses.draws(loss):
        x = x, losses.words_shape()

    def differentiate(loss, params, x, y):
        return jax.value_and_grad(lambda w: loss(w, x, y, *draw()))(params)

    name = ("loss", shapes_key(loss), shapes_key(plan.task.init), shapes_key(row_shapes(plan)))
    parts = abstract(loss), params_shapes(plan), x, y
    return cached(name, lambda: _trace_once(differentiate, *parts))


def _trace_stages_of_plan(plan) -> list:
    """Return (stage name, unit, Trace) of each user's function in the stages of a plan.

    Raises:
        ValueError: if the stages do not accept a contribution, so that their functions cannot be
            traced.
    """
    algorithm, found = plan.algorithm, []
    number = lambda: jax.ShapeDtypeStruct((), jnp.float32)
    # A client may hold chains that it does not declare, over gradients, models or one number.
    for chain in nodes((algorithm.client, algorithm.releases), Mechanism):
        found += _trace_chain("example", chain, lambda: params_shapes(plan), number)
    for chain in (plan.upload, plan.release):
        if chain is not None:
            found += _trace_chain("client", chain, lambda: judge_client(plan).shapes[1])
    return found


def _trace_chain(unit, chain, *contributions) -> list:
    """Return (stage name, unit, Trace) of each user's function in one chain.

    Args:
        unit: the unit that the chain protects, "example" or "client".
        chain: a Mechanism.
        contributions: functions that return the shapes of a contribution; the first one that the
            chain accepts is used.
    """
    found = []
    for s in chain.stages:
        numbers = [*s.apply.data.values()] if s.apply is not None else []
        for schedule in (*numbers, s.noise):
            if isinstance(schedule, Fn) and user_objects_in(schedule):
                round_ = jax.ShapeDtypeStruct((), jnp.int32)
                trace = _trace_cached("schedule", _call, schedule, round_)
                found.append((s.name, unit, trace))
    if not any(map(_is_users_stage, chain.stages)):
        return found
    chain = mech.at_round(chain, jnp.int32(0))
    errors = []
    for contribution in contributions:
        try:
            shapes = contribution()
            name = ("stages", shapes_key(chain), shapes_key(shapes))
            traces = cached(name, lambda shapes=shapes: _trace_stages(chain, shapes))
            return found + [(name, unit, trace) for name, trace in traces]
        except Exception as error:  # the function is the user's, and so is its error
            errors.append(checks.describe_error(error))
    return checks.fail(
        "jfl.plan",
        "stages that accept a contribution",
        f"{' -> '.join(s.name for s in chain.stages)}, which fails: {errors[0]}",
    )


def _is_users_stage(stage) -> bool:
    """Return whether a user wrote a function of this stage."""
    functions = (stage.apply, stage.bound, stage.update)
    return bool(user_objects_in([f for f in functions if f is not None]))


def _trace_stages(chain, value) -> list:
    """Return pairs (name, Trace) of a user's stages, each traced on the result of the stage before
    it."""
    state, number = abstract(mech.initial_state(chain)), jax.ShapeDtypeStruct((), jnp.float32)
    shape = next((s.shape for s in chain.stages if s.shape is not None), None)
    found = []
    for s in chain.stages:
        if s.role not in ("row", "post") or s.apply is None:
            continue
        operands = (state, value) if s.role == "row" else (value, After(number, number, shape))
        if _is_users_stage(s):
            found.append((s.name, _trace_once(_call, abstract(s.apply), *operands)))
        if s.is_map or s.role == "post":  # a clip does not change shapes
            value = jax.eval_shape(_call, s.apply, *operands)[0]
    return found
