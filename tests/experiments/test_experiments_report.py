"""The page of experiments: their claims, what holds, how far lines are apart; what is rejected."""

import json

import numpy as np
import pytest
from helpers.paths import RESULTS
from helpers.report_pages import VERSIONS, Tables

from experiments.harness import pictures, report, results
from jfl.report import document as markup

LINES = "Lines of the experiment, with ε in its view"
APART = "Range of final test accuracy"
CLAIMS = "The paper's claims, checked on these results"


def shown(*paths):
    return Tables(
        markup.page(report.assemble([report.read_source(p) for p in paths]), report.MARKS)
    )


def records(parsed, caption):
    head, *rows = parsed.tables[caption]
    return [dict(zip(head, r)) for r in rows]


@pytest.fixture
def experiment(tmp_path):
    """A folder of an experiment, and a function that changes its results."""
    line = dict(
        accuracy=[0.5, 0.7],
        loss=[1, 1],
        epsilon_claimed=1.25,
        seconds_per_round=0.5,
        paper=0.8,
    )
    found = dict(
        format=results.FORMAT,
        experiment="fig",
        module="noble2022",
        title="A figure",
        quick=True,
        seeds=[0, 1],
        lines={"DP, K=5": line, "bare": line | dict(columns={"bits": 3})},
        verdicts=[dict(claim="it rises", verdict="not confirmed", seen="it falls")],
        versions=VERSIONS,
        tables=[dict(caption=results.NUMBERS, columns=["m", "value"], rows=[["8", 0.125]])],
        notes=["of eight"],
    )
    (tmp_path / "fig").mkdir()

    def edited(**changes):
        values = {k: v for k, v in (found | changes).items() if v is not None}
        (tmp_path / "fig" / "results.json").write_text(json.dumps(values))
        return tmp_path / "fig"

    edited.found = found
    edited()
    return edited


# --- a figure


def test_an_experiment_has_its_lines_numbers_and_verdicts(experiment):
    parsed = shown(experiment())
    first, other = records(parsed, LINES)
    of_line = ["DP, K=5", "0.8", "0.6000 ± 1.2706", "2", "1.25", "", "1", "0.5", ""]
    assert list(first.values()) == of_line and other["bits"] == "3"
    assert list(first)[4:] == ["claimed ε", "proved ε", "loss", "s/round", "bits"]
    verdict = {"claim": "it rises", "verdict": "not confirmed", "why: what was seen": "it falls"}
    assert records(parsed, CLAIMS) == [verdict]
    assert records(parsed, results.NUMBERS) == [{"m": "8", "value": "0.125"}]
    assert "of eight" in parsed.words and "A quick run" in parsed.words


@pytest.mark.parametrize(
    "changes, command",
    [
        (
            dict(quick=False, only=["DP, K=5", "bare"]),
            "papers noble2022 fig --lines 'DP, K=5' bare",
        ),
        (dict(module="x; rm"), "papers 'x; rm' fig --quick"),  # words of a file are one word
        (dict(module="studies"), "studies fig --quick"),
    ],
)
def test_the_line_that_runs_an_experiment_again(experiment, changes, command):
    assert f"python -m experiments.{command} --out NEW" in shown(experiment(**changes)).words


def test_lines_and_seeds_that_failed_are_told(experiment, tmp_path):
    bare = experiment.found["lines"]["bare"] | dict(accuracy=[0.5], seeds=[0], failed=[1])
    lines = experiment.found["lines"] | dict(bare=bare)
    failed = dict(all="all of its runs failed", thrown="NaN")
    folder = experiment(lines=lines, failed=failed, unread=dict(svhn="need data"))
    rows = [("DP, K=5", "2"), ("bare", "1 (+1 failed)")]
    rows += [("all", "0 (+2 failed)"), ("thrown", "0 (+2 failed)")]
    assert [(r["line"], r["seeds"]) for r in records(shown(folder), LINES)] == rows
    notes = ["Failed: all: all of its runs failed", "Failed: thrown: NaN"]
    notes += ["Not run: svhn: need data"]
    inner = json.loads((folder / "results.json").read_text())
    whole = dict(format=results.FORMAT, experiments=dict(fig=inner, fig2=inner))
    (tmp_path / "some.json").write_text(json.dumps(whole))
    for path, after in ((folder, ""), (tmp_path / "some.json", " (fig, fig2)")):
        document = report.assemble([report.read_source(path)])
        (claims,) = (s.blocks for s in document.sections if s.heading == "Claims")
        visible = [words for b in claims if isinstance(b, markup.Items) for words in b.items]
        told = [w for w in visible if w.startswith(("Failed", "Not run"))]
        assert told == [note + after for note in notes]


# --- what is written


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


# --- stored results of papers


# --- studies


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


def study(folder, points):
    folder.mkdir(exist_ok=True)
    found = dict(
        format=results.FORMAT,
        module="studies",
        experiment="frontier",
        quick=True,
        title="Frontier",
        xlabel="proved ε",
        points=points,
        verdicts=[dict(claim="it gains", verdict="confirmed", seen="+0.2")],
        settings=dict(interval="95 %"),
        versions=VERSIONS,
    )
    (folder / "frontier.json").write_text(json.dumps(found))
    return folder / "frontier.json"


def test_a_study_has_its_points_and_guarantees(tmp_path):
    file = study(tmp_path, POINTS)
    parsed = shown(file, RESULTS / "li2025.json")
    first, _, third, level = records(
        parsed, "Points of the study, each with the guarantee of its runs"
    )
    told = dict(line="FedAvg", accuracy="0.5000 ± 0.0100", seeds="2", chosen="lr = 0.3")
    told |= {"proved ε": "4", "δ": "1e-05", "unit": "example", "adjacency": "replace one"}
    assert {k: first[k] for k in told} == told
    assert (third["failed"], level["proved ε"], level["δ"]) == ("1", "none", "")
    verdicts = records(parsed, "The study's claims, checked on these results")
    assert verdicts[0]["verdict"] == "confirmed"
    assert "python -m experiments.studies frontier --quick --out NEW" in parsed.words
    row = records(parsed, APART)[0]
    least = (row["experiment"], row["least accurate"])
    assert least == ("frontier (quick)", "0.500: a: FedAvg at 4")
    assert row["points apart"] == "40.0" and row["claimed ε holds"] == ""
    claims = [
        point("p", "li2025", 4.0, None, claimed=4.0, epsilon=None),
        point("p", "noble", 4.0, 2.0, claimed=4.0, epsilon=2.0),
    ]
    both = shown(study(tmp_path, claims), study(tmp_path / "other", POINTS))
    assert records(both, APART)[0]["claimed ε holds"] == "1 of 2"


def test_a_study_is_drawn_in_panels():
    points = [*POINTS, point("b", "FedAvg", 1.0, 0.4), point("b", "FedAvg", 2.0, None)]
    figure = pictures.study([results.checked("points", p, results.Point) for p in points], "ε")
    one, two = figure.axes
    assert [list(line.get_xdata()) for line in one.lines][:2] == [[4.0, 16.0], [4.0]]
    level = one.lines[2]  # without noise
    assert list(level.get_ydata()) == [0.9, 0.9] and level.get_linestyle() == "--"
    assert level.get_color() == one.lines[0].get_color() != one.lines[1].get_color()
    assert len(two.lines[0].get_xdata()) == 1


def test_a_page_is_written_next_to_its_file_or_where_it_is_asked(experiment, tmp_path):
    file = experiment() / "results.json"
    assert str(file.with_suffix(".html")) in report.write([file])
    out = tmp_path / "out.html"
    assert report.main([str(file), str(study(tmp_path / "in", POINTS)), "--out", str(out)]) == 0
    ids = [attrs["id"] for _, attrs in Tables(out.read_text()).tags if "id" in attrs]
    assert len(set(ids)) == len(ids) and "| confirmed |" in out.with_suffix(".md").read_text()


# --- refused


def of_format(text):
    return '{"format": 2, ' + text + "}"


REFUSED = dict(
    no_file=(None, "no .*results.json"),
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
def test_what_is_no_result_is_refused_by_name_and_nothing_is_written(tmp_path, text, words):
    folder = tmp_path / "run"
    folder.mkdir()
    if text is not None:
        (folder / "results.json").write_text(text)
    with pytest.raises(ValueError, match=words) as error:
        report.write([folder], tmp_path / "out.html")
    assert str(folder) in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
