"""A plan that trains on its own rows, with canaries among them.

What `canaries` puts in is the worst case: nothing else moves the release.  Here everyone else
trains, so that an audit says what an attack finds in a training as it is.  It shows less.

A canary is in or out by a coin.  Out means the row, or the client's rows, as they were under
"replace_one", and nothing at all under "add_remove".
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core import checks, pytrees
from ..core.errors import NotAnalysable
from ..core.losses import for_evaluation
from ..core.records import Fn, Mechanism, Plan, Task, Tree, named
from ..gradients.per_example import Grad
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
    """A plan that waits for coins.

    Attributes:
        plan: of which canaries take the place of some rows.
        unit: "example" or "client", whose canaries they are.
        replaced: that a canary which is out leaves its row, or its client's rows, as they were.
        rows: Int[m, s], those of each canary.
        clients: Int[m], whose they are.
        kind: one of CANARIES.
        sees: one of SEES.
        sent: [m, ...], the gradient or upload of each canary before it is clipped; None: its own.
        weights: [m, ...], the projection that finds it; None: its loss is read.
        chain: what a row's gradient goes through before it is added; None: no chain bounds it.
        words: what is put in, and against what.
        adversary: what is seen.
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
    """Canaries for a plan, and how probable it is that one counts 0, 1, ... times in a round.

    Args:
        plan: what is audited; its rows are on the device.
        entry: of its ledger: whose privacy, and against whom.
        rounds: of each run.
        kind: "mislabelled" (a row, or all rows of a client, with the next label), "blank" (rows of
            zeros), "direction" (a gradient, or an upload, far along a random direction).
        sees: "releases" (white box, each round), "models" (the canary's loss under the model of
            each round), "final model" (black box: its loss under the last one).
        count: how many canaries.

    Raises:
        NotAnalysable: for plans in which no such canary can be put.
        ArgumentError: for more canaries than there are rows or clients.
    """
    canaries.refuse_implied(entry)
    if entry.view == "personal":
        raise NotAnalysable(
            "jfl.audit: expected canary='worst case' for view='personal', but got "
            f"canary={kind!r}. "
            "In a training, personal models are not looked at."
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
    """One canary in a training, and its neighbour: arguments as `training`."""
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
    """Rows [m, s] and clients [m] of the canaries: the first is the client with least noise, the
    others follow it; one that is alone has them all."""
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
    """The plan with those canaries in whose coin is True; coins Bool[m].

    Its runs keep what the adversary sees, Float[R, m, k] in `run.server.seen`: of other coins it is
    the same program.
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
    """The rows and labels of all, with a canary in the place of those `rows` that are inside."""
    x, y, rows = fed.x, fed.y, rows[inside]
    if kind == "mislabelled":
        y = y.at[rows].set((y[rows] + 1) % fed.classes)
    if kind == "blank":
        x = x.at[rows].set(jnp.zeros((), x.dtype))
    return x, y


def _on_rows(plan: Plan, x, y) -> Plan:
    """The plan on other rows, without test rows: they would be looked at in every round."""
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
    """The plan on numbers in place of rows, which its losses look up: a row may count as absent, or
    have a gradient of its own.

    Raises:
        NotAnalysable: where a client reads rows beside the gradients that jfl knows.
    """
    facts, found = dict(replaced=replaced), []

    def looked_up(node):
        if not isinstance(node, Grad):
            return node
        found.append(node)
        loss = Fn(_row_loss, dict(of=node.loss, **rows), facts)
        # a slope uses parameters in a way of its own
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
    """The loss of the row with this number; the label in the federation is not used.

    Args:
        params, number: as a loss is given them; with the words of a key for one that draws.
        of: the loss of the plan.
        x, y: all rows.
        replaced: that a canary which is out leaves its row as it was; else it has no loss.
        which: Int[n], the canary in the place of each row; m for none.
        inside: Bool[m].
        slopes: [m, ...], the gradients of canaries that are in; None: their own.
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
    """What a client sends: its own upload, a canary's, or nothing."""
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
    """What is kept of each round, [R, m, k], and how: for `watching.watched`."""
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
    """What was released; of models, how far from the one that was broadcast, which is known."""
    return pytrees.sub(moment.release, moment.before) if model else moment.release


@named("audit.see_projections")
def _see_projections(moment, seen, *, weights, model):
    release = _release(moment, model)
    return seen.at[moment.round].set(jax.vmap(lambda w: watching.projections(release, w))(weights))


@named("audit.see_gradients")
def _see_gradients(moment, seen, *, loss, shown, rows, chain, model, unit):
    """Each copy of the parameters in a release, along what each canary adds to it, less what the
    rows in its place would add: by their gradients at the broadcast.

    Args:
        moment, seen: of `watching.watched`.
        loss: of one row.
        shown: x, y of each canary's rows.
        rows: x, y of the rows in their place; None: none are.
        chain: clips a row's gradient; None: a client's upload, or what a row moves in it.
        model: that a release is a model.
        unit: "example" or "client".
    """
    release, tiny = _release(moment, model), jnp.finfo(jnp.float32).tiny
    now = None if chain is None else mech.at_round(chain, moment.round)

    def adds(x, y):
        gradient = jax.grad(lambda params: _mean_loss(loss, params, x, y))(moment.before)
        if now is not None:
            return canaries.clipped(now, gradient)
        if unit == "client":  # how long an upload is, no gradient says
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
    """What the parameters say of each canary, now and before the first round, which is public."""

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
