"""A run that diverged without a value that is not finite says so."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfl


def run(loss, lr=0.1, rounds=1):
    x = np.ones((8, 2), np.float32)
    fed = jfl.federate(
        jfl.datasets.arrays(x, x[:, 0], x[:2], x[:2, 0], classes=0), jfl.partition.iid(2)
    )
    task = jfl.task(np.ones(2, np.float32), loss)
    alg = jfl.algorithms.fedavg(jfl.grad(task.loss), lr=lr, steps=1, batch=jfl.batches.full())
    return jfl.simulate(
        jax.random.key(0), jfl.plan(fed, task, alg, jfl.sampling.full(2)), rounds=rounds
    )


def nan_loss(w, x, y):
    return x @ w + jax.lax.stop_gradient(jnp.nan)


def test_a_loss_that_is_nan_is_reported():
    with pytest.warns(RuntimeWarning, match="diverged: the training loss is nan in 1 of 1"):
        out = run(nan_loss)
    assert np.isfinite(out.params).all()


def test_huge_parameters_are_reported():
    with pytest.warns(RuntimeWarning, match=r"parameters are as large as 1e\+30; lower the lear"):
        run(lambda w, x, y: x @ w, lr=1e30)


def test_a_healthy_run_reports_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(lambda w, x, y: (x @ w - y) ** 2)


def test_the_points_of_a_sweep_are_named():
    x = np.ones((8, 2), np.float32)
    fed = jfl.federate(
        jfl.datasets.arrays(x, x[:, 0], x[:2], x[:2, 0], classes=0), jfl.partition.iid(2)
    )
    task = jfl.task(np.ones(2, np.float32), lambda w, x, y: x @ w)
    make = lambda lr: jfl.plan(
        fed,
        task,
        jfl.algorithms.fedavg(jfl.grad(task.loss), lr=lr, steps=1, batch=jfl.batches.full()),
        jfl.sampling.full(2),
    )
    with pytest.warns(RuntimeWarning) as told:
        jfl.sweep(make, rounds=1, lr=[0.1, 1e30])
    assert len(told) == 1 and "1e+30" in str(told[0].message) and "lr" in str(told[0].message)
