"""Scale-then-privatize: coordinates divided by their usual size before the clip."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import CLIENTS, flat, make_federation, squared, start_params
from jfl.kernels.normals import normals

import jfl
from jfl.privacy.mechanisms import chain
from jfl.verify import marks

KEY = jax.random.key(4)
LIKE = dict(a=np.zeros(3, np.float32), b=np.zeros((2, 2), np.float32))


def as_tree(rows):
    """Return rows [n, 7] in the shape of LIKE."""
    a, b = np.split(np.asarray(rows, np.float32), [3], axis=1)
    return dict(a=jnp.asarray(a), b=jnp.asarray(b.reshape(-1, 2, 2)))


def mechanism(z=0.7, clip=None):
    clip = clip or jfl.clip_scaled(0.5, 4.0, like=LIKE, decay=0.6, least=0.02)
    noise = (jfl.gaussian(z),) if z else ()
    return jfl.chain(clip, jfl.total(), *noise, jfl.divide(4), adjacency="add_remove")


released = jax.jit(chain.release)


def test_releases_equal_a_loop_in_numpy():
    """Of coordinates whose sizes differ a hundredfold.  The first release is that of clip_l2."""
    made, square = mechanism(), np.zeros(7)
    state, weight = chain.initial_state(made), np.array([1, 0.5, 0, 1, 0.25, 1.0], np.float32)
    for round_ in range(6):
        key = jax.random.fold_in(KEY, round_)
        draws = np.random.default_rng(round_).normal(size=(6, 7)) * np.logspace(-2, 0, 7)
        found, state = released(made, key, state, as_tree(draws), jnp.asarray(weight))
        size = np.sqrt(square) + 0.02
        size = size / np.sqrt(np.mean(size**2))
        scaled = draws / size
        lengths = np.linalg.norm(scaled, axis=1)
        total = (weight * np.minimum(1.0, 0.5 / lengths)) @ scaled
        total = (total + 0.7 * 0.5 * flat(normals(marks.noise_key(key), LIKE))) * size
        square = 0.6 * square + 0.4 * (total / 4.0) ** 2
        np.testing.assert_allclose(flat(found), total / 4, rtol=2e-4, atol=2e-6)
        np.testing.assert_allclose(flat(state), square, rtol=5e-4, atol=1e-9)
    assert np.ptp(np.log(size)) > 1  # the sizes became different


def test_one_contribution_moves_the_sum_by_no_more_than_the_bound():
    """In the coordinates in which the noise is isotropic, whatever the sizes and the row."""
    made, rng = mechanism(z=0), np.random.default_rng(0)
    one = as_tree(1e3 * rng.normal(size=(1, 7)))
    sum_of = jax.jit(lambda state: chain.clip_and_sum(made, state, one, jnp.ones(1)))
    for scale in (1e-20, 1.0, 1e20):
        sizes = jax.tree.map(lambda x: jnp.asarray(rng.gamma(0.1, size=x.shape)), LIKE)
        state = type(chain.initial_state(made))(jax.tree.map(lambda x, s=scale: x * s, sizes))
        part = sum_of(state)
        assert np.linalg.norm(flat(part.value)) <= 0.5 * (1 + 1e-6) and int(part.nonfinite) == 0
    assert float(chain.sensitivity(made)) == pytest.approx(0.5)
    # without the scale it would not hold: the same row, clipped unchanged, is longer in them
    plain = flat(released(mechanism(0, jfl.clip_l2(0.5)), KEY, (), one, jnp.ones(1))[0])
    size = np.sqrt(flat(state)) + 0.02
    assert np.linalg.norm(4 * plain / size * np.sqrt(np.mean(size**2))) > 0.6


def plan(clip=None, sampler=None, z=2.0, **options):
    clip = clip or jfl.clip_scaled(0.8, float(CLIENTS), like=start_params())
    release = jfl.chain(clip, jfl.total(), jfl.gaussian(z), jfl.divide(float(CLIENTS)))
    made = jfl.algorithms.fedavg(
        jfl.grad(squared), lr=0.3, steps=2, batch=jfl.batches.without_replacement(3)
    )
    sampler = sampler or jfl.sampling.poisson(CLIENTS, 0.5, capacity=CLIENTS)
    asked = dict(release=release) | options
    return jfl.plan(make_federation(), jfl.task(start_params(), squared), made, sampler, **asked)


def test_it_costs_what_clip_l2_costs():
    one, other = (jfl.guarantee(plan(c), 9) for c in (None, jfl.clip_l2(0.8)))
    assert one.status == "proved" and one.epsilon == pytest.approx(other.epsilon, rel=1e-9)
    # sizes that are made of anything but the release are only assumed
    clip = jfl.clip_scaled(0.8, float(CLIENTS), like=start_params())
    forged = dataclasses.replace(clip, update=jfl.clip_adaptive(1.0, 4.0).update)
    assert jfl.guarantee(plan(forged), 9).status == "conditional"


@pytest.mark.slow
def test_in_chunks_resumed_and_swept():
    make = lambda decay=0.9, **options: plan(
        jfl.clip_scaled(0.8, float(CLIENTS), like=start_params(), decay=decay), **options
    )
    whole = jfl.simulate(KEY, make(), 6).run
    part = jfl.simulate(KEY, make(), 4).run
    again = jfl.simulate(KEY, make(), 2, start=part).run
    np.testing.assert_array_equal(flat(again.server.params), flat(whole.server.params))
    chunked = jfl.simulate(KEY, make(chunk=2), 6).run
    np.testing.assert_allclose(flat(chunked.server.params), flat(whole.server.params), atol=2e-6)
    swept = jfl.sweep(lambda decay: make(decay), decay=[0.5, 0.95], rounds=5, seed=3)
    alone = jfl.simulate(jax.random.key(3), make(0.95), 5).metrics.loss
    np.testing.assert_allclose(np.ravel(swept.metrics.loss[1]), np.ravel(alone), rtol=2e-5)
    assert np.ptp(np.asarray(swept.metrics.loss)[:, -1]) > 0


@pytest.mark.slow
def test_audited_is_no_more_than_proved():
    full = jfl.sampling.full(CLIENTS)
    report = jfl.audit(plan(sampler=full, adjacency="add_remove"), 4, trials=4000)
    assert 0.2 * report.proved.epsilon < report.epsilon <= report.proved.epsilon
    assert not report.refuted


CLIP = jfl.clip_scaled(1.0, 4.0, like=start_params())
NOISY = jfl.chain(CLIP, jfl.total(), jfl.gaussian(1.0))
CORRELATED = jfl.correlated(1.0, jfl.strategies.identity(4))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: jfl.clip_scaled(0.0, 4.0, like=LIKE), "bound > 0"),
        (lambda: jfl.clip_scaled(1.0, -1.0, like=LIKE), "count > 0"),
        (lambda: jfl.clip_scaled(1.0, 4.0, like=LIKE, decay=1.0), "decay < 1"),
        (lambda: jfl.clip_scaled(1.0, 4.0, like=LIKE, least=0.0), "least > 0"),
        (lambda: jfl.clip_scaled(1.0, 4.0, like={}), "like=task"),
        (
            lambda: jfl.simulate(KEY, plan(jfl.clip_scaled(1.0, 4.0, like=LIKE)), 1),
            "like like=",
        ),
        (lambda: jfl.private_grad(squared, NOISY), "clip_scaled"),
        (lambda: plan(jfl.clip_l2(1.0), upload=NOISY), "clip_scaled"),
        (
            lambda: plan(release=jfl.chain(CLIP, jfl.total(), CORRELATED, jfl.divide(4))),
            "with correlated noise",
        ),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
