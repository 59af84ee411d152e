"""Evaluation on test rows.  No guarantee covers its results."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..core import checks
from ..core.pytrees import Array, Tree
from ..core.records import PERCENTILES, Federation, Task
from ..models import losses
from ..models.targets import TARGETS
from . import sharding

# Test rows that are evaluated at a time.
BLOCK = 2048
# A loss that draws random numbers gets the same ones in every evaluation.
EVALUATION_SEED = 0


def _hits(task: Task, params: Tree, x: Array, y: Array) -> Tree:
    """Return how much of a prediction is correct: a number, or a pair (correct, total)."""
    predict: Any = task.predict
    count_hits: Any = TARGETS[task.target].hits
    hits = count_hits(predict(params, x), y)
    return jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), hits)


def has_accuracy(task: Task) -> bool:
    """Return whether a task has an accuracy."""
    return task.predict is not None and TARGETS[task.target].hits is not None


def evaluate(
    task: Task,
    params: Tree,
    fed: Federation,
    mesh: Mesh | None = None,
    personal: tuple[Callable[..., Tree], Tree, Tree] | None = None,
) -> dict[str, Any]:
    """Measure a model on the test rows, and each client's accuracy on its own test rows.

    Args:
        task: the task.
        params: parameters of the shared model.
        fed: the federation, whose test rows are used.
        mesh: devices that share the work.
        personal: for personal models, a tuple of three values: a function that maps the server
            state and a client state to that client's parameters; the server state; and the client
            states, leaves [C, ...].  None evaluates `params` for all clients.

    Returns:
        The fields loss, accuracy, client_accuracy, client_percentiles and custom of `Metrics`, as a
        dict.  Metrics that the task does not define are None.
    """
    metrics = task.metrics or {}
    draws = task.evaluation is None and losses.takes_key(task.loss)
    loss = task.loss if draws else losses.for_evaluation(task)
    as_float = lambda value: jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), value)

    def measure(params: Tree, x: Array, y: Array, number: Array) -> dict[str, Any]:
        key = (jax.random.fold_in(losses.key_of(EVALUATION_SEED), number),) if draws else ()
        return dict(
            loss=loss(params, x, y, *key),
            accuracy=_hits(task, params, x, y) if has_accuracy(task) else None,
            custom={name: as_float(m.row(params, x, y)) for name, m in metrics.items()},
        )

    numbers = jnp.arange(len(fed.x_test), dtype=jnp.uint32)
    means = _mean(measure, params, (fed.x_test, fed.y_test, numbers), mesh)
    for name, metric in metrics.items():
        if metric.finish is not None:
            means["custom"][name] = metric.finish(means["custom"][name])
    means["custom"] = means["custom"] or None
    means["client_accuracy"] = means["client_percentiles"] = None
    if has_accuracy(task) and fed.test_index.shape[-1] > 0:
        each = _client_accuracy(task, fed, mesh, *personal or (lambda own, _: own, params, ()))
        means["client_accuracy"] = jnp.nanmean(each)
        means["client_percentiles"] = jnp.nanpercentile(each, jnp.array(PERCENTILES))
    return means


def predict(task: Task, params: Any, x: Any) -> np.ndarray:
    """Return the outputs of a model for many rows, computed block by block.

    Args:
        task: a task that has `predict`.
        params: parameters, such as `out.params`.
        x: [n, ...], rows of the same form as the training rows.

    Returns:
        Float[n, ...], the logits or other outputs of `predict`; under jit or vmap, traced.

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
        hint = "Write jfl.task(params, loss, predict)."
        checks.fail("predict", "a task with predict", "one without", hint)
    try:
        outputs = _predict_rows(task.predict, params, jnp.asarray(x))
    except Exception as error:  # raised by the model
        error.add_note(f"In jfl.predict, for x of shape {np.shape(x)}: expected [n, ...], n rows.")
        raise
    return np.asarray(outputs) if checks.is_concrete(outputs) else outputs


@jax.jit
def _predict_rows(function: Callable[..., Any], params: Tree, x: Array) -> Any:
    return jax.lax.map(lambda row: function(params, row), x, batch_size=min(BLOCK, len(x)))


def _mean(
    measure: Callable[..., dict[str, Any]], given: Tree, items: tuple[Any, ...], mesh: Mesh | None
) -> dict[str, Any]:
    """Return the mean of `measure(given, *item)` over items, computed in blocks on all devices.

    Where `measure` returns a pair, the result is the sum of its first numbers divided by the sum of
    its second numbers.
    """

    def sums(given: Tree, items: tuple[Any, ...], mask: Array) -> Tree:
        values = jax.lax.map(
            lambda item: measure(given, *item), items, batch_size=min(BLOCK, len(mask))
        )
        return jax.tree.map(lambda v: jnp.where(mask, v, 0.0).sum(), values)

    total = sharding.sum_of_parts(sums, given, items, mesh)
    mean = lambda value: _ratio(value, max(1, len(items[0])))
    return jax.tree.map(mean, total, is_leaf=lambda v: isinstance(v, tuple))


def _ratio(value: Any, count: Any) -> Any:
    """Return `value / count`; a pair (sum, count) has its own count, and gives NaN if that is 0."""
    if not isinstance(value, tuple):
        return value / count
    total, count = value
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), jnp.nan)


def _client_accuracy(
    task: Task,
    fed: Federation,
    mesh: Mesh | None,
    model: Callable[..., Tree],
    server: Tree,
    client_states: Tree,
) -> Array:
    """Return Float[C], the accuracy of each client on its own test rows; NaN if it has none."""
    num_clients, num_slots = fed.test_index.shape
    block = max(1, BLOCK // num_slots)

    def accuracy(given: tuple[Any, ...], index: Array, size: Array, state: Tree) -> Any:
        server, x, y = given
        params = model(server, state)
        hits = jax.vmap(lambda i: _hits(task, params, x[i], y[i]))(index)
        has_row = jnp.arange(num_slots) < size
        right = jax.tree.map(lambda v: jnp.where(has_row, v, 0).sum(), hits)
        return _ratio(right, jnp.maximum(size, 1))

    def at_clients(given: tuple[Any, ...], items: tuple[Any, ...], mask: Array) -> Array:
        """Return Float[C] with the results of some clients, and zeros for all others."""
        clients, *own = items
        each = jax.lax.map(
            lambda item: accuracy(given, *item), tuple(own), batch_size=min(block, len(mask))
        )
        return jnp.zeros(num_clients).at[clients].add(jnp.where(mask, each, 0.0))

    clients = jnp.arange(num_clients, dtype=jnp.int32)
    items = (clients, fed.test_index, fed.test_size, client_states)
    each = sharding.sum_of_parts(at_clients, (server, fed.x, fed.y), items, mesh)
    return jnp.where(fed.test_size > 0, each, jnp.nan)
