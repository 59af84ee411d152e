"""One round as one program: draw a cohort, run its clients, release, update the server."""
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import check, tree
from .core import Array, Batches, Context, Federation, Fn, Health, Keys, Plan, Rows, Run
from .gradients import Grad
from .keys import Stream, as_key, bits, bits_once, fold, noise_base, stream, streams, structure, words
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
    key = as_key(key)
    server, own = plan.algorithm.init(plan.task.init(stream(key, Stream.INIT, 0)))
    clients = plan.sampler.clients
    own = tree.map(lambda x: jnp.broadcast_to(x, (clients,) + x.shape), own)
    zeros = [jnp.zeros((), jnp.int32) for _ in range(5)]
    # copies, so that a run may be donated without taking the plan or the key along
    key, server, state = jax.tree.map(jnp.copy, (key, server, mech.initial(plan.release)))
    return Run(zeros[0], key, zeros[1], server, own, state, Health(*zeros[2:]))


def fingerprint(fed: Federation):
    """UInt32[4, 2]: digests of who owns which rows, and of the rows.

    Reads all data (0.05 s for the 47 million numbers of MNIST on two cores); of arrays that `jfl.federate` made once.
    """
    return _owners(fed.index, fed.size, bits_once(fed.x), bits_once(fed.y))


@jax.jit
def _owners(index, size, *rows):
    owned = jnp.arange(index.shape[-1])[None] < size[:, None]
    return jnp.stack([bits(index, owned), bits(size), *rows])


def digest(plan: Plan, data=None):
    """UInt32[2]: what runs, its hyperparameters and its data.  Capacities, chunks and padding do not count."""
    if plan.paired_noise:
        return jnp.zeros(2, jnp.uint32)
    sampler = dataclasses.replace(plan.sampler, draw=Fn(plan.sampler.draw.function), capacity=0)
    algorithm = jax.tree.map(_as_computed, plan.algorithm, is_leaf=lambda n: isinstance(n, (Batches, Grad)))
    parts = (plan.task, algorithm, sampler, plan.upload, plan.release, plan.weights)
    leaves = [bits(x) for x in jax.tree.leaves(parts)]
    return fold(words(structure(parts)), *leaves, *(fingerprint(plan.fed) if data is None else data))


def _as_computed(node):
    """A node without what only says how it is stored or computed."""
    if isinstance(node, Grad):
        return dataclasses.replace(node, microbatch=None, path="auto")
    if isinstance(node, Batches) and node.scheme == "poisson":
        return dataclasses.replace(node, draw=Fn(node.draw.function, node.draw.data), batch=None)
    return node


def noise_key(run: Run, plan: Plan, data=None):
    """The key all noise of a run descends from; `data` is fingerprint(plan.fed), where a caller has it."""
    if data is not None and (np.shape(data) != (4, 2) or jnp.result_type(data) != jnp.uint32):
        check.fail("scan", "data = jfl.fingerprint(plan.fed), UInt32[4, 2]", f"{jnp.result_type(data)}{list(np.shape(data))}",
                   "Without the digest of its data two runs could share noise.")
    return noise_base(run.key, digest(plan, data), run.attempt)


def round(run: Run, plan: Plan, noise=None) -> tuple[Run, Seen]:
    """One round.  Pure: jit it, scan it, vmap it; `noise` is noise_key(run, plan), which a loop computes once.

    The cohort is summed chunk by chunk, so only `plan.chunk` clients' models are held at once.
    """
    alg, sampler, fed = plan.algorithm, plan.sampler, plan.fed
    noise = noise_key(run, plan) if noise is None else noise
    weights = plan.weights(run.round) if isinstance(plan.weights, Fn) else plan.weights
    cohort_key, batch_key = streams(run.key, (Stream.COHORT, Stream.BATCH), run.round)
    *own_keys, release_key = streams(noise, (Stream.ROWS, Stream.UPLOAD, Stream.RELEASE), run.round)
    cohort = sampler.draw(cohort_key)
    upload, release = (m and mech.at(m, run.round) for m in (plan.upload, plan.release))

    def client(own, id_, turn):
        """One slot; an empty one computes on zeros and weighs nothing."""
        address = lambda key: jax.random.fold_in(jax.random.fold_in(key, id_), turn)
        rows_key, upload_key = jax.vmap(address)(jnp.stack(own_keys))
        size = fed.size.at[id_].get(mode="fill", fill_value=0)
        ctx = Context(run.round, id_, size, weights.at[id_].get(mode="fill", fill_value=0), sampler.clients,
                      jnp.asarray(sampler.expected, jnp.float32))
        rows = Rows(fed.x, fed.y, fed.index.at[id_].get(mode="fill", fill_value=0), size)
        payload, own, seen = alg.client(ctx, Keys(address(batch_key), rows_key), run.server, own, rows)
        if upload is not None:
            alone = tree.map(lambda x: x[None], payload)
            payload, _ = mech.release(upload, upload_key, (), alone, jnp.ones(1), client=id_)
        return payload, own, seen

    def some(own, slots):
        """A chunk of the cohort -> what is summed over chunks, what its clients remember."""
        ids, count, turn = slots
        taken = count > 0
        payload, new, watched = jax.vmap(client)(tree.take(own, ids), ids, turn)
        part = mech.contribute(release, run.mechanism, payload, weights.at[ids].get(mode="fill", fill_value=0) * count)
        bad = taken & ~jax.vmap(tree.finite)((payload, new))
        sums = jax.tree.map(lambda x: jnp.where(taken, x, jnp.zeros((), x.dtype)).sum(dtype=x.dtype), watched)
        return (part, sums, bad.sum(dtype=jnp.int32)), tree.put(own, jnp.where(taken, ids, sampler.clients), new)

    def add(carry, slots):
        sums, own = some(carry[1], slots)
        return (tree.add(carry[0], sums), own), None

    chunks = _chunks(cohort, plan)
    if chunks[0].shape[0] == 1:
        sums, own = some(run.own, tree.map(lambda x: x[0], chunks))
    else:
        zeros = jax.eval_shape(some, run.own, tree.map(lambda x: x[0], chunks))[0]
        zeros = tree.map(lambda s: jnp.zeros(s.shape, s.dtype), zeros)
        (sums, own), _ = jax.lax.scan(add, (zeros, run.own), chunks)
    total, watched, bad = sums

    released, state = mech.finish(release, release_key, run.mechanism, total.value,
                                  max_weight=weights.max(), realised=total.weight)
    ctx = Context(run.round, jnp.int32(sampler.clients), jnp.int32(0), jnp.float32(1), sampler.clients,
                  jnp.asarray(sampler.expected, jnp.float32))
    server = alg.server(ctx, run.server, released)
    present = (cohort.count > 0).sum()
    health = Health(run.health.nonfinite + bad + (~tree.finite((server, state))).astype(jnp.int32),
                    run.health.overflow + cohort.overflow + watched.overflow,
                    run.health.empty_cohort + (present == 0).astype(jnp.int32))
    slots = jnp.maximum(present, 1).astype(jnp.float32)
    clipped = total.clipped / jnp.maximum(total.rows, 1) if mech.clips(plan.release) else watched.clipped / slots
    seen = Seen(jnp.float32(1), present.astype(jnp.float32), watched.loss / slots, clipped, tree.norm(released))
    return Run(run.round + 1, run.key, run.attempt, server, own, state, health), seen


def _chunks(cohort, plan):
    """The cohort's slots as [chunks, plan.chunk], filled up with empty ones."""
    slots = (cohort.ids, cohort.count, cohort.turn)
    size = plan.chunk or plan.sampler.capacity
    pad = -plan.sampler.capacity % size
    fill = (plan.sampler.clients, 0, 0)
    return tuple(jnp.pad(x, (0, pad), constant_values=f).reshape(-1, size) for x, f in zip(slots, fill))
