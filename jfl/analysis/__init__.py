"""Measurements before training: differences between clients, and statistics of public data."""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
