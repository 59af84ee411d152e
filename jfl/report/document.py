"""A document of headings, tables and pictures, written as one HTML page or as Markdown.

Everything that is shown was read from somebody's files, so all of it is escaped, here and only
here.  The page asks for nothing: styles and pictures are inside, and its policy forbids scripts and
requests.
"""

import base64
import html
import re
from typing import NamedTuple

GENERATOR = "jfl report"
HEAD = (
    f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator" '
    f'content="{GENERATOR}">\n'
)
MARKDOWN_HEAD = f"<!-- {GENERATOR} -->\n"
# words that stand out in a column of verdicts: shape and word say it, the colour only again
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
}
MARKED = ("verdict", "status")


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


STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --quiet: #59636e; --paper: #ffffff; --panel: #f6f8fa; --line: #d1d9e0;
  --link: #0072b2; --good: #00674b; --bad: #a33c00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --quiet: #a0a8b2; --paper: #14171a; --panel: #1c2025;
  --line: #363c44; --link: #56b4e9; --good: #35c79a; --bad: #ff9d5c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  "Noto Sans", "DejaVu Sans", sans-serif; }
header, main { max-width: 78rem; margin: 0 auto; padding: 0 1.5rem; }
header { padding-top: 2.5rem; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.8rem 0 .8rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
p, ul, ol { max-width: 50rem; margin: .6rem 0; }
li { margin: .25rem 0; }
.quiet, caption, figcaption { color: var(--quiet); font-size: .9rem; }
a { color: var(--link); }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0; margin: 1rem 0 0; max-width: none; }
.scroll { overflow-x: auto; margin: .8rem 0 1.4rem; border: 1px solid var(--line); border-radius: 6px; }
.scroll:focus-visible, a:focus-visible, summary:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .6rem .8rem; }
th, td { padding: .45rem .7rem; text-align: left; vertical-align: top; border-top: 1px solid var(--line); max-width: 32rem;
  overflow-wrap: break-word; }
thead th { background: var(--panel); font-weight: 600; white-space: normal; vertical-align: bottom; }
tbody th { font-weight: 500; min-width: 9rem; max-width: 22rem; }
.short { white-space: nowrap; }
.wide { min-width: 20rem; }
.right { text-align: right; white-space: nowrap; }
thead th.right { white-space: normal; }
.right.long { white-space: normal; min-width: 9.5rem; }
.mark { white-space: nowrap; font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); } .open, .nothing { color: var(--quiet); }
.good::before { content: "\\2713\\00a0"; } .bad::before { content: "\\2717\\00a0"; } .open::before { content: "?\\00a0"; }
figure { margin: 1rem 0 2rem; }
.picture { overflow-x: auto; }
.picture svg, .picture img { display: block; width: 100%; min-width: 36rem; height: auto; color: var(--ink); }
.picture img { background: #fff; border-radius: 6px; }
svg text { font-family: inherit !important; }
figcaption { margin-top: .5rem; max-width: 50rem; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem; overflow-x: auto;
  font: .85rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--link); overflow-wrap: anywhere; }
footer { max-width: 78rem; margin: 3rem auto 0; padding: 1rem 1.5rem 2.5rem; }
@media print { nav { display: none; } .scroll { overflow: visible; border: 0; } }
"""  # noqa: E501
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(document: Document) -> str:
    """The document as one HTML file.

    >>> "<script>" in page(Document("<script>", "", [Section("a", [Text("<script>")])]))
    False
    """
    said = html.escape
    names = [_anchor(i, s.heading) for i, s in enumerate(document.sections)]
    links = "".join(
        f'<li><a href="#{n}">{said(s.heading)}</a></li>' for n, s in zip(names, document.sections)
    )
    body = "".join(
        f'<section aria-labelledby="{n}">\n<h2 id="{n}">{said(s.heading)}</h2>\n'
        + _html(s.blocks, [i])
        + "</section>\n"
        for i, (n, s) in enumerate(zip(names, document.sections))
    )
    return (
        f'{HEAD}<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{said(document.title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<header>\n<h1>{said(document.title)}</h1>\n<p>{said(document.lead)}"
        f"</p>\n<nav "
        f'aria-label="sections"><ul>{links}</ul></nav>\n</header>\n<main>\n{body}</main>\n'
        '<footer class="quiet">Made by jfl report from the files of the runs; nothing was computed '
        "again.</footer>\n"
        "</body>\n</html>\n"
    )


def _anchor(i, heading):
    return f"s{i}-" + re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def _html(blocks, place) -> str:
    return "".join(_block(b, [*place, i]) for i, b in enumerate(blocks))


def _block(block, place) -> str:
    said = html.escape
    if isinstance(block, Text):
        return f"<p{' class=quiet' * block.quiet}>{said(block.words)}</p>\n"
    if isinstance(block, Items):
        kind = "ol" if block.numbered else "ul"
        return f"<{kind}>" + "".join(f"<li>{said(x)}</li>" for x in block.items) + f"</{kind}>\n"
    if isinstance(block, Code):
        return f'<pre tabindex="0"><code>{said(block.text)}</code></pre>\n'
    if isinstance(block, Fold):
        return f"<details><summary>{said(block.summary)}</summary>\n{_html(block.blocks, place)}</details>\n"  # noqa: E501
    if isinstance(block, Table):
        return _table(block)
    prefix = "p" + "-".join(map(str, place)) + "-"
    inner = (
        (
            f'<img alt="{said(block.alt)}" '
            f'src="data:image/png;base64,{base64.b64encode(block.png).decode()}">'
        )
        if block.svg is None
        else _inline(block.svg, block.alt, prefix)
    )
    return (
        f"<figure><div "
        f'class="picture">{inner}</div><figcaption>{said(block.caption)}</figcaption></figure>\n'
    )


def _table(table: Table) -> str:
    side = lambda right, long=False: f' class="right{" long" * long}"' if right else ""
    head = "".join(
        f'<th scope="col"{side(right)}>{html.escape(name)}</th>' for name, right in table.columns
    )
    body = ""
    for row in table.rows:
        cells = ""
        for i, (value, (name, right)) in enumerate(zip(row, table.columns)):
            tag, scope = ("th", ' scope="row"') if i == 0 else ("td", "")
            text = html.escape(str(value))
            if name in MARKED and value in MARKS:
                text = f'<span class="mark {MARKS[value]}">{text}</span>'
            size = len(str(value))
            fit = " class=short" if size < 28 and i else " class=wide" if size > 60 and i else ""
            cells += f"<{tag}{scope}{side(True, size > 24) if right else fit}>{text}</{tag}>"
        body += f"<tr>{cells}</tr>\n"
    return (
        f'<div class="scroll" role="region" tabindex="0" '
        f'aria-label="{html.escape(table.caption)}"><table>'
        f"<caption>{html.escape(table.caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>"
        "</table></div>\n"
    )


def _inline(svg: str, alt: str, prefix: str) -> str:
    """An SVG file as part of a page: names of its own, and a description."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg).replace("url(#", f"url(#{prefix}")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1)


# --- Markdown


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
    pictures: dict = {}
    parts = [MARKDOWN_HEAD, f"# {_plain(document.title)}\n", f"{_plain(document.lead)}\n"]
    for section in document.sections:
        parts += [
            f"## {_plain(section.heading)}\n",
            *(_mark(b, folder, pictures) for b in section.blocks),
        ]
    return "\n".join(parts), pictures


def _plain(words) -> str:
    """Words that Markdown shows as they are."""
    words = html.escape(" ".join(str(words).split()), quote=False)
    return re.sub(r"([\\`*_{}\[\]|#~$])", r"\\\1", words)


def _mark(block, folder, pictures) -> str:
    if isinstance(block, Text):
        return _plain(block.words) + "\n"
    if isinstance(block, Items):
        return "".join(("1. " if block.numbered else "- ") + _plain(x) + "\n" for x in block.items)
    if isinstance(block, Code):
        longest = max((len(run) for run in re.findall("`+", block.text)), default=0)
        fence = "`" * max(3, longest + 1)
        return f"{fence}\n{block.text.rstrip()}\n{fence}\n"
    if isinstance(block, Fold):
        return f"### {_plain(block.summary)}\n\n" + "\n".join(
            _mark(b, folder, pictures) for b in block.blocks
        )
    if isinstance(block, Table):
        line = lambda cells: "| " + " | ".join(_plain(c) for c in cells) + " |\n"
        return (
            f"{_plain(block.caption)}\n\n"
            + line(name for name, _ in block.columns)
            + "|"
            + "|".join("---:" if right else "---" for _, right in block.columns)
            + "|\n"
            + "".join(map(line, block.rows))
        )
    name = f"picture-{len(pictures) + 1}.png"
    pictures[name] = block.png
    return f"![{_plain(block.alt)}](<{folder}/{name}>)\n\n{_plain(block.caption)}\n"
