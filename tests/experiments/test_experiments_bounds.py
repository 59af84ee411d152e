"""Bounds of Talaei and Izadi, 2024, and of Ranaweera et al., 2025, beside runs: what is measured,
against the library and against NumPy; and runs of seconds."""

import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest

import jfl
from experiments.harness import objectives, runner, theorems
from experiments.harness.verdicts import (
    CONTRADICTED,
    HOLDS,
    UNDECIDED,
    UNKNOWN,
    Claim,
)
from experiments.papers import softmax_rows
from experiments.papers.ranaweera2025 import bounds as ranaweera2025_bounds
from experiments.papers.ranaweera2025 import figures as ranaweera2025
from experiments.papers.ranaweera2025 import theory as ranaweera
from experiments.papers.talaei2024 import bounds as talaei2024_bounds
from experiments.papers.talaei2024 import figures as talaei2024
from experiments.papers.talaei2024 import theory as talaei

SMALL = dict(dataset="digits", clients=3, rows=20)
PADPFL = talaei2024_bounds.Setting(**SMALL, rounds=4)
SGD = ranaweera2025_bounds.Setting(**SMALL, cohort=2, batch=8, rounds=3)


def judged(claims, differs):
    """Judge claims without lines."""
    return runner.judged(runner.Experiment("", {}, {}, tuple(claims), differs=differs), {})


def verdicts(*claims):
    return [v["verdict"] for v in judged(claims, "other settings")]


def of_cell(paper, cell, part=""):
    return verdicts(*(c for c in paper.claims_of("line", cell) if part in c.text))


def losses_of(rows, w):
    return softmax_rows.moments(rows, w)[0]


# --- what is measured


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_the_library():
    fed = softmax_rows.federation("digits", "skewed", 3, 20)
    task, r = jfl.models.logistic(fed), np.random.default_rng(0)
    random = lambda v: r.normal(size=v.shape).astype(np.float32)
    params = jax.tree.map(random, task.init(jax.random.key(0)))
    rows, w = softmax_rows.rows_of(fed, 0.3), softmax_rows.matrix(params)
    want = softmax_rows.matrix(jfl.heterogeneity.client_gradients(task, params, fed, l2=0.3))
    losses, grads, squares = softmax_rows.moments(rows, w)
    np.testing.assert_allclose(grads, want, atol=1e-5)
    data = want - 0.3 * w  # the mean square is that of the mean and the variance
    variance = np.asarray(objectives.gradient_variance(task, params, fed))
    np.testing.assert_allclose(squares, (data**2).sum((1, 2)) + variance, rtol=1e-4)
    at, least = softmax_rows.best(fed, 0.3, "uniform")
    np.testing.assert_allclose(losses_of(rows, at).mean(), least, rtol=1e-10)
    assert np.abs(softmax_rows.gradients(rows, at).mean(0)).max() < 1e-7


def test_clients_that_are_alike_hold_the_same_rows():
    rows = softmax_rows.rows_of(softmax_rows.federation("digits", "alike", 3, 20), 0.1)
    ordered = np.sort(rows.x.reshape(3, 20, -1), 1)
    np.testing.assert_array_equal(ordered[0], ordered[1])
    np.testing.assert_array_equal(rows.y.sum(1)[0], rows.y.sum(1)[2])
    np.testing.assert_allclose((rows.x**2).sum(-1), 2.0, rtol=1e-5)
    other = softmax_rows.rows_of(softmax_rows.federation("digits", "classes", 3, 20), 0.1)
    assert (other.y.sum(1).max(1) == 20).all()


# --- how it is judged


@pytest.mark.parametrize(
    "bound, values, unmet, verdict",
    [
        (1.0, [0.5], "", HOLDS),
        (1.0, [1.5], "", CONTRADICTED),
        (1.0, [1.5, 1.51, 1.49], "", CONTRADICTED),
        (1.0, [0.5, 1.51, 0.9], "", UNDECIDED),
        (1.0, [0.5], "a clip acts", UNKNOWN),
        (1.0, [float("nan")], "", UNKNOWN),
        (float("inf"), [0.5, 0.6], "", UNKNOWN),
    ],
)
def test_a_bound_is_above_a_mean_with_its_interval(bound, values, unmet, verdict):
    check = theorems.is_above(bound, values, unmet, drawn=len(values) > 1)
    # a theorem is one, whoever states it
    assert verdicts(Claim("it is", check), Claim("it is", check, "ours")) == [verdict] * 2
    assert verdicts(Claim("it is", theorems.is_above(1.0, [0.5]))) == [UNDECIDED]  # of one draw


@pytest.mark.parametrize(
    "values, verdict",
    [
        ([0.5, 0.51, 0.49], HOLDS),
        ([0.4, 1.9, 0.9], UNDECIDED),
        ([1.5, 1.51, 1.49], UNKNOWN),
        ([float("nan")] * 3, UNKNOWN),
    ],
)
def test_a_theorem_up_to_a_constant_is_never_contradicted(values, verdict):
    shares = {"T = 3": np.array(values)}
    check = theorems.shares_are_below_1(shares, "more", up_to_a_constant=True)
    (given,) = judged([Claim("it holds", check)], "other settings")
    assert given["verdict"] == verdict
    if np.mean(values) > 1:
        least = theorems.rounded_up(np.mean(values))
        assert f"would have to be {least} or more (T = 3: {least})" in given["seen"]
    else:
        assert "constant" not in given["seen"]
    exact = Claim("it holds", theorems.shares_are_below_1(shares))
    assert verdicts(exact) == [CONTRADICTED if np.mean(values) > 1.4 else verdict]


def test_a_bound_says_something_below_the_start():
    check = lambda **lines: judged([theorems.is_below_the_start("it", lines, "lines")], "")
    (told,) = check(a=(-0.1, 0.2), b=(0.1, 0.2), c=(np.array([0.3, 0.4]), 0.2))
    assert told["verdict"] == HOLDS and told["whose"] == "ours"
    assert told["seen"] == "in 2 of 3 lines: a; b; below 0 in a"
    assert check(a=(0.3, 0.2))[0]["verdict"] == CONTRADICTED


# --- Talaei, Izadi, 2024


def padpfl_in_numpy(rows, mu, lr, steps, rounds):
    """Models of PADPFL with equal factors and no noise, written out."""
    w, found = np.zeros((rows.x.shape[2], rows.y.shape[2])), []
    for _ in range(rounds + 1):
        found.append(w)
        own = []
        for x, y in zip(rows.x, rows.y):
            v = w
            for _ in range(steps):
                e = np.exp(x @ v)
                grad = x.T @ (e / e.sum(1, keepdims=True) - y) / len(x) + rows.l2 * v
                v = v - lr * (grad + mu * (v - w))
            own.append(v)
        w = sum(own) / len(own)
    return np.array(found)


@pytest.mark.slow
def test_runs_of_padpfl_are_those_of_numpy():
    made = talaei2024_bounds.problem(PADPFL)
    lr = 1 / (made.smoothness + PADPFL.mu)
    want = padpfl_in_numpy(made.rows, PADPFL.mu, lr, PADPFL.steps, 4)
    models = softmax_rows.along(made.plan, 1, 4)
    assert models.shape == (1, *want.shape) and np.abs(want[-1]).max() > 0.01
    np.testing.assert_allclose(models[0], want, atol=1e-6)
    seen = talaei2024_bounds.measure(made, PADPFL, models[0], 1)
    assert seen.noise < 1e-5 < seen.gradient and 0 < seen.inexactness < 0.01
    assert seen.added == 0 and seen.extra == 0
    private = talaei2024_bounds.Setting(epsilon=20.0)
    stds = talaei2024_bounds._stds(private, private.factors(), 1.0)  # client, server, total
    np.testing.assert_allclose(stds, (0.002072, 0.001001, 0.001036), rtol=1e-3)


@pytest.mark.slow
def test_factors_change_at_the_swap():
    turned = dataclasses.replace(PADPFL, impact=((1, 0), (0, 1)), swap=2, deal="classes")
    np.testing.assert_allclose(turned.factors(), [[0.5, 0, 0.5], [0, 1, 0]])
    made = talaei2024_bounds.problem(turned)
    models = softmax_rows.along(made.plan, 1, 4)[0]
    for t in range(4):  # the mean of the models of those that count is the next one
        assert talaei2024_bounds.measure(made, turned, models, t).noise < 1e-5
    seen = talaei2024_bounds.measure(made, turned, models, 2)
    assert 0 < seen.loss - seen.before <= seen.extra and seen.added > 0


@pytest.mark.slow
def test_theorem2_as_printed_is_below_the_gap_in_numpy_alone():
    """Equal clients, exact gradients, every hypothesis met: the sum of k_2 T is below 0."""
    alike = dataclasses.replace(PADPFL, deal="alike", clients=1, rounds=150)
    fed = softmax_rows.federation("digits", "alike", 1, 20)
    rows, mu, rounds = softmax_rows.rows_of(fed, alike.l2), alike.mu, alike.rounds
    x = rows.x[0]
    smooth = np.linalg.norm(x, 2) ** 2 / len(x) / 2 + alike.l2  # softmax has curvature 1/2
    models = padpfl_in_numpy(rows, mu, 1 / (smooth + mu), alike.steps, rounds)
    values = np.array([losses_of(rows, w)[0] for w in models])
    grads = np.array([np.linalg.norm(softmax_rows.gradients(rows, w)) for w in models])
    gamma = 1e-3  # above what five steps leave
    drift = (1 + gamma) / mu
    lambda2 = (gamma + smooth * drift - 1) / mu + smooth * drift**2 / 2
    least = softmax_rows.best(fed, alike.l2, "uniform")[1]
    printed = values[0] - least + lambda2 * grads.max() ** 2 * rounds
    assert lambda2 < 0 and printed < 0 < values[-1] - least
    # what is summed is right, without the bound on the gradients
    assert values[-1] - values[0] <= lambda2 * (grads[:-1] ** 2).sum()
    cell = talaei2024_bounds.against(alike, 1)
    assert cell["printed"] == pytest.approx(printed, rel=0.01)
    assert cell["gap"][0] == pytest.approx(values[-1] - least, rel=1e-3)
    claims = talaei2024_bounds.claims_of("alike", cell)
    of = {c["statement"]: c["verdict"] for c in judged(claims, "ours")}
    assert list(of.values()) == [CONTRADICTED, HOLDS, HOLDS]
    assert set(of_cell(talaei2024_bounds, cell | dict(clip_acts=True))) == {UNKNOWN}
    rises = cell | dict(lambdas=talaei.Lambdas(0.1, 1.0, 0.5)._asdict())
    (printed, *ours) = of_cell(talaei2024_bounds, rises)
    assert printed != UNKNOWN and set(ours) == {UNKNOWN}


@pytest.mark.slow
@pytest.mark.parametrize("impact, verdict", [((1, 0), CONTRADICTED), ((4, 5), HOLDS)])
def test_lemma3_fails_where_factors_go_to_other_clients(impact, verdict):
    """Beside the lemma's right side in NumPy, without noise."""
    swap = dict(impact=(impact, impact[::-1]), swap=12, rounds=20, deal="classes", clients=2)
    turned = dataclasses.replace(PADPFL, **swap)
    made, cell = talaei2024_bounds.problem(turned), talaei2024_bounds.against(turned, 1)
    assert of_cell(talaei2024_bounds, cell, talaei2024_bounds.LEMMA) == [verdict]
    before, after = softmax_rows.along(made.plan, 1, 20)[0][12:14]
    old, new = made.factors
    losses = losses_of(made.rows, before)
    change = new @ losses_of(made.rows, after) - old @ losses
    slope = np.tensordot(old, softmax_rows.gradients(made.rows, before), 1)
    bound = cell["lambdas_printed"]["square"] * (slope**2).sum() + losses.max() / 2
    assert cell["round_change"][0] == pytest.approx(change, rel=1e-4)
    assert cell["lemma3"][0] == pytest.approx(bound, rel=1e-4)


@pytest.mark.slow
def test_the_number_of_clients_stands_for_the_dimension_in_the_length_of_noise():
    """Noise has a number for each of the model's dimensions; and with these its mean length would
    be sqrt(2 / pi) of what it is."""
    cell = talaei2024_bounds.against(dataclasses.replace(PADPFL, epsilon=20.0), 4)
    assert of_cell(talaei2024_bounds, cell, f": {talaei2024_bounds.LENGTH}") == [CONTRADICTED]
    by_clients, by_dim = (cell["std"] * (2 * n / np.pi) ** 0.5 for n in (3, cell["dim"]))
    assert cell["noise_printed"] == pytest.approx(by_clients)
    assert by_clients < 0.2 * cell["noise"].mean() and by_dim < cell["noise"].mean()
    assert cell["noise"] == pytest.approx(cell["noise_norm"], rel=0.05)
    share = np.mean(cell["noise_of_dimension"] / cell["noise"])
    assert share == pytest.approx((2 / np.pi) ** 0.5, rel=0.05)


# --- Ranaweera et al., 2025


def test_theorem3_is_chained_through_a_round():
    c = ranaweera.Constants(0.1, 1.0, 1.5, variance_2=0.2, cohort=2, batch=4, local_noise_2=0.1)
    squares = np.array([[0.5, 0.4, 0.3], [0.2, 0.2, 0.1]])
    got = ranaweera2025_bounds.chained(c, np.array([1.0, 2.0]), 0.1, squares)
    for gap, square, want in zip((1.0, 2.0), squares, got):
        for s in range(3):
            gap = ranaweera.theorem3(c, gap, [0.1] * (s + 1), square[: s + 1]).value
        assert want == pytest.approx(float(gap), rel=1e-12)


@pytest.mark.slow
def test_steps_of_clients_done_again():
    steps = dataclasses.replace(SGD, steps=3, noise="iso", sigma=0.05)
    made = ranaweera2025_bounds.problem(steps)
    w = softmax_rows.along(made.plan, 1, 3)[0, -1]
    losses, grads, rows = softmax_rows.moments(made.rows, w)
    seen = ranaweera2025_bounds.measure(made, steps, w, np.random.default_rng(0))
    assert seen.squares[0] == pytest.approx((grads.mean(0) ** 2).sum(), rel=1e-12)
    assert seen.gap == pytest.approx(losses.mean() - made.least, rel=1e-12)
    assert (seen.diversity >= 1).all()
    at, rng = np.repeat(w[None], 3, 0), np.random.default_rng(0)
    noisy = np.array([ranaweera2025_bounds._noisy(made, steps, at, rng) for _ in range(2000)])
    spread = ((noisy - grads) ** 2).sum((2, 3)).mean(0)
    want = rows * (1 - steps.batch / steps.rows) / steps.batch + made.known.local_noise_2
    np.testing.assert_allclose(spread, want, rtol=0.05)
    np.testing.assert_allclose(noisy.mean(0), grads, atol=0.02)


@pytest.mark.slow
def test_claims_wait_for_hypotheses():
    told = functools.partial(of_cell, ranaweera2025_bounds)
    cell = ranaweera2025_bounds.against(dataclasses.replace(SGD, deal="alike", rate=1.0), 3)
    assert told(cell) == [HOLDS] * 4
    assert cell["failed"] == [] and cell["constants"]["diversity"] == 1 == cell["bracket"]
    low = cell | dict(theorem3=np.array([0.0, 0.001, 0.002]))
    assert told(low) == [HOLDS, CONTRADICTED, HOLDS, HOLDS]
    beyond = ranaweera2025_bounds.against(dataclasses.replace(SGD, rate=1.0), 3)
    assert beyond["failed"] and beyond["constants"]["diversity"] > 1
    assert set(told(beyond)) == {UNKNOWN}


# --- runs


@pytest.mark.slow
@pytest.mark.parametrize(
    "paper, numbers",
    [(talaei2024, talaei2024_bounds), (ranaweera2025, ranaweera2025_bounds)],
)
def test_quick_runs(paper, numbers, tmp_path, capsys):
    experiment = paper.EXPERIMENTS["bounds"]
    found = runner.run("bounds", experiment, tmp_path, quick=True)
    kept = json.loads((tmp_path / "results.json").read_text())["verdicts"]
    told = {v["claim"]: v["verdict"] for v in found["verdicts"]}
    assert [v["verdict"] for v in kept] == list(told.values())
    assert set(found["runs"]) == set(numbers.QUICK_LINES) <= set(numbers.LINES)
    ours = [
        v for v in found["verdicts"] if v["whose"] == "ours" and "informative" not in v["claim"]
    ]
    assert {HOLDS} <= {v["verdict"] for v in ours} <= {HOLDS, UNKNOWN, UNDECIDED}
    assert all(math.isfinite(c["start"]) and c["start"] > 0 for c in found["runs"].values())
