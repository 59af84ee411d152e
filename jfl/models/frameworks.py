"""Errors for modules of flax and equinox that are passed as parameters or functions.

This module imports neither equinox nor flax.nnx: a user who passes their modules has done so.
"""

import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, linen

from ..core import checks

BATCH_NORM = (
    "BatchNorm mixes the examples of a batch, so an example has no separate gradient that could be "
    "clipped. Use GroupNorm or LayerNorm. Fixed statistics (of public data, with "
    'use_running_average=True) belong in the loss: module.apply({"params": params, '
    '"batch_stats": fixed}, x).'
)
DROPOUT = (
    "Dropout needs a random key for each example, which a loss of (params, x, y) does not have. "
    "Let __call__ take `train` or `deterministic`, which jfl.models.flax sets; or write a loss "
    '(params, x, y, key) and pass rngs={"dropout": key}; or use deterministic=True.'
)
ONE_EXAMPLE = (
    "The loss gets one example without a batch axis, and params of module.init on such an x. For a "
    "module that is written for a batch, pass x[None] and take [0] of its output."
)
# What to pass instead of a module as parameters.
SPLIT = {
    "flax.linen": (
        'Pass params = module.init(key, x[None])["params"] of one example x, and call '
        'module.apply({"params": params}, x[None])[0] in the loss; or use '
        "jfl.models.flax(fed, module)."
    ),
    "flax.nnx": (
        "Use jfl.models.nnx(fed, model). Or split it: graphdef, params, rest = "
        "nnx.split(model, nnx.Param, ...). Pass params, and call "
        "nnx.merge(graphdef, params, rest)(x[None])[0] in the loss, which needs a name since it "
        'holds objects of flax: jfl.named("...")(loss).'
    ),
    "equinox": (
        "Use jfl.models.equinox(fed, model). Or split it: params, static = "
        "eqx.partition(model, eqx.is_inexact_array). Pass params, and call "
        "eqx.combine(params, static)(x) in the loss."
    ),
}


def parameters(where: str, value: Any) -> Any:
    """Check that `value` can be trained, and convert its numbers to JAX arrays.

    Args:
        where: the function that was called, for the message.
        value: a pytree. An equinox module is accepted if all its leaves are arrays of floats.

    Raises:
        ValueError: for other modules of flax and equinox, for leaves that are not floating-point
            numbers, and for statistics of BatchNorm.
    """
    for node in jax.tree.leaves(value, is_leaf=lambda node: library(node) is not None):
        name = library(node)
        if name and not (name == "equinox" and all(map(_is_float, jax.tree.leaves(node)))):
            got = f"the {_describe(node)}"
            checks.fail(where, "params, a pytree of arrays of floats", got, SPLIT[name])
    if isinstance(value, Mapping) and "batch_stats" in value:
        keys = ", ".join(map(str, value))
        checks.fail(where, "params without batch_stats", f"a dict of {keys}", BATCH_NORM)
    value = jax.tree.map(jnp.asarray, value)
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        if not _is_float(leaf):
            checks.fail(
                where,
                "params, a pytree of floating-point numbers",
                f"{leaf.dtype} at params{jax.tree_util.keystr(path)}",
                "Numbers that are not trained belong in the loss.",
            )
    return value


def function(where: str, name: str, value: Any, form: str) -> None:
    """Require a pure function of params; reject modules and methods of modules.

    Args:
        where: the function that was called, for the message.
        name: name of the argument.
        value: the argument.
        form: how the function is called, such as "(params, x, y) -> scalar".
    """
    module = value if library(value) else getattr(value, "__self__", None)
    kind = library(module)
    # A bound method of linen holds no parameters, and of equinox only if its module has arrays.
    is_module = (
        kind == "flax.nnx"
        or (kind == "flax.linen" and module is value)
        or (kind == "equinox" and any(map(_is_float, jax.tree.leaves(module))))
    )
    if is_module or not callable(value):
        checks.fail(
            where,
            f"{name}, a pure function {form}",
            f"the {_describe(module)}" if is_module else checks.short_repr(value),
            "Write a function: def loss(params, x, y), which calls a module with params on one "
            "example.",
        )


def explain(where: str, error: Exception, context: str = "") -> None:
    """If an error comes from flax, raise one that says what to do; otherwise return.

    Args:
        where: what was traced, such as "the loss".
        error: the error.
        context: the shapes of the arguments.

    Raises:
        ValueError: if the error is one of flax.
    """
    text = str(error)
    is_missing_argument = "must be passed to the constructor or at call time" in text
    if not is_missing_argument and not isinstance(error, errors.FlaxError):
        return
    if "batch_stats" in text or "use_running_average" in text:
        expected, hint = "a module without BatchNorm", BATCH_NORM
    elif '"deterministic"' in text or "dropout" in text.lower():
        expected, hint = "a module without randomness, such as Dropout's", DROPOUT
    elif isinstance(error, errors.InvalidRngError):
        expected = "a module that needs no random key"
        hint = "A loss of (params, x, y) has no key: write one of (params, x, y, key)."
    else:
        expected, hint = "a flax module that fits its parameters and one example", ONE_EXAMPLE
    got = f"{type(error).__name__}: {text.split(' (https:')[0].splitlines()[0][:200]}"
    checks.fail(where, expected, got + (f" ({context})" if context else ""), hint)


def library(value: Any) -> str | None:
    """Return the library of a module, "flax.linen", "flax.nnx" or "equinox"; otherwise None."""
    if isinstance(value, linen.Module):
        return "flax.linen"
    for name in ("flax.nnx", "equinox"):
        module = sys.modules.get(name)
        if module is not None and isinstance(value, module.Module):
            return name
    return None


def _describe(module) -> str:
    return f"{library(module)} module {type(module).__name__}"


def _is_float(leaf) -> bool:
    return (
        hasattr(leaf, "shape")
        and hasattr(leaf, "dtype")
        and jnp.issubdtype(leaf.dtype, jnp.floating)
    )
