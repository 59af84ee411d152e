"""Plans that train on their own rows, some of which are canaries.

The canary of the module `canaries` is the worst case, because nothing else changes the release.
Here all other rows and clients train as usual, so an audit shows how much an attack learns from an
ordinary training, which is less.

A coin flip decides whether a canary is included.  If it is excluded, the original row (or the
client's original rows) takes part under "replace_one", and nothing under "add_remove".
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core import checks, pytrees
from ..core.records import Federation, Fn, Mechanism, Plan, Task, Tree, named
from ..models.losses import for_evaluation
from ..privacy.ledger.entry import Entry
from ..privacy.mechanisms import chain as mech
from . import canaries, watching
from .canaries import refuse

SEED = 2023  # the seed of random directions
MAX_GRADIENTS = 32  # number of canaries whose gradients are in memory at once
MAX_ROWS = 64  # number of rows of a client whose loss is observed
MAX_DIRECTION_NUMBERS = 2**28  # total number of coordinates of all random directions

CANARIES = ("mislabelled", "blank", "direction")
DESCRIPTIONS = {
    ("example", "mislabelled"): "a row with a wrong label",
    ("example", "blank"): "a row of zeros",
    ("example", "direction"): "a row whose gradient lies far along a random direction",
    ("client", "mislabelled"): "a client whose labels are all wrong",
    ("client", "blank"): "a client whose rows are all zeros",
    ("client", "direction"): "an upload far along a random direction",
}
NEIGHBOURS = {  # by unit, and whether an excluded canary leaves its rows unchanged
    ("example", True): "the unchanged row",
    ("example", False): "no row",
    ("client", True): "its own rows",
    ("client", False): "no upload",
}
OBSERVED = {
    "releases": "each aggregate of {} rounds",
    "models": "the models of {} rounds",
    "final model": "the model after {} rounds, and the first one",
}
SEES = tuple(OBSERVED)


class Training(NamedTuple):
    """A plan with canaries, before the coins are flipped.

    Attributes:
        plan: the plan in which canaries replace some rows.
        unit: "example" or "client": what a canary is.
        replaced: True if, without the canary, the original row (or the client's own rows) takes
            part, as in replace_one; False if no row (no upload) does.
        rows: Int[m, s], the rows of each of the m canaries.
        clients: Int[m], the client of each canary.
        kind: how a canary differs from ordinary rows, one of CANARIES.
        sees: what the adversary observes, one of SEES.
        sent: [m, ...], the gradient or upload of each canary before the clip; None means that of
            its rows.
        weights: [m, ...], the projection that detects a canary; None means that its loss does.
        chain: the chain that clips the gradient of a row; None if no chain bounds it.
        canary: a description of the canary and its neighbour.
        adversary: a description of the observations.
        copies: see `canaries.Experiment`.
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
    canary: str
    adversary: str
    copies: np.ndarray | None


def experiment(plan: Plan, entry: Entry, rounds: int, kind: str, sees: str) -> canaries.Experiment:
    """Return the plans with and without one canary; the arguments are those of `training`."""
    made = training(plan, entry, rounds, kind, sees)
    inside, outside = (with_coins(made, rounds, np.array([coin])) for coin in (True, False))
    if entry.unit == "client" and canaries.absence_moves_clip_norm(plan, entry):
        weights = jnp.asarray(made.plan.weights).at[made.clients[0]].set(0.0)
        outside = dataclasses.replace(outside, weights=weights)
    return canaries.Experiment(inside, outside, made.copies, made.canary, made.adversary)


def training(
    plan: Plan, entry: Entry, rounds: int, kind: str, sees: str, count: int = 1
) -> Training:
    """Place canaries in a plan; return the changed plan and what is needed to detect them.

    Args:
        plan: the audited plan, with rows on the device.
        entry: the ledger entry: whose privacy, against which observer.
        rounds: the number of rounds of each run.
        kind: "mislabelled" (a row, or all rows of a client, with the next label), "blank" (rows of
            zeros), "direction" (a gradient or an upload of large norm in a random direction).
        sees: "releases" (white box, each round), "models" (the canary's loss under the model of
            each round), "final model" (black box: its loss under the last one).
        count: the number of canaries.

    Raises:
        NotAnalysable: For plans in which no such canary can be placed.
        ArgumentError: For more canaries than there are rows or clients.
    """
    canaries.refuse_implied(entry)
    alone = entry.view == "server" and sees == "releases"
    _check_placeable(plan, entry, kind, count, alone)
    client = canaries.weakest_client(plan, entry)
    like = jax.eval_shape(plan.task.init, jax.random.key(0))
    if entry.unit == "client":
        like = canaries.upload_shapes(plan)
    if alone:
        plan, client = canaries.alone(plan, client)
    rows, clients = _places(plan, entry.unit, client, count, alone)
    chain = sent = weights = copies = None
    if entry.unit == "example" and not entry.implied:
        chain = plan.algorithm.releases[0].mechanism
    if kind == "direction":
        most = MAX_DIRECTION_NUMBERS // pytrees.size(like)
        if count > most:
            hint = 'Use fewer canaries, or canary="mislabelled".'
            checks.fail("jfl.audit", f"at most {most} random directions of this size", count, hint)
        bound = canaries.chain_of(plan) if entry.unit == "client" else chain
        sent, weights = canaries.random(bound, like, rounds, count, SEED)
        if sees == "releases":
            copies = canaries.distribution_of_copies(plan, entry, client)
    replaced = entry.adjacency == "replace_one"
    canary = f"{DESCRIPTIONS[entry.unit, kind]}, against {NEIGHBOURS[entry.unit, replaced]}"
    adversary = f"{OBSERVED[sees].format(rounds)}; all others train"
    if alone:
        adversary = f"each upload of the canary's client of {rounds} rounds, which trains alone"
    whose = (plan, entry.unit, replaced, rows, clients, kind, sees)
    return Training(*whose, sent, weights, chain, canary, adversary, copies)


def _check_placeable(plan, entry, kind, count, alone):
    """Reject plans in which no such canary can be placed."""
    worst_case = 'Use canary="worst case".'
    if entry.view == "personal":
        refuse("canary='worst case' for view='personal'", f"canary={kind!r}", worst_case)
    if entry.adjacency == "zero_out":
        expected = "add_remove or replace_one for canaries in a training"
        hint = "Audit the same plan under replace_one, or use the worst-case canary."
        refuse(expected, "zero_out, under which a row is drawn and adds nothing", hint)
    if plan.fed.host is not None:
        expected = f"rows on the device for canary={kind!r}"
        refuse(expected, "rows on the host", worst_case)
    if entry.implied and kind == "direction":
        expected = "noise for a row's gradient for canary='direction'"
        hint = "Use canary='mislabelled', 'blank' or 'worst case', or unit='client'."
        refuse(expected, "noise for what its client uploads", hint)
    chains = (plan.upload, plan.release, *(r.mechanism for r in plan.algorithm.releases))
    declared = any(s.declared for m in chains if m is not None for s in m.stages)
    if declared and kind == "direction":
        hint = "A direction is another loss: use canary='mislabelled' or 'blank'."
        got = "a bound that is declared for a loss"
        refuse("a chain that clips for canary='direction'", got, hint)
    check_owners(plan.fed, f"rows with one owner each for canary={kind!r}", worst_case)
    if kind == "mislabelled" and plan.fed.classes < 2:
        expected = 'labels of classes for canary="mislabelled"'
        refuse(expected, "a federation with classes=0", 'Use canary="direction" or "blank".')
    if count > 1 and entry.unit == "client" and canaries.absence_moves_clip_norm(plan, entry):
        expected = "a clip norm that no client votes on, for clients that are added or removed"
        refuse(expected, "an adaptive one", "Audit one client: jfl.audit.")
    if count > 1 and entry.unit == "client" and alone:
        expected = "clients that are seen together"
        got = "the view of the server, who sees each upload separately"
        refuse(expected, got, "Audit one client (jfl.audit), or use sees='models'.")


def owned_rows(fed: Federation) -> np.ndarray:
    """Return the numbers of the rows of all clients, Int[n]; a row of two clients is there twice.

    Args:
        fed: a federation with rows on the device.
    """
    filled = np.arange(fed.index.shape[1]) < np.asarray(fed.size)[:, None]
    return np.asarray(fed.index)[filled]


def check_owners(fed: Federation, expected: str, hint: str) -> None:
    """Reject a federation in which several clients have the same row.

    Args:
        fed: a federation with rows on the device.
        expected, hint: as in `checks.fail`.
    """
    owned = owned_rows(fed)
    if shared := len(owned) - len(np.unique(owned)):
        refuse(expected, f"{shared} that have several, all of whom would change", hint)


def _places(plan, unit, client, count, alone):
    """Return the rows [m, s] and clients [m] of the canaries.  The first is at `client`, the one
    with the least noise, and the others follow; with `alone`, all are at that client."""
    sizes, index = np.asarray(plan.fed.size), np.asarray(plan.fed.index)
    order = np.roll(np.arange(len(sizes)), -client)
    order = order[sizes[order] > 0]
    if unit == "client":
        available, what = len(order), "clients with rows"
    elif alone:
        available, what = int(sizes[client]), "rows of the client whose uploads are seen"
    else:
        available, what = int(sizes.sum()), "rows"
    if count > available:
        expected = f"at most as many canaries as {what}, {available}"
        checks.fail("jfl.audit", expected, count, "Use fewer canaries.")
    if unit == "client":
        clients = order[:count]
        return index[clients, : min(MAX_ROWS, int(sizes[clients].min()))], clients
    if alone:
        return index[client, :count, None], np.full(count, client)
    places = [(slot, c) for slot in range(index.shape[1]) for c in order if slot < sizes[c]]
    slots, clients = np.array(places[:count]).T
    return index[clients, slots][:, None], clients


# --- the plan with its canaries


def with_coins(made: Training, rounds: int, coins: np.ndarray) -> Plan:
    """Return the plan that includes the canaries whose coin is True.

    Plans that differ only in their coins share one compiled program.

    Args:
        made: the training, with its m canaries.
        rounds: the number of rounds, R.
        coins: Bool[m].

    Returns:
        The plan.  Its runs keep Float[R, m, k] in `run.server.seen`: k observations of each canary
        in each round.
    """
    fed, inside = made.plan.fed, np.asarray(coins, bool)
    if made.unit == "example":
        rows, changed = made.rows[:, 0], inside if made.replaced else np.ones_like(inside)
    else:
        each = [np.asarray(fed.index[c, : int(fed.size[c])]) for c in made.clients]
        rows, changed = np.concatenate(each), np.repeat(inside, list(map(len, each)))
    x, y = _changed(fed, rows[changed], made.kind)
    plan = with_included(made, jnp.asarray(inside), x, y)
    algorithm = watching.watched(plan.algorithm, *_observations(made, rounds))
    return dataclasses.replace(plan, algorithm=algorithm)


def with_included(made: Training, inside: jax.Array, x: jax.Array, y: jax.Array) -> Plan:
    """Return the plan on given rows, in which only the included canaries take part.

    If `made.replaced`, excluded canaries take part with their own rows, and only the included ones
    send what `made.sent` prescribes.

    Args:
        made: the training, with its m canaries.
        inside: Bool[m], which canaries are included; may be traced.
        x, y: all rows and labels, with those of the canaries.
    """
    if made.unit == "client" or (made.replaced and made.sent is None):
        plan = _on_rows(made.plan, x, y)
    else:
        which = _canary_numbers(len(made.plan.fed.x), made.rows[:, 0])
        data = dict(x=x, y=y, which=which, inside=inside, slopes=made.sent)
        plan = _on_row_numbers(made.plan, data, made.replaced)
    if made.unit != "client":
        return plan
    which = _canary_numbers(made.plan.sampler.clients, made.clients)
    data = dict(which=which, uploads=made.sent, inside=inside)
    client = Fn(_send, dict(of=plan.algorithm.client, **data), dict(replaced=made.replaced))
    return dataclasses.replace(plan, algorithm=dataclasses.replace(plan.algorithm, client=client))


def _canary_numbers(size, places):
    """Return the number of the canary at each place, Int32[size]; the number of canaries for
    none."""
    which = np.full(size, len(places), np.int32)
    which[places] = np.arange(len(places))
    return jnp.asarray(which)


def _changed(fed, rows, kind):
    """Return all rows and labels, with a canary instead of each of `rows`."""
    x, y = fed.x, fed.y
    if kind == "mislabelled":
        y = y.at[rows].set((y[rows] + 1) % fed.classes)
    if kind == "blank":
        x = x.at[rows].set(jnp.zeros((), x.dtype))
    return x, y


def _on_rows(plan: Plan, x, y) -> Plan:
    """Return the plan on other rows, without test rows, which would be evaluated in each round."""
    clients, one = plan.sampler.clients, jnp.zeros((1,), jnp.float32)
    none = dict(x_test=one, y_test=one, test_index=jnp.zeros((clients, 0), jnp.int32))
    test_size = jnp.zeros(clients, jnp.int32)
    fed = dataclasses.replace(plan.fed, x=x, y=y, test_size=test_size, **none)
    task = Task(init=plan.task.init, loss=Fn(canaries.nothing))
    return dataclasses.replace(plan, fed=fed, task=task)


def _on_row_numbers(plan: Plan, data: dict, replaced: bool) -> Plan:
    """Return the plan on row numbers, with losses that look up the rows, so that a row can be
    absent or have a prescribed gradient.

    Raises:
        NotAnalysable: If a client reads rows in other ways than by gradients of jfl.
    """

    def looked_up(node):
        if not canaries.is_grad(node):
            return node
        loss = Fn(_row_loss, dict(of=node.loss, **data), dict(replaced=replaced))
        # A prescribed gradient uses the parameters differently from the layers of the model.
        auto = data["slopes"] is not None and node.path == "bookkeeping"
        return dataclasses.replace(node, loss=loss, path="auto" if auto else node.path)

    algorithm = jax.tree.map(looked_up, plan.algorithm, is_leaf=canaries.is_grad)
    count = len(plan.fed.x)
    numbers = jnp.arange(count, dtype=jnp.int32), jnp.zeros(count, jnp.float32)
    made = _on_rows(dataclasses.replace(plan, algorithm=algorithm), *numbers)
    canaries.check_rows_are_numbers(made)
    return made


@named("audit.row_loss")
def _row_loss(params, number, _, *, of, x, y, replaced, which, inside, slopes):
    """Return the loss of the row with this number; the label in the federation is not used.

    Args:
        params, number: the arguments of a loss; with the words of a key for a random loss.
        of: the loss of the plan.
        x, y: all rows.
        replaced: whether an excluded canary leaves its row unchanged; otherwise it has no loss.
        which: Int[n], the canary that replaces each row; m for none.
        inside: Bool[m].
        slopes: [m, ...], prescribed gradients of included canaries, or None.
    """
    number, *words = number if isinstance(number, tuple) else (number,)
    value = of(params, (x[number], *words) if words else x[number], y[number])
    is_canary, is_included, slope = _lookup(which[number], inside, slopes)
    if slope is not None:
        leaves = zip(jax.tree.leaves(slope), jax.tree.leaves(params), strict=True)
        linear = sum(jnp.vdot(s, p) for s, p in leaves)
        value = jnp.where(is_canary & is_included, linear, value)
    return value if replaced else jnp.where(is_included, value, 0.0)


@named("audit.send")
def _send(context, keys, server, own, rows, *, of, which, uploads, inside, replaced):
    """Run the client, and replace its upload by that of a canary, or by zeros."""
    payload, own, diagnostics = of(context, keys, server, own, rows)
    number = which.at[context.client].get(mode="fill", fill_value=len(inside))
    is_canary, is_included, upload = _lookup(number, inside, uploads)
    choose = lambda condition, a, b: jax.tree.map(
        lambda a, b: jnp.where(condition, a.astype(b.dtype), b), a, b
    )
    if upload is not None:
        payload = choose(is_canary & is_included, upload, payload)
    if not replaced:
        payload = choose(is_included, payload, pytrees.zeros_like(payload))
    return payload, own, diagnostics


def _lookup(number, inside, contributions):
    """Return whether there is a canary with this number, whether it is included or there is none,
    and its contribution (None if none is prescribed)."""
    is_included = inside.at[number].get(mode="fill", fill_value=True)
    own = jax.tree.map(lambda c: c.at[number].get(mode="clip"), contributions)
    return number < len(inside), is_included, own


# --- observations


def _observations(made, rounds):
    """Return zeros in the shape of the observations, [R, m, k], and the function that records
    them, for `watching.watched`."""
    plan, count = made.plan, len(made.rows)
    model, loss = dict(model=plan.algorithm.uploads == "model"), for_evaluation(plan.task)
    leaves = None if made.weights is None else tuple(jax.tree.leaves(made.weights))
    x, y = _changed(plan.fed, made.rows, made.kind)
    data = dict(loss=loss, shown=(x[made.rows], y[made.rows]))
    if made.sees != "releases":
        if leaves is not None:
            params = jax.eval_shape(plan.task.init, jax.random.key(0))
            leaves = leaves[: len(jax.tree.leaves(params))]
        data = dict(data, weights=leaves, last=jnp.int32(rounds - 1))
        see = Fn(_see_models, data, dict(final=made.sees == "final model"))
        return jnp.zeros((rounds, count, 2), jnp.float32), see
    if leaves is not None:
        see = Fn(_see_projections, dict(weights=leaves), model)
    else:
        rows = (plan.fed.x[made.rows], plan.fed.y[made.rows]) if made.replaced else None
        data = dict(data, rows=rows, chain=made.chain)
        see = Fn(_see_gradients, data, dict(model, unit=made.unit))
    return jnp.zeros((rounds, count, watching.COPIES), jnp.float32), see


@named("audit.see_projections")
def _see_projections(moment, seen, *, weights, model):
    """Record the projections of a round's release, one for each canary."""
    release = watching.change(moment, model)
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
    release, tiny = watching.change(moment, model), jnp.finfo(jnp.float32).tiny
    now = None if chain is None else mech.at_round(chain, moment.round)

    def contribution(x, y):
        gradient = jax.grad(lambda params: mean_loss(loss, params, x, y))(moment.before)
        if now is not None:
            return canaries.clipped(now, gradient)
        if unit == "client":  # the gradient does not determine the norm of an upload
            return pytrees.scale(1 / jnp.maximum(pytrees.norm(gradient), tiny), gradient)
        return gradient

    def projections(pair):
        shown, rows = pair
        moved = contribution(*shown)
        if rows is not None:
            moved = pytrees.sub(moved, contribution(*rows))
        weight = moved if now is None else canaries.against_noise(now, moved)
        return watching.projections(release, jax.tree.leaves(weight))

    size = min(MAX_GRADIENTS, len(shown[1]))
    return seen.at[moment.round].set(jax.lax.map(projections, (shown, rows), batch_size=size))


@named("audit.see_models")
def _see_models(moment, seen, *, loss, shown, weights, last, final):
    """Record losses or projections of the canaries, now and before the first round."""

    def read(params):
        if weights is None:
            return jax.vmap(lambda x, y: mean_loss(loss, params, x, y))(*shown)
        return jax.vmap(lambda w: watching.projections(params, w)[0])(weights)

    now = jnp.stack([read(moment.after), read(moment.first)], axis=-1)
    if final:
        now = jnp.where(moment.round == last, now, 0.0)
    return seen.at[moment.round].set(now)


def mean_loss(loss, params, x, y):
    """Return the mean loss of several rows."""
    return jax.vmap(loss, (None, 0, 0))(params, x, y).astype(jnp.float32).mean()
