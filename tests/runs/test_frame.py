"""Results as data frames."""

import jax
import pytest
from helpers.problems import CLIENTS, make_federation

import jfl
from jfl.runs.tables import tidy


@pytest.fixture(scope="module")
def swept():
    fed = make_federation(classes=3)
    task = jfl.models.logistic(fed)

    def make(lr, noise):
        chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(noise), jfl.divide(2))
        grad = jfl.private_grad(task.loss, chain)
        algorithm = jfl.algorithms.fedsgd(grad, lr=lr, batch=jfl.batches.full())
        return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))

    axes = dict(lr=[0.1, 0.2], noise=[1.0, 2.0], seed=[0, 1])
    return make, jfl.sweep(make, **axes, rounds=2, evaluate_every=1)


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_data_frames(swept, kind):
    library = pytest.importorskip(kind, reason=f"{kind} is not installed")
    make, sweep = swept
    frame = sweep.frame(kind=kind, delta=1e-5)
    rows = tidy(sweep, delta=1e-5)
    assert isinstance(frame, library.DataFrame) and len(rows) == len(frame) == 16
    for name in ("lr", "noise", "seed", "round", "loss", "epsilon"):
        assert list(frame[name]) == [r[name] for r in rows], name
    proved = jfl.guarantee(make(0.1, 2.0), 2, delta=1e-5).epsilon
    last = [r["epsilon"] for r in rows if (r["noise"], r["round"]) == (2.0, 2)]
    assert last == pytest.approx([proved] * 4, rel=1e-6)
    with pytest.raises(ValueError, match="kind"):
        sweep.frame(kind="arrow")


def test_xarray(swept):
    pytest.importorskip("pandas", reason="pandas is not installed")
    pytest.importorskip("xarray", reason="xarray is not installed")
    data = swept[1].frame(kind="xarray")
    assert dict(data.sizes) == dict(lr=2, noise=2, seed=2, round=2)
    point = dict(lr=0.2, noise=1.0, seed=1, round=2)
    (row,) = [r for r in tidy(swept[1]) if point.items() <= r.items()]
    assert float(data.sel(point)["loss"]) == row["loss"]


@pytest.mark.slow
def test_a_single_run_has_a_frame_too(swept):
    pytest.importorskip("pandas", reason="pandas is not installed")
    plan = swept[0](0.1, 1.0)
    out = jfl.simulate(jax.random.key(0), plan, 2, evaluate_every=1)
    assert out.frame(plan)["round"].tolist() == [1, 2]
