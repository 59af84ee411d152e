"""The identity of a plan: a description of what it computes, and 128 bits that its noise uses.

All noise of a run is derived from its seed and from the identity of its plan.  Two plans that
compute different things therefore never share noise (subtracting their results would remove it),
and one plan has the same noise in every process.  The identity is a hash of a static description
together with the bits of every number, in the type that runs.  The description contains

- functions and classes of jfl, and whatever `jfl.named` has named, by their registered names;
- functions and classes of installed libraries by their qualified names;
- a user's function by its qualified name and source, its closure, defaults and attributes, and
  the globals that it mentions;
- a user's class by its members, and an object by its class and its fields.

Whatever cannot be distinguished in this way is rejected.  Three things remain invisible: values
that a function reads from a file or a clock, attributes that it looks up by a computed name, and a
state of a run that is changed by hand.
"""

import __future__

import ast
import collections
import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import linecache
import logging
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.tree_util import default_registry

from . import checks, hashing
from .pytrees import Words
from .records import Federation, Fn, Plan

# Fields that change how a plan is stored and computed, but not its result.  They are not part of
# its identity, and neither are the number of rounds, the evaluations and the padding of rows.
EXCLUDED_FIELDS = {
    # the assumption about the sum of uploads changes no draw
    "Plan": ("chunk", "mesh", "secure_aggregation"),
    "Grad": ("microbatch", "path"),
    "Task": ("evaluation", "metrics", "target"),
    # declarations that `plan` checks; the functions determine the computation
    "Algorithm": ("uploads", "checks_its_solve", "contracts", "personal", "personal_releases"),
    "Sampler": ("capacity",),  # an overflow voids the run, so no result depends on it
    "Responders": ("capacity",),
    "Available": ("capacity", "at_once"),
    "sampling.poisson": ("capacity",),
    "sampling.poisson_few": ("capacity", "steps"),  # steps: the distribution up to it
    "batches.poisson": ("batch",),
}
# Packages whose functions are identified by name: they are the same for all points of a sweep.
LIBRARIES = frozenset(
    """jax jaxlib numpy scipy optax flax equinox chex haiku distrax ml_dtypes orbax
    builtins""".split()
)
# Functions that have no Python code.
COMPILED = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)
# Builtin types; an object of a subclass is described by its content and its fields.
CONTAINERS = (dict, list, tuple, set, frozenset, str, bytes, int, float)
IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: no class that is written in Python has it
# Attributes of a class that do not affect what its objects compute.
IGNORED_ATTRIBUTES = frozenset(
    """__module__ __dict__ __weakref__ __doc__ __qualname__ __annotations__ __annotate__
    __annotate_func__ __dataclass_fields__ __dataclass_params__ __match_args__ __firstlineno__
    __static_attributes__ __abstractmethods__ _abc_impl __parameters__ __orig_bases__ __slots__
    __hash__ __classcell__ __annotations_cache__ __slotnames__ _registered_name
    _registered_code""".split()
)
# Bookkeeping of flax in a module.
FLAX_ATTRIBUTES = frozenset("_state _id _parent_ref parent scope".split())
# Methods that dataclasses and named tuples generate.
GENERATED_METHODS = frozenset(
    """__init__ __repr__ __eq__ __lt__ __le__ __gt__ __ge__ __hash__ __setattr__ __delattr__ __new__
    __replace__""".split()
)


def plan_identity(plan: Plan) -> Words:
    """Return the identity of a plan.

    Args:
        plan: a Plan.  Concrete values are read on the host, and traced ones in the program.

    Returns:
        UInt32[4], equal for both ways.  An array in a closure is an exception: it counts in the
        program if it is traced and in the description if it is concrete, with different words.

    Raises:
        ValueError: if the rows of the federation were exchanged, or if a function holds a value
            that cannot be read.

    Example:
        >>> import jfl
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(clients=5))
        >>> task, sampler = jfl.models.logistic(fed), jfl.sampling.full(5)
        >>> plan = lambda lr: jfl.plan(
        ...     fed, task, jfl.algorithms.fedavg(jfl.grad(task.loss), lr=lr), sampler
        ... )
        >>> (
        ...     bool((plan_identity(plan(0.1)) == plan_identity(plan(0.1))).all()),
        ...     bool((plan_identity(plan(0.1)) == plan_identity(plan(0.2))).all()),
        ... )
        (True, False)
    """
    checks.require_type("identity", Plan, "jfl.plan", plan=plan)
    require_unmodified(plan.fed)
    return _words(plan, Reader.plan)


def initial_history(plan: Plan) -> Words:
    """Return UInt32[4] for the start of a run, with which its history begins.

    The words depend on everything that determines the initial state except the key.  Two runs of
    one plan and seed that start from different parameters therefore have independent noise.
    """
    return (
        np.zeros(hashing.NUM_WORDS, np.uint32) if plan.paired_noise else _words(plan, Reader.start)
    )


def _words(plan: Plan, read: Callable[["Reader", Plan], Any]) -> Words:
    reader = Reader()
    text = reader.text(read(reader, plan))
    return hashing.combine(hashing.hash_text(text), hashing.hash_arrays(reader.leaves))


def require_unmodified(fed: Federation) -> None:
    """Reject a concrete federation whose arrays were exchanged after it was made."""
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
    """Return the identities of many concrete plans; plans of one structure are read only once.

    Args:
        plans: the plans.
        read: Reader.plan, or Reader.start for the words of `initial_history`.

    Returns:
        A list of UInt32[4], in the order of the plans.
    """
    known, names, out, read = {}, {}, [], read or Reader.plan
    for fed in {id(p.fed): p.fed for p in plans}.values():
        require_unmodified(fed)
    for plan in plans:
        leaves, shape = jax.tree.flatten(plan)
        kinds = tuple((np.shape(x), jnp.result_type(x)) for x in leaves)
        if (shape, kinds) not in known:
            reader = Reader(names)
            tree = read(reader, shape.unflatten(map(_Place, range(len(leaves)))))
            places = reader.leaves  # of a number: where it is among the leaves of the pytree
            reader.leaves = [
                _in_its_type(leaves[x.at]) if isinstance(x, _Place) else x for x in places
            ]
            known[shape, kinds] = places, hashing.hash_text(reader.text(tree))
        places, text = known[shape, kinds]
        numbers = [_in_its_type(leaves[x.at]) if isinstance(x, _Place) else x for x in places]
        out.append(hashing.combine(text, hashing.hash_arrays(numbers)))
    return out


class _Place:
    """A placeholder for leaf number `at` of a pytree."""

    def __init__(self, at: int):
        self.at = at


def noise_identity(plan: Plan) -> Words:
    """Return UInt32[4] that determines the noise of a plan together with the seed.

    It is the identity of the plan, or 0 if points of a sweep share their noise.
    """
    return np.zeros(hashing.NUM_WORDS, np.uint32) if plan.paired_noise else plan_identity(plan)


def describe(plan: Plan) -> dict[str, Any]:
    """Return everything that determines the identity of a plan, as nested JSON values.

    A run directory stores the description, and `--resume` and sweeps compare it.  It contains the
    registered names of jfl's functions; the name of each function of yours, with a hash of its
    source and the values that it holds; the shape, type and checksum of each array; and the shapes
    of the model's parameters.

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
    found: Any = reader.shown(reader.plan(plan))
    shapes, _ = jax.tree_util.tree_flatten_with_path(
        jax.eval_shape(plan.task.init, jax.random.key(0))
    )
    return found | {
        "parameters": {
            jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in shapes
        }
    }


def signature(description: dict[str, Any]) -> str:
    """Return a hash of a description, 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def differences(there: Any, here: Any, at: str = "") -> list[str]:
    """Return the differences of two descriptions, one line each: the path and both values.

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
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def is_jfl_function(function: Any) -> bool:
    """Whether a function or class is written in jfl."""
    return _module(function).split(".")[0] == "jfl"


def registered_name(function: Any) -> str | None:
    """Return the name that `jfl.named` gave to a function or class, or None.

    Subclasses, and wrappers that copied the attribute, do not have the name.
    """
    given = getattr(function, "__dict__", {})
    return (
        given.get("_registered_name")
        if given.get("_registered_code") is getattr(function, "__code__", None)
        else None
    )


def _module(value: Any) -> str:
    """Return the module of a function from its globals; functools.wraps copies `__module__`."""
    if isinstance(value, types.FunctionType):
        return value.__globals__.get("__name__") or ""
    return getattr(value, "__module__", None) or ""


def _top(value: Any) -> str:
    return _module(value).split(".")[0]


def _ufunc_of_numpy(value: Any) -> bool:
    return isinstance(value, np.ufunc) and getattr(np, value.__name__, None) is value


@functools.cache
def _library(top: str) -> bool:
    """Whether functions of a package are identified by name: Python's, JAX or an installed one."""
    if top in LIBRARIES:
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:
        return top in sys.stdlib_module_names and top != "__main__"
    paths = sysconfig.get_paths()  # not the prefix, which may contain a user's files
    return any(
        file.startswith(paths[name] + os.sep)
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )


def _by_name(value: Any) -> dict[str, Any]:
    """Describe an object of a library by its name, with the version of an installed package."""
    top = _top(value)
    version = (
        ""
        if top in LIBRARIES or top in sys.stdlib_module_names
        else getattr(sys.modules.get(top), "__version__", "")
    )
    return {"library": f"{top}.{value.__qualname__}"} | (
        {"version": str(version)} if version else {}
    )


def _is_library_class(cls: Any) -> bool:
    """Whether a library holds a class under its name, which no class made for a user is."""
    found = sys.modules.get(_module(cls))
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls and _library(_top(cls))


class Leaf:
    """A placeholder for leaf number `at` in a description."""

    def __init__(self, at: int):
        self.at = at


def _fields_of(value: Any) -> tuple[str, ...]:
    """Return the names of the fields of a named tuple."""
    return value._fields


class Reader:
    """A reader of values into a description; the numbers of a plan become its leaves."""

    def __init__(self, names: dict[str, Any] | None = None) -> None:
        self.leaves: list[Any] = []
        # registered name -> its function or class; one dict for all plans of a program
        self.names = {} if names is None else names
        self.around: frozenset[int] = frozenset()  # ids of the containers around a value
        self.sets: frozenset[int] = frozenset()  # ids of the sets around it
        # (id, inside_named) -> (value, its description); holding a value keeps its id from reuse
        self.known: dict[tuple[int, bool], Any] = {}
        # inside a function that the user has named, an unreadable value counts by its type only
        self.inside_named = False

    # --- results

    def text(self, tree: Any) -> str:
        """Return the static description, in which leaves have only a shape and a type."""
        kinds = [f"{x.dtype}{list(np.shape(x))}" for x in self.leaves]
        return json.dumps(tree, sort_keys=True, default=lambda leaf: kinds[leaf.at])

    def shown(self, tree: Any) -> Any:
        """Return the description for people, with plain numbers and the checksums of arrays."""
        if isinstance(tree, Leaf):
            return _shown(self.leaves[tree.at])
        if isinstance(tree, dict):
            return {k: self.shown(v) for k, v in tree.items()}
        return [self.shown(v) for v in tree] if isinstance(tree, list) else tree

    # --- a plan

    def start(self, plan: Plan) -> dict[str, Any]:
        """Describe everything that `jfl.init` reads of a plan."""
        return {
            "params": self.data(plan.task.init),
            "state": self.data(plan.algorithm.init),
            "clients": plan.sampler.clients,
            "mechanism": [self.data(s.state) for s in plan.release.stages],
        }

    def plan(self, plan: Plan) -> dict[str, Any]:
        found = {"data": self.leaf(plan.fed.identity), "classes": plan.fed.classes}
        for field in dataclasses.fields(Plan):
            if field.name not in ("fed", *EXCLUDED_FIELDS["Plan"]):
                found[field.name] = self.data(getattr(plan, field.name))
        return found

    # --- numbers and pytrees

    def leaf(self, value: Any) -> Leaf:
        self.leaves.append(value if isinstance(value, _Place) else _in_its_type(value))
        return Leaf(len(self.leaves) - 1)

    def data(self, value: Any) -> Any:
        """Describe a pytree whose numbers are leaves."""
        if value is None or isinstance(value, (str, bytes, enum.Enum)):
            return self.static(value)
        if isinstance(
            value, (_Place, bool, int, float, complex, np.ndarray, np.generic, jax.Array)
        ):
            return (
                self.static(value)
                if getattr(value, "dtype", None) == np.dtype(object)
                else self.leaf(value)
            )
        if isinstance(value, Fn):
            return self._function_of_plan(value)
        if isinstance(value, Federation):
            return {"data": self.leaf(value.identity), "classes": value.classes}
        if isinstance(value, dict):
            return {
                _key(k): self.data(v) for k, v in sorted(value.items(), key=lambda kv: _key(kv[0]))
            }
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {
                "tuple": self.type(type(value)),
                **{f: self.data(getattr(value, f)) for f in _fields_of(value)},
            }
        if isinstance(value, (list, tuple)):
            return self._items(value, self.data)
        if not _is_pytree(value):
            return self.static(value)
        if dataclasses.is_dataclass(value) and is_jfl_function(type(value)):
            return self._record(value)
        leaves, fixed = default_registry.flatten_one_level(value)
        return {
            "pytree": self.type(type(value)),
            "static": self.static(fixed),
            "leaves": [self.data(v) for v in leaves],
        }

    def _function_of_plan(self, value: Fn) -> dict[str, Any]:
        name = registered_name(value.function) if is_jfl_function(value.function) else None
        left = EXCLUDED_FIELDS.get(name, ()) if name is not None else ()
        held = {
            k: self.data(v)
            for k, v in sorted(value.data.items())
            if k not in left and v is not None
        }
        fixed = {k: self.static(v) for k, v in sorted(value.static.items()) if k not in left}
        return {
            "function": self.static(value.function),
            **({"data": held} if held else {}),
            **({"static": fixed} if fixed else {}),
        }

    def _record(self, value: Any) -> dict[str, Any]:
        name = registered_name(type(value)) or type(value).__name__
        left = EXCLUDED_FIELDS.get(name, ()) + (
            ("batch",) if name == "Batches" and value.scheme == "poisson" else ()
        )
        found: dict[str, Any] = {"record": name}
        for field in dataclasses.fields(value):
            held = getattr(value, field.name)
            plain = field.metadata.get("static")
            # defaults are left out, so that a new field with a default changes no recorded identity
            if (
                field.name in left
                or held is None
                or (plain and isinstance(held, (bool, int, str, tuple)) and held == field.default)
            ):
                continue
            found[field.name] = self.static(held) if plain else self.data(held)
        return found

    # --- everything else

    def static(self, value: Any) -> Any:
        """Describe a static value, for which a program is compiled, with all digits of numbers."""
        if value is None or type(value) in (bool, str):
            return value
        if isinstance(value, enum.Enum):
            return {
                "enum": f"{type(value).__qualname__}.{value.name}",
                "value": self.static(value._value_),
            }
        if type(value) in (int, float):
            return _number(value)
        if type(value) in (complex, bytes, range, type(...)):
            return {type(value).__name__: repr(value)}
        if isinstance(value, slice):
            return {"slice": [self.static(v) for v in (value.start, value.stop, value.step)]}
        if (
            isinstance(value, jax.Array)
            or type(value) is np.ndarray
            or isinstance(value, np.generic)
        ):
            return self._held(value)
        if isinstance(value, np.dtype):
            return {"dtype": str(value)}
        if type(value) in (tuple, list):
            return self._items(value, self.static)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {
                "tuple": self.type(type(value)),
                **{f: self.static(getattr(value, f)) for f in _fields_of(value)},
            }
        if type(value) in (set, frozenset):  # their order differs from process to process
            return {type(value).__name__: self._elements(value)}
        if type(value) is dict or isinstance(value, types.MappingProxyType):
            pair = lambda item: [self.static(item[0]), self.static(item[1])]
            return {type(value).__name__: self._contents(value, value.items(), pair)}
        return self._once(value)

    def _items(self, value: list[Any] | tuple[Any, ...], read: Callable[[Any], Any]) -> Any:
        """Describe a tuple as a JSON list, and a list as a dict that names its type."""
        found = self._contents(value, value, read)
        return {"list": found} if isinstance(value, list) else found

    def _contents(self, value: Any, items: Iterable[Any], read: Callable[[Any], Any]) -> Any:
        """Describe what a container holds; one that contains itself is rejected."""
        if id(value) in self.around:
            kind = type(value).__name__
            self._unreadable("values that do not contain themselves", f"a {kind} that does")
            return {"contains itself": kind}
        outside, self.around = self.around, self.around | {id(value)}
        found = [read(item) for item in items]
        self.around = outside
        return found

    def _elements(self, value: Any) -> list[str]:
        """Describe the elements of a set, each independently of the others, in sorted order."""
        if id(value) in self.sets:
            self._unreadable("values that do not contain themselves", "a set that does")
            return []
        descriptions = []
        for element in value:
            reader = Reader(self.names)
            reader.inside_named, reader.sets = self.inside_named, self.sets | {id(value)}
            descriptions.append(reader.text(reader.static(element)))
        return sorted(descriptions)

    def _held(self, value: Any) -> Any:
        """Describe an array that a function holds; its numbers belong to the program."""
        if isinstance(value, jax.core.Tracer):
            return self.leaf(value)
        weak = {"weak": True} if getattr(value, "weak_type", False) else {}
        if isinstance(value, jax.Array):
            value = hashing.on_host(value)
        if value.dtype == object:
            held = [self.static(v) for v in value.reshape(-1).tolist()]
            return {"array": list(value.shape), "type": "object", "values": held}
        kind = {"array": list(value.shape), "type": str(value.dtype)} | weak
        return kind | {"checksum": _checksum(value)}

    def _once(self, value: Any) -> dict[str, Any]:
        """Describe a function, class, object or module once; later mentions refer to it by number.

        This also ends circular references.
        """
        place = id(value), self.inside_named
        if place in self.known:
            return self.known[place][1]
        self.known[place] = value, {"same as": len(self.known)}
        outside, self.around = self.around, frozenset()  # the line above ends a circle through it
        found = self._read(value)
        self.around = outside
        if all(isinstance(v, (str, bool)) for v in found.values()):  # as short as a number
            self.known[place] = value, found
        return found

    def _read(self, value: Any) -> dict[str, Any]:
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, Fn) or (is_jfl_function(type(value)) and _is_pytree(value)):
            found = self.data(value)
            return found if isinstance(found, dict) else {"pytree": found}
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
        if type(value) is property:
            return {"property": [self.static(f) for f in (value.fget, value.fset, value.fdel)]}
        if _library(_top(type(value))) and hasattr(value, "__wrapped__"):
            return self._wrapped(value)
        if isinstance(value, COMPILED) or _ufunc_of_numpy(value):
            return self._compiled(value)
        if isinstance(value, logging.Logger):
            return {"logger": value.name}
        if isinstance(value, jax.tree_util.PyTreeDef):
            node, children = value.node_data(), value.children()
            return {"treedef": self.static(node), "children": [self.static(c) for c in children]}
        return self._object(value)

    def _wrapped(self, value: Any) -> dict[str, Any]:
        """Describe a user's function inside a transformation of jax, such as jit or custom_jvp."""
        given = getattr(value, "__dict__", {})
        parts = {
            n: self.static(given[n])
            for n in ("jvp", "fwd", "bwd", "vmap_rule", "nondiff_argnums")
            if n in given
        }
        return {
            "wrapped": type(value).__name__,
            "function": self.static(value.__wrapped__),
            **parts,
        }

    def _compiled(self, value: Any) -> dict[str, Any]:
        """Describe a C function by its name; a method (`[].append`) together with its object."""
        if _ufunc_of_numpy(value):
            return {"library": f"numpy.{value.__name__}"}
        name = getattr(value, "__qualname__", value.__name__)
        found = {"library": f"{_top(value) or 'builtins'}.{name}"}
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType):
            return found
        return found | {"of": self.static(owner)}

    def _function(self, value: types.FunctionType) -> dict[str, Any]:
        if name := registered_name(value):
            self._require_one_function(name, value)
            found = {"jfl" if is_jfl_function(value) else "named": name}
        elif is_jfl_function(value):
            found = {"jfl": value.__qualname__, "registered": False}
        elif _library(_top(value)):
            found = _by_name(value)
        else:
            return self._users_function(value)
        return found | self._bound(value)

    def _require_one_function(self, name: str, value: Any) -> None:
        """Reject two functions or classes that carry one registered name."""
        other = self.names.setdefault(name, value)
        if _origin(other) != _origin(value):
            checks.fail(
                "jfl.describe",
                f"one function for the name {name!r}",
                f"{_module(other)}.{other.__qualname__} and {_module(value)}.{value.__qualname__}",
                "Give one of them another name: jfl.named makes their noise the same.",
            )

    def _bound(self, value: types.FunctionType) -> dict[str, Any]:
        """Describe the defaults, the attributes and the closure of a function."""
        found = {}
        is_users = not is_jfl_function(value) and not _library(_top(value))
        outside = self.inside_named
        self.inside_named |= is_users and registered_name(value) is not None
        if value.__defaults__ or value.__kwdefaults__:
            defaults = (value.__defaults__, value.__kwdefaults__)
            found["defaults"] = [self.static(v) for v in defaults]
        if is_users and (
            more := {k: v for k, v in vars(value).items() if k not in IGNORED_ATTRIBUTES}
        ):
            found["attributes"] = self.static(more)
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or ()))
        if cells:
            found["holds"] = {k: self._cell(k, v, value) for k, v in sorted(cells.items())}
        self.inside_named = outside
        return found

    def _cell(self, name: str, cell: types.CellType, function: types.FunctionType) -> Any:
        try:
            content = cell.cell_contents
        except ValueError:
            return {"cell": "empty"}
        return self._under_name(name, content, function)

    def _under_name(self, name: str, value: Any, function: types.FunctionType) -> Any:
        """Describe a value that a function finds under a name."""
        if not isinstance(value, types.ModuleType):
            return self.static(value)
        written = _source(function)
        if written is None or name in written.passed_on:
            return self._module(value)
        return self._module(value, _names_in(function.__code__), written.passed_on)

    def _users_function(self, value: types.FunctionType) -> dict[str, Any]:
        """Describe a user's function by its name, its source and every value that it mentions."""
        found: dict[str, Any] = {"function": value.__qualname__}
        names, written = _names_in(value.__code__), _source(value)
        if written is None:
            self._unreadable(
                f"the source of the function {value.__qualname__}",
                "none, or one that compiles to other code (the file was edited since its import, "
                "or an import hook rewrote it, as pytest does with assert)",
            )
        else:
            found["source"] = _hash(written.text)
            self._reject_imports(value, written.imports)
            # `co_names` mixes globals and attributes; mangled names are not in the source
            names = {n for n in names if n in written.names or "__" in n}
        mentioned = {n: value.__globals__[n] for n in sorted(names) if n in value.__globals__}
        described = {n: self._under_name(n, v, value) for n, v in mentioned.items()}
        return found | self._bound(value) | ({"globals": described} if described else {})

    def _reject_imports(self, value: types.FunctionType, imports: Iterable[str]) -> None:
        """Reject a function that imports a user's module when it is called."""
        for name in imports:
            top = name.split(".")[0]
            if top != "jfl" and (not top or not _library(top)):
                self._unreadable(
                    "modules that are imported at the top of a file",
                    f"import of {name} inside the function {value.__qualname__}",
                )

    def _unreadable(self, expected: str, actual: str) -> None:
        """Reject a plan, unless the user has named the function that holds the value."""
        if not self.inside_named:
            checks.fail(
                "jfl.describe",
                expected,
                actual,
                'Give the function that holds it a name: jfl.named("...")(function).',
            )

    def _module(
        self,
        module: types.ModuleType,
        names: frozenset[str] | None = None,
        passed_on: frozenset[str] = frozenset(),
    ) -> Any:
        """Describe a library's module by its name, and a user's by its contents.

        Args:
            module: a module that a function holds or mentions.
            names: what this function mentions, and can take from the module.  None if it passes the
                module on, so that everything in the module counts.
            passed_on: what this function mentions without taking an attribute of it.
        """
        found: dict[str, Any] = {}
        waiting = [(module, names)]
        for one, names in waiting:
            top = one.__name__.split(".")[0]
            if one.__name__ in found:
                continue
            found[one.__name__] = "library"
            if top != "jfl" and not _library(top):
                public = {k: v for k, v in sorted(vars(one).items()) if not k.startswith("__")}
                members = {k: v for k, v in public.items() if names and k in names} or public
                inner = {k: v for k, v in members.items() if isinstance(v, types.ModuleType)}
                waiting += [(v, None if k in passed_on else names) for k, v in inner.items()]
                found[one.__name__] = {
                    k: v.__name__ if k in inner else self.static(v) for k, v in members.items()
                }
        only = found[module.__name__] == "library"
        return {"module": module.__name__} | ({} if only else {"contents": found})

    def type(self, cls: Any) -> Any:
        return self.static(cls) if isinstance(cls, type) else str(cls)

    def _class(self, cls: Any) -> dict[str, Any]:
        if is_jfl_function(cls):
            return {"jfl": registered_name(cls) or cls.__qualname__}
        if _is_library_class(cls):
            return _by_name(cls)
        if name := registered_name(cls):
            self._require_one_function(name, cls)
            return {"named": name}
        if issubclass(cls, enum.Enum):
            return {
                "enum": cls.__qualname__,
                "members": {k: self.static(v._value_) for k, v in cls.__members__.items()},
            }
        members = {
            k: self.static(v)
            for k, v in sorted(vars(cls).items())
            if k not in IGNORED_ATTRIBUTES and not _generated(v, cls)
        }
        return {
            "class": cls.__qualname__,
            "bases": [self.static(b) for b in cls.__bases__ if b is not object],
            "members": members,
        }

    def _object(self, value: Any) -> dict[str, Any]:
        """Describe an object by its class and its fields, including private ones.

        An object whose state Python cannot list is rejected.
        """
        cls = type(value)
        # Python puts the name of the class before a name with two underscores
        hidden = lambda n: n.startswith("__") and not n.endswith("__")
        slots = [
            f"_{c.__name__.lstrip('_')}{n}" if hidden(n) else n
            for c in cls.__mro__
            for n in _names(vars(c).get("__slots__", ()))
        ]
        fields = {
            n: getattr(value, n) for n in slots if n != "__dict__" and hasattr(value, n)
        } | dict(getattr(value, "__dict__", {}))
        bases = [(c.__module__, c.__name__) for c in cls.__mro__]
        left = FLAX_ATTRIBUTES if ("flax.linen.module", "Module") in bases else ()
        fields = {k: self.static(v) for k, v in sorted(fields.items()) if k not in left}
        found = {"object": self.static(cls)} | ({"fields": fields} if fields else {})
        for kind in CONTAINERS:  # of a subclass, its content
            if isinstance(value, kind):
                inner: Any = kind
                found["content"] = self.static(inner(value))
        if isinstance(value, np.ndarray):
            found["content"] = self._held(np.asarray(value))
        if not is_jfl_function(cls) and _hides_state(cls):
            self._unreadable("objects with fields", checks.short_repr(value))
        return found


def _hides_state(cls: type) -> bool:
    """Whether the objects of a class keep state in C that Python cannot list."""
    readable = (object, types.SimpleNamespace, collections.OrderedDict, np.ndarray, *CONTAINERS)
    for base in cls.__mro__:
        methods_in_c = any(isinstance(v, types.MethodDescriptorType) for v in vars(base).values())
        if base not in readable and (methods_in_c or base.__flags__ & IMMUTABLE_TYPE):
            return True
    has_fields = any(name in vars(c) for c in cls.__mro__ for name in ("__dict__", "__slots__"))
    return cls is not object and not has_fields


def _origin(value: Any) -> Any:
    """Return what two functions of one name share if one statement made both."""
    return _module(value), getattr(value, "__code__", value.__qualname__)


def _is_pytree(value: Any) -> bool:
    return not isinstance(value, type) and default_registry.flatten_one_level(value) is not None


def _in_its_type(value: Any) -> jax.Array | np.ndarray:
    """Return a number in the type with which the program computes."""
    if isinstance(value, jax.Array):
        return value
    value = np.asarray(value)
    return value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)


def _number(value: float) -> float | dict[str, str]:
    """Return a Python number for JSON, which has no infinity or NaN."""
    return value if isinstance(value, int) or np.isfinite(value) else {"float": repr(value)}


def _key(value: Any) -> str:
    """Return the key of a dict in a pytree as a string; other types than strings are named."""
    return value if isinstance(value, str) else f"{type(value).__name__} {value!r}"


def _names(slots: Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _checksum(x: np.ndarray) -> str:
    return _hash(np.ascontiguousarray(x).tobytes())


def _hash(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[
        :16
    ]


def _shown(x: Any) -> Any:
    x = hashing.on_host(x)
    if x.ndim == 0 and x.dtype.kind in "iub":
        return x.item()
    if x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.floating):
        return _number(float(str(x)))  # 0.1, and not the float32 that is nearest to it
    return {"array": list(x.shape), "type": str(x.dtype), "checksum": _checksum(x)}


# --- the source of a user's function


class FunctionSource(NamedTuple):
    """The source of a function."""

    text: str
    names: frozenset[str]  # variables, without attributes
    passed_on: frozenset[str]  # variables and attributes of which no attribute is taken
    imports: frozenset[str]  # modules that it imports when it is called


def _source(function: types.FunctionType) -> FunctionSource | None:
    """Return the source of a function; None if there is none that compiles to its code.

    A file that was edited after its import contains the source of another program, and so does one
    that an import hook compiles differently.  Several lambdas of one line are distinguished by the
    position of their code.
    """
    code = function.__code__
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    flags = code.co_flags & __future__.annotations.compiler_flag
    place = code.co_firstlineno, code.co_name
    codes, nodes = (found.get(place, []) for found in _functions_in(text, flags))
    if code not in codes:
        return None
    inner = [node for outer in nodes for node in ast.walk(outer)]
    segments = [ast.get_source_segment(text, node) for node in nodes]
    return FunctionSource(
        json.dumps([segments, codes.index(code)]),
        frozenset(node.id for node in inner if isinstance(node, ast.Name)),
        frozenset(_passed_on(inner)),
        frozenset(name for node in inner for name in _imports_of(node)),
    )


def _passed_on(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield each name that ends a chain of attributes: `a` and `d` of `f(a, b.c.d)`."""
    owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if id(node) not in owners and isinstance(node, (ast.Name, ast.Attribute)):
            yield node.id if isinstance(node, ast.Name) else node.attr


def _imports_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + (node.module or "")]
    return []


@functools.lru_cache(maxsize=64)
def _functions_in(text: str, flags: int) -> tuple[dict[Any, list[Any]], dict[Any, list[Any]]]:
    """Return the code and the syntax tree of each function in a file, by first line and name."""
    codes: dict[Any, list[Any]] = {}
    nodes: dict[Any, list[Any]] = {}
    try:
        tree = ast.parse(text)
        compiled = compile(text, "<source>", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return codes, nodes
    for code in _codes_in(compiled):
        codes.setdefault((code.co_firstlineno, code.co_name), []).append(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            decorators = getattr(node, "decorator_list", [])
            line = min(part.lineno for part in [node, *decorators])
            nodes.setdefault((line, getattr(node, "name", "<lambda>")), []).append(node)
    return codes, nodes


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that a function mentions, and those inside it."""
    names = (name for inner in _codes_in(code) for name in (*inner.co_names, *inner.co_freevars))
    return frozenset(names)


def _generated(member: Any, cls: type) -> bool:
    """Whether dataclasses or named tuples generated a member of a class from its fields."""
    if (
        isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType))
        or type(member).__name__ == "_tuplegetter"
    ):
        return True
    member = getattr(member, "__func__", member)
    member = inspect.unwrap(member) if isinstance(member, types.FunctionType) else member
    return (
        isinstance(member, types.FunctionType)
        and member.__name__ in GENERATED_METHODS
        and member.__code__.co_filename.startswith("<string>")
        and ("__dataclass_fields__" in vars(cls) or issubclass(cls, tuple))
    )
