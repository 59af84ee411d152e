"""Losses (params, x, y, key) that draw random numbers, for example for dropout.

The rest of jfl computes gradients of losses (params, x, y).  A loss with a key is therefore turned
into one whose x is a pair: the example, and the words UInt32[2] of a key for this example.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..core.pytrees import Array, Key, Tree
from ..core.records import Fn, Task, named

IMPLEMENTATION = "threefry2x32"
# The number that is folded into the key of a step to derive the keys of its rows: "rows" in ASCII.
ROWS = 0x726F7773


def key_of(number: int) -> Key:
    """Return jax.random.key(number) without 64-bit arithmetic in the program."""
    words = jnp.array([0, number], jnp.uint32)
    return jax.random.wrap_key_data(words, impl=IMPLEMENTATION)


def takes_key(loss: Callable[..., Any]) -> bool:
    """Return whether a loss takes a key, as (params, x, y, key).

    A loss takes a key if it has a fourth positional parameter that is not bound, and that has no
    default or is named `key` or `rng`.

    Example:
        >>> takes_key(lambda params, x, y, key: 0.0), takes_key(lambda params, x, y, scale=1: 0.0)
        (True, False)
    """
    bound: set[Any] = set()
    if isinstance(loss, Fn):
        loss, bound = loss.function, {*loss.data, *loss.static}
    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):  # a C function, or not callable
        return False
    free = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in bound
    ]
    if len(free) < 4:
        return False
    return free[3].default is inspect.Parameter.empty or free[3].name in ("key", "rng")


@named("losses.with_key")
def _with_key(params: Tree, x_and_words: tuple[Tree, Array], y: Array, *, loss: Fn) -> Any:
    x, words = x_and_words
    return loss(params, x, y, jax.random.wrap_key_data(words, impl=IMPLEMENTATION))


def with_key_in_x(loss: Fn) -> Fn:
    """Turn a loss (params, x, y, key) into a loss (params, (x, words of the key), y)."""
    return Fn(_with_key, dict(loss=loss))


def draws(loss: Fn | None) -> bool:
    """Return whether a loss draws random numbers, for example for dropout.

    It does if `with_key_in_x` returned this loss or one that it wraps.  Its x is then a pair of the
    example and the words of a key.
    """
    while isinstance(loss, Fn):
        if loss.function is _with_key:
            return True
        loss = loss.data.get("loss", loss.data.get("of"))
    return False


def with_words(x: Tree, key: Key, rows: int) -> tuple[Tree, Array]:
    """Pair the rows of a batch with the words of a key for each row.

    Args:
        x: leaves [rows, ...].
        key: the key of the step.
        rows: the number of rows.

    Returns:
        x, and UInt32[rows, 2].
    """
    base = jax.random.fold_in(key, ROWS)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(base, jnp.arange(rows, dtype=jnp.uint32))
    return x, jax.random.key_data(keys)


def shapes_of_x(loss: Fn, x: Tree) -> Tree:
    """Return the shapes of the x that a loss takes, from those of one example.

    For a loss that `with_key_in_x` returned, they include the words of a key.
    """
    return (x, jax.ShapeDtypeStruct((2,), jnp.uint32)) if draws(loss) else x


@named("losses.at_one_key")
def _at_one_key(params: Tree, x: Tree, y: Array, *, loss: Fn) -> Any:
    return loss(params, x, y, key_of(0))


def without_key(loss: Fn) -> Fn:
    """Turn a loss into a function (params, x, y); a random loss gets one fixed key for all rows."""
    if loss.function is _with_key:
        loss = loss.data["loss"]
    return Fn(_at_one_key, dict(loss=loss)) if takes_key(loss) else loss


def for_evaluation(task: Task) -> Fn:
    """Return the loss of a task's test rows, (params, x, y) -> scalar."""
    return without_key(task.loss if task.evaluation is None else task.evaluation)
