"""A plan with a worst-case canary in it, and the same plan with its neighbour.

A canary is what moves a release as far as the noise is meant to hide.  It goes through the plan's
own chains, samplers, weights and server; what is replaced is the data, and what is learned from
it, so that nothing else moves the release:

- of a record: the loss is linear in the parameters, with a slope given by the row, so a row's
  gradient is the same whatever the parameters are, and the chain clips it.
- of a client: its upload is replaced, before the plan's own chain clips it.
- of a record under the noise of its client: such a row goes through the client's own training, and
  turns the upload that the chain clips.

Neighbours: under "replace_one" the canary points the other way, and where elements are drawn the
others point there too (else most of the distance is lost); under "add_remove" it is zero.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core import checks, pytrees
from ..core.errors import NotAnalysable
from ..core.records import (
    Algorithm,
    Context,
    Diagnostics,
    Federation,
    Fn,
    Keys,
    Mechanism,
    Plan,
    Rows,
    Task,
    named,
)
from ..gradients.per_example import Grad
from ..privacy.ledger.entry import Entry, effective
from ..privacy.ledger.participation import share_of
from ..privacy.mechanisms import chain as mech
from ..privacy.mechanisms import haar_bands as bands
from ..privacy.mechanisms.stages import total
from ..sampling import clients as sampling

FAR = 1e4  # times its bound: how long a canary is before it is clipped


class Experiment(NamedTuple):
    """Two plans that one unit tells apart, and what is known of it.

    Attributes:
        inside: with the canary.
        outside: with its neighbour, a plan of the same structure.
        law: Float64[m], how probable it is that the canary counts 0, 1, ... times in what is seen
            of a round; None where that is not known.
        canary: what was put in, in words.
        adversary: what is seen, in words.
    """

    inside: Plan
    outside: Plan
    law: np.ndarray | None
    canary: str
    adversary: str


class Watched(NamedTuple):
    """A server that also remembers what the adversary saw."""

    state: Any
    seen: Any  # Float[R, k]


def experiment(plan: Plan, entry: Entry, rounds: int) -> Experiment:
    """The canary that costs `entry` most, in a plan of its kind.

    The server knows who takes part and sees each upload, so of it the plan is run for the canary's
    client alone, in every round, and the release is its upload.

    Args:
        plan: what is audited.
        entry: of its ledger: whose privacy, and against whom.
        rounds: how many are seen.

    Raises:
        NotAnalysable: for releases that no canary here reaches.
    """
    if entry.implied and entry.adjacency != "replace_one":
        raise NotAnalysable(
            f"jfl.audit: need the unit that the noise is for; got unit={entry.unit!r} and "
            f"adjacency={entry.adjacency!r}, whose guarantee follows from that of clients. "
            "Audit unit='client'."
        )
    client, payload = _client(plan, entry), None
    if entry.unit == "client" or entry.implied:
        payload = _payload(plan)
    if entry.view == "server":
        plan, client = _alone(plan, client)
    if entry.unit == "client":
        made, canary = _of_a_client(plan, entry, client, rounds, payload)
    elif entry.implied:
        made, canary = _of_a_trained_record(plan, client, rounds, payload)
    else:
        made, canary = _of_a_record(plan, entry, client, rounds)
    law = _law(plan, entry, client)
    seen = "each upload of its client" if entry.view == "server" else "each aggregate"
    if mech.adaptive(plan.release):
        seen += " and clip norm"
    return Experiment(*made, law, canary, f"{seen} of {rounds} rounds")


def _client(plan, entry):
    """The client that has least noise, then comes most often, then has fewest rows or most
    weight."""
    rows = np.asarray(plan.fed.size).reshape(-1)
    count = len(rows)
    least = np.full(count, np.inf)
    for part in entry.parts:
        level = np.asarray(effective(part), np.float64).min(axis=0)
        least = np.minimum(least, np.broadcast_to(level, (count,)))
    often = -_shares(plan.sampler) if entry.view == "third_party" else -np.ones(count)
    if entry.unit == "example" and not entry.implied:
        order = np.lexsort((rows, often, least))
        return int(next(c for c in order if rows[c] > 0))
    weights = np.asarray(plan.weights(0) if isinstance(plan.weights, Fn) else plan.weights)
    order = np.lexsort((often * weights, least))
    if entry.implied:
        order = [c for c in order if rows[c] > 0]
    if not _votes(plan, entry):
        return int(order[0])
    if isinstance(plan.weights, Fn):
        raise NotAnalysable(
            "jfl.audit: need weights that stay, for an adaptive clip under add_remove; got a "
            "function of the round. Audit the plan with the weights of one round."
        )
    # its absence must not change the largest weight, which the noise follows
    for c in order:
        others = np.delete(weights, c)
        if others.size and others.max() == weights.max():
            return int(c)
    raise NotAnalysable(
        "jfl.audit: need a second client, for an adaptive clip under add_remove; got one, whose "
        "absence would take the noise along. Audit a plan with more clients."
    )


def _votes(plan, entry):
    """True if the absence of a client shows in the clip norm too."""
    return entry.adjacency == "add_remove" and mech.adaptive(plan.release)


def _shares(sampler):
    """Float64[C], the probability that one draw takes a client; of latencies, how often in 1,000
    cohorts."""
    if sampler.scheme != "first_responders":
        return np.array(np.broadcast_to(share_of(sampler), (sampler.clients,)), np.float64)
    drawn = jax.vmap(sampler.draw)(jax.random.split(jax.random.key(0), 1000))
    ids = np.asarray(drawn.ids)[np.asarray(drawn.count) > 0]
    return np.bincount(ids, minlength=sampler.clients)[: sampler.clients] / 1000


def _alone(plan, client):
    """The plan of one client alone, and its number there; of the whole federation where noise
    changes from round to round for each client."""
    count = plan.sampler.clients
    levels = [
        jnp.shape(s.noise(0)) if isinstance(s.noise, Fn) else jnp.shape(s.noise)
        for m in (plan.upload, *(r.mechanism for r in plan.algorithm.releases))
        for s in (m.stages if m is not None else ())
        if s.noise is not None
    ]
    release = Mechanism((total(),), plan.release.adjacency)
    if any(levels) and count > 1:
        only = np.zeros(count, np.float32)
        only[client] = count
        everyone = sampling.full(count)
        return dataclasses.replace(
            plan, sampler=everyone, weights=jnp.asarray(only), release=release, chunk=count
        ), client
    index = np.asarray(plan.fed.index) if plan.fed.host is None else None
    rows = int(np.asarray(plan.fed.size).reshape(-1)[client])
    width = rows if index is None else index.shape[1]
    return dataclasses.replace(
        plan,
        fed=_federation(np.zeros(rows, np.float32), [np.arange(rows)], width),
        sampler=sampling.full(1),
        weights=jnp.ones(1, jnp.float32),
        release=release,
        chunk=1,
    ), 0


def _federation(x, index, width=None):
    """Clients that own the rows `index` [C][rows] of x [n], which is all that a row holds."""
    sizes = np.array([len(i) for i in index], np.int32)
    padded = np.zeros((len(index), max(width or 0, 1, sizes.max(initial=1))), np.int32)
    for c, i in enumerate(index):
        padded[c, : len(i)] = i
    nothing = np.zeros((1,), np.float32)
    return Federation(
        *map(jnp.asarray, (x, np.zeros_like(x), padded, sizes, nothing, nothing)),
        jnp.zeros((len(index), 0), jnp.int32),
        jnp.zeros(len(index), jnp.int32),
    )


def _rows_of(fed):
    """Which rows each client has, and how many slots a client has."""
    sizes = np.asarray(fed.size).reshape(-1)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    width = None if fed.host is not None else fed.index.shape[1]
    return [np.arange(a, a + n) for a, n in zip(starts, sizes)], int(starts[-1]), width


# --- records


def _of_a_record(plan, entry, client, rounds):
    release = plan.algorithm.releases[0]
    params = jax.eval_shape(plan.task.init, jax.random.key(0))
    if any(stage.declared for stage in release.mechanism.stages):
        raise NotAnalysable(
            "jfl.audit: need a chain that clips; got a bound that is declared of a loss. The "
            "canary is a loss of its own, of which nothing was declared."
        )
    row, weight, words = _canary(release.mechanism, params, rounds)
    if release.steps:
        words += " (the bound covers a change of every step, which one row seldom reaches)"
    index, count, width = _rows_of(plan.fed)
    replaced = entry.adjacency == "replace_one"
    # noise that is added once covers a change of every step: there the others stay out of the way
    drawn = release.batches.scheme in ("without_replacement", "with_replacement", "epochs")
    others = -1.0 if replaced and drawn and not release.steps else 0.0
    x = np.zeros(max(count, 1), np.float32)
    x[index[client]] = others
    pair = []
    for value in (1.0, -1.0 if replaced else 0.0):
        x[index[client][0]] = value
        fed = _federation(x.copy(), index, width)
        pair.append(_on_slopes(plan, fed, row, _watched(plan.algorithm, weight, rounds, None)))
    against = "the same row the other way" if replaced else "no row"
    around = ", all others there too" if others else ""
    return pair, f"a row {words}, against {against}{around}"


def _on_slopes(plan, fed, slope, algorithm):
    """The plan on rows that are slopes of a loss, x times `slope`, in place of its own loss."""
    loss = Fn(_linear, dict(slope=slope))
    grads = lambda node: isinstance(node, Grad)
    path = lambda g: "auto" if g.path == "bookkeeping" else g.path
    put = lambda g: dataclasses.replace(g, loss=loss, path=path(g)) if grads(g) else g
    algorithm = jax.tree.map(put, algorithm, is_leaf=grads)
    task = Task(init=plan.task.init, loss=loss)
    return dataclasses.replace(plan, fed=fed, task=task, algorithm=algorithm, mesh=None)


def _of_a_trained_record(plan, client, rounds, payload):
    """A row that turns the upload of its client, however many others there are: nothing bounds what
    it does to the client's own training, but the clip of what comes out."""
    row, weight, words = _canary(_clip_of_uploads(plan), payload, rounds)
    params = jax.eval_shape(plan.task.init, jax.random.key(0))
    shapes = [v.shape for v in jax.tree.leaves(params)]
    first = lambda tree: jax.tree.leaves(tree)[: len(shapes)]
    if [v.shape for v in first(row)] != shapes:
        checks.fail(
            "jfl.audit",
            "uploads made of copies of the parameters",
            [v.shape for v in jax.tree.leaves(row)],
            error=NotAnalysable,
        )
    index, count, width = _rows_of(plan.fed)
    # a client takes the mean over its rows
    largest = min(float(jnp.finfo(v.dtype).max) for v in jax.tree.leaves(payload))
    longer = min(len(index[client]), max(1.0, 1e-2 * largest / float(pytrees.norm(row))))
    slope = jax.tree.unflatten(jax.tree.structure(params), [longer * v for v in first(row)])
    x, pair = np.zeros(max(count, 1), np.float32), []
    for value in (-1.0, 1.0):  # training goes down the slope
        x[index[client][0]] = value
        fed = _federation(x.copy(), index, width)
        # each copy is watched by itself: training may move one up and another one down
        algorithm = _watched(plan.algorithm, first(weight), rounds, None)
        pair.append(_on_slopes(plan, fed, slope, algorithm))
    words = f"a row that turns what its client uploads, {words}, against the same row the other way"
    return pair, words


@named("audit.linear")
def _linear(params, x, y, *, slope):
    """A loss whose gradient is x * slope."""
    return x * sum(
        jnp.vdot(s, p) for s, p in zip(jax.tree.leaves(slope), jax.tree.leaves(params), strict=True)
    )


# --- clients


def _of_a_client(plan, entry, client, rounds, payload):
    row, weight, words = _canary(_clip_of_uploads(plan), payload, rounds)
    count = plan.sampler.clients
    replaced = entry.adjacency == "replace_one"
    drawn = plan.sampler.scheme in ("without_replacement", "with_replacement")
    others = -1.0 if replaced and drawn else 0.0
    index, rows, width = _rows_of(plan.fed)
    fed = _federation(np.zeros(max(rows, 1), np.float32), index, width)
    task, pair = Task(init=plan.task.init, loss=Fn(_nothing)), []
    absent = _votes(plan, entry)
    # the vote on an adaptive clip norm differs too: one upload just fits, the other does not
    fits = 1.0
    if replaced and mech.adaptive(plan.release):
        fits = (1 - 1e-4) * float(mech.initial(plan.release)) / float(pytrees.norm(row))
    for value in (fits, -1.0 if replaced else 0.0):
        each = np.full(count, others, np.float32)
        each[client] = value
        upload = dict(row=row, each=jnp.asarray(each))
        weights = plan.weights
        if absent:
            weights = jnp.asarray(weights).at[client].multiply(abs(value))
        pair.append(
            dataclasses.replace(
                plan,
                fed=fed,
                task=task,
                weights=weights,
                algorithm=_watched(plan.algorithm, weight, rounds, upload),
                mesh=None,
            )
        )
    against = "the same upload the other way" if replaced else "no upload"
    around = ", all others there too" if others else ""
    return pair, f"an upload {words}, against {against}{around}"


def _clip_of_uploads(plan):
    """The chain that clips what a client uploads."""
    clips = plan.upload is not None and mech.clips(plan.upload)
    return plan.upload if clips else plan.release


@named("audit.nothing")
def _nothing(params, x, y):
    return 0.0 * x


def _payload(plan):
    """Shapes of what a client sends."""
    params = jax.eval_shape(plan.task.init, jax.random.key(0))
    server, own = jax.eval_shape(plan.algorithm.init, params)
    run = lambda server, own, fed: _one_client(plan, server, own, fed)
    return jax.eval_shape(run, server, own, plan.fed if plan.fed.host is None else _standing(plan))


def _standing(plan):
    """Shapes of a federation whose rows stay on the host."""
    x, y = (jax.eval_shape(lambda v=v: jnp.asarray(v)) for v in plan.fed.host.fetch(np.array([0])))
    index = jax.ShapeDtypeStruct((plan.sampler.clients, 1), jnp.int32)
    return plan.fed, x, y, index


def _one_client(plan, server, own, fed):
    if isinstance(fed, tuple):
        _, x, y, index = fed
    else:
        x, y, index = fed.x, fed.y, fed.index
    one, key = jnp.float32(1), jax.random.key(0)
    context = Context(jnp.int32(0), jnp.int32(0), jnp.int32(1), one, plan.sampler.clients, one)
    rows = Rows(x, y, index[0], jnp.int32(1))
    return plan.algorithm.client(context, Keys(key, key), server, own, rows)[0]


# --- what is put in


def _canary(mechanism, like, rounds=1):
    """The contribution that moves the release furthest in the norm of its noise -> its value before
    the chain clips it, the weights of a projection that finds it, and words."""
    if mechanism is None or not mech.clips(mechanism):
        raise NotAnalysable(
            "jfl.audit: need a chain that bounds one contribution; got "
            f"{'none' if mechanism is None else [s.name for s in mechanism.stages]}. Without a "
            "bound there is no worst canary: clip first."
        )
    largest = min(float(jnp.finfo(v.dtype).max) for v in jax.tree.leaves(like))
    every = range(rounds if mech.scheduled(mechanism) else 1)
    length = max(float(mech.bound(mech.at(mechanism, jnp.int32(r)))) for r in every)
    if not any(s.declared for s in mechanism.stages):
        length = max(length, min(FAR * length, 1e-2 * largest))
    mechanism = mech.at(mechanism, jnp.int32(0))
    like = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), like)
    shape = mech.shape(mechanism)
    best, farthest = None, -1.0
    for words, direction in _directions(shape, like):
        norm = float(pytrees.norm(direction))
        if not norm > 0:  # it lies in what is only padding
            continue
        row = pytrees.scale(length / norm, direction)
        stacked = jax.tree.map(lambda v: v[None], row)
        state = mech.initial(mechanism)
        moved = mech.contribute(mechanism, state, stacked, jnp.ones(1)).value
        if mech.adaptive(mechanism):  # beside the vote on its clip norm
            moved = moved[0]
        if shape is None:
            weight, distance = moved, float(pytrees.norm(moved))
        else:
            weight = bands.scale(shape.bands, jnp.square(shape.scales), moved)
            distance = float(jnp.sqrt(_dot(weight, moved)))
        if distance > farthest:
            best, farthest = (row, pytrees.scale(1 / distance, weight), words), distance
    if best is None or not 0 < farthest < math.inf:
        checks.fail(
            "jfl.audit",
            "a bound whose square float32 can hold",
            f"{length:g} for a canary",
            "Scale the loss and the bound.",
        )
    return best


def _dot(a, b):
    return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def _directions(shape, like):
    if shape is None:
        first = lambda v: jnp.zeros(v.size).at[0].set(1.0).reshape(v.shape)
        yield "in one coordinate of each parameter", jax.tree.map(first, like)
        return
    ids = [np.asarray(i) for i in bands.ids(shape.bands)]
    zero = [np.zeros(i.shape, np.float32) for i in ids]
    for band in range(bands.count(shape.bands)):
        coefficients = [z.copy() for z in zero]
        for c, i in zip(coefficients, ids):
            at = np.flatnonzero(i.reshape(-1) == band)
            if len(at):
                c.reshape(-1)[at[0]] = 1.0
        made = bands.synthesise(shape.bands, tuple(map(jnp.asarray, coefficients)), like)
        yield f"along a wavelet of band {band}", made


# --- what is seen


def _watched(algorithm: Algorithm, weight, rounds, upload) -> Algorithm:
    of = algorithm
    leaves = tuple(jax.tree.leaves(weight))
    return dataclasses.replace(
        algorithm,
        init=Fn(_init, dict(of=of.init), dict(rounds=rounds)),
        client=Fn(_client_of, dict(of=of.client, upload=upload)),
        server=Fn(
            _server,
            dict(of=of.server, params=of.params, weight=leaves),
            dict(model=of.uploads == "model"),
        ),
        params=Fn(_params, dict(of=of.params)),
    )


@named("audit.init")
def _init(params, *, of, rounds):
    server, own = of(params)
    return Watched(server, jnp.zeros((rounds, MOST), jnp.float32)), own


MOST = 4  # copies of the parameters in what is released, at most


@named("audit.client")
def _client_of(context, keys, server, own, rows, *, of, upload):
    if upload is None:
        return of(context, keys, server.state, own, rows)
    coefficient = upload["each"].at[context.client].get(mode="fill", fill_value=0.0)
    payload = pytrees.scale(coefficient, upload["row"])
    zero = jnp.zeros(())
    return payload, own, Diagnostics(zero, zero, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


@named("audit.server")
def _server(context, server, release, *, of, params, weight, model):
    seen = release
    if model:  # the model that was broadcast is known
        seen = pytrees.sub(release, params(server.state))
    copies = _projections(seen, weight)
    after = of(context, server.state, release)
    return Watched(after, server.seen.at[context.round].set(copies))


def _projections(tree, weight):
    """Float[MOST]: of each copy of the parameters, along `weight`; zeros beyond."""
    leaves = jax.tree.leaves(tree)
    size = len(weight)
    alike = len(leaves) % size == 0 and all(
        x.shape == weight[i % size].shape for i, x in enumerate(leaves)
    )
    if not alike:
        checks.fail(
            "jfl.audit",
            "a release made of copies of the parameters",
            [x.shape for x in leaves],
            error=NotAnalysable,
        )
    dot = lambda part: sum(jnp.vdot(w, x.astype(jnp.float32)) for w, x in zip(weight, part))
    found = [dot(leaves[i : i + size]) for i in range(0, len(leaves), size)][:MOST]
    return jnp.stack([*found, *[jnp.zeros(())] * (MOST - len(found))])


@named("audit.params")
def _params(server, *, of):
    return of(server.state)


# --- how often the canary counts


def _law(plan, entry, client):
    """Probabilities of 0, 1, ... copies of the canary in what is seen of a round."""
    if entry.unit == "client":
        return _cohort_law(plan.sampler, client)
    if entry.implied:
        whole = all(r.batches.scheme == "full" for r in plan.algorithm.releases)
        return _cohort_law(plan.sampler, client) if whole else None
    release = plan.algorithm.releases[0]
    rows = int(np.asarray(plan.fed.size).reshape(-1)[client])
    if len(plan.algorithm.releases) > 1 or release.steps:
        return None
    if release.batches.scheme == "epochs":
        law = _epochs_law(release.batches, rows, release.count)
    else:
        each, law = _batch_law(release.batches, rows), np.ones(1)
        for _ in range(release.count):
            law = np.convolve(law, each)
    mixed = np.zeros((len(law) - 1) * (len(cohort := _cohort_law(plan.sampler, client)) - 1) + 1)
    for copies, chance in enumerate(cohort):  # a client that is drawn twice counts twice
        mixed[np.arange(len(law)) * copies] += chance * law
    return mixed


def _batch_law(batches, rows):
    if batches.scheme == "full" or (
        batches.scheme == "without_replacement" and rows <= batches.batch
    ):
        return np.array([0.0, 1.0])
    if batches.scheme == "poisson":
        rate = float(batches.rate if batches.rate is not None else batches.expected / rows)
        return _binomial(1, min(rate, 1.0))
    if batches.scheme == "without_replacement":
        return _binomial(1, batches.batch / rows)
    return _binomial(batches.batch, 1 / rows)


def _epochs_law(batches, rows, steps):
    """Of all steps of a round: each whole epoch takes every row once."""
    whole, rest = divmod(steps, -(-rows // batches.batch))
    law = np.zeros(whole + 2)
    law[whole + 1] = min(1.0, rest * batches.batch / rows)
    law[whole] = 1 - law[whole + 1]
    return law


def _cohort_law(sampler, client):
    draws = sampler.capacity if sampler.scheme == "with_replacement" else 1
    return _binomial(draws, float(min(_shares(sampler)[client], 1.0)))


def _binomial(draws, probability):
    from scipy import stats  # slow: not at import

    return stats.binom.pmf(np.arange(draws + 1), draws, probability)
