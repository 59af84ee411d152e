"""Statistics of public rows that help to choose clip norms and noise shapes before a private run.

A clip norm or a band energy that is measured on private rows leaks information about them, which no
accountant counts.  Everything here is measured on rows that anyone may read and no client owns,
such as those that `jfl.transforms.public` sets aside.  Without such rows, use a fixed clip norm,
`jfl.clip_adaptive`, or a private estimate.

    public, rest = jfl.transforms.public(jfl.datasets.mnist(), 1000)
    clip = jfl.clip_l2(jfl.public_data.median_norm(task, params, *public))

Arguments that all functions share:

    task: a Task, or a loss of one example.
    params: the point where gradients are computed.
    x: [p, ...], public rows.
    y: [p, ...], their labels.

Gradients are computed for so many rows at once that they take about 64 MB.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..core import checks, pytrees
from ..core.records import Batches, Rows, Task
from ..privacy.mechanisms import haar_bands as haar
from ..privacy.mechanisms.haar_bands import Bands
from ..sampling.batches import gather
from .heterogeneity import MAX_FLOATS, checked_loss

__all__ = ["band_energies", "median_norm", "update_norms"]


def median_norm(
    task: Task | Callable,
    params: Any,
    x: ArrayLike,
    y: ArrayLike,
    *,
    quantile: float = 0.5,
) -> float:
    """Return the median norm of per-example gradients, which is a suitable clip norm for them.

    Args:
        task, params, x, y: see the module.
        quantile: in [0, 1]; 0.5 is the median.

    Privacy:
        Sound only if the rows are public: the median of private rows is not private.

    Raises:
        ValueError: If a norm is not finite.

    References:
        Ranaweera et al., 2025, fix the clip norm to the median of a public proxy dataset.

    Example:
        >>> loss = lambda w, x, y: 0.5 * (x @ w - y) ** 2
        >>> median_norm(loss, jnp.zeros(2), jnp.eye(2), jnp.array([3.0, -4.0]))
        3.5
    """
    where = "public_data.median_norm"
    norms = np.asarray(_norms(*_checked(where, task, params, x, y)), np.float64)
    if bad := int((~np.isfinite(norms)).sum()):
        checks.fail(
            where,
            "finite gradients",
            f"{bad} of {len(norms)} rows with other gradients",
            "Start from other params.",
        )
    level = checks.as_array(where, "quantile", quantile)
    if level.ndim or level.dtype.kind not in "iuf" or not 0 <= level <= 1:
        got = f"quantile={checks.short_repr(quantile)}"
        checks.fail(where, "quantile in [0, 1]", got, "0.5 is the median.")
    return float(np.quantile(norms, level))


@jax.jit
def _norms(loss, params, x, y):
    """Return the gradient norm of each row."""
    norm = lambda row: pytrees.norm(jax.grad(loss)(params, *row))
    return _map_rows(norm, params, x, y)


def _map_rows(function, params, x, y):
    """Map a function of a row's gradient, for so many rows at once that gradients take 64 MB."""
    fitting = max(MAX_FLOATS // max(pytrees.size(params), 1), 1)
    return jax.lax.map(function, (x, y), batch_size=min(fitting, len(x)))


def update_norms(
    task: Task | Callable,
    params: Any,
    x: ArrayLike,
    y: ArrayLike,
    *,
    clients: int,
    steps: int,
    batch: Batches,
    lr: ArrayLike,
    key: jax.Array,
) -> jax.Array:
    """Return the norms of the updates of artificial clients after local SGD, Float[clients].

    Their median, float(np.median(...)), is a suitable clip norm for the uploads of clients.  The
    public rows are divided at random, floor(p / clients) to each client.  Choose `clients` so that
    an artificial client has about as many rows as a real one: fewer rows give larger updates.

    Args:
        task, params, x, y: see the module.
        clients: the number of clients.
        steps: the number of local steps, as in the private run.
        batch: the sampler of batches, as in the private run.
        lr: the learning rate, as in the private run.
        key: a key for the division and the batches.

    Raises:
        ValueError: If there are more clients than rows, or a batch is larger than a client.
    """
    where = "public_data.update_norms"
    loss, params, x, y = _checked(where, task, params, x, y)
    checks.require_integer(where, clients=clients, steps=steps)
    checks.require_positive(where, single=True, lr=lr)
    checks.require_type(where, Batches, "jfl.batches", batch=batch)
    key = checks.as_key(where, key)
    needs_batch = batch.scheme == "without_replacement" and batch.short == "error"
    fewest: Any = batch.batch if needs_batch else 1
    if len(x) // clients < fewest:
        checks.fail(
            where,
            f"at least {fewest} public rows for each client",
            f"{len(x)} rows for {clients} clients",
            "Use fewer clients, or a smaller batch.",
        )
    return _updates(loss, params, x, y, batch, checks.as_scalar(lr), key, clients, steps)


@jax.jit(static_argnames=("clients", "steps"))
def _updates(loss, params, x, y, batch, lr, key, clients, steps):
    """Return the update norms of the made-up clients."""
    rows = len(x) // clients
    order_key, batch_key = jax.random.split(key)
    index = jax.random.permutation(order_key, len(x))[: clients * rows].reshape(clients, rows)
    size = jnp.asarray(rows, jnp.int32)

    def of_client(client):
        index_of_client, number = client
        key = jax.random.fold_in(batch_key, number)

        def step(w, s):
            slots, mask, _ = batch.draw(key, s, size, rows)
            part = gather(Rows(x, y, index_of_client, size), slots, mask)

            def mean_loss(w):
                losses = jax.vmap(loss, (None, 0, 0))(w, part.x, part.y)
                return jnp.where(part.mask, losses, 0).sum() / jnp.maximum(part.mask.sum(), 1)

            return pytrees.axpy(-lr, jax.grad(mean_loss)(w), w), None

        trained, _ = jax.lax.scan(step, params, jnp.arange(steps))
        return pytrees.norm(pytrees.sub(trained, params))

    return jax.lax.map(of_client, (index, jnp.arange(clients)))


def band_energies(
    task: Task | Callable,
    params: Any,
    x: ArrayLike,
    y: ArrayLike,
    bands: Bands,
) -> jax.Array:
    """Return the mean energy of per-example gradients in each wavelet band, Float[bands].

    The energy in a band is the squared norm of the wavelet coefficients in that band, so the
    energies sum to the mean of ||gradient||^2.  They describe gradients of single rows, not the
    mean gradient, since noise has to hide a single row.  Pass them to `jfl.wavelet.ellipsoid`.

    Args:
        task, params, x, y: see the module.
        bands: the result of a function of `jfl.bands` for `params`.
    """
    where = "public_data.band_energies"
    checks.require_type(where, haar.Bands, "jfl.bands", bands=bands)
    return _energies(*_checked(where, task, params, x, y), bands)


@jax.jit
def _energies(loss, params, x, y, bands):
    """Return the mean energy of the rows' gradients in each band."""
    energies = lambda row: haar.energies(bands, jax.grad(loss)(params, *row))
    return _map_rows(energies, params, x, y).mean(0)


def _checked(where, task, params, x, y):
    """Return the arguments in the form that the compiled functions take."""
    try:
        x, y = jnp.asarray(x), jnp.asarray(y)
    except Exception as error:  # JAX has no single error for values that are not numbers
        checks.fail(where, "public rows x and y of numbers", checks.describe_error(error))
    if not x.ndim or not y.ndim or len(x) != len(y) or not len(x):
        checks.fail(
            where,
            "public rows x [p, ...] and y [p, ...] with p >= 1",
            f"shapes {list(x.shape)} and {list(y.shape)}",
        )
    return *checked_loss(where, task, params), x, y
