"""The identity of a plan: what it computes, read once, as a description for people and as 128 bits
for the noise.

All noise of a run follows from its seed and from the identity of the plan that runs, so two plans
that compute different things never share noise (their difference would be free of it), and one plan
has the same noise in every process.  The identity is a hash of a *static description* (registered
names of jfl's own functions, the source of a user's, static arguments, shapes, types) with the bits
of every numeric leaf in the type that runs.

What it cannot see: a value that a function reads from a file, a clock or the state of an object in
C; attributes that a function looks up by a computed name; a state of a run that is changed by hand.
"""

import contextlib
import copyreg
import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import io
import json
import linecache
import logging
import os
import sys
import sysconfig
import tokenize
import types
from collections.abc import Callable, Generator, Iterable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.tree_util import default_registry

from . import checks, hashing
from .aliases import Words
from .records import Federation, Fn, Plan

# How a plan is stored and computed, not what: these are no part of its identity.  Neither are the
# number of rounds, the cadence of evaluations and the padding of a federation, which no plan holds.
NOT_PART = {
    # what is assumed of whoever sums uploads changes nothing that is drawn
    "Plan": ("chunk", "mesh", "secure_aggregation"),
    "Grad": ("microbatch", "path"),
    "Task": ("evaluation", "metrics", "target"),
    # said of the algorithm for `plan`; what it does is in its functions
    "Algorithm": ("uploads", "checks_its_solve", "contracts", "personal", "personal_releases"),
    "Sampler": ("capacity",),  # an overflow voids the run: no cap is part of a mechanism
    "Responders": ("capacity",),
    "Available": ("capacity", "at_once"),
    "sampling.poisson": ("capacity",),
    "sampling.poisson_few": ("capacity", "steps"),  # steps: the law up to the capacity
    "batches.poisson": ("batch",),
}
# Their functions are known by name: what they do does not change between two points of a sweep.
LIBRARIES = frozenset(
    (
        "jax",
        "jaxlib",
        "numpy",
        "scipy",
        "optax",
        "flax",
        "equinox",
        "chex",
        "haiku",
        "distrax",
        "ml_dtypes",
        "orbax",
        "builtins",
    )
)
# Functions that have no Python code.
COMPILED = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)
# What a class has that says nothing of what its objects compute.
SILENT = frozenset(
    """__module__ __dict__ __weakref__ __doc__ __qualname__ __annotations__ __annotate__
    __annotate_func__ __dataclass_fields__ __dataclass_params__ __match_args__ __firstlineno__
    __static_attributes__ __abstractmethods__ _abc_impl __parameters__ __orig_bases__ __slots__
    __hash__ __classcell__ __annotations_cache__ __slotnames__ _registered_name
    _registered_code""".split()
)
FLAX = frozenset(
    "_state _id _parent_ref parent scope".split()
)  # what flax keeps in a module for itself
WRITTEN = frozenset(
    """__init__ __repr__ __eq__ __lt__ __le__ __gt__ __ge__ __hash__ __setattr__ __delattr__ __new__
__replace__""".split()
)  # what dataclasses and named tuples write into a class


def plan_identity(plan: Plan) -> Words:
    """The identity of a plan.

    Args:
        plan: a Plan; of concrete values it is read on the host, of traced ones in the program.

    Returns:
        UInt32[4], the same on either way.  A traced array that a function closes over counts in the
        program, a concrete one in the description: they give different words.

    Raises:
        ValueError: for a federation whose rows were swapped behind it, and for functions that hold
            what cannot be read.

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
    as_made(plan.fed)
    return _words(plan, Reader.plan)


def initial_history(plan: Plan) -> Words:
    """UInt32[4] of what the state before the first round follows from, beside its key: the history
    of a run begins with it.

    So two runs of one seed that start from other parameters have noise of their own, also where
    they run one plan.
    """
    return np.zeros(hashing.WORDS, np.uint32) if plan.paired_noise else _words(plan, Reader.start)


def _words(plan: Plan, read: Callable[["Reader", Plan], Any]) -> Words:
    reader = Reader()
    with _readable():
        text = reader.text(read(reader, plan))
    return hashing.combine(hashing.of_text(text), hashing.of_arrays(reader.leaves))


@contextlib.contextmanager
def _readable() -> Generator[None]:
    try:
        yield
    except RecursionError:
        checks.fail(
            "jfl.describe",
            "functions and objects that hold each other a few hundred deep at most",
            "deeper ones, or a container that holds itself",
            'Give the function that holds them a name: jfl.named("...")(function).',
        )


def as_made(fed: Federation) -> None:
    """Refuse a concrete federation whose arrays were swapped behind it: it has the identity of
    other rows."""
    if (
        checks.is_concrete(fed)
        and np.ndim(fed.size) == 1
        and not np.array_equal(np.asarray(fed.identity), fed.data_identity())
    ):
        checks.fail(
            "jfl.plan",
            "a federation with the rows and owners it was made of",
            "other ones, put into it as a pytree",
            (
                "Use dataclasses.replace(fed, x=..., y=...): its identity, from which noise "
                "follows, "
                "is then computed again."
            ),
        )


def plan_identities(
    plans: list[Plan], read: Callable[["Reader", Plan], Any] | None = None
) -> list[Words]:
    """`words` of many plans of concrete values; those of one structure are read once.

    Args:
        plans: of Plan.
        read: Reader.plan, or Reader.start for of_start.

    Returns:
        A list of UInt32[4], in the order of the plans.
    """
    known, out, read = {}, [], read or Reader.plan
    for fed in {id(p.fed): p.fed for p in plans}.values():
        as_made(fed)
    for plan in plans:
        leaves, shape = jax.tree.flatten(plan)
        kinds = tuple((np.shape(x), jnp.result_type(x)) for x in leaves)
        if (shape, kinds) not in known:
            reader = Reader()
            with _readable():
                tree = read(reader, shape.unflatten(map(_Place, range(len(leaves)))))
            places = reader.leaves  # of a number: where it is among the leaves of the pytree
            reader.leaves = [
                _in_its_type(leaves[x.at]) if isinstance(x, _Place) else x for x in places
            ]
            known[shape, kinds] = places, hashing.of_text(reader.text(tree))
        places, text = known[shape, kinds]
        numbers = [_in_its_type(leaves[x.at]) if isinstance(x, _Place) else x for x in places]
        out.append(hashing.combine(text, hashing.of_arrays(numbers)))
    return out


class _Place:
    """Stands for number `at` of the leaves of a pytree."""

    def __init__(self, at: int):
        self.at = at


def noise_identity(plan: Plan) -> Words:
    """UInt32[4] from which the noise of a plan follows: its identity, or 0 where points of a sweep
    are to share noise."""
    return np.zeros(hashing.WORDS, np.uint32) if plan.paired_noise else plan_identity(plan)


def describe(plan: Plan) -> dict[str, Any]:
    """All that the identity of a plan is made of, nested and JSON-able.

    It is what a run directory stores and what `--resume` and sweeps compare.  Functions of jfl
    stand under their registered names; a function of your own under its name with a hash of its
    source and the values it holds; arrays by shape, type and checksum.  The shapes of the model's
    parameters stand beside them.

    Args:
        plan: a Plan of concrete values.

    Returns:
        A dict; equal descriptions are equal noise for equal seeds.

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
    as_made(plan.fed)
    reader = Reader()
    with _readable():
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
    """32 hexadecimal digits of a description."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def differences(there: Any, here: Any, at: str = "") -> list[str]:
    """Where two descriptions differ, one line each: the path, and both values.

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
    return [] if there == here else [f"{at}: {_brief(there)} there, {_brief(here)} here"]


def _brief(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def is_ours(function: Any) -> bool:
    """True for a function or class that was written in jfl."""
    return _module(function).split(".")[0] == "jfl"


def registered(function: Any) -> str | None:
    """The name that `jfl.named` gave to this very function or class: no subclass has it, and no
    wrapper that copied it."""
    given = getattr(function, "__dict__", {})
    return (
        given.get("_registered_name")
        if given.get("_registered_code") is getattr(function, "__code__", None)
        else None
    )


def _module(value: Any) -> str:
    """Where a function was written: functools.wraps copies `__module__`, but not the globals."""
    if isinstance(value, types.FunctionType):
        return value.__globals__.get("__name__") or ""
    return getattr(value, "__module__", None) or ""


def _top(value: Any) -> str:
    return _module(value).split(".")[0]


def _ufunc_of_numpy(value: Any) -> bool:
    return isinstance(value, np.ufunc) and getattr(np, value.__name__, None) is value


@functools.cache
def _library(top: str) -> bool:
    """True for a package whose functions go by their names: JAX and its kin, Python's own, and what
    is installed."""
    if top in LIBRARIES:
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:
        return top in sys.stdlib_module_names and top != "__main__"
    paths = sysconfig.get_paths()  # not the prefix, where a user's own files may lie
    return any(
        file.startswith(paths[name] + os.sep)
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )


def _by_name(value: Any) -> dict[str, Any]:
    """What a library made, by its name; of a package that is not JAX's kin or Python's own, with
    its version."""
    top = _top(value)
    version = (
        ""
        if top in LIBRARIES or top in sys.stdlib_module_names
        else getattr(sys.modules.get(top), "__version__", "")
    )
    return {"library": f"{top}.{value.__qualname__}"} | (
        {"version": str(version)} if version else {}
    )


def _is_theirs(cls: Any) -> bool:
    """True for a class that its library holds under its name; what a library makes of a user's
    class is the user's."""
    found = sys.modules.get(_module(cls))
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls and _library(_top(cls))


class Leaf:
    """Stands in a description for number `at` of the leaves."""

    def __init__(self, at: int):
        self.at = at


def _fields_of(value: Any) -> tuple[str, ...]:
    """The names of a named tuple's fields."""
    return value._fields


class Reader:
    """Reads values into a description; the numbers of a plan become its leaves."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.known: dict[
            int, Any
        ] = {}  # id -> value, what stands for it; the value is held, so its id stays

    # --- results

    def text(self, tree: Any) -> str:
        """The static description: leaves by shape and type alone."""
        plain = lambda leaf: f"{_type(self.leaves[leaf.at])}{list(np.shape(self.leaves[leaf.at]))}"
        return json.dumps(tree, sort_keys=True, default=plain)

    def shown(self, tree: Any) -> Any:
        """The description for people: numbers as they are, arrays by shape and checksum."""
        if isinstance(tree, Leaf):
            return _shown(self.leaves[tree.at])
        if isinstance(tree, dict):
            return {k: self.shown(v) for k, v in tree.items()}
        return [self.shown(v) for v in tree] if isinstance(tree, list) else tree

    # --- a plan

    def start(self, plan: Plan) -> dict[str, Any]:
        """What `jfl.init` reads of a plan."""
        return {
            "params": self.data(plan.task.init),
            "state": self.data(plan.algorithm.init),
            "clients": plan.sampler.clients,
            "mechanism": [self.data(s.state) for s in plan.release.stages],
        }

    def plan(self, plan: Plan) -> dict[str, Any]:
        found = {"data": self.leaf(plan.fed.identity), "classes": plan.fed.classes}
        for field in dataclasses.fields(Plan):
            if field.name not in ("fed", *NOT_PART["Plan"]):
                found[field.name] = self.data(getattr(plan, field.name))
        return found

    # --- numbers and pytrees

    def leaf(self, value: Any) -> Leaf:
        self.leaves.append(value if isinstance(value, _Place) else _in_its_type(value))
        return Leaf(len(self.leaves) - 1)

    def data(self, value: Any) -> Any:
        """A pytree whose numbers are leaves."""
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
            return [self.data(v) for v in value]
        if not _is_pytree(value):
            return self.static(value)
        if dataclasses.is_dataclass(value) and is_ours(type(value)):
            return self._record(value)
        leaves, fixed = default_registry.flatten_one_level(value)
        return {
            "pytree": self.type(type(value)),
            "static": self.static(fixed),
            "leaves": [self.data(v) for v in leaves],
        }

    def _function_of_plan(self, value: Fn) -> dict[str, Any]:
        name = registered(value.function) if is_ours(value.function) else None
        left = NOT_PART.get(name, ()) if name is not None else ()
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
        name = registered(type(value)) or type(value).__name__
        left = NOT_PART.get(name, ()) + (
            ("batch",) if name == "Batches" and value.scheme == "poisson" else ()
        )
        found: dict[str, Any] = {"record": name}
        for field in dataclasses.fields(value):
            held = getattr(value, field.name)
            plain = field.metadata.get("static")
            # what a field holds by default is not said: a new field with a default leaves recorded
            # identities as they are
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
        """What belongs to the structure of a program: its value counts as it is, numbers to the
        last digit."""
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
            return repr(value)
        if isinstance(value, slice):
            return {"slice": [self.static(v) for v in (value.start, value.stop, value.step)]}
        if (
            isinstance(value, jax.Array)
            or type(value) is np.ndarray
            or isinstance(value, np.generic)
        ):
            return self._held(value)
        if isinstance(value, np.dtype):
            return str(value)
        if type(value) in (tuple, list):
            return [self.static(v) for v in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {
                "tuple": self.type(type(value)),
                **{f: self.static(getattr(value, f)) for f in _fields_of(value)},
            }
        if type(value) in (set, frozenset):  # their order differs from process to process
            return {"set": sorted(_alone(v) for v in value)}
        if isinstance(value, (dict, types.MappingProxyType)) and type(value) in (
            dict,
            types.MappingProxyType,
        ):
            return {"dict": [[self.static(k), self.static(v)] for k, v in value.items()]}
        return self._once(value)

    def _held(self, value: Any) -> Any:
        """An array that a function holds: its numbers belong to the program."""
        if isinstance(value, jax.core.Tracer):
            return self.leaf(value)
        if isinstance(value, jax.Array):
            value = hashing.on_host(value)
        if value.dtype == object:
            return [self.static(v) for v in value.reshape(-1).tolist()]
        return {"array": list(value.shape), "type": str(value.dtype), "checksum": _checksum(value)}

    def _once(self, value: Any) -> dict[str, Any]:
        """Functions, classes, objects and modules: each is read once, and then stands as a number,
        also inside a circle."""
        if id(value) in self.known:
            return self.known[id(value)][1]
        self.known[id(value)] = value, {"same as": len(self.known)}
        found = self._read(value)
        if all(
            isinstance(v, (str, bool)) for v in found.values()
        ):  # a name says it as shortly as a number
            self.known[id(value)] = value, found
        return found

    def _read(self, value: Any) -> dict[str, Any]:
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, Fn) or (is_ours(type(value)) and _is_pytree(value)):
            found = self.data(value)
            return found if isinstance(found, dict) else {"pytree": found}
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.ModuleType):
            return self._whole_module(value)
        if isinstance(value, types.MethodType):
            return {"method": self.static(value.__func__), "of": self.static(value.__self__)}
        if type(value) is functools.partial:
            return {
                "partial": self.static(value.func),
                "args": self.static(value.args),
                "keywords": self.static(value.keywords),
            }
        if isinstance(value, (staticmethod, classmethod)):
            return {"function": self.static(value.__func__)}
        if type(value) is property:
            return {"property": [self.static(f) for f in (value.fget, value.fset, value.fdel)]}
        if _library(_top(type(value))) and hasattr(value, "__wrapped__"):
            return self._wrapped(value)
        if isinstance(value, COMPILED) or _ufunc_of_numpy(value):
            return self._compiled(value)
        if isinstance(value, logging.Logger):
            return {"logger": value.name}
        return self._object(value)

    def _wrapped(self, value: Any) -> dict[str, Any]:
        """A function of the user's inside one of jax: jit, custom_jvp, custom_vjp."""
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
        """A function of C, by name; a method of an object (`[].append`) with what it belongs to."""
        if _ufunc_of_numpy(value):
            return {"library": f"numpy.{value.__name__}"}
        name = getattr(value, "__qualname__", value.__name__)
        found = {"library": f"{_top(value) or 'builtins'}.{name}"}
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType):
            return found
        return found | {"of": self.static(owner)}

    def _function(self, value: types.FunctionType) -> dict[str, Any]:
        if name := registered(value):
            found = {"jfl" if is_ours(value) else "named": name}
        elif is_ours(value):
            found = {"jfl": value.__qualname__, "registered": False}
        elif _library(_top(value)):
            found = _by_name(value)
        else:
            return self._users(value)
        return found | self._bound(value)

    def _bound(self, value: types.FunctionType) -> dict[str, Any]:
        """What a function was given when it was made: defaults, and what it closes over."""
        found = {}
        if value.__defaults__ or value.__kwdefaults__:
            found["defaults"] = self.static([value.__defaults__, value.__kwdefaults__])
        closed = {
            k: v
            for k, v in zip(value.__code__.co_freevars, value.__closure__ or ())
            if k not in ("dispatch_cache", "cache_token")
        }
        if (
            not is_ours(value)
            and not _library(_top(value))
            and (more := {k: v for k, v in vars(value).items() if k not in SILENT})
        ):
            found["attributes"] = self.static(more)
        if closed:
            found["holds"] = {k: self._cell(v, k, value) for k, v in sorted(closed.items())}
        return found

    def _cell(self, cell: types.CellType, name: str, function: types.FunctionType) -> Any:
        try:
            content = cell.cell_contents
        except ValueError:
            return "empty"
        if isinstance(content, types.ModuleType):
            return self._module_as_used(content, _uses(function.__code__).get(name, {()}))
        return self.static(content)

    def _users(self, value: types.FunctionType) -> dict[str, Any]:
        """A function of a user's own: its name, its source, and all values that it names."""
        source = _source(value)
        found = {"function": value.__qualname__}
        if source is None:
            found |= {
                "code": _code(value.__code__),
                "holds for": "Python {}.{}".format(*sys.version_info[:2]),
            }
        else:
            found["source"] = source
        named = {}
        for name, chains in sorted(_uses(value.__code__).items()):
            if name in value.__code__.co_freevars:
                continue
            if name.startswith("import "):
                named[name] = self._imported(
                    name.removeprefix("import "), value.__globals__.get("__package__") or ""
                )
            elif name in value.__globals__:
                content = value.__globals__[name]
                module = isinstance(content, types.ModuleType)
                named[name] = (
                    self._module_as_used(content, chains) if module else self.static(content)
                )
        return found | self._bound(value) | ({"globals": named} if named else {})

    def _imported(self, name: str, package: str) -> Any:
        """A module that a function imports: of a user's, everything."""
        bare = name.lstrip(".")
        full = (
            f"{package.rsplit('.', len(name) - len(bare) - 1)[0]}.{bare}".strip(".")
            if name != bare
            else bare
        )
        module = sys.modules.get(full)
        return self.static(module) if module is not None else {"module": full}

    def _module_as_used(self, module: types.ModuleType, chains: set[tuple[str, ...]]) -> Any:
        """A module by what a function takes from it: `chains` are the attributes it names."""
        top = module.__name__.split(".")[0]
        if top == "jfl" or _library(top):
            return {"module": module.__name__}
        if () in chains:  # passed on whole
            return self.static(module)
        found = {}
        for chain in sorted(chains):
            content, at = module, 0
            while (
                at < len(chain)
                and isinstance(content, types.ModuleType)
                and hasattr(content, chain[at])
            ):
                content, at = getattr(content, chain[at]), at + 1
            found[".".join(chain[:at])] = self.static(content)
        return {"module": module.__name__, "uses": found}

    def _whole_module(self, module: types.ModuleType) -> dict[str, Any]:
        top = module.__name__.split(".")[0]
        if top == "jfl" or _library(top):
            return {"module": module.__name__}
        return {
            "module": module.__name__,
            "values": {
                k: self.static(v) for k, v in sorted(vars(module).items()) if not k.startswith("__")
            },
        }

    def type(self, cls: Any) -> Any:
        return self.static(cls) if isinstance(cls, type) else str(cls)

    def _class(self, cls: Any) -> dict[str, Any]:
        if is_ours(cls):
            return {"jfl": registered(cls) or cls.__qualname__}
        if _is_theirs(cls):
            return _by_name(cls)
        if name := registered(cls):
            return {"named": name}
        if issubclass(cls, enum.Enum):
            return {
                "enum": cls.__qualname__,
                "members": {k: self.static(v._value_) for k, v in cls.__members__.items()},
            }
        members = {
            k: self.static(v)
            for k, v in sorted(vars(cls).items())
            if k not in SILENT and not _generated(v, cls)
        }
        return {
            "class": cls.__qualname__,
            "bases": [self.static(b) for b in cls.__bases__ if b is not object],
            "members": members,
        }

    def _object(self, value: Any) -> dict[str, Any]:
        """An object by its class and its fields, private ones too; one of a library without fields
        by its pickled state."""
        cls = type(value)
        hidden = lambda n: (
            n.startswith("__") and not n.endswith("__")
        )  # then Python puts the name of the class before it
        slots = [
            f"_{c.__name__.lstrip('_')}{n}" if hidden(n) else n
            for c in cls.__mro__
            for n in _names(vars(c).get("__slots__", ()))
        ]
        fields = {
            n: getattr(value, n) for n in slots if n != "__dict__" and hasattr(value, n)
        } | dict(getattr(value, "__dict__", {}))
        left = (
            FLAX
            if any(
                c.__module__ == "flax.linen.module" and c.__name__ == "Module" for c in cls.__mro__
            )
            else ()
        )
        fields = {k: self.static(v) for k, v in sorted(fields.items()) if k not in left}
        found: dict[str, Any] = {
            "object": self.static(cls),
            **({"fields": fields} if fields else {}),
        }
        for kind in (
            dict,
            list,
            tuple,
            set,
            frozenset,
            str,
            bytes,
            int,
            float,
        ):  # a subclass, with its content
            if isinstance(value, kind):
                inner: Any = kind
                found["content"] = self.static(inner(value))
        if isinstance(value, np.ndarray):
            found["content"] = self._held(np.asarray(value))
        if not fields and "content" not in found and not is_ours(cls) and _is_theirs(cls):
            found["state"] = self._pickled(value)
        return found

    def _pickled(self, value: Any) -> Any:
        """What a library's object would write of itself; nothing where it cannot."""
        try:
            reduce: Any = copyreg.dispatch_table.get(type(value), lambda v: v.__reduce_ex__(4))
            state = reduce(value)
        except Exception:  # locks, files, generators: whatever their class says
            return "none"
        if not isinstance(state, tuple):
            return str(state)
        items: list[Any] = [list(v) if hasattr(v, "__next__") else v for v in state[1:]]
        return [
            self.static(v)
            for v in items
            if not (isinstance(v, tuple) and value in [x for x in v if x is value])
        ]


def _is_pytree(value: Any) -> bool:
    return not isinstance(value, type) and default_registry.flatten_one_level(value) is not None


def _in_its_type(value: Any) -> jax.Array | np.ndarray:
    """A number in the type that runs."""
    if isinstance(value, jax.Array):
        return value
    value = np.asarray(value)
    return value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)


def _number(value: float) -> float | dict[str, str]:
    """A Python number in JSON: whole ones and finite floats as they are."""
    return value if isinstance(value, int) or np.isfinite(value) else {"float": repr(value)}


def _key(value: Any) -> str:
    """The key of a dict in a pytree: a text as it is, another one with its type."""
    return value if isinstance(value, str) else f"{type(value).__name__} {value!r}"


def _alone(value: Any) -> str:
    """The description of a value by itself."""
    reader = Reader()
    return reader.text(reader.static(value))


def _names(slots: Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _type(x: Any) -> str:
    return str(x.dtype)


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


# --- functions of a user's own


def _generated(member: Any, cls: type) -> bool:
    """True for what dataclasses and named tuples write into a class: it follows from the fields."""
    if (
        isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType))
        or type(member).__name__ == "_tuplegetter"
    ):
        return True
    member = getattr(member, "__func__", member)
    member = inspect.unwrap(member) if isinstance(member, types.FunctionType) else member
    return (
        isinstance(member, types.FunctionType)
        and member.__name__ in WRITTEN
        and member.__code__.co_filename.startswith("<string>")
        and ("__dataclass_fields__" in vars(cls) or issubclass(cls, tuple))
    )


_LOADS = {
    "LOAD_GLOBAL",
    "LOAD_NAME",
    "LOAD_DEREF",
    "LOAD_CLASSDEREF",
    "LOAD_FROM_DICT_OR_DEREF",
    "LOAD_FROM_DICT_OR_GLOBALS",
}


@functools.lru_cache(maxsize=4096)
def _uses(code: types.CodeType) -> dict[str, set[tuple[str, ...]]]:
    """The names that a function and the functions inside it look up, each with the chains of
    attributes it takes.

    >>> import jax.numpy as jnp
    >>> sorted(_uses((lambda x: jnp.linalg.norm(x) + len(x)).__code__).items())
    [('jnp', {('linalg', 'norm')}), ('len', {()})]
    """
    found: dict[str, set[tuple[str, ...]]] = {}
    name, chain, before = None, (), []
    for step in [*dis.get_instructions(code), None]:
        before = [
            *before[-2:],
            getattr(step, "argval", None),
        ]  # the level and the names of an import stand before it
        if name is not None and step is not None and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain += (step.argval,)
            continue
        if name is not None and not (
            step is not None and step.opname in ("PUSH_NULL", "CACHE", "EXTENDED_ARG")
        ):
            found.setdefault(name, set()).add(chain)
            name, chain = None, ()
        if step is not None and step.opname in _LOADS:
            name, chain = step.argval, ()
        elif step is not None and step.opname == "IMPORT_NAME":
            found.setdefault(
                "import " + "." * (before[0] if isinstance(before[0], int) else 0) + step.argval,
                set(),
            ).add(())
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            for k, v in _uses(inner).items():
                if k not in inner.co_freevars or k in code.co_freevars:
                    found.setdefault(k, set()).update(v)
    return found


def _code(code: types.CodeType) -> str:
    """A hash of a function's code and of the functions inside it."""
    consts = [_code(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts]
    return _hash(repr((code.co_code, consts, code.co_names, code.co_varnames, code.co_freevars)))


def _constant(value: Any) -> str:
    return f"frozenset{sorted(map(repr, value))}" if isinstance(value, frozenset) else repr(value)


def _same(a: types.CodeType, b: types.CodeType) -> bool:
    return (
        (a.co_code, a.co_names, a.co_name) == (b.co_code, b.co_names, b.co_name)
        and len(a.co_consts) == len(b.co_consts)
        and all(
            _same(u, v)
            if isinstance(u, types.CodeType) and isinstance(v, types.CodeType)
            else _constant(u) == _constant(v)
            for u, v in zip(a.co_consts, b.co_consts)
        )
    )


def _source(function: types.FunctionType) -> str | None:
    """A hash of a function's source, comments and white space apart; None where Python has none
    that fits its code."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines or code.co_firstlineno > len(lines):
        return None
    text = "".join(lines)
    # a file that was edited since it was imported has the source of another program
    if not any(
        _same(code, written)
        for written in _compiled(text).get((code.co_firstlineno, code.co_name), ())
    ):
        return None
    try:
        if code.co_name == "<lambda>":
            part = _plain(f"({_body(code, lines)})")
            arguments = code.co_varnames[
                : code.co_argcount
                + code.co_kwonlyargcount
                + bool(code.co_flags & 4)
                + bool(code.co_flags & 8)
            ]
            kinds = (
                code.co_argcount,
                code.co_posonlyargcount,
                code.co_kwonlyargcount,
                code.co_flags & 12,
            )
            return _hash(f"lambda {kinds} {arguments}: {part}")
        return _hash(_plain("".join(inspect.getblock(lines[code.co_firstlineno - 1 :]))))
    except (tokenize.TokenError, IndentationError, SyntaxError, ValueError):
        return None


@functools.lru_cache(maxsize=64)
def _compiled(text: str) -> dict[tuple[int, str], list[types.CodeType]]:
    """The functions of a file, by their first line and name."""
    found: dict[tuple[int, str], list[types.CodeType]] = {}
    try:
        waiting = [compile(text, "<source>", "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return found
    while waiting:
        code = waiting.pop()
        found.setdefault((code.co_firstlineno, code.co_name), []).append(code)
        waiting += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return found


def _body(code: types.CodeType, lines: list[str]) -> str:
    """The text of a lambda's body, from where its instructions come from."""
    spans: list[Any] = [p for p in code.co_positions() if None not in p and p[2:] != (0, 0)]
    if not spans:
        raise ValueError("no columns")
    begin, end = min((p[0], p[2]) for p in spans), max((p[1], p[3]) for p in spans)
    part = [line.encode() for line in lines[begin[0] - 1 : end[0]]]  # columns count bytes
    part[-1] = part[-1][: end[1]]
    part[0] = part[0][begin[1] :]
    return b"".join(part).decode()


def _plain(text: str) -> str:
    """Source without comments and white space, the same for every version of Python."""
    begin: Any
    out, lines, depth, begin = [], text.splitlines(keepends=True), 0, None
    start, middle_end = (
        getattr(tokenize, "FSTRING_START", None),
        getattr(tokenize, "FSTRING_END", None),
    )
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == start:  # from 3.12 on a formatted string is several tokens: take its text
            begin, depth = (begin or token.start) if depth else token.start, depth + 1
        elif token.type == middle_end:
            depth -= 1
            if not depth:
                out.append(_between(lines, begin, token.end))
        elif depth or token.type in (
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.ENCODING,
            tokenize.ENDMARKER,
        ):
            continue
        elif token.type in (tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE):
            out.append(
                {tokenize.INDENT: "{", tokenize.DEDENT: "}", tokenize.NEWLINE: ";"}[token.type]
            )
        else:
            out.append(token.string)
    return "\0".join(out)


def _between(lines: list[str], begin: tuple[int, int], end: tuple[int, int]) -> str:
    if begin[0] == end[0]:
        return lines[begin[0] - 1][begin[1] : end[1]]
    return "".join(
        [
            lines[begin[0] - 1][begin[1] :],
            *lines[begin[0] : end[0] - 1],
            lines[end[0] - 1][: end[1]],
        ]
    )
