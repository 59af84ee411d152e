"""Stages after the noise: what they do, and that they see only the release."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import CLIENTS, make_federation, squared, start_params

import jfl
from jfl.privacy.mechanisms import chain as mech

KEY = jax.random.key(1)


def plan_of(*stages):
    return jfl.plan(
        make_federation(),
        jfl.task(start_params(), squared),
        jfl.algorithms.fedsgd(jfl.grad(squared)),
        jfl.sampling.full(CLIENTS),
        release=jfl.chain(jfl.clip_l2(100.0), jfl.total(), *stages),
    )


POSTS = (), (jfl.james_stein(),), (jfl.clip_values(0.5),), (jfl.post_process(jnp.sign),)


@jax.jit
def released(rows):
    """Return the release without post-processing, and with each kind of it."""
    cut = jfl.clip_l2(100.0), jfl.total(), jfl.gaussian(std=1.0), jfl.divide(4.0)
    chains = (jfl.chain(*cut, *post, adjacency="replace_one") for post in POSTS)
    return [mech.release(c, KEY, (), rows, jnp.ones(len(rows)))[0] for c in chains]


@pytest.mark.parametrize("truth, most", [(0.0, 0.5), (0.3, 1.0), (2.0, 1.001)])
def test_post_processing_against_numpy(truth, most):
    """James-Stein leaves next to nothing of noise, and nearly all of much signal."""
    plain, shrunk, cut, signs = map(np.asarray, released(jnp.full((4, 400), truth)))
    factor = max(0.0, 1 - 398 * (1.0 / 4) ** 2 / (plain @ plain))  # 1/4: std after the division
    np.testing.assert_allclose(shrunk, factor * plain, rtol=1e-4)
    assert np.linalg.norm(shrunk - truth) < most * np.linalg.norm(plain - truth)
    np.testing.assert_allclose(cut, np.clip(plain, -0.5, 0.5))
    np.testing.assert_allclose(signs, np.sign(plain))


@pytest.mark.parametrize("size", [1, 2])
def test_one_or_two_coordinates_are_not_shrunk(size):
    plain, shrunk, *_ = map(np.asarray, released(jnp.full((4, size), 0.1)))
    np.testing.assert_array_equal(shrunk, plain)


def test_the_guarantee_does_not_change():
    posts = (jfl.james_stein(), jfl.clip_values(1.0), jfl.post_process(lambda v: v))
    plans = (plan_of(jfl.gaussian(1.0), jfl.divide(4), *more) for more in ((), posts))
    one, other = (jfl.guarantee(plan, 2, delta=1e-5, unit="client") for plan in plans)
    assert one.epsilon == other.epsilon and other.status == "proved"


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: jfl.clip_values(0.0), "most"),
        (lambda: jfl.post_process(3), "a plain function of the released value"),
        (lambda: jfl.simulate(KEY, plan_of(jfl.james_stein()), 1), "one known standard deviation"),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
