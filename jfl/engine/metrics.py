"""Evaluation on held-out rows; all of it lies outside the guarantee."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..core.records import Federation, Task
from ..models import frameworks
from . import sharding

BLOCK = 2048  # test rows evaluated at once


def _predicted(task: Task, params, x):
    try:
        return jnp.argmax(task.predict(params, x), -1)
    except Exception as error:  # of somebody's module
        frameworks.explain("predict", error, f"x is {x.dtype}{list(x.shape)}")
        raise


def evaluate(task: Task, params, fed: Federation, mesh: Mesh | None = None):
    """-> mean test loss, test accuracy, mean over clients of their held-out accuracy (None where
    undefined)."""

    def row(params, x, y):
        loss = task.loss(params, x, y)
        if task.predict is None:
            return loss, jnp.zeros(())
        return loss, (_predicted(task, params, x) == y).astype(jnp.float32)

    loss, accuracy = _mean(row, params, (fed.x_test, fed.y_test), BLOCK, mesh)
    return (
        loss,
        None if task.predict is None else accuracy,
        client_accuracy(task, params, fed, mesh),
    )


def _mean(per_item, given, items, block, mesh):
    """Mean of `per_item(given, *item)`, a block of items at a time, each device its part."""

    def sums(given, items, mask):
        values = jax.lax.map(
            lambda item: per_item(given, *item), items, batch_size=min(block, len(mask))
        )
        return jax.tree.map(lambda v: jnp.where(mask, v, 0.0).sum(), values)

    many = max(1, len(items[0]))
    return jax.tree.map(lambda v: v / many, sharding.sum_of_parts(sums, given, items, mesh))


def client_accuracy(task: Task, params, fed: Federation, mesh: Mesh | None = None):
    """Mean over clients of the accuracy on their own held-out rows; None without such rows or
    without predictions."""
    if task.predict is None or fed.test_index.shape[-1] == 0:
        return None

    def client(given, index, size):
        params, x, y = given
        hit = jax.vmap(lambda i: _predicted(task, params, x[i]) == y[i])(index)
        held = jnp.arange(index.shape[0]) < size
        return jnp.where(held, hit, False).sum() / jnp.maximum(size, 1)

    return _mean(
        client,
        (params, fed.x, fed.y),
        (fed.test_index, fed.test_size),
        max(1, BLOCK // fed.test_index.shape[-1]),
        mesh,
    )
