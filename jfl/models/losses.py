"""Losses that draw: (params, x, y, key), for dropout, noise layers, sampled latent variables.

Everything that forms gradients speaks of losses (params, x, y).  A loss with a key becomes one
whose x is a pair, the example and the words of the example's own key; so a gradient is formed,
clipped and summed in the same way with and without.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .pytrees import Array, Key, Tree
from .records import Fn, Task, named

IMPLEMENTATION = "threefry2x32"
ROWS = 0x726F7773  # "rows": the child of a step's key from which the rows of its batch have theirs


def key_of(number: int) -> Key:
    """jax.random.key(number), without the 64 bits that it takes to make one in a program."""
    words = jnp.array([0, number], jnp.uint32)
    return jax.random.wrap_key_data(words, impl=IMPLEMENTATION)


def takes_key(loss: Callable[..., Any]) -> bool:
    """Whether a loss is (params, x, y, key), and not (params, x, y).

    It is where its fourth free positional parameter has no default, or is called `key` or `rng`.

    Example:
        >>> takes_key(lambda params, x, y, key: 0.0), takes_key(lambda params, x, y, scale=1: 0.0)
        (True, False)
    """
    bound: set[Any] = set()
    if isinstance(loss, Fn):
        loss, bound = loss.function, {*loss.data, *loss.static}
    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):  # of C, or what it is not callable
        return False
    free = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in bound
    ]
    return len(free) > 3 and (free[3].default is inspect.Parameter.empty or _is_key(free[3].name))


def _is_key(name: str) -> bool:
    return name in ("key", "rng")


@named("losses.with_key")
def _with_key(params: Tree, x_and_words: tuple[Tree, Array], y: Array, *, loss: Fn) -> Any:
    x, words = x_and_words
    return loss(params, x, y, jax.random.wrap_key_data(words, impl=IMPLEMENTATION))


def joined(loss: Fn) -> Fn:
    """A loss (params, x, y, key) as one of (params, (x, words of the key), y)."""
    return Fn(_with_key, dict(loss=loss))


def draws(loss: Fn | None) -> bool:
    """Whether a loss is one that `joined` made, or holds one: as its `loss`, or as what an audit
    looks up rows for, its `of`."""
    while isinstance(loss, Fn):
        if loss.function is _with_key:
            return True
        loss = loss.data.get("loss", loss.data.get("of"))
    return False


def with_words(x: Tree, key: Key, rows: int) -> tuple[Tree, Array]:
    """(x, UInt32[rows, 2]): the rows of a batch with the words of a key for each.

    Args:
        x: leaves [rows, ...].
        key: of the step.
        rows: how many.
    """
    base = jax.random.fold_in(key, ROWS)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(base, jnp.arange(rows, dtype=jnp.uint32))
    return x, jax.random.key_data(keys)


def words_shape() -> jax.ShapeDtypeStruct:
    """The shape of the words of one row."""
    return jax.ShapeDtypeStruct((2,), jnp.uint32)


@named("losses.at_one_key")
def _at_one_key(params: Tree, x: Tree, y: Array, *, loss: Fn) -> Any:
    return loss(params, x, y, key_of(0))


def of_three(loss: Fn) -> Fn:
    """The loss as (params, x, y): one that draws is taken at one key, the same for all rows."""
    if loss.function is _with_key:
        loss = loss.data["loss"]
    return Fn(_at_one_key, dict(loss=loss)) if takes_key(loss) else loss


def for_evaluation(task: Task) -> Fn:
    """The loss of a task's test rows, (params, x, y) -> scalar."""
    return of_three(task.loss if task.evaluation is None else task.evaluation)
