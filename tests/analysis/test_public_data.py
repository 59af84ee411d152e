"""What public rows tell, against plain loops; schedules by pieces and impact factors, against plain
Python."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import CLIENTS, close, flat, same_bits, squared, start_params
from hypothesis import given, settings
from hypothesis import strategies as st

import jfl
from jfl import schedules
from jfl.analysis import public_data
from jfl.core.records import Fn
from jfl.data import transforms
from jfl.privacy.mechanisms import haar_bands as haar
from jfl.sampling.weights import impact

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


@pytest.mark.parametrize("microbatch", [None, 1, 3, 100])
def test_gradient_norms(microbatch):
    x, y = rows()
    got = public_data.gradient_norms(squared, start_params(), x, y, microbatch=microbatch)
    close(got, np.linalg.norm(gradients(x, y), axis=1))
    assert got.shape == (ROWS,)


def test_blocks_bound_what_is_held():
    """With blocks of one row no array holds the gradients of several."""
    x, params = jnp.zeros((64, 50)), jnp.zeros((50, 50))
    loss = Fn(lambda w, x, y: (x @ w).sum() * y)

    def largest(microbatch):
        text = str(
            jax.make_jaxpr(
                lambda x: public_data.gradient_norms(
                    loss, params, x, jnp.ones(64), microbatch=microbatch
                )
            )(x)
        )
        return "64,50,50]" in text, "8,50,50]" in text

    assert largest(64) == (True, False) and largest(8) == (False, True)


def test_default_blocks_follow_the_size_of_the_model(monkeypatch):
    x, y = rows()
    for room, block in ((4 * 3, 3), (1, 1), (10**6, ROWS)):
        monkeypatch.setattr(public_data, "ROOM", room)
        assert public_data._arguments("here", squared, start_params(), x, y, None)[-1] == block


@given(quantile=st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]), n=st.sampled_from([1, 2, 9]))
def test_median_and_quantiles(quantile, n):
    x, y = rows(12)
    want = np.linalg.norm(gradients(x, y), axis=1)
    got = public_data.median_norm(
        squared, start_params(), x[:n], y[:n], quantile=quantile, microbatch=1
    )
    assert type(got) is float and math.isclose(got, np.quantile(want[:n], quantile), rel_tol=2e-5)


def test_median_by_a_plain_loop(task):
    x, y = rows()
    each = sorted(
        float(np.linalg.norm(flat(jax.grad(squared)(start_params(), x[i], y[i]))))
        for i in range(ROWS)
    )
    assert math.isclose(
        public_data.median_norm(task, start_params(), x, y), each[ROWS // 2], rel_tol=1e-5
    )


def test_public_rows_of_transform():
    public, _ = transforms.public(jfl.datasets.digits(), 20)
    clip = public_data.median_norm(
        lambda w, x, y: -jax.nn.log_softmax(x.ravel() @ w)[y], jnp.zeros((64, 10)), *public
    )
    want = np.linalg.norm(public.x.reshape(20, -1), axis=1) * math.sqrt(
        0.9
    )  # softmax - one-hot at zero logits
    assert math.isclose(clip, np.median(want), rel_tol=1e-5) and jfl.clip_l2(clip) is not None


def test_update_norms_by_plain_loops():
    """Full batches of disjoint rows: every update is in the set of those that can be, and no row
    comes twice."""
    x, y = rows(7)
    lr, steps = 0.05, 3
    got = public_data.update_norms(
        squared,
        start_params(),
        x,
        y,
        clients=3,
        steps=steps,
        batch=jfl.batches.full(),
        lr=lr,
        key=jax.random.key(1),
    )

    def moved(pair):
        w, own = start = (
            flat(start_params()),
            np.c_[np.ones(2), np.asarray(x, np.float64)[list(pair)]],
        )
        for _ in range(steps):
            w = w - lr * own.T @ (own @ w - np.asarray(y, np.float64)[list(pair)]) / 2
        return np.linalg.norm(w - start[0])

    pairs = {(i, j): moved((i, j)) for i in range(7) for j in range(i)}
    found = [min(pairs, key=lambda p: abs(pairs[p] - float(norm))) for norm in got]
    for pair, norm in zip(found, got):
        assert math.isclose(pairs[pair], float(norm), rel_tol=1e-4)
    assert got.shape == (3,) and len({i for pair in found for i in pair}) == 6
    same = public_data.update_norms(
        squared,
        start_params(),
        x,
        y,
        clients=3,
        steps=steps,
        batch=jfl.batches.full(),
        lr=lr,
        key=jax.random.key(1),
    )
    other = public_data.update_norms(
        squared,
        start_params(),
        x,
        y,
        clients=3,
        steps=steps,
        batch=jfl.batches.full(),
        lr=lr,
        key=jax.random.key(2),
    )
    assert same_bits(got, same) and not same_bits(got, other)


def test_update_norms_draw_batches():
    """One row a client, drawn half of the time, by each client for itself and anew in each step."""
    x, y = rows(12)
    each = np.linalg.norm(gradients(x, y), axis=1)
    got = np.asarray(
        public_data.update_norms(
            squared,
            start_params(),
            x,
            y,
            clients=12,
            steps=1,
            lr=0.1,
            key=jax.random.key(0),
            batch=jfl.batches.poisson(rate=0.5, capacity=1),
        )
    )
    drawn = got > 0
    assert 0 < drawn.sum() < 12
    assert len({int(np.abs(0.1 * each - norm).argmin()) for norm in got[drawn]}) == drawn.sum()
    np.testing.assert_allclose(np.abs(0.1 * each - got[drawn][:, None]).min(1), 0, atol=1e-6)
    twice = np.asarray(
        public_data.update_norms(
            squared,
            start_params(),
            x,
            y,
            clients=12,
            steps=2,
            lr=0.1,
            key=jax.random.key(0),
            batch=jfl.batches.poisson(rate=0.5, capacity=1),
        )
    )
    assert (twice[drawn] > 0).all() and 0 < (twice[~drawn] > 0).sum()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(clients=8), "at least 1 of the public rows for each client, but got 7 rows for 8"),
        (
            dict(clients=3, batch=jfl.batches.without_replacement(3)),
            "at least 3 of the public rows for each",
        ),
        (dict(clients=0), "got clients=0"),
        (dict(steps=0), "got steps=0"),
        (dict(lr=0.0), "lr > 0"),
        (dict(batch=16), "batch = a batch sampler"),
    ],
)
def test_update_norms_refuse(options, message):
    x, y = rows()
    options = dict(
        dict(clients=2, steps=1, lr=0.1, batch=jfl.batches.full(), key=jax.random.key(0)), **options
    )
    with pytest.raises(ValueError, match="public_data.update_norms: expected .*" + message):
        public_data.update_norms(squared, start_params(), x, y, **options)


def test_rows_are_checked():
    x, y = rows()
    for bad in ((x, y[:3]), (x[:0], y[:0]), (x[0, 0], y)):
        with pytest.raises(ValueError, match="public_data.gradient_norms: expected public rows"):
            public_data.gradient_norms(squared, start_params(), *bad)
    with pytest.raises(ValueError, match="got microbatch=0"):
        public_data.gradient_norms(squared, start_params(), x, y, microbatch=0)
    with pytest.raises(ValueError, match="expected a Task, or a loss"):
        public_data.median_norm(3, start_params(), x, y)
    for quantile in (1.5, -0.1, float("nan"), [0.5]):
        with pytest.raises(ValueError, match=r"quantile in \[0, 1\]"):
            public_data.median_norm(squared, start_params(), x, y, quantile=quantile)
    with pytest.raises(ValueError, match="finite gradients, but got 1 rows of 7 without"):
        public_data.median_norm(squared, start_params(), x.at[2, 0].set(jnp.nan), y)


# --- bands


def bilinear(params, x, y):
    """Its gradient in w is x times (1, 2), and y in b."""
    return x @ params["w"] @ jnp.array([1.0, 2.0]) + y * params["b"].sum()


LIKE = {"b": jnp.zeros(3), "w": jnp.zeros((8, 2))}


@pytest.mark.by_default("flat")
@pytest.mark.parametrize("make", [haar.flat, haar.plain, lambda like: haar.pixels(like, (4, 2))])
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
    close(public_data.band_energies(bilinear, LIKE, x, y, bands, microbatch=2), got, rtol=1e-5)
    if haar.count(bands) > 1:  # of rows, not of their mean
        assert not np.allclose(
            got, energies(bands, jax.tree.map(lambda *g: sum(g) / 5, *each)), rtol=0.2
        )


@pytest.mark.parametrize(
    "m, shares, mean, weighted, optimal",
    [
        (1024, [2**-10, *(2.0 ** -np.arange(1, 11))], 11.0, 3.667, 1.0),  # white
        (1024, [0, 1, *[0] * 9], 2.0, 0.6667, 0.5),  # all in the finest
        (8, [1, 0, 0, 0], 8.0, 2.75, 1 / 8),  # constant
        (8, [0.1, 0.2, 0.3, 0.4], 0.8 + 0.4 + 1.2 + 3.2, 1.925, None),
    ],
)
def test_band_report_of_a_vector(m, shares, mean, weighted, optimal):
    shares, bands = (
        np.array(shares, float),
        haar.flat(jnp.zeros(m)),
    )  # base first, then finest to root
    height = np.arange(1, 1 + int(math.log2(m)))
    (entry,) = public_data.band_report(7 * shares, bands)
    np.testing.assert_allclose(entry["shares"], shares, rtol=1e-12)
    assert entry["block"] == 0 and entry["size"] == m and math.isclose(entry["energy"], 7)
    assert entry["leaves"] == [float(m), *(2.0**height)]
    assert math.isclose(entry["mean_leaves"], mean, rel_tol=1e-9)
    assert math.isclose(entry["ratio_weighted"], mean * (1 / 3 + 2 / (3 * m**2)), rel_tol=1e-9)
    assert math.isclose(entry["ratio_weighted"], weighted, abs_tol=5e-4)
    n = np.array([1, *(m / 2**height)])
    want = np.sqrt(shares * n).sum() ** 2 / m
    assert math.isclose(entry["ratio_optimal"], want if optimal is None else optimal, rel_tol=1e-9)


def test_band_report_of_blocks():
    """A pyramid and a plain leaf: the ratios are those of the noise that the shapes would add."""
    bands = haar.pixels(LIKE, (4, 2))
    blocks, sizes, leaves = haar.blocks(bands), haar.sizes(bands), haar.leaves(bands)
    energies = np.arange(1.0, 1 + haar.count(bands))
    report = public_data.band_report(energies, bands)
    assert [entry["block"] for entry in report] == [0, 1] and len(report[1]["shares"]) > 2
    assert report[0] == dict(
        block=0,
        size=3,
        energy=1.0,
        shares=[1.0],
        leaves=[1.0],
        mean_leaves=1.0,
        ratio_weighted=pytest.approx(1),
        ratio_optimal=pytest.approx(1),
    )
    for entry in report:
        at = blocks == entry["block"]
        for scales, key in (
            (np.sqrt(leaves[at]), "ratio_weighted"),
            ((sizes[at] / energies[at]) ** 0.25, "ratio_optimal"),
        ):
            bound = (scales**2 * energies[at]).sum()  # squared norm in the shape
            power = bound * (sizes[at] / scales**2).sum()  # of noise that is isotropic in it
            assert math.isclose(
                entry[key], power / (energies[at].sum() * sizes[at].sum()), rel_tol=1e-9
            )
        assert entry["ratio_optimal"] <= 1 + 1e-12
    empty = public_data.band_report(np.where(blocks == 1, 0.0, 1.0), bands)
    assert (
        empty[1]["energy"] == 0
        and all(map(math.isnan, empty[1]["shares"]))
        and math.isnan(empty[1]["ratio_weighted"])
    )
    for bad in (energies[:-1], -energies, energies * np.nan):
        with pytest.raises(
            ValueError, match="public_data.band_report: expected finite energies >= 0"
        ):
            public_data.band_report(bad, bands)


# --- schedules by pieces


def plain(breakpoints, values, clock):
    for at, value in zip(breakpoints, values):
        if clock < at:
            return value
    return values[-1]


@given(
    breakpoints=st.sets(st.integers(1, 30), max_size=5).map(sorted),
    shape=st.sampled_from([(), (3,)]),
)
@settings(max_examples=25)
def test_piecewise_is_the_plain_function(breakpoints, shape):
    values = (
        np.random.default_rng(len(breakpoints))
        .normal(size=(len(breakpoints) + 1, *shape))
        .astype(np.float32)
    )
    made = schedules.piecewise(breakpoints, list(values))
    want = np.stack([plain(breakpoints, values, t) for t in range(32)])
    np.testing.assert_array_equal(jax.jit(Fn.__call__)(made, jnp.arange(32)), want)


def test_piecewise_traces_once():
    traced = []

    @jax.jit
    def run(schedule, clock):
        traced.append(1)
        return schedule(clock)

    for breakpoints, values in (([2, 5], [1.0, 2.0, 3.0]), ([1, 9], [4.0, -5.0, 6.5])):
        for clock in range(11):
            assert float(run(schedules.piecewise(breakpoints, values), clock)) == plain(
                breakpoints, values, clock
            )
    assert len(traced) == 1
    both = jax.vmap(lambda v, t: schedules.piecewise([3], [v, 2 * v])(t), (0, None))(
        jnp.array([1.0, 2.0]), 3
    )
    assert both.tolist() == [2.0, 4.0]
    slope = jax.grad(lambda v: schedules.piecewise([3], [v, 2 * v])(3))(1.0)
    assert float(slope) == 2.0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([0], [1, 2]), "breakpoint >= 1"),
        (([3, 3], [1, 2, 3]), "breakpoint >= 4, but got breakpoint=3. Breakpoints rise"),
        (([5, 3], [1, 2, 3]), "breakpoint >= 6"),
        (([1.5], [1, 2]), "got breakpoint=1.5"),
        (([2**31], [1, 2]), "<= 2147483647"),
        ((3, [1, 2]), "a list of each"),
        (([3], 1.0), "a list of each"),
        (([3], [1]), "2 values of one shape.*got 1 of"),
        (([3], [1, 2, 3]), "got 3 of"),
        (([3], [1, [1, 2]]), r"got 2 of shape \(\), \(2,\)"),
        (([3], [1, float("nan")]), "finite values"),
        (([3], [1, 1e39]), "finite values"),
    ],
)
def test_piecewise_refuses(arguments, message):
    with pytest.raises(ValueError, match="schedules.piecewise: expected .*" + message):
        schedules.piecewise(*arguments)


@pytest.mark.parametrize(
    "ratios, groups, want",
    [
        ((0, 1, 2), (20, 20, 20), (0, 1 / 60, 1 / 30)),
        ((0, 2, 1), (20, 35, 5), (0, 2 / 75, 1 / 75)),
        ((1, 3, 5), (20, 20, 20), (1 / 180, 1 / 60, 1 / 36)),
        ((1,), (4,), (1 / 4,)),
    ],
)
def test_impact_factors_of_the_paper(ratios, groups, want):
    p = impact(ratios, groups)
    assert p.shape == (sum(groups),) and math.isclose(p.sum(), 1, abs_tol=1e-12)
    np.testing.assert_allclose(
        p, [w for w, count in zip(want, groups) for _ in range(count)], rtol=1e-14
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (((0, 0), (3, 4)), "positive sum"),
        (((1, -1), (3, 4)), "ratios >= 0"),
        (((1, 2), (3,)), "a ratio and a size"),
        (((1, 2), (3, 0)), r"groups\[1\] >= 1"),
        (((1, 2), (3, 1.5)), r"got groups\[1\]=1.5"),
        ((1, 3), "a ratio and a size"),
        (((1, float("nan")), (3, 4)), "ratios >= 0"),
    ],
)
def test_impact_refuses(arguments, message):
    with pytest.raises(ValueError, match="weights.impact: expected .*" + message):
        impact(*arguments)


@pytest.mark.slow
def test_weights_that_change_in_a_plan(fed, task):
    """Round 0 by the first weights and round 1 by the second, as two runs with constant weights."""
    first, second = impact((0, 1), (3, 4)), impact((1, 2), (5, 2))
    algorithm = jfl.algorithms.fedsgd(jfl.grad(task.loss), batch=jfl.batches.full())

    def run(rounds, *values, **options):
        plan = jfl.plan(
            fed,
            task,
            algorithm,
            jfl.sampling.full(CLIENTS),
            weights=schedules.piecewise([1], values),
        )
        return jfl.simulate(jax.random.key(3), plan, rounds, evaluate_every=2, **options)

    out, half, same = run(2, first, second), run(1, first, first), run(2, first, first)
    close(out.params, run(1, second, second, start=half.run).params)
    assert not np.allclose(flat(out.params), flat(same.params), rtol=1e-2)
    rows = [np.asarray(fed.index[c, : fed.size[c]]) for c in range(CLIENTS)]
    mean = sum(p * gradients(fed.x[own], fed.y[own]).mean(0) for p, own in zip(first, rows))
    rate = (flat(start_params()) - flat(half.params)) / mean
    np.testing.assert_allclose(rate, rate[0], rtol=1e-4)  # one step along the weighted gradient
