"""The exceptions that jfl raises."""

from typing import Any


class ArgumentError(ValueError):
    """Raised for an invalid argument; the message says what was expected and what was passed."""


class NotAnalysable(ArgumentError):
    """Raised if jfl knows no theorem for a plan under the requested unit, adjacency and view."""


class DataUnavailable(ArgumentError):
    """Raised if a dataset or a file is not on this machine, or cannot be read."""


class ResumeRefused(ArgumentError):
    """Raised if a directory contains a different run; the message says what differs."""


class HealthError(RuntimeError):
    """Raised if the result of a run must not be trusted, because a Health count is positive.

    Attributes:
        run: the state of the run; for a sweep, its Sweep.
        health: the counts of the problems.
    """

    def __init__(self, message: str, run: Any, health: Any):
        super().__init__(message)
        self.run, self.health = run, health
