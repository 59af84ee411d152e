"""Records of runs by key, in a file to which lines are only added.

A line is the JSON of one record, and ends with the digest of what it says.  It is on the disk
before anybody is shown the record.  So a process that is killed loses at most the line that it was
writing, and what was lost is computed again.
"""

import json
import os
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

from ..core import checks
from .checkpoint import signature
from .record import as_json

UNSIGNED = "none"


class ResultStore:
    """Records by key in a file; of two records with one key the later one counts.

    A last line that was cut off is not there: it is taken out of the file before the next line is
    added.  Lines that another process added in the meantime are kept.

    Args:
        path: of the file, which need not exist.
        key: what a record is kept under.
        fields: what every record holds; of others nothing is kept in memory.  None: anything.
        head: what the first line of the file holds, which says what all records are of.  None: a
            file without such a line.
        signed: refuse lines without a digest.
        line: what a line is, for refusals.
        remedy: what to do about a line that is damaged.

    Attributes:
        records: the records by key.
        head: the first line, None where there is none yet.

    Raises:
        ArgumentError: naming the file and the line that is no record.
    """

    def __init__(
        self,
        path,
        *,
        key: Callable[[dict], Hashable] = lambda record: record["key"],
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

    def __getitem__(self, key: Hashable) -> dict:
        return self.records[key]

    def begin(self, head: dict):
        """Write the first line of a new file."""
        self._add([as_json(head)])

    def put(self, records: Iterable[dict]):
        """Add records, each as a line; they are on the disk when this returns."""
        self._add([as_json(record) for record in records])

    def get(self, key: Hashable, compute: Callable[[], dict]) -> dict:
        """The record of a key, computed and kept under it if it is not there."""
        if key not in self.records:
            self.put([compute() | dict(key=key)])
        return self.records[key]

    def _read(self, content: bytes):
        """Take in the whole lines of what the file holds beyond what was read."""
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

    def _verified(self, record: dict) -> dict:
        """The record of a line, without its digest."""
        if not isinstance(record, dict):
            raise TypeError(f"{type(record).__name__} in place of an object")
        digest = record.pop("digest", None)
        if digest is None and self._signed:
            raise ValueError(f"another digest than {UNSIGNED}")
        if digest is not None and digest != signature(record):
            raise ValueError(f"another digest than {digest}")
        return record

    def _keep(self, record: dict):
        if self._head_fields is not None and self.head is None:
            self.head = {k: record[k] for k in self._head_fields}
            return
        key = self.key(record)
        self.records[key] = {k: record[k] for k in self._fields} if self._fields else record

    def _add(self, records: list[dict]):
        lines = "".join(
            json.dumps(r | dict(digest=signature(r)), ensure_ascii=False) + "\n" for r in records
        ).encode()
        with open(self.path, "a+b") as file:
            end = file.seek(0, os.SEEK_END)
            if end < self._size:
                checks.fail(
                    str(self.path),
                    f"the {self._size} bytes that were there",
                    f"{end}: another hand changed it",
                    "Start in another directory with another seed.",
                )
            file.seek(self._size)
            self._read(file.read())  # another process may have added lines
            file.truncate(self._size)  # a line that was cut off goes
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        for record in records:
            self._keep(record)
        self._size += len(lines)
        self._count += len(records)
