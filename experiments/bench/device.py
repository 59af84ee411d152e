"""Time jfl and a hand-written JAX program on the accelerator of this machine.

    python -m experiments.bench.device                       # everything, one after another
    python -m experiments.bench.device --only W2 gpt --modes plain private --minutes 3
    python -m experiments.bench.device --list                # the rows, and nothing is run

W1, W2, W3, W5 and W6 are the workloads of `experiments.bench.round`, W4 is a sweep of W1 with 64
points, and `vmapped JAX` is peers/vmapped_peer.py.  MODELS are models that people train, at real
size.  All rows of data are random.  A mode may end in ", bfloat16" (the precision of the loss).

Compiling takes longer than timing.  Several processes can therefore compile first, and store the
programs and the seconds in a folder for a later call:

    python -m experiments.bench.device --compile-only 8 --cache /tmp/programs
    python -m experiments.bench.device --cache /tmp/programs

A row of the results has the seconds to trace and compile, and the seconds of a round: the median
over turns of the difference between a long and a short call of one program, divided by the number
of rounds between them.  Rows are stored as they come, and a row replaces an older one of the same
name.
"""

import concurrent.futures
import dataclasses
import json
import math
import multiprocessing
import os
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
class Model:
    """A federation that trains a model.

    Args:
        options: arguments of the model in `jfl.models`.
        tiny: other arguments, with which it is small.
        clients: number of clients.
        rows: number of rows of each client.
        steps: number of local steps.
        batch: number of rows of a step.
        row: the shape of an image; or the number of tokens, each with the next token as its label.
    """

    options: dict
    tiny: dict
    clients: int = 10
    rows: int = 256
    steps: int = 4
    batch: int = 64
    row: tuple[int, ...] = (32, 32, 3)


TINY_TRANSFORMER = dict(width=8, layers=2, heads=2)
MODELS = dict(
    resnet18=Model(dict(width=64), dict(width=4)),
    wideresnet=Model(dict(depth=16, width=4), dict(depth=10, width=1)),
    vit=Model(dict(width=192, layers=12, heads=3), TINY_TRANSFORMER),
    gpt=Model(dict(width=512, layers=6, heads=8), TINY_TRANSFORMER, 4, 32, 2, 16, (256,)),
    lstm=Model(dict(cells=(256,)), dict(cells=(4,)), 16, 64, 4, 16, (80,)),
)


@dataclasses.dataclass(frozen=True)
class Job:
    """A row to time.

    Args:
        workload: a name in the module's docstring.
        tool: "jfl" or "vmapped JAX".
        mode: "private", "plain", or a variant of them.
    """

    workload: str
    tool: str = "jfl"
    mode: str = "private"


def jobs() -> list[Job]:
    """Return all rows, the most important ones first."""
    tools, modes = ("jfl", "vmapped JAX"), ("private", "plain")
    cases = [(w, t, m) for w in ("W2", "W1", "W3", "W5") for t in tools for m in modes]
    real = ("gpt", "resnet18", "wideresnet", "vit", "lstm")
    models = [Job(w, mode=m) for w in real for m in ("plain", "private")]
    half = [Job(w, mode=f"{m}, bfloat16") for w in real for m in ("plain", "private")]
    others = [Job("W4"), Job("W2", mode="wavelet"), Job("W6")]
    return [*models, *half, *(Job(*case) for case in cases), *others]


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


def of_model(job: Job, tiny: bool) -> tuple[Callable, dict]:
    """Return a federation that trains one of MODELS."""
    model, rng = MODELS[job.workload], np.random.default_rng(0)
    if tiny:
        clients, rows, steps, batch = 2, 8, 2, 2
    else:
        clients, rows, steps, batch = model.clients, model.rows, model.steps, model.batch
    if len(model.row) == 1:
        classes = 86
        x = rng.integers(0, classes, (clients * rows, *((8,) if tiny else model.row)))
        y = np.roll(x, -1, 1)
    else:
        classes = 10
        shape = (clients * rows, *((8, 8, 3) if tiny else model.row))
        x = rng.normal(size=shape).astype(np.float32)
        y = rng.integers(0, classes, len(x))
    data = jfl.datasets.arrays(x, y, x[:8], y[:8], classes=classes)
    fed = jfl.federate(data, jfl.partition.iid(clients))
    task = getattr(jfl.models, job.workload)(fed, **(model.tiny if tiny else model.options))
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(batch))
    kind, *options = job.mode.split(", ")
    compute = "bfloat16" if "bfloat16" in options else "float32"
    if kind == "plain":
        grad = jfl.grad(task.loss, compute=compute)
    else:
        grad = jfl.private_grad(task.loss, chain, compute=compute)
    batches = jfl.batches.without_replacement(batch)
    alg = jfl.algorithms.fedavg(grad, lr=0.01, steps=steps, batch=batches)
    return of_plan(jfl.plan(fed, task, alg, jfl.sampling.full(clients)))


def program(job: Job, tiny: bool = False) -> tuple[Callable, dict]:
    """Return the program of a job, and what was measured while it was made."""
    if job.workload in MODELS:
        return of_model(job, tiny)
    if job.workload == "W4":
        return of_sweep()
    if job.workload == "W6":
        return of_plan(sixth())
    if job.mode == "wavelet":
        return of_wavelets()
    return of_peer(job)


# --- compiling in several processes


def record_of(job: Job, folder: Path) -> Path:
    """Return the file for the seconds that a process took to compile a job."""
    return folder / f"{job.workload}, {job.tool}, {job.mode}.json"


def compile_into(job: Job, folder: Path, tiny: bool) -> dict:
    """Compile a job, store the program and the seconds in a folder, and return the seconds."""
    jfl.keep_compiled_programs(folder)
    _, measured = program(job, tiny)
    record_of(job, folder).write_text(json.dumps(measured))
    return measured


def compile_all(jobs: list[Job], folder: Path, processes: int, tiny: bool, deadline: float) -> int:
    """Compile jobs, each in a separate process, and return how many failed.

    After the deadline no further job is started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Each process would otherwise reserve three quarters of the memory of a GPU.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    waiting, running, failed = list(jobs), {}, 0
    with concurrent.futures.ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        while waiting or running:
            while waiting and len(running) < processes and time.monotonic() < deadline:
                job = waiting.pop(0)
                running[pool.submit(compile_into, job, folder, tiny)] = job
            if not running:
                print(f"no time is left to compile {waiting}", flush=True)
                break
            done, _ = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
            for future in done:
                job, error = running.pop(future), future.exception()
                failed += error is not None
                result = f"{type(error).__name__}: {str(error)[:500]}" if error else future.result()
                print(job, result, flush=True)
    return failed


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
    name = lambda row: [row.get(k, "") for k in ("workload", "tool", "mode", "device")]
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [other for other in old if name(other) != name(row)] + [row]
    about = dict(rows="random, of the shapes of the workload", seconds="of a round")
    lines = ",\n  ".join(json.dumps(row) for row in sorted(rows, key=name))
    path.write_text(f'{{\n "about": {json.dumps(about)},\n "rows": [\n  {lines}\n ]\n}}\n')


def measure(job: Job, cache: Path | None, tiny: bool) -> dict:
    """Return the seconds of a job, to compile and of a round.

    If another process compiled the job, `compile_seconds` and its like are those of that process,
    and `cached_seconds` is what this process took to load the program.
    """
    begun = time.perf_counter()
    play, measured = program(job, tiny)
    if cache is not None and record_of(job, cache).exists():
        measured["cached_seconds"] = time.perf_counter() - begun
        measured |= json.loads(record_of(job, cache).read_text())
    return measured | seconds_per_round(play)


def main() -> int:
    parser = timing.parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", help="default: all")
    parser.add_argument("--modes", nargs="+", metavar="MODE", help="default: all")
    parser.add_argument("--minutes", type=float, default=10.0, help="no row starts after these")
    parser.add_argument("--cache", type=Path, help="a folder for compiled programs")
    parser.add_argument("--compile-only", type=int, metavar="PROCESSES", help="fill --cache")
    parser.add_argument("--tiny", action="store_true", help="small models, to try this script")
    parser.add_argument("--list", action="store_true", help="print the rows, the first one first")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    begun, failed = time.monotonic(), False
    chosen = [
        job
        for job in jobs()
        if (not args.only or job.workload in args.only)
        and (not args.modes or job.mode in args.modes)
    ]
    if args.list:
        print(*chosen, sep="\n")
        return 0
    if args.compile_only:
        if args.cache is None:
            parser.error("--compile-only needs --cache")
        deadline = begun + 60 * args.minutes
        return int(compile_all(chosen, args.cache, args.compile_only, args.tiny, deadline) > 0)
    if args.cache is not None:
        jfl.keep_compiled_programs(args.cache)
    for job in chosen:
        if time.monotonic() - begun > 60 * args.minutes:
            print(f"{job}: skipped, because no time is left", flush=True)
            continue
        row = dataclasses.asdict(job) | dict(device=jax.devices()[0].device_kind)
        row |= dict(commit=timing.commit(), versions=environment())
        try:
            row |= measure(job, args.cache, args.tiny)
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
