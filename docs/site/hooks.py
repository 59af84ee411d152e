"""What mkdocs does beside its own: files of the repository that pages link to go with the site.

A page says `../experiments/results/round.json`, as one who reads the repository wants it.  The site
has no repository beside it, and no address of one is settled.  So each such file is copied to
`files/`, and the link follows.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\(<?)(\.\.?/[^)>#\s]+)(#[^)>\s]*)?")
SNIPPET = re.compile(r'^--8<-- "([^"]+)"$', re.M)


def outside(page: Path, target: str) -> Path | None:
    """The file of the repository, not of docs/, that a link of a page names."""
    path = Path(os.path.normpath(page.parent / target))
    if path.is_relative_to(DOCS) or not path.is_relative_to(ROOT) or not path.is_file():
        return None
    return path


def included(markdown: str, page: Path) -> str:
    """`--8<-- "FILE"` is a file of the root, or nothing where there is none."""

    def text(match):
        path = ROOT / match[1]
        away = os.path.relpath(ROOT, page.parent)
        # its links are relative to the root of the repository
        return (
            re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({away}/\1)", path.read_text())
            if path.is_file()
            else ""
        )

    return SNIPPET.sub(text, markdown)


def uri_of(path: Path) -> str:
    """Where a copy lies on the site.  Markdown is handed on as text: a page has a place in the
    navigation."""
    return f"files/{path.relative_to(ROOT).as_posix()}" + ".txt" * (path.suffix in (".md", ""))


def on_files(files, config):
    """Every file outside docs/ that some page links to joins the site."""
    for file in list(files.documentation_pages()):
        page = Path(file.abs_src_path)
        for _, target, _ in LINK.findall(included(page.read_text(), page)):
            path = outside(page, target)
            if path and uri_of(path) not in files.src_uris:
                files.append(File.generated(config, uri_of(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links out of docs/ go to the copies."""
    source = Path(page.file.abs_src_path)

    def moved(match):
        path = outside(source, match[2])
        if path is not None:
            target = uri_of(path)
        elif "/docs/" in match[2]:  # of a file of the root
            target = os.path.relpath(os.path.normpath(source.parent / match[2]), DOCS)
        else:
            return match[0]
        there = posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")
        return match[1] + there + (match[3] or "")

    return LINK.sub(moved, included(markdown, source))


SHIM = "https://unpkg.com/iframe-worker/shim"  # that of the theme: search in pages opened as files


def on_post_page(output, page, config):
    """The shim comes with the site."""
    return _with_own_shim(output, _up(page))


def on_post_template(output_content, template_name, config):
    """Also of a page that is no document: 404, which a server sends for any address."""
    return _with_own_shim(output_content, "/")


def _with_own_shim(html, root):
    return html.replace(f'src="{SHIM}"', f'src="{root}site/iframe_worker.js"')


def _up(page):
    return "../" * page.url.count("/")
