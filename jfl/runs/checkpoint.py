"""Checkpoints of a run directory, one file each; an incomplete or damaged file is rejected.

A checkpoint is a line that names the format, a line of JSON, and the bytes of the arrays.  The
first line contains the digest of the second, which contains that of the arrays, so a truncated file
and a flipped bit are detected.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

import jax
import numpy as np

from ..core import checks, files
from ..core.errors import ResumeRefused
from ..core.files import write
from ..core.records import Run

MAGIC, FORMAT = "jfl-checkpoint", 3  # format 1 was a folder; 2 had no identity of a plan
KEPT = 2
# Settings that, like XLA_FLAGS, compile the same code to another program.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_disable_most_optimizations",
    "jax_random_seed_offset",
    "jax_disable_jit",
    "jax_optimization_level",
    "jax_exec_time_optimization_effort",
    "jax_softmax_custom_jvp",
    "jax_cpu_collectives_implementation",
)
VARIABLES = ("NPROC", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "TF_XLA_FLAGS")


def environment() -> dict:
    """Describe the program and machine on which the same rounds give the same bits."""
    version = importlib.metadata.version
    settings = {
        k: getattr(jax.config, k, jax.config.values.get(k)) for k in SETTINGS
    }  # some are values only
    settings |= {k: os.environ[k] for k in VARIABLES if k in os.environ}
    processor, features = _processor()
    return dict(
        jfl=version("jfl"),
        source=files.source(),
        python=f"{platform.python_version()} -O{sys.flags.optimize}",
        jax=jax.__version__,
        jaxlib=version("jaxlib"),
        numpy=np.__version__,
        packages=" ".join(f"{p} {version(p)}" for p in ("flax", "optax")),
        platform=jax.devices()[0].client.platform_version,
        backend=jax.default_backend(),
        device=jax.devices()[0].device_kind,
        devices=jax.device_count(),
        processes=jax.process_count(),
        machine=platform.machine(),
        processor=processor,
        features=features,
        cores=_cores(),
        flags=_flags(),
        settings=" ".join(f"{k}={v}" for k, v in settings.items()),
    )


def code() -> dict:
    """Return the part of `environment` that processes must share to compute one run or sweep."""
    return {
        k: v
        for k, v in environment().items()
        if k in ("jfl", "source", "python", "jax", "jaxlib", "numpy", "packages")
    }


def _flags() -> str:
    """Return XLA_FLAGS, or the content of the file that it names."""
    flags = os.environ.get("XLA_FLAGS", "")
    return (
        flags
        if flags.lstrip()[:1] in ("", "-") or not os.path.isfile(flags)
        else Path(flags).read_text()
    )


def _cores() -> int:
    """Return how many CPU cores this process may use.  Sums are divided among them, so the last
    bits of a sum depend on this number."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _processor() -> tuple[str, str]:
    """Return the model of the CPU and a digest of its features; a virtual machine may hide some."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor(), ""
    fields = {
        k.strip(): v.strip() for k, _, v in (line.partition(":") for line in text.splitlines())
    }
    features = fields.get("flags") or fields.get("Features") or ""
    return fields.get("model name") or platform.processor(), _digest([features.encode()])[:8]


def pack(run: Run) -> dict:
    """Return the leaves of a run by number, with keys as their data."""
    plain = [
        jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(run)
    ]
    return {f"{i:04d}": np.asarray(x) for i, x in enumerate(plain)}


def unpack(leaves: dict, like: Run) -> Run:
    """Rebuild a run from the leaves of `pack`, with the structure of `like`."""
    wanted, treedef = jax.tree.flatten(like)
    out = []
    for i, x in enumerate(wanted):
        value = leaves[f"{i:04d}"]
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(x))
        out.append(jax.numpy.asarray(value))
    return treedef.unflatten(out)


class Saved(NamedTuple):
    """The content of a checkpoint; `digest` is the digest of its state."""

    meta: dict
    leaves: dict
    digest: str


class Checkpoints:
    """The last two checkpoints of a run directory."""

    def __init__(self, directory):
        self.directory = Path(directory).absolute()
        self.folder = self.directory / "checkpoints"

    def rounds(self) -> list[int]:
        """Return the rounds of the complete checkpoints, the latest first."""
        files = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((int(p.name) for p in files if p.name.isdecimal()), reverse=True)

    def latest(self) -> int | None:
        return next(iter(self.rounds()), None)

    def save(self, run: Run, meta: dict):
        """Save a run together with JSON metadata, then remove older checkpoints.  The file is on
        the disk when this returns."""
        leaves = pack(run)
        payload = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in leaves.values()]
        head = (
            json.dumps(
                dict(
                    jfl=importlib.metadata.version("jfl"),
                    meta=meta,
                    arrays=_arrays(leaves),
                    digest=_digest(payload),
                )
            ).encode()
            + b"\n"
        )
        self.folder.mkdir(exist_ok=True)
        write(
            self.folder / str(int(run.round)),
            [f"{MAGIC} {FORMAT} {_digest([head])}\n".encode(), head, *payload],
        )
        for old in self.rounds()[KEPT:]:
            (self.folder / str(old)).unlink()

    def load(self) -> Saved:
        """Read the latest checkpoint.

        Raises:
            ResumeRefused: If it has another format, is incomplete or was modified.
        """
        path = self.folder / str(self.latest())
        where = f"checkpoint {path}"
        if path.is_dir():
            _foreign(where, "a folder, format 1")
        with open(path, "rb") as file:
            first, head, payload = file.readline(), file.readline(), file.read()
        words = first.decode("ascii", "replace").split()
        if len(words) != 3 or words[0] != MAGIC or not words[1].isdecimal():
            _damaged(path, "another first line")
        if int(words[1]) != FORMAT:
            _foreign(where, f"format {words[1]}")
        if words[2] != _digest([head]):
            _damaged(path, "another digest of its record")
        record = json.loads(head)
        if record["digest"] != _digest([payload]):
            _damaged(path, f"another digest of its {len(payload)} bytes of arrays")
        leaves, begin = {}, 0
        for name, (kind, shape) in record["arrays"].items():
            kind, count = jax.numpy.dtype(kind), int(np.prod(shape, dtype=np.int64))
            leaves[name] = np.frombuffer(payload, kind, count, begin).reshape(shape)
            begin += count * kind.itemsize
        return Saved(record["meta"], leaves, record["digest"])

    def restore(self, like: Run, saved: Saved | None = None) -> Run:
        """Return the run of `saved`, or of the latest checkpoint; `like` is a run of the same plan.

        Raises:
            ResumeRefused: If its arrays differ from those of `like` in shape or type.
        """
        leaves = (self.load() if saved is None else saved).leaves
        needed, stored = _arrays(pack(like)), _arrays(leaves)
        if needed != stored:
            other = [
                f"{k}: {stored.get(k)} there, {needed.get(k)} here"
                for k in sorted(needed.keys() | stored.keys())
                if needed.get(k) != stored.get(k)
            ]
            refuse_resume(
                f"checkpoint {self.directory}",
                "the arrays of this plan",
                "; ".join(other[:5]),
                "Resume with the config that made it.",
            )
        return unpack(leaves, like)


def refuse_resume(where: str, expected: str, actual: object, hint: str = "") -> NoReturn:
    """Raise ResumeRefused with the message of `checks.fail`."""
    checks.fail(where, expected, actual, hint, error=ResumeRefused)


def _arrays(leaves: dict) -> dict:
    return {k: [str(v.dtype), list(v.shape)] for k, v in leaves.items()}


def _digest(parts) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part)
    return sha.hexdigest()


def _foreign(where, got):
    refuse_resume(
        where,
        f"format {FORMAT}",
        got,
        "Another version of jfl wrote it: resume with that version, or start in "
        "another directory with another --seed.",
    )


def _damaged(path, got):
    refuse_resume(
        f"checkpoint {path}",
        "the file as it was written",
        f"{got}, so it was cut or damaged",
        "Remove that file to resume from the previous one; later rounds are computed again.",
    )
