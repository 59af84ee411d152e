"""What experiments left is gathered in the file of their paper."""

import json

import pytest
from helpers import pretended
from helpers.paths import RESULTS

from experiments.harness import collect, programs, runner
from experiments.harness import results as results_file
from experiments.harness.runner import Claim, Experiment, stored_line
from experiments.harness.verdicts import close, difference
from experiments.papers.chen2024 import figures as chen2024
from jfl.runs import sweep

TINY = dict(
    dataset="digits", partition="iid", clients=4, rounds=1, steps=1, batch=4, evaluate_every=1
)


def results(folder, **changes):
    line = dict(
        accuracy=[0.5, 0.6],
        loss=[1.0, 0.9],
        epsilon_claimed=None,
        epsilon_proved=2.0,
        seconds_per_round=0.1,
    )
    found = (
        dict(
            format=results_file.FORMAT,
            experiment="fig1",
            module="chen2024",
            quick=False,
            title="A figure",
            seeds=[0, 1],
            seconds=0.4,
            lines=dict(a=line, b=line | dict(accuracy=[0.1, 0.2])),
            versions={},
            verdicts=[dict(claim="c", verdict="not confirmed", seen="no  [ b ]")],
        )
        | changes
    )
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(found))
    return folder


def test_experiments_are_added_and_replaced(tmp_path, capsys):
    into, run = tmp_path / "results", tmp_path / "run"
    collect.collect(
        "chen2024", [results(run / "one"), results(run / "two", experiment="fig2")], into
    )
    kept = json.loads((into / "chen2024.json").read_text())
    assert (
        kept["experiments"]["fig1"]["lines"]["a"]["accuracy"] == [0.5, 0.6]
        and kept["title"] == "chen2024"
    )
    assert kept["experiments"]["fig1"]["verdicts"][0]["seen"] == "no  [ b ]"
    assert "[0.5,0.6]" in (into / "chen2024.json").read_text()  # a list of numbers is one line
    assert (
        collect.main(
            [
                "chen2024",
                str(results(run / "new", seconds=7.0, experiment="fig2")),
                "--into",
                str(into),
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.strip() == str(into / "chen2024.json")
    again = results_file.read(into / "chen2024.json").experiments
    assert again["fig1"].lines["b"].mean == pytest.approx(0.15) and again["fig2"].seconds == 7.0
    assert again["fig1"].seconds == 0.4 and again["fig1"].module == "chen2024"


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(module="li2025"), "an experiment of chen2024, each once, but got fig1 of li2025"),
        (dict(experiment="fig1"), "got fig1 of chen2024 again"),
        (dict(experiment=""), "got none of chen2024"),
        (dict(experiment="fig3", lines=dict(a=dict(accuracy=["x"]))), "`int . float . null`"),
        (
            dict(experiment="fig2", lines={}),
            "all lines that .*chen2024.json has, but got none of a, b",
        ),
    ],
    ids=str,
)
def test_what_is_no_result_is_refused(tmp_path, changes, words):
    file = collect.collect(
        "chen2024", [results(tmp_path / "old", experiment="fig2")], tmp_path / "into"
    )
    before = file.read_text()
    bad = tmp_path / "bad"
    with pytest.raises(ValueError, match=f"bad.results.json.*expected .*{words}"):
        collect.collect(
            "chen2024", [results(tmp_path / "good"), results(bad, **changes)], tmp_path / "into"
        )
    assert file.read_text() == before  # nothing of the good one either


def test_a_merge_keeps_failures_and_unread_data_of_lines_that_did_not_run(tmp_path):
    into, run = tmp_path / "results", tmp_path / "run"
    line = dict(accuracy=[0.5], loss=[1.0], epsilon_claimed=None, epsilon_proved=None)
    fig2 = dict(experiment="fig2", seeds=[0], verdicts=[])
    of = lambda *names: dict(fig2, lines=dict.fromkeys(names, line))
    every = chen2024.EXPERIMENTS["fig2"].lines
    mnist, cifar = (tuple(n for n in every if n.startswith(d)) for d in ("MNIST", "CIFAR10"))
    unread = {name: "data that are not on this machine" for name in ("svhn", "cifar10")}
    failed = dict.fromkeys([cifar[0], "SVHN"], "NaN")
    before = results(run / "one", **of(*mnist), unread=unread, failed=failed)
    collect.collect("chen2024", [before], into)
    collect.collect("chen2024", [results(run / "two", **of(*cifar))], into, merge=True)
    found = results_file.read(into / "chen2024.json").experiments["fig2"]
    assert {*found.lines} == {*mnist, *cifar} and [*found.unread] == ["svhn"]
    assert [*found.failed] == ["SVHN"]
    said = {v.claim: v.seen for v in found.verdicts}
    assert "svhn" in said["SVHN: NonPrivate is best"]
    # what fails now is no longer what it was, and stays a failure
    again = results(run / "three", **of(), failed={cifar[0]: "NaN in round 1"})
    collect.collect("chen2024", [again], into, merge=True)
    collect.collect("chen2024", [results(run / "four", **of(mnist[0]))], into, merge=True)
    found = results_file.read(into / "chen2024.json").experiments["fig2"]
    assert cifar[0] not in found.lines and found.failed[cifar[0]] == "NaN in round 1"


def test_lines_of_other_draws_are_told_and_not_paired(tmp_path):
    own, one = "one for each seed", "one"
    every = [n for n in chen2024.EXPERIMENTS["fig3"].lines if n.startswith("Synthetic-IID")]
    line = dict(accuracy=[0.5, 0.6], loss=[1.0, 1.1], draws=one)
    before = dict(experiment="fig3", verdicts=[], lines=dict.fromkeys(every, line))
    collect.collect("chen2024", [results(tmp_path / "fig3", **before)], tmp_path)
    fresh = {every[0]: line | dict(accuracy=[0.7, 0.8], draws=own)}
    part = results(tmp_path / "part", experiment="fig3", verdicts=[], lines=fresh)
    collect.collect("chen2024", [part], tmp_path, merge=True)
    whole = results_file.read(tmp_path / "chen2024.json").experiments["fig3"]
    told = [n for n in whole.notes if n.startswith("Draws")]
    assert told == [f"Draws of the data: {one}; {own} of {every[0]}"]
    lines = {n: stored_line(x, (0, 1)) for n, x in whole.lines.items()}
    apart = difference(lines, every[0], every[1])
    assert apart.mean == pytest.approx(0.2) and apart.values is None  # not paired
    assert difference(lines, every[1], every[2]).values is not None


def test_quick_runs_are_left_out_and_a_study_is_kept(tmp_path, capsys):
    collect.collect(
        "chen2024", [results(tmp_path / "good"), results(tmp_path / "fast", quick=True)], tmp_path
    )
    assert "fast/results.json: left out, of a quick run" in capsys.readouterr().err
    assert list(json.loads((tmp_path / "chen2024.json").read_text())["experiments"]) == ["fig1"]
    talaei = RESULTS / "talaei2024.json"
    before = [e.name for e in results_file.read(talaei).parts()]
    (tmp_path / "talaei2024.json").write_text(talaei.read_text())
    file = collect.collect(
        "talaei2024",
        [results(tmp_path / "more", module="talaei2024", experiment="fig99")],
        tmp_path,
    )
    assert [e.name for e in results_file.read(file).parts() if e.name != "fig99"] == before


def test_data_that_are_missing_are_named_with_the_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "compute", pretended.compute)
    monkeypatch.setattr(programs, "trace_once", lambda *_: None)
    monkeypatch.setenv("JFL_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    claims = (
        Claim("far", close("here", "there")),
        Claim("near", close("here", "here")),
    )
    made = Experiment("tiny", TINY, dict(here={}, there=dict(dataset="svhn")), claims, seeds=(0,))
    found = runner.run("tiny", made, tmp_path / "out")
    assert found["verdicts"][0] == dict(
        claim="far",
        verdict=runner.UNKNOWN,
        seen="0 of 1 pairs run: lines that were not run; not to be read here: svhn",
        whose="paper",
        statement="",
    )
    assert found["verdicts"][1]["seen"] == "here minus here: +0.000 (one seed)"
    assert found["unread"]["svhn"] == "datasets.svhn: data that are not on this machine"
    assert str(tmp_path) not in (tmp_path / "out" / "results.json").read_text()
    assert (
        "here" in found["lines"]
        and "there" not in found["lines"]
        and "not run" in capsys.readouterr().err
    )
