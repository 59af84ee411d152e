"""The exceptions that jfl raises."""

from typing import Any


class ArgumentError(ValueError):
    """An argument that cannot be used; the message says what was expected and what was passed."""


class NotAnalysable(ArgumentError):
    """A plan for which jfl knows no theorem under the requested unit, adjacency and view."""


class DataUnavailable(ArgumentError):
    """A dataset or a file that is not on this machine, or cannot be read."""


class ResumeRefused(ArgumentError):
    """A directory that contains a different run; the message says what differs."""


class HealthError(RuntimeError):
    """A run whose result must not be trusted, because a Health count is positive.

    Attributes:
        run: the state of the run, or the Sweep of a sweep.
        health: the counts of the problems.
    """

    def __init__(self, message: str, run: Any, health: Any):
        super().__init__(message)
        self.run, self.health = run, health
