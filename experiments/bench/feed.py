"""Time how fast a cohort's rows are read from the system's cache.

    python -m experiments.bench.feed            # 2 CPU cores, half a minute, 0.5 GB of disk

Rows are written to a temporary folder and mapped from there; each row is a median over cohorts.
"""

import statistics
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jfl
from jfl.data import host_rows

from . import timing

RESULTS = timing.RESULTS / "feed.json"
CLIENTS, COHORT = 4000, 1000
# rows of the largest client, numbers a row, their type, clients of different size, rows shuffled
CASES = (
    ("rows of 32 numbers", 20, 32, "float32", False, False),
    ("the same, clients of 10 to 20 rows", 20, 32, "float32", True, False),
    ("rows of 784 numbers", 20, 784, "float32", False, False),
    ("784 numbers, clients of 10 to 20 rows", 20, 784, "float32", True, False),
    ("784 numbers, a client's rows apart", 20, 784, "float32", False, True),
    ("pixels as bytes, prepared on the device", 20, 3072, "uint8", False, False),
)


def population(folder: Path, most, features, kind, ragged, shuffled):
    """Return clients whose rows are in a file."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(most // 2, most + 1, CLIENTS) if ragged else np.full(CLIENTS, most)
    n = int(sizes.sum())
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", kind, (n, features))
    for first in range(0, n, 4096):
        x[first : first + 4096] = rng.integers(0, 256, (min(4096, n - first), features))
    y = rng.integers(0, 10, n).astype(np.int32)
    prepare_row = (lambda row: row / jnp.float32(255)) if kind == "uint8" else None
    test = (np.asarray(x[:10], np.float32), y[:10])
    order = rng.permutation(n) if shuffled else None
    x = np.load(folder / "x.npy", mmap_mode="r")
    return jfl.population((x, y), sizes, order=order, test=test, prepare_row=prepare_row)


def measured(fed, repeats: int) -> dict:
    """Return the size of a cohort, and the median of the seconds in which it is read."""
    rng, seconds = np.random.default_rng(1), []
    for _ in range(repeats):
        ids = rng.choice(CLIENTS, COHORT, replace=False)
        begun = time.perf_counter()
        rows = fed.host.fetch(ids)
        seconds.append(time.perf_counter() - begun)
    size, median = sum(v.nbytes for v in rows), statistics.median(seconds)
    return dict(bytes=size, seconds=median, bytes_a_second=size / median)


def main():
    args = timing.arguments(__doc__, RESULTS, repeats=15)
    rows = []
    for name, *case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(dict(case=name, **measured(population(Path(folder), *case), args.repeats)))
        row = rows[-1]
        speed = f"{row['bytes'] / 1e6:6.1f} MB {row['bytes_a_second'] / 1e9:6.2f} GB/s"
        print(f"{name:42} {speed}", flush=True)
    about = dict(clients=CLIENTS, cohort=COHORT, turns=args.repeats, readers=host_rows.NUM_THREADS)
    timing.save(args.out, rows, **about)


if __name__ == "__main__":
    main()
