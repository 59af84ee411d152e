"""Blocks of a sweep's points, each of which runs as one program.

The results of a block leave its program at its end, and are stored in the sweep's file before
anybody is shown them.  So a lost block has released nothing, and is computed again: the same points
in the same program.
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

# Points of a block on a CPU, where 32 points at once take longer than four times 8 points.
CPU_BLOCK_SIZE = 8


class Block(NamedTuple):
    """Points that run as one program."""

    indices: list[int]  # positions in the sweep
    configs: list[Config]  # with the calibrated noise multiplier and the seed
    data: list[str]  # checksums
    plans: list[Plan]
    # points of the program, which all blocks of a group share; a smaller block is padded
    size: int


def key(config: Config, data: str, plan: str) -> str:
    """Return the key of a point: a digest of its config, its data, its plan and jfl's source.

    Args:
        config: the config with the calibrated noise multiplier.
        data: the checksum of the rows.
        plan: the signature of the plan's description.
    """
    text = json.dumps(
        [record.as_json(dataclasses.asdict(config)), data, plan, checkpoint.code()["source"]],
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:24]


# --- blocks


def memory() -> float:
    """Return the bytes available for the points that this process computes at once."""
    return device_memory(SHARE) or MEMORY


def programs(plans: list[Plan], seeds: list, memory: float, most: float) -> list[list[list[int]]]:
    """Divide points into blocks, and keep points of one seed together, since they share draws.

    Args:
        plans: the plans of the points, of equal widths.
        seeds: the seeds of the points.
        memory: bytes for the points of a block.
        most: the maximum number of points of a block.

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
    """Return the blocks of a group, the largest first.  If all seeds have the same number of
    points, a block holds several seeds, or a part of one."""
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
    """Deal the entries to the blocks in rotation.  Then the fields that vary in the group also vary
    in each block, so that the blocks share a program."""
    return [several[i::blocks] for i in range(blocks)]


def compute(
    block: Block, memory: float = math.inf, mesh=None, watch: Callable[[str], None] | None = None
) -> list[dict]:
    """Run a block.

    Args:
        block: the points to run.
        memory: bytes for the points that run at once.
        mesh: as in jfl.sweep.
        watch: as in jfl.sweep.

    Returns:
        The `record.measurement` of each point, with its share of the seconds.
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
    """Return the (point, seed) pairs of a block, padded to the size of its program.

    The padding repeats the last points, and its results are dropped.  It uses seeds that no point
    has, because one more point of a seed would be another program (`jfl.engine.sweep`).  A block
    with a part of one seed's points repeats its last point.
    """
    count, numbers = len(seeds), collections.Counter(seeds)
    each = len(seeds) // len(numbers) if len(set(numbers.values())) == 1 else 1
    own = list(enumerate(seeds))
    if size % each:
        return own + [own[-1]] * (size - count)
    rows = range((size - count) // each)
    return own + [(count - each + k, _unused(seeds, r)) for r in rows for k in range(each)]


def _unused(seeds: list[int], number: int) -> int:
    """Return the seed at position `number` among those that are not in `seeds`."""
    free = (seed for seed in itertools.count() if seed not in seeds)
    return next(itertools.islice(free, number, None))


# --- on this machine


class Local:
    """An engine that computes blocks sequentially in this process, on a `mesh` as in jfl.sweep."""

    name, nodes = "local", 1

    def __init__(self, mesh=None):
        devices = meshes.devices(mesh, 2**30)  # rejects an invalid mesh
        self.mesh, self.devices = mesh, 1 if devices is None else devices.size

    @contextlib.contextmanager
    def open(self, watch):
        self.memory, self.watch = self.devices * memory(), watch
        yield self

    def most(self, count: int) -> float:
        """Return the maximum number of points of a block, for `count` points in total."""
        return CPU_BLOCK_SIZE * self.devices if jax.default_backend() == "cpu" else count

    def run(self, blocks: list[Block], widths: dict):
        """Yield each block with its records as soon as it is finished."""
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
