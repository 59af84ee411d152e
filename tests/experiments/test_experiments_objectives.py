"""Optima, gaps, smoothness and variances of convex problems, compared with closed forms."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import (
    SIZES,
    design_matrices,
    flat,
    make_federation,
    rows_of_client,
    squared,
    start_params,
)

import jfl
from experiments.harness import objectives

L2 = 0.3


@pytest.fixture(scope="module")
def fed():
    """Rows that nobody owns are nan, and padding points at one of them."""
    return make_federation(pad=2, junk=np.nan)


@pytest.fixture(scope="module")
def task():
    return jfl.task(start_params(), squared)


def test_gradient_variance(fed, task):
    """Of rows, and of all batches of 2 of the 4 rows of a client."""
    w = flat(start_params())
    rows = [x * (x @ w - y)[:, None] for x, y in design_matrices(fed)]
    spread = lambda points: ((points - points.mean(0)) ** 2).sum(1).mean()
    want = np.array([spread(points) for points in rows])
    got = objectives.gradient_variance(task, start_params(), fed)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    client = SIZES.index(4)
    pairs = itertools.combinations(range(4), 2)
    exact = spread(np.array([rows[client][list(pair)].mean(0) for pair in pairs]))
    got = np.asarray(objectives.gradient_variance(task, start_params(), fed, batch=2))
    assert got[client] == pytest.approx(exact, rel=1e-4)
    n = np.array(SIZES)
    np.testing.assert_allclose(got, want / 2 * np.maximum(n - 2, 0) / (n - 1), rtol=1e-4)


def ridge(x, y, weight, l2):
    h = x.T @ (weight[:, None] * x) + l2 * np.eye(x.shape[1])
    w = np.linalg.solve(h, x.T @ (weight * y))
    return w, (weight * (x @ w - y) ** 2).sum() / 2 + l2 / 2 * w @ w


@pytest.mark.by_default("size")
@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_optimum_and_gap_of_a_quadratic(fed, task, weights):
    local = [ridge(x, y, np.full(len(y), 1 / len(y)), L2) for x, y in design_matrices(fed)]
    least = np.array([value for _, value in local])
    p = np.array(SIZES) / sum(SIZES) if weights == "size" else np.full(7, 1 / 7)
    x, y = (np.concatenate(v) for v in zip(*design_matrices(fed), strict=True))
    w, best = ridge(x, y, np.repeat(p / SIZES, SIZES), L2)
    got = objectives.objective_gap(task, fed, L2, weights=weights)
    assert got.pooled.gradient_norm <= 1e-8 and got.pooled.params["w"].dtype == np.float64
    np.testing.assert_allclose(flat(got.pooled.params), w, atol=1e-7)
    np.testing.assert_allclose(got.local, least, atol=1e-9)
    assert got.value == pytest.approx(best - p @ least, abs=1e-9) and got.value > 0.01


def test_newton_finishes_what_lbfgs_leaves_and_blocks_do_not_change_the_sum(fed, task, monkeypatch):
    """Two steps of L-BFGS are far from 1e-8; a quadratic needs one step of Newton."""
    x, y = (np.concatenate(v) for v in zip(*design_matrices(fed), strict=True))
    monkeypatch.setattr(objectives, "MAX_ROWS", 7)
    assert sum(SIZES) % 7
    got = objectives.optimum(task, fed, L2, steps=2)
    want, _ = ridge(x, y, np.full(len(y), 1 / len(y)), L2)
    np.testing.assert_allclose(flat(got.params), want, atol=1e-7)
    with pytest.raises(ValueError, match="a gradient of norm <= 1e-30"):
        objectives.optimum(task, fed, L2, steps=2, tolerance=1e-30)


def test_smoothness_bounds_the_hessian():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 3))
    y = (x[:, 0] + 0.5 * rng.normal(size=600) > 0).astype(int)
    data = jfl.federate((x, y, x[:2], y[:2]), jfl.partition.power_law(4, min_rows=40))
    task = jfl.models.logistic(data)
    vector, shaped = jax.flatten_util.ravel_pytree(task.init(jax.random.key(0)))
    bound = objectives.smoothness(data, l2=0.1)
    x, y = (jnp.asarray(v) for v in rows_of_client(data, 2))
    loss = lambda w: jax.vmap(task.loss, (None, 0, 0))(shaped(w), x, y.astype(int)).mean()
    hessian = jax.jit(jax.hessian(loss))
    top = lambda w: np.linalg.eigvalsh(np.asarray(hessian(w), np.float64))[-1] + 0.1
    assert top(vector) == pytest.approx(bound[2], rel=1e-4)  # two classes at w = 0: it is met
    assert top(vector + 1) < bound[2]


@pytest.mark.parametrize("shape", [(60, 30), (30, 60), (1, 5)])
def test_largest_eigenvalue(shape):
    """Lanczos for large matrices, exact for small ones."""
    x = np.random.default_rng(0).normal(size=shape) + 0.5
    want = np.linalg.eigvalsh(x.T @ x)[-1]
    assert objectives.largest_eigenvalue(x) == pytest.approx(want, rel=1e-8)


def test_products_are_in_full_precision(monkeypatch):
    """An accelerator would round the factors of products otherwise."""
    task = jfl.task(start_params(), lambda p, x, y: (p["b"] + jnp.dot(x, p["w"]) - y) ** 2)
    programs, original = [], objectives._objective

    def watched(*given, **options):
        programs.append(original.lower(*given, **options).as_text())
        return original(*given, **options)

    monkeypatch.setattr(objectives, "_objective", watched)
    objectives.optimum(task, make_federation(), L2)
    products = [line for text in programs for line in text.splitlines() if "dot_general" in line]
    assert products and all("HIGHEST, HIGHEST" in line for line in products)
