"""Populations that do not fit on the device.

Rows stay on the host or on disk, and each round fetches the rows of its cohort.  Shapes use n rows,
C clients, and N for the number of rows of the largest client.
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
from ..core.hashing import RowHasher, mark_immutable
from ..core.records import Federation
from .rows import check_arrays

CHANGED = "Rows must not change after jfl.population: make the population again."
# The numbers that are in memory at a time while all rows are checked.
NUMBERS_PER_READ = 2**22
NUM_THREADS = 4
# One thread copies a cohort of this size as fast as several do.
MAX_SINGLE_THREAD_BYTES = 2**20
# The largest part of a cohort that a thread copies at a time.
MAX_PART_BYTES = 2**24
__all__ = ["population"]


def population(
    rows: Any,
    sizes: Sequence[int] | np.ndarray,
    *,
    test: Sequence,
    order: Sequence[int] | np.ndarray | None = None,
    classes: int | None = None,
    fields: Sequence[str] = ("image", "label"),
    prepare_row: Callable | None = None,
    caveats: tuple = (),
) -> Federation:
    """Return a federation whose rows stay on the host.

    `jfl.simulate` fetches the rows of the next cohort while the device works on the current one.

    Args:
        rows: (x, y), two arrays of n rows, which may be memory-mapped (np.load(...,
            mmap_mode="r")). Or a data source such as TFDS's data_source or ArrayRecord, with `len`
            and either [i] or __getitems__, whose items are (x, y) or dicts.
        sizes: Int[C], number of rows of each client, in the order of the rows.
        test: (x_test, y_test), central test rows, which are kept on the device.
        order: the row numbers of the first client, then those of the second, and so on, each row
            once. None means that the rows of each client are contiguous, in the order of clients.
        classes: number of classes. 0 means regression, and None means one more than the largest
            label.
        fields: the names of x and y if the items of `rows` are dicts.
        prepare_row: a JAX function that runs on the device and turns one stored row into features,
            such as lambda x: x / jnp.float32(255). Rows are transferred as stored, so pixels take a
            quarter of the bytes of floats. Its results may differ in the last digits from those of
            NumPy.  The noise key of a run depends on a digest of the data, so the noise then
            differs as well.
        caveats: sentences about the rows that are printed with every guarantee.

    Returns:
        The federation: x [0, ...], index Int32[C, 0], size Int[C]. `fed.host` is a Population that
            holds the rows.

    Privacy:
        Caveats are treated as in `federate`. This call reads all rows once, to check them and to
        compute the digest from which noise is derived. Do not change the rows later.

    Raises:
        ValueError: for rows that `datasets.arrays` rejects, sizes that do not add up, or an invalid
            order.

    Costs:
        A population takes 12 bytes per client on the host and 4 on the device, and memory for the
        stored rows of two cohorts. Several threads copy arrays.

    Example:
        >>> x, y = np.eye(6, dtype=np.float32), np.arange(6) % 2
        >>> fed = population((x, y), sizes=[1, 2, 3], test=(x, y))
        >>> fed.host.fetch(np.array([2, 0]))[0].shape, fed.size.tolist()
        ((2, 3, 6), [1, 2, 3])
    """
    where = "population"
    arrays = isinstance(rows, tuple | list)
    if arrays:
        rows = tuple(map(np.asanyarray, rows))
        if len(rows) != 2 or rows[1].ndim != 1 or rows[0].shape[:1] != rows[1].shape[:1]:
            shapes = ", ".join(str(list(v.shape)) for v in rows)
            checks.fail(where, "(x, y) with the same number of rows, or a data source", shapes)
    n = len(rows[1] if arrays else rows)
    sizes = checks.as_array(where, "sizes", sizes)
    if sizes.ndim != 1 or not sizes.size or sizes.dtype.kind not in "iu" or sizes.min() < 1:
        checks.fail(where, "sizes Int[C], each at least 1", f"{sizes.dtype}{list(sizes.shape)}")
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    if order is None and offsets[-1] > n:
        checks.fail(where, f"sizes that add up to at most {n} rows", offsets[-1])
    if order is not None:
        order = checks.as_array(where, "order", order)
        is_rows = order.shape == (offsets[-1],) and order.dtype.kind in "iu"
        if not is_rows or order.min() < 0 or order.max() >= n or np.bincount(order).max() > 1:
            checks.fail(
                where,
                f"order, {offsets[-1]} different row numbers below {n}",
                f"{order.dtype}{list(order.shape)}",
                "Each row has one owner.",
            )
    host = Population(rows, arrays, offsets, order, fields, prepare_row)
    x_test, y_test = _scan_rows(where, host, n, test, classes)
    none = jnp.zeros((len(sizes), 0), jnp.int32)
    values = (
        jnp.zeros((0, *host.shape), host.kind[0]),
        jnp.zeros(0, host.kind[1]),
        none,
        jnp.asarray(sizes.astype(np.int32)),
        jnp.array(x_test),
        jnp.array(y_test),
        none,
        jnp.zeros(len(sizes), jnp.int32),
    )
    caveats = checks.as_tuple(where, caveats=caveats)
    return Federation(
        *map(mark_immutable, values), classes=host.classes, caveats=caveats, host=host
    )


class Population:
    """The rows of a population on the host.

    Two Population objects are never equal, so programs are compiled again for each of them.

    Attributes:
        source: (x, y), or a data source.
        arrays: (x, y), or () for a data source.
        offsets: Int[C + 1], the positions at which the rows of each client begin, in `order` if it
            is given, and otherwise in the source.
        slots: number of rows of the largest client.
        order: the row numbers of all clients, or None, as in `population`.
        kind: the dtypes of x and y as a model gets them.
        shape: the shape of a row of x as a model gets it.
        sent: the shapes and dtypes of a row of x and y as they are transferred to the device.
        classes: number of classes.
        identity: UInt32[4] of the data, from which noise is derived.
    """

    kind: Any = None
    identity: Any = None
    shape: Any = None
    sent: Any = None
    classes = 0

    def __init__(self, rows, arrays, offsets, order, fields, prepare_row):
        self.source, self.arrays = rows, rows if arrays else ()
        self.offsets, self.order, self.slots = offsets, order, int(np.diff(offsets).max())
        self.fields, self.prepare_row = fields, prepare_row
        self.prepare_rows = None if prepare_row is None else jax.jit(jax.vmap(prepare_row))

    def stored(self, positions):
        """Return x and y of the rows with numbers `positions`, as transferred to the device."""
        if self.arrays:
            x, y = (values[positions] for values in self.arrays)
            return x, y
        one_by_one = lambda positions: [self.source[i] for i in positions]
        items = getattr(self.source, "__getitems__", one_by_one)(positions.tolist())
        pairs = [[i[f] for f in self.fields] if isinstance(i, dict) else i for i in items]
        x, y = map(np.stack, zip(*pairs, strict=True))
        return x, y

    def read(self, positions):
        """Return x and y of the rows with numbers `positions`, as a model gets them."""
        x, y = self.stored(positions)
        if self.prepare_rows is not None:
            x = np.asarray(self.prepare_rows(x))
            x = x if self.kind is None else x.astype(self.kind[0], copy=False)
        return x, y

    def rows(self, ids):
        """Return the row numbers of clients `ids` [m], Int[m, N], and a mask Bool[m, N].

        The mask is False for padding.  An id past the end has no rows.
        """
        exists = ids < len(self.offsets) - 1
        first = self.offsets[np.where(exists, ids, 0)]
        size = np.where(exists, self.offsets[np.where(exists, ids, 0) + 1] - first, 0)
        mask = np.arange(self.slots) < size[:, None]
        positions = np.where(mask, first[:, None] + np.arange(self.slots), 0)
        return (positions if self.order is None else np.where(mask, self.order[positions], 0)), mask

    def fetch(self, ids):
        """Return x [m, N, ...] and y [m, N] of clients `ids` [m], as transferred to the device.

        Padding is 0.
        """
        positions, mask = self.rows(np.asarray(ids))
        out = tuple(np.zeros((*mask.shape, *shape), kind) for shape, kind in self.sent)
        use_threads = self.arrays and out[0].nbytes > MAX_SINGLE_THREAD_BYTES
        num_parts = max(NUM_THREADS, -(-out[0].nbytes // MAX_PART_BYTES)) if use_threads else 1
        parts = _split_clients(mask.sum(1), num_parts)
        fill = lambda part: self._fill(positions[part], mask[part], [v[part] for v in out])
        if len(parts) > 1:
            list(_thread_pool().map(fill, parts))
        elif parts:  # otherwise all slots are empty
            fill(parts[0])
        self.release_pages()
        return out

    def _fill(self, positions, mask, out):
        """Write the rows at `positions` [m, N] into x and y of a cohort where `mask` is True."""
        if self.arrays:
            out[1][mask] = self.arrays[1][positions[mask]]
            _copy(self.arrays[0], positions, mask, out[0])
        else:
            for value, (shape, _), slots in zip(self.stored(positions[mask]), self.sent, out):
                if value.shape != (mask.sum(), *shape):  # NumPy might broadcast it
                    expected = f"{mask.sum()} rows of shape {list(shape)}, as before"
                    checks.fail("population", expected, list(value.shape), CHANGED)
                slots[mask] = value
        labels = out[1][mask]
        if self.classes and labels.ndim == 1 and labels.size:
            lowest, highest = labels.min(), labels.max()
            if lowest < 0 or highest >= self.classes:
                expected = f"labels below {self.classes}, as before"
                checks.fail("population", expected, f"{lowest} to {highest}", CHANGED)

    def release_pages(self):
        """Release the memory pages of memory-mapped files; the system's cache keeps the data."""
        for x in self.arrays:
            memory_map = getattr(x, "_mmap", None)
            if memory_map is not None and hasattr(mmap, "MADV_DONTNEED") and x.mode in ("r", "r+"):
                memory_map.madvise(mmap.MADV_DONTNEED)


def _copy(x, positions, mask, out):
    """Write the rows of x at `positions` [m, N] to `out` where `mask` is True, and 0 elsewhere."""
    if x.flags.c_contiguous and x.flags.aligned and x.dtype == out.dtype:
        # Empty slots get row 0, which is in the processor's cache, and are set to zero after.
        flat = out.reshape(mask.size, *out.shape[2:])
        np.take(x, positions.reshape(-1), axis=0, out=flat, mode="clip")
        out[~mask] = 0
    else:  # np.take would first copy all of x
        out[mask] = x[positions[mask]]


def _split_clients(size, max_parts) -> list:
    """Return at most `max_parts` slices of clients with about equally many rows in each slice."""
    total = np.cumsum(size)
    if not len(total) or not total[-1]:
        return []
    targets = total[-1] * np.arange(1, max_parts) / max_parts
    ends = np.searchsorted(total, targets, side="right")
    ends = np.unique([0, *ends, len(size)])
    return [slice(a, b) for a, b in zip(ends, ends[1:]) if size[a:b].any()]


@functools.cache
def _thread_pool():
    """Return the threads that copy rows, shared by all populations."""
    return concurrent.futures.ThreadPoolExecutor(NUM_THREADS)


if hasattr(os, "register_at_fork"):  # a child process does not inherit threads
    os.register_at_fork(after_in_child=_thread_pool.cache_clear)


def _scan_rows(where, host, n, test, classes):
    """Read all rows once to check and hash them, and to find their types and classes.

    Sets the attributes of `host` that depend on the rows.  Returns the test rows in these types.
    """
    x_test, y_test = test
    stored = host.stored(np.arange(1))
    # Devices compute in 32 bits.
    if host.prepare_row is not None and stored[0].dtype.itemsize > 4:
        checks.fail(
            where,
            "x with at most 32 bits per number when prepare_row is given",
            stored[0].dtype,
            "Store x with 32 bits.",
        )
    hashes, num_classes = RowHasher(), 0
    first_row: Any = None
    step = max(1, NUMBERS_PER_READ // max(1, np.asarray(host.read(np.arange(1))[0]).size))
    for first in range(0, n, step):
        x, y = host.read(np.arange(first, min(first + step, n)))
        at = f"{where}, rows from {first} on"
        # Compare each block with the first row, in place of test rows: all have one type and shape.
        first_row = first_row or (x[:1], y[:1])
        x, y, *_, counted = check_arrays(at, x, y, first_row[0], first_row[1], classes)
        host.kind, num_classes = (x.dtype, y.dtype), max(num_classes, counted)
        hashes.add_rows(x, y)
        host.release_pages()
    x, y = first_row
    *_, x_test, y_test, counted = check_arrays(where, x, y, x_test, y_test, classes)
    host.classes = max(num_classes, counted)
    host.shape = x.shape[1:]
    host.sent = [(v.shape[1:], kind) for v, kind in zip(stored, host.kind)]
    if host.prepare_row is not None:
        host.sent[0] = stored[0].shape[1:], stored[0].dtype
    step = max(1, NUMBERS_PER_READ // host.slots)
    for first in range(0, len(host.offsets) - 1, step):
        positions, mask = host.rows(np.arange(first, min(first + step, len(host.offsets) - 1)))
        hashes.add_owned_rows(positions[mask])
    host.identity = hashes.words(np.diff(host.offsets))
    return x_test, y_test
