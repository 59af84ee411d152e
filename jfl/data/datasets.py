"""Datasets: rows and labels as NumPy arrays on the host.

Each function returns a `Dataset`, whose arrays are checked once. Shapes use n for the number of
training rows and m for the number of test rows. To add a dataset, write one function and add its
name to `__all__`.
"""

import contextlib
import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from ..core import checks
from ..core.lazy import explain_missing_package
from . import image_files
from .adult import adult
from .packages import movielens_100k, seglearn_watch, ta_feng
from .plays import shakespeare
from .rows import ONE_ARRAY, Dataset, digest, make_dataset, require_owners
from .synthetic import synthetic

__all__ = [
    "adult",
    "arrays",
    "cifar10",
    "digits",
    "emnist",
    "fashion_mnist",
    "file",
    "frame",
    "hugging_face",
    "mnist",
    "movielens_100k",
    "prepared",
    "seglearn_watch",
    "shakespeare",
    "svhn",
    "synthetic",
    "ta_feng",
]

EMNIST_SPLITS = ("balanced", "byclass", "bymerge", "digits", "letters", "mnist")


def arrays(
    x: ArrayLike,
    y: ArrayLike,
    x_test: ArrayLike | None = None,
    y_test: ArrayLike | None = None,
    classes: int | None = None,
    name: str = "arrays",
    *,
    owners: ArrayLike | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Return a dataset of your own arrays.

    Args:
        x: [n, ...], training rows as the model gets them. Floats become float32, and integers
            (tokens) become int32.
        y: [n], one label per row: an integer in [0, classes), or any number if classes=0. For
            several labels per row, [n, k]: tokens in [0, classes), or a negative number where a
            token does not count; if classes=0, numbers, such as 0 or 1 for each of k attributes.
        x_test: [m, ...], test rows. None takes test rows from `x`.
        y_test: [m], their labels.
        classes: number of classes. None counts them from the labels, and 0 means regression.
        name: the name of the dataset, for messages.
        owners: [n], the owner of each row of `x`. `partition.natural()` then makes each owner a
            client.
        test_fraction: fraction of each owner's rows, in (0, 1), that become test rows if `x_test`
            is None.
        seed: seed of the choice of test rows.

    Raises:
        ValueError: if shapes disagree, there are no rows, values are not finite, or labels are not
            integers in the right range.

    Example:
        >>> arrays([[0.0], [1.0]], [0, 1], [[0.5]], [1]).classes
        2
        >>> data = arrays(np.zeros((10, 3)), np.arange(10) % 2, test_fraction=0.3)
        >>> len(data.x), len(data.x_test)
        (7, 3)
    """
    where = f"datasets.arrays({name!r})"
    if owners is not None:
        owners = checks.as_array(where, "owners", owners)
        require_owners(where, owners)
    if (x_test is None) != (y_test is None):
        checks.fail(where, "both x_test and y_test, or none of them", "one of them")
    if x_test is not None and y_test is not None:
        data = make_dataset(where, x, y, x_test, y_test, classes, name)
        return data if owners is None else data._replace(owners=owners)
    checks.require_fraction(where, single=True, test_fraction=test_fraction)
    checks.require_seed(where, seed=seed)
    x, y = (checks.as_array(where, *named, ONE_ARRAY) for named in (("x", x), ("y", y)))
    count = len(x) if x.ndim else 0
    who = np.zeros(count) if owners is None else owners
    if not (y.shape[:1] == who.shape == (count,)):
        shapes = f"shapes {[*x.shape]}, {[*y.shape]} and {[*who.shape]}"
        checks.fail(where, "one label and one owner per row of x", shapes)
    is_test = _draw_test_rows(who, test_fraction, np.random.default_rng(seed))
    data = make_dataset(where, x[~is_test], y[~is_test], x[is_test], y[is_test], classes, name)
    return data if owners is None else data._replace(owners=who[~is_test])


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
    """Return a dataset from a pandas or polars data frame.

    One column holds the labels, one may hold the owners of rows, and the others are features.

    Args:
        data: the frame, with one row per example; or a dict of columns.
        label: the column of labels: integers from 0, or numbers if classes=0.
        owner: the column that names the owner of each row. `partition.natural()` then makes each
            owner a client.
        features: the columns of x, all of them numeric. None selects all remaining columns.
        test: a frame of test rows with the same columns. None takes test rows from `data`.
        test_fraction: fraction of each owner's rows, in (0, 1), that become test rows if `test` is
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
        features = [name for name in getattr(data, "columns", data) if name not in (label, owner)]
    x, y = _matrix(where, data, features), np.asarray(data[label])
    owners = None if owner is None else np.asarray(data[owner]).astype(str)
    rows = (x, y) if test is None else (x, y, _matrix(where, test, features), test[label])
    more: Any = dict(owners=owners, test_fraction=test_fraction, seed=seed)
    return arrays(*rows, classes=classes, name="frame", **more)


def file(
    data: str = "",
    label: str = "label",
    owner: str = "owner",
    *,
    classes: int | None = None,
    test_fraction: float = 0.2,
) -> Dataset:
    """Return the rows of a file: .npz with arrays x and y, or a table, .csv or .parquet.

    A table has a column of labels and may have a column of owners; all other columns are features.
    An .npz file may have an array of owners, and x_test and y_test.  Labels that are words become
    numbers, in alphabetical order.

    Args:
        data: rows in .csv, .parquet or .npz (arrays x, y, owner); each owner is a client.
        label: column of labels in a table.
        owner: column or array of owners, if there is one.
        classes: number of classes, 0 for regression; default counts the labels.
        test_fraction: fraction of each owner's rows that become test rows, if the file has none.

    Raises:
        ValueError: if the file cannot be read, and as in `arrays`.
    """
    where = "datasets.file"
    try:
        columns = _read_columns(Path(data), owner)
    except (OSError, ValueError, ImportError) as error:
        checks.fail(where, "a file .npz, .csv or .parquet as data", f"{data or 'none'}: {error}")
    is_table = Path(data).suffix != ".npz"
    for name in (label,) if is_table else ("x", "y"):
        if name not in columns:
            kind = "column" if is_table else "array"
            hint = "Name the column of labels by label= (--label)." if is_table else ""
            if is_table and len(columns) == 1:
                hint = "Separate columns by commas, and name them in the first line."
            checks.fail(where, f"a {kind} {name!r} in {data}", ", ".join(columns), hint)
    if owner not in columns and owner != "owner":  # the default may be missing
        hint = "Name the column of owners by owner= (--owner)."
        actual = f"no column {owner!r}; columns: {', '.join(columns)}"
        checks.fail(where, f"a column of owners in {data}", actual, hint)
    name = label if is_table else "y"
    if _are_words(columns[name]):
        empty = [row for row, word in enumerate(columns[name].tolist()) if word in ("", None)]
        if empty:
            actual = f"none in {len(empty)} row(s), the first is {empty[0]}"
            expected = f"a label in every row of {data}"
            checks.fail(where, expected, actual, "Drop or fill these rows.")
        columns[name] = np.unique(columns[name], return_inverse=True)[1]
    more: Any = dict(classes=classes, test_fraction=test_fraction)
    if is_table:
        return frame(columns, label, owner if owner in columns else None, **more)
    rows = (columns.get(name) for name in ("x", "y", "x_test", "y_test"))
    return arrays(*rows, name=data, owners=columns.get(owner), **more)  # pyright: ignore[reportArgumentType]


def file_names(data: str, label: str, owner: str) -> tuple[list[str], list[str]]:
    """Return the names of the features and of the classes of a file that `file` can read.

    Args:
        data: as in `file`.
        label: as in `file`.
        owner: as in `file`.

    Returns:
        The names of the features in the order of x, none for an .npz file; and the words that are
        labels in the order of their numbers, none if the labels are numbers.
    """
    columns, is_table = _read_columns(Path(data), owner), Path(data).suffix != ".npz"
    y = columns[label if is_table else "y"]
    features = [name for name in columns if name not in (label, owner)] if is_table else []
    return features, np.unique(y).astype(str).tolist() if _are_words(y) else []


def _are_words(y: np.ndarray) -> bool:
    """Return whether labels are words and not numbers."""
    return y.dtype.kind not in "biuf"


def _read_columns(path: Path, owner: str) -> dict[str, np.ndarray]:
    """Return the columns or arrays of a file by name.

    Args:
        path: the file.
        owner: the column of owners, whose cells in .csv stay text: as numbers, 01 and 1 would be
            one owner.
    """
    if path.suffix == ".npz":
        return dict(np.load(path))
    if path.suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
        return {name: table[name].to_numpy() for name in table.column_names}
    if path.suffix != ".csv":
        raise ValueError("another kind of file")
    with path.open(newline="", encoding="utf-8-sig") as lines:
        names, *rows = [row for row in csv.reader(lines) if row] or [[]]
    for i, row in enumerate(rows):
        if len(row) != len(names):
            raise ValueError(f"row {i} has {len(row)} cells, but the header has {len(names)}")
    if repeated := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"several columns named {repeated[0]!r}")
    columns = dict(zip(names, map(np.array, zip(*rows, strict=True))))
    for name, text in columns.items():
        if name == owner:
            columns[name] = np.char.strip(text)
            continue
        for kind in (int, float):
            with contextlib.suppress(ValueError, OverflowError):
                columns[name] = text.astype(kind)
                break
    return columns


def prepared(
    name: str,
    row: Callable,
    *,
    splits: Sequence[str] = ("train", "test"),
    classes: int | None = None,
    data_dir: str | Path | None = None,
) -> Dataset:
    """Return a dataset that tensorflow_datasets has prepared, such as FEMNIST or StackOverflow.

    TensorFlow is needed to prepare the data, but not to read them.

    Other Parameters:
        name: the name of the prepared data, or "name/config".
        row: a function that maps one record, a dict of features, to (x, y), or to (x, y, owner) for
            `partition.natural()`.
        splits: the names of the training and the test split.
        classes: as in `arrays`.
        data_dir: as in `mnist`.

    Raises:
        DataUnavailable: if the data are not prepared or cannot be read.
        ValueError: if `row` does not return a tuple of this form, and as in `arrays`.

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
    for values in (train[0], test[0]):
        if not isinstance(values, tuple) or len(values) not in (2, 3):
            checks.fail(where, "(x, y) or (x, y, owner) of each record", checks.short_repr(values))
    (x, y, *owners), (x_test, y_test, *_) = zip(*train, strict=True), zip(*test, strict=True)
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

    Features that are images or columns of type uint8 are scaled to [0, 1].

    Args:
        train: a `datasets.Dataset` of training rows, or a dict of arrays.
        x: the column of features, such as images or sequences of tokens, all of one shape; or the
            names of several columns of numbers, which become one vector.
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

    def column(rows, name, scale=False):
        values = rows.with_format("numpy")[name] if hasattr(rows, "with_format") else rows[name]
        values = checks.as_array(where, name, values[:], "Pad or cut rows to one shape.")
        feature = (getattr(rows, "features", None) or {}).get(name)
        has_bytes = "uint8" in (str(values.dtype), getattr(feature, "dtype", ""))
        if scale and (has_bytes or type(feature).__name__ == "Image"):
            return values.astype(np.float32) / 255
        return values

    def features(rows):
        if isinstance(x, str):
            return column(rows, x, scale=True)
        return np.stack([column(rows, name, scale=True).astype(np.float32) for name in x], 1)

    data = make_dataset(
        where, features(train), column(train, y), features(test), column(test, y), classes, "rows"
    )
    if owner is None:
        return data
    owners = column(train, owner).astype(str)
    require_owners(where, owners)
    return data._replace(owners=owners)


def _matrix(where, data, names) -> np.ndarray:
    """Return columns of a data frame as Float32[n, columns]."""
    columns = {name: np.asarray(data[name]) for name in names}
    for name, column in columns.items():
        if column.dtype.kind not in "biuf":
            words = (each for each in enumerate(column) if not _is_number(each[1]))
            row, value = next(words, (0, column[0]))
            checks.fail(
                where,
                f"numbers in column {name!r}",
                f"{str(value)!r} in row {row}",
                "Fill empty cells. Encode categories (one column for each), or leave the column "
                "out with features=. If it names owners, pass owner= (--owner).",
            )
    return np.stack([column.astype(np.float32) for column in columns.values()], 1)


def _is_number(value: Any) -> bool:
    """Return whether a cell of a table is a number or can be read as one."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _draw_test_rows(groups, fraction, rng) -> np.ndarray:
    """Draw a fraction of the rows of each group, but not all of them; return Bool[n].

    Args:
        groups: [n], the group of each row.
        fraction: the fraction, in (0, 1].
        rng: the generator.
    """
    is_test = np.zeros(len(groups), bool)
    for group in np.unique(groups):
        rows = rng.permutation(np.flatnonzero(groups == group))
        is_test[rows[: min(round(fraction * len(rows)), len(rows) - 1)]] = True
    return is_test


def digits() -> Dataset:
    """Return the 1,797 handwritten digits that scikit-learn contains; nothing is downloaded.

    A fifth of each class becomes test rows, the same ones in each call.

    Shapes:
        x [n, 8, 8, 1], values in [0, 1]; 10 classes.

    References:
        Alpaydin and Kaynak, UCI repository, 1998 (its test half, as in
        sklearn.datasets.load_digits).

    Example:
        >>> digits().x.shape, digits().x_test.shape
        ((1438, 8, 8, 1), (359, 8, 8, 1))
    """
    with explain_missing_package():
        from sklearn.datasets import load_digits

    loaded: Any = load_digits(return_X_y=True)
    images, labels = loaded
    is_test = _draw_test_rows(labels, 0.2, np.random.default_rng(0))
    x = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    rows = x[~is_test], labels[~is_test], x[is_test], labels[is_test]
    return make_dataset("datasets.digits", *rows, 10, "digits")


def mnist(data_dir: str | Path | None = None) -> Dataset:
    """Return MNIST: x [60000, 28, 28, 1] in [0, 1], 10,000 test rows, 10 classes.

    The data are read from the first folder that has them, in any of these forms: prepared by
    tensorflow_datasets (TensorFlow is not needed to read them); mnist.npz with x, y, x_test and
    y_test (x_train and y_train are accepted); or the four IDX files of the authors in a folder
    mnist. Prepared data are decoded once and then read from a cache, in $JFL_CACHE_DIR or else in
    the folder jfl of the user's cache.

    Other Parameters:
        data_dir: the folder of the data, or one whose subfolder tfds holds them. None searches
            $JFL_DATA_DIR/tfds, $JFL_DATA_DIR, $TFDS_DATA_DIR and ~/tensorflow_datasets.

    Raises:
        DataUnavailable: if there are no data (the message says where jfl looked and how to prepare
            them), a package is missing, or files cannot be read.

    References:
        LeCun, Cortes and Burges, 1998.
    """
    return _images("mnist", data_dir)


def fashion_mnist(data_dir: str | Path | None = None) -> Dataset:
    """Return Fashion-MNIST: x [60000, 28, 28, 1] in [0, 1], 10,000 test rows, 10 classes.

    The data are read as in `mnist`, with IDX files in a folder fashion-mnist, and finally from
    /usr/share/datasets/fashion-mnist, where Debian's package dataset-fashion-mnist puts them.
    tensorflow_datasets shuffles rows when it prepares them, so prepared data and IDX files hold the
    same rows in different orders and have different checksums.

    Other Parameters:
        data_dir: as in `mnist`; no other folder is searched.

    Raises:
        DataUnavailable: if there are no data (the message names the package that has them), or a
            file is damaged.

    References:
        Xiao, Rasul and Vollgraf, arXiv:1708.07747.
    """
    return _images("fashion_mnist", data_dir)


def emnist(split: str = "balanced", data_dir: str | Path | None = None) -> Dataset:
    """Return one of the six versions of EMNIST: x [n, 28, 28, 1] in [0, 1].

    The data are read as in `mnist`, but the files are emnist-balanced.npz and so on, or IDX files
    such as emnist-balanced-train-images-idx3-ubyte.gz in a folder emnist.  The authors publish
    every image transposed, and this function transposes it back.  Your files must therefore hold
    the images as published; do not transpose them yourself.

    Other Parameters:
        split: "balanced" (47 classes), "byclass" (62), "bymerge" (47), "digits" (10), "letters"
            (26, numbered from 0) or "mnist" (10).
        data_dir: as in `mnist`.

    Memory:
        byclass has 697,932 + 116,323 rows: 2.6 GB as float32.

    References:
        Cohen et al., arXiv:1702.05373.
    """
    checks.require_one_of("datasets.emnist", EMNIST_SPLITS, split=split)
    data = _images(f"emnist/{split}", data_dir)
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


def cifar10(data_dir: str | Path | None = None) -> Dataset:
    """Return CIFAR-10: x [50000, 32, 32, 3] in [0, 1], 10,000 test rows, 10 classes.

    Parameters and errors are those of `mnist`. Data that are not prepared by tensorflow_datasets
    are read from cifar10.npz, or from the author's binaries data_batch_1.bin to data_batch_5.bin
    and test_batch.bin in a folder cifar-10-batches-bin.

    References:
        Krizhevsky, 2009.
    """
    return _images("cifar10", data_dir)


def svhn(data_dir: str | Path | None = None) -> Dataset:
    """Return cropped street view house numbers: x [73257, 32, 32, 3] in [0, 1], 26,032 test rows.

    Labels 0 to 9 are the digits. The 531,131 `extra` rows are not read. Parameters and errors are
    those of `mnist`. Data that are not prepared by tensorflow_datasets are read from
    svhn_cropped.npz.

    References:
        Netzer et al., 2011.
    """
    return _images("svhn_cropped", data_dir)


def _images(name: str, data_dir: str | Path | None) -> Dataset:
    """Return a dataset of images with values in [0, 1], and the checksum of the stored bytes."""
    stored = image_files.read_images(name, data_dir)
    classes = np.int32(image_files.NUM_CLASSES[name])
    checksum = digest(*(stored[key] for key in image_files.KEYS), classes)
    x, x_test = (stored[key].astype(np.float32) for key in ("x", "x_test"))
    x /= 255
    x_test /= 255
    rows = x, stored["y"], x_test, stored["y_test"]
    return make_dataset(f"datasets.{name}", *rows, int(classes), name, checksum)
