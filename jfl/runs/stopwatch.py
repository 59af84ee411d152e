"""The duration of a run, and how much of it was compilation."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax

_compilations: list[float] = []  # seconds of each since the first call of `compile_seconds`


def compile_seconds() -> float:
    """Return the seconds that this process has spent on tracing and compilation since the first
    call; only differences are meaningful."""
    if not _compilations:
        _compilations.append(0.0)

        def listen(event: str, seconds: float, **_: Any) -> None:
            if "/compile/" in event:
                _compilations.append(seconds)

        monitoring: Any = jax.monitoring  # its type requires another signature of a listener
        monitoring.register_event_duration_secs_listener(listen)
    return sum(_compilations)


class Stopwatch:
    """A clock that starts when it is made and also counts the seconds of compilation."""

    def __init__(self) -> None:
        self._begun, self._compiled = time.perf_counter(), compile_seconds()

    def read(self) -> tuple[float, float]:
        """Return the seconds since the start, and how many of them were compilation."""
        return time.perf_counter() - self._begun, compile_seconds() - self._compiled

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        pause = Stopwatch()
        try:
            yield
        finally:
            seconds, compiled = pause.read()
            self._begun += seconds
            self._compiled += compiled
