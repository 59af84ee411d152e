"""The identity of a plan: a description of what it computes, and 128 bits that its noise uses.

All noise of a run is derived from its seed and from the identity of its plan.  Two plans that
compute different things therefore never share noise, which subtracting their results would remove.
One plan has the same noise in every process.

The identity is a hash of a description of the plan and of the bits of every number in it.  A
`Reader` makes the description, which consists of nested dicts and lists.  It describes

- functions and classes of jfl, and those that `jfl.named` has named, by their registered names;
- functions and classes of installed libraries by their qualified names;
- a user's function by its qualified name and source, its closure, defaults and attributes, and
  the globals that it mentions;
- a user's class by its members, and an object by its class and its fields.

Values that cannot be described in this way are rejected.  The identity does not cover values that a
function reads from a file or a clock, attributes that it looks up by a computed name, and changes
that a user makes to the state of a run.
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
# Py_TPFLAGS_IMMUTABLETYPE, a flag that no class written in Python has.
IMMUTABLE_TYPE = 1 << 8
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
    """Return UInt32[4], the value of `Run.plan_history` before the first round.

    The value is a hash of everything that determines the initial state, except for the key.  Two
    runs with the same plan and seed, but different initial parameters, therefore have independent
    noise.  With `paired_noise` the value is zero.
    """
    return (
        np.zeros(hashing.NUM_WORDS, np.uint32) if plan.paired_noise else _words(plan, Reader.start)
    )


def _words(plan: Plan, read: Callable[["Reader", Plan], Any]) -> Words:
    """Return UInt32[4], the hash of a description that a method of Reader makes."""
    reader = Reader()
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
    """Return `plan_identity` of many concrete plans, describing each structure only once.

    Args:
        plans: the plans.
        read: Reader.start to return the `initial_history` of each plan instead.  None means
            Reader.plan.

    Returns:
        A list of UInt32[4], in the order of the plans.
    """
    known, names, out, read = {}, {}, [], read or Reader.plan
    for fed in {id(p.fed): p.fed for p in plans}.values():
        require_unmodified(fed)
    for plan in plans:
        leaves, structure = jax.tree.flatten(plan)
        shapes = tuple((np.shape(x), jnp.result_type(x)) for x in leaves)
        if (structure, shapes) not in known:
            # Describe a plan whose leaves are placeholders, to learn where each of them is read.
            reader = Reader(names)
            tree = read(reader, structure.unflatten(map(_PlanLeaf, range(len(leaves)))))
            read_leaves = reader.leaves
            reader.leaves = [_resolve(x, leaves) for x in read_leaves]
            known[structure, shapes] = read_leaves, hashing.hash_text(reader.text(tree))
        read_leaves, text = known[structure, shapes]
        numbers = [_resolve(x, leaves) for x in read_leaves]
        out.append(hashing.combine(text, hashing.hash_arrays(numbers)))
    return out


def _resolve(value: Any, leaves: list[Any]) -> Any:
    """Replace a placeholder by the leaf of the plan, in the dtype of the program."""
    return _canonical(leaves[value.at]) if isinstance(value, _PlanLeaf) else value


class _PlanLeaf:
    """A placeholder for leaf number `at` of a plan."""

    def __init__(self, at: int):
        self.at = at


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


def is_jfl_function(function: Any) -> bool:
    """Return whether a function or class is defined in a module of jfl."""
    return _module(function).split(".")[0] == "jfl"


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


def _is_numpy_ufunc(value: Any) -> bool:
    return isinstance(value, np.ufunc) and getattr(np, value.__name__, None) is value


@functools.cache
def _is_library(package: str) -> bool:
    """Return whether a package belongs to Python, or is installed.

    Functions of such a package are identified by their names.
    """
    if package in LIBRARIES:
        return True
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:
        return package in sys.stdlib_module_names and package != "__main__"
    # Compare with these folders only: others under the prefix may contain a user's files.
    paths = sysconfig.get_paths()
    return any(
        file.startswith(paths[name] + os.sep)
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )


def _describe_by_name(value: Any) -> dict[str, Any]:
    """Describe a function or class of a library by its name, and by the version if installed."""
    package = _package(value)
    version = (
        ""
        if package in LIBRARIES or package in sys.stdlib_module_names
        else getattr(sys.modules.get(package), "__version__", "")
    )
    return {"library": f"{package}.{value.__qualname__}"} | (
        {"version": str(version)} if version else {}
    )


def _is_library_class(cls: Any) -> bool:
    """Return whether a library contains a class under its own name.

    A class that a library creates for a user's arguments is not found under its name.
    """
    found = sys.modules.get(_module(cls))
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls and _is_library(_package(cls))


class Leaf:
    """The place of a number or an array, `reader.leaves[at]`, in the description of a function."""

    def __init__(self, at: int):
        self.at = at


def _fields_of(value: Any) -> tuple[str, ...]:
    """Return the names of the fields of a named tuple."""
    return value._fields


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
        # Ids of the containers, and of the sets, that contain the value that is being read.
        self.around: frozenset[int] = frozenset()
        self.sets: frozenset[int] = frozenset()
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

    # --- numbers and pytrees

    def leaf(self, value: Any) -> Leaf:
        """Add a number or an array to the leaves, and return its placeholder."""
        self.leaves.append(value if isinstance(value, _PlanLeaf) else _canonical(value))
        return Leaf(len(self.leaves) - 1)

    def data(self, value: Any) -> Any:
        """Describe a pytree, adding its numbers and arrays to the leaves."""
        if value is None or isinstance(value, (str, bytes, enum.Enum)):
            return self.static(value)
        if isinstance(
            value, (_PlanLeaf, bool, int, float, complex, np.ndarray, np.generic, jax.Array)
        ):
            return (
                self.static(value)
                if getattr(value, "dtype", None) == np.dtype(object)
                else self.leaf(value)
            )
        if isinstance(value, Fn):
            return self._fn(value)
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
        children, structure = default_registry.flatten_one_level(value)
        return {
            "pytree": self.type(type(value)),
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

    # --- everything else

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
        if type(value) in (complex, bytes, range, type(...)):
            return {type(value).__name__: repr(value)}
        if isinstance(value, slice):
            return {"slice": [self.static(v) for v in (value.start, value.stop, value.step)]}
        if (
            isinstance(value, jax.Array)
            or type(value) is np.ndarray
            or isinstance(value, np.generic)
        ):
            return self._array(value)
        if isinstance(value, np.dtype):
            return {"dtype": str(value)}
        if type(value) in (tuple, list):
            return self._items(value, self.static)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {
                "tuple": self.type(type(value)),
                **{f: self.static(getattr(value, f)) for f in _fields_of(value)},
            }
        if type(value) in (set, frozenset):
            return {type(value).__name__: self._elements(value)}
        if type(value) is dict or isinstance(value, types.MappingProxyType):
            pair = lambda item: [self.static(item[0]), self.static(item[1])]
            return {type(value).__name__: self._contents(value, value.items(), pair)}
        return self._read_once(value)

    def _items(self, value: list[Any] | tuple[Any, ...], read: Callable[[Any], Any]) -> Any:
        """Describe a tuple as a JSON list, and a list as a dict that names its type."""
        found = self._contents(value, value, read)
        return {"list": found} if isinstance(value, list) else found

    def _contents(self, value: Any, items: Iterable[Any], read: Callable[[Any], Any]) -> Any:
        """Describe the items of a container by `read`; reject a container that contains itself."""
        if id(value) in self.around:
            kind = type(value).__name__
            self._unreadable("values that do not contain themselves", f"a {kind} that does")
            return {"contains itself": kind}
        outside, self.around = self.around, self.around | {id(value)}
        found = [read(item) for item in items]
        self.around = outside
        return found

    def _elements(self, value: Any) -> list[str]:
        """Describe the elements of a set, whose order differs from process to process.

        Each element is described independently of the others, and the descriptions are sorted.
        """
        if id(value) in self.sets:
            self._unreadable("values that do not contain themselves", "a set that does")
            return []
        descriptions = []
        for element in value:
            reader = Reader(self.names)
            reader.inside_named, reader.sets = self.inside_named, self.sets | {id(value)}
            descriptions.append(reader.text(reader.static(element)))
        return sorted(descriptions)

    def _array(self, value: Any) -> Any:
        """Describe an array that a function holds, and whose numbers are part of its program."""
        if isinstance(value, jax.core.Tracer):
            return self.leaf(value)
        weak = {"weak": True} if getattr(value, "weak_type", False) else {}
        if isinstance(value, jax.Array):
            value = hashing.on_host(value)
        if value.dtype == object:
            values = [self.static(v) for v in value.reshape(-1).tolist()]
            return {"array": list(value.shape), "type": "object", "values": values}
        kind = {"array": list(value.shape), "type": str(value.dtype)} | weak
        return kind | {"checksum": _checksum(value)}

    def _read_once(self, value: Any) -> dict[str, Any]:
        """Describe a function, class, object or module once; later mentions refer to it by number.

        This also ends circular references.
        """
        key = id(value), self.inside_named
        if key in self.known:
            return self.known[key][1]
        self.known[key] = value, {"same as": len(self.known)}
        # Containers around the value may occur again in it, since the line above ends the circle.
        outside, self.around = self.around, frozenset()
        found = self._read(value)
        self.around = outside
        if all(isinstance(v, (str, bool)) for v in found.values()):  # it is as short as a number
            self.known[key] = value, found
        return found

    def _read(self, value: Any) -> dict[str, Any]:
        """Describe a function, class, object or module."""
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
        if _is_library(_package(type(value))) and hasattr(value, "__wrapped__"):
            return self._wrapped(value)
        if isinstance(value, COMPILED) or _is_numpy_ufunc(value):
            return self._compiled(value)
        if isinstance(value, logging.Logger):
            return {"logger": value.name}
        if isinstance(value, jax.tree_util.PyTreeDef):
            node, children = value.node_data(), value.children()
            return {"treedef": self.static(node), "children": [self.static(c) for c in children]}
        return self._object(value)

    def _wrapped(self, value: Any) -> dict[str, Any]:
        """Describe a function inside a transformation of jax, such as jit or custom_jvp."""
        attributes = getattr(value, "__dict__", {})
        parts = {
            n: self.static(attributes[n])
            for n in ("jvp", "fwd", "bwd", "vmap_rule", "nondiff_argnums")
            if n in attributes
        }
        return {
            "wrapped": type(value).__name__,
            "function": self.static(value.__wrapped__),
            **parts,
        }

    def _compiled(self, value: Any) -> dict[str, Any]:
        """Describe a C function by its name, and a method such as `[].append` with its object."""
        if _is_numpy_ufunc(value):
            return {"library": f"numpy.{value.__name__}"}
        name = getattr(value, "__qualname__", value.__name__)
        found = {"library": f"{_package(value) or 'builtins'}.{name}"}
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType):
            return found
        return found | {"of": self.static(owner)}

    def _function(self, value: types.FunctionType) -> dict[str, Any]:
        """Describe a Python function: by its name, or a user's function by its source."""
        if name := registered_name(value):
            self._require_one_function(name, value)
            found = {"jfl" if is_jfl_function(value) else "named": name}
        elif is_jfl_function(value):
            found = {"jfl": value.__qualname__, "registered": False}
        elif _is_library(_package(value)):
            found = _describe_by_name(value)
        else:
            return self._users_function(value)
        return found | self._bound_values(value)

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

    def _bound_values(self, value: types.FunctionType) -> dict[str, Any]:
        """Describe the defaults, the attributes and the closure of a function."""
        found = {}
        is_users = not is_jfl_function(value) and not _is_library(_package(value))
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
        """Describe a variable in the closure of a function."""
        try:
            content = cell.cell_contents
        except ValueError:
            return {"cell": "empty"}
        return self._variable(name, content, function)

    def _variable(self, name: str, value: Any, function: types.FunctionType) -> Any:
        """Describe the value of a variable that a function mentions.

        Only those members of a module count that the function can take from it.
        """
        if not isinstance(value, types.ModuleType):
            return self.static(value)
        source = _source(function)
        if source is None or name in source.passed_on:
            return self._module(value)
        return self._module(value, _names_in(function.__code__), source.passed_on)

    def _users_function(self, value: types.FunctionType) -> dict[str, Any]:
        """Describe a user's function by its name, its source and every value that it mentions."""
        found: dict[str, Any] = {"function": value.__qualname__}
        names, source = _names_in(value.__code__), _source(value)
        if source is None:
            self._unreadable(
                f"the source of the function {value.__qualname__}",
                "none, or one that compiles to other code (the file was edited since its import, "
                "or an import hook rewrote it, as pytest does with assert)",
            )
        else:
            found["source"] = _hash(source.text)
            self._reject_imports(value, source.imports)
            # The code mixes the names of globals and attributes.  Mangled names ("__x" in a class)
            # are not in the source.
            names = {n for n in names if n in source.names or "__" in n}
        mentioned = {n: value.__globals__[n] for n in sorted(names) if n in value.__globals__}
        described = {n: self._variable(n, v, value) for n, v in mentioned.items()}
        return found | self._bound_values(value) | ({"globals": described} if described else {})

    def _reject_imports(self, value: types.FunctionType, imports: Iterable[str]) -> None:
        """Reject a function that imports a user's module when it is called."""
        for name in imports:
            package = name.split(".")[0]
            if package != "jfl" and (not package or not _is_library(package)):
                self._unreadable(
                    "modules that are imported at the top of a file",
                    f"import of {name} inside the function {value.__qualname__}",
                )

    def _unreadable(self, expected: str, actual: str) -> None:
        """Reject a value that cannot be read, unless the user has named the function around it."""
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
        """Describe a library's module by its name, and a user's by its members.

        Args:
            module: a module that a function holds or mentions.
            names: the names that this function mentions; only members with such names count.  None
                if the function passes the module on, so that all members count.
            passed_on: the names that this function mentions without taking an attribute of them.
        """
        found: dict[str, Any] = {}
        queue = [(module, names)]
        for current, names in queue:
            package = current.__name__.split(".")[0]
            if current.__name__ in found:
                continue
            found[current.__name__] = "library"
            if package != "jfl" and not _is_library(package):
                public = {k: v for k, v in sorted(vars(current).items()) if not k.startswith("__")}
                members = {k: v for k, v in public.items() if names and k in names} or public
                modules = {k: v for k, v in members.items() if isinstance(v, types.ModuleType)}
                queue += [(v, None if k in passed_on else names) for k, v in modules.items()]
                found[current.__name__] = {
                    k: v.__name__ if k in modules else self.static(v) for k, v in members.items()
                }
        is_library = found[module.__name__] == "library"
        return {"module": module.__name__} | ({} if is_library else {"contents": found})

    def type(self, cls: Any) -> Any:
        """Describe the type of a tuple or a pytree."""
        return self.static(cls) if isinstance(cls, type) else str(cls)

    def _class(self, cls: Any) -> dict[str, Any]:
        """Describe a class: by its name, or a user's class by its members."""
        if is_jfl_function(cls):
            return {"jfl": registered_name(cls) or cls.__qualname__}
        if _is_library_class(cls):
            return _describe_by_name(cls)
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
            if k not in IGNORED_ATTRIBUTES and not _is_generated(v, cls)
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
        # Python puts the name of the class before a name that begins with two underscores.
        is_mangled = lambda n: n.startswith("__") and not n.endswith("__")
        slots = [
            f"_{c.__name__.lstrip('_')}{n}" if is_mangled(n) else n
            for c in cls.__mro__
            for n in _as_names(vars(c).get("__slots__", ()))
        ]
        fields = {
            n: getattr(value, n) for n in slots if n != "__dict__" and hasattr(value, n)
        } | dict(getattr(value, "__dict__", {}))
        bases = [(c.__module__, c.__name__) for c in cls.__mro__]
        ignored = FLAX_ATTRIBUTES if ("flax.linen.module", "Module") in bases else ()
        fields = {k: self.static(v) for k, v in sorted(fields.items()) if k not in ignored}
        found = {"object": self.static(cls)} | ({"fields": fields} if fields else {})
        for kind in CONTAINERS:  # the content of an object of a subclass
            if isinstance(value, kind):
                builtin: Any = kind
                found["content"] = self.static(builtin(value))
        if isinstance(value, np.ndarray):
            found["content"] = self._array(np.asarray(value))
        if not is_jfl_function(cls) and _hides_state(cls):
            self._unreadable("objects with fields", checks.short_repr(value))
        return found


def _hides_state(cls: type) -> bool:
    """Return whether the objects of a class keep state in C that Python cannot list."""
    readable = (object, types.SimpleNamespace, collections.OrderedDict, np.ndarray, *CONTAINERS)
    for base in cls.__mro__:
        methods_in_c = any(isinstance(v, types.MethodDescriptorType) for v in vars(base).values())
        if base not in readable and (methods_in_c or base.__flags__ & IMMUTABLE_TYPE):
            return True
    has_fields = any(name in vars(c) for c in cls.__mro__ for name in ("__dict__", "__slots__"))
    return cls is not object and not has_fields


def _origin(value: Any) -> Any:
    """Return the module and code of a function, which are equal if one statement made two."""
    return _module(value), getattr(value, "__code__", value.__qualname__)


def _is_pytree(value: Any) -> bool:
    return not isinstance(value, type) and default_registry.flatten_one_level(value) is not None


def _canonical(value: Any) -> jax.Array | np.ndarray:
    """Return a number in the dtype with which the program computes."""
    if isinstance(value, jax.Array):
        return value
    value = np.asarray(value)
    return value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)


def _number(value: float) -> float | dict[str, str]:
    """Describe a Python number for JSON, which has no infinity or NaN."""
    return value if isinstance(value, int) or np.isfinite(value) else {"float": repr(value)}


def _key(value: Any) -> str:
    """Return a key of a dict as a string, with its type if it is not a string."""
    return value if isinstance(value, str) else f"{type(value).__name__} {value!r}"


def _as_names(slots: Iterable[str]) -> Iterable[str]:
    """Return the names in `__slots__`, which may be a single string."""
    return (slots,) if isinstance(slots, str) else slots


def _checksum(x: np.ndarray) -> str:
    return _hash(np.ascontiguousarray(x).tobytes())


def _hash(content: str | bytes) -> str:
    """Return 16 hexadecimal digits of the sha256 of a string or of bytes."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[
        :16
    ]


def _readable_leaf(x: Any) -> Any:
    """Describe a leaf for people: a single number, or an array by its shape and checksum."""
    x = hashing.on_host(x)
    if x.ndim == 0 and x.dtype.kind in "iub":
        return x.item()
    if x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.floating):
        return _number(float(str(x)))  # 0.1 instead of 0.10000000149, the nearest float32
    return {"array": list(x.shape), "type": str(x.dtype), "checksum": _checksum(x)}


# --- the source of a user's function


class FunctionSource(NamedTuple):
    """The source text of a function, and the names that occur in it."""

    text: str
    names: frozenset[str]  # the variables that the function mentions
    passed_on: frozenset[str]  # the last names of attribute chains: f, a and d in `f(a, b.c.d)`
    imports: frozenset[str]  # modules that the function imports when it is called


def _source(function: types.FunctionType) -> FunctionSource | None:
    """Return the source of a function; None if there is none that compiles to its code.

    If a file was edited after its import, or an import hook compiled it differently, its text is
    not the source of the function.  Several lambdas in one line are distinguished by their order.
    """
    code = function.__code__
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    flags = code.co_flags & __future__.annotations.compiler_flag
    place = code.co_firstlineno, code.co_name
    codes, functions = (found.get(place, []) for found in _functions_in(text, flags))
    if code not in codes:
        return None
    nodes = [node for function in functions for node in ast.walk(function)]
    segments = [ast.get_source_segment(text, function) for function in functions]
    return FunctionSource(
        json.dumps([segments, codes.index(code)]),
        frozenset(node.id for node in nodes if isinstance(node, ast.Name)),
        frozenset(_passed_on(nodes)),
        frozenset(name for node in nodes for name in _imports_of(node)),
    )


def _passed_on(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the names that end a chain of attributes: f, a and d in `f(a, b.c.d)`."""
    owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if id(node) not in owners and isinstance(node, (ast.Name, ast.Attribute)):
            yield node.id if isinstance(node, ast.Name) else node.attr


def _imports_of(node: ast.AST) -> list[str]:
    """Return the modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + (node.module or "")]
    return []


@functools.lru_cache(maxsize=64)
def _functions_in(text: str, flags: int) -> tuple[dict[Any, list[Any]], dict[Any, list[Any]]]:
    """Compile a file, and return the functions in it.

    Args:
        text: the text of the file.
        flags: flags of the compiler, such as those of `from __future__ import annotations`.

    Returns:
        The codes, and the syntax trees, of the functions with each (first line, name).
    """
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
    """Return the names of globals and attributes in a function and the functions inside it."""
    names = (name for inner in _codes_in(code) for name in (*inner.co_names, *inner.co_freevars))
    return frozenset(names)


def _is_generated(member: Any, cls: type) -> bool:
    """Return whether dataclasses or named tuples generated a member of a class from its fields."""
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
