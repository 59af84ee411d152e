"""Worst-case canaries: pairs of plans whose datasets differ only in the canary.

A canary changes a release by as much as the noise is meant to hide.  It passes through the plan's
own chains, samplers, weights and server.  Only the data and the training on them are replaced, so
that nothing else changes the release:

- A record: the loss is linear in the parameters, with a slope given by the row.  The gradient of a
  row therefore does not depend on the parameters.  The chain clips it.
- A client: its upload is replaced before the plan's chain clips it.
- A record under client-level noise: a row with a very large gradient goes through its client's
  training, and reverses the direction of the upload before the chain clips it.

Under "replace_one" the neighbouring dataset has the opposite canary instead.  If records or clients
are sampled, all others are equal to this opposite canary; otherwise the releases of the two
datasets would be closer to each other, and the audit weaker.  Under "add_remove" the contribution
of the canary is zero on the neighbour.

A plan that has a mesh keeps it, so errors that occur only on several devices are audited.
"""

import dataclasses
import math
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ..core import checks, pytrees
from ..core.errors import NotAnalysable
from ..core.records import (
    Algorithm,
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
from ..privacy.ledger.entry import Entry
from ..privacy.ledger.facts import attendance
from ..privacy.mechanisms import chain as mech
from ..privacy.mechanisms import haar_bands as bands
from ..privacy.mechanisms.stages import total
from ..sampling import clients as sampling
from ..verify.client import context_shapes, row_shapes
from . import watching

UPLOAD_VIEWS = ("server", "personal")  # whose observer sees each upload separately
# Sampling schemes with samples of fixed size.
FIXED_SIZE = ("without_replacement", "with_replacement", "truncated_poisson")
MAX_QR_PRODUCTS = 1e11  # the largest QR decomposition that makes random directions orthogonal
LENGTH = 1e4  # the norm of a canary before the clip, in units of the clip norm


class Experiment(NamedTuple):
    """Two plans that differ in one unit.

    Attributes:
        inside: the plan with the canary.
        outside: the plan without it, that is, with its neighbour; the pytree structure is the same.
        copies: Float64[m], the probabilities that the canary counts 0, 1, ... times in the
            observations of a round; None if they are unknown.
        canary: a description of the canary.
        adversary: a description of the observations.
    """

    inside: Plan
    outside: Plan
    copies: np.ndarray | None
    canary: str
    adversary: str


def refuse(expected: str, actual: str, hint: str) -> NoReturn:
    """Raise NotAnalysable for a plan in which no canary can be placed.

    The arguments are those of `checks.fail`: what was expected, what was found, and what to do.
    """
    checks.fail("jfl.audit", expected, actual, hint, NotAnalysable)


def experiment(plan: Plan, entry: Entry, rounds: int) -> Experiment:
    """Return two plans, with and without the worst-case canary, that audit a ledger entry.

    In the server's view, both plans contain only the canary's client, which participates in every
    round, because the server knows who participates and sees each upload.  The same holds for the
    view "personal", in which the observer also sees the client's personal model after every round.

    Args:
        plan: the audited plan.
        entry: the ledger entry, which names the unit, the adjacency and the view.
        rounds: the number of observed rounds.

    Raises:
        NotAnalysable: If no canary reaches the release.
    """
    refuse_implied(entry)
    client, upload = weakest_client(plan, entry), None
    if entry.unit == "client" or entry.implied:
        upload = upload_shapes(plan)
    if entry.view in UPLOAD_VIEWS:
        plan, client = alone(plan, client)
    if entry.unit == "client":
        (inside, outside), canary = _client_pair(plan, entry, client, rounds, upload)
    elif entry.implied:
        (inside, outside), canary = _trained_record_pair(plan, client, rounds, upload)
    else:
        (inside, outside), canary = _record_pair(plan, entry, client, rounds)
    seen = "each upload of its client" if entry.view in UPLOAD_VIEWS else "each aggregate"
    if entry.view == "personal":
        seen += " and personal model"
    if mech.adaptive(plan.release):
        seen += " and clip norm"
    copies = distribution_of_copies(plan, entry, client)
    return Experiment(inside, outside, copies, canary, f"{seen} of {rounds} rounds")


def refuse_implied(entry: Entry) -> None:
    """Reject a guarantee for examples that is only derived from a guarantee for clients.

    One for replace_one is accepted: it has the same numbers as the guarantee for clients.
    """
    if entry.implied and entry.adjacency != "replace_one":
        refuse(
            "the unit that the noise is for",
            f"unit={entry.unit!r} and adjacency={entry.adjacency!r}, whose guarantee follows from "
            "that of clients",
            "Audit unit='client'.",
        )


def weakest_client(plan: Plan, entry: Entry) -> int:
    """Return the client with the least noise.

    If there are several, it is the one that participates most often, then the one with the fewest
    rows or the largest weight.

    Args:
        plan: the audited plan.
        entry: the ledger entry that is attacked.
    """
    rows = np.asarray(plan.fed.size).reshape(-1)
    noise = np.full(len(rows), np.inf)
    for part in entry.parts:
        noise = np.minimum(noise, part.noise.min(axis=0))
    often = np.ones(len(rows))
    if entry.view == "third_party":
        often = _participation_rates(plan.sampler)
    if entry.unit == "example" and not entry.implied:
        return int(next(c for c in np.lexsort((rows, -often, noise)) if rows[c] > 0))
    weights = np.asarray(plan.weights(0) if isinstance(plan.weights, Fn) else plan.weights)
    order = np.lexsort((-often * weights, noise))
    if entry.implied:
        order = [c for c in order if rows[c] > 0]
    if not absence_moves_clip_norm(plan, entry):
        return int(order[0])
    # The noise follows the largest weight, which must not change with the canary's absence.
    kept = [c for c in order if max(np.delete(weights, c), default=0) == weights.max()]
    if isinstance(plan.weights, Fn) or not kept:
        refuse(
            "constant weights whose maximum remains without the canary, for an adaptive clip under "
            "add_remove",
            "weights that change" if kept else "weights whose maximum one client has",
            "Audit a plan with constant weights, or with more clients.",
        )
    return int(kept[0])


def absence_moves_clip_norm(plan: Plan, entry: Entry) -> bool:
    """Return whether the clip norm adapts to the absence of a client."""
    return entry.adjacency != "replace_one" and mech.adaptive(plan.release)


def _participation_rates(sampler: Any) -> np.ndarray:
    """Return the probability that one draw selects each client, Float64[C]; for latencies, the
    frequency in 1,000 cohorts."""
    if sampler.scheme != "first_responders":
        return np.array(np.broadcast_to(attendance(sampler).share, (sampler.clients,)), np.float64)
    drawn = jax.vmap(sampler.draw)(jax.random.split(jax.random.key(0), 1000))
    ids = np.asarray(drawn.ids)[np.asarray(drawn.times_drawn) > 0]
    return np.bincount(ids, minlength=sampler.clients)[: sampler.clients] / 1000


def alone(plan: Plan, client: int) -> tuple[Plan, int]:
    """Return the plan with only one client, and the number of that client in it.

    Its release is the client's upload, without the clip and noise of `plan.release`.  If noise
    differs between clients, the plan keeps all clients, but only this one has weight.
    """
    count = plan.sampler.clients
    noises = [
        stage.noise(0) if isinstance(stage.noise, Fn) else stage.noise
        for m in (plan.upload, *(r.mechanism for r in plan.algorithm.releases))
        for stage in (m.stages if m is not None else ())
        if stage.noise is not None
    ]
    release = Mechanism((total(),), plan.release.adjacency)
    if count > 1 and any(map(jnp.shape, noises)):
        weights = jnp.zeros(count).at[client].set(count)
        changes = dict(sampler=sampling.full(count), weights=weights, chunk=count)
        return dataclasses.replace(plan, release=release, **changes), client
    if plan.fed.host is not None:
        fed = _numbers(np.asarray(plan.fed.size).reshape(-1)[client : client + 1])
    else:
        names = ("index", "size", "test_index", "test_size")
        own = {n: jnp.asarray(np.asarray(getattr(plan.fed, n))[client, None]) for n in names}
        fed = dataclasses.replace(plan.fed, **own)
    changes = dict(sampler=sampling.full(1), weights=jnp.ones(1, jnp.float32), chunk=1)
    return dataclasses.replace(plan, fed=fed, release=release, **changes), 0


def _numbers(
    sizes: np.ndarray, width: int = 1, client: int = 0, value: float = 0.0, others: float = 0.0
) -> Federation:
    """Return a federation whose rows are numbers.

    Args:
        sizes: [C], the number of rows of each client.
        width: the minimum number of slots of a client.
        client: the client whose first row is `value` and whose other rows are `others`; all other
            clients have zeros.
        value, others: see `client`.
    """
    sizes = np.asarray(sizes, np.int32)
    starts = np.cumsum(sizes) - sizes
    slots = np.arange(max(width, 1, sizes.max(initial=1)))
    index = np.where(slots < sizes[:, None], starts[:, None] + slots, 0).astype(np.int32)
    x = np.zeros(max(sizes.sum(), 1), np.float32)
    x[starts[client] : starts[client] + sizes[client]] = others
    x[starts[client] : starts[client] + min(sizes[client], 1)] = value
    one, none = np.zeros(1, np.float32), np.zeros((len(sizes), 0), np.int32)
    nothing = np.zeros(len(sizes), np.int32)
    arrays: Any = (x, np.zeros_like(x), index, sizes, one, one, none, nothing)
    return Federation(*jax.tree.map(jnp.asarray, arrays))


def numbers_like(fed: Federation, **values: Any) -> Federation:
    """Return a federation of numbers with as many rows per client as `fed`; see `_numbers`."""
    width = 1 if fed.host is not None else fed.index.shape[1]
    return _numbers(np.asarray(fed.size).reshape(-1), width, **values)


# --- records


def _record_pair(plan, entry, client, rounds):
    """Return the Experiment for a row under example-level noise."""
    release = plan.algorithm.releases[0]
    if entry.view == "personal" and plan.sampler.clients > 1:
        refuse(
            "equal noise for all clients for view='personal'",
            "noise that differs between clients",
            "Audit view='server'.",
        )
    if any(stage.declared for stage in release.mechanism.stages):
        refuse(
            "a chain that clips",
            "a bound that is declared for a loss",
            "The canary has another loss, for which nothing was declared.",
        )
    params = jax.eval_shape(plan.task.init, jax.random.key(0))
    row, weight, words = worst(release.mechanism, params, rounds)
    if release.steps:
        words += " (the bound covers a change of every step, which one row seldom reaches)"
    drawn = release.batches.scheme in (*FIXED_SIZE, "epochs")
    # If noise that is added once covers a change of every step, other rows would use up the clip.
    others = -1.0 if entry.adjacency != "add_remove" and drawn and not release.steps else 0.0
    algorithm = plan.algorithm
    if entry.view == "personal":
        algorithm = watching.watched_personal(algorithm, weight, rounds)
    algorithm = watching.watched(algorithm, *along(weight, rounds, algorithm))
    opposite = -1.0 if entry.adjacency == "replace_one" else 0.0
    pair = [
        _with_slope(plan, numbers_like(plan.fed, client=client, **values), row, algorithm)
        for values in (dict(value=1.0, others=others), dict(value=opposite, others=others))
    ]
    return pair, f"a row {words}, against {_neighbour('row', opposite, others)}"


def _trained_record_pair(plan, client, rounds, upload):
    """Return a row that reverses the upload of its client, however many other rows there are: only
    the clip of the upload bounds its effect on the client's training."""
    row, weight, words = worst(chain_of(plan), upload, rounds)
    params = jax.eval_shape(plan.task.init, jax.random.key(0))
    shapes = [v.shape for v in jax.tree.leaves(params)]
    first = lambda tree: jax.tree.leaves(tree)[: len(shapes)]
    if [v.shape for v in first(row)] != shapes:
        got = str([v.shape for v in jax.tree.leaves(row)])
        refuse("uploads made of copies of the parameters", got, "Audit unit='client'.")
    # A client takes the mean over its rows, so the row is longer by their number.
    largest = min(float(jnp.finfo(v.dtype).max) for v in jax.tree.leaves(upload))
    rows = int(np.asarray(plan.fed.size).reshape(-1)[client])
    longer = min(rows, max(1.0, 1e-2 * largest / float(pytrees.norm(row))))
    slope = jax.tree.unflatten(jax.tree.structure(params), [longer * v for v in first(row)])
    # Each copy is observed separately: training may change two copies in opposite directions.
    algorithm = watching.watched(plan.algorithm, *along(first(weight), rounds, plan.algorithm))
    pair = [
        _with_slope(plan, numbers_like(plan.fed, client=client, value=value), slope, algorithm)
        for value in (-1.0, 1.0)  # training descends the slope
    ]
    words = f"a row that reverses what its client uploads, {words}"
    return pair, f"{words}, against {_neighbour('row', -1.0, 0.0)}"


def _with_slope(plan, fed, slope, algorithm):
    """Return the plan on rows that are numbers x, with a loss whose gradient is x * `slope`."""
    loss = Fn(_linear, dict(slope=slope))
    path = lambda g: "auto" if g.path == "bookkeeping" else g.path
    put = lambda g: dataclasses.replace(g, loss=loss, path=path(g)) if is_grad(g) else g
    algorithm = jax.tree.map(put, algorithm, is_leaf=is_grad)
    task = Task(init=plan.task.init, loss=loss)
    made = dataclasses.replace(plan, fed=fed, task=task, algorithm=algorithm)
    check_rows_are_numbers(made)
    return made


def is_grad(node: Any) -> bool:
    """Return whether a node of a pytree is a gradient of jfl."""
    return isinstance(node, Grad)


def check_rows_are_numbers(plan: Plan) -> None:
    """Reject a plan on rows that are numbers if a client also reads rows without a gradient of jfl.

    An audit gives the gradients of jfl a loss of numbers.  A loss that a user's client calls itself
    stays as it is, and expects the rows of the federation.
    """
    try:
        if not any(map(is_grad, jax.tree.leaves(plan.algorithm, is_leaf=is_grad))):
            raise TypeError("no gradient of jfl in the algorithm")
        upload_shapes(plan)
    except Exception as error:  # a client of the user may raise any error
        refuse(
            "clients that read rows only by gradients of jfl, because the canary takes the place "
            "of the rows",
            checks.describe_error(error),
            "Let the client report the loss of its local steps instead of calling a loss itself, "
            "or use canary='mislabelled' or 'blank' with adjacency='replace_one', or "
            "unit='client'.",
        )


@named("audit.linear")
def _linear(params, x, y, *, slope):
    """Return a loss whose gradient is x * slope."""
    return x * _dot(slope, params)


def _neighbour(what, opposite, others):
    """Return a description of the neighbour of a canary."""
    against = f"the opposite {what}" if opposite else f"no {what}"
    return against + (f", which all other {what}s equal" if others else "")


# --- clients


def _client_pair(plan, entry, client, rounds, upload):
    """Return the Experiment for a client."""
    row, weight, words = worst(chain_of(plan), upload, rounds)
    replaced = entry.adjacency == "replace_one"
    drawn = plan.sampler.scheme in FIXED_SIZE
    others = -1.0 if entry.adjacency != "add_remove" and drawn else 0.0
    inside, opposite = 1.0, -1.0 if replaced else 0.0
    if replaced and mech.adaptive(plan.release):
        # The votes on the clip norm differ too: one upload just fits, and the other does not.
        norm = float(mech.initial_state(plan.release)) / float(pytrees.norm(row))
        inside = (1 - 1e-4) * norm
    task, pair = Task(init=plan.task.init, loss=Fn(nothing)), []
    for value in (inside, opposite):
        each = jnp.full(plan.sampler.clients, others, jnp.float32).at[client].set(value)
        send = Fn(_upload, dict(row=row, each=each))
        weights = plan.weights
        if absence_moves_clip_norm(plan, entry):
            weights = jnp.asarray(weights).at[client].multiply(abs(value))
        watch = along(weight, rounds, plan.algorithm)
        algorithm = watching.watched(plan.algorithm, *watch, client=send)
        changes = dict(fed=numbers_like(plan.fed), task=task, weights=weights, algorithm=algorithm)
        pair.append(dataclasses.replace(plan, **changes))
    return pair, f"an upload {words}, against {_neighbour('upload', opposite, others)}"


@named("audit.upload")
def _upload(context, keys, server, own, rows, *, row, each):
    """Return the prescribed upload of each client, instead of running it."""
    coefficient = each.at[context.client].get(mode="fill", fill_value=0.0)
    zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
    return pytrees.scale(coefficient, row), own, Diagnostics(zero, zero, none, none)


@named("audit.nothing")
def nothing(params, x, y):
    """Return a loss that is 0 for all parameters."""
    return 0.0 * x


def chain_of(plan: Plan) -> Mechanism:
    """Return the chain that bounds an upload."""
    return plan.upload if plan.upload is not None and mech.has_clip(plan.upload) else plan.release


def upload_shapes(plan: Plan) -> Tree:
    """Return the shapes of an upload."""
    params = jax.eval_shape(plan.task.init, jax.random.key(0))
    server, own = jax.eval_shape(plan.algorithm.init, params)
    x, y = row_shapes(plan)
    slots = plan.fed.index.shape[-1] if plan.fed.host is None else plan.fed.host.slots

    def upload(server, own, x, y, index):
        key, context = jax.random.key(0), pytrees.zeros_like(context_shapes())
        context = context._replace(clients=plan.sampler.clients)
        rows = Rows(x, y, index, context.size)
        return plan.algorithm.client(context, Keys(key, key), server, own, rows)[0]

    index = jax.ShapeDtypeStruct((slots,), jnp.int32)
    return jax.eval_shape(upload, server, own, x, y, index)


# --- contributions


def worst(mechanism: Any, like: Tree, rounds: int = 1) -> tuple[Tree, Tree, str]:
    """Return the contribution that changes the release most, in units of the noise.

    Args:
        mechanism: the chain that it passes through.
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
        weight, distance = _detector(mechanism, row)
        if distance > farthest:
            best, farthest = (row, weight, words), float(distance)
    _check_range(length, farthest)
    return best


def random(mechanism: Any, like: Tree, rounds: int, count: int, seed: int) -> tuple:
    """Return contributions along random directions, with the same norm as that of `worst`.

    They are orthogonal if there are enough coordinates, so that the attack can distinguish them.

    Args:
        mechanism, like, rounds: as in `worst`.
        count: the number of contributions.
        seed: the seed of the directions.

    Returns:
        Their values before the clip, and the weights of a projection that detects each: two trees
        like `like`, with leaves [count, ...].
    """
    length = _length(mechanism, like, rounds)
    mechanism = mech.at_round(mechanism, jnp.int32(0))
    leaves, structure = jax.tree.flatten(like)
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    drawn = np.random.default_rng(seed).normal(size=(count, sum(sizes))).astype(np.float32)
    if count <= sum(sizes) and count * count * sum(sizes) <= MAX_QR_PRODUCTS:
        drawn = np.linalg.qr(drawn.T)[0].T
    parts = zip(np.split(drawn, np.cumsum(sizes)[:-1], axis=1), leaves, strict=True)
    directions = [jnp.asarray(part.reshape(count, *leaf.shape)) for part, leaf in parts]

    @jax.jit
    @jax.vmap
    def put(direction):
        row = pytrees.scale(length / pytrees.norm(direction), direction)
        return row, *_detector(mechanism, row)

    rows, weights, distances = put(jax.tree.unflatten(structure, directions))
    _check_range(length, float(distances.min()))
    return rows, weights


def _length(mechanism, like, rounds):
    """Return the norm of a contribution before its chain clips it."""
    if mechanism is None or not mech.has_clip(mechanism):
        got = "none" if mechanism is None else str([s.name for s in mechanism.stages])
        hint = "Without a bound, no canary is the worst: clip first."
        refuse("a chain that bounds one contribution", got, hint)
    largest = min(float(jnp.finfo(v.dtype).max) for v in jax.tree.leaves(like))
    every = range(rounds if mech.scheduled(mechanism) else 1)
    length = max(float(mech.bound(mech.at_round(mechanism, jnp.int32(r)))) for r in every)
    if any(s.declared for s in mechanism.stages):
        return length
    return max(length, min(LENGTH * length, 1e-2 * largest))


def _detector(mechanism, row):
    """Return the weights of the projection that detects a contribution, and its change there."""
    moved = clipped(mechanism, row)
    weight = against_noise(mechanism, moved)
    distance = jnp.sqrt(_dot(weight, moved))
    return pytrees.scale(1 / distance, weight), distance


def clipped(mechanism: Mechanism, row: Tree) -> Tree:
    """Return what a contribution adds to the sum after the row stages, in float32.

    Args:
        mechanism: the chain.
        row: the contribution before the clip.
    """
    stacked = jax.tree.map(lambda v: v[None], row)
    moved = mech.clip_and_sum(mechanism, mech.initial_state(mechanism), stacked, jnp.ones(1)).value
    return moved[0] if mech.adaptive(mechanism) else moved  # without the vote on the clip norm


def against_noise(mechanism: Mechanism, moved: Tree) -> Tree:
    """Return the weights of the projection that best detects a change of the sum.

    If the noise is equal in all coordinates, the weights are the change itself.

    Args:
        mechanism: the chain that adds the noise.
        moved: the change of the sum.
    """
    shape = mech.shape(mechanism)
    if shape is None:
        return moved
    return bands.scale(shape.bands, jnp.square(shape.scales), moved)


def _check_range(length, distance):
    """Reject a canary whose length or effect is outside the range of float32."""
    if not 0 < distance < math.inf:
        got, hint = f"{length:g} for a canary", "Scale the loss and the bound."
        checks.fail("jfl.audit", "a bound whose square is in the range of float32", got, hint)


def _dot(a, b):
    """Return the inner product of two pytrees."""
    return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def _directions(shape, like):
    """Yield descriptions and directions: one coordinate, or a wavelet of each band of the noise."""
    if shape is None:
        first = lambda v: jnp.zeros(v.size).at[0].set(1.0).reshape(v.shape)
        yield "in one coordinate of each parameter", jax.tree.map(first, like)
        return
    ids = [np.asarray(i) for i in bands.ids(shape.bands)]
    for band in range(bands.count(shape.bands)):
        coefficients = []
        for i in ids:
            is_band = i.reshape(-1) == band
            is_first = is_band & (np.cumsum(is_band) == 1)
            coefficients.append(jnp.asarray(is_first.reshape(i.shape), jnp.float32))
        direction = bands.synthesise(shape.bands, tuple(coefficients), like)
        yield f"along a wavelet of band {band}", direction


def along(weight: Tree, rounds: int, of: Algorithm) -> tuple:
    """Return `seen` and `see` for `watching.watched`, which record the projection of each release.

    Args:
        weight: the direction of the projection.
        rounds: the number of rounds.
        of: the algorithm that is watched.
    """
    leaves = tuple(jax.tree.leaves(weight))
    see = Fn(_see_projection, dict(weight=leaves), dict(model=of.uploads == "model"))
    return jnp.zeros((rounds, watching.COPIES), jnp.float32), see


@named("audit.see_projection")
def _see_projection(moment, seen, *, weight, model):
    """Record the projection of a round's release."""
    return seen.at[moment.round].set(watching.projections(watching.change(moment, model), weight))


# --- how often the canary counts


def distribution_of_copies(plan: Plan, entry: Entry, client: int) -> np.ndarray | None:
    """Return the distribution of how often the canary counts in the observations of a round.

    Args:
        plan: the audited plan.
        entry: the ledger entry that is attacked.
        client: the id of the canary's client.

    Returns:
        Float64[m], the probabilities of 0, 1, ... copies; None if they are unknown.
    """
    draws = plan.sampler.capacity if plan.sampler.scheme == "with_replacement" else 1
    cohort = _binomial(draws, _participation_rates(plan.sampler)[client])
    if entry.unit == "client":
        return cohort
    releases: Any = plan.algorithm.releases
    if entry.implied:
        return cohort if all(r.batches.scheme == "full" for r in releases) else None
    if len(releases) > 1 or releases[0].steps or entry.view == "personal":
        return None
    rows = int(np.asarray(plan.fed.size).reshape(-1)[client])
    batches, steps, copies = releases[0].batches, releases[0].count, np.ones(1)
    if batches.scheme == "epochs":  # an epoch uses every row once
        whole, rest = divmod(steps, -(-rows // batches.batch))
        copies = np.append(np.zeros(whole), _binomial(1, rest * batches.batch / rows))
    else:
        for _ in range(steps):
            copies = np.convolve(copies, _copies_in_a_batch(batches, rows))
    mixed = np.zeros((len(copies) - 1) * (len(cohort) - 1) + 1)
    for times, probability in enumerate(cohort):  # a client that is drawn twice counts twice
        mixed[np.arange(len(copies)) * times] += probability * copies
    return mixed


def _copies_in_a_batch(batches, rows):
    """Return the probabilities of 0, 1, ... copies of one row in a batch."""
    if batches.scheme == "full":
        return _binomial(1, 1.0)
    if batches.scheme in ("poisson", "truncated_poisson"):
        return _binomial(1, batches.rate if batches.rate is not None else batches.expected / rows)
    if batches.scheme == "without_replacement":
        return _binomial(1, batches.batch / rows)
    return _binomial(batches.batch, 1 / rows)


def _binomial(draws, probability):
    """Return the binomial probabilities of 0 to `draws` successes."""
    from scipy import stats  # slow: not at import

    return stats.binom.pmf(np.arange(draws + 1), draws, min(float(probability), 1.0))
