"""Errors a newcomer can act on: where, what was needed, what came, what to do."""

import numbers
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .aliases import Tree
from .errors import ArgumentError

INT32 = 2**31 - 1


class Checked(NamedTuple):
    """A value and the preconditions that it misses; under a trace, `holds` is the array to test."""

    value: Any
    failed: tuple[Any, ...] = ()
    holds: Any = True


def concrete(value: Tree) -> bool:
    """True for values that can be tested now; traced ones are judged by Health instead."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))


def fail(
    where: str, need: str, got: object, do: str = "", error: type[Exception] = ArgumentError
) -> NoReturn:
    """Refuse an argument.

    Args:
        where: what was called.
        need: what it needs.
        got: what came.
        do: what to do about it.
        error: the class of `core.errors` that says what kind of refusal this is.
    """
    raise error(f"{where}: need {need}; got {got}. {do}".rstrip())


def shown(value: object) -> str:
    """A value in a message: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # of somebody's class; of a whole number with more digits than Python prints
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= 200 else f"{text[:200]}..."


def cause(error: BaseException | None) -> str:
    """Somebody else's error in a message."""
    return f"{type(error).__name__}: {str(error)[:200]}"


def array(where: str, name: str, value: Any, do: str = "") -> np.ndarray:
    """`value` as an array of NumPy; refused where that is none, as of lists of unequal length or of
    keys."""
    try:
        return np.asarray(value)
    except Exception as error:  # NumPy, JAX and what pretends to be an array have no common error
        fail(where, f"{name} as an array", f"{type(value).__name__}: {str(error)[:200]}", do)


def ndim(where: str, name: str, value: Any) -> int:
    return array(where, name, value).ndim if concrete(value) else np.ndim(value)


def _test(
    where: str,
    ok: Callable[[np.ndarray], Any],
    need: str,
    do: str,
    single: bool,
    values: dict[str, Any],
) -> None:
    for name, value in values.items():
        if not concrete(value):
            continue
        converted = array(where, name, value, do)
        if single and converted.ndim:
            fail(where, f"a single number {name} {need}", f"{name}={shown(value)}", do)
        # as the float32 that runs: 1e-60 would be no noise at all
        if converted.dtype.kind not in "iuf" or not np.all(ok(_float32(converted))):
            fail(where, f"{name} {need}", f"{name}={shown(value)}", do)


def _float32(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        return array.astype(np.float32)


def positive(where: str, do: str = "", single: bool = False, **values: Any) -> None:
    """Refuse values that are not finite and > 0 (`not >` also refuses nan); with `single` also
    arrays."""
    _test(where, lambda v: (v > 0) & np.isfinite(v), "> 0 and finite", do, single, values)


def nonnegative(where: str, do: str = "", single: bool = False, **values: Any) -> None:
    _test(where, lambda v: (v >= 0) & np.isfinite(v), ">= 0 and finite", do, single, values)


def fraction(where: str, do: str = "", single: bool = False, **values: Any) -> None:
    _test(where, lambda v: (v > 0) & (v <= 1), "in (0, 1]", do, single, values)


def whole(where: str, do: str = "", least: int = 1, most: int = INT32, **values: Any) -> None:
    """Whole numbers that shape a program: Python or NumPy integers, `least` to `most`."""
    for name, value in values.items():
        if (
            isinstance(value, (bool, np.timedelta64))
            or not isinstance(value, numbers.Integral)
            or int(value) < least
        ):
            fail(where, f"a whole number {name} >= {least}", f"{name}={shown(value)}", do)
        if int(value) > most:
            fail(where, f"a whole number {name} <= {most}", f"{name}={shown(value)}", do)


def seed(where: str, **values: Any) -> None:
    """Seeds of jax.random.key: another one beyond 32 bits would be the same run."""
    whole(where, "Keys have 32 bits of seed.", least=0, most=2**32 - 1, **values)


def several(where: str, **values: Any) -> tuple[Any, ...]:
    """A list, tuple or array of one dimension as a tuple."""
    ((name, value),) = values.items()
    if not (isinstance(value, (list, tuple)) or isinstance(value, np.ndarray) and value.ndim == 1):
        fail(where, f"{name}, a list", f"{name}={shown(value)}")
    return tuple(value)


def kind(where: str, wanted: type, make: str, **values: object) -> None:
    """Refuse what is not of the type that `make` gives."""
    for name, value in values.items():
        if not isinstance(value, wanted):
            fail(where, f"{name} of {make}, a {wanted.__name__}", f"{name}={shown(value)}")


def memory(where: str, value: Any) -> float:
    """Bytes, at most 2^100: infinity stands for no limit."""
    value = 2.0**100 if isinstance(value, float) and value == np.inf else value
    positive(where, single=True, memory=value)
    return float(value)


def key(where: str, value: Any) -> jax.Array:
    """One typed key; an old one, of uint32, is wrapped."""
    try:
        kind = (
            value
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
            else jax.random.wrap_key_data(value)
        )
    except Exception:  # of whatever it is
        kind = None
    if kind is None or kind.shape:
        fail(where, "a key such as jax.random.key(0)", shown(value))
    return kind


def arrays(where: str, name: str, tree: Tree, dtype: DTypeLike | None = None) -> Tree:
    """A pytree with leaves of JAX; refused where one is no number."""
    try:
        return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
    except Exception as error:  # whatever JAX says of it
        fail(where, f"{name}, a pytree of numbers", cause(error))


def gradient(where: str, loss: Callable[..., Any], params: Tree, *row: Any) -> None:
    """Refuse a loss without a gradient at such params and such a row; it is traced, and nothing
    computed."""
    try:
        kinds = {
            leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(jax.grad(loss), params, *row))
        }
        got = (
            ""
            if kinds and all(jnp.issubdtype(k, jnp.floating) for k in kinds)
            else f"params of {sorted(map(str, kinds))}"
        )
    except Exception as error:  # the loss is the user's, and so is its error
        got = cause(error)
    if got:
        fail(
            where,
            (
                "params, a pytree of floats, and rows that fit the loss, a pure (params, x, y) -> "
                "scalar"
            ),
            got,
        )


def on_device(where: str, fed: Any) -> None:
    """Refuse a population, whose rows stay on the host, and what is no federation."""
    if not hasattr(fed, "host"):
        fail(where, "fed of jfl.federate, a Federation", f"fed={shown(fed)}")
    if fed.host is not None:
        fail(
            where,
            "a federation with its rows on the device",
            "a jfl.population, whose rows stay on the host",
            "jfl.simulate takes it; for other work make a smaller federation of some of its rows.",
        )


def choice(where: str, options: Collection[Any], **values: Any) -> None:
    for name, value in values.items():
        # an array, whose comparison is no bool, is none of them
        if (
            not isinstance(value, (str, numbers.Number, np.bool_, type(None)))
            or value not in options
        ):
            fail(
                where,
                f"{name} to be one of {', '.join(map(repr, options))}",
                f"{name}={shown(value)}",
            )


def scalar(value: ArrayLike) -> jax.Array | np.ndarray:
    """A hyperparameter as a leaf: float32 on the host, arrays and tracers as they are."""
    if np.ndim(value):
        fail(
            "hyperparameter",
            "one number",
            shown(value),
            "For several values use jfl.sweep, or jax.vmap.",
        )
    if isinstance(value, (jax.Array, jax.core.Tracer)):
        return value
    return np.asarray(value, np.float32)


def checked(
    where: str, value: Any, conditions: Mapping[str, ArrayLike], strict: bool, do: str = ""
) -> Checked:
    """`value` with those of `conditions` (name -> bool array) that fail; with `strict`, a failed
    one raises."""
    holds = jnp.all(jnp.stack(jnp.broadcast_arrays(*conditions.values())), axis=0)
    if not concrete(holds):
        return Checked(value, (), holds)
    failed = tuple(name for name, ok in conditions.items() if not np.all(np.asarray(ok)))
    if strict and failed:
        fail(where, " and ".join(failed), "arguments for which that fails", do)
    return Checked(value, failed, holds)
