"""jfl report: what a page says, what it refuses, that it is harmless and asks for nothing."""

import base64
import hashlib
import importlib.resources
import json
import re
import shutil
import subprocess
import tomllib

import numpy as np
import pytest
from helpers import pretended
from helpers.browser import program
from helpers.paths import ROOT
from helpers.report_pages import EVIL, Tables, guarantee, made

from jfl.cli import main
from jfl.report import document as markup
from jfl.report import headline, page, plots, read, sections
from jfl.runs import guarantee_rows, pictures, sweep

pytestmark = pytest.mark.usefixtures("own_cache")


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
    options = """--clients 6 --min-rows 8 --model logistic --batch 4 --steps 1 --rounds 2
        --evaluate-every 1 --unit client --sampler full --sweep noise-multiplier=1.5
        --sweep seed=0,1"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "compute", pretended.compute)
        assert main.main(["sweep", *options.split(), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def reported(swept):
    """Its page, where it is put by itself."""
    page.main([swept])
    return swept / "report.html"


def test_the_page_of_a_real_sweep(swept, reported, capsys):
    files = [swept / "report.html", swept / "report.md", *(swept / "report_files").iterdir()]
    first = {p.name: p.read_bytes() for p in files}
    drawn = {name for name in first if name.startswith("picture")}
    runs = json.loads((swept / "summary.json").read_text())["runs"]
    (row,) = records(Tables(first["report.html"].decode()), HEAD)
    pair = [r["accuracy"]["final"] for r in runs]
    half = 12.7062047 * abs(pair[0] - pair[1]) / 2  # t of one degree of freedom; std / sqrt(2)
    best = guarantee_rows.best(runs[0]["privacy"])
    assert row["setting"] == runs[0]["name"] and row["seeds"] == "2"
    assert row["final accuracy"] == f"{np.mean(pair):.4f} ± {half:.4f}"
    assert (row["proved ε"], row["status"]) == (f"{best['epsilon']:.4g}", "proved")
    assert row["view"] == best["view"].replace("_", " ") and "claimed ε" not in row
    text = first["report.md"].decode()
    assert f"| {row['final accuracy']} |" in text and "jfl sweep --config" in text
    assert "Does not cover choosing among the points of the sweep." in text
    assert set(re.findall(r"<report_files/([^>]+)>", text)) == drawn and len(drawn) == 3
    assert all(first[name].startswith(b"\x89PNG") for name in drawn)
    assert first["report.html"].count(b"<svg") == 3
    # an earlier report is replaced, by the same bytes
    (swept / "report_files" / "picture-9.png").write_bytes(b"of an earlier report")
    assert main.main(["report", str(swept)]) == 0
    assert str(reported) in capsys.readouterr().out
    assert {p.name for p in (swept / "report_files").iterdir()} == drawn
    assert (swept / "report.html").read_bytes() == first["report.html"]


# --- what it says


def test_claimed_and_proved_stand_apart(tmp_path):
    claim = guarantee(0.5, "claimed", method="paper, Theorem 1", caveats=("of another unit",))
    third = guarantee(1.0, view="third_party")
    settings = {
        "both": [guarantee(7.0), claim],
        "claim alone": [claim],
        "cond": [guarantee(3.0, "conditional"), third],
        "cond alone": [guarantee(3.0, "conditional")],
        "nothing": [guarantee(None, caveats=("No noise",))],
    }
    parsed = shown(made(tmp_path / "run", {name: ([0.9], g, {}) for name, g in settings.items()}))
    cells = ("setting", "claimed ε", "proved ε", "unit", "view", "status")
    assert [tuple(row[cell] for cell in cells) for row in records(parsed, HEAD)] == [
        ("both", "0.5 (server)", "7", "example", "server", "proved"),
        ("claim alone", "0.5 (server)", "none", "", "", "no guarantee"),
        ("cond", "", "1", "example", "third party", "proved"),
        ("cond alone", "", "none", "", "", "conditional"),
        ("nothing", "", "none", "", "", "no guarantee"),
    ]
    every = records(parsed, ALL)
    assert [r["status"] for r in every] == [
        *("proved", "claimed", "claimed", "conditional", "proved", "conditional", "no guarantee")
    ]
    assert {r["caveats"] for r in every if r["status"] == "claimed"} == {"2"}
    assert "Of another unit." in parsed.words and "No noise." in parsed.words


def test_failed_seeds_are_counted_and_left_out(tmp_path):
    folder = made(tmp_path / "run", {"fedavg": ([0.8, 0.1, 1.0], [guarantee()], dict(failed=(1,)))})
    (row,) = records(shown(folder), HEAD)
    assert row["seeds"] == "2 (+1 failed)" and row["final accuracy"].startswith("0.9000 ± 1.27")
    (found,) = read.settings([read.read(folder)])
    np.testing.assert_array_equal(found.curves["accuracy"][1][:, -1], [0.8, 1.0])


def test_the_weakest_of_seeds_that_differ_stands_for_all(tmp_path):
    folder = made(tmp_path / "run")
    found = json.loads((folder / "summary.json").read_text())
    found["runs"][1]["privacy"] = [guarantee(9.0)]
    (folder / "summary.json").write_text(json.dumps(found))
    assert records(shown(folder), HEAD)[0]["proved ε"] == "9"


def test_a_page_shows_the_epsilon_of_the_view_that_a_config_asks_for(tmp_path):
    both = [guarantee(9.0), guarantee(4.5, view="third_party")]
    folder = made(tmp_path / "run", {"fedavg": ([0.8, 0.9], both, {})})
    found = json.loads((folder / "summary.json").read_text())
    for run in found["runs"]:
        run["config"]["view"] = "third_party"
    (folder / "summary.json").write_text(json.dumps(found))
    assert records(shown(folder), HEAD)[0]["proved ε"] == "4.5"
    cards, _ = headline.of(read.settings([read.read(folder)]))
    assert [card.value for card in cards if card.heading == "ε"] == ["4.5"]


def test_several_folders_stand_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(sections, "run_pictures", lambda groups: [])
    one, other = made(tmp_path / "a" / "run"), made(tmp_path / "b" / "run", config=None)
    assert "both.md" in page.main([one, other], tmp_path / "both.html")
    parsed = Tables((tmp_path / "both.html").read_text())
    assert [r["setting"] for r in records(parsed, HEAD)] == [f"{one}: fedavg", f"{other}: fedavg"]
    (data,) = records(parsed, "Rows and clients")  # of both
    assert data["data of"] == f"{one}; {other}" and (data["clients"], data["rows"]) == ("5", "40")
    assert f"# {other}: its config.toml is not there" in parsed.words


def test_two_of_one_name_are_told_apart_and_one_stands_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "run")
    assert page.labels(["run", "b/run", "c"]) == ["run", "b/run", "c"]
    (tmp_path / "link").symlink_to("run")
    for again in ("run/", "link"):
        assert main.main(["report", "run", again, "--out", "out.html"]) == 2
        assert "expected each directory or file once" in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()


def test_how_to_run_it_again(tmp_path):
    demo = made(tmp_path / "demo dir", config=None)
    (demo / "demo.png").write_bytes(b"")
    sweep = made(tmp_path / "it's", config="lr = 1\n\n[sweep]\nseed = [0]\n")
    words = shown(demo, sweep, made(tmp_path / "run")).words
    assert "jfl demo --rounds 2 --seeds 3 --out NEW" in words
    assert f"jfl sweep --config '{tmp_path}/it'\"'\"'s/config.toml' --out NEW" in words
    assert f"jfl train --config {tmp_path}/run/config.toml --out NEW" in words


# --- harmless

# each ends a script, or begins what hides its end, if it stands in one as it is
HOSTILE = ["</script><script>alert(1)</script>", "<!--<script>", "\u2028alert(1)\u2029", "&lt;]]>"]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The page of folders that say what they should not."""
    out = tmp_path_factory.mktemp("hostile")
    evil = guarantee(caveats=(EVIL,), method=EVIL)
    folder = made(
        out / "<img src=x>",
        {name: ([0.5, 0.6], [evil], {}) for name in (EVIL, *HOSTILE)},
        config=f"# {EVIL}\n````\n",
        manifest=dict(versions={EVIL: EVIL}, data=dict(clients=1, caveats=[EVIL])),
    )
    shutil.copytree(folder, out / "plain")
    page.main([folder, out / "plain"], out / "out.html")
    return out / "out.html"


def script_of(parsed):
    """The one script of a page, which its policy names."""
    ((attrs, script),) = parsed.scripts
    (policy,) = [a["content"] for tag, a in parsed.tags if tag == "meta" and "http-equiv" in a]
    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert attrs == {} and allowed["script-src"] == f"'sha256-{digest}'"
    assert allowed.pop("default-src") == "'none'"
    assert allowed.keys() == {"style-src", "img-src", "script-src"}
    return script


def test_what_files_say_is_shown_and_not_run(hostile):
    text, mark = hostile.read_text(), hostile.with_suffix(".md").read_text()
    parsed = Tables(text)
    assert not {tag for tag, _ in parsed.tags} & {"img", "iframe", "object", "form"}
    script = script_of(parsed)
    assert "alert" not in script and "http" not in script
    assert sum(tag == "svg" for tag, _ in parsed.tags) >= 2
    assert not [a for _, attrs in parsed.tags for a in attrs if a.startswith("on")]
    assert parsed.words.count("<script>alert(1)</script>") > 10
    for tag, attrs in parsed.tags:
        for name in ("src", "href", "xlink:href"):
            assert attrs.get(name, "#").startswith(("#", "data:")), (tag, attrs)
    assert "@import" not in text and not re.search(r"url\((?!#)", text.split("</head>")[1])
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\"' ]*", text.replace(script, ""))) <= namespaces
    # and the page in Markdown, but for its code
    outside = re.sub(r"(?sm)^(```+)\n.*?\n\1\n", "", mark)
    assert "<script" not in outside and "<img" not in outside and "`````" in mark
    rows = [line for line in outside.splitlines() if line.startswith("|")]
    (head,) = [r for r in rows if r.startswith("| setting | seeds")]
    assert {len(re.findall(r"(?<!\\)\|", r)) for r in rows[:3]} == {head.count("|")}


def test_what_a_browser_makes_of_hostile_files(hostile, tmp_path):
    command = [program(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command += ["--disable-sync", "--enable-logging=stderr", f"--user-data-dir={tmp_path}"]
    command += ["--dump-dom", hostile.as_uri()]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not re.search(r"CONSOLE|ERR_|Refused", seen.stderr), seen.stderr
    parsed = Tables(seen.stdout)
    tags = [tag for tag, _ in parsed.tags]
    assert "img" not in tags and tags.count("svg") >= 2 and tags.count("table") >= 5
    assert parsed.scripts == Tables(hostile.read_text()).scripts and script_of(parsed)


def test_it_can_be_read_by_all(reported):
    text = reported.read_text()
    parsed = Tables(text)
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in parsed.tags if tag == "th")
    svgs = [attrs for tag, attrs in parsed.tags if tag == "svg"]
    assert len(svgs) == 3 and all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in svgs)
    ids = [attrs["id"] for _, attrs in parsed.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)
    links = [a["href"][1:] for _, a in parsed.tags if a.get("href", "").startswith("#")]
    links += [a["xlink:href"][1:] for _, a in parsed.tags if "xlink:href" in a]
    links += re.findall(r"url\(#([^)]+)\)", text)
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


def renamed(name):
    """Instead of summary.json, the first file of a run."""
    return lambda folder: (folder / "summary.json").rename(folder / name)


def entry(change):
    """Of summary.json: `change` is given its first run."""
    return edit("summary.json", lambda s: change(s["runs"][0]) and None)


def privacy(**values):
    return entry(lambda run: run["privacy"][0].update(values))


def cell(old, new):
    """Of metrics.csv: the first `old` becomes `new`."""

    def apply(folder):
        text = (folder / "metrics.csv").read_text()
        (folder / "metrics.csv").write_text(re.sub(old, new, text, count=1, flags=re.M | re.S))

    return apply


BROKEN = dict(
    empty=(lambda f: [p.unlink() for p in f.iterdir()], "expected a folder with a run"),
    running=(gone("summary.json"), "expected a finished run"),
    stopped=(renamed("journal.json"), "jfl train --resume continues"),
    sweeping=(renamed("points.jsonl"), "jfl sweep --resume continues"),
    half=(cut("summary.json"), "summary.json: expected the JSON that a run wrote"),
    half_table=(cut("metrics.csv"), "half-written"),
    no_format=(edit("summary.json", lambda s: s.pop("format") and None), "expected format 1"),
    no_manifest=(gone("manifest.json"), "manifest.json: expected the JSON"),
    format_=(edit("summary.json", lambda s: s | dict(format=2)), "expected format 1"),
    unknown=(edit("summary.json", lambda s: s | dict(version=2)), "unknown field `version`"),
    other=(edit("summary.json", lambda s: [1]), "expected a JSON object, but got list"),
    no_runs=(edit("summary.json", lambda s: s | dict(runs=[])), "expected at least one run, as"),
    field=(entry(lambda run: run.pop("privacy")), "summary.json, runs[0]: expected"),
    type_=(entry(lambda run: run.update(seed="1")), "summary.json, runs[0].seed: expected `int`"),
    none=(entry(lambda run: run.update(privacy=[])), "at least one guarantee or refusal"),
    epsilon=(privacy(epsilon="2"), "runs[0].privacy[0].epsilon: expected"),
    below=(privacy(epsilon=-1.0), "privacy[0].epsilon: expected `float` >= 0"),
    unproved=(privacy(epsilon=None, status="proved"), 'null with status "no guarantee"'),
    facts=(edit("manifest.json", lambda m: m | dict(data=[1])), "manifest.json, data: expected"),
    header=(cell("round,", "turn,"), "with columns round"),
    number=(cell("0.4", "x.4"), "line 2: expected a number accuracy, but got 'x.4'"),
    lost=(cell("^fedavg,2.*", ""), "but got none of fedavg seed=2"),
)


@pytest.mark.parametrize("change, words", BROKEN.values(), ids=BROKEN)
def test_broken_folders_are_refused_and_nothing_is_written(tmp_path, capsys, change, words):
    folder = made(tmp_path / "run")
    change(folder)
    assert main.main(["report", str(folder), "--out", str(tmp_path / "out.html")]) == 2
    said = capsys.readouterr().err
    assert words in said and "expected " in said and "but got " in said
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "args, words",
    [
        (["nowhere"], "which does not exist"),
        (["file"], "expected a folder with a run"),
        ([], "at least one directory"),
        (["run", "--out", "page.txt"], "ends in .html"),
        (["run", "--out", "no/page.html"], "No such file or directory"),
        (["run", "--out", "mine.html"], "mine.html, which is something else"),
        (["run", "--out", "notes.html"], "notes.md, which is something else"),
        (["run", "--out", "photos.html"], "photos_files, which is something else"),
        (["run", "--out", "folder.html"], "folder.html, which is something else"),
    ],
)
def test_what_is_no_earlier_report_stays(tmp_path, capsys, monkeypatch, args, words):
    monkeypatch.setattr(sections, "run_pictures", lambda groups: [])
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "run")
    (tmp_path / "photos_files").mkdir()
    (tmp_path / "folder.html").mkdir()
    for name in ("file", "mine.html", "notes.md", "photos_files/holiday.png"):
        (tmp_path / name).write_text("<!doctype html> mine")
    files = lambda: {p: p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")}
    before = files()
    assert main.main(["report", *args]) == 2
    assert words in capsys.readouterr().err and files() == before


# --- pictures


def setting(label, final, guarantees, dataset="digits"):
    return plots.Setting(
        label,
        {"accuracy": ([1, 2], np.array([[f / 2, f] for f in final]))},
        final,
        guarantees,
        dataset,
    )


def filled(ax):
    """x, y and whether it is filled, of every mark in a panel."""
    marks = [line for line in ax.lines if line.get_marker() == "o"]
    at = lambda line: (float(line.get_xdata()[0]), round(float(line.get_ydata()[0]), 6))
    return sorted((*at(line), line.get_markerfacecolor() != "none") for line in marks)


def dashed(ax):
    return [line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == "--"]


def test_only_what_compares_shares_an_axis():
    third = guarantee(1.0, view="third_party")
    of_one_round = guarantee(0.1, "claimed", rounds=1)
    implied = guarantee(3.0, implied=True)  # is not drawn, though it is smaller
    settings = [
        setting("a", [0.8, 0.9], [guarantee(2.0), third, guarantee(0.5, "claimed")]),
        setting("b", [0.7], [guarantee(4.0), of_one_round, implied]),
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
    assert list(map(filled, figure.axes)) == [
        [(0.5, 0.85, False), (2.0, 0.85, True), (4.0, 0.7, True)],
        [(8.0, 0.6, True)],
        [(1.0, 0.85, True)],
    ]
    assert list(map(dashed, figure.axes)) == 3 * [[0.95]]
    words = [t.get_text() for t in figure.legends[0].get_texts()]
    assert words == ["a", "b", "c", "none", "proved", "claimed"]
    assert plots.frontier([setting("none", [0.9], [guarantee(None)])]) is None


def test_only_the_same_data_share_a_dashed_line():
    def data(dataset="synthetic", **config):
        fields = dict(synthetic_alpha=0.0, lr=0.1) | config
        return read.data_of([dict(dataset=dataset, config=fields)])

    assert data() == data(lr=0.5)  # what is no field of data makes no other data
    others = data(synthetic_alpha=1.0), data(partition="iid"), data("digits")
    assert len({data(), *others}) == 4
    settings = [
        setting("a", [0.3], [guarantee(2.0)], data()),
        setting("b", [0.4], [guarantee(None)], data()),
        setting("elsewhere", [0.7], [guarantee(None)], others[0]),
    ]
    (ax,) = plots.frontier(settings).axes
    assert dashed(ax) == [0.4]


@pytest.mark.by_default("epsilons0", "epsilons1")
@pytest.mark.parametrize("epsilons", [(0.0,), (0.0, 1e-6, 50.0), (1.0, 8.0)])
def test_an_epsilon_of_nothing_has_a_place(epsilons, tmp_path):
    """0 has no logarithm: it stands left of all others, under its own name."""
    (ax,) = plots.frontier([setting("a", [0.3], [guarantee(e)]) for e in epsilons]).axes
    points = ax.transData.transform([(e, 0.3) for e in epsilons])
    at = ax.transAxes.inverted().transform(points)[:, 0]
    assert (np.diff(at) > 0.01).all() and 0.01 < at[0] and at[-1] < 0.99
    told = {t.get_text() for t in ax.get_xticklabels()}
    assert ("0" in told) == (epsilons[0] == 0) and len(told) > 1 - (max(epsilons) == 0)
    label = dict(name="a", point={}, privacy="", promise="")
    groups = [label | dict(round=[1, 2], accuracy=[[0.2, 0.3]], epsilon=e) for e in epsilons]
    pictures.draw_accuracy(tmp_path / "p.png", groups, "")
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_no_two_settings_look_the_same():
    """More settings than colours: as curves, as single points, as proved and as unprotected."""
    look = lambda line: (
        *(line.get_color(), str(line._dash_pattern), line.get_marker()),
        line.get_linestyle() == "None",
    )
    drawn = lambda figure: {look(h) for h in figure.legends[0].legend_handles[: plots.SHOWN]}
    for epsilon in (2.0, None):
        settings = [setting(f"{i}", [0.5], [guarantee(epsilon)]) for i in range(plots.SHOWN)]
        one_round = [s._replace(curves={"accuracy": ([1], np.ones((1, 1)))}) for s in settings]
        for several in (settings, one_round):
            figure = plots.curves(several, "accuracy")
            assert len(drawn(figure)) == plots.SHOWN > len(plots.COLOURS)
        settings.append(setting("proved", [0.5], [guarantee()]))  # so that there is a panel
        settings = settings[-plots.SHOWN :]
        assert len(drawn(plots.frontier(settings))) == len(settings)


def test_curves_have_bands_over_seeds():
    settings = [setting("$x^$", [0.8, 0.9, 0.4], []), setting("one", [0.5], [])]
    figure = plots.curves(settings, "accuracy", "loss")
    (ax,) = figure.axes
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [0.35, 0.7])
    (band,) = ax.collections
    points = band.get_paths()[0].vertices
    assert (points[:, 1].min(), points[:, 1].max()) == pytest.approx((0.2, 0.9))
    assert all(tick == int(tick) for tick in ax.get_xticks())  # a round is an integer
    assert ax.lines[0].get_color() == plots.INK and ax.lines[1].get_color() == pictures.PALETTE[1]
    svg = plots.svg(figure)
    assert "$x^$" in svg and plots.INK not in svg and svg == plots.svg(figure)
    assert plots.curves(settings, "clip_fraction") is None


@pytest.mark.parametrize(
    "values, scale",
    [([[1.0, 100.0, np.nan], [2.0, 50.0, np.inf]], "log"), ([[1.0, 2.0, 2.0]], "linear")],
)
def test_a_curve_that_diverges_has_gaps_and_a_logarithmic_axis(values, scale):
    run = plots.Setting("a", {"loss": ([1, 2, 3], np.array(values))}, [], [], "")
    (ax,) = plots.curves([run], "loss").axes
    assert ax.get_yscale() == scale


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
