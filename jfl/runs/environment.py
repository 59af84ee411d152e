"""The versions, settings and machine that determine the bits of a run."""

import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import jax
import numpy as np

from ..core import files

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
    """Return the versions, settings and hardware that must be equal to reproduce a run exactly."""
    version = importlib.metadata.version
    # Some settings are in `values` only.
    settings = {k: getattr(jax.config, k, jax.config.values.get(k)) for k in SETTINGS}
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
    """Return the part of `environment` that all processes of one run or sweep must share."""
    return {
        k: v
        for k, v in environment().items()
        if k in ("jfl", "source", "python", "jax", "jaxlib", "numpy", "packages")
    }


def _flags() -> str:
    """Return XLA_FLAGS, or the content of the file that it names."""
    flags = os.environ.get("XLA_FLAGS", "")
    return Path(flags).read_text() if os.path.isfile(flags) else flags


def _cores() -> int:
    """Return the number of CPU cores that this process may use.

    Sums are divided among the cores, so the last bits of a sum depend on this number.
    """
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
    digest = hashlib.sha256(features.encode()).hexdigest()[:8]
    return fields.get("model name") or platform.processor(), digest
