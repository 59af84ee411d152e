"""Evaluation on held-out rows; all of it lies outside the guarantee."""

import jax
import jax.numpy as jnp

from ..core.records import Federation, Task
from ..models import frameworks

BLOCK = 2048  # test rows evaluated at once


def _predicted(task: Task, params, x):
    try:
        return jnp.argmax(task.predict(params, x), -1)
    except Exception as error:  # of somebody's module
        frameworks.explain("predict", error, f"x is {x.dtype}{list(x.shape)}")
        raise


def _mean(per_row, rows, mask):
    """Mean of `per_row` over the rows where mask holds, a block at a time."""
    values = jax.lax.map(lambda row: per_row(*row), rows, batch_size=min(BLOCK, mask.shape[0]))
    return jax.tree.map(
        lambda v: jnp.where(mask, v, 0.0).sum() / jnp.maximum(mask.sum(), 1), values
    )


def evaluate(task: Task, params, fed: Federation):
    """-> mean test loss, test accuracy, mean over clients of their held-out accuracy (None where
    undefined)."""

    def row(x, y):
        loss = task.loss(params, x, y)
        if task.predict is None:
            return loss, jnp.zeros(())
        return loss, (_predicted(task, params, x) == y).astype(jnp.float32)

    loss, accuracy = _mean(row, (fed.x_test, fed.y_test), jnp.ones(fed.y_test.shape[0], bool))
    return loss, None if task.predict is None else accuracy, client_accuracy(task, params, fed)


def client_accuracy(task: Task, params, fed: Federation):
    """Mean over clients of the accuracy on their own held-out rows; None without such rows or
    without predictions."""
    if task.predict is None or fed.test_index.shape[-1] == 0:
        return None

    def client(index, size):
        hit = jax.vmap(lambda i: _predicted(task, params, fed.x[i]) == fed.y[i])(index)
        held = jnp.arange(index.shape[0]) < size
        return jnp.where(held, hit, False).sum() / jnp.maximum(size, 1)

    return jax.lax.map(
        lambda c: client(*c),
        (fed.test_index, fed.test_size),
        batch_size=max(1, BLOCK // fed.test_index.shape[-1]),
    ).mean()
