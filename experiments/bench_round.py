"""What clipping and noise cost inside a round: book-keeping against vmap(grad), generators, and no noise; one process.

    JFL_DATA_DIR=... python experiments/bench_round.py

Real MNIST, 100 clients of 600 rows.  W1: softmax regression, cohort 10, 5 steps, batch 10.  W2: MLP 784-200-10, cohort
20, 50 steps, batch 20.  The variants of a workload take turns, so that a busy machine slows all alike; a row is the
median, the ratio is to "private", and `compile` is the first call's time.  `none` clips nothing and adds nothing.
A call is 20 rounds of W1 or one of W2; with noise it also computes, once, the digest of all data that noise keys hold.
"""
import argparse
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import time

import jax

import jfl
from jfl.checkpoint import identity

ROOT = pathlib.Path(__file__).parents[1]
WORKLOADS = dict(W1=dict(hidden=(), cohort=10, steps=5, batch=10, rounds=20), W2=dict(hidden=(200,), cohort=20, steps=50, batch=20, rounds=1))
VARIANTS = dict(private=dict(), threefry=dict(generator="key"), clipped=dict(noise=False), none=dict(clip=False),
                vmap=dict(path="vmap"))


def make(fed, hidden, cohort, steps, batch, path="auto", generator="philox", noise=True, clip=True, **_):
    task = jfl.models.mlp(fed, hidden) if hidden else jfl.models.logistic(fed)
    stages = [jfl.clip_l2(1.0), jfl.total()] + [jfl.gaussian(1.0, generator=generator)] * noise + [jfl.divide(batch)]
    grad = jfl.private_grad(task.loss, jfl.chain(*stages), path=path) if clip else jfl.grad(task.loss)
    alg = jfl.algorithms.fedavg(grad, lr=0.1, steps=steps, batch=jfl.batches.without_replacement(batch))
    return jfl.plan(fed, task, alg, jfl.sampling.without_replacement(100, cohort))


def measure(name, fed, repeats, left_out):
    settings = WORKLOADS[name]
    rounds = settings["rounds"]
    runs, times, first = {}, {}, {}
    for variant, options in VARIANTS.items():
        if variant in left_out:
            continue
        plan = make(fed, **settings, **options)
        state = jfl.start(jax.random.key(0), plan)
        step = jax.jit(lambda run, plan: jfl.scan(run, plan, [rounds])[0])
        begun = time.perf_counter()
        compiled = step.lower(state, plan).compile()
        first[variant] = time.perf_counter() - begun
        runs[variant] = lambda compiled=compiled, state=state, plan=plan: jax.block_until_ready(compiled(state, plan))
        runs[variant]()
        times[variant] = []
    for _ in range(repeats):
        for variant, run in runs.items():
            begun = time.perf_counter()
            run()
            times[variant].append((time.perf_counter() - begun) / rounds)
    middle = {v: statistics.median(t) for v, t in times.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    for variant, t in middle.items():
        yield dict(workload=name, variant=variant, median=t, best=min(times[variant]), ratio=t / middle["private"],
                   compile=first[variant], repeats=repeats, peak_mib=peak)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=str(ROOT / "experiments" / "results" / "round.json"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without", nargs="*", default=(), choices=list(VARIANTS), help="variants to leave out")
    args = parser.parse_args()
    fed = jfl.federate(jfl.datasets.mnist(), jfl.partition.iid(100))
    rows = []
    for name in WORKLOADS:
        for row in measure(name, fed, args.repeats, args.without):
            rows.append(row)
            print(f"{name} {row['variant']:9} {1e3 * row['median']:10.2f} ms a round   {row['ratio']:6.2f} x   "
                  f"compile {row['compile']:5.1f} s   peak so far {row['peak_mib']} MiB", flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    about = dict(versions=identity(), commit=commit, device=jax.devices()[0].device_kind, cpus=os.cpu_count(),
                 machine=platform.machine(), load=os.getloadavg()[0])
    pathlib.Path(args.out).write_text(json.dumps(dict(about=about, rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
