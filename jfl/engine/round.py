"""One round as one program: draw a cohort, run its clients, release, update the server."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..core import checks, hashing, identity, pytrees
from ..core.aliases import Tree, Words
from ..core.random_streams import Stream, noise_base, noise_words, stream, streams
from ..core.records import Array, Cohort, Context, Feed, Fn, Health, Key, Keys, Plan, Rows, Run
from ..core.threefry import compact
from ..privacy.mechanisms import chain as mech
from ..privacy.mechanisms import correlated
from ..sampling import clients as sampling
from . import sharding, slots
from .devices import devices


class Seen(NamedTuple):
    """Sums over rounds of what the experimenter watches; outside every guarantee."""

    rounds: Array
    clients: Array
    loss: Array
    clipped: Array  # of the cohort's rows or uploads, the fraction a round
    update_norm: Array


def init(key: jax.Array, plan: Plan) -> Run:
    """The state of a run before its first round.

    Args:
        key: jax.random.key(seed).  The first parameters, cohorts and batches follow from it alone,
            the noise from it and from what the plan is (`jfl.describe`).
        plan: a Plan.

    Returns:
        A Run, for `jfl.scan`, `jfl.run_round` or `jfl.simulate(start=...)`.
    """
    checks.kind("init", Plan, "jfl.plan", plan=plan)
    words, history = identity.for_noise(plan), identity.of_start(plan)
    return begin_compiled(checks.key("init", key), plan, words, history)


def begin(key: Key, plan: Plan, words: Words, history: Words) -> Run:
    """`init`, where identity.for_noise(plan) and identity.of_start(plan) are known."""
    key = checks.key("init", key)
    server, own = plan.algorithm.init(plan.task.init(stream(compact(key), Stream.INIT, 0)))
    clients = plan.sampler.clients
    own = pytrees.map(lambda x: jnp.broadcast_to(x, (clients,) + x.shape), own)
    own = sharding.placed_states(own, devices(plan.mesh))
    zeros = [jnp.zeros((), jnp.int32) for _ in range(2 + len(Health._fields))]
    # copies, so that a run may be donated without taking the plan or the key along
    key, server, state = jax.tree.map(jnp.copy, (key, server, mech.initial(plan.release)))
    run = Run(
        zeros[0],
        key,
        jnp.asarray(words),
        jnp.asarray(history),
        zeros[1],
        server,
        own,
        state,
        Health(*zeros[2:]),
    )
    strategy = correlated.strategy_of(plan.release)
    if strategy is None or not strategy.memory:
        return run
    return dataclasses.replace(run, mechanism=correlated.empty(plan.release, _sum(run, plan)))


def _sum(run: Run, plan: Plan) -> Tree:
    """The shapes of what a cohort sums."""

    def one(run: Run, plan: Plan) -> Tree:
        keys, plan = _keys(run, run.key, run.key), at(plan, run.round)
        nobody = tuple(jnp.zeros(1, jnp.int32) for _ in range(3))
        own = pytrees.map(lambda x: x[:1], run.own)
        host = plan.fed.host
        rows = None if host is None else tuple(map(jnp.asarray, host.fetch(np.zeros(1, np.int32))))
        return _some(run, plan, keys, nobody, rows, own)[0][0].value

    return jax.eval_shape(one, dataclasses.replace(run, key=compact(run.key)), plan)


begin_compiled = jax.jit(begin)


def enter(run: Run, words: Words) -> Run:
    """The run as it goes on under the plan with this identity.

    From round 1 on another plan than the last one begins a noise of its own, also where two runs
    come from different plans, or from one at different rounds.  At round 0 nothing has run: what a
    run was begun for does not matter, but for what its state follows from.  On the host for a
    concrete run of NumPy's arrays.
    """
    other = (run.round > 0) & (run.identity != words).any()
    left = hashing.combine(hashing.combine(run.history, run.identity), hashing.of_number(run.round))
    xp = jnp if any(isinstance(x, jax.Array) for x in (words, run.history, run.round)) else np
    return dataclasses.replace(
        run,
        identity=xp.asarray(words),
        history=xp.where(other, left, run.history),
        mechanism=correlated.restarted(run.mechanism, other),
    )


def noise_key(run: Run) -> Key:
    """The key all noise of a run that has entered its plan descends from."""
    return noise_base(run.key, noise_words(run.identity, run.history, run.attempt))


def run_round(run: Run, plan: Plan) -> tuple[Run, Seen]:
    """One round.  Pure: jit it, scan it, vmap it.

    The cohort is summed chunk by chunk, so only `plan.chunk` clients' models are held at once; the
    devices of `plan.mesh` take equal parts of the chunks or, where clients remember, each those
    whose states it holds.

    Args:
        run: of `jfl.init`, or of an earlier round.
        plan: a Plan; another one than that of the round before has noise of its own.

    Returns:
        The run after the round, and what the experimenter sees of it, which no guarantee covers.
    """
    checks.kind("run_round", Run, "jfl.init", run=run)
    checks.kind("run_round", Plan, "jfl.plan", plan=plan)
    run = enter(run, identity.for_noise(plan))
    return one_round(run, plan, noise_key(run))


def one_round(run: Run, plan: Plan, noise: Key, draws: Key | None = None) -> tuple[Run, Seen]:
    """`run_round` of a run that has entered its plan; `noise` is noise_key(run) and `draws` is
    draws_key(run), which a loop computes once."""
    checks.on_device("run_round", plan.fed)
    plan = dataclasses.replace(plan, mesh=devices(plan.mesh))
    draws = draws_key(run) if draws is None else draws
    cohort_key, batch_key = streams(draws, (Stream.COHORT, Stream.BATCH), run.round)
    cohort, keys, plan = (
        sampling.cohort_of(plan.sampler, draws, run.round, cohort_key),
        _keys(run, batch_key, noise),
        at(plan, run.round),
    )
    sums, own = _cohort(run, plan, keys, cohort)
    return _serve(dataclasses.replace(run, own=own), plan, keys, cohort.overflow, sums)


def fed_round(run: Run, plan: Plan, noise: Key, feed: Feed) -> tuple[Run, Seen, Any]:
    """A round of a cohort that was fetched -> run, what is seen of it, what its clients
    remember."""
    keys, plan = (
        _keys(run, stream(draws_key(run), Stream.BATCH, run.round), noise),
        at(plan, run.round),
    )
    sums, new = _fed_cohort(run, plan, keys, feed)
    return *_serve(run, plan, keys, feed.overflow, sums), new


def draws_key(run: Run) -> Key:
    """The key of cohorts and batches.

    A round that is released twice is charged as two samples, so another attempt draws its own:
    noise of its own on the same sample would only be averaged away.
    """
    key = compact(run.key)
    return jax.lax.select(run.attempt > 0, stream(key, Stream.AGAIN, run.attempt), key)


def draw(key: Key, plan: Plan, round_: Any) -> Cohort:
    """The cohort of a round, of the run with this draws_key."""
    return sampling.cohort_of(plan.sampler, key, round_)


def at(plan: Plan, round_: Array) -> Plan:
    """The plan of one round: weights, clip norms and noise that change from round to round have
    their value."""
    upload, release = (m and mech.at(m, round_) for m in (plan.upload, plan.release))
    weights = plan.weights(round_) if isinstance(plan.weights, Fn) else plan.weights
    return dataclasses.replace(plan, upload=upload, release=release, weights=weights)


class _Keys(NamedTuple):
    batch: Key
    own: Key  # [2]: of local steps, of uploads
    release: Key
    noise: Key  # from which those of all rounds follow


def _keys(run: Run, batch: Key, noise: Key) -> _Keys:
    keys = streams(noise, (Stream.ROWS, Stream.UPLOAD, Stream.RELEASE), run.round)
    return _Keys(batch, keys[:2], keys[2], noise)


def _cohort(run: Run, plan: Plan, keys: _Keys, cohort: Cohort) -> tuple[Any, Tree]:
    """-> the sums over all clients of a cohort, and what every client remembers now.

    Where clients remember, each of several devices holds the states of equally many, and runs
    those of them that are drawn: no state travels.
    """
    if sharding.count(plan.mesh) == 1:
        chunks = slots.dealt(cohort, plan)
        return _chunks(run, plan, keys, chunks, sampling.fills(plan.sampler))

    def part(
        own: Tree, run: Run, plan: Plan, keys: _Keys, cohort: Cohort
    ) -> tuple[Any, Tree]:  # a vmap over sweep points cannot see into closures
        run, device = dataclasses.replace(run, own=own), jax.lax.axis_index("clients")
        if not jax.tree.leaves(own):
            chunks = slots.dealt_to(device, cohort, plan)
            sums, own = _chunks(run, plan, keys, chunks, sampling.fills(plan.sampler))
        else:
            held = len(jax.tree.leaves(own)[0])
            chunks, lost = slots.held_by(device, held, cohort, plan)
            filled = sampling.in_order(plan.sampler)
            sums, own = _chunks(run, plan, keys, chunks, filled, first=device * held)
            total, watched, *others = sums
            watched = watched._replace(overflow=watched.overflow + lost)
            sums = (total, watched, *others)
        return sharding.summed(sums), own

    every, share = PartitionSpec(), PartitionSpec("clients")
    split = jax.shard_map(
        part,
        mesh=plan.mesh,
        in_specs=(share, every, every, every, every),
        out_specs=(every, share),
        check_vma=False,
    )
    held = sharding.padded(run.own, plan.mesh)
    sums, own = split(held, dataclasses.replace(run, own=()), plan, keys, cohort)
    return sums, sharding.cut(own, run.own)


def _fed_cohort(run: Run, plan: Plan, keys: _Keys, feed: Feed) -> tuple[Any, Tree]:
    """As `_cohort`, of what was fetched; -> the sums, what each client of the cohort remembers
    [chunks, slots, ...]."""
    fetched = (feed.slots, feed.rows, feed.own)
    if sharding.count(plan.mesh) == 1:
        return _fed_chunks(run, plan, keys, fetched)

    def part(*args: Any) -> tuple[Any, Tree]:
        sums, new = _fed_chunks(*args)
        return sharding.summed(sums), new

    every, share = PartitionSpec(), PartitionSpec("clients")
    split = jax.shard_map(
        part,
        mesh=plan.mesh,
        in_specs=(every, every, every, share),
        out_specs=(every, share),
        check_vma=False,
    )
    return split(run, plan, keys, fetched)


def _chunks(
    run: Run, plan: Plan, keys: _Keys, chunks: tuple[Array, ...], filled: bool, first: Any = 0
) -> tuple[Any, Tree]:
    """The chunks of one device, where rows are on it.

    Args:
        run: its `own` are the states of clients from `first` on.
        chunks: ids, count and turn [chunks, slots].
        filled: that no chunk is without a client.

    Returns:
        The sums, and what these clients remember now.
    """

    # a state is read where it was before the round: a client is in one slot alone, and a loop that
    # wrote as it goes would copy all states in every turn
    place = jnp.where(chunks[1] > 0, chunks[0] - first, plan.sampler.clients)

    def some(chunk: tuple[Array, ...], place: Array) -> tuple[Any, Tree]:
        return _some(run, plan, keys, chunk, None, pytrees.take(run.own, place))

    sums, new = _in_turn(some, (chunks, place), chunks[1], filled)
    flat = pytrees.map(lambda x: x.reshape((-1,) + x.shape[2:]), new)
    return sums, pytrees.put(run.own, place.reshape(-1), flat)


def _fed_chunks(run: Run, plan: Plan, keys: _Keys, fetched: tuple[Any, ...]) -> tuple[Any, Tree]:
    """As `_chunks`, of what was fetched -> the sums, what clients remember [chunks, slots, ...]."""
    some = functools.partial(_some, run, plan, keys)
    return _in_turn(some, fetched, fetched[0][1], sampling.fills(plan.sampler))


def _in_turn(
    some: Callable[..., tuple[Any, Tree]], chunks: Tree, times: Array, filled: bool
) -> tuple[Any, Tree]:
    """Chunks one after another, as far as there are clients.

    An empty slot weighs nothing and remembers nothing, so what a chunk without a client would give
    are the zeros that this begins with.

    Args:
        some: a chunk -> what is summed over chunks, what its clients remember.
        times: Int[chunks, slots], 0 for an empty slot.
        filled: that no chunk is without a client.

    Returns:
        The sums, and what clients remember [chunks, slots, ...].
    """
    first = pytrees.map(lambda x: x[0], chunks)
    if len(times) == 1:
        sums, new = some(*first)
        return sums, pytrees.map(lambda x: x[None], new)
    # One trace gives the shapes and the body of the loop; the equations are those without a jit.
    some = jax.jit(some, inline=True)
    sums, new = jax.eval_shape(some, *first)
    sums = pytrees.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)

    def add(sums: Tree, chunk: tuple[Any, ...]) -> tuple[Any, Tree]:
        more, new = some(*chunk)
        return pytrees.add(sums, more), new

    def one(i: Array, carry: tuple[Any, Tree]) -> tuple[Any, Tree]:
        chunk = pytrees.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, False), chunks)
        sums, new = add(carry[0], chunk)
        return sums, pytrees.map(lambda x, n: x.at[i].set(n), carry[1], new)

    with jax.named_scope("chunks"):
        if filled:
            return jax.lax.scan(add, sums, chunks)
        new = pytrees.map(lambda s: jnp.zeros((len(times), *s.shape), s.dtype), new)
        return jax.lax.fori_loop(0, _chunks_with_clients(times), one, (sums, new))


def _chunks_with_clients(times: Array) -> Array:
    """How many chunks have to run: up to the last one with a client; times: Int[chunks, slots]."""
    chunk = jnp.arange(1, len(times) + 1, dtype=jnp.int32)
    return _most(jnp.where((times > 0).any(1), chunk, 0).max())


@jax.custom_batching.custom_vmap
def _most(count: Array) -> Array:
    """The points of a sweep run as many chunks as the one that needs most: a loop that ended for
    some of them alone would copy its sums in every turn."""
    return count


@_most.def_vmap
def _(size: int, batched: list[bool], count: Array) -> tuple[Array, bool]:
    return _most(count.max(0) if batched[0] else count), False


def _some(
    run: Run,
    plan: Plan,
    keys: _Keys,
    slots: tuple[Array, ...],
    rows: tuple[Array, ...] | None,
    own: Tree,
) -> tuple[Any, Tree]:
    """A chunk of the cohort -> what is summed over chunks, what its clients remember.

    rows: [slots, ...], or None where each client looks its own up in the federation.
    """
    alg, sampler, fed, weights = plan.algorithm, plan.sampler, plan.fed, plan.weights
    ids, count, turn = slots
    uploads_key = jax.random.fold_in(keys.noise, Stream.UPLOAD)
    taken = count > 0

    def client(own: Tree, id_: Array, turn: Array, rows: Any) -> tuple[Any, ...]:
        """One slot; an empty one computes on zeros and weighs nothing."""
        address = lambda key: jax.random.fold_in(jax.random.fold_in(key, id_), turn)
        rows_key, upload_key = jax.vmap(address)(keys.own)
        size = fed.size.at[id_].get(mode="fill", fill_value=0)
        ctx = Context(
            run.round,
            id_,
            size,
            weights.at[id_].get(mode="fill", fill_value=0),
            sampler.clients,
            jnp.asarray(sampler.expected, jnp.float32),
        )
        if rows is None:
            rows = Rows(fed.x, fed.y, fed.index.at[id_].get(mode="fill", fill_value=0), size)
        else:
            x, y = rows
            if fed.host.prepare_row is not None:
                x = jax.vmap(fed.host.prepare_row)(x).astype(fed.host.kind[0])
            rows = Rows(x, y, jnp.arange(len(y), dtype=jnp.int32), size)
        payload, own, seen = alg.client(
            ctx, Keys(address(keys.batch), rows_key), run.server, own, rows
        )
        sent, series, zeroed = payload, None, jnp.zeros((), bool)
        if correlated.strategy_of(plan.upload) is not None:
            of_round = functools.partial(jax.random.fold_in, uploads_key)
            series = (lambda number: address(of_round(number))), run.round
        if plan.upload is not None:
            sent, zeroed = mech.alone(plan.upload, upload_key, payload, client=id_, series=series)
        return sent, payload, own, seen, zeroed > 0

    sent, payload, new, watched, zeroed = jax.vmap(client)(own, ids, turn, rows)
    part = mech.contribute(
        plan.release, run.mechanism, sent, weights.at[ids].get(mode="fill", fill_value=0) * count
    )
    part = dataclasses.replace(part, form=pytrees.form(payload))  # the types that the server knows
    # an upload may also be finite and too long to be measured
    bad = taken & (zeroed | ~jax.vmap(pytrees.finite)((payload, new)))
    sums = jax.tree.map(
        lambda x: jnp.where(taken, x, jnp.zeros((), x.dtype)).sum(dtype=x.dtype), watched
    )
    return (part, sums, bad.sum(dtype=jnp.int32), taken.sum(dtype=jnp.int32)), new


def _serve(
    run: Run, plan: Plan, keys: _Keys, overflow: Array, sums: tuple[Any, ...]
) -> tuple[Run, Seen]:
    """What the server does with the sums of a cohort."""
    sampler, (total, watched, bad, present) = plan.sampler, sums
    series = None
    if correlated.strategy_of(plan.release) is not None:
        series = jax.random.fold_in(keys.noise, Stream.RELEASE), run.round
    released, state = mech.finish(
        plan.release,
        keys.release,
        run.mechanism,
        total.value,
        max_weight=plan.weights.max(),
        realised=total.weight,
        form=total.form,
        series=series,
    )
    ctx = Context(
        run.round,
        jnp.int32(sampler.clients),
        jnp.int32(0),
        jnp.float32(1),
        sampler.clients,
        jnp.asarray(sampler.expected, jnp.float32),
    )
    server = plan.algorithm.server(ctx, run.server, released)
    # a client that meets a clip counts as zero where it is not finite
    met, lost = (
        (0, jnp.maximum(bad, total.nonfinite))
        if mech.clips(plan.release) or mech.clips(plan.upload)
        else (bad, 0)
    )
    health = Health(
        run.health.nonfinite + met + (~pytrees.finite((server, state))).astype(jnp.int32),
        run.health.overflow + overflow + watched.overflow,
        run.health.empty_cohort + (present == 0).astype(jnp.int32),
        run.health.nonfinite_rows + lost + watched.nonfinite,
    )
    many = jnp.maximum(present, 1).astype(jnp.float32)
    clipped = (
        total.clipped / jnp.maximum(total.rows, 1)
        if mech.clips(plan.release)
        else watched.clipped / many
    )
    seen = Seen(
        jnp.float32(1),
        present.astype(jnp.float32),
        watched.loss / many,
        clipped,
        pytrees.norm(released),
    )
    return dataclasses.replace(
        run, round=run.round + 1, server=server, mechanism=state, health=health
    ), seen
