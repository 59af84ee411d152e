"""Files in the IDX format of MNIST's authors: read one, and the four of a dataset.

An IDX file is a header and then its numbers: two zero bytes, the kind of number (8: a byte), how
many axes there are, the length of each axis as four bytes, the highest first.  It may be
compressed by gzip, whatever it is called.
"""

import gzip
import math
import os
import zlib
from pathlib import Path

import numpy as np

from ..core import checks
from ..core.errors import DataUnavailable

BYTE = 8  # the kind of number that images and labels are stored as
GZIP = b"\x1f\x8b"
FILES = {  # array -> (name of the file, axes)
    "x": ("train-images-idx3-ubyte", 3),
    "y": ("train-labels-idx1-ubyte", 1),
    "x_test": ("t10k-images-idx3-ubyte", 3),
    "y_test": ("t10k-labels-idx1-ubyte", 1),
}
AGAIN = "Get the file again from where it came."


def holds(folder: Path, names: dict = FILES) -> bool:
    """True if at least one of the four files of a dataset is there."""
    return any(_file(folder, name) is not None for name, _ in names.values())


def read_dataset(where: str, folder: Path, classes: int, names: dict = FILES) -> dict:
    """The arrays of a folder with the four files: images uint8 [n, rows, columns, 1], labels int32.

    Args:
        where: who asks, for errors.
        folder: holds train-images-idx3-ubyte, train-labels-idx1-ubyte and the two that begin with
            t10k, each as it is or with the ending .gz.
        classes: how many there are.
        names: the names of the files, where they are others.

    Returns:
        x, y, x_test, y_test, and classes as an int32.

    Raises:
        DataUnavailable: where a file is missing, is no such IDX file, is cut short, or has another
            number of labels than of images.
    """
    stored = {}
    for key, (name, axes) in names.items():
        path = _file(folder, name)
        if path is None:
            checks.fail(
                where,
                f"the file {name} or {name}.gz in {folder}",
                f"{', '.join(sorted(os.listdir(folder)))} there",
                "All four files belong together: images and labels, train and t10k.",
                error=DataUnavailable,
            )
        stored[key] = read(where, path, axes)
    for end in ("", "_test"):
        images, labels = stored["x" + end], stored["y" + end]
        if len(images) != len(labels):
            checks.fail(
                where,
                f"a label for each image in {folder}",
                f"{len(images)} images in {names['x' + end][0]} and {len(labels)} labels in "
                f"{names['y' + end][0]}",
                "Take both files from one source.",
                error=DataUnavailable,
            )
        stored["x" + end], stored["y" + end] = images[..., None], labels.astype(np.int32)
    return stored | {"classes": np.int32(classes)}


def read(where: str, path: str | Path, axes: int) -> np.ndarray:
    """An IDX file of bytes, compressed by gzip or not.

    Args:
        where: who asks, for errors.
        path: of the file.
        axes: how many axes it must have: 3 for images, 1 for labels.

    Returns:
        uint8, of the shape that the file states.

    Raises:
        DataUnavailable: naming the file and what is wrong with it.
    """
    content = _content(where, path)
    magic = bytes([0, 0, BYTE, axes])
    if content[:4] != magic:
        checks.fail(
            where,
            f"an IDX file of bytes with {axes} axes, which begins with {magic.hex()}",
            f"{content[:4].hex() or 'an empty file'} in {path}",
            AGAIN,
            error=DataUnavailable,
        )
    start = 4 + 4 * axes
    if len(content) < start:
        checks.fail(
            where,
            f"a header of {start} bytes",
            f"{len(content)} bytes in {path}: it is cut short",
            AGAIN,
            error=DataUnavailable,
        )
    shape = tuple(np.frombuffer(content, ">u4", axes, 4).tolist())
    if len(content) - start != math.prod(shape):
        problem = "it is cut short" if len(content) - start < math.prod(shape) else "it goes on"
        checks.fail(
            where,
            f"{math.prod(shape)} bytes after the header, which states {list(shape)}",
            f"{len(content) - start} in {path}: {problem}",
            AGAIN,
            error=DataUnavailable,
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _content(where, path) -> bytes:
    try:
        content = Path(path).read_bytes()
        return gzip.decompress(content) if content[:2] == GZIP else content
    except (OSError, EOFError, zlib.error) as error:  # a damaged gzip file raises any of them
        checks.fail(
            where, f"a readable file {path}", checks.describe_error(error), AGAIN, DataUnavailable
        )


def _file(folder, name) -> Path | None:
    return next((p for end in ("", ".gz") if (p := folder / (name + end)).is_file()), None)
