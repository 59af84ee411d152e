"""What a page is made of: its script, terms that can be reached, colours that can be read, Markdown
that folds."""

import importlib.resources
import re

import pytest
from helpers.report_pages import Tables, guarantee, made

from jfl.report import document, read, sections

TEMPLATES = importlib.resources.files("jfl.report.templates")


def page_of(*folders):
    return document.page(sections.assemble([read.read(f) for f in folders]))


@pytest.fixture
def without_pictures(monkeypatch):
    """They take most of the time."""
    monkeypatch.setattr(sections, "run_pictures", lambda groups: [])


def test_a_page_is_light():
    text = document.Text("words")
    plain = document.page(document.Document("t", "", [document.Section("a", [text])]))
    assert len(Tables(plain).scripts) == 1 and len(plain.encode()) < 40_000


def test_our_script_writes_no_markup_and_asks_for_nothing():
    script = TEMPLATES.joinpath("page.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|new Function|</script", script)


def test_terms_can_be_reached_and_are_told(tmp_path, without_pictures):
    claim = guarantee(0.5, "claimed", method="paper")
    page = page_of(made(tmp_path / "run", {"a": ([0.9], [guarantee(7.0), claim], {})}))
    parsed = Tables(page)
    ids = {attrs["id"] for _, attrs in parsed.tags if "id" in attrs}
    terms = [a for tag, a in parsed.tags if tag == "a" and a.get("class") == "term"]
    reached = {a["href"].removeprefix("#term-") for a in terms}
    assert {"unit", "adjacency", "view", "δ", "ε", "proved", "claimed", "method"} <= reached
    for attrs in terms:  # links have the focus by themselves
        assert attrs["href"][1:] in ids and attrs["aria-describedby"] in ids
    wanted = {"unit", "adjacency", "view", "δ", "proved", "claimed", "audited"}
    assert wanted <= document.GLOSSARY.keys() and all(f"term-{n}" in ids for n in document.GLOSSARY)
    assert all(words in parsed.words for words in document.GLOSSARY.values())
    # one dark palette serves the system and the button
    assert page.count("--ink: #e6e8eb") == 2 and "{{" not in page.split("</style>")[0]
    assert "prefers-color-scheme: dark" in page and ':root[data-theme="dark"]' in page


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_words_and_lines_can_be_read_in_both_modes():
    css = TEMPLATES.joinpath("page.css").read_text()
    light = dict(re.findall(r"--(\w+): (#\w{6})", css.split("{% set dark %}")[0]))
    dark = dict(re.findall(r"--(\w+): (#\w{6})", css.split("{% set dark %}")[1].split("{% end")[0]))
    assert light.keys() - dark.keys() <= {"shadow"} and len(dark) > 14
    for colours in (light, dark):
        for name in ("ink", "quiet", "link", "good", "bad"):
            for ground in ("paper", "panel"):
                assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground, colours)
        for i in range(8):  # lines and marks
            assert contrast(colours[f"c{i}"], colours["paper"]) >= 3, (i, colours)


def test_markdown_folds_what_the_page_folds(tmp_path, without_pictures):
    folder = made(tmp_path / "run", {"a </summary>\n<b>": ([0.9], [guarantee()], {})})
    assembled = sections.assemble([read.read(folder)])
    text, _ = document.markdown(assembled, "files")
    outside = re.sub(r"(?sm)^(```+)\n.*?\n\1\n", "", text)
    assert outside.count("<details markdown") == outside.count("</details>") == 2
    assert outside.count("<summary>") == outside.count("</summary>") == 2 and "<b>" not in outside
    first = text.split("\n## ")[0]
    best = "- Best private accuracy: 0.9000 (setting a &lt;/summary&gt; &lt;b&gt;; seeds 1)"
    assert best in first
    assert "- ε: 2 (δ 1e-05; unit example; adjacency add\\_remove; view server)." in first


def test_commands_stand_one_by_one():
    code = document.Code("jfl demo --out NEW\n# a comment\njfl list", commands=True)
    page = document.page(document.Document("t", "", [document.Section("a", [code])]))
    assert page.count('class="command"') == 2 and '<p class="quiet"># a comment</p>' in page
    text, _ = document.markdown(document.Document("t", "", [document.Section("a", [code])]), "f")
    assert "```\njfl demo --out NEW\n# a comment\njfl list\n```" in text
