"""Results as data frames."""

import jax
import numpy as np
import pytest
from helpers.problems import CLIENTS, make_federation

import jfl
from jfl.runs.tables import tidy


@pytest.fixture(scope="module")
def swept():
    fed = make_federation(classes=3, held_out=1)
    task = jfl.models.logistic(fed)

    def make(lr, noise):
        chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(noise), jfl.divide(2))
        grad = jfl.private_grad(task.loss, chain)
        algorithm = jfl.algorithms.fedsgd(grad, lr=lr, batch=jfl.batches.full())
        return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))

    sweep = jfl.sweep(
        make, lr=[0.1, 0.2], noise=[1.0, 2.0], seed=[0, 1], rounds=2, evaluate_every=1
    )
    return make, sweep


def test_pandas(swept):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    make, sweep = swept
    frame = sweep.frame(delta=1e-5)
    assert isinstance(frame, pandas.DataFrame) and len(frame) == 2 * 2 * 2 * 2
    rows = tidy(sweep, delta=1e-5)
    assert frame["loss"].tolist() == [r["loss"] for r in rows]
    last = frame[(frame["noise"] == 2.0) & (frame["round"] == 2)]
    proved = jfl.guarantee(make(0.1, 2.0), 2, delta=1e-5).epsilon
    np.testing.assert_allclose(last["epsilon"], proved, rtol=1e-6)
    plan = make(0.1, 1.0)
    out = jfl.simulate(jax.random.key(0), plan, 2, evaluate_every=1)
    assert out.frame(plan)["round"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="kind"):
        sweep.frame(kind="arrow")


def test_polars(swept):
    pytest.importorskip("polars", reason="polars is not installed")
    frame = swept[1].frame(kind="polars")
    assert frame.height == 16 and frame["lr"].n_unique() == 2


def test_xarray(swept):
    pytest.importorskip("pandas", reason="pandas is not installed")
    pytest.importorskip("xarray", reason="xarray is not installed")
    data = swept[1].frame(kind="xarray")
    assert dict(data.sizes) == dict(lr=2, noise=2, seed=2, round=2)
    rows = [r for r in tidy(swept[1]) if r["lr"] == 0.2 and r["noise"] == 1.0]
    (row,) = [r for r in rows if r["seed"] == 1 and r["round"] == 2]
    picked = data.sel(lr=0.2, noise=1.0, seed=1, round=2)
    assert float(picked["loss"]) == row["loss"]
