"""The studies: cells that are plans, noise that reaches its epsilon, claims that can fail, and a
study that goes on where it stopped; and the command that results name."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import pretended
from helpers.paths import ROOT

from experiments.harness import pictures, results, runner
from experiments.harness import programs as harness_programs
from experiments.harness.runner import CONFIRMED, NOT, UNKNOWN, Claim, Experiment
from experiments.papers import as_printed
from experiments.studies import recipes
from experiments.studies import study as studies
from experiments.studies.messages import MESSAGES
from experiments.studies.plans import PLANS, audit, checks, claimed
from experiments.studies.plans.cells import NAMES, NONE, PAPERS, Cell, Study
from jfl import algorithms
from jfl.algorithms.base import traits_of
from jfl.core.errors import DataUnavailable
from jfl.core.files import ResultStore
from jfl.privacy import guarantees
from jfl.privacy.accountants import tightest
from jfl.runs import build as assemble
from jfl.runs import sweep
from jfl.runs.config import FIELDS, Config, refuse_unused

TINY = dict(
    dataset="digits", partition="iid", clients=4, model="logistic", batch=16, steps=1, rounds=2
)
NOISY = TINY | dict(unit="client", view="third_party", epsilon=20.0)
CELLS = (
    Cell("a", "FedAvg", 20.0, NOISY, ({"lr": 0.05}, {"lr": 0.5})),
    Cell("a", "FedAvg, no noise", None, TINY, ({"lr": 0.5},)),
)
UNTRAINED = ("claimed", "audit")
LONG = ("correlated", "fashion", "promises", "text")  # to build
# algorithms that papers compare with are audited in tests/auditing/test_matrix.py
AUDITED_ELSEWHERE = {"dicesgd", "ditto", "fedbuff", "feddyn", "fednova", "fedper", "fedrep"}
AUDITED_ELSEWHERE |= {"fedsam", "mimelite", "pfedme", "qfedavg"}


def tiny(cells=CELLS, **more):
    return Study("tiny", "ε", cells, seeds=(0, 1), tune=(7,), **more)


def row(*values):
    return dict(values=dict(enumerate(values)))


# --- plans


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] if n in LONG else [])
        for n in PLANS
        if n not in UNTRAINED
    ],
)
def test_cells_of_a_quick_study_are_plans(name):
    study = PLANS[name](True)
    for cell in study.cells:
        for point in cell.grid:
            assert set(cell.fields) | set(point) <= {*FIELDS, "recipe"}
        config = studies.config_of(cell.fields)
        refuse_unused(config)
        private = config.epsilon is not None or config.noise_multiplier is not None
        assert private != cell.line.endswith(NONE)
        if isinstance(config, recipes.Made):
            one = dataclasses.replace(config, noise=(1.0,) * 2)
        else:
            noise = 1.0 if private else None
            one = dataclasses.replace(config, epsilon=None, noise_multiplier=noise)
        try:
            assert studies.plan_of(one).sampler.clients == config.clients
        except DataUnavailable:
            assert name in ("fashion", "text", "customers")  # of all others nothing is to prepare


@pytest.mark.parametrize("name", PLANS)
def test_full_studies_compare_equal_promises(name):
    study = PLANS[name](False)
    fewest = 0 if name in UNTRAINED else 3 if name in ("anchors", "customers") else 5
    assert study.claims and len(study.seeds) >= fewest
    for each in (study, PLANS[name](True)):
        assert len({(c.panel, c.line, c.x) for c in each.cells}) == len(each.cells)
        assert not set(each.seeds) & set(each.tune)
    for cell in study.cells:
        config = studies.config_of(cell.fields | cell.grid[0])
        if name != "claimed":
            refuse_unused(config)
        if config.unit == "example" and name not in UNTRAINED:
            # one multiplier is right for all clients
            solved = cell.fields.get("recipe") == "prox_erm"  # with all rows
            assert config.partition in ("iid", "natural", "labels")
            drawn = "poisson" if name == "anchors" else "full" if solved else "without_replacement"
            assert config.batch_sampler == drawn
    if name == "frontier":
        assert {c.fields["dataset"] for c in study.cells} == {"mnist", "synthetic", "adult"}
        assert {c.fields["algorithm"] for c in study.cells} == set(NAMES) - {"automatic"}
    if name in ("frontier", "heterogeneity"):
        for panel in {c.panel for c in study.cells}:
            noisy = [c.fields for c in study.cells if c.panel == panel and "epsilon" in c.fields]
            assert len({(f["unit"], f["view"], f["rounds"], f["batch"]) for f in noisy}) == 1


# --- noise


def test_noise_reaches_the_target_and_not_much_less(tmp_path):
    store = ResultStore(tmp_path / "cells.jsonl")
    for changes in (
        dict(),
        dict(algorithm="scaffold", lr=0.1),
        dict(algorithm="padpfl", upload="difference"),
    ):
        config, worth = studies.with_noise(store, Config(**NOISY | changes), (0, 1))
        assert config.epsilon is None and 0.97 * 20 <= worth["epsilon"] <= 20 * (1 + 1e-5)
        again = guarantees.guarantee(assemble.build(config)[0], 2, 1e-5, "client", "third_party")
        assert again.epsilon == pytest.approx(worth["epsilon"], rel=1e-6)
    kinds = [r for r in store.records.values() if "z" in r]
    assert len(kinds) == 2  # fedavg and scaffold release alike, padpfl does not
    kinds[0]["z"] *= 0.9
    with pytest.raises(ValueError, match="equally many rows"):
        studies.with_noise(store, Config(**NOISY | dict(mu=0.3, algorithm="fedprox")), (0, 1))


def test_the_worst_split_is_told(monkeypatch):
    """Splits of equal sizes are one."""
    sizes, asked = {0: (5, 5), 1: (5, 5), 2: (4, 6), 3: (6, 4)}, []
    fed = lambda config: SimpleNamespace(size=np.array(sizes[config.partition_seed]))
    monkeypatch.setattr(studies, "plan_of", lambda config: SimpleNamespace(fed=fed(config)))

    def proved(config, plan):
        asked.append(plan)
        epsilon = float(10 - min(plan.fed.size))
        return guarantees.Guarantee(epsilon, 1e-5, "example", "replace_one", "server", "pld")

    monkeypatch.setattr(studies, "proved", proved)
    config = Config(unit="example", noise_multiplier=1.0)
    assert studies._worst(config, tuple(sizes))["epsilon"] == 6 and len(asked) == 2


# --- a study


def untrained(make, *, points, **how):
    """What a sweep gives, without a program: accuracies that follow from rates and seeds."""
    rates = [float(make(p["run"]).algorithm.client.data["work"].lr) for p in points]
    seen = np.array([[0.5 + 0.1 * r + 0.01 * p["seed"]] for r, p in zip(rates, points)])
    metrics = SimpleNamespace(accuracy=seen, loss=1 - seen)
    return SimpleNamespace(metrics=metrics, failed=[False] * len(points))


@pytest.mark.by_default("accounted")
@pytest.mark.parametrize("trained", [False, True], ids=["accounted", "trained"])
def test_a_study_from_end_to_end_goes_on_where_it_stopped(trained, tmp_path, monkeypatch, capsys):
    # seconds of loss distributions
    monkeypatch.setattr(tightest, "has_loss_distribution", lambda *args: False)
    gone = Cell("b", "FedAvg", 1.0, TINY | dict(dataset="svhn"))  # which no other test reads
    better = checks.above((("a", "FedAvg, no noise", None), ("a", "FedAvg", 20.0)))
    study = tiny((CELLS[0], gone), claims=(Claim("noise costs", better),))
    monkeypatch.setitem(studies.PLANS, "tiny", lambda quick: study)
    monkeypatch.setenv("JFL_DATA_DIR", str(tmp_path / "nothing"))
    monkeypatch.setenv("HOME", str(tmp_path))
    ran, real = [], studies.run_points if trained else untrained
    watched = lambda *a, points, **k: ran.append(len(points)) or real(*a, points=points, **k)
    monkeypatch.setattr(studies, "run_points", watched)
    experiment, out = studies._experiment("tiny"), tmp_path / "out"
    run = lambda: runner.run("tiny", experiment, out, True, module="studies")
    found = run()
    told = capsys.readouterr()
    assert "SKIPPED: svhn" in told.out and "SKIPPED: svhn" in told.err
    assert "datasets.svhn" in found["unread"]["svhn"]
    assert ran == [2, 2]  # to choose, and to report
    (noisy,) = found["points"]
    assert noisy["epsilon"] <= 20 * (1 + 1e-5) and noisy["target"] == 20 and noisy["delta"] == 1e-5
    assert [p["lr"] for p in noisy["grid"]] == [0.05, 0.5] and noisy["tuned_on"] == [7]
    assert noisy["chosen"] == {"lr": max(noisy["grid"], key=lambda p: p["accuracy"])["lr"]}
    assert noisy["mean"] == pytest.approx(np.mean(list(noisy["values"].values())))
    assert found["verdicts"][0]["verdict"] == UNKNOWN  # what it compares with was not run
    assert (out / "tiny.png").stat().st_size > 5_000
    stored = results.read(out / "results.json")
    (point,) = stored.points
    assert (point.epsilon, point.panel, stored.xlabel) == (noisy["epsilon"], "a", "ε")
    assert stored.config == noisy["config"]  # which all points share: there is one

    ran.clear()  # all is there: nothing runs, and the rows are the same
    monkeypatch.setattr(studies, "_worst", None)  # nor is anything accounted
    assert run()["points"] == found["points"] and not ran
    lines = (out / "cells.jsonl").read_text().splitlines(keepends=True)
    # killed while it wrote the last two
    (out / "cells.jsonl").write_text("".join(lines[:-2]) + lines[-2][:20])
    again = run()
    assert ran == [2] and again["points"][0]["mean"] == pytest.approx(noisy["mean"], abs=1e-6)


def test_a_result_belongs_to_its_config():
    """And to all else that `kept_runs.about` holds: rows, code and settings."""
    base = Config(**TINY)
    others = (dataclasses.replace(base, lr=0.31), dataclasses.replace(base, seed=1))
    keys = {studies.key("run", c) for c in (base, *others)}
    assert len(keys | {studies.key("noise", base)}) == 4
    assert studies.key("run", Config(**TINY)) in keys
    with jax.enable_x64(True):
        assert studies.key("run", base) not in keys  # other draws


def test_a_failed_run_is_not_chosen_and_not_averaged(tmp_path, monkeypatch):
    study, store = tiny(), ResultStore(tmp_path / "cells.jsonl")

    def measure(store, wanted, note=None):
        for c in wanted:
            fails = c.lr == 0.5 and c.seed == 7 and c.noise_multiplier is not None
            fails |= (c.seed, c.lr) == (1, 0.05)
            accuracy = 0.9 if c.lr == 0.5 else 0.8
            store.put([dict(key=studies.key("run", c), accuracy=accuracy, failed=fails)])

    monkeypatch.setattr(studies, "measure", measure)
    noisy, plain = studies.trained(store, study.cells, study, None)
    assert noisy["chosen"] == {"lr": 0.05} and noisy["failed"] == 1 and list(noisy["values"]) == [0]
    assert noisy["half"] is None and plain["values"] == {0: 0.9, 1: 0.9}


# --- the command that made results


def test_results_say_which_command_made_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "compute", pretended.compute)
    monkeypatch.setattr(harness_programs, "trace_once", lambda *_: None)
    experiments = dict(
        alone=Experiment("special", {}, {}, special=lambda *_: {}),
        lines=Experiment("of lines", TINY, {"one": {}, "the other": {}}),
    )
    args = ["lines", "--quick", "--lines", "the other", "--out", str(tmp_path / "out")]
    assert runner.main("some2025", experiments, args) == 0
    found = results.read(tmp_path / "out" / "results.json")
    assert (found.title, found.module, found.name) == ("of lines", "some2025", "lines")
    assert found.quick and found.only == ["the other"]
    for name, told in (
        ("alone", "expected no --lines, as it runs as a whole, but got a"),
        ("lines", "expected lines of one, the other, but got a"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {told}"):
            arguments = [name, "--lines", "a", "--out", str(tmp_path / "refused")]
            runner.main("some2025", experiments, arguments)


# --- claims


def test_claims_fail_when_the_numbers_are_turned_around():
    high, low = row(0.90, 0.91, 0.92), row(0.80, 0.815, 0.818)
    rows, turned = {"one": high, "two": low}, {"one": low, "two": high}
    above = checks.above(("one", "two"))
    assert above(rows)[0] == CONFIRMED and above(turned)[0] == NOT
    assert above({"one": high})[0] == UNKNOWN
    assert above({"one": row(0.9), "two": row(0.8)})[0] == UNKNOWN  # one seed
    assert checks.above(("one", "two"), ("two", "one"))(rows)[0] == NOT
    assert checks.above(("one", "two"), ("one", "gone"))(rows)[0] == UNKNOWN
    # above on average, but not surely
    wide = {"one": row(0.9, 0.7, 0.9), "two": row(0.8, 0.8, 0.7)}
    assert above(wide)[0] == NOT
    near = checks.within(0.02, ("one", "two"))
    assert near({"one": high, "two": row(0.901, 0.909, 0.921)})[0] == CONFIRMED
    assert near(rows)[0] == near(turned)[0] == near(wide)[0] == NOT
    mean, half = checks.gap({"a": row(1.0, 2.0, 3.0), "b": row(0.0, 1.0, 2.5)}, "a", "b")
    assert mean == pytest.approx(5 / 6)  # of paired differences
    assert half == pytest.approx(4.302653 * np.std([1, 1, 0.5], ddof=1) / 3**0.5)


def test_claims_of_epsilons():
    covers = claimed.covers("p")
    of = lambda *pairs: covers(
        {("a", "p", i): dict(claimed=c, epsilon=e) for i, (c, e) in enumerate(pairs)}
    )
    assert of((4.0, 3.0), (16.0, 16.0))[0] == CONFIRMED
    assert of((4.0, 3.0), (16.0, 17.0))[0] == of((4.0, None))[0] == NOT
    assert of()[0] == UNKNOWN


def test_what_a_paper_claims_stands_beside_what_is_proved(tmp_path):
    cell = [c for c in PLANS["claimed"](True).cells if c.line == PAPERS["talaei2024"]][:1]
    study, store = Study("claimed", "claimed ε", tuple(cell), y="epsilon"), tmp_path / "cells.jsonl"
    (found,) = studies.accounted(ResultStore(store), cell, study, lambda text: None)
    assert found["x"] == found["claimed"] == pytest.approx(cell[0].x, rel=1e-4)
    assert found["epsilon"] > 10 * found["claimed"] and found["view"] == "third_party"
    assert claimed.covers("p")({("", "p", 4.0): found})[0] == NOT


@pytest.mark.slow
def test_the_stored_claims_are_those_of_todays_accountants(tmp_path):
    """An earlier version proved more: no stored epsilon is called proved that is not proved now."""
    study, store = PLANS["claimed"](False), tmp_path / "cells.jsonl"
    found = studies.accounted(ResultStore(store), study.cells, study, lambda text: None)
    told = json.loads((ROOT / "experiments" / "results" / "study_claimed.json").read_text())
    stored = {(p["line"], round(p["stated"], 6)): p.get("epsilon") for p in told["points"]}
    assert len(found) == len(stored)
    for cell, row in zip(study.cells, found, strict=True):
        kept = stored[cell.line, round(cell.x, 6)]
        assert (kept is None) == (row["mean"] is None)
        assert kept is None or kept == pytest.approx(row["mean"], rel=1e-3)


# --- audits


def test_the_audits_are_of_every_algorithm_at_each_level_and_of_every_paper():
    study = PLANS["audit"](False)
    of = lambda *panels: {Config(**c.fields).algorithm for c in study.cells if c.panel in panels}
    named = set(FIELDS["algorithm"].metadata["choices"]()) - AUDITED_ELSEWHERE
    takes = lambda kind: {n for n in named if getattr(traits_of(getattr(algorithms, n)), kind)}
    assert of(audit.EXAMPLES) == takes("example_noise")
    assert of(audit.CLIENTS, audit.UPLOADS) == takes("client_noise")
    for each in (study, PLANS["audit"](True)):
        printed = [c for c in each.cells if c.panel == audit.PRINTED]
        names = {c.line.partition(":")[0] for c in printed}
        assert len(names) == len(as_printed.NAMES) and all(c.asked["claim"] for c in printed)
        assert {c.text.partition(":")[0] for c in each.claims[1:]} == names


def test_claims_of_audits():
    paper = audit.TALAEI
    of = lambda *triples: {
        ("p", f"{paper}: {i}", None): dict(claimed=c, audited=a, epsilon=e, status="proved")
        for i, (c, a, e) in enumerate(triples)
    }
    refuted, holds = (audit.refuted(paper, is_so) for is_so in (True, False))
    for rows, one, two in (
        (of((5, 6, 9), (5, 6, 9)), CONFIRMED, NOT),
        (of((5, 6, 9), (5, 4, 9)), NOT, NOT),
        (of((5, 4, 9), (5, 4, 9)), NOT, CONFIRMED),
        (of((5, 6, 9), (None, 4, 9)), UNKNOWN, UNKNOWN),
        ({}, UNKNOWN, UNKNOWN),
    ):
        assert (refuted(rows)[0], holds(rows)[0]) == (one, two)
    assert audit.no_contradiction({})[0] == UNKNOWN
    assert audit.no_contradiction(of((5, 6, 9), (5, 6, 9)))[0] == CONFIRMED
    verdict, seen = audit.no_contradiction(of((5, 6, 9), (5, 9.1, 9)))
    assert verdict == NOT and f"above it: {paper}: 1" in seen
    # what rests on a condition is no bug, and nothing is proved where nothing can be contradicted
    mixed = of((5, 6, 9), (5, 9.1, 9), (5, 6, None))
    mixed["p", f"{paper}: 1", None]["status"] = "conditional"
    assert audit.no_contradiction(mixed)[0] == CONFIRMED


@pytest.mark.parametrize(
    "of, words",
    [
        (dict(audited=2.0, epsilon=2.5), ""),
        (dict(audited=0.0, epsilon=0.1, claimed=1.0), "claims 1"),
        (dict(audited=3.0, epsilon=4000.0, claimed=2.0), "claims 2, audited 3"),
        (dict(audited=3.0, epsilon=2.0), "proved 2 CONTRADICTED"),
        (dict(audited=3.0), ""),
    ],
)
def test_the_picture_of_audits_says_what_is_refuted(of, words):
    assert pictures.claim_words(results.Point("p", "l", None, None, ceiling=9.0, **of)) == words


@pytest.mark.slow
def test_the_quick_audit_finds_what_the_full_one_finds(tmp_path, capsys):
    out = tmp_path / "out"
    assert runner.main("studies", studies.EXPERIMENTS, ["audit", "--quick", "--out", str(out)]) == 0
    found = results.read(out / "results.json")
    assert [v.verdict for v in found.verdicts] == [CONFIRMED] * 6
    assert found.versions["commit"] and (out / "audit.png").stat().st_size > 10_000
    assert "ε audited" in capsys.readouterr().out
    cells = PLANS["audit"](True).cells
    assert {p.line for p in found.points} == {c.line for c in cells}
    (upload,) = (p for p in found.points if "one upload" in p.line)
    assert upload.claimed == pytest.approx(5.0, rel=1e-4) and upload.unit == "example"
    assert upload.claimed < upload.audited <= upload.ceiling
    # so little noise proves nothing, since computed noise has a finite reach
    assert upload.epsilon is None and "mass that the computed noise" in upload.caveats[0]
    kept = ResultStore(out / "cells.jsonl")  # nothing is audited twice
    before = len(kept.records)
    with studies.cheap_code(True):
        studies.audited(kept, cells, PLANS["audit"](True), lambda text: None)
    assert len(kept.records) == before


def test_every_stored_study_has_a_message_in_its_own_words():
    """A renamed panel or line of a study would silently lose its words in the picture."""
    files = sorted((ROOT / "experiments" / "results").glob("study_*.json"))
    assert {file.stem.removeprefix("study_") for file in files} == set(MESSAGES)
    for file in files:
        message, points = MESSAGES[file.stem.removeprefix("study_")], results.read(file).points
        assert set(message.panels) <= {p.panel for p in points}, file.stem
        assert set(message.lines) <= {p.line for p in points}, file.stem
        if isinstance(message.xlabel, dict):
            assert set(message.xlabel) == {p.panel for p in points}


def test_a_picture_has_one_column_of_panels_with_labels_at_the_lines():
    stored = results.read(ROOT / "experiments" / "results" / "study_cohort.json")
    figure = pictures.study(stored.points, stored.xlabel, "", MESSAGES["cohort"])
    one, two = figure.axes
    assert one.get_position().x0 == two.get_position().x0 and not figure.legends
    assert figure.get_suptitle() == MESSAGES["cohort"].title
    assert {t.get_text() for t in one.texts} == set(MESSAGES["cohort"].lines.values())
    notes = {t.get_text() for t in two.texts}
    assert {"ε 2.35", "ε 37.6"} <= notes and "one row protected\n(ε 9.7 at all points)" in notes
