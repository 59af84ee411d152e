"""A sweep over the machines of a Ray cluster (extra `ray`): the driver checks and writes, workers
compute blocks.

A task is a block of points of one static group.  It goes to a worker as plain values of configs;
the worker loads the data itself.  Its jfl, its versions, its data and its noise must be the
driver's, otherwise it refuses.
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
from ..engine.sweep import FULL, MEMORY, device_memory, widened
from . import blocks, build, checkpoint
from .blocks import AT_ONCE, Block
from .config import Config

CONFIG: Any = jax.config  # whose type does not name its options
RETRIES = 5  # of a block whose worker or machine was lost
WAIT = 10.0  # seconds without a worker after which it is said what is waited for
KEPT = "Points that are done are kept: --resume goes on with the others"


@dataclasses.dataclass(frozen=True)
class Ray:
    """An engine for `jfl.runs.sweep.sweep`: a running cluster, or one of this machine that ends
    with the sweep.

    Args:
        address: as of ray.init; None: $RAY_ADDRESS, or else a cluster of this machine.
        cpus, gpus: of a task, less than one to share it; gpus None: 1 where the cluster has some,
            else 0.

    Raises:
        ValueError: without ray, without the cluster, and for workers of another jfl or with other
            data.
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float | None = None

    @contextlib.contextmanager
    def open(self, watch):
        """A Cluster; one of another user of this process stays open."""
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
    """A cluster that runs blocks: what a task needs, how many run at once, and what memory each
    has."""

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
                f"a machine with {_words(need)} for a task",
                _words({k: nodes[0].get(k, 0) for k in need}),
                "Lower --cpus-per-task or --gpus-per-task.",
            )
        self.nodes, self.places = len([p for p in places if p]), max(1, sum(places))
        # of a machine's memory each task has its part; of an accelerator it has what its process
        # gets
        self.memory = min(
            [MEMORY, *(n["memory"] / p for n, p in zip(nodes, places) if p and "memory" in n)]
        )
        env = {}
        if total.get("GPU") and not gpus:  # a task without a GPU sees those of its machine
            env = dict(runtime_env=dict(env_vars={"JAX_PLATFORMS": "cpu"}))
        if 0 < gpus < 1:  # JAX takes most of a device unless told
            env = dict(
                runtime_env=dict(env_vars={"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 * gpus:.3f}"})
            )
        self.remote = ray.remote(
            num_cpus=options.cpus,
            num_gpus=gpus,
            max_retries=RETRIES,
            scheduling_strategy="SPREAD",
            **env,
        )
        # one worker says who it is, so that one of another jfl refuses before anything is written
        ref = self.remote(look).remote(checkpoint.code())
        if not ray.wait([ref], timeout=WAIT)[0]:
            watch(note=f"waiting for a worker with {_words(need)}")
        self.accelerator = self._get(ref)
        self.memory = self.accelerator or self.memory

    def most(self, count: int) -> float:
        """Points of a block: two tasks for each place, so that all are busy and a lost one is a
        small part."""
        share = math.ceil(count / (2 * self.places))
        return share if self.accelerator else min(AT_ONCE, share)

    def run(self, work_blocks: list[Block], widths: dict):
        """-> (block, records) of each, in the order in which they are done; a block that is lost is
        tried again."""
        # on a CPU, compiled code is for one processor; with a GPU, Ray takes a new process for each
        # task
        cache = CONFIG.jax_compilation_cache_dir if self.local or self.accelerator else None
        remote, code, pending = self.remote(work), checkpoint.code(), {}
        try:
            for b in work_blocks:
                sent = [
                    (dataclasses.asdict(c), data, identity.signature(identity.describe(p)))
                    for c, data, p in zip(b.configs, b.data, b.plans)
                ]
                pending[remote.remote(sent, b.size, widths, code, self.memory, cache)] = b
            while pending:
                done, _ = self.ray.wait(list(pending), num_returns=1)
                records = self._get(done[0])
                yield pending.pop(done[0]), records
        finally:
            for ref in pending:
                self.ray.cancel(ref)

    def _get(self, ref):
        """The result of a task; a text is its refusal, which is raised."""
        errors = self.ray.exceptions
        try:
            result = self.ray.get(ref)
        except errors.RayTaskError as error:
            checks.fail(
                "--engine ray",
                "a task that runs on its worker",
                _first(error.cause or error),
                f"{KEPT}, perhaps with a smaller --block.",
            )
        except errors.RayError as error:
            checks.fail(
                "--engine ray",
                f"a worker that lives; {RETRIES + 1} tries of a block were lost",
                _first(error),
                f"{KEPT}.",
            )
        if isinstance(result, str):
            raise ArgumentError(result)
        return result


# --- on a worker


def look(code: dict):
    """-> bytes for the points of a block on this worker's accelerator, None for a CPU; a text if it
    must refuse."""
    return _refusal("the driver's code", code, checkpoint.code()) or (
        None if jax.default_backend() == "cpu" else blocks.memory()
    )


def work(sent: list[tuple], size: int, widths: dict, code: dict, memory: float, cache: str | None):
    """Compute a block on a worker.

    Args:
        sent: of each point the values of its config, the checksum of its data, the signature of its
            plan's description.
        size: points of the block's program, which fewer points are repeated to fill.
        widths: of the tables of rows, which all points of the sweep share.
        code: what `checkpoint.code` says on the driver.
        memory: bytes for the points computed at once.
        cache: the driver's folder of compiled programs; None: no such folder.

    Returns:
        The records of the points; or a text that says why not: what is refused once is not tried
        again.
    """
    import ray

    if refusal := _refusal("the driver's code", code, checkpoint.code()):
        return refusal
    if cache and CONFIG.jax_compilation_cache_dir is None:
        with contextlib.suppress(OSError):  # a folder of the driver's machine: perhaps none here
            os.makedirs(cache, exist_ok=True)
        if os.access(cache, os.W_OK):
            jax.config.update("jax_compilation_cache_dir", cache)
    try:
        configs = [Config(**values) for values, _, _ in sent]
        plans, built = [], {}
        for config, (_, data, description) in zip(configs, sent):
            setting = dataclasses.replace(config, seed=0)  # points of all seeds share a plan
            if setting not in built:
                built[setting] = plan = build.build(config)[0]
                here = identity.signature(identity.describe(plan))
                if refusal := _refusal(
                    "the driver's data and noise",
                    dict(data=data, plan=description),
                    dict(data=checksum(plan.fed), plan=here),
                ):
                    return refusal
            plans.append(built[setting])
    except ValueError as error:
        return str(error)
    block = Block([], configs, [], widened(plans, widths), size)
    environment, context = checkpoint.environment(), ray.get_runtime_context()
    worker = dict(
        worker=f"{context.get_node_id()[:8]}/{os.getpid()}",
        device=f"{environment['backend']} {environment['device']}",
    )
    if jax.default_backend() != "cpu":
        memory = device_memory(FULL) or memory  # of this worker's accelerator
    return [worker | measured for measured in blocks.compute(block, memory)]


def _refusal(need: str, there: dict, here: dict) -> str | None:
    differ = [
        f"{k} {there[k]} on the driver, {here[k]} on a worker" for k in there if there[k] != here[k]
    ]
    return (
        f"--engine ray: expected {need} on every worker, but got {'; '.join(differ)}. "
        "Install the same "
        f"versions of jfl and "
        "JAX and the same data (JFL_DATA_DIR) on all machines."
        if differ
        else None
    )


# --- Ray


def _ray():
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
    """Connect -> whether the cluster is one of this machine, started now."""
    local = address == "local"
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdecimal():  # Ray itself asks for minutes where nobody answers
            socket.create_connection((host.strip("[]"), int(port)), timeout=WAIT).close()
        with (
            _environment(RAY_USAGE_STATS_ENABLED="0"),
            warnings.catch_warnings(),
        ):  # what we start reports to nobody
            warnings.filterwarnings(
                "ignore", r"os\.fork\(\) was called", RuntimeWarning
            )  # Ray's children exec at once
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level="ERROR",
                **(dict(include_dashboard=False) if local else {}),
            )
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        checks.fail(
            "--address",
            "a Ray cluster that can be reached",
            f"{address!r} ({_first(error)})",
            "Start one with `ray start --head`, or leave --address out for one of this machine.",
        )
    return local


def _first(error) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}".rstrip(" .")


def _words(resources: dict) -> str:
    return " and ".join(f"{v:g} {k}" for k, v in resources.items())


@contextlib.contextmanager
def _environment(**values):
    """Environment variables for a while, where they are not set."""
    new = {k: v for k, v in values.items() if k not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
