"""What public rows tell before a private run: clip norms, and how gradients spread over bands.

A clip norm or a band energy that is measured on private rows leaks, and no accountant counts it.
Here all is measured on rows that everyone may read, such as `jfl.transforms.public` sets aside:
sound exactly as long as these rows are public, and no client has them.  Without such rows give a
fixed clip, `jfl.clip_adaptive`, or a private estimate.

    public, rest = jfl.transforms.public(jfl.datasets.mnist(), 1000)
    clip = jfl.clip_l2(jfl.analysis.public_data.median_norm(task, params, *public))

Axes: p public rows.  A task may be a `core.Task` or a loss of one example.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..core import checks, pytrees
from ..core.losses import for_evaluation
from ..core.records import Batches, Fn, Rows, Task
from ..privacy.mechanisms import haar_bands as haar
from ..privacy.mechanisms.haar_bands import Bands
from ..sampling.batches import gather

__all__ = ["band_energies", "band_report", "gradient_norms", "median_norm", "update_norms"]

ROOM = 1 << 24  # floats that the gradients of a block may take


def gradient_norms(
    task: Task, params: Any, x: ArrayLike, y: ArrayLike, *, microbatch: int | None = None
) -> np.ndarray:
    """||gradient of a row||, over all leaves together; traceable.

    Args:
        task: what is learned, or a loss of one example.
        params: where the gradients are taken, as the task has them.
        x: [p, ...], public rows.
        y: [p], their labels.
        microbatch: rows whose gradients are held at once; None: as many as fit about 64 MB.

    Returns:
        Float[p], the norm for each row.

    Example:
        >>> loss = lambda w, x, y: 0.5 * (x @ w - y) ** 2
        >>> gradient_norms(loss, jnp.zeros(2), jnp.eye(2), jnp.array([3.0, -4.0])).tolist()
        [3.0, 4.0]
    """
    return _norms(*_arguments("public_data.gradient_norms", task, params, x, y, microbatch))


def median_norm(
    task: Task,
    params: Any,
    x: ArrayLike,
    y: ArrayLike,
    *,
    quantile: float = 0.5,
    microbatch: int | None = None,
) -> float:
    """The median, or another quantile, of the gradient norms: a clip norm, to be fixed before the
    private run.

    Args:
        task: what is learned, or a loss of one example.
        params: where the gradients are taken, as the task has them.
        x: [p, ...], public rows.
        y: [p], their labels.
        quantile: in [0, 1]; 0.5 is the median.
        microbatch: as in `gradient_norms`.

    Privacy:
        sound if the rows are public.  The median of private rows is not private, however it is
        used.

    Raises:
        ValueError: unless 0 <= quantile <= 1 and all norms are finite.

    References:
        Ranaweera et al., 2025: the clip norm is the median on a public proxy set, then frozen.

    Example:
        >>> median_norm(
        ...     lambda w, x, y: 0.5 * (x @ w - y) ** 2,
        ...     jnp.zeros(2),
        ...     jnp.eye(2),
        ...     jnp.array([3.0, -4.0]),
        ... )
        3.5
    """
    where = "public_data.median_norm"
    level = checks.as_array(where, "quantile", quantile)
    if level.ndim or level.dtype.kind not in "iuf" or not 0 <= level <= 1:
        checks.fail(
            where,
            "quantile in [0, 1]",
            f"quantile={checks.short_repr(quantile)}",
            "0.5 is the median.",
        )
    return _quantile(
        where, _norms(*_arguments(where, task, params, x, y, microbatch)), float(level)
    )


def update_norms(
    task: Task,
    params: Any,
    x: ArrayLike,
    y: ArrayLike,
    *,
    clients: int,
    steps: int,
    batch: Batches,
    lr: ArrayLike | Callable,
    key: jax.Array,
) -> np.ndarray:
    """||model difference|| of each of `clients` made-up clients after plain local SGD, for a clip
    of whole updates.

    Their median, float(np.median(...)), is to a release over clients what `median_norm` is to rows.
    The public rows are dealt at random, floor(p / clients) to each: choose `clients` so that they
    are about as large as real ones, since a client with fewer rows moves more.

    Args:
        task: what is learned, or a loss of one example.
        params: where the clients start, as the task has them.
        x: [p, ...], public rows.
        y: [p], their labels.
        clients: how many clients the rows are dealt to.
        steps: local steps of a client, as in the private run.
        batch: draws the batches, as in the private run.
        lr: learning rate, as in the private run.
        key: of jax.random.key, for the deal and the batches.

    Returns:
        Float[clients], the norm of each client's difference.

    Raises:
        ValueError: for more clients than rows, or a batch larger than a client.
    """
    where = "public_data.update_norms"
    loss, params, x, y, _ = _arguments(where, task, params, x, y, None)
    checks.require_integer(where, clients=clients, steps=steps)
    checks.require_positive(where, single=True, lr=lr)
    key = checks.as_key(where, key)
    if not isinstance(batch, Batches):
        checks.fail(
            where,
            "batch = a batch sampler such as jfl.batches.without_replacement(16)",
            checks.short_repr(batch),
        )
    rows = len(x) // clients
    least: Any = (
        batch.batch if batch.scheme == "without_replacement" and batch.short == "error" else 1
    )
    if rows < least:
        checks.fail(
            where,
            f"at least {least} of the public rows for each client",
            f"{len(x)} rows for {clients} clients",
            "Take fewer clients, or a smaller batch.",
        )
    rate: Any = lr
    return _updates(loss, params, x, y, batch, checks.as_scalar(rate), key, clients, steps)


def band_energies(
    task: Task,
    params: Any,
    x: ArrayLike,
    y: ArrayLike,
    bands: Bands,
    *,
    microbatch: int | None = None,
) -> jax.Array:
    """The mean over rows of the energy of a row's gradient in each band; their sum is the mean of
    ||gradient||^2.

    It is of rows, not of the mean gradient, since the noise is measured by what one row can do.
    `jfl.wavelet.ellipsoid` and `jfl.wavelet.optimal` take it.

    Args:
        task: what is learned, or a loss of one example.
        params: where the gradients are taken, as the task has them.
        x: [p, ...], public rows.
        y: [p], their labels.
        bands: of `jfl.bands`, for `params`.
        microbatch: as in `gradient_norms`.

    Returns:
        Float[bands], in squared units of the gradient.

    Privacy:
        sound if the rows are public.
    """
    checks.require_type("public_data.band_energies", haar.Bands, "jfl.bands", bands=bands)
    loss, params, x, y, microbatch = _arguments(
        "public_data.band_energies", task, params, x, y, microbatch
    )
    return _energies(loss, params, x, y, bands, microbatch)


def band_report(energies: ArrayLike, bands: Bands) -> list[dict]:
    """Whether noise that follows the bands would help.

    Args:
        energies: Float[bands], of `band_energies` or of a private estimate: no rows are read here.
        bands: of `jfl.bands`, for which they were measured.

    Returns:
        A dict for each block that is transformed on its own:

        - block: its number.
        - size: its coefficients m, with those of padding.
        - energy: its part of the sum of the energies.
        - shares: the parts p_b of that energy in its bands, of n_b coefficients each.
        - leaves: s_b, the entries under a coefficient of each band.
        - mean_leaves: sum p_b s_b.
        - ratio_weighted: (sum p_b s_b) (sum n_b / s_b) / m, for the weights of the paper, which win
          only below about 3 leaves.
        - ratio_optimal: (sum sqrt(p_b n_b))^2 / m, for the best noise; never above 1, and near 1
          where neighbours have nothing in common.

        A ratio is the noise power at equal privacy and without a binding clip over that of
        isotropic noise; below 1 is better.  It is nan for a block without energy.

    Privacy:
        nothing to add to what the energies cost.

    References:
        Ranaweera et al., 2025, for the weights; the optimum is not in the paper, and by Cauchy and
        Schwarz.
    """
    given, count = (
        checks.as_array("public_data.band_report", "energies", energies),
        haar.count(bands),
    )
    if (
        given.shape != (count,)
        or given.dtype.kind not in "iuf"
        or not np.all((given >= 0) & np.isfinite(given))
    ):
        checks.fail(
            "public_data.band_report",
            f"finite energies >= 0, one for each of {count} bands",
            checks.short_repr(energies),
        )
    energies = given.astype(np.float64)
    blocks, sizes, leaves = (
        np.asarray(part(bands), np.float64) for part in (haar.blocks, haar.sizes, haar.leaves)
    )
    entries = []
    for block in np.unique(blocks):
        energy, n, s = (values[blocks == block] for values in (energies, sizes, leaves))
        p = energy / energy.sum() if energy.sum() > 0 else np.full(len(energy), np.nan)
        entries.append(
            dict(
                block=int(block),
                size=int(n.sum()),
                energy=float(energy.sum()),
                shares=p.tolist(),
                leaves=s.tolist(),
                mean_leaves=float(p @ s),
                ratio_weighted=float((p @ s) * (n / s).sum() / n.sum()),
                ratio_optimal=float(np.sqrt(p * n).sum() ** 2 / n.sum()),
            )
        )
    return entries


# --- parts


def _arguments(where, task, params, x, y, microbatch):
    loss = for_evaluation(task) if isinstance(task, Task) else task
    if not callable(loss):
        checks.fail(where, "a Task, or a loss (params, x, y) -> scalar", checks.short_repr(loss))
    try:
        x, y = jnp.asarray(x), jnp.asarray(y)
    except Exception as error:  # whatever JAX says of what is no number
        checks.fail(
            where, "public rows x [p, ...] and y [p, ...] of numbers", checks.describe_error(error)
        )
    if not x.ndim or not y.ndim or len(x) != len(y) or not len(x):
        checks.fail(
            where,
            "public rows x [p, ...] and y [p, ...], p >= 1",
            f"shapes {list(x.shape)} and {list(y.shape)}",
        )
    checks.require_gradient(
        where, loss, params, *(jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for v in (x, y))
    )
    params = pytrees.map(jnp.asarray, params)
    if microbatch is None:
        microbatch = ROOM // max(pytrees.size(params), 1)
    else:
        checks.require_integer(where, microbatch=microbatch)
    return (
        loss if isinstance(loss, Fn) else Fn(loss),
        params,
        x,
        y,
        max(1, min(int(microbatch), len(x))),
    )


def _quantile(where, norms, quantile) -> float:
    norms = np.asarray(norms, np.float64)
    if not np.isfinite(norms).all():
        checks.fail(
            where,
            "finite gradients",
            f"{int((~np.isfinite(norms)).sum())} rows of {len(norms)} without",
            "Start from other params.",
        )
    return float(np.quantile(norms, quantile))


@jax.jit(static_argnames="microbatch")
def _norms(loss, params, x, y, microbatch):
    return jax.lax.map(
        lambda row: pytrees.norm(jax.grad(loss)(params, *row)), (x, y), batch_size=microbatch
    )


@jax.jit(static_argnames="microbatch")
def _energies(loss, params, x, y, bands, microbatch):
    each = jax.lax.map(
        lambda row: haar.energies(bands, jax.grad(loss)(params, *row)),
        (x, y),
        batch_size=microbatch,
    )
    return each.mean(0)


@jax.jit(static_argnames=("clients", "steps"))
def _updates(loss, params, x, y, batch, lr, key, clients, steps):
    rows = len(x) // clients
    order_key, draws = jax.random.split(key)
    index = jax.random.permutation(order_key, len(x))[: clients * rows].reshape(clients, rows)
    size = jnp.asarray(rows, jnp.int32)

    def one(client):
        index_of_client, number = client
        key = jax.random.fold_in(draws, number)

        def step(w, s):
            slots, mask, _ = batch.draw(key, s, size, rows)
            part = gather(Rows(x, y, index_of_client, size), slots, mask)

            def mean(w):
                losses = jax.vmap(loss, (None, 0, 0))(w, part.x, part.y)
                return jnp.where(part.mask, losses, 0).sum() / jnp.maximum(part.mask.sum(), 1)

            return pytrees.axpy(-lr, jax.grad(mean)(w), w), None

        return pytrees.norm(pytrees.sub(jax.lax.scan(step, params, jnp.arange(steps))[0], params))

    return jax.lax.map(one, (index, jnp.arange(clients)))
