"""The data of a page's plots: the same numbers as in the still pictures, as JSON holds them."""

import json
import math

import numpy as np
import pytest
from helpers.report_pages import guarantee

from jfl.report import charts, plots, results


def setting(label, final, guarantees=(), data="digits", values=None):
    values = np.array([[f / 2, f] for f in final]) if values is None else values
    rounds = list(range(1, values.shape[1] + 1))
    return plots.Setting(label, {"accuracy": (rounds, values)}, final, list(guarantees), data)


def point(panel, line, x, mean, **more):
    more = dict(half=0.01, epsilon=x) | more
    return results.checked(
        "a point", dict(panel=panel, line=line, x=x, mean=mean) | more, results.Point
    )


def by_name(chart, panel=0):
    """The points of each line of a panel, by the name in the legend."""
    return {
        chart["legend"][line["of"]]["name"]: line["points"]
        for line in chart["panels"][panel]["lines"]
    }


def held(chart):
    """What JSON makes of it, without what no JSON holds."""
    return json.loads(json.dumps(chart, allow_nan=False))


def of_runs(draw, settings, metrics):
    return draw([s.label for s in settings], plots.panels_of_runs(settings, metrics))


def test_curves_are_those_of_the_picture():
    settings = [setting("a", [0.8, 0.9, 0.4]), setting("b", [0.5])]
    chart = held(of_runs(charts.curves, settings, ("accuracy", "loss")))
    (ax,) = of_runs(plots.curves, settings, ("accuracy", "loss")).axes
    lines = by_name(chart)
    for line, name in zip(ax.lines, "ab"):
        drawn = [[p[0], p[1]] for p in lines[name]]
        np.testing.assert_allclose(drawn, np.transpose(line.get_data()), rtol=1e-5)
    assert lines["a"][1] == [2, 0.7, 0.4, 0.9] and lines["b"] == [[1, 0.25], [2, 0.5]]
    assert of_runs(charts.curves, settings, ("clip_fraction",)) is None


def traced(curve, rounds=(1, 2)):
    values = [[v / 2 for v in curve], list(curve)]
    return results.Line(trace=dict(round=[list(rounds)] * 2, curve=values))


def test_lines_of_an_experiment_are_drawn_against_rounds_a_panel_for_each_setting():
    """A line without a setting stands in all panels, one without rounds in none."""
    names = [f"{m}, {s}" for s in ("K=5", "K=9") for m in ("DP-A", "DP-B", "C")]
    lines = {name: traced((i / 10, i / 5)) for i, name in enumerate(names)}
    lines |= {"no privacy": traced((0.9, 1.0)), "points": results.Line(accuracy=[0.5])}
    legend, panels = plots.panels_of_lines(lines)
    assert [(p.title, p.label) for p in panels] == [
        ("K=5", "test accuracy"),
        ("K=9", "test accuracy"),
    ]
    chart = held(charts.curves(legend, panels))
    for i, panel in enumerate(("K=5", "K=9")):
        drawn = by_name(chart, i)
        assert set(drawn) == {"DP-A", "DP-B", "C", "no privacy"}
        for method in ("DP-A", "DP-B", "C"):
            values = np.array(lines[f"{method}, {panel}"].trace["curve"])
            assert [p[1] for p in drawn[method]] == pytest.approx(values.mean(0).tolist())
    assert by_name(chart, 0)["no privacy"] == by_name(chart, 1)["no privacy"]
    for ax, panel in zip(plots.curves(legend, panels).axes, panels):
        assert ax.get_title() == panel.title and len(ax.lines) == 4
    assert plots.panels_of_lines({"points": lines["points"]})[1] == []
    assert plots.curves([], []) is None and charts.curves([], []) is None


@pytest.mark.parametrize(
    "names, settings",
    [
        (["balanced A", "balanced B", "unbalanced A", "unbalanced B"] * 2, 1),  # few: one panel
        ([f"{s} {m}" for s in ("iid", "noniid") for m in ("no privacy", "A", "B", "C")], 2),
        ([f"{m} ε={e}" for m in "ABCD" for e in range(9)], 4),
        ([f"line{i}" for i in range(20)], 1),
        ([f"{s}_party ε={e}" for s in ("third", "second") for e in range(5)], 2),
        ([f"{s}{m}" for s in "ABCD" for m in (", x", " x", ", y")], 2),  # no two are one
    ],
)
def test_settings_are_found_in_names(names, settings):
    _, panels = plots.panels_of_lines({name: traced((0.1, 0.2)) for name in names})
    assert len(panels) == settings and sum(len(p.curves) for p in panels) >= len(set(names))
    assert all("party" in p.title or "_" not in p.title for p in panels)


def test_a_phrase_stays_one_word():
    """As Figure 1 of Noble et al. names its lines."""
    columns = ("(0,0)", "(1,1)", "(5,5)")
    ends = [(c, end) for end in ("", ", no l2", ", first rates") for c in columns]
    names = [f"{m}, K={k}, {c}{end}" for c, end in ends for m in "AB" for k in (50, 100)]
    legend, panels = plots.panels_of_lines({name: traced((0.1, 0.2)) for name in names})
    assert [p.title for p in panels] == [*columns, "no l2", "first rates"]
    assert legend[:4] == ["A, K=50", "A, K=100", "B, K=50", "B, K=100"]
    assert "A, K=50, (0,0)" in legend  # without l2, and at first rates


def test_rounds_that_differ_between_seeds_are_not_drawn():
    uneven = results.Line(trace=dict(round=[[1, 2], [1]], curve=[[0.1, 0.2], [0.1]]))
    apart = results.Line(trace=dict(round=[[1, 2], [1, 3]], curve=[[0.1, 0.2], [0.1, 0.2]]))
    assert plots.panels_of_lines({"a": uneven, "b": apart})[1] == []


def test_a_curve_that_diverges_has_gaps_and_a_logarithmic_axis():
    values = np.array([[1.0, 100.0, np.nan], [2.0, 50.0, np.inf]])
    diverging = plots.Setting("a", {"loss": ([1, 2, 3], values)}, [], [], "")
    (panel,) = held(of_runs(charts.curves, [diverging], ("loss",)))["panels"]
    assert panel["lines"][0]["points"][2] == [3, None] and panel["y"]["log"]
    flat = plots.Setting("a", {"loss": ([1, 2], np.array([[1.0, 2.0]]))}, [], [], "")
    assert not of_runs(charts.curves, [flat], ("loss",))["panels"][0]["y"]["log"]
    trace = {"round": [[1, 2]], "test loss": [[1.0, 100.0]], "curve": [[0.01, 0.9]]}
    made = charts.curves(*plots.panels_of_lines({"a": results.Line(trace=trace)}))
    assert [panel["y"]["log"] for panel in held(made)["panels"]] == [True, False]


def test_looks_tell_as_many_settings_apart_as_pictures_do():
    settings = [setting(str(i), [0.5]) for i in range(plots.SHOWN + 3)]
    legend = of_runs(charts.curves, settings, ("accuracy",))["legend"]
    looks = {(entry["colour"], tuple(entry["dash"])) for entry in legend}
    assert len(legend) == len(looks) == plots.SHOWN


def test_only_what_compares_shares_a_panel():
    settings = [
        setting("both", [0.8, 0.9], [guarantee(2.0), guarantee(0.5, "claimed")]),
        setting("client", [0.7], [guarantee(4.0, unit="client")]),
        setting("none", [0.95], [guarantee(None)]),
        setting("elsewhere", [0.99], [guarantee(None)], "mnist"),
        setting("conditional", [0.6], [guarantee(1.0, "conditional")]),
    ]
    chart = held(charts.frontier(settings))
    assert [p["title"] for p in chart["panels"]] == [
        "client, add remove, seen by the server",
        "example, add remove, seen by the server",
    ]
    assert [e["name"] for e in chart["legend"]] == ["both", "client", "none", "conditional"]
    example = by_name(chart, 1)
    assert {p[4]: p[:2] for p in example["both"]} == {
        "proved": [2.0, 0.85],
        "claimed": [0.5, 0.85],
    }
    (line,) = [n for n in chart["panels"][1]["lines"] if len(n.get("marks", ())) == 2]
    assert dict(zip(line["hollow"], line["marks"])) == {False: "circle", True: "rectRot"}
    level = example["none"]
    assert {p[1] for p in level} == {0.95} and [p[0] for p in level] == sorted(p[0] for p in level)
    ends = {(p["y"]["low"], p["y"]["high"]) for p in chart["panels"]}
    assert len(ends) == 1  # one axis for all, so that panels compare
    assert charts.frontier([setting("none", [0.9], [guarantee(None)])]) is None


@pytest.mark.parametrize(
    "epsilons", [(0.0,), (0.0, 0.2), (0.0, 1e-6, 50.0), (1.0,), (1e-300, 1e99)]
)
def test_every_epsilon_has_a_place_on_the_axis(epsilons):
    settings = [setting(str(e), [0.3], [guarantee(e)]) for e in epsilons]
    (panel,) = held(charts.frontier(settings))["panels"]
    places = [line["points"][0][0] for line in panel["lines"]]
    assert places == sorted(places) and len(set(places)) == len(epsilons)
    assert all(0 < panel["x"]["low"] <= p <= panel["x"]["high"] < math.inf for p in places)
    assert ("zero" in panel["x"]) == (0.0 in epsilons)
    assert epsilons[0] or places[0] == panel["x"]["zero"]


def test_lines_of_an_experiment_are_rows():
    spread = results.Spread
    lines = {
        "a": results.Line(spread(0.8, 0.1), epsilon_claimed=0.3, epsilon_proved=0.25),
        "gone": results.Line(),
        "b": results.Line([0.5]),
    }
    (panel,) = held(charts.lines(lines))["panels"]
    assert panel["y"]["rows"] == ["a", "b"] and panel["lines"][0]["hollow"] == [False, True]
    assert panel["y"]["right"] == ["ε 0.3 claimed, 0.25 proved", ""]
    assert panel["lines"][0]["points"] == [[0.8, 0, 0.7, 0.9], [0.5, 1]]
    assert charts.lines({"b": lines["b"]}) is None


def test_points_of_a_study_keep_their_panels():
    points = [
        point("p", "FedAvg", 4.0, 0.5, epsilon=3.0),
        point("p", "FedAvg", 16.0, 0.7),
        point("p", "FedAvg, no noise", None, 0.9, epsilon=None),
        point("q", "SCAFFOLD", 2.0, 0.6),
    ]
    chart = held(charts.study(points, "ε"))
    first = by_name(chart)
    assert first["FedAvg"] == [[4.0, 0.5, 0.49, 0.51, "ε 3"], [16.0, 0.7, 0.69, 0.71]]
    assert [p[0] for p in first["FedAvg, no noise"]] == [4.0, 16.0]
    assert list(by_name(chart, 1)) == ["SCAFFOLD"]
    colours = {e["name"]: e["colour"] for e in chart["legend"]}
    assert colours["FedAvg"] == colours["FedAvg, no noise"] != colours["SCAFFOLD"]
    assert charts.study([point("p", "a", 4.0, None)], "ε") is None


def test_a_claim_without_proof_has_no_number():
    points = [
        point("p", "one", 4.0, 2.0, claimed=4.0, half=None),
        point("p", "other", 4.0, None, claimed=4.0, epsilon=None, half=None),
    ]
    chart = held(charts.study(points, "claimed ε"))
    (panel,) = chart["panels"]
    (without,) = by_name(chart)["other"]
    assert without[1] == panel["y"]["top"] and without[4] == "nothing is proved"
    assert by_name(chart)["proved = claimed"] == [[4.0, 4.0]] and panel["y"]["log"]


def test_audits_are_rows_below_their_panels():
    common = dict(half=None, audited=1.0, ceiling=9.0)
    points = [
        point("first", "a", None, None, claimed=0.5, **common | dict(epsilon=3.0)),
        point("second", "b", None, None, **common | dict(epsilon=None)),
    ]
    chart = held(charts.audits(points, "ε"))
    (panel,) = chart["panels"]
    assert panel["y"]["rows"] == ["first", "a", "second", "b"] and panel["y"]["headings"] == [0, 2]
    lines = by_name(chart)
    assert [p[:2] for p in lines["audited: all below is refuted"]] == [[1.0, 1], [1.0, 3]]
    assert lines["proved"] == [[3.0, 1]] and lines["claimed and refuted"] == [[0.5, 1]]
    assert lines["at most, with so many runs"][0] == [9.0, 1, 1.0, 9.0] and "claimed" not in lines
    assert charts.audits([point("p", "a", 1.0, 0.5)], "ε") is None
    alone = [point("p", "a", None, None, half=None, audited=1.0, epsilon=2.0)]
    (line, *_) = held(charts.audits(alone, "ε"))["panels"][0]["lines"]
    assert line["points"] and plots.audits(alone, "ε") is not None  # no ceiling is known
