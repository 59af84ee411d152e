"""A document of headings, tables and pictures, written as one HTML page or as Markdown.

All values come from files, so all of them are escaped: by Jinja in the page, and by `_plain` in
Markdown.  The page contains its styles, pictures and script, and makes no requests.  Its content
security policy forbids requests, and all scripts except that of jfl, which it identifies by its
digest.  A value that looks like a script would therefore not run even if it were not escaped.
"""

import base64
import hashlib
import html
import importlib.resources
import re
from typing import NamedTuple

from ..runs import record

HEAD, MARKDOWN_HEAD = (record.PAGES[suffix].decode() for suffix in (".html", ".md"))
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src"
# The values that are highlighted in a column of verdicts, with the class of their colour.  Their
# shape and text carry the meaning too.
CONTRADICTED, REFUTED = "the proof is contradicted: a bug", "the claim is refuted"
CONDITION_REFUTED = "the condition of the guarantee is refuted"
MARKS = {
    "proved": "good",
    "no guarantee": "nothing",
    "claimed": "open",
    "conditional": "open",
    "audited": "open",
    "descriptive": "open",
    CONTRADICTED: "bad",
    REFUTED: "bad",
    CONDITION_REFUTED: "bad",
    "nothing is refuted": "open",
}
GLOSSARY = {
    "unit": "Whose data the guarantee protects: one example (one row of one client) or one client "
    "(all of its rows).",
    "adjacency": "Which datasets are neighbours. add_remove: one unit is added or removed. "
    "replace_one: one unit is exchanged for another. zero_out: one unit contributes zero, and "
    "sampling is "
    "unchanged.",
    "view": "Who observes the run. The server sees every upload and who participates, a third "
    "party sees only the models, and with secure aggregation only sums of uploads are seen.",
    "ε": "How much the observations of two neighbouring datasets may differ: every outcome is at "
    "most exp(ε) times as likely under one as under the other, except with probability δ. Smaller "
    "is more private. Values for another unit, adjacency, view or δ are not comparable.",
    "δ": "The probability with which the bound of ε may fail. It should be much smaller than one "
    "over the number of units.",
    "proved": "A theorem covers this ε, for the program that ran and the noise that it added.",
    "conditional": "Proved if a statement of the user holds, which jfl cannot check. The caveats "
    "name it.",
    "claimed": "The value of a paper's formula for this run, whether or not it is correct. It is "
    "never a guarantee.",
    "audited": "The result of an attack: a lower bound of ε at some confidence. It refutes smaller "
    "values and proves none.",
    "method": "How ε was computed: from a privacy-loss distribution (pld), Rényi divergences "
    "(rdp), or the exact composition of Gaussians (gaussian_exact).",
    "status": "How certain ε is: proved, conditional, claimed, audited, descriptive (of a run that "
    "happened, not a promise) or no guarantee.",
}
# Headings of tables that are terms of the glossary.
HEADINGS = {f"{status} ε": status for status in ("proved", "claimed", "audited")}


class Text(NamedTuple):
    """A paragraph; `quiet` makes it less prominent."""

    words: str
    quiet: bool = False


class Items(NamedTuple):
    """A list, with bullets or numbers."""

    items: list
    numbered: bool = False


class Table(NamedTuple):
    """A table: `columns` are (name, right-aligned), and the first cell of a row is its heading."""

    caption: str
    columns: list
    rows: list


class Picture(NamedTuple):
    """A picture in a document.

    Attributes:
        alt: a description for screen readers.
        caption: the text below the picture on the HTML page.
        png: the image, for Markdown and for an HTML page without `svg`.
        svg: the same image for the HTML page; None if there is none.
    """

    alt: str
    caption: str
    png: bytes
    svg: str | None = None


class Code(NamedTuple):
    """Preformatted text; with `commands`, each line is a command to copy or a # comment."""

    text: str
    commands: bool = False


class Fold(NamedTuple):
    """Blocks that are hidden until a reader opens them."""

    summary: str
    blocks: list


class Card(NamedTuple):
    """A card at the top of the page: `value` in large letters, and `facts` of (name, value).

    `alarm` highlights the card.
    """

    heading: str
    value: str
    facts: list = []
    notes: list = []
    alarm: bool = False


class Section(NamedTuple):
    """A section with a heading and blocks."""

    heading: str
    blocks: list


class Document(NamedTuple):
    """A document: a title, a lead, `cards` (short facts), the texts `below` them, and sections."""

    title: str
    lead: str
    sections: list
    cards: list = []
    below: list = []


def page(document: Document) -> str:
    """Return the document as one HTML file.

    Args:
        document: the document.

    Example:
        >>> "<b>" in page(Document("<b>", "", [Section("a", [Text("<b>")])]))
        False
    """
    templates = importlib.resources.files("jfl.report.templates")
    script = templates.joinpath("page.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = _templates(autoescape=True).get_template("page.html")
    return template.render(
        document=document,
        head=HEAD,
        policy=f"{POLICY} 'sha256-{digest}'",
        marks=MARKS,
        marked=("verdict", "status"),
        glossary=GLOSSARY,
        script=script,
    )


def markdown(document: Document, folder: str) -> tuple[str, dict]:
    """Return the document as Markdown, and its pictures: name in `folder` -> PNG.

    Example:
        >>> table = Table("c", [("x|y", True)], [["1_2"]])
        >>> print(markdown(Document("t", "", [Section("a", [table])]), "f")[0][-25:-1])
        | x\\|y |
        |---:|
        | 1\\_2 |
    """
    pictures: dict[str, bytes] = {}

    def name(picture):  # the template asks once for each picture
        file = f"picture-{len(pictures) + 1}.png"
        pictures[file] = picture.png
        return file

    template = _templates(autoescape=False).get_template("page.md")
    text = template.render(document=document, head=MARKDOWN_HEAD, folder=folder, name=name)
    return text, pictures


def _templates(autoescape: bool):
    """Return the Jinja environment of jfl's templates."""
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
        anchor=lambda heading: re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-"),
        term=lambda heading: HEADINGS.get(heading, heading if heading in GLOSSARY else ""),
        base64=lambda content: base64.b64encode(content).decode(),
        card=_card,
        inline=_inline,
        plain=_plain,
        summary=lambda words: html.escape(" ".join(str(words).split()), quote=False),
        fence=lambda text: "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0)),
    )
    return templates


def _inline(svg: str, alt: str, prefix: str):
    """Return an SVG file as part of a page, with unique names and a description."""
    from markupsafe import Markup

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg).replace("url(#", f"url(#{prefix}")
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1))


def _card(card: Card) -> str:
    """Return a card as one sentence."""
    facts = "; ".join(f"{name} {value}" for name, value in card.facts)
    words = f"{card.heading}: {card.value}" + (f" ({facts})" if facts else "") + "."
    return " ".join([words, *card.notes])


def _plain(words) -> str:
    """Return text with the special characters of Markdown escaped."""
    words = html.escape(" ".join(str(words).split()), quote=False)
    return re.sub(r"([\\`*_{}\[\]|#~$])", r"\\\1", words)
