"""Optima, gaps, smoothness and variances of convex problems, compared with closed forms."""

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
from jfl.analysis import heterogeneity as het

L2 = 0.3


@pytest.fixture(scope="module")
def fed():
    """Rows that nobody owns are nan, and padding points at one of them."""
    return make_federation(pad=2, junk=np.nan)


@pytest.fixture(scope="module")
def task():
    return jfl.task(start_params(), squared)


def test_gradient_variance(fed, task):
    w, want = flat(start_params()), []
    for x, y in design_matrices(fed):
        rows = x * (x @ w - y)[:, None]
        want.append(((rows - rows.mean(0)) ** 2).sum(1).mean())
    want, n = np.array(want), np.array(SIZES)
    np.testing.assert_allclose(
        objectives.gradient_variance(task, start_params(), fed), want, rtol=1e-4
    )
    got = objectives.gradient_variance(task, start_params(), fed, batch=4)
    np.testing.assert_allclose(got, want / 4 * np.maximum(n - 4, 0) / (n - 1), rtol=1e-4)


def test_batch_variance_is_that_of_batches(fed, task):
    """All batches of 2 of the 4 rows of a client."""
    import itertools

    client = SIZES.index(4)
    x, y = list(design_matrices(fed))[client]
    rows = x * (x @ flat(start_params()) - y)[:, None]
    means = np.array([rows[list(pair)].mean(0) for pair in itertools.combinations(range(4), 2)])
    exact = ((means - rows.mean(0)) ** 2).sum(1).mean()
    assert objectives.gradient_variance(task, start_params(), fed, batch=2)[
        client
    ] == pytest.approx(exact, rel=1e-4)


def ridge(x, y, weight, l2):
    h = x.T @ (weight[:, None] * x) + l2 * np.eye(x.shape[1])
    w = np.linalg.solve(h, x.T @ (weight * y))
    return w, (weight * (x @ w - y) ** 2).sum() / 2 + l2 / 2 * w @ w


@pytest.mark.by_default("size")
@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_optimum_and_gap_of_a_quadratic(fed, task, weights):
    local = [ridge(x, y, np.full(len(y), 1 / len(y)), L2) for x, y in design_matrices(fed)]
    p = np.array(SIZES) / sum(SIZES) if weights == "size" else np.full(7, 1 / 7)
    x, y = (np.concatenate(v) for v in zip(*design_matrices(fed), strict=True))
    w, best = ridge(x, y, np.repeat(p / SIZES, SIZES), L2)
    got = objectives.objective_gap(task, fed, L2, weights=weights)
    assert got.pooled.gradient_norm <= 1e-8 and got.pooled.params["w"].dtype == np.float64
    np.testing.assert_allclose(flat(got.pooled.params), w, atol=1e-7)
    np.testing.assert_allclose(got.local, [value for _, value in local], atol=1e-9)
    assert (
        got.value == pytest.approx(best - p @ [value for _, value in local], abs=1e-9)
        and got.value > 0.01
    )
    np.testing.assert_allclose(
        flat(objectives.optimum(task, fed, L2, 2).params), local[2][0], atol=1e-7
    )


def test_newton_finishes_what_lbfgs_leaves(fed, task):
    """Two steps of L-BFGS are far from 1e-8; a quadratic needs one step of Newton."""
    x, y = (np.concatenate(v) for v in zip(*design_matrices(fed), strict=True))
    got = objectives.optimum(task, fed, L2, steps=2)
    np.testing.assert_allclose(
        flat(got.params), ridge(x, y, np.full(len(y), 1 / len(y)), L2)[0], atol=1e-7
    )
    with pytest.raises(ValueError, match="optimum: expected a gradient of norm <= 1e-30, but got"):
        objectives.optimum(task, fed, L2, tolerance=1e-30)


def labelled(split, rows=600, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    y = (x[:, 0] + 0.5 * rng.normal(size=rows) > 0).astype(int)
    return jfl.federate((x, y, x[:2], y[:2]), split)


@pytest.mark.slow
def test_iid_is_small_and_one_class_is_large():
    gaps, spreads = [], []
    for split in (
        jfl.partition.iid(4),
        jfl.partition.similarity(4, 0.5, rows=110),
        jfl.partition.labels(4, 1, rows=110),
    ):
        data = labelled(split)
        task = jfl.models.logistic(data)
        spreads.append(
            float(het.gradient_dissimilarity(task, task.init(jax.random.key(0)), data).variance)
        )
        if split.name != "similarity":
            gaps.append(objectives.objective_gap(task, data, 0.05))
    assert 0 < gaps[0].value < 0.02 and gaps[1].value > 0.25
    assert spreads[0] < 0.2 * spreads[1] and spreads[1] < 0.5 * spreads[2]
    worst = het.gradient_dissimilarity(
        task, jax.tree.map(jnp.float32, gaps[1].pooled.params), data, l2=0.05
    ).largest
    assert gaps[1].value <= worst / (2 * 0.05)  # F_c(w*) - F_c* <= ||grad F_c(w*)||^2 / (2 l2)


def test_smoothness_bounds_the_hessian():
    data = labelled(jfl.partition.power_law(4, min_rows=40))
    task = jfl.models.logistic(data)
    vector, shaped = jax.flatten_util.ravel_pytree(task.init(jax.random.key(0)))
    bound = objectives.smoothness(data, "softmax", l2=0.1)
    x, y = (jnp.asarray(v) for v in rows_of_client(data, 2))
    hessian = jax.jit(
        jax.hessian(lambda w: jax.vmap(task.loss, (None, 0, 0))(shaped(w), x, y.astype(int)).mean())
    )
    top = np.linalg.eigvalsh(np.asarray(hessian(vector), np.float64))[-1] + 0.1
    assert top == pytest.approx(bound[2], rel=1e-4)  # two classes at w = 0: the bound is met
    design = np.concatenate([rows_of_client(data, 0)[0], np.ones((int(data.size[0]), 1))], 1)
    top = np.linalg.eigvalsh(design.T @ design)[-1] / len(design)
    assert objectives.smoothness(data, "logistic")[0] == pytest.approx(top / 4, rel=1e-6)
    bare = np.linalg.eigvalsh(design[:, :3].T @ design[:, :3])[-1] / len(design)
    assert objectives.smoothness(data, bias=False)[0] == pytest.approx(bare / 2, rel=1e-6)


@pytest.mark.parametrize("shape", [(60, 30), (30, 60), (1, 5)])
def test_largest_eigenvalue(shape):
    """Lanczos for large matrices, exact for small ones."""
    x = np.random.default_rng(0).normal(size=shape) + 0.5
    assert objectives.largest_eigenvalue(x) == pytest.approx(
        np.linalg.eigvalsh(x.T @ x)[-1], rel=1e-8
    )


def test_lipschitz_gradients():
    """||grad F_c(v) - grad F_c(w)|| <= L_c ||v - w|| on random pairs."""
    data = labelled(jfl.partition.iid(5))
    task = jfl.models.logistic(data)
    bound, key = objectives.smoothness(data), jax.random.key(1)
    for i in range(5):
        v, w = (
            jax.tree.map(lambda leaf, k=k: 3 * jax.random.normal(k, leaf.shape), task.init(key))
            for k in jax.random.split(jax.random.fold_in(key, i))
        )
        change = [het.client_gradients(task, point, data) for point in (v, w)]
        for client in range(5):
            moved = np.linalg.norm(flat(jax.tree.map(lambda a, b, c=client: a[c] - b[c], *change)))
            assert moved <= bound[client] * np.linalg.norm(flat(jax.tree.map(jnp.subtract, v, w)))


def test_blocks_do_not_change_the_sum(fed, task, monkeypatch):
    whole = objectives.optimum(task, fed, L2)
    monkeypatch.setattr(objectives, "MAX_ROWS", 7)
    np.testing.assert_allclose(
        flat(objectives.optimum(task, fed, L2).params), flat(whole.params), atol=1e-8
    )
    assert sum(SIZES) % 7


def test_products_are_in_full_precision():
    """An accelerator would round the factors of products otherwise."""
    fed = make_federation()
    task = jfl.task(start_params(), lambda p, x, y: (p["b"] + jnp.dot(x, p["w"]) - y) ** 2)
    programs = []
    original = objectives._objective

    def watched(*given, **options):
        programs.append(original.lower(*given, **options).as_text())
        return original(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objectives, "_objective", watched)
        objectives.optimum(task, fed, L2)
    products = [line for text in programs for line in text.splitlines() if "dot_general" in line]
    assert products and all("HIGHEST, HIGHEST" in line for line in products)
