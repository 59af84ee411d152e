"""A document of headings, tables and pictures, written as one HTML page or as Markdown.

Everything that is shown was read from somebody's files, so all of it is escaped: by Jinja in the
page, by `_plain` in Markdown. The page asks for nothing: styles and pictures are inside, and its
policy forbids scripts and requests.
"""

import base64
import functools
import html
import re
from typing import NamedTuple

from ..runs import record

HEAD, MARKDOWN_HEAD = (record.PAGES[suffix].decode() for suffix in (".html", ".md"))
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# words that stand out in a column of verdicts: shape and word say it, the colour only again
CONTRADICTED, REFUTED = "the proof is contradicted: a bug", "the claim is refuted"
MARKS = {
    "confirmed": "good",
    "proved": "good",
    "not confirmed": "bad",
    "no guarantee": "nothing",
    "claimed": "open",
    "cannot be checked": "open",
    "conditional": "open",
    "audited": "open",
    "descriptive": "open",
    CONTRADICTED: "bad",
    REFUTED: "bad",
    "nothing is refuted": "open",
}


class Text(NamedTuple):
    words: str
    quiet: bool = False


class Items(NamedTuple):
    items: list
    numbered: bool = False


class Table(NamedTuple):
    """`columns` of (name, right-aligned); the first cell of a row is its heading."""

    caption: str
    columns: list
    rows: list


class Picture(NamedTuple):
    """`alt` says what is to be seen to those who cannot; without svg the page shows the png."""

    alt: str
    caption: str
    png: bytes
    svg: str | None = None


class Code(NamedTuple):
    text: str


class Fold(NamedTuple):
    """Blocks that are shown when asked for."""

    summary: str
    blocks: list


class Section(NamedTuple):
    heading: str
    blocks: list


class Document(NamedTuple):
    title: str
    lead: str
    sections: list


def page(document: Document) -> str:
    """The document as one HTML file.

    >>> "<script>" in page(Document("<script>", "", [Section("a", [Text("<script>")])]))
    False
    """
    template = _templates(autoescape=True).get_template("page.html")
    return template.render(
        document=document, head=HEAD, policy=POLICY, marks=MARKS, marked=("verdict", "status")
    )


def markdown(document: Document, folder: str) -> tuple[str, dict]:
    """The document as Markdown -> the text, and its pictures: name in `folder` -> PNG.

    >>> print(
    ...     markdown(
    ...         Document("t", "", [Section("a", [Table("c", [("x|y", True)], [["1_2"]])])]), "f"
    ...     )[0][-25:-1]
    ... )
    | x\\|y |
    |---:|
    | 1\\_2 |
    """
    pictures = [p for section in document.sections for p in _pictures(section.blocks)]
    names = {id(p): f"picture-{i}.png" for i, p in enumerate(pictures, 1)}
    template = _templates(autoescape=False).get_template("page.md")
    text = template.render(
        document=document, head=MARKDOWN_HEAD, folder=folder, name=lambda p: names[id(p)]
    )
    return text, {names[id(p)]: p.png for p in pictures}


@functools.cache
def _templates(autoescape: bool):
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("jfl.report"),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= dict(
        kind=lambda block: type(block).__name__,
        anchor=_anchor,
        inline=_inline,
        base64=lambda content: base64.b64encode(content).decode(),
        plain=_plain,
        fence=_fence,
    )
    return templates


def _anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def _inline(svg: str, alt: str, prefix: str):
    """An SVG file as part of a page: names of its own, and a description."""
    from markupsafe import Markup

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg).replace("url(#", f"url(#{prefix}")
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1))


def _pictures(blocks) -> list[Picture]:
    """All pictures among some blocks, in their order."""
    found = []
    for block in blocks:
        if isinstance(block, Picture):
            found.append(block)
        elif isinstance(block, Fold):
            found += _pictures(block.blocks)
    return found


def _plain(words) -> str:
    """Words that Markdown shows as they are."""
    words = html.escape(" ".join(str(words).split()), quote=False)
    return re.sub(r"([\\`*_{}\[\]|#~$])", r"\\\1", words)


def _fence(text: str) -> str:
    """A fence of Markdown that does not occur in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)
