"""Statistics of public rows, compared with plain loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import close, flat, same_bits, squared, start_params

import jfl
from jfl.analysis import public_data
from jfl.core.records import Fn
from jfl.privacy.mechanisms import haar_bands as haar

ROWS = 7


def rows(n=ROWS, seed=0):
    r = np.random.default_rng(seed)
    return jnp.asarray(r.normal(size=(n, 3)), jnp.float32), jnp.asarray(
        r.normal(size=n), jnp.float32
    )


def gradients(x, y):
    """Of `squared`, by hand and in float64: [n, 4]."""
    p = jax.tree.map(lambda v: np.asarray(v, np.float64), start_params())
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    left = x @ p["w"] + p["b"] - y
    return np.concatenate([left[:, None], left[:, None] * x], 1)


# --- norms


def test_blocks_bound_the_memory(monkeypatch):
    """With room for the gradients of eight rows, no array holds those of all 64."""
    x, params = jnp.zeros((64, 50)), jnp.zeros((50, 50))
    loss = Fn(lambda w, x, y: (x @ w).sum() * y)

    def holds_all(rows):
        monkeypatch.setattr(public_data, "MAX_FLOATS", rows * params.size)
        public_data._norms.clear_cache()
        norms = lambda x: public_data._norms(loss, params, x, jnp.ones(64))
        return "64,50,50]" in str(jax.make_jaxpr(norms)(x))

    assert holds_all(64) and not holds_all(8)


@pytest.mark.parametrize("quantile, n", [(0.0, 2), (0.25, 9), (0.5, 1), (0.9, 9)])
def test_median_and_quantiles(quantile, n, monkeypatch):
    monkeypatch.setattr(public_data, "MAX_FLOATS", 2 * flat(start_params()).size)  # of two rows
    x, y = rows(12)
    want = np.linalg.norm(gradients(x, y), axis=1)
    got = public_data.median_norm(squared, start_params(), x[:n], y[:n], quantile=quantile)
    assert type(got) is float and math.isclose(got, np.quantile(want[:n], quantile), rel_tol=2e-5)


def update_norms(x, y, **options):
    return np.asarray(
        public_data.update_norms(
            squared, start_params(), x, y, **{"key": jax.random.key(0), **options}
        )
    )


def test_update_norms_by_plain_loops():
    """With full batches, each norm is that of two rows, and the clients share no row."""
    x, y = rows(7)
    options = dict(clients=3, steps=3, batch=jfl.batches.full(), lr=0.05)
    got = update_norms(x, y, **options)

    def moved(pair):
        own = np.c_[np.ones(2), np.asarray(x, np.float64)[list(pair)]]
        w = start = flat(start_params())
        for _ in range(3):
            w = w - 0.05 * own.T @ (own @ w - np.asarray(y, np.float64)[list(pair)]) / 2
        return np.linalg.norm(w - start)

    pairs = {(i, j): moved((i, j)) for i in range(7) for j in range(i)}
    found = [min(pairs, key=lambda p: abs(pairs[p] - float(norm))) for norm in got]
    np.testing.assert_allclose([pairs[pair] for pair in found], got, rtol=1e-4)
    assert got.shape == (3,) and len({i for pair in found for i in pair}) == 6
    assert same_bits(got, update_norms(x, y, **options))
    assert not same_bits(got, update_norms(x, y, **options, key=jax.random.key(2)))


def test_update_norms_draw_batches():
    """Each client draws its one row with probability 1/2, independently in each step."""
    x, y = rows(12)
    each = np.linalg.norm(gradients(x, y), axis=1)
    options = dict(clients=12, lr=0.1, batch=jfl.batches.poisson(rate=0.5, capacity=1))
    got = update_norms(x, y, steps=1, **options)
    drawn = got > 0
    assert 0 < drawn.sum() < 12
    assert len({int(np.abs(0.1 * each - norm).argmin()) for norm in got[drawn]}) == drawn.sum()
    np.testing.assert_allclose(np.abs(0.1 * each - got[drawn][:, None]).min(1), 0, atol=1e-6)
    twice = update_norms(x, y, steps=2, **options)
    assert (twice[drawn] > 0).all() and 0 < (twice[~drawn] > 0).sum()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(clients=8), "at least 1 public rows for each client, but got 7 rows for 8"),
        (dict(clients=3, batch=jfl.batches.without_replacement(3)), "at least 3 public rows"),
        (dict(lr=0.0), "lr > 0"),
    ],
)
def test_update_norms_refuse(options, message):
    x, y = rows()
    default = dict(clients=2, steps=1, lr=0.1, batch=jfl.batches.full(), key=jax.random.key(0))
    with pytest.raises(ValueError, match="public_data.update_norms: expected .*" + message):
        public_data.update_norms(squared, start_params(), x, y, **default | options)


def test_rows_are_checked():
    x, y = rows()
    median = lambda x, y, **how: public_data.median_norm(squared, start_params(), x, y, **how)
    for bad in ((x, y[:3]), (x[:0], y[:0])):
        with pytest.raises(ValueError, match="expected public rows"):
            median(*bad)
    with pytest.raises(ValueError, match=r"quantile in \[0, 1\]"):
        median(x, y, quantile=1.5)
    with pytest.raises(ValueError, match="finite gradients, but got 1 of 7 rows"):
        median(x.at[2, 0].set(jnp.nan), y)


# --- bands


def bilinear(params, x, y):
    """Its gradient in w is x times (1, 2), and y in b."""
    return x @ params["w"] @ jnp.array([1.0, 2.0]) + y * params["b"].sum()


LIKE = {"b": jnp.zeros(3), "w": jnp.zeros((8, 2))}


@pytest.mark.by_default("flat")
@pytest.mark.parametrize("make", [haar.flat, haar.plain])
def test_band_energies_add_up(make):
    r, bands = np.random.default_rng(1), make(LIKE)
    x, y = (
        jnp.asarray(r.normal(size=(5, 8)), jnp.float32),
        jnp.asarray(r.normal(size=5), jnp.float32),
    )
    got = np.asarray(public_data.band_energies(bilinear, LIKE, x, y, bands))
    gradient, energies = jax.jit(jax.grad(bilinear)), jax.jit(haar.energies)
    each = [gradient(LIKE, x[i], y[i]) for i in range(5)]
    close(got, np.mean([energies(bands, g) for g in each], 0), atol=1e-5)
    mean_square = np.mean([(flat(g) ** 2).sum() for g in each])
    assert math.isclose(got.sum(), mean_square, rel_tol=1e-5) and got.shape == (haar.count(bands),)
    if haar.count(bands) > 1:  # of rows, not of their mean
        assert not np.allclose(
            got, energies(bands, jax.tree.map(lambda *g: sum(g) / 5, *each)), rtol=0.2
        )
