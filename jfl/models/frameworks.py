"""Errors for models of flax and equinox: what came, and what to do in place of it.

equinox and flax.nnx are looked up among the modules that are already imported: who has an object of
theirs has imported them.
"""

import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, linen

from ..core import checks

BATCH_NORM = (
    "BatchNorm mixes the examples of a batch: an example has no gradient of its own, so clipping "
    "it would "
    "bound nothing. Use GroupNorm or LayerNorm. Statistics that stay fixed (of public data, with "
    'use_running_average=True) belong into the loss: module.apply({"params": params, '
    '"batch_stats": fixed}, x).'
)
DROPOUT = (
    "Dropout needs a random key for each example, which a loss of (params, x, y) does not have. "
    "Let __call__ take `train` or `deterministic`, which jfl.models.flax sets; or write a loss "
    '(params, x, y, key) and pass rngs={"dropout": key}; or use deterministic=True.'
)
ONE_EXAMPLE = (
    "The loss gets one example, without a batch axis, and params of module.init on such an x. A "
    "module that is written for a batch takes x[None], and [0] of its output."
)
SPLIT_NNX = (
    "Take jfl.models.nnx(fed, model). Or split it: "
    "graphdef, params, rest = nnx.split(model, nnx.Param, ...). Pass params, and call "
    "nnx.merge(graphdef, params, rest)(x[None])[0] in the loss."
)
SPLIT_EQUINOX = (
    "An equinox module is a pytree, and what is no array in it cannot be trained. "
    "Take jfl.models.equinox(fed, model). Or split it: "
    "params, static = "
    "eqx.partition(model, eqx.is_inexact_array). Pass params, and call eqx.combine(params, "
    "static)(x) in "
    "the loss."
)
LINEN = (
    'Pass params = module.init(key, x[None])["params"] of one example x, and call '
    'module.apply({"params": params}, x[None])[0] in the loss; or take '
    "jfl.models.flax(fed, module)."
)
WRITE_A_LOSS = (
    "Write a function: def loss(params, x, y), which calls the module with params on one example."
)


def library(value: Any) -> str | None:
    """Whose module `value` is: "flax.linen", "flax.nnx" or "equinox"; None for anything else."""
    if isinstance(value, linen.Module):
        return "flax.linen"
    for name in ("flax.nnx", "equinox"):
        module = sys.modules.get(name)
        if module is not None and isinstance(value, module.Module):
            return name
    return None


def _named(value) -> str:
    return f"{library(value)} module {type(value).__name__}"


def parameters(where: str, value: Any) -> Any:
    """Refuse what cannot be trained.

    Args:
        where: the function that was called, for the message.
        value: a pytree, as given or as an init function made it.

    Returns:
        `value`, with its numbers as arrays of JAX.  An equinox module whose leaves are all arrays
        of floats passes.

    Raises:
        ValueError: for modules of flax, for leaves that are no floating-point numbers, and for
            statistics of BatchNorm among the parameters.
    """
    for node in jax.tree.leaves(value, is_leaf=lambda node: library(node) is not None):
        if library(node) == "flax.nnx":
            checks.fail(where, "params, a pytree of arrays", f"the {_named(node)}", SPLIT_NNX)
        if library(node) == "flax.linen":
            checks.fail(
                where, "params, a pytree of arrays", f"the {_named(node)}, which holds none", LINEN
            )
        if library(node) == "equinox":
            wrong = [
                jax.tree_util.keystr(path)
                for path, leaf in jax.tree_util.tree_leaves_with_path(node)
                if not _float(leaf)
            ]
            if wrong:
                checks.fail(
                    where,
                    "params, a pytree of arrays of floats",
                    f"the {_named(node)} with {', '.join(wrong[:6])}{', ...' * (len(wrong) > 6)}",
                    SPLIT_EQUINOX,
                )
    if isinstance(value, Mapping) and "batch_stats" in value:
        checks.fail(
            where,
            "params without batch_stats",
            f"a dict of {', '.join(map(str, value))}",
            BATCH_NORM,
        )
    value = checks.as_arrays(where, "params", value)
    kinds = {
        jax.tree_util.keystr(path): leaf.dtype
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
        if not jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    if kinds:
        checks.fail(
            where,
            "params, a pytree of floating-point numbers",
            ", ".join(f"{kind} at params{path}" for path, kind in list(kinds.items())[:6]),
            "Numbers that are not trained belong into the loss.",
        )
    return value


def _float(leaf) -> bool:
    return (
        hasattr(leaf, "shape")
        and hasattr(leaf, "dtype")
        and jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def function(where: str, name: str, value: Any, form: str) -> None:
    """Refuse a module, or a method of one, in the place of a pure function of `params`.

    Args:
        where: the function that was called, for the message.
        name: of the argument.
        value: what was given for it.
        form: how the function is called: "(params, x, y) -> scalar".

    Raises:
        ValueError: where `value` holds parameters of its own.
    """
    owner = getattr(value, "__self__", None)
    holds = lambda node: (
        library(node) == "flax.nnx"
        or (library(node) == "equinox" and any(map(_float, jax.tree.leaves(node))))
    )
    if library(value) == "flax.linen" or holds(value) or holds(owner):
        checks.fail(
            where,
            f"{name}, a pure function {form}",
            f"the {_named(owner if holds(owner) else value)}",
            WRITE_A_LOSS,
        )


def explain(where: str, error: Exception, context: str = "") -> None:
    """Raise what flax's error means for a loss of one example; return where it is none of flax's.

    Args:
        where: what was traced: "the loss", "predict", "models".
        error: what came.
        context: the shapes it was traced with.

    Raises:
        ValueError: with the remedy; the error of flax stays in its message.
    """
    text = str(error)
    unset = (
        isinstance(error, ValueError)
        and "must be passed to the constructor or at call time" in text
    )
    if not unset and not isinstance(error, errors.FlaxError):
        return
    got = (
        f"{type(error).__name__}: {text.split(' (https:')[0].splitlines()[0][:200]}"
        + f" ({context})" * bool(context)
    )
    if "batch_stats" in text or "use_running_average" in text:
        checks.fail(where, "a module without BatchNorm", got, BATCH_NORM)
    if '"deterministic"' in text or "dropout" in text.lower():
        checks.fail(where, "a module without randomness, such as Dropout's", got, DROPOUT)
    if isinstance(error, errors.InvalidRngError):
        checks.fail(
            where,
            "a module that needs no random key",
            got,
            "A loss of (params, x, y) has none: write one of (params, x, y, key).",
        )
    checks.fail(
        where, "a module of flax that fits its parameters and one example", got, ONE_EXAMPLE
    )
