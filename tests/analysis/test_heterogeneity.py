"""Differences between the gradients of clients, compared with NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import SIZES, design_matrices, flat, make_federation, squared, start_params

import jfl
from jfl.analysis import heterogeneity as het

L2 = 0.3


@pytest.fixture(scope="module")
def fed():
    """Rows that nobody owns are nan, and padding points at one of them."""
    return make_federation(pad=2, junk=np.nan)


@pytest.fixture(scope="module")
def task():
    return jfl.task(start_params(), squared)


def gradients(fed, w, l2=0.0):
    return np.array([x.T @ (x @ w - y) / len(y) + l2 * w for x, y in design_matrices(fed)])


@pytest.mark.parametrize("floats", [het.MAX_FLOATS, 150], ids=["at once", "in chunks"])
def test_client_gradients(fed, task, floats, monkeypatch):
    monkeypatch.setattr(het, "MAX_FLOATS", floats)
    het._gradients.clear_cache()
    w = flat(start_params())
    got = het.client_gradients(task, start_params(), fed, l2=L2)
    table = np.concatenate([np.asarray(got["b"])[:, None], np.asarray(got["w"])], 1)
    np.testing.assert_allclose(table, gradients(fed, w, L2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", ["size", "uniform", [1.0, 0, 2, 0, 0, 3, 1]])
def test_dissimilarity(fed, task, weights):
    g = gradients(fed, flat(start_params()))
    named = {"size": SIZES, "uniform": np.ones(7)}
    p = np.array(named[weights] if isinstance(weights, str) else weights, float)
    p = p / p.sum()
    np.testing.assert_allclose(het.client_weights(fed, weights), p)
    mean, square = p @ g, (g**2).sum(1)
    # a loss instead of a task
    got = het.gradient_dissimilarity(squared, start_params(), fed, weights)
    variance = p @ square - mean @ mean  # Noble's form of Chen's
    assert got.variance == pytest.approx(variance, rel=1e-4)
    assert got.log_ratio == pytest.approx(np.log(p @ square) - np.log(mean @ mean), abs=1e-4)
    np.testing.assert_allclose(got.each, ((g - mean) ** 2).sum(1), rtol=1e-4)
    assert got.largest == got.each.max() > got.variance
    assert got.mean_square == pytest.approx(p @ square, rel=1e-4)
    assert got.square_mean == pytest.approx(mean @ mean, rel=1e-4)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda fed, task: het.client_weights(fed, np.ones(3)), "weights >= 0 of shape \\[7\\]"),
        (lambda fed, task: het.client_weights(fed, -np.ones(7)), "weights >= 0"),
        (lambda fed, task: het.client_weights(fed, np.zeros(7)), "positive sum"),
        (lambda fed, task: het.client_gradients(task, start_params(), fed, l2=-1.0), "l2 >= 0"),
    ],
)
def test_errors(fed, task, make, message):
    with pytest.raises(ValueError, match=message):
        make(fed, task)


def test_products_are_in_full_precision():
    """An accelerator would round the factors of products otherwise."""
    fed = make_federation()
    task = jfl.task(start_params(), lambda p, x, y: (p["b"] + jnp.dot(x, p["w"]) - y) ** 2)
    programs = []
    original = het._gradients

    def watched(*given, **options):
        programs.append(original.lower(*given, **options).as_text())
        return original(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(het, "_gradients", watched)
        het.gradient_dissimilarity(task, start_params(), fed)
    products = [line for text in programs for line in text.splitlines() if "dot_general" in line]
    assert products and all("HIGHEST, HIGHEST" in line for line in products)
