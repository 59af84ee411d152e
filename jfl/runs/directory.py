"""The directory of a run or a sweep: checked before it is used, held by one process at a time."""

import contextlib
import os
from pathlib import Path

from filelock import FileLock, Timeout

from ..core import checks
from ..core.files import temporary
from .checkpoint import Checkpoints

LOCK = ".lock"


def checked(out, resume: bool) -> Path:
    """The directory `out`, checked but not made: a run that is refused leaves nothing behind.

    Args:
        out: the name of a directory.
        resume: whether files in it are the beginning of this run.

    Returns:
        Its path.

    Raises:
        ArgumentError: where it cannot be written, or holds files and `resume` is False.
    """
    if not str(out):
        checks.fail(
            "--out",
            "the name of a directory",
            "an empty one",
            "For the current directory give a dot.",
        )
    out = Path(out)
    if out.exists() and not out.is_dir():
        checks.fail("--out", "a directory", f"{out} is a file")
    if has_files(out) and not resume:
        checks.fail(
            "--out",
            "an empty or new directory",
            f"{out} with files in it",
            "Use --resume to go on with that run, or another --out: nothing is overwritten.",
        )
    existing = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        checks.fail("--out", "a place that can be written", f"{existing}, which cannot")
    return out


def has_files(out: Path) -> bool:
    """Whether a directory holds more than a lock and what an interrupted write left."""
    return out.is_dir() and any(p.name != LOCK and not temporary(p) for p in out.iterdir())


@contextlib.contextmanager
def locked(out: Path):
    """Hold a run directory: two processes in one would release twice what is accounted once.

    The kernel lets go of the lock when the process ends, also after a kill.

    Raises:
        ArgumentError: where the directory cannot be written, another process holds it, or its file
            system has no locks.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        open(out / LOCK, "a").close()
    except OSError as error:
        checks.fail("--out", "a place that can be written", f"{error.filename}: {error.strerror}")
    # a lock of another kind, where the file system has none, would survive a kill
    lock = FileLock(out / LOCK, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        checks.fail(
            "--out",
            "a directory that no other process runs in",
            f"{out}",
            "Wait for it, or use another.",
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
def disk_errors_explained(out: Path, checkpoints: Checkpoints):
    """Say of a disk that is full or cannot be written what is kept, and how to go on."""
    try:
        yield
    except ConnectionError:  # of the terminal, or of another process
        raise
    except OSError as error:
        last = checkpoints.latest()
        kept = f"round {last} in {out}" if last else "none"
        raise OSError(
            f"run {out}: expected a disk that can be written, but got "
            f"{error.strerror or error}, for "
            f"{error.filename or 'a file'}. Last good checkpoint: {kept}. Make room, then --resume "
            f"goes on."
        ) from None
