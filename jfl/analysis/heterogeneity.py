"""How far clients are from each other: gradients, objectives, and the constants that convergence
bounds speak of.

F = sum_c p_c F_c + (l2 / 2) ||w||^2, F_c the mean loss over the training rows of client c.
Everything here reads private rows without noise: for the experimenter, outside every guarantee.

Axes: C clients, N rows of a client (padded), n owned rows.  A task may be a `core.Task` or a loss
of one example.
"""

from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from scipy.sparse.linalg import LinearOperator, eigsh

from ..core import checks, pytrees
from ..core.losses import for_evaluation
from ..core.precision import in_float64, in_full
from ..core.records import Array, Federation, Fn, Task, Tree

__all__ = [
    "Dissimilarity",
    "Gap",
    "Optimum",
    "client_gradients",
    "client_weights",
    "gradient_dissimilarity",
    "gradient_variance",
    "objective_gap",
    "optimum",
    "smoothness",
]

ROOM = 1 << 24  # floats that the rows or the gradients of a block may take
ROWS = 4096  # rows of a block in `optimum`
CURVATURE = dict(
    logistic=0.25, softmax=0.5
)  # largest eigenvalue of the Hessian of the loss in the logits


class Dissimilarity(NamedTuple):
    """Client gradients g_c around their mean g = sum_c p_c g_c, at one point."""

    variance: Array  # sum p_c ||g_c - g||^2 = sum p_c ||g_c||^2 - ||g||^2
    log_ratio: Array  # log(sum p_c ||g_c||^2) - log ||g||^2; inf where g = 0
    largest: Array  # max_c ||g_c - g||^2
    each: Array  # [C] ||g_c - g||^2
    mean_square: Array  # sum p_c ||g_c||^2
    square_mean: Array  # ||g||^2


class Optimum(NamedTuple):
    """A minimiser, as float64 NumPy."""

    params: Any
    value: float
    gradient_norm: float


class Gap(NamedTuple):
    """What clients would gain by minimising alone."""

    value: float  # F* - sum_c p_c F_c*
    pooled: Optimum  # of F
    local: np.ndarray  # [C] F_c*


def client_weights(fed: Federation, weights: str | ArrayLike = "size") -> np.ndarray:
    """The weights p [C] of the clients, with sum 1.

    Args:
        fed: the federation.
        weights: "size", rows of a client over all rows; "uniform", 1 / C; or [C] numbers >= 0,
            which are divided by their sum.
    """
    checks.require_type("client_weights", Federation, "jfl.federate", fed=fed)
    size = np.asarray(fed.size, np.float64)
    if isinstance(weights, str):
        checks.require_one_of("client_weights", ("size", "uniform"), weights=weights)
        weights = size if weights == "size" else np.ones_like(size)
    given = checks.as_array("client_weights", "weights", weights)
    p = (
        given.astype(np.float64)
        if given.dtype.kind in "biufV" and given.shape == size.shape
        else np.zeros(1)
    )
    if not np.all(p >= 0) or not 0 < p.sum() < np.inf:
        checks.fail(
            "client_weights",
            f"weights >= 0 of shape [{len(size)}] with a positive sum",
            checks.short_repr(weights),
        )
    return p / p.sum()


@in_full()
def client_gradients(
    task: Task, params: Tree, fed: Federation, *, l2: float = 0.0, chunk: int | None = None
) -> tuple:
    """The full gradient of each client's objective at `params`.

    Args:
        task: what is learned, or a loss of one example.
        params: where the gradients are taken, as the task has them.
        fed: the rows and their owners.
        l2: adds l2 * params.
        chunk: clients computed at once; None: as many as fit about 64 MB of rows.

    Returns:
        A tree like `params`, whose leaves have a first axis C.

    Example:
        >>> fed = Federation(
        ...     *map(
        ...         jnp.array,
        ...         (
        ...             [[1.0], [3.0]],
        ...             [0.0, 0.0],
        ...             [[0], [1]],
        ...             [1, 1],
        ...             [[0.0]],
        ...             [0.0],
        ...             [[], []],
        ...             [0, 0],
        ...         ),
        ...     )
        ... )
        >>> client_gradients(lambda w, x, y: x @ w, jnp.zeros(1), fed).tolist()
        [[1.0], [3.0]]
    """
    checks.require_nonnegative("client_gradients", single=True, l2=l2)
    l2 = float(l2) if checks.is_concrete(l2) else l2
    return _gradients(
        *_problem("client_gradients", task, params, fed), l2, _chunk("client_gradients", fed, chunk)
    )


@in_full()
def gradient_dissimilarity(
    task: Task,
    params: Tree,
    fed: Federation,
    weights: str | ArrayLike = "size",
    *,
    l2: float = 0.0,
    chunk: int | None = None,
) -> Dissimilarity:
    """How much client gradients differ at `params`.

    A bound needs these for all parameters; what can be had is the maximum over points of a
    trajectory.

    Args:
        task: what is learned, or a loss of one example.
        params: where the gradients are taken, as the task has them.
        fed: the rows and their owners.
        weights: p_c, as in `client_weights`.
        l2: adds l2 * params to each gradient.
        chunk: clients computed at once; None: as many as fit about 64 MB of rows.

    References:
        Noble et al., AISTATS 2022, section 5 (variance and log_ratio, weights="uniform"); Chen et
        al., TKDE 2024, Definition 4 (variance bounds Gamma_n^2, largest Gamma_0^2).
    """
    p = jnp.asarray(client_weights(fed, weights), jnp.float32)
    grads = client_gradients(task, params, fed, l2=l2, chunk=chunk)
    mean = pytrees.map(lambda g: jnp.tensordot(p, g, 1), grads)
    each, square = _squares(pytrees.map(lambda g, m: g - m[None], grads, mean)), _squares(grads)
    square_mean = pytrees.norm(mean) ** 2
    return Dissimilarity(
        p @ each,
        jnp.log(p @ square) - jnp.log(square_mean),
        each.max(),
        each,
        p @ square,
        square_mean,
    )


@in_full()
def gradient_variance(
    task: Task, params: Tree, fed: Federation, *, batch: int | None = None, chunk: int | None = None
) -> Array:
    """phi_c^2: how much the gradients of a client's rows differ, at `params`.

    Args:
        task: what is learned, or a loss of one example.
        params: where the gradients are taken, as the task has them.
        fed: the rows and their owners.
        batch: None, or the rows of a batch that is drawn without replacement: then the variance of
            its mean gradient.
        chunk: clients computed at once; None: as many as fit about 64 MB of rows.

    Returns:
        [C], the mean of ||gradient of a row - gradient of the client||^2 over a client's rows.
        With `batch`, phi_c^2 / batch * (size - batch) / (size - 1), and 0 for a client with at most
        `batch` rows.

    References:
        Li et al., Mathematics 2025, Assumption 3; Chen et al., TKDE 2024, Assumption 1(b), of a
        batch.
    """
    if batch is not None:
        checks.require_integer("gradient_variance", batch=batch)
    problem = _problem("gradient_variance", task, params, fed)
    variance = _variances(
        *problem, _gradients(*problem, 0.0, _chunk("gradient_variance", fed, chunk))
    )
    if batch is None:
        return variance
    left = jnp.maximum(fed.size - batch, 0) / jnp.maximum(fed.size - 1, 1)
    return variance * left / batch


def smoothness(
    fed: Federation, loss: str = "softmax", *, l2: float = 0.0, bias: bool = True
) -> np.ndarray:
    """The constants L_c [C] with which F_c of a linear model is L_c-smooth; take the largest for
    all.

    L_c = curvature * (largest eigenvalue of X^T X / n_c) + l2, with X the client's rows.

    Args:
        fed: the rows and their owners.
        loss: "logistic" (one logit), of curvature 1/4; or "softmax", of curvature 1/2.
        l2: as in the module's F; a penalty h ||w||^2 has l2 = 2 h.
        bias: whether the model has one: X then has a column of ones.

    References:
        Li et al., Mathematics 2025; Boehning, 1992, for the 1/2.
    """
    checks.require_one_of("smoothness", tuple(CURVATURE), loss=loss)
    checks.require_one_of("smoothness", (False, True), bias=bias)
    checks.require_nonnegative("smoothness", single=True, l2=l2)
    checks.require_device_rows("smoothness", fed)
    x, top = np.asarray(fed.x, np.float64).reshape(fed.x.shape[0], -1), []
    for index, size in zip(np.asarray(fed.index), np.asarray(fed.size), strict=True):
        rows = x[index[:size]]
        rows = np.concatenate([rows, np.ones((size, 1))], 1) if bias else rows
        top.append(_largest(rows) / size)
    return CURVATURE[loss] * np.array(top) + float(l2)


@in_full()
def optimum(
    task: Task,
    fed: Federation,
    l2: float,
    client: int | None = None,
    *,
    weights: str | ArrayLike = "size",
    start: Tree = None,
    tolerance: float = 1e-8,
    steps: int = 5000,
) -> Optimum:
    """The minimiser of F, or of one client's objective, of a convex loss, in float64.

    It takes L-BFGS steps, then Newton steps by conjugate gradients, which need no difference of
    values near the optimum.

    Args:
        task: what is learned, or a convex loss of one example.
        fed: the rows and their owners.
        l2: the penalty's factor, > 0: without it a client of one class has no minimiser.
        client: the number of a client, whose objective is minimised; None: F of all.
        weights: p_c of F, as in `client_weights`.
        start: parameters to start from; None: zeros.
        tolerance: the largest norm of the gradient at the result.
        steps: L-BFGS steps at most.

    Returns:
        An Optimum: the parameters, and the value and the gradient's norm there.

    Raises:
        ValueError: if the tolerance is not reached: the loss is not convex, or l2 is too small for
            `steps`.

    References:
        Li et al., Mathematics 2025, and Chen et al., TKDE 2024, ask for 1e-8.
    """
    checks.require_positive(
        "optimum",
        "Without regularisation a client of one class has no minimiser.",
        single=True,
        l2=l2,
    )
    checks.require_positive("optimum", single=True, tolerance=tolerance)
    checks.require_device_rows("optimum", fed)
    checks.require_integer("optimum", steps=steps)
    clients = len(fed.size)
    if client is not None:
        checks.require_integer("optimum", min_value=0, client=client)
        if client >= clients:
            checks.fail("optimum", f"client < {clients}", f"client={client}")
    p = client_weights(fed, weights) if client is None else None
    return _solve(task, fed, float(l2), client, p, start, float(tolerance), steps)


@in_full()
def objective_gap(
    task: Task,
    fed: Federation,
    l2: float,
    *,
    weights: str | ArrayLike = "size",
    tolerance: float = 1e-8,
) -> Gap:
    """Gamma = F* - sum_c p_c F_c* >= 0, which is zero where one point is best for all clients.

    It solves C + 1 convex problems.

    Args:
        task: what is learned, or a convex loss of one example.
        fed: the rows and their owners.
        l2: the penalty's factor, > 0.
        weights: p_c, as in `client_weights`.
        tolerance: the largest norm of each gradient at its optimum.

    Raises:
        ValueError: as `optimum`.

    References:
        Li et al., Mathematics 2025, section 4 (Gamma); Chen et al., TKDE 2024, Definition 3
        (Gamma_s).
    """
    pooled = optimum(task, fed, l2, weights=weights, tolerance=tolerance)
    local = np.array(
        [
            optimum(task, fed, l2, client, start=pooled.params, tolerance=tolerance).value
            for client in range(len(fed.size))
        ]
    )
    return Gap(pooled.value - float(client_weights(fed, weights) @ local), pooled, local)


def _largest(rows) -> float:
    """The largest eigenvalue of X^T X, by Lanczos without the product; a handful of rows or columns
    exactly."""
    if min(rows.shape) < 20:
        return float(np.linalg.norm(rows, 2)) ** 2
    width = rows.shape[1]
    operator: Any = LinearOperator  # of scipy, whose types know neither matvec nor a float as tol
    solve: Any = eigsh
    product = operator((width, width), matvec=lambda v: rows.T @ (rows @ v), dtype=rows.dtype)
    return solve(product, k=1, v0=np.linspace(1, 2, width), tol=1e-10, return_eigenvectors=False)[0]


# --- gradients


def _problem(where, task, params, fed, dtype=None):
    """The arguments of a gradient, if there is one; `dtype` is that of the floats of x where they
    are cast."""
    checks.require_device_rows(where, fed)
    loss = for_evaluation(task) if isinstance(task, Task) else task
    if not callable(loss):
        checks.fail(where, "a Task, or a loss (params, x, y) -> scalar", checks.short_repr(loss))
    kind = dtype if dtype and jnp.issubdtype(fed.x.dtype, jnp.floating) else fed.x.dtype
    checks.require_gradient(
        where,
        loss,
        params,
        *(jax.ShapeDtypeStruct(v.shape[1:], k) for v, k in ((fed.x, kind), (fed.y, fed.y.dtype))),
    )
    return loss if isinstance(loss, Fn) else Fn(loss), pytrees.map(jnp.asarray, params), fed


def _chunk(where, fed, chunk):
    if chunk is None:
        return max(1, min(len(fed.size), ROOM // max(fed.index.shape[1] * (fed.x[:1].size + 1), 1)))
    checks.require_integer(where, chunk=chunk)
    return min(chunk, len(fed.size))


def _squares(grads: Any) -> Any:
    """||g_c||^2 of a tree with a first axis."""
    return sum(jnp.square(g).reshape(len(g), -1).sum(1) for g in jax.tree.leaves(grads))


@jax.jit(static_argnames="chunk")
def _gradients(loss, params, fed, l2, chunk):
    def one(client):
        index, size = client
        mask = jnp.arange(len(index)) < size
        x, y = pytrees.keep(mask, (fed.x[index], fed.y[index]))  # 0 * nan would reach the gradient

        def mean(w):
            losses = jax.vmap(loss, (None, 0, 0))(w, x, y)
            return jnp.where(mask, losses, 0).sum() / size

        return pytrees.axpy(l2, params, jax.grad(mean)(params))

    return jax.lax.map(one, (fed.index, fed.size), batch_size=chunk)


@jax.jit
def _variances(loss, params, fed, means):
    block = max(1, min(fed.index.shape[1], ROOM // max(pytrees.size(params), 1)))

    def one(client):
        index, size, mean = client

        def row(slot):
            g = jax.grad(loss)(params, fed.x[index[slot]], fed.y[index[slot]])
            return jnp.where(slot < size, pytrees.norm(pytrees.sub(g, mean)) ** 2, 0)

        return jax.lax.map(row, jnp.arange(len(index)), batch_size=block).sum() / size

    return jax.lax.map(one, (fed.index, fed.size, means))


# --- optima


def _blocks(fed, client, p):
    """Rows in blocks of one shape for all clients, with the weight of each: p_c / n_c, 0 for
    padding."""
    index, size = np.asarray(fed.index), np.asarray(fed.size)
    filled = np.arange(index.shape[1]) < size[:, None]
    if client is None:
        rows, weight = index[filled], np.repeat(p / size, size)
    else:
        rows, weight = index[client], filled[client] / size[client]
    block = min(ROWS, len(rows))
    pad = -len(rows) % block
    rows, weight = (
        np.pad(rows, (0, pad)).reshape(-1, block),
        np.pad(weight, (0, pad)).reshape(-1, block),
    )
    return rows, weight


@jax.jit
def _objective(params, loss, fed, rows, weight, l2):
    """Value and gradient of the weighted mean loss with its penalty, a block of rows at a time."""

    def value(w, x, y, part):
        return jnp.where(part > 0, part * jax.vmap(loss, (None, 0, 0))(w, x, y), 0).sum()

    def add(total, block):
        index, part = block
        x, y = pytrees.keep(part > 0, (fed.x[index], fed.y[index]))
        x = x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
        return pytrees.add(total, jax.value_and_grad(value)(params, x, y, part)), None

    start = l2 / 2 * sum(jnp.sum(w**2) for w in jax.tree.leaves(params)), pytrees.scale(l2, params)
    return jax.lax.scan(add, start, (rows, weight))[0]


@jax.jit
def _newton(params, *rest):
    """One Newton step of a strongly convex objective, the system solved by conjugate gradients."""
    gradient = lambda w: _objective(w, *rest)[1]
    g = gradient(params)
    step, _ = jax.scipy.sparse.linalg.cg(
        lambda v: jax.jvp(gradient, (params,), (v,))[1], g, tol=1e-4, maxiter=1000
    )
    return pytrees.sub(params, step)


def _solve(task, fed, l2, client, p, start, tolerance, steps):
    from scipy.optimize import minimize

    with in_float64():
        if start is None:
            checks.require_type("optimum", Task, "jfl.task, or a start beside a loss", task=task)
            start = pytrees.zeros_like(jax.eval_shape(task.init, jax.random.key(0)))
        start = checks.as_arrays("optimum", "start", start, jnp.float64)
        flat, shaped = jax.flatten_util.ravel_pytree(start)
        rest = (
            _problem("optimum", task, start, fed, jnp.float64)[0],
            fed,
            *map(jnp.asarray, _blocks(fed, client, p)),
            jnp.float64(l2),
        )

        def at(w):
            value, gradient = _objective(shaped(jnp.asarray(w)), *rest)
            return float(value), np.asarray(jax.flatten_util.ravel_pytree(gradient)[0])

        result = minimize(
            at,
            np.asarray(flat),
            jac=True,
            method="L-BFGS-B",
            options=dict(
                maxcor=30,
                maxiter=steps,
                maxfun=2 * steps,
                ftol=0.0,
                gtol=tolerance / max(flat.size, 1) ** 0.5,
            ),
        )
        params, (value, gradient) = shaped(jnp.asarray(result.x)), at(result.x)
        for _ in range(10):
            norm = float(np.linalg.norm(gradient))
            if norm <= tolerance or not np.isfinite(norm):
                break
            params = _newton(params, *rest)
            value, gradient = at(jax.flatten_util.ravel_pytree(params)[0])
        norm = float(np.linalg.norm(gradient))
        if not norm <= tolerance:
            checks.fail(
                "optimum",
                f"a gradient of norm <= {tolerance:g}",
                f"{norm:.3g} after {result.nit} steps",
                "Raise l2 or steps; the loss must be convex.",
            )
        return Optimum(jax.tree.map(np.asarray, params), value, norm)
