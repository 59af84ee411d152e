"""Stages after the noise: what they do, and that they see the release alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import CLIENTS, make_federation, squared, start_params

import jfl
from jfl.privacy.mechanisms.chain import release

KEY = jax.random.key(1)


def plan_of(*stages):
    return jfl.plan(
        make_federation(),
        jfl.task(start_params(), squared),
        jfl.algorithms.fedsgd(jfl.grad(squared)),
        jfl.sampling.full(CLIENTS),
        release=jfl.chain(jfl.clip_l2(100.0), jfl.total(), *stages),
    )


def released(*posts, rows, divisor=4.0):
    chain = plan_of(jfl.gaussian(std=1.0), jfl.divide(divisor), *posts).release
    return np.asarray(release(chain, KEY, (), rows, jnp.ones(len(rows)))[0])


def test_james_stein_against_numpy():
    rows = jax.random.normal(jax.random.key(0), (4, 50))
    plain, shrunk = released(rows=rows), released(jfl.james_stein(), rows=rows)
    sigma = 1.0 / 4  # after the division
    factor = max(0.0, 1 - 48 * sigma**2 / (plain @ plain))
    assert 0.05 < factor < 0.95
    np.testing.assert_allclose(shrunk, factor * plain, rtol=1e-5)


@pytest.mark.parametrize("truth, most", [(0.0, 0.5), (2.0, 1.001)])
def test_james_stein_is_closer_to_the_truth(truth, most):
    """Of nothing but noise it leaves next to nothing; of much signal, nearly all."""
    rows = jnp.full((4, 400), truth)
    error = lambda *posts: np.linalg.norm(released(*posts, rows=rows) - truth)
    assert error(jfl.james_stein()) < most * error()


def test_clip_values_and_functions():
    rows = jnp.array([[3.0, -3.0, 0.1]])
    plain = released(rows=rows, divisor=1.0)
    cut, signs = (
        released(post, rows=rows, divisor=1.0)
        for post in (jfl.clip_values(0.5), jfl.post_process(jnp.sign))
    )
    np.testing.assert_allclose(cut, np.clip(plain, -0.5, 0.5))
    np.testing.assert_allclose(signs, np.sign(plain))


def test_the_guarantee_stays():
    posts = (jfl.james_stein(), jfl.clip_values(1.0), jfl.post_process(lambda v: v))
    plans = [plan_of(jfl.gaussian(1.0), jfl.divide(4), *more) for more in ((), posts)]
    jfl.simulate(KEY, plans[1], 2)
    one, other = (jfl.guarantee(plan, 2, delta=1e-5, unit="client") for plan in plans)
    assert one.epsilon == other.epsilon and other.status == "proved"


def test_bad_arguments():
    for make, words in (
        (lambda: jfl.clip_values(0.0), "most"),
        (lambda: jfl.post_process(3), "a plain function of the released value"),
        (lambda: jfl.simulate(KEY, plan_of(jfl.james_stein()), 1), "one known standard deviation"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
