"""Losses with a key: dropout, noise layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import CLIENTS, flat, make_federation

import jfl
from jfl.core.records import Batch, Context
from jfl.gradients.per_example import gradient_path
from jfl.models import losses

KEY = jax.random.key(3)
ROWS = 6


def dropped(params, x, y, key):
    """Two layers with dropout between them."""
    hidden = jnp.tanh(x @ params["in"])
    kept = jax.random.bernoulli(key, 0.5, hidden.shape)
    return (jnp.where(kept, 2 * hidden, 0) @ params["out"] - y) ** 2


def params_():
    return {"in": jnp.ones((3, 4)) / 3, "out": jnp.arange(1.0, 5)}


def batch_():
    r = np.random.default_rng(0)
    x, y = r.normal(size=(ROWS, 3)).astype(np.float32), r.normal(size=ROWS).astype(np.float32)
    return Batch(jnp.asarray(x), jnp.asarray(y), jnp.arange(ROWS) != 2)


def context():
    one = jnp.float32(1)
    return Context(jnp.int32(0), jnp.int32(0), jnp.int32(ROWS), one, 1, one)


@functools.cache
def of_rows():
    """The gradient of each row of the batch, with the key of its place."""
    params, batch, gradient = params_(), batch_(), jax.jit(jax.grad(dropped))
    base = jax.random.fold_in(KEY, losses.ROWS)
    return [
        flat(gradient(params, batch.x[i], batch.y[i], jax.random.fold_in(base, i)))
        for i in range(ROWS)
        if batch.mask[i]
    ]


def of_batch(gradient):
    """The gradient of the batch, as a function of the key."""
    return jax.jit(lambda key: gradient(key, params_(), batch_(), context()))


def test_the_mean_gradient_is_that_of_a_loop():
    wanted, gradient = np.mean(of_rows(), 0), of_batch(jfl.grad(dropped))
    g, _ = gradient(KEY)
    np.testing.assert_allclose(flat(g), wanted, rtol=1e-5)
    # and not that of another key
    other, _ = gradient(jax.random.key(4))
    assert np.abs(flat(other) - wanted).max() > 0.1


@pytest.mark.parametrize(
    "how", [dict(path="bookkeeping"), dict(path="vmap", microbatch=4)], ids=["bookkeeping", "vmap"]
)
def test_clipped_gradients_are_those_of_a_loop(how):
    total = sum(g * min(1.0, 2.0 / np.linalg.norm(g)) for g in of_rows())
    chain = jfl.chain(jfl.clip_l2(2.0), jfl.total(), jfl.divide(5))
    chain = dataclasses.replace(chain, adjacency="replace_one")
    g, (_, clipped) = of_batch(jfl.private_grad(dropped, chain, **how))(KEY)
    np.testing.assert_allclose(flat(g), total / 5, rtol=2e-5)
    assert clipped > 0


COPIES = 3


def copies_of(x, key):
    """Random changes of a row, Float[COPIES, 3]."""
    return [x + jax.random.normal(one, x.shape) for one in jax.random.split(key, COPIES)]


def still(params, x, y):
    return (jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2


def augmented(params, x, y, key):
    """The mean over changes of a row."""
    changed = lambda one: still(params, x + jax.random.normal(one, x.shape), y)
    return jax.vmap(changed)(jax.random.split(key, COPIES)).mean()


@pytest.mark.parametrize("path", ["bookkeeping", "vmap"])
def test_gradients_of_augmented_copies_are_averaged_before_the_clip(path):
    """Docs/guides/model.md promises this for a loss that averages over copies."""
    params, batch, gradient = params_(), batch_(), jax.jit(jax.grad(still))
    base, clipped = jax.random.fold_in(KEY, losses.ROWS), lambda g: g / max(1, np.linalg.norm(g))
    before, after = [], []
    for i in np.flatnonzero(batch.mask):
        copies = copies_of(batch.x[i], jax.random.fold_in(base, i))
        each = [flat(gradient(params, copy, batch.y[i])) for copy in copies]
        before.append(clipped(np.mean(each, 0)))
        after.append(np.mean([clipped(g) for g in each], 0))
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total())
    chain = dataclasses.replace(chain, adjacency="replace_one")
    got = flat(of_batch(jfl.private_grad(augmented, chain, path=path))(KEY)[0])
    np.testing.assert_allclose(got, np.sum(before, 0), rtol=2e-5)
    assert np.abs(got - np.sum(after, 0)).max() > 0.05


def test_augmented_copies_change_no_bound_and_no_guarantee():
    def plan_of(loss):
        chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(2))
        batch = jfl.batches.without_replacement(2)
        algorithm = jfl.algorithms.fedavg(jfl.private_grad(loss, chain), steps=2, batch=batch)
        task = jfl.task(params_(), loss)
        return jfl.plan(make_federation(), task, algorithm, jfl.sampling.full(CLIENTS))

    plans = [plan_of(still), plan_of(augmented)]
    assert [gradient_path(p) for p in plans] == ["bookkeeping"] * 2
    one, other = (jfl.guarantee(p, 5, delta=1e-5) for p in plans)
    assert one == other and one.status == "proved"

    # one row, however large, moves the sum by at most the clip norm
    batch = batch_()
    batch = batch._replace(x=1e3 * batch.x, y=1e3 * batch.y, mask=jnp.arange(ROWS) == 1)
    chain = jfl.chain(jfl.clip_l2(0.5), jfl.total())
    gradient = jfl.private_grad(augmented, dataclasses.replace(chain, adjacency="replace_one"))
    moved = flat(jax.jit(lambda: gradient(KEY, params_(), batch, context()))()[0])
    assert np.linalg.norm(moved) == pytest.approx(0.5, rel=1e-5)


def drawn(params, x, y, key):
    """A loss whose gradient is what its key draws."""
    return params @ jax.random.normal(key, params.shape)


@pytest.mark.slow
def test_every_row_step_client_and_round_has_its_own_draw():
    """The mean of so many independent normals has the variance of so many."""
    wide = 2000
    task = jfl.task(jnp.zeros(wide), drawn)
    batch = jfl.batches.without_replacement(2)
    algorithm = jfl.algorithms.fedavg(jfl.grad(drawn), lr=1.0, steps=3, batch=batch)
    plan = jfl.plan(make_federation(), task, algorithm, jfl.sampling.full(CLIENTS))
    run, moved = jfl.init(KEY, plan), []
    for _ in range(2):
        before = np.asarray(run.server.params)
        run, _ = jfl.run_round(run, plan)
        moved.append(np.asarray(run.server.params) - before)
    # each is a sum over 3 steps of means over 2 rows and the clients
    variance = 3 / (2 * CLIENTS)
    for one in moved:  # sqrt(2 / wide) = 3.2 %: six deviations are 19 %
        assert abs(one.var() / variance - 1) < 0.19
    assert abs(np.corrcoef(*moved)[0, 1]) < 6 / np.sqrt(wide)


def dropped_linear(params, x, y, key):
    return (jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0) @ params - y) ** 2


def _client(context, keys, server, own, rows, *, work):
    trained, _, _, seen = jfl.local.train(work, context, keys, server.params, rows)
    return jax.tree.map(jnp.subtract, trained, server.params), own, seen


def test_a_loss_with_a_key_is_proved_as_one_without():
    """Also in a user's client, which is traced: that a child of the noise key goes to the loss is
    no release of it."""

    def plan_of(loss, mine):
        chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(2))
        grad, batch = jfl.private_grad(loss, chain), jfl.batches.without_replacement(2)
        algorithm = jfl.algorithms.fedavg(grad, steps=2, batch=batch)
        if mine:
            client = jfl.Fn(_client, dict(work=algorithm.client.data["work"]))
            algorithm = dataclasses.replace(algorithm, client=client, name="mine")
        task = jfl.task(jnp.zeros(3), loss)
        return jfl.plan(make_federation(), task, algorithm, jfl.sampling.full(CLIENTS))

    plain = plan_of(lambda params, x, y: (x @ params - y) ** 2, mine=False)
    keyed = plan_of(dropped_linear, mine=True)
    assert "bookkeeping" in gradient_path(keyed)
    one, other = (jfl.guarantee(p, 5, delta=1e-5) for p in (plain, keyed))
    assert one.epsilon == other.epsilon and one.status == other.status == "proved"


@pytest.mark.slow
def test_the_loss_of_test_rows():
    """`evaluation` where it is given, which takes no key; else one key for each row, the same every
    time."""
    fed = make_federation()
    still = lambda params, x, y: (x @ params - y) ** 2
    x, y = fed.x_test, fed.y_test
    exact = np.mean((np.asarray(x).sum(1) - np.asarray(y)) ** 2)
    for evaluation in (still, None):
        task = jfl.task(jnp.ones(3), dropped_linear, evaluation=evaluation)
        algorithm = jfl.algorithms.fedsgd(jfl.grad(task.loss), lr=1e-6)
        plan = jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))
        loss = jfl.simulate(KEY, plan, 2, evaluate_every=1).metrics.loss
        assert abs(loss[0] - loss[1]) < 1e-3 * loss[0]
        assert (abs(loss[0] / exact - 1) < 0.01) == (evaluation is not None)
    with pytest.raises(ValueError, match=r"evaluation.*\(params, x, y\)"):
        jfl.task(jnp.zeros(3), dropped_linear, evaluation=dropped_linear)


def test_which_losses_take_a_key():
    three = [
        lambda params, x, y, scale=1.0: 0,
        lambda *rows: 0,
        jfl.Fn(lambda params, x, y, scale: 0, dict(scale=1.0)),
    ]
    four = [
        lambda params, x, y, key=None: 0,
        lambda params, x, y, random: 0,
        jax.jit(dropped),
        jfl.Fn(lambda params, x, y, key, *, scale: 0, dict(scale=1.0)),
    ]
    assert not any(map(losses.takes_key, three)) and all(map(losses.takes_key, four))
