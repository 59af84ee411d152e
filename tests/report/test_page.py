"""jfl report: what a page says, what it refuses, that it is harmless and asks for nothing; rows and
event files."""

import base64
import hashlib
import importlib.resources
import json
import re
import shutil
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
from helpers.paths import ROOT
from helpers.problems import noisy_grad, noisy_release, squared
from helpers.report_pages import EVIL, Tables, guarantee, made

import jfl
from jfl.cli import main
from jfl.report import document as markup
from jfl.report import page, plots, read, sections
from jfl.runs import guarantee_rows, pictures, record, sweep, tables


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JFL_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
    assert jax.config.jax_compilation_cache_dir is not None  # where all tests have their programs


def shown(*folders):
    """The page without its pictures, which take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sections, "run_pictures", lambda groups: [])
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
        patch.setattr(sweep, "compute", pretended.compute)
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
        best = guarantee_rows.best(runs[2 * i]["privacy"])
        assert row["setting"] == runs[2 * i]["name"] and row["seeds"] == "2"
        assert row["final accuracy"] == f"{pair.mean():.4f} ± {half:.4f}"
        assert (row["proved ε"], row["status"]) == (f"{best['epsilon']:.4g}", "proved")
        assert row["view"] == best["view"].replace("_", " ")
    assert len(rows) == 1 and "claimed ε" not in rows[0]
    text = first["report.md"].decode()
    assert f"| {rows[0]['final accuracy']} |" in text and "jfl sweep --config" in text
    assert "Does not cover choosing among the points of the sweep." in text
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
    monkeypatch.chdir(tmp_path)
    for name in ("run", "b/run", "c"):
        made(tmp_path / name)
    page.main(["run", "b/run"], tmp_path / "two.html")
    assert "jfl report: run, b/run" in Tables((tmp_path / "two.html").read_text()).words
    assert page.labels(["run", "c"]) == ["run", "c"]
    (tmp_path / "link").symlink_to("run")
    for again in ("run/", "link"):
        assert main.main(["report", "run", again, "--out", "out.html"]) == 2
        assert (
            "expected each directory or file once, but got run and "
            f"{Path(again)}, which are the same" in capsys.readouterr().err
        )
    assert not (tmp_path / "out.html").exists()


def test_a_name_that_utf8_cannot_hold_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sections, "run_pictures", lambda groups: [])
    folder = made(tmp_path / "lat\udce9")  # of bytes in another code
    for more in ([], ["--out", str(tmp_path / "out.html")]):
        assert main.main(["report", str(folder), *more]) == 2
        assert (
            "expected names and texts that UTF-8 can encode, but got '# jfl report: lat\\udce9'"
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


def test_files_of_before_formats_had_a_number_are_read(tmp_path):
    folder = made(tmp_path / "run")
    found = json.loads((folder / "summary.json").read_text())
    assert found.pop("format") == record.FORMAT == 1
    (folder / "summary.json").write_text(json.dumps(found))
    assert len(records(shown(folder), HEAD)) == 1


# --- harmless


def evil(tmp_path):
    folder = made(
        tmp_path / "<img src=x>",
        {EVIL: ([0.5, 0.6], [guarantee(caveats=(EVIL,), method=EVIL)], {})},
        config=f"# {EVIL}\n````\n",
        manifest=dict(versions={EVIL: EVIL}, data=dict(clients=1, caveats=[EVIL])),
    )
    alone = tmp_path / "plain"
    shutil.copytree(folder, alone)
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
    empty=(lambda f: [p.unlink() for p in f.iterdir()], "expected a folder with a run"),
    running=(gone("summary.json"), "expected a finished run"),
    half=(cut("summary.json"), "summary.json: expected the JSON that a run wrote"),
    half_manifest=(cut("manifest.json"), "manifest.json: expected the JSON"),
    half_table=(cut("metrics.csv"), "half-written"),
    no_table=(gone("metrics.csv"), "metrics.csv: expected the table"),
    no_manifest=(gone("manifest.json"), "manifest.json: expected the JSON"),
    version=(
        edit("summary.json", lambda s: s | dict(version=2)),
        "got Object contains unknown field `version`",
    ),
    format_=(
        edit("summary.json", lambda s: s | dict(format=2)),
        "summary.json: expected format 1, which is what this version",
    ),
    flag=(edit("summary.json", lambda s: s | dict(format=True)), "got format True"),
    no_runs=(edit("summary.json", lambda s: dict(runs=[])), "expected at least one run, as"),
    other=(edit("summary.json", lambda s: [1]), "expected a JSON object, but got list"),
    field=(
        edit("summary.json", lambda s: s["runs"][0].pop("privacy") and None),
        "summary.json, runs[0]: expected what a run writes, as",
    ),
    type_=(
        edit("summary.json", lambda s: s["runs"][1].update(seed="1")),
        "summary.json, runs[1].seed: expected `int`, as this version of jfl writes it, "
        "but got `str`",
    ),
    nothing_proved=(
        edit("summary.json", lambda s: s["runs"][1].update(privacy=[])),
        "expected at least one guarantee or refusal",
    ),
    guarantee=(
        edit("summary.json", lambda s: s["runs"][0]["privacy"][0].update(epsilon="2")),
        "runs[0].privacy[0].epsilon: expected",
    ),
    manifest=(
        edit("manifest.json", lambda m: dict(data={})),
        "manifest.json: expected what a run writes",
    ),
    facts=(
        edit("manifest.json", lambda m: m | dict(data=[1])),
        "manifest.json, data: expected `object`",
    ),
    caveat=(
        edit("summary.json", lambda s: s["runs"][0]["privacy"][0].update(caveats=[{}])),
        "runs[0].privacy[0].caveats[0]: expected `str`",
    ),
    number=(csv_cell("0.4", "x.4"), "line 2: expected a number accuracy, but got 'x.4'"),
    lost=(
        lambda f: (f / "metrics.csv").write_text(
            re.sub("(?m)^fedavg,2.*\n", "", (f / "metrics.csv").read_text())
        ),
        "expected rows of every run in summary.json, but got none of fedavg seed=2",
    ),
    header=(csv_cell("round,", "turn,"), "with columns round"),
    unproved=(
        edit(
            "summary.json",
            lambda s: s["runs"][0]["privacy"][0].update(epsilon=None, status="proved"),
        ),
        'or null with status "no guarantee", as this version',
    ),
    below=(
        edit("summary.json", lambda s: s["runs"][0]["privacy"][0].update(epsilon=-1.0)),
        "privacy[0].epsilon: expected `float` >= 0",
    ),
)


@pytest.mark.parametrize("change, words", BROKEN.values(), ids=BROKEN)
def test_broken_folders_are_refused_and_nothing_is_written(tmp_path, capsys, change, words):
    folder = made(tmp_path / "run")
    change(folder)
    assert main.main(["report", str(folder), "--out", str(tmp_path / "out.html")]) == 2
    said = capsys.readouterr().err
    assert words in said and "expected " in said and ", but got " in said
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "args, words",
    [
        (["nowhere"], "which does not exist"),
        (["file"], "expected a folder with a run"),
        ([], "at least one directory"),
        (["run", "run"], "--out FILE.html"),
        (["run", "--out", "page.txt"], "ends in .html"),
        (["run", "--out", "no/page.html"], "an existing directory"),
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
    assert words in said and ", but got " in said
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
    pictures.draw_accuracy(tmp_path / "p.png", groups, "")
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
    assert ax.lines[0].get_color() == plots.INK and ax.lines[1].get_color() == pictures.PALETTE[1]
    svg = plots.svg(figure)
    assert "$x^$" in svg and plots.INK not in svg and svg == plots.svg(figure)
    assert plots.panels_of_runs([setting("one", [0.5], [])], ("clip_fraction",)) == []
    assert plots.curves([], []) is None


@pytest.mark.parametrize(
    "values, scale",
    [([[1.0, 100.0, np.nan], [2.0, 50.0, np.inf]], "log"), ([[1.0, 2.0, 2.0]], "linear")],
)
def test_a_curve_that_diverges_has_gaps_and_a_logarithmic_axis(values, scale):
    run = plots.Setting("a", {"loss": ([1, 2, 3], np.array(values))}, [], [], "")
    (ax,) = plots.curves(["a"], plots.panels_of_runs([run], ("loss",))).axes
    assert ax.get_yscale() == scale


def test_as_many_settings_look_different_as_are_shown():
    looks = {plots.look_of(i) for i in range(plots.SHOWN)}
    assert len(looks) == plots.SHOWN


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


def test_tidy_rows_of_a_run_and_a_sweep(fed, task):
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

    for bad, words in (
        (lambda: tables.tidy(3), "what jfl.simulate"),
        (lambda: tables.tidy(out, delta=1e-5), "the plan"),
    ):
        with pytest.raises(ValueError, match=words):
            bad()
    several = out._replace(metrics=jax.tree.map(lambda x: np.stack([x, x]), out.metrics))
    with pytest.raises(ValueError, match="one run"):
        tables.tidy(several)


def test_rows_say_of_which_promise_an_epsilon_is_and_what_failed(fed, task, monkeypatch):
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
    monkeypatch.setattr(guarantee_rows, "all_rows", lambda *_: [guarantee(3.0, "conditional")])
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


# --- the package


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
