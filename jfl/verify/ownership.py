"""Whose function it is: what jfl and its libraries made, and what a user did."""

import dataclasses
import functools
import types

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..core import identity
from ..core.records import Fn

LIBRARIES = (
    "jax",
    "jaxlib",
    "optax",
    "flax",
    "equinox",
    "numpy",
    "functools",
    "operator",
    "builtins",
)


def own(function) -> bool:
    """True for a function of jfl itself."""
    return isinstance(function, types.FunctionType) and identity.is_ours(function)


def plain_function(function):
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
    if _binds_arrays(value):
        return [value]
    if isinstance(value, functools.partial):
        return more(value.func) + more(value.args) + more(value.keywords)
    if isinstance(value, type):
        return [] if _library(value.__module__) else [value]
    plain = plain_function(value)
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


def _binds_arrays(function) -> bool:
    """True for a partial, or a method of an array, that holds numbers of its own: somebody's, even
    where the function is a library's."""
    arrays = np.ndarray, jax.Array
    if isinstance(getattr(function, "__self__", None), arrays):
        return True
    if not isinstance(function, functools.partial):
        return False
    bound = jax.tree.leaves((function.args, function.keywords))
    return any(isinstance(x, arrays) for x in bound) or _binds_arrays(function.func)


def _contents(function):
    """What the closure of a function holds."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _library(name):
    return str(name).split(".")[0] in LIBRARIES or str(name).startswith("jfl.")


def same_bits(one, other) -> bool:
    """Equal structure and equal bits."""
    (a, s), (b, t) = (jax.tree.flatten(v) for v in (one, other))
    return s == t and all(bits_of(x) == bits_of(y) for x, y in zip(a, b))


def bits_of(x):
    if isinstance(x, jax.core.Tracer):
        return "traced", id(x)
    x = np.asarray(
        jax.random.key_data(x) if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) else x
    )
    return str(x.dtype), x.shape, x.tobytes()


def nodes(value, kind) -> list:
    return [
        n
        for n in jax.tree.leaves(value, is_leaf=lambda n: isinstance(n, kind))
        if isinstance(n, kind)
    ]


def records_in(value):
    """All records in a pytree, however deep."""
    return [n for n in _nodes_in(value) if not isinstance(n, Fn)]


def _nodes_in(value) -> list:
    """All records and bound functions in a pytree, however deep."""
    nodes_, todo = [], [value]
    while todo:
        current = todo.pop()
        if isinstance(current, Fn):
            nodes_.append(current)
            todo += [current.data, current.static]
        elif isinstance(current, dict):
            todo += current.values()
        elif isinstance(current, (list, tuple)):
            todo += current
        elif dataclasses.is_dataclass(current) and not isinstance(current, type):
            nodes_.append(current)
            todo += [getattr(current, f.name) for f in dataclasses.fields(current)]
    return nodes_


def functions_in(value) -> list:
    """All bound functions in a pytree, however deep."""
    return [n for n in _nodes_in(value) if isinstance(n, Fn)]


def gradients_in(value) -> list:
    """What forms gradients of a loss: `per_example.Grad`, which lies above this module."""
    return [
        n
        for n in records_in(value)
        if type(n).__name__ == "Grad" and own(vars(type(n)).get("__call__"))
    ]


def loss_types(value) -> tuple:
    return tuple({type(n) for n in gradients_in(value)})


def name_of(function) -> str:
    function = function.function if isinstance(function, Fn) else function
    return getattr(plain_function(function), "__qualname__", type(function).__name__)
