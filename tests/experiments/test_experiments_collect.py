"""What experiments left is gathered in the file of their paper."""

import json

import numpy as np
import pytest
from helpers import pretended

from experiments.harness import collect, programs, runner
from experiments.harness import results as results_file
from experiments.harness.runner import Claim, Experiment, stored_line
from experiments.harness.verdicts import close, difference
from experiments.papers.chen2024 import figures as chen2024
from jfl.runs import sweep

TINY = dict(
    dataset="digits", partition="iid", clients=4, rounds=1, steps=1, batch=4, evaluate_every=1
)
LINE = dict(accuracy=[0.5, 0.6], loss=[1.0, 0.9], epsilon_claimed=None, epsilon_proved=2.0)


def results(folder, **changes):
    """A folder of an experiment that ran."""
    found = dict(
        format=results_file.FORMAT,
        experiment="fig1",
        module="chen2024",
        seeds=[0, 1],
        seconds=0.4,
        lines=dict(a=LINE, b=LINE | dict(accuracy=[0.1, 0.2])),
        verdicts=[dict(claim="c", verdict="not confirmed", seen="no  [ b ]")],
    )
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(found | changes))
    return folder


def test_experiments_are_added_and_replaced(tmp_path, capsys):
    into, run = tmp_path / "results", tmp_path / "run"
    two = [results(run / "one"), results(run / "two", experiment="fig2")]
    collect.collect("chen2024", two, into)
    assert "[0.5,0.6]" in (into / "chen2024.json").read_text()  # a list of numbers is one line
    new = results(run / "new", seconds=7.0, experiment="fig2")
    fast = results(run / "fast", quick=True)
    assert collect.main(["chen2024", str(new), str(fast), "--into", str(into)]) == 0
    told = capsys.readouterr()
    assert told.out.strip() == str(into / "chen2024.json")
    assert "fast/results.json: left out, of a quick run" in told.err
    again = results_file.read(into / "chen2024.json")
    one, other = again.experiments["fig1"], again.experiments["fig2"]
    assert again.title == "chen2024" and one.module == "chen2024"
    assert one.lines["b"].mean == pytest.approx(0.15)
    assert (one.seconds, other.seconds) == (0.4, 7.0)
    assert one.verdicts[0].seen == "no  [ b ]"


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(module="li2025"), "an experiment of chen2024, each once, but got fig1 of li2025"),
        (dict(experiment="fig1"), "got fig1 of chen2024 again"),
        (dict(experiment=""), "got none of chen2024"),
        (dict(experiment="fig3", lines=dict(a=dict(accuracy=["x"]))), "`int . float . null`"),
        (dict(experiment="fig2", lines={}), "all lines that .*chen2024.json has, but got none of"),
    ],
    ids=str,
)
def test_what_is_no_result_is_refused(tmp_path, changes, words):
    old = results(tmp_path / "old", experiment="fig2")
    file = collect.collect("chen2024", [old], tmp_path / "into")
    before = file.read_text()
    good, bad = results(tmp_path / "good"), results(tmp_path / "bad", **changes)
    with pytest.raises(ValueError, match=f"bad.results.json.*expected .*{words}"):
        collect.collect("chen2024", [good, bad], tmp_path / "into")
    assert file.read_text() == before  # nothing of the good one either


def test_a_merge_keeps_failures_and_unread_data_of_lines_that_did_not_run(tmp_path):
    of = lambda names, **more: dict(
        experiment="fig2", verdicts=[], lines=dict.fromkeys(names, LINE), **more
    )
    merge = lambda name, made: collect.collect(
        "chen2024", [results(tmp_path / name, **made)], tmp_path, merge=True
    )
    stored = lambda: results_file.read(tmp_path / "chen2024.json").experiments["fig2"]
    every = chen2024.EXPERIMENTS["fig2"].lines
    mnist, cifar = (tuple(n for n in every if n.startswith(d)) for d in ("MNIST", "CIFAR10"))
    unread = dict.fromkeys(("svhn", "cifar10"), "data that are not on this machine")
    failed = dict.fromkeys([cifar[0], "SVHN"], "NaN")
    merge("one", of(mnist, unread=unread, failed=failed))
    merge("two", of(cifar))
    found = stored()
    assert {*found.lines} == {*mnist, *cifar} and [*found.unread] == ["svhn"]
    assert [*found.failed] == ["SVHN"]
    said = {v.claim: v.seen for v in found.verdicts}
    assert "svhn" in said["harder data, lower accuracy"]
    # what fails now is no longer what it was, and stays a failure
    merge("three", of((), failed={cifar[0]: "NaN in round 1"}))
    merge("four", of(mnist[:1]))
    found = stored()
    assert cifar[0] not in found.lines and found.failed[cifar[0]] == "NaN in round 1"


@pytest.mark.parametrize(
    "seeds, evaluations, stored",
    [(5, 20, 20), (60, 20, 5), (150, 20, 5), (150, 16, 6), (150, 6, 6), (150, 3, 3), (5, 100, 20)],
)
def test_stored_curves_are_short_but_keep_their_shape(seeds, evaluations, stored):
    curve = list(range(1, evaluations + 1))
    trace = collect.thin_curves(dict(curve=[curve] * seeds, round=[curve] * seeds))
    (kept,) = trace["round"]
    assert trace["curve"] == [kept] * seeds
    assert len(kept) == stored and kept[-1] == evaluations and len(set(np.diff(kept))) == 1


def test_lines_of_other_draws_are_told_and_not_paired(tmp_path):
    own, one = "one for each seed", "one"
    every = [n for n in chen2024.EXPERIMENTS["fig3"].lines if n.startswith("Synthetic-IID")]
    made = dict(experiment="fig3", verdicts=[])
    before = results(tmp_path / "fig3", lines=dict.fromkeys(every, LINE | dict(draws=one)), **made)
    collect.collect("chen2024", [before], tmp_path)
    fresh = {every[0]: LINE | dict(accuracy=[0.7, 0.8], draws=own)}
    collect.collect(
        "chen2024", [results(tmp_path / "part", lines=fresh, **made)], tmp_path, merge=True
    )
    whole = results_file.read(tmp_path / "chen2024.json").experiments["fig3"]
    told = [n for n in whole.notes if n.startswith("Draws")]
    assert told == [f"Draws of the data: {one}; {own} of {every[0]}"]
    lines = {n: stored_line(x, (0, 1)) for n, x in whole.lines.items()}
    apart = difference(lines, every[0], every[1])
    assert apart.mean == pytest.approx(0.2) and apart.values is None  # not paired
    assert difference(lines, every[1], every[2]).values is not None


def test_data_that_are_missing_are_named_with_the_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "compute", pretended.compute)
    monkeypatch.setattr(programs, "trace_once", lambda *_: None)
    monkeypatch.setenv("JFL_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    claims = (Claim("far", close("here", "there")), Claim("near", close("here", "here")))
    made = Experiment("tiny", TINY, dict(here={}, there=dict(dataset="svhn")), claims, seeds=(0,))
    found = runner.run("tiny", made, tmp_path / "out")
    assert [*found["lines"]] == ["here"] and "not run" in capsys.readouterr().err
    far, near = found["verdicts"]
    assert far["verdict"] == runner.UNKNOWN
    assert far["seen"] == (
        "0 of 1 pairs compared: lines that were not run; not to be read here: svhn"
    )
    assert near["seen"] == "here minus here: +0.000 (one seed)"
    assert found["unread"]["svhn"] == "datasets.svhn: data that are not on this machine"
    assert str(tmp_path) not in (tmp_path / "out" / "results.json").read_text()
