"""The documentation site: it builds, and needs no network, neither to build nor to read."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from helpers import pages
from helpers.paths import ROOT

# where a browser fetches from; `a` is followed by people alone
FETCHED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


class Fetches(HTMLParser):
    """What a page makes a browser fetch, beside its own site."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        target = dict(attributes).get(FETCHED.get(tag, ""), "") or ""
        if re.match(r"(https?:)?//", target):
            self.found.append(target)


def fetched(html):
    parser = Fetches()
    parser.feed(html)
    return parser.found


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="the site is built where .[docs] is installed")
    out = tmp_path_factory.mktemp("site")
    # a proxy that is not there: whoever reaches for the network fails
    closed = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT,
        env=os.environ | closed | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.mark.slow
def test_the_site_builds_with_every_page(site):
    """Strict: a link, an anchor, a name of the reference or a page without a place is an error."""
    built = {p.relative_to(site).with_suffix("").as_posix() for p in site.rglob("*.html")}
    docs = {p.relative_to(ROOT / "docs").with_suffix("").as_posix() for p in pages.PAGES[1:]}
    assert docs <= built and len(docs) >= 25
    index = (site / "reference" / "index.html").read_text()
    assert 'id="jfl.federate"' in index and "The rows of" in index


@pytest.mark.slow
def test_the_site_fetches_nothing(site):
    for page in site.rglob("*.html"):
        assert not fetched(page.read_text()), page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?https?:|@import", sheet.read_text()), sheet.name
    assert (site / "site" / "iframe_worker.js").is_file()
    assert (site / "search" / "search_index.js").is_file()  # search works in pages opened as files


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_blocks_of_a_page_stand_apart(page):
    """A heading, list or table that follows a line of text at once is text to mkdocs."""
    text = pages.FENCE.sub("", page.read_text())
    glued = re.findall(r"^(?!\s|$|- |\d+\. |[#|>]).*\n(?:#+ |- |\d+\. |\|).*", text, re.M)
    assert not glued
    assert not re.findall(r"^(?:- |\|).*\n#+ .*", text, re.M)


def test_what_is_fetched_is_seen():
    assert fetched('<script src="https://cdn.example/x.js"></script>') and fetched(
        '<link rel="stylesheet" href="//fonts.example/a.css">'
    )
    assert not fetched('<a href="https://example.org">x</a><img src="../pictures/unit.svg">')
