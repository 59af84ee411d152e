"""Partitions: which rows belong to which client.  A partition is made first and applied to the
labels later.

Axes: n rows, C clients.  Host only (NumPy Generator); imports jfl.core.checks and its neighbour
deal.  Every partition here depends on the labels and its seed alone and gives no row to two
clients; `labels`, `similarity` and `sizes` may leave rows that nobody owns, the others use every
row.  A new one is a factory here and a function in `deal`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Annotated

import numpy as np

from ..core import checks
from ..core.options import Setting
from . import assignment

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
        labels = checks.array(where, "labels", labels)
        if self.split is None:
            checks.fail(
                where,
                "the owners of the rows",
                "none",
                "federate(dataset, partition.natural()) takes the "
                "dataset's; else give one owner a row.",
            )
        if labels.ndim != 1:
            checks.fail(where, "labels of shape [n]", f"shape {list(labels.shape)}")
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
    return _partition("iid", clients, seed, partial(assignment.iid))


def dirichlet(
    clients: int,
    alpha: float = 0.3,
    min_rows: Annotated[int, Setting(default=16)] = 1,
    balanced: bool = False,
    seed: int = 0,
) -> Partition:
    """Label skew: small alpha gives each client few classes, large alpha the mixture of the whole.

    Split    Each class is cut by proportions ~ Dirichlet(alpha, ..., alpha) over the clients, so
    sizes vary too.
             Then single rows, drawn at random from whoever is largest, move to clients below
             min_rows; their number
             is in the note.  min_rows=0 leaves clients without rows, which `federate` refuses.
             balanced=True: equal sizes (to one row); each client draws a class mixture ~
             Dirichlet(alpha * classes *
             share of each class) and takes its rows by it while the classes last, in random order
             of the clients.

    Args:
        alpha: concentration; small is heterogeneous.
        min_rows: least rows of a client.

    Units:
        alpha > 0: one class's concentration, in both forms; min_rows in rows.

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
    checks.positive(
        "partition.dirichlet",
        "Small alpha is heterogeneous, 100 nearly iid.",
        single=True,
        alpha=alpha,
    )
    checks.whole("partition.dirichlet", least=0, min_rows=min_rows)
    checks.choice("partition.dirichlet", (False, True), balanced=balanced)
    return _partition(
        "dirichlet",
        clients,
        seed,
        partial(
            assignment.dirichlet,
            alpha=float(alpha),
            min_rows=int(min_rows),
            balanced=bool(balanced),
        ),
    )


def shards(clients: int, classes_per_client: int = 2, seed: int = 0) -> Partition:
    """Label shards: every client holds rows of exactly `classes_per_client` classes.

    Split    clients * classes_per_client shards of one class each, as equal in size as the classes
    allow (large
             classes are cut into more), dealt at random so that a client never gets a class twice.

    Args:
        classes_per_client: classes each client holds.

    Raises:
        ValueError: if there are fewer classes than classes_per_client, fewer shards than classes (a
            row would have no owner), or too few rows of the classes to cut.

    Sizes    follow from the classes; `labels` fixes the sizes instead.

    References:
        McMahan et al., AISTATS 2017, section 3; their shards, cut at equal sizes, may straddle two
        classes.

    Example:
        >>> y = np.arange(100) % 10
        >>> {len(np.unique(y[rows])) for rows in shards(clients=10, classes_per_client=3)(y)}
        {3}
    """
    checks.whole("partition.shards", classes_per_client=classes_per_client)
    return _partition(
        "shards",
        clients,
        seed,
        partial(assignment.shards, classes_per_client=int(classes_per_client)),
    )


def labels(
    clients: int,
    classes_per_client: int = 2,
    rows: Annotated[int | None, Setting("rows_per_client")] = None,
    exponent: float = 0.0,
    min_rows: Annotated[int | None, Setting(default=16)] = None,
    seed: int = 0,
) -> Partition:
    """Exactly `classes_per_client` classes at every client, and sizes that are given: equal, or by
    a power law.

    Split    Clients from the largest to the smallest draw classes, by the rows each has left among
    those that still
             hold an equal part of the client; where a class is drawn beyond its rows, clients with
             several classes
             take more of the others.  Rows that remain have no owner, and the note says how many.

    Args:
        classes_per_client: classes each client holds.
        rows: rows of a client; default all rows.
        exponent: of the sizes, 0 is equal.
        min_rows: least rows of a client.

    Units:
        rows: of a client on average, exactly with exponent=0; None: all rows, sizes differ by at
        most one. exponent >= 0: the i-th largest client has rows ~ i ** -exponent, at least
        min_rows, which is at least classes_per_client (the default).

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
    checks.whole("partition.labels", classes_per_client=classes_per_client)
    checks.nonnegative("partition.labels", single=True, exponent=exponent)
    least = classes_per_client if min_rows is None else min_rows
    checks.whole(
        "partition.labels",
        "A client needs a row of each of its classes.",
        least=classes_per_client,
        min_rows=least,
    )
    if rows is not None:
        checks.whole(
            "partition.labels",
            "It is the mean of a client, and min_rows the least.",
            least=least,
            rows=rows,
        )
    return _partition(
        "labels",
        clients,
        seed,
        partial(
            assignment.labelled,
            classes_per_client=int(classes_per_client),
            rows=None if rows is None else int(rows),
            exponent=float(exponent),
            min_rows=int(least),
        ),
    )


def power_law(
    clients: int,
    exponent: float = 1.0,
    min_rows: Annotated[int, Setting(default=16)] = 1,
    seed: int = 0,
) -> Partition:
    """Quantity skew: the i-th largest client has rows ~ i ** -exponent; labels are iid.

    Split    Sizes below min_rows are raised to it and the rest keeps its proportions; which client
    is large is drawn.

    Args:
        exponent: of the sizes, 0 is equal.
        min_rows: least rows of a client.

    Units:
        exponent >= 0 (0: equal sizes); min_rows in rows.

    Raises:
        ValueError: if exponent is negative or not finite, or min_rows * clients > rows.

    Example:
        >>> sorted(len(rows) for rows in power_law(clients=4, exponent=1)(np.zeros(25, int)))
        [3, 4, 6, 12]
    """
    checks.nonnegative("partition.power_law", single=True, exponent=exponent)
    checks.whole("partition.power_law", min_rows=min_rows)
    return _partition(
        "power_law",
        clients,
        seed,
        partial(assignment.power_law, exponent=float(exponent), min_rows=int(min_rows)),
    )


def similarity(
    clients: int,
    share: float = 0.0,
    rows: Annotated[int | None, Setting("rows_per_client")] = None,
    by: str = "class",
    seed: int = 0,
) -> Partition:
    """A share of each client's rows is iid, the rest is of one kind; sizes are equal.

    Split    round(share * rows) rows a client are dealt at random from all.  The rest, by="class":
    client c takes
             rows of class c mod (number of classes); when a class runs dry its clients get equal
             parts of it and
             rows of any class for what is missing, and the note counts these.  by="sorted": the
             other rows are
             sorted by label and cut into equal pieces.

    Args:
        share: part of a client's rows that is iid.
        rows: rows of a client; default all rows.

    Units:
        share in [0, 1]: 1 is iid.  rows of a client; None: all rows, sizes differ by at most one.
        Rows that remain have no owner.

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
    checks.nonnegative(
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
        checks.whole("partition.similarity", rows=rows)
    checks.choice("partition.similarity", ("class", "sorted"), by=by)
    return _partition(
        "similarity",
        clients,
        seed,
        partial(
            assignment.similarity,
            share=float(share),
            by=by,
            rows=None if rows is None else int(rows),
        ),
    )


def sizes(rows, *, classes_per_client: int | None = None, seed: int = 0) -> Partition:
    """Client c gets exactly rows[c] rows: dealt at random, or of exactly `classes_per_client`
    classes.

    Split    None: iid.  A number: classes are drawn, and filled in parts as equal as the data
    allow, as in `labels`.
             Rows that remain have no owner, and the note says how many.

    Args:
        rows: a whole number for each client, at least classes_per_client.
        classes_per_client: classes each client holds; None: dealt from all.

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
        or checks.array("partition.sizes", "rows", rows).ndim != 1
        or not len(rows)
    ):
        checks.fail(
            "partition.sizes",
            "rows, a whole number for each client",
            f"rows={rows!r}",
            "Give [150] * 60.",
        )
    least = 1
    if classes_per_client is not None:
        checks.whole("partition.sizes", classes_per_client=classes_per_client)
        least = classes_per_client = int(classes_per_client)
    for client, count in enumerate(rows):
        checks.whole(
            "partition.sizes",
            "A client needs a row of each of its classes.",
            least=least,
            **{f"rows[{client}]": count},
        )
    return _partition(
        "sizes",
        len(rows),
        seed,
        partial(
            assignment.sized,
            rows=tuple(int(count) for count in rows),
            classes_per_client=classes_per_client,
        ),
    )


def natural(owners=None, seed: int = 0) -> Partition:
    """The clients that the data came with: `owners` [n] names the owner of each row; None: as the
    dataset says.

    Clients are numbered in sorted order of their names; the seed only orders the rows inside a
    client.  Without owners the partition works in `federate`, with a dataset that has them
    (datasets.synthetic).

    >>> [rows.tolist() for rows in natural(["ann", "bob", "ann"])([0, 0, 1])]
    [[0, 2], [1]]
    """
    if owners is None:
        checks.seed("partition.natural", seed=seed)
        return Partition("natural", 0, int(seed), None)
    owners = checks.array("partition.natural", "owners", owners)
    if owners.ndim != 1 or not len(owners) or owners.dtype.kind not in "biuUS":
        checks.fail(
            "partition.natural",
            "one owner a row, integers or strings",
            f"shape {list(owners.shape)}, dtype {owners.dtype}",
        )
    names, numbers = np.unique(owners, return_inverse=True)
    return _partition("natural", len(names), seed, partial(assignment.natural, numbers))


def _partition(name, clients, seed, split):
    checks.whole(f"partition.{name}", clients=clients)
    checks.seed(f"partition.{name}", seed=seed)
    return Partition(name, int(clients), int(seed), split)
