"""Datasets: rows and labels as NumPy arrays on the host, checked once, where they enter.

Axes: n training rows, m test rows.  Imports jfl.check and NumPy; scikit-learn and tensorflow_datasets are imported
by the functions that read them.  A new dataset is one function and one name in `__all__`.
"""
import hashlib
import os
import uuid
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import check

__all__ = ["arrays", "cifar10", "digits", "emnist", "fashion_mnist", "mnist", "svhn"]

EMNIST_SPLITS = ("balanced", "byclass", "bymerge", "digits", "letters", "mnist")
LAYOUT = 1        # of the cache files: raise it when the decoding changes, and old files are not read again
READ = 1000       # records read from disk at once
INT32 = 2**31 - 1


class Dataset(NamedTuple):
    """Rows with their labels, and what identifies them."""
    x: np.ndarray        # [n, ...] float32, or int32 for tokens
    y: np.ndarray        # [n] int32, or float32 when classes == 0
    x_test: np.ndarray   # [m, ...]
    y_test: np.ndarray   # [m]
    classes: int         # 0: not a classification problem
    name: str
    checksum: str        # sha256 of the rows as they were stored or given


def arrays(x, y, x_test, y_test, classes: int | None = None, name: str = "arrays") -> Dataset:
    """Your own arrays.

    Shapes   x [n, ...], y [n], x_test [m, ...], y_test [m].
    Units    x as a model shall see it: floats become float32, integers (tokens) int32; y integers in [0, classes).
             classes=None counts them, classes=0 says that y is a number to regress on.
    Errors   ValueError on shapes that disagree, no rows, nan or inf, labels that are not whole or out of range.

    >>> arrays([[0.0], [1.0]], [0, 1], [[0.5]], [1]).classes
    2
    """
    return _dataset(f"datasets.arrays({name!r})", x, y, x_test, y_test, classes, name)


def digits(test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """The 1,797 handwritten digits that scikit-learn carries, so that nothing is downloaded.

    Shapes   x [n, 8, 8, 1], values in [0, 1]; 10 classes.
    Units    test_fraction in (0, 1), taken from each class (stratified), fixed by `seed`.
    Source   Alpaydin and Kaynak, UCI repository, 1998 (its test half, as in sklearn.datasets.load_digits).

    >>> digits().x.shape, digits().x_test.shape
    ((1438, 8, 8, 1), (359, 8, 8, 1))
    """
    check.fraction("datasets.digits", test_fraction=test_fraction)
    check.whole("datasets.digits", least=0, seed=seed)
    from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    test = np.zeros(len(labels), bool)
    for label in range(10):
        rows = rng.permutation(np.flatnonzero(labels == label))
        test[rows[:round(test_fraction * len(rows))]] = True
    if test.all() or not test.any():
        check.fail("datasets.digits", "rows on both sides of the split", f"test_fraction={test_fraction!r}",
                   "Take 0.2.")
    x = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    return _dataset("datasets.digits", x[~test], labels[~test], x[test], labels[test], 10, "digits")


def mnist(data_dir=None, download: bool = False) -> Dataset:
    """MNIST: x [60000, 28, 28, 1] in [0, 1], 10,000 test rows, 10 classes.

    Read from data prepared by tensorflow_datasets, without TensorFlow, and decoded once: later calls read a cache.
    Places   data_dir and data_dir/tfds; else $JFL_DATA_DIR/tfds, $JFL_DATA_DIR, $TFDS_DATA_DIR and
             ~/tensorflow_datasets.  The cache is $JFL_CACHE_DIR, else jfl in the user's cache folder.
    Errors   ValueError if the data are not there (it says where they were looked for and how to prepare them), if a
             package is missing, or if the files cannot be read.
    Source   LeCun, Cortes and Burges, 1998.
    """
    return _prepared("mnist", data_dir, download)


def fashion_mnist(data_dir=None, download: bool = False) -> Dataset:
    """Fashion-MNIST: shapes, places and errors as `mnist`.  Source: Xiao, Rasul and Vollgraf, arXiv:1708.07747."""
    return _prepared("fashion_mnist", data_dir, download)


def emnist(split: str = "balanced", data_dir=None, download: bool = False) -> Dataset:
    """EMNIST in one of its six versions: x [n, 28, 28, 1] in [0, 1]; places and errors as `mnist`.

    Classes  balanced 47, byclass 62, bymerge 47, digits 10, letters 26 (a is 0), mnist 10.
    Memory   byclass has 697,932 + 116,323 rows: 2.6 GB as float32.
    Source   Cohen et al., arXiv:1702.05373.
    """
    check.choice("datasets.emnist", EMNIST_SPLITS, split=split)
    data = _prepared(f"emnist/{split}", data_dir, download)
    # The published files hold every image transposed, and tensorflow_datasets passes them on as they are.
    data = data._replace(x=_upright(data.x), x_test=_upright(data.x_test))
    labels = np.concatenate([data.y, data.y_test])
    if split == "letters" and labels.min() >= 1 and labels.max() <= 26:
        # Letters are numbered from 1 and 37 classes are declared; a classifier would get 11 that never occur.
        data = data._replace(y=data.y - 1, y_test=data.y_test - 1, classes=26)
    return data


def cifar10(data_dir=None, download: bool = False) -> Dataset:
    """CIFAR-10: x [50000, 32, 32, 3] in [0, 1], 10,000 test rows; places and errors as `mnist`.

    Source   Krizhevsky, 2009.
    """
    return _prepared("cifar10", data_dir, download)


def svhn(data_dir=None, download: bool = False) -> Dataset:
    """Street view house numbers, cropped: x [73257, 32, 32, 3] in [0, 1], 26,032 test rows; label 0 is the digit 0.

    Places and errors as `mnist`; the 531,131 `extra` rows are not read.  Source: Netzer et al., 2011.
    """
    return _prepared("svhn_cropped", data_dir, download)


# Checks: every dataset passes here, whoever made it.


def _dataset(where, x, y, x_test, y_test, classes, name, digest=None) -> Dataset:
    x, y, x_test, y_test, classes = _checked(where, x, y, x_test, y_test, classes)
    return Dataset(x, y, x_test, y_test, classes, name, digest or _digest(x, y, x_test, y_test))


def _checked(where, x, y, x_test, y_test, classes):
    """The five in their final types, or a ValueError that names the first bad row."""
    if classes is not None:
        check.whole(where, "classes=0 is for regression, None counts them.", least=0, classes=classes)
    x, x_test = _features(where, "x", x), _features(where, "x_test", x_test)
    if x.shape[1:] != x_test.shape[1:] or x.dtype != x_test.dtype:
        check.fail(where, "rows of x and x_test of one shape and kind",
                   f"x {x.dtype}{list(x.shape)}, x_test {x_test.dtype}{list(x_test.shape)}")
    labels = {"y": (np.asarray(y), len(x)), "y_test": (np.asarray(y_test), len(x_test))}
    for key, (value, rows) in labels.items():
        if value.shape != (rows,):
            check.fail(where, f"{key} of shape [{rows}], one label a row", f"shape {list(value.shape)}",
                       "Use .ravel() for a column, .argmax(-1) for one-hot labels.")
        if value.dtype.kind not in "buif":
            check.fail(where, f"{key} of numbers", f"dtype {value.dtype}", "Number the classes from 0.")
        if classes != 0 and value.dtype.kind == "f":
            check.fail(where, f"{key} of integers", f"dtype {value.dtype}",
                       "Use y.astype(int) for classes, jfl.datasets.arrays(..., classes=0) for regression.")
    if classes == 0:
        y, y_test = (_finite(where, key, value.astype(np.float32)) for key, (value, _) in labels.items())
        return x, y, x_test, y_test, 0
    if classes is None:
        classes = max(1 + max(int(value.max()) for value, _ in labels.values()), 1)
    if classes > INT32:
        check.fail(where, f"at most {INT32} classes", classes, "Number the classes from 0.")
    for key, (value, _) in labels.items():
        bad = np.flatnonzero((value < 0) | (value >= classes))
        if bad.size:
            check.fail(where, f"labels in [0, {classes})", f"{key}[{bad[0]}] = {value[bad[0]]}",
                       "Number the classes from 0, or pass the right `classes`.")
    y, y_test = (value.astype(np.int32, copy=False) for value, _ in labels.values())
    return x, y, x_test, y_test, int(classes)


def _features(where, key, value):
    value = np.asarray(value)
    if value.ndim == 0 or len(value) < 1:
        check.fail(where, f"at least one row in {key}", f"shape {list(value.shape)}")
    if value.dtype == np.uint8:
        check.fail(where, f"{key} as float, or as a wider integer for tokens", "uint8",
                   f"Images: {key} / 255.  Tokens: {key}.astype('int32').")
    if value.dtype.kind in "iu":
        if value.size and (value.min() < -INT32 or value.max() > INT32):
            check.fail(where, f"integers in {key} that fit int32", f"{value.min()} to {value.max()}")
        return value.astype(np.int32, copy=False)
    if value.dtype.kind not in "bf":
        check.fail(where, f"{key} of numbers", f"dtype {value.dtype}")
    with np.errstate(over="ignore"):         # a float64 too large for float32 becomes inf and is refused below
        return _finite(where, key, value.astype(np.float32, copy=False))


def _finite(where, key, value):
    good = np.isfinite(value)
    if not good.all():
        rows = np.flatnonzero(~good.reshape(len(value), -1).all(1))
        check.fail(where, f"finite {key} (as float32)", f"nan or inf in {len(rows)} row(s), the first is {rows[0]}",
                   "Drop or fill these rows.")
    return value


def _digest(*values) -> str:
    """sha256 over types, shapes and bytes."""
    sha = hashlib.sha256()
    for value in values:
        value = np.ascontiguousarray(value)
        sha.update(f"{value.dtype.str}{value.shape}".encode())
        sha.update(value.data)
    return sha.hexdigest()


# tensorflow_datasets: find the prepared folder, decode it once, keep the arrays.


def _prepared(name, data_dir, download) -> Dataset:
    where = f"datasets.{name}"
    folder = _find(name, data_dir)
    if folder is None and download:
        _download(where, name, data_dir)
        folder = _find(name, data_dir)
    if folder is None:
        check.fail(where, "data prepared by tensorflow_datasets",
                   "nothing in " + ", ".join(str(place / name) for place in _places(data_dir)),
                   f"Prepare it once, where there is a network:  pip install \"jfl[tfds]\" tensorflow  and  "
                   f"tfds build {name} --file_format=array_record --data_dir=DIR  (preparing needs TensorFlow, reading "
                   "does not); then set JFL_DATA_DIR=DIR or pass data_dir=DIR.  download=True tries it from here.")
    stored, digest = _cached(where, name, folder)
    x, x_test = (stored[key].astype(np.float32) for key in ("x", "x_test"))
    x /= 255
    x_test /= 255
    return _dataset(where, x, stored["y"], x_test, stored["y_test"], int(stored["classes"]), name, digest)


def _upright(x):
    return np.ascontiguousarray(x.swapaxes(1, 2))


def _places(data_dir) -> list[Path]:
    if data_dir is not None:
        return [Path(data_dir).expanduser(), Path(data_dir).expanduser() / "tfds"]
    own = os.environ.get("JFL_DATA_DIR")
    places = [Path(own).expanduser() / "tfds", Path(own).expanduser()] if own else []
    return places + [Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()]


def _find(name, data_dir) -> Path | None:
    """The newest prepared version of `name` in the first place that has one."""
    for place in _places(data_dir):
        found = [path.parent for path in (place / name).glob("*.*.*/dataset_info.json")]
        found = [path for path in found if path.name.replace(".", "").isdigit()]
        if found:
            return max(found, key=lambda path: [int(part) for part in path.name.split(".")])
    return None


def _tfds(where):
    try:
        import tensorflow_datasets
        return tensorflow_datasets
    except ImportError as error:
        _missing(where, error)


def _missing(where, error):
    check.fail(where, "the packages that read prepared data", f"{type(error).__name__}: {error}",
               'Install them: pip install "jfl[tfds]"  (tensorflow-datasets and array-record; preparing or '
               "downloading also needs tensorflow).")


def _download(where, name, data_dir):
    tfds = _tfds(where)
    try:
        tfds.data_source(name, split="train", data_dir=str(_places(data_dir)[0]), download=True)
    except ImportError as error:
        _missing(where, error)
    except Exception as error:        # whatever the network, the host or the disk came up with
        check.fail(where, "a download that works", f"{type(error).__name__}: {error}",
                   "Prepare the data on a machine with a network and pass data_dir=...")


def _decode(where, folder) -> dict:
    """uint8 images and labels of a prepared folder: about 70 us a row, so 70,000 rows take 5 s on one core.

    Threads make it slower (they wait for one another in Python); records are read READ at a time, which is three
    times as fast as one by one.
    """
    tfds = _tfds(where)
    try:
        builder = tfds.builder_from_directory(str(folder))
        stored = {"classes": np.int32(builder.info.features["label"].num_classes)}
        for split, end in (("train", ""), ("test", "_test")):
            source = builder.as_data_source(split=split)
            x = np.empty((len(source), *builder.info.features["image"].shape), np.uint8)
            y = np.empty(len(source), np.int32)
            for start in range(0, len(source), READ):
                rows = range(start, min(start + READ, len(source)))
                for i, row in zip(rows, source.__getitems__(list(rows)), strict=True):
                    x[i], y[i] = row["image"], row["label"]
            stored |= {"x" + end: x, "y" + end: y}
        return stored
    except ImportError as error:
        _missing(where, error)
    except Exception as error:        # tensorflow_datasets, array_record and the image decoder have no common error
        check.fail(where, f"readable array_record files in {folder}", f"{type(error).__name__}: {error}",
                   "Prepare the data again, with --file_format=array_record.")


def _cached(where, name, folder) -> tuple[dict, str]:
    """The arrays of a prepared folder and their sha256: from the cache if it holds what was written, else decoded."""
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())
    mark = hashlib.sha256(repr((LAYOUT, files)).encode()).hexdigest()[:12]
    path = _cache_dir() / "datasets" / f"{name.replace('/', '-')}-{folder.name}-{mark}.npz"
    stored = _load(path)
    if stored is None:
        stored = _decode(where, folder)
        stored["checksum"] = np.array(_stored_digest(stored))
        _save(path, stored)
    return stored, str(stored["checksum"])


def _stored_digest(stored):
    return _digest(*(stored[key] for key in ("x", "y", "x_test", "y_test", "classes")))


def _cache_dir() -> Path:
    own = os.environ.get("JFL_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    user = os.environ.get("XDG_CACHE_HOME") or (os.name == "nt" and os.environ.get("LOCALAPPDATA")) or "~/.cache"
    return Path(user).expanduser() / "jfl"


def _load(path) -> dict | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            stored = {key: file[key] for key in file.files}
        if str(stored["checksum"]) == _stored_digest(stored):
            return stored
        problem = "its checksum does not fit"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:        # a damaged archive can look like anything: encrypted, huge, another type
        problem = f"{type(error).__name__}: {error}"
    warnings.warn(f"jfl: the cached file {path} is damaged ({problem}); decoding the dataset again.",
                  RuntimeWarning, stacklevel=2)
    return None


def _save(path, stored):
    """Write beside the target and rename: a reader sees a whole file or none, also if two processes write."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                np.savez(file, **stored)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(f"jfl: could not keep the decoded dataset in {path} ({error}); it is decoded again next time. "
                      "Set JFL_CACHE_DIR to a folder that can be written.", RuntimeWarning, stacklevel=2)
