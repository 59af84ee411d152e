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

from ..core import checks, contract
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
    hides_state,
    judge_client,
    key_shape,
    params_shapes,
    row_shapes,
    shapes_key,
)
from .flow import contents
from .trust import (
    JUDGED_APART,
    Findings,
    declared_releases,
    gradients_in,
    is_trusted,
    judge_records,
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
    personal: tuple = ()  # findings against view "personal", for an algorithm with personal models

    @property
    def status(self) -> str:
        """The result in a word: "proved", "conditional" or "no noise".

        It is "conditional" if the check found a way around the noise that is meant to protect
        examples or clients.
        """
        if not (self.declared or self.noisy):
            return "no noise"
        against = self.declared and self.example or self.noisy and self.client
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
        # Noise for clients is added after the client function, which may send rows without noise.
        aside = "outside of this proof, " if self.status == "proved" else ""
        for what, findings in (
            ("a guarantee for examples", self.example),
            ("a guarantee for clients", self.client),
            ('view "personal"', self.personal),
        ):
            parts += [f"{aside}against {what}:", *(f"  {f}" for f in findings)] if findings else []
        return "\n".join(parts)


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
        ValueError: if the plan holds traced values, or a function that holds the rows of the
            federation.

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
    traces = _trace_functions(plan)
    require_no_held_rows("jfl.check_privacy", plan, _arrays_by_place(plan, traces))
    verdict = judge_client(plan)
    findings = _judge_other_parts(plan, traces) + Findings(verdict.example, verdict.client)
    return Report(
        plan.algorithm.name,
        verdict.releases,
        tuple(
            Released(describe_chain(r.mechanism), r.count, "", describe_batches(r.batches, r.steps))
            for r in declared_releases(plan)
        ),
        *findings,
        mech.noisy(plan.upload) or mech.noisy(plan.release),
        () if plan.algorithm.personal is None else personal_findings("jfl.check_privacy", plan),
    )


def judge_entries(plan: Plan, entries: list) -> list:
    """Return the entries of the ledger after the check.

    An entry becomes "conditional" if something that it depends on is not proved.
    """
    if not entries:
        return entries
    traces = _trace_functions(plan)
    held = _arrays_by_place(plan, traces)
    require_no_held_rows("jfl.guarantee", plan, held)
    findings = _judge_other_parts(plan, traces)
    # Only a trace shows whether an upload depends on a state that is not declared.
    if not is_trusted(plan) or hides_state(plan):
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


def personal_findings(where: str, plan: Plan) -> tuple:
    """Return findings against view "personal", for an algorithm with personal models.

    The client is traced even if it is jfl's own.  Its upload and its personal model may depend on
    rows only through the releases that the algorithm declares for uploads and personal models.

    Args:
        where: the function that was called, for messages.
        plan: a Plan.
    """
    algorithm = dataclasses.replace(plan.algorithm, releases=plan.algorithm.all_releases)
    verdict = judge_client(dataclasses.replace(plan, algorithm=algorithm), keeps=True)
    require_no_held_rows(where, plan, [("client", verdict.consts)])
    return verdict.example


def _judge_other_parts(plan, traces) -> Findings:
    """Return findings about stages, samplers, losses and the functions of the server.

    Args:
        plan: a Plan.
        traces: its traces, from `_trace_functions`.
    """
    found = judge_records(plan)
    for trace in traces:
        hidden = tuple(f"what {name} in {trace.function} does" for name in trace.opaque)
        # A function for examples may hide the rows of other clients as well.
        found += Findings(hidden if trace.unit == "example" else (), hidden if trace.unit else ())
    return Findings(*(tuple(dict.fromkeys(part)) for part in found))


# --- rows that functions hold


def require_no_held_rows(where: str, plan: Plan, held: list | None = None) -> None:
    """Reject a plan with a function that holds the rows of the federation.

    Only the arrays x and y, and complete copies of them in another shape or dtype, are recognised.
    Subsets of rows, and values computed from rows, are not recognised.  A guarantee lists such
    arrays as constants that it assumes to be public.

    Args:
        where: the function that was called, for the message.
        plan: a Plan.
        held: arrays by place, from `_arrays_by_place`, which None calls.
    """
    held = _arrays_by_place(plan, _trace_functions(plan)) if held is None else held
    arrays = [array for _, arrays in held for array in arrays]
    for name in ("x", "y") if checks.is_concrete((plan.fed.x, plan.fed.y)) else ():
        rows = getattr(plan.fed, name)
        if np.size(rows) > 1 and any(a is rows or _is_copy(a, rows) for a in arrays):
            checks.fail(
                where,
                "functions that receive rows as arguments",
                f"a function that holds fed.{name}",
                "Read examples from the arguments of the loss or client: nothing protects the "
                "arrays of a closure.",
            )


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


def _arrays_by_place(plan, traces) -> list[tuple[str, list]]:
    """Return pairs (place, arrays) of the arrays in a plan's records and in the closures of its
    functions.

    Args:
        plan: a Plan.
        traces: its traces, from `_trace_functions`.
    """
    return _arrays_in_records(plan) + [(trace.place, trace.consts) for trace in traces]


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
    """The result of tracing one function of a user."""

    place: str  # for caveats that list its arrays
    function: str  # for findings about what it hides
    unit: str  # what it may leak: "example" or "client"; "" if no release depends on it
    consts: list  # arrays that it holds
    opaque: tuple  # names of primitives that may hide anything


def _trace_functions(plan) -> list[Trace]:
    """Trace a user's losses, stages and other functions in a plan."""
    task, algorithm = plan.task, plan.algorithm
    losses_ = [
        (LOSS, "", task.loss),
        *((LOSS, "example", grad.loss) for grad in gradients_in(algorithm.client)),
        (UNLISTED, "", task.evaluation),
    ]
    traces = [
        Trace(place, "the loss", unit, *_trace_loss(loss, plan))
        for place, unit, loss in losses_
        if user_objects_in(loss)
    ]
    # A client may hold chains that it does not declare, over gradients, models or one number.
    number = lambda: jax.ShapeDtypeStruct((), jnp.float32)
    for chain in nodes((algorithm.client, algorithm.releases), Mechanism):
        traces += _trace_chain("example", chain, lambda: params_shapes(plan), number)
    for chain in (plan.upload, plan.release):
        if chain is not None:
            traces += _trace_chain("client", chain, lambda: judge_client(plan).shapes[1])
    return traces + _trace_client_and_server(plan)


def _trace_client_and_server(plan) -> list[Trace]:
    """Trace a user's client and each user's function of the server."""
    task, algorithm, num_clients = plan.task, plan.algorithm, plan.sampler.clients
    traces = []
    functions: list[tuple] = [
        (INIT, task.init, key_shape()),
        (WEIGHTS, plan.weights, jax.ShapeDtypeStruct((), jnp.int32)),
    ]
    parts = (algorithm.init, algorithm.client, algorithm.server, algorithm.params)
    if user_objects_in(parts, JUDGED_APART):
        verdict = judge_client(plan)
        # `judge_client` reports what the client hides, so only its arrays are needed here.
        traces.append(Trace("client", "client", "", verdict.consts, ()))
        if verdict.shapes is not None:
            server, payload = verdict.shapes
            functions += [
                ("algorithm.init", algorithm.init, params_shapes(plan)),
                ("server", algorithm.server, context_shapes(), server, payload),
                ("algorithm.params", algorithm.params, server),
            ]

    def call_server(function, context, state, mean_upload):
        new = function(context._replace(clients=num_clients), state, mean_upload)
        return contract.server_state(algorithm.name, new, state)

    for place, function, *operands in functions:
        if user_objects_in(function, JUDGED_APART):
            call = call_server if place == "server" else _call
            name = (place, num_clients)
            # Data that a client passed to Python, as in a debug callback, may return in the server.
            found = _trace_cached(name, call, function, *operands)
            traces.append(Trace(place, place, "example", *found))
    return traces


def _trace_once(function, *operands) -> tuple[list, tuple]:
    """Trace a function without running it.

    Returns:
        The arrays that it holds, and the names of its primitives that may hide anything.
    """
    try:
        closed = jax.make_jaxpr(function)(*operands)
    except contract.ContractError:
        raise
    except Exception:  # an error of the user's function, which running it will show
        return [], ()
    consts, _, hidden = contents([(closed.jaxpr.eqns, closed.consts)])
    arrays = [c for c in consts if np.size(c) > 1 and not isinstance(c, jax.core.Tracer)]
    return arrays, tuple(sorted(hidden))


def _trace_cached(kind, call, *operands) -> tuple[list, tuple]:
    """Trace `call`, once for all operands with the same structure and shapes."""
    name = (kind, shapes_key(operands))
    return cached(name, lambda: _trace_once(call, *abstract(operands)))


def _call(function, *operands):
    return function(*operands)


def _trace_loss(loss, plan) -> tuple[list, tuple]:
    """Trace a loss with its gradient, since a custom derivative rule may hold other arrays than the
    loss."""
    x, y = (jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for v in row_shapes(plan))
    draw = lambda: (jax.random.key(0),) if losses.takes_key(loss) else ()
    x = losses.shapes_of_x(loss, x)

    def differentiate(loss, params, x, y):
        return jax.value_and_grad(lambda w: loss(w, x, y, *draw()))(params)

    return _trace_cached("loss", differentiate, loss, params_shapes(plan), x, y)


def _trace_chain(unit, chain, *contributions) -> list[Trace]:
    """Trace each user's function in one chain.

    Args:
        unit: the unit that the chain protects, "example" or "client".
        chain: a Mechanism.
        contributions: functions that return the shapes of a contribution; the first one that the
            chain accepts is used.

    Raises:
        ValueError: if the chain accepts no contribution, so that its functions cannot be traced.
    """
    found = []
    of_stage = lambda name, trace: Trace(name, f"the stage {name!r}", unit, *trace)
    for s in chain.stages:
        numbers = [*s.apply.data.values()] if s.apply is not None else []
        for schedule in (*numbers, s.noise):
            if isinstance(schedule, Fn) and user_objects_in(schedule):
                round_ = jax.ShapeDtypeStruct((), jnp.int32)
                found.append(of_stage(s.name, _trace_cached("schedule", _call, schedule, round_)))
    if not any(map(_is_users_stage, chain.stages)):
        return found
    chain = mech.at_round(chain, jnp.int32(0))
    errors = []
    for contribution in contributions:
        try:
            shapes = contribution()
            name = ("stages", shapes_key(chain), shapes_key(shapes))
            traces = cached(name, lambda shapes=shapes: _trace_stages(chain, shapes))
            return found + [of_stage(*trace) for trace in traces]
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
    """Return pairs (name, result of `_trace_once`) of a user's stages, each traced on the result of
    the stage before it."""
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
