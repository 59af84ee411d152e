"""Lines a user writes for five tasks in four tools: counted, and every program run.

    python -m experiments.bench.lines [--python pfl=PATH flower=PATH fedjax=PATH] [--out FILE]

Without --python it prints the table and writes nothing.  jfl's programs run in this interpreter,
the others in those that are given; a tool without one is recorded as not run.  A program that has
run and has not changed since is not run again, but by --again.  README.md says what the tasks are,
and what environments the tools need.
"""

import argparse
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys

from experiments.bench.lines import counting
from experiments.bench.timing import ROOT, commit

FOLDER = pathlib.Path(__file__).parent
RESULTS = ROOT / "experiments" / "results" / "lines.json"
TASKS = dict(
    own_model="own model",
    own_data="own data",
    own_algorithm="own algorithm",
    text="text",
    lora="LoRA",
)
TOOLS = dict(jfl="jfl", flower="Flower", pfl="pfl", fedjax="FedJAX + optax")
PACKAGES = dict(
    jfl=("jax", "flax", "optax"),
    flower=("flwr", "flwr-datasets", "ray", "torch", "peft", "dp-accounting"),
    pfl=("pfl", "torch", "peft", "dp-accounting"),
    fedjax=("fedjax", "jax", "dm-haiku", "optax", "dp-accounting"),
)
LIMIT = 3600  # seconds of a program
VERSIONS = """
import importlib.metadata, json, platform, sys
print(json.dumps(dict(python=platform.python_version()) | {
    name: importlib.metadata.version(name) for name in sys.argv[1:]}))
"""


def program(task: str, tool: str) -> pathlib.Path:
    return FOLDER / f"{task}_{tool}.py"


def counted() -> list[dict]:
    """A row for each program: task, tool, a checksum of both its files, lines, lines for privacy,
    tokens."""
    rows, shared = [], (FOLDER / "tasks.py").read_bytes()
    for task in TASKS:
        for tool in TOOLS:
            source = program(task, tool).read_text()
            checksum = hashlib.sha256(shared + source.encode()).hexdigest()[:12]
            rows.append(dict(task=task, tool=tool, checksum=checksum) | counting.count(source))
    return rows


def run(python: str, path: pathlib.Path) -> dict:
    """What a program printed, or why it did not."""
    settings = dict(
        OMP_NUM_THREADS="1",  # else threads of PyTorch wait for each other on a busy machine
        FLWR_TELEMETRY_ENABLED="0",
        RAY_USAGE_STATS_ENABLED="0",
        PYTHONPATH=str(ROOT),
    )
    try:
        process = subprocess.Popen(
            [python, "-W", "ignore", path],
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # what Ray starts ends with the program
        )
    except OSError as error:
        return dict(ran=False, why=str(error))
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return dict(ran=False, why=f"longer than {LIMIT} seconds")
    last = (out.strip().splitlines() or [""])[-1]
    if process.returncode == 0 and last.startswith("{"):
        return dict(ran=True, printed=json.loads(last))
    return dict(ran=False, why=(err.strip().splitlines() or ["it printed nothing"])[-1])


def versions(python: str, tool: str) -> dict:
    done = subprocess.run(
        [python, "-c", VERSIONS, *PACKAGES[tool]], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def table(rows: list[dict]) -> str:
    """The table in Markdown: lines, and in brackets those of them for privacy."""
    cell = {(r["task"], r["tool"]): r for r in rows}
    lines = ["| program | " + " | ".join(TOOLS.values()) + " |", "|---" * (1 + len(TOOLS)) + "|"]
    for task, name in TASKS.items():
        cells = [cell[task, tool] for tool in TOOLS]
        told = [
            f"{r['lines']} ({r['privacy']})" + ("" if r.get("ran", True) else ", not run")
            for r in cells
        ]
        lines.append(f"| {name} | " + " | ".join(told) + " |")
    return "\n".join(lines)


def not_as_laid_out(rows: list[dict]) -> list[str]:
    """Programs whose lines depend on how their author laid them out."""
    of = lambda r: program(r["task"], r["tool"])
    again = lambda r: counting.count(counting.laid_out(of(r).read_text()))["lines"]
    return [of(r).name for r in rows if again(r) != r["lines"]]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", nargs="*", default=None, metavar="TOOL=PATH")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    rows = counted()
    if args.python is None:
        print(table(rows))
        return
    if bad := not_as_laid_out(rows):
        raise SystemExit(f"not as ruff lays them out: {', '.join(bad)}")
    pythons = dict(jfl=sys.executable) | dict(p.split("=", 1) for p in args.python)
    about = dict(
        rule=f"lines of code as ruff format lays them out at width {counting.WIDTH}, without "
        "imports, docstrings, comments, blank lines, and without tasks.py, which all share",
        versions={tool: versions(python, tool) for tool, python in pythons.items()},
        commit=commit(),
    )
    kept = {} if args.again or not args.out.exists() else earlier(args.out)
    for row in rows:
        python = pythons.get(row["tool"])
        if row["checksum"] in kept:
            row |= kept[row["checksum"]]
        elif python is None:
            row |= dict(ran=False, why="no interpreter given")
        else:
            row |= run(python, program(row["task"], row["tool"]))
        print(row, flush=True)
        args.out.write_text(json.dumps(dict(about=about, rows=rows), indent=1) + "\n")
    print(table(rows))


def earlier(path: pathlib.Path) -> dict:
    """What programs printed, by checksum."""
    keys = ("ran", "printed")
    found = json.loads(path.read_text())["rows"]
    return {r["checksum"]: {k: r[k] for k in keys} for r in found if r.get("ran")}


if __name__ == "__main__":
    main()
