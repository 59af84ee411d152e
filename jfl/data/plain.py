"""Images in plain files that anyone can drop into a folder: .npz, IDX and the binaries of CIFAR-10.

    DIR/NAME.npz                       x, y, x_test, y_test; x_train and y_train will do too
    DIR/mnist/train-images-idx3-ubyte  and the three that belong to it, with or without .gz
    DIR/emnist/emnist-balanced-train-images-idx3-ubyte, ...
    DIR/cifar-10-batches-bin/data_batch_1.bin to data_batch_5.bin, test_batch.bin

NAME is that of the dataset: mnist, fashion_mnist, emnist-balanced, cifar10, svhn_cropped.
"""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ..core import checks
from ..core.errors import DataUnavailable
from . import idx

CLASSES = dict(mnist=10, fashion_mnist=10, cifar10=10, svhn_cropped=10) | {
    f"emnist/{split}": count
    for split, count in dict(
        balanced=47, byclass=62, bymerge=47, digits=10, letters=37, mnist=10
    ).items()
}
CIFAR, CIFAR_BATCHES = "cifar-10-batches-bin", [f"data_batch_{i}.bin" for i in range(1, 6)]
CIFAR_ROW = 1 + 3 * 32 * 32  # a label, then red, green and blue
KEYS = dict(x=("x", "x_train"), y=("y", "y_train"), x_test=("x_test",), y_test=("y_test",))
SHAPES = "uint8 images [n, h, w] or [n, h, w, channels] and n labels from 0 on"


def read(where: str, place: Path, name: str) -> dict | None:
    """The images of a dataset in plain files of a folder; None where there are none.

    Args:
        where: who asks, for errors.
        place: the folder.
        name: of the dataset, a key of CLASSES.

    Returns:
        x, y, x_test, y_test: uint8 images [n, rows, columns, channels] and int32 labels; classes.

    Raises:
        DataUnavailable: where files are damaged, or some are missing.
    """
    family, _, split = name.partition("/")
    if (file := place / f"{name.replace('/', '-')}.npz").is_file():
        return _npz(where, file, CLASSES[name])
    if family == "cifar10" and (place / CIFAR).is_dir():
        return _cifar(where, place / CIFAR)
    names = idx.FILES
    if family == "emnist":
        halves = dict(train="train", t10k="test")
        names = {
            key: (f"emnist-{split}-{halves[half]}-{rest}", axes)
            for key, (file, axes) in idx.FILES.items()
            for half, rest in (file.split("-", 1),)
        }
    if family in ("mnist", "emnist") and idx.holds(place / family, names):
        return idx.read_dataset(where, place / family, CLASSES[name], names)
    return None


def _npz(where, file, classes) -> dict:
    try:
        with np.load(file, allow_pickle=False) as stored:
            found: dict[str, Any] = {
                key: next((stored[n] for n in names if n in stored), None)
                for key, names in KEYS.items()
            }
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        checks.fail(
            where,
            f"a readable file {file}",
            checks.describe_error(error),
            idx.AGAIN,
            DataUnavailable,
        )
    for key in ("x", "x_test"):
        images, labels = found[key], found[key.replace("x", "y")]
        if not _fit(images, labels, classes):
            shown = ", ".join(
                "none" if v is None else f"{v.dtype} {list(v.shape)}" for v in (images, labels)
            )
            checks.fail(
                where,
                f"{SHAPES}, fewer than {classes}, as {key} and {key.replace('x', 'y')} in {file}",
                shown,
                error=DataUnavailable,
            )
        found[key] = images[..., None] if images.ndim == 3 else images
        found[key.replace("x", "y")] = labels.ravel().astype(np.int32)
    return found | {"classes": np.int32(classes)}


def _fit(images, labels, classes) -> bool:
    """Whether these are SHAPES."""
    if images is None or labels is None or images.dtype != np.uint8 or images.ndim not in (3, 4):
        return False
    if labels.dtype.kind not in "iu" or labels.size != len(images) or not labels.size:
        return False
    return 0 <= labels.min() and labels.max() < classes


def _cifar(where, folder) -> dict:
    batches = [_cifar_batch(where, folder / name) for name in CIFAR_BATCHES]
    x, y = (np.concatenate(parts) for parts in zip(*batches))
    x_test, y_test = _cifar_batch(where, folder / "test_batch.bin")
    return dict(x=x, y=y, x_test=x_test, y_test=y_test, classes=np.int32(10))


def _cifar_batch(where, file):
    try:
        content = np.frombuffer(file.read_bytes(), np.uint8)
    except OSError as error:
        checks.fail(
            where,
            f"the file {file}",
            checks.describe_error(error),
            idx.AGAIN,
            error=DataUnavailable,
        )
    if not content.size or content.size % CIFAR_ROW or content[::CIFAR_ROW].max() > 9:
        checks.fail(
            where,
            f"rows of {CIFAR_ROW} bytes, a label below 10 and an image",
            f"{content.size} bytes in {file}",
            idx.AGAIN,
            error=DataUnavailable,
        )
    rows = content.reshape(-1, CIFAR_ROW)
    images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), rows[:, 0].astype(np.int32)
