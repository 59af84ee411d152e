"""The points of a sweep: in blocks, each one program, and in a file, a line for each as soon as it
is there.

What a block computes leaves its program at its end, and is in the file before anybody is shown it.
So a block that is lost has released nothing, and is computed again as it was: the same points, in
the same program.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import NamedTuple

import jax

from ..core import checks
from ..core.records import Health, Plan
from ..engine import devices as meshes
from ..engine.plan import client_bytes
from ..engine.sweep import MEMORY, static_groups
from ..engine.sweep import sweep as run_sweep
from . import checkpoint
from . import record as report
from .config import Config

AT_ONCE = 8  # points of a block on a CPU: 32 at once take longer there than 8 after 8
SHARE = 0.25  # of an accelerator's memory for what `client_bytes` estimates


class Block(NamedTuple):
    """Points that run as one program."""

    at: list  # of int: where they stand in the sweep
    configs: list  # of Config: with the noise multiplier that was found, and the seed
    data: list  # of str: checksums
    plans: list
    # of the program: a smaller block repeats its last point, as all of a group share one program
    size: int


def plain(value):
    """As JSON gives it back."""
    return json.loads(json.dumps(report.plain(value)))


def key(config: Config, data: str, plan: str) -> str:
    """Of a point: its config, the data's checksum, the signature of its plan's description, jfl's
    own source."""
    text = json.dumps(
        [plain(dataclasses.asdict(config)), data, plan, checkpoint.code()["source"]], sort_keys=True
    )
    return hashlib.sha256(text.encode()).hexdigest()[:24]


# --- blocks


def memory() -> float:
    """Bytes for the points that this process computes at once."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return SHARE * limit if limit else MEMORY


def programs(plans: list[Plan], memory: float, most: float) -> list[list[list[int]]]:
    """The blocks of each static group -> where their points stand, the largest block of a group
    first.

    Args:
        plans: of equal widths.
        memory: bytes for the points of a block;  most: how many there may be at all.
    """
    out = []
    for members in static_groups(plans):
        plan = plans[members[0]]
        fit = memory // (client_bytes(plan) * (plan.chunk or plan.sampler.capacity))
        count = math.ceil(len(members) / max(1, min(fit, most)))
        # every so-many-th point: what varies in the group varies in each block, so that they share
        # a program
        out.append([members[i::count] for i in range(count)])
    return out


def compute(block: Block, memory: float = math.inf, mesh=None) -> list[dict]:
    """Run a block -> for each point its history, as lists over evaluations, its Health and its
    share of the seconds."""
    begun, compiled = time.perf_counter(), report.compile_seconds()
    at = [min(i, len(block.plans) - 1) for i in range(block.size)]
    first = block.configs[0]
    result = run_sweep(
        lambda i: block.plans[i],
        points=[dict(i=i, seed=block.configs[i].seed) for i in at],
        rounds=first.rounds,
        evaluate_every=first.evaluate_every,
        memory=memory,
        mesh=mesh,
        tolerate=Health._fields,
    )
    share = 1 / len(block.plans)
    seconds = dict(
        seconds=share * (time.perf_counter() - begun),
        compile=share * (report.compile_seconds() - compiled),
    )
    return [
        dict(
            seconds,
            health={f: int(v[i]) for f, v in result.health._asdict().items()},
            history=report.lists(result.metrics, i),
        )
        for i in range(len(block.plans))
    ]


# --- on this machine


class Local:
    """An engine: computes blocks in this process, one after another, on `mesh` as of jfl.sweep."""

    name, nodes = "local", 1

    def __init__(self, mesh=None):
        found = meshes.devices(mesh, 2**30)  # refuses what is none
        self.mesh, self.devices = mesh, 1 if found is None else found.size

    @contextlib.contextmanager
    def open(self, watch):
        self.memory = self.devices * memory()
        yield self

    def most(self, count: int) -> float:
        """Points of a block, of so many points in all."""
        return AT_ONCE * self.devices if jax.default_backend() == "cpu" else count

    def run(self, blocks: list[Block], widths: dict):
        """-> (block, records) of each, as it is done."""
        who = dict(
            worker="local", device=f"{jax.default_backend()} {checkpoint.environment()['device']}"
        )
        for block in blocks:
            yield block, [who | record for record in compute(block, mesh=self.mesh)]


# --- in a file


class Results:
    """A file of one JSON line each: what the sweep is, then its points, by key; of two for one key
    the first counts.

    A last line that was cut off is not there: it is taken out of the file before the next one is
    added.

    Raises:
        ValueError: naming the file and the line that is no point.
    """

    def __init__(self, path):
        self.path, self.found, self.head = Path(path), {}, None
        whole, end, _ = (self.path.read_bytes() if self.path.exists() else b"").rpartition(b"\n")
        self.size = len(whole + end)  # of the lines that are whole
        for number, line in enumerate(whole.split(b"\n") if end else (), 1):
            try:
                record = json.loads(line)
                if (
                    said := record.pop("digest", "none, as of another version of jfl")
                ) != checkpoint.signature(record):
                    raise ValueError(f"another digest than {said}")
                if number == 1:
                    self.head = {
                        k: record[k] for k in ("config", "axes", "code", "plan", "programs")
                    }
                else:
                    self.found.setdefault(
                        record["key"],
                        {
                            k: record[k]
                            for k in (
                                "key",
                                "worker",
                                "device",
                                "seconds",
                                "compile",
                                "health",
                                "history",
                            )
                        },
                    )
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                checks.fail(
                    f"{self.path}, line {number}",
                    "a line as a sweep wrote it",
                    f"{type(error).__name__}: {error}",
                    "Start in another directory with another seed.",
                )

    def begin(self, head: dict):
        self.head = plain(head)
        self._add([self.head])

    def put(self, records: list[dict]):
        """Add points, each as a line; they are on the disk when this returns."""
        new = [report.plain(r) for r in records if r["key"] not in self.found]
        self._add(new)
        self.found |= {r["key"]: r for r in new}

    def _add(self, lines):
        try:
            text = "".join(
                json.dumps(r | dict(digest=checkpoint.signature(r)), ensure_ascii=False) + "\n"
                for r in lines
            ).encode()
            with open(self.path, "ab") as file:
                if file.tell() < self.size:
                    checks.fail(
                        str(self.path),
                        f"the {self.size} bytes that this sweep left",
                        f"{file.tell()}: another hand changed it",
                        "Start in another directory with another seed.",
                    )
                file.truncate(self.size)  # what was cut off goes
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            self.size += len(text)
        except OSError as error:
            raise OSError(
                f"sweep {self.path.parent}: need a disk that can be written; got {error.strerror}. "
                f"The points in "
                f"{self.path.name} are kept: make room, then --resume goes on."
            ) from None
