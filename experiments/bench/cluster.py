"""Compare a sweep on a Ray cluster that loses workers with the same sweep in one process.

    python -m experiments.bench.cluster --out experiments/results/cluster.json

The cluster has two machines with one CPU each, both simulated on this one.  While blocks of points
run, a worker process is killed with SIGKILL, and later the raylet of a busy machine, with all that
runs there.  No result may be missing or occur twice, and every number must equal that of the sweep
in one process.
"""

import argparse
import csv
import json
import os
import signal
import tempfile
import time
from pathlib import Path

from jfl.core.files import write
from jfl.runs import record
from jfl.runs.checkpoint import environment
from jfl.runs.config import Config
from jfl.runs.on_ray import Ray
from jfl.runs.sweep import FILE, sweep

CONFIG = Config(cohort=10, noise_multiplier=1.0, rounds=60)
AXES = dict(
    algorithm=["fedavg", "scaffold"], lr=[0.1, 0.2, 0.3], noise_multiplier=[1.0, 2.0], seed=[0, 1]
)
BLOCK = 3


def at_work(raylets) -> dict:
    """Return the processes below these that are computing a block -> the raylet of each."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                command, status = (path / "cmdline").read_text(), (path / "stat").read_text()
            except OSError:  # it has ended
                continue
            parent = int(status.rpartition(")")[2].split()[1])
            if command.startswith("ray::work") and parent in raylets:
                found[int(path.name)] = parent
    return found


def shot(config: Config, axes: dict, block: int, folder: Path) -> dict:
    """Run the sweep in `folder`/ray with two kills; return what was killed when, and the seconds.

    When one machine has ended its first block, a busy process of the other one is killed.  When a
    third of the points are done, the machine that was first is killed, and the other one does the
    rest.
    """
    from ray.cluster_utils import Cluster

    machines = Cluster(
        initialize_head=True, head_node_args=dict(num_cpus=0, include_dashboard=False)
    )
    nodes, kills, seen = [machines.add_node(num_cpus=1) for _ in range(2)], [], dict(completed=0)
    raylets = {n.all_processes["raylet"][0].process.pid: n for n in nodes}

    def watch(**what):
        seen.update(what)
        done = seen["completed"]
        if not done or len(kills) > 1 or (kills and done < seen["total"] / 3):
            return
        first = json.loads((folder / "ray" / FILE).read_text().splitlines()[1])["worker"].partition(
            "/"
        )[0]
        time.sleep(0.5)  # who has just ended a block is in the middle of the next
        for pid, up in at_work(raylets).items():
            if raylets[up].node_id.startswith(first) == bool(kills):
                if kills:
                    machines.remove_node(raylets[up], allow_graceful=False)
                else:
                    os.kill(pid, signal.SIGKILL)
                kills.append(dict(what="machine" if kills else "process", after_points=done))
                return

    begun = time.perf_counter()
    try:
        sweep(config, axes, folder / "ray", engine=Ray(machines.address), block=block, watch=watch)
    finally:
        machines.shutdown()
    return dict(kills=kills, seconds=time.perf_counter() - begun)


def compared(folder: Path) -> dict:
    """Return what is in folder/ray against folder/local."""
    here, there = (
        list(csv.DictReader((folder / name / "metrics.csv").open())) for name in ("local", "ray")
    )
    rows = lambda table: [(r["name"], r["seed"], r["round"]) for r in table]
    numbers = lambda table: [
        float(r[k])
        for r in table
        for k in ("accuracy", "loss", "train_loss", "update_norm")
        if r[k]
    ]
    lines = [json.loads(line) for line in (folder / "ray" / FILE).read_text().splitlines()[1:]]
    keys = [r["key"] for r in lines]
    return dict(
        points=len(json.loads((folder / "local" / "summary.json").read_text())["runs"]),
        lines=len(lines),
        doubled=len(keys) - len(set(keys)),
        same_rows=rows(here) == rows(there),
        same_bits=(folder / "local" / "metrics.csv").read_bytes()
        == (folder / "ray" / "metrics.csv").read_bytes(),
        largest_difference=max(
            abs(a - b) for a, b in zip(numbers(here), numbers(there), strict=True)
        ),
        processes=len({r["worker"] for r in lines}),
        machines=len({r["worker"].partition("/")[0] for r in lines}),
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        folder, begun = Path(folder), time.perf_counter()
        sweep(CONFIG, AXES, folder / "local", block=BLOCK)
        local = time.perf_counter() - begun
        found = dict(local_seconds=local) | shot(CONFIG, AXES, BLOCK, folder) | compared(folder)
    found = dict(about=environment(), block=BLOCK, axes=AXES) | found
    write(args.out, json.dumps(record.plain(found), indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k not in ("about", "axes")}, indent=1))


if __name__ == "__main__":
    main()
