"""Rounds of a population, whose rows and client states are on the host.

The rows of the next cohort are fetched while the device works on the current one.  Cohorts depend
only on the key and the round, so they can be drawn ahead of time.  Client states are read after
the previous round has written them, and written back once per round.
"""

import concurrent.futures
import dataclasses
import functools
import mmap
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..core import pytrees
from ..core.pytrees import Array, Key, Tree, Words
from ..core.records import FetchedCohort, Plan, Run
from ..sampling import clients as sampling
from .devices import replicated
from .round import RoundStats, advance_fetched, init_run_jit, run_sampling_key
from .sharding import chunk_cohort

COPY_BLOCK = 2**18  # numbers of a state that are copied at a time
_sampling_key_jit = jax.jit(run_sampling_key)


@functools.partial(jax.jit, donate_argnums=(0, 2))
def _step(
    run: Run, plan: Plan, sums: RoundStats, noise: Key, feed: FetchedCohort
) -> tuple[Run, RoundStats, Tree]:
    run, seen, new = advance_fetched(run, plan, noise, feed)
    if plan.mesh is not None:  # states are written back by every host
        new = jax.lax.with_sharding_constraint(new, replicated(plan.mesh))
    return run, pytrees.add(sums, seen), new


@jax.jit
def _drawn(key: Key, plan: Plan, round_: Any) -> tuple[tuple[Array, ...], Array]:
    cohort = sampling.draw_cohort(plan.sampler, key, round_)
    return chunk_cohort(cohort, plan), cohort.overflow


def init_population_run(key: Key, plan: Plan, words: Words, history: Words) -> Run:
    """Return the state before the first round, with client states as NumPy arrays.

    States that are zero take no memory until they are written.
    """
    sampler, clients = plan.sampler, plan.sampler.clients
    run = init_run_jit(
        key,
        dataclasses.replace(plan, sampler=dataclasses.replace(sampler, clients=1)),
        words,
        history,
    )

    def every(x: Any) -> np.ndarray:
        x = np.asarray(x)
        return np.repeat(x, clients, 0) if x.any() else _zeros((clients, *x.shape[1:]), x.dtype)

    return dataclasses.replace(run, client_states=jax.tree.map(every, run.client_states))


def _zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return zeros that take memory page by page as they are written.

    np.zeros of such a size gets huge pages, of which a single written number takes 2 MB.
    """
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if size < COPY_BLOCK or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype)
    held = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(held, dtype).reshape(shape)


def copy_states(states: Tree) -> Tree:
    """Copy client states; blocks of zeros still take no memory."""

    def one(x: Any) -> np.ndarray:
        x, step = np.asarray(x), max(1, COPY_BLOCK * len(x) // max(x.size, 1))
        out = _zeros(x.shape, x.dtype)
        for i in range(0, len(x), step):
            some = x[i : i + step]
            there = np.flatnonzero(some.reshape(len(some), -1).any(1))
            out[i + there] = some[there]
        return out

    return jax.tree.map(one, states)


class Feeder:
    """Context manager that runs rounds and holds the rows and states that stay on the host."""

    def __init__(self, run: Run, states: Tree, plan: Plan, noise: Key, rounds: int):
        self.plan, self.noise, self.key, self.host = (
            plan,
            noise,
            _sampling_key_jit(run),
            plan.fed.host,
        )
        self.next, self.last = int(run.round), int(run.round) + rounds
        self.states = states  # numpy arrays [C, ...], written in place
        self.pool = concurrent.futures.ThreadPoolExecutor(1)
        self.coming: Any = None

    def __enter__(self) -> Self:
        self._fetch_next()
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)

    def _fetch_next(self) -> None:
        """Draw the next cohort before the device is busy, and fetch its rows in the background."""
        self.coming = None
        if self.next < self.last:
            drawn = _drawn(self.key, self.plan, self.next)
            self.coming = self.pool.submit(self._fetched, *drawn)
            self.next += 1

    def _fetched(self, slots: tuple[Array, ...], overflow: Array) -> tuple[Any, ...]:
        ids = np.asarray(slots[0])
        return slots, overflow, ids, np.asarray(slots[1]) > 0, self._shared(ids, self.host.fetch)

    def _shared(
        self, ids: np.ndarray, fetch: Callable[[np.ndarray], Sequence[Any]]
    ) -> tuple[Array, ...]:
        """Fetch the data of clients [chunks, slots] and put it on the devices that run them."""
        fetched = lambda ids: tuple(
            v.reshape(ids.shape + v.shape[1:]) for v in fetch(ids.reshape(-1))
        )
        if self.plan.mesh is None:
            return jax.device_put(fetched(ids))
        sharding = NamedSharding(self.plan.mesh, PartitionSpec("clients"))
        parts = {}  # each host fetches for its own devices
        places: Any = sharding.addressable_devices_indices_map(ids.shape).values()
        for at in places:
            span = at[0].indices(ids.shape[0])[:2]
            if span not in parts:
                parts[span] = fetched(ids[slice(*span)])
        first = next(iter(parts.values()))
        take = lambda i: lambda at: parts[at[0].indices(ids.shape[0])[:2]][i]
        return tuple(
            jax.make_array_from_callback(ids.shape[:1] + v.shape[1:], sharding, take(i))
            for i, v in enumerate(first)
        )

    def round(self, run: Run, sums: RoundStats) -> tuple[Run, RoundStats]:
        """Run one round; the buffers of `run` and `sums` are donated."""
        slots, overflow, ids, taken, rows = self.coming.result()
        leaves, treedef = jax.tree.flatten(self.states)
        own = treedef.unflatten(
            self._shared(ids, lambda at: [_read(x, at) for x in leaves]) if leaves else []
        )
        self._fetch_next()
        run, sums, new = _step(
            run, self.plan, sums, self.noise, FetchedCohort(slots, overflow, rows, own)
        )
        for x, value in zip(leaves, jax.tree.leaves(new)):
            x[ids[taken]] = np.asarray(value)[taken]  # waits for the round
        return run, sums


def _read(x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    there = ids < len(x)
    return np.where(
        there.reshape((-1,) + (1,) * (x.ndim - 1)),
        x[np.where(there, ids, 0)],
        np.zeros((), x.dtype),
    )
