"""Partitions: which rows belong to which client.  A partition is made first and applied to the
labels later.

Axes: n rows, C clients.  Host only (NumPy Generator).  Every partition depends on the labels and
its seed alone, and gives no row to two clients.  `labels`, `similarity` and `sizes` may leave rows
without an owner; the others use every row.

To add one, write a factory, and below it its function (labels [n], C, Generator, options) -> rows
of each client, and a note for the manifest ("": nothing to say).
"""

import copy
import dataclasses
import heapq
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np

from ..core import checks
from ..core.options import Setting

# those that a config can name; `sizes` takes a number for each client
__all__ = ["dirichlet", "iid", "labels", "natural", "power_law", "shards", "similarity"]


@dataclasses.dataclass(frozen=True)
class Partition:
    """`partition(labels)` gives a list of C index arrays; `assign` also says what was done to get
    there."""

    name: str
    clients: int
    seed: int
    split: (
        Callable | None
    )  # (labels Int or float[n], C, Generator) -> list of C index arrays, note; None: see natural

    def assign(self, labels) -> tuple[list[np.ndarray], str]:
        """Labels [n] -> rows of each client, and a sentence for the manifest (empty: nothing to
        say)."""
        where = f"partition.{self.name}"
        labels = checks.as_array(where, "labels", labels)
        if self.split is None:
            checks.fail(
                where,
                "the owners of the rows",
                "none",
                "federate(dataset, partition.natural()) takes the "
                "dataset's; else give one owner a row.",
            )
        if labels.ndim < 1:
            checks.fail(where, "labels of shape [n] or [n, ...]", f"shape {list(labels.shape)}")
        if len(labels) < self.clients:
            checks.fail(
                where,
                "at least one row a client",
                f"{len(labels)} rows for {self.clients} clients",
                "Take fewer clients.",
            )
        return self.split(labels, self.clients, np.random.default_rng(self.seed))

    def __call__(self, labels) -> list[np.ndarray]:
        return self.assign(labels)[0]

    def describe(self, labels) -> dict:
        """For the manifest: the arguments, and what had to be changed for these labels."""
        if self.split is None:
            return {"name": self.name, "seed": self.seed, "note": "owners from the dataset"}
        return {
            "name": self.name,
            "clients": self.clients,
            "seed": self.seed,
            **self.split.keywords,
            "note": self.assign(labels)[1],
        }


def iid(clients: int, seed: int = 0) -> Partition:
    """Rows dealt at random; sizes differ by at most one.

    >>> [len(rows) for rows in iid(3)([0, 1, 0, 1, 0, 1, 0])]
    [3, 2, 2]
    """
    return _partition("iid", clients, seed, partial(_split_iid))


def _split_iid(labels, clients, rng):
    return np.array_split(rng.permutation(len(labels)), clients), ""


def dirichlet(
    clients: int,
    alpha: float = 0.3,
    min_rows: Annotated[int, Setting(default=16)] = 1,
    balanced: bool = False,
    seed: int = 0,
) -> Partition:
    """Label skew: small alpha gives each client few classes, large alpha the mixture of the whole.

    Each class is cut by proportions ~ Dirichlet(alpha, ..., alpha) over the clients, so sizes vary
    too.  Then single rows, drawn at random from whoever is largest, move to clients below min_rows;
    their number is in the note.  min_rows=0 leaves clients without rows, which `federate` refuses.

    With balanced=True all sizes are equal (to one row).  In random order, each client draws a class
    mixture ~ Dirichlet(alpha * classes * share of each class), and takes its rows by it while the
    classes last.

    Args:
        alpha: concentration; small is heterogeneous.  It is > 0, and in both forms that of one
            class.
        min_rows: least rows of a client.

    Other Parameters:
        clients: number of clients.
        balanced: whether all clients get equally many rows.
        seed: of all draws.

    Raises:
        ValueError: if alpha is not positive and finite, min_rows * clients > rows, or labels are
            not integers.

    References:
        Yurochkin et al., ICML 2019, and Li et al., ICDE 2022 (NIID-Bench); balanced: Hsu et al.,
        arXiv:1909.06335.

    Example:
        >>> split = dirichlet(clients=4, alpha=0.1, min_rows=20)
        >>> min(len(rows) for rows in split(np.arange(100) % 10))
        20
    """
    checks.require_positive(
        "partition.dirichlet",
        "Small alpha is heterogeneous, 100 nearly iid.",
        single=True,
        alpha=alpha,
    )
    checks.require_integer("partition.dirichlet", min_value=0, min_rows=min_rows)
    checks.require_one_of("partition.dirichlet", (False, True), balanced=balanced)
    return _partition(
        "dirichlet",
        clients,
        seed,
        partial(
            _split_dirichlet,
            alpha=float(alpha),
            min_rows=int(min_rows),
            balanced=bool(balanced),
        ),
    )


def _split_dirichlet(labels, clients, rng, *, alpha, min_rows, balanced):
    _check_enough_rows("dirichlet", len(labels), clients, min_rows)
    by_class = [rng.permutation(rows) for rows in _rows_by_class("dirichlet", labels)]
    if balanced:
        return _balanced_dirichlet(by_class, clients, alpha, rng), ""
    rows = [[] for _ in range(clients)]
    for members in by_class:
        share = np.minimum(np.cumsum(rng.dirichlet(np.full(clients, alpha))), 1)
        # One random offset a class makes the expected rows of everybody exact; floor alone favours
        # the last client, rounding starves the first and the last.
        cuts = np.floor(share[:-1] * len(members) + rng.random()).astype(int)
        for client, part in enumerate(np.split(members, cuts)):
            rows[client].append(part)
    rows = [rng.permutation(np.concatenate(parts)).tolist() for parts in rows]
    moved = _fill_up(rows, min_rows)
    note = (
        f"{moved} of {len(labels)} rows moved so that every client has {min_rows}" if moved else ""
    )
    return [np.array(part, int) for part in rows], note


def _fill_up(rows, least) -> int:
    """Move single rows from the largest clients to those below `least`, in place; how many were
    moved.

    Rows are in random order inside a client, so the last is a random one.  The largest has more
    than `least` as long as anyone has less, because the mean is at least `least`.
    """
    moved, largest = 0, [(-len(part), client) for client, part in enumerate(rows)]
    heapq.heapify(largest)
    for poor in rows:
        while len(poor) < least:
            size, client = heapq.heappop(largest)
            poor.append(rows[client].pop())
            heapq.heappush(largest, (size + 1, client))
            moved += 1
    return moved


def _balanced_dirichlet(by_class, clients, alpha, rng):
    left = np.array([len(members) for members in by_class])
    total, start = left.sum(), [0] * len(left)
    prior = alpha * len(left) * left / total
    rows = [None] * clients
    sizes = np.full(clients, total // clients) + (np.arange(clients) < total % clients)
    for client in rng.permutation(clients):
        mixture, take = rng.dirichlet(prior), np.zeros(len(left), int)
        while (need := sizes[client] - take.sum()) > 0:
            open_ = np.where(left > take, mixture, 0)
            if not open_.sum() > 0:  # its classes are used up: it takes what is there
                open_ = (left - take).astype(float)
            take = np.minimum(take + rng.multinomial(need, open_ / open_.sum()), left)
        rows[client] = np.concatenate(
            [m[s : s + t] for m, s, t in zip(by_class, start, take, strict=True)]
        )
        start, left = [s + t for s, t in zip(start, take, strict=True)], left - take
    return rows


def shards(clients: int, classes_per_client: int = 2, seed: int = 0) -> Partition:
    """Label shards: every client holds rows of exactly `classes_per_client` classes.

    There are clients * classes_per_client shards of one class each, as equal in size as the classes
    allow (large classes are cut into more).  They are dealt at random, so that no client gets a
    class twice.

    Sizes follow from the classes; `labels` fixes the sizes instead.

    Args:
        classes_per_client: classes each client holds.

    Other Parameters:
        clients: number of clients.
        seed: of all draws.

    Raises:
        ValueError: if there are fewer classes than classes_per_client, fewer shards than classes (a
            row would have no owner), or too few rows of the classes to cut.

    References:
        McMahan et al., AISTATS 2017, section 3; their shards, cut at equal sizes, may straddle two
        classes.

    Example:
        >>> y = np.arange(100) % 10
        >>> {len(np.unique(y[rows])) for rows in shards(clients=10, classes_per_client=3)(y)}
        {3}
    """
    checks.require_integer("partition.shards", classes_per_client=classes_per_client)
    return _partition(
        "shards",
        clients,
        seed,
        partial(_split_shards, classes_per_client=int(classes_per_client)),
    )


def _split_shards(labels, clients, rng, *, classes_per_client):
    by_class = [rng.permutation(rows) for rows in _rows_by_class("shards", labels)]
    counts = _shard_counts(
        np.array([len(members) for members in by_class]), clients, classes_per_client
    )
    rows, room = [[] for _ in range(clients)], np.full(clients, classes_per_client)
    for which in rng.permutation(len(by_class)):
        # Those with most room first, ties at random: a deal that always ends with every client
        # full.
        owners = np.lexsort((rng.random(clients), -room))[: counts[which]]
        room[owners] -= 1
        for client, part in zip(owners, np.array_split(by_class[which], len(owners)), strict=True):
            rows[client].append(part)
    return [np.concatenate(parts) for parts in rows], ""


def _shard_counts(sizes, clients, per_client):
    """Shards of each class: at least one, at most one a client or a row, the largest shard cut
    first."""
    total, most = clients * per_client, np.minimum(sizes, clients)
    if per_client > len(sizes):
        checks.fail(
            "partition.shards",
            "classes_per_client <= number of classes",
            f"classes_per_client={per_client} for {len(sizes)} classes",
        )
    if total < len(sizes):
        checks.fail(
            "partition.shards",
            "a shard for every class, so that every row has an owner",
            f"{clients} clients * {per_client} classes = {total} shards for {len(sizes)} classes",
            "Raise clients or classes_per_client.",
        )
    if total > most.sum():
        checks.fail(
            "partition.shards",
            "enough rows of each class to cut",
            f"{total} shards wanted, {most.sum()} possible",
            "Lower clients or classes_per_client.",
        )
    counts = np.ones(len(sizes), int)
    queue = [(-size, which) for which, size in enumerate(sizes)]
    heapq.heapify(queue)
    for _ in range(total - len(sizes)):
        while counts[queue[0][1]] >= most[queue[0][1]]:
            heapq.heappop(queue)
        which = queue[0][1]
        counts[which] += 1
        heapq.heapreplace(queue, (-sizes[which] / counts[which], which))
    return counts


def labels(
    clients: int,
    classes_per_client: int = 2,
    rows: Annotated[int | None, Setting("rows_per_client")] = None,
    exponent: float = 0.0,
    min_rows: Annotated[int | None, Setting(default=16)] = None,
    seed: int = 0,
) -> Partition:
    """Exactly `classes_per_client` classes at every client; sizes are equal, or follow a power law.

    Clients draw classes, from the largest client to the smallest.  A class that still holds an
    equal part of the client is drawn with a probability proportional to its rows that are left.
    Where a class is drawn beyond its rows, clients with several classes take more of the others.
    Rows that remain have no owner, and the note says how many.

    Args:
        classes_per_client: classes each client holds.
        rows: rows of a client; default all rows.  It is the mean over clients, and with exponent=0
            the number of each; with None sizes differ by at most one.
        exponent: of the sizes, 0 is equal.  The i-th largest client has rows ~ i ** -exponent.
        min_rows: least rows of a client.  At least classes_per_client, which None stands for.

    Other Parameters:
        clients: number of clients.
        seed: of all draws.

    Raises:
        ValueError: if rows * clients or a class is too small, or if 20 deals leave some client
            without its rows: all rows of classes of unequal size rarely fit clients of one class.

    References:
        Li et al., Mathematics 2025, section 5 (Adult: labels(100, 1, 325); MNIST: labels(100, 4,
        600)); Chen et al., TKDE 2024, section 5 (labels(100, 7), and exponent=1 with a floor).

    Example:
        >>> y = np.repeat([0, 1], [76, 24])
        >>> sorted(int(y[rows].mean()) for rows in labels(4, 1, rows=24)(y))
        [0, 0, 0, 1]
    """
    checks.require_integer("partition.labels", classes_per_client=classes_per_client)
    checks.require_nonnegative("partition.labels", single=True, exponent=exponent)
    least = classes_per_client if min_rows is None else min_rows
    checks.require_integer(
        "partition.labels",
        "A client needs a row of each of its classes.",
        min_value=classes_per_client,
        min_rows=least,
    )
    if rows is not None:
        checks.require_integer(
            "partition.labels",
            "It is the mean of a client, and min_rows the least.",
            min_value=least,
            rows=rows,
        )
    return _partition(
        "labels",
        clients,
        seed,
        partial(
            _split_labels,
            classes_per_client=int(classes_per_client),
            rows=None if rows is None else int(rows),
            exponent=float(exponent),
            min_rows=int(least),
        ),
    )


def _split_labels(labels, clients, rng, *, classes_per_client, rows, exponent, min_rows):
    total = len(labels) if rows is None else rows * clients
    _check_enough_rows(
        "labels",
        len(labels),
        clients,
        min_rows if rows is None else rows,
        "min_rows" if rows is None else "rows",
    )
    by_class = [rng.permutation(members) for members in _rows_by_class("labels", labels)]
    sizes = rng.permutation(floored(total, np.arange(1, clients + 1) ** -exponent, min_rows)[0])
    return _rows_of_classes("labels", by_class, sizes, classes_per_client, rng)


def sizes(
    rows: Sequence[int], *, classes_per_client: int | None = None, seed: int = 0
) -> Partition:
    """Client c gets exactly rows[c] rows: dealt at random, or of exactly `classes_per_client`
    classes.

    Without `classes_per_client` rows are iid.  With it, classes are drawn, and filled in parts as
    equal as the data allow, as in `labels`.  Rows that remain have no owner, and the note says how
    many.

    Args:
        rows: Int[C], the rows of each client, at least classes_per_client.
        classes_per_client: classes each client holds; None: dealt from all.
        seed: of all draws.

    Raises:
        ValueError: if the rows are too few, or if 20 deals do not fit the classes.

    References:
        Talaei and Izadi, 2024, section on experiments: sizes([50] * 20 + [120] * 20 + [271] * 20),
        and sizes([150] * 60, classes_per_client=...), which they leave open.

    Example:
        >>> [len(rows) for rows in sizes([2, 3, 1])([0, 1, 0, 1, 0, 1, 0])]
        [2, 3, 1]
    """
    if (
        isinstance(rows, str)
        or checks.as_array("partition.sizes", "rows", rows).ndim != 1
        or not len(rows)
    ):
        checks.fail(
            "partition.sizes",
            "rows, an integer for each client",
            f"rows={rows!r}",
            "Give [150] * 60.",
        )
    least = 1
    if classes_per_client is not None:
        checks.require_integer("partition.sizes", classes_per_client=classes_per_client)
        least = classes_per_client = int(classes_per_client)
    for client, count in enumerate(rows):
        checks.require_integer(
            "partition.sizes",
            "A client needs a row of each of its classes.",
            min_value=least,
            **{f"rows[{client}]": count},
        )
    return _partition(
        "sizes",
        len(rows),
        seed,
        partial(
            _split_sizes,
            rows=tuple(int(count) for count in rows),
            classes_per_client=classes_per_client,
        ),
    )


def _split_sizes(labels, clients, rng, *, rows, classes_per_client):
    if sum(rows) > len(labels):
        checks.fail(
            "partition.sizes",
            f"sum of rows <= {len(labels)} rows of the data",
            sum(rows),
            "Lower rows, or take fewer clients.",
        )
    if classes_per_client is not None:
        by_class = [rng.permutation(members) for members in _rows_by_class("sizes", labels)]
        return _rows_of_classes("sizes", by_class, np.array(rows), classes_per_client, rng)
    return np.split(rng.permutation(len(labels)), np.cumsum(rows))[:-1], _note_on_unowned(
        len(labels), sum(rows)
    )


def _rows_of_classes(name, by_class, sizes, per_client, rng):
    """Clients of given sizes with rows of exactly `per_client` classes each."""
    available, clients = np.array([len(members) for members in by_class]), len(sizes)
    if per_client > len(available):
        checks.fail(
            f"partition.{name}",
            "classes_per_client <= number of classes",
            f"classes_per_client={per_client} for {len(available)} classes",
        )
    for _ in range(20):
        take = _fit_to_classes(_draw_classes(sizes, available, per_client, rng), available)
        if take is not None:
            break
    else:
        checks.fail(
            f"partition.{name}",
            f"classes that fill {clients} clients of {sizes.min()} to {sizes.max()} rows with "
            f"exactly {per_client} of them each",
            f"classes of {available.min()} to {available.max()} rows, and 20 deals that do not fit",
            (
                "Lower rows (a remainder helps) or clients, make sizes more alike, or raise "
                "classes_per_client."
            ),
        )
    cuts = [
        np.split(members, np.cumsum(part)) for members, part in zip(by_class, take.T, strict=True)
    ]
    return (
        [np.concatenate([parts[client] for parts in cuts]) for client in range(clients)],
        _note_on_unowned(available.sum(), sizes.sum()),
    )


def _draw_classes(sizes, available, per_client, rng):
    """Rows of each class for each client [C, classes]: equal parts of its classes, which may be
    more than there are."""
    take, left = np.zeros((len(sizes), len(available)), int), available.astype(float)
    for client in np.argsort(-sizes, kind="stable"):
        part = -(-sizes[client] // per_client)
        fits = left >= part
        if fits.sum() >= per_client:
            chosen = rng.choice(
                len(available),
                per_client,
                replace=False,
                p=np.where(fits, left, 0) / left[fits].sum(),
            )
        else:
            chosen = np.argsort(-left, kind="stable")[:per_client]
        take[client, chosen] = sizes[client] // per_client + (
            np.arange(per_client) < sizes[client] % per_client
        )
        left -= take[client]
    return take


def _fit_to_classes(take, available):
    """Move rows inside clients, from classes drawn too often to classes with rows left; None where
    that is impossible.

    Each move follows the shortest path over classes that share a client with two rows to give, so
    no client changes its size or loses a class.
    """
    take, excess = take.copy(), take.sum(0) - available
    while (excess > 0).any():
        source = int(excess.argmax())
        # class -> (class before it, client)
        reached_from: dict[int, Any] = {source: None}
        queue = [source]
        for label in queue:
            for client in np.flatnonzero(take[:, label] > 1):
                for neighbour in np.flatnonzero(take[client]):
                    if int(neighbour) not in reached_from:
                        reached_from[int(neighbour)] = label, int(client)
                        queue.append(int(neighbour))
        classes_with_room = [label for label in queue if excess[label] < 0]
        if not classes_with_room:
            return None
        target = classes_with_room[0]
        path, label = [], target
        while reached_from[label] is not None:
            before, client = reached_from[label]
            path.append((client, before, label))
            label = before
        spare = [take[client, old] - 1 for client, old, _ in path]
        moved = min(*spare, excess[source], -excess[target])
        for client, old, new in path:
            take[client, old] -= moved
            take[client, new] += moved
        excess = take.sum(0) - available
    return take


def power_law(
    clients: int,
    exponent: float = 1.0,
    min_rows: Annotated[int, Setting(default=16)] = 1,
    seed: int = 0,
) -> Partition:
    """Quantity skew: the i-th largest client has rows ~ i ** -exponent; labels are iid.

    Sizes below min_rows are raised to it and the rest keeps its proportions; which client is large
    is drawn.

    Args:
        exponent: of the sizes, 0 is equal.  It is at least 0.
        min_rows: least rows of a client.

    Other Parameters:
        clients: number of clients.
        seed: of all draws.

    Raises:
        ValueError: if exponent is negative or not finite, or min_rows * clients > rows.

    Example:
        >>> sorted(len(rows) for rows in power_law(clients=4, exponent=1)(np.zeros(25, int)))
        [3, 4, 6, 12]
    """
    checks.require_nonnegative("partition.power_law", single=True, exponent=exponent)
    checks.require_integer("partition.power_law", min_rows=min_rows)
    return _partition(
        "power_law",
        clients,
        seed,
        partial(_split_power_law, exponent=float(exponent), min_rows=int(min_rows)),
    )


def _split_power_law(labels, clients, rng, *, exponent, min_rows):
    _check_enough_rows("power_law", len(labels), clients, min_rows)
    sizes, floor = floored(len(labels), np.arange(1, clients + 1) ** -exponent, min_rows)
    rows = np.split(rng.permutation(len(labels)), np.cumsum(rng.permutation(sizes))[:-1])
    return rows, f"{floor} of {clients} clients raised to min_rows = {min_rows}" if floor else ""


def similarity(
    clients: int,
    share: float = 0.0,
    rows: Annotated[int | None, Setting("rows_per_client")] = None,
    by: str = "class",
    seed: int = 0,
) -> Partition:
    """A share of each client's rows is iid, the rest is of one kind; sizes are equal.

    Each client gets round(share * rows) rows at random from all.  The rest depends on `by`:

    - "class": client c takes rows of class c mod (number of classes).  When a class runs dry, its
      clients get equal parts of it, and rows of any class for what is missing; the note counts
      these.
    - "sorted": the other rows are sorted by label and cut into equal pieces.

    Args:
        share: part of a client's rows that is iid.  In [0, 1]; 1 is iid.
        rows: rows of a client; default all rows.  Rows that remain have no owner; with None sizes
            differ by at most one.

    Other Parameters:
        clients: number of clients.
        by: "class" or "sorted", what the rest depends on.
        seed: of all draws.

    Raises:
        ValueError: if share is outside [0, 1], or rows * clients exceeds the rows.

    References:
        by="class": the published code of Noble et al., AISTATS 2022 (their clients get fewer rows
        when a class runs dry); by="sorted": Karimireddy et al., ICML 2020, section 7.

    Example:
        >>> y = np.arange(100) % 10
        >>> [np.unique(y[rows]).tolist() for rows in similarity(10, 0.0)(y)[:3]]
        [[0], [1], [2]]
    """
    checks.require_nonnegative(
        "partition.similarity", "1 is iid, 0 one kind a client.", single=True, share=share
    )
    if share > 1:
        checks.fail(
            "partition.similarity",
            "share in [0, 1]",
            f"share={share!r}",
            "1 is iid, 0 one kind a client.",
        )
    if rows is not None:
        checks.require_integer("partition.similarity", rows=rows)
    checks.require_one_of("partition.similarity", ("class", "sorted"), by=by)
    return _partition(
        "similarity",
        clients,
        seed,
        partial(
            _split_similarity,
            share=float(share),
            by=by,
            rows=None if rows is None else int(rows),
        ),
    )


def _split_similarity(labels, clients, rng, *, share, rows, by):
    if rows is not None:
        _check_enough_rows("similarity", len(labels), clients, rows, "rows")
    total = len(labels) if rows is None else rows * clients
    sizes = total // clients + (np.arange(clients) < total % clients)
    by_class = _rows_by_class("similarity", labels)
    # first the share that is dealt from all rows
    mixed_sizes = np.round(share * sizes).astype(int)
    kind_sizes = sizes - mixed_sizes
    order = rng.permutation(len(labels))
    mixed = np.split(order[: mixed_sizes.sum()], np.cumsum(mixed_sizes)[:-1])
    rest = order[mixed_sizes.sum() :]
    if by == "sorted":
        rest = rest[: kind_sizes.sum()]
        pieces = np.split(rest[np.argsort(labels[rest], kind="stable")], np.cumsum(kind_sizes)[:-1])
        return [np.concatenate(parts) for parts in zip(mixed, pieces, strict=True)], ""
    is_free = np.zeros(len(labels), bool)
    is_free[rest] = True
    of_class, remainders = [None] * clients, []
    for label, members in enumerate(by_class):
        members = rng.permutation(members[is_free[members]])
        takers = np.arange(label, clients, len(by_class))
        counts = kind_sizes[takers]
        if counts.sum() > len(members):  # the class runs dry: equal parts of it
            counts = len(members) // len(takers) + (
                np.arange(len(takers)) < len(members) % len(takers)
            )
        for client, part in zip(takers, np.split(members, np.cumsum(counts))[:-1], strict=True):
            of_class[client] = part
        remainders.append(members[counts.sum() :])
    missing = kind_sizes - [len(part) for part in of_class]
    fill = rng.permutation(np.concatenate(remainders))[: missing.sum()]
    fill = np.split(fill, np.cumsum(missing)[:-1])
    note = (
        f"{missing.sum()} of {total} rows from another class, their own had run dry"
        if missing.any()
        else ""
    )
    return [np.concatenate(parts) for parts in zip(mixed, of_class, fill, strict=True)], note


def natural(owners: Sequence | np.ndarray | None = None, seed: int = 0) -> Partition:
    """The clients that the data came with.

    Clients are numbered in sorted order of their names; the seed only orders the rows inside a
    client.  Without owners the partition works in `federate`, with a dataset that has them
    (datasets.synthetic).

    Other Parameters:
        owners: [n], the name of each row's owner; None: as the dataset says.
        seed: of the order of rows.

    >>> [rows.tolist() for rows in natural(["ann", "bob", "ann"])([0, 0, 1])]
    [[0, 2], [1]]
    """
    if owners is None:
        checks.require_seed("partition.natural", seed=seed)
        return Partition("natural", 0, int(seed), None)
    owners = checks.as_array("partition.natural", "owners", owners)
    if owners.ndim != 1 or not len(owners) or owners.dtype.kind not in "biuUS":
        checks.fail(
            "partition.natural",
            "one owner a row, integers or strings",
            f"shape {list(owners.shape)}, dtype {owners.dtype}",
        )
    names, numbers = np.unique(owners, return_inverse=True)
    return _partition("natural", len(names), seed, partial(_split_natural, numbers))


def _split_natural(owners, labels, clients, rng):
    if len(owners) != len(labels):
        checks.fail(
            "partition.natural", "one owner a row", f"{len(owners)} owners for {len(labels)} rows"
        )
    return _rows_by_number(owners, clients), ""


def flower(partitioner: Any, column: str = "label") -> Callable:
    """A partitioner of flwr-datasets, for `federate`.

    Args:
        partitioner: such as flwr_datasets.partitioner.DirichletPartitioner, without a dataset; it
            needs the package datasets.
        column: what it calls the labels (its `partition_by`).

    Returns:
        A function of the labels [n], a list of row numbers for each client.  A row that the
        partitioner gives to nobody has no owner.

    Example:
        >>> from flwr_datasets.partitioner import IidPartitioner  # doctest: +SKIP
        >>> fed = jfl.federate(data, flower(IidPartitioner(10)))  # doctest: +SKIP
    """
    where = "partition.flower"
    if not hasattr(partitioner, "load_partition"):
        checks.fail(where, "a partitioner of flwr-datasets", checks.short_repr(partitioner))

    def split(labels):
        from datasets import Dataset

        # where that package is not installed, pyright takes the module beside this one for it
        made: Any = Dataset
        rows = made.from_dict({column: np.asarray(labels), "row": np.arange(len(labels))})
        fresh = copy.deepcopy(partitioner)  # it takes a dataset once
        fresh.dataset = rows
        parts = (fresh.load_partition(c) for c in range(fresh.num_partitions))
        return [np.asarray(part["row"][:], np.int64) for part in parts]

    return split


# --- parts


def _partition(name, clients, seed, split):
    checks.require_integer(f"partition.{name}", clients=clients)
    checks.require_seed(f"partition.{name}", seed=seed)
    return Partition(name, int(clients), int(seed), split)


def _rows_by_class(name, labels):
    """Rows of each class that occurs."""
    if labels.ndim > 1:
        checks.fail(
            f"partition.{name}",
            "one label a row, since it splits by class",
            f"labels of shape {list(labels.shape)}",
            "Use iid, power_law or natural.",
        )
    if labels.dtype.kind not in "biu":
        checks.fail(
            f"partition.{name}",
            "integer labels, since it splits by class",
            f"dtype {labels.dtype}",
            "Use iid, power_law or natural.",
        )
    values, numbers = np.unique(labels, return_inverse=True)
    return _rows_by_number(numbers, len(values))


def _rows_by_number(numbers, count):
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.cumsum(np.bincount(numbers, minlength=count))[:-1])


def _check_enough_rows(name, rows, clients, least, called="min_rows"):
    if least * clients > rows:
        checks.fail(
            f"partition.{name}",
            f"{called} * clients <= rows",
            f"{least} * {clients} > {rows}",
            f"Lower {called} or clients.",
        )


def _note_on_unowned(rows, owned):
    return f"{rows - owned} of {rows} rows have no owner" if rows > owned else ""


def floored(total: int, weights: np.ndarray, least: int) -> tuple[np.ndarray, int]:
    """`total` in whole parts proportional to falling weights, none below `least`; how many were
    raised to it."""
    sizes, free = np.full(len(weights), least), len(weights)
    while free:  # ranks past `free` sit on the floor; the ranks before share what is left
        sizes[:free] = _apportion(total - least * (len(weights) - free), weights[:free])
        above = int((sizes[:free] >= least).sum())
        sizes[above:] = least
        if above == free:
            break
        free = above
    return sizes, len(weights) - free


def _apportion(total, weights):
    """`total` in whole parts proportional to weights, by largest remainders."""
    share = total * weights / weights.sum()
    parts = np.floor(share).astype(int)
    parts[np.argsort(parts - share, kind="stable")[: total - parts.sum()]] += 1
    return parts
