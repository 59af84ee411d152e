"""Helpers that the benchmarks share: variants timed alternately, and files of results."""

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jfl
from jfl.runs.checkpoint import environment

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"


def parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of a command line, whose help is shown with its line breaks."""
    return argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def arguments(
    about: str | None, out: Path | None, repeats: int, *switches: str
) -> argparse.Namespace:
    """Parse the command line of a benchmark: --repeats, --out and switches.

    Args:
        about: its help.
        out: the default file of results, or None.
        repeats: the default number of timed turns.
        switches: further options without a value, such as "--large".
    """
    flags = parser(about)
    flags.add_argument("--repeats", type=int, default=repeats)
    flags.add_argument("--out", type=Path, default=out)
    for name in switches:
        flags.add_argument(name, action="store_true")
    return flags.parse_args()


def alternate(runs: dict, repeats: int) -> dict:
    """Time functions alternately, so that a busy machine slows all of them equally.

    Args:
        runs: name -> a function without arguments; each is called once before the clock starts.
        repeats: number of turns.

    Returns:
        Name -> the medians of its seconds, of its CPU seconds, and of the ratio of its seconds to
        those of the first function in a turn.
    """
    for run in runs.values():
        run()
    turns = []
    for _ in range(repeats):
        turn = {}
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            turn[name] = time.perf_counter() - wall, time.process_time() - cpu
        turns.append(turn)
    first = next(iter(runs))
    return {
        name: dict(
            seconds=statistics.median(t[name][0] for t in turns),
            cpu_seconds=statistics.median(t[name][1] for t in turns),
            ratio=statistics.median(t[name][0] / t[first][0] for t in turns),
        )
        for name in runs
    }


def two_rounds(plan):
    """Return a function that plays two rounds of a plan, always from the same state."""
    return compile_rounds(plan, 2)[0]


def compile_rounds(plan, rounds: int):
    """Return a function that plays rounds of a plan, and the memory of its program.

    Args:
        plan: the plan; the function always plays from the same state.
        rounds: their number, followed by one evaluation.

    Returns:
        The function, and the temporary bytes of the compiled program.
    """
    fresh, counts = jfl.init(jax.random.key(0), plan), jnp.array([rounds])
    play = jax.jit(lambda run, plan: jfl.scan(run, plan, counts), donate_argnums=0)
    program = play.lower(fresh, plan).compile()
    run = lambda: jax.block_until_ready(program(jax.tree.map(jnp.copy, fresh), plan))
    memory: Any = program.memory_analysis()
    return run, memory.temp_size_in_bytes


def commit() -> str:
    """Return the commit of this checkout, with a + if jfl or kernels have changed since."""

    def git(*words):
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "jfl", "kernels")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def machine() -> dict:
    """Return the commit, and how many CPUs there are and how busy they are."""
    return dict(commit=commit(), cpus=os.cpu_count(), load=os.getloadavg()[0])


def save(path: Path, rows: list, **about):
    """Write rows, together with versions and machine."""
    known = dict(versions=environment()) | machine()
    path.write_text(json.dumps(dict(about=known | about, rows=rows), indent=1) + "\n")
