"""Small breaks of the library, each of which a test must see."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from helpers.paths import ROOT


class Mutant(NamedTuple):
    file: str  # relative to the repository
    old: str  # occurs once in it
    new: str
    tests: str  # what pytest is given: a file, or tests of a file by their ids
    slow: bool = False  # whether all of them are slow


PARTS = ("kernels", "tests", "experiments", "docs", "README.md", "pyproject.toml")
ELSEWHERE, FAILED, PASSED = 77, 1, 0  # of pytest's exit codes
# An editable install would import the repository: the copy comes first on the path, and a run that
# took another package says so.
WHOSE = """
from pathlib import Path
import pytest

def pytest_sessionstart(session):
    import jfl, jfl.kernels
    here = Path(__file__).parent
    for module in (jfl, jfl.kernels):
        if not Path(module.__file__).is_relative_to(here):
            pytest.exit(f"{module.__file__} is not of {here}", returncode=%d)
"""


def copied(folder: Path) -> Path:
    """The repository in a folder, with jfl.kernels in the place where it is imported from."""
    ignored = shutil.ignore_patterns("__pycache__", ".pytest_cache", "results")
    shutil.copytree(ROOT / "jfl", folder / "jfl", ignore=ignored)
    for name in PARTS:
        place = ROOT / name
        if place.is_dir():
            shutil.copytree(place, folder / name, ignore=ignored)
        elif place.exists():
            shutil.copy(place, folder / name)
    shutil.copytree(ROOT / "kernels", folder / "jfl" / "kernels", ignore=ignored)
    (folder / "whose_package.py").write_text(WHOSE % ELSEWHERE)
    return folder


def apply(mutant: Mutant, folder: Path) -> None:
    """Raises: ValueError: where the text that is to be replaced does not occur once."""
    file = folder / (f"jfl/{mutant.file}" if mutant.file.startswith("kernels/") else mutant.file)
    text = file.read_text()
    if text.count(mutant.old) != 1 or mutant.old == mutant.new:
        raise ValueError(f"{mutant.file}: expected a text that occurs once, but got {mutant.old!r}")
    file.write_text(text.replace(mutant.old, mutant.new))


def outcome(folder: Path, tests: str, slow: bool = False) -> int:
    """Exit code of the tests of a copy: those that run by default, or the slow ones too.

    Raises:
        RuntimeError: where none of them was collected: they fail nothing.
    """
    which = ["-m", ""] if slow else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        + ["-p", "whose_package", *which, *tests.split()],
        cwd=folder,
        env=os.environ | dict(PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1"),
        capture_output=True,
        text=True,
    )
    if done.returncode not in (FAILED, PASSED):
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return done.returncode


def run(mutant: Mutant, folder: Path) -> bool:
    """Whether a test fails of a copy, in an empty folder, with this break."""
    apply(mutant, copied(folder))
    return outcome(folder, mutant.tests, mutant.slow) == FAILED
