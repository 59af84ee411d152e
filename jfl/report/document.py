"""A document of headings, tables and pictures, written as one HTML page or as Markdown.

Everything that is shown was read from somebody's files, so all of it is escaped: by Jinja in the
page, by `_plain` in Markdown. The page asks for nothing: styles, pictures and scripts are inside.
Its policy forbids requests, and every script but those of jfl, by their digests: words of a file
that look like a script do not run, even if they came through unescaped.
"""

import base64
import functools
import hashlib
import html
import importlib.resources
import re
from typing import NamedTuple

from ..runs import record

HEAD, MARKDOWN_HEAD = (record.PAGES[suffix].decode() for suffix in (".html", ".md"))
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src"
# words that stand out in a column of verdicts: shape and word say it, the colour only again
CONTRADICTED, REFUTED = "the proof is contradicted: a bug", "the claim is refuted"
MARKS = {
    "proved": "good",
    "no guarantee": "nothing",
    "claimed": "open",
    "conditional": "open",
    "audited": "open",
    "descriptive": "open",
    CONTRADICTED: "bad",
    REFUTED: "bad",
    "nothing is refuted": "open",
}
# term -> what it means, for those who do not know it yet
GLOSSARY = {
    "unit": "Whose data the guarantee hides: one example (one row of one client) or one client "
    "(all of its rows).",
    "adjacency": "Which two data sets have to look alike. add remove: the unit is there or not. "
    "replace one: the unit is exchanged for another. zero out: nothing of the unit is added, and "
    "all that is drawn is as it was.",
    "view": "Who looks. The server sees every upload and who takes part; a third party sees "
    "models only; a secure aggregation shows sums of uploads.",
    "ε": "How much two adjacent data sets may differ in what is seen: every outcome is at most "
    "exp(ε) times as likely under one as under the other, but for δ. Smaller is more private. "
    "Epsilons of another unit, adjacency, view or δ do not compare.",
    "δ": "The probability for which the bound of ε need not hold. It should be far below one over "
    "the number of units.",
    "proved": "A theorem covers this ε, for the objects that ran and the noise that they used.",
    "conditional": "Proved only if something holds that the user said and jfl cannot check. The "
    "caveats name it.",
    "claimed": "What a paper's formula says of this run, whether or not it holds. Never a "
    "guarantee.",
    "audited": "What an attack showed: a lower bound of ε at some confidence. It refutes smaller "
    "values and proves none.",
    "method": "Which bound gave this ε: a privacy-loss distribution (pld), Rényi divergences "
    "(rdp), or exact composition of Gaussians (gaussian_exact).",
    "status": "How sure an ε is: proved, conditional, claimed, audited, descriptive (of a run that "
    "happened, not a promise) or no guarantee.",
}
# headings of tables that are a term under another name
HEADINGS = {f"{status} ε": status for status in ("proved", "claimed", "audited")}


class Text(NamedTuple):
    words: str
    quiet: bool = False


class Items(NamedTuple):
    items: list
    numbered: bool = False


class Table(NamedTuple):
    """A table: `columns` are (name, right-aligned), and the first cell of a row is its heading."""

    caption: str
    columns: list
    rows: list


class Picture(NamedTuple):
    """A picture: `alt` describes it for screen readers; without svg the page shows the png."""

    alt: str
    caption: str
    png: bytes
    svg: str | None = None


class Code(NamedTuple):
    """A text; with `commands`, each line is a command to copy, or a comment that begins with #."""

    text: str
    commands: bool = False


class Fold(NamedTuple):
    """Blocks that are hidden until a reader opens them."""

    summary: str
    blocks: list


class Card(NamedTuple):
    """A card at the top of the page: `value` in large letters, and `facts` of (name, value).

    `parts` of (words, count) are drawn as one bar, and `alarm` highlights the card.
    """

    heading: str
    value: str
    facts: list = []
    notes: list = []
    parts: list = []
    alarm: bool = False


class Section(NamedTuple):
    heading: str
    blocks: list


class Document(NamedTuple):
    """A document: `cards` are above all sections, followed by the texts of `beside`."""

    title: str
    lead: str
    sections: list
    cards: list = []
    beside: list = []


def page(document: Document, marks: dict = MARKS) -> str:
    """Return the document as one HTML file.

    Args:
        document: the document.
        marks: highlighted words of tables, with the class of their colour.

    >>> "<b>" in page(Document("<b>", "", [Section("a", [Text("<b>")])]))
    False
    """
    templates = importlib.resources.files("jfl.report.templates")
    script = templates.joinpath("page.js").read_text("utf-8")
    template = _templates(autoescape=True).get_template("page.html")
    return template.render(
        document=document,
        head=HEAD,
        policy=f"{POLICY} {_digest(script)}",
        marks=marks,
        marked=("verdict", "status"),
        glossary=GLOSSARY,
        script=script,
    )


def markdown(document: Document, folder: str) -> tuple[str, dict]:
    """Return the document as Markdown, and its pictures: name in `folder` -> PNG.

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
def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


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
        card=_card,
        term=_term,
        inline=_inline,
        base64=_base64,
        plain=_plain,
        summary=_summary,
        fence=_fence,
    )
    return templates


def _digest(script: str) -> str:
    """Return the digest by which a Content-Security-Policy names a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _term(heading: str) -> str:
    """Return the term of the glossary for a heading, or ""."""
    term = HEADINGS.get(heading, heading)
    return term if term in GLOSSARY else ""


def _anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def _inline(svg: str, alt: str, prefix: str):
    """Return an SVG file as part of a page, with unique names and a description."""
    from markupsafe import Markup

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg).replace("url(#", f"url(#{prefix}")
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1))


def _pictures(blocks) -> list[Picture]:
    """Return all pictures among blocks, in their order."""
    found = []
    for block in blocks:
        if isinstance(block, Picture):
            found.append(block)
        elif isinstance(block, Fold):
            found += _pictures(block.blocks)
    return found


def _card(card: Card) -> str:
    """Return a card as one sentence."""
    facts = "; ".join(f"{name} {value}" for name, value in card.facts)
    words = f"{card.heading}: {card.value}" + (f" ({facts})" if facts else "") + "."
    return " ".join([words, *card.notes])


def _summary(words) -> str:
    """Words inside a line of HTML, which Markdown takes as it is."""
    return html.escape(" ".join(str(words).split()), quote=False)


def _plain(words) -> str:
    """Words that Markdown shows as they are."""
    words = html.escape(" ".join(str(words).split()), quote=False)
    return re.sub(r"([\\`*_{}\[\]|#~$])", r"\\\1", words)


def _fence(text: str) -> str:
    """A fence of Markdown that does not occur in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)
