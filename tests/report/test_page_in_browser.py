"""The page of jfl report in a real browser, at the widths of a desk and of a hand: what it shows,
what answers, and that it asks for nothing.

Pictures of it are left in pytest's temporary folder, or in the folder that JFL_PICTURES names."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.browser import Browser
from helpers.report_pages import guarantee, made

from jfl.report import page

pytestmark = pytest.mark.slow
WIDTHS = (1400, 400)
FIGURES = "document.querySelectorAll('figure')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = os.environ.get("JFL_PICTURES")
    folder = Path(folder) if folder else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """The page of settings with every status, two promises, and failed seeds."""
    folder = tmp_path_factory.mktemp("browsed")
    settings = {
        "without noise": ([0.95, 0.96, 0.94], [guarantee(None)], {}),
        "tight": ([0.5, 0.6, 0.55], [guarantee(0.5), guarantee(0.2, view="third_party")], {}),
        "wide": ([0.8, 0.9, 0.85], [guarantee(8.0)], {}),
        "failing": ([0.7, 0.1, 0.75], [guarantee(3.0)], dict(failed=(1,))),
        "printed": ([0.88], [guarantee(40.0), guarantee(2.0, "claimed", method="paper")], {}),
    }
    config = 'algorithm = "fedavg"\n\n[sweep]\nseed = [0, 1, 2]\n'
    page.main([made(folder / "it's a run", settings, config)], folder / "page.html")
    return folder / "page.html"


def opened(browser, reported, width=1400, scheme="light", **media):
    browser.open(reported, width, 2400, scheme, **media)
    browser.run("for (const d of document.querySelectorAll('details')) d.open = false")
    return browser


@pytest.mark.parametrize("scheme, paper", [("light", (255, 255, 255)), ("dark", (20, 23, 26))])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_its_width_and_asks_for_nothing(browser, reported, pictures, width, scheme, paper):
    from matplotlib.image import imread

    opened(browser, reported, width, scheme)
    for i in range(browser.run(f"{FIGURES}.length")):
        browser.run(f"{FIGURES}[{i}].scrollIntoView({{behavior: 'instant'}})")
    browser.run("scrollTo({top: 0, behavior: 'instant'})")
    assert browser.run("document.documentElement.scrollWidth") == width
    asked = browser.requests()
    assert asked[0] == reported.as_uri() and all(u.startswith("data:") for u in asked[1:])
    assert not browser.complaints()
    image = imread(browser.picture(pictures / f"report-{width}-{scheme}.png"))[..., :3]
    assert image.shape[:2] == (2400, width)
    np.testing.assert_allclose(image[0, 0] * 255, paper, atol=1)
    far = np.abs(image - image[0, 0]).max(-1) > 0.6
    assert far.mean() > 0.005


def test_the_theme_can_be_changed_and_is_kept(browser, reported):
    opened(browser, reported)
    ink = "getComputedStyle(document.querySelector('.still svg')).color"
    paper = "getComputedStyle(document.body).backgroundColor"
    assert (browser.run(paper), browser.run(ink)) == ("rgb(255, 255, 255)", "rgb(31, 35, 40)")
    browser.run("document.querySelector('.theme').click()")
    assert (browser.run(paper), browser.run(ink)) == ("rgb(20, 23, 26)", "rgb(230, 232, 235)")
    opened(browser, reported)
    assert browser.run(paper) == "rgb(20, 23, 26)"
    browser.run("document.querySelector('.theme').click()")
    assert browser.run(paper) == "rgb(255, 255, 255)"
    browser.run("localStorage.clear()")


def test_tables_are_sorted_up_and_down_and_as_they_were(browser, reported):
    opened(browser, reported)
    table = "document.querySelector('table')"
    first = f"[...{table}.tBodies[0].rows].map(r => r.cells[0].innerText)"
    names = browser.run(first)
    column = browser.run(
        f"[...{table}.tHead.rows[0].cells].map(c => c.innerText).indexOf('proved ε')"
    )
    head = f"{table}.tHead.rows[0].cells[{column}]"
    click = f"{head}.querySelector('.sort').click()"
    assert column > 0 and browser.run(f"{head}.querySelector('button').ariaLabel") == (
        "Sort by proved ε"
    )
    browser.run(click)
    up = ["tight", "failing", "wide", "printed", "without noise"]  # what has none stays below
    assert browser.run(first) == up and browser.run(f"{head}.ariaSort") == "ascending"
    browser.run(click)
    assert browser.run(first) == [*reversed(up[:-1]), "without noise"]
    browser.run(click)
    assert browser.run(first) == names and not browser.run(f"{head}.hasAttribute('aria-sort')")


def test_terms_are_told_where_the_pointer_or_the_focus_is(browser, reported):
    opened(browser, reported)
    term = "document.querySelector('table .term[href=\"#term-adjacency\"]')"
    tip = "document.querySelector('.tip')"
    left, top, width, height = browser.place(term)
    browser.point(left + width / 2, top + height / 2)
    words = browser.until(f"!{tip}.hidden && {tip}.innerText")
    assert words.startswith("adjacency") and "add_remove" in words
    box = browser.run(f"(r => [r.left, r.right, r.top])({tip}.getBoundingClientRect())")
    assert box[0] >= 0 and box[1] <= 1400 and box[2] >= 0
    browser.press("Escape")
    assert browser.run(f"{tip}.hidden")
    browser.run(f"{term}.focus()")
    assert browser.until(f"!{tip}.hidden")


def test_commands_are_copied_as_they_are(browser, reported):
    opened(browser, reported)
    browser.run("navigator.clipboard.writeText = async (words) => { window.copied = words; }")
    browser.run("document.querySelector('.commands button').click()")
    copied = browser.until("window.copied")
    assert re.fullmatch(r"jfl sweep --config '.*it'\"'\"'s a run/config.toml' --out NEW", copied)


def test_paper_and_browsers_without_scripts_have_the_still_pictures(browser, reported):
    opened(browser, reported)
    shown = "(s => [...document.querySelectorAll(s)].map(e => getComputedStyle(e).display))"
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert set(browser.run(f"{shown}('.still')")) == {"block"}
    assert set(browser.run(f"{shown}('nav, button')")) == {"none"}
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.call("Emulation.setEmulatedMedia", media="")
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        opened(browser, reported, 400, "dark")
        assert browser.run(f"{shown}('.still')") == ["block"] * 3
        assert browser.run("document.querySelectorAll('button').length") == 0
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_nothing_moves_for_those_who_ask_for_it(browser, reported):
    moves = "getComputedStyle(document.querySelector('button')).transitionDuration"
    for motion, still in (("reduce", True), ("no-preference", False)):
        opened(browser, reported, prefers_reduced_motion=motion)
        assert (browser.run(moves) == "0s") == still


def test_no_script_but_ours_runs(browser, reported, tmp_path):
    text = reported.read_text()
    foreign = "<script>window.foreign = 1</script><img src=x onerror='window.foreign = 2'></main>"
    (tmp_path / "page.html").write_text(text.replace("</main>", foreign))
    browser.open(tmp_path / "page.html")
    assert browser.run("window.foreign") is None
    assert "Content Security Policy" in str(browser.complaints())
