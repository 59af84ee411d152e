"""Files that hold datasets of images, and records prepared by tensorflow_datasets.

A dataset is read from a folder DIR in the first of these forms that the folder has:

    DIR/NAME/VERSION/                 prepared by tensorflow_datasets as array_record
    DIR/NAME.npz                      x, y, x_test, y_test (x_train and y_train are accepted)
    DIR/cifar-10-batches-bin/         the binaries of CIFAR-10's author
    DIR/mnist/train-images-idx3-ubyte and the three files that belong to it, with or without .gz;
                                      likewise DIR/fashion-mnist and DIR/emnist

NAME is mnist, fashion_mnist, emnist/balanced (as a file: emnist-balanced), cifar10, svhn_cropped.
TensorFlow is needed to prepare data, not to read them.
"""

import contextlib
import gzip
import hashlib
import io
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..core import checks, files
from ..core.errors import DataUnavailable

NUM_CLASSES = {
    "mnist": 10,
    "fashion_mnist": 10,
    "cifar10": 10,
    "svhn_cropped": 10,
    "emnist/balanced": 47,
    "emnist/byclass": 62,
    "emnist/bymerge": 47,
    "emnist/digits": 10,
    "emnist/letters": 37,
    "emnist/mnist": 10,
}
KEYS = ("x", "y", "x_test", "y_test")
# Where Debian's package dataset-fashion-mnist puts its files.
DEBIAN = Path("/usr/share/datasets")
# Raise this number when decoding changes, so that older cache files are not read.
CACHE_LAYOUT = 1
# Records that are read at a time, which is three times as fast as reading them one by one.
RECORDS_PER_READ = 1000


def read_images(name: str, data_dir: str | Path | None) -> dict:
    """Read a dataset of images from the first folder that has it.

    Args:
        name: a key of NUM_CLASSES.
        data_dir: as in `datasets.mnist`.

    Returns:
        x and x_test, uint8 [n, height, width, channels]; y and y_test, int32 [n].

    Raises:
        DataUnavailable: if there are no files, or they cannot be read.
    """
    where = f"datasets.{name}"
    folders = data_folders(data_dir)
    if name == "fashion_mnist" and data_dir is None:
        folders.append(DEBIAN)
    for folder in folders:
        with readable(where, f"readable files of {name} in {folder}"):
            images = _read_folder(name, folder)
        if images:
            return images
    debian = "apt-get install dataset-fashion-mnist, or " if name == "fashion_mnist" else ""
    checks.fail(
        where,
        f"files of {name}",
        "none in " + ", ".join(map(str, folders)),
        f'Run {debian}once, with a network: pip install -e ".[tfds]" tensorflow; tfds build {name} '
        "--file_format=array_record --data_dir=DIR. Then set JFL_DATA_DIR=DIR or pass "
        "data_dir=DIR. jfl.data.image_files lists plain files that are read as well.",
        DataUnavailable,
    )


def data_folders(data_dir: str | Path | None) -> list[Path]:
    """Return the folders that may hold data, in the order in which they are searched."""
    if data_dir is not None:
        return [Path(data_dir).expanduser(), Path(data_dir).expanduser() / "tfds"]
    variable = os.environ.get("JFL_DATA_DIR")
    folders = [Path(variable) / "tfds", Path(variable)] if variable else []
    folders.append(Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"))
    return [folder.expanduser() for folder in folders]


def read_records(where: str, name: str, data_dir: str | Path | None, split: str) -> Iterator[dict]:
    """Return an iterator over the records of a dataset that tensorflow_datasets has prepared."""
    folders = [folder / name for folder in data_folders(data_dir)]
    version = next(filter(None, map(_newest_version, folders)), None)
    if version is None:
        checks.fail(
            where,
            f"{name} prepared by tensorflow_datasets",
            "nothing in " + ", ".join(map(str, folders)),
            "Prepare it with --file_format=array_record, then set JFL_DATA_DIR or pass data_dir.",
            DataUnavailable,
        )
    with readable(where, f"a readable split {split!r} in {version}"):
        return _records(version, split)


@contextlib.contextmanager
def readable(where: str, expected: str) -> Iterator[None]:
    """Raise DataUnavailable if the `with` block fails to read or decode data.

    Args:
        where: the function that was called, for messages.
        expected: what was expected, as in `checks.fail`.
    """
    try:
        yield
    except Exception as error:  # these libraries have no common error
        hint = "Copy or prepare the data again."
        if isinstance(error, ImportError):
            hint = 'Install the packages that read the data: pip install -e ".[cli,tfds]".'
        checks.fail(where, expected, checks.describe_error(error), hint, DataUnavailable)


def _read_folder(name: str, folder: Path) -> dict | None:
    """Return the images of a dataset in one folder, or None if it has no files of the dataset."""
    family, _, split = name.partition("/")
    version = _newest_version(folder / name)
    archive = folder / f"{name.replace('/', '-')}.npz"
    batches = folder / "cifar-10-batches-bin"
    idx = folder / family.replace("_", "-")
    prefix, test = (f"emnist-{split}-", "test") if family == "emnist" else ("", "t10k")
    images: dict[str, Any]
    if version:
        images = _read_prepared(name, version)
    elif archive.is_file():
        with np.load(archive) as stored:
            renamed = {"x": "x_train", "y": "y_train"}
            images = {k: stored[k if k in stored else renamed.get(k, k)] for k in KEYS}
    elif name == "cifar10" and batches.is_dir():
        train = [_read_cifar_batch(batches / f"data_batch_{i}.bin") for i in range(1, 6)]
        x, y = (np.concatenate(parts) for parts in zip(*train))
        images = dict(zip(KEYS, (x, y, *_read_cifar_batch(batches / "test_batch.bin"))))
    elif family.endswith("mnist") and any(idx.glob(f"{prefix}*-idx?-ubyte*")):
        halves = (f"{prefix}train", f"{prefix}{test}")
        parts = [(f"{half}-images-idx3-ubyte", f"{half}-labels-idx1-ubyte") for half in halves]
        images = dict(zip(KEYS, (_read_idx(idx, file) for pair in parts for file in pair)))
    else:
        return None
    for x, y in (("x", "y"), ("x_test", "y_test")):
        if images[x].dtype != np.uint8 or images[x].ndim not in (3, 4):
            raise ValueError(
                "expected uint8 images [n, h, w] or [n, h, w, channels], but got "
                f"{x} {images[x].dtype}{list(images[x].shape)}"
            )
        images[x] = images[x].reshape(*images[x].shape[:3], -1)
        images[y] = images[y].ravel().astype(np.int32)
    return images


def _read_idx(folder: Path, name: str) -> np.ndarray:
    """Read bytes in the IDX format: magic number, the length of each axis, then the values."""
    path = folder / name
    content = path.read_bytes() if path.is_file() else (folder / f"{name}.gz").read_bytes()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    ndim = int(name.split("-idx")[1][0])
    if content[:4] != bytes([0, 0, 8, ndim]):
        raise ValueError(f"{name} is not an IDX file of bytes with {ndim} axes")
    shape = np.frombuffer(content, ">u4", ndim, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def _read_cifar_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read rows of one label byte followed by 32 x 32 red, green and blue values."""
    rows = np.fromfile(path, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), rows[:, 0]


def _newest_version(folder: Path) -> Path | None:
    """Return the newest version that tensorflow_datasets has completely prepared in a folder."""
    versions = [path.parent for path in folder.glob("*.*.*/dataset_info.json")]
    versions = [path for path in versions if path.name.replace(".", "").isdigit()]
    return max(versions, key=lambda path: [int(n) for n in path.name.split(".")], default=None)


def _records(version: Path, split: str) -> Iterator[dict]:
    """Return an iterator over the records of one split of a prepared version."""
    import tensorflow_datasets as tfds

    builder: Any = tfds.builder_from_directory(str(version))
    source = builder.as_data_source(split=split)
    blocks = (
        range(start, min(start + RECORDS_PER_READ, len(source)))
        for start in range(0, len(source), RECORDS_PER_READ)
    )
    return (record for block in blocks for record in source.__getitems__(list(block)))


def _read_prepared(name: str, version: Path) -> dict:
    """Return the images of a prepared version, from a cache file if they were decoded before.

    Decoding takes about 70 microseconds per row. The name of the cache file contains a hash of the
    sizes and times of the prepared files. A damaged cache file is replaced.
    """
    stats = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in version.iterdir())
    mark = hashlib.sha256(repr((CACHE_LAYOUT, stats)).encode()).hexdigest()[:12]
    folder = os.environ.get("JFL_CACHE_DIR")
    folder = folder or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jfl")
    cache = Path(folder).expanduser() / "datasets"
    cache /= f"{name.replace('/', '-')}-{version.name}-{mark}.npz"
    with contextlib.suppress(Exception), np.load(cache) as stored:  # reading compares CRC sums
        return {key: stored[key] for key in KEYS}
    images = {}
    for split, end in (("train", ""), ("test", "_test")):
        records = list(_records(version, split))
        images["x" + end] = np.stack([record["image"] for record in records])
        images["y" + end] = np.array([record["label"] for record in records], np.int32)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.savez(content, **images)
        files.write(cache, [content.getbuffer()])
    except OSError as error:
        warnings.warn(
            f"jfl: the decoded dataset could not be stored in {cache} ({error}), so the next call "
            "decodes it again. Set JFL_CACHE_DIR to a folder that can be written.",
            RuntimeWarning,
            stacklevel=2,
        )
    return images
