"""Rounds of this checkout, of an earlier revision and of PyTorch, in turns.

    JFL_DATA_DIR=... python -m experiments.bench.in_turns --before REVISION
    python -m experiments.bench.in_turns --workload W3 W5 --torch PYTHON   # its environment: peers/

Each side is a process that stays: it compiles, plays a block of rounds when it is told to, and
sleeps while another side plays.  So a busy machine slows all alike, and only ratios mean anything.
A row is a side of a workload: medians over the turns, `ratio` to this checkout's of the same turn
(its median, and the quartiles), commit and versions.  Workloads and drivers: round.py.

Each side's driver is that of its own revision; rounds follow one another in it, so that later turns
go on training.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from jfl.runs.checkpoint import environment

from . import round as rounds

RESULTS = rounds.ROOT / "experiments" / "results" / "round_in_turns.json"
WORKLOADS = ("W1", "W2", "W3", "W5")
ROUNDS = dict(W1=20)  # in a turn, where not 1
# What runs in a side's own process, in its own folder of drivers.
PLAYER = """
import importlib, json, sys, time
from types import SimpleNamespace
import workloads
driver, workload, mode, block, data = sys.argv[1:]
spec = SimpleNamespace(**workloads.WORKLOADS[workload], block=int(block))
run, _ = importlib.import_module(driver).build(spec, workloads.load(data), mode)
wait = lambda wait=None: wait and wait()
played = 1 + spec.block  # a driver's first round stands alone
begun = time.perf_counter()
run(played, wait)
print(json.dumps(dict(first=time.perf_counter() - begun)), flush=True)
for line in sys.stdin:
    wall, cpu = time.perf_counter(), workloads.cpu_seconds()
    run(played, wait)
    wall, cpu = time.perf_counter() - wall, workloads.cpu_seconds() - cpu
    print(json.dumps(dict(seconds=wall / played, cpu_seconds=cpu / played)), flush=True)
"""


class Side(NamedTuple):
    """Who plays: a name, an interpreter, a checkout, one of its drivers, a mode of it."""

    name: str
    python: str
    checkout: pathlib.Path
    driver: str
    mode: str
    commit: str


class Player:
    """A side's process."""

    def __init__(self, side: Side, workload: str, data: pathlib.Path):
        self.side = side
        command = [side.python, "-c", PLAYER, side.driver, workload, side.mode]
        self.process = subprocess.Popen(
            [*command, str(ROUNDS.get(workload, 1)), str(data)],
            cwd=side.checkout / "experiments" / "bench" / "peers",
            env=for_side(side.checkout),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin and self.process.stdout
        self.says, self.hears = self.process.stdout, self.process.stdin
        self.first = self.heard()["first"]

    def heard(self) -> dict:
        line = self.says.readline()
        if not line:
            raise SystemExit(f"{self.side.name} ended with {self.process.wait()}; see above")
        return json.loads(line)

    def turn(self) -> dict:
        self.hears.write("go\n")
        self.hears.flush()
        return self.heard()

    def close(self):
        self.hears.close()
        self.process.wait()
        self.says.close()


def for_side(checkout: pathlib.Path) -> dict:
    """Of a side: packages of its own checkout before those that are installed."""
    drivers = checkout / "experiments" / "bench" / "peers"
    return dict(os.environ, PYTHONPATH=f"{checkout}{os.pathsep}{drivers}")


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=rounds.ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


@contextlib.contextmanager
def checkout(revision: str) -> Iterator[pathlib.Path]:
    """A folder with that revision, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        there = pathlib.Path(folder) / "before"
        git("worktree", "add", "--detach", str(there), revision)
        try:
            yield there
        finally:
            git("worktree", "remove", "--force", str(there))


def own(name: str, root: pathlib.Path, mode: str, revision: str) -> Side:
    """jfl's side of a checkout."""
    return Side(name, sys.executable, root, "jfl_peer", mode, git("rev-parse", "--short", revision))


def timed(sides: list[Side], workload: str, data: pathlib.Path, repeats: int) -> Iterator[dict]:
    """The rows of a workload.  The first side is what the others' ratios are to."""
    with contextlib.ExitStack() as open_players:
        players = []
        for side in sides:
            players.append(Player(side, workload, data))
            open_players.callback(players[-1].close)
        turns = [[player.turn() for player in players] for _ in range(repeats)]
    for i, player in enumerate(players):
        ratios = [turn[i]["seconds"] / turn[0]["seconds"] for turn in turns]
        low, _, high = statistics.quantiles(ratios, n=4)
        yield dict(
            workload=workload,
            side=player.side.name,
            mode=player.side.mode,
            seconds=statistics.median(turn[i]["seconds"] for turn in turns),
            cpu_seconds=statistics.median(turn[i]["cpu_seconds"] for turn in turns),
            ratio=statistics.median(ratios),
            quartiles=[low, high],
            cpu_ratio=statistics.median(
                turn[i]["cpu_seconds"] / turn[0]["cpu_seconds"] for turn in turns
            ),
            first=player.first,
            turns=repeats,
            commit=player.side.commit,
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--mode", nargs="+", default=["private", "plain"])
    parser.add_argument("--before", metavar="REVISION", help="of this repository")
    parser.add_argument("--torch", metavar="PYTHON", help="interpreter that has PyTorch and Opacus")
    parser.add_argument("--repeats", type=int, default=7, help="turns")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        before = stack.enter_context(checkout(args.before)) if args.before else None
        for workload in args.workload:
            data = rounds.data(workload, folder)
            for mode in args.mode:
                sides = [own("now", rounds.ROOT, mode, "HEAD")]
                if before:
                    sides.append(own("before", before, mode, args.before))
                if args.torch and workload in ("W3", "W5") and mode == "private":
                    torch = ("opacus_peer", "plain", "")
                    sides.append(Side("PyTorch", args.torch, rounds.ROOT, *torch))
                for row in timed(sides, workload, data, args.repeats):
                    print(json.dumps(row), flush=True)
                    save(args.out, row)


def save(out: pathlib.Path, row: dict):
    """Add a row, or put it in the place of an older one."""
    kept = json.loads(out.read_text()) if out.exists() else dict(rows=[])
    same = lambda one: (one["workload"], one["mode"], one["side"])
    rows = [one for one in kept["rows"] if same(one) != same(row)] + [row]
    about = "medians of turns; ratios are to this checkout in the same turn; see docs/speed.md"
    versions = dict(environment(), cpus=os.cpu_count())
    told = dict(about=about, versions=versions, rows=sorted(rows, key=same))
    out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
