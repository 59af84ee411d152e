"""Canaries in a training: plans that train on their own rows, some of which are canaries.

The canary of `canaries` is the worst case, because nothing else moves the release.  Here everyone
else trains, so an audit shows what an attack finds in an ordinary training, which is less.

A coin flip decides whether a canary is included.  Without it, the row or the client's rows remain
unchanged under "replace_one", and are absent under "add_remove".
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core import checks, pytrees
from ..core.errors import NotAnalysable
from ..core.records import Fn, Mechanism, Plan, Task, Tree, named
from ..gradients.per_example import Grad
from ..models.losses import for_evaluation
from ..privacy.ledger.entry import Entry
from ..privacy.mechanisms import chain as mech
from . import canaries, watching

CANARIES = ("mislabelled", "blank", "direction")
SEES = ("releases", "models", "final model")
SEED = 2023  # of random directions
GRADIENTS = 32  # of canaries that are held at once
LARGEST = 2**28  # numbers of all directions together
SHOWN = 64  # rows of a client whose loss is read


class Training(NamedTuple):
    """A plan with canaries, before the coins are flipped.

    Attributes:
        plan: the plan in which canaries replace some rows.
        unit: "example" or "client": what a canary is.
        replaced: whether an excluded canary leaves its row, or its client's rows, unchanged.
        rows: Int[m, s], the rows of each canary.
        clients: Int[m], the client of each canary.
        kind: one of CANARIES.
        sees: one of SEES.
        sent: [m, ...], the gradient or upload of each canary before the clip; None means that of
            its rows.
        weights: [m, ...], the projection that detects a canary; None means that its loss does.
        chain: the chain that clips the gradient of a row; None if no chain bounds it.
        words: a description of the canary and its alternative.
        adversary: a description of the observations.
    """

    plan: Plan
    unit: str
    replaced: bool
    rows: np.ndarray
    clients: np.ndarray
    kind: str
    sees: str
    sent: Tree | None
    weights: Tree | None
    chain: Mechanism | None
    words: str
    adversary: str


def training(
    plan: Plan, entry: Entry, rounds: int, kind: str, sees: str, count: int = 1
) -> tuple[Training, np.ndarray | None]:
    """Return canaries for a plan, and the probabilities that one counts 0, 1, ... times in a round.

    Args:
        plan: the audited plan, with rows on the device.
        entry: the ledger entry: whose privacy, against which observer.
        rounds: the number of rounds of each run.
        kind: "mislabelled" (a row, or all rows of a client, with the next label), "blank" (rows of
            zeros), "direction" (a gradient, or an upload, far along a random direction).
        sees: "releases" (white box, each round), "models" (the canary's loss under the model of
            each round), "final model" (black box: its loss under the last one).
        count: the number of canaries.

    Raises:
        NotAnalysable: For plans in which no such canary can be placed.
        ArgumentError: For more canaries than there are rows or clients.
    """
    canaries.refuse_implied(entry)
    if entry.view == "personal":
        raise NotAnalysable(
            "jfl.audit: expected canary='worst case' for view='personal', but got "
            f"canary={kind!r}. "
            "In a training, personal models are not observed."
        )
    if entry.adjacency == "zero_out":
        raise NotAnalysable(
            "jfl.audit: expected add_remove or replace_one for canaries in a training, "
            "but got zero_out, "
            "under which a row is drawn and adds nothing. Audit the same plan under replace_one, "
            "or its mechanism: jfl.audit with its default canary."
        )
    _can_hold(plan, entry, kind)
    if count > 1 and entry.unit == "client" and canaries.votes(plan, entry):
        raise NotAnalysable(
            "jfl.audit_one_run: expected a clip norm that no client votes on, for clients that are "
            "added or removed, but got an adaptive one. Audit one client: jfl.audit."
        )
    client = canaries.weakest_client(plan, entry)
    like = jax.eval_shape(plan.task.init, jax.random.key(0))
    if entry.unit == "client":
        like = canaries.upload_shapes(plan)
    alone = entry.view == "server" and sees == "releases"
    if alone and count > 1 and entry.unit == "client":
        raise NotAnalysable(
            "jfl.audit_one_run: expected clients that are seen together, but got the "
            "view of the server, "
            "who sees each upload by itself. Audit one client (jfl.audit), or take sees='models'."
        )
    if alone:
        plan, client = canaries.alone(plan, client)
    rows, clients = _places(plan, entry.unit, client, count, alone)
    chain = sent = weights = None
    if entry.unit == "example" and not entry.implied:
        chain = plan.algorithm.releases[0].mechanism
    if kind == "direction":
        _fits(count, like)
        bound = canaries.chain_of(plan) if entry.unit == "client" else chain
        sent, weights = canaries.random(bound, like, rounds, count, SEED)
    replaced = entry.adjacency == "replace_one"
    law = None
    if kind == "direction" and sees == "releases":
        law = canaries.law_of(plan, entry, client)
    made = Training(
        plan,
        entry.unit,
        replaced,
        rows,
        clients,
        kind,
        sees,
        sent,
        weights,
        chain,
        _words(entry.unit, kind, replaced),
        _adversary(rounds, sees, alone),
    )
    return made, law


def experiment(plan: Plan, entry: Entry, rounds: int, kind: str, sees: str) -> canaries.Experiment:
    """Return a plan with one canary and its neighbour; the arguments are those of `training`."""
    made, law = training(plan, entry, rounds, kind, sees)
    sides = [with_coins(made, rounds, np.array([inside])) for inside in (True, False)]
    if entry.unit == "client" and canaries.votes(plan, entry):
        # an absent client does not vote on the clip norm either
        weights = jnp.asarray(made.plan.weights).at[made.clients[0]].set(0.0)
        sides[1] = dataclasses.replace(sides[1], weights=weights)
    return canaries.Experiment(sides[0], sides[1], law, made.words, made.adversary)


def _can_hold(plan, entry, kind):
    if plan.fed.host is not None:
        raise NotAnalysable(
            f"jfl.audit: expected rows on the device for canary={kind!r}, but got rows "
            "on the host. "
            'canary="worst case" needs none of them.'
        )
    if entry.implied and kind == "direction":
        raise NotAnalysable(
            "jfl.audit: expected noise for a row's gradient for canary='direction', but "
            "got noise for what "
            "its client uploads. Take canary='mislabelled', 'blank' or 'worst case', or "
            "unit='client'."
        )
    chains = (plan.upload, plan.release, *(r.mechanism for r in plan.algorithm.releases))
    declared = [s for m in chains if m is not None for s in m.stages if s.declared]
    if declared and kind == "direction":
        raise NotAnalysable(
            "jfl.audit: expected a chain that clips for canary='direction', but got a "
            "bound that is "
            "declared of a loss. A direction is a loss of its own, of which nothing was declared: "
            "take canary='mislabelled' or 'blank'."
        )
    # a canary changes a row wherever it is owned
    filled = np.arange(plan.fed.index.shape[1]) < np.asarray(plan.fed.size)[:, None]
    owned = np.asarray(plan.fed.index)[filled]
    if len(np.unique(owned)) < len(owned):
        raise NotAnalysable(
            f"jfl.audit: expected rows with one owner each for canary={kind!r}, but got "
            f"{len(owned) - len(np.unique(owned))} that are owned again, of which all would change."
            " canary='worst case' needs none of them."
        )
    if kind == "mislabelled" and plan.fed.classes < 2:
        raise NotAnalysable(
            'jfl.audit: expected labels of classes for canary="mislabelled", but got a '
            "federation with "
            'classes=0. Take canary="direction" or "blank".'
        )


def _fits(count, like):
    size = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(like))
    if count * size > LARGEST:
        checks.fail(
            "jfl.audit",
            f"at most {LARGEST // size} directions of {size} parameters",
            count,
            'Take fewer canaries, or canary="mislabelled".',
        )


def _places(plan, unit, client, count, alone):
    """Return the rows [m, s] and clients [m] of the canaries.  The first is at `client`, the one
    with the least noise, and the others follow; with `alone`, all are at that client."""
    sizes, index = np.asarray(plan.fed.size), np.asarray(plan.fed.index)
    have = int((sizes > 0).sum())
    if unit == "example":
        have = int(sizes[client] if alone else sizes.sum())
    if count > have:
        of = "rows of the client whose uploads are seen" if alone else "rows"
        of = "clients with rows" if unit == "client" else of
        checks.fail(
            "jfl.audit",
            f"at most as many canaries as {of}, {have}",
            count,
            'Take fewer, or sees="models".' if alone and unit == "example" else "Take fewer.",
        )
    order = np.roll(np.arange(len(sizes)), -client)
    order = order[sizes[order] > 0]
    if unit == "client":
        clients = order[:count]
        shown = min(SHOWN, int(sizes[clients].min()))
        return index[clients, :shown], clients
    if alone:
        return index[client, :count, None], np.full(count, client)
    turns = [(slot, c) for slot in range(index.shape[1]) for c in order if slot < sizes[c]]
    slots, clients = np.array(turns[:count]).T
    return index[clients, slots][:, None], clients


def _words(unit, kind, replaced):
    words = {
        "example": {
            "mislabelled": "a row with a wrong label",
            "blank": "a row of zeros",
            "direction": "a row whose gradient lies far along a random direction",
        },
        "client": {
            "mislabelled": "a client whose labels are all wrong",
            "blank": "a client whose rows are all zeros",
            "direction": "an upload far along a random direction",
        },
    }
    against = ("the row as it was", "no row")
    if unit == "client":
        against = ("its own rows", "no upload")
    return f"{words[unit][kind]}, against {against[0 if replaced else 1]}"


def _adversary(rounds, sees, alone):
    if sees == "releases" and alone:
        return f"each upload of the canary's client of {rounds} rounds, which trains alone"
    seen = {
        "releases": f"each aggregate of {rounds} rounds",
        "models": f"the models of {rounds} rounds",
        "final model": f"the model after {rounds} rounds, and the first one",
    }
    return f"{seen[sees]}; all others train"


# --- what is put in


def with_coins(made: Training, rounds: int, coins: np.ndarray) -> Plan:
    """Return the plan that includes the canaries whose coin is True; coins are Bool[m].

    Its runs keep the observations, Float[R, m, k], in `run.server.seen`.  Other coins give the same
    program.
    """
    fed, inside = made.plan.fed, np.asarray(coins, bool)
    if made.unit == "example":
        changed = made.rows[:, 0], inside if made.replaced else np.ones_like(inside)
    else:
        changed = [np.asarray(fed.index[c, : int(fed.size[c])]) for c in made.clients]
        inside_of = np.repeat(inside, [len(rows) for rows in changed])
        changed = np.concatenate(changed), inside_of
    x, y = _changed(fed, *changed, made.kind)
    if made.unit == "client" or (made.replaced and made.sent is None):
        plan = _on_rows(made.plan, x, y)
    else:
        which = np.full(len(fed.x), len(inside), np.int32)
        which[made.rows[:, 0]] = np.arange(len(inside))
        rows = dict(x=x, y=y, which=jnp.asarray(which), inside=jnp.asarray(inside))
        plan = _on_numbers(made.plan, rows | dict(slopes=made.sent), made.replaced)
    client = None
    if made.unit == "client":
        which = np.full(made.plan.sampler.clients, len(inside), np.int32)
        which[made.clients] = np.arange(len(inside))
        client = dict(of=plan.algorithm.client, which=jnp.asarray(which), uploads=made.sent)
        client = Fn(_send, client | dict(inside=jnp.asarray(inside)), dict(replaced=made.replaced))
    algorithm = watching.watched(plan.algorithm, *_seen(made, rounds), client=client)
    return dataclasses.replace(plan, algorithm=algorithm)


def _changed(fed, rows, inside, kind):
    """Return all rows and labels, with a canary instead of each of `rows` that is inside."""
    x, y, rows = fed.x, fed.y, rows[inside]
    if kind == "mislabelled":
        y = y.at[rows].set((y[rows] + 1) % fed.classes)
    if kind == "blank":
        x = x.at[rows].set(jnp.zeros((), x.dtype))
    return x, y


def _on_rows(plan: Plan, x, y) -> Plan:
    """Return the plan on other rows, without test rows, which would be evaluated in each round."""
    clients, one = plan.sampler.clients, jnp.zeros((1,), jnp.float32)
    fed = dataclasses.replace(
        plan.fed,
        x=x,
        y=y,
        x_test=one,
        y_test=one,
        test_index=jnp.zeros((clients, 0), jnp.int32),
        test_size=jnp.zeros(clients, jnp.int32),
    )
    task = Task(init=plan.task.init, loss=Fn(canaries.nothing))
    return dataclasses.replace(plan, fed=fed, task=task)


def _on_numbers(plan: Plan, rows: dict, replaced: bool) -> Plan:
    """Return the plan on row numbers, with losses that look up the rows, so that a row can be
    absent or have a prescribed gradient.

    Raises:
        NotAnalysable: If a client reads rows in other ways than by gradients of jfl.
    """
    facts, found = dict(replaced=replaced), []

    def looked_up(node):
        if not isinstance(node, Grad):
            return node
        found.append(node)
        loss = Fn(_row_loss, dict(of=node.loss, **rows), facts)
        # a prescribed gradient uses the parameters differently from the layers of the model
        auto = rows["slopes"] is not None and node.path == "bookkeeping"
        return dataclasses.replace(node, loss=loss, path="auto" if auto else node.path)

    algorithm = jax.tree.map(looked_up, plan.algorithm, is_leaf=lambda node: isinstance(node, Grad))
    count = len(plan.fed.x)
    numbers = jnp.arange(count, dtype=jnp.int32), jnp.zeros(count, jnp.float32)
    made = _on_rows(dataclasses.replace(plan, algorithm=algorithm), *numbers)
    try:
        if not found:
            raise TypeError("no gradient of jfl in the algorithm")
        canaries.upload_shapes(made)
    except (TypeError, ValueError) as error:
        raise NotAnalysable(
            "jfl.audit: expected rows that only gradients of jfl read, for one that is "
            "absent or has a "
            f"direction, but got {checks.describe_error(error)}. Take "
            "canary='mislabelled' or 'blank' with "
            "adjacency='replace_one', or unit='client'."
        ) from error
    return made


@named("audit.row_loss")
def _row_loss(params, number, _, *, of, x, y, replaced, which, inside, slopes):
    """Return the loss of the row with this number; the label in the federation is not used.

    Args:
        params, number: the arguments of a loss; with the words of a key for a random one.
        of: the loss of the plan.
        x, y: all rows.
        replaced: whether an excluded canary leaves its row unchanged; otherwise it has no loss.
        which: Int[n], the canary that replaces each row; m for none.
        inside: Bool[m].
        slopes: [m, ...], prescribed gradients of included canaries, or None.
    """
    number, *words = number if isinstance(number, tuple) else (number,)
    value = of(params, (x[number], *words) if words else x[number], y[number])
    canary = which[number]
    here = canary < len(inside)
    there = inside.at[canary].get(mode="fill", fill_value=True)
    if slopes is not None:
        chosen = [s.at[canary].get(mode="clip") for s in jax.tree.leaves(slopes)]
        leaves = zip(chosen, jax.tree.leaves(params), strict=True)
        linear = sum(jnp.vdot(s, p) for s, p in leaves)
        value = jnp.where(here & there, linear, value)
    return value if replaced else jnp.where(there, value, 0.0)


@named("audit.send")
def _send(context, keys, server, own, rows, *, of, which, uploads, inside, replaced):
    """Run the client, and replace its upload by that of a canary, or by zeros."""
    payload, own, watched = of(context, keys, server, own, rows)
    canary = which.at[context.client].get(mode="fill", fill_value=len(inside))
    here = canary < len(inside)
    there = inside.at[canary].get(mode="fill", fill_value=True)
    if uploads is not None:
        upload = jax.tree.map(lambda u: u.at[canary].get(mode="clip"), uploads)
        payload = _chosen(here & there, upload, payload)
    if not replaced:
        payload = _chosen(there, payload, pytrees.zeros_like(payload))
    return payload, own, watched


def _chosen(condition, one, other):
    return jax.tree.map(lambda a, b: jnp.where(condition, a.astype(b.dtype), b), one, other)


# --- what is seen


def _seen(made, rounds):
    """Return zeros in the shape of the observations, [R, m, k], and the function that records
    them, for `watching.watched`."""
    plan, count = made.plan, len(made.rows)
    of, loss = plan.algorithm, for_evaluation(plan.task)
    model = dict(model=of.uploads == "model")
    whole = jnp.zeros((rounds, count, watching.COPIES), jnp.float32)
    leaves = None if made.weights is None else tuple(jax.tree.leaves(made.weights))
    x, y = _changed(plan.fed, made.rows, np.ones(made.rows.shape, bool), made.kind)
    shown = x[made.rows], y[made.rows]
    if made.sees == "releases":
        if leaves is not None:
            return whole, Fn(_see_projections, dict(weights=leaves), model)
        rows = (plan.fed.x[made.rows], plan.fed.y[made.rows]) if made.replaced else None
        data = dict(loss=loss, shown=shown, rows=rows, chain=made.chain)
        return whole, Fn(_see_gradients, data, model | dict(unit=made.unit))
    if leaves is not None:
        params = jax.eval_shape(plan.task.init, jax.random.key(0))
        leaves = leaves[: len(jax.tree.leaves(params))]
    data = dict(loss=loss, shown=shown, weights=leaves, last=jnp.int32(rounds - 1))
    see = Fn(_see_models, data, dict(final=made.sees == "final model"))
    return jnp.zeros((rounds, count, 2), jnp.float32), see


def _release(moment, model):
    """Return the release; for models, the difference from the broadcast model, which is known."""
    return pytrees.sub(moment.release, moment.before) if model else moment.release


@named("audit.see_projections")
def _see_projections(moment, seen, *, weights, model):
    release = _release(moment, model)
    return seen.at[moment.round].set(jax.vmap(lambda w: watching.projections(release, w))(weights))


@named("audit.see_gradients")
def _see_gradients(moment, seen, *, loss, shown, rows, chain, model, unit):
    """Project each copy of the parameters in a release onto what each canary adds to it, minus what
    the rows without the canary add, computed from gradients at the broadcast parameters.

    Args:
        moment, seen: see `watching.watched`.
        loss: the loss of one row.
        shown: x, y of each canary's rows.
        rows: x, y of the rows without the canary, or None.
        chain: the chain that clips the gradient of a row, or None.
        model: whether a release is a model.
        unit: "example" or "client".
    """
    release, tiny = _release(moment, model), jnp.finfo(jnp.float32).tiny
    now = None if chain is None else mech.at_round(chain, moment.round)

    def adds(x, y):
        gradient = jax.grad(lambda params: _mean_loss(loss, params, x, y))(moment.before)
        if now is not None:
            return canaries.clipped(now, gradient)
        if unit == "client":  # the gradient does not determine the norm of an upload
            return pytrees.scale(1 / jnp.maximum(pytrees.norm(gradient), tiny), gradient)
        return gradient

    def one(shown, rows):
        moved = adds(*shown) if rows is None else pytrees.sub(adds(*shown), adds(*rows))
        weight = moved if now is None else canaries.against_noise(now, moved)
        return watching.projections(release, jax.tree.leaves(weight))

    # a gradient of each canary, of so many at once
    each = lambda pair: one(*pair)
    found = jax.lax.map(each, (shown, rows), batch_size=min(GRADIENTS, len(shown[1])))
    return seen.at[moment.round].set(found)


@named("audit.see_models")
def _see_models(moment, seen, *, loss, shown, weights, last, final):
    """Record losses or projections of the canaries, now and before the first round."""

    def read(params):
        if weights is None:
            return jax.vmap(lambda x, y: _mean_loss(loss, params, x, y))(*shown)
        return jax.vmap(lambda w: watching.projections(params, w)[0])(weights)

    now = jnp.stack([read(moment.after), read(moment.first)], axis=-1)
    if final:
        now = jnp.where(moment.round == last, now, 0.0)
    return seen.at[moment.round].set(now)


def _mean_loss(loss, params, x, y):
    return jax.vmap(loss, (None, 0, 0))(params, x, y).astype(jnp.float32).mean()
