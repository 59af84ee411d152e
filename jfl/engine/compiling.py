"""Functions that log compilations, and that cache compiled programs on disk."""

import contextlib
import logging
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax

from ..core.records import Plan

CONFIG: Any = jax.config  # its type stubs do not list the options
LOGGER = logging.getLogger("jfl")


@contextlib.contextmanager
def log_compilation(plan: Plan) -> Generator[None]:
    """Log which programs the `with` block compiles, and how long that takes."""
    if not LOGGER.isEnabledFor(logging.INFO):
        yield
        return
    start, durations = time.perf_counter(), []

    def on_event(event: str, seconds: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            durations.append(seconds)

    monitoring: Any = jax.monitoring  # its type stubs reject this form of a listener
    monitoring.register_event_duration_secs_listener(on_event)
    try:
        yield
    finally:
        monitoring.unregister_event_duration_listener(on_event)
        if durations:
            LOGGER.info(
                "compiled %d program(s) in %.1f s of %.1f s: %s",
                len(durations),
                sum(durations),
                time.perf_counter() - start,
                repr(plan).splitlines()[0],
            )


def keep_compiled_programs(folder: str | Path | None = None) -> Path:
    """Cache compiled programs on disk, so that a later process does not compile them again.

    The command line does this by default.  A cached program is used for the same computation and
    shapes, on the same device and with the same version of JAX.

    Args:
        folder: where to store programs.  None means $JFL_CACHE_DIR/programs if that variable is
            set, and otherwise jfl/programs in the user's cache directory.

    Returns:
        The folder.  If `folder` is None and JAX already has a cache, this is the folder of that
        cache.

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
