"""The page of experiments: their claims, what holds, how far lines are apart; what is rejected."""

import json
import re

import numpy as np
import pytest
from helpers.paths import RESULTS
from helpers.report_pages import VERSIONS, Tables

from experiments.harness import pictures, report, results
from jfl.report import document as markup
from jfl.report import plots

PAPERS = ("noble2022", "chen2024", "li2025", "ranaweera2025", "talaei2024")
LINES = "Lines of the experiment, with ε in its view"


def shown(*paths):
    sources = [report.read_source(p) for p in paths]
    return Tables(markup.page(report.assemble(sources), report.MARKS))


def records(parsed, caption):
    head, *rows = parsed.tables[caption]
    return [dict(zip(head, r)) for r in rows]


def edit(folder, **changes):
    path = folder / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def experiment(tmp_path):
    folder = tmp_path / "fig"
    folder.mkdir()
    line = dict(
        accuracy=[0.5, 0.7],
        loss=[1, 1],
        epsilon_claimed=1.25,
        epsilon_proved=None,
        seconds_per_round=0.5,
        paper=0.8,
    )
    (folder / "results.json").write_text(
        json.dumps(
            dict(
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
        )
    )
    return folder


def test_an_experiment_has_its_verdicts(experiment):
    parsed = shown(experiment)
    first, other = records(parsed, "Lines of the experiment, with ε in its view")
    assert list(first.values()) == [
        "DP, K=5",
        "0.8",
        "0.6000 ± 1.2706",
        "2",
        "1.25",
        "",
        "1",
        "0.5",
        "",
    ]
    assert (
        list(first)[4:] == ["claimed ε", "proved ε", "loss", "s/round", "bits"]
        and other["bits"] == "3"
    )
    assert records(parsed, "The paper's claims, checked on these results") == [
        {"claim": "it rises", "verdict": "not confirmed", "why: what was seen": "it falls"}
    ]
    assert (
        records(parsed, "Numbers of the experiment") == [{"m": "8", "value": "0.125"}]
        and "of eight" in parsed.words
    )
    assert "A quick run" in parsed.words


@pytest.mark.parametrize(
    "changes, command",
    [
        (dict(), "papers noble2022 fig --quick"),
        (
            dict(quick=False, only=["DP, K=5", "bare"]),
            "papers noble2022 fig --lines 'DP, K=5' bare",
        ),
        (dict(module="x; rm"), "papers 'x; rm' fig --quick"),  # words of a file are one word
        (dict(module="studies"), "studies fig --quick"),
    ],
)
def test_the_line_that_runs_an_experiment_again(experiment, changes, command):
    edit(experiment, **changes)
    assert f"python -m experiments.{command} --out NEW" in shown(experiment).words


def test_lines_and_seeds_that_failed_are_told(experiment, tmp_path):
    lines = json.loads((experiment / "results.json").read_text())["lines"]
    lines["bare"] |= dict(accuracy=[0.5], seeds=[0], failed=[1])
    failed = dict(all="all of its runs failed", thrown="NaN")
    edit(experiment, lines=lines, failed=failed, unread=dict(svhn="need data"))
    rows = [
        ("DP, K=5", "2"),
        ("bare", "1 (+1 failed)"),
        ("all", "0 (+2 failed)"),
        ("thrown", "0 (+2 failed)"),
    ]
    assert [(r["line"], r["seeds"]) for r in records(shown(experiment), LINES)] == rows
    notes = [
        "Failed: all: all of its runs failed",
        "Failed: thrown: NaN",
        "Not run: svhn: need data",
    ]
    inner = json.loads((experiment / "results.json").read_text())
    whole = dict(format=results.FORMAT, experiments=dict(fig=inner, fig2=inner))
    (tmp_path / "some.json").write_text(json.dumps(whole))
    for path, after in ((experiment, ""), (tmp_path / "some.json", " (fig, fig2)")):
        document = report.assemble([report.read_source(path)])
        (claims,) = (s.blocks for s in document.sections if s.heading == "Claims")
        visible = [words for b in claims if isinstance(b, markup.Items) for words in b.items]
        assert [w for w in visible if w.startswith(("Failed", "Not run"))] == [
            n + after for n in notes
        ]
        assert not any("As the file gives them" in str(s) for s in document.sections)


@pytest.mark.parametrize("given", [dict(format=1), {}], ids=["numbered", "before numbers"])
def test_results_of_an_earlier_version_are_refused_with_what_to_do(experiment, given):
    found = json.loads((experiment / "results.json").read_text())
    del found["format"]
    (experiment / "results.json").write_text(json.dumps(found | given))
    with pytest.raises(
        ValueError, match="expected format 2, .*.* run the experiment again in its fold"
    ):
        report.read_source(experiment)


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
    with pytest.raises(
        ValueError, match="results of fig, .*verdict.*: expected .*, but got .*'maybe'"
    ):
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
    assert curve == [0.1, 0.333333, kept.accuracy[-1]]
    assert kept.columns == {"ε of a round": epsilon, "clip norm": 1.0}
    assert again.tables[0].rows == [[epsilon]] and kept.epsilon_proved == epsilon
    assert again.config == dict(lr=0.3, rounds=12)  # which the points share
    assert [(p.epsilon, p.config) for p in again.points] == [
        (x, {"epsilon": x}) for x in (1, epsilon)
    ]


def test_stored_results_are_as_they_are_written(tmp_path):
    for path in RESULTS.glob("*.json"):
        if path.read_text().startswith(f'{{\n "format": {results.FORMAT}'):
            results.write(tmp_path / path.name, results.read(path))
            assert (tmp_path / path.name).read_text() == path.read_text(), path.name


def verdicts(value):
    """All verdicts in a file, wherever they stand."""
    if isinstance(value, dict):
        own = [value] if {"claim", "verdict"} <= set(value) else []
        return own + [v for inner in value.values() for v in verdicts(inner)]
    return [v for inner in value for v in verdicts(inner)] if isinstance(value, list) else []


def test_the_five_papers_stand_on_one_page():
    parsed = shown(*(RESULTS / f"{p}.json" for p in PAPERS))
    for paper, row in zip(PAPERS, records(parsed, "Claims that were checked"), strict=True):
        given = verdicts(json.loads((RESULTS / f"{paper}.json").read_text()))
        own = [v for v in given if v.get("whose") == "ours"]
        checks = len(given) - len(own)
        assert row["results"] == paper and row["checks"] == str(checks) and checks >= 5
        counted = [int(row[v]) for v in results.VERDICTS if v in row]
        assert sum(counted) == int(row["statements"]) <= checks
        # each checked once, but for two theorems on two problems
        assert paper != "noble2022" or int(row["statements"]) == checks - 2
        assert results.RULE in parsed.words and own
    apart = {
        r["experiment"]: r for r in records(parsed, "How far lines are apart: final test accuracy")
    }
    clock = json.loads((RESULTS / "li2025.json").read_text())["experiments"]["clock"]["lines"]
    means = {n: np.mean(v["accuracy"]) for n, v in clock.items()}
    row = apart["li2025: clock"]
    ends = [choose(means, key=means.get) for choose in (min, max)]
    assert [row["least accurate"], row["most accurate"]] == [f"{means[n]:.3f}: {n}" for n in ends]
    assert row[
        "points apart"
    ] == f"{100 * (max(means.values()) - min(means.values())):.1f}" and row["lines"] == str(
        len(clock)
    )
    pairs = [
        (v["epsilon_claimed"], v.get("epsilon_proved"))
        for v in clock.values()
        if "epsilon_claimed" in v
    ]
    assert (
        row["claimed ε holds"]
        == f"{sum(b is not None and b <= a for a, b in pairs)} of {len(pairs)}"
    )
    for part in (
        "noble2022: table1_small",
        "chen2024: fig1ab",
        "ranaweera2025: study, linear, noise multiplier 1.33",
        "ranaweera2025: sample_mnist",
        "talaei2024: study, scenario 3",
    ):
        assert part in apart
    took = json.loads((RESULTS / "chen2024.json").read_text())["experiments"]["fig6a"]["seconds"]
    assert apart["chen2024: fig6a"]["minutes"] == f"{took / 60:.3g}"
    assert apart["noble2022: table1_small"]["minutes"] == ""
    assert "python -m experiments.papers chen2024 fig6a --out NEW" in parsed.words
    assert "python -m experiments.papers li2025 fig2-mnist --out NEW" in parsed.words
    made_by = [*records(parsed, "The same everywhere"), *records(parsed, "Differences")]
    assert "7a797fea70a850b8" in str(made_by) and "seeds" in str(made_by)


@pytest.mark.parametrize(
    "paper, experiment, line, cells",
    [
        (
            "chen2024",
            "fig3",
            "Synthetic-IID DPNFL",
            {
                "ours": "0.5391 ± 0.1080",
                "seeds": "5",
                "paper's figure": "78.35 ± 0.29",
                "claimed ε": "0.3",
                "proved ε": "0.1143",
            },
        ),
        (
            "li2025",
            "clock",
            "mnist iid no privacy",
            {"ours": "0.9125 ± 0.0021", "seeds": "5", "loss": "0.3173"},
        ),
        (
            "noble2022",
            "table1",
            "sigma=10, K=1",
            {
                "ours": "0.5652 ± 0.0101",
                "seeds": "30",
                "claimed ε": "3",
                "proved ε": "0.4311",
                "paper's figure": "27.41 ± 0.71 %",
            },
        ),
        (
            "noble2022",
            "fig1",
            "DP-FedAvg, K=50, (5,5), no l2",
            {
                "ours": "0.7138 ± 0.0392",
                "seeds": "5",
                "claimed ε": "12.91",
                "proved ε": "0.8601",
                "ln(F - F*)": "-1.476",
            },
        ),
        (
            "noble2022",
            "fig5",
            "DP-SCAFFOLD-warm, K=50, alpha=5",
            {"ln(F - F*)": "-3.564", "seeds": "5"},
        ),
        (
            "noble2022",
            "fedavg_eta1_small",
            "FedAvg, eta 0 = 1",
            {"ln(F - F*), at the end": "-2.248", "seeds": "1"},
        ),
        (
            "noble2022",
            "table1_small",
            "K=1, proved epsilon 3",
            {"ours": "0.6188", "noise multiplier": "0.2197"},
        ),
        (
            "ranaweera2025",
            "client_mnist",
            "vanilla σ=3",
            {"ours": "0.7670 ± 0.0297", "seeds": "5", "proved ε": "1.836"},
        ),
        (
            "ranaweera2025",
            "study, linear, noise multiplier 1.33",
            "prior:0.1",
            {
                "ours": "0.8768 ± 0.0059",
                "points above iso": "+0.43 ± 0.63",
                "proved ε": "0.2023",
                "k": "16",
            },
        ),
        (
            "talaei2024",
            "study, scenario 1",
            "no noise, lr 0.02: 0-1-2",
            {
                "ours": "0.7381 ± 0.0257",
                "loss": "1.161 ± 0.016",
                "loss less equal": "-0.0739 ± 0.018",
                "proved ε": "",
            },
        ),
        (
            "talaei2024",
            "study, scenario 1",
            "third_party ε=5: equal",
            {"proved ε": "5", "ε proved server": "123.3"},
        ),
        (
            "talaei2024",
            "study, scenario 1",
            "server ε=100: equal",
            {"proved ε": "100", "ε proved third party": "4.236"},
        ),
    ],
)
def test_lines_of_a_collection_are_those_of_its_file(paper, experiment, line, cells):
    found = {e.name: e for e in results.read(RESULTS / f"{paper}.json").parts()}
    table = report.experiment_tables(found[experiment])[0]
    assert table.caption == LINES
    row = next(dict(zip([n for n, _ in table.columns], r)) for r in table.rows if r[0] == line)
    assert {k: row[k] for k in cells} == cells


def test_a_line_without_the_values_of_its_seeds_shows_what_its_file_has():
    spread = results.Line(accuracy=results.Spread(mean=0.8397, std=0.0016), seeds=3, loss=[0.5])
    experiment = results.Experiment(title="t", lines={"a": spread, "b": spread})
    table = report.experiment_tables(experiment)[0]
    row = dict(zip([n for n, _ in table.columns], table.rows[0]))
    assert (row["ours"], row["std over seeds"], row["seeds"]) == ("0.8397", "0.0016", "3")


def unfolded(blocks):
    """Blocks, and those that a reader has to open."""
    folds = lambda b: unfolded(b.blocks) if isinstance(b, markup.Fold) else [b]
    return [inner for block in blocks for inner in folds(block)]


def test_settings_seeds_and_reductions_of_a_collection_are_told(tmp_path):
    parsed = shown(RESULTS / "talaei2024.json")
    whole = results.read(RESULTS / "talaei2024.json")
    study = report.experiment_tables(whole.experiments["study"])
    tables = {t.caption: t for t in unfolded(study)}
    facts = dict(tables["As the file gives them"].rows)
    assert facts["batch_sampler"] == "full" and facts["chosen_on"] == "[100]"
    assert (
        len(records(parsed, "grid")) == 118
        and "Impact factors help in one cell only" in parsed.words
    )
    assert "seeds 0, 1, 2, 3, 4; 20 minutes" in parsed.words and "97fe07bc9918bde9" in parsed.words
    parsed = shown(RESULTS / "noble2022.json")
    assert "Numbers of table1_small: rows, batch and sigma_g over 10" in parsed.words
    assert (
        "Reduced runs (_small) have no epsilon" in parsed.words
        and "Numbers of table1: Table 1: DP-SCAFFOLD" in parsed.words
    )
    assert {"scaffold", "fedavg"} <= {
        r.get("run") for r in records(parsed, "Numbers of the experiment")
    }


NOT_RESULTS = dict(
    title='{"title": "glossary"}',
    frame='{"columns": ["a"], "index": [0], "data": [[1]]}',
    datasette='{"columns": ["a"], "rows": [[1]]}',
    logged='{"experiment": "a", "lr": 0.1}',
    benchmark='{"about": "speed", "rows": [{"seconds": 1}]}',
    summary='{"format": 1, "runs": []}',
    list_="[]",
    half='{"experiments": {',
    **{
        name: '{"format": 2, ' + text + "}"
        for name, text in dict(
            no_lines='"lines": {}',
            only_a_title='"title": "glossary"',
            another_key='"experiment": "a", "lr": 0.1',
            drawn='"lines": {"a": {"width": 2}}',
            nothing='"experiments": {"a": {"seeds": [1]}}',
            no_claims='"verdicts": []',
            inner='"experiments": {"a": []}',
            names='"experiments": [1]',
            line='"experiments": {"a": {"lines": {"b": {"accuracy": {"mean": "0.5"}}}}}',
            point='"points": [{"panel": "a", "line": "b", "x": "1", "mean": 1, "half": 1}]',
            promise='"points": [{"panel": "a", "line": "b", "x": 1, "mean": 1, "claimed": "2"}]',
            seeds='"seeds": {"a": 1}',
            std='"lines": {"a": {"accuracy": {"mean": 0.5, "std": "0.1"}}}',
        ).items()
    },
)


@pytest.mark.parametrize("text", NOT_RESULTS.values(), ids=NOT_RESULTS)
def test_other_files_are_refused_by_name(tmp_path, text):
    (tmp_path / "some.json").write_text(text)
    with pytest.raises(ValueError) as error:
        report.write([tmp_path / "some.json"], tmp_path / "out.html")
    said = str(error.value)
    assert f"{tmp_path}/some.json" in said and "expected " in said and ", but got " in said
    assert [p.name for p in tmp_path.iterdir()] == ["some.json"]


def point(panel, line, x, mean, **more):
    return (
        dict(
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
        | more
    )


POINTS = [
    point("a", "FedAvg", 4.0, 0.5),
    point("a", "FedAvg", 16.0, 0.7),
    point("a", "SCAFFOLD", 4.0, 0.6, failed=1),
    point(
        "a", "FedAvg, no noise", None, 0.9, **dict.fromkeys(("epsilon", "delta", "unit", "caveats"))
    ),
]


def drawable(points):
    return [results.checked("points", p, results.Point) for p in points]


def study(folder, points, **more):
    folder.mkdir(exist_ok=True)
    (folder / "frontier.json").write_text(
        json.dumps(
            dict(
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
            | more
        )
    )
    return folder / "frontier.json"


def test_a_study_has_its_points_and_guarantees(tmp_path):
    parsed = shown(study(tmp_path, POINTS))
    first, _, third, level = records(
        parsed, "Points of the study, each with the guarantee of its runs"
    )
    assert (first["line"], first["proved ε"], first["accuracy"], first["seeds"]) == (
        "FedAvg",
        "4",
        "0.5000 ± 0.0100",
        "2",
    )
    assert (first["proved ε"], first["δ"], first["unit"], first["adjacency"]) == (
        "4",
        "1e-05",
        "example",
        "replace one",
    )
    assert (third["failed"], level["proved ε"], level["δ"], first["chosen"]) == (
        "1",
        "none",
        "",
        "lr = 0.3",
    )
    assert (
        records(parsed, "The study's claims, checked on these results")[0]["verdict"] == "confirmed"
    )
    assert "python -m experiments.studies frontier --quick --out NEW" in parsed.words
    both = shown(tmp_path / "frontier.json", RESULTS / "li2025.json")
    row = records(both, "How far lines are apart: final test accuracy")[0]
    assert (row["experiment"], row["least accurate"]) == (
        "frontier (quick)",
        "0.500: a: FedAvg at 4",
    )
    assert row["points apart"] == "40.0" and row["claimed ε holds"] == ""
    points = [
        point("p", "li2025", 4.0, None, claimed=4.0, epsilon=None),
        point("p", "noble", 4.0, 2.0, claimed=4.0, epsilon=2.0),
    ]
    both = shown(study(tmp_path, points), RESULTS / "li2025.json")
    assert (
        records(both, "How far lines are apart: final test accuracy")[0]["claimed ε holds"]
        == "1 of 2"
    )


def test_a_study_is_drawn_in_panels():
    figure = pictures.study(
        drawable(
            [*POINTS, point("b $x^$", "FedAvg", 1.0, 0.4), point("b $x^$", "FedAvg", 2.0, None)]
        ),
        "ε",
    )
    one, other = figure.axes
    assert (
        one.get_title() == "a" and other.get_title() == "b $x^$" and "b $x^$" in plots.svg(figure)
    )
    assert [list(line.get_xdata()) for line in one.lines][:2] == [[4.0, 16.0], [4.0]]
    assert list(one.lines[2].get_ydata()) == [0.9, 0.9] and one.lines[2].get_linestyle() == "--"
    assert one.lines[2].get_color() == one.lines[0].get_color() != one.lines[1].get_color()
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [
        "FedAvg",
        "SCAFFOLD",
        "FedAvg, no noise",
    ]
    assert len(other.lines[0].get_xdata()) == 1
    claimed = pictures.study(
        drawable([point("a", "p", 4.0, 2.0, claimed=4.0), point("a", "p", 8.0, 20.0, claimed=8.0)]),
        "claimed ε",
    )
    assert (
        claimed.axes[0].get_yscale() == "log" and claimed.axes[0].lines[-1].get_linestyle() == ":"
    )
    assert pictures.study(drawable([point("a", "p", 4.0, None)]), "ε") is None


def test_a_page_is_written_next_to_its_file_or_where_it_is_asked(experiment, tmp_path):
    file = experiment / "results.json"
    assert str(file.with_suffix(".html")) in report.write([file])
    out = tmp_path / "out.html"
    assert report.main([str(file), str(study(tmp_path / "in", POINTS)), "--out", str(out)]) == 0
    ids = [attrs["id"] for _, attrs in Tables(out.read_text()).tags if "id" in attrs]
    assert len(set(ids)) == len(ids) and "| confirmed |" in out.with_suffix(".md").read_text()


# --- refused


BROKEN = dict(
    interrupted=(lambda f: (f / "cells.json").touch(), "no "),
    reasons=(
        lambda f: (f / "results.json").write_text('{"format": 2, "failed": ["a"]}'),
        "results.json, failed: expected `object`, as this version",
    ),
    accuracies=(
        lambda f: (f / "results.json").write_text(
            '{"format": 2, "lines": {"a": {"accuracy": ["b"]}}}'
        ),
        "results.json, lines[...].accuracy[0]: expected `int | float | null`",
    ),
    results=(
        lambda f: (f / "results.json").write_text('{"format": 2}'),
        "expected results of an",
    ),
    results_format=(
        lambda f: (f / "results.json").write_text('{"format": "1", "title": "a"}'),
        "got format '1'",
    ),
    lines=(
        lambda f: (f / "results.json").write_text('{"format": 2, "lines": [1]}'),
        "lines: expected `object`",
    ),
    verdicts=(
        lambda f: (f / "results.json").write_text('{"format": 2, "verdicts": [{"claim": "a"}]}'),
        "got Object missing required field `verdict`",
    ),
    **{
        name: (
            lambda f, text=text: (f / "results.json").write_text(
                text if text.startswith("{") else '{"format": 2, ' + text + "}"
            ),
            words,
        )
        for name, text, words in (
            ("infinite", '{"lines": {"a": {"accuracy": [1e999]}}}', "1e999 is not a number"),
            ("nan", '{"lines": {"a": {"accuracy": [NaN]}}}', "NaN is not a number"),
            ("deep", '{"lines": ' + 100_000 * "[", "RecursionError"),
            (
                "negative",
                '"lines": {"a": {"epsilon_proved": -5}}',
                "lines[...].epsilon_proved: expected `int` >= 0",
            ),
            ("partly", '"verdicts": [{"claim": "a", "verdict": "partly"}]', "'partly'"),
            ("old_words", '"verdicts": [], "claims": []', "unknown field `claims`"),
            (
                "ragged",
                '"tables": [{"caption": "", "columns": ["b"], "rows": [[1, 2]]}]',
                "1 cells",
            ),
            ("point", '"points": [1]', "points[0]: expected `object`"),
            ("quick", '"quick": "no"', "quick: expected `bool`"),
        )
    },
)


@pytest.mark.parametrize("change, words", BROKEN.values(), ids=BROKEN)
def test_broken_folders_are_rejected_and_nothing_is_written(tmp_path, change, words):
    folder = tmp_path / "run"
    folder.mkdir()
    change(folder)
    with pytest.raises(ValueError, match=re.escape(words)):
        report.write([folder], tmp_path / "out.html")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


# --- cards


def cards(path):
    """heading -> card."""
    return {c.heading: c for c in report.assemble([report.read_source(path)]).cards}


@pytest.mark.parametrize("paper", ["li2025", "talaei2024"])
def test_the_claims_of_a_paper_are_counted(paper):
    found = cards(RESULTS / f"{paper}.json")
    experiments = report.read_source(RESULTS / f"{paper}.json").experiments
    verdicts = [v.verdict for e in experiments for v in e.verdicts]
    card = found["Claims checked"]
    assert card.value == str(len(verdicts))
    assert {name: int(count) for name, count in card.facts} == {
        v: verdicts.count(v) for v in set(verdicts)
    }
    lines = [line for e in experiments for line in e.lines.values()]
    claimed = [x for x in lines if x.epsilon_claimed is not None]
    held = [
        x for x in claimed if x.epsilon_proved is not None and x.epsilon_proved <= x.epsilon_claimed
    ]
    assert found["Claimed ε that hold"].value == f"{len(held)} of {len(claimed)}"


def test_verdicts_have_one_order_on_all_pages():
    given = ["cannot be checked", "of another kind", "not confirmed", "confirmed"]
    counted = report._counted(given)
    assert [*counted] == [*(v for v in report.MARKS if v in given), "of another kind"]
