"""Runs of an audit that was stopped: kept in a file, so that they are not run again.

The file is an .npz of what was seen of the runs so far, of the side with the canary and of the
side without, and the question that they answer.  Each run has a key of its own, so the blocks in
which they run may differ from one start to the next.
"""

import importlib.metadata
import io
import json
import time
import zipfile
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..core import checks, files, identity
from ..core.errors import ResumeRefused
from ..core.records import Plan
from ..gradients.per_example import Grad

SIDES = ("inside", "outside")
SECONDS = 5.0  # between two writes, at least
SHARE = 20.0  # times what a write takes, at least: a large file is written less often
FORMAT = 1
WHERE = "jfl.audit keep="


def question(plan: Plan, pair: tuple, asked: dict) -> dict:
    """What runs must share to be runs of one audit, JSON-able.

    Args:
        plan: what is audited.
        pair: the plans that run, with the canary and without.
        asked: rounds, trials, seed, unit, view and adjacency.
    """
    words = lambda p: "".join(f"{int(w):08x}" for w in np.asarray(identity.plan_identity(p)))
    version = importlib.metadata.version
    # how it is computed: no part of a plan's identity, but what an audit looks at
    is_grad = lambda node: isinstance(node, Grad)
    grads = [g for g in jax.tree.leaves(plan.algorithm, is_leaf=is_grad) if is_grad(g)]
    return dict(
        format=FORMAT,
        plan=words(plan),
        canary=[words(p) for p in pair],
        mesh=None if plan.mesh is None else str(plan.mesh),
        chunk=plan.chunk,
        gradients=[f"{g.path}, microbatch {g.microbatch}" for g in grads],
        **asked,
        jfl=f"{version('jfl')} ({files.source()})",
        jax=f"{version('jax')} on {jax.default_backend()}",
    )


class Kept:
    """The runs that a file holds, and those that are added to it.

    Args:
        path: of the file; None: nothing is kept.
        question: of `question`.
        trials: runs of each side.

    Raises:
        ResumeRefused: for a file that answers another question, or is none of an audit.
    """

    def __init__(self, path: str | PathLike | None, question: dict, trials: int):
        self.path: Any = None if path is None else Path(path)
        self.question, self.trials = question, trials
        self.parts = ([], [])
        self.written = time.monotonic()
        self.pause = SECONDS
        if self.path is not None and self.path.exists():
            self._read()

    def of(self, side: int) -> np.ndarray | None:
        """Float32[n, R, k], of the runs of a side so far; None before the first."""
        return np.concatenate(self.parts[side]) if self.parts[side] else None

    def counts(self) -> list[int]:
        """Runs of either side so far."""
        return [sum(map(len, side)) for side in self.parts]

    def add(self, side: int, seen: np.ndarray) -> None:
        """More runs of a side; they are on the disk a few seconds later, or when all are there."""
        self.parts[side].append(np.asarray(seen))
        if self.path is None:
            return
        waited = time.monotonic() - self.written
        if waited >= self.pause or sum(self.counts()) == 2 * self.trials:
            self._write()

    def _write(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        begun, held = time.monotonic(), io.BytesIO()
        arrays: dict[str, Any] = {
            name: self.of(side) for side, name in enumerate(SIDES) if self.parts[side]
        }
        np.savez(held, question=json.dumps(self.question), **arrays)
        files.write(self.path, [held.getvalue()])
        self.written = time.monotonic()
        self.pause = max(SECONDS, SHARE * (self.written - begun))

    def _read(self):
        try:
            with np.load(self.path, allow_pickle=False) as held:
                there = json.loads(str(held["question"]))
                found = [held[name] if name in held else None for name in SIDES]
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
            _refuse("a file that an audit wrote", f"{self.path}: {error}")
        if there != self.question:
            other = identity.differences(there, self.question)
            _refuse(f"the runs of this audit in {self.path}", "; ".join(other[:5]))
        for side, seen in enumerate(found):
            if seen is not None:
                self.parts[side].append(seen)


def _refuse(needed, got):
    checks.fail(
        WHERE,
        needed,
        got,
        "Name another file, or remove this one: its runs are of no use here.",
        error=ResumeRefused,
    )
