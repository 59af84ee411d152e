"""`jfl report`: runs and sweeps as one page to hand on, in HTML and in Markdown."""

import dataclasses
import re
from pathlib import Path
from typing import NamedTuple

from ..core import checks
from ..core.files import write
from ..engine import loggers
from ..runs import record
from . import document, read, sections

MAX_STEM_BYTES = 150  # of the name of a folder, which may have 255 bytes in all
PICTURE = re.compile(r"picture-\d+\.png")


def flags():
    """The class of what `jfl report` takes on the command line."""
    from tyro.conf import Positional

    @dataclasses.dataclass(frozen=True)
    class Report:
        """One page of runs: the best private accuracy and what is proved of it, a table,
        pictures, guarantees with their caveats, settings, versions, how to run it again.

        The page is one file that asks for nothing: send it to anybody.

        example: jfl report runs/first runs/sweep --out report.html
        """

        directories: Positional[tuple[Path, ...]] = ()
        """folders of jfl train, sweep or demo"""
        out: Path | None = None
        """the page, FILE.html; FILE.md and FILE_files are written beside it.  Default, of one
        folder: report.html in it"""
        tensorboard: Path | None = None
        """also write the curves as TensorBoard event files into this new directory (needs
        pip install -e ".[tensorboard]")"""

    return Report


def main(directories, out: Path | None = None, tensorboard: Path | None = None) -> str:
    """Write the page of some folders, with FILE.md and FILE_files beside it.

    Args:
        directories: folders of runs.
        out: FILE.html; None: of one folder, report.html in it.
        tensorboard: a new directory for the curves as event files too.

    Returns:
        What was written, in words.

    Raises:
        ValueError: for a folder that is no finished run or is given twice, or an `out` that is
            something else; nothing is written.
    """
    if not directories:
        checks.fail(
            "jfl report",
            "at least one directory of a run",
            "none",
            "jfl report runs/train",
        )
    if out is None and len(directories) > 1:
        checks.fail("jfl report", "--out FILE.html for several directories", "none")
    sources = [read.read(d, label) for d, label in zip(directories, labels(directories))]
    out = default_out(directories[0]) if out is None else Path(out)
    page = render(sections.assemble(sources), out)
    curves = "" if tensorboard is None else _tensorboard(tensorboard, sources)
    return page.save() + curves


class Page(NamedTuple):
    """A page that is ready to be written: HTML, and Markdown with its pictures in a folder."""

    out: Path
    html: str
    markdown_file: Path
    text: str
    folder: Path
    pictures: dict[str, bytes]

    def save(self) -> str:
        """Write all files, and return which they are in words."""
        for old in self.folder.glob("*") if self.folder.exists() else ():
            old.unlink()
        self.folder.mkdir(exist_ok=True)
        for name, content in self.pictures.items():
            (self.folder / name).write_bytes(content)
        write(self.markdown_file, self.text)
        write(self.out, self.html)
        return f"Report: {self.out} and {self.markdown_file}"


def render(assembled: document.Document, out: Path, marks: dict = document.MARKS) -> Page:
    """Return the page of a document without writing it.

    Args:
        assembled: the document.
        out: FILE.html, a new file or an earlier report.
        marks: highlighted words of tables, with the class of their colour.
    """
    markdown_file, folder = _places(out)
    try:
        text, pictures = document.markdown(assembled, folder.name)
        html = document.page(assembled, marks)
        f"{text}{html}{out}".encode()
    except UnicodeEncodeError as error:  # a folder's name may be any bytes
        checks.fail(
            "jfl report",
            "names and texts that UTF-8 can encode",
            ascii(error.object[: error.end].splitlines()[-1][-60:]),
            "Rename the folder, or correct the file that contains it.",
        )
    return Page(out, html, markdown_file, text, folder, pictures)


def default_out(path) -> Path:
    """Return the default path of the page of one folder or file."""
    path = Path(path)
    return path / "report.html" if path.is_dir() else path.with_suffix(".html")


def labels(directories) -> list[str]:
    """Return the names of folders or files, or their paths if two names are the same."""
    names, paths, resolved = zip(
        *((read.default_label(d), str(d), Path(d).resolve()) for d in directories)
    )
    for i, place in enumerate(resolved):
        if place in resolved[:i]:
            checks.fail(
                "jfl report",
                "each directory or file once",
                f"{paths[resolved.index(place)]} and {paths[i]}, which are the same",
                "Pass it once; otherwise its seeds count twice.",
            )
    return [n if names.count(n) == 1 and n not in paths else p for n, p in zip(names, paths)]


def _places(out) -> tuple[Path, Path]:
    """The Markdown file and the folder of pictures beside `out`; nothing but an earlier report
    stands there."""
    if out.suffix.lower() not in (".html", ".htm"):
        checks.fail("--out", "a file that ends in .html", str(out))
    if not out.parent.is_dir():
        checks.fail(
            "--out",
            "a file in a directory that is there",
            str(out),
            "Make it first, or choose another.",
        )
    markdown_file, folder = out.with_suffix(".md"), out.with_name(out.stem + "_files")
    remedy = "Choose another: nothing but an earlier report is overwritten."
    for path, head in ((out, document.HEAD), (markdown_file, document.MARKDOWN_HEAD)):
        if path.exists() or path.is_symlink():
            if not path.is_file() or not path.read_bytes().startswith(head.encode()):
                checks.fail(
                    "--out",
                    "a new file or an earlier report",
                    f"{path}, which is something else",
                    remedy,
                )
    earlier = folder.is_dir() and all(
        PICTURE.fullmatch(p.name) and p.is_file() for p in folder.iterdir()
    )
    if folder.exists() and not earlier:
        checks.fail(
            "--out",
            "a new folder for pictures or an earlier one",
            f"{folder}, which is something else",
            remedy,
        )
    return markdown_file, folder


def _tensorboard(directory, sources: list[read.Source]) -> str:
    """Write the curves of each run as TensorBoard event files into a folder that is named by the
    run, its seed and whether it failed; return what was written, in words."""
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        # TensorBoard would show old and new points as one curve.
        checks.fail("--tensorboard", "an empty or new directory", f"{directory}, which is not")
    folders, num_failed = [], 0
    for part in sources:
        prefix = "" if len(sources) == 1 else f"{part.label} "
        for run in part.runs:
            name = f"{prefix}{run['name']}"
            stem = "".join(c if c.isalnum() or c in "=.,-+ " else "_" for c in name).strip(" .")
            stem = stem.encode()[:MAX_STEM_BYTES].decode(errors="ignore")
            failed = bool(run.get("failed"))
            folder = f"{stem} seed={run['seed']}" + " failed" * failed
            if folder in folders:
                folder = f"{folder} ({len(folders)})"
            folders.append(folder)
            num_failed += failed
            with loggers.TensorBoard(directory / folder) as writer:
                writer.settings(run["config"])
                for row in part.rows:
                    if (row["name"], row["seed"]) == (run["name"], run["seed"]):
                        numbers = {k: row[k] for k in (*record.SERIES, "epsilon") if k in row}
                        writer.log(numbers, row["round"])
    words = f", and curves in {directory}"
    if num_failed:
        words += f"; {num_failed} of its {len(folders)} runs failed, as their names say"
    return words
