"""Checks of arguments, which raise errors with messages of one form.

A message says where the problem is, what was expected, what was passed instead, and what to do.

Arguments that several functions share: `where` is the function that was called, and `hint` says
what to do; both are for messages.  `**values` are the arguments to check, by name.  With
`single=True` arrays are rejected; otherwise all entries of an array must pass.  Traced values pass.
"""

import numbers
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .errors import ArgumentError

INT32_MAX = 2**31 - 1


# --- raising


def fail(
    where: str,
    expected: str,
    actual: object,
    hint: str = "",
    error: type[Exception] = ArgumentError,
) -> NoReturn:
    """Raise an error with the message "where: expected ..., but got .... hint".

    Args:
        where: the function that was called.
        expected: what was expected, a noun phrase such as "rate in (0, 1]".
        actual: what was passed instead, in the same form, such as "rate=1.2".
        hint: one sentence that says what to do; a reason may follow.
        error: the class of the error, from `core.errors`.
    """
    raise error(f"{where}: expected {expected}, but got {actual}. {hint}".rstrip())


def short_repr(value: object) -> str:
    """Return the repr of a value, cut to 200 characters, even if the repr itself raises.

    If the repr has several lines, as that of a data frame, return the type and shape of the value.
    """
    try:
        text = repr(value)
        if "\n" in text:
            shape = getattr(value, "shape", None)
            text = text.split("\n")[0] if shape is None else f"{type(value).__name__}{[*shape]}"
    except Exception:  # a user's class, or an integer with more digits than Python prints
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= 200 else f"{text[:200]}..."


def describe_error(error: BaseException | None) -> str:
    """Return the type and the first 200 characters of the message of an exception."""
    return f"{type(error).__name__}: {str(error)[:200]}"


# --- numbers


def is_concrete(value: Any) -> bool:
    """Return whether no leaf of a pytree is traced."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))


def as_array(where: str, name: str, value: Any, hint: str = "") -> np.ndarray:
    """Convert `value` to a NumPy array; reject values for which this fails, such as ragged lists.

    Args:
        where: the function that was called.
        name: the name of the argument.
        value: the argument.
        hint: what to do, as in `fail`.
    """
    try:
        return np.asarray(value)
    except Exception as error:  # NumPy, JAX and array-like classes raise no common error
        fail(where, f"{name} as an array", f"{type(value).__name__}: {str(error)[:200]}", hint)


def ndim(where: str, name: str, value: Any) -> int:
    """Return the number of dimensions of a concrete or traced array."""
    return as_array(where, name, value).ndim if is_concrete(value) else np.ndim(value)


def _require(
    where: str,
    holds: Callable[[np.ndarray], Any],
    expected: str,
    hint: str,
    single: bool,
    values: dict[str, Any],
) -> None:
    """Reject concrete values for which `holds` is False anywhere; traced values pass."""
    for name, value in values.items():
        if not is_concrete(value):
            continue
        array = as_array(where, name, value, hint)
        if single and array.ndim:
            fail(where, f"a single number {name} {expected}", f"{name}={short_repr(value)}", hint)
        # Programs compute in float32, in which a noise level of 1e-60 is 0.
        if array.dtype.kind not in "iuf" or not np.all(holds(_float32(array))):
            fail(where, f"{name} {expected}", f"{name}={short_repr(value)}", hint)


def _float32(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        return array.astype(np.float32)


def require_positive(where: str, hint: str = "", single: bool = False, **values: Any) -> None:
    """Reject numbers unless they are finite and > 0; with `single`, also reject arrays."""
    _require(where, lambda v: (v > 0) & np.isfinite(v), "> 0 and finite", hint, single, values)


def require_nonnegative(where: str, hint: str = "", single: bool = False, **values: Any) -> None:
    """Reject numbers unless they are finite and >= 0; with `single`, also reject arrays."""
    _require(where, lambda v: (v >= 0) & np.isfinite(v), ">= 0 and finite", hint, single, values)


def require_fraction(where: str, hint: str = "", single: bool = False, **values: Any) -> None:
    """Reject numbers outside (0, 1]; with `single`, also reject arrays."""
    _require(where, lambda v: (v > 0) & (v <= 1), "in (0, 1]", hint, single, values)


def require_integer(
    where: str, hint: str = "", min_value: int = 1, max_value: int = INT32_MAX, **values: Any
) -> None:
    """Reject all but Python and NumPy integers from `min_value` to `max_value`."""
    for name, value in values.items():
        if (
            isinstance(value, (bool, np.timedelta64))
            or not isinstance(value, numbers.Integral)
            or int(value) < min_value
        ):
            fail(where, f"an integer {name} >= {min_value}", f"{name}={short_repr(value)}", hint)
        if int(value) > max_value:
            fail(where, f"an integer {name} <= {max_value}", f"{name}={short_repr(value)}", hint)


def require_seed(where: str, **values: Any) -> None:
    """Reject seeds of more than 32 bits, which jax.random.key would truncate to another seed."""
    require_integer(where, "A seed has 32 bits.", min_value=0, max_value=2**32 - 1, **values)


def as_scalar(value: ArrayLike) -> jax.Array | np.ndarray:
    """Convert a number to a float32 NumPy scalar, and a JAX array to float32 or wider.

    In half precision, products such as the standard deviation of noise would be rounded.
    """
    if np.ndim(value):
        fail(
            "hyperparameter",
            "one number",
            short_repr(value),
            "For several values use jfl.sweep, or jax.vmap.",
        )
    if isinstance(value, (jax.Array, jax.core.Tracer)):
        return value.astype(jnp.promote_types(value.dtype, jnp.float32))
    return np.asarray(value, np.float32)


# --- other types


def require_one_of(where: str, options: Collection[Any], **values: Any) -> None:
    """Reject values that are not among `options`.

    Args:
        where: the name of the function that checks, with which the message begins.
        options: the valid values.
        **values: argument names and their values.
    """
    for name, value in values.items():
        # Do not compare arrays, for which `in` fails.
        is_plain = isinstance(value, (str, numbers.Number, np.bool_, type(None)))
        if not is_plain or value not in options:
            expected = f"{name} to be one of {', '.join(map(repr, options))}"
            fail(where, expected, f"{name}={short_repr(value)}")


def require_type(where: str, wanted: type, make: str, **values: object) -> None:
    """Reject values that are not of type `wanted`.

    Args:
        where: the function that was called.
        wanted: the expected type.
        make: the name of a public function that returns this type.
        **values: the arguments to check.
    """
    for name, value in values.items():
        if not isinstance(value, wanted):
            fail(where, f"{name} of {make}, a {wanted.__name__}", f"{name}={short_repr(value)}")


def require_device_rows(where: str, fed: Any) -> None:
    """Reject a `jfl.population`, whose rows are on the host, and all but a Federation."""
    if not hasattr(fed, "host"):
        fail(where, "fed of jfl.federate, a Federation", f"fed={short_repr(fed)}")
    if fed.host is not None:
        fail(
            where,
            "a Federation",
            "a jfl.population, which keeps its rows on the host",
            "Only jfl.simulate supports populations; otherwise build a Federation from some of "
            "the rows.",
        )


def as_tuple(where: str, **values: Any) -> tuple[Any, ...]:
    """Convert a list, a tuple or a one-dimensional array, given as name=value, to a tuple."""
    ((name, value),) = values.items()
    if not (isinstance(value, (list, tuple)) or isinstance(value, np.ndarray) and value.ndim == 1):
        fail(where, f"{name}, a list", f"{name}={short_repr(value)}")
    return tuple(value)


# Under vmap, these generators of JAX draw from the first key only, so what a client or a point of a
# sweep draws would not depend on its own key.  With "unsafe_rbg", fold_in(fold_in(key, a), b) also
# equals fold_in(fold_in(key, b), a), so step a of round b would repeat the noise of step b of round
# a.
UNSAFE_GENERATORS = ("rbg", "unsafe_rbg")


def as_key(where: str, value: Any) -> jax.Array:
    """Convert `value` to a single typed key of JAX; a raw uint32 key is wrapped.

    Keys whose draws are not independent are rejected.
    """
    try:
        typed = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        found = value if typed else jax.random.wrap_key_data(value)
    except Exception:  # not an array, or not of a key's shape
        found = None
    if found is None or found.shape:
        fail(where, "a key such as jax.random.key(0)", short_repr(value))
    generator = str(jax.random.key_impl(found))
    if generator in UNSAFE_GENERATORS:
        fail(
            where,
            "a key whose draws for clients, steps and points are independent",
            f"a key of the generator {generator}",
            "Use jax.random.key(seed, impl='threefry2x32'), or jax.config.update("
            "'jax_default_prng_impl', 'threefry2x32').",
        )
    return found
