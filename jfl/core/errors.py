"""What jfl raises.  Code that catches one of these catches what it means, and nothing else."""

from typing import Any


class ArgumentError(ValueError):
    """An argument that cannot be used; the message says where, what was needed, what came."""


class NotAnalysable(ArgumentError):
    """No theorem that jfl knows covers this plan under this view: nothing is proved."""


class DataUnavailable(ArgumentError):
    """A dataset, a file or a column that is not on this machine."""


class ResumeRefused(ArgumentError):
    """A directory holds another run than the one asked for; the message says what differs."""


class HealthError(RuntimeError):
    """A run that must not be trusted.

    Attributes:
        run: its state (of a sweep: the Sweep), which is not lost.
        health: the counts of what happened.
    """

    def __init__(self, message: str, run: Any, health: Any):
        super().__init__(message)
        self.run, self.health = run, health
