"""Experiments on Chen et al. 2024: plans of all lines, a run, the checks on made-up results,
accountants and bounds."""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest
from helpers import pretended

import jfl
from experiments.harness import runner
from experiments.harness.runner import Line
from experiments.harness.verdicts import (
    CONTRADICTED,
    HOLDS,
    NOT_REPRODUCED,
    UNDECIDED,
    UNKNOWN,
    Claim,
    judge,
)
from experiments.papers import trajectories
from experiments.papers.chen2024 import bounds as numbers
from experiments.papers.chen2024 import figures as paper
from experiments.papers.chen2024 import plans, runs, theorems, theory
from jfl.runs import sweep
from jfl.runs.config import Config

SMALL = dict(
    clients=10, cohort=3, batch=4, steps=2, rounds=4, evaluate_every=1, hidden=(3,), min_rows=20
)
PLACES = dict(mnist="digits", fashion_mnist="digits", svhn="digits", cifar10="digits")


def small(experiment, line):
    """A line with its data set replaced by digits, and little of everything."""
    fields = dict(experiment.base) | experiment.lines[line]
    data = dict(dataset=PLACES.get(fields["dataset"], fields["dataset"]), preprocess="none")
    if fields["dataset"] == "synthetic":
        data["rows_per_client"] = 30
    return Config(**fields | SMALL | data)


def worth(plan, config):
    return {g["status"]: g["epsilon"] for g in plans.privacy(plan, config)}


def line(*accuracy, curve=(0, 0, 0, 0)):
    values = np.array(accuracy, float)
    return Line(
        values, values, None, None, 0.1, dict(curve=np.array([curve] * len(accuracy), float))
    )


# --- plans


def test_every_line_is_a_plan_that_traces():
    deals, traced = set(), set()
    for experiment in paper.EXPERIMENTS.values():
        for name in experiment.lines:
            config = Config(**{**experiment.base, **experiment.lines[name], **experiment.quick})
            assert config.rounds == 3
            config = small(experiment, name)
            # one of each kind: other numbers make no other plan, and sound ones are built below
            deal, kind = (
                (config.partition, config.model),
                (config.algorithm, config.epsilon is None),
            )
            if (
                deal in deals
                and kind in traced
                or (config.epsilon is not None and config.mode == "sound")
            ):
                continue
            plan = plans.build(config)
            deals.add(deal)
            if kind not in traced:
                traced.add(kind)
                jax.eval_shape(
                    lambda key, plan=plan: jfl.scan(jfl.init(key, plan), plan, [1]),
                    jax.random.key(0),
                )
    assert len(deals) == 6 and len(traced) == 6


@pytest.mark.slow
@pytest.mark.skipif(
    "JFL_DATA_DIR" not in os.environ, reason="lines NOT built on real MNIST: set JFL_DATA_DIR"
)
def test_settings_of_the_paper_on_mnist():
    figure = paper.EXPERIMENTS["fig1ab"]
    config = Config(**figure.base | figure.lines["balanced DPNFL"])
    plan = plans.build(config)
    (release,) = plan.algorithm.releases
    assert np.all(np.asarray(plan.fed.size) == 600) and plan.sampler.capacity == 10
    assert (release.count, release.batches.batch) == (300, 10)
    sigma = np.asarray(release.mechanism.stages[-2].noise) * 2 / 10
    np.testing.assert_allclose(sigma, 6.7660, rtol=1e-4)  # of the spec: G = 1, K = 10, q = 1/60
    config = Config(**figure.base | figure.lines["unbalanced DPNFL"])
    sizes = np.asarray(plans.build(config).fed.size)
    assert 100 <= sizes.min() < 120 and sizes.max() > 5000 and sizes.sum() == 60000


def test_fields_that_the_paper_gives():
    base = paper.DATA["MNIST"]
    assert (base["l2"], base["lr"], base["batch"], base["steps"]) == (2e-3, 0.01, 10, 300)
    deep = paper.DATA["CIFAR10"]
    assert (deep["hidden"], deep["lr"], deep["batch"], deep["steps"]) == ((1200,), 0.1, 50, 50)
    assert (
        paper.algorithm("AdDPNFL")["server_lr"] == 0.01
        and paper.algorithm("AdDPNFL", True)["server_lr"] == 0.005
    )
    assert "epsilon" not in paper.algorithm("NonPrivate")
    assert set(paper.EXPERIMENTS["fig1ab"].paper) < set(paper.EXPERIMENTS["fig1ab"].lines)
    assert len(paper.PRINTED_RATES["table2"].lines) == 30 == len(paper.TABLE2)
    assert set(paper.TABLE2) == set(paper.PRINTED_RATES["table2"].lines)
    added = set(paper.EXPERIMENTS["table2"].lines) - set(paper.TABLE2)
    assert added and all(n.startswith(f"{n.split()[0]} NonPrivate, first") for n in added)


def test_rates_sampling_and_weights():
    figure = paper.EXPERIMENTS["fig1ab"]
    rates = lambda n, t: float(
        np.asarray(plans.build(small(figure, n)).algorithm.server.data["step"].lr(t))
    )
    assert rates("unbalanced AdDPNFL", 3) == pytest.approx(0.005)  # 0.01 / sqrt(4)
    constant = plans.build(small(figure, "unbalanced DPNFL")).algorithm.server.data["step"].lr
    assert float(constant) == 1.0
    plan = plans.build(small(figure, "unbalanced DPFedAvg"))
    np.testing.assert_allclose(plan.weights, 1, rtol=1e-6)  # 1 / r for each draw
    np.testing.assert_allclose(plan.sampler.share, plan.fed.size / plan.fed.size.sum(), rtol=1e-6)
    plan = plans.build(small(figure, "unbalanced AdDPNFL"))
    np.testing.assert_allclose(plan.weights, plan.fed.size / plan.fed.size.mean(), rtol=1e-6)
    figure = paper.EXPERIMENTS["fig5"]
    assert float(
        plans.build(small(figure, "biased FedAvg")).algorithm.server.data["step"].lr
    ) == pytest.approx(0.1)


@pytest.mark.slow
def test_noise_as_printed_and_sound():
    figure = paper.EXPERIMENTS["fig1ab"]
    config = dataclasses.replace(small(figure, "unbalanced DPNFL"), rounds=5, steps=20)
    found = worth(plans.build(config), config)
    assert found["claimed"] == pytest.approx(0.3, rel=1e-3) and found["proved"] != pytest.approx(
        0.3, rel=1e-2
    )
    config = dataclasses.replace(
        small(figure, "balanced DPNFL, sound"), steps=26, clients=2, cohort=1
    )
    found = worth(plans.build(config), config)
    assert 0.28 < found["proved"] <= 0.3 * (1 + 1e-6) and "claimed" not in found
    assert (
        worth(
            plans.build(small(figure, "balanced NonPrivate")), small(figure, "balanced NonPrivate")
        )
        == {}
    )


def test_dirichlet_is_balanced_and_synthetic_is_of_the_paper():
    fed = plans.federation(small(paper.EXPERIMENTS["fig4"], "Dir(0.1) DPNFL"))
    assert np.ptp(np.asarray(fed.size)) <= 1
    held = [
        np.bincount(np.asarray(fed.y)[np.asarray(i)], minlength=10).max() / len(i)
        for i in fed.index
    ]
    assert np.mean(held) > 0.6  # psi = 0.1: about one class a client
    config = small(paper.EXPERIMENTS["fig3"], "Synthetic(5,5) DPNFL")
    fed = plans.federation(config)
    assert fed.x.shape[1] == 60 and np.ptp(np.asarray(fed.size)) > 0
    iid = plans.federation(small(paper.EXPERIMENTS["fig3"], "Synthetic-IID DPNFL"))
    assert abs(np.asarray(iid.x).mean()) < 0.05 < np.abs(np.asarray(fed.x)).mean()


# --- runs


@pytest.mark.by_default("accounted")
@pytest.mark.parametrize("trained", [False, True], ids=["accounted", "trained"])
def test_a_run_of_lines(trained, tmp_path, capsys, monkeypatch):
    if not trained:
        monkeypatch.setattr(sweep, "compute", pretended.compute)
    figure = paper.EXPERIMENTS["fig1ab"]
    name = "balanced AdDPNFL"
    lines = {name: dataclasses.asdict(small(figure, name))}
    lines["absent"] = dict(lines[name], dataset="cifar10")
    tiny = dataclasses.replace(figure, base={}, lines=lines, seeds=(0, 1))
    found = runner.run("tiny", tiny, tmp_path)
    assert (
        set(found["lines"]) == {name}
        and "absent: not run.  datasets.cifar10" in capsys.readouterr().err
    )
    one = found["lines"][name]
    assert len(one["accuracy"]) == 2 and one["epsilon_claimed"] > 0 and one["epsilon_proved"] >= 0
    entries = json.loads((tmp_path / "balanced_AdDPNFL" / "summary.json").read_text())["runs"]
    assert [len(e["trace"]["curve"]) for e in entries] == [4, 4]
    assert entries[0]["trace"]["curve"][-1] == entries[0]["accuracy"]["final"]
    seen = {v["claim"]: v["verdict"] for v in found["verdicts"]}
    assert seen["balanced: AdDPNFL > DPNFL"] == UNKNOWN


def test_list(capsys):
    assert runner.main("chen2024", paper.EXPERIMENTS, ["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in paper.EXPERIMENTS)
    assert runner.main("chen2024", paper.EXPERIMENTS, ["fig1ab", "--list"]) == 0
    assert "unbalanced DPSCAFFOLD" in capsys.readouterr().out.splitlines()


# --- claims


def near(value, **trace):
    return line(value - 1e-4, value, value + 1e-4, **trace)


def verdict(check, results):
    return judge(Claim("it is so", check), results, 1, "ours")[0]


def lines(**means):
    return {n.replace("_", " "): near(m) for n, m in means.items()}


def curves(*rows):
    return {n: line(0.5, 0.5, 0.5, curve=row) for n, row in zip("ab", rows)}


@pytest.mark.parametrize(
    "check, good, bad",
    [
        (paper.changes("a", "b", 1), lines(a=0.5, b=0.6), lines(a=0.5, b=0.4)),
        (paper.changes("a", "b", -1), lines(a=0.6, b=0.5), lines(a=0.5, b=0.6)),
        (paper.keeps("a", "b"), lines(a=0.5, b=0.49), lines(a=0.5, b=0.4)),
        (paper.flat("a", "b"), lines(a=0.5, b=0.51), lines(a=0.5, b=0.6)),
        (
            paper.rougher("a", "b"),
            curves((0.9, 0.1, 0.5, 0.3), (0.1, 0.9, 0.5, 0.51)),
            curves((0.9, 0.1, 0.5, 0.505), (0.5, 0.5, 0.5, 0.51)),
        ),
        (
            paper.lead("a", ("b", "c"), "1", "2"),
            lines(a_1=0.6, b_1=0.4, c_1=0.3, a_2=0.7, b_2=0.6, c_2=0.69),
            lines(a_1=0.6, b_1=0.4, c_1=0.59, a_2=0.7, b_2=0.6, c_2=0.5),
        ),
        (
            paper.lead("a", ("b",), "1", "2"),
            lines(a_1=0.6, b_1=0.5, a_2=0.7, b_2=0.9),
            lines(a_1=0.5, b_1=0.6, a_2=0.7, b_2=0.9),
        ),  # behind both times, if less
    ],
)
def test_checks_hold_and_fail(check, good, bad):
    assert verdict(check, good) == HOLDS and verdict(check, bad) == NOT_REPRODUCED
    assert verdict(check, {}) == UNKNOWN


def test_seeds_that_differ_decide_nothing():
    noisy = dict(a=line(0.5, 0.5, 0.5), b=line(0.4, 0.9, 0.1))
    assert verdict(paper.changes("a", "b", 1), noisy) == UNDECIDED


def test_claims_on_the_papers_own_figures():
    """The figures that the paper prints bear out its ranking; turned round they do not."""
    experiment = paper.EXPERIMENTS["fig1ab"]
    shown = {n: near(v) for n, v in experiment.paper.items()}
    turned = dict(zip(shown, reversed(shown.values())))
    claims = [c for c in experiment.claims if c.text.startswith("balanced")]
    assert len(claims) == 4 and all(verdict(c.check, shown) == HOLDS for c in claims)
    assert any(verdict(c.check, turned) == NOT_REPRODUCED for c in claims)
    printed = {n: near(float(v.split(" ")[0])) for n, v in paper.TABLE2.items()}
    assert all(
        verdict(c.check, printed) == HOLDS
        for c in paper.FIGURE3
        if "rises" in c.text or "falls" in c.text
    )


def test_statements_that_a_table_repeats_count_once():
    count = lambda *names: len(
        {c.statement or f"{n}: {c.text}" for n in names for c in paper.EXPERIMENTS[n].claims}
    )
    assert count("fig3", "fig4", "table2") == count("table2") == 27
    # another data set in place of a missing one is no check of the same statement
    assert count("fig4", "dirichlet_mnist") == 26


def test_dpscaffold_weighs_clients_by_size():
    """Noise is by client, and so would a small one count with all of its own."""
    for name in ("unbalanced DPSCAFFOLD", "balanced DPSCAFFOLD"):
        experiment = paper.EXPERIMENTS["fig1ab"]
        assert Config(**{**experiment.base, **experiment.lines[name]}).weights == "size"


# --- accountants and bounds


@pytest.mark.slow
def test_accountants(tmp_path):
    found = numbers.accountants(
        "accountants", paper.EXPERIMENTS["accountants"], tmp_path, quick=True
    )
    row = found["epsilons"]["MNIST, δ = 0.01"]
    np.testing.assert_allclose(
        [row[k] for k in ("sigma", "tcdp", "rdp_refined", "rdp_crude")],
        [6.766, 0.300, 0.052, 0.464],
        rtol=0.02,
    )
    assert [v["verdict"] for v in found["verdicts"]] == [HOLDS, NOT_REPRODUCED, CONTRADICTED]


@pytest.mark.slow
def test_bounds_beside_a_run(tmp_path):
    experiment = paper.EXPERIMENTS["bounds"]
    found = numbers.bounds(
        "bounds",
        experiment,
        tmp_path,
        quick=True,
        dataset="digits",
        clients=5,
        per_round=2,
        steps=2,
        batch=5,
        min_rows=40,
        l2=0.3,
        epsilon=3.0,
    )
    kept = json.loads((tmp_path / "results.json").read_text())["verdicts"]
    told = [{k: v[k] for k in ("claim", "verdict", "seen")} for v in found["verdicts"]]
    assert [{k: v[k] for k in ("claim", "verdict", "seen")} for v in kept] == told
    for row in found["along"].values():
        assert 0 < row["gap"] < row["Theorem 1, ours"] < row["Theorem 1"]
    assert found["constants"]["smoothness"] > found["constants"]["strong_convexity"] == 0.3
    verdicts = {v["claim"]: v["verdict"] for v in found["verdicts"]}
    assert verdicts["Theorem 1 holds"] == HOLDS
    assert verdicts["the hypotheses of Theorem 3 hold at usual rates"] == NOT_REPRODUCED
    assert verdicts["Theorem 3 holds"] == UNKNOWN and verdicts["Theorem 4 holds"] == HOLDS
    assert verdicts["Theorem 2 holds"] == verdicts["our bound in place of Theorem 2 holds"] == HOLDS
    rows = found["theorems"]
    assert len(rows) == 3 * (2 + 2 + 3) and {r["noise"] for r in rows} == {"noise"}
    assert all(r["fails"] == "none" for r in rows if r["run"] != theorems.USUAL_RATES)
    assert all(r["fails"] != "none" for r in rows if r["run"] == theorems.USUAL_RATES)
    first = [r for r in rows if r["rounds"] == 1 and r["theorem"] != theorems.THREE]
    assert all(r["measured"] == pytest.approx(r["start"], rel=1e-6) for r in first)  # it is w_0


@pytest.mark.slow
def test_objective_and_gradient_are_those_of_the_optimum():
    case = runs.problem(
        "digits", clients=5, per_round=2, steps=2, batch=5, min_rows=40, l2=0.3, rounds=5
    )
    plan, l2 = case.plan(case.noise), case.known.strong_convexity
    params = jax.tree.map(lambda v: np.asarray(v)[None, None], case.best.params)
    np.testing.assert_allclose(
        trajectories.objective(plan, l2, params), [[case.best.value]], rtol=1e-7
    )
    assert trajectories.square_gradient(plan, l2, params)[0, 0] < 1e-10
    # at 0 all classes are alike
    zero = jax.tree.map(np.zeros_like, params)
    x, y = np.asarray(plan.fed.x, np.float64), np.eye(10)[np.asarray(plan.fed.y)]
    owned = np.concatenate([np.asarray(i)[:n] for i, n in zip(plan.fed.index, plan.fed.size)])
    each = 0.1 - y[owned]
    wanted = np.sum((x[owned].T @ each / len(owned)) ** 2) + np.sum(each.mean(0) ** 2)
    assert trajectories.square_gradient(plan, l2, zero)[0, 0] == pytest.approx(wanted, rel=1e-5)


# --- theorems beside runs

KNOWN = theory.Constants(50, 10, 10, 0.9, 2.5, 100.0, 0.05, 0.05, 0.2, 0.3, 1.7, 212)


def test_learning_rates_are_just_those_that_theorems_allow():
    two, four = theorems.allowed2(KNOWN), theorems.allowed4(KNOWN)
    for theorem, lr in ((theorems.TWO, two), (theorems.FOUR, four)):
        fails = lambda lr, theorem=theorem: theorems.bound(theorem, KNOWN, 10, lr, 0.2, 1.0)[1]
        assert fails(lr) == () and len(fails(1.02 * lr)) == 1
    failed = theorems.bound(theorems.THREE, KNOWN, 10, theorems.USUAL, 0.2, 1.0)[1]
    assert len(failed) == 3
    assert theorems.bound(theorems.TWO_OURS, KNOWN, 10, 1.0, 0.2, 1.0)[1] == ()


def a_row(theorem, value, bound=1.0, start=0.5, run=theorems.DPNFL, failed=()):
    values = np.array([value - 1e-3, value, value + 1e-3])
    return theorems.Row(theorem, run, theorems.NOISE, 10, values, start, bound, failed)


def test_theorems_are_judged_where_their_hypotheses_hold():
    of = lambda *rows: verdict(theorems.is_above(rows), {})
    two = lambda value, **more: a_row(theorems.TWO, value, **more)
    assert of(two(0.5), two(0.9)) == HOLDS and of(two(0.5), two(1.1)) == CONTRADICTED
    assert of(two(1.0)) == UNDECIDED
    assert of(two(0.5), two(1.1, failed=("lr",))) == HOLDS
    assert of(two(1.1, failed=("lr",))) == UNKNOWN


def test_claims_on_theorems_2_to_4():
    rows = [
        a_row(theorems.TWO, 0.4),
        a_row(theorems.TWO_OURS, 0.4, bound=0.45),
        a_row(theorems.THREE, 0.4, run=theorems.USUAL_RATES, failed=("a", "b", "c")),
        a_row(theorems.FOUR, 0.4, run=theorems.ALLOWED_RATES),
        a_row(theorems.FOUR, 4.0, run=theorems.USUAL_RATES, failed=("d",)),
    ]
    claims = {c.text: c for c in theorems.claims_of(rows, KNOWN)}
    told = {n: judge(c, {}, 1, "ours") for n, c in claims.items()}
    assert [n for n, c in claims.items() if c.whose == "paper"] == [
        "Theorem 2 holds",
        "Theorem 3 holds",
        "Theorem 4 holds",
    ]
    assert "vacuous" in told["Theorem 2 holds"][1]
    assert told["Theorem 2 holds"][0] == told["our bound in place of Theorem 2 holds"][0] == HOLDS
    assert told["Theorem 2, ours is below |∇F|² of the start"][0] == HOLDS
    verdict_, seen = told["Theorem 2 is below |∇F|² of the start"]
    assert verdict_ == NOT_REPRODUCED and "vacuous" in seen
    verdict_, seen = told["Theorem 3 holds"]
    assert (
        verdict_ == UNKNOWN
        and "no learning rates meet its hypotheses" in seen
        and "9.26e+05 <= beta2^1.5" in seen
    )
    assert told["the hypotheses of Theorem 3 hold at usual rates"][0] == NOT_REPRODUCED
    assert told["Theorem 4 holds"][0] == HOLDS
    below = [row if row.theorem != theorems.FOUR else row._replace(bound=0.1) for row in rows]
    (four,) = (c for c in theorems.claims_of(below, KNOWN) if c.text == "Theorem 4 holds")
    found, seen = judge(four, {}, 1, "")  # an order: a larger constant may be meant
    assert found == UNKNOWN and "would have to be 4 or more" in seen
