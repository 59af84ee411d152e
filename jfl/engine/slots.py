"""Which slots of a cohort a device runs, chunk by chunk.

A slot is a place for a client of the cohort; an empty one weighs nothing.  A chunk is what runs at
once.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.aliases import Array
from ..core.records import Cohort, Plan
from ..sampling import clients as sampling
from .sharding import num_devices as device_count

CPU_CHUNKS_PER_COHORT = 16  # of a cohort of random size on a CPU


def chunk_layout(plan: Plan) -> tuple[int, int]:
    """How many chunks, and slots in each, of `dealt`.

    Where all slots hold clients the chunks are of equal size, so that few slots are added.
    """
    slots, devices = plan.sampler.capacity, device_count(plan.mesh)
    size = min(plan.chunk or slots, -(-slots // devices))
    count = -(-slots // (size * devices)) * devices
    return count, -(-slots // count) if sampling.fills_every_slot(plan.sampler) else size


def chunk_cohort(cohort: Cohort, plan: Plan) -> tuple[Any, ...]:
    """ids, count and turn as [chunks, slots of a chunk], filled up with empty slots.

    Each device has equally many chunks.  Slots are dealt to the devices in turn: where the last of
    a cohort are empty, no device has more to do than another.
    """
    count, size = chunk_layout(plan)
    devices = device_count(plan.mesh)
    pad = count * size - plan.sampler.capacity
    return tuple(
        jnp.pad(x, (0, pad), constant_values=f).reshape(-1, devices).T.reshape(count, size)
        for x, f in zip(cohort[:3], _empty(plan))
    )


def chunks_of_device(device: Array, cohort: Cohort, plan: Plan) -> tuple[Any, ...]:
    """The chunks of `dealt` that are one device's."""
    each = chunk_layout(plan)[0] // device_count(plan.mesh)
    return tuple(
        jax.lax.dynamic_slice_in_dim(x, device * each, each) for x in chunk_cohort(cohort, plan)
    )


def chunk_layout_by_state(plan: Plan, held: int) -> tuple[int, int]:
    """How many chunks, and slots in each, of `held_by`.

    Where a cohort is drawn uniformly there are slots for as many clients as it has of one device,
    but for a chance below OVERFLOW in HORIZON draws; else for as many as there can be.
    """
    sampler, devices = plan.sampler, device_count(plan.mesh)
    if sampling.is_full_participation(sampler):  # equal chunks: few slots are added
        count = -(-held // min(plan.chunk or held, held))
        return count, -(-held // count)
    slots = min(sampler.capacity, held)
    if sampler.scheme in ("without_replacement", "poisson", "truncated_poisson"):
        # of a Poisson cohort no more than its capacity come
        slots = min(slots, sampling.tail_capacity(sampler.capacity, 1 / devices, "mesh"))
    enough = int(np.ceil(_enough(sampler.capacity / devices)))
    size = min(plan.chunk or enough, enough, slots)
    return -(-slots // size), size


def chunks_by_state(device: Array, held: int, cohort: Cohort, plan: Plan) -> tuple[Any, ...]:
    """As `dealt_to`, of the clients whose states a device holds: `held` of them in a row.

    Where not everyone takes part, how many of a cohort these are is random.  Chunks without a
    client do not run.

    Returns:
        ids, count and turn [chunks, slots], and how many clients found no slot.
    """
    (count, size), empty = chunk_layout_by_state(plan, held), _empty(plan)
    if sampling.is_full_participation(plan.sampler):
        nobody = held * device_count(plan.mesh) - plan.sampler.capacity
        everyone = [jnp.pad(x, (0, nobody), constant_values=f) for x, f in zip(cohort[:3], empty)]
        columns = [jax.lax.dynamic_slice_in_dim(x, device * held, held) for x in everyone]
        lost = jnp.zeros((), jnp.int32)
    else:  # those that are here come first, in their order
        here = (cohort.times_drawn > 0) & (cohort.ids // held == device)
        columns = [jnp.where(here, x, f) for x, f in zip(cohort[:3], empty)]
        _, *columns = jax.lax.sort((~here, *columns), num_keys=1, is_stable=True)
        lost = (columns[1][count * size :] > 0).sum(dtype=jnp.int32)
        columns = [x[: count * size] for x in columns]
    chunks = tuple(
        jnp.pad(x, (0, count * size - len(x)), constant_values=f).reshape(count, size)
        for x, f in zip(columns, empty)
    )
    return chunks, lost


def _enough(mean: float) -> float:
    """Slots of a chunk where so many clients are expected.

    A CPU is as fast in small chunks, so the fewer slots the last one leaves empty the better.
    Elsewhere each chunk has the launches of a whole cohort, so nearly all should fit into one.
    """
    return mean / CPU_CHUNKS_PER_COHORT if jax.default_backend() == "cpu" else mean + 2 * mean**0.5


def _empty(plan: Plan) -> tuple[int, int, int]:
    """ids, count and turn of an empty slot."""
    return plan.sampler.clients, 0, 0
