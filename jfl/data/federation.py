"""From a dataset and a partition to a `core.Federation`: one copy of the rows and an index of who
owns them.

Axes: n rows, m test rows, C clients, N and Nt slots.  Imports jfl.core, jfl.core.checks and its
neighbours.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..core import checks
from ..core.hashing import own
from ..core.pytrees import on_device
from ..core.records import Federation
from .datasets import Dataset, as_array, checked_arrays, digest
from .partition import Partition, natural

__all__ = ["checksum", "describe", "federate"]


def federate(
    dataset: Dataset | Sequence | Mapping,
    partition: Partition | Callable | None = None,
    *,
    holdout: float = 0.0,
    test: Sequence | None = None,
    classes: int | None = None,
) -> Federation:
    """The rows of `dataset`, owned as `partition` says.

    Args:
        dataset: a Dataset, or a tuple (x, y, x_test, y_test); with `test` also a tuple (x, y).  Or
            the rows of each client: a dict {client: (x, y)}, or a list of tuples (x, y), each with
            as many rows as the client has; then `partition` is left out.
        partition: a partition, or any function of the labels [n] that gives a list of C index
            arrays.  Rows that nobody owns are allowed, rows with two owners are not.
            `partition.natural()` without arguments gives the rows to the owners that the dataset
            names.
        holdout: the fraction of each client's rows, in [0, 1), that is kept for its own test,
            rounded; at least one row stays on either side.  These rows leave the training rows, so
            the partition's min_rows counts both.
        test: (x_test, y_test), central test rows in place of the dataset's.  Where the rows of each
            client are given and `test` is not, these are all held-out rows.
        classes: as in `jfl.datasets.arrays`, where `dataset` is none of jfl.datasets.

    Returns:
        The federation: index Int32[C, N], N the rows of the largest client; test_index
        Int32[C, Nt], Nt = 0 without a holdout.  Slots past a client's size hold 0.  Rows of a
        client are in random order, from the partition's seed.

    Privacy:
        the dataset's caveats (a standardisation by private rows) go with the federation, and from
        there to every guarantee.

    Raises:
        ValueError: on data that `datasets.arrays` refuses, clients without rows, or with one row
            and a holdout.

    Example:
        >>> from jfl.data import datasets, partition
        >>> fed = federate(datasets.digits(), partition.iid(clients=10), holdout=0.25)
        >>> fed.index.shape, fed.test_index.shape
        ((10, 108), (10, 36))
    """
    checks.require_nonnegative("federate", holdout=holdout)
    if np.ndim(holdout) or holdout >= 1:
        checks.fail(
            "federate",
            "holdout in [0, 1)",
            f"holdout={holdout!r}",
            "0.2 keeps a fifth of each client.",
        )
    everyone = _of_clients(dataset, partition, holdout, test)
    if everyone is not None:
        dataset, partition, test = everyone
    x, y, x_test, y_test, classes = _parts(dataset, test, classes)
    if not callable(partition):
        checks.fail(
            "federate",
            "a partition of jfl.partition, or a function of the labels",
            checks.short_repr(partition),
        )
    dealer = _bound(partition, dataset)
    try:
        rows = list(dealer(y))
    except TypeError as error:  # of a function of the user's own, or of what it gives
        checks.fail(
            "federate",
            "a partition that gives a list of row numbers for each client",
            checks.describe_error(error),
        )
    rows = _owned(rows, len(y))
    rng = np.random.default_rng(
        [getattr(partition, "seed", 0), 1]
    )  # not the stream that dealt the rows
    rows = [rng.permutation(part) for part in rows]
    kept = [_held_out(len(part), holdout) for part in rows]
    short = [client for client, part in enumerate(rows) if holdout and len(part) < 2]
    if short:
        checks.fail(
            "federate",
            "two rows a client for a holdout",
            f"one row at {_named(short)}",
            "Give the partition min_rows=2, or take fewer clients.",
        )
    index, size = _padded([part[k:] for part, k in zip(rows, kept, strict=True)])
    held_out = [part[:k] for part, k in zip(rows, kept, strict=True)]
    test_index, test_size = _padded(held_out)
    if everyone is not None and test is None:
        of_all = np.concatenate(held_out)
        x_test, y_test = x[of_all], y[of_all]
    # copies: asarray may share memory with the caller, who could change the rows of a run
    # later.
    return Federation(
        *(
            own(on_device(value))
            for value in (x, y, index, size, x_test, y_test, test_index, test_size)
        ),
        classes=classes or 0,
        caveats=tuple(getattr(dataset, "caveats", ())),
    )


def checksum(fed: Federation) -> str:
    """16 hexadecimal digits of the sha256 over all arrays: rows, labels, owners, test sets.

    For a population the digest of its rows takes the place of the rows, so the result differs from
    that of the same rows on the device.
    """
    return digest(
        *_arrays(fed), np.int64(fed.classes), *([] if fed.host is None else [fed.host.identity])
    )[:16]


def describe(fed: Federation, partition: Partition | None = None) -> dict:
    """Facts for the manifest, as plain Python values.

    Args:
        fed: the federation.
        partition: what made it; with it the facts say what it had to change.

    Returns:
        Among others:

        - rows: training rows with an owner; slots: the index entries that they are stored in.
        - min_size, median_size, max_size: training rows of a client.
        - held_out: held-out rows of all clients; test_rows: central ones.
        - label_spread: the mean over clients of the total variation distance between their class
          shares and those of all.  0 is iid, 1 - 1/classes is one class each (of equal classes);
          None for regression.
        - partition: its arguments and its note, if it was given.
    """
    checks.require_device_rows("describe", fed)
    _, y, index, size, _, y_test, _, test_size = _arrays(fed)
    facts = {
        "clients": len(size),
        "rows": int(size.sum()),
        "slots": int(index.size),
        "min_size": int(size.min()),
        "median_size": float(np.median(size)),
        "max_size": int(size.max()),
        "held_out": int(test_size.sum()),
        "test_rows": len(y_test),
        "classes": fed.classes,
        "label_spread": _spread(y, index, size, fed.classes),
        "checksum": checksum(fed),
        "caveats": list(fed.caveats),
    }
    words: Any = partition
    if hasattr(words, "describe"):
        facts["partition"] = words.describe(y)
    return facts


def _bound(partition, dataset):
    """The partition, with the dataset's owners where it asks for them."""
    if not isinstance(partition, Partition) or partition.split is not None:
        return partition
    owners = getattr(dataset, "owners", None)
    if owners is None:
        checks.fail(
            "federate",
            "a dataset that names the owners of its rows for partition.natural()",
            repr(getattr(dataset, "name", type(dataset).__name__)),
            "Pass them, partition.natural(owners), or take another partition.",
        )
    return natural(owners, partition.seed)


def _of_clients(dataset, partition, holdout, test):
    """Where the rows of each client are given: all rows, who owns them, and the test rows, with
    those of all clients in the place of none; else None."""
    pairs = dataset
    if isinstance(dataset, Mapping):
        pairs = list(dataset.values())
    elif not (isinstance(dataset, list) and all(isinstance(p, tuple) for p in dataset)):
        return None
    where = "federate({client: (x, y)})"
    if partition is not None:
        checks.fail(where, "no partition: each client has its rows", checks.short_repr(partition))
    names = list(dataset) if isinstance(dataset, Mapping) else list(range(len(pairs)))
    if not pairs:
        checks.fail(where, "a client at least", "none")
    for name, pair in zip(names, pairs, strict=True):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            checks.fail(where, f"(x, y) for client {name!r}", checks.short_repr(pair))
    parts = [
        [as_array(where, f"{letter} of client {name!r}", pair[i]) for i, letter in enumerate("xy")]
        for name, pair in zip(names, pairs, strict=True)
    ]
    for name, (x, y) in zip(names, parts, strict=True):
        if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
            got = f"x of shape {list(x.shape)}, y of shape {list(y.shape)}"
            checks.fail(where, f"(x, y) of as many rows for client {name!r}", got)
    # a client without rows would vanish, and every later client would move up by one
    sizes = {name: len(y) for name, (_, y) in zip(names, parts, strict=True)}
    if empty := [name for name, size in sizes.items() if size == 0]:
        checks.fail(
            where, "rows for every client", f"none for {_named(empty)}", "Leave these clients out."
        )
    if short := [name for name, size in sizes.items() if holdout and size < 2]:
        checks.fail(
            where,
            "two rows a client for a holdout",
            f"one row for {_named(short)}",
            "Leave these clients out, or pass test=(x_test, y_test) without a holdout.",
        )
    if test is None and not holdout:
        checks.fail(
            where,
            "test rows",
            "none",
            "Pass test=(x_test, y_test), or holdout=0.2 for a fifth of each client's rows.",
        )
    x, y = (_joined(where, [pair[i] for pair in parts], names, "xy"[i]) for i in (0, 1))
    owner = np.repeat(np.arange(len(pairs)), list(sizes.values()))
    given = (x, y, x[:1], y[:1]) if test is None else (x, y)
    return given, natural(owner), test


def _joined(where, parts, names, letter):
    shapes = {name: part.shape[1:] for name, part in zip(names, parts, strict=True)}
    if len(set(shapes.values())) > 1:
        few = ", ".join(f"{name!r} {list(shape)}" for name, shape in list(shapes.items())[:6])
        checks.fail(
            where,
            f"rows of {letter} of one shape",
            few,
            "Pad sequences, and mask their labels with -1.",
        )
    return np.concatenate(parts)


def _parts(dataset, test, classes) -> tuple[Any, Any, Any, Any, Any]:
    where = f"federate({dataset.name!r})" if isinstance(dataset, Dataset) else "federate"
    if isinstance(dataset, Dataset):
        if classes not in (None, dataset.classes):
            checks.fail(where, f"the dataset's classes, {dataset.classes}", f"classes={classes}")
        classes = dataset.classes
    values = dataset[:4] if isinstance(dataset, Dataset) else dataset
    if test is not None and not (isinstance(test, tuple | list) and len(test) == 2):
        checks.fail(where, "test=(x_test, y_test)", type(test).__name__)
    if (
        not isinstance(values, tuple | list)
        or len(values) != 4
        and (len(values) != 2 or test is None)
    ):
        got = (
            f"{len(values)} arrays" if isinstance(values, tuple | list) else type(dataset).__name__
        )
        checks.fail(
            where,
            "a Dataset, (x, y, x_test, y_test), or (x, y) and test=(x_test, y_test)",
            got,
            "See jfl.datasets.arrays.",
        )
    x, y = values[:2]
    held_out: Any = values[2:] if test is None else test
    x_test, y_test = held_out
    return checked_arrays(where, x, y, x_test, y_test, classes)


def _owned(rows, n):
    """The partition's lists, tested: a row with two owners would be charged to each, and protected
    by neither."""
    rows = [
        checks.as_array("federate", f"rows of client {client}", part)
        for client, part in enumerate(rows)
    ]
    empty = [client for client, part in enumerate(rows) if part.size == 0]
    if empty or not rows:
        checks.fail(
            "federate",
            "rows for every client",
            f"none for {_named(empty)}" if empty else "no clients",
            "Give the partition min_rows=1 or more, or take fewer clients.",
        )
    for client, part in enumerate(rows):
        if part.ndim != 1 or part.dtype.kind not in "iu" or part.min() < 0 or part.max() >= n:
            checks.fail(
                "federate",
                f"a partition that gives row numbers in [0, {n})",
                f"{part.dtype}{list(part.shape)} for client {client}",
            )
    owners = np.bincount(np.concatenate(rows), minlength=n)
    if owners.max() > 1:
        checks.fail(
            "federate",
            "one owner a row",
            f"row {owners.argmax()} given {owners.max()} times",
            "Let the partition use each row once.",
        )
    return rows


def _named(clients):
    return f"client(s) {', '.join(map(repr, clients[:10]))}" + (
        f" and {len(clients) - 10} more" * (len(clients) > 10)
    )


def _held_out(size, holdout):
    return min(max(round(holdout * size), 1), size - 1) if holdout else 0


def _padded(rows):
    size = np.array([len(part) for part in rows], np.int32)
    index = np.zeros((len(rows), size.max()), np.int32)
    index[np.arange(index.shape[1]) < size[:, None]] = np.concatenate(rows)
    return index, size


def _arrays(fed):
    return [
        np.asarray(value)
        for value in (
            fed.x,
            fed.y,
            fed.index,
            fed.size,
            fed.x_test,
            fed.y_test,
            fed.test_index,
            fed.test_size,
        )
    ]


def _spread(y, index, size, classes):
    if not classes:
        return None
    filled = np.arange(index.shape[1]) < size[:, None]
    cells = np.repeat(np.arange(len(size)), size) * classes + y[index[filled]]
    counts = np.bincount(cells, minlength=len(size) * classes).reshape(len(size), classes)
    shares, whole = counts / size[:, None], counts.sum(0) / counts.sum()
    return float(np.abs(shares - whole).sum(1).mean() / 2)
