"""The directory of a run or a sweep, checked before use and locked by one process at a time."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from ..core import checks
from ..core.files import temporary

LOCK = ".lock"


def checked(out, resume: bool) -> Path:
    """Check the directory `out` and return its path.

    It is not created, so that a rejected run leaves nothing behind.

    Args:
        out: the name of a directory.
        resume: whether the directory may contain files, namely those of the run to resume.

    Raises:
        ArgumentError: If it is not writable, or contains files and `resume` is False.
    """
    if not str(out):
        checks.fail(
            "--out",
            "the name of a directory",
            "an empty one",
            "Use a dot for the current directory.",
        )
    out = Path(out)
    if has_files(out) and not resume:
        checks.fail(
            "--out",
            "an empty or new directory",
            f"{out} with files in it",
            "Use --resume to continue that run, or another --out: nothing is overwritten.",
        )
    existing = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        checks.fail("--out", "a writable directory", f"{existing}, which is not")
    return out


def has_files(out: Path) -> bool:
    """Return whether a directory has files besides a lock and remains of an interrupted write."""
    return out.is_dir() and any(p.name != LOCK and not temporary(p) for p in out.iterdir())


@contextlib.contextmanager
def locked(out: Path):
    """Lock a run directory while the context is active.

    Two processes in one directory would make two releases, of which only one is accounted for.  The
    kernel releases the lock when the process ends, even if it is killed.

    Raises:
        ArgumentError: If the directory is not writable, is locked by another process, or is on a
            file system without locks.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        open(out / LOCK, "a").close()
    except OSError as error:
        checks.fail("--out", "a writable directory", f"{error.filename}: {error.strerror}")
    # A soft lock, the fallback on file systems without locks, would survive a kill.
    lock = FileLock(out / LOCK, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        checks.fail(
            "--out",
            "a directory that no other process uses",
            f"{out}",
            "Wait for that process, or use another directory.",
        )
    except (OSError, NotImplementedError) as error:
        checks.fail(
            "--out",
            "a file system with locks",
            f"{out}: {getattr(error, 'strerror', None) or error}",
            "Two processes in one directory would go unnoticed: use a local directory.",
        )
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def disk_errors_explained(where: str, kept: Callable[[], str]):
    """While the context is active, explain errors of a full or read-only disk.

    The message states what is kept, and how to resume.

    Args:
        where: what was written, such as "run DIR".
        kept: a function that returns a sentence about what is kept.
    """
    try:
        yield
    except ConnectionError:  # a lost terminal or process, not a disk error
        raise
    except OSError as error:
        raise OSError(
            f"{where}: expected a writable disk, but got {error.strerror or error}, for "
            f"{error.filename or 'a file'}. {kept()} Free some space and use --resume."
        ) from None
