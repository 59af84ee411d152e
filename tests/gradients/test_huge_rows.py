"""Rows whose values are finite while their squared norms are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jfl.kernels.ghost_sums import Product, shrink

import jfl
from jfl.privacy.mechanisms.chain import clip_and_sum

CLIPS = {
    "l2": jfl.clip_l2(1.0),
    "automatic": jfl.clip_automatic(1.0, 1e-6),
    "per_layer": jfl.clip_per_layer([1.0]),
    "bands": jfl.wavelet.clip_bands(np.ones(3), jfl.bands.flat(np.zeros(4))),
}


@pytest.mark.parametrize("clip", CLIPS)
def test_no_size_of_a_row_passes_its_bound(clip):
    """A row that is too long to measure counts as zero, and is counted."""
    chain = jfl.chain(CLIPS[clip], jfl.total(), adjacency="add_remove")
    run = jax.jit(lambda row: clip_and_sum(chain, (), row, jnp.ones(1)))
    # A constant row is in the lowest of the three bands.  In an optimized program its other
    # coefficients are rounding errors, which can be large and are clipped to their bands' bounds.
    bound = 3**0.5 if clip == "bands" else 1.0
    for size in (1e-38, 1e-20, 1.0, 1e18, 1e19, 3e38):
        part = run(jnp.full((1, 4), size, jnp.float32))
        assert np.linalg.norm(np.asarray(part.value, np.float64)) <= bound + 1e-6
        if size != 1e19:  # just beyond the largest square
            assert int(part.nonfinite) == (size > 1e19)


def loss(w, x, y):
    return x @ w - y  # its gradient is x


@pytest.mark.parametrize("site", ["rows", "upload"])
def test_a_run_reports_a_row_too_long_to_measure(site):
    def plan_of(size):
        x, y = np.ones((4, 4), np.float32), np.zeros(4, np.float32)
        x[0] = size
        data = jfl.datasets.arrays(x, y, x[1:], y[1:], classes=0)
        fed = jfl.federate(data, lambda labels: [np.array([0, 1]), np.array([2, 3])])
        chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(2))
        grad = jfl.private_grad(loss, chain) if site == "rows" else jfl.grad(loss)
        sites = dict(upload=chain) if site == "upload" else {}
        algorithm = jfl.algorithms.fedavg(grad, lr=1.0, steps=1, batch=jfl.batches.full())
        task = jfl.task(np.zeros(4, np.float32), loss)
        return jfl.plan(fed, task, algorithm, jfl.sampling.full(2), **sites)

    with pytest.raises(jfl.HealthError, match="nonfinite_rows=1") as error:
        jfl.simulate(jax.random.key(0), plan_of(1e25), 1)
    assert np.isfinite(error.value.run.server.params).all()
    jfl.simulate(jax.random.key(0), plan_of(1e18), 1)  # this one is clipped


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("small, large", [(1e-21, 5e17), (5e17, 1e-21)])
def test_tiny_activations_and_huge_backprops_pass_no_bound(positions, small, large):
    """Their squares underflow, and their product does not: its norm must not be taken for 0."""
    part = Product(
        jnp.full((1, 1, positions, 400), small, jnp.float32),
        jnp.full((1, 1, positions, 300), large, jnp.float32),
    )
    bound = 1e-6
    total = jax.jit(lambda part: part.total(shrink(jnp.sqrt(part.squares()), bound)))(part)
    assert np.linalg.norm(np.asarray(total, np.float64)) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("size, seed", [(512, 47), (65536, 1)])
def test_nearly_constant_activations_that_cancel_pass_no_bound(size, seed):
    """Rounding in sums of equal numbers has one sign, so it grows with the number of terms.

    Two positions have nearly the same activations and opposite backprops.
    """
    r = np.random.default_rng(seed)
    first = np.full(size, (1 + r.random()) * 1e6, np.float32)
    second = first * np.float32(1 + 1e-4 * r.normal(size=size))
    part = Product(
        jnp.asarray(np.stack([first, second])[None, None]),
        jnp.asarray(np.ones((1, 1, 2, 8), np.float32) * np.float32([[1], [-1]])),
    )
    total = jax.jit(lambda part: part.total(shrink(jnp.sqrt(part.squares()), 1.0)))(part)
    assert np.linalg.norm(np.asarray(total, np.float64)) <= 1 + 1e-5


@pytest.mark.parametrize("shape", [(0, 1, 2), (2, 0, 2), (2, 1, 0)])
def test_products_without_entries_have_no_length(shape):
    part = Product(jnp.ones((*shape, 4)), jnp.ones((*shape, 3)))
    assert np.array_equal(part.squares(), np.zeros(shape[0]))
