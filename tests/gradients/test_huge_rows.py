"""Rows whose values are finite while their squared norms are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfl

CHAINS = {
    "l2": lambda: (jfl.clip_l2(1.0),),
    "l1": lambda: (jfl.clip_l1(1.0),),
    "per_layer": lambda: (jfl.clip_per_layer([1.0], layers=1),),
    "bands": lambda: (jfl.wavelet.clip_bands(np.ones(3), jfl.bands.flat(np.zeros(4))),),
}


def plan_of(size, path="auto", site="rows", clip="l2"):
    x = np.ones((4, 4), np.float32)
    x[0] = size
    y = np.zeros(4, np.float32)
    fed = jfl.federate(
        jfl.datasets.arrays(x, y, x[1:], y[1:], classes=0),
        lambda labels: [np.array([0, 1]), np.array([2, 3])],
    )
    task = jfl.task(np.zeros(4, np.float32), lambda w, x, y: x @ w - y)  # its gradient is x
    noise = jfl.laplace(1.0) if clip == "l1" else jfl.gaussian(1.0)
    chain = jfl.chain(*CHAINS[clip](), jfl.total(), noise, jfl.divide(2))
    grad = jfl.grad(task.loss)
    sites = dict(upload=chain) if site == "upload" else {}
    if site == "rows":
        grad = jfl.private_grad(task.loss, chain, path=path)
    alg = jfl.algorithms.fedavg(grad, lr=1.0, steps=1, batch=jfl.batches.full())
    return jfl.plan(fed, task, alg, jfl.sampling.full(2), **sites)


@pytest.mark.parametrize("site", ["rows", "upload"])
@pytest.mark.parametrize("path", ["vmap", "auto"])
def test_a_row_too_long_to_measure_counts_as_zero_and_is_reported(path, site):
    with pytest.raises(jfl.HealthError, match="nonfinite_rows=1"):
        jfl.simulate(jax.random.key(0), plan_of(1e25, path, site), 1)
    run = jfl.simulate(
        jax.random.key(0), plan_of(1e25, path, site), 1, tolerate=("nonfinite_rows",)
    )
    assert np.isfinite(run.params).all()
    jfl.simulate(jax.random.key(0), plan_of(1e18, path, site), 1)  # this one is clipped


@pytest.mark.parametrize("clip", [c for c in CHAINS if c != "l1"])
def test_every_clip_reports_it(clip):
    with pytest.raises(jfl.HealthError, match="nonfinite_rows=1"):
        jfl.simulate(jax.random.key(0), plan_of(1e25, clip=clip), 1)


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1.0, 1e18, 1e19, 3e38])
def test_no_size_of_a_row_passes_its_bound(size):
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), adjacency="add_remove")
    from jfl.privacy.mechanisms.chain import clip_and_sum

    value = clip_and_sum(chain, (), jnp.full((1, 5), size, jnp.float32), jnp.ones(1)).value
    assert np.linalg.norm(np.asarray(value, np.float64)) <= 1 + 1e-6


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("small, large", [(1e-21, 5e17), (5e17, 1e-21), (1e-23, 5e17)])
def test_tiny_activations_and_huge_backprops_pass_no_bound(positions, small, large):
    """Their squares underflow, and their product does not: its norm must not be taken for 0."""
    from jfl.kernels.ghost_sums import Product, shrink

    part = Product(
        jnp.full((1, 1, positions, 400), small, jnp.float32),
        jnp.full((1, 1, positions, 300), large, jnp.float32),
    )
    bound = 1e-6
    clipped = jax.jit(lambda part: part.total(shrink(jnp.sqrt(part.squares()), bound)))
    total = clipped(part)
    assert np.linalg.norm(np.asarray(total, np.float64)) <= bound * (1 + 1e-5)
