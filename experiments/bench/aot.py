"""What a round would do on an accelerator that is not here: its program is compiled, not run.

    python -m experiments.bench.aot                                  # W1 private, H200 and v5e
    python -m experiments.bench.aot --workload W2 --mode private plain --target v5e h200
    python -m experiments.bench.aot --mode private+wavelet --devices 8 --set cohort=64
    python -m experiments.bench.aot --points 64                      # a sweep as one program
    python -m experiments.bench.aot --list                           # targets, workloads, modes

It needs the compilers, no accelerator: `pip install -e ".[aot]"`, where jax-cuda12-plugin and
jax-cuda12-pjrt have to be of jax's own version.  What is counted, and how far to trust it, is said
in ahead_of_time/counts.py.  GPU programs are compiled without a device, so nothing is autotuned:
other kernels may be chosen for products there, at about the same number of launches.

A row in experiments/results/aot.json is one program; it is replaced when it is compiled again.  Its
`shapes` is a hash of the workload: numbers of different hashes are not of the same work.  Loops
whose turns the compiler does not know have to be told (`--turns NAME=MEAN`, or NAME=MEAN:CAPACITY,
with which both are reported); without them the command names them and exits with 1.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import jax

from .ahead_of_time import counts, machines, report, workloads

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results" / "aot.json"
SAME = ("workload", "mode", "algorithm", "target", "set", "devices", "points")
SPREAD = (
    dict(noise=1.0, lr=0.1),
    dict(noise=2.0, lr=0.2),
)  # between which the points of a sweep lie


def commit() -> str:
    """Of this checkout, with a + where it has changes."""
    said = lambda *words: subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    changed = said("status", "--porcelain", "--untracked-files=no", "--", "jfl", "kernels")
    return said("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def turns_of(text: str) -> tuple[str, counts.Turns]:
    """NAME=MEAN or NAME=MEAN:CAPACITY.

    >>> turns_of("chunks=3:8")
    ('chunks', Turns(mean=3.0, capacity=8.0))
    """
    name, _, numbers = text.partition("=")
    try:
        mean, *capacity = map(float, numbers.split(":"))
        (most,) = capacity or [mean]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"need NAME=MEAN or NAME=MEAN:CAPACITY; got {text}"
        ) from None
    if not name or not 0 <= mean <= most:
        raise argparse.ArgumentTypeError(f"need a name and 0 <= MEAN <= CAPACITY; got {text}")
    return name, counts.Turns(mean, most)


def number_of(text: str) -> tuple:
    """NAME=NUMBER, the number as JSON."""
    name, _, number = text.partition("=")
    try:
        return name, json.loads(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"need NAME=NUMBER; got {text}") from None


def options(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", nargs="+", default=["h200", "v5e"], choices=list(machines.TARGETS)
    )
    parser.add_argument("--workload", nargs="+", default=["W1"], choices=workloads.names())
    parser.add_argument(
        "--mode", nargs="+", default=["private"], help="of --list; several at once: a+b"
    )
    parser.add_argument("--algorithm", default="fedavg", choices=workloads.ALGORITHMS)
    parser.add_argument("--points", type=int, default=0, help="a sweep of so many points")
    parser.add_argument("--devices", type=int, default=1, help="that share a cohort, or the points")
    parser.add_argument(
        "--set", nargs="+", default=[], type=number_of, metavar="NAME=NUMBER", help="cohort=64, ..."
    )
    parser.add_argument(
        "--turns", nargs="+", default=[], type=turns_of, metavar="NAME=MEAN[:CAPACITY]"
    )
    parser.add_argument("--launches", type=int, default=0, help="of a local step, to list")
    parser.add_argument("--text", type=pathlib.Path, help="a file for the compiled program")
    parser.add_argument(
        "--out", type=pathlib.Path, default=RESULTS, help="a JSON file for the rows"
    )
    parser.add_argument("--list", action="store_true", help="targets, workloads, modes")
    return parser.parse_args(arguments)


def listed() -> str:
    """What can be named."""
    lines = [f"{t.name:<14} {t.platform}, {t.bandwidth:.3g} B/s" for t in machines.TARGETS.values()]
    lines += [f"{name:<14} shapes {workloads.workload(name).hash()}" for name in workloads.names()]
    lines += [f"{name:<14} {about}" for name, about in workloads.MODES.items()]
    return "\n".join(lines)


def compile_one(args, name: str, mode: str, target: str) -> dict:
    """Compile and print one program -> its row."""
    make = lambda **change: workloads.workload(
        name, mode.split("+"), args.algorithm, **dict(args.set) | change
    )
    with report.as_on(target):
        made, turns = make(), dict(args.turns)
        plans = [make(**numbers).plan for numbers in SPREAD] if args.points else []
    about = dict(
        workload=name,
        mode=mode,
        algorithm=args.algorithm,
        set=dict(args.set),
        devices=args.devices,
        points=args.points,
        shapes=made.hash(),
    )
    print(" ".join(f"{k}={v}" for k, v in about.items() if v), flush=True)
    if args.points:
        found = report.grid(plans, target, points=args.points, devices=args.devices, turns=turns)
    else:
        found = report.run(made.plan, target, devices=args.devices, turns=turns)
    print(report.shown(found, args.launches), flush=True)
    if args.text:
        args.text.write_text(found.text)
    rest = dict(
        cohort=made.cohort(),
        steps=found.steps,
        turns={name: told._asdict() for name, told in found.turns.items()},
        commit=commit(),
        versions=machines.versions(),
    )
    return about | found.row() | rest


def save(out: pathlib.Path, row: dict):
    """Add a row, or put it in the place of an older one."""
    old = json.loads(out.read_text())["rows"] if out.exists() else []
    same = lambda one: [one[key] for key in SAME]
    rows = [one for one in old if same(one) != same(row)] + [row]
    rows.sort(key=lambda one: json.dumps(same(one)))
    about = "counted in programs that were compiled for a machine, not run; see docs/speed.md"
    out.write_text(json.dumps(dict(about=about, rows=rows), indent=1) + "\n")


def main(arguments=None) -> int:
    args = options(arguments)
    # whatever accelerator is here is not the one that is asked for
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # seconds are those of a compiler
    if args.list:
        print(listed())
        return 0
    failed = 0
    jobs = [(w, m, t) for w in args.workload for m in args.mode for t in args.target]
    for name, mode, target in jobs:
        try:
            save(args.out, compile_one(args, name, mode, target))
        except (ValueError, machines.MissingCompiler, jax.errors.JaxRuntimeError) as error:
            print(f"{name} {mode} {target}: {str(error)[:1500]}", file=sys.stderr, flush=True)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
