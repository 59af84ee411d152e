"""The exceptions that jfl raises."""

from typing import Any


class ArgumentError(ValueError):
    """An argument that cannot be used; the message says what was expected and what was passed."""


class NotAnalysable(ArgumentError):
    """A plan that no theorem known to jfl covers under this view, so that nothing is proved."""


class DataUnavailable(ArgumentError):
    """A dataset, a file or a column that is not on this machine."""


class ResumeRefused(ArgumentError):
    """A directory with another run than the requested one; the message says what differs."""


class HealthError(RuntimeError):
    """A run that must not be trusted.

    Attributes:
        run: the state of the run, or the Sweep of a sweep.
        health: the counts of the problems.
    """

    def __init__(self, message: str, run: Any, health: Any):
        super().__init__(message)
        self.run, self.health = run, health
