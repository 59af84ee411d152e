"""The main job on real MNIST, at the size of the README's table."""

import os

import jax
import pytest

import jfl

pytestmark = pytest.mark.skipif(
    "JFL_DATA_DIR" not in os.environ,
    reason="real MNIST NOT trained on: set JFL_DATA_DIR to a folder with tfds/mnist",
)


@pytest.fixture(scope="module")
def fed():
    return jfl.federate(jfl.datasets.mnist(), jfl.partition.iid(clients=100))


@pytest.mark.slow
def test_fedavg_learns_mnist(fed):
    task = jfl.models.logistic(fed)
    alg = jfl.algorithms.fedavg(
        jfl.grad(task.loss), lr=0.3, steps=20, batch=jfl.batches.without_replacement(20)
    )
    plan = jfl.plan(fed, task, alg, jfl.sampling.without_replacement(100, 10))
    out = jfl.simulate(jax.random.key(0), plan, rounds=60)
    assert float(out.metrics.accuracy[-1]) >= 0.90


@pytest.mark.slow  # that it learns on digits, with its epsilon, is in docs/test_blocks.py
def test_private_fedavg_learns_mnist_at_a_stated_epsilon(fed):
    task = jfl.models.logistic(fed)
    mechanism = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(2.0), jfl.divide(60))
    alg = jfl.algorithms.fedavg(
        jfl.private_grad(task.loss, mechanism),
        lr=1.0,
        steps=5,
        batch=jfl.batches.without_replacement(60),
    )
    plan = jfl.plan(fed, task, alg, jfl.sampling.without_replacement(100, 20))
    out = jfl.simulate(jax.random.key(0), plan, rounds=15)
    worth = jfl.guarantee(plan, rounds=15, delta=1e-5)
    assert (
        float(out.metrics.accuracy[-1]) > 0.75 and worth.epsilon < 2.5 and worth.unit == "example"
    )
