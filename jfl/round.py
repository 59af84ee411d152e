"""One round as one program: draw a cohort, run its clients, release, update the server."""
import dataclasses
import functools
import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from . import check, tree
from .core import Array, Batches, Cohort, Context, Federation, Feed, Fn, Health, Key, Keys, Plan, Rows, Run
from .gradients import Grad
from .keys import Stream, bits, bits_once, fold, noise_base, stream, streams, structure, together, words
from .mesh import devices
from .privacy import mechanism as mech


class Seen(NamedTuple):
    """Sums over rounds of what the experimenter watches; outside every guarantee."""
    rounds: Array
    clients: Array
    loss: Array
    clipped: Array       # of the cohort's rows or uploads, the fraction a round
    update_norm: Array


def start(key, plan: Plan) -> Run:
    """The state before the first round; parameters come from the seed's INIT stream."""
    check.kind("start", Plan, "jfl.plan", plan=plan)
    key = check.key("start", key)
    server, own = plan.algorithm.init(plan.task.init(stream(key, Stream.INIT, 0)))
    clients = plan.sampler.clients
    own = tree.map(lambda x: jnp.broadcast_to(x, (clients,) + x.shape), own)
    zeros = [jnp.zeros((), jnp.int32) for _ in range(2 + len(Health._fields))]
    # copies, so that a run may be donated without taking the plan or the key along
    key, server, state = jax.tree.map(jnp.copy, (key, server, mech.initial(plan.release)))
    return Run(zeros[0], key, zeros[1], server, own, state, Health(*zeros[2:]))


def fingerprint(fed: Federation):
    """UInt32[4, 2]: digests of who owns which rows, and of the rows.

    Reads all data (0.05 s for the 47 million numbers of MNIST on two cores); of arrays that `jfl.federate` made once, of
    a population when it was made.
    """
    check.kind("fingerprint", Federation, "jfl.federate", fed=fed)
    if fed.host is not None:
        return jnp.asarray(fed.host.digest)
    return _owners(fed.index, fed.size, bits_once(fed.x), bits_once(fed.y))


@jax.jit
def _owners(index, size, *rows):
    owned = jnp.arange(index.shape[-1])[None] < size[:, None]
    return jnp.stack([bits(index, owned), bits(size), *rows])


def digest(plan: Plan, data=None):
    """UInt32[2]: what runs, its hyperparameters and its data.  Capacities, chunks and padding do not count."""
    if plan.paired_noise:
        return jnp.zeros(2, jnp.uint32)
    parts = _parts(plan)
    found = fingerprint(plan.fed) if data is None else data
    return fold(jnp.stack([words(structure(parts)), *together(jax.tree.leaves(parts)), *found]))


def _parts(plan):
    sampler = dataclasses.replace(plan.sampler, draw=Fn(plan.sampler.draw.function), capacity=0)
    algorithm = jax.tree.map(_as_computed, plan.algorithm, is_leaf=lambda n: isinstance(n, (Batches, Grad)))
    return plan.task, algorithm, sampler, plan.upload, plan.release, plan.weights


def recipe(plan: Plan, begun=None) -> str:
    """A digest of what draws and noise follow from, but for the data: where it differs, they may.

    It is of the functions' code as Python compiled it, and of every number, also those that were calibrated; `begun`
    is the key, or more of the state a run begins from.
    """
    rest = [getattr(plan, f.name) for f in dataclasses.fields(plan) if f.name not in ("fed", "mesh")]
    is_key = lambda x: jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)
    found = [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves((rest, plan.sampler.capacity, begun))]
    parts = [f"{x.dtype}{x.shape}".encode() + x.tobytes() for x in found]
    return hashlib.sha256(b"\0".join([structure(_parts(plan)).encode(), *parts])).hexdigest()[:16]


def _as_computed(node):
    """A node without what only says how it is stored or computed."""
    if isinstance(node, Grad):
        return dataclasses.replace(node, microbatch=None, path="auto")
    if isinstance(node, Batches) and node.scheme == "poisson":
        return dataclasses.replace(node, draw=Fn(node.draw.function, node.draw.data), batch=None)
    return node


def noise_key(run: Run, plan: Plan, data=None):
    """The key all noise of a run descends from; `data` is fingerprint(plan.fed), where a caller has it."""
    found = data if data is None or not check.concrete(data) else check.array("scan", "data", data)
    if found is not None and (found.shape != (4, 2) or found.dtype != jnp.uint32):
        check.fail("scan", "data = jfl.fingerprint(plan.fed), UInt32[4, 2]", f"{found.dtype}{list(found.shape)}",
                   "Without the digest of its data two runs could share noise.")
    return noise_base(run.key, digest(plan, data), run.attempt)


def round(run: Run, plan: Plan, noise=None) -> tuple[Run, Seen]:
    """One round.  Pure: jit it, scan it, vmap it; `noise` is noise_key(run, plan), which a loop computes once.

    The cohort is summed chunk by chunk, so only `plan.chunk` clients' models are held at once; the devices of
    `plan.mesh` take equal parts of the chunks.
    """
    check.kind("round", Run, "jfl.start", run=run)
    check.kind("round", Plan, "jfl.plan", plan=plan)
    check.on_device("round", plan.fed)
    plan = dataclasses.replace(plan, mesh=devices(plan.mesh))
    noise = noise_key(run, plan) if noise is None else noise
    cohort_key, batch_key = streams(draws_key(run), (Stream.COHORT, Stream.BATCH), run.round)
    cohort, keys, plan = plan.sampler.draw(cohort_key), _keys(run, batch_key, noise), at(plan, run.round)
    slots = chunks(cohort, plan)
    sums, new = _cohort(run, plan, keys, slots, None)
    taken = jnp.where(slots[1] > 0, slots[0], plan.sampler.clients).reshape(-1)
    own = tree.put(run.own, taken, tree.map(lambda x: x.reshape((-1,) + x.shape[2:]), new))
    return _serve(dataclasses.replace(run, own=own), plan, keys, slots, cohort.overflow, sums)


def fed_round(run: Run, plan: Plan, noise, feed: Feed) -> tuple[Run, Seen, Any]:
    """A round of a cohort that was fetched -> run, what is seen of it, what its clients remember."""
    keys, plan = _keys(run, stream(draws_key(run), Stream.BATCH, run.round), noise), at(plan, run.round)
    sums, new = _cohort(run, plan, keys, feed.slots, (feed.rows, feed.own))
    return *_serve(run, plan, keys, feed.slots, feed.overflow, sums), new


def draws_key(run: Run):
    """The key of cohorts and batches.

    A round that is released twice is charged as two samples, so another attempt draws its own: noise of its own on the
    same sample would only be averaged away.
    """
    return jax.lax.select(run.attempt > 0, stream(run.key, Stream.AGAIN, run.attempt), run.key)


def draw(key, plan: Plan, round_) -> Cohort:
    """The cohort of a round, of the run with this draws_key."""
    return plan.sampler.draw(stream(key, Stream.COHORT, round_))


def at(plan: Plan, round_) -> Plan:
    """The plan of one round: weights, clip norms and noise that change from round to round have their value."""
    upload, release = (m and mech.at(m, round_) for m in (plan.upload, plan.release))
    weights = plan.weights(round_) if isinstance(plan.weights, Fn) else plan.weights
    return dataclasses.replace(plan, upload=upload, release=release, weights=weights)


class _Keys(NamedTuple):
    batch: Key
    own: Key             # [2]: of local steps, of uploads
    release: Key


def _keys(run, batch, noise):
    keys = streams(noise, (Stream.ROWS, Stream.UPLOAD, Stream.RELEASE), run.round)
    return _Keys(batch, keys[:2], keys[2])


def chunks(cohort: Cohort, plan: Plan) -> tuple:
    """ids, count and turn as [chunks, slots of a chunk], filled up with empty slots; each device has equally many."""
    count, size = layout(plan)
    pad = count * size - plan.sampler.capacity
    fill = (plan.sampler.clients, 0, 0)
    return tuple(jnp.pad(x, (0, pad), constant_values=f).reshape(count, size)
                 for x, f in zip((cohort.ids, cohort.count, cohort.turn), fill))


def layout(plan: Plan) -> tuple[int, int]:
    """How many chunks, and slots in each."""
    slots, devices = plan.sampler.capacity, 1 if plan.mesh is None else plan.mesh.shape["clients"]
    size = min(plan.chunk or slots, -(-slots // devices))
    return -(-slots // (size * devices)) * devices, size


def _cohort(run, plan, keys, slots, fetched):
    """-> the sums over all clients of a cohort, and what each remembers [chunks, slots, ...]."""
    if plan.mesh is None:
        return _chunks(run, plan, keys, slots, fetched)

    def part(*args):                                      # a vmap over sweep points cannot see into closures here
        sums, new = _chunks(*args)
        return jax.lax.psum(sums, "clients"), new

    every, share = PartitionSpec(), PartitionSpec("clients")
    split = jax.shard_map(part, mesh=plan.mesh, in_specs=(every, every, every, share, share), out_specs=(every, share),
                          check_vma=False)
    return split(run, plan, keys, slots, fetched)


def _chunks(run, plan, keys, slots, fetched):
    """The chunks of one device, one after another."""
    some = functools.partial(_some, run, plan, keys)
    first = tree.map(lambda x: x[0], (slots, fetched))
    if slots[0].shape[0] == 1:
        sums, new = some(*first)
        return sums, tree.map(lambda x: x[None], new)
    zeros = tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(some, *first)[0])

    def add(sums, chunk):
        more, new = some(*chunk)
        return tree.add(sums, more), new

    return jax.lax.scan(add, zeros, (slots, fetched))


def _some(run, plan, keys, slots, fetched):
    """A chunk of the cohort -> what is summed over chunks, what its clients remember."""
    alg, sampler, fed, weights = plan.algorithm, plan.sampler, plan.fed, plan.weights
    ids, count, turn = slots
    taken = count > 0

    def client(own, id_, turn, rows):
        """One slot; an empty one computes on zeros and weighs nothing."""
        address = lambda key: jax.random.fold_in(jax.random.fold_in(key, id_), turn)
        rows_key, upload_key = jax.vmap(address)(keys.own)
        size = fed.size.at[id_].get(mode="fill", fill_value=0)
        ctx = Context(run.round, id_, size, weights.at[id_].get(mode="fill", fill_value=0), sampler.clients,
                      jnp.asarray(sampler.expected, jnp.float32))
        if rows is None:
            rows = Rows(fed.x, fed.y, fed.index.at[id_].get(mode="fill", fill_value=0), size)
        else:
            rows = Rows(*rows, jnp.arange(rows[1].shape[0], dtype=jnp.int32), size)
        payload, own, seen = alg.client(ctx, Keys(address(keys.batch), rows_key), run.server, own, rows)
        sent = payload if plan.upload is None else mech.alone(plan.upload, upload_key, payload, client=id_)[0]
        return sent, payload, own, seen

    rows, own = (None, tree.take(run.own, ids)) if fetched is None else fetched
    sent, payload, new, watched = jax.vmap(client)(own, ids, turn, rows)
    part = mech.contribute(plan.release, run.mechanism, sent, weights.at[ids].get(mode="fill", fill_value=0) * count)
    part = dataclasses.replace(part, form=tree.form(payload))       # the types that the server knows
    bad = taken & ~jax.vmap(tree.finite)((payload, new))
    sums = jax.tree.map(lambda x: jnp.where(taken, x, jnp.zeros((), x.dtype)).sum(dtype=x.dtype), watched)
    return (part, sums, bad.sum(dtype=jnp.int32)), new


def _serve(run, plan, keys, slots, overflow, sums):
    """What the server does with the sums of a cohort."""
    sampler, (total, watched, bad) = plan.sampler, sums
    released, state = mech.finish(plan.release, keys.release, run.mechanism, total.value,
                                  max_weight=plan.weights.max(), realised=total.weight, form=total.form)
    ctx = Context(run.round, jnp.int32(sampler.clients), jnp.int32(0), jnp.float32(1), sampler.clients,
                  jnp.asarray(sampler.expected, jnp.float32))
    server = plan.algorithm.server(ctx, run.server, released)
    present = (slots[1] > 0).sum()
    # a client that meets a clip counts as zero where it is not finite
    met, lost = (0, jnp.maximum(bad, total.nonfinite)) if mech.clips(plan.release) or mech.clips(plan.upload) else (bad, 0)
    health = Health(run.health.nonfinite + met + (~tree.finite((server, state))).astype(jnp.int32),
                    run.health.overflow + overflow + watched.overflow,
                    run.health.empty_cohort + (present == 0).astype(jnp.int32),
                    run.health.nonfinite_rows + lost + watched.nonfinite)
    many = jnp.maximum(present, 1).astype(jnp.float32)
    clipped = total.clipped / jnp.maximum(total.rows, 1) if mech.clips(plan.release) else watched.clipped / many
    seen = Seen(jnp.float32(1), present.astype(jnp.float32), watched.loss / many, clipped, tree.norm(released))
    return Run(run.round + 1, run.key, run.attempt, server, run.own, state, health), seen
