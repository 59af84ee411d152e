"""`jfl report`: runs, sweeps and experiments as one page to hand on, in HTML and in Markdown; what
is written where."""

import dataclasses
import re
from pathlib import Path

from ..core import checks
from ..core.files import write
from ..runs import tables
from . import document, read, sections

PICTURE = re.compile(r"picture-\d+\.png")


def flags():
    """The class of what `jfl report` takes on the command line."""
    from tyro.conf import Positional

    @dataclasses.dataclass(frozen=True)
    class Report:
        """One page of runs: the best private accuracy and what is proved of it, a table,
        pictures, guarantees with their caveats, settings, versions, how to run it again.

        Of experiments: the claims that were checked, what holds, and how far lines are apart. The
        page is one file that asks for nothing: send it to anybody.

        example: jfl report runs/first runs/sweep --out report.html
        """

        directories: Positional[tuple[Path, ...]] = ()
        """folders of jfl train, sweep or demo, or of an experiment; files of experiments' results,
        such as experiments/results/li2025.json"""
        out: Path | None = None
        """the page, FILE.html; FILE.md and FILE_files are written beside it.  Default, of one
        folder: report.html in it; of one file: the same name with .html"""
        tensorboard: Path | None = None
        """also write the curves as TensorBoard event files into this new directory (needs
        pip install -e ".[tensorboard]")"""

    return Report


def main(directories, out: Path | None = None, tensorboard: Path | None = None) -> str:
    """Write the page of some folders or files, with FILE.md and FILE_files beside it.

    Args:
        directories: folders of runs or experiments, and files of experiments' results.
        out: FILE.html; by default, of one, report.html in the folder or the file's name.
        tensorboard: a new directory for the curves as event files too.

    Returns:
        What was written, in words.

    Raises:
        ValueError: for a folder that is no finished run, a file that is no experiment's, one of
            them given twice, or an `out` that is something else; nothing is written.
    """
    if not directories:
        checks.fail(
            "jfl report",
            "at least one directory of a run, or one file of results",
            "none",
            "jfl report runs/train",
        )
    if out is None and len(directories) > 1:
        checks.fail("jfl report", "--out FILE.html for several directories or files", "none")
    sources = [read.read(d, label) for d, label in zip(directories, _labels(directories))]
    out = _default_out(sources[0].path) if out is None else Path(out)
    markdown_file, folder = _places(out)
    try:
        assembled = sections.assemble(sources)
        text, pictures = document.markdown(assembled, folder.name)
        page = document.page(assembled)
        f"{text}{page}{out}{tensorboard}".encode()
    except UnicodeEncodeError as error:  # a folder's name may be any bytes
        checks.fail(
            "jfl report",
            "names and words that UTF-8 can hold",
            ascii(error.object[: error.end].splitlines()[-1][-60:]),
            "Rename the folder, or mend the file that says so.",
        )
    curves = "" if tensorboard is None else _tensorboard(tensorboard, sources)
    for old in folder.glob("*") if folder.exists() else ():
        old.unlink()
    folder.mkdir(exist_ok=True)
    for name, content in pictures.items():
        (folder / name).write_bytes(content)
    write(markdown_file, text)
    write(out, page)
    return f"Report: {out} and {markdown_file}{curves}"


def _default_out(path: Path) -> Path:
    return path / "report.html" if path.is_dir() else path.with_suffix(".html")


def _labels(directories) -> list[str]:
    """Their own names, or paths where two names are the same."""
    names, paths, resolved = zip(
        *((read.default_label(d), str(d), Path(d).resolve()) for d in directories)
    )
    for i, place in enumerate(resolved):
        if place in resolved[:i]:
            checks.fail(
                "jfl report",
                "each directory or file once",
                f"{paths[resolved.index(place)]} and {paths[i]}, which are one",
                "Give it once: its seeds would count twice.",
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
    """Write the curves -> what was written, in words."""
    parts, rows, settings, failed = read.parts(sources), [], {}, set()
    for label, part in parts:
        prefix = "" if len(parts) == 1 else f"{label} "
        for run in part.runs:
            settings[prefix + run["name"], run["seed"]] = run["config"]
            if run.get("failed"):
                failed.add((prefix + run["name"], run["seed"]))
        rows += [row | dict(name=prefix + row["name"]) for row in part.rows]
    rows = [row | dict(failed=(row["name"], row["seed"]) in failed) for row in rows]
    folders = tables.tensorboard(directory, rows, settings)
    lost = len({(row["name"], row["seed"]) for row in rows if row["failed"]})
    words = f", and curves in {directory}"
    if lost:
        words += f"; {lost} of its {len(folders)} runs failed, as their names say"
    return words
