"""What is compiled: said in the log, and kept on disk."""

import contextlib
import logging
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax

from ..core.records import Plan

CONFIG: Any = jax.config  # whose type does not name its options
LOGGER = logging.getLogger("jfl")


@contextlib.contextmanager
def log_compilation(plan: Plan) -> Generator[None]:
    """Say in the log what is compiled, and how long it took."""
    if not LOGGER.isEnabledFor(logging.INFO):
        yield
        return
    begun, spent = time.perf_counter(), []

    def heard(event: str, seconds: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            spent.append(seconds)

    monitoring: Any = jax.monitoring  # whose type asks for one more form of a listener
    monitoring.register_event_duration_secs_listener(heard)
    try:
        yield
    finally:
        monitoring.unregister_event_duration_listener(heard)
        if spent:
            LOGGER.info(
                "compiled %d program(s) in %.1f s of %.1f s: %s",
                len(spent),
                sum(spent),
                time.perf_counter() - begun,
                repr(plan).splitlines()[0],
            )


def keep_compiled_programs(folder: str | Path | None = None) -> Path:
    """Keep compiled programs on disk, so that a later process does not compile them again.

    The command line does so by itself.  A program is found again where its code, its shapes, the
    versions of jax and the device are the same.

    Args:
        folder: None: programs in $JFL_CACHE_DIR, else in the folder jfl of the user's cache.

    Returns:
        The folder: one that was set before in jax's own configuration stays.

    Example:
        >>> jfl.keep_compiled_programs()  # doctest: +SKIP
    """
    if folder is None and CONFIG.jax_compilation_cache_dir is not None:
        return Path(CONFIG.jax_compilation_cache_dir)
    if folder is None:
        base = os.environ.get("JFL_CACHE_DIR") or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jfl"
        )
        folder = Path(base) / "programs"
    folder = Path(folder).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder
