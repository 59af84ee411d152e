"""Whether an array that a function holds is a federation's own data: its rows, its labels, or some
of them.

What is found: x and y whole, the rows or labels of clients, any rows in any order, labels in the
order of the data or of a client; in another shape, and in another type.  What was computed from
them is not found.
"""

import collections
import math
import weakref
from typing import Any

import jax
import jax.core
import numpy as np

from ...core import checks
from ...core.records import Federation

BLOCK = 2**22  # numbers that are hashed at once
KNOWN = 8  # federations whose hashes are kept
_known: collections.OrderedDict = collections.OrderedDict()


def held(fed: Federation, arrays) -> str:
    """What one of `arrays` holds of the rows that clients own, in words; "" if none does."""
    if not checks.concrete((fed.x, fed.y, fed.index, fed.size)):
        return ""
    for array in arrays:
        if isinstance(array, jax.core.Tracer):
            continue
        for name in ("x", "y"):
            if array is getattr(fed, name) and np.size(array):
                return f"fed.{name} itself"
        try:
            value = np.asarray(array)
        except Exception:  # keys, references
            continue
        if value.dtype.kind in "fiub" or str(value.dtype) == "bfloat16":
            if rows_held := _numbers(fed, value):
                return rows_held
    return ""


def _numbers(fed, value):
    width = math.prod(fed.x.shape[1:] if fed.host is None else fed.host.shape)
    if value.size >= max(width, 4) and width > 1 and value.size % width == 0:
        rows = _canonical(value.reshape(-1, width))
        telling = (rows != rows[:, :1]).any(1)  # rows of one number are nobody's
        if telling.any() and _enough(
            rows, known := np.isin(_hash(rows), _of(fed).rows(value.dtype)) & telling, telling
        ):
            return f"{int(known.sum())} rows of fed.x"
    if value.size >= 4:
        for name, labels in _of(fed).labels().items():
            if _labels(value.reshape(-1), labels, fed.classes):
                return f"{value.size} {name}"
    return ""


def _enough(rows, known, telling):
    """Half of the rows, and not such as would be alike by chance."""
    count, kinds = int(known.sum()), np.unique(rows[known]).size
    many = kinds >= 6 or kinds >= 2 and count >= 4 and rows[known].size >= 64
    return count and 2 * count >= telling.sum() and many


def _labels(value, labels, classes):
    value = value.astype(np.float64)
    if value.size > labels.size:
        return False
    whole, kinds = value.size == labels.size, np.unique(value).size
    if kinds < 2 or labels.dtype.kind == "f" and kinds < 3:
        return False
    if classes and not whole:  # a count, or labels in order, may be anybody's
        if value.size < max(16, 2 * classes) or (np.diff(value) >= 0).all():
            return False
    text, pattern, start = value.tobytes(), labels.astype(np.float64).tobytes(), -1
    while (start := pattern.find(text, start + 1)) >= 0:
        if start % 8 == 0:
            return True
    return False


def _canonical(rows):
    return rows.astype(np.float32) + np.float32(0)  # one zero


def _hash(rows):
    """UInt64[n], exact in the bits of float32 rows."""
    words = np.ascontiguousarray(rows).view(np.uint32).astype(np.uint64)
    with np.errstate(over="ignore"):
        factors = np.cumprod(np.full(words.shape[1], 0x9E3779B97F4A7C15, np.uint64)) | np.uint64(1)
        mixed = (words ^ (words >> np.uint64(15))) * np.uint64(0xD6E8FEB86659FD93)
        return ((mixed ^ (mixed >> np.uint64(32))) * factors).sum(1, dtype=np.uint64)


class _Rows:
    """Hashes of the rows that clients own, and their labels: made when first asked for."""

    def __init__(self, fed):
        self.fed, self.hashes, self.found = weakref.ref(fed.x), {}, None
        self.host = fed.host
        self.arrays: Any = None if fed.host is not None else (fed.x, fed.y)
        self.index = [np.asarray(v) for v in (fed.index, fed.size, fed.test_index, fed.test_size)]

    def owned(self):
        """Row numbers, client after client."""
        index, size, test_index, test_size = self.index
        return [
            i[np.arange(i.shape[-1]) < s[:, None]]
            for i, s in ((index, size), (test_index, test_size))
            if len(i) == len(s)
        ]

    def read(self):
        """Blocks of rows: of a population the first block only, since more would be read from a
        disk."""
        if self.host is not None:
            yield np.asarray(
                self.host.read(
                    np.arange(
                        min(
                            int(self.host.offsets[-1]),
                            max(1, BLOCK // max(math.prod(self.host.shape), 1)),
                        )
                    )
                )[0]
            )
            return
        x, owned = np.asarray(self.arrays[0]), np.unique(np.concatenate(self.owned()))
        step = max(1, BLOCK // max(math.prod(x.shape[1:]), 1))
        for begin in range(0, len(owned), step):
            yield x[owned[begin : begin + step]]

    def rows(self, dtype):
        if dtype not in self.hashes:
            cast = (
                (lambda v: v.astype(dtype))
                if np.dtype(dtype).kind == "f" or str(dtype) == "bfloat16"
                else (lambda v: v)
            )
            parts = [_hash(_canonical(cast(b).reshape(len(b), -1))) for b in self.read()]
            self.hashes[dtype] = (
                np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.uint64)
            )
        return self.hashes[dtype]

    def labels(self):
        if self.found is None:
            if self.host is not None:
                self.found = {}
            else:
                x, y = (np.asarray(v) for v in self.arrays)
                both = {"labels": y} | ({"rows": x} if x.ndim == 1 else {})
                self.found = {f"{k} of fed.{n}": v for (k, v), n in zip(both.items(), "yx")}
                owned = next(iter(self.owned()), np.zeros(0, int))
                self.found |= {f"{k} of clients": v[owned] for k, v in both.items()}
        return self.found


def _of(fed) -> _Rows:
    name = id(fed.x if fed.host is None else fed.host), id(fed.y), id(fed.index)
    rows = _known.get(name)
    if rows is None or rows.fed() is not fed.x:
        rows = _known[name] = _Rows(fed)
        while len(_known) > KNOWN:
            _known.popitem(last=False)
    return rows
