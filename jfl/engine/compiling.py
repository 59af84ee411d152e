"""What happens before a program runs: its stages with their seconds, and programs kept on disk."""

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import jax

CONFIG: Any = jax.config  # its type stubs do not list the options
LOGGER = logging.getLogger("jfl")
# The stages before a program runs, by the names of JAX's events.
STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}
JAX_MIN_COMPILE_SECONDS = 1.0  # JAX's default for programs that it keeps on disk
# A program that is not ready after so many seconds is reported once per process.
SLOW_SECONDS = 10.0


class _Clock:
    """The seconds that this process has spent on each stage since the clock was made.

    The seconds of a stage leave out the stages of other programs that JAX prepares meanwhile.

    Attributes:
        seconds: the seconds of each stage, by its name in STAGES.
        running: the stages that have begun and not ended, as pairs (name, time.time()).
        observers: functions that are called with the name of the present stage when that changes,
            and with "" when no program is being prepared any more.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES.values(), 0.0)
        self.running: list[tuple[str, float]] = []
        self.observers: list[Callable[[str], None]] = []
        monitoring: Any = jax.monitoring  # its types require another signature of listeners
        monitoring.register_scalar_listener(self._begin)
        monitoring.register_event_time_span_listener(self._end)

    def _begin(self, event: str, value: float, **_: Any) -> None:
        if event in STAGES:
            self.running.append((STAGES[event], value))
            self._notify()

    def _end(self, event: str, start: float, end: float, **_: Any) -> None:
        if event in STAGES and (stage := (STAGES[event], start)) in self.running:
            self.running.remove(stage)
            self.seconds[stage[0]] += end - start
            if self.running:
                self.seconds[self.running[-1][0]] -= end - start
            self._notify()

    def _notify(self) -> None:
        for observe in self.observers:
            observe(self.running[-1][0] if self.running else "")


_explained: list[str] = []  # what was running when a slow start was explained


@functools.cache
def _clock() -> _Clock:
    """Return the clock of this process, which starts at the first call."""
    return _Clock()


def stage_seconds() -> dict[str, float]:
    """Return the seconds that this process has spent on each stage since the first call.

    Only differences are meaningful.
    """
    return dict(_clock().seconds)


def stages_text(seconds: Mapping[str, float]) -> str:
    """Describe the seconds of stages, such as "4.2 s tracing, 0.3 s lowering, 29.1 s compiling"."""
    return ", ".join(f"{spent:.1f} s {stage}" for stage, spent in seconds.items())


def _slow_start_text(name: str, elapsed: float, seconds: Mapping[str, float], current: str) -> str:
    """Explain why a program is not ready after `elapsed` seconds, and how to start sooner."""
    text = (
        f"{name}: the program is not ready after {elapsed:.0f} s ({stages_text(seconds)}; now "
        f"{current}). Calls with the same shapes reuse it in this process. "
    )
    if CONFIG.jax_compilation_cache_dir is None:
        text += "For other processes, jfl.keep_compiled_programs() stores it. "
    return text + (
        "If the model has many equal layers, a loop over them, such as flax.linen.scan, is traced "
        "and compiled faster, but its rounds may then take longer."
    )


def _start_timer(seconds: float, function: Callable[[], None]) -> threading.Timer:
    """Call a function in another thread after some seconds, unless the timer is cancelled."""
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer


@contextlib.contextmanager
def report_stages(
    name: str, show: Callable[[str], None] | None = None
) -> Generator[dict[str, float]]:
    """Report how long JAX traces, lowers and compiles programs in a `with` block, and runs them.

    The logger "jfl" reports the seconds of each stage at level INFO.  If a program is not ready
    after SLOW_SECONDS, and most of the time was spent on its stages, it says at level WARNING what
    takes so long and how to make it shorter, once per process.

    Args:
        name: what the block runs, for messages.
        show: a function that is called with the name of the present stage when that changes, and
            with "" when no program is being prepared any more.

    Yields:
        A dictionary that receives seconds when the block ends: of the stages "tracing", "lowering"
        and "compiling", and of the rest as "running".
    """
    clock, begun, before, spent = _clock(), time.perf_counter(), stage_seconds(), {}
    ended = threading.Event()

    def since_then() -> dict[str, float]:
        return {stage: seconds - before[stage] for stage, seconds in clock.seconds.items()}

    def explain() -> None:
        nonlocal timer
        seconds, running = since_then(), list(clock.running)
        if not running or ended.is_set() or _explained:
            return
        (first, start), current = running[0], running[-1][0]
        seconds[first] += time.time() - start
        elapsed = time.perf_counter() - begun
        # A short stage in the middle of a long run is no slow start.  If the stage continues, it
        # may become the larger part.
        wait = elapsed - 2 * sum(seconds.values())
        if wait > 0:
            timer = _start_timer(wait, explain)
        else:
            _explained.append(name)
            LOGGER.warning(_slow_start_text(name, elapsed, seconds, current))

    def look(stage: str) -> None:
        if stage and time.perf_counter() - begun > SLOW_SECONDS:
            timer.cancel()
            explain()

    timer = _start_timer(SLOW_SECONDS, explain)
    observers = [look] if show is None else [look, show]
    clock.observers.extend(observers)
    try:
        yield spent
    finally:
        ended.set()
        timer.cancel()
        for observer in observers:
            clock.observers.remove(observer)
        prepared = since_then()
        running = time.perf_counter() - begun - sum(prepared.values())
        spent.update(prepared, running=max(0.0, running))
        if spent["compiling"]:
            LOGGER.info("%s: %s", name, stages_text(spent))


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
    # By default JAX keeps what takes a second to compile.  The many programs of less than that were
    # half of the time before the first round of a second process.
    if CONFIG.jax_persistent_cache_min_compile_time_secs == JAX_MIN_COMPILE_SECONDS:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return folder
