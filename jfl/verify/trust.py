"""The parts of a plan that need no trace: functions of jfl, and records that jfl made.

The functions of jfl and of the libraries below are covered by their own tests.  A record, such as a
stage or a sampler, states facts that an accountant relies on.  They hold if the functions in the
record are jfl's and use the same numbers that the record states.
"""

import dataclasses
import functools
import types
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..core import checks, identity
from ..core.records import Batches, Fn, Mechanism, Plan
from ..gradients.per_example import Grad
from ..privacy.mechanisms import chain as mech
from ..privacy.mechanisms import linear_maps, stages, wavelet
from ..privacy.mechanisms.stages import Stage
from ..sampling import clients

LIBRARIES = "jax jaxlib optax flax equinox numpy functools operator builtins jfl".split()
ARRAYS = (np.ndarray, jax.Array)
LEAF_TYPES = (*ARRAYS, np.generic, str, bytes, int, float, complex, type(None), types.ModuleType)
JUDGED_APART = (Mechanism, Batches, Grad)  # records whose functions are checked separately

# The row stages of jfl: the function that clips -> (the one for its bound, the one that updates its
# state after a release).
ROW_STAGES = {
    stages._clip_l2: (stages._clip_bound, None),
    stages._clip_automatic: (stages._clip_bound, None),
    stages._clip_l1: (stages._clip_bound, None),
    stages._clip_per_layer: (stages._layers_bound, None),
    stages._clip_adaptive: (stages._adaptive_bound, stages._update_clip_norm),
    wavelet._clip_ellipsoid: (wavelet._ellipsoid_bound, None),
    wavelet._clip_bands: (wavelet._bands_bound, None),
    wavelet._shares: (wavelet._shares_bound, None),
    stages._clip_scaled: (stages._scaled_bound, stages._unscale),
}
# Accountants rely on these names.
STAGE_NAMES = {
    "clip_l2": stages._clip_l2,
    "clip_automatic": stages._clip_automatic,
    "clip_l1": stages._clip_l1,
    "clip_per_layer": stages._clip_per_layer,
    "clip_adaptive": stages._clip_adaptive,
}
# The sampling scheme of each function of jfl that draws cohorts or batches.
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
    """Findings against a proof, as sentences."""

    example: tuple  # against guarantees for examples
    client: tuple  # against guarantees for clients

    def __add__(self, other):
        return Findings(self.example + other.example, self.client + other.client)


# --- functions


def is_jfl_function(function) -> bool:
    """Return whether this is a Python function of jfl."""
    return isinstance(function, types.FunctionType) and identity.is_jfl_function(function)


def user_objects_in(value, skip=()) -> list:
    """Return the functions and objects in a value that come neither from jfl nor from a library.

    The search includes the closures and default arguments of functions.

    Args:
        value: anything.
        skip: types whose instances are not searched.
    """
    found, seen, todo = [], {}, [value]
    while todo:
        value = todo.pop()
        if id(value) in seen or type(value) in skip or isinstance(value, LEAF_TYPES):
            continue
        seen[id(value)] = value  # keep it alive, so that no other object gets its id
        parts = _children(value)
        if parts is None:
            found.append(value)
        else:
            todo += parts
    return found


def _children(value) -> list | None:
    """Return the values inside a value of jfl or a library; None if the value is a user's."""
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [*value]
    if _binds_arrays(value):
        return None
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        if not _is_library(value.__globals__.get("__name__", "")):
            return None
        cells = [c.cell_contents for c in value.__closure__ or () if _is_filled(c)]
        return [*cells, value.__defaults__, value.__kwdefaults__]
    kind = value if isinstance(value, type) else type(value)
    if not _is_library(kind.__module__):
        return None
    if isinstance(value, type):
        return []
    if hasattr(value, "__wrapped__"):  # the result of a transformation of jax, such as custom_vjp
        names = ("__wrapped__", "jvp", "fwd", "bwd", "vmap_rule")
        return [getattr(value, name, None) for name in names]
    if dataclasses.is_dataclass(value):
        return [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    return [*getattr(value, "__dict__", {}).values()]


def _is_library(module) -> bool:
    """Return whether a module belongs to jfl or to one of LIBRARIES."""
    return str(module).split(".")[0] in LIBRARIES


def _binds_arrays(value) -> bool:
    """Return whether a value is a partial or a method that holds an array.

    Such a function counts as a user's even if the function inside is a library's.
    """
    is_partial = isinstance(value, functools.partial)
    bound = (value.args, value.keywords) if is_partial else getattr(value, "__self__", None)
    return any(isinstance(x, ARRAYS) for x in jax.tree.leaves(bound))


def _is_filled(cell) -> bool:
    """Return whether the cell of a closure has a value."""
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:
        return False


# --- records


def nodes(value, kind) -> list:
    """Return the nodes of type `kind` in a pytree."""
    found = jax.tree.leaves(value, is_leaf=lambda n: isinstance(n, kind))
    return [n for n in found if isinstance(n, kind)]


def records_in(value) -> list:
    """Return all records and bound functions in a pytree, at any depth."""
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


def gradients_in(value) -> list[Grad]:
    """Return every gradient function in a value."""
    return [n for n in records_in(value) if isinstance(n, Grad)]


def bits_of(x):
    """Return the dtype, shape and bytes of an array or key; an identifier for a traced value."""
    if isinstance(x, jax.core.Tracer):
        return "traced", id(x)
    is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    x = np.asarray(jax.random.key_data(x) if is_key else x)
    return str(x.dtype), x.shape, x.tobytes()


def has_same_bits(one, other) -> bool:
    """Return whether two pytrees have equal structures and equal bits."""
    (a, s), (b, t) = (jax.tree.flatten(v) for v in (one, other))
    return s == t and all(bits_of(x) == bits_of(y) for x, y in zip(a, b))


# --- the declarations of a plan


def declared_releases(plan: Plan) -> tuple:
    """Return the noisy releases that an algorithm declares, with schedules that start at round 0.

    This undoes the shift by `chain.later` in releases that an accountant reads.
    """
    start = lambda f: f.data["of"] if f.function is mech._evaluate_later else f

    def from_start(release):
        chain = release.mechanism
        parts = tuple(s.map_schedules(start) for s in chain.stages)
        return dataclasses.replace(release, mechanism=Mechanism(parts, chain.adjacency))

    return tuple(from_start(r) for r in plan.algorithm.releases if mech.noisy(r.mechanism))


def is_trusted(plan: Plan) -> bool:
    """Return whether jfl made the client, and its releases are those that the algorithm declares.

    A client that is marked `_always_traced` is never trusted: its releases depend on more than its
    steps.
    """
    client, records = plan.algorithm.client, records_in(plan.algorithm.client)
    functions = [r.function for r in records if isinstance(r, Fn)]
    if any(getattr(f, "_always_traced", False) for f in functions):
        return False
    if not is_jfl_function(client.function) or user_objects_in(client, JUDGED_APART):
        return False
    counts = [getattr(r, "steps", None) for r in records if not isinstance(r, Fn)]
    steps = max((n for n in counts if isinstance(n, int)), default=1)
    declared = declared_releases(plan)
    among = lambda part, parts: any(has_same_bits(part, n) for n in parts)
    of_kind = lambda kind: [r for r in records if isinstance(r, kind)]
    mechanisms, samplers = of_kind(Mechanism), of_kind(Batches)
    # A client with several gradients, samplers or noisy mechanisms may send what another one
    # computes than the one that is declared.
    is_one = len(of_kind(Grad)) <= 1 and all(has_same_bits(b, samplers[0]) for b in samplers)
    noisy = [m for m in mechanisms if mech.noisy(m)]
    if not is_one or not all(among(m, [r.mechanism for r in declared]) for m in noisy):
        return False
    return all(
        among(r.mechanism, mechanisms)
        and among(r.batches, samplers)
        and (r.steps >= steps and r.count >= 1 if r.steps else r.count >= steps)
        for r in declared
    )


def judge_records(plan: Plan) -> Findings:
    """Return findings about the stages and samplers of a plan that state facts without proof."""
    algorithm, sampler = plan.algorithm, plan.sampler
    parts = (algorithm.client, algorithm.releases)
    example = [f for m in nodes(parts, Mechanism) for f in _unproved_facts(m)]
    example += [
        f"which rows a batch holds: {checks.short_repr(b.draw)}"
        for b in nodes(parts, Batches)
        if not _draws_as_stated(b)
    ]
    chains = [m for m in (plan.upload, plan.release) if m is not None]
    cohort = [f"who takes part: {checks.short_repr(sampler.draw)}"]
    cohort = [] if _samples_as_stated(sampler) else cohort
    client = [f for m in chains for f in _unproved_facts(m)]
    return Findings(tuple(example + cohort), tuple(client + cohort))


def _unproved_facts(mechanism) -> list:
    """Return which facts about a mechanism are not proved, as phrases."""
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
    """Return whether `jfl.strategies` made a strategy, restarted or not, and its numbers are
    unchanged."""
    part = strategy
    while part is not None:
        if type(part).__module__ != "jfl.privacy.mechanisms.strategies":
            return False
        part = getattr(part, "of", None)
    return strategy.accounting_matches_noise()


def is_own_row_stage(stage: Stage) -> bool:
    """Return whether a stage on rows is jfl's own function with the bound that belongs to it."""
    apply, bound, update = stage.apply, stage.bound, stage.update
    if apply is None or not is_jfl_function(apply.function):
        return False
    if bound is None:  # a linear map; `chain` requires a clip after it
        return apply.function in linear_maps.MAPS_BEFORE_CLIP and stage.state is update is None
    is_named = STAGE_NAMES.get(stage.name, apply.function) is apply.function
    if not is_named or not has_same_bits(apply.data, bound.data):
        return False
    if apply.function is stages._keep_row:  # `jfl.plan` checks where `bounded` is allowed
        return bool(stage.declared) and bound.function is stages._declared_bound
    own_bound, own_update = ROW_STAGES.get(apply.function, (None, None))
    updates = update is None or (
        update.function is own_update and has_same_bits(update.data, apply.data)
    )
    is_complete = (update is None) == (stage.state is None) and apply.static == bound.static
    return bound.function is own_bound and updates and is_complete


def _has_scheme(record) -> bool:
    """Return whether a record draws with the function of jfl for its scheme."""
    function = record.draw.function
    return is_jfl_function(function) and SCHEMES.get(function.__name__) == record.scheme


def _draws_as_stated(batches: Batches) -> bool:
    """Return whether a batch sampler draws with the numbers that it states."""
    drawn = {**batches.draw.data, **batches.draw.static}
    names = ("batch", "rate", "expected")
    stated = [getattr(batches, n) for n in names]
    return _has_scheme(batches) and has_same_bits(stated, [drawn.get(n) for n in names])


def _samples_as_stated(sampler) -> bool:
    """Return whether a sampler draws with the numbers that it states."""
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
    return all(has_same_bits(*pair) for pair in arrays) and drawn == stated and is_independent
