"""Partitions: which rows belong to which client.  A partition is made first and applied to the labels later.

Axes: n rows, C clients.  Host only (NumPy Generator); imports jfl.check.  Every partition here uses every row exactly
once and depends on the labels and its seed alone.  A new one is a factory and a `_split` function.
"""
import dataclasses
import heapq
from collections.abc import Callable
from functools import partial

import numpy as np

from .. import check

__all__ = ["dirichlet", "iid", "natural", "power_law", "shards"]


@dataclasses.dataclass(frozen=True)
class Partition:
    """`partition(labels)` gives a list of C index arrays; `assign` also says what was done to get there."""
    name: str
    clients: int
    seed: int
    split: Callable      # (labels Int or float[n], C, Generator) -> list of C index arrays, note

    def assign(self, labels) -> tuple[list[np.ndarray], str]:
        """Labels [n] -> rows of each client, and a sentence for the manifest (empty: nothing to say)."""
        labels, where = np.asarray(labels), f"partition.{self.name}"
        if labels.ndim != 1:
            check.fail(where, "labels of shape [n]", f"shape {list(labels.shape)}")
        if len(labels) < self.clients:
            check.fail(where, "at least one row a client", f"{len(labels)} rows for {self.clients} clients",
                       "Take fewer clients.")
        return self.split(labels, self.clients, np.random.default_rng(self.seed))

    def __call__(self, labels) -> list[np.ndarray]:
        return self.assign(labels)[0]

    def describe(self, labels) -> dict:
        """For the manifest: the arguments, and what had to be changed for these labels."""
        return {"name": self.name, "clients": self.clients, "seed": self.seed, **self.split.keywords,
                "note": self.assign(labels)[1]}


def iid(clients: int, seed: int = 0) -> Partition:
    """Rows dealt at random; sizes differ by at most one.

    >>> [len(rows) for rows in iid(3)([0, 1, 0, 1, 0, 1, 0])]
    [3, 2, 2]
    """
    return _partition("iid", clients, seed, partial(_iid))


def dirichlet(clients: int, alpha: float, min_rows: int = 1, balanced: bool = False, seed: int = 0) -> Partition:
    """Label skew: small alpha gives each client few classes, large alpha the mixture of the whole.

    Split    Each class is cut by proportions ~ Dirichlet(alpha, ..., alpha) over the clients, so sizes vary too.
             Then single rows, drawn at random from whoever is largest, move to clients below min_rows; their number
             is in the note.  min_rows=0 leaves clients without rows, which `federate` refuses.
             balanced=True: equal sizes (to one row); each client draws a class mixture ~ Dirichlet(alpha * classes *
             share of each class) and takes its rows by it while the classes last, in random order of the clients.
    Units    alpha > 0: one class's concentration, in both forms; min_rows in rows.
    Errors   ValueError if alpha is not positive and finite, min_rows * clients > rows, or labels are not integers.
    Source   Yurochkin et al., ICML 2019, and Li et al., ICDE 2022 (NIID-Bench); balanced: Hsu et al.,
             arXiv:1909.06335.

    >>> split = dirichlet(clients=4, alpha=0.1, min_rows=20)
    >>> min(len(rows) for rows in split(np.arange(100) % 10))
    20
    """
    _single("dirichlet", alpha=alpha)
    check.positive("partition.dirichlet", "Small alpha is heterogeneous, 100 nearly iid.", alpha=alpha)
    check.whole("partition.dirichlet", least=0, min_rows=min_rows)
    check.choice("partition.dirichlet", (False, True), balanced=balanced)
    return _partition("dirichlet", clients, seed, partial(_dirichlet, alpha=float(alpha), min_rows=int(min_rows),
                                                          balanced=bool(balanced)))


def shards(clients: int, classes_per_client: int = 2, seed: int = 0) -> Partition:
    """Label shards: every client holds rows of exactly `classes_per_client` classes.

    Split    clients * classes_per_client shards of one class each, as equal in size as the classes allow (large
             classes are cut into more), dealt at random so that a client never gets a class twice.
    Errors   ValueError if there are fewer classes than classes_per_client, fewer shards than classes (a row would
             have no owner), or too few rows of the classes to cut.
    Source   McMahan et al., AISTATS 2017, section 3; their shards, cut at equal sizes, may straddle two classes.

    >>> y = np.arange(100) % 10
    >>> {len(np.unique(y[rows])) for rows in shards(clients=10, classes_per_client=3)(y)}
    {3}
    """
    check.whole("partition.shards", classes_per_client=classes_per_client)
    return _partition("shards", clients, seed, partial(_shards, classes_per_client=int(classes_per_client)))


def power_law(clients: int, exponent: float = 1.0, min_rows: int = 1, seed: int = 0) -> Partition:
    """Quantity skew: the i-th largest client has rows ~ i ** -exponent; labels are iid.

    Split    Sizes below min_rows are raised to it and the rest keeps its proportions; which client is large is drawn.
    Units    exponent >= 0 (0: equal sizes); min_rows in rows.
    Errors   ValueError if exponent is negative or not finite, or min_rows * clients > rows.

    >>> sorted(len(rows) for rows in power_law(clients=4, exponent=1)(np.zeros(25, int)))
    [3, 4, 6, 12]
    """
    _single("power_law", exponent=exponent)
    check.nonnegative("partition.power_law", exponent=exponent)
    check.whole("partition.power_law", min_rows=min_rows)
    return _partition("power_law", clients, seed, partial(_power_law, exponent=float(exponent),
                                                          min_rows=int(min_rows)))


def natural(owners, seed: int = 0) -> Partition:
    """The clients that the data came with: `owners` [n] names the owner of each row.

    Clients are numbered in sorted order of their names; the seed only orders the rows inside a client.

    >>> [rows.tolist() for rows in natural(["ann", "bob", "ann"])([0, 0, 1])]
    [[0, 2], [1]]
    """
    owners = np.asarray(owners)
    if owners.ndim != 1 or not len(owners) or owners.dtype.kind not in "biuUS":
        check.fail("partition.natural", "one owner a row, integers or strings",
                   f"shape {list(owners.shape)}, dtype {owners.dtype}")
    names, numbers = np.unique(owners, return_inverse=True)
    return _partition("natural", len(names), seed, partial(_natural, numbers))


def _partition(name, clients, seed, split):
    check.whole(f"partition.{name}", clients=clients)
    check.whole(f"partition.{name}", least=0, seed=seed)
    return Partition(name, int(clients), int(seed), split)


def _single(name, **values):
    for key, value in values.items():
        if np.ndim(value):
            check.fail(f"partition.{name}", f"a single number {key}", f"{key}={value!r}",
                       "Make one partition for each value.")


def _iid(labels, clients, rng):
    return np.array_split(rng.permutation(len(labels)), clients), ""


def _natural(owners, labels, clients, rng):
    if len(owners) != len(labels):
        check.fail("partition.natural", "one owner a row", f"{len(owners)} owners for {len(labels)} rows")
    return _groups(owners, clients), ""


def _power_law(labels, clients, rng, *, exponent, min_rows):
    _enough("power_law", len(labels), clients, min_rows)
    weights = np.arange(1, clients + 1) ** -exponent
    sizes, free = np.full(clients, min_rows), clients
    while free:                       # ranks past `free` sit on the floor; the ranks before share what is left
        sizes[:free] = _apportion(len(labels) - min_rows * (clients - free), weights[:free])
        above = int((sizes[:free] >= min_rows).sum())
        sizes[above:] = min_rows
        if above == free:
            break
        free = above
    rows = np.split(rng.permutation(len(labels)), np.cumsum(rng.permutation(sizes))[:-1])
    floor = clients - free
    return rows, f"{floor} of {clients} clients raised to min_rows = {min_rows}" if floor else ""


def _dirichlet(labels, clients, rng, *, alpha, min_rows, balanced):
    _enough("dirichlet", len(labels), clients, min_rows)
    by_class = [rng.permutation(rows) for rows in _by_class("dirichlet", labels)]
    if balanced:
        return _balanced(by_class, clients, alpha, rng), ""
    rows = [[] for _ in range(clients)]
    for members in by_class:
        share = np.minimum(np.cumsum(rng.dirichlet(np.full(clients, alpha))), 1)
        # One random offset a class makes the expected rows of everybody exact; floor alone favours the last client,
        # rounding starves the first and the last.
        cuts = np.floor(share[:-1] * len(members) + rng.random()).astype(int)
        for client, part in enumerate(np.split(members, cuts)):
            rows[client].append(part)
    rows = [rng.permutation(np.concatenate(parts)).tolist() for parts in rows]
    moved = _move(rows, min_rows)
    note = f"{moved} of {len(labels)} rows moved so that every client has {min_rows}" if moved else ""
    return [np.array(part, int) for part in rows], note


def _move(rows, least) -> int:
    """Move single rows from the largest clients to those below `least`, in place; how many were moved.

    Rows are in random order inside a client, so the last is a random one.  The largest has more than `least` as long
    as anyone has less, because the mean is at least `least`.
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


def _balanced(by_class, clients, alpha, rng):
    left = np.array([len(members) for members in by_class])
    total, start = left.sum(), [0] * len(left)
    prior = alpha * len(left) * left / total
    rows = [None] * clients
    sizes = np.full(clients, total // clients) + (np.arange(clients) < total % clients)
    for client in rng.permutation(clients):
        mixture, take = rng.dirichlet(prior), np.zeros(len(left), int)
        while (need := sizes[client] - take.sum()) > 0:
            open_ = np.where(left > take, mixture, 0)
            if not open_.sum() > 0:                # its classes are used up: it takes what is there
                open_ = (left - take).astype(float)
            take = np.minimum(take + rng.multinomial(need, open_ / open_.sum()), left)
        rows[client] = np.concatenate([m[s:s + t] for m, s, t in zip(by_class, start, take, strict=True)])
        start, left = [s + t for s, t in zip(start, take, strict=True)], left - take
    return rows


def _shards(labels, clients, rng, *, classes_per_client):
    by_class = [rng.permutation(rows) for rows in _by_class("shards", labels)]
    counts = _shard_counts(np.array([len(members) for members in by_class]), clients, classes_per_client)
    rows, room = [[] for _ in range(clients)], np.full(clients, classes_per_client)
    for which in rng.permutation(len(by_class)):
        # Those with most room first, ties at random: a deal that always ends with every client full.
        owners = np.lexsort((rng.random(clients), -room))[:counts[which]]
        room[owners] -= 1
        for client, part in zip(owners, np.array_split(by_class[which], len(owners)), strict=True):
            rows[client].append(part)
    return [np.concatenate(parts) for parts in rows], ""


def _shard_counts(sizes, clients, per_client):
    """Shards of each class: at least one, at most one a client or a row, the largest shard cut first."""
    total, most = clients * per_client, np.minimum(sizes, clients)
    if per_client > len(sizes):
        check.fail("partition.shards", "classes_per_client <= number of classes",
                   f"classes_per_client={per_client} for {len(sizes)} classes")
    if total < len(sizes):
        check.fail("partition.shards", "a shard for every class, so that every row has an owner",
                   f"{clients} clients * {per_client} classes = {total} shards for {len(sizes)} classes",
                   "Raise clients or classes_per_client.")
    if total > most.sum():
        check.fail("partition.shards", "enough rows of each class to cut",
                   f"{total} shards wanted, {most.sum()} possible", "Lower clients or classes_per_client.")
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


def _by_class(name, labels):
    """Rows of each class that occurs."""
    if labels.dtype.kind not in "biu":
        check.fail(f"partition.{name}", "integer labels, since it splits by class", f"dtype {labels.dtype}",
                   "Use iid, power_law or natural.")
    values, numbers = np.unique(labels, return_inverse=True)
    return _groups(numbers, len(values))


def _groups(numbers, count):
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.cumsum(np.bincount(numbers, minlength=count))[:-1])


def _enough(name, rows, clients, min_rows):
    if min_rows * clients > rows:
        check.fail(f"partition.{name}", "min_rows * clients <= rows", f"{min_rows} * {clients} > {rows}",
                   "Lower min_rows or clients.")


def _apportion(total, weights):
    """`total` in whole parts proportional to weights, by largest remainders."""
    share = total * weights / weights.sum()
    parts = np.floor(share).astype(int)
    parts[np.argsort(parts - share, kind="stable")[:total - parts.sum()]] += 1
    return parts
