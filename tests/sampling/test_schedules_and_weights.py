"""Schedules by pieces and impact factors, compared with plain Python."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import CLIENTS, close, flat, start_params
from hypothesis import given, settings
from hypothesis import strategies as st

import jfl
from jfl import schedules
from jfl.core.records import Fn
from jfl.sampling.weights import impact


def gradients(x, y):
    """Of `squared`, by hand and in float64: [n, 4]."""
    p = jax.tree.map(lambda v: np.asarray(v, np.float64), start_params())
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    left = x @ p["w"] + p["b"] - y
    return np.concatenate([left[:, None], left[:, None] * x], 1)


def plain(breakpoints, values, clock):
    for at, value in zip(breakpoints, values):
        if clock < at:
            return value
    return values[-1]


@given(
    breakpoints=st.sets(st.integers(1, 30), max_size=5).map(sorted),
    shape=st.sampled_from([(), (3,)]),
)
@settings(max_examples=25)
def test_piecewise_is_the_plain_function(breakpoints, shape):
    values = (
        np.random.default_rng(len(breakpoints))
        .normal(size=(len(breakpoints) + 1, *shape))
        .astype(np.float32)
    )
    made = schedules.piecewise(breakpoints, list(values))
    want = np.stack([plain(breakpoints, values, t) for t in range(32)])
    np.testing.assert_array_equal(jax.jit(Fn.__call__)(made, jnp.arange(32)), want)


def test_piecewise_traces_once():
    traced = []

    @jax.jit
    def run(schedule, clock):
        traced.append(1)
        return schedule(clock)

    for breakpoints, values in (([2, 5], [1.0, 2.0, 3.0]), ([1, 9], [4.0, -5.0, 6.5])):
        for clock in range(11):
            assert float(run(schedules.piecewise(breakpoints, values), clock)) == plain(
                breakpoints, values, clock
            )
    assert len(traced) == 1
    both = jax.vmap(lambda v, t: schedules.piecewise([3], [v, 2 * v])(t), (0, None))(
        jnp.array([1.0, 2.0]), 3
    )
    assert both.tolist() == [2.0, 4.0]
    slope = jax.grad(lambda v: schedules.piecewise([3], [v, 2 * v])(3))(1.0)
    assert float(slope) == 2.0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([0], [1, 2]), "a rising list"),
        (([3, 3], [1, 2, 3]), "a rising list"),
        (([5, 3], [1, 2, 3]), "a rising list"),
        (([1.5], [1, 2]), "a rising list"),
        (([2**31], [1, 2]), "to 2147483647"),
        ((3, [1, 2]), "a rising list"),
        (([3], 1.0), "2 values"),
        (([3], [1]), "2 values"),
        (([3], [1, 2, 3]), "2 values"),
        (([3], [1, [1, 2]]), "values of one shape"),
        (([3], [1, float("nan")]), "finite values"),
        (([3], [1, 1e39]), "finite values"),
    ],
)
def test_piecewise_refuses(arguments, message):
    with pytest.raises(ValueError, match="schedules.piecewise: expected .*" + message):
        schedules.piecewise(*arguments)


@pytest.mark.parametrize(
    "ratios, groups, want",
    [
        ((0, 1, 2), (20, 20, 20), (0, 1 / 60, 1 / 30)),
        ((0, 2, 1), (20, 35, 5), (0, 2 / 75, 1 / 75)),
        ((1, 3, 5), (20, 20, 20), (1 / 180, 1 / 60, 1 / 36)),
        ((1,), (4,), (1 / 4,)),
    ],
)
def test_impact_factors_of_the_paper(ratios, groups, want):
    p = impact(ratios, groups)
    assert p.shape == (sum(groups),) and math.isclose(p.sum(), 1, abs_tol=1e-12)
    np.testing.assert_allclose(
        p, [w for w, count in zip(want, groups) for _ in range(count)], rtol=1e-14
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (((0, 0), (3, 4)), "sum of ratios > 0"),
        (((1, -1), (3, 4)), "ratios >= 0"),
        (((1, 2), (3,)), "a ratio and a size"),
        (((1, 2), (3, 0)), r"groups\[1\] >= 1"),
        (((1, 2), (3, 1.5)), r"got groups\[1\]=1.5"),
        ((1, 3), "a ratio and a size"),
        (((1, float("nan")), (3, 4)), "ratios >= 0"),
    ],
)
def test_impact_refuses(arguments, message):
    with pytest.raises(ValueError, match="weights.impact: expected .*" + message):
        impact(*arguments)


@pytest.mark.slow
def test_weights_that_change_in_a_plan(fed, task):
    """Round 0 by the first weights and round 1 by the second, as two runs with constant weights."""
    first, second = impact((0, 1), (3, 4)), impact((1, 2), (5, 2))
    algorithm = jfl.algorithms.fedsgd(jfl.grad(task.loss), batch=jfl.batches.full())

    def run(rounds, *values, **options):
        plan = jfl.plan(
            fed,
            task,
            algorithm,
            jfl.sampling.full(CLIENTS),
            weights=schedules.piecewise([1], values),
        )
        return jfl.simulate(jax.random.key(3), plan, rounds, evaluate_every=2, **options)

    out, half, same = run(2, first, second), run(1, first, first), run(2, first, first)
    close(out.params, run(1, second, second, start=half.run).params)
    assert not np.allclose(flat(out.params), flat(same.params), rtol=1e-2)
    rows = [np.asarray(fed.index[c, : fed.size[c]]) for c in range(CLIENTS)]
    mean = sum(p * gradients(fed.x[own], fed.y[own]).mean(0) for p, own in zip(first, rows))
    rate = (flat(start_params()) - flat(half.params)) / mean
    np.testing.assert_allclose(rate, rate[0], rtol=1e-4)  # one step along the weighted gradient
