"""The page of results says of the study of promises what its file has."""

import json

from helpers.paths import ROOT

PAGE = (ROOT / "docs" / "results.md").read_text()
SECTION = PAGE.partition("### Corrected methods of five papers")[2].partition("\n### ")[0]
STUDY = json.loads((ROOT / "experiments" / "results" / "study_promises.json").read_text())


def table_after(head):
    """Return the cells of the table that begins with `head`."""
    lines = SECTION[SECTION.index(head) :].partition("\n\n")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line[:2] == "| "]


def test_the_table_is_that_of_the_study():
    rows = table_after("| method |")
    found, panel = {}, ""
    for name, *values in rows[1:]:
        if name.startswith("**"):
            panel = name.split("**")[1]
        else:
            found |= {(panel, name, x): v for x, v in zip((2.0, 8.0, 32.0), values, strict=True)}
    assert found == {(p["panel"], p["line"], p["x"]): f"{p['mean']:.3f}" for p in STUDY["points"]}


def test_no_promise_holds_at_every_epsilon_and_the_gains_are_told():
    assert len(STUDY["verdicts"]) == 14 and "42 intervals (14 comparisons" in SECTION
    assert {v["verdict"] for v in STUDY["verdicts"]} == {"not confirmed"}
    seen = {v["claim"].split(": ", 2)[-1].split(" ends")[0]: v["seen"] for v in STUDY["verdicts"]}
    points = lambda text: f"{100 * float(text.split()[0]):.1f} ± {100 * float(text.split()[2]):.1f}"
    known, shape = (
        [points(t) for t in seen[name].split(", ")]
        for name in (
            "AdDPNFL, weighted, noise variance subtracted",
            "FedAvg, noise of measured shape",
        )
    )
    words = " ".join(SECTION.split())
    assert f"gains {known[2]} points at ε = 32; at 2 (+{known[0]}) and 8" in words
    solved = [
        -float(t.split()[0])
        for t in seen["PADPFL, local problems solved (conditional)"].split(", ")
    ]
    assert f"stay {100 * min(solved):.1f} to {100 * max(solved):.1f} points below" in words
    minus = lambda texts: [points(t).replace("-", "−") for t in texts.split(", ")]
    differences = {name: cells for name, *cells in table_after("| difference in points |")}
    one, separate = "PADPFL, 0-1-2", "PADPFL, 0-1-2, separate clip norms"
    assert differences["one clip norm for all clients, minus DP-FedAvg"] == minus(seen[one])
    assert differences["separate clip norms, minus DP-FedAvg"] == minus(seen[separate])
    assert f"gains {shape[0]} points at ε = 2 and {shape[2]} at 32" in words
