"""Corruption of the rows of a Federation, for studies with clients of unequal data quality.

Whether and how a row is corrupted depends only on the seed, the row number and the corruption level
of its owner, not on the partition or the order of clients. A higher level corrupts everything that
a lower one does, in the same way, so that different levels can be compared on the same draws.

Privacy:
    Each row is changed independently if the levels are public. Neighbouring datasets then stay
    neighbouring, and no caveat is needed.

Shapes use n rows and C clients.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ..core import checks
from ..core.hashing import mark_immutable
from ..core.records import Federation

__all__ = ["label_noise", "salt_and_pepper"]

# The numbers of the random streams of a seed that are used here. Partitions use others.
PIXEL_STREAM, LABEL_STREAM = 2, 3
# Random numbers that are in memory at a time.
MAX_DRAWS = 1 << 22


def salt_and_pepper(
    fed: Federation,
    density: Sequence[float] | float,
    *,
    seed: int = 0,
    low: float | None = None,
    high: float | None = None,
) -> Federation:
    """Set each pixel to `low` with probability density / 2, and to `high` with density / 2.

    Args:
        fed: the federation.
        density: probability that a pixel is changed, in [0, 1]; one number for all clients, or
            Float[C].
        seed: seed of all draws.
        low: one value of changed pixels, in units of fed.x. None uses the minimum of fed.x.
        high: the other value, at least `low`. None uses the maximum of fed.x.

    Returns:
        The federation with changed x. Only the training rows of clients change.

    Privacy:
        Rows are changed independently if low and high are given. Otherwise low and high are
        computed from all rows without noise.

    Raises:
        ValueError: for densities outside [0, 1], or not one for each client; and for integer x.

    References:
        Talaei and Izadi, 2024, section on experiments: clients have data of three qualities, whose
        densities the paper does not state.

    Example:
        >>> from jfl.data import federate, partition
        >>> rows = np.full((600, 100), 0.5), np.zeros(600, int)
        >>> fed = salt_and_pepper(
        ...     federate(rows, partition.iid(3), test=rows), [0, 0.2, 0.5], low=0, high=1
        ... )
        >>> [round(float((fed.x[own] != 0.5).mean()), 1) for own in fed.index]
        [0.0, 0.2, 0.5]
    """
    where = "corruption.salt_and_pepper"
    levels = _levels_of_rows(where, fed, seed, density=density)
    if not jnp.issubdtype(fed.x.dtype, jnp.floating):
        checks.fail(
            where,
            "features of float",
            f"dtype {fed.x.dtype}",
            "Tokens cannot be changed like pixels.",
        )
    x = np.array(fed.x)
    low, high = float(x.min()) if low is None else low, float(x.max()) if high is None else high
    checks.require_nonnegative(where, "low <= high.", single=True, **{"high - low": high - low})
    lowest, highest = (np.asarray(end, x.dtype) for end in (low, high))
    rng, shape = np.random.default_rng([seed, PIXEL_STREAM]), x.shape[1:]
    step = max(1, MAX_DRAWS // max(x[:1].size, 1))
    # Numbers are drawn for every row in order, whether it changes or not.
    for first in range(0, len(x), step):
        part = x[first : first + step]
        half = levels[first : first + step].reshape(-1, *[1] * len(shape)) / 2
        u = rng.random(part.shape)
        part[u < half] = lowest
        part[u >= 1 - half] = highest
    return dataclasses.replace(fed, x=mark_immutable(jnp.array(x)))


def label_noise(fed: Federation, share: Sequence[float] | float, *, seed: int = 0) -> Federation:
    """Replace each label by one of the other classes, drawn uniformly, with probability `share`.

    Args:
        fed: the federation.
        share: probability that a label changes, in [0, 1]; one number for all clients, or Float[C].
        seed: seed of all draws.

    Returns:
        The federation with changed y. Only the labels of the clients' training rows change.

    Raises:
        ValueError: for fewer than two classes, and for shares outside [0, 1] or not one for each
            client.

    Example:
        >>> from jfl.data import datasets, federate, partition
        >>> fed = federate(datasets.digits(), partition.iid(clients=3))
        >>> round(float((label_noise(fed, 0.2).y != fed.y).mean()), 1)
        0.2
    """
    where = "corruption.label_noise"
    levels = _levels_of_rows(where, fed, seed, share=share)
    if fed.classes < 2:
        checks.fail(
            where,
            "at least two classes",
            f"classes={fed.classes}",
            "There is no other class.",
        )
    y, rng = np.array(fed.y), np.random.default_rng([seed, LABEL_STREAM])
    u, other = rng.random(len(y)), rng.integers(1, fed.classes, len(y))
    y = np.where(u < levels, (y + other) % fed.classes, y).astype(y.dtype)
    return dataclasses.replace(fed, y=mark_immutable(jnp.array(y)))


def _levels_of_rows(where, fed, seed, **level) -> np.ndarray:
    """Check the common arguments, and return Float64[n], the corruption level of each row.

    The level is that of the row's owner, and 0 for rows that do not change.

    Args:
        where: the function, for messages.
        fed: the federation.
        seed: the seed.
        **level: the levels of clients under the name of the argument, a number or Float[C].
    """
    ((name, value),) = level.items()
    checks.require_device_rows(where, fed)
    checks.require_seed(where, seed=seed)
    checks.require_nonnegative(where, **{name: value})
    clients, of_clients = len(fed.size), np.asarray(value, np.float64)
    if of_clients.shape not in ((), (clients,)) or np.any(of_clients > 1):
        checks.fail(
            where,
            f"{name} in [0, 1], one number or one for each of {clients} clients",
            f"{name}={checks.short_repr(value)}",
            "0 leaves a client's rows unchanged.",
        )
    levels = np.zeros(len(fed.x))
    rows, held_out = (
        np.asarray(index)[np.arange(index.shape[1]) < np.asarray(size)[:, None]]
        for index, size in ((fed.index, fed.size), (fed.test_index, fed.test_size))
    )
    levels[rows] = level_of_rows = np.repeat(np.broadcast_to(of_clients, clients), fed.size)
    if np.any(levels[rows] != level_of_rows) or np.any(levels[held_out]):
        checks.fail(where, f"one {name} for each row", "a row of two clients, or held out as well")
    return levels
