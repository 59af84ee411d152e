"""A run that diverged without a value that is not finite says so."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfl


def make_plan(loss, lr=0.1):
    x = np.ones((8, 2), np.float32)
    rows = jfl.datasets.arrays(x, x[:, 0], x[:2], x[:2, 0], classes=0)
    task = jfl.task(np.ones(2, np.float32), loss)
    alg = jfl.algorithms.fedavg(jfl.grad(task.loss), lr=lr, steps=1, batch=jfl.batches.full())
    return jfl.plan(jfl.federate(rows, jfl.partition.iid(2)), task, alg, jfl.sampling.full(2))


def linear(w, x, y):
    return x @ w


def nan_loss(w, x, y):
    return x @ w + jax.lax.stop_gradient(jnp.nan)


@pytest.mark.parametrize(
    "plan, words",
    [
        (make_plan(nan_loss), "diverged: the training loss is nan in 1 of 1"),
        (make_plan(linear, lr=1e30), r"parameters are as large as 1e\+30"),
    ],
)
def test_a_run_that_diverged_is_reported(plan, words):
    with pytest.warns(RuntimeWarning, match=words):
        out = jfl.simulate(jax.random.key(0), plan, rounds=1)
    assert np.isfinite(out.params).all()


def test_a_healthy_run_reports_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jfl.simulate(jax.random.key(0), make_plan(linear), rounds=1)


def test_the_points_of_a_sweep_are_named():
    with pytest.warns(RuntimeWarning) as told:
        jfl.sweep(lambda lr: make_plan(linear, lr), rounds=1, lr=[0.1, 1e30])
    assert len(told) == 1 and "1e+30" in str(told[0].message) and "lr" in str(told[0].message)
