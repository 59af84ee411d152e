"""Populations that do not fit on the device: rows stay on the host or on disk, and each round
fetches the rows of its cohort.

Shapes use n rows, C clients, N slots of the largest client, and K slots of a cohort.
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
from .rows import check_arrays

NUMBERS_PER_READ = 2**22  # while all rows are checked
NUM_THREADS = 4
# One thread copies a cohort of this size as fast as several do.
MAX_SINGLE_THREAD_BYTES = 2**20
MAX_PART_BYTES = 2**24  # that a thread copies at once
# For clients of at least this size, a loop over clients costs little compared to copying.
LARGE_CLIENT_BYTES = 2**16
CHANGED = "Rows must not change after jfl.population: make the population again."
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
    """Return a federation whose rows stay on the host; `jfl.simulate` fetches those of each cohort
    while the device works.

    Args:
        rows: (x, y), two arrays of n rows, which may be memory-mapped (np.load(...,
            mmap_mode="r")); or a data source with len and [i], or __getitems__, whose items are (x,
            y) or dicts with `fields` (such as TFDS's data_source or ArrayRecord).
        sizes: Int[C], number of rows of each client, in the order of the rows.
        test: (x_test, y_test), central test rows, which are kept on the device.
        order: Int[n], if the rows of a client are not contiguous: the row numbers of the first
            client, then of the second, and so on, each row once. None means rows are in order.
        classes: number of classes. 0 means regression, and None means one more than the largest
            label.
        fields: names of x and y if the items of `rows` are dicts.
        prepare: a NumPy function, run on the host, that turns stored x [m, ...] into features [m,
            ...], such as lambda x: x / np.float32(255).
        prepare_row: the same for one row, as a JAX function that runs on the device, such as lambda
            x: x / jnp.float32(255). Rows are transferred as stored, and pixels as bytes have a
            quarter of the size. The last digits may differ from NumPy's, which makes other data and
            so other noise.
        caveats: sentences about the rows to be printed with every guarantee.

    Returns:
        The federation: x [0, ...], index Int32[C, 0], size Int[C]; fed.host holds the rows.

    Privacy:
        As for `federate`. All rows are read once by this call, for their checks and for the digest
        that the noise key is derived from. Do not change them later.

    Raises:
        ValueError: for rows that `datasets.arrays` rejects, sizes that do not add up, or an invalid
            order.

    Costs:
        12 bytes per client on the host and 4 on the device, and the stored rows of two cohorts.
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
                "one owner per row",
                f"row {np.bincount(order).argmax()} in order more than once",
            )
    if not isinstance(test, tuple | list) or len(test) != 2:
        checks.fail(where, "test=(x_test, y_test)", type(test).__name__)
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    host = Population(stored, arrays, bool(arrays) and prepare is None, offsets, order, prepare_row)
    host, classes, identity, like = _scan_rows(host, n, test, classes, where)
    x_test, y_test = check_arrays(where, like[0], like[1], test[0], test[1], classes)[2:4]
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
    """The rows of a population on the host. It equals only itself, so programs are compiled for it
    once.

    `stored` reads rows as they are transferred, `read` as a model gets them, and `direct` says that
    `stored` returns the rows of `arrays` unchanged. `kind` holds the types of x and y that `read`
    returns, `shape` the shape of a row of x, and `sent` the shapes and types of both as they are
    transferred.
    """

    def __init__(self, stored, arrays, direct, offsets, order, prepare_row):
        self.stored, self.arrays, self.direct = stored, arrays, direct
        self.offsets, self.order, self.slots = offsets, order, int(np.diff(offsets).max())
        self.prepare_row = prepare_row
        self.prepared = None if prepare_row is None else _vectorise(prepare_row)
        self.kind: Any = None
        self.identity: Any = None
        self.shape: Any = None
        self.sent: Any = None
        self.classes = 0  # of y

    def read(self, positions):
        """Return x and y of rows as a model gets them."""
        x, y = (np.asarray(v) for v in self.stored(positions))
        if self.prepared is not None:
            x = self.prepared(x)
            x = x if self.kind is None else x.astype(self.kind[0], copy=False)
        return x, y

    def rows(self, ids):
        """Return row numbers of clients [m, N] and a mask Bool[m, N]; an id past the end has no
        rows.
        """
        first, size = self._spans(ids)
        mask = np.arange(self.slots) < size[:, None]
        positions = np.where(mask, first[:, None] + np.arange(self.slots), 0)
        return (positions if self.order is None else np.where(mask, self.order[positions], 0)), mask

    def _spans(self, ids):
        """Return where the rows of clients begin, and how many there are."""
        exists = ids < len(self.offsets) - 1
        first = self.offsets[np.where(exists, ids, 0)]
        return first, np.where(exists, self.offsets[np.where(exists, ids, 0) + 1] - first, 0)

    def fetch(self, ids):
        """Return x [m, N, ...] and y [m, N] of clients `ids`, as they are transferred; empty slots
        hold 0.
        """
        ids = np.asarray(ids)
        size = self._spans(ids)[1]
        out = tuple(np.zeros((len(ids), self.slots, *rest), kind) for rest, kind in self.sent)
        use_threads = self.direct and out[0].nbytes > MAX_SINGLE_THREAD_BYTES
        num_parts = max(NUM_THREADS, -(-out[0].nbytes // MAX_PART_BYTES)) if use_threads else 1
        parts = _split_clients(size, num_parts)
        fill = lambda part: self._fill(ids[part], [v[part] for v in out])
        if len(parts) > 1:
            list(_thread_pool().map(fill, parts))
        elif parts:  # otherwise all slots are empty
            fill(parts[0])
        self.release_pages()
        return out

    def _fill(self, ids, out):
        """Write the rows of clients into their slots of a cohort."""
        positions, mask = self.rows(ids)
        if self.direct:
            labels = self.arrays[1][positions[mask]]
            self._copy(positions, mask, out[0])
        else:
            x, labels = (np.asarray(v) for v in self.stored(positions[mask]))
            for value, (shape, _) in zip((x, labels), self.sent):
                if value.shape != (mask.sum(), *shape):  # NumPy might broadcast it
                    expected = f"{mask.sum()} rows of shape {list(shape)}, as before"
                    checks.fail("population", expected, list(value.shape), CHANGED)
            out[0][mask] = x
        if self.classes and not 0 <= labels.min() <= labels.max() < self.classes:
            checks.fail(
                "population",
                f"labels below {self.classes}, as before",
                f"{labels.min()} to {labels.max()}",
                CHANGED,
            )
        out[1][mask] = labels

    def _copy(self, positions, mask, out):
        """Copy rows of arrays into their slots, in the fastest way for their layout."""
        x, filled = self.arrays[0], mask.sum()
        is_large = self.order is None and out[:1].nbytes >= LARGE_CLIENT_BYTES
        # With any other layout np.take would first copy all of x.
        is_plain = x.flags.c_contiguous and x.flags.aligned and x.dtype == out.dtype
        if is_plain and (filled == mask.size or not is_large and 2 * filled >= mask.size):
            # Empty slots get row 0, which is in the processor's cache, and are set to zero after.
            flat = out.reshape(mask.size, *out.shape[2:])
            np.take(x, positions.reshape(-1), axis=0, out=flat, mode="clip")
            out[~mask] = 0
        elif is_large:  # the rows of a client are contiguous
            for to, first, size in zip(out, positions[:, 0].tolist(), mask.sum(1).tolist()):
                to[:size] = x[first : first + size]
        else:
            out[mask] = x[positions[mask]]

    def release_pages(self):
        """Release the pages of memory-mapped files; they stay in the system's cache, not in this
        process.
        """
        for x in self.arrays:
            memory_map = getattr(x, "_mmap", None)
            if memory_map is not None and hasattr(mmap, "MADV_DONTNEED") and x.mode in ("r", "r+"):
                memory_map.madvise(mmap.MADV_DONTNEED)


def _split_clients(size, max_parts) -> list:
    """Return at most `max_parts` slices of clients with about equally many rows each."""
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


def _vectorise(prepare_row):
    """Turn a JAX function of one row into a function of many rows on the host."""
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
                "x with at most 32 bits per number when prepare_row is given",
                x.dtype,
                "Store x with 32 bits, or use `prepare`.",
            )
        try:
            rows = many(x)
        except Exception as error:  # raised by a user's function
            refuse(checks.describe_error(error))
        if not isinstance(rows, jax.Array):
            refuse(f"one that returns {type(rows).__name__}")
        return np.asarray(rows)

    return prepared


def _reader(rows, fields, prepare):
    """Return a function from row numbers to (x, y), the number of rows, and the arrays that hold
    them.
    """

    def prepared(x):
        if prepare is None:
            return x
        try:
            prepared_rows = np.asarray(prepare(x))
        except Exception as error:  # raised by a user's function
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
        expected = "rows = (x, y) with the same number of rows, or a data source"
        try:
            arrays = [v if isinstance(v, np.ndarray) else np.asarray(v) for v in rows]
        except ValueError as error:  # rows of unequal lengths
            checks.fail("population", expected, checks.describe_error(error))
        shapes = [list(v.shape) for v in arrays]
        if len(arrays) != 2 or shapes[0][:1] != shapes[1] or len(shapes[1]) != 1:
            checks.fail("population", expected, f"{shapes}")
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


def _scan_rows(host, n, test, classes, where) -> tuple[Any, Any, Any, Any]:
    """Read all rows once: check them, determine their types, and hash them as `federate` would."""
    total, max_label, like = Rows(), -1, None
    step = max(1, NUMBERS_PER_READ // max(1, np.asarray(host.read(np.arange(1))[0]).size))
    for first in range(0, n, step):
        positions = np.arange(first, min(first + step, n))
        x, y = (np.asarray(v) for v in host.read(positions))
        if x.dtype.kind == "f":
            x = x.astype(np.float32, copy=False)
        num_classes = (
            classes
            if classes is not None or y.dtype.kind == "f"
            else max(int(y.max(initial=0)), max_label) + 1
        )
        try:
            x, y, *_, classes_of_block = check_arrays(
                f"{where}, rows from {first} on", x, y, x[:1], y[:1], num_classes
            )
        except ValueError:
            host.release_pages()
            raise
        if like is not None and (x.shape[1:], x.dtype, y.dtype) != (like[0].shape[1:], *host.kind):
            checks.fail(
                where,
                f"rows of one type and shape, {like[0].dtype}{list(like[0].shape[1:])}",
                f"{x.dtype}{list(x.shape[1:])}",
            )
        like, host.kind, max_label = (
            (x[:1], y[:1]),
            (x.dtype, y.dtype),
            max(max_label, int(classes_of_block) - 1),
        )
        total.add(x, y)
        host.release_pages()
    if classes is None:
        classes = (
            max(max_label, int(np.max(test[1], initial=0))) + 1
            if host.kind[1].kind == "i"
            else None
        )
    stored = [np.asarray(v) for v in host.stored(np.arange(1))]
    kinds = host.kind if host.prepared is None else (stored[0].dtype, host.kind[1])
    host.sent = [(v.shape[1:], kind) for v, kind in zip(stored, kinds)]
    clients = len(host.offsets) - 1
    step = max(1, NUMBERS_PER_READ // host.slots)
    for first in range(0, clients, step):
        positions, mask = host.rows(np.arange(first, min(first + step, clients)))
        total.own(positions[mask])
    return host, classes, total.words(np.diff(host.offsets)), like
