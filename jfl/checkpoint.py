"""Runs on disk: checkpoints by orbax, and a journal of rounds whose release may have been seen.

A checkpoint is complete or not there.  Before rounds are computed the journal says how far they will go, and under
which program.  A run that is killed and resumed computes some rounds again: by the same program they give the same
release, which counts once; by another one they are new releases, so the run's `attempt` is raised, which changes its
noise, and they count twice.
"""
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import uuid
from pathlib import Path

import jax
import numpy as np

from . import check
from .core import Run


def write(path, text: str):
    """Write a text file so that a reader sees the old one or the new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def identity() -> dict:
    """The program and machine on which the same rounds give the same bits."""
    version = importlib.metadata.version
    return dict(jfl=version("jfl"), source=_source(), jax=jax.__version__, jaxlib=version("jaxlib"),
                numpy=np.__version__, backend=jax.default_backend(), device=jax.devices()[0].device_kind,
                devices=jax.device_count(), machine=platform.machine(), processor=_processor(),
                flags=os.environ.get("XLA_FLAGS", ""))


@functools.cache
def _source() -> str:
    """jfl's own code: in a working copy the version does not change with it."""
    package = Path(__file__).parent
    kernels = Path(importlib.import_module("jfl.kernels").__file__).parent
    parts = [p.read_bytes() for folder in (package, kernels) for p in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@functools.cache
def _processor() -> str:
    """The model of the CPU: compiled code follows it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def pack(run: Run) -> dict:
    """The leaves of a run by number, keys as their data."""
    plain = [jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x
             for x in jax.tree.leaves(run)]
    return {f"{i:04d}": np.asarray(x) for i, x in enumerate(plain)}


def unpack(leaves: dict, like: Run) -> Run:
    """The run that `pack` took apart; `like` gives the structure."""
    wanted, treedef = jax.tree.flatten(like)
    out = []
    for i, x in enumerate(wanted):
        value = leaves[f"{i:04d}"]
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(x))
        out.append(jax.numpy.asarray(value))
    return treedef.unflatten(out)


class Store:
    """The checkpoints of one run directory: the last two, and the journal."""

    def __init__(self, directory):
        self.directory = Path(directory).absolute()
        self.journal_path = self.directory / "journal.json"
        self._open = None

    @property
    def _manager(self):
        import orbax.checkpoint as ocp
        if self._open is None:
            options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False, create=True)
            self._open = ocp.CheckpointManager(self.directory / "checkpoints", options=options)
        return self._open

    def latest(self) -> int | None:
        """The round of the last complete checkpoint."""
        return self._manager.latest_step() if (self.directory / "checkpoints").is_dir() else None

    def save(self, run: Run, meta: dict):
        """Save a run and a JSON-able record beside it; returns when it is complete."""
        import orbax.checkpoint as ocp
        leaves = pack(run)
        self._manager.save(int(run.round), args=ocp.args.Composite(
            run=ocp.args.StandardSave(leaves), meta=ocp.args.JsonSave(meta | dict(arrays=_arrays(leaves)))))
        self._manager.wait_until_finished()

    def meta(self) -> dict:
        import orbax.checkpoint as ocp
        return self._read(meta=ocp.args.JsonRestore())["meta"]

    def _read(self, **items):
        import orbax.checkpoint as ocp
        step = self.latest()
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:           # orbax, tensorstore and JSON have no common error
            check.fail(f"checkpoint {self.directory}/checkpoints/{step}", "a readable checkpoint",
                       f"{type(error).__name__}: {str(error)[:200]}",
                       "Remove that folder to go on from the one before: rounds since are computed again.")

    def restore(self, like: Run) -> Run:
        """The last complete run; `like` is one of the same plan.

        Errors   ValueError if its arrays are not those of `like`.
        """
        import orbax.checkpoint as ocp
        blank = {k: np.zeros_like(v) for k, v in pack(like).items()}
        needed, found = _arrays(blank), self.meta()["arrays"]
        if needed != found:
            other = [f"{k}: {found.get(k)} there, {needed.get(k)} here" for k in sorted(needed.keys() | found.keys())
                     if needed.get(k) != found.get(k)]
            check.fail(f"checkpoint {self.directory}", "the arrays of this plan", "; ".join(other[:5]),
                       "Resume with the config that made it.")
        return unpack(self._read(run=ocp.args.StandardRestore(blank))["run"], like)

    def close(self):
        if self._open is not None:
            self._open.close()
            self._open = None

    # --- journal ----------------------------------------------------------------------------------------------

    def journal(self) -> dict | None:
        try:
            found = json.loads(self.journal_path.read_text())
            if not {"until", "attempt", "recomputed", "identity"} <= found.keys():
                raise ValueError(f"it holds {sorted(found)}")
            return found
        except FileNotFoundError:
            return None
        except (ValueError, AttributeError, TypeError) as error:
            check.fail(f"journal {self.journal_path}", "the JSON that a run wrote", str(error),
                       "Without it nobody knows which rounds were seen: start in another directory.")

    def announce(self, until: int, attempt: int, recomputed: int, **facts):
        """Say before computing them which rounds may be seen from now on; `facts` name what is run.

        An earlier try of the same program that went further stays the furthest.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        before = self.journal()
        if before is not None and (before["attempt"], before["identity"]) == (attempt, identity()):
            until = max(until, before["until"])
        write(self.journal_path, json.dumps(dict(facts, until=until, attempt=attempt, recomputed=recomputed,
                                                 identity=identity()), indent=1))


def _arrays(leaves: dict) -> dict:
    return {k: f"{v.dtype}{list(v.shape)}" for k, v in leaves.items()}


def resume_attempt(run: Run, journal: dict | None) -> tuple[Run, int]:
    """-> the run to go on with, and how many rounds were released more than once.

    Rounds past the checkpoint that the journal announced are released again.  On the same program and machine they
    are the same; otherwise they get new noise and count.
    """
    if journal is None:
        return run, 0
    again = max(0, journal["until"] - int(run.round))
    attempt, recomputed = max(journal["attempt"], int(run.attempt)), journal["recomputed"]
    if again and journal["identity"] != identity():
        attempt, recomputed = attempt + 1, recomputed + again
    return dataclasses.replace(run, attempt=jax.numpy.int32(attempt)), recomputed
