"""Sweeps on the machines of a Ray cluster (extra `ray`).

The driver checks arguments and writes files, and the workers compute blocks.  A task is a block of
points that share one program.  A worker receives the values of its configs and loads the data
itself.  It refuses a task unless its code, library versions, data and noise are those of the
driver.
"""

import contextlib
import dataclasses
import math
import os
import socket
import warnings
from typing import Any

import jax

from ..core import checks, identity
from ..core.errors import ArgumentError
from ..data.federation import checksum
from ..engine.sweep import (
    COMPILED_MEMORY_FRACTION,
    DEFAULT_MEMORY_BYTES,
    device_memory,
    pad_row_tables,
)
from . import build, checkpoint
from . import sweep as sweeps
from .config import Config
from .sweep import CPU_BLOCK_SIZE, Block, Point

CONFIG: Any = jax.config  # its type does not declare the options
MAX_RETRIES = 5  # number of times that a block is retried if its worker or machine was lost
WARN_AFTER_SECONDS = 10.0  # without a worker, before a message says what the sweep is waiting for
KEPT_POINTS = "Finished points are kept: --resume computes the others"


@dataclasses.dataclass(frozen=True)
class Ray:
    """An engine for `jfl.runs.sweep.sweep`: a running cluster, or a local one that ends with the
    sweep.

    Args:
        address: as in ray.init; None means $RAY_ADDRESS, or else a cluster on this machine.
        cpus, gpus: resources of a task; less than one shares a device.  None for gpus means 1 if
            the cluster has GPUs, else 0.

    Raises:
        ValueError: If Ray or the cluster is missing, or a worker has another version of jfl or
            other data.
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float | None = None

    @contextlib.contextmanager
    def open(self, watch):
        """Connect to the cluster while the context is active.

        A connection that existed before is kept at the end.
        """
        checks.require_positive("--engine ray", cpus_per_task=self.cpus)
        checks.require_nonnegative("--engine ray", gpus_per_task=self.gpus or 0.0)
        ray, local = _ray(), False
        started_here = not ray.is_initialized()
        if started_here:
            watch(note="connecting to Ray")
            local = _start(ray, self.address or os.environ.get("RAY_ADDRESS") or "local")
        try:
            yield Cluster(ray, local, self, watch)
        finally:
            if started_here:
                ray.shutdown()


class Cluster:
    """A Ray cluster that runs blocks of a sweep as tasks, limited in number and memory."""

    name = "ray"

    def __init__(self, ray, local: bool, options: Ray, watch):
        self.ray, self.local = ray, local
        total, nodes = ray.cluster_resources(), [n["Resources"] for n in ray.nodes() if n["Alive"]]
        gpus = options.gpus if options.gpus is not None else 1.0 if total.get("GPU") else 0.0
        need = {k: v for k, v in dict(CPU=options.cpus, GPU=gpus).items() if v}
        places = [min(int(n.get(k, 0) / v) for k, v in need.items()) for n in nodes]
        if local and not sum(places):
            checks.fail(
                "--engine ray",
                f"a machine with {_describe_resources(need)} for a task",
                _describe_resources({k: nodes[0].get(k, 0) for k in need}),
                "Lower --cpus-per-task or --gpus-per-task.",
            )
        self.nodes, self.places = len([p for p in places if p]), max(1, sum(places))
        # Tasks share the memory of a machine equally; on an accelerator, a task has what its
        # process gets.
        self.memory = min(
            [
                DEFAULT_MEMORY_BYTES,
                *(n["memory"] / p for n, p in zip(nodes, places) if p and "memory" in n),
            ]
        )
        env = {}
        if total.get("GPU") and not gpus:  # otherwise the task would use a GPU of its machine
            env = dict(runtime_env=dict(env_vars={"JAX_PLATFORMS": "cpu"}))
        if 0 < gpus < 1:  # by default JAX allocates most of a device
            env = dict(
                runtime_env=dict(env_vars={"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 * gpus:.3f}"})
            )
        self.remote = ray.remote(
            num_cpus=options.cpus,
            num_gpus=gpus,
            max_retries=MAX_RETRIES,
            scheduling_strategy="SPREAD",
            **env,
        )
        # Ask one worker now, so that another version of jfl is reported before anything is written.
        ref = self.remote(look).remote(checkpoint.code())
        if not ray.wait([ref], timeout=WARN_AFTER_SECONDS)[0]:
            watch(note=f"waiting for a worker with {_describe_resources(need)}")
        self.accelerator = self._get(ref)
        self.memory = self.accelerator or self.memory

    def most(self, count: int) -> float:
        """Return the maximum number of points of a block, for `count` points in total.

        There are two blocks per place for a task, so that all places are busy and little is lost if
        a task fails.
        """
        share = math.ceil(count / (2 * self.places))
        return share if self.accelerator else min(CPU_BLOCK_SIZE, share)

    def run(self, blocks: list[Block], widths: dict):
        """Yield blocks with the records of their runs, in the order in which they finish.

        A block that is lost with its worker is run again.

        Args:
            blocks: the points of a sweep that run as one program.
            widths: as in `work`.
        """
        # Compiled CPU code is for one processor only, so other machines do not share it.  With a
        # GPU, Ray starts a new process for each task.
        cache = CONFIG.jax_compilation_cache_dir if self.local or self.accelerator else None
        remote, code, pending = self.remote(work), checkpoint.code(), {}
        try:
            for b in blocks:
                sent = [(dataclasses.asdict(p.config), p.data, p.signature) for p in b.points]
                pending[remote.remote(sent, b.size, widths, code, self.memory, cache)] = b
            while pending:
                done, _ = self.ray.wait(list(pending), num_returns=1)
                records = self._get(done[0])
                yield pending.pop(done[0]), records
        finally:
            for ref in pending:
                self.ray.cancel(ref)

    def _get(self, ref):
        """Return the result of a task; raise an error if it is a text, which says why the worker
        refused."""
        errors = self.ray.exceptions
        try:
            result = self.ray.get(ref)
        except errors.RayTaskError as error:
            checks.fail(
                "--engine ray",
                "a task without an error",
                _first_line(error.cause or error),
                f"{KEPT_POINTS}; perhaps use a smaller --block.",
            )
        except errors.RayError as error:
            checks.fail(
                "--engine ray",
                f"a worker that survives; {MAX_RETRIES + 1} tries of a block were lost",
                _first_line(error),
                f"{KEPT_POINTS}.",
            )
        if isinstance(result, str):
            raise ArgumentError(result)
        return result


# --- on a worker


def look(code: dict):
    """Return the memory in bytes for a block on this worker's accelerator; None on a CPU.

    If the worker must refuse tasks, the result is a text that gives the reason.
    """
    return _refusal("the driver's code", code, checkpoint.code()) or (
        None if jax.default_backend() == "cpu" else sweeps.memory()
    )


def work(sent: list[tuple], size: int, widths: dict, code: dict, memory: float, cache: str | None):
    """Compute a block on a worker.

    Args:
        sent: a tuple for each point: the values of its config, the checksum of its data, and the
            signature of its plan's description.
        size: the number of points of the block's program; a smaller block is padded.
        widths: the widths to which the row tables of all points are padded.
        code: the result of `checkpoint.code` on the driver.
        memory: bytes for the points that are computed at once.
        cache: the driver's directory of compiled programs, or None.

    Returns:
        The records of the points; or, if the worker refuses, a text that gives the reason (a
        refused block is not retried).
    """
    import ray

    if refusal := _refusal("the driver's code", code, checkpoint.code()):
        return refusal
    if cache and CONFIG.jax_compilation_cache_dir is None:
        with contextlib.suppress(OSError):  # this machine may not have the driver's directory
            os.makedirs(cache, exist_ok=True)
        if os.access(cache, os.W_OK):
            jax.config.update("jax_compilation_cache_dir", cache)
    configs, plans = [Config(**values) for values, _, _ in sent], {}
    of_seed_0 = [dataclasses.replace(config, seed=0) for config in configs]  # seeds share a plan
    for setting, (_, data, signature) in zip(of_seed_0, sent):
        if setting in plans:
            continue
        try:
            plans[setting] = plan = build.build(setting)[0]
        except ValueError as error:
            return str(error)
        here = dict(data=checksum(plan.fed), plan=identity.signature(identity.describe(plan)))
        there = dict(data=data, plan=signature)
        if refusal := _refusal("the driver's data and noise", there, here):
            return refusal
    padded = pad_row_tables([plans[setting] for setting in of_seed_0], widths)
    block = Block([Point(config, plan) for config, plan in zip(configs, padded)], size)
    environment, context = checkpoint.environment(), ray.get_runtime_context()
    worker = dict(
        worker=f"{context.get_node_id()[:8]}/{os.getpid()}",
        device=f"{environment['backend']} {environment['device']}",
    )
    if jax.default_backend() != "cpu":
        memory = device_memory(COMPILED_MEMORY_FRACTION) or memory  # of this worker's accelerator
    return [worker | measured for measured in sweeps.compute(block, memory)]


def _refusal(need: str, there: dict, here: dict) -> str | None:
    """Return why a worker must refuse a task, if it differs from the driver; otherwise None."""
    differ = [
        f"{k} {there[k]} on the driver, {here[k]} on a worker" for k in there if there[k] != here[k]
    ]
    if not differ:
        return None
    return (
        f"--engine ray: expected {need} on every worker, but got {'; '.join(differ)}. Install the "
        "same versions of jfl and JAX and the same data (JFL_DATA_DIR) on all machines."
    )


# --- Ray


def _ray():
    """Import Ray, or explain how to install it."""
    try:
        import ray
    except ImportError:
        checks.fail(
            "--engine ray",
            "the package ray",
            "an environment without it",
            'Install it: pip install -e ".[ray]" in the folder of jfl.',
        )
    return ray


def _start(ray, address: str) -> bool:
    """Connect to a cluster, and return whether it is a new one on this machine."""
    local = address == "local"
    host, _, port = address.removeprefix("ray://").rpartition(":")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
    try:
        if port.isdecimal():  # Ray itself would retry for minutes
            socket.create_connection(
                (host.strip("[]"), int(port)), timeout=WARN_AFTER_SECONDS
            ).close()
        with warnings.catch_warnings():
            # harmless: the children of Ray exec at once
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            options = dict(include_dashboard=False) if local else {}
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        checks.fail(
            "--address",
            "a Ray cluster that answers",
            f"{address!r} ({_first_line(error)})",
            "Start one with `ray start --head`, or leave out --address for a local cluster.",
        )
    return local


def _first_line(error) -> str:
    """Return the first line of an error's text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}".rstrip(" .")


def _describe_resources(resources: dict) -> str:
    """Return resources as a phrase, such as "4 CPU and 1 GPU"."""
    return " and ".join(f"{v:g} {k}" for k, v in resources.items())
