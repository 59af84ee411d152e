"""The identity of a plan: a description of what it computes, and 128 bits that its noise uses.

All noise of a run is derived from its seed and from the identity of its plan.  Two plans that
compute different things therefore have independent noise, which subtracting their results does not
remove.  One plan has the same noise in every process.

The identity is a hash of a description of the plan and of the bits of every number in it.  A
`Reader` makes the description, which consists of nested dicts and lists.  It describes

- functions and classes of jfl, and those that `jfl.named` has named, by their registered names;
- functions and classes of installed libraries by their qualified names;
- a user's function by its qualified name and source, its closure and defaults, and the globals that
  it mentions;
- a user's class by its bases, methods and attributes, and an object by its class and fields;
- a user's module by its name and file.

A function without source, and an object whose state Python cannot list, are rejected.  The identity
is not a security boundary: a user can write two functions that it does not distinguish.
docs/concepts/objects.md lists what it does not cover.
"""

import ast
import collections
import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import json
import logging
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.tree_util import default_registry

from . import checks, hashing
from .pytrees import Words
from .records import Federation, Fn, Plan

# Fields of records, and arguments of named functions, that change how a plan is stored and computed
# but not its result.  They are not part of its identity, and neither are the number of rounds, the
# evaluations and the padding of rows.
EXCLUDED_FIELDS = {
    # Secure aggregation is an assumption, which changes no draw.
    "Plan": ("chunk", "mesh", "secure_aggregation"),
    "Grad": ("microbatch", "path"),
    "Task": ("evaluation", "metrics", "target"),
    # These are declarations that `plan` checks; the functions determine the computation.
    "Algorithm": ("uploads", "checks_its_solve", "contracts", "personal", "personal_releases"),
    # A run with an overflow is stopped, so no result depends on the capacity.
    "Sampler": ("capacity",),
    "Responders": ("capacity",),
    "Available": ("capacity", "at_once"),
    "sampling.poisson": ("capacity",),
    "sampling.poisson_few": ("capacity", "steps"),  # `steps` has as many entries as the capacity
    "batches.poisson": ("batch",),
}
# Packages whose functions are identified by name: they are the same for all points of a sweep.
LIBRARIES = frozenset(
    """jax jaxlib numpy scipy optax flax equinox chex haiku distrax ml_dtypes orbax
    builtins""".split()
)
# Methods that dataclasses and named tuples generate from the fields of a class.
GENERATED_METHODS = frozenset(
    """__init__ __repr__ __eq__ __lt__ __le__ __gt__ __ge__ __hash__ __setattr__ __delattr__ __new__
    __replace__""".split()
)
# Bookkeeping of flax in a module.
FLAX_ATTRIBUTES = ("_state", "_id", "_parent_ref", "parent", "scope")


def plan_identity(plan: Plan) -> Words:
    """Return a hash of everything that determines what a plan computes.

    The noise of a run is derived from this hash and the run's seed, so plans that compute different
    things have independent noise.

    Args:
        plan: a Plan.  Concrete values are hashed on the host, and traced ones in the program.

    Returns:
        UInt32[4].  The hash is the same whether values are concrete or traced, except for arrays in
        a function's closure: if these are traced, the hash differs.

    Raises:
        ValueError: if the rows of the federation were replaced, or if a function holds a value that
            cannot be read.
    """
    checks.require_type("identity", Plan, "jfl.plan", plan=plan)
    require_unmodified(plan.fed)
    return _words(plan, Reader.plan)


def initial_history(plan: Plan) -> Words:
    """Return UInt32[4], the value of `Run.plan_history` before the first round.

    The value is a hash of everything that determines the initial state, except for the key.  Two
    runs with the same plan and seed, but different initial parameters, therefore have independent
    noise.  With `paired_noise` the value is zero.
    """
    return (
        np.zeros(hashing.NUM_WORDS, np.uint32) if plan.paired_noise else _words(plan, Reader.start)
    )


def _words(
    plan: Plan, read: Callable[["Reader", Plan], Any], names: dict[str, Any] | None = None
) -> Words:
    """Return UInt32[4], the hash of a description that a method of Reader makes."""
    reader = Reader(names)
    text = reader.text(read(reader, plan))
    return hashing.combine(hashing.hash_text(text), hashing.hash_arrays(reader.leaves))


def require_unmodified(fed: Federation) -> None:
    """Reject a concrete federation if its `identity` is not that of its current arrays.

    Functions on pytrees, such as jax.tree.map, replace arrays without computing the identity again.
    """
    if (
        checks.is_concrete(fed)
        and np.ndim(fed.size) == 1
        and not np.array_equal(np.asarray(fed.identity), fed.data_identity())
    ):
        checks.fail(
            "jfl.plan",
            "a federation with the rows and owners it was made of",
            "other ones, put into it as a pytree",
            "Use dataclasses.replace(fed, x=..., y=...), which computes the identity again.",
        )


def plan_identities(
    plans: list[Plan], read: Callable[["Reader", Plan], Any] | None = None
) -> list[Words]:
    """Return `plan_identity` of many concrete plans, and reject two functions of one name.

    Args:
        plans: the plans.
        read: Reader.start to return the `initial_history` of each plan instead.  None means
            Reader.plan.

    Returns:
        A list of UInt32[4], in the order of the plans.
    """
    names: dict[str, Any] = {}
    for fed in {id(p.fed): p.fed for p in plans}.values():
        require_unmodified(fed)
    return [_words(plan, read or Reader.plan, names) for plan in plans]


def noise_identity(plan: Plan) -> Words:
    """Return the hash from which the noise of a plan is derived, UInt32[4].

    This is `plan_identity`, or 0 if points of a sweep share their noise (`paired_noise`).
    """
    return np.zeros(hashing.NUM_WORDS, np.uint32) if plan.paired_noise else plan_identity(plan)


def describe(plan: Plan) -> dict[str, Any]:
    """Return a description of everything that determines the identity of a plan.

    The description consists of nested dicts and lists, as in JSON.  A run directory stores it, and
    `--resume` and sweeps compare it.  It contains the registered names of jfl's functions; the name
    of each of your functions, with a hash of its source and the values that it holds; the shape,
    dtype and checksum of each array; and the shapes of the model's parameters.

    Args:
        plan: a Plan of concrete values.

    Returns:
        A dict.  Plans with equal descriptions have equal noise for equal seeds.

    Raises:
        ValueError: for a plan that holds traced values.
    """
    checks.require_type("describe", Plan, "jfl.plan", plan=plan)
    if not checks.is_concrete(plan):
        checks.fail(
            "jfl.describe",
            "a plan of concrete values",
            "traced ones",
            "Call it outside jit and vmap.",
        )
    require_unmodified(plan.fed)
    reader = Reader()
    description: Any = reader.readable(reader.plan(plan))
    shapes, _ = jax.tree_util.tree_flatten_with_path(
        jax.eval_shape(plan.task.init, jax.random.key(0))
    )
    return description | {
        "parameters": {
            jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in shapes
        }
    }


def signature(description: dict[str, Any]) -> str:
    """Return a hash of a description that `describe` made, as 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def differences(there: Any, here: Any, at: str = "") -> list[str]:
    """Return the differences between two descriptions, as lines with a path and both values.

    Args:
        there: the description of a stored run, or a part of it.
        here: the same part of the description of this run.
        at: the path of these parts; "" for whole descriptions.

    Example:
        >>> differences({"lr": 0.1, "steps": 2}, {"lr": 0.2, "steps": 2})
        ['lr: 0.1 there, 0.2 here']
    """
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [*there, *(k for k in here if k not in there)]
        return [
            line
            for k in keys
            for line in differences(there.get(k), here.get(k), f"{at}.{k}" if at else k)
        ]
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        return [
            line
            for i, (a, b) in enumerate(zip(there, here))
            for line in differences(a, b, f"{at}[{i}]")
        ]
    same = json.dumps(there) == json.dumps(here)  # in Python True == 1 == 1.0
    return [] if same else [f"{at}: {_brief(there)} there, {_brief(here)} here"]


def _brief(value: Any) -> str:
    """Return a value as JSON of at most 120 characters."""
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


class Leaf:
    """The place of a number or an array, `reader.leaves[at]`, in the description of a plan."""

    def __init__(self, at: int):
        self.at = at


class Reader:
    """A reader that describes values as nested dicts and lists.

    The numbers and arrays of a plan are collected in `leaves`, and the description has a
    placeholder for each.  Plans that differ only in numbers therefore have equal descriptions.

    Args:
        names: a dict from registered names to functions and classes.  The reader adds those that it
            meets, and rejects two that share a name.  Several readers may share the dict.
    """

    def __init__(self, names: dict[str, Any] | None = None) -> None:
        self.leaves: list[Any] = []
        self.names = {} if names is None else names
        # (id, inside_named) -> (value, its description).  Keeping the value keeps its id in use.
        self.known: dict[tuple[int, bool], Any] = {}
        # Inside a function that the user has named, an unreadable value counts by its type only.
        self.inside_named = False

    # --- results

    def text(self, tree: Any) -> str:
        """Return a description as JSON, in which each placeholder is a dtype and a shape."""
        shapes = [f"{x.dtype}{list(np.shape(x))}" for x in self.leaves]
        return json.dumps(tree, sort_keys=True, default=lambda leaf: shapes[leaf.at])

    def readable(self, tree: Any) -> Any:
        """Return the description `tree` in a form for people.

        Each placeholder becomes its number or, for an array, a shape, a type and a checksum.
        """
        if isinstance(tree, Leaf):
            return _readable_leaf(self.leaves[tree.at])
        if isinstance(tree, dict):
            return {k: self.readable(v) for k, v in tree.items()}
        return [self.readable(v) for v in tree] if isinstance(tree, list) else tree

    # --- a plan

    def start(self, plan: Plan) -> dict[str, Any]:
        """Describe everything in a plan that `jfl.init` reads."""
        return {
            "params": self.data(plan.task.init),
            "state": self.data(plan.algorithm.init),
            "clients": plan.sampler.clients,
            "mechanism": [self.data(s.state) for s in plan.release.stages],
        }

    def plan(self, plan: Plan) -> dict[str, Any]:
        """Describe everything that determines the results of a plan."""
        found = {"data": self.leaf(plan.fed.identity), "classes": plan.fed.classes}
        for field in dataclasses.fields(Plan):
            if field.name not in ("fed", *EXCLUDED_FIELDS["Plan"]):
                found[field.name] = self.data(getattr(plan, field.name))
        return found

    # --- pytrees, whose numbers are data of the program

    def leaf(self, value: Any) -> Leaf:
        """Add a number or an array to the leaves, and return its placeholder."""
        self.leaves.append(_canonical(value))
        return Leaf(len(self.leaves) - 1)

    def data(self, value: Any) -> Any:
        """Describe a pytree, adding its numbers and arrays to the leaves."""
        if value is None or isinstance(value, (str, bytes, enum.Enum)):
            return self.static(value)
        if isinstance(value, (bool, int, float, complex, np.ndarray, np.generic, jax.Array)):
            return self.leaf(value)
        if isinstance(value, Fn):
            return self._fn(value)
        if isinstance(value, Federation):
            return {"data": self.leaf(value.identity), "classes": value.classes}
        if isinstance(value, dict):
            return {
                _key(k): self.data(v) for k, v in sorted(value.items(), key=lambda kv: _key(kv[0]))
            }
        if isinstance(value, (list, tuple)):
            return self._items(value, self.data)
        if isinstance(value, type) or default_registry.flatten_one_level(value) is None:
            return self.static(value)
        if dataclasses.is_dataclass(value) and is_jfl_function(type(value)):
            return self._record(value)
        children, structure = default_registry.flatten_one_level(value)
        return {
            "pytree": self.static(type(value)),
            "static": self.static(structure),
            "leaves": [self.data(v) for v in children],
        }

    def _fn(self, value: Fn) -> dict[str, Any]:
        """Describe a function of a plan with the hyperparameters that are bound to it."""
        name = registered_name(value.function) if is_jfl_function(value.function) else None
        excluded = EXCLUDED_FIELDS.get(name, ()) if name is not None else ()
        data = {
            k: self.data(v)
            for k, v in sorted(value.data.items())
            if k not in excluded and v is not None
        }
        static = {k: self.static(v) for k, v in sorted(value.static.items()) if k not in excluded}
        return {
            "function": self.static(value.function),
            **({"data": data} if data else {}),
            **({"static": static} if static else {}),
        }

    def _record(self, value: Any) -> dict[str, Any]:
        """Describe a record of jfl by its fields.

        Defaults are left out, so that a new field with a default changes no recorded identity.
        """
        name = registered_name(type(value)) or type(value).__name__
        excluded = EXCLUDED_FIELDS.get(name, ()) + (
            ("batch",) if name == "Batches" and value.scheme == "poisson" else ()
        )
        found: dict[str, Any] = {"record": name}
        for field in dataclasses.fields(value):
            content = getattr(value, field.name)
            is_static = field.metadata.get("static")
            is_plain = isinstance(content, (bool, int, str, tuple))
            is_default = is_static and is_plain and content == field.default
            if field.name not in excluded and content is not None and not is_default:
                found[field.name] = self.static(content) if is_static else self.data(content)
        return found

    # --- static values, whose numbers are constants of the program

    def static(self, value: Any) -> Any:
        """Describe a static value, writing its numbers into the description with all digits."""
        if value is None or type(value) in (bool, str):
            return value
        if isinstance(value, enum.Enum):
            return {
                "enum": f"{type(value).__qualname__}.{value.name}",
                "value": self.static(value._value_),
            }
        if type(value) in (int, float):
            return _number(value)
        if type(value) in (complex, bytes, range, slice, type(...)):
            return {type(value).__name__: repr(value)}
        if isinstance(value, (jax.Array, np.generic)) or type(value) is np.ndarray:
            return self._array(value)
        if isinstance(value, np.dtype):
            return {"dtype": str(value)}
        if type(value) in (tuple, list) or _is_named_tuple(value):
            return self._items(value, self.static)
        if type(value) in (set, frozenset):
            # The order of a set differs from process to process, so no item refers to another.
            return {type(value).__name__: sorted(map(self._text_alone, value))}
        if type(value) in (dict, collections.OrderedDict, types.MappingProxyType):
            pairs = [[self.static(k), self.static(v)] for k, v in value.items()]
            return {type(value).__name__: pairs}
        # Describe everything else once; later mentions refer to it by number.  This also ends
        # circular references.
        key = id(value), self.inside_named
        if key not in self.known:
            self.known[key] = value, {"same as": len(self.known)}
            found = self._read(value)
            if all(isinstance(v, (str, bool)) for v in found.values()):
                self.known[key] = value, found  # which is as short as a number
            return found
        return self.known[key][1]

    def _items(self, value: Any, read: Callable[[Any], Any]) -> Any:
        """Describe a tuple as a JSON list; a list and a named tuple as a dict with the type."""
        if _is_named_tuple(value):
            fields = {name: read(getattr(value, name)) for name in value._fields}
            return {"tuple": self.static(type(value)), **fields}
        found = [read(item) for item in value]
        return {"list": found} if isinstance(value, list) else found

    def _text_alone(self, value: Any) -> str:
        """Return the description of a value that refers to no other value, as JSON."""
        reader = Reader(self.names)
        reader.inside_named = self.inside_named
        return reader.text(reader.static(value))

    def _array(self, value: Any) -> Any:
        """Describe an array that a function holds, and whose numbers are part of its program."""
        if isinstance(value, jax.core.Tracer):
            return self.leaf(value)
        weak = {"weak": True} if getattr(value, "weak_type", False) else {}
        if isinstance(value, jax.Array):
            value = hashing.on_host(value)
        found = {"array": list(value.shape), "type": str(value.dtype)} | weak
        if value.dtype == object:
            self._reject_unreadable("arrays of numbers", "an array of Python objects")
            return found
        return found | {"checksum": _checksum(value)}

    def _read(self, value: Any) -> dict[str, Any]:
        """Describe a function, class, module or object."""
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if isinstance(value, types.MethodType):
            return {"method": self.static(value.__func__), "of": self.static(value.__self__)}
        if type(value) is functools.partial:
            return {
                "partial": self.static(value.func),
                "args": self.static(value.args),
                "keywords": self.static(value.keywords),
            }
        if isinstance(value, np.ufunc):
            return {"library": f"numpy.{value.__name__}"}
        if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType)):
            return self._builtin(value)
        if isinstance(value, jax.tree_util.PyTreeDef):
            node, children = value.node_data(), value.children()
            return {"treedef": self.static(node), "children": [self.static(c) for c in children]}
        if _is_library(_package(type(value))) and hasattr(value, "__wrapped__"):
            return self._wrapped(value)
        if is_jfl_function(type(value)) and default_registry.flatten_one_level(value) is not None:
            return self.data(value)
        return self._object(value)

    def _wrapped(self, value: Any) -> dict[str, Any]:
        """Describe a function inside a transformation of jax, such as jit or custom_jvp."""
        attributes = getattr(value, "__dict__", {})
        rules = ("jvp", "fwd", "bwd", "vmap_rule", "nondiff_argnums")
        return {
            "wrapped": type(value).__name__,
            "function": self.static(value.__wrapped__),
            **{n: self.static(attributes[n]) for n in rules if n in attributes},
        }

    def _builtin(self, value: Any) -> dict[str, Any]:
        """Describe a C function by its name, and a method such as `{}.get` with its object."""
        found: dict[str, Any] = {"library": _library_name(value)}
        owner = getattr(value, "__self__", None)
        is_method = owner is not None and not isinstance(owner, types.ModuleType)
        return found | ({"of": self.static(owner)} if is_method else {})

    def _function(self, value: types.FunctionType) -> dict[str, Any]:
        """Describe a Python function: by its name, or a user's function by its source."""
        found: dict[str, Any]
        outside = self.inside_named
        if name := registered_name(value):
            self._require_one_function(name, value)
            found = {"jfl" if is_jfl_function(value) else "named": name}
            self.inside_named |= not is_jfl_function(value)
        elif is_jfl_function(value):
            found = {"jfl": value.__qualname__, "registered": False}
        elif _is_library(_package(value)):
            found = {"library": _library_name(value)}
        else:
            found = self._users_function(value)
        if value.__defaults__ or value.__kwdefaults__:
            defaults = (value.__defaults__, value.__kwdefaults__)
            found["defaults"] = [self.static(v) for v in defaults]
        if cells := dict(zip(value.__code__.co_freevars, value.__closure__ or ())):
            found["holds"] = {k: self._cell(value, v) for k, v in sorted(cells.items())}
        self.inside_named = outside
        return found

    def _users_function(self, value: types.FunctionType) -> dict[str, Any]:
        """Describe a user's function by its name, its source and the globals that it mentions."""
        source = _source(value.__code__)
        if not source:
            self._reject_unreadable(f"the source of the function {value.__qualname__}", "none")
        names = _globals_in(value.__code__) & value.__globals__.keys()
        found = {n: self._variable(value, value.__globals__[n]) for n in sorted(names)}
        # Wrappers copy attributes that begin with "_", such as __wrapped__.
        attributes = {k: v for k, v in sorted(vars(value).items()) if not k.startswith("_")}
        return {
            "function": value.__qualname__,
            "source": _hash(source),
            **({"globals": found} if found else {}),
            **({"attributes": self.static(attributes)} if attributes else {}),
        }

    def _variable(self, function: types.FunctionType, value: Any) -> Any:
        """Describe the value of a variable that a function mentions.

        For a user's module, the members with names that the function mentions count too, because
        their values may have been set after the import.
        """
        if not isinstance(value, types.ModuleType) or _is_described_by_name(value):
            return self.static(value)
        members = sorted(_names_in(function.__code__) & vars(value).keys())
        return self.static(value) | {"members": {k: self.static(vars(value)[k]) for k in members}}

    def _cell(self, function: types.FunctionType, cell: types.CellType) -> Any:
        """Describe a variable in the closure of a function."""
        try:
            content = cell.cell_contents
        except ValueError:  # it has no value yet
            return {"cell": "empty"}
        return self._variable(function, content)

    def _require_one_function(self, name: str, value: Any) -> None:
        """Reject two functions or classes that carry one registered name."""
        other = self.names.setdefault(name, value)
        if _origin(other) != _origin(value):  # the same statement may have made both
            checks.fail(
                "jfl.describe",
                f"one function for the name {name!r}",
                f"{_module(other)}.{other.__qualname__} and {_module(value)}.{value.__qualname__}",
                "Give one of them another name: jfl.named makes their noise the same.",
            )

    def _reject_unreadable(self, expected: str, actual: str) -> None:
        """Reject a value that cannot be read, unless the user has named the function around it."""
        if not self.inside_named:
            checks.fail(
                "jfl.describe",
                expected,
                actual,
                'Give the function that holds it a name: jfl.named("...")(function).',
            )

    def _class(self, cls: Any) -> dict[str, Any]:
        """Describe a class: by its name, or a user's class by its bases and members."""
        if is_jfl_function(cls):
            return {"jfl": registered_name(cls) or cls.__qualname__}
        if _is_library_class(cls):
            return {"library": _library_name(cls)}
        if name := registered_name(cls):
            self._require_one_function(name, cls)
            return {"named": name}
        if issubclass(cls, enum.Enum):
            return {"enum": cls.__qualname__, "members": [self.static(v) for v in cls]}
        return {
            "class": cls.__qualname__,
            "bases": [self.static(b) for b in cls.__bases__ if b is not object],
            "members": {k: self.static(v) for k, v in _members(cls)},
        }

    def _object(self, value: Any) -> dict[str, Any]:
        """Describe an object by its class and its fields, including private ones."""
        if isinstance(value, logging.Logger):
            return {"logger": value.name}
        if isinstance(value, PurePath):
            return {"path": str(value)}
        cls = type(value)
        if _hides_state(cls):
            self._reject_unreadable("objects with fields", checks.short_repr(value))
        state: Any = object.__getstate__(value)  # the fields; with slots, a pair of dicts
        fields = (state[0] or {}) | state[1] if isinstance(state, tuple) else state or {}
        is_flax = "flax.linen.module" in [base.__module__ for base in cls.__mro__]
        ignored = FLAX_ATTRIBUTES if is_flax else ()
        fields = {k: self.static(v) for k, v in sorted(fields.items()) if k not in ignored}
        return {"object": self.static(cls)} | ({"fields": fields} if fields else {})

    def _module(self, module: types.ModuleType) -> dict[str, Any]:
        """Describe a library's module by its name, and a user's also by the content of its file."""
        if _is_described_by_name(module):
            return {"module": module.__name__}
        if (file := getattr(module, "__file__", None)) is None:
            self._reject_unreadable("a module with a file", f"the module {module.__name__}")
            return {"module": module.__name__}
        return {"module": module.__name__, "content": _hash(Path(file).read_bytes())}


# --- functions and classes


def is_jfl_function(function: Any) -> bool:
    """Return whether a function or class is defined in a module of jfl."""
    return _package(function) == "jfl"


def registered_name(function: Any) -> str | None:
    """Return the name that `jfl.named` gave to a function or class, or None.

    Subclasses, and wrappers that copied the attributes of a function, do not have its name.
    """
    attributes = getattr(function, "__dict__", {})
    return (
        attributes.get("_registered_name")
        if attributes.get("_registered_code") is getattr(function, "__code__", None)
        else None
    )


def _module(value: Any) -> str:
    """Return the name of the module that defines a function or class.

    For a function it is taken from the globals, because functools.wraps copies `__module__`.
    """
    if isinstance(value, types.FunctionType):
        return value.__globals__.get("__name__") or ""
    return getattr(value, "__module__", None) or ""


def _package(value: Any) -> str:
    """Return the name of the top-level package that defines a function or class."""
    return _module(value).split(".")[0]


def _origin(value: Any) -> Any:
    """Return the module and code of a function, which are equal if one statement made two."""
    return _module(value), getattr(value, "__code__", value.__qualname__)


@functools.cache
def _is_library(package: str) -> bool:
    """Return whether a package belongs to Python or is installed."""
    # `python -m cProfile script.py` runs the user's functions in __main__, but sys.modules has the
    # profiler under this name.
    if package == "__main__":
        return False
    file = getattr(sys.modules.get(package), "__file__", None)
    if package in LIBRARIES or file is None:
        return package in LIBRARIES or package in sys.stdlib_module_names
    # Compare with these folders only: others under the prefix may contain a user's files.
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return file.startswith(tuple(sysconfig.get_path(name) + os.sep for name in names))


def _is_library_class(cls: Any) -> bool:
    """Return whether a library contains a class under its own name.

    A class that a library creates for a user's arguments is not found under its name.
    """
    found = sys.modules.get(_module(cls))
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    # Some of Python's own classes, such as that of None, are in no module.
    return _module(cls) == "builtins" or found is cls and _is_library(_package(cls))


def _library_name(value: Any) -> str:
    """Return the name of a function or class of a library, or of a method of a C object."""
    return f"{_package(value) or 'builtins'}.{value.__qualname__}"


def _is_described_by_name(module: types.ModuleType) -> bool:
    package = module.__name__.split(".")[0]
    return package == "jfl" or _is_library(package)


@functools.lru_cache(4096)
def _source(code: types.CodeType) -> str:
    """Return the source of a function, or "" if there is none.

    The source of a lambda is that of all lambdas that begin in its line.
    """
    try:
        if code.co_name != "<lambda>":
            return inspect.getsource(code)
        # inspect.getsource returns only the first line of a lambda inside brackets.
        text = "".join(inspect.findsource(code)[0])
        nodes = ast.walk(ast.parse(text))
    except (OSError, SyntaxError):
        return ""
    lambdas = (n for n in nodes if isinstance(n, ast.Lambda) and n.lineno == code.co_firstlineno)
    return "\n".join(ast.get_source_segment(text, node) or "" for node in lambdas)


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function and of the functions inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes_in(inner)


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in a function and the functions inside it."""
    return {name for inner in _codes_in(code) for name in inner.co_names}


@functools.lru_cache(4096)
def _globals_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals in a function and the functions inside it."""
    steps = (step for inner in _codes_in(code) for step in dis.get_instructions(inner))
    return frozenset(s.argval for s in steps if s.opname in ("LOAD_GLOBAL", "LOAD_NAME"))


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the methods that are written in a class, and its attributes."""
    member: Any
    for name, member in sorted(vars(cls).items()):
        if isinstance(member, (staticmethod, classmethod)):
            member = member.__func__
        elif isinstance(member, functools.cached_property):
            member = member.func
        elif isinstance(member, property):
            member = member.fget, member.fset
        code = getattr(inspect.unwrap(member), "__code__", None)
        is_generated = name in GENERATED_METHODS and code and code.co_filename == "<string>"
        is_field = isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType))
        is_field |= type(member).__name__ == "_tuplegetter"
        is_method = callable(member) or hasattr(member, "__get__")
        # Python's own bookkeeping, such as __module__ and __annotations__
        is_hidden = name == "_abc_impl" or name.startswith("__annotate")
        is_hidden |= name.startswith("__") and not is_method
        if not (is_generated or is_field or is_hidden):
            yield name, member


def _hides_state(cls: type) -> bool:
    """Return whether the objects of a class keep state in C, which Python cannot list."""
    has_fields = any(name in vars(c) for c in cls.__mro__ for name in ("__dict__", "__slots__"))
    constructor = next(
        c for c in cls.__mro__ if isinstance(vars(c).get("__new__"), types.BuiltinFunctionType)
    )
    is_made_in_c = constructor not in (object, types.SimpleNamespace)
    return cls is not object and (is_made_in_c or not has_fields)


# --- values


def _canonical(value: Any) -> jax.Array | np.ndarray:
    """Return a number in the dtype with which the program computes."""
    if isinstance(value, jax.Array):
        return value
    value = np.asarray(value)
    return value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)


def _number(value: float) -> float | dict[str, str]:
    """Describe a Python number for JSON, which has no infinity or NaN."""
    return value if isinstance(value, int) or np.isfinite(value) else {"float": repr(value)}


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _key(value: Any) -> str:
    """Return a key of a dict as a string, with its type if it is not a string."""
    return value if isinstance(value, str) else f"{type(value).__name__} {value!r}"


def _hash(content: str | bytes) -> str:
    """Return 16 hexadecimal digits of the sha256 of a string or of bytes."""
    content = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(content).hexdigest()[:16]


def _checksum(x: np.ndarray) -> str:
    return _hash(np.ascontiguousarray(x).tobytes())


def _readable_leaf(x: Any) -> Any:
    """Describe a leaf for people: a single number, or an array by its shape and checksum."""
    x = hashing.on_host(x)
    if x.ndim == 0 and x.dtype.kind in "iub":
        return x.item()
    if x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.floating):
        return _number(float(str(x)))  # 0.1 instead of 0.10000000149, the nearest float32
    return {"array": list(x.shape), "type": str(x.dtype), "checksum": _checksum(x)}
