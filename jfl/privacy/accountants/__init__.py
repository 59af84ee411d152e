"""Privacy accountants: pure functions from events to epsilon or delta, independent of plans."""

from ...core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
