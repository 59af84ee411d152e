"""Compile a benchmark's plan for an accelerator that is not attached, and report its memory.

    python -m experiments.bench.aot                                  # W1 private, H200 and v5e
    python -m experiments.bench.aot --workload W2 --mode private plain --target v5e h200
    python -m experiments.bench.aot --workload W2 --algorithm scaffold --devices 8 --set cohort=64
    python -m experiments.bench.aot --list                           # targets, workloads, modes

The script needs the compilers but no accelerator: `pip install -e ".[aot]"`, where
jax-cuda12-plugin and jax-cuda12-pjrt must have the version of jax.  Nothing is executed.  For each
program it prints the seconds to compile, the bytes on one device, the messages between devices (one
in a loop counts once, so with several devices a round and an evaluation send one each), and the
instructions on 64 bits before the compiler rewrites them.  `cpu` compiles for this machine.
"""

import collections
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jfl
from jfl.engine import sharding
from jfl.engine.simulate import scan_from

from . import timing

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import jfl_peer
from workloads import WORKLOADS

MODES = dict(
    private="the noise of the workload",
    plain="neither clipping nor noise",
    clipped="clipping without noise",
    threefry="noise by the generator of the key",
    vmap="the gradient of every example is formed",
)
# The description of a GPU that is not attached, for its compiler.
HOPPER = """
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
  memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
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
# Target -> the platform's name in jax, and the topology or the description of one device.
TARGETS = dict(
    cpu=("cpu", ""),
    h100=(
        "gpu",
        HOPPER.format(name="NVIDIA H100 80GB HBM3", bandwidth=3350 * 10**9, memory=85 * 10**9),
    ),
    h200=("gpu", HOPPER.format(name="NVIDIA H200", bandwidth=4800 * 10**9, memory=151 * 10**9)),
    v5e=("tpu", "v5e:2x4"),
    v5p=("tpu", "v5p:2x2x1"),
    v6e=("tpu", "v6e:2x4"),
)
COMPILERS = dict(cpu=(), gpu=("jax-cuda12-plugin", "jax-cuda12-pjrt"), tpu=("libtpu",))
COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


class MissingCompiler(Exception):
    """The compiler of a target is not installed, or has another version than jax."""


def compile_plan(plan: jfl.Plan, target: str, devices: int = 1) -> dict:
    """Compile the rounds and evaluations of a plan for a target.

    Args:
        plan: built inside `as_on(target)`, because jfl chooses the size of a chunk by platform.
        target: a key of TARGETS.
        devices: that share each cohort.

    Returns:
        Seconds to compile, bytes on one device, the numbers of messages in the program and in its
        loop over rounds, and the number of instructions on 64 bits.

    Raises:
        MissingCompiler: see `check_compiler`.
        jax.errors.JaxRuntimeError: from the compiler.
    """
    mesh = device_mesh(target, devices)
    plan = dataclasses.replace(plan, mesh=mesh if devices > 1 else None)
    key = jax.eval_shape(lambda: jax.random.key(0))
    run = jax.eval_shape(lambda: jfl.init(jax.random.key(0), plan))
    whole = NamedSharding(mesh, PartitionSpec())

    def shape(x, where=whole):
        return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x), sharding=where)

    if devices > 1:
        run, shapes = (jax.tree.map(shape, x, sharding.shardings(x, mesh)) for x in (run, plan))
    else:
        run, shapes = jax.tree.map(shape, (run, plan))
    rounds = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=whole)
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole)
    with as_on(target):
        begun = time.perf_counter()
        lowered = jax.jit(scan_from, donate_argnums=0).lower(run, shapes, rounds, key)
        program = lowered.compile()
        seconds = time.perf_counter() - begun
    memory = program.memory_analysis()
    text, written = str(program.as_text()), lowered.compiler_ir("hlo")
    assert written is not None
    return dict(
        target=target,
        compile_seconds=round(seconds, 1),
        memory={
            what: int(getattr(memory, f"{what}_size_in_bytes"))
            for what in ("argument", "output", "alias", "temp", "generated_code")
        },
        collectives=count_collectives(text),
        round_collectives=count_collectives(loop_body(text, "rounds")),
        wide_written=len(re.findall(r"= \(?(?:s64|u64|f64|c128)\[", written.as_hlo_text())),
    )


def count_collectives(text: str) -> dict[str, int]:
    """Return how many messages between devices of each kind are in the text of a program."""
    return dict(collections.Counter(re.findall(rf" ({COLLECTIVES})(?:-start)?\(", text)))


def loop_body(text: str, name: str) -> str:
    """Return the text of the loop under a `jax.named_scope`, with all that it calls."""
    computations, current = {}, []
    for line in text.splitlines():
        if begins := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            current = computations.setdefault(begins[1], [])
        current.append(line)
    loop = re.compile(rf' while\(.*body=%?([\w.\-]+).*op_name="[^"]*/{name}/while"')
    (body,) = {found[1] for found in map(loop.search, text.splitlines()) if found}
    reached, todo = {}, [body]
    while todo:
        computation = todo.pop()
        if computation in computations and computation not in reached:
            reached[computation] = "\n".join(computations[computation])
            todo += re.findall(
                r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)", reached[computation]
            )
    return "\n".join(reached.values())


@contextlib.contextmanager
def as_on(target: str):
    """Let jfl choose by platform as it would on the target."""
    # Nothing is run, so the plug-in need not find cuDNN and the other libraries of a GPU.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    jax.clear_caches()  # of what was traced for this machine
    with mock.patch.object(jax, "default_backend", lambda: TARGETS[target][0]):
        yield
    jax.clear_caches()


@functools.cache
def device_mesh(target: str, devices: int = 1) -> Mesh:
    """Return a mesh of devices that need not be attached, with jfl's axes.

    Raises:
        MissingCompiler: see `check_compiler`.
        ValueError: for more devices than the topology has.
    """
    check_compiler(target)
    platform, description = TARGETS[target]
    if platform == "cpu":
        known = jax.devices("cpu")
    elif platform == "gpu":
        jax.devices()  # finds the plug-ins, whatever platform is chosen
        known = topologies.get_topology_desc(
            "", "cuda", target_config=description, topology=f"1x1x{devices}"
        ).devices
    else:
        # Nothing is run, so libtpu need not ask a cloud machine what it is.
        for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
            os.environ.setdefault(name, "1")
        known = topologies.get_topology_desc(platform="tpu", topology_name=description).devices
    if devices > len(known):
        raise ValueError(f"{target}: expected at most {len(known)} devices, but got {devices}.")
    chosen = np.array(known[:devices]).reshape(1, devices)
    return Mesh(chosen, ("points", "clients"), axis_types=(AxisType.Auto,) * 2)


def check_compiler(target: str, installed: dict | None = None):
    """Reject a target whose compiler is not installed or not of jax's version.

    Args:
        installed: package -> version; None: those of this environment.
    """
    packages = COMPILERS[TARGETS[target][0]]
    if installed is None:
        installed = {}
        for name in ("jax", *packages):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                installed[name] = importlib.metadata.version(name)
    if missing := [name for name in packages if name not in installed]:
        raise MissingCompiler(
            f"{target}: {', '.join(missing)} is not installed. Run: pip install -e '.[aot]'."
        )
    for name in packages:
        if name != "libtpu" and installed[name] != installed["jax"]:
            raise MissingCompiler(
                f"{target}: {name} must have the version of jax, {installed['jax']}, but has "
                f"{installed[name]}. Run: pip install {name}=={installed['jax']}."
            )


def workload_plan(workload: str, mode: str, algorithm: str, numbers: dict) -> jfl.Plan:
    """Build the plan of a workload of peers/workloads.py, on rows of zeros.

    Args:
        numbers: replace those of the workload.
    """
    spec = SimpleNamespace(**WORKLOADS[workload] | numbers)
    features = getattr(spec, "image", (784,))
    rows = SimpleNamespace(
        x=np.zeros((spec.clients, spec.rows, *features), np.float32),
        y=np.arange(spec.clients * spec.rows, dtype=np.int32).reshape(spec.clients, -1) % 10,
    )
    return jfl_peer.make(spec, jfl_peer.federation(rows), mode, algorithm=algorithm)


def main(arguments=None) -> int:
    parser = timing.parser(__doc__)
    several: Any = dict(nargs="+", metavar="NAME")
    parser.add_argument("--target", default=["h200", "v5e"], choices=list(TARGETS), **several)
    parser.add_argument("--workload", default=["W1"], choices=list(WORKLOADS), **several)
    parser.add_argument("--mode", default=["private"], choices=list(MODES), **several)
    parser.add_argument("--algorithm", default="fedavg", choices=jfl.algorithms.__all__)
    parser.add_argument("--devices", type=int, default=1, help="number that share a cohort")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=NUMBER", help="cohort=64 ...")
    parser.add_argument("--list", action="store_true", help="print targets, workloads and modes")
    args = parser.parse_args(arguments)
    if args.list:
        print("targets:", *TARGETS, "\nworkloads:", *WORKLOADS)
        print("\n".join(f"{name:<10} {about}" for name, about in MODES.items()))
        return 0
    # An accelerator of this machine is not the one that is asked for, and seconds are a compiler's.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    numbers = {name: json.loads(value) for name, value in (pair.split("=") for pair in args.set)}
    failed = 0
    for workload, mode, target in (
        (w, m, t) for w in args.workload for m in args.mode for t in args.target
    ):
        row = dict(workload=workload, mode=mode, algorithm=args.algorithm, devices=args.devices)
        try:
            with as_on(target):
                plan = workload_plan(workload, mode, args.algorithm, numbers)
            row |= compile_plan(plan, target, args.devices)
        except (ValueError, MissingCompiler, jax.errors.JaxRuntimeError) as error:
            print(f"{workload} {mode} {target}: {str(error)[:1500]}", file=sys.stderr, flush=True)
            failed += 1
        else:
            print(json.dumps(row), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
