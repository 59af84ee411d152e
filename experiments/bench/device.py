"""Time jfl and a hand-written JAX program on the accelerator of this machine.

    python -m experiments.bench.device                       # everything, about six minutes
    python -m experiments.bench.device --only W2 gpt --minutes 3

W1, W2, W3, W5 and W6 are the workloads of `experiments.bench.round`, W4 is a sweep of W1 with 64
points, and `vmapped JAX` is peers/vmapped_peer.py.  resnet18 (10 clients, 4 steps of 64 images) and
gpt (6 layers of width 512; 4 clients, 2 steps of 16 sequences of 256 tokens) are models that people
train.  All rows of data are random.

A row of the results has the seconds to trace and compile, and the seconds of a round: the median
over turns of the difference between a long and a short call of one program, divided by the number
of rounds between them.  Rows are stored as they come, and a row replaces an older one of the same
name.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np

import jfl
from jfl.runs.checkpoint import environment

from . import timing
from .round import jfl_peer, sixth, vmapped_peer, workloads

RESULTS = timing.RESULTS / "device.json"
# Timed turns of a row, and about how long a long call takes.
TURNS, SECONDS = 5, 0.5
POINTS = 64  # of the sweep W4


@dataclasses.dataclass(frozen=True)
class Job:
    """A row to time.

    Args:
        workload: a name in the module's docstring.
        tool: "jfl" or "vmapped JAX".
        mode: "private", "plain", or a variant of private rounds.
    """

    workload: str
    tool: str = "jfl"
    mode: str = "private"


def jobs() -> list[Job]:
    """Return all rows, the most important ones first."""
    tools, modes = ("jfl", "vmapped JAX"), ("private", "plain")
    cases = [(w, t, m) for w in ("W2", "W1", "W3", "W5") for t in tools for m in modes]
    models = [Job(w, mode=m) for w in ("resnet18", "gpt") for m in ("plain", "private")]
    others = [Job("W4"), Job("W2", mode="wavelet"), Job("W6")]
    small = [Job(w, mode=f"{m}, bfloat16") for w in ("gpt", "resnet18") for m in modes]
    return [*(Job(*case) for case in cases), *models, *others, *small]


def with_random_rows(workload: str) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Return the numbers of a workload, and random rows of its shapes."""
    spec = SimpleNamespace(**workloads.WORKLOADS[workload], block=1)
    rng = np.random.default_rng(0)
    features = math.prod(getattr(spec, "image", (784,)))
    x = rng.normal(size=(spec.clients, spec.rows, features)).astype(np.float32)
    return spec, SimpleNamespace(x=x, y=rng.integers(0, 10, x.shape[:2]).astype(np.int32))


# --- programs: a function of the number of rounds, and seconds to compile


def of_peer(job: Job) -> tuple[Callable, dict]:
    """Return the program of a workload in one of its tools."""
    spec, data = with_random_rows(job.workload)
    driver = jfl_peer if job.tool == "jfl" else vmapped_peer
    begun = time.perf_counter()
    run, _ = driver.build(spec, data, job.mode)
    run(1, lambda wait: wait())
    first = time.perf_counter() - begun

    def play(rounds):
        spec.block = rounds  # after a round that every call plays
        run(1 + rounds, lambda wait: None)
        run(1, lambda wait: wait())

    return play, dict(first_seconds=first)


def of_plan(plan: jfl.Plan) -> tuple[Callable, dict]:
    """Return the program of a plan's rounds, without evaluations."""
    start = lambda: jfl.init(jax.random.key(0), plan)
    begun = time.perf_counter()
    state = start()
    ready = time.perf_counter()
    traced = jfl_peer.program(plan).trace(state, plan, 1)
    seen = time.perf_counter()
    lowered = traced.lower()
    low = time.perf_counter()
    program = lowered.compile()
    seconds = dict(
        init_seconds=ready - begun,
        trace_seconds=seen - ready,
        lower_seconds=low - seen,
        compile_seconds=time.perf_counter() - low,
        temp_bytes=program.memory_analysis().temp_size_in_bytes,
    )

    def play(rounds):
        state = program(start(), plan, rounds)
        jax.block_until_ready(state)
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(state.server.params)):
            raise FloatingPointError("parameters are not finite")

    return play, seconds


def of_sweep() -> tuple[Callable, dict]:
    """Return a sweep of W1 over noise and seeds."""
    spec, data = with_random_rows("W1")
    fed = jfl_peer.federation(data)

    def plan(noise):
        changed = vars(spec) | dict(noise=float(noise))
        return jfl_peer.make(SimpleNamespace(**changed), fed, "private")

    noises = list(np.linspace(0.5, 4.0, POINTS // 8))

    def play(rounds):
        rounds += 1
        jfl.sweep(plan, noise=noises, seed=range(8), rounds=rounds, evaluate_every=rounds)

    begun = time.perf_counter()
    play(0)
    return play, dict(first_seconds=time.perf_counter() - begun)


def of_wavelets() -> tuple[Callable, dict]:
    """Return W2 with noise of the same distribution in each Haar band of an image."""
    spec, data = with_random_rows("W2")
    fed = jfl_peer.federation(data)
    task = jfl.models.mlp(fed, spec.hidden)
    params = jax.eval_shape(task.init, jax.eval_shape(lambda: jax.random.key(0)))
    shape = jfl.wavelet.ellipsoid(jfl.bands.pixels(params, (28, 28)))
    chain = jfl.chain(
        jfl.wavelet.clip_ellipsoid(spec.clip, shape),
        jfl.total(),
        jfl.gaussian(spec.noise / 2, shape=shape),
        jfl.divide(spec.batch),
    )
    batch = jfl.batches.without_replacement(spec.batch)
    grad = jfl.private_grad(task.loss, chain)
    alg = jfl.algorithms.fedavg(grad, lr=spec.lr, steps=spec.steps, batch=batch)
    sampler = jfl.sampling.without_replacement(spec.clients, spec.cohort)
    return of_plan(jfl.plan(fed, task, alg, sampler))


def of_model(job: Job) -> tuple[Callable, dict]:
    """Return a federation of resnet18 or gpt."""
    rng = np.random.default_rng(0)
    if job.workload == "resnet18":
        clients, rows, batch, steps = 10, 256, 64, 4
        x = rng.normal(size=(clients * rows, 32, 32, 3)).astype(np.float32)
        y, classes = rng.integers(0, 10, len(x)), 10
    else:
        clients, rows, batch, steps = 4, 32, 16, 2
        x = rng.integers(0, 86, (clients * rows, 256))
        y, classes = np.roll(x, -1, 1), 86
    data = jfl.datasets.arrays(x, y, x[:8], y[:8], classes=classes)
    fed = jfl.federate(data, jfl.partition.iid(clients))
    if job.workload == "resnet18":
        task = jfl.models.resnet18(fed, width=64)
    else:
        task = jfl.models.gpt(fed, width=512, layers=6, heads=8)
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(batch))
    kind, _, compute = job.mode.partition(", ")
    compute = compute or "float32"
    if kind == "plain":
        grad = jfl.grad(task.loss, compute=compute)
    else:
        grad = jfl.private_grad(task.loss, chain, compute=compute)
    batches = jfl.batches.without_replacement(batch)
    alg = jfl.algorithms.fedavg(grad, lr=0.01, steps=steps, batch=batches)
    return of_plan(jfl.plan(fed, task, alg, jfl.sampling.full(clients)))


def program(job: Job) -> tuple[Callable, dict]:
    """Return the program of a job, and what was measured while it was made."""
    if job.workload in ("resnet18", "gpt"):
        return of_model(job)
    if job.workload == "W4":
        return of_sweep()
    if job.workload == "W6":
        return of_plan(sixth())
    if job.mode == "wavelet":
        return of_wavelets()
    return of_peer(job)


# --- timing


def seconds_per_round(play: Callable) -> dict:
    """Return the median seconds of a round, all turns, and the rounds of a long call."""

    def timed(rounds):
        begun = time.perf_counter()
        play(rounds)
        return time.perf_counter() - begun

    timed(1)
    short, rounds = min(timed(1) for _ in range(2)), 1
    while timed(1 + rounds) - short < SECONDS and rounds < 2**16:
        rounds *= 2
    turns = [(timed(1 + rounds) - timed(1)) / rounds for _ in range(TURNS)]
    return dict(seconds=statistics.median(turns), turns=turns, rounds=rounds)


def store(path: Path, row: dict):
    """Add a row, or replace the row of the same name on the same device."""
    name = lambda row: [row[k] for k in ("workload", "tool", "mode", "device")]
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [other for other in old if name(other) != name(row)] + [row]
    about = dict(rows="random, of the shapes of the workload", seconds="of a round")
    lines = ",\n  ".join(json.dumps(row) for row in sorted(rows, key=name))
    path.write_text(f'{{\n "about": {json.dumps(about)},\n "rows": [\n  {lines}\n ]\n}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", help="default: all")
    parser.add_argument("--minutes", type=float, default=10.0, help="no row starts after these")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    begun, failed = time.monotonic(), False
    for job in jobs():
        if args.only and job.workload not in args.only:
            continue
        row = dataclasses.asdict(job) | dict(device=jax.devices()[0].device_kind)
        row |= dict(commit=timing.commit(), versions=environment())
        if time.monotonic() - begun > 60 * args.minutes:
            print(f"{job}: skipped, because no time is left", flush=True)
            continue
        try:
            play, measured = program(job)
            row |= measured | seconds_per_round(play)
        except Exception as error:  # the other rows must not be lost
            print(f"{job}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            failed = True
            continue
        finally:
            jax.clear_caches()
        row["peak_bytes"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        store(args.out, row)
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
        print(job, json.dumps(numbers), f"{time.monotonic() - begun:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
