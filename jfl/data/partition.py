"""Partitions, which assign rows to clients.

A partition is a function of the labels, and depends only on them and on a seed. No row goes to two
clients. `labels`, `similarity` and `sizes` may leave rows without an owner; the others use every
row. A partition also returns a note for the record of a run. Shapes use n rows and C clients.

To add a partition, write a factory, and below it a function (labels [n], C, Generator, options)
that returns the rows of each client and the note ("" if there is none).
"""

import copy
import dataclasses
import functools
import heapq
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np

from ..core import checks
from ..core.options import Setting
from .rows import require_owners

# The partitions that a config can name. `sizes` is missing: it takes one number per client.
__all__ = ["dirichlet", "iid", "labels", "natural", "power_law", "shards", "similarity"]


@dataclasses.dataclass(frozen=True)
class Partition:
    """A way to assign rows to clients: `partition(labels)` returns a list of C index arrays."""

    name: str
    clients: int
    seed: int
    # (labels [n], C, Generator) -> list of C index arrays, note. None: `natural` without owners.
    split: Callable | None

    def assign(self, labels) -> tuple[list[np.ndarray], str]:
        """Return the row numbers of each client, and a note for the record of a run, or ""."""
        where = f"partition.{self.name}"
        if self.split is None:
            checks.fail(
                where,
                "the owners of the rows",
                "none",
                "federate(dataset, partition.natural()) uses those of the dataset; otherwise pass "
                "one owner per row.",
            )
        labels = checks.as_array(where, "labels", labels)
        # An array for each of a billion clients would fill the memory before anything is refused.
        if self.clients > len(labels):
            checks.fail(where, f"clients <= {len(labels)}, the rows", f"clients={self.clients}")
        return self.split(labels, self.clients, np.random.default_rng(self.seed))

    def __call__(self, labels) -> list[np.ndarray]:
        return self.assign(labels)[0]

    def describe(self, labels) -> dict:
        """Return the arguments of the partition, and its note for these labels."""
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
    """Assign rows to clients uniformly at random; the sizes of clients differ by at most one.

    Example:
        >>> [len(rows) for rows in iid(3)([0, 1, 0, 1, 0, 1, 0])]
        [3, 2, 2]
    """
    return _partition("iid", clients, seed, _split_iid)


def _split_iid(labels, clients, rng):
    return np.array_split(rng.permutation(len(labels)), clients), ""


def dirichlet(
    clients: int,
    alpha: float = 0.3,
    min_rows: Annotated[int, Setting(default=16)] = 1,
    balanced: bool = False,
    seed: int = 0,
) -> Partition:
    """Assign rows to clients with label skew: the smaller alpha, the fewer classes each client has.

    Each class is divided among the clients in proportions ~ Dirichlet(alpha, ..., alpha), so the
    numbers of rows of clients vary too. Clients with fewer than min_rows rows then get random rows
    from the clients that are largest at that moment; the note that `Partition.assign` returns says
    how many rows moved.
    min_rows=0 allows clients without rows, which `federate` rejects.

    With balanced=True, the sizes of clients differ by at most one. Clients draw in random order.
    Each draws a mixture of classes ~ Dirichlet(alpha * classes * frequency of each class), and
    draws its rows from it. If a class has no rows left, the client takes rows of other classes.

    Args:
        alpha: concentration parameter per class, > 0; smaller is more heterogeneous.
        min_rows: minimum number of rows of a client.

    Other Parameters:
        clients: number of clients.
        balanced: whether all clients get the same number of rows.
        seed: seed of all draws.

    Raises:
        ValueError: if alpha is not positive and finite, min_rows * clients exceeds the number of
            rows, or labels are not integers.

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
        _split_dirichlet,
        alpha=float(alpha),
        min_rows=int(min_rows),
        balanced=bool(balanced),
    )


def _split_dirichlet(labels, clients, rng, *, alpha, min_rows, balanced):
    _check_enough_rows("dirichlet", labels, clients, min_rows=min_rows)
    by_class = [rng.permutation(rows) for rows in _rows_by_class("dirichlet", labels)]
    if balanced:
        return _balanced_dirichlet(by_class, clients, alpha, rng), ""
    rows = [[] for _ in range(clients)]
    for members in by_class:
        ends = np.minimum(np.cumsum(rng.dirichlet(np.full(clients, alpha))), 1)
        # One random offset per class makes the expected number of rows exact for every client.
        # Rounding down would favour the last client, and rounding to the nearest integer would
        # give the first and the last too little.
        cuts = np.floor(ends[:-1] * len(members) + rng.random()).astype(int)
        for client, part in enumerate(np.split(members, cuts)):
            rows[client].append(part)
    rows = [rng.permutation(np.concatenate(parts)).tolist() for parts in rows]
    moved = _move_rows(rows, min_rows)
    note = f"{moved} of {len(labels)} rows moved so that every client has {min_rows}"
    return [np.array(part, int) for part in rows], note if moved else ""


def _move_rows(rows, min_rows) -> int:
    """Move single rows from the largest clients to those below `min_rows`; return how many moved.

    Rows of a client are in random order, so the last one is a random row. As long as a client has
    less than `min_rows`, the largest has more, because the mean is at least `min_rows`.
    """
    moved, largest = 0, [(-len(part), client) for client, part in enumerate(rows)]
    heapq.heapify(largest)
    for small in rows:
        while len(small) < min_rows:
            size, client = heapq.heappop(largest)
            small.append(rows[client].pop())
            heapq.heappush(largest, (size + 1, client))
            moved += 1
    return moved


def _balanced_dirichlet(by_class, clients, alpha, rng):
    """Return the rows of each client for `dirichlet` with balanced=True."""
    left = np.array([len(members) for members in by_class])
    prior = alpha * len(left) * left / left.sum()
    sizes, rows = _equal_sizes(left.sum(), clients), [None] * clients
    for client in rng.permutation(clients):
        mixture, take = rng.dirichlet(prior), np.zeros(len(left), int)
        while (missing := sizes[client] - take.sum()) > 0:
            weights = np.where(left > take, mixture, 0)
            if not weights.sum() > 0:  # its classes are used up, so it takes from those that remain
                weights = (left - take).astype(float)
            take = np.minimum(take + rng.multinomial(missing, weights / weights.sum()), left)
        rows[client] = np.concatenate(
            [members[len(members) - n :][:k] for members, n, k in zip(by_class, left, take)]
        )
        left = left - take
    return rows


def shards(clients: int, classes_per_client: int = 2, seed: int = 0) -> Partition:
    """Give every client rows of exactly `classes_per_client` classes.

    Rows are cut into clients * classes_per_client shards of one class each. Large classes are cut
    into more shards, so that shards are about equally large. Every client gets classes_per_client
    random shards of different classes. The sizes of clients depend on the classes; `labels` fixes
    the sizes instead.

    Args:
        classes_per_client: number of classes of each client.

    Other Parameters:
        clients: number of clients.
        seed: seed of all draws.

    Raises:
        ValueError: if there are fewer classes than classes_per_client, fewer shards than classes (a
            row would have no owner), or too few rows in a class to cut.

    References:
        McMahan et al., AISTATS 2017, section 3. Their shards have equal sizes and may contain two
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
        _split_shards,
        classes_per_client=int(classes_per_client),
    )


def _split_shards(labels, clients, rng, *, classes_per_client):
    by_class = [rng.permutation(rows) for rows in _rows_by_class("shards", labels)]
    class_sizes = np.array([len(members) for members in by_class])
    counts = _shard_counts(class_sizes, clients, classes_per_client)
    rows, room = [[] for _ in range(clients)], np.full(clients, classes_per_client)
    for which in rng.permutation(len(by_class)):
        # Clients that miss most shards come first, ties in random order; then all clients end with
        # the right number.
        owners = np.lexsort((rng.random(clients), -room))[: counts[which]]
        room[owners] -= 1
        for client, part in zip(owners, np.array_split(by_class[which], len(owners)), strict=True):
            rows[client].append(part)
    return [np.concatenate(parts) for parts in rows], ""


def _shard_counts(sizes, clients, per_client):
    """Return the number of shards of each class; the class with the largest shards is cut first.

    A class has at least one shard, and at most one per client and per row.
    """
    total, max_shards = clients * per_client, np.minimum(sizes, clients)
    if not len(sizes) <= total <= max_shards.sum():
        checks.fail(
            "partition.shards",
            f"{len(sizes)} to {max_shards.sum()} shards, at least one for each class so that every "
            "row has an owner, and at most one for each of its clients and rows",
            f"{clients} clients * {per_client} classes = {total}",
        )
    counts = np.ones(len(sizes), int)
    queue = [(-size, which) for which, size in enumerate(sizes)]
    heapq.heapify(queue)
    for _ in range(total - len(sizes)):
        while counts[queue[0][1]] >= max_shards[queue[0][1]]:
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
    """Give every client exactly `classes_per_client` classes, with equal or power-law sizes.

    Clients draw their classes one after another, the largest client first, and take about equally
    many rows of each. The probability of a class is proportional to its remaining rows, among
    classes that still have enough. If clients would use more rows of a class than there are, those
    with several classes take more rows of their other classes instead. Remaining rows have no
    owner; their number is in the note that `Partition.assign` returns.

    Args:
        classes_per_client: number of classes of each client.
        rows: mean number of rows of a client, and the exact number if exponent=0. None uses all
            rows, with sizes that differ by at most one if exponent=0.
        exponent: exponent of the sizes: the i-th largest client has rows ~ i ** -exponent. 0 means
            equal sizes.
        min_rows: minimum number of rows of a client, at least classes_per_client. None means
            classes_per_client. (The command line and configs use 16 by default.)

    Other Parameters:
        clients: number of clients.
        seed: seed of all draws.

    Raises:
        ValueError: if there are too few rows, in total or of a class, or if 20 attempts to draw
            classes leave a client without its rows. If clients have one class each and classes
            differ in size, using all rows is rarely possible.

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
    min_rows = classes_per_client if min_rows is None else min_rows
    checks.require_integer(
        "partition.labels",
        "A client needs a row of each of its classes.",
        min_value=classes_per_client,
        min_rows=min_rows,
    )
    if rows is not None:
        checks.require_integer(
            "partition.labels",
            "rows is the mean over clients, and min_rows the minimum.",
            min_value=min_rows,
            rows=rows,
        )
    return _partition(
        "labels",
        clients,
        seed,
        _split_labels,
        classes_per_client=int(classes_per_client),
        rows=None if rows is None else int(rows),
        exponent=float(exponent),
        min_rows=int(min_rows),
    )


def _split_labels(labels, clients, rng, *, classes_per_client, rows, exponent, min_rows):
    total = len(labels) if rows is None else rows * clients
    _check_enough_rows("labels", labels, clients, rows=rows, min_rows=min_rows)
    by_class = [rng.permutation(members) for members in _rows_by_class("labels", labels)]
    sizes = _power_law_sizes(total, clients, exponent, min_rows)[0]
    return _rows_of_classes("labels", by_class, rng.permutation(sizes), classes_per_client, rng)


def sizes(
    rows: Sequence[int], *, classes_per_client: int | None = None, seed: int = 0
) -> Partition:
    """Give client c exactly rows[c] rows, from all classes or from a fixed number of them.

    Without `classes_per_client`, rows are drawn from all rows. With it, classes are drawn as in
    `labels`. Remaining rows have no owner; their number is in the note that `Partition.assign`
    returns.

    Args:
        rows: Int[C], number of rows of each client, at least classes_per_client.
        classes_per_client: number of classes of each client. None draws from all rows.
        seed: seed of all draws.

    Raises:
        ValueError: if there are too few rows, or if 20 attempts to draw classes leave a client
            without its rows.

    References:
        Talaei and Izadi, 2024, section on experiments: sizes([50] * 20 + [120] * 20 + [271] * 20),
            and sizes([150] * 60, classes_per_client=...), where they do not say how many classes.

    Example:
        >>> [len(rows) for rows in sizes([2, 3, 1])([0, 1, 0, 1, 0, 1, 0])]
        [2, 3, 1]
    """
    rows = checks.as_tuple("partition.sizes", rows=rows)
    if classes_per_client is not None:
        checks.require_integer("partition.sizes", classes_per_client=classes_per_client)
        classes_per_client = int(classes_per_client)
    each: dict[str, Any] = {f"rows[{client}]": count for client, count in enumerate(rows)}
    hint = "A client needs a row of each of its classes."
    checks.require_integer("partition.sizes", hint, min_value=classes_per_client or 1, **each)
    rows = tuple(map(int, rows))
    return _partition(
        "sizes", len(rows), seed, _split_sizes, rows=rows, classes_per_client=classes_per_client
    )


def _split_sizes(labels, clients, rng, *, rows, classes_per_client):
    if sum(rows) > len(labels):
        checks.fail(
            "partition.sizes",
            f"sum of rows <= {len(labels)} rows of the data",
            sum(rows),
            "Lower rows, or use fewer clients.",
        )
    if classes_per_client is not None:
        by_class = [rng.permutation(members) for members in _rows_by_class("sizes", labels)]
        return _rows_of_classes("sizes", by_class, np.array(rows), classes_per_client, rng)
    note = _note_on_unowned(len(labels), sum(rows))
    return np.split(rng.permutation(len(labels)), np.cumsum(rows))[:-1], note


def _rows_of_classes(name, by_class, sizes, per_client, rng):
    """Return rows for clients of given sizes, of exactly `per_client` classes each, and a note.

    Args:
        name: the name of the partition, for messages.
        by_class: the rows of each class, in random order.
        sizes: Int[C].
        per_client: the number of classes of each client.
        rng: the generator.
    """
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
            f"classes of {available.min()} to {available.max()} rows, and 20 random attempts that "
            "failed",
            "Lower rows or clients, make sizes more similar, or raise classes_per_client.",
        )
    parts = [np.split(rows, np.cumsum(part)) for rows, part in zip(by_class, take.T, strict=True)]
    rows = [np.concatenate(own) for own in list(zip(*parts))[:clients]]
    return rows, _note_on_unowned(available.sum(), sizes.sum())


def _draw_classes(sizes, available, per_client, rng):
    """Draw the classes of each client, and divide its rows equally among them.

    Returns:
        Int[C, classes], the rows of each class that a client takes. The sum over clients may exceed
        the rows of a class.
    """
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
    """Change the classes of rows until no class is used up; return None if that is impossible.

    A client can take one row less of one of its classes and one more of another, as long as it
    keeps a row of the first. A class with too many rows passes them to a class with spare rows
    along the shortest path of such exchanges. Clients keep their sizes and their classes.

    Args:
        take: Int[C, classes], the rows of each class that a client takes, changed in place.
        available: Int[classes].
    """
    while ((excess := take.sum(0) - available) > 0).any():
        source = int(excess.argmax())
        # For each class, the exchanges that lead to it: (client, old class, new class).
        paths: dict[Any, list] = {source: []}
        queue: list[Any] = [source]
        for label in queue:
            for client in np.flatnonzero(take[:, label] > 1):
                for neighbour in np.flatnonzero(take[client]):
                    if neighbour not in paths:
                        paths[neighbour] = [*paths[label], (client, label, neighbour)]
                        queue.append(neighbour)
        target = next((label for label in queue if excess[label] < 0), None)
        if target is None:
            return None
        spare = [take[client, old] - 1 for client, old, _ in paths[target]]
        moved = min(*spare, excess[source], -excess[target])
        for client, old, new in paths[target]:
            take[client, old] -= moved
            take[client, new] += moved
    return take


def power_law(
    clients: int,
    exponent: float = 1.0,
    min_rows: Annotated[int, Setting(default=16)] = 1,
    seed: int = 0,
) -> Partition:
    """Assign random rows to clients whose sizes follow a power law.

    The size of the i-th largest client is proportional to i ** -exponent. Sizes below min_rows are
    raised to it, and the others keep their proportions. Sizes are assigned to clients at random.

    Args:
        exponent: exponent of the sizes, at least 0. 0 means equal sizes.
        min_rows: minimum number of rows of a client.

    Other Parameters:
        clients: number of clients.
        seed: seed of all draws.

    Raises:
        ValueError: if exponent is negative or not finite, or min_rows * clients exceeds the number
            of rows.

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
        _split_power_law,
        exponent=float(exponent),
        min_rows=int(min_rows),
    )


def _split_power_law(labels, clients, rng, *, exponent, min_rows):
    _check_enough_rows("power_law", labels, clients, min_rows=min_rows)
    sizes, raised = _power_law_sizes(len(labels), clients, exponent, min_rows)
    rows = np.split(rng.permutation(len(labels)), np.cumsum(rng.permutation(sizes))[:-1])
    return rows, f"{raised} of {clients} clients raised to min_rows = {min_rows}" if raised else ""


def similarity(
    clients: int,
    share: float = 0.0,
    rows: Annotated[int | None, Setting("rows_per_client")] = None,
    seed: int = 0,
) -> Partition:
    """Give each client a fraction of iid rows, and otherwise rows of one class.

    All clients have the same number of rows. Client c gets round(share * rows) random rows, and
    otherwise rows of class c mod (number of classes). If a class has too few rows, its clients get
    equal parts of the class, and random rows for the rest; the note that `Partition.assign` returns
    says how many.

    Args:
        share: fraction of a client's rows that is iid, in [0, 1].
        rows: number of rows of a client; the remaining rows have no owner. None uses all rows, with
            sizes that differ by at most one.

    Other Parameters:
        clients: number of clients.
        seed: seed of all draws.

    Raises:
        ValueError: if share is outside [0, 1], or rows * clients exceeds the number of rows.

    References:
        The published code of Noble et al., AISTATS 2022, where clients get fewer rows if a class
        has too few.

    Example:
        >>> y = np.arange(100) % 10
        >>> [np.unique(y[rows]).tolist() for rows in similarity(10, 0.0)(y)[:3]]
        [[0], [1], [2]]
    """
    hint = "With 1 all rows are random, and with 0 all rows of a client are of one class."
    checks.require_nonnegative("partition.similarity", hint, single=True, share=share)
    if share > 1:
        checks.fail("partition.similarity", "share in [0, 1]", f"share={share!r}", hint)
    if rows is not None:
        checks.require_integer("partition.similarity", rows=rows)
    return _partition(
        "similarity",
        clients,
        seed,
        _split_similarity,
        share=float(share),
        rows=None if rows is None else int(rows),
    )


def _split_similarity(labels, clients, rng, *, share, rows):
    _check_enough_rows("similarity", labels, clients, rows=rows)
    sizes = _equal_sizes(len(labels) if rows is None else rows * clients, clients)
    by_class = _rows_by_class("similarity", labels)
    # First draw the iid part from all rows.
    mixed_sizes = np.round(share * sizes).astype(int)
    kind_sizes = sizes - mixed_sizes
    *mixed, rest = np.split(rng.permutation(len(labels)), np.cumsum(mixed_sizes))
    is_free = np.zeros(len(labels), bool)
    is_free[rest] = True
    of_class, remainders = [None] * clients, []
    for label, members in enumerate(by_class):
        members = rng.permutation(members[is_free[members]])
        takers = np.arange(label, clients, len(by_class))
        counts = kind_sizes[takers]
        if counts.sum() > len(members):  # too few rows of this class: each gets an equal part
            counts = _equal_sizes(len(members), len(takers))
        *parts, remainder = np.split(members, np.cumsum(counts))
        for client, part in zip(takers, parts, strict=True):
            of_class[client] = part
        remainders.append(remainder)
    missing = kind_sizes - [len(part) for part in of_class]
    fill = rng.permutation(np.concatenate(remainders))
    parts = mixed, of_class, np.split(fill, np.cumsum(missing))[:clients]
    note = f"{missing.sum()} of {sizes.sum()} rows are from another class, whose own was used up"
    return [np.concatenate(own) for own in zip(*parts, strict=True)], note if missing.any() else ""


def natural(owners: Sequence | np.ndarray | None = None, seed: int = 0) -> Partition:
    """Assign each row to its natural owner, such as the person who wrote it.

    Clients are numbered in sorted order of the owners' names. The seed determines only the order of
    a client's rows.

    Other Parameters:
        owners: [n], the name of each row's owner. None uses the owners in the dataset, which
            `datasets.synthetic` has, for example.
        seed: seed of the order of rows.

    Example:
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
            "one owner per row, integers or strings",
            f"shape {list(owners.shape)}, dtype {owners.dtype}",
        )
    require_owners("partition.natural", owners)
    names, numbers = np.unique(owners, return_inverse=True)
    return _partition("natural", len(names), seed, functools.partial(_split_natural, numbers))


def _split_natural(owners, labels, clients, rng):
    if len(owners) != len(labels):
        checks.fail(
            "partition.natural", "one owner per row", f"{len(owners)} owners for {len(labels)} rows"
        )
    return _rows_by_number(owners, clients), ""


def flower(partitioner: Any, column: str = "label") -> Callable:
    """Convert a partitioner of flwr-datasets for use in `federate`.

    Args:
        partitioner: a partitioner such as flwr_datasets.partitioner.DirichletPartitioner, without a
            dataset. Using it requires the package datasets.
        column: the name of the labels in the partitioner, its `partition_by`.

    Returns:
        A function from the labels [n] to a list of row numbers for each client. Rows that the
        partitioner gives to nobody have no owner.

    Example:
        >>> from flwr_datasets.partitioner import IidPartitioner  # doctest: +SKIP
        >>> fed = jfl.federate(data, flower(IidPartitioner(10)))  # doctest: +SKIP
    """

    def split(labels):
        from datasets import Dataset

        # Without the package, pyright finds the module of the same name in this folder.
        dataset: Any = Dataset
        rows = dataset.from_dict({column: np.asarray(labels), "row": np.arange(len(labels))})
        fresh = copy.deepcopy(partitioner)  # a partitioner accepts a dataset only once
        fresh.dataset = rows
        parts = (fresh.load_partition(c) for c in range(fresh.num_partitions))
        return [np.asarray(part["row"][:], np.int64) for part in parts]

    return split


# --- shared by several partitions


def _partition(name, clients, seed, split, **options):
    """Check the common arguments of partitions, and return a Partition."""
    checks.require_integer(f"partition.{name}", clients=clients)
    checks.require_seed(f"partition.{name}", seed=seed)
    return Partition(name, int(clients), int(seed), functools.partial(split, **options))


def _rows_by_class(name, labels):
    """Return the rows of each class that occurs."""
    if labels.ndim > 1 or labels.dtype.kind not in "biu":
        checks.fail(
            f"partition.{name}",
            "one integer label per row, since it splits by class",
            f"labels {labels.dtype}{list(labels.shape)}",
            "Use iid, power_law or natural.",
        )
    values, numbers = np.unique(labels, return_inverse=True)
    return _rows_by_number(numbers, len(values))


def _rows_by_number(numbers, count):
    """Return the rows with each number below `count`."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.cumsum(np.bincount(numbers, minlength=count))[:-1])


def _check_enough_rows(name, labels, clients, **rows_per_client):
    for argument, count in rows_per_client.items():
        if count is not None and count * clients > len(labels):
            checks.fail(
                f"partition.{name}",
                f"{argument} * clients <= rows",
                f"{count} * {clients} > {len(labels)}",
                f"Lower {argument} or clients.",
            )


def _equal_sizes(total, clients):
    """Split `total` into integers that differ by at most one."""
    return total // clients + (np.arange(clients) < total % clients)


def _power_law_sizes(total, clients, exponent, min_rows):
    return split_with_minimum(total, np.arange(1, clients + 1) ** -exponent, min_rows)


def _note_on_unowned(rows, owned):
    return f"{rows - owned} of {rows} rows have no owner" if rows > owned else ""


def split_with_minimum(total: int, weights: np.ndarray, min_part: int) -> tuple[np.ndarray, int]:
    """Split `total` into integers proportional to decreasing weights, none below `min_part`.

    Returns:
        The parts, and how many of them were raised to `min_part`.
    """
    parts, free = np.full(len(weights), min_part), len(weights)
    while free:  # the first `free` parts share what remains after the others got the minimum
        parts[:free] = _apportion(total - min_part * (len(weights) - free), weights[:free])
        above = int((parts[:free] >= min_part).sum())
        parts[above:] = min_part
        if above == free:
            break
        free = above
    return parts, len(weights) - free


def _apportion(total, weights):
    """Split `total` into integers proportional to weights, by largest remainders."""
    share = total * weights / weights.sum()
    parts = np.floor(share).astype(int)
    parts[np.argsort(parts - share, kind="stable")[: total - parts.sum()]] += 1
    return parts
