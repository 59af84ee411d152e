"""Evaluation on test rows.  No guarantee covers its results."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..core import checks
from ..core.pytrees import Array, Tree
from ..core.records import PERCENTILES, Federation, Fn, Task
from ..models import frameworks, losses
from ..models.targets import TARGETS
from . import sharding

BLOCK = 2048  # test rows that are evaluated at a time
EVALUATION_SEED = 0  # for a loss that draws random numbers: the same draws in every evaluation


class Evaluation(NamedTuple):
    """Metrics of a model; undefined ones are None."""

    loss: Any
    accuracy: Any
    client_accuracy: Any
    client_percentiles: Any
    custom: dict[str, Any] | None


def _hits(task: Task, params: Tree, x: Array, y: Array) -> Tree:
    """Return how much of a prediction is correct: a number, or a pair (correct, total)."""
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
    """Return whether the accuracy of a task can be measured."""
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
    """Measure loss, accuracy and custom metrics on the test rows, and accuracy per client.

    Args:
        task: the task.
        params: parameters of the shared model.
        fed: the federation, whose test rows are used.
        mesh: devices that share the work.
        personal: maps (server state, client state) to the client's own parameters, with which its
            accuracy is measured; None measures all clients with `params`.
        server: the server state.
        own: the client states, leaves [C, ...].
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
        key = jax.random.fold_in(losses.key_of(EVALUATION_SEED), number)
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
    """Return the outputs of a model for many rows, computed block by block.

    Args:
        task: a task that has `predict`.
        params: parameters, such as `out.params`.
        x: [n, ...], rows like those of training.

    Returns:
        Float[n, ...], the logits or other outputs of `predict`.

    Raises:
        ArgumentError: If the task has no `predict`.

    Example:
        >>> import jfl
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(10))
        >>> task = jfl.models.logistic(fed)
        >>> predict(task, task.init(jax.random.key(0)), fed.x_test).shape
        (359, 10)
    """
    checks.require_type("predict", Task, "jfl.models or jfl.task", task=task)
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
    """Return the mean of `per_item(given, *item)` over items, computed by blocks on all devices.

    If `per_item` returns pairs, the result is the sum of the first over the sum of the second.
    """
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
    """Return mean and percentiles over clients of the accuracy on their own test rows.

    Both are None if there are no such rows, or the task makes no predictions.
    """
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
        """Return results at the places of their clients, and zeros at all others."""
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
