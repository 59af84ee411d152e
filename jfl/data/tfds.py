"""Data prepared by tensorflow_datasets: find the folder, decode it once, keep the arrays in a
checked cache.

Reading needs no TensorFlow.  Imports jfl.core.checks and NumPy; tensorflow_datasets inside the
function that reads.
"""

import hashlib
import os
import uuid
import warnings
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jax.typing import ArrayLike

from ..core import checks
from ..core.errors import DataUnavailable

LAYOUT = (
    1  # of the cache files: raise it when the decoding changes, and old files are not read again
)
READ = 1000  # records read from disk at once


def digest(*values: ArrayLike) -> str:
    """sha256 over types, shapes and bytes."""
    sha = hashlib.sha256()
    for value in values:
        value = np.ascontiguousarray(value)
        sha.update(f"{value.dtype.str}{value.shape}".encode())
        sha.update(value.data)
    return sha.hexdigest()


def read(where: str, name: str, data_dir: str | Path | None, download: bool) -> tuple[dict, str]:
    """uint8 images and labels of a prepared dataset, and their sha256."""
    folder = _find(name, data_dir)
    if folder is None and download:
        _download(where, name, data_dir)
        folder = _find(name, data_dir)
    if folder is None:
        checks.fail(
            where,
            "data prepared by tensorflow_datasets",
            "nothing in " + ", ".join(str(place / name) for place in places(data_dir)),
            f'Prepare it once, where there is a network: pip install -e ".[tfds]" tensorflow  and  '
            f"tfds build {name} --file_format=array_record --data_dir=DIR  (preparing needs "
            f"TensorFlow, reading "
            "does not); then set JFL_DATA_DIR=DIR or pass data_dir=DIR.  download=True tries it "
            "from here.",
            error=DataUnavailable,
        )
    return _cached(where, name, folder)


def places(data_dir: str | Path | None) -> list[Path]:
    """The folders that may hold data, the first to look into first."""
    if data_dir is not None:
        if not isinstance(data_dir, (str, os.PathLike)):
            checks.fail("datasets", "data_dir, a path", checks.short_repr(data_dir))
        return [Path(data_dir).expanduser(), Path(data_dir).expanduser() / "tfds"]
    variable = os.environ.get("JFL_DATA_DIR")
    first = [Path(variable).expanduser() / "tfds", Path(variable).expanduser()] if variable else []
    return first + [Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()]


def _find(name, data_dir) -> Path | None:
    """The newest prepared version of `name` in the first place that has one."""
    return next(filter(None, (newest_in(place, name) for place in places(data_dir))), None)


def newest_in(place: Path, name: str) -> Path | None:
    """The newest prepared version of `name` in one folder."""
    folders = [path.parent for path in (place / name).glob("*.*.*/dataset_info.json")]
    folders = [path for path in folders if path.name.replace(".", "").isdigit()]
    return max(folders, key=lambda path: [int(part) for part in path.name.split(".")], default=None)


def _tfds(where) -> Any:
    try:
        import tensorflow_datasets

        return tensorflow_datasets
    except ImportError as error:
        _missing(where, error)


def _missing(where: str, error: Exception) -> NoReturn:
    checks.fail(
        where,
        "the packages that read prepared data",
        f"{type(error).__name__}: {error}",
        'Install them: pip install -e ".[tfds]"  (tensorflow-datasets and array-record; preparing '
        "or "
        "downloading also needs tensorflow).",
        error=DataUnavailable,
    )


def _download(where, name, data_dir):
    tfds = _tfds(where)
    try:
        tfds.data_source(name, split="train", data_dir=str(places(data_dir)[0]), download=True)
    except ImportError as error:
        _missing(where, error)
    except Exception as error:  # whatever the network, the host or the disk came up with
        checks.fail(
            where,
            "a download that works",
            f"{type(error).__name__}: {error}",
            "Prepare the data on a machine with a network and pass data_dir=...",
            error=DataUnavailable,
        )


def _decode(where, folder) -> dict:
    """uint8 images and labels of a prepared folder: about 70 us a row, so 70,000 rows take 5 s on
    one core.

    Threads make it slower (they wait for one another in Python); records are read READ at a time,
    which is three times as fast as one by one.
    """
    tfds = _tfds(where)
    try:
        builder: Any = tfds.builder_from_directory(str(folder))
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
    except (
        Exception
    ) as error:  # tensorflow_datasets, array_record and the image decoder have no common error
        checks.fail(
            where,
            f"readable array_record files in {folder}",
            f"{type(error).__name__}: {error}",
            "Prepare the data again, with --file_format=array_record.",
            error=DataUnavailable,
        )


def rows(where: str, name: str, data_dir: str | Path | None, split: str, row) -> list:
    """What `row` makes of each record of a prepared split.

    Raises:
        DataUnavailable: where nothing is prepared or cannot be read.
        ValueError: where `row` cannot take a record.
    """
    folder = _find(name, data_dir)
    if folder is None:
        checks.fail(
            where,
            "data prepared by tensorflow_datasets",
            "nothing in " + ", ".join(str(place / name) for place in places(data_dir)),
            "Prepare it with --file_format=array_record, then set JFL_DATA_DIR or pass data_dir.",
            error=DataUnavailable,
        )
    try:
        builder: Any = _tfds(where).builder_from_directory(str(folder))
        source = builder.as_data_source(split=split)
        records = (
            record
            for start in range(0, len(source), READ)
            for record in source.__getitems__(list(range(start, min(start + READ, len(source)))))
        )
        first = next(records)
    except ImportError as error:
        _missing(where, error)
    except Exception as error:  # as in _decode; a split that is not there; a split without records
        checks.fail(
            where,
            f"a readable split {split!r} in {folder}",
            checks.describe_error(error),
            "Prepare the data again, with --file_format=array_record.",
            error=DataUnavailable,
        )
    try:
        made = [row(first)]
    except Exception as error:  # of somebody's function
        held = ", ".join(f"{k}: {type(v).__name__}" for k, v in first.items())
        checks.fail(where, f"row, a function of a record of {held}", checks.describe_error(error))
    return made + [row(record) for record in records]


def _cached(where, name, folder) -> tuple[dict, str]:
    """The arrays of a prepared folder and their sha256: from the cache if it holds what was
    written, else decoded."""
    files = sorted(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir()
    )
    mark = hashlib.sha256(repr((LAYOUT, files)).encode()).hexdigest()[:12]
    path = _cache_dir() / "datasets" / f"{name.replace('/', '-')}-{folder.name}-{mark}.npz"
    stored = _load(path)
    if stored is None:
        stored = _decode(where, folder)
        stored["checksum"] = np.array(stored_digest(stored))
        _save(path, stored)
    return stored, str(stored["checksum"])


def stored_digest(stored: dict) -> str:
    """sha256 of the images, the labels and the number of classes as they are stored."""
    return digest(*(stored[key] for key in ("x", "y", "x_test", "y_test", "classes")))


def _cache_dir() -> Path:
    variable = os.environ.get("JFL_CACHE_DIR")
    if variable:
        return Path(variable).expanduser()
    user = (
        os.environ.get("XDG_CACHE_HOME")
        or (os.name == "nt" and os.environ.get("LOCALAPPDATA"))
        or "~/.cache"
    )
    return Path(user).expanduser() / "jfl"


def _load(path) -> dict | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            stored = {key: file[key] for key in file.files}
        if str(stored["checksum"]) == stored_digest(stored):
            return stored
        problem = "its checksum does not fit"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (
        Exception
    ) as error:  # a damaged archive can look like anything: encrypted, huge, another type
        problem = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"jfl: the cached file {path} is damaged ({problem}); decoding the dataset again.",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _save(path, stored):
    """Write beside the target and rename: a reader sees a whole file or none, also if two processes
    write."""
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
        warnings.warn(
            f"jfl: could not keep the decoded dataset in {path} ({error}); it is decoded again "
            f"next time. "
            "Set JFL_CACHE_DIR to a folder that can be written.",
            RuntimeWarning,
            stacklevel=2,
        )
