"""Optimizers for noisy gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfl
from jfl.core.errors import ArgumentError, NotAnalysable
from jfl.local.optimizers import adam_without_noise_bias, noise_std


def by_hand(gradients, lr, s, b1, b2, least):
    """A plain loop."""
    w = m = v = np.zeros(gradients.shape[1])
    for t, g in enumerate(gradients, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        signal = np.maximum(v / (1 - b2**t) - s**2, least)
        w = w - lr * m / (1 - b1**t) / np.sqrt(signal)
    return w


def run(optimizer, gradients):
    w = jnp.zeros(gradients.shape[1])
    state = optimizer.init(w)
    for g in gradients:
        updates, state = optimizer.update(jnp.asarray(g, jnp.float32), state)
        w = optax.apply_updates(w, updates)
    return w


@pytest.mark.parametrize("s", [0.0, 0.5, 5.0])
def test_it_equals_a_loop(s):
    gradients = np.random.default_rng(0).normal(size=(12, 5))
    found = run(adam_without_noise_bias(0.1, s, 0.8, 0.9, 1e-4), gradients)
    np.testing.assert_allclose(found, by_hand(gradients, 0.1, s, 0.8, 0.9, 1e-4), rtol=2e-4)


def test_without_noise_it_is_adam():
    gradients = np.random.default_rng(1).normal(size=(9, 4)) + 1
    found = run(adam_without_noise_bias(0.1, 0.0, least=1e-30), gradients)
    np.testing.assert_allclose(found, run(optax.adam(0.1, eps=1e-15), gradients), rtol=1e-4)


def test_the_second_moment_is_that_of_the_signal():
    """Signals of 0.1 and 0.4 in noise of 1: steps of one size, as of Adam without noise."""
    s, rng = 1.0, np.random.default_rng(2)
    signal = np.array([0.1, 0.4])
    gradients = signal + s * rng.normal(size=(200_000, 2)) / 1
    v = np.square(gradients).mean(0)
    assert np.sqrt(v[1] / v[0]) < 1.1  # Adam's: nearly alike
    np.testing.assert_allclose(np.sqrt(v - s**2), signal, atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["client", "server"])
def test_it_trains_and_costs_nothing(where):
    fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(10))
    task = jfl.models.logistic(fed)
    level = jfl.gaussian(1.0 if where == "client" else 0.3)
    noise = jfl.chain(jfl.clip_l2(1.0), jfl.total(), level, jfl.divide(16))
    adam = functools.partial(adam_without_noise_bias, noise_std=noise_std(noise))
    if where == "client":
        grad, sites = jfl.private_grad(task.loss, noise), {}
        algorithm = functools.partial(jfl.algorithms.fedavg, grad, lr=0.01)
        algorithms = [
            algorithm(steps=5, batch=jfl.batches.poisson(16.0), optimizer=o)
            for o in (adam, optax.sgd)
        ]
    else:
        sites = dict(release=noise)
        algorithm = functools.partial(jfl.algorithms.fedavg, jfl.grad(task.loss), lr=0.5)
        algorithms = [
            algorithm(steps=2, batch=jfl.batches.full(), server_optimizer=o, server_lr=0.05)
            for o in (adam, optax.sgd)
        ]
    plans = [jfl.plan(fed, task, a, jfl.sampling.full(10), **sites) for a in algorithms]
    first, other = (jfl.guarantee(p, 30, 1e-5) for p in plans)
    assert first.epsilon == other.epsilon and first.status == "proved"
    out = jfl.simulate(jax.random.key(0), plans[0], rounds=30)
    assert float(out.metrics.accuracy[-1]) > 0.3


def test_noise_std_is_that_of_the_release():
    chain = jfl.chain(
        jfl.clip_l2(0.5), jfl.total(), jfl.gaussian(2.0), jfl.divide(10), adjacency="replace_one"
    )
    assert noise_std(chain) == pytest.approx(2.0 * 1.0 / 10)
    rows = jnp.zeros((3, 4000))
    drawn, _ = jfl.privacy.mechanisms.chain.release(chain, jax.random.key(0), (), rows, jnp.ones(3))
    assert float(drawn.std()) == pytest.approx(noise_std(chain), rel=6 / 8000**0.5)
    assert noise_std(
        jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(std=0.3))
    ) == pytest.approx(0.3)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: adam_without_noise_bias(0.1, -1.0), "noise_std"),
        (lambda: adam_without_noise_bias(0.1, b1=1.0), r"b1 in \[0, 1\)"),
        (lambda: adam_without_noise_bias(0.1, least=0.0), "least"),
        (lambda: noise_std(jfl.chain(jfl.clip_l2(1.0), jfl.total())), "of one level"),
        (lambda: noise_std("chain"), "jfl.chain"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises((ArgumentError, NotAnalysable), match=words):
        call()
