"""Accelerators that need not be here: what their data sheets say, and their compilers."""

import dataclasses
import functools
import importlib.metadata
import os

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

PACKAGES = dict(
    cuda=(
        "jax-cuda12-plugin",
        "jax-cuda12-pjrt",
        "nvidia-cuda-nvcc-cu12",
        "nvidia-cuda-runtime-cu12",
        "nvidia-nvjitlink-cu12",
    ),
    tpu=("libtpu",),
)
OF_JAXS_VERSION = ("jax-cuda12-plugin", "jax-cuda12-pjrt")
# of the CUDA runtime, in seconds
LAUNCH = 3e-6  # from one launch to the next
GRAPH_LAUNCH = 1.7e-6  # the same inside of a CUDA graph
GRAPH = 5  # launches one after another from which on XLA makes a CUDA graph of them
HOST_WAIT = 12e-6  # a turn of a loop, or a branch, that waits for a number from the device


class MissingCompiler(Exception):
    """A compiler that is not installed, or whose version does not fit jax."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of accelerator, by its data sheet; rates are in 1/s.

    Args:
        topology: of the smallest slice with eight devices or more (four for v5p).
        bandwidth: bytes of the device's memory.
        products: flops of matrix products in float32 (a TPU: in bfloat16, all it has).
        coarse_products: flops of matrix products at default precision.
        other: operations of 32 bits outside of matrix products.
        clock: Hz; memory: bytes.
        description: a GpuTargetConfigProto.
    """

    name: str
    platform: str
    topology: str
    bandwidth: float
    products: float
    coarse_products: float
    other: float
    clock: float
    memory: float
    description: str = ""


def _hopper(name: str, bandwidth: float, memory: float) -> str:
    """What the compiler has to know of a Hopper GPU."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(bandwidth)}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {int(memory)}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 minor: 0 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.8.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""


_H200 = _hopper("NVIDIA H200", 4.8e12, 151e9)
_H100 = _hopper("NVIDIA H100 80GB HBM3", 3.35e12, 85e9)
TARGETS = {
    target.name: target
    for target in (
        Target("h200", "cuda", "", 4.8e12, 67e12, 400e12, 33e12, 1.98e9, 151e9, _H200),
        Target("h100", "cuda", "", 3.35e12, 67e12, 400e12, 33e12, 1.98e9, 85e9, _H100),
        Target("v5e", "tpu", "v5e:2x4", 819e9, 197e12, 197e12, 6e12, 1.5e9, 16e9),
        Target("v5p", "tpu", "v5p:2x2x1", 2765e9, 459e12, 459e12, 14e12, 1.75e9, 95e9),
        Target("v6e", "tpu", "v6e:2x4", 1640e9, 918e12, 918e12, 14e12, 1.75e9, 32e9),
    )
}


def versions() -> dict:
    """The versions of jax and of the compilers that are installed."""
    found = {}
    for name in ("jax", "jaxlib", *(p for packages in PACKAGES.values() for p in packages)):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check(target: Target, installed: dict | None = None):
    """Refuse a target whose compiler is not here.

    Args:
        installed: package -> version; None: those of this environment.

    Raises:
        MissingCompiler: where a package is missing, or is not of jax's version.
    """
    installed = versions() if installed is None else installed
    absent = [name for name in PACKAGES[target.platform] if name not in installed]
    if absent:
        raise MissingCompiler(
            f"{target.name}: its compiler is not installed ({', '.join(absent)}). "
            f"Install the extra: pip install -e '.[aot]'."
        )
    wrong = [
        f"{name} {installed[name]}"
        for name in PACKAGES[target.platform]
        if name in OF_JAXS_VERSION and installed[name] != installed["jax"]
    ]
    if wrong:
        pins = " ".join(f"{name}=={installed['jax']}" for name in OF_JAXS_VERSION)
        raise MissingCompiler(
            f"{target.name}: jax is {installed['jax']}, and its plug-in is another version "
            f"({', '.join(wrong)}). Install the same version: pip install {pins}."
        )


@functools.cache
def mesh(name: str, count: int = 1) -> Mesh:
    """A mesh of devices that need not be here, with jfl's axes.

    Raises:
        MissingCompiler: see `check`; ValueError: for more devices than the topology has.
    """
    target = TARGETS[name]
    check(target)
    if target.platform == "cuda":
        jax.devices()  # finds the plug-ins, whatever platform is chosen
        devices = topologies.get_topology_desc(
            "", "cuda", target_config=target.description, topology=f"1x1x{count}"
        ).devices
    else:
        # nothing is run: libtpu need not ask a cloud machine what it is, nor be alone on it
        for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
            os.environ.setdefault(name, "1")
        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=target.topology
        ).devices
    if count > len(devices):
        raise ValueError(f"{name}: need at most {len(devices)} devices; got {count}.")
    chosen = np.array(devices[:count]).reshape(1, count)
    return Mesh(chosen, ("points", "clients"), axis_types=(AxisType.Auto,) * 2)
