"""Time large populations on disk, and devices that share a cohort.

    python -m experiments.bench.scale --out experiments/results/scale.json

Each population runs in a separate process, whose resident memory is measured; rows are written to
a temporary folder (2.6 GB for a million clients of 20 rows).  Times are medians of rounds after
the first ones.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import jfl

from . import timing

ROWS, FEATURES, CLASSES, COHORT = 20, 32, 10, 1000
CLIENTS = (10**4, 10**5, 10**6)
BLOCK = 2**16


def plan(fed, cohort=COHORT, name="fedavg", sampler=None, chunk=None, steps=5, batch=10):
    """Return a plan of record-level DP: softmax regression, `steps` steps of `batch` rows."""
    task = jfl.models.logistic(fed)
    grad = jfl.private_grad(
        task.loss, jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(batch))
    )
    algorithm = getattr(jfl.algorithms, name)(
        grad, lr=0.3, steps=steps, batch=jfl.batches.without_replacement(batch)
    )
    clients = len(fed.size)
    sampler = (
        jfl.sampling.poisson(clients, cohort / clients)
        if sampler == "poisson"
        else jfl.sampling.without_replacement(clients, cohort)
    )
    return jfl.plan(fed, task, algorithm, sampler, chunk=chunk)


def rows_on_disk(folder: Path, clients: int):
    """Return x and y of `clients` x ROWS rows in .npy files, a block at a time."""
    rng, n = np.random.default_rng(0), clients * ROWS
    centre = rng.normal(size=(CLASSES, FEATURES)).astype(np.float32)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (n, FEATURES))
    y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.int32, (n,))
    for first in range(0, n, BLOCK):
        label = rng.integers(0, CLASSES, min(BLOCK, n - first)).astype(np.int32)
        y[first : first + BLOCK] = label
        x[first : first + BLOCK] = centre[label] + 2 * rng.standard_normal(
            (len(label), FEATURES), np.float32
        )
    test = rng.integers(0, CLASSES, 2000).astype(np.int32)
    np.savez(
        folder / "test.npz",
        x=centre[test] + 2 * rng.standard_normal((2000, FEATURES), np.float32),
        y=test,
    )


def peak() -> float:
    """Return the peak of this program's resident memory, in GiB.

    `ru_maxrss` would include the peak of the parent process.
    """
    found = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return int(found[0].split()[1]) / 2**20


def population(folder: str, clients: int, name: str, sampler: str, rounds: int) -> dict:
    """Run one population in this process, and return its row."""
    begun = time.perf_counter()
    test = np.load(f"{folder}/test.npz")
    fed = jfl.population(
        tuple(np.load(f"{folder}/{name}.npy", mmap_mode="r") for name in "xy"),
        np.full(clients, ROWS),
        test=(test["x"], test["y"]),
        classes=CLASSES,
    )
    looked = time.perf_counter() - begun
    what = plan(fed, name=name, sampler=sampler)
    run = jfl.simulate(jax.random.key(0), what, 2, evaluate_every=2).run
    times = []
    for _ in range(rounds // 5):
        begun = time.perf_counter()
        out = jfl.simulate(jax.random.key(0), what, 5, evaluate_every=5, start=run)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begun) / 5)
        run = out.run
    begun = time.perf_counter()
    guarantee = jfl.guarantee(what, rounds + 2, 1e-5)
    return dict(
        kind="population",
        clients=clients,
        rows=clients * ROWS,
        cohort=COHORT,
        algorithm=name,
        sampler=sampler,
        slots=what.sampler.capacity,
        seconds_a_round=float(np.median(times)),
        peak_GiB=peak(),
        reading_all_rows_once=looked,
        accuracy=float(np.asarray(out.metrics.accuracy)[-1]),
        epsilon=guarantee.epsilon,
        accounting_seconds=time.perf_counter() - begun,
        rounds=len(times) * 5,
    )


def in_memory(clients: int, cohort: int, mesh, steps: int, batch: int, rounds: int = 10) -> dict:
    """Return a round with rows on the device, by cohort and number of devices."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, clients * ROWS).astype(np.int32)
    x = rng.normal(size=(len(y), FEATURES)).astype(np.float32)
    fed = jfl.federate((x, y, x[:100], y[:100]), lambda _: np.arange(len(y)).reshape(clients, ROWS))
    what = plan(fed, cohort, steps=steps, batch=batch)
    times = []
    for _ in range(4):
        begun = time.perf_counter()
        jax.block_until_ready(
            jfl.simulate(jax.random.key(0), what, rounds, evaluate_every=rounds, mesh=mesh)
        )
        times.append((time.perf_counter() - begun) / rounds)
    return dict(
        kind="devices",
        devices=mesh or 1,
        clients=clients,
        cohort=cohort,
        steps=steps,
        batch=batch,
        seconds_a_round=float(np.median(times[1:])),
    )


def child(*args, devices=None):
    env = dict(os.environ)
    if devices:
        env["XLA_FLAGS"] = (
            f"{env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        )
    done = subprocess.run(
        [sys.executable, "-m", "experiments.bench.scale", "--one", json.dumps(args)],
        cwd=timing.ROOT,
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    row = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(row), flush=True)
    return row


def main():
    flags = timing.parser(__doc__)
    flags.add_argument("--out", type=Path, default=timing.RESULTS / "scale.json")
    flags.add_argument("--clients", type=int, nargs="*", default=CLIENTS)
    flags.add_argument("--rounds", type=int, default=30)
    flags.add_argument("--one", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.one:
        kind, *asked = json.loads(args.one)
        print(json.dumps(dict(population=population, devices=in_memory)[kind](*asked)))
        return
    rows = []
    for clients in args.clients:
        with tempfile.TemporaryDirectory() as folder:
            rows_on_disk(Path(folder), clients)
            kinds = [("fedavg", "without_replacement"), ("fedavg", "poisson")]
            kinds += [("scaffold", "without_replacement")] * (clients == max(args.clients))
            rows += [child("population", folder, clients, *kind, args.rounds) for kind in kinds]
    for cohort in (16, 64, 256, 1024):
        rows.append(child("devices", 4096, cohort, None, 5, 10))
    for steps, batch in ((20, 10), (5, 20)):
        rows.append(child("devices", 4096, 256, None, steps, batch))
    for devices in (2, 4, 8):
        rows.append(child("devices", 4096, 256, devices, 5, 10, devices=devices))
    about = dict(features=FEATURES, classes=CLASSES, rows_per_client=ROWS)
    timing.save(args.out, rows, **about)


if __name__ == "__main__":
    main()
