"""The command `jfl report`: one page about runs and sweeps, in HTML and in Markdown."""

import dataclasses
import re
from pathlib import Path
from typing import NamedTuple

from ..core import checks
from ..core.files import write
from . import document, read, sections

PICTURE = re.compile(r"picture-\d+\.png")


def flags():
    """Return the class of the options of `jfl report`."""
    from tyro.conf import Positional

    @dataclasses.dataclass(frozen=True)
    class Report:
        """Write one page about runs: the best private accuracy and what is proved of it, a table,
        pictures, guarantees with their caveats, settings, versions, and how to run them again.

        The page is one file that makes no requests, so you can send it to anybody.

        example: jfl report runs/first runs/sweep --out report.html
        """

        directories: Positional[tuple[Path, ...]] = ()
        """directories of jfl train, sweep or demo"""
        out: Path | None = None
        """the page, FILE.html; FILE.md and FILE_files are written next to it.  Default for one
        directory: report.html in it"""

    return Report


def main(directories, out: Path | None = None) -> str:
    """Write the page about some directories, with FILE.md and FILE_files next to it.

    Args:
        directories: directories of runs.
        out: FILE.html; None means report.html in the only directory.

    Returns:
        A sentence about what was written.

    Raises:
        ValueError: If a directory has no finished run or is passed twice, or if a file that is not
            a report would be overwritten.  Nothing is written then.
    """
    if not directories:
        checks.fail(
            "jfl report", "at least one directory of a run", "none", "jfl report runs/train"
        )
    if out is None and len(directories) > 1:
        checks.fail("jfl report", "--out FILE.html for several directories", "none")
    sources = [read.read(d, label) for d, label in zip(directories, labels(directories))]
    out = default_out(directories[0]) if out is None else Path(out)
    return render(sections.assemble(sources), out).save()


class Page(NamedTuple):
    """A page before it is written: HTML, and Markdown with a folder of pictures."""

    out: Path
    html: str
    markdown_file: Path
    text: str
    folder: Path
    pictures: dict[str, bytes]

    def save(self) -> str:
        """Write the page, and replace its pictures; return a sentence that says where it is."""
        for old in self.folder.glob("*") if self.folder.exists() else ():
            old.unlink()
        self.folder.mkdir(exist_ok=True)
        for name, content in self.pictures.items():
            (self.folder / name).write_bytes(content)
        write(self.markdown_file, self.text)
        write(self.out, self.html)
        return f"Report: {self.out} and {self.markdown_file}"


def render(assembled: document.Document, out: Path) -> Page:
    """Return the page of a document, without writing any file.

    Args:
        assembled: the document.
        out: FILE.html, where the page will be written.  Its pictures go to a folder beside it.
    """
    markdown_file, folder = _places(out)
    text, pictures = document.markdown(assembled, folder.name)
    return Page(out, document.page(assembled), markdown_file, text, folder, pictures)


def default_out(path) -> Path:
    """Return the default path of the page of one folder or file."""
    path = Path(path)
    return path / "report.html" if path.is_dir() else path.with_suffix(".html")


def labels(directories) -> list[str]:
    """Return labels for directories or files: their names, or paths where names are the same."""
    names, paths = [read.default_label(d) for d in directories], list(map(str, directories))
    resolved = [Path(d).resolve() for d in directories]
    for i, place in enumerate(resolved):
        if place in resolved[:i]:
            got = f"{paths[resolved.index(place)]} and {paths[i]}, which are the same"
            hint = "Pass it once; otherwise its seeds count twice."
            checks.fail("jfl report", "each directory or file once", got, hint)
    return [n if names.count(n) == 1 and n not in paths else p for n, p in zip(names, paths)]


def _places(out) -> tuple[Path, Path]:
    """Return the Markdown file and the folder of pictures next to `out`; reject files that are not
    an earlier report."""
    if out.suffix.lower() not in (".html", ".htm"):
        checks.fail("--out", "a file that ends in .html", str(out))
    markdown_file, folder = out.with_suffix(".md"), out.with_name(out.stem + "_files")
    taken = []
    for path, head in ((out, document.HEAD), (markdown_file, document.MARKDOWN_HEAD)):
        ours = path.is_file() and path.read_bytes().startswith(head.encode())
        taken += [path] if (path.exists() or path.is_symlink()) and not ours else []
    if folder.exists():
        is_picture = lambda p: PICTURE.fullmatch(p.name) and p.is_file()
        ours = folder.is_dir() and all(map(is_picture, folder.iterdir()))
        taken += [] if ours else [folder]
    if taken:
        hint = "Choose another: only an earlier report is overwritten."
        got = f"{taken[0]}, which is something else"
        checks.fail("--out", "a new file or an earlier report", got, hint)
    return markdown_file, folder
