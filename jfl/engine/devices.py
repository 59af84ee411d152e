"""Devices and hosts: which of them share a run or a sweep.

A mesh has the axes "points", over which the points of a sweep are spread, and "clients", over which
each cohort is. Every draw is addressed, so that the same seed gives the same cohorts, batches and
noise on any number of devices; what is summed differs by the order of summation.
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

from ..core import checks
from ..core.aliases import Tree
from ..core.errors import ArgumentError

MESH_AXES = ("points", "clients")
SHUTDOWN_TIMEOUT_SECONDS = 20  # seconds
MAX_REFUSAL_BYTES = 2000  # bytes of a refusal that travel
LOST_PROCESS_WORDS = (
    "gloo",
    "connection",
    "socket closed",
    "heartbeat",
    "coordination",
    "unavailable",
    "nccl",
)  # in messages
__all__ = ["connect", "devices"]


def devices(mesh: str | int | Sequence[Any] | Mesh | None = "auto", points: int = 1) -> Mesh | None:
    """The mesh that an argument `mesh=` names; None for one device alone.

    Args:
        mesh: None; "auto", all devices of all hosts; a number of devices; or a jax.sharding.Mesh
            with an axis "clients", for a sweep also "points".
        points: of a sweep; they are spread over as many devices as they keep busy, clients over the
            rest.

    Raises:
        ValueError: where there are fewer devices, or axes of other names.

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
    every = jax.devices()
    if not isinstance(mesh, str) or mesh != "auto":  # an array has no truth of its own
        checks.whole("mesh", devices=mesh)
        wanted: Any = mesh
        if wanted > len(every):
            checks.fail(
                "mesh",
                f"at most the {len(every)} devices that are here",
                mesh,
                "To try on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count=8.",
            )
        if jax.process_count() > 1 and mesh != len(every):
            checks.fail(
                "mesh",
                f"all {len(every)} devices of the {jax.process_count()} processes",
                mesh,
                'Use mesh="auto".',
            )
        every = every[:wanted]
    if len(every) == 1:
        return None
    lines = max(d for d in range(1, len(every) + 1) if len(every) % d == 0 and d <= points)
    return jax.make_mesh(
        (lines, len(every) // lines), MESH_AXES, devices=every, axis_types=(AxisType.Auto,) * 2
    )


def spans_all_processes(mesh: Mesh | None) -> bool:
    """True if all of several processes have a part of it."""
    return (
        mesh is not None
        and 1 < len({d.process_index for d in mesh.devices.flat}) == jax.process_count()
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def layout(mesh: Mesh | None, machine: str) -> str:
    """How a cohort is divided, and a digest of what each process says of its machine: another way
    has other last bits."""
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
    """What was spread over several devices of this process, on the first one."""
    if jax.process_count() > 1:
        return tree
    many = lambda x: isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
    return jax.tree.map(lambda x: jax.device_put(x, jax.local_devices()[0]) if many(x) else x, tree)


def replicate(tree: Tree, mesh: Mesh | None, axis: str | None = None) -> Tree:
    """Arrays put on all devices of a mesh, whole, or split along `axis` of it; every host has the
    same ones."""
    if mesh is None:
        return tree
    sharding = NamedSharding(mesh, PartitionSpec(axis)) if axis else replicated(mesh)
    return jax.tree.map(lambda x: put(x, sharding), tree)


def put(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array that every host has, on devices of all of them."""
    if isinstance(x, jax.Array) and x.sharding == sharding:
        return x
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.make_array_from_callback(np.shape(x), sharding, np.asarray(x).__getitem__)


def connect(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    **options: Any,
) -> None:
    """Join the processes of a run, one on each host: call it first, alike on all of them, then use
    mesh="auto".

    Without arguments JAX finds them itself under SLURM, Open MPI, Kubernetes with its indexed jobs,
    and on TPU pods; elsewhere say coordinator="HOST:PORT" of process 0, how many processes and
    which one this is.  On CPUs they talk over gloo.

    Raises:
        ValueError: where the numbers do not fit, RuntimeError where the others do not come
            (initialization_timeout seconds, default 300).
    """
    told = (coordinator, processes, process)
    if any(v is not None for v in told):
        if None in told:
            checks.fail(
                "connect", "coordinator, processes and process together, or none of them", told
            )
        checks.whole("connect", processes=processes)
        checks.whole("connect", least=0, process=process)
        if process is not None and processes is not None and process >= processes:
            checks.fail("connect", f"process below processes={processes}", process, "Count from 0.")
    jax.config.update(
        "jax_enable_recoverability", True
    )  # a lost process is an error here, not an abort
    jax.distributed.initialize(coordinator, processes, process, **options)
    atexit.register(_leave)  # before JAX's own end


def _leave() -> None:
    """At the end wait for the others, a while: the service that they say goodbye to runs in process
    0."""
    client = distributed.global_state.client  # JAX has no public name for it
    if client is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.wait_at_barrier("jfl: the end", 1000 * SHUTDOWN_TIMEOUT_SECONDS)
            if is_lead_process():
                time.sleep(1)


def is_lead_process() -> bool:
    """True in the process that reads and writes files: the first, or the only one."""
    return jax.process_index() == 0


def broadcast_from_lead(tree: Tree) -> Tree:
    """The leaves of process 0, in all processes."""
    if jax.process_count() == 1:
        return tree
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    plain = jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), tree)
    sent = multihost_utils.broadcast_one_to_all(plain)
    back = lambda x, v: jax.random.wrap_key_data(v, impl=jax.random.key_impl(x)) if is_key(x) else v
    return jax.tree.map(back, tree, jax.tree.map(jnp.asarray, sent))


def min_over_processes(number: float, mesh: Mesh | None) -> float:
    """The smallest of what the processes of a mesh say."""
    if not spans_all_processes(mesh):
        return number
    with explain_lost_process():
        return float(np.min(multihost_utils.process_allgather(np.float64(number))))


def require_agreement(where: str, text: str = "", refusal: str = "") -> None:
    """Of several processes: what one refuses all refuse, and so they do if they say different
    texts.

    Raises:
        ValueError: with the first refusal, or naming the processes whose text differs from the
            first one's.
    """
    if jax.process_count() == 1:
        return
    said = refusal.encode()[:MAX_REFUSAL_BYTES].ljust(MAX_REFUSAL_BYTES)
    mine = np.frombuffer(hashlib.sha256(text.encode()).digest() + said, np.uint8)
    every = np.asarray(multihost_utils.process_allgather(mine))
    for i, words in enumerate(every[:, 32:]):
        if message := words.tobytes().decode(errors="replace").strip():
            raise ArgumentError(
                message if i == jax.process_index() else f"process {i} refuses: {message}"
            )
    if other := [i for i, one in enumerate(every) if not np.array_equal(one, every[0])]:
        checks.fail(
            where,
            "the same config, data and versions in all processes",
            f"others in {other} than in 0",
            "Give all processes the same command, but for --process.",
        )


@contextlib.contextmanager
def fail_together(where: str) -> Generator[Callable[[str], None]]:
    """Give what all processes do before they begin a function to say that this one is ready; a
    refusal before is all's."""
    done = []

    def ready(text: str) -> None:
        done.append(True)
        with explain_lost_process():
            require_agreement(where, text)

    try:
        yield ready
    except (ValueError, OSError) as error:
        if not done and jax.process_count() > 1:
            with explain_lost_process():
                require_agreement(where, refusal=str(error) or type(error).__name__)
        raise


@contextlib.contextmanager
def explain_lost_process() -> Generator[None]:
    """Of several processes, say in one line that another one is gone.

    Raises:
        ConnectionError: in place of what the runtime says of it.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # a collective that fails while NumPy takes its result is a ValueError with the runtime's
        # words
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
            f"process {jax.process_index()}: need all {jax.process_count()} processes of the run; "
            f"got one that is gone "
            f"({str(error).splitlines()[0][:200]}). Read its own message; rounds since the last "
            f"checkpoint are computed "
            "again by --resume, also with another number of processes."
        ) from None
