"""`jfl report`: runs, sweeps and experiments as one page to hand on, in HTML and in Markdown; what
is written where."""

import dataclasses
import re
from pathlib import Path

from ..core import checks
from ..runs import tables
from ..runs.checkpoint import write
from . import document as markup
from . import read, sections

MINE = re.compile(r"picture-\d+\.png")


def flags():
    """The class of what `jfl report` takes on the command line."""
    from tyro.conf import Positional

    @dataclasses.dataclass(frozen=True)
    class Report:
        """One page of runs: a table, pictures, guarantees with their caveats, settings, versions,
        how to run it again.

        Of experiments: the claims that were checked, what holds, and how far lines are apart.

        example: jfl report runs/first runs/sweep --out report.html
        """

        directories: Positional[tuple[Path, ...]] = ()
        """folders of jfl train, sweep or demo, or of an experiment; files of experiments' results, such as
        experiments/results/li2025.json"""  # noqa: E501
        out: Path | None = None
        """the page, FILE.html; FILE.md and FILE_files are written beside it.  Default, of one folder: report.html in it;
        of one file: the same name with .html"""  # noqa: E501
        tensorboard: Path | None = None
        """also write the curves as TensorBoard event files into this new directory (needs jfl[tensorboard])"""  # noqa: E501

    return Report


def main(directories, out: Path | None = None, tensorboard: Path | None = None) -> str:
    """Write the page of some folders or files, FILE.md and FILE_files beside it -> what was
    written, in words.

    Args:
        out: FILE.html; default, of one, report.html in the folder or the file's name.  tensorboard:
            a new directory for the curves as event files too.

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
    found = [read.read(d, label) for d, label in zip(directories, _labels(directories))]
    first = found[0].path
    out = (
        Path(out)
        if out is not None
        else first / "report.html"
        if first.is_dir()
        else first.with_suffix(".html")
    )
    beside, folder = _places(out)
    try:
        document = sections.assemble(found)
        text, pictures = markup.markdown(document, folder.name)
        page = markup.page(document)
        f"{text}{page}{out}{tensorboard}".encode()
    except UnicodeEncodeError as error:  # a folder's name may be any bytes
        checks.fail(
            "jfl report",
            "names and words that UTF-8 can hold",
            ascii(error.object[: error.end].splitlines()[-1][-60:]),
            "Rename the folder, or mend the file that says so.",
        )
    more = "" if tensorboard is None else _tensorboard(tensorboard, found)
    for old in folder.glob("*") if folder.exists() else ():
        old.unlink()
    folder.mkdir(exist_ok=True)
    for name, content in pictures.items():
        (folder / name).write_bytes(content)
    write(beside, text)
    write(out, page)
    return f"Report: {out} and {beside}{more}"


def _labels(directories):
    """Their own names, or paths where two names are the same."""
    names, paths, places = zip(
        *((read.default_label(d), str(d), Path(d).resolve()) for d in directories)
    )
    for i, place in enumerate(places):
        if place in places[:i]:
            checks.fail(
                "jfl report",
                "each directory or file once",
                f"{paths[places.index(place)]} and {paths[i]}, which are one",
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
    beside, folder = out.with_suffix(".md"), out.with_name(out.stem + "_files")
    do = "Choose another: nothing but an earlier report is overwritten."
    for path, head in ((out, markup.HEAD), (beside, markup.MARKDOWN_HEAD)):
        if path.exists() or path.is_symlink():
            if not path.is_file() or not path.read_bytes().startswith(head.encode()):
                checks.fail(
                    "--out",
                    "a new file or an earlier report",
                    f"{path}, which is something else",
                    do,
                )
    mine = folder.is_dir() and all(MINE.fullmatch(p.name) and p.is_file() for p in folder.iterdir())
    if folder.exists() and not mine:
        checks.fail(
            "--out",
            "a new folder for pictures or an earlier one",
            f"{folder}, which is something else",
            do,
        )
    return beside, folder


def _tensorboard(logdir, found) -> str:
    """Write the curves -> what was written, in words."""
    parts, rows, hparams, failed = read.parts(found), [], {}, set()
    for label, part in parts:
        prefix = "" if len(parts) == 1 else f"{label} "
        hparams |= {(prefix + e["name"], e["seed"]): e["config"] for e in part.runs}
        failed |= {(prefix + e["name"], e["seed"]) for e in part.runs if e.get("failed")}
        rows += [r | dict(name=prefix + r["name"]) for r in part.rows]
    rows = [r | dict(failed=(r["name"], r["seed"]) in failed) for r in rows]
    folders = tables.tensorboard(logdir, rows, hparams)
    lost = len({(r["name"], r["seed"]) for r in rows if r["failed"]})
    return f", and curves in {logdir}" + (
        f"; {lost} of its {len(folders)} runs failed, as their names say" if lost else ""
    )
