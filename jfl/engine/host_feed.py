"""Rounds of a population: the rows of the next cohort are fetched while the device works on this
one.

Cohorts depend on the key and the round alone, so they are drawn ahead.  What clients remember stays
on the host too: it is read once the round before has written it, and written back once a round.
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
from ..core.aliases import Array, Key, Tree, Words
from ..core.records import FetchedCohort, Plan, Run
from .devices import replicated
from .round import RoundStats, advance_fetched, draw_cohort, init_run_jit, run_sampling_key
from .slots import chunk_cohort

BLOCK = 2**18  # numbers of a state copied at once
_draws_key = jax.jit(run_sampling_key)


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
    cohort = draw_cohort(key, plan, round_)
    return chunk_cohort(cohort, plan), cohort.overflow


def init_population_run(key: Key, plan: Plan, words: Words, history: Words) -> Run:
    """The state before the first round; what clients remember is in numpy arrays, where zeros take
    no memory yet."""
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
    """Zeros that take memory by the small page that is written; np.zeros of this size takes pages
    of 2 MB."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if size < BLOCK or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype)
    held = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(held, dtype).reshape(shape)


def copy_states(states: Tree) -> Tree:
    """A copy that leaves zeros without memory."""

    def one(x: Any) -> np.ndarray:
        x, step = np.asarray(x), max(1, BLOCK * len(x) // max(x.size, 1))
        out = _zeros(x.shape, x.dtype)
        for i in range(0, len(x), step):
            some = x[i : i + step]
            there = np.flatnonzero(some.reshape(len(some), -1).any(1))
            out[i + there] = some[there]
        return out

    return jax.tree.map(one, states)


class Feeder:
    """Runs rounds and holds what stays on the host: `with Feeder(run, states, plan, noise, rounds)
    as feeder`."""

    def __init__(self, run: Run, states: Tree, plan: Plan, noise: Key, rounds: int):
        self.plan, self.noise, self.key, self.host = plan, noise, _draws_key(run), plan.fed.host
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
        """Draw the next cohort now, before the device is busy; fetch its rows beside the device's
        work."""
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
        """What `fetch` finds of clients [chunks, slots], on the devices that work on them."""
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
        """One round; `run` and `sums` are consumed."""
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
