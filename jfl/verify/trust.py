"""The parts of a plan that need no trace: functions of jfl, and records as jfl built them.

The functions of jfl and of the libraries below are covered by their own tests.  A record, such as a
stage or a sampler, states facts that an accountant relies on.  They hold if its functions are
jfl's and use the same numbers that the record states.
"""

import dataclasses
import functools
import types
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..core import identity
from ..core.records import Batches, Fn, Mechanism, Plan
from ..privacy.mechanisms import chain as mech
from ..privacy.mechanisms import linear_maps, stages, wavelet
from ..privacy.mechanisms.stages import Stage
from ..sampling import clients

LIBRARIES = "jax jaxlib optax flax equinox numpy functools operator builtins jfl".split()
ARRAYS = (np.ndarray, jax.Array)
PLAIN = (*ARRAYS, np.generic, str, bytes, int, float, complex, type(None), types.ModuleType)

# The row stages of jfl: what clips -> (what states the bound, what follows a release).
ROW_STAGES = {
    stages._clip_l2: (stages._its_bound, None),
    stages._clip_l1: (stages._its_bound, None),
    stages._clip_per_layer: (stages._layers_bound, None),
    stages._clip_adaptive: (stages._adaptive_bound, stages._adapt),
    wavelet._clip_ellipsoid: (wavelet._ellipsoid_bound, None),
    wavelet._clip_bands: (wavelet._bands_bound, None),
    wavelet._shares: (wavelet._one, None),
    stages._clip_scaled: (stages._scaled_bound, stages._unscale),
}
# Accountants read some facts off these names.
STAGE_NAMES = {
    "clip_l2": stages._clip_l2,
    "clip_l1": stages._clip_l1,
    "clip_per_layer": stages._clip_per_layer,
    "clip_adaptive": stages._clip_adaptive,
}
# The scheme that each function of jfl draws cohorts or batches by.
SCHEMES = {
    "_draw_full": "full",
    "_draw_without": "without_replacement",
    "_draw_with": "with_replacement",
    "_draw_poisson": "poisson",
    "_draw_epochs": "epochs",
    "_draw_few": "without_replacement",
    "_draw_poisson_few": "poisson",
    "_draw_responders": "first_responders",
    "_draw_separated": "min_separation",
    "_draw_cyclic": "cyclic_poisson",
    "_draw_available": "available_poisson",
    "_draw_truncated": "truncated_poisson",
    "_draw_allocated": "random_allocation",
    "_draw_bins": "balls_in_bins",
}


class Findings(NamedTuple):
    """Findings that stand against a proof, as sentences."""

    example: tuple  # against guarantees for examples
    client: tuple  # against guarantees for clients

    def __add__(self, other):
        return Findings(self.example + other.example, self.client + other.client)


# --- functions


def is_jfl_function(function) -> bool:
    return isinstance(function, types.FunctionType) and identity.is_jfl_function(function)


def user_objects_in(value, skip=()) -> list:
    """Return the functions and objects in a value that neither jfl nor its libraries made.

    The closures and defaults of functions are searched as well.

    Args:
        value: anything.
        skip: types whose instances are not searched.
    """
    found, seen, todo = [], {}, [value]
    while todo:
        value = todo.pop()
        if id(value) in seen or type(value) in skip or isinstance(value, PLAIN):
            continue
        seen[id(value)] = value  # and keeps it alive, so that no other object has its id
        parts = _parts_of(value)
        if parts is None:
            found.append(value)
        else:
            todo += parts
    return found


def _parts_of(value) -> list | None:
    """Return what a value of jfl or a library holds, or None if the value is a user's."""
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [*value]
    if type(value) is Fn:
        return [value.function, value.data, value.static]
    if _binds_arrays(value):
        return None
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    plain = value if isinstance(value, type) else _python_function(value)
    if isinstance(plain, types.FunctionType):
        if not is_jfl_function(plain) and not _is_library(plain.__globals__.get("__name__", "")):
            return None
        cells = [c.cell_contents for c in plain.__closure__ or () if _is_filled(c)]
        return [*cells, plain.__defaults__, plain.__kwdefaults__]
    if isinstance(value, type):
        return [] if _is_library(value.__module__) else None
    if not _is_library(type(value).__module__):
        return None
    if dataclasses.is_dataclass(value):
        return [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    return [*getattr(value, "__dict__", {}).values()]


def _is_library(module) -> bool:
    return str(module).split(".")[0] in LIBRARIES


def _python_function(function):
    """Return the Python function in a partial, a method or a jit."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif type(function).__module__.startswith("jax") and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def _binds_arrays(function) -> bool:
    """Return whether a partial or a method holds an array, so that it is a user's even if its
    function is a library's."""
    if isinstance(getattr(function, "__self__", None), ARRAYS):
        return True
    if not isinstance(function, functools.partial):
        return False
    bound = jax.tree.leaves((function.args, function.keywords))
    return any(isinstance(x, ARRAYS) for x in bound) or _binds_arrays(function.func)


def _is_filled(cell) -> bool:
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:
        return False


def name_of(function) -> str:
    function = function.function if isinstance(function, Fn) else function
    return getattr(_python_function(function), "__qualname__", type(function).__name__)


# --- records


def nodes(value, kind) -> list:
    """Return the nodes of one type in a pytree."""
    found = jax.tree.leaves(value, is_leaf=lambda n: isinstance(n, kind))
    return [n for n in found if isinstance(n, kind)]


def records_in(value) -> list:
    """Return all records and bound functions in a pytree, however deep."""
    found, todo = [], [value]
    while todo:
        current = todo.pop()
        if isinstance(current, dict):
            todo += current.values()
        elif isinstance(current, (list, tuple)):
            todo += current
        elif isinstance(current, Fn):
            found.append(current)
            todo += [current.data, current.static]
        elif dataclasses.is_dataclass(current) and not isinstance(current, type):
            found.append(current)
            todo += [getattr(current, f.name) for f in dataclasses.fields(current)]
    return found


def gradients_in(value) -> list:
    """Return every `per_example.Grad` in a value, by its name: this module cannot import it."""
    is_grad = lambda t: t.__name__ == "Grad" and is_jfl_function(vars(t).get("__call__"))
    return [n for n in records_in(value) if is_grad(type(n))]


def judged_apart(value) -> tuple:
    """Return the types of records whose functions are judged where they are declared."""
    return (Mechanism, Batches, *{type(g) for g in gradients_in(value)})


def bits_of(x):
    if isinstance(x, jax.core.Tracer):
        return "traced", id(x)
    is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    x = np.asarray(jax.random.key_data(x) if is_key else x)
    return str(x.dtype), x.shape, x.tobytes()


def same_bits(one, other) -> bool:
    """Return whether two pytrees have equal structures and equal bits."""
    (a, s), (b, t) = (jax.tree.flatten(v) for v in (one, other))
    return s == t and all(bits_of(x) == bits_of(y) for x, y in zip(a, b))


# --- what a plan declares


def declared_releases(plan: Plan) -> tuple:
    """Return the noisy releases that an algorithm declares, with schedules from its round 0 on.

    This undoes the shift that `chain.later` gives to what an accountant reads.
    """
    start = lambda f: f.data["of"] if isinstance(f, Fn) and f.function is mech._shifted else f
    inside = lambda f: f and Fn(f.function, {k: start(v) for k, v in f.data.items()}, f.static)

    def from_start(release):
        chain = release.mechanism
        parts = [
            dataclasses.replace(
                s, apply=inside(s.apply), bound=inside(s.bound), noise=start(s.noise)
            )
            for s in chain.stages
        ]
        return dataclasses.replace(release, mechanism=Mechanism(tuple(parts), chain.adjacency))

    return tuple(from_start(r) for r in plan.algorithm.releases if mech.noisy(r.mechanism))


def is_trusted(plan: Plan) -> bool:
    """Return whether jfl made the client, and the client holds what it declares.

    A client of jfl whose releases do not follow from its steps only is never trusted.
    """
    client, records = plan.algorithm.client, records_in(plan.algorithm.client)
    functions = [r.function for r in records if isinstance(r, Fn)]
    if any(getattr(f, "_always_traced", False) for f in functions):
        return False
    if not is_jfl_function(client.function) or user_objects_in(client, judged_apart(client)):
        return False
    counts = [getattr(r, "steps", None) for r in records if not isinstance(r, Fn)]
    steps = max((n for n in counts if isinstance(n, int)), default=1)
    held = lambda part, kind: any(same_bits(part, n) for n in nodes(client, kind))
    return all(
        held(r.mechanism, Mechanism)
        and held(r.batches, Batches)
        and (r.steps >= steps and r.count >= 1 if r.steps else r.count >= steps)
        for r in declared_releases(plan)
    )


def judge_records(plan: Plan) -> Findings:
    """Return what the stages and samplers of a plan state without proof."""
    algorithm, sampler = plan.algorithm, plan.sampler
    parts = (algorithm.client, algorithm.releases)
    example = [f for m in nodes(parts, Mechanism) for f in _unproved_in(m)]
    example += [
        f"which rows a batch holds: {name_of(b.draw)}"
        for b in nodes(parts, Batches)
        if not _draws_as_stated(b)
    ]
    chains = [m for m in (plan.upload, plan.release) if m is not None]
    cohort = [] if _samples_as_stated(sampler) else [f"who takes part: {name_of(sampler.draw)}"]
    client = [f for m in chains for f in _unproved_in(m)]
    return Findings(tuple(example + cohort), tuple(client + cohort))


def _unproved_in(mechanism) -> list:
    rows = [s for s in mechanism.stages if s.role == "row"]
    follows_l1 = bool(rows) and rows[-1].apply.function is stages._clip_l1
    found = [f"the bound of the row stage {s.name!r}" for s in rows if not is_own_row_stage(s)]
    for s in mechanism.stages:
        if s.law == "laplace" and not (follows_l1 and mech.plain_laplace(s)):
            found.append("Laplace noise that was changed, or follows a clip other than clip_l1")
        if s.strategy is not None and not _is_own_strategy(s.strategy):
            found.append(f"the strategy of correlated noise: {s.strategy!r}")
    return found


def _is_own_strategy(strategy) -> bool:
    """Return whether a strategy is as `jfl.strategies` made it, restarted or not."""
    part = strategy
    while part is not None:
        if type(part).__module__ != "jfl.privacy.mechanisms.strategies":
            return False
        part = getattr(part, "of", None)
    return strategy.accounting_matches_noise()


def is_own_row_stage(stage: Stage) -> bool:
    """Return whether jfl made the function and the bound of a row stage, so that they agree."""
    apply, bound, update = stage.apply, stage.bound, stage.update
    if apply is None or not is_jfl_function(apply.function):
        return False
    if bound is None:  # a linear map; `chain` requires a clip after it
        return apply.function in linear_maps.OWN and stage.state is update is None
    is_named = STAGE_NAMES.get(stage.name, apply.function) is apply.function
    if not is_named or not same_bits(apply.data, bound.data):
        return False
    if apply.function is stages._as_it_is:  # `jfl.plan` checks where it may be
        return bool(stage.declared) and bound.function is stages._declared
    own_bound, own_update = ROW_STAGES.get(apply.function, (None, None))
    updates = update is None or (
        update.function is own_update and same_bits(update.data, apply.data)
    )
    is_complete = (update is None) == (stage.state is None) and apply.static == bound.static
    return bound.function is own_bound and updates and is_complete


def _has_scheme(record) -> bool:
    function = record.draw.function
    return is_jfl_function(function) and SCHEMES.get(function.__name__) == record.scheme


def _draws_as_stated(batches: Batches) -> bool:
    drawn = {**batches.draw.data, **batches.draw.static}
    names = ("batch", "rate", "expected")
    stated = [getattr(batches, n) for n in names]
    return _has_scheme(batches) and same_bits(stated, [drawn.get(n) for n in names])


def _samples_as_stated(sampler) -> bool:
    """Return whether a sampler draws by the numbers that it states."""
    if not _has_scheme(sampler):
        return False
    data, fixed = sampler.draw.data, sampler.draw.static
    edges, available = data.get("edges"), data.get("available")
    numbers = sampler.clients, sampler.rate, sampler.capacity
    arrays = [
        (data.get("rate"), sampler.rate),
        (None if edges is None else clients.shares_of(edges), sampler.share),
    ]
    if "steps" in data:
        arrays.append((data["steps"], clients.binomial_steps(*numbers)))
    if available is not None:
        pattern = np.asarray(available)
        arrays.append((pattern, sampler.available))
        arrays.append((sampler.at_once == pattern.sum(1).max(), True))
    capacity = fixed.get("capacity", fixed.get("cohort", sampler.clients))
    drawn = fixed["clients"], capacity, *(fixed.get(n, 1) for n in ("separation", "epoch"))
    stated = sampler.clients, sampler.capacity, sampler.separation, sampler.epoch
    is_independent = fixed.get("independent", False) == sampler.independent
    return all(same_bits(*pair) for pair in arrays) and drawn == stated and is_independent
