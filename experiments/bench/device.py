"""The clock of the device that is here, beside what its compiler's programs let expect.

    python -m experiments.bench.round --device                # all and the tests, ten minutes
    python -m experiments.bench.round --device --only W1 W2 --minutes 3

Rows are random, of the right shapes (no data set need be here); shapes, and so floors, are those of
`experiments.bench.aot`.  A row has the seconds to compile, the seconds of a round (the median over
turns of the difference between a long and a short call of one program, divided by the rounds
between them, so that neither evaluations nor the call count), and, where aot.json has a row of the
same shapes for this kind of device, its floor.  "cifar10" plays all 1,500 rounds of pfl-research's
benchmark, on random pixels.  A workload for which no time is left is named and skipped; rows stand
in experiments/results/device.json as they come.
"""

import dataclasses
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jfl
from jfl.core import identity
from jfl.engine import simulate, sweep

from . import aot
from .ahead_of_time import workloads

RESULTS = aot.ROOT / "experiments" / "results" / "device.json"
TARGETS = {"H200": "h200", "H100": "h100", "v5 lite": "v5e", "v5e": "v5e"}  # of a device's kind
TURNS, SECONDS = 5, 3.0  # timed turns, and about how long they take together
CIFAR_ROUNDS = 1500
PACKAGES = ("jfl", "jax", "jaxlib", "flax", "optax", "numpy")


@dataclasses.dataclass(frozen=True)
class Job:
    """A row: a workload of `workloads`, its modes, and how it is played."""

    name: str
    workload: str
    mode: str = "private"
    algorithm: str = "fedavg"
    points: int = 0
    rounds: int = 0  # 0: as many as fit in SECONDS; else one run of so many
    numbers: tuple = ()

    def make(self, fed, **change) -> workloads.Workload:
        """Its plan."""
        numbers = dict(self.numbers) | change
        modes = self.mode.split("+")
        return workloads.workload(self.workload, modes, self.algorithm, fed, **numbers)


def jobs() -> list:
    """All rows, what matters most first."""
    plain = [Job(w, w, mode) for w in ("W1", "W2", "W3", "W5") for mode in ("private", "plain")]
    return [
        *plain,
        Job("W4", "W1", points=64),
        Job("W2", "W2", "wavelet"),
        Job("W2", "W2", "poisson"),
        Job("W2", "W2", "threefry"),
        Job("W6", "W6", algorithm="scaffold"),
        Job("cifar10", "W5", rounds=CIFAR_ROUNDS),
    ]


# --- programs


def _compiled(function, *arguments, **static):
    """A program, and the seconds to trace, lower and compile it."""
    begun = time.perf_counter()
    done = function.lower(*arguments, **static).compile()
    return done, time.perf_counter() - begun


def one_run(plan):
    """rounds -> nothing, and the seconds to compile: what jfl.simulate runs."""
    words = jnp.asarray(identity.noise_identity(plan))
    start = lambda: jfl.init(jax.random.key(0), plan)
    counts = lambda rounds: (jnp.array([rounds], jnp.int32), jnp.int32(1))
    program, seconds = _compiled(simulate._scan, start(), plan, *counts(1), words)

    def play(rounds):
        run, metrics = program(start(), plan, *counts(rounds), words)
        jax.block_until_ready((run.server, metrics))
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(run.server)):
            raise FloatingPointError("parameters are not finite")

    return play, seconds


def many_runs(job: Job, fed):
    """The same of a sweep as one program, whose points differ in noise, learning rate and seed."""
    axes = [
        np.linspace(aot.SPREAD[0][name], aot.SPREAD[1][name], job.points)
        for name in ("noise", "lr")
    ]
    plans = [job.make(fed, noise=float(z), lr=float(lr)).plan for z, lr in zip(*axes)]
    first, columns = plans[0], list(zip(*map(jax.tree.leaves, plans)))
    differ = lambda column: any(not sweep._same(column[0], x) for x in column[1:])
    mapped = tuple(sweep.BY_POINT if differ(column) else sweep.SHARED for column in columns)
    varied = tuple(jnp.stack([jnp.asarray(x) for x in c]) for c, m in zip(columns, mapped) if m)
    shared = tuple(c[0] for c, m in zip(columns, mapped) if not m)
    keys = jax.random.split(jax.random.key(0), job.points)
    words = jnp.zeros((job.points, 3, identity.hashing.WORDS), jnp.uint32)
    counts = lambda rounds: jnp.array([rounds], jnp.int32)
    treedef = jax.tree.structure(first)
    static = dict(treedef=treedef, mapped=mapped, keeps=False, in_rows=False)
    given = keys, words, varied, None, shared  # None: no states to go on from
    program, seconds = _compiled(sweep._points, *given, counts(1), **static)
    return lambda rounds: jax.block_until_ready(program(*given, counts(rounds))), seconds


def seconds_a_round(play) -> tuple[float, int, list]:
    """The median of TURNS turns, the rounds between the two calls of a turn, and all turns."""

    def timed(rounds):
        begun = time.perf_counter()
        play(rounds)
        return time.perf_counter() - begun

    play(1)
    call, rounds = min(timed(1) for _ in range(3)), 1
    while timed(1 + rounds) - call < SECONDS / TURNS and rounds < 2**20:
        rounds *= 2
    found = [(timed(1 + rounds) - timed(1)) / rounds for _ in range(TURNS)]
    return statistics.median(found), rounds, found


# --- rows


def target() -> str | None:
    """The name in aot.json of this kind of device; None for others."""
    kind = jax.devices()[0].device_kind
    return next((name for part, name in TARGETS.items() if part in kind), None)


def floor(made: workloads.Workload, points: int) -> dict:
    """Of the row in aot.json that was compiled from the same shapes for this kind of device."""
    if not aot.RESULTS.exists():
        return {}
    for row in json.loads(aot.RESULTS.read_text())["rows"]:
        same = (made.hash(), target(), points, 1)
        if (row["shapes"], row["target"], row["points"], row["devices"]) == same:
            return dict(floor=row["round"]["seconds"], floor_commit=row["commit"])
    return {}


def row(job: Job) -> dict:
    """Compile and time one job."""
    fed = workloads.random_rows(job.workload, **dict(job.numbers))
    made = job.make(fed)
    play, compile_seconds = many_runs(job, fed) if job.points else one_run(made.plan)
    if job.rounds:
        play(1)
        begun = time.perf_counter()
        play(job.rounds)
        whole = time.perf_counter() - begun
        timed = dict(rounds=job.rounds, run_seconds=whole, seconds=whole / job.rounds)
    else:
        seconds, rounds, turns = seconds_a_round(play)
        timed = dict(rounds=rounds, seconds=seconds, turns=turns)
    expected = floor(made, job.points)
    if expected:
        expected["over_floor"] = timed["seconds"] / expected["floor"]
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return dict(compile_seconds=compile_seconds, **timed, **expected, peak_bytes=peak)


def about() -> dict:
    """Where and with what all rows were timed."""
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return dict(
        device=device.device_kind,
        platform=device.platform,
        commit=aot.commit(),
        versions=versions,
        load=os.getloadavg()[0],
    )


def save(out: Path, found: dict):
    """Add a row, or put it in the place of an older one of this kind of device."""
    same = lambda one: [one[k] for k in ("name", "mode", "algorithm", "points", "device")]
    old = json.loads(out.read_text())["rows"] if out.exists() else []
    rows = [one for one in old if same(one) != same(found)] + [found]
    rows.sort(key=lambda one: json.dumps(same(one)))
    said = (
        "timed on the device that is named; rows are random, of the right shapes; "
        "peak_bytes is the process's peak so far"
    )
    out.write_text(json.dumps(dict(about=said, rows=rows), indent=1) + "\n")


def shown(found: dict) -> str:
    """A row for a reader."""
    name = f"{found['name']:8} {found['mode']:16}"
    if "skipped" in found:
        return f"{name} skipped: {found['skipped']}"
    text = (
        f"{name} {found['seconds'] * 1e3:10.3f} ms a round, "
        f"compiled in {found['compile_seconds']:.1f} s"
    )
    if "floor" in found:
        text += f", {found['over_floor']:.2f} times the floor of {found['floor'] * 1e3:.3f} ms"
    return text


def tests(seconds: float) -> dict:
    """The row of the tests that are worth a run on a device, in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "accelerator and not slow"]
    # this process holds most of the device's memory already
    users = os.environ | dict(JFL_TEST_OPTIMIZED="1", XLA_PYTHON_CLIENT_PREALLOCATE="false")
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=aot.ROOT,
            env=users,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return dict(skipped=f"the tests were not done after {seconds:.0f} s")
    text = done.stdout.strip() or done.stderr.strip()
    said = dict(said=text[-2000:], exit=done.returncode, run_seconds=time.monotonic() - begun)
    return said if done.returncode == 0 else said | dict(skipped=text[-500:])


def main(only=(), minutes: float = 10.0, out: Path = RESULTS, numbers: dict | None = None) -> int:
    """Time the jobs, one process for all -> 1 if one failed.

    Args:
        only: names of jobs; none: all.
        minutes: after which no further job begins and the tests, which come last, are stopped; a
            job that a device is too slow for is not.
        out: the file of the rows.
        numbers: of every workload, in place of its own.
    """
    begun, failed, limit = time.monotonic(), False, 60 * minutes
    print(json.dumps(about()), flush=True)
    for job in (job for job in jobs() if not only or job.name in only):
        job = dataclasses.replace(job, numbers=tuple((numbers or {}).items()))
        found = dataclasses.asdict(job) | about() | dict(numbers=dict(job.numbers))
        try:
            if time.monotonic() - begun > limit:
                found["skipped"] = f"no time left of {minutes:g} minutes"
            else:
                found |= row(job)
        except Exception as error:  # one that a device cannot do must not lose the others
            failed, found["skipped"] = True, f"{type(error).__name__}: {str(error)[:500]}"
        jax.clear_caches()  # and the memory of its programs
        save(out, found)
        print(shown(found), flush=True)
    if not only:
        found = dataclasses.asdict(Job("tests", "")) | about()
        found |= tests(max(limit - (time.monotonic() - begun), 1))
        save(out, found)
        print(found.get("skipped") or found["said"].splitlines()[-1], flush=True)
        failed |= "skipped" in found
    return int(failed)
