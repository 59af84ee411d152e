"""Construction of a `Federation`: one copy of the rows, and an index of the rows of each client.

Shapes use n rows, m test rows and C clients.  N and Nt are the largest numbers of training and
held-out rows of a client.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..core import checks
from ..core.hashing import mark_immutable
from ..core.lazy import explain_missing_package
from ..core.pytrees import on_device
from ..core.records import Federation
from .partition import Partition, natural
from .rows import ONE_ARRAY, Dataset, check_arrays, digest, reject_bytes

# The largest number of clients that `draw` shows.
MAX_BARS = 60

__all__ = ["checksum", "describe", "federate"]


def federate(
    dataset: Dataset | Sequence | Mapping,
    partition: Partition | Callable | None = None,
    *,
    holdout: float = 0.0,
    test: Sequence | None = None,
    classes: int | None = None,
) -> Federation:
    """Distribute the rows of a dataset over clients.

    Args:
        dataset: a Dataset, or a tuple (x, y, x_test, y_test), or (x, y) together with `test` or
            `holdout`. If each row already has a client, a dict {client: (x, y)} or a list with
            (x, y) for each client; `partition` is then not given.
        partition: a partition, or any function of the labels [n] that returns a list of C index
            arrays. A row may be in none of them, but not in two. `partition.natural()` without
            arguments uses the owners that the dataset names.
        holdout: the fraction of each client's rows, in [0, 1), that is held out to test the model
            on that client. The number of rows is rounded such that every client keeps at least one
            training row and one held-out row. The partition's min_rows counts both kinds.
        test: (x_test, y_test), central test rows that replace those of the dataset. If there are
            no test rows, the central test rows are all held-out rows.
        classes: as in `jfl.datasets.arrays`, if `dataset` is not from jfl.datasets.

    Returns:
        The federation: index Int32[C, N] and test_index Int32[C, Nt], where Nt = 0 without a
            holdout. Slots beyond a client's size hold 0. Rows of a client are in random order,
            drawn from the partition's seed.

    Privacy:
        The caveats of the dataset (such as standardisation with private rows) are copied to the
        federation, and from there to every guarantee.

    Raises:
        ValueError: for data that `datasets.arrays` rejects, and for clients without rows, or with
            a single row if there is a holdout.

    Example:
        >>> from jfl.data import datasets, partition
        >>> fed = federate(datasets.digits(), partition.iid(clients=10), holdout=0.25)
        >>> fed.index.shape, fed.test_index.shape
        ((10, 108), (10, 36))
    """
    checks.require_nonnegative("federate", single=True, holdout=holdout)
    if holdout >= 1:
        checks.fail(
            "federate",
            "holdout in [0, 1)",
            f"holdout={holdout!r}",
            "0.2 keeps a fifth of each client.",
        )
    clients = None
    if isinstance(dataset, Mapping):
        clients = dict(dataset)
    elif isinstance(dataset, list) and all(isinstance(pair, tuple) for pair in dataset):
        clients = dict(enumerate(dataset))
    if clients is not None:
        dataset, partition = _join_clients(clients, partition, holdout, test)
    lacks_test = test is None and isinstance(dataset, tuple) and len(dataset) == 2
    if lacks_test and holdout:
        test = tuple(dataset)  # takes the place of test rows until the held-out rows are known
    x, y, x_test, y_test, classes = _check_dataset(dataset, test, classes)
    owned = _assign_rows(dataset, partition, y, clients, min_rows=2 if holdout else 1)
    # This generator must not continue the stream that drew the partition.
    rng = np.random.default_rng([getattr(partition, "seed", 0), 1])
    owned = [rng.permutation(rows) for rows in owned]
    num_held_out = [
        min(max(round(holdout * len(rows)), 1), len(rows) - 1) if holdout else 0 for rows in owned
    ]
    index, size = _pad([rows[n:] for rows, n in zip(owned, num_held_out)])
    held_out = [rows[:n] for rows, n in zip(owned, num_held_out)]
    test_index, test_size = _pad(held_out)
    if lacks_test:
        rows = np.concatenate(held_out)
        x_test, y_test = x[rows], y[rows]
    arrays = x, y, index, size, x_test, y_test, test_index, test_size
    # `on_device` copies: jnp.asarray may share memory with the caller, who could change it later.
    return Federation(
        *(mark_immutable(on_device(value)) for value in arrays),
        classes=classes or 0,
        caveats=tuple(getattr(dataset, "caveats", ())),
    )


def checksum(fed: Federation) -> str:
    """Return a checksum of all rows, labels and owners of a federation, 16 hexadecimal digits.

    The checksum of a population differs from that of a federation with the same rows.
    """
    return digest(
        *_arrays(fed), np.int64(fed.classes), *([] if fed.host is None else [fed.host.identity])
    )[:16]


def describe(fed: Federation, partition: Partition | None = None) -> dict:
    """Return facts about a federation as a dict of plain Python values, for the record of a run.

    Args:
        fed: the federation.
        partition: the partition that made it, whose arguments and note are then included.

    Returns:
        A dict with these entries, among others:

        - rows: number of training rows with an owner; slots: C * N, the number of entries of the
          index, including padding.
        - min_size, median_size, max_size: training rows of a client.
        - held_out: held-out rows of all clients; test_rows: central test rows.
        - label_spread: the mean over clients of the total variation distance between their class
          frequencies and those of all rows. 0 means iid, and 1 - 1/classes means one class per
          client (for equal classes). None without one class per row.
        - partition: its arguments and its note.
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
        "label_spread": _label_spread(fed),
        "checksum": checksum(fed),
        "caveats": list(fed.caveats),
    }
    if isinstance(partition, Partition):
        facts["partition"] = partition.describe(y)
    return facts


def _join_clients(clients, partition, holdout, test):
    """Join the rows of all clients; return them, and a partition that assigns them again."""
    where, parts = "federate({client: (x, y)})", []
    if partition is not None:
        checks.fail(where, "no partition: each client has its rows", checks.short_repr(partition))
    if test is None and not holdout:
        checks.fail(
            where,
            "test rows",
            "none",
            "Pass test=(x_test, y_test), or holdout=0.2 for a fifth of each client's rows.",
        )
    for name, pair in clients.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            checks.fail(where, f"(x, y) for client {name!r}", checks.short_repr(pair))
        x = checks.as_array(where, f"x of client {name!r}", pair[0], ONE_ARRAY)
        y = checks.as_array(where, f"y of client {name!r}", pair[1], ONE_ARRAY)
        if y.ndim == 0 or x.shape[:1] != y.shape[:1]:
            shapes = f"x of shape {list(x.shape)}, y of shape {list(y.shape)}"
            checks.fail(where, f"x and y with the same number of rows for client {name!r}", shapes)
        # Joined with floats of other clients, bytes would pass as floats.
        reject_bytes(where, f"x of client {name!r}", x)
        parts.append((x, y))
    if not any(len(y) for _, y in parts):
        checks.fail(where, "at least one client with rows", "none")
    x, y = (np.concatenate([part for part in arrays if len(part)]) for arrays in zip(*parts))
    ends = np.cumsum([len(y) for _, y in parts])
    return (x, y), lambda labels: np.split(np.arange(len(labels)), ends[:-1])


def _check_dataset(dataset, test, classes) -> tuple[Any, ...]:
    """Return x, y, x_test, y_test and classes of a dataset, checked."""
    where, arrays = "federate", dataset
    if isinstance(dataset, Dataset):
        where, arrays = f"federate({dataset.name!r})", dataset[:4]
        if classes not in (None, dataset.classes):
            checks.fail(where, f"the dataset's classes, {dataset.classes}", f"classes={classes}")
        classes = dataset.classes
    arrays = tuple(arrays) if isinstance(arrays, tuple | list) else ()
    if test is not None and len(arrays) in (2, 4):
        arrays = (*arrays[:2], *test)
    if len(arrays) != 4:
        checks.fail(
            where,
            "a Dataset, (x, y, x_test, y_test), or (x, y) and test=(x_test, y_test)",
            f"{len(arrays)} arrays" if arrays else type(dataset).__name__,
            "holdout=0.2 takes test rows from each client's rows, and jfl.datasets.arrays(x, y) "
            "from all rows.",
        )
    return check_arrays(where, *arrays, classes)


def _assign_rows(dataset, partition, y, clients, min_rows):
    """Apply a partition to the labels y [n], and return the row numbers of each client.

    Rejects rows with two owners, because no guarantee would protect them, and clients without rows.
    """
    if not callable(partition):
        checks.fail(
            "federate",
            "a partition of jfl.partition, or a function of the labels",
            checks.short_repr(partition),
            "jfl.partition.natural() makes a client of each owner that a dataset names, and "
            "jfl.partition.iid(10) draws ten clients.",
        )
    if isinstance(partition, Partition) and partition.split is None:
        owners = getattr(dataset, "owners", None)
        if owners is None:
            checks.fail(
                "federate",
                "a dataset that names the owners of its rows for partition.natural()",
                repr(getattr(dataset, "name", type(dataset).__name__)),
                "Pass partition.natural(owners), or use another partition.",
            )
        partition = natural(owners, partition.seed)
    split: Any = partition
    owned = [np.asarray(rows) for rows in split(y)]
    names = clients or range(len(owned))
    short = [name for name, rows in zip(names, owned) if rows.size < min_rows]
    if short or not owned:
        more = f" and {len(short) - 10} more" if len(short) > 10 else ""
        names = ", ".join(map(repr, short[:10]))
        checks.fail(
            "federate",
            f"at least {min_rows} row(s) of each client",
            f"fewer for client(s) {names}{more}" if short else "no clients",
            "A holdout needs two. Raise min_rows of the partition, use fewer clients, or leave "
            "these clients out.",
        )
    for name, rows in zip(names, owned):
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= len(y):
            checks.fail(
                "federate",
                f"a partition that returns row numbers in [0, {len(y)})",
                f"{rows.dtype}{list(rows.shape)} for client {name!r}",
            )
    num_owners = np.bincount(np.concatenate(owned), minlength=len(y))
    if num_owners.max() > 1:
        checks.fail(
            "federate",
            "one owner per row",
            f"row {num_owners.argmax()} given {num_owners.max()} times",
            "Let the partition use each row once.",
        )
    return owned


def _pad(rows):
    """Return index Int32[C, N], padded with 0, and size Int32[C]."""
    size = np.array([len(part) for part in rows], np.int32)
    index = np.zeros((len(rows), size.max()), np.int32)
    index[np.arange(index.shape[1]) < size[:, None]] = np.concatenate(rows)
    return index, size


def _arrays(fed):
    """Return the arrays of a federation as NumPy arrays."""
    names = ("x", "y", "index", "size", "x_test", "y_test", "test_index", "test_size")
    return [np.asarray(getattr(fed, name)) for name in names]


def _class_counts(fed: Federation) -> np.ndarray | None:
    """Return the rows of each class, Int[C, classes]; None if rows have no class or several."""
    _, y, index, size, *_ = _arrays(fed)
    if not fed.classes or y.ndim > 1:
        return None
    filled = np.arange(index.shape[1]) < size[:, None]
    cells = np.repeat(np.arange(len(size)), size) * fed.classes + y[index[filled]]
    counts = np.bincount(cells, minlength=len(size) * fed.classes)
    return counts.reshape(len(size), fed.classes)


def _label_spread(fed: Federation) -> float | None:
    """Return the `label_spread` of `describe`."""
    counts = _class_counts(fed)
    if counts is None:
        return None
    shares, whole = counts / counts.sum(1, keepdims=True), counts.sum(0) / counts.sum()
    return float(np.abs(shares - whole).sum(1).mean() / 2)


def draw(fed: Federation, axes: Any = None) -> Any:
    """Plot the number of rows of each client, by class.  `fed.plot()` calls this function.

    Each client is a bar, and its classes have different colours.  Clients are sorted by the number
    of their rows, the largest first.  If there are more than 60, only 60 of them are shown, evenly
    spaced in this order.

    Args:
        fed: the federation.
        axes: the matplotlib axes to draw in.  None makes a new figure.

    Returns:
        The axes.  `fed.plot().figure.savefig("clients.svg")` writes a file.

    Example:
        >>> import jfl
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.dirichlet(5, 0.3))
        >>> fed.plot().get_ylabel()
        'rows'
    """
    checks.require_device_rows("Federation.plot", fed)
    with explain_missing_package():
        import matplotlib
        from matplotlib.figure import Figure

    if axes is None:
        axes = Figure(figsize=(8, 3.2), layout="constrained").add_subplot()
    sizes = np.asarray(fed.size)
    order = np.argsort(-sizes, kind="stable")
    shown = order[np.unique(np.linspace(0, len(order) - 1, min(MAX_BARS, len(order))).astype(int))]
    counts = _class_counts(fed)
    counts = sizes[shown, None] if counts is None else counts[shown]
    colours = matplotlib.colormaps["tab20"].resampled(max(counts.shape[1], 2))
    bottom, places = np.zeros(len(shown)), np.arange(len(shown))
    for label in range(counts.shape[1]):
        name = str(label) if counts.shape[1] > 1 else None
        axes.bar(places, counts[:, label], bottom=bottom, color=colours(label), label=name)
        bottom = bottom + counts[:, label]
    axes.set_xticks(places, [str(c) for c in shown], rotation=90, fontsize=7)
    label = f"{len(shown)} of {len(sizes):,} clients" if len(shown) < len(sizes) else "client"
    axes.set(xlabel=label, ylabel="rows", xlim=(-0.6, len(shown) - 0.4))
    axes.spines[["top", "right"]].set_visible(False)
    if 1 < counts.shape[1] <= 20:
        axes.legend(title="class", fontsize=7, ncols=2, loc="upper right", frameon=False)
    return axes
