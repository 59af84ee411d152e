"""How partitions deal rows: (labels [n], C, Generator, options) -> rows of each client, and a note
for the manifest.

Axes: n rows, C clients.  Host only, NumPy; imports jfl.core.checks.  The factories with their
arguments are in `partition`.
"""

import heapq

import numpy as np

from ..core import checks


def iid(labels, clients, rng):
    return np.array_split(rng.permutation(len(labels)), clients), ""


def natural(owners, labels, clients, rng):
    if len(owners) != len(labels):
        checks.fail(
            "partition.natural", "one owner a row", f"{len(owners)} owners for {len(labels)} rows"
        )
    return _groups(owners, clients), ""


def power_law(labels, clients, rng, *, exponent, min_rows):
    _enough("power_law", len(labels), clients, min_rows)
    sizes, floor = floored(len(labels), np.arange(1, clients + 1) ** -exponent, min_rows)
    rows = np.split(rng.permutation(len(labels)), np.cumsum(rng.permutation(sizes))[:-1])
    return rows, f"{floor} of {clients} clients raised to min_rows = {min_rows}" if floor else ""


def floored(total, weights, least):
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


def dirichlet(labels, clients, rng, *, alpha, min_rows, balanced):
    _enough("dirichlet", len(labels), clients, min_rows)
    by_class = [rng.permutation(rows) for rows in _by_class("dirichlet", labels)]
    if balanced:
        return _balanced(by_class, clients, alpha, rng), ""
    rows = [[] for _ in range(clients)]
    for members in by_class:
        share = np.minimum(np.cumsum(rng.dirichlet(np.full(clients, alpha))), 1)
        # One random offset a class makes the expected rows of everybody exact; floor alone favours
        # the last client, rounding starves the first and the last.
        cuts = np.floor(share[:-1] * len(members) + rng.random()).astype(int)
        for client, part in enumerate(np.split(members, cuts)):
            rows[client].append(part)
    rows = [rng.permutation(np.concatenate(parts)).tolist() for parts in rows]
    moved = _move(rows, min_rows)
    note = (
        f"{moved} of {len(labels)} rows moved so that every client has {min_rows}" if moved else ""
    )
    return [np.array(part, int) for part in rows], note


def _move(rows, least) -> int:
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
            if not open_.sum() > 0:  # its classes are used up: it takes what is there
                open_ = (left - take).astype(float)
            take = np.minimum(take + rng.multinomial(need, open_ / open_.sum()), left)
        rows[client] = np.concatenate(
            [m[s : s + t] for m, s, t in zip(by_class, start, take, strict=True)]
        )
        start, left = [s + t for s, t in zip(start, take, strict=True)], left - take
    return rows


def shards(labels, clients, rng, *, classes_per_client):
    by_class = [rng.permutation(rows) for rows in _by_class("shards", labels)]
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


def labelled(labels, clients, rng, *, classes_per_client, rows, exponent, min_rows):
    total = len(labels) if rows is None else rows * clients
    _enough(
        "labels",
        len(labels),
        clients,
        min_rows if rows is None else rows,
        "min_rows" if rows is None else "rows",
    )
    by_class = [rng.permutation(members) for members in _by_class("labels", labels)]
    sizes = rng.permutation(floored(total, np.arange(1, clients + 1) ** -exponent, min_rows)[0])
    return _classed("labels", by_class, sizes, classes_per_client, rng)


def sized(labels, clients, rng, *, rows, classes_per_client):
    if sum(rows) > len(labels):
        checks.fail(
            "partition.sizes",
            f"sum of rows <= {len(labels)} rows of the data",
            sum(rows),
            "Lower rows, or take fewer clients.",
        )
    if classes_per_client is not None:
        by_class = [rng.permutation(members) for members in _by_class("sizes", labels)]
        return _classed("sizes", by_class, np.array(rows), classes_per_client, rng)
    return np.split(rng.permutation(len(labels)), np.cumsum(rows))[:-1], _free(
        len(labels), sum(rows)
    )


def _classed(name, by_class, sizes, per_client, rng):
    """Clients of given sizes with rows of exactly `per_client` classes each."""
    have, clients = np.array([len(members) for members in by_class]), len(sizes)
    if per_client > len(have):
        checks.fail(
            f"partition.{name}",
            "classes_per_client <= number of classes",
            f"classes_per_client={per_client} for {len(have)} classes",
        )
    for _ in range(20):
        take = _levelled(_drawn(sizes, have, per_client, rng), have)
        if take is not None:
            break
    else:
        checks.fail(
            f"partition.{name}",
            f"classes that fill {clients} clients of {sizes.min()} to {sizes.max()} rows with "
            f"exactly {per_client} of them each",
            f"classes of {have.min()} to {have.max()} rows, and 20 deals that do not fit",
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
        _free(have.sum(), sizes.sum()),
    )


def _free(rows, owned):
    return f"{rows - owned} of {rows} rows have no owner" if rows > owned else ""


def _drawn(sizes, have, per_client, rng):
    """Rows of each class for each client [C, classes]: equal parts of its classes, which may be
    more than there are."""
    take, left = np.zeros((len(sizes), len(have)), int), have.astype(float)
    for client in np.argsort(-sizes, kind="stable"):
        part = -(-sizes[client] // per_client)
        fits = left >= part
        if fits.sum() >= per_client:
            chosen = rng.choice(
                len(have), per_client, replace=False, p=np.where(fits, left, 0) / left[fits].sum()
            )
        else:
            chosen = np.argsort(-left, kind="stable")[:per_client]
        take[client, chosen] = sizes[client] // per_client + (
            np.arange(per_client) < sizes[client] % per_client
        )
        left -= take[client]
    return take


def _levelled(take, have):
    """Move rows inside clients, from classes drawn too often to classes with rows left; None where
    that is impossible.

    Each move follows the shortest path over classes that share a client with two rows to give, so
    no client changes its size or loses a class.
    """
    take, over = take.copy(), take.sum(0) - have
    while (over > 0).any():
        source = int(over.argmax())
        came, queue = {source: None}, [source]
        for at in queue:
            for client in np.flatnonzero(take[:, at] > 1):
                for to in np.flatnonzero(take[client]):
                    if int(to) not in came:
                        came[int(to)] = at, int(client)
                        queue.append(int(to))
        ends = [at for at in queue if over[at] < 0]
        if not ends:
            return None
        path, at = [], ends[0]
        while came[at] is not None:
            path.append((came[at][1], came[at][0], at))
            at = came[at][0]
        spare = [take[client, old] - 1 for client, old, _ in path]
        moved = min(*spare, over[source], -over[ends[0]])
        for client, old, new in path:
            take[client, old] -= moved
            take[client, new] += moved
        over = take.sum(0) - have
    return take


def similarity(labels, clients, rng, *, share, rows, by):
    if rows is not None:
        _enough("similarity", len(labels), clients, rows, "rows")
    total = len(labels) if rows is None else rows * clients
    sizes = total // clients + (np.arange(clients) < total % clients)
    by_class = _by_class("similarity", labels)
    even = np.round(share * sizes).astype(int)
    order = rng.permutation(len(labels))
    given, rest = np.split(order[: even.sum()], np.cumsum(even)[:-1]), order[even.sum() :]
    need = sizes - even
    if by == "sorted":
        rest = rest[: need.sum()]
        rest = np.split(rest[np.argsort(labels[rest], kind="stable")], np.cumsum(need)[:-1])
        return [np.concatenate(parts) for parts in zip(given, rest, strict=True)], ""
    free = np.zeros(len(labels), bool)
    free[rest] = True
    own, over = [None] * clients, []
    for which, members in enumerate(by_class):
        members, mine = (
            rng.permutation(members[free[members]]),
            np.arange(which, clients, len(by_class)),
        )
        parts = need[mine]
        if parts.sum() > len(members):
            parts = len(members) // len(mine) + (np.arange(len(mine)) < len(members) % len(mine))
        for client, part in zip(mine, np.split(members, np.cumsum(parts))[:-1], strict=True):
            own[client] = part
        over.append(members[parts.sum() :])
    short = need - [len(part) for part in own]
    over = np.split(rng.permutation(np.concatenate(over))[: short.sum()], np.cumsum(short)[:-1])
    note = (
        f"{short.sum()} of {total} rows from another class, their own had run dry"
        if short.any()
        else ""
    )
    return [np.concatenate(parts) for parts in zip(given, own, over, strict=True)], note


def _by_class(name, labels):
    """Rows of each class that occurs."""
    if labels.dtype.kind not in "biu":
        checks.fail(
            f"partition.{name}",
            "integer labels, since it splits by class",
            f"dtype {labels.dtype}",
            "Use iid, power_law or natural.",
        )
    values, numbers = np.unique(labels, return_inverse=True)
    return _groups(numbers, len(values))


def _groups(numbers, count):
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.cumsum(np.bincount(numbers, minlength=count))[:-1])


def _enough(name, rows, clients, least, called="min_rows"):
    if least * clients > rows:
        checks.fail(
            f"partition.{name}",
            f"{called} * clients <= rows",
            f"{least} * {clients} > {rows}",
            f"Lower {called} or clients.",
        )


def _apportion(total, weights):
    """`total` in whole parts proportional to weights, by largest remainders."""
    share = total * weights / weights.sum()
    parts = np.floor(share).astype(int)
    parts[np.argsort(parts - share, kind="stable")[: total - parts.sum()]] += 1
    return parts
