"""Populations that outgrow the device: rows stay on the host or on disk, and only a cohort's
travel.

Axes: n rows, C clients, N slots of the largest client, K slots of a cohort.
"""

import concurrent.futures
import functools
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import checks
from ..core.hashing import Rows, own
from ..core.records import Federation
from .datasets import checked_arrays

BLOCK = 2**22  # numbers read at once when all are looked at
READERS = 4  # threads that copy rows
ONE_THREAD = 2**20  # bytes of a cohort that one thread copies as fast
PART = 2**24  # bytes that a thread copies at once
LARGE_CLIENT = 2**16  # bytes from which a loop over clients costs nothing beside the copying
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
    prepare_row: Callable | None = None,
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
            lambda x: x / np.float32(255).  A NumPy function, on the host.
        prepare_row: the same of one row, on the device: a JAX function such as
            lambda x: x / jnp.float32(255).  Rows travel as they are stored, pixels as bytes at a
            quarter of the size.  Its last digits may differ from NumPy's: other data, so other
            noise.
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
        12 bytes a client on the host, 4 on the device; the rows of two cohorts, as they travel.
        Arrays are read by several threads.

    Example:
        >>> x, y = np.eye(6, dtype=np.float32), np.arange(6) % 2
        >>> fed = population((x, y), sizes=[1, 2, 3], test=(x, y))
        >>> fed.host.fetch(np.array([2, 0]))[0].shape, fed.size.tolist()
        ((2, 3, 6), [1, 2, 3])
    """
    where = "population"
    stored, n, arrays = _reader(rows, fields, prepare)
    caveats = checks.as_tuple(where, caveats=caveats)
    sizes = checks.as_array(where, "sizes", sizes)
    if sizes.ndim != 1 or not sizes.size or sizes.dtype.kind not in "iu" or sizes.min() < 1:
        checks.fail(where, "sizes Int[C], each at least 1", f"{sizes.dtype}{list(sizes.shape)}")
    owned = int(sizes.sum(dtype=np.int64))
    if order is None and owned > n:
        checks.fail(where, f"sizes that add up to at most {n} rows", owned)
    if n >= 2**31:
        checks.fail(where, "fewer than 2^31 rows", n)
    if order is not None:
        order = checks.as_array(where, "order", order)
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
    host = Population(stored, arrays, bool(arrays) and prepare is None, offsets, order, prepare_row)
    host, classes, identity, like = _looked_at(host, n, test, classes, where)
    x_test, y_test = checked_arrays(where, like[0], like[1], test[0], test[1], classes)[2:4]
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
        classes=classes or 0,
        caveats=caveats,
        host=host,
    )


class Population:
    """Where the rows are; equal only to itself, so that a program is compiled for it once.

    `stored` reads rows as they travel to the device, `read` as a model sees them; `direct` says
    that the rows of `stored` are those of `arrays`.  `kind` holds the types of x and y that `read`
    gives, `shape` the shape of a row of x, `sent` shapes and types of both as they travel.
    """

    def __init__(self, stored, arrays, direct, offsets, order, prepare_row):
        self.stored, self.arrays, self.direct = stored, arrays, direct
        self.offsets, self.order, self.slots = offsets, order, int(np.diff(offsets).max())
        self.prepare_row = prepare_row
        self.prepared = None if prepare_row is None else _of_rows(prepare_row)
        self.kind: Any = None
        self.identity: Any = None
        self.shape: Any = None
        self.sent: Any = None
        self.classes = 0  # of y

    def read(self, positions):
        """x and y of rows as a model sees them."""
        x, y = (np.asarray(v) for v in self.stored(positions))
        if self.prepared is not None:
            x = self.prepared(x)
            x = x if self.kind is None else x.astype(self.kind[0], copy=False)
        return x, y

    def rows(self, ids):
        """Row numbers of clients [m, N] and where there are any, Bool[m, N]; an id past the end has
        none."""
        first, size = self._spans(ids)
        mask = np.arange(self.slots) < size[:, None]
        positions = np.where(mask, first[:, None] + np.arange(self.slots), 0)
        return (positions if self.order is None else np.where(mask, self.order[positions], 0)), mask

    def _spans(self, ids):
        """Where the rows of clients begin, and how many there are."""
        there = ids < len(self.offsets) - 1
        first = self.offsets[np.where(there, ids, 0)]
        return first, np.where(there, self.offsets[np.where(there, ids, 0) + 1] - first, 0)

    def fetch(self, ids):
        """x [m, N, ...] and y [m, N] of clients `ids`, as they travel; zeros where a client has no
        more rows."""
        ids = np.asarray(ids)
        size = self._spans(ids)[1]
        out = tuple(np.zeros((len(ids), self.slots, *rest), kind) for rest, kind in self.sent)
        several = self.direct and out[0].nbytes > ONE_THREAD
        parts = _shares(size, max(READERS, -(-out[0].nbytes // PART)) if several else 1)
        fill = lambda part: self._fill(ids[part], [v[part] for v in out])
        if len(parts) > 1:
            list(_readers().map(fill, parts))
        elif parts:  # else all slots are empty
            fill(parts[0])
        self.forget()
        return out

    def _fill(self, ids, out):
        """Rows of clients into their slots of a cohort."""
        positions, mask = self.rows(ids)
        if self.direct:
            labels = self.arrays[1][positions[mask]]
            self._copy(positions, mask, out[0])
        else:
            x, labels = (np.asarray(v) for v in self.stored(positions[mask]))
            self._as_at_first(int(mask.sum()), x, labels)
            out[0][mask] = x
        if self.classes and not 0 <= labels.min() <= labels.max() < self.classes:
            checks.fail(
                "population",
                f"labels below {self.classes}, as at first",
                f"{labels.min()} to {labels.max()}",
                CHANGED,
            )
        out[1][mask] = labels

    def _copy(self, positions, mask, out):
        """Rows of arrays into their slots, in the way that is fastest for them."""
        x, filled = self.arrays[0], mask.sum()
        is_large = self.order is None and out[:1].nbytes >= LARGE_CLIENT
        if _is_plain(x, out) and (filled == mask.size or not is_large and 2 * filled >= mask.size):
            # straight to its place, also where no row belongs: row 0, which is in the cache
            flat = out.reshape(mask.size, *out.shape[2:])
            np.take(x, positions.reshape(-1), axis=0, out=flat, mode="clip")
            out[~mask] = 0
        elif is_large:  # the rows of a client lie one after another
            for to, first, size in zip(out, positions[:, 0].tolist(), mask.sum(1).tolist()):
                to[:size] = x[first : first + size]
        else:
            out[mask] = x[positions[mask]]

    def _as_at_first(self, count, *rows):
        """Refuse x or y of another number or shape: a data source may give what it likes."""
        for value, (rest, _) in zip(rows, self.sent):
            if value.shape != (count, *rest):
                checks.fail(
                    "population",
                    f"{count} rows of shape {list(rest)}, as at first",
                    list(value.shape),
                    CHANGED,
                )

    def forget(self):
        """Let go of the pages of memory-mapped files: they stay in the system's cache, not in this
        process."""
        for x in self.arrays:
            memory_map = getattr(x, "_mmap", None)
            if memory_map is not None and hasattr(mmap, "MADV_DONTNEED") and x.mode in ("r", "r+"):
                memory_map.madvise(mmap.MADV_DONTNEED)


def _is_plain(x, out) -> bool:
    """Whether np.take writes rows of x to `out` itself: first it would copy all of an array that
    lies otherwise."""
    return x.flags.c_contiguous and x.flags.aligned and x.dtype == out.dtype


def _shares(size, most) -> list:
    """At most so many slices of clients that hold all rows, about equally many each."""
    total = np.cumsum(size)
    if not len(total) or not total[-1]:
        return []
    ends = np.searchsorted(total, total[-1] * np.arange(1, most) / most, side="right")
    ends = np.unique([0, *ends, len(size)])
    return [slice(a, b) for a, b in zip(ends, ends[1:]) if size[a:b].any()]


@functools.cache
def _readers():
    """The threads that copy rows, of all populations."""
    return concurrent.futures.ThreadPoolExecutor(READERS)


if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads
    os.register_at_fork(after_in_child=_readers.cache_clear)


def _of_rows(prepare_row):
    """A function of one row as one of many, on the host."""
    many: Any = jax.jit(jax.vmap(prepare_row)) if callable(prepare_row) else None
    refuse = lambda got: checks.fail(
        "population",
        "prepare_row, a JAX function of the x of one row to one array",
        got,
        "A NumPy function of many rows is `prepare`.",
    )

    def prepared(x):
        if x.dtype.itemsize > 4:  # devices compute in 32 bits
            checks.fail(
                "population",
                "x of at most 32 bits a number beside prepare_row",
                x.dtype,
                "Store it so, or use `prepare`.",
            )
        try:
            found = many(x)
        except Exception as error:  # of a function of the user's own
            refuse(checks.describe_error(error))
        if not isinstance(found, jax.Array):
            refuse(f"{type(found).__name__} of it")
        return np.asarray(found)

    return prepared


def _reader(rows, fields, prepare):
    """-> row numbers to (x, y), how many rows, and the arrays behind it."""

    def prepared(x):
        if prepare is None:
            return x
        try:
            prepared_rows = np.asarray(prepare(x))
        except Exception as error:  # of a function of the user's own
            checks.fail(
                "population",
                "prepare, a function from x [m, ...] to [m, ...]",
                checks.describe_error(error),
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
            checks.fail("population", need, checks.describe_error(error))
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


def _looked_at(host, n, test, classes, where) -> tuple[Any, Any, Any, Any]:
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
    stored = [np.asarray(v) for v in host.stored(np.arange(1))]
    kinds = host.kind if host.prepared is None else (stored[0].dtype, host.kind[1])
    host.sent = [(v.shape[1:], kind) for v, kind in zip(stored, kinds)]
    clients = len(host.offsets) - 1
    step = max(1, BLOCK // host.slots)
    for first in range(0, clients, step):
        positions, mask = host.rows(np.arange(first, min(first + step, clients)))
        total.own(positions[mask])
    return host, classes, total.words(np.diff(host.offsets)), like
