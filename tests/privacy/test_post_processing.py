"""Stages after the noise: what they do, and that they see the release alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import CLIENTS, flat, make_federation, squared, start_params

import jfl
from jfl.privacy.mechanisms.chain import release

KEY = jax.random.key(1)


def released(*posts, rows, std=1.0, divisor=4.0):
    chain = jfl.chain(
        jfl.clip_l2(100.0), jfl.total(), jfl.gaussian(std=std), jfl.divide(divisor), *posts
    )
    chain = jfl.plan(
        make_federation(),
        jfl.task(start_params(), squared),
        jfl.algorithms.fedsgd(jfl.grad(squared)),
        jfl.sampling.full(CLIENTS),
        release=chain,
    ).release
    return np.asarray(release(chain, KEY, (), rows, jnp.ones(len(rows)))[0])


def test_james_stein_against_numpy():
    rows = jax.random.normal(jax.random.key(0), (4, 50))
    plain, shrunk = released(rows=rows), released(jfl.james_stein(), rows=rows)
    sigma = 1.0 / 4  # after the division
    factor = max(0.0, 1 - 48 * sigma**2 / (plain @ plain))
    assert 0.05 < factor < 0.95
    np.testing.assert_allclose(shrunk, factor * plain, rtol=1e-5)


def test_james_stein_is_closer_to_the_truth():
    """Of nothing but noise it leaves next to nothing; of much signal, nearly all."""
    weak = jnp.zeros((4, 400))
    assert np.linalg.norm(released(jfl.james_stein(), rows=weak)) < 0.5 * np.linalg.norm(
        released(rows=weak)
    )
    strong = jnp.full((4, 400), 2.0)
    truth = np.full(400, 2.0)
    with_, without = (
        np.linalg.norm(released(*posts, rows=strong) - truth)
        for posts in ((jfl.james_stein(),), ())
    )
    assert with_ < without * 1.001


def test_clip_values_and_functions():
    rows = jnp.array([[3.0, -3.0, 0.1]])
    plain = released(rows=rows, divisor=1.0)
    np.testing.assert_allclose(
        released(jfl.clip_values(0.5), rows=rows, divisor=1.0), np.clip(plain, -0.5, 0.5)
    )
    signs = jfl.post_process(jnp.sign)
    np.testing.assert_allclose(released(signs, rows=rows, divisor=1.0), np.sign(plain))


def test_the_guarantee_stays():
    task = jfl.task(start_params(), squared)

    def epsilon(*posts):
        chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(4), *posts)
        plan = jfl.plan(
            make_federation(),
            task,
            jfl.algorithms.fedsgd(jfl.grad(squared)),
            jfl.sampling.full(CLIENTS),
            release=chain,
        )
        jfl.simulate(KEY, plan, 2)
        proved = jfl.guarantee(plan, 2, delta=1e-5, unit="client")
        assert proved.status == "proved"
        return proved.epsilon

    posts = (jfl.james_stein(), jfl.clip_values(1.0), jfl.post_process(lambda v: v))
    assert epsilon(*posts) == epsilon()


def test_a_function_that_holds_rows_is_refused():
    fed, task = make_federation(), jfl.task(start_params(), squared)
    held = np.asarray(fed.x)

    def leak(value):
        return jax.tree.map(lambda v: v + 1e-6 * jnp.asarray(held).sum(), value)

    chain = jfl.chain(
        jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(4), jfl.post_process(leak)
    )
    with pytest.raises(ValueError, match="functions that receive rows as arguments"):
        jfl.plan(
            fed,
            task,
            jfl.algorithms.fedsgd(jfl.grad(squared)),
            jfl.sampling.full(CLIENTS),
            release=chain,
        )


def test_bad_arguments():
    for make, words in (
        (lambda: jfl.clip_values(0.0), "most"),
        (lambda: jfl.post_process(3), "a plain function of the released value"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    without = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.james_stein())
    with pytest.raises(ValueError, match="one known standard deviation"):
        jfl.simulate(
            KEY,
            jfl.plan(
                make_federation(),
                jfl.task(start_params(), squared),
                jfl.algorithms.fedsgd(jfl.grad(squared)),
                jfl.sampling.full(CLIENTS),
                release=without,
            ),
            1,
        )
    assert flat(start_params()).size == 4
