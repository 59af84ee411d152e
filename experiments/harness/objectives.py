"""Constants of convex problems that the papers' bounds need: optima, gaps, smoothness, variances.

The objective is F = sum_c p_c F_c + (l2 / 2) ||w||^2, where F_c is the mean loss over the training
rows of client c.  Everything here reads private rows without noise, and no guarantee covers it.

C is the number of clients.
"""

from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize
from scipy.sparse.linalg import LinearOperator, eigsh

from jfl.analysis.heterogeneity import MAX_FLOATS, client_gradients, client_weights
from jfl.core import pytrees
from jfl.core.pytrees import in_float64, in_full
from jfl.core.records import Fn
from jfl.models.losses import for_evaluation

MAX_ROWS = 4096  # in a block of `optimum`
# The largest eigenvalue of the Hessian of the cross-entropy in the logits (Boehning, 1992).
CURVATURE = 0.5


class Optimum(NamedTuple):
    """A minimiser in float64, with the value and the norm of the gradient there."""

    params: Any
    value: float
    gradient_norm: float


class Gap(NamedTuple):
    """The reduction of the mean objective if each client minimised its own.

    Attributes:
        value: F* - sum_c p_c F_c*.
        pooled: the optimum of F.
        local: F_c* of each client, Float64[C].
    """

    value: float
    pooled: Optimum
    local: np.ndarray


def objective_gap(task, fed, l2: float, *, weights="size") -> Gap:
    """Return F* - sum_c p_c F_c* >= 0, which is zero if one point is optimal for all clients.

    The arguments are those of `optimum`, which is called C + 1 times.

    References:
        Li et al., Mathematics 2025, section 4 (Gamma); Chen et al., TKDE 2024, Definition 3
        (Gamma_s).
    """
    pooled = optimum(task, fed, l2, weights=weights)
    of_client = lambda c: optimum(task, fed, l2, c, start=pooled.params)
    local = np.array([of_client(c).value for c in range(len(fed.size))])
    return Gap(pooled.value - float(client_weights(fed, weights) @ local), pooled, local)


@in_full()
def optimum(
    task, fed, l2: float, client=None, *, weights="size", start=None, tolerance=1e-8, steps=5000
) -> Optimum:
    """Return the minimiser of a convex objective, by L-BFGS followed by Newton steps.

    Args:
        task: a Task with a convex loss.
        fed: the federation, with rows on the device.
        l2: the factor of the penalty; it must be positive, since a client with one class has no
            minimiser without it.
        client: minimise the objective of this client; None means F.
        weights: the weights p_c of F, see `jfl.heterogeneity.client_weights`.
        start: the first point; None means zeros.
        tolerance: the largest norm of the gradient at the result.
        steps: the maximum number of steps of L-BFGS.

    Raises:
        ValueError: If the tolerance is not reached.
    """
    with in_float64():
        if start is None:
            start = pytrees.zeros_like(jax.eval_shape(task.init, jax.random.key(0)))
        start = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), start)
        flat, shaped = jax.flatten_util.ravel_pytree(start)
        blocks = map(jnp.asarray, _blocks(fed, client, weights))
        rest = (for_evaluation(task), fed, *blocks, jnp.float64(l2))

        def at(w):
            value, gradient = _objective(shaped(jnp.asarray(w)), *rest)
            return float(value), np.asarray(jax.flatten_util.ravel_pytree(gradient)[0])

        gtol = tolerance / max(flat.size, 1) ** 0.5
        options = dict(maxcor=30, maxiter=steps, maxfun=2 * steps, ftol=0.0, gtol=gtol)
        result = minimize(at, np.asarray(flat), jac=True, method="L-BFGS-B", options=options)
        params, (value, gradient) = shaped(jnp.asarray(result.x)), at(result.x)
        for _ in range(10):
            if np.linalg.norm(gradient) <= tolerance or not np.isfinite(gradient).all():
                break
            params = _newton(params, *rest)
            value, gradient = at(jax.flatten_util.ravel_pytree(params)[0])
    norm = float(np.linalg.norm(gradient))
    if not norm <= tolerance:
        raise ValueError(
            f"optimum: expected a gradient of norm <= {tolerance:g}, but got {norm:.3g} after "
            f"{result.nit} steps. Raise l2 or steps; the loss must be convex."
        )
    return Optimum(jax.tree.map(np.asarray, params), value, norm)


def _blocks(fed, client, weights):
    """Return rows in blocks, with the weight of each row in the objective; 0 for padding."""
    index, size = np.asarray(fed.index), np.asarray(fed.size)
    filled = np.arange(index.shape[1]) < size[:, None]
    if client is None:
        rows, weight = index[filled], np.repeat(client_weights(fed, weights) / size, size)
    else:
        rows, weight = index[client], filled[client] / size[client]
    block = min(MAX_ROWS, len(rows))
    pad = lambda v: np.pad(v, (0, -len(v) % block)).reshape(-1, block)
    return pad(rows), pad(weight)


@jax.jit
def _objective(params, loss, fed, rows, weight, l2):
    """Return the value and the gradient of the objective, summed over blocks of rows."""

    def value(w, x, y, part):
        return jnp.where(part > 0, part * jax.vmap(loss, (None, 0, 0))(w, x, y), 0).sum()

    def add(total, block):
        index, part = block
        x, y = pytrees.mask_rows(part > 0, (fed.x[index], fed.y[index]))
        x = x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
        return pytrees.add(total, jax.value_and_grad(value)(params, x, y, part)), None

    start = l2 / 2 * sum(jnp.sum(w**2) for w in jax.tree.leaves(params)), pytrees.scale(l2, params)
    return jax.lax.scan(add, start, (rows, weight))[0]


@jax.jit
def _newton(params, *rest):
    """Take one Newton step, whose linear system is solved by conjugate gradients."""
    gradient = lambda w: _objective(w, *rest)[1]
    hessian = lambda v: jax.jvp(gradient, (params,), (v,))[1]
    step, _ = jax.scipy.sparse.linalg.cg(hessian, gradient(params), tol=1e-4, maxiter=1000)
    return pytrees.sub(params, step)


@in_full()
def gradient_variance(task, params, fed, *, batch: int | None = None):
    """Return how much the gradients of a client's rows differ at `params`, Float[C].

    This is the mean of ||gradient of a row - gradient of the client||^2 over the client's rows.
    With `batch`, it is the variance of the mean gradient of that number of rows, drawn without
    replacement; 0 for a client with at most `batch` rows.

    References:
        Li et al., Mathematics 2025, Assumption 3; Chen et al., TKDE 2024, Assumption 1(b), for a
        batch.
    """
    params = pytrees.map(jnp.asarray, params)
    means = client_gradients(task, params, fed)
    variance = _variances(Fn(for_evaluation(task)), params, fed, means)
    if batch is None:
        return variance
    left = jnp.maximum(fed.size - batch, 0) / jnp.maximum(fed.size - 1, 1)
    return variance * left / batch


@jax.jit
def _variances(loss, params, fed, means):
    block = max(1, min(fed.index.shape[1], MAX_FLOATS // max(pytrees.size(params), 1)))

    def of_client(client):
        index, size, mean = client

        def of_row(slot):
            g = jax.grad(loss)(params, fed.x[index[slot]], fed.y[index[slot]])
            return jnp.where(slot < size, pytrees.norm(pytrees.sub(g, mean)) ** 2, 0)

        return jax.lax.map(of_row, jnp.arange(len(index)), batch_size=block).sum() / size

    return jax.lax.map(of_client, (fed.index, fed.size, means))


def smoothness(fed, *, l2: float = 0.0) -> np.ndarray:
    """Return the smoothness constants L_c of F_c for softmax regression, Float64[C].

    L_c = CURVATURE * (largest eigenvalue of X^T X / rows) + l2, where X holds the client's rows
    and a column of ones for the bias.

    Args:
        fed: the federation, with rows on the device.
        l2: the factor of the penalty.

    References:
        Li et al., Mathematics 2025.
    """
    x, top = np.asarray(fed.x, np.float64).reshape(fed.x.shape[0], -1), []
    for index, size in zip(np.asarray(fed.index), np.asarray(fed.size), strict=True):
        rows = np.concatenate([x[index[:size]], np.ones((size, 1))], 1)
        top.append(largest_eigenvalue(rows) / size)
    return CURVATURE * np.array(top) + float(l2)


def largest_eigenvalue(rows) -> float:
    """Return the largest eigenvalue of X^T X; by Lanczos unless X is small."""
    if min(rows.shape) < 20:
        return float(np.linalg.norm(rows, 2)) ** 2
    width = rows.shape[1]
    operator: Any = LinearOperator  # of scipy, whose types know neither matvec nor a float as tol
    solve: Any = eigsh
    product = operator((width, width), matvec=lambda v: rows.T @ (rows @ v), dtype=rows.dtype)
    return solve(product, k=1, v0=np.linspace(1, 2, width), tol=1e-10, return_eigenvectors=False)[0]
