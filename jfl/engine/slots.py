"""Chunks: which slots of a cohort run at the same time, and on which device.

A slot is a place for one client of the cohort.  Empty slots have weight 0.  A chunk is a group of
slots that one device runs in parallel; a device runs its chunks sequentially.

The functions return chunks as (ids, times_drawn, repeat_index), each Int[chunks, slots].
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.pytrees import Array
from ..core.records import Cohort, Plan
from ..sampling import clients as sampling
from .sharding import num_devices

CPU_CHUNKS_PER_COHORT = 16  # for cohorts of random size


def chunk_layout(plan: Plan) -> tuple[int, int]:
    """Return how many chunks `chunk_cohort` makes, and how many slots each of them has.

    If every slot holds a client, chunks have equal sizes, so that few empty slots are added.
    """
    capacity, devices = plan.sampler.capacity, num_devices(plan.mesh)
    size = min(plan.chunk or capacity, -(-capacity // devices))
    num_chunks = -(-capacity // (size * devices)) * devices
    if sampling.fills_every_slot(plan.sampler):
        size = -(-capacity // num_chunks)
    return num_chunks, size


def chunk_cohort(cohort: Cohort, plan: Plan) -> tuple[Any, ...]:
    """Divide a cohort into chunks and fill the last ones with empty slots.

    Each device gets the same number of chunks.  Consecutive slots go to different devices: the
    empty slots are the last ones of a cohort, so every device has about the same work.
    """
    num_chunks, size = chunk_layout(plan)
    devices = num_devices(plan.mesh)
    pad = num_chunks * size - plan.sampler.capacity
    return tuple(
        jnp.pad(x, (0, pad), constant_values=f).reshape(-1, devices).T.reshape(num_chunks, size)
        for x, f in zip(cohort[:3], _empty_slot(plan))
    )


def chunks_of_device(device: Array, cohort: Cohort, plan: Plan) -> tuple[Any, ...]:
    """Return the chunks of `chunk_cohort` that belong to one device."""
    each = chunk_layout(plan)[0] // num_devices(plan.mesh)
    chunks = chunk_cohort(cohort, plan)
    return tuple(jax.lax.dynamic_slice_in_dim(x, device * each, each) for x in chunks)


def chunk_layout_by_state(plan: Plan, num_states: int) -> tuple[int, int]:
    """Return how many chunks `chunks_by_state` makes, and how many slots each of them has.

    If a cohort is drawn uniformly, a device has slots for as many clients as it gets with all but
    a negligible probability (`sampling.tail_capacity`), otherwise for as many as it can get.
    """
    sampler, devices = plan.sampler, num_devices(plan.mesh)
    if sampling.is_full_participation(sampler):
        num_chunks = -(-num_states // min(plan.chunk or num_states, num_states))
        return num_chunks, -(-num_states // num_chunks)
    slots = min(sampler.capacity, num_states)
    if sampler.scheme in ("without_replacement", "poisson", "truncated_poisson"):
        slots = min(slots, sampling.tail_capacity(sampler.capacity, 1 / devices, "mesh"))
    mean = sampler.capacity / devices
    # A CPU is as fast in small chunks, and they leave fewer slots empty.  On other devices every
    # chunk costs as many kernel launches as a whole cohort, so that nearly all clients should fit
    # into one.
    is_cpu = jax.default_backend() == "cpu"
    enough = int(np.ceil(mean / CPU_CHUNKS_PER_COHORT if is_cpu else mean + 2 * mean**0.5))
    size = min(plan.chunk or enough, enough, slots)
    return -(-slots // size), size


def chunks_by_state(
    device: Array, num_states: int, cohort: Cohort, plan: Plan
) -> tuple[tuple[Any, ...], Array]:
    """Return the chunks of the drawn clients whose states a device holds.

    A device holds the states of `num_states` consecutive clients.  Unless everybody participates,
    the number of them in a cohort is random; chunks without a client do not run.

    Returns:
        The chunks, and Int[], the number of clients that found no slot.
    """
    (num_chunks, size), empty = chunk_layout_by_state(plan, num_states), _empty_slot(plan)
    if sampling.is_full_participation(plan.sampler):
        nobody = num_states * num_devices(plan.mesh) - plan.sampler.capacity
        everyone = [jnp.pad(x, (0, nobody), constant_values=f) for x, f in zip(cohort[:3], empty)]
        first = device * num_states
        columns = [jax.lax.dynamic_slice_in_dim(x, first, num_states) for x in everyone]
        overflow = jnp.zeros((), jnp.int32)
    else:  # move the clients of this device to the front, in their order
        here = (cohort.times_drawn > 0) & (cohort.ids // num_states == device)
        columns = [jnp.where(here, x, f) for x, f in zip(cohort[:3], empty)]
        _, *columns = jax.lax.sort((~here, *columns), num_keys=1, is_stable=True)
        overflow = (columns[1][num_chunks * size :] > 0).sum(dtype=jnp.int32)
        columns = [x[: num_chunks * size] for x in columns]
    chunks = tuple(
        jnp.pad(x, (0, num_chunks * size - len(x)), constant_values=f).reshape(num_chunks, size)
        for x, f in zip(columns, empty)
    )
    return chunks, overflow


def _empty_slot(plan: Plan) -> tuple[int, int, int]:
    """Return the id, times_drawn and repeat_index of an empty slot."""
    return plan.sampler.clients, 0, 0
