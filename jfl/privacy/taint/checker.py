"""A type checker for privacy: does every path from a client's rows to what it sends end in a
mechanism that is charged?

A client is traced to a jaxpr on abstract values.  Rows are sources; what they reach is followed
through every step, loops and branches included, until a mark says that a mechanism of jfl made a
bounded sum of it noisy.  Keys and counters are followed too, so that each release is seen to have
noise of its own, and that there are as many as the algorithm declares.  docs/privacy.md says what
the check cannot see.
"""

import collections
import dataclasses
import functools
import inspect
import math
import os
import types
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ...core import checks, identity
from ...core.records import Batches, Caveat, Context, Fn, Keys, Mechanism, Plan, Rows
from ...kernels import normals
from ..mechanisms import chain as mech
from ..mechanisms import stages, wavelet
from ..mechanisms.stages import Stage
from . import constants
from .flow import OPAQUE, Flow, is_key

DECLARED = Caveat("declared by the algorithm's author", "declared")
KNOWN = 256  # structures whose verdict is kept
SHOWN = 7  # steps of a path that are printed
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIBRARIES = ("jax", "jaxlib", "optax", "flax", "numpy", "functools", "operator", "builtins")
QUIET = (
    "convert_element_type",
    "reshape",
    "broadcast_in_dim",
    "squeeze",
    "copy",
    "stop_gradient",
    "select_n",
    "slice",
)
SOURCES = (
    "rows",
    "draw",
    "batch",
    "example",
    "bounded",
    "kept",
    "opaque",
)  # what no payload may hold
# the bound of a row stage of jfl follows from what the stage does, by the same numbers
ROWS = {
    stages._clip_l2: stages._its_bound,
    stages._clip_per_layer: stages._layers_bound,
    stages._clip_adaptive: stages._adaptive_bound,
    wavelet._clip_ellipsoid: wavelet._ellipsoid_bound,
    wavelet._clip_bands: wavelet._bands_bound,
    wavelet._shares: wavelet._one,
}
DRAWS = {
    "_draw_full": "full",
    "_draw_without": "without_replacement",
    "_draw_with": "with_replacement",
    "_draw_poisson": "poisson",
    "_draw_epochs": "epochs",
    "_draw_few": "without_replacement",
    "_draw_poisson_few": "poisson",
    "_draw_responders": "first_responders",
}


class Released(NamedTuple):
    """One site at which a client releases something."""

    mechanism: str  # its stages
    times: int | None  # a participation; None: nobody can count them
    key: str  # where its noise is from
    reads: str  # which rows


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
        for unit, found in (("examples", self.example), ("clients", self.client)):
            parts += (
                [f"against a guarantee for {unit}:", *(f"  {f}" for f in found)] if found else []
            )
        return "\n".join(parts + ([f"refused: {self.refused}"] if self.refused else []))


def check_privacy(plan: Plan) -> Report:
    """Follow the rows of a client through what it computes, to what it sends.

    `jfl.guarantee` does the same where a function is not jfl's own, and says "conditional" where
    this finds something.

    Args:
        plan: of `jfl.plan`.

    Returns:
        A report that prints: the releases that reach the payload, how often, with which key, and
        what stands against a proof, as paths such as "rows.x -> dot_general -> add ->
        payload['w']".

    Raises:
        ValueError: if the plan holds traced values.

    Privacy:
        A check of the program as JAX traces it, not of Python: see docs/privacy.md for what it
          cannot see.

    Example:
        >>> print(jfl.check_privacy(plan))  # doctest: +SKIP
        fedavg: proved
    """
    checks.kind("jfl.check_privacy", Plan, "jfl.plan", plan=plan)
    if not checks.concrete(plan):
        checks.fail(
            "jfl.check_privacy",
            "a plan of concrete values",
            "traced ones",
            "Call it outside jit and vmap.",
        )
    verdict, declared = traced(plan), declared_of(plan)
    rest = _declarations(plan)
    words = tuple(
        Released(_chain(r.mechanism), r.count, "", _words(r.batches, r.steps)) for r in declared
    )
    return Report(
        plan.algorithm.name,
        verdict.releases,
        words,
        rest.example + verdict.example,
        rest.client + verdict.client,
        mech.noisy(plan.upload) or mech.noisy(plan.release),
        refusal(plan),
    )


def judged(plan: Plan, entries: list) -> list:
    """Entries of the ledger, "conditional" where something that they rest on cannot be seen to
    hold."""
    if not entries:
        return entries
    refuse("jfl.guarantee", plan)
    found = against(plan)

    def one(entry):
        reasons = found.example if entry.unit == "example" and not entry.implied else found.client
        return (
            entry._replace(status="conditional", caveats=entry.caveats + (DECLARED, *reasons))
            if reasons
            else entry
        )

    return [one(e) for e in entries]


def warn(where: str, entry) -> None:
    """A bare number cannot say that it is conditional."""
    if DECLARED in entry.caveats:
        why = "; ".join(entry.caveats[entry.caveats.index(DECLARED) :])
        warnings.warn(f"{where}: conditional, {why}", stacklevel=3)


class Against(NamedTuple):
    example: tuple
    client: tuple


def against(plan: Plan) -> Against:
    """What stands against a proof; a client is traced only where it is not jfl's own, as jfl itself
    put it together."""
    rest = _declarations(plan)
    if trusted(plan):
        return rest
    verdict = traced(plan)
    return Against(rest.example + verdict.example, rest.client + verdict.client)


# --- whose function it is


def own(function) -> bool:
    """True for a function of jfl itself."""
    return isinstance(function, types.FunctionType) and identity.is_ours(function)


def _plain(function):
    """The Python function in a partial, a method, or a jit."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif type(function).__module__.startswith("jax") and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def foreign(value, skip=(), _seen=None) -> list:
    """The functions and objects in `value`, and in what its functions hold, that neither jfl nor
    its libraries made."""
    seen = set() if _seen is None else _seen
    more = lambda v: foreign(v, skip, seen)
    if (
        id(value) in seen
        or type(value) in skip
        or isinstance(
            value,
            (
                str,
                bytes,
                int,
                float,
                complex,
                type(None),
                np.ndarray,
                np.generic,
                jax.Array,
                types.ModuleType,
            ),
        )
    ):
        return []
    seen.add(id(value))
    if isinstance(value, dict):
        return [f for v in value.values() for f in more(v)]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [f for v in value for f in more(v)]
    if type(value) is Fn:
        return more(value.function) + more(value.data) + more(value.static)
    if isinstance(value, functools.partial):
        return more(value.func) + more(value.args) + more(value.keywords)
    if isinstance(value, type):
        return [] if _library(value.__module__) else [value]
    plain = _plain(value)
    if isinstance(plain, types.FunctionType):
        if not own(plain) and not _library(plain.__globals__.get("__name__", "")):
            return [plain]
        return (
            more(list(_contents(plain)))
            + more(plain.__defaults__ or ())
            + more(plain.__kwdefaults__ or {})
        )
    if not _library(type(value).__module__):
        return [value]
    fields = (
        [getattr(value, f.name, None) for f in dataclasses.fields(value)]
        if dataclasses.is_dataclass(value)
        else list(getattr(value, "__dict__", {}).values())
    )
    return more(fields)


def _contents(function):
    """What the closure of a function holds."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _library(name):
    return str(name).split(".")[0] in LIBRARIES or str(name).startswith("jfl.")


def _alike(one, other) -> bool:
    """Equal structure and equal bits."""
    (a, s), (b, t) = (jax.tree.flatten(v) for v in (one, other))
    return s == t and all(_bits(x) == _bits(y) for x, y in zip(a, b))


def _bits(x):
    if isinstance(x, jax.core.Tracer):
        return "traced", id(x)
    x = np.asarray(
        jax.random.key_data(x) if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) else x
    )
    return str(x.dtype), x.shape, x.tobytes()


def _nodes(value, kind) -> list:
    return [
        n
        for n in jax.tree.leaves(value, is_leaf=lambda n: isinstance(n, kind))
        if isinstance(n, kind)
    ]


def declared_of(plan: Plan) -> tuple:
    """The noisy releases that an algorithm declares, as from its round 0 on."""
    return tuple(
        dataclasses.replace(r, mechanism=_from_start(r.mechanism))
        for r in plan.algorithm.releases
        if mech.noisy(r.mechanism)
    )


def _from_start(mechanism):
    """Without the shift that `mechanism.later` gives to what an accountant reads."""

    def one(f):
        return one(f.data["of"]) if isinstance(f, Fn) and f.function is mech._shifted else f

    inside = lambda f: f and Fn(f.function, {k: one(v) for k, v in f.data.items()}, f.static)
    return Mechanism(
        tuple(
            dataclasses.replace(s, apply=inside(s.apply), bound=inside(s.bound), noise=one(s.noise))
            for s in mechanism.stages
        ),
        mechanism.adjacency,
    )


def trusted(plan: Plan) -> bool:
    """True if jfl made the client, and what it declares is what the client holds."""
    client, declared = plan.algorithm.client, declared_of(plan)
    if not own(client.function) or foreign(client, skip=(Mechanism, Batches) + _losses(client)):
        return False
    chains, draws = _nodes(client, Mechanism), _nodes(client, Batches)
    steps = max(
        (n.steps for n in _records(client) if isinstance(getattr(n, "steps", None), int)), default=1
    )
    return all(
        any(_alike(r.mechanism, m) for m in chains)
        and any(_alike(r.batches, b) for b in draws)
        and (r.steps >= steps and r.count >= 1 if r.steps else r.count >= steps)
        for r in declared
    )


def _records(value):
    """All records in a pytree, however deep."""
    found, todo = [], [value]
    while todo:
        at = todo.pop()
        if isinstance(at, Fn):
            todo += [at.data, at.static]
        elif isinstance(at, dict):
            todo += at.values()
        elif isinstance(at, (list, tuple)):
            todo += at
        elif dataclasses.is_dataclass(at) and not isinstance(at, type):
            found.append(at)
            todo += [getattr(at, f.name) for f in dataclasses.fields(at)]
    return found


def _gradients(value) -> list:
    """What forms gradients of a loss: `gradients.Grad`, which lies above this module."""
    return [
        n
        for n in _records(value)
        if type(n).__name__ == "Grad" and own(vars(type(n)).get("__call__"))
    ]


def _losses(value) -> tuple:
    return tuple({type(n) for n in _gradients(value)})


# --- what is declared beside the client


def _declarations(plan: Plan) -> Against:
    """Stages, samplers and losses that cannot be taken at their word."""
    algorithm = plan.algorithm
    sampler = (
        ()
        if _sampled(plan.sampler.draw, plan.sampler.scheme)
        else (f"who takes part: {_name(plan.sampler.draw)}",)
    )
    example = [
        f for m in _nodes((algorithm.client, algorithm.releases), Mechanism) for f in _asserted(m)
    ]
    example += [
        f"which rows a batch holds: {_name(b.draw)}"
        for b in _nodes((algorithm.client, algorithm.releases), Batches)
        if not _drawn(b)
    ]
    for grad in _gradients(algorithm.client):
        example += _opaque(grad.loss, plan)
    client = [f for m in (plan.upload, plan.release) if m is not None for f in _asserted(m)]
    once = lambda found: tuple(dict.fromkeys((*found, *sampler)))
    return Against(once(example), once(client))


def _asserted(mechanism) -> list:
    return [
        f"the bound of the row stage {s.name!r}"
        for s in mechanism.stages
        if s.role == "row" and not own_stage(s)
    ]


def own_stage(stage: Stage) -> bool:
    """True for a row stage whose bound is that of what it does."""
    if stage.apply is None or stage.bound is None or not own(stage.apply.function):
        return False
    if stage.apply.function is stages._as_it_is:
        return (
            bool(stage.declared)  # where it may stand is checked in `jfl.plan`
            and stage.bound.function is stages._declared
            and _alike(stage.apply.data, stage.bound.data)
        )
    if (
        ROWS.get(stage.apply.function) is not stage.bound.function
        or stage.apply.static != stage.bound.static
    ):
        return False
    if (
        (stage.update is not None) != (stage.state is not None)
        or stage.update is not None
        and (
            stage.update.function is not stages._adapt
            or not _alike(stage.update.data, stage.apply.data)
        )
    ):
        return False
    return _alike(stage.apply.data, stage.bound.data)


def _sampled(draw, scheme) -> bool:
    return own(draw.function) and DRAWS.get(draw.function.__name__) == scheme


def _drawn(batches: Batches) -> bool:
    """True if a batch is drawn as its scheme says."""
    if not _sampled(batches.draw, batches.scheme):
        return False
    if batches.scheme in ("without_replacement", "with_replacement", "epochs"):
        return batches.draw.static.get("batch") == batches.batch
    data = batches.draw.data
    return batches.scheme != "poisson" or _alike(
        (data.get("rate"), data.get("expected")), (batches.rate, batches.expected)
    )


def _name(function) -> str:
    function = function.function if isinstance(function, Fn) else function
    return getattr(_plain(function), "__qualname__", type(function).__name__)


def _chain(mechanism) -> str:
    return " -> ".join(s.name for s in mechanism.stages)


def _words(batches, steps=0):
    size = (
        ""
        if batches.batch is None or batches.scheme in ("full", "poisson")
        else f"({batches.batch})"
    )
    return f"rows of batches.{batches.scheme}{size}" + (f", {steps} steps" if steps else "")


# --- functions that are traced one by one

_traces: dict = collections.OrderedDict()


def _kept(name, make):
    """make(), once for each name."""
    if name not in _traces:
        _traces[name] = make()
        while len(_traces) > KNOWN:
            _traces.popitem(last=False)
    _traces.move_to_end(name)
    return _traces[name]


def _abstract(value):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), value)


def _avals(value):
    leaves, structure = jax.tree.flatten(value)
    return structure, tuple((jnp.shape(x), str(jnp.result_type(x))) for x in leaves)


def _key():
    return jax.eval_shape(lambda: jax.random.key(0))


def _example(plan):
    x, y = _row_shapes(plan)
    return tuple(jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for v in (x, y))


def _row_shapes(plan):
    fed = plan.fed
    if fed.host is None:
        return tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (fed.x, fed.y))
    return tuple(
        jax.ShapeDtypeStruct((fed.host.slots, *rest), kind)
        for kind, rest in zip(fed.host.kind, (fed.host.shape, ()))
    )


def _params(plan):
    return _kept(("params", _avals(plan.task.init)), lambda: jax.eval_shape(plan.task.init, _key()))


class Trace(NamedTuple):
    consts: list  # arrays that the function holds
    opaque: tuple  # names of primitives that hide what they do
    error: str = ""


def _look(function, *operands) -> Trace:
    """What a function holds; it is traced, never run."""
    try:
        closed = jax.make_jaxpr(function)(*operands)
    except Exception as error:  # the function is the user's, and so is its error
        return Trace([], (), checks.cause(error))
    consts, names, todo, plain = (
        [],
        set(),
        [closed],
        lambda c: np.size(c) > 1 and not isinstance(c, jax.core.Tracer),
    )
    while todo:
        at = todo.pop()
        if isinstance(at, ClosedJaxpr):
            consts += [c for c in at.consts if plain(c)]
            at = at.jaxpr
        for equation in at.eqns:
            names.add(equation.primitive.name)
            consts += [v.val for v in equation.invars if isinstance(v, Literal) and plain(v.val)]
            for v in equation.params.values():
                todo += [
                    j
                    for j in (v if isinstance(v, (tuple, list)) else (v,))
                    if isinstance(j, (Jaxpr, ClosedJaxpr))
                ]
    return Trace(consts, tuple(sorted(names & set(OPAQUE))))


def _loss(loss, plan) -> Trace:
    """A loss with its gradient: a rule for derivatives may hold what the loss itself does not."""

    def make():
        differentiate = lambda loss, params, x, y: jax.value_and_grad(lambda w: loss(w, x, y))(
            params
        )
        return _look(differentiate, _abstract(loss), _params(plan), *_example(plan))

    return _kept(("loss", _avals(loss), _avals(plan.task.init), _avals(_row_shapes(plan))), make)


def _opaque(loss, plan) -> list:
    if not foreign(loss):
        return []
    return [f"what {name} in the loss does" for name in _loss(loss, plan).opaque]


def _held(plan) -> list:
    """All arrays that the functions of a plan hold, bound or in their closures: what a trace shows,
    not what Python has."""
    algorithm, task = plan.algorithm, plan.task
    parts = (task, algorithm, plan.upload, plan.release, plan.weights)
    found = [x for x in jax.tree.leaves(parts) if np.size(x) > 1]
    for loss in [task.loss, *(g.loss for g in _gradients(algorithm.client))]:
        if foreign(loss):
            found += _loss(loss, plan).consts
    look = lambda name, function, *operands: (
        _kept(
            (name, _avals(function), *map(_avals, operands)),
            lambda: _look(lambda f, *rest: f(*rest), _abstract(function), *operands),
        ).consts
    )
    if foreign(task.init):
        found += look("task", task.init, _key())
    if isinstance(plan.weights, Fn) and foreign(plan.weights):
        found += look("weights", plan.weights, jax.ShapeDtypeStruct((), jnp.int32))
    foreign_stages = [
        s
        for m in (plan.upload, plan.release)
        if m is not None
        for s in m.stages
        if foreign([f for f in (s.apply, s.bound, s.update) if f is not None])
    ]
    alien = [
        bool(foreign(f, skip=(Mechanism, Batches) + _losses(algorithm.client)))
        for f in (algorithm.init, algorithm.client, algorithm.server, algorithm.params)
    ]
    if not (any(alien) or foreign_stages):
        return found
    verdict = traced(plan)
    found += verdict.consts
    if verdict.shapes is None:
        return found
    server, payload = verdict.shapes
    if alien[0]:
        found += look("init", algorithm.init, _params(plan))
    if alien[2]:
        found += _kept(
            ("server", plan.sampler.clients, _avals((algorithm.server, server, payload))),
            lambda: _look(
                lambda f, context, server, payload: f(
                    Context(*context[:4], plan.sampler.clients, context[4]), server, payload
                ),
                _abstract(algorithm.server),
                _context(),
                server,
                payload,
            ),
        ).consts
    if alien[3]:
        found += look("model", algorithm.params, server)
    for s in foreign_stages:
        if s.role == "row" and s.apply is not None:
            found += look("row", s.apply, _abstract(mech.initial(Mechanism((s,)))), payload)
    return found


def refusal(plan: Plan) -> str:
    """What a function of the plan holds of the federation's rows; "" if nothing."""
    if not checks.concrete((plan.fed.x, plan.fed.y)):
        return ""
    return constants.held(plan.fed, _held(plan))


def refuse(where: str, plan: Plan) -> None:
    """Stop a plan whose functions hold the rows that it is to protect."""
    found = refusal(plan)
    if found:
        checks.fail(
            where,
            "functions that read rows only as their arguments",
            f"a function that holds {found}",
            (
                "A loss gets its example as (x, y), a client its rows; what is in a closure no "
                "mechanism protects."
            ),
        )


# --- the client


class Verdict(NamedTuple):
    example: tuple
    client: tuple
    releases: tuple
    consts: list
    shapes: Any  # of the server's state and of a payload; None where the client cannot be traced


def _context():
    number = lambda kind: jax.ShapeDtypeStruct((), kind)
    return [
        number(jnp.int32),
        number(jnp.int32),
        number(jnp.int32),
        number(jnp.float32),
        number(jnp.float32),
    ]


def traced(plan: Plan) -> Verdict:
    """The verdict on the client of a plan; plans that differ in numbers alone share it."""
    declared = declared_of(plan)
    parts = (plan.algorithm.client, tuple((r.mechanism, r.batches) for r in declared))
    leaves = jax.tree.leaves(parts)
    first, classes = {}, []
    for x in leaves:  # numbers that are equal are one
        classes.append(first.setdefault(_bits(x), len(first)))
    name = (
        "client",
        _avals(parts),
        tuple(classes),
        tuple((r.count, r.steps) for r in declared),
        plan.algorithm.stateful,
        _avals((plan.task.init, plan.algorithm.init)),
        _avals(_row_shapes(plan)),
        plan.fed.index.shape[-1],
        plan.sampler.clients,
    )
    return _kept(name, lambda: _trace(plan, declared, parts, classes))


def _trace(plan, declared, parts, classes) -> Verdict:
    x, y = _row_shapes(plan)
    slots = x.shape[0] if plan.fed.host is not None else plan.fed.index.shape[-1]
    leaves, structure = jax.tree.flatten(_abstract(parts))
    structures = []

    def program(leaves, context, keys, server, own, rows):
        client, releases = structure.unflatten(leaves)
        context = Context(*context[:4], plan.sampler.clients, context[4])
        payload, kept, _ = client(context, Keys(*keys), server, own, Rows(*rows, context.size))
        now = [(mech.at(m, context.round), b) for m, b in releases]
        structures[:] = [tuple(map(jax.tree.structure, r)) for r in now]
        return payload, kept, [[jax.tree.leaves(part) for part in r] for r in now]

    try:
        server, own_ = jax.eval_shape(plan.algorithm.init, _params(plan))
        operands = (
            leaves,
            _context(),
            [_key(), _key()],
            server,
            own_,
            [x, y, jax.ShapeDtypeStruct((slots,), jnp.int32)],
        )
        closed, shapes = jax.make_jaxpr(program, return_shape=True)(*operands)
        return _Judge(plan, declared, classes, operands, closed, shapes, structures).verdict()
    except Exception as error:  # the algorithm is the user's, and so is its error
        why = (f"the client could not be followed: {checks.cause(error)}",)
        return Verdict(why, why, (), [], None)


class _Judge:
    """Reads what a Flow found of one client."""

    def __init__(self, plan, declared, classes, operands, closed, shapes, structures):
        self.plan, self.declared, self.closed = plan, declared, closed
        self.operands, self.shapes, self.structures = operands, shapes, structures
        self.classes = classes
        paths = lambda tree, name: [
            name + jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(tree)
        ]
        self.names = paths(shapes[0], "payload") + paths(shapes[1], "own")
        self.sent = len(jax.tree.leaves(shapes[0]))
        self.example, self.client = [], []

    def follow(self, tainted=()):
        """One run, with those leaves of what the client remembers holding data."""
        flow = self.flow = Flow()
        leaves, context, keys, server, kept, rows = self.operands
        give = lambda name, aval, *sources: flow.input(name, aval, *sources)
        self.at = {}

        def named(name, aval, *sources):
            value = give(name, aval, *sources)
            self.at[name] = value.symbol
            return value

        values = [give(("leaf", c), a) for c, a in zip(self.classes, leaves)]
        values += [
            named(n, a) for n, a in zip(("round", "client", "size", "weight", "cohort"), context)
        ]
        values += [
            named("keys.batch", keys[0], ("draw", "keys.batch")),
            named("keys.noise", keys[1], ("key", "keys.noise")),
        ]
        values += [give(("server", i), a) for i, a in enumerate(jax.tree.leaves(server))]
        values += [
            give(("own", i), a, ("own", i), *([("kept", i)] if i in tainted else []))
            for i, a in enumerate(jax.tree.leaves(kept))
        ]
        values += [
            named(f"rows.{n}", a, ("rows", f"rows.{n}")) for n, a in zip(("x", "y", "index"), rows)
        ]
        outs = flow.closed(self.closed, values)
        many = len(self.names)
        self.outs, rest = outs[:many], outs[many:]
        self.charged = []  # (mechanism, batches) of each declared release, by symbols
        for (mechanism, batches), (a, b) in zip(self.structures, self.shapes[2]):
            numbers, rest = rest[: len(a)], rest[len(a) :]
            rates, rest = rest[: len(b)], rest[len(b) :]
            self.charged.append(
                (
                    (mechanism, tuple(v.symbol for v in numbers)),
                    (batches, tuple(v.symbol for v in rates)),
                )
            )

    def verdict(self):
        tainted, ways = set(), {}
        while True:
            self.follow(tainted)
            new = {}
            for i, out in enumerate(self.outs[self.sent :]):
                for token, path in out.tokens.items():
                    if (
                        token[0] in SOURCES
                        and token[0] != "kept"
                        and i not in tainted
                        and i not in new
                    ):
                        new[i] = self.way(token, path, self.names[self.sent + i])
                    if token[0] == "kept" and i not in tainted and i not in new:
                        new[i] = self.way(token, path, self.names[self.sent + i], ways)
            if not new:
                break
            tainted |= set(new)
            ways |= new
        self.leaks(ways)
        released = self.released()
        rows = self.sites(released)
        once = lambda found: tuple(dict.fromkeys(found))
        shapes = (self.operands[3], self.shapes[0])
        consts = [c for c in self.flow.consts.values() if not isinstance(c, jax.core.Tracer)]
        return Verdict(once(self.example), once(self.client), rows, consts, shapes)

    # --- what reaches the payload

    def leaks(self, ways):  # noqa: C901
        raw = {}
        for name, out in zip(self.names[: self.sent], self.outs):
            for token, path in out.tokens.items():
                if token[0] in SOURCES:
                    raw.setdefault(
                        (token[0], token[1] if token[0] in ("rows", "opaque", "draw") else ""),
                        (token, path, name),
                    )
        order = {k: i for i, k in enumerate(SOURCES)}
        seen_rows = False
        for (kind, _), (token, path, name) in sorted(raw.items(), key=lambda i: order[i[0][0]]):
            way = self.way(token, path, name, ways)
            if kind == "opaque":
                self.example.append(f"what {token[1]} does: {way}")
            elif kind == "draw":
                if not seen_rows:
                    self.example.append(
                        f"which rows were drawn reaches what the client sends: {way}"
                    )
            else:
                seen_rows = True
                self.example.append(f"rows reach what the client sends without noise: {way}")
        # whole clients are protected by noise that comes later: their function may read its own
        # rows, and no others
        for name, out in zip(self.names, self.outs):
            for token, path in out.tokens.items():
                if token[0] == "rows" and token[1] != "rows.index":
                    self.client.append(
                        "rows are read other than by batches.gather, perhaps another client's: "
                        + self.way(token, path, name)
                    )
                if token[0] == "opaque":
                    self.client.append(f"what {token[1]} does: {self.way(token, path, name)}")
        for mark in self.flow.marks.values():
            if mark.kind == "jfl_batch" and not self.reads(mark)[0]:
                self.client.append(
                    "rows are read that may be another client's: gather needs rows as the client "
                    "got them, "
                    "with slots of batches.drawn or a mask of slots < rows.size"
                )
        for name, out, aval in zip(self.names, self.outs, jax.tree.leaves(self.shapes[:2])):
            if is_key(aval) and ("key", "keys.noise") in out.tokens:
                self.example.append(f"a noise key outlives its round: {name}")
        if not self.plan.algorithm.stateful and any(
            t[0] == "own" for o in self.outs[: self.sent] for t in o.tokens
        ):
            self.client.append("clients remember, and stateful=True is not declared")

    def way(self, token, path, name, ways=None):
        """A path as text: from the source, by the steps that say something, to where it comes
        out."""
        steps, last, source = [], None, token[1]
        while path is not None:
            path, equation = path
            primitive = equation.primitive.name
            last = last or _line(equation)
            if (
                primitive not in QUIET
                and not primitive.startswith("jfl_")
                and (not steps or steps[-1] != primitive)
            ):
                steps.append(primitive)
        steps.reverse()
        if len(steps) > SHOWN:
            steps = steps[:2] + ["..."] + steps[-(SHOWN - 3) :]
        begin = source
        if token[0] in ("batch", "example", "bounded"):
            begin = "rows"
        if token[0] == "kept":
            begin = (ways or {}).get(source, "own")
            begin = begin.split(" (")[0]
        if token[0] == "opaque":
            steps = [s for s in steps if s != token[1]]
        return " -> ".join([begin, *steps, name]) + (f" ({last})" if last else "")

    # --- the releases

    def released(self):
        """The releases that the payload holds, now or in a later round."""
        sent, kept, todo = self.outs[: self.sent], set(), list(self.outs[: self.sent])
        while todo:  # what is remembered is sent once the payload reads it
            for i in {t[1] for t in todo.pop().tokens if t[0] == "own"} - kept:
                kept.add(i)
                todo.append(self.outs[self.sent + i])
        outs = [*sent, *(self.outs[self.sent + i] for i in sorted(kept))]
        return list(dict.fromkeys(t[1] for o in outs for t in o.tokens if t[0] == "released"))

    def times(self, mark):
        sizes = [self.flow.length[loop] for loop in mark.loops] + [
            size for size, _ in mark.params["batch"]
        ]
        return None if None in sizes else math.prod(sizes)

    def sites(self, released):
        flow, rows, counted = self.flow, [], collections.Counter()
        every = {n: m for n, m in flow.marks.items() if m.kind == "jfl_release"}
        for name in released:
            mark = every[name]
            times, site = self.times(mark), self.site(mark)
            key, reads, charged = site
            rows.append(Released(self.stages(mark), times, self.said(key), reads))
            if times is None:
                self.example.append(
                    f"{self.stages(mark)}: releases in a loop without a fixed number of passes"
                )
            elif charged is not None:
                counted[charged] += times
        for charged, times in counted.items():
            declared = sum(
                r.count for i, r in enumerate(self.declared) if self.class_of(i) == charged
            )
            if times > declared:
                self.example.append(
                    f"{times} releases, {declared} declared: "
                    f"{_chain(self.declared[charged].mechanism)}"
                )
        self.keys(every, released)
        self.draws(released)
        return tuple(rows)

    def class_of(self, i):
        """The first declared release that is charged as this one is."""
        alike = lambda j: (
            (self.charged[j], bool(self.declared[j].steps))
            == (self.charged[i], bool(self.declared[i].steps))
        )
        return next(j for j in range(i + 1) if alike(j))

    def stages(self, mark):
        found = [
            r.mechanism for r, c in zip(self.declared, self.charged) if c[0] == self.mechanism(mark)
        ]
        return _chain(found[0]) if found else "a chain that is not declared"

    def mechanism(self, mark):
        skip = {"jfl_release": 2 * mark.params["n"] + 3, "jfl_bounded": mark.params["n"] + 1}[
            mark.kind
        ]
        return mark.params["structure"], tuple(o.symbol for o in mark.operands[skip:])

    def site(self, mark):
        """(key, what it reads in words, which declared release it is); what is wrong with it is
        noted."""
        flow, n = self.flow, mark.params["n"]
        note = self.example.append
        where = f"a release of {self.stages(mark)}"
        key, weight, client = mark.operands[2 * n : 2 * n + 3]
        found = flow.key(key.symbol)
        if mark.params["outside"]:
            note(f"{where}: inside a shard_map, where it is not followed")
        if found[0] != self.at["keys.noise"]:
            note(
                f"{where}: its noise key does not come from keys.noise, so it is the same again in "
                f"other rounds or clients"
            )
        if flow.nodes[weight.symbol][0] != "lit" or flow.nodes[weight.symbol][3] != 1.0:
            note(f"{where}: another max_weight than 1")
        if mark.params["each"] and client.symbol != self.at["client"]:
            note(f"{where}: the noise level of another client")
        bound = flow.bounds(mark)
        reads = "rows"
        if bound is None:
            way = next(
                (
                    self.way(t, path, "release")
                    for o in mark.operands[n : 2 * n]
                    for t, path in o.tokens.items()
                    if t[0] in SOURCES
                ),
                "",
            )
            note(f"noise on a sum that no row stage of its chain bounds{': ' + way if way else ''}")
            return found, reads, None
        bound = flow.marks[bound]
        if self.mechanism(bound) != self.mechanism(mark):
            note(f"{where}: the sum is bounded by another chain than its noise is of")
        if bound.params["batch"] or mark.params["batch"]:
            note(f"{where}: under a vmap of the client's own, where it is not followed")
        if bound.params["kind"] == "single":
            return found, *self.single(mark, bound, where)
        return found, *self.examples(mark, bound, where)

    def examples(self, mark, bound, where):
        """A sum over the rows of a batch, each by itself."""
        flow, note = self.flow, self.example.append
        reference = flow.nodes[bound.operands[bound.params["n"]].symbol]
        group = (
            reference[1]
            if reference[0] == "mark" and flow.marks[reference[1]].kind == "jfl_example"
            else None
        )
        for o in bound.operands:
            for token, path in o.tokens.items():
                if token[0] in SOURCES and token != ("example", group):
                    what = (
                        f"what {token[1]} does"
                        if token[0] == "opaque"
                        else "rows reach the gradient of another row"
                    )
                    note(f"{what}: {self.way(token, path, 'clipped sum')}")
        if group is None:
            note(f"{where}: contributions that are not seen to be of one row each")
            return "rows", None
        given = [flow.nodes[o.symbol] for o in flow.marks[group].operands[:3]]
        names = {g[1] for g in given if g[0] == "mark"}
        if (
            len(names) != 1
            or [g[2] for g in given if g[0] == "mark"] != [0, 1, 2]
            or flow.marks[g := names.pop()].kind != "jfl_batch"
        ):
            note(f"{where}: a batch that was changed, or not read by batches.gather")
            return "rows", None
        fine, batches, address = self.reads(flow.marks[g])
        if not fine:
            note(f"{where}: rows that are not seen to be the client's own")
            return "rows", None
        for i, r in enumerate(self.declared):
            if (
                not r.steps
                and self.charged[i][0] == self.mechanism(mark)
                and (
                    self.charged[i][1] == batches
                    or r.batches.scheme == "full"
                    and batches in (None, "full")
                )
            ):
                mark.params["address"], mark.params["scheme"] = address, r.batches.scheme
                return _words(r.batches), self.class_of(i)
        note(f"{where}: declared neither with this chain, nor with such batches")
        return "rows", None

    def single(self, mark, bound, where):
        """One contribution of the whole client, of whatever it was made."""
        flow, note = self.flow, self.example.append
        weight = self._constant(bound.operands[bound.params["n"]].symbol)
        if weight != 1.0:
            note(f"{where}: a contribution whose weight is not seen to be 1")
        used = self.read_by(bound)
        raw = [
            (t, path)
            for o in bound.operands
            for t, path in o.tokens.items()
            if t[0] in ("rows", "opaque")
        ]
        for token, path in raw:
            what = (
                f"what {token[1]} does"
                if token[0] == "opaque"
                else "rows are read other than by batches.gather"
            )
            note(f"{what}: {self.way(token, path, 'release')}")
        read = [self.reads(flow.marks[b]) for b in used]
        if not all(fine for fine, _, _ in read):
            note(f"{where}: rows that are not seen to be the client's own")
        for i, r in enumerate(self.declared):
            if self.charged[i][0] != self.mechanism(mark) or r.mechanism.adjacency != "replace_one":
                continue
            batches = [b for _, b, _ in read]
            looks = [self.within(flow.marks[b], mark) for b in used]
            if r.batches.scheme == "full":
                return _words(r.batches, r.steps), self.class_of(i)
            if (
                all(b == self.charged[i][1] for b in batches)
                and None not in looks
                and sum(looks) <= max(r.steps, 1)
            ):
                for b, (_, _, address) in zip(used, read):
                    flow.marks[b].params["address"], flow.marks[b].params["scheme"] = (
                        address,
                        r.batches.scheme,
                    )
                mark.params["used"] = used
                return _words(r.batches, r.steps), self.class_of(i)
        note(
            f"{where}: declared neither with this chain under replace_one, nor with so many such "
            f"batches"
        )
        return "rows", None

    def within(self, batch, mark):
        """How often a batch is drawn for one of the releases; those are in loops around both."""
        sizes = [self.flow.length[loop] for loop in batch.loops if loop not in mark.loops]
        return None if None in sizes else math.prod(sizes)

    def read_by(self, bound) -> list:
        """The batches that went into a sum, by whatever way."""
        flow, todo, seen, out = self.flow, [t for o in bound.operands for t in o.tokens], set(), []
        while todo:
            token = todo.pop()
            if token in seen or token[0] not in ("batch", "example", "bounded", "released"):
                continue
            seen.add(token)
            if token[0] == "batch":
                out.append(token[1])
            mark = flow.marks.get(token[1])
            if mark is not None and token[0] != "batch":
                todo += [t for o in mark.operands for t in o.tokens]
        return out

    def reads(self, mark):
        """(whether a gather reads rows of the client alone, its batches by symbols, the address of
        their draw)."""
        flow = self.flow
        x, y, index, size, slots, mask = (o.symbol for o in mark.operands[3:9])
        given = {"rows.x": x, "rows.y": y, "size": size} | (
            {"rows.index": index} if self.plan.fed.host is None else {}
        )
        if any(self.at[name] != symbol for name, symbol in given.items()) or mark.params["batch"]:
            return False, None, None
        drawn = [self.drawn(s) for s in (slots, mask)]
        if (
            all(d is not None for d in drawn)
            and drawn[0][0] == drawn[1][0]
            and (drawn[0][1], drawn[1][1]) == (0, 1)
            and drawn[0][2] == drawn[1][2]
        ):
            of, loop = flow.marks[drawn[0][0]], drawn[0][2]
            key, step, size = (o.symbol for o in of.operands[2:5])
            if size != self.at["size"]:
                return False, None, None
            steps = flow.affine(step)
            steps = steps if loop is None else flow._placed(steps, {("index", loop): 1}, 0)
            root, path = flow.key(key)
            path = path if loop is None else flow._moved((root, path), {("index", loop): 1}, 0)[1]
            batches = of.params["structure"], tuple(o.symbol for o in of.operands[5:])
            return True, batches, (root, (*path, ("child", steps)))
        test = flow.nodes[mask]  # slots below the client's size, whatever they are
        if test[:2] == ("op", "lt") and test[3] == slots and self._same(test[4]) == self.at["size"]:
            return True, "full", None
        return False, None, None

    def drawn(self, symbol):
        """(mark of a draw, which of its results, the loop that goes through it)."""
        content, loop = self.flow.nodes[symbol], None
        if content[0] == "elem":
            loop, content = content[1], self.flow.nodes[content[2]]
            if content[:2] == ("op", "broadcast_in_dim"):  # a mask that all steps share
                content = self.flow.nodes[content[3]]
        if content[0] != "mark" or self.flow.marks[content[1]].kind != "jfl_slots":
            return None
        batch = self.flow.marks[content[1]].params["batch"]
        of = self.flow.shapes[self.flow.node("mark", content[1], content[2])][-1:]
        if (
            (loop is None) != (not batch)
            or len(batch) > 1
            or batch
            and any(d not in (0, -1) for d in batch[0][1])
            or self.flow.shapes[symbol] != of
        ):
            return None
        return content[1], content[2], loop

    def _same(self, symbol):
        """A symbol before it was only stored otherwise."""
        content = self.flow.nodes[symbol]
        while content[0] == "op" and content[1] in (
            "broadcast_in_dim",
            "convert_element_type",
            "reshape",
            "squeeze",
        ):
            symbol = content[3]
            content = self.flow.nodes[symbol]
        return symbol

    def _constant(self, symbol):
        content = self.flow.nodes[self._same(symbol)]
        return content[3] if content[0] == "lit" else None

    # --- keys

    def keys(self, every, released):
        """Each release has a key of its own, and nothing else draws from it."""
        flow, note = self.flow, self.example.append
        found = {n: flow.key(m.operands[2 * m.params["n"]].symbol) for n, m in every.items()}
        for name in released:
            mark, key = every[name], found[name]
            if key[0] != self.at["keys.noise"]:
                continue
            if set(flow.covers(key, mark.loops)) != set(mark.loops):
                note(f"the passes of a loop share one noise key: {self.said(key)}")
            for other, theirs in found.items():
                if (
                    other != name
                    and not (other in released and other < name)
                    and theirs[0] == key[0]
                    and not flow.apart(key, theirs)
                ):
                    note(
                        f"two releases share one noise key: {self.said(key)} and "
                        f"{self.said(theirs)}"
                    )
        for symbol, equation in flow.drawn.values():
            root, steps = flow.key(symbol)
            if root != self.at["keys.noise"]:
                continue
            for name in released:
                if found[name][0] == root and self.above(steps, found[name][1]):
                    line = _line(equation)
                    note(
                        (
                            f"{equation.primitive.name} reads the noise key of a release, "
                            f"{self.said((root, steps))}"
                        )
                        + (f" ({line})" if line else "")
                    )
                    break

    def above(self, steps, below) -> bool:
        """True if a key may be that of a release, or one from which it descends."""
        cut = lambda path: path[
            : next((i for i, s in enumerate(path) if s[0] == "often"), len(path))
        ]
        one, other = cut(steps), cut(below)
        if len(one) == len(steps) and len(other) == len(below) and len(steps) > len(below):
            return False
        return not any(self.flow._differ(s, t) for s, t in zip(one, other))

    def draws(self, released):
        """Batches that count as independent samples are drawn from addresses of their own."""
        flow, note = self.flow, self.example.append
        used = []
        for name in released:
            mark = flow.marks[name]
            if "address" in mark.params:
                used.append((mark.params["address"], mark.params["scheme"], mark.loops))
            for b in mark.params.get("used", ()):
                batch = flow.marks[b]
                used.append((batch.params["address"], batch.params["scheme"], batch.loops))
        seen = []
        for address, scheme, loops in used:
            if scheme == "full" or address is None:
                continue
            if address[0] != self.at["keys.batch"]:
                note(
                    "batches are not drawn from keys.batch, so they are the same again in other "
                    "rounds or clients"
                )
            elif scheme == "epochs":
                if not self.in_turn(address, loops) or any(a[0] == address[0] for a in seen):
                    note("batches of epochs that are not taken step by step from 0")
            elif flow.covers(address, loops) != set(loops) or any(
                not flow.apart(address, a) for a in seen
            ):
                note("batches that count as independent draws share one draw")
            seen.append(address)

    def in_turn(self, address, loops):
        atoms, first = address[1][-1][1]
        return (
            len(address[1]) == 1
            and first == 0
            and len(loops) <= 1
            and atoms == {("index", loop): 1 for loop in loops}
        )

    def said(self, key) -> str:
        """A key as one would write it."""
        root, steps = key
        names = {symbol: name for name, symbol in self.at.items()}
        text = names.get(root, "a key that is not the client's")
        for step in steps:
            if step[0] == "often":
                text = f"{text}, split again and again"
                continue
            atoms, constant = step[1]
            parts = [
                "step" if a[0] == "index" else "place" if a[0] == "place" else "a number"
                for a in atoms
            ]
            parts += [str(constant)] if constant or not parts else []
            text = f"fold_in({text}, {' + '.join(parts)})"
        return text


@functools.cache
def _site():
    return tuple(
        {os.path.dirname(os.path.dirname(os.path.abspath(m.__file__))) for m in (jax, np)}
        | {os.path.dirname(os.path.abspath(m.__file__)) for m in (inspect, normals)}
    )


def _line(equation) -> str:
    """Where the user's own code made an equation: "client, mine.py:12"; "" where jfl or a library
    did."""
    trace = equation.source_info.traceback
    for frame in trace.frames if trace is not None else ():
        name = frame.file_name
        if name == __file__:  # beyond it are those who asked
            return ""
        if name.startswith((HERE, *_site(), "<frozen")):
            continue
        return (
            f"{frame.function_name.rsplit('.', 1)[-1]}, {os.path.basename(name)}:{frame.line_num}"
        )
    return ""
