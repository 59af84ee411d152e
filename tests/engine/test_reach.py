"""Checks that training reaches the parameters, and that predictions use those that are trained."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.problems import CLIENTS, make_federation

import jfl

PARAMS = dict(w=jnp.zeros((3, 3)), b=jnp.zeros(3))
output = lambda p, x: x @ p["w"] + p["b"]
entropy = lambda z, y: -jax.nn.log_softmax(z)[y]
loss = lambda p, x, y: entropy(output(p, x), y)


def plan_of(loss, predict=None, **options):
    fed = make_federation(classes=3, held_out=2)
    task = jfl.task(PARAMS, loss, predict)
    algorithm = jfl.algorithms.fedavg(
        jfl.grad(task.loss), steps=1, batch=jfl.batches.full(), **dict(lr=0.1) | options
    )
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))


def detached(p, x, y):
    return entropy(output(jax.lax.stop_gradient(p), x), y)


def in_a_loop(p, x, y):
    z, _ = jax.lax.scan(lambda z, _: (z + jax.checkpoint(output)(p, x), None), 0 * x, length=2)
    return entropy(z, y)


@jax.custom_vjp
def weighted(w, x):
    return x @ w


weighted.defvjp(lambda w, x: (x @ w, x), lambda x, g: (jnp.outer(x, g), g))


@pytest.mark.parametrize(
    "training, predict",
    [
        (loss, output),
        (loss, None),
        (in_a_loop, output),
        (lambda p, x, y: entropy(jax.jit(weighted)(p["w"], x) + p["b"], y), output),
    ],
)
def test_training_that_reaches_the_model(training, predict):
    plan_of(training, predict)  # without a warning


@pytest.mark.parametrize("training", [detached, lambda p, x, y: x.sum() - y])
def test_a_loss_without_a_gradient_is_rejected(training):
    with pytest.raises(ValueError, match="gradient of the loss to depend .* no use of b, w"):
        plan_of(training, output)


def test_predictions_of_another_model_are_rejected():
    """The loss falls and epsilon counts, but the model that is evaluated stays as it was."""
    with pytest.raises(ValueError, match="predict to depend on the parameters, .* use of b, w"):
        plan_of(loss, lambda p, x: output(PARAMS, x))


def test_parameters_that_training_or_predictions_leave_out_are_named():
    with pytest.warns(UserWarning, match="gradient of the loss does not depend on b") as found:
        plan_of(lambda p, x, y: entropy(x @ p["w"] + jnp.round(p["b"]), y), output)
    assert found[0].filename == __file__ and len(found) == 1
    with pytest.warns(UserWarning, match="predict does not depend on b"):
        plan_of(loss, lambda p, x: x @ p["w"])
    with warnings.catch_warnings(), pytest.raises(ValueError, match="predict .* no use of w"):
        warnings.simplefilter("ignore")  # the loss trains w alone, and predict reads b alone
        plan_of(lambda p, x, y: entropy(x @ p["w"], y), lambda p, x: x + p["b"])


def frozen_server(lr):
    return optax.set_to_zero()


def test_a_run_that_changes_no_parameter_is_reported():
    plan = plan_of(loss, output, server_optimizer=frozen_server)
    with pytest.warns(RuntimeWarning, match="no parameter changed in 3 rounds, although updates"):
        start = jfl.simulate(jax.random.key(0), plan, 3).run
    with pytest.warns(RuntimeWarning, match="no parameter changed in 2 rounds, although updates"):
        jfl.simulate(jax.random.key(0), plan, 2, start=start)


def test_only_the_parameters_of_a_new_run_are_copied(monkeypatch):
    copies, copy = [], np.array
    plan = plan_of(loss, output)
    start = jfl.simulate(jax.random.key(0), plan, 1).run
    monkeypatch.setattr(
        np, "array", lambda x, *a, **k: copies.append(np.shape(x)) or copy(x, *a, **k)
    )
    jfl.simulate(jax.random.key(0), plan, 1)
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(start.server)]
    assert all(copies.count(shape) for shape in shapes)
    copies.clear()
    jfl.simulate(jax.random.key(0), plan, 1, start=start)
    assert not any(copies.count(shape) for shape in shapes)


def test_parameters_move_by_what_is_released():
    plan = plan_of(loss, output)
    out = jfl.simulate(jax.random.key(0), plan, 1)
    assert float(out.metrics.update_norm[0]) > 0
    moved = optax.tree.norm(out.params)  # from zero
    np.testing.assert_allclose(moved, out.metrics.update_norm[0], rtol=1e-5)
