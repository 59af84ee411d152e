"""Optimizers of clients and servers, for noisy gradients; and where learning rates come from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.problems import make_federation, squared

import jfl
from jfl.core.errors import ArgumentError, NotAnalysable
from jfl.local.optimizers import adam_without_noise_bias, noise_std

# --- learning rates: numbers, schedules, factories and ready transformations

GRAD = jfl.grad(squared)


@pytest.mark.parametrize(
    "make, name, option",
    [
        (jfl.algorithms.fedavg, "lr", "optimizer"),
        (jfl.algorithms.fedavg, "server_lr", "server_optimizer"),
        (jfl.algorithms.fedsgd, "lr", "server_optimizer"),
    ],
)
def test_a_rate_beside_a_ready_transformation_is_refused(make, name, option):
    for rate in (5.0, lambda clock: 0.1):
        with pytest.raises(ValueError, match=f"either a learning rate or .* Leave {name} out"):
            make(GRAD, **{name: rate, option: optax.adam(0.01)})
    make(GRAD, **{option: optax.adam(0.01)})
    jfl.algorithms.scaffold(GRAD, optimizer=optax.sgd(0.5), lr=0.5)  # its control variates need it


def test_a_ready_schedule_is_taken_unchanged():
    ready = optax.exponential_decay(0.1, 10, 0.5)
    given = jfl.schedules.from_optax(ready, every=3)
    options = dict(init_value=0.1, transition_steps=10, decay_rate=0.5)
    by_factory = jfl.schedules.from_optax(optax.exponential_decay, 3, **options)
    for clock in (0, 7, 30):
        assert float(given(clock)) == pytest.approx(float(ready(clock // 3)))
        assert float(by_factory(clock)) == pytest.approx(float(ready(clock // 3)))


# --- parameters in half precision


def test_optimizers_keep_float32_moments_of_bfloat16_parameters():
    """Moments in bfloat16 lose small changes, and arrays of hyperparameters raise their type."""
    fed = make_federation(classes=3)
    task = jfl.models.logistic(fed)

    def trained(dtype):
        params = jax.tree.map(lambda x: x.astype(dtype), task.init(jax.random.key(1)))
        algorithm = jfl.algorithms.fedadam(
            jfl.grad(task.loss),
            lr=0.1,
            server_lr=0.1,
            optimizer=functools.partial(optax.sgd, momentum=0.9),
            steps=3,
            batch=jfl.batches.full(),
        )
        sampler = jfl.sampling.full(fed.size.shape[0])
        plan = jfl.plan(fed, jfl.task(params, task.loss), algorithm, sampler)
        return jfl.simulate(jax.random.key(0), plan, 4).run.server

    half, single = trained(jnp.bfloat16), trained(jnp.float32)
    moments, _ = jax.tree.flatten(half.optimizer)
    assert {x.dtype for x in moments} == {jnp.dtype("float32"), jnp.dtype("int32")}
    moved = 0.0
    for x, y in zip(jax.tree.leaves(half.params), jax.tree.leaves(single.params), strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(x, np.float32), y, atol=0.02)
        moved = max(moved, float(jnp.abs(y).max()))
    assert moved > 0.1  # else the tolerance would hide a server that does nothing


# --- Adam, less the noise that it knows


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


@pytest.mark.parametrize("s", [0.0, 0.5])
def test_it_equals_a_loop(s):
    """Without noise it is Adam."""
    gradients = np.random.default_rng(0).normal(size=(12, 5))
    found = run(adam_without_noise_bias(0.1, s, 0.8, 0.9, 1e-4), gradients)
    np.testing.assert_allclose(found, by_hand(gradients, 0.1, s, 0.8, 0.9, 1e-4), rtol=2e-4)
    if s == 0:
        adam = run(optax.adam(0.1, 0.8, 0.9, eps=1e-15), gradients)
        found = run(adam_without_noise_bias(0.1, s, 0.8, 0.9, 1e-30), gradients)
        np.testing.assert_allclose(found, adam, rtol=1e-4)


def test_noise_std_is_that_of_the_release():
    noise = jfl.gaussian(2.0)
    chain = jfl.chain(jfl.clip_l2(0.5), jfl.total(), noise, jfl.divide(10), adjacency="replace_one")
    assert noise_std(chain) == pytest.approx(2.0 * 1.0 / 10)
    rows = jnp.zeros((3, 4000))
    release = jax.jit(jfl.privacy.mechanisms.chain.release)
    drawn, _ = release(chain, jax.random.key(0), (), rows, jnp.ones(3))
    assert float(drawn.std()) == pytest.approx(noise_std(chain), rel=6 / 8000**0.5)
    absolute = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(std=0.3))
    assert noise_std(absolute) == pytest.approx(0.3)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: adam_without_noise_bias(0.1, -1.0), "noise_std"),
        (lambda: adam_without_noise_bias(0.1, b1=1.0), r"b1 in \[0, 1\)"),
        (lambda: adam_without_noise_bias(0.1, least=0.0), "least"),
        (lambda: noise_std(jfl.chain(jfl.clip_l2(1.0), jfl.total())), "of one level"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises((ArgumentError, NotAnalysable), match=words):
        call()
