"""The studies: cells that are plans, noise that reaches its epsilon, claims that can fail, and a
study that goes on.

Also what all experiments share: the records of runs, and results that say which command made them.
"""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments.harness import kept_runs, pictures, report, results, runner
from experiments.harness.runner import CONFIRMED, NOT, UNKNOWN, Claim, Experiment
from experiments.papers import as_printed
from experiments.studies import recipes
from experiments.studies import study as studies
from experiments.studies.plans import PLANS, audit, checks, claimed
from experiments.studies.plans.cells import NAMES, NONE, Cell, Study
from jfl import algorithms
from jfl.algorithms.base import traits_of
from jfl.core.errors import DataUnavailable
from jfl.core.files import ResultStore
from jfl.privacy import guarantees
from jfl.report import plots
from jfl.runs import build as assemble
from jfl.runs.config import FIELDS, Config, refuse_unused

TINY = dict(
    dataset="digits", partition="iid", clients=4, model="logistic", batch=16, steps=1, rounds=2
)
NOISY = TINY | dict(unit="client", view="third_party", epsilon=20.0)


UNTRAINED = ("claimed", "audit")


def row(*values, **more):
    return dict(values=dict(enumerate(values))) | more


def tiny(cells=None, **more):
    cells = cells or (
        Cell("a", "FedAvg", 20.0, NOISY, ({"lr": 0.05}, {"lr": 0.5})),
        Cell("a", "FedAvg, no noise", None, TINY, ({"lr": 0.5},)),
    )
    return Study("tiny", "ε", cells, seeds=(0, 1), tune=(7,), **more)


# --- plans


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in ("fashion", "text", "promises") else ())
        for n in PLANS
    ],
)
def test_cells_of_a_quick_study_are_plans(name):
    study = PLANS[name](True)
    assert len({(c.panel, c.line, c.x) for c in study.cells}) == len(study.cells)
    for cell in study.cells:
        for point in cell.grid:
            assert set(cell.fields) | set(point) <= {*FIELDS, "recipe"}
        config = studies.config_of(cell.fields)
        try:
            assemble.federation(config)
        except DataUnavailable:
            assert name in ("fashion", "text")  # of all others nothing is to prepare
            continue
        if name in UNTRAINED:
            continue  # their noise is found below
        private = config.epsilon is not None or config.noise_multiplier is not None
        refuse_unused(config)
        if isinstance(config, recipes.Made):
            plan = studies.plan_of(dataclasses.replace(config, noise=(1.0,) * 2))
        else:
            noise = 1.0 if private else None
            plan = studies.plan_of(
                dataclasses.replace(config, epsilon=None, noise_multiplier=noise)
            )
        assert plan.sampler.clients == config.clients
        assert private != cell.line.endswith(NONE)
    assert not set(study.seeds) & set(study.tune)


@pytest.mark.parametrize("name", PLANS)
def test_full_studies_compare_equal_promises(name):
    study = PLANS[name](False)
    assert len({(c.panel, c.line, c.x) for c in study.cells}) == len(study.cells) and study.claims
    assert not set(study.seeds) & set(study.tune)
    assert name in UNTRAINED or len(study.seeds) >= 5
    for cell in study.cells:
        config = studies.config_of(cell.fields | cell.grid[0])
        if name != "claimed":
            refuse_unused(config)
        if (
            config.unit == "example" and name not in UNTRAINED
        ):  # one multiplier is right for all clients
            solved = cell.fields.get("recipe") == "prox_erm"  # with all rows
            assert config.partition in ("iid", "natural", "labels")
            assert config.batch_sampler == ("full" if solved else "without_replacement")
    if name == "frontier":
        assert {c.fields["dataset"] for c in study.cells} == {"mnist", "synthetic", "adult"}
        assert {c.fields["algorithm"] for c in study.cells} == set(NAMES)
    if name == "frontier" or name == "heterogeneity":
        for panel in {c.panel for c in study.cells}:
            noisy = [c.fields for c in study.cells if c.panel == panel and "epsilon" in c.fields]
            assert len({(f["unit"], f["view"], f["rounds"], f["batch"]) for f in noisy}) == 1


def test_experiments_have_their_panels_and_the_command_lists_them(capsys):
    assert runner.main("studies", studies.EXPERIMENTS, ["--list"]) == 0
    told = capsys.readouterr().out
    assert set(studies.EXPERIMENTS) == set(PLANS) == {line.split()[0] for line in told.splitlines()}


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
        assert (worth["unit"], worth["view"], worth["adjacency"]) == (
            "client",
            "third_party",
            "replace_one",
        )
    kinds = [r for r in store.records.values() if "z" in r]
    assert len(kinds) == 2  # fedavg and scaffold release alike, padpfl does not
    less = store.records[next(k for k, r in store.records.items() if "z" in r)]
    less["z"] *= 0.9
    with pytest.raises(ValueError, match="equally many rows"):
        studies.with_noise(store, Config(**NOISY | dict(mu=0.3, algorithm="fedprox")), (0, 1))


def test_the_worst_split_is_told(monkeypatch):
    sizes, asked = {0: (5, 5), 1: (5, 5), 2: (4, 6)}, []

    def build(config):
        fed = type(
            "Fed",
            (),
            dict(
                size=np.array(sizes[config.partition_seed][:: -1 if config.partition_seed else 1])
            ),
        )
        return type("Plan", (), dict(fed=fed)), config

    def guarantee(plan, *_):
        asked.append(plan)
        return studies.guarantees.Guarantee(
            float(10 - min(plan.fed.size)), 1e-5, "example", "replace_one", "server", "pld"
        )

    monkeypatch.setattr(studies.build, "build", build)
    monkeypatch.setattr(studies.guarantees, "guarantee", guarantee)
    config = Config(unit="example", noise_multiplier=1.0)
    assert studies._worst(config, (0, 1, 2))["epsilon"] == 6 and len(asked) == 2


# --- a study


def untrained(make, *, points, **how):
    """What a sweep gives, without a program: accuracies that follow from rates and seeds."""
    rates = [float(make(p["run"]).algorithm.client.data["work"].lr) for p in points]
    seen = np.array([[0.5 + 0.1 * r + 0.01 * p["seed"]] for r, p in zip(rates, points)])
    return SimpleNamespace(
        metrics=SimpleNamespace(accuracy=seen, loss=1 - seen), failed=[False] * len(points)
    )


@pytest.mark.by_default("accounted")
@pytest.mark.parametrize("trained", [False, True], ids=["accounted", "trained"])
def test_a_study_from_end_to_end_goes_on_where_it_stopped(trained, tmp_path, monkeypatch, capsys):
    gone = Cell("b", "FedAvg", 1.0, TINY | dict(dataset="svhn"))  # which no other test reads
    claims = (
        Claim(
            "noise costs",
            checks.above((("a", "FedAvg, no noise", None), ("a", "FedAvg", 20.0))),
        ),
    )
    study = tiny((tiny().cells[0], gone), claims=claims)
    monkeypatch.setitem(studies.PLANS, "tiny", lambda quick: study)
    monkeypatch.setenv("JFL_DATA_DIR", str(tmp_path / "nothing"))
    monkeypatch.setenv("HOME", str(tmp_path))
    ran, real = [], studies.run_points if trained else untrained
    monkeypatch.setattr(
        studies,
        "run_points",
        lambda *a, points, **k: ran.append(len(points)) or real(*a, points=points, **k),
    )
    run = lambda: runner.run(
        "tiny", studies._experiment(lambda quick: study), tmp_path / "out", True, module="studies"
    )
    found = run()
    told = capsys.readouterr()
    assert (
        "SKIPPED: svhn" in told.out
        and "SKIPPED: svhn" in told.err
        and "datasets.svhn" in found["unread"]["svhn"]
    )
    assert ran == [2, 2]  # to choose, and to report
    (noisy,) = found["points"]
    assert noisy["epsilon"] <= 20 * (1 + 1e-5) and noisy["target"] == 20 and noisy["delta"] == 1e-5
    assert [p["lr"] for p in noisy["grid"]] == [0.05, 0.5] and noisy["tuned_on"] == [7]
    assert noisy["chosen"] == {"lr": max(noisy["grid"], key=lambda p: p["accuracy"])["lr"]}
    assert noisy["half"] >= 0 and noisy["mean"] == pytest.approx(
        np.mean(list(noisy["values"].values()))
    )
    assert found["verdicts"][0]["verdict"] == UNKNOWN  # what it compares with was not run
    assert (tmp_path / "out" / "tiny.png").stat().st_size > 10_000
    same = json.loads(json.dumps(found["points"]))
    kept = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (kept["format"], kept["xlabel"]) == (results.FORMAT, "ε")
    (stored,) = kept["points"]
    assert stored == {k: v for k, v in results._rounded(same[0]).items() if k in stored}
    assert same[0]["config"] == kept["config"]  # which all points share: there is one
    (point,) = report.read_source(tmp_path / "out").experiments[0].points  # and the page has it
    assert point.epsilon == noisy["epsilon"] and point.panel == "a"

    ran.clear()  # all is there: nothing runs, and the rows are the same
    monkeypatch.setattr(studies, "_worst", None)  # nor is anything accounted
    assert run()["points"] == found["points"] and not ran
    path = tmp_path / "out" / "cells.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]) + lines[-2][:20])  # killed while it wrote the last two
    again = run()
    assert ran == [2] and again["points"][0]["mean"] == pytest.approx(noisy["mean"], abs=1e-6)


def test_a_result_belongs_to_its_config(tmp_path):
    base = Config(**TINY)
    others = (dataclasses.replace(base, lr=0.31), dataclasses.replace(base, seed=1))
    keys = {studies.key("run", c) for c in (base, *others)}
    assert (
        len(keys | {studies.key("noise", base)}) == 4 and studies.key("run", Config(**TINY)) in keys
    )
    with jax.enable_x64(True):
        assert studies.key("run", base) not in keys  # other draws


def test_a_result_belongs_to_its_rows(monkeypatch):
    digits, found = kept_runs.datasets.digits(), set()
    for shift in (0.0, 0.5, 0.0):
        monkeypatch.setattr(
            kept_runs.datasets, "adult", lambda shift=shift: digits._replace(x=digits.x + shift)
        )
        kept_runs._rows.cache_clear()
        found.add(studies.key("run", Config(**TINY | dict(dataset="adult"))))
    kept_runs._rows.cache_clear()
    assert len(found) == 2


def test_a_failed_run_is_not_chosen_and_not_averaged(tmp_path, monkeypatch):
    study = tiny()
    store = ResultStore(tmp_path / "cells.jsonl")

    def measure(store, wanted, note=None):
        for c in wanted:
            failed = (
                c.lr == 0.5
                and c.seed == 7
                and c.noise_multiplier is not None
                or (c.seed, c.lr) == (1, 0.05)
            )
            store.put(
                [
                    dict(
                        key=studies.key("run", c),
                        accuracy=0.9 if c.lr == 0.5 else 0.8,
                        failed=failed,
                    )
                ]
            )

    monkeypatch.setattr(studies, "measure", measure)
    noisy, plain = studies.trained(store, study.cells, study, None)
    assert noisy["chosen"] == {"lr": 0.05} and noisy["failed"] == 1 and list(noisy["values"]) == [0]
    assert noisy["half"] is None and plain["values"] == {0: 0.9, 1: 0.9}


# --- records


def test_a_line_that_was_cut_off_is_computed_again(tmp_path):
    path = tmp_path / "cells.jsonl"
    store = ResultStore(path)
    assert store.records == {} and not path.exists()
    store.put([dict(key="a", x=1), dict(key="b", x=float("nan"))])
    assert store.get("a", None) == dict(key="a", x=1) and store.records["b"]["x"] is None
    whole = path.read_bytes()
    for cut in (
        whole + b'{"key": "c", "x',
        whole + b'{"key": "c"}',
        whole + '{"key": "ε'.encode()[:-1],
    ):
        path.write_bytes(cut)  # also a whole record without its end of line
        store = ResultStore(path)
        assert (
            list(store.records) == ["a", "b"] and path.read_bytes() == cut
        )  # reading changes nothing
        assert store.get("c", lambda: dict(x="ε\u2028")) == dict(key="c", x="ε\u2028")
        assert path.read_bytes().startswith(whole) and list(ResultStore(path).records) == [
            "a",
            "b",
            "c",
        ]
        store.put([dict(key="a", x=2)])
        assert ResultStore(path).records["a"]["x"] == 2 and len(path.read_bytes().splitlines()) == 4
    path.write_bytes(whole + b'{"key": "c"')
    store = ResultStore(path)
    path.write_bytes(whole + b'{"key": "c"}\n{"key": "d"')  # another process went on
    store.put([dict(key="e")])
    assert list(ResultStore(path).records) == ["a", "b", "c", "e"]


@pytest.mark.parametrize("line", ["{", "[1]", '{"x": 1}', ""])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    (tmp_path / "cells.jsonl").write_text('{"key": "a"}\n' + line + '\n{"key": "b"}\n')
    with pytest.raises(
        ValueError,
        match=r"cells\.jsonl, line 2: expected a record of a run, but got .*Take the line out",
    ):
        ResultStore(tmp_path / "cells.jsonl")


# --- the command that made it


def test_results_say_which_command_made_them(tmp_path, capsys):
    def special(name, experiment, out, quick):
        (out / "results.json").write_text("{}")  # as some write their own
        return dict(
            title=experiment.title,
            quick=quick,
            verdicts=[dict(claim="c", verdict="confirmed", seen="s")],
        )

    lines = {"one": {}, "the other": {}}

    def sweep(config, axes, folder):
        entries = [
            dict(
                name="a",
                algorithm="fedavg",
                dataset="digits",
                rounds=1,
                seed=s,
                accuracy=dict(final=0.5),
                loss=1.0,
                seconds=dict(total=0.1, per_round=0.1),
                privacy=[
                    dict(
                        unit="example",
                        adjacency="replace_one",
                        view="server",
                        delta=1e-5,
                        epsilon=None,
                        method="none",
                        status="no guarantee",
                        caveats=[],
                    )
                ],
                config={},
            )
            for s in axes["seed"]
        ]
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(dict(runs=entries)))

    experiments = dict(
        alone=Experiment("special", {}, {}, special=special),
        lines=Experiment("of lines", TINY, lines, runs=sweep),
    )
    for args, line in (
        (["alone"], "alone"),
        (["alone", "--quick"], "alone --quick"),
        (["lines"], "lines"),
        (["lines", "--quick", "--lines", "the other"], "lines --quick --lines 'the other'"),
    ):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        assert runner.main("some2025", experiments, [*args, "--out", str(out)]) == 0
        kept = json.loads((out / "results.json").read_text())
        assert kept["format"] == results.FORMAT and kept["title"] == experiments[args[0]].title
        (found,) = report.read_source(out).experiments
        assert report._command(found) == f"python -m experiments.papers some2025 {line} --out NEW"
    for name, wanted, told in (
        ("alone", "a", "alone: expected no --lines, as it runs as a whole, but got a"),
        ("lines", "no such", "lines: expected lines of one, the other, but got no such"),
    ):
        arguments = [name, "--lines", wanted, "--out", str(tmp_path / "refused")]
        with pytest.raises(ValueError, match=told):
            runner.main("some2025", experiments, arguments)
    assert runner.run("alone", experiments["alone"], tmp_path / "0").keys() == {
        "experiment",
        "quick",
        "title",
        "verdicts",
    }


# --- claims


def test_claims_fail_when_the_numbers_are_turned_around():
    high, low = row(0.90, 0.91, 0.92), row(0.80, 0.815, 0.818)
    rows, turned = {"one": high, "two": low}, {"one": low, "two": high}
    check = checks.above(("one", "two"))
    assert check(rows)[0] == CONFIRMED and check(turned)[0] == NOT
    assert (
        check({"one": high})[0] == UNKNOWN
        and check({"one": row(0.9), "two": row(0.8)})[0] == UNKNOWN
    )
    assert checks.above(("one", "two"), ("two", "one"))(rows)[0] == NOT
    assert checks.above(("one", "two"), ("one", "gone"))(rows)[0] == UNKNOWN
    wide = {
        "one": row(0.9, 0.7, 0.9),
        "two": row(0.8, 0.8, 0.7),
    }  # above on average, but not surely
    assert check(wide)[0] == NOT
    near = checks.within(0.02, ("one", "two"))
    assert near({"one": row(0.90, 0.91, 0.92), "two": row(0.901, 0.909, 0.921)})[0] == CONFIRMED
    assert near(rows)[0] == NOT and near(turned)[0] == NOT and near(wide)[0] == NOT


def test_the_interval_is_of_paired_differences():
    mean, half = checks.gap({"a": row(1.0, 2.0, 3.0), "b": row(0.0, 1.0, 2.5)}, "a", "b")
    assert mean == pytest.approx(5 / 6) and half == pytest.approx(
        4.302653 * np.std([1, 1, 0.5], ddof=1) / 3**0.5
    )


def test_claims_of_epsilons():
    covers = claimed.covers("p")
    rows = lambda *pairs: {
        ("a", "p", i): dict(claimed=c, epsilon=e) for i, (c, e) in enumerate(pairs)
    }
    assert covers(rows((4.0, 3.0), (16.0, 16.0)))[0] == CONFIRMED
    assert covers(rows((4.0, 3.0), (16.0, 17.0)))[0] == NOT and covers(rows((4.0, None)))[0] == NOT
    assert covers({})[0] == UNKNOWN
    study = PLANS["cohort"](True)
    grows, flat = (
        [c for c in study.claims if c.text.startswith(f"fixed noise, {level}")][0]
        for level in ("client", "example")
    )
    cells = {c.x: c.panel for c in study.cells if "noise_multiplier" in c.fields}
    few, many = min(cells), max(cells)
    made = lambda level, a, b: {
        (cells[few], level, few): dict(epsilon=a),
        (cells[few], level, many): dict(epsilon=b),
    }
    assert (
        grows.check(made("client", 5.0, 20.0))[0] == CONFIRMED
        and grows.check(made("client", 20.0, 5.0))[0] == NOT
    )
    assert (
        flat.check(made("example", 5.0, 5.0))[0] == CONFIRMED
        and flat.check(made("example", 5.0, 6.0))[0] == NOT
    )
    assert grows.check({})[0] == UNKNOWN


def test_what_a_paper_claims_stands_beside_what_is_proved(tmp_path):
    cell = [c for c in PLANS["claimed"](True).cells if c.line == "talaei2024"][:1]
    study = Study("claimed", "claimed ε", tuple(cell), y="epsilon")
    (found,) = studies.accounted(
        ResultStore(tmp_path / "cells.jsonl"), cell, study, lambda text: None
    )
    assert found["x"] == found["claimed"] == pytest.approx(cell[0].x, rel=1e-4)
    assert found["epsilon"] > 10 * found["claimed"] and found["view"] == "third_party"
    assert claimed.covers("talaei2024")({("", "talaei2024", 4.0): found})[0] == NOT


# --- audits


def test_the_audits_are_of_every_algorithm_at_each_level_and_of_every_paper():
    study = PLANS["audit"](False)
    of = lambda *panels: {Config(**c.fields).algorithm for c in study.cells if c.panel in panels}
    named = FIELDS["algorithm"].metadata["choices"]()
    # algorithms that papers compare with are audited in tests/auditing/test_matrix.py
    named = set(named) - {
        "dicesgd",
        "ditto",
        "fedbuff",
        "feddyn",
        "fednova",
        "fedper",
        "fedrep",
        "fedsam",
    }
    named -= {"mimelite", "pfedme", "qfedavg"}
    takes = lambda kind: {n for n in named if getattr(traits_of(getattr(algorithms, n)), kind)}
    assert of(audit.EXAMPLES) == takes("example_noise")
    assert of(audit.CLIENTS, audit.UPLOADS) == takes("client_noise")
    for quick in (False, True):
        study = PLANS["audit"](quick)
        printed = [c for c in study.cells if c.panel == audit.PRINTED]
        names = {c.line.partition(":")[0] for c in printed}
        assert len(names) == len(as_printed.NAMES) and all(c.asked["claim"] for c in printed)
        told = [c.text.partition(":")[0] for c in study.claims[1:]]
        assert set(told) == names
        for cell in study.cells:
            refuse_unused(Config(**cell.fields))


@pytest.mark.slow
def test_noise_as_printed_is_for_the_epsilon_that_is_stated():
    for cell in PLANS["audit"](True).cells:
        if cell.panel == audit.PRINTED and "all broadcasts" not in cell.line:
            config = Config(**cell.fields)
            plan, _ = assemble.build(config)
            found = as_printed.claimed(plan, config.rounds, config.delta, None, config.view)
            # Li et al.'s is a multiple of what covers their step; no other has one
            stated = 2.0 if config.epsilon is None else config.epsilon
            assert found.epsilon == pytest.approx(stated, rel=1e-3), cell.line


def test_claims_of_audits():
    paper = audit.TALAEI
    of = lambda *triples: {
        ("p", f"{paper}: {i}", None): dict(claimed=c, audited=a, epsilon=e, status="proved")
        for i, (c, a, e) in enumerate(triples)
    }
    one, two = (audit.refuted(paper, is_so) for is_so in (True, False))
    both, half, none = of((5, 6, 9), (5, 6, 9)), of((5, 6, 9), (5, 4, 9)), of((5, 4, 9), (5, 4, 9))
    assert [check(both)[0] for check in (one, two)] == [CONFIRMED, NOT]
    assert [check(half)[0] for check in (one, two)] == [NOT, NOT]
    assert [check(none)[0] for check in (one, two)] == [NOT, CONFIRMED]
    assert one({})[0] == two({})[0] == audit.no_contradiction({})[0] == UNKNOWN
    unclaimed = of((5, 6, 9), (None, 4, 9))
    assert one(unclaimed)[0] == two(unclaimed)[0] == UNKNOWN
    assert audit.no_contradiction(both)[0] == CONFIRMED
    verdict, seen = audit.no_contradiction(of((5, 6, 9), (5, 9.1, 9)))
    assert verdict == NOT and f"above it: {paper}: 1" in seen
    # what rests on a condition is no bug, and nothing is proved where nothing can be contradicted
    mixed = of((5, 6, 9), (5, 9.1, 9), (5, 6, None))
    mixed["p", f"{paper}: 1", None]["status"] = "conditional"
    assert audit.no_contradiction(mixed)[0] == CONFIRMED


@pytest.mark.slow
def test_one_upload_of_talaei_and_izadi_is_refuted(tmp_path):
    (cell,) = [c for c in PLANS["audit"](True).cells if "one upload" in c.line]
    study = Study("audit", "ε", (cell,), y="audit", trials=2000)
    store, notes = ResultStore(tmp_path / "cells.jsonl"), []
    (found,) = studies.audited(store, (cell,), study, notes.append)
    assert found["claimed"] == pytest.approx(5.0, rel=1e-4) and found["unit"] == "example"
    assert found["claimed"] < found["audited"] <= found["ceiling"]
    # so little noise proves nothing, since computed noise has a finite reach
    assert found["epsilon"] is None and "mass that the computed noise" in found["caveats"][0]
    assert "reverses what its client uploads" in found["canary"]
    assert (found["trials"], found["confidence"], found["view"]) == (2000, 0.95, "server")
    assert studies.audited(ResultStore(store.path), (cell,), study, notes.append) == [found]
    results.checked("a row", found, results.Point)


def test_the_picture_of_audits_says_what_is_refuted():
    point = lambda line, **more: results.Point("p", line, None, None, ceiling=9.0, **more)
    points = [
        point("shown", audited=2.0, epsilon=2.5),
        point("nothing shown", audited=0.0, epsilon=0.1, claimed=1.0),
        point("too small a claim", audited=3.0, epsilon=4000.0, claimed=2.0),
        point("a bug", audited=3.0, epsilon=2.0),
        point("bare", audited=3.0),
    ]
    page = plots.svg(pictures.audits(points, "ε"))
    for words in (
        ">2 ≤ 2.5<",
        ">0 ≤ 0.1; claimed 1<",
        ">3 ≤ 4,000; claimed 2: REFUTED<",
        ">3 &gt; 2, CONTRADICTED<",
        ">3 nothing proved<",
    ):
        assert words in page, words
    assert pictures.audits([results.Point("p", "l", None, 0.5)], "ε") is None


@pytest.mark.slow
def test_the_quick_audit_finds_what_the_full_one_finds(tmp_path, capsys):
    out = tmp_path / "out"
    assert runner.main("studies", studies.EXPERIMENTS, ["audit", "--quick", "--out", str(out)]) == 0
    found = results.read(out / "results.json")
    assert [v.verdict for v in found.verdicts] == [CONFIRMED] * 6
    assert found.versions["commit"] and (out / "audit.png").stat().st_size > 10_000
    assert "ε audited" in capsys.readouterr().out
    (whole,) = report.read_source(out).experiments
    assert {p.line for p in whole.points} == {c.line for c in PLANS["audit"](True).cells}
