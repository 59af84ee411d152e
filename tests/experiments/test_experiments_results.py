"""The files of results of experiments, and the pictures of studies."""

import numpy as np
import pytest
from helpers.paths import RESULTS
from helpers.report_pages import VERSIONS

from experiments.harness import pictures, results


def point(panel, line, x, mean, **more):
    of_point = dict(
        panel=panel,
        line=line,
        x=x,
        mean=mean,
        half=0.01,
        values={"0": mean, "1": mean},
        failed=0,
        seeds=[0, 1],
        chosen={"lr": 0.3},
        epsilon=x,
        delta=1e-5,
        unit="example",
        adjacency="replace_one",
        view="server",
        method="pld",
        caveats=["float32 noise"],
        config=dict(lr=0.3, rounds=12, epsilon=x),
    )
    return of_point | more


UNPROVED = dict.fromkeys(("epsilon", "delta", "unit", "caveats"))
POINTS = [
    point("a", "FedAvg", 4.0, 0.5),
    point("a", "FedAvg", 16.0, 0.7),
    point("a", "SCAFFOLD", 4.0, 0.6, failed=1),
    point("a", "FedAvg, no noise", None, 0.9, **UNPROVED),
]


def test_what_is_written_is_read_again(tmp_path):
    found = dict(
        experiment="fig",
        title="A figure",
        lines={"a": dict(accuracy=[0.5, None], loss=dict(mean=1.0, half=0.1), columns={"k": 3})},
        points=[point("a", "b", 1.0, 0.5)],
        verdicts=[dict(claim="c", verdict="confirmed", seen="s")],
        columns=["m", "value"],
        rows=[[8, 0.125]],
        caption="of eight",
        reduced=dict(fig="small"),
        constants=dict(one=dict(x=1.0), other=dict(x=float("nan"), y=2)),
        start=0.25,
        commit="abc",
        versions=VERSIONS,
        experiments={"inner": dict(title="of it", unread={"svhn": "not here"})},
    )
    results.write(tmp_path / "new" / "some.json", results.of(found))
    again = results.read(tmp_path / "new" / "some.json")
    assert again == results.of(found)
    assert again.notes == ["At reduced size: fig: small", "of eight"]
    assert [(t.caption, t.columns, t.rows) for t in again.tables] == [
        (results.NUMBERS, ["m", "value"], [[8, 0.125]]),
        ("constants", ["constants", "x", "y"], [["one", 1.0, None], ["other", None, 2]]),
    ]
    assert again.settings == dict(start=0.25) and again.versions == VERSIONS | dict(commit="abc")
    assert [e.name for e in again.parts()] == ["fig", "inner"]
    with pytest.raises(ValueError, match="results of fig, .*verdict.*but got .*'maybe'"):
        results.of(found | dict(verdicts=[dict(claim="c", verdict="maybe")]))


def test_measured_numbers_are_rounded_and_epsilons_are_not(tmp_path):
    values, epsilon = [float(np.float32(v)) for v in (0.1, 1 / 3, 1e-7)], 1.0000000004
    line = dict(accuracy=values, trace=dict(loss=[values]), epsilon_proved=epsilon)
    line["columns"] = {"ε of a round": epsilon, "clip norm": epsilon}
    cells = dict(columns=["ε"], rows=[[epsilon]])
    points = [point("a", "b", x, epsilon) for x in (1.0, epsilon)]
    results.write(tmp_path / "a.json", results.of(dict(lines=dict(a=line), points=points, **cells)))
    again = results.read(tmp_path / "a.json")
    kept, curve = again.lines["a"], again.lines["a"].trace["loss"][0]
    assert [*np.float32(kept.accuracy)] == values and kept.accuracy != values
    assert curve == [0.1, 0.3333, kept.accuracy[-1]]
    assert kept.columns == {"ε of a round": epsilon, "clip norm": 1.0}
    assert again.tables[0].rows == [[epsilon]] and kept.epsilon_proved == epsilon
    assert again.config == dict(lr=0.3, rounds=12)  # which the points share
    own = [(p.epsilon, p.config) for p in again.points]
    assert own == [(x, {"epsilon": x}) for x in (1, epsilon)]


def test_stored_results_are_as_they_are_written(tmp_path):
    """A paper's are written by test_experiments_verdicts.py; these are of the studies."""
    for path in RESULTS.glob("study_*.json"):
        results.write(tmp_path / path.name, results.read(path))
        assert (tmp_path / path.name).read_text() == path.read_text(), path.name


def test_a_study_is_drawn_in_panels():
    points = [*POINTS, point("b", "FedAvg", 1.0, 0.4), point("b", "FedAvg", 2.0, None)]
    figure = pictures.study([results.checked("points", p, results.Point) for p in points], "ε")
    one, two = figure.axes
    assert [list(line.get_xdata()) for line in one.lines][:2] == [[4.0, 16.0], [4.0]]
    level = one.lines[2]  # without noise
    assert list(level.get_ydata()) == [0.9, 0.9] and level.get_linestyle() == "--"
    assert level.get_color() == one.lines[0].get_color() != one.lines[1].get_color()
    assert len(two.lines[0].get_xdata()) == 1


def of_format(text):
    return '{"format": 2, ' + text + "}"


REFUSED = dict(
    another_kind=('{"columns": ["a"], "rows": [[1]]}', "expected format 2"),
    not_an_object=("[]", "expected "),
    half=('{"experiments": {', "expected "),
    deep=('{"lines": ' + 100_000 * "[", "RecursionError"),
    format_in_words=('{"format": "1", "title": "a"}', "got format '1'"),
    earlier=('{"format": 1, "title": "a"}', "expected format 2, .* run the experiment again"),
    nothing=(of_format('"experiments": {"a": {"seeds": [1]}}'), "expected results of an"),
    another_key=(of_format('"experiment": "a", "lr": 0.1'), "unknown field `lr`"),
    words=(of_format('"lines": {"a": {"accuracy": ["b"]}}'), "expected `int . float . null`"),
    infinite=('{"lines": {"a": {"accuracy": [1e999]}}}', "1e999 is not a number"),
    nan=('{"lines": {"a": {"accuracy": [NaN]}}}', "NaN is not a number"),
    negative=(of_format('"lines": {"a": {"epsilon_proved": -5}}'), "expected `int` >= 0"),
    partly=(of_format('"verdicts": [{"claim": "a", "verdict": "partly"}]'), "'partly'"),
    ragged=(
        of_format('"tables": [{"caption": "", "columns": ["b"], "rows": [[1, 2]]}]'),
        "1 cells",
    ),
)


@pytest.mark.parametrize("text, words", REFUSED.values(), ids=REFUSED)
def test_a_file_that_holds_no_results_is_refused_by_its_name(tmp_path, text, words):
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=words) as error:
        results.read(file)
    assert str(file) in str(error.value)
