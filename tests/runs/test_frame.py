"""Results as rows, and as data frames."""

import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import noisy_grad, noisy_release, squared
from helpers.report_pages import guarantee

import jfl
from jfl.runs import guarantee_rows, record, tables


def plan_of(fed, task, grad=None, **more):
    batch = jfl.batches.without_replacement(2)
    algorithm = jfl.algorithms.fedavg(grad or jfl.grad(squared), lr=0.1, steps=1, batch=batch)
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(fed.size.shape[0]), **more)


TOLD = ("unit", "adjacency", "view", "delta", "status")


@pytest.fixture(scope="module")
def noisy(fed, task):
    """A plan by its noise."""
    return lambda z: plan_of(fed, task, release=noisy_release(z=z))


@pytest.fixture(scope="module")
def swept(noisy):
    return jfl.sweep(noisy, z=[1.0, 2.0], seed=[3, 4], rounds=2, evaluate_every=1)


@pytest.fixture(scope="module")
def promise(noisy):
    """The best guarantee of a plan after its last round."""
    return jfl.guarantee(noisy(1.0), 2, 1e-5, unit="client", view="third_party")


def told(promise):
    return (promise.unit, promise.adjacency, promise.view, promise.delta, promise.status)


# --- rows


def test_tidy_rows_of_a_run(noisy, promise):
    out = jfl.simulate(jax.random.key(7), noisy(1.0), 2, evaluate_every=1)
    rows = tables.tidy(out)
    assert all(set(r) == set(record.COLUMNS) for r in rows)
    names = [(r["name"], r["seed"], r["round"], r["epsilon"]) for r in rows]
    assert names == [("run", 7, 1, None), ("run", 7, 2, None)]
    np.testing.assert_array_equal([r["loss"] for r in rows], out.metrics.loss)
    named = tables.tidy(out, noisy(1.0), delta=1e-5)
    assert named[0]["name"] == "fedavg" and named[0]["epsilon"] < named[1]["epsilon"]
    assert 0.99 * promise.epsilon <= named[1]["epsilon"] < 1.5 * promise.epsilon
    assert tuple(named[0][name] for name in TOLD) == told(promise)
    several = out._replace(metrics=jax.tree.map(lambda x: np.stack([x, x]), out.metrics))
    for bad, more, words in (
        (out, dict(delta=1e-5), "the plan"),
        (several, {}, "one run"),
    ):
        with pytest.raises(ValueError, match=words):
            tables.tidy(bad, **more)
    pytest.importorskip("pandas", reason="pandas is not installed")
    assert out.frame(noisy(1.0))["round"].tolist() == [1, 2]


def test_an_epsilon_is_that_of_the_plan_that_ran(noisy):
    """Not of a plan with more noise, which only continued the run, or did not run at all."""
    first, second = noisy(1.0), noisy(10.0)
    out = jfl.simulate(jax.random.key(7), first, 2)
    more = jfl.simulate(jax.random.key(7), first, 2, start=out.run)
    rows = tables.tidy(more, noisy(1.0), delta=1e-5)
    proved = jfl.guarantee(first, 4, 1e-5, view="third_party").epsilon
    np.testing.assert_allclose(rows[-1]["epsilon"], proved, rtol=1e-6)
    mixed = jfl.simulate(jax.random.key(7), second, 2, start=out.run)
    again = jfl.simulate(jax.random.key(7), first, 2, start=mixed.run)
    for ran, plan in ((out, second), (mixed, second), (mixed, first), (again, first)):
        with pytest.raises(ValueError, match="the plan that ran all rounds.*jfl.guarantee"):
            tables.tidy(ran, plan, delta=1e-5)
        assert tables.tidy(ran, plan)


def test_tidy_rows_of_a_sweep(swept, promise):
    rows = tables.tidy(swept, delta=1e-5)
    assert [(r["name"], r["seed"], r["round"], r["z"]) for r in rows] == [
        (f"fedavg z={z}", s, i, z) for z in (1.0, 2.0) for s in (3, 4) for i in (1, 2)
    ]
    np.testing.assert_array_equal([r["loss"] for r in rows], np.ravel(swept.metrics.loss))
    assert rows[0]["epsilon"] == rows[2]["epsilon"] > rows[4]["epsilon"] > 0
    assert 0.99 * promise.epsilon <= rows[1]["epsilon"] < 1.5 * promise.epsilon
    told_of = {(*(r[name] for name in TOLD), r["failed"]) for r in rows}
    assert told_of == {(*told(promise), False)}


def test_rows_say_of_which_promise_an_epsilon_is_and_what_failed(fed, task, monkeypatch):
    plans = [
        plan_of(fed, task, release=noisy_release()),
        plan_of(fed, task, noisy_grad()),
        plan_of(fed, task),
    ]
    seen = jfl.Metrics(np.array(3 * [[1, 2]]), np.ones((3, 2)), None, None, *np.ones((4, 3, 2)))
    points = [dict(seed=0, delta=d, failed=1) for d in (1, 2, 3)]
    failed = np.array([False, True, False])
    swept = SimpleNamespace(points=points, plans=plans, metrics=seen, failed=failed)
    rows = tables.tidy(swept, delta=1e-5)
    names = (*TOLD, "failed", "point_delta", "point_failed")
    assert [tuple(r[name] for name in names) for r in rows[1::2]] == [
        ("client", "replace_one", "third_party", 1e-5, "proved", False, 1, 1),
        ("example", "replace_one", "server", 1e-5, "proved", True, 2, 1),
        (None, None, None, 1e-5, "no guarantee", False, 3, 1),
    ]
    assert rows[1]["epsilon"] > 0 < rows[3]["epsilon"] and rows[5]["epsilon"] is None
    # without epsilons nothing is in the way of a point's own delta
    assert [r["delta"] for r in tables.tidy(swept)] == [1, 1, 2, 2, 3, 3]
    monkeypatch.setattr(guarantee_rows, "all_rows", lambda *_: [guarantee(3.0, "conditional")])
    conditional = {(r["epsilon"], r["unit"], r["status"]) for r in tables.tidy(swept, delta=1e-5)}
    assert conditional == {(None, None, "conditional")}


def test_equal_ledgers_are_accounted_once(fed, task, noisy, monkeypatch):
    calls, all_rows = [], guarantee_rows.all_rows

    def counted(*given):
        calls.append(given)
        return all_rows(*given)

    monkeypatch.setattr(guarantee_rows, "all_rows", counted)

    def make(z, lr):
        algorithm = jfl.algorithms.fedsgd(jfl.grad(squared), lr=lr)
        sampler = jfl.sampling.full(fed.size.shape[0])
        return jfl.plan(fed, task, algorithm, sampler, release=noisy_release(z=z))

    plans = [make(z, lr) for z in (1.0, 2.0) for lr in (0.1, 0.2, 0.3)]
    seen = jfl.Metrics(np.array(6 * [[1, 3]]), np.ones((6, 2)), None, None, *np.ones((4, 6, 2)))
    points = [dict(seed=0, point=i) for i in range(6)]
    swept = SimpleNamespace(points=points, plans=plans, metrics=seen, failed=np.zeros(6, bool))
    rows = tables.tidy(swept, delta=1e-5)
    assert len(calls) == 2
    for row, plan in zip(rows[1::2], plans):
        assert row["epsilon"] == jfl.guarantee(plan, 3, view="third_party").epsilon


def test_values_have_names_of_their_own():
    one, other, near = (np.ones(1001, np.float32) for _ in range(3))
    other[500], near[500] = 9, np.nextafter(np.float32(1), np.float32(2))
    names = [tables._value(v) for v in (one, other, near, jnp.array(other), [one], [other])]
    assert names[1] == names[3] and len(set(names)) == 5
    assert re.fullmatch(r"float32\[1001\] [0-9a-f]{8}", names[0]) and names[4].startswith("list ")
    assert tables._value(jnp.float32(0.5)) == 0.5 and tables._value((1, 2)) == "(1, 2)"
    # also keys that no number made
    assert tables._seed(jax.random.key(5)) == 5 == tables._seed(np.int64(5))
    first, second = (tables._seed(k) for k in jax.random.split(jax.random.key(0)))
    assert isinstance(first, str) and first != second


# --- data frames


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_data_frames(swept, kind):
    library = pytest.importorskip(kind, reason=f"{kind} is not installed")
    frame, rows = swept.frame(kind=kind, delta=1e-5), tables.tidy(swept, delta=1e-5)
    assert isinstance(frame, library.DataFrame) and len(rows) == len(frame) == 8
    for name in ("z", "seed", "round", "loss", "epsilon"):
        assert list(frame[name]) == [r[name] for r in rows], name
    with pytest.raises(ValueError, match="kind"):
        swept.frame(kind="arrow")


def test_a_missing_package_is_named_before_epsilons_are_computed(swept, monkeypatch):
    pytest.importorskip("pandas", reason="pandas is not installed")
    monkeypatch.setattr(tables, "tidy", lambda *_, **__: pytest.fail("this takes long"))
    for kind in ("xarray", "polars", "pandas"):
        monkeypatch.setitem(sys.modules, kind, None)
        with pytest.raises(ValueError, match=f"frame: expected the package {kind}.*pip install"):
            swept.frame(kind=kind, delta=1e-5)


def test_xarray(swept):
    pytest.importorskip("pandas", reason="pandas is not installed")
    pytest.importorskip("xarray", reason="xarray is not installed")
    data = swept.frame(kind="xarray")
    assert dict(data.sizes) == dict(z=2, seed=2, round=2)
    point = dict(z=2.0, seed=4, round=2)
    (row,) = [r for r in tables.tidy(swept) if point.items() <= r.items()]
    assert float(data.sel(point)["loss"]) == row["loss"]
