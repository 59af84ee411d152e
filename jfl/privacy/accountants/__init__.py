"""Pure functions from events to epsilon or delta; no plan in sight."""

from ...core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
