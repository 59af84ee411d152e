"""The record `Dataset`, and checks of its rows and labels.

Shapes use n for the number of training rows and m for the number of test rows.
"""

import hashlib
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

from ..core import checks


class Dataset(NamedTuple):
    """Training and test rows with their labels, and a checksum that identifies them."""

    x: np.ndarray  # [n, ...] float32, or int32 for tokens
    y: np.ndarray  # [n] or [n, k] int32, or float32 if classes is 0
    x_test: np.ndarray  # [m, ...]
    y_test: np.ndarray  # [m]
    classes: int  # 0 for regression
    name: str
    checksum: str  # sha256 of the rows as stored or passed
    owners: np.ndarray | None = None  # [n], the owner of each training row, if rows have owners
    # Sentences about preprocessing that no guarantee covers, which `federate` passes on.
    caveats: tuple = ()

    def __repr__(self) -> str:
        of = f"{self.classes} classes" if self.classes else "regression"
        owners = "" if self.owners is None else f", {len(set(self.owners.tolist()))} owners"
        row = f"{self.x.dtype}{list(self.x.shape[1:])}"
        return (
            f"Dataset {self.name}: {len(self.x)} rows of {row}, {len(self.x_test)} test rows, "
            f"{of}{owners}"
        )


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
    """Check arrays, and return them as a Dataset.

    Args:
        where: the function that was called, for messages.
        x, y, x_test, y_test, classes, name: as in `datasets.arrays`.
        checksum: the checksum of the dataset.  None computes it from the arrays.
    """
    arrays: Any = check_arrays(where, x, y, x_test, y_test, classes)
    checksum = checksum or digest(*arrays[:4])
    return Dataset(arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], name, checksum)


def digest(*values: ArrayLike) -> str:
    """Return the sha256 of the types, shapes and bytes of arrays, 64 hexadecimal digits."""
    sha = hashlib.sha256()
    for value in values:
        value = np.ascontiguousarray(value)
        sha.update(f"{value.dtype.str}{value.shape}".encode())
        sha.update(value.data)
    return sha.hexdigest()


def check_arrays(
    where: str,
    x: ArrayLike,
    y: ArrayLike,
    x_test: ArrayLike,
    y_test: ArrayLike,
    classes: int | None,
) -> tuple[Any, ...]:
    """Check rows and labels, and return x, y, x_test, y_test and classes in their final types.

    Args:
        where: the function that was called, for messages.
        x, y, x_test, y_test, classes: as in `datasets.arrays`.
    """
    x, x_test = _features(where, "x", x), _features(where, "x_test", x_test)
    if x.shape[1:] != x_test.shape[1:] or x.dtype != x_test.dtype:
        checks.fail(
            where,
            "rows of x and x_test of one shape and kind",
            f"x {x.dtype}{list(x.shape)}, x_test {x_test.dtype}{list(x_test.shape)}",
        )
    y = _labels(where, "y", y, len(x), classes)
    y_test = _labels(where, "y_test", y_test, len(x_test), classes)
    if classes is None:
        classes = max(1 + max(int(y.max()), int(y_test.max())), 1)
    checks.require_integer(
        where, "0 is for regression, None counts the labels.", min_value=0, classes=classes
    )
    if classes == 0:
        return x, _finite(where, "y", y), x_test, _finite(where, "y_test", y_test), 0
    for name, labels in dict(y=y, y_test=y_test).items():
        # In sequences of tokens, a negative label is masked.
        bad = np.argwhere((labels >= classes) | ((labels < 0) & (labels.ndim == 1)))
        if bad.size:
            place = tuple(bad[0].tolist())
            checks.fail(
                where,
                f"labels in [0, {classes})",
                f"{name}[{', '.join(map(str, place))}] = {labels[place]}",
                "Number the classes from 0, or pass the right `classes`.",
            )
    y, y_test = (labels.astype(np.int32, copy=False) for labels in (y, y_test))
    return x, y, x_test, y_test, int(classes)


# A hint for rows that do not form one array.
ONE_ARRAY = (
    "Pad or cut rows to one shape, where the labels of padded tokens are -1. Join several "
    "features into one array and take it apart in the model."
)


def reject_bytes(where: str, name: str, x: np.ndarray) -> None:
    """Reject features of type uint8, which may be pixels or tokens."""
    if x.dtype == np.uint8:
        checks.fail(
            where,
            f"{name} as float, or as a wider integer for tokens",
            "uint8",
            "Images: x / 255.  Tokens: x.astype('int32').",
        )


# What tables, pandas and NumPy write for a missing cell.
MISSING = ("", "NA", "N/A", "NULL", "NaN", "NaT", "None", "nan", "null", "<NA>")


def require_owners(where: str, owners: np.ndarray) -> None:
    """Reject rows without an owner.

    All such rows would become one client, so rows of another client could be in it, which a
    guarantee for clients would not count.

    Args:
        where: the function that was called, for messages.
        owners: [n], the owner of each row.
    """
    if owners.dtype.kind in "biu":
        return
    names = np.char.strip(owners if owners.dtype.kind == "S" else owners.astype(str))
    empty = np.flatnonzero(np.isin(names, np.array(MISSING, names.dtype.kind)))
    if len(empty):
        first = f"{empty[0]} ({names.flat[empty[0]].item()!r})"
        checks.fail(
            where,
            "an owner of every row",
            f"none in {len(empty)} row(s), the first is {first}",
            "Drop or fill these rows; if this is the name of an owner, rename it.",
        )


def _features(where, name, value):
    """Return features as float32, or as int32 if they are tokens."""
    x = checks.as_array(where, name, value, ONE_ARRAY)
    if x.dtype.kind not in "biuf":
        checks.fail(where, f"{name}, one array of numbers", f"dtype {x.dtype}", ONE_ARRAY)
    if x.ndim == 0 or len(x) < 1:
        checks.fail(where, f"at least one row in {name}", f"shape {list(x.shape)}")
    reject_bytes(where, name, x)
    if x.dtype.kind in "iu":
        if x.size and (x.min() < -checks.INT32_MAX or x.max() > checks.INT32_MAX):
            checks.fail(where, f"integers in {name} that fit int32", f"{x.min()} to {x.max()}")
        return x.astype(np.int32, copy=False)
    with np.errstate(over="ignore"):  # a float64 that overflows becomes inf and is rejected
        return _finite(where, name, x)


def _labels(where, name, value, num_rows, classes):
    """Return labels [num_rows]; or [num_rows, k], which requires `classes` to be given."""
    y = checks.as_array(where, name, value, ONE_ARRAY)
    if y.dtype.kind not in ("biuf" if classes == 0 else "biu"):
        checks.fail(
            where,
            f"{name} of {'numbers' if classes == 0 else 'integers'}",
            f"dtype {y.dtype}",
            "Drop rows without a label. For classes use y.astype(int), for names of classes "
            "names, y = np.unique(y, return_inverse=True), and for regression classes=0.",
        )
    is_sequence = y.ndim == 2 and len(y) == num_rows and y.shape[1] > 1
    is_one_hot = (
        is_sequence
        and y.shape[1] == classes
        and ((y == 0) | (y == 1)).all()
        and (y.sum(1) == 1).all()
    )
    if y.shape != (num_rows,) and (not is_sequence or is_one_hot or classes is None):
        checks.fail(
            where,
            f"{name} of shape [{num_rows}], one label per row",
            f"{'one-hot labels, ' if is_one_hot else ''}shape {list(y.shape)}",
            "Use .ravel() for a column, .argmax(-1) for one-hot labels. For sequences of tokens "
            "pass the size of the vocabulary, jfl.datasets.arrays(..., classes=V); for several "
            "numbers or labels per row, classes=0.",
        )
    return y


def _finite(where, name, value):
    """Return values as float32; reject those that are not finite."""
    value = value.astype(np.float32, copy=False)
    is_bad = ~np.isfinite(value).reshape(len(value), -1).all(1)
    if is_bad.any():
        checks.fail(
            where,
            f"finite {name} (as float32)",
            f"nan or inf in {is_bad.sum()} row(s), the first is {is_bad.argmax()}",
            "Drop or fill these rows.",
        )
    return value
