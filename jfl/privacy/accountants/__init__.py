"""Accountants: pure functions from events to epsilon or delta, which know no plan."""

from ...core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
