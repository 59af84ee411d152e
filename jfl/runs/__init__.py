"""Runs on disk: configurations, training, sweeps, checkpoints and records."""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
