"""Files that survive a crash: atomic replacement, and a store of JSON records.

A `ResultStore` is a file to which lines are only appended.  Each line is one record as JSON, with a
digest.  A record is on the disk before it is returned.  A process that is killed therefore loses at
most the record that it was writing, which is computed again.
"""

import contextlib
import errno
import functools
import hashlib
import importlib
import json
import math
import os
import re
import uuid
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from . import checks

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")
SOURCE_FOLDERS = ("jfl", "kernels")  # whose code `source` covers, in its order


def write(path: str | Path, content: str | Iterable[Any]) -> None:
    """Replace a file so that a reader sees the old content or the new one, even after a crash.

    Args:
        path: the file.
        content: a string, or an iterable of bytes.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as file:
            for part in [content.encode()] if isinstance(content, str) else content:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:  # an error of write or flush names no file
        error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
    if hasattr(os, "O_DIRECTORY"):  # write the new name to the disk too; not on Windows
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the file system cannot
                raise
        finally:
            os.close(folder)


def temporary(path: str | Path) -> bool:
    """Return whether a file is a temporary file of `write`, left by a process that was killed."""
    return bool(TEMPORARY.fullmatch(Path(path).name))


@functools.cache
def source() -> str:
    """Return a hash of jfl's code, since a working copy can change without a new version."""
    package = Path(__file__).parents[1]
    kernels = Path(str(importlib.import_module("jfl.kernels").__file__)).parent
    return source_of(
        {
            f"{name}/{file.relative_to(folder).as_posix()}": file.read_bytes()
            for name, folder in zip(SOURCE_FOLDERS, (package, kernels))
            for file in folder.rglob("*.py")
        }
    )


def source_of(code: dict[str, bytes]) -> str:
    """Return the hash of `source` for files whose paths begin with one of SOURCE_FOLDERS."""
    parts = lambda path: path.split("/")
    order = sorted(code, key=lambda path: (SOURCE_FOLDERS.index(parts(path)[0]), parts(path)))
    return hashlib.sha256(b"\0".join(code[path] for path in order)).hexdigest()[:16]


# --- records


def plain(value: Any) -> Any:
    """Convert nested dicts, sequences and numbers to types of JSON; NaN and inf become None."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (bool, str, type(None))):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    value = float(value)
    return value if math.isfinite(value) else None


def as_json(value: Any) -> Any:
    """Return a value as it would be after writing it to a JSON file and reading it back."""
    return json.loads(json.dumps(plain(value)))


def digest_of(record: dict[str, Any]) -> str:
    """Return the digest of a JSON record, independent of the order of its fields."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


class ResultStore:
    """A file of records with keys; of two records with the same key, the later one counts.

    An incomplete last line is ignored, and removed from the file before the next line is appended.
    Lines that another process appended in the meantime are kept.

    Args:
        path: the file, which need not exist.
        key: a function that returns the key of a record.
        fields: the fields of a record to keep in memory.  None keeps all.
        head: the names of the fields of the first line, which describes all records.  None means
            that the first line is a record, too.
        signed: whether to reject lines without a digest.
        line: what a line is called in messages.
        remedy: what to do about a damaged line, for messages.

    Attributes:
        records: the records by key.
        head: the first line; None if there is none yet.

    Raises:
        ArgumentError: If a line is not a record; the message names the file and the line.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        key: Callable[[dict[str, Any]], Hashable] = lambda record: record["key"],
        fields: tuple[str, ...] | None = None,
        head: tuple[str, ...] | None = None,
        signed: bool = False,
        line: str = "a record of a run",
        remedy: str = "Take the line out: its run is then computed again.",
    ):
        self.path, self.key = Path(path), key
        self.records: dict[Hashable, Any] = {}
        self.head: Any = None
        self._fields, self._head_fields, self._signed = fields, head, signed
        self._line, self._remedy = line, remedy
        self._size = self._count = 0  # bytes and lines of the file that were read
        self._read(self.path.read_bytes() if self.path.exists() else b"")

    def __contains__(self, key: Hashable) -> bool:
        return key in self.records

    def __getitem__(self, key: Hashable) -> dict[str, Any]:
        return self.records[key]

    def begin(self, head: dict[str, Any]) -> None:
        """Write the first line of a new file."""
        self._add([as_json(head)])

    def put(self, records: Iterable[dict[str, Any]]) -> None:
        """Add records, each as a line; they are on the disk when this returns."""
        self._add([as_json(record) for record in records])

    def get(self, key: Hashable, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the record of a key; if it is missing, compute and store it first."""
        if key not in self.records:
            self.put([compute() | dict(key=key)])
        return self.records[key]

    def _read(self, content: bytes) -> None:
        """Read the complete lines in the next part of the file."""
        whole, end, _ = content.rpartition(b"\n")
        for line in whole.split(b"\n") if end else ():
            self._count += 1
            try:
                self._keep(self._verified(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                checks.fail(
                    f"{self.path}, line {self._count}",
                    self._line,
                    f"{type(error).__name__}: {error}",
                    self._remedy,
                )
        self._size += len(whole + end)

    def _verified(self, record: Any) -> dict[str, Any]:
        """Check the digest of a line, and return its record without it."""
        if not isinstance(record, dict):
            raise TypeError(f"{type(record).__name__} instead of an object")
        digest = record.pop("digest", None)
        if digest is None and self._signed:
            raise ValueError("no digest")
        if digest is not None and digest != digest_of(record):
            raise ValueError(f"another digest than {digest}")
        return record

    def _keep(self, record: dict[str, Any]) -> None:
        """Keep a record in memory, or the head if there is none yet."""
        if self._head_fields is not None and self.head is None:
            self.head = {k: record[k] for k in self._head_fields}
            return
        key = self.key(record)
        self.records[key] = {k: record[k] for k in self._fields} if self._fields else record

    def _add(self, records: list[dict[str, Any]]) -> None:
        """Append records to the file, after reading what other processes have appended."""
        lines = "".join(
            json.dumps(r | dict(digest=digest_of(r)), ensure_ascii=False) + "\n" for r in records
        ).encode()
        with open(self.path, "a+b") as file:
            end = file.seek(0, os.SEEK_END)
            if end < self._size:
                checks.fail(
                    str(self.path),
                    f"the {self._size} bytes that were there",
                    f"{end}: another process modified the file",
                    "Start in a new directory with a new seed.",
                )
            file.seek(self._size)
            self._read(file.read())  # another process may have added lines
            file.truncate(self._size)  # remove an incomplete line
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        for record in records:
            self._keep(record)
        self._size += len(lines)
        self._count += len(records)
