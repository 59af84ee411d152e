"""Time a round: jfl's variants, a sweep, DP-SCAFFOLD and scaling, and peers on the same workloads.

    JFL_DATA_DIR=... python -m experiments.bench.round [--only W1 W2 ...] [--peers --python
    fedjax=PATH torch=PATH jax=PATH]

W1       record-level DP-FedAvg, softmax regression, cohort 10, 5 steps, batch 10 (real MNIST, 100
         clients with 600 rows)
W2       the same with MLP 784-200-10, cohort 20, 50 steps, batch 20
W3       client-level DP-FedAvg, CNN of 206,922 parameters, cohort 50, one epoch of 12 steps, batch
         50
W4       a sweep: W1 at 8 noise multipliers and 8 seeds, 20 rounds, against 64 sequential runs
W5       the shape of pfl-research's CIFAR-10 benchmark (random pixels): 1,000 clients with 50 rows,
         cohort 50, 5 steps of 10
W6       DP-SCAFFOLD on the synthetic problem of Noble et al.: 100 clients with 4,000 rows, cohort
         20, 50 steps, batch 800
scaling  W1 with random rows: cohort, clients, parameters and local steps, one at a time

Variants of a workload run alternately in one process, so that a busy machine slows all equally;
`ratio` is to "private". Every variant and every peer also has a separate process, for its peak
memory (from the warm-up on) and `first`, its first round with compilation or start-up. Rows are
medians. Peers without their packages are named and skipped; see peers/README.md. A row in --out is
replaced when it is timed again.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jfl

from . import timing

PEERS = pathlib.Path(__file__).parent / "peers"
sys.path.insert(0, str(PEERS))

import jfl_peer  # noqa: E402  (peers is a folder of scripts)
import vmapped_peer  # noqa: E402, F401  (for .device)
import workloads  # noqa: E402

OWN = dict(record=("private", "threefry", "vmap", "clipped", "plain"), client=("private", "plain"))
ROUNDS = dict(W1=20)  # rounds in a timed block, where not 1
# driver, environment, modes; a driver says itself which workloads it can do
TOOLS = (
    ("fedjax_peer", "fedjax", dict(record=("jit", "control"), client=("jit",))),
    ("opacus_peer", "torch", dict(record=("hooks", "ghost"), client=("plain",))),
    ("pfl_peer", "torch", dict(record=("vmap", "ghost"), client=("central",))),
    ("flower_peer", "torch", dict(record=("hooks", "ghost"), client=("client",))),
    ("optax_peer", "jax", dict(record=("optax", "jax_privacy"), client=())),
    ("vmapped_peer", "jax", dict(record=("private", "plain"), client=("private", "plain"))),
)
# CPU seconds per round of the code published with Noble et al., on a similar machine.
PUBLISHED_W6 = 39.0


def data(workload, folder) -> pathlib.Path:
    """Return the .npz that every tool reads."""
    path = folder / ("random.npz" if workload == "W5" else "mnist.npz")
    if not path.exists() and workload == "W5":
        rng = np.random.default_rng(0)
        np.savez(
            path,
            x=rng.normal(size=(50_000, 32, 32, 3)).astype(np.float32),
            y=rng.integers(0, 10, 50_000).astype(np.int32),
            index=rng.permutation(50_000).reshape(1000, 50),
        )
    elif not path.exists():
        fed = jfl.federate(jfl.datasets.mnist(), jfl.partition.iid(100))
        np.savez(
            path,
            x=np.asarray(fed.x).reshape(len(fed.x), -1),
            y=np.asarray(fed.y),
            index=np.asarray(fed.index),
        )
    return path


def machine():
    """Return FLOP/s of a large matrix product and bytes/s of a large copy on this device."""
    a, held = jnp.ones((2048, 2048)), [jnp.ones(2**25)]
    product = jax.jit(jnp.matmul)
    copy = jax.jit(jnp.negative, donate_argnums=0)  # in place: no new pages
    runs = dict(
        product=lambda: product(a, a).block_until_ready(),
        copy=lambda: held.append(copy(held.pop()).block_until_ready()),
    )
    found = timing.alternate(runs, 5)
    seconds = {name: one["seconds"] for name, one in found.items()}
    return 2 * 2048**3 / seconds["product"], 2 * held[0].nbytes / seconds["copy"]


def floor(spec, flops, bandwidth):
    """Return the least seconds of a round on a device.

    They cover its products, and one read and write of every client's model and rows per step.
    Noise, gradients and activations are counted as if they never left the chip.
    """
    examples = spec.cohort * spec.steps * spec.batch
    features = np.prod(getattr(spec, "image", 784))
    moved = 4 * (2 * spec.cohort * spec.steps * spec.parameters + examples * features)
    return float(max(6 * spec.products * examples / flops, moved / bandwidth))


def variants(workload, path, repeats):
    """Time jfl's variants of a workload in this process."""
    spec = SimpleNamespace(**workloads.WORKLOADS[workload])
    block, runs = ROUNDS.get(workload, 1), {}
    for mode in OWN[spec.level]:
        run, _ = jfl_peer.build(
            SimpleNamespace(**vars(spec), block=block), workloads.load(path), mode
        )
        runs[mode] = lambda run=run: run(1 + block, lambda wait: wait())
    found = timing.alternate(runs, repeats)
    flops, bandwidth = machine()
    least = floor(spec, flops, bandwidth)
    for mode, one in found.items():
        wall, cpu = (one[k] / (1 + block) for k in ("seconds", "cpu_seconds"))  # of one round
        yield dict(
            workload=workload,
            tool="jfl",
            mode=mode,
            seconds=wall,
            cpu_seconds=cpu,
            ratio=one["ratio"],  # to "private", the first
            floor=least,
            over_floor=wall / least,
            gflops=flops / 1e9,
            gbytes=bandwidth / 1e9,
            repeats=repeats,
            one_process=True,
        )


def alone(workload, script, python, mode, path, repeats):
    """Time one tool in a separate process."""
    rounds = ROUNDS.get(workload, 1)
    flags = dict(workload=workload, data=path, rounds=rounds, repeats=repeats, mode=mode)
    command = [python, f"{script}.py", *(w for k, v in flags.items() for w in (f"--{k}", str(v)))]
    done = subprocess.run(command, cwd=PEERS, capture_output=True, text=True, timeout=1800)
    try:
        said = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        why = f"exit code {done.returncode}: {last}"
        tool = script.removesuffix("_peer")
        return dict(tool=tool, mode=mode, workload=workload, skipped=why)
    if "skipped" in said:
        return said
    medians = {k: statistics.median(said[k]) for k in ("seconds", "cpu_seconds")}
    return said | medians | dict(repeats=repeats)


def sweep(path, repeats):
    """Time W4 and 64 times W1."""
    spec = SimpleNamespace(**workloads.WORKLOADS["W1"])
    fed = jfl_peer.federation(workloads.load(path))

    def plan(noise):
        return jfl_peer.make(
            SimpleNamespace(**vars(spec) | dict(noise=float(noise))), fed, "private"
        )

    noises, rounds = np.linspace(0.5, 4.0, 8), 20
    many = lambda: jfl.sweep(
        plan, noise=list(noises), seed=range(8), rounds=rounds, evaluate_every=rounds
    )
    one = lambda: jax.block_until_ready(
        jfl.simulate(jax.random.key(0), plan(1.0), rounds, evaluate_every=rounds)
    )
    begun = time.perf_counter()
    many()
    first = time.perf_counter() - begun
    found = timing.alternate(dict(many=many, one=one), repeats)
    yield dict(
        workload="W4",
        tool="jfl",
        mode="private",
        seconds=found["many"]["seconds"],
        cpu_seconds=found["many"]["cpu_seconds"],
        first=first,
        of_64_runs=found["many"]["seconds"] / (64 * found["one"]["seconds"]),
        repeats=repeats,
        rounds=rounds,
        peak_mib=workloads.peak_mib(),
    )


def sixth() -> jfl.Plan:
    """Return the plan of W6."""
    fed = jfl.federate(jfl.datasets.synthetic(0.0, 0.0), jfl.partition.natural())
    task = jfl.models.logistic(fed)
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(60.0), jfl.divide(800))
    alg = jfl.algorithms.scaffold(
        jfl.private_grad(task.loss, chain),
        lr=0.01,
        steps=50,
        batch=jfl.batches.without_replacement(800),
    )
    return jfl.plan(fed, task, alg, jfl.sampling.without_replacement(100, 20))


def scaffold(repeats):
    """Time W6, and compare with the CPU seconds of the published code."""
    row: dict[str, Any] = timed(sixth(), 1, repeats)
    share = PUBLISHED_W6 / row["cpu_seconds"]
    yield dict(workload="W6", mode="private", published_over_ours_cpu=share) | row


def timed(plan, rounds, repeats):
    """Return seconds per round of a plan, those of its first round, and the peak memory."""
    workloads.forget_peak()
    play, state = jfl_peer.program(plan), jfl.init(jax.random.key(0), plan)
    run = lambda n: jax.block_until_ready(play(jax.tree.map(jnp.copy, state), plan, n))
    begun = time.perf_counter()
    run(1)
    first = time.perf_counter() - begun
    found = timing.alternate(dict(run=lambda: run(rounds)), repeats)["run"]
    each = {k: found[k] / rounds for k in ("seconds", "cpu_seconds")}
    return dict(tool="jfl", first=first, repeats=repeats, peak_mib=workloads.peak_mib()) | each


SCALES = dict(
    cohort=(10, 100, 1000), clients=(100, 10_000, 100_000), hidden=(0, 200, 800), steps=(5, 50, 500)
)


def scaled(axis, value, repeats):
    """Time W1 with one number changed; rows are random, 20 per client."""
    spec = SimpleNamespace(**workloads.WORKLOADS["W1"] | dict(clients=1000, rows=20))
    setattr(spec, axis, value if axis != "hidden" else (value,) * (value > 0))
    rng = np.random.default_rng(0)
    features = 784 if axis != "clients" else 50  # 100,000 clients of 784 features would be 6 GB
    x = rng.normal(size=(spec.clients, spec.rows, features)).astype(np.float32)
    data = SimpleNamespace(x=x, y=rng.integers(0, 10, x.shape[:2]).astype(np.int32))
    plan = jfl_peer.make(spec, jfl_peer.federation(data), "private")
    del x, data
    rounds = 10 if value * (axis in ("cohort", "steps")) < 300 else 2
    yield dict(workload="scaling", mode=f"{axis}={value}") | timed(plan, rounds, repeats)


def child(words, path, repeats):
    """Do the part of the work of this process, and print one row of JSON per result."""
    kind, *rest = words
    rows = dict(
        variants=lambda w: variants(w, path, repeats),
        W4=lambda: sweep(path, repeats),
        W6=lambda: scaffold(repeats),
        scaling=lambda a, v: scaled(a, int(v), repeats),
    )[kind](*rest)
    for row in rows:
        print("row " + json.dumps(row), flush=True)


def apart(words, path, repeats):
    """Run `child` in a separate process."""
    command = [sys.executable, "-m", "experiments.bench.round", "--repeats", str(repeats)]
    command += ["--data", str(path), "--child", *words]
    done = subprocess.run(command, cwd=timing.ROOT, capture_output=True, text=True)
    if done.returncode:
        yield dict(
            workload=words[-1],
            tool="jfl",
            mode=words[0],
            skipped=(done.stderr.strip() or "?").splitlines()[-1],
        )
    yield from (
        json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("row ")
    )


def jobs(args, folder):
    """Yield every row as it arrives."""
    for workload in args.only:
        few = args.repeats if workload in ("W1", "W4", "W6") else max(3, args.repeats // 2)
        if workload == "scaling":
            for axis, values in SCALES.items():
                for value in values:
                    yield from apart(["scaling", axis, str(value)], folder / "none", 3)
        elif workload in ("W4", "W6"):
            yield from apart([workload], data(workload, folder), few)
        else:
            level, path = workloads.WORKLOADS[workload]["level"], data(workload, folder)
            yield from apart(["variants", workload], path, few)
            for mode in OWN[level]:
                yield alone(workload, "jfl_peer", sys.executable, mode, path, few)
            for script, environment, modes in TOOLS if args.peers else ():
                for mode in modes[level]:
                    yield alone(
                        workload,
                        script,
                        args.python.get(environment, sys.executable),
                        mode,
                        path,
                        few,
                    )


def main():
    parser = timing.parser(__doc__)
    known = [*workloads.WORKLOADS, "W4", "W6", "scaling"]
    parser.add_argument("--out", type=pathlib.Path, default=timing.RESULTS / "round.json")
    parser.add_argument(
        "--repeats", type=int, default=7, help="timed blocks; about half as many for slow workloads"
    )
    parser.add_argument("--only", nargs="+", default=[], choices=known, metavar="WORKLOAD")
    parser.add_argument("--peers", action="store_true", help="time the peers too")
    parser.add_argument(
        "--python", nargs="+", default=[], metavar="ENVIRONMENT=PATH", help="fedjax, torch, jax"
    )
    parser.add_argument("--data", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.child, args.data, args.repeats)
    args.only = args.only or sorted(known)
    args.python = dict(pair.split("=", 1) for pair in args.python)
    with tempfile.TemporaryDirectory() as folder:
        for row in jobs(args, pathlib.Path(folder)):
            save(args.out, row | {k: timing.machine()[k] for k in ("commit", "load")})
            print(
                "  ".join(f"{row.get(k) or '':<10}" for k in ("workload", "tool", "mode"))
                + "  "
                + (
                    f"skipped: {row['skipped']}"
                    if "skipped" in row
                    else "  ".join(f"{k} {row[k]:.4g}" for k in row if isinstance(row[k], float))
                ),
                flush=True,
            )


def save(out, row):
    """Add a row, or replace an older one; finished rows are kept if the rest is stopped."""
    same = lambda row: (row["workload"], row["tool"], row["mode"], bool(row.get("one_process")))
    old = json.loads(out.read_text())["rows"] if out.exists() else []
    timing.save(out, [r for r in old if same(r) != same(row)] + [row])


if __name__ == "__main__":
    sys.exit(main())
