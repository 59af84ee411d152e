"""jfl report: what a page says, what it refuses, that it is harmless and asks for nothing; rows and
event files."""

import base64
import csv
import hashlib
import importlib.resources
import json
import re
import shutil
import struct
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import pretended
from helpers.browser import program
from helpers.paths import RESULTS, ROOT
from helpers.problems import noisy_grad, noisy_release, squared
from helpers.report_pages import EVIL, FLOATS, VERSIONS, Tables, guarantee, made

import jfl
from jfl.cli import main
from jfl.report import document as markup
from jfl.report import page, plots, read, results, sections
from jfl.runs import blocks, record, tables


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JFL_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
    assert jax.config.jax_compilation_cache_dir is not None  # where all tests have their programs


def shown(*folders):
    """The page without its pictures, which take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sections, "run_pictures", lambda groups: [])
        patch.setattr(sections, "experiment_picture", lambda e: [])
        return Tables(markup.page(sections.assemble([read.read(f) for f in folders])))


HEAD, ALL = (
    "Final test accuracy and what is proved of it",
    "Every guarantee and claim of every setting",
)


def records(parsed, caption):
    head, *rows = parsed.tables[caption]
    return [dict(zip(head, r)) for r in rows]


# --- a real run


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The files of a sweep, but for what its program would have computed."""
    out = tmp_path_factory.mktemp("page") / "sweep"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "compute", pretended.compute)
        assert (
            main.main(
                [
                    "sweep",
                    "--clients",
                    "6",
                    "--min-rows",
                    "8",
                    "--model",
                    "logistic",
                    "--batch",
                    "4",
                    "--steps",
                    "1",
                    "--rounds",
                    "2",
                    "--evaluate-every",
                    "1",
                    "--unit",
                    "client",
                    "--sampler",
                    "full",
                    "--sweep",
                    "noise-multiplier=1.5",
                    "--sweep",
                    "seed=0,1",
                    "--out",
                    str(out),
                ]
            )
            == 0
        )
    return out


@pytest.fixture(scope="module")
def reported(swept):
    """Its page, where it is put by itself."""
    page.main([swept])
    return swept / "report.html"


def test_the_page_of_a_real_sweep(swept, reported, capsys):
    first = {
        p.name: p.read_bytes()
        for p in [swept / "report.html", swept / "report.md", *(swept / "report_files").iterdir()]
    }
    runs = json.loads((swept / "summary.json").read_text())["runs"]
    rows = records(Tables(first["report.html"].decode()), HEAD)
    for i, row in enumerate(rows):
        pair = np.array([r["accuracy"]["final"] for r in runs[2 * i : 2 * i + 2]])
        half = 12.7062047 * abs(pair[0] - pair[1]) / 2  # t of one degree of freedom; std / sqrt(2)
        best = record.best(runs[2 * i]["privacy"])
        assert row["setting"] == runs[2 * i]["name"] and row["seeds"] == "2"
        assert row["final accuracy"] == f"{pair.mean():.4f} ± {half:.4f}"
        assert (row["proved ε"], row["status"]) == (f"{best['epsilon']:.4g}", "proved")
        assert row["view"] == best["view"].replace("_", " ")
    assert len(rows) == 1 and "claimed ε" not in rows[0]
    text = first["report.md"].decode()
    assert f"| {rows[0]['final accuracy']} |" in text and "jfl sweep --config" in text
    assert "Choosing among the points of the sweep is not counted." in text
    assert re.findall(r"<(report_files/[^>]+)>", text) == [
        f"report_files/picture-{i}.png" for i in (1, 2, 3)
    ]
    assert all(
        content.startswith(b"\x89PNG")
        for name, content in first.items()
        if name.startswith("picture")
    )
    assert first["report.html"].count(b"<svg") == 3
    # an earlier report is replaced, by the same bytes
    (swept / "report_files" / "picture-9.png").write_bytes(b"of an earlier report")
    assert main.main(["report", str(swept)]) == 0
    assert str(reported) in capsys.readouterr().out
    assert {p.name for p in (swept / "report_files").iterdir()} == {
        n for n in first if n.startswith("picture")
    }
    assert (swept / "report.html").read_bytes() == first["report.html"]


# --- what it says


def test_claimed_and_proved_stand_apart(tmp_path):
    claim = guarantee(0.5, "claimed", method="paper, Theorem 1", caveats=("of another unit",))
    parsed = shown(
        made(
            tmp_path / "run",
            {
                "both": ([0.9], [guarantee(7.0), claim], {}),
                "claim alone": ([0.9], [claim], {}),
                "cond": (
                    [0.9],
                    [guarantee(3.0, "conditional"), guarantee(1.0, view="third_party")],
                    {},
                ),
                "cond alone": ([0.9], [guarantee(3.0, "conditional")], {}),
                "nothing": ([0.9], [guarantee(None, caveats=("No noise",))], {}),
            },
        )
    )
    both, alone, cond, bare, nothing = records(parsed, HEAD)
    assert (both["claimed ε"], both["proved ε"], both["status"]) == ("0.5 (server)", "7", "proved")
    assert (alone["claimed ε"], alone["proved ε"], alone["status"]) == (
        "0.5 (server)",
        "none",
        "no guarantee",
    )
    assert (cond["claimed ε"], cond["proved ε"], cond["view"], cond["status"]) == (
        "",
        "1",
        "third party",
        "proved",
    )
    assert (bare["proved ε"], bare["δ"], bare["unit"], bare["status"]) == (
        "none",
        "",
        "",
        "conditional",
    )
    assert (nothing["proved ε"], nothing["δ"], nothing["unit"]) == ("none", "", "")
    assert [r["status"] for r in records(parsed, ALL)] == [
        "proved",
        "claimed",
        "claimed",
        "conditional",
        "proved",
        "conditional",
        "no guarantee",
    ]
    assert "Of another unit." in parsed.words and "No noise." in parsed.words
    numbers = {r["caveats"] for r in records(parsed, ALL) if r["status"] == "claimed"}
    assert numbers == {"2"}


def test_failed_seeds_are_counted_and_left_out(tmp_path):
    parsed = shown(
        made(tmp_path / "run", {"fedavg": ([0.8, 0.1, 1.0], [guarantee()], dict(failed=(1,)))})
    )
    (row,) = records(parsed, HEAD)
    assert row["seeds"] == "2 (+1 failed)" and row["final accuracy"].startswith("0.9000 ± 1.27")
    (group,) = read.groups([read.read(tmp_path / "run")])
    np.testing.assert_array_equal(group.setting.curves["accuracy"][1][:, -1], [0.8, 1.0])


def test_the_weakest_of_seeds_that_differ_stands_for_all(tmp_path):
    folder = made(tmp_path / "run")
    found = json.loads((folder / "summary.json").read_text())
    found["runs"][1]["privacy"] = [guarantee(9.0)]
    (folder / "summary.json").write_text(json.dumps(found))
    assert records(shown(folder), HEAD)[0]["proved ε"] == "9"


def test_several_folders_stand_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(sections, "run_pictures", lambda groups: [])
    one, other = made(tmp_path / "a" / "run"), made(tmp_path / "b" / "run", config=None)
    words = page.main([one, other], tmp_path / "both.html")
    assert "both.md" in words
    parsed = Tables((tmp_path / "both.html").read_text())
    assert [r["setting"] for r in records(parsed, HEAD)] == [f"{one}: fedavg", f"{other}: fedavg"]
    assert records(parsed, "Rows and clients")[0] == {
        "data of": f"{one}; {other}",
        "clients": "5",
        "rows": "40",
        "smallest": "4",
        "median": "8",
        "largest": "12",
        "label spread": "0.5",
        "checksum": "abc",
    }
    assert f"jfl train --config {one}/config.toml --out NEW" in parsed.words
    assert f"# {other}: its config.toml is not there" in parsed.words


def test_two_of_one_name_are_told_apart_and_one_stands_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sections, "run_pictures", lambda groups: [])
    monkeypatch.setattr(sections, "experiment_picture", lambda e: [])
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "li2025")
    shutil.copy(study(tmp_path / "in", POINTS), "li2025.json")
    page.main(["li2025.json", "li2025"], tmp_path / "two.html")
    parsed = Tables((tmp_path / "two.html").read_text())
    assert (
        "jfl report: li2025.json, li2025" in parsed.words and "Claims: li2025.json" in parsed.words
    )
    made(tmp_path / "b" / "li2025.json")
    assert page._labels(["li2025.json", "b"]) == ["li2025", "b"]
    assert page._labels(given := ["li2025.json", "li2025", "b/li2025.json"]) == given
    (tmp_path / "link").symlink_to("li2025")
    for again in ("li2025/", "link"):
        assert main.main(["report", "li2025", again, "--out", "out.html"]) == 2
        assert (
            f"need each directory or file once; got li2025 and {Path(again)}, which are one"
            in capsys.readouterr().err
        )
    assert not (tmp_path / "out.html").exists()


def test_a_name_that_utf8_cannot_hold_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sections, "run_pictures", lambda groups: [])
    folder = made(tmp_path / "lat\udce9")  # of bytes in another code
    for more in ([], ["--out", str(tmp_path / "out.html")]):
        assert main.main(["report", str(folder), *more]) == 2
        assert (
            "need names and words that UTF-8 can hold; got '# jfl report: lat\\udce9'"
            in capsys.readouterr().err
        )
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.toml",
        "manifest.json",
        "metrics.csv",
        "summary.json",
    ]


def test_how_to_run_it_again(tmp_path):
    demo = made(tmp_path / "demo dir", config=None)
    (demo / "demo.png").write_bytes(b"")
    sweep = made(tmp_path / "it's", config="lr = 1\n\n[sweep]\nseed = [0]\n")
    words = shown(demo, sweep).words
    assert "jfl demo --rounds 2 --seeds 3 --out NEW" in words
    assert f"jfl sweep --config '{tmp_path}/it'\"'\"'s/config.toml' --out NEW" in words


@pytest.fixture
def experiment(tmp_path):
    folder = tmp_path / "fig"
    made(folder / "DP,_K=5", config="lr = 1\n\n[sweep]\nseed = [0]\n")
    made(folder / "bare", table=False)
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
    first, other = records(parsed, "Lines of the experiment, ε of the view that it speaks of")
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
    assert (
        "A quick run" in parsed.words
        and "python -m experiments.papers.MODULE fig --quick --out NEW" in parsed.words
    )
    assert [r["setting"] for r in records(parsed, HEAD)] == ["DP, K=5", "bare"]


def test_the_line_that_runs_an_experiment_again(experiment):
    def again(**more):
        edit("results.json", lambda r: r | more)(experiment)
        return shown(experiment).words

    assert "python -m experiments.papers.noble2022 fig --quick --out NEW" in (
        words := again(module="noble2022")
    )
    assert "MODULE" not in words
    assert "python -m experiments.papers.noble2022 fig --lines 'DP, K=5' bare --out NEW" in again(
        quick=False, only=["DP, K=5", "bare"]
    )
    assert "python -m experiments.papers.'x; rm' fig --lines" in again(
        module="x; rm"
    )  # words of a file are one word


def test_lines_and_seeds_that_failed_are_told(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr(sections, "experiment_picture", lambda e: [])
    monkeypatch.setattr(plots, "png", lambda f: b"")  # what takes the time
    monkeypatch.setattr(plots, "svg", lambda f: "")
    made(experiment / "all", {"fedavg": ([0.1, 0.1], [guarantee()], dict(failed=(0, 1)))})
    edit(
        "results.json", lambda r: r["lines"]["bare"].update(accuracy=[0.5], seeds=[0], failed=[1])
    )(experiment)
    edit(
        "results.json",
        lambda r: (
            r
            | dict(
                failed=dict(all="all of its runs failed", thrown="NaN"),
                unread=dict(svhn="need data"),
            )
        ),
    )(experiment)
    parsed = shown(experiment)
    rows = [
        ("DP, K=5", "2"),
        ("bare", "1 (+1 failed)"),
        ("all", "0 (+2 failed)"),
        ("thrown", "0 (+2 failed)"),
    ]
    assert [(r["line"], r["seeds"]) for r in records(parsed, LINES)] == rows
    assert [(r["setting"], r["seeds"]) for r in records(parsed, HEAD)][2:] == [
        ("all", "0 (+2 failed)")
    ]
    notes = [
        "Failed: all: all of its runs failed",
        "Failed: thrown: NaN",
        "Not run: svhn: need data",
    ]
    inner = json.loads((experiment / "results.json").read_text())
    whole = dict(format=results.FORMAT, experiments=dict(fig=inner, fig2=inner))
    (tmp_path / "some.json").write_text(json.dumps(whole))
    collection = sections.assemble([read.read(tmp_path / "some.json")])
    alone = sections.assemble([read.read(experiment)])
    assert "bare: 0.9000 ± 0.2484; all: none." in alone.sections[0].blocks[3].alt
    for document, after in ((alone, ""), (collection, " (fig, fig2)")):
        (claims,) = (s.blocks for s in document.sections if s.heading == "Claims")
        visible = [words for b in claims if isinstance(b, markup.Items) for words in b.items]
        assert [w for w in visible if w.startswith(("Failed", "Not run"))] == [
            n + after for n in notes
        ]
        assert not any("As the file gives them" in str(s) for s in document.sections)
    assert (
        results.read(tmp_path / "some.json").experiments["fig"].lines["bare"].seed_count()
        == "1 (+1 failed)"
    )


def test_files_of_before_formats_had_a_number_are_read(tmp_path, experiment):
    folder = made(tmp_path / "run")
    found = json.loads((folder / "summary.json").read_text())
    assert found.pop("format") == 1
    (folder / "summary.json").write_text(json.dumps(found))
    assert (
        json.loads((experiment / "bare" / "summary.json").read_text())["format"]
        == record.FORMAT
        == 1
    )
    assert len(records(shown(folder), HEAD)) == 1 and len(records(shown(experiment), HEAD)) == 2


@pytest.mark.parametrize("given", [dict(format=1), {}], ids=["numbered", "before numbers"])
def test_results_of_an_earlier_version_are_refused_with_what_to_do(experiment, given):
    found = json.loads((experiment / "results.json").read_text())
    del found["format"]
    (experiment / "results.json").write_text(json.dumps(found | given))
    with pytest.raises(ValueError, match="need format 2, .*: run the experiment again in its fold"):
        read.read(experiment)


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
    with pytest.raises(ValueError, match="results of fig, .*verdict.*: need .*; got .*'maybe'"):
        results.of(found | dict(verdicts=[dict(claim="c", verdict="maybe")]))


# --- collections

PAPERS = ("noble2022", "chen2024", "li2025", "ranaweera2025", "talaei2024")
LINES = "Lines of the experiment, ε of the view that it speaks of"


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
    assert (
        "python -m experiments.papers.chen2024 fig6a --out NEW" in parsed.words
        and "MODULE" not in parsed.words
    )
    assert "python -m experiments.papers.li2025 fig2-mnist --out NEW" in parsed.words
    made_by = [*records(parsed, "The same everywhere"), *records(parsed, "What differs")]
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
                "ours": "0.5784 ± 0.0488",
                "seeds": "5",
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
    table = sections.experiment_tables(found[experiment])[0]
    assert table.caption == LINES
    row = next(dict(zip([n for n, _ in table.columns], r)) for r in table.rows if r[0] == line)
    assert {k: row[k] for k in cells} == cells


def test_a_line_without_the_values_of_its_seeds_shows_what_its_file_has():
    spread = results.Line(accuracy=results.Spread(mean=0.8397, std=0.0016), seeds=3, loss=[0.5])
    experiment = results.Experiment(title="t", lines={"a": spread, "b": spread})
    table = sections.experiment_tables(experiment)[0]
    row = dict(zip([n for n, _ in table.columns], table.rows[0]))
    assert (row["ours"], row["std over seeds"], row["seeds"]) == ("0.8397", "0.0016", "3")


def unfolded(blocks):
    """Blocks, and those that a reader has to open."""
    folds = lambda b: unfolded(b.blocks) if isinstance(b, markup.Fold) else [b]
    return [inner for block in blocks for inner in folds(block)]


def test_settings_seeds_and_reductions_of_a_collection_are_told(tmp_path):
    parsed = shown(RESULTS / "talaei2024.json")
    whole = results.read(RESULTS / "talaei2024.json")
    study = sections.experiment_tables(whole.experiments["study"])
    tables = {t.caption: t for t in unfolded(study)}
    facts = dict(tables["As the file gives them"].rows)
    assert facts["batch_sampler"] == "full" and facts["chosen_on"] == "[100]"
    assert (
        len(records(parsed, "grid")) == 118
        and "Impact factors help in one cell of all" in parsed.words
    )
    assert "seeds 0, 1, 2, 3, 4; 20 minutes" in parsed.words and "97fe07bc9918bde9" in parsed.words
    parsed = shown(RESULTS / "noble2022.json")
    assert "Numbers of table1_small: rows, batch and sigma_g over 10" in parsed.words
    assert (
        "epsilons of reduced runs (_small) are not given" in parsed.words
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
def test_other_files_are_refused_by_name(tmp_path, capsys, text):
    (tmp_path / "some.json").write_text(text)
    assert (
        main.main(["report", str(tmp_path / "some.json"), "--out", str(tmp_path / "out.html")]) == 2
    )
    said = capsys.readouterr().err
    assert f"{tmp_path}/some.json" in said and "need " in said and "; got " in said
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
    assert records(parsed, "The same for all points") == [
        {"field": "lr", "value": "0.3"},
        {"field": "rounds", "value": "12"},
    ]
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
    assert (
        "of li2025"
        in sections.experiment_picture(results.read(tmp_path / "frontier.json"))[0].caption
    )


# --- harmless


def evil(tmp_path):
    folder = made(
        tmp_path / "<img src=x>",
        {EVIL: ([0.5, 0.6], [guarantee(caveats=(EVIL,), method=EVIL)], {})},
        config=f"# {EVIL}\n````\n",
        manifest=dict(versions={EVIL: EVIL}, data=dict(clients=1, caveats=[EVIL])),
    )
    (folder / "results.json").write_text(
        json.dumps(
            dict(
                format=results.FORMAT,
                experiment=EVIL,
                title=EVIL,
                lines={EVIL.replace("/", "_"): dict(accuracy=[0.5], paper=EVIL)},
                verdicts=[dict(claim=EVIL, verdict="confirmed", seen=EVIL)],
                tables=[dict(caption=EVIL, columns=[EVIL], rows=[[EVIL]])],
                notes=[EVIL],
            )
        )
    )
    alone = tmp_path / "plain"
    shutil.copytree(folder, alone)
    (alone / "results.json").unlink()
    return folder, alone


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The page of folders that say what they should not."""
    folder = tmp_path_factory.mktemp("hostile")
    page.main(evil(folder), folder / "out.html")
    return folder / "out.html"


def script_of(parsed):
    """The one script of a page, which its policy names."""
    ((attrs, script),) = parsed.scripts
    (policy,) = [a["content"] for tag, a in parsed.tags if tag == "meta" and "http-equiv" in a]
    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert attrs == {} and allowed["script-src"] == f"'sha256-{digest}'"
    assert allowed["default-src"] == "'none'" and allowed.keys() == {
        "default-src",
        "style-src",
        "img-src",
        "script-src",
    }
    return script


def test_what_files_say_is_shown_and_not_run(hostile):
    text, mark = hostile.read_text(), hostile.with_suffix(".md").read_text()
    parsed = Tables(text)
    tags = {tag for tag, _ in parsed.tags}
    assert not tags & {"img", "iframe", "object", "form"}
    script = script_of(parsed)
    assert sum(tag == "svg" for tag, _ in parsed.tags) >= 2
    assert not [a for _, attrs in parsed.tags for a in attrs if a.startswith("on")]
    assert parsed.words.count("<script>alert(1)</script>") > 10
    outside = re.sub(r"(?sm)^(```+)\n.*?\n\1\n", "", mark)  # but for code
    assert "<script" not in outside and "<img" not in outside and "`````" in mark
    rows = [line for line in outside.splitlines() if line.startswith("|")]
    (head,) = [r for r in rows if r.startswith("| setting | seeds")]
    assert {len(re.findall(r"(?<!\\)\|", r)) for r in rows[:3]} == {head.count("|")}
    for tag, attrs in parsed.tags:
        for name in ("src", "href", "xlink:href"):
            assert attrs.get(name, "#").startswith(("#", "data:")), (tag, attrs)
    assert "default-src 'none'" in text and "@import" not in text
    assert not re.search(r"url\((?!#)", text.split("</head>")[1])
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\"' ]*", text.replace(script, ""))) <= namespaces
    assert "http" not in script


def test_it_can_be_read_by_all(reported):
    text = reported.read_text()
    parsed = Tables(text)
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in parsed.tags if tag == "th")
    pictures = [attrs for tag, attrs in parsed.tags if tag == "svg"]
    assert len(pictures) == 3 and all(
        a["role"] == "img" and len(a["aria-label"]) > 20 for a in pictures
    )
    ids = [attrs["id"] for _, attrs in parsed.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)
    links = [a["href"][1:] for _, a in parsed.tags if a.get("href", "").startswith("#")]
    links += [a["xlink:href"][1:] for _, a in parsed.tags if "xlink:href" in a] + re.findall(
        r"url\(#([^)]+)\)", text
    )
    assert links and set(links) <= set(ids)
    assert ("html", {"lang": "en"}) in parsed.tags and "prefers-color-scheme: dark" in text
    assert plots.INK not in text.split("</head>")[1] and "currentColor" in text


# --- refused


def edit(name, change):
    def apply(folder):
        found = json.loads((folder / name).read_text())
        found = change(found) or found
        (folder / name).write_text(json.dumps(found))

    return apply


def cut(name):
    return lambda folder: (folder / name).write_text((folder / name).read_text()[:-20])


def gone(name):
    return lambda folder: (folder / name).unlink()


def csv_cell(old, new):
    return lambda f: (f / "metrics.csv").write_text(
        (f / "metrics.csv").read_text().replace(old, new, 1)
    )


BROKEN = dict(
    empty=(lambda f: [p.unlink() for p in f.iterdir()], "need a folder with a run"),
    running=(gone("summary.json"), "need a finished run"),
    interrupted=(
        lambda f: [
            gone("summary.json")(f),
            gone("config.toml")(f),
            (f / "line").mkdir(),
            (f / "line" / "cells.json").touch(),
        ],
        (
            "run without results.json: it was interrupted, or still runs. Run it again: its cells "
            "are "
            "kept"
        ),
    ),
    begun=(
        lambda f: [p.unlink() for p in f.iterdir()] + [(f / ".cells").mkdir()],
        "need a finished experiment",
    ),
    reasons=(
        lambda f: (f / "results.json").write_text('{"format": 2, "failed": ["a"]}'),
        "results.json, failed: need `object`, as this version",
    ),
    half=(cut("summary.json"), "summary.json: need the JSON that a run wrote"),
    half_manifest=(cut("manifest.json"), "manifest.json: need the JSON"),
    half_table=(cut("metrics.csv"), "half-written"),
    no_table=(gone("metrics.csv"), "metrics.csv: need the table"),
    no_manifest=(gone("manifest.json"), "manifest.json: need the JSON"),
    version=(
        edit("summary.json", lambda s: s | dict(version=2)),
        "got Object contains unknown field `version`",
    ),
    format_=(
        edit("summary.json", lambda s: s | dict(format=2)),
        "summary.json: need format 1, which is what this version",
    ),
    flag=(edit("summary.json", lambda s: s | dict(format=True)), "got format True"),
    no_runs=(edit("summary.json", lambda s: dict(runs=[])), "need at least one run, as"),
    other=(edit("summary.json", lambda s: [1]), "need a JSON object; got list"),
    field=(
        edit("summary.json", lambda s: s["runs"][0].pop("privacy") and None),
        "summary.json, runs[0]: need what a run writes, as",
    ),
    type_=(
        edit("summary.json", lambda s: s["runs"][1].update(seed="1")),
        "summary.json, runs[1].seed: need `int`, as this version of jfl writes it; got `str`",
    ),
    nothing_proved=(
        edit("summary.json", lambda s: s["runs"][1].update(privacy=[])),
        "need what is proved",
    ),
    guarantee=(
        edit("summary.json", lambda s: s["runs"][0]["privacy"][0].update(epsilon="2")),
        "runs[0].privacy[0].epsilon: need",
    ),
    manifest=(
        edit("manifest.json", lambda m: dict(data={})),
        "manifest.json: need what a run writes",
    ),
    facts=(
        edit("manifest.json", lambda m: m | dict(data=[1])),
        "manifest.json, data: need `object`",
    ),
    caveat=(
        edit("summary.json", lambda s: s["runs"][0]["privacy"][0].update(caveats=[{}])),
        "runs[0].privacy[0].caveats[0]: need `str`",
    ),
    accuracies=(
        lambda f: (f / "results.json").write_text(
            '{"format": 2, "lines": {"a": {"accuracy": ["b"]}}}'
        ),
        "results.json, lines[...].accuracy[0]: need `int | float | null`",
    ),
    number=(csv_cell("0.4", "x.4"), "line 2: need a number accuracy; got 'x.4'"),
    lost=(
        lambda f: (f / "metrics.csv").write_text(
            re.sub("(?m)^fedavg,2.*\n", "", (f / "metrics.csv").read_text())
        ),
        "need rows of every run in summary.json; got none of fedavg seed=2",
    ),
    header=(csv_cell("round,", "turn,"), "with columns round"),
    results=(lambda f: (f / "results.json").write_text('{"format": 2}'), "need what came of an"),
    results_format=(
        lambda f: (f / "results.json").write_text('{"format": "1", "title": "a"}'),
        "got format '1'",
    ),
    lines=(
        lambda f: (f / "results.json").write_text('{"format": 2, "lines": [1]}'),
        "lines: need `object`",
    ),
    verdicts=(
        lambda f: (f / "results.json").write_text('{"format": 2, "verdicts": [{"claim": "a"}]}'),
        "got Object missing required field `verdict`",
    ),
    unproved=(
        edit(
            "summary.json",
            lambda s: s["runs"][0]["privacy"][0].update(epsilon=None, status="proved"),
        ),
        'or null with status "no guarantee", as this version',
    ),
    below=(
        edit("summary.json", lambda s: s["runs"][0]["privacy"][0].update(epsilon=-1.0)),
        "privacy[0].epsilon: need `float` >= 0",
    ),
    **{
        name: (
            lambda f, text=text: (f / "results.json").write_text(
                text if text.startswith("{") else '{"format": 2, ' + text + "}"
            ),
            words,
        )
        for name, text, words in (
            ("infinite", '{"lines": {"a": {"accuracy": [1e999]}}}', "1e999 is no number"),
            ("nan", '{"lines": {"a": {"accuracy": [NaN]}}}', "NaN is no number"),
            ("deep", '{"lines": ' + 100_000 * "[", "RecursionError"),
            (
                "negative",
                '"lines": {"a": {"epsilon_proved": -5}}',
                "lines[...].epsilon_proved: need `int` >= 0",
            ),
            ("partly", '"verdicts": [{"claim": "a", "verdict": "partly"}]', "'partly'"),
            ("old_words", '"verdicts": [], "claims": []', "unknown field `claims`"),
            (
                "ragged",
                '"tables": [{"caption": "", "columns": ["b"], "rows": [[1, 2]]}]',
                "1 cells",
            ),
            ("point", '"points": [1]', "points[0]: need `object`"),
            ("quick", '"quick": "no"', "quick: need `bool`"),
        )
    },
)


@pytest.mark.parametrize("change, words", BROKEN.values(), ids=BROKEN)
def test_broken_folders_are_refused_and_nothing_is_written(tmp_path, capsys, change, words):
    folder = made(tmp_path / "run")
    change(folder)
    assert main.main(["report", str(folder), "--out", str(tmp_path / "out.html")]) == 2
    said = capsys.readouterr().err
    assert words in said and "need " in said and "; got " in said
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "args, words",
    [
        (["nowhere"], "which is not there"),
        (["file"], "file: need the JSON that a run wrote"),
        ([], "at least one directory"),
        (["run", "run"], "--out FILE.html"),
        (["run", "--out", "page.txt"], "ends in .html"),
        (["run", "--out", "no/page.html"], "a directory that is there"),
        (["run", "--out", "mine.html"], "mine.html, which is something else"),
        (["run", "--out", "notes.html"], "notes.md, which is something else"),
        (["run", "--out", "photos.html"], "photos_files, which is something else"),
        (["run", "--out", "folder.html"], "folder.html, which is something else"),
    ],
)
def test_what_is_no_earlier_report_stays(tmp_path, capsys, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "run")
    (tmp_path / "photos_files").mkdir()
    (tmp_path / "folder.html").mkdir()
    for name in ("file", "mine.html", "notes.md", "photos_files/holiday.png"):
        (tmp_path / name).write_text("<!doctype html> mine")
    before = {p: p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")}
    assert main.main(["report", *args]) == 2
    said = capsys.readouterr().err
    assert words in said and "; got " in said
    assert {p: p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")} == before


# --- pictures


def setting(label, final, guarantees, dataset="digits"):
    return plots.Setting(
        label,
        {"accuracy": ([1, 2], np.array([[f / 2, f] for f in final]))},
        final,
        guarantees,
        dataset,
    )


def drawn(ax):
    """x, y and whether it is filled, of every mark in a panel."""
    return sorted(
        (
            float(line.get_xdata()[0]),
            float(line.get_ydata()[0]),
            line.get_markerfacecolor() != "none",
        )
        for line in ax.lines
        if line.get_marker() in "oD"
    )


def test_only_what_compares_shares_an_axis():
    settings = [
        setting(
            "a",
            [0.8, 0.9],
            [guarantee(2.0), guarantee(1.0, view="third_party"), guarantee(0.5, "claimed")],
        ),
        setting(
            "b",
            [0.7],
            [
                guarantee(4.0),
                guarantee(0.1, "claimed", rounds=1),
                guarantee(40.0, implied=True),
            ],
        ),
        setting("c", [0.6], [guarantee(8.0, delta=1e-3), guarantee(0.01, "conditional")]),
        setting("none", [0.95], [guarantee(None)]),
        setting("elsewhere", [0.99], [guarantee(None)], "mnist"),
    ]
    assert plots.promises(settings) == [
        ("example", "add_remove", "server", 1e-5),
        ("example", "add_remove", "server", 1e-3),
        ("example", "add_remove", "third_party", 1e-5),
    ]
    figure = plots.frontier(settings)
    server, other, third = figure.axes
    assert drawn(server) == [
        (0.5, pytest.approx(0.85), False),
        (2.0, pytest.approx(0.85), True),
        (4.0, 0.7, True),
    ]
    assert drawn(other) == [(8.0, 0.6, True)] and drawn(third) == [(1.0, pytest.approx(0.85), True)]
    for ax in figure.axes:
        dashed = [line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == "--"]
        assert dashed == [0.95]
    words = [t.get_text() for t in figure.legends[0].get_texts()]
    assert words == ["a", "b", "c", "none", "proved", "claimed"]
    assert plots.frontier([setting("none", [0.9], [guarantee(None)])]) is None


def test_only_the_same_data_share_a_dashed_line():
    entry = lambda **config: dict(
        dataset="synthetic", config=dict(synthetic_alpha=0.0, lr=0.1) | config
    )
    one = plots.data_of([entry(), entry()])
    assert one == plots.data_of([entry(lr=0.5)])  # what is no field of data makes no other data
    other = plots.data_of([entry(synthetic_alpha=1.0)])
    assert (
        len(
            {
                one,
                other,
                plots.data_of([entry(), entry(partition="iid")]),
                plots.data_of([entry() | dict(dataset="digits")]),
            }
        )
        == 4
    )
    settings = [
        setting("a", [0.3], [guarantee(2.0)], one),
        setting("b", [0.4], [guarantee(None)], one),
        setting("elsewhere", [0.7], [guarantee(None)], other),
    ]
    (ax,) = plots.frontier(settings).axes
    assert [line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == "--"] == [0.4]


@pytest.mark.parametrize(
    "epsilons", [(0.0,), (0.0, 0.2), (0.0, 1e-6, 50.0), (1.0, 8.0), (1e-320, 1e300)]
)
def test_an_epsilon_of_nothing_has_a_place(epsilons, tmp_path):
    """0 has no logarithm: it stands left of all others, under its own name."""
    (ax,) = plots.frontier([setting("a", [0.3], [guarantee(e)]) for e in epsilons]).axes
    at = ax.transAxes.inverted().transform(ax.transData.transform([(e, 0.3) for e in epsilons]))[
        :, 0
    ]
    assert (np.diff(at) > 0.01).all() and (
        at[0] > 0.01 and at[-1] < 0.99 or min(epsilons) == 1e-320
    )
    shown = {t.get_text() for t in ax.get_xticklabels()}
    assert ("0" in shown) == (epsilons[0] == 0) and len(shown) > 1 - (max(epsilons) == 0)
    groups = [dict(label="a", round=[1, 2], accuracy=[[0.2, 0.3]], epsilon=e) for e in epsilons]
    record.picture(tmp_path / "p.png", groups, "")
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_curves_have_bands_over_seeds():
    settings = [setting("$x^$", [0.8, 0.9, 0.4], []), setting("one", [0.5], [])]
    panels = plots.panels_of_runs(settings, ("accuracy", "loss"))
    figure = plots.curves([s.label for s in settings], panels)
    (ax,) = figure.axes
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [0.35, 0.7])
    (band,) = ax.collections
    points = band.get_paths()[0].vertices
    assert (points[:, 1].min(), points[:, 1].max()) == pytest.approx((0.2, 0.9))
    assert ax.lines[0].get_color() == plots.INK and ax.lines[1].get_color() == record.PALETTE[1]
    svg = plots.svg(figure)
    assert "$x^$" in svg and plots.INK not in svg and svg == plots.svg(figure)
    assert plots.panels_of_runs([setting("one", [0.5], [])], ("clip_fraction",)) == []


def test_lines_are_drawn_below_each_other():
    spread = results.Spread
    found = {
        "$a^$": results.Line(spread(0.8, 0.1), epsilon_claimed=0.3, epsilon_proved=0.25),
        "b": results.Line(spread(0.5, std=0.05), epsilon_claimed=2.0),
        "gone": results.Line(),
        "c": results.Line([0.9]),
    }
    figure = plots.lines(found)
    (ax,) = figure.axes
    marks = [line for line in ax.lines if line.get_marker() == "o"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in marks] == [
        (0.8, 0),
        (0.5, 1),
        (0.9, 2),
    ]
    assert [line.get_markerfacecolor() == "none" for line in marks] == [False, True, True]
    bars = [c.get_segments()[0][:, 0] for c in ax.collections]
    np.testing.assert_allclose(bars, [[0.7, 0.9], [0.45, 0.55]])
    assert [t.get_text() for t in ax.texts] == [
        "$a^$",
        "ε 0.3 claimed, 0.25 proved",
        "b",
        "ε 2 claimed",
        "c",
        "",
    ]
    assert "$a^$" in plots.svg(figure) and plots.lines({"c": found["c"]}) is None


def test_a_study_is_drawn_in_panels():
    figure = plots.study(
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
    claimed = plots.study(
        drawable([point("a", "p", 4.0, 2.0, claimed=4.0), point("a", "p", 8.0, 20.0, claimed=8.0)]),
        "claimed ε",
    )
    assert (
        claimed.axes[0].get_yscale() == "log" and claimed.axes[0].lines[-1].get_linestyle() == ":"
    )
    assert plots.study(drawable([point("a", "p", 4.0, None)]), "ε") is None


SHOWN = ("fig2", "study, scenario 1", "study, scenario 3")


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    """The page of some of a paper's collection and of a study, with their pictures."""
    out = tmp_path_factory.mktemp("collection") / "out.html"
    found = json.loads((RESULTS / "talaei2024.json").read_text())
    found["experiments"] = {n: found["experiments"][n] for n in SHOWN}
    (out.parent / "talaei2024.json").write_text(json.dumps(found))
    assert (
        main.main(
            [
                "report",
                str(out.parent / "talaei2024.json"),
                str(study(out.parent / "in", POINTS)),
                "--out",
                str(out),
            ]
        )
        == 0
    )
    return out


@pytest.mark.slow
def test_a_page_of_collections_has_pictures(collection, tmp_path):
    text, mark = collection.read_text(), collection.with_suffix(".md").read_text()
    parsed = Tables(text)
    pictures = [attrs["aria-label"] for tag, attrs in parsed.tags if tag == "svg"]
    names = ["fig2", *SHOWN, "frontier"]  # how far its lines are apart, and their curves
    assert (
        [p.split(":")[0] for p in pictures] == names
        and mark.count("picture-") == len(names)
        and "| confirmed |" in mark
    )
    ids = [attrs["id"] for _, attrs in parsed.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)
    shutil.copy(
        RESULTS / "talaei2024.json", tmp_path / "mine.json"
    )  # by itself it is put beside the file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sections, "experiment_picture", lambda e: [])
        assert str(tmp_path / "mine.html") in page.main([tmp_path / "mine.json"])
    assert (tmp_path / "mine.md").exists()


# --- rows


def make_plan(fed, task):
    def of(lr=0.1, z=1.0):
        algorithm = jfl.algorithms.fedavg(
            jfl.grad(squared), lr=lr, steps=1, batch=jfl.batches.without_replacement(2)
        )
        return jfl.plan(
            fed, task, algorithm, jfl.sampling.full(fed.size.shape[0]), release=noisy_release(z=z)
        )

    return of


def test_tidy_rows_of_a_run_and_a_sweep(fed, task, tmp_path):
    of = make_plan(fed, task)
    out = jfl.simulate(jax.random.key(7), of(), 3, evaluate_every=2)
    rows = tables.tidy(out)
    assert all(set(r) == set(record.COLUMNS) for r in rows)
    assert [(r["name"], r["seed"], r["round"], r["epsilon"]) for r in rows] == [
        ("run", 7, 2, None),
        ("run", 7, 3, None),
    ]
    np.testing.assert_array_equal([r["loss"] for r in rows], out.metrics.loss)
    named = tables.tidy(out, of(), delta=1e-5)
    best = jfl.guarantee(of(), 3, 1e-5, unit="client", view="third_party")
    assert named[0]["name"] == "fedavg" and named[0]["epsilon"] < named[1]["epsilon"]
    assert 0.99 * best.epsilon <= named[1]["epsilon"] < 1.5 * best.epsilon

    swept = jfl.sweep(of, z=[1.0, 2.0], seed=[3, 4], rounds=2, evaluate_every=1)
    rows = tables.tidy(swept, delta=1e-5)
    assert [(r["name"], r["seed"], r["round"], r["z"]) for r in rows] == [
        (f"fedavg z={z}", s, i, z) for z in (1.0, 2.0) for s in (3, 4) for i in (1, 2)
    ]
    np.testing.assert_array_equal([r["loss"] for r in rows], np.ravel(swept.metrics.loss))
    assert rows[0]["epsilon"] == rows[2]["epsilon"] > rows[4]["epsilon"] > 0
    told = dict(
        unit="client", adjacency=best.adjacency, view="third_party", delta=1e-5, status="proved"
    )
    assert all({k: r[k] for k in told} == told and r["failed"] is False for r in rows)
    assert {k: named[0][k] for k in told} == told and "failed" not in named[0]

    tables.write(tmp_path / "rows.csv", rows)
    tables.write(tmp_path / "rows.jsonl", rows)
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == rows
    assert tables.read(tmp_path / "rows.csv") == rows
    with (tmp_path / "rows.csv").open() as file:
        assert next(csv.reader(file)) == [*rows[0]]
    for bad, words in (
        (lambda: tables.tidy(3), "what jfl.simulate"),
        (lambda: tables.tidy(out, delta=1e-5), "the plan"),
        (lambda: tables.write(tmp_path / "rows.txt", rows), "ends in .csv or .jsonl"),
        (lambda: tables.write(tmp_path / "none.csv", []), "at least one row"),
    ):
        with pytest.raises(ValueError, match=words):
            bad()
    several = out._replace(metrics=jax.tree.map(lambda x: np.stack([x, x]), out.metrics))
    with pytest.raises(ValueError, match="one run"):
        tables.tidy(several)


def test_rows_say_of_which_promise_an_epsilon_is_and_what_failed(fed, task, monkeypatch, tmp_path):
    def of(grad, **more):
        algorithm = jfl.algorithms.fedavg(
            grad, lr=0.1, steps=1, batch=jfl.batches.without_replacement(2)
        )
        return jfl.plan(fed, task, algorithm, jfl.sampling.full(fed.size.shape[0]), **more)

    plans = [
        of(jfl.grad(squared), release=noisy_release()),
        of(noisy_grad()),
        of(jfl.grad(squared)),
    ]
    seen = jfl.Metrics(np.array(3 * [[1, 2]]), np.ones((3, 2)), None, None, *np.ones((4, 3, 2)))
    swept = SimpleNamespace(
        points=[dict(seed=0, delta=d, failed=1) for d in (1, 2, 3)],
        plans=plans,
        metrics=seen,
        failed=np.array([False, True, False]),
    )
    rows = tables.tidy(swept, delta=1e-5)
    assert [
        (r["unit"], r["view"], r["delta"], r["status"], r["failed"], r["point_delta"])
        for r in rows[1::2]
    ] == [
        ("client", "third_party", 1e-5, "proved", False, 1),
        ("example", "server", 1e-5, "proved", True, 2),
        (None, None, 1e-5, "no guarantee", False, 3),
    ]
    assert [r["adjacency"] for r in rows[1::2]] == ["replace_one", "replace_one", None]
    assert (
        rows[1]["epsilon"] > 0 < rows[3]["epsilon"]
        and rows[5]["epsilon"] is None
        and rows[1]["point_failed"] == 1
    )
    assert [r["delta"] for r in tables.tidy(swept)] == [
        1,
        1,
        2,
        2,
        3,
        3,
    ]  # without epsilons nothing is in its way
    for p in swept.points:
        p |= dict(point_delta="True")
    both = tables.tidy(swept, delta=1e-5)
    assert [(r["point_delta"], r["point_point_delta"]) for r in both[1::2]] == [
        (d, "True") for d in (1, 2, 3)
    ]
    tables.write(tmp_path / "rows.csv", both)
    back = tables.read(tmp_path / "rows.csv")
    assert back[2]["failed"] is True and back[2]["point_point_delta"] == "True"
    monkeypatch.setattr(record, "privacy", lambda *_: [guarantee(3.0, "conditional")])
    assert {(r["epsilon"], r["unit"], r["status"]) for r in tables.tidy(swept, delta=1e-5)} == {
        (None, None, "conditional")
    }


def test_arrays_have_names_of_their_own():
    one, other, near = (
        np.ones(1001, np.float32),
        np.ones(1001, np.float32),
        np.ones(1001, np.float32),
    )
    other[500], near[500] = 9, np.nextafter(np.float32(1), np.float32(2))
    names = [tables._value(v) for v in (one, other, near, jnp.array(other), [one], [other])]
    assert names[1] == names[3] and len(set(names)) == 5
    assert re.fullmatch(r"float32\[1001\] [0-9a-f]{8}", names[0]) and names[4].startswith("list ")
    assert tables._value(np.array([0.5, 1 / 3])) == "[0.5                0.3333333333333333]"
    assert tables._value(jnp.float32(0.5)) == 0.5 and tables._value((1, 2)) == "(1, 2)"


def test_keys_that_no_number_made_keep_their_words():
    assert tables._seed(jax.random.key(5)) == 5 == tables._seed(np.int64(5))
    one, other = (tables._seed(k) for k in jax.random.split(jax.random.key(0)))
    assert isinstance(one, str) and one != other


def test_intervals():
    mean, half = tables.interval([0.1, 0.2, 0.3, 0.4])
    assert mean == pytest.approx(0.25) and half == pytest.approx(3.182446 * 0.1290994 / 2, rel=1e-6)
    assert tables.interval([0.5]) == (0.5, None)


# --- TensorBoard


def events(folder):
    """What an event file holds: (tag, step) -> value, and texts by tag."""
    from tensorboardX.proto import event_pb2

    (path,) = folder.glob("events*")
    content, at, scalars, texts = path.read_bytes(), 0, {}, {}
    while at < len(content):
        (size,) = struct.unpack_from(
            "<Q", content, at
        )  # length, its checksum, the record, its checksum
        for value in event_pb2.Event.FromString(content[at + 12 : at + 12 + size]).summary.value:
            event = event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
            if value.WhichOneof("value") == "simple_value":
                scalars[value.tag, event.step] = value.simple_value
            else:
                texts[value.tag] = value.tensor.string_val[0].decode()
        at += 16 + size
    return scalars, texts


def test_event_files_hold_the_curves(tmp_path, capsys, monkeypatch):
    pytest.importorskip("tensorboardX", reason='needs pip install -e ".[tensorboard]"')
    folder = made(
        tmp_path / "run",
        {"a/b": ([0.8, 0.9], [guarantee()], {}), "a|b": ([0.5], [guarantee()], {})},
    )
    monkeypatch.setattr(sections, "run_pictures", lambda groups: [])
    command = [
        "report",
        str(folder),
        "--out",
        str(tmp_path / "out.html"),
        "--tensorboard",
        str(tmp_path / "logs"),
    ]
    assert main.main(command) == 0
    found = sorted((tmp_path / "logs").iterdir())
    assert [f.name for f in found] == ["a_b (2) seed=0", "a_b seed=0", "a_b seed=1"]
    scalars, texts = events(found[2])
    assert {tag for tag, _ in scalars} == set(FLOATS) and {step for _, step in scalars} == {1, 2}
    assert scalars["accuracy", 2] == pytest.approx(0.9) and scalars["accuracy", 1] == pytest.approx(
        0.45
    )
    ((tag, text),) = texts.items()
    assert tag.startswith("hparams") and "lr = 0.1" in text
    assert main.main(command) == 2 and "empty or new directory" in capsys.readouterr().err


def test_event_files_say_whose_they_are(tmp_path, capsys, monkeypatch):
    pytest.importorskip("tensorboardX", reason='needs pip install -e ".[tensorboard]"')
    folder = made(tmp_path / "run", {"fedavg": ([0.8, 0.9, 0.7], [guarantee()], dict(failed=(1,)))})
    edit(
        "summary.json", lambda s: [e["config"].update(seed=e["seed"]) for e in s["runs"]] and None
    )(folder)
    monkeypatch.setattr(sections, "run_pictures", lambda groups: [])
    assert main.main(["report", str(folder), "--tensorboard", str(tmp_path / "logs")]) == 0
    assert (
        f"curves in {tmp_path / 'logs'}; 1 of its 3 runs failed, as their names say"
        in capsys.readouterr().out
    )
    found = sorted((tmp_path / "logs").iterdir())
    assert [f.name for f in found] == ["fedavg seed=0", "fedavg seed=1 failed", "fedavg seed=2"]
    for seed, run in enumerate(found):
        (text,) = events(run)[1].values()
        assert f"    seed = {seed}\n" in text
    # folders hold 255 bytes; names that differ behind those stay apart
    rows = [
        r
        for end in "ab"
        for r in record.rows("fedavg " + 200 * "é" + end, 0, dict(round=[1], loss=[1.0]))
    ]
    one, other = tables.tensorboard(tmp_path / "long", rows)
    assert one != other and all(
        re.fullmatch("fedavg é{71} [0-9a-f]{8} seed=0", f.name) and f.exists() for f in (one, other)
    )


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=re.escape('pip install -e ".[tensorboard]"')):
        tables.tensorboard(tmp_path / "logs", record.rows("a", 0, dict(round=[1], loss=[1.0])))
    assert not (tmp_path / "logs").exists()


def test_an_installation_has_the_templates():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    declared = {
        path.name
        for pattern in project["package-data"]["jfl.report"]
        for path in (ROOT / "jfl" / "report").glob(pattern)
    }
    found = {path.name for path in importlib.resources.files("jfl.report.templates").iterdir()}
    assert declared == found == {"page.html", "page.md", "page.css", "page.js"}


# --- a real browser


def browse(tmp_path, target, *more):
    return subprocess.run(
        [
            program(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            *more,
            target.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "scheme, paper",
    [pytest.param("light", (255, 255, 255), marks=pytest.mark.slow), ("dark", (20, 23, 26))],
)
def test_a_browser_shows_it(reported, tmp_path, scheme, paper):
    from matplotlib.image import imread

    seen = browse(
        tmp_path,
        reported,
        f"--screenshot={tmp_path / 'seen.png'}",
        "--window-size=900,1400",
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
    )
    assert not re.search(r"CONSOLE|ERR_|Refused", seen.stderr), seen.stderr
    image = imread(tmp_path / "seen.png")[..., :3]
    assert image.shape[:2] == (1400, 900)
    np.testing.assert_allclose(image[0, 0] * 255, paper, atol=1)
    far = np.abs(image - image[0, 0]).max(-1) > 0.6  # words and axes, against the paper, in both
    assert far.mean() > 0.005 and far[700:].mean() > 0.001


def test_what_a_browser_makes_of_hostile_files(hostile, tmp_path):
    seen = browse(tmp_path, hostile, "--dump-dom")
    assert not re.search(r"CONSOLE|ERR_|Refused", seen.stderr), seen.stderr
    parsed = Tables(seen.stdout)
    tags = [tag for tag, _ in parsed.tags]
    assert "img" not in tags and tags.count("svg") >= 2 and tags.count("table") >= 5
    assert parsed.scripts == Tables(hostile.read_text()).scripts and script_of(parsed)
