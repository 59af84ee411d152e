"""Populations that outgrow the device: rows stay on the host or on disk, and only a cohort's
travel.

Axes: n rows, C clients, N slots of the largest client, K slots of a cohort.
"""

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core import checks
from ..core.hashing import Rows, own
from ..core.records import Federation
from .datasets import checked_arrays

BLOCK = 2**22  # numbers read at once when all are looked at
CHANGED = "Rows must stay as they were when the population was made: begin again."
__all__ = ["population"]


def population(
    rows: Any,
    sizes: Sequence[int] | np.ndarray,
    *,
    test: Sequence,
    order: Sequence[int] | np.ndarray | None = None,
    classes: int | None = None,
    fields: Sequence[str] = ("image", "label"),
    prepare: Callable | None = None,
    caveats: tuple = (),
) -> Federation:
    """A federation whose rows stay where they are: `jfl.simulate` fetches those of each cohort
    while the device works.

    Args:
        rows: (x, y), two arrays of n rows, also memory-mapped ones (np.load(..., mmap_mode="r"));
            or a data source with len and [i], or __getitems__, whose items are (x, y) or dicts with
            `fields` (TFDS's data_source, ArrayRecord).
        sizes: Int[C], how many rows each client has, client after client.
        test: (x_test, y_test), central test rows; they go to the device.
        order: Int[n], where a client's rows are not next to each other: the row numbers of the
            first client, the second, and so on; each row once.  None: as the rows stand.
        classes: number of classes; 0 for regression; None: one more than the largest label.
        fields: the names of x and y where an item of `rows` is a dict.
        prepare: makes features of the x that is read, [m, ...] to [m, ...], such as
            lambda x: x / np.float32(255).
        caveats: sentences about the rows that belong beside every guarantee.

    Returns:
        The federation: x [0, ...], index Int32[C, 0], size Int[C]; fed.host holds the rows.

    Privacy:
        as of federate.  All rows are read once, here: for their checks, and for the digest that
        keys the noise; do not change them later.

    Raises:
        ValueError: on rows that `datasets.arrays` refuses, sizes that do not add up, an order that
            is none.

    Costs:
        12 bytes a client on the host, 4 on the device; 4 bytes a number for the rows of two
        cohorts.

    Example:
        >>> x, y = np.eye(6, dtype=np.float32), np.arange(6) % 2
        >>> fed = population((x, y), sizes=[1, 2, 3], test=(x, y))
        >>> fed.host.fetch(np.array([2, 0]))[0].shape, fed.size.tolist()
        ((2, 3, 6), [1, 2, 3])
    """
    where = "population"
    read, n, arrays = _reader(rows, fields, prepare)
    caveats = checks.several(where, caveats=caveats)
    sizes = checks.array(where, "sizes", sizes)
    if sizes.ndim != 1 or not sizes.size or sizes.dtype.kind not in "iu" or sizes.min() < 1:
        checks.fail(where, "sizes Int[C], each at least 1", f"{sizes.dtype}{list(sizes.shape)}")
    owned = int(sizes.sum(dtype=np.int64))
    if order is None and owned > n:
        checks.fail(where, f"sizes that add up to at most {n} rows", owned)
    if n >= 2**31:
        checks.fail(where, "fewer than 2^31 rows", n)
    if order is not None:
        order = checks.array(where, "order", order)
        if (
            order.shape != (owned,)
            or order.dtype.kind not in "iu"
            or order.min() < 0
            or order.max() >= n
        ):
            checks.fail(
                where,
                f"order Int[{owned}] of row numbers below {n}",
                f"{order.dtype}{list(order.shape)}",
            )
        if np.bincount(order, minlength=1).max() > 1:
            checks.fail(
                where,
                "one owner a row",
                f"row {np.bincount(order).argmax()} in order more than once",
            )
    if not isinstance(test, tuple | list) or len(test) != 2:
        checks.fail(where, "test=(x_test, y_test)", type(test).__name__)
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    host = Population(read, offsets, order, int(sizes.max()), arrays, None, None)
    host, classes, identity, like = _looked_at(host, n, test, classes, where)
    x_test, y_test = checked_arrays(where, *like, *test, classes)[2:4]
    host.identity, host.shape, host.classes = identity, like[0].shape[1:], classes
    size = jnp.asarray(sizes.astype(np.int32))
    blank = (
        jnp.zeros((0, *like[0].shape[1:]), host.kind[0]),
        jnp.zeros(0, host.kind[1]),
        jnp.zeros((len(sizes), 0), jnp.int32),
    )
    none = jnp.zeros((len(sizes), 0), jnp.int32), jnp.zeros(len(sizes), jnp.int32)
    return Federation(
        *(own(v) for v in (*blank, size, jnp.array(x_test), jnp.array(y_test), *none)),
        classes=classes,
        caveats=caveats,
        host=host,
    )


class Population:
    """Where the rows are; equal only to itself, so that a program is compiled for it once."""

    def __init__(self, read, offsets, order, slots, arrays, kind, identity):
        self.read, self.offsets, self.order, self.slots = read, offsets, order, slots
        self.arrays, self.kind, self.identity = arrays, kind, identity  # kind: the types of x and y
        self.shape, self.classes = None, 0  # of a row of x, of y

    def rows(self, ids):
        """Row numbers of clients [m, N] and where there are any, Bool[m, N]; an id past the end has
        none."""
        there = ids < len(self.offsets) - 1
        first = self.offsets[np.where(there, ids, 0)]
        size = np.where(there, self.offsets[np.where(there, ids, 0) + 1] - first, 0)
        mask = np.arange(self.slots) < size[:, None]
        positions = np.where(mask, first[:, None] + np.arange(self.slots), 0)
        return (positions if self.order is None else np.where(mask, self.order[positions], 0)), mask

    def fetch(self, ids):
        """x [m, N, ...] and y [m, N] of clients `ids`; zeros where a client has no more rows."""
        positions, mask = self.rows(np.asarray(ids))
        count, out = int(mask.sum()), []
        if not count:  # of a process whose slots are all empty
            return tuple(
                np.zeros(mask.shape + rest, kind) for kind, rest in zip(self.kind, (self.shape, ()))
            )
        values = [np.asarray(v) for v in self.read(positions[mask])]
        for value, kind, rest in zip(values, self.kind, (self.shape, ())):
            if value.shape != (count, *rest):
                checks.fail(
                    "population",
                    f"{count} rows of shape {list(rest)}, as at first",
                    list(value.shape),
                    CHANGED,
                )
            padded = np.zeros(mask.shape + rest, kind)
            padded[mask] = value
            out.append(padded)
        if self.classes and not 0 <= values[1].min() <= values[1].max() < self.classes:
            checks.fail(
                "population",
                f"labels below {self.classes}, as at first",
                f"{values[1].min()} to {values[1].max()}",
                CHANGED,
            )
        self.forget()
        return tuple(out)

    def forget(self):
        """Let go of the pages of memory-mapped files: they stay in the system's cache, not in this
        process."""
        for x in self.arrays:
            memory_map = getattr(x, "_mmap", None)
            if memory_map is not None and hasattr(mmap, "MADV_DONTNEED") and x.mode in ("r", "r+"):
                memory_map.madvise(mmap.MADV_DONTNEED)


def _reader(rows, fields, prepare):
    """-> row numbers to (x, y), how many rows, and the arrays behind it."""

    def prepared(x):
        if prepare is None:
            return x
        try:
            prepared_rows = np.asarray(prepare(x))
        except Exception as error:  # of a function of the user's own
            checks.fail(
                "population", "prepare, a function from x [m, ...] to [m, ...]", checks.cause(error)
            )
        if prepared_rows.shape[:1] != x.shape[:1]:
            checks.fail(
                "population",
                "prepare, a function from x [m, ...] to [m, ...]",
                f"{list(prepared_rows.shape)} of {list(x.shape)}",
            )
        return prepared_rows

    if isinstance(rows, tuple | list):
        need = "rows = (x, y) of equally many rows, or a data source"
        try:
            arrays = [v if isinstance(v, np.ndarray) else np.asarray(v) for v in rows]
        except ValueError as error:  # rows of unequal lengths
            checks.fail("population", need, checks.cause(error))
        shapes = [list(v.shape) for v in arrays]
        if len(arrays) != 2 or shapes[0][:1] != shapes[1] or len(shapes[1]) != 1:
            checks.fail("population", need, f"{shapes}")
        x, y = arrays
        return lambda positions: (prepared(x[positions]), y[positions]), len(y), (x, y)
    if (
        not hasattr(rows, "__getitem__")
        or not hasattr(rows, "__len__")
        or getattr(rows, "ndim", 1) == 0
    ):
        checks.fail(
            "population", "rows = (x, y), or a data source with len and [i]", type(rows).__name__
        )
    many = getattr(rows, "__getitems__", lambda positions: [rows[i] for i in positions])

    def read(positions):
        items = many([int(a) for a in positions])
        try:
            x, y = zip(
                *(tuple(i[f] for f in fields) if isinstance(i, dict) else i for i in items),
                strict=True,
            )
            return prepared(np.stack(x)), np.asarray(y)
        except (KeyError, TypeError, ValueError) as error:
            checks.fail(
                "population",
                f"items (x, y), or dicts with {' and '.join(fields)}, of one shape",
                f"{type(error).__name__}: {str(error)[:200]} in rows from {positions[0]} on",
            )

    return read, len(rows), ()


def _looked_at(host, n, test, classes, where):
    """All rows once: their kinds, that they are finite and labelled, and their identity, as of a
    federation of them."""
    total, most, like = Rows(), -1, None
    step = max(1, BLOCK // max(1, np.asarray(host.read(np.arange(1))[0]).size))
    for first in range(0, n, step):
        positions = np.arange(first, min(first + step, n))
        x, y = (np.asarray(v) for v in host.read(positions))
        if x.dtype.kind == "f":
            x = x.astype(np.float32, copy=False)
        likely = (
            classes
            if classes is not None or y.dtype.kind == "f"
            else max(int(y.max(initial=0)), most) + 1
        )
        try:
            x, y, *_, classes_of_block = checked_arrays(
                f"{where}, rows from {first} on", x, y, x[:1], y[:1], likely
            )
        except ValueError:
            host.forget()
            raise
        if like is not None and (x.shape[1:], x.dtype, y.dtype) != (like[0].shape[1:], *host.kind):
            checks.fail(
                where,
                f"rows like the first, {like[0].dtype}{list(like[0].shape[1:])}",
                f"{x.dtype}{list(x.shape[1:])}",
            )
        like, host.kind, most = (
            (x[:1], y[:1]),
            (x.dtype, y.dtype),
            max(most, int(classes_of_block) - 1),
        )
        total.add(x, y)
        host.forget()
    if classes is None:
        classes = (
            max(most, int(np.max(test[1], initial=0))) + 1 if host.kind[1].kind == "i" else None
        )
    clients = len(host.offsets) - 1
    step = max(1, BLOCK // host.slots)
    for first in range(0, clients, step):
        positions, mask = host.rows(np.arange(first, min(first + step, clients)))
        total.own(positions[mask])
    return host, classes, total.words(np.diff(host.offsets)), like
