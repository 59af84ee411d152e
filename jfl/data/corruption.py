"""Rows of bad quality, for studies of who should count how much: Federation -> Federation.

What happens to a row depends on (seed, row number) and on the level of its owner alone, never on
the partition or on the order of the clients; and a higher level spoils all that a lower one does,
in the same way.  So clients of several qualities can be compared on the same draws.

Privacy:
    given public levels, each row is changed by itself: neighbours stay neighbours and caveats stay
    as they are.

Axes: n rows, C clients.  Host only, NumPy; imports jfl.core.checks, jfl.core and jfl.core.hashing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core import checks
from ..core.hashing import own
from ..core.records import Federation

__all__ = ["label_noise", "salt_and_pepper"]

PIXELS, LABELS = 2, 3  # random streams of a seed; partitions use others
ROOM = 1 << 22  # draws held at once


def salt_and_pepper(
    fed: Federation,
    density: Sequence[float] | float,
    *,
    seed: int = 0,
    low: float | None = None,
    high: float | None = None,
    held_out: bool = False,
) -> Federation:
    """Each pixel becomes `low` or `high`, half each, with probability `density`; the others stay.

    Args:
        fed: the rows and their owners.
        density: the probability that a pixel is spoiled, in [0, 1]; one number for all clients, or
            Float[C], one for each.
        seed: of all draws.
        low: the value of one half of the spoiled pixels, in units of fed.x; None: the least value
            of fed.x.
        high: the value of the other half, at least `low`; None: the greatest value of fed.x.
        held_out: whether the held-out rows of the clients are spoiled too.

    Returns:
        The federation with other values in x.  The training rows of the clients change, and with
        `held_out` their held-out rows.  Central test rows, and rows that nobody owns, stay clean.

    Privacy:
        as the module says, with low and high given; left out, they are read from all rows, without
        noise.

    Raises:
        ValueError: for densities outside [0, 1] or not one a client, tokens, or a row that belongs
            to clients of different density, or is held out from its own training.

    References:
        Talaei and Izadi, 2024, section on experiments (clients of three qualities; their densities
        are unknown).

    Example:
        >>> from . import federate, partition
        >>> rows = np.full((600, 100), 0.5), np.zeros(600, int)
        >>> fed = salt_and_pepper(
        ...     federate(rows, partition.iid(3), test=rows), [0, 0.2, 0.5], low=0, high=1
        ... )
        >>> [round(float((fed.x[own] != 0.5).mean()), 1) for own in fed.index]
        [0.0, 0.2, 0.5]
    """
    where = "corruption.salt_and_pepper"
    levels = _levels(where, fed, seed, held_out, density=density)
    if not jnp.issubdtype(fed.x.dtype, jnp.floating):
        checks.fail(where, "features of float", f"dtype {fed.x.dtype}", "Tokens are no numbers.")
    x = np.array(fed.x)
    low, high = float(x.min()) if low is None else low, float(x.max()) if high is None else high
    ends = [checks.as_array(where, name, value) for name, value in dict(low=low, high=high).items()]
    if (
        any(end.ndim or end.dtype.kind not in "iuf" for end in ends)
        or not -np.inf < ends[0] <= ends[1] < np.inf
    ):
        checks.fail(
            where,
            "two finite numbers low <= high",
            f"low={checks.short_repr(low)}, high={checks.short_repr(high)}",
        )
    least, most = (end.astype(x.dtype) for end in ends)
    rng, shape = np.random.default_rng([seed, PIXELS]), x.shape[1:]
    step = max(1, ROOM // max(x[:1].size, 1))
    for first in range(0, len(x), step):  # a view of x: every row is drawn for, in order
        part, half = (
            x[first : first + step],
            levels[first : first + step].reshape(-1, *[1] * len(shape)) / 2,
        )
        u = rng.random(part.shape)
        part[u < half] = low
        part[u >= 1 - half] = high
    return dataclasses.replace(fed, x=own(jnp.array(x)))


def label_noise(
    fed: Federation, share: Sequence[float] | float, *, seed: int = 0, held_out: bool = False
) -> Federation:
    """Each label becomes one of the other classes, all equally likely, with probability `share`.

    Args:
        fed: the rows and their owners.
        share: the probability that a label changes, in [0, 1]; one number for all clients, or
            Float[C], one for each.
        seed: of all draws.
        held_out: whether the labels of held-out rows change too.

    Returns:
        The federation with other labels y; features stay.  Which rows may change is as in
        `salt_and_pepper`.

    Raises:
        ValueError: for fewer than two classes, and as `salt_and_pepper`.

    Example:
        >>> from . import datasets, federate, partition
        >>> fed = federate(datasets.digits(), partition.iid(clients=3))
        >>> round(float((label_noise(fed, 0.2).y != fed.y).mean()), 1)
        0.2
    """
    where = "corruption.label_noise"
    levels = _levels(where, fed, seed, held_out, share=share)
    if fed.classes < 2:
        checks.fail(
            where,
            "at least two classes",
            f"classes={fed.classes}",
            "There is no other label to take.",
        )
    y, rng = np.array(fed.y), np.random.default_rng([seed, LABELS])
    u, other = rng.random(len(y)), rng.integers(1, fed.classes, len(y))
    y = np.where(u < levels, (y + other) % fed.classes, y).astype(y.dtype)
    return dataclasses.replace(fed, y=own(jnp.array(y)))


def _levels(where, fed, seed, held_out, **level) -> np.ndarray:
    """Float64 [n]: the level of each row's owner, 0 for rows that stay clean."""
    ((name, value),) = level.items()
    if not isinstance(fed, Federation) or not checks.is_concrete((fed, value)):
        checks.fail(
            where,
            f"a Federation and {name} that can be read now",
            f"{type(fed).__name__} and {value!r}",
            "See jfl.federate; corrupt before jax.jit.",
        )
    checks.require_device_rows(where, fed)
    checks.require_seed(where, seed=seed)
    checks.require_one_of(where, (False, True), held_out=held_out)
    checks.require_nonnegative(where, "0 leaves a client's rows as they are.", **{name: value})
    clients, given = len(fed.size), np.asarray(value, np.float64)
    if given.shape not in ((), (clients,)):
        checks.fail(
            where, f"one {name}, or one for each of {clients} clients", f"shape {list(given.shape)}"
        )
    if np.any(given > 1):
        checks.fail(
            where,
            f"{name} in [0, 1]",
            f"{name}={checks.short_repr(value)}",
            "0 leaves a client's rows as they are.",
        )
    given = np.broadcast_to(given, clients)
    parts: list[tuple[Any, ...]] = [
        (*_entries(fed.index, fed.size), given),
        (*_entries(fed.test_index, fed.test_size), given * bool(held_out)),
    ]
    rows, owner = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    wanted = np.concatenate([of[clients_of] for _, clients_of, of in parts])
    order = np.argsort(rows, kind="stable")
    clash = np.flatnonzero((np.diff(rows[order]) == 0) & (np.diff(wanted[order]) != 0))
    if clash.size:
        one, two = order[clash[0]], order[clash[0] + 1]
        checks.fail(
            where,
            f"one {name} for each row",
            f"{wanted[one]:g} and {wanted[two]:g} for row {rows[one]}, of "
            f"client {owner[one]} and client {owner[two]}"
            if owner[one] != owner[two]
            else f"row {rows[one]}, which client {owner[one]} trains on and holds out",
            "Let the partition give each row once; hold rows out by jfl.federate.",
        )
    levels = np.zeros(len(fed.x))
    levels[rows] = wanted
    return levels


def _entries(index, size):
    """Rows that an index holds, and the client of each."""
    index, size = np.asarray(index), np.asarray(size)
    return index[np.arange(index.shape[1]) < size[:, None]], np.repeat(np.arange(len(size)), size)
