"""Experiments on Chen et al. 2024: plans of all lines, accountants, and bounds beside runs."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from helpers.lines import verdict

import jfl
from experiments.harness import runner
from experiments.harness.verdicts import (
    CONTRADICTED,
    HOLDS,
    NOT_REPRODUCED,
    UNDECIDED,
    UNKNOWN,
)
from experiments.papers import trajectories
from experiments.papers.chen2024 import bounds as numbers
from experiments.papers.chen2024 import figures as paper
from experiments.papers.chen2024 import plans, runs, theorems, theory
from jfl.runs.config import Config

FIGURE1 = paper.EXPERIMENTS["fig1ab"]
SMALL = dict(
    clients=10, cohort=3, batch=4, steps=2, rounds=4, evaluate_every=1, hidden=(3,), min_rows=20
)


def small(experiment, line, **changes):
    """A line with its data set replaced by digits, and little of everything."""
    fields = experiment.base | experiment.lines[line] | dict(preprocess="none")
    if fields["dataset"] == "synthetic":
        fields["rows_per_client"] = 30
    else:
        fields["dataset"] = "digits"
    return Config(**fields | SMALL | changes)


# --- plans


def test_every_line_is_a_plan_that_traces():
    """One of each kind: other numbers make no other plan, and sound noise is found below."""
    kinds = {}
    for experiment in paper.EXPERIMENTS.values():
        for name in experiment.lines:
            config = small(experiment, name)
            printed = config.epsilon is None or config.mode != "sound"
            kinds.setdefault(("split", config.partition, config.model), config)
            if printed:
                kinds.setdefault(("run", config.algorithm, config.epsilon is None), config)
    assert sum(kind == "split" for kind, *_ in kinds) == len(kinds) / 2 == 6
    for (kind, *_), config in kinds.items():
        if kind == "split":
            assert len(plans.federation(config).size) == 10
        else:
            plan = plans.build(config)
            one_round = lambda key, plan=plan: jfl.scan(jfl.init(key, plan), plan, [1])
            jax.eval_shape(one_round, jax.random.key(0))


def test_fields_that_the_paper_gives():
    fields = lambda base: tuple(base[n] for n in ("hidden", "lr", "batch", "steps") if n in base)
    assert fields(paper.DATA["MNIST"]) == (0.01, 10, 300) and paper.DATA["MNIST"]["l2"] == 2e-3
    assert fields(paper.DATA["CIFAR10"]) == ((1200,), 0.1, 50, 50)
    assert paper.algorithm("AdDPNFL")["server_lr"] == 0.01
    assert paper.algorithm("AdDPNFL", True)["server_lr"] == 0.005
    assert "epsilon" not in paper.algorithm("NonPrivate")
    assert len(paper.TABLE2) == 30 and set(paper.TABLE2) == set(paper.PRINTED_RATES["table2"].lines)
    added = set(paper.EXPERIMENTS["table2"].lines) - set(paper.TABLE2)
    assert added and all(n.startswith(f"{n.split()[0]} NonPrivate, first") for n in added)


def test_rates_sampling_and_weights():
    built = lambda name, figure=FIGURE1: plans.build(small(figure, name))
    rate = lambda plan: plan.algorithm.server.data["step"].lr
    adaptive = built("unbalanced AdDPNFL")
    assert float(rate(adaptive)(3)) == pytest.approx(0.005)  # 0.01 / sqrt(4)
    assert float(rate(built("biased FedAvg", paper.EXPERIMENTS["fig5"]))) == pytest.approx(0.1)
    np.testing.assert_allclose(
        adaptive.weights, adaptive.fed.size / adaptive.fed.size.mean(), rtol=1e-6
    )
    plan = built("unbalanced DPFedAvg")
    np.testing.assert_allclose(plan.weights, 1, rtol=1e-6)  # 1 / r for each draw
    np.testing.assert_allclose(plan.sampler.share, plan.fed.size / plan.fed.size.sum(), rtol=1e-6)
    # noise is by client, and so would a small one count with all of its own
    for line in ("unbalanced DPSCAFFOLD", "balanced DPSCAFFOLD"):
        assert small(FIGURE1, line).weights == "size"


def test_both_versions_of_addpnfl_run():
    grids = {name: paper.EXPERIMENTS[name] for name in ("fig1_grid", "fig1_grid_text")}
    for name, grid in grids.items():
        plan, _ = grid.runs.build(small(grid, "AdDPNFL T=3 G=1"))
        assert ("momentum" in str(jfl.describe(plan))) == (name == "fig1_grid_text")
    base = grids["fig1_grid"].lines["AdDPNFL T=30 G=0.1"]
    assert (base["rounds"], base["clip_norm"], base["epsilon"]) == (30, 0.1, 0.3)
    assert set(grids["fig1_grid"].paper.values()) == {80.59, 84.45}
    assert grids["fig1_grid_text"].lines["AdDPNFL ε=10"]["epsilon"] == 10


@pytest.mark.slow
def test_noise_as_printed_and_sound():
    def worth(line, **changes):
        config = small(FIGURE1, line, **changes)
        return {g["status"]: g["epsilon"] for g in plans.privacy(plans.build(config), config)}

    found = worth("unbalanced DPNFL", rounds=5, steps=20)
    assert found["claimed"] == pytest.approx(0.3, rel=1e-3)
    assert found["proved"] != pytest.approx(0.3, rel=1e-2)
    found = worth("balanced DPNFL, sound", steps=26, clients=2, cohort=1)
    assert 0.28 < found["proved"] <= 0.3 * (1 + 1e-6) and "claimed" not in found
    assert worth("balanced NonPrivate") == {}


def test_dirichlet_is_balanced_and_synthetic_is_of_the_paper():
    of = lambda figure, line: plans.federation(small(paper.EXPERIMENTS[figure], line))
    fed = of("fig4", "Dir(0.1) DPNFL")
    assert np.ptp(np.asarray(fed.size)) <= 1
    y = np.asarray(fed.y)
    held = [np.bincount(y[np.asarray(i)], minlength=10).max() / len(i) for i in fed.index]
    assert np.mean(held) > 0.6  # psi = 0.1: about one class a client
    apart, iid = of("fig3", "Synthetic(5,5) DPNFL"), of("fig3", "Synthetic-IID DPNFL")
    assert apart.x.shape[1] == 60 and np.ptp(np.asarray(apart.size)) > 0
    assert abs(np.asarray(iid.x).mean()) < 0.05 < np.abs(np.asarray(apart.x)).mean()


# --- accountants and bounds


@pytest.mark.slow
def test_accountants(tmp_path):
    experiment = paper.EXPERIMENTS["accountants"]
    found = runner.run("accountants", experiment, tmp_path, quick=True)
    row = found["epsilons"]["MNIST, δ = 0.01"]
    got = [row[k] for k in ("sigma", "tcdp", "rdp_refined", "rdp_crude")]
    np.testing.assert_allclose(got, [6.766, 0.300, 0.052, 0.464], rtol=0.02)
    assert [v["verdict"] for v in found["verdicts"]] == [HOLDS, NOT_REPRODUCED, CONTRADICTED]


OF_BOUNDS = dict(clients=5, per_round=2, steps=2, batch=5, min_rows=40, l2=0.3)


@pytest.mark.slow
def test_bounds_beside_a_run(tmp_path):
    of_digits = functools.partial(numbers.bounds, dataset="digits", epsilon=3.0, **OF_BOUNDS)
    experiment = dataclasses.replace(paper.EXPERIMENTS["bounds"], special=of_digits)
    found = runner.run("bounds", experiment, tmp_path, quick=True)
    for row in found["along"].values():
        assert 0 < row["gap"] < row["Theorem 1, ours"] < row["Theorem 1"]
    assert found["constants"]["smoothness"] > found["constants"]["strong_convexity"] == 0.3
    verdicts = {v["claim"]: v["verdict"] for v in found["verdicts"]}
    assert verdicts["the hypotheses of Theorem 3 hold at usual rates"] == NOT_REPRODUCED
    assert verdicts["Theorem 3 holds"] == UNKNOWN
    for claim in ("Theorem 1", "Theorem 2", "our bound in place of Theorem 2", "Theorem 4"):
        assert verdicts[f"{claim} holds"] == HOLDS
    rows = found["theorems"]
    assert len(rows) == 3 * (2 + 2 + 3)
    assert all((r["fails"] == "none") == (r["run"] != theorems.USUAL_RATES) for r in rows)
    first = [r for r in rows if r["rounds"] == 1 and r["theorem"] != theorems.THREE]
    assert all(r["measured"] == pytest.approx(r["start"], rel=1e-6) for r in first)  # it is w_0


@pytest.mark.slow
def test_objective_and_gradient_are_those_of_the_optimum():
    case = runs.problem("digits", rounds=5, **OF_BOUNDS)
    plan, l2 = case.plan(case.noise), case.known.strong_convexity
    params = jax.tree.map(lambda v: np.asarray(v)[None, None], case.best.params)
    value = trajectories.objective(plan, l2, params)
    np.testing.assert_allclose(value, [[case.best.value]], rtol=1e-7)
    assert trajectories.square_gradient(plan, l2, params)[0, 0] < 1e-10
    zero = jax.tree.map(np.zeros_like, params)  # there all classes are alike
    x, y = np.asarray(plan.fed.x, np.float64), np.eye(10)[np.asarray(plan.fed.y)]
    owned = np.concatenate([np.asarray(i)[:n] for i, n in zip(plan.fed.index, plan.fed.size)])
    each = 0.1 - y[owned]
    wanted = np.sum((x[owned].T @ each / len(owned)) ** 2) + np.sum(each.mean(0) ** 2)
    assert trajectories.square_gradient(plan, l2, zero)[0, 0] == pytest.approx(wanted, rel=1e-5)


KNOWN = theory.Constants(50, 10, 10, 0.9, 2.5, 100.0, 0.05, 0.05, 0.2, 0.3, 212)


def test_learning_rates_are_just_those_that_theorems_allow():
    fails = lambda theorem, lr: theorems.bound(theorem, KNOWN, 10, lr, 0.2, 1.0)[1]
    for theorem, allowed in (
        (theorems.TWO, theorems.allowed2(KNOWN)),
        (theorems.FOUR, theorems.allowed4(KNOWN)),
    ):
        assert fails(theorem, allowed) == () and len(fails(theorem, 1.02 * allowed)) == 1
    assert len(fails(theorems.THREE, theorems.USUAL)) == 3
    assert fails(theorems.TWO_OURS, 1.0) == ()


def a_row(theorem, value, bound=1.0, run=theorems.DPNFL, failed=()):
    values = np.array([value - 1e-3, value, value + 1e-3])
    return theorems.Row(theorem, run, theorems.NOISE, 10, values, 0.5, bound, failed)


def test_theorems_are_judged_where_their_hypotheses_hold():
    of = lambda *rows: verdict(theorems.is_above(rows), {})
    two = lambda value, **more: a_row(theorems.TWO, value, **more)
    assert of(two(0.5), two(0.9)) == HOLDS and of(two(0.5), two(1.1)) == CONTRADICTED
    assert of(two(1.0)) == UNDECIDED
    assert of(two(0.5), two(1.1, failed=("lr",))) == HOLDS
    assert of(two(1.1, failed=("lr",))) == UNKNOWN
