"""Evaluation on held-out rows; all of it lies outside the guarantee."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..core import checks, losses
from ..core.aliases import Array, Tree
from ..core.records import PERCENTILES, Federation, Fn, Task
from ..models import frameworks
from ..models.targets import TARGETS
from . import sharding

BLOCK = 2048  # test rows evaluated at once
KEY = 0  # seed of the keys of test rows, for a loss that draws: the same in every evaluation


class Evaluation(NamedTuple):
    """What was measured; None where undefined."""

    loss: Any
    accuracy: Any
    client_accuracy: Any
    client_percentiles: Any
    custom: dict[str, Any] | None


def _hits(task: Task, params: Tree, x: Array, y: Array) -> Tree:
    """How much of a prediction is right: a number, or a pair of that and of how many."""
    predict: Any = task.predict
    try:
        output = predict(params, x)
    except Exception as error:  # of somebody's module
        frameworks.explain("predict", error, f"x is {x.dtype}{list(x.shape)}")
        raise
    of_target: Any = TARGETS[task.target].hits
    hits = of_target(output, y)
    return jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), hits)


def has_accuracy(task: Task) -> bool:
    """True if its accuracy is measured."""
    return task.predict is not None and TARGETS[task.target].hits is not None


def evaluate(
    task: Task,
    params: Tree,
    fed: Federation,
    mesh: Mesh | None = None,
    personal: Fn | None = None,
    server: Tree = None,
    own: Tree = (),
) -> Evaluation:
    """Loss, accuracy and custom metrics on the central test rows; accuracy on each client's own.

    Args:
        task: what is learned.
        params: of the model that all share.
        fed: whose test rows are used.
        mesh: devices that share the work.
        personal: (server, what a client remembers) -> its own model, by which clients are then
            judged; None: all by `params`.
        server: what the server remembers.
        own: leaves [C, ...], what clients remember.
    """
    draws = task.evaluation is None and losses.takes_key(task.loss)
    loss = losses.for_evaluation(task)

    def row(params: Tree, x: Array, y: Array, number: Array | None = None) -> dict[str, Any]:
        found = dict(loss=loss(params, x, y) if number is None else drawn(params, x, y, number))
        if has_accuracy(task):
            found["accuracy"] = _hits(task, params, x, y)
        for name, metric in (task.metrics or {}).items():
            value = metric.row(params, x, y)
            found[f"custom {name}"] = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), value)
        return found

    def drawn(params: Tree, x: Array, y: Array, number: Array) -> Any:
        key = jax.random.fold_in(losses.key_of(KEY), number)
        return task.loss(params, x, y, key)

    items = (fed.x_test, fed.y_test)
    if draws:
        items = (*items, jnp.arange(len(fed.x_test), dtype=jnp.uint32))
    found = _mean(row, params, items, BLOCK, mesh)
    custom = {
        name: found[f"custom {name}"] if m.finish is None else m.finish(found[f"custom {name}"])
        for name, m in (task.metrics or {}).items()
    }
    model = (Fn(_same), params, ()) if personal is None else (personal, server, own)
    return Evaluation(
        found["loss"],
        found.get("accuracy"),
        *_of_clients(task, fed, mesh, *model),
        custom or None,
    )


def predict(task: Task, params: Any, x: Any) -> np.ndarray:
    """A model's outputs, a block of rows at a time.

    Args:
        task: with a `predict`.
        params: such as `out.params`.
        x: [n, ...], rows as those it was trained on.

    Returns:
        Float[n, ...]: logits, or what `predict` gives.

    Raises:
        ArgumentError: for a task without `predict`.

    Example:
        >>> import jfl
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(10))
        >>> task = jfl.models.logistic(fed)
        >>> predict(task, task.init(jax.random.key(0)), fed.x_test).shape
        (359, 10)
    """
    checks.kind("predict", Task, "jfl.models or jfl.task", task=task)
    if task.predict is None:
        checks.fail("predict", "a task with predict", "one without", "jfl.task(params, loss, f).")
    return np.asarray(_predicted(task.predict, params, jnp.asarray(x)))


@jax.jit
def _predicted(function: Callable[..., Any], params: Tree, x: Array) -> Any:
    return jax.lax.map(lambda row: function(params, row), x, batch_size=min(BLOCK, len(x)))


def _same(params: Tree, own: Tree) -> Tree:
    return params


def _mean(
    per_item: Callable[..., Any], given: Tree, items: tuple[Any, ...], block: int, mesh: Mesh | None
) -> dict[str, Any]:
    """Mean of `per_item(given, *item)`, a block of items at a time, each device its part; of a
    pair, the sum of its first over that of its second."""
    many = max(1, len(items[0]))
    sums = _sums(per_item, given, items, block, mesh)
    return {name: _ratio(value, many) for name, value in sums.items()}


def _ratio(value: Any, many: Any) -> Any:
    if not isinstance(value, tuple):
        return value / many
    total, count = value
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), jnp.nan)


def _sums(
    per_item: Callable[..., Any], given: Tree, items: tuple[Any, ...], block: int, mesh: Mesh | None
) -> Any:
    def sums(given: Tree, items: tuple[Any, ...], mask: Array) -> Tree:
        values = jax.lax.map(
            lambda item: per_item(given, *item), items, batch_size=min(block, len(mask))
        )
        return jax.tree.map(lambda v: jnp.where(mask, v, 0.0).sum(), values)

    return sharding.sum_of_parts(sums, given, items, mesh)


def _of_clients(
    task: Task,
    fed: Federation,
    mesh: Mesh | None,
    model: Callable[..., Any],
    server: Tree,
    own: Tree,
) -> tuple[Array | None, Array | None]:
    """The mean over clients of the accuracy on their own held-out rows, and percentiles; None
    without such rows or without predictions."""
    if not has_accuracy(task) or fed.test_index.shape[-1] == 0:
        return None, None

    def client(given: tuple[Any, ...], index: Array, size: Array, own: Tree) -> Any:
        server, x, y = given
        params = model(server, own)
        hits = jax.vmap(lambda i: _hits(task, params, x[i], y[i]))(index)
        held = jnp.arange(index.shape[0]) < size
        right = jax.tree.map(lambda v: jnp.where(held, v, 0).sum(), hits)
        return _ratio(right, jnp.maximum(size, 1))

    clients = len(fed.test_size)
    items = (fed.test_index, fed.test_size, own)
    block = max(1, BLOCK // fed.test_index.shape[-1])

    def placed(given: tuple[Any, ...], items: tuple[Any, ...], mask: Array) -> Array:
        """Each at its place, zeros at the others: a sum over devices puts them together."""
        *mine, place = items
        each = jax.lax.map(
            lambda item: client(given, *item), tuple(mine), batch_size=min(block, len(mask))
        )
        return jnp.zeros(clients).at[place].add(jnp.where(mask, each, 0.0))

    given = (server, fed.x, fed.y)
    places = jnp.arange(clients, dtype=jnp.int32)
    each = sharding.sum_of_parts(placed, given, (*items, places), mesh)
    there = fed.test_size > 0
    known = jnp.where(there, each, jnp.nan)
    return jnp.nanmean(known), jnp.nanpercentile(known, jnp.array(PERCENTILES))
