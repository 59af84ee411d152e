"""Rounds of a `jfl.population`, whose rows and client states are on the host.

The rows of the next cohort are fetched while the device works on the current one.  Cohorts depend
only on the key and the round, so they can be drawn ahead of time.  Client states are read from the
host after the previous round has written them, and are written back after each round.
"""

import concurrent.futures
import dataclasses
import functools
import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..core import pytrees
from ..core.pytrees import Array, Key, Tree, Words
from ..core.records import FetchedCohort, Plan, Run
from ..sampling import clients as sampling
from .devices import replicated
from .round import RoundStats, advance_fetched, init_run_jit, run_sampling_key
from .sharding import SPLIT, chunk_cohort

# Numbers of client states that are copied at a time.
COPY_BLOCK = 2**18
_sampling_key_jit = jax.jit(run_sampling_key)


@functools.partial(jax.jit, donate_argnums=(0, 2))
def _step(
    run: Run, plan: Plan, sums: RoundStats, noise: Key, feed: FetchedCohort
) -> tuple[Run, RoundStats, Tree]:
    """Run one round of a fetched cohort.

    Args:
        run: the state before the round, which is donated.
        plan: the plan.
        sums: statistics of the rounds since the last evaluation, which are donated.
        noise: the noise key of the run.
        feed: the cohort.

    Returns:
        The run after the round, the sums including this round, and the cohort's new client states.
    """
    run, stats, new_states = advance_fetched(run, plan, noise, feed)
    if plan.mesh is not None:  # states are written back by every host
        new_states = jax.lax.with_sharding_constraint(new_states, replicated(plan.mesh))
    return run, pytrees.add(sums, stats), new_states


@jax.jit
def _draw_chunks(key: Key, plan: Plan, round_: Any) -> tuple[tuple[Array, ...], Array]:
    """Return the chunks of a round's cohort (see `chunk_cohort`), and its overflow."""
    cohort = sampling.draw_cohort(plan.sampler, key, round_)
    return chunk_cohort(cohort, plan), cohort.overflow


def init_population_run(key: Key, plan: Plan, words: Words, history: Words) -> Run:
    """Return the state of a run before its first round, with client states as NumPy arrays.

    Client states that are zero take no memory until they are written.

    Args:
        key: jax.random.key(seed).
        plan: the plan of a population.
        words: UInt32[4], from identity.noise_identity.
        history: UInt32[4], from identity.initial_history.
    """
    sampler, clients = plan.sampler, plan.sampler.clients
    run = init_run_jit(
        key,
        dataclasses.replace(plan, sampler=dataclasses.replace(sampler, clients=1)),
        words,
        history,
    )

    def repeat(x: Any) -> np.ndarray:
        x = np.asarray(x)
        return np.repeat(x, clients, 0) if x.any() else _zeros((clients, *x.shape[1:]), x.dtype)

    return dataclasses.replace(run, client_states=jax.tree.map(repeat, run.client_states))


def _zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return zeros that take memory page by page as they are written.

    np.zeros would get huge pages, so that writing a single number would take 2 MB.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < COPY_BLOCK or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)


def copy_states(states: Tree) -> Tree:
    """Copy client states [C, ...]; states that are zero take no memory in the copy."""

    def copy(x: Any) -> np.ndarray:
        x, step = np.asarray(x), max(1, COPY_BLOCK * len(x) // max(x.size, 1))
        out = _zeros(x.shape, x.dtype)
        for i in range(0, len(x), step):
            block = x[i : i + step]
            is_nonzero = np.flatnonzero(block.reshape(len(block), -1).any(1))
            out[i + is_nonzero] = block[is_nonzero]
        return out

    return jax.tree.map(copy, states)


class Feeder:
    """A context manager that fetches cohorts from the host and runs their rounds.

    Args:
        run: the state before the first round, without client states.
        states: the states of all clients, NumPy arrays [C, ...], which are updated in place.
        plan: the plan.
        noise: the noise key of the run.
        rounds: the number of rounds that will run.
    """

    def __init__(self, run: Run, states: Tree, plan: Plan, noise: Key, rounds: int):
        self.plan, self.states, self.noise, self.host = plan, states, noise, plan.fed.host
        self.key = _sampling_key_jit(run)
        self.next_round, self.end = int(run.round), int(run.round) + rounds
        self.pool = concurrent.futures.ThreadPoolExecutor(1)
        self.prefetched: Any = None  # a future with the result of `_fetch`

    def __enter__(self) -> Self:
        self._fetch_next()
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)

    def _fetch_next(self) -> None:
        """Draw the next cohort before the device is busy, and fetch its rows in the background."""
        self.prefetched = None
        if self.next_round < self.end:
            drawn = _draw_chunks(self.key, self.plan, self.next_round)
            self.prefetched = self.pool.submit(self._fetch, *drawn)
            self.next_round += 1

    def _fetch(self, slots: tuple[Array, ...], overflow: Array) -> tuple[Any, ...]:
        """Return a drawn cohort, the ids and occupied slots on the host, and the rows."""
        ids, is_occupied = np.asarray(slots[0]), np.asarray(slots[1]) > 0
        return slots, overflow, ids, is_occupied, self._put_on_devices(ids, self.host.fetch)

    def _put_on_devices(
        self, ids: np.ndarray, fetch: Callable[[np.ndarray], Sequence[Any]]
    ) -> tuple[Array, ...]:
        """Fetch data of clients and put it on the devices that run them.

        Args:
            ids: Int[chunks, slots].
            fetch: maps ids Int[n] to arrays [n, ...].

        Returns:
            The arrays of `fetch`, [chunks, slots, ...].
        """
        fetch_chunks = lambda ids: tuple(
            v.reshape(ids.shape + v.shape[1:]) for v in fetch(ids.reshape(-1))
        )
        if self.plan.mesh is None:
            return jax.device_put(fetch_chunks(ids))
        sharding = NamedSharding(self.plan.mesh, SPLIT)
        # Each host fetches the chunks of its own devices.
        places: Any = sharding.addressable_devices_indices_map(ids.shape).values()
        local = np.unique(np.concatenate([np.arange(len(ids))[place[0]] for place in places]))
        return tuple(
            jax.make_array_from_process_local_data(sharding, v, ids.shape[:1] + v.shape[1:])
            for v in fetch_chunks(ids[local])
        )

    def round(self, run: Run, sums: RoundStats) -> tuple[Run, RoundStats]:
        """Run one round, and add its statistics to `sums`.  Both arguments are donated."""
        slots, overflow, ids, is_occupied, rows = self.prefetched.result()
        leaves, treedef = jax.tree.flatten(self.states)
        read_states = lambda ids: [_read_rows(x, ids) for x in leaves]
        states = treedef.unflatten(self._put_on_devices(ids, read_states) if leaves else [])
        self._fetch_next()
        cohort = FetchedCohort(slots, overflow, rows, states)
        run, sums, new_states = _step(run, self.plan, sums, self.noise, cohort)
        for x, new in zip(leaves, jax.tree.leaves(new_states)):
            x[ids[is_occupied]] = np.asarray(new)[is_occupied]  # waits for the round
        return run, sums


def _read_rows(x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return rows `ids` of an array; an id past the end, of an empty slot, gives zeros."""
    exists = ids < len(x)
    return np.where(
        exists.reshape((-1,) + (1,) * (x.ndim - 1)),
        x[np.where(exists, ids, 0)],
        np.zeros((), x.dtype),
    )
