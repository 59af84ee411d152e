"""Devices and processes that share a run or a sweep.

A mesh has the axis "clients", over which each cohort is divided, and for a sweep the axis "points".
Draws do not depend on the mesh: the same seed gives the same cohorts, batches and noise on any
number of devices.  Sums may differ in the last bits, because the order of summation does.
"""

import atexit
import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..core import checks, pytrees
from ..core.errors import ArgumentError
from ..core.pytrees import Tree

MESH_AXES = ("points", "clients")
SHUTDOWN_TIMEOUT_SECONDS = 20
# A longer error message is cut before it is sent to the other processes.
MAX_ERROR_BYTES = 2000
# Words in the runtime's messages about a process that is gone.
LOST_PROCESS_WORDS = (
    "gloo",
    "connection",
    "socket closed",
    "heartbeat",
    "coordination",
    "unavailable",
    "nccl",
)
__all__ = ["connect", "devices"]


def devices(mesh: str | int | Sequence[Any] | Mesh | None = "auto", points: int = 1) -> Mesh | None:
    """Return the mesh that the argument `mesh` of `jfl.simulate` and `jfl.sweep` describes.

    Args:
        mesh: None for one device; "auto" for all devices of all hosts; a number of devices; or a
            jax.sharding.Mesh with an axis "clients" and, for a sweep, an axis "points".
        points: the number of points of a sweep.  The size of the axis "points" is the largest
            divisor of the number of devices that is at most this number.

    Returns:
        A mesh, or None for a single device.

    Raises:
        ValueError: If there are fewer devices, or the mesh has axes with other names.

    Example:
        >>> devices(None) is None
        True
    """
    if mesh is None:
        return None
    if isinstance(mesh, Mesh):
        if not set(mesh.axis_names) <= set(MESH_AXES) or "clients" not in mesh.axis_names:
            checks.fail("mesh", 'axes "clients" and, for a sweep, "points"', mesh.axis_names)
        return Mesh(
            mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names)
        )
    used = jax.devices()
    if not isinstance(mesh, str) or mesh != "auto":  # comparing an array with "auto" would fail
        checks.require_integer("mesh", devices=mesh)
        wanted: Any = mesh
        hosts = jax.process_count()
        if (hosts > 1 and wanted != len(used)) or wanted > len(used):
            checks.fail(
                "mesh",
                f"{'all' if hosts > 1 else 'at most the'} {len(used)} devices that are here",
                mesh,
                'Use mesh="auto". To try on a CPU: '
                "XLA_FLAGS=--xla_force_host_platform_device_count=8.",
            )
        used = used[:wanted]
    if len(used) == 1:
        return None
    of_points = max(d for d in range(1, len(used) + 1) if len(used) % d == 0 and d <= points)
    return jax.make_mesh(
        (of_points, len(used) // of_points),
        MESH_AXES,
        devices=used,
        axis_types=(AxisType.Auto,) * 2,
    )


def spans_all_processes(mesh: Mesh | None) -> bool:
    """Return whether there are several processes, and the mesh has devices of each of them."""
    return (
        mesh is not None
        and 1 < len({d.process_index for d in mesh.devices.flat}) == jax.process_count()
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding with which every device of a mesh holds a whole array."""
    return NamedSharding(mesh, PartitionSpec())


def layout(mesh: Mesh | None, machine: str) -> str:
    """Describe the devices and processes of a run, on which the last bits of its result depend.

    Args:
        mesh: the devices of the run.
        machine: a description of this process's machine, such as its CPU and library versions.
    """
    shape = "" if mesh is None or mesh.size == 1 else f"{dict(mesh.shape)}"
    if jax.process_count() == 1:
        return shape
    mine = np.frombuffer(hashlib.sha256(machine.encode()).digest(), np.uint8)
    with explain_lost_process():
        every = np.asarray(multihost_utils.process_allgather(mine))
    return (
        f"{jax.process_count()} processes {shape} "
        f"{hashlib.sha256(every.tobytes()).hexdigest()[:16]}"
    )


def one_device(tree: Tree) -> Tree:
    """Move arrays that are on several devices to the first; with several processes, do nothing."""
    if jax.process_count() > 1:
        return tree
    many = lambda x: isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
    return jax.tree.map(lambda x: jax.device_put(x, jax.local_devices()[0]) if many(x) else x, tree)


def replicate(tree: Tree, mesh: Mesh | None, axis: str | None = None) -> Tree:
    """Copy arrays to all devices of a mesh, or split them over one of its axes.

    Args:
        tree: the arrays, equal in every process.
        mesh: the devices; None leaves the arrays where they are.
        axis: the axis of the mesh over which the first axis of the arrays is split; None puts whole
            arrays on every device.
    """
    if mesh is None:
        return tree
    sharding = NamedSharding(mesh, PartitionSpec(axis)) if axis else replicated(mesh)
    return jax.tree.map(lambda x: put(x, sharding), tree)


def put(x: Any, sharding: NamedSharding) -> jax.Array:
    """Put an array, equal in every process, on the devices of a sharding."""
    if isinstance(x, jax.Array) and x.sharding == sharding:
        return x
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    if pytrees.is_key(x):
        return pytrees.words_to_keys(put(pytrees.keys_to_words(x), sharding), x)
    return jax.make_array_from_callback(np.shape(x), sharding, np.asarray(x).__getitem__)


def connect(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    **options: Any,
) -> None:
    """Connect the processes of a run, one per host.

    Call this function before any other, with the same `coordinator` and `processes` on all hosts,
    and then pass mesh="auto" to `jfl.simulate` or `jfl.sweep`.  Without arguments, JAX finds the
    processes under SLURM, Open MPI and Kubernetes indexed jobs, and on TPU pods.  On CPUs the
    processes communicate by gloo.

    Args:
        coordinator: "HOST:PORT" of process 0.
        processes: the number of processes.
        process: the index of this process, from 0.
        **options: further arguments of jax.distributed.initialize.

    Raises:
        ValueError: If the numbers are inconsistent.
        RuntimeError: If the other processes do not connect in time (initialization_timeout seconds,
            300 by default).
    """
    if (coordinator, processes, process) != (None, None, None):
        checks.require_integer("connect", processes=processes)
        last: Any = processes
        checks.require_integer(
            "connect", "Count from 0.", min_value=0, max_value=last - 1, process=process
        )
    # A lost process is then an error in the others, not an abort.
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(coordinator, processes, process, **options)
    atexit.register(_leave)  # before JAX's own end


def _leave() -> None:
    """Wait at exit for the other processes; process 0 runs the service that connects them."""
    client = distributed.global_state.client  # JAX has no public name for this client
    if client is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.wait_at_barrier("jfl: the end", 1000 * SHUTDOWN_TIMEOUT_SECONDS)
            if is_lead_process():  # give the others time to disconnect
                time.sleep(1)


def is_lead_process() -> bool:
    """Return whether this is process 0, which reads and writes the files of a run."""
    return jax.process_index() == 0


def broadcast_from_lead(tree: Tree) -> Tree:
    """Return in every process the leaves that process 0 has."""
    if jax.process_count() == 1:
        return tree
    sent = multihost_utils.broadcast_one_to_all(
        jax.tree.map(np.asarray, pytrees.keys_to_words(tree))
    )
    return pytrees.words_to_keys(jax.tree.map(jnp.asarray, sent), tree)


def min_over_processes(number: float, mesh: Mesh | None) -> float:
    """Return the minimum over all processes of a number that each of them passes."""
    if not spans_all_processes(mesh):
        return number
    with explain_lost_process():
        return float(np.min(multihost_utils.process_allgather(np.float64(number))))


def require_agreement(where: str, text: str = "", refusal: str = "") -> None:
    """Raise in all processes if one of them cannot start, or if their work would differ.

    Args:
        where: the function that is named in messages.
        text: a description of what this process is about to do, compared over processes.
        refusal: the reason why this process cannot start; "" if it can.

    Raises:
        ValueError: With the first reason, or naming the processes whose description differs from
            that of process 0.
    """
    if jax.process_count() == 1:
        return
    reason = refusal.encode()[:MAX_ERROR_BYTES].ljust(MAX_ERROR_BYTES)
    mine = np.frombuffer(hashlib.sha256(text.encode()).digest() + reason, np.uint8)
    every = np.asarray(multihost_utils.process_allgather(mine))
    for i, row in enumerate(every[:, 32:]):  # behind the 32 bytes of the hash
        if message := row.tobytes().decode(errors="replace").strip():
            raise ArgumentError(
                message if i == jax.process_index() else f"process {i} refuses: {message}"
            )
    if other := [i for i, row in enumerate(every) if not np.array_equal(row, every[0])]:
        checks.fail(
            where,
            "the same config, data and versions in all processes",
            f"others in {other} than in 0",
            "Give all processes the same command, except for --process.",
        )


@contextlib.contextmanager
def fail_together(where: str) -> Generator[Callable[[str], None]]:
    """Make all processes fail if one of them fails before it is ready to start.

    The context manager yields a function `ready(text)`, which the block calls when its process is
    ready; `text` describes what it is about to do.  If one process raises a ValueError or OSError
    before that call, all of them raise an error.
    """
    is_ready = False

    def ready(text: str) -> None:
        nonlocal is_ready
        is_ready = True
        with explain_lost_process():
            require_agreement(where, text)

    try:
        yield ready
    except (ValueError, OSError) as error:
        if not is_ready and jax.process_count() > 1:
            with explain_lost_process():
                require_agreement(where, refusal=str(error) or type(error).__name__)
        raise


@contextlib.contextmanager
def explain_lost_process() -> Generator[None]:
    """Replace JAX's error after the loss of another process by a message of one line.

    Raises:
        ConnectionError: If another process of the run has ended.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # A collective that fails while NumPy reads its result raises a ValueError with the
        # runtime's message.
        runtime = isinstance(error, jax.errors.JaxRuntimeError) or re.match(
            r"[A-Z_]+: ", str(error)
        )
        if (
            jax.process_count() == 1
            or not runtime
            or not any(word in str(error).lower() for word in LOST_PROCESS_WORDS)
        ):
            raise
        raise ConnectionError(
            f"process {jax.process_index()}: expected all {jax.process_count()} "
            "processes of the run, but "
            f"got one that is gone "
            f"({str(error).splitlines()[0][:200]}). Read its own message; rounds since the last "
            f"checkpoint are computed "
            "again by --resume, also with another number of processes."
        ) from None
