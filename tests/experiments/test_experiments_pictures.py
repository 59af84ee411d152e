"""The curves of an experiment's lines against rounds: which panels they are drawn in."""

import numpy as np
import pytest

from experiments.harness import pictures, results
from jfl.report import plots


def traced(curve, rounds=(1, 2)):
    values = [[v / 2 for v in curve], list(curve)]
    return results.Line(trace=dict(round=[list(rounds)] * 2, curve=values))


def test_lines_of_an_experiment_are_drawn_against_rounds_a_panel_for_each_setting():
    """A line without a setting stands in all panels, one without rounds in none."""
    names = [f"{m}, {s}" for s in ("K=5", "K=9") for m in ("DP-A", "DP-B", "C")]
    lines = {name: traced((i / 10, i / 5)) for i, name in enumerate(names)}
    lines |= {"no privacy": traced((0.9, 1.0)), "points": results.Line(accuracy=[0.5])}
    legend, panels = pictures.panels_of_lines(lines)
    assert [(p.title, p.label) for p in panels] == [
        ("K=5", "test accuracy"),
        ("K=9", "test accuracy"),
    ]
    assert set(legend) == {"DP-A", "DP-B", "C", "no privacy"}
    for ax, panel in zip(plots.curves(legend, panels).axes, panels):
        assert ax.get_title() == panel.title and len(ax.lines) == 4
        for i, line in zip(panel.curves, ax.lines):
            name = legend[i] if legend[i] == "no privacy" else f"{legend[i]}, {panel.title}"
            values = np.array(lines[name].trace["curve"])
            np.testing.assert_allclose(line.get_ydata(), values.mean(0))
    assert pictures.panels_of_lines({"points": lines["points"]})[1] == []
    assert plots.curves([], []) is None


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
    _, panels = pictures.panels_of_lines({name: traced((0.1, 0.2)) for name in names})
    assert len(panels) == settings and sum(len(p.curves) for p in panels) >= len(set(names))
    assert all("party" in p.title or "_" not in p.title for p in panels)


def test_a_phrase_stays_one_word():
    """As Figure 1 of Noble et al. names its lines."""
    columns = ("(0,0)", "(1,1)", "(5,5)")
    ends = [(c, end) for end in ("", ", no l2", ", first rates") for c in columns]
    names = [f"{m}, K={k}, {c}{end}" for c, end in ends for m in "AB" for k in (50, 100)]
    legend, panels = pictures.panels_of_lines({name: traced((0.1, 0.2)) for name in names})
    assert [p.title for p in panels] == [*columns, "no l2", "first rates"]
    assert legend[:4] == ["A, K=50", "A, K=100", "B, K=50", "B, K=100"]
    assert "A, K=50, (0,0)" in legend  # without l2, and at first rates


def test_rounds_that_differ_between_seeds_are_not_drawn():
    uneven = results.Line(trace=dict(round=[[1, 2], [1]], curve=[[0.1, 0.2], [0.1]]))
    apart = results.Line(trace=dict(round=[[1, 2], [1, 3]], curve=[[0.1, 0.2], [0.1, 0.2]]))
    assert pictures.panels_of_lines({"a": uneven, "b": apart})[1] == []


def test_a_curve_that_diverges_has_gaps_and_a_logarithmic_axis():
    values = np.array([[1.0, 100.0, np.nan], [2.0, 50.0, np.inf]])
    diverging = plots.Setting("a", {"loss": ([1, 2, 3], values)}, [], [], "")
    (ax,) = plots.curves(["a"], plots.panels_of_runs([diverging], ("loss",))).axes
    assert ax.get_yscale() == "log"
    flat = plots.Setting("a", {"loss": ([1, 2], np.array([[1.0, 2.0]]))}, [], [], "")
    (ax,) = plots.curves(["a"], plots.panels_of_runs([flat], ("loss",))).axes
    assert ax.get_yscale() == "linear"
    trace = {"round": [[1, 2]], "test loss": [[1.0, 100.0]], "curve": [[0.01, 0.9]]}
    made = plots.curves(*pictures.panels_of_lines({"a": results.Line(trace=trace)}))
    assert [ax.get_yscale() for ax in made.axes] == ["log", "linear"]


def test_as_many_settings_look_different_as_are_shown():
    looks = {plots.look_of(i) for i in range(plots.SHOWN)}
    assert len(looks) == plots.SHOWN
