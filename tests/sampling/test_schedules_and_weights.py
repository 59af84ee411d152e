"""Impact factors, and weights that change over rounds, compared with plain Python."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import CLIENTS, close, design_matrices, flat, start_params

import jfl
from jfl.sampling.weights import impact


@pytest.mark.parametrize(
    "ratios, groups, want",
    [
        ((0, 2, 1), (20, 35, 5), (0, 2 / 75, 1 / 75)),
        ((1, 3, 5), (20, 20, 20), (1 / 180, 1 / 60, 1 / 36)),
    ],
)
def test_impact_factors_of_the_paper(ratios, groups, want):
    p = impact(ratios, groups)
    assert math.isclose(p.sum(), 1, abs_tol=1e-12)
    np.testing.assert_allclose(p, np.repeat(want, groups), rtol=1e-14)


def test_impact_refuses():
    for ratios, groups, message in (
        ((0, 0), (3, 4), "sum of ratios > 0"),
        ((1, -1), (3, 4), "ratios >= 0"),
        ((1, 2), (3,), "a ratio and a size"),
    ):
        with pytest.raises(ValueError, match="weights.impact: expected .*" + message):
            impact(ratios, groups)


@pytest.mark.slow
def test_weights_that_change_in_a_plan(fed, task):
    """Round 0 by the first weights and round 1 by the second, as two runs with constant weights."""
    first, second = impact((0, 1), (3, 4)), impact((1, 2), (5, 2))
    algorithm = jfl.algorithms.fedsgd(jfl.grad(task.loss), batch=jfl.batches.full())

    def run(rounds, *values, **options):
        weights, sampler = lambda t: jnp.where(t < 1, *values), jfl.sampling.full(CLIENTS)
        plan = jfl.plan(fed, task, algorithm, sampler, weights=weights)
        return jfl.simulate(jax.random.key(3), plan, rounds, evaluate_every=2, **options)

    out, half, same = run(2, first, second), run(1, first, first), run(2, first, first)
    close(out.params, run(1, second, second, start=half.run).params)
    assert not np.allclose(flat(out.params), flat(same.params), rtol=1e-2)
    # one step along the weighted gradient
    gradients = [((x @ flat(start_params()) - y) @ x) / len(y) for x, y in design_matrices(fed)]
    rate = (flat(start_params()) - flat(half.params)) / (first @ np.array(gradients))
    np.testing.assert_allclose(rate, rate[0], rtol=1e-4)
