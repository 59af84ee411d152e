"""What was run, in a file of one JSON line each, so that a study that stopped goes on where it
was."""

import json
import os
from collections.abc import Callable, Hashable
from pathlib import Path

from jfl.core import checks
from jfl.runs import record as report


class Store:
    """The records in a file by what was asked for; of two for the same the later counts.

    A last line that was cut off is not there: it is taken out of the file before the next one is
    added.

    Args:
        key: record -> what was asked for.

    Raises:
        ValueError: naming the file and the line that is no record.
    """

    def __init__(self, path, key: Callable[[dict], Hashable] = lambda record: record["key"]):
        self.path, self.key, self.found = Path(path), key, {}
        whole, end, rest = self._parts()
        self.cut = bool(rest)
        for number, line in enumerate(whole.split(b"\n") if end else (), 1):
            try:
                record = json.loads(line)
                self.found[key(record)] = record
            except (ValueError, KeyError, TypeError) as error:
                checks.fail(
                    f"{self.path}, line {number}",
                    "a record of a run",
                    f"{type(error).__name__}: {error}",
                    "Take the line out: its run is then computed again.",
                )

    def _parts(self) -> tuple[bytes, bytes, bytes]:
        """Lines that are whole, the end of the last one, and what was cut off."""
        return (self.path.read_bytes() if self.path.exists() else b"").rpartition(b"\n")

    def records(self) -> list[dict]:
        return list(self.found.values())

    def put(self, records: list[dict]):
        """Add records, each as a line of the file."""
        records = [report.plain(r) for r in records]
        if self.cut:  # seen again now: another process may have written since
            whole, end, rest = self._parts()
            if rest:
                os.truncate(self.path, len(whole + end))
            self.cut = False
        with open(self.path, "ab") as file:
            file.write("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records).encode())
        self.found |= {self.key(r): r for r in records}

    def get(self, key: str, compute: Callable[[], dict]) -> dict:
        """The record of a key, computed and kept under it if it is not there."""
        if key not in self.found:
            self.put([compute() | dict(key=key)])
        return self.found[key]
