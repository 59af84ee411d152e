"""Measures of how much the data of clients differ, from gradients at one point.

Client c has the objective F_c, the mean loss over its training rows.  All measures read private
rows without noise: they are for the experimenter, and no guarantee covers them.

Arguments that several functions share: `task` is a Task or a loss of one example, `params` is the
point where gradients are computed, and C is the number of clients.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..core import checks, pytrees
from ..core.pytrees import in_full
from ..core.records import Array, Federation, Fn, Task, Tree
from ..models.losses import for_evaluation

__all__ = ["Dissimilarity", "client_gradients", "client_weights", "gradient_dissimilarity"]

MAX_FLOATS = 1 << 24  # in the rows or the gradients that are in memory at once


class Dissimilarity(NamedTuple):
    """The spread of the clients' gradients g_c around their weighted mean g = sum_c p_c g_c.

    Attributes:
        variance: sum_c p_c ||g_c - g||^2, which equals `mean_square` - `square_mean`.
        log_ratio: log(`mean_square` / `square_mean`); inf if g is 0.
        largest: max_c ||g_c - g||^2.
        each: ||g_c - g||^2 of each client, Float[C].
        mean_square: sum_c p_c ||g_c||^2.
        square_mean: ||g||^2.
    """

    variance: Array
    log_ratio: Array
    largest: Array
    each: Array
    mean_square: Array
    square_mean: Array


@in_full()
def gradient_dissimilarity(
    task: Task | Callable,
    params: Tree,
    fed: Federation,
    weights: str | ArrayLike = "size",
    *,
    l2: float = 0.0,
) -> Dissimilarity:
    """Return how much the clients' gradients differ at `params`.

    Convergence bounds use the maximum of these values over all values of the parameters.  Only the
    maximum over some points, such as those of a trajectory, can be measured.

    Args:
        task, params: see the module.
        fed: the rows and their owners.
        weights: the weights p_c, see `client_weights`.
        l2: adds l2 * params to each gradient.

    References:
        Noble et al., AISTATS 2022, section 5 (variance and log_ratio, weights="uniform"); Chen et
        al., TKDE 2024, Definition 4 (variance bounds Gamma_n^2, largest Gamma_0^2).
    """
    p = jnp.asarray(client_weights(fed, weights), jnp.float32)
    grads = client_gradients(task, params, fed, l2=l2)
    mean = pytrees.map(lambda g: jnp.tensordot(p, g, 1), grads)
    squares = jax.vmap(lambda g: pytrees.norm(g) ** 2)
    each = squares(pytrees.map(lambda g, m: g - m[None], grads, mean))
    mean_square, square_mean = p @ squares(grads), pytrees.norm(mean) ** 2
    log_ratio = jnp.log(mean_square) - jnp.log(square_mean)
    return Dissimilarity(p @ each, log_ratio, each.max(), each, mean_square, square_mean)


@in_full()
def client_gradients(
    task: Task | Callable,
    params: Tree,
    fed: Federation,
    *,
    l2: float = 0.0,
) -> Tree:
    """Return the gradient of each client's objective, a tree like `params` with leaves [C, ...].

    Args:
        task, params: see the module.
        fed: the rows and their owners.
        l2: adds l2 * params to each gradient.

    Example:
        >>> import jfl
        >>> x, y = np.array([[1.0], [3.0]]), np.zeros(2, int)
        >>> fed = jfl.federate((x, y, x, y), jfl.partition.iid(2))
        >>> grads = client_gradients(lambda w, x, y: x @ w, jnp.zeros(1), fed)
        >>> sorted(grads.ravel().tolist())
        [1.0, 3.0]
    """
    where = "client_gradients"
    checks.require_nonnegative(where, single=True, l2=l2)
    checks.require_device_rows(where, fed)
    loss, params = checked_loss(where, task, params)
    l2 = float(l2) if checks.is_concrete(l2) else l2
    return _gradients(loss, params, fed, l2)


@jax.jit
def _gradients(loss, params, fed, l2):
    """Return the gradients of all clients, for so many clients at once that their rows take about
    64 MB."""
    floats = fed.index.shape[1] * (fed.x[:1].size + 1)  # of one client
    chunk = min(max(MAX_FLOATS // max(floats, 1), 1), len(fed.size))

    def of_client(client):
        index, size = client
        mask = jnp.arange(len(index)) < size
        # A padded row may hold NaN, and 0 * NaN would reach the gradient.
        x, y = pytrees.mask_rows(mask, (fed.x[index], fed.y[index]))

        def mean_loss(w):
            losses = jax.vmap(loss, (None, 0, 0))(w, x, y)
            return jnp.where(mask, losses, 0).sum() / size

        return pytrees.axpy(l2, params, jax.grad(mean_loss)(params))

    return jax.lax.map(of_client, (fed.index, fed.size), batch_size=chunk)


def client_weights(fed: Federation, weights: str | ArrayLike = "size") -> np.ndarray:
    """Return the weights p_c of the clients, Float64[C], which sum to 1.

    Args:
        fed: the federation.
        weights: "size" for the fraction of all rows that a client owns, "uniform" for 1 / C, or C
            numbers >= 0, which are divided by their sum.
    """
    where = "client_weights"
    checks.require_type(where, Federation, "jfl.federate", fed=fed)
    size = np.asarray(fed.size, np.float64)
    if isinstance(weights, str):
        checks.require_one_of(where, ("size", "uniform"), weights=weights)
        weights = size if weights == "size" else np.ones_like(size)
    given = checks.as_array(where, "weights", weights)
    numbers = given.dtype.kind in "biufV" and given.shape == size.shape
    p = given.astype(np.float64) if numbers else np.zeros(1)
    if not np.all(p >= 0) or not 0 < p.sum() < np.inf:
        checks.fail(
            where,
            f"weights >= 0 of shape [{len(size)}] with a positive sum",
            checks.short_repr(weights),
        )
    return p / p.sum()


def checked_loss(where: str, task: Task | Callable, params: Tree) -> tuple:
    """Return the loss of a task as an Fn, and `params` as arrays.

    Args:
        where: the name of the calling function, for messages.
        task, params: see the module.
    """
    loss = for_evaluation(task) if isinstance(task, Task) else task
    if not callable(loss):
        checks.fail(where, "a Task, or a loss (params, x, y) -> scalar", checks.short_repr(loss))
    return loss if isinstance(loss, Fn) else Fn(loss), pytrees.map(jnp.asarray, params)
