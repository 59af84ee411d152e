"""The points of a sweep in blocks, each of which is one program.

What a block computes leaves its program at its end, and is in the sweep's file before anybody is
shown it.  So a block that is lost has released nothing, and is computed again as it was: the same
points, in the same program.
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable
from typing import NamedTuple

import jax

from ..core.records import Health, Plan
from ..engine import devices as meshes
from ..engine.plan import client_bytes
from ..engine.sweep import FULL, MEMORY, SHARE, device_memory, largest_chunk, static_groups
from ..engine.sweep import sweep as run_sweep
from . import checkpoint, record
from .config import Config
from .stopwatch import Stopwatch

AT_ONCE = 8  # points of a block on a CPU: 32 at once take longer there than 8 after 8


class Block(NamedTuple):
    """Points that run as one program."""

    indices: list  # of int: where they stand in the sweep
    configs: list  # of Config: with the noise multiplier that was found, and the seed
    data: list  # of str: checksums
    plans: list
    size: int  # of the program, which all blocks of a group share: a smaller one is filled up


def key(config: Config, data: str, plan: str) -> str:
    """The key of a point: of its config, its data, its plan, and jfl's own source.

    Args:
        config: with the noise multiplier that was found.
        data: the checksum of its rows.
        plan: the signature of its plan's description.
    """
    text = json.dumps(
        [record.as_json(dataclasses.asdict(config)), data, plan, checkpoint.code()["source"]],
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:24]


# --- blocks


def memory() -> float:
    """Bytes for the points that this process computes at once."""
    return device_memory(SHARE) or MEMORY


def programs(plans: list[Plan], seeds: list, memory: float, most: float) -> list[list[list[int]]]:
    """Divide points into blocks; points of one seed, which draw alike, stand together.

    Args:
        plans: of the points, of equal widths.
        seeds: of the points.
        memory: bytes for the points of a block.
        most: how many points a block may have at all.

    Returns:
        For each static group its blocks, the largest first; a block is the indices of its points.
    """
    out = []
    for members in static_groups(plans):
        together = [plans[i] for i in members]
        fit = memory // (client_bytes(together[0]) * largest_chunk(together))
        out.append(_divided(members, [seeds[i] for i in members], max(1, min(fit, most))))
    return out


def _divided(members: list[int], seeds: list, most: float) -> list[list[int]]:
    """Blocks of a group, the largest first: where all seeds have equally many points, several of
    them or parts of one."""
    of_seed = {}
    for i, seed in zip(members, seeds):
        of_seed.setdefault(seed, []).append(i)
    rows = list(of_seed.values())
    each, count = len(rows[0]), len(rows)
    if each == 1 or any(len(row) != each for row in rows):
        return _spread(members, math.ceil(len(members) / most))
    if each > most:
        parts = [part for row in rows for part in _spread(row, math.ceil(each / most))]
        return sorted(parts, key=len, reverse=True)
    return [sum(block, []) for block in _spread(rows, math.ceil(count / (most // each)))]


def _spread(several: list, blocks: int) -> list[list]:
    """Every so-many-th into one block: what varies in the group varies in each, so that they share
    a program."""
    return [several[i::blocks] for i in range(blocks)]


def compute(
    block: Block, memory: float = math.inf, mesh=None, watch: Callable[[str], None] | None = None
) -> list[dict]:
    """Run a block.

    Args:
        block: its points.
        memory: bytes for the points that run at once.
        mesh: as of jfl.sweep.
        watch: as of jfl.sweep.

    Returns:
        What is kept of each point (`record.measurement`), with its share of the seconds.
    """
    stopwatch, count = Stopwatch(), len(block.plans)
    first, seeds = block.configs[0], [config.seed for config in block.configs]
    result = run_sweep(
        lambda i: block.plans[i],
        points=[dict(i=i, seed=seed) for i, seed in filled(seeds, block.size)],
        rounds=first.rounds,
        evaluate_every=first.evaluate_every,
        memory=memory,
        mesh=mesh,
        watch=watch,
        tolerate=Health._fields,
    )
    seconds, compiled = stopwatch.read()
    return [
        record.measurement(result.metrics, result.health, seconds / count, compiled / count, i)
        for i in range(count)
    ]


def filled(seeds: list[int], size: int) -> list[tuple[int, int]]:
    """(point, seed) of a block that is filled up to the size of its program.

    What is more is the last points again, and their results are dropped.  They run under seeds that
    no point has: one point more of a seed would be another program (`jfl.engine.sweep`).  A part
    of the points of one seed repeats its last point.
    """
    count, numbers = len(seeds), collections.Counter(seeds)
    each = len(seeds) // len(numbers) if len(set(numbers.values())) == 1 else 1
    own = list(enumerate(seeds))
    if size % each:
        return own + [own[-1]] * (size - count)
    rows = range((size - count) // each)
    return own + [(count - each + k, _unused(seeds, r)) for r in rows for k in range(each)]


def _unused(seeds: list[int], number: int) -> int:
    """One of the seeds that are none of these."""
    free = (seed for seed in itertools.count() if seed not in seeds)
    return next(itertools.islice(free, number, None))


# --- on this machine


class Local:
    """An engine: computes blocks in this process, one after another, on `mesh` as of jfl.sweep."""

    name, nodes = "local", 1

    def __init__(self, mesh=None):
        devices = meshes.devices(mesh, 2**30)  # refuses what is none
        self.mesh, self.devices = mesh, 1 if devices is None else devices.size

    @contextlib.contextmanager
    def open(self, watch):
        self.memory, self.watch = self.devices * memory(), watch
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
            found = compute(
                block,
                device_memory(FULL) or math.inf,
                self.mesh,
                lambda line: self.watch(note=line),
            )
            yield block, [who | measured for measured in found]
