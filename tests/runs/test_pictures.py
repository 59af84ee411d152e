"""Labels at the ends of lines."""

import numpy as np
import pytest

from jfl.runs import pictures


def labelled(*ends, size=9.0):
    """Draw lines that end at these values, and return the axes with their labels."""
    figure, ax = pictures.new_figure((6, 3))
    for i, end in enumerate(ends):
        ax.plot([0, 1, 2], [0, 0.5, end], label=f"line {i}")
    ax.set_ylim(0, 1)
    pictures.label_lines(ax, size)
    figure.draw_without_rendering()
    return ax


def boxes(ax):
    return [text.get_window_extent() for text in ax.texts]


def test_a_label_is_level_with_its_line_and_has_its_colour():
    ax = labelled(0.2, 0.8)
    assert [text.get_text() for text in ax.texts] == ["line 0", "line 1"]
    assert [text.get_position()[1] for text in ax.texts] == pytest.approx([0.2, 0.8])
    assert [text.get_color() for text in ax.texts] == [line.get_color() for line in ax.lines]
    assert all(box.x0 > ax.get_window_extent().x1 for box in boxes(ax))


@pytest.mark.parametrize("ends", [(0.5,) * 6, (0.1, 0.48, 0.5, 0.52, 0.9), (1.0, 1.0, 1.0)])
def test_labels_do_not_overlap_and_keep_the_order_of_the_lines(ends):
    places = boxes(labelled(*ends))
    assert all(low.y1 <= high.y0 + 1 for low, high in zip(places, places[1:]))
    shifts = np.array([text.get_position()[1] for text in labelled(*ends).texts]) - np.sort(ends)
    if 0.1 in ends:  # labels far from all others stay in their places
        assert shifts[[0, -1]] == pytest.approx(0, abs=1e-6) and abs(shifts).max() > 0.01


def test_horizontal_lines_and_error_bars_are_labelled_and_unnamed_lines_are_not():
    figure, ax = pictures.new_figure((6, 3))
    ax.errorbar([1, 2], [0.1, 0.3], [0.1, 0.1], label="bars\nof errors")
    ax.axhline(0.7, label="level")
    ax.plot([1, 2], [0.5, np.nan])
    ax.plot([1, 2], [0.5, np.nan], label="ends early")
    ax.set(yscale="log", ylim=(0.01, 1))
    pictures.label_lines(ax)
    words = {text.get_text(): text.get_position()[1] for text in ax.texts}
    at = {"bars\nof errors": 0.3, "ends early": 0.5, "level": 0.7}
    assert list(words) == list(at)
    assert words["level"] == pytest.approx(1 + np.log10(0.7) / 2, abs=0.08)


@pytest.mark.parametrize("views", [("server",), ("server", "third party")])
def test_a_divided_picture_says_to_what_its_epsilons_belong(views, monkeypatch):
    """At the axis if all settings have the same unit and view, and otherwise in the labels."""
    kept = []
    monkeypatch.setattr(pictures, "_save", lambda figure, path: kept.append(figure))
    groups = [
        dict(
            name="fedavg",
            point=dict(a=a, lr=lr),
            privacy=f"ε = {lr} (example, {views[a % len(views)]})",
            promise=f"example, {views[a % len(views)]}",
            round=[1, 2],
            accuracy=[[0.2, 0.3]],
            epsilon=float(lr),
        )
        for a in range(3)
        for lr in range(1, 4)
    ]
    pictures.draw_accuracy("p.png", groups, "")
    (figure,) = kept
    labels = [text.get_text() for text in figure.legends[0].texts]
    ends = {label.partition(" ")[2] for label in labels}
    if len(views) == 1:
        assert figure.axes[-1].get_xlabel() == "ε (example, server)" and ends == {""}
    else:
        assert "see the labels" in figure.axes[-1].get_xlabel()
        assert ends == {"(example, server)", "(example, third party)"}


def test_the_style_is_known_to_matplotlib():
    import matplotlib

    with matplotlib.rc_context(pictures.STYLE):
        colours = [look["color"] for look in matplotlib.rcParams["axes.prop_cycle"]]
    assert len(set(colours)) == 7 and set(colours) < set(pictures.PALETTE)
