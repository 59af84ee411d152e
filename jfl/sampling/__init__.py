"""Samplers: which clients participate in a round, and which rows a local step uses."""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(
    __name__, __path__, offers=("clients", "rotation", "availability")
)
