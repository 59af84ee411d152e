"""Files that are whole or not there, and the code that wrote them."""

import contextlib
import errno
import functools
import hashlib
import importlib
import os
import re
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")


def write(path: str | Path, content: str | Iterable[Any]) -> None:
    """Write a file, a text or parts of bytes, so that a reader, also after a crash, sees the old
    one or the new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as file:
            for part in [content.encode()] if isinstance(content, str) else content:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:  # of a write or a flush it names no file
        error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):  # what went wrong above is what to tell
            temporary.unlink(missing_ok=True)
    if hasattr(os, "O_DIRECTORY"):  # the new name is on the disk too; not on Windows
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno != errno.EINVAL:  # of a file system that cannot
                raise
        finally:
            os.close(folder)


def temporary(path: str | Path) -> bool:
    """True for a file that `write` was killed over."""
    return bool(TEMPORARY.fullmatch(Path(path).name))


@functools.cache
def source() -> str:
    """jfl's own code: in a working copy the version does not change with it."""
    package = Path(__file__).parents[1]
    kernels = Path(str(importlib.import_module("jfl.kernels").__file__)).parent
    parts = [p.read_bytes() for folder in (package, kernels) for p in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
