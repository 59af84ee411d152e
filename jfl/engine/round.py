"""One round of federated averaging, as one pure JAX function.

Read from `run_round` downwards.  A round is FedAvg, with noise where the plan asks for it:

    1. draw a cohort of clients             sampling.draw_cohort
    2. run each client on its own rows      _run_client
    3. clip, weight and sum their uploads   _run_chunk, _sum_over_chunks
    4. add noise, update the server         _finish_round

A cohort has K slots, some of which may be empty.  Slots run in chunks, so that only `plan.chunk`
client models are in memory at a time.  No key is carried from round to round: each is derived from
the key of the run, the round, the purpose and the client (see core/random_streams.py).

Axes: C clients, K cohort slots, N rows per client (padded).

Arguments that the functions of this file share:
    run: the state before the round.
    plan: the plan; in functions that `advance` calls, schedules are replaced by their values.
    keys: the keys of the round.
    chunk, chunks: the slots to run, (ids, times_drawn, repeat_index), each Int[slots] for one chunk
        and Int[chunks, slots] for several.  An empty slot has times_drawn 0.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from ..core import checks, contract, hashing, identity, pytrees
from ..core.pytrees import Tree, Words
from ..core.random_streams import (
    Stream,
    as_kernel_key,
    derive_noise_key,
    noise_seed_words,
    stream_key,
    stream_keys,
)
from ..core.records import (
    Array,
    Cohort,
    Context,
    Diagnostics,
    FetchedCohort,
    Fn,
    Health,
    Key,
    Keys,
    Plan,
    Rows,
    Run,
)
from ..privacy.mechanisms import chain, correlated
from ..sampling import clients as sampling
from . import sharding
from .devices import devices
from .sharding import REPLICATED, SPLIT


class RoundStats(NamedTuple):
    """Statistics of a round for the experimenter, each Float[].  No guarantee covers them.

    The loop over rounds adds them up between two evaluations: each field is then a sum over
    `rounds` rounds.
    """

    rounds: Array
    cohort_size: Array
    loss: Array  # mean training loss of the cohort, 0 if no batch had rows
    has_loss: Array  # 1 if a batch had rows, otherwise 0
    clip_fraction: Array  # of the uploads if the release clips, otherwise of the rows; 0 for none
    has_clips: Array  # 1 if there was an upload, or a row, otherwise 0
    update_norm: Array  # of the released aggregate

    @classmethod
    def zeros(cls) -> "RoundStats":
        """Return zeros, the statistics before any round."""
        return cls(*(jnp.zeros(()) for _ in cls._fields))


class RoundKeys(NamedTuple):
    """The random keys of a round."""

    batch: Key
    client_noise: Key  # [2], for the noise of local steps and of uploads
    server_noise: Key
    run_noise: Key  # the same in all rounds: noise that is correlated over rounds needs it


class ChunkSums(NamedTuple):
    """Sums over the clients of a chunk, which are then added up over chunks and devices."""

    uploads: chain.PartialSum  # clipped and weighted
    diagnostics: Diagnostics
    nonfinite_clients: Array  # Int[]; clients whose payload or new state is not finite
    num_clients: Array  # Int[]; clients that ran


# --- The round, step by step


def run_round(run: Run, plan: Plan) -> tuple[Run, RoundStats]:
    """Run one round.  The function is pure: jit it, scan it, vmap it.

    The devices of `plan.mesh` share the cohort equally.  If clients keep state, each device runs
    the clients whose states it holds.

    Args:
        run: the result of `jfl.init` or of an earlier round.
        plan: a Plan.  It may differ from the plan of the previous round; its noise is then
            independent of all earlier noise.

    Returns:
        The run after the round, and statistics for the experimenter, which no guarantee covers.
    """
    checks.require_type("run_round", Run, "jfl.init", run=run)
    checks.require_type("run_round", Plan, "jfl.plan", plan=plan)
    run = enter_plan(run, identity.noise_identity(plan))
    return advance(run, plan, run_noise_key(run))


def advance(
    run: Run, plan: Plan, noise_key: Key, sampling_key: Key | None = None
) -> tuple[Run, RoundStats]:
    """Run one round of a run that is already bound to `plan` by `enter_plan`.

    Args:
        run: the state before the round.
        plan: the plan.
        noise_key: `run_noise_key(run)`.  It does not change from round to round, so a loop computes
            it once.
        sampling_key: `run_sampling_key(run)`, likewise.  If None, it is computed here.

    Returns:
        The run after the round, and its statistics.
    """
    checks.require_device_rows("run_round", plan.fed)
    plan = dataclasses.replace(plan, mesh=devices(plan.mesh))
    if sampling_key is None:
        sampling_key = run_sampling_key(run)

    # Derive both keys in one call: on a CPU the generator costs per call, not per key.
    cohort_key, batch_key = stream_keys(sampling_key, (Stream.COHORT, Stream.BATCH), run.round)
    cohort = sampling.draw_cohort(plan.sampler, sampling_key, run.round, cohort_key)
    keys = _round_keys(run, batch_key, noise_key)
    plan = plan_at_round(plan, run.round)

    sums, client_states = _run_cohort(run, plan, keys, cohort)
    run = dataclasses.replace(run, client_states=client_states)
    return _finish_round(run, plan, keys, cohort.overflow, sums)


def plan_at_round(plan: Plan, round_: Array) -> Plan:
    """Replace the schedules of a plan (clip norms, noise, weights) by their values in a round."""
    upload = plan.upload and chain.at_round(plan.upload, round_)
    release = plan.release and chain.at_round(plan.release, round_)
    weights = plan.weights(round_) if isinstance(plan.weights, Fn) else plan.weights
    return dataclasses.replace(plan, upload=upload, release=release, weights=weights)


def _run_cohort(run: Run, plan: Plan, keys: RoundKeys, cohort: Cohort) -> tuple[ChunkSums, Tree]:
    """Run all clients of a cohort, on one device or on several.

    Returns:
        Sums over the cohort, and the states of all clients after the round, leaves [C, ...].
    """
    if sharding.num_devices(plan.mesh) == 1:
        chunks = sharding.chunk_cohort(cohort, plan)
        return _run_chunks(run, plan, keys, chunks, sampling.fills_every_slot(plan.sampler))

    # Everything is passed as an argument, because a vmap over sweep points cannot batch values that
    # a shard_map closes over.
    def run_on_device(
        client_states: Tree, run: Run, plan: Plan, keys: RoundKeys, cohort: Cohort
    ) -> tuple[ChunkSums, Tree]:
        device = jax.lax.axis_index("clients")
        run = dataclasses.replace(run, client_states=client_states)
        if not jax.tree.leaves(client_states):  # stateless clients can run on any device
            chunks = sharding.chunks_of_device(device, cohort, plan)
            return _run_chunks(run, plan, keys, chunks, sampling.fills_every_slot(plan.sampler))
        # Run the clients with states on this device, so that no state is moved.
        num_states = len(jax.tree.leaves(client_states)[0])
        chunks, overflow = sharding.chunks_by_state(device, num_states, cohort, plan)
        everyone = sampling.is_full_participation(plan.sampler)
        sums, client_states = _run_chunks(
            run, plan, keys, chunks, everyone, first_client=device * num_states
        )
        diagnostics = sums.diagnostics
        diagnostics = diagnostics._replace(overflow=diagnostics.overflow + overflow)
        return sums._replace(diagnostics=diagnostics), client_states

    # Devices hold equal numbers of states, so the last one may need padding.
    padded_states = sharding.pad_rows(run.client_states, plan.mesh)
    stateless_run = dataclasses.replace(run, client_states=())
    specs = (SPLIT, REPLICATED, REPLICATED, REPLICATED, REPLICATED)
    sums, client_states = _sum_over_devices(
        run_on_device, plan.mesh, specs, padded_states, stateless_run, plan, keys, cohort
    )
    return sums, sharding.unpad_rows(client_states, run.client_states)


def _sum_over_devices(
    run_on_device: Callable[..., tuple[ChunkSums, Tree]],
    mesh: Mesh | None,
    specs: tuple[PartitionSpec, ...],
    *arguments: Any,
) -> tuple[ChunkSums, Tree]:
    """Call a function on all devices of a mesh, add its sums, and leave its states where they are.

    Args:
        run_on_device: maps the arguments of one device to its sums and its new client states.
        mesh: the devices.
        specs: how each argument is divided among the devices.
        *arguments: the arguments.
    """

    def on_device(*arguments: Any) -> tuple[ChunkSums, Tree]:
        sums, client_states = run_on_device(*arguments)
        return sharding.psum_exact(sums), client_states

    run_on_devices = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=specs,
        out_specs=(REPLICATED, SPLIT),
        check_vma=False,
    )
    return run_on_devices(*arguments)


def _run_chunks(
    run: Run,
    plan: Plan,
    keys: RoundKeys,
    chunks: tuple[Array, ...],
    always_occupied: bool,
    first_client: Any = 0,
) -> tuple[ChunkSums, Tree]:
    """Run the chunks of one device.  The rows of all clients are on that device.

    Args:
        always_occupied: True if every chunk is known to hold a client.
        first_client: the id of the first client in `run.client_states`.

    Returns:
        Sums over the chunks, and `run.client_states` after the round.
    """
    ids, times_drawn, _ = chunks
    # Read all states before the loop and write them after it.  A loop that carried them would copy
    # all of them in each iteration.  This is safe because a client with a state has only one slot.
    # An index past the end, for an empty slot, reads zeros and writes nothing.
    state_index = jnp.where(times_drawn > 0, ids - first_client, plan.sampler.clients)

    def run_chunk(chunk: tuple[Array, ...], state_index: Array) -> tuple[ChunkSums, Tree]:
        states = pytrees.gather_rows(run.client_states, state_index)
        return _run_chunk(run, plan, keys, chunk, None, states)

    sums, new_states = _sum_over_chunks(
        run_chunk, (chunks, state_index), times_drawn, always_occupied
    )
    new_states = pytrees.map(lambda x: x.reshape((-1,) + x.shape[2:]), new_states)
    return sums, pytrees.scatter_rows(run.client_states, state_index.reshape(-1), new_states)


def _sum_over_chunks(
    run_chunk: Callable[..., tuple[ChunkSums, Tree]],
    chunks: Tree,
    times_drawn: Array,
    always_occupied: bool,
) -> tuple[ChunkSums, Tree]:
    """Run chunks sequentially and add their sums; stop after the last chunk that holds a client.

    Stopping early does not change the result, since a chunk without clients adds zeros and writes
    no state.

    Args:
        run_chunk: maps the arguments of one chunk to its sums and its new client states.
        chunks: the arguments of `run_chunk` for all chunks, leaves [chunks, ...].
        times_drawn: Int[chunks, slots].
        always_occupied: True if every chunk is known to hold a client.

    Returns:
        The sums, and the new client states, leaves [chunks, slots, ...].
    """
    num_chunks = len(times_drawn)
    first_chunk = pytrees.map(lambda x: x[0], chunks)
    if num_chunks == 1:
        sums, new_states = run_chunk(*first_chunk)
        return sums, pytrees.map(lambda x: x[None], new_states)

    # With an inlined jit, the chunk is traced once for its shapes and for the body of the loop.
    run_chunk = jax.jit(run_chunk, inline=True)
    sums_shape, states_shape = jax.eval_shape(run_chunk, *first_chunk)
    zero_sums = pytrees.map(lambda s: jnp.zeros(s.shape, s.dtype), sums_shape)

    def add_chunk(sums: ChunkSums, chunk: tuple[Any, ...]) -> tuple[ChunkSums, Tree]:
        chunk_sums, new_states = run_chunk(*chunk)
        return pytrees.add(sums, chunk_sums), new_states

    def add_chunk_number(i: Array, carry: tuple[ChunkSums, Tree]) -> tuple[ChunkSums, Tree]:
        sums, all_states = carry
        chunk = pytrees.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, False), chunks)
        sums, new_states = add_chunk(sums, chunk)
        return sums, pytrees.map(lambda x, n: x.at[i].set(n), all_states, new_states)

    with jax.named_scope("chunks"):
        if always_occupied:
            return jax.lax.scan(add_chunk, zero_sums, chunks)
        zero_states = pytrees.map(
            lambda s: jnp.zeros((num_chunks, *s.shape), s.dtype), states_shape
        )
        num_to_run = _num_chunks_to_run(times_drawn)
        return jax.lax.fori_loop(0, num_to_run, add_chunk_number, (zero_sums, zero_states))


def _num_chunks_to_run(times_drawn: Array) -> Array:
    """Return the number of chunks up to the last one that holds a client."""
    chunk_number = jnp.arange(1, len(times_drawn) + 1, dtype=jnp.int32)
    return _max_over_sweep(jnp.where((times_drawn > 0).any(1), chunk_number, 0).max())


@jax.custom_batching.custom_vmap
def _max_over_sweep(count: Array) -> Array:
    """Return `count`; under a vmap over sweep points, the largest count of any point.

    If each point had its own trip count, the vmapped loop would select between old and new sums in
    every iteration, which copies them.  With a common trip count it need not.
    """
    return count


@_max_over_sweep.def_vmap
def _max_over_sweep_vmap(size: int, batched: list[bool], count: Array) -> tuple[Array, bool]:
    return _max_over_sweep(count.max(0) if batched[0] else count), False


def _run_chunk(
    run: Run,
    plan: Plan,
    keys: RoundKeys,
    chunk: tuple[Array, ...],
    rows: tuple[Array, Array] | None,
    client_states: Tree,
) -> tuple[ChunkSums, Tree]:
    """Run the clients of one chunk in parallel and sum their uploads.

    Args:
        rows: x [slots, N, ...] and y [slots, N] if they were fetched from the host, otherwise None.
        client_states: leaves [slots, ...].

    Returns:
        The sums, and the new client states, leaves [slots, ...].
    """
    ids, times_drawn, repeat_index = chunk
    run_client = functools.partial(_run_client, run, plan, keys)
    uploads, payloads, new_states, diagnostics, zeroed = jax.vmap(run_client)(
        client_states, ids, repeat_index, rows
    )

    # An empty slot gets weight 0, and a client that was drawn twice gets twice its weight.
    weights = plan.weights.at[ids].get(mode="fill", fill_value=0) * times_drawn
    upload_sum = chain.clip_and_sum(plan.release, run.mechanism, uploads, weights)
    # The server expects the dtypes of the payload; noise may have widened those of the upload.
    upload_sum = dataclasses.replace(upload_sum, dtypes=pytrees.dtypes_of(payloads))

    occupied = times_drawn > 0
    # The clip of an upload also replaces a finite payload whose norm overflows by zero.
    nonfinite = occupied & (zeroed | ~jax.vmap(pytrees.all_finite)((payloads, new_states)))
    sum_occupied = lambda x: jnp.where(occupied, x, jnp.zeros((), x.dtype)).sum(dtype=x.dtype)
    sums = ChunkSums(
        uploads=upload_sum,
        diagnostics=jax.tree.map(sum_occupied, diagnostics),
        nonfinite_clients=nonfinite.sum(dtype=jnp.int32),
        num_clients=occupied.sum(dtype=jnp.int32),
    )
    return sums, new_states


def _run_client(
    run: Run,
    plan: Plan,
    keys: RoundKeys,
    client_state: Tree,
    client_id: Array,
    repeat_index: Array,
    rows: tuple[Array, Array] | None,
) -> tuple[Tree, Tree, Tree, Diagnostics, Array]:
    """Run the local work of one client and add noise to its upload if the plan asks for it.

    An empty slot runs too, on zeros; `_run_chunk` gives it weight 0.

    Args:
        client_state: the state of this client.
        client_id: Int[].
        repeat_index: Int[]; how often the client occurs earlier in this cohort, if clients are
            drawn with replacement.
        rows: x [N, ...] and y [N], or None (see `_run_chunk`).

    Returns:
        The upload with noise, the payload without, the new client state, the diagnostics, and
        Bool[], whether the clip of the upload replaced the payload by zero.
    """
    num_rows = plan.fed.size.at[client_id].get(mode="fill", fill_value=0)
    weight = plan.weights.at[client_id].get(mode="fill", fill_value=0)
    context = _context(run, plan, client_id, num_rows, weight)
    # Keys depend on the client, not on its slot, so that neither the order of the cohort nor the
    # chunk size changes a result.
    client_key = lambda key: jax.random.fold_in(jax.random.fold_in(key, client_id), repeat_index)
    step_noise_key, upload_noise_key = jax.vmap(client_key)(keys.client_noise)

    results = plan.algorithm.client(
        context,
        Keys(client_key(keys.batch), step_noise_key),
        run.server,
        client_state,
        _client_rows(plan, client_id, num_rows, rows),
    )
    payload, new_state, diagnostics = contract.client_results(
        plan.algorithm.name, results, client_state
    )
    if plan.upload is None:
        return payload, payload, new_state, diagnostics, jnp.zeros((), bool)

    noise_series = None
    if correlated.strategy_of(plan.upload) is not None:
        # Correlated noise combines normals of several rounds, so the mechanism needs their keys.
        upload_stream = jax.random.fold_in(keys.run_noise, Stream.UPLOAD)
        key_of_round = lambda round_: client_key(jax.random.fold_in(upload_stream, round_))
        noise_series = key_of_round, run.round
    upload, zeroed = chain.release_one(
        plan.upload, upload_noise_key, payload, client=client_id, series=noise_series
    )
    return upload, payload, new_state, diagnostics, zeroed > 0


def _client_rows(
    plan: Plan, client_id: Array, num_rows: Array, rows: tuple[Array, Array] | None
) -> Rows:
    """Return what a client can read: its part of the federation, or its fetched rows."""
    fed = plan.fed
    if rows is None:
        return Rows(fed.x, fed.y, fed.index.at[client_id].get(mode="fill", fill_value=0), num_rows)
    x, y = rows
    if fed.host.prepare_row is not None:
        x = jax.vmap(fed.host.prepare_row)(x).astype(fed.host.kind[0])
    return Rows(x, y, jnp.arange(len(y), dtype=jnp.int32), num_rows)


def _finish_round(
    run: Run, plan: Plan, keys: RoundKeys, cohort_overflow: Array, sums: ChunkSums
) -> tuple[Run, RoundStats]:
    """Add noise to the sum of a cohort's uploads, release it and let the server apply it.

    Args:
        run: the run, in which only the client states have advanced.
        cohort_overflow: Int[]; clients that were drawn but found no slot.

    Returns:
        The run after the round, and its statistics.
    """
    noise_series = None
    if correlated.strategy_of(plan.release) is not None:
        release_stream = jax.random.fold_in(keys.run_noise, Stream.RELEASE)
        noise_series = functools.partial(jax.random.fold_in, release_stream), run.round
    released, mechanism_state = chain.release_sum(
        plan.release,
        keys.server_noise,
        run.mechanism,
        sums.uploads.value,
        max_weight=plan.weights.max(),
        realised=sums.uploads.weight,
        dtypes=sums.uploads.dtypes,
        series=noise_series,
    )
    # The server's context has id C, one past the last client.
    context = _context(run, plan, jnp.int32(plan.sampler.clients), jnp.int32(0), jnp.float32(1))
    server_state = contract.server_state(
        plan.algorithm.name, plan.algorithm.server(context, run.server, released), run.server
    )

    server_is_finite = pytrees.all_finite((server_state, mechanism_state))
    health = _update_health(run.health, plan, sums, cohort_overflow, server_is_finite)
    new_run = dataclasses.replace(
        run,
        round=run.round + 1,
        server=server_state,
        mechanism=mechanism_state,
        health=health,
    )
    return new_run, _round_stats(plan, sums, released)


def _update_health(
    health: Health, plan: Plan, sums: ChunkSums, cohort_overflow: Array, server_is_finite: Array
) -> Health:
    """Count what went wrong in this round.  The host decides whether it stops the run."""
    # A clip replaces a contribution that is not finite by zero, so that it never reaches the model.
    if chain.has_clip(plan.release) or chain.has_clip(plan.upload):
        reached_the_model = 0
        zeroed = jnp.maximum(sums.nonfinite_clients, sums.uploads.nonfinite)
    else:
        reached_the_model, zeroed = sums.nonfinite_clients, 0
    return Health(
        nonfinite=health.nonfinite + reached_the_model + (~server_is_finite).astype(jnp.int32),
        overflow=health.overflow + cohort_overflow + sums.diagnostics.overflow,
        empty_cohort=health.empty_cohort + (sums.num_clients == 0).astype(jnp.int32),
        nonfinite_rows=health.nonfinite_rows + zeroed + sums.diagnostics.nonfinite,
    )


def _round_stats(plan: Plan, sums: ChunkSums, released: Tree) -> RoundStats:
    """Return the statistics of one round."""
    seen = sums.diagnostics
    clipped, count = seen.clipped, seen.measured
    if chain.has_clip(plan.release):
        clipped, count = sums.uploads.clipped, sums.uploads.count
    mean = lambda total, count: total / jnp.where(count > 0, count, 1)
    return RoundStats(
        rounds=jnp.float32(1),
        cohort_size=sums.num_clients.astype(jnp.float32),
        loss=mean(seen.loss, seen.measured),
        has_loss=jnp.float32(seen.measured > 0),
        clip_fraction=mean(clipped, count),
        has_clips=jnp.float32(count > 0),
        update_norm=pytrees.norm(released),
    )


def _context(run: Run, plan: Plan, client_id: Array, num_rows: Array, weight: Array) -> Context:
    """Return what a client, or the server, may know about the round."""
    return Context(
        round=run.round,
        client=client_id,
        size=num_rows,
        weight=weight,
        clients=plan.sampler.clients,
        cohort=jnp.asarray(plan.sampler.expected, jnp.float32),
    )


# --- The same round for a population that keeps rows and client states on the host


def advance_fetched(
    run: Run, plan: Plan, noise_key: Key, fetched: FetchedCohort
) -> tuple[Run, RoundStats, Tree]:
    """Run one round with a cohort that was fetched from the host; otherwise the same as `advance`.

    Args:
        run: the state before the round, without client states.
        plan: the plan.
        noise_key: `run_noise_key(run)`.
        fetched: slots, rows and client states of the cohort, leaves [chunks, slots, ...].

    Returns:
        The run after the round, its statistics, and the new client states of the cohort, leaves
        [chunks, slots, ...], which the caller writes back.
    """
    batch_key = stream_key(run_sampling_key(run), Stream.BATCH, run.round)
    keys = _round_keys(run, batch_key, noise_key)
    plan = plan_at_round(plan, run.round)
    sums, new_states = _run_fetched_cohort(run, plan, keys, fetched)
    return *_finish_round(run, plan, keys, fetched.overflow, sums), new_states


def _run_fetched_cohort(
    run: Run, plan: Plan, keys: RoundKeys, fetched: FetchedCohort
) -> tuple[ChunkSums, Tree]:
    """Run all clients of a fetched cohort, on one device or on several.

    Returns:
        Sums over the cohort, and its new client states, leaves [chunks, slots, ...].
    """
    chunks = (fetched.slots, fetched.rows, fetched.client_states)

    def run_chunks(run: Run, plan: Plan, keys: RoundKeys, chunks: Tree) -> tuple[ChunkSums, Tree]:
        (_, times_drawn, _), _, _ = chunks
        run_chunk = functools.partial(_run_chunk, run, plan, keys)
        always_occupied = sampling.fills_every_slot(plan.sampler)
        return _sum_over_chunks(run_chunk, chunks, times_drawn, always_occupied)

    if sharding.num_devices(plan.mesh) == 1:
        return run_chunks(run, plan, keys, chunks)
    specs = (REPLICATED, REPLICATED, REPLICATED, SPLIT)
    return _sum_over_devices(run_chunks, plan.mesh, specs, run, plan, keys, chunks)


# --- Keys


def run_sampling_key(run: Run) -> Key:
    """Return the key of all cohorts and batches of a run.

    If a round is computed and released twice, the accountant counts two independent samples.  A new
    attempt must therefore draw another sample: with the same sample, the noise of both releases
    could be averaged.
    """
    key = as_kernel_key(run.key)
    return jax.lax.select(run.attempt > 0, stream_key(key, Stream.ATTEMPT, run.attempt), key)


def run_noise_key(run: Run) -> Key:
    """Return the key from which all noise of a run is derived.

    Call `enter_plan` first: it binds the run to its plan.
    """
    words = noise_seed_words(run.plan_identity, run.plan_history, run.attempt)
    return derive_noise_key(run.key, words)


def _round_keys(run: Run, batch_key: Key, noise_key: Key) -> RoundKeys:
    """Derive the keys of a round."""
    keys = stream_keys(noise_key, (Stream.ROWS, Stream.UPLOAD, Stream.RELEASE), run.round)
    return RoundKeys(
        batch=batch_key, client_noise=keys[:2], server_noise=keys[2], run_noise=noise_key
    )


# --- The state of a run


def init(key: jax.Array, plan: Plan) -> Run:
    """Return the state of a run before its first round.

    Args:
        key: jax.random.key(seed).  Initial parameters, cohorts and batches depend on this key only.
            Noise depends on the plan as well (see `jfl.describe`).
        plan: a Plan.

    Returns:
        A Run, for `jfl.scan`, `jfl.run_round` or `jfl.simulate(start=...)`.
    """
    checks.require_type("init", Plan, "jfl.plan", plan=plan)
    plan_identity = identity.noise_identity(plan)
    plan_history = identity.initial_history(plan)
    return init_run_jit(checks.as_key("init", key), plan, plan_identity, plan_history)


def init_run(key: Key, plan: Plan, plan_identity: Words, plan_history: Words) -> Run:
    """Return the initial state of a run, given the identity of its plan.  `init` calls this in jit.

    Args:
        key: jax.random.key(seed).
        plan: a Plan.
        plan_identity: UInt32[4], from identity.noise_identity.
        plan_history: UInt32[4], from identity.initial_history.
    """
    key = checks.as_key("init", key)
    params = plan.task.init(stream_key(as_kernel_key(key), Stream.INIT, 0))
    server_state, client_state = plan.algorithm.init(params)

    num_clients = plan.sampler.clients
    repeat = lambda x: jnp.broadcast_to(x, (num_clients, *jnp.shape(x)))
    client_states = pytrees.map(repeat, client_state)
    client_states = sharding.constrain_client_states(client_states, devices(plan.mesh))

    # Copy, so that donating the run does not delete the caller's key or arrays of the plan.
    key, server_state, mechanism_state = jax.tree.map(
        jnp.copy, (key, server_state, chain.initial_state(plan.release))
    )
    zero = lambda: jnp.zeros((), jnp.int32)  # separate buffers, since the run may be donated
    run = Run(
        round=zero(),
        key=key,
        plan_identity=jnp.asarray(plan_identity),
        plan_history=jnp.asarray(plan_history),
        attempt=zero(),
        server=server_state,
        client_states=client_states,
        mechanism=mechanism_state,
        health=Health(*(zero() for _ in Health._fields)),
    )
    strategy = correlated.strategy_of(plan.release)
    if strategy is None or not strategy.memory:
        return run
    buffers = correlated.initial_buffers(strategy, _upload_sum_shapes(run, plan))
    return dataclasses.replace(run, mechanism=buffers)


init_run_jit = jax.jit(init_run)


def _upload_sum_shapes(run: Run, plan: Plan) -> Tree:
    """Return the shapes of the sum of a cohort's uploads without computing it."""

    def sum_of_one_empty_slot(run: Run, plan: Plan) -> Tree:
        keys = _round_keys(run, batch_key=run.key, noise_key=run.key)
        plan = plan_at_round(plan, run.round)
        empty_slot = tuple(jnp.zeros(1, jnp.int32) for _ in range(3))
        client_states = pytrees.map(lambda x: x[:1], run.client_states)
        rows = None
        if plan.fed.host is not None:
            x, y = plan.fed.host.fetch(np.zeros(1, np.int32))
            rows = jnp.asarray(x), jnp.asarray(y)
        sums, _ = _run_chunk(run, plan, keys, empty_slot, rows, client_states)
        return sums.uploads.value

    run = dataclasses.replace(run, key=as_kernel_key(run.key))
    return jax.eval_shape(sum_of_one_empty_slot, run, plan)


def enter_plan(run: Run, plan_identity: Words) -> Run:
    """Store in a run the identity of the plan of its next rounds, which determines their noise.

    If the plan changes after round 0, the run gets a new noise key.  The key also depends on the
    history of plans: two runs that switch to the same plan from different plans, or at different
    rounds, have different noise.  At round 0 nothing has been released, so only the identity is
    replaced.

    Args:
        run: a run.  If its arrays are NumPy arrays, the result is computed on the host.
        plan_identity: UInt32[4], from identity.noise_identity.

    Returns:
        The run with its new identity and history.
    """
    has_changed = (run.round > 0) & (run.plan_identity != plan_identity).any()
    history = hashing.combine(run.plan_history, run.plan_identity)
    history = hashing.combine(history, hashing.hash_int(run.round))
    words = (plan_identity, run.plan_history, run.round)
    xp = jnp if any(isinstance(x, jax.Array) for x in words) else np
    return dataclasses.replace(
        run,
        plan_identity=xp.asarray(plan_identity),
        plan_history=xp.where(has_changed, history, run.plan_history),
        mechanism=correlated.reset_buffers_if(run.mechanism, has_changed),
    )
