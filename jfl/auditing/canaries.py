"""Pairs of plans: one with a worst-case canary, and one with its neighbour.

A canary moves a release as far as the noise is meant to hide.  It goes through the plan's chains,
samplers, weights and server.  Only the data, and what is learned from them, are replaced, so that
nothing else moves the release:

- A record: the loss is linear in the parameters, with a slope given by the row, so the gradient of
  a row does not depend on the parameters, and the chain clips it.
- A client: its upload is replaced before the plan's chain clips it.
- A record under client-level noise: such a row goes through the client's training, and turns the
  upload that the chain clips.

Neighbours: under "replace_one" the canary points the other way, and where elements are drawn the
others point there too (else most of the distance is lost); under "add_remove" it is zero.

A plan that has a mesh keeps it: what is wrong only on several devices is audited there.
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
    Tree,
    named,
)
from ..gradients.per_example import Grad
from ..privacy.ledger.entry import Entry, effective
from ..privacy.ledger.facts import attendance
from ..privacy.mechanisms import chain as mech
from ..privacy.mechanisms import haar_bands as bands
from ..privacy.mechanisms.stages import total
from ..sampling import clients as sampling
from . import watching

UPLOAD_VIEWS = ("server", "personal")  # whose observer sees each upload by itself
ORTHOGONAL = 1e11  # products that it may take to make directions orthogonal
FAR = 1e4  # times its bound: how long a canary is before it is clipped


class Experiment(NamedTuple):
    """Two plans that differ in one unit.

    Attributes:
        inside: the plan with the canary.
        outside: the plan with its neighbour, of the same structure.
        law: Float64[m], the probabilities that the canary counts 0, 1, ... times in the
            observations of a round; None if they are unknown.
        canary: a description of the canary.
        adversary: a description of the observations.
    """

    inside: Plan
    outside: Plan
    law: np.ndarray | None
    canary: str
    adversary: str


def experiment(plan: Plan, entry: Entry, rounds: int) -> Experiment:
    """Return the pair of plans with the worst canary for `entry`.

    The server knows who participates and sees each upload, so for its view the plan runs only with
    the canary's client, in every round, and the release is that client's upload.  The same holds
    for the view "personal", whose observer also sees the client's personal model after every round.

    Args:
        plan: the audited plan.
        entry: the ledger entry: whose privacy, against which observer.
        rounds: the number of observed rounds.

    Raises:
        NotAnalysable: For releases that no canary here reaches.
    """
    refuse_implied(entry)
    client, payload = weakest_client(plan, entry), None
    if entry.unit == "client" or entry.implied:
        payload = upload_shapes(plan)
    if entry.view in UPLOAD_VIEWS:
        plan, client = alone(plan, client)
    if entry.unit == "client":
        made, canary = _of_a_client(plan, entry, client, rounds, payload)
    elif entry.implied:
        made, canary = _of_a_trained_record(plan, client, rounds, payload)
    else:
        made, canary = _of_a_record(plan, entry, client, rounds)
    law = law_of(plan, entry, client)
    seen = "each upload of its client" if entry.view in UPLOAD_VIEWS else "each aggregate"
    if entry.view == "personal":
        seen += " and personal model"
    if mech.adaptive(plan.release):
        seen += " and clip norm"
    inside, outside = made
    return Experiment(inside, outside, law, canary, f"{seen} of {rounds} rounds")


def refuse_implied(entry: Entry) -> None:
    """Reject added or removed rows if the noise is for clients."""
    if entry.implied and entry.adjacency != "replace_one":
        raise NotAnalysable(
            f"jfl.audit: expected the unit that the noise is for, but got unit={entry.unit!r} and "
            f"adjacency={entry.adjacency!r}, whose guarantee follows from that of clients. "
            "Audit unit='client'."
        )


def weakest_client(plan: Plan, entry: Entry) -> int:
    """Return the client with the least noise; of several, the one that participates most often,
    then the one with the fewest rows or the largest weight."""
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
    if not votes(plan, entry):
        return int(order[0])
    if isinstance(plan.weights, Fn):
        raise NotAnalysable(
            "jfl.audit: expected weights that stay, for an adaptive clip under "
            "add_remove, but got a "
            "function of the round. Audit the plan with the weights of one round."
        )
    # its absence must not change the largest weight, which the noise follows
    for c in order:
        others = np.delete(weights, c)
        if others.size and others.max() == weights.max():
            return int(c)
    raise NotAnalysable(
        "jfl.audit: expected a second client, for an adaptive clip under add_remove, "
        "but got one, whose "
        "absence would take the noise along. Audit a plan with more clients."
    )


def votes(plan: Plan, entry: Entry) -> bool:
    """Return whether the absence of a client also affects the clip norm."""
    return entry.adjacency != "replace_one" and mech.adaptive(plan.release)


def _shares(sampler):
    """Return the probability that one draw takes each client, Float64[C]; for latencies, the
    frequency in 1,000 cohorts."""
    if sampler.scheme != "first_responders":
        return np.array(np.broadcast_to(attendance(sampler).share, (sampler.clients,)), np.float64)
    drawn = jax.vmap(sampler.draw)(jax.random.split(jax.random.key(0), 1000))
    ids = np.asarray(drawn.ids)[np.asarray(drawn.times_drawn) > 0]
    return np.bincount(ids, minlength=sampler.clients)[: sampler.clients] / 1000


def alone(plan: Plan, client: int) -> tuple[Plan, int]:
    """Return the plan with only one client, and the client's number in it; if noise differs by
    client, the plan of the whole federation in which only that client has weight."""
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
    return dataclasses.replace(
        plan,
        fed=_only(plan.fed, client),
        sampler=sampling.full(1),
        weights=jnp.ones(1, jnp.float32),
        release=release,
        chunk=1,
    ), 0


def _only(fed, client):
    """Return the federation of one client; for rows on the host, with zeros instead of them."""
    if fed.host is not None:
        rows = int(np.asarray(fed.size).reshape(-1)[client])
        return federation(np.zeros(rows, np.float32), [np.arange(rows)])
    names = ("index", "size", "test_index", "test_size")
    its = {name: np.asarray(getattr(fed, name))[client : client + 1] for name in names}
    return dataclasses.replace(fed, **{name: jnp.asarray(value) for name, value in its.items()})


def federation(x: np.ndarray, index: list, width: int | None = None) -> Federation:
    """Clients that own the rows `index` [C][rows] of x [n], which is all that a row holds."""
    sizes = np.array([len(i) for i in index], np.int32)
    padded = np.zeros((len(index), max(width or 0, 1, sizes.max(initial=1))), np.int32)
    for c, i in enumerate(index):
        padded[c, : len(i)] = i
    nothing = np.zeros((1,), np.float32)
    x_, y, index_, size, x_test, y_test = map(
        jnp.asarray, (x, np.zeros_like(x), padded, sizes, nothing, nothing)
    )
    return Federation(
        x_,
        y,
        index_,
        size,
        x_test,
        y_test,
        jnp.zeros((len(index), 0), jnp.int32),
        jnp.zeros(len(index), jnp.int32),
    )


def rows_of(fed: Federation) -> tuple[list, int, int | None]:
    """Return the rows of each client, the number of rows, and the number of slots of a client."""
    sizes = np.asarray(fed.size).reshape(-1)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    width = None if fed.host is not None else fed.index.shape[1]
    return [np.arange(a, a + n) for a, n in zip(starts, sizes)], int(starts[-1]), width


# --- records


def _of_a_record(plan, entry, client, rounds):
    release = plan.algorithm.releases[0]
    params = jax.eval_shape(plan.task.init, jax.random.key(0))
    if entry.view == "personal" and plan.sampler.clients > 1:
        raise NotAnalysable(
            "jfl.audit: expected equal noise for all clients, for view='personal', but "
            "got noise that "
            "differs between them. Audit view='server'."
        )
    if any(stage.declared for stage in release.mechanism.stages):
        raise NotAnalysable(
            "jfl.audit: expected a chain that clips, but got a bound that is declared "
            "of a loss. The "
            "canary is a loss of its own, of which nothing was declared."
        )
    row, weight, words = worst(release.mechanism, params, rounds)
    if release.steps:
        words += " (the bound covers a change of every step, which one row seldom reaches)"
    index, count, width = rows_of(plan.fed)
    replaced = entry.adjacency == "replace_one"
    # noise that is added once covers a change of every step: there the others stay out of the way
    drawn = release.batches.scheme in (
        "without_replacement",
        "with_replacement",
        "epochs",
        "truncated_poisson",
    )
    others = -1.0 if entry.adjacency != "add_remove" and drawn and not release.steps else 0.0
    x = np.zeros(max(count, 1), np.float32)
    x[index[client]] = others
    pair = []
    for value in (1.0, -1.0 if replaced else 0.0):
        x[index[client][0]] = value
        fed = federation(x.copy(), index, width)
        algorithm = plan.algorithm
        if entry.view == "personal":
            algorithm = watching.watched_personal(algorithm, weight, rounds)
        watched = watching.watched(algorithm, *along(weight, rounds, algorithm))
        pair.append(_on_slopes(plan, fed, row, watched))
    against = "the same row the other way" if replaced else "no row"
    around = ", all others there too" if others else ""
    return pair, f"a row {words}, against {against}{around}"


def _on_slopes(plan, fed, slope, algorithm):
    """Return the plan on rows that are numbers x, with a loss whose gradient is x times `slope`."""
    loss = Fn(_linear, dict(slope=slope))
    grads = lambda node: isinstance(node, Grad)
    path = lambda g: "auto" if g.path == "bookkeeping" else g.path
    put = lambda g: dataclasses.replace(g, loss=loss, path=path(g)) if grads(g) else g
    algorithm = jax.tree.map(put, algorithm, is_leaf=grads)
    task = Task(init=plan.task.init, loss=loss)
    return dataclasses.replace(plan, fed=fed, task=task, algorithm=algorithm)


def _of_a_trained_record(plan, client, rounds, payload):
    """Return a row that turns the upload of its client, however many other rows there are: only the
    clip of the upload bounds its effect on the client's training."""
    row, weight, words = worst(chain_of(plan), payload, rounds)
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
    index, count, width = rows_of(plan.fed)
    # a client takes the mean over its rows
    largest = min(float(jnp.finfo(v.dtype).max) for v in jax.tree.leaves(payload))
    longer = min(len(index[client]), max(1.0, 1e-2 * largest / float(pytrees.norm(row))))
    slope = jax.tree.unflatten(jax.tree.structure(params), [longer * v for v in first(row)])
    x, pair = np.zeros(max(count, 1), np.float32), []
    for value in (-1.0, 1.0):  # training goes down the slope
        x[index[client][0]] = value
        fed = federation(x.copy(), index, width)
        # each copy is watched by itself: training may move one up and another one down
        kept = along(first(weight), rounds, plan.algorithm)
        algorithm = watching.watched(plan.algorithm, *kept)
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
    row, weight, words = worst(chain_of(plan), payload, rounds)
    count = plan.sampler.clients
    replaced = entry.adjacency == "replace_one"
    drawn = plan.sampler.scheme in (
        "without_replacement",
        "with_replacement",
        "truncated_poisson",
    )
    others = -1.0 if entry.adjacency != "add_remove" and drawn else 0.0
    index, rows, width = rows_of(plan.fed)
    fed = federation(np.zeros(max(rows, 1), np.float32), index, width)
    task, pair = Task(init=plan.task.init, loss=Fn(nothing)), []
    absent = votes(plan, entry)
    # the vote on an adaptive clip norm differs too: one upload just fits, the other does not
    fits = 1.0
    if replaced and mech.adaptive(plan.release):
        fits = (1 - 1e-4) * float(mech.initial_state(plan.release)) / float(pytrees.norm(row))
    for value in (fits, -1.0 if replaced else 0.0):
        each = np.full(count, others, np.float32)
        each[client] = value
        weights = plan.weights
        if absent:
            weights = jnp.asarray(weights).at[client].multiply(abs(value))
        pair.append(
            dataclasses.replace(
                plan,
                fed=fed,
                task=task,
                weights=weights,
                algorithm=watching.watched(
                    plan.algorithm,
                    *along(weight, rounds, plan.algorithm),
                    client=Fn(_upload, dict(row=row, each=jnp.asarray(each))),
                ),
            )
        )
    against = "the same upload the other way" if replaced else "no upload"
    around = ", all others there too" if others else ""
    return pair, f"an upload {words}, against {against}{around}"


@named("audit.upload")
def _upload(context, keys, server, own, rows, *, row, each):
    coefficient = each.at[context.client].get(mode="fill", fill_value=0.0)
    zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
    return pytrees.scale(coefficient, row), own, Diagnostics(zero, zero, none, none)


@named("audit.nothing")
def nothing(params, x, y):
    return 0.0 * x


def chain_of(plan: Plan) -> Mechanism:
    """Return the chain that bounds an upload."""
    return plan.upload if plan.upload is not None and mech.has_clip(plan.upload) else plan.release


def upload_shapes(plan: Plan) -> Tree:
    """Return the shapes of an upload."""
    params = jax.eval_shape(plan.task.init, jax.random.key(0))
    server, own = jax.eval_shape(plan.algorithm.init, params)
    run = lambda server, own, fed: _one_client(plan, server, own, fed)
    return jax.eval_shape(run, server, own, plan.fed if plan.fed.host is None else _standing(plan))


def _standing(plan):
    """Return the shapes of a federation whose rows stay on the host."""
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


def worst(mechanism: Any, like: Tree, rounds: int = 1) -> tuple[Tree, Tree, str]:
    """Return the contribution that moves the release furthest in the norm of its noise.

    Args:
        mechanism: the chain that it goes through.
        like: the shapes of a contribution.
        rounds: the number of rounds, for bounds that change.

    Returns:
        Its value before the clip, the weights of a projection that detects it, and a description.
    """
    length = _length(mechanism, like, rounds)
    mechanism = mech.at_round(mechanism, jnp.int32(0))
    like = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), like)
    best: Any = None
    farthest = -1.0
    for words, direction in _directions(mech.shape(mechanism), like):
        norm = float(pytrees.norm(direction))
        if not norm > 0:  # the direction lies in the padding
            continue
        row = pytrees.scale(length / norm, direction)
        weight, distance = _found_by(mechanism, row)
        if distance > farthest:
            best, farthest = (row, weight, words), float(distance)
    _can_be_held(length, farthest)
    return best


def random(mechanism: Any, like: Tree, rounds: int, count: int, seed: int) -> tuple:
    """Return contributions along random directions, with the norm of those of `worst`.

    They are orthogonal if there are enough coordinates, so that none is mistaken for another.

    Returns:
        Their values before the clip, and the weights of a projection that detects each; both
        [count, ...].
    """
    length = _length(mechanism, like, rounds)
    mechanism = mech.at_round(mechanism, jnp.int32(0))
    leaves, shape = jax.tree.flatten(like)
    size = sum(math.prod(leaf.shape) for leaf in leaves)
    drawn = np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32)
    if count <= size and count * count * size <= ORTHOGONAL:
        drawn = np.linalg.qr(drawn.T)[0].T
    ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves])[:-1]
    parts = zip(np.split(drawn, ends, axis=1), leaves, strict=True)
    drawn = [part.reshape(count, *leaf.shape) for part, leaf in parts]

    @jax.jit
    @jax.vmap
    def put(direction):
        row = pytrees.scale(length / pytrees.norm(direction), direction)
        return row, *_found_by(mechanism, row)

    rows, weights, distances = put(jax.tree.unflatten(shape, list(map(jnp.asarray, drawn))))
    _can_be_held(length, float(distances.min()))
    return rows, weights


def _length(mechanism, like, rounds):
    """Return the norm of a contribution before its chain clips it."""
    if mechanism is None or not mech.has_clip(mechanism):
        raise NotAnalysable(
            "jfl.audit: expected a chain that bounds one contribution, but got "
            f"{'none' if mechanism is None else [s.name for s in mechanism.stages]}. Without a "
            "bound, no canary is the worst: clip first."
        )
    largest = min(float(jnp.finfo(v.dtype).max) for v in jax.tree.leaves(like))
    every = range(rounds if mech.scheduled(mechanism) else 1)
    length = max(float(mech.bound(mech.at_round(mechanism, jnp.int32(r)))) for r in every)
    if any(s.declared for s in mechanism.stages):
        return length
    return max(length, min(FAR * length, 1e-2 * largest))


def _found_by(mechanism, row):
    """Return the weights of the projection that detects a contribution, and its shift there."""
    moved = clipped(mechanism, row)
    weight = against_noise(mechanism, moved)
    distance = jnp.sqrt(_dot(weight, moved))
    return pytrees.scale(1 / distance, weight), distance


def clipped(mechanism: Mechanism, row: Tree) -> Tree:
    """Return what a contribution adds to the sum, in float32."""
    stacked = jax.tree.map(lambda v: v[None], row)
    moved = mech.clip_and_sum(mechanism, mech.initial_state(mechanism), stacked, jnp.ones(1)).value
    return (
        moved[0] if mech.adaptive(mechanism) else moved
    )  # the other part is the vote on the clip norm


def against_noise(mechanism: Mechanism, moved: Tree) -> Tree:
    """Return the weights of the projection that best detects a change of the sum; if the noise is
    equal in all coordinates, these are the change itself."""
    shape = mech.shape(mechanism)
    if shape is None:
        return moved
    return bands.scale(shape.bands, jnp.square(shape.scales), moved)


def _can_be_held(length, distance):
    if not 0 < distance < math.inf:
        checks.fail(
            "jfl.audit",
            "a bound whose square float32 can hold",
            f"{length:g} for a canary",
            "Scale the loss and the bound.",
        )


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


def along(weight: Tree, rounds: int, of: Algorithm) -> tuple:
    """Return zeros and the function that records each round's projection on `weight`, for
    `watched`."""
    leaves = tuple(jax.tree.leaves(weight))
    see = Fn(_see_projection, dict(weight=leaves), dict(model=of.uploads == "model"))
    return jnp.zeros((rounds, watching.COPIES), jnp.float32), see


@named("audit.see_projection")
def _see_projection(moment, seen, *, weight, model):
    release = moment.release
    if model:  # the model that was broadcast is known
        release = pytrees.sub(release, moment.before)
    return seen.at[moment.round].set(watching.projections(release, weight))


# --- how often the canary counts


def law_of(plan: Plan, entry: Entry, client: int) -> np.ndarray | None:
    """Return the probabilities of 0, 1, ... copies of the canary in the observations of a round."""
    if entry.unit == "client":
        return _cohort_law(plan.sampler, client)
    if entry.implied:
        whole = all(r.batches.scheme == "full" for r in plan.algorithm.releases)
        return _cohort_law(plan.sampler, client) if whole else None
    release = plan.algorithm.releases[0]
    rows = int(np.asarray(plan.fed.size).reshape(-1)[client])
    if len(plan.algorithm.releases) > 1 or release.steps or entry.view == "personal":
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
    if batches.scheme in ("poisson", "truncated_poisson"):  # of the latter at most
        rate = float(batches.rate if batches.rate is not None else batches.expected / rows)
        return _binomial(1, min(rate, 1.0))
    if batches.scheme == "without_replacement":
        return _binomial(1, batches.batch / rows)
    return _binomial(batches.batch, 1 / rows)


def _epochs_law(batches, rows, steps):
    """Return the probabilities for all steps of a round; an epoch uses every row once."""
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
